"""Tables and plots of the result files, so that no figure is typed.

    python benchmarks/documents.py    (`run_all.py` does it too)

What stands between `<!-- measured -->` and `<!-- end -->` in README.md and docs/performance.md is
replaced: in README attention and whole models, in the other all the rest. Plots need matplotlib
(`pip install 'jax_paged[plot]'`) and go to docs/plots.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).parents[1]
IN_README = {
    "attention": "Attention",
    "model": "Whole models, 512 tokens of context",
    "serving": "Serving, SmolLM2-135M",
}
IN_DOCS = {
    "merge": "merge_attention_states",
    "qkv_write": "qkv_norm_rope_write",
    "projections": "Projections and experts",
    "options": "Options of attention, in decode",
    "decode_overhead": "Overhead of a decode step, toy models",
    "growth": "Growth: Qwen3-MoE 512M, batch 1, 512 tokens, but for what is named",
}
LABELS = {
    "reference": "XLA", "torch_sdpa": "torch SDPA", "write_kv": "XLA, then write_kv",
    "vllm_cpu": "vLLM CPU",
}  # fmt: skip
Result = dict[str, Any]


def load(results: Path) -> dict[str, Result]:
    """The result files that there are, by the name of their benchmark."""
    paths = {name: results / f"{name}.json" for name in (*IN_README, *IN_DOCS)}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def where(result: Result) -> str:
    """The sentence that says where it was measured."""
    at = result["environment"]
    threads = f", {at['threads']} threads" if "threads" in at else ""
    text = (
        f"One run on {at['cpu']}{threads}, instruction set {at['isa']}, jax {at['jax']}, commit "
        f"{at['commit']}, {at['date']}; medians."
    )
    for peer, reason in result["skipped"].items():
        text += f" {peer}: {reason}."
    return text


def _cells(row: Mapping[str, Any], peers: list[str]) -> list[str]:
    median = next(iter(row["ms"].values()))[0]
    cells = [row["kind"], row.get("heads", row["case"]), row["size"], row["dtype"]]
    cells.append(f"{median:.3f}" if median < 1 else f"{median:.2f}")
    cells.append(f"{row['rate']:.1f} {row['unit']}" if "rate" in row else "–")
    limit = f"{row['percent_of_limit']:.0f} % of {row['limit']:.0f}" if "limit" in row else "–"
    cells.append(limit)
    cells += [f"{row['ratio'][p]:.2f}×" if p in row["ratio"] else "–" for p in peers]
    return cells


def table(result: Result) -> str:
    """All rows as a Markdown table; columns that no row fills are left out."""
    peers = list(dict.fromkeys(name for row in result["rows"] for name in row["ratio"]))
    head = ["", "what", "size", "dtype", "ms", "rate", "of limit"]
    head += [LABELS.get(name, name) for name in peers]
    rows = [_cells(row, peers) for row in result["rows"]]
    used = [i for i in range(len(head)) if any(row[i] != "–" for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line[i] for i in used) + " |" for line in lines)


def sections(results: Mapping[str, Result], titles: Mapping[str, str], plots: list[str]) -> str:
    """The text of a block. Which benchmarks have no result yet is said too."""
    parts = []
    for name, title in titles.items():
        if name in results:
            parts.append(f"**{title}** (`bench_{name}.py`). {where(results[name])}")
            parts += [f"![{title}]({path})" for path in plots if Path(path).stem == name]
            parts.append(table(results[name]))
    missing = [f"`bench_{name}.py`" for name in titles if name not in results]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def replace(path: Path, block: str) -> None:
    """Puts the block between the markers of a file."""
    text = path.read_text(encoding="utf-8")
    pattern = r"(?<=<!-- measured -->\n).*?(?=<!-- end -->)"
    new, count = re.subn(pattern, lambda _: block + "\n", text, flags=re.S)
    if count != 1:
        raise SystemExit(
            f"{path}: expected one <!-- measured --> … <!-- end --> block, got {count}"
        )
    path.write_text(new, encoding="utf-8")


def _growth_plot(result: Result, figure) -> None:
    kinds = ("context", "batch", "pool", "layers")
    names = ("tokens of context", "batch", "free pages beside", "layers")
    for axes, kind, name in zip(figure.subplots(2, 2).flat, kinds, names, strict=True):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        axes.plot([int(r["size"]) for r in rows], [r["ms"]["native"][0] for r in rows], marker="o")
        axes.set_xlabel(name)
        axes.set_ylabel("ms per step")
        axes.set_ylim(bottom=0)
        if kind in ("context", "batch"):
            axes.set_xscale("log", base=2)


def _bars(result: Result, figure, value: str, label: str) -> None:
    rows = [row for row in result["rows"] if value in row]
    axes = figure.subplots()
    names = [
        f"{row['kind']} {row.get('heads', row['case'])} {row['size']} {row['dtype']}"
        for row in rows
    ]
    axes.barh(names, [row[value] for row in rows])
    axes.invert_yaxis()
    axes.axvline(100, linestyle=":", color="gray")
    axes.set_xlabel(label)


def draw(results: Mapping[str, Result], folder: Path) -> list[str]:
    """Draws what there is to draw; the files' names."""
    if importlib.util.find_spec("matplotlib") is None:
        print("plots: skipped, matplotlib is not installed: pip install 'jax_paged[plot]'")
        return []
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "jax_paged"  # the same file from the same figures
    made = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("attention", "model", "growth"):
        if name not in results:
            continue
        figure = Figure(figsize=(9, 6), layout="constrained")
        if name == "growth":
            _growth_plot(results[name], figure)
        else:
            _bars(results[name], figure, "percent_of_limit", "% of the limit measured beside it")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        made.append(f"{name}.svg")
    return made


def write(results: Path = harness.RESULTS, root: Path = ROOT) -> None:
    """Rewrites the blocks and plots of the documents under `root`."""
    found = load(results)
    made = draw(found, root / "docs" / "plots")
    readme = sections(found, IN_README, [f"docs/plots/{name}" for name in made])
    replace(root / "README.md", readme)
    performance = sections(found, IN_DOCS, [f"plots/{name}" for name in made])
    replace(root / "docs" / "performance.md", performance)


if __name__ == "__main__":
    write()
