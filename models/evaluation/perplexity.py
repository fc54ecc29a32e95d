# SPDX-License-Identifier: Apache-2.0
"""The perplexity of a text of any length."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_paged._start.interrupt import uninterrupted
from jax_paged.checks import expect

from ..decoder.generation import as_tokens, check_count, check_window, state_for
from ..decoder.protocol import Model, row_limit, split_model
from ..decoder.steps import prefill
from .scores import losses, padded


def evaluate(
    model: Model,
    tokens: Sequence[int],
    *,
    chunk: int = 512,
    context: int | None = None,
    stride: int | None = None,
    window: int | None = None,
    num_pinned: int = 0,
    kv_dtype: str = "auto",
    on_progress: Callable[[int], object] = lambda predicted: None,
) -> dict[str, Any]:
    """Perplexity of a text: exp of the mean of −log p(token | the tokens before it).

    Each token but the first is predicted once. A text longer than `context` is cut into pieces of
    `context` tokens, each `stride` further on than the one before, that predict only the tokens
    that no earlier piece has: so each prediction sees at least context − stride tokens, save at
    the start of the text. Smaller strides see more and take longer.

    Args:
      model: a `Decoder`, e.g. from `load_checkpoint`, or any other `Model`.
      tokens: ids, at least two.
      chunk: tokens per forward step, ≥ 1.
      context: most tokens that a prediction sees; None = the model's context_length. More with a
        window alone that lies within it, of a `Decoder`.
      stride: None = half of the context; at most the context.
      window, num_pinned: as for `Engine`: most tokens that a token sees within its piece of the
        text, and those of them at its start that all see. What the cache then forgets costs.
      kv_dtype: of K and V, as for `generate`.
      on_progress: called after each step with the number of tokens that it predicted.

    Returns:
      perplexity, nll (its logarithm, nats per token), predicted (how many tokens that is the mean
      of), tokens (len(tokens)), context, stride, window and num_pinned.

    Raises:
      ValueError: a token id or an option is out of range.
    """
    (graph, params), config = split_model(model), model.config
    text = as_tokens("tokens", tokens, config.vocab_size)
    expect(len(text) >= 2, "tokens", "at least 2 tokens, one to predict", len(text))
    check_count("chunk", chunk, 1)
    context = config.context_length if context is None else context
    check_count("context", context, 1)
    check_window(window, num_pinned)
    most = row_limit(model, window)
    if most is not None:
        expect(context <= most, "context", f"at most context_length={most}", context)
    stride = max(context // 2, 1) if stride is None else stride
    check_count("stride", stride, 1)
    expect(stride <= context, "stride", f"at most context={context}", stride)
    pieces = list(plan_pieces(len(text), context, stride))
    longest = max(piece.stop - piece.start for piece in pieces)
    state = state_for(model, [longest], kv_dtype, windows=window is not None)
    row = np.zeros(1, np.int32)
    total = 0.0
    for piece in pieces:
        state, _ = state.reset().reserve(row, piece.stop - piece.start)
        if window is not None:
            state, _ = state.set_window(row, window, num_pinned)
        for start in range(piece.start, piece.first, chunk):
            stop = min(start + chunk, piece.first)
            part, count = padded(text[start:stop])
            with uninterrupted():
                state = prefill(graph, params, state, row, count, part)
        for start in range(piece.first, piece.stop, chunk):
            stop = min(start + chunk, piece.stop)
            part, count = padded(text[start:stop])
            targets, _ = padded(text[start + 1 : stop + 1])
            with uninterrupted():
                state, some = losses(graph, params, state, part, count, targets)
            total += float(np.sum(np.asarray(some)[: stop - start], dtype=np.float64))
            on_progress(stop - start)
    nll = total / (len(text) - 1)
    return {
        "perplexity": math.exp(nll) if nll < 700 else math.inf,
        "nll": nll,
        "predicted": len(text) - 1,
        "tokens": len(text),
        "context": context,
        "stride": stride,
        "window": window,
        "num_pinned": num_pinned,
    }


class Piece(NamedTuple):
    """The tokens [start, stop) go in; those of [first, stop) predict the token after them."""

    start: int
    first: int
    stop: int


def plan_pieces(num_tokens: int, context: int, stride: int) -> Iterator[Piece]:
    """Pieces of at most `context` tokens that predict every token but the first just once.

    >>> [tuple(piece) for piece in plan_pieces(8, 4, 2)]
    [(0, 0, 4), (2, 4, 6), (3, 6, 7)]
    """
    first, stop = 0, min(context, num_tokens - 1)
    while first < stop:
        yield Piece(stop - min(context, stop), first, stop)
        first, stop = stop, min(stop + stride, num_tokens - 1)
