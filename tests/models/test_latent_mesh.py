# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3 over several devices: tokens are those of one device.

This file is a script, too: programs over four devices.
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from fp8_folder import write_pair
from meshes import check_in_a_process, run_chosen
from served_engines import PROMPTS, assert_same, assert_same_answers, both, hand_over, serve
from tiers import first_of

from jax_paged.models import (
    Decoder,
    create_state,
    load_checkpoint,
    make_mesh,
    score,
    split_model,
)
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.testing import small_config

DEVICES = 4
WIDTHS = {"vocab_size": 96, "intermediate_size": 64, "moe_intermediate_size": 32}
CONFIGS = {kind: small_config(kind, **WIDTHS) for kind in ("deepseek_v2", "deepseek_v3")}
MESHES = ({"tp": 4}, {"tp": 2, "dp": 2}, {"dp": 4})
ASKED = {"max_new_tokens": 9, "temperature": 0.7, "seed": 1}


def models_give_the_same(kind):
    for sizes in MESHES:
        assert_same_answers(*both(CONFIGS[kind], sizes=sizes))


def eight_bit_weights_give_the_same():
    one, many = both(CONFIGS["deepseek_v3"], sizes={"tp": 2}, weight_dtype="int8")
    np.testing.assert_allclose(score(many, PROMPTS[2]), score(one, PROMPTS[2]), rtol=2e-4)


def stages_give_the_same():
    config = small_config("deepseek_v3", first_k_dense_replace=0, **WIDTHS)
    assert_same_answers(*both(config, sizes={"pp": 2, "tp": 2}))


def engines_give_the_same():
    """With swaps, drafts, prefix caches and log-probabilities; and what one prefills for others."""
    kinds = {"swap": {"kv_dtype": "auto", "logprobs": 1}, "look-up trees": {}, "window": {}}
    for sizes, (kind, options) in zip(MESHES, kinds.items(), strict=True):
        one, many = both(CONFIGS["deepseek_v3"], sizes=sizes)
        (own, want), (engine, got) = (serve(kind, model, None, **options) for model in (one, many))
        assert_same(got, want)
        assert {request.replica for request in got} == set(range(engine.num_replicas))
        if kind == "swap":
            tokens = hand_over(engine, own, PROMPTS[:3], **ASKED)
            assert tokens == [request.tokens for request in want[:3]]


def a_device_has_its_heads_and_all_rows():
    config = CONFIGS["deepseek_v3"]
    mesh = make_mesh(config, tp=2)
    model = Decoder(config, random_source(config), mesh=mesh)
    attention, heads = model.layers[1].attention, config.num_q_heads
    sizes = config.latent
    shapes = {
        "qkv_down": (sizes.q_rank + sizes.row_dim, config.hidden_size),
        "q_up": (heads // 2 * config.head_dim, sizes.q_rank),
        "k_up": (heads // 2, sizes.nope_dim, sizes.kv_rank),
        "v_up": (heads // 2, sizes.v_dim, sizes.kv_rank),
        "out": (config.hidden_size, heads // 2 * sizes.v_dim),
    }
    for name, shape in shapes.items():
        shards = getattr(attention, name)[...].addressable_shards
        assert {shard.data.shape for shard in shards} == {shape}, name
    state = create_state(model, num_pages=6, max_seqs=2, pages_per_seq=3)
    assert state.groups[0].k_pages.sharding.is_fully_replicated
    of_shapes = Decoder(config, abstract_source(config), mesh=mesh)
    leaves = (jax.tree.leaves(split_model(one)[1]) for one in (model, of_shapes))
    for x, like in zip(*leaves, strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert dict(make_mesh(config).shape) == {"dp": 4, "tp": 1}


def checkpoints_are_read_by_devices():
    """Also fp8 ones, whose blocks have scales; replicas split no block."""
    sizes = {
        "hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 40,
        "moe_intermediate_size": 128,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        paths = write_pair(Path(folder), "deepseek_v3", head_dim=8, **sizes)
        for path, tp in zip(paths, (1, 2), strict=True):
            one, config, _ = load_checkpoint(path, dtype="float32")
            many, _, _ = load_checkpoint(path, dtype="float32", mesh=make_mesh(config, tp=tp))
            np.testing.assert_allclose(
                score(many, PROMPTS[0]), score(one, PROMPTS[0]), rtol=2e-4, atol=2e-5
            )


PROGRAMS = {
    program.__name__: program
    for program in (
        a_device_has_its_heads_and_all_rows, eight_bit_weights_give_the_same, engines_give_the_same,
        stages_give_the_same, checkpoints_are_read_by_devices,
    )
}  # fmt: skip
PROGRAMS |= {kind: lambda kind=kind: models_give_the_same(kind) for kind in CONFIGS}


@pytest.mark.parametrize("program", first_of(PROGRAMS, 1))
def test_on_four_devices(program):
    check_in_a_process(__file__, program, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
