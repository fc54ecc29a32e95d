# SPDX-License-Identifier: Apache-2.0
"""What a call would do: which implementation, kernel, instruction set and split."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jax_paged.checks import as_index, expect
from jax_paged.layout import pages_shape, pool_of_v
from jax_paged.native import load
from jax_paged.native.call import STAND_INS
from jax_paged.ops import attention, cascade, merge, mla, page_mass, qkv, write
from jax_paged.ops.attention_plan import words_of_call
from jax_paged.ops.plan import read_words

_OPS: dict[str, tuple[Callable[..., Any], str]] = {
    "paged_attention": (attention.paged_attention, attention.TARGET),
    "ragged_paged_attention": (attention.ragged_paged_attention, attention.TARGET),
    "ragged_attention": (attention.ragged_attention, attention.TARGET),
    "cascade_attention": (cascade.cascade_attention, attention.TARGET),
    "mla_paged_attention": (mla.mla_paged_attention, attention.TARGET),
    "page_attention_mass": (page_mass.page_attention_mass, attention.TARGET),
    "merge_attention_states": (merge.merge_attention_states, merge.TARGET),
    "write_kv": (write.write_kv, write.TARGET),
    "qkv_norm_rope_write": (qkv.qkv_norm_rope_write, qkv.TARGET),
}


_LENGTHS = ("seq_lens", "cu_q_lens", "sliding_window", "num_pinned", "slot_offset", "num_seqs")


def explain(op: str | Callable[..., Any], *args, **options) -> dict[str, Any]:
    """Tells what `op(*args, **options)` would do on the default device, without running it.

    Args:
      op: the name of an op ("paged_attention", "write_kv", …), or the function itself.
      args, options: as for the op. Arrays may be `jax.ShapeDtypeStruct`; the split of an attention
        call is told only when seq_lens (and cu_q_lens, sliding_window) hold values; it leaves out
        that a window reaches further left in a row with a tree.

    Returns:
      A dict: `op`; `platform`; `implementation`, "native" or "reference"; `target`, the FFI target
      or None. For native attention on CPU also `isa`, `num_threads` (1 when the work is too small
      to share) and with values `work_items` and per row `kernels` ("decode", "prefill", "empty")
      and `kv_splits`. For attention on CUDA, where the planner runs for it: `decode_kernel` and
      `prefill_kernel`, which serve rows with few and with many queries ("decode", "prefill" and
      "latent" are on tensor cores, "simt" is not), `num_workers`, the CTAs of a launch, and with
      values `kernels` and `kv_splits`. For `cascade_attention`, whose levels must hold values,
      `levels`: such a dict for each of them, with the queries of a group as one row. For
      `page_attention_mass` each page of the table is a row, those of row 0 first.

    Raises:
      ValueError: the op is unknown, or the arguments do not fit the op.
      NotImplementedError: the call needs native code that this build lacks.

    >>> import jax.numpy as jnp
    >>> pages = jax.ShapeDtypeStruct((64, 2, 16, 64), jnp.float32)
    >>> q = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)
    >>> table = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    >>> plan = explain("paged_attention", q, pages, pages, table, jnp.array([100, 0]))
    >>> print(plan["implementation"], plan["kernels"], plan["kv_splits"])
    native ['decode', 'empty'] [1, 0]
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    expect(name in _OPS, "op", " or ".join(_OPS), name)
    function, target = _OPS[name]
    bound = inspect.signature(function).bind(*args, **options)
    bound.apply_defaults()
    call = bound.arguments
    arrays = {
        key: value
        for key, value in call.items()
        if hasattr(value, "shape") and not isinstance(value, np.generic)
    }
    jax.eval_shape(  # the op's own checks, without running anything
        lambda given: function(**{**call, **given}), arrays
    )
    platform = jax.default_backend()
    chosen = load.implementation_on(platform, target, call["implementation"])
    plan: dict[str, Any] = {
        "op": name,
        "platform": platform,
        "implementation": chosen,
        "target": target if chosen == "native" else None,
    }
    if chosen != "native" or target != attention.TARGET:
        return plan
    on_cpu = platform == "cpu" and call["implementation"] not in STAND_INS
    attention_plan = _cpu_attention_plan if on_cpu else _cuda_attention_plan
    if "levels" in call:
        plan["levels"] = [attention_plan(level) for level in _level_calls(call)]
    else:
        plan |= attention_plan(call)
    return plan


def _as_paged(call: dict[str, Any], *, latent: bool = True) -> dict[str, Any]:
    """A call of another op as one of `ragged_paged_attention`; others as they are.

    latent: also one over latent pages.
    """
    if "k_pages" in call and "v_pages" not in call:
        return _with_pages_as_rows(call)
    if "kv_pages" in call and latent:
        shape = call["kv_pages"].shape
        k_shape, v_shape = (
            (*shape[:-2], 1, shape[-2], dim) for dim in (shape[-1], call["v_head_dim"])
        )
        dtype = call["kv_pages"].dtype
        return call | {
            "k_pages": jax.ShapeDtypeStruct(k_shape, dtype),
            "v_pages": jax.ShapeDtypeStruct(v_shape, dtype),
            "layout": "HND",
            "sliding_window": None,
        }
    if "cu_kv_lens" not in call:
        return call
    k, v, cu_kv_lens = (call[name] for name in ("k", "v", "cu_kv_lens"))
    most = k.shape[0] if call["max_kv_len"] is None else min(call["max_kv_len"], k.shape[0])
    if hasattr(cu_kv_lens, "__array__") and not isinstance(cu_kv_lens, Tracer):
        cu_kv_lens = np.diff(np.maximum.accumulate(np.clip(np.asarray(cu_kv_lens), 0, k.shape[0])))
    return call | {
        "k_pages": jax.ShapeDtypeStruct((k.shape[0], 1, *k.shape[1:]), k.dtype),
        "v_pages": jax.ShapeDtypeStruct((v.shape[0], 1, *v.shape[1:]), v.dtype),
        "page_table": jax.ShapeDtypeStruct((call["cu_q_lens"].shape[0] - 1, most), np.int32),
        "seq_lens": cu_kv_lens,
        "layout": "NHD",
    }


def _with_pages_as_rows(call: dict[str, Any]) -> dict[str, Any]:
    """The call of `paged_attention` that one of `page_attention_mass` makes."""
    q, pages, (rows, width) = call["q"], call["k_pages"], call["page_table"].shape
    windows = ("sliding_window", "num_pinned", "slot_offset")
    given = {name: call[name] for name in ("seq_lens", *windows) if call[name] is not None}

    def as_rows(given: dict[str, Any]) -> dict[str, jax.Array]:
        given = {name: as_index(name, x) for name, x in given.items()}
        given["page_table"] = np.zeros((rows, width), np.int32)  # which pages they are is no matter
        return page_mass.pages_as_rows(given, pages_shape(pages, call["layout"]).page_size)

    known = _lengths_are_known(call)
    values = page_mass.values_like(pages, call["layout"])
    return (
        call
        | dict.fromkeys((*windows, "sinks", "num_kv_splits", "split_tokens"))
        | {"q": jax.ShapeDtypeStruct((rows * width, *q.shape[1:]), q.dtype)}
        | {"v_pages": values}
        | (as_rows(given) if known else jax.eval_shape(as_rows, given))
    )


def _level_calls(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of `ragged_paged_attention` or `paged_attention` that a cascade is made of."""
    calls = []
    for given in call["levels"]:
        level = cascade.CascadeLevel(*given)
        cu_q_lens, num_seqs = call["cu_q_lens"], call["num_seqs"]
        own = level.row_groups is None
        if not own:
            tokens = call["q"].shape[0]
            level = cascade.CascadeLevel(*map(np.asarray, level))
            _, cu_q_lens = cascade.group_queries(tokens, level, cu_q_lens, num_seqs)
        pages = {"page_table": level.page_table, "seq_lens": level.seq_lens}
        options = {"causal": own and call["causal"], "sliding_window": None}
        one = call | pages | options | {"num_seqs": num_seqs if own else None}
        one["cu_q_lens"] = cu_q_lens
        if cu_q_lens is None:
            del one["cu_q_lens"]
        calls.append(one)
    return calls


def _lengths_are_known(call: dict[str, Any]) -> bool:
    lengths = (call.get(name) for name in _LENGTHS)
    return not any(
        hasattr(x, "shape") and (isinstance(x, Tracer) or not hasattr(x, "__array__"))
        for x in lengths
    )


def _cuda_attention_plan(call: dict[str, Any]) -> dict[str, Any]:
    """What the planner writes on the device, of lengths 0 where they are not known."""
    call = _as_paged(call, latent=False)
    known = _lengths_are_known(call)
    whole = ("q", "k_pages", "v_pages", "kv_pages")  # of which no value is asked
    given = {
        name: np.zeros(x.shape, x.dtype)
        if name not in whole and hasattr(x, "shape") and not hasattr(x, "__array__")
        else x
        for name, x in call.items()
    }
    is_latent = "kv_pages" in call
    check = mla.check_call if is_latent else attention.check_call
    static, arrays = check({"layer": None} | given)
    fixed = bool(call.get("num_kv_splits") or call.get("split_tokens"))
    words = np.asarray(words_of_call(static, arrays))
    heads = 1 if is_latent else pages_shape(call["k_pages"], call["layout"], "k").num_kv_heads
    found = read_words(words, arrays["seq_lens"].shape[0], heads, fixed_splits=fixed)
    launches = found["launches"]
    decode = "simt" if launches["stages"] == 0 else "latent" if is_latent else "decode"
    prefill = "latent" if is_latent else "prefill"
    paths = {
        "decode_kernel": decode,
        "prefill_kernel": prefill if launches["prefill_rows"] else decode,
        "num_workers": launches["num_workers"],
    }
    if not known:
        return paths
    kernels = [
        "empty" if is_empty else prefill if is_prefill else decode
        for is_empty, is_prefill in zip(found["is_empty"], found["is_prefill"], strict=True)
    ]
    return paths | {"kernels": kernels, "kv_splits": found["kv_splits"]}


def _cpu_attention_plan(call: dict[str, Any]) -> dict[str, Any]:
    call = _as_paged(call)
    cpu = load.cpu_module()
    threads = max(len(os.sched_getaffinity(0)), jax.local_device_count())  # XLA's intra-op pool
    windows = (call.get(name) for name in ("sliding_window", "num_pinned", "slot_offset"))
    lengths = [call["seq_lens"], call.get("cu_q_lens", call["seq_lens"])]
    lengths += [0 if x is None else x for x in windows]
    lengths = [np.asarray(x) if isinstance(x, int) else x for x in lengths]
    if any(not hasattr(x, "__array__") or isinstance(x, Tracer) for x in lengths):
        return {"isa": cpu.isa(), "num_threads": threads}
    k_shape = pages_shape(call["k_pages"], call["layout"])
    v_pages = pool_of_v(call["k_pages"], call["v_pages"], call["layout"])
    capacity = call["page_table"].shape[1] * k_shape.page_size
    window, pinned, offset = (
        np.clip(np.broadcast_to(np.asarray(x), np.shape(lengths[0])), 0, 2**31 - 1).astype(np.int64)
        for x in lengths[2:]
    )
    seq_lens = np.clip(np.maximum(np.asarray(lengths[0]), 0) - offset, 0, capacity)
    q_lens = np.ones_like(seq_lens)
    if "cu_q_lens" in call:
        bounds = np.clip(np.asarray(lengths[1]), 0, call["q"].shape[0])
        q_lens = np.diff(np.maximum.accumulate(bounds))
        if call["num_seqs"] is not None:
            q_lens[max(int(np.reshape(call["num_seqs"], ())), 0) :] = 0
    return cpu.attention_plan(
        q_lens=q_lens.tolist(),
        seq_lens=seq_lens.tolist(),
        num_q_heads=call["q"].shape[1],
        num_kv_heads=k_shape.num_kv_heads,
        head_dim=k_shape.head_dim,
        v_head_dim=pages_shape(v_pages, call["layout"], "v").head_dim,
        num_threads=threads,
        num_kv_splits=call["num_kv_splits"] or 0,
        split_tokens=call["split_tokens"] or 0,
        causal=call.get("causal", True),
        unpinned_window=np.where(window > 0, np.maximum(window - pinned, 1), 0).tolist(),
        num_pinned=np.minimum(pinned, seq_lens).tolist(),
    )
