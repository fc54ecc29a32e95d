"""A checkpoint small enough to start the command line on. Not a test."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jax_paged.models import config_from_hf
from jax_paged.models.parameters import expected_tensors
from jax_paged.models.testing import small_hf_config


def write_byte_checkpoint(folder: Path) -> Path:
    """Writes a Llama of random weights whose tokens are the 256 bytes and <eos>."""
    config = small_hf_config("llama", vocab_size=257, max_position_embeddings=64, eos_token_id=256)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(3)
    tensors = {
        name: rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        for name, shape in expected_tensors(config_from_hf(config)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    side = {"eos_token": "<eos>", "chat_template": "{{ '<' + messages[0].content + '>' }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side))
    return folder
