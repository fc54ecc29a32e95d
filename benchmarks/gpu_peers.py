# SPDX-License-Identifier: Apache-2.0
"""What paged attention is compared with on a GPU, in the same run and on the same data.

Each peer is checked against our output before it is timed, and runs its calls over the same layers
in turn, replayed as a CUDA graph where it is torch that launches them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import paged_attention, ragged_paged_attention


class Unavailable(Exception):
    """The peer is not installed, or does not take this shape."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """One batch: stacked pages on the device, every layer a set of inputs of its own."""

    q: jax.Array  # [T, Hq, D]
    k_pages: jax.Array  # [L, num_pages, Hkv, page_size, D]
    v_pages: jax.Array
    page_table: jax.Array  # i32[S, pages_per_seq]
    q_lens: np.ndarray  # i32[S]
    seq_lens: np.ndarray  # i32[S]
    causal: bool

    @property
    def num_layers(self) -> int:
        return self.k_pages.shape[0]

    @property
    def is_decode(self) -> bool:
        return bool((self.q_lens == 1).all())


@dataclasses.dataclass(frozen=True)
class Peer:
    """run(n) does n calls and returns when they are done; output() is that of layer 0.

    longest_chain: calls in a program beyond which compiling it takes too long.
    """

    run: Callable[[int], object]
    output: Callable[[], Any]
    longest_chain: int = 64


@functools.partial(jax.jit, static_argnames=("implementation", "calls", "is_decode", "causal"))
def _chain(
    q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, *,
    implementation, calls, is_decode, causal,
):  # fmt: skip
    for call in range(calls):
        arguments = (q, k_pages, v_pages, page_table, seq_lens)
        options = {"layer": call % k_pages.shape[0], "implementation": implementation}
        if is_decode:
            q = paged_attention(*arguments, **options)
        else:
            q = ragged_paged_attention(*arguments, cu_q_lens, causal=causal, **options)
    return q


def chain(pools: Pools, implementation: str, calls: int) -> jax.Array:
    """`calls` calls of ours; the output of one is the query of the next."""
    return _chain(
        pools.q, pools.k_pages, pools.v_pages, pools.page_table, jnp.asarray(pools.seq_lens),
        jnp.asarray(np.concatenate([[0], np.cumsum(pools.q_lens)]).astype(np.int32)),
        implementation=implementation, calls=calls, is_decode=pools.is_decode, causal=pools.causal,
    )  # fmt: skip


def xla_gather(pools: Pools, dry: bool) -> Peer:
    """Our own jnp reference: gathers the pages into dense arrays, XLA does the rest."""

    def run(calls: int):
        return jax.block_until_ready(chain(pools, "reference", calls))

    return Peer(run, lambda: run(1), longest_chain=8)


def pallas(pools: Pools, dry: bool) -> Peer:
    """JAX's own paged attention for GPUs (Pallas on Triton), pages as [Hkv, num_pages, …]."""
    if not pools.is_decode:
        raise Unavailable("takes one query per row")
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as attend
    except ImportError as error:
        raise Unavailable(f"not in jax {jax.__version__}: {error}") from None
    width = pools.page_table.shape[1]
    splits = 16 if width % (16 * 8) == 0 else 1
    pages_per_block = max(n for n in (1, 2, 4, 8) if width // splits % n == 0)
    table = jnp.maximum(pools.page_table, 0)
    lengths = jnp.asarray(pools.seq_lens)
    scale = jnp.asarray(pools.q.shape[-1] ** -0.5, pools.q.dtype)
    layers = [
        tuple(jnp.swapaxes(pages[i], 0, 1) for pages in (pools.k_pages, pools.v_pages))
        for i in range(pools.num_layers)
    ]

    @functools.partial(jax.jit, static_argnames="calls")
    def chained(q, layers, table, lengths, *, calls):
        for call in range(calls):
            q = attend(  # does not scale the logits itself
                q * scale, *layers[call % len(layers)], table, lengths, k_splits=splits,
                pages_per_compute_block=pages_per_block, interpret=dry,
            )  # fmt: skip
        return q

    def run(calls: int):
        return jax.block_until_ready(chained(pools.q, layers, table, lengths, calls=calls))

    return Peer(run, lambda: run(1), longest_chain=24)


def cudnn(pools: Pools, dry: bool) -> Peer:
    """cuDNN through jax: on our pages in decode, on dense K and V in prefill."""
    if jax.default_backend() != "gpu":
        raise Unavailable("cuDNN needs a GPU")
    if pools.is_decode:
        attend, layers = _cudnn_pages(pools)
    else:
        attend, layers = _cudnn_dense(pools)

    @functools.partial(jax.jit, static_argnames="calls")
    def chained(q, layers, *, calls):
        for call in range(calls):
            q = attend(q, *layers[call % len(layers)])
        return q

    def run(calls: int):
        return jax.block_until_ready(chained(pools.q, layers, calls=calls))

    return Peer(run, lambda: run(1), longest_chain=32)


def _cudnn_pages(pools: Pools):
    """(attend, layers): its pages BNTH are [num_pages, heads, page, dim]; one query per row."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    lens = jnp.asarray(pools.seq_lens)
    table = jnp.maximum(pools.page_table, 0)[:, None, :, None]

    def attend(q, k_pages, v_pages):
        out: Any = paged_attention(
            q[:, :, None], k_pages, v_pages, jnp.ones_like(lens), lens, table, table,
            scale=q.shape[-1] ** -0.5, mask_type=MaskType.PADDING, qkv_layout="BNTH",
        )  # fmt: skip
        return jax.tree.leaves(out)[0][:, :, 0]

    return attend, [(pools.k_pages[i], pools.v_pages[i]) for i in range(pools.num_layers)]


def _cudnn_dense(pools: Pools):
    """(attend, layers) of prompts of one length."""
    rows, new = len(pools.seq_lens), int(pools.q_lens[0])
    if (pools.seq_lens != pools.q_lens).any() or (pools.q_lens != new).any():
        raise Unavailable("takes prompts of one length, from their first token")

    def dense(pages):  # [rows, width, heads, page, dim] → [rows, tokens, heads, dim]
        tokens = jnp.moveaxis(pages[pools.page_table], 2, 3)
        return tokens.reshape(rows, -1, *tokens.shape[-2:])[:, :new]

    def attend(q, k, v):
        out = jax.nn.dot_product_attention(
            q.reshape(rows, new, *q.shape[1:]), k, v, is_causal=pools.causal, implementation="cudnn"
        )
        return out.reshape(q.shape)

    layers = [(dense(pools.k_pages[i]), dense(pools.v_pages[i])) for i in range(pools.num_layers)]
    return attend, layers


def _torch():
    try:
        import torch
    except ImportError:
        raise Unavailable("torch is not installed") from None
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise Unavailable("this torch sees no GPU")
    return torch


def _replayed(torch, call: Callable[[int], Any], num_layers: int) -> Callable[[int], object]:
    """run(n) for calls of torch: a CUDA graph of n of them, or on the CPU just the calls."""
    if not torch.cuda.is_available():
        return lambda calls: [call(i % num_layers) for i in range(calls)]

    @functools.cache
    def graph_of(calls: int):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call(0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [call(i % num_layers) for i in range(calls)]
        return graph, outputs  # the outputs' memory belongs to the graph

    def run(calls: int):
        graph_of(calls)[0].replay()
        torch.cuda.synchronize()

    return run


def torch_sdpa(pools: Pools, dry: bool) -> Peer:
    """torch SDPA on dense K and V: no pages to look up, the best that torch offers."""
    torch = _torch()
    rows, length, new = len(pools.seq_lens), int(pools.seq_lens[0]), int(pools.q_lens[0])
    if (pools.seq_lens != length).any() or (pools.q_lens != new).any():
        raise Unavailable("rows of different lengths")
    if not pools.is_decode and pools.causal and new != length:
        raise Unavailable("its causal mask wants as many queries as keys")
    num_q_heads, head_dim = pools.q.shape[1:]
    num_kv_heads = pools.k_pages.shape[2]
    shape = (rows, num_kv_heads, length, head_dim)

    def dense(pages):  # [rows, width, heads, page, dim] → [rows, heads, tokens, dim]
        tokens = jnp.moveaxis(pages[pools.page_table], 2, 1)
        return torch.from_dlpack(tokens.reshape(*tokens.shape[:2], -1, head_dim)[:, :, :length] + 0)

    layers = [(dense(pools.k_pages[i]), dense(pools.v_pages[i])) for i in range(pools.num_layers)]
    assert tuple(layers[0][0].shape) == shape
    q = torch.from_dlpack(pools.q)
    attend = torch.nn.functional.scaled_dot_product_attention
    if pools.is_decode:  # the heads of a group as rows, so that each KV head is read once
        q = q.reshape(rows, num_kv_heads, num_q_heads // num_kv_heads, head_dim)

        def call(layer: int):
            return attend(q, *layers[layer])

    else:
        q = q.reshape(rows, new, num_q_heads, head_dim).transpose(1, 2)

        def call(layer: int):
            return attend(q, *layers[layer], is_causal=pools.causal, enable_gqa=True)

    def output():
        out = call(0) if pools.is_decode else call(0).transpose(1, 2)
        return out.reshape(-1, num_q_heads, head_dim).float().cpu().numpy()

    return Peer(_replayed(torch, call, pools.num_layers), output)


def flashinfer(pools: Pools, dry: bool) -> Peer:
    """FlashInfer's batch wrappers on our own pages; planned once, outside of what is timed."""
    torch = _torch()
    try:
        import flashinfer as library
    except ImportError:
        raise Unavailable("flashinfer is not installed") from None
    q = torch.from_dlpack(pools.q)
    k_pages, v_pages = torch.from_dlpack(pools.k_pages), torch.from_dlpack(pools.v_pages)
    page, head_dim = pools.k_pages.shape[-2:]
    counts = -(-pools.seq_lens // page)
    table = np.asarray(pools.page_table)
    indices = np.concatenate([row[:n] for row, n in zip(table, counts, strict=True)])
    starts = np.concatenate([[0], np.cumsum(counts)])
    last = pools.seq_lens - (counts - 1) * page
    lists = [torch.as_tensor(x.astype(np.int32), device=q.device) for x in (starts, indices, last)]
    sizes = (pools.q.shape[1], pools.k_pages.shape[2], head_dim, page)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    if pools.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        wrapper.plan(*lists, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        begins = np.concatenate([[0], np.cumsum(pools.q_lens)]).astype(np.int32)
        begins = torch.as_tensor(begins, device=q.device)
        wrapper.plan(begins, *lists, *sizes, causal=pools.causal, q_data_type=q.dtype)

    def call(layer: int):
        return wrapper.run(q, (k_pages[layer], v_pages[layer]))

    return Peer(_replayed(torch, call, pools.num_layers), lambda: call(0).float().cpu().numpy())


PEERS: dict[str, Callable[[Pools, bool], Peer]] = {
    "xla_gather": xla_gather,
    "pallas": pallas,
    "cudnn": cudnn,
    "torch_sdpa": torch_sdpa,
    "flashinfer": flashinfer,
}
