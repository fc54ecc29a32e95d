# SPDX-License-Identifier: Apache-2.0
"""What the studies share: options, a model and a text, a table, a plot."""

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def options_for(description: str | None) -> argparse.ArgumentParser:
    """A parser that has --model and --plot."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model", metavar="PATH", help="a folder or a GGUF file; by default SmolLM2-135M-Instruct"
    )
    parser.add_argument("--plot", metavar="FILE", type=plot_file, help="where to save a plot")
    return parser


def add_text(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Adds --text and --tokens."""
    parser.add_argument("--text", type=Path, default=DATA / "harbour.txt", help="a file of UTF-8")
    parser.add_argument("--tokens", type=int, default=tokens, help="of the text, from its start")


def plot_file(name: str) -> Path:
    """The path of a plot, if it can be drawn: asked before the work, which takes minutes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is missing: pip install 'jax_paged[plot]'")
    return Path(name)


def read_tokens(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    """The first tokens of the text."""
    return tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows as a table in Markdown: the keys of the first are the columns."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        cells = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values())
        print("| " + " | ".join(cells) + " |", flush=True)


def save_lines(
    path: Path | None, lines: Mapping[str, Sequence[tuple[Any, float]]], *, x: str, y: str
) -> None:
    """Saves a plot: a line of (x, y) for each label. Nothing where there is no path."""
    if path is None:
        return
    from matplotlib.figure import Figure

    axes = (figure := Figure((7, 4), layout="constrained")).subplots()
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel=x, ylabel=y)
    axes.legend()
    figure.savefig(path)


def save_bars(path: Path | None, bars: Mapping[str, float], *, x: str) -> None:
    """Saves a plot: a bar for each label, the first on top. Nothing where there is no path."""
    if path is None:
        return
    from matplotlib.figure import Figure

    axes = (figure := Figure((7, 4), layout="constrained")).subplots()
    axes.barh([*bars], [*bars.values()])
    axes.set(xlabel=x)
    axes.invert_yaxis()
    figure.savefig(path)
