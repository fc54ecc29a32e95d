# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: what options, 8-bit pages, layouts and MLA cost beside plain attention.

    python benchmarks/gpu_options.py --rows FILE [--dry]

Each row is timed like those of gpu_attention.py and says how many times faster it is than the plain
bf16 call on the same rows (`vs_plain`), which is timed here, too. GB/s counts what a call must read
once: the K and V that its window shows, in the bytes that they are stored in, and their scales.

"plan" is a call whose rows are all empty: the planner, and launches that find no work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import gpu_attention
import jax
import jax.numpy as jnp
import numpy as np
from gpu_attention import Shape, decode, prefill
from gpu_timing import Report, median_ratio, of_chains, percent, rate, worst_error

from jax_paged import (
    convert_pages,
    mla_paged_attention,
    ragged_paged_attention,
    tree_intervals,
)
from jax_paged.testing import CASES, TOLERANCES

MOST_LAYERS = 16
CODE_SIZE = {"float8_e4m3fn": 0.01, "int8": 0.03}  # the scale of a code
LATENT, ROPE_DIM, MLA_PAGE = 512, 64, 64

Target = tuple[str, str, float]
Step = Callable[..., Any]  # (q, operands, layer) → out, of q's shape


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call a shape. options: of the op; a tree is of `tree` nodes in each row."""

    name: str
    kv: str | None = None  # dtype of 8-bit pages
    layout: Any = "HND"
    options: tuple[tuple[str, Any], ...] = ()
    tree: bool = False
    target: Target | None = None


def window(tokens: int) -> Variant:
    return Variant(f"window {tokens}", options=(("sliding_window", tokens),))


PLAIN = Variant("plain")
FP8 = "float8_e4m3fn"
AT_LEAST_1_6 = ("vs_plain", "min", 1.6)
WITHIN_15 = ("vs_plain", "min", 0.85)
ALL_ROWS = (
    Variant("vllm5d", layout="vllm5d"), window(1024),
    Variant("pins 64, window 1024", options=(("sliding_window", 1024), ("num_pinned", 64))),
    Variant("soft cap", options=(("soft_cap", 30.0),)),
)  # fmt: skip
GROUPS: tuple[tuple[Shape, tuple[Variant, ...]], ...] = (
    (decode("qwen3_30b_a3b", 32, 4096), (
        PLAIN, Variant("fp8 pages", FP8, target=AT_LEAST_1_6), Variant("int8 pages", "int8"),
        *ALL_ROWS, Variant("fp8 output", options=(("out_dtype", FP8),)),
    )),
    (decode("gemma_mqa", 64, 4096), (PLAIN, Variant("fp8 pages", FP8))),
    (Shape("qwen3_30b_a3b", (8,) * 16, (4096,) * 16), (PLAIN, Variant("trees", tree=True))),
    (prefill("qwen3_30b_a3b", 1, 8192), (
        PLAIN, Variant("fp8 pages", FP8, target=WITHIN_15), *ALL_ROWS[:2],
    )),
    (Shape("qwen3_30b_a3b", (1,), (100_000,)), (PLAIN,)),
    (Shape("qwen3_30b_a3b", (4,), (100_000,)), (PLAIN,)),
    (Shape("qwen3_30b_a3b", (16,), (100_000,)), (PLAIN,)),
)  # fmt: skip
DRY_GROUPS = (
    (decode("smollm2_135m", 2, 100), (
        PLAIN, Variant("fp8 pages", FP8, target=AT_LEAST_1_6), Variant("vllm5d", layout="vllm5d"),
        window(40), Variant("fp8 output", options=(("out_dtype", FP8),)),
    )),
    (Shape("smollm2_135m", (4, 4), (60, 60)), (PLAIN, Variant("trees", tree=True))),
)  # fmt: skip
# Heads, new tokens per row, rows, tokens of context.
MLA = ((16, 1, 32, 4096), (128, 1, 32, 4096), (16, 1, 1, 4096), (16, 1024, 1, 1024))
MLA_TARGET = ("percent_of_copy", "min", 80)  # of the first one
DRY_MLA = ((2, 1, 2, 64),)
PLANNED_ROWS, DRY_PLANNED_ROWS = (1, 64, 256), (2,)


def chain_of(step: Step, q: jax.Array, operands: Any, num_layers: int) -> Callable[[int], object]:
    """run(n): n steps over the layers in turn; the output of one is the query of the next.

    operands: all other arrays. In a closure they would become constants of the program, which take
    XLA minutes.
    """

    @functools.partial(jax.jit, static_argnames="calls")
    def chain(q, operands, calls):
        for call in range(calls):
            q = step(q, operands, call % num_layers).astype(q.dtype)
        return q

    return lambda calls: jax.block_until_ready(chain(q, operands, calls))


def visible(shape: Shape, variant: Variant) -> int:
    """Stored tokens that some query sees."""
    options = dict(variant.options)
    wide = options.get("sliding_window")
    if wide is None:
        return sum(shape.seq_lens)
    seen = (min(n, wide + q - 1) for q, n in zip(shape.q_lens, shape.seq_lens, strict=True))
    return sum(seen)


class Timer:
    """The figures of one stage; `plain` is that of the group at hand."""

    def __init__(self, report: Report):
        self._report = report
        self._best: dict[str, float | None] = {}
        self.plain = None

    def prepare(self) -> None:
        self._best = self._report.ceilings()

    def add(
        self, step: Step, q: jax.Array, operands: Any, num_layers: int, num_bytes: float,
        flops: float | None, target: Target | None = None, **what,
    ) -> None:  # fmt: skip
        """Times a step and adds a row."""
        timing = of_chains(chain_of(step, q, operands, num_layers), self._report.dry)
        self._report.check_time(timing)
        if what["kind"].endswith("plain"):
            self.plain = timing
        gb_per_s = rate(num_bytes / 1e9, timing.median)
        tflop_per_s = None if flops is None else rate(flops / 1e12, timing.median)
        self._report.add(
            **what, us=1e6 * timing.median, percentiles=[1e6 * timing.p10, 1e6 * timing.p90],
            mb=num_bytes / 1e6, gb_per_s=gb_per_s, tflop_per_s=tflop_per_s,
            percent_of_copy=percent(gb_per_s, self._best["copy_gb_per_s"]),
            percent_of_matmul=percent(tflop_per_s, self._best["bf16_tflop_per_s"]),
            vs_plain=None if self.plain is None else median_ratio(self.plain, timing),
            target=target,
        )  # fmt: skip


def measure(shape: Shape, variant: Variant, timer: Timer, dry: bool) -> None:
    """One variant of a shape: compared with the reference, then timed."""
    case = CASES[shape.case]
    layers = 2 if dry else int(np.clip((1 << 30) // shape.kv_bytes(), 2, MOST_LAYERS))
    pools = gpu_attention.make_pools(shape, layers)
    k_pages, v_pages = pools.k_pages, pools.v_pages
    arrays: dict[str, Any] = {}  # options that are arrays
    if variant.kv is not None:
        size = CODE_SIZE[variant.kv]
        limit = 127 if variant.kv == "int8" else float(jnp.finfo(variant.kv).max)

        @functools.partial(jax.jit, donate_argnums=0)
        def as_codes(pages):
            codes = jnp.clip(pages / jnp.bfloat16(size), -limit, limit)
            codes = jnp.round(codes) if variant.kv == "int8" else codes
            return codes.astype(variant.kv)

        k_pages, v_pages = as_codes(k_pages), as_codes(v_pages)
        scale = jnp.full((layers,), size, jnp.float32)
        arrays |= {"k_scale": scale, "v_scale": scale}
    if variant.layout != "HND":
        convert = functools.partial(convert_pages, src="HND", dst=variant.layout)
        k_pages, v_pages = jax.jit(convert)(k_pages, v_pages)
    if variant.tree:
        parents = np.tile((np.arange(max(shape.q_lens)) - 1) // 2, (len(shape.q_lens), 1))
        sizes = np.array(shape.q_lens, np.int32)
        tree, _, _ = tree_intervals(jnp.asarray(parents, jnp.int32), jnp.asarray(sizes))
        arrays |= {"tree": tree, "tree_sizes": jnp.asarray(sizes)}
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(shape.q_lens)]).astype(np.int32))
    lens = jnp.asarray(shape.seq_lens, jnp.int32)

    operands = (k_pages, v_pages, pools.page_table, lens, starts), arrays

    def step(q, operands, layer, implementation: Any = "native"):
        rows, arrays = operands
        return ragged_paged_attention(
            q, *rows, layer=layer, layout=variant.layout, implementation=implementation,
            **dict(variant.options), **arrays,
        )  # fmt: skip

    check(shape, variant, step, pools.q, operands)
    item = 1 if variant.kv is not None else k_pages.dtype.itemsize
    read = 2 * visible(shape, variant) * case.num_kv_heads * case.head_dim * item
    flops = None if "sliding_window" in dict(variant.options) else shape.flops()
    timer.add(
        step, pools.q, operands, layers, read, flops, variant.target, kind=f"option {variant.name}",
        case=f"{case.num_q_heads}/{case.num_kv_heads}/{case.head_dim}", size=shape.size,
        dtype=variant.kv or shape.dtype,
    )  # fmt: skip


def check(shape: Shape, variant: Variant, step: Step, q: jax.Array, operands: Any) -> None:
    """Compares layer 0 with the reference: of rows with many queries the last 64."""
    counts = np.minimum(shape.q_lens, 64)
    ends = np.cumsum(shape.q_lens)
    picked = np.concatenate([np.arange(e - c, e) for e, c in zip(ends, counts, strict=True)])
    few = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    (*rows, _), arrays = operands
    expected = jax.jit(functools.partial(step, layer=0, implementation="reference"))(
        q[picked], ((*rows, few), arrays)
    )
    error = worst_error(jax.jit(functools.partial(step, layer=0))(q, operands)[picked], expected)
    # Either may be off by the tolerance, and 8-bit outputs by a step between them.
    limit = 2 * TOLERANCES[shape.dtype][0]
    if (out_dtype := dict(variant.options).get("out_dtype")) is not None:
        limit += float(jnp.finfo(out_dtype).eps)
    if not error <= limit:
        raise AssertionError(f"output differs from the reference by {error:.3g} > {limit:.3g}")


def measure_mla(
    heads: int, new: int, rows: int, context: int, target: Target | None, timer: Timer, dry: bool
) -> None:
    """DeepSeek's sizes: 512 latent and 64 rope dims, one row of the pool for all heads."""
    width, per_row = LATENT + ROPE_DIM, -(-context // MLA_PAGE)
    read = 2 * rows * context * width
    layers = 2 if dry else int(np.clip((1 << 29) // read, 2, MOST_LAYERS))
    keys = jax.random.split(jax.random.key(0), 2)
    pool = (layers, rows * per_row, MLA_PAGE, width)
    pages = jax.random.normal(keys[0], pool, jnp.bfloat16)
    q = jax.random.normal(keys[1], (rows * new, heads, width), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(rows * per_row).astype(np.int32)
    table = jnp.asarray(order.reshape(rows, per_row))
    lens = jnp.full(rows, context, jnp.int32)
    starts = jnp.arange(rows + 1, dtype=jnp.int32) * new

    operands = pages, table, lens, starts

    def attend(q, operands, layer, implementation: Any = "native"):
        return mla_paged_attention(
            q, *operands, sm_scale=0.07, v_head_dim=LATENT, layer=layer,
            implementation=implementation,
        )  # fmt: skip

    def step(q, operands, layer):  # the part of q that the output does not have stays
        return q.at[..., :LATENT].set(attend(q, operands, layer))

    results = (
        jax.jit(functools.partial(attend, layer=0, implementation=implementation))(q, operands)
        for implementation in ("native", "reference")
    )
    error = worst_error(*results)
    if not error <= 2 * TOLERANCES["bfloat16"][0]:
        raise AssertionError(f"output differs from the reference by {error:.3g}")
    pairs = rows * (new * context - (new * new / 2 if new > 1 else 0))
    timer.plain = None
    timer.add(
        step, q, operands, layers, read, 2.0 * heads * pairs * (width + LATENT), target, kind="mla",
        case=f"{heads}/1/{width}", size=f"{rows} x {context}" + (f", {new} new" * (new > 1)),
        dtype="bfloat16",
    )  # fmt: skip


def measure_plan(rows: int, timer: Timer) -> None:
    """A call without a stored token."""
    shape = decode("smollm2_135m", rows, 1)
    pools = gpu_attention.make_pools(shape, 2)
    starts, lens = jnp.arange(rows + 1, dtype=jnp.int32), jnp.zeros(rows, jnp.int32)

    operands = pools.k_pages, pools.v_pages, pools.page_table, lens, starts

    def step(q, operands, layer):
        return ragged_paged_attention(q, *operands, layer=layer, implementation="native")

    timer.plain = None
    timer.add(step, pools.q, operands, 2, 0.0, None, kind="plan", size=f"{rows} empty rows")


def main() -> None:
    report, _ = Report.from_args("Options, 8-bit pages, layouts, MLA and the planner on this GPU.")
    timer, dry = Timer(report), report.dry
    timer.prepare()
    for rows in DRY_PLANNED_ROWS if dry else PLANNED_ROWS:
        report.attempt(
            functools.partial(measure_plan, rows, timer), kind="plan", size=f"{rows} empty rows"
        )
    for i, sizes in enumerate(DRY_MLA if dry else MLA):
        target = MLA_TARGET if i == 0 else None
        report.attempt(
            functools.partial(measure_mla, *sizes, target, timer, dry), kind="mla", size=str(sizes)
        )
    for shape, variants in DRY_GROUPS if dry else GROUPS:
        timer.plain = None
        for variant in variants:

            def run(shape=shape, variant=variant):
                if timer.plain is None and variant is not PLAIN:  # an earlier process timed it
                    measure(shape, PLAIN, timer, dry)
                measure(shape, variant, timer, dry)

            report.attempt(run, kind=f"option {variant.name}", case=shape.case, size=shape.size)
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
