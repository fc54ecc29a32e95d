# SPDX-License-Identifier: Apache-2.0
"""Weights in the order in which the CPU's kernels multiply them.

A vector of sums is then of 16 outputs, so that nothing has to be added across its lanes, results
are stored as they are, and what is read next is known and comes in meanwhile.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jax_paged.checks import FLOAT_DTYPES, WEIGHT_DTYPES, check_array, expect
from jax_paged.native import huge_pages, load

PANEL = 16  # outputs that lie side by side


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """Weights [..., out, in] that `pack_weight` has put in another order.

    `linear` and `moe_experts` take it in place of an array, and give the same bits. As a pytree it
    has one leaf.

    Args:
      panels: [..., out / 16, in, 16]; in bf16 [..., out / 16, in / 2, 32], where the elements 2 i
        and 2 i + 1 of an output lie side by side.
    """

    panels: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in]."""
        *leading, panels, depth, width = self.panels.shape
        return (*leading, PANEL * panels, depth * width // PANEL)

    @property
    def dtype(self) -> jnp.dtype:
        return self.panels.dtype

    @property
    def ndim(self) -> int:
        return self.panels.ndim - 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def unpack(self) -> jax.Array:
        """The array that was packed."""
        return unpack(self.panels)


def pack_weight(
    weight: Float[Array, "*experts out in"] | Int8[Array, "*experts out in"],
    *,
    platform: str | None = None,
) -> PackedWeight | jax.Array:
    """Weights for `linear` and `moe_experts` in the order in which the CPU's tiles read them.

    Results have the same bits. Whether it is faster depends on the processor: f32 of 16 to 63
    tokens gained up to a third on an Intel Xeon, more tokens some 4 %, and Zen 4 gains nothing
    (docs/performance.md, Packed weights). It takes as much memory as the array, which is best let
    go.

    Args:
      weight: [..., out, in] as published, of `linear` or of all experts; bf16, f16, f32, int8 or
        f8e4m3fn. Scales stay as they are.
      platform: "cpu", or another one, for which there is no better order. None = that of the
        devices that jax uses by default.

    Returns:
      A `PackedWeight`; or weight itself where the kernels have none: on another platform, without
      the native module, where out is no multiple of 16 or in none of 8, and of 8 bits on a
      processor that multiplies them as bf16 words (`build_info`: isa avx512bf16).

    Raises:
      ValueError: weight's shape or dtype is wrong.

    Differentiable. Over several devices out is split by 16, and in as that of an array is.

    >>> import jax.numpy as jnp
    >>> packed = pack_weight(jnp.ones((32, 8)), platform="cpu")
    >>> print(packed.shape, packed.panels.shape)
    (32, 8) (2, 8, 16)
    """
    check_array("weight", weight)
    expect(weight.ndim >= 2, "weight", "shape [..., out, in]", list(weight.shape))
    allowed = FLOAT_DTYPES + WEIGHT_DTYPES
    names = " or ".join(dtype.name for dtype in allowed)
    expect(weight.dtype in allowed, "weight", f"dtype {names}", weight.dtype.name)
    if (platform or jax.default_backend()) != "cpu" or not _has_kernel(weight):
        return weight
    panels = pack(weight)
    return PackedWeight(huge_pages.moved(panels))


def _has_kernel(weight: jax.Array) -> bool:
    out, depth = weight.shape[-2:]
    if out % PANEL or depth % 8 or not out or not depth:
        return False
    isa = load.cpu_isa()
    return isa is not None and not (weight.dtype in WEIGHT_DTYPES and isa == "avx512bf16")


def _pair(dtype: jnp.dtype) -> int:
    """Elements of an output that lie side by side."""
    return 2 if dtype == jnp.bfloat16 else 1


@jax.jit
def pack(weight: jax.Array) -> jax.Array:
    """The panels of [..., out, in]."""
    *leading, out, depth = weight.shape
    pair = _pair(weight.dtype)
    panels = weight.reshape(*leading, out // PANEL, PANEL, depth // pair, pair)
    return jnp.swapaxes(panels, -3, -2).reshape(*leading, out // PANEL, depth // pair, PANEL * pair)


@jax.jit
def unpack(panels: jax.Array) -> jax.Array:
    """The other way round."""
    *leading, count, depth, width = panels.shape
    pair = width // PANEL
    outputs = jnp.swapaxes(panels.reshape(*leading, count, depth, PANEL, pair), -3, -2)
    return outputs.reshape(*leading, count * PANEL, depth * pair)


def panels_of(weight: PackedWeight | jax.Array) -> jax.Array:
    """What a kernel gets."""
    return weight.panels if isinstance(weight, PackedWeight) else weight
