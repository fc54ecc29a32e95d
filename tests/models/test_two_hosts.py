# SPDX-License-Identifier: Apache-2.0
"""Two hosts: network namespaces with an address and a name each, and a cable between them.

Making these takes the rights of root and the command `ip`; without them the tests are skipped.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from children import child, on_devices
from jobs import KEY, SECONDS, run_all
from tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.deep
# As a host of its own has them: its name, and what names mean there.
AS_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path):
    """The beginning of a command on each host: 10.0.0.1 and 10.0.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making hosts needs root and the command ip")
    names = [f"jp{os.getpid()}{letter}" for letter in "ab"]
    commands = []
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(names, 1):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace: {error.stderr.strip()}")
            stack.callback(ip, "netns", "del", name)
            of_host = tmp_path / name
            of_host.write_text(f"127.0.0.1 localhost\n10.0.0.{number} {name}\n")
            begin = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c"]
            commands.append([*begin, AS_HOST, "sh", name, of_host])
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.0.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield commands


def run_on(hosts, commands):
    """What they print."""
    environment = on_devices(1) | {"JAX_PAGED_KEY": KEY}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        return run_all(
            [
                stack.enter_context(
                    child(
                        [*host, sys.executable, *command], env=environment, seconds=SECONDS, **pipes
                    )
                )
                for host, command in zip(hosts, commands, strict=False)
            ]
        )


def test_what_the_guide_shows_runs_on_two_hosts(hosts, tmp_path):
    """Its two commands, to the letter, print what one process prints."""
    folder = write_checkpoint(tmp_path)
    text = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8").replace("MODEL", str(folder))
    lines = re.findall(r'^jax-paged (generate "The paged" .*)$', text, re.M)
    assert len(lines) == 2
    run = ["-P", "-m", "jax_paged"]
    both = [[*run, *shlex.split(line), "--no-program-cache"] for line in lines]
    alone = [*run, "generate", "The paged", "--model", folder, "--no-program-cache"]
    (want,) = run_on(hosts[:1], [alone])
    assert want
    assert run_on(hosts, both) == [want, ""]
