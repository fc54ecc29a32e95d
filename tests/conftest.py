# SPDX-License-Identifier: Apache-2.0
"""Test-wide settings: CPU by default, strict dtype and rank promotion."""

import argparse
import os
import re
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two workers whose numpy has a thread per core each wait for each other: float64 products of the
# oracle took 60 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What a shell runs in the background ignores SIGINT, and so would the children of these tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest
from tiers import default_tier, part_of

# Most of the tests' time is XLA's compiler. The default tier has it compile in a third of the time,
# to slower programs of the same HLO: what is tested is not compiled by XLA.
QUICK_PROGRAMS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# jax 0.7 rounds to 8 bits wrongly with this; XLA of jax 0.11 does not know it and ends the process.
if (0, 10) <= jax.__version_info__ < (0, 11):
    QUICK_PROGRAMS += " --xla_cpu_use_fusion_emitters=false"

# The files that take longest begin, so that two workers end together (pytest-xdist would begin with
# the files of most tests, and end with one worker waiting for a minute).
SLOW_FILES = [
    "sharding", "sharding_weights", "sharding_reads", "public_grids", "state_machine",
    "draft_model", "kv_dtype", "cli_generate", "cli_mistakes", "cli_eval", "engine",
    "attention_options", "draft_trees", "speculate", "cache_scenarios", "decoder", "generate",
    "bench_serve", "build", "tsan", "groups", "groups_random", "concurrency", "interrupt",
    "cascade", "transfer_between", "docs", "support",
]  # fmt: skip

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def part(text):
    """K/N, or all."""
    if text != "all" and not re.fullmatch(r"[1-9]\d*/[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected K/N, got {text!r}; of files: --deep=all FILE …")
    return text


def pytest_addoption(parser):
    parser.addoption(
        "--sim",
        action="store_true",
        help="run CUDA ops on the simulated device, too (ffi/sim): needs nvcc, and minutes",
    )
    parser.addoption(
        "--deep",
        nargs="?",
        const="all",
        type=part,
        metavar="K/N",
        help="run all combinations of parameters (tests/support/tiers.py); K/N: part K of N of "
        "what a plain run leaves out",
    )


def tier(config):
    """None, "all", or part K/N of what the default tier leaves out; a long run has all."""
    is_long = os.environ.get("JAX_PAGED_LONG") == "1"
    return config.getoption("--deep") or ("all" if is_long else None)


def pytest_configure(config):
    """Before jax starts its backend, which reads XLA_FLAGS."""
    if tier(config) is None:
        os.environ.setdefault("XLA_FLAGS", QUICK_PROGRAMS)
    config.option.loadscopereorder = False  # see SLOW_FILES


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    items.sort(key=_slowest_first)
    if not config.getoption("--sim"):
        asleep = [item for item in items if item.get_closest_marker("sim")]
        config.hook.pytest_deselected(items=asleep)
        items[:] = [item for item in items if not item.get_closest_marker("sim")]
    deep, single = tier(config), any("::" in arg for arg in config.args)
    if deep == "all" or single:  # what is asked for by name runs
        return
    default = default_tier(items)
    kept = default
    if deep is not None:
        number, parts = map(int, deep.split("/"))
        left = set(default)
        kept = part_of([item for item in items if item not in left], number, parts)
    keep = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = kept


def _slowest_first(item):
    name = item.path.stem.removeprefix("test_")
    return SLOW_FILES.index(name) if name in SLOW_FILES else len(SLOW_FILES)


def pytest_report_header(config):
    import jax_paged

    info = jax_paged.build_info()
    return f"jax {jax.__version__}, jax_paged cpu={info['cpu']}, cuda={info['cuda']['status']}"


@pytest.fixture(autouse=True, scope="module")
def _programs_of_the_file():
    """Drops what a file has compiled: a process can map only so many pieces of memory (jax 0.7)."""
    yield
    jax.clear_caches()


@pytest.hookimpl(trylast=True)  # after the test's own parameters
def pytest_generate_tests(metafunc):
    """A test that takes `implementation` runs with each one of an op: one suite serves them.

    Marked `cuda` it has the CUDA kernels, too: their sources in the emulator, and with --sim their
    PTX on the simulated device; cuda("sim") has the latter alone. A test may name others itself.
    """
    names = ["native", "reference"]
    if mark := metafunc.definition.get_closest_marker("cuda"):
        import emulation  # noqa: F401 (it registers them)

        wanted = mark.args or ("emulated", "sim")
        if "emulated" in wanted:
            tier = [pytest.mark.deep] if mark.kwargs.get("deep") else []
            names.append(pytest.param("emulated", marks=tier))
        if "sim" in wanted and metafunc.config.getoption("--sim"):
            import simulation  # noqa: F401

            names.append("sim")
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "implementation" in metafunc.fixturenames and not any("implementation" in x for x in own):
        metafunc.parametrize("implementation", names)
