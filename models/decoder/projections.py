# SPDX-License-Identifier: Apache-2.0
"""Projections of a module: how their weights are read, quantized, packed and multiplied."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_paged import (
    Int4Weight,
    PackedWeight,
    kv_dtype,
    linear,
    pack_weight,
    quantize_weight,
)
from jax_paged.checks import SCALE_BLOCK, expect
from jax_paged.native import huge_pages
from jax_paged.ops.packing import PANEL

from . import four_bits
from .adapters import LayerAdapters
from .parameters import TensorSource, are_scaled, block_order, scale_name
from .partition import Partition, put

WeightDtype = Literal["int4", "int8", "fp8", "fp8_e4m3"] | None
# Leaves that may be packed.
PROJECTED = ("qkv", "qkv_down", "q_up", "out", "gate_up", "down", "head")
WEIGHT_DTYPES: tuple[WeightDtype, ...] = (None, "int4", "int8", "fp8", "fp8_e4m3")


class Projections(nnx.Module):
    """A module with projections: each is a leaf, `name`, and an 8-bit one also `name`_scale.

    Over several devices each leaf is put where `partition` says, and calls are those of one device.
    """

    partition: Partition | None = None

    def _set(
        self, name: str, source: TensorSource, *tensors: str, axis: int = 0,
        order: np.ndarray | None = None, slots: np.ndarray | None = None, **dtype: DTypeLike,
    ) -> None:  # fmt: skip
        """Sets a leaf; order and slots: of several devices, as for `Partition.read`."""
        if self.partition is None:
            value = source(*tensors, axis=axis, **dtype)
        else:
            value = self.partition.read(name, source, tensors, axis, order, slots, **dtype)
        setattr(self, name, nnx.Param(value))

    def _set_norm(
        self, name: str, source: TensorSource, tensor: str, *, wide: bool = False, offset: int = 0
    ) -> None:
        """Sets the weight of a norm, as f32 where it is wide, plus `offset`."""
        self._set(name, source, tensor, **({"dtype": jnp.float32} if wide else {}))
        value = param_value(getattr(self, name))
        if offset and not isinstance(value, jax.ShapeDtypeStruct):
            setattr(self, name, nnx.Param(value + offset))

    def _load(
        self, name: str, weight_dtype: WeightDtype, *tensors: Any, sizes: Sequence[int] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        """Sets a projection, quantized from f32 so that it is rounded once.

        fp8 weights whose blocks have scales stay as they are, where no other dtype is asked for;
        and weights that are stored in 4 bits, where those are asked for.

        Args:
          sizes: the rows of tensors that are joined.
        """
        if weight_dtype is None and are_scaled(getattr(tensors[0], "scaled", ()), tensors[1:]):
            self._set_blocks(name, *tensors, sizes=sizes, **options)
        elif weight_dtype is None:
            self._set(name, *tensors, **options)
        elif weight_dtype == "int4" and name != "head":
            source, *names = tensors
            found = four_bits.stored(source, names, name, self.partition, **options)
            if found is None:
                self._set(name, *tensors, dtype=jnp.float32, **options)
                value = param_value(getattr(self, name))
                made = four_bits.rounded(value, name, names[0], self.partition)
                found = huge_pages.moved(made)
            setattr(self, name, nnx.Param(found))
        else:
            self._set(name, *tensors, dtype=jnp.float32, **options)
            self._quantize(name, weight_dtype, getattr(self, name))

    def _set_blocks(
        self, name: str, source: TensorSource, *tensors: str, sizes: Sequence[int], axis: int = 0,
        order: np.ndarray | None = None, slots: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Sets fp8 weights as they are, and the scales of their blocks: `name`_block_scale."""
        options: Any = {"axis": axis, "slots": slots}
        for tensor, size in zip(tensors[:-1], sizes, strict=False):
            expect(size % SCALE_BLOCK == 0, tensor, f"a multiple of {SCALE_BLOCK} rows", size)
        self._set(name, source, *tensors, order=order, dtype=jnp.float8_e4m3fn, **options)
        setattr(self, name, nnx.Param(huge_pages.moved(param_value(getattr(self, name)))))
        if self.partition is not None:
            self.partition.check_blocks(name, tensors[0], self._shape(name))
        scales = [scale_name(tensor) for tensor in tensors]
        blocks = None if order is None else block_order(tensors[0], order)
        of_scales = name + "_block_scale"
        self._set(of_scales, source, *scales, order=blocks, dtype=jnp.float32, **options)

    def _quantize(self, name: str, weight_dtype: str, weight: nnx.Param) -> None:
        value = param_value(weight)
        if weight_dtype == "int4":
            weight_dtype = "int8"  # of the head: an error of it is one of each token
        quantize = functools.partial(quantize_weight, dtype=kv_dtype(weight_dtype))
        names, is_shapes = (name, name + "_scale"), isinstance(value, jax.ShapeDtypeStruct)
        if self.partition is not None and not is_shapes:
            places = map(self.partition.sharding, names, (value.ndim, value.ndim - 1))
            quantize = jax.jit(quantize, out_shardings=tuple(places))
        made = jax.eval_shape(quantize, value) if is_shapes else quantize(value)
        for leaf, x in zip(names, made, strict=True):
            if self.partition is not None and is_shapes:
                x = put(x, self.partition.sharding(leaf, x.ndim))
            setattr(self, leaf, nnx.Param(huge_pages.moved(x)))

    def pack(self) -> None:
        """Puts the projections into the order in which the CPU's kernels multiply them."""
        for name in PROJECTED:
            if not hasattr(self, name):
                continue
            value = param_value(getattr(self, name))
            if isinstance(value, Int4Weight):  # that is its order
                continue
            # The rows of experts' gate and up are two parts, each of which is whole panels.
            parts = 2 if name == "gate_up" and value.ndim == 3 else 1
            if value.shape[-2] % (parts * PANEL) == 0:
                setattr(self, name, nnx.Param(_packed(value)))

    def _weight(self, name: str) -> jax.Array | PackedWeight | Int4Weight:
        return param_value(getattr(self, name))

    def _scale(self, name: str) -> jax.Array | None:
        leaves = (name + "_scale", name + "_block_scale")
        return next((getattr(self, leaf)[...] for leaf in leaves if hasattr(self, leaf)), None)

    def _shape(self, name: str) -> tuple[int, ...]:
        """That of one layer, also in a model of shapes."""
        shape = param_value(getattr(self, name)).shape
        return shape if self.partition is None else self.partition.shape_in_stage(name, shape)

    def _project(
        self, name: str, x: jax.Array, adapters: LayerAdapters | None = None, **options
    ) -> jax.Array:
        with jax.named_scope(name):
            out = linear(x, self._weight(name), weight_scale=self._scale(name), **options)
            if adapters is not None:
                out = adapters.add(name, x, out, options["implementation"])
        return out

    def _project_all(self, name: str, x: jax.Array, adapters: LayerAdapters | None, **options):
        """The same of inputs that the devices share: in f32, added up and rounded once."""
        if self.partition is None:
            return self._project(name, x, adapters, **options)
        out = self._project(name, x, adapters, out_dtype=jnp.float32, **options)
        return self.partition.add_up(out, x.dtype)


def _packed(value: Any) -> Any:
    """Packed weights on a CPU device, and such shapes; others as they are."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(pack_weight, value)
    (device,) = value.devices()
    return pack_weight(value, platform=device.platform)


def param_value(param: nnx.Param) -> Any:
    """The array of a parameter, or its shape in a model of shapes, which `[...]` would not give."""
    has_getter = hasattr(type(param), "get_value")  # not in flax 0.12.0
    return param.get_value() if has_getter else param.value
