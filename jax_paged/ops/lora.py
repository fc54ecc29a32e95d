# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, Hu et al., 2021): many in one batch, one for each token.

The tokens are grouped by adapter, so that each adapter's weights are read once for all of its
tokens (the idea of Punica's and S-LoRA's segmented products). One mechanism serves a decode batch
in which every row has an adapter of its own, and a prompt of one adapter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from jax_paged.checks import (
    Implementation,
    as_index,
    check_float,
    check_implementation,
    check_shape,
    expect,
)
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import HeadAxes
from jax_paged.ops.linear import contract_last

TARGET = "jax_paged.lora.v1"
_BLOCK = 8  # tokens of a product of the reference: one size, so that a token's bits are the same
_OPERANDS = ("x", "a", "b", "adapters", "base")


def lora(
    x: Float[Array, "tokens in"],
    a: Float[Array, "num_adapters parts_rank in"],
    b: Float[Array, "num_adapters out rank"],
    adapters: Int[Array, "tokens"],
    *,
    base: Float[Array, "tokens out"] | None = None,
    part_sizes: tuple[int, ...] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "tokens out"]:
    """Adds each token's low-rank product: out[t] = base[t] + b[e] · (a[e] · x[t]), e = adapters[t].

    Projections that are one leaf, such as q, k and v, have an `a` each and share this call: their
    `a` lie one after another, and each part of the outputs takes the products of its own.

    Args:
      x: [tokens, in], bf16, f16 or f32.
      a: [num_adapters, parts · rank, in], dtype of x.
      b: [num_adapters, out, rank], dtype of x, with the adapter's scale multiplied in.
      adapters: integers [tokens]. A token whose adapter is outside [0, num_adapters) keeps the bits
        of its base, and nothing is read for it.
      base: [tokens, out], dtype of x; None = zeros.
      part_sizes: outputs of each part, at least 1, in their order; None = one part. Static.
      implementation: None = native on CPU, reference elsewhere and in a program over several
        devices; "native"; "reference".

    Returns:
      [tokens, out] in x's dtype. Products are summed in f32, a · x is rounded to x's dtype, and the
      sum with the base is rounded once. On CPU a token's bits do not depend on its batch.

    Raises:
      ValueError: an argument's shape or dtype is wrong.
      NotImplementedError: the native kernel does not take these sizes (in and rank are to be
        multiples of 8).

    Not differentiable in reverse mode. vmap runs one call after another.

    >>> import jax.numpy as jnp
    >>> x, a, b = jnp.ones((3, 8)), jnp.ones((2, 8, 8)), jnp.ones((2, 4, 8))
    >>> print(lora(x, a, b, jnp.array([1, -1, 0]), base=jnp.ones((3, 4)))[:, 0])  # 1 + 8 · 8
    [65.  1. 65.]
    """
    check_implementation(implementation)
    check_float("x", x)
    check_shape("x", x, "tokens in", (None, None))
    tokens, depth = x.shape
    check_float("b", b, x.dtype)
    check_shape("b", b, "num_adapters out rank", (None, None, None))
    num_adapters, out, rank = b.shape
    sizes = (out,) if part_sizes is None else tuple(part_sizes)
    ok = all(isinstance(n, int | np.integer) and n >= 1 for n in sizes) and sum(sizes) == out
    expect(ok, "part_sizes", f"integers of at least 1 that add up to {out}", part_sizes)
    check_float("a", a, x.dtype)
    axes, wanted = "num_adapters parts·rank in", (num_adapters, len(sizes) * rank, depth)
    check_shape("a", a, axes, wanted, hint=f" (parts={len(sizes)}, rank={rank})")
    adapters = as_index("adapters", adapters)
    check_shape("adapters", adapters, "tokens", (tokens,))
    if base is not None:
        check_float("base", base, x.dtype)
        check_shape("base", base, "tokens out", (tokens, out))
    if implementation != "reference" and (depth % 8 or rank % 8):
        raise NotImplementedError(
            f"a: expected columns and a rank that are multiples of 8, got {depth} and {rank}; "
            "implementation='reference' takes any"
        )
    return _lora(tuple(map(int, sizes)), implementation, x, a, b, adapters, base)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _lora(part_sizes, implementation, x, a, b, adapters, base):
    if base is None:
        base = jnp.zeros((x.shape[0], b.shape[1]), x.dtype)
    if 0 in (*x.shape, *a.shape, *b.shape):
        return base
    return _batched(part_sizes, implementation)(x, a, b, adapters, base)


@functools.cache
def _batched(part_sizes: tuple[int, ...], implementation: Implementation):
    reference = functools.partial(_reference, part_sizes)

    @sequential_vmap
    def call(*operands):
        (out,) = ffi_call(
            TARGET,
            operands,
            {"part_sizes": np.asarray(part_sizes, np.int64)},
            heads=HeadAxes(dict.fromkeys(_OPERANDS), results=(None,)),
            aliases={4: 0},
            implementation=implementation,
            reference=lambda *operands: (reference(*operands),),
        )
        return out

    return reference if implementation == "reference" else call


def _reference(part_sizes, x, a, b, adapters, base):
    """A loop over blocks of 8 tokens of one adapter; the last block of an adapter may be short."""
    tokens, num_adapters, rank = x.shape[0], b.shape[0], b.shape[2]
    is_adapter = (adapters >= 0) & (adapters < num_adapters)
    ids = jnp.where(is_adapter, adapters, jnp.int32(num_adapters))  # the others sort last
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    numbers = jnp.arange(num_adapters, dtype=jnp.int32)
    counts = jnp.sum(ids[:, None] == numbers[None, :], axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    blocks = (counts + (_BLOCK - 1)) // _BLOCK
    last_blocks = jnp.cumsum(blocks, dtype=jnp.int32)
    sorted_tokens = jnp.pad(order, (0, _BLOCK))
    ends = np.cumsum(part_sizes).tolist()

    def run_block(block, sorted_out):
        adapter = jnp.sum(last_blocks <= block, dtype=jnp.int32)
        begin = starts[adapter] + (block - last_blocks[adapter] + blocks[adapter]) * _BLOCK
        rows = x[jax.lax.dynamic_slice(sorted_tokens, (begin,), (_BLOCK,))]
        inner = contract_last(rows, a[adapter], jnp.float32).astype(x.dtype)
        own = [
            contract_last(inner[:, i * rank : (i + 1) * rank], weight, jnp.float32)
            for i, weight in enumerate(jnp.split(b[adapter], ends[:-1]))
        ]
        out = jnp.concatenate(own, axis=1)
        # A short block also writes rows beyond its own; the next adapter's block overwrites them.
        return jax.lax.dynamic_update_slice(sorted_out, out, (begin, jnp.int32(0)))

    nothing = jnp.zeros((tokens + _BLOCK, b.shape[1]), jnp.float32)
    sorted_out = jax.lax.fori_loop(jnp.int32(0), last_blocks[-1], run_block, nothing)
    rank_of = jnp.zeros(tokens, jnp.int32).at[order].set(jnp.arange(tokens, dtype=jnp.int32))
    added = (base.astype(jnp.float32) + sorted_out[rank_of]).astype(x.dtype)
    return jnp.where(is_adapter[:, None], added, base)
