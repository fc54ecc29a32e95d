# SPDX-License-Identifier: Apache-2.0
"""The host's index of cached pages; what it does to the pages is in test_page_holds."""

import numpy as np
import pytest

from jax_paged.models.serving.prefix_cache import PrefixCache


def insert(cache: PrefixCache, tokens: list[int], column: int) -> int | None:
    """The entry of a page of a row with these tokens."""
    digests = [cache.root(), *cache.digests(tokens)]
    page = tokens[column * cache.page_size : (column + 1) * cache.page_size]
    return cache.insert(digests[column + 1], digests[column], page)


def filled(num_rows: int, num_pages: int, num_entries: int = 16) -> tuple[PrefixCache, list]:
    """A cache with the pages of some rows, in use, and their entries per row."""
    cache = PrefixCache(num_entries, page_size=2)
    rows = []
    for row in range(num_rows):
        rows.append([insert(cache, [row] * 2 * num_pages, column) for column in range(num_pages)])
    return cache, rows


def test_a_page_is_known_by_its_tokens_and_all_before_them():
    cache = PrefixCache(8, page_size=2)
    digests = cache.digests([1, 2, 3, 4, 5])
    assert len(digests) == 2
    assert cache.digests([1, 2, 3, 5])[0] == digests[0]
    assert cache.digests([1, 2, 3, 5])[1] != digests[1]
    assert cache.digests([9, 2, 3, 4])[1] != digests[1]
    assert cache.digests(np.array([1, 2, 3, 4], np.int64)) == digests
    assert len({*cache.digests([1] * 20)}) == 10


def test_digests_go_on_from_known_ones():
    cache = PrefixCache(8, page_size=3)
    tokens = list(range(20))
    digests = cache.digests(tokens)
    assert cache.digests(tokens, digests[:4]) == digests
    assert cache.digests(tokens[:4], digests[:1]) == digests[:1]


def test_salt_and_page_size_tell_caches_apart():
    first = PrefixCache(8, page_size=2, salt="a").digests([1, 1])
    assert PrefixCache(8, page_size=2, salt="a").digests([1, 1]) == first
    assert PrefixCache(8, page_size=2, salt="b").digests([1, 1]) != first
    assert PrefixCache(8, page_size=1, salt="a").digests([1, 1])[1] not in first


def test_a_match_ends_at_the_first_page_that_is_missing():
    cache = PrefixCache(8, page_size=1)
    digests = cache.digests([1, 2, 3])
    first, third = (insert(cache, [1, 2, 3], column) for column in (0, 2))
    assert cache.match(digests) == [first]
    second = insert(cache, [1, 2, 3], 1)
    assert cache.match(digests) == [first, second, third]
    assert insert(cache, [1, 2, 3], 1) is None  # known already


def test_the_closest_page_begins_with_most_of_the_tokens():
    rng, cache = np.random.default_rng(0), PrefixCache(200, page_size=4)
    assert cache.closest(cache.root(), [1, 2, 3, 4]) == (-1, 0)
    pages: dict[bytes, dict[int, list[int]]] = {}
    for start in ([7] * 4, [8] * 4, []):
        before = cache.digests(start)[-1] if start else cache.root()
        entries = pages[before] = {}
        for _ in range(60):
            page = rng.integers(0, 4, 4).tolist()
            entry = insert(cache, start + page, len(start) // 4)
            if entry is not None:
                entries[entry] = page
    cache.release([entry for entries in pages.values() for entry in entries])
    gone = cache.evict(50)
    for before, entries in pages.items():
        for entry in set(gone) & entries.keys():
            del entries[entry]
        for _ in range(100):
            wanted = rng.integers(0, 5, int(rng.integers(5))).tolist()
            most = max(common(page, wanted) for page in entries.values())
            entry, count = cache.closest(before, wanted)
            assert count == most
            assert count == 0 or common(entries[entry], wanted) == count
    cache.evict(200)
    assert all(cache.closest(before, [1]) == (-1, 0) for before in pages)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_only_pages_without_rows_are_evicted_least_recently_used_first():
    cache, rows = filled(3, 2)
    assert cache.evict(6) == []
    cache.release(rows[1])
    cache.release(rows[0])
    cache.acquire(rows[1])  # used again
    cache.release(rows[1])
    assert cache.num_idle == 4
    # Of a row the last page goes first.
    assert cache.evict(3) == [rows[0][1], rows[0][0], rows[1][1]]
    assert cache.match(cache.digests([1, 1, 1, 1])) == [rows[1][0]]
    assert cache.match(cache.digests([0, 0])) == []
    assert cache.evict(9) == [rows[1][0]]
    assert cache.num_entries_used == 2
    assert (cache.counts.inserted, cache.counts.evicted) == (6, 4)


def test_a_page_stays_until_its_last_row_has_gone():
    cache, rows = filled(1, 2)
    cache.acquire(rows[0][:1])
    cache.release(rows[0])
    assert cache.evict(2) == rows[0][1:]
    cache.release(rows[0][:1])
    assert cache.evict(2) == rows[0][:1]


def test_a_cache_full_of_pages_in_use_takes_no_more():
    cache, _ = filled(2, 2, num_entries=4)
    assert insert(cache, [7, 7], 0) is None
    assert cache.num_entries_used == 4


def test_the_hit_rate_is_that_of_tokens():
    cache = PrefixCache(4, page_size=2)
    assert cache.counts.hit_rate == 0.0
    cache.counts.looked_up, cache.counts.found = 8, 2
    assert cache.counts.hit_rate == 0.25


@pytest.mark.parametrize("name", ["num_entries", "page_size"])
def test_sizes_are_checked(name):
    sizes = {"num_entries": 4, "page_size": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of at least 1, got 0"):
        PrefixCache(**sizes)
