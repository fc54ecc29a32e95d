# SPDX-License-Identifier: Apache-2.0
"""The examples of README and docs/ run as printed and print what they say, and all links hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}


def examples(page):
    """The Python examples of a page, which build on each other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", TEXTS[page], re.M | re.S))


def anchors(page):
    """What a link into a page may name: GitHub's form of its headings."""
    headings = re.findall(r"^#+ (.+)$", TEXTS[page], re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_and_all_guides_have_examples():
    pages = {page for page in TEXTS if examples(page)}
    guides = ("quick-start", "your-own-model", "state", "serving", "evaluating", "determinism",
              "sharding")  # fmt: skip
    assert pages >= {"README.md", *(f"docs/{guide}.md" for guide in guides)}


@pytest.mark.parametrize("page", [page for page in TEXTS if examples(page)])
def test_examples_of_a_page_run_one_after_the_other(page, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(examples(page), encoding="utf-8")
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    expected = re.findall(r"^print\(.*\)  # (.*)$", examples(page), re.M)
    assert expected, "an example prints what it made, and says what that is"
    assert run.stdout.splitlines() == expected


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^):]+)\)", TEXTS[page]):
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.resolve().relative_to(ROOT).as_posix()), link
