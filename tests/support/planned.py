# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/plan_sharding.py says of programs over several devices. Not a test."""

import sys
from collections import Counter
from pathlib import Path

from meshes import Told

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from plan_sharding import SIZES as SIZES
from plan_sharding import Plan as Plan
from plan_sharding import write as write


def planned(plan: Plan, tokens: int, rows: int) -> Counter[Told]:
    """What the collectives of a step give, as `meshes.told` finds it in the compiled one."""
    found: Counter[Told] = Counter()
    for one in plan.collectives(tokens, rows):
        parts = plan.dp if one.kind == "reduce-scatter" else 1
        found.update(Told(one.kind, int(size) // parts, loops=0) for size in one.sizes)
    return found
