# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA module for the simulated device (ffi/sim) and registers its handlers for the CPU.

The handlers, the launch code and the kernels are those of `jax_paged._cuda`, compiled by the same
compilers with the same flags, but the kernels only to PTX, and ffi/sim is linked in place of the
CUDA runtime: it executes the PTX.
"""

import concurrent.futures
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

FFI = Path(__file__).resolve().parents[2] / "ffi"
ARCHITECTURES = (80, 90)
HANDLERS = {
    "jax_paged.attention.v1": "SimAttention",
    "jax_paged.merge_attention_states.v1": "SimMergeStates",
    "jax_paged.moe_experts.v1": "SimMoeExperts",
    "jax_paged.qkv_norm_rope_write.v1": "SimQkvNormRopeWrite",
    "jax_paged.write_kv.v1": "SimWriteKv",
}
# -lineinfo tells which line of the source an instruction comes from, and changes no instruction.
NVCC_FLAGS = (
    "-O3", "-DNDEBUG", "-std=c++17", "-Xcompiler=-fPIC", "-lineinfo", "-no-compress",
    "-cudart=none", *(f"-gencode=arch=compute_{n},code=compute_{n}" for n in ARCHITECTURES),
)  # fmt: skip
GXX_FLAGS = ("-O3", "-DNDEBUG", "-fPIC", "-Wall", "-Wextra")
EMULATOR = ("device_memory.cc", "ordering.cc", "shared_memory.cc")


def cuda_sources(ffi: Path) -> list[Path]:
    """The sources of `_cuda` but for its Python module, as its CMakeLists.txt lists them."""
    text = (ffi / "cuda/CMakeLists.txt").read_text(encoding="utf-8")
    listed = text.partition("jax_paged_add_module(")[2].partition(")")[0].split()
    names = [name for name in listed if name.endswith((".cc", ".cu")) and name != "module.cc"]
    return [ffi / "cuda" / name for name in names]


def nvcc() -> str | None:
    """The CUDA compiler, or None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(os.environ.get("CUDACXX", "nvcc")) or shutil.which(f"{home}/bin/nvcc")


def commands(ffi: Path) -> Iterator[tuple[Path, list[str]]]:
    """(source, command without output) of all that is linked."""
    compiler = nvcc()
    assert compiler is not None
    homes = (Path(compiler).resolve().parents[1], Path("/usr/local/cuda"))  # of nvcc, or a wrapper
    includes = [home / "include" for home in homes]
    cuda = next(path for path in includes if (path / "cuda_runtime_api.h").exists())
    plain = ["-I", str(ffi), "-isystem", jax.ffi.include_dir(), "-isystem", str(cuda)]
    for source in cuda_sources(ffi):
        if source.suffix == ".cu":
            yield source, [compiler, *NVCC_FLAGS, "-I", str(ffi)]
        else:
            yield source, ["g++", *GXX_FLAGS, "-std=c++17", *plain]
    for source in sorted((ffi / "sim").glob("*.cc")):
        yield source, ["g++", *GXX_FLAGS, "-std=c++20", "-march=native", *plain]
    for name in EMULATOR:
        yield ffi / "emu" / name, ["g++", *GXX_FLAGS, "-std=c++17", "-march=native", *plain]


def digest_of(ffi: Path, *folders: str) -> "hashlib._Hash":
    """Of the headers in these folders: a source is compiled again when one of them changes."""
    digest = hashlib.sha256(jax.__version__.encode())
    for folder in folders:
        for path in sorted((ffi / folder).rglob("*")):
            if path.suffix in (".h", ".cuh"):
                digest.update(str(path.relative_to(ffi)).encode() + path.read_bytes())
    return digest


def build(ffi: Path = FFI, workers: int = 2) -> Path:
    """The library, compiled where a source is new; two compilers at a time."""
    folder = Path(tempfile.gettempdir()) / f"jax_paged_simulator_{os.getuid()}"
    folder.mkdir(exist_ok=True)

    def run(command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")

    def compiled(source, command):
        digest = (kernels if (ffi / "cuda") in source.parents else machine).copy()
        digest.update(repr([part for part in command if part != str(ffi)]).encode())
        digest.update(source.read_bytes())
        target = folder / f"{digest.hexdigest()[:20]}.o"
        if not target.exists():
            partial = target.with_suffix(".partial.o")
            run([*command, "-c", str(source), "-o", str(partial)])
            partial.rename(target)
        return target

    kernels = digest_of(ffi, "common", "cuda")
    machine = digest_of(ffi, "common", "emu", "sim")
    with open(folder / "lock", "w") as lock:  # tests may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            objects = list(pool.map(lambda pair: compiled(*pair), commands(ffi)))
        name = hashlib.sha256(repr(sorted(objects)).encode()).hexdigest()[:20]
        library = folder / f"{name}.so"
        if not library.exists():
            partial = library.with_suffix(".partial.so")
            run(["g++", "-shared", *map(str, objects), "-o", str(partial)])
            partial.rename(library)
    return library


class Device(ctypes.Structure):
    """ffi/sim/runtime.h has the same struct, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "ordinal", "architecture", "multiprocessors", "shared_bytes_per_cta",
            "shared_bytes_per_multiprocessor",
        )),
        ("seed", ctypes.c_uint32),
    )  # fmt: skip


def device(architecture: int = 80, **changes) -> Device:
    """A small device of an architecture, with its shared memory."""
    kib = {80: 164, 90: 228}[architecture]
    fields = {
        "ordinal": 0, "architecture": architecture, "multiprocessors": 3, "seed": 1,
        "shared_bytes_per_cta": (kib - 1) * 1024, "shared_bytes_per_multiprocessor": kib * 1024,
    }  # fmt: skip
    return Device(**(fields | changes))


@functools.cache
def library(ffi: Path = FFI) -> ctypes.CDLL:
    """The simulated device, loaded; its handlers are registered as TARGET.sim for the CPU."""
    loaded = ctypes.CDLL(str(build(ffi)))
    loaded.sim_set_device.argtypes = [ctypes.POINTER(Device)]
    loaded.sim_launches.restype = ctypes.c_char_p
    for target, symbol in HANDLERS.items():
        handler = jax.ffi.pycapsule(getattr(loaded, symbol))
        jax.ffi.register_ffi_target(f"{target}.sim", handler, platform="cpu")
    return loaded
