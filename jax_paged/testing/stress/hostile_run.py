# SPDX-License-Identifier: Apache-2.0
"""Reads many mutated files or messages, within limits of memory and time.

    python -m jax_paged.testing.stress.hostile_run gguf --begin 0 --end 125

prints a JSON object: how many cases were refused and how many were read, the slowest, the memory,
and as failures what else happened. A case has 5 s of processor time (so that a busy machine fails
none; what hangs ends the process after 100 s), and 1 GiB beside what the process has at the start.
What refuses it is a ValueError of one line that names the file or the field.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import json
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

from .hostile import KINDS, hostile, read

SPARE_BYTES = 1 << 30  # of memory that a case may take
MAX_SECONDS = 5.0  # of processor time that it may take

# What our own code must not raise, even where it is then turned into a ValueError.
_OURS = re.compile(
    r"\b(Key|Index|Type|Attribute|ZeroDivision|Overflow|Assertion|Recursion|Memory|Name|Unbound"
    r"Local)Error\b"
)
_CLEAR = re.compile(r"(tokenizer|chat template|apply_chat|ticket|message|geometry|payload|positions"
                    r"|config|[a-z_]+: expected)")  # fmt: skip


def complaint(error: ValueError, folder: Path) -> str | None:
    """What is wrong with an error that refuses a case, None = nothing."""
    text = str(error)
    if "\n" in text or len(text) > 1000:
        return "the text has several lines, or is long"
    if not text.startswith(str(folder)) and not _CLEAR.match(text):
        return "the text names no file and no field"
    if _OURS.search(text):
        return "something else was meant"
    return None


@dataclasses.dataclass
class Report:
    """What became of the cases of a run."""

    refused: int = 0
    read: int = 0
    slowest_seconds: float = 0.0
    grown_bytes: int = 0  # by how much the largest resident memory grew
    failures: list[str] = dataclasses.field(default_factory=list)
    texts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def run(kind: str, begin: int, end: int, *, seed: int, folder: Path) -> Report:
    """Reads the cases begin ≤ number < end, with little more memory than the process has."""
    report = Report()
    with contextlib.suppress(Exception):  # the run below counts it
        read(kind, hostile(kind, seed, begin), folder)  # compiles, starts threads
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, limits[1]))
    try:
        for number in range(begin, end):
            _run_case(report, kind, number, seed, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    report.grown_bytes = grown * 1024
    return report


def _run_case(report: Report, kind: str, number: int, seed: int, folder: Path) -> None:
    files, failure = hostile(kind, seed, number), None
    faulthandler.dump_traceback_later(20 * MAX_SECONDS, exit=True)  # what hangs is seen too
    start = time.process_time()
    try:
        read(kind, files, folder)
        report.read += 1
    except ValueError as error:
        report.refused += 1
        report.texts[_class_of(str(error), folder)] += 1
        if failure := complaint(error, folder):
            failure += f": {error}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        seconds = time.process_time() - start
        faulthandler.cancel_dump_traceback_later()
    report.slowest_seconds = max(report.slowest_seconds, seconds)
    if failure is None and seconds > MAX_SECONDS:
        failure = f"it took {seconds:.1f} s"
    if failure is not None:
        report.failures.append(f"{kind} {number}, seed {seed}: {failure[:400]}")


def _class_of(text: str, folder: Path) -> str:
    """An error's text without what differs from case to case."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", text.replace(str(folder), ""))
    return text[:60]


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_paged.testing.stress.hostile_run", description=__doc__
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--end", type=int, default=125)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            options.kind, options.begin, options.end, seed=options.seed, folder=Path(folder) / "it"
        )
    print(json.dumps(dataclasses.asdict(report) | {"texts": report.texts.most_common(60)}))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
