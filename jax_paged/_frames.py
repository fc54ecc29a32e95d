"""Numbers and arrays as bytes that tell when they are damaged."""

import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged.validation import expect

_MAGIC = b"jaxpkv01"


def frame(fields: dict[str, Any], arrays: Sequence[np.ndarray | None]) -> bytes:
    """A header with `fields`, which JSON can hold, then the arrays, then a CRC of it all."""
    kinds = [None if x is None else [x.dtype.name, list(x.shape)] for x in arrays]
    header = json.dumps({"fields": fields, "arrays": kinds}).encode()
    body = [np.ascontiguousarray(x).tobytes() for x in arrays if x is not None]
    data = b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *body])
    return data + zlib.crc32(data).to_bytes(4, "little")


def unframe(name: str, data: bytes) -> tuple[dict[str, Any], list[np.ndarray | None]]:
    """What `frame` was given; a ValueError that names the bytes `name` if they are damaged."""
    whole = len(data) >= len(_MAGIC) + 12 and data.startswith(_MAGIC)
    expect(whole, name, f"bytes that start with {_MAGIC!r}", f"{len(data)} bytes")
    crc = int.from_bytes(data[-4:], "little")
    expect(zlib.crc32(data[:-4]) == crc, name, f"CRC {crc:#010x}", f"{zlib.crc32(data[:-4]):#010x}")
    start = len(_MAGIC) + 8
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header = json.loads(data[start:end])
    arrays: list[np.ndarray | None] = []
    for kind in header["arrays"]:
        if kind is None:
            arrays.append(None)
            continue
        dtype, shape = jnp.dtype(kind[0]), kind[1]
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, end).reshape(shape))
        end += count * dtype.itemsize
    expect(end == len(data) - 4, name, f"{end + 4} bytes", len(data))
    return header["fields"], arrays
