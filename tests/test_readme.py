"""The README's example runs as printed, and its command blocks are where CI looks for them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples_run_one_after_the_other(tmp_path):
    examples = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(examples) == 2
    script = tmp_path / "example.py"
    script.write_text("\n".join(examples), encoding="utf-8")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | flags,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "(4, 64) [0 0 0 0] 12",
        "(4, 64) [0 0 0 0] (2, 64, 1, 16, 64)",
    ]


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_command_block_is_one_line_that_ci_can_extract(heading):
    script = ROOT / ".ci" / "readme_block.py"
    run = subprocess.run(
        [sys.executable, script, ROOT / "README.md", heading], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.strip().splitlines()) == 1
    assert run.stdout.startswith("python3 -m venv")


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
