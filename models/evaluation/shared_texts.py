# SPDX-License-Identifier: Apache-2.0
"""Which texts share a beginning, and when each of them is fed: the host's side of likelihoods.

Texts are sorted, so that a text has its longest beginning in common with the one before it. It
starts as a fork of the first earlier text that has this beginning (its source), and feeds only the
rest. So what many texts share, such as the context of several answers or the examples before all
questions, is fed once. A prediction belongs to the text that feeds the token it is made from.

`Schedule` packs texts into steps of a fixed number of tokens. It counts pages as the page table
does. A text stays in its row while others still wait to fork from it. If it is in the way, the
texts that wait start anew from the first of them.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jax_paged.ops.batch import pages_for

from ..decoder.steps import cheapest_sizes

# A fork of fewer tokens is not worth waiting for.
_LEAST_SHARED = 4


@dataclasses.dataclass(eq=False)
class Text:
    """Tokens that are fed once, and what is predicted from them."""

    tokens: np.ndarray  # i32[n]
    shared: int = 0  # tokens that it has in common with its source, below n
    source: "Text | None" = None
    positions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    targets: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    pairs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    # Of the schedule.
    waiting: int = 0  # texts that will fork from it
    row: int = -1
    fed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """It can start: it forks from no text, or from one that has fed enough."""
        return self.source is None or (self.source.row >= 0 and self.source.fed >= self.shared)

    @property
    def left(self) -> int:
        """Tokens that are still to be fed."""
        return len(self.tokens) - self.fed


def share_texts(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Text]:
    """The texts of (context, continuation) pairs, sorted; each says which pairs it predicts.

    The last token of a continuation is predicted and never fed.
    """
    inputs = [np.concatenate([context, ending[:-1]]) for context, ending in pairs]
    order = sorted(range(len(pairs)), key=lambda i: inputs[i].astype(">i4").tobytes())
    texts: list[Text] = []
    found: list[list[tuple[np.ndarray, np.ndarray, int]]] = []
    numbers: dict[int, int] = {}  # of texts, by id
    for i in order:
        tokens = inputs[i]
        if not texts or not np.array_equal(tokens, texts[-1].tokens):
            texts.append(_with_source(tokens, texts[-1] if texts else None))
            numbers[id(texts[-1])] = len(found)
            found.append([])
        context, ending = pairs[i]
        first, stop, owner = len(context) - 1, len(tokens), texts[-1]
        while stop > first:
            begin = max(first, owner.shared)
            if begin < stop:
                positions = np.arange(begin, stop, dtype=np.int32)
                own = (positions, ending[begin - first : stop - first], i)
                found[numbers[id(owner)]].append(own)
                stop = begin
            if stop > first:
                assert owner.source is not None
                owner = owner.source
    for text, each in zip(texts, found, strict=True):
        if each:
            positions = np.concatenate([part[0] for part in each])
            by_position = np.argsort(positions, kind="stable")
            targets = np.concatenate([part[1] for part in each])
            owners = np.repeat([part[2] for part in each], [len(part[0]) for part in each])
            text.positions, text.targets = positions[by_position], targets[by_position]
            text.pairs = owners[by_position]
        if text.source is not None:
            text.source.waiting += 1
    return texts


def _with_source(tokens: np.ndarray, before: Text | None) -> Text:
    """A text that starts as the one sorted before it, or as the first earlier one that does."""
    if before is None:
        return Text(tokens)
    size = min(len(tokens), len(before.tokens))
    differs = np.flatnonzero(tokens[:size] != before.tokens[:size])
    shared = int(differs[0]) if differs.size else size
    if shared < _LEAST_SHARED:
        return Text(tokens)
    source = before
    while source.source is not None and source.shared >= shared:
        source = source.source
    return Text(tokens, shared, source)


@dataclasses.dataclass
class Orders:
    """What one step does: rows to release, then (parent, child, length) to fork, then feeds."""

    releases: list[int]
    forks: list[tuple[int, int, int]]
    feeds: list[tuple[Text, int, int, int]]  # text, row, and its tokens [begin, end)


def in_sizes(orders: Orders, sizes: Sequence[int]) -> Iterator[Orders]:
    """The same orders for programs of these sizes, ascending: as one or as several steps.

    138 tokens are fed as 128 and 10 where the sizes are 32, 128 and 512, as 512 would take longer.
    """
    releases, forks, feeds = orders.releases, orders.forks, list(orders.feeds)
    for size in cheapest_sizes(sum(end - begin for _, _, begin, end in feeds), sizes):
        room, part = size, []
        while room and feeds:
            text, row, begin, end = feeds.pop(0)
            stop = min(end, begin + room)
            part.append((text, row, begin, stop))
            room -= stop - begin
            if stop < end:
                feeds.insert(0, (text, row, stop, end))
        yield Orders(releases, forks, part)
        releases, forks = [], []


class Schedule:
    """Plans steps until all texts are fed.

    Args:
      texts: of `share_texts`.
      num_pages, page_size, max_seqs: of the state; the longest text fits.
      max_tokens: of a step.
    """

    def __init__(
        self, texts: Sequence[Text], *, num_pages: int, page_size: int, max_seqs: int,
        max_tokens: int,
    ):  # fmt: skip
        self._pending = collections.OrderedDict((id(text), text) for text in texts)
        self._running: list[Text] = []  # in rows, with tokens left
        self._kept: list[Text] = []  # in rows, for those that will fork from them
        self._releases: list[int] = []  # rows, by the next step
        self._page_size, self._max_tokens, self._look = page_size, max_tokens, 4 * max_seqs
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._free_pages = num_pages
        self._holders = collections.Counter[int]()  # rows that hold a page; its id is made up
        self._ids = itertools.count()

    def __iter__(self) -> Iterator[Orders]:
        while self._running or self._pending:
            orders = self._plan()
            if orders.feeds:
                yield orders
            else:
                self._start_anew()

    def _plan(self) -> Orders:
        orders, room = Orders(self._releases, [], []), self._max_tokens
        running, self._running = self._running, []
        for text in running:
            room -= self._feed(text, room, orders)
        ended = []
        for text in [t for t in itertools.islice(self._pending.values(), self._look) if t.is_ready]:
            if room == 0 or not self._free_rows:
                break
            if self._start(text, orders, ended):
                room -= self._feed(text, room, orders)
        if not orders.feeds:
            return orders
        self._releases = []
        for text, _, _, end in orders.feeds:
            text.fed = end
            if text.left:
                self._running.append(text)
            elif text.waiting:
                self._kept.append(text)
            else:
                ended.append(text)
        for text in ended:  # what the next step releases, it may also hand out
            self._release(text)
        return orders

    def _feed(self, text: Text, room: int, orders: Orders) -> int:
        count = min(text.left, room)
        if count:
            orders.feeds.append((text, text.row, text.fed, text.fed + count))
        else:
            self._running.append(text)
        return count

    def _start(self, text: Text, orders: Orders, ended: list[Text]) -> bool:
        """Gives a text a row and all its pages, as a fork if it has a source."""
        source, shared = text.source, text.shared if text.source is not None else 0
        own = pages_for(len(text.tokens), self._page_size) - shared // self._page_size
        if own > self._free_pages:
            return False
        del self._pending[id(text)]
        self._free_pages -= own
        text.row, text.fed = self._free_rows.pop(), shared
        if source is not None:
            orders.forks.append((source.row, text.row, shared))
            text.pages = source.pages[: shared // self._page_size]
            source.waiting -= 1
            if source in self._kept and not source.waiting:
                self._kept.remove(source)
                ended.append(source)
        text.pages = text.pages + [next(self._ids) for _ in range(own)]
        self._holders.update(text.pages)
        return True

    def _release(self, text: Text) -> None:
        self._releases.append(text.row)
        self._free_rows.append(text.row)
        for page in text.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free_pages += 1
        text.row, text.pages = -1, []

    def _start_anew(self) -> None:
        """Nothing runs and nothing fits: lets go of all rows that others wait for.

        Of the texts that wait for one row the first feeds all of it, and the others fork from that
        one: it stands between them and the row in the order, so it shares as much with them.
        """
        heirs: dict[int, Text] = {}
        gone = {id(text) for text in self._kept}
        for text in self._pending.values():
            if text.source is None or id(text.source) not in gone:
                continue
            heir = heirs.setdefault(id(text.source), text)
            text.source = None if heir is text else heir
            heir.waiting += heir is not text
        for text in self._kept:
            text.waiting = 0
            self._release(text)
        self._kept = []
