"""Paired timing: the contenders take turns on one set of inputs, so that noise hits them alike."""

import dataclasses
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

RESULTS = Path(__file__).parent / "results"
# Before each call: the last contender's idle threads (OpenMP's spin for milliseconds) go to sleep.
PAUSE_S = 0.02


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median and the 10th and 90th percentiles."""

    median: float
    p10: float
    p90: float


def paired(
    contenders: dict[str, Callable[[], object]], *, min_rounds: int = 5, budget_s: float = 4.0
) -> dict[str, Timing]:
    """Times zero-argument calls that return when their work is done, one after another, in rounds.

    Each is warmed up once. Rounds go on until budget_s is spent, at least min_rounds.
    """
    for call in contenders.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    began = time.perf_counter()
    while len(next(iter(seconds.values()))) < min_rounds or time.perf_counter() - began < budget_s:
        for name, call in contenders.items():
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(*(float(np.percentile(taken, p)) for p in (50, 10, 90)))
        for name, taken in seconds.items()
    }


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment() -> dict[str, object]:
    """Where a figure was measured: device, versions, commit."""
    import jax_paged

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent,
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": cpu_model(),
        "isa": jax_paged.build_info()["cpu"].get("isa"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def save(name: str, rows: list[dict]) -> Path:
    """Writes benchmarks/results/<name>.json with the environment."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path
