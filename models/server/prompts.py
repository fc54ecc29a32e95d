# SPDX-License-Identifier: Apache-2.0
"""Prompts and constraints out of what a client sent. They run in threads, within bounds."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jax_paged.checks.fields import OBJECT, TEXT, Domain, short

from ..checkpoint.tokenizer import Tokenizer
from .errors import bad
from .limits import Limits

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip
_MORE: dict[str, Domain] = {  # fields of a message beside role and content
    "name": TEXT,
    "tool_call_id": TEXT,
    "tool_calls": Domain("a list of objects", lambda v: isinstance(v, list) and all(
        map(OBJECT.has, v))),
    "refusal": TEXT,
    "reasoning_content": TEXT,
}  # fmt: skip


def all_prompts(field: str | Sequence[Any]) -> Sequence[Any]:
    """The prompts of the field, which may itself be one: a text, or a list of token ids."""
    return [field] if isinstance(field, str) or isinstance(field[0], int) else field


def completion_prompts(
    given: Sequence[Any], tokenizer: Tokenizer, vocab_size: int
) -> list[list[int]]:
    """The token ids of each of `all_prompts`.

    Raises:
      ApiError: a prompt has no tokens, or an id that is not in the vocabulary.
    """
    made = []
    for place, prompt in enumerate(given):
        where = "prompt" if len(given) == 1 else f"prompt[{place}]"
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise bad(where, f"{where}: expected at least one token, got none")
        if max(ids) >= vocab_size:
            raise bad(where, f"{where}: expected token ids below {vocab_size}, got {max(ids)}")
        made.append(ids)
    return made


def chat_prompt(values: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> list[int]:
    """The token ids of a conversation, up to the start of an answer.

    Raises:
      ApiError: a message has a field that it may not have, or the template refuses them.
    """
    messages = [_message(f"messages[{i}]", m) for i, m in enumerate(values["messages"])]
    tools = values["tools"] if values["tool_choice"] != "none" else None
    for place, tool in enumerate(tools or ()):
        if tool.get("type") != "function" or not OBJECT.has(tool.get("function")):
            where = f"tools[{place}]"
            raise bad(where, f"{where}: expected type 'function' and a 'function' object")
    try:
        return tokenizer.apply_chat(
            messages, tools=tools or None, max_characters=4 * limits.max_body_bytes,
            max_seconds=limits.prepare_seconds,
        )  # fmt: skip
    except ValueError as error:
        raise bad("messages", f"messages: {error}") from None


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        names = ", ".join(_ROLES)
        raise bad(f"{where}.role", f"{where}.role: expected one of {names}, got {short(role)}")
    made: dict[str, Any] = {"role": _ROLES[role]}
    content = message.get("content")
    if content is None and role != "assistant":
        raise bad(f"{where}.content", f"{where}.content: expected a text, got none")
    made["content"] = _content(f"{where}.content", content)
    for name, value in message.items():
        if name in ("role", "content") or value is None:
            continue
        path = f"{where}.{short(name)[1:-1]}"
        if name not in _MORE:
            raise bad(path, f"{path}: this server has no such option", "unknown_parameter")
        if not _MORE[name].has(value):
            raise bad(path, f"{path}: expected {_MORE[name].text}, got {short(value)}")
        made[name] = value
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call) for call in made["tool_calls"]]
    return made


def _content(where: str, content: Any) -> str:
    """A text, or the texts of a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, f"{where}: expected a text or a list of parts, got {short(content)}")
    texts = []
    for place, part in enumerate(content):
        is_text = OBJECT.has(part) and part.get("type") == "text" and TEXT.has(part.get("text"))
        if not is_text:
            path = f"{where}[{place}]"
            raise bad(path, f"{path}: expected a part of type 'text', got {short(part)}")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want the arguments of a call as an object; OpenAI's clients send their text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not OBJECT.has(arguments):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _grammar_limits() -> Any:
    """Bounds on what a step may compute for a schema or pattern: a part of llguidance's own."""
    import llguidance  # type: ignore[import-not-found]

    return llguidance.LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000,
        max_lexer_states=50_000, max_grammar_size=200_000,
    )  # fmt: skip


def constraint(form: Mapping[str, Any] | None, tokenizer: Tokenizer, limits: Limits) -> Any:
    """What `response_format` asks for, as `Engine.submit` takes it; None = nothing.

    Raises:
      ApiError: a schema or pattern is refused, or there is nothing to hold to it with.
    """
    kind = "text" if form is None else form["type"]
    if form is None or kind == "text":
        return None
    if importlib.util.find_spec("llguidance") is None:
        what = "this server runs without llguidance (pip install 'jax_paged[structured]')"
        raise bad("response_format", f"response_format: expected 'text', since {what}")
    from ..serving import structured  # type: ignore[attr-defined]

    if kind == "json_object":
        return structured.json_object(tokenizer)
    if kind == "regex":
        where, given = "response_format.pattern", form["pattern"]
        make = structured.regex
    else:
        where = "response_format.json_schema.schema"
        given, make = form["json_schema"].get("schema", {}), structured.json_schema
    size = len(given if isinstance(given, str) else json.dumps(given))
    if size > limits.max_schema_bytes:
        most = limits.max_schema_bytes
        raise bad(where, f"{where}: expected at most {most} characters, got {size}")
    try:
        return make(given, tokenizer, limits=_grammar_limits())
    except (ValueError, NotImplementedError) as error:
        raise bad(where, f"{where}: {error}") from None
