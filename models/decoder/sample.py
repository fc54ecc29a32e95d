# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token: greedy, or drawn after temperature, min-p, top-k and top-p."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jax_paged.checks import expect

from .likeliest import first_largest, keep_top_k, keep_top_p, largest_in_order
from .log_sum_exp import log_sum_exp

_TINY = float(np.finfo(np.float32).tiny)  # the least divisor: a subnormal one counts as 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """How tokens are drawn. Make one with `Sampler.create`; what shapes the program is static."""

    key: jax.Array  # typed PRNG key, a scalar
    temperature: Any  # f32[], > 0 (unused when greedy)
    top_k: Any  # i32[], 0 = all
    top_p: Any  # f32[], in (0, 1]
    min_p: Any  # f32[], in [0, 1]
    greedy: bool = dataclasses.field(metadata={"static": True})
    limited: bool = dataclasses.field(metadata={"static": True})  # whether top_k cuts anything off
    nucleus: bool = dataclasses.field(metadata={"static": True})  # whether top_p cuts anything off

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
            temperature=np.float32(max(temperature, _TINY)),
            top_k=np.int32(min(top_k or 0, 2**31 - 1)),
            top_p=np.float32(1.0 if top_p is None else top_p),
            min_p=np.float32(min_p or 0),
            greedy=greedy,
            limited=not greedy and top_k is not None,
            nucleus=not greedy and top_p is not None and top_p < 1,
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
        keys = jax.vmap(lambda row, position: _fold(self.key, row, position))(rows, positions)
        return draw(keys, self.cut(logits))

    def cut(self, logits: Float[Array, "rows vocab_size"]) -> Float[Array, "rows vocab_size"]:
        """The logits to draw from, f32, scaled: the largest is 0, and −inf is cut off."""
        logits = _scaled(logits, self.temperature, self.min_p)
        rows = logits.shape[:1]
        if self.limited:
            logits = keep_top_k(logits, jnp.broadcast_to(self.top_k, rows))
        if self.nucleus:
            logits = keep_top_p(logits, jnp.broadcast_to(self.top_p, rows))
        return logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSamplers:
    """A `Sampler` per row, in one program: each row draws what its own sampler draws for it.

    Leaves may be numpy arrays. Each cut is skipped while no row asks for it, and drawing while all
    rows are greedy.
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
        likeliest = largest_in_order(logits, count)
        greedy = jnp.asarray(self.temperature)[:, None] <= 0

        def draw_all(logits, positions):
            noisy = with_noise(self.keys(positions), self._cut(logits))
            return largest_in_order(noisy, count)

        drawn = jax.lax.cond(jnp.all(greedy), lambda *_: likeliest, draw_all, logits, positions)
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
        greedy = jnp.asarray(self.temperature)[:, None] <= 0
        left = jax.nn.softmax(self._cut(logits), axis=-1)
        return jnp.where(greedy, chosen, left)

    def log_probability(
        self, logits: Float[Array, "rows vocab_size"], tokens: Int[Array, "rows"]
    ) -> Float[Array, "rows"]:
        """log `probabilities` of a token of each row, f32."""
        certain = jnp.where(first_largest(logits) == tokens, 0, -jnp.inf)
        greedy = jnp.asarray(self.temperature) <= 0
        left = jax.lax.cond(
            jnp.all(greedy), lambda logits: logits.astype(jnp.float32), self._cut, logits
        )
        return jnp.where(greedy, certain, log_softmax_at(left, tokens[:, None])[:, 0])

    def _cut(self, logits: jax.Array) -> jax.Array:
        """As `Sampler.cut`, by rows; any for those that are greedy."""
        draws = jnp.asarray(self.temperature) > 0
        temperature = jnp.maximum(self.temperature, _TINY)
        logits = _scaled(logits, temperature[:, None], jnp.asarray(self.min_p)[:, None])
        for keep, most, asked in (
            (keep_top_k, jnp.where(draws, self.top_k, 0), self.top_k > 0),
            (keep_top_p, jnp.where(draws, self.top_p, 1), self.top_p < 1),
        ):
            wanted = jnp.any(draws & asked)
            logits = jax.lax.cond(wanted, keep, lambda logits, _: logits, logits, most)
        return logits


def draw(
    keys: Shaped[Array, "rows"], logits: Float[Array, "rows vocab_size"]
) -> Int[Array, "rows"]:
    """A token per row, as likely as softmax(logits) has it: the largest with noise (Gumbel-max).

    The noise of a token depends on its id alone. So a cut changes the draws of what it cuts off,
    and no others.
    """
    return first_largest(with_noise(keys, logits))


def with_noise(
    keys: Shaped[Array, "rows"], logits: Float[Array, "rows vocab_size"]
) -> Float[Array, "rows vocab_size"]:
    """The logits and standard Gumbel noise of each row's key: their largest is a draw."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
    return logits + noise


def log_softmax_at(
    logits: Float[Array, "rows vocab_size"], tokens: Int[Array, "rows count"]
) -> Float[Array, "rows count"]:
    """log softmax(logits) of some tokens of each row, f32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)
    return chosen - log_sum_exp(logits)[0][:, None]


def _scaled(logits: jax.Array, temperature: Any, min_p: Any) -> jax.Array:
    """f32, the largest 0, −inf for what is less than min_p times as likely."""
    logits = logits.astype(jnp.float32)
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    return jnp.where(logits < jnp.log(min_p), -jnp.inf, logits)


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
