# SPDX-License-Identifier: Apache-2.0
"""Everything that a GPU can tell about this checkout, in three commands of under ten minutes each.

    python benchmarks/gpu_check.py --part numerics|speed|tools [--out FILE] [--only STAGE …]
    python benchmarks/gpu_check.py --dry [--part …]
    python benchmarks/gpu_check.py --build 9.0

Needs no network and no git: an nvcc, jax with its CUDA plugin, numpy, jaxtyping, pytest,
scikit-build-core, nanobind and, for the model, flax, safetensors and tokenizers. Stages, each a
process of its own with a time limit, so that a crash or a hang of one is a line in the result and
the next one goes on:

  every part  device and environment: driver, versions, commit
              build: the CUDA module for the device at hand, or found built (also elsewhere, from
              the same sources, with the same Python, jaxlib and toolkit: --build makes one)
  numerics    gpu tests: tests/gpu; op tests: the op suites as far as they are of the native ops.
              They run in children, so that a test that hangs or crashes is named (gpu_tests.py)
  speed       decode, prefill: bandwidth against a copy, arithmetic against a matrix product, peers;
              options: 8-bit pages, layouts, windows, trees, MLA, few queries, the planner;
              experts, writes; a model's decode loop with command buffers off, on, and over loops
  tools       ncu: counters of decode, prefill, experts and planner;
              memcheck, racecheck, initcheck: compute-sanitizer over every kernel

What a stage does not use of its budget, the later ones may. Prints a table and writes JSON as it
goes. The exit status is 0 only when every stage passed and every target was met; what was skipped,
and why, stands in both. --dry runs the same code without a GPU: tiny shapes, whatever backend jax
has, no build, nothing judged. Without --part, all three parts run, in three times the time.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import gpu_stages
from gpu_report import failures, table, verdict
from gpu_run import Stage, run_stage
from gpu_stages import BENCHMARKS, PARTS, SITE

LIMIT_S = 560.0  # for a part
DRY_SLACK = 10  # a dry run measures nothing, so a slow or busy machine may take its time


def driver() -> str | None:
    """The driver's version by nvidia-smi, where there is one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def set_environment(dry: bool) -> None:
    """The variables that every stage inherits."""
    os.environ["PYTHONSAFEPATH"] = "1"  # the checkout's own jax_paged has no native modules
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    if dry:
        os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads would spin
    else:
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch and other tests want memory
        paths.insert(0, str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


class Check:
    """The record of a run, written to a file as stages end and as their rows come."""

    def __init__(self, dry: bool, out: Path, limit_s: float, parts: int):
        self.dry, self.out, self._parts = dry, out, parts
        self._began = time.monotonic()
        self._limit_s = limit_s * parts * (DRY_SLACK if dry else 1)
        sources = gpu_stages.source_hash()[:16]  # a copy has no commit
        environment = {"driver": driver(), "sources": sources}
        self.record: dict = {"dry": dry, "environment": environment, "stages": []}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def save(self) -> None:
        """Writes what is known by now."""
        device = str(self.record["environment"].get("device"))
        for result in self.record["stages"]:
            for row in result["rows"]:
                row["verdict"] = verdict(row, device, self.dry)
        self.record["seconds"] = round(self.seconds, 1)
        self.record["failures"] = failures(self.record)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        new = self.out.with_name(f".{self.out.name}.new")
        new.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        new.replace(self.out)  # whole at any time

    def go(self, stage: Stage, reserved_s: float) -> bool:
        """Runs a stage, but for the seconds that later ones are to have; whether it passed."""
        print(f"[{self.seconds:5.0f} s] {stage.name} …", flush=True)
        reserved_s *= self._limit_s / (self._parts * LIMIT_S)  # a short run has short stages
        results = self.record["stages"]
        results.append({"stage": stage.name, "status": "running", "reason": None, "rows": []})

        def show(result: dict) -> None:
            results[-1] = result
            self.save()

        result = run_stage(stage, self._limit_s - self.seconds - reserved_s, show)
        if stage.name in ("device", "environment"):
            for row in result["rows"]:
                self.record["environment"] |= row
            result["rows"] = []
        show(result)
        return result["status"] != "failed"

    def fail(self, why: str) -> None:
        """Records a failure of the run as a whole."""
        failed = {"stage": "gpu_check", "status": "failed", "reason": why, "rows": []}
        self.record["stages"].append(failed)
        self.save()

    def run(self, parts: list[str], only: list[str] | None) -> None:
        """All stages of the parts, or those whose names start with a word of `only`."""
        self.go(gpu_stages.device_stage(), 0)
        environment = self.record["environment"]
        if not self.dry and environment.get("platform") != "gpu":
            self.fail("no GPU: nothing was checked (--dry needs none)")
            return
        stages = gpu_stages.stages(parts, self.dry, environment.get("capability"), self.out)
        if only:
            named = (*only, "build", "environment")
            stages = [stage for stage in stages if stage.name.startswith(named)]
        for i, stage in enumerate(stages):
            later = sum(s.budget_s for s in stages[i + 1 :] if s.skip is None)
            if not self.go(stage, later) and stage.needed:
                self.fail(f"nothing was checked: {stage.name} failed")
                return
        package = str(environment.get("package"))
        if not self.dry and not package.startswith(str(SITE)):
            self.fail(f"measured was {package}, not what the build stage made")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=list(PARTS), help="which part (default: all three)")
    parser.add_argument("--dry", action="store_true", help="everything but the device")
    parser.add_argument("--build", metavar="CAPABILITY", help="build for such a device, e.g. 9.0")
    parser.add_argument(
        "--out", type=Path, default=None,
        help="JSON file (default benchmarks/results/gpu_check_PART.json; dry: a temporary one)",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="stages whose names start with one of these"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="what each part may take"
    )
    args = parser.parse_args()
    if args.build:
        result = run_stage(gpu_stages.build_stage(False, args.build), 3600)
        print(result["status"], result["reason"], result.get("output", ""))
        raise SystemExit(result["status"] == "failed")
    parts = [args.part] if args.part else list(PARTS)
    folder = Path(tempfile.gettempdir()) if args.dry else BENCHMARKS / "results"
    name = f"gpu_check_{args.part or 'all'}{'_dry' if args.dry else ''}.json"
    set_environment(args.dry)
    check = Check(args.dry, (args.out or folder / name).absolute(), args.limit, len(parts))
    check.run(parts, args.only)
    print(table(check.record))
    print(f"{check.out}, {check.record['seconds']} s")
    raise SystemExit(1 if check.record["failures"] else 0)


if __name__ == "__main__":
    main()
