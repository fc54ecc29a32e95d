# SPDX-License-Identifier: Apache-2.0
"""Programs over several devices: meshes, what is put on them, what XLA made of it. Not a test.

The number of devices is fixed when JAX starts. So a test file of such programs is a script, too,
which runs those that its arguments name; `check_in_a_process` starts it.
"""

import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from children import on_devices
from jax.sharding import AxisType, NamedSharding

TIMEOUT_S = 300


def make_mesh(shape, names=("dp", "tp"), axis_type=AxisType.Auto):
    """Of the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)


def place(mesh, operands, specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)]


KINDS = "all-gather|all-reduce|all-to-all|ragged-all-to-all|collective-permute|reduce-scatter"


def collectives(compiled) -> list[str]:
    return re.findall(rf" ({KINDS})(?:-start)?\(", compiled.as_text())


class Told(NamedTuple):
    """An array that a collective gives."""

    kind: str
    num_bytes: int
    loops: int  # that it is in


def told(compiled) -> Counter[Told]:
    """What the collectives of a program give, without those of one device alone (XLA:CPU)."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in compiled.as_text().splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            name = match[2]
            bodies[name], entry = [], name if match[1] else entry
        elif name:
            bodies[name].append(line)
    found: Counter[Told] = Counter()

    def visit(name: str, loops: int) -> None:
        for line in bodies[name]:
            inside = loops + (" while(" in line)
            for called in re.findall(r"[\w.-]+", line.partition("), ")[2]):
                if called in bodies:
                    visit(called, inside)
            match = re.search(rf" = (\(.*?\)|\S+) ({KINDS})(?:-done)?\(", line)
            if is_of_one_device(line):
                continue
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]) if match else ():
                size = math.prod(map(int, filter(None, shape.split(","))))
                bits = int(re.search(r"\d+", dtype)[0]) if dtype != "pred" else 8
                found[Told(match[2], size * bits // 8, loops)] += 1

    visit(entry, 0)
    return found


def is_of_one_device(line: str) -> bool:
    """Whether the groups of a collective have a device each."""
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):  # jax 0.12
        sizes = dict(re.findall(r"('\w+')=(\d+)", match[1]))
        return all(sizes[name] == "1" for name in re.findall(r"'\w+'", match[2]))
    return re.search(r"replica_groups=(\{\{\d+\}|\[\d+,1\])", line) is not None


def targets(compiled) -> list[str]:
    """Our custom calls."""
    return re.findall(r'custom_call_target="(jax_paged\.[^"]+)"', compiled.as_text())


def assert_same(results, expected):
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def check_in_a_process(file: str, *programs: str, devices: int) -> None:
    child = subprocess.run(
        [sys.executable, "-W", "error", file, *programs],
        env=on_devices(devices),
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]


def run_chosen(programs: Mapping[str, Callable[[], None]], devices: int) -> None:
    """What such a script does when it is started."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == devices
    for name in sys.argv[1:]:
        programs[name]()
        print("passed", name)
