# SPDX-License-Identifier: Apache-2.0
"""Random requests to an engine of several processes, with cancellations and a death.

This file is a script, too: one process of the job.
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from jobs import run_all, started
from served_engines import CONFIGS, SEED

from jax_paged.models import (
    Decoder,
    Engine,
    SnapshotFile,
    follow,
    make_mesh,
    start_processes,
)
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.distributed.processes import EXIT_LOST

CONFIG = CONFIGS["dense"]
SIZES = {"num_pages": 28, "max_seqs": 4, "page_size": 4, "max_tokens": 16, "progress": False}
BEGINNINGS = np.random.default_rng(8).integers(0, 60, (3, 12)).tolist()
KINDS = (
    {},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.3, "banned_tokens": [9, 10]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 2.5, 4: -np.inf}},
    {"temperature": 2.0, "stop_tokens": [1, 2, 3], "priority": 1},
)


def random_request(seed, i):
    """(arguments of `submit`, after how many tokens it is cancelled or None."""
    rng = np.random.default_rng([seed, i])
    begin = BEGINNINGS[i % 3] if rng.random() < 0.6 else []
    prompt = [*begin, *rng.integers(0, 60, rng.integers(1, 30)).tolist()]
    options = KINDS[rng.integers(len(KINDS))] | {"seed": int(rng.integers(9)), "draw_index": i}
    given = {"prompt": prompt, "max_new_tokens": int(rng.integers(0, 30))} | options
    return given, int(rng.integers(0, 9)) if rng.random() < 0.15 else None


def serve_all(engine, seed, count, requests, keep=lambda: None):
    """Submits what is missing, a few with each step, and cancels some, until all are done."""
    rng = np.random.default_rng(seed)
    cancelled_at = [random_request(seed, i)[1] for i in range(count)]
    while len(requests) < count or not engine.is_idle:
        for _ in range(rng.integers(0, 3)):
            if len(requests) < count:
                given, _ = random_request(seed, len(requests))
                requests.append(engine.submit(**given))
        engine.step()
        for request, at in zip(requests, cancelled_at, strict=False):
            if at is not None and not request.is_done and len(request.tokens) >= at:
                engine.cancel(request)
        keep()
    engine.run()


def first_process(processes, model, folder, seed, count):
    engine = Engine(model, **SIZES, processes=processes)
    file = SnapshotFile(Path(folder, "requests.json"), seconds=0.1)
    requests = engine.restore(file.load()) if file.exists() else []
    serve_all(engine, seed, count, requests, lambda: file.save(engine, requests))
    file.save(engine, requests, now=True)
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages
    assert {request.replica for request in requests} == set(range(engine.num_replicas))


def job(folder, seed, count):
    script = ["-W", "error", __file__]
    return started(lambda where, index: [*script, where, index, folder, seed, count], 2, 2)


@pytest.mark.deep
@pytest.mark.parametrize(("seed", "victim"), [(2, 0), (3, 1)])
def test_random_requests_over_two_processes_of_two_devices(tmp_path, seed, victim):
    """Pages are all free at the end, and tokens are those of one device, a death or not."""
    file, count = tmp_path / "requests.json", 1000
    with job(tmp_path, seed, count) as processes:
        done = 0
        least = count * np.random.default_rng(seed).uniform(0.1, 0.7)
        while done < least:
            assert processes[0].poll() is None, processes[0].communicate()
            time.sleep(0.05)
            if file.exists():
                known = json.loads(file.read_text())["requests"]
                done = sum(request["reason"] is not None for request in known)
        os.kill(processes[victim].pid, signal.SIGKILL)
        errors = [process.communicate(timeout=15)[1] for process in processes]
        assert processes[1 - victim].returncode == EXIT_LOST, errors
    left = [r for r in SnapshotFile(file).load()["requests"] if r["reason"] is None]
    assert left or len(known) < count, "nothing was left to do"
    with job(tmp_path, seed, count) as processes:
        run_all(processes)
    found = SnapshotFile(file).load()["requests"]
    engine, whole = Engine(Decoder(CONFIG, random_source(CONFIG, seed=SEED)), **SIZES), []
    for i in range(count):
        given, _ = random_request(seed, i)
        whole.append(engine.submit(**given))
    engine.run()
    assert len(found) == count
    for i, (got, want) in enumerate(zip(found, whole, strict=True)):
        if got["reason"] == "cancelled":
            assert random_request(seed, i)[1] is not None
            assert got["tokens"] == want.tokens[: len(got["tokens"])]
        else:
            assert (got["tokens"], got["reason"]) == (want.tokens, want.reason)
    reasons = {got["reason"] for got in found}
    assert reasons == {"cancelled", "length", "stop_token"}
    assert engine.num_preemptions > 0


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.filterwarnings("ignore", "each of the .* KV heads lies on")
    where, index, *arguments = sys.argv[1:]
    with start_processes(where, 2, int(index)) as processes_:
        source = random_source(CONFIG, seed=SEED)
        model_ = Decoder(CONFIG, source, mesh=make_mesh(CONFIG))
        if processes_.is_first:
            folder_, *numbers = arguments
            first_process(processes_, model_, folder_, *map(int, numbers))
        else:
            follow(processes_, model_)
