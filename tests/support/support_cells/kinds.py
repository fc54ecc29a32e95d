# SPDX-License-Identifier: Apache-2.0
"""The kinds of cells, and the features that are the table's columns."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_paged.layout import LAYOUTS

# What each stands for, docs/support.md tells (`support_table.MEANINGS`).
OF_ROWS = ("windows", "pins", "slid rows", "trees", "cascade")
OF_LOGITS = ("soft cap", "ALiBi", "sinks", "inline RoPE")
FEATURES = (*OF_ROWS, "8-bit", "fp8 output", *OF_LOGITS, *LAYOUTS, "latent", "groups")


@dataclass(frozen=True)
class Runs:
    """`check` runs the op with the feature and compares with an oracle."""

    check: Callable[[], None]


@dataclass(frozen=True)
class Refused:
    """`call` raises an error with this text in it, which names the argument or the status."""

    call: Callable[[], Any]
    text: str
    why: str
    kinds: tuple[type[Exception], ...] = (ValueError, NotImplementedError, TypeError)

    def check(self) -> None:
        """Raises an AssertionError where it runs, or says something else."""
        try:
            self.call()
        except self.kinds as error:
            said = str(error)
        else:
            raise AssertionError(f"it runs: nothing is refused with {self.text!r}")
        assert self.text in said, said


@dataclass(frozen=True)
class Meaningless:
    """The op and the feature have nothing to do with each other."""

    why: str


Cell = Runs | Refused | Meaningless


def every(features: Iterable[str], cell: Callable[[str], Cell] | Cell) -> dict[str, Cell]:
    """The same for several features; cell(feature) where it goes by the feature."""
    return {f: cell(f) if callable(cell) else cell for f in features}


def together(
    check: Callable[[str], None], runs: Mapping[str, Sequence[str]], *left_out: str
) -> dict[str, Cell]:
    """Features that run together, those of each run but left_out: check(name of the run).

    A check makes sure that each of them counts, so that it fails where one is ignored.
    """
    made: dict[str, Cell] = {}
    for run, features in runs.items():
        cell = Runs(functools.cache(functools.partial(check, run)))
        made |= every((f for f in features if f not in left_out), cell)
    return made


def assert_matters(with_it: Any, without: Any) -> None:
    """The oracle's answers with a feature and without it differ, so that a check can fail."""
    difference = np.abs(np.asarray(with_it, "f8") - np.asarray(without, "f8"))
    assert np.isnan(difference).any() or difference.max() > 1e-2
