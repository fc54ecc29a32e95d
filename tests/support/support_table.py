# SPDX-License-Identifier: Apache-2.0
"""The table of docs/support.md: every op with every feature. Its cells are run by a test.

A cell runs, is refused by name, or has no meaning (`support_cells.kinds`). `tests/docs/
test_support.py` runs the first two kinds, and compares the page with what `text` gives.

    python -P tests/support/support_table.py --write

writes it into the page. That lives here, beside what it is made of: nobody needs it but who changes
a cell, and it needs the cells' imports.
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from support_cells import attention, mesh, serving, states
from support_cells.kinds import FEATURES, Cell, Meaningless, Refused

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
BEGIN, END = "<!-- the table of support_table.py -->", "<!-- its end -->"
LAST = ("`generate`", "`Engine`", "checkpoint", "mesh", "LoRA")


@functools.cache
def cells() -> dict[str, dict[str, Cell]]:
    """Op → feature → cell, in the order of the page."""
    rows = {
        **attention.rows(states.check_groups), **states.rows(), **serving.rows(), **mesh.rows()
    }  # fmt: skip
    return {op: rows[op] for op in (*(op for op in rows if op not in LAST), *LAST)}


def having(kind: type[Cell]) -> list[tuple[str, str, Cell]]:
    """(op, feature, cell) of one kind."""
    return [
        (op, feature, row[feature])
        for op, row in cells().items()
        for feature in FEATURES
        if isinstance(row[feature], kind)
    ]


def listed(words: Iterable[str]) -> str:
    """a, b and c."""
    *front, last = words
    return f"{', '.join(front)} and {last}" if front else last


def text() -> str:
    """The table, what is refused, and what has no meaning."""
    refused = by_reason(Refused)
    numbers = {
        (op, feature): str(number)
        for number, pairs in enumerate(refused.values(), 1)
        for op, features in pairs.items()
        for feature in features
    }
    lines = [f"| | {' | '.join(FEATURES)} |", f"|---|{':-:|' * len(FEATURES)}"]
    for op, row in cells().items():
        marks = [
            numbers.get((op, f), "–" if isinstance(row[f], Meaningless) else "✓") for f in FEATURES
        ]
        lines.append(f"| {op} | {' | '.join(marks)} |")
    lines += ["", "Refused by name:", ""]
    for number, (why, pairs) in enumerate(refused.items(), 1):
        lines.append(f"{number}. {told(pairs)}: {why}.")
    lines += ["", "Without meaning:", ""]
    lines += [f"- {told(pairs)}: {why}." for why, pairs in by_reason(Meaningless).items()]
    return "\n".join(lines) + "\n"


def by_reason(kind: type[Refused] | type[Meaningless]) -> dict[str, dict[str, list[str]]]:
    """Reason → op → features."""
    found: dict[str, dict[str, list[str]]] = {}
    for op, feature, cell in having(kind):
        found.setdefault(cell.why, {}).setdefault(op, []).append(feature)
    return found


def told(pairs: dict[str, list[str]]) -> str:
    """Ops and features, those that are the same for several ops once."""
    ops: dict[tuple[str, ...], list[str]] = {}
    for op, features in pairs.items():
        ops.setdefault(tuple(features), []).append(op)
    return "; ".join(f"{listed(same)} with {listed(f)}" for f, same in ops.items())


def page_with(table: str) -> str:
    """The page with this table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -P tests/support/support_table.py --write")
    PAGE.write_text(page_with(text()), encoding="utf-8")
