# SPDX-License-Identifier: Apache-2.0
"""Calls of every op that has heads, and how the mesh axis "tp" splits them. Not a test.

Each of CALLS makes (function, operands, their specs, those of the results, our targets on CPU).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_paged as jp
from jax_paged.testing import Case, make_batch
from jax_paged.testing.cascade import share
from jax_paged.testing.mla import make_mla
from jax_paged.testing.options import trees_of
from jax_paged.testing.qkv import make_call

CASE = Case("heads", 16, 8, 32, page_size=8)
POOL, TOKENS, WHOLE = P(None, "tp"), P(None, "tp"), P()  # [page, head, …], [token, head, …]
ATTENTION = "jax_paged.attention.v1"


def rows_of(batch):
    return [batch.page_table, batch.seq_lens, batch.cu_q_lens]


def trees():
    batch = make_batch(CASE, jnp.float32, [5, 1, 3], [40, 9, 77])
    options = {
        name: jnp.asarray(x) for name, x in trees_of([[-1, 0, 0, 1, 1], [], [-1, 0, 0]]).items()
    }

    def call(q, k_pages, v_pages, *rows):
        return jp.ragged_paged_attention(q, k_pages, v_pages, *rows, return_lse=True, **options)

    operands = [batch.q, batch.k_pages, batch.v_pages, *rows_of(batch)]
    return call, operands, (TOKENS, POOL, POOL, *[WHOLE] * 3), (TOKENS, TOKENS), [ATTENTION]


def cascade():
    batch = share(["aabbc", "aabbd", "aae", "aaf", "g"], case=CASE)
    levels = jp.cascade_levels(*map(jnp.asarray, rows_of(batch)), page_size=CASE.page_size)

    def call(q, k_pages, v_pages, cu_q_lens):
        return jp.cascade_attention(q, k_pages, v_pages, levels, cu_q_lens, return_lse=True)

    operands = [batch.q, batch.k_pages, batch.v_pages, batch.cu_q_lens]
    used = [ATTENTION, ATTENTION, "jax_paged.merge_attention_states.v1"]
    return call, operands, (TOKENS, POOL, POOL, WHOLE), (TOKENS, TOKENS), used


def latent(kv_dtype="float32"):
    batch = make_mla(48, 32, 16, [1, 4], [30, 9], page_size=8)
    kv_pages = np.squeeze(np.nan_to_num(batch.k_pages), 1)
    kv_scale = None if kv_dtype == "float32" else jnp.float32(0.1)
    kv_pages = (kv_pages if kv_scale is None else kv_pages * 20).astype(jnp.dtype(kv_dtype))
    new, slots = np.ones((3, 48), "f4"), np.array([5, -1, 9], "i4")

    def call(q, kv_pages, *rows):
        options = {"kv_scale": kv_scale}
        kv_pages = jp.write_mla_kv(kv_pages, jnp.asarray(new), jnp.asarray(slots), **options)
        options |= {"sm_scale": 0.1, "v_head_dim": 32, "return_lse": True}
        return kv_pages, *jp.mla_paged_attention(q, kv_pages, *rows, **options)

    specs = (TOKENS, WHOLE, *[WHOLE] * 3)
    used = [ATTENTION, "jax_paged.scatter_rows.v1"]
    return call, [batch.q, kv_pages, *rows_of(batch)], specs, (WHOLE, TOKENS, TOKENS), used


def mass():
    batch = make_batch(CASE, jnp.float32, [1, 1], [40, 9])
    operands = [batch.q, batch.k_pages, batch.page_table, batch.seq_lens]
    return jp.page_attention_mass, operands, (TOKENS, POOL, WHOLE, WHOLE), TOKENS, [ATTENTION]


def eight_bit(per_token):
    """Writes and reads pages of int8."""
    rng = np.random.default_rng(0)
    pages = rng.integers(-127, 128, (2, 9, 8, 8, 32), "i1")
    k, v, q = (rng.standard_normal((3, heads, 32), "f4") for heads in (8, 8, 16))
    scale = rng.uniform(0.01, 0.02, (9, 8, 8) if per_token else (8,)).astype("f4")
    slots, table = np.array([7, 30, 65], "i4"), np.array([[0, 5], [3, 1], [8, 2]], "i4")
    lens, of_scale = np.array([8, 7, 2], "i4"), POOL if per_token else P("tp")

    def call(k_pages, v_pages, k_scale, v_scale, q, k, v, slots, table, lens):
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        pools = jp.write_kv(k_pages, v_pages, k, v, slots, **scales)
        scales = dict(zip(scales, pools[2:] or (k_scale, v_scale), strict=True))
        return *pools, jp.paged_attention(q, *pools[:2], table, lens, **scales)

    operands = [*pages, scale, scale[::-1].copy(), q, k, v, slots, table, lens]
    specs = (POOL, POOL, of_scale, of_scale, *[TOKENS] * 3, *[WHOLE] * 3)
    results = (POOL,) * (4 if per_token else 2) + (TOKENS,)
    return call, operands, specs, results, [ATTENTION, "jax_paged.write_kv.v1"]


def merge():
    rng = np.random.default_rng(0)
    shapes = [(8, 16, 32), (8, 16)] * 2
    operands = [rng.standard_normal(shape, "f4") for shape in shapes]
    used = ["jax_paged.merge_attention_states.v1"]
    return jp.merge_attention_states, operands, (TOKENS,) * 4, (TOKENS, TOKENS), used


def merge_by_tokens():
    call, operands, _, _, used = merge()
    return call, operands, (P("tp"),) * 4, (P("tp"), P("tp")), used


def moves(layers):
    """Pages copied and tokens moved, in bf16."""
    shape = (3, 9, 8, 4, 16) if layers else (9, 8, 4, 16)
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal(shape, "f4").astype(jnp.bfloat16) for _ in "kv"]
    pool = P(None, *POOL) if layers else POOL
    ids = [np.array(x, "i4") for x in ([1, -1, 7], [2, 5, 0])]

    def call(k_pages, v_pages, src, dst):
        pages = jp.copy_pages(k_pages, v_pages, src, dst)
        return jp.move_slots(*pages, src, dst)

    used = ["jax_paged.copy_rows.v1"] * 2 + ["jax_paged.write_kv.v1"]
    return call, pools + ids, (pool, pool, WHOLE, WHOLE), (pool, pool), used


def ranges():
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal((9, 8, 4, 16), "f4") for _ in "kv"]
    rows = [np.array(x, "i4") for x in ([[3, 1], [4, 8]], [0, 1], [1, 0], [6, 3])]

    def call(k_pages, v_pages, *rows):
        k, v = jp.gather_kv(k_pages, v_pages, *rows, max_tokens=6)
        return jp.scatter_kv(k_pages, v_pages, k + 1, v, *rows)

    return call, pools + rows, (POOL, POOL, *[WHOLE] * 4), (POOL, POOL), ["jax_paged.write_kv.v1"]


def packed(kv_dtype=None, scale=None, layout="HND"):
    """qkv as one array that is whole, as plain jit has it."""
    call = make_call(
        "float32", 32, heads=(16, 8), tokens=7, kv_dtype=kv_dtype, scale=scale, layout=layout
    )
    names = ("k_pages", "v_pages", "k_scale", "v_scale")
    pools = {name: x for name in names if (x := getattr(call, name)) is not None}

    def run(qkv, positions, slots, cos, sin, *pools_now):
        given = {"v_pages": None} | dict(zip(pools, pools_now, strict=True))
        results = jp.qkv_norm_rope_write(
            qkv, positions=positions, slot_mapping=slots, cos=cos, sin=sin, num_q_heads=16,
            layout=layout, **given,
        )  # fmt: skip
        return tuple(x for x in results if x is not None)

    operands = [call.qkv, call.positions, call.slot_mapping, call.cos, call.sin, *pools.values()]
    of_pages = P(None, None, "tp") if layout in ("NHD", "rpa") else POOL
    specs = [of_pages if name.endswith("pages") else POOL for name in pools]
    if scale == "head":
        specs[-2:] = [P("tp")] * 2
    results = [spec for spec, x in zip(specs, pools.values(), strict=True) if x.ndim >= 3]
    used = ["jax_paged.qkv_norm_rope_write.v2"]
    return run, operands, (*[WHOLE] * 5, *specs), (TOKENS, *results), used


CALLS = {
    "trees": trees,
    "cascade": cascade,
    "latent": latent,
    "latent int8": functools.partial(latent, "int8"),
    "mass": mass,
    "int8, scales of heads": functools.partial(eight_bit, per_token=False),
    "int8, scales of tokens": functools.partial(eight_bit, per_token=True),
    "merge": merge,
    "merge by tokens": merge_by_tokens,
    "moves": functools.partial(moves, layers=False),
    "moves in layers": functools.partial(moves, layers=True),
    "ranges": ranges,
    "packed qkv": packed,
    "packed qkv, rpa": functools.partial(packed, layout="rpa"),
    "packed qkv, vllm5d, int8": functools.partial(packed, "int8", layout="vllm5d"),
    "packed qkv, int8, scales of heads": functools.partial(packed, "int8", "head"),
    "packed qkv, rpa, int8, scales of tokens": functools.partial(packed, "int8", "token", "rpa"),
}
# Inside shard_map the columns of packed qkv would be in the order of devices.
IN_SHARD_MAP = [name for name in CALLS if not name.startswith("packed")]
