# SPDX-License-Identifier: Apache-2.0
"""The command line of the stress runs.

    python -m jax_paged.testing.stress --minutes 45 --what ops --isa avx2

prints a table of cases by op and option with the worst errors, and each failure as the simplest
case that fails too, with the command that repeats it. It exits with 1 if something failed.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from jax_paged.native.load import CPU_ISAS, build_info

PARTS = {"ops": 5, "values": 2, "state": 1, "engine": 1, "files": 1}  # with their shares of time
# XLA compiles these in a third of the time; what is tested is not compiled by XLA.
QUICK_PROGRAMS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def main(arguments: list[str] | None = None) -> int:
    """Runs what is asked for; returns the exit status."""
    options = _parse(arguments)
    if options.isa and os.environ.get("JAX_PAGED_CPU_ISA") != options.isa:
        environment = os.environ | {"JAX_PAGED_CPU_ISA": options.isa}  # read when it is loaded
        given = sys.argv[1:] if arguments is None else arguments
        os.execve(sys.executable, [*_interpreter(), *given], environment)
    os.environ.setdefault("XLA_FLAGS", QUICK_PROGRAMS)
    from .report import Report, Stop

    if options.case:
        return _repeat(options.case, options.implementation)
    report, parts = Report(), options.what or list(PARTS)
    print(f"jax_paged {build_info()['cpu']}, {', '.join(parts)}, seed {options.seed}", flush=True)
    for part in parts:
        share = PARTS[part] / sum(PARTS[name] for name in parts)
        stop, interrupted = Stop(options.minutes * share, options.cases), False
        try:
            _run(part, report, stop, options)
        except KeyboardInterrupt:
            interrupted = True
            report.notes.append(f"{part}: interrupted")
        go_on = f" (go on with --begin {stop.following})" if stop.following else ""
        print(f"{part}: {stop.done:,} done{go_on}, {len(report.failures)} failures", flush=True)
        if options.json:
            told = {"minutes": options.minutes, "seed": options.seed, "build": build_info()["cpu"]}
            options.json.write_text(json.dumps(told | report.as_json(), indent=1))
        if interrupted:
            break
    print(f"\n{report.text()}")
    return 1 if report.failures else 0


def _interpreter() -> list[str]:
    return [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", __spec__.parent]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_paged.testing.stress", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="of all parts together (default 5)")
    add("--cases", type=int, help="most cases of a part; default: as many as the time allows")
    add("--what", action="append", choices=PARTS, help="a part, or several; default: all")
    add("--seed", type=int, default=0, help="of the cases (default 0)")
    add("--begin", type=int, default=0, help="number of the first case: goes on with another run")
    add("--isa", choices=CPU_ISAS, help="CPU instructions; default: the best that the machine has")
    add("--implementation", choices=("native", "reference", "emulated"), default="native",
        help="of the ops; 'emulated': CUDA kernels on the CPU, in a checkout")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the counts there")
    add("--case", metavar="OP/VALUES/SEED", help="repeat one case, as a failure names it")
    return parser.parse_args(arguments)


def _run(part: str, report, stop, options: argparse.Namespace) -> None:
    if part in ("ops", "values"):
        from . import ops

        table = ops.OPS if part == "ops" else ops.WILD_OPS
        ops.run(
            report, stop, options.seed, ops=table, begin=options.begin,
            implementation=options.implementation,
        )  # fmt: skip
    elif part == "files":
        from . import files

        files.run(report, stop, options.seed, options.begin)
    elif part == "state":
        from . import state

        state.run(report, stop, options.seed + options.begin)
    else:
        from . import engine

        engine.run(report, stop, options.seed)


def _repeat(case: str, implementation: str) -> int:
    from . import ops

    if implementation == "emulated":
        ops.bring_emulator()
    name, picks, seed = case.split("/")
    op = (ops.OPS | ops.WILD_OPS)[name]
    numbers = [int(x) for x in picks.split(".")]
    print(f"{name}: {ops.row_of(op, numbers)}")
    failure = ops.failure_of(op, numbers, int(seed), implementation)
    print(failure or "passed")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
