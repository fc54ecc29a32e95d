# SPDX-License-Identifier: Apache-2.0
"""What tests of compiled programs share: that no pool is copied or selected."""

import re

import jax
import pytest

from jax_paged.testing import pool_sized_ops

_MOVES = re.compile(r" (copy|copy-start|select|broadcast|concatenate|dynamic-update-slice)\(")

gathers_in_place = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="the XLA of jax 0.7 copies the pool to gather slots"
)


def copies_and_selects(compiled: jax.stages.Compiled, pool) -> list[str]:
    """The operations as large as the pool that move it."""
    return [line for line in pool_sized_ops(compiled, pool) if _MOVES.search(line)]


def assert_no_pool_is_copied(engine) -> None:
    """In no step of an engine with a draft model, whose pools count too."""
    pools = engine.state.k_pages, engine._runner.device.drafter.k_pages
    smallest = min(pools, key=lambda pool: pool.size)
    for program in engine._runner.steps.values():
        assert pool_sized_ops(program, smallest) == []
