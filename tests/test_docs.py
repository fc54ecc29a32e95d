"""The examples in docs/ run as printed, and print what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    "name", [path.name for path in sorted(DOCS.glob("*.md")) if "```python" in path.read_text()]
)
def test_examples_run(name, tmp_path):
    text = (DOCS / name).read_text(encoding="utf-8")
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", text, re.S)):
        script = tmp_path / f"example{number}.py"
        script.write_text(example, encoding="utf-8")
        run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        expected = re.findall(r"^print\(.*?\)  # (.*)$", example, re.M)
        assert expected, "the example shows no output"
        assert run.stdout.splitlines() == expected


def test_serving_has_an_example():
    assert "```python" in (DOCS / "serving.md").read_text(encoding="utf-8")
