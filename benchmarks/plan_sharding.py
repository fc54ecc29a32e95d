# SPDX-License-Identifier: Apache-2.0
"""Memory, exchange and step times of Qwen3-MoE over several GPUs, on paper.

    python benchmarks/plan_sharding.py [--write]    (--write: into docs/sharding.md)

The bytes are those of our own code: the weights of a `Decoder` of shapes on a mesh, the state of an
`Engine` on it, and the collectives of its step, which tests compare with those that XLA compiles.
The times are these bytes, products and collectives over the rates of `GPU`. They are added up, as
if nothing ran beside anything else. Nothing here was measured.
"""

import argparse
import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from documents import ROOT, replace
from jax.sharding import AbstractMesh
from model_steps import SIZES

from jax_paged import KVState, kv_dtype
from jax_paged.models import Decoder, DecoderConfig, config_from_hf
from jax_paged.models.decoder.parameters import abstract_source
from jax_paged.models.decoder.partition import DP, TP, Partition
from jax_paged.models.decoder.parts import WeightDtype
from jax_paged.models.decoder.protocol import split_model
from jax_paged.models.serving.step import EngineState


@dataclasses.dataclass(frozen=True)
class GPU:
    """What is assumed of a GPU and its links. Bytes, bytes per second (links: each way), FLOP/s.

    The first four and the network are those of NVIDIA's data sheets of the H200, DGX H200 and DGX
    B200: one ConnectX-7 of 400 Gb/s for each GPU. All below is assumed.
    """

    name: str
    memory: float
    read: float
    nvlink: float
    # docs/kernels/prefill.md predicts 330 to 380 TFLOP/s of mma.sync on the 132 multiprocessors of
    # an H200; B200 has 148.
    products: float
    network: float = 50e9
    per_host: int = 8
    reached: float = 0.8  # of the three rates of bytes
    usable: float = 0.92  # of the memory, for weights and state
    collective_s: float = 12e-6  # beside its bytes, in a host
    crossing_s: float = 30e-6  # the same between hosts
    expert_tokens: int = 64  # for which an expert is read once (docs/kernels.md)


H200 = GPU("H200", memory=141e9, read=4.8e12, nvlink=450e9, products=350e12)
B200 = GPU("B200", memory=180e9, read=8e12, nvlink=900e9, products=390e12)

# For each GPU of a layout: rows that decode, each of so many tokens, and tokens of a prefill step.
ROWS, CONTEXT, PREFILL_TOKENS = 32, 8192, 1024
PAGE_SIZE = 16
LAYOUTS = {  # (tp, dp)
    "qwen3_30b_a3b": ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1), (4, 2), (1, 8)),
    "qwen3_235b_a22b": ((8, 1), (4, 2), (1, 8), (16, 1), (4, 4), (1, 16), (4, 16), (1, 64)),
}
TABLES = (("qwen3_30b_a3b", H200), ("qwen3_235b_a22b", H200), ("qwen3_235b_a22b", B200))
TITLES = {"qwen3_30b_a3b": "Qwen3-30B-A3B", "qwen3_235b_a22b": "Qwen3-235B-A22B"}


class Collective(NamedTuple):
    """One of a step, as a device sees it."""

    kind: str  # XLA's name
    over: str  # a mesh axis
    # Bytes of each array that is gathered, reduced or scattered; of an exchange those of the rows
    # that a device has for all, on average.
    sizes: tuple[float, ...]
    is_beside: bool = False  # experts work on the other half of the tokens while it runs

    def sent(self, devices: int) -> float:
        """Bytes that each of so many devices sends, in a ring or to each other."""
        return (1 + (self.kind == "all-reduce")) * (devices - 1) / devices * sum(self.sizes)


class Exchange(NamedTuple):
    """The collectives of a step, summed up for one GPU."""

    nvlink: float  # bytes sent
    network: float
    count: int
    seconds: float


class Step(NamedTuple):
    """Seconds of a step, all added up; of its exchange; and of that what runs beside experts."""

    seconds: float
    exchange: float
    beside: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model on a mesh of shapes: what a device holds, and what a step does.

    Args:
      weight_dtype, kv_dtype: as for `Decoder` and `generate`.
      dtype: of the other weights, and of what layers pass on.
    """

    config: DecoderConfig
    tp: int
    dp: int
    weight_dtype: WeightDtype = None
    kv_dtype: str = "auto"
    dtype: str = "bfloat16"

    @property
    def mesh(self) -> Any:  # a `Mesh` for all that has no values
        return AbstractMesh((self.dp, self.tp), (DP, TP))

    @property
    def partition(self) -> Partition:
        return dataclasses.replace(Partition.create(self.config, self.mesh), is_inside=True)

    def weights(self) -> tuple[Counter[str], Counter[str]]:
        """(bytes, numbers) that a device has of the experts, the embedding, the head and the rest.

        All layers are alike, so that one is looked at.
        """
        config = dataclasses.replace(self.config, num_layers=1, moe_layers=(True,))
        source = abstract_source(config, self.dtype)
        model = Decoder(config, source, weight_dtype=self.weight_dtype, mesh=self.mesh)
        num_bytes, numbers = Counter(), Counter()
        for path, x in jax.tree_util.tree_leaves_with_path(split_model(model)[1]):
            names = [str(getattr(key, "key", "")).removesuffix("_scale") for key in path]
            is_expert = "mlp" in names and "router" not in names
            kind = next((name for name in names if name in ("embedding", "head")), "rest")
            kind = "experts" if is_expert else kind
            size = math.prod(x.sharding.shard_shape(x.shape))
            size *= self.config.num_layers if "layers" in names else 1
            num_bytes[kind] += size * x.dtype.itemsize
            numbers[kind] += size if x.ndim > 1 else 0
        return num_bytes, numbers

    def state(self, max_seqs: int, context: int) -> EngineState:
        """The shapes of a replica's state on a device, with pages for so many rows."""
        config, pages = self.config, -(-context // PAGE_SIZE)

        def create():
            state = KVState.create(
                num_layers=config.num_layers, num_pages=max_seqs * pages, page_size=PAGE_SIZE,
                num_kv_heads=self.partition.num_kv_heads, head_dim=config.head_dim,
                max_seqs=max_seqs, pages_per_seq=pages, dtype=kv_dtype(self.kv_dtype, self.dtype),
            )  # fmt: skip
            return EngineState.create(state, config.vocab_size)

        return jax.eval_shape(create)

    def collectives(self, tokens: int, rows: int) -> list[Collective]:
        """Those of an engine's step of so many tokens and rows on each replica."""
        config, partition = self.config, self.partition
        hidden, k = config.hidden_size, config.experts_per_token
        x = jnp.dtype(self.dtype).itemsize * hidden  # bytes of a token
        found = []
        if partition.splits_vocab:
            found.append(Collective("all-reduce", TP, (tokens * x,)))
            found.append(Collective("all-gather", TP, (4 * rows * config.vocab_size,)))
        exchanges = partition.exchanges_tokens(tokens, k, x)
        halves = partition.in_halves(tokens, k, config.num_experts) and not exchanges
        for is_mixture in config.moe_layers:
            found.append(Collective("all-reduce", TP, (4 * tokens * hidden,)))
            parts = [tokens]
            if is_mixture and halves:
                parts = [tokens // 2, tokens - tokens // 2]
            for number, part in enumerate(parts):
                every, own = self.dp * part, list[Collective]()
                if is_mixture and partition.shares_tokens and not exchanges:
                    sizes = every * x, 4 * every * k, 4 * every * k  # x, its experts, their weights
                    own.append(Collective("all-gather", DP, sizes, number == 1))
                    own.append(Collective("reduce-scatter", DP, (4 * every * hidden,)))
                if is_mixture and exchanges:
                    own += self.all_to_all(part)
                if self.tp > 1 and (not is_mixture or TP in partition.expert_axes):
                    own.append(Collective("all-reduce", TP, (4 * part * hidden,)))
                if len(parts) == 2 and number == 0:
                    own[-1] = own[-1]._replace(is_beside=True)
                found += own
        found.append(Collective("all-gather", DP, (4 * self.dp * rows,)))  # what was drawn
        return [one for one in found if self.mesh.shape[one.over] > 1]

    def all_to_all(self, tokens: int) -> list[Collective]:
        """Those of a layer whose tokens go to the devices of their experts, if drawn at random."""
        hidden, k = self.config.hidden_size, self.config.experts_per_token
        devices = self.partition.num_expert_devices
        rows = self.dp * tokens * (1 - (1 - 1 / devices) ** k)
        of_row = 8 * k, jnp.dtype(self.dtype).itemsize * hidden, 4 * hidden  # the last: the sums
        counts = Collective("all-gather", DP, (4 * self.dp**2,))
        return [counts, *(Collective("ragged-all-to-all", DP, (rows * size,)) for size in of_row)]

    def seconds(self, gpu: GPU, one: Collective) -> tuple[float, float]:
        """(seconds of a collective, bytes that each network card sends)."""
        devices, sent = self.mesh.shape[one.over], one.sent(self.mesh.shape[one.over])
        members = min(max(gpu.per_host // (self.tp if one.over == DP else 1), 1), devices)
        # A ring leaves a host once, and a host's members of it share their network cards.
        share = 1 / members
        if one.kind == "ragged-all-to-all":
            share = (devices - members) / (devices - 1)
        crossing = sent * share if devices > members else 0.0
        bare = max(sent / gpu.nvlink, crossing / gpu.network) / gpu.reached
        return bare + (gpu.crossing_s if crossing else gpu.collective_s), crossing

    def exchange(self, gpu: GPU, tokens: int, rows: int) -> Exchange:
        """What the collectives of such a step cost."""
        found = self.collectives(tokens, rows)
        sent = sum(one.sent(self.mesh.shape[one.over]) for one in found)
        seconds, network = zip((0.0, 0.0), *(self.seconds(gpu, one) for one in found), strict=True)
        return Exchange(sent, sum(network), len(found), sum(seconds))

    def step(self, gpu: GPU, tokens: int, rows: int, kv_tokens: int, context: float) -> Step:
        """What a step takes.

        Args:
          tokens, rows: of each replica.
          kv_tokens: whose K and V are read.
          context: that a token attends to, on average.
        """
        config, partition = self.config, self.partition
        num_bytes, numbers = self.weights()
        pools = self.state(1, PAGE_SIZE).state
        of_page = bytes_of((pools.k_pages, pools.v_pages, pools.k_scale, pools.v_scale))
        every = tokens * (self.dp if partition.shares_tokens else 1)
        share = config.experts_per_token / config.num_experts
        used = max(1 - (1 - share) ** every, every * share / gpu.expert_tokens)
        products = 4 * tokens * context * partition.num_q_heads * config.head_dim
        experts, *rest = (
            max(size / gpu.read / gpu.reached, flop / gpu.products)
            for size, flop in (
                (num_bytes["experts"] * used, 2 * numbers["experts"] * every * share),
                (num_bytes["rest"], 2 * numbers["rest"] * tokens),
                (num_bytes["head"], 2 * numbers["head"] * rows),
                (kv_tokens * of_page / PAGE_SIZE, config.num_layers * products),
            )
        )
        exchange, half = self.exchange(gpu, tokens, rows).seconds, experts / config.num_layers / 2
        found = (one for one in self.collectives(tokens, rows) if one.is_beside)
        beside = sum(min(half, self.seconds(gpu, one)[0]) for one in found)
        return Step(experts + sum(rest) + exchange, exchange, beside)

    def memory(self, max_seqs: int, context: int) -> tuple[float, float]:
        """Bytes of (weights, an engine's state for so many rows) on a device."""
        return self.weights()[0].total(), bytes_of(self.state(max_seqs, context))


def bytes_of(tree) -> int:
    """All arrays of a pytree, or their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def row(name: str, gpu: GPU, tp: int, dp: int) -> list[str]:
    """The cells of a layout."""
    config = config_from_hf(SIZES[name])
    cells, rows, tokens = [f"{tp * dp}", f"{tp} × {dp}"], ROWS * tp, PREFILL_TOKENS * tp
    plans = [Plan(config, tp, dp), Plan(config, tp, dp, "fp8", "fp8")]
    for plan in plans:
        weights, state = plan.memory(rows, CONTEXT)
        fits = weights + state <= gpu.usable * gpu.memory
        step = plan.step(gpu, rows, rows, rows * CONTEXT, CONTEXT)
        cells.append(f"{weights / 1e9:.0f} + {state / 1e9:.0f}")
        cells.append(f"{1e3 * step.seconds:.1f}" if fits else "no room")
    exchange = plans[0].exchange(gpu, rows, rows)
    sent = (f"{x / 1e6:.0f}" if x else "–" for x in (exchange.nvlink, exchange.network))
    cells += [*sent, f"{exchange.count}", f"{1e3 * exchange.seconds:.1f}"]
    step = plans[1].step(gpu, tokens, rows, CONTEXT, CONTEXT / 2)
    return cells + [f"{1e3 * x:.0f}" for x in step]


HEAD = (
    "GPUs", "tp × dp", "bf16: GB", "decode, ms", "fp8: GB", "decode, ms", "NVLink, MB",
    "network, MB", "collectives", "their ms", "fp8 prefill, ms", "its exchange", "beside experts",
)  # fmt: skip


def text() -> str:
    """The tables of all models and GPUs, with what was assumed."""
    parts = []
    for gpu in (H200, B200):
        parts.append(
            f"{gpu.name}: {gpu.memory / 1e9:.0f} GB, {gpu.read / 1e12:g} TB/s, NVLink "
            f"{gpu.nvlink / 1e9:g} GB/s and network {gpu.network / 1e9:g} GB/s each way, of which "
            f"{gpu.reached:.0%} are reached, {gpu.products / 1e12:g} TFLOP/s, a collective "
            f"{1e6 * gpu.collective_s:g} µs, between hosts {1e6 * gpu.crossing_s:g} µs."
        )
    inputs = "\n".join(f"- {part}" for part in parts).replace("%", " %")
    parts = [f"Assumed are:\n\n{inputs}"]
    for name, gpu in TABLES:
        lines = [HEAD, ["---"] * len(HEAD), *(row(name, gpu, *sizes) for sizes in LAYOUTS[name])]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"**{TITLES[name]} on {gpu.name}**\n\n{table}")
    return "\n\n".join(parts)


def write(root: Path = ROOT) -> None:
    """Puts the tables into docs/sharding.md."""
    replace(root / "docs" / "sharding.md", text(), "on paper")


def main() -> None:
    parser = argparse.ArgumentParser(description="Several GPUs, on paper.")
    parser.add_argument("--write", action="store_true", help="into docs/sharding.md")
    if parser.parse_args().write:
        write()
    else:
        print(text())


if __name__ == "__main__":
    main()
