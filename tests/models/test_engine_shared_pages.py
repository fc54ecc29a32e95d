# SPDX-License-Identifier: Apache-2.0
"""Pages that requests share: what the engine knows is not computed again."""

import pytest
from small_engines import NEW, PROMPTS, submit_all
from tiers import first_of

from jax_paged.models.serving.engine import Engine
from jax_paged.ops import cascade
from jax_paged.testing.stress.engine import assert_empty


def test_pages_that_are_known_are_shared_and_not_computed_again(make, alone):
    engine = make()
    prefix = list(range(30, 50))
    first = engine.submit([*prefix, 1], max_new_tokens=NEW)
    engine.run()
    fed, free = engine.num_fed, engine.num_free_pages
    others = [engine.submit([*prefix, 2 + i], max_new_tokens=NEW) for i in range(3)]
    again = engine.submit([*prefix, 1], max_new_tokens=NEW)
    engine.step()
    assert free - engine.num_free_pages == 4  # one page each for its own last prompt token
    engine.run()
    assert [r.num_cached for r in (first, *others, again)] == [0, 20, 20, 20, 20]
    assert engine.num_fed - fed == 4 * NEW
    assert again.tokens == first.tokens == alone([*prefix, 1])
    for i, request in enumerate(others):
        assert request.tokens == alone([*prefix, 2 + i])
    engine.clear_cache()
    assert_empty(engine)


@pytest.mark.every
@pytest.mark.parametrize(
    "options",
    first_of([{}, {"preemption": "swap"}, {"max_drafts": 3}, {"kv_dtype": "int8"}, "drafter"], 2),
    ids=str,
)
def test_where_texts_part_in_a_page_its_beginning_is_copied(model, drafter, options):
    if options == "drafter":
        options = {"draft_model": drafter, "max_drafts": 2, "draft_branches": 2}
    sizes = {"num_pages": 40, "max_seqs": 10, "page_size": 8, "max_tokens": 40} | options
    engine, plain = Engine(model, **sizes), Engine(model, prefix_cache=False, **sizes)
    prefix = list(range(30, 50))
    begun = [prefix, *([*prefix[:n], *range(n, n + 7)] for n in (1, 2, 7, 8, 11, 15, 16, 19, 20))]
    texts = [[*begin, 5, 6, 7, 8, 9] for begin in begun]
    requests = submit_all(engine, texts[:1])
    engine.run()
    requests += submit_all(engine, texts[1:])  # all start at once: in two calls of `keep`
    engine.run()
    requests += submit_all(engine, texts[:1])
    engine.run()
    expected = submit_all(plain, [*texts, texts[0]])
    plain.run()
    assert [r.tokens for r in requests] == [r.tokens for r in expected]
    assert [r.num_cached for r in requests] == [0, 0, 2, 7, 8, 11, 15, 16, 19, 20, 24]
    engine.clear_cache()
    assert_empty(engine)


def test_a_page_that_could_be_copied_makes_room_where_there_is_no_other(make, alone):
    engine = make(num_pages=4, page_size=8, pages_per_seq=4)
    prefix = list(range(30, 50))
    for other, expected in ((1, 0), (2, 16)):
        text = [*prefix, *[other] * 11]
        request = engine.submit(text, max_new_tokens=2)
        engine.run()
        assert (request.tokens, request.num_cached) == (alone(text, 2), expected)
    engine.clear_cache()
    assert_empty(engine)


def test_a_cascade_gives_the_same_tokens(make, alone, monkeypatch):
    for name in ("LEAST_TOKENS", "LEAST_SAVED"):
        monkeypatch.setattr(cascade, name, 8)  # while the engine compiles
    engine = make(cascade=True, max_seqs=5)
    prefix = list(range(30, 50))
    engine.submit(prefix, max_new_tokens=1)
    engine.run()
    requests = [engine.submit([*prefix, 2 + i], max_new_tokens=NEW) for i in range(5)]
    engine.run()
    assert [r.num_cached for r in requests] == [20] * 5
    for i, request in enumerate(requests):
        assert request.tokens == alone([*prefix, 2 + i])
    engine.clear_cache()
    assert_empty(engine)


def test_a_prompt_that_is_cached_to_its_end_still_feeds_its_last_token(make, alone):
    engine = make()
    for expected in (0, 19, 19):  # of 20 tokens in 5 full pages, the last of which is copied
        request = engine.submit(PROMPTS[2], max_new_tokens=5)
        engine.run()
        assert request.tokens == alone(PROMPTS[2], 5)
        assert request.num_cached == expected


def test_new_tokens_are_cached_too(make, alone):
    engine = make()
    first = engine.submit(PROMPTS[0], max_new_tokens=NEW)
    engine.run()
    turn = [*PROMPTS[0], *first.tokens, 9]
    second = engine.submit(turn, max_new_tokens=5)
    engine.run()
    assert second.num_cached == 12  # 3 full pages of 3 + 12 - 1 tokens
    assert second.tokens == alone(turn, 5)


def test_without_a_prefix_cache_all_pages_are_free_at_the_end(make, alone):
    engine = make(prefix_cache=False)
    requests = submit_all(engine, [PROMPTS[2]] * 2)
    engine.run()
    assert [r.tokens for r in requests] == [alone(PROMPTS[2])] * 2
    assert engine.cache_counts.looked_up == 0
    assert_empty(engine)
