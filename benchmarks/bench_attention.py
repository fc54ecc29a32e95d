# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill attention on the CPU, against the jnp/XLA gather reference and torch SDPA.

    python benchmarks/bench_attention.py [--quick] [--save FILE]

For each shape the contenders take turns (harness.paired). Decode is bound by reading the KV cache:
GB/s counts each K and V byte once, and % is of the read bandwidth. Prefill is bound by arithmetic:
GFLOP/s counts the causal half, and % is of the f32 FMA rate (in bf16 more than 100 % is possible
where the processor multiplies bf16 pairs). A row's limit takes turns with its contenders.
torch SDPA (where torch is installed) reads contiguous K and V without pages, each KV head
once (q folded to [batch, num_kv_heads, group, head_dim] in decode): the best that torch offers.
vLLM's CPU kernel (vllm_cpu.py tells how to get it) reads the same pages in its own layout.
Pages have 16 tokens but where it is said.
"""

import dataclasses

import jax.numpy as jnp
import limits
import numpy as np
import vllm_cpu
from harness import Bench, agree, as_pool, blocking

import jax_paged
from jax_paged.testing import CASES, Case, make_batch

DECODE = [
    ("qwen3_30b_a3b", 1, 4096), ("qwen3_30b_a3b", 8, 4096), ("qwen3_30b_a3b", 32, 4096),
    ("qwen3_30b_a3b", 1, 16384), ("llama3_8b", 8, 4096), ("smollm2_135m", 8, 4096),
]  # fmt: skip
PAGES_OF_64 = DECODE[1:4]
PREFILL = [("qwen3_30b_a3b", tokens) for tokens in (64, 128, 512, 2048)]
PREFILL += [("llama3_8b", 2048), ("smollm2_135m", 2048)]


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


def measure(
    bench: Bench, case: Case, q_lens, seq_lens, dtype: str, torch_call, implementations,
    limit: limits.Limit,
):  # fmt: skip
    """Times the contenders on one batch, and the limit; vLLM's must give what ours gives."""
    batch = make_batch(case, jnp.dtype(dtype), q_lens, seq_lens)
    arguments, options = batch.ragged()
    arguments = (arguments[0], *map(as_pool, arguments[1:3]), *arguments[3:])
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
    if not bench.lacks("vllm_cpu", vllm_cpu.missing()):
        contenders["vllm_cpu"] = vllm_cpu.attention(batch)
        agree({name: contenders[name] for name in ("native", "vllm_cpu")}, limit=0.02)
    return bench.beside(limit, contenders)


def main() -> None:
    bench = Bench("Paged attention on this machine, against peers.")
    has_torch = bench.has_peer("torch", "pip install torch")

    def heads(case: Case) -> str:
        return f"{case.num_q_heads}/{case.num_kv_heads}/{case.head_dim}"

    decode = bench.pick(DECODE, quick=DECODE[:3], dry=[("smollm2_135m", 2, 40)])
    prefill = bench.pick(PREFILL, quick=PREFILL[2:3], dry=[("smollm2_135m", 40)])
    pages = [("", {}, row) for row in decode]
    wide = bench.pick(PAGES_OF_64, quick=[], dry=[])
    pages += [(", pages of 64", {"page_size": 64}, row) for row in wide]
    for text, changes, (name, batch, context) in pages:
        for dtype in ("bfloat16", "float32"):
            case = dataclasses.replace(CASES[name], **changes)
            torch_call = torch_decode(case, batch, context, dtype) if has_torch else None
            times, limit = measure(bench, case, [1] * batch, [context] * batch, dtype, torch_call,
                                   ("native", "reference"), bench.reads())  # fmt: skip
            item = jnp.dtype(dtype).itemsize
            kv_bytes = 2 * batch * context * case.num_kv_heads * case.head_dim * item
            bench.add("decode", name, f"{batch} × {context}{text}", dtype, times, amount=kv_bytes,
                      unit="GB/s", limit=limit, heads=heads(case))  # fmt: skip
    for name, tokens in prefill:
        for dtype in ("bfloat16", "float32"):
            case = CASES[name]
            torch_call = torch_prefill(case, tokens, dtype) if has_torch else None
            times, limit = measure(bench, case, [tokens], [tokens], dtype, torch_call, ("native",),
                                   bench.multiply_adds())  # fmt: skip
            flops = 2 * np.float64(tokens) ** 2 * case.num_q_heads * case.head_dim
            bench.add("prefill", name, tokens, dtype, times, amount=float(flops), unit="GFLOP/s",
                      limit=limit, heads=heads(case))  # fmt: skip
    bench.finish()


if __name__ == "__main__":
    main()
