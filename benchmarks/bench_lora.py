# SPDX-License-Identifier: Apache-2.0
"""`lora` on the CPU: many adapters in one batch, against XLA and against the projection beside it.

    python benchmarks/bench_lora.py [--quick] [--save FILE]

Each case is the fused q, k and v of a layer, f32 and bf16. With as many adapters as tokens, GB/s
counts the weights of all adapters once, and % is of the read bandwidth. With one adapter for many
tokens, GFLOP/s counts multiply-adds twice, and % is of the f32 FMA rate.

XLA is the reference, a batched product over blocks of tokens of one adapter. gather is what one
writes first: each token's own weights, gathered, in batched products. linear is the projection that
the adapters are added to, of the same tokens: what they cost on top is our time over its time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from harness import Bench, agree, blocking

from jax_paged import linear, lora

# tokens, adapters
CASES = [(1, 1), (8, 8), (64, 64), (64, 4), (512, 1), (512, 8)]
# name: inputs, outputs of q, k and v
MODELS = {"135m": (576, (576, 192, 192)), "30b_a3b": (2048, (4096, 512, 512))}
RANK = 16
MOST_GATHERED = 64  # tokens


def gathered(x, a, b, adapters, *, base, part_sizes):
    """Each token's own weights, gathered."""
    inner = jnp.einsum("ti,tri->tr", x, a[adapters], preferred_element_type=jnp.float32)
    own, begin, rank = [], 0, b.shape[2]
    for part, size in enumerate(part_sizes):
        weight = b[:, begin : begin + size][adapters]
        h = inner[:, part * rank : (part + 1) * rank].astype(x.dtype)
        own.append(jnp.einsum("tr,tor->to", h, weight, preferred_element_type=jnp.float32))
        begin += size
    return (base.astype(jnp.float32) + jnp.concatenate(own, axis=1)).astype(x.dtype)


def measure(bench: Bench, name: str, sizes, tokens: int, num_adapters: int, dtype: str) -> None:
    """One row."""
    size_in, part_sizes = sizes
    size_out, inner = sum(part_sizes), len(part_sizes) * RANK
    keys = iter(jax.random.split(jax.random.key(1), 5))

    def draw(*shape: int) -> jax.Array:
        x = jax.random.normal(next(keys), shape, jnp.float32)
        return (x / np.float32(shape[-1] ** 0.5)).astype(dtype)

    x, a = draw(tokens, size_in), draw(num_adapters, inner, size_in)
    b, base = draw(num_adapters, size_out, RANK), draw(tokens, size_out)
    weight = draw(size_out, size_in)
    adapters = np.random.default_rng(2).permutation(tokens).astype(np.int32) % num_adapters
    operands = x, a, b, jnp.asarray(adapters)
    of_parts = functools.partial(functools.partial, part_sizes=part_sizes)
    contenders = {
        implementation: blocking(
            of_parts(lora), *operands, base=base, implementation=implementation
        )
        for implementation in ("native", "reference")
    }
    if tokens <= MOST_GATHERED:
        contenders["gather"] = blocking(of_parts(gathered), *operands, base=base)
    agree(contenders, limit=0.03)  # of bf16's rounding
    contenders["linear"] = blocking(linear, x, weight)
    reads = num_adapters > tokens // 8
    times, limit = bench.beside(bench.reads() if reads else bench.multiply_adds(), contenders)
    products = tokens * (inner * size_in + RANK * size_out)
    bench.add(
        "lora", f"{name}, {num_adapters} adapters", f"{tokens} tokens", dtype, times,
        amount=float(a.nbytes + b.nbytes if reads else 2 * products),
        unit="GB/s" if reads else "GFLOP/s", limit=limit,
    )  # fmt: skip


def main() -> None:
    bench = Bench("Low-rank adapters, many in one batch, on this machine.")
    models = bench.pick(MODELS, dry={"dry": (32, (32, 16, 16))})
    for name, sizes in models.items():
        for tokens, num_adapters in bench.pick(CASES, quick=CASES[2:5:2], dry=[(4, 4), (9, 1)]):
            for dtype in ("float32", "bfloat16"):
                measure(bench, name, sizes, tokens, num_adapters, dtype)
    bench.finish()


if __name__ == "__main__":
    main()
