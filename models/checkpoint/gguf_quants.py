# SPDX-License-Identifier: Apache-2.0
"""The quantizations of GGUF tensors that are read, and how their blocks become float32.

A tensor is a run of blocks, each of `size` values in `num_bytes` bytes: small integers, and the f16
numbers that scale them. The formats are those of ggml; each product and sum is rounded to f32 in
its order, so the values are equal to the bit.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..decoder.parameters import is_finite

_PIECE = 8192 * 32  # values that are dequantized at a time: large for numpy, small for the caches


class Kind(NamedTuple):
    """A quantization: its blocks, and values(blocks u8[n, num_bytes], out f32[n, size])."""

    name: str
    size: int
    num_bytes: int
    values: Callable[[np.ndarray, np.ndarray], None]


def dequantize(kind: Kind, data: np.ndarray, out: np.ndarray, pool: Executor) -> None:
    """Writes the values of a tensor to `out`, whose dtype rounds them.

    Args:
      data: u8[bytes], the tensor's blocks.
      out: any float dtype, as many values as the tensor has; its first axes may be strided.
      pool: runs the pieces.

    Raises:
      ValueError: a value is NaN or infinite.
    """
    if not out.flags.c_contiguous:
        for part, target in zip(np.split(data, len(out)), out, strict=True):
            dequantize(kind, part, target, pool)
        return
    blocks, flat = data.reshape(-1, kind.num_bytes), out.reshape(-1, kind.size)
    step = _PIECE // kind.size

    def piece(start: int) -> None:
        part, target = blocks[start : start + step], flat[start : start + step]
        if target.dtype == np.float32:
            kind.values(part, target)
        else:
            wide = np.empty(target.shape, np.float32)
            kind.values(part, wide)
            target[...] = wide

    for _ in pool.map(piece, range(0, len(blocks), step)):
        pass


def _as(dtype) -> Callable[[np.ndarray, np.ndarray], None]:
    def values(blocks, out):
        found = np.ascontiguousarray(blocks).view(dtype)
        _check_finite(found)
        out[...] = found

    return values


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """f32[n, 1], the f16 number that each block has at a byte."""
    found = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
    _check_finite(found)  # then all values are finite: they are small integers times these
    return found


def _check_finite(values: np.ndarray) -> None:
    if not is_finite(values):
        raise ValueError("expected finite weights, got NaN or infinity")


def _fields(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """u8[n, runs, 8 / bits, width]: fields of the bytes, low bits first, for runs of `width` bytes.

    >>> _fields(np.array([[0x21, 0x43]], np.uint8), 2, 4).tolist()
    [[[[1, 3], [2, 4]]]]
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, width) >> shifts
    fields &= np.uint8((1 << bits) - 1)
    return fields


def _flat(fields: np.ndarray) -> np.ndarray:
    return fields.reshape(len(fields), -1)


def _q4_0(blocks, out):  # f16 d, 16 bytes: d · (q − 8)
    out[...] = _flat(_fields(blocks[:, 2:], 16, 4))
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks, out):  # f16 d, f16 m, 16 bytes: d · q + m
    out[...] = _flat(_fields(blocks[:, 4:], 16, 4))
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    top = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return _flat(_fields(low, 16, 4)) | top


def _q5_0(blocks, out):  # f16 d, 32 high bits, 16 bytes: d · (q − 16)
    out[...] = _five_bits(blocks[:, 6:], blocks[:, 2:6])
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks, out):  # f16 d, f16 m, 32 high bits, 16 bytes: d · q + m
    out[...] = _five_bits(blocks[:, 8:], blocks[:, 4:8])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks, out):  # f16 d, 32 bytes: d · q
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


# The K kinds have 256 values in sub-blocks, each with an integer scale of its own: d · scale · q,
# some minus dmin · min.


def _scaled(out: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """A view of the values, [n, sub-blocks, values of each], already times the scales."""
    view = out.reshape(*scales.shape, -1)
    view *= scales[:, :, None]
    return view


def _q2_k(blocks, out):  # 16 bytes of scale and min, 64 bytes, f16 d, f16 dmin
    out[...] = _flat(_fields(blocks[:, 16:80], 32, 2))
    scales = (blocks[:, :16] & 15).astype(np.float32)
    mins = (blocks[:, :16] >> 4).astype(np.float32)
    view = _scaled(out, _half(blocks, 80) * scales)
    view -= (_half(blocks, 82) * mins)[:, :, None]


def _q3_k(blocks, out):  # 256 high bits, 64 bytes, 12 bytes of scales, f16 d
    high = _flat(_fields(blocks[:, :32], 32, 1)) << np.uint8(2)
    out[...] = _flat(_fields(blocks[:, 32:96], 32, 2)) | high
    out -= 4
    scales = _flat(_fields(blocks[:, 96:104], 8, 4))
    scales = scales | _flat(_fields(blocks[:, 104:108], 4, 2)) << np.uint8(4)
    _scaled(out, _half(blocks, 108) * (scales.astype(np.float32) - 32))


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 mins of 12 bytes: four of each, then the rest's low and high bits."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=1)
    mins = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _less_mins(blocks, out):  # f16 d, f16 dmin, 12 bytes of scales and mins
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    view = _scaled(out, _half(blocks, 0) * scales)
    view -= (_half(blocks, 2) * mins)[:, :, None]


def _q4_k(blocks, out):  # then 128 bytes
    out[...] = _flat(_fields(blocks[:, 16:], 32, 4))
    _less_mins(blocks, out)


def _q5_k(blocks, out):  # then 256 high bits, 128 bytes
    high = _flat(_fields(blocks[:, 16:48], 32, 1)) << np.uint8(4)
    out[...] = _flat(_fields(blocks[:, 48:], 32, 4)) | high
    _less_mins(blocks, out)


def _q6_k(blocks, out):  # 128 bytes of low bits, 64 of high bits, 16 i8 scales, f16 d
    high = _flat(_fields(blocks[:, 128:192], 32, 2)) << np.uint8(4)
    out[...] = _flat(_fields(blocks[:, :128], 64, 4)) | high
    out -= 32
    _scaled(out, _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


# ---- weights that stay in 4 bits ----


class FourBits(NamedTuple):
    """Weights scale · code + offset, or scale · (code - 8).

    codes: u8[n, size]; the others, f16 or f32, are [n, size / 32].
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None


def _four_bits_of_q4_0(blocks: np.ndarray) -> FourBits:
    return FourBits(_codes(blocks[:, 2:], 16), _half(blocks, 0).astype(np.float16), None)


def _four_bits_of_q4_1(blocks: np.ndarray) -> FourBits:
    scale, offset = (_half(blocks, at).astype(np.float16) for at in (0, 2))
    return FourBits(_codes(blocks[:, 4:], 16), scale, offset)


def _four_bits_of_q4_k(blocks: np.ndarray) -> FourBits:
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    codes = _codes(blocks[:, 16:], 32)
    return FourBits(codes, _half(blocks, 0) * scales, -_half(blocks, 2) * mins)


def _codes(packed: np.ndarray, width: int) -> np.ndarray:
    return _flat(_fields(packed, width, 4))


FOUR_BITS: dict[int, Callable[[np.ndarray], FourBits]] = {
    2: _four_bits_of_q4_0, 3: _four_bits_of_q4_1, 12: _four_bits_of_q4_k,
}  # fmt: skip
NO_OFFSETS = 2  # Q4_0
HALF_SCALES = {2, 3}  # whose scales and offsets are f16

# ggml's number of a type → how it is read.
KINDS = {
    0: Kind("F32", 1, 4, _as(np.float32)),
    1: Kind("F16", 1, 2, _as(np.float16)),
    30: Kind("BF16", 1, 2, _as(ml_dtypes.bfloat16)),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    6: Kind("Q5_0", 32, 22, _q5_0),
    7: Kind("Q5_1", 32, 24, _q5_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    10: Kind("Q2_K", 256, 84, _q2_k),
    11: Kind("Q3_K", 256, 110, _q3_k),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
}
QUANTIZATIONS = tuple(kind.name for kind in KINDS.values())
# Names of the others, for the message that refuses them.
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def kind_name(number: int) -> str:
    """ggml's name of a type."""
    return KINDS[number].name if number in KINDS else _OTHERS.get(number, f"number {number}")
