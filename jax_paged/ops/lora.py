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
from jax_paged.native.sharding import WHOLE, Split

TARGET = "jax_paged.lora.v1"
_HINT = "b may be split by its outputs where they are one part; "
_LEAST_BLOCK, _MOST_BLOCKS = 8, 64  # of the reference: tokens of a block, blocks of an adapter


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
      implementation: None = native on CPU, reference elsewhere; "native"; "reference".

    Returns:
      [tokens, out] in x's dtype. Products are summed in f32, a · x is rounded to x's dtype, and the
      sum with the base is rounded once. On CPU a token's bits do not depend on its batch.

    Raises:
      ValueError: an argument's shape or dtype is wrong.
      NotImplementedError: the native kernel does not take these sizes (in and rank are to be
        multiples of 8).

    Differentiable by reverse mode in x, a, b and base (the backward pass is XLA's products). vmap
    runs one call after another.

    Over several devices tokens may be split; and outputs (`b` and `base`), where they are one part.
    x and `a` are whole on each device.

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
    return _differentiable(part_sizes, implementation, x, a, b, adapters, base)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(part_sizes, implementation, *operands):
    return _batched(part_sizes, implementation)(*operands)


def _forward(part_sizes, implementation, *operands):
    return _batched(part_sizes, implementation)(*operands), operands


def _backward(part_sizes, implementation, operands, cotangent):
    del implementation
    _, pullback = jax.vjp(functools.partial(_reference, part_sizes), *operands)
    return pullback(cotangent)


_differentiable.defvjp(_forward, _backward)


@functools.cache
def _batched(part_sizes: tuple[int, ...], implementation: Implementation):
    reference = functools.partial(_reference, part_sizes)
    is_one_part = len(part_sizes) == 1
    rows = "out" if is_one_part else WHOLE
    axes = {"x": "tokens -", "a": "- - -", "b": f"- {rows} -", "adapters": "tokens"}
    result = f"tokens {rows}"
    split = Split(axes | {"base": result}, (result,), fixed=("a", "b"), hint=_HINT)

    def attributes(operands):
        sizes = operands["b"].shape[1:2] if is_one_part else part_sizes
        return {"part_sizes": np.asarray(sizes, np.int64)}

    @sequential_vmap
    def call(*operands):
        (out,) = ffi_call(
            TARGET,
            operands,
            attributes,
            split=split,
            aliases={4: 0},
            implementation=implementation,
            reference=lambda *operands: (reference(*operands),),
        )
        return out

    return reference if implementation == "reference" else call


def _block_size(num_tokens: int) -> int:
    """Tokens per block: 8, and more where there would be more than 64 blocks of one adapter."""
    size = _LEAST_BLOCK
    while size * _MOST_BLOCKS < num_tokens:
        size *= 2
    return size


def _reference(part_sizes, x, a, b, adapters, base):
    """One batched product over blocks of tokens of one adapter; the last one of each may be short.

    There are as many blocks as any choice of adapters needs, so no loop waits for a number, and
    weights are gathered once per block: at most 64 times, and once for each adapter.
    """
    tokens, num_adapters, rank = x.shape[0], b.shape[0], b.shape[2]
    size = _block_size(tokens)
    num_blocks = tokens // size + min(num_adapters, tokens)
    is_adapter = (adapters >= 0) & (adapters < num_adapters)
    numbers = jnp.arange(num_adapters, dtype=jnp.int32)
    chosen = (adapters[:, None] == numbers[None, :]).astype(jnp.int32)
    before = jnp.cumsum(chosen, axis=0, dtype=jnp.int32)  # tokens of an adapter up to a token
    blocks = (before[-1] + (size - 1)) // size
    last_blocks = jnp.cumsum(blocks, dtype=jnp.int32)
    ids = jnp.clip(adapters, 0, num_adapters - 1)
    own = jnp.take_along_axis(before, ids[:, None], axis=1)[:, 0] - 1
    places = (last_blocks - blocks)[ids] * size + own
    places = jnp.where(is_adapter, places, jnp.int32(num_blocks * size))
    token_of = jnp.zeros(num_blocks * size, jnp.int32)
    token_of = token_of.at[places].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    adapter_of = jnp.sum(last_blocks[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    adapter_of = jnp.minimum(adapter_of, num_adapters - 1)

    rows = x[token_of].reshape(num_blocks, size, x.shape[1])
    inner = _products(rows, a[adapter_of]).astype(x.dtype)
    weights = jnp.split(b[adapter_of], np.cumsum(part_sizes)[:-1].tolist(), axis=1)
    outs = [
        _products(inner[:, :, i * rank : (i + 1) * rank], weight)
        for i, weight in enumerate(weights)
    ]
    every = jnp.concatenate(outs, axis=2).reshape(num_blocks * size, b.shape[1])
    added = every[jnp.minimum(places, num_blocks * size - 1)]
    added = jnp.where(is_adapter[:, None], added, jnp.float32(0))
    summed = (base.astype(jnp.float32) + added).astype(x.dtype)
    return jnp.where(is_adapter[:, None], summed, base)


def _products(x, weight):
    """[blocks, tokens, out] of x [blocks, tokens, in] and weight [blocks, out, in], in f32."""
    return jax.lax.dot_general(
        x,
        weight,
        (((2,), (2,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
