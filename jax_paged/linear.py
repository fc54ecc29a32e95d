"""Dense projections: x · weightᵀ with weights in the published [out, in] order.

XLA's own product on CPU runs at a fifth of the memory's speed from two tokens on, and at a
twentieth in bf16; this op reads each weight once at the memory's speed, and multiplies at that of
the vector units when there are many tokens. On CUDA it is XLA's product.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_paged import _ffi
from jax_paged._ffi import Implementation
from jax_paged.sharding import HeadAxes
from jax_paged.validation import check_choice, check_float, check_shape, expect

TARGET = "jax_paged.linear.v1"


def linear(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "out in"],
    *,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "tokens out"]:
    """out[t, n] = Σ_d x[t, d] · weight[n, d], summed in f32.

    Args:
      x: [tokens, in], bf16, f16 or f32.
      weight: [out, in] as published; dtype of x.
      out_dtype: bf16, f16 or f32; None = that of x. The sum is rounded once.
      implementation: None = native on CPU, XLA's product elsewhere and where there are several
        devices (which XLA can split it over); "native"; "reference" = XLA's.

    Returns:
      [tokens, out] in out_dtype. On CPU its bits do not depend on the number of threads.

    Raises:
      ValueError: an argument's shape or dtype is wrong.
      NotImplementedError: the native kernel does not take this size (in: a multiple of 8).

    Differentiable by reverse mode (the backward pass is XLA's products); vmap folds a batch of x
    into tokens where the weight is shared, and else runs one call after another.

    >>> import jax.numpy as jnp
    >>> print(linear(jnp.ones((2, 8)), 3 * jnp.ones((1, 8)))[:, 0])
    [24. 24.]
    """
    check_choice("implementation", implementation, (None, "native", "reference"))
    check_float("x", x)
    check_float("weight", weight, x.dtype)
    check_shape("x", x, "tokens in", (None, None))
    check_shape("weight", weight, "out in", (None, x.shape[1]))
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    expect(
        dtype in (jnp.bfloat16, jnp.float16, jnp.float32),
        "out_dtype",
        "bfloat16, float16 or float32",
        dtype.name,
    )
    if implementation != "reference" and (x.shape[1] % 8 or not x.shape[1]):
        raise NotImplementedError(
            f"x: expected a positive multiple of 8 columns, got {x.shape[1]}; "
            "implementation='reference' takes any"
        )
    return _linear(dtype, implementation, x, weight)


def contract_last(x: jax.Array, weight: jax.Array, out_dtype=None) -> jax.Array:
    """XLA's own product of x [tokens, in] and weight [out, in]ᵀ, summed in f32.

    Weights stay in the published [out, in] order: with one token XLA:GPU then reads them once,
    where [in, out] makes it write all products first.
    """
    exact = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=out_dtype or x.dtype,
    )


@functools.cache
def _batched(dtype: jnp.dtype, implementation: Implementation):
    @custom_vmap
    def call(x, weight):
        (out,) = _ffi.ffi_call(
            TARGET,
            (x, weight),
            {},
            heads=HeadAxes({"x": None, "weight": None}, results=(None,)),
            implementation=implementation,
            reference=lambda x, weight: (contract_last(x, weight, dtype),),
        )
        return out

    @call.def_vmap
    def rule(axis_size, in_batched, x, weight):
        if in_batched == [True, False]:
            out = call(x.reshape(-1, x.shape[-1]), weight)
            return out.reshape(axis_size, -1, out.shape[-1]), True
        if in_batched == [False, True]:
            return jax.lax.map(lambda weight: call(x, weight), weight), True
        return jax.lax.map(lambda operands: call(*operands), (x, weight)), True

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(dtype, implementation, x, weight):
    return _batched(dtype, implementation)(x, weight)


def _forward(dtype, implementation, x, weight):
    return _batched(dtype, implementation)(x, weight), (x, weight)


def _backward(dtype, implementation, operands, cotangent):
    _, pullback = jax.vjp(functools.partial(contract_last, out_dtype=dtype), *operands)
    return pullback(cotangent)


_differentiable.defvjp(_forward, _backward)
_linear = jax.jit(_differentiable, static_argnums=(0, 1))
