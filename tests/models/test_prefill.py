# SPDX-License-Identifier: Apache-2.0
"""Prompts that another process prefills: the same tokens, whatever becomes of that process."""

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from children import child
from jobs import KEY, run_all, started
from tiny_checkpoint import write_checkpoint

from jax_paged.models import (
    DecodeEngine,
    Engine,
    Prefiller,
    PrefillService,
    cli,
    load_checkpoint,
)
from jax_paged.models.decoder.executables import Executables, kept_in
from jax_paged.models.distributed import transfer
from jax_paged.models.distributed.link import LinkError
from jax_paged.models.distributed.orders import Order
from jax_paged.models.distributed.transfer import answer, listen, open_channel
from jax_paged.models.server import command
from jax_paged.models.server import prefill as prefill_command
from jax_paged.models.serving import prefiller as client

ROOT = Path(__file__).parents[2]
SIZES = {"num_pages": 24, "max_seqs": 3, "max_tokens": 16, "preemption": "swap", "swap_pages": 48}
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 250, n).tolist() for n in (50, 40, 33, 55, 45, 38, 44, 52)]
ASKED = {"max_new_tokens": 6, "temperature": 0.7, "seed": 2}
FOLDER = tempfile.TemporaryDirectory(prefix="programs_of_prefill_")
PROGRAMS = Executables(Path(FOLDER.name), on_unreadable=lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder):
    return load_checkpoint(folder, progress=False)[0]


def engine_of(model, **options):
    """An engine; those of the same sizes share their programs."""
    with kept_in(PROGRAMS):
        made = DecodeEngine if "prefill" in options else Engine
        return made(model, **SIZES | options)


@pytest.fixture(scope="module")
def alone(model):
    return engine_of(model)


def submit_all(engine, **options):
    pairs = enumerate(PROMPTS)
    return [engine.submit(p, draw_index=i, **ASKED | options) for i, p in pairs]


@pytest.fixture(scope="module")
def want(alone):
    requests = submit_all(alone)
    alone.run()
    alone.clear_cache()
    return [r.tokens for r in requests]


def assert_all_free(*engines):
    for engine in engines:
        assert engine.is_idle
        engine.clear_cache()
        assert engine.num_free_pages == engine.num_pages
        assert engine.num_free_swap_pages == engine.swap_pages
        assert engine._runner.swapper._chunks == {}


def port_of(listener):
    return f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def service(engine, payloads="frames", address="127.0.0.1:0"):
    """Where a service listens."""
    with listen(address) as listener:
        one = PrefillService(listener, KEY.encode(), payloads=payloads)
        thread = threading.Thread(target=one.run, args=(engine,))
        thread.start()
        try:
            yield port_of(listener)
        finally:
            one.stop()
            thread.join()


@contextlib.contextmanager
def prefiller(address):
    one = Prefiller(address, KEY.encode())
    try:
        yield one
    finally:
        one.close()


def jax_paged(*arguments):
    """The command line in a process of its own, with the key."""
    command = [sys.executable, "-P", "-m", "jax_paged", *arguments, "--no-program-cache"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return child(command, env=os.environ | {"JAX_PAGED_KEY": KEY}, **pipes)


def line_of(process, beginning):
    return next(line for line in iter(process.stderr.readline, "") if line.startswith(beginning))


def wait_for(what):
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("payloads", ["frames", "transfer"])
def test_tokens_are_those_of_one_engine(model, alone, want, payloads):
    with service(alone, payloads) as address, prefiller(address) as prefill:
        engine = engine_of(model, prefill=prefill)
        requests = submit_all(engine)
        assert engine.num_waiting == len(PROMPTS)  # as many as would wait without
        engine.run()
        assert [r.tokens for r in requests] == want
        assert engine.num_received == len(PROMPTS)
        assert engine.num_fed <= len(PROMPTS) * (1 + ASKED["max_new_tokens"])
        short = engine.submit(PROMPTS[0][:9], **ASKED)  # less than a page
        again = engine.submit([*PROMPTS[1], 5], **ASKED)  # most of it is in the cache
        cancelled = engine.submit(PROMPTS[2][::-1], **ASKED)
        engine.step()
        assert cancelled.number in engine._awaited
        engine.cancel(cancelled)
        engine.run()
        assert engine.num_received == len(PROMPTS)
        assert (len(short.tokens), again.num_cached) == (6, 32)
        wait_for(lambda: not prefill._asked)  # what was cancelled has come to its end, too
        engine.step()
        assert_all_free(engine)
    assert_all_free(alone)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        # Dead before it gave arrays, or while they were on their way.
        (signal.SIGKILL, "its connection is closed|arrays that it gives did not come: .*"),
        pytest.param(signal.SIGSTOP, "nothing was heard of it for 3 s", marks=pytest.mark.deep),
    ],
)
def test_a_killed_process_costs_no_token(folder, model, want, caplog, monkeypatch, how, why):
    """kill -9 in the middle, or silence: what it has not sent is computed here."""
    monkeypatch.setattr(transfer, "SILENCE_S", 3.0)
    sizes = ["--max-seqs", "1", "--max-tokens", "4"]
    where = ["--listen", "127.0.0.1:0", "--payloads", "transfer", *sizes]
    with jax_paged("prefill", "--model", folder, *where) as process:
        address = line_of(process, "prefilling at").split()[-1]
        with prefiller(address) as prefill:
            engine = engine_of(model, prefill=prefill)
            requests = submit_all(engine)
            while engine.num_received < 2:
                assert engine.step()
            os.kill(process.pid, how)
            engine.run()
            assert [r.tokens for r in requests] == want
            assert 2 <= engine.num_received < len(PROMPTS)
            assert_all_free(engine)
            assert prefill.channel is None
            more = engine.submit(PROMPTS[0][::-1], **ASKED)
            assert not more.is_awaited
            engine.run()
            assert_all_free(engine)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert re.fullmatch(f"the prefill process at {address} is gone: ({why})", warning)


@pytest.mark.deep
def test_the_commands_of_the_guide(folder):
    """They print what one process prints; a server takes the same option."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    prefill, generate = (
        shlex.split(line)[1:] for line in text.splitlines()
        if line.startswith("jax-paged ") and "127.0.0.1:8100" in line
    )  # fmt: skip
    long = "The paged cache of an engine"  # more than a page
    names = {"MODEL": folder, "The paged": long, "127.0.0.1:8100": "127.0.0.1:0"}
    with jax_paged(*(names.get(x, x) for x in prefill), "--log-level", "info") as process:
        names["127.0.0.1:8100"] = line_of(process, "prefilling at").split()[-1]
        said = []
        for arguments in (generate, generate[: generate.index("--prefill")]):
            with jax_paged(*(names.get(x, x) for x in arguments)) as one:
                out, error = one.communicate()
            assert one.returncode == 0, error
            said.append(out)
        assert said[0] == said[1]
        assert f"prefilled {len(long) - 1} tokens" in process.stderr.readline()
        where = ["--prefill", names["127.0.0.1:8100"]]
        with jax_paged("serve", "--model", folder, "--port", "0", *where) as server:
            url = line_of(server, "serving ").split()[-1]
            body = {"prompt": long, "max_tokens": 4, "model": folder.name}
            asked = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
        assert process.returncode == 130
        assert f"prefilled {len(long) - 1} tokens" in error


@pytest.mark.deep
@pytest.mark.parametrize("split", [[], ["--pp", "2"]])
def test_a_job_of_two_processes_prefills(folder, split):
    long = "The paged cache of an engine"  # more than a page

    def job(where, index):
        numbers = ["--num-processes", "2", "--process-id", str(index), "--no-program-cache"]
        own = ["--listen", "127.0.0.1:0", "--log-level", "info", *split]
        one = ["prefill", "--model", str(folder), *own, "--coordinator", where, *numbers]
        return ["-P", "-m", "jax_paged", *one]

    with started(job, count=2, devices=2) as processes:
        address = line_of(processes[0], "prefilling at").split()[-1]
        said = []
        for more in (["--prefill", address], []):
            with jax_paged("generate", long, "--model", folder, *more) as one:
                out, error = one.communicate()
            assert one.returncode == 0, error
            said.append(out)
        assert said[0] == said[1]
        told = iter(processes[0].stderr.readline, "")  # Gloo has lines there, too
        assert any(f"prefilled {len(long) - 1} tokens" in line for line in told)
        processes[0].send_signal(signal.SIGTERM)
        run_all(processes)


# What a prefill process may send that is wrong


@pytest.fixture(scope="module")
def hostile(model, alone):
    """An engine, what it takes for a prefill process, and what that one does with an order."""
    script, is_over = {"facts": alone.facts()}, threading.Event()
    nowhere = transfer._transfer_server("127.0.0.1")  # where nobody gives any array
    port = int(nowhere.address().rpartition(":")[2])

    def play(listener):
        while not is_over.is_set():
            with contextlib.suppress(LinkError), contextlib.ExitStack() as stack:
                channel = answer(listener.accept()[0], KEY.encode())
                stack.callback(channel.close)
                channel.send(Order("facts", [script["facts"], port]))
                while True:
                    order = channel.receive()
                    script["answers"](channel, order)

    patch = pytest.MonkeyPatch()
    patch.setattr(client, "_AGAIN_S", 0.01)
    patch.setattr(transfer, "_PULL_S", 0.5)
    with listen("127.0.0.1:0") as listener:
        thread = threading.Thread(target=play, args=(listener,))
        thread.start()
        with prefiller(port_of(listener)) as prefill:
            yield engine_of(model, prefill=prefill), prefill, script
            is_over.set()
        thread.join()
    patch.undo()


def a_ticket(alone, prompt):
    """Of all tokens but the last one, and its pieces as orders describe them."""
    request = alone.submit(prompt[:-1], max_new_tokens=0, hand_out=True)
    alone.run()
    ticket = alone.hand_out(request)
    return ticket, [[*p[:3], p.values.dtype.name, list(p.values.shape)] for p in ticket.pieces]


def ticket_order(number, ticket, **changes):
    facts, count, digest = (
        changes.get(name, getattr(ticket, name)) for name in ("facts", "num_tokens", "digest")
    )
    return Order("ticket", [number, dict(facts), count, digest])


def pieces(number, ticket, described):
    return [
        Order("pieces", [number, [one], 0], [piece.values])
        for piece, one in zip(ticket.pieces, described, strict=True)
    ]


LOST = "the prefill process at .* is gone: "
HERE = r"request \d+ computes its prompt here: "
BAD_ORDERS = {
    "nothing": (lambda n, t, d: [Order("ticket")], LOST + "prefill: ticket: expected the number"),
    "unknown": (lambda n, t, d: [Order("refused", [n + 9, "no"])], LOST + ".*that waits for it"),
    "refused": (lambda n, t, d: [Order("refused", [n, "no room"])], HERE + "no room"),
    "no text": (lambda n, t, d: [Order("refused", [n, 3])], LOST + ".* types int, str, got"),
    "what": (lambda n, t, d: [Order("step", [n])], LOST + "prefill: expected a ticket, .*'step'"),
    "facts": (
        lambda n, t, d: [ticket_order(n, t, facts={}), *pieces(n, t, d)],
        HERE + "ticket.digest of weights: expected .* got None",
    ),
    "other tokens": (
        lambda n, t, d: [ticket_order(n, t, digest="0"), *pieces(n, t, d)],
        HERE + "ticket.digest: expected .* got 0",
    ),
    "fewer": (
        lambda n, t, d: [ticket_order(n, t, num_tokens=3)],
        LOST + "prefill: num_tokens: expected 49, as asked, got 3",
    ),
    "two tickets": (
        lambda n, t, d: [ticket_order(n, t)] * 2,
        LOST + "prefill: ticket: expected one of a request, got a second one",
    ),
    "no ticket": (lambda n, t, d: pieces(n, t, d), LOST + "prefill: pieces: expected a ticket"),
    "huge": (
        lambda n, t, d: [Order("pieces", [n, [[0, 0, 0, "float32", [2**40] * 5]], 0])],
        LOST + "piece.shape: expected",
    ),
    "dtype": (
        lambda n, t, d: [Order("pieces", [n, [[0, 0, 0, "object", [1]]], 0])],
        LOST + "piece.dtype: expected float32, got object",
    ),
    "text": (
        lambda n, t, d: [Order("pieces", [n, ["x"], 0])],
        LOST + r"prefill: piece: expected \[pool, page, head, dtype, shape\], got x",
    ),
    "twice": (
        lambda n, t, d: pieces(n, t, d)[:1] * 2, LOST + "piece: expected each page of each head on"
    ),
    "another shape": (
        lambda n, t, d: [Order("pieces", [n, d[:1], 0], [t.pieces[0].values[:1]])],
        LOST + "piece.shape: expected",
    ),
    "no arrays": (
        lambda n, t, d: [Order("pieces", [n, d[:1], 0])],
        LOST + "prefill: pieces: expected 1 arrays, got 0",
    ),
    "nobody gives them": (
        lambda n, t, d: [Order("pieces", [n, d[:1], 77])],
        LOST + "arrays that it gives did not come within 0.5 s",
    ),
}  # fmt: skip


def test_what_makes_no_sense_costs_no_token(hostile, alone, want, caplog):
    """Whatever the prefill process says, the request computes its prompt, and a line says why."""
    engine, prefill, script = hostile
    ticket, described = a_ticket(alone, PROMPTS[0])
    for name, (orders_of, message) in BAD_ORDERS.items():

        def answers(channel, order, orders_of=orders_of):
            for one in orders_of(order.values[0], ticket, described):
                channel.send(one)

        script["answers"] = answers
        wait_for(lambda: prefill.channel is not None)
        caplog.clear()
        request = engine.submit(PROMPTS[0], draw_index=0, **ASKED)
        assert request.is_awaited, name
        engine.run()
        said = [record.getMessage() for record in caplog.records]
        assert any(re.fullmatch(message + ".*", line) for line in said), (name, said)
        assert request.tokens == want[0], name
        assert_all_free(engine)
    assert engine.num_received == 0


def test_what_comes_late_is_dropped(hostile, alone, want):
    """After a cancellation, and of weights that the engine has no more."""
    engine, prefill, script = hostile
    ticket, described = a_ticket(alone, PROMPTS[0])
    asked = queue.SimpleQueue()

    def answers(channel, order):
        if order.name == "prefill":
            asked.put((channel, order.values[0]))

    def send_all():
        channel, number = asked.get()
        for one in (ticket_order(number, ticket), *pieces(number, ticket, described)):
            channel.send(one)
        wait_for(lambda: not prefill._asked)

    script["answers"] = answers
    wait_for(lambda: prefill.channel is not None)
    request = engine.submit(PROMPTS[0], draw_index=0, **ASKED)
    engine.step()
    engine.cancel(request)
    send_all()
    engine.run()
    assert request.tokens == []
    assert_all_free(engine)
    request = engine.submit(PROMPTS[0], draw_index=0, **ASKED)
    engine.step()
    engine.update_weights(engine.params)
    send_all()
    engine.run()
    assert request.tokens == want[0]
    assert engine.num_received == 0
    assert_all_free(engine)


def test_wrong_processes_are_refused_at_the_start(model, alone):
    key = KEY.encode()
    with service(alone) as address:
        with pytest.raises(ValueError, match=f"prefill: {address} does not answer: the other side"):
            Prefiller(address, b"another key of these")
        with (
            prefiller(address) as prefill,
            pytest.raises(ValueError, match=r"prefill: pool 0: expected int8.* as the model here"),
        ):
            engine_of(model, prefill=prefill, kv_dtype="int8")
    with pytest.raises(ValueError, match=f"prefill: {address} does not answer: .*[Rr]efused"):
        Prefiller(address, key)
    with pytest.raises(ValueError, match="prefill: expected HOST:PORT, got 'here'"):
        Prefiller("here", key)
    with listen("127.0.0.1:0") as listener:
        with pytest.raises(ValueError, match=r"listen: 127.* cannot be listened to: .*in use"):
            listen(port_of(listener))
        with pytest.raises(ValueError, match="payloads: expected 'frames' or 'transfer', got 'x'"):
            PrefillService(listener, key, payloads="x")


@pytest.mark.parametrize(
    ("key", "arguments", "part"),
    [
        ("", ["prefill"], "JAX_PAGED_KEY: expected a key of at least 16 bytes"),
        (KEY, ["prefill", "--listen", "8100"], "listen: expected HOST:PORT, got '8100'"),
        (KEY, ["prefill", "--max-seqs", "0"], "max-seqs: expected an integer >= 1, got 0"),
        (KEY, ["prefill", "--listen", "192.0.2.1:1"], "listen: 192.0.2.1:1 cannot be listened to"),
        (KEY, ["serve", "--port", "0", "--prefill", "x"], "prefill: expected HOST:PORT, got 'x'"),
        (KEY, ["generate", "a", "--prefill", "127.0.0.1:1"], "prefill: 127.0.0.1:1 does not answ"),
        ("k", ["generate", "a", "--prefill", "127.0.0.1:1"], "JAX_PAGED_KEY: expected a key of at"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_the_weights_are_loaded(
    capsys, monkeypatch, key, arguments, part
):
    monkeypatch.setenv("JAX_PAGED_KEY", key)
    for module in (cli, command, prefill_command):
        monkeypatch.setattr(module, "open_checkpoint", lambda *_, **__: pytest.fail("loaded"))
        monkeypatch.setattr(module, "start_log", lambda level: None, raising=False)
    assert cli.main([*arguments, "--no-program-cache"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"jax-paged: error: {part}"), error


def test_a_service_goes_on_whatever_is_asked(model, alone, want):
    """Of strangers, of who has the key, and of who leaves in the middle."""
    key = KEY.encode()
    with service(alone) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 9)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        channel = open_channel(address, key)
        assert channel.receive().name == "facts"
        for values, arrays, why in (
            ([1], [], "not enough values"),
            ([2, 0], [np.zeros(0, np.int32)], "prompt"),
            ([3, 0], [np.full(9, 999, np.int32)], "prompt"),
            ([4, 0], [np.ones((2, 2), np.float32)], "order: expected a priority and i32"),
            ([9, float("inf")], [np.ones(2, np.int32)], "order: expected a priority and i32"),
            ([5, 0], [np.ones(400, np.int32)], "400 prompt tokens"),
        ):
            channel.send(Order("prefill", values, arrays))
            order = channel.receive()
            assert (order.name, order.values[0]) == ("refused", values[0])
            assert why in order.values[1]
        channel.send(Order("prefill", [6, 0], [np.asarray(PROMPTS[0], np.int32)]))
        channel.send(Order("cancel", [6]))
        channel.send(Order("cancel", [7]))
        channel.send(Order("prefill", [8, 0], [np.asarray(PROMPTS[1], np.int32)]))
        channel.close()
        for order in (Order("prefill", ["x"]), Order("cancel"), Order("step", [1])):
            channel = open_channel(address, key)
            channel.receive()
            channel.send(order)
            with pytest.raises(LinkError, match="closed"):
                channel.receive()
            channel.close()
        with prefiller(address) as prefill:
            engine = engine_of(model, prefill=prefill)
            requests = submit_all(engine)
            engine.run()
            assert [r.tokens for r in requests] == want
            assert engine.num_received == len(PROMPTS)
    alone.run()
    assert_all_free(alone)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_while_processes_come_and_go(model, alone, monkeypatch, seed):
    """Cancelled ones, little room in host memory, and a service that ends and is there again."""
    monkeypatch.setattr(client, "_AGAIN_S", 0.05)
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 250, rng.integers(1, 56)).tolist() for _ in range(30)]
    asked = [
        {"max_new_tokens": int(rng.integers(1, 9)), "temperature": 0.9, "draw_index": i}
        for i in range(120)
    ]
    prompts = [texts[rng.integers(len(texts))] for _ in asked]
    want = [alone.submit(p, **own) for p, own in zip(prompts, asked, strict=True)]
    alone.run()
    alone.clear_cache()
    with contextlib.ExitStack() as first:
        address = first.enter_context(service(alone, "transfer" if seed else "frames"))
        prefill = Prefiller(address, KEY.encode())
        engine = engine_of(model, prefill=prefill, num_pages=12, swap_pages=16)
        got = []
        for i, (prompt, own) in enumerate(zip(prompts, asked, strict=True)):
            got.append(engine.submit(prompt, priority=int(rng.integers(3)), **own))
            if rng.random() < 0.2:
                engine.cancel(got[rng.integers(len(got))])
            for _ in range(rng.integers(3)):
                engine.step()
            if i == 60:
                first.close()
    with service(alone, "frames", address):
        wait_for(lambda: prefill.channel is not None)
        before = engine.num_received
        got += [engine.submit(p, **own) for p, own in zip(prompts[:20], asked, strict=False)]
        engine.run()
        assert engine.num_received > before > 0
        wait_for(lambda: not prefill._asked)
        engine.step()
    prefill.close()
    for ours, theirs in zip(got, [*want, *want[:20]], strict=True):
        assert ours.tokens == theirs.tokens[: len(ours.tokens)]
        assert ours.reason in (theirs.reason, "cancelled")
    assert {r.reason for r in got} >= {"length", "cancelled"}
    assert_all_free(engine)
    alone.run()
    assert_all_free(alone)
