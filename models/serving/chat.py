# SPDX-License-Identifier: Apache-2.0
"""`jax-paged chat`: a conversation whose pages stay between turns.

The conversation is one row of a KV state. Before an answer the row is cut back to what it has in
common with the rendered conversation, most often all of it, and only the rest is prefilled.
Prompts go through chunks of three sizes, so that a few programs serve every turn.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_paged._start.command_line import model_options
from jax_paged._start.interrupt import raise_at_ctrl_c, uninterrupted
from jax_paged.ops.batch import pages_for

from ..checkpoint.tokenizer import MissingTokenizer, Tokenizer
from ..checkpoint.weights import open_checkpoint
from ..decoder.generation import PAGE_SIZE, Run, as_stops, check_count, create_state, make_state
from ..decoder.protocol import Model, split_model
from ..decoder.sample import Sampler
from ..decoder.steps import Reason
from ..decoder.stream import TextStream

_CHUNKS = (32, 128, 512)
_CONTEXT = 4096


def _chunk_size(num_tokens: int) -> int:
    return next(size for size in _CHUNKS if num_tokens <= size)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A turn: the new ids, why they end, and what it took.

    stop_reason: "stop_token", "length", "context_full" or "interrupted" (Ctrl-C).
    num_kept, num_prefilled: tokens of the prompt that the row held, and that went through the
      model; seconds: of decoding.
    """

    tokens: list[int]
    stop_reason: str
    num_kept: int
    num_prefilled: int
    seconds: float


class Conversation:
    """Messages, and the row of pages with what the model has seen of them.

    Args:
      model: a `Decoder` or any other `Model`.
      tokenizer: with a chat template.
      stop_tokens: ids that end an answer.
      context: most tokens of the conversation; at most the model's context_length.
      system: a message before the first turn.
      kv_dtype, seed, sampling: as for `generate`; each turn draws with the next seed.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | MissingTokenizer,
        *,
        stop_tokens: Sequence[int],
        context: int,
        system: str | None = None,
        kv_dtype: str = "auto",
        seed: int = 0,
        **sampling: Any,
    ):
        self.tokenizer, self.context = tokenizer, context
        self._parts, self._seed, self._sampling = split_model(model), seed, sampling
        self._stops = as_stops(stop_tokens, model.config)
        self._opening = [{"role": "system", "content": system}] if system else []
        num_pages = pages_for(context, PAGE_SIZE)

        def create():
            return create_state(
                model, num_pages=num_pages, max_seqs=1, pages_per_seq=num_pages, kv_dtype=kv_dtype
            )

        self._state = make_state(self._parts, create)
        self._held: list[int] = []  # the tokens in the row
        self.reset()

    def reset(self) -> None:
        """Forgets all turns."""
        self.messages: list[dict[str, str]] = list(self._opening)
        self.turn = 0

    def compile(self) -> None:
        """Compiles what short turns call; the model's weights may be shapes."""
        self._run(self.tokenizer.apply_chat([{"role": "user", "content": ""}]), 1, 0).compile()

    def answer(
        self, text: str, max_new_tokens: int, on_tokens: Callable[[list[int]], None]
    ) -> Answer:
        """Adds a message of the user and the model's answer to it.

        Args:
          on_tokens: called with the new ids as they come.

        Raises:
          ValueError: the conversation would not fit in the context. It is as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat(messages)
        room = self.context - len(prompt)
        if room < 1:
            raise ValueError(
                f"the context is full: the conversation would have {len(prompt)} tokens of "
                f"{self.context}; /reset starts a new one"
            )
        kept = self._cut_back(prompt)
        run = self._run(prompt, min(max_new_tokens, room), kept)
        try:
            run.prefill()
            run.decode(lambda new, _: on_tokens(new[0]))
        except KeyboardInterrupt:
            run.reasons = np.array([Reason.INTERRUPTED], np.int32)
        with uninterrupted():
            self._state, tokens = run.state, run.tokens[0]
            self._held = [*prompt, *tokens][: int(run.state.table.seq_lens[0])]
            content = self.tokenizer.decode(tokens)
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self.turn += 1
        reason = Reason(run.reasons[0]).name.lower()
        if reason == "length" and len(tokens) == room < max_new_tokens:
            reason = "context_full"
        return Answer(tokens, reason, kept, len(prompt) - kept, run.seconds["decode"])

    def _cut_back(self, prompt: list[int]) -> int:
        """Cuts the row to what it has in common with the prompt's tokens before the last one."""
        kept = 0
        while kept < min(len(self._held), len(prompt) - 1) and self._held[kept] == prompt[kept]:
            kept += 1
        dropped = len(self._held) - kept
        if dropped:
            with uninterrupted():
                table, _ = _truncate(self._state.table, np.array([dropped], np.int32))
                self._state = self._state.replace(table=table)
                self._held = self._held[:kept]
        return kept

    def _run(self, prompt: list[int], limit: int, held: int) -> Run:
        seed = (self._seed + self.turn) % 2**32
        return Run(
            self._parts, self._state, [np.array(prompt, np.int32)], np.zeros(1, np.int32),
            np.array([limit], np.int32), self._stops, Sampler.create(**self._sampling, seed=seed),
            held=held, keep=True, chunk_size=_chunk_size,
        )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """`jax-paged chat`; returns the exit code."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(options, name) for name in names}
    Sampler.create(**sampling)  # bad options should not wait for the weights
    check_count("max-new-tokens", options.max_new_tokens, 1)
    if options.context is not None:
        check_count("context", options.context, 1)
    checkpoint = open_checkpoint(**model_options(options))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    context = options.context or options.context_length or _CONTEXT
    arguments: dict[str, Any] = sampling | {
        "stop_tokens": sorted({*config.eos_token_ids, *tokenizer.eos_ids}),
        "context": min(config.context_length, context),
        "system": options.system,
        "kv_dtype": options.kv_dtype,
    }
    options.status.tell(checkpoint.title)
    model = checkpoint.load_and(
        lambda shapes: Conversation(shapes, tokenizer, **arguments).compile(),
        lambda: options.status.say("compiling …"),
    )
    conversation = Conversation(model, tokenizer, **arguments)
    options.status.clear()
    raise_at_ctrl_c()
    for line in _lines():
        if line.strip() == "/quit":
            break
        if line.strip() == "/reset":
            conversation.reset()
            _say("a new conversation")
        elif line.startswith("/") and line[1:].strip().isalpha():
            _say(f"unknown command {line.strip()}: expected /reset or /quit")
        elif line.strip():
            _turn(conversation, line, options.max_new_tokens)
    return 0


def _turn(conversation: Conversation, line: str, max_new_tokens: int) -> None:
    """Answers one line on stdout, and says on stderr what it took."""
    stream = TextStream(conversation.tokenizer.decode, [])
    shown = 0

    def show(ids: list[int]) -> None:
        nonlocal shown
        with uninterrupted():
            shown += len(ids)
            print(stream.push(ids), end="", flush=True)

    try:
        line.encode()
        answer = conversation.answer(line, max_new_tokens, show)
    except UnicodeEncodeError:
        _say(f"expected UTF-8 text, got {line!r}")
        return
    except ValueError as error:
        _say(str(error))
        return
    with uninterrupted():
        print(stream.push(answer.tokens[shown:]) + stream.finish(), flush=True)
        _say(_status_line(conversation.turn, answer, max_new_tokens))


def _status_line(turn: int, answer: Answer, max_new_tokens: int) -> str:
    count = len(answer.tokens)
    parts = [
        f"{answer.num_kept} tokens kept", f"{answer.num_prefilled} prefilled",
        f"{count} generated",
    ]  # fmt: skip
    if answer.seconds > 0:
        parts.append(f"{count / answer.seconds:.1f} tokens/s")
    why = {
        "interrupted": "interrupted",
        "length": f"cut at {max_new_tokens} tokens (--max-new-tokens)",
        "context_full": "the context is full: /reset starts a new conversation",
    }.get(answer.stop_reason)
    return f"turn {turn}: {', '.join(parts)}" + (f"; {why}" if why else "")


def _lines() -> Iterator[str]:
    """What the user types, or the lines of a pipe or file."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input edits lines with it)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _say("/quit or Ctrl-D ends the chat")


def _say(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)


@jax.jit
def _truncate(table, num_tokens):
    table, _, status = table.truncate(np.zeros(1, np.int32), num_tokens)
    return table, status
