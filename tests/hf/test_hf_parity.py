# SPDX-License-Identifier: Apache-2.0
"""Our logits against transformers, from checkpoints that transformers wrote, in f32 on the CPU."""

import dataclasses
import json
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models import default_checkpoint, generate, load_checkpoint
from jax_paged.models.decoder.parts import rms_norm
from jax_paged.models.testing import Stepper
from jax_paged.ops import rope

ATOL = 2e-4  # f32 sums of the same terms in another order, logits of size about 1 to 10
NUM_TOKENS = 40
VOCAB = 131

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": np.linspace(1, 1.5, 24).tolist(),
    "long_factor": np.linspace(1, 12, 24).tolist(),
    "original_max_position_embeddings": 48,
    "partial_rotary_factor": 0.75,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: family, heads, and what else its config.json says."""

    family: str
    heads: tuple[int, int]
    head_dim: int
    options: dict

    def __str__(self):
        options = ",".join(f"{k}={v}" for k, v in self.options.items() if "rope" not in k)
        rope = self.options.get("rope_parameters", {}).get("rope_type", "")
        return f"{self.family}-{self.heads[0]}:{self.heads[1]}x{self.head_dim}-{options}{rope}"


def moe(experts, chosen, **options):
    return {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": 24} | (
        {"norm_topk_prob": True} | options
    )


def windows(size, **options):
    return {"use_sliding_window": True, "sliding_window": size} | options


GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GPT_OSS = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip


DEEPSEEK_YARN = YARN | {"mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 8.0}
DEEPSEEK = {
    "hidden_size": 48, "num_hidden_layers": 3, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40, "n_routed_experts": 12,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rope_parameters": DEEPSEEK_YARN,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}

CASES = [
    Case("Qwen3Moe", (1, 1), 64, moe(4, 1)),
    Case("Qwen3Moe", (4, 2), 64, moe(8, 2, norm_topk_prob=False)),
    Case("Qwen3Moe", (8, 1), 128, moe(64, 8)),
    Case("Qwen3Moe", (6, 2), 128, moe(16, 4, tie_word_embeddings=True, attention_bias=True)),
    Case("Qwen3Moe", (4, 4), 64, moe(5, 5, num_hidden_layers=4, decoder_sparse_step=2)),
    Case("Qwen3Moe", (5, 1), 64, moe(7, 3, mlp_only_layers=[1], rope_parameters=YARN)),
    Case("Qwen3", (2, 2), 64, {"tie_word_embeddings": True}),
    Case("Qwen3", (7, 1), 128, {}),
    Case("Qwen3", (12, 2), 64, {"attention_bias": True}),
    Case("Qwen3", (4, 2), 128, {"rope_parameters": YARN | {"truncate": False, "beta_fast": 4.0}}),
    Case("Qwen3", (4, 2), 64, windows(9, max_window_layers=1)),
    Case("Qwen3", (4, 1), 64, windows(6, layer_types=["sliding_attention", "full_attention"])),
    Case("Qwen3Moe", (4, 2), 64, moe(6, 2) | windows(7)),
    Case("Llama", (3, 3), 64, {"tie_word_embeddings": True}),
    Case("Llama", (8, 2), 128, {"attention_bias": True, "mlp_bias": True}),
    Case("Llama", (9, 3), 64, {"rope_parameters": LLAMA3}),
    Case("Llama", (4, 1), 64, {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    Case("Qwen2", (7, 1), 64, {"tie_word_embeddings": True}),
    Case("Qwen2", (4, 2), 64, {"rope_parameters": YARN}),
    Case("Qwen2", (4, 2), 64, windows(9, max_window_layers=1)),
    Case("Mistral", (4, 2), 128, {"sliding_window": None}),
    Case("Mistral", (8, 2), 64, {"sliding_window": 9, "num_hidden_layers": 3}),
    Case("Phi3", (4, 4), 64, {"sliding_window": 9}),
    Case("Phi3", (6, 2), 64, {"tie_word_embeddings": True, "partial_rotary_factor": 0.5}),
    LONGROPE_CASE := Case(
        "Phi3", (3, 1), 64,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48, "sliding_window": 99},
    ),
    Case("Gemma3", (4, 2), 64, {"sliding_window": 9, "sliding_window_pattern": 2,
                                "query_pre_attn_scalar": 24, "rope_parameters": GEMMA_ROPE}),
    Case("Gemma3", (4, 1), 64, {"sliding_window": 6, "num_hidden_layers": 3,
                                "final_logit_softcapping": 9.0,
                                "layer_types": [*["sliding_attention"] * 2, "full_attention"]}),
    # A window that hides nothing still says how its layer turns.
    Case("Gemma3", (2, 2), 64, {"tie_word_embeddings": False, "attention_bias": True}),
    Case("GptOss", (4, 2), 64, GPT_OSS),
    Case("GptOss", (8, 2), 64, GPT_OSS | {"swiglu_limit": 0.7, "num_experts_per_tok": 8,
                                          "attention_bias": False}),
    Case("GptOss", (3, 1), 64, GPT_OSS | {
        "num_hidden_layers": 3, "tie_word_embeddings": True,
        "layer_types": ["full_attention", *["sliding_attention"] * 2],
    }),
    # As V2-Lite, V2 and V3.
    Case("DeepseekV2", (4, 4), 40, DEEPSEEK | {"q_lora_rank": None}),
    Case("DeepseekV2", (6, 6), 40, DEEPSEEK | GROUPS | {
        "q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_shared_experts": 1,
    }),
    Case("DeepseekV3", (6, 6), 40, DEEPSEEK | GROUPS | {"q_lora_rank": 40}),
    Case("DeepseekV3", (3, 3), 40, DEEPSEEK | GROUPS | {
        "q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "n_shared_experts": 3,
    }),
]  # fmt: skip


def make_model(transformers, case):
    """A random model of transformers, with norms and biases that are not 1 and 0."""
    import torch

    torch.manual_seed(zlib.crc32(str(case).encode()))
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": case.heads[0],
        "num_key_value_heads": case.heads[1],
        "head_dim": case.head_dim,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": [5, 7],
    } | case.options
    if case.family == "Phi3":  # whose check of rope takes head_dim from here
        settings["hidden_size"] = case.head_dim * case.heads[0]
        settings["pad_token_id"] = None  # the default is beyond this vocabulary
        del settings["head_dim"]
    elif case.heads[0] * 16 != 48 and case.family == "Llama":
        settings["hidden_size"] = 16 * case.heads[0]
    if case.family == "Gemma3":
        settings["pad_token_id"] = None
    if case.family.startswith("Deepseek"):
        del settings["head_dim"]
    name = "Gemma3Text" if case.family == "Gemma3" else case.family
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float().eval()
    biases = (pair for pair in model.named_buffers() if pair[0].endswith("correction_bias"))
    for name, weight in (*model.named_parameters(), *biases):
        if "norm" in name:
            weight.copy_((case.family != "Gemma3") + 0.2 * torch.randn_like(weight))
        else:
            size = 1.0 if "embed" in name or name.endswith("bias") else weight.shape[-1] ** -0.5
            weight.copy_(size * torch.randn_like(weight))
    model.set_attn_implementation("eager")
    return model


def hf_logits(model, tokens):
    import torch

    return model(torch.tensor([tokens])).logits[0].numpy()


def ids(count, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_match_transformers(transformers, tmp_path, case):
    reference = make_model(transformers, case)
    reference.save_pretrained(tmp_path)
    model, config, _ = load_checkpoint(tmp_path, jnp.float32)
    assert (config.num_q_heads, config.num_kv_heads) == case.heads
    assert config.eos_token_ids == (5, 7)
    prompts = {0: ids(NUM_TOKENS, 0), 1: ids(3, 1), 2: ids(22, 2), 3: ids(11, 3)}
    expected = {row: hf_logits(reference, prompt) for row, prompt in prompts.items()}
    stepper = Stepper(model, max_seqs=4, page_size=8)

    # Prefill of one row; its chunks; then a mixed batch of prefill, chunks and decode.
    whole = Stepper(model, max_seqs=4, page_size=8).step({0: prompts[0]})
    np.testing.assert_allclose(whole[0], expected[0], atol=ATOL)
    got = {row: [] for row in prompts}
    for step in (
        {0: slice(0, 17), 2: slice(0, 5)},
        {2: slice(5, 6), 1: slice(0, 3), 0: slice(17, 36), 3: slice(0, 10)},
        {0: slice(36, 37), 2: slice(6, 22), 3: slice(10, 11)},
    ):
        fed = {row: prompts[row][part] for row, part in step.items()}
        for row, logits in stepper.step(fed, padded_to=NUM_TOKENS).items():
            got[row].append(logits)
    for token in prompts[0][37:]:
        got[0].append(stepper.step({0: [token]})[0])
    for row, parts in got.items():
        np.testing.assert_allclose(np.concatenate(parts), expected[row], atol=ATOL)


@pytest.mark.parametrize(("context_length", "length"), [(None, 48), (256, 49), (256, 120)])
def test_longrope_beyond_its_original_context_matches_transformers(
    transformers, tmp_path, context_length, length
):
    reference = make_model(transformers, LONGROPE_CASE)
    reference.save_pretrained(tmp_path)
    model, config, _ = load_checkpoint(tmp_path, jnp.float32, context_length=context_length)
    assert config.context_length == (context_length or 48)
    tokens = ids(length, 8)
    stepper = Stepper(model, max_seqs=1, pages_per_seq=16)
    logits = [stepper.step({0: tokens[:-1]})[0], stepper.step({0: tokens[-1:]})[0]]
    np.testing.assert_allclose(np.concatenate(logits), hf_logits(reference, tokens), atol=ATOL)


def test_a_sharded_bf16_checkpoint_matches_transformers(transformers, tmp_path):
    import torch

    reference = make_model(transformers, CASES[1]).to(torch.bfloat16)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, _, _ = load_checkpoint(tmp_path, jnp.float32)
    tokens = ids(NUM_TOKENS, 5)
    logits = Stepper(model, max_seqs=4).step({0: tokens})[0]
    # Loaded again in f32: casting the model back would keep its RoPE frequencies in bf16.
    again = type(reference).from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_allclose(logits, hf_logits(again, tokens), atol=ATOL)


def test_a_checkpoint_with_fused_experts_matches_transformers(transformers, tmp_path):
    reference = make_model(transformers, CASES[1])
    reference.save_pretrained(tmp_path, save_original_format=False)
    model, _, _ = load_checkpoint(tmp_path, jnp.float32)
    tokens = ids(NUM_TOKENS, 6)
    logits = Stepper(model, max_seqs=4).step({0: tokens})[0]
    np.testing.assert_allclose(logits, hf_logits(reference, tokens), atol=ATOL)


LATENT = [case for case in CASES if case.family.startswith("Deepseek")]
FAMILIES_OF_TWO_KINDS = [case for case in CASES if case.family in ("Gemma3", "GptOss")]


@pytest.mark.parametrize("case", FAMILIES_OF_TWO_KINDS + LATENT, ids=str)
def test_greedy_ids_of_layers_of_other_kinds_match_transformers(transformers, tmp_path, case):
    reference = make_model(transformers, case)
    reference.save_pretrained(tmp_path)
    model, _, _ = load_checkpoint(tmp_path, jnp.float32)
    expected, gap = hf_greedy(reference, ids(19, 17))
    assert gap > 10 * ATOL
    assert generate(model, [ids(19, 17)], max_new_tokens=NUM_STEPS).tokens == [expected]


def test_a_soft_cap_of_attention_is_that_of_transformers(transformers, tmp_path):
    """Gemma3 of transformers has the key, but reads it nowhere; its attention takes the option."""
    import torch

    case = Case("Gemma3", (4, 2), 64, {"sliding_window": 9, "attn_logit_softcapping": 2.0})
    reference = make_model(transformers, case)
    reference.save_pretrained(tmp_path)
    model, config, _ = load_checkpoint(tmp_path, jnp.float32)
    tokens = ids(NUM_TOKENS, 6)
    logits = Stepper(model, max_seqs=4).step({0: tokens})[0]
    expected = reference(torch.tensor([tokens]), softcap=config.attention_soft_cap).logits[0]
    assert np.abs(expected.numpy() - hf_logits(reference, tokens)).max() > 0.01
    np.testing.assert_allclose(logits, expected, atol=ATOL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_mxfp4_are_those_of_transformers(transformers, tmp_path, dtype):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 96}
    reference = make_model(transformers, Case("GptOss", (4, 2), 64, GPT_OSS | sizes))
    generator, packed = torch.Generator().manual_seed(3), {}
    for number, layer in enumerate(reference.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, inner, rows = weight.shape
            size = (experts, rows, inner // 32, 16)
            options = {"generator": generator, "dtype": torch.uint8}
            blocks = torch.randint(0, 256, size, **options)
            scales = torch.randint(120, 125, size[:-1], **options)
            weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            stored = f"model.layers.{number}.mlp.experts.{name}"
            packed |= {stored + "_blocks": blocks, stored + "_scales": scales}
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if f"{k}_blocks" not in packed}
    save_file(tensors | packed, file, metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, _, _ = load_checkpoint(tmp_path, dtype)
    for number, layer in enumerate(reference.model.layers):
        experts, mlp = layer.mlp.experts, model.layers[number].mlp
        both = experts.gate_up_proj.numpy().swapaxes(1, 2)
        both = np.concatenate([both[:, ::2], both[:, 1::2]], axis=1)
        np.testing.assert_array_equal(np.float32(mlp.gate_up[...]), both)
        down = experts.down_proj.numpy().swapaxes(1, 2)
        np.testing.assert_array_equal(np.float32(mlp.down[...]), down)
    if dtype == "float32":
        logits = Stepper(model, max_seqs=4).step({0: ids(NUM_TOKENS, 6)})[0]
        expected = hf_logits(reference, ids(NUM_TOKENS, 6))
        np.testing.assert_allclose(logits, expected, atol=ATOL)


def test_gemma_in_bf16_rounds_as_transformers_does(transformers, tmp_path):
    """Embeddings times √hidden in bf16, and norms by 1 + w, which bf16 would round away."""
    import torch

    reference = make_model(transformers, FAMILIES_OF_TWO_KINDS[0]).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model, _, _ = load_checkpoint(tmp_path, jnp.bfloat16)
    tokens = ids(NUM_TOKENS, 6)
    embedded = reference.model.embed_tokens(torch.tensor(tokens)).float().numpy()
    np.testing.assert_array_equal(np.float32(model.embed(jnp.array(tokens))), embedded)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours = rms_norm(jnp.asarray(x.float().numpy(), jnp.bfloat16), model.norm[...], 1e-6)
    theirs = reference.model.norm(x).float().numpy()
    assert np.mean(np.float32(ours) == theirs) > 0.99  # the mean is summed in another order


def test_old_key_names_of_gemma3_give_the_same_configuration(transformers, tmp_path):
    make_model(transformers, FAMILIES_OF_TWO_KINDS[0]).save_pretrained(tmp_path)
    _, new, _ = load_checkpoint(tmp_path, jnp.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["layer_types"], raw["rope_parameters"]
    raw |= {"sliding_window_pattern": raw.pop("_sliding_window_pattern", 2)}
    raw |= {"rope_theta": 1000.0, "rope_local_base_freq": 50.0}
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _, old, _ = load_checkpoint(tmp_path, jnp.float32)
    assert old == new


def test_old_key_names_give_the_same_configuration(transformers, tmp_path):
    reference = make_model(transformers, CASES[5])
    reference.save_pretrained(tmp_path)
    _, new, _ = load_checkpoint(tmp_path, jnp.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    raw["num_experts"] = raw.pop("num_local_experts")
    raw["torch_dtype"] = raw.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _, old, _ = load_checkpoint(tmp_path, jnp.float32)
    assert old == new


# Prompts whose greedy continuation by SmolLM2-135M-Instruct has no near-tie in 32 steps.
PROMPTS = [
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "A, B, C, D, E, F, G,",
    "The opposite of hot is",
    "The months of the year are January, February,",
    "Photosynthesis is the process by which",
]
NUM_STEPS = 32
SMALLEST_GAP = (
    0.05  # between the two largest logits: far above what f32 sums in another order alter
)


@pytest.fixture(scope="module")
def smollm(transformers):
    """(model, tokenizer) of transformers from the GGUF file, dequantized to f32."""
    path = default_checkpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations within transformers
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model.float().eval(), tokenizer


def hf_greedy(model, tokens):
    """(new ids, smallest gap between the two largest logits)."""
    import torch

    cache, fed, new, gaps = None, list(tokens), [], []
    for _ in range(NUM_STEPS):
        result = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        top = result.logits[0, -1].topk(2)
        gaps.append(float(top.values[0] - top.values[1]))
        fed = [int(top.indices[0])]
        new += fed
    return new, min(gaps)


def test_greedy_ids_of_smollm2_match_transformers(smollm):
    reference, hf_tokenizer = smollm
    model, _, tokenizer = load_checkpoint(None, jnp.float32)
    prompts = dict(enumerate(tokenizer.encode(prompt) for prompt in PROMPTS))
    stepper = Stepper(model, max_seqs=len(PROMPTS), pages_per_seq=5, page_size=16)
    new = {row: [] for row in prompts}
    fed = prompts
    for _ in range(NUM_STEPS):
        fed = {row: [int(logits[-1].argmax())] for row, logits in stepper.step(fed).items()}
        for row, token in fed.items():
            new[row] += token
    for row, text in enumerate(PROMPTS):
        assert prompts[row] == hf_tokenizer(text).input_ids
        expected, gap = hf_greedy(reference, prompts[row])
        assert gap > SMALLEST_GAP, text
        assert new[row] == expected, text
        assert tokenizer.decode(new[row]) == hf_tokenizer.decode(expected, skip_special_tokens=True)


def test_the_smollm2_tokenizer_and_template_match_transformers(smollm):
    _, hf_tokenizer = smollm
    _, _, tokenizer = load_checkpoint(None, jnp.float32)
    for text in (
        "Hello, world!  Two spaces,\n\na tab\tand 2026.",
        "naïve café – “quotes” 日本語 🙂🙂 don't I'LL",
        "<|im_start|>user\nspecials<|im_end|> within text",
        "",
    ):
        assert tokenizer.encode(text) == hf_tokenizer(text).input_ids, text
    messages = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Yes?"}]
    expected = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.apply_chat(messages) == list(expected["input_ids"])


@pytest.mark.parametrize("length", [32, 64, 65, 400])
def test_length_dependent_rope_tables_match_transformers(transformers, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short, long = np.linspace(1, 1.5, 16).tolist(), np.linspace(1, 12, 16).tolist()
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}

    def theirs(context, **options):
        rope = {"rope_theta": 1e4, "factor": 4.0, "rope_type": "longrope"} | options
        config = transformers.LlamaConfig(
            **(sizes | {"max_position_embeddings": context}), rope_parameters=rope
        )
        tables, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=length)
        return tables.numpy(), scale

    tables, scale = theirs(64, rope_type="dynamic")
    ours = rope.dynamic_frequencies(32, 1e4, factor=4.0, original_context=64, length=length)
    np.testing.assert_allclose(ours, tables, rtol=1e-5)
    assert scale == 1.0
    tables, scale = theirs(
        256, short_factor=short, long_factor=long, original_max_position_embeddings=64
    )
    ours = rope.longrope_frequencies(
        rope.inverse_frequencies(32, 1e4),
        short_factor=short, long_factor=long, original_context=64, length=length,
    )  # fmt: skip
    np.testing.assert_allclose(ours, tables, rtol=1e-5)
    assert rope.longrope_attention_factor(4.0, 64) == pytest.approx(scale)


def test_the_model_benchmark_runs_beside_transformers(transformers, tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "bench_model.py"
    target = tmp_path / "model.json"
    command = [sys.executable, script, "--dry", "--save", target]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(target.read_text())["rows"]
    assert rows
    assert all("transformers" in row["ratio"] for row in rows)
