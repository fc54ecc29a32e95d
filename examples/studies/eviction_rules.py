# SPDX-License-Identifier: Apache-2.0
"""Which pages a row keeps, by how much attention they have had."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rule(NamedTuple):
    """Keeps the first pages, the newest, and of the others those with most attention so far."""

    budget: Any  # pages, all in all
    first: Any
    newest: Any
    by_layer: Any  # whether each layer forgets for itself


RULES = {
    "newest": lambda budget: Rule(budget, 0, budget, False),
    "first and newest": lambda budget: Rule(budget, 1, budget - 1, False),
    "mass": lambda budget: Rule(budget, 0, budget // 2, False),
    "mass by layer": lambda budget: Rule(budget, 0, budget // 2, True),
}


def keep(mass: jax.Array, last: jax.Array, rule: Rule) -> jax.Array:
    """Which pages to keep, bool[layers, rows, pages]; −inf in `mass` is one forgotten before."""
    page = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None, None]
    budget, first, newest, by_layer, last = (x[None, :, None] for x in (*rule, last))
    mass = jnp.where(by_layer, mass, jnp.mean(mass, axis=0, keepdims=True))
    is_safe = (page < first) | (page > last - newest)
    mass = jnp.where(is_safe, jnp.inf, mass)
    mass = jnp.where(page > last, -jnp.inf, mass)
    rank = jnp.argsort(jnp.argsort(mass, axis=-1, descending=True), axis=-1)
    return (rank < budget) & (mass > -jnp.inf)
