# SPDX-License-Identifier: Apache-2.0
"""Projections, experts and whole models, and how mesh axes split their weights. Not a test."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_paged import linear, moe_experts, quantize_weight
from jax_paged.testing.experts import make_case, make_options, quantized


def projection(dtype="float32", kind=None, out=64):
    """x [8, 128] and a weight, with its scale where it has 8 bits."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((8, 128)), rng.standard_normal((out, 128)) / 128**0.5
    weight = jnp.asarray(weight, dtype if kind is None else "float32")
    operands = [jnp.asarray(x, dtype), weight]
    return operands if kind is None else [operands[0], *quantize_weight(weight, dtype=kind)]


def project(x, weight, scale=None, **options):
    return linear(x, weight, weight_scale=scale, **options)


# Of x, the weight and its scale; and whether the parts of the results are to be added up.
PROJECTIONS = {
    "outputs": (P(), P("tp"), P("tp"), False),
    "tokens": (P("tp"), P(), P(), False),
    "tokens and outputs": (P("dp"), P("tp"), P("tp"), False),
    "depth": (P(None, "tp"), P(None, "tp"), P(), True),
    "depth of the weight": (P(), P(None, "tp"), P(), True),
    "tokens and depth": (P("dp", "tp"), P(None, "tp"), P(), True),
    "outputs and depth": (P(None, "tp"), P("dp", "tp"), P("dp"), True),
}


def mixture(**options):
    """The operands of `run_experts`, with ids that are no experts."""
    kind, blocks = options.pop("kind", None), options.pop("blocks", False)
    case = make_case(8, 16, 3, hidden=32, inner=64, **options)
    given = make_options(case, "swiglu_oai", "float32")
    scales = {}
    if kind is not None:
        case, scales, _ = quantized(kind, case, blocks)
    x, gate_up, down, experts, weights = case
    experts = experts.at[2, 1].set(-1).at[3].set(16)
    arrays = [x, gate_up, down, experts, weights, given["gate_up_bias"], given["down_bias"]]
    return arrays + [scales[name] for name in ("gate_up_scale", "down_scale") if scales]


def in_pairs(x):
    """The rows of gate and up on an axis each."""
    return x.reshape(x.shape[0], 2, -1, *x.shape[2:])


def run_experts(x, gate_up, down, experts, weights, gate_up_bias, down_bias, *scales, **options):
    names = ("gate_up_scale", "down_scale")
    options |= dict(zip(names, scales, strict=False))
    return moe_experts(
        x, gate_up, down, experts, weights, gate_up_bias=gate_up_bias, down_bias=down_bias,
        activation="swiglu_oai", limit=0.75, **options,
    )  # fmt: skip


# The mesh axes of the tokens, the experts and their inner size.
MIXTURES = {
    "experts": (None, "tp", None),
    "inner": (None, None, "tp"),
    "experts and inner": (None, "dp", "tp"),
    "tokens and experts": ("dp", "tp", None),
    "tokens and inner": ("dp", None, "tp"),
    "experts over all": (None, ("dp", "tp"), None),
}


def specs_of(tokens, experts, inner, operands):
    by_token = P(tokens)
    rows = P(experts) if inner is None else P(experts, None, inner)  # of gate_up, and of down
    specs = [by_token, rows, rows, by_token, by_token, rows, P(experts), rows, P(experts)]
    return specs[: len(operands)]


BY_EXPERT = {"gate_up": P("tp"), "down": P("tp")}
# gate_up then has two axes of rows, so that inner is one.
BY_INNER = {"gate_up": P(None, None, "tp"), "down": P(None, None, "tp")}


def decode_step(graph):
    """A step of one token for each row, of a decoder's graph."""

    def step(params, state, rows, tokens):
        table, _ = state.table.reserve(rows, 1)
        table, batch, _ = table.step(rows, 1, num_tokens=len(rows))
        return nnx.merge(graph, params)(tokens, batch, state.replace(table=table))

    return step


def split_params(params, of_experts, put):
    """put(parameter, its shape, its spec) of all parameters of a decoder."""
    specs = {"qkv": P("tp"), "out": P(None, "tp")} | of_experts

    def split(path, x):
        name = next((y for key in path if (y := getattr(key, "key", None)) in specs), None)
        shape = x.shape
        if name == "gate_up" and of_experts is BY_INNER:
            shape = (shape[0], 2, shape[1] // 2, shape[2])
        return put(x, shape, specs.get(name, P()))

    return jax.tree_util.tree_map_with_path(split, params)
