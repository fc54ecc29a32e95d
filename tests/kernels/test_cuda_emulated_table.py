# SPDX-License-Identifier: Apache-2.0
"""The table of all pairs of options (test_attention_options.py) on the emulated CUDA kernels.

The rows that cover all pairs, 400 rows (deep), or all with JAX_PAGED_LONG=1. Launches, orders of
CTAs and warps and cp.async timing differ from row to row, pools and padding are NaN, the race
checker is on.
"""

import pytest
from emulation import Device, emulate
from option_table import LONG, NUM_CASES, num_covering, table
from tiers import first_of

from jax_paged.testing import assert_attention_close, dense_oracle
from jax_paged.testing.options import attention_case, scale_of_layer

NUM_EMULATED = NUM_CASES if LONG else 400


@pytest.mark.parametrize("index", first_of(range(NUM_EMULATED), num_covering()))
def test_pairs_of_options_match_float64(index):
    stored, real, options, more = attention_case(table()[index], index)
    more = {k: scale_of_layer(stored, x) if k.endswith("scale") else x for k, x in more.items()}
    device = Device(num_workers=1 + index % 7, stages=2 + index % 3, seed=index)
    out, lse = emulate(stored, device, **options, **more)
    assert_attention_close(out, lse, *dense_oracle(real, **options))
