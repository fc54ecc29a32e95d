# SPDX-License-Identifier: Apache-2.0
"""What a config.json may not say is refused, by the name of the key."""

import pytest

from jax_paged.models.checkpoint.hf_config import config_from_hf
from jax_paged.models.decoder.config import RopeConfig
from jax_paged.models.testing import small_hf_config

SLIDES = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"flux_capacitor": 1.21}, "key 'flux_capacitor' = 1.21 is not known"),
        ("llama", {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ("llama", {"architectures": ["Qwen3ForCausalLM"]}, "model_type says 'llama'"),
        ("mamba", {}, "model_type 'mamba' is not supported; supported: qwen3_moe"),
        ("llama", {"hidden_act": "gelu"}, "key 'hidden_act' must be 'silu', got 'gelu'"),
        ("llama", {"use_sliding_window": True}, "key 'use_sliding_window' must be None, got True"),
        ("llama", {"sliding_window": 4096}, "key 'sliding_window' must be None, got 4096"),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "key 'layer_types' must hold 'full_attention' here, got 'sliding_attention'",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "key 'layer_types' must hold 'full_attention' here, got 'sliding_attention'",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]} | SLIDES,
            "must hold 'full_attention' or 'sliding_attention' here, got 'chunked_attention'",
        ),
        (
            "qwen3_moe",
            {"layer_types": ["full_attention", "sliding_attention"]} | SLIDES,
            "key 'layer_types' must hold 'sliding_attention' here, got 'full_attention'",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention"]},
            "key 'layer_types' must have num_hidden_layers=2 entries, got 1",
        ),
        (
            "qwen3",
            {"use_sliding_window": 1},
            "key 'use_sliding_window' must be true or false, got 1",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 0},
            "key 'sliding_window' must be an integer from 1 to 2147483647, got 0",
        ),
        (
            "qwen3",
            {"max_window_layers": "all"} | SLIDES,
            "key 'max_window_layers' must be an integer from 0 to 2147483647, got 'all'",
        ),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quant_method' must be 'fp8', got None"),
        ("qwen3", {"mlp_bias": True}, "key 'mlp_bias' must be False or None, got True"),
        ("llama", {"pretraining_tp": 2}, "key 'pretraining_tp' must be 1 or None, got 2"),
        ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' must be 1"),
        ("llama", {"num_local_experts": 8}, "key 'num_local_experts' must be 0 or None, got 8"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope"}},
            "needs a list for 'short_factor', got No",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "needs a number for 'factor', got None"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}},
            "rope key 'beta_fast' = 1 is not known for rope_type 'linear'",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "llama3", "factor": 2}},
            "rope_type 'llama3' needs a number for 'low_freq_factor', got None",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 10000.0, but 5.0"),
        ("llama", {"hidden_size": None}, "key 'hidden_size' is missing"),
        (
            "llama",
            {"hidden_size": "32"},
            "key 'hidden_size' must be an integer from 1 to 2147483647, got '32'",
        ),
        ("llama", {"num_attention_heads": 3}, "num_attention_heads must be a multiple of"),
        (
            "llama",
            {"num_attention_heads": 0},
            "'num_attention_heads' must be an integer from 1 to 2147483647, got 0",
        ),
        ("llama", {"num_key_value_heads": "2"}, "'num_key_value_heads' must be an integer from 1"),
        ("qwen3", {"num_key_value_heads": None}, "key 'num_key_value_heads' is missing"),
        (
            "llama",
            {"rms_norm_eps": "tiny"},
            "'rms_norm_eps' must be a number from 1e-30 to 1, got 'tiny'",
        ),
        (
            "llama",
            {"rope_theta": "1e6"},
            "key 'rope_theta' must be a number from 2 to 1e+15, got '1e6'",
        ),
        ("llama", {"rope_scaling": 2.0}, "key 'rope_scaling' must be an object, got 2.0"),
        ("llama", {"tie_word_embeddings": "false"}, "must be true or false, got 'false'"),
        (
            "qwen3_moe",
            {"mlp_only_layers": 1},
            "key 'mlp_only_layers' must be a list, each entry an integer",
        ),
        ("llama", {"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
        (
            "llama",
            {"num_hidden_layers": 0},
            "key 'num_hidden_layers' must be an integer from 1 to 65536, got 0",
        ),
        ("qwen3_moe", {"num_local_experts": 9}, "contradict each other"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "at most num_experts=6, got 7"),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 0},
            "'decoder_sparse_step' must be an integer from 1",
        ),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "must be 0 or None, got 64"),
        ("qwen2_moe", {}, "model_type 'qwen2_moe' is not supported; supported: qwen3_moe, qwen3"),
        ("qwen2", {"attention_bias": True}, "key 'attention_bias' must be False or None, got True"),
        ("qwen2", {"use_mrope": True}, "key 'use_mrope' must be False or None, got True"),
        ("mistral", {"sliding_window": 0}, "key 'sliding_window' must be an integer from 1"),
        (
            "mistral",
            {"use_sliding_window": False},
            "must be None for model_type 'mistral' with sliding_window = 7, got False",
        ),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "key 'layer_types' must hold 'sliding_attention' here, got 'full_attention'",
        ),
        ("mistral", {"num_key_value_heads": None}, "key 'num_key_value_heads' is missing"),
        ("phi3", {"auto_map": {"AutoConfig": "mine.Phi3Config"}}, "'auto_map' must be an object"),
        ("phi3", {"lm_head_bias": True}, "key 'lm_head_bias' must be False or None, got True"),
        ("phi3", {"full_attn_mod": 2}, "key 'full_attn_mod' must be 1 or None, got 2"),
        ("phi3", {"partial_rotary_factor": 0.05}, "must leave 2 of 16 dimensions, got 0.05"),
        ("phi3", {"partial_rotary_factor": 0.2}, "rotary_dim must be even, got 3"),
        ("phi3", {"partial_rotary_factor": 2}, "must be a number from 0.001 to 1, got 2"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.75, but 0.5 in the rope parameters",
        ),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "supported: default, longrope"),
        (
            "phi3",
            {
                "rope_scaling": {"type": "su", "short_factor": [1] * 6, "long_factor": [1] * 6},
                "original_max_position_embeddings": None,
            },
            "key 'original_max_position_embeddings' is missing",
        ),
        ("gemma3_text", {"hidden_activation": "gelu"}, "must be 'gelu_pytorch_tanh', got 'gelu'"),
        ("gemma3_text", {"hidden_act": "silu"}, "'hidden_act' must be 'gelu_pytorch_tanh', got"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "key 'use_bidirectional_attention' must be False or None, got True",
        ),
        (
            "gemma3_text",
            {"sliding_window": None},
            "'sliding_window' must be an integer from 1 to 2147483647 beside layers of 'sliding_",
        ),
        ("gemma3_text", {"_sliding_window_pattern": 6}, "contradict each other"),
        ("gemma3_text", {"use_sliding_window": False}, "for model_type 'gemma3_text' with sliding"),
        (
            "gemma3_text",
            {"final_logit_softcapping": 0},
            "key 'final_logit_softcapping' must be None",
        ),
        ("gemma3_text", {"query_pre_attn_scalar": "a"}, "'query_pre_attn_scalar' must be a number"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "'rope_parameters' must hold 'full_attention' or 'sliding_attention' for model_type",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}},
            "rope_theta is 100.0, but 5.0 in the rope parameters",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": 2}}, "'full_attention' must be an"),
        (
            "gemma3_text",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "must hold 'full_attention' or 'sliding_attention' here, got 'chunked_attention'",
        ),
        (
            "gemma3_text",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quant_method' must be 'fp8', got 'mxfp4'",
        ),
        ("gemma3", {}, "model_type 'gemma3' is not supported"),
        ("gpt_oss", {"rope_scaling": None}, "key 'rope_scaling' is missing for model_type 'gpt_os"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "key 'swiglu_alpha' must be 1.702, got 1.5"),
        ("gpt_oss", {"swiglu_limit": 0}, "key 'swiglu_limit' must be a number"),
        ("gpt_oss", {"experts_per_token": 3}, "contradict each other"),
        ("gpt_oss", {"num_local_experts": None}, "key 'num_local_experts' is missing"),
        ("gpt_oss", {"mlp_bias": True}, "key 'mlp_bias' must be False or None, got True"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            "quant_method' must be 'mxfp4', got 'fp8'",
        ),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "must be 'greedy' or 'group_limited_greedy'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "key 'scoring_func' must be 'softmax', got"),
        ("deepseek_v2", {"norm_topk_prob": True}, "key 'norm_topk_prob' must be False, got True"),
        ("deepseek_v2", {"num_nextn_predict_layers": 1}, "must be 0 or None, got 1"),
        ("deepseek_v2", {"attention_bias": True}, "'attention_bias' must be False or None, got"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "'num_key_value_heads' must be 4 for model"),
        ("deepseek_v2", {"head_dim": 24}, "key 'head_dim' must be 8 for model_type 'deepseek_v2'"),
        ("deepseek_v2", {"auto_map": {"AutoModel": "mine.Model"}}, "'auto_map' must be an object"),
        ("deepseek_v3", {"topk_method": "greedy"}, "key 'topk_method' must be 'noaux_tc', got"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "key 'scoring_func' must be 'sigmoid', got"),
        ("deepseek_v3", {"qk_head_dim": 8}, "key 'qk_head_dim' must be 24 for model_type"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
        ("deepseek_v3", {"kv_lora_rank": None}, "key 'kv_lora_rank' is missing"),
        ("deepseek_v3", {"n_group": 3}, "n_group must divide num_experts=8 and be at least"),
        ("deepseek_v3", {"topk_group": 5}, "be at least topk_group=5, got 4"),
        ("deepseek_v3", {"topk_group": 1}, "at most the 2 experts of 1 groups, got 3"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 3}, "groups must have 2 experts or more"),
        ("deepseek_v3", {"moe_layer_freq": 0}, "key 'moe_layer_freq' must be an integer from 1"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 0.7}},
            "'mscale' and 'mscale_all_dim' must be given both or not at all, got 0.7 and 0",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1] * 6, "long_factor": [1] * 8}},
            "key 'long_factor' must have 6 entries, one per frequency, got 8",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model_type, changes, message):
    with pytest.raises(ValueError, match=r"^config") as caught:
        config_from_hf(small_hf_config(model_type, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


NAN, INF = float("nan"), float("inf")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def scaled(base, **changes):
    return {"rope_scaling": base | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": NAN}, "key 'rope_theta' must be a number from 2 to 1e+15, got nan"),
        ({"rope_theta": INF}, "key 'rope_theta' must be a number from 2 to 1e+15, got inf"),
        ({"rope_theta": 10**400}, "key 'rope_theta' must be a number from 2 to 1e+15, got an int"),
        ({"rope_theta": 0}, "key 'rope_theta' must be a number"),
        ({"rope_theta": True}, "key 'rope_theta' must be a number"),
        ({"rms_norm_eps": NAN}, "key 'rms_norm_eps' must be a number from 1e-30 to 1, got nan"),
        ({"rms_norm_eps": INF}, "key 'rms_norm_eps' must be a number from 1e-30 to 1, got inf"),
        (scaled(LLAMA3, high_freq_factor=1.0), "high_freq_factor must be above low_freq_factor"),
        (scaled(LLAMA3, low_freq_factor=NAN), "key 'low_freq_factor' must be a number"),
        (scaled(LLAMA3, factor=INF), "key 'factor' must be a number"),
        (
            scaled(LLAMA3, original_max_position_embeddings=0),
            "key 'original_max_position_embeddings' must be an integer from 1",
        ),
        (scaled(YARN, original_max_position_embeddings=0.5), "'original_max_position_embeddings'"),
        (scaled(YARN, beta_fast=1.0), "beta_fast must be above beta_slow=1.0, got 1.0"),
        (scaled(YARN, mscale=NAN), "key 'mscale' must be a number from 0 to 1000, got nan"),
        (scaled(YARN, truncate="no"), "key 'truncate' must be true or false, got 'no'"),
        (scaled(YARN, rope_type=["yarn"]), "key 'rope_type' must be a text, got ['yarn']"),
        ({"eos_token_id": [1.5, "a"]}, "key 'eos_token_id' must be an integer from 0 to"),
        ({"eos_token_id": True}, "key 'eos_token_id' must be an integer"),
        ({"eos_token_id": -1}, "key 'eos_token_id' must be an integer"),
        ({"bos_token_id": "a"}, "key 'bos_token_id' must be"),
        ({"num_hidden_layers": 3000000}, "must be an integer from 1 to 65536, got 3000000"),
        ({"head_dim": 2**40}, "key 'head_dim' must be an integer from 1 to 65536"),
        ({"num_attention_heads": 2**40}, "key 'num_attention_heads' must be an integer"),
        ({"max_position_embeddings": INF}, "key 'max_position_embeddings' must be an integer"),
        ({"architectures": [["a"]]}, "key 'architectures' must be a list, each entry a text"),
        ({"rope_scaling": {"type": {}}}, "key 'type' must be a text, got {}"),
        ({"layer_types": [0, 0]}, "key 'layer_types' must be a list, each entry a text"),
        ({"x" * 5000: "y" * 10**6}, "of length 5000 = 'yyyyy"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=r"^config") as caught:
        config_from_hf(small_hf_config("llama", **changes))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_model_type_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match=r"key 'model_type' must be a text, got \['llama'\]"):
        config_from_hf(small_hf_config("llama") | {"model_type": ["llama"]})


def test_the_end_tokens_of_the_generation_config_are_checked_too():
    text = (
        r"^here/generation_config.json: key 'eos_token_id' must be an integer .*, got \[1.5, 'a'\]"
    )
    with pytest.raises(ValueError, match=text):
        config_from_hf(small_hf_config(), {"eos_token_id": [1.5, "a"]}, where="here/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theta": NAN}, "theta must be a number"),
        ({"kind": "llama3"}, "original_context must be positive"),
        ({"frequency_divisors": (1.0, 0.0)}, "frequency_divisors must be None or a list"),
    ],
)
def test_a_rope_configuration_checks_itself(changes, message):
    with pytest.raises(ValueError, match=f"^config: {message}"):
        RopeConfig(**changes)
