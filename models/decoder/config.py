# SPDX-License-Identifier: Apache-2.0
"""What the decoder is: the configuration that every checkpoint format is read into."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_paged.cache.state import LayerKind
from jax_paged.checks import RopeStyle
from jax_paged.checks.fields import (
    FLAG,
    NOTHING,
    TEXT,
    Domain,
    either,
    integer,
    list_of,
    number,
    one_of,
    short,
)
from jax_paged.ops import rope
from jax_paged.ops.activations import ACTIVATIONS, Activation

_SIZE, _ID = integer(1), integer(0)
CAP = either(NOTHING, number(1e-3, 1e6))
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# The type and range of each field of `RopeConfig` and `DecoderConfig`. The readers' tables give the
# keys of their formats these domains, so that a message can name the key.
ROPE_DOMAINS: dict[str, Domain] = {
    "theta": number(2, 1e15),
    "kind": Domain(" or ".join(map(repr, ROPE_KINDS)), lambda value: value in ROPE_KINDS),
    "factor": number(1e-3, 1e6),
    "original_context": integer(0, 2**40),
    "low_freq_factor": number(1e-3, 1e6),
    "high_freq_factor": number(1e-3, 1e6),
    "beta_fast": number(1e-3, 1e6),
    "beta_slow": number(1e-3, 1e6),
    "truncate": FLAG,
    "attention_factor": number(1e-3, 1e3),
    "frequency_divisors": either(NOTHING, list_of(number(1e-6, 1e6))),
    "rotary_dim": either(NOTHING, integer(2, 2**16)),
}
DOMAINS: dict[str, Domain] = {
    "model_type": TEXT,
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": integer(0),
    "num_layers": integer(1, 2**16),
    "num_q_heads": _SIZE,
    "num_kv_heads": _SIZE,
    "head_dim": integer(1, 2**16),
    "context_length": _SIZE,
    "rms_norm_eps": number(1e-30, 1),
    "tie_embeddings": FLAG,
    "qk_norm": FLAG,
    "qkv_bias": FLAG,
    "out_bias": FLAG,
    "mlp_bias": FLAG,
    "fused_projections": FLAG,
    "fp8_blocks": FLAG,
    "mxfp4_experts": FLAG,
    "norm_offset": one_of(0, 1),
    "wide_norms": FLAG,
    "post_norms": FLAG,
    "embedding_scale": number(1e-6, 1e6),
    "logit_soft_cap": CAP,
    "attention_scale": either(NOTHING, number(1e-6, 1e6)),
    "attention_soft_cap": CAP,
    "sinks": FLAG,
    "activation": one_of(*ACTIVATIONS),
    "activation_limit": CAP,
    "num_experts": integer(0),
    "experts_per_token": integer(0),
    "moe_intermediate_size": integer(0),
    "norm_topk_prob": FLAG,
    "router_bias": FLAG,
    "router_scores": one_of("softmax", "sigmoid"),
    "choice_bias": FLAG,
    "expert_groups": _SIZE,
    "groups_per_token": _SIZE,
    "expert_scale": number(1e-6, 1e6),
    "shared_intermediate_size": integer(0),
    "expert_bias": FLAG,
    "moe_layers": list_of(FLAG),
    "layer_windows": list_of(integer(0)),
    "nextn_layers": integer(0),
    "bos_token_id": either(NOTHING, _ID),
    "eos_token_ids": list_of(_ID),
}
LATENT_DOMAINS: dict[str, Domain] = {
    "kv_rank": _SIZE,
    "q_rank": either(NOTHING, _SIZE),
    "nope_dim": integer(1, 2**16),
    "rope_dim": integer(2, 2**16),
    "v_dim": integer(1, 2**16),
    "style": one_of("half", "interleaved"),
}
Scores = Literal["softmax", "sigmoid"]
TOKEN_IDS = either(_ID, list_of(_ID))  # for `token_ids`


def _check_domains(config: Any, domains: Mapping[str, Domain]) -> None:
    for name, domain in domains.items():
        if not domain.has(value := getattr(config, name)):
            raise ValueError(f"config: {name} must be {domain.text}, got {short(value)}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear, llama3 or yarn; the rest as in its paper.

    frequency_divisors: one divisor per frequency (GGUF's rope_freqs tensor, LongRoPE), after the
    scaling.
    rotary_dim: how many dimensions of a head turn, from the first on; None = all.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_divisors: tuple[float, ...] | None = None
    rotary_dim: int | None = None

    def __post_init__(self):
        _check_domains(self, ROPE_DOMAINS)
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise ValueError(f"config: rotary_dim must be even, got {self.rotary_dim}")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(
                f"config: original_context must be positive with rope kind {self.kind!r}, got 0"
            )
        fast, slow = self.high_freq_factor, self.low_freq_factor
        if self.kind == "llama3" and fast <= slow:
            raise ValueError(
                f"config: high_freq_factor must be above low_freq_factor={slow}, got {fast}"
            )
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"config: beta_fast must be above beta_slow={self.beta_slow}, got {self.beta_fast}"
            )

    def frequencies(self, head_dim: int) -> np.ndarray:
        """f32[rotary_dim / 2] radians per position; rotary_dim is head_dim where all turn."""
        result = rope.inverse_frequencies(self.rotary_dim or head_dim, self.theta)
        if self.kind == "linear":
            result = result / self.factor
        elif self.kind == "llama3":
            result = rope.llama3_frequencies(
                result,
                factor=self.factor,
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
                original_context=self.original_context,
            )
        elif self.kind == "yarn":
            result = rope.yarn_frequencies(
                result,
                theta=self.theta,
                factor=self.factor,
                original_context=self.original_context,
                beta_fast=self.beta_fast,
                beta_slow=self.beta_slow,
                truncate=self.truncate,
            )
        if self.frequency_divisors is not None:
            result = result / np.asarray(self.frequency_divisors)
        return result.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): sizes of its projections.

    kv_rank, rope_dim: what a page holds of a token: the latent vector that K and V of all heads are
      made of, and a key part that is rotated and shared.
    q_rank: of the vector that queries are made of; None = they are made of the hidden state.
    nope_dim, v_dim: of a head, the part of a key that is not rotated, and its value.
    style: how the rotated parts turn.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    style: RopeStyle = "interleaved"

    def __post_init__(self):
        _check_domains(self, LATENT_DOMAINS)
        if self.rope_dim % 2:
            raise ValueError(f"config: qk_rope_head_dim must be even, got {self.rope_dim}")

    @property
    def row_dim(self) -> int:
        """What a page holds of a token."""
        return self.kv_rank + self.rope_dim


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the decoder is. Hashable, so it can be a static argument of jit.

    moe_layers: for each layer whether its MLP is a mixture of experts (then num_experts,
    experts_per_token and moe_intermediate_size count) or dense (intermediate_size).
    layer_windows: for each layer how many tokens a query sees, itself included; 0 = all. () = all
    of every layer.
    fused_projections: the checkpoint has q, k and v as one tensor, `qkv_proj`, and gate and up as
    one, `gate_up_proj`.
    fp8_blocks: weights in the checkpoint may be fp8, with a scale for each block of 128 x 128.
    mxfp4_experts: experts in the checkpoint may have 4 bits, with a scale for each 32.
    norm_offset: what is added to the weights of norms.
    wide_norms: the weights of norms are f32, and what they multiply is rounded after that, not
    before.
    post_norms: what attention and MLP give is normalised before it is added.
    embedding_scale: what embeddings are multiplied by, rounded to their dtype.
    logit_soft_cap: the logits are cap · tanh(logits / cap); None = as they are.
    attention_scale, attention_soft_cap: `sm_scale` and `soft_cap` of `attend`.
    sinks: whether each head has a logit without a value, as `sinks` of `attend`.
    activation, activation_limit: of the MLPs, as for `moe_experts`.
    router_bias, expert_bias: whether routers and experts have biases.
    router_scores, choice_bias, expert_groups, groups_per_token, expert_scale: as for `route`, where
    they have the names scores, choice_bias (here, whether there is one), groups, groups_per_token
    and scale.
    shared_intermediate_size: of an MLP beside the experts that all tokens pass; 0 = none.
    latent: attention is over latent rows; num_kv_heads is num_q_heads then, head_dim that of q.
    nextn_layers: layers of the checkpoint behind the last one, which predict more than the next
    token; they are skipped.
    local_rope: the rotary embedding of the layers that have a window; None = that of all.
    context_length: the positions the checkpoint was trained for; nothing enforces it. The
    frequencies of a LongRoPE model are those of rows of up to so many tokens.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qk_norm: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    fp8_blocks: bool = False
    mxfp4_experts: bool = False
    norm_offset: int = 0
    wide_norms: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    sinks: bool = False
    activation: Activation = "silu"
    activation_limit: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    router_bias: bool = False
    router_scores: Scores = "softmax"
    choice_bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_scale: float = 1.0
    shared_intermediate_size: int = 0
    expert_bias: bool = False
    moe_layers: tuple[bool, ...] = ()
    layer_windows: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    latent: LatentConfig | None = None
    nextn_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _check_domains(self, DOMAINS)
        sizes = ["experts_per_token", "moe_intermediate_size"] if self.num_experts else []
        if not all(self.moe_layers) or not self.moe_layers:
            sizes.append("intermediate_size")
        for name in sizes:
            if getattr(self, name) <= 0:
                raise ValueError(f"config: {name} must be positive, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"config: num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_q_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config: head_dim must be even for RoPE, got {self.head_dim}")
        self._check_rope(self.rope)
        if self.local_rope is not None:
            self._check_rope(self.local_rope)
        if len(self.moe_layers) != self.num_layers:
            raise ValueError(
                f"config: moe_layers must have num_layers={self.num_layers} entries, got "
                f"{len(self.moe_layers)}"
            )
        if len(self.layer_windows) not in (0, self.num_layers):
            raise ValueError(
                f"config: layer_windows must have num_layers={self.num_layers} entries or none, "
                f"got {len(self.layer_windows)}"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"config: num_experts_per_tok must be at most num_experts={self.num_experts}, got "
                f"{self.experts_per_token}"
            )

        self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen = self.expert_groups, self.groups_per_token
        each, rest = divmod(self.num_experts, groups)
        if rest or chosen > groups:
            raise ValueError(
                f"config: n_group must divide num_experts={self.num_experts} and be at least "
                f"topk_group={chosen}, got {groups}"
            )
        if self.experts_per_token > chosen * each:
            raise ValueError(
                f"config: num_experts_per_tok must be at most the {chosen * each} experts of "
                f"{chosen} groups, got {self.experts_per_token}"
            )
        if groups > 1 and self.router_scores == "sigmoid" and each < 2:
            raise ValueError(f"config: groups must have 2 experts or more, got {each}")

    def _check_rope(self, rope: RopeConfig) -> None:
        if (rope.rotary_dim or 0) > self.head_dim:
            raise ValueError(
                f"config: rotary_dim must be at most head_dim={self.head_dim}, got "
                f"{rope.rotary_dim}"
            )
        half, divisors = (rope.rotary_dim or self.head_dim) // 2, rope.frequency_divisors
        if divisors is not None and len(divisors) != half:
            raise ValueError(
                f"config: frequency_divisors must have {half} entries, one per frequency, got "
                f"{len(divisors)}"
            )

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embedding of a layer."""
        return (self.window(layer) and self.local_rope) or self.rope

    def window(self, layer: int) -> int:
        """How many tokens a query of this layer sees, 0 = all."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def kind(self, layer: int) -> LayerKind:
        """The kind of this layer in a state with groups."""
        return "mla" if self.latent is not None else self.window(layer) or "full"


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a broken file is an error of one line that names it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
