"""What a page table must do, in plain Python: the model of `test_state_machine`.

It knows rows as lists of page ids and of token values, and free pages as a list used as a stack. It
handles the rows of a call one after the other, in loops.
"""

from dataclasses import dataclass, field

from jax_paged.layout import Layout
from jax_paged.pages import NO_TREE, Status


@dataclass(frozen=True)
class Config:
    num_pages: int
    max_seqs: int
    pages_per_seq: int
    page_size: int
    layout: Layout
    max_tree: int = 5

    @property
    def batch_tokens(self) -> int:
        return 2 * self.page_size + 3


@dataclass
class Row:
    pages: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)  # parents of the nodes, which are the last tokens

    @property
    def root(self) -> int:
        return len(self.tokens) - len(self.tree)

    def path(self, node: int) -> list[int]:
        """The nodes from a root down to `node`; -1 is above all roots."""
        return [] if node == -1 else [*self.path(self.tree[node]), node]


class Model:
    """What a page table must do, one row after the other."""

    def __init__(self, config: Config):
        self.config = config
        self.rows: dict[int, Row] = {}
        self.free = list(range(config.num_pages))[::-1]
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
        row.pages.remove(page)
        if self.holders(page) == 0:
            self.free.append(page)

    def take(self, row: Row) -> None:
        row.pages.append(self.free.pop())

    def serve(self, statuses: list[Status], needs: list[int]) -> list[Status]:
        """Fills in POOL_FULL: nobody overtakes."""
        left = len(self.free)
        for i, need in enumerate(needs):
            if statuses[i] == Status.OK and need > 0:
                left -= need
                if left < 0:
                    statuses[i] = Status.POOL_FULL
        return statuses

    def changed(self) -> None:
        self.peak = max(self.peak, self.config.num_pages - len(self.free))

    def reserve(self, rows: list[int], counts: list[int]) -> list[Status]:
        statuses, needs = [], []
        for row, count in zip(rows, counts, strict=True):
            has = self.rows.get(row, Row())
            need = 0
            if row == -1:
                status = Status.OK
            elif self.is_bad(row, rows) or count < 0:
                status = Status.BAD_ROW
            elif self.pages_for(len(has.tokens) + count) > self.config.pages_per_seq:
                status = Status.ROW_FULL
            else:
                status = Status.OK
                need = max(0, self.pages_for(len(has.tokens) + count) - len(has.pages))
            statuses.append(status)
            needs.append(need)
        self.serve(statuses, needs)
        if not any(statuses):
            for row, need in zip(rows, needs, strict=True):
                if row != -1:
                    self.rows.setdefault(row, Row())
                    for _ in range(need):
                        self.take(self.rows[row])
            self.changed()
        return statuses

    def nodes_of(self, rows: list[int], q_lens: list[int], parents: list[int]) -> list[list[int]]:
        """The parents of each row's tokens, as far as the batch reaches."""
        parents, found = list(parents), []
        for row, q_len in zip(rows, q_lens, strict=True):
            mine = parents[: max(0, q_len)] if row != -1 else []
            del parents[: len(mine)]
            found.append(mine)
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
            if row == -1:
                status = Status.OK
            elif self.is_bad(row, rows) or q_len < 0:
                status = Status.BAD_ROW
            elif has is None:
                status = Status.STALE_ROW
            elif grows and any(not -1 <= p < len(has.tree) + i for i, p in enumerate(nodes)):
                status = Status.BAD_ROW
            elif q_len > 0 and has.tree and not grows:
                status = Status.UNCOMMITTED_TREE
            elif self.pages_for(len(has.tokens) + q_len) > len(has.pages) or (
                grows and len(has.tree) + q_len > self.config.max_tree
            ):
                status = Status.ROW_FULL
            else:
                used += q_len
                fits = q_len == 0 or used <= self.config.batch_tokens
                status = Status.OK if fits else Status.BAD_ROW
            statuses.append(status)
        if not any(statuses):
            values = list(values)
            for row, q_len, nodes in zip(rows, q_lens, nodes_of, strict=True):
                if row != -1:
                    self.rows[row].tokens += [values.pop(0) for _ in range(q_len)]
                    self.rows[row].tree += [p for p in nodes if p != NO_TREE]
        return statuses

    def commit(self, rows: list[int], leaves: list[int]) -> list[Status]:
        statuses = []
        for row, leaf in zip(rows, leaves, strict=True):
            if row == -1:
                status = Status.OK
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
        return statuses

    def fork(self, parents: list[int], children: list[int], lengths: list[int]) -> list[Status]:
        pairs = list(zip(parents, children, lengths, strict=True))
        active = [pair for pair in pairs if -1 not in pair[:2]]
        all_parents = [parent for parent, _, _ in active]
        all_children = [child for _, child, _ in active]
        statuses, needs = [], []
        for parent, child, length in pairs:
            status, need = Status.OK, 0
            if -1 not in (parent, child):
                if (
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
                elif length > len(self.rows[parent].tokens):
                    status = Status.BAD_ROW
                else:
                    need = self.pages_for(length) - self.full_pages(length)
            statuses.append(status)
            needs.append(need)
        self.serve(statuses, needs)
        if not any(statuses):
            for parent, child, length in active:
                source, full = self.rows[parent], self.full_pages(length)
                self.rows[child] = Row(source.pages[:full], source.tokens[:length])
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
            elif self.is_bad(row, rows) or count < 0:
                status = Status.BAD_ROW
            elif has is None:
                status = Status.STALE_ROW
            elif has.tree:
                status = Status.UNCOMMITTED_TREE
            elif count > len(has.tokens):
                status = Status.BAD_ROW
            else:
                status = Status.OK
                length = len(has.tokens) - count
                keep = self.pages_for(length)
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
                for page in has.pages[self.pages_for(len(has.tokens)) :]:
                    self.let_go(has, page)
            for has in cut:
                ends_inside = self.pages_for(len(has.tokens)) > self.full_pages(len(has.tokens))
                if ends_inside and self.holders(has.pages[-1]) > 1:
                    has.pages.pop()
                    self.take(has)
            self.changed()
        return statuses
