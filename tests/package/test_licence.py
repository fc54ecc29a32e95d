# SPDX-License-Identifier: Apache-2.0
"""Every source file names its licence, which is that of the package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ["jax_paged", "models", "ffi", "benchmarks", "tests", ".ci", "docs", "examples"]
SOURCES = {".py", ".sh", ".cmake", ".c", ".cc", ".cu", ".cuh", ".h"}


def test_every_source_names_the_licence_of_the_package():
    licence = re.search(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    line = f"SPDX-License-Identifier: {licence[1]}"
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    sources = [path for path in files if path.suffix in SOURCES and path.is_file()]
    assert len(sources) > 400
    assert [path for path in sources if line not in path.read_text("utf-8")[:200]] == []
