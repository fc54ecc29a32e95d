# SPDX-License-Identifier: Apache-2.0
"""What requests change about their logits before a token is chosen: biases, penalties, a mask.

Of the logits l of a row, in this order:

1. bias: l + bias[token]; −inf bans a token.
2. repetition: of each token that the prompt or the new tokens hold, l / r if l > 0, else l · r
   (Keskar et al., 2019).
3. frequency and presence: l − frequency · count − presence · [count > 0], where count is how often
   the token stands among the new ones.
4. mask: −inf for each token that a constraint does not allow.

A row that asks for none of them keeps its bits. What a token's penalty depends on is kept on the
device, since the newest tokens are not known anywhere else when the next step is dispatched. Tokens
of drafts count for the places behind them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_paged.checks import expect

from ..decoder.generation import as_tokens
from ..decoder.sample import as_number

LARGEST = float(np.finfo(np.float32).max)
ALL = 0xFFFFFFFF  # a word of a mask that allows 32 tokens
_IN_PROMPT, _NEW = 1, 2  # what a token of the prompt and each new one add to `TokenMemory.seen`


@dataclasses.dataclass(frozen=True)
class EditOptions:
    """A request's biases and penalties, checked; the defaults change nothing."""

    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @staticmethod
    def create(
        vocab_size: int,
        *,
        logit_bias: Mapping[int, float] | None,
        banned_tokens: Sequence[int],
        repetition_penalty: float | None,
        presence_penalty: float | None,
        frequency_penalty: float | None,
    ) -> "EditOptions":
        """Checks the options of `Engine.submit`.

        Raises:
          ValueError: an option is out of range, or every token is banned.
        """
        given = {} if logit_bias is None else logit_bias
        expect(isinstance(given, Mapping), "logit_bias", "a dict from token ids to numbers", given)
        tokens = as_tokens("logit_bias", list(given), vocab_size, least=0).tolist()
        bias = {}
        for token, value in zip(tokens, given.values(), strict=True):
            name = f"logit_bias[{token}]"
            bias[token] = as_number(name, value, "a number below inf", -np.inf, LARGEST)
        for token in as_tokens("banned_tokens", banned_tokens, vocab_size, least=0).tolist():
            bias[token] = -np.inf
        banned = sum(value == -np.inf for value in bias.values())
        expect(banned < vocab_size, "banned_tokens", "at least one token that is not banned", "all")
        repetition = 1.0 if repetition_penalty is None else repetition_penalty
        repeats, wanted = "None or a number in [0.01, 100]", "None or a number in [-100, 100]"
        return EditOptions(
            bias=bias,
            repetition=as_number("repetition_penalty", repetition, repeats, 0.01, 100),
            presence=as_number("presence_penalty", presence_penalty or 0, wanted, -100, 100),
            frequency=as_number("frequency_penalty", frequency_penalty or 0, wanted, -100, 100),
        )

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens were seen."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def is_active(self) -> bool:
        """Whether anything is asked for."""
        return self.counts or bool(self.bias)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenMemory:
    """What is known of each token in each row, where a request edits logits; else it is stale."""

    seen: jax.Array  # i32[max_seqs, vocab_size]: 1 if in the prompt, and 2 for each new one
    bias: jax.Array  # f32[max_seqs, vocab_size]

    @staticmethod
    def create(max_seqs: int, vocab_size: int) -> "TokenMemory":
        """One that knows nothing."""
        return TokenMemory(
            seen=jnp.zeros((max_seqs, vocab_size), jnp.int32),
            bias=jnp.zeros((max_seqs, vocab_size), jnp.float32),
        )

    def begin(
        self, row: Int[Array, ""], seen: Int[Array, "vocab"], bias: Float[Array, "vocab"]
    ) -> "TokenMemory":
        """A request begins in a row."""
        return TokenMemory(self.seen.at[row].set(seen), self.bias.at[row].set(bias))

    def add(self, new: Int[Array, "rows columns"], counts: Bool[Array, "rows"]) -> "TokenMemory":
        """Counts the new tokens of rows that count; −1 is none."""
        rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
        at = jnp.where(counts[:, None] & (new >= 0), new, self.seen.shape[1])
        return dataclasses.replace(self, seen=self.seen.at[rows, at].add(_NEW, mode="drop"))


def memory_of(
    options: EditOptions, vocab_size: int, prompt: np.ndarray, new: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """What `TokenMemory.begin` takes of a request: (seen, bias)."""
    seen = _NEW * np.bincount(np.asarray(new, np.int64), minlength=vocab_size).astype(np.int32)
    seen[prompt] += _IN_PROMPT
    bias = np.zeros(vocab_size, np.float32)
    bias[list(options.bias)] = list(options.bias.values())
    return seen, bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitEdits:
    """What a step changes about the logits of each row. Leaves may be numpy arrays."""

    active: Any  # bool[rows]: the row has a bias, penalties or a mask
    repetition: Any  # f32[rows], 1 = none
    presence: Any  # f32[rows]
    frequency: Any  # f32[rows]
    mask: Any  # u32[rows, ⌈vocab_size / 32⌉], a bit per token that is allowed, the lowest first

    @staticmethod
    def create(rows: int, mask: Any) -> "LogitEdits":
        """Arrays to fill that change nothing; the mask is one that allows all tokens."""
        return LogitEdits(
            active=np.zeros(rows, np.bool_),
            repetition=np.ones(rows, np.float32),
            presence=np.zeros(rows, np.float32),
            frequency=np.zeros(rows, np.float32),
            mask=mask,
        )

    def __call__(
        self, logits: Float[Array, "rows vocab"], memory: TokenMemory, way: Int[Array, "rows c c"]
    ) -> tuple[Float[Array, "rows vocab"], Bool[Array, "rows"]]:
        """The edited logits of places, `c` of them for each row of the engine.

        Args:
          logits: [rows · c, vocab_size].
          way: [rows, c, c], the tokens of drafts on the way to each place, −1 = none.

        Returns:
          (logits, is_stuck bool[rows · c]: no token is left. Such a place has its own logits.)
        """
        rows, columns, _ = way.shape

        def edit(logits):
            seen = jnp.repeat(memory.seen, columns, axis=0)
            if columns > 1:
                at = jnp.where(way >= 0, way, seen.shape[1]).reshape(rows * columns, columns)
                each = jnp.arange(rows * columns, dtype=jnp.int32)[:, None]
                seen = seen.at[each, at].add(_NEW, mode="drop")
            bias, mask, active, repetition, presence, frequency = (
                jnp.repeat(jnp.asarray(x), columns, axis=0) for x in (
                    memory.bias, self.mask, self.active, self.repetition, self.presence,
                    self.frequency,
                )
            )  # fmt: skip
            new = logits.astype(jnp.float32) + bias
            repeated = jnp.where(new > 0, new / repetition[:, None], new * repetition[:, None])
            new = jnp.where(seen > 0, repeated, new)
            count = (seen // _NEW).astype(jnp.float32)
            new -= frequency[:, None] * count + jnp.where(count > 0, presence[:, None], 0)
            new = jnp.where(unpacked(mask, new.shape[1]), new, -jnp.inf)
            stuck = active & (jnp.max(new, axis=1) == -jnp.inf)
            new = new.astype(logits.dtype)
            return jnp.where((active & ~stuck)[:, None], new, logits), stuck

        def leave(logits):
            return logits, jnp.zeros(logits.shape[0], jnp.bool_)

        return jax.lax.cond(jnp.any(self.active), edit, leave, logits)


def everything(rows: int, vocab_size: int) -> np.ndarray:
    """A mask that allows all tokens: u32[rows, ⌈vocab_size / 32⌉]."""
    return np.full((rows, -(-vocab_size // 32)), ALL, np.uint32)


def unpacked(mask: jax.Array, size: int) -> Bool[Array, "rows size"]:
    """The bits of a mask."""
    bits = mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    return ((bits & 1) == 1).reshape(mask.shape[0], -1)[:, :size]


def ways(
    tokens: Int[Array, "rows c"], parents: Int[Array, "rows c"] | None
) -> Int[Array, "rows c c"]:
    """The tokens of guesses on the way to each node, itself included, −1 for the other nodes.

    Args:
      tokens: of the nodes; node 0 is no guess.
      parents: of the nodes of a tree, each behind its parent; None = each follows the one before.
    """
    rows, columns = tokens.shape
    number = jnp.arange(columns, dtype=jnp.int32)
    if parents is None:
        on_way = jnp.broadcast_to(number[None, :] <= number[:, None], (rows, columns, columns))
    else:
        each = jnp.arange(rows, dtype=jnp.int32)
        on_way = jnp.broadcast_to(jnp.eye(columns, dtype=jnp.bool_), (rows, columns, columns))
        for node in range(1, columns):
            above = jnp.clip(parents[:, node], 0, columns - 1)
            on_way = on_way.at[:, node].set(on_way[:, node] | on_way[each, above])
    return jnp.where(on_way & (number > 0)[None, None, :], tokens[:, None, :], -1)
