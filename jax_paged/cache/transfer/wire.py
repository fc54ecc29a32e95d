# SPDX-License-Identifier: Apache-2.0
"""Numbers and arrays as bytes that say what they hold, and tell when they are damaged.

A frame is a magic number, the length of the header, the header as JSON, the arrays, and a CRC of it
all. The CRC is no protection from who means harm: the header is checked as well, and no more memory
is taken than a small multiple of the frame's length.
"""

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.checks import EIGHT_BIT_DTYPES, FLOAT_DTYPES, expect
from jax_paged.checks.fields import (
    NOTHING,
    OBJECT,
    TEXT,
    Domain,
    check_fields,
    either,
    integer,
    list_of,
)

_MAGIC = b"jaxpkv03"
_DTYPES = [dtype.name for dtype in FLOAT_DTYPES + EIGHT_BIT_DTYPES]
_SHAPE = list_of(integer())
_ARRAY = Domain(
    f"[dtype, shape] with one of {', '.join(_DTYPES)}",
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and value[0] in _DTYPES
        and _SHAPE.has(value[1])
        and len(value[1]) <= 8
    ),
)
_HEADER = {"holds": TEXT, "fields": OBJECT, "arrays": list_of(either(NOTHING, _ARRAY))}


def frame(name: str, fields: dict[str, Any], arrays: Sequence[np.ndarray | None]) -> bytes:
    """The bytes of what is called `name`; JSON can hold its fields."""
    kinds = [None if x is None else [x.dtype.name, list(x.shape)] for x in arrays]
    header = json.dumps({"holds": name, "fields": fields, "arrays": kinds}).encode()
    body = [np.ascontiguousarray(x).tobytes() for x in arrays if x is not None]
    data = b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *body])
    return data + zlib.crc32(data).to_bytes(4, "little")


def unframe(
    name: str, data: bytes, num_arrays: int
) -> tuple[dict[str, Any], list[np.ndarray | None]]:
    """The fields, unchecked, and the arrays that `frame` was given under this name.

    Raises:
      ValueError: the bytes are damaged, hold something else, or have another number of arrays.
    """
    expect(isinstance(data, (bytes, bytearray)), name, "bytes", type(data).__name__)
    whole = len(data) >= len(_MAGIC) + 12 and data.startswith(_MAGIC)
    expect(whole, name, f"bytes that start with {_MAGIC!r}", f"{len(data)} bytes")
    crc = int.from_bytes(data[-4:], "little")
    expect(zlib.crc32(data[:-4]) == crc, name, f"CRC {crc:#010x}", f"{zlib.crc32(data[:-4]):#010x}")
    start, last = len(_MAGIC) + 8, len(data) - 4
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    expect(end <= last, name, f"a header that ends before byte {last}", f"one that ends at {end}")
    try:
        header = json.loads(data[start:end].decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: expected a header in JSON, got none: {error}") from None
    check_fields(f"{name} header", header, _HEADER)
    expect(
        header["holds"] == name, name, f"bytes of a {name}", f"those of a {header['holds'][:40]}"
    )
    count = len(header["arrays"])
    expect(count == num_arrays, name, f"{num_arrays} arrays", count)
    arrays: list[np.ndarray | None] = []
    for kind in header["arrays"]:
        if kind is None:
            arrays.append(None)
            continue
        dtype, shape = jnp.dtype(kind[0]), kind[1]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        expect(end <= last, name, f"arrays that end before byte {last}", f"one that ends at {end}")
        arrays.append(np.frombuffer(data[begin:end], dtype).reshape(shape))
    expect(end == last, name, f"{end + 4} bytes", len(data))
    return header["fields"], arrays
