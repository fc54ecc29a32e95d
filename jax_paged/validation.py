"""Argument checks: `check_*` raise at trace time, `check_values` reads values on the host.

A wrong call is a ValueError; a right call that the native kernels cannot serve is a
NotImplementedError that says what can. Each message is one line: argument, expected, got.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged._ffi import Implementation
from jax_paged.layout import LAYOUTS, Layout, PagesShape, check_axes, is_stacked, pages_shape
from jax_paged.rope import ROPE_STYLES, Rope, RopeStyle

FLOAT_DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
EIGHT_BIT_DTYPES = tuple(map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2", "int8")))
WEIGHT_DTYPES = (jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))  # of weights with a scale
OUT_DTYPES = EIGHT_BIT_DTYPES[:2]  # of an fp8 output
MAX_HEAD_DIM = 512
_I32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static part of an attention call."""

    layout: Layout
    causal: bool
    num_kv_splits: int | None
    split_tokens: int | None
    soft_cap: float | None
    one_query_per_row: bool
    implementation: Implementation
    out_dtype: jnp.dtype | None = None
    rope_style: RopeStyle | None = None  # None: no rope inside attention


class AttentionOperands(NamedTuple):
    """The arrays of an attention call in the order of the FFI target; None: not given."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    layer: jax.Array
    sm_scale: jax.Array
    sliding_window: jax.Array | None = None  # a scalar or [num_seqs]
    num_pinned: jax.Array | None = None  # [num_seqs], given together with slot_offset
    slot_offset: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    tree: jax.Array | None = None
    tree_sizes: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    out_scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class QkvSpec:
    """The static part of a qkv_norm_rope_write call."""

    num_q_heads: int
    eps: float
    style: RopeStyle
    layout: Layout
    implementation: Implementation


def expect(ok: bool, name: str, expected: str, got: Any) -> None:
    """Raises ValueError(f"{name}: expected {expected}, got {got}") unless ok."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def check_array(name: str, x: Any) -> None:
    """Checks that x is an array, and not None or a list."""
    expect(hasattr(x, "shape") and hasattr(x, "dtype"), name, "an array", kind_text(x))


def kind_text(x: Any) -> str:
    """What x is, for a message."""
    return "None" if x is None else f"a {type(x).__name__}"


def check_shape(
    name: str, x: jax.Array, axes: str, sizes: tuple[int | None, ...], *, hint: str = ""
) -> None:
    """Checks rank and sizes; `axes` names them in the message, None in `sizes` is any size."""
    check_array(name, x)
    ok = len(x.shape) == len(sizes) and all(
        want is None or have == want for have, want in zip(x.shape, sizes, strict=True)
    )
    if ok:
        return
    names = axes.split()
    expected = ", ".join(
        n if s is None or n == str(s) else f"{n}={s}" for n, s in zip(names, sizes, strict=True)
    )
    raise ValueError(f"{name}: expected shape [{expected}], got {_shape_text(x.shape)}{hint}")


def check_float(name: str, x: jax.Array, dtype: jnp.dtype | None = None) -> None:
    """Checks for bf16, f16 or f32, or for one dtype."""
    check_array(name, x)
    allowed = FLOAT_DTYPES if dtype is None else (dtype,)
    expect(x.dtype in allowed, name, "dtype " + " or ".join(d.name for d in allowed), x.dtype.name)


def check_weight(
    name: str,
    weight: jax.Array,
    scale: jax.Array | None,
    dtype: jnp.dtype,
    axes: str,
    sizes: tuple[int | None, ...],
) -> None:
    """Checks a weight of x's dtype without a scale, or an 8-bit one with one per output."""
    check_array(name, weight)
    allowed = (dtype, *WEIGHT_DTYPES)
    expected = "dtype " + " or ".join(d.name for d in allowed)
    expect(weight.dtype in allowed, name, expected, weight.dtype.name)
    check_shape(name, weight, axes, sizes)
    outputs = axes.rpartition(" ")[0]
    if weight.dtype in WEIGHT_DTYPES:
        text = f"f32[{', '.join(outputs.split())}] beside the 8-bit {name}"
        expect(scale is not None, f"{name}_scale", text, None)
        assert scale is not None
        check_float(f"{name}_scale", scale, jnp.dtype(jnp.float32))
        check_shape(f"{name}_scale", scale, outputs, weight.shape[:-1])
    elif scale is not None:
        text = f"None beside a {weight.dtype.name} {name}"
        expect(False, f"{name}_scale", text, f"{scale.dtype.name}{list(scale.shape)}")


def is_eight_bit(pages: jax.Array) -> bool:
    """Whether pages hold 8-bit values, which may have scales."""
    return pages.dtype in EIGHT_BIT_DTYPES


def check_kv_dtype(name: str, pages: jax.Array, q_dtype: jnp.dtype | None = None) -> None:
    """Checks pages for a float dtype, that of q where it is known, or an 8-bit one."""
    allowed, expected = (q_dtype,), f"{q_dtype} or 8-bit"
    if q_dtype is None:
        allowed = FLOAT_DTYPES
        expected = " or ".join(d.name for d in FLOAT_DTYPES + EIGHT_BIT_DTYPES)
    ok = pages.dtype in allowed or is_eight_bit(pages)
    expect(ok, name, f"dtype {expected}", pages.dtype.name)


def as_scale_of(pages: jax.Array, name: str, scale: Any) -> jax.Array:
    """A scale of 8-bit pages as an f32 array, its shape unchecked."""
    expect(is_eight_bit(pages), name, f"None for pages of {pages.dtype.name}", "a scale")
    if not hasattr(scale, "dtype"):
        scale = np.asarray(scale, np.float32)
    check_float(name, scale)
    return scale if scale.dtype == np.float32 else scale.astype(np.float32)


def check_kv_scale(name: str, scale: Any, pages: jax.Array, shape: PagesShape) -> Any:
    """Checks a scale of 8-bit pages; returns it as f32, or None."""
    if scale is None:
        return None
    scale = as_scale_of(pages, name, scale)
    layers = () if shape.num_layers is None else (shape.num_layers,)
    per_token = (*layers, shape.num_pages, shape.num_kv_heads, shape.page_size)
    allowed = list(dict.fromkeys(((), layers, (*layers, shape.num_kv_heads), per_token)))
    expect(
        scale.shape in allowed,
        name,
        "shape " + " or ".join(map(_shape_text, allowed)),
        _shape_text(scale.shape),
    )
    return scale


def is_per_token(scale: jax.Array | None, pages: jax.Array) -> bool:
    """Whether a scale has one value for each token and head."""
    return scale is not None and scale.ndim == len(pages.shape) - 1


def as_index(name: str, x: Any) -> jax.Array:
    """Any integer array as i32. Values beyond i32 saturate, so that no cast makes a valid index.

    What the host holds stays on the host (numpy): it travels with the jitted call, where an
    operation of its own would cost more than a small decode step.
    """
    if not isinstance(x, jax.Array):
        x = np.asarray(x)  # jnp.asarray would wrap 64-bit values unless x64 is on
        if not x.size and x.dtype == np.float64:  # an empty list
            x = x.astype(np.int32)
    expect(jnp.issubdtype(x.dtype, jnp.integer), name, "an integer dtype", f"dtype {x.dtype.name}")
    if x.dtype == np.int32:
        return x
    xp = jnp if isinstance(x, jax.Array) else np
    info = jnp.iinfo(x.dtype)
    if info.max > _I32_MAX:
        x = xp.minimum(x, xp.asarray(_I32_MAX, x.dtype))
    if info.min < -_I32_MAX - 1:
        x = xp.maximum(x, xp.asarray(-_I32_MAX - 1, x.dtype))
    return x.astype(np.int32)


def check_layer(layer: Any, num_layers: int | None) -> jax.Array:
    """Checks the layer of stacked pages; returns it as i32, 0 for pages without a layer axis.

    One that the host knows must be there. What is traced or lies on the device is not looked at:
    out of range, the op writes nothing and reads nothing.
    """
    index = as_index("layer", 0 if layer is None else layer)
    check_shape("layer", index, "", ())
    if layer is not None and not isinstance(index, jax.Array):
        got = int(index)
        expect(0 <= got < (num_layers or 0), "layer", f"a layer in [0, {num_layers})", got)
    return index


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Checks that value is one of choices."""
    expect(value in choices, name, " or ".join(map(repr, choices)), repr(value))


def check_pages(
    k_pages: jax.Array, v_pages: jax.Array, layout: Layout, layer: Any
) -> tuple[PagesShape, PagesShape]:
    """Checks a K and a V pool against each other; returns their named shapes."""
    check_array("k_pages", k_pages)
    check_array("v_pages", v_pages)
    check_choice("layout", layout, LAYOUTS)
    check_axes("k_pages", k_pages, layout, "k")
    check_axes("v_pages", v_pages, layout, "v")
    check_kv_dtype("k_pages", k_pages)
    check_kv_dtype("v_pages", v_pages)
    if layout == "vllm5d" and k_pages.dtype in EIGHT_BIT_DTYPES:
        raise NotImplementedError(
            f"layout: expected 'HND' or 'NHD' for pages of {k_pages.dtype.name}, got 'vllm5d'"
        )
    expect(
        is_stacked(k_pages, layout, "k") == (layer is not None),
        "layer",
        "an i32 scalar for stacked pages, None for pages without a layer axis",
        f"{'None' if layer is None else 'a value'} for k_pages of rank {len(k_pages.shape)}",
    )
    k_shape, v_shape = pages_shape(k_pages, layout, "k"), pages_shape(v_pages, layout, "v")
    sizes = "shape" if layout != "vllm5d" else "sizes"
    expect(
        k_shape._replace(head_dim=0) == v_shape._replace(head_dim=0),
        "v_pages",
        f"the {sizes} of k_pages {_shape_text(k_pages.shape)}, head_dim aside",
        _shape_text(v_pages.shape),
    )
    expect(
        v_pages.dtype == k_pages.dtype, "v_pages", f"dtype {k_pages.dtype.name}", v_pages.dtype.name
    )
    expect(k_shape.page_size >= 1, "k_pages", "page_size >= 1", k_shape.page_size)
    return k_shape, v_shape


def _other_layout(k_pages: jax.Array, layout: Layout, fits: Callable[[int], bool]) -> str:
    """What to add to a message about KV heads: that the pages would fit as "NHD", or as "HND"."""
    other: Layout = "HND" if layout == "NHD" else "NHD"
    if layout == "vllm5d" or not fits(pages_shape(k_pages, other).num_kv_heads):
        return ""
    return f"; with layout={other!r} it would fit, got layout={layout!r}"


def check_native(name: str, head_dim: int, implementation: Implementation) -> None:
    """Raises unless the native kernels take this head_dim, or the reference is asked for."""
    if implementation != "reference" and (head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM):
        raise NotImplementedError(
            f"{name}: native kernels take a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, "
            f"got {head_dim}; implementation='reference' takes any"
        )


def check_write(
    k_pages, v_pages, k, v, slot_mapping, layer, k_scale, v_scale, layout, implementation
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Checks a page write; returns slot_mapping and layer as i32, the scales as f32 or None."""
    check_choice("implementation", implementation, (None, "native", "reference"))
    k_shape, v_shape = check_pages(k_pages, v_pages, layout, layer)
    slot_mapping = as_index("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping, "tokens", (None,))
    for name, x, shape in (("k", k, k_shape), ("v", v, v_shape)):
        check_float(name, x)
        sizes = (slot_mapping.shape[0], shape.num_kv_heads, shape.head_dim)
        other = _other_layout(k_pages, layout, lambda heads, x=x: x.shape[1:2] == (heads,))
        check_shape(name, x, "tokens num_kv_heads head_dim", sizes, hint=other)
    layer = check_layer(layer, k_shape.num_layers)
    scales = _check_written_scales(k_scale, v_scale, k_pages, v_pages, k_shape, v_shape)
    return slot_mapping, layer, *scales


def _check_written_scales(
    k_scale, v_scale, k_pages, v_pages, k_shape, v_shape
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks the scales of a page write; returns them as f32, or None."""
    k_scale = check_kv_scale("k_scale", k_scale, k_pages, k_shape)
    v_scale = check_kv_scale("v_scale", v_scale, v_pages, v_shape)
    expect(
        is_per_token(k_scale, k_pages) == is_per_token(v_scale, v_pages),
        "v_scale",
        "a scale per token where k_scale is one, and only there",
        "None" if v_scale is None else f"shape {_shape_text(v_scale.shape)}",
    )
    return k_scale, v_scale


def check_qkv(
    qkv, k_pages, v_pages, positions, slot_mapping, cos, sin, q_norm, k_norm, rotary_dim, layer,
    k_scale, v_scale, spec,
) -> tuple[Any, ...]:  # fmt: skip
    """Checks a qkv_norm_rope_write call.

    Returns positions, slot_mapping and layer as i32, and the scales as f32 or None.
    """
    check_choice("implementation", spec.implementation, (None, "native", "reference"))
    check_choice("style", spec.style, ROPE_STYLES)
    k_shape, v_shape = check_pages(k_pages, v_pages, spec.layout, layer)
    head_dim = k_shape.head_dim
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    for name, value in (("num_q_heads", spec.num_q_heads), ("rotary_dim", rotary_dim)):
        whole = isinstance(value, int) and value is not True
        expect(whole and value >= 1, name, "an int >= 1", value)
    expect(
        rotary_dim % 2 == 0 and rotary_dim <= head_dim,
        "rotary_dim",
        f"an even number up to head_dim={head_dim}",
        rotary_dim,
    )
    known = isinstance(spec.eps, (int, float)) and math.isfinite(spec.eps)
    expect(known and spec.eps >= 0, "eps", "a finite number >= 0", spec.eps)
    check_float("qkv", qkv)
    width = (spec.num_q_heads + k_shape.num_kv_heads) * head_dim
    width += v_shape.num_kv_heads * v_shape.head_dim
    check_shape(
        "qkv", qkv, "tokens (num_q_heads+num_kv_heads)·head_dim+num_kv_heads·v_head_dim",
        (None, width),
    )  # fmt: skip
    if not is_eight_bit(k_pages):
        check_float("k_pages", k_pages, qkv.dtype)
    positions = as_index("positions", positions)
    slot_mapping = as_index("slot_mapping", slot_mapping)
    for name, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_shape(name, x, "tokens", (qkv.shape[0],))
    for name, x in (("cos", cos), ("sin", sin)):
        check_float(name, x, jnp.dtype("float32"))
        check_shape(name, x, "max_positions rotary_dim/2", (None, rotary_dim // 2))
    check_shape("sin", sin, "max_positions rotary_dim/2", cos.shape)
    expect(cos.shape[0] >= 1, "cos", "max_positions >= 1", 0)
    for name, x in (("q_norm", q_norm), ("k_norm", k_norm)):
        if x is not None:
            check_float(name, x)
            check_shape(name, x, "head_dim", (head_dim,))
    for name, shape in (("k_pages", k_shape), ("v_pages", v_shape)):
        check_native(name, shape.head_dim, spec.implementation)
    if spec.implementation != "reference" and spec.style == "half" and rotary_dim % 4:
        raise NotImplementedError(
            "rotary_dim: native kernels take a multiple of 4 with style='half', "
            f"got {rotary_dim}; implementation='reference' takes any even number"
        )
    if spec.implementation != "reference" and spec.layout == "vllm5d":
        raise NotImplementedError(
            "layout: native kernels take 'HND' or 'NHD', got 'vllm5d'; write_kv takes it, and "
            "implementation='reference'"
        )
    layer = check_layer(layer, k_shape.num_layers)
    scales = _check_written_scales(k_scale, v_scale, k_pages, v_pages, k_shape, v_shape)
    return positions, slot_mapping, layer, *scales


def check_attention(
    q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, num_seqs, spec, *, layer, sm_scale,
    sliding_window, num_pinned, slot_offset, alibi_slopes, sinks, k_scale, v_scale, out_scale,
    rope, tree=None, tree_sizes=None,
) -> AttentionOperands:  # fmt: skip
    """Checks an attention call at trace time. cu_q_lens None means one query per row."""
    check_choice("implementation", spec.implementation, (None, "native", "reference"))
    k_shape, v_shape = check_pages(k_pages, v_pages, spec.layout, layer)
    page_table, seq_lens = as_index("page_table", page_table), as_index("seq_lens", seq_lens)
    check_shape("seq_lens", seq_lens, "num_seqs", (None,))
    rows = seq_lens.shape[0]
    check_shape("page_table", page_table, "num_seqs pages_per_seq", (rows, None))
    tokens = rows if cu_q_lens is None else None
    check_float("q", q)
    check_shape(
        "q", q, f"{'num_seqs' if tokens is not None else 'tokens'} num_q_heads head_dim",
        (tokens, None, k_shape.head_dim),
    )  # fmt: skip
    check_kv_dtype("k_pages", k_pages, q.dtype)
    num_q_heads = q.shape[1]
    expect(
        0 < k_shape.num_kv_heads <= num_q_heads and num_q_heads % k_shape.num_kv_heads == 0,
        "q",
        f"num_q_heads to be a multiple of num_kv_heads={k_shape.num_kv_heads}",
        f"{num_q_heads}"
        + _other_layout(
            k_pages, spec.layout, lambda n: n > 0 and num_q_heads > 0 and num_q_heads % n == 0
        ),
    )
    for name, shape in (("k_pages", k_shape), ("v_pages", v_shape)):
        check_native(name, shape.head_dim, spec.implementation)
    if cu_q_lens is None:
        cu_q_lens = np.arange(rows + 1, dtype=np.int32)
    cu_q_lens = as_index("cu_q_lens", cu_q_lens)
    check_shape("cu_q_lens", cu_q_lens, "num_seqs+1", (rows + 1,))
    num_seqs = as_index("num_seqs", rows if num_seqs is None else num_seqs)
    expect(num_seqs.size == 1 and num_seqs.ndim <= 1, "num_seqs", "a scalar or [1]", num_seqs.shape)
    num_seqs = num_seqs if num_seqs.ndim else num_seqs.reshape(1)
    layer = check_layer(layer, k_shape.num_layers)
    for name, value in (("num_kv_splits", spec.num_kv_splits), ("split_tokens", spec.split_tokens)):
        ok = value is None or (isinstance(value, int) and value is not True and value >= 1)
        expect(ok, name, "None or an int >= 1", value)
    expect(
        spec.num_kv_splits is None or spec.split_tokens is None,
        "split_tokens",
        "None when num_kv_splits is given",
        spec.split_tokens,
    )
    sm_scale = check_scale("sm_scale", k_shape.head_dim**-0.5 if sm_scale is None else sm_scale)
    soft_cap = spec.soft_cap
    ok = isinstance(soft_cap, (int, float, np.floating)) and soft_cap is not True
    ok = ok and 0 < float(soft_cap) < math.inf
    expect(soft_cap is None or ok, "soft_cap", "None or a finite number > 0", soft_cap)
    sliding_window, num_pinned, slot_offset = check_windows(
        sliding_window, num_pinned, slot_offset, rows
    )
    alibi_slopes = _check_per_head("alibi_slopes", alibi_slopes, num_q_heads)
    sinks = _check_per_head("sinks", sinks, num_q_heads)
    if out_scale is not None:
        expect(spec.out_dtype is not None, "out_scale", "None without an out_dtype", "a scale")
        out_scale = check_scale("out_scale", out_scale)
    tree, tree_sizes = _check_tree(tree, tree_sizes, rows, spec)
    cos, sin, _ = (None, None, None) if rope is None else rope
    return AttentionOperands(
        q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, num_seqs, layer, sm_scale,
        sliding_window, num_pinned, slot_offset, alibi_slopes, sinks,
        check_kv_scale("k_scale", k_scale, k_pages, k_shape),
        check_kv_scale("v_scale", v_scale, v_pages, v_shape),
        tree, tree_sizes, cos, sin, out_scale,
    )  # fmt: skip


def check_windows(
    sliding_window: Any, num_pinned: Any, slot_offset: Any, rows: int
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """The window as an i32 scalar or [rows], num_pinned and slot_offset as [rows], or None."""
    if sliding_window is not None:
        sliding_window = as_index("sliding_window", sliding_window)
        if sliding_window.ndim:
            check_shape("sliding_window", sliding_window, "num_seqs", (rows,))
        elif not isinstance(sliding_window, jax.Array) and sliding_window <= 0:
            sliding_window = None
    if num_pinned is None and slot_offset is None:
        return sliding_window, None, None
    given = []
    for name, x in (("num_pinned", num_pinned), ("slot_offset", slot_offset)):
        x = as_index(name, 0 if x is None else x)
        if x.ndim:
            check_shape(name, x, "num_seqs", (rows,))
        else:
            x = (jnp if isinstance(x, jax.Array) else np).broadcast_to(x, (rows,))
        given.append(x)
    return sliding_window, *given


def as_rope(rope: Any, k_pages: jax.Array, layout: Layout) -> Rope | None:
    """Checks the tables of a rope inside attention."""
    if rope is None:
        return None
    check_array("k_pages", k_pages)
    expect(
        isinstance(rope, tuple) and 2 <= len(rope) <= 3, "rope", "(cos, sin) or (cos, sin, style)",
        f"a {type(rope).__name__}",
    )  # fmt: skip
    rope = Rope(*rope)
    check_choice("rope style", rope.style, ROPE_STYLES)
    head_dim = pages_shape(k_pages, layout).head_dim
    for name, x in (("rope cos", rope.cos), ("rope sin", rope.sin)):
        check_float(name, x, jnp.dtype("float32"))
        check_shape(name, x, "max_positions rotary_dim/2", (None, None))
    check_shape("rope sin", rope.sin, "max_positions rotary_dim/2", rope.cos.shape)
    positions, half = rope.cos.shape
    expect(
        positions >= 1 and 2 <= 2 * half <= head_dim, "rope cos",
        f"max_positions >= 1 and rotary_dim between 2 and head_dim={head_dim}",
        _shape_text(rope.cos.shape),
    )  # fmt: skip
    return rope


def _check_tree(
    tree: Any, tree_sizes: Any, rows: int, spec: AttentionSpec
) -> tuple[jax.Array | None, jax.Array | None]:
    """The intervals of the rows' trees and their sizes, as i32, or twice None."""
    expect((tree is None) == (tree_sizes is None), "tree_sizes", "an array where tree is one, and "
           "only there", "None" if tree_sizes is None else "an array")  # fmt: skip
    if tree is None:
        return None, None
    expect(spec.causal, "tree", "None with causal=False", "an array")
    tree, tree_sizes = as_index("tree", tree), as_index("tree_sizes", tree_sizes)
    check_shape("tree", tree, "num_seqs max_tree 2", (rows, None, 2))
    expect(tree.shape[1] >= 1, "tree", "max_tree >= 1", 0)
    check_shape("tree_sizes", tree_sizes, "num_seqs", (rows,))
    return tree, tree_sizes


def as_out_dtype(dtype: Any) -> jnp.dtype | None:
    """The dtype of an attention output that is not q's: an fp8 one, or None."""
    if dtype is None:
        return None
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = dtype
    check_choice("out_dtype", known, (None, *OUT_DTYPES))
    return known


def _check_per_head(name: str, x: jax.Array | None, num_q_heads: int) -> jax.Array | None:
    """One number for each query head, as f32."""
    if x is None:
        return None
    check_float(name, x)
    check_shape(name, x, "num_q_heads", (num_q_heads,))
    return x if x.dtype == np.float32 else x.astype(np.float32)


def check_scale(name: str, value: Any) -> jax.Array:
    """A scalar scale as f32; a value known now must be finite and not negative."""
    if isinstance(value, (int, float, np.generic)):
        known = float(value)
        expect(math.isfinite(known) and known >= 0, name, "a finite scale >= 0", known)
    if not isinstance(value, jax.Array):
        value = np.asarray(value, np.float32)
    check_shape(name, value, "", ())
    return value if value.dtype == np.float32 else value.astype(jnp.float32)


def check_values(
    page_table, seq_lens, cu_q_lens=None, *, num_pages: int | None = None,
    page_size: int | None = None, num_tokens: int | None = None, num_seqs: int | None = None,
    state: Any = None, layout: Layout = "HND", k_scale: Any = None, v_scale: Any = None,
    slot_offset: Any = None,
) -> None:  # fmt: skip
    """Checks the values of a batch on the host (it waits for the device); for debugging and tests.

    The ops never read out of bounds whatever the values are: bad ids are skipped, bad lengths
    clamped. This function is for finding out why a result is not what was expected.

    Args:
      page_table: i32[num_seqs, pages_per_seq].
      seq_lens: i32[num_seqs], KV length including this step's tokens.
      cu_q_lens: i32[num_seqs + 1] or None for one query per row.
      num_pages, page_size: of the pool; not needed with a state.
      num_tokens: length of the flat batch; None = cu_q_lens may end anywhere.
      num_seqs: live rows; None = all.
      state: the `KVState` whose pages the call reads or writes. The options below, as they are
        given to the op, are then compared with it. The ops cannot do that: they see pages alone.
      layout, k_scale, v_scale, slot_offset: of the call.
    Raises:
      ValueError: naming the argument, the row, what was expected and what was found.
    """
    if state is not None:
        _check_told(state, layout, {"k_scale": k_scale, "v_scale": v_scale}, slot_offset)
        num_pages, page_size = state.table.num_pages, state.table.page_size
    for name, size in (("num_pages", num_pages), ("page_size", page_size)):
        expect(size is not None, name, "a number where no state is given", None)
    assert num_pages is not None
    assert page_size is not None
    page_table, seq_lens = np.asarray(page_table), np.asarray(seq_lens)
    if slot_offset is not None:  # what is stored
        seq_lens = seq_lens - np.asarray(slot_offset)
    live = seq_lens.shape[0] if num_seqs is None else num_seqs
    expect(0 <= live <= seq_lens.shape[0], "num_seqs", f"a value in [0, {seq_lens.shape[0]}]", live)
    capacity = page_table.shape[1] * page_size
    for row in range(live):
        length = int(seq_lens[row])
        expect(0 <= length <= capacity, f"seq_lens[{row}]", f"a length in [0, {capacity}]", length)
        used = page_table[row, : -(-length // page_size)]
        bad = np.flatnonzero((used < 0) | (used >= num_pages))
        if bad.size:
            expect(
                False,
                f"page_table[{row}, {bad[0]}]",
                f"a page id in [0, {num_pages})",
                int(used[bad[0]]),
            )
    if cu_q_lens is None:
        return
    cu_q_lens = np.asarray(cu_q_lens)
    expect(cu_q_lens[0] == 0, "cu_q_lens[0]", "0", int(cu_q_lens[0]))
    for row in range(live):
        q_len = int(cu_q_lens[row + 1]) - int(cu_q_lens[row])
        expect(
            0 <= q_len <= int(seq_lens[row]),
            f"cu_q_lens[{row + 1}]",
            f"a q_len in [0, seq_lens[{row}]={int(seq_lens[row])}]",
            q_len,
        )
    if num_tokens is not None:
        end = int(cu_q_lens[live])
        expect(end == num_tokens, f"cu_q_lens[{live}]", f"the number of tokens {num_tokens}", end)


def _check_told(state: Any, layout: str, scales: dict[str, Any], slot_offset: Any) -> None:
    """Checks that a call is told what the pages of a state were written with."""
    expect(layout == state.layout, "layout", f"{state.layout!r} as in the state", repr(layout))
    for name, scale in scales.items():
        have = getattr(state, name)
        same = (have is None) == (scale is None)
        if same and have is not None:
            given = np.asarray(scale, np.float32)
            same = given.shape == have.shape and np.array_equal(given, have, equal_nan=True)
        expect(same, name, f"the state's {name}", "None" if scale is None else "another one")
    windows = state.table.windows
    slid = windows is not None and np.any(np.asarray(windows.slot_offset) != 0)
    text = "that of the batch, since rows slid"
    expect(not slid or slot_offset is not None, "slot_offset", text, None)
