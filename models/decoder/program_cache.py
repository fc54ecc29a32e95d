# SPDX-License-Identifier: Apache-2.0
"""Compiled programs kept between starts of the command line, in the user's cache folder.

These are the executables of the large programs (`executables`) and, for the rest, JAX's persistent
cache, with a folder and a bound. JAX's key holds the program, the flags and the version of jaxlib,
but hardly the CPU; so each kind of CPU has a folder of its own, and what one machine compiled is
never run by another one.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from .executables import Executables, kept_in

MAX_BYTES = 2**30
_FOLDER = "jax_compilation_cache_dir"
_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([^']*)'")


def folder() -> Path:
    """Where the programs of this machine lie."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "jax_paged" / "programs" / _cpu()


def _cpu() -> str:
    """A name for what programs depend on: the instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = [platform.processor()]
    kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    digest = hashlib.sha256("\n".join(sorted(kinds or set(lines[:1]))).encode())
    return f"{platform.machine()}-{digest.hexdigest()[:12]}"


@contextlib.contextmanager
def kept_programs(where: Path | None = None) -> Iterator[None]:
    """For the block, JAX takes compiled programs from a folder and puts new ones there.

    A folder that the user has given to JAX is used instead, as it is. Trouble is one line on
    stderr: without a folder programs are compiled as ever, and an entry that cannot be read is
    deleted and compiled again.

    Args:
      where: None = `folder()`.
    """
    if getattr(jax.config, _FOLDER):
        with _told_once(None):
            yield
        return
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        where = folder() if where is None else where
        where.mkdir(parents=True, exist_ok=True)
        if not os.access(where, os.W_OK):
            raise PermissionError(f"{where} is not writable")
        _prune(where)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        _warn(f"compiled programs are not kept: {error}")
        yield
        return
    for name, value in settings.items():
        jax.config.update(name, value)
    jax.config.update(_FOLDER, str(where))
    try:
        with _told_once(where) as tell, kept_in(Executables(where, tell)):
            yield
    finally:
        jax.config.update(_FOLDER, None)
        for name, value in before.items():
            jax.config.update(name, value)


def _prune(where: Path, max_bytes: int = MAX_BYTES) -> None:
    """Deletes the oldest programs until at most max_bytes are left."""
    found = []
    for path in where.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another start prunes, too
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


@contextlib.contextmanager
def _told_once(where: Path | None) -> Iterator[Callable[[], None]]:
    """Makes JAX's warnings about entries that it cannot read one line; deletes those in `where`.

    Yields what says that line, once.
    """
    shown, told = warnings.showwarning, []

    def tell():
        if not told:
            told.append(True)
            _warn("a kept program cannot be read; it is compiled again")

    def show(message, *args, **kwargs):
        unreadable = _UNREADABLE.match(str(message))
        if unreadable is None:
            shown(message, *args, **kwargs)
            return
        for path in where.glob(f"{unreadable[1]}-*") if where else ():
            with contextlib.suppress(OSError):
                path.unlink()
        tell()

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _UNREADABLE.pattern)
        warnings.showwarning = show
        yield tell


def _warn(message: str) -> None:
    print("jax-paged: warning:", " ".join(message.split()), file=sys.stderr)
