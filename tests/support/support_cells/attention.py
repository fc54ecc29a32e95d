# SPDX-License-Identifier: Apache-2.0
"""Attention with each feature: the kernels and the reference against softmax in float64.

`mesh` runs the same checks on several devices.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_paged as jp
from jax_paged.layout import LAYOUTS, is_one_pool
from jax_paged.ops import cascade
from jax_paged.ops.batch import OF_ROWS
from jax_paged.testing import Batch, assert_attention_close, dense_oracle, mla
from jax_paged.testing.cascade import share
from jax_paged.testing.flat import make_flat
from jax_paged.testing.options import ATTENTION_FACTORS, attention_case, poison, trees_of

from .kinds import OF_LOGITS, Cell, Meaningless, Refused, Runs, assert_matters, every, together

# Features that run together, by the name of the run.
RUNS = {
    "windows": ("windows", "pins", "slid rows", "HND"),
    "trees": ("trees", "8-bit", "NHD"),
    "logits": (*OF_LOGITS, "vllm5d"),
    "fp8": ("fp8 output", "rpa"),
}
LAYOUT = {run: features[-1] for run, features in RUNS.items()}
PLAIN: dict[str, Any] = {name: values[0] for name, values in ATTENTION_FACTORS.items()}
PLAIN |= {"page_size": 16, "group": 2, "head_dim": (16, None)}
# The factors of `attention_case` that a run changes.
CHANGES: dict[str, dict[str, Any]] = {
    "windows": {"sliding_window": 64, "pinned": "slid"},
    "trees": {"tree": True, "kv": "int8", "scale": "token"},
    "logits": {"soft_cap": 0.7, "alibi": True, "sinks": "moderate", "rope": "half"},
    "fp8": {},
}
# The options of a feature.
OPTIONS = {
    "windows": ("sliding_window",), "pins": ("num_pinned",), "slid rows": ("slot_offset",),
    "trees": ("tree", "tree_sizes"), "soft cap": ("soft_cap",), "ALiBi": ("alibi_slopes",),
    "sinks": ("sinks",), "inline RoPE": ("rope",),
}  # fmt: skip
FP8 = {"out_dtype": "float8_e4m3fn", "out_scale": np.float32(0.02)}


class Here:
    """Calls on the default device, of the kernels and of the reference."""

    implementations: tuple[str, ...] = ("native", "reference")

    def place(self, name: str, array: Any) -> Any:
        """An operand where it belongs."""
        return jnp.asarray(array) if isinstance(array, np.ndarray | np.generic) else array

    def check(self, out: jax.Array) -> None:
        """What else there is to say of a result."""


class Kernels(Here):
    """The kernels alone."""

    implementations = ("native",)


HERE, KERNELS = Here(), Kernels()


def expected_of(batch: Batch, options: dict[str, Any]) -> Any:
    """(out, lse) in float64, where every one of the options counts."""
    expected = dense_oracle(batch, **options)
    for names in OPTIONS.values():
        if names[0] in options:
            fewer = {name: x for name, x in options.items() if name not in names}
            assert_matters(expected[0], dense_oracle(batch, **fewer)[0])
    return expected


def compare(where: Here, run: str, call: Callable[..., Any], expected: Any, **allowed: Any) -> None:
    """Runs a call; expected: (out, lse) in float64."""
    for implementation in where.implementations:
        out, lse = call(implementation=implementation, **(FP8 if run == "fp8" else {}))
        where.check(out)
        if run != "fp8":
            assert_attention_close(out, lse, *expected, **allowed)
            continue
        assert out.dtype == jnp.float8_e4m3fn
        step, least = 2.0**-4, 2.0**-10  # half of a step of e4m3, of normal and other numbers
        codes = expected[0] / FP8["out_scale"]
        np.testing.assert_allclose(np.asarray(out, "f8"), codes, rtol=1.01 * step, atol=least)


def check_paged(op: Any, run: str, where: Here = HERE) -> None:
    """`paged_attention` or `ragged_paged_attention`."""
    ragged = op is jp.ragged_paged_attention
    row = PLAIN | CHANGES[run] | {"layout": LAYOUT[run], "rows": "mixed" if ragged else "decode"}
    batch, real, options, given = attention_case(row, seed=3)
    options = {name: x for name, x in options.items() if x is not None}
    expected = expected_of(real, options)
    names = ("q", "k_pages", "v_pages")
    operands, defaults = batch.ragged()
    if not ragged:
        count = len(batch.seq_lens)
        assert (np.diff(batch.cu_q_lens) == 1).all()
        operands = (operands[0][:count], *operands[1:5])
        defaults.pop("causal")
        expected = tuple(x[:count] for x in expected)
    if is_one_pool(batch.case.layout):
        names = names[:2]
    placed = [where.place(n, x) for n, x in zip(names, operands, strict=False)]
    more = {name: where.place(name, x) for name, x in (options | given).items()}
    call = partial(op, *placed, *operands[len(placed) :], **(defaults | more), return_lse=True)
    compare(where, run, call, expected, is_turned="rope" in options)


def options_of(run: str, sizes: list[int], heads: int) -> dict[str, Any]:
    """Options of rows of at least 20 tokens; sizes: of their trees."""
    rows = len(sizes)
    if run == "windows":
        return {
            "sliding_window": np.array([25, 25, 9, 5, 0], "i4")[:rows],
            "num_pinned": np.array([16, 16, 4, 3, 0], "i4")[:rows],
            "slot_offset": np.array([16, 8, 24, 16, 0], "i4")[:rows],
        }
    if run == "trees":
        return trees_of([[i // 2 - 1 for i in range(size)] for size in sizes], max_tree=8)
    if run == "logits":
        angles = np.outer(np.arange(200), 0.3 ** np.arange(6))
        return {
            "soft_cap": 0.7,
            "alibi_slopes": np.linspace(0.01, 0.4, heads, dtype="f4"),
            "sinks": np.linspace(-1, 2, heads, dtype="f4"),
            "rope": (np.float32(np.cos(angles)), np.float32(np.sin(angles)), "half"),
        }
    return {}


def check_flat(run: str) -> None:
    """`ragged_attention`."""
    flat = make_flat([3, 1, 9], [33, 20, 40], seed=1)
    options, real, given = options_of(run, [5, 1, 8], 6), flat.paged, {}
    options.pop("slot_offset", None)
    if run == "trees":  # in 8 bits
        rng, pages = np.random.default_rng(0), {}
        for name in ("k", "v"):
            scale = rng.uniform(0.02, 0.03, (*getattr(flat, name).shape[:2], 1)).astype("f4")
            codes = np.nan_to_num(np.clip(np.rint(getattr(flat, name) / scale), -127, 127))
            flat = dataclasses.replace(flat, **{name: codes.astype("i1")})
            pages[f"{name}_pages"] = (codes * np.float64(scale))[:, None]
            given[f"{name}_scale"] = scale
        real = dataclasses.replace(real, **pages)
    expected = expected_of(real, options)
    more = {name: HERE.place(name, x) for name, x in (options | given).items()}
    compare(HERE, run, partial(flat.attend, **more), expected, is_turned="rope" in options)


def with_offset(batch: Batch, options: dict[str, Any]) -> Batch:
    """The batch with tokens that slid away, which its lengths count."""
    return dataclasses.replace(batch, seq_lens=batch.seq_lens + options.get("slot_offset", 0))


def check_cascade(run: str, where: Here = HERE) -> None:
    """`cascade_attention` of three levels; run "latent": `mla_cascade_attention`."""
    pattern = ["aabbc", "aabbd", "aae", "aaf", "g"]
    options = options_of(run, [1, 3, 4, 1, 1], 6)
    options.pop("rope", None)
    batch = with_offset(share(pattern, q_lens=[1, 3, 2, 1, 1], last=7), options)
    arguments = (batch.page_table, batch.seq_lens, batch.cu_q_lens, batch.num_seqs)
    of_rows = {name: jnp.asarray(x) for name, x in options.items() if name in OF_ROWS}
    levels = cascade.cascade_levels(
        *map(jnp.asarray, arguments), page_size=8, num_levels=3, **of_rows
    )
    assert np.max(levels[0].seq_lens) > 0, "rows share something"
    pools, given, real = (batch.k_pages, batch.v_pages), {}, batch
    if run == "latent":
        real = as_latent(batch)
        operands = [where.place("q", batch.q), jnp.asarray(pools[0][:, 0])]
        op, given = jp.mla_cascade_attention, {"sm_scale": 0.2, "v_head_dim": 24}
    else:
        layout = LAYOUT[run]
        if run == "trees":  # in 8 bits
            given = {"k_scale": np.float32(0.03), "v_scale": np.float32(0.03)}
            codes = [np.nan_to_num(np.clip(np.rint(x / 0.03), -127, 127)) for x in pools]
            pairs = zip(pools, codes, strict=True)
            exact = [np.where(np.isnan(x), np.nan, c * 0.03) for x, c in pairs]
            real = dataclasses.replace(batch, k_pages=exact[0], v_pages=exact[1])
            pools = tuple(x.astype("i1") for x in codes)
        pools = jp.convert_pages(*map(jnp.asarray, pools), "HND", layout)
        names = ("q", "k_pages", "v_pages")
        operands = [where.place(name, x) for name, x in zip(names, (batch.q, *pools), strict=True)]
        op, given = jp.cascade_attention, given | {"layout": layout}
    expected = expected_of(real, options)
    given |= {name: where.place(name, x) for name, x in options.items() if name not in OF_ROWS}
    call = partial(op, *operands, levels, jnp.asarray(batch.cu_q_lens), batch.num_seqs, **given)
    compare(where, run, partial(call, return_lse=True), expected, roundings=3)


def as_latent(batch: Batch) -> Batch:
    """A batch whose V are the first 24 dimensions of the first head of K."""
    k_pages = batch.k_pages[:, :1]
    return dataclasses.replace(
        batch, case=dataclasses.replace(batch.case, num_kv_heads=1), k_pages=k_pages,
        v_pages=k_pages[..., :24], sm_scale=0.2,
    )  # fmt: skip


def check_latent(run: str, where: Here = HERE) -> None:
    """`mla_paged_attention`."""
    options = options_of(run, [5, 1, 8, 0], 6)
    options.pop("rope", None)
    batch = mla.make_mla(48, 32, 6, [3, 1, 12, 0], [60, 20, 90, 17], num_tokens=18, seed=2)
    batch = poison(with_offset(batch, options), options)
    real = batch = dataclasses.replace(batch, v_pages=batch.k_pages[..., :32])
    given = {}
    if run == "trees":  # in 8 bits
        given = {"kv_scale": np.float32(0.03)}
        batch, real = mla.eight_bit(batch, "int8", given["kv_scale"])
    expected = expected_of(real, options)
    (q, kv_pages, _, *rows), _ = batch.ragged()
    more = {name: where.place(name, x) for name, x in (options | given).items()}
    call = partial(
        jp.mla_paged_attention, where.place("q", q), jnp.asarray(kv_pages[:, 0]), *rows,
        sm_scale=batch.sm_scale, v_head_dim=32, return_lse=True, **more,
    )  # fmt: skip
    compare(where, run, call, expected)


def check_one_query_each(run: str) -> None:
    """`cascade_attention` and `mla_paged_attention` where each row has one query."""
    batch = share(["aab", "aac", "aad", "e"])
    q, k_pages, v_pages, table, seq_lens = batch.operands()
    q = q[:4]
    if run == "latent":
        batch = as_latent(batch)
        call = partial(
            jp.mla_paged_attention, q, k_pages[:, 0], table, seq_lens, jnp.arange(5),
            sm_scale=0.2, v_head_dim=24, return_lse=True,
        )  # fmt: skip
    else:
        levels = cascade.cascade_levels(table, seq_lens, page_size=8)
        call = partial(jp.cascade_attention, q, k_pages, v_pages, levels, return_lse=True)
    expected = tuple(x[:4] for x in dense_oracle(batch))
    compare(KERNELS, run, call, expected, roundings=3)


ONE_PAGE = jnp.zeros((1, 1, 8, 8), jnp.float32)
ONE_ROW = (jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
NO_PAGES = Meaningless("K and V without pages have no layout, no levels and no groups")
ONE_LAYOUT = Meaningless("latent rows have one layout: they have no heads")
BY_STATE = Meaningless("one call is of one group; `attend` finds it")


def _with_rope(op: Any, *operands: Any, **options: Any) -> Callable[[], Any]:
    rope = options_of("logits", [1], 1)["rope"]
    return lambda: op(*operands, rope=rope, **options)


def rows(check_groups: Callable[[str], None]) -> dict[str, dict[str, Cell]]:
    """The rows of the reads; check_groups(op): `attend` on a state of several groups."""
    levels, rows_of_one = [jp.CascadeLevel(*ONE_ROW)], (*ONE_ROW, jnp.arange(2))
    by_level = "a query would be turned by its place in each level. `attend` reads each row alone"
    of_cascade = partial(check_cascade, where=KERNELS)
    return {
        "`paged_attention`": {
            **together(partial(check_paged, jp.paged_attention), RUNS),
            **every(("cascade", "latent"), lambda f: Runs(partial(check_one_query_each, f))),
            "groups": BY_STATE,
        },
        "`ragged_paged_attention`": {
            **together(partial(check_paged, jp.ragged_paged_attention), RUNS),
            "cascade": Runs(partial(check_cascade, "fp8")),
            "latent": Runs(partial(check_latent, "plain")),
            "groups": Runs(partial(check_groups, "ragged")),
        },
        "`ragged_attention`": {
            **together(check_flat, RUNS, "slid rows", *LAYOUTS),
            "slid rows": Meaningless("K and V that are given whole have not slid"),
            **every(("cascade", *LAYOUTS, "groups"), NO_PAGES),
            "latent": Meaningless("latent rows are what pages hold; without pages they are heads"),
        },
        "`cascade_attention`": {
            **together(of_cascade, RUNS | {"latent": ["latent"]}, "inline RoPE"),
            "cascade": Runs(partial(check_cascade, "logits")),
            "inline RoPE": Refused(
                _with_rope(jp.cascade_attention, ONE_PAGE[0], ONE_PAGE, ONE_PAGE, levels),
                "'rope'",
                by_level,
            ),
            "groups": Runs(partial(check_groups, "cascade")),
        },
        "`mla_paged_attention`": {
            **together(check_latent, RUNS, "inline RoPE", *LAYOUTS),
            "latent": Runs(partial(check_latent, "plain")),
            "cascade": Runs(partial(of_cascade, "latent")),
            "inline RoPE": Refused(
                _with_rope(
                    jp.mla_paged_attention,
                    ONE_PAGE[0],
                    ONE_PAGE[0],
                    *rows_of_one,
                    sm_scale=1.0,
                    v_head_dim=8,
                ),
                "'rope'",
                "the rope part of a latent row is stored turned",
            ),
            **every(LAYOUTS, ONE_LAYOUT),
            "groups": Runs(partial(check_groups, "mla")),
        },
    }
