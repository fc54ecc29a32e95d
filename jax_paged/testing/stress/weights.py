# SPDX-License-Identifier: Apache-2.0
"""The ops that multiply by weights."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.ops.activations import ACTIVATIONS
from jax_paged.ops.linear import linear
from jax_paged.ops.lora import lora
from jax_paged.ops.moe import moe_experts

from .. import experts, low_rank, projections
from .op import DTYPES, WILD, Op, Row

_SHAPES = ((8, 1), (24, 5), (40, 16), (1032, 33), (2120, 17), (64, 300))
LINEAR = {
    "dtype": DTYPES,
    "shape": _SHAPES,
    "rows": (1, 0, 2, 3, 5, 8, 17, 130),
    "kind": (None, "int8", "float8_e4m3fn"),
    "blocks": (False, True),  # have the scales of 8-bit weights
    "live": (False, True),  # only some tokens count, and the others are NaN
}


def _linear(row: Row, seed: int, implementation: Any) -> float:
    depth, columns = row["shape"]
    dtype = jnp.dtype(row["dtype"])
    if row["kind"] is None:
        x, weight = projections.make_case(row["rows"], depth, columns, dtype, seed)
        expected, options = projections.oracle(x, weight), {}
    else:
        kind = jnp.int8 if row["kind"] == "int8" else jnp.float8_e4m3fn
        x, weight, scale = projections.make_codes(kind, row["rows"], depth, columns, dtype, seed)
        expected = projections.oracle(x, weight, scale)
        if row["blocks"]:
            wide = np.asarray(weight, np.float64) * np.asarray(scale, np.float64)[:, None]
            weight, scale, meant = projections.quantize_blocks(wide, kind)
            expected = projections.oracle(x, meant)
        options = {"weight_scale": scale}
    if row["live"]:
        live = np.random.default_rng(seed).random(len(x)) < 0.5
        x, expected = jnp.where(live[:, None], x, jnp.nan), np.where(live[:, None], expected, 0)
        options["live"] = jnp.asarray(live)
    out = linear(x, weight, out_dtype=jnp.float32, implementation=implementation, **options)
    return _share(out, expected, 1e-5 * depth**0.5)


EXPERTS = {
    "dtype": ("float32", "bfloat16"),
    "sizes": ((16, 24), (72, 40), (128, 96), (136, 264)),
    "tokens": (1, 0, 5, 70),
    "experts": ((4, 2), (8, 8), (64, 4), (5, 3)),
    "kind": (None, "int8", "float8_e4m3fn"),
    "blocks": (False, True),  # have the scales of 8-bit experts
    "activation": ACTIVATIONS,
    "bias": (None, "float32", "x"),
    "wild": (False, True),
}


def _experts(row: Row, seed: int, implementation: Any) -> float:
    (num_experts, k), (hidden, inner) = row["experts"], row["sizes"]
    case = experts.make_case(
        row["tokens"], num_experts, k, hidden, inner, seed, jnp.dtype(row["dtype"])
    )
    scales, meant = {}, case
    if row["kind"] is not None:
        kind = jnp.int8 if row["kind"] == "int8" else jnp.float8_e4m3fn
        case, scales, meant = experts.quantized(kind, case, row["blocks"])
    if row["wild"]:  # such an expert adds nothing
        rng = np.random.default_rng([seed, 1])
        ids, weights = np.array(case[3]), np.array(case[4])
        wild = rng.random(ids.shape) < 0.3
        ids[wild] = rng.choice(WILD[[0, 1, 2, 7, 8]], int(wild.sum()))
        case = [*case[:3], jnp.asarray(ids), case[4]]
        meant = [*meant[:3], np.where(wild, 0, ids), np.where(wild, 0, weights)]
    x, gate_up, down, ids, weights = case
    bias_dtype = row["dtype"] if row["bias"] == "x" else row["bias"]
    options = experts.make_options(case, row["activation"], bias_dtype, seed)
    given: dict[str, Any] = {**scales, **options}
    out = moe_experts(x, gate_up, down, ids, weights, **given, implementation=implementation)
    expected = experts.oracle(*meant, **options)
    tolerance = 2e-5 if row["dtype"] == "float32" else 0.04
    plain = row["activation"] == "silu" and row["bias"] is None
    return _share(out, expected, tolerance, 1e-5 if plain else experts.ROUNDING[row["dtype"]])


LORA = {
    "dtype": DTYPES,
    "sizes": ((8, (8,), 8), (72, (40,), 24), (64, (32, 16, 16), 16), (16, (3, 5), 64),
              (1304, (96, 8, 8), 16)),
    "tokens": (1, 0, 7, 70, 600),
    "adapters": (1, 3, 64),
    "base": (True, False),
    "wild": (False, True),
}  # fmt: skip


def _lora(row: Row, seed: int, implementation: Any) -> float:
    dtype, (depth, part_sizes, rank) = row["dtype"], row["sizes"]
    sizes = (row["tokens"], row["adapters"], depth, part_sizes, rank)
    x, a, b, adapters, base = low_rank.make_case(*sizes, dtype, seed)
    if row["wild"]:
        adapters = np.random.default_rng([seed, 1]).choice(WILD, len(adapters)).astype(np.int32)
    given = (x, a, b, jnp.asarray(adapters))
    options: dict[str, Any] = {"base": base} if row["base"] else {}
    out = lora(*given, part_sizes=part_sizes, implementation=implementation, **options)
    expected = low_rank.oracle(*given, base if row["base"] else 0 * base, part_sizes)
    return _share(out, expected, low_rank.TOLERANCES[dtype], experts.ROUNDING[dtype])


def _share(out, expected, tolerance: float, relative: float = 1e-5) -> float:
    out = np.asarray(out, np.float64)
    assert out.shape == expected.shape, (out.shape, expected.shape)
    error = np.abs(out - expected) / (tolerance + relative * np.abs(expected))
    share = float(np.max(error, initial=0))
    assert share <= 1, f"the error is {share:.3g} times what is allowed"
    return share


WEIGHTS = {
    "linear": Op(LINEAR, _linear, weight=2),
    "moe_experts": Op(EXPERTS, _experts, weight=2),
    "lora": Op(LORA, _lora, weight=2),
}
WILD_WEIGHTS = {
    "moe_experts, wild integers": Op(EXPERTS | {"wild": (True,)}, _experts),
    "lora, wild integers": Op(LORA | {"wild": (True,)}, _lora),
}
