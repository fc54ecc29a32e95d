# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of random weights whose tokens are bytes. Not a test."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jax_paged.models import config_from_hf
from jax_paged.models.decoder.parameters import expected_tensors
from jax_paged.models.testing import small_hf_config


def write_checkpoint(folder: Path, model_type: str = "llama", **changes) -> Path:
    """Writes a model of 64 tokens of context; its tokens are the 256 bytes and <eos>.

    changes: of its config.json.
    """
    sizes = {"vocab_size": 257, "max_position_embeddings": 64, "eos_token_id": 256}
    config = small_hf_config(model_type, **sizes | changes)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(3)
    tensors = {}
    for name, shape in expected_tensors(config_from_hf(config)).items():
        x = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        if ".experts." in name:  # each one is a tensor of its own in a checkpoint
            tensors |= {name.replace(".experts.", f".experts.{i}."): own for i, own in enumerate(x)}
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    side = {"eos_token": "<eos>", "chat_template": "{{ '<' + messages[0].content + '>' }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side))
    return folder


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Its tokens are the 256 bytes and <eos>."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend
