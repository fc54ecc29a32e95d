# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits, with a scale for each group of the depth, as GGUF's Q4 files have them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jax_paged.checks import check_array, check_float, check_shape, expect
from jax_paged.ops.packing import PANEL

WORD = 8  # codes
CENTER, LARGEST = 8, 15  # of codes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """Weights [..., out, in] in 4 bits, which `pack_int4` and `quantize_int4` make.

    `linear` and `moe_experts` take it in place of an array.

    With d in group g of the depth, and codes of 0 to 15, weight[n, d] = scale[n, g] · code[n, d] +
    offset[n, g]; or without offsets scale[n, g] · (code[n, d] - 8). So GGUF's Q4_1 and Q4_0 are. As
    a pytree it has two leaves.

    Args:
      codes: u32[..., out / 16, in / 8, 16]. Bits 4 k of the low half of a word are element 2 k of
        its 8, those of the high half element 2 k + 1.
      scales: [..., out / 16, groups, 16], f16 or f32; with offsets [..., out / 16, groups, 2, 16],
        the scales and then the offsets.
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        *leading, panels, words, _ = self.codes.shape
        return (*leading, PANEL * panels, WORD * words)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int4)

    @property
    def ndim(self) -> int:
        return self.codes.ndim - 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def has_offsets(self) -> bool:
        """Whether groups have offsets."""
        return self.scales.ndim > self.codes.ndim

    @property
    def group(self) -> int:
        """Elements of the depth that share a scale."""
        return self.shape[-1] // self.scales.shape[self.codes.ndim - 2]

    def dequantize(self) -> jax.Array:
        """The f32 weights [..., out, in]."""
        return dequantize(self.codes, self.scales)


def pack_int4(
    codes: Integer[Array, "*experts out in"],
    scale: Float[Array, "*experts out groups"],
    offset: Float[Array, "*experts out groups"] | None = None,
) -> Int4Weight:
    """Puts codes of 0 to 15 into words, in the order in which the CPU's kernel multiplies them.

    Args:
      codes: [..., out, in], of which 4 bits are kept. out is a multiple of 16, in one of 32.
      scale, offset: of the groups of the depth, as many as there are: in / groups is a multiple of
        32. They stay f16 where they are, and else become f32. None = what a code is above 8 counts.

    Raises:
      ValueError: a shape or dtype is wrong.

    >>> import jax.numpy as jnp
    >>> packed = pack_int4(jnp.full((16, 32), 5), jnp.full((16, 1), 0.5))
    >>> print(packed.shape, packed.codes.shape, packed.dequantize()[0, 0])
    (16, 32) (1, 4, 16) -1.5
    """
    check_array("codes", codes)
    expect(codes.ndim >= 2, "codes", "shape [..., out, in]", list(codes.shape))
    is_integer = jnp.issubdtype(codes.dtype, jnp.integer)
    expect(is_integer, "codes", "an integer dtype", codes.dtype.name)
    *leading, out, depth = codes.shape
    expect(out > 0 and out % PANEL == 0, "codes", "out to be a multiple of 16", out)
    expect(depth > 0 and depth % 32 == 0, "codes", "in to be a multiple of 32", depth)
    names = " ".join([*(f"axis_{i}" for i in range(len(leading))), "out", "groups"])
    for name, given in (("scale", scale), ("offset", offset)):
        if given is None:
            continue
        check_float(name, given)
        groups = scale.shape[-1] if scale.ndim else None
        check_shape(name, given, names, (*leading, out, groups))
    groups = scale.shape[-1]
    fits = groups > 0 and depth % groups == 0 and depth // groups % 32 == 0
    expect(fits, "scale", f"groups of a multiple of 32 of {depth} elements", f"{groups} groups")
    return Int4Weight(*_pack(codes, scale, offset))


@jax.jit
def _pack(codes, scale, offset):
    *leading, out, depth = codes.shape
    nibbles = codes.astype(jnp.int32).astype(jnp.uint32) & jnp.uint32(15)
    nibbles = nibbles.reshape(*leading, out // PANEL, PANEL, depth // WORD, WORD)
    words = functools.reduce(
        jnp.bitwise_or, (nibbles[..., d] << jnp.uint32(_shift(d)) for d in range(WORD))
    )

    all_half = scale.dtype == jnp.float16 and (offset is None or offset.dtype == jnp.float16)

    def panels(x):  # [..., out, n] → [..., out / 16, n, 16]
        x = x.astype(jnp.float16 if all_half else jnp.float32)
        return jnp.swapaxes(x.reshape(*leading, out // PANEL, PANEL, x.shape[-1]), -1, -2)

    scales = panels(scale)
    if offset is not None:
        scales = jnp.stack([scales, panels(offset)], axis=-2)
    return jnp.swapaxes(words, -1, -2), scales


def _shift(d: int) -> int:
    """The first bit of element d of a word."""
    return d % 2 * 16 + d // 2 * 4


@jax.jit
def dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """f32 weights [..., out, in]."""
    *leading, panels, words, _ = codes.shape
    nibbles = jnp.stack(
        [codes >> jnp.uint32(_shift(d)) & jnp.uint32(LARGEST) for d in range(WORD)], axis=-2
    )  # [..., panels, words, 8, 16]
    with_offsets = scales.ndim > codes.ndim
    groups = scales.shape[codes.ndim - 2]
    wide = nibbles.reshape(*leading, panels, groups, -1, PANEL).astype(jnp.float32)
    scales = scales.astype(jnp.float32)
    if with_offsets:
        wide = wide * scales[..., 0, None, :] + scales[..., 1, None, :]
    else:
        wide = (wide - CENTER) * scales[..., None, :]
    wide = wide.reshape(*leading, panels, WORD * words, PANEL)
    return jnp.swapaxes(wide, -1, -2).reshape(*leading, panels * PANEL, WORD * words)


def check_int4(name: str, weight: Int4Weight, depth: int, leading: tuple[int, ...] = ()) -> None:
    """Checks that a weight [*leading, out, depth] is one that `pack_int4` makes."""
    codes, scales = weight.codes, weight.scales
    sizes = "".join(f"{size}, " for size in leading)
    expected = f"codes u32[{sizes}out / 16, {depth // WORD}, 16]"
    rank = len(leading) + 3
    fits = codes.dtype == jnp.uint32 and codes.ndim == rank and depth % 32 == 0
    fits = fits and codes.shape[:-3] == leading and codes.shape[-2:] == (depth // WORD, PANEL)
    expect(fits, name, expected, f"{codes.dtype.name}{list(codes.shape)}")
    groups = scales.shape[rank - 2] if scales.ndim in (rank, rank + 1) else 0
    whole = (*codes.shape[:-2], groups, *([2] if scales.ndim > rank else []), PANEL)
    fits = scales.dtype in (jnp.float16, jnp.float32) and scales.shape == whole and groups > 0
    fits = fits and depth % groups == 0 and depth // groups % 32 == 0
    expected = (
        f"f16 or f32 scales [{sizes}out / 16, groups, 16] or [{sizes}out / 16, groups, 2, 16], "
        "with groups of a multiple of 32"
    )
    expect(fits, name, expected, f"{scales.dtype.name}{list(scales.shape)}")


def quantize_int4(
    weight: Float[Array, "*experts out in"], *, group: int = 32, offsets: bool = True
) -> Int4Weight:
    """Weights rounded to 4 bits: to the nearest of 16 numbers per group, evenly apart.

    With offsets these lie from the smallest to the largest weight of a group, as in GGUF's Q4_1:
    the error is at most a thirtieth of their distance. Without, they are multiples of -m / 8, where
    m is the weight of the largest magnitude, as in Q4_0.

    Args:
      weight: [..., out, in], bf16, f16 or f32; out is a multiple of 16, in one of `group`.
      group: elements of the depth that share a scale; a multiple of 32.

    Raises:
      ValueError: an argument's shape or dtype is wrong.

    Not differentiable. A group with a weight that is not finite gets a scale that is not.

    >>> import jax.numpy as jnp
    >>> weight = jnp.tile(jnp.arange(16.0), (16, 2))
    >>> print(jnp.abs(quantize_int4(weight).dequantize() - weight).max())
    0.0
    """
    check_float("weight", weight)
    expect(weight.ndim >= 2, "weight", "shape [..., out, in]", list(weight.shape))
    expect(group > 0 and group % 32 == 0, "group", "a multiple of 32", group)
    *_, out, depth = weight.shape
    expect(out > 0 and out % PANEL == 0, "weight", "out to be a multiple of 16", out)
    expect(depth > 0 and depth % group == 0, "weight", f"in to be a multiple of {group}", depth)
    return pack_int4(*_quantize(weight, group, offsets))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(weight, group, offsets):
    parts = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group)
    if offsets:
        offset = jnp.min(parts, axis=-1)
        scale = (jnp.max(parts, axis=-1) - offset) / jnp.float32(LARGEST)
        parts = parts - offset[..., None]
    else:
        at = jnp.argmax(jnp.abs(parts), axis=-1, keepdims=True)
        scale, offset = jnp.take_along_axis(parts, at, axis=-1)[..., 0] / jnp.float32(-CENTER), None
    safe = jnp.where(scale == 0, jnp.float32(1), scale)
    steps = jnp.round(parts / safe[..., None]) + (0 if offsets else CENTER)
    codes = jnp.clip(jnp.where(jnp.isnan(steps), 0, steps), 0, LARGEST).astype(jnp.int32)
    return codes.reshape(weight.shape), scale, offset
