"""Writes the README's table of measurements from a result file, so that no figure is typed.

python benchmarks/readme_table.py NAME    (reads benchmarks/results/NAME.json)
"""

import json
import re
import sys
from pathlib import Path

import harness

README = Path(__file__).parents[1] / "README.md"


def table(result: dict) -> str:
    """The result of bench_attention as a Markdown table with where it was measured."""
    where = result["environment"]
    lines = [
        f"One run on {where['cpu']}, CPU only, instruction set {where['isa']}, jax {where['jax']}, "
        f"commit {where['commit']}, {where['date']}; medians. Each limit was measured just after "
        "its row: read bandwidth, and the f32 FMA rate (which bf16 can pass where the processor "
        "multiplies bf16 pairs). No figure here is from a GPU.",
        "",
        "| | heads q/kv/dim | size | dtype | ms | rate | of limit | XLA gather | torch SDPA |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        unit = "GB/s" if row["kind"] == "decode" else "GFLOP/s"
        ratios = [
            f"{row['ratio'][name]:.1f}×" if name in row["ratio"] else "–"
            for name in ("reference", "torch_sdpa")
        ]
        lines.append(
            f"| {row['kind']} | {row['heads']} | {row['size'].replace('x', ' × ')} "
            f"| {row['dtype']} | {row['ms']['native'][0]:.2f} | {row[unit]:.1f} {unit} | "
            f"{row['percent_of_limit']:.0f} % of {row['limit']:.0f} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


def main() -> None:
    result = json.loads((harness.RESULTS / f"{sys.argv[1]}.json").read_text(encoding="utf-8"))
    text = README.read_text(encoding="utf-8")
    new, count = re.subn(
        r"(?<=<!-- measured -->\n).*?(?=\n<!-- end -->)",
        lambda _: table(result),
        text,
        flags=re.S,
    )
    if count != 1:
        sys.exit("README.md: no <!-- measured --> … <!-- end --> block")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
