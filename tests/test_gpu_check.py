"""benchmarks/gpu_check.py without a GPU: its dry mode, and that it never hides what went wrong."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_dry_mode_runs_every_stage(tmp_path):
    run, record = check("--dry", "--out", tmp_path / "record.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert record["failures"] == []
    stages = {stage["stage"]: stage for stage in record["stages"]}
    assert stages["build"]["status"] == "skipped"
    assert "JAX_PAGED" not in stages["build"]["reason"]
    assert "pip install" in stages["build"]["reason"]
    ran = [name for name, stage in stages.items() if stage["status"] == "passed"]
    assert ran == [
        "device", "environment", "gpu tests", "op tests", "decode", "prefill",
        "experts", "model, command buffers with loops", "memcheck", "racecheck", "initcheck",
    ]  # fmt: skip
    assert " passed" in stages["gpu tests"]["output"]
    for kind in ("decode", "prefill"):
        rows = stages[kind]["rows"]
        assert rows[0]["kind"] == "ceilings"
        timed = [row for row in rows if row["kind"] == kind]
        assert len(timed) == {"decode": 2, "prefill": 3}[kind]
        assert all(row["worst_error"] < 0.01 for row in timed)
        assert timed[0]["verdict"] == "dry"  # has a target, which nothing is held against
        peers = {row["peer"] for row in rows if row["kind"] == f"{kind} peer"}
        assert {"torch_sdpa", "flashinfer"} <= peers
    rows = stages["experts"]["rows"]
    assert [row["kind"] for row in rows] == ["ceilings", "experts", "experts peer", "experts"]
    assert all(row["worst_error"] < 0.01 for row in rows if row["kind"] == "experts")
    assert all(row["ok"] for row in stages["memcheck"]["rows"])
    for key in ("device", "jax", "cpu", "build", "sources"):
        assert record["environment"][key]
    assert {"commit", "driver"} <= set(record["environment"])  # empty in a copy, without a GPU
    assert "no failures" in run.stdout


def test_without_a_gpu_it_fails_and_says_so(tmp_path):
    run, record = check("--out", tmp_path / "record.json", JAX_PLATFORMS="cpu")
    assert run.returncode == 1
    assert "no GPU" in run.stdout
    assert record["failures"][-1].startswith("no GPU: nothing was checked")
    assert [stage["stage"] for stage in record["stages"]] == ["device"]


def test_gpu_tests_fail_without_a_gpu_where_one_is_required():
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "tests/gpu", "-k", "donated"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"JAX_PAGED_GPU_TESTS": "require", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 1
    assert "no GPU: jax runs on cpu" in run.stdout


CRASHES = {
    "exit status 3": "raise SystemExit(3)",
    "exit status -11": "import os; os.kill(os.getpid(), 11)",
    "TimeoutError: not done after 2 s": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("reason", CRASHES)
def test_a_stage_that_breaks_is_told_and_keeps_its_rows(reason, modules):
    gpu_check = modules("gpu_check")
    code = "import sys; print('last words', flush=True); "
    code += "open(sys.argv[1], 'w').write('{\"kind\": \"x\"}\\n'); " + CRASHES[reason]
    stage = gpu_check.Stage("s", [sys.executable, "-c", code, "{rows}"], 2.0)
    result = gpu_check.run_stage(stage, 100)
    assert (result["status"], result["reason"]) == ("failed", reason)
    assert result["rows"] == [{"kind": "x"}]
    assert "last words" in result["output"]


def test_a_stage_that_cannot_start_or_has_no_time_fails(modules):
    gpu_check = modules("gpu_check")
    result = gpu_check.run_stage(gpu_check.Stage("s", ["/no/such/program"], 5), 100)
    assert result["status"] == "failed"
    assert "FileNotFoundError" in result["reason"]
    result = gpu_check.run_stage(gpu_check.Stage("s", [sys.executable, "-c", ""], 5), -1.0)
    assert (result["status"], result["reason"]) == ("failed", "TimeoutError: no time was left")


def facts(**row):
    """Code of a stage that finds these facts."""
    return f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({row!r}))"


@pytest.mark.parametrize("package", ["build/gpu_check/jax_paged", "elsewhere/jax_paged"])
def test_on_a_gpu_everything_runs_and_what_failed_is_told(package, modules, monkeypatch, tmp_path):
    gpu_check = modules("gpu_check")
    out = tmp_path / "record.json"
    row = {"kind": "decode", "us": 10.0, "target": ["us", "max", 9]}

    def stages(dry, capability):
        assert (dry, capability) == (False, "9.0")
        package_is = facts(package=str(ROOT / package))
        broken = gpu_check.Stage("broken", [sys.executable, "-c", "raise SystemExit(3)"], 30)
        return [
            lambda: gpu_check.facts_stage("environment", package_is),
            lambda: broken,
            lambda: gpu_check.facts_stage("decode", facts(**row)),
            lambda: gpu_check.Stage("absent", [], 30, skip="no such tool"),
        ]

    monkeypatch.setattr(gpu_check, "stages", stages)
    device = facts(platform="gpu", device="NVIDIA H200", capability="9.0")
    monkeypatch.setattr(gpu_check, "DEVICE", device)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 1
    record = json.loads(out.read_text())
    statuses = {stage["stage"]: stage["status"] for stage in record["stages"]}
    assert statuses == {
        "device": "passed", "environment": "passed", "broken": "failed", "decode": "passed",
        "absent": "skipped",
    }  # fmt: skip
    told = ["broken: exit status 3", "decode: target missed: decode  10.0 µs"]
    if "elsewhere" in package:
        told.append(f"measured was {ROOT / package}, not what the build stage made")
    assert [failure.split("  [")[0] for failure in record["failures"]] == told


def test_a_test_run_without_passed_tests_fails(modules):
    tests_were_run = modules("gpu_check").tests_were_run
    assert tests_were_run("176 skipped in 3.27s") == "no test has run"
    assert tests_were_run("175 passed, 1 skipped in 227.52s") is None


def test_all_stages_but_the_sanitizers_can_use_their_budgets_in_nine_minutes(modules):
    gpu_check = modules("gpu_check")
    assert gpu_check.LIMIT_S < 540
    stages = [make() for make in gpu_check.stages(dry=False, capability="9.0")]
    names = [stage.name for stage in stages]
    assert names[-3:] == ["memcheck", "racecheck", "initcheck"]
    assert sum(stage.budget_s for stage in stages[:-3]) + 15 < gpu_check.LIMIT_S  # 15: device
    suites = [part for part in stages[3].command if part.endswith(".py")]
    assert {"tests/test_attention.py", "tests/test_write_kv.py"} <= set(suites)
    build = stages[0]
    assert build.env == {"JAX_PAGED_CUDA": "on", "JAX_PAGED_CUDA_ARCHS": "90-real"}
    assert build.command[-3:-1] == ["--target", str(gpu_check.SITE)]


def test_targets_are_judged_on_an_h200_only(modules):
    report = modules("gpu_report")
    row = {"kind": "decode", "percent_of_copy": 84.9, "target": ["percent_of_copy", "min", 85]}
    assert report.verdict(row, "NVIDIA H200", dry=False) == "MISSED"
    assert report.verdict(row | {"percent_of_copy": 85}, "NVIDIA H200", dry=False) == "met"
    assert report.verdict(row | {"percent_of_copy": None}, "NVIDIA H200", dry=False) == "MISSED"
    assert report.verdict(row, "NVIDIA A100", dry=False).startswith("not judged")
    assert report.verdict(row, "NVIDIA H200", dry=True) == "dry"
    fast = {"us": 9.1, "target": ["us", "max", 9]}
    assert report.verdict(fast, "NVIDIA H200", dry=False) == "MISSED"
    assert report.verdict(fast | {"us": 9.0}, "NVIDIA H200", dry=False) == "met"


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
    assert rows == [
        {"kind": "a", "error": "ZeroDivisionError: line one line two"},
        {"kind": "b", "us": 1.0},
        {"kind": "c", "error": "TimeoutError: no time was left in the stage's budget"},
    ]
