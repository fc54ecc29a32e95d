# SPDX-License-Identifier: Apache-2.0
"""Models whose layers lie on pipeline stages: what they give on one device, in tokens the same.

This file is a script, too (`meshes`).
"""

import contextlib
import io
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from adapters import make_adapter
from fp8_folder import write_pair
from jax.sharding import PartitionSpec as P
from meshes import check_in_a_process, run_chosen, told
from served_engines import (
    CONFIGS,
    ENGINES,
    PROMPTS,
    SIZES,
    assert_same,
    assert_same_answers,
    both,
    hand_over,
    models_of,
    serve,
)
from tiers import first_of
from tiny_checkpoint import write_checkpoint

from jax_paged import KVState
from jax_paged.models import (
    Decoder,
    Engine,
    cli,
    create_state,
    generate,
    load_checkpoint,
    make_mesh,
    split_model,
    with_adapter,
)
from jax_paged.models.decoder import ring
from jax_paged.models.decoder.generation import compile_for
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.stages import micro_batches
from jax_paged.models.decoder.steps import Progress, Reason, admit, prefill
from jax_paged.models.testing import Stepper, small_config
from jax_paged.testing import is_in_place

DEVICES = 4
# The layers of each are not a multiple of its stages: those of zeros are among what is tested.
EXPERTS = small_config(num_experts=8, vocab_size=96, num_hidden_layers=5)
DENSE = small_config("qwen2", intermediate_size=64, vocab_size=64, num_hidden_layers=7)


def assert_same_tokens(config, sizes):
    assert_same_answers(*both(config, sizes=sizes))


def four_stages_give_the_same():
    assert_same_tokens(DENSE, {"pp": 4})


def two_stages_of_two_devices_give_the_same():
    assert_same_tokens(EXPERTS, {"pp": 2, "tp": 2})


def layers_of_two_kinds_give_the_same():
    """The last layer of the second stage is one of zeros, behind whose norms zeros stay."""
    for kind in ("gemma3_text", "gpt_oss"):
        config = small_config(kind, num_hidden_layers=3, vocab_size=96)
        assert_same_tokens(config, {"pp": 2, "tp": 2})


def two_stages_of_two_replicas_give_the_same():
    """With weights and pages of int8."""
    one, many = both(EXPERTS, sizes={"pp": 2, "tp": 1}, weight_dtype="int8")
    assert dict(many.partition.mesh.shape) == {"pp": 2, "dp": 2, "tp": 1}
    asked = {"max_new_tokens": 12, "kv_dtype": "int8"}
    assert generate(many, PROMPTS, **asked).tokens == generate(one, PROMPTS, **asked).tokens


def no_bit_changes_on_the_way():
    mesh, rng = make_mesh(DENSE, pp=4), np.random.default_rng(0)
    around = P("pp")
    for dtype, words in (("bfloat16", np.uint16), ("float16", np.uint16), ("float32", np.uint32)):
        bits = rng.integers(0, np.iinfo(words).max, (12, 33), words, endpoint=True)
        tokens = rng.integers(-1, 2**31 - 1, 12, np.int32)
        ends = np.repeat(rng.integers(0, 2**31 - 1, 4, np.int32), 3)

        def local(bits, tokens, ends, dtype=dtype, words=words):
            x = jax.lax.bitcast_convert_type(bits, dtype)
            x, tokens, end = ring._passed_on(x, tokens, ends[0], 4)
            assert x.dtype == dtype
            return jax.lax.bitcast_convert_type(x, words), tokens, end[None]

        passed = jax.shard_map(local, mesh=mesh, in_specs=around, out_specs=around, check_vma=False)
        got = jax.jit(passed)(bits, tokens, ends)
        for have, want, size in zip(got, (bits, tokens, ends[::3]), (3, 3, 1), strict=True):
            np.testing.assert_array_equal(have, np.roll(want, size, axis=0))


def long_prompts_pass_in_parts():
    """Rows begin and end within a part; then they go on, and one of them is new."""
    config = small_config("qwen2", num_hidden_layers=2, max_position_embeddings=2048)
    models = both(config, sizes={"pp": 2, "tp": 1})
    assert micro_batches(1024, 2) == 4
    rng = np.random.default_rng(1)
    steps = [
        {row: rng.integers(0, 90, n).tolist() for row, n in sizes.items()}
        for sizes in ({0: 500, 1: 2, 2: 300}, {2: 301, 3: 255, 0: 300})
    ]
    sizes = {"num_pages": 256, "max_seqs": 4, "pages_per_seq": 64}
    steppers = [Stepper(model, state=create_state(model, **sizes)) for model in models]
    for step in steps:
        want, got = (stepper.step(step, padded_to=1024) for stepper in steppers)
        for row in step:
            np.testing.assert_allclose(got[row], want[row], rtol=1e-4, atol=2e-5)
    prompts = [rng.integers(0, 90, n).tolist() for n in (900, 2, 500)]
    want, got = (generate(model, prompts, max_new_tokens=3) for model in models)
    assert got.tokens == want.tokens


def rows_stop_and_pages_run_out_alike():
    one, many = both(DENSE, sizes={"pp": 4})
    asked = {"max_new_tokens": 20, "temperature": 0.8, "seed": 5}
    asked["stop_tokens"] = [generate(one, PROMPTS, **asked).tokens[0][3]]
    results = {}
    for num_pages in (200, 25):
        for model in (one, many):
            sizes = {"num_pages": num_pages, "max_seqs": 8, "pages_per_seq": 15, "page_size": 4}
            result = generate(model, PROMPTS, state=create_state(model, **sizes), **asked)
            results[num_pages, model is many] = result.tokens, result.stop_reasons
            assert int(result.state.free_pages) == num_pages
            assert bool(result.state.is_empty)
        assert results[num_pages, True] == results[num_pages, False]
    assert {"stop_token", "length"} <= set(results[200, True][1])
    assert "pool_full" in results[25, True][1]


def around(model, count, num_steps, *, runs=True, stops=(-1,)):
    """(program, arguments) of a call of the ring for 16 rows that begin with a token each."""
    state = create_state(model, num_pages=32, max_seqs=16, pages_per_seq=2)
    graph, params = split_model(model)
    rows, zeros = np.arange(16, dtype=np.int32), np.zeros(16, np.int32)
    running = np.broadcast_to(runs, 16)
    table, _ = admit(state.table, np.where(running, rows, -1), np.ones(16, np.int32))
    reasons = np.where(running, Reason.RUNNING, Reason.LENGTH).astype(np.int32)
    call = (
        params, state.replace(table=table), Progress(rows, zeros, reasons), rows, zeros + 9,
        np.asarray(stops, np.int32), Sampler.create(), np.int32(num_steps),
    )  # fmt: skip
    static = {"chunk": 16, "micro_batches": count}
    return ring.decode.lower(graph, *call, **static).compile(), call


def stages_are_busy():
    """As the program counts: in N · M of N · M + pp − 1 ticks."""
    pp = 4
    model = Decoder(DENSE, random_source(DENSE), mesh=make_mesh(DENSE, pp=pp))

    def counted(count, num_steps, **options):
        program, call = around(model, count, num_steps, **options)
        *_, out, busy = program(*call)
        return np.asarray(out), int(busy.ticks), np.asarray(busy.worked)

    tokens = []
    for count, num_steps in ((pp, 7), (2 * pp, 4), (4 * pp, 2)):
        assert ring.fewest_steps(count, pp) == num_steps
        out, ticks, worked = counted(count, num_steps)
        assert ((out >= 0).sum(axis=1) == num_steps).all()
        events = num_steps * count
        assert (ticks, worked.tolist()) == (events + pp - 1, [events] * pp)
        assert (worked / ticks).min() >= 0.9
        tokens.append(out[:, :2].tolist())
    assert tokens[0] == tokens[1] == tokens[2]
    # Rows that run are spread, so that each micro-batch has one.
    out, ticks, worked = counted(pp, 3, runs=np.arange(16) % 4 == 1)
    assert ((out >= 0).any(axis=1) == (np.arange(16) % 4 == 1)).all()
    assert (ticks, worked.tolist()) == (3 * pp + pp - 1, [3 * pp] * pp)
    # It ends with the last row, when all stages have heard of it.
    out, ticks, worked = counted(pp, 7, stops=np.arange(DENSE.vocab_size))
    assert (out == -1).all()
    assert (ticks, worked.tolist()) == (pp + 2 * pp - 3, [pp] * pp)


def a_tick_has_one_transfer_and_pools_stay():
    """Beside it, what a stage of two devices tells each other, and at the end what was drawn."""
    of_layers, at_the_end = 2 * 3, {("all-reduce", 0): 5}
    for config, sizes, in_a_tick in (
        (DENSE, {"pp": 4}, {}),
        (EXPERTS, {"pp": 2, "tp": 2}, {"all-reduce": of_layers + 1, "all-gather": 1}),
    ):
        model = Decoder(config, random_source(config), mesh=make_mesh(config, **sizes))
        program, call = around(model, 8, 2)
        pool = call[1].k_pages.addressable_shards[0].data
        assert is_in_place(program, pool)
        want = {(kind, 1): count for kind, count in in_a_tick.items()}
        want |= {("collective-permute", 1): 1}
        assert Counter((x.kind, x.loops) for x in told(program).elements()) == want | at_the_end

        state = create_state(model, num_pages=32, max_seqs=16, pages_per_seq=2)
        tokens, counts = np.zeros(256, np.int32), np.full(16, 16, np.int32)
        graph, params = split_model(model)
        program = prefill.lower(graph, params, state, call[3], counts, tokens).compile()
        assert is_in_place(program, pool)
        want = {("collective-permute", 1): 1}
        if "tp" in sizes:
            want |= {("all-reduce", 1): of_layers, ("all-reduce", 0): 1}
        assert Counter((x.kind, x.loops) for x in told(program).elements()) == want


def a_device_holds_its_stage_alone():
    one, many = both(DENSE, sizes={"pp": 4})
    assert len(many.layers) == 2
    for slot, layer in enumerate(many.layers):
        for name in ("gate_up", "down"):
            for stage, shard in enumerate(getattr(layer.mlp, name)[...].addressable_shards):
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


def checkpoints_are_read_by_stages():
    """In fp8 with scales of blocks, which a layer of zeros has, too."""
    with tempfile.TemporaryDirectory() as folder:
        path, _ = write_pair(Path(folder), "qwen3", num_hidden_layers=3)
        one, many = (
            load_checkpoint(path, mesh=mesh)[0]
            for mesh in (None, lambda config: make_mesh(config, pp=2, dp=2))
        )
        asked = {"max_new_tokens": 8}
        assert generate(many, PROMPTS, **asked).tokens == generate(one, PROMPTS, **asked).tokens


def commands_take_stages():
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), num_hidden_layers=3)
        (text := Path(folder, "text.txt")).write_text("abba " * 30)
        options = ["--model", folder, "--no-program-cache", "--json"]
        generate = ["generate", "ab", "and a longer one", "--max-new-tokens", "24", *options]
        evaluate = ["eval", str(text), "--chunk", "16", *options]
        for command in (generate, evaluate):
            said = []
            for more in ([], ["--pp", "2"]):
                with (
                    contextlib.redirect_stdout(io.StringIO()) as out,
                    contextlib.redirect_stderr(io.StringIO()) as err,
                ):
                    assert cli.main([*command, *more]) == 0, err.getvalue()
                said.append([json.loads(line) for line in out.getvalue().splitlines()])
            if command is generate:
                assert said[0] == said[1]
                assert re.search(r"stages busy: 9\d %, 9\d %$", err.getvalue().replace("%", " %"))
                path = Path(folder, "out.jsonl")
                kept = ["--snapshot", str(Path(folder, "kept")), "--output", str(path)]
                with contextlib.redirect_stderr(io.StringIO()) as err:
                    assert cli.main([*command, "--pp", "2", *kept]) == 0, err.getvalue()
                assert [json.loads(line) for line in path.read_text().splitlines()] == said[0]
            else:
                np.testing.assert_allclose(said[1][0]["nll"], said[0][0]["nll"], rtol=1e-5)


def an_engine_gives_the_same(kind):
    """On two stages of two replicas."""
    (_, want), (_, got) = (serve(kind, *models) for models in models_of(kind, pp=2, tp=1))
    assert_same(got, want)
    assert {r.replica for r in got} == {0, 1}


def adapters_are_those_of_the_stages():
    """One for all rows, around the ring and in `score`; its last layers are those of no stage."""
    one, many = both(DENSE, sizes={"pp": 2, "tp": 2})
    for number in range(2):
        adapter = make_adapter(DENSE, number)
        assert_same_answers(*(with_adapter(model, adapter) for model in (one, many)))


def engines_hand_out_and_receive():
    """From stages to one device and back; the last stage has a layer of zeros more."""
    models = [
        Decoder(DENSE, random_source(DENSE), mesh=mesh)
        for mesh in (None, make_mesh(DENSE, pp=2, tp=1), make_mesh(DENSE, pp=2, tp=2))
    ]
    for kv_dtype in ("auto", "int8"):
        sizes = SIZES | {"preemption": "swap", "swap_pages": 64, "kv_dtype": kv_dtype}
        sizes |= {"prefix_cache": False}
        engines = [Engine(model, **sizes) for model in models]
        asked = {"max_new_tokens": 9, "temperature": 0.7, "seed": 1}
        want = [engines[0].submit(x, draw_index=i, **asked) for i, x in enumerate(PROMPTS[:4])]
        engines[0].run()
        for one, other in ((0, 1), (1, 0), (2, 1)):
            got = hand_over(engines[one], engines[other], PROMPTS[:4], **asked)
            assert got == [request.tokens for request in want]
        assert [engine.num_swaps[1] for engine in engines] == [4, 8, 0]
        assert engines[1].facts() == engines[0].facts()


def weights_of_a_later_stage_are_told_apart():
    sizes = SIZES | {"preemption": "swap"}
    one, many = both(DENSE, sizes={"pp": 2})
    facts = [Engine(model, **sizes).facts() for model in (one, many)]
    assert facts[0] == facts[1]
    _, params = split_model(many)
    leaves, tree = jax.tree.flatten(params)
    of_layers = next(i for i, x in enumerate(leaves) if x.ndim > 1 and x.sharding.spec[0] == "pp")
    half = leaves[of_layers].shape[0] // 2
    leaves[of_layers] = leaves[of_layers].at[half].add(1)  # of the second stage
    engine = Engine(many, **sizes)
    engine.update_weights(jax.tree.unflatten(tree, leaves))
    changed = {name for name, fact in engine.facts().items() if fact != facts[0][name]}
    assert changed == {"weight_version", "digest of weights"}


def states_are_made_in_stages():
    mesh = make_mesh(DENSE, pp=2, tp=2)
    sizes = {"num_pages": 6, "page_size": 4, "max_seqs": 2, "pages_per_seq": 3, "head_dim": 8}
    sizes |= {"num_kv_heads": 2, "dtype": "float32", "mesh": mesh}
    state = KVState.create(layer_kinds=["full", 8, "full", 8], **sizes)
    assert (state.layer_kinds, state.find(1)) == (("full", 8), (1, 0))
    for group in state.groups:
        assert group.k_pages.shape == (2, 6, 2, 4, 8)
        assert group.k_pages.addressable_shards[0].data.shape == (1, 6, 1, 4, 8)
    for kinds in (["full"] * 3, ["full", "full", 8, 8]):
        with pytest.raises(ValueError, match="layer_kinds: expected pp=2 stages with the same"):
            KVState.create(layer_kinds=kinds, **sizes)


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
    assert compile_for(shapes, PROMPTS[:1], max_new_tokens=2) > 0


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


PROGRAMS = {
    program.__name__: program
    for program in (
        four_stages_give_the_same, stages_are_busy, a_tick_has_one_transfer_and_pools_stay,
        no_bit_changes_on_the_way, a_device_holds_its_stage_alone, what_has_no_stages_is_refused,
        shapes_are_those_of_the_model, rows_stop_and_pages_run_out_alike,
        two_stages_of_two_devices_give_the_same, two_stages_of_two_replicas_give_the_same,
        layers_of_two_kinds_give_the_same, long_prompts_pass_in_parts,
        checkpoints_are_read_by_stages, commands_take_stages, adapters_are_those_of_the_stages,
        states_are_made_in_stages, engines_hand_out_and_receive,
        weights_of_a_later_stage_are_told_apart,
    )
}  # fmt: skip
KINDS = [kind for kind in ENGINES if kind not in (*CONFIGS, "groups")]  # layers of two kinds
OF_ENGINES = {
    f"an engine, {kind}": lambda kind=kind: an_engine_gives_the_same(kind) for kind in KINDS
}


@pytest.mark.parametrize("programs", first_of([list(PROGRAMS)[:2], list(PROGRAMS)[2:6]], 1))
def test_on_four_devices(programs):
    check_in_a_process(__file__, *programs, devices=DEVICES)


@pytest.mark.deep
@pytest.mark.parametrize("program", [*list(PROGRAMS)[6:], *OF_ENGINES])
def test_more_on_four_devices(program):
    check_in_a_process(__file__, program, devices=DEVICES)


if __name__ == "__main__":
    run_chosen(PROGRAMS | OF_ENGINES, DEVICES)
