# SPDX-License-Identifier: Apache-2.0
"""What the site needs beside the pages of docs/: the pages above it, and sources to read.

Links are written for readers of the repository. Those from docs/ to what lies outside become links
to the same page of the site, or plain text where it has no such page.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "build" / "site_packages" / "jax_paged"
OUTSIDE = {  # in the repository → on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_startup(command, dirty):
    """Lays out the package as it is installed, with links: models/ is jax_paged.models."""
    SOURCES.mkdir(parents=True, exist_ok=True)
    for link in SOURCES.iterdir():
        link.unlink()
    for source in [*(ROOT / "jax_paged").iterdir(), ROOT / "models"]:
        link = SOURCES / source.name
        if source.suffix in (".py", "") and not link.exists():
            link.symlink_to(source.resolve())


def on_files(files, config):
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown, page, config, files):
    places = {to: source for source, to in OUTSIDE.items()}
    here = PurePosixPath(places.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def follow(found):
        text, target, anchor = found.groups()
        parts = []
        for part in (here / target).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = "/".join(parts)
        inside = path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path)
        if inside is None:
            return text
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{inside}{anchor or ''})"

    return re.sub(r"\[([^\]\n]*)\]\(([^):#\s]+)(#[^)\s]*)?\)", follow, markdown)
