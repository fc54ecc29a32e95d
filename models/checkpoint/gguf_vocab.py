# SPDX-License-Identifier: Apache-2.0
"""Builds the tokenizer that a GGUF file describes.

That is byte-level BPE with a named pre-tokeniser, or the BPE of SentencePiece.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jax_paged.checks.fields import ANYTHING, FLAG, TEXT, Domain, integer, list_of, number, short

from ..decoder.config import token_ids
from .outside import check_keys, reading
from .tokenizer import MissingTokenizer, Tokenizer

# How text is split before BPE runs in each piece. The patterns are those of the released
# tokenizers: Qwen2 takes digits one by one, Llama 3 up to three at a time.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(digits: str):
    pattern = Regex(_SPLIT.format(digits=digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre → (how to split, whether text is NFC-normalised, whether a piece that is a
# token as a whole skips the merges).
_PRE = {
    "gpt-2": (_gpt2, False, False),
    "smollm": (_single_digits, False, False),
    "qwen2": (lambda: _pattern(r"\p{N}"), True, False),
    "llama-bpe": (lambda: _pattern(r"\p{N}{1,3}"), False, True),
}
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"  # what stands for a space in the pieces of SentencePiece
_MOST_CHARACTERS = 1000  # of a piece; those of released vocabularies have some 30
# Tokens of Phi-3 that keep the spaces behind them. Its other control tokens take them away.
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_ID, _TEXTS = integer(0, 2**32 - 1), list_of(TEXT)
# The keys behind "tokenizer.ggml." that are read, or that change no id: names of ids for tools.
KEYS: dict[str, Domain] = {
    "model": TEXT,
    "pre": TEXT,
    "tokens": _TEXTS,
    "token_type": list_of(integer()),
    "scores": list_of(number(-1e38, 1e38)),
    "merges": _TEXTS,
    "add_bos_token": FLAG,
    "add_eos_token": FLAG,
    "add_sep_token": FLAG,
    "add_space_prefix": FLAG,
    **dict.fromkeys(
        ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id",
         "padding_token_id"],
        _ID,
    ),
    **dict.fromkeys(
        ["seperator_token_id", "mask_token_id", "fim_pre_token_id", "fim_suf_token_id",
         "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
         "prefix_token_id", "suffix_token_id", "middle_token_id"],
        ANYTHING,
    ),
}  # fmt: skip
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer | MissingTokenizer:
    """The tokenizer of a GGUF file's metadata; a MissingTokenizer says which part is not supported.

    Args:
      metadata: key → value; read are the keys tokenizer.ggml.{model, pre, tokens, token_type,
        scores, merges, bos_token_id, eos_token_id, unknown_token_id, padding_token_id,
        add_bos_token, add_eos_token, add_space_prefix}, tokenizer.chat_template and
        general.architecture.
      where: what messages call the file.

    Raises:
      ValueError: a value is of a wrong type, or the parts contradict each other.
    """
    domains = {f"tokenizer.ggml.{name}": domain for name, domain in KEYS.items()}
    check_keys(where, metadata, domains | {"tokenizer.chat_template": TEXT})
    start = "tokenizer.ggml."
    keys = {name[len(start) :]: x for name, x in metadata.items() if name.startswith(start)}
    if reason := _unsupported(keys):
        return MissingTokenizer(f"{where}: {reason}; token ids work")
    tokens, has_pieces = keys["tokens"], keys["model"] == "llama"
    keys.setdefault("token_type", [_NORMAL] * len(tokens))
    for name in ("token_type", "scores") if has_pieces else ("token_type",):
        if len(keys[name]) != len(tokens):
            raise ValueError(
                f"{where}: key 'tokenizer.ggml.{name}' must have {len(tokens)} entries, one for "
                f"each token, got {len(keys[name])}"
            )
    made_of = "scores" if has_pieces else "merges"
    with reading(f"{where}: keys 'tokenizer.ggml.tokens' and 'tokenizer.ggml.{made_of}'"):
        backend = _pieces(keys) if has_pieces else _byte_level(keys)
    strips = has_pieces and metadata.get("general.architecture") == "phi3"
    for kinds, add in (
        ((_UNKNOWN, _CONTROL), backend.add_special_tokens),
        ((_USER_DEFINED,), backend.add_tokens),
    ):
        add(
            [
                AddedToken(
                    token,
                    normalized=False,
                    special=kind != _USER_DEFINED,
                    rstrip=strips and kind == _CONTROL and token not in _KEEP_SPACES,
                )
                for token, kind in zip(tokens, keys["token_type"], strict=True)
                if kind in kinds
            ]
        )
    ids = {name: keys.get(f"{long}_token_id") for name, long in _NAMED.items()}
    adds_bos = keys.get("add_bos_token", has_pieces or keys.get("pre") == "llama-bpe")
    return Tokenizer(
        backend,
        prefix_ids=token_ids(ids["bos_token"] if adds_bos else None),
        eos_ids=token_ids(ids["eos_token"]),
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
    )


def _unsupported(keys: Mapping[str, Any]) -> str | None:
    """Why there is no tokenizer; keys: without "tokenizer.ggml."."""

    def wrong(name: str, wanted: str) -> str:
        return f"key 'tokenizer.ggml.{name}' must be {wanted}, got {short(keys.get(name))}"

    if (model := keys.get("model")) not in ("gpt2", "llama"):
        wanted = "'gpt2' (byte-level BPE) or 'llama' (SentencePiece) for text"
        return wrong("model", wanted)
    has_pieces = model == "llama"
    pres = ("default",) if has_pieces else tuple(_PRE)
    if keys.get("pre", pres[0]) not in pres:
        return wrong("pre", f"one of {', '.join(pres)} for text")
    for name in ("add_eos_token", "add_space_prefix", "add_sep_token"):
        if keys.get(name) and not (has_pieces and name == "add_space_prefix"):
            return wrong(name, "False for text")
    for name in keys:
        if name not in KEYS:
            return f"key {short('tokenizer.ggml.' + name)} is not supported"
    tokens, made_of = keys.get("tokens"), "scores" if has_pieces else "merges"
    if not tokens or not keys.get(made_of):
        return f"no tokenizer.ggml.tokens and {made_of}"
    for name, long in _NAMED.items():
        if (i := keys.get(f"{long}_token_id")) is not None and i >= len(tokens):
            return f"the id of {name} must be below {len(tokens)}, got {i}"
    if has_pieces and keys.get("unknown_token_id") is None:
        return wrong("unknown_token_id", "an id for text")
    if has_pieces and (longest := max(map(len, tokens))) > _MOST_CHARACTERS:
        return f"tokens must have at most {_MOST_CHARACTERS} characters for text, got {longest}"
    return None


def _byte_level(keys: Mapping[str, Any]) -> Backend:
    split, normalize, ignore_merges = _PRE[keys.get("pre", "gpt-2")]
    pairs = [tuple(merge.split(" ", 1)) for merge in keys["merges"]]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"expected pairs with a space between, got {short(wrong[0][0])}")
    vocab = {token: i for i, token in enumerate(keys["tokens"])}
    backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    if normalize:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = split()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def _pieces(keys: Mapping[str, Any]) -> Backend:
    """The BPE of SentencePiece: of all neighbours, those that make the best piece are joined first.

    `tokenizers` gives a rank to each pair instead. The pairs that make one piece get ranks beside
    each other, so only where two of them overlap may another one come first. A character that is
    no piece becomes its bytes. A space is put before a text, and behind each token that is no piece
    of text, as llama.cpp does.
    """
    tokens, types = keys["tokens"], keys["token_type"]
    scored = zip(tokens, keys["scores"], types, strict=True)
    score_of = {token: score for token, score, kind in scored if kind == _NORMAL}
    pairs = [
        (score, piece[:end], piece[end:])
        for piece, score in score_of.items()
        for end in range(1, len(piece))
        if piece[:end] in score_of and piece[end:] in score_of
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1])))
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[pair[1:] for pair in pairs],
            unk_token=tokens[keys["unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    has_prefix = keys.get("add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([*prefix, spaces])  # type: ignore[assignment]
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
