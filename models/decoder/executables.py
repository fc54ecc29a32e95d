# SPDX-License-Identifier: Apache-2.0
"""Programs compiled ahead, and their executables kept in a folder.

JAX's persistent cache knows a program by what it is lowered to, so each start traces and lowers it
anew: 1.3 of the 3.3 seconds of processor time before the first token of a small model. Here an
executable is known by all that tracing can see: the sources of this package, the versions of jax,
flax and numpy, JAX's settings and flags, and the program's arguments: shapes, dtypes and what is
static. A change of any of these is another name, and the program is compiled as ever.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import version as jaxlib_version

import jax_paged
from jax_paged._start.interrupt import uninterrupted

from .protocol import ForeignGraph

SUFFIX = ".executable"
_DIGEST_BYTES = 32

# A text that shows an address, or leaves something out, does not tell arguments apart.
_UNCERTAIN = re.compile(r" at 0x[0-9a-f]+|\.\.\.")

_Program = Callable[..., Any]


class Executables:
    """The executables in a folder.

    Args:
      folder: of this kind of CPU.
      on_unreadable: called when a file holds something else than an executable. It is deleted.
    """

    def __init__(self, folder: Path, on_unreadable: Callable[[], object]):
        self.folder, self._on_unreadable = folder, on_unreadable
        self._loaded: dict[str, _Program] = {}

    def get(self, program: Any, args: tuple, static: dict[str, Any]) -> _Program:
        """`compiled`, from the folder if it is there."""
        name = _name(program, args, static)
        if name is None:
            return program.lower(*args, **static).compile()
        if name not in self._loaded:
            self._loaded[name] = self._load(name) or self._compile(name, program, args, static)
        return self._loaded[name]

    def _load(self, name: str) -> _Program | None:
        path = self.folder / name
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        try:
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("truncated or changed")
            executable = serialize_executable.deserialize_and_load(*pickle.loads(content))
        except Exception:  # XLA, pickle and JAX each raise errors of their own
            self._on_unreadable()
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest are deleted first
        return executable

    def _compile(self, name: str, program: Any, args: tuple, static: dict) -> _Program:
        lowered = program.lower(*args, **static)
        with _without_persistent_cache():
            executable = lowered.compile()
        content = pickle.dumps(serialize_executable.serialize(executable))
        # Another start may read while this one writes. A full disk only costs the next start time.
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, self.folder / name)
        return executable


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """An executable from JAX's cache lacks functions when it is serialised again (XLA:CPU)."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # else JAX goes on as at its first program
    try:
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


_kept: Executables | None = None


@contextlib.contextmanager
def kept_in(executables: Executables) -> Iterator[None]:
    """For the block, `compiled` takes executables from there and puts new ones there."""
    global _kept
    before, _kept = _kept, executables
    try:
        yield
    finally:
        _kept = before


def compiled(program: Any, *args: Any, **static: Any) -> _Program:
    """The executable of a jitted function for these arguments.

    An exception of Ctrl-C waits for the end: XLA compiles in a thread that outlives the exception
    and crashes once Python has ended, and it calls Python back in places that no exception may
    leave.

    Args:
      program: a function of this package under `jax.jit`.
      args: arrays, or their shapes. Those that `jax.jit` takes as static may come among them.
      static: keyword arguments that `jax.jit` takes as static.

    Returns:
      A function of the arguments that are not static.
    """
    with uninterrupted():
        if _kept is None:
            return program.lower(*args, **static).compile()
        return _kept.get(program, args, static)


def _name(program: Any, args: tuple, static: dict[str, Any]) -> str | None:
    """The file of an executable; None: the arguments cannot be told apart for certain."""
    leaves, tree = jax.tree.flatten((args, static))
    if any(isinstance(leaf, ForeignGraph) for leaf in leaves):
        return None  # its code is not among the sources
    text = "\n".join([*map(_shown, leaves), str(tree)])
    if _UNCERTAIN.search(text) or len(jax.devices()) > 1:
        return None
    digest = hashlib.sha256(f"{_surroundings()}\n{text}".encode()).hexdigest()
    return f"{program.__module__}.{program.__name__}-{digest}{SUFFIX}"


def _shown(leaf: Any) -> str:
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}{getattr(leaf, 'weak_type', False)}"
    return f"{type(leaf).__qualname__} {leaf!r}"


@functools.cache
def _sources() -> str:
    """A digest of this package's files in all its rooms, the native modules among them."""
    digest = hashlib.sha256()
    package, models = (Path(x).resolve() for x in (jax_paged.__file__, __file__))
    package, models = package.parent, models.parents[1]  # in a wheel this one is inside of that
    patterns = "*.py", "*.so"
    paths = {path for x in (package, models) for kind in patterns for path in x.rglob(kind)}
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{os.path.relpath(path, package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _surroundings() -> str:
    """What a program depends on besides its arguments."""
    settings = {
        name: value
        for name, value in jax.config.values.items()
        if not name.startswith(("jax_compilation_cache", "jax_persistent_cache"))
    }
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("JAX_", "XLA_", "LIBTPU_", "NVIDIA_", "CUDA_"))
        and not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    device = jax.devices()[0]
    versions = jax.__version__, jaxlib_version.__version__, flax.__version__, np.__version__
    return repr(
        [_sources(), versions, device.platform, device.device_kind,
         sorted(settings.items()), sorted(variables.items())]
    )  # fmt: skip
