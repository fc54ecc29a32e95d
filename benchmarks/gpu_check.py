"""Everything that a GPU can tell about this checkout, in one command and under nine minutes.

    python benchmarks/gpu_check.py [--dry] [--out FILE] [--only STAGE …]

Needs no network: an nvcc, jax with its CUDA plugin, numpy, jaxtyping, pytest, scikit-build-core,
nanobind and, for the model, what jax_paged[models] names. Stages, each a process of its own with a
time limit, so that a crash or a hang of one is a line in the result and the next one goes on:

  device, environment   device, driver, versions, commit
  build         the CUDA module for the device at hand, into a folder of its own (or found built)
  gpu tests     tests/gpu: numerics against the float64 oracle, bits, replay, in-place writes
  op tests      the op suites that also run on the CPU, as far as they are of the native ops
  decode        bandwidth against a copy, and peers;  prefill   arithmetic against a matrix product
  experts       moe_experts by both, and XLA's ragged_dot
  model         a decode loop of a small Qwen3-MoE with command buffers off, on, and over loops
  memcheck, racecheck, initcheck   compute-sanitizer over every kernel, where the tool is on PATH

Prints a table and writes JSON. The exit status is 0 only when every stage passed and every target
was met; what was skipped, and why, stands in both. --dry runs the same code without a GPU: tiny
shapes, whatever backend jax has, no build, nothing judged.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu_report import failures, table, verdict

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SITE = ROOT / "build" / "gpu_check"  # where the build stage installs
LIMIT_S = 530.0
DRY_SLACK = 10  # a dry run measures nothing, so a slow or busy machine may take its time
# Suites of the ops; not the random one, which compiles more programs than there is time for.
OP_SUITES = (
    "test_attention*.py", "test_write_kv.py", "test_qkv_norm_rope_write.py", "test_merge.py",
    "test_moe.py",
)  # fmt: skip
COMMAND_BUFFERS = {
    "command buffers off": "--xla_gpu_enable_command_buffer=",
    "command buffers on": "",
    "command buffers with loops": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",
}
DEVICE = """
import json, sys, jax
device = jax.devices()[0]
row = {"platform": jax.default_backend(), "device": device.device_kind, "jax": jax.__version__}
if jax.default_backend() == "gpu":
    row["capability"] = device.compute_capability
open(sys.argv[1], "w").write(json.dumps(row))
"""
ENVIRONMENT = """
import json, sys, harness, jax_paged
row = harness.environment() | {"build": jax_paged.build_info(), "package": jax_paged.__file__}
open(sys.argv[1], "w").write(json.dumps(row))
"""


@dataclasses.dataclass
class Stage:
    """A process to run; skip: why it is not; after(output) says what is wrong with the output."""

    name: str
    command: list[str]
    budget_s: float
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    skip: str | None = None
    before: Callable[[], object] | None = None
    after: Callable[[str], str | None] | None = None


def run_stage(stage: Stage, time_left_s: float) -> dict:
    """Runs one stage to its end or its limit; says how it went, whatever happened."""
    result: dict = {"stage": stage.name, "status": "skipped", "reason": stage.skip, "rows": []}
    if stage.skip is not None:
        return result
    limit = min(stage.budget_s, time_left_s)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        command = [part.replace("{rows}", str(rows)) for part in stage.command]
        command = [part.replace("{seconds}", f"{0.8 * limit:.0f}") for part in command]
        try:
            if limit <= 0:
                raise TimeoutError("no time was left")
            if stage.before is not None:
                stage.before()
            code = _run(command, os.environ | stage.env, log, limit)
            reason = None if code == 0 else f"exit status {code}"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        with contextlib.suppress(FileNotFoundError):  # a stage without rows
            result["rows"] = [json.loads(line) for line in rows.read_text().splitlines()]
    if reason is None and stage.after is not None:
        try:
            reason = stage.after(output)
        except Exception as error:
            reason = f"output not understood: {type(error).__name__}: {error}"
    result["seconds"] = round(time.monotonic() - began, 1)
    result["status"], result["reason"] = ("failed", reason) if reason else ("passed", None)
    result["output"] = output[-4000:] if reason else output[-400:]
    return result


def _run(command: list[str], env: dict[str, str], log: Path, limit_s: float) -> int:
    """Runs a command with its output in a file; at the limit kills it and all that it started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- the stages ----


def tests_were_run(output: str) -> str | None:
    """What is wrong with a pytest run that exited with 0: some test must have passed."""
    found = re.findall(r"(\d+) (passed|skipped|failed|error)", output)
    counts = {word: int(number) for number, word in found}
    if not counts.get("passed"):
        return "no test has run"
    return None


def source_hash() -> str:
    """Of everything that the build reads, and the jaxlib that it is built against."""
    digest = hashlib.sha256()
    files = [ROOT / "pyproject.toml"]
    for folder in ("ffi", "jax_paged", "models"):
        files += (f for f in (ROOT / folder).rglob("*") if f.suffix not in (".pyc", ".so"))
    for file in sorted(f for f in files if f.is_file()):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    digest.update(sys.version.encode())
    return digest.hexdigest()


def build_stage(dry: bool, capability: str | None) -> Stage:
    """Installs the checkout for one architecture, unless the same was done before."""
    arch = f"{capability.replace('.', '')}-real" if capability else ""
    stamp, wanted = SITE / "stamp", f"{source_hash()} {arch}"
    found = stamp.exists() and stamp.read_text() == wanted
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation",
        "--no-deps", "--upgrade", "--target", str(SITE), str(ROOT),
    ]  # fmt: skip
    skip = None
    if dry:
        skip = f"dry, the installed jax_paged is used; would run: {' '.join(command)}"
    elif capability is None:
        skip = "no device to build for"
    elif found:
        skip = f"found built for {arch}, of these very sources"

    def remove_old() -> None:  # so that it is not measured when the build fails
        shutil.rmtree(SITE, ignore_errors=True)

    def keep_stamp(output: str) -> str | None:
        if not list(SITE.glob("jax_paged/_cuda*.so")):
            return "pip has installed no CUDA module"
        stamp.write_text(wanted)
        return None

    env = {"JAX_PAGED_CUDA": "on", "JAX_PAGED_CUDA_ARCHS": arch}
    return Stage("build", command, 100, env, skip, remove_old, keep_stamp)


def pytest_stage(name: str, dry: bool, budget_s: float, *arguments: str) -> Stage:
    """A pytest run on the GPU, over several processes where pytest-xdist is installed."""
    workers = [] if dry or importlib.util.find_spec("xdist") is None else ["-n", "6"]
    env = {"JAX_PAGED_GPU_TESTS": "dry" if dry else "require"}
    command = [sys.executable, "-P", "-m", "pytest", "--tb=short", *workers, *arguments]
    return Stage(name, command, budget_s, env, after=tests_were_run)


def worker_stage(name: str, dry: bool, budget_s: float, script: str, *arguments: str) -> Stage:
    """One of the programs beside this one, which adds its rows to a file."""
    command = [
        sys.executable, str(BENCHMARKS / script), *arguments, "--rows", "{rows}",
        "--seconds", "{seconds}", *(["--dry"] if dry else []),
    ]  # fmt: skip
    return Stage(name, command, budget_s)


def sanitizer_stage(tool: str, dry: bool) -> Stage:
    """compute-sanitizer over gpu_tiny.py; dry: the same program without it."""
    stage = worker_stage(tool, dry, 60, "gpu_tiny.py", "--label", tool)
    # An allocation for each buffer, so that an access beyond one is seen; no graphs, so that errors
    # have a kernel.
    stage.env = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": COMMAND_BUFFERS["command buffers off"],
    }
    sanitizer = shutil.which("compute-sanitizer")
    if dry:
        return stage
    if sanitizer is None:
        stage.skip = "compute-sanitizer is not on PATH"
    else:
        # initcheck must see the writes of every kernel, the others only look at ours.
        only = [] if tool == "initcheck" else _only_our_kernels(sanitizer)
        stage.command = [sanitizer, "--tool", tool, "--error-exitcode", "86", *only, *stage.command]
    return stage


def _only_our_kernels(sanitizer: str) -> list[str]:
    """The option that names kernels has changed between versions."""
    text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    if "--kernel-name " in text:
        return ["--kernel-name", "kernel_substring=jax_paged"]
    return ["--kernel-regex", "kns=jax_paged"] if "--kernel-regex" in text else []


def model_stage(label: str, dry: bool) -> Stage:
    stage = worker_stage(f"model, {label}", dry, 30, "gpu_model.py", "--label", label)
    stage.env = {"XLA_FLAGS": COMMAND_BUFFERS[label]}
    return stage


def stages(dry: bool, capability: str | None) -> list[Callable[[], Stage]]:
    """All of them, in order; each is made when its turn comes."""
    few = ["-k", "decode and smollm2_135m and bfloat16 or donated"] if dry else []
    suites = [
        str(file.relative_to(ROOT))
        for pattern in OP_SUITES
        for file in sorted((ROOT / "tests").glob(pattern))
        if "random" not in file.name
    ]
    ops = "native and not reference" + (" and default_scale" if dry else "")
    labels = list(COMMAND_BUFFERS)[-1 if dry else 0 :]
    return [
        lambda: build_stage(dry, capability),
        lambda: facts_stage("environment", ENVIRONMENT),
        lambda: pytest_stage("gpu tests", dry, 90, "-m", "gpu", "tests/gpu", *few),
        lambda: pytest_stage("op tests", dry, 50, "-k", ops, *suites),
        lambda: worker_stage("decode", dry, 90, "gpu_attention.py", "decode"),
        lambda: worker_stage("prefill", dry, 45, "gpu_attention.py", "prefill"),
        lambda: worker_stage("experts", dry, 30, "gpu_experts.py"),
        *(lambda label=label: model_stage(label, dry) for label in labels),
        *(
            lambda tool=tool: sanitizer_stage(tool, dry)
            for tool in ("memcheck", "racecheck", "initcheck")
        ),
    ]


def facts_stage(name: str, code: str) -> Stage:
    """Code that writes a dict to the file it is told; its row becomes part of the environment."""
    return Stage(name, [sys.executable, "-P", "-c", code, "{rows}"], 15)


def driver() -> str | None:
    """The driver's version by nvidia-smi, where there is one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="everything but the device")
    parser.add_argument(
        "--out", type=Path, default=None,
        help="JSON file (default benchmarks/results/gpu_check.json; dry: a temporary one)",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="stages whose names start with one of these"
    )
    args = parser.parse_args()
    began = time.monotonic()
    os.environ["PYTHONSAFEPATH"] = "1"  # the checkout's own jax_paged has no native modules
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    if args.dry:
        os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads would spin
    else:
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch wants memory, too
        paths.insert(0, str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    out = args.out
    if out is None:
        dry_file = Path(tempfile.gettempdir(), "gpu_check_dry.json")
        out = dry_file if args.dry else BENCHMARKS / "results" / "gpu_check.json"

    environment = {"driver": driver(), "sources": source_hash()[:16]}  # a copy has no commit
    record: dict = {"dry": args.dry, "environment": environment, "stages": []}

    def go(stage: Stage) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {stage.name} …", flush=True)
        slack = DRY_SLACK if args.dry else 1
        stage.budget_s *= slack
        result = run_stage(stage, slack * LIMIT_S - (time.monotonic() - began))
        if stage.name in ("device", "environment"):
            for row in result["rows"]:
                record["environment"] |= row
            result["rows"] = []
        for row in result["rows"]:
            row["verdict"] = verdict(row, str(record["environment"].get("device")), args.dry)
        record["stages"].append(result)
        record["failures"] = failures(record)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    go(facts_stage("device", DEVICE))
    if not args.dry and record["environment"].get("platform") != "gpu":
        record["failures"].append("no GPU: nothing was checked (--dry needs none)")
    else:
        for make in stages(args.dry, record["environment"].get("capability")):
            stage = make()
            if not args.only or stage.name.startswith((*args.only, "build", "environment")):
                go(stage)
        package = str(record["environment"].get("package"))
        if not args.dry and not package.startswith(str(SITE)):
            record["failures"].append(f"measured was {package}, not what the build stage made")
    record["seconds"] = round(time.monotonic() - began, 1)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))
    print(f"{out}, {record['seconds']} s")
    raise SystemExit(1 if record["failures"] else 0)


if __name__ == "__main__":
    main()
