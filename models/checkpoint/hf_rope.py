# SPDX-License-Identifier: Apache-2.0
"""Reads the rotary embedding of a config.json: its old and its new keys, and how it is scaled."""

from collections.abc import Mapping
from typing import Any

from jax_paged.checks.fields import FLAG, OBJECT, TEXT, Domain, integer, list_of, number, short
from jax_paged.ops import rope

from ..decoder.config import ROPE_DOMAINS, RopeConfig
from .hf_keys import CONTEXT, FAMILIES, HONOURED
from .outside import check_keys

_DIVISORS = list_of(number(1e-6, 1e6))
# Keys of each rope_type. Those that are `_NEEDED` have no default.
_KEYS: dict[str, dict[str, Domain]] = {
    "default": {},
    "linear": {"factor": ROPE_DOMAINS["factor"]},
    "llama3": {
        "factor": ROPE_DOMAINS["factor"],
        "low_freq_factor": ROPE_DOMAINS["low_freq_factor"],
        "high_freq_factor": ROPE_DOMAINS["high_freq_factor"],
        "original_max_position_embeddings": CONTEXT,
    },
    "yarn": {
        "factor": ROPE_DOMAINS["factor"],
        "original_max_position_embeddings": CONTEXT,
        "attention_factor": ROPE_DOMAINS["attention_factor"],
        "beta_fast": number(0, 1e6),  # 0 = not given, as in transformers
        "beta_slow": number(0, 1e6),
        "mscale": number(0, 1e3),
        "mscale_all_dim": number(0, 1e3),
        "truncate": FLAG,
    },
    "longrope": {
        "short_factor": _DIVISORS,
        "long_factor": _DIVISORS,
        "factor": ROPE_DOMAINS["factor"],
        "original_max_position_embeddings": integer(2, 2**40),  # its logarithm divides
        "attention_factor": ROPE_DOMAINS["attention_factor"],
    },
}
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OF_PHI3 = {"su": "longrope", "yarn": "longrope"}  # what Phi-3 called it before


def read_ropes(
    raw: Mapping[str, Any],
    model_type: str,
    head_dim: int,
    context_length: int | None,
    where: str,
) -> tuple[RopeConfig, RopeConfig | None, int]:
    """The rotary embedding, that of layers with a window, and the context they are for.

    Args:
      raw: the content of config.json, whose `HONOURED` keys have been checked.
      context_length: as for `config_from_hf`.

    Returns:
      (rope, None where it is that of all layers, most tokens of a row).

    Raises:
      ValueError: a key or value is not supported, missing, or contradicts another.
    """
    family = FAMILIES[model_type]
    same: Any = (model_type, head_dim, context_length, where)
    if family.local_rope_theta is None:
        rope, context = _read_rope(raw, family.rope_theta, *same)
        return rope, None, context
    kinds = ("full_attention", "sliding_attention")
    of_kinds = raw.get("rope_parameters") or {}
    check_keys(where, of_kinds, dict.fromkeys(kinds, OBJECT))
    for key, value in of_kinds.items():
        if key not in kinds:
            raise ValueError(
                f"{where}: key 'rope_parameters' must hold {' or '.join(map(repr, kinds))} for "
                f"model_type {model_type!r}, got {short(key)} = {short(value)}"
            )
    of_full, of_local = (dict(raw) | {"rope_parameters": of_kinds.get(kind)} for kind in kinds)
    rope, context = _read_rope(of_full, family.rope_theta, *same)
    of_local |= {
        "rope_theta": raw.get("rope_local_base_freq"), "rope_scaling": None,
        "original_max_position_embeddings": None,
    }  # fmt: skip
    local, _ = _read_rope(of_local, family.local_rope_theta, *same)
    return rope, local, context


def logit_factor(raw: Mapping[str, Any], model_type: str, where: str) -> float:
    """What DeepSeek multiplies the scale of logits by: YaRN's mscale, squared.

    Args:
      raw: as `read_ropes` has checked it.

    Raises:
      ValueError: mscale is given without mscale_all_dim, or the other way round. DeepSeek's own
        code and transformers differ then.
    """
    _, given = _parameters(raw, model_type, where)
    mscale, of_all = (given.get(key) or 0 for key in ("mscale", "mscale_all_dim"))
    if (mscale > 0) != (of_all > 0):
        raise ValueError(
            f"{where}: rope keys 'mscale' and 'mscale_all_dim' must be given both or not at all, "
            f"got {mscale} and {of_all}"
        )
    return rope.yarn_mscale(given["factor"], of_all) ** 2 if of_all else 1.0


def _read_rope(
    raw: Mapping[str, Any],
    default_theta: float,
    model_type: str,
    head_dim: int,
    context_length: int | None,
    where: str,
) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the context it is for."""
    kind, given = _parameters(raw, model_type, where)
    theta, rotary_dim = (
        _theta(raw, given, default_theta, where),
        _rotary_dim(raw, given, model_type, head_dim, where),
    )
    outer_context = raw.get("original_max_position_embeddings")
    if outer_context is not None:
        if kind in ("llama3", "yarn", "longrope"):
            given["original_max_position_embeddings"] = outer_context
        elif model_type != "phi3":  # whose files have it anyway
            raise ValueError(
                f"{where}: key 'original_max_position_embeddings' = {outer_context!r} has no use "
                f"with rope_type {kind!r}"
            )
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if key not in _KEYS[kind]:
            raise ValueError(
                f"{where}: rope key {short(key)} = {short(value)} is not known for rope_type "
                f"{kind!r}"
            )
    check_keys(where, values, _KEYS[kind])
    for key in _NEEDED[kind]:
        if key not in values:
            what = "a list" if kind == "longrope" else "a number"
            raise ValueError(f"{where}: rope_type {kind!r} needs {what} for {key!r}, got None")
    if kind == "longrope" and model_type == "phi3" and outer_context is None:
        # transformers would take 4096, whatever stands among the rope parameters.
        raise ValueError(f"{where}: key 'original_max_position_embeddings' is missing")
    longest = raw["max_position_embeddings"]
    original = values.get("original_max_position_embeddings", longest)
    if kind == "longrope":
        # The first divisors hold for rows of up to so many tokens, the second for longer ones.
        context = context_length or min(original, longest)
        for key in _NEEDED[kind]:
            if len(values[key]) != (half := (rotary_dim or head_dim) // 2):
                raise ValueError(
                    f"{where}: key {key!r} must have {half} entries, one per frequency, got "
                    f"{len(values[key])}"
                )
        options = _longrope(values, original, longest, context > original)
        return RopeConfig(theta=theta, rotary_dim=rotary_dim, **options), context
    options = _scaling(kind, values, original)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, **options), context_length or longest


def _parameters(raw: Mapping[str, Any], model_type: str, where: str) -> tuple[str, dict[str, Any]]:
    """(rope_type, the other parameters)."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(
            f"{where}: 'rope_parameters' = {short(new)} contradicts 'rope_scaling' = {short(old)}"
        )
    given = dict(new or old or {})
    if not given and FAMILIES[model_type].needs_rope:
        raise ValueError(f"{where}: key 'rope_scaling' is missing for model_type {model_type!r}")
    check_keys(where, given, {"rope_type": TEXT, "type": TEXT})
    names = _OF_PHI3 if model_type == "phi3" else {}
    kinds = [given.pop(key, None) for key in ("rope_type", "type")]
    kind, other = (names.get(kind, kind) for kind in kinds)
    if kind and other and kind != other:
        raise ValueError(
            f"{where}: rope_type {short(kind)} contradicts type in {short(new or old)}"
        )
    kind = kind or other or "default"
    supported = ("default", "longrope") if model_type == "phi3" else tuple(_KEYS)
    if kind not in supported:
        raise ValueError(
            f"{where}: rope_type {short(kind)} is not supported; supported: {', '.join(supported)}"
        )
    return kind, given


def _theta(raw: Mapping[str, Any], given: dict[str, Any], default: float, where: str) -> float:
    inner, outer = given.pop("rope_theta", None), raw.get("rope_theta")
    check_keys(where, {"rope_theta": inner}, HONOURED)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"{where}: rope_theta is {outer!r}, but {inner!r} in the rope parameters")
    return float(next(v for v in (inner, outer, default) if v is not None))


def _rotary_dim(
    raw: Mapping[str, Any], given: dict[str, Any], model_type: str, head_dim: int, where: str
) -> int | None:
    inner, outer = given.pop("partial_rotary_factor", None), raw.get("partial_rotary_factor")
    if model_type != "phi3":  # the others turn whole heads, so the key outside has been checked
        if inner not in (1, None):
            raise ValueError(f"{where}: partial_rotary_factor must be 1, got {short(inner)}")
        return None
    check_keys(where, {"partial_rotary_factor": inner}, {"partial_rotary_factor": number(1e-3, 1)})
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"{where}: partial_rotary_factor is {outer!r}, but {inner!r} in the rope parameters"
        )
    part = next(v for v in (inner, outer, 1) if v is not None)
    if (rotary_dim := int(head_dim * part)) < 2:
        raise ValueError(
            f"{where}: partial_rotary_factor must leave 2 of {head_dim} dimensions, got {part!r}"
        )
    return None if rotary_dim == head_dim else rotary_dim


def _longrope(values: Mapping[str, Any], original: int, longest: int, is_long: bool) -> dict:
    factor = values.get("factor", longest / original)
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = rope.longrope_attention_factor(factor, original)
    divisors = values["long_factor" if is_long else "short_factor"]
    return {
        "frequency_divisors": tuple(map(float, divisors)),
        "attention_factor": float(attention_factor),
    }


def _scaling(kind: str, values: Mapping[str, Any], original: int) -> dict[str, Any]:
    """The fields of `RopeConfig`."""
    if kind == "default":
        return {}
    factor = float(values["factor"])
    if kind == "linear":
        return {"kind": kind, "factor": factor}
    scaling = {"kind": kind, "factor": factor, "original_context": original}
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
        return scaling | {name: float(values[name]) for name in names}
    default_attention = rope.yarn_attention_factor(
        factor, values.get("mscale"), values.get("mscale_all_dim")
    )
    return scaling | {
        "beta_fast": float(values.get("beta_fast") or 32.0),
        "beta_slow": float(values.get("beta_slow") or 1.0),
        "truncate": values.get("truncate", True),
        "attention_factor": float(values.get("attention_factor", default_attention)),
    }
