# SPDX-License-Identifier: Apache-2.0
"""Decode of rows that begin alike: `cascade_attention` against `paged_attention`, in the same run.

    python benchmarks/bench_cascade.py [--quick] [--save FILE]

32 query heads over 4 KV heads of 128, pages of 16 tokens in random order. Each row has 128 tokens
of its own behind those that all share. The levels are found once, as an engine finds them once for
all layers of a step; "levels" is what that takes. The contenders take turns (harness.paired).
GFLOP/s counts the products of all rows with all their tokens, % is of the f32 multiply-adds
measured in the same run: what is shared is read once, so arithmetic is the limit.
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bench, agree, as_pool, blocking

import jax_paged

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, OWN = 32, 4, 128, 16, 128
# (rows, tokens that they share); an engine shares from `cascade.LEAST_ROWS` on, and so forth.
SHAPES = [
    (4, 512),
    (8, 512),
    (32, 512),
    (4, 1024),
    (16, 1024),
    (4, 2048),
    (8, 2048),
    (4, 4096),
    (32, 4096),
]


def operands(rows: int, shared: int, own: int, dtype: str):
    """q, the pools, a batch of rows, and its levels."""
    pages = (shared // PAGE_SIZE, own // PAGE_SIZE)
    order = np.random.default_rng(0).permutation(pages[0] + rows * pages[1]).astype(np.int32)
    first = np.broadcast_to(order[: pages[0]], (rows, pages[0]))
    table = jnp.asarray(np.hstack([first, order[pages[0] :].reshape(rows, pages[1])]))
    lens = jnp.full(rows, shared + own, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (rows, NUM_Q_HEADS, HEAD_DIM), jnp.float32).astype(dtype)
    shape = (len(order), NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pools = (as_pool(jax.random.normal(key, shape, jnp.float32).astype(dtype)) for key in keys[1:])
    return q, *pools, table, lens


def find(table: jax.Array, lens: jax.Array):
    """The levels of rows of one query each."""
    return jax_paged.cascade_levels(
        table, lens, page_size=PAGE_SIZE, num_levels=2, min_rows=2, min_tokens=PAGE_SIZE
    )


def main() -> None:
    bench = Bench("Decode of rows that begin alike, on this machine.")
    own = bench.pick(OWN, dry=PAGE_SIZE)
    for rows, shared in bench.pick(SHAPES, quick=SHAPES[-1:], dry=[(2, 32)]):
        for dtype in bench.pick(("bfloat16", "float32"), dry=("bfloat16",)):
            q, k, v, table, lens = operands(rows, shared, own, dtype)
            levels = jax.block_until_ready(jax.jit(find)(table, lens))
            contenders = {
                "native": blocking(jax_paged.cascade_attention, q, k, v, levels),
                "plain": blocking(jax_paged.paged_attention, q, k, v, table, lens),
            }
            agree(contenders, 2e-2 if dtype == "bfloat16" else 1e-4)
            times, limit = bench.beside(bench.multiply_adds(), contenders, budget_s=3.0)
            products = 4 * rows * NUM_Q_HEADS * HEAD_DIM * (shared + own)
            size = f"{rows} × {shared}"
            bench.add("cascade", "rows × shared tokens", size, dtype, times, amount=products,
                      unit="GFLOP/s", limit=limit)  # fmt: skip
            if dtype == "bfloat16":
                finding = bench.paired({"native": blocking(find, table, lens)}, budget_s=0.5)
                bench.add("levels", "rows × shared tokens", size, "int32", finding)
    bench.finish()


if __name__ == "__main__":
    main()
