# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json that are honoured or harmless; test_config_refused.py has the others."""

import dataclasses

import numpy as np
import pytest

from jax_paged.models.checkpoint.hf_config import config_from_hf
from jax_paged.models.checkpoint.hf_keys import FAMILIES, HARMLESS, HONOURED, NEUTRAL
from jax_paged.models.decoder.config import LatentConfig, RopeConfig
from jax_paged.models.testing import small_config, small_hf_config

SLIDES = {"use_sliding_window": True, "sliding_window": 64}

# The keys of released checkpoints, as their config.json has them.
RELEASED = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Phi-3-mini-4k": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu",
        "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True,
        "vocab_size": 200064,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
        "use_cache": True, "vocab_size": 201088,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV2Config",
            "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
        "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
        "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
        "v_head_dim": 128, "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
        "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip


def test_released_qwen3_moe_is_read():
    config = config_from_hf(RELEASED["Qwen3-30B-A3B"])
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (48, 32, 4)
    assert (config.num_experts, config.experts_per_token) == (128, 8)
    assert config.norm_topk_prob
    assert config.qk_norm
    assert all(config.moe_layers)
    assert config.rope == RopeConfig(theta=1e6)
    assert config.eos_token_ids == (151645,)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.2-1B", "SmolLM2-135M"])
def test_released_dense_configurations_are_read(name):
    raw = RELEASED[name]
    config = config_from_hf(raw)
    assert config.tie_embeddings
    assert config.qk_norm == (name == "Qwen3-0.6B")
    assert not any(config.moe_layers)
    assert config.head_dim == raw.get("head_dim", 64)
    assert config.rope.kind == ("llama3" if name == "Llama-3.2-1B" else "default")


def test_released_configurations_of_newer_families_are_read():
    qwen2, mistral, phi3, phi4 = map(
        config_from_hf,
        (
            RELEASED[name]
            for name in ("Qwen2.5-7B", "Mistral-7B-v0.1", "Phi-3-mini-4k", "Phi-4-mini")
        ),
    )
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    assert qwen2.layer_windows == ()
    assert mistral.layer_windows == (4096,) * 32
    assert phi3.layer_windows == (2047,) * 32
    assert (phi3.fused_projections, phi3.rope) == (True, RopeConfig())
    assert (phi4.head_dim, phi4.rope.rotary_dim, phi4.context_length) == (128, 96, 4096)
    assert phi4.layer_windows == ()
    assert phi4.rope.frequency_divisors == (1.0,) * 48
    assert phi4.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)  # log 32 / log 4096


@pytest.mark.parametrize(("context_length", "is_long"), [(4096, False), (4097, True)])
@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])  # as Phi-3 called it, too
def test_longrope_takes_the_factors_of_the_wanted_context(context_length, is_long, kind):
    raw = RELEASED["Phi-4-mini"]
    raw = raw | {"rope_scaling": raw["rope_scaling"] | {"type": kind}}
    config = config_from_hf(raw, context_length=context_length)
    assert config.context_length == context_length
    divisors = raw["rope_scaling"]["long_factor" if is_long else "short_factor"]
    assert config.rope.frequency_divisors == tuple(divisors)
    plain = dataclasses.replace(config.rope, frequency_divisors=None).frequencies(128)
    assert plain.shape == (48,)
    np.testing.assert_allclose(config.rope.frequencies(128), plain / divisors, rtol=1e-6)


def test_released_gemma_3_is_read():
    config = config_from_hf(RELEASED["gemma-3-1b"])
    assert config.layer_windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert (config.rope, config.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert [config.rope_of(layer).theta for layer in (4, 5, 6)] == [1e4, 1e6, 1e4]
    assert (config.attention_scale, config.embedding_scale) == (1 / 16, 1152**0.5)
    assert (config.qk_norm, config.post_norms, config.tie_embeddings) == (True, True, True)
    assert (config.activation, config.norm_offset, config.wide_norms) == ("gelu_tanh", 1, True)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)


def test_released_gpt_oss_is_read():
    config = config_from_hf(RELEASED["gpt-oss-20b"])
    assert config.layer_windows == (128, 0) * 12
    assert (config.rope.kind, config.rope.theta, config.rope.truncate) == ("yarn", 150000, False)
    assert config.local_rope is None
    assert (config.sinks, config.router_bias, config.expert_bias) == (True, True, True)
    assert (config.qkv_bias, config.out_bias, config.mxfp4_experts) == (True, True, True)
    assert (config.activation, config.activation_limit) == ("swiglu_oai", 7.0)
    assert (config.num_experts, config.experts_per_token, config.norm_topk_prob) == (32, 4, True)
    assert config.moe_intermediate_size == 2880


def test_released_deepseek_is_read():
    lite, v3 = (config_from_hf(RELEASED[name]) for name in ("DeepSeek-V2-Lite", "DeepSeek-V3"))
    assert lite.latent == LatentConfig(512, None, 128, 64, 128)
    assert v3.latent == LatentConfig(512, 1536, 128, 64, 128)
    assert (lite.moe_layers, sum(v3.moe_layers)) == ((False, *[True] * 26), 58)
    assert (lite.shared_intermediate_size, v3.shared_intermediate_size) == (2816, 2048)
    assert (lite.expert_groups, lite.router_scores, lite.choice_bias) == (1, "softmax", False)
    assert (v3.expert_groups, v3.groups_per_token, v3.expert_scale) == (8, 4, 2.5)
    assert (v3.router_scores, v3.choice_bias, v3.norm_topk_prob) == ("sigmoid", True, True)
    assert (v3.nextn_layers, v3.fp8_blocks, v3.head_dim) == (1, True, 192)
    assert (v3.rope.kind, v3.rope.rotary_dim, v3.rope.attention_factor) == ("yarn", 64, 1.0)
    sharper = 0.1 * np.log(40) + 1
    assert v3.attention_scale == pytest.approx(192**-0.5 * sharper**2)
    sharper = 0.1 * 0.707 * np.log(40) + 1
    assert lite.attention_scale == pytest.approx(192**-0.5 * sharper**2)


def test_layers_of_deepseek_with_experts_are_those_of_its_own_code():
    config = small_config("deepseek_v3", num_hidden_layers=7, moe_layer_freq=2)
    assert config.moe_layers == (False, False, True, False, True, False, True)


def test_gemma_3_has_its_rope_under_new_keys_too():
    old = small_config("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    raw = small_hf_config("gemma3_text")
    del raw["rope_theta"], raw["rope_local_base_freq"]
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    rope = {"full_attention": full, "sliding_attention": {"rope_theta": 100.0}}
    assert config_from_hf(raw | {"rope_parameters": rope}) == old
    assert old.local_rope == RopeConfig(theta=100.0)
    assert config_from_hf(raw).rope_of(1).theta == 1e6
    assert config_from_hf(raw).rope_of(0).theta == 1e4


def test_a_context_may_be_shorter_than_the_model_s_but_not_longer():
    raw = small_hf_config("llama", max_position_embeddings=64)
    assert config_from_hf(raw).context_length == 64
    assert config_from_hf(raw, context_length=5).context_length == 5
    for wrong, text in ((65, "at most the 64 tokens of the model, got 65"), (0, "at least 1, got")):
        with pytest.raises(ValueError, match=f"context_length: expected .*{text}"):
            config_from_hf(raw, context_length=wrong)


def test_no_key_stands_in_two_tables():
    for model_type, family in FAMILIES.items():
        honoured = HONOURED.keys() | family.keys.keys()
        assert not honoured & set(HARMLESS), model_type
    assert not HONOURED.keys() & set(NEUTRAL)
    assert not set(HARMLESS) & set(NEUTRAL)


def test_old_and_new_key_names_mean_the_same():
    old = small_config(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    raw = small_hf_config()
    del raw["num_experts"], raw["rope_theta"]
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    assert config_from_hf(raw | {"num_local_experts": 6, "rope_parameters": rope}) == old


def test_generation_config_decides_the_end_tokens():
    raw = small_hf_config(eos_token_id=3)
    assert config_from_hf(raw, {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert config_from_hf(raw, {"temperature": 0.6}).eos_token_ids == (3,)
    assert config_from_hf(small_hf_config()).eos_token_ids == ()


def test_sparse_steps_and_dense_layers_choose_the_moe_layers():
    config = small_config(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.moe_layers == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("qwen3", {"max_window_layers": 2}, (0, 0, 64, 64)),
        ("qwen3", {"max_window_layers": 0}, (64,) * 4),
        ("qwen3", {"max_window_layers": 4}, ()),
        ("qwen3", {}, ()),  # 28 layers come before the first with a window
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, (0, 64) * 2),
        ("qwen3", {"max_window_layers": 0, "sliding_window": None}, ()),
        ("qwen3", {"max_window_layers": 0, "use_sliding_window": False}, ()),
        ("qwen3_moe", {"max_window_layers": 2}, (64,) * 4),  # which transformers does not read
        ("qwen3_moe", {"use_sliding_window": False}, ()),
        ("qwen2", {"max_window_layers": 2}, (0, 0, 64, 64)),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, (0, 64) * 2),
        ("mistral", {"use_sliding_window": None}, (64,) * 4),
        ("mistral", {"use_sliding_window": None, "sliding_window": None}, ()),
        ("phi3", {}, (64,) * 4),
        ("phi3", {"use_sliding_window": None, "sliding_window": None}, ()),
        ("phi3", {"max_position_embeddings": 65}, (64,) * 4),
        ("phi3", {"max_position_embeddings": 64}, ()),  # it hides nothing
        ("gemma3_text", {"use_sliding_window": None}, (64, 0, 64, 0)),
        ("gemma3_text", {"use_sliding_window": None, "sliding_window_pattern": 3}, (64, 64, 0, 64)),
        ("gemma3_text", {"use_sliding_window": None, "sliding_window_pattern": None}, (64,) * 4),
        ("gemma3_text", {"use_sliding_window": None, "sliding_window_pattern": 1}, ()),
        # It hides nothing, but such layers turn in another way.
        ("gemma3_text", {"use_sliding_window": None, "max_position_embeddings": 64}, (64, 0) * 2),
        ("gpt_oss", {"use_sliding_window": None}, (64, 0, 64, 0)),
        ("gpt_oss", {"use_sliding_window": None, "max_position_embeddings": 64}, ()),
        (
            "gpt_oss",
            {
                "use_sliding_window": None,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            (0, 0, 0, 64),
        ),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(model_type, changes, windows):
    config = small_config(model_type, **({"num_hidden_layers": 4} | SLIDES | changes))
    assert config.layer_windows == windows
    assert [config.window(layer) for layer in range(4)] == list(windows or (0,) * 4)


def test_a_window_that_is_not_given_has_the_published_size():
    config = small_config("qwen3_moe", use_sliding_window=True, max_position_embeddings=8192)
    assert config.layer_windows == (4096, 4096)
    for model_type, windows in (("mistral", (4096, 4096)), ("phi3", ())):
        raw = small_hf_config(model_type, max_position_embeddings=8192)
        raw.pop("sliding_window", None)
        assert config_from_hf(raw).layer_windows == windows


@pytest.mark.parametrize("windows", [(4,), (4, -1)])
def test_a_configuration_checks_its_windows(windows):
    with pytest.raises(ValueError, match=r"^config: layer_windows must "):
        dataclasses.replace(small_config(), layer_windows=windows)


def test_head_dim_defaults_as_published():
    for model_type, expected in (("qwen3", 128), ("llama", 8), ("qwen3_moe", 8), ("phi3", 8)):
        raw = small_hf_config(model_type)
        del raw["head_dim"]
        assert config_from_hf(raw).head_dim == expected


def test_linear_scaling_divides_the_frequencies():
    plain = RopeConfig(theta=100.0).frequencies(8)
    np.testing.assert_allclose(plain, [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-6)
    linear = RopeConfig(theta=100.0, kind="linear", factor=4.0).frequencies(8)
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_long_context_scaling_keeps_fast_and_slows_slow_frequencies(kind):
    rope = RopeConfig(theta=1e4, kind=kind, factor=8.0, original_context=256)
    plain, scaled = (r.frequencies(64) for r in (RopeConfig(theta=1e4), rope))
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-6)
    ratio = plain / scaled
    assert np.all(np.diff(ratio) > -1e-5)
    assert np.any((ratio > 1.1) & (ratio < 7.9))


def test_frequency_divisors_divide_the_frequencies():
    divisors = (1.0, 2.0, 4.0, 8.0)
    plain = RopeConfig().frequencies(8)
    divided = RopeConfig(frequency_divisors=divisors).frequencies(8)
    np.testing.assert_allclose(divided, plain / divisors, rtol=1e-6)
