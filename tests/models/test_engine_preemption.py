# SPDX-License-Identifier: Apache-2.0
"""Where pages are short: requests that give theirs up, and get them back."""

import pytest
from small_engines import submit_all
from tiers import first_of

from jax_paged.models import generate
from jax_paged.testing.stress.engine import SWAP, assert_empty


def test_a_tight_pool_preempts_and_nothing_is_lost(make, alone):
    engine = make(num_pages=14)
    before = engine.num_preemptions
    prompts = [[i] * 9 for i in range(4)]
    requests = submit_all(engine, prompts, max_new_tokens=30)  # 4 × 10 pages
    engine.run()
    assert engine.num_preemptions > before
    assert requests[0].num_preemptions == 0  # the first in the order is never preempted
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == alone(prompt, 30)
    engine.clear_cache()
    assert_empty(engine)


@pytest.mark.parametrize("max_drafts", first_of([0, 3], 1))
def test_a_tight_pool_swaps_and_nothing_is_computed_again(make, alone, max_drafts):
    engine = make(**SWAP, max_drafts=max_drafts)
    before, fed, preempted = engine.num_swaps, engine.num_fed, engine.num_preemptions
    prompts = [[i] * 9 for i in range(4)]
    requests = submit_all(engine, prompts, max_new_tokens=30)
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == alone(prompt, 30)
    out, back = (now - then for now, then in zip(engine.num_swaps, before, strict=True))
    assert 0 < out == back == engine.num_preemptions - preempted
    if not max_drafts:
        assert engine.num_fed - fed == 4 * (9 + 30 - 1)
    engine.clear_cache()
    assert_empty(engine)


def test_what_host_memory_cannot_hold_is_computed_again(make, alone):
    engine = make(**SWAP | {"swap_pages": 8}, prefix_cache=False)
    before, preempted, least = engine.num_swaps, engine.num_preemptions, 8
    prompts = [[i] * 9 for i in range(4)]
    requests = submit_all(engine, prompts, max_new_tokens=30)
    while engine.step():
        least = min(least, engine.num_free_swap_pages)
    assert least == 0  # a chunk of 8 pages is in use, and never more
    out, back = (now - then for now, then in zip(engine.num_swaps, before, strict=True))
    assert 0 < out == back < engine.num_preemptions - preempted
    assert [r.tokens for r in requests] == [alone(p, 30) for p in prompts]
    assert_empty(engine)


def test_what_the_cache_has_kept_is_not_copied_back(make, alone):
    engine = make(**SWAP, max_drafts=0)
    low = engine.submit(range(16), max_new_tokens=20)
    for _ in range(6):
        engine.step()
    before, fed = engine.num_swaps, engine.num_fed - low.fed
    high = engine.submit([9] * 32, max_new_tokens=12, priority=1)
    while not high.is_done:
        engine.step()
    assert low.swapped > 20
    entries = engine._schedulers[0]._match(low).entries
    kept = len(entries)
    assert 0 < kept < low.swapped // 4  # the others have had to go
    engine.step()
    assert low.columns[:kept] == entries
    engine.run()
    assert engine.num_swaps == (before[0] + 1, before[1] + 1)
    assert engine.num_fed - fed == 16 + 20 - 1 + 32 + 12 - 1
    assert (low.tokens, high.tokens) == (alone(range(16), 20), alone([9] * 32, 12))
    engine.clear_cache()
    assert_empty(engine)


def test_a_request_that_is_swapped_out_may_be_cancelled(make, alone):
    engine = make(**SWAP, max_drafts=0)
    requests = submit_all(engine, [[i] * 9 for i in range(4)], max_new_tokens=30)
    while engine.num_free_swap_pages == engine.swap_pages:
        engine.step()
    (out,) = [r for r in requests if r.num_preemptions]
    engine.cancel(out)
    assert engine.num_free_swap_pages == engine.swap_pages
    engine.run()
    for i, request in enumerate(requests):
        assert request.tokens == alone([i] * 9, 30)[: len(request.tokens)]
    engine.clear_cache()
    assert_empty(engine)


def test_eight_bit_pages_swap_with_their_scales(make, model):
    engine = make(**SWAP, kv_dtype="int8")
    prompts = [[i] * 9 for i in range(4)]
    requests = submit_all(engine, prompts, max_new_tokens=30)
    engine.run()
    assert engine.num_swaps[1] > 0
    for prompt, request in zip(prompts, requests, strict=True):
        lone = generate(model, [prompt], max_new_tokens=30, kv_dtype="int8").tokens[0]
        assert request.tokens == lone


def test_higher_priority_goes_first_and_takes_pages_from_lower(make, alone):
    engine = make(num_pages=14)
    ends = []
    low = [
        engine.submit([i] * 9, max_new_tokens=20, on_tokens=lambda new, end, i=i: ends.append(
            (i, end)) if end else None)
        for i in range(3)
    ]  # fmt: skip
    for _ in range(8):
        engine.step()
    high = engine.submit(
        [9] * 30, max_new_tokens=20, priority=1,
        on_tokens=lambda new, end: ends.append((9, end)) if end else None,
    )  # fmt: skip
    engine.run()
    assert ends[0] == (9, "length")
    assert high.num_preemptions == 0
    assert sum(r.num_preemptions for r in low) > 0
    assert high.tokens == alone([9] * 30, 20)
    for i, request in enumerate(low):
        assert request.tokens == alone([i] * 9, 20)
