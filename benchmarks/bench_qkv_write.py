# SPDX-License-Identifier: Apache-2.0
"""qkv_norm_rope_write on this machine, against the same steps as separate JAX operations.

    python benchmarks/bench_qkv_write.py [--quick] [--save FILE]

The contenders take turns (harness.paired), each on donated pools of its own. Bound by memory: GB/s
counts each element of qkv once as read and once as written, and % is of the read bandwidth measured
beside the row. The reference is the op in jax.numpy as XLA compiles it; `write_kv` after XLA's norm
and RoPE is what a model without the fused op would run. Behind the dtype of qkv stand that of 8-bit
pages, whose scales are per token and head, and a layout that is not HND.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bench

import jax_paged
from jax_paged.layout import POOLS, Layout, PagesShape, is_one_pool, make_shape
from jax_paged.ops.rope import apply_rope, inverse_frequencies, rope_tables
from jax_paged.testing import CASES, Case

SHAPES = [
    ("qwen3_30b_a3b", 1), ("qwen3_30b_a3b", 64), ("qwen3_30b_a3b", 2048), ("llama3_8b", 64),
    ("llama3_8b", 2048), ("smollm2_135m", 2048),
]  # fmt: skip
KINDS: list[tuple[str, str | None, Layout]] = [  # dtype of qkv, of 8-bit pages, layout
    ("bfloat16", None, "HND"), ("float32", None, "HND"), ("bfloat16", "int8", "HND"),
    ("bfloat16", "float8_e4m3fn", "HND"), ("bfloat16", None, "vllm5d"), ("bfloat16", None, "rpa"),
]  # fmt: skip
MAX_POSITIONS = 4096


def make_operands(case: Case, tokens: int, dtype: str):
    """qkv, positions, slots, cos, sin, q_norm, k_norm; each token's slot is its own."""
    rng = np.random.default_rng(0)
    width = (case.num_q_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = jnp.asarray(rng.standard_normal((tokens, width), "f4")).astype(dtype)
    positions = jnp.asarray(rng.integers(0, MAX_POSITIONS, tokens), jnp.int32)
    slots = jnp.asarray(rng.permutation(tokens), jnp.int32)
    frequencies = inverse_frequencies(case.head_dim, 1e6)
    tables = rope_tables(jnp.arange(MAX_POSITIONS, dtype=jnp.int32), frequencies)
    return qkv, positions, slots, *tables, *(jnp.ones(case.head_dim, dtype) for _ in "qk")


def separate(case, layout, qkv, pools, positions, slots, cos, sin, q_norm, k_norm):
    """The same without the fused op: XLA's norm and RoPE, then write_kv."""
    heads = case.num_q_heads + case.num_kv_heads
    by_head = qkv.reshape(qkv.shape[0], -1, case.head_dim)
    q, k, v = jnp.split(by_head, [case.num_q_heads, heads], axis=1)

    def norm_and_turn(x, weight):
        x = x.astype(jnp.float32)
        root = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))
        x = x * root * weight.astype(jnp.float32)[None, None]
        return apply_rope(x, cos[positions], sin[positions]).astype(qkv.dtype)

    k_pages, v_pages, scales = by_name(pools)
    k = norm_and_turn(k, k_norm)
    written = jax_paged.write_kv(k_pages, v_pages, k, v, slots, layout=layout, **scales)
    return norm_and_turn(q, q_norm), *written


def by_name(pools) -> tuple[Any, Any, dict[str, Any]]:
    """(k_pages, v_pages, scales by name) of `make_pools`."""
    k_pages, v_pages, *scales = pools
    return k_pages, v_pages, dict(zip(("k_scale", "v_scale"), scales, strict=False))


def make_pools(case: Case, tokens: int, dtype: str, layout: Layout) -> list[jax.Array | None]:
    """Pages of K and V, and of 8-bit pages the scales."""
    sizes = PagesShape(
        None, -(-tokens // case.page_size), case.num_kv_heads, case.page_size, case.head_dim
    )
    pools: list[jax.Array | None] = [
        None
        if is_one_pool(layout) and pool == "v"
        else jnp.zeros(make_shape(sizes, layout, pool, dtype=dtype), dtype)
        for pool in POOLS
    ]
    if jnp.dtype(dtype).itemsize == 1:
        pools += [jnp.zeros(sizes[1:4], jnp.float32) for _ in POOLS]
    return pools


def measure(bench: Bench, case: Case, tokens: int, dtype: str, kv: str, layout: Layout):
    """Times the contenders on one batch."""
    qkv, positions, slots, cos, sin, q_norm, k_norm = make_operands(case, tokens, dtype)

    def fused(implementation):
        def call(qkv, pools, positions, slots, cos, sin, q_norm, k_norm):
            k_pages, v_pages, scales = by_name(pools)
            return jax_paged.qkv_norm_rope_write(
                qkv, k_pages, v_pages, positions, slots, cos, sin, q_norm=q_norm, k_norm=k_norm,
                num_q_heads=case.num_q_heads, layout=layout, implementation=implementation,
                **scales,
            )  # fmt: skip

        return call

    def contender(function):
        jitted = jax.jit(function, donate_argnums=1)
        pools = make_pools(case, tokens, kv, layout)

        def call():
            q, *pools[:] = jitted(qkv, pools, positions, slots, cos, sin, q_norm, k_norm)
            jax.block_until_ready((q, pools))

        return call

    return bench.beside(
        bench.reads(),
        {
            "native": contender(fused("native")),
            "reference": contender(fused("reference")),
            "write_kv": contender(lambda *operands: separate(case, layout, *operands)),
        },
    )


def main() -> None:
    bench = Bench("qkv_norm_rope_write against separate steps.")
    for name, tokens in bench.pick(SHAPES, quick=SHAPES[:2], dry=[("smollm2_135m", 3)]):
        for dtype, kv, layout in KINDS:
            case = CASES[name]
            times, limit = measure(bench, case, tokens, dtype, kv or dtype, layout)
            of_q, of_kv = (jnp.dtype(x).itemsize for x in (dtype, kv or dtype))
            moved = tokens * case.head_dim * (
                2 * case.num_q_heads * of_q + 2 * case.num_kv_heads * (of_q + of_kv)
            )  # fmt: skip
            what = ", ".join(x for x in (dtype, kv, layout) if x not in (None, "HND"))
            bench.add("qkv_write", name, tokens, what, times, amount=moved, unit="GB/s",
                      limit=limit)  # fmt: skip
    bench.finish()


if __name__ == "__main__":
    main()
