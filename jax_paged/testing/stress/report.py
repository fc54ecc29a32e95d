# SPDX-License-Identifier: Apache-2.0
"""What a stress run has seen, and when it ends."""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any


class Stop:
    """When a part of a run ends: after its minutes, or after its cases."""

    def __init__(self, minutes: float, cases: int | None = None):
        self._end = time.monotonic() + 60 * minutes
        self._cases = cases
        self.done = 0
        self.following = 0  # number of the case that another run goes on with

    def is_due(self) -> bool:
        out_of_cases = self._cases is not None and self.done >= self._cases
        return out_of_cases or time.monotonic() >= self._end


@dataclasses.dataclass
class Report:
    """Cases by op and by value of each option, the worst error of each op, and what failed."""

    cases: Counter[str] = dataclasses.field(default_factory=Counter)
    options: dict[str, Counter[str]] = dataclasses.field(
        default_factory=lambda: defaultdict(Counter)
    )
    worst: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(
        self, op: str, row: Mapping[str, Any], *, cases: int = 1, share: float | None = None,
        where: str = "",
    ) -> None:  # fmt: skip
        """Counts a case; `share` is its error over what rounding allows."""
        self.cases[op] += cases
        for name, value in row.items():
            self.options[op][f"{name}={value}"] += cases
        if share is not None and share >= self.worst.get(op, (-1.0, ""))[0]:
            self.worst[op] = (share, where)

    @property
    def is_hopeless(self) -> bool:
        """Whether so much failed that more says nothing new."""
        return len(self.failures) >= 20

    def count(self, op: str, what: str, count: int) -> None:
        """Counts something of an op that is no option."""
        self.options[op][what] += count

    def fail(self, text: str) -> None:
        """Records a failure, and prints it."""
        self.failures.append(text)
        print(f"\nFAILED {text}\n", flush=True)

    def text(self) -> str:
        """A table of the ops, their options below, and the failures."""
        lines = ["| what | cases | worst error, of what rounding allows |", "|---|---|---|"]
        for op, count in self.cases.items():
            share = f"{100 * self.worst[op][0]:.0f} %" if op in self.worst else "exact"
            lines.append(f"| {op} | {count:,} | {share} |")
        for op, seen in self.options.items():
            by_option: dict[str, list[str]] = defaultdict(list)
            for what, count in sorted(seen.items()):
                name, equals, value = what.partition("=")
                by_option[name].append(f"{value} {count:,}" if equals else f"{count:,}")
            lines += ["", f"{op}:"]
            lines += [f"- {name}: {', '.join(counts)}" for name, counts in by_option.items()]
        lines += ["", *self.notes]
        lines += [f"{len(self.failures)} failures", *self.failures]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same for a machine."""
        return {
            "cases": dict(self.cases),
            "worst": {op: {"share": s, "where": where} for op, (s, where) in self.worst.items()},
            "options": {op: dict(seen) for op, seen in self.options.items()},
            "notes": self.notes,
            "failures": self.failures,
        }
