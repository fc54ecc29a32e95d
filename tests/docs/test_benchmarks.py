# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in dry mode: each runs, in one form, and the documents come from their files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
NAMES = sorted(path.stem.removeprefix("bench_") for path in SCRIPTS.glob("bench_*.py"))
NUMBER = (int, float)


@pytest.fixture
def documents(monkeypatch):
    """The module that writes tables."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import documents

    return documents


def run_all(*arguments):
    command = [sys.executable, SCRIPTS / "run_all.py", "--dry", "--no-peers", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """What one dry run of everything leaves."""
    folder = tmp_path_factory.mktemp("dry")
    run = run_all("--out", folder)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return folder


def test_every_benchmark_is_run(documents):
    assert sorted(documents.TITLES) == NAMES


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_one_form(dry, name):
    record = json.loads((dry / "results" / f"{name}.json").read_text())
    environment = record["environment"]
    assert all(environment[key] for key in ("device", "cpu", "threads", "isa", "jax", "date"))
    assert "commit" in environment  # empty in a copy
    assert record["rows"]
    for row in record["rows"]:
        assert all(isinstance(row[key], str) for key in ("kind", "case", "size", "dtype"))
        ours, *peers = row["ms"]
        assert ours == "native"
        assert list(row["ratio"]) == peers
        for median, p10, p90 in row["ms"].values():
            assert 0 < p10 <= median <= p90
        for peer, ratio in row["ratio"].items():
            assert ratio == pytest.approx(row["ms"][peer][0] / row["ms"]["native"][0])
        assert ("rate" in row) == ("unit" in row)
        if "limit" in row:
            assert row["percent_of_limit"] == pytest.approx(100 * row["rate"] / row["limit"])


@pytest.mark.deep
def test_the_model_s_rows_are_decode_and_prefill_in_three_dtypes(dry):
    rows = json.loads((dry / "results" / "model.json").read_text())["rows"]
    assert {(row["kind"], row["dtype"]) for row in rows} == {
        (kind, dtype) for kind in ("decode", "prefill") for dtype in ("float32", "bfloat16", "int8")
    }
    assert all("limit" in row for row in rows if row["kind"] == "decode")


@pytest.mark.deep
def test_all_that_may_grow_is_measured(dry):
    rows = json.loads((dry / "results" / "growth.json").read_text())["rows"]
    assert {row["kind"] for row in rows} == {"context", "batch", "pool", "layers", "compile"}


@pytest.mark.deep
def test_documents_hold_the_rows_and_nothing_else_changes(dry, documents):
    blocks = {}
    for file in documents.FILES:
        before = (ROOT / file).read_text(encoding="utf-8")
        after = (dry / file).read_text(encoding="utf-8")
        for text in ("<!-- measured -->\n", "<!-- end -->"):
            assert after.count(text) == before.count(text) == 1
        assert after.split("<!-- measured -->")[0] == before.split("<!-- measured -->")[0]
        assert after.split("<!-- end -->")[1] == before.split("<!-- end -->")[1]
        blocks[file] = after.split("<!-- measured -->")[1].split("<!-- end -->")[0]
    assert "Not measured yet" not in blocks["docs/performance.md"]
    for name in NAMES:
        record = json.loads((dry / "results" / f"{name}.json").read_text())
        for row in record["rows"]:
            assert f"| {row['size']} | {row['dtype']} |" in blocks["docs/performance.md"]
        assert record["environment"]["jax"] in blocks["docs/performance.md"]
    for pick in documents.PICKS:  # a dry run has tiny sizes: README must not take them for others
        assert pick.title in blocks["README.md"].split("Not measured yet: ")[1]


def test_readme_has_six_measured_rows(documents):
    results = documents.load(documents.harness.RESULTS)
    text = documents.summary(results, ["plot.svg"])
    assert text.count("Measured on ") == text.count(" threads, ") == 1, "the processor, once"
    assert text.count("](plot.svg)") == 1
    lines = text.split("| --- | --- | --- |\n")[1].splitlines()
    assert len(lines) == len(documents.PICKS) == 6
    for pick, line in zip(documents.PICKS, lines, strict=True):
        assert pick.title in line
        for row in pick.rows(results):
            assert all(number in pick.title for number in re.findall(r"\d+", row["size"]))
            assert f"{row['rate']:.1f}" in line or f"{row['ms']['native'][0]:.2f} ms" in line
            for peer in pick.peers or row["ratio"]:
                assert f"{row['ratio'][peer]:.2f}×" in line


def test_a_row_of_readme_that_is_not_measured_is_named(documents):
    results = documents.load(documents.harness.RESULTS)
    served = results.pop("serving")
    text = documents.summary(results, [])
    assert text.endswith(f"Not measured yet: {documents.PICKS[-1].title}.")
    assert documents.PICKS[0].title in text
    other = served | {"environment": served["environment"] | {"cpu": "another processor"}}
    text = documents.summary(results | {"serving": other}, [])
    assert all(name in text for name in ("(Zen 4)", "another processor")), "both are named"


def test_the_documents_are_what_the_result_files_give(documents, tmp_path, monkeypatch):
    """No figure in them is typed, and none is older than its file."""
    results = documents.load(documents.harness.RESULTS)
    assert results
    drawn = ["peers.svg", "attention.svg", "model.svg", "growth.svg"]
    monkeypatch.setattr(documents, "draw", lambda found, folder: drawn)
    (tmp_path / "docs").mkdir()
    for file in documents.FILES:
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    documents.write(documents.harness.RESULTS, tmp_path)
    for file in documents.FILES:
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes(), file


def test_tasks_of_lm_eval_are_a_table_of_both_sides(documents, tmp_path):
    path = tmp_path / "lm_eval.json"
    assert documents.beside_hf(path) == "Not measured yet: `lm_eval_peers.py`."
    environment = json.loads((documents.harness.RESULTS / "model.json").read_text())["environment"]
    versions = {"lm_eval": "0.4.13", "torch": "2.13.0", "transformers": "5.23.0"}
    row = {
        "task": "facts", "kind": "multiple choice", "documents": 117, "ratio": 3.0,
        "seconds": {"jax_paged": 2.0, "hf": 6.0}, "hf_batch_size": 16, "largest_difference": 2e-5,
    }  # fmt: skip
    path.write_text(json.dumps({"environment": environment | versions, "rows": [row]}))
    text = documents.beside_hf(path)
    expected = "| 117 | 2.00 s | 6.00 s, batch size 16 | 3.00× | 2e-05 |"
    assert text.endswith(f"| multiple choice (`facts`) {expected}")
    assert all(version in text for version in versions.values())


def test_perplexities_are_a_table_beside_llama_cpp(documents, tmp_path):
    path = tmp_path / "llama_perplexity.json"
    assert documents.beside_llama(path) == "Not measured yet: `llama_perplexity.py`."
    environment = json.loads((documents.harness.RESULTS / "model.json").read_text())["environment"]
    row = {"what": "4 bits", "perplexity": 31.5, "of_llama_cpp": 0.99876, "seconds": 2.0}
    path.write_text(json.dumps({"environment": environment, "pieces": 3, "rows": [row]}))
    text = documents.beside_llama(path)
    assert "3 pieces of 512 tokens" in text
    assert text.endswith("| 4 bits | 31.500 | 0.9988× |")


def test_plots_are_the_same_from_the_same_figures(documents, tmp_path):
    pytest.importorskip("matplotlib")
    results = documents.load(documents.harness.RESULTS)
    for folder in ("a", "b"):
        drawn = documents.draw(results, tmp_path / folder)
        assert drawn == ["peers.svg", "attention.svg", "model.svg", "growth.svg"]
    for name in drawn:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.deep
def test_growth_is_drawn(dry, documents, tmp_path):
    pytest.importorskip("matplotlib")
    made = documents.draw(documents.load(dry / "results"), tmp_path)
    assert made == ["attention.svg", "model.svg", "growth.svg"]
    for text in ("tokens of context", "free pages beside"):
        assert text in (tmp_path / "growth.svg").read_text()


def test_what_was_skipped_or_not_measured_is_said(documents):
    record = {
        "environment": {"cpu": "X", "isa": "avx2", "jax": "1", "commit": "c", "date": "d"},
        "rows": [
            {"kind": "merge", "case": "a", "size": "3", "dtype": "float32", "ratio": {},
             "ms": {"native": [0.5, 0.4, 0.6]}}
        ],
        "skipped": {"torch": "not installed: pip install torch"},
    }  # fmt: skip
    titles = {"merge": "Merging", "growth": "Growth"}
    text = documents.sections({"merge": record}, titles, [])
    assert "torch: not installed: pip install torch." in text
    assert "| merge | a | 3 | float32 | 0.500 |" in text
    assert text.endswith("Not measured yet: `bench_growth.py`.")


ROW = {"kind": "prefill", "case": "a", "size": "3", "dtype": "float32"}


def misses_of(row, benchmark="model", isa="avx512"):
    import goals

    result = {"environment": {"isa": isa}, "rows": [ROW | row]}
    return [str(miss) for miss in goals.misses({benchmark: result})]


@pytest.mark.usefixtures("documents")
def test_a_row_is_to_be_as_fast_as_each_peer_and_reach_what_is_asked_of_it():
    ratio = {"transformers": 1.9, "llama": 0.99, "plain": 0.5}
    assert misses_of({"ratio": ratio}) == [
        "model: prefill, a, 3, float32: 1.90×, the goal is 2× transformers",
        "model: prefill, a, 3, float32: 0.99×, the goal is 1× llama",
    ]
    assert misses_of({"ratio": {"transformers": 1.6}}, isa="avx2") == []
    assert misses_of({"ratio": {"transformers": 1.5}}, isa="avx2") == [
        "model: prefill, a, 3, float32, avx2: 1.50×, the goal is 1.6× transformers"
    ]
    assert misses_of({"ratio": {"transformers": 2.0, "llama": 1.0}}) == []
    decode = {"kind": "decode", "size": "batch 1", "ratio": {}}
    assert misses_of(decode | {"percent_of_limit": 80.0}) == []
    missed = misses_of(decode | {"percent_of_limit": 79.9})
    assert missed == ["model: decode, a, batch 1, float32: 79.90 %, the goal is 80 % of the limit"]


def test_proofs_of_goals_out_of_reach_stand_where_they_say_and_are_few(documents):
    import goals

    assert len(goals.EXCEPTIONS) <= 5
    for exempt in goals.EXCEPTIONS:
        file, _, heading = exempt.proof.partition("#")
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / file).read_text(), re.M)
        assert heading in [title.lower().replace(" ", "-") for title in titles]


def test_every_goal_is_one_of_a_row_that_is_measured(documents):
    import goals

    rows = [
        (name, result["environment"]["isa"], row)
        for results in documents.load_all(documents.harness.RESULTS)
        for name, result in results.items()
        for row in result["rows"]
    ]
    for goal in goals.GOALS:
        found = [row for name, isa, row in rows if goal.concerns(name, isa, row)]
        assert any(goal.reached(row) is not None for row in found), goal


def test_check_ends_with_1_where_a_row_misses_without_a_proof(documents, monkeypatch, capsys):
    import run_all as module

    result = {"environment": {"isa": "avx512"}, "rows": [ROW | {"ratio": {"torch": 0.5}}]}
    monkeypatch.setattr(module.documents, "load_all", lambda results: [{"model": result}])
    monkeypatch.setattr(module.sys, "argv", ["run_all.py", "--check"])
    with pytest.raises(SystemExit, match="1 rows miss a goal"):
        module.main()
    assert "0.50×, the goal is 1× torch" in capsys.readouterr().out
    result["rows"] = [ROW | {"ratio": {"torch": 1.5}}]
    module.main()


def test_a_benchmark_that_fails_is_told(documents, monkeypatch, tmp_path, capfd):
    import run_all as module

    monkeypatch.setattr(module.documents, "write", lambda results, root: None)
    monkeypatch.setattr(module.sys, "executable", "false")
    monkeypatch.setattr(module.sys, "argv", ["run_all.py", "--dry", "--only", "merge"])
    with pytest.raises(SystemExit, match="failed: merge"):
        module.main()
    assert "merge: FAILED (1)" in capfd.readouterr().out


def a_run(ms, ratio, case="a", skipped=()):
    row = {"kind": "merge", "case": case, "size": "3", "dtype": "float32", "weight_dtype": None}
    row |= {"ms": {"native": [ms, ms - 1, ms + 1]}, "rate": 1 / ms, "ratio": {"XLA": ratio}}
    environment = {"cpu": "X", "isa": "avx2", "jax": "1", "commit": "c", "date": "d"}
    return {"environment": environment, "rows": [row], "skipped": dict(skipped)}


def test_of_several_runs_the_median_of_each_figure_counts(documents):
    runs = [a_run(4.0, 0.9), a_run(2.0, 1.5), a_run(8.0, 1.2)]
    found = documents.harness.of_runs(runs)
    (row,) = found["rows"]
    assert row["ms"] == {"native": [4.0, 3.0, 5.0]}
    assert (row["ratio"], row["rate"], row["weight_dtype"]) == ({"XLA": 1.2}, 0.25, None)
    assert documents.where(found).startswith("3 runs by turns on X,")
    assert documents.harness.of_runs(runs[:1]) == runs[0]
    assert documents.where(runs[0]).startswith("One run on X,")


@pytest.mark.parametrize("other", [{"case": "b"}, {"skipped": [("torch", "not installed")]}])
def test_runs_of_different_rows_are_not_mixed(documents, other):
    with pytest.raises(ValueError, match="the runs "):
        documents.harness.of_runs([a_run(4.0, 1.0), a_run(4.0, 1.0, **other)])


def test_several_runs_take_turns_and_one_that_fails_leaves_those_before_it(
    documents, monkeypatch, tmp_path
):
    import run_all as module

    seen = []

    def run(name, target, flags, environment):
        seen.append((name, environment.get("JAX_PAGED_CPU_ISA")))
        documents.harness.write_result(a_run(float(len(seen)), 1.0), target)
        return seen.count(seen[-1]) < 2 or name != "model"

    monkeypatch.setattr(module, "run", run)
    assert module.run_some(["merge", "model"], tmp_path, [], "avx2", 3) == ["model"]
    turns = ["merge", "model", "merge", "model", "merge"]
    assert seen == [(name, "avx2") for name in turns]
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: x["environment"].get("runs") for name, x in files.items()} == {
        "merge": 3, "model": None,
    }  # fmt: skip
    shortest = {name: x["rows"][0]["ms"]["native"][0] for name, x in files.items()}
    assert shortest == {"merge": 3.0, "model": 2.0}
