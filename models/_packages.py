# SPDX-License-Identifier: Apache-2.0
"""Packages of extras such as jax_paged[models]: a missing one is named, with the remedy."""

import importlib
import importlib.util
from types import ModuleType


def check_installed(*names: str, extra: str = "models") -> None:
    """Raises ImportError where some package is not installed."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ImportError(
            f"jax_paged.models: {', '.join(missing)} not installed; get all that it needs with: "
            f"pip install 'jax_paged[{extra}]'"
        )


def needed(name: str, *, extra: str = "models") -> ModuleType:
    """Imports a package that only some calls use, so that the others work without it."""
    check_installed(name, extra=extra)
    return importlib.import_module(name)
