# SPDX-License-Identifier: Apache-2.0
"""The tensors of safetensors files."""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jax_paged.checks import SCALE_BLOCK
from jax_paged.checks.fields import short

from ..decoder.parameters import Fill, Part, Shape, is_finite, scale_name
from .outside import reading

_THREADS = min(os.cpu_count() or 1, 8)  # that fill a large tensor
_SHARE = 4 << 20  # bytes that are worth a thread

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_FP8 = "F8_E4M3"
_STORED = {**_DTYPES, _FP8: ml_dtypes.float8_e4m3fn, "U8": np.uint8}


class _Mapped(NamedTuple):
    """A file in memory. safetensors copies what it gives, and holds the GIL for it."""

    data: np.ndarray  # its bytes
    begins: dict[str, int]  # where each tensor does

    @classmethod
    def of(cls, path: Path) -> "_Mapped":
        data = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        begins = {name: 8 + size + field["data_offsets"][0] for name, field in header.items()}
        return cls(data, begins)


class Shards:
    """The tensors of safetensors files, by name; the files stay mapped as long as it lives.

    fp8_blocks: whether tensors beside which there is one of `scale_name` may be fp8.
    mxfp4: whether those of experts that are called `…_blocks` or `…_scales` may be bytes.
    """

    def __init__(self, paths: Iterable[Path], *, fp8_blocks: bool = False, mxfp4: bool = False):
        self._fp8_blocks, self._mxfp4 = fp8_blocks, mxfp4
        self.shapes: dict[str, Shape] = {}
        self._of: dict[str, tuple[Path, _Mapped, str]] = {}  # its file, and its dtype there
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path}: the index names this file, but it is not there")
            with (
                reading(f"{path}: truncated or not a safetensors file"),
                safe_open(path, framework="numpy") as file,  # checks that all lies in the file
            ):
                mapped = _Mapped.of(path)
                views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            for name, view in views.items():
                if name in self.shapes:
                    other, _, _ = self._of[name]
                    raise ValueError(f"{path}: tensor {short(name)} is in {other} as well")
                self._of[name] = path, mapped, view.get_dtype()
                self.shapes[name] = tuple(view.get_shape())

    def where(self, name: str) -> str:
        """What messages call a tensor."""
        return f"{self._of[name][0]}: tensor {name!r}"

    def check_dtype(self, name: str) -> None:
        path, _, dtype = self._of[name]
        if dtype not in _DTYPES and not self.is_fp8(name) and not self._is_mxfp4(name):
            raise ValueError(
                f"{path}: tensor {short(name)} must be of dtype {', '.join(sorted(_DTYPES))}, got "
                f"{dtype}"
            )

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor is fp8 with scales of blocks."""
        if not (self._fp8_blocks and name.endswith(".weight") and len(self.shapes[name]) == 2):
            return False
        return scale_name(name) in self._of and self._of[name][2] == _FP8

    def _is_mxfp4(self, name: str) -> bool:
        """Whether a tensor is 4-bit codes of experts, or their scales."""
        ends = (".experts.gate_up_proj", ".experts.down_proj")
        is_part = self._mxfp4 and name.removesuffix("_blocks").removesuffix("_scales").endswith(
            ends
        )
        return is_part and self._of[name][2] == "U8"

    def get(self, name: str, part: Part | None = None) -> np.ndarray:
        """A tensor, or a part of it, as it lies in the file: no more than that is read."""
        self.check_dtype(name)
        path, mapped, dtype = self._of[name]
        with reading(f"{path}: tensor {name!r}"):
            at = mapped.begins[name]
            values = np.ndarray(self.shapes[name], _STORED[dtype], mapped.data, at)[part or ...]
            if not self._is_mxfp4(name) and not is_finite(values):
                raise ValueError("expected finite weights, got NaN or infinity")
        return values

    def wide(self, name: str, part: Part | None = None) -> np.ndarray:
        """The same, and of fp8 weights what they stand for, in f32."""
        values = self.get(name, part)
        if not self.is_fp8(name):
            return values
        wide, scale = values.astype(np.float32), self.get(scale_name(name)).astype(np.float32)
        rows, columns = (
            np.arange(size)[one] // SCALE_BLOCK
            for size, one in zip(self.shapes[name], part or (slice(None),) * 2, strict=True)
        )
        wide *= scale[np.ix_(rows, columns)]
        return wide


def in_threads(fill: Fill) -> Fill:
    """The same in several threads where a tensor is large: each writes some of its rows.

    For what reads a part at no more cost than that part of the whole.
    """

    def shared(name: str, out: np.ndarray, part: Part | None = None) -> None:
        workers = min(_THREADS, out.nbytes // _SHARE, len(out) if out.ndim else 1)
        if workers < 2:
            fill(name, out, part)
            return
        rows, *others = part or (slice(None),) * out.ndim
        first = rows.start or 0
        ends = [len(out) * i // workers for i in range(workers + 1)]

        def fill_rows(begin: int, end: int) -> None:
            fill(name, out[begin:end], (slice(first + begin, first + end), *others))

        with ThreadPoolExecutor(workers, "load") as pool:
            list(pool.map(fill_rows, ends[:-1], ends[1:]))  # raises what one of them does

    return shared
