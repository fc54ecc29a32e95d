# SPDX-License-Identifier: Apache-2.0
"""Paged attention for JAX: native kernels on CPU and CUDA, and a functional page state.

`KVState` holds the pages of all layers; its methods change it. `write`, `write_qkv` and `attend`
are what a layer does with it. `jax_paged.transfer` moves K and V between states.
`jax_paged.testing` has oracles and checks of compiled programs; it is imported when it is used.
"""

import importlib as _importlib
import os as _os
import sys as _sys
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jax_paged._start import interrupt as _interrupt  # noqa: F401  first: Ctrl-C may come

__version__ = _metadata.version("jax_paged")


def _starts_command() -> bool:
    """Whether `jax-paged` or `python -m jax_paged` is starting."""
    name = _sys.argv[0] if _sys.argv else ""
    if name == "-m":  # as it is until the module is found
        return _sys.orig_argv[_sys.orig_argv.index("-m") + 1 :][:1] == ["jax_paged"]
    return _os.path.basename(name) == "jax-paged"


# The command reads its options before it imports jax, which takes a second. Everyone else gets all
# names, and the FFI targets, at once.
_is_command = _starts_command()

if _TYPE_CHECKING or not _is_command:
    from jax_paged._start.public import *  # noqa: F403


def __getattr__(name: str) -> _Any:
    if name == "testing":
        return _importlib.import_module("jax_paged.testing")
    if _is_command and not name.startswith("_"):
        public = _importlib.import_module("jax_paged._start.public")
        if hasattr(public, name):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
