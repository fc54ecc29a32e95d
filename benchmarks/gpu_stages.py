# SPDX-License-Identifier: Apache-2.0
"""The stages of each part of gpu_check.py. Budgets add up to less than one command may take."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_run import ROOT, Stage

BENCHMARKS = ROOT / "benchmarks"
SITE = ROOT / "build" / "gpu_check"  # where the build stage installs
STALL_S = 75.0  # for one measurement, with what XLA compiles for it
# Suites of the ops, the longest last. Not the random ones, which compile more programs than there
# is time for.
OP_SUITES = (
    "eight_bit", "mla", "fp8_output", "rope_inside", "pinned_windows", "attention_tree", "cascade",
    "ragged_attention", "write_kv", "qkv_norm_rope_write", "kv_range", "transfer", "moe", "merge",
    "engine", "kv_dtype", "attention", "attention_wild", "transforms", "attention_options",
)  # fmt: skip
# Tests whose names have one of these look at programs or at messages, on the CPU.
NOT_ON_A_DEVICE = (
    "lower", "explain", "named", "refused", "refuses", "told_in_one_line", "wrong_", "reference_",
    "split_over_devices", "handler", "exported", "export_needs", "random_requests",
)  # fmt: skip
COMMAND_BUFFERS = {
    "command buffers off": "--xla_gpu_enable_command_buffer=",
    "command buffers on": "",
    "command buffers with loops": "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",
}
PROFILED = ("decode", "small", "prefill", "experts", "planner")
SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "LaunchStats", "Occupancy",
    "SchedulerStats", "WarpStateStats",
)  # fmt: skip
DEVICE = """
import json, sys, jax
device = jax.devices()[0]
row = {"platform": jax.default_backend(), "device": device.device_kind, "jax": jax.__version__}
if jax.default_backend() == "gpu":
    row["capability"] = device.compute_capability
open(sys.argv[1], "w").write(json.dumps(row) + "\\n")
"""
ENVIRONMENT = """
import json, sys, harness, jax_paged
row = harness.environment() | {"build": jax_paged.build_info(), "package": jax_paged.__file__}
open(sys.argv[1], "w").write(json.dumps(row) + "\\n")
"""


def facts_stage(name: str, code: str, budget_s: float) -> Stage:
    """Code that writes a dict to the file it is told; its row becomes part of the environment."""
    return Stage(name, [sys.executable, "-P", "-c", code, "{rows}"], budget_s)


def device_stage() -> Stage:
    """A cold start reads jax and CUDA from a disk that nobody has read yet."""
    return facts_stage("device", DEVICE, 90)


# ---- build ----


def source_hash() -> str:
    """Of everything that the build reads from the checkout."""
    digest = hashlib.sha256()
    files = [ROOT / "pyproject.toml"]
    for folder in ("ffi", "jax_paged", "models"):
        files += (f for f in (ROOT / folder).rglob("*") if f.suffix not in (".pyc", ".so"))
    for file in sorted(f for f in files if f.is_file()):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def toolkit() -> str | None:
    """The nvcc's CUDA version (major.minor), None without an nvcc."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else None


def build_facts(arch: str) -> dict[str, str | None]:
    """What a build depends on: one made elsewhere of the same serves here."""
    return {
        "sources": source_hash(), "arch": arch, "toolkit": toolkit(),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "jaxlib": importlib.metadata.version("jaxlib"),
    }  # fmt: skip


def why_rebuild(stamp: Path, wanted: dict[str, str | None]) -> str | None:
    """Why the build beside the stamp does not serve, None where it does."""
    if not stamp.exists():
        return "nothing is built"
    found = json.loads(stamp.read_text(encoding="utf-8"))
    for name, value in wanted.items():
        if name == "toolkit" and value is None:  # no nvcc here: what is built has to do
            continue
        if found.get(name) != value:
            return f"built for {name} {found.get(name)}, wanted {value}"
    return None


def build_stage(dry: bool, capability: str | None) -> Stage:
    """Installs the checkout for one architecture, unless the same was done before."""
    arch = f"{capability.replace('.', '')}-real" if capability else ""
    stamp, wanted = SITE / "stamp.json", build_facts(arch)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation",
        "--no-deps", "--upgrade", "--target", str(SITE), str(ROOT),
    ]  # fmt: skip
    skip = None
    if dry:
        skip = f"dry, the installed jax_paged is used; would run: {' '.join(command)}"
    elif capability is None:
        skip = "no device to build for"
    elif why_rebuild(stamp, wanted) is None:
        skip = f"found built for {arch}, of these very sources"

    def remove_old() -> None:  # so that it is not measured when the build fails
        shutil.rmtree(SITE, ignore_errors=True)

    def keep_stamp(output: str, rows: list[dict]) -> str | None:
        if not list(SITE.glob("jax_paged/_cuda*.so")):
            return "pip has installed no CUDA module"
        stamp.write_text(json.dumps(wanted), encoding="utf-8")
        return None

    env = {
        "JAX_PAGED_CUDA": "on", "JAX_PAGED_CUDA_ARCHS": arch,
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
    }  # fmt: skip
    return Stage(
        "build", command, 110, env, skip=skip, needed=True, before=remove_old, after=keep_stamp
    )


# ---- numerics ----


def tests_were_run(output: str, rows: list[dict]) -> str | None:
    """What is wrong with a run of tests that exited with 0: some test must have passed."""
    counts = next((row for row in reversed(rows) if row["kind"] == "tests"), {})
    return None if counts.get("passed") else "no test has run"


def tests_stage(name: str, dry: bool, budget_s: float, junit: Path, *arguments: str) -> Stage:
    """Tests in children of gpu_tests.py."""
    workers = 1 if dry else max(1, min(14, (os.cpu_count() or 1) - 2))
    command = [
        sys.executable, str(BENCHMARKS / "gpu_tests.py"), "--rows", "{rows}",
        "--seconds", "{seconds}", "--workers", str(workers), "--junit", str(junit),
        *(["--limit", "300", "--start", "900"] if dry else []), *arguments,
    ]  # fmt: skip
    # Each program runs a few times, so XLA need not try what is fastest for it.
    flags = "--xla_gpu_autotune_level=0"
    env = {"JAX_PAGED_GPU_TESTS": "dry" if dry else "require", "XLA_FLAGS": flags}
    return Stage(name, command, budget_s, env, after=tests_were_run)


def suite(name: str) -> str:
    """The path of test_<name>.py, in whatever folder of the tests it is."""
    (path,) = ROOT.glob(f"tests/*/test_{name}.py")
    return str(path.relative_to(ROOT))


def numerics(dry: bool, junit: Path) -> list[Stage]:
    """tests/gpu, and the op suites as far as they are of the native ops."""
    few = ["-k", "decode and smollm2_135m and bfloat16 or donated or codes and e4m3fn-64-HND"]
    ops = " and ".join(f"not {word}" for word in NOT_ON_A_DEVICE)
    suites = [suite(name) for name in OP_SUITES]
    if dry:
        ops, suites = "default_scale or nan_stays_nan or splits", [
            suite(name) for name in ("attention", "eight_bit", "mla")
        ]  # fmt: skip
    of_gpu, of_ops = (junit.with_suffix(f".{name}.xml") for name in ("gpu", "ops"))
    return [
        tests_stage("gpu tests", dry, 130, of_gpu, "-m", "gpu", "tests/gpu", *few * dry),
        tests_stage("op tests", dry, 175, of_ops, "-k", ops, *suites),
    ]


# ---- speed ----


def worker_stage(name: str, dry: bool, budget_s: float, script: str, *arguments: str) -> Stage:
    """One of the programs beside this one, which adds its rows to a file."""
    command = [
        sys.executable, str(BENCHMARKS / script), *arguments, "--rows", "{rows}",
        "--seconds", "{seconds}", "--skip", "{skip}", *(["--dry"] if dry else []),
    ]  # fmt: skip
    return Stage(name, command, budget_s, stall_s=None if dry else STALL_S)


def model_stage(label: str, dry: bool) -> Stage:
    stage = worker_stage(f"model, {label}", dry, 24, "gpu_model.py", "--label", label)
    stage.env = {"XLA_FLAGS": COMMAND_BUFFERS[label]}
    return stage


def speed(dry: bool, junit: Path) -> list[Stage]:
    """Everything that is timed."""
    labels = list(COMMAND_BUFFERS)[-1 if dry else 0 :]
    return [
        worker_stage("decode", dry, 70, "gpu_attention.py", "decode"),
        worker_stage("prefill", dry, 45, "gpu_attention.py", "prefill"),
        worker_stage("options", dry, 70, "gpu_options.py"),
        worker_stage("experts", dry, 28, "gpu_experts.py"),
        worker_stage("writes", dry, 20, "gpu_writes.py"),
        *(model_stage(label, dry) for label in labels),
    ]


# ---- tools ----


def sanitizer_stage(tool: str, dry: bool) -> Stage:
    """compute-sanitizer over gpu_tiny.py; dry: the same program without it."""
    stage = worker_stage(tool, dry, 70, "gpu_tiny.py", "--label", tool)
    stage.stall_s = None  # how much slower a tool makes a kernel is not known
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


def profile_stage(what: str, dry: bool) -> Stage:
    """Nsight Compute over gpu_profile.py, counters as rows; dry: the same program without it."""
    stage = Stage(f"ncu, {what}", [], 20)
    stage.env = {"XLA_FLAGS": COMMAND_BUFFERS["command buffers off"]}
    profiled = [sys.executable, str(BENCHMARKS / "gpu_profile.py"), what]
    if dry:
        stage.command = [*profiled, "--dry"]
        return stage
    ncu = shutil.which("ncu")
    if ncu is None:
        stage.skip = "ncu is not on PATH"
        return stage
    sections = [word for name in SECTIONS for word in ("--section", name)]
    stage.command = [
        sys.executable, str(BENCHMARKS / "gpu_counters.py"), "--rows", "{rows}", "--case", what,
        ncu, "--clock-control", "none", "--kernel-name-base", "demangled",
        "--kernel-name", "regex:jax_paged", "--launch-count", "8", *sections,
        "--csv", "--page", "details", *profiled,
    ]  # fmt: skip
    return stage


def tools(dry: bool, junit: Path) -> list[Stage]:
    """compute-sanitizer over every kernel, and the counters of those that matter most."""
    return [
        *(profile_stage(what, dry) for what in PROFILED),
        *(sanitizer_stage(tool, dry) for tool in ("memcheck", "racecheck", "initcheck")),
    ]


PARTS = {"numerics": numerics, "speed": speed, "tools": tools}


def stages(parts: list[str], dry: bool, capability: str | None, out: Path) -> list[Stage]:
    """All of them, in order, but the first one: `device_stage`, which says the capability."""
    build = build_stage(dry, capability)
    environment = facts_stage("environment", ENVIRONMENT, 40)
    return [build, environment, *(s for part in parts for s in PARTS[part](dry, out))]
