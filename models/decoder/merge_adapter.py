# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into the weights of a model: then it runs as fast as without."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_paged import Int4Weight, PackedWeight, pack_weight
from jax_paged.checks import WEIGHT_DTYPES, expect, kind_text

from .adapters import (
    FUSED,
    PROJECTIONS,
    Adapter,
    LowRank,
    check_adapter,
    module_shapes,
    published_shapes,
)
from .config import DecoderConfig
from .model import Decoder
from .parameters import Fill, Part
from .projections import param_value
from .protocol import merge_model, split_model


def merge_adapter(model: Decoder, adapter: Adapter) -> Decoder:
    """A new decoder with weights W + b a; the others are shared with the model.

    Args:
      model: with weights of bf16 or f32. An adapter of an 8-bit model is merged before they are
        quantized (`load_checkpoint` of the adapter's folder), or not at all (`with_adapter`).
      adapter: one for it.

    Returns:
      A `Decoder`. Sums are f32, rounded once to the dtype of the weight.

    Raises:
      ValueError: the model is no decoder or has 8-bit weights, or the adapter is not for it.
    """
    expect(isinstance(model, Decoder), "model", "a Decoder", kind_text(model))
    check_adapter(adapter, model.config)
    merged = merge_model(*split_model(model))
    assert isinstance(merged, Decoder)
    for number, modules in enumerate(adapter.layers):
        layer, shapes = merged.layers[number], module_shapes(model.config, number)
        for name, parts in PROJECTIONS.items():
            if not any(part in modules for part in parts):
                continue
            holder = layer.attention if name in ("qkv", "out") else layer.mlp
            own = param_value(getattr(holder, name))
            weight = own.unpack() if isinstance(own, PackedWeight) else own
            expected = "weights that are not quantized"
            is_quantized = weight.dtype in WEIGHT_DTYPES or isinstance(weight, Int4Weight)
            expect(not is_quantized, "model", expected, weight.dtype.name)
            assert not isinstance(weight, Int4Weight)
            begin, value = 0, weight.astype(jnp.float32)
            for part in parts:
                end = begin + shapes[part][0]
                if part in modules:
                    value = value.at[begin:end].add(_product(modules[part]))
                begin = end
            value = value.astype(weight.dtype)
            if isinstance(own, PackedWeight):
                value = pack_weight(value, platform="cpu")
            setattr(holder, name, nnx.Param(value))
    return merged


def merging_fill(fill: Fill, adapter: Adapter, config: DecoderConfig) -> Fill:
    """What gives the tensors of a checkpoint with the adapter merged in, rounded once."""

    def merged(name: str, out: np.ndarray, part: Part | None = None) -> None:
        parts = name.split(".")  # model.layers.N.self_attn.q_proj.weight
        number = int(parts[2]) if name.startswith("model.layers.") else 0
        module = parts[-2] if len(parts) > 3 and parts[-1] == "weight" else ""
        own = {} if "experts" in parts else adapter.layers[number]
        merged_in = FUSED.get(module, (module,))
        if own.keys().isdisjoint(merged_in):
            fill(name, out, part)
            return
        shape = published_shapes(config, number)[module]
        value, begin = np.empty(shape, np.float32), 0
        fill(name, value)
        for each in merged_in:
            end = begin + module_shapes(config, number)[each][0]
            if each in own:
                value[begin:end] += np.asarray(_product(own[each]))
            begin = end
        out[...] = value if part is None else value[part]

    return merged


def _product(module: LowRank) -> jax.Array:
    a, b = (jnp.asarray(x).astype(jnp.float32) for x in module)
    return jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
