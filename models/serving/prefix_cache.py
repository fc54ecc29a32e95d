# SPDX-License-Identifier: Apache-2.0
"""A prefix cache: full pages found again by the content of their tokens.

A page is known by a hash that is chained over the tokens of its row up to the page's end, so equal
hashes mean equal contents *and* equal contexts. Where a row goes another way in the middle of a
page, it starts with a copy of that page, of which the first tokens are its own (`closest`). The
index lives on the host and never learns page
ids: it hands out *entries*, numbers in [0, num_entries), and the device keeps the page id of each
entry in an array of its own. What the index tells is carried out by verbs of the state: `hold` (a
page goes into an entry), `adopt` (a new row starts with entries) and `unhold` (one is evicted),
in the order in which it was told, so the host never waits for the device.

Reference counts of pages are the page table's; the index counts the rows that use an entry, because
only an entry without one may be evicted. Least recently used goes first, and of one row the last
page, since it is of no use without those before it. The idea is vLLM's automatic prefix caching.
"""

import bisect
import hashlib
import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_paged.checks import check_size


@dataclass
class _Entry:
    digest: bytes
    rows: int  # that use it now
    before: bytes  # the digest of the page before it
    tokens: tuple[int, ...]


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
    >>> cache.insert(digests[0], cache.root(), [5, 6]), cache.insert(digests[1], digests[0], [7, 8])
    (0, 1)
    >>> cache.match(cache.digests([5, 6, 7, 7])), cache.match(cache.digests([7, 8]))
    ([0], [])
    >>> cache.closest(digests[0], [7, 7])  # the first token of page 1
    (1, 1)
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
        # Behind each page those that follow it, by their tokens: neighbours have most in common.
        self._behind: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
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

    def root(self, salt: str = "") -> bytes:
        """What stands for the page before the first one of a row, as `digests` has it."""
        return hashlib.blake2b(self._root + salt.encode(), digest_size=16).digest()

    def digests(
        self, tokens: Sequence[int], known: Sequence[bytes] = (), *, salt: str = ""
    ) -> list[bytes]:
        """The chained hash of every full page of a row with these tokens.

        Args:
          tokens: the row from its start.
          known: its first digests, if they are known already.
          salt: what the row's pages depend on beside its tokens, such as an adapter.
        """
        result, root = list(known), self.root(salt)
        flat = np.asarray(tokens, np.int32)
        for page in range(len(result), len(flat) // self.page_size):
            part = flat[page * self.page_size : (page + 1) * self.page_size]
            before = result[-1] if result else root
            result.append(hashlib.blake2b(before + part.tobytes(), digest_size=16).digest())
        return result

    def find(self, digests: Iterable[bytes]) -> list[int | None]:
        """The entry of each page, or None; nothing changes."""
        return [self._by_digest.get(digest) for digest in digests]

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The entries of the longest run of cached pages from the start; nothing changes."""
        run = itertools.takewhile(lambda entry: entry is not None, self.find(digests))
        return [entry for entry in run if entry is not None]

    def closest(self, before: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(entry, count): a page behind another one, and how many of these tokens it begins with.

        Of all cached pages behind that one it has most of them; nothing changes.

        Args:
          before: the digest of the page before it, or `root`.
        """
        pages, wanted = self._behind.get(before, []), tuple(tokens)
        place = bisect.bisect(pages, (wanted,))
        near = ((_num_common(own, wanted), entry) for own, entry in pages[max(place - 1, 0) :][:2])
        count, entry = max(near, default=(0, -1))
        return entry, count

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

    def insert(self, digest: bytes, before: bytes, tokens: Sequence[int]) -> int | None:
        """An entry for a page that a row has filled, used by that row; the caller then holds it.

        None: the page is cached already, or the cache is full of pages in use.

        Args:
          before: the digest of the page before it, or `root`.
          tokens: of the page.
        """
        if digest in self._by_digest or not self._unused:
            return None
        entry = self._unused.pop()
        self._entries[entry] = _Entry(digest, 1, before, tuple(tokens))
        self._by_digest[digest] = entry
        bisect.insort(self._behind.setdefault(before, []), (tuple(tokens), entry))
        self.counts.inserted += 1
        return entry

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` entries that no row uses; the caller then unholds their pages."""
        gone = []
        while self._idle and len(gone) < count:
            entry, _ = self._idle.popitem(last=False)
            page = self._entries.pop(entry)
            del self._by_digest[page.digest]
            behind = self._behind[page.before]
            del behind[bisect.bisect_left(behind, (page.tokens, entry))]
            if not behind:
                del self._behind[page.before]
            self._unused.append(entry)
            gone.append(entry)
        self.counts.evicted += len(gone)
        return gone


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, a, b)))
