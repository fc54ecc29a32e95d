# SPDX-License-Identifier: Apache-2.0
"""Bad input: one line that names the argument, what was expected and what came."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import (
    KVState,
    cascade_attention,
    check_values,
    copy_pages,
    gather_kv,
    mla_paged_attention,
    paged_attention,
    qkv_norm_rope_write,
    ragged_paged_attention,
    scatter_kv,
    write_kv,
    write_mla_kv,
)


def whole(message):
    """A pattern for just this message; JAX may add its note about tracebacks."""
    return rf"^{re.escape(message)}(\n-+\nFor simplicity, JAX|$)"


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


def i32(*shape):
    return jnp.zeros(shape, jnp.int32)


# Four rows, six new tokens, four query heads, two KV heads of dim 16, nine pages of five tokens.
POOL = f32(9, 2, 5, 16)
DECODE = {
    "q": f32(4, 4, 16), "k_pages": POOL, "v_pages": POOL, "page_table": i32(4, 3),
    "seq_lens": i32(4),
}  # fmt: skip
RAGGED = DECODE | {"q": f32(6, 4, 16), "cu_q_lens": i32(5)}
WRITE = {
    "k_pages": POOL, "v_pages": POOL, "k": f32(6, 2, 16), "v": f32(6, 2, 16),
    "slot_mapping": i32(6),
}  # fmt: skip

QKV = {
    "qkv": f32(6, 8 * 16), "k_pages": POOL, "v_pages": POOL, "positions": i32(6),
    "slot_mapping": i32(6), "cos": f32(9, 8), "sin": f32(9, 8), "num_q_heads": 4,
}  # fmt: skip

# What is changed in a good call → the whole message.
ATTENTION = [
    ({"q": f32(6, 4)}, "q: expected shape [tokens, num_q_heads, head_dim=16], got [6, 4]"),
    (
        {"q": f32(6, 4, 24)},
        "q: expected shape [tokens, num_q_heads, head_dim=16], got [6, 4, 24]",
    ),
    ({"q": f32(6, 3, 16)}, "q: expected num_q_heads to be a multiple of num_kv_heads=2, got 3"),
    ({"q": f32(6, 0, 16)}, "q: expected num_q_heads to be a multiple of num_kv_heads=2, got 0"),
    (
        {"k_pages": f32(9, 0, 5, 16), "v_pages": f32(9, 0, 5, 16)},
        "q: expected num_q_heads to be a multiple of num_kv_heads=0, got 4",
    ),
    ({"q": i32(6, 4, 16)}, "q: expected dtype bfloat16 or float16 or float32, got int32"),
    (
        {"q": f32(6, 4, 16).astype(jnp.bfloat16)},
        "k_pages: expected dtype bfloat16 or 8-bit, got float32",
    ),
    (
        {"k_pages": f32(2, 5, 16)},
        "k_pages: expected rank 4, [num_pages, num_kv_heads, page_size, head_dim], or 5 with a "
        "leading num_layers, got [2, 5, 16]",
    ),
    (
        {"v_pages": f32(2, 5, 16), "layout": "NHD"},
        "v_pages: expected rank 4, [num_pages, page_size, num_kv_heads, head_dim], or 5 with a "
        "leading num_layers, got [2, 5, 16]",
    ),
    (
        {"k_pages": POOL.astype(jnp.int16)},
        "k_pages: expected dtype bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2 or "
        "int8, got int16",
    ),
    (
        {"k_pages": POOL.astype(jnp.int8)},
        "v_pages: expected dtype int8, got float32",
    ),
    ({"k_scale": 2.0}, "k_scale: expected None for pages of float32, got a scale"),
    (
        {"k_pages": POOL.astype(jnp.int8), "v_pages": POOL.astype(jnp.int8), "v_scale": f32(4)},
        "v_scale: expected shape [] or [2] or [9, 2, 5], got [4]",
    ),
    (
        {
            "k_pages": POOL[None].astype(jnp.int8),
            "v_pages": POOL[None].astype(jnp.int8),
            "layer": 0,
            "k_scale": f32(2),
        },
        "k_scale: expected shape [] or [1] or [1, 2] or [1, 9, 2, 5], got [2]",
    ),
    ({"v_pages": POOL.astype(jnp.float16)}, "v_pages: expected dtype float32, got float16"),
    (
        {"v_pages": f32(9, 2, 4, 16)},
        "v_pages: expected the shape of k_pages [9, 2, 5, 16], head_dim aside, got [9, 2, 4, 16]",
    ),
    (
        {"v_pages": f32(1, 9, 2, 5, 16)},
        "v_pages: expected the shape of k_pages [9, 2, 5, 16], head_dim aside, "
        "got [1, 9, 2, 5, 16]",
    ),
    (
        {"k_pages": f32(9, 2, 0, 16), "v_pages": f32(9, 2, 0, 16)},
        "k_pages: expected page_size >= 1, got 0",
    ),
    (
        {"layer": 0},
        "layer: expected an i32 scalar for stacked pages, None for pages without a layer axis, "
        "got a value for k_pages of rank 4",
    ),
    (
        {"k_pages": POOL[None], "v_pages": POOL[None]},
        "layer: expected an i32 scalar for stacked pages, None for pages without a layer axis, "
        "got None for k_pages of rank 5",
    ),
    (
        {"k_pages": POOL[None], "v_pages": POOL[None], "layer": i32(1)},
        "layer: expected shape [], got [1]",
    ),
    (
        {"k_pages": POOL[None], "v_pages": POOL[None], "layer": 1.0},
        f"layer: expected an integer dtype, got dtype {np.asarray(1.0).dtype}",
    ),
    (
        {"page_table": i32(3, 3)},
        "page_table: expected shape [num_seqs=4, pages_per_seq], got [3, 3]",
    ),
    ({"page_table": i32(4)}, "page_table: expected shape [num_seqs=4, pages_per_seq], got [4]"),
    ({"page_table": f32(4, 3)}, "page_table: expected an integer dtype, got dtype float32"),
    ({"seq_lens": i32(4, 1)}, "seq_lens: expected shape [num_seqs], got [4, 1]"),
    ({"seq_lens": f32(4)}, "seq_lens: expected an integer dtype, got dtype float32"),
    ({"seq_lens": i32(4) > 0}, "seq_lens: expected an integer dtype, got dtype bool"),
    ({"cu_q_lens": i32(4)}, "cu_q_lens: expected shape [num_seqs+1=5], got [4]"),
    ({"cu_q_lens": f32(5)}, "cu_q_lens: expected an integer dtype, got dtype float32"),
    ({"num_seqs": i32(2)}, "num_seqs: expected a scalar or [1], got (2,)"),
    ({"num_seqs": i32(1, 1)}, "num_seqs: expected a scalar or [1], got (1, 1)"),
    ({"num_seqs": True}, "num_seqs: expected an integer dtype, got dtype bool"),
    ({"sm_scale": -0.5}, "sm_scale: expected a finite scale >= 0, got -0.5"),
    ({"sm_scale": float("nan")}, "sm_scale: expected a finite scale >= 0, got nan"),
    ({"sm_scale": np.float32(-2)}, "sm_scale: expected a finite scale >= 0, got -2.0"),
    ({"sm_scale": f32(1)}, "sm_scale: expected shape [], got [1]"),
    ({"num_kv_splits": 0}, "num_kv_splits: expected None or an int >= 1, got 0"),
    ({"num_kv_splits": 2.5}, "num_kv_splits: expected None or an int >= 1, got 2.5"),
    ({"split_tokens": -512}, "split_tokens: expected None or an int >= 1, got -512"),
    ({"split_tokens": True}, "split_tokens: expected None or an int >= 1, got True"),
    (
        {"split_tokens": 64, "num_kv_splits": 2},
        "split_tokens: expected None when num_kv_splits is given, got 64",
    ),
    ({"layout": "HDN"}, "layout: expected 'HND' or 'NHD' or 'vllm5d' or 'rpa', got 'HDN'"),
    (
        {"implementation": "cuda"},
        "implementation: expected None or 'native' or 'reference', got 'cuda'",
    ),
]
WRITES = [
    ({"k": f32(6, 16)}, "k: expected shape [tokens=6, num_kv_heads=2, head_dim=16], got [6, 16]"),
    (
        {"k": f32(5, 2, 16)},
        "k: expected shape [tokens=6, num_kv_heads=2, head_dim=16], got [5, 2, 16]",
    ),
    (
        {"v": f32(6, 1, 16)},
        "v: expected shape [tokens=6, num_kv_heads=2, head_dim=16], got [6, 1, 16]",
    ),
    ({"v": i32(6, 2, 16)}, "v: expected dtype bfloat16 or float16 or float32, got int32"),
    ({"slot_mapping": i32(6, 1)}, "slot_mapping: expected shape [tokens], got [6, 1]"),
    ({"slot_mapping": f32(6)}, "slot_mapping: expected an integer dtype, got dtype float32"),
    ({"layout": None}, "layout: expected 'HND' or 'NHD' or 'vllm5d' or 'rpa', got None"),
    (
        {"implementation": "c++"},
        "implementation: expected None or 'native' or 'reference', got 'c++'",
    ),
    (
        {"k_pages": POOL[0]},
        "k_pages: expected rank 4, [num_pages, num_kv_heads, page_size, head_dim], or 5 with a "
        "leading num_layers, got [2, 5, 16]",
    ),
    (
        {"layer": 3},
        "layer: expected an i32 scalar for stacked pages, None for pages without a layer axis, "
        "got a value for k_pages of rank 4",
    ),
]
QKVS = [
    (
        {"qkv": f32(6, 7 * 16)},
        "qkv: expected shape [tokens, "
        "(num_q_heads+num_kv_heads)·head_dim+num_kv_heads·v_head_dim=128], got [6, 112]",
    ),
    (
        {"num_q_heads": 5},
        "qkv: expected shape [tokens, "
        "(num_q_heads+num_kv_heads)·head_dim+num_kv_heads·v_head_dim=144], got [6, 128]",
    ),
    ({"num_q_heads": 0}, "num_q_heads: expected an int >= 1, got 0"),
    ({"num_q_heads": 4.0}, "num_q_heads: expected an int >= 1, got 4.0"),
    ({"qkv": i32(6, 128)}, "qkv: expected dtype bfloat16 or float16 or float32, got int32"),
    (
        {"qkv": f32(6, 128).astype(jnp.bfloat16)},
        "k_pages: expected dtype bfloat16, got float32",
    ),
    ({"positions": i32(5)}, "positions: expected shape [tokens=6], got [5]"),
    ({"positions": f32(6)}, "positions: expected an integer dtype, got dtype float32"),
    ({"slot_mapping": i32(6, 1)}, "slot_mapping: expected shape [tokens=6], got [6, 1]"),
    ({"cos": f32(9, 4)}, "cos: expected shape [max_positions, rotary_dim/2=8], got [9, 4]"),
    (
        {"sin": f32(8, 8)},
        "sin: expected shape [max_positions=9, rotary_dim/2=8], got [8, 8]",
    ),
    ({"cos": f32(0, 8), "sin": f32(0, 8)}, "cos: expected max_positions >= 1, got 0"),
    ({"cos": f32(9, 8).astype(jnp.float16)}, "cos: expected dtype float32, got float16"),
    ({"rotary_dim": 8}, "cos: expected shape [max_positions, rotary_dim/2=4], got [9, 8]"),
    ({"rotary_dim": 18}, "rotary_dim: expected an even number up to head_dim=16, got 18"),
    ({"rotary_dim": 7}, "rotary_dim: expected an even number up to head_dim=16, got 7"),
    ({"rotary_dim": 0}, "rotary_dim: expected an int >= 1, got 0"),
    ({"style": "neox"}, "style: expected 'half' or 'interleaved', got 'neox'"),
    ({"eps": -1e-6}, "eps: expected a finite number >= 0, got -1e-06"),
    ({"eps": float("inf")}, "eps: expected a finite number >= 0, got inf"),
    ({"q_norm": f32(64)}, "q_norm: expected shape [head_dim=16], got [64]"),
    ({"k_norm": i32(16)}, "k_norm: expected dtype bfloat16 or float16 or float32, got int32"),
    ({"layout": "NDH"}, "layout: expected 'HND' or 'NHD' or 'vllm5d' or 'rpa', got 'NDH'"),
    (
        {"implementation": "c++"},
        "implementation: expected None or 'native' or 'reference', got 'c++'",
    ),
    (
        {"layer": 3},
        "layer: expected an i32 scalar for stacked pages, None for pages without a layer axis, "
        "got a value for k_pages of rank 4",
    ),
]
CASES = [
    *((ragged_paged_attention, RAGGED, *case) for case in ATTENTION),
    *((write_kv, WRITE, *case) for case in WRITES),
    *((qkv_norm_rope_write, QKV, *case) for case in QKVS),
    (
        paged_attention, DECODE, {"q": f32(5, 4, 16)},
        "q: expected shape [num_seqs=4, num_q_heads, head_dim=16], got [5, 4, 16]",
    ),
    (
        paged_attention, DECODE, {"page_table": i32(5, 3)},
        "page_table: expected shape [num_seqs=4, pages_per_seq], got [5, 3]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "good", "change", "message"), CASES, ids=[c[3][:60] for c in CASES])
def test_a_wrong_call_is_told_in_one_line(op, good, change, message):
    with pytest.raises(ValueError, match=whole(message)):
        op(**good | change)
    traced = {name: x for name, x in (good | change).items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in (good | change).items() if name not in traced}
    with pytest.raises(ValueError, match=whole(message)):
        jax.eval_shape(functools.partial(op, **static), **traced)


PAIRS = {"k_pages": POOL, "v_pages": POOL, "src_pages": i32(2), "dst_pages": i32(2)}


@pytest.mark.parametrize(
    ("op", "good", "name"),
    [
        (op, good, name)
        for op, good, names in (
            (paged_attention, DECODE, ("q", "k_pages", "v_pages")),
            (ragged_paged_attention, RAGGED, ("q", "k_pages", "v_pages")),
            (write_kv, WRITE, ("k_pages", "v_pages", "k", "v")),
            (qkv_norm_rope_write, QKV, ("qkv", "k_pages", "v_pages", "cos", "sin")),
            (copy_pages, PAIRS, ("k_pages", "v_pages")),
        )
        for name in names
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""),
)
def test_what_is_no_array_is_named(op, good, name):
    for value, got in ((None, "None"), ([1.0], "a list")):
        with pytest.raises(ValueError, match=whole(f"{name}: expected an array, got {got}")):
            op(**good | {name: value})


def test_pages_that_would_fit_the_other_layout_are_told_so():
    pages = f32(9, 5, 2, 16)  # NHD
    pools = {"k_pages": pages, "v_pages": pages}
    with pytest.raises(ValueError, match=r"got \[6, 2, 16\]; with layout='NHD' it would fit, got"):
        write_kv(**WRITE | pools)
    with pytest.raises(ValueError, match=r"=5, got 4; with layout='NHD' it would fit, got layout"):
        paged_attention(**DECODE | pools)
    with pytest.raises(ValueError, match=r"=5, got 4; with layout='HND' it would fit, got layout"):
        paged_attention(**DECODE, layout="NHD")


STACKED = f32(3, 9, 2, 5, 16)
LATENT = f32(3, 9, 5, 24)
PLACES = (i32(4, 3), i32(2), i32(2), i32(2))


def pools():  # donated by a call that goes through
    return {"k_pages": STACKED + 0, "v_pages": STACKED + 0}


WITH_LAYERS = {
    "paged_attention": lambda layer: paged_attention(
        DECODE["q"], STACKED, STACKED, i32(4, 3), i32(4), layer=layer
    ),
    "ragged_paged_attention": lambda layer: ragged_paged_attention(
        RAGGED["q"], STACKED, STACKED, i32(4, 3), i32(4), i32(5), layer=layer
    ),
    "cascade_attention": lambda layer: cascade_attention(
        DECODE["q"], STACKED, STACKED, [(i32(4, 3), i32(4))], layer=layer
    ),
    "mla_paged_attention": lambda layer: mla_paged_attention(
        f32(6, 4, 24), LATENT, i32(4, 3), i32(4), i32(5), sm_scale=1.0, v_head_dim=16, layer=layer
    ),
    "write_kv": lambda layer: write_kv(**WRITE | pools() | {"layer": layer}),
    "write_mla_kv": lambda layer: write_mla_kv(LATENT + 0, f32(6, 24), i32(6), layer=layer),
    "qkv_norm_rope_write": lambda layer: qkv_norm_rope_write(**QKV | pools() | {"layer": layer}),
    "gather_kv": lambda layer: gather_kv(STACKED, STACKED, *PLACES, max_tokens=5, layer=layer),
    "scatter_kv": lambda layer: scatter_kv(
        STACKED + 0, STACKED + 0, f32(2, 5, 2, 16), f32(2, 5, 2, 16), *PLACES, layer=layer
    ),
}


@pytest.mark.parametrize("op", WITH_LAYERS)
def test_a_layer_that_the_host_knows_must_be_there(op):
    for layer in (-1, 3, 2**40, np.int64(-1), np.array(7)):
        got = min(int(layer), 2**31 - 1)
        message = whole(f"layer: expected a layer in [0, 3), got {got}")
        with pytest.raises(ValueError, match=message):
            WITH_LAYERS[op](layer)
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda: WITH_LAYERS[op](layer))()  # noqa: B023
    for layer in (0, np.int64(2), jnp.int32(7)):
        jax.eval_shape(functools.partial(WITH_LAYERS[op], layer))


def test_the_good_calls_are_good(implementation):
    assert ragged_paged_attention(**RAGGED, implementation=implementation).shape == (6, 4, 16)
    assert paged_attention(**DECODE, implementation=implementation).shape == (4, 4, 16)
    fresh = {name: x + 0 for name, x in WRITE.items()}
    assert write_kv(**fresh, implementation=implementation)[0].shape == POOL.shape
    fresh = {name: x + 0 for name, x in QKV.items()}
    assert qkv_norm_rope_write(**fresh, implementation=implementation)[0].shape == (6, 4, 16)


def test_a_rotary_dim_that_native_kernels_lack_names_the_one_that_can():
    change = {"rotary_dim": 6, "cos": f32(9, 3), "sin": f32(9, 3)}
    change |= {"k_pages": POOL + 0, "v_pages": POOL + 0}
    message = (
        "rotary_dim: native kernels take a multiple of 4 with style='half', got 6; "
        "implementation='reference' takes any even number"
    )
    with pytest.raises(NotImplementedError, match=whole(message)):
        qkv_norm_rope_write(**QKV | change)
    q, *_ = qkv_norm_rope_write(**QKV | change, implementation="reference")
    assert q.shape == (6, 4, 16)


@pytest.mark.parametrize("head_dim", [4, 20, 520])
@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_a_head_dim_that_native_kernels_lack_names_the_one_that_can(name, head_dim):
    change = {name: f32(9, 2, 5, head_dim)}
    if name == "k_pages":
        change["q"] = f32(6, 4, head_dim)
    message = (
        f"{name}: native kernels take a head_dim that is a multiple of 8 up to 512, "
        f"got {head_dim}; implementation='reference' takes any"
    )
    with pytest.raises(NotImplementedError, match=whole(message)):
        ragged_paged_attention(**RAGGED | change)
    out = ragged_paged_attention(**RAGGED | change, implementation="reference")
    assert out.shape == (6, 4, head_dim if name == "v_pages" else 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_pages": i32(2, 1)}, "src_pages: expected shape [n], got [2, 1]"),
        ({"dst_pages": i32(3)}, "dst_pages: expected shape [n=2], got [3]"),
        ({"dst_pages": f32(2)}, "dst_pages: expected an integer dtype, got dtype float32"),
        (
            {"v_pages": POOL[None]},
            "v_pages: expected the shape of k_pages [9, 2, 5, 16], head_dim aside, "
            "got [1, 9, 2, 5, 16]",
        ),
    ],
    ids=["src rank", "dst length", "dst dtype", "ranks"],
)
def test_a_wrong_copy_is_told_in_one_line(change, message):
    good = {"k_pages": POOL, "v_pages": POOL, "src_pages": i32(2), "dst_pages": i32(2)}
    with pytest.raises(ValueError, match=whole(message)):
        copy_pages(**good | change)


GOOD_VALUES = {
    "page_table": np.array([[3, 1, -1], [0, -1, -1], [-1, -1, -1]]),
    "seq_lens": np.array([7, 5, 0]),
    "cu_q_lens": np.array([0, 3, 4, 4]),
    "num_pages": 4,
    "page_size": 5,
    "num_tokens": 4,
}
BAD_VALUES = [
    ({"num_seqs": 4}, "num_seqs: expected a value in [0, 3], got 4"),
    ({"seq_lens": np.array([16, 5, 0])}, "seq_lens[0]: expected a length in [0, 15], got 16"),
    ({"seq_lens": np.array([7, -1, 0])}, "seq_lens[1]: expected a length in [0, 15], got -1"),
    ({"seq_lens": np.array([7, 6, 0])}, "page_table[1, 1]: expected a page id in [0, 4), got -1"),
    ({"num_pages": 3}, "page_table[0, 0]: expected a page id in [0, 3), got 3"),
    ({"cu_q_lens": np.array([1, 3, 4, 4])}, "cu_q_lens[0]: expected 0, got 1"),
    (
        {"cu_q_lens": np.array([0, 3, 2, 4])},
        "cu_q_lens[2]: expected a q_len in [0, seq_lens[1]=5], got -1",
    ),
    (
        {"cu_q_lens": np.array([0, 3, 4, 5])},
        "cu_q_lens[3]: expected a q_len in [0, seq_lens[2]=0], got 1",
    ),
    ({"num_tokens": 5}, "cu_q_lens[3]: expected the number of tokens 5, got 4"),
    ({"num_tokens": 4, "num_seqs": 1}, "cu_q_lens[1]: expected the number of tokens 4, got 3"),
]


@pytest.mark.parametrize(("change", "message"), BAD_VALUES, ids=[c[1][:40] for c in BAD_VALUES])
def test_check_values_names_the_row(change, message):
    with pytest.raises(ValueError, match=whole(message)):
        check_values(**GOOD_VALUES | change)


def test_check_values_accepts_good_values_and_ignores_dead_rows():
    check_values(**GOOD_VALUES)
    check_values(**{name: jnp.asarray(x) if np.ndim(x) else x for name, x in GOOD_VALUES.items()})
    wild = GOOD_VALUES | {"seq_lens": np.array([7, 5, 999]), "cu_q_lens": np.array([0, 3, 4, -9])}
    check_values(**wild, num_seqs=2)
    check_values(**{n: x for n, x in GOOD_VALUES.items() if n not in ("cu_q_lens", "num_tokens")})


def test_check_values_compares_a_call_with_its_state():
    sizes = {
        "num_layers": 1, "num_pages": 4, "page_size": 2, "num_kv_heads": 2, "head_dim": 8,
        "max_seqs": 1, "pages_per_seq": 4,
    }  # fmt: skip
    kv = KVState.create(**sizes, dtype="int8", layout="NHD", windows=True)
    kv, _ = kv.reserve([0], 2)
    kv, _ = kv.set_window([0], 2, 0)
    told = {"layout": "NHD", "k_scale": kv.k_scale, "v_scale": kv.v_scale}

    def check(kv, **options):
        check_values(kv.table.page_table, kv.table.seq_lens, state=kv, **options)

    check(kv, **told)
    for change, message in (
        ({"layout": "HND"}, "layout: expected 'NHD' as in the state, got 'HND'"),
        ({"k_scale": None}, "k_scale: expected the state's k_scale, got None"),
        ({"v_scale": 2.0}, "v_scale: expected the state's v_scale, got another one"),
    ):
        with pytest.raises(ValueError, match=whole(message)):
            check(kv, **told | change)
    for _ in range(3):
        kv, _, _ = kv.step([0], 2, num_tokens=2)
        kv, _ = kv.reserve([0], 2)
    message = "slot_offset: expected that of the batch, since rows slid, got None"
    with pytest.raises(ValueError, match=whole(message)):
        check(kv, **told)
    check(kv, **told, slot_offset=kv.table.windows.slot_offset)
    with pytest.raises(ValueError, match="num_pages: expected a number where no state is given"):
        check_values(i32(1, 2), i32(1))


@pytest.mark.parametrize("half", [{"shape": (4, 4, 16)}, {"dtype": jnp.dtype("float32")}])
def test_what_has_only_a_shape_or_only_a_dtype_is_no_array(half):
    with pytest.raises(ValueError, match=whole("q: expected an array, got a SimpleNamespace")):
        paged_attention(**(DECODE | {"q": types.SimpleNamespace(**half)}))
