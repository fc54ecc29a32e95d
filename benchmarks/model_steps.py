# SPDX-License-Identifier: Apache-2.0
"""Models to measure, and their compiled steps at a batch and context: for the model benchmarks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_paged import KVState
from jax_paged.models import Decoder
from jax_paged.models.decoder.executables import compiled
from jax_paged.models.decoder.generation import state_for
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode

# As config.json has them. The first is Qwen3-MoE at 512 M parameters; the second SmolLM2-135M; the
# others Qwen3-30B-A3B and Qwen3-235B-A22B.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe_512m": {
        "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024,
        "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "smollm2_135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "qwen3_235b_a22b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
}  # fmt: skip


def step_bytes(model: Decoder, batch: int, context: int) -> float:
    """Bytes that a decode step must read: weights once, chosen experts, K and V.

    Of the experts as many as `batch` tokens choose on average if each chooses k at random.
    """
    config = model.config
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    chosen = 1.0
    if config.num_experts:
        chosen = 1 - (1 - config.experts_per_token / config.num_experts) ** batch
    is_head = config.tie_embeddings and not hasattr(model, "head")
    total = 0.0
    for path, leaf in leaves:
        if path == ("embedding",) and not is_head:
            continue  # some rows of it are looked up
        is_experts = False
        if config.num_experts:  # dense layers have an axis less
            is_experts = str(path[-1]).removesuffix("_scale") in ("gate_up", "down")
            is_experts &= leaf.ndim > (1 if str(path[-1]).endswith("_scale") else 2)
        total += sum(x.nbytes for x in jax.tree.leaves(leaf)) * (chosen if is_experts else 1.0)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return total + batch * context * kv * jnp.dtype(model.dtype).itemsize


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _fill(graph, params, state: KVState, tokens) -> tuple[KVState, jax.Array]:
    """Appends tokens [rows, count] to the rows: (state, the logits of each row's last token)."""
    rows, count = tokens.shape
    which, counts = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, count, jnp.int32)
    state, batch, _ = state.append(which, counts, num_tokens=rows * count)
    last = batch.cu_q_lens[1:] - 1
    logits, state = nnx.merge(graph, params)(tokens.reshape(-1), batch, state, logit_rows=last)
    return state, logits


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _pretend(state: KVState, count: int) -> KVState:
    """Makes all rows `count` tokens long without computing any: their K and V are 0."""
    rows = jnp.arange(state.table.max_seqs, dtype=jnp.int32)
    counts = jnp.full(rows.shape, count, jnp.int32)
    state, _, _ = state.append(rows, counts, num_tokens=rows.shape[0] * count)
    return state


@functools.partial(jax.jit, donate_argnums=0)
def _rewind(state: KVState, rows, counts) -> KVState:
    return state.truncate(rows, counts)[0]


class Steps:
    """Calls that run a model at a fixed batch and context, again and again on one state.

    Args:
      steps: decode steps of one call.
      extra_pages: of the pool, beyond what the rows need.
    """

    def __init__(
        self, model: Decoder, batch: int, context: int, steps: int, *, extra_pages: int = 0
    ):
        self.graph, self.params = nnx.split(model)
        self.config, self.batch, self.context, self.steps = model.config, batch, context, steps
        self.rows = jnp.arange(batch, dtype=jnp.int32)
        self.state = state_for(model, [context + steps] * batch)
        if extra_pages:
            table = self.state.table
            self.state = KVState.create(
                num_layers=model.config.num_layers, num_pages=table.num_pages + extra_pages,
                page_size=table.page_size, num_kv_heads=model.config.num_kv_heads,
                head_dim=model.config.head_dim, max_seqs=table.max_seqs,
                pages_per_seq=table.page_table.shape[1], dtype=model.dtype,
            )  # fmt: skip

    def prompt(self) -> np.ndarray:
        """i32[batch, context] random tokens."""
        rng = np.random.default_rng(0)
        return rng.integers(0, self.config.vocab_size, (self.batch, self.context), np.int32)

    def fill(self) -> None:
        """Computes the context."""
        self.state, _ = _fill(self.graph, self.params, self.state, self.prompt())

    def pretend(self) -> None:
        """Takes zeros for the K and V of the context, which makes no difference in time."""
        self.state = _pretend(self.state, self.context)

    def prefill(self) -> None:
        """Computes the context, waits, and forgets it."""
        self.fill()
        self._back(self.context)

    def decode(self) -> None:
        """Makes `steps` tokens per row, waits, and forgets them."""
        self.state, progress, _ = self._decode(self.params, self.state, *self._unchanged)
        if (np.asarray(progress.made) != self.steps).any():
            raise AssertionError(f"{self.steps} steps made {progress.made} tokens per row")
        self._back(self.steps)

    @functools.cached_property
    def _unchanged(self) -> tuple:
        """What `decode` takes besides weights and state."""
        progress = Progress(*(jnp.zeros(self.batch, jnp.int32) for _ in range(3)))
        limits = jnp.full(self.batch, self.steps + 1, jnp.int32)  # no row stops, none is released
        never = jnp.full(4, -1, jnp.int32)
        return progress, self.rows, limits, never, Sampler.create(), jnp.int32(self.steps)

    @functools.cached_property
    def _decode(self) -> Callable[..., Any]:
        """Compiled ahead, as `generate` does."""
        call = self.params, self.state, *self._unchanged
        return compiled(decode, self.graph, *call, chunk=self.steps)

    def _back(self, tokens: int) -> None:
        counts = jnp.full(self.batch, tokens, jnp.int32)
        self.state = jax.block_until_ready(_rewind(self.state, self.rows, counts))
