# SPDX-License-Identifier: Apache-2.0
"""What the measured rows should reach, and which of them do not.

Each row should be as fast as each peer that was timed beside it. `GOALS` ask for more, or bound
what an option may cost. `EXCEPTIONS` are rows that cannot reach their goal, each with its proof.

    python benchmarks/run_all.py --check    (lists the rows that miss; the exit status is 1 then)

`documents.py` writes the same into docs/performance.md.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

# Contenders that are no peers: the same call without an option, the least work that there is, the
# projection that adapters are added to.
YARDSTICKS = ("plain", "copied", "linear")
AVX512 = ("avx512", "avx512bf16", "amx")


@dataclasses.dataclass(frozen=True)
class Goal:
    """What the rows of a benchmark should reach that have these fields; () is any.

    measure: a contender, whose time over ours is at least `least`; or "limit", of which our rate is
    at least `least` percent.
    """

    benchmark: str
    measure: str
    least: float
    kinds: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    isa: tuple[str, ...] = ()

    def concerns(self, benchmark: str, isa: str, row: Row) -> bool:
        """Whether the goal is one of this row."""
        fields = (
            (self.kinds, row["kind"]), (self.cases, row["case"]), (self.sizes, row["size"]),
            (self.dtypes, row["dtype"]), (self.isa, isa),
        )  # fmt: skip
        alike = all(not wanted or x in wanted for wanted, x in fields)
        return alike and benchmark == self.benchmark

    def text(self) -> str:
        """The goal as people read it."""
        if self.measure == "limit":
            return f"{self.least:g} % of the limit"
        return f"{self.least:g}× {self.measure}"

    def reached(self, row: Row) -> float | None:
        """How much of the goal a row reached; None where it was not measured."""
        if self.measure == "limit":
            return row.get("percent_of_limit")
        return row["ratio"].get(self.measure)


@dataclasses.dataclass(frozen=True)
class Exempt:
    """A row that cannot reach a goal, and where the proof stands."""

    benchmark: str
    kind: str
    case: str
    size: str
    proof: str
    isa: tuple[str, ...] = AVX512

    def concerns(self, benchmark: str, isa: str, row: Row) -> bool:
        """Whether it is this row."""
        same = (benchmark, row["kind"], row["case"], row["size"]) == (
            self.benchmark, self.kind, self.case, self.size,
        )  # fmt: skip
        return same and isa in self.isa


_LONG = ("8 × 4096", "32 × 4096")
_CHEAP = ("soft_cap", "lse", "fp8 output", "sinks", "alibi_slopes")

GOALS = (
    Goal("attention", "limit", 60, ("decode",), ("qwen3_30b_a3b",), _LONG, ("bfloat16",), AVX512),
    Goal("attention", "limit", 70, ("decode",), ("qwen3_30b_a3b",), _LONG, ("float32",), AVX512),
    Goal("attention", "vllm_cpu", 2, ("decode",), dtypes=("bfloat16",), isa=("avx2",)),
    Goal("attention", "vllm_cpu", 1.7, ("decode",), dtypes=("float32",), isa=("avx2",)),
    Goal("model", "limit", 80, ("decode",), (), ("batch 1",), ("bfloat16", "float32")),
    Goal("model", "limit", 70, ("decode",), (), ("batch 1",), ("int8",)),
    Goal("model", "transformers", 2, ("prefill",), (), (), ("bfloat16", "float32"), AVX512),
    Goal("model", "transformers", 1.6, ("prefill",), (), (), ("float32",), ("avx2",)),
    Goal("options", "plain", 0.95, cases=_CHEAP),
    Goal("options", "plain", 3, cases=("sliding_window",)),
    Goal("cascade", "plain", 3, sizes=("32 × 4096",)),
    Goal("serving", "copied", 0.5, ("weights",)),
)

_PREFILL = "performance.md#prefill-of-whole-models"
_EXPERTS = "performance.md#experts-of-a-few-tokens"

EXCEPTIONS = (
    Exempt("cascade", "cascade", "rows × shared tokens", "32 × 4096",
               "kernels.md#ops-made-of-others"),
    Exempt("model", "prefill", "qwen3_moe_512m", "512 tokens", _PREFILL),
    Exempt("model", "prefill", "smollm2_135m", "512 tokens", _PREFILL, (*AVX512, "avx2")),
    Exempt("projections", "experts", "30b_a3b", "8 tokens", _EXPERTS),
    Exempt("projections", "experts", "30b_a3b", "32 tokens", _EXPERTS),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Miss:
    """A row below a goal."""

    benchmark: str
    row: Row
    goal: Goal
    reached: float
    proof: str | None  # where it stands that the row cannot reach it
    isa: str  # the instruction set that it was measured with

    @property
    def with_isa(self) -> str:
        """What a row's name ends with: the instruction set, where it is not AVX-512."""
        return "" if self.isa in AVX512 else f", {self.isa}"

    def __str__(self) -> str:
        row, unit = self.row, " %" if self.goal.measure == "limit" else "×"
        what = f"{self.benchmark}: {row['kind']}, {row['case']}, {row['size']}, {row['dtype']}"
        return f"{what}{self.with_isa}: {self.reached:.2f}{unit}, the goal is {self.goal.text()}"


def goals_of(benchmark: str, isa: str, row: Row) -> Iterator[Goal]:
    """The goals of a row: those of `GOALS`, and 1× of each peer that has none there."""
    named = [goal for goal in GOALS if goal.concerns(benchmark, isa, row)]
    yield from named
    known = {goal.measure for goal in named}
    for peer in row["ratio"]:
        if peer not in known and peer not in YARDSTICKS:
            yield Goal(benchmark, peer, 1)


def misses(*results: Mapping[str, Mapping[str, Any]]) -> list[Miss]:
    """The rows of result files that are below a goal, and of which of them there is a proof."""
    found = []
    for benchmark, result in itertools.chain.from_iterable(some.items() for some in results):
        isa = result["environment"]["isa"]
        for row in result["rows"]:
            proofs = [x.proof for x in EXCEPTIONS if x.concerns(benchmark, isa, row)]
            for goal in goals_of(benchmark, isa, row):
                reached = goal.reached(row)
                if reached is not None and reached < goal.least:
                    proof = proofs[0] if proofs else None
                    found.append(Miss(benchmark, row, goal, reached, proof, isa))
    return found
