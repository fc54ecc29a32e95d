# SPDX-License-Identifier: Apache-2.0
"""Mutated checkpoints and messages, in a child process that has limits of memory and time."""

import json
import os
import subprocess
import sys

from .report import Report, Stop

CASES = 500  # of one child


def run(report: Report, stop: Stop, seed: int, begin: int = 0) -> None:
    """Reads CASES mutations of each kind in turn, from number `begin` on."""
    from jax_paged.testing.stress.hostile import KINDS

    while True:
        for kind in KINDS:
            stop.following = begin
            if stop.is_due() or report.is_hopeless:
                return
            _run_child(report, kind, begin, seed)
            stop.done += CASES
        begin += CASES


def _run_child(report: Report, kind: str, begin: int, seed: int) -> None:
    command = [sys.executable, "-P", "-m", "jax_paged.testing.stress.hostile_run", kind]
    command += ["--begin", str(begin), "--end", str(begin + CASES), "--seed", str(seed)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    try:
        told = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        text = f"{kind} {begin} to {begin + CASES}, seed {seed}: the process ended with"
        report.fail(f"{text} {child.returncode}: {child.stderr[-600:]}")
        return
    name = f"files: {kind}"
    report.add(name, {}, cases=told["refused"] + told["read"])
    report.count(name, "refused", told["refused"])
    report.count(name, "read", told["read"])
    for failure in told["failures"]:
        report.fail(failure)
