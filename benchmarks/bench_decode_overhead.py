# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs beyond its device operations, on a 2-layer toy model at batch 1.

    python benchmarks/bench_decode_overhead.py [--steps N] [--rounds N] [--save FILE]

The compiled decode loop of `generate` runs N steps under jax's profiler, without its Python tracer.
The operations are the trace's events that name an HLO op of that program and contain no other event
(a `while` or a `cond` contains others: what it spends between them is overhead). Their time is the
length of the union of their intervals over all threads: what runs in parallel counts once.
Overhead = wall time of the call − that union, per step. The profiler's own cost is in it, so the
true figure is lower. Two ways of running: all steps in one call of the loop, and one step per call,
which adds the dispatch of a program and reading its tokens on the host: the worst of streaming.

A round is one profiled run; the medians over rounds are printed, since a single preemption of the
process counts as milliseconds. The wall time per step without the profiler is printed beside them.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Bench, Timing

from jax_paged.models import Decoder
from jax_paged.models.decoder.generation import state_for
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode
from jax_paged.models.testing import small_config


def covered_us(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals in ns, in µs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def op_intervals(folder: str) -> list[tuple[float, float]]:
    """(start, end) in ns of every innermost operation of the decode program in a trace."""
    (file,) = Path(folder).rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            events = []
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and stats.get("hlo_module") == "jit_decode":
                    events.append((event.start_ns, event.start_ns + event.duration_ns))
            events.sort(key=lambda event: (event[0], -event[1]))
            pairs = itertools.pairwise([*events, (float("inf"), float("inf"))])
            found += [event for event, following in pairs if following[0] >= event[1]]
    return found


class Toy:
    """A 2-layer model that generates from nothing at batch 1."""

    def __init__(self, model_type: str, steps: int):
        config = small_config(model_type, hidden_size=64, max_position_embeddings=4096)
        self.model = Decoder(config, random_source(config))
        self.graph, self.params = nnx.split(self.model)
        self.steps = steps

    def run(self, steps_per_call: int) -> float:
        """Generates `steps` tokens; wall seconds."""
        state = state_for(self.model, [self.steps])
        row, stop = jnp.zeros(1, jnp.int32), jnp.full(4, -1, jnp.int32)
        limit, count = jnp.full(1, self.steps + 1, jnp.int32), jnp.int32(steps_per_call)
        sampler = Sampler.create()
        progress = Progress(*(jnp.zeros(1, jnp.int32) for _ in range(3)))
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(0, self.steps, steps_per_call):
            state, progress, out = decode(
                self.graph, self.params, state, progress, row, limit, stop, sampler, count,
                chunk=self.steps,
            )  # fmt: skip
            np.asarray(out)
        return time.perf_counter() - start

    def profiled(self, steps_per_call: int) -> tuple[float, float]:
        """(wall, device operations) of one run under the profiler, µs per step."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                wall = self.run(steps_per_call)
            ops = covered_us(op_intervals(folder))
        return 1e6 * wall / self.steps, ops / self.steps


def main() -> None:
    bench = Bench(
        "Overhead of a decode step on a toy model.",
        steps={"type": int, "default": 128, "help": "per run (default 128)"},
        rounds={"type": int, "default": 7},
    )
    steps, rounds = bench.pick((bench.args.steps, bench.args.rounds), dry=(4, 1))
    for model_type in bench.pick(("qwen3", "qwen3_moe"), dry=("qwen3",)):
        toy = Toy(model_type, steps)
        for steps_per_call in (steps, 1):
            toy.run(steps_per_call)  # compiles
            plain = [toy.run(steps_per_call) / steps for _ in range(rounds)]
            pairs = [toy.profiled(steps_per_call) for _ in range(rounds)]
            row = bench.add(
                "step", model_type, f"{steps_per_call} a call", "float32",
                {"native": Timing(*(float(np.percentile(plain, p)) for p in (50, 10, 90)))},
                profiled_us=statistics.median(wall for wall, _ in pairs),
                ops_us=statistics.median(ops for _, ops in pairs),
                overhead_us=statistics.median(wall - ops for wall, ops in pairs),
            )  # fmt: skip
            print(
                f"         under the profiler {row['profiled_us']:.1f} µs, operations "
                f"{row['ops_us']:.1f} µs, overhead {row['overhead_us']:.1f} µs",
                flush=True,
            )
    bench.finish()


if __name__ == "__main__":
    main()
