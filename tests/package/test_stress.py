# SPDX-License-Identifier: Apache-2.0
"""The stress command: each part runs, and what fails is told as its simplest case."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first_of

from jax_paged.native.load import CPU_ISAS
from jax_paged.testing.stress import engine, ops
from jax_paged.testing.stress.__main__ import main
from jax_paged.testing.stress.report import Report, Stop


@pytest.mark.parametrize(
    ("part", "cases"), first_of([("ops", 12), ("values", 8), ("engine", 1), ("state", 100)], 2)
)
def test_each_part_runs_and_counts_its_cases(part, cases, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine, "ROUND", 12)
    target = tmp_path / "report.json"
    arguments = ["--what", part, "--cases", str(cases), "--seed", "5", "--json", str(target)]
    assert main(arguments) == 0
    report = json.loads(target.read_text())
    assert report["failures"] == []
    assert sum(report["cases"].values()) >= cases
    assert "0 failures" in capsys.readouterr().out


def test_the_files_are_read_in_a_child_process():
    report, stop = Report(), Stop(5, cases=1)
    from jax_paged.testing.stress import files

    files.run(report, stop, seed=2)
    assert not report.failures
    assert sum(report.cases.values()) == files.CASES


def test_a_run_goes_on_where_another_one_ended():
    reports = [Report(), Report(), Report()]
    table = {"linear": ops.OPS["linear"], "write_kv": ops.OPS["write_kv"]}
    stop = Stop(5, cases=6)
    ops.run(reports[0], stop, 3, ops=table)
    assert stop.following == 3
    ops.run(reports[1], Stop(5, cases=4), 3, ops=table, begin=stop.following)
    ops.run(reports[2], Stop(5, cases=10), 3, ops=table)
    both = {op: reports[0].options[op] + reports[1].options[op] for op in table}
    assert both == reports[2].options


def test_ctrl_c_tells_what_there_is(monkeypatch, capsys, tmp_path):
    calls = []

    def interrupted(row, seed, implementation):
        calls.append(row)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return 0.25

    planted = dataclasses.replace(ops.OPS["linear"], run=interrupted)
    monkeypatch.setattr(ops, "OPS", {"linear": planted})
    target = tmp_path / "report.json"
    assert main(["--what", "ops", "--what", "values", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "ops: 7 done (go on with --begin 3), 0 failures" in out
    assert "ops: interrupted" in out
    assert json.loads(target.read_text())["cases"] == {"linear": 6}


def wrong_from_5_rows_on(row, seed, implementation):
    if row["rows"] >= 5 and row["kind"] == "int8":
        raise AssertionError("planted")
    return 0.5


def test_a_failure_is_told_as_its_simplest_case_that_can_be_repeated(monkeypatch, capsys):
    planted = dataclasses.replace(ops.OPS["linear"], run=wrong_from_5_rows_on)
    monkeypatch.setattr(ops, "OPS", {"linear": planted})
    report = Report()
    ops.run(report, Stop(5, cases=400), 1, ops=ops.OPS)
    assert report.is_hopeless
    simplest = {"dtype": "float32", "shape": (8, 1), "kind": "int8"}
    for text in report.failures:
        shown = text.splitlines()
        assert "AssertionError: planted" in shown[0]
        assert all(f"{name!r}: {value!r}" in shown[0] for name, value in simplest.items())
        case = shown[1].split("--case ")[1].strip("'")
        assert main(["--case", case]) == 1
    assert "planted" in capsys.readouterr().out
    assert report.worst["linear"][0] == 0.5


def test_the_instruction_sets_have_the_names_that_the_module_knows():
    sources = Path(__file__).parents[2].glob("ffi/cpu/attention/inst/*.cc")
    assert {source.stem for source in sources} == {*CPU_ISAS}


def test_the_instruction_set_can_be_chosen():
    command = [sys.executable, "-P", "-m", "jax_paged.testing.stress", "--isa", "generic"]
    command += ["--what", "ops", "--cases", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "'isa': 'generic'" in run.stdout


def test_the_emulator_needs_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("support")])
    with pytest.raises(SystemExit, match="start this in its root"):
        ops.bring_emulator()
