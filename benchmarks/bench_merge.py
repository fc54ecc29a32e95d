"""merge_attention_states on the CPU, against the jnp/XLA reference and torch.

    python benchmarks/bench_merge.py [--quick] [--save NAME]

The contenders take turns (harness.paired). The op is bound by memory: GB/s counts both parts read
and their sum written once, and % is of the read bandwidth measured in the same run (which counts
reads only, so a copy cannot reach all of it). torch (where installed) is the formula in f32,
written with torch.logaddexp.
"""

import argparse
import functools
import importlib.util

import harness
import jax
import jax.numpy as jnp
import limits

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


def blocking(implementation, parts):
    """A jitted call that returns when the device has finished."""
    merge = jax.jit(
        functools.partial(jax_paged.merge_attention_states, implementation=implementation)
    )
    return lambda: jax.block_until_ready(merge(*parts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Merging attention states on this machine.")
    parser.add_argument("--quick", action="store_true", help="only the first two shapes")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        print("torch: skipped, torch is not installed (pip install torch)")
    bandwidth = limits.read_gb_per_s()
    print(f"{harness.cpu_model()}, {limits.NUM_THREADS} threads: read {bandwidth:.1f} GB/s")
    rows = []
    for shape in SHAPES[:2] if args.quick else SHAPES:
        for dtype in ("bfloat16", "float16", "float32"):
            keys = jax.random.split(jax.random.key(0), 4)
            parts = [
                jax.random.normal(key, shape[: 3 - i % 2]).astype("float32" if i % 2 else dtype)
                for i, key in enumerate(keys)
            ]
            contenders = {name: blocking(name, parts) for name in ("native", "reference")}
            if has_torch:
                contenders["torch"] = torch_merge(shape, dtype)
            times = harness.paired(contenders, budget_s=1.0)
            native = times["native"]
            heads = shape[0] * shape[1]
            moved = 3 * heads * (shape[2] * jnp.dtype(dtype).itemsize + 4)
            rate = moved / native.median / 1e9
            row = {
                "shape": shape, "dtype": dtype, "GB/s": rate,
                "percent_of_limit": 100 * rate / bandwidth, "limit": bandwidth,
                "us": {k: [1e6 * t.median, 1e6 * t.p10, 1e6 * t.p90] for k, t in times.items()},
                "ratio": {k: t.median / native.median for k, t in times.items() if k != "native"},
            }  # fmt: skip
            rows.append(row)
            ratios = ", ".join(f"{k} {r:.2f}x" for k, r in row["ratio"].items())
            size = "x".join(map(str, shape))
            print(
                f"{size:>12} {dtype:9} {1e6 * native.median:9.1f} us [{1e6 * native.p10:.1f}, "
                f"{1e6 * native.p90:.1f}] {rate:6.1f} GB/s {row['percent_of_limit']:5.1f} % | "
                f"slower: {ratios}",
                flush=True,
            )
    if args.save:
        print("saved", harness.save(args.save, rows))


if __name__ == "__main__":
    main()
