# SPDX-License-Identifier: Apache-2.0
"""Runs of the command line on a tiny checkpoint."""

import contextlib

import pytest
from tiny_checkpoint import write_checkpoint

from jax_paged.models import cli, load_checkpoint


@pytest.fixture(autouse=True)
def no_program_cache(monkeypatch):
    """The tests' own process keeps the settings that it has."""
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A Llama of random weights whose tokens are the 256 bytes and <eos>."""
    return write_checkpoint(tmp_path_factory.mktemp("command-line", numbered=False))


@pytest.fixture(scope="session")
def loaded(checkpoint):
    return load_checkpoint(checkpoint, progress=False)


@pytest.fixture
def run(checkpoint, capsys):
    """Runs the command line: run("generate", "a prompt", …) -> (exit code, stdout, stderr)."""

    def call(command, *arguments, model=checkpoint):
        try:
            code = cli.main([command, *map(str, arguments), "--model", str(model)])
        except SystemExit as error:  # argparse
            code = error.code
        return code, *capsys.readouterr()

    return call
