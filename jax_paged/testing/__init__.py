# SPDX-License-Identifier: Apache-2.0
"""Test data, oracles and checks of compiled programs, for this package's tests and for yours.

`python -m jax_paged.testing.stress` runs random cases of everything for as long as you like.
"""

from .cases import CASES as CASES
from .cases import WILD_PAGE as WILD_PAGE
from .cases import Batch as Batch
from .cases import Case as Case
from .cases import make_batch as make_batch
from .hlo import is_in_place as is_in_place
from .hlo import pool_sized_ops as pool_sized_ops
from .oracle import TOLERANCES as TOLERANCES
from .oracle import ancestors as ancestors
from .oracle import assert_attention_close as assert_attention_close
from .oracle import dense_oracle as dense_oracle
from .oracle import turned as turned
