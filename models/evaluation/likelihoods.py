# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds continuations of texts: many at once, what they share computed once.

A step feeds tokens of many texts (`shared_texts`), computes the logits that something is predicted
from, and keeps of them what is asked for: log p of a target and whether it is the likeliest token.
Host and device work side by side: no plan depends on a result, and results are read two steps
behind.
"""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged._start.interrupt import uninterrupted
from jax_paged.cache.state import KVState
from jax_paged.checks import expect
from jax_paged.ops.batch import pages_for

from ..decoder.executables import compiled
from ..decoder.generation import PAGE_SIZE, as_tokens, check_count, create_state
from ..decoder.log_sum_exp import log_sum_exp
from ..decoder.protocol import Graph, Model, check_model, run_model, split_model
from ..progress import progress_bar
from .shared_texts import Orders, Schedule, in_sizes, share_texts

_BEHIND = 2  # steps that are dispatched before the oldest is read back
_POOL_PAGES = 512


class LogLikelihood(NamedTuple):
    """Of a continuation.

    log_p: the natural logarithm of its probability: the sum over its tokens of log p(token | all
      before it).
    is_greedy: whether each of its tokens is the likeliest one in its place.
    """

    log_p: float
    is_greedy: bool


def loglikelihoods(
    model: Model,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    context: int | None = None,
    chunk: int = 512,
    num_pages: int | None = None,
    max_seqs: int = 256,
    kv_dtype: str = "auto",
    progress: bool = False,
) -> list[LogLikelihood]:
    """log p(continuation | context) of each pair of token lists.

    A beginning that pairs have in common is computed once: the context of several continuations,
    or the examples that stand before all questions. A continuation of n tokens feeds n − 1. The
    pairs may be many: they take turns in a pool of pages of a fixed size. Only log-probabilities
    leave the device.

    The context needs a token: the first token of a continuation is predicted from the last one
    before it. For a continuation of nothing give the token that starts a text. Of a pair with
    more than `context` + 1 tokens the last `context` + 1 count, so its context is cut on the left.

    Args:
      model: a `Decoder`, e.g. from `load_checkpoint`, or any other `Model`.
      pairs: (context, continuation), token ids, each of at least one. A continuation has at most
        `context` tokens.
      context: most tokens that a prediction sees; None = the model's context_length, which is the
        most.
      chunk: tokens per forward step, ≥ 1. It changes speed and, by rounding, the last bits.
      num_pages: of the pool, pages of 16 tokens; None = 512, or twice what the longest pair
        needs. With few pages, beginnings may be computed again.
      max_seqs: rows of the state: texts of a step, and texts that others wait to share.
      kv_dtype: of K and V, as for `generate`.
      progress: whether to show a bar on stderr, if that is a terminal.

    Returns:
      A `LogLikelihood` for each pair, in their order.

    Raises:
      ValueError: an option or a token id is out of range, a context or a continuation is empty or
        too long, or num_pages is too small for the longest pair.
    """
    parts, config = split_model(model), model.config
    context = _checked_context(context, config.context_length)
    check_count("chunk", chunk, 1)
    check_count("max_seqs", max_seqs, 1)
    cut = [
        _checked_pair(f"pairs[{i}]", pair, config.vocab_size, context)
        for i, pair in enumerate(pairs)
    ]
    if not cut:
        return []
    texts = share_texts(cut)
    most = max(pages_for(len(text.tokens), PAGE_SIZE) for text in texts)
    if num_pages is None:
        total = sum(pages_for(len(text.tokens), PAGE_SIZE) for text in texts)
        num_pages = round_up(min(total, max(2 * most, _POOL_PAGES)))
    check_count("num_pages", num_pages, 1)
    expect(num_pages >= most, "num_pages", f"at least {most}, for the longest pair", num_pages)
    state = create_state(
        model, num_pages=num_pages, max_seqs=max_seqs, pages_per_seq=round_up(most),
        kv_dtype=kv_dtype,
    )  # fmt: skip
    schedule = Schedule(
        texts, num_pages=num_pages, page_size=PAGE_SIZE, max_seqs=max_seqs, max_tokens=chunk
    )
    sums, greedy = np.zeros(len(cut)), np.ones(len(cut), np.bool_)
    number = sum(len(text.targets) for text in texts)
    with progress_bar(number, "log-likelihoods", "tokens", shown=progress) as update:
        for pairs_of, log_p, best in _run(parts, state, schedule, chunk, max_seqs):
            np.add.at(sums, pairs_of, log_p)
            np.logical_and.at(greedy, pairs_of, best)
            update(len(pairs_of))
    return [LogLikelihood(*both) for both in zip(sums.tolist(), greedy.tolist(), strict=True)]


def rolling_loglikelihoods(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    prefix_token: int,
    context: int | None = None,
    **options: Any,
) -> list[float]:
    """log p of whole texts, each of whose tokens is predicted once.

    The first token is predicted from `prefix_token`. A text of more than `context` tokens is cut
    into windows: each predicts `context` tokens and sees one token before them, and the last one
    predicts what is left and sees `context` tokens. These are the windows of lm-eval. `evaluate`
    has windows that overlap, so that each prediction sees more.

    Args:
      model: as for `loglikelihoods`.
      texts: token ids; a text may be empty.
      prefix_token: what stands before a text, such as its start or end token.
      context: tokens of a window; None = the model's context_length.
      options: chunk, num_pages, max_seqs, kv_dtype and progress, as for `loglikelihoods`.

    Returns:
      For each text the sum of log p of its tokens, 0 for an empty one.

    Raises:
      ValueError: as `loglikelihoods`.
    """
    check_model(model)
    config = model.config
    context = _checked_context(context, config.context_length)
    as_tokens("prefix_token", [prefix_token], config.vocab_size)
    pairs, owners = [], []
    for i, tokens in enumerate(texts):
        text = as_tokens(f"texts[{i}]", tokens, config.vocab_size, least=0)
        windows = [*rolling_windows(text, prefix_token, context)]
        pairs += windows
        owners += [i] * len(windows)
    sums = np.zeros(len(texts))
    for i, found in zip(
        owners, loglikelihoods(model, pairs, context=context, **options), strict=True
    ):
        sums[i] += found.log_p
    return sums.tolist()


def rolling_windows(
    text: np.ndarray, prefix_token: int, context: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(context, continuation) of each window; the continuations are the text.

    >>> for before, predicted in rolling_windows(np.arange(10), 99, 4):
    ...     print(before.tolist(), predicted.tolist())
    [99] [0, 1, 2, 3]
    [3] [4, 5, 6, 7]
    [5, 6, 7] [8, 9]
    """
    whole = np.append(np.int32(prefix_token), text).astype(np.int32)  # whole[t + 1] is text[t]
    for start in range(0, len(text), context):
        stop = min(start + context, len(text))
        first = max(stop - context, 0)
        yield whole[first : start + 1], whole[start + 1 : stop + 1]


def _checked_context(context: int | None, most: int) -> int:
    context = most if context is None else context
    check_count("context", context, 1)
    expect(context <= most, "context", f"at most context_length={most}", context)
    return context


def _checked_pair(
    name: str, pair: tuple[Sequence[int], Sequence[int]], vocab_size: int, context: int
) -> tuple[np.ndarray, np.ndarray]:
    """A pair whose context is cut on the left, to `context` + 1 tokens in all."""
    before = as_tokens(f"{name} context", pair[0], vocab_size)
    ending = as_tokens(f"{name} continuation", pair[1], vocab_size)
    few = f"at most context={context} tokens"
    expect(len(ending) <= context, f"{name} continuation", few, len(ending))
    return before[-(context + 1 - len(ending)) :], ending


class _Step(NamedTuple):
    """What a step takes from the host, as numpy arrays; -1 takes no part."""

    releases: Any  # i32[max_seqs], rows
    parents: Any  # i32[max_seqs], rows to fork from, into children, of lengths
    children: Any
    lengths: Any
    rows: Any  # i32[max_seqs], that feed q_lens tokens each
    q_lens: Any
    room: Any  # i32[max_seqs], tokens that they reserve
    tokens: Any  # i32[T], flat, then padding
    logit_rows: Any  # i32[R], tokens whose logits are wanted, then −1


class _Said(NamedTuple):
    """What a step says of the tokens behind some of its own."""

    logits: jax.Array  # f32[R, vocab_size]
    log_total: jax.Array  # f32[R], the logarithm of their sum of exponentials
    likeliest: jax.Array  # i32[R]


class _Wanted(NamedTuple):
    """What is predicted from a step, all of the same length."""

    pairs: np.ndarray
    rows: np.ndarray  # i32, of its R logits
    targets: np.ndarray


def _run(
    parts: tuple[Graph, Any], state: KVState, schedule: Schedule, chunk: int, max_seqs: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(pairs, log p, whether it is the likeliest token) of what each step predicts."""
    graph, params = parts
    sizes = _sizes(chunk)
    feeds: dict[Any, Any] = {}
    look_ups: dict[int, Any] = {}
    flying: deque[tuple[_Wanted, list[tuple[jax.Array, jax.Array]], jax.Array]] = deque()
    for orders in chain.from_iterable(in_sizes(each, sizes) for each in schedule):
        step, wanted = _filled(orders, max_seqs, sizes)
        size = step.logit_rows.size
        with uninterrupted():  # Ctrl-C must not leave XLA compiling
            key = step.tokens.size, size
            if key not in feeds:
                feeds[key] = compiled(feed, graph, params, state, step)
            state, said, failed = feeds[key](params, state, step)
            found = []
            for start in range(0, len(wanted.rows), size):
                rows, targets = (_padded(x[start : start + size], size) for x in wanted[1:])
                if size not in look_ups:
                    look_ups[size] = compiled(look_up, said, rows, targets)
                found.append(look_ups[size](said, rows, targets))
        flying.append((wanted, found, failed))
        if len(flying) > _BEHIND:
            yield _read(*flying.popleft())
    while flying:
        yield _read(*flying.popleft())


def _read(
    wanted: _Wanted, found: list[tuple[jax.Array, jax.Array]], failed: jax.Array
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if np.asarray(failed):
        raise RuntimeError("loglikelihoods: a page operation failed that the host had planned")
    count = len(wanted.pairs)
    if not found:
        return wanted.pairs, np.zeros(0), np.zeros(0, np.bool_)
    log_p, best = (np.concatenate([np.asarray(part[i]) for part in found]) for i in (0, 1))
    return wanted.pairs, log_p[:count].astype(np.float64), best[:count]


def _padded(ids: np.ndarray, size: int, padding: int = 0) -> np.ndarray:
    padded = np.full(size, padding, np.int32)
    padded[: len(ids)] = ids
    return padded


def round_up(size: int) -> int:
    """To a power of two, so that similar calls share compiled programs."""
    return 1 << (size - 1).bit_length()


def _sizes(chunk: int) -> list[int]:
    """The compiled sizes of a step and of its logits: a sixteenth, and the eighths up to all.

    >>> _sizes(512), _sizes(20)
    ([32, 64, 128, 192, 256, 320, 384, 448, 512], [8, 16, 20])
    """
    eighth = 8 * -(-chunk // 64)
    sizes = {max(8, eighth // 2), *range(eighth, chunk + eighth, eighth)}
    return sorted({min(size, chunk) for size in sizes})


def _filled(orders: Orders, max_seqs: int, sizes: list[int]) -> tuple[_Step, _Wanted]:
    """The orders as a step takes them, in the smallest size, and what it predicts."""
    flat, rows, pairs, targets, end, total = [], [], [], [], 0, 0
    positions: list[np.ndarray] = []
    for text, _, begin, stop in orders.feeds:
        flat.append(text.tokens[begin:stop])
        first, last = np.searchsorted(text.positions, [begin, stop])
        different, which = np.unique(text.positions[first:last], return_inverse=True)
        positions.append(different - begin + end)
        rows.append(which + total)
        pairs.append(text.pairs[first:last])
        targets.append(text.targets[first:last])
        end += stop - begin
        total += len(different)
    tokens = _padded(np.concatenate(flat), next(size for size in sizes if size >= end))
    logit_rows = _padded(np.concatenate(positions), next(n for n in sizes if n >= total), -1)
    feeds = [
        (row, stop - begin, len(text.tokens) - begin) for text, row, begin, stop in orders.feeds
    ]
    (releases,) = _column([(row,) for row in orders.releases], max_seqs, -1)
    parents, children, lengths = _column(orders.forks, max_seqs, -1, -1, 0)
    fed, q_lens, room = _column(feeds, max_seqs, -1, 0, 0)
    step = _Step(releases, parents, children, lengths, fed, q_lens, room, tokens, logit_rows)
    wanted = _Wanted(np.concatenate(pairs), np.concatenate(rows), np.concatenate(targets))
    return step, wanted


def _column(entries: Sequence[tuple[int, ...]], size: int, *nothing: int) -> np.ndarray:
    """i32[len(nothing), size]: the entries as columns, then what stands for none."""
    columns = np.repeat(np.array(nothing, np.int32)[:, None], size, axis=1)
    if entries:
        columns[:, : len(entries)] = np.array(entries, np.int32).T
    return columns


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def feed(
    graph: Graph, params: Any, state: KVState, step: _Step
) -> tuple[KVState, _Said, jax.Array]:
    """Carries out a step: (state, what it says, whether a verb refused it)."""
    state, released = state.release(step.releases)
    state, forked = state.fork(step.parents, step.children, step.lengths)
    state, reserved = state.reserve(step.rows, step.room)
    state, batch, stepped = state.step(step.rows, step.q_lens, num_tokens=step.tokens.shape[0])
    logits, state = run_model(graph, params, step.tokens, batch, state, logit_rows=step.logit_rows)
    failed = jnp.any(jnp.concatenate([released, forked, reserved, stepped]) != 0)
    return state, _Said(logits, *log_sum_exp(logits)), failed


@jax.jit
def look_up(said: _Said, rows: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log p(targets[i]) under logits[rows[i]], and whether it is the first of the largest."""
    log_p = said.logits[rows, targets] - said.log_total[rows]
    return log_p, said.likeliest[rows] == targets
