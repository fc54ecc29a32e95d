# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does with arrays as large as a pool."""

import math
import re

import jax

# What hands an array on without touching it.
_PASSES = frozenset((
    "custom-call", "parameter", "get-tuple-element", "bitcast", "tuple", "while", "call",
    "conditional", "opt-barrier",
))  # fmt: skip


def is_in_place(compiled: jax.stages.Compiled, pool: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a compiled program never makes an array as large as `pool` beside the donated one.

    Looks in the optimised HLO for pool-sized copies, selects, fusions and the like; a custom call,
    parameter, tuple access, bitcast, while or call passes the pool on without touching it.
    """
    return not pool_sized_ops(compiled, pool)


def pool_sized_ops(
    compiled: jax.stages.Compiled, pool: jax.Array | jax.ShapeDtypeStruct
) -> list[str]:
    """The HLO lines of `compiled` that write a new array with as many elements as `pool`.

    What is inside of a fusion is never written; the fusion itself counts. Not so one of XLA:GPU
    whose results come from scatters or custom calls alone: they write into their operand, and where
    that must stay as it is, XLA puts a copy before the fusion.
    """
    size, text = math.prod(pool.shape), compiled.as_text() or ""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{"):
            lines = computations.setdefault(line.split(" ", 1)[0], [])
        else:
            lines.append(line)
    fused = set(re.findall(r" fusion\(.*? calls=(%?[\w.-]+)", text))

    def is_written(line: str, passes: frozenset[str]) -> bool:
        match = re.match(r"\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match is None or match[2] in passes:
            return False
        shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
        if all(math.prod(map(int, shape.split(","))) < size for shape in shapes):
            return False
        inner = re.search(r" fusion\(.*? calls=(%?[\w.-]+)", line)
        updates = computations.get(inner[1], []) if inner else []
        in_place = any(re.search(r" (scatter|custom-call)\(", each) for each in updates)
        return not in_place or any(is_written(each, _PASSES | {"scatter"}) for each in updates)

    return [
        line.strip()
        for name, lines in computations.items() if name not in fused
        for line in lines if is_written(line, _PASSES)
    ]  # fmt: skip
