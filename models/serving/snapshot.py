# SPDX-License-Identifier: Apache-2.0
"""What an engine has to do, as JSON: after the death of its process another one goes on with it.

    snapshots = SnapshotFile("requests.json")
    requests = engine.restore(snapshots.load()) if snapshots.exists() else submit_all(engine)
    while engine.step():
        snapshots.save(engine, requests)  # each second
    snapshots.save(engine, requests, now=True)

A request is its prompt, its options and the tokens that it has. K and V are computed anew: a token
depends on nothing else, so the tokens are those of an engine that has not died.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jax_paged.checks import expect

from ..checkpoint.tokenizer import Tokenizer
from ..decoder.stream import Decode
from .request import LogProbability, Request
from .structured import Constraint

if TYPE_CHECKING:
    from .engine import Engine

SNAPSHOT_VERSION = 1


def as_json(request: Request) -> dict[str, Any]:
    """What `resubmitted` needs, as values that JSON has."""
    known: dict[str, Any] = {
        "prompt": request.prompt.tolist(),
        "tokens": request.tokens,
        "logprobs": [*map(_listed, request.logprobs)],
        "reason": request.reason,
        "detail": request.detail,
    }
    if request.stop is not None:
        token, told = request.stop
        known["stop"] = token, None if told is None else _listed(told)
    if request.tells_prompt:
        told_of = request.prompt_logprobs
        known["prompt_logprobs"] = [None if x is None else _listed(x) for x in told_of]
    edits = request.edits
    known["options"] = {
        "max_new_tokens": request.limit,
        "priority": request.priority,
        "stop_tokens": sorted(request.stop_tokens),
        "stop_strings": [] if request.search is None else [*request.search.stop_strings],
        "prompt_logprobs": request.tells_prompt,
        "adapter": None if request.adapter is None else request.adapter.name,
        "logit_bias": [*edits.bias.items()],
        "repetition_penalty": edits.repetition,
        "presence_penalty": edits.presence,
        "frequency_penalty": edits.frequency,
        **dataclasses.asdict(request.sampling),
    }
    if request.matcher is not None:
        known["grammar"] = request.matcher.grammar
    return known


def resubmitted(
    engine: "Engine", known: Mapping[str, Any], decode: Decode | None,
    tokenizer: Tokenizer | None, on_tokens: Callable[[list[int], str | None], None] | None,
) -> Request:  # fmt: skip
    """The request of `as_json`, which goes on in the engine unless it was done.

    Raises:
      ValueError: as `Engine.submit`, or it needs `decode` or `tokenizer`.
    """
    options, constraint = dict(known["options"]), None
    if "grammar" in known:
        what = "the tokenizer of the requests that have a constraint"
        expect(tokenizer is not None, "tokenizer", what, None)
        constraint = Constraint(known["grammar"], cast(Tokenizer, tokenizer))
    told = [*map(_told, known["logprobs"])]
    if known["reason"] is None:
        bias = {int(token): value for token, value in options.pop("logit_bias")}
        return engine.submit(
            known["prompt"], logit_bias=bias, decode=decode, constraint=constraint,
            on_tokens=on_tokens, begun=(known["tokens"], told), **options,
        )  # fmt: skip
    request = engine.submit(known["prompt"], max_new_tokens=0)
    stop = known.get("stop")
    return dataclasses.replace(
        request,
        limit=options["max_new_tokens"],
        tokens=[*known["tokens"]],
        logprobs=told,
        prompt_logprobs=[None if x is None else _told(x) for x in known.get("prompt_logprobs", [])],
        stop=None if stop is None else (stop[0], None if stop[1] is None else _told(stop[1])),
        reason=known["reason"],
        detail=known["detail"],
    )


def _listed(told: LogProbability) -> list[Any]:
    return [told.model, told.drawn, [*told.top]]


def _told(values: Sequence[Any]) -> LogProbability:
    model, drawn, top = values
    return LogProbability(model, drawn, tuple((token, value) for token, value in top))


_MOST_OF_TIME = 0.05  # that snapshots of very many requests may take


class SnapshotFile:
    """A file that has the snapshot of an engine, whole at any moment.

    Args:
      path: of the file; a new one is written beside it and takes its name.
      seconds: the least time between two snapshots, ≥ 0. Where one takes more than a twentieth of
        that, as with tens of thousands of requests, the time between two is twenty times as long.
      job: a text that tells what the requests are for, such as a digest of prompts and options; a
        snapshot of another job is refused.
    """

    def __init__(self, path: str | Path, *, seconds: float = 1.0, job: str = ""):
        expect(seconds >= 0, "seconds", "a number ≥ 0", seconds)
        self.path, self._seconds, self._job = Path(path), seconds, job
        self._due = -np.inf

    def exists(self) -> bool:
        """Whether there is a snapshot to load."""
        return self.path.exists()

    def save(
        self, engine: "Engine", requests: Sequence[Request] | None = None, *, now: bool = False
    ) -> bool:
        """Writes `engine.snapshot(requests)` if it is time; now: at once. Whether it was written.

        Raises:
          OSError: the file cannot be written; the one before is still there.
        """
        begin = time.monotonic()
        if not now and begin < self._due:
            return False
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(json.dumps(engine.snapshot(requests) | {"job": self._job}))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        took = time.monotonic() - begin
        self._due = begin + max(self._seconds, took / _MOST_OF_TIME)
        return True

    def load(self) -> dict[str, Any]:
        """The snapshot.

        Raises:
          ValueError: the file has none, or that of another job.
        """
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path}: expected a snapshot in JSON, got {error}") from error
        ok = isinstance(found, dict) and found.get("job") == self._job
        expect(ok, str(self.path), "a snapshot of the same prompts and options", "another one")
        return found

    def remove(self) -> None:
        """Forgets the snapshot, once what came out of it is safe."""
        self.path.unlink(missing_ok=True)
