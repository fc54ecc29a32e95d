# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at random moments of the command line, from its first import on, ends it with 130."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import first_of
from tiny_checkpoint import write_checkpoint

import jax_paged
from jax_paged.models import Decoder
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving import engine, runner
from jax_paged.models.testing import small_config

COMMANDS = {
    "several prompts": ["generate", "a", "some longer prompt", "--max-new-tokens", "40"],
    "one prompt": ["generate", "a prompt", "--max-new-tokens", "40", "--output", "out"],
    "eval": ["eval", "text"],
    "bench-serve": ["bench-serve", "--requests", "8", "--rate", "0", "--prompt-tokens", "8",
                    "--prefix-tokens", "8", "--new-tokens", "30"],
}  # fmt: skip

# As pip writes it, and it says when Python is up.
SCRIPT = """\
import sys
print("up", file=sys.stderr, flush=True)
from jax_paged.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run: a checkpoint, a text and the script."""
    folder = tmp_path_factory.mktemp("interrupt")
    (folder / "model").mkdir()
    write_checkpoint(folder / "model")
    (folder / "text").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    (folder / "jax-paged").write_text(SCRIPT)
    return folder


def start(folder, command):
    """Starts a command that compiles everything, and waits until Python is up."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
        "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jax_paged.__file__).parents[1]),
    }  # fmt: skip
    model = ["--model", "model", "--no-program-cache"]
    process = subprocess.Popen(
        [sys.executable, "-P", "jax-paged", *COMMANDS[command], *model], cwd=folder, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "up\n"
    return process


def processor_seconds(process) -> float:
    """How long a process has computed, which tells how far it is, on a busy machine too."""
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def seconds(folder):
    """How long each command computes when it is left alone: the less of two times."""
    taken = {}

    def measure(command):
        if command not in taken:
            taken[command] = min(once(command) for _ in range(2))
        return taken[command]

    def once(command):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = start(folder, command)
        _, err = process.communicate()
        assert process.returncode == 0, err
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    return measure


CASES = [(number, "several prompts") for number in range(20)]
CASES += [(number, command) for number in range(20, 30) for command in list(COMMANDS)[1:]]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc tells the processor time")
@pytest.mark.parametrize(("number", "command"), first_of(CASES, 2))
def test_ctrl_c_at_a_random_moment_is_130(folder, seconds, number, command):
    # Far from the end, which a run may reach sooner than those that were measured.
    moment = random.Random(number).uniform(0.0, 0.7) * seconds(command)
    process = start(folder, command)
    while processor_seconds(process) < moment and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, (moment, err)
    assert "Traceback" not in err
    assert not list(folder.glob(".*.part"))


def test_a_second_ctrl_c_does_not_wait(folder):
    process = start(folder, "several prompts")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_the_engine_compiles_a_program_to_its_end(monkeypatch):
    compiled = []

    class Program:
        def lower(self, *_, **__):
            return self

        def compile(self):
            signal.raise_signal(signal.SIGINT)
            compiled.append(True)

    monkeypatch.setattr(runner, "keep", Program())
    config = small_config("qwen3", vocab_size=64, head_dim=8)
    model = Decoder(config, random_source(config))
    with pytest.raises(KeyboardInterrupt):
        engine.Engine(model, num_pages=4, max_seqs=2, max_tokens=16, progress=False)
    assert compiled == [True]


def test_garbage_is_collected_again_once_all_is_imported():
    code = (
        "import gc, sys; sys.argv = ['jax-paged', 'generate']; import jax_paged;"
        "print(gc.isenabled()); from jax_paged.models import cli;"
        "cli.run = lambda _: gc.isenabled(); from jax_paged.__main__ import main; print(main())"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"], run.stderr
