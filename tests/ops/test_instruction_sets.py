# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that this processor has beside the one in use, on tests of the ops."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_paged import build_info
from jax_paged.native.load import CPU_ISAS

FILES = ("attention_options", "int4", "linear", "moe", "packing")


@pytest.mark.deep
@pytest.mark.parametrize("isa", CPU_ISAS[:-1])
def test_ops(isa):
    in_use = build_info()["cpu"]["isa"]
    if CPU_ISAS.index(isa) >= CPU_ISAS.index(in_use):
        pytest.skip(f"{in_use} is in use")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *files],
        env=os.environ | {"JAX_PAGED_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
