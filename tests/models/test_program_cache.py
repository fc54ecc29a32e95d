# SPDX-License-Identifier: Apache-2.0
"""Programs kept between starts: the executables of large ones, and JAX's cache for the rest."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny_checkpoint import write_checkpoint

import jax_paged
from jax_paged import PageTable
from jax_paged.models.decoder import executables, program_cache, steps
from jax_paged.models.decoder.executables import Executables, compiled, kept_in

LENGTH = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def start(arguments, folder):
    """Runs the command in a process of its own, whose programs are kept in a folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
        "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder), "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join([str(Path(jax_paged.__file__).parents[1])]),
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "jax_paged", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=env)


def test_a_start_keeps_its_programs_and_a_corrupt_one_is_compiled_again(checkpoint, tmp_path):
    arguments = ["generate", "Hello", *LENGTH, "--model", checkpoint]

    def entries():
        found = sorted(tmp_path.glob("jax_paged/programs/*/*"))
        return {path: path.read_bytes() for path in found if not path.name.endswith("-atime")}

    first = start(arguments, tmp_path)
    kept = entries()
    assert (first.returncode, first.stderr.count("\n")) == (0, 2)  # the model, the rates
    for name in ("make_room", "prefill", "decode"):
        (large,) = [
            path.name
            for path in kept
            if path.name.startswith(f"jax_paged.models.decoder.steps.{name}-")
        ]
        assert large.endswith(executables.SUFFIX)
    assert any(path.name.startswith("jit_zero_pool-") for path in kept)  # JAX's own
    second = start(arguments, tmp_path)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert entries() == kept  # the same keys, so nothing new

    for path in kept:
        path.write_bytes(b"garbage")
    third = start(arguments, tmp_path)
    assert (third.returncode, third.stdout) == (0, first.stdout)
    warning, _, rates = third.stderr.splitlines()
    assert warning == "jax-paged: warning: a kept program cannot be read; it is compiled again"
    assert rates.startswith("prefill: ")
    assert entries().keys() == kept.keys()
    assert all(len(data) > 100 for data in entries().values())


@pytest.fixture
def jax_folder():
    """Sets and reads JAX's folder of programs; the test's own comes back at the end."""
    name = "jax_compilation_cache_dir"
    before = getattr(jax.config, name)
    yield lambda *new: jax.config.update(name, *new) if new else getattr(jax.config, name)
    jax.config.update(name, before)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, jax_folder, capsys):
    (tmp_path / "file").touch()
    jax_folder(None)
    with program_cache.kept_programs(tmp_path / "file" / "programs"):
        assert jax_folder() is None
    err = capsys.readouterr().err
    assert err.startswith("jax-paged: warning: compiled programs are not kept: ")
    assert err.count("\n") == 1


def test_programs_go_to_the_users_cache_folder_or_where_jax_was_told(
    tmp_path, jax_folder, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    jax_folder(str(tmp_path / "own"))
    with program_cache.kept_programs():
        assert jax_folder() == str(tmp_path / "own")
    assert list(tmp_path.iterdir()) == []
    jax_folder(None)
    with program_cache.kept_programs():
        folder = Path(jax_folder())
        assert folder.parent == tmp_path / "xdg" / "jax_paged" / "programs"
        assert folder.is_dir()
    assert jax_folder() is None


def test_the_oldest_programs_go_when_there_are_too_many(tmp_path):
    for age, name in enumerate(["new", "old", "oldest"]):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    program_cache._prune(tmp_path, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


# Executables


@pytest.fixture
def no_jax_folder(jax_folder):
    """As where executables are kept: JAX has no folder of its own, see `kept_programs`."""
    jax_folder(None)
    compilation_cache.reset_cache()
    yield
    compilation_cache.reset_cache()


def call(max_seqs=3, pages_per_seq=4, rows=(0, 1)):
    """A call of `steps.admit`: a table, rows, and a token for each."""
    table = PageTable.create(
        num_pages=8, page_size=4, max_seqs=max_seqs, pages_per_seq=pages_per_seq
    )
    return table, np.array(rows, np.int32), np.ones(len(rows), np.int32)


class Never:
    """A program that must not be compiled."""

    __module__, __name__ = steps.admit.__module__, steps.admit.__name__

    def lower(self, *args, **static):
        raise AssertionError("compiled again")


def unexpected():
    raise AssertionError("an executable could not be read")


def files(folder):
    return sorted(folder.glob("*"))


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_an_executable_is_taken_from_the_folder_without_tracing(tmp_path, no_jax_folder):
    args = call()
    want = steps.admit(*args)
    with kept_in(Executables(tmp_path, unexpected)):
        assert same(compiled(steps.admit, *args)(*args), want)
    (file,) = files(tmp_path)
    with kept_in(Executables(tmp_path, unexpected)):
        shapes = jax.eval_shape(lambda: args)
        assert same(compiled(Never(), *shapes)(*args), want)
        assert same(compiled(Never(), *args)(*args), want)
    assert files(tmp_path) == [file]


def test_without_a_folder_a_program_is_compiled_as_ever(tmp_path):
    args = call()
    assert same(compiled(steps.admit, *args)(*args), steps.admit(*args))


def name(*args, program=steps.admit, **static):
    return executables._name(program, args, static)


def test_what_tracing_can_see_is_another_executable(monkeypatch):
    args = call()
    names = {
        name(*args), name(*call(max_seqs=4)), name(*call(pages_per_seq=5)), name(*call(rows=[0])),
        name(args[0], args[1].astype(np.uint32), args[2]), name(*args, program=steps.prefill),
        name(*args, chunk=1), name(*args, chunk=2), name(*args, chunk=1.0),
        name(*args, jnp.int32(1)), name(*args, jnp.asarray(1)),  # the last is weak
    }  # fmt: skip
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    names.add(name(*args))
    jax.config.update("jax_default_matmul_precision", before)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    names.add(name(*args))
    monkeypatch.undo()
    monkeypatch.setattr(executables, "_sources", lambda: "another version")
    names.add(name(*args))
    monkeypatch.undo()
    monkeypatch.setattr(jax, "__version__", "99")
    names.add(name(*args))
    monkeypatch.undo()
    assert len(names) == 15
    assert name(*call()) in names


def test_what_cannot_be_told_apart_is_not_kept(tmp_path, no_jax_folder):
    args = call()
    assert name(*args, told=object()) is None  # shown by its address
    assert name(*args, told=np.arange(5000).tolist()) is not None
    hiding = type("Hiding", (), {"__repr__": lambda self: "Hiding(...)"})()
    assert name(*args, told=hiding) is None
    with kept_in(Executables(tmp_path, unexpected)):
        double = jax.jit(lambda x, told: 2 * x, static_argnames="told")
        assert compiled(double, np.float32(2), told=hiding)(np.float32(2)) == 4
    assert files(tmp_path) == []


def flip(data):
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.parametrize("spoil", [flip, lambda data: data[:-1], lambda data: b""])
def test_a_changed_executable_is_compiled_again(spoil, tmp_path, no_jax_folder):
    args, told = call(), []
    with kept_in(Executables(tmp_path, unexpected)):
        want = compiled(steps.admit, *args)(*args)
    (file,) = files(tmp_path)
    file.write_bytes(spoil(file.read_bytes()))
    with kept_in(Executables(tmp_path, lambda: told.append(1))):
        assert same(compiled(steps.admit, *args)(*args), want)
    assert told == [1]
    with kept_in(Executables(tmp_path, unexpected)):
        assert same(compiled(Never(), *args)(*args), want)


def test_a_folder_that_is_gone_costs_only_time(tmp_path, no_jax_folder):
    args = call()
    with kept_in(Executables(tmp_path / "gone", unexpected)):
        assert same(compiled(steps.admit, *args)(*args), steps.admit(*args))


AGAIN = """
import sys
import jax
import numpy as np
from pathlib import Path
from jax_paged import PageTable
from jax_paged.models.decoder import steps
from jax_paged.models.decoder.executables import Executables, compiled, kept_in
def unreadable():
    raise SystemExit("an executable could not be read")
table = PageTable.create(num_pages=8, page_size=4, max_seqs=3, pages_per_seq=4)
args = table, np.arange(2, dtype=np.int32), np.ones(2, np.int32)
with kept_in(Executables(Path(sys.argv[1]), unreadable)):
    table, _ = compiled(steps.admit, *args)(*args)
print(np.asarray(table.ref_counts).sum())
"""


def test_what_jax_had_in_its_own_cache_can_be_kept(tmp_path):
    """XLA's CPU executables that come from JAX's cache lack functions once serialised again."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(Path(jax_paged.__file__).parents[1]),
    }
    # In the folder "none" nothing can be kept, and JAX keeps its own. Then it is kept, and loaded.
    for folder in "none", "kept", "kept":
        if folder == "kept":
            (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-c", AGAIN, tmp_path / folder]
        run = subprocess.run(command, capture_output=True, text=True, env=env)
        assert (run.stdout, run.returncode) == ("2\n", 0), run.stderr
    assert len(files(tmp_path / "kept")) == 1
