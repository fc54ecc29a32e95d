# SPDX-License-Identifier: Apache-2.0
"""Argument checks: `check_*` raise at trace time, `check_values` reads values on the host.

A wrong call is a ValueError; a right call that the native kernels cannot serve is a
NotImplementedError that says what can. Each message is one line: argument, expected, got.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.layout import (
    LAYOUTS,
    Layout,
    PagesShape,
    check_axes,
    check_pools,
    is_stacked,
    pages_shape,
    pool_of_v,
)

Implementation = Literal["native", "reference"] | None
RopeStyle = Literal["half", "interleaved"]
ROPE_STYLES: tuple[str, ...] = get_args(RopeStyle)

FLOAT_DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
EIGHT_BIT_DTYPES = tuple(map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2", "int8")))
WEIGHT_DTYPES = (jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))  # of weights with a scale
SCALE_BLOCK = 128  # outputs, and as much of the depth, that share a scale where blocks have one
OUT_DTYPES = EIGHT_BIT_DTYPES[:2]  # of an fp8 output
MAX_HEAD_DIM = 512
INT32_MAX = 2**31 - 1
STAND_INS: dict[Any, Callable[..., Any]] = {}  # by name: `register_stand_in` (native/call.py)


def expect(ok: bool, name: str, expected: str, got: Any) -> None:
    """Raises ValueError(f"{name}: expected {expected}, got {got}") unless ok."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def check_size(name: str, value: Any) -> int:
    """`value` as an int if it is an integer of at least 1, else a ValueError that names it."""
    ok = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
    expect(bool(ok), name, "an integer of at least 1", repr(value))
    return int(value)


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
    raise ValueError(f"{name}: expected shape [{expected}], got {shape_text(x.shape)}{hint}")


def check_live(live: jax.Array, num_tokens: int) -> None:
    """Checks a mask of the tokens that count."""
    check_shape("live", live, "tokens", (num_tokens,))
    expect(live.dtype == jnp.bool_, "live", "dtype bool", live.dtype.name)


def check_float(name: str, x: jax.Array, dtype: jnp.dtype | None = None) -> None:
    """Checks for bf16, f16 or f32, or for one dtype."""
    check_array(name, x)
    allowed = FLOAT_DTYPES if dtype is None else (dtype,)
    expect(x.dtype in allowed, name, "dtype " + " or ".join(d.name for d in allowed), x.dtype.name)


def check_weight(
    name: str,
    weight: Any,  # an array, or a packed one
    scale: jax.Array | None,
    dtype: jnp.dtype,
    axes: str,
    sizes: tuple[int | None, ...],
    *,
    parts: int = 1,
) -> None:
    """Checks a weight of x's dtype without a scale, or an 8-bit one with one per output or block.

    The outputs are those of several parts, each of which begins with a block.
    """
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
        if scale.ndim == weight.ndim:
            *leading, rows, depth = weight.shape
            blocks = (parts * scale_blocks(rows // parts), scale_blocks(depth))
            *names, last, depth_name = axes.split()
            names += [f"blocks_of_{last}", f"blocks_of_{depth_name}"]
            check_shape(f"{name}_scale", scale, " ".join(names), (*leading, *blocks))
        else:
            check_shape(f"{name}_scale", scale, outputs, weight.shape[:-1])
    elif scale is not None:
        text = f"None beside a {weight.dtype.name} {name}"
        expect(False, f"{name}_scale", text, f"{scale.dtype.name}{list(scale.shape)}")


def scale_blocks(size: int) -> int:
    """The blocks of SCALE_BLOCK in a size, of which the last may be short."""
    return -(-size // SCALE_BLOCK)


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
    got = pages.dtype.name
    if got == "uint8":  # vLLM stores fp8 so
        got += f", which {name}.view('float8_e4m3fn') makes fp8 pages of: once, XLA copies them"
    expect(ok, name, f"dtype {expected}", got)


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
        "shape " + " or ".join(map(shape_text, allowed)),
        shape_text(scale.shape),
    )
    return scale


def is_per_token(scale: jax.Array | None) -> bool:
    """Whether a scale has one value for each token and head: [..., pages, heads, slots]."""
    return scale is not None and scale.ndim >= 3


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
    if info.max > INT32_MAX:
        x = xp.minimum(x, xp.asarray(INT32_MAX, x.dtype))
    if info.min < -INT32_MAX - 1:
        x = xp.maximum(x, xp.asarray(-INT32_MAX - 1, x.dtype))
    return x.astype(np.int32)


def as_pairs(**indices: Any) -> tuple[jax.Array, ...]:
    """Checks two arguments of integers [n], of one length; returns them as i32."""
    (one, first), (other, second) = ((name, as_index(name, x)) for name, x in indices.items())
    check_shape(one, first, "n", (None,))
    check_shape(other, second, "n", first.shape)
    return first, second


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


def check_implementation(value: Any) -> None:
    """Checks for None, "native", "reference" or the name of a registered stand-in."""
    if value not in tuple(STAND_INS):
        check_choice("implementation", value, (None, "native", "reference"))


def check_pages(
    k_pages: jax.Array, v_pages: jax.Array | None, layout: Layout, layer: Any
) -> tuple[PagesShape, PagesShape]:
    """Checks a K and a V pool, or one of both, against each other; returns their named shapes."""
    check_choice("layout", layout, LAYOUTS)
    check_pools(k_pages, v_pages, layout)
    of_v = pool_of_v(k_pages, v_pages, layout)
    check_array("k_pages", k_pages)
    check_array("v_pages", of_v)
    k, v = (_ArrayType(tuple(x.shape), x.dtype) for x in (k_pages, of_v))
    return _checked_pages(k, v, layout, layer is not None)


class _ArrayType(NamedTuple):
    """What of an array is checked, hashable."""

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


@functools.lru_cache(1024)  # a third of the checks of an eager call
def _checked_pages(
    k_pages: Any, v_pages: Any, layout: Layout, has_layer: bool
) -> tuple[PagesShape, PagesShape]:
    check_axes("k_pages", k_pages, layout, "k")
    check_axes("v_pages", v_pages, layout, "v")
    check_kv_dtype("k_pages", k_pages)
    check_kv_dtype("v_pages", v_pages)
    expect(
        is_stacked(k_pages, layout, "k") == has_layer,
        "layer",
        "an i32 scalar for stacked pages, None for pages without a layer axis",
        f"{'a value' if has_layer else 'None'} for k_pages of rank {len(k_pages.shape)}",
    )
    k_shape, v_shape = pages_shape(k_pages, layout, "k"), pages_shape(v_pages, layout, "v")
    sizes = "shape" if layout != "vllm5d" else "sizes"
    expect(
        k_shape._replace(head_dim=0) == v_shape._replace(head_dim=0),
        "v_pages",
        f"the {sizes} of k_pages {shape_text(k_pages.shape)}, head_dim aside",
        shape_text(v_pages.shape),
    )
    expect(
        v_pages.dtype == k_pages.dtype, "v_pages", f"dtype {k_pages.dtype.name}", v_pages.dtype.name
    )
    expect(k_shape.page_size >= 1, "k_pages", "page_size >= 1", k_shape.page_size)
    return k_shape, v_shape


def other_layout(k_pages: jax.Array, layout: Layout, fits: Callable[[int], bool]) -> str:
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

    >>> import numpy as np
    >>> check_values(np.array([[0, -1]]), np.array([9]), num_pages=4, page_size=8)
    Traceback (most recent call last):
    ValueError: page_table[0, 1]: expected a page id in [0, 4), got -1
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
