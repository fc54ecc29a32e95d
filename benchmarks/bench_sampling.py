# SPDX-License-Identifier: Apache-2.0
"""Choosing the next tokens of a batch on the CPU, against transformers and a sort by XLA.

    python benchmarks/bench_sampling.py [--quick] [--save FILE]

The contenders take turns (harness.paired). A call draws some times in a row, as the steps of a
program do, and ms is of one. Ours is what the engine calls, `RowSamplers`. The logits fall with the
logarithm of a token's rank: "top_p" keeps some ten tokens of each row, and "top_p, flat" some
thousands. transformers (where installed) is its logits processors and torch.multinomial. The
reference draws by jax.random.categorical, after a sort where it cuts.
"""

import jax
import jax.numpy as jnp
import limits
import numpy as np
from harness import Bench, as_tensor, blocking

from jax_paged.models.decoder.sample import RowSamplers

CASES = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p, flat": {"temperature": 0.8, "top_p": 0.9},
}
DRAWS = 8  # of a call
SIZES = [(1, 49152), (8, 49152), (32, 49152), (1, 151936), (8, 151936)]


def some_logits(rows: int, vocab_size: int, steepness: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    ranks = rng.permuted(np.tile(np.arange(vocab_size) + 1, (rows, 1)), axis=1)
    logits = 0.3 * rng.standard_normal(ranks.shape) - steepness * np.log(ranks)
    return logits.astype(np.float32)


def draws(samplers: RowSamplers, logits: jax.Array, positions: jax.Array, own: bool, **options):
    """DRAWS in a row. What is drawn changes a logit, so that no draw is that of before."""

    def one(i, carry):
        logits, total = carry
        if own:
            drawn = samplers(logits, positions + i)
        else:
            drawn = sorted_draw(logits, samplers.keys(positions + i), options)
        return logits.at[0, drawn[0]].add(-1e-3), total + drawn

    return jax.lax.fori_loop(0, DRAWS, one, (logits, positions))[1]


def sorted_draw(logits: jax.Array, keys: jax.Array, options: dict[str, float]) -> jax.Array:
    """The same distribution by a sort of each row."""
    if not options:
        return jnp.argmax(logits, axis=-1)
    logits = logits / options["temperature"]
    if not options.keys() & {"top_k", "top_p"}:
        return jax.vmap(jax.random.categorical)(keys, logits)
    logits, ids = jax.lax.top_k(logits, logits.shape[-1])
    place = jnp.arange(logits.shape[-1])
    logits = jnp.where(place < options.get("top_k", logits.shape[-1]), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    logits = jnp.where(before < options.get("top_p", 2.0), logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]


def transformers_draws(logits: np.ndarray, options: dict[str, float]):
    """Its processors in the order of `generate`."""
    import torch
    from transformers.generation import logits_process as of

    torch.set_num_threads(limits.NUM_THREADS)
    made = {
        "temperature": of.TemperatureLogitsWarper, "top_k": of.TopKLogitsWarper,
        "top_p": of.TopPLogitsWarper,
    }  # fmt: skip
    steps = [made[name](value) for name, value in options.items()]
    scores = as_tensor(logits)
    ids = torch.zeros((len(scores), 1), dtype=torch.long)

    def draw():
        if not steps:
            return scores.argmax(dim=-1)
        left = scores
        for step in steps:
            left = step(ids, left)
        return torch.multinomial(left.softmax(dim=-1), num_samples=1)

    return lambda: [draw() for _ in range(DRAWS)]


def main() -> None:
    bench = Bench("Choosing tokens on this machine.")
    has_transformers = bench.has_peer("transformers", "pip install transformers torch")
    for rows, vocab_size in bench.pick(SIZES, quick=SIZES[:2], dry=[(2, 500)]):
        for case, options in CASES.items():
            logits = some_logits(rows, vocab_size, 0.5 if "flat" in case else 2.0)
            samplers = RowSamplers.create(rows)
            samplers.seed[:] = np.arange(rows)
            for name, value in options.items():
                getattr(samplers, name)[:] = value
            positions = np.arange(rows, dtype=np.int32)
            given = jax.device_put((samplers, logits, positions))
            contenders = {
                "native": blocking(draws, *given, own=True),
                "reference": blocking(draws, *given, own=False, **options),
            }
            if has_transformers:
                contenders["transformers"] = transformers_draws(logits, options)
            times = bench.paired(contenders, budget_s=1.0)
            times = {name: time.over(DRAWS) for name, time in times.items()}
            bench.add("sampling", case, f"{rows} × {vocab_size}", "float32", times)
    bench.finish()


if __name__ == "__main__":
    main()
