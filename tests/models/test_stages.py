# SPDX-License-Identifier: Apache-2.0
"""Models whose layers lie on pipeline stages: what they give on one device, in tokens the same.

This file is a script, too (`meshes`).
"""

import re

import jax
import numpy as np
import pytest
from meshes import check_in_a_process, run_chosen
from served_engines import CONFIGS, PROMPTS, both

from jax_paged.models import Decoder, create_state, generate, make_mesh, score, split_model
from jax_paged.models.decoder.adapters import Adapters
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.testing import small_config

DEVICES = 4
# The layers of each are not a multiple of its stages: those of zeros are among what is tested.
EXPERTS = small_config(num_experts=8, vocab_size=96, num_hidden_layers=5)
DENSE = small_config("qwen2", intermediate_size=64, vocab_size=64, num_hidden_layers=7)


def answers_are_the_same():
    for config, sizes in ((EXPERTS, {"pp": 2, "tp": 2}), (DENSE, {"pp": 4})):
        one, many = both(config, sizes=sizes)
        for sampling in ({}, {"temperature": 0.8, "seed": 5}):
            want, got = (
                generate(model, PROMPTS, max_new_tokens=12, **sampling) for model in (one, many)
            )
            assert got.tokens == want.tokens
        want, got = (score(model, PROMPTS[2]) for model in (one, many))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def eight_bits_and_replicas_give_the_same():
    """Weights and pages of int8, two stages of two replicas."""
    one, many = both(EXPERTS, sizes={"pp": 2, "tp": 1}, weight_dtype="int8")
    assert dict(many.partition.mesh.shape) == {"pp": 2, "dp": 2, "tp": 1}
    asked = {"max_new_tokens": 12, "kv_dtype": "int8"}
    assert generate(many, PROMPTS, **asked).tokens == generate(one, PROMPTS, **asked).tokens


def a_device_holds_its_stage_alone():
    one, many = both(DENSE, sizes={"pp": 4})
    assert len(many.layers) == 2
    for slot, layer in enumerate(many.layers):
        for name in ("gate_up", "down"):
            shards = getattr(layer.mlp, name)[...].addressable_shards
            for stage, shard in enumerate(shards):
                number = 2 * stage + slot
                own = np.asarray(shard.data)
                if number < DENSE.num_layers:
                    want = getattr(one.layers[number].mlp, name)[...]
                    np.testing.assert_array_equal(own, want)
                else:
                    assert not own.any()
    state = create_state(many, num_pages=6, max_seqs=2, pages_per_seq=3)
    for pool in (state.k_pages, state.v_pages):
        shapes = {shard.data.shape for shard in pool.addressable_shards}
        assert shapes == {(2, 6, 2, 16, 16)}  # of 8 layers


def shapes_are_those_of_the_model():
    for dtype in (None, "int8"):
        mesh = make_mesh(EXPERTS, pp=2)
        made, shapes = (
            Decoder(EXPERTS, source(EXPERTS), weight_dtype=dtype, mesh=mesh)
            for source in (random_source, abstract_source)
        )
        leaves = (jax.tree.leaves(split_model(model)[1]) for model in (made, shapes))
        for x, like in zip(*leaves, strict=True):
            assert (x.shape, x.dtype) == (like.shape, like.dtype)
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def what_has_no_stages_is_refused():
    mixed = small_config(
        num_hidden_layers=4, mlp_only_layers=[0], num_experts=8, intermediate_size=64
    )
    for config, options, message in (
        (DENSE, {"pp": 3}, "pp: expected a divisor of the 4 devices, got 3"),
        (CONFIGS["dense"], {"pp": 4}, "pp: expected layers for each stage, of 2, got 4"),
        (mixed, {"pp": 2}, "pp: expected stages whose layers have experts and windows alike, as "
         "layer 0, got 2, with another layer 2"),
        (DENSE, {"pp": 2, "tp": 4}, "tp: expected a divisor of the 2 devices, got 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            make_mesh(config, **options)
    _, many = both(DENSE, sizes={"pp": 4})
    message = "adapter: expected none for a model in pipeline stages, got pp=4"
    with pytest.raises(ValueError, match=message):
        Adapters.create(
            DENSE, max_adapters=1, max_rank=8, dtype=many.dtype, partition=many.partition
        )


PROGRAMS = {
    program.__name__: program
    for program in (
        answers_are_the_same, eight_bits_and_replicas_give_the_same,
        a_device_holds_its_stage_alone, shapes_are_those_of_the_model,
        what_has_no_stages_is_refused,
    )
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.every
def test_on_four_devices(program):
    check_in_a_process(__file__, program, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
