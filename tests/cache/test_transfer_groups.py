# SPDX-License-Identifier: Apache-2.0
"""Latent rows, and states of several groups, on their way between caches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import gathers_in_place
from support_cells.stored import Known
from tiers import first_of
from transfers import (
    CHUNK,
    append,
    assert_same,
    assert_same_row,
    make,
    open_row,
    tokens_of,
    what_arrives,
)

from jax_paged import Status, transfer
from jax_paged.cache.transfer import (
    Geometry,
    Inbox,
    Message,
    Payload,
    Sender,
    Ticket,
    deliver,
)
from jax_paged.testing import is_in_place, pool_sized_ops

LATENT = {"layer_kinds": ("mla",) * 3, "latent_dim": 24}
GROUPS = {"layer_kinds": ("full", 6, "mla", 6, "full"), "latent_dim": 24}
WINDOW = 6
KINDS = {
    "latent int8": LATENT | {"dtype": "int8", "kv_scale": np.float32([0.02, 0.03, 0.04])},
    "groups": GROUPS,
    "a window": {"layer_kinds": (6, 6)},
    "latent": LATENT,
    "latent bf16": LATENT | {"dtype": "bfloat16"},
    "latent fp8": LATENT | {"dtype": "float8_e4m3fn"},
    "groups, a window first": {"layer_kinds": (6, "full", 9)},
    "groups int8": {"layer_kinds": ("full", 6), "dtype": "int8", "layout": "NHD"},
    "groups rpa": {"layer_kinds": (6, "full"), "dtype": "bfloat16", "layout": "rpa"},
}


def sent(sender, source, target, inbox, length, in_bytes=False, **options):
    """Everything that the sender has for the receiver, of row 1 with so many tokens."""
    messages = sender.messages(source, {1: length}, max_tokens=CHUNK, **options)
    for message in messages:
        if in_bytes:
            message = Message.from_bytes(message.to_bytes())
        target, inbox, status = deliver(target, inbox, [message])
        assert status.tolist() == [Status.OK]
    return target, inbox, messages


@pytest.mark.parametrize("options", first_of(KINDS.values(), 2), ids=KINDS)
@pytest.mark.parametrize("in_bytes", [True, False])
def test_a_growing_row_arrives_bit_for_bit_and_goes_on(options, in_bytes):
    source = make(**options | {"pages_per_seq": 8})
    target = make(**options | {"page_size": 8, "pages_per_seq": 4})
    source = append(source, 3, 9, seed=8)  # somebody else, who is in both
    source = append(source, 1, 5, seed=0)
    target, inbox = append(target, 0, 9, seed=8), Inbox.create(target)
    target, inbox, ticket = open_row(target, inbox, 2, 20)
    sender = Sender(source)
    sender.mark(1, Ticket.from_bytes(ticket.to_bytes()), 5)
    length = 5
    for grown in (0, 3, 3, 1, 8):
        source = append(source, 1, grown, seed=grown) if grown else source
        length += grown
        target, inbox, _ = sent(sender, source, target, inbox, length, in_bytes)
    assert sender.is_sent(1)
    assert_same_row(target, 2, source, 1, 20)
    assert_same_row(target, 0, source, 3, 9)
    for seed in (1, 2, 3):  # both go on, and windows slide
        source, target = (append(x, row, 4, seed) for x, row in ((source, 1), (target, 2)))
        assert_same_row(target, 2, source, 1)


@pytest.mark.parametrize("name", first_of(["groups int8", "latent", "groups"], 1))
def test_every_layer_may_come_by_itself(name):
    source = append(make(**KINDS[name]), 1, 6, seed=1)
    target = make(**KINDS[name])
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 8)
    sender = Sender(source)
    sender.mark(1, ticket, 6)
    last = source.layers[-1]
    for layer in source.layers:
        target, inbox, (message,) = sent(
            sender, source, target, inbox, 6, layer_begin=layer, num_layers=1
        )
        assert (message.group, message.layer_begin) == source.find(layer)
        lengths = {int(group.table.seq_lens[2]) for group in target.groups}
        assert lengths == {6 if layer == last else 0}
    assert_same_row(target, 2, source, 1, 6)
    source = append(source, 1, 2, seed=2)
    target, inbox, _ = sent(sender, source, target, inbox, 8)
    assert_same_row(target, 2, source, 1, 8)


@pytest.mark.parametrize("feature", first_of(["groups", "latent", "slid rows"], 1))
def test_whatever_the_network_does_the_caches_are_right(feature):
    """As for plain states; the dict model says what rows hold when all has come."""
    rng = np.random.default_rng(5)
    source, target = Known(feature), Known(feature)
    source.slides = target.slides = feature != "latent"
    state, inbox = target.state, Inbox.create(target.state)
    sender, total, rows = Sender(source.state), 22, {1: 2, 2: 1}
    for row, its in rows.items():
        source.grow([row], [1])
        state, inbox, ticket = open_row(state, inbox, its, total)
        sender.mark(row, ticket, 1)
    under_way, seen = [], set()
    for turn in range(1200):
        row = int(rng.integers(1, 3))
        it = state.groups[0].table.seq_lens
        # The sender's windows slide as it grows: what has slid away must have come.
        arrived = int(min(x[rows[row]].min() for x in inbox.received))
        count = len(source.rows[row])
        if count < total and turn % 4 == 0 and arrived >= count - 3:
            source.grow([row], [1])
        lengths = {row: len(source.rows[row]) for row in rows}
        messages = sender.messages(source.state, lengths, max_tokens=4)
        for message in what_arrives(rng, messages, under_way, 3):
            state, inbox, status = deliver(state, inbox, [message])
            seen.add(int(status[0]))
        for mine, its in rows.items():
            if rng.random() < 0.05:
                sender.rewind(mine, int(min(x[its].min() for x in inbox.received)))
        if (it[1:3] == total).all():
            break
    assert seen == {Status.OK, Status.GAP}
    target.state = state
    target.rows |= {its: list(source.rows[mine]) for mine, its in rows.items()}
    assert [len(target.rows[its]) for its in rows.values()] == [total, total]
    target.check()
    target.grow([1, 2], [4, 3])
    target.check()


# Long rows and windows

LONG = {
    "layer_kinds": ("full", WINDOW), "num_pages": {"full": 24, WINDOW: 8},
    "pages_per_seq": {"full": 16, WINDOW: 4},
}  # fmt: skip


def long_row(count=50):
    """Row 1 of so many tokens: its window has slid through a few pages."""
    source = make(**LONG)
    for seed in range(count // 5):
        source = append(source, 1, 5, seed)
    assert int(source.groups[1].table.windows.slot_offset[1]) > 0
    return source


def test_a_row_whose_windows_have_slid_goes_into_the_pages_of_a_window():
    """Of the layers with a window only what the next token sees travels, and takes room."""
    source = long_row()
    target = make(**LONG)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 55)
    assert ticket.begins == [0, 48]
    assert int(target.groups[1].table.pages_held[2]) == 2
    sender = Sender(source)
    sender.mark(1, ticket, 50)
    travelled = {0: 0, 1: 0}
    source = append(source, 1, 5, seed=77)
    while not sender.is_sent(1):
        assert int(target.groups[0].table.seq_lens[2]) == 0
        target, inbox, messages = sent(sender, source, target, inbox, 55)
        for message in messages:
            travelled[message.group] += message.end - message.begin
    assert travelled == {0: 55, 1: 7}
    assert target.groups[1].table.windows.slot_offset[2] == 48
    assert_same_row(target, 2, source, 1, 55)
    for seed in range(20, 22):
        source, target = (append(x, row, 4, seed) for x, row in ((source, 1), (target, 2)))
        assert_same_row(target, 2, source, 1)
    released, _ = target.release([2])
    assert released.free_pages.tolist() == [24, 8]


def test_a_message_that_comes_again_when_all_has_come_changes_nothing():
    source, target = long_row(), make(**LONG)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 51)
    source = append(source, 1, 1, seed=77)
    sender = Sender(source)
    sender.mark(1, ticket, 50)
    every = []
    while not sender.is_sent(1):
        target, inbox, messages = sent(sender, source, target, inbox, 51)
        every += messages
    target = append(target, 2, 1, seed=5)
    before = jax.device_get((target, inbox))
    for message in every:
        target, inbox, status = deliver(target, inbox, [message])
        assert status.tolist() == [Status.OK]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((target, inbox)), before)


def test_a_row_that_is_used_while_its_window_is_left_out_receives_no_more():
    source, target = long_row(), make(**LONG)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 51)
    sender = Sender(source)
    sender.mark(1, ticket, 50)
    target, inbox, _ = sent(sender, source, target, inbox, 50)
    target = append(target, 2, 3, seed=5)  # as if nothing were to come
    (message,) = sender.messages(source, {1: 50}, max_tokens=CHUNK)
    before = jax.device_get((target, inbox))
    target, inbox, status = deliver(target, inbox, [message])
    assert status.tolist() == [Status.STALE_ROW]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((target, inbox)), before)
    inbox = transfer.forget(inbox, [2])
    plain = append(make(**LONG), 0, 3, seed=5)
    for seed in range(6):
        assert_same_row(target, 2, plain, 0, 3 + 5 * seed)
        target, plain = append(target, 2, 5, seed), append(plain, 0, 5, seed)


def test_long_rows_come_in_parts_too():
    """A row that has tokens gets all that follow, so a part has to fit behind its window."""
    source, target = make(**LONG), make(**LONG)
    inbox, sender, length = Inbox.create(target), Sender(source), 0
    for part in range(6):
        target, inbox, ticket = open_row(target, inbox, 2, 7)
        assert ticket.begins == [length, length]
        sender.unmark(1)
        sender.mark(1, ticket, length)
        source = append(source, 1, 7, seed=part)
        length += 7
        target, inbox, _ = sent(sender, source, target, inbox, length)
        assert_same_row(target, 2, source, 1, length)
    assert int(target.groups[1].table.windows.slot_offset[2]) > 0
    *_, status = transfer.prepare(target, inbox, [2], [20])
    assert status.tolist() == [Status.ROW_FULL]


@pytest.mark.parametrize("total", range(1, 20))
@pytest.mark.parametrize("window", first_of([2, 8, 1, 5], 2))
def test_a_row_of_any_length_comes_whole(total, window):
    """Lengths and windows at the edges of pages."""
    options = {"layer_kinds": (window, window)}
    source, target = make(**options), make(**options)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, total)
    sender = Sender(source)
    sender.mark(1, ticket, 0)
    source = append(source, 1, total, seed=total)
    while not sender.is_sent(1):
        target, inbox, _ = sent(sender, source, target, inbox, total)
    assert_same_row(target, 2, source, 1, total)
    source, target = (append(x, row, 3, seed=0) for x, row in ((source, 1), (target, 2)))
    assert_same_row(target, 2, source, 1)


@pytest.mark.parametrize("num_pinned", [0, 2])
def test_a_row_with_a_window_of_its_own_leaves_out_what_is_not_pinned(num_pinned):
    """With pinned tokens all come: the receiver keeps them, and what lies between slides later."""
    source, target = make(windows=True), make(windows=True)
    target, _ = target.reserve([2], 0)
    target, _ = target.set_window([2], WINDOW, num_pinned)
    source = append(source, 1, 16, seed=0)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 20)
    assert ticket.begins == [0 if num_pinned else 12]
    sender = Sender(source)
    sender.mark(1, ticket, 16)
    source = append(source, 1, 4, seed=1)
    while not sender.is_sent(1):
        target, inbox, _ = sent(sender, source, target, inbox, 20)
    for seed in (2, 3):
        end = int(target.table.seq_lens[2])
        assert end == int(source.table.seq_lens[1])
        for first, last in ((0, num_pinned), (end - WINDOW + num_pinned + 1, end)):
            assert_same(
                tokens_of(target, 2, last, begin=first), tokens_of(source, 1, last, begin=first)
            )
        source, target = (append(x, row, 2, seed) for x, row in ((source, 1), (target, 2)))


def test_what_a_sender_no_longer_has_is_refused_by_name():
    source, target = make(**LONG), make(**LONG)
    source = append(source, 1, 10, seed=0)
    target, _, ticket = open_row(target, Inbox.create(target), 2, 12)
    sender = Sender(source)
    sender.mark(1, ticket, 10)
    for seed in range(3):
        source = append(source, 1, 5, seed)
    assert ticket.begins == [0, 4]
    text = "state: expected token 4 of row 1, got a row that it has slid out of"
    with pytest.raises(ValueError, match=f"^{text}$"):
        sender.messages(source, {1: 12}, max_tokens=CHUNK)


# What rows share


def test_a_forked_prefix_that_the_receiver_has_is_not_sent():
    """Its pages stay the other row's, in every group."""
    source, target = append(make(**GROUPS), 1, 10, seed=1), append(make(**GROUPS), 0, 6, seed=1)
    target, _ = target.fork([0], [2], [5])
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 8)
    assert (ticket.begin, ticket.begins) == (5, [5, 5, 5])
    shared = [group.table.page_table[:, 0].tolist() for group in target.groups]
    assert all(pages[2] == pages[0] for pages in shared)
    sender = Sender(source)
    sender.mark(1, ticket, 10)
    source = append(source, 1, 3, seed=2)
    while not sender.is_sent(1):
        target, inbox, messages = sent(sender, source, target, inbox, 13)
        assert all(message.begin >= 5 for message in messages)
    prefix = append(make(**GROUPS), 0, 6, seed=1)
    assert_same_row(target, 0, prefix, 0, 6)
    for number, group in enumerate(target.groups):
        assert int(group.table.seq_lens[2]) == 13
        first = 8 if isinstance(target.kinds[number], int) else 5  # what is left of the window
        for begin, end, other, row in ((0, 5, prefix, 0), (first, 13, source, 1)):
            assert_same(
                tokens_of(target, 2, end, begin=begin, group=number),
                tokens_of(other, row, end, begin=begin, group=number),
            )


def test_adopted_latent_pages_are_not_sent():
    source, target = append(make(**LATENT), 1, 10, seed=1), append(make(**LATENT), 0, 6, seed=4)
    before = tokens_of(target, 0)
    target, page_ids, _ = target.hold([0], [0])
    target, _ = target.adopt([2], page_ids[None, :])
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 7)
    assert (ticket.begin, ticket.end) == (4, 11)
    sender = Sender(source)
    sender.mark(1, ticket, 10)
    target, inbox, (message,) = sent(sender, source, target, inbox, 10)
    assert (message.begin, message.end) == (4, 10)
    assert_same(tokens_of(target, 0), before)
    assert_same(tokens_of(target, 2, 4), tokens_of(target, 0, 4))
    assert_same(tokens_of(target, 2, 10, begin=4), tokens_of(source, 1, 10, begin=4))


# Refusals


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (LATENT, {}, "layer_kinds: expected ['full', 'full', 'full'], as the receiver has it, got"),
        ({}, LATENT, "layer_kinds: expected ['mla', 'mla', 'mla'], as the receiver has it, got "),
        (LATENT, LATENT | {"latent_dim": 32}, "head_dim: expected [32], as the receiver has it, "),
        (GROUPS, {}, "num_layers: expected 3, as the receiver has it, got 5"),
        (
            {"layer_kinds": ("full", 6, 6)}, {"layer_kinds": ("full", 6, 7)},
            "layer_kinds: expected ['full', 6, 7], as the receiver has it, got ['full', 6, 6]",
        ),
        (
            {"layer_kinds": ("full", 6, 6)}, {"layer_kinds": (6, 6, "full")},
            "layer_kinds: expected [6, 6, 'full'], as the receiver has it, got ['full', 6, 6]",
        ),
        (
            GROUPS, GROUPS | {"head_dim": 16},
            "head_dim: expected [16, 16, 24], as the receiver has it, got [8, 8, 24]",
        ),
        (
            GROUPS, GROUPS | {"v_head_dim": 16},
            "v_head_dim: expected [16, 16, 0], as the receiver has it, got [8, 8, 0]",
        ),
        (LATENT, LATENT | {"dtype": "bfloat16"}, "dtype: expected ['bfloat16'], as the receiver"),
        (KINDS["latent int8"], LATENT | {"dtype": "int8"}, "scales: expected ['none'], as the "),
    ],
)  # fmt: skip
def test_caches_that_differ_are_refused_by_name(mine, theirs, text):
    target = make(**theirs)
    *_, ticket = open_row(target, Inbox.create(target), 2, 6)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        Sender(make(**mine)).mark(1, Ticket.from_bytes(ticket.to_bytes()), 0)


def test_a_given_scale_of_latent_rows_is_part_of_the_geometry():
    one, two, three = (make(**LATENT, dtype="int8", kv_scale=s) for s in (0.5, 0.5, 0.25))
    assert Geometry.create(one) == Geometry.create(two) != Geometry.create(three)


def message_of(options, group=0):
    """A target that waits for 8 tokens, and the first message of a group."""
    source, target = append(make(**options), 1, 6, seed=1), make(**options)
    target, inbox, ticket = open_row(target, Inbox.create(target), 2, 8)
    sender = Sender(source)
    sender.mark(1, ticket, 6)
    return target, inbox, sender.messages(source, {1: 6}, max_tokens=CHUNK)[group]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": np.zeros((3, CHUNK, 16), "f4")}, "payload.k: expected shape "),
        ({"k": np.zeros((3, CHUNK, 24), "f2")}, "payload.k: expected dtype float32, got float16"),
        ({"k": np.zeros((4, CHUNK, 24), "f4")}, "payload.k: expected at most 3 layers, got 4"),
        (
            {"k": np.zeros((3, CHUNK, 2, 8), "f4"), "v": np.zeros((3, CHUNK, 2, 8), "f4")},
            "payload.k: expected shape [num_layers=3, N=1, max_tokens=8, latent+rope=24], got",
        ),
        ({"k_scale": np.zeros((3, CHUNK), "f4")}, "payload.k_scale: expected None, got an array"),
    ],
)
def test_a_payload_that_does_not_fit_latent_rows_is_named(change, text):
    target, inbox, message = message_of(LATENT)
    wrong = dataclasses.replace(message, payload=message.payload._replace(**change))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        deliver(target, inbox, [wrong])


def test_latent_rows_for_layers_with_k_and_v_are_refused_by_name():
    target, inbox, message = message_of(GROUPS)
    wrong = Payload(np.zeros((2, CHUNK, 24), "f4"), None)
    with pytest.raises(ValueError, match=r"^payload.k: expected shape "):
        deliver(target, inbox, [dataclasses.replace(message, payload=wrong)])
    none = message.payload._replace(v=None)
    with pytest.raises(ValueError, match=r"^payload.k: expected \[num_layers, max_tokens, head_di"):
        dataclasses.replace(message, payload=none)


def test_messages_of_different_groups_are_refused_together():
    target, inbox, one = message_of(GROUPS)
    *_, other = message_of(GROUPS, group=1)
    text = (
        r"^messages: expected the same layers of one group in all, got \[\(0, 0, 2\), \(1, 0, 2\)"
    )
    with pytest.raises(ValueError, match=text):
        deliver(target, inbox, [one, dataclasses.replace(other, row=0)])


def test_a_message_under_the_name_of_another_group_changes_nothing():
    target, inbox, message = message_of({"layer_kinds": (6, "full"), "page_size": 4}, group=0)
    target, _ = target.truncate([2], [0])
    target, _, _ = target.append([3], [7])  # group 1 has other free pages than group 0 from now on
    before = jax.device_get((target, inbox))
    for wrong in (
        dataclasses.replace(message, group=1, layer_begin=1),
        dataclasses.replace(message, positions=[1, 40, 6]),
    ):
        target, inbox, status = deliver(target, inbox, [wrong])
        assert status.tolist() == [Status.BAD_ROW]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get((target, inbox)), before)


def test_prepare_is_all_or_nothing_over_the_groups():
    state = make(layer_kinds=("full", 6), num_pages={"full": 24, 6: 2}, pages_per_seq=6)
    inbox = Inbox.create(state)
    for rows, counts, expected in (
        ([2, 3], [4, 11], [Status.OK, Status.POOL_FULL]),  # the second group has 2 pages
        ([2, 3], [4, 25], [Status.OK, Status.ROW_FULL]),
        ([2, 4], [4, 1], [Status.OK, Status.BAD_ROW]),
        ([2, 3], [4, 2**31 - 1], [Status.OK, Status.ROW_FULL]),
    ):
        after, inbox_after, ids, slots, status = transfer.prepare(state, inbox, rows, counts)
        assert status.tolist() == expected
        assert ids.tolist() == [-1, -1]
        assert (np.asarray(slots) == -1).all()
        jax.tree.map(np.testing.assert_array_equal, (after, inbox_after), (state, inbox))
    _, _, _, slots, status = transfer.prepare(state, inbox, [2, -1], [9, 9])
    assert status.tolist() == [Status.OK, Status.OK]
    assert slots[0, :, :10].tolist() == [[*range(9), -1], [0, 1, 2, 3, 4, *[-1] * 5]]
    assert (np.asarray(slots[1]) == -1).all()


@pytest.mark.parametrize("options", [LATENT, LATENT | {"dtype": "int8"}, GROUPS])
def test_receiving_is_in_place(options):
    target = make(num_pages=512, **options)
    inbox, zeros, rows = Inbox.create(target), np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    slots = np.full((2, CHUNK), -1, np.int32)
    for number, group in enumerate(target.groups):
        payload = transfer.read(target, rows, zeros, zeros, max_tokens=CHUNK, group=number)
        call = functools.partial(transfer.receive, group=number)
        step = jax.jit(call, donate_argnums=(0, 1))
        compiled = step.lower(target, inbox, rows, zeros, zeros, zeros, slots, payload).compile()
        assert is_in_place(compiled, group.k_pages), pool_sized_ops(compiled, group.k_pages)


@gathers_in_place
def test_reading_latent_rows_does_not_copy_the_pool():
    source = make(num_pages=512, **LATENT)
    step = jax.jit(functools.partial(transfer.read, max_tokens=CHUNK))
    compiled = step.lower(source, *np.array([(0, 1), (0, 0), (3, 4)], np.int32)).compile()
    assert not pool_sized_ops(compiled, source.k_pages)


def test_a_layer_may_be_traced():
    source = append(make(**GROUPS), 1, 6, seed=1)
    read = jax.jit(functools.partial(transfer.read, max_tokens=6, group=1, num_layers=1))
    for layer in range(2):
        got = read(source, jnp.array([1]), jnp.array([0]), jnp.array([6]), layer_begin=layer)
        want = tokens_of(source, 1, group=1)
        np.testing.assert_array_equal(got.k[0, 0], want.k[layer])
