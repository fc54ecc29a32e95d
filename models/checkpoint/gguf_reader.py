# SPDX-License-Identifier: Apache-2.0
"""Reads the structure of a GGUF file: its metadata, and where its tensors lie.

The format is little-endian: "GGUF", a version, the numbers of tensors and of metadata pairs; then
the pairs, a name, shape, type and offset for each tensor, and the aligned tensor data.
"""

import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_paged.checks.fields import integer, short

from .gguf_quants import KINDS
from .outside import reading

_VERSIONS = (2, 3)
_MAX_AXES = 4  # of a tensor, as in ggml
_ALIGNMENT = integer(1)
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
        data, at, found, last = self.data, self.at, [], len(self.data) - 8
        for _ in range(count):
            if at > last:
                raise ValueError(f"the file ends within {count} texts")
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
            raise ValueError(f"key {short(name)} is there twice")
        with reading(f"key {short(name)}"):
            metadata[name] = cursor.value(cursor.scalar("<u4"))
    entries = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in entries:
            raise ValueError(f"tensor {short(name)} is there twice")
        num_axes = cursor.scalar("<u4")
        if num_axes > _MAX_AXES:
            raise ValueError(
                f"tensor {short(name)} must have at most {_MAX_AXES} axes, got {num_axes}"
            )
        shape = tuple(cursor.array("<u8", num_axes)[::-1])
        entries[name] = shape, cursor.scalar("<u4"), cursor.scalar("<u8")
    alignment = metadata.get("general.alignment", 32)
    if not _ALIGNMENT.has(alignment):
        raise ValueError(f"general.alignment must be {_ALIGNMENT.text}, got {short(alignment)}")
    start = -(-cursor.at // alignment) * alignment
    whole, tensors, places = np.frombuffer(cursor.data, np.uint8), {}, []
    for name, (shape, number, offset) in entries.items():
        data = whole[:0]
        if number in KINDS:
            kind, row = KINDS[number], shape[-1] if shape else 1
            if row % kind.size:
                raise ValueError(f"tensor {short(name)} of {shape} has no whole {kind.name} blocks")
            begin = start + offset
            data = whole[begin : begin + math.prod(shape) // kind.size * kind.num_bytes]
            if data.size * kind.size != math.prod(shape) * kind.num_bytes:
                raise ValueError(f"the file ends within tensor {short(name)}")
            places.append((begin, begin + data.size, name))
        tensors[name] = TensorEntry(shape, number, data)
    for (_, end, name), (begin, _, after) in itertools.pairwise(sorted(places)):
        if begin < end:  # else a small file could ask for any amount of memory
            raise ValueError(f"tensors {short(name)} and {short(after)} overlap")
    return metadata, tensors
