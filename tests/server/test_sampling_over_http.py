# SPDX-License-Identifier: Apache-2.0
"""Sampling options, log-probabilities of prompts, and constraints, asked for over HTTP."""

import json

import pytest
from running_server import Running, byte_engine, tokenizer

COMPLETE, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
    engine = byte_engine()
    running = Running(engine)
    yield running
    running.end()
    engine.clear_cache()
    engine.step()
    assert engine.num_free_pages == engine.num_pages


def test_options_reach_the_engine(server):
    engine = byte_engine()
    options = {
        "temperature": 1.2, "seed": 4, "min_p": 0.02, "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_k": 60, "top_p": 0.95,
    }  # fmt: skip
    seen = set()
    for bias in (None, {65: 5.0, 66: -100.0}):
        request = engine.submit(
            tokenizer().encode("Hello"), max_new_tokens=20, stop_tokens=[256], logit_bias=bias,
            **options,
        )  # fmt: skip
        engine.run()
        body = options | {"prompt": "Hello", "max_tokens": 20}
        if bias:
            body["logit_bias"] = {str(token): value for token, value in bias.items()}
        text = server.post(COMPLETE, body)[1]["choices"][0]["text"]
        assert text == tokenizer().decode(request.tokens)
        seen.add(text)
    assert len(seen) == 2


@pytest.mark.parametrize(("new", "stops"), [(0, False), (1, False), (1, True)])
def test_log_probabilities_of_a_prompt_are_those_lm_eval_reads(server, new, stops):
    """A token that stops the answer is told, too: lm-eval leaves the last one out."""
    engine = byte_engine()
    ids = tokenizer().encode("Hello you")
    request = engine.submit(ids, max_new_tokens=new, prompt_logprobs=True)
    engine.run()
    expected = [None if p is None else p.model for p in request.prompt_logprobs]
    expected += [p.model for p in request.logprobs]
    body = {"prompt": [ids], "max_tokens": new, "temperature": 0, "logprobs": 1, "echo": True}
    if stops:
        body["stop_token_ids"] = request.tokens
    choice = server.post(COMPLETE, body | {"seed": 1234})[1]["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == tokenizer().decode([*ids, *([] if stops else request.tokens)])
    assert choice["finish_reason"] == ("stop" if stops else "length")
    assert told["tokens"][:9] == list("Hello you")
    assert told["text_offset"][:9] == list(range(9))
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-5)
    assert len(told["tokens"]) == 9 + new
    for value, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert value in top.values()
        assert max(top.values()) >= value


def test_a_response_format_is_held_to(server):
    pytest.importorskip("llguidance", reason="llguidance is not installed: extra structured")
    schema = {
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        body = {"messages": MESSAGES, "seed": seed, "response_format": form, "max_tokens": 40}
        choice = server.post(CHATS, body)[1]["choices"][0]
        assert json.loads(choice["message"]["content"])["a"] in (1, 2)
        assert choice["finish_reason"] == "stop"
    body = {"prompt": "a", "response_format": {"type": "regex", "pattern": "[xy]{3}z"}, "seed": 1}
    text = server.post(COMPLETE, body)[1]["choices"][0]["text"]
    assert len(text) == 4
    assert set(text[:3]) <= {"x", "y"}
    for bad in (
        {"type": "regex", "pattern": "("},
        {"type": "regex", "pattern": "(a|b)" * 20_000},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
    ):
        status, got, _ = server.post(COMPLETE, {"prompt": "a", "response_format": bad})
        assert status == 400
        assert got["error"]["param"].startswith("response_format."), got
