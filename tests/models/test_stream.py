# SPDX-License-Identifier: Apache-2.0
"""Text comes out whole characters at a time, and adds up to what the tokens say."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_paged.models.decoder.stream import TextStream, as_searches

TEXT = "caf\u00e9 \u20ac5 \U0001f600\U0001f680 na\u00efve \u4f60\u597d end"


def byte_level() -> tokenizers.Tokenizer:
    """One token per byte, as GPT-2 writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Words with a mark for the space, bytes for the rest, as Llama 2 does; drops a first space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(["\u2581caf", "\u2581na", "ve", "\u2581end"])}
    vocab |= {"\u2581": 260, "5": 261}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


FALLBACK_IDS = [
    256, *"\u00e9".encode(), 260, *"\u20ac".encode(), 261, 260, *"\U0001f600\U0001f680".encode(),
    257, *"\u00ef".encode(), 258, 260, *"\u4f60\u597d".encode(), 259,
]  # fmt: skip


def pieces_of(tokenizer, ids, prompt, group: int) -> list[str]:
    stream = TextStream(tokenizer.decode, prompt)
    pieces = [stream.push(ids[start : start + group]) for start in range(0, len(ids), group)]
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("group", [1, 2, 3, 7, 100])
def test_characters_split_over_tokens_come_whole(group):
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) == len(TEXT.encode())
    pieces = pieces_of(tokenizer, ids, tokenizer.encode("Hi: ").ids, group)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    if group == 1:
        assert [len(piece) for piece in pieces if piece] == [1] * len(TEXT)  # none is held back


@pytest.mark.parametrize("group", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("prompt", [[], [256], [256, *"\u4f60".encode()]])
def test_byte_fallback_tokens_keep_their_spaces_and_characters(group, prompt):
    tokenizer = byte_fallback()
    pieces = pieces_of(tokenizer, FALLBACK_IDS, prompt, group)
    expected = tokenizer.decode(prompt + FALLBACK_IDS).removeprefix(tokenizer.decode(prompt))
    assert "".join(pieces) == expected
    assert expected.strip() == TEXT
    assert expected.startswith(" ") == bool(prompt)
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_never_becomes_whole_comes_at_the_end():
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), [])
    assert stream.push([65, 0xE2, 0x82]) == "A"
    assert stream.push([]) == ""
    assert stream.finish() == "\ufffd"


def test_broken_bytes_do_not_hold_later_text_back():
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), [])
    assert stream.push([65, 0xFF]) == "A"
    assert stream.push([66]) == "\ufffdB"
    assert stream.push([67]) == "C"
    assert stream.finish() == ""


def test_long_texts_are_not_decoded_again_and_again():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    stream = TextStream(decode, [65] * 9)
    text = "".join(stream.push([66]) for _ in range(1000)) + stream.finish()
    assert text == "B" * 1000
    assert longest <= 10


def test_tokens_without_text_do_not_lose_the_space_behind_them():
    tokenizer = byte_fallback()
    stream = TextStream(lambda ids: tokenizer.decode([i for i in ids if i != 300]), [256])
    assert [stream.push([i]) for i in (300, 300, 259)] == ["", "", " end"]


STOPS = ["END", "N!", "\u00e9\u00e9", "aab"]


def up_to_stop(text: str) -> str:
    """What stands before the first of the STOPS that is complete."""
    for end in range(len(text) + 1):
        whole = [stop for stop in STOPS if text[:end].endswith(stop)]
        if whole:
            return text[: end - max(map(len, whole))]
    return text


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "text",
    [
        "an END.",
        "EN EEND",
        "EN!D",
        "caf\u00e9\u00e9 x",
        "aaaaab",
        "EN",
        "\u00e9",
        "END",
        "",
        "aaENb",
    ],
)
def test_text_ends_before_a_stop_string_wherever_its_tokens_end(text, group):
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    stream = TextStream(tokenizer.decode, tokenizer.encode("EN").ids, STOPS)
    told = ""
    for start in range(0, len(ids), group):
        told += stream.push(ids[start : start + group])
        assert up_to_stop(text).startswith(told)  # a start of a stop string is held back
    assert told + stream.finish() == up_to_stop(text)
    assert stream.stopped == (up_to_stop(text) != text)


def test_stop_strings_are_found_in_random_texts():
    rng = random.Random(0)
    tokenizer = byte_level()
    for _ in range(300):
        text = "".join(rng.choices("ENDab!\u00e9", k=rng.randrange(30)))
        ids = tokenizer.encode(text).ids
        stream, told = TextStream(tokenizer.decode, [], STOPS), ""
        while ids:
            size = rng.randrange(1, 4)
            told, ids = told + stream.push(ids[:size]), ids[size:]
        assert told + stream.finish() == up_to_stop(text)


@pytest.mark.parametrize(
    ("stop_strings", "decode", "message"),
    [
        ("END", str, r"^stop_strings: expected a list of texts that are not empty, got 'END'$"),
        (["a", ""], str, r"^stop_strings: expected a list of texts that are not empty, got"),
        ([5], str, r"^stop_strings: expected a list of texts that are not empty, got \[5\]$"),
        (["a"], None, r"^decode: expected a function from token ids to text, got None$"),
    ],
)
def test_bad_stop_strings_are_refused(stop_strings, decode, message):
    with pytest.raises(ValueError, match=message):
        as_searches([[1]], stop_strings, decode)
