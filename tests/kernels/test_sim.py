# SPDX-License-Identifier: Apache-2.0
"""The CUDA module on the simulated device (ffi/sim): what a call launches, and graphs replayed.

That ops give the right numbers there, the suites in tests/ops ask with implementation="sim".
"""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import call_of, plan_of
from simulation import FFI, NVCC_FLAGS, device, library, nvcc, set_devices

from jax_paged import (
    merge_attention_states,
    moe_experts,
    paged_attention,
    qkv_norm_rope_write,
    ragged_paged_attention,
    write_kv,
)
from jax_paged.testing import Case, assert_attention_close, dense_oracle, make_batch
from jax_paged.testing.experts import make_case, make_options, quantized
from jax_paged.testing.options import eight_bit

pytestmark = pytest.mark.sim


@pytest.fixture
def loaded():
    """The library, which has its usual devices again afterwards."""
    yield library()
    library().sim_set_replays(0)
    set_devices(library(), device(80), device(90))


def overlaps(loaded):
    """Of each launch of the last call, whether it may overlap the one before it."""
    return [line.split()[-1] == "overlaps" for line in loaded.sim_launches().decode().splitlines()]


def launches(loaded):
    """[(kernel, CTAs, threads, bytes of dynamic shared memory)] of the last call."""
    found = []
    for line in loaded.sim_launches().decode().splitlines():
        name, grid, threads, shared, _ = line.split()
        (kernel,) = re.findall(r"\d+(\w+?)Kernel", name)[-1:] or [name]
        ctas = int(np.prod([int(x) for x in grid.split(",")]))
        found.append((re.sub(r"^.*\d", "", kernel), ctas, int(threads), int(shared)))
    return found


def attend(batch, **options):
    arguments, defaults = batch.ragged()
    call = defaults | options | {"return_lse": True, "implementation": "sim"}
    return ragged_paged_attention(*arguments, **call)


@pytest.mark.parametrize("architecture", [80, 90])
def test_a_mixed_batch_launches_plan_decode_and_prefill(architecture, loaded):
    set_devices(loaded, device(architecture))
    batch = make_batch(Case("sim", 8, 2, 128), jnp.bfloat16, [1, 40], [100, 60])
    assert_attention_close(*map(np.asarray, attend(batch)), *dense_oracle(batch))
    found = launches(loaded)
    assert [name for name, *_ in found] == ["Plan", "Decode", "Prefill"]
    limit = {80: 163, 90: 227}[architecture] * 1024
    assert all(shared <= limit for *_, shared in found)
    assert overlaps(loaded) == [architecture >= 90] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", [80, 90])
def test_a_call_with_a_plan_launches_no_planner(architecture, dtype, loaded):
    set_devices(loaded, device(architecture))
    batch = make_batch(Case("sim", 8, 2, 128), jnp.dtype(dtype), [1, 40], [100, 60])
    plan = plan_of(*call_of(batch, {}, implementation="sim"))
    assert [name for name, *_ in launches(loaded)] == ["Plan"]
    got = attend(batch, plan=plan)
    assert_attention_close(*map(np.asarray, got), *dense_oracle(batch))
    kernels = ["Decode", "Prefill"] if dtype == "bfloat16" else ["Simt"]
    assert [name for name, *_ in launches(loaded)] == ["Begin", *kernels]
    assert overlaps(loaded) == [architecture >= 90] * (1 + len(kernels))


def test_a_call_that_is_known_to_be_decode_launches_no_prefill(loaded):
    batch = make_batch(Case("sim", 8, 2, 128), jnp.bfloat16, [1] * 9, [100] * 9)
    attend(batch)
    assert [name for name, *_ in launches(loaded)] == ["Plan", "Decode", "Prefill"]
    expected = dense_oracle(batch)
    for most, kernels in ((1, ["Decode"]), (4, ["Decode"]), (5, ["Decode", "Prefill"])):
        assert_attention_close(*map(np.asarray, attend(batch, max_q_len=most)), *expected)
        assert [name for name, *_ in launches(loaded)] == ["Plan", *kernels]
    paged_attention(*batch.operands(), implementation="sim")
    assert [name for name, *_ in launches(loaded)] == ["Plan", "Decode"]


def test_rows_with_more_queries_than_was_said_are_right(loaded):
    batch = make_batch(Case("sim", 8, 2, 128), jnp.bfloat16, [1, 40, 9], [100, 60, 200])
    got = attend(batch, max_q_len=1)
    assert_attention_close(*map(np.asarray, got), *dense_oracle(batch))
    assert [name for name, *_ in launches(loaded)] == ["Plan", "Decode"]


def test_f32_launches_simt(loaded):
    batch = make_batch(Case("sim", 8, 2, 128), jnp.float32, [1, 4], [100, 60])
    attend(batch)
    assert [name for name, *_ in launches(loaded)] == ["Plan", "Simt"]


@pytest.mark.parametrize("many", [False, True])
def test_a_write_of_many_tokens_claims_their_slots_first(many, loaded):
    """Up to 2048 tokens one launch serves (kScannedTokens of ffi/cuda/written_tokens.h)."""
    count, claims = (2049, [("ClaimSlots", 17, 128, 0)]) if many else (2048, [])
    check(*(write_call(0, count)(how) for how in ("sim", "reference")))
    assert launches(loaded) == [*claims, ("WriteKv", 2 * count, 128, 16)]
    check(*(qkv_call(0, count)(how) for how in ("sim", "reference")))
    assert launches(loaded) == [*claims, ("Qkv", count, 128, 16)]


def test_no_token_launches_nothing(loaded):
    set_devices(loaded, device())
    q, pages = jnp.ones((0, 4, 16)), jnp.ones((2, 2, 4, 16))
    rows = (jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32))
    out = ragged_paged_attention(q, pages, pages, *rows, implementation="sim")
    assert out.shape == (0, 4, 16)


# ---- codes of e4m3: converted by sm_90, taken apart by sm_80 (cuda/expand_bytes.cuh) ----


def on_both(loaded, call):
    """The call's results on sm_80 and on sm_90 of the same size.

    The handlers keep what they have learned of a device by its number: these have their own.
    """
    small = {"shared_bytes_per_cta": 163 * 1024, "shared_bytes_per_multiprocessor": 164 * 1024}
    for ordinal, architecture in enumerate((80, 90), 2):
        set_devices(loaded, device(architecture, ordinal=ordinal, **small))
        yield [np.asarray(x) for x in jax.tree.leaves(call())]


@pytest.mark.parametrize("scale", ["head", "token"])
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_8_bit_pages_give_the_same_bits_on_both_architectures(dtype, kv, scale, loaded):
    batch = make_batch(Case("sim", 8, 2, 64), jnp.dtype(dtype), [1, 2], [100, 60])
    stored, real, scales = eight_bit(batch, kv, scale, np.random.default_rng(0))
    old, new = on_both(loaded, lambda: attend(stored, **scales))
    assert_attention_close(*new, *dense_oracle(real))
    for a, b in zip(old, new, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_e4m3_experts_give_the_same_bits_on_both_architectures(dtype, loaded):
    case = make_case(23, 6, 2, hidden=64, inner=48, dtype=jnp.dtype(dtype))
    case, scales, _ = quantized(jnp.float8_e4m3fn, case)
    (old,), (new,) = on_both(loaded, lambda: moe_experts(*case, **scales, implementation="sim"))
    np.testing.assert_array_equal(old.view(np.uint8), new.view(np.uint8))
    expected = moe_experts(*case, **scales, implementation="reference").astype(jnp.float32)
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3}[dtype]  # h is rounded after other sums
    np.testing.assert_allclose(new.astype(np.float32), expected, rtol=tolerance, atol=tolerance)


# ---- a recorded graph, replayed with other values ----


def attention_call(seed):
    lens = [([1, 1, 30, 0], [150, 1, 64, 40]), ([1, 0, 9, 20], [3, 70, 9, 170])][seed]
    batch = make_batch(
        Case("sim", 8, 2, 64), jnp.bfloat16, *lens, num_tokens=40, pages_per_seq=12, num_pages=50,
        seed=seed,
    )  # fmt: skip
    arguments, options = batch.ragged()
    return lambda how: ragged_paged_attention(*arguments, **options, implementation=how)


def planned_call(seed):
    lens = [([1, 1, 30, 0], [150, 1, 64, 40]), ([1, 0, 9, 20], [3, 70, 9, 170])][seed]
    batch = make_batch(
        Case("sim", 8, 2, 64), jnp.bfloat16, *lens, num_tokens=40, pages_per_seq=12, num_pages=50,
        seed=seed,
    )  # fmt: skip
    arguments, options = batch.ragged()
    plans = {"sim": plan_of(arguments, options | {"implementation": "sim"}), "reference": None}
    return lambda how: ragged_paged_attention(
        *arguments, **options, plan=plans[how], implementation=how
    )


def merge_call(seed):
    rng = np.random.default_rng(seed)
    out = [jnp.asarray(rng.standard_normal((30, 4, 64), "f4")) for _ in "ab"]
    lse = [jnp.asarray(rng.standard_normal((30, 4), "f4")) for _ in "ab"]
    return lambda how: merge_attention_states(out[0], lse[0], out[1], lse[1], implementation=how)


def experts_call(seed):
    case = make_case(23, 6, 2, hidden=64, inner=48, dtype=jnp.bfloat16)
    case = [case[0] * (1 + seed), *case[1:3], (case[3] + seed) % 6, case[4]]
    options = make_options(case, "swiglu_oai", "bfloat16", seed)
    return lambda how: moe_experts(*case, **options, implementation=how)


def write_call(seed, tokens=20):
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.standard_normal((tokens, 2, 32), "f4")) for _ in "kv")
    slots = jnp.asarray(rng.integers(-3, 60, tokens), jnp.int32)
    pages = jnp.asarray(rng.standard_normal((6, 2, 8, 32), "f4"))
    return lambda how: write_kv(pages + 0, pages + 1, k, v, slots, implementation=how)


def qkv_call(seed, tokens=11, kv_dtype="float32"):
    rng = np.random.default_rng(seed)
    qkv = jnp.asarray(rng.standard_normal((tokens, 8 * 32), "f4"))
    slots = jnp.asarray(rng.integers(0, 48, tokens), jnp.int32)
    angles = jnp.asarray(rng.standard_normal((64, 16), "f4"))
    positions = jnp.asarray(rng.integers(0, 70, tokens), jnp.int32)  # some of no position
    pages = jnp.asarray(rng.standard_normal((6, 2, 8, 32), "f4"))
    pages = [(10 * x).astype(kv_dtype) for x in (pages, pages + 1)]
    scales = [None, None] if kv_dtype == "float32" else [jnp.ones((6, 2, 8), jnp.float32)] * 2

    def call(how):
        k_pages, v_pages, k_scale, v_scale = jax.tree.map(jnp.copy, [*pages, *scales])
        results = qkv_norm_rope_write(
            qkv, k_pages, v_pages, positions, slots, jnp.cos(angles), jnp.sin(angles),
            num_q_heads=4, k_scale=k_scale, v_scale=v_scale, implementation=how,
        )  # fmt: skip
        return tuple(x.astype(jnp.float32) for x in results)

    return call


def many_writes_call(seed):
    return write_call(seed, tokens=2600)


def qkv_of_int8_call(seed):
    return qkv_call(seed, kv_dtype="int8")


def many_qkv_call(seed):
    return qkv_call(seed, tokens=2600)


@pytest.mark.parametrize(
    "make",
    [
        attention_call, planned_call, merge_call, experts_call, write_call, qkv_call,
        qkv_of_int8_call, many_writes_call, many_qkv_call,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_replayed_graph_takes_the_new_values(make, loaded):
    """What the host chose for the first call must serve the second one, in a used workspace."""
    for architecture in (80, 90):
        set_devices(loaded, device(architecture, seed=architecture))
        first, second = make(0), make(1)
        check(first("sim"), first("reference"))
        recorded = launches(loaded)
        loaded.sim_set_replays(1)
        for call in (second, first):
            check(call("sim"), call("reference"))
        loaded.sim_set_replays(0)
        assert launches(loaded) == recorded


def check(got, expected):
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for a, b in zip(got, expected, strict=True):
        tolerance = 0.02 if a.dtype == jnp.bfloat16 else 2e-5
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "source", ["write_kv/launch.cu", "merge_states/launch.cu", "attention/inst/decode_bf16_wide.cu"]
)
def test_ptx_of_both_architectures_is_the_same(source, tmp_path):
    """Where no kernel asks for its architecture; how launches overlap does not count."""
    texts = []
    for architecture in (80, 90):
        target = f"-gencode=arch=compute_{architecture},code=compute_{architecture}"
        out = tmp_path / f"{architecture}.ptx"
        flags = [x for x in NVCC_FLAGS if x not in ("-lineinfo", "-no-compress")]
        command = [nvcc(), *flags, target, "-I", FFI, "-ptx", FFI / "cuda" / source, "-o", out]
        subprocess.run(command, check=True)
        lines = [x.strip() for x in out.read_text().splitlines()]
        texts.append([x for x in lines if not x.startswith(("//", ".target", "griddepcontrol."))])
    assert texts[0] == texts[1]
