# SPDX-License-Identifier: Apache-2.0
"""How much of a query's attention falls on each page: what an eviction policy asks for."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.checks import Implementation, check_choice
from jax_paged.layout import (
    LAYOUTS,
    Layout,
    check_axes,
    is_one_pool,
    is_stacked,
    make_shape,
    pages_shape,
)
from jax_paged.ops.attention import check_call, paged_attention
from jax_paged.ops.options import Arrays, Static, documented


@documented
def page_attention_mass(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    k_pages: Float[Array, "..."],
    page_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    layer: Int[Array, ""] | int | None = None,
    sm_scale: Float[Array, ""] | float | None = None,
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    k_scale: Float[Array, "..."] | float | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> jax.Array:
    """Tells how much of each row's attention falls on each of its pages, in a decode step.

    mass[i, h, p] = Σ_j softmax_j(logit[i, j, h]) over the tokens j on page_table[i, p], with the
    logits of `paged_attention`. Over many steps the sum of it tells which pages matter (the heavy
    hitters of H2O, Zhang et al. 2023, at the grain of pages).

    Args:
      q, page_table, seq_lens: as for `paged_attention`. A page whose id is out of range gets 0, and
        the others share the whole: so a table with holes tells the mass of what is left.
      k_pages: as for `paged_attention`. Values take no part.
      {options}
      sinks: as for `paged_attention`. What they take is missing from the sum over the pages.

    Returns:
      f32[num_seqs, num_q_heads, pages_per_seq]. The masses of a row and head add up to 1, less what
      sinks take. They are exactly 0 in a row that sees no key, and on pages that a window hides.
      NaN in unused pages or slots never reaches them.

    Raises:
      ValueError: an argument's shape, dtype or static value is wrong.
      NotImplementedError: the native kernels do not take this head_dim; or a derivative is asked
        for, which the masses do not have.

    In a program that writes to the pages later, let that write depend on the masses. XLA does not
    order the two by itself, and may then copy the pool for the sake of the masses.

    alibi_slopes, rope and trees are not taken. The work is one call of `paged_attention` that has
    every page as a row of its own, with q repeated. vmap runs one call after another.

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((2, 1, 4, 8))  # two pages of four tokens that are all alike
    >>> q, table = jnp.ones((1, 2, 8)), jnp.array([[1, 0, -1]])
    >>> print(page_attention_mass(q, pages, table, jnp.array([5]))[0, 0])
    [0.8 0.2 0. ]
    """
    given = locals()
    check_choice("layout", layout, LAYOUTS)
    check_axes("k_pages", k_pages, layout, "k")
    values = values_like(k_pages, layout)
    static, arrays = check_call(given | {"v_pages": values})
    return _mass(static, {name: x for name, x in arrays.items() if name != "v_pages"})


def values_like(k_pages: jax.Array, layout: Layout) -> jax.ShapeDtypeStruct | None:
    """V pages that have K's head_dim; None where k_pages hold V."""
    if is_one_pool(layout):
        return None
    shape = make_shape(pages_shape(k_pages, layout), layout, "v")
    return jax.ShapeDtypeStruct(shape, k_pages.dtype)


def pages_as_rows(arrays: Arrays, page_size: int) -> Arrays:
    """What `paged_attention` needs to see the keys on each page that the row's query sees.

    A page's query stands at the end of the page, not of the row: so what a window hides there is
    said anew, counted from the page's end.
    """
    table, seq_lens = arrays["page_table"], arrays["seq_lens"]
    count, width = table.shape

    def of_rows(name: str) -> jax.Array:
        value = jnp.asarray(arrays.get(name, 0), jnp.int32)
        return jnp.broadcast_to(jnp.maximum(value, 0), (count,))[:, None]

    window, pinned, offset = map(of_rows, ("sliding_window", "num_pinned", "slot_offset"))
    stored = jnp.maximum(seq_lens, 0)[:, None] - offset
    stored = jnp.clip(stored, 0, width * page_size)
    begin = jnp.arange(width, dtype=jnp.int32)[None] * page_size
    length = jnp.clip(stored - begin, 0, page_size)
    rows = {"page_table": table.reshape(-1, 1)}
    if "sliding_window" in arrays:
        # The window shows slots [0, pinned) and [first, stored).
        first = jnp.where(window > 0, stored - jnp.maximum(window - pinned, 1), 0)
        first = jnp.clip(first - begin, 0, length)
        pinned = jnp.clip(pinned - begin, 0, length)
        length = jnp.where(first < length, length, pinned)
        window = jnp.where(first < length, length - first + pinned, 0)
        rows |= {"sliding_window": window.reshape(-1), "num_pinned": pinned.reshape(-1)}
    return rows | {"seq_lens": length.reshape(-1)}


@functools.partial(jax.jit, static_argnums=0)
def _shares(static: Static, arrays: Arrays) -> jax.Array:
    known = dict(static)
    q, k_pages, layout = arrays["q"], arrays["k_pages"], known["layout"]
    count, width = arrays["page_table"].shape
    options: dict[str, Any] = {
        name: known.get(name) for name in ("soft_cap", "layout", "implementation")
    }
    options |= {name: arrays.get(name) for name in ("sm_scale", "k_scale")}
    if is_stacked(k_pages, layout):
        options["layer"] = arrays["layer"]
    values = values_like(k_pages, layout)
    if values is not None:
        values = k_pages.reshape(values.shape)  # nobody looks at them
    _, lse = paged_attention(
        jnp.repeat(q, width, axis=0), k_pages, values, return_lse=True,
        **pages_as_rows(arrays, pages_shape(k_pages, layout).page_size), **options,
    )  # fmt: skip
    lse = lse.reshape(count, width, q.shape[1]).swapaxes(1, 2)
    sinks = arrays.get("sinks", jnp.full(q.shape[1], -jnp.inf, jnp.float32))[None, :, None]
    top = jnp.maximum(jnp.max(lse, axis=-1, keepdims=True, initial=-jnp.inf), sinks)
    top = jnp.where(jnp.isneginf(top), jnp.float32(0), top)
    weights = jnp.exp(lse - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top)
    return weights / jnp.where(total > 0, total, jnp.float32(1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mass(static: Static, arrays: Arrays) -> jax.Array:
    return _shares(static, arrays)


def _forward(static: Static, arrays: Arrays) -> tuple[jax.Array, None]:
    return _shares(static, arrays), None


def _backward(static: Static, nothing: None, cotangent: jax.Array):
    raise NotImplementedError(
        "page_attention_mass: it has no derivative; put jax.lax.stop_gradient around it"
    )


_mass.defvjp(_forward, _backward)
