# SPDX-License-Identifier: Apache-2.0
"""A prefix cache: full pages found again by the content of their tokens.

A page is known by a hash that is chained over the tokens of its row up to the page's end, so equal
hashes mean equal contents *and* equal contexts. The index lives on the host and never learns page
ids: it hands out *entries*, numbers in [0, num_entries), and the device keeps the page id of each
entry in an array of its own. What the index tells is carried out by verbs of the state: `hold` (a
page goes into an entry), `adopt` (a new row starts with entries) and `unhold` (one is evicted),
in the order in which it was told, so the host never waits for the device.

Reference counts of pages are the page table's; the index counts the rows that use an entry, because
only an entry without one may be evicted. Least recently used goes first, and of one row the last
page, since it is of no use without those before it. The idea is vLLM's automatic prefix caching.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_paged.checks import check_size


@dataclass
class _Entry:
    digest: bytes
    rows: int  # that use it now


@dataclass
class CacheCounts:
    """What a cache has done so far, in tokens (looked_up, found) and pages (inserted, evicted)."""

    looked_up: int = 0
    found: int = 0
    inserted: int = 0
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """found / looked_up, 0 when nothing was looked up."""
        return self.found / self.looked_up if self.looked_up else 0.0


class PrefixCache:
    """The host's index of cached pages.

    Args:
      num_entries: most pages in the cache; never more than the pool has, so num_pages is right.
      page_size: tokens in a page.
      salt: what else the contents of pages depend on (model, layout, dtype); caches with different
        salts never take each other's pages for their own.

    >>> cache = PrefixCache(num_entries=8, page_size=2, salt="model")
    >>> digests = cache.digests([5, 6, 7, 8, 9])  # two full pages
    >>> [cache.insert(digest) for digest in digests]
    [0, 1]
    >>> cache.match(cache.digests([5, 6, 7, 7])), cache.match(cache.digests([7, 8]))
    ([0], [])
    >>> cache.release([0, 1])  # the row that computed them is gone
    >>> cache.evict(1), cache.num_entries_used
    ([1], 1)
    """

    def __init__(self, num_entries: int, page_size: int, salt: str = ""):
        self.num_entries = check_size("num_entries", num_entries)
        self.page_size = check_size("page_size", page_size)
        self.counts = CacheCounts()
        self.salt = salt
        self._entries: dict[int, _Entry] = {}
        self._by_digest: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # without rows, least recent first
        self._unused = list(range(self.num_entries))[::-1]

    @property
    def salt(self) -> str:
        """What it was made with, or set to since: then no page of before is found any more."""
        return self._salt

    @salt.setter
    def salt(self, salt: str) -> None:
        self._salt = salt
        text = repr((salt, self.page_size))
        self._root = hashlib.blake2b(text.encode(), digest_size=16).digest()

    @property
    def num_entries_used(self) -> int:
        """Pages in the cache."""
        return len(self._entries)

    @property
    def num_idle(self) -> int:
        """Pages in the cache that no row uses: `evict` can free so many."""
        return len(self._idle)

    def digests(
        self, tokens: Sequence[int], known: Sequence[bytes] = (), *, salt: str = ""
    ) -> list[bytes]:
        """The chained hash of every full page of a row with these tokens.

        Args:
          tokens: the row from its start.
          known: its first digests, if they are known already.
          salt: what the row's pages depend on beside its tokens, such as an adapter.
        """
        result, root = list(known), self._root
        if salt:
            root = hashlib.blake2b(root + salt.encode(), digest_size=16).digest()
        flat = np.asarray(tokens, np.int32)
        for page in range(len(result), len(flat) // self.page_size):
            part = flat[page * self.page_size : (page + 1) * self.page_size]
            before = result[-1] if result else root
            result.append(hashlib.blake2b(before + part.tobytes(), digest_size=16).digest())
        return result

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The entries of the longest run of cached pages from the start; nothing changes."""
        entries = []
        for digest in digests:
            entry = self._by_digest.get(digest)
            if entry is None:
                break
            entries.append(entry)
        return entries

    def acquire(self, entries: Iterable[int]) -> None:
        """A row starts to use these entries: they stay until as many rows have released them."""
        for entry in entries:
            self._entries[entry].rows += 1
            self._idle.pop(entry, None)

    def release(self, entries: Sequence[int]) -> None:
        """A row has let go of these entries, given in the order of its pages."""
        for entry in reversed(entries):
            known = self._entries[entry]
            known.rows -= 1
            if known.rows == 0:
                self._idle[entry] = None

    def insert(self, digest: bytes) -> int | None:
        """An entry for a page that a row has filled, used by that row; the caller then holds it.

        None: the page is cached already, or the cache is full of pages in use.
        """
        if digest in self._by_digest or not self._unused:
            return None
        entry = self._unused.pop()
        self._entries[entry] = _Entry(digest, rows=1)
        self._by_digest[digest] = entry
        self.counts.inserted += 1
        return entry

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` entries that no row uses; the caller then unholds their pages."""
        gone = []
        while self._idle and len(gone) < count:
            entry, _ = self._idle.popitem(last=False)
            del self._by_digest[self._entries.pop(entry).digest]
            self._unused.append(entry)
            gone.append(entry)
        self.counts.evicted += len(gone)
        return gone
