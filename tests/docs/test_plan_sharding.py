# SPDX-License-Identifier: Apache-2.0
"""The plan of docs/sharding.md: its weights are those of whole models, its tables are current."""

import math
from pathlib import Path

import jax
import pytest
from planned import SIZES, Plan, write

from jax_paged.models import Decoder, config_from_hf
from jax_paged.models.decoder.parameters import abstract_source
from jax_paged.models.decoder.protocol import split_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "tp", "dp", "weight_dtype"),
    [("qwen3_30b_a3b", 1, 1, None), ("qwen3_235b_a22b", 8, 1, "fp8"),
     ("qwen3_235b_a22b", 4, 2, None)],
)  # fmt: skip
def test_weights_are_those_of_the_whole_model(name, tp, dp, weight_dtype):
    config = config_from_hf(SIZES[name])
    plan = Plan(config, tp, dp, weight_dtype)
    source = abstract_source(config, "bfloat16")
    model = Decoder(config, source, weight_dtype=weight_dtype, mesh=plan.mesh)
    leaves = jax.tree.leaves(split_model(model)[1])
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    num_bytes, _ = plan.weights()
    assert num_bytes.total() == own


def test_the_tables_are_what_the_script_gives(tmp_path):
    (tmp_path / "docs").mkdir()
    path = tmp_path / "docs" / "sharding.md"
    path.write_bytes((ROOT / "docs" / "sharding.md").read_bytes())
    write(tmp_path)
    assert path.read_bytes() == (ROOT / "docs" / "sharding.md").read_bytes()
