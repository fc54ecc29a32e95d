# SPDX-License-Identifier: Apache-2.0
"""Random ragged batches against the float64 oracle.

A shape (sizes, dtype, layout, options) costs one compilation, so there are SHAPES of them and each
gets BATCHES_PER_SHAPE batches of random contents: lengths, pages, holes, dead rows and padding.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged import ragged_paged_attention
from jax_paged.layout import LAYOUTS
from jax_paged.testing import (
    TOLERANCES,
    WILD_PAGE,
    Batch,
    Case,
    assert_attention_close,
    dense_oracle,
    make_batch,
)

NUM_SHAPES = 132
BATCHES_PER_SHAPE = {"native": 16, "reference": 4}
REFERENCE_SHAPES = range(0, NUM_SHAPES, 7)  # a sample: the reference compiles and runs slowly

PAGE_SIZES = (1, 5, 8, 16, 32, 544)
HEAD_DIMS = (8, 16, 24, 40, 64, 64, 80, 80, 96, 128, 128, 136, 192, 256, 320, 512)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 71)
SPLITS = (
    {}, {}, {}, {"num_kv_splits": 1}, {"num_kv_splits": 2}, {"num_kv_splits": 7},
    {"split_tokens": 5}, {"split_tokens": 64}, {"split_tokens": 512},
)  # fmt: skip
MAX_POOL = 1_000_000  # elements of K
MAX_WORK = 20_000_000  # query heads · tokens · capacity · head_dim


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static in a call."""

    case: Case
    dtype: str
    rows: int
    num_tokens: int
    pages_per_seq: int
    options: tuple[tuple[str, int], ...]

    @property
    def num_pages(self) -> int:
        return self.rows * self.pages_per_seq + 2


def _draw_shape(rng: np.random.Generator, dtype: str, page_size: int, group: int) -> Shape:
    """A random shape with these three, small enough to be quick."""
    pick = lambda choices: choices[rng.integers(len(choices))]  # noqa: E731
    while True:
        num_kv_heads = pick((1, 1, 2, 3))
        head_dim = pick(HEAD_DIMS)
        case = Case(
            f"{dtype}-page{page_size}-group{group}-dim{head_dim}",
            num_kv_heads * group,
            num_kv_heads,
            head_dim,
            page_size,
            v_head_dim=pick((None, None, pick(HEAD_DIMS))),
            layout=pick(LAYOUTS),
            num_layers=pick((None, 1, 3)),
            causal=pick((True, True, True, False)),
        )
        rows, num_tokens = pick((1, 2, 4, 8)), pick((1, 3, 9, 24, 70, 70))
        capacity = pick((40, 150, 600, 600))
        pages_per_seq = max(1, capacity // page_size) + pick((0, 1))
        shape = Shape(case, dtype, rows, num_tokens, pages_per_seq, tuple(pick(SPLITS).items()))
        dim = max(head_dim, case.v_head_dim or 0)
        pool = (case.num_layers or 1) * shape.num_pages * num_kv_heads * page_size * dim
        work = case.num_q_heads * num_tokens * pages_per_seq * page_size * dim
        if pool <= MAX_POOL and work <= MAX_WORK:
            return shape


@functools.cache
def shapes() -> tuple[Shape, ...]:
    """The shapes: every dtype with every page size, groups in turn, the rest at random."""
    rng = np.random.default_rng(7)
    corners = itertools.cycle(itertools.product(TOLERANCES, PAGE_SIZES))
    groups = itertools.cycle(GROUPS)
    return tuple(
        _draw_shape(rng, *corner, group)
        for corner, group in itertools.islice(zip(corners, groups, strict=False), NUM_SHAPES)
    )


def draw_batch(rng: np.random.Generator, shape: Shape) -> Batch:
    """Random contents for a shape."""
    page, capacity = shape.case.page_size, shape.pages_per_seq * shape.case.page_size
    rows = shape.rows if rng.random() < 0.8 else int(rng.integers(shape.rows + 1))
    seq_lens, q_lens, left = [], [], shape.num_tokens
    for _ in range(rows):
        edge = page * int(rng.integers(1, shape.pages_per_seq + 1)) + int(rng.integers(-1, 2))
        anything = int(rng.integers(capacity + 1))
        length = min(
            (0, edge, edge, edge, edge, anything, anything, anything)[rng.integers(8)], capacity
        )
        few, many = int(rng.integers(2, 9)), int(rng.integers(1, length + 1)) if length else 0
        room = left if rng.random() < 0.3 else (left + 1) // 2  # leave something for the others
        q_len = min((0, 1, 1, 1, few, few, many, length)[rng.integers(8)], room)
        if shape.case.causal and rng.random() < 0.95:
            q_len = min(q_len, length)
        left -= q_len
        seq_lens.append(length)
        q_lens.append(q_len)
    dead = [0] * (shape.rows - rows)
    batch = make_batch(
        shape.case, jnp.dtype(shape.dtype), q_lens + dead, seq_lens + dead, num_seqs=rows,
        num_tokens=shape.num_tokens, pages_per_seq=shape.pages_per_seq,
        num_pages=shape.num_pages, shared_pages=bool(rng.random() < 0.4),
        seed=int(rng.integers(2**31)),
    )  # fmt: skip
    if rng.random() < 0.1:  # pages that are not there hold no tokens
        holes = rng.random(batch.page_table.shape) < 0.3
        wild = rng.choice(np.array([-1, WILD_PAGE, shape.num_pages], np.int32), holes.shape)
        batch = dataclasses.replace(batch, page_table=np.where(holes, wild, batch.page_table))
    return batch


@pytest.mark.parametrize("index", first_of(range(NUM_SHAPES), 18))
def test_random_batches_match_float64_softmax(index):
    check_shape(index, "native")


@pytest.mark.parametrize("index", first_of(REFERENCE_SHAPES, 2))
def test_random_batches_match_float64_softmax_in_the_reference(index):
    check_shape(index, "reference")


def check_shape(index, implementation):
    """Compares the op with the oracle on the batches of one shape."""
    shape = shapes()[index]
    rng = np.random.default_rng([index, 1])

    @jax.jit
    def attend(arguments, layer, sm_scale):
        options: dict[str, Any] = dict(shape.options)
        return ragged_paged_attention(
            *arguments, layer=layer, sm_scale=sm_scale, causal=shape.case.causal,
            layout=shape.case.layout, return_lse=True, implementation=implementation, **options,
        )  # fmt: skip

    for number in range(BATCHES_PER_SHAPE[implementation]):
        batch = draw_batch(rng, shape)
        arguments, options = batch.ragged()
        out, lse = attend(arguments, options["layer"], options["sm_scale"])
        try:
            assert_attention_close(out, lse, *dense_oracle(batch))
        except AssertionError as error:
            raise AssertionError(
                f"batch {number} of {shape}: seq_lens={batch.seq_lens} "
                f"cu_q_lens={batch.cu_q_lens} num_seqs={batch.num_seqs}: {error}"
            ) from None
    assert attend._cache_size() == 1, "a batch of this shape was compiled anew"


def test_the_batches_are_many_and_cover_every_size():
    assert NUM_SHAPES * BATCHES_PER_SHAPE["native"] >= 2000
    cases = [shape.case for shape in shapes()]
    assert {(s.dtype, s.case.page_size) for s in shapes()} == set(
        itertools.product(TOLERANCES, PAGE_SIZES)
    )
    assert {(c.layout, c.page_size) for c in cases} == set(itertools.product(LAYOUTS, PAGE_SIZES))
    assert {c.num_q_heads // c.num_kv_heads for c in cases} == set(GROUPS)
    assert {c.head_dim for c in cases} == set(HEAD_DIMS)
    assert {s.options for s in shapes()} == {tuple(options.items()) for options in SPLITS}
    assert {(c.layout, c.num_layers, c.causal) for c in cases} == set(
        itertools.product(LAYOUTS, (None, 1, 3), (True, False))
    )
    assert sum(c.v_head_dim not in (None, c.head_dim) for c in cases) >= NUM_SHAPES // 8
    rng = np.random.default_rng(0)
    batches = [draw_batch(rng, shape) for shape in shapes()]
    live = [(b.seq_lens[: b.num_seqs], np.diff(b.cu_q_lens[: b.num_seqs + 1])) for b in batches]
    assert any((lens == 0).any() for lens, _ in live), "no empty row"
    seen = {int(q) for _, q_lens in live for q in q_lens}
    assert {0, 1, 2} <= seen, "no row with no, one or two queries"
    assert max(seen) >= 24, "no long prompt"
    assert any(b.num_seqs < len(b.seq_lens) for b in batches), "no dead row"
    assert any(b.cu_q_lens[b.num_seqs] < len(b.q) for b in batches), "no padding"
