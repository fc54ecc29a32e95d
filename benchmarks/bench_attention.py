"""Decode and prefill attention on the CPU, against the jnp/XLA gather reference and torch SDPA.

    python benchmarks/bench_attention.py [--quick] [--save NAME]

For each shape the contenders take turns (harness.paired). Decode is bound by reading the KV cache:
GB/s counts each K and V byte once, and % is of the read bandwidth. Prefill is bound by arithmetic:
GFLOP/s counts the causal half, and % is of the f32 FMA rate (in bf16 more than 100 % is possible
where the processor multiplies bf16 pairs). Each limit is measured just after the row it belongs to.
torch SDPA (where torch is installed) reads contiguous K and V without pages, each KV head
once (q folded to [batch, num_kv_heads, group, head_dim] in decode): the best that torch offers.
"""

import argparse
import functools
import importlib.util

import harness
import jax
import jax.numpy as jnp
import limits
import numpy as np

import jax_paged
from jax_paged.testing import CASES, Case, make_batch

DECODE = [
    ("qwen3_30b_a3b", 1, 4096), ("qwen3_30b_a3b", 8, 4096), ("qwen3_30b_a3b", 32, 4096),
    ("qwen3_30b_a3b", 1, 16384), ("llama3_8b", 8, 4096), ("smollm2_135m", 8, 4096),
]  # fmt: skip
PREFILL = [("qwen3_30b_a3b", 512), ("qwen3_30b_a3b", 2048), ("llama3_8b", 2048),
           ("smollm2_135m", 2048)]  # fmt: skip


def torch_decode(case: Case, batch: int, context: int, dtype: str):
    """torch SDPA over dense K and V with the query heads of a group folded into rows."""
    import torch

    torch.set_num_threads(limits.NUM_THREADS)
    kind = getattr(torch, dtype)
    group = case.num_q_heads // case.num_kv_heads
    q = torch.randn(batch, case.num_kv_heads, group, case.head_dim).to(kind)
    k, v = (torch.randn(batch, case.num_kv_heads, context, case.head_dim).to(kind) for _ in "kv")
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def torch_prefill(case: Case, tokens: int, dtype: str):
    """torch SDPA, causal, grouped KV heads."""
    import torch

    torch.set_num_threads(limits.NUM_THREADS)
    kind = getattr(torch, dtype)
    q = torch.randn(1, case.num_q_heads, tokens, case.head_dim).to(kind)
    k, v = (torch.randn(1, case.num_kv_heads, tokens, case.head_dim).to(kind) for _ in "kv")
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=True, enable_gqa=True)


def blocking(function, *arguments, **options):
    """A jitted call that returns when the device has finished."""
    traced = {k: options.pop(k) for k in list(options) if isinstance(options[k], jax.Array)}
    jitted = jax.jit(functools.partial(function, **options))
    return lambda: jax.block_until_ready(jitted(*arguments, **traced))


def measure(case: Case, q_lens, seq_lens, dtype: str, torch_call, implementations):
    """Times the contenders on one batch."""
    batch = make_batch(case, jnp.dtype(dtype), q_lens, seq_lens)
    arguments, options = batch.ragged()
    if max(q_lens) == 1:
        arguments, function = arguments[:5], jax_paged.paged_attention
        del options["causal"]
    else:
        function = jax_paged.ragged_paged_attention
    contenders = {
        name: blocking(function, *arguments, **options, implementation=name)
        for name in implementations
    }
    if torch_call is not None:
        contenders["torch_sdpa"] = torch_call
    return harness.paired(contenders)


def main() -> None:
    parser = argparse.ArgumentParser(description="Paged attention on this machine, against peers.")
    parser.add_argument("--quick", action="store_true", help="only the first three decode shapes")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        print("torch_sdpa: skipped, torch is not installed (pip install torch)")
    isa = jax_paged.build_info()["cpu"]["isa"]
    print(f"{harness.cpu_model()}, {limits.NUM_THREADS} threads, isa {isa}")
    rows = []

    def report(kind, name, size, dtype, amount, unit, limit, times):
        native, case = times["native"], CASES[name]
        heads = f"{case.num_q_heads}/{case.num_kv_heads}/{case.head_dim}"
        rate = amount / native.median / 1e9
        row = {
            "kind": kind, "case": name, "heads": heads, "size": size, "dtype": dtype,
            "ms": {k: [1e3 * t.median, 1e3 * t.p10, 1e3 * t.p90] for k, t in times.items()},
            unit: rate, "percent_of_limit": 100 * rate / limit, "limit": limit,
            "ratio": {k: t.median / native.median for k, t in times.items() if k != "native"},
        }  # fmt: skip
        rows.append(row)
        ratios = ", ".join(f"{k} {r:.2f}x" for k, r in row["ratio"].items())
        print(
            f"{kind:8}{name:15}{size:>11} {dtype:9} {1e3 * native.median:9.3f} ms "
            f"[{1e3 * native.p10:.3f}, {1e3 * native.p90:.3f}] {rate:7.1f} {unit} "
            f"{row['percent_of_limit']:5.1f} % of {limit:.1f} | slower: {ratios}",
            flush=True,
        )

    for name, batch, context in DECODE[:3] if args.quick else DECODE:
        for dtype in ("bfloat16", "float32"):
            case = CASES[name]
            torch_call = torch_decode(case, batch, context, dtype) if has_torch else None
            times = measure(case, [1] * batch, [context] * batch, dtype, torch_call,
                            ("native", "reference"))  # fmt: skip
            item = jnp.dtype(dtype).itemsize
            kv_bytes = 2 * batch * context * case.num_kv_heads * case.head_dim * item
            report("decode", name, f"{batch}x{context}", dtype, kv_bytes, "GB/s",
                   limits.read_gb_per_s(), times)  # fmt: skip
    for name, tokens in [] if args.quick else PREFILL:
        for dtype in ("bfloat16", "float32"):
            case = CASES[name]
            torch_call = torch_prefill(case, tokens, dtype) if has_torch else None
            times = measure(case, [tokens], [tokens], dtype, torch_call, ("native",))
            flops = 2 * np.float64(tokens) ** 2 * case.num_q_heads * case.head_dim
            report("prefill", name, str(tokens), dtype, flops, "GFLOP/s",
                   limits.fma_gflop_per_s(), times)  # fmt: skip
    if args.save:
        print("saved", harness.save(args.save, rows))


if __name__ == "__main__":
    main()
