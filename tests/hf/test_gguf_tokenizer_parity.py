# SPDX-License-Identifier: Apache-2.0
"""The SentencePiece vocabulary of a GGUF file: our ids and texts against those of transformers."""

from gguf_pieces import HOSTILE, random_texts, write_vocabulary

from jax_paged.models.checkpoint.gguf_file import GGUFFile


def test_a_vocabulary_of_phi3_gives_the_ids_of_transformers(transformers, tmp_path):
    write_vocabulary(tmp_path / "model.gguf", "phi3")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = GGUFFile(tmp_path / "model.gguf").tokenizer()
    for text in [*HOSTILE, *random_texts(300, seed=1), "<s>the", "the <s>  sea", "[tool] x [tool]"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
