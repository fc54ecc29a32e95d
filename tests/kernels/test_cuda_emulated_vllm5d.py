# SPDX-License-Identifier: Apache-2.0
"""Rows of many queries over pages of layout vllm5d in the emulated CUDA prefill kernel.

K and V come by atoms and V stays transposed, but the results must have the bits that HND gives.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from emulation import Device, emulate
from touched import assert_reads_windows_only, tokens_of, windows_begin

from jax_paged.layout import from_slots_first, slots_first
from jax_paged.testing import WILD_PAGE, Case, assert_attention_close, dense_oracle, make_batch

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17)


def in_both(case, *args, **options):
    """The same batch of layout HND and of vllm5d."""
    return [
        make_batch(dataclasses.replace(case, layout=layout), *args, **options)
        for layout in ("HND", "vllm5d")
    ]


def check(batches, device, **options):
    """Runs both layouts; compares them with each other and, but for fp8, with the oracle."""
    results = []
    for batch in batches:
        chosen = {}
        results.append(emulate(batch, device, buffers=chosen, **options))
        assert chosen["chosen_prefill_rows"] > 0
        if batch.case.layout == "vllm5d" and "sliding_window" in options:
            assert_reads_windows_only(batch, options["sliding_window"], chosen)
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    if "out_dtype" not in options:
        out, lse = results[1]
        assert_attention_close(out, lse, *dense_oracle(batches[1], **options))


@pytest.mark.parametrize("page_size", [8, 16, 24, 544])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_rows_have_the_bits_of_hnd(head_dim, page_size):
    # Dtype, group, mask, layers and order go through their values as the sizes do.
    count = HEAD_DIMS.index(head_dim) * 5 + page_size // 8
    group = GROUPS[count % len(GROUPS)]
    case = Case(
        "long", 2 * group, 2, head_dim, page_size, causal=count % 3 != 0,
        num_layers=(None, 3)[count % 2],
    )  # fmt: skip
    dtype = jnp.dtype(("bfloat16", "float16")[count // 2 % 2])
    tile = 128 if head_dim <= 128 else 64
    q_lens = [1, max(2, tile // group + 1), 0, 19]
    seq_lens = [70, q_lens[1] + 65, 9, 19 + count % 60]
    batches = in_both(case, dtype, q_lens, seq_lens, num_tokens=sum(q_lens) + 2, seed=count)
    for seed in (count, count + 1):
        check(batches, Device(num_workers=1 + seed % 5, seed=seed))


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 8), (80, 16), (192, 8), (256, 24)])
def test_every_end_of_8_tokens_has_the_bits_of_hnd(head_dim, page_size):
    prefixes = [*range(16), 31, 33, 47, 55, 64, 73, 130]
    q_lens = [17 + i % 3 for i in range(len(prefixes))]
    seq_lens = [q + n for q, n in zip(q_lens, prefixes, strict=True)]
    batches = in_both(Case("ends", 1, 1, head_dim, page_size), jnp.bfloat16, q_lens, seq_lens)
    check(batches, Device(seed=head_dim))


@pytest.mark.parametrize("window", [1, 3, 8, 13, 64, 77, 150])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_nothing_left_of_the_windows_is_read_or_reaches_a_result(head_dim, window):
    case = Case("windows", 8, 2, head_dim, page_size=(8, 16)[window % 2])
    q_lens, seq_lens = [9, 20, 1, 34], [150, 131 + window % 8, 90, 34]
    batches = []
    for batch in in_both(case, jnp.bfloat16, q_lens, seq_lens, seed=window):
        # NaN in what no window reaches, also in V of the same 8 tokens.
        begins = windows_begin(batch, window)
        seen, layout = tokens_of(batch, begins, batch.seq_lens), batch.case.layout
        pages = {}
        for name in ("k", "v"):
            slots = slots_first(getattr(batch, f"{name}_pages"), layout, name)
            slots = np.where(seen[..., None, None], slots, np.asarray(np.nan, slots.dtype))
            pages[f"{name}_pages"] = np.ascontiguousarray(from_slots_first(slots, layout, name))
        gone = (np.arange(batch.page_table.shape[1]) + 1) * case.page_size <= begins[:, None]
        table = np.where(gone, WILD_PAGE, batch.page_table).astype(np.int32)
        batches.append(dataclasses.replace(batch, page_table=table, **pages))
    for seed in (1, 2):
        check(batches, Device(seed=seed), sliding_window=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_options_and_holes_have_the_bits_of_hnd(dtype, head_dim, causal):
    rng = np.random.default_rng(head_dim)
    options = {
        "soft_cap": 5.0,
        "alibi_slopes": np.float32(2.0 ** -np.linspace(1, 8, 8)),
        "sinks": rng.standard_normal(8, "f4"),
    }
    case = Case("options", 8, 2, head_dim, page_size=8, causal=causal)
    batches = in_both(case, jnp.dtype(dtype), [1, 30, 5, 12], [90, 130, 70, 0], num_tokens=50)
    holes = rng.random(batches[0].page_table.shape) < 0.3
    for batch in batches:
        wild = np.where(np.arange(holes.shape[1]) % 2, -1, WILD_PAGE)
        batch.page_table[:] = np.where(holes, wild, batch.page_table)
    check(batches, Device(seed=3), sliding_window=40, **options)
    check(batches, Device(seed=4), **options)
    check(batches, Device(seed=5), **options, out_dtype="float8_e4m3fn")
