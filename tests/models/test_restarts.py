# SPDX-License-Identifier: Apache-2.0
"""Jobs whose processes are killed: all are started again, and the tokens are those without that."""

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from children import child, on_devices
from jobs import KEY
from tiers import first_of
from tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
SECONDS = 180
STARTED = "jax-paged: started as process "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, prompts, what one process makes of them, and a place for compiled programs."""
    path = tmp_path_factory.mktemp("restarts")
    write_checkpoint(path, max_position_embeddings=1024, num_hidden_layers=1)
    (path / "few.txt").write_text("\n".join(f"prompt {i}" for i in range(16)))
    (path / "many.txt").write_text("\n".join(f"prompt {i} of many" for i in range(64)))
    return path


def generate(folder, prompts, new_tokens, output):
    """The arguments of a command."""
    given = ["generate", "--model", folder, "--file", folder / prompts, "--output", output]
    return [*given, "--json", "--max-new-tokens", new_tokens, "--temperature", "1", "--seed", "3"]


def alone(folder, prompts, new_tokens):
    """What one process writes."""
    output = folder / f"{prompts}.{new_tokens}.json"
    if not output.exists():
        one = [
            sys.executable,
            "-P",
            "-m",
            "jax_paged",
            *generate(folder, prompts, new_tokens, output),
        ]
        with child(one, env=environment(folder), seconds=SECONDS, **PIPES) as process:
            _, err = process.communicate()
        assert process.returncode == 0, err
    return output.read_text(encoding="utf-8")


def environment(folder):
    return on_devices(1) | {"XDG_CACHE_HOME": str(folder)}


PIPES = {"stderr": subprocess.PIPE, "text": True}


class Supervised:
    """A supervised command, whose stderr is read as it comes."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self._starts: queue.Queue[list[int]] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith(STARTED):
                self._starts.put([*map(int, line.removeprefix(STARTED).split())])
        self._starts.put([])

    def next_start(self):
        """The process ids of the next start."""
        pids = self._starts.get(timeout=SECONDS)
        assert pids, self.text
        return pids

    def end(self):
        """Its exit code."""
        self.process.wait(SECONDS)
        self._thread.join()
        return self.process.returncode

    @property
    def text(self):
        return "".join(self.lines)


@contextlib.contextmanager
def supervised(folder, *arguments):
    one = [sys.executable, "-P", "-m", "jax_paged", "supervise", *arguments]
    environment_ = environment(folder) | {"JAX_PAGED_KEY": KEY}
    with child(one, env=environment_, seconds=SECONDS, **PIPES) as process:
        run = Supervised(process)
        try:
            yield run
        finally:
            process.kill()  # its processes end with it
            run.end()


def wait_for_news(path, run):
    """Until a file is written anew."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    while not path.exists() or path.stat().st_mtime_ns == before:
        assert run.process.poll() is None, run.text
        time.sleep(0.01)


def two_of(part):
    """Ranks of four, in an order that the first two of each two parts make whole."""
    order = np.random.default_rng(part // 2).permutation(4).tolist()
    return order[:2] if part % 2 == 0 else order[2:]


SHORT = ([1], "few.txt", 100)
CASES = [SHORT, *((two_of(part), "many.txt", 600) for part in range(10))]


@pytest.mark.parametrize(("victims", "prompts", "new_tokens"), first_of(CASES, 1))
def test_killed_processes_are_started_again(folder, tmp_path, victims, prompts, new_tokens):
    """Twenty kills in ten jobs of four processes, five of each rank, and one of two processes."""
    want, count = alone(folder, prompts, new_tokens), 2 * len(victims)
    rng = np.random.default_rng([*victims, new_tokens])
    output, snapshot = tmp_path / "out.json", tmp_path / "snapshot.json"
    command = generate(folder, prompts, new_tokens, output)
    job = ["--processes", count, *command, "--tp", "2", "--snapshot", snapshot]
    with supervised(folder, *job) as run:
        for victim in victims:
            pids = run.next_start()
            if count > 2 and rng.random() < 0.25:
                time.sleep(rng.uniform(0, 12))  # at any moment
            else:  # at any moment of serving
                wait_for_news(snapshot, run)
                time.sleep(rng.uniform(0, 1.5) if count > 2 else 0)
            os.kill(pids[victim], signal.SIGKILL)
        assert run.end() == 0, run.text
    print(run.text)
    killed = re.findall(r"process (\d+) was killed by SIGKILL; restart", run.text)
    assert killed == [*map(str, victims)], run.text
    assert output.read_text(encoding="utf-8") == want
    assert not snapshot.exists()


@pytest.mark.deep
def test_what_the_guide_shows(folder, tmp_path):
    """Its command for one host, and those for two, which are this one; each loses a process."""
    text = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("jax-paged supervise")]
    assert len(lines) == 3
    with socket.create_server(("localhost", 0)) as free:
        where = f"localhost:{free.getsockname()[1]}"
    want = [json.loads(line)["text"] for line in alone(folder, "few.txt", 64).splitlines()]
    for own in (lines[:1], lines[1:]):
        places = {
            "PROMPTS": folder / "few.txt", "ANSWERS": tmp_path / "answers", "MODEL": folder,
            "SNAPSHOT": tmp_path / "snapshot", "10.0.0.1:1234": where,
        }  # fmt: skip
        jobs = [[places.get(word, word) for word in shlex.split(line)[2:]] for line in own]
        sampling = ["--temperature", "1", "--seed", "3"]
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(supervised(folder, *job, *sampling)) for job in jobs]
            pids = [pid for run in runs for pid in run.next_start()]
            wait_for_news(tmp_path / "snapshot", runs[0])
            os.kill(pids[1], signal.SIGKILL)
            assert [run.end() for run in runs] == [0] * len(runs), [run.text for run in runs]
            assert "was killed by SIGKILL; restart 1 of 10 in 1 s" in runs[-1].text
        assert (tmp_path / "answers").read_bytes() == "\n".join([*want, ""]).encode()


def test_a_supervisor_ends_with_its_command_and_its_processes_with_it(folder):
    """Bad input is not tried again; Ctrl-C ends the command; and no process is left behind."""
    with supervised(folder, "generate", "a", "--model", folder / "none") as run:
        assert run.end() == 2
    assert run.text.count(STARTED) == 1
    for number, code in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with supervised(folder, "serve", "--model", folder, "--port", "0") as run:
            (pid,) = run.next_start()
            run.process.send_signal(number)
            assert run.end() == code
        wait_until_gone(pid)


def wait_until_gone(pid):
    end = time.monotonic() + 20
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < end
        time.sleep(0.01)
