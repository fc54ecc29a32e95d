# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: `write_kv` and `qkv_norm_rope_write`, against a copy of as many bytes.

    python benchmarks/gpu_writes.py --rows FILE [--dry]

The sizes are those of Qwen3-30B-A3B: 32 query heads over 4 KV heads of 128. A chain of calls
writes into the pool that the call before has left. GB/s counts what must be read and what must be
written, once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Report, of_chains, percent, rate

from jax_paged import qkv_norm_rope_write, write_kv

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 4, 128, 16
LAYERS = 4
KV_DTYPES = ("bfloat16", "float8_e4m3fn")
TOKENS, DRY_TOKENS = (1, 64, 512, 8192, 32768), (3,)


def inputs(tokens: int, kv: str):
    """(q, k and v of the tokens, pools of k and v, positions, slots, tables, scales)."""
    pages = -(-tokens // PAGE) + 8
    qkv = jax.random.normal(
        jax.random.key(0), (tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM), jnp.bfloat16
    )
    pools = [jnp.zeros((LAYERS, pages, KV_HEADS, PAGE, HEAD_DIM), kv) for _ in "kv"]
    slots = np.random.default_rng(0).permutation(pages * PAGE)[:tokens].astype(np.int32)
    positions = jnp.arange(tokens, dtype=jnp.int32)
    angles = jnp.outer(positions.astype(jnp.float32), 1e4 ** -jnp.linspace(0, 1, HEAD_DIM // 2))
    scale = jnp.full(LAYERS, 0.02, jnp.float32)
    scales: dict[str, Any] = {} if kv == "bfloat16" else {"k_scale": scale, "v_scale": scale}
    return qkv, pools, positions, jnp.asarray(slots), (jnp.cos(angles), jnp.sin(angles)), scales


def measure(op: str, tokens: int, kv: str, best: dict[str, float | None], report: Report) -> None:
    """Times one op: compared with the reference first."""
    qkv, pools, positions, slots, (cos, sin), scales = inputs(tokens, kv)
    norm = jnp.ones(HEAD_DIM, jnp.float32)

    def write(qkv, pools, layer, implementation: Any = "native"):
        """(q or None, the pools)."""
        k_pages, v_pages = pools
        if op == "write_kv":
            k, v = qkv[:, HEADS * HEAD_DIM :].reshape(tokens, 2, KV_HEADS, HEAD_DIM).swapaxes(0, 1)
            return None, write_kv(
                k_pages, v_pages, k, v, slots, layer=layer, implementation=implementation, **scales
            )
        q, *pools = qkv_norm_rope_write(
            qkv, k_pages, v_pages, positions, slots, cos, sin, q_norm=norm, k_norm=norm,
            num_q_heads=HEADS, layer=layer, implementation=implementation, **scales,
        )  # fmt: skip
        return q, tuple(pools)

    first, second = (
        jax.jit(functools.partial(write, layer=1, implementation=implementation))(qkv, tuple(pools))
        for implementation in ("native", "reference")
    )
    step = 2.0**-7 if kv == "bfloat16" else 2.0**-3  # one rounding may fall the other way
    for got, expected in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=step, atol=step * 2.0**-4)

    @functools.partial(jax.jit, static_argnames="calls", donate_argnames="pools")
    def chain(qkv, pools, calls):
        for call in range(calls):
            q, pools = write(qkv, pools, call % LAYERS)
            if q is not None:  # the next call needs this one's q, too
                qkv = qkv.at[:, :HEAD_DIM].set(q.reshape(tokens, -1)[:, :HEAD_DIM])
        return pools

    state = [tuple(pools)]

    def run(calls: int):
        state[0] = jax.block_until_ready(chain(qkv, state[0], calls=calls))

    timing = of_chains(run, report.dry)
    report.check_time(timing)
    item = pools[0].dtype.itemsize
    kv_values, q_values = 2 * tokens * KV_HEADS * HEAD_DIM, tokens * HEADS * HEAD_DIM
    moved = kv_values * (2 + item) + (4 * q_values if op != "write_kv" else 0)
    gb_per_s = rate(moved / 1e9, timing.median)
    report.add(
        kind=op, size=f"{tokens} tokens", dtype=kv, us=1e6 * timing.median,
        percentiles=[1e6 * timing.p10, 1e6 * timing.p90], mb=moved / 1e6, gb_per_s=gb_per_s,
        percent_of_copy=percent(gb_per_s, best["copy_gb_per_s"]),
    )  # fmt: skip


def main() -> None:
    report, _ = Report.from_args("Writes into pages on this GPU.")
    best = report.ceilings()
    for op in ("write_kv", "qkv_norm_rope_write"):
        for kv in KV_DTYPES:
            for tokens in DRY_TOKENS if report.dry else TOKENS:
                report.attempt(
                    functools.partial(measure, op, tokens, kv, best, report),
                    kind=op, size=f"{tokens} tokens", dtype=kv,
                )  # fmt: skip
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
