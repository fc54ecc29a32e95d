# SPDX-License-Identifier: Apache-2.0
"""The tensors of safetensors files."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 known to numpy, which safetensors relies on)
import numpy as np
from safetensors import safe_open

from jax_paged.checks.fields import short

from ..decoder.parameters import Part, Shape, is_finite
from .outside import reading

_DTYPES = {"F32", "F16", "BF16"}


class Shards:
    """The tensors of safetensors files, by name; `stack` closes the files."""

    def __init__(self, paths: Iterable[Path], stack: ExitStack):
        self.shapes: dict[str, Shape] = {}
        self._of: dict[str, tuple[Path, Any, str]] = {}  # its file, and its dtype there
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path}: the index names this file, but it is not there")
            with reading(f"{path}: truncated or not a safetensors file"):
                file = stack.enter_context(safe_open(path, framework="numpy"))
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in self.shapes:
                    other, _, _ = self._of[name]
                    raise ValueError(f"{path}: tensor {short(name)} is in {other} as well")
                view = file.get_slice(name)
                self._of[name] = path, file, view.get_dtype()
                self.shapes[name] = tuple(view.get_shape())

    def check_dtype(self, name: str) -> None:
        path, _, dtype = self._of[name]
        if dtype not in _DTYPES:
            raise ValueError(
                f"{path}: tensor {short(name)} must be of dtype {', '.join(sorted(_DTYPES))}, got "
                f"{dtype}"
            )

    def get(self, name: str, part: Part | None = None) -> np.ndarray:
        """A tensor, or a part of it: no more than that is read."""
        self.check_dtype(name)
        path, file, _ = self._of[name]
        with reading(f"{path}: tensor {name!r}"):
            values = file.get_tensor(name) if part is None else file.get_slice(name)[part]
            if not is_finite(values):
                raise ValueError("expected finite weights, got NaN or infinity")
        return values
