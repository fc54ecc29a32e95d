# SPDX-License-Identifier: Apache-2.0
"""What a page table must do, in plain Python: the model of `test_state_machine`.

It knows rows as lists of page ids and of token values, and free pages as a list used as a stack. It
handles the rows of a call one after the other, in loops.
"""

from dataclasses import dataclass, field

from jax_paged.cache.table import STALE
from jax_paged.cache.trees import NO_TREE
from jax_paged.checks.status import Status
from jax_paged.layout import Layout


@dataclass(frozen=True)
class Config:
    num_pages: int
    max_seqs: int
    pages_per_seq: int
    page_size: int
    layout: Layout
    max_tree: int = 5
    windows: bool = False

    @property
    def batch_tokens(self) -> int:
        return 2 * self.page_size + 3


@dataclass
class Row:
    pages: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)  # parents of the nodes, which are the last tokens
    starts: list[int] = field(default_factory=list)  # number of the first token of each page
    window: int = 0
    pinned: int = 0
    gone: int = 0  # tokens on pages that slid away

    @property
    def root(self) -> int:
        return len(self.tokens) - len(self.tree)

    def page_of(self, token: int) -> int:
        """The page that holds a token, or will."""
        return self.pages[max(i for i, start in enumerate(self.starts) if start <= token)]

    def begin(self, query: int) -> int:
        """The first token that is not pinned and that the query at this position sees."""
        return query - (self.window - self.pinned) + 1

    def path(self, node: int) -> list[int]:
        """The nodes from a root down to `node`; -1 is above all roots."""
        return [] if node == -1 else [*self.path(self.tree[node]), node]


class Model:
    """What a page table must do, one row after the other."""

    def __init__(self, config: Config):
        self.config = config
        self.rows: dict[int, Row] = {}
        self.releases = [0] * config.max_seqs
        self.reset()

    def reset(self) -> None:
        for row in self.rows:
            self.releases[row] += 1
        self.rows = {}
        self.free = list(range(self.config.num_pages))[::-1]
        self.peak = 0

    def holders(self, page: int) -> int:
        return sum(page in row.pages for row in self.rows.values())

    def full_pages(self, tokens: int) -> int:
        return tokens // self.config.page_size

    def pages_for(self, tokens: int) -> int:
        full = self.full_pages(tokens)
        return full if full * self.config.page_size == tokens else full + 1

    def is_bad(self, row: int, rows: list[int]) -> bool:
        return not 0 <= row < self.config.max_seqs or rows.count(row) > 1

    def let_go(self, row: Row, page: int) -> None:
        del row.starts[row.pages.index(page)]
        row.pages.remove(page)
        if self.holders(page) == 0:
            self.free.append(page)

    def take(self, row: Row) -> None:
        row.starts.append(row.gone + len(row.pages) * self.config.page_size)
        row.pages.append(self.free.pop())

    def room(self, row: Row) -> int:
        """Tokens that can still go to the pages of the row."""
        return row.gone + len(row.pages) * self.config.page_size - len(row.tokens)

    def serve(self, statuses: list[Status], needs: list[int]) -> list[Status]:
        """Fills in POOL_FULL: nobody overtakes."""
        left, some_must_wait = len(self.free), False
        for i, need in enumerate(needs):
            if statuses[i] == Status.OK:
                left -= need
                if need > 0 and (left < 0 or some_must_wait):
                    statuses[i] = Status.POOL_FULL
                    some_must_wait = True
        return statuses

    def changed(self) -> None:
        self.peak = max(self.peak, self.config.num_pages - len(self.free))

    def sliding(self, row: Row) -> list[int]:
        """The pages that the next token, or a new root of the row's tree, sees nothing of."""
        if row.window == 0:
            return []
        pages = zip(row.pages, row.starts, strict=True)
        end = row.begin(row.root) - self.config.page_size
        return [page for page, start in pages if row.pinned <= start <= end]

    def reserve(self, rows: list[int], counts: list[int]) -> list[Status]:
        statuses, needs, news = [], [], []
        for row, count in zip(rows, counts, strict=True):
            has = self.rows.get(row, Row())
            need = new = 0
            slid = self.sliding(has)
            missing = self.pages_for(max(0, count - self.room(has)))
            if row == -1:
                status = Status.OK
            elif row == STALE:
                status = Status.STALE_ROW
            elif self.is_bad(row, rows) or count < 0:
                status = Status.BAD_ROW
            elif len(has.pages) - len(slid) + missing > self.config.pages_per_seq:
                status = Status.ROW_FULL
            else:
                status = Status.OK
                new = missing
                need = new - sum(self.holders(page) == 1 for page in slid)
            statuses.append(status)
            needs.append(need)
            news.append(new)
        self.serve(statuses, needs)
        if not any(statuses):
            live = [(row, new) for row, new in zip(rows, news, strict=True) if row != -1]
            for row, _ in live:
                has = self.rows.setdefault(row, Row())
                for page in self.sliding(has):
                    self.let_go(has, page)
                    has.gone += self.config.page_size
            for row, new in live:
                for _ in range(new):
                    self.take(self.rows[row])
            self.changed()
        return statuses

    def nodes_of(self, rows: list[int], q_lens: list[int], parents: list[int]) -> list[list[int]]:
        """The parents of each row's tokens, as far as the batch reaches."""
        parents, found = list(parents), []
        for row, q_len in zip(rows, q_lens, strict=True):
            mine = parents[: max(0, q_len)]
            del parents[: len(mine)]
            found.append(mine if row != -1 else [])
        return found

    def step(
        self, rows: list[int], q_lens: list[int], values: list[float], parents: list[int] | None
    ) -> list[Status]:
        statuses = []
        used = 0
        nodes_of = self.nodes_of(rows, q_lens, parents or [NO_TREE] * self.config.batch_tokens)
        for row, q_len, nodes in zip(rows, q_lens, nodes_of, strict=True):
            has = self.rows.get(row)
            grows = any(parent != NO_TREE for parent in nodes)
            used += max(0, q_len)
            if row == -1:
                status = Status.OK
            elif row == STALE:
                status = Status.STALE_ROW
            elif self.is_bad(row, rows) or q_len < 0:
                status = Status.BAD_ROW
            elif has is None:
                status = Status.STALE_ROW
            elif grows and (
                any(not -1 <= p < len(has.tree) + i for i, p in enumerate(nodes))
                or (has.window and has.root < has.pinned)
            ):
                status = Status.BAD_ROW
            elif q_len > 0 and has.tree and not grows:
                status = Status.UNCOMMITTED_TREE
            elif q_len > self.room(has) or (grows and len(has.tree) + q_len > self.config.max_tree):
                status = Status.ROW_FULL
            else:
                fits = q_len == 0 or used <= self.config.batch_tokens
                status = Status.OK if fits else Status.BAD_ROW
            statuses.append(status)
        if not any(statuses):
            values = list(values)
            for row, q_len, nodes in zip(rows, q_lens, nodes_of, strict=True):
                mine = values[: max(0, q_len)]
                del values[: len(mine)]
                if row != -1:
                    self.rows[row].tokens += mine
                    self.rows[row].tree += [p for p in nodes if p != NO_TREE]
        return statuses

    def set_window(self, rows: list[int], windows: list[int], pinned: list[int]) -> list[Status]:
        statuses, settings = [], []
        for row, window, first in zip(rows, windows, pinned, strict=True):
            has = self.rows.get(row)
            most = max(first, has.pinned) if has else first
            if row == -1:
                status = Status.OK
            elif row == STALE:
                status = Status.STALE_ROW
            elif self.is_bad(row, rows):
                status = Status.BAD_ROW
            elif has is None:
                status = Status.STALE_ROW
            else:
                fine = has.window == 0 and first >= 0 and most < window
                status = Status.OK if fine else Status.BAD_ROW
            statuses.append(status)
            settings.append((row, window, most))
        if not any(statuses):
            for row, window, most in settings:
                if row != -1:
                    self.rows[row].window, self.rows[row].pinned = window, most
        return statuses

    def commit(self, rows: list[int], leaves: list[int]) -> list[Status]:
        statuses = []
        for row, leaf in zip(rows, leaves, strict=True):
            if row == -1:
                status = Status.OK
            elif row == STALE:
                status = Status.STALE_ROW
            elif self.is_bad(row, rows):
                status = Status.BAD_ROW
            elif row not in self.rows:
                status = Status.STALE_ROW
            else:
                size = len(self.rows[row].tree)
                status = Status.OK if size and -1 <= leaf < size else Status.BAD_ROW
            statuses.append(status)
        if not any(statuses):
            for row, leaf in zip(rows, leaves, strict=True):
                if row != -1:
                    has = self.rows[row]
                    kept = [has.tokens[has.root + node] for node in has.path(leaf)]
                    has.tokens[has.root :] = kept
                    has.tree = []
        return statuses

    def release(self, rows: list[int]) -> list[Status]:
        statuses = []
        for row in rows:
            if row == -1:
                statuses.append(Status.OK)
            elif row == STALE:
                statuses.append(Status.STALE_ROW)
            elif self.is_bad(row, rows):
                statuses.append(Status.BAD_ROW)
            else:
                statuses.append(Status.OK if row in self.rows else Status.STALE_ROW)
        if not any(statuses):
            for row in rows:
                if row != -1:
                    for page in list(self.rows[row].pages):
                        self.let_go(self.rows[row], page)
                    del self.rows[row]
                    self.releases[row] += 1
        return statuses

    def most_to_fork(self, row: Row) -> int:
        return min(len(row.tokens), row.pinned) if row.window else len(row.tokens)

    def has_lost(self, row: Row, length: int) -> bool:
        """Whether the token behind `length` tokens would see one that is gone, or lie there."""
        if row.gone == 0:
            return False
        stored = {
            start + i
            for start in row.starts
            if start >= row.pinned
            for i in range(self.config.page_size)
        }
        stored.add(len(row.tokens) + self.room(row))
        return length < row.pinned or not stored.issuperset(range(row.begin(length), length + 1))

    def fork(self, parents: list[int], children: list[int], lengths: list[int]) -> list[Status]:
        pairs = list(zip(parents, children, lengths, strict=True))
        active = [pair for pair in pairs if -1 not in pair[:2]]
        all_parents = [parent for parent, _, _ in active]
        all_children = [child for _, child, _ in active]
        statuses, needs = [], []
        for parent, child, length in pairs:
            status, need = Status.OK, 0
            if -1 not in (parent, child):
                if STALE in (parent, child):
                    status = Status.STALE_ROW
                elif (
                    self.is_bad(child, all_children)
                    or self.is_bad(parent, [parent])
                    or child in self.rows
                    or child in all_parents
                    or parent in all_children
                    or length < 0
                ):
                    status = Status.BAD_ROW
                elif parent not in self.rows:
                    status = Status.STALE_ROW
                elif self.rows[parent].tree:
                    status = Status.UNCOMMITTED_TREE
                elif length > self.most_to_fork(self.rows[parent]):
                    status = Status.BAD_ROW
                else:
                    need = self.pages_for(length) - self.full_pages(length)
            statuses.append(status)
            needs.append(need)
        self.serve(statuses, needs)
        if not any(statuses):
            for parent, child, length in active:
                source, full = self.rows[parent], self.full_pages(length)
                self.rows[child] = Row(
                    source.pages[:full],
                    source.tokens[:length],
                    starts=source.starts[:full],
                    pinned=length,
                )
                if self.pages_for(length) > full:
                    self.take(self.rows[child])
            self.changed()
        return statuses

    def truncate(self, rows: list[int], counts: list[int]) -> list[Status]:
        statuses, needs = [], []
        for row, count in zip(rows, counts, strict=True):
            has, need = self.rows.get(row), 0
            if row == -1:
                status = Status.OK
            elif row == STALE:
                status = Status.STALE_ROW
            elif self.is_bad(row, rows) or count < 0:
                status = Status.BAD_ROW
            elif has is None:
                status = Status.STALE_ROW
            elif has.tree:
                status = Status.UNCOMMITTED_TREE
            elif count > len(has.tokens):
                status = Status.BAD_ROW
            elif self.has_lost(has, len(has.tokens) - count):
                status = Status.SLID_OUT
            else:
                status = Status.OK
                length = len(has.tokens) - count
                keep = sum(start < length for start in has.starts)
                if keep > self.full_pages(length) and self.holders(has.pages[keep - 1]) > 1:
                    need = 0 if any(self.holders(p) == 1 for p in has.pages[keep:]) else 1
            statuses.append(status)
            needs.append(need)
        self.serve(statuses, needs)
        if not any(statuses):
            pairs = [(r, count) for r, count in zip(rows, counts, strict=True) if r != -1]
            cut = [self.rows[row] for row, _ in pairs]
            for has, (_, count) in zip(cut, pairs, strict=True):
                del has.tokens[len(has.tokens) - count :]
                keep = sum(start < len(has.tokens) for start in has.starts)
                for page in has.pages[keep:]:
                    self.let_go(has, page)
                if has.window == 0:
                    has.pinned = min(has.pinned, len(has.tokens))
            for has in cut:
                ends_inside = self.pages_for(len(has.tokens)) > self.full_pages(len(has.tokens))
                if ends_inside and self.holders(has.pages[-1]) > 1:
                    has.pages.pop()
                    has.starts.pop()
                    self.take(has)
            self.changed()
        return statuses
