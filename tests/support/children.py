# SPDX-License-Identifier: Apache-2.0
"""The environment of processes that tests start. Not a test."""

import os
from pathlib import Path


def on_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices, this run's XLA flags, this folder."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
