# SPDX-License-Identifier: Apache-2.0
"""The studies in examples/: each runs at a small size, and shows what it must show there."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from jax_paged.models import Decoder, create_state, evaluate, load_checkpoint, split_model
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config
from jax_paged.testing import pool_sized_ops

STUDIES = Path(__file__).parents[2] / "examples" / "studies"
CHAT = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
TEXT = "the sea rises twice a day and falls twice a day; the clock is slow. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny checkpoint, whose context holds the worked examples, and whose chats all turns."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    for name, changes in (
        ("config.json", {"max_position_embeddings": 1024}),
        ("tokenizer_config.json", {"chat_template": CHAT}),
    ):
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(known | changes))
    return folder


@pytest.fixture(scope="module")
def study():
    """Imports a script as Python finds it when it is run."""
    sys.path.insert(0, str(STUDIES))
    yield importlib.import_module
    sys.path.remove(str(STUDIES))


@pytest.fixture
def run(study, checkpoint, tmp_path, capsys):
    """Runs a study on the tiny checkpoint: (its rows, what it prints); a plot where it can."""
    (tmp_path / "text.txt").write_text(TEXT * 2)

    def call(name, *arguments, text=True):
        plot = tmp_path / "plot.svg"
        given = ["--model", str(checkpoint), *arguments]
        given += ["--text", str(tmp_path / "text.txt")] if text else []
        can_plot = importlib.util.find_spec("matplotlib") is not None
        rows = study(name).main([*given, *(["--plot", str(plot)] if can_plot else [])])
        printed = capsys.readouterr().out
        table = [line for line in printed.splitlines() if line.startswith("|")]
        assert len(table) >= 3
        assert len({line.count("|") for line in table}) == 1
        if can_plot:
            assert "<svg" in plot.read_text()
        return rows, printed

    return call


def test_quantization_costs_more_with_fewer_bits(run):
    rows, printed = run("quantization", "--tokens", "60", "--groups", "16", "--dtypes", "int8")
    assert [(row["weights"], row["K and V"]) for row in rows] == [
        ("float32", "float32"), ("float32", "int8"), ("int8", "float32"), ("int8", "int8"),
        ("int4, groups of 16", "float32"),
    ]  # fmt: skip
    off = [abs(row["nll"] - rows[0]["nll"]) for row in rows]
    assert 0 < off[2] < off[-1] < 0.5, "int8 is nearer than int4"
    assert "| int4, groups of 16 | float32 |" in printed


def test_int4_weights_lie_on_a_grid_of_fifteen_and_near_where_they_were(study):
    weight = np.random.default_rng(0).standard_normal((6, 32)).astype("f4")
    weight[0, :16] = 0
    asked = []

    def source(*names, axis=0, dtype=None):
        asked.append((names, axis, dtype))
        return jnp.asarray(weight)

    rounded = study("quantization").int4_source(source, 16)
    got = np.asarray(rounded("a.q_proj.weight", "a.k_proj.weight", axis=0, dtype=jnp.float32))
    assert asked == [(("a.q_proj.weight", "a.k_proj.weight"), 0, jnp.float32)]
    step = np.abs(weight.reshape(6, 2, 16)).max(-1, keepdims=True) / 7
    assert (np.abs(got - weight).reshape(6, 2, 16) <= step / 2 * 1.0001).all()
    codes = got.reshape(6, 2, 16) / np.where(step == 0, 1, step)
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-5)
    assert np.abs(codes).max() <= 7.0001
    np.testing.assert_array_equal(rounded("model.norm.weight"), weight)
    with pytest.raises(ValueError, match="group: expected a divisor of 32 inputs, got 5"):
        study("quantization").int4_source(source, 5)("a.q_proj.weight")


def test_a_window_of_the_whole_text_costs_nothing_and_a_small_one_does(run):
    arguments = ("--tokens", "60", "--windows", "8", "60", "--pins", "0", "2")
    rows, _ = run("windows", *arguments)
    assert [(row["window"], row["pins"]) for row in rows] == [
        ("none", 0), (8, 0), (60, 0), (8, 2), (60, 2),
    ]  # fmt: skip
    costs = [row["× full"] for row in rows]
    assert costs[2] == pytest.approx(1, abs=1e-5)
    assert costs[4] == pytest.approx(1, abs=1e-5)
    assert all(abs(cost - 1) > 1e-3 for cost in (costs[1], costs[3]))


@pytest.mark.parametrize(
    "way", ["look-up, 8", pytest.param("draft model, tree of 8", marks=pytest.mark.deep)]
)
def test_drafts_change_how_many_steps_it_takes_and_no_token(way, run, tmp_path):
    (tmp_path / "prompts.txt").write_text("abcabcabcabc\nthe sea")
    ways = ("none", way)
    arguments = ("--prompts", str(tmp_path / "prompts.txt"), "--new-tokens", "24")
    rows, _ = run("drafts", *arguments, "--ways", *ways, text=False)
    assert [row["drafts"] for row in rows] == [*ways]
    assert rows[0]["tokens a step"] == 1
    assert {(row["new tokens"], row["answers as without"]) for row in rows} == {(48, 2)}
    assert rows[1]["drafted"] > 0
    assert rows[1]["tokens a step"] == 48 / (48 - rows[1]["accepted"])
    assert way == "look-up, 8" or rows[1]["tokens a step"] > 1.5, "int8 mostly chooses as f32"


def test_a_budget_of_all_pages_loses_nothing_and_a_small_one_does(run, checkpoint):
    arguments = ("--tokens", "60", "--page-size", "4", "--budgets", "4", "15")
    rows, _ = run("eviction", *arguments)
    names = ["newest", "first and newest", "mass", "mass by layer"]
    assert [(row["kept"], row["pages"]) for row in rows] == [
        ("all pages", 15), *((name, pages) for name in names for pages in (4, 15)),
    ]  # fmt: skip
    for row in rows:
        if row["pages"] == 15:
            assert row["perplexity"] == rows[0]["perplexity"]
            assert row["same guess"] == 1
        else:
            assert abs(row["× all"] - 1) > 1e-3
    model, _, tokenizer = load_checkpoint(checkpoint)
    whole = evaluate(model, tokenizer.encode(TEXT * 2)[:60])["perplexity"]
    assert rows[0]["perplexity"] == pytest.approx(whole, rel=1e-4)


def test_the_eviction_study_copies_the_pool_once_and_not_in_each_layer(study):
    """The mass of a layer is read before the next layer writes."""
    config = small_config("llama", num_hidden_layers=3)
    model = Decoder(config, random_source(config))
    state = create_state(model, num_pages=64, max_seqs=4, pages_per_seq=16, page_size=4)
    rule = study("eviction_rules").Rule(*(jnp.full(4, x) for x in (8, 0, 4, False)))
    program = study("eviction").read.lower(*split_model(model), state, jnp.arange(50), rule)
    copies = pool_sized_ops(program.compile(), state.k_pages)
    assert len(copies) <= 2, "K and V at the start, which the caller keeps"


def test_a_rule_keeps_the_first_the_newest_and_the_heaviest_pages_and_none_again(study):
    rules = study("eviction_rules")
    mass = np.array([[[5, 1, 9, 2, 4, 0, 0], [5, 1, -np.inf, 2, 4, 0, 0]]], "f4")
    mass = np.concatenate([mass, mass[..., ::-1]])  # two layers, two rows, seven pages
    mass[1, :, :2] = 0  # pages 5 and 6 of the other are not written yet
    mass[1, 1, 2:5] = [4, 2, -np.inf]
    mass[1, 1, 2] = -np.inf

    def kept(budget, first, newest, by_layer=True):
        rule = rules.Rule(*(jnp.full(2, x) for x in (budget, first, newest, by_layer)))
        found = rules.keep(jnp.asarray(mass), jnp.array([5, 5]), rule)
        return [[np.flatnonzero(row).tolist() for row in layer] for layer in found]

    assert kept(2, 0, 2) == [[[4, 5], [4, 5]]] * 2, "the newest alone"
    assert kept(3, 1, 2) == [[[0, 4, 5], [0, 4, 5]]] * 2, "the first, too"
    assert kept(3, 0, 1)[0] == [[0, 2, 5], [0, 4, 5]], "the heaviest that are left"
    assert kept(7, 0, 1)[0] == [[0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5]], "none that is forgotten"
    alike = kept(3, 0, 1, by_layer=False)
    assert alike[0] == alike[1], "all layers keep the same pages"


def test_votes_are_counted_and_prompts_are_found_in_the_cache(run):
    arguments = ("--count", "2", "--samples", "4", "--new-tokens", "6")
    rows, printed = run("voting", *arguments, text=False)
    *votes, cached = rows
    assert [row["votes"] for row in votes] == [1, 2, 4]
    assert all(0 <= row["right"] <= 1 for row in votes)
    assert cached["cached"] > 0.75, "all but the first answer find their prompt"
    assert re.search(r"^\d+ of \d+ prompt tokens found in the cache, 0\.\d+$", printed, re.M)


def test_a_vote_takes_the_number_that_an_answer_gives(study):
    voting = study("voting")
    assert voting.number_in("There are 3 and 4, so 3 + 4 = 7. The answer is 7. Next: 9") == 7
    assert voting.number_in("The answer is: $12.") == 12
    assert voting.number_in("3 and then 5") == 5
    assert voting.number_in("none") is None
    assert voting.vote([None, 3, 5, 5, None, None]) == 5
    assert voting.vote([4, 3]) == 4
    assert voting.vote([None]) is None


def test_the_questions_are_answered_rightly_by_their_worked_examples(study):
    data = json.loads((STUDIES / "data" / "questions.json").read_text("utf-8"))
    for question, answer in data["examples"]:
        last = study("voting").number_in(answer)
        equation = re.findall(r"= (\d+)", answer)[-1]
        assert last == int(equation), question
    assert len(data["questions"]) == len({question for question, _ in data["questions"]}) == 16


def test_a_plot_without_matplotlib_says_how_to_get_it(study, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        study("windows").main(["--plot", "x.svg"])
    assert "pip install 'jax_paged[plot]'" in capsys.readouterr().err
