# SPDX-License-Identifier: Apache-2.0
"""Packages whose signatures we offer: tests compare with them, and are skipped without them."""

import importlib
import os

import pytest


def imported(module: str):
    """A module of another project; JAX_PAGED_REQUIRE_COMPAT=1 makes its absence a failure."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = f"{error}: pip install 'jax_paged[test-compat]'"
        if os.environ.get("JAX_PAGED_REQUIRE_COMPAT") == "1":
            pytest.fail(f"JAX_PAGED_REQUIRE_COMPAT=1, but {reason}")
        pytest.skip(reason)
