# SPDX-License-Identifier: Apache-2.0
"""Drives a decoder through the paged state, a step at a time: for tests and benchmarks."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_paged.cache.state import KVState
from jax_paged.cache.trees import NO_TREE
from jax_paged.checks.status import Status

from .checkpoint.hf_config import config_from_hf
from .decoder.config import DecoderConfig
from .decoder.model import Decoder
from .decoder.protocol import Model, run_model, split_model


def small_config(model_type: str = "qwen3_moe", **changes) -> DecoderConfig:
    """The configuration that `small_hf_config` describes."""
    return config_from_hf(small_hf_config(model_type, **changes))


def small_hf_config(model_type: str = "qwen3_moe", **changes) -> dict:
    """The config.json of a small model: 2 layers, 4 query heads over 2 KV heads.

    A "qwen3_moe" has 6 experts, a "mistral" a window of 7 tokens; of each head of a "phi3" 12 of 16
    dimensions turn.
    """
    raw = {
        "model_type": model_type,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    if model_type == "qwen3_moe":
        raw |= {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
    elif model_type == "mistral":
        raw["sliding_window"] = 7
    elif model_type == "phi3":
        raw |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64}
    return raw | changes


@functools.partial(jax.jit, static_argnames="num_tokens", donate_argnames="state")
def _prepare(state, rows, q_lens, tree_parents, *, num_tokens):
    state, reserved = state.reserve(rows, q_lens)
    state, batch, stepped = state.step(
        rows, q_lens, num_tokens=num_tokens, tree_parents=tree_parents
    )
    return state, batch, jnp.stack([reserved, stepped])


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def _forward(graph, weights, tokens, batch, state):
    return run_model(graph, weights, tokens, batch, state)


class Stepper:
    """A model with a state of its own; each `step` feeds new tokens to some rows.

    Steppers of equal configurations share their compiled programs.

    Args:
      model: a `Decoder` or any other `Model`.
      max_seqs, pages_per_seq, page_size, windows: of the state, which has as many pages as all rows
        need.
      state: another one, with max_seqs rows; the sizes are then not used.
    """

    def __init__(
        self, model: Model, *, max_seqs: int = 4, pages_per_seq: int = 8, page_size: int = 8,
        windows: bool = False, state: KVState | None = None,
    ):  # fmt: skip
        config = model.config
        self.max_seqs = max_seqs
        self.state = state or KVState.create(
            num_layers=config.num_layers,
            num_pages=max_seqs * pages_per_seq,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_seqs=max_seqs,
            pages_per_seq=pages_per_seq,
            dtype=model.dtype,
            windows=windows,
        )
        self._graph, self._weights = split_model(model)

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        *,
        padded_to: int | None = None,
        parents: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, np.ndarray]:
        """Feeds tokens[row] to each row; gives f32[len(tokens[row]), vocab_size] logits per row.

        Args:
          tokens: row → new ids. The rows come in the order of the mapping.
          padded_to: length of the flat batch; None = as many as there are tokens.
          parents: row → parents of its tokens, which are then nodes of a tree; the other rows take
            plain tokens. None = no trees.
        """
        flat = [token for ids in tokens.values() for token in ids]
        ends = np.cumsum([0, *(len(ids) for ids in tokens.values())])
        rows = np.full(self.max_seqs, -1, np.int32)
        q_lens = np.zeros(self.max_seqs, np.int32)
        rows[: len(tokens)], q_lens[: len(tokens)] = list(tokens), np.diff(ends)
        flat += [0] * ((padded_to or len(flat)) - len(flat))
        tree_parents = None
        if parents is not None:
            each = [parents.get(row, [NO_TREE] * len(ids)) for row, ids in tokens.items()]
            tree_parents = np.full(len(flat), NO_TREE, np.int32)
            tree_parents[: ends[-1]] = [parent for found in each for parent in found]
        self.state, batch, status = _prepare(
            self.state, rows, q_lens, tree_parents, num_tokens=len(flat)
        )
        if np.any(np.asarray(status) != Status.OK):
            raise ValueError(f"step: reserve and step gave status {status.tolist()}")
        logits, self.state = _forward(
            self._graph, self._weights, jnp.asarray(flat, jnp.int32), batch, self.state
        )
        logits = np.asarray(logits)
        return {
            row: logits[begin:end]
            for row, begin, end in zip(tokens, ends[:-1], ends[1:], strict=True)
        }


def noisy(model: Decoder) -> Decoder:
    """A draft model: a copy with noise on its head, whose likeliest token is often the second."""
    drafter = nnx.clone(model)
    parameters: Any = drafter
    head = np.asarray(parameters.head[...])
    noise = np.random.default_rng(5).standard_normal(head.shape, "f4")
    parameters.head[...] = jnp.asarray(head + np.float32(0.8) * head.std() * noise)
    return drafter
