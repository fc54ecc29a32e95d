# SPDX-License-Identifier: Apache-2.0
"""`bench-serve --http` on a tiny checkpoint, against a server that it starts and against one."""

import contextlib
import json

import pytest
from running_server import Running, byte_engine
from tiny_checkpoint import write_checkpoint

from jax_paged.models import cli

SMALL = ["--requests", "6", "--rate", "50", "--prefixes", "1", "--prefix-tokens", "32",
         "--prompt-tokens", "4", "--new-tokens", "5", "--max-seqs", "2",
         "--max-tokens", "16"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)

    def call(*arguments):
        command = ["bench-serve", "--model", str(checkpoint), "--no-program-cache", *SMALL]
        return cli.main([*command, *arguments]), *capsys.readouterr()

    return call


def test_a_server_is_started_and_compared_with_the_engine_alone(run):
    code, out, err = run("--http", "--json", "--context-length", "60")
    assert code == 0, err
    figures = json.loads(out)
    assert (figures["requests"], figures["refused"], figures["new_tokens"]) == (6, 0, 30)
    assert figures["first_token_ms"]["p50"] > 0
    assert figures["inter_token_ms"]["p50"] >= 0
    assert figures["hit_rate"] > 0.3
    assert figures["engine_cpu_ms_per_token"] > 0
    expected = figures["cpu_ms_per_token"] / figures["engine_cpu_ms_per_token"]
    assert figures["cpu_ratio"] == pytest.approx(expected)


def test_a_server_elsewhere_gets_the_same_trace(run):
    server = Running(byte_engine())
    try:
        code, out, err = run("--http", server.url + "/")
    finally:
        server.end()
    assert code == 0, err
    assert "requests: 6 in " in out
    assert "(30 new, " in out
    assert "the engine alone" not in out


def test_what_cannot_be_measured_is_refused(run):
    for arguments, part in (
        (["--http", "http://127.0.0.1:9"], "http://127.0.0.1:9: <urlopen error"),
        (["--http", "--drafts", "2"], "--http: expected no --drafts"),
        (["--http", "--swap-pages", "2"], "--http: expected no --swap-pages"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert part in err
