# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token: greedy, or drawn after temperature, min-p, top-k and top-p."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_paged.checks import expect

_BLOCK = 128  # columns of `first_largest`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """How tokens are drawn. Make one with `Sampler.create`; what shapes the program is static."""

    key: jax.Array  # typed PRNG key, a scalar
    temperature: Any  # f32[], > 0 (unused when greedy)
    top_p: Any  # f32[], in (0, 1]
    min_p: Any  # f32[], in [0, 1]
    greedy: bool = dataclasses.field(metadata={"static": True})
    top_k: int | None = dataclasses.field(metadata={"static": True})
    nucleus: bool = dataclasses.field(metadata={"static": True})  # whether top_p cuts anything off
    floored: bool = dataclasses.field(metadata={"static": True})  # whether min_p does

    @staticmethod
    def create(
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
    ) -> "Sampler":
        """Checks the options and builds a sampler.

        Args:
          temperature: divides the logits; 0 = greedy, the first of the largest logits.
          top_k: keep the k largest logits (the first ones of equals); None = all.
          top_p: of what top_k left, keep the fewest tokens whose probability reaches top_p, at
            least one; None or 1 = all.
          min_p: before these, drop tokens less than min_p times as likely as the likeliest one;
            None or 0 = none.
          seed: an integer in [0, 2**32).

        Raises:
          ValueError: an option is out of range.
        """
        finite = float(np.finfo(np.float32).max)
        temperature = as_number("temperature", temperature, "a finite number >= 0", 0, finite)
        if top_k is not None:
            top_k = _integer("top_k", top_k)
            expect(top_k >= 1, "top_k", "None or an integer >= 1", top_k)
        if top_p is not None:
            top_p = as_number("top_p", top_p, "None or a number in (0, 1]", 5e-324, 1)
        if min_p is not None:
            min_p = as_number("min_p", min_p, "None or a number in [0, 1]", 0, 1)
        seed = _integer("seed", seed)
        expect(0 <= seed < 2**32, "seed", "an integer in [0, 2**32)", seed)
        greedy = temperature == 0
        return Sampler(
            key=jax.random.key(np.uint32(seed)),
            # Not below the smallest normal number: a subnormal divisor counts as 0.
            temperature=np.float32(max(temperature, float(jnp.finfo(jnp.float32).tiny))),
            top_p=np.float32(1.0 if top_p is None else top_p),
            min_p=np.float32(min_p or 0),
            greedy=greedy,
            top_k=None if greedy else top_k,
            nucleus=not greedy and top_p is not None and top_p < 1,
            floored=not greedy and bool(min_p),
        )

    @jax.named_scope("sample")
    def __call__(
        self,
        logits: Float[Array, "rows vocab_size"],
        rows: Int[Array, "rows"],
        positions: Int[Array, "rows"],
    ) -> Int[Array, "rows"]:
        """Draws one token per row: i32[rows].

        The draw of a row depends on its logits, the seed, its number in `rows` and its position,
        on nothing else in the batch.
        """
        if self.greedy:
            return first_largest(logits)
        candidates, ids = self.candidates(logits)
        keys = jax.vmap(lambda row, position: _fold(self.key, row, position))(rows, positions)
        choice = jax.vmap(jax.random.categorical)(keys, candidates).astype(jnp.int32)
        if ids is None:
            return choice
        return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0]

    def candidates(
        self, logits: Float[Array, "rows vocab_size"]
    ) -> tuple[jax.Array, jax.Array | None]:
        """The scaled logits that are left to draw from, −inf where cut off, and whose they are.

        Returns:
          (f32[rows, n], i32[rows, n] token ids). The ids are None for all tokens in order: without
          top_k and top_p the vocabulary is not sorted.
        """
        logits = logits.astype(jnp.float32)
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / self.temperature
        if self.floored:
            logits = jnp.where(logits < jnp.log(self.min_p), -jnp.inf, logits)
        if self.top_k is None and not self.nucleus:
            return logits, None
        count = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        logits, ids = jax.lax.top_k(logits, count)  # descending, lower id first among equals
        if self.nucleus:
            weights = jax.nn.softmax(logits, axis=-1)
            before = jnp.cumsum(weights, axis=-1, dtype=jnp.float32) - weights
            # The first stays whatever rounding does to a tiny top_p.
            first = jnp.arange(count, dtype=jnp.int32)[None, :] == 0
            logits = jnp.where((before < self.top_p) | first, logits, -jnp.inf)
        return logits, ids


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSamplers:
    """A `Sampler` per row, in one program: each row draws what its own sampler draws for it.

    Leaves may be numpy arrays. Sorting is skipped while no row asks for top_k or top_p, and drawing
    while all rows are greedy.
    """

    seed: Any  # u32[rows]
    draw_index: Any  # i32[rows], the row number that is folded into the seed
    temperature: Any  # f32[rows], 0 = greedy
    top_k: Any  # i32[rows], 0 = all
    top_p: Any  # f32[rows], in (0, 1]
    min_p: Any  # f32[rows], in [0, 1]

    @staticmethod
    def create(rows: int) -> "RowSamplers":
        """Greedy ones, as numpy arrays to fill."""
        return RowSamplers(
            seed=np.zeros(rows, np.uint32),
            draw_index=np.zeros(rows, np.int32),
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
        )

    def __call__(
        self, logits: Float[Array, "rows vocab_size"], positions: Int[Array, "rows"]
    ) -> Int[Array, "rows"]:
        """Draws one token per row: i32[rows]."""
        return self.ranked(logits, positions, 1)[:, 0]

    @jax.named_scope("sample")
    def ranked(
        self, logits: Float[Array, "rows vocab_size"], positions: Int[Array, "rows"], count: int
    ) -> Int[Array, "rows count"]:
        """The draw of each row, then what it would be without that token, and so on, all different.

        The noise is the same for all. Where fewer tokens are left to draw from, some come again.
        """
        likeliest = in_order(first_largest, logits, count)
        greedy = jnp.asarray(self.temperature)[:, None] <= 0
        drawn = jax.lax.cond(
            jnp.all(greedy), lambda *_: likeliest, functools.partial(self._draw, count=count),
            logits.astype(jnp.float32), positions,
        )  # fmt: skip
        return jnp.where(greedy, likeliest, drawn)

    def keys(self, positions: Int[Array, "rows"]) -> jax.Array:
        """The typed PRNG key of each row's draw: that of its seed, draw_index and position."""
        return jax.vmap(lambda *row: _fold(jax.random.key(row[0]), *row[1:]))(
            self.seed, self.draw_index, positions
        )

    def probabilities(
        self, logits: Float[Array, "rows vocab_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """What each row draws from, f32: all on the first of the largest where it is greedy."""
        size = logits.shape[-1]
        chosen = jax.nn.one_hot(first_largest(logits), size, dtype=jnp.float32)
        logits = self._scaled(logits.astype(jnp.float32))

        def cut_off(logits):
            kept, ids = self._kept(logits)
            rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
            return jnp.full_like(logits, -jnp.inf).at[rows, ids].set(kept)

        cut = self._is_cut()
        left = jax.lax.cond(jnp.any(cut), cut_off, lambda logits: logits, logits)
        left = jnp.where(cut[:, None], left, logits)
        greedy = jnp.asarray(self.temperature)[:, None] <= 0
        return jnp.where(greedy, chosen, jax.nn.softmax(left, axis=-1))

    def _scaled(self, logits: jax.Array) -> jax.Array:
        tiny = jnp.finfo(jnp.float32).tiny
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        logits = logits / jnp.maximum(self.temperature, tiny)[:, None]
        return jnp.where(logits < jnp.log(self.min_p)[:, None], -jnp.inf, logits)

    def _is_cut(self) -> jax.Array:
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1))

    def _draw(self, logits: jax.Array, positions: jax.Array, count: int) -> jax.Array:
        logits, keys, cut = self._scaled(logits), self.keys(positions), self._is_cut()
        draw = functools.partial(jax.vmap(jax.random.categorical), keys)
        free = in_order(draw, logits, count)

        def draw_cut(logits):
            logits, ids = self._kept(logits)
            # The noise of a candidate depends on its place in the order, not on how many there are.
            drawn = jnp.take_along_axis(ids, in_order(draw, logits, count), axis=-1)
            return jnp.where(cut[:, None], drawn, free)

        return jax.lax.cond(jnp.any(cut), draw_cut, lambda _: free, logits)

    def _kept(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scaled logits in descending order, −inf where cut off, and their tokens."""
        size = logits.shape[-1]
        logits, ids = jax.lax.top_k(logits, size)
        order = jnp.arange(size, dtype=jnp.int32)[None, :]
        top_k = jnp.where(self.top_k > 0, self.top_k, size)
        logits = jnp.where(order < top_k[:, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(weights, axis=-1, dtype=jnp.float32) - weights
        nucleus = (before < self.top_p[:, None]) | (order == 0) | (self.top_p >= 1)[:, None]
        return jnp.where(nucleus, logits, -jnp.inf), ids


def first_largest(x: Float[Array, "rows n"]) -> Int[Array, "rows"]:
    """argmax along rows, as i32: the first of the largest. In a row with NaN it is any column.

    Of blocks of columns the one with the largest, then the largest in it. XLA does not vectorize an
    argmax on a CPU, but a maximum: of [64, 49152] f32, 0.6 ms in place of 14 (Zen 4, 2 threads).
    """
    rows, columns = x.shape
    width = math.gcd(columns, _BLOCK)
    if width < 8:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    blocks = x.reshape(rows, columns // width, width)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * jnp.int32(width) + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def in_order(
    choose: Callable[[jax.Array], jax.Array], logits: Float[Array, "rows n"], count: int
) -> Int[Array, "rows count"]:
    """What `choose` takes of each row, then what it takes when that is at −inf, and so on."""
    rows, chosen = jnp.arange(logits.shape[0], dtype=jnp.int32), []
    for _ in range(count):
        chosen.append(choose(logits).astype(jnp.int32))
        logits = logits.at[rows, chosen[-1]].set(-jnp.inf)
    return jnp.stack(chosen, axis=1)


def _fold(key: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, row), position)


def as_number(name: str, value: Any, expected: str, least: float, most: float) -> float:
    """A number in [least, most]; `expected` says so to whom it concerns."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected {expected}, got {value!r}") from None
    expect(least <= number <= most, name, expected, number)
    return number


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
