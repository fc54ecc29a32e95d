"""Builds the CUDA attention kernels for the emulator (ffi/emu) and calls them on numpy arrays.

Not a test: tests/test_emulator.py and tests/test_cuda_emulated.py import it.
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
    LAYOUTS,  # in the order of the C++ Layout
    pages_shape,
    slots_first,
)

FFI = Path(__file__).resolve().parent.parent / "ffi"
MACHINE = ("device_memory.cc", "fiber.cc", "scheduler.cc", "shared_memory.cc", "sync.cc")
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

_POINTERS = (
    "q", "k_pages", "v_pages", "page_table", "seq_lens", "cu_q_lens", "num_seqs", "layer",
    "sm_scale", "sliding_window", "num_pinned", "slot_offset", "alibi_slopes", "sinks", "tree",
    "tree_sizes", "k_scale", "v_scale", "cos", "sin", "out_scale",
    "k_touched", "v_touched", "out", "lse", "workspace",
)  # fmt: skip
_SIZES = (
    "num_tokens", "num_q_heads", "max_seqs", "pages_per_seq", "num_layers", "num_pages",
    "num_kv_heads", "page_size", "head_dim", "v_head_dim", "num_kv_splits", "split_tokens",
    "max_tree", "max_positions", "rope_half", "workspace_words",
)  # fmt: skip
_OPTIONS = (
    "dtype", "kv_dtype", "out_dtype", "layout", "causal", "has_row_windows", "rope_interleaved",
    "k_scale_per_token", "v_scale_per_token", "num_workers", "stages", "plan_ctas",
    "shared_bytes_per_cta", "shared_bytes_per_multiprocessor",
)  # fmt: skip
CHOICE = ("chosen_stages", "chosen_ctas", "chosen_prefill_rows")


class EmulatedCall(ctypes.Structure):
    """ffi/emu/attention/library.cc has the same struct, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _OPTIONS),
        ("soft_cap", ctypes.c_float),
        ("seed", ctypes.c_uint32),
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


def emulate(
    batch, device: Device = Device(), *, sliding_window=None, num_pinned=None, slot_offset=None,
    soft_cap=None, alibi_slopes=None, sinks=None, tree=None, tree_sizes=None, k_scale=None,
    v_scale=None, rope=None, out_dtype=None, out_scale=None, num_kv_splits=0, split_tokens=0,
    loaded=None, buffers=None, latent=False,
):  # fmt: skip
    """(out, lse) of a `jax_paged.testing.Batch`; raises EmulationError.

    `buffers`: a dict that receives all operands and results, the workspace among them, what
    select.h chose (`CHOICE`), and in `k_touched` and `v_touched`, shaped like the pages, how many
    bytes of each element a kernel asked for.
    `latent`: V is read from the K pages, as MLA does; of the V pages the shape counts.
    """
    loaded = library() if loaded is None else loaded
    case = batch.case
    dtype = jnp.dtype(batch.q.dtype).name
    out_dtype = jnp.dtype(batch.q.dtype if out_dtype is None else out_dtype)
    pages = pages_shape(batch.k_pages, case.layout, "k")
    heads, page_size = pages.num_kv_heads, pages.page_size
    num_tokens, num_q_heads, head_dim = batch.q.shape
    max_seqs, pages_per_seq = batch.page_table.shape
    v_head_dim = pages_shape(batch.v_pages, case.layout, "v").head_dim
    cos, sin, style = (None, None, None) if rope is None else rope
    if (num_pinned is None) != (slot_offset is None):  # the op gives both, or none
        rows = np.zeros(max_seqs, np.int32)
        num_pinned, slot_offset = (rows if x is None else x for x in (num_pinned, slot_offset))
    words = loaded.workspace_words(
        max_seqs, heads, num_q_heads // heads, v_head_dim, pages_per_seq * page_size,
        num_kv_splits, split_tokens, 0 if tree is None else tree.shape[1],
    )  # fmt: skip
    arrays = {
        "q": batch.q,
        "k_pages": batch.k_pages,
        "v_pages": batch.v_pages,
        "page_table": batch.page_table,
        "seq_lens": batch.seq_lens,
        "cu_q_lens": batch.cu_q_lens,
        "num_seqs": np.array([batch.num_seqs], np.int32),
        "layer": np.array(0 if batch.layer is None else batch.layer, np.int32),
        "sm_scale": np.array(batch.sm_scale, np.float32),
        "sliding_window": sliding_window,
        "num_pinned": num_pinned,
        "slot_offset": slot_offset,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "tree": tree,
        "tree_sizes": tree_sizes,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "cos": cos,
        "sin": sin,
        "out_scale": out_scale,
        "out": poisoned((num_tokens, num_q_heads, v_head_dim), out_dtype),
        "lse": poisoned((num_tokens, num_q_heads), np.float32),
        "workspace": poisoned(words, np.float32),
    }
    indices = ("sliding_window", "num_pinned", "slot_offset", "tree", "tree_sizes")
    for name in (
        *indices, "alibi_slopes", "sinks", "k_scale", "v_scale", "cos", "sin", "out_scale",
    ):  # fmt: skip
        if arrays[name] is not None:
            arrays[name] = np.array(arrays[name], "i4" if name in indices else "f4")
    if buffers is not None:
        for name in ("k", "v"):
            pages_array = arrays[f"{name}_pages"]
            arrays[f"{name}_touched"] = np.zeros((*pages_array.shape, pages_array.itemsize), "u1")
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items() if x is not None}
    if latent:
        arrays["v_pages"] = arrays["k_pages"]
    call = EmulatedCall(
        **{name: x.ctypes.data for name, x in arrays.items()},
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        max_seqs=max_seqs,
        pages_per_seq=pages_per_seq,
        num_layers=1 if pages.num_layers is None else pages.num_layers,
        num_pages=pages.num_pages,
        num_kv_heads=heads,
        page_size=page_size,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        num_kv_splits=num_kv_splits,
        split_tokens=split_tokens,
        max_tree=0 if tree is None else tree.shape[1],
        max_positions=0 if cos is None else len(cos),
        rope_half=0 if cos is None else np.shape(cos)[1],
        workspace_words=words,
        dtype=DTYPES.index(dtype),
        kv_dtype=DTYPES.index(batch.k_pages.dtype.name),
        out_dtype=DTYPES.index(out_dtype.name),
        k_scale_per_token=k_scale is not None and np.ndim(k_scale) > 1,
        v_scale_per_token=v_scale is not None and np.ndim(v_scale) > 1,
        layout=LAYOUTS.index(case.layout),
        causal=case.causal,
        has_row_windows=sliding_window is not None and np.ndim(sliding_window) == 1,
        rope_interleaved=style == "interleaved",
        soft_cap=soft_cap or 0,
        num_workers=device.num_workers,
        stages=device.stages,
        plan_ctas=device.plan_ctas,
        shared_bytes_per_cta=device.shared_bytes_per_cta,
        shared_bytes_per_multiprocessor=device.shared_bytes_per_multiprocessor,
        seed=device.seed,
    )
    error = loaded.emulate_attention(ctypes.byref(call)).decode()
    if error:
        raise EmulationError(error)
    if buffers is not None:
        for name in ("k_touched", "v_touched"):
            arrays[name] = arrays[name].sum(-1)
        buffers.update(arrays)
        buffers.update((name, getattr(call, name)) for name in CHOICE)
    return arrays["out"], arrays["lse"]


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
