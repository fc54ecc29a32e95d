# SPDX-License-Identifier: Apache-2.0
"""The handler of attention reads its operands by name, and tells what it cannot take.

Python checks a call first, in the caller's words. These calls come another way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged
from jax_paged.ops import attention, options

ROWS, HEADS, DIM, PAGES = 2, 4, 16, (5, 2, 4, 16)
OPERANDS = {
    "q": np.ones((ROWS, HEADS, DIM), "f4"),
    "k_pages": np.ones(PAGES, "f4"),
    "v_pages": np.ones(PAGES, "f4"),
    "page_table": np.array([[1, -1], [2, 0]], "i4"),
    "seq_lens": np.array([3, 7], "i4"),
    "cu_q_lens": np.array([0, 1, 2], "i4"),
    "num_seqs": np.array([2], "i4"),
    "layer": np.int32(0),
    "sm_scale": np.float32(1),
}
LATENT = {name: x for name, x in OPERANDS.items() if not name.endswith("_pages")} | {
    "kv_pages": np.ones((5, 4, DIM), "f4")
}


def call(operands, attributes=None, *, v_head_dim=DIM, lse_dtype=jnp.float32):
    """(out, lse) of the FFI target."""
    results = [
        jax.ShapeDtypeStruct((ROWS, HEADS, v_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, HEADS), lse_dtype),
    ]
    attributes = {"operands": ",".join(operands)} | (attributes or {})
    arrays = [jnp.asarray(x) for x in operands.values()]
    run = jax.ffi.ffi_call(attention.TARGET, results)
    return jax.block_until_ready(run(*arrays, **attributes))


def test_the_order_of_operands_is_free_and_attributes_have_defaults():
    out, _ = call(OPERANDS)
    np.testing.assert_array_equal(out, 1)
    turned, _ = call(dict(reversed(OPERANDS.items())), {"layout": "HND", "causal": True})
    np.testing.assert_array_equal(turned, out)


ONE_PER_HEAD = np.zeros(HEADS, "f4")
WRONG = {
    "q expected bfloat16, float16 or float32, got int32": {"q": np.ones((2, 4, 16), "i4")},
    "q expected rank 3, got [2, 16]": {"q": np.ones((2, 16), "f4")},
    "q expected a multiple of 2 KV heads, got 3 heads": {"q": np.ones((2, 3, 16), "f4")},
    "q expected shape [2, 4, 16], got [2, 4, 8]": {"q": np.ones((2, 4, 8), "f4")},
    "k_pages expected float32 or 8-bit, got float16": {"k_pages": np.ones(PAGES, "f2")},
    "v_pages expected float32, got int8": {"v_pages": np.ones(PAGES, "i1")},
    "page_table expected rank 2, got [2]": {"page_table": np.ones(2, "i4")},
    "page_table expected int32, got float32": {"page_table": np.ones((2, 2), "f4")},
    "seq_lens expected shape [2], got [3]": {"seq_lens": np.ones(3, "i4")},
    "num_seqs expected shape [1], got []": {"num_seqs": np.int32(2)},
    "sinks expected shape [4], got [2]": {"sinks": np.ones(2, "f4")},
    "sinks expected float32, got int32": {"sinks": np.ones(4, "i4")},
    "alibi_slopes expected shape [4], got [4, 1]": {"alibi_slopes": np.ones((4, 1), "f4")},
    "sliding_window expected shape [2], got [3]": {"sliding_window": np.ones(3, "i4")},
    "slot_offset expected an operand beside num_pinned, got none": {"num_pinned": np.ones(2, "i4")},
    "tree expected an operand beside tree_sizes, got none": {"tree_sizes": np.ones(2, "i4")},
    "tree expected shape [2, 3, 2], got [2, 3, 1]": {"tree": np.ones((2, 3, 1), "i4")},
    "k_scale expected none beside pages of q's dtype, got one": {"k_scale": np.ones(2, "f4")},
    "cos expected [positions, at most half of head_dim], got [9, 12]": {
        "cos": np.ones((9, 12), "f4")
    },
    "sin expected shape [9, 4], got [9, 2]": {
        "cos": np.ones((9, 4), "f4"), "sin": np.ones((9, 2), "f4"),
    },
    "out_scale expected shape [], got [1]": {"out_scale": np.ones(1, "f4")},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_the_handler_tells_which_operand_is_wrong(message):
    with pytest.raises(Exception, match="expected") as error:
        call(OPERANDS | WRONG[message])
    assert f"jax_paged.attention: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"layout": "NDH"}, 'layout expected "HND", "NHD", "vllm5d" or "rpa", got "NDH"'),
        ({"soft_cap": np.float32(-1)}, "soft_cap expected finite, 0 (off) or more"),
        ({"num_kv_splits": 2, "split_tokens": 16}, "at most one of them set, got 2, 16"),
        ({"num_kv_splits": "two"}, 'attribute "num_kv_splits"'),
        ({"operands": "q,k_pages"}, 'attribute "operands": expected a name for each of 9'),
    ],
)
def test_the_handler_tells_which_attribute_is_wrong(attributes, message):
    with pytest.raises(Exception, match="expected") as error:
        call(OPERANDS, attributes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (OPERANDS | {"sink": ONE_PER_HEAD}, 'operand "sink": there is no such one'),
        (OPERANDS | {"kv_pages": LATENT["kv_pages"]}, 'operand "k_pages": there is no such one'),
        ({x: OPERANDS[x] for x in OPERANDS if x != "layer"}, "layer expected an operand, got none"),
        ({x: OPERANDS[x] for x in OPERANDS if x != "v_pages"}, "operands expected q, k_pages and"),
    ],
)
def test_the_handler_tells_which_operand_is_missing_or_unknown(operands, message):
    with pytest.raises(Exception, match="operand") as error:
        call(operands)
    assert message in str(error.value)


def test_the_results_are_checked_too():
    with pytest.raises(Exception, match=r"out expected shape \[2, 4, 16\], got \[2, 4, 8\]"):
        call(OPERANDS, v_head_dim=8)
    with pytest.raises(Exception, match="lse expected float32, got float16"):
        call(OPERANDS, lse_dtype=jnp.float16)


def test_latent_pages_are_k_and_v():
    out, _ = call(LATENT, v_head_dim=8)
    np.testing.assert_array_equal(out, 1)
    with pytest.raises(Exception, match="v_head_dim a multiple of 8 up to 16, got 24"):
        call(LATENT, v_head_dim=24)


def functions():
    names = ("paged_attention", "ragged_paged_attention", "ragged_attention", "cascade_attention",
             "mla_paged_attention")  # fmt: skip
    return [getattr(jax_paged, name) for name in names]


@pytest.mark.parametrize("function", functions(), ids=lambda x: x.__name__)
def test_docstrings_tell_every_argument(function):
    text = function.__doc__
    assert "{options}" not in text
    told = text[text.index("Args:") : text.index("Returns:")]
    names = function.__code__.co_varnames
    arguments = names[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    for name in arguments:
        assert f"{name}:" in told or f"{name}," in told, name


def test_options_have_one_declaration():
    names = [option.name for option in options.OPTIONS]
    assert len(names) == len(set(names))
    code = jax_paged.ragged_paged_attention.__code__
    keywords = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    assert set(keywords) == {*names, "return_lse"}
