# SPDX-License-Identifier: Apache-2.0
"""Models over a mesh: what they give on one device, in f32 to rounding, in tokens the same.

Each program below runs in a process of its own (this file as a script), because the number of
devices is fixed when JAX starts.
"""

import contextlib
import dataclasses
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import make_adapter
from children import on_devices
from flax import nnx
from fp8_folder import write_pair
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from served_engines import (
    BEGINNING,
    CONFIGS,
    ENGINES,
    PROMPTS,
    RNG,
    SEED,
    SIZES,
    assert_same,
    both,
    models_of,
    serve,
)
from tiers import first_of
from tiny_checkpoint import write_checkpoint as write_tiny

import jax_paged
from jax_paged import KVState
from jax_paged.models import (
    Decoder,
    Engine,
    cli,
    config_from_hf,
    create_state,
    generate,
    load_checkpoint,
    loglikelihoods,
    make_mesh,
    score,
    split_model,
    with_adapter,
)
from jax_paged.models.checkpoint.weights import open_checkpoint
from jax_paged.models.decoder.generation import compile_for
from jax_paged.models.decoder.parameters import (
    abstract_source,
    expected_tensors,
    random_source,
)
from jax_paged.models.testing import small_hf_config, stored_tensors


def assert_same_answers(one, many, **options):
    options = {"max_new_tokens": 8, "temperature": 0.8, "seed": 5} | options
    want, got = (generate(model, PROMPTS, **options) for model in (one, many))
    assert got.tokens == want.tokens
    want, got = (score(model, PROMPTS[2]) for model in (one, many))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def generate_and_score_give_the_same(name, way):
    config = CONFIGS[name]
    if way == "adapter":
        adapter = make_adapter(config, 1)
        assert_same_answers(*(with_adapter(model, adapter) for model in both(config)))
    elif way == "groups":
        one, many = both(config)
        sizes = {"num_pages": 64, "max_seqs": len(PROMPTS), "pages_per_seq": 8, "page_size": 8}
        want = generate(one, PROMPTS, max_new_tokens=8).tokens
        for model in (one, many):
            state = create_state(model, **sizes, groups=True)
            assert generate(model, PROMPTS, max_new_tokens=8, state=state).tokens == want
    elif way == "int8":
        assert_same_answers(*both(config, weight_dtype="int8"), kv_dtype="int8")
    else:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            one, many = both(config, sizes={"tp": int(way)})
        texts = [str(warning.message) for warning in told]
        assert bool(texts) == (way == "4"), texts
        assert all("each of the 2 KV heads lies on 2 devices" in text for text in texts)
        assert_same_answers(one, many)


def likelihoods_are_equal():
    pairs = [(prompt[:3], prompt[3:9]) for prompt in PROMPTS[:3]]
    want, got = (loglikelihoods(model, pairs, chunk=16) for model in both(CONFIGS["dense"]))
    np.testing.assert_allclose([x.log_p for x in got], [x.log_p for x in want], rtol=1e-5)


def experts_are_added_up_before_they_are_rounded():
    config = CONFIGS["experts"]
    source = random_source(config, seed=SEED, dtype=jnp.bfloat16)
    mesh = make_mesh(config)
    one, many = (Decoder(config, source, mesh=mesh).layers[0].mlp for mesh in (None, mesh))
    x = jnp.asarray(RNG.standard_normal((64, config.hidden_size)), jnp.bfloat16)
    graph, params = nnx.split(many)
    split = jax.shard_map(
        lambda params, x: nnx.merge(graph, params)(x), mesh=mesh,
        in_specs=(many.partition.specs(params), P()), out_specs=P(), check_vma=False,
    )  # fmt: skip
    differs = np.asarray(jax.jit(split)(params, x)) != np.asarray(one(x))
    assert differs.mean() < 0.01  # where another order of the f32 sum falls onto another side


def addresses(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def what_is_compiled_for_shapes_is_what_runs():
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), "qwen2")
        checkpoint = open_checkpoint(folder, mesh=make_mesh)
        asked = {"max_new_tokens": 3, "temperature": 0.5}
        model = checkpoint.load_and(lambda shapes: compile_for(shapes, PROMPTS[:1], **asked))
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("jax").addHandler(handler)
        jax.config.update("jax_log_compiles", True)
        generate(model, PROMPTS[:1], **asked)
        assert not any("Compiling jit(decode)" in text for text in told), told
        generate(model, PROMPTS[:1], max_new_tokens=3, top_k=2)
        assert any("Compiling jit(decode)" in text for text in told), told


def commands_take_the_sizes_of_a_mesh():
    """The same tokens in two replicas of two devices, and on one device."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))
        command = ["generate", "ab", "--model", folder, "--max-new-tokens", "5", "--json"]
        command.append("--no-program-cache")
        said = []
        for sizes in ([], ["--tp", "2"], ["--dp", "4"]):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert cli.main([*command, *sizes]) == 0
            said.append(json.loads(out.getvalue())["tokens"])
        assert said[0] == said[1] == said[2]
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert cli.main([*command, "--tp", "3"]) != 0
        assert "tp: expected a divisor of the 4 devices, got 3" in err.getvalue()


def states_are_made_on_the_mesh():
    """Rows of two replicas, written and read by each in its own pages."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sizes = {"num_layers": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 8, "max_seqs": 2}
    sizes |= {"num_pages": 6, "pages_per_seq": 3, "dtype": jnp.float32}
    state = KVState.create(**sizes, mesh=mesh)
    assert state.k_pages.shape == (2, 12, 2, 4, 8)
    assert state.k_pages.addressable_shards[0].data.shape == (2, 6, 1, 4, 8)
    assert state.table.page_table.shape == (2, 2, 3)
    specs, counts = state.specs(heads="tp", pages="dp"), np.array([[3, 1], [5, 2]], np.int32)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 8, heads, 8), np.float32) for heads in (4, 2, 2))

    def step(state, counts, q, k, v):
        rows = jnp.arange(2, dtype=jnp.int32)
        state, _ = state.reserve(rows, counts)
        state, batch, status = state.step(rows, counts, num_tokens=8)
        state = jax_paged.write(k, v, state, batch, layer=1)
        return state, jax_paged.attend(q, state, batch, layer=1), status

    def local(state, *rest):
        strip = lambda s, x: x[0] if s == P("dp") else x  # noqa: E731
        state, *results = step(jax.tree.map(strip, specs, state), *(x[0] for x in rest))
        stack = lambda s, x: x[None] if s == P("dp") else x  # noqa: E731
        return jax.tree.map(stack, specs, state), *(x[None] for x in results)

    row, tokens = P("dp"), P("dp", None, "tp")
    takes, gives = (specs, row, *[tokens] * 3), (specs, tokens, row)
    every = jax.shard_map(local, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    before = addresses(state.k_pages)
    state, out, status = jax.jit(every, donate_argnums=0)(state, counts, q, k, v)
    assert addresses(state.k_pages) == before
    assert not np.asarray(status).any()
    for replica in range(2):
        own = (x[replica] for x in (counts, q, k, v))
        _, want, _ = step(KVState.create(**sizes), *own)
        np.testing.assert_allclose(out[replica], want, rtol=1e-6)
    for options, message in (
        ({"num_kv_heads": 3}, "num_kv_heads: expected a multiple of tp=2, got 3"),
        ({"mesh": jax.make_mesh((4,), ("x",))}, "mesh: expected axes 'tp', 'dp' or both, got axes"),
    ):
        with pytest.raises(ValueError, match=message):
            KVState.create(**(sizes | {"mesh": mesh} | options))


def the_engine_gives_the_same(kind):
    """On two replicas of two devices, which both have requests; all pages are free at the end."""
    (_, want), (engine, got) = (serve(kind, *models) for models in models_of(kind))
    assert_same(got, want)
    assert {r.replica for r in got} == {0, 1}
    before = addresses(engine.state.groups[-1].k_pages)
    engine.submit([1, 2], max_new_tokens=2)
    engine.run()
    assert addresses(engine.state.groups[-1].k_pages) == before


def requests_go_where_their_pages_are():
    _, model = both(CONFIGS["dense"])
    engine = Engine(model, **SIZES)
    first = engine.submit(PROMPTS[0], max_new_tokens=2)
    engine.run()
    other = engine.submit(PROMPTS[6], max_new_tokens=2)
    assert other.replica == 0  # both have nothing to do
    assert engine.submit(PROMPTS[6], max_new_tokens=2).replica == 1
    again = [engine.submit([*BEGINNING, i], max_new_tokens=2) for i in range(4)]
    assert {request.replica for request in again} == {first.replica}
    engine.run()
    assert min(request.num_cached for request in again) >= 16


def new_weights_are_taken():
    config = CONFIGS["dense"]
    _, model = both(config)
    one, other = both(config, seed=SEED + 1)
    engine = Engine(model, **SIZES)
    engine.submit(PROMPTS[1], max_new_tokens=4)
    engine.run()
    programs = dict(engine._runner.steps)
    for _ in range(2):
        engine.update_weights(other)
        request = engine.submit(PROMPTS[1], max_new_tokens=6)
        engine.run()
        assert request.tokens == generate(one, PROMPTS[1:2], max_new_tokens=6).tokens[0]
    assert engine._runner.steps == programs


def checkpoints_load_into_shards():
    """With the splits and the values of a model that is made on the mesh, quantized ones too."""
    for kind in ("qwen3_moe", "qwen2", "gemma3_text", "gpt_oss"):
        with tempfile.TemporaryDirectory() as folder:
            config = write_folder(Path(folder), kind)
            source = random_source(config, seed=SEED)

            def whole(*names, source=source, **options):  # no `FillingSource`
                return source(*names, **options)

            for dtype, mesh in ((None, make_mesh), ("int8", make_mesh(config))):
                model, *_ = load_checkpoint(folder, weight_dtype=dtype, mesh=mesh)
                mesh = model.partition.mesh
                want = Decoder(config, whole, weight_dtype=dtype, mesh=mesh)
                shapes = Decoder(config, abstract_source(config), weight_dtype=dtype, mesh=mesh)
                for x, y, like in zip(*map(leaves, (model, want, shapes)), strict=True):
                    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
                    assert (x.shape, x.dtype) == (like.shape, like.dtype)
                    assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def fp8_blocks_are_split_as_wholes():
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("qwen3_moe", "qwen3"):
            sizes = {"head_dim": 128, "intermediate_size": 512}
            (own := Path(folder, kind)).mkdir()
            path, _ = write_pair(own, kind, **sizes)
            one, many = (load_checkpoint(path, mesh=mesh)[0] for mesh in (None, make_mesh))
            assert_same_answers(one, many)
            checkpoint = open_checkpoint(path, mesh=make_mesh)
            for x, like in zip(*map(leaves, (many, checkpoint.shapes())), strict=True):
                assert (x.shape, x.dtype) == (like.shape, like.dtype)
                assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        for name, sizes, message in (
            ("k", {"head_dim": 64}, "q_proj.weight: expected parts of devices that are multiples"),
            ("down", {"head_dim": 128}, "down_proj.weight: .* 384 split as 192"),
        ):
            (own := Path(folder, name)).mkdir()
            path, _ = write_pair(own, "qwen3", **sizes)
            with pytest.raises(ValueError, match=message):
                load_checkpoint(path, mesh=make_mesh)


def leaves(model):
    return jax.tree.leaves(split_model(model)[1])


def write_folder(folder, kind):
    raw = small_hf_config(kind)
    config = config_from_hf(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    source = random_source(config, seed=SEED)
    tensors = {name: np.asarray(source(name)) for name in expected_tensors(config)}
    save_file(stored_tensors(config, tensors), folder / "model.safetensors")
    return config


def meshes_that_do_not_fit_are_refused():
    config = CONFIGS["dense"]
    for options, message in (
        ({"tp": 3}, "tp: expected a divisor of the 4 devices, got 3"),
        ({"tp": 2, "dp": 1}, "dp: expected 2, as 4 devices have tp=2, got 1"),
        ({"dp": 8}, "dp: expected a divisor of the 4 devices, got 8"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_mesh(config, **options)
    odd = dataclasses.replace(config, intermediate_size=45)
    with pytest.raises(ValueError, match="tp: expected a divisor of intermediate_size=45, got 2"):
        make_mesh(odd, tp=2)
    mesh = jax.make_mesh((4,), ("x",))
    with pytest.raises(ValueError, match=r"mesh: expected axes \('dp', 'tp'\), got \('x',\)"):
        Decoder(config, random_source(config), mesh=mesh)
    one, many = both(config)
    with pytest.raises(ValueError, match="draft_model: expected one without a mesh"):
        Engine(one, **SIZES, max_drafts=2, draft_model=many)


PROGRAMS = {
    program.__name__: program
    for program in (
        generate_and_score_give_the_same, likelihoods_are_equal, the_engine_gives_the_same,
        states_are_made_on_the_mesh,
        what_is_compiled_for_shapes_is_what_runs, requests_go_where_their_pages_are,
        commands_take_the_sizes_of_a_mesh, new_weights_are_taken, checkpoints_load_into_shards,
        meshes_that_do_not_fit_are_refused, experts_are_added_up_before_they_are_rounded,
        fp8_blocks_are_split_as_wholes,
    )
}  # fmt: skip


def run(program, *arguments):
    child = subprocess.run(
        [sys.executable, "-W", "error", __file__, program, *arguments], env=on_devices(4),
        timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]


WAYS = [(name, way) for way in ("2", "4", "1", "adapter", "int8") for name in CONFIGS]
WAYS += [(name, "groups") for name in ("post-norms", "sinks")]


@pytest.mark.parametrize(("name", "way"), first_of(WAYS, 1))
def test_generate_and_score(name, way):
    run("generate_and_score_give_the_same", name, way)


@pytest.mark.parametrize("kind", first_of(ENGINES, 1))
def test_the_engine(kind):
    run("the_engine_gives_the_same", kind)


IN_DEEP = {
    fp8_blocks_are_split_as_wholes,
    likelihoods_are_equal,
    states_are_made_on_the_mesh,
    commands_take_the_sizes_of_a_mesh,
}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.deep) if program in IN_DEEP else name
        for name, program in PROGRAMS.items()
        if "the_same" not in name
    ],
)
def test_on_four_devices(program):
    run(program)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == 4
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
