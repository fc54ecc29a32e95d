# SPDX-License-Identifier: Apache-2.0
"""merge_attention_states on the CPU, against the jnp/XLA reference and torch.

    python benchmarks/bench_merge.py [--quick] [--save FILE]

The contenders take turns (harness.paired). The op is bound by memory: GB/s counts both parts read
and their sum written once, and % is of the read bandwidth measured in the same run (which counts
reads only, so a copy cannot reach all of it). torch (where installed) is the formula in f32,
written with torch.logaddexp.
"""

import jax
import jax.numpy as jnp
import limits
from harness import Bench, blocking

import jax_paged

# (tokens, query heads, head_dim): decode batches and a prefill chunk.
SHAPES = [(8, 32, 128), (64, 32, 128), (256, 32, 128), (2048, 32, 128), (2048, 9, 64)]


def torch_merge(shape: tuple[int, int, int], dtype: str):
    """The formula in torch, f32 inside, one rounding."""
    import torch

    torch.set_num_threads(limits.NUM_THREADS)
    kind = getattr(torch, dtype)
    out_a, out_b = (torch.randn(shape).to(kind) for _ in "ab")
    lse_a, lse_b = (torch.randn(shape[:2]) for _ in "ab")

    def merge():
        lse = torch.logaddexp(lse_a, lse_b)
        share_a, share_b = ((x - lse).exp()[..., None] for x in (lse_a, lse_b))
        return (share_a * out_a.float() + share_b * out_b.float()).to(kind), lse

    return merge


def main() -> None:
    bench = Bench("Merging attention states on this machine.")
    has_torch = bench.has_peer("torch", "pip install torch")
    merge = jax_paged.merge_attention_states
    for shape in bench.pick(SHAPES, quick=SHAPES[:2], dry=[(3, 4, 64)]):
        for dtype in bench.pick(("bfloat16", "float16", "float32"), dry=("bfloat16",)):
            keys = jax.random.split(jax.random.key(0), 4)
            parts = [
                jax.random.normal(key, shape[: 3 - i % 2]).astype("float32" if i % 2 else dtype)
                for i, key in enumerate(keys)
            ]
            contenders = {
                name: blocking(merge, *parts, implementation=name)
                for name in ("native", "reference")
            }
            if has_torch:
                contenders["torch"] = torch_merge(shape, dtype)
            times, limit = bench.beside(bench.reads(), contenders, budget_s=1.0)
            moved = 3 * shape[0] * shape[1] * (shape[2] * jnp.dtype(dtype).itemsize + 4)
            size = " × ".join(map(str, shape))
            bench.add("merge", "tokens × heads × dim", size, dtype, times, amount=moved,
                      unit="GB/s", limit=limit)  # fmt: skip
    bench.finish()


if __name__ == "__main__":
    main()
