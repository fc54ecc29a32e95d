# SPDX-License-Identifier: Apache-2.0
"""The modules of the package, found as files.

Not by pkgutil: where the install is editable it finds the package within itself.
"""

import os
from pathlib import Path

import jax_paged

PACKAGE = Path(jax_paged.__file__).parent


def _name(path: Path) -> str:
    parts = ("jax_paged", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    _name(path): path
    for path in sorted(
        Path(folder) / name
        for folder, _, names in os.walk(PACKAGE, followlinks=True)  # models, in a checkout
        for name in names
        if name.endswith(".py")
    )
}
