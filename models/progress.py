# SPDX-License-Identifier: Apache-2.0
"""A bar on stderr that says how far a long task is."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ._packages import needed


@contextlib.contextmanager
def progress_bar(
    total: int, what: str, unit: str, *, shown: bool = True
) -> Iterator[Callable[..., Any]]:
    """Shows a bar while the block runs, if stderr is a terminal; gives its update(count=1)."""
    if not (shown and sys.stderr.isatty()):
        yield lambda count=1: None
        return
    with needed("tqdm").tqdm(total=total, desc=what, unit=f" {unit}", leave=False) as bar:
        yield bar.update
