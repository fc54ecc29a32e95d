# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs as things grow, and how long the largest model takes to compile.

    python benchmarks/bench_growth.py [--quick] [--save FILE]

Qwen3-MoE at 512 M parameters (8 layers) in bf16, one thing at a time grown from batch 1 and 512
tokens of context: the context, the batch, the pool (pages that no row holds: a step must not depend
on them), the layers. ms is per step of the compiled decode loop. The K and V of the context are
zeros, which makes no difference in time; the rows of a batch are alike, and so choose the same
experts, unlike those of bench_model.

`compile` is the decode step of Qwen3-30B-A3B, 48 unrolled layers, from shapes alone: nothing is
allocated. Tracing and lowering, and XLA's compiling, in one go, each once.
"""

import time

import jax
import jax.numpy as jnp
from flax import nnx
from harness import Bench, Timing
from model_steps import SIZES, Steps

from jax_paged import KVState
from jax_paged.models import Decoder, DecoderConfig, config_from_hf
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.testing import small_hf_config


def compile_seconds(config: DecoderConfig, batch: int) -> tuple[float, float]:
    """(trace and lower, compile) of a decode step from shapes alone."""
    graph, params = nnx.split(Decoder(config, abstract_source(config, jnp.bfloat16)))

    def create():
        return KVState.create(
            num_layers=config.num_layers, num_pages=256, page_size=16, max_seqs=batch,
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, pages_per_seq=64,
            dtype=jnp.bfloat16,
        )  # fmt: skip

    def step(params, state, tokens):
        rows = jnp.arange(batch, dtype=jnp.int32)
        state, own, _ = state.append(rows, 1)
        return nnx.merge(graph, params)(tokens, own, state)

    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=1).lower(params, jax.eval_shape(create), tokens)
    middle = time.perf_counter()
    lowered.compile()
    return middle - start, time.perf_counter() - middle


def main() -> None:
    bench = Bench("Step time against context, batch, pool and layers; compile time.")
    name = "qwen3_moe_512m"
    raw = bench.pick(SIZES[name], dry=small_hf_config())
    config = config_from_hf(raw)
    steps = bench.pick(16, dry=2)
    base = bench.pick(512, dry=24)
    source = random_source(config, dtype=jnp.bfloat16)
    models = {config.num_layers: Decoder(config, source)}

    def measure(kind, value, *, batch=1, context=base, extra_pages=0, layers=config.num_layers):
        if layers not in models:
            grown = config_from_hf(raw | {"num_hidden_layers": layers})
            models[layers] = Decoder(grown, random_source(grown, dtype=jnp.bfloat16))
        ours = Steps(models[layers], batch, context, steps, extra_pages=extra_pages)
        ours.pretend()
        times = bench.paired({"native": ours.decode}, budget_s=3.0)["native"].over(steps)
        bench.add(kind, name, value, "bfloat16", {"native": times}, amount=batch, unit="tok/s")

    full = [512 << i for i in range(7)]
    for context in bench.pick(full, quick=[512, 4096], dry=[16]):
        measure("context", context, context=context)
    for batch in bench.pick([1, 2, 4, 8, 16, 32, 64], quick=[1, 8], dry=[2]):
        measure("batch", batch, batch=batch)
    for extra in bench.pick([0, 1024, 4096, 16384], quick=[0, 4096], dry=[8]):
        measure("pool", extra, extra_pages=extra)
    for layers in bench.pick([2, 4, 8, 16], quick=[4, 8], dry=[1]):
        measure("layers", layers, layers=layers)

    large = bench.pick("qwen3_30b_a3b", dry=name)
    lower, compiling = compile_seconds(
        config_from_hf(bench.pick(SIZES[large], dry=small_hf_config())), batch=bench.pick(8, dry=2)
    )
    total = lower + compiling
    bench.add("compile", large, "48 layers" if not bench.dry else "2 layers", "bfloat16",
              {"native": Timing(total, total, total)}, lower_ms=1e3 * lower,
              compile_ms=1e3 * compiling)  # fmt: skip
    bench.finish()


if __name__ == "__main__":
    main()
