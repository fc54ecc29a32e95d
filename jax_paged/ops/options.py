# SPDX-License-Identifier: Apache-2.0
"""The options of attention, each declared once.

An option is a keyword argument of `paged_attention` and its kin. From its declaration in `OPTIONS`
come its check, the operands and attributes that it adds to the FFI target, how they are split over
devices, what the reference is told, and its text in the docstrings. The kernels find it by its name
(ffi/common/attention_call.h).
"""

import contextlib
import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.checks import (
    OUT_DTYPES,
    ROPE_STYLES,
    as_index,
    check_choice,
    check_float,
    check_kv_scale,
    check_layer,
    check_scale,
    check_shape,
    expect,
    kind_text,
    shape_text,
)
from jax_paged.layout import PagesShape
from jax_paged.ops.plan import AttentionPlan
from jax_paged.ops.rope import Rope

Static = tuple[tuple[str, Any], ...]  # names and values of a call's static part: hashable
Arrays = dict[str, jax.Array]  # the operands of a call that are given, by name
Function = TypeVar("Function", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call while it is checked: what its options are checked against."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    k_shape: PagesShape
    v_shape: PagesShape
    rows: int
    given: Mapping[str, Any]  # all its arguments, as they came


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of attention.

    Where it is off (None) it adds nothing to the call; its check runs all the same where `always`
    is set. The check returns the value as the kernels take it. A `static` one becomes part of the
    program and an attribute of the FFI target; any other is an operand. Where one option becomes
    several of both, its check returns them in a dict by name, and `join` makes it of them again.
    """

    name: str
    doc: str
    check: Callable[[Any, Call], Any]
    static: bool = False
    always: bool = False
    join: Callable[..., Any] | None = None
    attribute: Callable[[Any], Any] | None = lambda value: value  # None: the target has none
    heads_axis: Callable[[jax.Array], int | None] = lambda array: None
    of_result: bool = True  # False: it says how the work is done, and the reference is not told


def _layer(value: Any, call: Call) -> Any:
    return check_layer(value, call.k_shape.num_layers)


def _sm_scale(value: Any, call: Call) -> Any:
    return check_scale("sm_scale", call.k_shape.head_dim**-0.5 if value is None else value)


def _sliding_window(value: Any, call: Call) -> Any:
    value = as_index("sliding_window", value)
    if value.ndim:
        check_shape("sliding_window", value, "num_seqs", (call.rows,))
    elif not isinstance(value, jax.Array) and value <= 0:
        return None
    return value


def _of_slid_rows(name: str) -> Callable[[Any, Call], Any]:
    def check(value: Any, call: Call) -> Any:
        pinned, offset = call.given.get("num_pinned"), call.given.get("slot_offset")
        if pinned is None and offset is None:
            return None
        return check_slid(pinned, offset, call.rows)[name]

    return check


def check_slid(num_pinned: Any, slot_offset: Any, rows: int) -> dict[str, jax.Array | None]:
    """num_pinned and slot_offset as i32[rows] where one of them is given, else both None."""
    given = {"num_pinned": num_pinned, "slot_offset": slot_offset}
    if num_pinned is None and slot_offset is None:
        return given
    for name, x in given.items():
        x = as_index(name, 0 if x is None else x)
        if x.ndim:
            check_shape(name, x, "num_seqs", (rows,))
        else:
            x = (jnp if isinstance(x, jax.Array) else np).broadcast_to(x, (rows,))
        given[name] = x
    return given


def _soft_cap(value: Any, call: Call) -> Any:
    ok = isinstance(value, (int, float, np.floating)) and value is not True
    expect(ok and 0 < float(value) < math.inf, "soft_cap", "None or a finite number > 0", value)
    return value


def _per_head(name: str) -> Callable[[Any, Call], Any]:
    def check(value: Any, call: Call) -> Any:
        check_float(name, value)
        check_shape(name, value, "num_q_heads", (call.q.shape[1],))
        return value if value.dtype == np.float32 else value.astype(np.float32)

    return check


def _k_scale(value: Any, call: Call) -> Any:
    return check_kv_scale("k_scale", value, call.k_pages, call.k_shape)


def _v_scale(value: Any, call: Call) -> Any:
    return check_kv_scale("v_scale", value, call.v_pages, call.v_shape)


def _scale_heads_axis(scale: jax.Array) -> int:
    """Of [num_kv_heads], or [..., num_pages, num_kv_heads, page_size]."""
    return max(scale.ndim - 2, 0)


def _tree(value: Any, call: Call) -> Any:
    expect(call.given.get("tree_sizes") is not None, "tree_sizes", "an array where tree is one, "
           "and only there", "None")  # fmt: skip
    expect(call.given.get("causal", True), "tree", "None with causal=False", "an array")
    value = as_index("tree", value)
    check_shape("tree", value, "num_seqs max_tree 2", (call.rows, None, 2))
    expect(value.shape[1] >= 1, "tree", "max_tree >= 1", 0)
    return value


def _tree_sizes(value: Any, call: Call) -> Any:
    expect(call.given.get("tree") is not None, "tree_sizes", "an array where tree is one, "
           "and only there", "an array")  # fmt: skip
    value = as_index("tree_sizes", value)
    check_shape("tree_sizes", value, "num_seqs", (call.rows,))
    return value


def check_out_dtype(value: Any, call: Call | None = None) -> Any:
    """An output dtype as a numpy dtype."""
    with contextlib.suppress(TypeError):  # the message names what is no dtype
        value = jnp.dtype(value)
    check_choice("out_dtype", value, (None, *OUT_DTYPES))
    return value


def _out_scale(value: Any, call: Call) -> Any:
    given = call.given.get("out_dtype") is not None
    expect(given, "out_scale", "None without an out_dtype", "a scale")
    return check_scale("out_scale", value)


def _rope(value: Any, call: Call) -> Any:
    expect(
        isinstance(value, tuple) and 2 <= len(value) <= 3, "rope",
        "(cos, sin) or (cos, sin, style)", f"a {type(value).__name__}",
    )  # fmt: skip
    cos, sin, style = Rope(*value)
    check_choice("rope style", style, ROPE_STYLES)
    for name, x in (("rope cos", cos), ("rope sin", sin)):
        check_float(name, x, jnp.dtype("float32"))
        check_shape(name, x, "max_positions rotary_dim/2", (None, None))
    check_shape("rope sin", sin, "max_positions rotary_dim/2", cos.shape)
    positions, half = cos.shape
    head_dim = call.k_shape.head_dim
    expect(
        positions >= 1 and 2 <= 2 * half <= head_dim, "rope cos",
        f"max_positions >= 1 and rotary_dim between 2 and head_dim={head_dim}",
        shape_text(cos.shape),
    )  # fmt: skip
    return {"cos": cos, "sin": sin, "rope_interleaved": style == "interleaved"}


def _join_rope(cos: jax.Array, sin: jax.Array, rope_interleaved: bool) -> Rope:
    return Rope(cos, sin, "interleaved" if rope_interleaved else "half")


def _split(name: str) -> Callable[[Any, Call], Any]:
    def check(value: Any, call: Call) -> Any:
        ok = isinstance(value, int) and value is not True and value >= 1
        expect(ok, name, "None or an int >= 1", value)
        alone = name != "split_tokens" or call.given.get("num_kv_splits") is None
        expect(alone, "split_tokens", "None when num_kv_splits is given", value)
        return value

    return check


def _max_q_len(value: Any, call: Call) -> Any:
    ok = isinstance(value, int) and value is not True and value >= 1
    expect(ok, "max_q_len", "None or an int >= 1", value)
    return value


def _plan(value: Any, call: Call) -> Any:
    is_plan = isinstance(value, AttentionPlan)
    expect(is_plan, "plan", "None or an AttentionPlan of attention_plan", kind_text(value))
    return value


def _as_it_is(value: Any, call: Call) -> Any:
    return value


OPTIONS = (
    Option(
        "layer",
        "which layer of stacked pages; may be traced. With a traced one out of range the output "
        "is 0; one that the host knows is a ValueError.",
        _layer,
        always=True,
    ),
    Option(
        "sm_scale",
        "factor on the logits, default head_dim ** −0.5; may be traced.",
        _sm_scale,
        always=True,
    ),
    Option(
        "sliding_window",
        "how many tokens a query sees, itself included: keys j > p − sliding_window. None or ≤ 0: "
        "all. A scalar, or [num_seqs] for one of each row. May be traced. Pages wholly left of a "
        "row's window are not read.",
        _sliding_window,
    ),
    Option(
        "num_pinned",
        "tokens at the front of each row that its window never hides (attention sinks, Xiao et al. "
        "2023). The window counts them: a query sees keys j < num_pinned and keys "
        "j > p − (sliding_window − num_pinned), at least itself. A scalar or [num_seqs].",
        _of_slid_rows("num_pinned"),
        always=True,
    ),
    Option(
        "slot_offset",
        "for rows that slid, whose table lists the pages of the pinned tokens and then those of "
        "the window: stored slot s holds token s where s < num_pinned, else token s + slot_offset. "
        "seq_lens keeps counting all tokens, so a row stores seq_lens − slot_offset of them. A "
        "scalar or [num_seqs]; None or 0: never slid.",
        _of_slid_rows("slot_offset"),
        always=True,
    ),
    Option(
        "soft_cap",
        "bound on the scaled logits, > 0; None: none.",
        _soft_cap,
        static=True,
        attribute=np.float32,
    ),
    Option(
        "alibi_slopes",
        "[num_q_heads], bf16, f16 or f32: ALiBi, a slope per token of distance.",
        _per_head("alibi_slopes"),
        heads_axis=lambda array: 0,
    ),
    Option(
        "sinks",
        "[num_q_heads], bf16, f16 or f32: one more logit per head, without a value: it enters the "
        "denominator only. A row that sees no key gives 0 with lse = the sink.",
        _per_head("sinks"),
        heads_axis=lambda array: 0,
    ),
    Option(
        "k_scale",
        "what 8-bit K is multiplied with; None: 1. A scalar, [num_kv_heads], or [num_pages, "
        "num_kv_heads, page_size] (one per token and head, as `write_kv` returns them); for "
        "stacked pages each with a leading num_layers axis, or a scalar.",
        _k_scale,
        heads_axis=_scale_heads_axis,
    ),
    Option("v_scale", "the same for V.", _v_scale, heads_axis=_scale_heads_axis),
    Option(
        "tree",
        "[num_seqs, max_tree, 2]: token trees, as `jax_paged.tree_intervals` makes them from "
        "parent pointers: node i of row r is stored token seq_lens[r] − tree_sizes[r] + i, and its "
        "subtree takes the places tree[r, i, 0] ≤ place < tree[r, i, 1] in depth-first order, the "
        "first being its own. A query in the tree sees all tokens before the tree, its ancestors "
        "and itself: the nodes j ≤ i with tree[r, j, 0] ≤ tree[r, i, 0] < tree[r, j, 1]. Several "
        "trees in one row (a forest) do not see each other. A node stands at position seq_lens[r] "
        "− tree_sizes[r] + the number of its ancestors, for windows and ALiBi; a window's pages "
        "are skipped by the position of the tree's roots. Queries stored before the tree are plain "
        "ones. A row whose tree is a chain has the bits that it has without a tree.",
        _tree,
    ),
    Option(
        "tree_sizes",
        "[num_seqs]: nodes of each row's tree, its last stored tokens; 0 = no tree. Clamped to "
        "[0, min(max_tree, seq_lens)], intervals to [0, tree_sizes]: wild values give some mask.",
        _tree_sizes,
    ),
    Option(
        "out_dtype",
        "float8_e4m3fn or float8_e5m2: the output as fp8, out / out_scale from f32 to the nearest, "
        "clamped to ±448 or ±57344; NaN stays NaN. None: q's dtype.",
        check_out_dtype,
        static=True,
        attribute=None,
    ),
    Option(
        "out_scale",
        "f32 scalar, with an out_dtype only; None: 1. May be traced.",
        _out_scale,
    ),
    Option(
        "rope",
        "(cos, sin, style), tables as `rope_tables` makes them: rotary embedding inside attention, "
        "for pages that hold K before it. q and k are turned in f32 by the positions at which they "
        "stand now (in a tree, by depth) and rounded to their dtype: the result is that of K "
        "turned before the write. What 8-bit pages hold is turned and not rounded. Positions "
        "beyond the tables are masked: a query there has output 0. None: q and k are used as "
        "they are.",
        _rope,
        join=_join_rope,
    ),
    Option(
        "causal",
        "whether a query is kept from later keys. With causal=False a window has no right edge, "
        "and ALiBi counts later keys upwards: slope · (key − query) as before.",
        _as_it_is,
        static=True,
    ),
    Option(
        "num_kv_splits",
        "partitions that each row's KV is cut into; None = chosen from the work at hand, 1 = not "
        "cut.",
        _split("num_kv_splits"),
        static=True,
        of_result=False,
    ),
    Option(
        "split_tokens",
        "cut at fixed multiples of this many tokens instead, so that the bits of a row do not "
        "depend on the rest of the batch.",
        _split("split_tokens"),
        static=True,
        of_result=False,
    ),
    Option(
        "max_q_len",
        "how many queries a row has at most, where that is known ahead; None: any number. CUDA "
        "does not launch a kernel then that would have no work. Rows with more queries are right, "
        "too, but slower.",
        _max_q_len,
        static=True,
        of_result=False,
    ),
    Option(
        "plan",
        "of `attention_plan` for this call's shapes and lengths, which may serve all layers of a "
        "step; None: the call makes its own. The results have the same bits.",
        _plan,  # `check_call` looks whether it fits
        of_result=False,
    ),
    Option(
        "layout",
        'how the pages lie in memory: "HND", "NHD", "vllm5d" or "rpa" (`jax_paged.layout`).',
        _as_it_is,  # `check_pages` has looked at it
        static=True,
    ),
    Option(
        "implementation",
        'None = native on CPU and CUDA, reference elsewhere; "native"; "reference".',
        _as_it_is,  # looked at first of all
        static=True,
        attribute=None,
        of_result=False,
    ),
)


def read_options(call: Call) -> tuple[dict[str, Any], Arrays]:
    """Checks the options of a call: the static ones and the operands, those that are given."""
    static: dict[str, Any] = {}
    arrays: Arrays = {}
    for option in OPTIONS:
        value = call.given.get(option.name)
        if value is not None or option.always:
            value = option.check(value, call)
        if value is None:
            continue
        for name, part in (value if option.join else {option.name: value}).items():
            if option.static or isinstance(part, bool):
                static[name] = part
            else:
                arrays[name] = part
    return static, arrays


def attributes(static: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the FFI target."""
    known = {name: _BY_PART[name].attribute for name in static if name in _BY_PART}
    return {name: convert(static[name]) for name, convert in known.items() if convert is not None}


def heads_axes(arrays: Arrays) -> dict[str, int | None]:
    """Which axis of each operand of an option counts heads."""
    return {name: _BY_PART[name].heads_axis(x) for name, x in arrays.items() if name in _BY_PART}


def of_reference(static: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """The options as keyword arguments of the reference."""
    known = {**static, **arrays}
    options = {}
    for option in OPTIONS:
        names = [name for name in _parts(option) if name in known]
        if names and option.of_result:
            parts = [known[name] for name in names]
            options[option.name] = option.join(*parts) if option.join else parts[0]
    return options


def _parts(option: Option) -> tuple[str, ...]:
    """The operands and attributes that an option becomes."""
    return tuple(inspect.signature(option.join).parameters) if option.join else (option.name,)


_BY_PART = {part: option for option in OPTIONS for part in _parts(option)}


def documented(function: Function) -> Function:
    """Puts the texts of a function's options where its docstring has a line "{options}".

    They stand in the order of its signature. Of some it may say more itself.
    """
    doc = function.__doc__ or ""
    texts = {option.name: option.doc for option in OPTIONS}
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:  # Unpack[of a TypedDict]
            names += get_args(parameter.annotation)[0].__annotations__
        else:
            names.append(parameter.name)
    lines = [
        textwrap.fill(f"{name}: {texts[name]}", 92, subsequent_indent="  ")
        for name in names
        if name in texts and not re.search(rf"^ *{name}: ", doc, re.M)
    ]
    function.__doc__ = re.sub(
        r"^( *)\{options\}$",
        lambda found: textwrap.indent("\n".join(lines), found[1]),
        doc,
        flags=re.M,
    )
    return function
