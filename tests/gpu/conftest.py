# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: skipped, with the reason, wherever jax does not run on one.

JAX_PAGED_GPU_TESTS=require makes a missing GPU a failure; =dry runs the tests on whatever device
there is, to try out their own code (benchmarks/gpu_check.py sets both).
"""

import os

import jax
import pytest


@pytest.fixture(autouse=True)
def _gpu():
    mode = os.environ.get("JAX_PAGED_GPU_TESTS", "")
    assert mode in ("", "require", "dry"), f"JAX_PAGED_GPU_TESTS={mode!r}"
    if jax.default_backend() == "gpu" or mode == "dry":
        return
    reason = f"no GPU: jax runs on {jax.default_backend()} (JAX_PLATFORMS=cuda selects one)"
    if mode == "require":
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_report_header(config):
    mode = os.environ.get("JAX_PAGED_GPU_TESTS", "")
    return "GPU tests: dry, on any device" if mode == "dry" else None
