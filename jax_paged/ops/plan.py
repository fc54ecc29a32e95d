# SPDX-License-Identifier: Apache-2.0
"""A plan of attention: what it was made for, and whether a call fits it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_paged.checks import expect, shape_text
from jax_paged.layout import pages_shape

Facts = tuple[tuple[str, Any], ...]
MAX_HEADS_TOGETHER = 8  # kMaxHeadsTogether of ffi/cuda/attention/args.h


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """How the work of a step's attention is cut up on CUDA: what `attention_plan` returns.

    It is a pytree, so it passes through jit. Its words are opaque. What they depend on beside the
    lengths is static, and a call that differs in it is refused.
    """

    words: jax.Array  # i32[...]; zeros where nothing is planned ahead (CPU, the reference)
    facts: Facts = dataclasses.field(metadata={"static": True})


def plan_words(max_seqs: int, max_tree: int = 0) -> int:
    """The words of a plan: PlanWords of ffi/cuda/attention/args.h."""
    tree_words = max_seqs * (max_tree + 1) if max_tree else 0
    return -(-((max_seqs + 1) * 13 + 8 + tree_words) // 4) * 4


def read_words(
    words: np.ndarray, max_seqs: int, num_kv_heads: int, *, fixed_splits: bool
) -> dict[str, Any]:
    """What the words of a plan say, for people; ffi/cuda/attention/args.h has their order.

    Returns:
      `launches`: the numbers of PlanLaunches by name. Per row `is_empty`, `is_prefill` and
      `kv_splits`, of a decode row the most parts that one of its units is cut into.
    """
    words = np.ascontiguousarray(words)
    chunk = max(int(words[2:4].view(np.int64)[0]), 1)  # positions per team of workers
    names = ("stages", "prefill_rows", "unit_rows", "num_workers")
    rows, first = max_seqs + 1, 8
    lengths = words[first : first + 4 * rows].reshape(rows, 4)[:-1]
    splits = words[first + 4 * rows : first + 8 * rows].reshape(rows, 4)[:-1]
    first_position = words[first + 8 * rows : first + 10 * rows].view(np.int64)[:-1]
    launches = dict(zip(names, words[4:8].tolist(), strict=True))
    most = max(min(launches["num_workers"], MAX_HEADS_TOGETHER), 1)
    together = max(n for n in range(1, most + 1) if num_kv_heads % n == 0)
    kv_splits = []
    for (*_, units), (pieces, size, *_), begin in zip(lengths, splits, first_position, strict=True):
        units_of_one = np.arange(units // together, dtype=np.int64)  # of one worker of each team
        begins = begin + units_of_one * size  # of positions, where splits are automatic
        parts = (begins + pieces - 1) // chunk - begins // chunk + 1  # one for each team
        kv_splits.append(int(parts.max(initial=0)) if not fixed_splits else int(units and pieces))
    is_empty = (lengths[:, 1] == 0) | (lengths[:, 2] == 0)
    return {
        "launches": launches,
        "is_empty": is_empty.tolist(),
        "is_prefill": (~is_empty & (lengths[:, 3] == 0)).tolist(),
        "kv_splits": kv_splits,
    }


def facts_of(known: Mapping[str, Any], arrays: Mapping[str, Any]) -> Facts:
    """What the plan of a checked call depends on beside values."""
    q, window, tree = arrays["q"], arrays.get("sliding_window"), arrays.get("tree")
    k_shape = pages_shape(arrays["k_pages"], known["layout"], "k")
    v_shape = pages_shape(arrays["v_pages"], known["layout"], "v")
    window_kind = None if window is None else "one per row" if window.ndim else "one for all"
    return (
        ("q", f"{q.dtype.name}{shape_text(q.shape)}"),
        ("page_table", shape_text(arrays["page_table"].shape)),
        ("page_size", k_shape.page_size),
        ("num_kv_heads", k_shape.num_kv_heads),
        ("v_head_dim", v_shape.head_dim),
        ("pages of dtype", arrays["k_pages"].dtype.name),
        ("layout", known["layout"]),
        ("sliding_window", window_kind),
        *((name, name in arrays) for name in ("num_pinned", "alibi_slopes")),
        ("rope", shape_text(arrays["cos"].shape) if "cos" in arrays else None),
        ("max_tree", None if tree is None else tree.shape[1]),
        *((name, known.get(name)) for name in (
            "num_kv_splits", "split_tokens", "max_q_len", "implementation",
        )),
    )  # fmt: skip


def words_of(plan: AttentionPlan, facts: Facts, words: int) -> jax.Array:
    """The words of a plan that must fit a call with these facts."""
    for (name, mine), (_, other) in zip(facts, plan.facts, strict=True):
        expect(mine == other, "plan", f"one made with {name}={mine}", f"{name}={other}")
    got = f"{plan.words.dtype}{shape_text(plan.words.shape)}"
    expect(got == f"int32[{words}]", "plan", f"words int32[{words}]", got)
    return plan.words
