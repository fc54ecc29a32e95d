# SPDX-License-Identifier: Apache-2.0
"""Output that must have a form: JSON of a schema, or a text that a regular expression matches.

    constraint = json_schema({"type": "object", …}, tokenizer)
    request = engine.submit(prompt, constraint=constraint, max_new_tokens=200, …)

llguidance tells before each draw which tokens may come (extra `structured`). One constraint serves
any number of requests.
"""

import dataclasses
import json
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_paged.checks import expect

from .._packages import needed
from ..checkpoint.tokenizer import Tokenizer

__all__ = ["json_object", "json_schema", "regex"]

_LL_TOKENIZERS: Any = weakref.WeakKeyDictionary()  # of each Tokenizer, by the model's vocab_size


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What a request's new text must be; `json_schema`, `json_object` and `regex` make one."""

    grammar: str
    tokenizer: Tokenizer
    limits: Any = None  # llguidance.LLParserLimits

    def start(self, vocab_size: int) -> "Matcher":
        """Follows one request of a model with so many logits.

        Raises:
          ValueError: the tokenizer has more tokens than the model has logits.
        """
        return Matcher(self, vocab_size)


class Matcher:
    """Where one request stands within its constraint."""

    def __init__(self, constraint: Constraint, vocab_size: int):
        llguidance = needed("llguidance", extra="structured")
        self.grammar = constraint.grammar
        tokenizer = _ll_tokenizer(constraint.tokenizer, vocab_size)
        self.eos_tokens = frozenset(tokenizer.eos_tokens)
        self._matcher = llguidance.LLMatcher(
            tokenizer, constraint.grammar, log_level=0, limits=constraint.limits
        )

    def allow(self, mask: np.ndarray) -> None:
        """Fills u32[⌈vocab_size / 32⌉]: a bit for each token that may come, the lowest first.

        The end of the text may come where the text is whole; what is no token never may.
        """
        if self._matcher.is_error():
            mask[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def advance(self, token: int) -> None:
        """A token that was allowed has come."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing but its end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why llguidance gave up, such as a grammar that became too complex; "" if it did not."""
        return self._matcher.get_error()


def json_schema(
    schema: Mapping[str, Any] | str | bool, tokenizer: Tokenizer, *, limits: Any = None
) -> Constraint:
    """JSON that a schema describes, without space between its parts.

    Args:
      schema: a JSON schema (draft 2020-12), or its text.
      tokenizer: of the model, as `load_checkpoint` gives it.
      limits: an llguidance.LLParserLimits, for schemas of strangers; None = llguidance's own.

    Raises:
      ValueError: the schema is no schema, or asks for what llguidance cannot hold to.
      ImportError: llguidance is missing.
    """
    llguidance = needed("llguidance", extra="structured")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False}
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"schema: expected a JSON schema, got {error}") from None
    return _checked("schema", Constraint(grammar, tokenizer, limits))


def json_object(tokenizer: Tokenizer) -> Constraint:
    """Any JSON object."""
    return json_schema({"type": "object"}, tokenizer)


def regex(pattern: str, tokenizer: Tokenizer, *, limits: Any = None) -> Constraint:
    """A text that the whole of a regular expression matches; otherwise as `json_schema`.

    Args:
      pattern: in the syntax of Rust's regex, without look-around and back references.
    """
    llguidance = needed("llguidance", extra="structured")
    expect(isinstance(pattern, str), "pattern", "a text", type(pattern).__name__)
    grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
    return _checked("pattern", Constraint(grammar, tokenizer, limits))


def _checked(name: str, constraint: Constraint) -> Constraint:
    llguidance = needed("llguidance", extra="structured")
    tokenizer = _ll_tokenizer(constraint.tokenizer)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        constraint.grammar, tokenizer, limits=constraint.limits
    )
    expect(not is_error, name, "one that llguidance takes", " ".join(messages))
    return constraint


def _ll_tokenizer(tokenizer: Tokenizer, vocab_size: int | None = None) -> Any:
    """llguidance's view of a tokenizer; making one takes up to a second, so it is kept.

    Args:
      vocab_size: of the model; None = as many as there are tokens.
    """
    expect(isinstance(tokenizer, Tokenizer), "tokenizer", "a Tokenizer", type(tokenizer).__name__)
    size = tokenizer.vocab_size
    vocab_size = size if vocab_size is None else vocab_size
    expect(size <= vocab_size, "tokenizer", f"at most vocab_size={vocab_size} tokens", size)
    expect(len(tokenizer.eos_ids) > 0, "tokenizer", "one with a token that ends a text", "none")
    made = _LL_TOKENIZERS.setdefault(tokenizer, {})
    if vocab_size not in made:
        llguidance = needed("llguidance", extra="structured")
        made[vocab_size] = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
        )
    return made[vocab_size]
