# SPDX-License-Identifier: Apache-2.0
"""Runs every CPU benchmark, one after another, and makes the documents' tables and plots.

    python benchmarks/run_all.py [--only NAME ...] [--runs N] [--isa avx2] [--quick] [--no-peers]
    python benchmarks/run_all.py --dry     (tiny sizes, into a temporary folder: a test)
    python benchmarks/run_all.py --check   (measures nothing: which rows miss their goals)

Each is a process of its own, on a machine that should have nothing else to do, and leaves
benchmarks/results/NAME.json; one that fails leaves the file as it was, and the exit status is 1.
With several runs the benchmarks take turns, and the file has the medians of each figure: neighbours
of a virtual machine slow down minutes, seldom the same row twice. Then `documents.py` rewrites
README.md, pages of docs and docs/plots from the files. `goals.py` has the goals; --check ends with
1 where a row misses one without a proof that it cannot reach it.

With --isa, ours and the peers do without newer instructions, and files go to results/avx2. vLLM's
kernels are a build of their own then (`vllm_cpu.py`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import documents
import goals
import harness

NAMES = tuple(documents.TITLES)
# What holds ours, XLA, PyTorch and its libraries to an instruction set.
HELD_TO = {
    "avx2": {
        "JAX_PAGED_CPU_ISA": "avx2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}  # fmt: skip


def run(name: str, target: Path, flags: list[str], environment: dict[str, str]) -> bool:
    """Runs one benchmark; whether it went well."""
    script = Path(__file__).with_name(f"bench_{name}.py")
    print(f"\n=== {name}", flush=True)
    began = time.perf_counter()
    command = [sys.executable, script, *flags, "--save", target]
    status = subprocess.run(command, env=os.environ | environment).returncode
    seconds = time.perf_counter() - began
    print(f"=== {name}: {'done' if not status else f'FAILED ({status})'}, {seconds:.0f} s")
    return status == 0


def run_some(
    names: list[str], results: Path, flags: list[str], isa: str | None, runs: int
) -> list[str]:
    """Runs benchmarks by turns; the names of those that failed.

    A file has the medians of the runs that there were yet, should the next one be cut off.
    """
    environment, failed = HELD_TO[isa] if isa else {}, []
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "run.json"
        for _ in range(runs):
            for name in names:
                if name in failed:
                    continue
                if run(name, target, flags, environment):
                    found[name].append(json.loads(target.read_text(encoding="utf-8")))
                    result = harness.of_runs(found[name])
                    harness.write_result(result, results / f"{name}.json")
                else:
                    failed.append(name)
    return failed


def check(results: Path) -> None:
    """Prints the rows that miss their goals; raises SystemExit if one does without a proof."""
    found = goals.misses(*documents.load_all(results))
    for miss in found:
        print(miss, f"(cannot: docs/{miss.proof})" if miss.proof else "")
    open_ones = sum(miss.proof is None for miss in found)
    if open_ones:
        raise SystemExit(f"{open_ones} rows miss a goal")


def main() -> None:
    parser = argparse.ArgumentParser(description="Every CPU benchmark, then tables and plots.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--runs", type=int, default=1, help="whose medians count (default 1)")
    parser.add_argument("--isa", choices=HELD_TO, help="an older instruction set")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, once: a test")
    parser.add_argument("--no-peers", action="store_true", help="only ours and the reference")
    parser.add_argument("--check", action="store_true", help="only list rows that miss their goals")
    parser.add_argument(
        "--out", type=Path, help="where a dry run writes (default: a temporary folder)"
    )
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"argument --runs: expected at least 1, got {args.runs}")
    if args.check:
        return check(harness.RESULTS)
    flags = [f"--{name}" for name in ("quick", "dry") if getattr(args, name)]
    flags += ["--no-peers"] if args.no_peers else []
    with tempfile.TemporaryDirectory() as temporary:
        results, root = harness.RESULTS, documents.ROOT
        if args.dry:  # its figures mean nothing: copies of the documents get them
            root = args.out or Path(temporary)
            results = root / "results"
            (root / "docs").mkdir(parents=True, exist_ok=True)
            for file in documents.FILES:
                shutil.copy(documents.ROOT / file, root / file)
        of_isa = results / args.isa if args.isa else results
        failed = run_some(args.only, of_isa, flags, args.isa, args.runs)
        documents.write(results, root)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
