# SPDX-License-Identifier: Apache-2.0
"""Random adapters, and folders of them as PEFT saves them. Not a test."""

import json

import numpy as np
from safetensors.numpy import save_file

from jax_paged.models import Adapter
from jax_paged.models.decoder.adapters import LowRank, module_shapes, published_shapes

LAYER = "base_model.model.model.layers.{}."
BLOCKS = dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), "mlp")
KEYS = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "bias": "none",
    "lora_dropout": 0.1, "inference_mode": True, "fan_in_fan_out": False, "use_dora": False,
    "use_rslora": False, "modules_to_save": None, "init_lora_weights": True, "rank_pattern": {},
    "alpha_pattern": {}, "target_modules": ["q_proj"], "base_model_name_or_path": None,
    "peft_version": "0.18.0", "layer_replication": None, "loftq_config": {}, "revision": None,
}  # fmt: skip


def make_adapter(config, seed, rank=4, modules=None):
    """A random adapter of some modules, all by default, that changes logits by about 1."""
    rng = np.random.default_rng([seed, 77])

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    layers = []
    for number in range(config.num_layers):
        shapes = module_shapes(config, number)
        chosen = shapes if modules is None else [m for m in modules if m in shapes]
        layers.append(
            {
                name: LowRank(
                    draw(rank, shapes[name][1]) / shapes[name][1] ** 0.5,
                    draw(shapes[name][0], rank) * np.float32(0.5 / rank**0.5),
                )
                for name in chosen
            }
        )
    return Adapter(tuple(layers))


def published_name(layer, module, side):
    """Of a tensor in the file of an adapter."""
    block = BLOCKS.get(module, "self_attn")
    return LAYER.format(layer) + f"{block}.{module}.lora_{side}.weight"


def write_adapter(folder, config, *, modules=None, ranks=None, dtype=np.float32, seed=4, **keys):
    """Writes a random adapter; gives its tensors as f32: name in the file → values."""
    folder.mkdir(exist_ok=True)
    keys = KEYS | keys
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config.num_layers):
        for module, (out, inner) in published_shapes(config, layer).items():
            if modules is not None and module not in modules:
                continue
            rank = (ranks or {}).get(module, keys["r"])
            for side, shape in (("A", (rank, inner)), ("B", (out, rank))):
                values = rng.standard_normal(shape, np.float32) * np.float32(0.5 / inner**0.5)
                tensors[published_name(layer, module, side)] = values.astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    return {name: values.astype(np.float32) for name, values in tensors.items()}
