# SPDX-License-Identifier: Apache-2.0
"""Dense projections: x · weightᵀ with weights in the published [out, in] order.

XLA's own product on CPU runs at a fifth of the memory's speed from two tokens on, and at a
twentieth in bf16; this op reads each weight once at the memory's speed, and multiplies at that of
the vector units when there are many tokens. Weights may be int8 or fp8 with a scale per output, or
per block of 128 x 128: a quarter of the bytes of f32. On CUDA it is XLA's product.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8

from jax_paged.checks import (
    SCALE_BLOCK,
    WEIGHT_DTYPES,
    Implementation,
    check_float,
    check_implementation,
    check_live,
    check_shape,
    check_weight,
    expect,
)
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import WHOLE, Split
from jax_paged.ops.int4 import Int4Weight, check_int4, dequantize
from jax_paged.ops.packing import PackedWeight, panels_of, unpack
from jax_paged.ops.reference import QMAX, quantize

TARGET = "jax_paged.linear.v2"
INT4_TARGET = "jax_paged.linear_int4.v2"


def linear(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "out in"] | Int8[Array, "out in"] | PackedWeight | Int4Weight,
    *,
    weight_scale: Float[Array, "out"] | Float[Array, "out_blocks in_blocks"] | None = None,
    live: Bool[Array, "tokens"] | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "tokens out"]:
    """out[t, n] = weight_scale[n] · Σ_d x[t, d] · weight[n, d], summed in f32.

    Args:
      x: [tokens, in], bf16, f16 or f32.
      weight: [out, in] as published; dtype of x, or int8 or f8e4m3fn (see `quantize_weight`). Or
        such a one after `pack_weight`, which is faster on CPU. Or 4 bits of `quantize_int4`, whose
        scales and offsets it brings: out[t, n] = Σ_g scale[n, g] · Σ_d x[t, d] · code[n, d] +
        offset[n, g] · Σ_d x[t, d], d in group g.
      weight_scale: f32[out], of such 8-bit weights and of no others. Or one for each block of 128 ×
        128, f32[⌈out / 128⌉, ⌈in / 128⌉], as DeepSeek-V3 and Qwen publish fp8 weights: then
        out[t, n] = Σ_b weight_scale[n // 128, b] · Σ_d x[t, d] · weight[n, d], d in block b.
      live: tokens that count; the others get 0. On a CPU those behind the last one cost nothing, so
        a step of few tokens may have the shape of a large one. None = all.
      out_dtype: bf16, f16 or f32; None = that of x. The sum is rounded once.
      implementation: None = native on CPU, XLA's product elsewhere; "native"; "reference" = XLA's,
        also of how a program over several devices splits it.

    Returns:
      [tokens, out] in out_dtype. On CPU its bits do not depend on the number of threads.

    Raises:
      ValueError: an argument's shape or dtype is wrong.
      NotImplementedError: the native kernel does not take this size (in: a multiple of 8).

    Differentiable by reverse mode (the backward pass is XLA's products), not in int8 weights; a
    gradient of f8e4m3fn weights is rounded to their dtype. vmap folds a batch of x into tokens
    where the weight is shared, and else runs one call after another.

    Over several devices the weight decides, and is never moved. Split by out, each device has its
    own outputs. Split by in, each one sums its own part of the depth (on CPU a multiple of 8), and
    one all-reduce adds the parts up in f32. Tokens may be split along other mesh axes. A weight
    whose blocks have scales may be split inside `jax.shard_map` alone.

    >>> import jax.numpy as jnp
    >>> print(linear(jnp.ones((2, 8)), 3 * jnp.ones((1, 8)))[:, 0])
    [24. 24.]
    """
    check_implementation(implementation)
    check_float("x", x)
    check_shape("x", x, "tokens in", (None, None))
    if isinstance(weight, Int4Weight):
        check_int4("weight", weight, x.shape[1])
        expect(weight_scale is None, "weight_scale", "None beside 4 bits", "one")
    else:
        check_weight("weight", weight, weight_scale, x.dtype, "out in", (None, x.shape[1]))
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    expect(
        dtype in (jnp.bfloat16, jnp.float16, jnp.float32),
        "out_dtype",
        "bfloat16, float16 or float32",
        dtype.name,
    )
    if live is not None:
        check_live(live, x.shape[0])
    if isinstance(weight, Int4Weight):
        return _linear(dtype, implementation, x, weight.codes, weight.scales, live)
    if implementation != "reference" and (x.shape[1] % 8 or not x.shape[1]):
        raise NotImplementedError(
            f"x: expected a positive multiple of 8 columns, got {x.shape[1]}; "
            "implementation='reference' takes any"
        )
    return _linear(dtype, implementation, x, panels_of(weight), weight_scale, live)


def quantize_weight(
    weight: Float[Array, "*experts out in"], *, dtype: DTypeLike = jnp.int8
) -> tuple[
    Int8[Array, "*experts out in"] | Float[Array, "*experts out in"], Float[Array, "*experts out"]
]:
    """Weights as 8-bit codes with one scale per output: weight ≈ scale[..., None] · code.

    scale = max |weight| / M over `in`, M = 127 for int8 and 448 for f8e4m3fn, and the quotient is
    rounded to nearest even and clamped to ±M.

    Args:
      weight: [..., out, in], bf16, f16 or f32; e.g. of `linear`, or of all experts. An output whose
        weights are all 0 gets scale 0; one with a weight that is not finite gets a scale that is
        not.
      dtype: int8, whose error is at most half a scale; or f8e4m3fn, whose error is at most a
        sixteenth of the weight, or 2⁻¹⁰ scales where that is more.

    Returns:
      (codes of weight's shape, f32 scale of [..., out]).

    Raises:
      ValueError: an argument's shape or dtype is wrong.

    Not differentiable.

    >>> import jax.numpy as jnp
    >>> print(*quantize_weight(jnp.array([[1.0, -2.54, 0.004]])))
    [[  50 -127    0]] [0.02]
    >>> print(*quantize_weight(jnp.array([[1.0, -4.48, 0.002]]), dtype=jnp.float8_e4m3fn))
    [[96 -448 0.203125]] [0.01]
    """
    check_float("weight", weight)
    expect(weight.ndim >= 2, "weight", "shape [..., out, in]", list(weight.shape))
    dtype = jnp.dtype(dtype)
    names = " or ".join(d.name for d in WEIGHT_DTYPES)
    expect(dtype in WEIGHT_DTYPES, "dtype", names, dtype.name)
    return _quantize(dtype, weight)


@functools.partial(jax.jit, static_argnums=0)
def _quantize(dtype, weight):
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, initial=0.0) / jnp.float32(QMAX[dtype.name])
    return quantize(wide, scale[..., None], dtype), scale


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


def contract(
    out_dtype, x: jax.Array, weight: jax.Array, scale: jax.Array | None, parts: int = 1
) -> jax.Array:
    """The same, where weights may be packed, or 8-bit, which every float dtype holds exactly.

    Those of 4 bits, which come as the words and scales of an `Int4Weight`, are multiplied in f32.
    """
    if _is_int4(weight):
        wide = x.astype(jnp.float32), dequantize(weight, scale)
        return contract_last(*wide, jnp.float32).astype(out_dtype)
    weight = unpack(weight) if weight.ndim == 3 else weight
    if weight.dtype not in WEIGHT_DTYPES or scale is None:
        return contract_last(x, weight, out_dtype)
    weight = weight.astype(x.dtype)
    if scale.ndim == 2:
        return _contract_blocks(x, weight, scale, parts).astype(out_dtype)
    sums = contract_last(x, weight, jnp.float32)
    return (sums * scale[None, :]).astype(out_dtype)


def _contract_blocks(x: jax.Array, weight: jax.Array, scale: jax.Array, parts: int) -> jax.Array:
    """f32 sums of each block of the depth, times its scale, added up: 256 tokens at once.

    The outputs are those of several parts, each of which begins with a block.
    """
    (out, depth), blocks = weight.shape, scale.shape[1]
    scale = jnp.repeat(scale.reshape(parts, -1, blocks), SCALE_BLOCK, axis=1)
    scale = scale[:, : out // parts].reshape(out, blocks)
    padding = ((0, 0), (0, -depth % SCALE_BLOCK))
    x, weight = (jnp.pad(a, padding).reshape(len(a), blocks, SCALE_BLOCK) for a in (x, weight))

    def of_row(row):
        exact = jax.lax.Precision.HIGHEST if row.dtype == jnp.float32 else None
        sums = jnp.einsum(
            "bd,obd->bo", row, weight, precision=exact, preferred_element_type=jnp.float32
        )
        return jnp.sum(sums * scale.T, axis=0)

    at_once = 256
    if len(x) <= at_once:
        return jax.vmap(of_row)(x)
    return jax.lax.map(of_row, x, batch_size=at_once)


def _contract_live(
    out_dtype, x: jax.Array, weight: jax.Array, scale: jax.Array, live: jax.Array
) -> jax.Array:
    out = contract(out_dtype, x, weight, scale)
    return jnp.where(live[:, None], out, 0) if live.size else out


def _is_int4(weight: jax.Array) -> bool:
    """Whether a kernel's operand is the words of an `Int4Weight`."""
    return weight.dtype == jnp.uint32


def _split(weight: jax.Array, scale: jax.Array, live: jax.Array) -> Split:
    more = f" {WHOLE}" * (weight.ndim - 2)  # packed
    of_live = {"live": "tokens" if live.size else WHOLE}
    if _is_int4(weight):
        axes = {
            "x": f"tokens {WHOLE}", "weight": f"out {WHOLE}{more}",
            "weight_scale": "out" + f" {WHOLE}" * (scale.ndim - 1),
        }  # fmt: skip
        return Split(axes | of_live, results=("tokens out",), fixed=("weight",))
    if scale.ndim == 2:
        whole = f"{WHOLE} {WHOLE}"
        axes = {"x": f"tokens {WHOLE}", "weight": whole + more, "weight_scale": whole}
        return Split(axes | of_live, results=(f"tokens {WHOLE}",), fixed=("weight",))
    of_scale = "out" if scale.size else WHOLE
    axes = {"x": "tokens in", "weight": f"out in{more}", "weight_scale": of_scale}
    return Split(axes | of_live, results=("tokens out",), fixed=("weight",), summed=("in",))


@functools.cache
def _batched(dtype: jnp.dtype, implementation: Implementation):
    @custom_vmap
    def call(x, weight, scale, live):
        (out,) = ffi_call(
            INT4_TARGET if _is_int4(weight) else TARGET,
            (x, weight, scale, live),
            {},
            split=_split(weight, scale, live),
            implementation=implementation,
            reference=lambda *operands, out_dtype=dtype: (_contract_live(out_dtype, *operands),),
        )
        return out

    @call.def_vmap
    def rule(axis_size, in_batched, *operands):
        if in_batched[:3] == [True, False, False]:
            x, weight, scale, live = operands
            if live.size and not in_batched[3]:
                live = jnp.broadcast_to(live, (axis_size, *live.shape))
            out = call(x.reshape(-1, x.shape[-1]), weight, scale, live.ravel())
            return out.reshape(axis_size, -1, out.shape[-1]), True
        # Those that all calls share are not operands of the loop.
        own = [x for x, is_own in zip(operands, in_batched, strict=True) if is_own]

        def one(own):
            each = iter(own)
            pairs = zip(operands, in_batched, strict=True)
            return call(*(next(each) if is_own else x for x, is_own in pairs))

        return jax.lax.map(one, own), True

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(dtype, implementation, *operands):
    return _batched(dtype, implementation)(*operands)


def _forward(dtype, implementation, *operands):
    return _batched(dtype, implementation)(*operands), operands


def _backward(dtype, implementation, operands, cotangent):
    _, pullback = jax.vjp(functools.partial(_contract_live, dtype), *operands)
    return pullback(cotangent)


_differentiable.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _linear(dtype, implementation, x, weight, scale, live):
    scale = jnp.zeros(0, jnp.float32) if scale is None else scale
    live = jnp.zeros(0, jnp.bool_) if live is None else live
    return _differentiable(dtype, implementation, x, weight, scale, live)
