# SPDX-License-Identifier: Apache-2.0
"""Builds the tokenizer that a GGUF file describes: byte-level BPE with a named pre-tokeniser."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jax_paged.checks.fields import ANYTHING, FLAG, TEXT, Domain, integer, list_of, short

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
_CONTROL, _USER_DEFINED = 3, 4
_ID, _TEXTS = integer(0, 2**32 - 1), list_of(TEXT)
# The keys behind "tokenizer.ggml." that are read, or that change no id: names of ids for tools.
KEYS: dict[str, Domain] = {
    "model": TEXT,
    "pre": TEXT,
    "tokens": _TEXTS,
    "token_type": list_of(integer()),
    "scores": ANYTHING,
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


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer | MissingTokenizer:
    """The tokenizer of a GGUF file's metadata; a MissingTokenizer says which part is not supported.

    Args:
      metadata: key → value; read are the keys tokenizer.ggml.{model, pre, tokens, token_type,
        merges, bos_token_id, eos_token_id, unknown_token_id, padding_token_id, add_bos_token,
        add_eos_token, add_space_prefix} and tokenizer.chat_template.
      where: what messages call the file.

    Raises:
      ValueError: a value is of a wrong type, or the parts contradict each other.
    """
    domains = {f"tokenizer.ggml.{name}": domain for name, domain in KEYS.items()}
    check_keys(where, metadata, domains | {"tokenizer.chat_template": TEXT})

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    if key("model") != "gpt2":
        return MissingTokenizer(
            f"{where}: key 'tokenizer.ggml.model' must be 'gpt2' (byte-level BPE) for text, got "
            f"{short(key('model'))}; token ids work"
        )
    pre = key("pre", "gpt-2")
    if pre not in _PRE:
        return MissingTokenizer(
            f"{where}: key 'tokenizer.ggml.pre' must be one of {', '.join(_PRE)} for text, got "
            f"{short(pre)}; token ids work"
        )
    for name in ("add_eos_token", "add_space_prefix", "add_sep_token"):
        if key(name, False):
            return MissingTokenizer(
                f"{where}: key 'tokenizer.ggml.{name}' must be False for text, got True; token "
                "ids work"
            )
    for name in metadata:
        if name.startswith("tokenizer.ggml.") and name[15:] not in KEYS:
            return MissingTokenizer(f"{where}: key {short(name)} is not supported; token ids work")
    tokens, merges = key("tokens"), key("merges")
    if not tokens or not merges:
        return MissingTokenizer(f"{where}: no tokenizer.ggml.tokens and merges; token ids work")
    types = key("token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"{where}: key 'tokenizer.ggml.token_type' must have {len(tokens)} entries, one for "
            f"each token, got {len(types)}"
        )
    split, normalize, ignore_merges = _PRE[pre]
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(
            f"{where}: key 'tokenizer.ggml.merges' must hold pairs with a space between, got "
            f"{short(wrong[0][0])}"
        )
    with reading(f"{where}: keys 'tokenizer.ggml.tokens' and 'tokenizer.ggml.merges'"):
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    if normalize:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = split()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    for kind, add in (
        (_CONTROL, backend.add_special_tokens),
        (_USER_DEFINED, backend.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == kind
            ]
        )
    ids = {
        name: key(f"{long}_token_id")
        for name, long in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    for name, i in ids.items():
        if i is not None and i >= len(tokens):
            return MissingTokenizer(
                f"{where}: the id of {name} must be below {len(tokens)}, got {i}; token ids work"
            )
    bos = ids["bos_token"] if key("add_bos_token", pre == "llama-bpe") else None
    return Tokenizer(
        backend,
        prefix_ids=token_ids(bos),
        eos_ids=token_ids(ids["eos_token"]),
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
    )
