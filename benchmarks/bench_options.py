# SPDX-License-Identifier: Apache-2.0
"""What the options of attention cost in decode: each against the plain call, in the same run.

    python benchmarks/bench_options.py [--batch 32] [--context 4096] [--save FILE]

32 query heads over 4 KV heads of 128, pages of 16 tokens in random order. The calls of one dtype of
q take turns (harness.paired); `of_plain` is the ratio of medians, below 1 where the option is
faster. A window sees a quarter of the context.
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bench, as_pool

import jax_paged

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 4, 128, 16


def contenders(batch: int, context: int, dtype: str):
    """Zero-argument calls by the name of their option, "plain" first."""
    pages_per_seq = -(-context // PAGE_SIZE)
    shape = (batch * pages_per_seq, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    order = np.random.default_rng(0).permutation(shape[0]).astype(np.int32)
    table = jnp.asarray(order.reshape(batch, pages_per_seq))
    lens = jnp.full(batch, context, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, NUM_Q_HEADS, HEAD_DIM), jnp.float32).astype(dtype)

    @jax.jit
    def pools(dtype_like):
        real = (jax.random.normal(key, shape, jnp.float32) for key in keys[1:])
        unit = jnp.float32(30 if dtype_like.dtype == jnp.int8 else 1)
        return tuple((x * unit).astype(dtype_like.dtype) for x in real)

    kinds = (dtype, "float8_e4m3fn", "float8_e5m2", "int8")
    pages = {kv: tuple(map(as_pool, pools(jnp.zeros((), kv)))) for kv in kinds}
    per_head = jnp.linspace(0.5, 1, NUM_KV_HEADS, dtype=jnp.float32)
    per_token = as_pool(jnp.full(shape[:-1], 0.5, jnp.float32))
    heads = jnp.linspace(-1, 1, NUM_Q_HEADS, dtype=jnp.float32)
    static = {
        "soft_cap": {"soft_cap": 30.0},
        "lse": {"return_lse": True},
        "fp8 output": {"out_dtype": "float8_e4m3fn"},
    }
    traced = {
        "sinks": {"sinks": heads},
        "alibi_slopes": {"alibi_slopes": -jnp.abs(heads) / 64},
        "sliding_window": {"sliding_window": jnp.int32(context // 4)},
        "fp8 output": {"out_scale": jnp.float32(0.01)},
    }
    eight_bit = {
        "e4m3 KV": ("float8_e4m3fn", None),
        "e4m3 KV, scale per head": ("float8_e4m3fn", per_head),
        "e4m3 KV, scale per token": ("float8_e4m3fn", per_token),
        "e5m2 KV, scale per head": ("float8_e5m2", per_head),
        "int8 KV, scale per head": ("int8", per_head),
        "int8 KV, scale per token": ("int8", per_token),
    }

    def call(kv, fixed, given):
        jitted = jax.jit(
            lambda q, k, v, given: jax_paged.paged_attention(q, k, v, table, lens, **fixed, **given)
        )
        return lambda: jax.block_until_ready(jitted(q, *pages[kv], given))

    calls = {"plain": call(dtype, {}, {})}
    for name in dict.fromkeys((*static, *traced)):
        calls[name] = call(dtype, static.get(name, {}), traced.get(name, {}))
    for name, (kv, scale) in eight_bit.items():
        given = {} if scale is None else {"k_scale": scale, "v_scale": scale}
        calls[name] = call(kv, {}, given)
    return calls


def main() -> None:
    bench = Bench(
        "The cost of attention's options in decode.",
        batch={"type": int, "default": 32},
        context={"type": int, "default": 4096},
        budget={"type": float, "default": 30.0, "help": "seconds for each dtype of q"},
    )
    args = bench.args
    batch, context = bench.pick((args.batch, args.context), dry=(2, 64))
    for dtype in bench.pick(("bfloat16", "float32"), dry=("float32",)):
        calls = contenders(batch, context, dtype)
        times = bench.paired(calls, budget_s=args.budget, min_rounds=3, pause_s=0.0)
        for name, timing in times.items():
            of_plain = timing.median / times["plain"].median
            both = {"native": timing, "plain": times["plain"]}
            bench.add("option", name, f"{batch} × {context}", dtype, both, of_plain=of_plain)
    bench.finish()


if __name__ == "__main__":
    main()
