# SPDX-License-Identifier: Apache-2.0
"""What a server does with too much, with nonsense, and with clients that go: others go on."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from children import child
from running_server import Running, byte_engine

from jax_paged.models.server.limits import Limits

COMPLETE, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "Hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
LIMITS = Limits(
    max_body_bytes=20_000, max_bodies_bytes=60_000, body_seconds=1.0, max_prompt_tokens=100,
    max_queue=4, stall_seconds=0.5, drain_seconds=20.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    """With a step that a test may slow down."""
    made = byte_engine()
    step, made.pause = made.step, 0.0

    def slow():
        time.sleep(made.pause)
        return step()

    made.step = slow
    return made


@pytest.fixture
def start(engine):
    """Starts servers on the engine, one after the other; all its pages are free in the end."""
    running = []

    def call(**options):
        running.append(Running(engine, **({"limits": LIMITS} | options)))
        return running[-1]

    yield call
    engine.pause = 0.0
    for server in running:
        server.end()
    engine.clear_cache()
    engine.step()
    assert engine.is_idle
    assert engine.num_free_pages == engine.num_pages


def open_stream(server, body, *, buffer=None):
    """A socket whose request is on its way, and that has read the head of the response."""
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(30)
    client.connect(("127.0.0.1", server.port))
    send(client, body)
    head = b""
    while b"\r\n\r\n" not in head:
        head += client.recv(1)
    assert head.startswith(b"HTTP/1.1 200"), head
    return client


def send(client, body):
    data = json.dumps(body).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


def read_all(client):
    """What comes until the connection is closed."""
    data = bytearray()
    while piece := client.recv(1 << 16):
        data += piece
    return bytes(data)


def outcomes(server):
    return {
        (sample.labels["endpoint"], sample.labels["outcome"]): sample.value
        for metric in server.service.metrics.requests.collect()
        for sample in metric.samples if sample.name.endswith("_total")
    }  # fmt: skip


def check_alive(server):
    status, body, _ = server.post(COMPLETE, {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert (status, body["usage"]["completion_tokens"]) == (200, 2)


def test_a_body_or_prompt_that_is_too_large_is_refused(start):
    server = start()
    status, body, _ = server.post(COMPLETE, {"prompt": "a" * 30_000})
    assert status == 413
    assert "at most 20000 bytes" in body["error"]["message"]
    status, body, _ = server.post(COMPLETE, {"prompt": "a" * 101})
    assert status == 400
    assert "at most 100 tokens, got 101" in body["error"]["message"]
    with socket.create_connection(("127.0.0.1", server.port)) as client:  # no length told
        client.sendall(
            f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        client.sendall(b"4e20\r\n" + b" " * 20_000 + b"\r\n1\r\n \r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    check_alive(server)


def test_a_body_that_does_not_end_times_out(start):
    server = start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        client.sendall(
            f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            "content-length: 100\r\n\r\n{".encode()
        )
        check_alive(server)
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_only_who_has_the_key_may_ask(start):
    server = start(api_key="s3cret")
    body = {"prompt": "a", "max_tokens": 1}
    for value in (None, "Bearer", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
        headers = {} if value is None else {"authorization": value}
        for path in (COMPLETE, CHATS):
            status, got, back = server.post(path, body, headers)
            assert status == 401
            assert got["error"]["code"] == "invalid_api_key"
            assert back["www-authenticate"] == "Bearer"
        assert server.get("/metrics", headers)[0] == server.get("/v1/models", headers)[0] == 401
    assert server.get("/health")[0] == server.get("/")[0] == 200
    assert server.post(COMPLETE, body, {"authorization": "Bearer s3cret"})[0] == 200


def test_web_pages_elsewhere_may_not_ask(start):
    server = start()
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post(COMPLETE, body, {"content-type": "text/plain"})[0] == 415
    assert server.post(COMPLETE, body, {"host": "example.org"})[0] == 403
    assert server.post(COMPLETE, body, {"host": "localhost:1"})[0] == 200
    asked = {"origin": "http://a.example", "access-control-request-method": "POST"}
    request = urllib.request.Request(server.url + COMPLETE, method="OPTIONS", headers=asked)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    error.value.close()
    assert error.value.code == 405
    server.end()
    server = start(origins=["http://a.example"])
    request = urllib.request.Request(server.url + COMPLETE, method="OPTIONS", headers=asked)
    with urllib.request.urlopen(request) as response:
        assert response.headers["access-control-allow-origin"] == "http://a.example"


def test_more_than_the_queue_holds_is_told_to_come_again(start, engine):
    server, engine.pause = start(), 0.02
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    for client in clients:
        send(client, LONG | {"n": 4})
    while server.service.num_active < 12:  # 8 rows, and 4 that wait
        time.sleep(0.01)
    status, body, headers = server.post(COMPLETE, {"prompt": "a"})
    assert status == 429
    assert body["error"]["type"] == "rate_limit_error"
    assert int(headers["retry-after"]) >= 1
    for client in clients:
        client.close()
    server.wait_until_idle()
    check_alive(server)
    assert outcomes(server)["completions", "disconnected"] == 3


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_takes_its_requests_with_it(start, engine, streams):
    server, engine.pause = start(), 0.01
    body = LONG | {"n": 3, "stream": streams}
    if streams:
        client = open_stream(server, body)
    else:
        client = socket.create_connection(("127.0.0.1", server.port))
        send(client, body)
    while engine.num_running < 3:
        time.sleep(0.01)
    steps = engine.num_steps
    client.close()
    server.wait_until_idle()
    assert engine.num_steps - steps < 100
    assert outcomes(server) == {("completions", "disconnected"): 1}


KILLED = """
import sys, urllib.request
data = sys.argv[2].encode()
request = urllib.request.Request(sys.argv[1], data, {"content-type": "application/json"})
with urllib.request.urlopen(request) as response:
    while line := response.readline():
        print(line.decode().strip(), flush=True)
"""


def test_a_killed_client_leaves_nothing_behind(start, engine):
    server, engine.pause = start(), 0.01
    command = [sys.executable, "-c", KILLED, server.url + COMPLETE, json.dumps(LONG)]
    with child(command, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline().startswith(b"data: ")
        client.kill()
    steps = engine.num_steps
    server.wait_until_idle()
    assert engine.num_steps - steps < 100
    engine.pause = 0.0
    check_alive(server)


def test_a_slow_reader_holds_nobody_up_and_is_cut_off(start):
    """Its pieces become longer until its connection takes none for stall_seconds."""
    server = start(send_buffer=32_768)
    # Log-probabilities make it several times what the buffers of the connection hold.
    slow = open_stream(server, LONG | {"n": 4, "logprobs": 5}, buffer=4096)
    start_time = time.monotonic()
    while ("completions", "stalled") not in outcomes(server):
        check_alive(server)
        assert time.monotonic() - start_time < 30
    server.wait_until_idle()
    assert b"[DONE]" not in read_all(slow)
    slow.close()
    check_alive(server)


def test_a_server_that_ends_lets_running_requests_end_and_takes_no_others(start, engine):
    server, engine.pause = start(), 0.01
    client = open_stream(server, LONG | {"max_tokens": 60})
    server.begin_to_end()
    while not server.service.is_draining:
        time.sleep(0.01)
    status, body, headers = server.post(COMPLETE, {"prompt": "a"})
    assert status == 503
    assert (body["error"]["code"], headers["retry-after"]) == ("draining", "10")
    assert server.get("/health")[0] == 503
    data = read_all(client)
    assert b'"finish_reason":"length"' in data
    assert b"data: [DONE]" in data
    client.close()
    server.thread.join(30)
    assert server.failed is False


def test_what_has_no_time_to_end_is_cancelled(start, engine):
    server, engine.pause = start(limits=Limits(drain_seconds=0.2)), 0.05
    client = open_stream(server, LONG)
    server.begin_to_end()
    data = read_all(client)
    client.close()
    assert b"the server ends and has no time left" in data
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_when_the_engine_fails_requests_get_an_error_and_the_server_ends():
    engine = byte_engine()
    step, left = engine.step, [5]

    def failing():
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("planted")
        return step()

    engine.step = failing
    server = Running(engine)
    status, body, _ = server.post(COMPLETE, LONG | {"stream": False})
    assert status == 500
    assert body["error"]["code"] == "engine_failed"
    assert "planted" not in body["error"]["message"]
    server.thread.join(30)
    server.end()
    assert server.failed is True


SEEDS = [
    {"prompt": "Hello", "max_tokens": 2, "temperature": 0.5, "stop": ["a", "b"], "n": 1},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "logprobs": True,
     "top_logprobs": 1, "stop": "zz", "tools": [], "seed": 3},
]  # fmt: skip
VALUES = [
    None, True, -1, 0, 1e308, 10**400, 2**63, "", "x" * 300, "\ud800", "\0", [], {}, [[]], [None],
    {"type": "json_schema"}, [{"type": "text"}], [-1], [2**40], "Infinity", [[1], "a"],
]  # fmt: skip


def malformed(rng, body):
    """Bytes of a body with something wrong with it, and sometimes with nothing."""
    kind = rng.randrange(6)
    if kind == 0:  # a value
        target = rng.choice([body, *body.get("messages", [])])
        target[rng.choice(list(target))] = rng.choice(VALUES)
    elif kind == 1:  # a name
        body[rng.choice(["foo", "best_of", "\u0000", "suffix", "__proto__", ""])] = 1
    data = json.dumps(body).encode()
    if kind == 2:  # bytes
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        data = bytes(changed)
    elif kind == 3:
        data = data[: rng.randrange(len(data))]
    elif kind == 4:  # depth
        depth = rng.choice([10, 70, 5000])
        data = data[:-1] + b',"user":' + b"[" * depth + b"]" * depth + b"}"
    elif kind == 5:
        data = rng.choice([b"", b"[]", b"null", b"NaN", b'{"prompt":NaN}', b"\xff\xfe", data + data,
                           b"1" * 5000, b'{"a":1' + b"0" * 5000 + b"}", b"{" * 9000])  # fmt: skip
    return data


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.deep)])
def test_malformed_bodies_get_4xx_and_leave_others_alone(start, count):
    server, rng = start(), random.Random(count)
    good = json.dumps(SEEDS[0] | {"temperature": 0}).encode()
    expected = server.post(COMPLETE, good)[1]["choices"]
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    counts = {}
    for number in range(count):
        which = rng.randrange(2)
        data = malformed(rng, json.loads(json.dumps(SEEDS[which])))
        headers = {"content-type": "application/json"}
        client.request("POST", (COMPLETE, CHATS)[which], data, headers)
        with client.getresponse() as response:
            status, got = response.status, json.loads(response.read())
        assert status == 200 or 400 <= status < 500, (status, data)
        assert (status == 200) == ("choices" in got), data
        if status != 200:
            assert got["error"].keys() == {"message", "type", "param", "code"}
            assert len(got["error"]["message"]) < 2000
        counts[status] = counts.get(status, 0) + 1
        if number % 100 == 0:
            assert server.post(COMPLETE, good)[1]["choices"] == expected
    client.close()
    assert counts[400] > count / 2
    server.wait_until_idle()


def test_what_is_no_http_is_refused(start):
    server = start()
    for data in (b"\0" * 100 + b"\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /" + b"a" * 70_000):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.settimeout(10)
            try:
                client.sendall(data)
                answer = client.recv(100)
            except ConnectionError:
                answer = b""
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    check_alive(server)


CHILD = """
import asyncio, socket, time
from children import child
from running_server import byte_engine, tokenizer
from jax_paged.models.server import app, command
engine = byte_engine(max_tokens=8, prompt_logprobs=False)
step = engine.step
engine.step = lambda: (time.sleep(0.02), step())[1]
service = app.Service(engine, tokenizer(), name="tiny", stop_tokens=[256])
listener = socket.create_server(("127.0.0.1", 0))
code = asyncio.run(command._serve(service, listener))
engine.clear_cache()
print(engine.num_pages - engine.num_free_pages, flush=True)
raise SystemExit(code)
"""


def test_sigterm_lets_a_stream_end():
    """In a process of its own, with its own handlers of signals."""
    support = os.path.dirname(sys.modules["running_server"].__file__)
    paths = [support, *filter(None, [os.environ.get("PYTHONPATH")])]
    with child(
        [sys.executable, "-P", "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    ) as process:  # fmt: skip
        line = ""
        while not line.startswith("serving "):
            line = process.stderr.readline()
            assert line, "it has ended"
        url = line.split()[-1]
        data = json.dumps(LONG | {"max_tokens": 40}).encode()
        request = urllib.request.Request(url + COMPLETE, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            first = response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read()
        assert first.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "0\n"), err
