# SPDX-License-Identifier: Apache-2.0
"""K and V on their way between caches: bit for bit, whatever becomes of the messages."""

import dataclasses
import functools
import itertools
import json
import re
import tracemalloc
import zlib

import jax
import numpy as np
import pytest
from in_place import gathers_in_place
from tiers import first_of
from transfers import CHUNK, append, assert_same, make, open_row, tokens_of, what_arrives

from jax_paged import Status, transfer
from jax_paged.cache.transfer import (
    Geometry,
    Inbox,
    Message,
    Payload,
    Sender,
    Ticket,
    compress_positions,
    deliver,
    expand_positions,
)
from jax_paged.testing import is_in_place, pool_sized_ops


def test_runs_of_positions_expand_to_what_they_were():
    rng = np.random.default_rng(0)
    for size in [0, 1, 2, *rng.integers(3, 40, 60)]:
        positions = np.where(rng.random(size) < 0.3, -1, rng.integers(0, 6, size))
        for start in rng.integers(0, max(size - 4, 1), 2):  # some that follow each other
            positions[start : start + 4] = np.arange(len(positions[start : start + 4]))
        count, *pairs = compressed = compress_positions(positions)
        assert len(pairs) == 2 * count
        runs = list(zip(pairs[::2], pairs[1::2], strict=True))
        plain = [b + i if b >= 0 else -1 for b, n in runs for i in range(n)]
        assert plain == positions.tolist() == expand_positions(compressed).tolist()
        for (begin, length), (after, _) in itertools.pairwise(runs):
            assert begin == -1 or after != begin + length  # as few runs as there can be
        assert all(length == 1 for begin, length in runs if begin == -1)


@pytest.mark.parametrize(
    ("positions", "compressed"),
    [
        ([], [0]),
        ([7], [1, 7, 1]),
        ([-1, 0, 1], [2, -1, 1, 0, 2]),  # -1 is not the slot before 0
        ([-1, -1], [2, -1, 1, -1, 1]),
        ([3, 2, 1], [3, 3, 1, 2, 1, 1, 1]),
    ],
)
def test_positions_that_tempt(positions, compressed):
    assert compress_positions(positions) == compressed


@pytest.mark.parametrize(
    "wrong",
    [
        [], [1], [2, 0, 1], [1, 0, 0], [1, -2, 1], [1, -1, 2], [1, 2**31 - 2, 9], [-1], "1", None,
        [1, 0.5, 1], [1, "0", 1], [1, [0], 1], [1, 2**63, 1], [1, 2**70, 1], [1, True, 1], {"1": 2},
        np.array([1, 2**64 - 1, 1], np.uint64), np.array([1.0, 0, 1]), np.array([[1, 0, 1]]),
    ],
)  # fmt: skip
def test_a_position_map_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^positions: expected "):
        expand_positions(wrong)


@pytest.mark.parametrize("positions", [[-2], [0.5], [[1]]])
def test_positions_that_are_no_slots_are_refused(positions):
    with pytest.raises(ValueError, match=r"^positions: expected "):
        compress_positions(positions)


def test_a_part_of_a_position_map_costs_no_more_than_it_has():
    tracemalloc.start()
    part = expand_positions([2, 3, 1, 0, 2**31 - 1], begin=2**30, end=2**30 + 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.tolist() == [2**30 - 1, 2**30, 2**30 + 1]
    assert peak < 2**20
    with pytest.raises(ValueError, match=r"^positions: expected at least 5 tokens, got 4"):
        expand_positions([1, 0, 4], end=5)
    whole = [8, 9, 10, -1, 0, 1]
    for begin, end in itertools.combinations(range(7), 2):
        part = expand_positions(compress_positions(whole), begin=begin, end=end)
        assert part.tolist() == whole[begin:end]


SCALE = {"k_scale": np.float32(0.02), "v_scale": np.float32(0.02)}


@pytest.mark.parametrize(
    ("options", "layouts"),
    first_of(
        [
            ({}, ("HND", "NHD")),
            ({"dtype": "bfloat16"}, ("vllm5d", "HND")),
            ({"dtype": "int8", "head_dim": 16}, ("HND", "rpa")),
            ({"dtype": "float16"}, ("rpa", "NHD")),
            ({"dtype": "int8"}, ("HND", "HND")),
            ({"dtype": "float8_e4m3fn"}, ("NHD", "HND")),
            ({"dtype": "int8", "head_dim": 16}, ("HND", "vllm5d")),
            ({"dtype": "float8_e5m2"} | SCALE, ("HND", "HND")),
        ],
        3,
    ),
)
@pytest.mark.parametrize("in_bytes", [True, False])
def test_a_growing_row_arrives_bit_for_bit(options, layouts, in_bytes):
    source = make(layout=layouts[0], **options)
    target = make(layout=layouts[1], page_size=8, pages_per_seq=3, **options)
    source = append(source, 3, 9, seed=9)  # somebody else
    source = append(source, 1, 5, seed=0)
    target, inbox = append(target, 0, 3, seed=8), Inbox.create(target)
    before = tokens_of(target, 0)
    target, inbox, ticket = open_row(target, inbox, 2, 20)
    sender = Sender(source)
    sender.mark(1, Ticket.from_bytes(ticket.to_bytes()), 5)
    length = 5
    for grown in (0, 6, 1, 8):
        source = append(source, 1, grown, seed=grown) if grown else source
        length += grown
        for message in sender.messages(source, {1: length}, max_tokens=CHUNK):
            if in_bytes:
                message = Message.from_bytes(message.to_bytes())
            target, inbox, status = deliver(target, inbox, [message])
            assert status.tolist() == [Status.OK]
        assert int(target.table.seq_lens[2]) == length
    assert sender.is_sent(1)
    assert sender.messages(source, {1: 24}, max_tokens=CHUNK) == []
    assert_same(tokens_of(target, 2), tokens_of(source, 1))
    assert_same(tokens_of(target, 0), before)


def test_whatever_the_network_does_the_cache_is_right():
    """Messages are lost, doubled, held back and shuffled; refusals send the sender back."""
    rng = np.random.default_rng(5)
    source, lengths = make(), {0: 1, 1: 1}
    for row in lengths:
        source = append(source, row, 1, seed=row)
    target, inbox = append(make(), 3, 7, seed=33), Inbox.create(make())
    untouched = tokens_of(target, 3)
    sender, rows = Sender(source), {0: 2, 1: 0}
    for row, its in rows.items():
        target, inbox, ticket = open_row(target, inbox, its, 22)
        sender.mark(row, ticket, lengths[row])
    under_way, seen = [], set()
    for turn in range(400):
        row = int(rng.integers(0, 2))
        if lengths[row] < 22 and turn % 4 == 0:
            source = append(source, row, 1, seed=100 + turn)
            lengths[row] += 1
        messages = sender.messages(source, lengths, max_tokens=4)
        for message in what_arrives(rng, messages, under_way, 2):
            target, inbox, status = deliver(target, inbox, [message])
            seen.add(int(status[0]))
        for mine, its in rows.items():
            arrived = int(target.table.seq_lens[its])
            assert arrived == int(inbox.received[0][its].min())
            if rng.random() < 0.2:
                sender.rewind(mine, arrived)
            if turn % 20 == 0:
                assert_same(tokens_of(target, its), tokens_of(source, mine, arrived))
    assert seen == {Status.OK, Status.GAP}
    for mine, its in rows.items():
        assert int(target.table.seq_lens[its]) == 22
        assert_same(tokens_of(target, its), tokens_of(source, mine))
    assert_same(tokens_of(target, 3), untouched)


def one_message(source=None, row=1, count=6, **options):
    """A source with a row of 6 tokens, a target that waits for 8, and the first message."""
    source = append(make(), row, 6, seed=1) if source is None else source
    target = make()
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 8)
    sender = Sender(source)
    sender.mark(row, ticket, 6)
    (message,) = sender.messages(source, {row: count}, max_tokens=CHUNK, **options)
    return source, target, inbox, sender, message


def test_messages_of_a_transfer_that_is_over_are_refused():
    _, target, inbox, _, old = one_message()
    inbox = transfer.forget(inbox, [2])
    target, _ = target.release([2])
    target, inbox, _, _, status = transfer.prepare(target, inbox, [2], [8])  # the same pages
    assert status.tolist() == [Status.OK]
    zeros = np.asarray(target.k_pages)
    target, inbox, status = deliver(target, inbox, [old])
    assert status.tolist() == [Status.STALE_ROW]
    np.testing.assert_array_equal(target.k_pages, zeros)
    assert int(target.table.seq_lens[2]) == 0
    target, _ = target.release([2])
    _, _, status = deliver(target, inbox, [dataclasses.replace(old, id=1)])
    assert status.tolist() == [Status.STALE_ROW]  # a free row, even with the right id


def test_what_is_not_the_rows_own_changes_nothing():
    _, target, inbox, _, good = one_message()
    target, inbox, ticket = open_row(target, inbox, 0, 8)
    other = dataclasses.replace(good, row=0, id=ticket.id)  # with the slots of row 2
    late = dataclasses.replace(good, begin=2, end=6, positions=[1, 2, 4])
    far = dataclasses.replace(good, begin=5, end=11, positions=[1, 5, 6])
    twice = [good, good]
    for messages, expected in (
        ([good, other], [Status.OK, Status.BAD_ROW]),
        ([dataclasses.replace(good, row=9)], [Status.BAD_ROW]),
        ([dataclasses.replace(good, layer_begin=1)], [Status.BAD_ROW]),
        ([dataclasses.replace(good, positions=[1, 1, 6])], [Status.BAD_ROW]),
        ([late], [Status.GAP]),
        ([far], [Status.BAD_ROW]),
        (twice, [Status.BAD_ROW] * 2),
    ):
        before = jax.device_get((target, inbox))
        target, inbox, status = deliver(target, inbox, messages)
        assert status.tolist() == expected
        jax.tree.map(np.testing.assert_array_equal, jax.device_get((target, inbox)), before)
    target, inbox, status = deliver(target, inbox, [good])
    assert status.tolist() == [Status.OK]


def test_a_row_is_as_long_as_its_slowest_layer():
    source, target, inbox, sender, first = one_message(num_layers=2)
    target, inbox, status = deliver(target, inbox, [first])
    assert (status.tolist(), int(target.table.seq_lens[2])) == ([Status.OK], 0)
    (rest,) = sender.messages(source, {1: 6}, max_tokens=CHUNK, layer_begin=2, num_layers=1)
    target, inbox, status = deliver(target, inbox, [rest])
    assert (status.tolist(), int(target.table.seq_lens[2])) == ([Status.OK], 6)
    assert_same(tokens_of(target, 2), tokens_of(source, 1))


def test_a_second_copy_never_writes_over_what_came_after():
    """The row decodes on, is cut back and grows again: an old message must not come through."""
    source, target, inbox, sender, message = one_message()
    target, inbox, _ = deliver(target, inbox, [message])
    source = append(source, 1, 2, seed=2)
    target, inbox, _ = deliver(target, inbox, sender.messages(source, {1: 8}, max_tokens=CHUNK))
    target, _ = target.truncate([2], [4])
    target = append(target, 2, 5, seed=3)
    before = tokens_of(target, 2)
    target, inbox, status = deliver(target, inbox, [message])
    assert status.tolist() == [Status.OK]
    assert int(target.table.seq_lens[2]) == 9
    assert_same(tokens_of(target, 2), before)


def test_a_prefix_that_the_receiver_has_is_not_sent():
    source = append(make(), 1, 10, seed=1)
    target = append(make(), 2, 6, seed=4)
    prefix = tokens_of(target, 2)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 5)
    assert (ticket.begin, ticket.end) == (6, 11)
    sender = Sender(source)
    sender.mark(1, ticket, 10)
    (message,) = sender.messages(source, {1: 10}, max_tokens=CHUNK)
    assert (message.begin, message.end) == (6, 10)
    target, inbox, _ = deliver(target, inbox, [message])
    mine, theirs = tokens_of(target, 2), tokens_of(source, 1)
    assert_same(Payload(mine.k[:, :6], mine.v[:, :6]), prefix)
    assert_same(Payload(mine.k[:, 6:], mine.v[:, 6:]), Payload(theirs.k[:, 6:], theirs.v[:, 6:]))


def test_a_begin_beyond_the_row_sends_nothing_old():
    source = append(make(), 1, 3, seed=1)
    target = append(make(), 2, 6, seed=4)
    target, _, ticket = open_row(target, Inbox.create(target), 2, 5)
    sender = Sender(source)
    sender.mark(1, ticket, 3)
    assert sender.messages(source, {1: 3}, max_tokens=CHUNK) == []
    source = append(source, 1, 4, seed=2)
    (message,) = sender.messages(source, {1: 7}, max_tokens=CHUNK)
    assert (message.begin, message.end) == (6, 7)


def test_a_sender_refuses_by_name():
    source = append(make(), 1, 6, seed=1)
    _, _, ticket = open_row(make(), Inbox.create(make()), 2, 6)
    sender = Sender(source)
    text = "ticket: expected more than 6 tokens waited for: at least one is left to prefill, got 6"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        sender.mark(1, ticket, 6)
    sender.mark(1, ticket, 5)
    with pytest.raises(ValueError, match=r"^row: expected one receiver per row, got a second for"):
        sender.mark(1, ticket, 5)
    with pytest.raises(ValueError, match=r"^token: expected one in \[0, 6\], got 7"):
        sender.rewind(1, 7)
    sender.unmark(1)
    with pytest.raises(ValueError, match=r"^row: expected a marked row, got 1"):
        sender.rewind(1, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_degree", 2), ("pipeline_degree", 2), ("stage", 1), ("num_kv_heads", [4]),
        ("head_dim", [16]), ("v_head_dim", [16]), ("dtype", ["bfloat16"]),
        ("scales", ["per token"]), ("layer_kinds", [6, 6, 6]),
    ],
)  # fmt: skip
def test_caches_that_differ_are_refused_by_name(field, value):
    _, _, ticket = open_row(make(), Inbox.create(make()), 2, 6)
    other = dataclasses.replace(ticket.geometry, **{field: value})
    mine = getattr(ticket.geometry, field)
    text = f"{field}: expected {value}, as the receiver has it, got {mine}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Sender(make()).mark(1, dataclasses.replace(ticket, geometry=other), 0)


def test_given_scales_are_part_of_the_geometry():
    options = {"dtype": "int8", "k_scale": 0.5, "v_scale": 0.5}
    one, two, three = (make(**options | {"k_scale": s}) for s in (0.5, 0.5, 0.25))
    assert Geometry.create(one) == Geometry.create(two) != Geometry.create(three)


def test_damaged_bytes_are_refused():
    *_, message = one_message()
    data = message.to_bytes()
    rng = np.random.default_rng(0)
    for _ in range(50):
        place = int(rng.integers(0, len(data)))
        broken = bytearray(data)
        broken[place] ^= 1 << int(rng.integers(0, 8))
        with pytest.raises(ValueError, match=r"^message: expected "):
            Message.from_bytes(bytes(broken))
    for cut in (data[:-1], data[:9], b""):
        with pytest.raises(ValueError, match=r"^message: expected "):
            Message.from_bytes(cut)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": np.zeros((3, CHUNK, 2, 16), "f4")}, "payload.k: expected shape "),
        ({"v": np.zeros((3, CHUNK, 2, 8), "f2")}, "payload.v: expected dtype float32, got float16"),
        (
            {"k_scale": np.zeros((3, CHUNK, 2), "f4")},
            "payload.k_scale: expected None, got an array",
        ),
    ],
)
def test_a_payload_that_does_not_fit_is_named(change, text):
    _, target, inbox, _, message = one_message()
    wrong = dataclasses.replace(message, payload=message.payload._replace(**change))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        deliver(target, inbox, [wrong])


def reframed(data, change):
    """The bytes of another header, with the right CRC."""
    end = 16 + int.from_bytes(data[8:16], "little")
    header = json.loads(data[16:end])
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = data[:8] + len(text).to_bytes(8, "little") + text + data[end:-4]
    return whole + zlib.crc32(whole).to_bytes(4, "little")


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(header):
        for key in path:
            header = header[key]
        header[last] = value

    return change


def drop(*path):
    def change(header):
        for key in path[:-1]:
            header = header[key]
        del header[path[-1]]

    return change


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h: b"\xff\xfe", "message: expected a header in JSON, got none: "),
        (lambda h: b"[" * 100000, "message: expected a header in JSON, got none: "),
        (lambda h: [1], "message header: expected an object, got [1]"),
        (put("arrays", 3), "message header.arrays: expected a list, each entry None or [dtype, "),
        (put("more", 3), "message header: expected holds, fields, arrays, got 'more' as well"),
        (drop("fields"), "message header.fields: expected an object, got none"),
        (put("fields", []), "message header.fields: expected an object, got []"),
        (put("arrays", []), "message: expected 4 arrays, got 0"),
        (put("arrays", 0, ["object", [1]]), "message header.arrays: expected a list, each entry"),
        (put("arrays", 0, ["float32", [-1]]), "message header.arrays: expected a list, each entry"),
        (put("arrays", 0, ["float32", [2**62] * 8]), "message header.arrays: expected a list"),
        (put("arrays", 0, ["float32", [HUGE] * 8]), "message: expected arrays that end before"),
        (put("arrays", 0, None), "message: expected "),
        (drop("fields", "row"), "message.row: expected an integer from 0 to 2147483647, got none"),
        (put("fields", "row", 2**31), "message.row: expected an integer from 0 to 2147483647, got"),
        (put("fields", "row", -1), "message.row: expected an integer"),
        (put("fields", "row", True), "message.row: expected an integer"),
        (put("fields", "id", None), "message.id: expected an integer"),
        (put("fields", "begin", "a"), "message.begin: expected an integer"),
        (put("fields", "end", 1.5), "message.end: expected an integer"),
        (put("fields", "end", 0), "message: expected an end behind begin=0, got 0"),
        (put("fields", "layer_begin", 2**40), "message.layer_begin: expected an integer"),
        (put("fields", "color", 1), "message: expected id, row, begin, end, positions, gro"),
        (put("fields", "positions", [1, 0, HUGE]), "positions: expected 6 slots, one for each to"),
        (put("fields", "positions", {"a": 1}), "positions: expected [n, begin, length, …]"),
        (put("fields", "positions", ["a"]), "positions: expected [n, begin, length, …]"),
    ],
)  # fmt: skip
def test_a_right_crc_over_a_wrong_header_is_a_clear_error(change, text):
    *_, message = one_message()
    data = reframed(message.to_bytes(), change)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"^{re.escape(text)}") as caught:
        Message.from_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + 2**20
    tracemalloc.stop()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop("fields", "geometry", "stage"), "geometry.stage: expected an integer from 0"),
        (put("fields", "geometry", 3), "ticket.geometry: expected an object, got 3"),
        (put("fields", "geometry", "head_dim", [0]), "geometry.head_dim: expected a list, each "),
        (put("fields", "geometry", "dtype", [5]), "geometry.dtype: expected a list, each entry a"),
        (put("fields", "geometry", "scales", ["x" * 65]), "geometry.scales: expected a list, each"),
        (put("fields", "geometry", "dtype", []), "geometry.dtype: expected one for each of 1 gro"),
        (put("fields", "geometry", "layer_kinds", ["a"]), "geometry.layer_kinds: expected a list"),
        (put("fields", "geometry", "layer_kinds", [[]]), "geometry.layer_kinds: expected a list"),
        (put("fields", "geometry", "num_layers", 4), "geometry.layer_kinds: expected 4 of them, "),
        (put("fields", "end", 2**31), "ticket.end: expected an integer from 0 to 2147483647, got"),
        (put("fields", "begin", HUGE), "positions: expected none before token 2147483647, got 0"),
        (
            put("fields", "positions", [[1, 0, 9]]),
            "positions: expected none before token 0, got -1",
        ),
        (put("fields", "positions", []), "positions: expected a list for each of 1 groups, got []"),
        (put("fields", "positions", [1, 0, 8]), "positions: expected a list for each of 1 groups"),
        (put("fields", "positions", [3]), "positions: expected [n, begin, length, …] with n pairs"),
        (put("fields", "payload", 1), "ticket: expected id, row, begin, end, positions, geometry"),
    ],
)
def test_a_ticket_with_a_wrong_header_is_a_clear_error(change, text):
    *_, ticket = open_row(make(), Inbox.create(make()), 2, 8)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        Ticket.from_bytes(reframed(ticket.to_bytes(), change))


def test_frames_say_what_they_hold():
    *_, message = one_message()
    *_, ticket = open_row(make(), Inbox.create(make()), 2, 8)
    with pytest.raises(ValueError, match=r"^ticket: expected bytes of a ticket, got those of a me"):
        Ticket.from_bytes(message.to_bytes())
    with pytest.raises(
        ValueError, match=r"^message: expected bytes of a message, got those of a t"
    ):
        Message.from_bytes(ticket.to_bytes())
    with pytest.raises(ValueError, match=r"^ticket: expected bytes, got str"):
        Ticket.from_bytes("ticket")


def test_a_ticket_that_promises_a_billion_tokens_costs_the_sender_nothing():
    source = append(make(), 1, 6, seed=1)
    *_, ticket = open_row(make(), Inbox.create(make()), 2, 8)
    sender = Sender(source)
    sender.mark(1, dataclasses.replace(ticket, positions=[[1, 0, HUGE]], end=HUGE), 6)
    sender.messages(source, {1: 5}, max_tokens=5)  # compiled
    tracemalloc.start()
    (message,) = sender.messages(source, {1: 6}, max_tokens=5)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert message.positions == [1, 5, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"row": 2**31}, {"row": "a"}, {"begin": None}, {"begin": 1.5}, {"id": -1},
        {"positions": [1, 0, HUGE]}, {"positions": 3}, {"end": 7}, {"layer_begin": [0]},
    ],
)  # fmt: skip
def test_a_message_checks_itself(fields):
    *_, good = one_message()
    with pytest.raises(ValueError, match=r"^(message|positions)"):
        dataclasses.replace(good, **fields)


def test_messages_of_different_kinds_are_refused_together():
    _, target, inbox, _, good = one_message()
    scale = np.ones(good.payload.k.shape[:3], "f4")
    other = good.payload._replace(k_scale=scale, v_scale=scale)
    other = dataclasses.replace(good, row=0, payload=other)
    with pytest.raises(ValueError, match=r"^messages: expected arrays of the same kinds in all"):
        deliver(target, inbox, [good, other])


def test_more_layers_than_there_are_are_refused():
    _, target, inbox, _, good = one_message()
    twice = Payload(*(x if x is None else np.concatenate([x, x]) for x in good.payload))
    before = jax.device_get((target, inbox))
    with pytest.raises(ValueError, match=r"^payload.k: expected at most 3 layers, got 6"):
        deliver(target, inbox, [dataclasses.replace(good, payload=twice)])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((target, inbox)), before)


def test_prepare_is_all_or_nothing_and_refuses_what_waits():
    state, inbox = make(), Inbox.create(make())
    state, inbox, ids, slots, status = transfer.prepare(state, inbox, [1, -1, 0], [5, 9, 8])
    assert ids.tolist() == [0, -1, 1]
    assert status.tolist() == [0, 0, 0]
    assert slots[:, 0, :9].tolist() == [
        [0, 1, 2, 3, 4, -1, -1, -1, -1], [-1] * 9, [8, 9, 10, 11, 12, 13, 14, 15, -1],
    ]  # fmt: skip
    for rows, counts, expected in (
        ([2, 1], [4, 4], [Status.OK, Status.BAD_ROW]),  # row 1 waits
        ([2, 3], [4, 0], [Status.OK, Status.BAD_ROW]),
        ([2, 3], [4, 25], [Status.OK, Status.ROW_FULL]),
        ([2, 4], [4, 1], [Status.OK, Status.BAD_ROW]),
    ):
        after, inbox_after, ids, slots, status = transfer.prepare(state, inbox, rows, counts)
        assert status.tolist() == expected
        assert ids.tolist() == [-1, -1]
        assert (np.asarray(slots) == -1).all()
        jax.tree.map(np.testing.assert_array_equal, (after, inbox_after), (state, inbox))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_receiving_is_in_place(dtype):
    target = make(num_pages=512, dtype=dtype)
    inbox, zeros, rows = Inbox.create(target), np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    payload = transfer.read(target, rows, zeros, zeros, max_tokens=CHUNK)
    slots = np.full((2, CHUNK), -1, np.int32)
    step = jax.jit(transfer.receive, donate_argnums=(0, 1))
    compiled = step.lower(target, inbox, rows, zeros, zeros, zeros, slots, payload).compile()
    assert is_in_place(compiled, target.k_pages), pool_sized_ops(compiled, target.k_pages)


@gathers_in_place
def test_reading_does_not_copy_the_pool():
    source = make(num_pages=512)
    step = jax.jit(functools.partial(transfer.read, max_tokens=CHUNK))
    compiled = step.lower(source, *np.array([(0, 1), (0, 0), (3, 4)], np.int32)).compile()
    assert not pool_sized_ops(compiled, source.k_pages)


@pytest.mark.parametrize("group", [1, -1, 0.5])
def test_a_group_that_is_not_there_is_refused_by_name(group):
    _, target, inbox, _, good = one_message()
    text = f"^group: expected one of 1 groups of layers, got {group}$"
    with pytest.raises(ValueError, match=text):
        transfer.read(target, [0], [0], [1], max_tokens=1, group=group)
    with pytest.raises(ValueError, match=text):
        transfer.receive(
            target, inbox, [0], [0], [0], [1], [[0]], good.payload, group=group
        )  # fmt: skip


def test_what_is_no_state_is_refused_by_name():
    for call in (Inbox.create, Sender, lambda state: transfer.prepare(state, None, [0], [1])):
        with pytest.raises(ValueError, match=r"^state: expected a KVState, got a PageTable$"):
            call(make().table)
