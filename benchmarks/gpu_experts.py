# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: `moe_experts` against ceilings and XLA's ragged_dot of this run.

    python benchmarks/gpu_experts.py --rows FILE [--dry]

Two layers of Qwen3-30B-A3B's experts (128 of 768, 8 per token, 2048 wide) take turns, each with a
choice of its own; together the chosen ones are larger than the L2 cache. As in a model, a call's
result is added to the tokens, which are the next call's: that addition is in the times.

GB/s counts each expert's weights that some token chose once, TFLOP/s the products of the chosen
pairs. The peer has bf16 weights in the layout that ragged_dot wants.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Report, median_ratio, per_call, percent, rate, seconds_of, worst_error

from jax_paged import moe_experts, quantize_weight

MOST_ERROR = 2e-2  # of bf16 roundings of h and of the result, in either


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens and the dtype of the weights; target as in gpu_attention.py."""

    tokens: int
    dtype: str = "bfloat16"
    target: tuple[str, str, float] | None = None


SIZES = (128, 8, 2048, 768)  # experts, of which a token chooses, hidden, inner
SHAPES = (
    Shape(1, target=("percent_of_copy", "min", 85)),
    Shape(8, target=("percent_of_copy", "min", 85)),
    Shape(32, target=("percent_of_copy", "min", 85)),
    Shape(512),
    Shape(4096),
    *(Shape(tokens, dtype) for dtype in ("int8", "float8_e4m3fn") for tokens in (1, 32)),
)
DRY_SIZES = (4, 2, 64, 48)
DRY_SHAPES = (Shape(2, target=SHAPES[0].target), Shape(20, "int8"))

Layer = dict[str, jax.Array]


@functools.partial(jax.jit, static_argnames=("sizes", "tokens", "dtype"))
def _weights(key, *, sizes, tokens, dtype) -> Layer:
    """A layer, and what each token chooses of it."""
    num_experts, k, hidden, inner = sizes
    keys = jax.random.split(key, 3)
    gate_up = jax.random.normal(keys[0], (num_experts, 2 * inner, hidden), jnp.bfloat16)
    down = jax.random.normal(keys[1], (num_experts, hidden, inner), jnp.bfloat16)
    layer = {
        "gate_up": gate_up * jnp.bfloat16(hidden**-0.5),
        "down": down * jnp.bfloat16(0.01 * inner**-0.5),  # so that a long chain does not grow
    }
    scales = {}
    if dtype != "bfloat16":
        for name in tuple(layer):
            layer[name], scales[f"{name}_scale"] = quantize_weight(layer[name], dtype=dtype)
    chances = jax.random.uniform(keys[2], (tokens, num_experts))
    routing, experts = jax.lax.top_k(chances, k)
    return layer | scales | {"experts": experts.astype(jnp.int32), "weights": routing / k}


def _ragged_dot(x, gate_up, down, experts, weights):
    """XLA's grouped product: the pairs sorted by expert, weights as [experts, in, out]."""
    order = jnp.argsort(experts.ravel())
    token = order // experts.shape[1]
    sizes = jnp.bincount(experts.ravel(), length=gate_up.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(jax.lax.ragged_dot(x[token], gate_up, sizes), 2, axis=1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
    weighted = y.astype(jnp.float32) * weights.ravel()[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(weighted).astype(x.dtype)


@functools.partial(jax.jit, static_argnames="contender")
def _call(x, layer: Layer, *, contender: Any):
    if contender == "ragged_dot":
        return _ragged_dot(x, **layer)
    arrays: dict[str, Any] = layer
    return moe_experts(x, **arrays, implementation=contender)


@functools.partial(jax.jit, static_argnames=("contender", "calls"))
def _chain(x, layers: tuple[Layer, ...], *, contender: str, calls: int):
    for call in range(calls):
        x = x + _call(x, layers[call % len(layers)], contender=contender)
    return x


def measure(shape: Shape, best: dict[str, float | None], report: Report) -> None:
    """Times one shape and the peer; adds their rows."""
    sizes = DRY_SIZES if report.dry else SIZES
    num_experts, k, hidden, inner = sizes
    layers = tuple(
        _weights(jax.random.key(seed), sizes=sizes, tokens=shape.tokens, dtype=shape.dtype)
        for seed in range(2)
    )
    x = jax.random.normal(jax.random.key(2), (shape.tokens, hidden), jnp.bfloat16)
    expected = _call(x, layers[0], contender="reference")

    def timed(contender: str, layers: tuple[Layer, ...]):
        """(seconds per call, worst error of one call)."""

        def run(calls: int):
            return jax.block_until_ready(_chain(x, layers, contender=contender, calls=calls))

        error = worst_error(_call(x, layers[0], contender=contender), expected)
        if not error <= MOST_ERROR:
            raise AssertionError(f"differs from the reference by {error:.3g} > {MOST_ERROR}")
        once = seconds_of(lambda: run(1))
        long = 3 if report.dry else int(np.clip(0.3 / once, 4, 96))
        timing = per_call(
            lambda calls: seconds_of(lambda: run(calls)), max(long // 4, 1), long,
            budget_s=0.02 if report.dry else 0.8,
        )  # fmt: skip
        report.check_time(timing)
        return timing, error

    timing, error = timed("native", layers)
    chosen = np.mean([len(np.unique(layer["experts"])) for layer in layers])
    read = float(chosen) * 3 * hidden * inner * layers[0]["down"].dtype.itemsize
    flops = 2.0 * shape.tokens * k * 3 * hidden * inner
    gb_per_s, tflop_per_s = rate(read / 1e9, timing.median), rate(flops / 1e12, timing.median)
    what: dict[str, Any] = {
        "case": f"{k} of {num_experts} × {inner}, {hidden} wide", "size": f"{shape.tokens} tokens",
        "dtype": shape.dtype,
    }  # fmt: skip

    def time_peer():
        named = tuple(
            layer | {name: jnp.swapaxes(layer[name], 1, 2) for name in ("gate_up", "down")}
            for layer in layers
        )
        taken, _ = timed("ragged_dot", named)
        ratio = median_ratio(taken, timing)
        report.add(
            kind="experts peer", peer="ragged_dot", **what, us=1e6 * taken.median, ratio=ratio
        )

    report.add(
        kind="experts", **what, us=1e6 * timing.median,
        percentiles=[1e6 * timing.p10, 1e6 * timing.p90], mb=read / 1e6, gb_per_s=gb_per_s,
        tflop_per_s=tflop_per_s, percent_of_copy=percent(gb_per_s, best["copy_gb_per_s"]),
        percent_of_matmul=percent(tflop_per_s, best["bf16_tflop_per_s"]), worst_error=error,
        target=shape.target,
    )  # fmt: skip
    if shape.dtype == "bfloat16":
        report.attempt(time_peer, kind="experts peer", peer="ragged_dot", **what)


def main() -> None:
    report, _ = Report.from_args("Experts on this GPU.")
    best = report.ceilings()
    for shape in DRY_SHAPES if report.dry else SHAPES:
        what = {"kind": "experts", "size": f"{shape.tokens} tokens", "dtype": shape.dtype}
        report.attempt(functools.partial(measure, shape, best, report), **what)
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
