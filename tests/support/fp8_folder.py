# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders with fp8 weights whose blocks have scales, as Qwen3-FP8 is. Not a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jax_paged.models import config_from_hf
from jax_paged.models.decoder.parameters import expected_tensors, random_source
from jax_paged.models.testing import small_hf_config
from jax_paged.testing.projections import quantize_blocks

QUANTIZATION = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.o_proj"],
}  # fmt: skip
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 136}


def write_pair(
    folder: Path, model_type: str = "qwen3_moe", *, changed: Callable[[dict], Any] = len,
    quantization: dict | None = None, **changes,
) -> tuple[Path, Path]:  # fmt: skip
    """Two folders with the same model: in fp8, and in f32 what that stands for.

    Args:
      changed: alters the tensors of the first one.
      quantization: what its configuration has beside, or in the place of, `QUANTIZATION`.
      changes: of both configurations.
    """
    sizes = dict(SIZES)
    if model_type != "qwen3_moe":
        del sizes["moe_intermediate_size"]
    raw = small_hf_config(model_type, **sizes | changes)
    config = config_from_hf(raw)
    source, fp8, wide = random_source(config, seed=5), {}, {}
    rng = np.random.default_rng(0)
    for name in expected_tensors(config):
        value = np.asarray(source(name))
        prefix, experts, part = name.partition(".experts.")
        pieces = {name: value}
        if experts:
            pieces = {f"{prefix}.experts.{e}.{part}": value[e] for e in range(len(value))}
        for piece, values in pieces.items():
            module = piece.removesuffix(".weight")
            kept = module in QUANTIZATION["modules_to_not_convert"] or module.endswith("mlp.gate")
            if module.endswith(("_proj", "_mqa")) and not kept:
                values = values * 2.0 ** rng.integers(-2, 3, (len(values), 1))  # blocks are apart
                codes, scale, meant = quantize_blocks(values)
                fp8 |= {piece: np.array(codes), f"{piece}_scale_inv": np.array(scale)}
                wide[piece] = meant.astype(np.float32)
            else:
                fp8[piece] = wide[piece] = values
    changed(fp8)
    quantized, both = {"quantization_config": QUANTIZATION | (quantization or {})}, []
    for kind, tensors, extra in (
        ("fp8", fp8, quantized), ("wide", wide, {})
    ):  # fmt: skip
        path = folder / kind
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw | extra))
        save_file(tensors, path / "model.safetensors")
        both.append(path)
    return both[0], both[1]
