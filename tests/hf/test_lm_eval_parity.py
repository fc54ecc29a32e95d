# SPDX-License-Identifier: Apache-2.0
"""JaxPagedLM against the harness's own `hf` model: the same requests, the same checkpoint, f32."""

import importlib.util
import json
import os
import warnings

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint

ATOL = 1e-3  # sums over up to 60 tokens of log p, each a difference of f32 logits


@pytest.fixture(scope="module")
def models(transformers, tmp_path_factory):
    """(ours, theirs)."""
    if importlib.util.find_spec("lm_eval") is None:
        reason = "lm_eval is not installed: pip install 'jax_paged[test-hf]'"
        if os.environ.get("JAX_PAGED_REQUIRE_HF") == "1":
            pytest.fail(f"JAX_PAGED_REQUIRE_HF=1, but {reason}")
        pytest.skip(reason)
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    side = json.loads((folder / "tokenizer_config.json").read_text())
    side["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(side))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these packages warn of is not ours
        from lm_eval.models.huggingface import HFLM

        from jax_paged.models.evaluation.lm_eval import JaxPagedLM

        theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
        yield JaxPagedLM(str(folder), dtype="float32", chunk=64, max_seqs=4), theirs


def answers(models, kind, arguments):
    """What both give to the same requests."""
    from lm_eval.api.instance import Instance

    requests = [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [getattr(model, kind)(requests, disable_tqdm=True) for model in models]


def test_log_likelihoods_are_those_of_the_harness(models):
    """Contexts that continuations share, empty and over-long ones; continuations of one token."""
    long = "a context of far more tokens than the model can see at once, so that it is cut"
    contexts = ["Question: why?\nAnswer:", "Question: why?\nAnswer: ", "b", "", long]
    endings = [" yes", " no", "x", " a longer answer", "y" * 50]
    pairs = [(context, ending) for context in contexts for ending in endings]
    ours, theirs = answers(models, "loglikelihood", pairs)
    np.testing.assert_allclose([x[0] for x in ours], [x[0] for x in theirs], rtol=0, atol=ATOL)
    assert [bool(x[1]) for x in ours] == [bool(x[1]) for x in theirs]


def test_rolling_log_likelihoods_are_those_of_the_harness(models):
    texts = [("one two",), ("z" * 63,), ("z" * 64,), ("z" * 65,), ("a longer text " * 20,)]
    ours, theirs = answers(models, "loglikelihood_rolling", texts)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=ATOL)


def test_greedy_texts_are_those_of_the_harness(models):
    greedy = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    ours, theirs = answers(
        models, "generate_until", [("one", greedy), ("x" * 90, greedy), ("two words", greedy)]
    )
    assert ours == theirs
    assert any(ours)
