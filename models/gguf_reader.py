"""Reads the structure of a GGUF file: its metadata, and where its tensors lie.

The format is little-endian: "GGUF", a version, the numbers of tensors and of metadata pairs; then
the pairs, a name, shape, type and offset for each tensor, and the aligned tensor data.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .gguf_quants import KINDS

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_SIZE = struct.Struct("<Q")


class TensorEntry(NamedTuple):
    """A tensor: its shape, ggml's number of its type, and its bytes (none of an unknown type)."""

    shape: tuple[int, ...]
    kind: int
    data: np.ndarray  # u8, a view of the mapped file


class _Cursor:
    """Takes values off a buffer, one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ValueError(f"{size} bytes expected at {self.at}, the file has {len(self.data)}")
        found, self.at = self.data[self.at : end], end
        return found

    def scalar(self, dtype: str) -> Any:
        return self.array(dtype, 1)[0]

    def array(self, dtype: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype).tolist()

    def string(self) -> str:
        return self.take(self.scalar("<u8")).decode()

    def strings(self, count: int) -> list[str]:
        """As `string` again and again, in a loop that costs little for each: there are many."""
        data, at, found = self.data, self.at, []
        for _ in range(count):
            start = at + 8
            at = start + _SIZE.unpack_from(data, at)[0]
            found.append(data[start:at].decode())
        self.at = at
        self.take(0)  # checks the end
        return found

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"no metadata has type {kind}")
        kind, count = self.scalar("<u4"), self.scalar("<u8")
        if kind in _SCALARS:
            return self.array(_SCALARS[kind], count)
        return self.strings(count) if kind == _STRING else [self.value(kind) for _ in range(count)]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """The metadata and the tensors of a file.

    Raises:
      ValueError: it is truncated, or not such a file.
    """
    with path.open("rb") as file:
        cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if (magic := cursor.take(4)) != b"GGUF":
        raise ValueError(f"it starts with {magic!r}")
    if (version := cursor.scalar("<u4")) not in _VERSIONS:
        raise ValueError(f"version {version} is not supported (2 and 3 are, little-endian)")
    num_tensors, num_pairs = cursor.array("<u8", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"key {name!r} is there twice")
        metadata[name] = cursor.value(cursor.scalar("<u4"))
    entries = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in entries:
            raise ValueError(f"tensor {name!r} is there twice")
        shape = tuple(cursor.array("<u8", cursor.scalar("<u4"))[::-1])
        entries[name] = shape, cursor.scalar("<u4"), cursor.scalar("<u8")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    whole, tensors = np.frombuffer(cursor.data, np.uint8), {}
    for name, (shape, number, offset) in entries.items():
        data = whole[:0]
        if number in KINDS:
            kind, row = KINDS[number], shape[-1] if shape else 1
            if row % kind.size:
                raise ValueError(f"tensor {name!r} of {shape} has no whole {kind.name} blocks")
            begin = start + offset
            data = whole[begin : begin + math.prod(shape) // kind.size * kind.num_bytes]
            if data.size * kind.size != math.prod(shape) * kind.num_bytes:
                raise ValueError(f"the file ends within tensor {name!r}")
        tensors[name] = TensorEntry(shape, number, data)
    return metadata, tensors
