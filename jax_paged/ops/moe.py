# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the chosen experts' gated MLPs for each token.

Only experts that some token chose are read, each about once for all of its tokens: one mechanism
for decode and prefill.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8

from jax_paged.checks import (
    Implementation,
    as_index,
    check_array,
    check_float,
    check_implementation,
    check_live,
    check_shape,
    check_weight,
    expect,
)
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import WHOLE, Split
from jax_paged.ops.activations import Activation, check_activation, gated_product
from jax_paged.ops.int4 import Int4Weight, check_int4
from jax_paged.ops.linear import contract
from jax_paged.ops.packing import PANEL, PackedWeight, panels_of, unpack

TARGET = "jax_paged.moe_experts.v1"
INT4_TARGET = "jax_paged.moe_experts_int4.v1"
_LARGEST_BLOCK = 64
_OPTIONS = ("gate_up_scale", "down_scale", "gate_up_bias", "down_bias", "limit")
_OPERANDS = ("x", "gate_up", "down", "experts", "weights", *_OPTIONS)
_HINT = "gate_up may be [experts, 2, inner, hidden], whose inner axis splits like that of down; "


def moe_experts(
    x: Float[Array, "tokens hidden"],
    gate_up: Float[Array, "experts *two_inner hidden"]
    | Int8[Array, "experts *two_inner hidden"]
    | PackedWeight
    | Int4Weight,
    down: Float[Array, "experts hidden inner"]
    | Int8[Array, "experts hidden inner"]
    | PackedWeight
    | Int4Weight,
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    *,
    gate_up_scale: Float[Array, "experts *rows"] | None = None,
    down_scale: Float[Array, "experts *rows"] | None = None,
    gate_up_bias: Float[Array, "experts *two_inner"] | None = None,
    down_bias: Float[Array, "experts hidden"] | None = None,
    activation: Activation = "silu",
    limit: Float[Array, ""] | float | None = None,
    live: Bool[Array, "tokens"] | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "tokens hidden"]:
    """Adds up each token's experts.

    out[t] = Σ_j weights[t, j] · (down[e] · h + down_bias[e]), e = experts[t, j]
    h = activation(gate) ⊙ up, (gate, up) = gate_up[e] · x[t] + gate_up_bias[e]

    Args:
      x: [tokens, hidden], bf16, f16 or f32.
      gate_up: [num_experts, 2 · inner, hidden], gate rows first; dtype of x, or int8 or f8e4m3fn.
        The same as [num_experts, 2, inner, hidden], with its scale and bias alike, may be split by
        inner over devices.
      down: [num_experts, hidden, inner]; dtype of gate_up. Both may be what `pack_weight` makes of
        them, which is faster on CPU; inner is a multiple of 16 then. Or both are 4 bits of
        `quantize_int4`, which bring their scales and offsets.
      experts: integers [tokens, k]. One outside [0, num_experts) adds nothing and reads nothing.
      weights: [tokens, k], cast to f32.
      gate_up_scale, down_scale: f32[num_experts, 2 · inner] and f32[num_experts, hidden], which
        8-bit experts are multiplied by, as `quantize_weight` gives them; only of 8-bit experts. Or
        scales of blocks of 128 × 128, as for `linear`: f32[num_experts, 2 · ⌈inner / 128⌉, ⌈hidden
        / 128⌉], those of gate first, and f32[num_experts, ⌈hidden / 128⌉, ⌈inner / 128⌉].
      gate_up_bias, down_bias: [num_experts, 2 · inner] and [num_experts, hidden], f32 or dtype of
        x. None = 0.
      activation: "silu" is g · sigmoid(g). "gelu" is g · Φ(g), by erf. "gelu_tanh" is its
        approximation by tanh, which Gemma's configurations call gelu_pytorch_tanh. "swiglu_oai" is
        gpt-oss's clamped SwiGLU: h = g · sigmoid(1.702 · g) · (u + 1), where g is a gate cut to at
        most limit and u an up cut to [-limit, limit].
      limit: scalar above 0, of "swiglu_oai", which needs it, and of no other; may be traced.
      live: tokens that count; the others get 0 and no expert is read for them. None = all.
      out_dtype: that of x, or f32, e.g. of parts that are to be added up; None = that of x.
      implementation: None = native on CPU and CUDA, reference elsewhere; "native"; "reference".

    Returns:
      [tokens, hidden] in out_dtype. Products are summed in f32; a scale multiplies the sum, then a
      bias is added to it. From there h is computed in f32 and rounded to x's dtype once. What down
      gives stays in f32, and a token's experts are summed in f32 in the order of j.

    Raises:
      ValueError: an argument's shape or dtype is wrong; there is no such activation, or it has no
        such limit.
      NotImplementedError: the native kernel does not take these sizes (multiples of 8).
      On CUDA the call fails with more than 8192 experts.

    Differentiable by implementation="reference", in biases and limit too. vmap runs one call after
    another.

    Over several devices the experts decide, and are never moved. Split by expert, each device runs
    those that it has. Split by inner (a multiple of 8 on each device), each one runs its part of
    every expert; that is refused where blocks have scales. One all-reduce adds the parts up in f32.
    Both may be at once, along other mesh axes, and so may a split of tokens. Another split of
    experts is refused.

    >>> import jax.numpy as jnp
    >>> x, gate_up, down = jnp.ones((1, 8)), jnp.ones((2, 16, 8)), jnp.ones((2, 8, 8))
    >>> out = moe_experts(x, gate_up, down, jnp.array([[1]]), jnp.array([[0.5]]))
    >>> print(out.shape, round(float(out[0, 0])))  # 0.5 · 8 · (silu(8) · 8)
    (1, 8) 256
    """
    check_implementation(implementation)
    check_float("x", x)
    check_shape("x", x, "tokens hidden", (None, None))
    if isinstance(gate_up, Int4Weight) and isinstance(down, Int4Weight):
        _check_int4(gate_up, down, x.shape[1], gate_up_scale, down_scale)
        packed = Packed(gate_up=True, down=True, is_int4=True)
        matrices = (gate_up.codes, down.codes)
        gate_up_scale, down_scale = gate_up.scales, down.scales
    elif isinstance(gate_up, Int4Weight) or isinstance(down, Int4Weight):
        raise ValueError("gate_up, down: expected both or neither in 4 bits, got one")
    else:
        sizes = (None, x.shape[1], None)
        check_weight("down", down, down_scale, x.dtype, "experts hidden inner", sizes)
        check_array("gate_up", gate_up)
        _check_gate_up(gate_up, down.shape, gate_up_scale, x.dtype)
        expect(gate_up.dtype == down.dtype, "down", f"dtype {gate_up.dtype.name}", down.dtype.name)
        packed = Packed(isinstance(gate_up, PackedWeight), isinstance(down, PackedWeight))
        matrices = (panels_of(gate_up), panels_of(down))
    num_experts, hidden, inner = down.shape
    rows, names = _rows_of(gate_up, inner)
    experts = as_index("experts", experts)
    check_shape("experts", experts, "tokens k", (x.shape[0], None))
    check_shape("weights", weights, "tokens k", tuple(experts.shape))
    for name, bias, axes, outputs in (
        ("gate_up_bias", gate_up_bias, names, rows), ("down_bias", down_bias, "hidden", (hidden,)),
    ):  # fmt: skip
        if bias is not None:
            allowed = tuple(dict.fromkeys((x.dtype, jnp.dtype(jnp.float32))))
            text = "dtype " + " or ".join(dtype.name for dtype in allowed)
            expect(bias.dtype in allowed, name, text, bias.dtype.name)
            check_shape(name, bias, f"experts {axes}", (num_experts, *outputs))
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    expect(dtype in (x.dtype, jnp.float32), "out_dtype", f"{x.dtype.name} or float32", dtype.name)
    limit = check_activation(activation, limit)
    if implementation != "reference" and (hidden % 8 or inner % 8):
        raise NotImplementedError(
            f"gate_up: expected hidden and inner sizes that are multiples of 8, got {hidden} and "
            f"{inner}; implementation='reference' takes any"
        )
    if live is not None:
        check_live(live, x.shape[0])
    ok = not (packed.gate_up and inner % PANEL)
    expect(ok, "gate_up", f"an inner size that is a multiple of {PANEL} where it is packed", inner)
    options = (gate_up_scale, down_scale, gate_up_bias, down_bias, limit)
    arrays = (x, *matrices, experts, weights)
    return _moe_experts(implementation, activation, dtype, packed, *arrays, *options, live)


def _rows_of(gate_up: Any, inner: int) -> tuple[tuple[int, ...], str]:
    """Axes between the experts and hidden: their sizes and names."""
    return ((2, inner), "2 inner") if gate_up.ndim == 4 else ((2 * inner,), "2·inner")


def _check_gate_up(gate_up, shape_of_down, scale, dtype) -> None:
    num_experts, hidden, inner = shape_of_down
    rows, names = _rows_of(gate_up, inner)
    sizes, parts = (num_experts, *rows, hidden), 1 if gate_up.ndim == 4 else 2
    axes = f"experts {names} hidden"
    check_weight("gate_up", gate_up, scale, dtype, axes, sizes, parts=parts)


def _check_int4(gate_up, down, hidden, gate_up_scale, down_scale) -> None:
    num_experts, inner = down.shape[0], down.shape[-1]
    check_int4("down", down, inner, (num_experts,))
    expect(down.shape[1] == hidden, "down", f"[experts, {hidden}, inner]", list(down.shape))
    check_int4("gate_up", gate_up, hidden, (num_experts,))
    expected = f"[{num_experts}, {2 * inner}, {hidden}]"
    expect(gate_up.shape[1] == 2 * inner, "gate_up", expected, list(gate_up.shape))
    for name, scale in (("gate_up_scale", gate_up_scale), ("down_scale", down_scale)):
        expect(scale is None, name, "None beside 4 bits", "one")


class Packed(NamedTuple):
    """Which weights are packed: those have an axis more. Those of 4 bits all are."""

    gate_up: bool
    down: bool
    is_int4: bool = False

    def unpacked(self, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, ...]:
        if self.is_int4:  # whose products `contract` has
            return gate_up, down
        pairs = zip((gate_up, down), self[:2], strict=True)
        return tuple(unpack(x) if is_packed else x for x, is_packed in pairs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _moe_experts(
    implementation, activation, dtype, packed, x, gate_up, down, experts, weights, *rest
):
    *options, live = rest
    if 0 in experts.shape:
        return jnp.zeros_like(x, dtype)
    if live is not None:
        experts = jnp.where(live[:, None], experts, jnp.int32(-1))
    options = (jnp.zeros(0, jnp.float32) if option is None else option for option in options)
    operands = (x, gate_up, down, experts, weights.astype(jnp.float32), *options)
    return _batched(implementation, activation, dtype, packed)(*operands)


@functools.cache
def _batched(
    implementation: Implementation, activation: Activation, dtype: jnp.dtype, packed: Packed
):
    def reference(x, gate_up, down, *rest, out_dtype=dtype):
        operands = (x, *packed.unpacked(gate_up, down), *rest)
        return (_reference(*operands, activation=activation, out_dtype=out_dtype),)

    own = functools.partial(_own, packed)

    @sequential_vmap
    def call(*operands):
        (out,) = ffi_call(
            INT4_TARGET if packed.is_int4 else TARGET,
            operands,
            {"activation": activation},
            split=_split(packed, own, *operands),
            cuda_workspace_words=0 if packed.is_int4 else functools.partial(_words, packed),
            implementation=implementation,
            reference=reference,
        )
        return out

    return (lambda *x: reference(*own(x, {}))[0]) if implementation == "reference" else call


def _split(packed: Packed, own, x, gate_up, down, experts, weights, *options) -> Split:
    more = [" -" if is_packed else "" for is_packed in packed[:2]]
    has_parts = gate_up.ndim - packed.gate_up == 4
    scaled = zip(options[:2], (gate_up, down), packed[:2], strict=True)
    of_blocks = [" -" if scale.ndim == x.ndim - more else "" for scale, x, more in scaled]
    if packed.is_int4:
        of_blocks = [" -" * (scale.ndim - 2) for scale in options[:2]]
    inner = "inner" if has_parts and not any(of_blocks) else WHOLE
    rows = f"- {inner}" if has_parts else WHOLE
    axes = {
        "x": "tokens -", "gate_up": f"experts {rows} -{more[0]}",
        "down": f"experts - {inner}{more[1]}",
        "experts": "tokens -", "weights": "tokens -",
        "gate_up_scale": f"experts {rows}{of_blocks[0]}", "down_scale": f"experts -{of_blocks[1]}",
        "gate_up_bias": f"experts {rows}", "down_bias": "experts -", "limit": "",
    }  # fmt: skip
    axes |= {name: WHOLE for name, x in zip(_OPTIONS, options, strict=True) if x.shape == (0,)}
    return Split(
        axes,
        results=("tokens -",),
        fixed=("gate_up", "down"),
        summed=("experts", "inner"),
        arrange=own,
        hint=_HINT,
    )


def _own(packed: Packed, operands, places):
    """The operands of one device: the rows of gate_up on one axis, experts by its own ids."""
    own = dict(zip(_OPERANDS, operands, strict=True))
    if own["gate_up"].ndim - packed.gate_up == 4:
        for name in ("gate_up", "gate_up_scale", "gate_up_bias"):
            x = own[name]
            own[name] = x.reshape(x.shape[0], -1, *x.shape[3:]) if x.ndim > 1 else x
    if "experts" in places:
        own["experts"] -= places["experts"].index * own["down"].shape[0]
    if "inner" in places:  # the bias is no part of the sum over inner
        is_first, bias = places["inner"].index == 0, own["down_bias"]
        own["down_bias"] = jnp.where(is_first, bias, jnp.zeros_like(bias))
    return tuple(own.values())


def _words(packed: Packed, operands) -> int:
    x, down, experts = (operands[name] for name in ("x", "down", "experts"))
    down = PackedWeight(down) if packed.down else down
    return _cuda_workspace_words(*experts.shape, *down.shape, itemsize=x.dtype.itemsize)


def _cuda_workspace_words(
    tokens: int, k: int, num_experts: int, hidden: int, inner: int, itemsize: int
) -> int:
    """What the CUDA kernels work in: MoeWorkspaceWords of ffi/cuda/moe_experts/args.h.

    Of as many tokens as one turn takes: the plan, the gated products in x's dtype, and each pair's
    result in f32.
    """
    turn_pairs, least_tile = 16384, 8
    pairs = max(1, min(tokens, turn_pairs // k)) * k
    plan = 4 + 4 * (min(pairs, num_experts) + pairs // least_tile) + -(-pairs // 4) * 4
    return plan + pairs * inner * itemsize // 4 + pairs * hidden


def _block_size(num_pairs: int, num_experts: int) -> int:
    """Pairs per block: 1 while experts hardly repeat, else near the mean per expert."""
    size = 1
    while size < _LARGEST_BLOCK and size * num_experts < num_pairs:
        size *= 2
    return size


def _gated_mlp(x, gate_up, down, options, activation):
    gate_up_scale, down_scale, gate_up_bias, down_bias, limit = options

    def project(x, weight, scale, bias, parts=1):
        out = contract(jnp.float32, x, weight, scale, parts)
        return out if bias is None else out + bias.astype(jnp.float32)[None, :]

    gate, up = jnp.split(project(x, gate_up, gate_up_scale, gate_up_bias, parts=2), 2, axis=-1)
    h = gated_product(gate, up, activation, limit)
    return project(h.astype(x.dtype), down, down_scale, down_bias)


def _reference(
    x, gate_up, down, experts, weights, *options: Any, activation: Activation = "silu",
    block_size: int | None = None, out_dtype: DTypeLike | None = None,
):  # fmt: skip
    """A loop over blocks of at most block_size pairs (token, expert) of one expert.

    The pairs are sorted by expert; each block slices its expert's weights and runs its MLP. There
    are as many steps as there can be blocks, so that the loop has a gradient; those that have no
    block read no expert. The options are those of `_OPTIONS`; one that is not given is [0].
    """
    tokens, hidden = x.shape
    num_experts, k = gate_up.shape[0], experts.shape[1]
    *by_expert, limit = options
    num_pairs = tokens * k
    size = _block_size(num_pairs, num_experts) if block_size is None else block_size
    is_expert = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(is_expert, experts, jnp.int32(num_experts))  # sorts last
    flat = experts.reshape(num_pairs)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    expert_ids = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == expert_ids[None, :], axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    blocks = (counts + (size - 1)) // size
    last_blocks = jnp.cumsum(blocks, dtype=jnp.int32)
    first_blocks = last_blocks - blocks
    sorted_tokens = jnp.pad(order // k, (0, size))
    # 0, which in shard_map varies over the mesh axes that any of the operands varies over
    operands = (x, gate_up, down, experts, weights, *options)
    nothing = sum(jnp.sum(a.ravel()[:0], dtype=jnp.float32) for a in operands)

    def run_block(block):
        expert = jnp.sum(last_blocks <= block, dtype=jnp.int32)
        begin = starts[expert] + (block - first_blocks[expert]) * size
        rows = x[jax.lax.dynamic_slice(sorted_tokens, (begin,), (size,))]
        own = (option[expert] if option.ndim > 1 else None for option in by_expert)
        return _gated_mlp(rows, gate_up[expert], down[expert], (*own, limit), activation)

    @jax.checkpoint  # else a gradient keeps each block's copy of its expert
    def step(block):
        none = jnp.broadcast_to(nothing, (size, hidden))
        return jax.lax.cond(block < last_blocks[-1], run_block, lambda _: none, block)

    most_blocks = (num_pairs + (size - 1) * min(num_pairs, num_experts)) // size
    block_out = jax.lax.map(step, jnp.arange(most_blocks, dtype=jnp.int32))
    rank = jnp.zeros(num_pairs, jnp.int32).at[order].set(jnp.arange(num_pairs, dtype=jnp.int32))
    own = jnp.minimum(flat, jnp.int32(num_experts - 1))
    row = first_blocks[own] * size + rank - starts[own]  # a short block ends with rows of no pair
    out = block_out.reshape(-1, hidden)[row].reshape(tokens, k, hidden)
    out = jnp.where(is_expert[:, :, None], out * weights[:, :, None], jnp.float32(0)).sum(axis=1)
    return out.astype(x.dtype if out_dtype is None else out_dtype)
