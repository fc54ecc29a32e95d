# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA attention kernels for the emulator (ffi/emu) and calls them on numpy arrays.

Not a test: test_emulator.py and test_cuda_emulated.py import it.
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
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_paged import ragged_paged_attention
from jax_paged.layout import (
    pages_shape,
    slots_first,
)

FFI = Path(__file__).resolve().parents[2] / "ffi"
MACHINE = (
    "device_memory.cc", "fiber.cc", "ordering.cc", "scheduler.cc", "shared_memory.cc", "sync.cc",
)  # fmt: skip
SOURCES = (
    *MACHINE,
    *(f"attention/{name}.cc" for name in ("library", "bf16", "f16", "f32")),
    "merge_states.cc",
    "moe_experts.cc",
    "qkv_norm_rope_write.cc",
)
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DJAX_PAGED_EMULATE")
# In the order of the C++ Dtype; the last three of pages only.
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")

TYPES = {name: i for i, name in enumerate(DTYPES)} | {"int32": -1}  # of the C++ ArrayType
CHOICE = ("chosen_stages", "chosen_ctas", "chosen_prefill_rows")


@dataclasses.dataclass(frozen=True)
class Device:
    """The part of a launch that a device decides, and the emulator's seed.

    Stages are those of the rings where the decode kernel serves; the shared memory decides whether
    it does. The seed's remainder by 3 says when cp.async copies (late, early, by chance), by 4 how
    many CTAs run at a time; CTAs, warps and lanes run in an order drawn from it.
    """

    num_workers: int = 5
    stages: int = 3
    plan_ctas: int = 2
    shared_bytes_per_cta: int = 227 * 1024
    shared_bytes_per_multiprocessor: int = 228 * 1024
    seed: int = 1


class EmulatedArray(ctypes.Structure):
    """ffi/emu/attention/library.cc has the same structs, field by field."""

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
        *((name, ctypes.c_int32) for name in ("num_operands", "num_attributes")),
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
    """Loads a library and declares its functions."""
    loaded = ctypes.CDLL(str(path))
    loaded.emulate_attention.argtypes = [ctypes.POINTER(EmulatedCall)]
    loaded.emulate_attention.restype = ctypes.c_char_p
    if hasattr(loaded, "emulate_merge_states"):  # not in the libraries with planted bugs
        pointers = [ctypes.c_void_p] * 6
        loaded.emulate_merge_states.argtypes = [
            *pointers, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32,
        ]  # fmt: skip
        loaded.emulate_merge_states.restype = ctypes.c_char_p
    loaded.take_sites.restype = ctypes.c_char_p
    loaded.skip_site.argtypes = [ctypes.c_char_p]
    loaded.workspace_words.argtypes = [ctypes.c_int64] * 8
    loaded.workspace_words.restype = ctypes.c_int64
    return loaded


def emulate_merge(out_a, lse_a, out_b, lse_b, *, seed=1):
    """(out, lse) of `merge_attention_states` on numpy arrays; raises EmulationError."""
    arrays = [np.ascontiguousarray(x) for x in (out_a, lse_a, out_b, lse_b)]
    arrays += [poisoned(out_a.shape, out_a.dtype), poisoned(lse_a.shape, np.float32)]
    error = library().emulate_merge_states(
        *(x.ctypes.data for x in arrays), lse_a.size, out_a.shape[-1],
        DTYPES.index(out_a.dtype.name), seed,
    ).decode()  # fmt: skip
    if error:
        raise EmulationError(error)
    return arrays[4], arrays[5]


def poisoned(shape, dtype) -> np.ndarray:
    """An array of all-ones bytes: NaN in every float dtype."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array


def emulate(
    batch, device: Device = Device(), *, loaded=None, buffers=None, latent=False, **options
):
    """(out, lse) of a `jax_paged.testing.Batch`; raises EmulationError.

    `options`: those of attention, as the FFI target takes them: of scales those of the layer.
    `buffers`: a dict that receives all operands and results, the workspace among them, what
    select.h chose (`CHOICE`), and in `k_touched` and `v_touched`, shaped like the pages, how many
    bytes of each element a kernel asked for.
    `latent`: V is read from the K pages, as MLA does; of the V pages the shape counts.
    """
    loaded = library() if loaded is None else loaded
    case = batch.case
    options = {name: x for name, x in options.items() if x is not None}
    options |= {"layout": case.layout, "causal": case.causal}
    out_dtype = jnp.dtype(options.pop("out_dtype", batch.q.dtype))
    if "rope" in options:
        options["cos"], options["sin"], style = options.pop("rope")
        options["rope_interleaved"] = style == "interleaved"
    pages = pages_shape(batch.k_pages, case.layout, "k")
    heads = pages.num_kv_heads
    num_tokens, num_q_heads, _ = batch.q.shape
    max_seqs, pages_per_seq = batch.page_table.shape
    v_head_dim = pages_shape(batch.v_pages, case.layout, "v").head_dim
    if ("num_pinned" in options) != ("slot_offset" in options):  # the op gives both, or none
        rows = np.zeros(max_seqs, np.int32)
        options = {"num_pinned": rows, "slot_offset": rows} | options
    static = ("layout", "causal", "soft_cap", "num_kv_splits", "split_tokens", "rope_interleaved")
    attributes = {name: options.pop(name) for name in static if name in options}
    words = loaded.workspace_words(
        max_seqs, heads, num_q_heads // heads, v_head_dim, pages_per_seq * pages.page_size,
        attributes.get("num_kv_splits", 0), attributes.get("split_tokens", 0),
        options["tree"].shape[1] if "tree" in options else 0,
    )  # fmt: skip
    pools = {"k_pages": batch.k_pages, "v_pages": batch.v_pages}
    if latent:
        pools = {"kv_pages": batch.k_pages.squeeze(-3)}
    operands = {
        "q": batch.q,
        **pools,
        "page_table": batch.page_table,
        "seq_lens": batch.seq_lens,
        "cu_q_lens": batch.cu_q_lens,
        "num_seqs": np.array([batch.num_seqs], np.int32),
        "layer": np.array(0 if batch.layer is None else batch.layer, np.int32),
        "sm_scale": np.array(batch.sm_scale, np.float32),
    }
    for name, x in options.items():
        operands[name] = np.array(x, "i4" if np.asarray(x).dtype.kind in "iu" else "f4")
    operands = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in operands.items()}
    results = {
        "out": poisoned((num_tokens, num_q_heads, v_head_dim), out_dtype),
        "lse": poisoned((num_tokens, num_q_heads), np.float32),
        "workspace": poisoned(words, np.float32),
    }
    touched = {}
    if buffers is not None:
        touched = {x: np.zeros((*operands[x].shape, operands[x].itemsize), "u1") for x in pools}

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
    call = EmulatedCall(
        arrays(operands), (EmulatedAttribute * len(given))(*given), arrays(results),
        len(operands), len(given), **dataclasses.asdict(device),
    )  # fmt: skip
    error = loaded.emulate_attention(ctypes.byref(call)).decode()
    if error:
        raise EmulationError(error)
    if buffers is not None:
        buffers.update(operands | results)
        buffers.update((f"{name[:-6]}_touched", x.sum(-1)) for name, x in touched.items())
        buffers.update((name, getattr(call, name)) for name in CHOICE)
    return results["out"], results["lse"]


IMPLEMENTATIONS = ("native", "reference", "emulated")


def attend(batch, implementation: str, **options):
    """(out, lse) of `ragged_paged_attention` or of the emulated CUDA kernels."""
    if implementation == "emulated":
        return emulate(batch, Device(seed=4), **options)
    arguments, defaults = batch.ragged()
    call = defaults | options | {"return_lse": True, "implementation": implementation}
    return ragged_paged_attention(*arguments, **call)


def windows_begin(batch, window: int) -> np.ndarray:
    """i64[S]: the first token of each row that some query sees; seq_len in rows without a query."""
    case, rows = batch.case, len(batch.seq_lens)
    seq_lens = np.clip(batch.seq_lens, 0, batch.page_table.shape[1] * case.page_size)
    bounds = np.maximum.accumulate(np.clip(batch.cu_q_lens, 0, len(batch.q)))
    q_lens = np.where(np.arange(rows) < batch.num_seqs, np.diff(bounds), 0)
    first = seq_lens.astype(np.int64) - q_lens - window + 1
    return np.where(q_lens > 0, np.maximum(first, 0) if window > 0 else 0, seq_lens)


def tokens_of(batch, begins, ends) -> np.ndarray:
    """bool[num_pages, page_size]: the slots of tokens [begins[row], ends[row]) of the rows."""
    page = batch.case.page_size
    slots = np.zeros((pages_shape(batch.k_pages, batch.case.layout, "k").num_pages, page), bool)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for token in range(begin, min(end, batch.page_table.shape[1] * page)):
            page_id = batch.page_table[row, token // page]
            if 0 <= page_id < len(slots):
                slots[page_id, token % page] = True
    return slots


def assert_reads_windows_only(batch, window: int, buffers) -> None:
    """Kernels asked for the tokens from where a row's windows begin, and for nothing else.

    `buffers`: of an `emulate` on pages without a layer axis. Of vllm5d V is loaded by 8 tokens.
    """
    begins = windows_begin(batch, window)
    for name in ("k", "v"):
        touched = slots_first(buffers[f"{name}_touched"], batch.case.layout, name).any((-2, -1))
        by = 8 if name == "v" and batch.case.layout == "vllm5d" else 1
        allowed = tokens_of(batch, begins // by * by, -(-batch.seq_lens // by) * by)
        assert not (touched & ~allowed).any(), f"{name}_pages: read outside of the windows"
        needed = tokens_of(batch, begins, batch.seq_lens)
        assert touched[needed].all(), f"{name}_pages: tokens in a window not read"
