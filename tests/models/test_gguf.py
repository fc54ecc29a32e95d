# SPDX-License-Identifier: Apache-2.0
"""GGUF files: quantized tensors, metadata, tokenizer, and how broken ones are refused."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf_files import ARCHITECTURES, make, metadata_of, tensors_of, write
from tokenizers import Tokenizer as Backend

from jax_paged.models import load_checkpoint
from jax_paged.models.checkpoint import gguf_file, gguf_quants
from jax_paged.models.checkpoint.gguf_file import GGUFFile
from jax_paged.models.checkpoint.gguf_quants import KINDS, QUANTIZATIONS
from jax_paged.models.checkpoint.gguf_vocab import tokenizer_from_gguf
from jax_paged.models.checkpoint.hf_config import config_from_hf
from jax_paged.models.decoder.parameters import expected_tensors, random_source
from jax_paged.models.testing import small_hf_config

NAN, INF = float("nan"), float("inf")


def tensor(file, config, name, dtype=np.float32):
    out = np.full(expected_tensors(config)[name], np.nan, dtype)
    file.open_tensors(config)(name, out)
    return out


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_gives_the_configuration_and_weights_it_was_made_from(tmp_path, architecture, tied):
    config, metadata, tensors = make(architecture, tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write(path, architecture, metadata, tensors)
    file = GGUFFile(path)
    read = file.config()
    if architecture == "qwen3moe":
        assert read.intermediate_size == config.intermediate_size
    assert read == config
    source = random_source(config, 7)
    for name in expected_tensors(config):
        np.testing.assert_array_equal(tensor(file, read, name), source(name), err_msg=name)


def test_biases_of_a_llama_file_are_read_and_unpermuted(tmp_path):
    config, metadata, tensors = make("llama", attention_bias=True, mlp_bias=True)
    write(tmp_path / "model.gguf", "llama", metadata, tensors)
    file = GGUFFile(tmp_path / "model.gguf")
    assert file.config() == config
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(tensor(file, config, name), random_source(config, 7)(name))


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_of_a_part_of_a_tensor_only_its_blocks_are_read(tmp_path, monkeypatch, architecture, kind):
    sizes = {"hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 64}
    if architecture == "llama":
        sizes = sizes | {"attention_bias": True, "mlp_bias": True}
        del sizes["moe_intermediate_size"]
    config, metadata, tensors = make(architecture, **sizes)
    kinds = {name: kind for name, x in tensors.items() if x.ndim > 1}
    write(tmp_path / "model.gguf", architecture, metadata, tensors, kinds)
    file, read = GGUFFile(tmp_path / "model.gguf"), []
    fill = file.open_tensors(config)

    def counted(kind, data, out, pool):
        read.append(data.nbytes // kind.num_bytes * kind.size)
        gguf_quants.dequantize(kind, data, out, pool)

    monkeypatch.setattr(gguf_file, "dequantize", counted)
    for name, shape in expected_tensors(config).items():
        whole = tensor(file, config, name)
        for begin, end in ((0, 32), (32, 64), (5, 13)):
            for axis, size in enumerate(shape):
                part = tuple(
                    slice(min(begin, size - 1), min(end, size)) if i == axis else slice(None)
                    for i in range(len(shape))
                )
                out = np.full(whole[part].shape, np.nan, np.float32)
                read.clear()
                fill(name, out, part)
                np.testing.assert_array_equal(out, whole[part], err_msg=name)
                most = out.size
                if begin == 5 and kind != Kind.F32 and axis == len(shape) - 1 and len(shape) > 1:
                    most = out.size // out.shape[-1] * 32
                assert sum(read) == most, (name, part)


def test_a_mistral_file_is_a_llama(tmp_path):
    config = config_from_hf(
        small_hf_config("mistral", sliding_window=None, rms_norm_eps=2**-20, eos_token_id=3)
    )
    path = tmp_path / "model.gguf"
    write(path, "llama", metadata_of("llama", config), tensors_of("llama", config))
    file = GGUFFile(path)
    assert dataclasses.replace(file.config(), model_type="mistral") == config
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(tensor(file, config, name), random_source(config, 7)(name))


@pytest.mark.parametrize("context_length", [None, 64, 65])
def test_longrope_takes_the_divisors_of_the_wanted_context(tmp_path, context_length):
    _, metadata, tensors = make("phi3")
    short, long = np.linspace(1, 1.5, 6).astype(np.float32), np.arange(6, 12).astype(np.float32)
    tensors |= {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    metadata["phi3.rope.scaling.attn_factor"] = 1.25
    write(tmp_path / "model.gguf", "phi3", metadata, tensors)
    _, config, _ = load_checkpoint(tmp_path / "model.gguf", context_length=context_length)
    divisors = long if context_length == 65 else short
    assert config.context_length == (context_length or 64)
    assert config.rope.frequency_divisors == tuple(divisors.tolist())
    assert (config.rope.attention_factor, config.rope.rotary_dim) == (1.25, 12)


def test_rope_frequency_divisors_are_honoured(tmp_path):
    config, metadata, tensors = make("llama")
    tensors["rope_freqs.weight"] = np.arange(1, 9, dtype=np.float32)
    write(tmp_path / "model.gguf", "llama", metadata, tensors)
    model, got, _ = load_checkpoint(tmp_path / "model.gguf", jnp.float32)
    assert got.rope.frequency_divisors == tuple(range(1, 9))
    np.testing.assert_allclose(
        model.config.rope.frequencies(16), config.rope.frequencies(16) / np.arange(1, 9), rtol=1e-6
    )


def test_rope_frequency_divisors_that_make_no_sense_are_refused(tmp_path):
    _, metadata, tensors = make("llama")
    tensors["rope_freqs.weight"] = np.arange(8, dtype=np.float32)
    write(tmp_path / "model.gguf", "llama", metadata, tensors)
    with pytest.raises(ValueError, match=r"tensor 'rope_freqs.weight' must be .*, got \(0.0, 1.0"):
        load_checkpoint(tmp_path / "model.gguf")


def test_linear_rope_scaling_is_honoured(tmp_path):
    _, metadata, tensors = make("qwen3")
    scaling = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    write(tmp_path / "model.gguf", "qwen3", metadata | scaling, tensors)
    rope = GGUFFile(tmp_path / "model.gguf").config().rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_qwen3_moe_files_renormalise_unless_they_say_otherwise(tmp_path):
    _, metadata, tensors = make("qwen3moe")
    for i, (extra, expected) in enumerate(
        [({}, True), ({"qwen3moe.expert_weights_norm": False}, False)]
    ):
        path = tmp_path / f"{i}.gguf"
        write(path, "qwen3moe", metadata | extra, tensors)
        assert GGUFFile(path).config().norm_topk_prob == expected


# Plain loops over one block of 256 weights, from the description of each format: scales and
# minima in 4 or 6 bits per sub-block, times one or two f16 factors.


def half(block, at):
    return float(np.frombuffer(bytes(block[at : at + 2]), np.float16)[0])


def scale_min(packed, j):
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    low, high = packed[j + 4], packed[j - 4]
    return (low & 15) | (high >> 6) << 4, (low >> 4) | (packed[j] >> 6) << 4


def q2_k(b):
    d, dmin, out = half(b, 80), half(b, 82), []
    for i in range(256):
        chunk, j = divmod(i, 128)
        quant = (b[16 + 32 * chunk + j % 32] >> 2 * (j // 32)) & 3
        scale = b[i // 16]
        out.append(d * (scale & 15) * quant - dmin * (scale >> 4))
    return out


def q3_k(b):
    d, out = half(b, 108), []
    for i in range(256):
        chunk, j = divmod(i, 128)
        low = (b[32 + 32 * chunk + j % 32] >> 2 * (j // 32)) & 3
        high = (b[j % 32] >> (i // 32)) & 1
        s = i // 16
        packed = b[96:108]
        four = packed[s % 8] >> 4 if s >= 8 else packed[s] & 15
        two = (packed[8 + s % 4] >> 2 * (s // 4)) & 3
        out.append(d * ((four | two << 4) - 32) * (low - (0 if high else 4)))
    return out


def q4_k(b):
    d, dmin, out = half(b, 0), half(b, 2), []
    for i in range(256):
        scale, low = scale_min(b[4:16], i // 32)
        byte = b[16 + 32 * (i // 64) + i % 32]
        quant = byte >> 4 if (i // 32) % 2 else byte & 15
        out.append(d * scale * quant - dmin * low)
    return out


def q5_k(b):
    d, dmin, out = half(b, 0), half(b, 2), []
    for i in range(256):
        scale, low = scale_min(b[4:16], i // 32)
        byte = b[48 + 32 * (i // 64) + i % 32]
        quant = byte >> 4 if (i // 32) % 2 else byte & 15
        quant |= ((b[16 + i % 32] >> (i // 32)) & 1) << 4
        out.append(d * scale * quant - dmin * low)
    return out


def q6_k(b):
    d, out = half(b, 208), []
    for i in range(256):
        chunk, j = divmod(i, 128)
        byte = b[64 * chunk + j % 64]
        quant = byte >> 4 if j >= 64 else byte & 15
        quant |= ((b[128 + 32 * chunk + j % 32] >> 2 * (j // 32)) & 3) << 4
        scale = int(np.int8(np.uint8(b[192 + i // 16])))
        out.append(d * scale * (quant - 32))
    return out


K_BLOCKS = {
    "Q2_K": (84, (80, 82), q2_k),
    "Q3_K": (110, (108,), q3_k),
    "Q4_K": (144, (0, 2), q4_k),
    "Q5_K": (176, (0, 2), q5_k),
    "Q6_K": (210, (208,), q6_k),
}
# Largest error of a weight of up to 4, half a step of the format: 2^-9, 2^-12 relative, then 8
# and 4 or 5 bits over a block's range.
TOLERANCE = {
    "F32": 0, "F16": 2**-9, "BF16": 2**-6, "Q8_0": 4 / 127, "Q4_0": 4 / 7, "Q4_1": 8 / 30,
    "Q5_0": 4 / 15, "Q5_1": 8 / 62,
}  # fmt: skip


# Where the f16 numbers of a block lie.
FACTORS = {name: factors for name, (_, factors, _) in K_BLOCKS.items()} | {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
}  # fmt: skip
KIND_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_each_listed_quantization_is_dequantized(tmp_path, kind):
    config, metadata, tensors = make("qwen3", hidden_size=256, num_hidden_layers=1)
    name, ours = "blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"
    if kind in K_BLOCKS:
        size, factors, decode = K_BLOCKS[kind]
        rows = tensors[name].shape[0]
        blocks = np.random.default_rng(0).integers(0, 256, (rows, size), np.uint8)
        for at in factors:
            scale = np.random.default_rng(at).uniform(-0.1, 0.1, rows).astype(np.float16)
            blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
        tensors[name] = blocks
        expected = np.array([decode([int(x) for x in block]) for block in blocks])
        tolerance = 1e-5
    else:
        expected, tolerance = tensors[name], TOLERANCE[kind]
    write(tmp_path / "model.gguf", "qwen3", metadata, tensors, {name: Kind[kind]})
    got = tensor(GGUFFile(tmp_path / "model.gguf"), config, ours)
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=1e-5)
    assert np.abs(np.asarray(got)).max() > 0.05


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantized_values_equal_those_of_the_gguf_package_to_the_bit(kind, dtype):
    number = next(number for number, known in KINDS.items() if known.name == kind)
    size, num_bytes = KINDS[number][1:3]
    rng = np.random.default_rng(number)
    num_blocks = 3 * (8192 * 32 // size + 1)  # several pieces
    blocks = rng.integers(0, 256, (num_blocks, num_bytes), np.uint8)
    if size == 1:
        blocks = rng.standard_normal(num_blocks).astype(jnp.dtype(KIND_DTYPES[kind])).view(np.uint8)
    for at in FACTORS.get(kind, ()):
        factor = rng.standard_normal(num_blocks).astype(np.float16)
        blocks[:, at : at + 2] = factor[:, None].view(np.uint8)
    want = dequantize(blocks.reshape(num_blocks, -1), Kind[kind]).reshape(3, -1)
    got = np.full(want.shape, np.nan, dtype)
    with ThreadPoolExecutor(2) as pool:
        gguf_quants.dequantize(KINDS[number], blocks.reshape(-1), got, pool)
    assert got.tobytes() == want.astype(dtype).tobytes()
    wide = np.full((3, 2, got.shape[1]), np.nan, dtype)  # into a slice, as experts are joined
    with ThreadPoolExecutor(2) as pool:
        gguf_quants.dequantize(KINDS[number], blocks.reshape(-1), wide[:, 1], pool)
    assert wide[:, 1].tobytes() == got.tobytes()


def test_other_quantizations_are_refused_by_name(tmp_path):
    config, metadata, tensors = make("qwen3", hidden_size=256)
    name = "blk.1.ffn_up.weight"
    write(tmp_path / "model.gguf", "qwen3", metadata, tensors, {name: Kind.TQ1_0})
    file = GGUFFile(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"quantization TQ1_0, which is not supported; .*Q6_K"):
        file.open_tensors(config)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma", {}, "'gemma' is not supported; supported: llama, qwen2, qwen3, qwen3moe, phi3"),
        ("llama", {"llama.flux": 3}, "key 'llama.flux' = 3 is not known"),
        ("llama", {"adapter.type": "lora"}, "key 'adapter.type' = 'lora' is not known"),
        ("llama", {"general.type": "adapter"}, "key 'general.type' must be 'model'"),
        ("llama", {"split.count": 3}, "key 'split.count' must be 1"),
        ("llama", {"llama.expert_count": 8}, "key 'llama.expert_count' must be 0, got 8"),
        ("llama", {"llama.attention.sliding_window": 64}, "must be 0, got 64"),
        ("llama", {"llama.rope.dimension_count": 8}, "must be the head_dim, 16, got 8"),
        ("phi3", {"phi3.rope.scaling.type": "linear"}, "must be 'none' or 'longrope', got 'line"),
        ("phi3", {"phi3.rope.scaling.type": "longrope"}, "scaling.attn_factor' is missing"),
        (
            "phi3",
            {"phi3.rope.scaling.type": "longrope", "phi3.rope.scaling.attn_factor": 1.0},
            "tensor 'rope_factors_short.weight' must have shape (6,), got none",
        ),
        ("phi3", {"phi3.rope.dimension_count": 18}, "rotary_dim must be at most head_dim=16"),
        ("qwen2", {"qwen2.rope.dimension_count": 8}, "must be the head_dim, 16, got 8"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "must be 'none' or 'linear', got 'yarn'"),
        ("llama", {"llama.vocab_size": 98}, "'token_embd.weight' must have 98 rows, got 97"),
        ("llama", {"llama.attention.head_count": [4, 4]}, "2147483647, got [4, 4]"),
        ("llama", {"llama.attention.head_count": 0}, "head_count' must be an integer from 1 to"),
        ("llama", {"llama.attention.head_count": 4.5}, "head_count' must be an integer from 1 to"),
        ("llama", {"llama.block_count": 1000000}, "must be an integer from 1 to 65536, got 10000"),
        ("llama", {"llama.block_count": 65536}, "missing; expected shape (32,) (at least 1"),
        ("llama", {"llama.rope.freq_base": NAN}, "freq_base' must be a number from 2 to 1e+15"),
        ("llama", {"llama.rope.freq_base": INF}, "freq_base' must be a number from 2 to 1e+15"),
        (
            "llama",
            {"llama.attention.layer_norm_rms_epsilon": NAN},
            "layer_norm_rms_epsilon' must be a number from 1e-30 to 1, got nan",
        ),
        (
            "llama",
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
            "factor",
        ),
        ("llama", {"split.count": "two"}, "key 'split.count' must be an integer"),
        ("llama", {"general.type": 3}, "key 'general.type' must be a text, got 3"),
        ("llama", {"general.alignment": 0}, "general.alignment must be an integer from 1"),
        ("llama", {"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id' must be an integer"),
        ("llama", {"tokenizer.ggml.tokens": [1, 2]}, "tokens' must be a list, each entry a text"),
        ("llama", {"tokenizer.chat_template": 3}, "chat_template' must be a text, got 3"),
        ("qwen3", {"qwen3.block_count": None}, "key 'qwen3.block_count' is missing"),
        ("qwen3", {"qwen3.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ("qwen3", {"qwen3.block_count": 1}, "has no place in this model"),
        ("qwen3", {"qwen3.feed_forward_length": 40}, "must have shape (40, 32), got (48, 32)"),
        ("qwen3moe", {"qwen3moe.expert_shared_count": 1}, "must be 0, got 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, architecture, changes, message):
    source = architecture if architecture in ARCHITECTURES else "llama"
    _, metadata, tensors = make(source)
    path = tmp_path / "model.gguf"
    write(path, architecture, metadata | changes, tensors)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load_checkpoint(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "at"), [("F32", None), ("F16", None), ("BF16", None), ("Q8_0", 0), ("Q4_1", 2),
                     ("Q5_1", 2), ("Q4_K", 2), ("Q6_K", 208)]
)  # fmt: skip
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_weights_that_are_no_numbers_are_refused_by_the_tensor_s_name(tmp_path, kind, at, wrong):
    _, metadata, tensors = make("qwen3", hidden_size=256, num_hidden_layers=1)
    name = "blk.0.attn_k.weight"
    if at is None:
        tensors[name][5, 7] = wrong
    else:
        size = dict.fromkeys(K_BLOCKS, 1) | {"Q8_0": 34, "Q4_1": 20, "Q5_1": 24}
        size = K_BLOCKS[kind][0] if kind in K_BLOCKS else size[kind]
        blocks = np.zeros((tensors[name].size // (256 if kind in K_BLOCKS else 32), size), np.uint8)
        blocks[-1, at : at + 2] = np.frombuffer(np.float16(wrong).tobytes(), np.uint8)
        tensors[name] = blocks.reshape(tensors[name].shape[0], -1)
    path = tmp_path / "model.gguf"
    write(path, "qwen3", metadata, tensors, {name: Kind[kind]})
    text = f"{path}: tensor '{name}': expected finite weights, got NaN or infinity"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("skipped", "changed", "message"),
    [
        # The place in the file, behind the number of axes, one axis and the type. A small file
        # could ask for any amount of memory so.
        (4 + 8 + 4, bytes(8), r"tensors '.*' and '.*' overlap"),
        (0, (50).to_bytes(4, "little"), r"'blk.1.attn_norm.weight' must have at most 4 axes"),
    ],
    ids=["tensors share bytes", "too many axes"],
)
def test_a_tensor_that_is_described_wrongly_is_refused(skipped, changed, message, tmp_path):
    _, metadata, tensors = make("llama")
    path = tmp_path / "model.gguf"
    write(path, "llama", metadata, tensors)
    data, name = path.read_bytes(), b"blk.1.attn_norm.weight"
    at = data.index(name) + len(name) + skipped
    path.write_bytes(data[:at] + changed + data[at + len(changed) :])
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 3000, -64, -1])
def test_a_truncated_file_is_refused_in_one_line(tmp_path, keep):
    _, metadata, tensors = make("llama")
    path = tmp_path / "model.gguf"
    write(path, "llama", metadata, tensors)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or not a GGUF file") as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def vocabulary(**changes):
    """A byte-level vocabulary with the merges for "12", "ab" and "'s", as GGUF metadata."""
    alphabet = sorted(byte_alphabet())
    tokens = ["<|end|>", *alphabet, "12", "ab", "abc", "'s", "<tool>"]
    types = [3] + [1] * (len(tokens) - 2) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["1 2", "a b", "ab c", "' s"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def byte_alphabet():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def pieces(text, **changes):
    metadata = vocabulary(**changes)
    tokenizer = tokenizer_from_gguf(metadata, "file")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return [metadata["tokenizer.ggml.tokens"][i] for i in ids]


def test_the_vocabulary_of_the_file_encodes_and_decodes():
    assert pieces("abc <tool>é<|end|>'s") == ["abc", "Ġ", "<tool>", "Ã", "©", "<|end|>", "'s"]
    tokenizer = tokenizer_from_gguf(vocabulary(), "file")
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.decode(tokenizer.encode("ab<|end|>")) == "ab"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "12"]),
        ("smollm", ["1", "2", "1", "2"]),
        ("qwen2", ["1", "2", "1", "2"]),
        ("llama-bpe", ["12", "1", "2"]),
    ],
)
def test_the_named_pre_tokeniser_splits_digits_its_way(pre, expected):
    # The merge "1 2" joins within a piece: gpt-2 has one piece, Llama 3 "121" and "2".
    assert pieces("1212", pre=pre, add_bos_token=False) == expected


def test_add_bos_is_respected():
    assert tokenizer_from_gguf(vocabulary(add_bos_token=True), "file").encode("a")[0] == 0
    assert tokenizer_from_gguf(vocabulary(add_bos_token=False), "file").encode("a")[0] != 0


def test_qwen2_normalises_as_released():
    tokenizer = tokenizer_from_gguf(vocabulary(pre="qwen2"), "file")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model' must be 'gpt2' (byte-level BPE) or 'llama' (SentencePiece) fo"),
        (
            {"pre": "tekken"},
            "must be one of gpt-2, smollm, qwen2, llama-bpe for text, got 'tekken'",
        ),
        ({"add_eos_token": True}, "'tokenizer.ggml.add_eos_token' must be False"),
        ({"add_space_prefix": True}, "'tokenizer.ggml.add_space_prefix' must be False"),
        ({"quirk": 1}, "key 'tokenizer.ggml.quirk' is not supported"),
        ({"padding_token_id": 9999}, "the id of pad_token must be below 262, got 9999"),
        ({"merges": []}, "no tokenizer.ggml.tokens and merges"),
    ],
)
def test_a_vocabulary_that_is_not_supported_says_so_when_text_is_needed(changes, message):
    tokenizer = tokenizer_from_gguf(vocabulary(**changes), "file")
    for use in (tokenizer.encode, tokenizer.decode, tokenizer.apply_chat):
        with pytest.raises(ValueError, match=re.escape(message)):
            use("text")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["1 2", "ab"]}, "merges': expected pairs with a space between, got 'ab'"),
        ({"merges": ["1 no_token"]}, "keys 'tokenizer.ggml.tokens' and 'tokenizer.ggml.merges': "),
        ({"token_type": [1, 1]}, "token_type' must have 262 entries, one for each token, got 2"),
        ({"token_type": "x"}, "key 'tokenizer.ggml.token_type' must be a list, each entry an int"),
        ({"pre": ["gpt-2"]}, "key 'tokenizer.ggml.pre' must be a text, got ['gpt-2']"),
        ({"bos_token_id": "a"}, "key 'tokenizer.ggml.bos_token_id' must be an integer"),
        ({"add_bos_token": 7}, "key 'tokenizer.ggml.add_bos_token' must be true or false, got 7"),
    ],
)
def test_a_vocabulary_that_is_broken_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=r"^file: ") as caught:
        tokenizer_from_gguf(vocabulary(**changes), "file")
    assert message in str(caught.value)


def test_the_chat_template_of_the_file_is_used():
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = vocabulary() | {"tokenizer.chat_template": template}
    tokenizer = tokenizer_from_gguf(metadata, "file")
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat(messages) == tokenizer.encode("ab<|end|>")
    assert isinstance(tokenizer.backend, Backend)
