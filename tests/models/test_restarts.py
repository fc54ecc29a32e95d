# SPDX-License-Identifier: Apache-2.0
"""Jobs whose processes are killed: all are started again, and the tokens are those without that."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from children import child, on_devices
from tiers import first_of
from tiny_checkpoint import write_checkpoint

SECONDS = 230
STARTED = "jax-paged: started as process "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, prompts, what one process makes of them, and a place for compiled programs."""
    path = tmp_path_factory.mktemp("restarts")
    write_checkpoint(path, max_position_embeddings=1024)
    (path / "few.txt").write_text("\n".join(f"prompt {i}" for i in range(16)))
    (path / "many.txt").write_text("\n".join(f"prompt {i} of many" for i in range(48)))
    return path


def generate(folder, prompts, new_tokens, output):
    """The arguments of a command."""
    given = ["generate", "--model", folder, "--file", folder / prompts, "--output", output]
    return [*given, "--json", "--max-new-tokens", new_tokens, "--temperature", "1", "--seed", "3"]


def alone(folder, prompts, new_tokens):
    """What one process writes."""
    output = folder / f"{prompts}.{new_tokens}.json"
    if not output.exists():
        one = [sys.executable, "-m", "jax_paged", *generate(folder, prompts, new_tokens, output)]
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
def supervised(folder, count, arguments, *options):
    one = [sys.executable, "-m", "jax_paged", "supervise", "--processes", count, *options]
    environment_ = environment(folder)
    with child([*one, *arguments], env=environment_, seconds=SECONDS, **PIPES) as process:
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


CASES = [(2, [1], "few.txt", 100), *((4, seed, "many.txt", 400) for seed in range(5))]


@pytest.mark.parametrize(("count", "victims", "prompts", "new_tokens"), first_of(CASES, 1))
def test_killed_processes_are_started_again(folder, tmp_path, count, victims, prompts, new_tokens):
    """Twenty kills in five jobs of four processes; each rank dies once in each, at some moment."""
    want = alone(folder, prompts, new_tokens)
    rng = np.random.default_rng(victims)
    if not isinstance(victims, list):
        victims = rng.permutation(count).tolist()
    output, snapshot = tmp_path / "out.json", tmp_path / "snapshot.json"
    command = generate(folder, prompts, new_tokens, output)
    with supervised(folder, count, [*command, "--tp", "2", "--snapshot", snapshot]) as run:
        for turn, victim in enumerate(victims):
            pids = run.next_start()
            if turn == 3:  # at any moment; the others at any moment of serving
                time.sleep(rng.uniform(0, 12))
            else:
                wait_for_news(snapshot, run)
                time.sleep(rng.uniform(0, 1.5) if count > 2 else 0)
            os.kill(pids[victim], signal.SIGKILL)
        assert run.end() == 0, run.text
    killed = re.findall(r"process (\d+) was killed by SIGKILL; restart", run.text)
    assert killed == [*map(str, victims)], run.text
    print(run.text)
    assert output.read_text(encoding="utf-8") == want
    assert not snapshot.exists()
