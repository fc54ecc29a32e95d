# SPDX-License-Identifier: Apache-2.0
"""Which tests a plain `pytest` runs, and which wait for `pytest --deep`.

The default tier has every test function, and each value of each of its parameters at least once;
where CUDA kernels are among the implementations, they have each value once for themselves.
The deep tier has all combinations. Two marks change that: `deep` keeps a test, or one value, out of
the default tier; `every` keeps all combinations in it.

The choice is greedy and the same in every run: next comes whatever has most values that are missing
yet. Among equals native code goes first, and then a hash of the name decides, so that one function
does not take the combinations that its neighbour takes.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
from _pytest.mark import ParameterSet


def default_tier(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those of the items that a plain run has, in their order."""
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("deep") is None:
            groups[item.nodeid.partition("[")[0], _cuda(item)].append(item)
    chosen = {item for group in groups.values() for item in _cover(group)}
    return [item for item in items if item in chosen]


def first_of(values: Iterable, count: int) -> list:
    """Parameters of a test, many alike: all but the first `count` are deep. A tuple is several."""

    def parameter(value):
        if isinstance(value, ParameterSet):
            return value
        return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)

    values = [parameter(value) for value in values]
    deep = [v._replace(marks=[*v.marks, pytest.mark.deep]) for v in values[count:]]
    return [*values[:count], *deep]


def part_of(items: Sequence[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """Part `number`, from 1 on, of `parts` equal parts in which neighbours are far apart."""
    return [item for item in items if _hash(item) % parts == number - 1]


def _cover(group: list[pytest.Item]) -> list[pytest.Item]:
    """Items that have all values of all parameters, few of them."""
    if any(item.get_closest_marker("every") for item in group):
        return group
    values = {item: _values(item) for item in group}
    missing, chosen = set().union(*values.values()), []
    ordered = sorted(group, key=lambda item: ("reference" in item.nodeid, _hash(item)))
    while missing:
        best = max(ordered, key=lambda item: len(values[item] & missing))  # the first of equals
        chosen.append(best)
        missing -= values[best]
    return chosen or group[:1]


def _cuda(item: pytest.Item) -> str:
    """How an item runs CUDA kernels: "emulated", "sim", or "" where it does not."""
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("implementation") if callspec is not None else None
    return name if name in ("emulated", "sim") else ""


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """(parameter, identity of its value) of one item; the items of a test share the values."""
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else {(k, id(v)) for k, v in callspec.params.items()}


def _hash(item: pytest.Item) -> int:
    # By the file's name alone: one that moves to another folder keeps its combinations.
    name = f"tests/{item.path.name}::{item.nodeid.partition('::')[2]}"
    # CUDA kernels get the cases of the native ones, whose programs share much.
    how = _cuda(item)
    return zlib.crc32((name.replace(how, "native") if how else name).encode())
