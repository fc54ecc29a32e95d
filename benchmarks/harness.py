# SPDX-License-Identifier: Apache-2.0
"""What the CPU benchmarks share: paired timing, limits, one command line, one form of result files.

A result file is {"environment": where it was measured, "rows": [...], "skipped": {peer: reason}}.
Each row is made by `Bench.add`:

    kind, case, size, dtype     what was measured
    ms                          contender → [median, 10th, 90th percentile], ours first
    ratio                       contender → its median over ours; above 1, ours is faster
    rate, unit                  work per second, where the bench counts work
    limit, percent_of_limit     in the same unit, measured in turns with the contenders

`run_all.py` runs every benchmark and `documents.py` makes tables and plots of the files.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import limits
import numpy as np

from jax_paged.native import huge_pages
from jax_paged.ops.zero_pool import zero_pool

RESULTS = Path(__file__).parent / "results"
# Before each call: a peer's idle threads (OpenMP's spin for milliseconds) go to sleep.
PAUSE_S = 0.02

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median and the 10th and 90th percentiles."""

    median: float
    p10: float
    p90: float

    def over(self, calls: int) -> "Timing":
        """The same for one of `calls` equal parts of a call."""
        return Timing(*(x / calls for x in dataclasses.astuple(self)))


def paired(
    contenders: Mapping[str, Callable[[], object]], *, min_rounds: int = 5, budget_s: float = 4.0,
    pause_s: float = PAUSE_S,
) -> dict[str, Timing]:  # fmt: skip
    """Times zero-argument calls that return when their work is done, one after another, in rounds.

    Each is warmed up once. Rounds go on until budget_s is spent, at least min_rounds. A pause slows
    what follows, arithmetic more than reading, and calls of several threads most: Linux may wake a
    thread on the core of the one that wakes it, and takes up to 5 ms to find it another. So a call
    shorter than the pause is repeated for as long as the pause was, and then as long again: the
    median of those is what counts. Contenders without threads of their own need no pause.
    """
    for call in contenders.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    began = time.perf_counter()
    while len(next(iter(seconds.values()))) < min_rounds or time.perf_counter() - began < budget_s:
        for name, call in contenders.items():
            time.sleep(pause_s)
            taken = _repeated(call, pause_s)
            seconds[name].append(taken if taken >= pause_s else _repeated(call, pause_s))
    return {
        name: Timing(*(float(np.percentile(taken, p)) for p in (50, 10, 90)))
        for name, taken in seconds.items()
    }


def _repeated(call: Callable[[], object], at_least: float) -> float:
    """The median of the seconds of calls, which together take at_least so many."""
    taken: list[float] = []
    left = at_least
    while not taken or left > 0:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
        left -= taken[-1]
    return float(np.median(taken))


def blocking(function: Callable[..., Any], *arguments, **options) -> Callable[[], object]:
    """A jitted call that returns when the device has finished; options that are arrays are traced.

    The others are static.
    """
    traced = {k: options.pop(k) for k in list(options) if isinstance(options[k], jax.Array)}
    jitted = jax.jit(functools.partial(function, **options))
    return lambda: jax.block_until_ready(jitted(*arguments, **traced))


def agree(contenders: Mapping[str, Callable[[], Any]], limit: float) -> None:
    """Checks that each contender gives what the first one does, up to limit · its largest output.

    They may give torch tensors.
    """
    ours: np.ndarray | None = None
    for name, call in contenders.items():
        out = call()
        out = np.asarray(out.float() if hasattr(out, "float") else out, np.float32)
        ours = out if ours is None else ours
        error = np.abs(out - ours).max() / np.abs(ours).max()
        if not error <= limit:
            raise ValueError(f"{name}: differs by {error:.3g} of the largest output")


def as_tensor(x: jax.Array | np.ndarray) -> Any:
    """A copy as a torch tensor, in the kind of memory that the weights of a model have."""
    import torch

    torch.set_num_threads(limits.NUM_THREADS)
    memory = huge_pages.empty(x.shape, x.dtype)
    np.copyto(memory, np.asarray(x))
    bits = memory.view(np.int16) if x.dtype.name == "bfloat16" else memory  # unknown to torch
    return torch.from_numpy(bits).view(getattr(torch, x.dtype.name))


def as_pool(pages: jax.Array) -> jax.Array:
    """A copy of the pages in the kind of memory that the pools of a state have."""
    fill = jax.jit(lambda pool, pages: pool.at[:].set(pages), donate_argnums=0)
    return fill(zero_pool(pages.shape, pages.dtype), pages)


def cpu_model() -> str:
    """The processor's name as the kernel gives it; family and model, since names can be vague."""
    known = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    if "model name" not in known:
        return platform.processor()
    return f"{known['model name']}, family {known['cpu family']}, model {known['model']}"


def git(*command: str) -> str:
    """What git says of this checkout."""
    where = Path(__file__).parent
    done = subprocess.run(["git", *command], cwd=where, capture_output=True, text=True)
    return done.stdout.strip()


def environment() -> dict[str, object]:
    """Where a figure was measured: device, versions, commit."""
    import jax_paged

    commit = ""  # in a copy, or without a git
    if shutil.which("git") is not None:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results")
        commit = git("describe", "--always") + ("-dirty" if changed else "")
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": cpu_model(),
        "threads": limits.NUM_THREADS,
        "isa": jax_paged.build_info()["cpu"].get("isa"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


class Bench:
    """One benchmark script: its command line, its rows, its result file.

    With --dry all sizes are tiny and a contender is called once or twice: the figures mean nothing,
    and the script is tested.

    Args:
      description: of --help.
      options: more options of the command line, name → arguments of `add_argument`.
    """

    def __init__(self, description: str, **options: dict[str, Any]):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--quick", action="store_true", help="fewer shapes")
        parser.add_argument("--dry", action="store_true", help="tiny shapes, once: a test")
        parser.add_argument("--no-peers", action="store_true", help="only ours and the reference")
        parser.add_argument("--save", metavar="FILE", type=Path, help="write a result file")
        for name, arguments in options.items():
            parser.add_argument(f"--{name}", **arguments)
        self.args = parser.parse_args()
        self.dry: bool = self.args.dry
        self.rows: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}
        where = environment()
        print(f"{where['cpu']}, {where['threads']} threads, isa {where['isa']}", flush=True)

    def pick(self, full: T, *, quick: T | None = None, dry: T) -> T:
        """What goes with the options."""
        if self.dry:
            return dry
        return quick if self.args.quick and quick is not None else full

    def has_peer(self, package: str, remedy: str) -> bool:
        """Whether to measure against a package; says why not."""
        found = importlib.util.find_spec(package) is not None
        return not self.lacks(package, None if found else f"not installed: {remedy}")

    def lacks(self, peer: str, reason: str | None) -> bool:
        """Whether a peer is left out, for this reason if there is one; says why."""
        reason = "--no-peers" if self.args.no_peers else reason
        if reason is not None and peer not in self.skipped:
            self.skipped[peer] = reason
            print(f"{peer}: skipped, {reason}", flush=True)
        return reason is not None

    def paired(
        self, contenders: Mapping[str, Callable[[], object]], *, min_rounds=5, budget_s=4.0,
        pause_s=PAUSE_S,
    ) -> dict[str, Timing]:  # fmt: skip
        """`harness.paired`, in a dry run once."""
        if self.dry:
            min_rounds, budget_s = 1, 0.0
        return paired(contenders, min_rounds=min_rounds, budget_s=budget_s, pause_s=pause_s)

    def reads(self) -> limits.Limit:
        """Read bandwidth: a limit in GB/s."""
        return limits.reads(2**20) if self.dry else limits.reads()

    def multiply_adds(self) -> limits.Limit:
        """Rate of f32 fused multiply-adds: a limit in GFLOP/s."""
        return limits.multiply_adds(10_000) if self.dry else limits.multiply_adds()

    def beside(
        self, limit: limits.Limit, contenders: Mapping[str, Callable[[], object]], *, budget_s=4.0
    ) -> tuple[dict[str, Timing], float]:
        """`paired`, where measuring the limit takes its turn too: (times, the limit's rate).

        What else uses the memory meanwhile then slows both. Its turn is after ours: behind a peer
        it would meet that one's threads before they sleep.
        """
        ours, *_ = contenders
        in_turns = {ours: contenders[ours], "limit": limit.call, **contenders}
        times = self.paired(in_turns, budget_s=budget_s)
        return times, limit.work / 1e9 / times.pop("limit").median

    def add(
        self,
        kind: str,
        case: str,
        size: object,
        dtype: str,
        times: Mapping[str, Timing],
        *,
        amount: float | None = None,
        unit: str | None = None,
        limit: float | None = None,
        **more: object,
    ) -> dict[str, Any]:
        """Adds a row and prints it.

        Args:
          times: the first contender is ours.
          amount: work of a call: bytes for GB/s, operations for GFLOP/s, tokens for tok/s.
          limit: in `unit`.
          more: further entries of the row.
        """
        ours, *peers = times
        row: dict[str, Any] = {
            "kind": kind, "case": case, "size": str(size), "dtype": dtype,
            "ms": {k: [1e3 * t.median, 1e3 * t.p10, 1e3 * t.p90] for k, t in times.items()},
            "ratio": {name: times[name].median / times[ours].median for name in peers},
        }  # fmt: skip
        if amount is not None:
            scale = {"GB/s": 1e9, "GFLOP/s": 1e9, "tok/s": 1.0}[str(unit)]
            row |= {"rate": amount / times[ours].median / scale, "unit": unit}
        if limit is not None:
            row |= {"limit": limit, "percent_of_limit": 100 * row["rate"] / limit}
        row |= more
        self.rows.append(row)
        print(line(row), flush=True)
        return row

    def finish(self) -> None:
        """Writes the result file, if one is asked for."""
        if self.args.save is None:
            return
        record = {"environment": environment(), "rows": self.rows, "skipped": self.skipped}
        write_result(record, self.args.save)
        print("saved", self.args.save)


def write_result(record: Mapping[str, Any], file: Path) -> None:
    """Writes a result file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def of_runs(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several runs: the median of each figure.

    Raises:
      ValueError: the runs differ in something else than figures.
    """
    first, *others = records
    rows = _medians([record["rows"] for record in records])
    if any(other["skipped"] != first["skipped"] for other in others):
        raise ValueError("the runs skipped different peers")
    more = {"runs": len(records)} if others else {}
    return first | {"environment": first["environment"] | more, "rows": rows}


def _medians(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return statistics.median(values)
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        return {key: _medians([value[key] for value in values]) for key in first}
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        return [_medians(each) for each in zip(*values, strict=True)]
    if any(value != first for value in values):
        raise ValueError(f"the runs differ: {values}")
    return first


def line(row: Mapping[str, Any]) -> str:
    """A row as people read it."""
    median, p10, p90 = next(iter(row["ms"].values()))
    text = (
        f"{row['kind']:8} {row['case']:26} {row['size']:>12} {row['dtype']:9} {median:9.3f} ms "
        f"[{p10:.3f}, {p90:.3f}]"
    )
    if "rate" in row:
        text += f" {row['rate']:7.1f} {row['unit']}"
    if "limit" in row:
        text += f" {row['percent_of_limit']:5.1f} % of {row['limit']:.1f}"
    if row["ratio"]:
        text += " | slower: " + ", ".join(f"{k} {r:.2f}x" for k, r in row["ratio"].items())
    return text
