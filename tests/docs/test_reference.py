# SPDX-License-Identifier: Apache-2.0
"""The reference has every public name, and none that is not there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVES = [
    path for page in PAGES for path in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.M)
]


def public_names(module):
    """What a module has for users; `transfer` lists it, the others import it."""
    names = getattr(module, "__all__", vars(module))
    return {
        name for name in names
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    }  # fmt: skip


PACKAGES = {  # where a user finds the names: the module that lists them
    "jax_paged": "jax_paged._start.public",
    "jax_paged.models": "jax_paged.models",
    "jax_paged.testing": "jax_paged.testing",
    "jax_paged.models.structured": "jax_paged.models.serving.structured",
    "jax_paged.transfer": "jax_paged.cache.transfer",
    "jax_paged.compat.jax": "jax_paged.compat.jax",
    "jax_paged.compat.tokamax": "jax_paged.compat.tokamax",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_each_public_name_once(package):
    names = public_names(importlib.import_module(PACKAGES[package]))
    written = [x.rpartition(".")[2] for x in DIRECTIVES if x.rpartition(".")[0] == package]
    assert sorted(set(written) - {"transfer"}) == sorted(names)
    assert len(written) == len(set(written))


def test_the_nav_of_the_site_has_each_page():
    nav = (ROOT / "docs" / "site" / "mkdocs.yml").read_text("utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in nav] == []
