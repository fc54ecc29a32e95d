# SPDX-License-Identifier: Apache-2.0
"""lm-eval's own client of completions, run as docs/server.md does, against JaxPagedLM."""

import importlib.util
import json
import os
import re
import shlex
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from running_server import CONFIG, Running, byte_engine, byte_model, tokenizer

ROOT = Path(__file__).parents[2]
TASKS = {"jax_paged_facts": "loglikelihood", "jax_paged_prose": "loglikelihood_rolling"}
ATOL = 1e-3  # sums over up to 511 tokens of log p, in steps of other sizes


@pytest.fixture(scope="module")
def harness(transformers):
    """What the command `lm_eval` calls."""
    for name in ("lm_eval", "tenacity"):
        if importlib.util.find_spec(name) is None:
            reason = f"{name} is not installed: pip install 'jax_paged[test-hf]'"
            if os.environ.get("JAX_PAGED_REQUIRE_LM_EVAL") == "1":
                pytest.fail(f"JAX_PAGED_REQUIRE_LM_EVAL=1, but {reason}")
            pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these packages warn of is not ours
        from lm_eval.__main__ import cli_evaluate

        yield cli_evaluate


@pytest.fixture(scope="module")
def server():
    running = Running(byte_engine(), stop_tokens=[256, *range(0, 256, 2)])
    yield running
    running.end()


def documented_command(**places):
    """The arguments of the command in the documents, with values in the places of its words."""
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    text = re.search(r"^lm_eval run (.*?)^```", page, re.M | re.S)[1]
    for name, value in places.items():
        assert name in text
        text = text.replace(name, str(value))
    return shlex.split(text.replace("\\\n", ""))


def run_documented_command(harness, server, folder, monkeypatch):
    """The samples that the harness writes for each task."""
    tokenizer().backend.save(str(folder / "tokenizer.json"))
    side = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(side))
    arguments = documented_command(
        **{"http://127.0.0.1:8000": server.url}, NAME="tiny", FOLDER=folder,
        CONTEXT=CONFIG.context_length, arc_easy=",".join(TASKS),
    )  # fmt: skip
    arguments += ["--include_path", str(ROOT / "examples" / "lm_eval"), "--limit", "4"]
    arguments += ["--output_path", str(folder), "--log_samples"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *arguments])
    monkeypatch.setenv("HF_HOME", str(folder))
    harness()
    samples = {}
    for task in TASKS:
        (file,) = folder.rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in file.read_text().splitlines()]
    return samples


def test_the_documented_command_gives_what_our_model_of_the_harness_gives(
    harness, server, tmp_path, monkeypatch
):
    samples = run_documented_command(harness, server, tmp_path, monkeypatch)
    from lm_eval.api.instance import Instance

    from jax_paged.models.evaluation.lm_eval import JaxPagedLM

    ours = JaxPagedLM(model=byte_model(), tokenizer=tokenizer(), chunk=64)
    for task, kind in TASKS.items():
        assert len(samples[task]) == 4
        pairs = [
            (tuple(given.values()), answer)
            for sample in samples[task]
            for given, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True)
        ]
        requests = [Instance(kind, {}, given, i) for i, (given, _) in enumerate(pairs)]
        expected, found = getattr(ours, kind)(requests, disable_tqdm=True), [x for _, x in pairs]
        if kind == "loglikelihood":
            assert [is_greedy for _, is_greedy in found] == [str(x[1]) for x in expected]
            found, expected = [x for x, _ in found], [x for x, _ in expected]
        np.testing.assert_allclose(np.asarray(found, float), expected, rtol=0, atol=ATOL)
