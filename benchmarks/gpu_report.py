# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py says about its record: which targets are met, what failed, a table to read."""

JUDGED = ("H100", "H200")
OUTCOMES = ("passed", "skipped", "failed", "hung", "crashed", "broken", "not run")
COUNTERS = (
    "Duration", "Memory Throughput", "DRAM Throughput", "Compute (SM) Throughput",
    "Achieved Occupancy", "Registers Per Thread",
)  # fmt: skip


def target_on(row: dict, device: str) -> tuple[str, str, float] | None:
    """The target of a row on a device: on an H100 `target_h100`, a percentage of what it measured.

    A row has that where `target` is a rate, which holds for an H200.
    """
    if "H100" in device and row.get("target_h100"):
        return tuple(row["target_h100"])
    return tuple(row["target"]) if row.get("target") else None


def verdict(row: dict, device: str, dry: bool) -> str:
    """How a row stands to its target."""
    if "error" in row:
        return "ERROR"
    if "skipped" in row:
        return "skipped"
    target = target_on(row, device)
    if target is None:
        return ""
    if dry:
        return "dry"
    if not any(name in device for name in JUDGED):
        return "not judged: targets are for an H100 or an H200"
    figure, kind, limit = target
    value = row.get(figure)
    met = value is not None and (value >= limit if kind == "min" else value <= limit)
    return "met" if met else "MISSED"


def table(record: dict) -> str:
    """The record as people read it."""
    lines = []
    environment = record["environment"]
    shown = ("device", "driver", "jax", "commit", "date")
    lines.append(", ".join(f"{key} {environment.get(key)}" for key in shown))
    for result in record["stages"]:
        seconds = f"{result['seconds']:6.1f} s" if "seconds" in result else " " * 8
        lines.append(
            f"\n{result['status']:8}{seconds}  {result['stage']}  {result['reason'] or ''}"
        )
        for row in result["rows"]:
            lines.append("    " + row_line(row, str(environment.get("device"))))
    failures = record["failures"]
    lines.append("")
    lines.append("no failures" if not failures else f"{len(failures)} failures:")
    lines += (f"  {failure}" for failure in failures)
    return "\n".join(lines)


def row_line(row: dict, device: str = "") -> str:
    """A row as one line of the table."""

    def figure(name: str, unit: str, digits: int = 1) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:.{digits}f} {unit}"

    words = [str(row.get(key, "")) for key in ("kind", "label", "case", "size", "dtype", "peer")]
    figures = [
        figure("us", "µs"), figure("gb_per_s", "GB/s"), figure("percent_of_copy", "% of copy"),
        figure("tflop_per_s", "TFLOP/s"), figure("percent_of_matmul", "% of matmul"),
        figure("tokens_per_s", "tok/s"), figure("copy_gb_per_s", "GB/s copy"),
        figure("read_gb_per_s", "GB/s read"), figure("bf16_tflop_per_s", "TFLOP/s matmul"),
        figure("ratio", "x our time", 2), figure("vs_plain", "x as fast as plain", 2),
    ]  # fmt: skip
    if row.get("kind") == "tests":
        figures += [f"{row[name]} {name}" for name in OUTCOMES if row.get(name)]
    if "kernel" in row:
        found = row["counters"]
        figures += [row["kernel"], *(f"{name} {found[name]}" for name in COUNTERS if name in found)]
    target = target_on(row, device)
    if target:
        sign = "at least" if target[1] == "min" else "at most"
        figures.append(f"[{target[0]} {sign} {target[2]}: {row['verdict']}]")
    notes = [str(row[key]) for key in ("error", "skipped") if key in row]
    return "  ".join(word for word in [*words, *figures, *notes] if word)


def failures(record: dict) -> list[str]:
    """Everything that keeps the exit status from being 0."""
    found, device = [], str(record.get("environment", {}).get("device"))
    for result in record["stages"]:
        if result["status"] == "failed":
            found.append(f"{result['stage']}: {result['reason']}")
        for row in result["rows"]:
            if row["verdict"] == "ERROR":
                found.append(f"{result['stage']}: {row_line(row, device)}")
            elif row["verdict"] == "MISSED":
                found.append(f"{result['stage']}: target missed: {row_line(row, device)}")
    return found
