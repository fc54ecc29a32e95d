# SPDX-License-Identifier: Apache-2.0
"""Draws cases of the ops, runs them, and makes those that fail as simple as they can be."""

import importlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .op import Op
from .pages import PAGES, WILD_PAGES
from .reads import READS, WILD_READS
from .report import Report, Stop
from .weights import WEIGHTS, WILD_WEIGHTS

OPS = READS | PAGES | WEIGHTS
WILD_OPS = WILD_READS | WILD_PAGES | WILD_WEIGHTS
CONTENTS = 2  # of each row: the second one finds its programs compiled
CLEAR_EVERY = 60  # rows; a process can map only so many programs
EMULATED = (
    "attention", "mla", "ragged_attention", "cascade_attention", "merge_attention_states",
    "qkv_norm_rope_write", "moe_experts",
)  # fmt: skip


def draw(ops: Mapping[str, Op], seed: int, number: int) -> tuple[str, tuple[int, ...]]:
    """Case `number`: an op, and which value each of its factors has."""
    rng = np.random.default_rng([seed, number])
    weights = np.array([op.weight for op in ops.values()], float)
    name = list(ops)[rng.choice(len(ops), p=weights / weights.sum())]
    return name, tuple(int(rng.integers(len(v))) for v in ops[name].factors.values())


def row_of(op: Op, picks: Sequence[int]) -> dict[str, Any]:
    """The values that the picks stand for."""
    factors = op.factors.items()
    return {name: values[i] for (name, values), i in zip(factors, picks, strict=True)}


def run(
    report: Report, stop: Stop, seed: int, *, ops: Mapping[str, Op] = OPS, begin: int = 0,
    implementation: str = "native", contents: int = CONTENTS,
) -> None:  # fmt: skip
    """Runs cases from number `begin` on."""
    if implementation == "emulated":
        bring_emulator()
        ops = {name: op for name, op in ops.items() if name.partition(",")[0] in EMULATED}
    for number in itertools.count(begin):
        stop.following = number
        if stop.is_due() or report.is_hopeless:
            return
        if number % CLEAR_EVERY == 0:
            jax.clear_caches()
        name, picks = draw(ops, seed, number)
        op = ops[name]
        for content in range(contents):
            of_case = number * contents + content
            stop.done += 1
            if failure := failure_of(op, picks, of_case, implementation, report, name):
                small = minimal(op, picks, of_case, implementation)
                where = _where(name, small, of_case)
                report.fail(
                    f"{name} {row_of(op, small)}: {failure}\nrepeat it by: python -m "
                    f"jax_paged.testing.stress --implementation {implementation} --case '{where}'"
                )


def bring_emulator() -> None:
    """Registers implementation="emulated", the CUDA kernels on the CPU: a part of the tests."""
    support = Path.cwd() / "tests" / "support"
    if not (support / "emulation.py").exists():
        raise SystemExit("the emulator needs a checkout: start this in its root")
    if str(support) not in sys.path:
        sys.path.insert(0, str(support))
    importlib.import_module("emulation")


def _where(name: str, picks: Sequence[int], seed: int) -> str:
    """A case, as --case takes it."""
    return f"{name}/{'.'.join(map(str, picks))}/{seed}"


def failure_of(
    op: Op, picks: Sequence[int], seed: int, implementation: str, report: Report | None = None,
    name: str = "",
) -> str | None:  # fmt: skip
    """What is wrong with a case, None = nothing; counts it in the report."""
    row = row_of(op, picks)
    try:
        share = op.run(row, seed, implementation)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:600]}"
    if report is not None:
        report.add(name, row, share=share or None, where=_where(name, picks, seed))
    return None


def minimal(op: Op, picks: Sequence[int], seed: int, implementation: str) -> tuple[int, ...]:
    """A case that fails too, with as many factors as possible at their simplest values."""
    picks, changed = list(picks), True
    while changed:
        changed = False
        for place, pick in enumerate(picks):
            if pick:
                trial = [*picks[:place], 0, *picks[place + 1 :]]
                if failure_of(op, trial, seed, implementation):
                    picks, changed = trial, True
    return tuple(picks)
