"""A stage of gpu_check.py: every kernel once on tiny shapes, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/gpu_tiny.py --rows FILE [--dry]

The results are compared with the float64 oracle too. Inputs come from the host as they are, so
that initcheck knows what was written.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from gpu_timing import Report

from jax_paged import ragged_paged_attention, write_kv
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch

# (case, dtype, q_lens, seq_lens, options): the tensor-core kernel with whole pages and with pages
# that a warp's tokens cross, queries in shared memory, wide groups, splits; the kernel for f32.
CASES: tuple[tuple[Case, Any, Any, Any, Any], ...] = (
    (Case("d64", 8, 2, 64), "bfloat16", [1, 0, 3, 1], [70, 5, 33, 0], {}),
    (Case("d128_page5", 4, 1, 128, page_size=5), "float16", [1, 2], [131, 64], {}),
    (Case("d192", 4, 2, 192), "bfloat16", [1], [40], {}),
    (Case("wide", 20, 1, 64), "bfloat16", [1, 9], [100, 9], {"split_tokens": 64}),
    (Case("f32", 4, 2, 40, v_head_dim=24), "float32", [1, 5], [90, 20], {"num_kv_splits": 3}),
)


def attend(case: Case, dtype: str, q_lens, seq_lens, options) -> None:
    """One ragged call against the oracle."""
    case = dataclasses.replace(case, num_layers=2)
    batch = make_batch(case, dtype, q_lens, seq_lens, num_tokens=sum(q_lens) + 2)
    arguments, defaults = batch.ragged()
    out, lse = ragged_paged_attention(
        *arguments, **defaults, **options, return_lse=True, implementation="native"
    )
    assert_attention_close(out, lse, *dense_oracle(batch))


def write() -> None:
    """Four tokens into a pool, one of them skipped."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((4, 2, 24), "f4") for _ in "kv")
    pool = np.zeros((3, 2, 4, 24), "f4")
    slots = np.array([3, -1, 11, 0], np.int32)
    written = write_kv(*map(jnp.array, (pool, pool, k, v, slots)), implementation="native")
    for out, tokens in zip(written, (k, v), strict=True):
        expected = pool.copy()
        for slot, token in zip(slots, tokens, strict=True):
            if slot >= 0:
                expected[slot // 4, :, slot % 4] = token
        np.testing.assert_array_equal(out, expected)


def main() -> None:
    report, args = Report.from_args("Every kernel once.", **{"--label": {}})
    blocks = {case.name: functools.partial(attend, case, *rest) for case, *rest in CASES}
    for name, block in (blocks | {"write_kv": write}).items():
        what = {"kind": "tiny", "label": args.label, "case": name}

        def run(block=block, what=what):
            block()
            report.add(**what, ok=True)

        report.attempt(run, **what)
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
