# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of a Hugging Face checkpoint of one of the `FAMILIES`.

`hf_keys` has the tables of keys, `hf_rope` reads the rotary embedding.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_paged.checks import check_size, expect
from jax_paged.checks.fields import integer, short

from ..decoder.config import TOKEN_IDS, DecoderConfig, LatentConfig, token_ids
from .hf_keys import FAMILIES, FP8_BLOCKS, HONOURED, MXFP4, Family, check_known
from .hf_rope import logit_factor, read_ropes
from .outside import check_keys, reading

_TYPES = {family.architecture: model_type for model_type, family in FAMILIES.items()}


def _model_type(raw: Mapping[str, Any], where: str) -> str:
    supported = ", ".join(_TYPES)
    names = raw.get("architectures") or []
    for name in names:
        if name not in _TYPES:
            raise ValueError(
                f"{where}: architecture {short(name)} is not supported; supported: {supported}"
            )
    model_type = raw.get("model_type") or (_TYPES[names[0]] if names else None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"{where}: model_type {short(model_type)} is not supported; supported: "
            f"{', '.join(FAMILIES)} ({supported})"
        )
    for name in names:
        if _TYPES[name] != model_type:
            raise ValueError(
                f"{where}: architectures says {name!r}, but model_type says {model_type!r}"
            )
    return model_type


def _layer_windows(
    raw: Mapping[str, Any], model_type: str, num_layers: int, where: str
) -> tuple[int, ...]:
    """The window of each layer as transformers has it, 0 = none; () where no layer has one.

    A window as long as the longest row hides nothing: it counts as none, unless it says how the
    layer turns.
    """
    family, first = FAMILIES[model_type], 0
    flag, window = raw.get("use_sliding_window"), raw.get("sliding_window", family.sliding_window)
    if family.windows == "none":
        for key in ("sliding_window", "use_sliding_window"):
            if raw.get(key) not in (None, False):
                raise ValueError(f"{where}: key {key!r} must be None, got {short(raw[key])}")
        window = None
    elif family.windows in ("all", "typed"):  # transformers does not look at the flag
        if flag not in (None, window is not None):
            raise ValueError(
                f"{where}: key 'use_sliding_window' must be None for model_type {model_type!r} "
                f"with sliding_window = {short(window)}, got {flag}"
            )
    elif not flag:  # Qwen writes a window beside use_sliding_window = false, the default
        window = None
    if window is not None:
        check_keys(where, {"sliding_window": window}, {"sliding_window": integer(1)})
    if family.windows == "chosen" and (first := raw.get("max_window_layers")) is None:
        first = 28
    slides = [window is not None and i >= first for i in range(num_layers)]
    if family.windows == "typed":
        pattern = _pattern(raw, family, where)
        slides = [(i + 1) % pattern > 0 for i in range(num_layers)]
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    given = raw.get("layer_types") or kinds
    if len(given) != num_layers:
        raise ValueError(
            f"{where}: key 'layer_types' must have num_hidden_layers={num_layers} entries, got "
            f"{len(given)}"
        )
    # Where transformers does not go by layer_types, they must say what is done anyway.
    both = {"full_attention", "sliding_attention"}
    for kind, usual in zip(given, kinds, strict=True):
        is_free = family.windows == "chosen" and window is not None
        allowed = both if is_free or family.windows == "typed" else {usual}
        if kind not in allowed:
            names = " or ".join(map(repr, sorted(allowed)))
            raise ValueError(
                f"{where}: key 'layer_types' must hold {names} here, got {short(kind)}"
            )
    if window is None and family.windows == "typed" and "sliding_attention" in given:
        raise ValueError(
            f"{where}: key 'sliding_window' must be {integer(1).text} beside layers of "
            "'sliding_attention', got None"
        )
    windows = tuple((window or 0) * (kind == "sliding_attention") for kind in given)
    if family.local_rope_theta is not None:
        return windows if any(windows) else ()
    return windows if 0 < max(windows) < raw["max_position_embeddings"] else ()


def _pattern(raw: Mapping[str, Any], family: Family, where: str) -> int:
    """Which layers see all tokens, where `layer_types` does not say it: every so manyth."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    values = {name: raw[name] for name in names if raw.get(name) is not None}
    if len(set(values.values())) > 1:
        raise ValueError(f"{where}: {values} contradict each other")
    return next(iter(values.values()), family.pattern)


def config_from_hf(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    context_length: int | None = None,
    where: str = "config.json",
) -> DecoderConfig:
    """Reads a Hugging Face configuration.

    Args:
      raw: the content of config.json. `num_experts` and `num_local_experts`, `rope_theta` with
        `rope_scaling` and `rope_parameters` are the same thing under old and new names.
      generation: the content of generation_config.json. Its eos_token_id wins over config.json's;
        its sampling options are not used: sampling is the caller's choice.
      context_length: most tokens of a row, at most max_position_embeddings. None = so many; but of
        a LongRoPE model its original context. Beyond that such a model takes other frequencies, for
        all positions of a row. transformers chooses by the length of the row; here
        `context_length` chooses for all rows, and shorter ones get the frequencies of long ones.
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
        return _config(raw, generation or {}, context_length, where)


def _latent_fields(
    raw: Mapping[str, Any], need: Callable[..., int], optional: Callable[[str, Any], Any],
    model_type: str, where: str,
) -> dict[str, Any]:  # fmt: skip
    """The fields of `DecoderConfig` that DeepSeek's models have of their own."""
    nope, turning = need("qk_nope_head_dim"), need("qk_rope_head_dim")
    heads = need("num_attention_heads")
    same = {"num_key_value_heads": heads, "head_dim": turning, "qk_head_dim": nope + turning}
    for key, value in same.items():
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{where}: key {key!r} must be {value} for model_type {model_type!r}, got "
                f"{raw[key]}"
            )
    if "q_lora_rank" not in raw:
        raise ValueError(f"{where}: key 'q_lora_rank' is missing; null stands for none")
    experts, inner = need("n_routed_experts"), need("moe_intermediate_size")
    first, step = optional("first_k_dense_replace", 0), optional("moe_layer_freq", 1)
    is_grouped = model_type == "deepseek_v3" or raw.get("topk_method") == "group_limited_greedy"
    return {
        "latent": LatentConfig(
            kv_rank=need("kv_lora_rank"),
            q_rank=raw["q_lora_rank"],
            nope_dim=nope,
            rope_dim=turning,
            v_dim=need("v_head_dim"),
            style="interleaved" if optional("rope_interleave", True) else "half",
        ),
        "num_experts": experts,
        "experts_per_token": need("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "moe_layers": tuple(
            experts > 0 and i >= first and i % step == 0 for i in range(need("num_hidden_layers"))
        ),
        "shared_intermediate_size": inner * optional("n_shared_experts", 0),
        "norm_topk_prob": optional("norm_topk_prob", model_type == "deepseek_v3"),
        "expert_scale": float(need("routed_scaling_factor")),
        "expert_groups": need("n_group") if is_grouped else 1,
        "groups_per_token": need("topk_group") if is_grouped else 1,
        "nextn_layers": optional("num_nextn_predict_layers", 0),
    }


def _quantization(raw: Mapping[str, Any], model_type: str, where: str) -> dict[str, bool]:
    """The field of `DecoderConfig` that says how weights are stored; others are refused."""
    given = raw.get("quantization_config")
    if given is None:
        return {}
    field, domains = "fp8_blocks", FP8_BLOCKS
    if model_type == "gpt_oss":
        field, domains = "mxfp4_experts", MXFP4
    for key, value in (dict.fromkeys(domains) | given).items():
        name = f"{where}: key 'quantization_config.{short(key)[1:-1]}'"
        if key not in domains:
            raise ValueError(
                f"{name} is not known; it might alter the logits, so it is not ignored"
            )
        if not domains[key].has(value):
            raise ValueError(f"{name} must be {domains[key].text}, got {short(value)}")
    return {field: True}


def check_context(context_length: int | None, longest: int) -> None:
    """Checks the option of `config_from_hf` against what the file says."""
    if context_length is None:
        return
    check_size("context_length", context_length)
    text = f"at most the {longest} tokens of the model"
    expect(context_length <= longest, "context_length", text, context_length)


def _config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], context_length: int | None, where: str
) -> DecoderConfig:
    check_keys(where, raw, HONOURED)
    model_type = _model_type(raw, where)
    family = FAMILIES[model_type]
    check_keys(where, raw, family.keys)
    check_known(raw, model_type, where)

    def need(*names: str) -> int:
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        if not values:
            raise ValueError(f"{where}: key {names[0]!r} is missing")
        if len(set(values.values())) > 1:
            raise ValueError(f"{where}: {values} contradict each other")
        return next(iter(values.values()))

    def optional(name: str, default: Any) -> Any:
        return family.defaults.get(name, default) if raw.get(name) is None else raw[name]

    for key in ("hidden_act", family.activation_key):
        if (act := raw.get(key, family.activation)) != family.activation:
            raise ValueError(
                f"{where}: key {key!r} must be {family.activation!r}, got {short(act)}"
            )
    num_layers, num_q_heads = need("num_hidden_layers"), need("num_attention_heads")
    hidden_size = need("hidden_size")
    check_context(context_length, need("max_position_embeddings"))
    own: dict[str, Any] = {"moe_layers": (False,) * num_layers}
    if model_type == "qwen3_moe":
        step = optional("decoder_sparse_step", 1)
        dense = set(optional("mlp_only_layers", ()))
        num_experts = need("num_experts", "num_local_experts")
        own = {
            "num_experts": num_experts,
            "experts_per_token": need("num_experts_per_tok"),
            "moe_intermediate_size": need("moe_intermediate_size"),
            "norm_topk_prob": optional("norm_topk_prob", False),
            "moe_layers": tuple(
                num_experts > 0 and i not in dense and (i + 1) % step == 0
                for i in range(num_layers)
            ),
        }
    elif model_type == "gpt_oss":
        own = {
            "num_experts": need("num_local_experts", "num_experts"),
            "experts_per_token": need("num_experts_per_tok", "experts_per_token"),
            "moe_intermediate_size": need("intermediate_size"),
            "activation_limit": float(optional("swiglu_limit", 7.0)),
            "moe_layers": (True,) * num_layers,
        }
    elif model_type == "gemma3_text":
        own |= {
            "embedding_scale": hidden_size**0.5,
            "attention_scale": optional("query_pre_attn_scalar", 256) ** -0.5,
            "attention_soft_cap": raw.get("attn_logit_softcapping"),
            "logit_soft_cap": raw.get("final_logit_softcapping"),
        }
    is_latent = model_type.startswith("deepseek")
    # KV heads as query heads, unless it says else
    has_as_many = model_type in ("llama", "phi3") or is_latent
    head_dim = optional("head_dim", 128 if model_type == "qwen3" else hidden_size // num_q_heads)
    if is_latent:
        head_dim = need("qk_rope_head_dim")  # that turns
    attention_bias = optional("attention_bias", False)
    eos = generation.get("eos_token_id")
    rope, local_rope, context_length = read_ropes(raw, model_type, head_dim, context_length, where)
    if is_latent:
        own = _latent_fields(raw, need, optional, model_type, where)
        turning, head_dim = head_dim, own["latent"].nope_dim + head_dim
        rope = dataclasses.replace(rope, rotary_dim=turning)
        own["attention_scale"] = head_dim**-0.5 * logit_factor(raw, model_type, where)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=need("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=need("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=(
            optional("num_key_value_heads", num_q_heads)
            if has_as_many
            else need("num_key_value_heads")
        ),
        head_dim=head_dim,
        context_length=context_length,
        rms_norm_eps=float(optional("rms_norm_eps", family.rms_norm_eps)),
        rope=rope,
        tie_embeddings=optional("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=optional("mlp_bias", False),
        fused_projections=family.fused_projections,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id") if eos is None else eos),
        layer_windows=_layer_windows(raw, model_type, num_layers, where),
        local_rope=local_rope,
        **family.decoder,
        **_quantization(raw, model_type, where),
        **own,
    )
