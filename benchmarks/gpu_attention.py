# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: decode or prefill attention, against ceilings and peers of this run.

    python benchmarks/gpu_attention.py decode|prefill --rows FILE [--dry]

Every layer of a stacked pool is one set of inputs; the calls of a chain take the layers in turn,
and together the layers are several times larger than the L2 cache. The output of a call is the
query of the next, so a chain runs in order and needs nothing else. It is one jitted program: XLA
replays it as a command buffer (a CUDA graph) where that is on.

GB/s counts each K and V byte of the sequences once. TFLOP/s counts 4 · head_dim FLOPs per query
head, query and key, half of the square of new tokens where causal.
"""

import dataclasses
import functools

import gpu_peers
import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Report, median_ratio, per_call, percent, rate, seconds_of, worst_error

from jax_paged.testing import CASES, TOLERANCES, Case

ROTATED_BYTES = 1 << 30  # of K and V over all layers of a pool
MOST_LAYERS = 64
LONGEST_CHAIN = 192


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch to time.

    target: (figure, "min" or "max", value), what it must reach on an H100 and on an H200; where
    that is a rate, `target_h100` is for an H100, in percent of the same unit measured there.
    """

    case: str
    q_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    causal: bool = True
    peers: tuple[str, ...] = ()
    target: tuple[str, str, float] | None = None
    target_h100: tuple[str, str, float] | None = None

    @property
    def size(self) -> str:
        rows, most = len(self.seq_lens), max(self.seq_lens)
        lens = f"{most}" if min(self.seq_lens) == most else f"{min(self.seq_lens)}..{most}"
        new = "" if max(self.q_lens) == 1 else f", {sum(self.q_lens)} new"
        return f"{rows} x {lens}{new}{'' if self.causal else ', full'}"

    def kv_bytes(self) -> int:
        case = CASES[self.case]
        item = jnp.dtype(self.dtype).itemsize
        return 2 * sum(self.seq_lens) * case.num_kv_heads * case.head_dim * item

    def flops(self) -> float:
        case = CASES[self.case]
        pairs = sum(
            q * n - (q * q / 2 if self.causal else 0)
            for q, n in zip(self.q_lens, self.seq_lens, strict=True)
        )
        return 4.0 * case.head_dim * case.num_q_heads * pairs


def decode(case: str, rows: int, context: int, **rest) -> Shape:
    return Shape(case, (1,) * rows, (context,) * rows, **rest)


def prefill(case: str, rows: int, tokens: int, **rest) -> Shape:
    return Shape(case, (tokens,) * rows, (tokens,) * rows, **rest)


DECODE_PEERS = ("xla_gather", "pallas", "cudnn", "torch_sdpa", "flashinfer")
PREFILL_PEERS = ("cudnn", "torch_sdpa", "flashinfer")
NEVER_BEHIND = ("cudnn", "flashinfer")  # in decode
_MIXED = tuple(int(n) for n in np.random.default_rng(0).integers(1, 8192, 64))

SHAPES = {
    "decode": (
        decode("qwen3_30b_a3b", 32, 4096, peers=DECODE_PEERS,
               target=("percent_of_copy", "min", 85)),
        decode("qwen3_30b_a3b", 64, 4096, peers=DECODE_PEERS,
               target=("percent_of_copy", "min", 90)),
        decode("qwen3_30b_a3b", 1, 4096, peers=DECODE_PEERS, target=("us", "max", 9)),
        decode("qwen3_30b_a3b", 8, 4096),
        Shape("qwen3_30b_a3b", (1,) * 64, _MIXED, peers=("flashinfer",)),
        decode("llama3_8b", 32, 4096),
        decode("smollm2_135m", 64, 4096),
        decode("gemma_mqa", 64, 8192),
        decode("qwen3_30b_a3b", 32, 4096, dtype="float16"),
        decode("qwen3_30b_a3b", 8, 4096, dtype="float32"),
    ),
    "prefill": (
        prefill("qwen3_30b_a3b", 1, 8192, peers=PREFILL_PEERS,
                target=("tflop_per_s", "min", 280), target_h100=("percent_of_matmul", "min", 35)),
        prefill("qwen3_30b_a3b", 1, 8192, causal=False, peers=PREFILL_PEERS,
                target=("tflop_per_s", "min", 330), target_h100=("percent_of_matmul", "min", 42)),
        prefill("llama3_8b", 4, 2048, peers=PREFILL_PEERS),
        Shape("qwen3_30b_a3b", (512,), (8192,), peers=("flashinfer",)),
        Shape("qwen3_30b_a3b", (1,) * 32 + (2048,), (4096,) * 32 + (2048,)),
    ),
}  # fmt: skip
DRY_SHAPES = {
    "decode": (
        decode("smollm2_135m", 2, 128, peers=DECODE_PEERS, target=("percent_of_copy", "min", 85)),
        Shape("smollm2_135m", (1, 1), (40, 100), peers=("flashinfer", "torch_sdpa")),
    ),
    "prefill": (
        prefill("smollm2_135m", 1, 64, peers=PREFILL_PEERS, target=("tflop_per_s", "min", 280)),
        prefill("smollm2_135m", 1, 64, causal=False, peers=PREFILL_PEERS),
        Shape("smollm2_135m", (1, 1, 20), (30, 64, 20)),
    ),
}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def make_pools(shape: Shape, num_layers: int) -> gpu_peers.Pools:
    """Random queries and pages; a row's pages lie anywhere in the pool."""
    case = CASES[shape.case]
    page = case.page_size
    counts = [-(-n // page) for n in shape.seq_lens]
    order = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
    table = np.full((len(counts), max(counts)), -1, np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        table[row, :count] = order[end - count : end]
    dtype = jnp.dtype(shape.dtype)
    pool = (num_layers, sum(counts), case.num_kv_heads, page, case.head_dim)
    keys = jax.random.split(jax.random.key(2), 3)
    q = (sum(shape.q_lens), case.num_q_heads, case.head_dim)
    return gpu_peers.Pools(
        q=_normal(keys[0], q, dtype),
        k_pages=_normal(keys[1], pool, dtype),
        v_pages=_normal(keys[2], pool, dtype),
        page_table=jnp.asarray(table),
        q_lens=np.array(shape.q_lens, np.int32),
        seq_lens=np.array(shape.seq_lens, np.int32),
        causal=shape.causal,
    )


def check(shape: Shape, pools: gpu_peers.Pools, out: jax.Array) -> float:
    """The worst relative error of `out` (layer 0), by the jnp reference; raises when too large.

    Of rows with many queries the last 64 are compared: they see every key.
    """
    counts = np.minimum(pools.q_lens, 64)
    ends = np.cumsum(pools.q_lens)
    picked = np.concatenate([np.arange(e - c, e) for e, c in zip(ends, counts, strict=True)])
    few = dataclasses.replace(pools, q=pools.q[picked], q_lens=counts)
    expected = gpu_peers.chain(few, "reference", 1)
    error = worst_error(out[picked], expected)
    limit = 2 * TOLERANCES[shape.dtype][0]  # either may be off by the tolerance
    if not error <= limit:
        raise AssertionError(f"output differs from the reference by {error:.3g} > {limit:.3g}")
    return error


def measure(shape: Shape, best: dict[str, float | None], report: Report) -> None:
    """Times one shape and its peers; adds a row."""
    case: Case = CASES[shape.case]
    kind = "decode" if max(shape.q_lens) == 1 else "prefill"
    num_layers = int(np.clip(-(-ROTATED_BYTES // shape.kv_bytes()), 2, MOST_LAYERS))
    budget_s = 0.02 if report.dry else 1.0
    pools = make_pools(shape, 2 if report.dry else num_layers)
    error = check(shape, pools, gpu_peers.chain(pools, "native", 1))
    once = min(
        seconds_of(lambda: jax.block_until_ready(gpu_peers.chain(pools, "native", 1)))
        for _ in range(2)
    )

    def lengths(slower: float = 1.0, most: int = LONGEST_CHAIN) -> tuple[int, int]:
        """Chains of up to about a third of a second that pass through all layers, if they can."""
        most = min(most, max(3 * num_layers, 24))
        long = 3 if report.dry else int(np.clip(0.3 / (once * slower), 3, most))
        return max(long // 4, 1), long

    timing = per_call(
        lambda calls: seconds_of(
            lambda: jax.block_until_ready(gpu_peers.chain(pools, "native", calls))
        ),
        *lengths(), budget_s=budget_s,
    )  # fmt: skip
    report.check_time(timing)
    gb_per_s = rate(shape.kv_bytes() / 1e9, timing.median)
    tflop_per_s = rate(shape.flops() / 1e12, timing.median)
    row = {
        "kind": kind,
        "case": f"{case.num_q_heads}/{case.num_kv_heads}/{case.head_dim}",
        "size": shape.size,
        "dtype": shape.dtype,
        "us": 1e6 * timing.median,
        "percentiles": [1e6 * timing.p10, 1e6 * timing.p90],
        "mb": shape.kv_bytes() / 1e6,
        "gb_per_s": gb_per_s,
        "tflop_per_s": tflop_per_s,
        "percent_of_copy": percent(gb_per_s, best["copy_gb_per_s"]),
        "percent_of_matmul": percent(tflop_per_s, best["bf16_tflop_per_s"]),
        "worst_error": error,
        "target": shape.target,
        "target_h100": shape.target_h100,
    }
    report.add(**row)
    for name in shape.peers:
        what = {"kind": f"{kind} peer", "case": row["case"], "size": shape.size, "peer": name}

        def time_peer(name=name, what=what):
            try:
                peer = gpu_peers.PEERS[name](pools, report.dry)
            except gpu_peers.Unavailable as reason:
                report.add(**what, skipped=str(reason))
                return
            limit = 4 * TOLERANCES[shape.dtype][0]  # peers may round more than once
            error = worst_error(peer.output(), gpu_peers.chain(pools, "native", 1))
            if not error <= limit:
                raise AssertionError(f"differs from native by {error:.3g} > {limit:.3g}")
            slower = max(1.0, seconds_of(lambda: peer.run(1)) / once)
            taken = per_call(
                lambda calls: seconds_of(lambda: peer.run(calls)),
                *lengths(slower, peer.longest_chain), budget_s=budget_s,
            )  # fmt: skip
            report.check_time(taken)
            ratio = median_ratio(taken, timing)
            must = ("ratio", "min", 1.0) if kind == "decode" and name in NEVER_BEHIND else None
            us = 1e6 * taken.median
            report.add(**what, dtype=shape.dtype, us=us, ratio=ratio, target=must)

        report.attempt(time_peer, **what)


def main() -> None:
    report, args = Report.from_args(
        "Decode or prefill attention on this GPU.",
        kind={"choices": list(SHAPES)},
    )
    best = report.ceilings()
    for shape in (DRY_SHAPES if report.dry else SHAPES)[args.kind]:
        what = {"kind": args.kind, "case": shape.case, "size": shape.size, "dtype": shape.dtype}
        report.attempt(functools.partial(measure, shape, best, report), **what)
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
