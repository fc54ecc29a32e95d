# SPDX-License-Identifier: Apache-2.0
"""Merging of attention results over parts of one KV history."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from jax_paged.checks import (
    Implementation,
    check_float,
    check_implementation,
    check_native,
    check_shape,
)
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import Split
from jax_paged.ops import reference

TARGET = "jax_paged.merge_attention_states.v1"
_OUT, _LSE = "tokens heads -", "tokens heads"
_SPLIT = Split({"out_a": _OUT, "lse_a": _LSE, "out_b": _OUT, "lse_b": _LSE}, results=(_OUT, _LSE))


def merge_attention_states(
    out_a: Float[Array, "tokens num_q_heads head_dim"],
    lse_a: Float[Array, "tokens num_q_heads"],
    out_b: Float[Array, "tokens num_q_heads head_dim"],
    lse_b: Float[Array, "tokens num_q_heads"],
    *,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over two disjoint sets of keys into attention over both, per token and head.

    lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a − lse) · out_a + exp(lse_b − lse) · out_b,
    both computed relative to the larger lse, so that no exp overflows. Sums are f32; out is rounded
    once. More than two parts are merged one after the other.

    A part whose lse is −inf is empty: it holds nothing, whatever stands in its out, and the other
    part comes back bit for bit. Two empty parts give exactly 0 and −inf. Where neither part is
    empty and an lse is +inf or NaN, there is no right answer: out and lse are NaN. (Some kernels
    mark an empty part by +inf: put −inf in its place first.)

    Args:
      out_a, out_b: [tokens, num_q_heads, head_dim], bf16, f16 or f32, both the same.
      lse_a, lse_b: f32[tokens, num_q_heads], natural logarithm, as `return_lse` of the reads gives
        it. Sinks may be in one of the parts only: lse counts them.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      (out, lse), with the shapes and dtypes of a part.

    Raises:
      ValueError: an argument's shape or dtype is wrong.
      NotImplementedError: the native kernels do not take this head_dim.

    Differentiable in all arguments by reverse mode (the backward pass is the reference). vmap is
    one call over all elements.

    Source: the merge operator of attention states in FlashInfer's cascade attention, and the
    rescaling of Flash-Decoding (Dao et al. 2023).

    >>> import jax.numpy as jnp
    >>> one, weight = jnp.ones((1, 1, 8)), jnp.log(jnp.array([[3.0]]))
    >>> out, lse = merge_attention_states(one, weight, 5 * one, jnp.zeros((1, 1)))
    >>> print(out[0, 0, 0], jnp.exp(lse[0, 0]))  # (3 · 1 + 1 · 5) / 4
    2.0 4.0
    """
    check_implementation(implementation)
    check_float("out_a", out_a)
    check_shape("out_a", out_a, "tokens num_q_heads head_dim", (None, None, None))
    check_float("out_b", out_b, out_a.dtype)
    check_shape("out_b", out_b, "tokens num_q_heads head_dim", out_a.shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_float(name, lse, jnp.dtype("float32"))
        check_shape(name, lse, "tokens num_q_heads", out_a.shape[:2])
    check_native("out_a", out_a.shape[2], implementation)
    return _merge(implementation, out_a, lse_a, out_b, lse_b)


def _call(implementation: Implementation, *operands):
    return tuple(
        ffi_call(
            TARGET, operands, {}, split=_SPLIT, implementation=implementation,
            reference=reference.merge_attention_states,
        )
    )  # fmt: skip


@functools.cache
def _batched(implementation: Implementation):
    """`_call` with a batching rule: the mapped axis joins the tokens."""
    call = custom_vmap(functools.partial(_call, implementation))

    @call.def_vmap
    def rule(axis_size, in_batched, *operands):
        tokens = operands[0].shape[int(in_batched[0])]

        def join(x, is_batched):
            x = x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * tokens, *x.shape[2:])

        merged = call(*map(join, operands, in_batched))
        parted = tuple(x.reshape(axis_size, tokens, *x.shape[1:]) for x in merged)
        return parted, (True, True)

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(implementation: Implementation, *operands):
    return _batched(implementation)(*operands)


def _forward(implementation: Implementation, *operands):
    return _batched(implementation)(*operands), operands


def _backward(implementation: Implementation, operands, cotangents):
    _, pullback = jax.vjp(reference.merge_attention_states, *operands)
    return pullback(cotangents)


_differentiable.defvjp(_forward, _backward)
_merge = jax.jit(_differentiable, static_argnums=0)
