"""Each op with a table of factors, and a function that runs one row of it beside its oracle."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged._linear import linear
from jax_paged.cascade import cascade_attention, cascade_levels
from jax_paged.kv import qkv_norm_rope_write, write_kv
from jax_paged.layout import POOLS
from jax_paged.merge import merge_attention_states
from jax_paged.moe import moe_experts

from .. import cascade, experts, flat, mla, projections, qkv, writes
from ..cases import Batch, Case
from ..options import ATTENTION_FACTORS, attend, attention_case
from ..oracle import TOLERANCES, assert_attention_close, dense_oracle
from .report import Report, Stop

Row = Mapping[str, Any]
WILD = np.array([-(2**31), -7, -1, 0, 1, 2, 5, 2**16, 2**31 - 1])
CONTENTS = 2  # of each row: the second one finds its programs compiled
CLEAR_EVERY = 60  # rows; a process can map only so many programs


@dataclasses.dataclass(frozen=True)
class Op:
    """An op under stress.

    Attributes:
      factors: values of each option, the simplest first.
      run: (row, seed, implementation) → the error as a share of what is allowed, 0 where the
        result is exact. It raises AssertionError if the result is wrong.
      weight: how often the op is drawn.
    """

    factors: Mapping[str, Sequence[Any]]
    run: Callable[[Row, int, str], float]
    weight: int = 1


_DTYPES = ("float32", "bfloat16", "float16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
ATTENTION = ATTENTION_FACTORS | {
    "layout": ("HND", "NHD", "vllm5d"),
    "head_dim": ((64, None), (40, 128), (128, 72), (128, None), (192, 128), (256, None), (8, 8)),
    "page_size": (16, 1, 5, 32, 64),
    "rows": ("decode", "short", "prefill", "mixed"),
    "out_dtype": (None, None, None, None, *_FP8),
}


def _attention(row: Row, seed: int, implementation: Any) -> float:
    if row["layout"] == "vllm5d":
        row = {**row, "kv": None, "scale": None}
    batch, real, options, more = attention_case(row, seed, capacity=420)
    if row["out_dtype"] is not None:
        more |= {"out_dtype": row["out_dtype"], "out_scale": jnp.float32(0.02 + seed % 7)}
    result = _attend(batch, options, more, implementation, seed)
    return _compare(result, dense_oracle(real, **options), batch, more)


def _attend(batch: Batch, options, more, implementation: Any, seed: int):
    if implementation != "emulated":
        return attend(batch, options | more, implementation=implementation)
    emulation = emulator()
    device = emulation.Device(num_workers=1 + seed % 7, stages=2 + seed % 3, seed=seed % 2**31)
    scales = {k: _of_layer(batch, x) for k, x in more.items() if k in ("k_scale", "v_scale")}
    return emulation.emulate(batch, device, **options, **(more | scales))


def emulator() -> Any:
    """The module that runs the CUDA kernels on the CPU; it is a part of the tests."""
    tests = Path.cwd() / "tests"
    if not (tests / "emulation.py").exists():
        raise SystemExit("the emulator needs a checkout: start this in its root")
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    import emulation

    return emulation


def _of_layer(batch: Batch, scale: Any) -> np.ndarray:
    """A scale as the kernels take it: [num_kv_heads] of the layer, or per token of all layers."""
    scale, case = np.float32(scale), batch.case
    if scale.ndim >= 3:
        return scale
    if case.num_layers is not None and scale.ndim:
        scale = scale[batch.layer]
    return np.ascontiguousarray(np.broadcast_to(scale, (case.num_kv_heads,)))


def _compare(result, expected, batch: Batch, more: Mapping[str, Any]) -> float:
    out, lse = result
    if more.get("out_dtype") is None:
        logit_size = max(1.0, abs(batch.sm_scale) * batch.q.shape[-1] ** 0.5)
        return assert_attention_close(out, lse, *expected, logit_size=logit_size)
    dtype, scale = jnp.dtype(more["out_dtype"]), float(more["out_scale"])
    info = jnp.finfo(dtype)
    exact = np.clip(expected[0] / scale, -float(info.max), float(info.max))
    got = np.asarray(out).astype(np.float64)
    # Half a step of the 8-bit dtype, and the error that the result has before it is rounded.
    half_step = np.maximum(np.abs(exact) * float(info.eps), float(info.smallest_subnormal)) / 2
    norm = np.linalg.norm(expected[0], axis=-1, keepdims=True) / scale
    peak = np.abs(expected[0]).max(initial=0) / scale
    relative, of_peak = TOLERANCES[jnp.dtype(batch.q.dtype).name]
    allowed = half_step * 1.001 + relative * norm + of_peak * peak
    error = np.abs(got - exact)
    share = float(np.max(error / np.where(allowed > 0, allowed, 1), initial=0))
    assert not np.isnan(got).any(), "an 8-bit output is NaN"
    assert share <= 1, f"8-bit output: the error is {share:.3g} times what is allowed"
    assert_attention_close(np.zeros_like(expected[0], "f4"), lse, 0 * expected[0], expected[1])
    return share


def _close(result, expected) -> float:
    (out, lse), (exact, exact_lse) = result, expected
    return assert_attention_close(out, lse, exact, exact_lse)


VALUES = {
    name: values for name, values in ATTENTION.items() if name not in ("kv", "scale", "out_dtype")
} | {"wild": ("page_table", "seq_lens", "cu_q_lens", "num_seqs", "layer", "tree", "window", "all")}


def _wild_attention(row: Row, seed: int, implementation: Any) -> float:
    """Any integers at all: what they mean is in the docstrings, and nothing else is read."""
    rng = np.random.default_rng([seed, 5])
    batch, _, options, _ = attention_case(
        {**row, "kv": None, "scale": None, "holes": False}, seed, capacity=420
    )
    clean = {name: getattr(batch, name) for name in ("q", "k_pages", "v_pages")}
    clean = {k: np.where(np.isnan(x), x.dtype.type(0.5), x) for k, x in clean.items()}
    batch = dataclasses.replace(batch, **clean)

    def wild(x, share=0.4):
        x = np.asarray(x)
        return np.where(rng.random(x.shape) < share, rng.choice(WILD, x.shape), x).astype(np.int32)

    def is_wild(name):
        return row["wild"] in (name, "all")

    for name in ("page_table", "seq_lens", "cu_q_lens"):
        if is_wild(name):
            batch = dataclasses.replace(batch, **{name: wild(getattr(batch, name))})
    if is_wild("num_seqs"):
        batch = dataclasses.replace(batch, num_seqs=int(rng.choice(WILD)))
    if is_wild("layer") and batch.layer is not None:
        batch = dataclasses.replace(batch, layer=int(rng.choice(WILD)))
    if is_wild("tree") and "tree" in options:
        options |= {name: wild(options[name]) for name in ("tree", "tree_sizes")}
    if is_wild("window"):
        options["sliding_window"] = wild(np.full(len(batch.seq_lens), 9), 0.7)
    # A distance of 2^31 tokens is no number that ALiBi or a window can work with in 32 bits.
    if options.get("alibi_slopes") is not None:
        options["alibi_slopes"] = None
    result = _attend(batch, options, {}, implementation, seed)
    return _compare(result, dense_oracle(batch, **options), batch, {})


MLA = {
    "sizes": ((48, 32), (576, 512), (24, 24), (40, 8)),
    "heads": (1, 5, 16, 128),
    "dtype": _DTYPES,
    "kv": (None, *_FP8, "int8"),
    "page_size": (8, 1, 5, 64),
    "causal": (True, False),
    "stacked": (False, True),
    "split": ((), ("num_kv_splits", 3), ("split_tokens", 64)),
    "rows": (([1, 1], [200, 33]), ([1, 0, 7, 1], [70, 9, 30, 0]), ([20], [130])),
}


def _mla(row: Row, seed: int, implementation: Any) -> float:
    q_lens, seq_lens = row["rows"]
    width, v_head_dim = row["sizes"]
    batch = mla.make_mla(
        width, v_head_dim, row["heads"], q_lens, seq_lens, dtype=row["dtype"],
        page_size=row["page_size"], num_layers=2 if row["stacked"] else None,
        causal=row["causal"], num_tokens=sum(q_lens) + 3, seed=seed,
    )  # fmt: skip
    options: dict[str, Any] = dict([row["split"]]) if row["split"] else {}
    real = batch
    if row["kv"] is not None:
        options["kv_scale"] = np.float32(0.03 if row["kv"] == "int8" else 0.1)
        batch, real = mla.eight_bit(batch, row["kv"], options["kv_scale"])
    result = mla.attend(batch, implementation=implementation, **options)
    return _close(result, dense_oracle(real))


RAGGED = {
    "dtype": _DTYPES,
    "sizes": ((6, 2, 32, 24), (4, 4, 64, None), (8, 1, 128, None), (3, 3, 80, 40)),
    "rows": (([1, 1], [90, 7]), ([7, 1, 0, 3, 40], [7, 80, 4, 1, 70]), ([33], [200])),
    "causal": (True, False),
    "sliding_window": (None, 5, 64),
    "soft_cap": (None, 2.0),
    "alibi": (False, True),
    "sinks": (False, True),
    "dead": (0, 1),
}


def _ragged(row: Row, seed: int, implementation: Any) -> float:
    heads, kv_heads, dim, v_dim = row["sizes"]
    case = Case("flat", heads, kv_heads, dim, v_head_dim=v_dim, causal=row["causal"])
    q_lens, kv_lens = row["rows"]
    made = flat.make_flat(
        q_lens, kv_lens, case=case, dtype=row["dtype"], live=len(q_lens) - row["dead"], seed=seed
    )
    rng = np.random.default_rng([seed, 1])
    options: dict[str, Any] = {name: row[name] for name in ("sliding_window", "soft_cap")}
    if row["alibi"]:
        options["alibi_slopes"] = np.float32(rng.uniform(0.001, 0.5, heads))
    if row["sinks"]:
        options["sinks"] = rng.standard_normal(heads, "f4")
    result = made.attend(implementation=implementation, **options)
    return _close(result, dense_oracle(made.paged, **options))


CASCADE = {
    "dtype": _DTYPES,
    "sizes": ((6, 2, 32), (4, 4, 64), (8, 1, 128)),
    "page_size": (8, 1, 16),
    "rows": (2, 5, 9),
    "num_levels": (2, 3, 4),
    "queries": ("one", "few"),
    "soft_cap": (None, 3.0),
}


def _cascade(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    heads, kv_heads, dim = row["sizes"]
    case = Case("shared", heads, kv_heads, dim, page_size=row["page_size"])
    pattern = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(row["rows"])]
    q_lens = list(rng.integers(0, 4, row["rows"])) if row["queries"] == "few" else None
    last = min(3, row["page_size"])
    if q_lens is not None:
        lengths = [(len(pages) - 1) * row["page_size"] + last for pages in pattern]
        q_lens = [min(q, n) for q, n in zip(q_lens, lengths, strict=True)]
    batch = cascade.share(
        pattern, last=last, q_lens=q_lens, dtype=row["dtype"], case=case, seed=seed
    )
    q, k_pages, v_pages, page_table, seq_lens = batch.operands()
    cu_q_lens, num_seqs = jnp.asarray(batch.cu_q_lens), jnp.int32(batch.num_seqs)
    levels = cascade_levels(
        page_table, seq_lens, cu_q_lens, num_seqs, page_size=row["page_size"],
        num_levels=row["num_levels"],
    )  # fmt: skip
    options = {"soft_cap": row["soft_cap"]}
    result = cascade_attention(
        q, k_pages, v_pages, levels, cu_q_lens, num_seqs, return_lse=True,
        implementation=implementation, **options,
    )  # fmt: skip
    return _close(result, dense_oracle(batch, **options))


MERGE = {
    "dtype": _DTYPES,
    "head_dim": (64, 8, 24, 80, 128, 512),
    "tokens": (1, 7, 300),
    "num_q_heads": (3, 1, 32),
    "gap": (0.0, 5.0, 80.0),
}


def _merge(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng(seed)
    shape = (row["tokens"], row["num_q_heads"], row["head_dim"])
    outs = [rng.standard_normal(shape, "f4").astype(jnp.dtype(row["dtype"])) for _ in "ab"]
    lses = [rng.uniform(-row["gap"] / 2, row["gap"] / 2, shape[:2]).astype("f4") for _ in "ab"]
    a, lse_a, b, lse_b = map(jnp.asarray, (outs[0], lses[0], outs[1], lses[1]))
    merged = merge_attention_states(a, lse_a, b, lse_b, implementation=implementation)
    lse = np.logaddexp(*(x.astype("f8") for x in lses))
    weights = [np.exp(x.astype("f8") - lse)[..., None] for x in lses]
    expected = sum(w * x.astype("f8") for w, x in zip(weights, outs, strict=True))
    return _close(merged, (expected, lse))


WRITE = {
    "layout": ("HND", "NHD", "vllm5d"),
    "page_size": (5, 1, 8, 16, 64),
    "stacked": (False, True),
    "dtype": _DTYPES,
    "tokens": (6, 0, 1, 70),
    "slots": ("all", "some", "doubled", "wild"),
    "layer": ("inside", "wild"),
}


def _write(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    num_layers = 3 if row["stacked"] else None
    pools = writes.make_pools(
        row["page_size"], layout=row["layout"], num_layers=num_layers,
        dtype=jnp.dtype(row["dtype"]), num_pages=20,
    )  # fmt: skip
    tokens = writes.make_tokens(row["tokens"], jnp.dtype(row["dtype"]))
    num_slots = 20 * row["page_size"]
    slots = np.resize(rng.permutation(num_slots), row["tokens"])
    if row["slots"] == "some":
        slots = np.where(rng.random(slots.shape) < 0.4, -1, slots)
    elif row["slots"] == "doubled":
        slots = slots % 4
    elif row["slots"] == "wild":
        slots = np.where(rng.random(slots.shape) < 0.5, rng.choice(WILD, slots.shape), slots)
    slots = slots.astype(np.int32)
    layer = None
    if num_layers is not None:
        layer = int(rng.choice(WILD)) if row["layer"] == "wild" else int(rng.integers(num_layers))
    k_pages, v_pages = map(jnp.array, pools)
    k, v = map(jnp.asarray, tokens)
    written = write_kv(
        k_pages, v_pages, k, v, jnp.asarray(slots),
        layer=None if layer is None else jnp.int32(layer), layout=row["layout"],
        implementation=implementation,
    )  # fmt: skip
    for pool, out, pages, new in zip(POOLS, written, pools, tokens, strict=True):
        expected = writes.expected_write(pages, new, slots, layer, row["layout"], pool)
        np.testing.assert_array_equal(writes.bits(out), writes.bits(expected), err_msg=pool)
    return 0.0


QKV = {
    "dtype": _DTYPES,
    "sizes": ((64, None, (5, 2)), (128, None, (32, 4)), (80, 40, (4, 4)), (24, 16, (3, 1))),
    "rotary": ("all", "part"),
    "style": ("half", "interleaved"),
    "norms": ("qk", "q", "k", ""),
    "stacked": (False, True),
    "layout": ("HND", "NHD"),
    "tokens": (7, 0, 1, 60),
    "page_size": (5, 1, 16),
    "wild": (False, True),
}


def _qkv(row: Row, seed: int, implementation: Any) -> float:
    rng = np.random.default_rng([seed, 1])
    head_dim, v_head_dim, heads = row["sizes"]
    call = qkv.make_call(
        row["dtype"], head_dim, v_head_dim, heads, style=row["style"], norms=row["norms"],
        rotary_dim=head_dim if row["rotary"] == "all" else head_dim // 2,
        num_layers=3 if row["stacked"] else None, layout=row["layout"], tokens=row["tokens"],
        page_size=row["page_size"], num_pages=15, seed=seed,
    )  # fmt: skip
    if row["wild"]:
        places = rng.random(row["tokens"])
        wild = rng.choice(WILD, (2, row["tokens"])).astype("i4")
        slots = np.where((places < 0.3) & ((wild[0] < 0) | (wild[0] > 2**15)), wild[0],
                         call.slot_mapping)  # fmt: skip
        positions = np.where(places > 0.7, wild[1], call.positions)
        call = dataclasses.replace(call, slot_mapping=slots, positions=positions)
    operands = {
        field.name: jnp.array(getattr(call, field.name))
        for field in dataclasses.fields(call)
        if isinstance(getattr(call, field.name), np.ndarray)
    }
    results = qkv_norm_rope_write(
        **operands, eps=call.eps, num_q_heads=call.num_q_heads, style=call.style,
        rotary_dim=2 * call.cos.shape[1], layout=call.layout, implementation=implementation,
        layer=None if call.layer is None else jnp.int32(call.layer),
    )  # fmt: skip
    qkv.check_results(call, [np.array(x) for x in results])
    return 0.0


_SHAPES = ((8, 1), (24, 5), (40, 16), (1032, 33), (2120, 17), (64, 300))
LINEAR = {
    "dtype": _DTYPES,
    "shape": _SHAPES,
    "rows": (1, 0, 2, 3, 5, 8, 17, 130),
    "kind": (None, "int8", "float8_e4m3fn"),
}


def _linear(row: Row, seed: int, implementation: Any) -> float:
    depth, columns = row["shape"]
    dtype = jnp.dtype(row["dtype"])
    if row["kind"] is None:
        x, weight = projections.make_case(row["rows"], depth, columns, dtype, seed)
        expected, options = projections.oracle(x, weight), {}
    else:
        kind = jnp.int8 if row["kind"] == "int8" else jnp.float8_e4m3fn
        x, weight, scale = projections.make_codes(kind, row["rows"], depth, columns, dtype, seed)
        expected, options = projections.oracle(x, weight, scale), {"weight_scale": scale}
    out = linear(x, weight, out_dtype=jnp.float32, implementation=implementation, **options)
    return _share(out, expected, 1e-5 * depth**0.5)


EXPERTS = {
    "dtype": ("float32", "bfloat16"),
    "sizes": ((16, 24), (72, 40), (128, 96)),
    "tokens": (1, 0, 5, 70),
    "experts": ((4, 2), (8, 8), (64, 4), (5, 3)),
    "kind": (None, "int8", "float8_e4m3fn"),
    "wild": (False, True),
}


def _experts(row: Row, seed: int, implementation: Any) -> float:
    (num_experts, k), (hidden, inner) = row["experts"], row["sizes"]
    case = experts.make_case(
        row["tokens"], num_experts, k, hidden, inner, seed, jnp.dtype(row["dtype"])
    )
    scales, meant = {}, case
    if row["kind"] is not None:
        kind = jnp.int8 if row["kind"] == "int8" else jnp.float8_e4m3fn
        case, scales, meant = experts.quantized(kind, case)
    if row["wild"]:  # such an expert adds nothing
        rng = np.random.default_rng([seed, 1])
        ids, weights = np.array(case[3]), np.array(case[4])
        wild = rng.random(ids.shape) < 0.3
        ids[wild] = rng.choice(WILD[[0, 1, 2, 7, 8]], int(wild.sum()))
        case = [*case[:3], jnp.asarray(ids), case[4]]
        meant = [*meant[:3], np.where(wild, 0, ids), np.where(wild, 0, weights)]
    x, gate_up, down, ids, weights = case
    out = moe_experts(x, gate_up, down, ids, weights, **scales, implementation=implementation)
    expected = experts.oracle(*meant)
    tolerance = 2e-5 if row["dtype"] == "float32" else 0.04
    return _share(out, expected, tolerance)


def _share(out, expected, tolerance: float) -> float:
    out = np.asarray(out, np.float64)
    assert out.shape == expected.shape, (out.shape, expected.shape)
    error = np.abs(out - expected) / (tolerance + 1e-5 * np.abs(expected))
    share = float(np.max(error, initial=0))
    assert share <= 1, f"the error is {share:.3g} times what is allowed"
    return share


OPS = {
    "attention": Op(ATTENTION, _attention, weight=12),
    "mla": Op(MLA, _mla, weight=2),
    "ragged_attention": Op(RAGGED, _ragged, weight=2),
    "cascade_attention": Op(CASCADE, _cascade),
    "merge_attention_states": Op(MERGE, _merge),
    "write_kv": Op(WRITE, _write, weight=2),
    "qkv_norm_rope_write": Op(QKV, _qkv, weight=2),
    "linear": Op(LINEAR, _linear, weight=2),
    "moe_experts": Op(EXPERTS, _experts, weight=2),
}
WILD_OPS = {
    "attention, wild integers": Op(VALUES, _wild_attention, weight=3),
    "write_kv, wild integers": Op(
        WRITE | {"slots": ("wild",), "layer": ("wild", "inside")}, _write
    ),
    "qkv_norm_rope_write, wild integers": Op(QKV | {"wild": (True,)}, _qkv),
    "moe_experts, wild integers": Op(EXPERTS | {"wild": (True,)}, _experts),
}
EMULATED = ("attention", "attention, wild integers")


def draw(ops: Mapping[str, Op], seed: int, number: int) -> tuple[str, tuple[int, ...]]:
    """Case `number`: an op, and which value each of its factors has."""
    rng = np.random.default_rng([seed, number])
    weights = np.array([op.weight for op in ops.values()], float)
    name = list(ops)[rng.choice(len(ops), p=weights / weights.sum())]
    return name, tuple(int(rng.integers(len(v))) for v in ops[name].factors.values())


def row_of(op: Op, picks: Sequence[int]) -> dict[str, Any]:
    """The values that the picks stand for."""
    factors = op.factors.items()
    return {name: values[i] for (name, values), i in zip(factors, picks, strict=True)}


def run(
    report: Report, stop: Stop, seed: int, *, ops: Mapping[str, Op] = OPS, begin: int = 0,
    implementation: str = "native", contents: int = CONTENTS,
) -> int:  # fmt: skip
    """Runs cases from number `begin` on; returns the number of the next one."""
    if implementation == "emulated":
        ops = {name: op for name, op in ops.items() if name in EMULATED}
    for number in itertools.count(begin):
        if stop.is_due() or report.is_hopeless:
            return number
        if number % CLEAR_EVERY == 0:
            jax.clear_caches()
        name, picks = draw(ops, seed, number)
        op = ops[name]
        for content in range(contents):
            of_case = number * contents + content
            stop.done += 1
            if failure := failure_of(op, picks, of_case, implementation, report, name):
                small = minimal(op, picks, of_case, implementation)
                where = f"{name}/{'.'.join(map(str, small))}/{of_case}"
                report.fail(
                    f"{name} {row_of(op, small)}: {failure}\nrepeat it by: python -m "
                    f"jax_paged.testing.stress --implementation {implementation} --case '{where}'"
                )
    raise AssertionError("unreachable")


def failure_of(
    op: Op, picks: Sequence[int], seed: int, implementation: str, report: Report | None = None,
    name: str = "",
) -> str | None:  # fmt: skip
    """What is wrong with a case, None = nothing; counts it in the report."""
    row = row_of(op, picks)
    try:
        share = op.run(row, seed, implementation)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:600]}"
    if report is not None:
        where = f"{name}/{'.'.join(map(str, picks))}/{seed}"
        report.add(name, row, share=share or None, where=where)
    return None


def minimal(op: Op, picks: Sequence[int], seed: int, implementation: str) -> tuple[int, ...]:
    """A case that fails too, with as many factors as possible at their simplest values."""
    picks, changed = list(picks), True
    while changed:
        changed = False
        for place, pick in enumerate(picks):
            if pick:
                trial = [*picks[:place], 0, *picks[place + 1 :]]
                if failure_of(op, trial, seed, implementation):
                    picks, changed = trial, True
    return tuple(picks)
