# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files of the architectures in `MODEL_TYPES`: configuration, tensors, tokenizer.

Tensors are dequantized. Every metadata key that can alter a logit is honoured or refused by name;
keys of the `general.` space and of tools that made the file only describe it.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import Int4Weight, pack_int4
from jax_paged.checks.fields import FLAG, TEXT, Domain, either, integer, short
from jax_paged.ops.packing import PANEL

from ..decoder.config import DOMAINS, ROPE_DOMAINS, DecoderConfig, RopeConfig
from ..decoder.parameters import Fill, Part, Shape, check_tensors, each_expected_tensor
from .gguf_quants import (
    FOUR_BITS,
    HALF_SCALES,
    KINDS,
    NO_OFFSETS,
    QUANTIZATIONS,
    FourBits,
    dequantize,
    kind_name,
)
from .gguf_reader import read_gguf
from .gguf_vocab import tokenizer_from_gguf
from .hf_config import check_context
from .outside import check_keys, reading
from .tokenizer import MissingTokenizer, Tokenizer

# GGUF architecture → the model_type of `DecoderConfig`. Mistral is a llama there.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
}

# Keys behind "<architecture>." that are read.
_HONOURED: dict[str, Domain] = {
    "vocab_size": DOMAINS["vocab_size"],
    "context_length": DOMAINS["context_length"],
    "embedding_length": DOMAINS["hidden_size"],
    "block_count": DOMAINS["num_layers"],
    "feed_forward_length": DOMAINS["intermediate_size"],
    "attention.head_count": DOMAINS["num_q_heads"],
    "attention.head_count_kv": DOMAINS["num_kv_heads"],
    "attention.key_length": DOMAINS["head_dim"],
    "attention.value_length": DOMAINS["head_dim"],
    "attention.layer_norm_rms_epsilon": DOMAINS["rms_norm_eps"],
    "rope.dimension_count": DOMAINS["head_dim"],
    "rope.freq_base": ROPE_DOMAINS["theta"],
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": ROPE_DOMAINS["factor"],
    "rope.scaling.original_context_length": ROPE_DOMAINS["original_context"],
    "expert_count": DOMAINS["num_experts"],
    "expert_used_count": DOMAINS["experts_per_token"],
    "expert_feed_forward_length": DOMAINS["moe_intermediate_size"],
    "expert_weights_norm": either(FLAG, integer(0, 1)),
}
# The same, of one architecture only.
_HONOURED_BY_TYPE: dict[str, dict[str, Domain]] = {
    "phi3": {
        "attention.sliding_window": integer(0),
        "rope.scaling.attn_factor": ROPE_DOMAINS["attention_factor"],
    },
}
# Keys of any architecture that are read.
_GENERAL: dict[str, Domain] = {
    "general.architecture": TEXT,
    "general.type": TEXT,
    "split.count": integer(),
}
_BOS = "tokenizer.ggml.bos_token_id"
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
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
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_up_proj": "ffn_up",
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
# LongRoPE's divisors for rows within the original context, and for longer ones.
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


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
        with reading(f"{path}: truncated or not a GGUF file"):
            self.metadata, self._tensors = read_gguf(path)
        self.shapes: dict[str, Shape] = {name: t.shape for name, t in self._tensors.items()}
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16), "dequantize")
        check_keys(path, self.metadata, _GENERAL)
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise ValueError(f"{path}: key 'split.count' must be 1 (merge the parts), got {parts}")
        if (kind := self.metadata.get("general.type", "model")) != "model":
            raise ValueError(f"{path}: key 'general.type' must be 'model', got {short(kind)}")
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in MODEL_TYPES:
            raise ValueError(
                f"{path}: architecture {short(self.architecture)} is not supported; supported: "
                f"{', '.join(MODEL_TYPES)}"
            )

    def config(self, *, context_length: int | None = None) -> DecoderConfig:
        """The configuration that the metadata describes.

        Args:
          context_length: as for `config_from_hf`.

        Raises:
          ValueError: a key is missing, or not supported, or has a value that is not.
        """
        self._check_keys()
        with reading(self.path):
            return self._config(context_length)

    def _config(self, context_length: int | None) -> DecoderConfig:
        value = self._value
        num_layers = value("block_count")
        num_q_heads = value("attention.head_count")
        hidden = value("embedding_length")
        head_dim = value("attention.key_length", hidden // num_q_heads)
        rotary_dim = value("rope.dimension_count", head_dim)
        for key in ("attention.value_length", "rope.dimension_count"):
            is_free = self.architecture == "phi3" and key == "rope.dimension_count"
            if value(key, head_dim) != head_dim and not is_free:
                raise ValueError(
                    f"{self.path}: key '{self.architecture}.{key}' must be the head_dim, "
                    f"{head_dim}, got {value(key)}"
                )
        is_moe = self.architecture == "qwen3moe"
        if not is_moe and value("expert_count", 0):
            raise ValueError(
                f"{self.path}: key '{self.architecture}.expert_count' must be 0, got "
                f"{value('expert_count')}"
            )
        moe: dict[str, Any] = {"moe_layers": (is_moe,) * num_layers}
        if is_moe:
            moe |= {
                "num_experts": value("expert_count"),
                "experts_per_token": value("expert_used_count"),
                "moe_intermediate_size": value("expert_feed_forward_length"),
                # Writers leave the key out: every Qwen3-MoE in this format renormalises.
                "norm_topk_prob": bool(value("expert_weights_norm", 1)),
            }
        vocab_size = (*self.shapes.get("token_embd.weight", ()), 0)[0]
        if value("vocab_size", vocab_size) != vocab_size:
            raise ValueError(
                f"{self.path}: tensor 'token_embd.weight' must have "
                f"{value('vocab_size')} rows, got {vocab_size}"
            )
        rope, context_length = self._rope(rotary_dim, context_length)
        window = value("attention.sliding_window", 0)
        return DecoderConfig(
            model_type=MODEL_TYPES[self.architecture],
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=value("feed_forward_length", 0 if is_moe else None),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=value("attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            context_length=context_length,
            rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
            rope=rope if rotary_dim == head_dim else replace(rope, rotary_dim=rotary_dim),
            tie_embeddings="output.weight" not in self.shapes,
            qk_norm=self.architecture in ("qwen3", "qwen3moe"),
            qkv_bias=self.architecture == "qwen2" or "blk.0.attn_q.bias" in self.shapes,
            out_bias="blk.0.attn_output.bias" in self.shapes,
            mlp_bias="blk.0.ffn_up.bias" in self.shapes,
            fused_projections=self.architecture == "phi3",
            # One as long as the longest row hides nothing.
            layer_windows=(window,) * num_layers if 0 < window < value("context_length") else (),
            bos_token_id=self.metadata.get(_BOS),
            eos_token_ids=tuple(
                dict.fromkeys(self.metadata[key] for key in _ENDS if key in self.metadata)
            ),
            **moe,
        )

    def tokenizer(self) -> Tokenizer | MissingTokenizer:
        """The tokenizer in the file."""
        return tokenizer_from_gguf(self.metadata, str(self.path))

    def open_tensors(self, config: DecoderConfig) -> Fill:
        """Checks names, shapes and quantizations; returns a `Fill`, which dequantizes.

        Args:
          config: from `config`, whose `expected_tensors` are the names that the `Fill` takes.
        """
        weights = ((gguf_name(name), shape) for name, shape in each_expected_tensor(config))
        half = (config.rope.rotary_dim or config.head_dim) // 2
        names = (_SHORT, _LONG) if self.architecture == "phi3" else (_ROPE_FREQS,)
        divisors = [(name, (half,)) for name in names if name in self.shapes]
        check_tensors(self.path, itertools.chain(divisors, weights), self.shapes)
        self._check_kinds(self.shapes)
        heads = {}
        if self.architecture == "llama":
            heads = {"q_proj": config.num_q_heads, "k_proj": config.num_kv_heads}

        return _Tensors(self, heads)

    def four_bits(self, name: str, num_heads: int | None) -> FourBits:
        """Weights in 4 bits: codes [*experts, out, in], and of each 32 a scale and an offset.

        num_heads: as for `_dequantize`.
        """
        shape, number, data = self._tensors[name]
        kind = KINDS[number]
        blocks = data.reshape(*shape[:-1], -1, kind.num_bytes)
        if num_heads:
            blocks = blocks[_unpermute(np.arange(shape[0]), num_heads)]
        with reading(f"{self.path}: tensor {name!r}"):
            found = FOUR_BITS[number](blocks.reshape(-1, kind.num_bytes))
        codes, scale = (x.reshape(*shape[:-1], -1) for x in found[:2])
        return FourBits(
            codes, scale, None if found.offset is None else found.offset.reshape(scale.shape)
        )

    def kind_of(self, name: str) -> int:
        """ggml's number of the type of a tensor."""
        return self._tensors[name].kind

    def _dequantize(
        self, name: str, out: np.ndarray, num_heads: int | None = None, part: Part | None = None
    ) -> None:
        """Fills `out` with a tensor, or with a part of it, whose blocks alone are read.

        Args:
          num_heads: rows are unpermuted, while packed. None = they are in order.
        """
        shape, number, data = self._tensors[name]
        kind, into = KINDS[number], out
        index: list[Any] = list(part or [slice(None)] * len(shape))
        if num_heads:
            index[0] = _unpermute(np.arange(shape[0]), num_heads)[index[0]]
        if len(shape) == 1 and num_heads:  # a bias, each value of which is a block
            data = data.reshape(shape[0], -1)[index[0]]
        elif part is not None or num_heads:
            begin, end, _ = index[-1].indices(shape[-1])
            first, last = begin // kind.size, -(-end // kind.size)
            blocks = data.reshape(*shape[:-1], -1, kind.num_bytes)
            data = blocks[(*index[:-1], slice(first, last))]
            if (last - first) * kind.size != end - begin:
                into = np.empty((*out.shape[:-1], (last - first) * kind.size), out.dtype)
        with reading(f"{self.path}: tensor {name!r}"):
            dequantize(kind, data.reshape(-1), into, self._pool)
        if into is not out:
            out[...] = into[..., begin - first * kind.size : end - first * kind.size]

    def _check_kinds(self, names: Iterable[str]) -> None:
        for name in names:
            if (number := self._tensors[name].kind) not in KINDS:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has quantization {kind_name(number)}, which is "
                    f"not supported; supported: {', '.join(QUANTIZATIONS)}"
                )

    def _check_keys(self) -> None:
        honoured = _HONOURED | _HONOURED_BY_TYPE.get(self.architecture, {})
        own = {f"{self.architecture}.{key}": domain for key, domain in honoured.items()}
        check_keys(self.path, self.metadata, own | dict.fromkeys([_BOS, *_ENDS], integer()))
        for name, value in self.metadata.items():
            space, _, key = name.partition(".")
            if space == "split":
                continue
            if space != self.architecture:
                if not name.startswith(_DESCRIPTIVE):
                    raise ValueError(
                        f"{self.path}: key {short(name)} = {short(value)} is not known; it might "
                        "alter the logits, so it is not ignored"
                    )
            elif key in honoured or key in _HARMLESS:
                continue
            elif key in _NEUTRAL:
                if value not in _NEUTRAL[key]:
                    neutral = " or ".join(repr(v) for v in _NEUTRAL[key])
                    raise ValueError(
                        f"{self.path}: key {name!r} must be {neutral}, got {short(value)}"
                    )
            else:
                raise ValueError(
                    f"{self.path}: key {short(name)} = {short(value)} is not known; it might alter "
                    "the logits, so it is not ignored"
                )

    def _value(self, key: str, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ValueError(f"{self.path}: key {name!r} is missing")
        return value

    def _rope(self, rotary_dim: int, context_length: int | None) -> tuple[RopeConfig, int]:
        """The rotary embedding, and the context it is for."""
        longest = self._value("context_length")
        check_context(context_length, longest)
        kinds = ("none", "longrope") if self.architecture == "phi3" else ("none", "linear")
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind not in kinds:
            raise ValueError(
                f"{self.path}: key '{self.architecture}.rope.scaling.type' must be "
                f"{' or '.join(map(repr, kinds))}, got {short(kind)}"
            )
        theta = float(self._value("rope.freq_base", 10000.0))
        if self.architecture == "phi3":
            if not {_SHORT, _LONG} & self.shapes.keys() and kind == "none":
                factor = float(self._value("rope.scaling.attn_factor", 1.0))
                return RopeConfig(theta=theta, attention_factor=factor), context_length or longest
            original = self._value("rope.scaling.original_context_length")
            context = context_length or min(original, longest)
            return RopeConfig(
                theta=theta,
                attention_factor=float(self._value("rope.scaling.attn_factor")),
                frequency_divisors=self._divisors(
                    _LONG if context > original else _SHORT, rotary_dim
                ),
            ), context
        divisors = None
        if _ROPE_FREQS in self.shapes:
            divisors = self._divisors(_ROPE_FREQS, rotary_dim)
        rope = RopeConfig(theta=theta, frequency_divisors=divisors)
        if kind == "linear":
            factor = float(self._value("rope.scaling.factor"))
            rope = replace(rope, kind=kind, factor=factor)
        return rope, context_length or longest

    def _divisors(self, name: str, rotary_dim: int) -> tuple[float, ...]:
        shape = rotary_dim // 2
        if self.shapes.get(name) != (shape,):
            raise ValueError(
                f"{self.path}: tensor {name!r} must have shape {(shape,)}, got "
                f"{self.shapes.get(name, 'none')}"
            )
        self._check_kinds([name])
        values = np.empty(shape, np.float32)
        self._dequantize(name, values)
        divisors = tuple(values.tolist())
        if not (domain := ROPE_DOMAINS["frequency_divisors"]).has(divisors):
            raise ValueError(
                f"{self.path}: tensor {name!r} must be {domain.text}, got {short(divisors)}"
            )
        return divisors


class _Tensors:
    """The `Fill` of an open file, and what of it is in 4 bits: see `FillingSource`."""

    def __init__(self, file: GGUFFile, heads: dict[str, int]):
        self._file, self._heads = file, heads

    def __call__(self, name: str, out: np.ndarray, part: Part | None = None) -> None:
        self._file._dequantize(gguf_name(name), out, self._heads_of(name), part)

    def int4(self, *names: str) -> Int4Weight | None:
        """Tensors whose outputs are joined, stored in 4 bits; None where one is not."""
        if not self._are_int4(names):
            return None
        parts = [self._file.four_bits(gguf_name(name), self._heads_of(name)) for name in names]
        pairs = zip(*(part[:2] for part in parts), strict=True)
        codes, scale = (np.concatenate(x, axis=-2) for x in pairs)
        offset = None
        if self._have_offsets(names):
            offsets = [-8 * p.scale if p.offset is None else p.offset for p in parts]
            offset = np.concatenate(offsets, axis=-2)
        codes, scale = map(jax.device_put, (codes, scale))
        return pack_int4(codes, scale, None if offset is None else jax.device_put(offset))

    def int4_shapes(self, *names: str) -> Int4Weight | None:
        """The same with shapes for arrays."""
        if not self._are_int4(names):
            return None
        shapes = [self._file.shapes[gguf_name(name)] for name in names]
        leading, depth = shapes[0][:-2], shapes[0][-1]
        out = sum(shape[-2] for shape in shapes)
        codes = jax.ShapeDtypeStruct((*leading, out, depth), jnp.uint8)
        is_half = HALF_SCALES.issuperset(self._kinds(names))
        of_scale = jnp.float16 if is_half else jnp.float32
        scale = jax.ShapeDtypeStruct((*leading, out, depth // 32), of_scale)
        return jax.eval_shape(pack_int4, codes, scale, scale if self._have_offsets(names) else None)

    def _heads_of(self, name: str) -> int | None:
        return self._heads.get(name.split(".")[-2])

    def _kinds(self, names: Sequence[str]) -> list[int]:
        return [self._file.kind_of(gguf_name(name)) for name in names]

    def _are_int4(self, names: Sequence[str]) -> bool:
        shapes = [self._file.shapes[gguf_name(name)] for name in names]
        if any(len(shape) < 2 for shape in shapes):
            return False
        are_panels = sum(shape[-2] for shape in shapes) % PANEL == 0
        return are_panels and all(kind in FOUR_BITS for kind in self._kinds(names))

    def _have_offsets(self, names: Sequence[str]) -> bool:
        return any(kind != NO_OFFSETS for kind in self._kinds(names))
