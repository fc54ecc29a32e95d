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
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jax_paged.native.call import register_stand_in

FFI = Path(__file__).resolve().parents[2] / "ffi"
ARCHITECTURES = (80, 90)
HANDLERS = {
    "jax_paged.attention.v1": "SimAttention",
    "jax_paged.attention_plan.v1": "SimAttentionPlan",
    "jax_paged.merge_attention_states.v1": "SimMergeStates",
    "jax_paged.moe_experts.v1": "SimMoeExperts",
    "jax_paged.qkv_norm_rope_write.v2": "SimQkvNormRopeWrite",
    "jax_paged.write_kv.v1": "SimWriteKv",
}
# -lineinfo tells which line of the source an instruction comes from, and changes no instruction.
NVCC_FLAGS = (
    "-O3", "-DNDEBUG", "-std=c++17", "-Xcompiler=-fPIC,-fno-gnu-unique", "-lineinfo",
    "-no-compress", "-cudart=none",
)  # fmt: skip
GXX_FLAGS = ("-O3", "-DNDEBUG", "-fPIC", "-fno-gnu-unique", "-Wall", "-Wextra")
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


def commands(
    ffi: Path, cuda: Sequence[Path], architectures: Sequence[int]
) -> Iterator[tuple[Path, list[str]]]:
    """(source, command without output) of all that is linked."""
    compiler = nvcc()
    assert compiler is not None
    homes = (Path(compiler).resolve().parents[1], Path("/usr/local/cuda"))  # of nvcc, or a wrapper
    includes = [home / "include" for home in homes]
    toolkit = next(path for path in includes if (path / "cuda_runtime_api.h").exists())
    plain = ["-I", str(ffi), "-isystem", jax.ffi.include_dir(), "-isystem", str(toolkit)]
    targets = [f"-gencode=arch=compute_{n},code=compute_{n}" for n in architectures]
    for source in cuda:
        if source.suffix == ".cu":
            yield source, [compiler, *NVCC_FLAGS, *targets, "-I", str(ffi)]
        else:
            yield source, ["g++", *GXX_FLAGS, "-std=c++17", *plain]
    plain[1] = str(FFI)
    for source in sorted((FFI / "sim").glob("*.cc")):
        yield source, ["g++", *GXX_FLAGS, "-std=c++20", "-march=native", *plain]
    for name in EMULATOR:
        yield FFI / "emu" / name, ["g++", *GXX_FLAGS, "-std=c++17", "-march=native", *plain]


def digest_of(ffi: Path, *folders: str) -> "hashlib._Hash":
    """Of the headers in these folders: a source is compiled again when one of them changes."""
    digest = hashlib.sha256(jax.__version__.encode())
    for folder in folders:
        for path in sorted((ffi / folder).rglob("*")):
            if path.suffix in (".h", ".cuh"):
                digest.update(str(path.relative_to(ffi)).encode() + path.read_bytes())
    return digest


def build(
    ffi: Path = FFI, cuda: Sequence[Path] | None = None, architectures=ARCHITECTURES, workers=2
) -> Path:
    """The library, compiled where a source is new; two compilers at a time.

    Args:
      ffi: the sources of the kernels. The machine is always that of this tree.
      cuda: those to compile; None: all. What the others define must not be called.
    """
    folder = Path(tempfile.gettempdir()) / f"jax_paged_simulator_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    is_whole = cuda is None
    cuda = cuda_sources(ffi) if cuda is None else cuda

    def run(command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")

    def compiled(source, command):
        digest = (kernels if source in cuda else machine).copy()
        digest.update(repr([part for part in command if part not in places]).encode())
        digest.update(source.read_bytes() + bytes([is_whole or source not in cuda]))
        target = folder / f"{digest.hexdigest()[:20]}.o"
        if not target.exists():
            partial = target.with_suffix(".partial.o")
            run([*command, "-c", str(source), "-o", str(partial)])
            if not is_whole and source in cuda:  # what is not there is null, and not called
                run(["objcopy", "-w", "--weaken-symbol=*jax_paged*Launch*", str(partial)])
            partial.rename(target)
        return target

    places = (str(ffi), str(FFI))
    kernels = digest_of(ffi, "common", "cuda")
    machine = digest_of(FFI, "common", "emu", "sim")
    with open(folder / "lock", "w") as lock:  # tests may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            objects = list(
                pool.map(lambda pair: compiled(*pair), commands(ffi, cuda, architectures))
            )
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
    """A small device of an architecture, with its shared memory and a number of its own."""
    kib = {80: 164, 90: 228}[architecture]
    fields = {
        "ordinal": ARCHITECTURES.index(architecture), "architecture": architecture,
        "multiprocessors": 3, "seed": 1,
        "shared_bytes_per_cta": (kib - 1) * 1024, "shared_bytes_per_multiprocessor": kib * 1024,
    }  # fmt: skip
    return Device(**(fields | changes))


def _call(name, target, operands, attributes, results, aliases, workspace_words):
    """What `register_stand_in` asks for."""
    if target not in HANDLERS:  # no CUDA kernel: the CPU's own
        own = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
        return own(*operands.values(), **attributes)
    workspace = [jax.ShapeDtypeStruct((workspace_words,), np.int32)] if workspace_words else []
    made = jax.ffi.ffi_call(
        f"{target}.{name}", [*results, *workspace], input_output_aliases=aliases
    )(*operands.values(), **attributes)
    return tuple(made)[: len(results)]


def register(path: Path, name: str) -> ctypes.CDLL:
    """Loads a library of `build` and has the ops take implementation=`name` for it."""
    loaded = ctypes.CDLL(str(path))
    loaded.sim_set_devices.argtypes = [ctypes.POINTER(Device), ctypes.c_int32]
    loaded.sim_launches.restype = ctypes.c_char_p
    for target, symbol in HANDLERS.items():
        if not hasattr(loaded, symbol.removeprefix("Sim") + "Handler"):  # see `build`
            continue
        handler = jax.ffi.pycapsule(getattr(loaded, symbol))
        jax.ffi.register_ffi_target(f"{target}.{name}", handler, platform="cpu")

    register_stand_in(name, functools.partial(_call, name))
    set_devices(loaded, *map(device, ARCHITECTURES))
    return loaded


def set_devices(loaded: ctypes.CDLL, *devices: Device) -> None:
    """The coming calls take turns among these devices, each with another order of warps."""
    loaded.sim_set_devices((Device * len(devices))(*devices), len(devices))


@functools.cache
def library() -> ctypes.CDLL:
    """The simulated device, built at its first call: the ops take implementation="sim"."""
    return register(build(), "sim")


def _first_call(*call):
    library()
    return _call("sim", *call)


register_stand_in("sim", _first_call)


class SimulationError(Exception):
    """What the simulated device found: one line with file and line of the kernel source, or PTX."""


# Parameters of a kernel for `run_ptx`: %in0, %in1, … and %out hold the addresses of the buffers,
# %t the thread, %l the lane.
_KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.visible .entry kernel({params})
{{
.reg .b64 %in<8>, %out, %rd<64>; .reg .b32 %r<64>, %t, %l; .reg .f32 %f<32>; .reg .b16 %rs<16>;
.reg .pred %p<16>;
mov.u32 %t, %tid.x;
and.b32 %l, %t, 31;
{loads}
{body}
ret;
}}
"""


def run_ptx(
    body: str, inputs, out, *, ctas=1, threads=32, shared=4096, filled=False, seed=1,
    overlaps=False, loaded=None,
):  # fmt: skip
    """Runs instructions in every thread; returns `out` as they left it; raises SimulationError.

    They may read what `out` holds before if it is `filled`.
    """
    loaded = library() if loaded is None else loaded
    arrays = [np.ascontiguousarray(x) for x in (*inputs, out)]
    arrays[-1] = arrays[-1].copy()
    names = [*(f"%in{i}" for i in range(len(inputs))), "%out"]
    text = _KERNEL.format(
        params=", ".join(f".param .u64 kernel_param_{i}" for i in range(len(names))),
        loads="\n".join(f"ld.param.u64 {x}, [kernel_param_{i}];" for i, x in enumerate(names)),
        body=body,
    )
    pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
    sizes = (ctypes.c_int64 * len(arrays))(*(x.nbytes for x in arrays))
    loaded.sim_run.restype = ctypes.c_char_p
    loaded.sim_run.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32,
        ctypes.c_int32,
    ]  # fmt: skip
    error = loaded.sim_run(
        text.encode(),
        b"kernel",
        ctas,
        threads,
        shared,
        pointers,
        sizes,
        len(arrays),
        filled,
        seed,
        overlaps,
    ).decode()
    if error:
        raise SimulationError(error)
    return arrays[-1]
