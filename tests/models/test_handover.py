# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt another engine has computed: they get what one engine alone gives them.

This file is a script, too: programs over four devices.
"""

import dataclasses
import warnings

import numpy as np
import pytest
from meshes import check_in_a_process, run_chosen
from served_engines import CONFIGS, PROMPTS, SEED, tickets
from tiers import first_of

from jax_paged.models import Decoder, Engine, make_mesh
from jax_paged.models.decoder.parameters import random_source

SIZES = {"num_pages": 32, "max_seqs": 3, "page_size": 4, "max_tokens": 16, "preemption": "swap"}
SIZES |= {"swap_pages": 64}
SMALL = SIZES | {"max_tokens": 4}  # of steps of one size: quickly compiled
ASKED = {"max_new_tokens": 9, "temperature": 0.7, "seed": 1}


@pytest.fixture(scope="module")
def model():
    config = CONFIGS["dense"]
    return Decoder(config, random_source(config, seed=SEED))


@pytest.fixture(scope="module")
def prefiller(model):
    return Engine(model, **SIZES)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, **SIZES)


def assert_all_free(*engines):
    for engine in engines:
        assert engine.is_idle
        engine.clear_cache()
        assert engine.num_free_pages == engine.num_pages
        assert engine.num_free_swap_pages == engine.swap_pages * engine.num_replicas
        assert engine._runner.swapper._chunks == {}


def served(engine, prompts, asked, tickets=None):
    """The requests of some prompts, each with its own options, with and without tickets."""
    requests = []
    for i, (prompt, own) in enumerate(zip(prompts, asked, strict=True)):
        options = ASKED | {"draw_index": i} | own
        if tickets is None:
            requests.append(engine.submit(prompt, **options))
        else:
            requests.append(engine.receive(prompt, tickets[i], **options))
    engine.run()
    return requests


def compare(prefiller, engine, prompts, asked=None):
    """Serves prompts with tickets and without; all computed one token of each prompt alone."""
    asked = [{}] * len(prompts) if asked is None else asked
    want = served(engine, prompts, asked)
    engine.clear_cache()
    handed = tickets(prefiller, prompts)
    fed, swaps = engine.num_fed, engine.num_swaps
    got = served(engine, prompts, asked, handed)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert [r.reason for r in got] == [r.reason for r in want]
    assert engine.num_swaps[1] - swaps[1] > 0
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a[:2], b[:2], rtol=1e-5, atol=1e-6)
    assert_all_free(prefiller, engine)
    return got, engine.num_fed - fed


def text_of(ids):
    return "".join(chr(33 + token) for token in ids)


def test_a_received_request_gets_the_tokens_of_one_engine(prefiller, engine):
    prompts = PROMPTS[:5]
    asked = [
        {"temperature": 0.0},
        {},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"logit_bias": {3: 2.0}, "banned_tokens": [1, 2]},
        {"priority": 1, "top_k": 5},
    ]
    got, fed = compare(prefiller, engine, prompts, asked)
    assert fed <= sum(1 + len(r.tokens) for r in got)  # nothing of a prompt but its last token


def test_a_stop_string_ends_it(prefiller, engine):
    (alone,) = served(engine, PROMPTS[:1], [{}])
    stop = text_of(alone.tokens[3:5])
    asked = [{"stop_strings": [stop], "decode": text_of}]
    (got,), _ = compare(prefiller, engine, PROMPTS[:1], asked)
    assert got.reason == "stop_string"
    assert len(got.tokens) <= 5


def test_pages_that_the_cache_has_are_shared(prefiller, engine):
    served(engine, [PROMPTS[2][:21]], [{"max_new_tokens": 1}])
    want = served(engine, PROMPTS[2:3], [{}])
    engine.clear_cache()
    served(engine, [PROMPTS[2][:21]], [{"max_new_tokens": 1}])
    (got,) = served(engine, PROMPTS[2:3], [{}], tickets(prefiller, PROMPTS[2:3]))
    assert got.tokens == want[0].tokens
    assert got.num_cached == 20
    assert_all_free(prefiller, engine)


def test_it_goes_on_after_being_preempted(prefiller, engine):
    """With the room of two, the third makes room; what has come is swapped as all else."""
    prompts = [PROMPTS[2]] * 3
    asked = [{"max_new_tokens": 30, "priority": i} for i in range(3)]
    before = engine.num_preemptions
    compare(prefiller, engine, prompts, asked)
    assert engine.num_preemptions > before


def test_more_of_a_text_is_handed_out_than_its_prompt(prefiller, engine):
    request = prefiller.submit(PROMPTS[1], hand_out=True, **ASKED)
    prefiller.run()
    ticket = prefiller.hand_out(request)
    text = [*PROMPTS[1], *request.tokens]
    assert len(PROMPTS[1]) < ticket.num_tokens <= len(text)
    longer = [*text, 5, 6, 7]
    want = served(engine, [longer], [{}])
    engine.clear_cache()
    got = served(engine, [longer], [{}], [ticket])
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert_all_free(prefiller, engine)


def test_without_room_the_prompt_is_computed(prefiller, engine):
    (ticket,) = tickets(prefiller, PROMPTS[2:3])
    for scheduler in engine._schedulers:
        scheduler.num_free_swap -= 60
    (want,) = served(engine, PROMPTS[2:3], [{}])
    engine.clear_cache()
    fed = engine.num_fed
    (got,) = served(engine, PROMPTS[2:3], [{}], [ticket])
    assert engine.num_fed - fed >= len(PROMPTS[2])
    assert got.tokens == want.tokens
    for scheduler in engine._schedulers:
        scheduler.num_free_swap += 60
    assert_all_free(prefiller, engine)


def test_a_cancelled_request_leaves_nothing(prefiller, engine):
    (ticket,) = tickets(prefiller, PROMPTS[2:3])
    request = engine.receive(PROMPTS[2], ticket, **ASKED)
    engine.cancel(request)
    asked = prefiller.submit(PROMPTS[2], max_new_tokens=0, hand_out=True)
    prefiller.step()
    prefiller.cancel(asked)
    for one in (engine, prefiller):
        one.run()
    with pytest.raises(ValueError, match=r"request: .* got one with reason='cancelled'"):
        prefiller.hand_out(asked)
    assert_all_free(prefiller, engine)


def piece_of(ticket, **changes):
    first, *others = ticket.pieces
    return dataclasses.replace(ticket, pieces=[first._replace(**changes), *others])


def fact(ticket, name, value):
    return dataclasses.replace(ticket, facts={**ticket.facts, name: value})


BAD_TICKETS = {
    "weights": (lambda t: fact(t, "digest of weights", "00"), "ticket.digest of weights: expected"),
    "version": (lambda t: fact(t, "weight_version", "7"), "weight_version: expected 0, .* got 7"),
    "pages": (lambda t: fact(t, "pool 0", "int8[2, 2, 4, 8]"), "ticket.pool 0: expected float32"),
    "more": (lambda t: fact(t, "new", "x"), "ticket.new: expected None, as this engine has, got x"),
    "model": (
        lambda t: fact(t, "model.config.num_layers", "9"),
        "ticket.model.config.num_layers: expected 2, as this engine has, got 9",
    ),
    "all tokens": (lambda t: dataclasses.replace(t, num_tokens=50), "ticket.num_tokens: .* got 50"),
    "negative": (lambda t: dataclasses.replace(t, num_tokens=-1), "ticket.num_tokens: .* got -1"),
    "no integer": (lambda t: dataclasses.replace(t, num_tokens=2.0), "num_tokens: .* got 2.0"),
    "other tokens": (lambda t: dataclasses.replace(t, digest="0" * 32), "ticket.digest: expected"),
    "adapter": (lambda t: dataclasses.replace(t, adapter="a"), "ticket.adapter: .* got 'a'"),
    "missing": (lambda t: dataclasses.replace(t, pieces=t.pieces[1:]), "ticket.pieces: .* only"),
    "twice": (
        lambda t: dataclasses.replace(t, pieces=[*t.pieces, t.pieces[0]]),
        r"piece: expected each page of each head once \(pool 0, page 0, head 0\)",
    ),
    "pool": (lambda t: piece_of(t, pool=2), "piece.pool: expected one of 2, got 2"),
    "page": (lambda t: piece_of(t, page=99), "piece.page: .* got 8 from 99 on"),
    "before": (lambda t: piece_of(t, page=-1), "piece.page: expected some of 13 pages, got 8 from"),
    "head": (lambda t: piece_of(t, head=1), "piece.head: expected some of 2 heads, got 2 from 1"),
    "dtype": (
        lambda t: piece_of(t, values=t.pieces[0].values.astype(np.float16)),
        "piece.dtype: expected float32, got float16",
    ),
    "shape": (
        lambda t: piece_of(t, values=t.pieces[0].values[:1]),
        r"piece.shape: expected \[2, 'pages', 'heads', 4, 16\], got \[1, 8, 2, 4, 16\]",
    ),
    "nothing": (lambda t: piece_of(t, values=t.pieces[0].values[:, :0]), "piece.page: .* got 0 f"),
}


@pytest.fixture(scope="module")
def ticket(prefiller):
    return tickets(prefiller, PROMPTS[2:3])[0]


def test_bad_tickets_are_refused_and_touch_nothing(engine, ticket):
    """Each with a line that names what is wrong, while another request runs."""
    (want,) = served(engine, PROMPTS[2:3], [{}])
    engine.clear_cache()
    request = engine.submit(PROMPTS[2], **ASKED, draw_index=0)
    for _ in range(5):
        engine.step()
    for change, message in BAD_TICKETS.values():
        with pytest.raises(ValueError, match=message):
            engine.receive(PROMPTS[2], change(ticket), **ASKED)
        assert (engine.num_waiting, engine.num_running) == (0, 1)
    with pytest.raises(ValueError, match=r"ticket.digest: expected .*of the first 49 tokens"):
        engine.receive(PROMPTS[2][::-1], ticket, **ASKED)
    with pytest.raises(ValueError, match="prompt_logprobs: expected False"):
        engine.receive(PROMPTS[2], ticket, prompt_logprobs=True, **ASKED)
    engine.run()
    assert request.tokens == want.tokens
    assert_all_free(engine)


def test_engines_that_cannot_are_refused(model, prefiller, engine, ticket):
    with pytest.raises(ValueError, match="request: expected a request that has ended"):
        engine.hand_out(engine.submit([1], max_new_tokens=0))
    request = prefiller.submit(PROMPTS[2], max_new_tokens=0, hand_out=True)
    prefiller.run()
    prefiller.hand_out(request)
    with pytest.raises(ValueError, match="of hand_out=True, once"):
        prefiller.hand_out(request)
    assert_all_free(prefiller)
    few = {"num_pages": 8, "max_seqs": 1, "page_size": 4, "max_tokens": 4}
    plain = Engine(model, **few)
    for call in (
        lambda: plain.submit([1, 2], max_new_tokens=0, hand_out=True),
        lambda: plain.receive(PROMPTS[2], ticket, **ASKED),
        plain.facts,
    ):
        with pytest.raises(ValueError, match="expected an engine with preemption='swap'"):
            call()


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.deep)])
def test_stored_values_travel_with_their_scales(model, kv_dtype):
    pair = [Engine(model, **SMALL, kv_dtype=kv_dtype, logprobs=1) for _ in range(2)]
    prompts = PROMPTS[1:4]
    want = [pair[1].submit(p, draw_index=i, **ASKED) for i, p in enumerate(prompts)]
    pair[1].run()
    pair[1].clear_cache()
    handed = tickets(pair[0], prompts)
    state = pair[1].state
    got = served(pair[1], prompts, [{}] * 3, handed)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert {x.values.dtype for x in handed[0].pieces} >= {state.k_pages.dtype}
    assert_all_free(*pair)


def on(mesh, config, seed=SEED):
    """A model over (dp, tp), or on one device."""
    source = random_source(config, seed=seed)
    if mesh is None:
        return Decoder(config, source)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tp=4: each of the 2 KV heads lies on 2 devices")
        dp, tp = mesh
        return Decoder(config, source, mesh=make_mesh(config, dp=dp, tp=tp))


def hand_over(sender, receiver, kind="dense", **options):
    """From one split to another one; the tokens are those of one device."""
    config = CONFIGS[kind]

    def engine(mesh):
        own = dict(SMALL)
        if options.get("max_drafts"):
            own["draft_model"] = on(mesh if mesh == sender else None, config, SEED + 1)
        return Engine(on(mesh, config), **own | options)

    one, first, second = map(engine, (None, sender, receiver))
    prompts = PROMPTS[:5]
    want = served(one, prompts, [{}] * 5)
    got = served(second, prompts, [{}] * 5, tickets(first, prompts))
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert second.num_swaps[1] >= 5
    assert {r.replica for r in got} == set(range(second.num_replicas))
    assert_all_free(first, second)


SPLITS = {
    "from tp 4 to tp 2, dp 2": lambda: hand_over((1, 4), (2, 2)),
    "from tp 2, dp 2 to tp 4": lambda: hand_over((2, 2), (1, 4), kv_dtype="int8"),
    "from one to tp 2, dp 2": lambda: hand_over(None, (2, 2), "experts", kv_dtype="fp8"),
    "from dp 4 to one": lambda: hand_over((4, 1), None, "experts"),
    "a draft model": lambda: hand_over((2, 2), (1, 4), max_drafts=2, max_tokens=9),
}


@pytest.mark.parametrize("split", first_of(SPLITS, 1))
def test_states_that_are_split_differently(split):
    check_in_a_process(__file__, split, devices=4)


if __name__ == "__main__":
    run_chosen(SPLITS, devices=4)
