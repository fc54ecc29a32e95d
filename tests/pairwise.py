"""Rows of a table that cover every pair of values of several factors. Not a test."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def cover_pairs(
    factors: Mapping[str, Sequence[Any]], num_rows: int, seed: int
) -> tuple[dict[str, Any], ...]:
    """num_rows rows or more: first those that cover the pairs, greedily, then random ones."""
    rng = np.random.default_rng(seed)

    def draw():
        return {name: int(rng.integers(len(values))) for name, values in factors.items()}

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(factors, 2)}

    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        a, i, b, j = min(missing)
        best = max(
            (draw() | {a: i, b: j} for _ in range(12)), key=lambda row: len(pairs(row) & missing)
        )
        missing -= pairs(best)
        rows.append(best)
    rows += [draw() for _ in range(num_rows - len(rows))]
    return tuple({name: factors[name][i] for name, i in row.items()} for row in rows)
