# SPDX-License-Identifier: Apache-2.0
"""SentencePiece in GGUF files, beside its algorithm in plain Python, and what is refused."""

import itertools
import re

import pytest
from gguf_pieces import (
    BYTE,
    CONTROL,
    HOSTILE,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WITH_TOKENS,
    random_texts,
    vocabulary,
    write_vocabulary,
)

from jax_paged.models.checkpoint.gguf_file import GGUFFile
from jax_paged.models.checkpoint.gguf_vocab import tokenizer_from_gguf
from jax_paged.models.decoder.stream import TextStream

TOKENS, SCORES, TYPES = vocabulary()


def metadata(**changes):
    names = {
        "model": "llama", "tokens": TOKENS, "scores": SCORES, "token_type": TYPES,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in (names | changes).items()}


def tokenizer(**changes):
    return tokenizer_from_gguf(metadata(add_bos_token=False, **changes), "file")


def by_scores(text, *, has_prefix=True, strips=()):
    """SentencePiece: joins the neighbours whose piece has the best score, the left ones first.

    strips: tokens that take away the space behind them.
    """
    whole = [t for t, k in zip(TOKENS, TYPES, strict=True) if k in (UNKNOWN, CONTROL, USER_DEFINED)]
    pattern = "|".join(re.escape(token) for token in sorted(whole, key=len, reverse=True))
    ids, before = [], None
    for part in re.split(f"({pattern})", text):
        if part in whole:
            ids.append(TOKENS.index(part))
        else:
            part = part.lstrip() if before in strips else part
            ids += joined(" " + part if has_prefix and part else part)
        before = part
    return ids


def joined(text):
    known = zip(TOKENS, SCORES, TYPES, strict=True)
    score_of = {token: score for token, score, kind in known if kind == NORMAL}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = enumerate(left + right for left, right in itertools.pairwise(parts))
        found = [(score_of[piece], -at) for at, piece in pairs if piece in score_of]
        if not found:
            break
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        names = [part] if part in score_of else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [TOKENS.index(name) for name in names]
    return ids


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_text_has_the_ids_that_scores_give(has_prefix):
    ours = tokenizer(add_space_prefix=has_prefix)
    for text in HOSTILE + WITH_TOKENS + random_texts(300):
        assert ours.encode(text) == by_scores(text, has_prefix=has_prefix), repr(text)


def test_a_text_comes_back_whole():
    ours = tokenizer()
    for text in HOSTILE + random_texts(100):
        ids = ours.encode(text)
        assert ours.decode(ids) == text.replace("▁", " ")
        stream = TextStream(ours.decode, ours.encode("x"))
        assert "".join(stream.push([i]) for i in ids) == " " * bool(text) + text.replace("▁", " ")


def test_control_tokens_of_phi3_take_away_the_space_behind_them():
    known = metadata(add_bos_token=False) | {"general.architecture": "phi3"}
    ours = tokenizer_from_gguf(known, "file")
    for text in WITH_TOKENS:
        want = by_scores(text, strips=("</s>", "<|user|>", "<|end|>"))
        assert ours.encode(text) == want, repr(text)


def test_a_file_gives_the_start_token_and_the_end_token(tmp_path):
    write_vocabulary(tmp_path / "model.gguf", "llama")
    ours = GGUFFile(tmp_path / "model.gguf").tokenizer()
    assert ours.encode("the sea") == [1, *by_scores("the sea")]
    assert (ours.eos_ids, ours.vocab_size) == ((2,), len(TOKENS))
    assert ours.named_tokens["bos_token"] == "<s>"
    assert ours.decode([1, *by_scores("the sea"), 2]) == "the sea"
    assert tokenizer_from_gguf(metadata(), "file").encode("") == [1]  # where the file does not say


def test_without_bytes_what_is_no_piece_is_one_unknown_token():
    types = [UNUSED if kind == BYTE else kind for kind in TYPES]
    ours = tokenizer(token_type=types)
    assert ours.encode("a語語🙂b") == [*by_scores("a"), 0, *by_scores("b", has_prefix=False)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "llama-bpe"}, "key 'tokenizer.ggml.pre' must be one of default for text"),
        ({"add_eos_token": True}, "key 'tokenizer.ggml.add_eos_token' must be False for text"),
        ({"remove_extra_whitespaces": True}, "'tokenizer.ggml.remove_extra_whitespaces' is not su"),
        ({"scores": []}, "no tokenizer.ggml.tokens and scores"),
        ({"unknown_token_id": None}, "unknown_token_id' must be an id for text, got None"),
        ({"unknown_token_id": 9999}, f"id of unk_token must be below {len(TOKENS)}, got 9999"),
        (
            {"tokens": ["x" * 1001, *TOKENS[1:]]},
            "tokens must have at most 1000 characters for text, got 1001",
        ),
    ],
)
def test_what_is_not_supported_is_said_when_text_is_needed(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer_from_gguf(metadata(**changes), "file").encode("text")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": SCORES[1:]}, f"scores' must have {len(TOKENS)} entries, one for each token, g"),
        ({"scores": ["a"]}, "key 'tokenizer.ggml.scores' must be a list, each entry a number"),
        ({"scores": [float("nan")]}, "key 'tokenizer.ggml.scores' must be a list, each entry a n"),
    ],
)
def test_what_is_broken_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"^file: .*{re.escape(message)}"):
        tokenizer_from_gguf(metadata(**changes), "file")
