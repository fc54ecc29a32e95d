# SPDX-License-Identifier: Apache-2.0
"""What a model thinks of each token of one text: its log-probability, or all logits."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_paged._start.interrupt import uninterrupted
from jax_paged.cache.state import KVState
from jax_paged.checks import expect

from ..decoder.generation import as_tokens, check_count, state_for
from ..decoder.protocol import Graph, Model, run_model, split_model
from ..decoder.sample import log_softmax_at
from ..decoder.steps import chunk_size


def score(
    model: Model, tokens: Sequence[int], *, chunk: int = 512, kv_dtype: str = "auto"
) -> np.ndarray:
    """Log-probabilities of the tokens of one text: log p(tokens[t + 1] | tokens[: t + 1]).

    Computed on the device, chunk by chunk through the paged path; only the result leaves it.

    Args:
      model: a `Decoder`, e.g. from `load_checkpoint`, or any other `Model`.
      tokens: ids, at least one and at most the model's context_length.
      chunk: tokens per forward step, ≥ 1.
      kv_dtype: of K and V, as for `generate`.

    Returns:
      f32[len(tokens) − 1] on the host, natural logarithms; number t is that of token t + 1.

    Raises:
      ValueError: a token id is out of range, or the text is too long.
    """
    (graph, params), text, state = _begin(model, tokens, chunk, kv_dtype)
    log_p = np.empty(len(text) - 1, np.float32)
    for start, part, count in _parts(text[:-1], chunk):
        targets, _ = padded(text[start + 1 : start + 1 + chunk])
        with uninterrupted():  # Ctrl-C must not leave XLA compiling
            state, some = losses(graph, params, state, part, count, targets)
        stop = min(start + chunk, len(log_p))
        log_p[start:stop] = -np.asarray(some)[: stop - start]
    return log_p


def token_logits(
    model: Model, tokens: Sequence[int], *, chunk: int = 512, kv_dtype: str = "auto"
) -> np.ndarray:
    """Logits of one text for every token of the vocabulary: the array that `score` never makes.

    It has 4 · len(tokens) · vocab_size bytes: 200 MB for 1,000 tokens of a vocabulary of 50,000.

    Args:
      model, tokens, chunk, kv_dtype: as for `score`.

    Returns:
      f32[len(tokens), vocab_size] on the host; row t holds the logits of token t + 1.

    Raises:
      ValueError: as `score`.
    """
    (graph, params), text, state = _begin(model, tokens, chunk, kv_dtype)
    logits = np.empty((len(text), model.config.vocab_size), np.float32)
    for start, part, count in _parts(text, chunk):
        with uninterrupted():
            state, some = _logits(graph, params, state, part, count)
        stop = min(start + chunk, len(text))
        logits[start:stop] = np.asarray(some)[: stop - start]
    return logits


def _begin(
    model: Model, tokens: Sequence[int], chunk: int, kv_dtype: str
) -> tuple[tuple[Graph, Any], np.ndarray, KVState]:
    """The parts of the model, the checked text, and a state with room for it in row 0."""
    parts, config = split_model(model), model.config
    text = as_tokens("tokens", tokens, config.vocab_size)
    check_count("chunk", chunk, 1)
    length = f"at most context_length={config.context_length} tokens"
    expect(len(text) <= config.context_length, "tokens", length, len(text))
    state, _ = state_for(model, [len(text)], kv_dtype).reserve([0], len(text))
    return parts, text, state


def _parts(text: np.ndarray, chunk: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first token, `padded` tokens) of each chunk."""
    for start in range(0, len(text), chunk):
        yield start, *padded(text[start : start + chunk])


def padded(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens padded to a size that is compiled once, their number as i32[1])."""
    padded = np.zeros(chunk_size(len(tokens)), np.int32)
    padded[: len(tokens)] = tokens
    return padded, np.array([len(tokens)], np.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _logits(
    graph: Graph, params: Any, state: KVState, tokens: Int[Array, "tokens"], count: Int[Array, "1"]
) -> tuple[KVState, jax.Array]:
    """Appends `count` tokens to row 0: the state and f32[tokens, vocab_size]."""
    row = jnp.zeros(1, jnp.int32)
    state, batch, _ = state.step(row, count, num_tokens=tokens.shape[0])
    logits, state = run_model(graph, params, tokens, batch, state)
    return state, logits


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def losses(
    graph: Graph, params: Any, state: KVState, tokens: Int[Array, "tokens"],
    count: Int[Array, "1"], targets: Int[Array, "tokens"],
) -> tuple[KVState, jax.Array]:  # fmt: skip
    """Appends `count` tokens to row 0: the state and −log p(targets), f32[tokens]."""
    state, logits = _logits(graph, params, state, tokens, count)
    return state, -log_softmax_at(logits, targets[:, None])[:, 0]
