# SPDX-License-Identifier: Apache-2.0
"""What devices tell each other in compiled programs of models: what is planned, and no more.

benchmarks/plan_sharding.py plans it, from which docs/sharding.md has its figures. This file is a
script, too (`meshes`).
"""

import re
import sys
from collections import Counter

import numpy as np
import pytest
from meshes import check_in_a_process, run_chosen, told
from planned import Plan, planned
from tiers import first_of

from jax_paged.models import Decoder, Engine, create_state, generate, make_mesh, split_model
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode
from jax_paged.models.testing import small_config
from jax_paged.testing import is_in_place

CONFIG = small_config(
    num_experts=8, num_experts_per_tok=4, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=96,
)  # fmt: skip
# tp × dp. The largest step of each is exchanged in halves where there are several replicas.
MESHES = [(2, 2), (1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (2, 4), (1, 8)]
ROWS, LARGEST = 8, 128


def models(tp):
    source = random_source(CONFIG, seed=3)
    mesh = make_mesh(CONFIG, tp=tp)
    return Decoder(CONFIG, source), Decoder(CONFIG, source, mesh=mesh)


def addresses(*arrays):
    shards = (shard for x in arrays for shard in x.addressable_shards)
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


def steps_hold_what_is_planned(tp, dp):
    one, many = models(tp)
    engine = Engine(many, num_pages=160, max_seqs=ROWS, page_size=4, max_tokens=LARGEST)
    plan, steps = Plan(CONFIG, tp, dp, dtype="float32"), engine._runner.steps
    assert {size for size, _ in steps} >= {ROWS, LARGEST}
    for (size, _), step in steps.items():
        want = planned(plan, size, ROWS)
        assert told(step) == want, (size, told(step) - want, want - told(step))
    counts = [len(plan.collectives(size, ROWS)) for size in (ROWS, LARGEST)]
    assert (counts[1] > counts[0]) == (dp > 1), counts  # halves

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, n).tolist() for n in (140, 3, 60, 130, 9, 150, 20, 128)]
    options = {"max_new_tokens": 4, "temperature": 0.8, "seed": 7}
    state = engine.state
    before = addresses(state.k_pages, state.v_pages)
    requests = [engine.submit(x, draw_index=i, **options) for i, x in enumerate(prompts)]
    engine.run()
    assert addresses(engine.state.k_pages, engine.state.v_pages) == before
    assert [r.tokens for r in requests] == generate(one, prompts, **options).tokens


def only_the_loop_of_steps_has_collectives(tp, dp):
    """Those of a step of `generate`, whose replicas all have the same rows."""
    _, model = models(tp)
    state = create_state(model, num_pages=32, max_seqs=4, pages_per_seq=8)
    graph, params = split_model(model)
    rows, zeros = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
    progress = Progress(zeros, zeros, zeros)
    program = decode.lower(
        graph, params, state, progress, rows, zeros, zeros, Sampler.create(), np.int32(3), chunk=8
    ).compile()
    pool = state.k_pages.addressable_shards[0].data
    assert is_in_place(program, pool)
    found = Counter((one.kind, one.loops) for one in told(program).elements())
    kinds = {"all-reduce": 2 * CONFIG.num_layers + 1, "all-gather": 1}
    if tp == 1:  # the experts' alone
        kinds = {"all-reduce": CONFIG.num_layers}
    assert found == {(kind, 1): count for kind, count in kinds.items()}


def named(tp, dp):
    return f"{tp} x {dp}"


PROGRAMS = {
    f"{program.__name__} {named(*sizes)}": lambda program=program, sizes=sizes: program(*sizes)
    for program in (steps_hold_what_is_planned, only_the_loop_of_steps_has_collectives)
    for sizes in MESHES
}


@pytest.mark.parametrize(("tp", "dp"), first_of(MESHES, 1))
def test_steps_hold_what_is_planned_and_pools_stay_in_place(tp, dp):
    name = f"steps_hold_what_is_planned {named(tp, dp)}"
    check_in_a_process(__file__, name, devices=tp * dp)


@pytest.mark.parametrize(("tp", "dp"), first_of(MESHES, 1))
def test_only_the_loop_of_steps_has_collectives(tp, dp):
    name = f"only_the_loop_of_steps_has_collectives {named(tp, dp)}"
    check_in_a_process(__file__, name, devices=tp * dp)


if __name__ == "__main__":
    run_chosen(PROGRAMS, int(np.prod([int(x) for x in re.findall(r"\d+", sys.argv[1])])))
