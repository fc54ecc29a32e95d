# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a peer: a GGUF file, any number of rows in one call, through its C API.

`pip install llama-cpp-python` builds it for this processor.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import limits
import numpy as np


@functools.cache
def _model(file: Path):
    import llama_cpp
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    return llama_cpp.llama_model_load_from_file(os.fsencode(file), params)


class _Rows:
    """Rows of a KV cache, each a sequence of its own."""

    def __init__(self, file: Path, num_rows: int, most_tokens: int):
        import llama_cpp

        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_rows
        params.n_ctx = num_rows * -(-most_tokens // 256) * 256  # it rounds a row up to 256 anyway
        params.n_batch = params.n_ubatch = max(most_tokens, num_rows)
        params.n_threads = params.n_threads_batch = limits.NUM_THREADS
        params.kv_unified = False  # what its header advises for rows that share no prefix
        self.lib = llama_cpp
        self.context = llama_cpp.llama_init_from_model(_model(file), params)
        vocabulary = llama_cpp.llama_model_get_vocab(_model(file))
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def feed(self, tokens: Sequence[tuple[int, int, int]], *, every: bool = False) -> None:
        """One call with (token, position, row) for each token.

        Logits are for `every` token, or the last of each row.
        """
        batch = self.batch
        batch.n_tokens = len(tokens)
        last = {row: i for i, (_, _, row) in enumerate(tokens)}
        for i, (token, position, row) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, every or last[row] == i
        status = self.lib.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode gave {status}"

    def greedy(self, index: int) -> int:
        """The most likely token behind token `index` of the call before."""
        logits = self.lib.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def losses(self, tokens: Sequence[int]) -> np.ndarray:
        """−log p of each token of a text but the first, in nats; it fills row 0."""
        self.cut(0, 0)
        self.feed([(token, i, 0) for i, token in enumerate(tokens)], every=True)
        found = self.lib.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(found, (len(tokens), self.vocab_size))[:-1].astype(
            np.float64
        )
        top = logits.max(1)
        log_sum = top + np.log(np.exp(logits - top[:, None]).sum(1))
        return log_sum - logits[np.arange(len(tokens) - 1), np.asarray(tokens[1:])]

    def cut(self, row: int, length: int) -> None:
        """Drops the tokens of a row from `length` on."""
        self.lib.llama_memory_seq_rm(self.memory, row, length, -1)


def losses(file: Path, pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """−log p of each token but the first of each piece of a text, one behind the other, in nats."""
    rows = _Rows(file, 1, max(map(len, pieces)))
    return np.concatenate([rows.losses(piece) for piece in pieces])


def calls(
    file: Path, batch: int, context: int, steps: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(decode of `steps` tokens for each of `batch` rows of `context` tokens, prefill of a row)."""
    rows = _Rows(file, batch, context + steps)
    prompts = np.random.default_rng(0).integers(0, rows.vocab_size, (batch, context)).tolist()
    filled = False

    def prefill(row: int = 0):
        rows.cut(row, 0)
        rows.feed([(token, i, row) for i, token in enumerate(prompts[row])])

    def decode():
        nonlocal filled
        for row in () if filled else range(batch):
            prefill(row)
        filled = True
        tokens = [prompt[-1] for prompt in prompts]
        for step in range(steps):
            rows.feed([(token, context + step, row) for row, token in enumerate(tokens)])
            tokens = [rows.greedy(row) for row in range(batch)]
        for row in range(batch):
            rows.cut(row, context)

    return decode, prefill
