# SPDX-License-Identifier: Apache-2.0
"""Tokens written to a state of several groups and read back: 2 KV heads of 8, latent rows of 16."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import KVState, write


def write_values(kv: KVState, batch, values: jax.Array) -> KVState:
    """Writes the step's tokens: K, and a latent row, are values[t] + layer / 2, and V is -K."""
    size = values.shape[0]
    for layer, kind in zip(kv.layers, kv.layer_kinds, strict=True):
        value = values + jnp.float32(layer / 2)
        if kind == "mla":
            kv = write(jnp.broadcast_to(value[:, None], (size, 16)), None, kv, batch, layer=layer)
        else:
            k = jnp.broadcast_to(value[:, None, None], (size, 2, 8))
            kv = write(k, -k, kv, batch, layer=layer, implementation="reference")
    return kv


def read(kv: KVState, row: int) -> list[tuple[int, list[float]]]:
    """Of each layer: the first token that a row stores, and the values from there on."""
    found = []
    for layer in kv.layers:
        number, index = kv.find(layer)
        group = kv.groups[number]
        table = group.table
        offset = 0 if table.windows is None else int(table.windows.slot_offset[row])
        count = int(table.seq_lens[row]) - offset
        ids = np.asarray(table.page_table[row])[: int(table.pages_held[row])]
        if group.is_latent:
            k = np.asarray(group.k_pages)[index][ids].reshape(-1, 16)[:count]
        else:
            pools = (group.k_pages, group.v_pages)
            k, v = (np.asarray(pool)[index][ids].swapaxes(1, 2) for pool in pools)
            k, v = (x.reshape(-1, 16)[:count] for x in (k, v))
            np.testing.assert_array_equal(k, -v)
        np.testing.assert_array_equal(k, np.broadcast_to(k[:, :1], k.shape))
        found.append((offset, (k[:, 0] - layer / 2).tolist()))
    return found


def assert_holds(kv: KVState, row: int, tokens: list[float], num_nodes: int = 0) -> None:
    """Every layer has the row's tokens, one with a window at least those that are still seen.

    The last num_nodes of them are a tree.
    """
    for kind, (begin, values) in zip(kv.layer_kinds, read(kv, row), strict=True):
        first_seen = len(tokens) - num_nodes - kind + 1 if isinstance(kind, int) else 0
        assert begin <= max(0, first_seen)
        assert values == tokens[begin:]
