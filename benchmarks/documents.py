# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the result files, so that no figure is typed.

    python benchmarks/documents.py    (`run_all.py` does it too)

What stands between `<!-- measured -->` and `<!-- end -->` in `FILES` is replaced. README gets the
rows of `PICKS`, docs/performance.md all rows and those that miss their goals (goals.py), and
docs/evaluating.md those of `lm_eval_peers.py` and `llama_perplexity.py`, which `run_all.py` does
not run. Plots need matplotlib (`pip install 'jax_paged[plot]'`) and go to docs/plots.
"""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import goals
import harness

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/performance.md", "docs/evaluating.md")
TITLES = {
    "attention": "Attention",
    "model": "Whole models, 512 tokens of context",
    "serving": "Serving, SmolLM2-135M",
    "cascade": "Decode of rows that begin alike",
    "sampling": "Choosing tokens, `RowSamplers`",
    "merge": "merge_attention_states",
    "qkv_write": "qkv_norm_rope_write",
    "projections": "Projections and experts",
    "lora": "Low-rank adapters, many in one batch",
    "options": "Options of attention, in decode",
    "decode_overhead": "Overhead of a decode step, toy models",
    "growth": "Growth of a decode step: Qwen3-MoE 512M, batch 1, 512 tokens, one of them changed",
}
WITH_AVX2 = {name: TITLES[name] for name in ("attention", "model")}  # in results/avx2
LABELS = {
    "reference": "XLA", "torch_sdpa": "torch SDPA", "write_kv": "XLA, then write_kv",
    "vllm_cpu": "vLLM CPU", "one by one": "one request at a time", "no drafts": "without drafts",
}  # fmt: skip
CORES = {"AMD EPYC, family 25, model 17": "Zen 4", "AMD EPYC, family 26, model 2": "Zen 5"}
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pick:
    """A row of README's table: rows of one benchmark that differ only in size.

    peers: the contenders to show; () = all.
    """

    title: str
    benchmark: str
    kind: str
    case: str
    sizes: tuple[str, ...]
    dtype: str
    peers: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """What the title begins with."""
        return self.title.split(",")[0]

    def rows(self, results: Mapping[str, Result]) -> list[dict[str, Any]]:
        """The measured rows in the order of `sizes`, or none unless all are there."""
        measured = results.get(self.benchmark, {"rows": []})["rows"]
        alike = {
            row["size"]: row
            for row in measured
            if (row["kind"], row["case"], row["dtype"]) == (self.kind, self.case, self.dtype)
        }
        return [alike[size] for size in self.sizes] if alike.keys() >= set(self.sizes) else []

    def ratios(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
        """What each peer's time is over ours, for each of the rows."""
        names = self.peers or tuple(rows[0]["ratio"])
        return {LABELS.get(name, name): [row["ratio"][name] for row in rows] for name in names}


_HEADS_32_4_128 = "qwen3_30b_a3b"
PICKS = (
    Pick("Attention, decode: 32 rows of 4096 tokens, bf16",
         "attention", "decode", _HEADS_32_4_128, ("32 × 4096",), "bfloat16"),
    Pick("Attention, decode: 32 rows of 4096 tokens, f32",
         "attention", "decode", _HEADS_32_4_128, ("32 × 4096",), "float32"),
    Pick("Attention, prefill: 2048 tokens, bf16",
         "attention", "prefill", _HEADS_32_4_128, ("2048",), "bfloat16"),
    Pick("Qwen3-MoE 512M, decode: batch 1 and 32, bf16",
         "model", "decode", "qwen3_moe_512m", ("batch 1", "batch 32"), "bfloat16"),
    Pick("SmolLM2-135M, decode: batch 1 and 8, int8 weights",
         "model", "decode", "smollm2_135m", ("batch 1", "batch 8"), "int8", ("llama.cpp Q4_1",)),
    Pick("SmolLM2-135M, serving: 32 requests, bf16",
         "serving", "trace", "smollm2_135m", ("32 requests",), "bfloat16"),
)  # fmt: skip


def load(results: Path) -> dict[str, Result]:
    """The result files that there are, by the name of their benchmark."""
    paths = {name: results / f"{name}.json" for name in TITLES}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def load_all(results: Path) -> list[dict[str, Result]]:
    """The same, and those in avx2: of another instruction set, which has goals of its own."""
    return [load(results), load(results / "avx2")]


def machine(environment: Mapping[str, Any]) -> str:
    """The processor, its threads, the instruction set and the version of jax."""
    core = CORES.get(environment["cpu"])
    name = f"{environment['cpu']} ({core})" if core else environment["cpu"]
    threads = f", {environment['threads']} threads" if "threads" in environment else ""
    return f"{name}{threads}, instruction set {environment['isa']}, jax {environment['jax']}"


def where(result: Result) -> str:
    """The sentence that says where it was measured."""
    at = result["environment"]
    runs = at.get("runs", 1)
    how = "One run" if runs == 1 else f"{runs} runs by turns"
    text = f"{how} on {machine(at)}, commit {at['commit']}, {at['date']}; medians."
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


def summary(results: Mapping[str, Result], plots: list[str]) -> str:
    """README's block: the rows of `PICKS`, and once the machine that they were measured on."""
    found = [(pick, rows) for pick in PICKS if (rows := pick.rows(results))]
    parts = []
    if found:
        environments = [results[pick.benchmark]["environment"] for pick, _ in found]
        machines = list(dict.fromkeys(map(machine, environments)))
        parts.append(f"Measured on {'; '.join(machines)}.")
        parts += [f"![Times as fast as peers]({path})" for path in plots]
        lines = ["| what | jax_paged | times as fast as |", "| --- | --- | --- |"]
        for pick, rows in found:
            ratios = (
                f"{peer} {' and '.join(f'{value:.2f}×' for value in values)}"
                for peer, values in pick.ratios(rows).items()
            )
            lines.append(f"| {pick.title} | {_speed(rows)} | {', '.join(ratios)} |")
        parts.append("\n".join(lines))
    missing = [pick.title for pick in PICKS if not pick.rows(results)]
    if missing:
        parts.append(f"Not measured yet: {'; '.join(missing)}.")
    return "\n\n".join(parts)


def beside_hf(path: Path) -> str:
    """docs/evaluating.md's block: the tasks of a result file of `lm_eval_peers.py`."""
    if not path.exists():
        return "Not measured yet: `lm_eval_peers.py`."
    result = json.loads(path.read_text(encoding="utf-8"))
    at = result["environment"]
    parts = [
        f"One run on {machine(at)}, lm-eval {at['lm_eval']}, torch {at['torch']}, transformers "
        f"{at['transformers']}, commit {at['commit']}, {at['date']}."
    ]
    lines = ["| task | documents | jax_paged | hf | times as fast | log-likelihoods within |"]
    lines.append("| --- " * 6 + "|")
    for row in result["rows"]:
        ours, hf = row["seconds"]["jax_paged"], row["seconds"]["hf"]
        within = f"{row['largest_difference']:.1g}" if row["kind"] != "generation" else "–"
        lines.append(
            f"| {row['kind']} (`{row['task']}`) | {row['documents']} | {ours:.2f} s | {hf:.2f} s, "
            f"batch size {row['hf_batch_size']} | {row['ratio']:.2f}× | {within} |"
        )
    return "\n\n".join([*parts, "\n".join(lines)])


def beside_llama(path: Path) -> str:
    """docs/evaluating.md's block of perplexities: a result file of `llama_perplexity.py`."""
    if not path.exists():
        return "Not measured yet: `llama_perplexity.py`."
    result = json.loads(path.read_text(encoding="utf-8"))
    at = result["environment"]
    lines = [
        f"SmolLM2-135M in Q4_1, {result['pieces']} pieces of 512 tokens of these documents. One "
        f"run on {machine(at)}, commit {at['commit']}, {at['date']}.\n",
        "| weights | perplexity | of llama.cpp's |",
        "| --- | --- | --- |",
    ]
    for row in result["rows"]:
        lines.append(f"| {row['what']} | {row['perplexity']:.3f} | {row['of_llama_cpp']:.4f}× |")
    return "\n".join(lines)


def below_goals(results: Sequence[Mapping[str, Result]]) -> str:
    """docs/performance.md's list of the rows that miss a goal."""
    lines = ["| benchmark | row | reached | goal | |", "| --- " * 5 + "|"]
    for miss in goals.misses(*results):
        row = miss.row
        what = f"{row['kind']}, {row.get('heads', row['case'])}, {row['size']}, {row['dtype']}"
        what += miss.with_isa
        unit = " %" if miss.goal.measure == "limit" else "×"
        proof = f"[cannot be reached]({miss.proof})" if miss.proof else ""
        reached = f"{miss.reached:.2f}{unit}" if unit == "×" else f"{miss.reached:.1f}{unit}"
        lines.append(f"| {miss.benchmark} | {what} | {reached} | {miss.goal.text()} | {proof} |")
    return "\n".join(lines)


def _speed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second where a row counts them, else the time of a call."""
    if all(row.get("unit") == "tok/s" for row in rows):
        return " and ".join(f"{row['rate']:.1f}" for row in rows) + " tok/s"
    return " and ".join(f"{row['ms']['native'][0]:.2f}" for row in rows) + " ms"


def replace(path: Path, block: str, name: str = "measured") -> None:
    """Puts the block between the markers of a file."""
    text = path.read_text(encoding="utf-8")
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)"
    new, count = re.subn(pattern, lambda _: block + "\n", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"{path}: expected one <!-- {name} --> … <!-- end --> block, got {count}")
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


def _peers_plot(found: Sequence[tuple[Pick, list[dict[str, Any]]]], figure) -> None:
    bars = [
        (f"{pick.subject}, {row['kind']} {row['size']}, {row['dtype']}: {peer}", values[0])
        for pick, rows in found
        for row in rows
        for peer, values in pick.ratios([row]).items()
    ]
    names, values = zip(*bars, strict=True)
    axes = figure.subplots()
    drawn = axes.barh(names, [value - 1 for value in values], left=1)  # slower ones go to the left
    axes.bar_label(drawn, [f"{value:.1f}×" for value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(0.5, *values), 2 * max(values))
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.axvline(1, linestyle=":", color="gray")
    axes.set_xlabel("times as fast as the peer named behind the colon")


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
    picked = [(pick, rows) for pick in PICKS if (rows := pick.rows(results))]
    for name in ("peers", "attention", "model", "growth"):
        if not picked if name == "peers" else name not in results:
            continue
        figure = Figure(figsize=(9, 4 if name == "peers" else 6), layout="constrained")
        if name == "peers":
            _peers_plot(picked, figure)
        elif name == "growth":
            _growth_plot(results[name], figure)
        else:
            _bars(results[name], figure, "percent_of_limit", "% of the limit measured beside it")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        made.append(f"{name}.svg")
    return made


def write(results: Path = harness.RESULTS, root: Path = ROOT) -> None:
    """Rewrites the blocks and plots of the documents under `root`."""
    found, of_avx2 = load_all(results)
    made = draw(found, root / "docs" / "plots")
    chosen = [f"docs/plots/{name}" for name in made if name == "peers.svg"]
    replace(root / "README.md", summary(found, chosen))
    full = sections(found, TITLES, [f"plots/{name}" for name in made])
    replace(root / "docs" / "performance.md", full)
    avx2 = sections(of_avx2, WITH_AVX2, [])
    replace(root / "docs" / "performance.md", avx2, "avx2")
    replace(root / "docs" / "performance.md", below_goals([found, of_avx2]), "goals")
    evaluating = root / "docs" / "evaluating.md"
    replace(evaluating, beside_hf(results / "lm_eval.json"))
    replace(evaluating, beside_llama(results / "llama_perplexity.json"), "perplexity")


if __name__ == "__main__":
    write()
