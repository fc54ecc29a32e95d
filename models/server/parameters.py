# SPDX-License-Identifier: Apache-2.0
"""The fields of a request, in one table per endpoint: what each may be, and what it is by default.

Bodies are held against these tables, and docs/server.md lists them. A field that no table has is
refused: an option that is quietly left out would give another answer than the one asked for. Fields
that change no token are taken and not used (`IGNORED`). null counts as not given.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_paged.checks.fields import (
    FLAG,
    OBJECT,
    TEXT,
    Domain,
    integer,
    list_of,
    number,
    short,
)

from .errors import bad

MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES = 16, 256, 1024
REQUIRED = object()

_STOP = Domain(
    f"a text of 1 to {MAX_STOP_LENGTH} characters",
    lambda value: isinstance(value, str) and 0 < len(value) <= MAX_STOP_LENGTH,
)
_STOPS = Domain(
    f"a text or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_LENGTH} characters",
    lambda value: (
        _STOP.has(value)
        or (isinstance(value, list) and len(value) <= MAX_STOPS and all(map(_STOP.has, value)))
    ),
)
_TOKEN_ID = integer(0)
_IDS = Domain(
    f"a list of at most {MAX_STOPS} token ids",
    lambda value: list_of(_TOKEN_ID).has(value) and len(value) <= MAX_STOPS,
)
_PROMPT = Domain(
    "a text, a list of token ids, or a list of these",
    lambda value: (
        _is_one_prompt(value)
        or (isinstance(value, list) and bool(value) and all(map(_is_one_prompt, value)))
    ),
)
_BIAS = Domain(
    f"an object of at most {MAX_BIASES} token ids with numbers from -100 to 100",
    lambda value: (
        OBJECT.has(value)
        and len(value) <= MAX_BIASES
        and all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
        and all(map(number(-100, 100).has, value.values()))
    ),
)
_PROBABILITY = Domain(
    "a number above 0 and at most 1", lambda value: number(0, 1).has(value) and value > 0
)
_PENALTY = Domain(
    "a number above 0 and at most 10", lambda value: number(0, 10).has(value) and value > 0
)
_MESSAGES = Domain(
    "a list of objects, at least one",
    lambda value: list_of(OBJECT).has(value) and bool(value),
)
_TOOLS = Domain("a list of at most 128 objects",
                lambda value: list_of(OBJECT).has(value) and len(value) <= 128)  # fmt: skip
_CHOICE = Domain("'none' or 'auto'", lambda value: value in ("none", "auto"))


def _is_one_prompt(value: Any) -> bool:
    return TEXT.has(value) or (list_of(_TOKEN_ID).has(value) and bool(value))


class Parameter(NamedTuple):
    """A field: its values, its default, what it does."""

    domain: Domain
    default: Any
    text: str


_SHARED = {
    "model": Parameter(TEXT, None, "a name that /v1/models tells; none = the model"),
    "stream": Parameter(FLAG, False, "whether to answer by server-sent events"),
    "stream_options": Parameter(
        OBJECT, None, "with `stream`: `include_usage`, counts of tokens in a last event"
    ),
    "n": Parameter(integer(1, 1024), 1, "answers per prompt; --max-choices bounds them"),
    "temperature": Parameter(number(0, 1e6), 1.0, "divides the logits; 0 = the likeliest token"),
    "top_p": Parameter(_PROBABILITY, None, "draw from the likeliest tokens up to this probability"),
    "top_k": Parameter(
        integer(1), None, "draw from so many of the likeliest tokens (not of OpenAI)"
    ),
    "min_p": Parameter(
        number(0, 1), None, "drop tokens less likely than this times the likeliest (not of OpenAI)"
    ),
    "repetition_penalty": Parameter(
        _PENALTY, None, "divides what speaks for tokens that came before (not of OpenAI)"
    ),
    "presence_penalty": Parameter(
        number(-2, 2), None, "taken from the logits of tokens that were drawn before"
    ),
    "frequency_penalty": Parameter(
        number(-2, 2), None, "the same, times how often they were drawn"
    ),
    "logit_bias": Parameter(_BIAS, None, "added to the logits of single tokens"),
    "seed": Parameter(
        integer(-(2**63), 2**63 - 1), None, "the same seed gives the same draws; none = chance"
    ),
    "stop": Parameter(_STOPS, None, "texts before which an answer ends"),
    "stop_token_ids": Parameter(_IDS, None, "tokens before which an answer ends (not of OpenAI)"),
    "ignore_eos": Parameter(
        FLAG, False, "go on behind the model's own end, for measurements (not of OpenAI)"
    ),
    "response_format": Parameter(
        OBJECT, None,
        "what the answer must be: `{\"type\": \"text\"}`, `json_object`, `json_schema` with a "
        "`json_schema`, or `regex` with a `pattern` (not of OpenAI)",
    ),
}  # fmt: skip

COMPLETIONS: Mapping[str, Parameter] = {
    "prompt": Parameter(_PROMPT, REQUIRED, "what to continue"),
    "max_tokens": Parameter(integer(0), 16, "most new tokens"),
    "echo": Parameter(FLAG, False, "whether the answer begins with the prompt"),
    "logprobs": Parameter(
        integer(0, 20), None, "so many of the likeliest tokens in each place; needs --logprobs"
    ),
    **_SHARED,
}
CHAT: Mapping[str, Parameter] = {
    "messages": Parameter(_MESSAGES, REQUIRED, "the conversation"),
    "max_completion_tokens": Parameter(
        integer(1), None, "most new tokens; none = up to the end of the context"
    ),
    "max_tokens": Parameter(integer(1), None, "the older name of it"),
    "logprobs": Parameter(FLAG, False, "whether to tell log-probabilities; needs --logprobs"),
    "top_logprobs": Parameter(
        integer(0, 20), None, "so many of the likeliest tokens in each place, with `logprobs`"
    ),
    "tools": Parameter(_TOOLS, None, "goes to the chat template; calls come back as text"),
    "tool_choice": Parameter(_CHOICE, None, "`none` keeps tools from the template"),
    **_SHARED,
}
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls",
)  # fmt: skip

_FORMATS = {
    "text": {},
    "json_object": {},
    "json_schema": {"json_schema": OBJECT},
    "regex": {"pattern": TEXT},
}


def read(table: Mapping[str, Parameter], body: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields of a table, with defaults for those that the body does not give.

    Raises:
      ApiError: a field is missing, unknown, or has a value that it may not have.
    """
    for name in body:
        if name not in table and name not in IGNORED:
            raise bad(
                short(name)[1:-1], f"{short(name)}: this server has no such option",
                "unknown_parameter",
            )  # fmt: skip
    values = {}
    for name, (domain, default, _) in table.items():
        value = body.get(name)
        if value is None:
            if default is REQUIRED:
                raise bad(name, f"{name}: expected {domain.text}, got none", "missing_parameter")
            value = default
        elif not domain.has(value):
            raise bad(name, f"{name}: expected {domain.text}, got {short(value)}")
        values[name] = value
    _check_stream_options(values)
    _check_format(values["response_format"])
    return values


def _check_stream_options(values: Mapping[str, Any]) -> None:
    options = values["stream_options"]
    if options is None:
        return
    if not values["stream"]:
        raise bad("stream_options", "stream_options: expected none without stream")
    for name, value in options.items():
        where = f"stream_options.{short(name)[1:-1]}"
        if name not in ("include_usage", "include_obfuscation"):
            raise bad(where, f"{where}: this server has no such option", "unknown_parameter")
        if not FLAG.has(value):
            raise bad(where, f"{where}: expected {FLAG.text}, got {short(value)}")


def _check_format(form: Mapping[str, Any] | None) -> None:
    if form is None:
        return
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        names = ", ".join(_FORMATS)
        where = "response_format.type"
        raise bad(where, f"{where}: expected one of {names}, got {short(kind)}")
    for name, domain in _FORMATS[kind].items():
        where = f"response_format.{name}"
        if not domain.has(form.get(name)):
            raise bad(where, f"{where}: expected {domain.text}, got {short(form.get(name))}")


_NAMES = {"frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "top_k", "top_p"}


def sampling(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The options of `Engine.submit` that these values ask for; the rest keeps its defaults.

    Raises:
      ApiError: a token id is not in the vocabulary.
    """
    options = {name: values[name] for name in _NAMES if values[name] is not None}
    options["temperature"] = float(values["temperature"])
    if values["logit_bias"]:
        biases = {int(token): float(bias) for token, bias in values["logit_bias"].items()}
        _check_ids("logit_bias", biases, vocab_size)
        options["logit_bias"] = biases
    if values["seed"] is not None:
        options["seed"] = values["seed"] % 2**32
    _check_ids("stop_token_ids", values["stop_token_ids"] or (), vocab_size)
    return options


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise bad(name, f"{name}: expected token ids below {vocab_size}, got {token}")


def stop_strings(values: Mapping[str, Any]) -> list[str]:
    """The field `stop` as a list."""
    stop = values["stop"] or []
    return [stop] if isinstance(stop, str) else list(dict.fromkeys(stop))
