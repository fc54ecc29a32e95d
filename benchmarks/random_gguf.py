# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-MoE of random weights as a GGUF file in Q4_0: for benchmarks beside llama.cpp."""

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind

from jax_paged.models import config_from_hf
from jax_paged.models.checkpoint.gguf_file import gguf_name
from jax_paged.models.decoder.parameters import expected_tensors, random_source
from jax_paged.testing.stress.hostile import gguf_sizes

ARCHITECTURE = "qwen3moe"


def write_random(raw: dict[str, Any], path: Path) -> Path:
    """Writes a model of the sizes in `raw`, a config.json.

    Matrices are in Q4_0, for which llama.cpp has the fastest kernels, norms and the router in f32.
    """
    config = config_from_hf(raw)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    sizes = gguf_sizes(config) | {
        "vocab_size": config.vocab_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "rope.freq_base": float(raw["rope_theta"]),
    }
    for key, value in sizes.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{ARCHITECTURE}.{key}", value)
    source = random_source(config, dtype=jnp.dtype("float32"))
    for name in expected_tensors(config):
        value, stored = np.asarray(source(name)), gguf_name(name)
        kind = Kind.Q4_0 if value.ndim > 1 and "ffn_gate_inp" not in stored else Kind.F32
        writer.add_tensor(stored, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
