# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of moe_experts in the emulator (ffi/emu): tiles, turns, orders, planted bugs.

tests/ops/test_moe.py asks of all implementations, and so of these kernels, what the op should do.
"""

import dataclasses
import functools

import emulation
import jax.numpy as jnp
import numpy as np
import planting
import pytest
from emulation import Device, EmulationError, library, open_library, poisoned
from planting import sites_of, sparse_memory, survivors

from jax_paged.ops.activations import ACTIVATIONS
from jax_paged.ops.moe import _OPTIONS, _cuda_workspace_words
from jax_paged.testing.experts import ROUNDING, make_case, make_options, oracle, quantized

# As test_moe.py: two roundings over sums of some 24 terms; f16 has three bits more than bf16.
TOLERANCES = {"float32": 2e-5, "float16": 0.005, "bfloat16": 0.04}


@dataclasses.dataclass
class Call:
    """The operands of one call as numpy arrays, and what the call should give."""

    operands: dict[str, np.ndarray]
    expected: np.ndarray
    activation: str = "silu"

    @classmethod
    def of(cls, case, *, kind=None, blocks=False, **options):
        scales, meant = {}, case
        if kind is not None:
            case, scales, meant = quantized(kind, case, blocks)
        names = ("x", "gate_up", "down", "experts", "weights")
        arrays = dict.fromkeys(_OPTIONS, np.zeros(0, np.float32)) | scales | options
        activation = arrays.pop("activation", "silu")
        if "limit" in options:
            arrays["limit"] = np.float32(options["limit"])
        arrays |= dict(zip(names, case, strict=True))
        x, gate_up, down, experts, weights = map(np.asarray, meant)
        is_expert = (experts >= 0) & (experts < len(down))
        weights = np.where(is_expert, weights, 0)
        expected = oracle(x, gate_up, down, np.where(is_expert, experts, 0), weights, **options)
        return cls({name: np.asarray(x) for name, x in arrays.items()}, expected, activation)


def emulate(call, *, seed=1, num_workers=3, loaded=None, touched=None):
    """out of the CUDA kernels; raises EmulationError.

    `touched`: a dict that receives how many bytes of each element of gate_up and down were asked
    for.
    """
    x, down, experts = (call.operands[name] for name in ("x", "down", "experts"))
    words = _cuda_workspace_words(*experts.shape, *down.shape, x.itemsize)
    results = {"out": poisoned(x.shape, x.dtype), "workspace": poisoned((words,), np.int32)}
    bytes_of = {}
    if touched is not None:
        for name in ("gate_up", "down"):
            array = call.operands[name]
            bytes_of[name] = np.zeros((*array.shape, array.itemsize), np.uint8)
    emulation.call(
        "moe_experts", call.operands, {"activation": call.activation}, results,
        loaded=loaded, touched=bytes_of,
        device=Device(num_workers=num_workers, seed=seed),
    )  # fmt: skip
    if touched is not None:
        touched.update((name, array.sum(-1)) for name, array in bytes_of.items())
    return results["out"]


def check(call, *, rtol=1e-5, **options):
    """Runs a call and compares it with the oracle."""
    out = emulate(call, **options)
    assert out.dtype == call.operands["x"].dtype
    tolerance = TOLERANCES[out.dtype.name]
    np.testing.assert_allclose(out.astype("f8"), call.expected, atol=tolerance, rtol=rtol)
    return out


def with_experts(case, experts):
    """The case with other choices."""
    return [*case[:3], jnp.asarray(experts, jnp.int32), *case[4:]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [8, 9, 16, 17, 63, 64, 65, 128])
def test_tiles_that_are_full_and_one_token_more(tokens, dtype):
    case = make_case(tokens, 2, 1, dtype=dtype)
    check(Call.of(with_experts(case, np.zeros((tokens, 1)))))


@pytest.mark.parametrize("num_experts", [1, 33, 300, 3000, 8192])
def test_any_number_of_experts_is_sorted(num_experts):
    case = make_case(90, num_experts, 1, hidden=8, inner=8)
    ids = np.random.default_rng(0).integers(-1, num_experts + 1, (90, 1))
    check(Call.of(with_experts(case, ids)))


def test_a_call_of_more_pairs_than_one_turn():
    case = make_case(5600, 3, 3, hidden=8, inner=8, dtype=jnp.bfloat16)
    ids = np.where(np.arange(5600)[:, None] % 40 == 0, np.asarray(case[3]), -1)
    check(Call.of(with_experts(case, ids)))


@pytest.mark.parametrize("kind", [None, jnp.int8])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_only_the_experts_that_somebody_chose_are_read(dtype, kind):
    case = make_case(6, 8, 2, hidden=48, inner=80, dtype=dtype)
    call, touched = Call.of(with_experts(case, case[3] % 3), kind=kind), {}
    check(call, touched=touched)
    chosen = np.isin(np.arange(8), call.operands["experts"])
    for name, counts in touched.items():
        assert counts[chosen].all(), f"{name}: not all of a chosen expert is read"
        assert not counts[~chosen].any(), f"{name}: an expert that nobody chose is read"


@pytest.mark.parametrize("bias_dtype", ["float32", "x"])
@pytest.mark.parametrize("kind", [None, jnp.int8])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_biases_of_full_tiles_and_of_one_token_more(activation, dtype, kind, bias_dtype):
    """The last block of rows is a short one, in gate and up as in down."""
    case = with_experts(make_case(65, 3, 1, 136, 72, dtype=dtype), np.full((65, 1), 2))
    options = make_options(case, activation, dtype if bias_dtype == "x" else bias_dtype)
    check(Call.of(case, kind=kind, **options), rtol=ROUNDING[dtype])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("activation", "relu", 'activation expected "silu", "gelu", .*, got "relu"'),
        ("limit", np.zeros(1, "f4"), r"limit expected shape \[\], got \[1\]"),
        ("limit", np.zeros(0, "i4"), "limit expected float32, got int32"),
        ("gate_up_bias", np.zeros((4, 24), "f4"), r"gate_up_bias expected shape \[4, 48\], got"),
        ("down_bias", np.zeros(16, "f4"), r"down_bias expected shape \[0\], got \[16\]"),
        (
            "down_bias",
            np.zeros((4, 16), "f2"),
            "down_bias expected bfloat16 or float32, got float16",
        ),
    ],
)
def test_a_call_that_came_another_way_is_refused_by_name(name, change, message):
    case = make_case(3, 4, 2, dtype=jnp.bfloat16)
    call = Call.of(case, **make_options(case, "swiglu_oai", "float32"))
    if name == "activation":
        call.activation = change
    else:
        call.operands[name] = change
    with pytest.raises(EmulationError, match=message):
        emulate(call)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_bits_depend_neither_on_the_batch_nor_on_the_order_of_ctas(dtype):
    case = make_case(40, 6, 3, hidden=264, inner=136, dtype=dtype)
    x, gate_up, down, experts, weights = case
    together = emulate(Call.of(case))
    one = Call.of([x[7:8], gate_up, down, experts[7:8], weights[7:8]])
    for seed, num_workers in [(0, 1), (2, 7), (5, 40)]:
        again, alone = (
            emulate(c, seed=seed, num_workers=num_workers) for c in (Call.of(case), one)
        )
        np.testing.assert_array_equal(together, again)
        np.testing.assert_array_equal(together[7:8], alone)


def test_the_workspace_that_python_asks_for_is_what_the_kernels_need():
    words_of = library().moe_experts_workspace_words
    for tokens in (1, 7, 64, 5000, 100_000):
        for k, num_experts in [(1, 1), (3, 8), (8, 128), (20_000, 5)]:
            for hidden, inner, width in [(8, 8, 2), (2048, 768, 2), (72, 24, 4)]:
                sizes = (tokens, k, num_experts, hidden, inner, width)
                assert _cuda_workspace_words(*sizes) == words_of(*sizes)


# file, what stands there, what the bug makes of it, what must be said about it
DIFFERS = "Not equal to tolerance"
BUGS = {
    "ids above the last not dropped": (
        "plan.cuh", "id < args_.num_experts ? id : -1", "id",
        "out of bounds|race|nobody has",
    ),
    "warps count into one row": (
        "plan.cuh", "counts_ + warp * args_.num_experts;", "counts_;", "race",
    ),
    "an expert's tiles begin at the first": (
        "plan.cuh", "MoeTile{expert, first + skipped,", "MoeTile{expert, first,",
        "write after write",
    ),
    "a last tile that is full": (
        "plan.cuh", "left < args_.tile_tokens ? left : args_.tile_tokens", "args_.tile_tokens",
        "out of bounds|race|nobody has|write after write",
    ),
    "pairs all at the first place": (
        "plan.cuh", "(count + before), pair", "count, pair", "write after write|race",
    ),
    "ring loaded one stage too far": (
        "gemm.cuh", "s < Stage::kStages - 1", "s < Stage::kStages", "while the cp.async",
    ),
    "loads into the stage being read": (
        "gemm.cuh", "ring + before * Stage::kBytes", "ring + stage * Stage::kBytes",
        "cp.async|race",
    ),
    "waits too late": (
        "gemm.cuh", "CpAsyncWait(Stage::kStages - 2)", "CpAsyncWait(Stage::kStages - 1)",
        "while the cp.async",
    ),
    "rows beyond the last read": (
        "gemm.cuh", "result < product.num_rows && column", "column", "out of bounds|not be read",
    ),
    "depth beyond the last read": (
        "gemm.cuh", "result < product.num_rows && column < product.depth",
        "result < product.num_rows",
        f"out of bounds|{DIFFERS}",
    ),
    "tokens that do not exist not zeroed": (
        "gemm.cuh", "source_[i] >= 0 && column", "column", "out of bounds",
    ),
    "up read as gate": (
        "gemm.cuh", "is_up ? product.num_rows + result : result", "result", DIFFERS,
    ),
    "the expert of the item before": (
        "gemm.cuh", "expert_ = item.tile.expert;", "if (expert_ == 0) expert_ = item.tile.expert;",
        f"{DIFFERS}|read",
    ),
    "a token too few": (
        "gemm.cuh", "const bool is_token = token < item.tile.count;",
        "const bool is_token = token < item.tile.count - 1;", "nobody has",
    ),
    "rows not swapped": (
        "gemm.cuh", "of[half][0] = is_odd ? other : kept;", "of[half][0] = kept;", DIFFERS,
    ),
    "scale of the other half": (
        "gemm.cuh", "if (IS_GATED && set == 1) row += product.num_rows;", "", DIFFERS,
    ),
    "biases left out": (
        "gemm.cuh", "product.bias.data ? LoadMoeBias<T>(product.bias, at) : 0.0f", "0.0f", DIFFERS,
    ),
    "biases for scaled experts alone": (
        "gemm.cuh", "if (product.scale || product.bias.data) {", "if (product.scale) {", DIFFERS,
    ),
    "a 16-bit bias read as f32": (
        "gated_unit.cuh", "if (!bias.is_float) {", "if (false) {", f"out of bounds|{DIFFERS}",
    ),
    "up cut on one side alone": (
        "gated_unit.cuh", "(up < -limit ? -limit : up)", "up", DIFFERS,
    ),
    "gate not cut": (
        "gated_unit.cuh", "gate = gate > limit ? limit : gate;", "", DIFFERS,
    ),
    "gelu of the wrong side": (
        "gated_unit.cuh", "float a = x < 0.0f ? -x : x;", "float a = x;", DIFFERS,
    ),
    "gelu_tanh without its cube": (
        "gated_unit.cuh", "gate * kGeluTanh[1], gate, kGeluTanh[0]", "0.0f, gate, kGeluTanh[0]",
        DIFFERS,
    ),
    "scale of the block before": (
        "gemm.cuh", "product.BlockScale(expert, 0, row, depth)",
        "product.BlockScale(expert, 0, row, depth / 2)", DIFFERS,
    ),
    "scale of gate for up": (
        "gemm.cuh", "product.BlockScale(expert, IS_GATED ? 1 : 0, row, depth)",
        "product.BlockScale(expert, 0, row, depth)", DIFFERS,
    ),
    "scale of the first rows": (
        "gemm.cuh", "* row_blocks + row / kScaleBlock", "* row_blocks", DIFFERS,
    ),
    "scale of another expert": (
        "gemm.cuh", "(expert * (IS_GATED ? 2 : 1) + part)", "(expert + part)",
        f"out of bounds|{DIFFERS}",
    ),
    "bytes in the order of 16-bit weights": (
        "gemm.cuh", "a[step][set][1] = lower.low;\n        a[step][set][2] = upper.high;",
        "a[step][set][2] = lower.low;\n        a[step][set][1] = upper.high;", DIFFERS,
    ),
    "32-bit row of weights": (
        "gemm.cuh", "(from * row_bytes + column", "((int32_t)(from * row_bytes) + column",
        "out of bounds",
    ),
    "blocks of tokens left out": (
        "gemm.cuh", "(item.tile.count + 15) / 16;\n    MoeSums", "1;\n    MoeSums", DIFFERS,
    ),
    "h read where x is": (
        "gemm.cuh", "from = IS_GATED ? args.x :", "from = !IS_GATED ? args.x :",
        "nobody has|out of bounds",
    ),
    "SIMT: up read as gate": (
        "simt.cuh", "IS_GATED ? product.num_rows + unit : 2 * unit + 1",
        "IS_GATED ? unit : 2 * unit + 1", DIFFERS,
    ),
    "SIMT: biases left out": (
        "simt.cuh", "prim::Fma(sums[0][n], scale[0], bias[0])", "sums[0][n] * scale[0]", DIFFERS,
    ),
    "SIMT: half of the lanes summed": (
        "simt.cuh", "mask = kWarpLanes / 2", "mask = kWarpLanes / 4", DIFFERS,
    ),
    "SIMT: tokens of the tile before": (
        "simt.cuh", "is_token ? tile.first + n : 0", "n", f"{DIFFERS}|nobody has",
    ),
    "SIMT: depth beyond a lane's": (
        "simt.cuh", "d += kWarpLanes * kMoeSimtDepth", "d += kWarpLanes", DIFFERS,
    ),
    "weights of another pair": (
        "combine.cuh", "args.weights + pair", "args.weights + (pair / 2)", DIFFERS,
    ),
    "ids that are no expert combined": (
        "combine.cuh", "if (expert < 0 || expert >= args.num_experts) continue;", "", "nobody has",
    ),
}  # fmt: skip
# In the place of select.h: the kernels that bugs are tried on, so that they compile in a second.
SELECT = """
#include "cuda/moe_experts/args.h"
namespace jax_paged::cuda {
template <typename Run>
auto SelectMoe(const MoeParams& in, Run run) {
  return in.w_dtype == Dtype::kInt8 ? run.template operator()<BFloat16, Int8>()
                                    : run.template operator()<BFloat16, BFloat16>();
}
}  // namespace jax_paged::cuda
"""


def far_call():
    """A call whose last experts lie more than 2^31 bytes into their array.

    Little of the array is ever touched.
    """
    hidden, inner, chosen = 264, 256, np.array([8190, 3], np.int32)
    case = make_case(40, 2, 1, hidden=hidden, inner=inner, dtype=jnp.bfloat16)
    call = Call.of(case)
    for name in ("gate_up", "down"):
        experts = call.operands[name]
        memory = sparse_memory(8192 * experts[0].nbytes)
        far = np.frombuffer(memory, np.uint16).view(experts.dtype).reshape(-1, *experts.shape[1:])
        far[chosen] = experts
        call.operands[name] = far
    call.operands["experts"] = chosen[call.operands["experts"]]
    return call


@functools.cache
def battery():
    """Calls that between them meet every bug, and every barrier and wait."""
    ids = [[-1, 5, 2**31 - 1]] * 3 + [[5, 2, 6]] * 30 + [[2, 2, 1]] * 30
    calls = []
    sizes = [(136, 72, None), (80, 144, jnp.int8), (392, 40, jnp.int8)]
    activations = [("silu", None), ("gelu", "float32"), ("gelu", "bfloat16")]
    activations += [("swiglu_oai", "bfloat16"), ("gelu_tanh", "float32")]
    for i, (activation, bias_dtype) in enumerate(activations):
        hidden, inner, kind = sizes[i % 3]
        case = make_case(63, 6, 3, hidden=hidden, inner=inner, dtype=jnp.bfloat16)
        options = make_options(case, activation, bias_dtype)
        calls.append(Call.of(with_experts(case, ids), kind=kind, **options))
    case = make_case(63, 6, 3, hidden=272, inner=144, dtype=jnp.bfloat16)
    case[1] *= jnp.asarray(2.0 ** -np.arange(6), jnp.bfloat16)[:, None, None]
    for at, axis in ((1, 1), (1, 2), (2, 1), (2, 2)):  # blocks and experts of other sizes
        case[at] = jnp.where(
            jnp.arange(case[at].shape[axis]).reshape((-1, 1) if axis == 1 else (1, -1)) < 128,
            case[at], case[at] / 2,
        )  # fmt: skip
    calls.append(Call.of(with_experts(case, ids), kind=jnp.int8, blocks=True))
    return calls, far_call()


def check_all(loaded=None):
    """Runs the battery, copies late, early and by chance, and looks at which experts are read."""
    calls, far = battery()
    for seed in (0, 1, 2):
        for call in calls:
            touched = {}
            check(call, seed=seed, loaded=loaded, touched=touched)
            assert not any(counts[[0, 3, 4]].any() for counts in touched.values()), "experts read"
    check(far, loaded=loaded)


@pytest.fixture(scope="module")
def planted(request, tmp_path_factory):
    with planting.planted(
        planting.asked_for(BUGS, request), tmp_path_factory.mktemp,
        op="moe_experts", source="ffi/emu/moe_experts.cc",
        files={"ffi/cuda/moe_experts/select.h": SELECT}, load=open_library,
    ) as libraries:  # fmt: skip
        yield libraries


def test_the_kernels_as_they_are_pass():
    check_all()


def test_each_bug_has_its_place():
    assert planting.misplaced(BUGS, "cuda/moe_experts") == []


@pytest.mark.deep
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name, planted):
    loaded = planted[name].result()
    with pytest.raises((EmulationError, AssertionError), match=BUGS[name][3]):
        check_all(loaded)


@pytest.mark.deep
def test_every_barrier_and_wait_is_needed_and_missed():
    loaded = library()
    sites = sites_of(loaded, check_all)
    assert {kind for kind, _ in sites} == {"SyncThreads", "SyncWarp", "CpAsyncWait"}
    assert not survivors(loaded, check_all, sites), "skipped without any finding"
