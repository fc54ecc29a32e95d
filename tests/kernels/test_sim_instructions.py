# SPDX-License-Identifier: Apache-2.0
"""Instructions of the simulated device (ffi/sim) against what the PTX ISA says of them.

The expected values are written down here from the ISA's text and figures, by number of the section
where a table stands; nothing is taken from the emulator (ffi/emu) or from prim.h.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from simulation import SimulationError, run_ptx

pytestmark = pytest.mark.sim

NAN, INF = np.float32(np.nan), np.float32(np.inf)


def columns(count, width=4):
    """PTX that loads `count` words of %in0 into %r0 … and has %rd0 point at the thread's output."""
    lines = ["mul.wide.u32 %rd1, %t, 4;"]
    for i in range(count):
        lines += [f"add.s64 %rd2, %in{i}, %rd1;", f"ld.global.nc.u32 %r{i}, [%rd2];"]
    lines += [f"mul.wide.u32 %rd1, %t, {width};", "add.s64 %rd0, %out, %rd1;"]
    return "\n".join(lines)


def apply(instruction, *operands, dtype=np.uint32):
    """A result of up to 32 lanes: `instruction` takes %r0 … (or %f0 …) and makes %r9 (or %f9)."""
    rows = np.broadcast_arrays(*(np.asarray(x) for x in operands))
    inputs = []
    for row in rows:
        padded = np.zeros(32, row.dtype)
        padded[: row.size] = row.reshape(-1)
        inputs.append(padded.view(np.uint32))
    moves = "\n".join(f"mov.b32 %f{i}, %r{i};" for i in range(len(inputs)))
    last = "mov.b32 %r9, %f9;" if "%f9" in instruction.partition(",")[0] else ""
    body = f"{columns(len(inputs))}\n{moves}\n{instruction}\n{last}\nst.global.u32 [%rd0], %r9;"
    out = run_ptx(body, inputs, np.zeros(32, np.uint32))
    return out[: rows[0].size].view(dtype)


# ---- matrices (9.7.14.5: fragments of mma.m16n8k16; 9.7.14.5.15: ldmatrix) ----


def fragment(matrix, kind):
    """The matrix as registers of each lane: u16 or f32 [32, elements], by the ISA's formulas."""
    lanes = np.arange(32)
    group, member = lanes // 4, lanes % 4
    out = []
    for i in range({"a": 8, "b": 4, "c": 4}[kind]):
        if kind == "a":
            row = group if i < 2 or 4 <= i < 6 else group + 8
            column = member * 2 + (i & 1) + (8 if i >= 4 else 0)
        elif kind == "b":
            row = member * 2 + (i & 1) + (8 if i >= 2 else 0)
            column = group
        else:
            row = group if i < 2 else group + 8
            column = member * 2 + (i & 1)
        out.append(matrix[row, column])
    return np.stack(out, axis=1)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("seed", range(3))
def test_mma_multiplies_the_matrices_of_the_isa(kind, seed):
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(-8, 9, shape) for shape in ((16, 16), (16, 8), (16, 8)))
    dtype = jnp.dtype({"bf16": "bfloat16", "f16": "float16"}[kind])
    words = [
        np.ascontiguousarray(fragment(x.astype(dtype), name)).view(np.uint32)
        for x, name in ((a, "a"), (b, "b"))
    ]
    words.append(np.ascontiguousarray(fragment(c.astype(np.float32), "c")).view(np.uint32))
    loads, register = [], 0
    for i, count in enumerate((4, 2, 4)):
        loads += [f"mul.wide.u32 %rd1, %t, {4 * count};", f"add.s64 %rd2, %in{i}, %rd1;"]
        for k in range(count):
            loads.append(f"ld.global.nc.u32 %r{register}, [%rd2+{4 * k}];")
            register += 1
    loads += [f"mov.b32 %f{i}, %r{6 + i};" for i in range(4)]
    body = (
        "\n".join(loads)
        + f"""
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}},
        {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%f0, %f1, %f2, %f3}};
    mul.wide.u32 %rd1, %t, 16;
    add.s64 %rd0, %out, %rd1;
    st.global.v4.f32 [%rd0], {{%f4, %f5, %f6, %f7}};
    """
    )
    out = run_ptx(body, words, np.zeros((32, 4), np.float32))
    np.testing.assert_array_equal(out, fragment((a @ b + c).astype(np.float32), "c"))


def test_mma_sums_are_cut_off_and_not_rounded():
    """Tensor cores cut the bits that f32 has no room for, toward zero."""
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    a[0, :2], b[:2, 0] = 1, (1, 2.0**-8)
    c = np.zeros((16, 8), np.float32)
    c[0, 0] = 2.0**16  # beside 1 + 2^-8 ulps of 2^-7: half of one is cut
    words = [
        np.ascontiguousarray(fragment(x.astype(jnp.bfloat16), name)).view(np.uint32)
        for x, name in ((a, "a"), (b, "b"))
    ]
    words.append(fragment(c, "c").view(np.uint32))
    body = """
    mul.wide.u32 %rd1, %t, 16;
    add.s64 %rd2, %in0, %rd1;
    ld.global.nc.v4.u32 {%r0, %r1, %r2, %r3}, [%rd2];
    add.s64 %rd2, %in2, %rd1;
    ld.global.nc.v4.u32 {%r6, %r7, %r8, %r9}, [%rd2];
    add.s64 %rd0, %out, %rd1;
    mul.wide.u32 %rd1, %t, 8;
    add.s64 %rd2, %in1, %rd1;
    ld.global.nc.v2.u32 {%r4, %r5}, [%rd2];
    mov.b32 %f0, %r6; mov.b32 %f1, %r7; mov.b32 %f2, %r8; mov.b32 %f3, %r9;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f4, %f5, %f6, %f7}, {%r0, %r1, %r2, %r3},
        {%r4, %r5}, {%f0, %f1, %f2, %f3};
    st.global.v4.f32 [%rd0], {%f4, %f5, %f6, %f7};
    """
    out = run_ptx(body, words, np.zeros((32, 4), np.float32))
    assert out[0, 0] == 2.0**16 + 1
    assert out[0, 1] == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_its_elements(transposed):
    """Row r of matrix m is at the address of lane 8 m + r; lane l gets elements of row l / 4."""
    tiles = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    name = ".trans" if transposed else ""
    body = f"""
    mul.wide.u32 %rd1, %t, 16;
    add.s64 %rd2, %in0, %rd1;
    ld.global.nc.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd2];
    mov.u32 %r10, dynamic;
    xor.b32 %r11, %t, 5;  // rows at any place
    shl.b32 %r11, %r11, 4;
    add.s32 %r12, %r10, %r11;
    st.shared.v4.u32 [%r12], {{%r0, %r1, %r2, %r3}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{name}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r12];
    add.s64 %rd0, %out, %rd1;
    st.global.v4.u32 [%rd0], {{%r4, %r5, %r6, %r7}};
    """
    out = run_ptx(body, [tiles], np.zeros((32, 4), np.uint32)).view(np.uint16)
    for lane, matrix, half in itertools.product(range(32), range(4), range(2)):
        row, column = lane // 4, lane % 4 * 2 + half
        expected = tiles[matrix, column, row] if transposed else tiles[matrix, row, column]
        assert out[lane, 2 * matrix + half] == expected


# ---- conversions ----


@pytest.mark.parametrize(
    ("kind", "value", "bits"),
    [
        ("bf16", 1.0, 0x3F80), ("bf16", 1 + 2**-8, 0x3F80), ("bf16", 1 + 3 * 2**-8, 0x3F82),
        ("bf16", 1 + 2**-8 + 2**-20, 0x3F81), ("bf16", -0.0, 0x8000), ("bf16", INF, 0x7F80),
        ("bf16", 3.4e38, 0x7F80), ("bf16", 2.0**-133, 0x0001), ("bf16", 2.0**-134, 0x0000),
        ("f16", 1.0, 0x3C00), ("f16", 1 + 2**-11, 0x3C00), ("f16", 1 + 3 * 2**-11, 0x3C02),
        ("f16", 65504.0, 0x7BFF), ("f16", 65520.0, 0x7C00), ("f16", -1e9, 0xFC00),
        ("f16", 2.0**-24, 0x0001), ("f16", 2.0**-25, 0x0000), ("f16", 3 * 2.0**-26, 0x0001),
    ],
)  # fmt: skip
def test_packing_rounds_to_nearest_even_with_the_first_operand_above(kind, value, bits):
    x = np.float32(value)
    other = {"bf16": 0x4000, "f16": 0x4000}[kind]  # 2
    high = apply(f"cvt.rn.{kind}x2.f32 %r9, %f0, %f1;", x, np.float32(2))
    low = apply(f"cvt.rn.{kind}x2.f32 %r9, %f1, %f0;", x, np.float32(2))
    assert high[0] == bits << 16 | other
    assert low[0] == other << 16 | bits


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_packed_nan_is_nan(kind):
    word = int(apply(f"cvt.rn.{kind}x2.f32 %r9, %f0, %f0;", NAN)[0])
    exponent, mantissa = {"bf16": (0x7F80, 0x7F), "f16": (0x7C00, 0x3FF)}[kind]
    for half in (word & 0xFFFF, word >> 16):
        assert half & exponent == exponent
        assert half & mantissa


def test_every_half_converts_to_its_value():
    bits = np.arange(2**16, dtype=np.uint16)
    for chunk in (bits[::2113], bits[:32], bits[0x03F0:0x0410], bits[0x7BF0:0x7C10]):
        chunk = chunk[:32]
        out = apply("mov.b32 {%rs0, %rs1}, %r0;\ncvt.f32.f16 %f9, %rs0;\nmov.b32 %r9, %f9;",
                    chunk.astype(np.uint32))  # fmt: skip
        np.testing.assert_array_equal(out.view(np.float32), chunk.view(np.float16).astype("f4"))


def e4m3_value(code):
    """Of 1 + 4 + 3 bits with a bias of 7: no infinity, and one NaN of either sign."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("high", [0x00, 0x38, 0x7E, 0xFF])
def test_every_code_of_e4m3_converts_to_its_half_beside_any_other(high):
    codes = np.arange(256, dtype=np.uint32)
    expected = np.array([e4m3_value(code) for code in (*range(256), high)], np.float16)
    for chunk in codes.reshape(8, 32):
        words = apply("mov.b32 {%rs0, %rs1}, %r0;\ncvt.rn.f16x2.e4m3x2 %r9, %rs0;",
                      chunk | np.uint32(high << 8 | 0x55550000))  # fmt: skip
        halves = words.view(np.float16).reshape(32, 2)
        np.testing.assert_array_equal(halves[:, 0], expected[chunk])
        np.testing.assert_array_equal(halves[:, 1], np.full(32, expected[256]))
        assert (np.signbit(halves[:, 0]) == (chunk >= 128))[~np.isnan(expected[chunk])].all()


@pytest.mark.parametrize(
    ("instruction", "value", "expected"),
    [
        ("cvt.s32.s8 %r9, %rs0;", 0x80, -128), ("cvt.s32.s8 %r9, %rs0;", 0xFF7F, 127),
        ("cvt.u32.u16 %r9, %rs0;", 0xFFFF, 65535),
        ("cvt.s16.s8 %rs1, %rs0;\ncvt.u32.u16 %r9, %rs1;", 0xFF, 0xFFFF),
        ("cvt.s64.s32 %rd3, %r0;\nshr.s64 %rd3, %rd3, 4;\ncvt.u32.u64 %r9, %rd3;", -32, -2),
        ("cvt.u64.u32 %rd3, %r0;\nshr.u64 %rd3, %rd3, 4;\ncvt.u32.u64 %r9, %rd3;", -32, 0x0FFFFFFE),
        # From the lower half of a register of 64 bits.
        ("mov.b64 %rd3, {%r0, %l};\ncvt.s64.s32 %rd4, %rd3;\nshr.s64 %rd4, %rd4, 8;\n"
         "cvt.u32.u64 %r9, %rd4;", -256, -1),
    ],
)  # fmt: skip
def test_integers_are_widened_by_their_sign(instruction, value, expected):
    body = "mov.b32 {%rs0, %rs2}, %r0;\n" + instruction
    out = apply(body, np.full(32, value & 0xFFFFFFFF, np.uint32))
    np.testing.assert_array_equal(out, np.uint32(expected & 0xFFFFFFFF))


# ---- bits (9.7.8: prmt, bfi, shl, shr, shf) ----


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (0x3210, 0x33221100), (0x7654, 0xF7E6D5C4), (0x0123, 0x00112233), (0x0000, 0x00000000),
        (0x4321, 0xC4332211), (0xFEDC, 0xFFFFFFFF), (0xB210, 0x00221100), (0x00C4, 0x0000FFC4),
    ],
)  # fmt: skip
def test_prmt_chooses_bytes_and_signs(selector, expected):
    out = apply(
        f"prmt.b32 %r9, %r0, %r1, {selector};", np.uint32(0x33221100), np.uint32(0xF7E6D5C4)
    )
    assert out[0] == expected


@pytest.mark.parametrize(
    ("a", "b", "at", "count", "expected"),
    [
        (0xFF, 0, 4, 4, 0xF0), (0, 0xFFFFFFFF, 8, 8, 0xFFFF00FF), (0xAB, 0x111, 0, 0, 0x111),
        (5, 0, 31, 5, 0x80000000), (0xFFFFFFFF, 0, 0, 32, 0xFFFFFFFF), (1, 7, 32, 4, 7),
    ],
)  # fmt: skip
def test_bfi_puts_bits_where_they_are_to_go(a, b, at, count, expected):
    out = apply(f"bfi.b32 %r9, %r0, %r1, {at}, {count};", np.uint32(a), np.uint32(b))
    assert out[0] == expected


@pytest.mark.parametrize(
    ("instruction", "a", "by", "expected"),
    [
        ("shl.b32", 1, 31, 0x80000000), ("shl.b32", 1, 32, 0), ("shl.b32", 1, 2**31, 0),
        ("shr.u32", 0x80000000, 31, 1), ("shr.u32", 0x80000000, 32, 0),
        ("shr.s32", 0x80000000, 31, 0xFFFFFFFF), ("shr.s32", 0x80000000, 99, 0xFFFFFFFF),
        ("shr.s32", 0x40000000, 99, 0),
    ],
)  # fmt: skip
def test_shifts_are_clamped(instruction, a, by, expected):
    out = apply(f"{instruction} %r9, %r0, %r1;", np.uint32(a), np.uint32(by))
    assert out[0] == expected


@pytest.mark.parametrize(
    ("low", "high", "by", "expected"),
    [
        (0x89ABCDEF, 0x01234567, 0, 0x01234567), (0x89ABCDEF, 0x01234567, 4, 0x12345678),
        (0x89ABCDEF, 0x01234567, 31, 0xC4D5E6F7), (0x89ABCDEF, 0x01234567, 32, 0x01234567),
        (0x89ABCDEF, 0x01234567, 36, 0x12345678), (0xFFFFFFFE, 0xFFFFFFFE, 5, 0xFFFFFFDF),
        (0xFFFFFFFE, 0xFFFFFFFE, 2**32 - 1, 0x7FFFFFFF),
    ],
)  # fmt: skip
def test_a_funnel_shift_takes_the_upper_half_and_wraps_its_count(low, high, by, expected):
    given = (np.uint32(x) for x in (low, high, by))
    assert apply("shf.l.wrap.b32 %r9, %r0, %r1, %r2;", *given)[0] == expected


# ---- floats (9.7.3) ----


@pytest.mark.parametrize(
    ("instruction", "a", "b", "expected"),
    [
        ("max.f32", NAN, 1, 1), ("max.f32", 1, NAN, 1), ("max.f32", -0.0, 0.0, 0.0),
        ("max.f32", 0.0, -0.0, 0.0), ("max.f32", -INF, 3, 3), ("min.f32", NAN, 1, 1),
        ("min.f32", 0.0, -0.0, -0.0), ("copysign.f32", -1.0, 5.0, -5.0),
        ("copysign.f32", 2.0, -5.0, 5.0), ("div.rn.f32", 1, 3, np.float32(1) / np.float32(3)),
        ("div.rn.f32", 1, 0, INF), ("add.f32", 1, 2.0**-24, 1),
        ("mul.f32", 2.0**-100, 2.0**-49, 2.0**-149),
    ],
)  # fmt: skip
def test_floats(instruction, a, b, expected):
    out = apply(f"{instruction} %f9, %f0, %f1;", np.float32(a), np.float32(b), dtype=np.float32)
    np.testing.assert_array_equal(out, np.float32(expected))
    assert np.signbit(out[0]) == np.signbit(np.float32(expected))


def test_ex2_flushes_what_is_subnormal():
    x = np.array([0, 1, -1, 0.5, -126, -127, -200, 128, -INF, INF, 2.0**-140], np.float32)
    out = apply("ex2.approx.ftz.f32 %f9, %f0;", x, dtype=np.float32)
    expected = np.array([1, 2, 0.5, 2**0.5, 2.0**-126, 0, 0, INF, 0, INF, 1], np.float32)
    np.testing.assert_allclose(out, expected, rtol=2.0**-22)


def test_a_fused_sum_is_rounded_once():
    x = np.float32(1 + 2.0**-12)
    out = apply("fma.rn.f32 %f9, %f0, %f0, %f1;", x, np.float32(-1), dtype=np.float32)
    assert out[0] == np.float32(2.0**-11 + 2.0**-24)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16x2", "bfloat16"), ("f16x2", "float16")])
def test_fused_pairs_keep_subnormal_numbers(kind, dtype):
    dtype = jnp.dtype(dtype)
    tiny = jnp.finfo(dtype).smallest_subnormal
    pairs = [np.array([x, y], dtype).view(np.uint32) for x, y in ((tiny, 3), (1, 0.5), (tiny, -1))]
    out = apply(f"fma.rn.{kind} %r9, %r0, %r1, %r2;", *pairs).view(dtype)
    np.testing.assert_array_equal(out.astype("f4"), [2 * float(tiny), 0.5])


@pytest.mark.parametrize(
    ("comparison", "less", "equal", "greater", "nan"),
    [
        ("eq", 0, 1, 0, 0), ("ne", 1, 0, 1, 0), ("lt", 1, 0, 0, 0), ("le", 1, 1, 0, 0),
        ("gt", 0, 0, 1, 0), ("ge", 0, 1, 1, 0), ("equ", 0, 1, 0, 1), ("neu", 1, 0, 1, 1),
        ("ltu", 1, 0, 0, 1), ("leu", 1, 1, 0, 1), ("gtu", 0, 0, 1, 1), ("geu", 0, 1, 1, 1),
    ],
)  # fmt: skip
def test_comparisons_and_nan(comparison, less, equal, greater, nan):
    a, b = np.array([1, 2, 3, NAN, 2], "f4"), np.array([2, 2, 2, 2, NAN], "f4")
    body = f"setp.{comparison}.f32 %p1, %f0, %f1;\nselp.u32 %r9, 1, 0, %p1;"
    np.testing.assert_array_equal(apply(body, a, b), [less, equal, greater, nan, nan])


# ---- lanes (9.7.9: shfl, vote, match) ----


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("bfly", 1, 31, lambda lane: lane ^ 1),
        ("bfly", 16, 31, lambda lane: lane ^ 16),
        ("up", 1, 0, lambda lane: lane - 1 if lane >= 1 else lane),
        ("up", 7, 0, lambda lane: lane - 7 if lane >= 7 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 <= 31 else lane),
        ("idx", 5, 31, lambda lane: 5),
        ("idx", 5, 0x181F, lambda lane: lane // 8 * 8 + 5),  # segments of 8 lanes
        ("up", 1, 0x1800, lambda lane: lane - 1 if lane % 8 else lane),
    ],
)
def test_shuffles(mode, b, c, source):
    values = np.arange(100, 132, dtype=np.uint32)
    out = apply(f"shfl.sync.{mode}.b32 %r9|%p1, %r0, {b}, {c}, -1;", values)
    np.testing.assert_array_equal(out, [100 + source(lane) for lane in range(32)])


def test_votes_and_matches():
    x = np.array([3, 7, 3, 9] * 8, np.uint32)
    ballot = apply("setp.eq.s32 %p1, %r0, 7;\nvote.sync.ballot.b32 %r9, %p1, -1;", x)
    np.testing.assert_array_equal(ballot, 0x22222222)
    match = apply("match.any.sync.b32 %r9, %r0, -1;", x)
    np.testing.assert_array_equal(match, [0x55555555, 0x22222222, 0x55555555, 0x88888888] * 8)


# ---- atomics (9.7.13.5: d = a; a = op(a, b, c), at the same address one after the other) ----

I32_MIN = -(2**31)
ATOMICS = {  # instruction → the new value of the old one and the operands
    "atom.global.cas.b32 %r9, [%rd0], %r0, %r1;": lambda a, b, c: c if a == b else a,
    "atom.global.max.s32 %r9, [%rd0], %r0;": lambda a, b, c: max(a, b),
    "atom.global.inc.u32 %r9, [%rd0], %r0;": lambda a, b, c: 0 if a % 2**32 >= b % 2**32 else a + 1,
}


@pytest.mark.parametrize("instruction", ATOMICS)
@pytest.mark.parametrize("num_words", [32, 1])
def test_atomics_return_the_old_value_and_leave_the_new_one(num_words, instruction):
    """Lanes of a warp come to a word in any order: with one word each of them sees another step."""
    rng = np.random.default_rng(num_words)
    few = np.array([-1, 0, 1, 7, 2**31 - 1, I32_MIN], np.int32)
    before, b, c = (rng.choice(few, n) for n in (num_words, 32, 32))
    out = np.zeros(64, np.int32)  # the words, and behind them what each lane got
    out[:num_words] = before
    body = f"""{columns(2)}
    add.s64 %rd3, %rd0, 128;
    {"mov.b64 %rd0, %out;" if num_words == 1 else ""}
    {instruction}
    st.global.u32 [%rd3], %r9;
    """
    got = run_ptx(body, [b, c], out, filled=True)
    new = ATOMICS[instruction]
    if num_words == 32:
        np.testing.assert_array_equal(got[32:], before)
        expected = [new(*map(int, x)) for x in zip(before, b, c, strict=True)]
        np.testing.assert_array_equal(got[:32], np.array(expected).astype(np.int32))
        return
    left, value = list(zip(b.tolist(), c.tolist(), got[32:].tolist(), strict=True)), before[0]
    while left:  # the lanes in an order that explains what each of them got
        step = next(x for x in left if x[2] == value)
        left.remove(step)
        value = np.array(new(int(value), *step[:2])).astype(np.int32)
    assert got[0] == value


def test_an_atomic_on_what_nobody_has_written_is_an_error():
    body = f"{columns(1)}\natom.global.max.s32 %r9, [%rd0], %r0;"
    with pytest.raises(SimulationError, match="nobody has initialised"):
        run_ptx(body, [np.arange(32, dtype=np.uint32)], np.zeros(32, np.uint32))


# ---- what is no answer but an error ----


def store(value):
    return f"{columns(1)}\n{value}\nst.global.u32 [%rd0], %r9;"


ONES = np.arange(32, dtype=np.uint32)
WRONG = {
    "unknown instruction": (store("bfe.u32 %r9, %r0, 1, 2;"), r"line \d+: unknown.*: bfe"),
    "unknown form": (store("add.sat.s32 %r9, %r0, %r0;"), "unknown instruction: add.sat.s32"),
    "never computed": (store("add.s32 %r9, %r0, %r8;"), "what is stored that was never computed"),
    "a branch on nothing": (store("mov.u32 %r9, 1;\n@%p1 mov.u32 %r9, 2;"), "a predicate that was"),
    "beyond the end": (store("mov.u32 %r9, 1;\nadd.s64 %rd0, %rd0, 4;"), "write.* no known buffer"),
    "before the beginning": (store("ld.global.nc.u32 %r9, [%in0+-4];"), "no known buffer"),
    "misaligned": (store("ld.global.nc.u32 %r9, [%in0+2];"), "misaligned"),
    "an input written": (store("mov.u32 %r9, 1;\nst.global.u32 [%in0], %r9;"), "write to the inp"),
    "a result read": (store("ld.global.u32 %r9, [%rd0];"), "nobody has written"),
    "shared memory never written": (store("ld.shared.u32 %r9, [dynamic+64];"), "nobody has writ"),
    "shared memory beyond its end": (
        store("mov.u32 %r9, 1;\nst.shared.u32 [dynamic+4096], %r9;"), "out of bounds: byte 4096",
    ),
    "two threads on a word": (
        store("mov.u32 %r9, 1;\nst.shared.u32 [dynamic+8], %r9;"), "race: write after write",
    ),
    "no barrier between": (
        store(
            "shl.b32 %r1, %t, 2;\nmov.u32 %r2, dynamic;\nadd.s32 %r1, %r1, %r2;\n"
            "st.shared.u32 [%r1], %r0;\nxor.b32 %r1, %r1, 4;\nld.shared.u32 %r9, [%r1];"
        ),
        "race: read after write",
    ),
    "a copy not waited for": (
        store(
            "shl.b32 %r1, %t, 4;\nmov.u32 %r2, dynamic;\nadd.s32 %r1, %r1, %r2;\n"
            "cp.async.ca.shared.global [%r1], [%in0], 4, 4;\ncp.async.commit_group;\n"
            "ld.shared.u32 %r9, [%r1];\ncp.async.wait_group 0;"
        ),
        "cp.async of thread .* is in flight",
    ),
    "lanes that never come": (
        store(
            "mov.u32 %r9, 1;\nsetp.lt.s32 %p1, %t, 16;\n@%p1 bra $low;\nbar.warp.sync -1;\n"
            "bra.uni $end;\n$low:\nadd.s32 %r9, %r9, 1;\n$end:"
        ),
        "divergent warp",
    ),
    "a barrier that half of the warp reaches": (
        store(
            "mov.u32 %r9, 1;\nsetp.lt.s32 %p1, %t, 16;\n@%p1 bra $end;\nbar.sync 0;\n$end:"
        ),
        "divergent warp|deadlock",
    ),
    "a loop without an end": (store("mov.u32 %r9, 1;\n$again:\nbra.uni $again;"), "does not end"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_the_isa_does_not_define_is_an_error(name):
    body, message = WRONG[name]
    with pytest.raises(SimulationError, match=message):
        run_ptx(body, [ONES], np.zeros(32, np.uint32))


def test_threads_that_ended_before_a_barrier_are_a_deadlock():
    body = "setp.lt.s32 %p1, %t, 32;\n@%p1 bra $end;\nbar.sync 0;\n$end:"
    with pytest.raises(SimulationError, match="deadlock"):
        run_ptx(body, [ONES], np.zeros(64, np.uint32), threads=64)


# ---- griddepcontrol (9.7.13): a launch that may begin before the one before it has ended ----

LATE = {
    "a read": f"{columns(1)}\ngriddepcontrol.wait;\nst.global.u32 [%rd0], %r0;",
    "a write": f"{columns(0)}\nst.global.u32 [%rd0], %t;\ngriddepcontrol.wait;",
    "an atomic": "atom.global.inc.u32 %r9, [%out], 9;\ngriddepcontrol.wait;",
    "cp.async": "mov.u32 %r1, dynamic;\ncp.async.ca.shared.global [%r1], [%in0], 4, 4;\n"
    "griddepcontrol.wait;",
    "the end of a thread": "griddepcontrol.launch_dependents;",
    "of one lane, a write": f"{columns(0)}\nsetp.lt.u32 %p1, %t, 31;\n"
    "@%p1 griddepcontrol.wait;\nst.global.u32 [%rd0], %t;",  # the last lane has not waited
}


@pytest.mark.parametrize("what", LATE)
def test_a_launch_that_may_overlap_waits_before_it_touches_memory(what):
    expected = f"{what.split(', ')[-1]} before griddepcontrol.wait"
    with pytest.raises(SimulationError, match=expected):
        run_ptx(LATE[what], [ONES], np.zeros(32, np.uint32), overlaps=True)


def test_what_is_read_after_the_wait_is_there():
    body = f"griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\n{columns(1)}\n"
    body += "st.global.u32 [%rd0], %r0;"
    for overlaps in (False, True):  # without a launch before it there is nothing to wait for
        out = run_ptx(body, [ONES], np.zeros(32, np.uint32), overlaps=overlaps)
        np.testing.assert_array_equal(out, ONES)


@pytest.mark.parametrize("seed", range(6))
def test_copies_land_at_the_wait_and_barriers_order_what_others_wrote(seed):
    """Each thread copies a word, and reads its neighbour's after wait_group and bar.sync."""
    body = f"""{columns(1)}
    mul.wide.u32 %rd1, %t, 4;
    add.s64 %rd2, %in0, %rd1;
    shl.b32 %r1, %t, 2; mov.u32 %r2, dynamic; add.s32 %r1, %r1, %r2;
    cp.async.ca.shared.global [%r1], [%rd2], 4, 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r3, %t, 33; shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r2;
    ld.shared.u32 %r9, [%r3];
    st.global.u32 [%rd0], %r9;
    """
    x = np.arange(64, dtype=np.uint32) * 3
    out = run_ptx(body, [x], np.zeros(64, np.uint32), threads=64, seed=seed)
    np.testing.assert_array_equal(out, x[np.arange(64) ^ 33])


@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_part_meet_again(seed):
    """A loop whose lanes go round differently often, and a vote of all after it."""
    body = store(
        "mov.u32 %r9, 0; mov.u32 %r1, 0;\n$loop:\nsetp.ge.u32 %p1, %r1, %r0;\n@%p1 bra $done;\n"
        "add.s32 %r9, %r9, %r1; add.s32 %r1, %r1, 1;\nbra.uni $loop;\n$done:\n"
        "setp.eq.s32 %p2, %r9, 0;\nvote.sync.ballot.b32 %r2, %p2, -1;\nadd.s32 %r9, %r9, %r2;"
    )
    out = run_ptx(body, [ONES], np.zeros(32, np.uint32), seed=seed)
    np.testing.assert_array_equal(out, ONES * (np.maximum(ONES, 1) - 1) // 2 + 3)
