# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in the decoder: many at once, each row as its merged model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import make_adapter

from jax_paged.models import (
    Adapter,
    Decoder,
    Stepper,
    generate,
    merge_adapter,
    split_model,
    token_logits,
    with_adapter,
)
from jax_paged.models.decoder.adapters import (
    AdaptedModel,
    Adapters,
    LowRank,
    put_adapter,
)
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.batch import generate_many
from jax_paged.models.testing import small_config

# f32 sums of the same terms in another order: W x + b (a x) in place of (W + b a) x. Logits are of
# size 1 to 5 and have errors of some 1e-6.
ATOL = 2e-5
CONFIG = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]


def adapted(model, adapters, slots, max_rank=8):
    """The model with these adapters in slots 0, 1, …, and a slot for each row."""
    stack = Adapters.create(
        model.config, max_adapters=len(adapters), max_rank=max_rank, dtype=model.dtype
    )
    for slot, adapter in enumerate(adapters):
        stack = put_adapter(stack, np.int32(slot), stack.packed(adapter))
    return AdaptedModel(model, stack, jnp.asarray(slots, jnp.int32))


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def test_64_adapters_in_one_batch_give_what_their_merged_models_give(model):
    """Each row has its own: chunks of some tokens, then decode steps of one."""
    count = 64
    adapters = [make_adapter(CONFIG, seed, rank=1 + seed % 8) for seed in range(count)]
    slots = np.random.default_rng(3).permutation(count)
    stepper = Stepper(adapted(model, adapters, slots), max_seqs=count, pages_per_seq=2)
    texts = {row: [(row + 5 * i) % 64 for i in range(2 + row % 3)] for row in range(count)}
    first = stepper.step(texts, padded_to=256)
    second = stepper.step({row: [row] for row in range(count)})
    merged = None
    for row in range(0, count, 5):  # a merged model each
        merged = merge_adapter(model, adapters[slots[row]])
        expected = token_logits(merged, [*texts[row], row])
        got = np.concatenate([first[row], second[row]])
        np.testing.assert_allclose(got, expected, atol=ATOL)
    assert np.abs(token_logits(merged, [1, 2]) - token_logits(model, [1, 2])).max() > 0.1


@pytest.mark.parametrize("modules", [["q_proj"], ["k_proj", "down_proj"], ["v_proj", "up_proj"]])
def test_modules_without_an_adapter_add_nothing(model, modules):
    adapter = make_adapter(CONFIG, 1, modules=modules)
    text = list(range(30))
    got = token_logits(with_adapter(model, adapter), text)
    np.testing.assert_allclose(got, token_logits(merge_adapter(model, adapter), text), atol=ATOL)
    assert np.abs(got - token_logits(model, text)).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_rows_without_an_adapter_have_the_bits_of_the_model(dtype, weight_dtype):
    source = random_source(CONFIG, seed=1, dtype=jnp.dtype(dtype))
    model = Decoder(CONFIG, source, weight_dtype=weight_dtype)
    adapters = [make_adapter(CONFIG, seed) for seed in range(2)]
    steppers = [Stepper(m) for m in (model, adapted(model, adapters, [-1, 1, 0, -1]))]
    texts = {0: [1, 2, 3], 1: [4, 5], 2: [6], 3: list(range(9))}
    for fed in (texts, {row: [8] for row in range(4)}):
        plain, mixed = (stepper.step(fed, padded_to=16) for stepper in steppers)
        for row in (0, 3):
            np.testing.assert_array_equal(mixed[row], plain[row])
        for row in (1, 2):
            assert np.abs(mixed[row] - plain[row]).max() > 0.05


@pytest.mark.parametrize("weight_dtype", ["int8", "fp8"])
def test_8_bit_weights_stay_and_the_adapter_is_not_quantized(weight_dtype):
    """As the 8-bit weights in f32, merged."""
    quantized = Decoder(CONFIG, random_source(CONFIG, seed=1), weight_dtype=weight_dtype)
    adapter = make_adapter(CONFIG, 2)
    meant = Decoder(CONFIG, random_source(CONFIG, seed=1))
    for layer, codes in zip(meant.layers, quantized.layers, strict=True):
        for part in ("attention", "mlp"):
            ours, theirs = getattr(layer, part), getattr(codes, part)
            for name in ("qkv", "out") if part == "attention" else ("gate_up", "down"):
                scale = getattr(theirs, name + "_scale")[...][:, None]
                value = getattr(theirs, name)[...].astype(jnp.float32) * scale
                getattr(ours, name)[...] = value
    head = quantized.head[...].astype(jnp.float32) * quantized.head_scale[...][:, None]
    meant.head[...] = head
    got = token_logits(with_adapter(quantized, adapter), list(range(20)))
    np.testing.assert_allclose(
        got, token_logits(merge_adapter(meant, adapter), range(20)), atol=1e-4
    )
    with pytest.raises(ValueError, match=r"^model: expected weights that are not quantized, got"):
        merge_adapter(quantized, adapter)


@pytest.mark.deep
def test_generate_runs_with_an_adapter(model):
    adapter = make_adapter(CONFIG, 4)
    options = {"max_new_tokens": 8, "temperature": 0.7, "seed": 5}
    expected = generate(merge_adapter(model, adapter), PROMPTS, **options).tokens
    assert generate(model, PROMPTS, adapter=adapter, **options).tokens == expected
    assert generate_many(model, PROMPTS, adapter=adapter, **options).tokens == expected


def test_an_adapter_of_experts_layers_is_that_of_their_attention():
    config = small_config("qwen3_moe")
    model = Decoder(config, random_source(config))
    adapter = make_adapter(config, 1)
    assert set(adapter.layers[0]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    got = token_logits(with_adapter(model, adapter), range(20))
    np.testing.assert_allclose(
        got, token_logits(merge_adapter(model, adapter), range(20)), atol=ATOL
    )
    wrong = dataclasses.replace(
        adapter, layers=({**adapter.layers[0], "up_proj": LowRank(*np.ones((2, 8, 8)))}, {})
    )
    with pytest.raises(ValueError, match=r"^adapter.layers\[0\]\['up_proj'\]: expected modules q_"):
        with_adapter(model, wrong)


def test_wrong_adapters_are_named(model):
    adapter = make_adapter(CONFIG, 1, rank=4)
    one = adapter.layers[0]
    for layers, text in [
        (adapter.layers[:1], r"adapter.layers: expected 2 layers, got 1"),
        (({**one, "q_proj": LowRank(one["q_proj"].a, one["q_proj"].b.T)}, {}), r".*expected a \["),
        (({"o_proj": LowRank(np.ones((65, 32)), np.ones((32, 65)))}, {}), r".*a rank from 1 to 64"),
        (({"lm_head": one["q_proj"]}, {}), r".*expected modules q_proj, .*, got 'lm_head'"),
    ]:
        for call in (with_adapter, merge_adapter):
            with pytest.raises(ValueError, match=text):
                call(model, Adapter(layers))
    with pytest.raises(ValueError, match=r"^adapter: expected an Adapter .*, got a dict"):
        generate(model, [[1]], max_new_tokens=1, adapter={})
    with pytest.raises(ValueError, match=r"^model: expected a Decoder without adapters"):
        with_adapter(with_adapter(model, adapter), adapter)
    stack = Adapters.create(CONFIG, max_adapters=2, max_rank=8, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"^adapter: expected a rank of at most max_rank=8, got 9"):
        stack.packed(make_adapter(CONFIG, 1, rank=9))
    with pytest.raises(ValueError, match=r"^max_rank: expected an integer from 1 to 64, got 65"):
        Adapters.create(CONFIG, max_adapters=2, max_rank=65, dtype=jnp.float32)


def test_a_slot_is_written_in_place_and_the_program_stays(model):
    adapters = [make_adapter(CONFIG, seed) for seed in range(3)]
    both = adapted(model, adapters[:2], [0, 1])
    graph, params = split_model(both)
    assert hash(graph) == hash(split_model(adapted(model, adapters[1:], [0, 1]))[0])
    stack = both.adapters
    where = stack.layers[0]["qkv"].a.unsafe_buffer_pointer()
    sizes = put_adapter._cache_size()
    swapped = put_adapter(stack, np.int32(1), stack.packed(adapters[2]))
    assert swapped.layers[0]["qkv"].a.unsafe_buffer_pointer() == where
    assert put_adapter._cache_size() == sizes
    assert jax.tree.structure(swapped) == jax.tree.structure(params.adapters)
    got = Stepper(dataclasses.replace(both, adapters=swapped), max_seqs=2).step({0: [1], 1: [1]})
    for row, seed in enumerate((0, 2)):
        expected = token_logits(merge_adapter(model, adapters[seed]), [1])
        np.testing.assert_allclose(got[row], expected, atol=ATOL)
