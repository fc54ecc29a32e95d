# SPDX-License-Identifier: Apache-2.0
"""What a compiled program does with arrays as large as a pool."""

import math
import re

import jax


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

    What is inside of a fusion is never written; the fusion itself counts.
    """
    passes = {
        "custom-call", "parameter", "get-tuple-element", "bitcast", "tuple", "while", "call",
        "conditional", "opt-barrier",
    }  # fmt: skip
    size, text = math.prod(pool.shape), compiled.as_text() or ""
    fused = set(re.findall(r" fusion\(.*? calls=(%?[\w.-]+)", text))
    found, inside = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            inside = line.split(" ", 1)[0] in fused
        if inside:
            continue
        match = re.match(r"\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match and match[2] not in passes:
            shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
            if any(math.prod(map(int, shape.split(","))) >= size for shape in shapes):
                found.append(line.strip())
    return found
