# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of a Hugging Face checkpoint: qwen3_moe, qwen3 and llama.

Every key, under its old or its new name, stands in one of the tables below: honoured, with the
values that it may have, harmless (it cannot alter a logit at inference; the reason is given), or
accepted with its neutral value only. A key in none of them is refused too: what we do not know
might matter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_paged.checks.fields import (
    ANYTHING,
    FLAG,
    OBJECT,
    TEXT,
    Domain,
    integer,
    list_of,
    number,
    short,
)
from jax_paged.ops import rope

from ..decoder.config import (
    DOMAINS,
    ROPE_DOMAINS,
    ROPE_KINDS,
    TOKEN_IDS,
    DecoderConfig,
    RopeConfig,
    token_ids,
)
from .outside import check_keys, reading

ARCHITECTURES = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}

_CONTEXT = integer(1, 2**40)
# Keys that `config_from_hf` reads, for every model type.
_HONOURED: dict[str, Domain] = {
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
    "attention_bias": FLAG,
    "rope_theta": ROPE_DOMAINS["theta"],
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "original_max_position_embeddings": _CONTEXT,
    "use_sliding_window": FLAG,
    "sliding_window": ANYTHING,  # where it is used it is checked
    "max_window_layers": integer(0),
    "layer_types": list_of(TEXT),
    "bos_token_id": DOMAINS["bos_token_id"],
    "eos_token_id": TOKEN_IDS,
    "hidden_act": TEXT,
}
_HONOURED_BY_TYPE: dict[str, dict[str, Domain]] = {
    "qwen3_moe": {
        "num_experts": DOMAINS["num_experts"],
        "num_local_experts": DOMAINS["num_experts"],
        "num_experts_per_tok": DOMAINS["experts_per_token"],
        "moe_intermediate_size": DOMAINS["moe_intermediate_size"],
        "norm_topk_prob": FLAG,
        "decoder_sparse_step": integer(1),
        "mlp_only_layers": list_of(integer(0)),
    },
    "qwen3": {},
    "llama": {"mlp_bias": FLAG},
}

# Keys that cannot alter a logit at inference, with the reason.
_HARMLESS = {
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
        ["initializer_range", "router_aux_loss_coef", "attention_dropout", "hidden_dropout",
         "classifier_dropout", "problem_type", "id2label", "label2id"],
        "training or classification only",
    ),
    **dict.fromkeys(
        ["use_cache", "output_router_logits", "output_attentions", "output_hidden_states",
         "return_dict", "torchscript", "_attn_implementation", "_attn_implementation_autoset",
         "_experts_implementation"],
        "what a forward pass of transformers returns or runs on",
    ),
    "chunk_size_feed_forward": "cuts the work, not the result",
    "pad_token_id": "rows are ragged here: nothing is padded with a token",
    **dict.fromkeys(
        ["do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "max_length",
         "min_length", "max_new_tokens"],
        "sampling is chosen by the caller",
    ),
}  # fmt: skip

# Keys that would alter logits in ways that are not built: accepted with these values only.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "mlp_bias": (False, None),
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
    "prefix": (None,),
    "task_specific_params": (None,),
}

_ROPE_KEYS: dict[str, dict[str, Domain]] = {
    "default": {},
    "linear": {"factor": ROPE_DOMAINS["factor"]},
    "llama3": {
        "factor": ROPE_DOMAINS["factor"],
        "low_freq_factor": ROPE_DOMAINS["low_freq_factor"],
        "high_freq_factor": ROPE_DOMAINS["high_freq_factor"],
        "original_max_position_embeddings": _CONTEXT,
    },
    "yarn": {
        "factor": ROPE_DOMAINS["factor"],
        "original_max_position_embeddings": _CONTEXT,
        "attention_factor": ROPE_DOMAINS["attention_factor"],
        "beta_fast": number(0, 1e6),  # 0 = not given, as in transformers
        "beta_slow": number(0, 1e6),
        "mscale": number(0, 1e3),
        "mscale_all_dim": number(0, 1e3),
        "truncate": FLAG,
    },
}


def _model_type(raw: Mapping[str, Any], where: str) -> str:
    supported = ", ".join(ARCHITECTURES)
    names = raw.get("architectures") or []
    for name in names:
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{where}: architecture {short(name)} is not supported; supported: {supported}"
            )
    model_type = raw.get("model_type") or (ARCHITECTURES[names[0]] if names else None)
    if model_type not in _HONOURED_BY_TYPE:
        raise ValueError(
            f"{where}: model_type {short(model_type)} is not supported; supported: "
            f"{', '.join(_HONOURED_BY_TYPE)} ({supported})"
        )
    for name in names:
        if ARCHITECTURES[name] != model_type:
            raise ValueError(
                f"{where}: architectures says {name!r}, but model_type says {model_type!r}"
            )
    return model_type


def _check_known(raw: Mapping[str, Any], model_type: str, where: str) -> None:
    honoured = _HONOURED | _HONOURED_BY_TYPE[model_type]
    for key, value in raw.items():
        if key in honoured or key in _HARMLESS:
            continue
        if key not in _NEUTRAL:
            raise ValueError(
                f"{where}: key {short(key)} = {short(value)} is not known for model_type "
                f"{model_type!r}; it might alter the logits, so it is not ignored"
            )
        if value not in _NEUTRAL[key]:
            neutral = " or ".join(repr(v) for v in _NEUTRAL[key])
            raise ValueError(f"{where}: key {key!r} must be {neutral}, got {short(value)}")


def _layer_windows(
    raw: Mapping[str, Any], model_type: str, num_layers: int, where: str
) -> tuple[int, ...]:
    """The window of each layer as transformers has it, 0 = none; () where no layer has one."""
    if model_type == "llama":
        for key in ("sliding_window", "use_sliding_window"):
            if raw.get(key) not in (None, False):
                raise ValueError(f"{where}: key {key!r} must be None, got {short(raw[key])}")
    # Qwen writes a window beside use_sliding_window = false, the default: then nobody applies it.
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    if window is not None:
        check_keys(where, {"sliding_window": window}, {"sliding_window": integer(1)})
    first = 0
    if model_type == "qwen3" and (first := raw.get("max_window_layers")) is None:
        first = 28
    slides = [window is not None and i >= first for i in range(num_layers)]
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    given = raw.get("layer_types") or kinds
    if len(given) != num_layers:
        raise ValueError(
            f"{where}: key 'layer_types' must have num_hidden_layers={num_layers} entries, got "
            f"{len(given)}"
        )
    # Only qwen3 goes by layer_types; for others they must say what is done anyway.
    both = {"full_attention", "sliding_attention"}
    for kind, usual in zip(given, kinds, strict=True):
        allowed = both if model_type == "qwen3" and window is not None else {usual}
        if kind not in allowed:
            names = " or ".join(map(repr, sorted(allowed)))
            raise ValueError(
                f"{where}: key 'layer_types' must hold {names} here, got {short(kind)}"
            )
    windows = tuple((window or 0) * (kind == "sliding_attention") for kind in given)
    return windows if any(windows) else ()


def _rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(
            f"{where}: 'rope_parameters' = {short(new)} contradicts 'rope_scaling' = {short(old)}"
        )
    given = dict(new or old or {})
    check_keys(where, given, {"rope_type": TEXT, "type": TEXT})
    kind = given.pop("rope_type", None) or given.get("type") or "default"
    if given.pop("type", kind) != kind:
        raise ValueError(
            f"{where}: rope_type {short(kind)} contradicts type in {short(new or old)}"
        )
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"{where}: rope_type {short(kind)} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    inner, outer = given.pop("rope_theta", None), raw.get("rope_theta")
    check_keys(where, {"rope_theta": inner}, _HONOURED)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{where}: rope_theta is {outer!r}, but {inner!r} in the rope parameters")
    theta = float(next(v for v in (inner, outer, 10000.0) if v is not None))
    if (partial := given.pop("partial_rotary_factor", 1.0)) not in (1, None):
        raise ValueError(f"{where}: partial_rotary_factor must be 1, got {short(partial)}")
    outer_context = raw.get("original_max_position_embeddings")
    if outer_context is not None:
        if kind not in ("llama3", "yarn"):
            raise ValueError(
                f"{where}: key 'original_max_position_embeddings' = {outer_context!r} has no use "
                f"with rope_type {kind!r}"
            )
        given["original_max_position_embeddings"] = outer_context
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if key not in _ROPE_KEYS[kind]:
            raise ValueError(
                f"{where}: rope key {short(key)} = {short(value)} is not known for rope_type "
                f"{kind!r}"
            )
    check_keys(where, values, _ROPE_KEYS[kind])
    needed = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(kind, ("factor",)):
        if key not in values:
            raise ValueError(f"{where}: rope_type {kind!r} needs a number for {key!r}, got None")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = float(values["factor"])
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    context = values.get("original_max_position_embeddings", raw["max_position_embeddings"])
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_context=context,
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
        )
    default_attention = rope.yarn_attention_factor(
        factor, values.get("mscale"), values.get("mscale_all_dim")
    )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=context,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=values.get("truncate", True),
        attention_factor=float(values.get("attention_factor", default_attention)),
    )


def config_from_hf(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
) -> DecoderConfig:
    """Reads a Hugging Face configuration.

    Args:
      raw: the content of config.json. `num_experts` and `num_local_experts`, `rope_theta` with
        `rope_scaling` and `rope_parameters` are the same thing under old and new names.
      generation: the content of generation_config.json. Its eos_token_id wins over config.json's;
        its sampling options are not used: sampling is the caller's choice.
      where: what error messages call the file.

    Raises:
      ValueError: an architecture, key or value that is not supported, or a key that is missing.

    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    >>> config = config_from_hf(dict(sizes, model_type="llama", num_attention_heads=2,
    ...                              max_position_embeddings=64))
    >>> config.head_dim, config.num_kv_heads, config.rope.theta
    (8, 2, 10000.0)
    """
    beside = Path(where).with_name("generation_config.json")
    check_keys(beside, generation or {}, {"eos_token_id": TOKEN_IDS})
    with reading(where):
        return _config(raw, generation or {}, where)


def _config(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> DecoderConfig:
    check_keys(where, raw, _HONOURED)
    model_type = _model_type(raw, where)
    check_keys(where, raw, _HONOURED_BY_TYPE[model_type])
    _check_known(raw, model_type, where)

    def need(*names: str) -> int:
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        if not values:
            raise ValueError(f"{where}: key {names[0]!r} is missing")
        if len(set(values.values())) > 1:
            raise ValueError(f"{where}: {values} contradict each other")
        return next(iter(values.values()))

    def optional(name: str, default: Any) -> Any:
        return default if raw.get(name) is None else raw[name]

    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{where}: key 'hidden_act' must be 'silu', got {short(act)}")
    num_layers, num_q_heads = need("num_hidden_layers"), need("num_attention_heads")
    hidden_size = need("hidden_size")
    need("max_position_embeddings")
    moe: dict[str, Any] = {"moe_layers": (False,) * num_layers}
    if model_type == "qwen3_moe":
        step = optional("decoder_sparse_step", 1)
        dense = set(optional("mlp_only_layers", ()))
        num_experts = need("num_experts", "num_local_experts")
        moe = {
            "num_experts": num_experts,
            "experts_per_token": need("num_experts_per_tok"),
            "moe_intermediate_size": need("moe_intermediate_size"),
            "norm_topk_prob": optional("norm_topk_prob", False),
            "moe_layers": tuple(
                num_experts > 0 and i not in dense and (i + 1) % step == 0
                for i in range(num_layers)
            ),
        }
    head_dim = 128 if model_type == "qwen3" else hidden_size // num_q_heads
    eos = generation.get("eos_token_id")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=need("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=need("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=(
            optional("num_key_value_heads", num_q_heads)
            if model_type == "llama"
            else need("num_key_value_heads")
        ),
        head_dim=optional("head_dim", head_dim),
        context_length=need("max_position_embeddings"),
        rms_norm_eps=float(optional("rms_norm_eps", 1e-6)),
        rope=_rope(raw, where),
        tie_embeddings=optional("tie_word_embeddings", False),
        qk_norm=model_type != "llama",
        attention_bias=optional("attention_bias", False),
        mlp_bias=optional("mlp_bias", False),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id") if eos is None else eos),
        layer_windows=_layer_windows(raw, model_type, num_layers, where),
        **moe,
    )
