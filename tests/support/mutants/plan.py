# SPDX-License-Identifier: Apache-2.0
"""Which files have how many mutants, and which tests see them first."""

SEED = 1

# file: (mutants, tests/*/test_<name>.py to run first).
PLAN: dict[str, tuple[int, str]] = {
    # CPU kernels
    "ffi/common/page_view.h": (2, "write_kv attention layout qkv_norm_rope_write"),
    "ffi/common/schedule.h": (4, "attention ragged_attention attention_options"),
    "ffi/common/tree.h": (1, "tree attention_tree"),
    "ffi/common/attention_call.h": (1, "errors attention_options"),
    "ffi/cpu/attention/handler.cc": (3, "attention attention_tree attention_options"),
    "ffi/cpu/attention/unit.h": (1, "attention ragged_attention attention_options"),
    "ffi/cpu/attention/common.h": (2, "attention ragged_attention attention_options"),
    "ffi/cpu/attention/decode.h": (3, "attention attention_options attention_tree"),
    "ffi/cpu/linear/kernel.h": (2, "linear moe"),
    "ffi/cpu/attention/logits.h": (3, "attention_options attention_tree attention_random"),
    "ffi/cpu/attention/merge.h": (1, "merge"),
    "ffi/cpu/attention/prefill.h": (3, "ragged_attention attention attention_options"),
    "ffi/cpu/write/kernel_qkv.h": (1, "qkv_norm_rope_write"),
    "ffi/cpu/attention/stage.h": (2, "eight_bit rope_inside pinned_windows"),
    "ffi/cpu/linear/handler.cc": (1, "linear"),
    "ffi/cpu/linear/lora.cc": (2, "lora"),
    "ffi/cpu/linear/moe_experts.cc": (2, "moe"),
    "ffi/cpu/write/copy_rows.cc": (1, "scatter_rows"),
    "ffi/cpu/write/scatter_rows.cc": (1, "scatter_rows"),
    "ffi/cpu/write/qkv_norm_rope_write.cc": (1, "qkv_norm_rope_write"),
    "ffi/cpu/isa/vec_avx2.h": (1, "attention linear eight_bit"),
    "ffi/cpu/write/write_kv.cc": (2, "write_kv"),
    "ffi/cpu/write/zero_pool.cc": (1, "zero_pool"),
    # Page state
    "jax_paged/cache/transfer/inbox.py": (2, "transfer transfer_groups transfer_between"),
    "jax_paged/cache/share.py": (2, "pages pages_shared page_trees"),
    "jax_paged/cache/handles.py": (1, "page_handles"),
    "jax_paged/cache/holds.py": (2, "page_holds prefix_cache"),
    "jax_paged/cache/table.py": (3, "pages page_holds page_windows"),
    "jax_paged/cache/trees.py": (2, "page_trees"),
    "jax_paged/cache/windows.py": (2, "page_windows pages"),
    "jax_paged/cache/grow.py": (2, "pages page_trees page_windows append"),
    "jax_paged/ops/move.py": (1, "write_kv state in_place"),
    "jax_paged/ops/write.py": (1, "write_kv state in_place kv_dtype"),
    "jax_paged/cache/layers.py": (1, "layers groups"),
    "jax_paged/cache/page_table.py": (1, "pages append"),
    "jax_paged/cache/pools.py": (1, "state groups"),
    "jax_paged/cache/state.py": (1, "groups state state_machine"),
    "jax_paged/cache/transfer/__init__.py": (1, "transfer transfer_groups transfer_between"),
    # Engine and scheduler
    "models/serving/batch.py": (1, "engine generate kv_dtype cli_generate"),
    "models/serving/engine.py": (2, "engine"),
    "models/serving/plan.py": (1, "engine"),
    "models/serving/step.py": (1, "engine_step engine speculate"),
    "models/serving/prefix_cache.py": (2, "prefix_cache engine"),
    "models/serving/request.py": (1, "engine stream"),
    "models/serving/scheduler.py": (4, "engine prefix_cache speculate"),
    "models/serving/speculate.py": (2, "speculate draft_trees draft_model"),
    "models/decoder/steps.py": (1, "generate engine speculate"),
    "models/serving/swap.py": (1, "engine"),
    # Loaders and sampling
    "models/decoder/model.py": (1, "decoder weights"),
    "models/decoder/generation.py": (2, "generate"),
    "models/checkpoint/gguf_file.py": (2, "gguf"),
    "models/checkpoint/gguf_vocab.py": (1, "gguf"),
    "models/checkpoint/hf_config.py": (2, "config weights"),
    "models/decoder/parameters.py": (1, "decoder weights"),
    "models/decoder/sample.py": (2, "sample"),
    "models/decoder/stream.py": (1, "stream"),
    "models/checkpoint/tokenizer.py": (1, "gguf cli_generate generate"),
    "models/checkpoint/weights.py": (2, "weights"),
    # Sharding, checks and plain twins
    "jax_paged/ops/cascade.py": (1, "cascade"),
    "jax_paged/ops/options.py": (1, "errors attention_options"),
    "jax_paged/ops/reference/attention.py": (
        2,
        "attention attention_options attention_tree attention_wild",
    ),
    "jax_paged/ops/rope.py": (1, "rope rope_inside"),
    "jax_paged/native/sharding.py": (2, "sharding"),
    "jax_paged/ops/trees.py": (1, "tree attention_tree"),
    "jax_paged/checks/__init__.py": (1, "errors qkv_norm_rope_write attention_options"),
}

# Survivors that behave as the source does, by id: why nobody can tell them from it.
EQUIVALENT: dict[str, str] = {
    "generation-e75594": "no measured time is exactly the bound; then either way is right",
    "stream-f679a0": "longer starts are looked for too; a whole stop string was found before",
    "weights-b9a48e": "the pool of threads has one job",
    "decode-133e68": "how many keys a block has decides the speed alone",
    "kernel-694816": "it changes what is prefetched, nothing else",
    "stage-ae9b8d": "for an empty range it prefetches one page more, nothing else",
    "stage-027c7b": "the two tables are given together or not at all",
    "write_kv-896704": "the bytes decide how many threads copy, nothing else",
    "zero_pool-104c49": "it asks for huge pages or not; the zeros are written after it",
}
