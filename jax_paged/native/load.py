# SPDX-License-Identifier: Apache-2.0
"""Loads the native modules, registers their handlers, and tells what can run where.

A module that is not there is no error at import: the error comes when a program that needs it is
lowered, and names the remedy.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jax_paged.checks import Implementation

# What JAX_PAGED_CPU_ISA may ask for; a processor that has one has those before it.
CPU_ISAS = ("generic", "avx2", "avx512", "avx512bf16", "amx")
_PLATFORMS = {"_cpu": "cpu", "_cuda": "CUDA"}
# Targets whose work XLA does well enough on CUDA: there, the reference is the implementation.
CPU_ONLY = frozenset(
    {
        "jax_paged.copy_rows.v1",
        "jax_paged.linear.v2",
        "jax_paged.linear_int4.v2",
        "jax_paged.lora.v1",
        "jax_paged.moe_experts_int4.v1",
        "jax_paged.scatter_rows.v1",
        "jax_paged.zero_pool.v1",
    }
)
# Targets that mean something on CUDA alone: on the CPU, too, the reference is the implementation.
CUDA_ONLY = frozenset({"jax_paged.attention_plan.v1"})
_REMEDIES = {
    "_cpu": "install with `pip install .`, or `pip install -e . --no-build-isolation` to run from "
    "the source tree; implementation='reference' needs no native code",
    "_cuda": "reinstall with JAX_PAGED_CUDA=on (every architecture) or JAX_PAGED_CUDA_ARCHS=90-real"
    " (one) and an nvcc on PATH, or with JAX_PAGED_CUDA=wheels; "
    "implementation='reference' needs no native code",
}

_DRIVER_REMEDY = (
    "update the NVIDIA driver, or rebuild with JAX_PAGED_CUDA=on and an nvcc of the driver's major "
    "version; implementation='reference' needs no native code"
)


def _runtime_ffi_api() -> tuple[int, int]:
    """The XLA FFI version (major, minor) of the installed jaxlib, read from its header."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    found = {
        part: int(number)
        for part, number in re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header)
    }
    return found["MAJOR"], found["MINOR"]


def _toolkit_major(module: ModuleType) -> int:
    return int(module.toolkit.partition(".")[0])


def _driver_version(module: ModuleType) -> tuple[int, int] | None:
    """The newest CUDA (major, minor) that the driver runs, or None where there is no driver."""
    version = module.driver_version()
    return (version // 1000, version % 1000 // 10) if version else None


def _driver_problem(module: ModuleType) -> str | None:
    """Why the driver cannot run the CUDA kernels, or None.

    A driver runs what toolkits of its major version and of older ones have built. Without a driver
    there is nothing to run on, but programs can still be compiled for a GPU elsewhere.
    """
    driver = _driver_version(module)
    if driver is None or driver[0] >= _toolkit_major(module):
        return None
    return (
        f"driver too old: it runs CUDA {driver[0]}.{driver[1]}, the kernels were built with "
        f"CUDA {module.toolkit}"
    )


def _load(name: str) -> ModuleType | str:
    """Loads and registers one native module; returns it, or the reason why it is not usable."""
    if importlib.util.find_spec(f"jax_paged.{name}") is None:
        return "not built"
    try:
        module = importlib.import_module(f"jax_paged.{name}")
    except ImportError as error:  # a library that is there but does not load: keep its own words
        return f"broken: {error}"
    built, runtime = module.ffi_api, _runtime_ffi_api()
    if built[0] != runtime[0] or built[1] > runtime[1]:
        # Registering it would make XLA refuse the whole backend, so stop here.
        raise ImportError(
            f"jax_paged.{name} was built for XLA FFI {built[0]}.{built[1]}, but the installed "
            f"jaxlib offers {runtime[0]}.{runtime[1]}: rebuild jax_paged against this jaxlib, or "
            "upgrade jaxlib"
        )
    if name == "_cuda" and (problem := _driver_problem(module)) is not None:
        return problem
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=_PLATFORMS[name])
    return module


_modules = {name: _load(name) for name in _PLATFORMS}


def cpu_module() -> ModuleType:
    """The native CPU module; raises ImportError when it is not there."""
    module = _modules["_cpu"]
    if isinstance(module, str):
        raise ImportError(f"jax_paged: native CPU kernels: {module}; {_REMEDIES['_cpu']}")
    return module


def cpu_isa() -> str | None:
    """The instruction set of the native CPU module; None where there is no such module."""
    module = _modules["_cpu"]
    return None if isinstance(module, str) else module.isa()


def _cuda_why_not() -> str:
    """Why the build made no CUDA kernels; empty where it made them."""
    return getattr(_modules["_cpu"], "cuda_why_not", "")


def targets(name: str) -> tuple[str, ...]:
    module = _modules[name]
    return () if isinstance(module, str) else tuple(sorted(module.registrations()))


def build_info() -> dict[str, Any]:
    """What was built and what runs: native modules, instruction set, CUDA toolkit, FFI versions.

    Returns:
      A dict: `version`; `ffi_api`, the XLA FFI version of the jaxlib at hand; `targets`, the FFI
      target names (`jax_paged.export` vouches for them);
      `cpu` and `cuda`, each with `status` ("ok", "not built" or the reason why it does not load),
      and, when ok, the handlers and how they were built; for `cuda` the version of the toolkit
      (`toolkit`, `toolkit_major`) and `driver`, the newest CUDA (major, minor) that the driver
      runs, None without a driver. An older major version than the toolkit's is a status, and an
      error when a program is lowered for CUDA. Where CUDA kernels were not built, `why` and
      `remedy` tell why not, and how to get them.

    >>> build_info()["cpu"]["status"]
    'ok'
    """
    info: dict[str, Any] = {
        "version": importlib.metadata.version("jax_paged"),
        "ffi_api": _runtime_ffi_api(),
        "targets": sorted({*targets("_cpu"), *targets("_cuda")}),
    }
    for name in _PLATFORMS:
        module = _modules[name]
        entry: dict[str, Any] = {"status": module if isinstance(module, str) else "ok"}
        if not isinstance(module, str):
            entry |= {"targets": targets(name), "ffi_api": tuple(module.ffi_api)}
            if name == "_cpu":
                entry |= {"isa": module.isa()}
            else:
                entry |= {
                    "toolkit": module.toolkit,
                    "toolkit_major": _toolkit_major(module),
                    "driver": _driver_version(module),
                    "architectures": module.architectures,
                }
        elif name == "_cuda" and module == "not built":
            entry |= {"why": _cuda_why_not(), "remedy": _REMEDIES[name]}
        info[name.removeprefix("_")] = entry
    return info


def why_unavailable(name: str, target: str) -> str | None:
    """The message for a native module that cannot run `target`, or None when it can."""
    module = _modules[name]
    if target in targets(name):
        return None
    if isinstance(module, str) and module.startswith("driver too old"):
        return f"jax_paged: CUDA kernels cannot run ({module}); {_DRIVER_REMEDY}"
    reason = module if isinstance(module, str) else f"this build has no {target}"
    if name == "_cuda" and module == "not built":
        reason = _cuda_why_not() or reason
    return f"jax_paged: {_PLATFORMS[name]} kernels not built ({reason}); {_REMEDIES[name]}"


def no_native(target: str) -> str:
    if target in CPU_ONLY:
        return f"{target}: a native kernel exists for cpu; implementation=None uses XLA elsewhere"
    return (
        f"{target}: native kernels exist for cpu and CUDA; implementation=None uses the reference "
        "on other platforms"
    )


def implementation_on(platform: str, target: str, implementation: Implementation) -> str:
    """What `ffi_call` runs on a platform ("cpu", "cuda", "tpu"); raises as its lowering would."""
    if implementation == "reference":
        return "reference"
    name = {"cpu": "_cpu", "cuda": "_cuda", "gpu": "_cuda"}.get(platform)
    if name == "_cuda" and target in CPU_ONLY:
        name = None
    message = no_native(target) if name is None else why_unavailable(name, target)
    if name is None and implementation is None:
        return "reference"
    if message is not None:
        raise NotImplementedError(message)
    return "native"
