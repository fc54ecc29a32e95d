# SPDX-License-Identifier: Apache-2.0
"""The keys of the config.json of a Hugging Face checkpoint, and the model types that have them.

Every key, under its old or its new name, stands in one of the tables below: honoured, with the
values that it may have, harmless (it cannot alter a logit at inference; the reason is given), or
accepted with its neutral value only. A key in none of them is refused too: what we do not know
might matter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax_paged.checks import SCALE_BLOCK
from jax_paged.checks.fields import (
    ANYTHING,
    FLAG,
    NOTHING,
    OBJECT,
    TEXT,
    Domain,
    either,
    integer,
    list_of,
    number,
    one_of,
    short,
)
from jax_paged.ops.activations import SWIGLU_OAI_ALPHA

from ..decoder.config import CAP, DOMAINS, LATENT_DOMAINS, ROPE_DOMAINS, TOKEN_IDS

CONTEXT = integer(1, 2**40)
# Keys that the reader looks at, for every model type.
HONOURED: dict[str, Domain] = {
    "architectures": list_of(TEXT),
    "model_type": TEXT,
    "vocab_size": DOMAINS["vocab_size"],
    "hidden_size": DOMAINS["hidden_size"],
    "intermediate_size": DOMAINS["intermediate_size"],
    "num_hidden_layers": DOMAINS["num_layers"],
    "num_attention_heads": DOMAINS["num_q_heads"],
    "num_key_value_heads": DOMAINS["num_kv_heads"],
    "head_dim": DOMAINS["head_dim"],
    "max_position_embeddings": DOMAINS["context_length"],
    "rms_norm_eps": DOMAINS["rms_norm_eps"],
    "tie_word_embeddings": FLAG,
    "rope_theta": ROPE_DOMAINS["theta"],
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "quantization_config": OBJECT,
    "original_max_position_embeddings": CONTEXT,
    "use_sliding_window": FLAG,
    "sliding_window": ANYTHING,  # where it is used it is checked
    "max_window_layers": integer(0),
    "layer_types": list_of(TEXT),
    "bos_token_id": DOMAINS["bos_token_id"],
    "eos_token_id": TOKEN_IDS,
    "hidden_act": TEXT,
}

# Another one: experts of 4 bits with a scale for each 32 (OCP's MXFP4), which are widened.
MXFP4: dict[str, Domain] = {
    "quant_method": one_of("mxfp4"),
    "dequantize": ANYTHING,  # how transformers would load it
    "modules_to_not_convert": either(NOTHING, list_of(TEXT)),  # the tensors say so, too
}

# The code that released Phi-3 checkpoints name is that of transformers.
_PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}


# The quantization that is read: fp8 with a scale for each block of 128 x 128. Activations are not
# rounded to fp8 here, whatever the file says of them.
FP8_BLOCKS: dict[str, Domain] = {
    "quant_method": one_of("fp8"),
    "weight_block_size": one_of([SCALE_BLOCK, SCALE_BLOCK]),
    "fmt": one_of("e4m3", None),
    "activation_scheme": one_of("dynamic", None),
    "modules_to_not_convert": either(NOTHING, list_of(TEXT)),  # the tensors say so, too
}


def _is_phi3_code(value: Any) -> bool:
    return isinstance(value, dict) and all(
        str(value.get(key, code)).rpartition("--")[2] == code for key, code in _PHI3_CODE.items()
    )


_LATENT = {
    "kv_lora_rank": LATENT_DOMAINS["kv_rank"],
    "q_lora_rank": LATENT_DOMAINS["q_rank"],
    "qk_nope_head_dim": LATENT_DOMAINS["nope_dim"],
    "qk_rope_head_dim": LATENT_DOMAINS["rope_dim"],
    "v_head_dim": LATENT_DOMAINS["v_dim"],
    "qk_head_dim": integer(1),  # as transformers writes it: the sum of the two
    "n_routed_experts": DOMAINS["num_experts"],
    "num_experts_per_tok": DOMAINS["experts_per_token"],
    "n_shared_experts": integer(0),
    "moe_intermediate_size": DOMAINS["moe_intermediate_size"],
    "first_k_dense_replace": integer(0),
    "moe_layer_freq": integer(1),
    "n_group": DOMAINS["expert_groups"],
    "topk_group": DOMAINS["groups_per_token"],
    "routed_scaling_factor": DOMAINS["expert_scale"],
}


def _deepseek(version: str) -> Domain:
    """An auto_map that names the code which DeepSeek released; transformers has the same."""
    code = {
        "AutoConfig": f"configuration_deepseek.{version}Config",
        "AutoModel": f"modeling_deepseek.{version}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.{version}ForCausalLM",
    }

    def has(value: Any) -> bool:
        return isinstance(value, dict) and all(
            code.get(key) == str(name).rpartition("--")[2] for key, name in value.items()
        )

    return Domain(f"an object with entries of {code}", has)


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a model type apart.

    keys: honoured for this type only.
    windows: which layers have one. "none"; "all", if there is a `sliding_window`; "flagged", all if
      `use_sliding_window`; "chosen", if `use_sliding_window` those that `layer_types` or
      `max_window_layers` choose.
      "typed", those of `layer_types`, or else all but each `pattern`th.
    sliding_window: where the file has no such key.
    qkv_bias: whether q, k and v have one, whatever the file says.
    defaults: of other keys that the file may leave out, where they are not those of most types.
    rope_theta, local_rope_theta: where the file has none; the second one is of the layers that have
      a window. None: they turn as the others do.
    needs_rope: whether the file has to say how RoPE is scaled.
    activation_key, activation: which key names the activation, and what it must be.
    decoder: fields of `DecoderConfig` that all models of this type have.
    """

    architecture: str
    keys: Mapping[str, Domain]
    windows: Literal["none", "all", "flagged", "chosen", "typed"]
    sliding_window: int | None = 4096
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    fused_projections: bool = False
    pattern: int = 0
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    needs_rope: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    decoder: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "attention_bias": FLAG,
            "num_experts": DOMAINS["num_experts"],
            "num_local_experts": DOMAINS["num_experts"],
            "num_experts_per_tok": DOMAINS["experts_per_token"],
            "moe_intermediate_size": DOMAINS["moe_intermediate_size"],
            "norm_topk_prob": FLAG,
            "decoder_sparse_step": integer(1),
            "mlp_only_layers": list_of(integer(0)),
        },
        windows="flagged",
        qk_norm=True,
    ),
    "qwen3": Family("Qwen3ForCausalLM", {"attention_bias": FLAG}, windows="chosen", qk_norm=True),
    "qwen2": Family("Qwen2ForCausalLM", {}, windows="chosen", qkv_bias=True),
    "llama": Family("LlamaForCausalLM", {"attention_bias": FLAG, "mlp_bias": FLAG}, windows="none"),
    "mistral": Family("MistralForCausalLM", {}, windows="all"),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "partial_rotary_factor": number(1e-3, 1),
            "auto_map": Domain(f"an object with {_PHI3_CODE}", _is_phi3_code),
        },
        windows="all",
        sliding_window=None,
        rms_norm_eps=1e-5,
        fused_projections=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "attention_bias": FLAG,
            "hidden_activation": TEXT,
            "query_pre_attn_scalar": number(1e-3, 1e6),
            "attn_logit_softcapping": CAP,
            "final_logit_softcapping": CAP,
            "rope_local_base_freq": ROPE_DOMAINS["theta"],
            "sliding_window_pattern": integer(1),
            "_sliding_window_pattern": integer(1),  # as transformers writes it
        },
        windows="typed",
        pattern=6,
        qk_norm=True,
        defaults={"head_dim": 256, "tie_word_embeddings": True},
        rope_theta=1e6,
        local_rope_theta=1e4,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        decoder={
            "activation": "gelu_tanh", "norm_offset": 1, "wide_norms": True, "post_norms": True,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "attention_bias": FLAG,
            "num_experts": DOMAINS["num_experts"],
            "num_local_experts": DOMAINS["num_experts"],
            "num_experts_per_tok": DOMAINS["experts_per_token"],
            "experts_per_token": DOMAINS["experts_per_token"],
            "swiglu_limit": number(1e-3, 1e6),
            "swiglu_alpha": one_of(SWIGLU_OAI_ALPHA),
        },
        windows="typed",
        pattern=2,
        sliding_window=128,
        rms_norm_eps=1e-5,
        defaults={"head_dim": 64, "attention_bias": True},
        rope_theta=150000.0,
        needs_rope=True,
        decoder={
            "activation": "swiglu_oai", "wide_norms": True, "sinks": True, "router_bias": True,
            "expert_bias": True, "norm_topk_prob": True,
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            **_LATENT,
            "topk_method": one_of("greedy", "group_limited_greedy"),
            "scoring_func": one_of("softmax"),
            "norm_topk_prob": one_of(False),  # transformers and DeepSeek's code differ with it
            "auto_map": _deepseek("DeepseekV2"),
        },
        windows="none",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "topk_method": one_of("noaux_tc"),
            "scoring_func": one_of("sigmoid"),
            "norm_topk_prob": FLAG,
            "num_nextn_predict_layers": DOMAINS["nextn_layers"],
            "rope_interleave": FLAG,
            "auto_map": _deepseek("DeepseekV3"),
        },
        windows="none",
        decoder={"router_scores": "sigmoid", "choice_bias": True},
    ),
}  # fmt: skip

# Keys that cannot alter a logit at inference, with the reason.
HARMLESS = {
    **dict.fromkeys(
        ["_name_or_path", "transformers_version", "tokenizer_class", "is_llama_config",
         "transformers.js_config", "unsloth_fixed", "unsloth_version", "_commit_hash"],
        "says where the checkpoint comes from or which tool may read it",
    ),
    **dict.fromkeys(
        ["dtype", "torch_dtype", "use_bfloat16"],
        "the caller chooses the dtype; tensors carry their own",
    ),
    **dict.fromkeys(
        ["initializer_range", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
         "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "classifier_dropout",
         "problem_type", "id2label", "label2id"],
        "training or classification only",
    ),
    **dict.fromkeys(
        ["use_cache", "output_router_logits", "output_attentions", "output_hidden_states",
         "return_dict", "torchscript", "_attn_implementation", "_attn_implementation_autoset",
         "_experts_implementation", "cache_implementation"],
        "what a forward pass of transformers returns or runs on",
    ),
    "initial_context_length": "what rope_scaling says, too, as original_max_position_embeddings",
    "ep_size": "over how many devices experts lie",
    "chunk_size_feed_forward": "cuts the work, not the result",
    "pad_token_id": "rows are ragged here: nothing is padded with a token",
    **dict.fromkeys(
        ["do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "max_length",
         "min_length", "max_new_tokens"],
        "sampling is chosen by the caller",
    ),
}  # fmt: skip

# Keys that would alter logits in ways that are not built: accepted with these values only.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "auto_map": (None, {}),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "lm_head_bias": (False, None),
    "qkv_bias": (False, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "num_experts_per_tok": (0, None),
    "moe_intermediate_size": (0, None),
    "norm_topk_prob": (False, None),
    "decoder_sparse_step": (None,),
    "mlp_only_layers": ([], None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "num_nextn_predict_layers": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (1, 1.0, None),
    "full_attn_mod": (1, None),
    "interpolate_factor": (1, None),
    "prefix": (None,),
    "task_specific_params": (None,),
}


def check_known(raw: Mapping[str, Any], model_type: str, where: str) -> None:
    """Raises a ValueError that names the first key that is not known, or not neutral."""
    honoured = HONOURED | {**FAMILIES[model_type].keys}
    for key, value in raw.items():
        if key in honoured or key in HARMLESS:
            continue
        if key not in NEUTRAL:
            raise ValueError(
                f"{where}: key {short(key)} = {short(value)} is not known for model_type "
                f"{model_type!r}; it might alter the logits, so it is not ignored"
            )
        if value not in NEUTRAL[key]:
            neutral = " or ".join(repr(v) for v in NEUTRAL[key])
            raise ValueError(f"{where}: key {key!r} must be {neutral}, got {short(value)}")
