# SPDX-License-Identifier: Apache-2.0
"""Token trees in the emulated CUDA kernels, against float64 softmax over each node's ancestors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from emulation import Device, emulate
from tiers import first_of
from tree_batches import build

from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import random_parents, trees_of


@pytest.mark.parametrize("seed", first_of(range(80), 20))
def test_trees_match_float64(seed):
    batch, options, split = build(seed)
    split = {name: value for name, value in split.items() if value}
    device = Device(num_workers=1 + seed % 7, stages=2 + seed % 3, seed=seed)
    result = emulate(batch, device, **options, **split)
    assert_attention_close(*result, *dense_oracle(batch, **options))
    again = emulate(batch, dataclasses.replace(device, seed=seed + 1), **options, **split)
    for a, b in zip(result, again, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("extra", [{}, {"sliding_window": 40}])
def test_chains_have_the_bits_of_rows_without_a_tree(extra):
    """And so do long rows beside them, which the prefill kernel keeps."""
    rng = np.random.default_rng(0)
    case = Case("chains", 8, 2, 64)
    batch = make_batch(case, jnp.float16, [3, 30, 40], [90, 100, 50], seed=1)
    chains = trees_of([random_parents(rng, n, "chain") for n in (9, 30, 0)])
    buffers = {}
    got = emulate(batch, buffers=buffers, **extra, **chains)
    assert buffers["chosen_prefill_rows"] > 0
    for a, b in zip(got, emulate(batch, **extra), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
