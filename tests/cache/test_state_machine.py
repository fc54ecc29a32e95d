# SPDX-License-Identifier: Apache-2.0
"""Random operations on a `KVState`, side by side with a plain Python model, contents included.

The machine is of `jax_paged.testing.stress.state`. 1,000 operations run by default, which are too
few to come by every outcome, and 10,000 in the deep tier. The long run has 200,000 and takes some
minutes on two cores:

    JAX_PAGED_LONG=1 pytest tests/cache/test_state_machine.py
"""

import os
import random
from collections import Counter

import pytest
from tiers import first_of

from jax_paged import Status
from jax_paged.testing.stress.state import PagesMachine, run_machine

IS_LONG = os.environ.get("JAX_PAGED_LONG") == "1"
SHORT = 1_000
NUM_OPERATIONS = [200_000] if IS_LONG else first_of([SHORT, 10_000], 1)


@pytest.mark.parametrize("num_operations", NUM_OPERATIONS)
def test_random_operations_agree_with_a_plain_model(num_operations):
    PagesMachine.operations = PagesMachine.copies = PagesMachine.moves = 0
    PagesMachine.slides = PagesMachine.moves_behind_gap = 0
    PagesMachine.outcomes = Counter()
    seed_number = random.randrange(2**32) if IS_LONG else None
    run_machine(PagesMachine, num_operations=num_operations, seed_number=seed_number)
    if num_operations == SHORT:
        assert PagesMachine.operations >= SHORT * 9 // 10
        return
    assert PagesMachine.operations >= num_operations
    seen = PagesMachine.outcomes
    common = {Status.OK, Status.BAD_ROW}
    reports = {
        "reserve": common | {Status.ROW_FULL, Status.POOL_FULL, Status.STALE_ROW},
        "step": common | {Status.ROW_FULL, Status.STALE_ROW, Status.UNCOMMITTED_TREE},
        "grow": common | {Status.ROW_FULL, Status.STALE_ROW, Status.UNCOMMITTED_TREE},
        "commit": common | {Status.STALE_ROW},
        "release": common | {Status.STALE_ROW},
        "fork": common | {Status.POOL_FULL, Status.STALE_ROW, Status.UNCOMMITTED_TREE},
        "truncate": common
        | {Status.POOL_FULL, Status.STALE_ROW, Status.UNCOMMITTED_TREE, Status.SLID_OUT},
        "set_window": common | {Status.STALE_ROW},
    }
    for verb, statuses in reports.items():
        assert {status for name, status in seen if name == verb} == statuses, (verb, seen)
    assert PagesMachine.copies >= num_operations // 500
    assert PagesMachine.moves >= num_operations // 500
    assert PagesMachine.slides >= num_operations // 200
    assert PagesMachine.moves_behind_gap >= num_operations // 2000
    assert all(seen[verb, Status.OK] >= num_operations // 50 for verb in reports), seen
