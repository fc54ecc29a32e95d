# SPDX-License-Identifier: Apache-2.0
"""What one process tells another to do, as bytes: a JSON head, then arrays as they lie in memory.

length of the head (u32) · {"number", "name", "values", "arrays": [[dtype, shape], …]} · arrays
"""

import dataclasses
import json
import math
import operator
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jax_paged.checks import expect

_LENGTH = struct.Struct(">I")
_MAX_HEAD_BYTES = 1 << 20
_MAX_AXES = 8
_DTYPES = {
    np.dtype(x).name: np.dtype(x)
    for x in (
        *("bool", "int8", "int32", "uint32", "float16", "float32"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
}


@dataclasses.dataclass(frozen=True)
class Order:
    """Something to do.

    name: what.
    values: how; of JSON.
    arrays: of bool, i8, i32, u32, fp8, f16, bf16 or f32.
    """

    name: str
    values: Sequence[Any] = ()
    arrays: Sequence[np.ndarray] = ()


def encode(order: Order, number: int) -> list[bytes | memoryview]:
    """The parts of a message.

    Raises:
      ValueError: an array is of another dtype, or the values are too long.
    """
    arrays = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in order.arrays]
    for x in arrays:
        expect(x.dtype.name in _DTYPES, order.name, f"arrays of {', '.join(_DTYPES)}", x.dtype)
    described = [[x.dtype.name, x.shape] for x in arrays]
    head = {"number": number, "name": order.name, "values": order.values, "arrays": described}
    text = json.dumps(head, default=operator.index).encode()
    most = f"values of at most {_MAX_HEAD_BYTES} bytes"
    expect(len(text) <= _MAX_HEAD_BYTES, order.name, most, len(text))
    flat = (x.reshape(-1).view(np.uint8).data for x in arrays)
    return [_LENGTH.pack(len(text)), text, *flat]


def decode(message: bytes | bytearray | memoryview) -> tuple[Order, int]:
    """The order in a message, and its number.

    Raises:
      ValueError: the message is not one that `encode` makes.
    """
    view = memoryview(message).cast("B")
    expect(view.nbytes >= _LENGTH.size, "message", "a head", f"{view.nbytes} bytes")
    (length,) = _LENGTH.unpack_from(view)
    view = view[_LENGTH.size :]
    most = min(view.nbytes, _MAX_HEAD_BYTES)
    expect(length <= most, "message", f"a head of at most {most} bytes", length)
    try:
        head = json.loads(bytes(view[:length]))
        number, name, values = head["number"], head["name"], head["values"]
        described = [(_DTYPES[dtype], tuple(shape)) for dtype, shape in head["arrays"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"message: expected a head of JSON, got {error!r}") from None
    kinds = type(number), type(name), type(values)
    expect(kinds == (int, str, list), "message", "a number, a name and values", kinds)
    view, arrays = view[length:], []
    for dtype, shape in described:
        ok = len(shape) <= _MAX_AXES and all(type(n) is int and n >= 0 for n in shape)
        expect(ok, "message", f"at most {_MAX_AXES} sizes of an array", shape)
        size = math.prod(shape) * dtype.itemsize
        expect(size <= view.nbytes, "message", f"an array of {size} bytes", view.nbytes)
        arrays.append(np.ndarray(shape, dtype, buffer=view[:size]).copy())
        view = view[size:]
    expect(view.nbytes == 0, "message", "no byte behind its arrays", view.nbytes)
    return Order(name, values, arrays), number
