# SPDX-License-Identifier: Apache-2.0
"""The API on a small random model: what comes back is what the engine gives, in OpenAI's shapes."""

import http.client
import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running_server import Running, byte_engine, tokenizer

from jax_paged.models.server.parameters import CHAT, COMPLETIONS, IGNORED

COMPLETE, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    engine = byte_engine()
    running = Running(engine)
    yield running
    running.end()
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages


@pytest.fixture(scope="module")
def alone():
    """alone(prompt, …) -> the tokens of a request to an engine that serves nobody else."""
    engine = byte_engine()

    def call(text, **options):
        request = engine.submit(
            tokenizer().encode(text), max_new_tokens=8, stop_tokens=[256], **options
        )
        engine.run()
        return request

    return call


def text_of(request):
    return tokenizer().decode(request.tokens)


def events(server, path, body):
    """The events of a stream, as objects; it ends with [DONE]."""
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = response.read().decode().removesuffix("\n\n").split("\n\n")
    assert found.pop() == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in found]


def test_a_completion_is_what_the_engine_gives(server, alone):
    status, body, _ = server.post(
        COMPLETE, {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "model": "tiny"}
    )
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": text_of(alone("Hello")), "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_samples_and_prompts_draw_by_their_number(server, alone):
    prompts = ["Hello", tokenizer().encode("you")]
    for prompt in (prompts, [tokenizer().encode("Hello"), prompts[1]]):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 1.5, "seed": 7, "n": 2}
        _, got, _ = server.post(COMPLETE, body | {"top_p": 0.9, "top_k": 50})
        assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
        options = {"temperature": 1.5, "seed": 7, "top_p": 0.9, "top_k": 50}
        expected = [
            text_of(alone(text, draw_index=index, **options))
            for index, text in enumerate(["Hello", "Hello", "you", "you"])
        ]
        assert [choice["text"] for choice in got["choices"]] == expected
        assert len(set(expected)) == 4
        assert got["usage"]["prompt_tokens"] == 8
        assert got["usage"]["completion_tokens"] == 32


def test_samples_of_a_prompt_share_its_pages(server):
    body = {"prompt": list(range(200, 250)), "n": 3, "max_tokens": 2, "seed": 1}
    _, got, _ = server.post(COMPLETE, body)
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * 48


def test_without_a_seed_answers_differ(server):
    body = {"prompt": "Hello", "max_tokens": 16, "temperature": 2}
    assert len({server.post(COMPLETE, body)[1]["choices"][0]["text"] for _ in range(4)}) > 1


def test_a_chat_is_rendered_by_the_template(server, alone):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "},
                                     {"type": "text", "text": "you"}]},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
    body = {"messages": messages, "tools": tools, "max_tokens": 8, "temperature": 0}
    for more, text in (
        ({}, "<s>Be kind.<u>Hello you[look,go]<a>"),
        ({"tool_choice": "none"}, "<s>Be kind.<u>Hello you<a>"),
    ):
        status, got, _ = server.post(CHATS, body | more)
        assert status == 200, got
        assert got["object"] == "chat.completion"
        message = got["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text_of(alone(text)), "refusal": None}


def test_a_chat_without_a_bound_goes_on_to_the_end_of_the_context(server):
    body = {"messages": [{"role": "user", "content": "x" * 490}], "ignore_eos": True}
    _, got, _ = server.post(CHATS, body)
    assert got["usage"]["total_tokens"] == 512
    assert got["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [COMPLETE, CHATS])
def test_a_stream_has_the_pieces_of_the_whole(server, path):
    body = {"n": 2, "seed": 3, "max_tokens": 30, "temperature": 1, "ignore_eos": True}
    if path == COMPLETE:
        body |= {"prompt": "Hello", "logprobs": 2}
    else:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    _, whole, _ = server.post(path, body)
    found = events(server, path, body | {"stream_options": {"include_usage": True}})
    *found, last = found
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 60
    for choice in whole["choices"]:
        mine = [c for e in found for c in e["choices"] if c["index"] == choice["index"]]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
        if path == COMPLETE:
            assert "".join(c["text"] for c in mine) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [x for c in mine for x in c["logprobs"][name]] == values
        else:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in mine)
            assert text == choice["message"]["content"]
            told = [x for c in mine if c["logprobs"] for x in c["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_ends_before_a_stop_string(server, alone, streams):
    text = text_of(alone("Hello"))
    stop = text[-2:]
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 0, "logprobs": 0}
    body["stop"] = ["~~", stop]
    if streams:
        choices = [c for event in events(server, COMPLETE, body) for c in event["choices"]]
    else:
        choices = server.post(COMPLETE, body)[1]["choices"]
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == 6
    offsets = [begin for choice in choices for begin in choice["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    assert offsets[-1] < text.index(stop)


def test_a_stop_token_and_the_models_end_are_not_in_the_text(server, alone):
    tokens = alone("Hello").tokens
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "stop_token_ids": [tokens[3]]}
    _, got, _ = server.post(COMPLETE, body)
    assert got["choices"][0]["text"] == tokenizer().decode(tokens[:3])
    assert got["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_are_those_of_the_engine(server, alone):
    request = alone("Hello")
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    told = server.post(COMPLETE, body)[1]["choices"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([p.model for p in request.logprobs], abs=1e-5)
    assert [len(top) for top in told["top_logprobs"]] == [2] * 8
    names = [bytes(_bytes_of(token)) for token in request.tokens]
    assert [_as_bytes(name) for name in told["tokens"]] == names
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    chat |= {"logprobs": True, "top_logprobs": 1}
    for entry in server.post(CHATS, chat)[1]["choices"][0]["logprobs"]["content"]:
        [top] = entry["top_logprobs"]  # greedy: it is the token
        assert top == {name: entry[name] for name in ("token", "logprob", "bytes")}


def _bytes_of(token):
    """By the tokenizer's decoder alone: a byte that is no character shows as U+FFFD."""
    alphabet = tokenizer().backend.id_to_token(token)
    shown = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = [b for b in range(256) if chr(b) not in shown]
    shown |= {chr(256 + place): b for place, b in enumerate(others)}
    return [shown[symbol] for symbol in alphabet]


def _as_bytes(name):
    if name.startswith("bytes:"):
        return bytes(int(code, 16) for code in re.findall(r"\\x(..)", name))
    return name.encode()


def test_echo_puts_the_prompt_first(server, alone):
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "echo": True}
    _, got, _ = server.post(COMPLETE, body)
    assert got["choices"][0]["text"] == "Hello" + text_of(alone("Hello"))
    first, *_ = events(server, COMPLETE, body)
    assert first["choices"][0]["text"].startswith("Hello")
    _, got, _ = server.post(COMPLETE, body | {"max_tokens": 0})
    assert got["choices"][0]["text"] == "Hello"


ERRORS = {  # what is asked for: status, param, parts of the message
    "no prompt": (COMPLETE, {}, 400, "prompt", "expected a text, a list of token ids"),
    "empty": (COMPLETE, {"prompt": ""}, 400, "prompt", "at least one token"),
    "a token": (COMPLETE, {"prompt": [[1], [999]]}, 400, "prompt[1]", "below 257, got 999"),
    "another model": (COMPLETE, {"prompt": "a", "model": "gpt"}, 404, "model", "of ['tiny'], got"),
    "unknown": (COMPLETE, {"prompt": "a", "best_of": 2}, 400, "best_of", "no such option"),
    "too long": (COMPLETE, {"prompt": "a" * 500}, 400, "prompt", "500 of the prompt and 16 new"),
    "range": (COMPLETE, {"prompt": "a", "top_p": 0}, 400, "top_p", "above 0 and at most 1, got 0"),
    "a flag": (COMPLETE, {"prompt": "a", "n": True}, 400, "n", "an integer from 1"),
    "too many": (COMPLETE, {"prompt": ["a"] * 50, "n": 5}, 400, "n", "at most 128 answers"),
    "top": (COMPLETE, {"prompt": "a", "logprobs": 6}, 400, "logprobs", "at most 5"),
    "bias": (COMPLETE, {"prompt": "a", "logit_bias": {"300": 1}}, 400, "logit_bias", "below 257"),
    "stops": (COMPLETE, {"prompt": "a", "stop": [""]}, 400, "stop", "1 to 256 characters"),
    "options": (
        COMPLETE, {"prompt": "a", "stream_options": {"include_usage": True}}, 400,
        "stream_options", "none without stream",
    ),
    "role": (CHATS, {"messages": [{"role": "x"}]}, 400, "messages[0].role", "expected one of"),
    "no text": (
        CHATS, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "a text, got none",
    ),
    "image": (
        CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
        "messages[0].content[0]", "a part of type 'text'",
    ),
    "tool": (
        CHATS, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools[0]",
        "type 'function'",
    ),
    "form": (
        CHATS, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}},
        400, "response_format.type", "text, json_object, json_schema, regex, got 'xml'",
    ),
    "no page": ("/v1/embeddings", {}, 404, None, "no such page"),
}  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_field_in_openais_shape(server, case):
    path, body, status, param, part = ERRORS[case]
    got = server.post(path, body)
    assert got[0] == status
    error = got[1]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert part in error["message"], error["message"]
    if param != "stream_options":  # a stream does not begin either
        assert server.post(path, body | {"stream": True})[0] == status


def test_what_an_engine_has_not_is_refused_and_a_chat_ends_with_the_pool():
    server = Running(byte_engine(num_pages=4, max_tokens=8, logprobs=0, prompt_logprobs=False))
    try:
        for streams in (False, True):
            body = {"prompt": "a" * 60, "max_tokens": 30, "stream": streams}
            status, got, _ = server.post(COMPLETE, body)
            assert status == 400
            assert "at most 64 tokens in all, got 60 of the prompt" in got["error"]["message"]
        for body, part in (
            ({"logprobs": 1}, "logprobs: expected at most 0"),
            ({"logprobs": 0, "echo": True}, "echo: with logprobs it needs --prompt-logprobs"),
        ):
            status, got, _ = server.post(COMPLETE, {"prompt": "a"} | body)
            assert status == 400
            assert part in got["error"]["message"]
        body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        assert server.post(CHATS, body)[1]["usage"]["total_tokens"] == 64
    finally:
        server.end()


def test_64_clients_at_once_get_what_each_gets_alone(server, alone):
    prompts = [f"{number} green bottles" for number in range(64)]
    expected = [text_of(alone(prompt, temperature=1.0, seed=i)) for i, prompt in enumerate(prompts)]

    def ask(i):
        body = {"prompt": prompts[i], "max_tokens": 8, "temperature": 1.0, "seed": i}
        if i % 2:
            return "".join(e["choices"][0]["text"] for e in events(server, COMPLETE, body))
        return server.post(COMPLETE, body)[1]["choices"][0]["text"]

    with ThreadPoolExecutor(64) as clients:
        assert list(clients.map(ask, range(64))) == expected


def test_a_kept_connection_gets_a_body_at_once(server):
    """Not 40 ms behind the head, when the client has confirmed that."""
    client, seconds = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), []
    for _ in range(8):
        client.request("GET", "/v1/models")
        with client.getresponse() as response:
            begin = time.perf_counter()
            assert response.read()
            seconds.append(time.perf_counter() - begin)
    client.close()
    assert min(seconds[1:]) < 0.02


def test_metrics_count_what_was_served(server):
    def value(name):
        text = server.get("/metrics")[1].decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])

    names = ["prompt_tokens_total", "new_tokens_total", "first_token_seconds_count",
             "inter_token_seconds_count", 'requests_total{endpoint="chat",outcome="done"}',
             'requests_total{endpoint="completions",outcome="error_400"}']  # fmt: skip
    server.post(CHATS, {"messages": []})
    server.post(COMPLETE, {"prompt": ""})
    server.post(CHATS, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    before = [value(f"jax_paged_{name}") for name in names]
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "ignore_eos": True}
    server.post(CHATS, body)
    server.post(COMPLETE, {"prompt": ""})
    after = [value(f"jax_paged_{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [9, 4, 1, 3, 1, 1]
    assert value("jax_paged_pages") == 512
    assert value("jax_paged_running") == 0
    assert value("process_cpu_seconds_total") > 0


def test_the_other_pages(server):
    assert server.get("/health")[:2] == (200, {"status": "ok"})
    [model] = server.get("/v1/models")[1]["data"]
    assert (model["id"], model["parent"], model["max_model_len"]) == ("tiny", None, 512)
    status, _, headers = server.get("/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert server.get("/v1/completions")[0] == 405


def test_the_documents_name_each_field():
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    for table in (COMPLETIONS, CHAT):
        for name, parameter in table.items():
            assert f"| `{name}` | {parameter.domain.text} |" in page, name
    for name in IGNORED:
        assert f"`{name}`" in page
