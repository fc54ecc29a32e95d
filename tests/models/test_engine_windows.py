# SPDX-License-Identifier: Apache-2.0
"""Requests that keep a window of their tokens."""

import re

import numpy as np
import pytest
from small_engines import PROMPTS, submit_all

from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import Stepper
from jax_paged.testing.stress.engine import TIE, assert_empty

WINDOW = {"window": 14, "num_pinned": 3, "max_tokens": 8}
# 1 page of pinned tokens; 10 others that a token sees, 8 of a chunk, from anywhere in a page on.
WINDOW_PAGES = 1 + 6


def assert_windowed(model, request) -> None:
    """The tokens are what a prefill of everything at once says, with this window."""
    stepper = Stepper(model, page_size=4, pages_per_seq=16, windows=True)
    stepper.state, _ = stepper.state.reserve([0], 0)
    stepper.state, status = stepper.state.set_window([0], WINDOW["window"], WINDOW["num_pinned"])
    assert int(status[0]) == 0
    text = [*request.prompt.tolist(), *request.tokens]
    logits = stepper.step({0: text[:-1]}, padded_to=63)[0][len(request.prompt) - 1 :]
    chosen = logits[np.arange(len(request.tokens)), request.tokens]
    assert (logits.max(axis=1) - chosen).max() < TIE


def test_requests_with_a_window_hold_few_pages_and_get_its_tokens(model, make):
    engine = make(num_pages=2 * WINDOW_PAGES + 2, **WINDOW)
    requests = submit_all(engine, max_new_tokens=44)
    most = 0
    while engine.step():
        most = max(most, int(np.asarray(engine.state.table.pages_held).max()))
    assert engine.num_preemptions > 0
    assert most <= WINDOW_PAGES < 13  # of 4 tokens; the longest request has 63 tokens
    for request in requests:
        assert (request.reason, len(request.tokens)) == ("length", 44)
        assert_windowed(model, request)
    engine.clear_cache()
    assert_empty(engine)


@pytest.mark.deep
def test_a_request_longer_than_the_pool_runs_in_a_window(model, make):
    assert make(num_pages=8).submit(PROMPTS[2], max_new_tokens=40).reason == "refused"
    engine = make(num_pages=8, pages_per_seq=8, **WINDOW)
    request = engine.submit(PROMPTS[2], max_new_tokens=40)
    engine.run()
    assert (request.reason, len(request.tokens)) == ("length", 40)
    assert_windowed(model, request)
    engine.clear_cache()
    assert_empty(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pinned": 2}, "num_pinned: expected 0 without a window, got 2"),
        ({"window": 3, "num_pinned": 3}, "window: expected an integer >= 4, got 3"),
    ],
)
def test_what_a_window_excludes_is_told(model, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(model, num_pages=8, max_seqs=2, **options)
