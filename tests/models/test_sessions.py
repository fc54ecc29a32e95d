# SPDX-License-Identifier: Apache-2.0
"""Sessions: texts that go on, fork, lose their pages, and survive their process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_paged.models import Engine, Sessions, generate
from jax_paged.testing.stress.engine import small_decoder

SIZES = {"num_pages": 40, "max_seqs": 2, "page_size": 4, "max_tokens": 16}
SWAPS = {"preemption": "swap", "swap_pages": 40}
HOST = 1 << 20
TEXT = np.random.default_rng(0).integers(0, 64, 25).tolist()


@pytest.fixture(scope="module")
def swapping(model):
    return Engine(model, **SIZES, **SWAPS)


@pytest.fixture
def engine(swapping):
    swapping.clear_cache()
    assert swapping.is_idle
    assert int(swapping.state.table.num_free) == SIZES["num_pages"]
    return swapping


def alone(model, text, new=6):
    return generate(model, [text], max_new_tokens=new).tokens[0]


def test_a_session_goes_on_from_its_pages(model, engine):
    talk = Sessions(engine).open("a", TEXT)
    first = talk.generate(max_new_tokens=6)
    assert (first.tokens, first.num_cached) == (alone(model, TEXT), 0)
    talk.append([1, 2, 3])
    assert talk.tokens == [*TEXT, *first.tokens, 1, 2, 3]
    second = talk.generate(max_new_tokens=6)
    assert second.tokens == alone(model, talk.tokens[:-6])
    assert second.num_cached == 28  # all full pages of the 30 that were fed


def test_forks_share_pages_and_go_their_ways(model, engine):
    sessions = Sessions(engine, host_bytes=HOST)
    talk = sessions.open("a", TEXT)
    talk.generate(max_new_tokens=6)
    other = talk.fork("b")
    assert other.host_bytes == talk.host_bytes > 0
    assert sessions._bytes() == talk.host_bytes
    for session, more in ((talk, [5]), (other, [6, 7])):
        session.append(more)
        text = list(session.tokens)
        assert session.generate(max_new_tokens=6).tokens == alone(model, text)
    assert talk.tokens != other.tokens
    other.close()
    assert [one.key for one in sessions] == ["a"]
    with pytest.raises(ValueError, match="session: expected an open one, got 'b', closed"):
        other.append([1])


def test_pages_come_back_from_host_memory(model, engine):
    sessions = Sessions(engine, host_bytes=HOST)
    talk = sessions.open("a", TEXT)
    talk.generate(max_new_tokens=6)
    engine.clear_cache()
    text, fed = list(talk.tokens), engine.num_fed
    again = talk.generate(max_new_tokens=6)
    assert again.tokens == alone(model, text)
    assert engine.num_fed - fed == 1 + 6 - 1  # nothing is computed again
    assert again.num_cached == 0


def test_the_least_recently_used_session_loses_host_memory_first(model, engine):
    size = Sessions(engine, host_bytes=HOST)
    one = size.open("size", TEXT)
    one.generate(max_new_tokens=6)
    sessions = Sessions(engine, host_bytes=2 * one.host_bytes)
    made = [sessions.open(key, [i, *TEXT[1:]]) for i, key in enumerate("abc")]
    for session in made[:2]:
        session.generate(max_new_tokens=6)
    made[0].append([1])
    made[0].generate(max_new_tokens=1)  # still in as many pages
    made[2].generate(max_new_tokens=6)
    assert [bool(session.host_bytes) for session in made] == [True, False, True]
    engine.clear_cache()
    text = list(made[1].tokens)
    assert made[1].generate(max_new_tokens=6).tokens == alone(model, text)


def test_new_weights_make_pages_old(model):
    engine = Engine(model, **SIZES, **SWAPS)
    talk = Sessions(engine, host_bytes=HOST).open("a", TEXT)
    talk.generate(max_new_tokens=6)
    engine.update_weights(model)
    text, fed = list(talk.tokens), engine.num_fed
    assert talk.generate(max_new_tokens=6).tokens == alone(model, text)
    assert engine.num_fed - fed == len(text) + 5


def test_what_runs_may_be_waited_for_and_cancelled(model, engine):
    sessions = Sessions(engine)
    one, two = sessions.open("a", TEXT), sessions.open("b", TEXT[::-1])
    one.begin(max_new_tokens=6)
    two.begin(max_new_tokens=6)
    with pytest.raises(ValueError, match="session: expected one for which nothing runs"):
        one.append([1])
    assert two.finish().tokens == alone(model, TEXT[::-1])
    assert one.finish().tokens == alone(model, TEXT)
    with pytest.raises(ValueError, match="session: expected one with a request, after `begin`"):
        one.finish()
    request = one.begin(max_new_tokens=6)
    one.close()
    assert request.reason == "cancelled"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.open(3), "key: expected a str, got 3"),
        (lambda s: s.open("a"), "key: expected one that no session has, got 'a'"),
        (lambda s: s.open("b", [64]), r"tokens\[0\]: expected a token id in \[0, vocab"),
        (lambda s: s.open("b", [1], adapter="x"), "adapter"),
        (
            lambda s: s["a"].generate(max_new_tokens=1),
            "prompt: expected a non-empty list",
        ),
        (lambda s: s.restore("/nowhere", s.engine), "folder: expected one that `save` has written"),
        (lambda s: Sessions(s.engine, host_bytes=-1), "host_bytes: expected an integer >= 0"),
    ],
)
def test_wrong_calls_are_told(engine, call, message):
    sessions = Sessions(engine)
    sessions.open("a")
    with pytest.raises(ValueError, match=message):
        call(sessions)
    assert len(sessions) == 1


def test_host_memory_needs_an_engine_that_swaps(model):
    with pytest.raises(ValueError, match="hand_out: expected an engine with preemption='swap'"):
        Sessions(Engine(model, **SIZES), host_bytes=HOST)


RESTORED = """\
import sys
from jax_paged.models import Engine, Sessions
from jax_paged.testing.stress.engine import small_decoder
engine = Engine(small_decoder(), num_pages=40, max_seqs=2, page_size=4, max_tokens=16,
                preemption="swap", swap_pages=40)
sessions = Sessions.restore(sys.argv[1], engine, host_bytes=1 << 20)
print(sessions["b"].finish().tokens)
fed = engine.num_fed
print(sessions["a"].generate(max_new_tokens=6).tokens, engine.num_fed - fed)
"""


def test_sessions_survive_their_process(model, engine, tmp_path):
    """Saved while one of them draws; another process ends what it began."""
    sessions = Sessions(engine, host_bytes=HOST)
    talk, other = sessions.open("a", TEXT), sessions.open("b", TEXT[::-1])
    talk.generate(max_new_tokens=6)
    request = other.begin(max_new_tokens=20)
    while len(request.tokens) < 7:
        engine.step()
    sessions.save(tmp_path / "saved")
    command = [sys.executable, "-P", "-c", RESTORED, str(tmp_path / "saved")]
    child = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
    assert child.returncode == 0, child.stderr
    drawn, goes_on = child.stdout.splitlines()
    assert drawn == str(alone(model, TEXT[::-1], 20))
    assert goes_on == f"{alone(model, talk.tokens)} 6"
    with pytest.raises(ValueError, match=r"exist|folder"):
        sessions.save(tmp_path / "saved")
    other.finish()


def test_sessions_of_another_model_are_refused(engine, tmp_path):
    Sessions(engine).save(tmp_path / "saved")
    other = Engine(small_decoder(), **SIZES | {"page_size": 8}, window=16)
    with pytest.raises(ValueError, match="model"):
        Sessions.restore(tmp_path / "saved", other)
