# SPDX-License-Identifier: Apache-2.0
"""Engines that go on where another one stopped, or died: the tokens are those without that."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from children import on_devices
from tiers import first_of

from jax_paged.models import Decoder, Engine, SnapshotFile
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config

CONFIG = small_config("llama", vocab_size=64)
SIZES = {"num_pages": 40, "page_size": 4, "max_seqs": 3, "max_tokens": 16, "progress": False}


def text_of(ids):
    return "".join(chr(64 + i) for i in ids)


def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def submit_all(engine, count=6, new=12):
    """Requests of many kinds."""
    rng, requests = np.random.default_rng(3), []
    kinds = (
        {},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 2.5, 4: -np.inf}},
        {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.3, "banned_tokens": [9, 10]},
        {"stop_strings": ["AB", "Q"], "decode": text_of, "temperature": 2.0},
        {"stop_tokens": [1, 2, 3], "temperature": 2.0, "priority": 1},
    )
    for i in range(count):
        prompt = rng.integers(0, 64, 3 + 5 * (i % 4)).tolist()
        options = {"max_new_tokens": new, "draw_index": i} | kinds[i % len(kinds)]
        requests.append(engine.submit(prompt, **options))
    return requests


def outcome(requests):
    return [(r.tokens, r.reason, r.stop and r.stop[0], r.detail) for r in requests]


def test_another_engine_goes_on_at_any_moment():
    own = model()
    engine = Engine(own, **SIZES, logprobs=2, prompt_logprobs=True)

    def begin():
        return [
            *submit_all(engine),
            engine.submit([5, 6, 7], max_new_tokens=3, prompt_logprobs=True),
            engine.submit([5] * 200, max_new_tokens=3),
        ]

    whole = begin()
    engine.run()
    assert {r.reason for r in whole} >= {"length", "refused"}
    snapshots, begun = [], begin()
    while engine.step():
        snapshots.append(json.dumps(engine.snapshot(begun)))
    other = Engine(own, **SIZES | {"max_seqs": 2}, logprobs=2, prompt_logprobs=True)
    for text in snapshots:
        told = {}

        def tell(i, new, reason, told=told):
            told.setdefault(i, []).extend(new)

        had = [len(x["tokens"]) for x in json.loads(text)["requests"]]
        requests = other.restore(json.loads(text), decode=text_of, on_tokens=tell)
        other.run()
        assert outcome(requests) == outcome(whole)
        for i, (one, want) in enumerate(zip(requests, whole, strict=True)):
            assert told.get(i, []) == want.tokens[had[i] :]
            for name in ("logprobs", "prompt_logprobs"):
                assert_close(getattr(one, name), getattr(want, name))


def assert_close(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one[:2], other[:2], rtol=1e-4, atol=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_what_waits_and_runs_is_the_default():
    engine = Engine(model(), **SIZES)
    requests = submit_all(engine)
    engine.cancel(requests[2])
    engine.step()
    prompts = [x["prompt"] for x in engine.snapshot()["requests"]]
    assert prompts == [r.prompt.tolist() for r in requests if r is not requests[2]]
    engine.run()
    assert engine.snapshot()["requests"] == []


def test_what_is_no_snapshot_is_refused(tmp_path):
    own = model()
    engine, bf16 = Engine(own, **SIZES), Engine(own, **SIZES, kv_dtype="bfloat16")
    submit_all(engine)
    good = engine.snapshot()
    for bad, message in (
        ({}, "snapshot_of: expected a snapshot of this version, got None"),
        (good | {"jax_paged": 0}, "got 0"),
        (good | {"model": "other"}, "snapshot_of: expected one of .*, got other"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.restore(bad)
    with pytest.raises(ValueError, match=r"snapshot_of: expected one of .*bfloat16"):
        bf16.restore(good)
    with pytest.raises(ValueError, match="decode: expected a function"):
        engine.restore(good)
    with pytest.raises(ValueError, match="begun: expected at most 2 tokens, got 3"):
        engine.submit([1], max_new_tokens=2, begun=([1, 2, 3], []))
    with pytest.raises(ValueError, match="begun: expected 0 log-probabilities, got 1"):
        engine.submit([1], max_new_tokens=2, begun=([1], [None]))
    (tmp_path / "cut.json").write_text('{"jax_paged": 1, ')
    with pytest.raises(ValueError, match=r"cut.json: expected a snapshot in JSON"):
        SnapshotFile(tmp_path / "cut.json").load()


def test_a_snapshot_is_written_each_second_and_stays_whole(tmp_path, monkeypatch):
    engine = Engine(model(), **SIZES)
    requests = submit_all(engine)
    file = SnapshotFile(tmp_path / "requests.json", seconds=100)
    assert not file.exists()
    assert [file.save(engine, requests), file.save(engine, requests)] == [True, False]
    assert file.save(engine, requests, now=True)
    before = file.load()

    def broken(*_):
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="no space"):
        file.save(engine, now=True)
    assert file.load() == before
    assert [path.name for path in tmp_path.iterdir()] == ["requests.json"]


def test_a_snapshot_of_another_job_is_refused(tmp_path):
    engine, path = Engine(model(), **SIZES), tmp_path / "requests.json"
    requests = submit_all(engine)
    assert SnapshotFile(path, job="a").save(engine, requests)
    assert len(SnapshotFile(path, job="a").load()["requests"]) == len(requests)
    for other in ("b", ""):
        with pytest.raises(ValueError, match="json: expected a snapshot of the same prompts and"):
            SnapshotFile(path, job=other).load()
    SnapshotFile(path, job="a").remove()
    assert not path.exists()
    SnapshotFile(path).remove()


def test_slow_snapshots_take_a_twentieth_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Slow:
        def snapshot(self, requests):
            now[0] += 0.5
            return {}

    file, written = SnapshotFile(tmp_path / "requests.json"), 0
    while now[0] < 100:
        written += file.save(Slow())
        now[0] += 0.25
    assert written == 10


def serve_until_done(folder):
    """A process that may die at any moment, and go on when it is started again."""
    engine = Engine(model(), **SIZES)
    file = SnapshotFile(Path(folder, "requests.json"), seconds=0)
    if file.exists():
        requests = engine.restore(file.load(), decode=text_of)
    else:
        requests = submit_all(engine, count=12, new=40)
    Path(folder, "ready").touch()
    while engine.step():
        file.save(engine, requests)
        time.sleep(0.01)
    file.save(engine, requests, now=True)
    Path(folder, "done").touch()


@pytest.mark.parametrize("seed", first_of(range(20), 1))
def test_a_killed_process_goes_on(seed):
    engine = Engine(model(), **SIZES)
    whole = submit_all(engine, count=12, new=40)
    engine.run()
    rng, command = np.random.default_rng(seed), [sys.executable, "-W", "error", __file__]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(10):
            Path(folder, "ready").unlink(missing_ok=True)
            with subprocess.Popen([*command, folder], env=on_devices(1)) as child:
                try:
                    if turn < 2:
                        while not Path(folder, "ready").exists() and child.poll() is None:
                            time.sleep(0.01)
                        time.sleep(rng.uniform(0, 0.5))
                    else:
                        child.wait(120)
                finally:
                    child.kill()
            if Path(folder, "done").exists():
                break
        found = SnapshotFile(Path(folder, "requests.json")).load()["requests"]
    assert [(x["tokens"], x["reason"]) for x in found] == [(r.tokens, r.reason) for r in whole]


if __name__ == "__main__":
    serve_until_done(sys.argv[1])
