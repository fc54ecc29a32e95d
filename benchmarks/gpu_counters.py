# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: runs Nsight Compute and makes a row of each kernel that it has seen.

python benchmarks/gpu_counters.py --rows FILE --case NAME ncu … --csv --page details PROGRAM …
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def counters(lines: Iterable[str]) -> list[dict]:
    """A row per kernel of what `ncu --csv --page details` prints: {"kernel": …, "counters": …}."""
    lines = list(lines)
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    kernels: dict[str, dict] = {}
    for line in csv.DictReader(lines[header:]):
        name = (re.findall(r"\w*Kernel\w*", line["Kernel Name"]) or [line["Kernel Name"]])[0]
        kernel = kernels.setdefault(line["ID"], {"kernel": name, "counters": {}})
        if line.get("Metric Name"):
            kernel["counters"][line["Metric Name"]] = (
                f"{line['Metric Value']} {line['Metric Unit']}".strip()
            )
    return list(kernels.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--case", required=True, help="what is profiled")
    args, command = parser.parse_known_args()
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = counters(run.stdout.splitlines())
    with args.rows.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"kind": "counters", "case": args.case, **row}) + "\n")
    print(run.stdout if run.returncode or not rows else f"{len(rows)} kernels")
    if run.returncode == 0 and not rows:
        sys.exit("ncu has seen no kernel")
    raise SystemExit(run.returncode)


if __name__ == "__main__":
    main()
