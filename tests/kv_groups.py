"""Writes tokens to a KVGroups and reads them back: 2 KV heads of 8, latent rows of 16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.cache.groups import KVGroups, MlaState
from jax_paged.ops.mla import write_mla_kv
from jax_paged.ops.write import write_kv


def write(kv: KVGroups, batches, values: jax.Array) -> KVGroups:
    """Writes the step's tokens: K, and a latent row, are values[t] + layer / 2, and V is -K."""
    new, size = list(kv.groups), values.shape[0]
    for layer in kv.layers:
        number, index = kv.place(layer)
        group, slots = new[number], batches[number].slot_mapping
        value = values + jnp.float32(layer / 2)
        if isinstance(group, MlaState):
            rows = jnp.broadcast_to(value[:, None], (size, group.kv_pages.shape[-1]))
            kv_pages = write_mla_kv(group.kv_pages, rows, slots, layer=index)
            new[number] = dataclasses.replace(group, kv_pages=kv_pages)
        else:
            k = jnp.broadcast_to(value[:, None, None], (size, 2, 8))
            k_pages, v_pages = write_kv(
                group.k_pages, group.v_pages, k, -k, slots, layer=index, layout=group.layout,
                implementation="reference",
            )  # fmt: skip
            new[number] = dataclasses.replace(group, k_pages=k_pages, v_pages=v_pages)
    return dataclasses.replace(kv, groups=tuple(new))


def read(kv: KVGroups, row: int) -> list[tuple[int, list[float]]]:
    """Of each layer: the first token that a row stores, and the values from there on."""
    found = []
    for layer in kv.layers:
        number, index = kv.place(layer)
        group = kv.groups[number]
        table = group.table
        offset = 0 if table.windows is None else int(table.windows.slot_offset[row])
        count = int(table.seq_lens[row]) - offset
        ids = np.asarray(table.page_table[row])[: int(table.pages_held[row])]
        if isinstance(group, MlaState):
            k = np.asarray(group.kv_pages)[index][ids].reshape(-1, 16)[:count]
        else:
            pools = (group.k_pages, group.v_pages)
            k, v = (np.asarray(pool)[index][ids].swapaxes(1, 2) for pool in pools)
            k, v = (x.reshape(-1, 16)[:count] for x in (k, v))
            np.testing.assert_array_equal(k, -v)
        np.testing.assert_array_equal(k, np.broadcast_to(k[:, :1], k.shape))
        found.append((offset, (k[:, 0] - layer / 2).tolist()))
    return found


def assert_holds(kv: KVGroups, row: int, tokens: list[float], num_nodes: int = 0) -> None:
    """Every layer has the row's tokens, one with a window at least those that are still seen.

    The last num_nodes of them are a tree.
    """
    for kind, (begin, values) in zip(kv.layer_kinds, read(kv, row), strict=True):
        first_seen = len(tokens) - num_nodes - kind + 1 if isinstance(kind, int) else 0
        assert begin <= max(0, first_seen)
        assert values == tokens[begin:]
