# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small random models. Not a test."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from jax_paged.models import config_from_hf
from jax_paged.models.checkpoint.gguf_file import gguf_name
from jax_paged.models.decoder.parameters import expected_tensors, random_source
from jax_paged.models.testing import small_hf_config
from jax_paged.testing.stress.hostile import gguf_sizes

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "phi3": "phi3",
}  # fmt: skip


def metadata_of(architecture, config, **changes):
    values = gguf_sizes(config) | {"rope.freq_base": config.rope.theta}
    if architecture == "phi3":  # whose writer leaves the head_dim out
        del values["attention.key_length"], values["attention.value_length"]
        values |= {
            "attention.sliding_window": config.window(0),
            "rope.dimension_count": config.rope.rotary_dim,
            "rope.scaling.original_context_length": 64,
        }
    if architecture == "llama":
        values |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
    if architecture == "qwen3moe":
        values |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    return named | {"tokenizer.ggml.eos_token_id": 3} | changes


def permute(rows, num_heads):
    """The row order in which Llama's q and k are stored: halves interleaved to pairs."""
    half = rows.shape[0] // num_heads // 2
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(half):
            begin = head * 2 * half
            out[begin + 2 * i] = rows[begin + i]
            out[begin + 2 * i + 1] = rows[begin + half + i]
    return out


def tensors_of(architecture, config):
    source, tensors = random_source(config, 7), {}
    heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}
    for name in expected_tensors(config):
        value = np.array(source(name))
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            value = permute(value, heads[part])
        tensors[gguf_name(name)] = value
    return tensors


def write(path, architecture, metadata, tensors, kinds=None):
    """Writes a GGUF file; kinds: tensor name → quantization."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, value in tensors.items():
        kind = (kinds or {}).get(name, Kind.F32)
        if value.dtype == np.uint8:  # blocks
            writer.add_tensor(name, value, raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(architecture, **changes):
    if architecture == "phi3":
        changes = {"hidden_size": 64, "sliding_window": 9} | changes
    config = config_from_hf(
        small_hf_config(ARCHITECTURES[architecture], rms_norm_eps=2**-20, eos_token_id=3, **changes)
    )
    return config, metadata_of(architecture, config), tensors_of(architecture, config)
