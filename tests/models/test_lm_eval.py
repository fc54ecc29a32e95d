# SPDX-License-Identifier: Apache-2.0
"""JaxPagedLM in lm-eval's harness: its requests get what our own functions give, without torch."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

from jax_paged.models import generate, load_checkpoint, loglikelihoods, rolling_loglikelihoods

TASKS = Path(__file__).parents[2] / "examples" / "lm_eval"

if importlib.util.find_spec("lm_eval") is None:
    reason = "lm_eval is not installed: pip install 'jax_paged[lm-eval]'"
    if os.environ.get("JAX_PAGED_REQUIRE_LM_EVAL") == "1":
        raise ImportError(f"JAX_PAGED_REQUIRE_LM_EVAL=1, but {reason}")
    pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the harness's packages warn of at import is not ours
    from lm_eval.api.instance import Instance

    from jax_paged.models.evaluation.lm_eval import JaxPagedLM

# A process in which torch seems not to be installed.
WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "transformers", "tensorflow")
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_checkpoint(folder)


@pytest.fixture
def lm(loaded):
    model, _, tokenizer = loaded
    return JaxPagedLM(model=model, tokenizer=tokenizer, chunk=16, max_seqs=4, max_gen_toks=12)


def requests(kind: str, *arguments: tuple) -> list:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]  # pyright: ignore


def test_log_likelihoods_are_those_of_our_function(lm, loaded):
    pairs = [("a question", " yes"), ("a question", " no"), ("a question ", "no"), ("b", "c" * 30)]
    got = lm.loglikelihood(requests("loglikelihood", *pairs, ("", "alone")), disable_tqdm=True)
    encode = loaded[2].encode
    ids = [(encode(a.rstrip()), encode(a[len(a.rstrip()) :] + b)) for a, b in pairs]
    want = loglikelihoods(loaded[0], [*ids, ([256], encode("alone"))])
    np.testing.assert_allclose([x[0] for x in got], [x.log_p for x in want], rtol=1e-5)
    assert [x[1] for x in got] == [x.is_greedy for x in want]
    assert got[1] == got[2]


def test_an_empty_context_is_the_end_token_here_and_the_start_token_where_there_is_one(loaded):
    model, _, tokenizer = loaded
    lm = JaxPagedLM(model=model, tokenizer=tokenizer)
    assert (lm.eot_token_id, lm.prefix_token_id) == (256, 256)
    assert JaxPagedLM(model=model, tokenizer=tokenizer, prefix_token_id=7).prefix_token_id == 7


def test_rolling_is_that_of_our_function(lm, loaded):
    texts = ["short", "long " * 40, "x"]
    got = lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", *((text,) for text in texts)), disable_tqdm=True
    )
    ids = [loaded[2].encode(text) for text in texts]
    want = rolling_loglikelihoods(loaded[0], ids, prefix_token=256)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_context_length_is_that_of_the_checkpoint(folder):
    assert JaxPagedLM(str(folder), context_length=8).max_length == 8


def test_a_smaller_max_length_is_a_smaller_context(loaded):
    model, _, tokenizer = loaded
    lm = JaxPagedLM(model=model, tokenizer=tokenizer, max_length=8, chunk=16)
    text = "a text of more than eight bytes"
    (got,) = lm.loglikelihood_rolling(requests("x", (text,)), disable_tqdm=True)
    (want,) = rolling_loglikelihoods(model, [tokenizer.encode(text)], prefix_token=256, context=8)
    assert got == pytest.approx(want, rel=1e-5)


def test_text_is_that_of_generate_up_to_a_stop_string(lm, loaded):
    model, _, tokenizer = loaded
    prompts = ["one", "x" * 200]
    plain = {"until": [], "max_gen_toks": 10}
    got = lm.generate_until(requests("x", *((p, plain) for p in prompts)), disable_tqdm=True)
    ids = [tokenizer.encode(prompt)[-54:] for prompt in prompts]  # 64 of context
    want = generate(model, ids, max_new_tokens=10, stop_tokens=[256])
    texts = [tokenizer.decode(new) for new in want.tokens]
    assert got == texts
    assert len(got[0]) > 3
    stop = got[0][1:3]
    for until in ([stop], stop):
        cut = lm.generate_until(
            requests("x", (prompts[0], {"until": until, "max_gen_toks": 10})), disable_tqdm=True
        )
        assert cut == [got[0].partition(stop)[0]]


def test_draws_depend_on_the_seed_and_greedy_ones_do_not(loaded):
    model, _, tokenizer = loaded

    def drawn(seed, **options):
        lm = JaxPagedLM(model=model, tokenizer=tokenizer, seed=seed, max_seqs=2, max_gen_toks=12)
        return lm.generate_until(requests("x", *[("text", options)] * 2), disable_tqdm=True)

    sampled = {"do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.9}
    first = drawn(0, **sampled)
    assert first == drawn(0, **sampled)
    assert first != drawn(1, **sampled)
    assert first[0] != first[1]
    assert drawn(0, do_sample=False) == drawn(1, temperature=0.0)


def test_special_tokens_among_the_stop_strings_end_a_text(lm):
    plan = lm._generation({"until": ["<eos>", "\n\n", ""]})
    assert (plan["stop_tokens"], plan["stop_strings"]) == ([256], ["\n\n"])
    assert plan["max_new_tokens"] == 12


def test_the_chat_template_is_that_of_the_checkpoint(lm):
    chat = [{"role": "user", "content": "hello"}]
    assert lm.apply_chat_template(chat) == "<hello>"
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<hello"
    assert lm.chat_template(True) == "{{ '<' + messages[0].content + '>' }}"
    assert lm.tokenizer_name == "Decoder"


def test_the_harness_runs_our_tasks_without_torch_and_without_a_network(folder, tmp_path):
    """Sums would take 200 tokens of context; the model has 64, so their contexts are cut."""
    code = WITHOUT_TORCH + (
        "from jax_paged.models import cli\n"
        "code = cli.main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(code)\n"
    )
    names = ["facts", "sums", "prose"]
    command = [sys.executable, "-P", "-c", code, "lm-eval", "--model", str(folder)]
    command += ["--tasks", ",".join(f"jax_paged_{name}" for name in names)]
    command += ["--include_path", str(TASKS), "--limit", "2", "--no-program-cache"]
    command += ["--output_path", str(tmp_path), "--model_args", "chunk=32", "max_seqs=2"]
    command += ["--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | offline
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for name in names:
        assert f"|jax_paged_{name}" in run.stdout
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    assert 0 <= found["jax_paged_facts"]["acc,none"] <= 1
    assert found["jax_paged_prose"]["bits_per_byte,none"] > 1
    assert "exact_match,last-number" in found["jax_paged_sums"]
    (samples,) = tmp_path.rglob("samples_jax_paged_sums_*.jsonl")
    first = json.loads(samples.read_text().splitlines()[0])
    assert isinstance(first["resps"][0][0], str)


@pytest.mark.every
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 65}, "max_length: expected at most context_length=64, got 65"),
        ({"max_seqs": 0}, "max_seqs: expected an integer >= 1, got 0"),
        ({"tokenizer": None}, "tokenizer: expected that of the model, got NoneType"),
        (
            {"add_bos_token": True},
            "add_bos_token: expected None for a checkpoint without a start token, got True",
        ),
    ],
)
def test_bad_options_are_refused(loaded, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        JaxPagedLM(**{"model": loaded[0], "tokenizer": loaded[2]} | options)


@pytest.mark.every
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"typical_p": 0.9},
            "generation_kwargs: expected until, max_gen_toks, do_sample, temperature, top_k, "
            "top_p, min_p, repetition_penalty, got also {'typical_p': 0.9}",
        ),
        ({"max_gen_toks": 64}, "max_gen_toks: expected below max_length=64, got 64"),
    ],
)
def test_requests_that_the_engine_cannot_serve_are_refused(lm, asked, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lm.generate_until(requests("x", ("text", asked)), disable_tqdm=True)


def test_the_command_refuses_options_that_are_given_twice(folder):
    from jax_paged.models.evaluation.lm_eval import run_harness

    message = "model_args: expected none of the command's own options, got ['dtype']"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run_harness(["--tasks", "x", "--model_args", "dtype=float32"], {"dtype": "float32"})
