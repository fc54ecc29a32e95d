# SPDX-License-Identifier: Apache-2.0
"""Mutated files and messages: a clear ValueError, little memory and little time, or all is read.

The cases are of `jax_paged.testing.stress.hostile`; a child process reads them, within its limits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first_of

from jax_paged.models.checkpoint.gguf_file import MODEL_TYPES
from jax_paged.testing.stress import hostile, hostile_run

PARTS = [(0, 125), *[(begin, begin + 1975) for begin in range(125, 10000, 1975)]]


def child(*arguments):
    """What a Python process with these arguments prints as its last line, from JSON."""
    run = subprocess.run(
        [sys.executable, "-P", *map(str, arguments)], env=os.environ | {"MALLOC_ARENA_MAX": "2"},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.stdout, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("begin", "end"), first_of(PARTS, 1))
@pytest.mark.parametrize("kind", hostile.KINDS)
def test_mutations_are_refused_clearly_or_read(kind, begin, end):
    report = child(
        "-m", "jax_paged.testing.stress.hostile_run", kind,
        "--begin", begin, "--end", end, "--seed", 1,
    )  # fmt: skip
    assert report["failures"] == []
    assert report["refused"] + report["read"] == end - begin
    assert report["refused"] > (end - begin) / 2
    assert report["grown_bytes"] < hostile_run.SPARE_BYTES
    assert report["slowest_seconds"] < hostile_run.MAX_SECONDS
    # The mutator is no good if all cases end at the same place.
    assert len(report["texts"]) >= 5


@pytest.mark.parametrize("model_type", hostile.FOLDERS)
def test_what_is_mutated_is_valid(tmp_path, model_type):
    hostile.read("folder", hostile.folder_files(model_type), tmp_path / "folder")
    if model_type in MODEL_TYPES.values():
        file, _ = hostile.gguf_bytes(*hostile.gguf_parts(model_type.replace("_", "")))
        hostile.read("gguf", {"model.gguf": file}, tmp_path / "gguf")


def test_the_messages_that_are_mutated_are_valid(tmp_path):
    for name, data in hostile._caches().frames.items():
        hostile.read("message", {name: data}, tmp_path)


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_a_case_is_the_same_in_each_run(kind):
    cases = [hostile.hostile(kind, 3, number) for number in range(20)]
    assert cases == [hostile.hostile(kind, 3, number) for number in range(20)]
    assert any(case != cases[0] for case in cases)


def fail_with(error):
    def read(*_):
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (fail_with(KeyError("a")), "KeyError: 'a'"),
        (fail_with(type("PanicException", (BaseException,), {})("a")), "PanicException: a"),
        (fail_with(ValueError("it/config.json: a\nb")), "several lines, or is long"),
        (fail_with(ValueError("zip() argument 2 is shorter")), "names no file and no field"),
        (fail_with(ValueError("it/a: cannot be read: KeyError: 3")), "something else was meant"),
    ],
)
def test_a_run_finds_what_is_no_clear_error(monkeypatch, read, text):
    monkeypatch.setattr(hostile_run, "read", read)
    report = hostile_run.Report()
    hostile_run._run_case(report, "message", 7, 0, Path("it"))
    (failure,) = report.failures
    assert text in failure
    assert failure.startswith("message 7, seed 0: ")


def test_a_run_finds_what_takes_long(monkeypatch):
    monkeypatch.setattr(hostile_run, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(hostile_run, "read", lambda *_: sum(range(20_000_000)))
    report = hostile_run.Report()
    hostile_run._run_case(report, "message", 7, 0, Path("it"))
    assert "it took " in report.failures[0]


def test_a_run_finds_what_takes_much_memory():
    """Memory that is asked for counts, also where it is not touched."""
    program = (
        "import json; from pathlib import Path; import numpy as np; "
        "from jax_paged.testing.stress import hostile_run as h; "
        "h.read = lambda *_: np.empty(2 << 30, np.uint8); "
        "print(json.dumps(h.run('message', 0, 1, seed=0, folder=Path('it')).failures))"
    )
    (failure,) = child("-c", program)
    assert "MemoryError" in failure


@pytest.mark.parametrize("number", [594])
def test_a_tensor_without_axes_can_be_changed_again(number):
    """The mutator itself must not fail; of such a tensor NumPy made a scalar."""
    assert hostile.hostile("safetensors", 1123, number)
