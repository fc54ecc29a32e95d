# SPDX-License-Identifier: Apache-2.0
"""`jax-paged supervise`: which ends are tried again, which one counts, and what each start gets."""

import os
import re
import signal
import sys
import threading
import time

import pytest

from jax_paged._start import supervise
from jax_paged._start.command_line import parser
from jax_paged._start.supervise import keep_running, starts


def ends(*codes):
    """Processes that end with these codes; a negative one is a signal."""
    return [
        ([sys.executable, "-c", f"import os, time; time.sleep({0.05 * i}); {_end(code)}"], {})
        for i, code in enumerate(codes)
    ]


def _end(code):
    return (
        "time.sleep(60)"
        if code is None
        else (f"os._exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})")
    )


def ran(turns, **options):
    """(exit code, number of starts) of some turns, each the codes of its processes."""
    left = iter(turns)
    count = []

    def start():
        count.append(1)
        return ends(*next(left))

    return keep_running(start, first_delay=0.0, **options), len(count)


@pytest.mark.every
@pytest.mark.parametrize(
    ("turns", "restarts", "want"),
    [
        ([(0, 0)], 3, (0, 1)),
        ([(75, -9), (1, 75), (0, 0)], 3, (0, 3)),
        ([(75, -9), (75, -9), (75, -9)], 2, (137, 3)),
        ([(75, 2)], 3, (2, 1)),
        ([(130, 0)], 3, (130, 1)),
        ([(0, 75)], 0, (75, 1)),
    ],
)
def test_a_job_is_started_again_until_it_ends_well(capfd, turns, restarts, want):
    assert ran(turns, restarts=restarts) == want
    said = capfd.readouterr().err
    assert said.count("started as process") == want[1]
    if want[0] == 137:
        assert "process 1 was killed by SIGKILL; restart 1 of 2 in 0 s" in said
        assert said.endswith("error: process 1 was killed by SIGKILL, after 2 restarts\n")


def test_who_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(supervise, "END_S", 0.3)
    begin = time.monotonic()
    assert ran([(None, 75), (0,)], restarts=1) == (0, 2)
    assert time.monotonic() - begin < 20


def test_a_start_that_has_lasted_begins_a_new_row(monkeypatch):
    monkeypatch.setattr(supervise, "GOOD_S", 0.0)
    assert ran([(75,)] * 5 + [(0,)], restarts=1) == (0, 6)


def test_each_start_has_a_port_and_a_key_of_its_own(monkeypatch):
    monkeypatch.setenv("JAX_PAGED_KEY_FILE", "/the/key/of/others")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    seen = [starts(["a"], 2) for _ in range(2)]
    for processes in seen:
        (first, its), (second, others) = processes
        assert first[:-1] == second[:-1]
        assert first[3:5] == ["--num-processes", "2"]
        assert (first[-1], second[-1]) == ("0", "1")
        assert its["JAX_PAGED_KEY"] == others["JAX_PAGED_KEY"]
        assert "JAX_PAGED_KEY_FILE" not in its
        assert (its["CUDA_VISIBLE_DEVICES"], others["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")
    (one, *_), (other, *_) = seen
    assert one[0][2] != other[0][2]
    assert one[1]["JAX_PAGED_KEY"] != other[1]["JAX_PAGED_KEY"]
    ((command, environment),) = starts(["a", "--coordinator", "b:1"], 1)
    assert command == ["a", "--coordinator", "b:1"]
    assert environment["JAX_PAGED_KEY_FILE"] == "/the/key/of/others"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "command: expected one of generate, eval, bench-serve, serve, got none"),
        (["chat"], "command: expected one of .*, got chat"),
        (["--processes", "0", "serve"], "processes: expected an integer >= 1, got 0"),
        (["--restarts", "-1", "--", "serve"], "restarts: expected an integer >= 0, got -1"),
        (["--processes", "2", "serve", "--coordinator", "a:1"], "processes: expected 1 where"),
    ],
)
@pytest.mark.every
def test_bad_arguments_are_refused(capsys, arguments, text):
    assert supervise.run(parser().parse_args(["supervise", *arguments])) == 2
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.every
@pytest.mark.parametrize(("does", "count", "code"), [("os._exit(130)", 1, 130), ("0", 2, 137)])
def test_ctrl_c_goes_to_the_first_process_and_nothing_is_started_again(does, count, code):
    """The second one kills what does not heed the first."""

    def start():
        for i in range(count):
            threading.Timer(1 + i, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait = f"import os, signal, time; signal.signal(signal.SIGINT, lambda *_: {does})"
        return [([sys.executable, "-c", f"{wait}; time.sleep(60)"], {}), *ends(0)]

    assert keep_running(start, restarts=5) == code
