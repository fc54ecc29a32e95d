# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, as tests start them. Not a test."""

import contextlib
import socket
import subprocess
import sys

from children import child, on_devices

KEY = "the key of these tests"
SECONDS = 240


@contextlib.contextmanager
def started(command, count, devices, variables=lambda index: {}):
    """Processes of one job, of a command that gets host and port and the number of each."""
    with socket.create_server(("localhost", 0)) as free:
        where = f"localhost:{free.getsockname()[1]}"
    environment = on_devices(devices) | {"JAX_PAGED_KEY": KEY}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(count):
            one = [sys.executable, *command(where, index)]
            own = environment | variables(index)
            processes.append(stack.enter_context(child(one, env=own, seconds=SECONDS, **pipes)))
        yield processes


def run_all(processes):
    """What they print, once all have ended well."""
    said = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(codes), "\n".join(error for _, error in said)[-6000:]
    return [out for out, _ in said]
