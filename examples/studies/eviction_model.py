# SPDX-License-Identifier: Apache-2.0
"""A Llama over pages, written with the ops: each layer has a page table of its own."""

import jax
import jax.numpy as jnp

from jax_paged import (
    KVState,
    StepBatch,
    linear,
    page_attention_mass,
    paged_attention,
    rope_tables,
    write_qkv,
)
from jax_paged.models import Decoder
from jax_paged.models.decoder.model import rms_norm
from jax_paged.models.decoder.moe import gated_mlp


def forward(
    model: Decoder, tokens: jax.Array, batch: StepBatch, state: KVState, kept: jax.Array
) -> tuple[jax.Array, KVState, jax.Array]:
    """Runs one token of each row; layer l sees of row r the pages with kept[l, r].

    Returns:
      (logits f32[rows, vocab_size], the state, f32[layers, rows, pages] attention that fell on each
      page, summed over the heads).
    """
    config, masses = model.config, []
    if config.model_type != "llama":
        raise ValueError(f"model: expected a Llama, got {config.model_type}")
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    frequencies = config.rope.frequencies(config.head_dim)
    tables = rope_tables(batch.positions, frequencies, config.rope.attention_factor)
    x = model.embed(tokens)
    for number, layer in enumerate(model.layers):
        attention, mlp = layer.attention, layer.mlp
        normed = rms_norm(x, layer.attention_norm[...], config.rms_norm_eps)
        q, state = write_qkv(
            linear(normed, attention.qkv[...]), state, batch, *tables, positions=row,
            layer=number, num_q_heads=config.num_q_heads,
        )  # fmt: skip
        table = jnp.where(kept[number], batch.page_table, -1)
        rows = {"page_table": table, "seq_lens": batch.seq_lens, "layer": number}
        out = paged_attention(q, state.k_pages, state.v_pages, **rows)
        mass = page_attention_mass(q, state.k_pages, **rows).sum(1)
        masses.append(mass)
        # 0 · mass: the next layer's write waits for the mass, too. Else XLA copies the pool for it.
        x = x + linear(out.reshape(*row.shape, -1), attention.out[...]) + 0 * jnp.sum(mass)
        normed = rms_norm(x, layer.mlp_norm[...], config.rms_norm_eps)
        x = x + gated_mlp(normed, mlp.gate_up[...], mlp.down[...])
    return model.logits(x), state, jnp.stack(masses)
