# SPDX-License-Identifier: Apache-2.0
"""Tests of tests: bugs planted in the kernels' sources, and synchronisation left out."""

import concurrent.futures
import contextlib
import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
from emulation import FFI, MACHINE, EmulationError

T = TypeVar("T")
COMPILE = ("-std=c++17", "-fPIC", "-DJAX_PAGED_EMULATE")


def plant(folder: Path, file: str, old: str, new: str) -> None:
    """Copies the sources to folder/ffi, with `new` in the place of `old` in ffi/`file`."""
    shutil.copytree(FFI, folder / "ffi")
    path = folder / "ffi" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def misplaced(bugs: Mapping[str, tuple[str, str, str, str]], folder: str = "") -> list[str]:
    """Those bugs that do not have one place in their files, which lie in ffi/`folder`."""
    texts = {bug[0]: (FFI / folder / bug[0]).read_text(encoding="utf-8") for bug in bugs.values()}
    return [name for name, bug in bugs.items() if texts[bug[0]].count(bug[1]) != 1]


def asked_for(bugs: Mapping[str, T], request: pytest.FixtureRequest) -> dict[str, T]:
    """Those of the bugs that tests of the requesting file are going to ask for."""
    names = {
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return {name: bug for name, bug in bugs.items() if name in names}


@contextlib.contextmanager
def planted(
    bugs: Mapping[str, tuple[str, str, str, str]],
    make_folder: Callable[[str], Path],
    *,
    op: str,
    source: str,
    files: Mapping[str, str],
    load: Callable[[Path], ctypes.CDLL],
    level: str = "-O0",
) -> Iterator[dict[str, concurrent.futures.Future[ctypes.CDLL]]]:
    """Bug name → future of the library with the bug, all being compiled two at a time.

    Args:
      bugs: name → (file, what stands there, what the bug makes of it, what must be said about it).
      make_folder: makes a new folder of about this name.
      op: the folder of the files in ffi/cuda.
      source: what is compiled, in a folder that has the sources with the bug in ffi/.
      files: texts that are written there first.
      load: opens a library.
      level: of the compiler's optimisation; kernels that run long are compiled for longer.
    """
    machine = make_folder("machine") / "machine.o"
    sources = [FFI / "emu" / name for name in MACHINE]
    subprocess.run(["g++", *COMPILE, level, "-I", FFI, "-r", *sources, "-o", machine], check=True)

    def build(file: str, old: str, new: str) -> ctypes.CDLL:
        folder = make_folder("bug")
        plant(folder, f"cuda/{op}/{file}", old, new)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        flags = [*COMPILE, level, "-I", folder / "ffi", "-shared"]
        command = ["g++", *flags, folder / source, machine, "-o", folder / "bug.so"]
        subprocess.run(command, check=True)
        return load(folder / "bug.so")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(build, *bug[:3]) for name, bug in bugs.items()}


def sites_of(loaded: ctypes.CDLL, run: Callable[[], object]) -> list[tuple[str, str]]:
    """(kind, place in the sources) of every barrier, fence and wait that `run` passes."""
    loaded.take_sites()
    run()
    lines = loaded.take_sites().decode().splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines]


def survivors(
    loaded: ctypes.CDLL, run: Callable[[], object], sites: list[tuple[str, str]]
) -> list[str]:
    """Those that `run` does not miss, each left out in turn."""
    found = []
    for kind, site in sites:
        loaded.skip_site(site.encode())
        try:
            run()
            found.append(f"{kind} {site}")
        except (EmulationError, AssertionError):
            pass
        finally:
            loaded.skip_site(b"")
    return found


def sparse_memory(num_bytes: int) -> mmap.mmap:
    """Zeros of which only what is touched takes memory."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return mmap.mmap(-1, num_bytes, flags=flags)
