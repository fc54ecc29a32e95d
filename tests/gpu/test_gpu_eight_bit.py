# SPDX-License-Identifier: Apache-2.0
"""8-bit pages on a GPU, of every head_dim that has a tensor-core kernel."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import ragged_paged_attention
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.options import eight_bit

pytestmark = pytest.mark.gpu

KINDS = ("float8_e4m3fn", "float8_e5m2", "int8")
HEAD_DIMS = (64, 128, 192, 256)


def run(batch, **options):
    arguments, defaults = batch.ragged()
    return ragged_paged_attention(
        *arguments, **defaults | options, return_lse=True, implementation="native"
    )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_are_read_as_their_values(kind, head_dim, layout):
    # One key of weight 1, so that out is V; f16 holds each code exactly.
    case = Case("codes", 4, 1, head_dim, layout=layout)
    batch = make_batch(case, np.float16, [1] * 4, [1] * 4)
    codes = np.resize(np.arange(256, dtype=np.uint8), (4, head_dim)).view(jnp.dtype(kind))
    codes = np.where(np.isfinite(codes.astype("f4")), codes, np.zeros_like(codes))
    pages = {name: np.zeros(batch.k_pages.shape, codes.dtype) for name in ("k_pages", "v_pages")}
    for row in range(4):
        pages["v_pages"][batch.page_table[row, 0], 0, 0] = codes[row]
    out, _ = run(dataclasses.replace(batch, **pages))
    expected = np.broadcast_to(codes.astype("f4")[:, None], out.shape)
    np.testing.assert_array_equal(np.asarray(out, "f4"), expected)


@pytest.mark.parametrize("splits", [{}, {"num_kv_splits": 3}, {"split_tokens": 128}], ids=str)
@pytest.mark.parametrize("scale", ["scalar", "head", "token"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_and_prefill_match_float64_softmax(head_dim, kind, scale, splits):
    layout = ("HND", "NHD")[(head_dim // 64 + KINDS.index(kind)) % 2]
    dtype = ("bfloat16", "float16")[(head_dim // 64 + len(splits)) % 2]
    case = Case("8bit", 8, 2, head_dim, layout=layout)
    batch = make_batch(case, jnp.dtype(dtype), [1, 130, 0, 1, 3], [3000, 200, 40, 16, 700])
    stored, real, scales = eight_bit(batch, kind, scale, np.random.default_rng(head_dim))
    assert_attention_close(*run(stored, **scales, **splits), *dense_oracle(real))


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("group", [1, 8, 24])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_groups_pages_and_options_match_float64_softmax(head_dim, group, page_size):
    case = Case("8bit", 2 * group, 2, head_dim, page_size=page_size)
    batch = make_batch(case, jnp.bfloat16, [1, 2, 40, 1], [1000, 65, 60, 257], seed=group)
    stored, real, scales = eight_bit(batch, "float8_e4m3fn", "head", np.random.default_rng(group))
    assert_attention_close(*run(stored, **scales), *dense_oracle(real))
    options = {
        "sliding_window": 77, "soft_cap": 30.0,
        "alibi_slopes": np.float32(2.0 ** -np.linspace(1, 8, 2 * group)),
        "sinks": np.linspace(-1, 1, 2 * group, dtype="f4"),
    }  # fmt: skip
    assert_attention_close(*run(stored, **scales, **options), *dense_oracle(real, **options))
