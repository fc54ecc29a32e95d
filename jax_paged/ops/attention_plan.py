# SPDX-License-Identifier: Apache-2.0
"""The plan of a step's attention, made once for all its layers."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from jax_paged.checks import Implementation, check_array, expect
from jax_paged.layout import LAYOUTS, Layout, is_stacked, pages_shape
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import PAGES, Split, at_heads, pools_at_heads
from jax_paged.ops import options
from jax_paged.ops.attention import check_call
from jax_paged.ops.options import Arrays, Static, documented
from jax_paged.ops.plan import AttentionPlan, facts_of, plan_words
from jax_paged.ops.rope import Rope

TARGET = "jax_paged.attention_plan.v1"
MAX_CAPACITY = 2**30  # tokens of a row: kMaxPlannedCapacity of ffi/cuda/attention/make_args.h
# The operands whose values a plan depends on; of the others it needs shapes and dtypes.
_VALUES = (
    "seq_lens", "cu_q_lens", "num_seqs", "sliding_window", "num_pinned", "slot_offset", "tree",
    "tree_sizes",
)  # fmt: skip
_POOLS = ("k_pages", "v_pages")
_Told = tuple[str, tuple[int, ...]]  # dtype and shape
_HEADS = {"q": 1, "out": 1, "lse": 1, "alibi_slopes": 0}  # axes of query heads


@documented
def attention_plan(
    q: Float[Array, "tokens num_q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    cu_q_lens: Int[Array, "num_seqs+1"] | None = None,
    num_seqs: Int[Array, "..."] | int | None = None,
    *,
    sliding_window: Int[Array, "..."] | int | None = None,
    num_pinned: Int[Array, "..."] | int | None = None,
    slot_offset: Int[Array, "..."] | int | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    tree: Int[Array, "num_seqs max_tree 2"] | None = None,
    tree_sizes: Int[Array, "num_seqs"] | None = None,
    rope: Rope | tuple[Any, ...] | None = None,
    num_kv_splits: int | None = None,
    split_tokens: int | None = None,
    max_q_len: int | None = None,
    layout: Layout = "HND",
    implementation: Implementation = None,
) -> AttentionPlan:
    """Plans calls of `paged_attention` or `ragged_paged_attention`: once per step, for its layers.

    On CUDA an attention call begins by cutting its rows into equal shares of work, by their lengths
    alone. The layers of a step have the same lengths. Given to each of them as `plan`, a plan is
    made once; out and lse have the same bits. On other platforms, and in the reference, a plan is
    zeros and changes nothing.

    Args:
      q, page_table, alibi_slopes, rope: as the calls have them. Their values do not matter; q may
        be a `jax.ShapeDtypeStruct`.
      k_pages, v_pages: those of any of the layers, stacked or not. They are not read.
      seq_lens, cu_q_lens, num_seqs: as the calls have them. cu_q_lens None: for `paged_attention`.
      {options}

    Returns:
      An `AttentionPlan`, to be given to calls with these arguments. Layers, pages, page ids, scales
      and all options that are not named here may differ between them.

    Raises:
      ValueError, NotImplementedError: as the calls; a row may store more than 2^30 tokens.

    A call whose shapes, dtypes or static options are not those of its plan is a ValueError. That
    the lengths, windows, pins and trees are the same is the caller's promise: with others the
    results mean nothing, but nothing is read or written out of bounds, and the call ends. The plan
    is of one device: on another kind of GPU the results mean nothing either.

    Not differentiable: it has integers only. vmap runs one call after another. Where a program
    splits the pages by KV heads over several devices, each plans for its own.

    FlashInfer's plan and run are the same two steps, but its plan is made on the host.

    >>> import jax.numpy as jnp, jax_paged as jp
    >>> pages = jnp.ones((2, 2, 1, 4, 8))  # two layers
    >>> q, table, lens = jnp.ones((1, 2, 8)), jnp.array([[1, 0]]), jnp.array([5])
    >>> plan = jp.attention_plan(q, pages, pages, table, lens)
    >>> for layer in (0, 1):
    ...     out = jp.paged_attention(q, pages, pages, table, lens, layer=layer, plan=plan)
    ...     print(out[0, :, 0])
    [1. 1.]
    [1. 1.]
    """
    given = {name: x for name, x in locals().items() if name != "cu_q_lens" or x is not None}
    check_array("k_pages", k_pages)
    stacked = is_stacked(k_pages, layout, "k") if layout in LAYOUTS else False
    static, arrays = check_call(given | {"layer": np.int32(0) if stacked else None})
    known = dict(static)
    capacity = arrays["page_table"].shape[1] * pages_shape(k_pages, layout).page_size
    expect(capacity <= MAX_CAPACITY, "page_table", f"at most {MAX_CAPACITY} tokens a row", capacity)
    sent = {name: x for name, x in arrays.items() if name in (*_VALUES, *_POOLS)}
    return AttentionPlan(_words(static, _shapes(arrays), sent), facts_of(known, arrays))


def words_of_call(static: Static, arrays: Mapping[str, Any]) -> jax.Array:
    """The words of the plan of a checked call, latent ones too, on one device: for `explain`.

    Arrays but the lengths may be ShapeDtypeStruct.
    """
    known = dict(static)
    values = {name: jnp.asarray(x) for name, x in arrays.items() if name in _VALUES}
    told = {name: (dtype, shape) for name, dtype, shape in _shapes(arrays)}
    v_dim = known.get("v_head_dim")  # of latent pages
    if v_dim is None:
        v_dim = pages_shape(arrays["v_pages"], known["layout"], "v").head_dim
    (words,) = ffi_call(
        TARGET,
        list(values.values()),
        _texts(known, told | _results(told["q"], v_dim), values),
        split=Split({name: at_heads(x, None) for name, x in values.items()}, results=("-",)),
        implementation=known.get("implementation"),
        reference=functools.partial(_zeros, _num_words(arrays)),
    )
    return words


def _shapes(arrays: Mapping[str, Any]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple(
        (name, jnp.dtype(x.dtype).name, tuple(x.shape))
        for name, x in arrays.items()
        if name not in _VALUES
    )


def _attributes(static: Static, shapes: tuple[Any, ...], operands: Mapping[str, Any]):
    """The attributes for the operands of one device: its own heads of all."""
    known, told = dict(static), {name: (dtype, shape) for name, dtype, shape in shapes}
    heads = [
        pages_shape(pool, known["layout"], "k").num_kv_heads
        for pool in (operands["k_pages"], jax.ShapeDtypeStruct(*reversed(told["k_pages"])))
    ]
    v_dim = pages_shape(operands["v_pages"], known["layout"], "v").head_dim
    told |= _results(told["q"], v_dim)
    for name, axis in _HEADS.items():
        if name in told:
            dtype, shape = told[name]
            own = shape[axis] * heads[0] // heads[1]
            told[name] = dtype, (*shape[:axis], own, *shape[axis + 1 :])
    told |= {name: (operands[name].dtype.name, operands[name].shape) for name in _POOLS}
    return _texts(known, told, [name for name in operands if name not in _POOLS])


def _results(q: _Told, v_head_dim: int) -> dict[str, _Told]:
    dtype, shape = q
    return {"out": (dtype, (*shape[:2], v_head_dim)), "lse": ("float32", shape[:2])}


def _texts(known: Mapping[str, Any], told: Mapping[str, _Told], sent: Iterable[str]):
    """The attributes: operands that are sent, and those that are only told of."""
    texts = (" ".join([name, dtype, *map(str, shape)]) for name, (dtype, shape) in told.items())
    return {
        "operands": ",".join(sent), "shapes": ",".join(texts), **options.attributes(known),
    }  # fmt: skip


def _num_words(arrays: Mapping[str, Any]) -> int:
    max_tree = arrays["tree"].shape[1] if "tree" in arrays else 0
    return plan_words(arrays["seq_lens"].shape[0], max_tree)


def _zeros(words: int, seq_lens: jax.Array, *_):
    """A plan where nothing is planned; it varies over the mesh axes that the lengths vary over."""
    return (jnp.broadcast_to(jnp.sum(seq_lens[:0], dtype=np.int32), (words,)),)


def _call(static: Static, shapes: tuple[Any, ...], operands: Arrays) -> jax.Array:
    known = dict(static)
    axes = {name: at_heads(x, None) for name, x in operands.items()}
    axes |= pools_at_heads(operands, known["layout"])
    (plan,) = ffi_call(
        TARGET,
        list(operands.values()),
        functools.partial(_attributes, static, shapes),
        split=Split(axes, results=("-",), fixed=PAGES),
        only_shapes=_POOLS,
        implementation=known.get("implementation"),
        reference=functools.partial(_zeros, _num_words(operands)),
    )
    return plan


@functools.cache
def _batched(static: Static, shapes: tuple[Any, ...]):
    """`_call` that vmap runs one call after another."""
    return sequential_vmap(functools.partial(_call, static, shapes))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _words(static: Static, shapes: tuple[Any, ...], operands: Arrays) -> jax.Array:
    pools = {name: jax.lax.stop_gradient(operands[name]) for name in _POOLS}
    first = {name: operands[name] for name in _VALUES if name in operands}
    return _batched(static, shapes)(first | pools)
