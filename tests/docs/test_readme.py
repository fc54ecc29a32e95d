# SPDX-License-Identifier: Apache-2.0
"""The README's command blocks are where CI looks for them, and it stays short."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_command_block_is_one_line_that_ci_can_extract(heading):
    script = ROOT / ".ci" / "readme_block.py"
    run = subprocess.run([sys.executable, script, README, heading], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.strip().splitlines()) == 1
    assert run.stdout.startswith("python3 -m venv")


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130
