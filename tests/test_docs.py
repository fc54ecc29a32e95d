"""The example in docs/serving.md runs as printed, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

SERVING = Path(__file__).parents[1] / "docs" / "serving.md"


def test_the_serving_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", SERVING.read_text(encoding="utf-8"), re.S)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (expected,) = re.findall(r"^print\(.*?\)  # (.*)$", example, re.M)
    assert run.stdout.splitlines() == [expected]
