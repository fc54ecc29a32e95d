# SPDX-License-Identifier: Apache-2.0
"""Tokens that go to the devices of their experts alone: the sums are those of all experts in one.

Each program below runs in a process of its own (this file as a script), because the number of
devices is fixed when JAX starts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import check_in_a_process, run_chosen
from tiers import first_of

from jax_paged import moe_experts
from jax_paged.models import Decoder, Engine, generate, make_mesh
from jax_paged.models.decoder import exchange, partition
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config

DEVICES, TOKENS, K, EXPERTS, HIDDEN, INNER = 8, 5, 3, 16, 32, 16


def routing(kind, rng):
    """[all tokens, K] experts, each of a token another one."""
    rows = [rng.permutation(EXPERTS)[:K] for _ in range(DEVICES * TOKENS)]
    experts = np.array(rows, np.int32)
    if kind == "all to one device":
        experts = np.tile(np.array([6, 7, -1], np.int32), (len(rows), 1))
    elif kind == "some of nobody":
        experts[rng.random(len(rows)) < 0.4] = -1
    elif kind == "nothing":
        experts[:] = -1
    return experts


def sums_are_equal():
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    gate_up = rng.standard_normal((EXPERTS, 2 * INNER, HIDDEN), np.float32) / 6
    down = rng.standard_normal((EXPERTS, HIDDEN, INNER), np.float32) / 4
    x = rng.standard_normal((DEVICES * TOKENS, HIDDEN), np.float32)
    weights = rng.random((DEVICES * TOKENS, K), np.float32)
    per = EXPERTS // DEVICES

    def local(x, gate_up, down, experts, weights):
        def run(*tokens):
            x, ids, weights = tokens
            told.append(x.shape)
            return moe_experts(x, gate_up, down, ids, weights, out_dtype=jnp.float32)

        first = jax.lax.axis_index("d").astype(jnp.int32) * jnp.int32(per)
        owners = jnp.where(experts >= 0, experts // per, -1)
        return exchange.exchanged(run, x, experts, weights, owners, first, "d")

    told = []
    split = P("d", None)
    many = jax.shard_map(
        local, mesh=mesh, in_specs=(split, P("d", None, None), P("d", None, None), split, split),
        out_specs=split, check_vma=False,
    )  # fmt: skip
    for kind in ("even", "all to one device", "some of nobody", "nothing"):
        experts = routing(kind, rng)
        want = moe_experts(x, gate_up, down, experts, weights, implementation="reference")
        got = jax.jit(many)(x, gate_up, down, experts, weights)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=kind)
    assert set(told) == {(DEVICES * TOKENS, HIDDEN)}  # room for all


def engines_give_the_same():
    """With 4 replicas of 2 devices, with 8 of one, and where only replicas split the experts."""
    partition.is_cheaper = lambda **sizes: True
    calls = []
    own = exchange.exchanged
    partition.exchanged = lambda *args: calls.append(args[-1]) or own(*args)
    rng = np.random.default_rng(1)
    for count, tp in ((8, 2), (8, 1), (4, 2)):
        config = small_config(num_experts=count, vocab_size=96)
        source = random_source(config, seed=2)
        prompts = [rng.integers(0, 96, n).tolist() for n in (1, 12, 5, 3, 20, 2, 7, 9)]
        options = {"max_new_tokens": 6, "temperature": 0.7, "seed": 3}
        want = generate(Decoder(config, source), prompts, **options).tokens
        mesh = make_mesh(config, tp=tp, dp=DEVICES // tp)
        engine = Engine(Decoder(config, source, mesh=mesh), num_pages=16, max_seqs=2, max_tokens=16)
        requests = [engine.submit(p, draw_index=i, **options) for i, p in enumerate(prompts)]
        engine.run()
        assert [request.tokens for request in requests] == want
        assert len({request.replica for request in requests}) > 1
    assert set(calls) == {"dp"}


@pytest.mark.parametrize(
    ("tp", "dp", "tokens", "expected"),
    [(1, 8, 10**6, False), (4, 2, 10**6, False), (1, 16, 10**6, False),  # one host, or nearly
     (4, 8, 8, False), (4, 8, 512, True), (1, 64, 8, False), (1, 64, 1024, True)],
)  # fmt: skip
def test_tokens_are_exchanged_where_that_spares_more_than_it_costs(tp, dp, tokens, expected):
    sizes = {"devices": tp * dp, "k": 8, "token_bytes": 3 * 8192}  # of Qwen3-235B-A22B in bf16
    assert exchange.is_cheaper(tp=tp, dp=dp, tokens=tokens, **sizes) == expected


PROGRAMS = {program.__name__: program for program in (sums_are_equal, engines_give_the_same)}


@pytest.mark.parametrize("name", first_of(PROGRAMS, 1))
def test_on_eight_devices(name):
    check_in_a_process(__file__, name, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS, DEVICES)
