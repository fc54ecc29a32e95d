# SPDX-License-Identifier: Apache-2.0
"""Which requests run in the engine's next step, and in which pages: plain Python on the host.

The scheduler never asks the device. It counts pages: each is free, or the own page of one row, or
the page of a cache entry, whatever the number of rows that share it. From that it knows when a
reservation will succeed, and what to do when it would not:

- A request starts when all the pages of its prompt are there, and one for each running request to
  grow into. Requests start in their order (priority, then arrival), nobody overtakes but those
  whose K and V are still on their way from another engine.
- When a running request needs a page and there is none, the cache gives up pages that nobody uses;
  then the running request that is last in the order is preempted: its row is released and it waits
  again, to compute prompt and new tokens anew (what the cache has kept of them is not computed).
  With swapping its pages are copied to host memory first, and back when it starts again; where they
  do not fit into what is free of `swap_pages`, it computes anew as it would without.
  The first in the order is never preempted and fits the pool, so everything comes to its end.
- A request of higher priority that waits preempts running ones of lower priority.
- Decode rows come first, then prefill chunks fill the step up, to one of its compiled sizes.
"""

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_paged.ops.batch import pages_for

from ..decoder.steps import cheapest_sizes
from .prefix_cache import PrefixCache
from .request import Request

_LEAST_BEGUN = 2  # tokens of a page; one is sooner computed

Draft = Callable[[Request, int], tuple[list[int], list[int]]]  # tokens, parents in a tree or []


@dataclasses.dataclass
class Feed:
    """Tokens that a request feeds in a step: `count` that exist, then guesses."""

    request: Request
    row: int
    count: int
    drafts: list[int]
    draws: bool  # whether a token is drawn behind them
    parents: list[int] = dataclasses.field(default_factory=list)  # of guesses that make a tree
    begin: int = 0  # the place of its first token in the request's text, once it is dispatched

    @property
    def num_tokens(self) -> int:
        return self.count + len(self.drafts)


class Found(NamedTuple):
    """What a cache has of a request that waits."""

    entries: list[int]  # of its first pages, without those that have slid away
    slid: int = 0  # pages that have
    begun: int = 0  # tokens of its next page
    source: int = -1  # the entry of a page that begins with these


class Adoption(NamedTuple):
    """A row that starts."""

    row: int
    entries: list[int]  # of the cache, its first pages
    room: int  # tokens to reserve room for behind them
    had: int  # of those, tokens that come from host memory or with a copied page
    slid: int  # pages of the row that have slid away
    source: int  # the entry whose page is copied into the one behind `entries`; -1 = none


@dataclasses.dataclass
class Orders:
    """What the device must do before the step, see `step.PageOrders`."""

    holds: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    releases: list[int] = dataclasses.field(default_factory=list)
    evictions: list[int] = dataclasses.field(default_factory=list)
    adoptions: list[Adoption] = dataclasses.field(default_factory=list)
    starts: list[Request] = dataclasses.field(default_factory=list)  # those of the adoptions
    # row, its pages, number of the request, under which they lie in host memory
    swap_outs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    # row, its first column that is not the cache's, number of the request
    swap_ins: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    forgets: list[int] = dataclasses.field(default_factory=list)  # numbers, at last


def window_pages(window: tuple[int, int], max_tokens: int, page_size: int) -> int:
    """Most pages of a row with a window, of so many tokens and pinned ones.

    What the first token of the longest chunk sees of those before it, from anywhere in a page on,
    and the chunk; behind the pages with pinned tokens.
    """
    tokens, num_pinned = window
    behind = tokens - num_pinned - 1 + max_tokens + page_size - 1
    return pages_for(num_pinned, page_size) + pages_for(behind, page_size)


class Scheduler:
    """The waiting and the running requests, and the count of pages.

    Args:
      num_pages, max_seqs, pages_per_seq, page_size: of the page table.
      step_sizes: the compiled sizes of steps, ascending; the last is the most tokens of a step.
      cache: the prefix cache, or None.
      swap_pages: pages of preempted requests in host memory; 0 = none, they compute anew.
      chunk_pages: host memory is taken by so many pages at a time.
      window: the tokens that a token of any request sees, and those of them that are pinned; None =
        all. With one a row counts as what it holds at most, all along; a page of it that the cache
        has counts there once more, if it has no pinned tokens.
    """

    def __init__(
        self, *, num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int,
        step_sizes: Sequence[int], cache: PrefixCache | None, swap_pages: int = 0,
        chunk_pages: int = 1, window: tuple[int, int] | None = None,
    ):  # fmt: skip
        self.page_size, self._step_sizes, self.cache = page_size, step_sizes, cache
        self.max_tokens = max_tokens = step_sizes[-1]
        self.num_free_swap, self.chunk_pages = swap_pages, chunk_pages
        self.num_swapped_out = self.num_swapped_in = 0
        self.most_pages = min(num_pages, pages_per_seq)
        self._window = window
        self._window_pages: int | None = None  # most pages of a row with a window
        if window is not None:
            self._window_pages = window_pages(window, max_tokens, page_size)
        self._pinned_pages = 0 if window is None else pages_for(window[1], page_size)
        self.num_free = num_pages
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.orders = Orders()
        self.num_preemptions = 0
        self._free_rows = list(range(max_seqs))  # a heap: a step costs up to its last row
        self._bumped: set[int] = set()  # requests preempted by the present plan

    @property
    def num_available(self) -> int:
        """Pages that are free or that the cache would give up."""
        return self.num_free + (self.cache.num_idle if self.cache else 0)

    def pages_needed(self, tokens: int) -> int:
        """Pages of a row with so many tokens; with a window, those that it holds at most."""
        pages = pages_for(tokens, self.page_size)
        return pages if self._window_pages is None else min(pages, self._window_pages)

    def _slid(self, tokens: int) -> int:
        """Pages of a row that have gone when it makes room for what comes behind `tokens` tokens.

        They were the first ones behind those with pinned tokens.
        """
        if self._window is None:
            return 0
        size, num_pinned = self._window
        begin = tokens - (size - num_pinned) + 1  # what the next token sees, beside pinned ones
        return max(begin // self.page_size - self._pinned_pages, 0)

    @property
    def load(self) -> int:
        """Tokens that its requests have still to feed or to draw."""
        return sum(r.num_to_feed + r.num_left for r in (*self.waiting, *self.running))

    def num_cached(self, request: Request) -> int:
        """Tokens of a waiting request that the cache has."""
        found = self._match(request)
        return (len(found.entries) + found.slid) * self.page_size + found.begun

    def add(self, request: Request) -> None:
        """Lets a request wait for its turn."""
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is; its pages are free or in the cache then."""
        if request.row is not None:
            if request.hands_out and request.is_done:  # not one that is cancelled
                request.num_kept = min(request.fed, request.num_known)
                num_pages = pages_for(request.num_kept, self.page_size) - request.slid
                self.orders.swap_outs.append((request.row, num_pages, request.number))
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._drop_swapped(request)

    def await_pages(self, request: Request, tokens: int) -> bool:
        """Takes room in host memory for the first tokens of a request that waits, if there is some.

        When the request starts, host memory must have them.
        """
        need = self.swap_need(tokens)
        if need > self.num_free_swap:
            return False
        self.num_free_swap -= need
        request.swapped = tokens
        return True

    def give_up(self, request: Request) -> None:
        """A request that waits gets nothing from host memory."""
        request.is_awaited = False
        self._drop_swapped(request)

    def swap_need(self, tokens: int) -> int:
        """Pages of host memory for so many tokens: whole chunks."""
        chunks = -(-self.pages_needed(tokens) // self.chunk_pages)
        return chunks * self.chunk_pages

    def take_orders(self) -> Orders:
        """The orders since the last time."""
        orders, self.orders = self.orders, Orders()
        return orders

    def plan(self, draft: Draft | None = None, max_drafts: int = 0) -> list[Feed]:
        """Chooses what the next step feeds, and gives the orders that must come before it.

        Args:
          draft: guesses up to so many tokens behind the known ones of a request; None = no guesses.
          max_drafts: most guesses per request.
        """
        feeds: list[Feed] = []
        room = self.max_tokens
        self._bumped.clear()
        self._evict(-self.num_free)  # for what the cache got of rows with windows
        for request in sorted(self.running, key=lambda r: r.order):
            row = request.row
            if row is None or request.num_to_feed != 1 or request.num_left <= 0:
                continue  # preempted just now, or with nothing to do
            if not self._grow(request, request.fed + 1):
                continue
            drafts, parents = [], []
            if draft is not None and request.in_flight == 0 and request.matcher is None:
                most = min(max_drafts, request.num_left - 1)
                drafts, parents = self._drafts(request, draft, most)
            feeds.append(Feed(request, row, 1, drafts, True, parents))
            room -= feeds[-1].num_tokens
        prefill = sum(r.num_to_feed for r in self.running if r.num_to_feed > 1)
        while room > prefill and self._start_one():
            prefill += self.running[-1].num_to_feed
        used = self.max_tokens - room
        room = self._filling(used, min(used + prefill, self.max_tokens)) - used
        fed = {feed.request.number for feed in feeds}
        for request in sorted(self.running, key=lambda r: r.order):
            row, count = request.row, min(room, request.num_to_feed)
            if row is not None and count > 0 and request.num_left > 0 and request.number not in fed:
                feeds.append(Feed(request, row, count, [], count == request.num_to_feed))
                room -= count
        # A victim of a start above may have been planned already.
        return [feed for feed in feeds if feed.request.row is not None]

    def _filling(self, used: int, wanted: int) -> int:
        """How many of `wanted` tokens a step feeds so that it is hardly padded.

        Args:
          used: those that it feeds in any case.
        """
        size = cheapest_sizes(wanted, self._step_sizes)[0]
        return size if used < size < wanted else wanted

    def dispatched(self, feeds: list[Feed]) -> None:
        """A step with these feeds has gone to the device."""
        for feed in feeds:
            feed.begin = feed.request.fed
            feed.request.slid = max(feed.request.slid, self._slid(feed.begin))
            self._release_adopted(feed.request)
            feed.request.fed += feed.num_tokens
            feed.request.in_flight += feed.draws
            self.offer(feed.request)

    def cut(self, request: Request, count: int) -> None:
        """The device has dropped the last `count` tokens of the request's row."""
        request.fed -= count
        keep = self.pages_needed(request.fed)
        self.num_free += len(request.columns) - keep
        del request.columns[keep:]

    def offer(self, request: Request) -> None:
        """Puts the full pages of known tokens into the cache."""
        if self.cache is None or request.row is None or request.is_stale:
            return
        known = min(request.fed, request.num_known)
        full = known // self.page_size
        if full <= request.num_offered:
            return
        tokens = request.known(0, full * self.page_size)
        request.digests = self.cache.digests(tokens, request.digests[:full], salt=request.salt)
        for column in range(request.num_offered, full):
            if self._pinned_pages <= column < self._pinned_pages + request.slid:
                continue
            before = request.digests[column - 1] if column else self.cache.root(request.salt)
            page = tokens[column * self.page_size : (column + 1) * self.page_size]
            entry = self.cache.insert(request.digests[column], before, page)
            if entry is None:
                continue
            self.orders.holds.append((request.row, column, entry))
            if self._window is None or column < self._pinned_pages:
                request.columns[column] = entry
            else:  # the page counts twice; where none is free, the next plan evicts one
                self.num_free -= 1
                self.cache.release([entry])
        request.num_offered = full

    def clear_cache(self) -> None:
        """Gives up all cached pages that no row uses."""
        if self.cache is not None:
            self._evict(self.cache.num_idle)

    def renew(self, salt: str, *, recompute: bool) -> None:
        """The model has other weights: what pages hold is no longer what it would compute.

        Args:
          salt: of the cache from now on.
          recompute: whether running requests compute K and V anew; else they go on with theirs,
            which the cache does not get.
        """
        for request in list(self.running):
            if recompute:
                self._preempt(request, swaps=False)
            request.is_stale = not recompute
        for request in (*self.running, *self.waiting):
            request.digests = []
        for request in self.waiting:
            self._drop_swapped(request)
        self.clear_cache()
        if self.cache is not None:
            self.cache.salt = salt

    def _drafts(self, request: Request, draft: Draft, most: int) -> tuple[list[int], list[int]]:
        """Guesses, in pages that are free after every running request has got one."""
        spare = max(self.num_available - len(self.running), 0) + len(request.columns)
        if self.pages_needed(request.fed + 1 + most) > spare:
            most = min(most, spare * self.page_size - request.fed - 1)
        if self._window is not None and request.fed < self._window[1]:
            most = 0  # trees begin behind pinned tokens
        drafts, parents = draft(request, most) if most > 0 else ([], [])
        if drafts:
            self._grow(request, request.fed + 1 + len(drafts))
        return drafts, parents

    def _grow(self, request: Request, tokens: int) -> bool:
        """Finds the pages for a row of so many tokens; False if the row had to go instead."""
        need = self.pages_needed(tokens) - len(request.columns)
        while self.num_available < need:
            last = max(self.running, key=lambda r: r.order)
            self._preempt(last)
            if last is request:
                return False
        self._take(request, need)
        return True

    def _take(self, request: Request, count: int) -> None:
        if count > 0:
            self._evict(count - self.num_free)
            self.num_free -= count
            request.columns.extend([-1] * count)

    def _evict(self, count: int) -> None:
        if self.cache is not None and count > 0:
            gone = self.cache.evict(count)
            self.orders.evictions.extend(gone)
            self.num_free += len(gone)

    def _start_one(self) -> bool:
        """Starts the first waiting request if there is room for it."""
        request = next((r for r in self.waiting if not r.is_awaited), None)
        if request is None:
            return False
        # Tokens of a preempted request may still be on their way.
        if request.in_flight > 0 or request.number in self._bumped:
            return False
        entries, slid, begun, source = self._match(request)
        staying = entries if self._window is None else entries[: self._pinned_pages]
        need = self.pages_needed(request.num_known) - len(staying)
        if self.cache is not None:
            self.cache.acquire(entries)
        if not self._make_room(request, need):
            if self.cache is not None:
                self.cache.release(entries)
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.row = heapq.heappop(self._free_rows)
        if begun and self.cache is not None:
            self.cache.acquire([source])  # until it is copied
            if self.num_available < need:
                self.cache.release([source])
                begun, source = 0, -1
        cached = (len(entries) + slid) * self.page_size
        request.columns = list(staying)
        request.adopted = [*entries[len(staying) :], *([source] if begun else [])]
        if self._window is None:
            swapped, rest = max(request.swapped - cached, 0), request.num_known - cached
        else:  # a chunk gets its pages in its own step, where others become free
            swapped = rest = max(request.swapped - slid * self.page_size, 0)
        request.fed = cached + swapped + begun
        request.num_offered, request.slid = len(entries) + slid, slid
        self._take(request, need)
        had = swapped + begun
        self.orders.adoptions.append(Adoption(request.row, list(entries), rest, had, slid, source))
        self.orders.starts.append(request)
        if swapped:
            self.orders.swap_ins.append((request.row, len(entries), request.number))
            self.num_swapped_in += 1
        self._drop_swapped(request)
        if self.cache is not None and request.num_preemptions == 0:
            request.num_cached = cached + begun
            self.cache.counts.looked_up += request.num_known
            self.cache.counts.found += cached + begun
        return True

    def _match(self, request: Request) -> Found:
        """What the cache has of a request; at least one token is left to feed.

        Pages of the cache cannot tell what the model thinks of the tokens in them.
        """
        if self._window is not None and request.swapped:
            return Found([], request.swapped_slid)
        if self.cache is None or request.tells_prompt:
            return Found([])
        tokens = request.known(0, request.num_known)
        request.digests = self.cache.digests(tokens, request.digests, salt=request.salt)
        digests = request.digests[: (request.num_known - 1) // self.page_size]
        if self._window is not None:
            return self._kept(digests)
        entries = self.cache.match(digests)
        full = len(entries)
        rest = tokens[full * self.page_size : min((full + 1) * self.page_size, len(tokens) - 1)]
        before = digests[full - 1] if full else self.cache.root(request.salt)
        source, begun = self.cache.closest(before, rest)
        if begun < _LEAST_BEGUN or request.swapped:
            return Found(entries)
        return Found(entries, begun=begun, source=source)

    def _kept(self, digests: Sequence[bytes]) -> Found:
        """`_match` of a row with a window: pages that it no longer sees may be out of the cache."""
        assert self.cache is not None
        entries = self.cache.find(digests)
        misses = [0, *itertools.accumulate(entry is None for entry in entries)]
        for count in range(len(entries), 0, -1):
            slid = self._slid(count * self.page_size)
            begin = min(self._pinned_pages, count)
            if misses[begin] == 0 and misses[count] == misses[begin + slid]:
                found = entries[:begin] + entries[begin + slid : count]
                if len(found) <= self.most_pages:
                    return Found([entry for entry in found if entry is not None], slid)
        return Found([])

    def _release_adopted(self, request: Request) -> None:
        """Lets go of what a row has from the cache, but not as a page that it shares.

        That is a page which it has a copy of, and of a row with a window all of them: they count as
        its own from its first step on.
        """
        if self.cache is not None and request.adopted:
            self.cache.release(request.adopted)
        request.adopted = []

    def _make_room(self, request: Request, need: int) -> bool:
        """Whether a row and pages are there; preempts rows of lower priority where that helps."""

        def lacks():
            growth = len(self.running)  # a page for each to grow into
            return not self._free_rows or self.num_available < need + growth

        if not lacks():
            return True
        victims = [r for r in self.running if r.priority < request.priority]
        hope = self.num_available + sum(len(r.columns) for r in victims)
        if not victims or hope < need + len(self.running) - len(victims):
            return False
        for victim in sorted(victims, key=lambda r: r.order, reverse=True):
            if not lacks():
                break
            self._preempt(victim)
        return not lacks()

    def _preempt(self, request: Request, *, swaps: bool = True) -> None:
        need = self.swap_need(request.fed) if swaps and not request.is_stale else 0
        if 0 < need <= self.num_free_swap and request.row is not None:
            self.num_free_swap -= need
            request.swapped, request.swapped_slid = request.fed, request.slid
            num_pages = pages_for(request.fed, self.page_size) - request.slid
            self.orders.swap_outs.append((request.row, num_pages, request.number))
            self.num_swapped_out += 1
        self._leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._bumped.add(request.number)
        self.add(request)

    def _leave(self, request: Request) -> None:
        assert request.row is not None
        self.running.remove(request)
        self.orders.releases.append(request.row)
        heapq.heappush(self._free_rows, request.row)
        own = request.columns.count(-1)
        self.num_free += own
        if self.cache is not None:
            self.cache.release([entry for entry in request.columns if entry >= 0])
        self._release_adopted(request)
        request.slid = 0
        request.row, request.columns, request.fed, request.num_offered = None, [], 0, 0
        request.is_stale = False

    def _drop_swapped(self, request: Request) -> None:
        """Forgets what host memory has of a request."""
        if request.swapped:
            self.num_free_swap += self.swap_need(request.swapped)
            self.orders.forgets.append(request.number)
            request.swapped = 0
