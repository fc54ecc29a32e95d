"""The environment of processes that tests start. Not a test."""

import os


def on_devices(count: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices, and with the XLA flags of this run."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
