# SPDX-License-Identifier: Apache-2.0
"""A stage of gpu_check.py: the compiled decode loop of a small Qwen3-MoE, µs per step.

    python benchmarks/gpu_model.py --label TEXT --rows FILE [--dry]

Random bf16 weights, 0.2 G parameters (4 layers, 1024 wide, 32 experts, 4 of them per token), new
rows without a prompt: what a step costs beside attention, launches included. One program runs 64 or
8 steps; the time of a step is the difference over 56. What XLA may put into command buffers is set
by XLA_FLAGS before the process starts; --label says it in the rows.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from gpu_timing import Report, per_call, rate, seconds_of

from jax_paged.models import Decoder
from jax_paged.models.decoder.generation import state_for
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode
from jax_paged.models.testing import small_config

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip


def steps_seconds(model: Decoder, batch: int, chunk: int):
    """chain_seconds(n): n decode steps of `batch` rows in one call of the loop."""
    graph, params = nnx.split(model)
    rows = jnp.arange(batch, dtype=jnp.int32)
    never = jnp.full(4, -1, jnp.int32)
    limits = jnp.full(batch, chunk + 1, jnp.int32)
    sampler = Sampler.create()

    def run(steps: int) -> float:
        state = state_for(model, [chunk] * batch)
        progress = Progress(*(jnp.zeros(batch, jnp.int32) for _ in range(3)))
        jax.block_until_ready((state, progress))
        made = []

        def loop():
            _, end, _ = decode(
                graph, params, state, progress, rows, limits, never, sampler, jnp.int32(steps),
                chunk=chunk,
            )  # fmt: skip
            made.append(jax.block_until_ready(end.made))

        seconds = seconds_of(loop)
        if (made[0] != steps).any():
            raise AssertionError(f"{steps} steps made {made[0]} tokens per row")
        return seconds

    return run


def main() -> None:
    report, args = Report.from_args("The decode loop of a small model.", **{"--label": {}})
    config = small_config("qwen3_moe", **({} if report.dry else SIZES))
    short, long = (1, 3) if report.dry else (8, 64)
    models = []

    def load():
        models.append(Decoder(config, random_source(config, dtype=jnp.bfloat16)))

    report.prepare(load, kind="model", label=args.label)
    for batch in (2,) if report.dry else (1, 64):
        what = {"kind": "model", "label": args.label, "size": f"batch {batch}"}

        def measure(batch=batch, what=what):
            timing = per_call(
                steps_seconds(models[0], batch, long), short, long,
                budget_s=0.02 if report.dry else 1.0,
            )  # fmt: skip
            report.check_time(timing)
            percentiles = [1e6 * timing.p10, 1e6 * timing.p90]
            report.add(
                **what, us=1e6 * timing.median, percentiles=percentiles,
                tokens_per_s=rate(batch, timing.median),
            )  # fmt: skip

        if models:
            report.attempt(measure, **what)
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
