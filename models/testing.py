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

    A "qwen3_moe" and a "gpt_oss" have 6 experts, a "mistral" a window of 7 tokens; of each head of
    a "phi3" 12 of 16 dimensions turn. The first layer of a "gemma3_text" or "gpt_oss" has a window
    of 7 tokens, the second one none. A "deepseek_v2" or "deepseek_v3" has 4 heads over latent rows
    and 3 layers, the last two with 8 experts in 4 groups and 2 shared ones.
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
    elif model_type == "gemma3_text":
        raw |= {
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 100.0,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
        }
    elif model_type == "gpt_oss":
        raw |= {
            "sliding_window": 7,
            "intermediate_size": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        }
    elif model_type.startswith("deepseek"):
        del raw["head_dim"]
        raw |= {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
        }
        if model_type == "deepseek_v3":
            raw |= {"q_lora_rank": 16, "norm_topk_prob": True}
    return raw | changes


def stored_tensors(
    config: DecoderConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Tensors of `expected_tensors` as a folder has them: experts one by one, or as in gpt-oss.

    Experts that become MXFP4 are rounded.
    """
    stored: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        prefix, experts, part = name.partition(".experts.")
        if config.model_type == "gpt_oss" and experts:
            if not part.startswith("up_proj"):
                whole = value
                if part.startswith("gate_proj"):
                    up = tensors[name.replace("gate_proj", "up_proj")]
                    whole = np.stack([value, up], axis=2).reshape(len(up), -1, *up.shape[2:])
                projection, _, kind = part.replace("gate_proj", "gate_up_proj").partition(".")
                stored |= _as_gpt_oss(f"{prefix}.experts.{projection}", kind, whole, config)
        elif experts:
            stored |= {f"{prefix}.experts.{e}.{part}": value[e] for e in range(len(value))}
        elif config.model_type == "gpt_oss":
            stored[name.replace(".mlp.gate.", ".mlp.router.")] = value
        else:
            stored[name] = value
    return stored


def _as_gpt_oss(
    name: str, kind: str, value: np.ndarray, config: DecoderConfig
) -> dict[str, np.ndarray]:
    if kind == "bias":
        return {name + "_bias": value}
    if not config.mxfp4_experts:
        return {name: np.ascontiguousarray(value.swapaxes(1, 2))}
    blocks = value.reshape(*value.shape[:2], -1, 32).astype(np.float32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(axis=-1) / 6))
    sizes = np.abs(blocks) / np.exp2(exponents)[..., None]
    codes = np.abs(sizes[..., None] - np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])).argmin(axis=-1)
    codes = (codes + 8 * (blocks < 0)).astype(np.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return {name + "_blocks": packed, name + "_scales": (exponents + 127).astype(np.uint8)}


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
        latent = getattr(config, "latent", None)
        layers: dict[str, Any] = {"num_layers": config.num_layers}
        if latent is not None:
            layers = {"layer_kinds": ["mla"] * config.num_layers, "latent_dim": latent.row_dim}
        self.state = state or KVState.create(
            **layers,
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
