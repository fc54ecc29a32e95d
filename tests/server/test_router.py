# SPDX-License-Identifier: Apache-2.0
"""A router in front of servers that die: clients get what they would have got without that."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from children import child
from running_server import Running, byte_engine, tokenizer
from tiny_checkpoint import write_checkpoint

from jax_paged.models.server import replica
from jax_paged.models.server.app import Service
from jax_paged.models.server.replica import Replica, pick, prefix_key
from jax_paged.models.server.retold import DifferentTextError, Retold
from jax_paged.models.server.router import MOST_LOSSES, Router

PROMPTS = ["Hello", "How are you?", "One, two, three", "Once upon a time"]
ROOT = Path(__file__).parents[2]
CHECK_S = replica.CHECK_S
ASKED = {"max_tokens": 24, "seed": 5, "ignore_eos": True, "n": 2}
PATHS = {"/v1/completions": {"logprobs": 2}, "/v1/chat/completions": {"logprobs": True}}


class Mortal:
    """An app whose connections are cut after `dies_after` pieces of a response, if that is set."""

    def __init__(self, app):
        self._app, self.dies_after, self.num_deaths, self.asked = app, None, 0, []

    async def __call__(self, scope, receive, send):
        limit, sent = self.dies_after, 0
        deadly = limit is not None and scope["method"] == "POST"
        if scope["method"] == "POST":
            self.asked.append(scope["path"])

        async def mortal_send(message):
            nonlocal sent
            if deadly and sent == limit:
                self.num_deaths += 1
                send.__self__.transport.abort()
            elif not deadly or sent < limit:
                await send(message)
            sent += 1

        await self._app(scope, receive, mortal_send)


@pytest.fixture(scope="module")
def house():
    """Two mortal servers, and a router before them that looks after them often."""
    servers, replica.CHECK_S = [], 0.05
    for _ in range(2):
        service = Service(byte_engine(), tokenizer(), name="tiny", stop_tokens=[256])
        service.app = Mortal(service.app)
        servers.append(Running(service))
    router = Running(Router([server.url for server in servers]))
    yield router, servers
    for running in (router, *servers):
        running.end()
    replica.CHECK_S = CHECK_S


@pytest.fixture
def router(house):
    """The router, whose replicas are ready and live for ever."""
    running, servers = house
    for server in servers:
        server.service.app.dies_after = None
        server.service.app.asked.clear()
        server.service.is_draining = False
    wait_for(lambda: all(one.is_ready for one in running.service.replicas))
    yield running
    for server in servers:
        server.wait_until_idle()
    wait_for(lambda: not any(one.num_open for one in running.service.replicas))
    wait_for(lambda: running.service.num_active == 0)


def mortal_of(body, router, servers):
    """The server that will get a request."""
    wait_for(lambda: all(one.is_ready for one in router.service.replicas))
    first = pick(router.service.replicas, prefix_key(body), ())
    return next(server.service.app for server in servers if server.url == first.url)


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def body_of(path, prompt, **changes):
    given = {"prompt": prompt}
    if "chat" in path:
        given = {"messages": [{"role": "user", "content": prompt}]}
    return given | ASKED | PATHS[path] | changes


def streamed(url, path, body):
    """The events of a stream."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        *lines, end = response.read().split(b"\n\n")[:-1]
    assert end == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def whole(events):
    """Per answer: text, tokens, how often it began, why it ended; all log-probabilities; counts."""
    answers = [["", [], 0, []] for _ in range(ASKED["n"])]
    values = [[] for _ in answers]
    for event in events:
        for choice in event["choices"]:
            answer, told = answers[choice["index"]], choice["logprobs"] or {}
            delta = choice.get("delta", {})
            answer[0] += choice.get("text", delta.get("content")) or ""
            answer[1] += told.get("tokens", [one["token"] for one in told.get("content", [])])
            answer[2] += "role" in delta
            answer[3] += [choice["finish_reason"]] if choice["finish_reason"] else []
            values[choice["index"]] += told.get(
                "token_logprobs", [one["logprob"] for one in told.get("content", [])]
            )
    return answers, values, plain(events[-1]["usage"])


def plain(usage):
    """Counts, without what a cache had."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.every
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_goes_on_when_its_replica_dies(router, house, path):
    servers = house[1]
    for turn, prompt in enumerate(PROMPTS[:2]):
        body = body_of(path, prompt)
        want, logprobs, usage = whole(streamed(servers[turn % 2].url, path, body))
        for dies_after in (0, 1, 2, 5)[turn::2]:
            mortal = mortal_of(body, *house)
            deaths, mortal.dies_after = mortal.num_deaths, dies_after
            events = streamed(router.url, path, body)
            mortal.dies_after = None
            assert mortal.num_deaths == deaths + 1
            got, got_logprobs, got_usage = whole(events)
            assert (got, got_usage) == (want, usage)
            np.testing.assert_allclose(got_logprobs, logprobs, rtol=1e-4)
            assert len({(event["id"], event["created"]) for event in events}) == 1


def test_answers_without_a_stream_go_on_too(router, house):
    servers = house[1]
    for path in PATHS:
        body = body_of(path, PROMPTS[0])
        _, want, _ = servers[0].post(path, body)
        for dies_after in (0, 1):
            mortal = mortal_of(body, *house)
            mortal.dies_after = dies_after
            status, got, _ = router.post(path, body)
            mortal.dies_after = None
            assert (status, texts_of(got)) == (200, texts_of(want))


def texts_of(answer):
    return [choice.get("text", choice.get("message")) for choice in answer["choices"]]


def test_a_request_without_a_seed_gets_one(router, house):
    """So that what goes on elsewhere goes on with the same draws."""
    body = body_of("/v1/completions", PROMPTS[1], seed=None)
    texts = set()
    for dies_after in (3, 3):
        mortal = mortal_of(body, *house)
        deaths, mortal.dies_after = mortal.num_deaths, dies_after
        got, *_ = whole(streamed(router.url, "/v1/completions", body))
        mortal.dies_after = None
        assert mortal.num_deaths == deaths + 1
        texts.add(got[0][0])
        assert {reason for *_, (reason,) in got} == {"length"}
    assert len(texts) == 2


def test_a_request_that_ends_every_replica_is_given_up(router, house):
    for server in house[1]:
        server.service.app.dies_after = 0
    status, got, _ = router.post("/v1/completions", body_of("/v1/completions", "x"))
    assert status in (502, 503)
    deaths = sum(len(server.service.app.asked) for server in house[1])
    assert 2 <= deaths <= MOST_LOSSES
    assert got["error"]["type"] == "server_error"
    wait_for(lambda: router.get("/health")[0] == 200)


def test_errors_of_the_request_are_passed_on(router, house):
    for stream in (False, True):
        body = {"prompt": "x", "max_tokens": "many", "stream": stream}
        status, got, _ = router.post("/v1/completions", body)
        assert (status, got["error"]["param"]) == (400, "max_tokens")
    assert router.post("/v1/completions", b"{")[0] == 400
    assert router.post("/v1/completions", {"prompt": "x"}, {"host": "evil.org"})[0] == 403
    asked = sum(len(server.service.app.asked) for server in house[1])
    assert asked == 2, "no other replica is asked"


def test_a_replica_that_ends_or_is_full_is_passed_over(router, house):
    servers = house[1]
    body = body_of("/v1/completions", PROMPTS[2])
    first = pick(router.service.replicas, prefix_key(body), ())
    serving = next(s.service for s in servers if s.url == first.url)
    serving.num_active += 10**6
    try:
        assert router.post("/v1/completions", body)[0] == 200
        assert first.is_ready
    finally:
        serving.num_active -= 10**6
    serving.is_draining = True
    assert router.post("/v1/completions", body)[0] == 200
    assert not first.is_ready
    for server in servers:
        server.service.is_draining = True
    assert router.post("/v1/completions", body)[0] == 503
    wait_for(lambda: router.get("/health")[0] == 503)
    assert router.get("/v1/models")[0] == 503
    for server in servers:
        server.service.is_draining = False
    wait_for(lambda: router.get("/health")[0] == 200)


def test_pages_and_metrics(router):
    assert router.get("/v1/models")[1]["data"][0]["id"] == "tiny"
    status, page, headers = router.get("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<html" in page
    assert router.get("/health")[1] == {"status": "ok", "ready": 2, "replicas": 2}
    text = router.get("/metrics")[1].decode()
    for url in (one.url for one in router.service.replicas):
        assert f'jax_paged_router_ready{{url="{url}"}} 1.0' in text
    assert "jax_paged_router_lost_total" in text


def test_a_client_that_goes_takes_its_request_with_it(router, house):
    body = body_of("/v1/completions", PROMPTS[3], max_tokens=400, stream=True, n=1)
    for is_begun in (False, True):
        request = urllib.request.Request(
            f"{router.url}/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        response = urllib.request.urlopen(request, timeout=60)
        if is_begun:
            response.read(10)
        response.close()
        for server in house[1]:
            server.wait_until_idle()
        wait_for(lambda: router.service.num_active == 0)


def test_a_key_is_asked_for_and_passed_on():
    server = Running(byte_engine(), api_key="s3cret")
    router = Running(Router([f"{server.url}/"], api_key="s3cret"))
    try:
        assert router.post("/v1/completions", {"prompt": "x"})[0] == 401
        key = {"authorization": "Bearer s3cret"}
        assert router.post("/v1/completions", {"prompt": "x"}, key)[0] == 200
        assert router.get("/v1/models")[0] == 401
        assert router.get("/v1/models", key)[0] == 200
    finally:
        router.end()
        server.end()


def test_a_silent_replica_loses_what_it_had(monkeypatch):
    """It takes connections and says nothing any more, as after a loss of power."""
    monkeypatch.setattr(replica, "ANSWER_S", 0.1)
    monkeypatch.setattr(replica, "CHECK_S", 0.05)
    monkeypatch.setattr(replica, "SILENCE_S", 0.5)
    server = Running(byte_engine())
    app, is_silent = server.service.app, threading.Event()

    async def silent(scope, receive, send):
        async def say(message):
            while is_silent.is_set():
                await asyncio.sleep(0.05)
            await send(message)

        await app(scope, receive, say)

    service = Service(byte_engine(), tokenizer(), name="tiny", stop_tokens=[256])
    service.app, app = silent, service.app
    mute = Running(service)
    router = Running(Router([mute.url]))
    try:
        wait_for(lambda: router.get("/health")[0] == 200)
        is_silent.set()
        begin = time.monotonic()
        status, _, _ = router.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert status == 503
        assert 0.3 < time.monotonic() - begin < 15
    finally:
        is_silent.clear()
        for running in (router, mute, server):
            running.end()


def replicas(count):
    made = [Replica(f"http://10.0.0.{i}:8000") for i in range(count)]
    for one in made:
        one.is_ready = True
    return made


def test_prompts_that_begin_alike_go_to_one_replica_while_it_has_room():
    many = replicas(5)
    start = "You are helpful. " * 40
    keys = {prefix_key({"prompt": start + str(i)}) for i in range(9)}
    assert len(keys) == 1
    assert prefix_key({"prompt": start, "model": "poet"}) not in keys
    (key,) = keys
    home = pick(many, key, ())
    picks = [pick(many, prefix_key({"prompt": f"{i} cats"}), ()) for i in range(500)]
    assert min(picks.count(one) for one in many) > 60
    home.is_ready = False
    moved = [pick(many, prefix_key({"prompt": f"{i} cats"}), ()) for i in range(500)]
    assert all(a is b or a is home for a, b in zip(picks, moved, strict=True))
    home.is_ready = True
    for _ in range(100):
        pick(many, key, ()).num_open += 1
    assert home.num_open == max(one.num_open for one in many) <= 26
    assert pick(many, key, set(many)) is None


def test_bad_urls_are_refused():
    for urls, text in (
        ([], "to: expected different URLs, at least one"),
        *(
            ([url], "to: expected the URL of a server")
            for url in ("localhost:8000", "http://", "http://a:b", "http://a/?b=c")
        ),
        (["http://a", "http://a/"], "to: expected different URLs"),
    ):
        with pytest.raises(ValueError, match=text):
            Router(urls)


def event(text, index=0, reason=None):
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    return {"id": "a", "created": 1, "choices": [choice]}


def test_what_was_told_is_not_told_again():
    retold = Retold()
    assert [retold.new(event(text)) for text in ("ab", "c")] == [event("ab"), event("c")]
    retold.begin_again()
    again = [retold.new(event(text) | {"id": "b"}) for text in ("a", "bcd", "e")]
    assert again == [None, event("d"), event("e")]
    retold.begin_again()
    assert retold.new(event("abcde", reason="length")) == event("", reason="length")
    retold.begin_again()
    assert retold.new(event("abcde", reason="length")) is None
    retold.begin_again()
    with pytest.raises(DifferentTextError, match="another text"):
        retold.new(event("abX"))


def told_by(url, *parts):
    """The line of a server's metrics that has these parts."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(x for x in lines if not x.startswith("#") and all(part in x for part in parts))


def open_requests(url, port):
    """What the router has open at the replica with this port."""
    return float(told_by(url, "jax_paged_router_open", f":{port}").split()[-1])


@pytest.mark.deep
def test_replicas_that_are_killed(tmp_path):
    """The commands of the guide, and kill -9 of a server under load, which comes back."""
    write_checkpoint(tmp_path, max_position_embeddings=512)
    text = (
        (ROOT / "docs" / "server.md").read_text(encoding="utf-8").replace("FOLDER", str(tmp_path))
    )
    with contextlib.ExitStack() as stack:
        for port in ("8000", "8001", "8002"):
            free = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            text = text.replace(f"port {port}", f"port {free.getsockname()[1]}")
            text = text.replace(f"0.0.1:{port}", f"0.0.1:{free.getsockname()[1]}")
    starts = ("jax-paged supervise serve", "jax-paged route")
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith(starts)]
    assert len(lines) == 3
    with contextlib.ExitStack() as stack:
        pids, urls, runs = [], [], []
        for line in lines:
            command = [sys.executable, "-P", "-m", "jax_paged", *line[1:]]
            environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
            run = child(command, stderr=subprocess.PIPE, text=True, env=environment)
            runs.append(stack.enter_context(run))
            for told in iter(runs[-1].stderr.readline, ""):
                if told.startswith("jax-paged: started as process "):
                    pids.append(int(told.split()[-1]))
                if told.startswith("serving "):
                    urls.append(told.split()[-1])
                    break
        asked = [
            {"prompt": f"{i}: and so on", "max_tokens": 200, "seed": i, "ignore_eos": True}
            for i in range(24)
        ]
        want = [streamed(urls[0], "/v1/completions", body) for body in asked]
        got = [None] * len(asked)

        def ask(i):
            got[i] = streamed(urls[2], "/v1/completions", asked[i])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        port = urls[0].rpartition(":")[2]
        wait_for(lambda: open_requests(urls[2], port) > 0, seconds=30)
        os.kill(pids[0], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert [text_of(events) for events in got] == [text_of(events) for events in want]
        lost = told_by(urls[2], "jax_paged_router_lost_total")
        assert float(lost.split()[-1]) > 0
        wait_for(lambda: json_of(f"{urls[2]}/health")["ready"] == 2, seconds=100)
        for run in runs:
            run.send_signal(signal.SIGTERM)
        assert [run.wait(60) for run in runs] == [0, 0, 0]


def json_of(url):
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def text_of(events):
    return "".join(choice["text"] for event in events for choice in event["choices"])
