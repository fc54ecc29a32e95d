# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of SentencePiece as GGUF files have it, and texts that ask much of it."""

import functools
import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = Path(__file__).parents[2] / "examples" / "studies" / "data" / "harbour.txt"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
HOSTILE = [
    "", " ", "  ", "a", " a", "  the  sea ", "the\n\nsea\t.", "\r\n", "\x00\x7f", "▁", "▁the▁ ▁",
    "the" * 70, "e" * 99, " " * 41, "naïve Ünïcode", "e\u0301", "日本語の港", "שלום 🙂",
    "👩\u200d👩\u200d👧", "<0x41>",
    "<0x0A><0xE2>", "<|end", "|user|>", "[PAD9]", "\u3000\u00a0\u2003x", "\ufeffthe", "\U0010ffff",
]  # fmt: skip
WITH_TOKENS = [
    "<s>", "</s></s>", "<s> the", "the<s>sea", "<unk>", "x <unk>y", "<|user|>\n the sea<|end|> \n",
    "<|user|><|end|>", "<|user|>  ", "  <|end|>the", "[tool] the [tool]  sea", "<<s>>",
]  # fmt: skip


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Of characters and pieces that often stand beside each other."""
    rng = np.random.default_rng(seed)
    tokens, _, types = vocabulary()
    parts = [t.replace("▁", " ") for t, kind in zip(tokens, types, strict=True) if kind == NORMAL]
    parts += ["é", "語", "\n", "  "]
    return ["".join(rng.choice(parts, rng.integers(1, 30))) for _ in range(count)]


@functools.cache
def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types: control tokens, bytes, pieces by their ranks, and characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    lines = TEXT.read_text(encoding="utf-8").splitlines()
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    merges = json.loads(trained.to_str())["model"]["merges"]
    pieces = ["▁▁", "▁▁▁▁", *dict.fromkeys(left + right for left, right in merges)]
    pieces += sorted({"▁", *"".join(lines)} - {" "})
    named = {
        "<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL,
        **{f"<0x{byte:02X}>": BYTE for byte in range(256)},
        **dict.fromkeys(pieces, NORMAL),
        "<|user|>": CONTROL, "<|end|>": CONTROL, "[tool]": USER_DEFINED, "[PAD9]": UNUSED,
    }  # fmt: skip
    ranks = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    return [*named], [ranks.get(token, 0.0) for token in named], [*named.values()]


def write_vocabulary(path: Path, architecture: str) -> None:
    """Writes a GGUF file that has the vocabulary and no tensors."""
    tokens, scores, types = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
