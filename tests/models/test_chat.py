# SPDX-License-Identifier: Apache-2.0
"""A conversation: pages kept between turns, answers as if the whole of it were new each time."""

import argparse
import io
import signal

import numpy as np
import pytest
from opened import Opened
from tiers import first_of
from tiny_checkpoint import byte_tokenizer

from jax_paged.models import generate
from jax_paged.models.checkpoint.tokenizer import Tokenizer
from jax_paged.models.decoder import steps
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.model import Decoder
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving import chat
from jax_paged.models.serving.chat import Conversation
from jax_paged.models.status import Status
from jax_paged.models.testing import small_config

CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def model():
    config = small_config("llama", vocab_size=257, max_position_embeddings=CONTEXT)
    return Decoder(config, random_source(config, 5))


def tokenizer_with(template: str = TEMPLATE) -> Tokenizer:
    """Its tokens are the 256 bytes and <eos>."""
    return Tokenizer(byte_tokenizer(), chat_template=template)


def conversation_of(model, template=TEMPLATE, **options):
    options = {"stop_tokens": [256], "context": CONTEXT} | options
    return Conversation(model, tokenizer_with(template), **options)


def answer(conversation, text, max_new_tokens=9):
    """The answer, whose ids must have come in pieces, too."""
    pieces = []
    result = conversation.answer(text, max_new_tokens, pieces.extend)
    assert pieces == result.tokens
    return result


def from_scratch(model, conversation, text, max_new_tokens=9, kv_dtype="auto", **options):
    """What the whole conversation with this message gives when nothing is kept."""
    messages = [*conversation.messages, {"role": "user", "content": text}]
    prompt = conversation.tokenizer.apply_chat(messages)
    state = create_state(model, num_pages=16, max_seqs=1, pages_per_seq=16, kv_dtype=kv_dtype)
    options = {"stop_tokens": [256], "max_new_tokens": max_new_tokens, "state": state} | options
    return prompt, generate(model, [prompt], **options).tokens[0]


@pytest.mark.parametrize("kv_dtype", first_of(["auto", "int8"], 1))
def test_answers_equal_those_from_the_whole_conversation(model, kv_dtype):
    conversation = conversation_of(model, system="be brief", kv_dtype=kv_dtype)
    for turn, text in enumerate(["Hello", "and a much longer message " * 2, "?", "bye"]):
        prompt, want = from_scratch(model, conversation, text, kv_dtype=kv_dtype)
        got = answer(conversation, text)
        assert got.tokens == want
        assert got.num_kept + got.num_prefilled == len(prompt)
        assert (got.num_kept > 0) == (turn > 0)


class Letters:
    """A tokenizer whose every id is a letter of its own, so that text and ids never differ."""

    def decode(self, ids):
        return "".join(chr(0x100 + i) for i in ids)

    def apply_chat(self, messages):
        text = "".join(f"[{m['role'][0]}]{m['content']}" for m in messages) + "[a]"
        return [ord(letter) % 0x100 for letter in text]


def test_only_the_new_turn_is_prefilled(model):
    conversation = Conversation(model, Letters(), stop_tokens=[], context=CONTEXT)
    held = 0
    for text in ("Hello", "again", "bye"):
        got = answer(conversation, text, 9)
        assert got.num_kept == held
        # "[a]" of the turn before is held, its last token was not fed.
        assert got.num_prefilled == len(f"[u]{text}[a]") + (held > 0)
        held += got.num_prefilled + 9 - 1


def test_a_template_that_rewrites_earlier_turns_is_prefilled_from_there(model):
    template = "{{ messages | length }}" + TEMPLATE  # the first token differs each turn
    conversation = conversation_of(model, template)
    for text in ("Hello", "again", "bye"):
        _, want = from_scratch(model, conversation, text)
        got = answer(conversation, text)
        assert (got.tokens, got.num_kept) == (want, 0)


def test_draws_differ_from_turn_to_turn_and_repeat_with_the_seed(model):
    def talk():
        conversation = conversation_of(model, temperature=1.0, seed=3)
        return [answer(conversation, text).tokens for text in ("Hello", "again")]

    first, again = talk(), talk()
    assert first == again
    conversation = conversation_of(model, temperature=1.0, seed=3)
    answer(conversation, "Hello")
    _, want = from_scratch(model, conversation, "again", temperature=1.0, seed=4)
    assert first[1] == want


def test_a_full_context_is_said_and_reset_makes_room(model):
    conversation = conversation_of(model, context=64)
    with pytest.raises(ValueError, match=r"the context is full: .* 7\d tokens of 64; /reset"):
        conversation.answer("x" * 64, 4, lambda ids: None)
    assert conversation.messages == []
    cut = answer(conversation, "x" * 50, 50)
    assert cut.stop_reason in ("context_full", "stop_token")
    with pytest.raises(ValueError, match="the context is full"):
        conversation.answer("more", 4, lambda ids: None)
    conversation.reset()
    _, want = from_scratch(model, conversation, "Hello")
    got = answer(conversation, "Hello")
    assert got.tokens == want
    assert got.stop_reason == "length"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(model):
    conversation = conversation_of(model)
    answer(conversation, "Hello")
    _, want = from_scratch(model, conversation, "again", 40)
    pieces = []

    def take(ids):
        pieces.extend(ids)
        if len(pieces) >= 3:
            signal.raise_signal(signal.SIGINT)

    got = conversation.answer("again", 40, take)
    assert got.stop_reason == "interrupted"
    assert 3 <= len(got.tokens) < 40
    assert got.tokens == want[: len(got.tokens)]
    text = conversation.tokenizer.decode(got.tokens)
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    _, want = from_scratch(model, conversation, "bye")
    assert answer(conversation, "bye").tokens == want


def test_turns_of_any_length_share_a_few_programs(model):
    conversation = conversation_of(model)
    answer(conversation, "Hello")
    answer(conversation, "again")
    before = steps.prefill._cache_size(), steps.decode._cache_size()
    for text in ("a", "four", "some more words", "x"):
        answer(conversation, text, 5)
    assert (steps.prefill._cache_size(), steps.decode._cache_size()) == before


@pytest.fixture
def talk(model, monkeypatch, capsys):
    """Runs `jax-paged chat` on lines of stdin: (exit code, stdout, lines of stderr)."""

    def run(lines, **options):
        monkeypatch.setattr(
            chat, "open_checkpoint", lambda *_, **__: Opened(model, tokenizer_with())
        )
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        values = {
            "model": None, "base": None, "dtype": None, "weight_dtype": None,
            "context_length": None, "tp": None, "dp": None, "pp": None, "kv_dtype": "auto",
            "temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "seed": 0,
            "system": None,
            "max_new_tokens": 6, "context": None, "status": Status(),
        }  # fmt: skip
        code = chat.run(argparse.Namespace(**values | options))
        out, err = capsys.readouterr()
        title, *told = err.splitlines()
        assert title == Opened.title
        return code, out, told

    return run


def test_a_pipe_is_a_conversation_of_its_lines(model, talk):
    code, out, err = talk("Hello\n\nagain\n")
    conversation = conversation_of(model)
    answers = [answer(conversation, text, 6) for text in ("Hello", "again")]
    decode = conversation.tokenizer.decode
    assert code == 0
    assert out == "".join(decode(x.tokens) + "\n" for x in answers)
    for turn, (line, x) in enumerate(zip(err, answers, strict=True), 1):
        start = f"[turn {turn}: {x.num_kept} tokens kept, {x.num_prefilled} prefilled, 6 generated"
        assert line.startswith(start)
        assert "tokens/s; cut at 6 tokens (--max-new-tokens)]" in line


def test_reset_quit_and_unknown_commands(model, talk):
    code, out, err = talk("Hello\n/rest\n/reset\nHello\n/quit\nnever\n")
    conversation = conversation_of(model)
    want = conversation.tokenizer.decode(answer(conversation, "Hello", 6).tokens)
    assert (code, out) == (0, (want + "\n") * 2)
    assert err[1:3] == [
        "[unknown command /rest: expected /reset or /quit]",
        "[a new conversation]",
    ]
    assert [line.startswith("[turn 1: ") for line in err] == [True, False, False, True]


@pytest.mark.parametrize("options", [{}, {"context": 60}, {"context_length": 60}])
def test_a_message_that_does_not_fit_is_said_and_the_chat_goes_on(talk, options):
    code, out, err = talk("x" * (70 if options else 300) + "\nHello\n", **options)
    assert code == 0
    assert err[0].startswith("[the context is full: ")
    assert err[1].startswith("[turn 1: ")
    assert out.count("\n") >= 1


def test_bad_options_do_not_wait_for_the_weights(talk, monkeypatch):
    with pytest.raises(ValueError, match="context: expected an integer >= 1, got 0"):
        talk("", context=0)
    with pytest.raises(ValueError, match="max-new-tokens: expected an integer >= 1, got 0"):
        talk("", max_new_tokens=0)


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_ctrl_d_leaves(monkeypatch, capsys):
    typed = iter(["Hello", KeyboardInterrupt, "more", EOFError])

    def read(prompt):
        value = next(typed)
        if isinstance(value, str):
            return value
        raise value

    monkeypatch.setattr("builtins.input", read)
    stdin = io.StringIO()
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", stdin)
    assert list(chat._lines()) == ["Hello", "more"]
    assert "[/quit or Ctrl-D ends the chat]" in capsys.readouterr().err


def test_chunks_have_three_sizes():
    assert {chat._chunk_size(n) for n in range(1, 513)} == {32, 128, 512}
    assert np.all([chat._chunk_size(n) >= n for n in range(1, 513)])
