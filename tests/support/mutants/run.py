# SPDX-License-Identifier: Apache-2.0
"""Measures what the tests miss: plants mutants (operators.py, plan.py) and runs the tests on each.

    cd tests/support
    python -m mutants.run list            # the mutants
    python -m mutants.run check           # the tests must pass on the tree without a mutant
    python -m mutants.run run --tier mapped # of the default tier, the files that plan.py names
    python -m mutants.run run               # the default tier on those that survived them
    python -m mutants.run run --tier deep   # the deep tier on those that survived it
    python -m mutants.run table             # writes table.md

`run` goes on where it was interrupted. A mutant lives in a copy of the tree, in --scratch, never in
this one. Of a native one only the objects that include its file are compiled, at -O1 and for this
machine's instruction sets. The tests that plan.py names run first, then all others, up to the first
failure. A crash and a test that says nothing for --stall seconds are failures too. A mutant
survives a tier only if the whole tier passed. Not part of CI: it takes hours.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutants.operators import Mutant, choose
from mutants.plan import EQUIVALENT, PLAN, SEED

ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(__file__).with_name("table.md")
TIERS = {"mapped": (), "default": (), "deep": ("--deep",)}
NATIVE = (".h", ".cc")
INSTRUCTION_SETS = {
    "amx": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512": "avx512f",
    "avx2": "avx2",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant in a tier, one line of the state file."""

    id: str
    tier: str
    how: str  # survived, failed, crashed, hung, or: does not compile
    test: str = ""  # that caught it
    build_s: float = 0.0
    tests_s: float = 0.0
    commit: str = ""  # of the tree


def planned() -> list[Mutant]:
    return choose(ROOT, {file: count for file, (count, _) in PLAN.items()}, SEED)


def mapped_tests(file: str) -> list[str]:
    return [test_file(ROOT, name) for name in PLAN[file][1].split()]


def test_file(root: Path, name: str) -> str:
    """The path of test_<name>.py, in whatever folder of the tests it is."""
    (path,) = root.glob(f"tests/*/test_{name}.py")
    return path.relative_to(root).as_posix()


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


class Tree:
    """A copy of the working tree with a native module of its own, in which mutants are planted."""

    def __init__(self, folder: Path, programs: Path, python: str, stall: float) -> None:
        self.root, self.build, self.log = folder / "tree", folder / "build", folder / "tests.log"
        self.python, self.stall = python, stall
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        self.env = {
            "JAX_PLATFORMS": "cpu",
            # Programs are found by what XLA compiles, and name native kernels: mutants share them.
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        } | os.environ | {"PYTHONPATH": str(self.root), "TMPDIR": str(temporary)}  # fmt: skip
        self._copy_sources()
        self._build_module()

    def _copy_sources(self) -> None:
        names = set(git("ls-files", "-co", "--exclude-standard").splitlines())
        for path in self.root.rglob("*"):
            if path.is_file() and str(path.relative_to(self.root)) not in names:
                path.unlink()
        for name in names:
            source, target = ROOT / name, self.root / name
            if not source.is_file():
                continue
            # What is the same keeps its time, so that nothing is compiled again.
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        models = self.root / "jax_paged" / "models"
        if not models.is_symlink():
            models.symlink_to("../models")

    def _build_module(self) -> None:
        if not (self.build / "build.ninja").exists():
            rule = "<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O1 -o <OBJECT> -c <SOURCE>"
            options = {
                "JAX_PAGED_CUDA": "off",
                "JAX_PAGED_SIMD": "on",
                "Python_EXECUTABLE": self.python,
                "CMAKE_CXX_COMPILE_OBJECT": rule,
                # Else a mutant in a header would be hidden by the one compiled for the base.
                "CMAKE_DISABLE_PRECOMPILE_HEADERS": "ON",
            }
            flags = [f"-D{name}={value}" for name, value in options.items()]
            command = ["cmake", "-S", self.root / "ffi", "-B", self.build, "-G", "Ninja", *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["ninja", "--quiet"], cwd=self.build, check=True)
        commands = subprocess.run(
            ["ninja", "-C", self.build, "-t", "commands"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        self.link = commands.stdout.splitlines()[-1]
        cpuinfo = Path("/proc/cpuinfo")
        flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
        absent = [name for name, flag in INSTRUCTION_SETS.items() if flag not in flags]
        self.objects = [
            name
            for name in re.findall(r"\S+\.cc\.o", self.link)
            if not name.endswith(tuple(f"/{isa}.cc.o" for isa in absent))
        ]
        self._install(self.build)

    def _install(self, build: Path) -> None:
        """Puts the module of a build folder into the tree, as a new file."""
        (module,) = build.glob("cpu/_cpu*.so")
        shutil.copy(module, self.root / "new.so")
        (self.root / "new.so").rename(self.root / "jax_paged" / module.name)

    def _compile(self) -> bool:
        """Compiles what the mutant touches in a copy of the build folder; False: it cannot be."""
        build = self.build.with_name("build_mutant")
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(self.build, build)  # with the times of files, which ninja goes by
        for command in (["ninja", "--quiet", *self.objects], ["sh", "-c", self.link]):
            if subprocess.run(command, cwd=build, capture_output=True).returncode:
                return False
        self._install(build)
        return True

    def run(self, mutant: Mutant, tier: str, commit: str) -> Outcome:
        """Plants the mutant, runs the tier and takes it out again."""
        path = self.root / mutant.file
        source, times = path.read_bytes(), path.stat()
        compiled, is_native = path.parent / "__pycache__", path.suffix in NATIVE
        began = time.monotonic()
        try:
            path.write_bytes(mutant.apply(source))
            # Python knows a file by its size and its time in seconds, which may be as before.
            shutil.rmtree(compiled, ignore_errors=True)
            if is_native and not self._compile():
                return Outcome(mutant.id, tier, "does not compile", commit=commit)
            built = time.monotonic()
            how, test = self.test(tier, mapped_tests(mutant.file))
            seconds = built - began, time.monotonic() - built
            return Outcome(mutant.id, tier, how, test, *(round(s, 1) for s in seconds), commit)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            shutil.rmtree(compiled, ignore_errors=True)
            if is_native:
                self._install(self.build)

    def test(self, tier: str, first: list[str]) -> tuple[str, str]:
        """How the tests end, (how, test) as in `Outcome`: the files `first`, then all others."""
        paths = [path.relative_to(self.root) for path in self.root.glob("tests/*/test_*.py")]
        files = sorted(path.as_posix() for path in paths if path.parts[1] not in ("gpu", "hf"))
        rest = [name for name in files if name not in (*first, "tests/kernels/test_mutants.py")]
        parts = [first, *([] if tier == "mapped" else [rest])]
        for part in filter(None, parts):
            how, test = self._pytest(*TIERS[tier], *part)
            if how != "survived":
                return how, test
        return "survived", ""

    def _pytest(self, *arguments: str) -> tuple[str, str]:
        # Also the default, -q, once more than that: the log names a test when it begins.
        options = ["-x", "-vv", "-p", "no:cacheprovider", "--tb=short"]
        ignore = "ignore:Error reading persistent compilation cache entry"
        command = [self.python, "-P", "-m", "pytest", *options, "-W", ignore, *arguments]
        if shutil.which("choom"):  # should a mutant take all memory, it is what has to go
            command = ["choom", "-n", "1000", "--", *command]
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        with open(self.log, "w") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.env, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            hung = not self._wait(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = self.log.read_text(errors="replace")
        if not hung and process.returncode == 0:
            return "survived", ""
        how = "hung" if hung else "crashed" if process.returncode < 0 else "failed"
        return how, last_test(text)

    def _wait(self, process: subprocess.Popen) -> bool:
        """Waits for the end of the tests; False: their log has stood still for too long."""
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            now = self.log.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > self.stall:
                return False
        return True


def last_test(log: str) -> str:
    """The test that failed first by pytest's log; without a summary the last one that began."""
    name = r"(tests/[\w/]+\.py(?:::\w+(?:\[.*?\](?= |$))?)?)"
    failed = re.search(rf"^(?:FAILED|ERROR) {name}(?: - .*)?$", log, re.MULTILINE)
    begun = re.findall(rf"^{name}", log, re.MULTILINE)
    found = failed[1] if failed else begun[-1] if begun else "import of the package"
    return found.removeprefix("tests/")


# ---- The state file and the table ----


def read_state(path: Path) -> dict[tuple[str, str], Outcome]:
    """(id, tier) → the latest outcome."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {(outcome.id, outcome.tier): outcome for outcome in outcomes}


def to_run(
    mutants: Sequence[Mutant], state: dict[tuple[str, str], Outcome], tier: str, only: Sequence[str]
) -> list[Mutant]:
    """Those without an outcome in the tier that no smaller tier has caught.

    The deep tier takes only what the default one has seen.
    """
    if unknown := set(only) - {mutant.id for mutant in mutants}:
        raise SystemExit(f"--only: expected ids of `list`, got {' '.join(sorted(unknown))}")
    if only:
        return [mutant for mutant in mutants if mutant.id in only]
    left = [mutant for mutant in mutants if (mutant.id, tier) not in state]
    if tier == "mapped":
        return left
    before = [(mutant, by_default(state, mutant.id)) for mutant in left]
    if tier == "default":
        return [mutant for mutant, outcome in before if not caught(outcome)]
    return [mutant for mutant, outcome in before if outcome and outcome.how == "survived"]


def caught(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.how != "survived"


def by_default(state: dict[tuple[str, str], Outcome], name: str) -> Outcome | None:
    """What the default tier says of a mutant; the files of the mapped tier are a part of it."""
    mapped = state.get((name, "mapped"))
    return mapped if caught(mapped) else state.get((name, "default"))


def cell(text: str) -> str:
    """Code in a table."""
    return "`" + text.replace("|", "\\|") + "`"


def table(mutants: Sequence[Mutant], state: dict[tuple[str, str], Outcome]) -> str:
    """The committed table: every mutant and what caught it."""

    def told(outcome: Outcome) -> str:
        ending = "" if outcome.how == "failed" else f" ({outcome.how})"
        return cell(outcome.test) + ending

    rows, counts = [], {"default": 0, "deep": 0, "equivalent": 0, "survives": 0}
    for mutant in mutants:
        default, deep = by_default(state, mutant.id), state.get((mutant.id, "deep"))
        if default is None and mutant.id in EQUIVALENT:
            default = state.get((mutant.id, "mapped"))
        if default is None or default.how == "does not compile":
            continue
        if default.how != "survived":
            kind, by = "default", told(default)
        elif mutant.id in EQUIVALENT:
            kind, by = "equivalent", f"equivalent: {EQUIVALENT[mutant.id]}"
        elif caught(deep):
            kind, by = "deep", f"deep tier only: {told(deep)}"
        else:
            kind, by = "survives", "**not caught**"
        counts[kind] += 1
        place, edit = f"{mutant.file}:{mutant.line}", cell(mutant.shown)
        rows.append(f"| {mutant.id} | {place} | {mutant.operator} | {edit} | {by} |")
    commits = {outcome.commit for outcome in state.values()}
    head = (
        f"# Mutants\n\nWritten by `python -m mutants.run table`; seed {SEED}, tests at "
        f"{', '.join(sorted(commits))}.\n\n"
        f"{len(rows)} mutants: the default tier catches {counts['default']}, only the deep tier "
        f"{counts['deep']}; {counts['equivalent']} are equivalent, {counts['survives']} survive.\n"
    )
    columns = "| mutant | place | operator | edit | caught by |\n|---|---|---|---|---|\n"
    return head + "\n" + columns + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants.run", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["list", "check", "run", "table"])
    parser.add_argument("--tier", choices=TIERS, default="default", help="mapped: plan.py's files")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--python", default=sys.executable, help="with the packages of the tests")
    parser.add_argument("--stall", type=float, default=300, help="seconds without a word")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "jax_paged_mutants"
    )
    options = parser.parse_args()
    mutants, state_file = planned(), options.scratch / "state.jsonl"
    state = read_state(state_file)
    if options.command == "list":
        for m in mutants:
            print(f"{m.id}  {m.file}:{m.line}  {m.operator}: {m.shown}")
    elif options.command == "table":
        TABLE.write_text(table(mutants, state), encoding="utf-8")
    elif options.command == "check":
        tree = make_tree(options, 0)
        files = {m.file for m in mutants if not options.only or m.id in options.only}
        first = sorted({test for file in files for test in mapped_tests(file)})
        how, test = tree.test(options.tier, first)
        print(f"without a mutant: {how} {test}, log in {tree.log}")
        sys.exit(how != "survived")
    else:
        run_all(options, to_run(mutants, state, options.tier, options.only), state_file)


def make_tree(options: argparse.Namespace, number: int) -> Tree:
    folder = options.scratch / f"worker{number}"
    return Tree(folder, options.scratch / "programs", options.python, options.stall)


def run_all(options: argparse.Namespace, mutants: Sequence[Mutant], state_file: Path) -> None:
    """Runs the tier on the mutants, each in one of `--jobs` trees, and notes what became of it."""
    commit = git("describe", "--always", "--dirty").strip()
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for number in range(min(options.jobs, len(mutants))):
        trees.put(make_tree(options, number))

    def run(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            return tree.run(mutant, options.tier, commit)
        finally:
            trees.put(tree)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run, mutants):
            with open(state_file, "a", encoding="utf-8") as state:
                state.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            seconds = f"{outcome.build_s:.0f} + {outcome.tests_s:.0f} s"
            print(f"{outcome.id}: {outcome.how} {outcome.test} ({seconds})", flush=True)


if __name__ == "__main__":
    main()
