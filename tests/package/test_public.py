# SPDX-License-Identifier: Apache-2.0
"""What a user finds under jax_paged and jax_paged.models, and what must not hide there."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_paged
import jax_paged.models


@pytest.mark.parametrize("package", [jax_paged, jax_paged.models])
def test_no_name_hides_a_module(package):
    hidden = {
        info.name for info in pkgutil.iter_modules(package.__path__)
        if not info.name.startswith("_") and info.name in vars(package)
        and vars(package)[info.name] is not sys.modules.get(f"{package.__name__}.{info.name}")
    }  # fmt: skip
    assert hidden == set()


def test_the_version_is_that_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert jax_paged.__version__ == re.search(r'^version = "(.*)"$', text, re.M)[1]


def test_testing_is_there_after_import_jax_paged():
    code = "import jax_paged as jp; print(jp.testing.is_in_place.__name__)"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "is_in_place\n"), run.stderr
    with pytest.raises(AttributeError, match=r"^module 'jax_paged' has no attribute 'tasting'$"):
        jax_paged.tasting  # noqa: B018


PROGRAMS = {  # what is started by `python -m package` → whether all names are there at once
    "import jax_paged": True,  # somebody's own package: its import registers the FFI targets
    "import sys; sys.argv[0] = '/bin/jax-paged'; import jax_paged": False,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_the_command_imports_the_names_when_they_are_used(program, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text(program)
    (package / "__main__.py").write_text(
        "import jax_paged; print('paged_attention' in vars(jax_paged)); "
        "print(jax_paged.paged_attention.__name__, jax_paged.transfer.__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-m", "package"], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.stdout.split() == [
        str(PROGRAMS[program]),
        "paged_attention",
        "jax_paged.cache.transfer",
    ]


def test_models_have_what_serving_takes():
    names = {"Decoder", "Engine", "Request", "Stepper", "create_state", "evaluate", "generate",
             "load_checkpoint", "score", "TextStream"}  # fmt: skip
    assert names <= vars(jax_paged.models).keys()
    generation = importlib.import_module("jax_paged.models.decoder.generation")
    assert jax_paged.models.decoder.generation is generation
