# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark on a tiny model: its trace, its figures, its command."""

import json
import re

import numpy as np
import pytest
from opened import Opened

from jax_paged.models import Decoder, cli
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving import bench_serve
from jax_paged.models.serving.bench_serve import Arrival, Replay, make_trace, replay
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import small_config

CONFIG = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
TRACE = {
    "vocab_size": 64, "context_length": 64, "requests": 200, "rate": 50.0, "prefixes": 3,
    "prefix_tokens": 16, "prompt_tokens": 6, "new_tokens": 5,
}  # fmt: skip
SMALL = ["--requests", "6", "--rate", "0", "--prefixes", "1", "--prefix-tokens", "32",
         "--prompt-tokens", "4", "--new-tokens", "5", "--max-seqs", "2",
         "--max-tokens", "16"]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


@pytest.fixture
def run(model, capsys, monkeypatch):
    monkeypatch.setattr(bench_serve, "load_checkpoint", lambda *_, **__: (model, CONFIG, None))
    monkeypatch.setattr(bench_serve, "open_checkpoint", lambda *_, **__: Opened(model))

    def call(*arguments):
        code = cli.main(["bench-serve", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err.removeprefix(Opened.title + "\n")

    return call


def test_a_trace_is_made_of_shared_prefixes_and_random_gaps():
    trace = make_trace(**TRACE, seed=1)
    assert trace == make_trace(**TRACE, seed=1)
    assert trace != make_trace(**TRACE, seed=2)
    assert len({tuple(a.prompt[:16]) for a in trace}) == 3
    assert all(17 <= len(a.prompt) <= 59 and a.new_tokens == 5 for a in trace)
    gaps = np.diff([a.seconds for a in trace])
    assert trace[0].seconds == 0
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.3)


def test_a_trace_without_rate_or_prefixes_comes_at_once_and_may_repeat():
    trace = make_trace(**(TRACE | {"rate": 0.0, "prefixes": 0, "prompt_tokens": 3}), repeat=2)
    assert {a.seconds for a in trace} == {0.0}
    for arrival in trace:
        half = len(arrival.prompt) // 2
        assert len(arrival.prompt) == 59 or arrival.prompt[:half] == arrival.prompt[half:]


def test_times_are_those_of_the_callbacks(model):
    """With a clock that each look moves on by a second, and nothing else to wait for."""
    engine = Engine(model, num_pages=16, max_seqs=2, page_size=4, max_tokens=16)
    time, slept = [0.0], []

    def clock():
        time[0] += 1.0
        return time[0]

    def sleep(seconds):
        slept.append(seconds)
        time[0] += seconds

    trace = [Arrival(0.0, [1, 2], 3), Arrival(1000.0, [3], 2), Arrival(1000.0, [1] * 65, 9)]
    seen = replay(engine, trace, clock=clock, sleep=sleep)
    assert [len(times) for times in seen.token_times] == [3, 2, 0]
    assert seen.requests[2].reason == "refused"
    assert len(slept) == 1
    assert 900 < slept[0] < 1000
    assert seen.token_times[0][-1] < 100
    assert seen.token_times[1][0] > 1000
    assert seen.token_times[0] == sorted(seen.token_times[0])
    assert max(running for _, running, _ in seen.steps) == 1


def test_figures_follow_from_the_times():
    class Done:
        reason, prompt = "length", [0] * 7

    seen = Replay(
        arrivals=[0.0, 1.0], token_times=[[0.5, 0.6, 0.8], [3.0]], requests=[Done, Done],
        steps=[(0.1, 1, 4), (0.2, 2, 9)], seconds=4.0,
    )  # fmt: skip
    figures = seen.summary()
    assert figures["new_tokens_per_s"] == 1.0
    assert figures["prompt_tokens"] == 14
    assert figures["first_token_ms"]["p50"] == pytest.approx(1250)
    assert figures["inter_token_ms"]["p50"] == pytest.approx(150)
    assert figures["inter_token_ms"]["p90"] == pytest.approx(190)
    assert figures["peak_pages"] == 9


def test_the_command_prints_all_figures(run, tmp_path):
    code, out, _ = run(*SMALL)
    assert code == 0
    assert re.search(r"requests: 6 in \d+\.\d\d s, 0 refused\n", out)
    assert re.search(r"throughput: .* \(30 new, \d+ prompt tokens, \d+ steps\)\n", out)
    for line in ("time to first token: ", "inter-token latency: ", "pages: ", "prefix cache: "):
        assert line in out
    assert float(re.search(r"prefix cache: (.*) % of", out)[1]) > 30


def test_refused_requests_are_told_with_the_reason(run):
    code, out, err = run(*SMALL, "--pages", "1")
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"jax-paged: error: all 6 requests were refused: \d+ prompt and 5 new tokens need "
        r"\d pages, a request can have 1\n", err,
    )  # fmt: skip
    some = [*SMALL, "--prompt-tokens", "12", "--prefixes", "0", "--pages", "1", "--seed", "1"]
    code, out, err = run(*some)
    refused = int(re.search(r", (\d) refused", out)[1])
    assert (code, 0 < refused < 6) == (0, True)
    assert err.startswith(f"{refused} of 6 requests were refused, the first one: ")
    assert "need 2 pages, a request can have 1" in err


def test_the_options_of_the_model_reach_the_loader(model, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        bench_serve, "open_checkpoint", lambda *_, **given: asked.update(given) or Opened(model)
    )
    options = ["--weight-dtype", "int8", "--context-length", "60"]
    assert cli.main(["bench-serve", *SMALL, *options]) == 0
    rest = dict.fromkeys(["path", "dtype", "base"])
    assert asked == rest | {"weight_dtype": "int8", "context_length": 60}


def test_one_by_one_is_the_same_trace_without_sharing(run):
    code, out, _ = run(*SMALL, "--one-by-one", "--json")
    assert code == 0
    figures = json.loads(out)
    assert (figures["new_tokens"], figures["hit_rate"], figures["refused"]) == (30, 0.0, 0)


def test_kv_dtype_and_swapping(run):
    _, out, _ = run(
        *SMALL, "--prefixes", "0", "--prompt-tokens", "12", "--new-tokens", "30", "--pages", "4",
        "--kv-dtype", "int8", "--swap-pages", "16", "--json",
    )  # fmt: skip
    figures = json.loads(out)
    assert (figures["kv_dtype"], figures["new_tokens"]) == ("int8", 180)
    assert figures["preemptions"] >= figures["swaps"] > 0


def test_a_draft_model_that_is_the_model_is_always_right(run):
    _, out, _ = run(*SMALL, "--drafts", "2", "--draft-model", "the same", "--json")
    figures = json.loads(out)
    assert figures["drafted"] == figures["accepted"] > 0


def test_drafts_and_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "load.png"
    _, out, _ = run(
        *SMALL, "--drafts", "4", "--draft-branches", "2", "--repeat", "3", "--plot", target
    )
    assert re.search(r"drafts: \d+ of \d+ accepted", out)
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "requests: expected an integer >= 1, got 0"),
        (["--rate", "-1"], "rate: expected a finite number >= 0, got -1.0"),
        (["--pages", "0"], "pages: expected an integer >= 1, got 0"),
        (["--draft-model", "x"], "max_drafts: expected at least 1 with a draft model, got 0"),
        (["--swap-pages", "0"], "swap-pages: expected an integer >= 1, got 0"),
        (["--drafts", "-1"], "drafts: expected an integer >= 0, got -1"),
        (["--new-tokens", "64"], "new-tokens: expected at most 63, got 64"),
    ],
)
def test_bad_options_are_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err == f"jax-paged: error: {message}\n"


def test_a_plot_without_matplotlib_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("--plot", "x.png")
    assert code == 2
    assert "pip install 'jax_paged[plot]'" in err


@pytest.mark.deep
def test_groups_have_a_prefix_cache_where_it_is_not_of_several_pools(model, monkeypatch, capsys):
    config = small_config("gemma3_text", vocab_size=64)
    for served in (model, Decoder(config, random_source(config))):
        monkeypatch.setattr(
            bench_serve, "open_checkpoint", lambda *_, one=served, **__: Opened(one)
        )
        assert cli.main(["bench-serve", *SMALL, "--groups", "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["new_tokens"], figures["refused"]) == (30, 0)
        assert (figures["hit_rate"] > 0) == (served is model)
