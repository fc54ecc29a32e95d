# SPDX-License-Identifier: Apache-2.0
"""`generate` for many prompts: the same arguments and tokens, through the engine."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_paged.checks import expect
from jax_paged.ops.batch import pages_for

from ..decoder.adapters import Adapter, with_adapter
from ..decoder.generation import PAGE_SIZE, Generation, OnTokens, as_texts, check_count
from ..decoder.protocol import Model, check_model
from ..decoder.stream import Decode
from ..distributed.processes import Processes
from .decode_engine import create_engine
from .engine import Engine
from .prefiller import Prefiller
from .request import Request
from .snapshot import SnapshotFile

MAX_SEQS = 16  # prompts that run at once


def generate_many(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    decode: Decode | None = None,
    adapter: Adapter | None = None,
    num_pages: int | None = None,
    kv_dtype: str = "auto",
    processes: Processes | None = None,
    prefill: Prefiller | None = None,
    snapshots: SnapshotFile | None = None,
    on_tokens: OnTokens | None = None,
    **sampling: Any,
) -> Generation:
    """Continues each prompt by up to max_new_tokens tokens, at most 16 of them at a time.

    Prompts wait for pages, so none stops because others have taken the pool. Prompts that start
    alike share pages.

    Args:
      model, prompts, max_new_tokens, stop_tokens, stop_strings, decode, adapter, kv_dtype,
        sampling: as for `generate`, which would give the same tokens.
      processes: as for `Engine`.
      prefill: as for `DecodeEngine`; None = prompts are computed here.
      snapshots: keeps what is done so far, each second. If it has a snapshot already, of the same
        prompts and options, this call goes on with that one.
      num_pages: pages of the pool; None = enough for the 16 longest. A prompt that fills all of it
        stops with "row_full".
      on_tokens: called after each step with the new ids and the stop reason of each prompt.

    Returns:
      A `Generation`; its seconds are those of "compile" and "serve". Ctrl-C ends it as it ends
      `generate`.

    Raises:
      ValueError: an option, a prompt or a token id is out of range.
    """
    if adapter is not None:
        model = with_adapter(model, adapter)
    check_model(model)
    config = model.config
    texts = as_texts(prompts, config)
    check_count("max_new_tokens", max_new_tokens, 0)
    limits = [min(max_new_tokens, config.context_length - len(text)) for text in texts]
    lengths = [len(text) + max(new - 1, 0) for text, new in zip(texts, limits, strict=True)]
    needs = [pages_for(length, PAGE_SIZE) for length in lengths]
    if num_pages is None:
        num_pages = sum(sorted(needs)[-MAX_SEQS:])
    pages_per_seq = min(max(needs), num_pages)
    capacity = pages_per_seq * PAGE_SIZE
    engine = create_engine(
        model, prefill=prefill, num_pages=num_pages, max_seqs=min(len(texts), MAX_SEQS),
        pages_per_seq=pages_per_seq, kv_dtype=kv_dtype, processes=processes,
    )  # fmt: skip
    stops = {"stop_tokens": stop_tokens, "stop_strings": stop_strings, "decode": decode}
    options = {**stops, **sampling}
    rooms = [capacity - len(text) + 1 for text in texts]  # the last new token needs no place
    news = [max(min(limit, room), 0) for limit, room in zip(limits, rooms, strict=True)]
    if snapshots is not None and snapshots.exists():
        submitted = engine.restore(snapshots.load(), decode=decode)
        expect(len(submitted) == len(texts), "snapshots", f"{len(texts)} requests", len(submitted))
    else:
        submitted = [
            engine.submit(text.tolist(), max_new_tokens=new, draw_index=draw_index, **options)
            for draw_index, (text, new) in enumerate(zip(texts, news, strict=True))
        ]
    requests = [
        request if new > 0 or limit == 0 else None
        for request, new, limit in zip(submitted, news, limits, strict=True)
    ]
    keep = None if snapshots is None else functools.partial(snapshots.save, engine, submitted)
    start = time.perf_counter()
    try:
        _serve(engine, requests, limits, on_tokens, keep)
    except KeyboardInterrupt:
        for request in requests:
            if request is not None:
                engine.cancel(request)
        engine.run()  # what is on its way
    ran = [r for r in requests if r is not None and r.tokens]
    return Generation(
        tokens=[[] if r is None else r.tokens for r in requests],
        stop_reasons=[
            "interrupted" if _reason(r, limit) == "cancelled" else str(_reason(r, limit))
            for r, limit in zip(requests, limits, strict=True)
        ],
        state=engine.state,
        seconds={"compile": engine.compile_seconds, "serve": time.perf_counter() - start},
        prefill_tokens=sum(len(r.prompt) - r.num_cached for r in ran),
    )


def _serve(
    engine: Engine, requests: list[Request | None], limits: list[int], on_tokens: OnTokens | None,
    keep: Callable[..., object] | None,
) -> None:  # fmt: skip
    told = np.zeros(len(requests), np.int64)
    while True:
        more = engine.step()
        if keep is not None:
            keep(now=not more)
        if on_tokens is not None:
            new = [[] if r is None else r.tokens[n:] for r, n in zip(requests, told, strict=True)]
            told += [len(ids) for ids in new]
            on_tokens(new, [_reason(r, n) for r, n in zip(requests, limits, strict=True)])
        if not more:
            return


def _reason(request: Request | None, limit: int) -> str | None:
    """Why a prompt stopped; "row_full" where the pool, not the caller, set its limit."""
    if request is None:
        return "row_full"
    if request.reason == "length" and request.limit < limit:
        return "row_full"
    return request.reason
