# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: tests in child processes, so that each one that hangs has a name.

    python benchmarks/gpu_tests.py --rows FILE [--seconds S] [--workers N] [--junit FILE] TESTS …

A child (gpu_tests_plugin.py) collects the tests, brings jax up and then asks for a batch at a time.
A child whose test is not over after --limit seconds is killed, whatever it hangs in, and so is one
that has lost its device. Another child goes on with the rest of the batch. This process imports no
jax, so nothing of the device can stop it.

Each test has a line of output and a place in the junit file. Each one that failed, hung, crashed or
was not run has a row with its name, and the last row counts all of them. The exit status is 0 when
every test ran, and none failed.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter, deque
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOCKET = "JAX_PAGED_TESTS_SOCKET"
BATCH = 16
STARTS = 2  # a worker whose children die this often before their first test gives up
LAST_WORDS_S = 3.0  # for faulthandler to print where a child hangs
FAILED = ("failed", "hung", "crashed", "broken", "not run")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a test went: an outcome of `FAILED`, "passed" or "skipped"."""

    test: str
    outcome: str
    seconds: float
    text: str = ""


class Child:
    """One pytest process; its output goes to a file, its events come over a socket."""

    def __init__(self, arguments: list[str]):
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._socket, theirs = socket.socketpair()
        self._file = self._socket.makefile("rw")
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {SOCKET: str(theirs.fileno()), "PYTHONPATH": os.pathsep.join(paths)}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the tests need none of what is installed
        # What a driver or a plugin warns of is no wrong number.
        command = [sys.executable, "-P", "-m", "pytest", "-W", "default", "--tb=short"]
        command += ["-p", "gpu_tests_plugin"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, "-p", "no:cacheprovider", *arguments], env=env, stdin=subprocess.DEVNULL,
                stdout=self._output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def event(self, until: float) -> dict | None:
        """What it says next, None when it has gone; raises TimeoutError at the time `until`."""
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        line = ""
        with contextlib.suppress(ConnectionResetError):
            line = self._file.readline()
        return json.loads(line) if line else None

    def give(self, tests: list[str]) -> None:
        with contextlib.suppress(OSError):  # if it has gone, `event` will tell
            self._file.write(json.dumps(tests) + "\n")
            self._file.flush()

    def end(self, *, hung: bool) -> tuple[int | None, str]:
        """Ends it, however deep it hangs: (its exit status, its last words).

        The status is None where even SIGKILL has no effect, as inside of a driver that hangs.
        """
        if hung:
            self._process.send_signal(signal.SIGABRT)
        try:
            status = self._process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS_S)
            status = self._process.poll()
        with contextlib.suppress(OSError):
            self._file.close()
            self._socket.close()
        with self._output:
            self._output.seek(0)
            words = self._output.read().decode(errors="replace")
        where = words.rfind("Fatal Python error")  # faulthandler's, the innermost call first
        return status, words[where:][:2000] if where >= 0 else words[-2000:]


class Run:
    """The tests that are left, and how the others went."""

    def __init__(self, args: argparse.Namespace, rest: list[str]):
        self._args, self._rest = args, rest
        self._end = time.monotonic() + args.seconds
        self._lock = threading.Lock()
        self._left: deque[str] | None = None  # unknown until a child has collected them
        self._broken: set[str] = set()
        self.results: list[Result] = []

    def record(self, result: Result) -> None:
        with self._lock:
            self.results.append(result)
            print(f"{result.outcome:8}{result.seconds:7.2f} s  {result.test}", flush=True)
            if result.outcome in FAILED:
                self._add_row(
                    kind="test", case=result.test, outcome=result.outcome,
                    seconds=round(result.seconds, 2),
                    error=f"{result.outcome}: {last_line(result.text)}", text=result.text,
                )  # fmt: skip

    def _add_row(self, **row) -> None:
        with self._args.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _take(self) -> list[str]:
        """The next tests, all of one file: what they share is set up once."""
        with self._lock:
            assert self._left is not None
            batch = list(itertools.islice(self._left, BATCH))
            batch = [test for test in batch if file_of(test) == file_of(batch[0])]
            for _ in batch:
                self._left.popleft()
            return batch

    def work(self) -> None:
        """One worker: a child after the other, until no test is left or the time is up."""
        fruitless = 0
        while self._left != deque() and fruitless < STARTS and time.monotonic() < self._end:
            fruitless = 0 if self._serve(Child(self._rest)) else fruitless + 1

    def _serve(self, child: Child) -> int:
        """Gives a child tests until it needs no more or has to be ended; how many it has begun."""
        batch: list[str] = []
        test, begun, began, limit = None, 0, time.monotonic(), self._args.start
        said, hung = None, False
        try:
            while (said := child.event(min(began + limit, self._end))) is not None:
                if said["event"] == "broken":
                    self._break(said)
                    continue
                began, limit = time.monotonic(), self._args.limit
                if said["event"] == "began":
                    test, begun = said["test"], begun + 1
                elif said["event"] == "ended":
                    batch.remove(said["test"])
                    test = None
                    what = (said[key] for key in ("test", "outcome", "seconds", "text"))
                    self.record(Result(*what))
                    if said["lost"]:
                        break
                else:  # "ready" or "next"
                    with self._lock:
                        if self._left is None:
                            self._left = deque(said["tests"])
                    batch = self._take()
                    child.give(batch)
                    if not batch:
                        break
        except TimeoutError:
            hung = True
        seconds = time.monotonic() - began
        status, words = child.end(hung=hung)
        killed = "" if status is not None else "; it could not be killed"
        if hung and time.monotonic() > self._end:
            outcome, why = "not run", "the stage's time was up"
        elif hung:
            outcome, why = "hung", f"no end after {seconds:.0f} s{killed}"
        else:
            outcome, why = "crashed", f"exit status {status} after {seconds:.0f} s"
        if test is not None:
            batch.remove(test)
            self.record(Result(test, outcome, seconds, f"{words}\n{why}"))
        elif hung or said is None:
            self.record(Result("(a child without a test)", outcome, seconds, f"{words}\n{why}"))
        if batch:
            with self._lock:
                assert self._left is not None
                self._left.extendleft(reversed(batch))
        return begun

    def _break(self, event: dict) -> None:
        with self._lock:  # each child says so
            known = event["test"] in self._broken
            self._broken.add(event["test"])
        if not known:
            self.record(Result(event["test"], "broken", 0.0, event["text"]))

    def finish(self) -> bool:
        """Names what was not run, counts, writes the junit file; whether all went well."""
        for test in self._left or ():
            self.record(Result(test, "not run", 0.0, "the stage's time was up"))
        counts = Counter(result.outcome for result in self.results)
        slowest = sorted(self.results, key=lambda result: -result.seconds)[:10]
        self._add_row(
            kind="tests", **counts, slowest=[[r.test, round(r.seconds, 2)] for r in slowest]
        )
        print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
        if self._args.junit is not None:
            write_junit(self.results, self._args.junit)
        return counts["passed"] > 0 and not any(counts[outcome] for outcome in FAILED)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def write_junit(results: list[Result], path: Path) -> None:
    """The results in the form that pytest --junit-xml has made common."""
    suite = ET.Element("testsuite", name="gpu_check", tests=str(len(results)))
    for result in results:
        file, _, name = result.test.partition("::")
        case = ET.SubElement(
            suite, "testcase", classname=file, name=name, time=f"{result.seconds:.3f}"
        )
        if result.outcome != "passed":
            kind = "skipped" if result.outcome == "skipped" else "failure"
            message = f"{result.outcome}: {last_line(result.text)}"
            detail = ET.SubElement(case, kind, message=message)
            detail.text = "".join(c for c in result.text if c.isprintable() or c in "\n\t")
    ET.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--seconds", type=float, default=500.0, help="for all of them")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for a test")
    parser.add_argument("--start", type=float, default=90.0, help="seconds for jax to come up")
    parser.add_argument("--workers", type=int, default=1, help="children at a time")
    parser.add_argument("--junit", type=Path, default=None, help="an XML file of all tests")
    args, rest = parser.parse_known_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a child that is aborted leaves no core
    run = Run(args, rest)
    try:
        with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
            for worker in [pool.submit(run.work) for _ in range(args.workers)]:
                worker.result()
    finally:
        passed = run.finish()
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
