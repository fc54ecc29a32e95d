# SPDX-License-Identifier: Apache-2.0
"""Decoders whose projections have 4 bits: quantized, and as GGUF files store them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import make_adapter
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_files import make, write

from jax_paged.models import Decoder, load_checkpoint, token_logits
from jax_paged.models.checkpoint.gguf_file import GGUFFile
from jax_paged.models.checkpoint.weights import open_checkpoint
from jax_paged.models.decoder.adapters import with_adapter
from jax_paged.models.decoder.merge_adapter import merge_adapter
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.placement import is_int4
from jax_paged.models.decoder.projections import param_value
from jax_paged.models.serving.batch import generate_many
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import small_config

CONFIG = small_config("llama", vocab_size=64, head_dim=8, intermediate_size=64)
TIED = small_config(
    "qwen3", vocab_size=64, head_dim=8, intermediate_size=64, tie_word_embeddings=True
)
TEXT = list(range(30))
SIZES = {"num_pages": 40, "max_seqs": 4, "page_size": 4, "max_tokens": 32}


def widened(model):
    """The model with f32 weights of the same values, by its own leaves."""
    graph, state = nnx.split(model)
    wide = jax.tree.map(lambda x: x.dequantize() if is_int4(x) else x, state, is_leaf=is_int4)
    return nnx.merge(graph, wide)


def count_int4(model):
    return sum(map(is_int4, jax.tree.leaves(nnx.state(model), is_leaf=is_int4)))


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["llama", "tied"])
def test_logits_are_those_of_what_the_codes_stand_for(config):
    model = Decoder(config, random_source(config, seed=1), weight_dtype="int4", pack=True)
    assert count_int4(model) == 4 * config.num_layers
    assert param_value(model.head).dtype == jnp.int8
    got = token_logits(model, TEXT)
    np.testing.assert_allclose(got, token_logits(widened(model), TEXT), atol=2e-4, rtol=1e-4)
    plain = token_logits(Decoder(config, random_source(config, seed=1)), TEXT)
    distance = np.linalg.norm(np.asarray(got) - plain) / np.linalg.norm(plain)
    assert 0.001 < distance < 0.3, "4 bits cost something, and not much"


@pytest.mark.deep
def test_an_engine_and_adapters_use_them():
    model = Decoder(CONFIG, random_source(CONFIG, seed=1), weight_dtype="int4")
    expected = generate_many(widened(model), [TEXT, [3]], max_new_tokens=6).tokens
    assert [list(x) for x in generate_many(model, [TEXT, [3]], max_new_tokens=6).tokens] == [
        list(x) for x in expected
    ]
    engine = Engine(model, **SIZES)
    requests = [engine.submit(prompt, max_new_tokens=6) for prompt in (TEXT, [3])]
    engine.run()
    assert [list(request.tokens) for request in requests] == [list(x) for x in expected]
    other = Decoder(CONFIG, random_source(CONFIG, seed=2), weight_dtype="int4")
    engine.update_weights(nnx.state(other))
    request = engine.submit(TEXT, max_new_tokens=6)
    engine.run()
    (alone,) = generate_many(other, [TEXT], max_new_tokens=6).tokens
    assert list(request.tokens) == list(alone)
    adapter = make_adapter(CONFIG, 1)
    tuned = token_logits(with_adapter(model, adapter), TEXT)
    wide = token_logits(with_adapter(widened(model), adapter), TEXT)
    np.testing.assert_allclose(tuned, wide, atol=5e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"^model: expected weights that are not quantized"):
        merge_adapter(model, adapter)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_file_s_4_bits_stay_as_they_are(tmp_path, architecture, kind):
    path = file_of(tmp_path, architecture, kind)
    model, config, _ = load_checkpoint(path, weight_dtype="int4", progress=False)
    wide, *_ = load_checkpoint(path, progress=False)
    assert count_int4(model) == 4 * config.num_layers
    has_offsets = param_value(model.layers[0].attention.qkv).has_offsets
    assert has_offsets == (kind == "Q4_1")
    for ours, theirs in zip(model.layers, wide.layers, strict=True):
        for part, name in (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up")):
            mine, its = (getattr(getattr(x, part), name) for x in (ours, theirs))
            np.testing.assert_allclose(
                param_value(mine).dequantize(), param_value(its), rtol=1e-6, atol=1e-6
            )
    checkpoint = open_checkpoint(path, weight_dtype="int4")  # which compiles for them
    assert kinds_of(checkpoint.shapes()) == kinds_of(model)


def kinds_of(model):
    """Shape and dtype of all arrays."""
    return [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(nnx.split(model)[1])]


def file_of(tmp_path, architecture, kind, changed=None):
    """A model of matrices of a kind, but for those that `changed` names."""
    _, metadata, tensors = make(
        architecture, hidden_size=32, intermediate_size=64, num_hidden_layers=2
    )
    matrices = {name for name, x in tensors.items() if x.ndim == 2 and "blk" in name}
    kinds = dict.fromkeys(matrices, Kind[kind]) | (changed or {})
    write(tmp_path / "model.gguf", architecture, metadata, tensors, kinds)
    return tmp_path / "model.gguf"


def test_what_a_file_has_in_more_bits_is_rounded_to_4(tmp_path):
    path = file_of(tmp_path, "qwen3", "Q4_0", {"blk.0.attn_v.weight": Kind.Q8_0})
    model, *_ = load_checkpoint(path, weight_dtype="int4", progress=False)
    wide, *_ = load_checkpoint(path, progress=False)
    kinds = [param_value(layer.attention.qkv).has_offsets for layer in model.layers]
    assert kinds == [True, False]
    mine, its = (param_value(x.layers[0].attention.qkv) for x in (model, wide))
    error = np.abs(np.asarray(mine.dequantize()) - np.asarray(its))
    step = np.ptp(np.asarray(its).reshape(len(its), -1, 32), axis=-1) / 15
    assert (error.reshape(len(its), -1, 32) <= step[..., None] / 2 + 1e-6).all()


def test_blocks_of_q4_k_are_those_of_the_gguf_package(tmp_path):
    config, metadata, tensors = make(
        "qwen3", hidden_size=256, intermediate_size=256, num_hidden_layers=1
    )
    name = "blk.0.ffn_gate.weight"
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (256, 144), np.uint8)
    for at in (0, 2):
        factor = rng.uniform(0, 0.01, 256).astype(np.float16)
        blocks[:, at : at + 2] = factor[:, None].view(np.uint8)
    tensors[name] = blocks
    write(tmp_path / "model.gguf", "qwen3", metadata, tensors, {name: Kind.Q4_K})
    tensors_of_file = GGUFFile(tmp_path / "model.gguf").open_tensors(config)
    weight = tensors_of_file.int4("model.layers.0.mlp.gate_proj.weight")
    expected = dequantize(blocks.reshape(256, -1), Kind.Q4_K)
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-5, atol=1e-6)
    assert tensors_of_file.int4("model.layers.0.mlp.up_proj.weight") is None


EXPERTS = small_config(
    "qwen3_moe", vocab_size=64, hidden_size=64, head_dim=8, moe_intermediate_size=32
)


def test_experts_have_4_bits():
    model = Decoder(EXPERTS, random_source(EXPERTS, seed=1), weight_dtype="int4", pack=True)
    assert count_int4(model) == 4 * EXPERTS.num_layers
    assert param_value(model.layers[0].mlp.gate_up).ndim == 3
    wide = token_logits(widened(model), TEXT)
    np.testing.assert_allclose(token_logits(model, TEXT), wide, atol=2e-4, rtol=1e-4)
    expected = generate_many(widened(model), [TEXT, [3]], max_new_tokens=6).tokens
    got = generate_many(model, [TEXT, [3]], max_new_tokens=6).tokens
    assert [list(x) for x in got] == [list(x) for x in expected]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_file_s_experts_stay_as_they_are(tmp_path, kind):
    _, metadata, tensors = make(
        "qwen3moe", hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1
    )
    matrices = {name for name, x in tensors.items() if x.ndim >= 2 and "blk" in name}
    kinds = dict.fromkeys(matrices - {n for n in matrices if "gate_inp" in n}, Kind[kind])
    path = tmp_path / "model.gguf"
    write(path, "qwen3moe", metadata, tensors, kinds)
    model, *_ = load_checkpoint(path, weight_dtype="int4", progress=False)
    wide, *_ = load_checkpoint(path, progress=False)
    for name in ("gate_up", "down"):
        mine, its = (param_value(getattr(x.layers[0].mlp, name)) for x in (model, wide))
        assert is_int4(mine)
        assert mine.has_offsets == (kind == "Q4_1")
        np.testing.assert_allclose(mine.dequantize(), its, rtol=1e-6, atol=1e-6)
    checkpoint = open_checkpoint(path, weight_dtype="int4")  # which compiles for them
    assert kinds_of(checkpoint.shapes()) == kinds_of(model)
