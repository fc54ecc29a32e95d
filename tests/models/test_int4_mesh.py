# SPDX-License-Identifier: Apache-2.0
"""Models in 4 bits over several devices: what they give on one device.

This file is a script, too (`meshes`).
"""

import functools
import re
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import make, write
from meshes import check_in_a_process, run_chosen
from served_engines import assert_same_answers, both

from jax_paged.models import Decoder, Engine, load_checkpoint, make_mesh, split_model, token_logits
from jax_paged.models.checkpoint.weights import open_checkpoint
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.decoder.placement import is_int4
from jax_paged.models.testing import small_config

DEVICES = 4
# Each device gets whole panels of 16 outputs and whole groups of 32 of the depth.
WIDE = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 96,
}  # fmt: skip
OF_EXPERTS = {"moe_intermediate_size": 32}
DENSE = small_config("qwen3", num_hidden_layers=3, **WIDE)
EXPERTS = small_config(num_experts=8, num_hidden_layers=3, **WIDE, **OF_EXPERTS)


def mesh_of(config, **sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with tp=4 each KV head lies on two devices
        return make_mesh(config, **sizes)


def four_bits_of(model):
    leaves = jax.tree.leaves(split_model(model)[1], is_leaf=is_int4)
    return [x for x in leaves if is_int4(x)]


def rounded_weights_give_the_same():
    for config in (DENSE, EXPERTS):
        for sizes in ({"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}):
            mesh = mesh_of(config, **sizes)
            one, many = both(config, mesh=mesh, weight_dtype="int4")
            assert len(four_bits_of(one)) == 4 * config.num_layers
            assert_same_answers(one, many)
            made = four_bits_of(many)[0]
            shapes = Decoder(config, abstract_source(config), weight_dtype="int4", mesh=mesh)
            like = four_bits_of(shapes)[0]
            assert (made.codes.shape, made.scales.shape) == (like.codes.shape, like.scales.shape)
            assert made.codes.sharding.is_equivalent_to(like.codes.sharding, 3)


def a_device_holds_its_part_alone():
    mesh = make_mesh(DENSE, tp=2)
    model = Decoder(DENSE, random_source(DENSE), weight_dtype="int4", mesh=mesh)
    layer = split_model(model)[1]["layers"][0]
    for leaf in (layer["attention"]["qkv"], layer["mlp"]["down"]):
        for x in jax.tree.leaves(leaf):
            assert {shard.data.size for shard in x.addressable_shards} == {x.size // 2}


def stored(folder, architecture, layers, **changes):
    """A file whose first layer is in Q4_1 and whose last one in f32, with Q4_0 between them."""
    own = OF_EXPERTS if architecture == "qwen3moe" else {}
    _, metadata, tensors = make(architecture, num_hidden_layers=layers, **WIDE | own | changes)
    kinds = {}
    for name, value in tensors.items():
        number = re.match(r"blk\.(\d+)\.", name)
        if value.ndim >= 2 and number and "gate_inp" not in name and int(number[1]) < layers - 1:
            kinds[name] = Kind.Q4_0 if int(number[1]) else Kind.Q4_1
    path = Path(folder) / f"{architecture}.gguf"
    write(path, architecture, metadata, tensors, kinds)
    return path


def what_a_file_stores_stays_as_it_is():
    with tempfile.TemporaryDirectory() as folder:
        for architecture, layers in (("llama", 4), ("qwen3moe", 3)):
            path = stored(folder, architecture, layers)
            options = {"weight_dtype": "int4", "progress": False}
            one, *_ = load_checkpoint(path, **options)
            want = token_logits(one, list(range(30)))
            for sizes in ({"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}):
                mesh = functools.partial(mesh_of, **sizes)
                many, *_ = load_checkpoint(path, mesh=mesh, **options)
                assert_same_answers(one, many)
                got = token_logits(many, list(range(30)))
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
            checkpoint = open_checkpoint(path, mesh=make_mesh, weight_dtype="int4")
            shapes = [jax.tree.map(np.shape, x) for x in four_bits_of(checkpoint.shapes())]
            many, *_ = load_checkpoint(path, mesh=make_mesh, **options)
            assert shapes == [jax.tree.map(np.shape, x) for x in four_bits_of(many)]


def experts_move():
    mesh = make_mesh(EXPERTS)
    source = random_source(EXPERTS, seed=2)
    one = Decoder(EXPERTS, source, weight_dtype="int4")
    many = Decoder(EXPERTS, source, weight_dtype="int4", mesh=mesh, redundant_experts=4)
    sizes = {"num_pages": 24, "max_seqs": 4, "page_size": 4, "max_tokens": 16}
    tokens = []
    for model in (one, many):
        engine = Engine(model, **sizes)
        for _ in range(2):
            request = engine.submit(list(range(20)), max_new_tokens=8)
            engine.run()
            tokens.append(request.tokens)
            if model is many:
                engine.rebalance()
    assert tokens == [tokens[0]] * 4


def parts_of_groups_and_panels_are_refused():
    config = small_config("qwen3", **WIDE | {"intermediate_size": 64})
    text = "down_proj.weight: expected parts of multiples of 16 rows and 32 columns, for 4 bits"
    with pytest.raises(ValueError, match=re.escape(f"{text}, got 64 split as 16")):
        Decoder(config, random_source(config), weight_dtype="int4", mesh=mesh_of(config, tp=4))
    with tempfile.TemporaryDirectory() as folder:
        path = stored(folder, "llama", 2, head_dim=8, num_attention_heads=16)
        text = "q_proj.weight: expected heads and parts of multiples of 16 rows, for 4 bits"
        with pytest.raises(ValueError, match=text):
            load_checkpoint(path, mesh=make_mesh, weight_dtype="int4", progress=False)


PROGRAMS = {
    program.__name__: program
    for program in (
        a_device_holds_its_part_alone, parts_of_groups_and_panels_are_refused,
        what_a_file_stores_stays_as_it_is, rounded_weights_give_the_same, experts_move,
    )
}  # fmt: skip


def test_on_four_devices():
    check_in_a_process(__file__, *list(PROGRAMS)[:3], devices=DEVICES)


@pytest.mark.deep
@pytest.mark.parametrize("program", list(PROGRAMS)[3:])
def test_more_on_four_devices(program):
    check_in_a_process(__file__, program, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
