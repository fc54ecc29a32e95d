# SPDX-License-Identifier: Apache-2.0
"""A call of a model whose layers lie on pipeline stages: its tokens pass them in micro-batches.

Each device runs this inside of a `jax.shard_map`, with the layers and pages of its stage. At each
tick all stages run their layers, each on another micro-batch, and pass what comes out on to the
next one. The batch is known everywhere, so activations are all that travels. With M micro-batches a
stage works in M of M + pp − 1 ticks. The decode loop of `generate` need not wait for its stages to
run dry: see `ring.py`.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_paged.cache.state import KVState
from jax_paged.checks import expect
from jax_paged.ops.batch import StepBatch

from .adapters import TokenAdapters
from .partition import PP
from .steps import TOKENS_PER_STEP

if TYPE_CHECKING:
    from .model import Decoder


def micro_batches(num_tokens: int, pp: int) -> int:
    """Into how many equal parts so many tokens are cut: those that pass pp stages soonest.

    Each part costs a stage its tokens, and what it costs to read the weights.

    >>> [micro_batches(num_tokens, 4) for num_tokens in (8, 512, 4096)]
    [1, 4, 16]
    """
    sizes = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
    return min(sizes, key=lambda n: (n + pp - 1) * (num_tokens // n + TOKENS_PER_STEP))


def in_stages(
    model: "Decoder", tokens: jax.Array, batch: StepBatch, state: KVState,
    logit_rows: jax.Array | None, adapters: TokenAdapters | None,
) -> tuple[jax.Array, KVState]:  # fmt: skip
    """What the last layer gives, on all devices, and the state with K and V of the tokens.

    Args:
      tokens, batch, logit_rows, adapters: as for the model; the first three are the same on all
        stages.
      state: of the layers of this stage.

    Raises:
      ValueError: the state has several groups of layers.
    """
    partition = model.partition
    assert partition is not None
    kinds = "one kind in a model in pipeline stages"
    expect(len(state.groups) == 1, "state.layer_kinds", kinds, state.kinds)
    pp, stage = partition.pp, jax.lax.axis_index(PP).astype(jnp.int32)
    # The nodes of a tree stay together.
    count = 1 if batch.tree is not None else micro_batches(tokens.shape[0], pp)
    size = tokens.shape[0] // count
    embedded = model.embed(tokens)

    def tick(number, carry):
        received, given, state = carry
        part = number - stage
        is_on, part = (part >= 0) & (part < count), jnp.clip(part, 0, count - 1)
        first = part * size
        own = jax.lax.dynamic_slice_in_dim(embedded, first, size)
        x = jnp.where(stage == 0, own, received)
        added = None if adapters is None else adapters.part(first, size)
        x, state = model.run_layers(x, part_of(batch, first, size, is_on), state, adapters=added)
        # On the last stage the ticks before its first part write what that overwrites.
        given = jax.lax.dynamic_update_slice_in_dim(given, x, first, 0)
        return jax.lax.ppermute(x, PP, [(i, i + 1) for i in range(pp - 1)]), given, state

    carry = jnp.zeros_like(embedded[:size]), jnp.zeros_like(embedded), state
    _, x, state = jax.lax.fori_loop(0, count + pp - 1, tick, carry)
    if logit_rows is not None:
        x = jnp.take(x, logit_rows, axis=0, mode="clip")
    return jax.lax.psum(jnp.where(stage == pp - 1, x, jnp.zeros_like(x)), PP), state


def part_of(batch: StepBatch, first: jax.Array, size: int, is_on: jax.Array) -> StepBatch:
    """The step of tokens first … first + size − 1 of a step; all padding where it is not on."""

    def own(x, padding):
        return jnp.where(is_on, jax.lax.dynamic_slice_in_dim(x, first, size), jnp.int32(padding))

    ends = batch.cu_q_lens
    inside = jnp.clip(ends - first, 0, size)
    behind = jnp.maximum(ends[1:] - jnp.maximum(ends[:-1], first + size), 0)
    seq_lens = jnp.where(is_on, jnp.maximum(batch.seq_lens - behind, 0), 0)
    tree_sizes = batch.tree_sizes
    if tree_sizes is not None:
        tree_sizes = jnp.where(is_on, tree_sizes, 0)
    return dataclasses.replace(
        batch,
        seq_lens=seq_lens,
        cu_q_lens=inside,
        num_seqs=jnp.where(is_on, batch.num_seqs, 0),
        slot_mapping=own(batch.slot_mapping, -1),
        positions=own(batch.positions, 0),
        tree_sizes=tree_sizes,
    )
