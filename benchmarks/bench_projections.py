# SPDX-License-Identifier: Apache-2.0
"""`linear` and `moe_experts` on the CPU, against XLA, torch, transformers and vLLM.

    python benchmarks/bench_projections.py [--quick] [--save FILE]

A row's contenders and its limit take turns (harness.paired). With few tokens both ops are bound
by reading weights: GB/s counts each weight that is used once (of experts those that some token
chose), and % is of the read bandwidth. With many they are bound by arithmetic: % is of the f32 FMA
rate, which bf16 can pass where the processor multiplies bf16 pairs. 8-bit weights have a scale per
output, and x is bf16.

XLA is the reference: a product that dequantizes, and for experts pairs sorted by expert and blocks
of each expert's products. transformers is its Qwen3MoeExperts with its default implementation,
vLLM its cpu_fused_moe with weights packed beforehand (vllm_cpu.py).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import vllm_cpu
from harness import Bench, agree, as_tensor, blocking

from jax_paged import linear, moe_experts, quantize_weight
from jax_paged.native import huge_pages

FEW = 32  # tokens up to which reading is the bound
# tokens, in, out: the head and a projection of Qwen3-MoE 512M.
LINEAR = [(1, 1024, 32768), (8, 1024, 32768), (32, 1024, 32768), (512, 1024, 2048)]
# name: experts, of which a token chooses, hidden, inner.
MODELS = {"512m": (32, 4, 1024, 512), "30b_a3b": (128, 8, 2048, 768)}
EXPERTS = [(name, tokens) for name in MODELS for tokens in (1, 8, 32, 512)]
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def random(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Normal numbers over the root of the last axis."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return (x / np.float32(shape[-1] ** 0.5)).astype(dtype)


def weights(shape: tuple[int, ...], dtype: str, seed: int) -> tuple[jax.Array, jax.Array | None]:
    """Weights, where a model has them in memory, and, if they are 8-bit, their scales."""
    if dtype in ("int8", "float8_e4m3fn"):
        quantize = jax.jit(functools.partial(quantize_weight, dtype=dtype))
        return huge_pages.moved(quantize(random(shape, "bfloat16", seed)))
    return huge_pages.moved(random(shape, dtype, seed)), None


def transformers_experts(operands: tuple[jax.Array, ...]) -> Callable[[], object]:
    """transformers' experts on the same operands."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    x, gate_up, down, experts, routing = operands
    config = Qwen3MoeConfig(
        num_experts=down.shape[0], hidden_size=x.shape[1], moe_intermediate_size=down.shape[2]
    )
    config._experts_implementation = "grouped_mm"  # what whole models get by default
    module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(as_tensor(gate_up), requires_grad=False)
    module.down_proj = torch.nn.Parameter(as_tensor(down), requires_grad=False)
    ids, tokens = torch.from_numpy(np.array(experts)).long(), as_tensor(x)
    chances = as_tensor(routing).to(tokens.dtype)
    return lambda: module(tokens, ids, chances)


def add(bench: Bench, kind: str, case: str, tokens: int, dtype: str, contenders, read, products):
    """Times a row; `read`: bytes of weights that a call needs, `products`: multiply-adds."""
    agree(contenders, limit=0.03)  # of bf16's rounding
    few = tokens <= FEW
    times, limit = bench.beside(bench.reads() if few else bench.multiply_adds(), contenders)
    bench.add(
        kind, case, f"{tokens} tokens", dtype, times, amount=float(read if few else 2 * products),
        unit="GB/s" if few else "GFLOP/s", limit=limit,
    )  # fmt: skip


def measure_linear(bench: Bench, tokens: int, size_in: int, size_out: int, dtype: str) -> None:
    """One row of `linear`."""
    w, scale = weights((size_out, size_in), dtype, 1)
    x = random((tokens, size_in), "bfloat16" if scale is not None else dtype, 2)
    contenders = {
        name: blocking(linear, x, w, weight_scale=scale, implementation=name)
        for name in ("native", "reference")
    }
    if scale is None and bench.has_peer("torch", "pip install torch"):
        import torch

        contenders["torch"] = functools.partial(
            torch.nn.functional.linear, as_tensor(x), as_tensor(w)
        )
    add(bench, "linear", f"{size_in} → {size_out}", tokens, dtype, contenders, w.nbytes,
        tokens * w.size)  # fmt: skip


def measure_experts(bench: Bench, name: str, sizes, tokens: int, dtype: str) -> None:
    """One row of `moe_experts`."""
    num_experts, k, hidden, inner = sizes
    gate_up, of_gate_up = weights((num_experts, 2 * inner, hidden), dtype, 1)
    down, of_down = weights((num_experts, hidden, inner), dtype, 2)
    x = random((tokens, hidden), "bfloat16" if of_down is not None else dtype, 3)
    rng = np.random.default_rng(4)
    experts = np.stack([rng.permutation(num_experts)[:k] for _ in range(tokens)]).astype(np.int32)
    operands = (x, gate_up, down, jnp.array(experts), jnp.full((tokens, k), 1 / k, jnp.float32))
    contenders = {
        implementation: blocking(
            moe_experts, *operands, gate_up_scale=of_gate_up, down_scale=of_down,
            implementation=implementation,
        )
        for implementation in ("native", "reference")
    }  # fmt: skip
    if of_down is None and bench.has_peer("transformers", "pip install transformers torch"):
        contenders["transformers"] = transformers_experts(operands)
    if dtype == "bfloat16" and not bench.lacks("vllm_cpu", vllm_cpu.missing()):
        tensors = as_tensor(x), as_tensor(gate_up), as_tensor(down)
        contenders["vllm_cpu"] = vllm_cpu.experts(*tensors, experts, 1 / k)
    per_expert = 3 * hidden * inner
    read = len(np.unique(experts)) * per_expert * gate_up.dtype.itemsize
    add(bench, "experts", name, tokens, dtype, contenders, read, tokens * k * per_expert)


def main() -> None:
    bench = Bench("Projections and experts on this machine, against peers.")
    shapes = bench.pick(LINEAR, quick=LINEAR[:2], dry=[(2, 32, 64), (40, 32, 64)])
    for tokens, size_in, size_out in shapes:
        for dtype in DTYPES:
            measure_linear(bench, tokens, size_in, size_out, dtype)
    for name, tokens in bench.pick(EXPERTS, quick=EXPERTS[:4], dry=[("512m", 2), ("512m", 40)]):
        for dtype in DTYPES[name == "30b_a3b" :]:  # its layer is 2.4 GB in f32
            sizes = (4, 2, 64, 64) if bench.dry else MODELS[name]
            measure_experts(bench, name, sizes, tokens, dtype)
    bench.finish()


if __name__ == "__main__":
    main()
