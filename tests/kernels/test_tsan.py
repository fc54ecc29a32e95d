# SPDX-License-Identifier: Apache-2.0
"""ThreadSanitizer over the CPU module's handlers, in a native program (tests/kernels/tsan).

The program calls the handlers through XLA's FFI on a pool of threads of its own, because jaxlib is
not instrumented: in its process the sanitizer would miss what orders two accesses. Nothing is
optimised, so that every access is seen. Some of those of AVX-512 are not: the compiler does not
instrument masked loads and stores.
"""

import concurrent.futures
import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from planting import plant

from jax_paged.native.load import CPU_ISAS

FFI = Path(__file__).resolve().parents[2] / "ffi"
PROGRAM = Path(__file__).resolve().parent / "tsan"
FLAGS = ("-std=c++17", "-fsanitize=thread", "-O0", "-g1", "-pthread")
IS_X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = CPU_ISAS if IS_X86 else CPU_ISAS[:1]
CHOICE = "attention/chosen_kernels.cc"
FOUND = 66  # what a program ends with whose race ThreadSanitizer has reported
TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ThreadSanitizer of gcc: on Linux")

Objects = dict[str, Path]  # by the name of their source


def handlers() -> list[str]:
    """The handlers' sources."""
    text = (FFI / "cpu/CMakeLists.txt").read_text(encoding="utf-8")
    [names] = re.findall(r"set\(HANDLERS ([^)]*)\)", text)
    return names.split()


def compile_source(source: Path, target: Path, *flags: str | Path) -> None:
    include = ["-isystem", jax.ffi.include_dir()]
    command = ["g++", *FLAGS, *flags, "-I", FFI, *include, "-c", source, "-o", target]
    subprocess.run(command, check=True)


def build(folder: Path, all_isas: bool) -> Objects:
    """The objects of the program, with the generic kernels alone or with all kinds."""
    isas = ISAS if all_isas else ["generic"]
    header, program = folder / "xla.h", folder / "program.cc"
    header.write_text('#include "common/ffi_checks.h"\n', encoding="utf-8")
    includes = [f'#include "{source}"\n' for source in sorted(PROGRAM.glob("*.cc"))]
    program.write_text("".join(includes), encoding="utf-8")
    kernels = [f"{kind}/inst/{isa}.cc" for isa in isas for kind in ("attention", "linear")]
    sources = {name: FFI / "cpu" / name for name in (CHOICE, *kernels, *handlers())}
    sources[program.name] = program
    objects = {name: folder / f"{name.replace('/', '_')}.o" for name in sources}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # XLA's header takes longer to read than a handler to compile.
        read = pool.submit(compile_source, header, folder / "xla.h.gch", "-x", "c++-header")

        def compile_one(name: str) -> None:
            if name in handlers():
                read.result()
            compile_source(sources[name], objects[name], *flags_of(name, objects))

        list(pool.map(compile_one, sources))
    return objects


def flags_of(name: str, objects: Objects) -> list[str | Path]:
    """Of a source among these, by its name."""
    if name in handlers():
        return ["-include", objects[name].parent / "xla.h"]
    is_generic = "linear/inst/avx2.cc" not in objects
    return ["-DJAX_PAGED_GENERIC_ONLY"] if name == CHOICE and is_generic else []


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[bool], Objects]:
    """`build`, once for each of its arguments."""
    return functools.cache(lambda all_isas: build(tmp_path_factory.mktemp("tsan"), all_isas))


def run(
    objects: list[Path], folder: Path, isa: str, word: str, rounds: int
) -> subprocess.CompletedProcess[str]:
    """Links the program and runs the calls that have the word in their names."""
    program = folder / "check"
    subprocess.run(["g++", *FLAGS, *objects, "-o", program], check=True)
    env = os.environ | {"JAX_PAGED_CPU_ISA": isa, "TSAN_OPTIONS": "halt_on_error=1"}
    for prefix in ([], ["setarch", "-R"]):  # some kernels' random addresses are too far apart
        command = [*prefix, program, word, str(rounds)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        if "unexpected memory mapping" not in done.stderr:
            break
    if "JAX_PAGED_CPU_ISA expected one of" in done.stderr:
        pytest.skip(f"this machine has no {isa}")
    return done


@pytest.mark.parametrize(
    "isa", ["generic", *(pytest.param(isa, marks=pytest.mark.deep) for isa in ISAS[1:])]
)
def test_handlers_have_no_data_race(isa, built, tmp_path):
    is_deep = isa != "generic"
    done = run([*built(is_deep).values()], tmp_path, isa, "", rounds=10 if is_deep else 2)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    *calls, last = done.stdout.splitlines()
    assert last == f"{isa} kernels: ok"
    assert len(calls) >= len(handlers())
    assert all(line.endswith(" ok") for line in calls)


def test_every_handler_is_called():
    declared = re.findall(r"\b\w+Handler\b", (FFI / "cpu/handlers.h").read_text(encoding="utf-8"))
    texts = [source.read_text(encoding="utf-8") for source in PROGRAM.glob("*_calls.cc")]
    called = set(re.findall(r"cpu::(\w+Handler)", "".join(texts)))
    assert set(declared) == called
    sources = [(FFI / "cpu" / name).read_text(encoding="utf-8") for name in handlers()]
    defined = re.findall(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+)", "".join(sources))
    assert sorted(declared) == sorted(defined)


# name → (file, what stands there, what the race makes of it, the source to compile again, the calls
# to run, what the report must name)
RACES = {
    "items are claimed without an atomic": (
        "cpu/parallel_for.h",
        "std::atomic<int64_t> next{0};",
        """struct {
      int64_t value = 0;
      void operator=(int64_t n) { value = n; }
      int64_t load(std::memory_order) const { return value; }
      int64_t fetch_add(int64_t n, std::memory_order) { value += n; return value - n; }
    } next;""",
        "write/scatter_rows.cc",
        "scatter_rows",
        "parallel_for.h",
    ),
    "the kernels are chosen without a lock": (
        "cpu/attention/chosen_kernels.cc",
        "static const Kernels& chosen = ChooseKernels();\n  return chosen;",
        """static const Kernels* chosen;
  if (!chosen) chosen = &ChooseKernels();
  return *chosen;""",
        CHOICE,
        "merge",
        CHOICE,
    ),
    "a caller does not wait for what helpers wrote": (
        "cpu/parallel_for.h",
        "done.fetch_add(finished, std::memory_order_acq_rel)",
        "done.fetch_add(finished, std::memory_order_relaxed)",
        "linear/moe_experts.cc",
        "moe",
        "moe_experts.cc",
    ),
    "splits are folded before they are seen": (
        "cpu/attention/handler.cc",
        "fetch_sub(1, std::memory_order_acq_rel)",
        "fetch_sub(1, std::memory_order_relaxed)",
        "attention/handler.cc",
        "decode f32",
        "cpu/attention/",
    ),
    "two workers have one scratch": (
        "cpu/attention/handler.cc",
        "work.workers + worker * work.worker_floats",
        "work.workers",
        "attention/handler.cc",
        "decode",
        "cpu/attention/",
    ),
    "kept memory is taken without a lock": (
        "cpu/scratch.h",
        "std::lock_guard<std::mutex> lock(store().mutex);\n      Block* best",
        "Block* best",
        "linear/handler.cc",
        "linear",
        "scratch.h",
    ),
    "two experts' rows are summed in one place": (
        "cpu/linear/moe_experts.cc",
        "y + group.first_row * call.hidden + begin",
        "y + begin",
        "linear/moe_experts.cc",
        "moe",
        "linear/kernel.h",
    ),
}
DEEP = [*RACES][2:]


def assert_found(name: str, isa: str, objects: Objects, folder: Path) -> None:
    """Plants a race, and checks that it is reported."""
    file, old, new, source, word, named = RACES[name]
    plant(folder, file, old, new)
    flags = ["-I", folder / "ffi", *flags_of(source, objects)]
    compile_source(folder / "ffi/cpu" / source, folder / "planted.o", *flags)
    # First, so that its inline functions are linked and not those of another object.
    rest = [path for name, path in objects.items() if name != source]
    # It ends with the first report. Some need several rounds: threads may happen to be in order.
    done = run([folder / "planted.o", *rest], folder, isa, word, rounds=300)
    assert done.returncode == FOUND, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "ThreadSanitizer: data race" in done.stderr
    assert named in done.stderr, done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name in DEEP else ()) for name in RACES]
)
def test_a_planted_race_is_reported(name, built, tmp_path):
    assert_found(name, "generic", built(False), tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("isa", ISAS[1:])
def test_a_planted_race_is_reported_in_the_kernels_of(isa, built, tmp_path):
    assert_found("two workers have one scratch", isa, built(True), tmp_path)
