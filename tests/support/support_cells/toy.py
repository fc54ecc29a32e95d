# SPDX-License-Identifier: Apache-2.0
"""A model of two layers whose attention has any options, and its texts in float64.

Every projection of q, k and v has a low-rank product beside it (`jax_paged.lora`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_paged as jp
from jax_paged.testing import Batch, Case, dense_oracle

HEADS, KV_HEADS, DIM, HIDDEN, VOCAB, RANK = 4, 2, 16, 32, 61, 8
WINDOW, SOFT_CAP, OUT_SCALE = 5, 0.6, 0.02
ARRAYS = ("embedding", "qkv", "low_a", "low_b", "out", "head", "slopes", "sinks", "cos", "sin")


@dataclasses.dataclass(frozen=True)
class Config:
    """What generate and Engine ask of it; has: the features of its attention."""

    has: tuple[str, ...] = ()
    vocab_size: int = VOCAB
    context_length: int = 64
    num_layers: int = 2
    num_kv_heads: int = KV_HEADS
    head_dim: int = DIM

    def window(self, layer: int) -> int:
        """Of the second layer alone; 0 = none."""
        return WINDOW if "windows" in self.has and layer else 0

    def kind(self, layer: int) -> str | int:
        return self.window(layer) or "full"


@functools.cache
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    width = (HEADS + 2 * KV_HEADS) * DIM
    sizes = {
        "embedding": (VOCAB, HIDDEN), "qkv": (2, width, HIDDEN), "low_a": (2, 1, RANK, HIDDEN),
        "low_b": (2, 1, width, RANK), "out": (2, HIDDEN, HEADS * DIM), "head": (VOCAB, HIDDEN),
    }  # fmt: skip
    made = {n: rng.standard_normal(size) * size[-1] ** -0.5 for n, size in sizes.items()}
    made["embedding"] *= 4
    made["qkv"] *= 0.6
    made["out"] *= 3
    made["slopes"], made["sinks"] = np.linspace(0.05, 0.6, HEADS), np.linspace(-1, 2, HEADS)
    angles = np.outer(np.arange(64), 0.4 ** np.arange(DIM // 2))
    made["cos"], made["sin"] = np.cos(angles), np.sin(angles)
    return {name: x.astype("f4") for name, x in made.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Toy:
    """No Flax: arrays, and a configuration."""

    arrays: dict[str, jax.Array]
    config: Config = dataclasses.field(metadata={"static": True})

    @staticmethod
    def create(*has: str) -> "Toy":
        return Toy({name: jnp.asarray(x) for name, x in weights().items()}, Config(has))

    @property
    def dtype(self):
        return self.arrays["embedding"].dtype

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        w, has = self.arrays, self.config.has
        x = w["embedding"][tokens]
        ends = [HEADS, HEADS + KV_HEADS]
        for layer in range(2):
            qkv = jp.lora(
                x, w["low_a"][layer], w["low_b"][layer], jnp.zeros(len(x), jnp.int32),
                base=x @ w["qkv"][layer].T,
            )  # fmt: skip
            q, k, v = jnp.split(qkv.reshape(len(x), -1, DIM), ends, axis=1)
            state = jp.write(k, v, state, batch, layer=layer)
            options: dict[str, Any] = {"soft_cap": SOFT_CAP} if "soft cap" in has else {}
            options |= {"alibi_slopes": w["slopes"]} if "ALiBi" in has else {}
            options |= {"sinks": w["sinks"]} if "sinks" in has else {}
            options |= {"rope": (w["cos"], w["sin"], "half")} if "inline RoPE" in has else {}
            if "fp8 output" in has:
                options |= {"out_dtype": "float8_e4m3fn", "out_scale": np.float32(OUT_SCALE)}
            if self.config.window(layer) and state.kinds == ("full",):
                options["sliding_window"] = WINDOW
            out = jp.attend(q, state, batch, layer=layer, **options).astype(jnp.float32)
            scale = np.float32(OUT_SCALE if "fp8 output" in has else 1)
            x = x + (out * scale).reshape(len(x), -1) @ w["out"][layer].T
        x = x if logit_rows is None else jnp.take(x, logit_rows, axis=0, mode="clip")
        return x @ w["head"].T, state


def text_of(
    prompt: Sequence[int], count: int, has: Sequence[str], *, without: str = "",
    window: tuple[int, int] | None = None, int8: bool = False,
) -> list[int]:  # fmt: skip
    """The likeliest tokens behind a prompt, all computed anew for each.

    Args:
      without: a feature that is left out, "LoRA" for the low-rank products.
      window: tokens that each sees, and how many at the front that all see.
      int8: K and V are rounded to int8, each token and head by its largest number.
    """
    has = [feature for feature in has if feature != without]
    tokens = list(prompt)
    for _ in range(count):
        logits = _last_logits(tokens, has, without != "LoRA", window, int8)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


def _last_logits(tokens, has, adapted, window, int8) -> np.ndarray:
    w = {name: x.astype("f8") for name, x in weights().items()}
    x, count = w["embedding"][tokens], len(tokens)
    options: dict[str, Any] = {"soft_cap": SOFT_CAP} if "soft cap" in has else {}
    options |= {"alibi_slopes": w["slopes"]} if "ALiBi" in has else {}
    options |= {"sinks": w["sinks"]} if "sinks" in has else {}
    options |= {"rope": (w["cos"], w["sin"], "half")} if "inline RoPE" in has else {}
    if window is not None:
        options |= {"sliding_window": window[0], "num_pinned": window[1]}
    case = Case("toy", HEADS, KV_HEADS, DIM, page_size=count)
    for layer in range(2):
        matrix = w["qkv"][layer]
        if adapted:
            matrix = matrix + w["low_b"][layer, 0] @ w["low_a"][layer, 0]
        qkv = (x @ matrix.T).reshape(count, -1, DIM)
        q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        if int8:
            scales = [np.abs(y).max(-1, keepdims=True) / 127 for y in (k, v)]
            k, v = (np.rint(y / s) * s for y, s in zip((k, v), scales, strict=True))
        pages = [y.swapaxes(0, 1)[None] for y in (k, v)]
        batch = Batch(
            case, q, *pages, np.zeros((1, 1), "i4"), np.array([count]), np.array([0, count]), 1,
            None, DIM**-0.5,
        )  # fmt: skip
        own = {"sliding_window": WINDOW} if "windows" in has and layer else {}
        out, _ = dense_oracle(batch, **options, **own)
        if "fp8 output" in has:
            out = (out / OUT_SCALE).astype("f4").astype(jnp.float8_e4m3fn).astype("f8") * OUT_SCALE
        x = x + out.reshape(count, -1) @ w["out"][layer].T
    return x[-1] @ w["head"].T
