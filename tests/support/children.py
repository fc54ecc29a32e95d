# SPDX-License-Identifier: Apache-2.0
"""Processes that tests start, and their environment. Not a test."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def child(
    command: Sequence[Any], *, seconds: float = 240, **options: Any
) -> Iterator[subprocess.Popen]:
    """A process that lives no longer than the block, whatever fails there, nor so many seconds."""
    with subprocess.Popen([*map(str, command)], **options) as process:
        watch = threading.Timer(seconds, process.kill)
        watch.start()
        try:
            yield process
        finally:
            watch.cancel()
            process.kill()


def on_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices, this run's XLA flags, this folder."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
