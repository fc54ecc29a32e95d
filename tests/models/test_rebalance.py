# SPDX-License-Identifier: Apache-2.0
"""Experts move between devices while an engine runs, and its tokens stay what they are.

Engines run in processes of their own (this file as a script), because the number of devices is
fixed when JAX starts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import check_in_a_process, run_chosen
from tiers import first_of

from jax_paged.models import Decoder, Engine, generate, make_mesh
from jax_paged.models.decoder import partition
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.placement import (
    as_places,
    as_slots,
    balanced_slots,
    chosen_slots,
    device_loads,
    first_slots,
)
from jax_paged.models.testing import small_config

DEVICES = 4


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_balanced(seed):
    rng = np.random.default_rng(seed)
    num_devices = int(rng.choice([1, 2, 4, 8]))
    num_experts = int(rng.integers(2, 30))
    num_slots = -(-(num_experts + rng.integers(0, 20)) // num_devices) * num_devices
    loads = rng.pareto(1.0, num_experts) * (rng.random(num_experts) < 0.8)
    slots = balanced_slots(loads, num_slots, num_devices)
    assert len(slots) == num_slots
    assert set(slots.tolist()) == set(range(num_experts))
    np.testing.assert_array_equal(as_slots(as_places(slots, num_experts), num_slots), slots)
    own = device_loads(loads, slots, num_devices)
    assert own.sum() == pytest.approx(loads.sum())
    first = device_loads(loads, first_slots(num_experts, num_slots), num_devices)
    # The largest share may be all that a device has; the rest is within one share of even.
    share = (loads / np.bincount(slots)).max()
    assert own.max() <= max(first.max(), loads.sum() / num_devices + share) * (1 + 1e-9)


def test_hot_experts_get_the_redundant_slots_on_other_devices():
    loads = np.ones(8)
    loads[5] = 100
    slots = balanced_slots(loads, 12, 4)
    assert np.bincount(slots).tolist() == [1, 1, 1, 1, 1, 5, 1, 1]
    assert all(5 in own for own in slots.reshape(4, 3))
    assert device_loads(loads, slots, 4).max() < 45


def test_tokens_are_spread_over_the_slots_of_their_experts():
    rng = np.random.default_rng(0)
    slots = np.array([0, 1, 2, 1, 1, 0], np.int32)
    x = jnp.asarray(rng.standard_normal((600, 4)), jnp.bfloat16)
    experts = jnp.asarray([rng.permutation(3)[:2] for _ in range(600)], jnp.int32)
    experts = experts.at[::7, 1].set(-1)
    chosen = np.asarray(chosen_slots(jnp.asarray(as_places(slots, 3)), x, experts))
    known = np.asarray(experts)
    assert (chosen[known < 0] == -1).all()
    np.testing.assert_array_equal(slots[chosen[known >= 0]], known[known >= 0])
    for expert, most in ((0, 0.62), (1, 0.45), (2, 1.0)):
        counts = np.bincount(chosen[known == expert])
        assert counts.max() <= most * counts.sum()
    alone = [chosen_slots(jnp.asarray(as_places(slots, 3)), x[i : i + 1], experts[i : i + 1])
             for i in range(5)]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(alone), chosen[:5])


def requests_of(engine, prompts, seed=3):
    options = {"max_new_tokens": 6, "temperature": 0.7, "seed": seed}
    requests = [engine.submit(p, draw_index=i, **options) for i, p in enumerate(prompts)]
    engine.run()
    return [request.tokens for request in requests]


class Case(NamedTuple):
    """Experts, redundant slots, tp, dtype of the weights, whether tokens are exchanged."""

    num_experts: int
    redundant: int
    tp: int
    weight_dtype: str | None = None
    exchanges: bool = False


CASES = {
    "exchanged tokens": Case(8, 4, 1, None, True),
    "experts that could not be split": Case(6, 2, 2),
    "8 bits, a slot each": Case(8, 0, 1, "int8"),
    "f32": Case(8, 4, 2),
}


def engine_rebalances(name):
    num_experts, redundant, tp, weight_dtype, exchanges = CASES[name]
    partition.is_cheaper = lambda **sizes: exchanges
    rng = np.random.default_rng(1)
    config = small_config(num_experts=num_experts, vocab_size=96)
    source = random_source(config, seed=2)
    few = {"weight_dtype": weight_dtype}
    prompts = [rng.integers(0, 96, n).tolist() for n in (1, 12, 5, 3, 20, 2)]
    one = Decoder(config, source, **few)
    options = {"max_new_tokens": 6, "temperature": 0.7, "seed": 3}
    want = generate(one, prompts, **options).tokens
    mesh = make_mesh(config, tp=tp)
    model = Decoder(config, source, mesh=mesh, redundant_experts=redundant, **few)
    engine = Engine(model, num_pages=24, max_seqs=3, max_tokens=16, prefix_cache=False)
    assert engine.rebalance() == (1.0, 1.0, 0)  # nothing to go by
    assert requests_of(engine, prompts) == want
    fed = engine.num_fed
    moved = engine.rebalance()
    assert 1 <= moved.after < moved.before
    assert moved.moved > 0
    assert counted(engine, prompts, want) == fed * config.experts_per_token
    again = engine.rebalance()
    assert again.before == pytest.approx(moved.after)
    assert again.moved == 0
    shapes = jax.tree.map(lambda x: (x.shape, x.sharding), model_params(model))
    assert shapes == jax.tree.map(lambda x: (x.shape, x.sharding), engine.params)
    del model
    other = random_source(config, seed=5)  # new weights lie as their own model has them
    engine.update_weights(Decoder(config, other, mesh=mesh, redundant_experts=redundant, **few))
    new = generate(Decoder(config, other, **few), prompts, **options).tokens
    assert requests_of(engine, prompts) == new


def counted(engine, prompts, want):
    """The loads of a layer after the same requests again."""
    assert requests_of(engine, prompts) == want
    loads = np.asarray(engine._runner.device.loads)
    assert (loads.sum(axis=-1) == loads[:, :1].sum(axis=-1)).all()  # in every layer
    return loads[:, 0].sum()


def model_params(model):
    from jax_paged.models.decoder.protocol import split_model

    return split_model(model)[1]


def what_cannot_be_is_refused():
    config = small_config(num_experts=8, vocab_size=96)
    source = random_source(config)
    mesh = make_mesh(config, tp=2)
    for bad, text in ((-1, "at least 0"), (1.5, "at least 0"), (1, "got 9 slots")):
        with pytest.raises(ValueError, match=f"redundant_experts: .*{text}"):
            Decoder(config, source, mesh=mesh, redundant_experts=bad)
    with pytest.raises(ValueError, match="redundant_experts: expected None"):
        Decoder(config, source, redundant_experts=0)
    engine = Engine(Decoder(config, source), num_pages=8, max_seqs=2, max_tokens=2)
    with pytest.raises(ValueError, match="redundant_experts"):
        engine.rebalance()


PROGRAMS = {name: functools.partial(engine_rebalances, name) for name in CASES}
PROGRAMS["refused"] = what_cannot_be_is_refused


@pytest.mark.every
@pytest.mark.parametrize("name", first_of(CASES, 1))
def test_an_engine_rebalances(name):
    check_in_a_process(__file__, name, devices=DEVICES)


def test_what_cannot_be_is_refused():
    check_in_a_process(__file__, "refused", devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
