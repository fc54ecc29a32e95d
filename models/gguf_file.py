"""Reads GGUF files (architectures llama, qwen3, qwen3moe): configuration, tensors, tokenizer.

Tensors are dequantised. Every metadata key that can alter a logit is honoured or refused by name;
keys of the `general.` space and of tools that made the file only describe it.
"""

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .config import DecoderConfig, RopeConfig
from .gguf_quants import KINDS, QUANTIZATIONS, dequantize, kind_name
from .gguf_reader import read_gguf
from .gguf_vocab import tokenizer_from_gguf
from .parameters import Fill, Shape, check_tensors, expected_tensors
from .tokenizer import MissingTokenizer, Tokenizer

# GGUF architecture → the model_type of `DecoderConfig`.
_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

# Keys behind "<architecture>." that are read.
_HONOURED = frozenset(
    [
        "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
        "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "expert_count", "expert_used_count",
        "expert_feed_forward_length", "expert_weights_norm",
    ]
)  # fmt: skip
_HARMLESS = {
    "rope.scaling.finetuned": "says how the model was trained",
}
# Keys that would alter logits in ways that are not built: accepted with these values only.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # 1 = softmax
    "expert_group_count": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "nextn_predict_layers": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
_DESCRIPTIVE = ("general.", "tokenizer.", "GGUF.", "quantize.", "mradermacher.")

_TENSOR_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FREQS = "rope_freqs.weight"


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor of `expected_tensors`.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_TENSOR_NAMES[module]}.{kind}"


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of Llama's q and k in GGUF: pairs (2 i, 2 i + 1) back to halves."""
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


class GGUFFile:
    """An opened GGUF file.

    Raises:
      ValueError: the file is truncated, no GGUF, a part of a split one, or of an architecture that
        is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.metadata, self._tensors = read_gguf(path)
        except (ValueError, OverflowError, RecursionError, struct.error) as error:
            raise ValueError(f"{path}: truncated or not a GGUF file: {error}") from None
        self.shapes: dict[str, Shape] = {name: t.shape for name, t in self._tensors.items()}
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16), "dequantize")
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise ValueError(f"{path}: key 'split.count' must be 1 (merge the parts), got {parts}")
        if (kind := self.metadata.get("general.type", "model")) != "model":
            raise ValueError(f"{path}: key 'general.type' must be 'model', got {kind!r}")
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _MODEL_TYPES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(_MODEL_TYPES)}"
            )

    def config(self) -> DecoderConfig:
        """The configuration that the metadata describes.

        Raises:
          ValueError: a key is missing, or not supported, or has a value that is not.
        """
        self._check_keys()
        values = self._value
        num_layers = values("block_count", int)
        num_q_heads = values("attention.head_count", int)
        hidden = values("embedding_length", int)
        head_dim = values("attention.key_length", int, hidden // num_q_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if values(key, int, head_dim) != head_dim:
                raise ValueError(
                    f"{self.path}: key '{self.architecture}.{key}' must be the head_dim, "
                    f"{head_dim}, got {values(key, int)}"
                )
        is_moe = self.architecture == "qwen3moe"
        if not is_moe and values("expert_count", int, 0):
            raise ValueError(
                f"{self.path}: key '{self.architecture}.expert_count' must be 0, got "
                f"{values('expert_count', int)}"
            )
        moe: dict[str, Any] = {"moe_layers": (is_moe,) * num_layers}
        if is_moe:
            moe |= {
                "num_experts": values("expert_count", int),
                "experts_per_token": values("expert_used_count", int),
                "moe_intermediate_size": values("expert_feed_forward_length", int),
                # Writers leave the key out: every Qwen3-MoE in this format renormalises.
                "norm_topk_prob": bool(values("expert_weights_norm", int, 1)),
            }
        vocab_size = self.shapes.get("token_embd.weight", (0,))[0]
        if values("vocab_size", int, vocab_size) != vocab_size:
            raise ValueError(
                f"{self.path}: tensor 'token_embd.weight' must have "
                f"{values('vocab_size', int)} rows, got {vocab_size}"
            )
        ends = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        return DecoderConfig(
            model_type=_MODEL_TYPES[self.architecture],
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=values("feed_forward_length", int, 0 if is_moe else None),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=values("attention.head_count_kv", int, num_q_heads),
            head_dim=head_dim,
            context_length=values("context_length", int),
            rms_norm_eps=values("attention.layer_norm_rms_epsilon", float),
            rope=self._rope(head_dim),
            tie_embeddings="output.weight" not in self.shapes,
            qk_norm=self.architecture != "llama",
            attention_bias="blk.0.attn_q.bias" in self.shapes,
            mlp_bias="blk.0.ffn_up.bias" in self.shapes,
            bos_token_id=self.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(
                dict.fromkeys(self.metadata[key] for key in ends if key in self.metadata)
            ),
            **moe,
        )

    def tokenizer(self) -> Tokenizer | MissingTokenizer:
        """The tokenizer in the file."""
        return tokenizer_from_gguf(self.metadata, str(self.path))

    def open_tensors(self, config: DecoderConfig) -> Fill:
        """Checks names, shapes and quantisations; returns fill(name, out), which dequantises.

        Args:
          config: from `config`. fill takes the names of `expected_tensors`.
        """
        expected = {gguf_name(name): shape for name, shape in expected_tensors(config).items()}
        if _ROPE_FREQS in self.shapes:
            expected[_ROPE_FREQS] = (config.head_dim // 2,)
        check_tensors(self.path, expected, self.shapes)
        for name, tensor in self._tensors.items():
            if tensor.kind not in KINDS:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has quantisation {kind_name(tensor.kind)}, "
                    f"which is not supported; supported: {', '.join(QUANTIZATIONS)}"
                )
        heads = {}
        if self.architecture == "llama":
            heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}

        def fill(name: str, out: np.ndarray) -> None:
            num_heads = heads.get(name.split(".")[-2])
            self._dequantize(gguf_name(name), out, num_heads)

        return fill

    def _dequantize(self, name: str, out: np.ndarray, num_heads: int | None = None) -> None:
        """Fills `out` with a tensor; with num_heads its rows are unpermuted, while packed."""
        _, number, data = self._tensors[name]
        if num_heads:
            rows = data.reshape(len(out), -1)
            data = _unpermute(rows, num_heads).reshape(-1)
        dequantize(KINDS[number], data, out, self._pool)

    def _check_keys(self) -> None:
        for name, value in self.metadata.items():
            space, _, key = name.partition(".")
            if space == "split":
                continue
            if space != self.architecture:
                if not name.startswith(_DESCRIPTIVE):
                    raise ValueError(
                        f"{self.path}: key {name!r} = {_short(value)} is not known; it might "
                        "alter the logits, so it is not ignored"
                    )
            elif key in _NEUTRAL:
                if value not in _NEUTRAL[key]:
                    neutral = " or ".join(repr(v) for v in _NEUTRAL[key])
                    raise ValueError(
                        f"{self.path}: key {name!r} must be {neutral}, got {_short(value)}"
                    )
            elif key not in _HONOURED and key not in _HARMLESS:
                raise ValueError(
                    f"{self.path}: key {name!r} = {_short(value)} is not known; it might alter "
                    "the logits, so it is not ignored"
                )

    def _value(self, key: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ValueError(f"{self.path}: key {name!r} is missing")
        if not isinstance(value, int | float):
            raise ValueError(f"{self.path}: key {name!r} must be a number, got {_short(value)}")
        return kind(value)

    def _rope(self, head_dim: int) -> RopeConfig:
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ValueError(
                f"{self.path}: key '{self.architecture}.rope.scaling.type' must be 'none' or "
                f"'linear', got {kind!r}"
            )
        theta = self._value("rope.freq_base", float, 10000.0)
        divisors = None
        if _ROPE_FREQS in self.shapes:
            if self.shapes[_ROPE_FREQS] != (head_dim // 2,):
                raise ValueError(
                    f"{self.path}: tensor {_ROPE_FREQS!r} must have shape {(head_dim // 2,)}, got "
                    f"{self.shapes[_ROPE_FREQS]}"
                )
            values = np.empty(head_dim // 2, np.float32)
            self._dequantize(_ROPE_FREQS, values)
            divisors = tuple(values.tolist())
        if kind == "none":
            return RopeConfig(theta=theta, frequency_divisors=divisors)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=self._value("rope.scaling.factor", float),
            frequency_divisors=divisors,
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
