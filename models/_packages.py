# SPDX-License-Identifier: Apache-2.0
"""Packages of the extras: a missing one is named together with the remedy."""

import importlib
import importlib.util
from types import ModuleType


def check_installed(*names: str, extra: str = "models") -> None:
    """Raises ImportError where some package of an extra is not installed."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ImportError(
            f"jax_paged.models: {', '.join(missing)} not installed; get all that it needs with: "
            f"pip install 'jax_paged[{extra}]'"
        )


def needed(name: str) -> ModuleType:
    """Imports a package that only some calls use, so that the others work without it."""
    check_installed(name)
    return importlib.import_module(name)
