# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA kernels for the emulator (ffi/emu) and calls them on numpy arrays. Not a test.

It registers "emulated" as an implementation of the ops: their kernels on the CPU. The tests of
single launches call `emulate`, or `call` by the names of any op's operands.
"""

import concurrent.futures
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.layout import is_one_pool, pages_shape
from jax_paged.native.call import register_stand_in
from jax_paged.ops import mla
from jax_paged.ops import options as attention_options
from jax_paged.ops.attention import _latent_unit_rows, check_call
from jax_paged.testing import Batch

FFI = Path(__file__).resolve().parents[2] / "ffi"
MACHINE = (
    "call.cc", "device_memory.cc", "fiber.cc", "ordering.cc", "scheduler.cc", "shared_memory.cc",
    "sync.cc",
)  # fmt: skip
SOURCES = (
    *MACHINE,
    *(f"attention/{name}.cc" for name in ("library", "bf16", "f16", "f32")),
    "merge_states.cc",
    "moe_experts.cc",
    "qkv_norm_rope_write.cc",
    "write_kv.cc",
)
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DJAX_PAGED_EMULATE")
# In the order of the C++ Dtype; the last three of pages and weights only.
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
TYPES = {name: i for i, name in enumerate(DTYPES)} | {"int32": -1}  # of the C++ ArrayType
CHOICE = ("chosen_stages", "chosen_ctas", "chosen_prefill_rows", "chosen_latent_rows")
# The results of the targets jax_paged.<op>.v… that have emulated kernels.
RESULTS = {
    "attention": ("out", "lse"),
    "attention_plan": ("plan",),
    "merge_attention_states": ("out", "lse"),
    "moe_experts": ("out",),
    "qkv_norm_rope_write": ("q", "k_pages", "v_pages", "k_scale", "v_scale"),
    "write_kv": ("k_pages", "v_pages"),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """The part of a launch that a device decides, and the emulator's seed.

    Workers are the CTAs of a persistent kernel. Stages are those of the rings where attention's
    decode kernel serves; the shared memory decides whether it does. The seed's remainder by 3 says
    when cp.async copies (late, early, by chance), by 4 how many CTAs run at a time; CTAs, warps and
    lanes run in an order drawn from it.
    """

    num_workers: int = 5
    stages: int = 3
    plan_ctas: int = 2
    shared_bytes_per_cta: int = 227 * 1024
    shared_bytes_per_multiprocessor: int = 228 * 1024
    seed: int = 1


def limits(kib: int) -> dict[str, int]:
    """Shared memory of a device with so many KiB per multiprocessor, one less per CTA."""
    return {
        "shared_bytes_per_cta": (kib - 1) * 1024,
        "shared_bytes_per_multiprocessor": kib * 1024,
    }


class EmulatedArray(ctypes.Structure):
    """ffi/emu/call.h has the same structs, field by field."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("touched", ctypes.c_void_p),
        ("dims", ctypes.c_int64 * 6),
        ("rank", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class EmulatedAttribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("text", ctypes.c_char_p), ("number", ctypes.c_double))


class EmulatedCall(ctypes.Structure):
    _fields_ = (
        ("operands", ctypes.POINTER(EmulatedArray)),
        ("attributes", ctypes.POINTER(EmulatedAttribute)),
        ("results", ctypes.POINTER(EmulatedArray)),
        *((f"num_{name}", ctypes.c_int32) for name in ("operands", "attributes", "results")),
        *((field.name, ctypes.c_int32) for field in dataclasses.fields(Device)),
        *((name, ctypes.c_int32) for name in CHOICE),
    )


class EmulationError(Exception):
    """What the emulator found: one line with file and line of the kernel source."""


def compile_library(ffi: Path, target: Path) -> None:
    """Compiles the sources of ffi/emu into one shared library, two at a time."""
    objects = [target.with_name(f"{target.stem}_{i}.o") for i in range(len(SOURCES))]

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run, "g++", *FLAGS, "-I", ffi, "-c", ffi / "emu" / source, "-o", built)
            for source, built in zip(SOURCES, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    run("g++", "-shared", *objects, "-o", target)


@functools.cache
def library(ffi: Path = FFI) -> ctypes.CDLL:
    """The emulator of the sources in `ffi`, built once per state of the sources."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for folder in ("common", "cuda", "emu"):
        for path in sorted((ffi / folder).rglob("*")):
            if path.is_file():
                digest.update(str(path.relative_to(ffi)).encode() + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"jax_paged_emulator_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{digest.hexdigest()[:20]}.so"
    with open(folder / "lock", "w") as lock:  # tests may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / "emulator.so"
                compile_library(ffi, built)
                built.rename(target)
    return open_library(target)


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a library, which may have some of the ops alone, and declares its functions."""
    loaded = ctypes.CDLL(str(path))
    for op in RESULTS:
        if hasattr(loaded, f"emulate_{op}"):
            function = getattr(loaded, f"emulate_{op}")
            function.argtypes, function.restype = [ctypes.POINTER(EmulatedCall)], ctypes.c_char_p
    sizes_of = {
        "attention_workspace": 9, "attention_plan": 2, "moe_experts_workspace": 6,
        "write_kv_workspace": 1,
    }  # fmt: skip
    for name, sizes in sizes_of.items():
        if hasattr(loaded, f"{name}_words"):
            function = getattr(loaded, f"{name}_words")
            function.argtypes, function.restype = [ctypes.c_int64] * sizes, ctypes.c_int64
    loaded.take_sites.restype = ctypes.c_char_p
    loaded.skip_site.argtypes = [ctypes.c_char_p]
    return loaded


def poisoned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of all-ones bytes: NaN in every float dtype."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array


_one_call = threading.Lock()  # the emulated machine is one


def call(
    op: str,
    operands: Mapping[str, np.ndarray],
    attributes: Mapping[str, Any],
    results: Mapping[str, np.ndarray],
    *,
    device: Device = Device(),
    loaded: ctypes.CDLL | None = None,
    touched: Mapping[str, np.ndarray] | None = None,
) -> dict[str, int]:
    """Runs the kernels of the target jax_paged.<op> on arrays by name; raises EmulationError.

    Args:
      operands, attributes: as the FFI target gets them.
      results: are written; the workspace is one of them.
      loaded: the library, `library()` by default.
      touched: uint8[*shape, itemsize] of some operands: 1 for bytes that a kernel asked for.

    Returns what select.h chose (`CHOICE`), of attention alone.
    """
    touched = touched or {}
    operands = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in operands.items()}

    def arrays(given):
        found = [
            EmulatedArray(
                name=name.encode(),
                data=x.ctypes.data,
                touched=touched[name].ctypes.data if name in touched else None,
                dims=(ctypes.c_int64 * 6)(*x.shape),
                rank=x.ndim,
                type=TYPES[x.dtype.name],
            )
            for name, x in given.items()
        ]
        return (EmulatedArray * len(found))(*found)

    given = [
        EmulatedAttribute(name.encode(), x.encode(), 0)
        if isinstance(x, str)
        else EmulatedAttribute(name.encode(), None, x)
        for name, x in attributes.items()
    ]
    emulated = EmulatedCall(
        arrays(operands), (EmulatedAttribute * len(given))(*given), arrays(results),
        len(operands), len(given), len(results), **dataclasses.asdict(device),
    )  # fmt: skip
    run = getattr(library() if loaded is None else loaded, f"emulate_{op}")
    with _one_call:
        error = run(ctypes.byref(emulated)).decode()
    if error:
        raise EmulationError(error)
    return {name: getattr(emulated, name) for name in CHOICE}


def _stand_in(target, operands, attributes, results, aliases, cuda_workspace_words):
    """An op's target as a callback: see `register_stand_in`."""
    op = target.split(".")[1]
    if op not in RESULTS:
        raise NotImplementedError(f"{target}: there is no emulated kernel")

    def run(*arrays):
        given = dict(zip(operands, map(np.asarray, arrays), strict=True))
        made = [poisoned(x.shape, x.dtype) for x in results]
        for operand, result in (aliases or {}).items():
            made[result][...] = list(given.values())[operand]
        by_name = dict(zip(RESULTS[op], made, strict=True))
        if cuda_workspace_words:
            by_name["workspace"] = poisoned((cuda_workspace_words,), np.int32)
        call(op, given, attributes, by_name, device=_device_for(given, attributes))
        return tuple(made)

    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    return jax.pure_callback(run, types, *operands.values(), vmap_method="sequential")


def _device_for(operands: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> Device:
    """Another launch for other operands, the same one for the same.

    The workers follow the shape of the queries alone: results may have other bits with others, and
    a plan is for as many workers as its calls have.
    """
    first, *_ = operands.values()
    shape = operands.get("q", first).shape
    for text in attributes.get("shapes", "").split(","):  # of a plan: operands of its calls
        if text.startswith("q "):
            shape = tuple(map(int, text.split()[2:]))
    size = zlib.crc32(repr(shape).encode())
    order = size
    for name, x in operands.items():
        if x.dtype == np.int32:
            order = zlib.crc32(x.tobytes(), order)
        order = zlib.crc32(f"{name} {x.shape}".encode(), order)
    return Device(num_workers=1 + size % 7, stages=2 + order % 3, seed=order >> 4)


register_stand_in("emulated", _stand_in)


def emulate(
    batch: Batch,
    device: Device = Device(),
    *,
    loaded: ctypes.CDLL | None = None,
    buffers: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of attention on a batch, in one launch; raises EmulationError.

    `options`: those of `ragged_paged_attention`, scales as the kernels take them: of the layer.
    `buffers`: a dict that receives all operands and results, the workspace among them, what
    select.h chose (`CHOICE`), and in `k_touched` and `v_touched`, shaped like the pages, how many
    bytes of each element a kernel asked for.
    """
    loaded = library() if loaded is None else loaded
    static, operands = _attention_call(batch, options)
    return _emulate(batch, device, loaded, buffers, static, operands, unit_rows=16)


def emulate_mla(
    batch: Batch,
    device: Device = Device(),
    *,
    loaded: ctypes.CDLL | None = None,
    buffers: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The same of MLA, on a batch of `testing.mla.make_mla`; `buffers` gets `kv_touched`."""
    loaded = library() if loaded is None else loaded
    names = ("page_table", "seq_lens", "cu_q_lens", "num_seqs")
    given = {name: getattr(batch, name) for name in names}
    given |= {"q": batch.q, "kv_pages": np.squeeze(batch.k_pages, -3), "layer": batch.layer}
    given |= {"sm_scale": batch.sm_scale, "v_head_dim": batch.v_pages.shape[-1]}
    given |= {"causal": batch.case.causal, "kv_scale": None, "num_kv_splits": None}
    given |= {"split_tokens": None, "implementation": "emulated", **options}
    static, operands = mla.check_call(_with_device_scalars(given))
    operands = {name: np.asarray(x) for name, x in operands.items()}
    if "k_scale" in operands:  # the kernels take one for each KV head
        operands["k_scale"] = operands["k_scale"].reshape(1)
    unit_rows = _latent_unit_rows(operands["q"])
    return _emulate(batch, device, loaded, buffers, dict(static), operands, unit_rows)


def _emulate(batch, device, loaded, buffers, static, operands, unit_rows):
    """One launch of attention, for `emulate` and `emulate_mla`."""
    pages = pages_shape(batch.v_pages, batch.case.layout, "v")
    rows, pages_per_seq = operands["page_table"].shape
    words = loaded.attention_workspace_words(
        rows, pages.num_kv_heads, batch.q.shape[1] // pages.num_kv_heads, pages.head_dim,
        pages_per_seq * pages.page_size, static.get("num_kv_splits", 0),
        static.get("split_tokens", 0), operands["tree"].shape[1] if "tree" in operands else 0,
        unit_rows,
    )  # fmt: skip
    out_shape = (*batch.q.shape[:2], pages.head_dim)
    results = {
        "out": poisoned(out_shape, static.get("out_dtype", batch.q.dtype)),
        "lse": poisoned(batch.q.shape[:2], np.float32),
        "workspace": poisoned((words,), np.int32),
    }
    touched = {}
    if buffers is not None:
        pools = {name: x for name, x in operands.items() if name.endswith("_pages")}
        touched = {name: np.zeros((*x.shape, x.itemsize), "u1") for name, x in pools.items()}
    attributes = attention_options.attributes(static)
    chosen = call(
        "attention", operands, attributes, results, device=device, loaded=loaded, touched=touched
    )
    if buffers is not None:
        buffers.update(operands | results | chosen)
        buffers.update((f"{name[:-6]}_touched", x.sum(-1)) for name, x in touched.items())
    return results["out"], results["lse"]


def _attention_call(
    batch: Batch, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The static options and the operands by name."""
    names = ("q", "k_pages", "v_pages", "page_table", "seq_lens", "cu_q_lens")
    given = {name: getattr(batch, name) for name in names} | {"num_seqs": batch.num_seqs}
    given |= {"layout": batch.case.layout, "causal": batch.case.causal, "layer": batch.layer}
    given |= {"sm_scale": batch.sm_scale, "implementation": "emulated", **options}
    if is_one_pool(batch.case.layout):
        given["v_pages"] = None
    static, arrays = check_call(_with_device_scalars(given))
    return dict(static), {name: np.asarray(x) for name, x in arrays.items()}


def _with_device_scalars(given: dict[str, Any]) -> dict[str, Any]:
    """A call whose scalars are on a device: the op looks at the values of those on the host."""
    for name, dtype in (("layer", "i4"), ("sliding_window", "i4"), ("sm_scale", "f4")):
        if given.get(name) is not None and np.ndim(given[name]) == 0:
            given[name] = jnp.asarray(given[name], dtype)
    return given
