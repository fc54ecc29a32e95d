# SPDX-License-Identifier: Apache-2.0
"""Runs a stage of gpu_check.py: a process with a time limit, whose rows come in a file as it goes.

A program that measures (`gpu_timing.Report`) says in that file what it begins and ends. If that
hangs or crashes, the row says in what, and the program is started again behind it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
POLL_S = 0.1


@dataclasses.dataclass
class Stage:
    """A process to run.

    budget_s: what it may take; more, where the stages before it took less.
    stall_s: seconds after which something that it has begun hangs; None: it does not say.
    skip: why it is not run. needed: whether nothing after it makes sense without it.
    before: is called first. after(output, rows): what is wrong with what it left, or None.
    """

    name: str
    command: list[str]
    budget_s: float
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    stall_s: float | None = None
    skip: str | None = None
    needed: bool = False
    before: Callable[[], object] | None = None
    after: Callable[[str, list[dict]], str | None] | None = None


class Rows:
    """The lines that a stage's programs have added to its file."""

    def __init__(self, path: Path):
        self._path = path
        self.rows: list[dict] = []
        self.begun = 0  # attempts, which --skip counts
        self.open: list[dict] = []  # what has begun and not ended, the innermost last
        self.since = time.monotonic()
        self._seen = 0

    def read(self) -> bool:
        """Takes the new lines; whether there are any."""
        if not self._path.exists():
            return False
        lines = self._path.read_text(encoding="utf-8").split("\n")[self._seen : -1]
        for line in map(json.loads, lines):
            if "began" in line:
                self.open.append(line["began"])
                self.begun += line["counted"]
            elif "ended" in line:
                self.open.pop()
            else:
                self.rows.append(line)
        self._seen += len(lines)
        if lines:
            self.since = time.monotonic()
        return bool(lines)


def run_stage(
    stage: Stage, limit_s: float, on_rows: Callable[[dict], object] = lambda result: None
) -> dict:
    """Runs one stage to its end or its limit; says how it went, whatever happened.

    on_rows(result) is called with what is known as rows come.
    """
    result: dict = {"stage": stage.name, "status": "skipped", "reason": stage.skip, "rows": []}
    if stage.skip is not None:
        return result
    result["status"] = "running"
    began = time.monotonic()
    end, output, reason = began + limit_s, "", None
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        rows = Rows(Path(folder, "rows"))
        result["rows"] = rows.rows
        try:
            if stage.before is not None:
                stage.before()
            while True:
                skip, reason = rows.begun, _once(stage, folder, rows, end, log, result, on_rows)
                if reason is None or not rows.open:
                    break
                rows.rows.append({**rows.open[-1], "error": reason})
                rows.open.clear()
                if rows.begun == skip or time.monotonic() >= end:
                    break
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if log.exists():
            output = log.read_text(encoding="utf-8", errors="replace")
    if reason is None and stage.after is not None:
        try:
            reason = stage.after(output, rows.rows)
        except Exception as error:
            reason = f"output not understood: {type(error).__name__}: {error}"
    result["seconds"] = round(time.monotonic() - began, 1)
    result["status"], result["reason"] = ("failed", reason) if reason else ("passed", None)
    result["output"] = output[-8000:] if reason else output[-400:]
    return result


def _once(stage, folder: str, rows: Rows, end: float, log: Path, result: dict, on_rows):
    """Runs the stage's program once, behind what was begun before; what went wrong, or None."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time was left")
    values = {"rows": f"{folder}/rows", "seconds": f"{max(0.8 * left, left - 15):.0f}"}
    values |= {"skip": str(rows.begun), "folder": folder}
    command = list(stage.command)
    for name, value in values.items():
        command = [part.replace(f"{{{name}}}", value) for part in command]
    rows.since = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | stage.env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                if rows.read():
                    on_rows(result)
                now = time.monotonic()
                if process.returncode is not None:
                    return f"exit status {process.returncode}" if process.returncode else None
                if now > end:
                    return f"not done after {left:.0f} s"
                if stage.stall_s is not None and rows.open and now > rows.since + stage.stall_s:
                    return f"hung: no end after {stage.stall_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                process.wait(10)
