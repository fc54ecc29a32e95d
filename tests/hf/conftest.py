# SPDX-License-Identifier: Apache-2.0
"""These tests compare with transformers on torch, and are skipped without them.

JAX_PAGED_REQUIRE_HF=1 turns the skip into a failure.
"""

import importlib.util
import os
import warnings

import pytest

MISSING = [
    name
    for name in ("torch", "transformers", "accelerate")
    if importlib.util.find_spec(name) is None
]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(scope="session")
def transformers():
    """The transformers module, with torch on one thread per core and gradients off."""
    if MISSING:
        reason = f"{' and '.join(MISSING)} not installed: pip install 'jax_paged[test-hf]'"
        if os.environ.get("JAX_PAGED_REQUIRE_HF") == "1":
            pytest.fail(f"JAX_PAGED_REQUIRE_HF=1, but {reason}")
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these packages warn of at import is not ours
        import torch
        import transformers

        torch.set_grad_enabled(False)
        yield transformers
