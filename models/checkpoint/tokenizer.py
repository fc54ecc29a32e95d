# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back; reads the tokenizer.json of a Hugging Face folder."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from jax_paged.checks.fields import OBJECT, TEXT, Domain, either, list_of

from .._packages import needed
from ..decoder.config import read_json, token_ids
from .outside import check_keys, reading


class Tokenizer:
    """Text to ids and back.

    Args:
      backend: the `tokenizers.Tokenizer` that does the work.
      prefix_ids: ids that `encode` puts before the text, beside what the backend's own
        post-processor adds.
      eos_ids: ids that end a text.
      chat_template: the checkpoint's jinja template, None if it has none.
      named_tokens: what the template may use by name: bos_token, eos_token …
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        prefix_ids: Sequence[int] = (),
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.prefix_ids = list(prefix_ids)
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})

    @property
    def vocab_size(self) -> int:
        """How many ids there are, special ones included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the start token if the checkpoint wants one."""
        with reading("tokenizer"):
            return self.prefix_ids + self.backend.encode(text).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are no whole character become U+FFFD."""
        with reading("tokenizer"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation under the checkpoint's chat template; as `render_chat`."""
        text = self.render_chat(messages, **options)
        with reading("tokenizer"):
            return self.backend.encode(text, add_special_tokens=False).ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_characters: int | None = None,
        max_seconds: float | None = None,
    ) -> str:
        """The text of a conversation under the checkpoint's chat template.

        Args:
          messages: dicts with "role" ("system", "user", "assistant") and "content".
          add_generation_prompt: end with the start of an assistant turn.
          tools: descriptions of functions, for templates that know them; None = none.
          max_characters, max_seconds: of what the template writes, for messages of strangers;
            looked at between its pieces. None = no bound.

        Raises:
          ValueError: the checkpoint has no template, the template refuses the messages, or a bound
            is passed.
        """
        if self.chat_template is None:
            raise ValueError("apply_chat: this checkpoint has no chat template")
        return _render(
            self.chat_template,
            max_characters=max_characters,
            max_seconds=max_seconds,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **({} if tools is None else {"tools": list(tools)}),
            **self.named_tokens,
        )


class MissingTokenizer:
    """Stands where a checkpoint has no usable tokenizer: every use raises the reason."""

    def __init__(self, reason: str):
        self.reason = reason
        self.eos_ids: tuple[int, ...] = ()
        self.chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        """Raises ValueError."""
        raise ValueError(self.reason)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises ValueError."""
        raise ValueError(self.reason)

    def apply_chat(self, messages: Any, **options: Any) -> list[int]:
        """Raises ValueError."""
        raise ValueError(self.reason)


def _render(
    template: str, *, max_characters: int | None, max_seconds: float | None, **values: Any
) -> str:
    """Renders a chat template in a sandbox, with the helpers that published templates use."""
    jinja2 = needed("jinja2")
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    with reading("chat template"):
        try:
            pieces = environment.from_string(template).generate(**values)
            return "".join(_bounded(pieces, max_characters, max_seconds))
        except jinja2.TemplateError as error:
            raise ValueError(error) from None


def _bounded(
    pieces: Iterable[str], max_characters: int | None, max_seconds: float | None
) -> Iterator[str]:
    """The pieces; raises ValueError when they become too many or take too long."""
    size, start = 0, time.monotonic()
    for piece in pieces:
        size += len(piece)
        if max_characters is not None and size > max_characters:
            raise ValueError(f"expected at most {max_characters} characters of text, got more")
        if max_seconds is not None and time.monotonic() - start > max_seconds:
            raise ValueError(f"expected an end within {max_seconds:g} s")
        yield piece


def tokenizer_from_folder(folder: Path) -> Tokenizer | MissingTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, and what stands beside it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return MissingTokenizer(f"{path}: no such file; text needs it, token ids do not")
    with reading(f"{path}: not a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    side = folder / "tokenizer_config.json"
    settings = read_json(side) if side.exists() else {}
    check_keys(side, settings, _SETTINGS)
    named = {name: _text_of(settings[name]) for name in _NAMED if settings.get(name)}
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Tokenizer(
        backend,
        eos_ids=token_ids(eos),
        chat_template=_template_of(folder, settings),
        named_tokens=named,
    )


_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKEN = Domain(
    "a text, or an object whose 'content' is one",
    lambda value: TEXT.has(value["content"] if OBJECT.has(value) and "content" in value else value),
)
_TEMPLATE = Domain(
    "an object with texts for 'name' and 'template'",
    lambda value: (
        OBJECT.has(value) and all(TEXT.has(value.get(name)) for name in ("name", "template"))
    ),
)
# The keys of tokenizer_config.json that are read.
_SETTINGS = dict.fromkeys(_NAMED, _TOKEN) | {"chat_template": either(TEXT, list_of(_TEMPLATE))}


def _text_of(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        with reading(file):
            return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is the one for plain chat
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get("default")
    return template
