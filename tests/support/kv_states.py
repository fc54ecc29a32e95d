# SPDX-License-Identifier: Apache-2.0
"""Small states for the tests, their tokens written and read, and a large one without data."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import KVState, write
from jax_paged.layout import pool_of_v, slots_first

SIZES = {
    "num_layers": 2,
    "num_pages": 12,
    "page_size": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_seqs": 4,
    "pages_per_seq": 3,
    "dtype": "float32",
}


def make(**changes) -> KVState:
    return KVState.create(**(SIZES | changes))


def append(kv: KVState, rows, q_lens, values) -> KVState:
    """Reserves, steps and writes: token t has K = values[t] + layer / 2 and V = -K."""
    kv, batch, status = kv.append(rows, q_lens, num_tokens=len(values))
    assert not any(status.tolist())
    for layer in kv.layers:
        k = np.asarray(values, np.float32)[:, None, None] + np.float32(layer / 2)
        k = jnp.asarray(np.broadcast_to(k, (len(values), 2, 8)))
        kv = write(k, -k, kv, batch, layer=layer, implementation="reference")
    return kv


def read(kv: KVState, row: int) -> list[float]:
    """The token values of a row; checks that layers, heads, K and V agree."""
    ids = np.asarray(kv.table.page_table[row])[: int(kv.table.pages_held[row])]
    tokens = int(kv.table.seq_lens[row])
    k = slots_first(np.asarray(kv.k_pages)[:, ids], kv.layout, "k")
    v_pages = pool_of_v(kv.k_pages, kv.v_pages, kv.layout)
    v = slots_first(np.asarray(v_pages)[:, ids], kv.layout, "v")
    num_layers, _, page_size, heads, head_dim = k.shape
    k = k.reshape(num_layers, len(ids) * page_size, heads, head_dim)[:, :tokens]
    v = v.reshape(num_layers, len(ids) * page_size, heads, head_dim)[:, :tokens]
    np.testing.assert_array_equal(k, -v)
    layers = np.arange(num_layers, dtype=np.float32)[:, None, None, None] / 2
    np.testing.assert_array_equal(k, np.broadcast_to(k[:1, :, :1, :1] + layers, k.shape))
    return k[0, :, 0, 0].tolist()


def big_state(dtype="float32") -> KVState:
    sizes = {"num_layers": 3, "num_pages": 512, "page_size": 16, "head_dim": 64}
    return jax.eval_shape(lambda: make(**sizes, pages_per_seq=8, dtype=dtype))
