# SPDX-License-Identifier: Apache-2.0
"""Models of other people in `generate`, `score`, `evaluate` and the engine: what `Model` asks for.

Each has the weights of a `Decoder`, so it has to say what the decoder says.
"""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import first_of

import jax_paged as jp
from jax_paged.models import (
    Decoder,
    DecoderConfig,
    Engine,
    Model,
    ModelConfig,
    create_state,
    evaluate,
    generate,
    loglikelihoods,
    merge_model,
    rolling_loglikelihoods,
    score,
    split_model,
    token_logits,
)
from jax_paged.models.decoder.executables import Executables, compiled, kept_in
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode, prefill
from jax_paged.models.serving.batch import generate_many
from jax_paged.models.testing import Stepper, small_config
from jax_paged.ops.rope import rope_tables
from jax_paged.testing import is_in_place

CONFIG = small_config("llama", num_hidden_layers=3)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [90, 2, 2, 2]]
STEPS = 12


def norm(x, weight):
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + np.float32(CONFIG.rms_norm_eps))
    return x * weight[None]


def run_layer(weights, x, batch, state, number):
    """A Llama layer; weights: name → array."""
    frequencies = CONFIG.rope.frequencies(CONFIG.head_dim)
    cos, sin = rope_tables(batch.positions, frequencies)
    normed = norm(x, weights["input_layernorm"])
    q, k, v = (
        (normed @ weights[f"self_attn.{name}_proj"].T).reshape(len(x), -1, CONFIG.head_dim)
        for name in "qkv"
    )
    state = jp.write(rotated(k, cos, sin), v, state, batch, layer=number)
    attended = jp.attend(rotated(q, cos, sin), state, batch, layer=number)
    x = x + attended.reshape(len(x), -1) @ weights["self_attn.o_proj"].T
    normed = norm(x, weights["post_attention_layernorm"])
    gate, up = (normed @ weights[f"mlp.{name}_proj"].T for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ weights["mlp.down_proj"].T, state


def rotated(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer_weights(source, number):
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = ["input_layernorm", *attention, "post_attention_layernorm", *mlp]
    return {name: source(f"model.layers.{number}.{name}.weight") for name in names}


def stacked_weights(source):
    each = [layer_weights(source, number) for number in range(CONFIG.num_layers)]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *each)


def logits_of(x, weight, head, logit_rows):
    x = x if logit_rows is None else jnp.take(x, logit_rows, axis=0, mode="clip")
    return norm(x, weight) @ head.T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain:
    """No Flax: a dataclass of arrays."""

    embedding: jax.Array
    layers: list[dict[str, jax.Array]]
    norm: jax.Array
    head: jax.Array
    config: DecoderConfig = dataclasses.field(metadata={"static": True})

    @staticmethod
    def create(source):
        layers = [layer_weights(source, number) for number in range(CONFIG.num_layers)]
        return Plain(*ends(source, layers), CONFIG)

    @property
    def dtype(self):
        return self.embedding.dtype

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        x = self.embedding[tokens]
        for number, weights in enumerate(self.layers):
            x, state = run_layer(weights, x, batch, state, number)
        return logits_of(x, self.norm, self.head, logit_rows), state


def ends(source, layers):
    embedding, last = source("model.embed_tokens.weight"), source("model.norm.weight")
    return embedding, layers, last, source("lm_head.weight")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainScanned(Plain):
    """Its layers are stacked."""

    @staticmethod
    def create(source):
        return PlainScanned(*ends(source, stacked_weights(source)), CONFIG)

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        def one(carry, xs):
            x, state = carry
            weights, number = xs
            return run_layer(weights, x, batch, state, number), None

        numbers = jnp.arange(CONFIG.num_layers, dtype=jnp.int32)
        carry = self.embedding[tokens], state
        (x, state), _ = jax.lax.scan(one, carry, (self.layers, numbers))
        return logits_of(x, self.norm, self.head, logit_rows), state


class Layer(nnx.Module):
    def __init__(self, weights):
        self.weights = nnx.Dict({k.replace(".", "_"): nnx.Param(v) for k, v in weights.items()})
        self.names = tuple(weights)

    def __call__(self, x, batch, state, number):
        weights = {name: self.weights[name.replace(".", "_")][...] for name in self.names}
        return run_layer(weights, x, batch, state, number)


class Module(nnx.Module):
    """Flax, with a list of layers."""

    def __init__(self, source):
        self.config, self.dtype = CONFIG, np.dtype(np.float32)
        embedding, self.layers, last, head = ends(source, self.make_layers(source))
        self.embedding, self.norm, self.head = map(nnx.Param, (embedding, last, head))

    def make_layers(self, source):
        return nnx.List(Layer(layer_weights(source, i)) for i in range(CONFIG.num_layers))

    def run_layers(self, x, batch, state):
        for number, layer in enumerate(self.layers):
            x, state = layer(x, batch, state, number)
        return x, state

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        x, state = self.run_layers(self.embedding[...][tokens], batch, state)
        return logits_of(x, self.norm[...], self.head[...], logit_rows), state


class NNXScanned(Module):
    """Its layers are made by `nnx.vmap` and run by `nnx.scan`."""

    def make_layers(self, source):
        return nnx.vmap(Layer)(stacked_weights(source))

    def run_layers(self, x, batch, state):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def run(carry, layer, number):
            x, state = carry
            return layer(x, batch, state, number)

        return run((x, state), self.layers, jnp.arange(CONFIG.num_layers, dtype=jnp.int32))


class LaxScanned(NNXScanned):
    """Its layers are run by `jax.lax.scan`, and merged inside of it."""

    def run_layers(self, x, batch, state):
        graph, weights = nnx.split(self.layers)

        def one(carry, xs):
            x, state = carry
            weights, number = xs
            return nnx.merge(graph, weights)(x, batch, state, number), None

        numbers = jnp.arange(CONFIG.num_layers, dtype=jnp.int32)
        return jax.lax.scan(one, (x, state), (weights, numbers))[0]


KINDS = {
    "plain": Plain.create, "lax_scanned": LaxScanned, "plain_scanned": PlainScanned.create,
    "module": Module, "nnx_scanned": NNXScanned,
}  # fmt: skip


@functools.cache
def decoder():
    return Decoder(CONFIG, random_source(CONFIG))


@functools.cache
def expected():
    return generate(decoder(), PROMPTS, max_new_tokens=STEPS).tokens


@pytest.fixture(scope="module", params=first_of(KINDS, 2))
def model(request):
    return KINDS[request.param](random_source(CONFIG))


def test_it_is_a_model(model):
    assert isinstance(model, Model)
    assert isinstance(model.config, ModelConfig)


def test_generate_gives_the_tokens_of_the_decoder(model):
    assert generate(model, PROMPTS, max_new_tokens=STEPS).tokens == expected()


def test_token_logits_are_those_of_the_decoder(model):
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 3, 2]
    for kv_dtype in ("auto", "int8"):
        want = token_logits(decoder(), text, chunk=8, kv_dtype=kv_dtype)
        have = token_logits(model, text, chunk=8, kv_dtype=kv_dtype)
        # f32 sums in another order; in int8 a few K and V round the other way.
        np.testing.assert_allclose(have, want, atol=2e-5 if kv_dtype == "auto" else 0.05)


def test_likelihoods_are_those_of_the_decoder(model):
    pairs = [([1, 2, 3], [4]), ([1, 2, 3], [5, 6, 7]), ([8], [9, 1])]
    want = [one.log_p for one in loglikelihoods(decoder(), pairs, chunk=8, max_seqs=2)]
    have = [one.log_p for one in loglikelihoods(model, pairs, chunk=8, max_seqs=2)]
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-5)


def test_evaluate_gives_the_perplexity_of_the_decoder(model):
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 40).tolist()
    for window in (None, 12):
        options = dict(context=32, chunk=16, window=window)
        want = evaluate(decoder(), text, **options)["nll"]
        assert evaluate(model, text, **options)["nll"] == pytest.approx(want, abs=1e-5)


def engine_tokens(model, **options):
    engine = Engine(model, num_pages=32, max_seqs=2, max_tokens=16, progress=False, **options)
    requests = [engine.submit(prompt, max_new_tokens=STEPS) for prompt in PROMPTS]
    engine.run()
    return [request.tokens for request in requests]


def test_the_engine_gives_the_tokens_of_generate(model):
    assert engine_tokens(model) == expected()


@pytest.mark.parametrize("branches", [1, 2])
def test_a_foreign_model_drafts_for_another(model, branches):
    drafted = engine_tokens(model, max_drafts=3, draft_model=model, draft_branches=branches)
    assert drafted == expected()


def test_steps_by_hand_give_the_tokens_of_generate(model):
    stepper = Stepper(model)
    (logits,) = stepper.step({0: PROMPTS[0]}).values()
    tokens = []
    for _ in range(STEPS):
        tokens.append(int(logits[-1].argmax()))
        (logits,) = stepper.step({0: tokens[-1:]}).values()
    assert tokens == expected()[0]


def test_no_program_copies_the_pages_of_a_layer(model):
    graph, params = split_model(model)
    state = create_state(model, num_pages=2048, max_seqs=4, pages_per_seq=64)
    rows, progress = np.arange(4, dtype=np.int32), Progress(*(jnp.zeros(4, jnp.int32),) * 3)
    loop = decode.lower(
        graph, params, state, progress, rows, rows, rows, Sampler.create(), jnp.int32(3), chunk=4
    ).compile()
    chunk = prefill.lower(graph, params, state, rows, rows, np.zeros(64, np.int32)).compile()
    of_a_layer = jax.ShapeDtypeStruct(state.k_pages.shape[1:], state.k_pages.dtype)
    for program in (loop, chunk):
        assert is_in_place(program, of_a_layer)


def test_a_split_model_is_known_again(model):
    graph, params = split_model(model)
    again, _ = split_model(jax.tree.map(lambda x: 2 * x, model))
    assert (graph, hash(graph)) == (again, hash(again))
    merged = merge_model(graph, params)
    assert type(merged) is type(model)
    assert merged.config == model.config
    assert split_model(decoder())[0] != graph


def test_no_executable_of_a_foreign_model_is_kept(tmp_path):
    model, row = KINDS["plain"](random_source(CONFIG)), np.zeros(1, np.int32)
    with kept_in(Executables(tmp_path, lambda: None)):
        for one, kept in ((model, 0), (decoder(), 1)):
            state = create_state(one, num_pages=4, max_seqs=1, pages_per_seq=4)
            compiled(prefill, *split_model(one), state, row, row, np.zeros(8, np.int32))
            assert len([*tmp_path.iterdir()]) == kept


# What is missing from a model is named.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """A model to take things from."""

    weight: Any
    config: Any = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True}, default="float32")
    answer: Any = dataclasses.field(metadata={"static": True}, default=None)

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        rows = tokens if logit_rows is None else logit_rows
        return self.answer(jnp.zeros((len(rows), CONFIG.vocab_size), jnp.float32), state)


class Unregistered(Partial):
    pass


def config_without(name):
    sizes = ("vocab_size", "context_length", "num_layers", "num_kv_heads", "head_dim")
    kept = {size: getattr(CONFIG, size) for size in sizes if size != name}
    return dataclasses.make_dataclass("Config", kept, frozen=True)(*kept.values())


class Bare(nnx.Module):
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Called(Bare):
    __call__ = Partial.__call__


WEIGHT = np.zeros(3, np.float32)
IN_VAIN = {  # model → message
    "nothing": (None, "model: expected a model with `config` (see Model), got None"),
    "no dtype": (
        Bare(config=CONFIG),
        "model: expected a model with `dtype` (see Model), got a Bare",
    ),
    "no call": (
        Bare(config=CONFIG, dtype=jnp.float32),
        "model: expected a model that is called with (tokens, batch, state, logit_rows=…), got a "
        "Bare",
    ),
    "size": (
        Partial(WEIGHT, config_without("num_kv_heads")),
        "model.config.num_kv_heads: expected an integer of at least 1, got None",
    ),
    "dtype": (
        Partial(WEIGHT, CONFIG, "int8"),
        "model.dtype: expected bfloat16, float16 or float32, got int8",
    ),
    "no dtype's name": (
        Partial(WEIGHT, CONFIG, "f33"),
        "model.dtype: expected bfloat16, float16 or float32, got 'f33'",
    ),
    "unregistered": (
        Unregistered(WEIGHT, CONFIG),
        "model: expected an nnx.Module or a registered pytree of arrays, got a Unregistered at its "
        "root",
    ),
    "function": (
        Partial({"act": print}, CONFIG),
        "model: expected an nnx.Module or a registered pytree of arrays, got a "
        "builtin_function_or_method at .weight['act']",
    ),
    "unhashable": (
        Called(config=types.SimpleNamespace(**vars(CONFIG)), dtype=jnp.float32),
        "model: expected static parts that can be hashed, got unhashable type: "
        "'types.SimpleNamespace'",
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("what", IN_VAIN)
def test_what_is_missing_from_a_model_is_named_at_the_entry(what):
    model, message = IN_VAIN[what]
    calls = [
        lambda: generate(model, [[1]], max_new_tokens=1),
        lambda: generate_many(model, [[1]], max_new_tokens=1),
        lambda: score(model, [1]),
        lambda: token_logits(model, [1]),
        lambda: loglikelihoods(model, [([1], [2])]),
        lambda: rolling_loglikelihoods(model, [[1]], prefix_token=0),
        lambda: evaluate(model, [1, 2]),
        lambda: Engine(model, num_pages=4, progress=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()
    if model is not None:
        with pytest.raises(ValueError, match=f"^draft_{re.escape(message)}$"):
            Engine(decoder(), num_pages=4, max_drafts=1, draft_model=model, progress=False)


ANSWERS = {  # what a call makes of (logits, state) → message
    "no state": (lambda logits, state: logits, "(logits, state) of its call, got a "),
    "half": (
        lambda logits, state: (logits.astype(jnp.bfloat16), state),
        "logits of float32[0, 97], got bfloat16[0, 97]",
    ),
    "short": (
        lambda logits, state: (logits[:, 1:], state),
        "logits of float32[0, 97], got float32[0, 96]",
    ),
    "other state": (
        lambda logits, state: (logits, state.replace(v_pages=state.v_pages[:1])),
        "the state that it was given, with new pages, got one of another kind",
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("what", ANSWERS)
def test_a_model_that_returns_something_else_is_told(what):
    answer, message = ANSWERS[what]
    with pytest.raises(ValueError, match=f"^model: expected {re.escape(message)}"):
        generate(Partial(WEIGHT, CONFIG, answer=answer), [[1, 2]], max_new_tokens=1)
