# SPDX-License-Identifier: Apache-2.0
"""A decoder whose projections are packed: the same bits, and the same uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import make_adapter
from flax import nnx

from jax_paged import PackedWeight, pack_weight
from jax_paged.models import Decoder, token_logits
from jax_paged.models.decoder.adapters import with_adapter
from jax_paged.models.decoder.merge_adapter import merge_adapter
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.decoder.protocol import split_model
from jax_paged.models.serving.batch import generate_many
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import small_config

SIZES = {"num_pages": 40, "max_seqs": 4, "page_size": 4, "max_tokens": 32}
TIED = small_config("llama", vocab_size=64, head_dim=8, tie_word_embeddings=True)
EXPERTS = small_config("qwen3_moe", vocab_size=64, head_dim=8, moe_intermediate_size=32)
TEXT = list(range(30))


def decoders(config, dtype=jnp.float32, seed=1, **options):
    return [
        Decoder(config, random_source(config, seed=seed, dtype=dtype), pack=pack, **options)
        for pack in (False, True)
    ]


def count_packed(model):
    leaves = jax.tree.leaves(nnx.state(model), is_leaf=lambda x: isinstance(x, PackedWeight))
    return sum(isinstance(x, PackedWeight) for x in leaves)


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
@pytest.mark.parametrize("config", [TIED, EXPERTS], ids=["tied", "experts"])
def test_logits_are_the_same(config, weight_dtype):
    plain, packed = decoders(config, weight_dtype=weight_dtype)
    small = pack_weight(jnp.zeros((16, 8), weight_dtype or "float32"), platform="cpu")
    has_kernel = isinstance(small, PackedWeight)  # not of 8 bits with avx512bf16
    assert (count_packed(packed) > 0) == (has_kernel or config is EXPERTS)  # whose router is f32
    assert count_packed(plain) == 0
    np.testing.assert_array_equal(token_logits(packed, TEXT), token_logits(plain, TEXT))


@pytest.mark.deep
def test_bf16_generates_the_same():
    of_both = []
    for model in decoders(TIED, jnp.bfloat16):
        of_both.append(generate_many(model, [TEXT, [3]], max_new_tokens=6).tokens)
    assert [list(x) for x in of_both[0]] == [list(x) for x in of_both[1]]


def test_adapters_are_added_and_merged_alike():
    adapter = make_adapter(TIED, 1)
    plain, packed = decoders(TIED)
    for change in (with_adapter, merge_adapter):
        own = change(packed, adapter)
        np.testing.assert_array_equal(
            token_logits(own, TEXT), token_logits(change(plain, adapter), TEXT)
        )
    assert count_packed(own) == count_packed(packed)


def test_shapes_are_those_of_the_weights():
    packed = decoders(TIED)[1]
    shapes = Decoder(TIED, abstract_source(TIED), pack=True)
    (graph, of_shapes), (same, params) = map(split_model, (shapes, packed))
    assert graph == same
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (of_shapes, params)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("config", [TIED, EXPERTS], ids=["tied", "experts"])
def test_new_weights_may_be_plain(config):
    engine = Engine(decoders(config)[1], **SIZES)
    for seed, of in ((2, split_model), (3, lambda model: (None, model))):
        plain, packed = decoders(config, seed=seed)
        expected = Engine(packed, **SIZES)
        engine.update_weights(of(plain)[1])
        requests = [e.submit(TEXT, max_new_tokens=5) for e in (engine, expected)]
        engine.run(), expected.run()
        assert requests[0].tokens == requests[1].tokens
    _, params = split_model(decoders(config)[0])
    wrong = jax.tree.map(lambda x: x[..., :-1], params)
    with pytest.raises(ValueError, match="weights at"):
        engine.update_weights(wrong)


def test_a_packed_model_over_a_mesh_is_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    with pytest.raises(ValueError, match="pack: expected False"):
        Decoder(TIED, random_source(TIED), mesh=mesh, pack=True)
