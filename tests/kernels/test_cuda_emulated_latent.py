# SPDX-License-Identifier: Apache-2.0
"""The latent kernel (MLA on tensor cores) in the emulator: launches, orders, devices, edges.

What the op should do, tests/ops/test_mla.py asks of it with the other implementations.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from bits import assert_same_bits
from emulation import Device, emulate_mla, limits

from jax_paged.testing import assert_attention_close, dense_oracle
from jax_paged.testing.mla import eight_bit, make_mla

DTYPES = ("bfloat16", "float16")


def check(batch, device=None, **options):
    """Runs a batch and compares it with the oracle; returns (out, lse)."""
    result = emulate_mla(batch, Device() if device is None else device, **options)
    assert_attention_close(*result, *dense_oracle(batch))
    return result


@pytest.mark.parametrize("heads", [1, 5, 16, 17, 32, 33, 64, 71, 128])
@pytest.mark.parametrize("page_size", [1, 5, 32, 100])
def test_decode_matches_float64_softmax_whatever_the_order(heads, page_size):
    count = heads * 7 + page_size
    lengths = [3 * page_size + count % 70, 0, 1, 64]
    batch = make_mla(576, 512, heads, [1, 1, 1, 1], lengths, page_size=page_size,
                     dtype=DTYPES[count % 2], seed=count)  # fmt: skip
    device = Device(num_workers=1 + count % 9, stages=2 + count % 3, seed=count)
    first = check(batch, device)
    assert_same_bits(emulate_mla(batch, dataclasses.replace(device, seed=count + 1)), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}, {"split_tokens": 128}], ids=str)
def test_bits_do_not_depend_on_the_order_of_ctas_warps_and_copies(options, dtype):
    batch = make_mla(64, 48, 20, [1, 1, 5, 1], [700, 3, 130, 300], dtype=dtype, seed=1)
    first = check(batch, Device(num_workers=7, seed=0), **options)
    for seed in range(1, 13):
        device = Device(num_workers=7, plan_ctas=1 + seed % 4, seed=seed)
        assert_same_bits(emulate_mla(batch, device, **options), first)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 24, 160])
def test_any_number_of_workers_serves(num_workers):
    batch = make_mla(48, 32, 3, [1, 1, 1, 0, 1], [900, 1, 0, 7, 64], dtype="bfloat16", seed=2)
    check(batch, Device(num_workers=num_workers, stages=2))


# (packed rows of a CTA, stages) for 16, 32 and 128 heads, then (rows of a prefill unit): 16-bit
# rows, and 8-bit ones.
SHAPES = {
    228: ([(16, 4), (32, 4), (64, 4)], 64, [(16, 4), (32, 4), (64, 4)], 64),  # sm_90, 100
    164: ([(16, 3), (32, 3), (64, 2)], 64, [(16, 4), (32, 4), (64, 2)], 64),  # sm_80
    100: ([(16, 2), (16, 2), (16, 2)], 16, [(16, 2), (16, 2), (16, 2)], 16),  # sm_86, 89, 120
    90: ([(0, 0)] * 3, 0, [(0, 0)] * 3, 0),
}


@pytest.mark.parametrize("kib", SHAPES)
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_the_shared_memory_of_a_device_decides_the_launch(kib, stored):
    shapes, prefill = SHAPES[kib][:2] if stored == "bfloat16" else SHAPES[kib][2:]
    for heads, shape in zip((16, 32, 128), shapes, strict=True):
        batch = make_mla(576, 512, heads, [1, 8, 1], [40, 90, 3], dtype="bfloat16", seed=heads)
        real, scale = batch, None
        if stored == "int8":
            scale = np.float32(0.03)
            batch, real = eight_bit(batch, stored, scale)
        chosen = {}
        result = emulate_mla(batch, Device(**limits(kib), stages=4), buffers=chosen, kv_scale=scale)
        assert_attention_close(*result, *dense_oracle(real))
        assert (chosen["chosen_latent_rows"], chosen["chosen_stages"]) == shape
        assert chosen["chosen_prefill_rows"] == prefill


@pytest.mark.parametrize("split_tokens", [64, 512])
def test_split_tokens_makes_a_row_independent_of_its_batch_and_of_the_workers(split_tokens):
    batch = make_mla(48, 32, 40, [1, 1, 20, 1, 2], [700, 33, 90, 800, 64], dtype="bfloat16", seed=6)
    out, lse = emulate_mla(batch, split_tokens=split_tokens)
    for row, (start, end) in enumerate(itertools.pairwise(batch.cu_q_lens)):
        device = Device(num_workers=2 + row, stages=2 + row % 3)
        result = emulate_mla(batch.alone(row), device, split_tokens=split_tokens)
        assert_same_bits(result, (out[start:end], lse[start:end]))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_at_every_length_around_a_tile(heads, causal):
    lengths = [1, 2, 3, 5, 31, 32, 33, 63, 64, 65]
    q_lens = [1 + n // 2 for n in lengths]
    batch = make_mla(64, 48, heads, q_lens, lengths, dtype="bfloat16", causal=causal, seed=heads)
    chosen = {}
    first = check(batch, Device(seed=1), buffers=chosen)
    assert chosen["chosen_prefill_rows"] == 64
    assert_same_bits(emulate_mla(batch, Device(seed=2)), first)


def test_few_queries_on_a_long_context_are_spread_over_the_workers():
    # 2 queries of 128 heads: 4 units of 64 packed rows and 32 tiles, for prefill or for stream-K.
    # There each unit costs two pieces more, if a worker has not one of them alone.
    batch = make_mla(64, 48, 128, [2, 1], [2000, 100], dtype="bfloat16", seed=3)
    positions = {}
    for num_workers in (2, 24):
        buffers = {}
        check(batch, Device(num_workers=num_workers), buffers=buffers)
        positions[num_workers] = int(buffers["workspace"][:2].view(np.int64)[0])
    assert positions == {2: 2 * 2, 24: 2 * (2 + 2) + 4 * (32 + 2)}


@pytest.mark.parametrize("heads", [16, 128])
def test_the_stored_tokens_are_read_and_no_others(heads):
    batch = make_mla(576, 512, heads, [1, 1], [70, 33], dtype="bfloat16", page_size=16, seed=3)
    touched = {}
    check(batch, Device(num_workers=3), buffers=touched)
    bytes_read = touched["kv_touched"]
    used = np.zeros(bytes_read.shape[:-1], bool)
    for row, length in enumerate([70, 33]):
        for token in range(length):
            used[..., batch.page_table[row, token // 16], token % 16] = True
    assert (bytes_read[used] == 2).all()
    assert (bytes_read[~used] == 0).all()


def test_a_negative_scale_and_none_at_all():
    batch = make_mla(64, 64, 17, [1, 9], [100, 50], dtype="float16", seed=4)
    for scale in (-0.1, 0.0):
        check(dataclasses.replace(batch, sm_scale=scale))


@pytest.mark.parametrize("num_workers", [1, 5])
@pytest.mark.parametrize("heads", [5, 128])
def test_sinks_count_once_whoever_takes_a_row(heads, num_workers):
    sinks = np.linspace(-1, 3, heads, dtype="f4")
    batch = make_mla(64, 48, heads, [1, 1, 0, 40], [300, 0, 7, 90], dtype="bfloat16", seed=9)
    result = emulate_mla(batch, Device(num_workers=num_workers), sinks=sinks)
    assert_attention_close(*result, *dense_oracle(batch, sinks=sinks))
