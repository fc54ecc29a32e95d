"""Test-wide settings: CPU by default, strict dtype and rank promotion."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What a shell runs in the background ignores SIGINT, and so would the children of these tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_report_header(config):
    import jax_paged

    info = jax_paged.build_info()
    return f"jax {jax.__version__}, jax_paged cpu={info['cpu']}, cuda={info['cuda']['status']}"


@pytest.fixture(autouse=True, scope="module")
def _programs_of_the_file():
    """Drops what a file has compiled: a process can map only so many pieces of memory (jax 0.7)."""
    yield
    jax.clear_caches()


@pytest.fixture(params=["native", "reference"])
def implementation(request):
    """Both implementations of an op: one suite serves them."""
    return request.param
