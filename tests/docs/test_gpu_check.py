# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_check.py without a GPU: its dry mode, and that it never hides what went wrong."""

import argparse
import collections
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"


@pytest.fixture
def modules(monkeypatch):
    """The benchmark modules, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def check(*arguments, **env):
    """Runs gpu_check.py; (the finished process, its record)."""
    out = Path(arguments[arguments.index("--out") + 1])
    run = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | env
    )
    return run, json.loads(out.read_text())


STAGES = {
    "numerics": ["gpu tests", "op tests"],
    "speed": [
        "decode", "prefill", "options", "experts", "writes", "model, command buffers with loops",
    ],
    "tools": [
        "ncu, decode", "ncu, small", "ncu, prefill", "ncu, experts", "ncu, planner", "memcheck",
        "racecheck", "initcheck",
    ],
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("part", STAGES)
def test_dry_mode_runs_every_stage(part, tmp_path):
    run, record = check("--dry", "--part", part, "--out", tmp_path / "record.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert record["failures"] == []
    assert "no failures" in run.stdout
    stages = {stage["stage"]: stage for stage in record["stages"]}
    assert stages["build"]["status"] == "skipped"
    assert "pip install" in stages["build"]["reason"]
    ran = [name for name, stage in stages.items() if stage["status"] == "passed"]
    assert ran == ["device", "environment", *STAGES[part]]
    for key in ("device", "jax", "cpu", "build", "sources"):
        assert record["environment"][key]
    assert {"commit", "driver"} <= set(record["environment"])  # empty in a copy, without a GPU
    rows = {name: stage["rows"] for name, stage in stages.items()}
    if part == "numerics":
        for name in STAGES[part]:
            assert rows[name][-1]["kind"] == "tests"
            assert rows[name][-1]["passed"] >= 3
        assert (tmp_path / "record.gpu.xml").read_text().count("<testcase") >= 3
    elif part == "tools":
        assert all(row["ok"] for row in rows["memcheck"])
        assert len(rows["memcheck"]) > 30
    else:
        check_speed(rows)


def check_speed(rows):
    """What the stages of part "speed" have timed."""
    for kind in ("decode", "prefill"):
        assert rows[kind][0]["kind"] == "ceilings"
        timed = [row for row in rows[kind] if row["kind"] == kind]
        assert len(timed) == {"decode": 2, "prefill": 3}[kind]
        assert all(row["worst_error"] < 0.01 for row in timed)
        assert timed[0]["verdict"] == "dry"  # has a target, which nothing is held against
        peers = {row["peer"] for row in rows[kind] if row["kind"] == f"{kind} peer"}
        assert {"cudnn", "torch_sdpa", "flashinfer"} <= peers
    kinds = {row["kind"] for row in rows["options"]}
    assert {"plan", "mla", "option fp8 pages", "option vllm5d", "option trees"} <= kinds
    assert [row["kind"] for row in rows["experts"]] == [
        "ceilings", "experts", "experts peer", "experts",
    ]  # fmt: skip
    assert all(row["worst_error"] < 0.01 for row in rows["experts"] if row["kind"] == "experts")
    assert {(row["kind"], row.get("dtype")) for row in rows["writes"][1:]} == {
        (op, kv)
        for op in ("write_kv", "qkv_norm_rope_write")
        for kv in ("bfloat16", "float8_e4m3fn")
    }


def test_without_a_gpu_it_fails_and_says_so(tmp_path):
    run, record = check("--out", tmp_path / "record.json", JAX_PLATFORMS="cpu")
    assert run.returncode == 1
    assert "no GPU" in run.stdout
    assert record["failures"][-1].startswith("gpu_check: no GPU: nothing was checked")
    assert [stage["stage"] for stage in record["stages"]] == ["device", "gpu_check"]


def test_gpu_tests_fail_without_a_gpu_where_one_is_required():
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "tests/gpu/test_gpu_attention.py", "-k", "donated"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"JAX_PAGED_GPU_TESTS": "require", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 1
    assert "no GPU: jax runs on cpu" in run.stdout


CRASHES = {
    "exit status 3": "raise SystemExit(3)",
    "exit status -11": "import os; os.kill(os.getpid(), 11)",
    "not done after 2 s": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("reason", CRASHES)
def test_a_stage_that_breaks_is_told_and_keeps_its_rows(reason, modules):
    gpu_run = modules("gpu_run")
    code = "import sys; print('last words', flush=True); "
    code += "open(sys.argv[1], 'w').write('{\"kind\": \"x\"}\\n'); " + CRASHES[reason]
    stage = gpu_run.Stage("s", [sys.executable, "-c", code, "{rows}"], 2.0)
    seen = []
    result = gpu_run.run_stage(stage, 2, lambda result: seen.append(list(result["rows"])))
    assert (result["status"], result["reason"]) == ("failed", reason)
    assert result["rows"] == [{"kind": "x"}]
    assert seen == [[{"kind": "x"}]]
    assert "last words" in result["output"]


def test_a_stage_that_cannot_start_or_has_no_time_fails(modules):
    gpu_run = modules("gpu_run")
    result = gpu_run.run_stage(gpu_run.Stage("s", ["/no/such/program"], 5), 100)
    assert result["status"] == "failed"
    assert "FileNotFoundError" in result["reason"]
    result = gpu_run.run_stage(gpu_run.Stage("s", [sys.executable, "-c", ""], 5), -1.0)
    assert (result["status"], result["reason"]) == ("failed", "TimeoutError: no time was left")


MEASURES = """
import ctypes, os
from gpu_timing import Report

def hang():
    ctypes.PyDLL(None).pause()  # in native code, with the interpreter's lock

report, _ = Report.from_args("Planted.")
report.prepare(lambda: None, kind="ceilings")
blocks = {"one": lambda: None, "wrong": lambda: 1 / 0, "hangs": hang, "crashes": os.abort}
for name, block in (blocks | {"last": lambda: None}).items():
    def run(name=name, block=block):
        block()
        report.add(kind=name, us=1.0)
    report.attempt(run, kind=name)
raise SystemExit(report.failed)
"""


def test_measurements_go_on_behind_one_that_hangs_or_crashes(modules, tmp_path, monkeypatch):
    gpu_run = modules("gpu_run")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"), prepend=os.pathsep)
    (tmp_path / "measures.py").write_text(MEASURES)
    command = [sys.executable, str(tmp_path / "measures.py"), "--dry", "--rows", "{rows}"]
    command += ["--seconds", "{seconds}", "--skip", "{skip}"]
    result = gpu_run.run_stage(gpu_run.Stage("s", command, 60, stall_s=2.0), 120)
    assert result["rows"] == [
        {"kind": "one", "us": 1.0},
        {"kind": "wrong", "error": "ZeroDivisionError: division by zero"},
        {"kind": "hangs", "error": "hung: no end after 2 s"},
        {"kind": "crashes", "error": "exit status -6"},
        {"kind": "last", "us": 1.0},
    ]


PLANTED = """
import ctypes, os
import numpy as np
import pytest

def test_before(): pass
def test_wrong_result(): np.testing.assert_allclose(np.float32(1.25), 1.0, rtol=1e-3)
def test_hang(): ctypes.PyDLL(None).pause()
def test_crash(): os.abort()
@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_ops(implementation): pass
def test_left_out(): pytest.skip("no such device")
"""
LOST = """
import sys

def test_breaks_the_device():
    import types
    jax = types.ModuleType("jax")
    jax.numpy = types.ModuleType("jax.numpy")
    def ones(*_): raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    jax.numpy.ones, jax.numpy.float32 = ones, None
    sys.modules.update({"jax": jax, "jax.numpy": jax.numpy})
    assert False, "what it gave was wrong"

def test_gets_a_device_again(): assert "jax" not in sys.modules
"""


def test_a_test_that_hangs_or_is_wrong_is_named_and_the_others_run(tmp_path):
    """The hang holds the interpreter's lock in native code, where no signal handler runs."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_planted.py").write_text(PLANTED)
    (tests / "test_lost.py").write_text(LOST)
    (tests / "test_broken.py").write_text("import no_such_module")
    rows, junit = tmp_path / "rows", tmp_path / "junit.xml"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_tests.py", "--rows", rows]
    command += ["--limit", "2", "--workers", "2", "--junit", junit, "--rootdir", tests]
    run = subprocess.run([*command, tests, "-c", os.devnull], capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    *failed, counts = found
    errors = {row["case"].partition("::")[2] or row["case"]: row["error"] for row in failed}
    assert errors.pop("test_hang") == "hung: no end after 2 s"
    assert errors.pop("test_crash").startswith("crashed: exit status -6")
    assert errors.pop("test_wrong_result").startswith("failed: ")
    assert "no_such_module" in errors.pop("test_broken.py")
    assert "the device is lost" in errors.pop("test_breaks_the_device")
    assert errors == {}
    [hang] = [row for row in failed if row["case"].endswith("test_hang")]
    assert "in test_hang" in hang["text"]  # where it hung
    del counts["slowest"]
    assert counts == {
        "kind": "tests", "passed": 3, "skipped": 1, "failed": 2, "hung": 1, "crashed": 1,
        "broken": 1,
    }  # fmt: skip
    assert junit.read_text().count("<failure") == 5
    assert re.search(r"^passed .*::test_before$", run.stdout, re.MULTILINE)


def test_tests_without_time_are_named(modules, tmp_path):
    gpu_tests = modules("gpu_tests")
    args = {"rows": tmp_path / "rows", "junit": None, "seconds": -1.0, "limit": 1.0, "start": 1.0}
    run = gpu_tests.Run(argparse.Namespace(**args), [])
    run._left = collections.deque(["test_x.py::test_a", "test_x.py::test_b"])
    run.work()
    assert not run.finish()
    *rows, counts = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["test_x.py::test_a", "test_x.py::test_b"]
    assert all(row["error"] == "not run: the stage's time was up" for row in rows)
    assert counts["not run"] == 2


def facts(**row):
    """Code of a stage that finds these facts."""
    return f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({row!r}) + chr(10))"


@pytest.mark.parametrize("package", ["build/gpu_check/jax_paged", "elsewhere/jax_paged"])
def test_on_a_gpu_everything_runs_and_what_failed_is_told(package, modules, monkeypatch, tmp_path):
    gpu_check, stages, run = (modules(name) for name in ("gpu_check", "gpu_stages", "gpu_run"))
    out = tmp_path / "record.json"
    row = {"kind": "decode", "us": 10.0, "target": ["us", "max", 9]}

    def few(parts, dry, capability, junit):
        assert (parts, dry, capability) == (["speed"], False, "9.0")
        return [
            stages.facts_stage("environment", facts(package=str(ROOT / package)), 15),
            run.Stage("broken", [sys.executable, "-c", "raise SystemExit(3)"], 30),
            stages.facts_stage("decode", facts(**row), 15),
            run.Stage("absent", [], 30, skip="no such tool"),
        ]

    monkeypatch.setattr(stages, "stages", few)
    device = facts(platform="gpu", device="NVIDIA H200", capability="9.0")
    monkeypatch.setattr(stages, "DEVICE", device)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    command = ["gpu_check.py", "--part", "speed", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 1
    record = json.loads(out.read_text())
    statuses = {stage["stage"]: stage["status"] for stage in record["stages"]}
    statuses.pop("gpu_check", None)
    assert statuses == {
        "device": "passed", "environment": "passed", "broken": "failed", "decode": "passed",
        "absent": "skipped",
    }  # fmt: skip
    told = ["broken: exit status 3", "decode: target missed: decode  10.0 µs"]
    if "elsewhere" in package:
        told.append(f"gpu_check: measured was {ROOT / package}, not what the build stage made")
    assert [failure.split("  [")[0] for failure in record["failures"]] == told


def test_nothing_is_run_without_a_build(modules, tmp_path):
    gpu_check, stages, run = (modules(name) for name in ("gpu_check", "gpu_stages", "gpu_run"))
    broken = run.Stage("build", [sys.executable, "-c", "raise SystemExit(1)"], 5, needed=True)
    later = run.Stage("later", [sys.executable, "-c", ""], 5)
    check = gpu_check.Check(True, tmp_path / "record.json", 100, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "stages", lambda *_: [broken, later])
        check.run(["speed"], None)
    assert check.record["failures"] == [
        "build: exit status 1", "gpu_check: nothing was checked: build failed",
    ]  # fmt: skip


def test_a_test_run_without_passed_tests_fails(modules):
    tests_were_run = modules("gpu_stages").tests_were_run
    assert tests_were_run("", [{"kind": "tests", "skipped": 176}]) == "no test has run"
    assert tests_were_run("", []) == "no test has run"
    assert tests_were_run("", [{"kind": "tests", "passed": 1, "skipped": 3}]) is None


@pytest.mark.parametrize("part", STAGES)
def test_each_part_ends_in_ten_minutes(part, modules, tmp_path, monkeypatch):
    gpu_check, gpu_stages = modules("gpu_check"), modules("gpu_stages")
    monkeypatch.setattr(gpu_stages, "SITE", tmp_path)  # nothing is built
    device = gpu_stages.device_stage()
    stages = [device, *gpu_stages.stages([part], False, "9.0", tmp_path / "record.json")]
    assert device.budget_s == 90
    assert sum(stage.budget_s for stage in stages) < gpu_check.LIMIT_S < 580
    build = stages[1]
    assert build.skip is None
    assert build.env["JAX_PAGED_CUDA_ARCHS"] == "90-real"
    assert build.command[-3:-1] == ["--target", str(tmp_path)]
    names = [stage.name for stage in stages[3:]]
    assert [name for name in names if not name.startswith("model")] == [
        name for name in STAGES[part] if not name.startswith("model")
    ]


def test_the_op_suites_are_those_of_the_tests(modules):
    for name in modules("gpu_stages").OP_SUITES:
        assert len([*ROOT.glob(f"tests/*/test_{name}.py")]) == 1, name


def test_a_build_from_elsewhere_serves_where_all_that_it_depends_on_is_the_same(modules, tmp_path):
    stages = modules("gpu_stages")
    stamp, wanted = tmp_path / "stamp.json", stages.build_facts("90-real")
    assert set(wanted) == {"sources", "arch", "toolkit", "python", "jaxlib"}
    assert stages.why_rebuild(stamp, wanted) == "nothing is built"
    stamp.write_text(json.dumps(wanted))
    assert stages.why_rebuild(stamp, wanted) is None
    assert stages.why_rebuild(stamp, wanted | {"toolkit": None}) is None  # no nvcc here
    for name in wanted:
        told = stages.why_rebuild(stamp, wanted | {name: "other"})
        assert told == f"built for {name} {wanted[name]}, wanted other"


def test_what_ncu_prints_becomes_rows(modules):
    lines = [
        "==PROF== Connected to process 1",
        '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"',
        '"0","1","void jax_paged::cuda::DecodeKernel<1>(Args)","L","Duration","us","12.5"',
        '"0","1","void jax_paged::cuda::DecodeKernel<1>(Args)","L","Registers","","238"',
        '"1","1","jax_paged::cuda::PlanKernel(Args)","L","Duration","us","3.5"',
    ]
    assert modules("gpu_counters").counters(lines) == [
        {"kernel": "DecodeKernel", "counters": {"Duration": "12.5 us", "Registers": "238"}},
        {"kernel": "PlanKernel", "counters": {"Duration": "3.5 us"}},
    ]
    assert modules("gpu_counters").counters(["==ERROR== no device"]) == []


def test_targets_are_judged_on_an_h200_and_rates_by_the_device_on_an_h100(modules):
    report = modules("gpu_report")
    row = {"kind": "decode", "percent_of_copy": 84.9, "target": ["percent_of_copy", "min", 85]}
    for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assert report.verdict(row, device, dry=False) == "MISSED"
        assert report.verdict(row | {"percent_of_copy": 85}, device, dry=False) == "met"
        assert report.verdict(row | {"percent_of_copy": None}, device, dry=False) == "MISSED"
        assert report.verdict(row, device, dry=True) == "dry"
    assert report.verdict(row, "NVIDIA A100", dry=False).startswith("not judged")
    fast = {"us": 9.1, "target": ["us", "max", 9]}
    assert report.verdict(fast, "NVIDIA H200", dry=False) == "MISSED"
    assert report.verdict(fast | {"us": 9.0}, "NVIDIA H200", dry=False) == "met"
    rate = {"kind": "prefill", "tflop_per_s": 279.0, "percent_of_matmul": 36.0,
            "target": ["tflop_per_s", "min", 280],
            "target_h100": ["percent_of_matmul", "min", 35]}  # fmt: skip
    assert report.verdict(rate, "NVIDIA H200", dry=False) == "MISSED"
    assert report.verdict(rate, "NVIDIA H100", dry=False) == "met"
    rate["verdict"] = "met"
    assert "[percent_of_matmul at least 35: met]" in report.row_line(rate, "NVIDIA H100")


def test_errors_and_missed_targets_are_failures(modules):
    report = modules("gpu_report")
    rows = [
        {"kind": "decode", "verdict": "met"},
        {"kind": "decode", "size": "1 x 4", "verdict": "MISSED"},
        {"kind": "decode", "error": "boom", "verdict": "ERROR"},
        {"kind": "decode peer", "skipped": "not installed", "verdict": "skipped"},
    ]
    stages = [
        {"stage": "a", "status": "passed", "reason": None, "rows": rows},
        {"stage": "b", "status": "failed", "reason": "exit status 1", "rows": []},
    ]
    found = report.failures({"stages": stages})
    assert found == [
        "a: target missed: decode  1 x 4", "a: decode  boom", "b: exit status 1",
    ]  # fmt: skip
    record = {"environment": {}, "stages": stages, "failures": found}
    assert "3 failures" in report.table(record)


def test_a_call_is_timed_as_the_difference_of_two_chains(modules):
    timing = modules("gpu_timing")
    taken = timing.per_call(lambda calls: 5.0 + 0.25 * calls, 2, 10, budget_s=0)
    assert math.isclose(taken.median, 0.25)
    assert timing.rate(8.0, taken.median) == 32.0
    lost = timing.per_call(lambda calls: 5.0, 2, 10, budget_s=0)
    assert timing.rate(8.0, lost.median) is None
    timing.Report(Path("none"), dry=True, seconds=1).check_time(lost)
    with pytest.raises(ArithmeticError, match="took no longer"):
        timing.Report(Path("none"), dry=False, seconds=1).check_time(lost)


def test_a_report_goes_on_after_an_error_and_stops_at_its_limit(modules, tmp_path):
    timing = modules("gpu_timing")

    def broken():
        raise ZeroDivisionError("line one\nline two")

    report = timing.Report(tmp_path / "rows", dry=True, seconds=60)
    report.attempt(broken, kind="a")
    report.attempt(lambda: report.add(kind="b", us=1.0), kind="b")
    assert report.failed
    late = timing.Report(tmp_path / "rows", dry=True, seconds=-1)
    late.attempt(lambda: late.add(kind="c", us=1.0), kind="c")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert rows[0] == {"began": {"kind": "a"}, "counted": True}
    assert [row for row in rows if "began" not in row and "ended" not in row] == [
        {"kind": "a", "error": "ZeroDivisionError: line one line two"},
        {"kind": "b", "us": 1.0},
        {"kind": "c", "error": "TimeoutError: no time was left in the stage's budget"},
    ]
