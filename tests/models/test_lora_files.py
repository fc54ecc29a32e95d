# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT saves them: what is read, and how others are refused."""

import contextlib
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from adapters import published_name, write_adapter
from safetensors.numpy import save_file
from tiers import first_of
from tiny_checkpoint import write_checkpoint

from jax_paged.models import (
    Engine,
    cli,
    config_from_hf,
    generate,
    load_adapter,
    load_checkpoint,
    merge_adapter,
    token_logits,
    with_adapter,
)
from jax_paged.models.decoder.adapters import FUSED, module_shapes
from jax_paged.models.decoder.parameters import expected_tensors
from jax_paged.models.testing import small_config, small_hf_config

CONFIG = small_config("llama")


def assert_is(adapter, config, tensors, scale_of):
    for layer, modules in enumerate(adapter.layers):
        names = {
            n for n in module_shapes(config, layer) if published_name(layer, n, "A") in tensors
        }
        assert set(modules) == names
        for module, (a, b) in modules.items():
            np.testing.assert_array_equal(a, tensors[published_name(layer, module, "A")])
            whole = tensors[published_name(layer, module, "B")] * np.float32(
                scale_of(layer, module)
            )
            np.testing.assert_allclose(b, whole, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("modules", [None, ["q_proj", "v_proj"], ["down_proj"]])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_folder_gives_what_was_saved(tmp_path, dtype, modules, model_type):
    config = small_config(model_type)
    tensors = write_adapter(tmp_path, config, modules=modules, dtype=dtype)
    adapter = load_adapter(tmp_path, config)
    assert_is(adapter, config, tensors, lambda *_: 16 / 4)


def test_fused_modules_are_cut_into_those_of_the_model(tmp_path):
    """A Phi-3 with its adapter beside it is the Phi-3 of its checkpoint with the adapter merged."""
    raw = small_hf_config("phi3", eos_token_id=1, pad_token_id=0)
    config, rng, base = config_from_hf(raw), np.random.default_rng(1), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(raw))
    weights = {
        name: rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        for name, shape in expected_tensors(config).items()
    }
    save_file(weights, base / "model.safetensors")
    folder = tmp_path / "adapter"
    tensors = write_adapter(folder, config)
    assert {name.split(".")[-3] for name in tensors} == {*FUSED, "o_proj", "down_proj"}
    model, _, _ = load_checkpoint(base, progress=False)
    merged, _, _ = load_checkpoint(folder, base=base, progress=False)
    adapter = load_adapter(folder, config)
    text = list(range(5, 25))
    expected = token_logits(merged, text)
    np.testing.assert_allclose(
        token_logits(with_adapter(model, adapter), text), expected, atol=2e-4
    )
    np.testing.assert_allclose(
        token_logits(merge_adapter(model, adapter), text), expected, atol=1e-5
    )
    assert np.abs(token_logits(model, text) - expected).max() > 0.1
    name = published_name(0, "qkv_proj", "A")
    wrong = {published_name(0, "q_proj", "A"): tensors[name]} | tensors
    save_file(wrong, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"expected modules o_proj, down_proj, qkv_proj, gate_up"):
        load_adapter(folder, config)


def test_scales_and_ranks_follow_their_patterns(tmp_path):
    tensors = write_adapter(
        tmp_path, CONFIG, ranks={"v_proj": 2, "o_proj": 6}, use_rslora=True,
        rank_pattern={"v_proj": 2, "self_attn.o_proj": 6},
        alpha_pattern={"^model.layers.1.mlp.up_proj": 5, "layers.0.mlp.up_proj": 3, "proj": 99},
    )  # fmt: skip
    adapter = load_adapter(tmp_path, CONFIG)

    def scale_of(layer, module):
        alpha = (3, 5)[layer] if module == "up_proj" else 16
        return alpha / math.sqrt({"v_proj": 2, "o_proj": 6}.get(module, 4))

    assert_is(adapter, CONFIG, tensors, scale_of)
    assert adapter.rank == 6


KEYS_WRONG = {
    "use_dora": True, "modules_to_save": ["lm_head"], "bias": "all", "fan_in_fan_out": True,
    "peft_type": "LOHA", "r": 65, "lora_alpha": "8", "layer_replication": [[0, 1]],
    "init_lora_weights": "pissa", "lora_bias": True, "target_parameters": ["experts"],
    "trainable_token_indices": [3], "something_new": 7, "rank_pattern": {"(q|v)_proj": 2},
    "alpha_pattern": {"q_proj": None}, "use_rslora": 1,
}  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize("key", KEYS_WRONG)
def test_keys_that_are_not_supported_are_named(tmp_path, key):
    write_adapter(tmp_path, CONFIG, modules=["q_proj"], **{key: KEYS_WRONG[key]})
    where = re.escape(str(tmp_path / "adapter_config.json"))
    with pytest.raises(ValueError, match=rf"^{where}: key '{key}' (must|=)"):
        load_adapter(tmp_path, CONFIG)


TENSORS_WRONG = {
    "lm_head.lora_A.weight": "is not supported",
    "model.embed_tokens.lora_embedding_A": "is not supported",
    "model.layers.0.mlp.experts.0.up_proj.lora_A.weight": "is not supported",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight": "is not supported",
    "model.layers.0.mlp.gate.lora_A.weight": "has no place in this model; expected modules q_proj",
    "model.layers.0.mlp.q_proj.lora_A.weight": "has no place in this model",
    "model.layers.2.self_attn.q_proj.lora_A.weight": "has no place in a model of 2 layers",
    "model.layers.0.self_attn.k_proj.lora_A.weight": "k_proj.lora_B.weight' is missing",
}


@pytest.mark.every
@pytest.mark.parametrize("name", TENSORS_WRONG)
def test_tensors_that_have_no_place_are_named(tmp_path, name):
    tensors = write_adapter(tmp_path, CONFIG, modules=["q_proj"])
    tensors["base_model.model." + name] = np.ones((4, 32), np.float32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=re.escape(TENSORS_WRONG[name])) as error:
        load_adapter(tmp_path, CONFIG)
    assert name.partition(".lora_")[0] in str(error.value)


def test_broken_files_are_named(tmp_path):
    tensors = write_adapter(tmp_path, CONFIG, modules=["q_proj"])
    name = published_name(1, "q_proj", "B")
    file = tmp_path / "adapter_model.safetensors"
    for value, text in [
        (
            np.ones((64, 3), np.float32),
            rf"tensor '{name}' must have shape \(64, 4\), got \(64, 3\)",
        ),
        (np.full((64, 4), np.nan, np.float32), "expected finite weights"),
        (np.ones((64, 4), np.int32), "must be of dtype BF16, F16, F32, got I32"),
    ]:
        save_file(tensors | {name: value}, file)
        with pytest.raises(ValueError, match=text):
            load_adapter(tmp_path, CONFIG)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        load_adapter(tmp_path, CONFIG)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected adapter_model\.safetensors, found none"):
        load_adapter(tmp_path, CONFIG)
    with pytest.raises(ValueError, match=r"adapter_config.json: no such file"):
        load_adapter(tmp_path / "nowhere", CONFIG)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, base):
    """An adapter of that model, which it names."""
    path = tmp_path_factory.mktemp("lora")
    _, config, _ = load_checkpoint(base, progress=False)
    write_adapter(path, config, base_model_name_or_path=str(base))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_that_is_an_adapter_is_its_base_with_the_adapter_merged(base, folder, dtype):
    model, config, tokenizer = load_checkpoint(folder, dtype, progress=False)
    plain, _, _ = load_checkpoint(base, dtype, progress=False)
    assert tokenizer.encode("ab") == load_checkpoint(base, progress=False)[2].encode("ab")
    exact, _, _ = load_checkpoint(base, jnp.float32, progress=False)
    merged = merge_adapter(exact, load_adapter(folder, config))
    for layer, expected, before in zip(model.layers, merged.layers, plain.layers, strict=True):
        for part, name in [("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up")]:
            got, want, was = (
                getattr(getattr(x, part), name)[...] for x in (layer, expected, before)
            )
            assert got.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(got, want.astype(dtype))
            assert not np.array_equal(got, was)
    np.testing.assert_array_equal(model.embedding[...], plain.embedding[...])


def test_the_base_of_an_adapter_is_given_or_asked_for(base, folder, tmp_path):
    other = tmp_path / "other"
    _, config, _ = load_checkpoint(base, progress=False)
    for named in (None, "someone/a-model"):
        write_adapter(other, config, base_model_name_or_path=named)
        with pytest.raises(ValueError, match=r"give the base model with base= \(--base\)$"):
            load_checkpoint(other, progress=False)
    model, _, _ = load_checkpoint(other, base=base, progress=False)
    expected, _, _ = load_checkpoint(folder, progress=False)
    np.testing.assert_array_equal(token_logits(model, [1, 2]), token_logits(expected, [1, 2]))
    with pytest.raises(
        ValueError, match=r"base: expected a model, got .*, which is a LoRA adapter"
    ):
        load_checkpoint(other, base=folder, progress=False)
    with pytest.raises(ValueError, match=r"^.*base: expected None for a path that is no LoRA"):
        load_checkpoint(base, base=base, progress=False)


@pytest.mark.deep
def test_the_engine_takes_a_folder(base, folder):
    model, config, _ = load_checkpoint(base, progress=False)
    engine = Engine(model, num_pages=16, max_seqs=2, max_tokens=16, max_adapters=1, max_rank=4)
    engine.add_adapter("mine", folder)
    request = engine.submit([1, 2, 3], max_new_tokens=5, adapter="mine")
    engine.run()
    expected = generate(model, [[1, 2, 3]], max_new_tokens=5, adapter=load_adapter(folder, config))
    assert request.tokens == expected.tokens[0]


@pytest.mark.parametrize("prompts", first_of([["Hello", "Bye"], ["Hello"]], 1))
def test_the_command_generates_with_an_adapter(base, folder, capsys, monkeypatch, prompts):
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)

    def run(*arguments):
        code = cli.main(
            ["generate", *prompts, "--max-new-tokens", "6", "--json", *map(str, arguments)]
        )
        out, err = capsys.readouterr()
        return code, [json.loads(line)["tokens"] for line in out.splitlines()], err

    beside = run("--model", base, "--adapter", folder)
    merged = run("--model", folder, "--base", base)
    assert beside[0] == merged[0] == 0
    assert beside[1] == merged[1]
    if len(prompts) == 1:
        assert run("--model", base)[1] != merged[1]
    code, _, err = run("--model", base, "--adapter", base)
    assert code == 2
    assert "adapter_config.json: no such file" in err
