# SPDX-License-Identifier: Apache-2.0
"""Runs every CPU benchmark, one after another, and makes the documents' tables and plots.

    python benchmarks/run_all.py [--only NAME ...] [--quick] [--no-peers]
    python benchmarks/run_all.py --dry     (tiny sizes, into a temporary folder: a test)
    python benchmarks/run_all.py --check   (measures nothing: which rows miss their goals)

Each is a process of its own, on a machine that should have nothing else to do, and leaves
benchmarks/results/NAME.json; one that fails leaves its old file, and the exit status is 1. Then
`documents.py` rewrites README.md, pages of docs and docs/plots from the files. `goals.py` has the
goals; --check ends with 1 where a row misses one without a proof that it cannot reach it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import documents
import goals
import harness

NAMES = tuple(documents.TITLES)


def run(name: str, results: Path, flags: list[str]) -> bool:
    """Runs one benchmark; whether it went well."""
    script = Path(__file__).with_name(f"bench_{name}.py")
    target = results / f"{name}.json"
    print(f"\n=== {name}", flush=True)
    began = time.perf_counter()
    status = subprocess.run([sys.executable, script, *flags, "--save", target]).returncode
    seconds = time.perf_counter() - began
    print(f"=== {name}: {'done' if not status else f'FAILED ({status})'}, {seconds:.0f} s")
    return status == 0


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
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, once: a test")
    parser.add_argument("--no-peers", action="store_true", help="only ours and the reference")
    parser.add_argument("--check", action="store_true", help="only list rows that miss their goals")
    parser.add_argument(
        "--out", type=Path, help="where a dry run writes (default: a temporary folder)"
    )
    args = parser.parse_args()
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
        failed = [name for name in args.only if not run(name, results, flags)]
        documents.write(results, root)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
