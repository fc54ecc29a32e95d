"""Reads the config.json of a Hugging Face checkpoint: qwen3_moe, qwen3 and llama.

Every key, under its old or its new name, stands in one of the tables below: honoured, harmless (it
cannot alter a logit at inference; the reason is given), or accepted with its neutral value only. A
key in none of them is refused too: what we do not know might matter.
"""

from collections.abc import Mapping
from typing import Any

from jax_paged import rope

from .config import DecoderConfig, RopeConfig, token_ids

ARCHITECTURES = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
}

# Keys that `config_from_hf` reads, for every model type.
_HONOURED = frozenset(
    [
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "bos_token_id",
        "eos_token_id",
        "hidden_act",
    ]
)
_HONOURED_BY_TYPE = {
    "qwen3_moe": frozenset(
        ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
         "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"]
    ),
    "qwen3": frozenset(),
    "llama": frozenset(["mlp_bias"]),
}  # fmt: skip

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

_ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset(["factor"]),
    "llama3": frozenset(
        ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    ),
    "yarn": frozenset(
        ["factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
         "beta_slow", "mscale", "mscale_all_dim", "truncate"]
    ),
}  # fmt: skip


def _model_type(raw: Mapping[str, Any], where: str) -> str:
    supported = ", ".join(ARCHITECTURES)
    names = raw.get("architectures") or []
    for name in names:
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{where}: architecture {name!r} is not supported; supported: {supported}"
            )
    model_type = raw.get("model_type") or (ARCHITECTURES[names[0]] if names else None)
    if model_type not in _HONOURED_BY_TYPE:
        raise ValueError(
            f"{where}: model_type {model_type!r} is not supported; supported: "
            f"{', '.join(_HONOURED_BY_TYPE)} ({supported})"
        )
    for name in names:
        if ARCHITECTURES[name] != model_type:
            raise ValueError(
                f"{where}: architectures says {name!r}, but model_type says {model_type!r}"
            )
    return model_type


def _check_keys(raw: Mapping[str, Any], model_type: str, where: str) -> None:
    honoured = _HONOURED | _HONOURED_BY_TYPE[model_type]
    for key, value in raw.items():
        if key in honoured or key in _HARMLESS:
            continue
        if key not in _NEUTRAL:
            raise ValueError(
                f"{where}: key {key!r} = {value!r} is not known for model_type {model_type!r}; "
                "it might alter the logits, so it is not ignored"
            )
        if value not in _NEUTRAL[key]:
            neutral = " or ".join(repr(v) for v in _NEUTRAL[key])
            raise ValueError(f"{where}: key {key!r} must be {neutral}, got {value!r}")


_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob",
          "use_sliding_window")  # fmt: skip
_LISTS = ("architectures", "layer_types", "mlp_only_layers")


def _check_kinds(raw: Mapping[str, Any], where: str) -> None:
    for names, kind, what in ((_FLAGS, bool, "true or false"), (_LISTS, list, "a list")):
        for name in names:
            if raw.get(name) is not None and not isinstance(raw[name], kind):
                raise ValueError(f"{where}: key {name!r} must be {what}, got {raw[name]!r}")


def _layer_windows(
    raw: Mapping[str, Any], model_type: str, num_layers: int, where: str
) -> tuple[int, ...]:
    """The window of each layer as transformers has it, 0 = none; () where no layer has one."""
    if model_type == "llama":
        for key in ("sliding_window", "use_sliding_window"):
            if raw.get(key) not in (None, False):
                raise ValueError(f"{where}: key {key!r} must be None, got {raw[key]!r}")
    # Qwen writes a window beside use_sliding_window = false, the default: then nobody applies it.
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"{where}: key 'sliding_window' must be at least 1, got {window!r}")
    first = raw.get("max_window_layers", 28) if model_type == "qwen3" else 0
    if not isinstance(first, int):
        raise ValueError(f"{where}: key 'max_window_layers' must be an integer, got {first!r}")
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
            raise ValueError(f"{where}: key 'layer_types' must hold {names} here, got {kind!r}")
    windows = tuple((window or 0) * (kind == "sliding_attention") for kind in given)
    return windows if any(windows) else ()


def _rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    for given in (new, old):
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"{where}: rope parameters must be an object, got {given!r}")
    if new and old and new != old:
        raise ValueError(
            f"{where}: 'rope_parameters' = {new!r} contradicts 'rope_scaling' = {old!r}"
        )
    parameters = dict(new or old or {})
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    if parameters.pop("type", kind) != kind:
        raise ValueError(f"{where}: rope_type {kind!r} contradicts type in {new or old!r}")
    if kind not in _ROPE_KEYS:
        raise ValueError(
            f"{where}: rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_KEYS)}"
        )
    inner, outer = parameters.pop("rope_theta", None), raw.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{where}: rope_theta is {outer!r}, but {inner!r} in the rope parameters")
    theta = next(v for v in (inner, outer, 10000.0) if v is not None)
    if not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"{where}: rope_theta must be a positive number, got {theta!r}")
    theta = float(theta)
    if (partial := parameters.pop("partial_rotary_factor", 1.0)) not in (1, None):
        raise ValueError(f"{where}: partial_rotary_factor must be 1, got {partial!r}")
    outer_context = raw.get("original_max_position_embeddings")
    if outer_context is not None:
        if kind not in ("llama3", "yarn"):
            raise ValueError(
                f"{where}: key 'original_max_position_embeddings' = {outer_context!r} has no use "
                f"with rope_type {kind!r}"
            )
        parameters["original_max_position_embeddings"] = outer_context
    for key, value in parameters.items():
        if key not in _ROPE_KEYS[kind] and value is not None:
            raise ValueError(
                f"{where}: rope key {key!r} = {value!r} is not known for rope_type {kind!r}"
            )
    if kind == "default":
        return RopeConfig(theta=theta)

    def need(key: str) -> float:
        value = parameters.get(key)
        if not isinstance(value, int | float):
            raise ValueError(
                f"{where}: rope_type {kind!r} needs a number for {key!r}, got {value!r}"
            )
        return float(value)

    def number(key: str, default: float) -> float:
        return default if parameters.get(key) is None else need(key)

    factor = need("factor")
    if factor <= 0:
        raise ValueError(f"{where}: rope factor must be positive, got {factor}")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    context = int(number("original_max_position_embeddings", raw["max_position_embeddings"]))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_context=context,
            low_freq_factor=need("low_freq_factor"),
            high_freq_factor=need("high_freq_factor"),
        )
    default_attention = rope.yarn_attention_factor(
        factor, parameters.get("mscale"), parameters.get("mscale_all_dim")
    )
    truncate = parameters.get("truncate")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=context,
        beta_fast=number("beta_fast", 32.0) or 32.0,
        beta_slow=number("beta_slow", 1.0) or 1.0,
        truncate=True if truncate is None else bool(truncate),
        attention_factor=number("attention_factor", default_attention),
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
    _check_kinds(raw, where)
    model_type = _model_type(raw, where)
    _check_keys(raw, model_type, where)

    def need(*names: str) -> int:
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        if not values:
            raise ValueError(f"{where}: key {names[0]!r} is missing")
        if len(set(values.values())) > 1:
            raise ValueError(f"{where}: {values} contradict each other")
        name, value = next(iter(values.items()))
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{where}: key {name!r} must be an integer, got {value!r}")
        return value

    def optional(name: str, default: int) -> int:
        return default if raw.get(name) is None else need(name)

    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{where}: key 'hidden_act' must be 'silu', got {act!r}")
    num_layers, num_q_heads = need("num_hidden_layers"), need("num_attention_heads")
    hidden_size = need("hidden_size")
    need("max_position_embeddings")
    moe: dict[str, Any] = {"moe_layers": (False,) * max(num_layers, 0)}
    if model_type == "qwen3_moe":
        step = raw.get("decoder_sparse_step", 1)
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"{where}: key 'decoder_sparse_step' must be at least 1, got {step!r}")
        dense = raw.get("mlp_only_layers") or []
        num_experts = need("num_experts", "num_local_experts")
        moe = {
            "num_experts": num_experts,
            "experts_per_token": need("num_experts_per_tok"),
            "moe_intermediate_size": need("moe_intermediate_size"),
            "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
            "moe_layers": tuple(
                num_experts > 0 and i not in dense and (i + 1) % step == 0
                for i in range(num_layers)
            ),
        }
    if num_q_heads < 1:
        raise ValueError(f"{where}: key 'num_attention_heads' must be positive, got {num_q_heads}")
    head_dim = 128 if model_type == "qwen3" else hidden_size // num_q_heads
    eps = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or eps <= 0:
        raise ValueError(f"{where}: key 'rms_norm_eps' must be a positive number, got {eps!r}")
    eos = (generation or {}).get("eos_token_id")
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
        rms_norm_eps=float(eps),
        rope=_rope(raw, where),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=model_type != "llama",
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id") if eos is None else eos),
        layer_windows=_layer_windows(raw, model_type, num_layers, where),
        **moe,
    )
