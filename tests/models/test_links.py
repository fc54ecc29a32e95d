# SPDX-License-Identifier: Apache-2.0
"""Links between processes: what they refuse, orders as bytes, and how a job ends."""

import contextlib
import functools
import socket
import struct
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models import cli
from jax_paged.models.distributed import processes as job
from jax_paged.models.distributed.link import (
    MAX_FRAME_BYTES,
    Link,
    LinkError,
    accept,
    connect,
    read_key,
)
from jax_paged.models.distributed.orders import Order, decode, encode
from jax_paged.models.distributed.processes import EXIT_LOST, Processes, start_processes

KEY, OTHER_KEY = b"k" * 16, b"o" * 16
HEAD = 4 + 32  # length and HMAC of a frame


@pytest.fixture
def pair():
    """Connected sockets, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make():
            both = socket.socketpair()
            for sock in both:
                stack.enter_context(sock)
            return both

        yield make


@pytest.fixture(autouse=True)
def _without_tcp(monkeypatch):
    monkeypatch.setattr("jax_paged.models.distributed.link._send_at_once", lambda sock: None)


def linked(pair, key=KEY, other_key=KEY, silence=5.0):
    """The links of process 3 and of the first one, or what went wrong."""
    up, down = pair()
    made = []

    def answer():
        try:
            made.append(accept(down, key, silence=silence))
        except LinkError as error:
            made.append(error)
            down.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        made.insert(0, connect(up, other_key, 3, silence=silence))
    except LinkError as error:
        made.insert(0, error)
        up.close()
    thread.join()
    return made


def frames(pair, *payloads):
    """A side that receives, a function that puts raw bytes before it, and frames as bytes."""
    (writing, seen), (raw, reading) = pair(), pair()
    sender = Link(writing, KEY, OTHER_KEY)
    for payload in payloads:
        sender.send(payload)
    reading.settimeout(1)
    bytes_ = [seen.recv(HEAD + len(payload), socket.MSG_WAITALL) for payload in payloads]
    return Link(reading, OTHER_KEY, KEY), raw, bytes_


def test_frames_arrive_as_they_were_sent(pair):
    mine, (theirs, number) = linked(pair)
    assert number == 3
    large = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    told = []
    thread = threading.Thread(target=lambda: told.append(mine.receive()))
    thread.start()
    theirs.send(b"a", memoryview(large), b"z")
    thread.join()
    assert told == [b"a" + large.tobytes() + b"z"]
    mine.send()
    mine.send(b"next")
    assert (theirs.receive(), theirs.receive()) == (b"", b"next")
    mine.close()
    with pytest.raises(LinkError, match="closed"):
        theirs.receive()


def test_who_does_not_know_the_key_gets_no_link(pair):
    mine, theirs = linked(pair, other_key=OTHER_KEY)
    assert str(mine) == "the other side does not know the key"
    assert isinstance(theirs, LinkError)
    up, down = pair()
    up.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything\r\n\r\n")
    with pytest.raises(LinkError, match="another protocol"):
        accept(down, KEY, silence=1)


@pytest.mark.parametrize("side", ["connects", "accepts"])
def test_a_recorded_connection_is_worth_nothing(pair, side):
    """All bytes of one side, played to the other side of a new connection."""
    (up, near), (far, down) = pair(), pair()
    said = {"connects": b"", "accepts": b""}

    def pass_on(source, target, who):
        with contextlib.suppress(OSError):
            while got := source.recv(4096):
                said[who] += got
                target.sendall(got)

    threads = [
        threading.Thread(target=pass_on, args=(near, far, "connects")),
        threading.Thread(target=pass_on, args=(far, near, "accepts")),
        threading.Thread(target=lambda: accept(down, KEY, silence=5)[0].send(b"order")),
    ]
    for thread in threads:
        thread.start()
    mine = connect(up, KEY, 1, silence=5)
    assert mine.receive() == b"order"
    mine.send(b"beat")
    for sock in (up, down):
        sock.shutdown(socket.SHUT_WR)
    for thread in threads:
        thread.join()
    assert min(map(len, said.values())) > HEAD
    again, victim = pair()
    again.sendall(said[side])
    answer = {"connects": accept, "accepts": functools.partial(connect, number=1)}[side]
    with pytest.raises(LinkError, match="does not know the key"):
        answer(victim, KEY, silence=1)


def changed(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("place", [3, 4, HEAD - 1, HEAD, HEAD + 9])
def test_a_changed_frame_is_refused(pair, place):
    link, raw, (frame,) = frames(pair, b"0123456789")
    raw.sendall(changed(frame, place) + b"\0")  # it may claim to be longer by one
    with pytest.raises(LinkError, match="frame 0 is not authentic"):
        link.receive()


def test_frames_out_of_turn_are_refused(pair):
    for order in ([0, 0], [1], [0, 2], [0, 1, 0]):
        link, raw, made = frames(pair, b"one", b"two", b"three")
        raw.sendall(b"".join(made[i] for i in order))
        for i in order[:-1]:
            assert link.receive() == (b"one", b"two")[i]
        with pytest.raises(LinkError, match=f"frame {len(order) - 1} is not authentic"):
            link.receive()


def test_a_frame_of_the_other_direction_is_refused(pair):
    """As one who sends a process its own frames would like."""
    mine, (theirs, _) = linked(pair)
    mine.send(b"beat")
    reflected = theirs._socket.recv(HEAD + 4, socket.MSG_WAITALL)
    theirs._socket.sendall(reflected)
    with pytest.raises(LinkError, match="not authentic"):
        mine.receive()


def test_a_frame_that_is_too_long_or_ends_early_is_refused(pair):
    link, raw, _ = frames(pair)
    raw.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1) + bytes(32))
    with pytest.raises(LinkError, match=f"{MAX_FRAME_BYTES + 1} bytes came; at most"):
        link.receive()
    link, raw, (frame,) = frames(pair, b"0123456789")
    raw.sendall(frame[:-1])
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkError, match="closed"):
        link.receive()
    much = memoryview(np.zeros(MAX_FRAME_BYTES, np.uint8))
    with pytest.raises(ValueError, match=f"frame: expected at most {MAX_FRAME_BYTES} bytes"):
        link.send(much, b"1")


def test_silence_ends_a_link(pair):
    mine, (theirs, _) = linked(pair, silence=0.2)
    with pytest.raises(LinkError, match=r"nothing was heard of it for 0\.2 s"):
        mine.receive()
    with pytest.raises(LinkError, match="takes no more"):
        theirs.send(bytes(1 << 24))


def test_the_key_comes_from_a_file_or_the_environment(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    assert read_key({"JAX_PAGED_KEY_FILE": str(path)}) == b"0123456789abcdef"
    assert read_key({"JAX_PAGED_KEY": "x" * 16}) == b"x" * 16
    for environment, text in (
        ({}, "JAX_PAGED_KEY: expected a key of at least 16 bytes .*, got none"),
        ({"JAX_PAGED_KEY": "short"}, "JAX_PAGED_KEY: expected .*, got 5 bytes"),
    ):
        with pytest.raises(ValueError, match=text):
            read_key(environment)


def test_a_job_is_not_begun_without_key_or_place(monkeypatch):
    monkeypatch.delenv("JAX_PAGED_KEY", raising=False)
    monkeypatch.delenv("JAX_PAGED_KEY_FILE", raising=False)
    with pytest.raises(ValueError, match="JAX_PAGED_KEY: expected a key"):
        start_processes("localhost:1234", 2, 0)
    monkeypatch.setenv("JAX_PAGED_KEY", "x" * 16)
    for place in ("localhost", ":1234", "localhost:", "localhost:x", "localhost:65536"):
        with pytest.raises(ValueError, match=f"coordinator: expected HOST:PORT, got '{place}'"):
            start_processes(place, 2, 0)


def test_commands_say_which_process_of_a_job_they_are(capsys):
    for arguments, text in (
        (["--process-id", "0"], "coordinator: expected HOST:PORT, got None"),
        (["--coordinator", "a:1"], "num-processes: expected an integer >= 0, got None"),
        (["--coordinator", "a:1", "--num-processes", "2"], "process-id: expected an integer >= 0"),
    ):
        assert cli.main(["generate", "a", *arguments, "--no-program-cache"]) == 2
        assert text in capsys.readouterr().err


ARRAYS = (
    np.arange(6, dtype=np.int32).reshape(2, 3), np.array(True), np.zeros((0, 4), np.float32),
    np.asarray(jnp.full((3,), 1.5, jnp.bfloat16)), np.ones((4, 2), np.uint32)[::2],
)  # fmt: skip


def message(order, number=0):
    return b"".join(bytes(part) for part in encode(order, number))


def test_orders_come_out_as_they_went_in():
    order, number = decode(message(Order("step", (1, "x", {"a": None}), ARRAYS), 7))
    assert (order.name, order.values, number) == ("step", [1, "x", {"a": None}], 7)
    for got, want in zip(order.arrays, ARRAYS, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def headed(head, rest=b""):
    return struct.pack(">I", len(head)) + head + rest


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (b"\0\0", "expected a head, got 2 bytes"),
        (struct.pack(">I", 2**31), "a head of at most"),
        (headed(b"{"), "a head of JSON"),
        (headed(b"[" * 10**5), "a head of JSON"),
        (headed(b'{"number": 0, "name": "a", "values": []}'), "a head of JSON"),
        (headed(b'{"number": "0", "name": "a", "values": [], "arrays": []}'), "a number, a name"),
    ],
)
def test_messages_that_are_no_orders_are_refused(bad, text):
    with pytest.raises(ValueError, match=text):
        decode(bad)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        ('["object", [1]]', "a head of JSON"),
        ('["float64", [1]]', "a head of JSON"),
        ('["int32", [-1]]', "sizes of an array"),
        ('["int32", [true]]', "sizes of an array"),
        ('["int32", [1, 1, 1, 1, 1, 1, 1, 1, 1]]', "sizes of an array"),
        ('["int32", [4294967296, 4294967296]]', "an array of"),
        ('["int32", [3]]', "an array of 12 bytes, got 8"),
        ('["int32", [1]]', "no byte behind its arrays, got 4"),
    ],
)
def test_arrays_that_do_not_fit_their_message_are_refused(array, text):
    head = f'{{"number": 0, "name": "a", "values": [], "arrays": [{array}]}}'.encode()
    with pytest.raises(ValueError, match=text):
        decode(headed(head, bytes(8)))


def test_an_order_of_another_dtype_is_not_sent():
    with pytest.raises(ValueError, match=r"step: expected arrays of bool, int8, .*got float64"):
        encode(Order("step", (), [np.zeros(1)]), 0)


# The threads that would have ended the process.
ends = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def left(monkeypatch):
    """Exit codes of processes of a job, whose threads end in their place."""
    codes = []

    def leave(code):
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(job, "leave_with", leave)
    return codes


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def processes(pair, **options):
    mine, (theirs, _) = linked(pair, **options)
    return Processes(0, 2, {1: theirs}), Processes(1, 2, {0: mine})


def test_orders_go_to_the_others_until_the_first_one_is_done(pair, left):
    first, other = processes(pair)
    first.send(Order("step", (1,)))
    first.send(Order("keep", (), [np.arange(3)[:0].astype(np.int32)]))
    assert [other.receive().name for _ in range(2)] == ["step", "keep"]
    values, (array,) = first.share([1, "a"], [np.arange(2, dtype=np.int32)])
    assert other.share([], [])[0] == values == [1, "a"]
    assert array.tolist() == [0, 1]
    thread = threading.Thread(target=other.close)
    thread.start()
    first.close()
    thread.join()
    assert other.receive() is None
    assert left == []


def test_the_first_process_waits_where_others_meet_it(pair, left):
    first, other = processes(pair)
    met = []
    thread = threading.Thread(target=lambda: [met.append(first.meet()) for _ in range(2)])
    thread.start()
    for count in range(2):
        time.sleep(0.1)
        assert len(met) == count
        other.meet()
        wait_for(lambda count=count: len(met) > count)
    thread.join()
    thread = threading.Thread(target=other.close)
    thread.start()
    first.close()
    thread.join()
    assert left == []


@ends
def test_an_order_with_another_number_ends_all(pair, left, capsys):
    first, other = processes(pair)
    first.send(Order("step"))
    first._num_sent += 1
    first.send(Order("keep"))
    wait_for(lambda: len(left) == 2)
    line = "jax-paged: error: process 1 expected order 1, got 2 (keep)\n"
    assert capsys.readouterr().err == line * 2
    assert left == [EXIT_LOST] * 2
    assert other.receive().name == "step"


@ends
def test_a_message_that_is_no_order_ends_all(pair, left, capsys):
    first, _ = processes(pair)
    first._links[1].send(b"o", headed(b"{"))
    wait_for(lambda: len(left) == 2)
    assert capsys.readouterr().err.count("process 1 cannot read what process 0 has sent") == 2


@ends
def test_a_process_that_is_gone_ends_the_others(pair, left, capsys):
    first, other = processes(pair)
    other._is_over.set()  # as if it were dead: nothing comes any more
    other._links[0].close()
    said = []

    def is_told():  # the other one may have said that process 0 is gone, and before this one
        said.append(capsys.readouterr().err)
        return "process 1 is gone: its connection is closed" in "".join(said)

    wait_for(is_told)
    wait_for(lambda: EXIT_LOST in left)
    first._is_over.set()


@ends
def test_a_silent_process_ends_the_others(pair, left, capsys, monkeypatch):
    monkeypatch.setattr(job, "BEAT_S", 3600)
    processes(pair, silence=0.3)
    wait_for(lambda: len(left) == 2)
    assert "is gone: nothing was heard of it for 0.3 s" in capsys.readouterr().err
