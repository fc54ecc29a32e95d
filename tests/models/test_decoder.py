# SPDX-License-Identifier: Apache-2.0
"""The decoder through the paged state: every way to feed tokens gives the same logits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steppers import NUM_TOKENS, ids, make_stepper
from tiers import first_of

from jax_paged import KVState
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.model import Decoder, rms_norm
from jax_paged.models.decoder.parameters import abstract_source, expected_tensors, random_source
from jax_paged.models.decoder.protocol import split_model
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode
from jax_paged.models.testing import Stepper, small_config
from jax_paged.ops.rope import apply_rope, inverse_frequencies, rope_tables
from jax_paged.testing import pool_sized_ops

TYPES = ["qwen3_moe", "qwen3", "llama"]
MORE_TYPES = ["qwen2", "mistral", "phi3"]
# Layers with and without a window, in turn.
WINDOWED = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}


def dense_logits(config, source, tokens):
    """The whole model in float64 numpy, without a cache: an independent oracle."""

    def get(name):
        return np.asarray(source(name), np.float64)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * get(name)

    shapes = expected_tensors(config)

    def project(x, name):
        out = x @ get(name + ".weight").T
        return out + get(name + ".bias") if name + ".bias" in shapes else out

    def silu(x):
        return x / (1 + np.exp(-x))

    def turn(x):
        half = (config.rope.rotary_dim or config.head_dim) // 2
        theta = config.rope.theta ** (-np.arange(half) / half)
        angle = np.arange(len(tokens))[:, None, None] * theta
        first, second = x[..., :half], x[..., half : 2 * half]
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
                x[..., 2 * half :],
            ],
            -1,
        )

    x = get("model.embed_tokens.weight")[tokens]
    count = len(tokens)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm.weight")
        if config.fused_projections:
            heads = project(h, layer + "self_attn.qkv_proj").reshape(count, -1, config.head_dim)
            begins = [config.num_q_heads, config.num_q_heads + config.num_kv_heads]
            q, k, v = np.split(heads, begins, axis=1)
        else:
            q, k, v = (
                project(h, f"{layer}self_attn.{n}_proj").reshape(count, -1, config.head_dim)
                for n in "qkv"
            )
        if config.qk_norm:
            q = norm(q, layer + "self_attn.q_norm.weight")
            k = norm(k, layer + "self_attn.k_norm.weight")
        group = config.num_q_heads // config.num_kv_heads
        q, k, v = turn(q), np.repeat(turn(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        seen = np.tri(count, dtype=bool) & ~np.tri(
            count, k=-(config.window(i) or count), dtype=bool
        )
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", scores, v).reshape(count, -1)
        x = x + project(out, layer + "self_attn.o_proj")
        h = norm(x, layer + "post_attention_layernorm.weight")
        names = [f"{part}_proj" for part in ("gate", "up", "down")]
        if config.moe_layers[i]:
            router = h @ get(layer + "mlp.gate.weight").T
            p = np.exp(router - router.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            gate, up, down = (get(f"{layer}mlp.experts.{n}.weight") for n in names)
            out = np.zeros_like(x)
            for t in range(count):
                top = np.argsort(-p[t])[: config.experts_per_token]
                scale = p[t, top] / (p[t, top].sum() if config.norm_topk_prob else 1)
                out[t] = sum(
                    s * (silu(h[t] @ gate[e].T) * (h[t] @ up[e].T)) @ down[e].T
                    for e, s in zip(top, scale, strict=True)
                )
        else:
            if config.fused_projections:
                gate, up = np.split(project(h, layer + "mlp.gate_up_proj"), 2, axis=-1)
            else:
                gate, up = (project(h, f"{layer}mlp.{n}") for n in names[:2])
            out = project(silu(gate) * up, layer + "mlp.down_proj")
        x = x + out
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ get(head).T


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((model_type, {}) for model_type in TYPES + MORE_TYPES),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3_moe", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
        (
            "qwen3_moe",
            {"num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": False},
        ),
        ("qwen3", WINDOWED),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3}),
    ],
)
def test_prefill_matches_a_float64_model(model_type, changes):
    config = small_config(model_type, **changes)
    source = random_source(config, 3)
    tokens = ids(NUM_TOKENS)
    logits = Stepper(Decoder(config, source)).step({0: tokens})[0]
    np.testing.assert_allclose(logits, dense_logits(config, source, tokens), atol=2e-4)


def test_both_implementations_give_the_same_logits():
    config = small_config()
    native, reference = (
        Stepper(Decoder(config, random_source(config, 3), implementation=implementation))
        for implementation in ("native", "reference")
    )
    for tokens in (ids(NUM_TOKENS), ids(1)):
        np.testing.assert_allclose(
            native.step({1: tokens})[1], reference.step({1: tokens})[1], atol=1e-5
        )


@pytest.mark.parametrize("model_type", TYPES)
def test_decode_step_by_step_equals_full_prefill(model_type):
    tokens = ids(NUM_TOKENS)
    whole = make_stepper(model_type).step({0: tokens})[0]
    stepper = make_stepper(model_type)
    parts = [stepper.step({2: tokens[:10]}, padded_to=NUM_TOKENS)[2]]
    parts += [stepper.step({2: [token]})[2] for token in tokens[10:]]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_chunked_prefill_equals_full_prefill(model_type):
    tokens = ids(NUM_TOKENS)
    whole = make_stepper(model_type).step({0: tokens})[0]
    stepper = make_stepper(model_type)
    chunks = [tokens[i : i + 7] for i in range(0, NUM_TOKENS, 7)]
    parts = [stepper.step({1: chunk}, padded_to=NUM_TOKENS)[1] for chunk in chunks]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


@pytest.mark.parametrize("model_type", TYPES + MORE_TYPES)
def test_a_mixed_batch_equals_its_rows_alone(model_type):
    prompts = {row: ids(count, row) for row, count in enumerate([13, 1, 8])}
    stepper = make_stepper(model_type)
    first = stepper.step({0: prompts[0][:12], 2: prompts[2][:3]}, padded_to=NUM_TOKENS)
    second = stepper.step(
        {2: prompts[2][3:], 0: prompts[0][12:], 1: prompts[1]}, padded_to=NUM_TOKENS
    )
    for row, prompt in prompts.items():
        got = np.concatenate([part[row] for part in (first, second) if row in part])
        alone = make_stepper(model_type).step({0: prompt}, padded_to=NUM_TOKENS)[0]
        assert got.shape == (len(prompt), 97)
        np.testing.assert_allclose(got, alone, atol=1e-4)


@pytest.mark.deep
def test_rows_with_a_window_slide_and_give_the_logits_of_a_whole_prefill():
    """A prefill in one chunk frees nothing, so each token has its window whatever has slid."""
    config, tokens = small_config(), ids(60)
    model = Decoder(config, random_source(config, 3))
    whole, each, full = (Stepper(model, page_size=4, pages_per_seq=16, windows=True) for _ in "123")
    for stepper in (whole, each):
        stepper.state, status = stepper.state.reserve([1], 0)
        stepper.state, status = stepper.state.set_window([1], 14, 3)
        assert not np.asarray(status).any()
    expected = whole.step({1: tokens})[1]
    got = [each.step({1: tokens[:9]})[1], each.step({1: tokens[9:15]})[1]]
    got += [each.step({1: [token]})[1] for token in tokens[15:]]
    assert each.state.table.windows.slot_offset[1] == 44
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(full.step({1: tokens})[1] - expected).max() > 0.01


def make_groups(config, layers, num_window_pages, max_seqs=2):
    """Groups for a range of layers of which those with a window have few pages, of 4 tokens."""
    return KVState.create(
        layer_kinds=[config.window(layer) or "full" for layer in layers],
        num_pages={"full": 16 * max_seqs, 7: num_window_pages},
        pages_per_seq={"full": 16, 7: 16},
        page_size=4,
        max_seqs=max_seqs,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.float32,
        layer_begin=layers.start,
    )


@pytest.mark.parametrize("implementation", first_of(["native", "reference"], 1))
def test_a_long_row_lives_on_few_pages_where_layers_have_windows(implementation):
    config, tokens = small_config("qwen3", **WINDOWED), ids(60)
    source = random_source(config, 3)
    model = Decoder(config, source, implementation=implementation)
    expected = dense_logits(config, source, tokens)
    kept = Stepper(model, max_seqs=2, page_size=4, pages_per_seq=16)
    freed = Stepper(model, max_seqs=2, state=make_groups(config, range(4), num_window_pages=4))
    for stepper in (kept, freed):
        got = [stepper.step({1: tokens[i : i + 8]})[1] for i in range(0, 48, 8)]
        got += [stepper.step({1: [token]}, padded_to=8)[1] for token in tokens[48:]]
        np.testing.assert_allclose(np.concatenate(got), expected, atol=2e-4)
    assert freed.state.peak_pages.tolist() == [15, 4]


def test_two_stages_of_a_pipeline_give_the_logits_of_one():
    config, tokens = small_config("qwen3", **WINDOWED), ids(24)
    source = random_source(config, 3)
    model, expected = Decoder(config, source), dense_logits(config, source, tokens)
    stages = [make_groups(config, layers, 8) for layers in (range(3), range(3, 4))]

    @nnx.jit
    def run(model, tokens, stages):
        x = model.embed(tokens)
        for i, state in enumerate(stages):
            state, _ = state.reserve([0], 8)
            state, batches, _ = state.step([0], [8], num_tokens=8)
            x, stages[i] = model.run_layers(x, batches, state)
        return model.logits(x), stages

    assert stages[1].kinds == (7,)
    for begin in range(0, 24, 8):
        part = slice(begin, begin + 8)
        logits, stages = run(model, jnp.asarray(tokens[part], jnp.int32), stages)
        np.testing.assert_allclose(logits, expected[part], atol=2e-4)


def test_a_step_over_groups_copies_no_pool():
    config = small_config("qwen3", **WINDOWED)
    graph, weights = nnx.split(Decoder(config, abstract_source(config, jnp.float32)))
    state = jax.eval_shape(lambda: make_groups(config, range(4), 512, max_seqs=32))

    def decode(weights, tokens, state):
        rows = jnp.arange(2, dtype=jnp.int32)
        state, status = state.reserve(rows, 1)
        state, batches, _ = state.step(rows, 1)
        return nnx.merge(graph, weights)(tokens, batches, state), status

    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = jax.jit(decode, donate_argnums=2).lower(weights, tokens, state).compile()
    for group in state.groups:
        assert pool_sized_ops(compiled, group.k_pages) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_kinds": ["full", 6, "full", 7]}, "layer 1 of kind 'full' or 7, got 6"),
        ({"layer_kinds": [7, 7, "full", 7]}, "layer 0 of kind 'full', got 7"),
        ({"layer_kinds": ["full", "mla", "full", 7]}, "layer 1 of kind 'full' or 7, got 'mla'"),
        ({"layer_kinds": ["full"] * 3}, r"all 4 layers (run_layers takes a part), got 3"),
        ({"layer_kinds": ["full"] * 4, "layer_begin": 1}, "layers below 4, got 4"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(changes, message):
    config = small_config("qwen3", **WINDOWED)
    graph, weights = nnx.split(Decoder(config, abstract_source(config, jnp.float32)))
    sizes = {"num_pages": 8, "pages_per_seq": 4, "page_size": 4, "max_seqs": 1, "latent_dim": 8}
    state = KVState.create(**sizes, num_kv_heads=2, head_dim=16, dtype="float32", **changes)
    state, batches, _ = state.step([-1], 0)
    run = functools.partial(jax.eval_shape, lambda weights, *args: nnx.merge(graph, weights)(*args))
    with pytest.raises(ValueError, match=f"^state: expected {re.escape(message)}"):
        run(weights, jnp.zeros(1, jnp.int32), batches, state)


def test_a_row_has_no_window_beside_those_of_the_layers():
    config = small_config("qwen3", **WINDOWED)
    stepper = Stepper(Decoder(config, random_source(config, 3)), windows=True)
    message = "state: expected windows=False for a model with windows, got windows=True"
    with pytest.raises(ValueError, match=f"^{message}"):
        stepper.step({0: ids(3)})


def test_bf16_weights_give_logits_near_f32():
    tokens = ids(NUM_TOKENS)
    exact = make_stepper("qwen3").step({0: tokens})[0]
    rounded = make_stepper("qwen3", jnp.bfloat16).step({0: tokens})[0]
    assert rounded.dtype == np.float32
    # bf16 has 8 bits; after two layers the logits (of size about 1) are good to about 2 %.
    np.testing.assert_allclose(rounded, exact, atol=0.1)
    assert np.abs(rounded - exact).mean() < 0.02


def test_logits_come_for_the_wanted_tokens_only():
    config = small_config("llama")
    model = Decoder(config, random_source(config, 3))
    state = Stepper(model).state
    state, batch, _ = state.append([0], [4], num_tokens=4)
    tokens = jnp.asarray(ids(4), jnp.int32)
    rows = jnp.array([3, -1, 0, 99], jnp.int32)  # -1: none; beyond the end: the last one
    run = nnx.jit(lambda model, rows: model(tokens, batch, state, logit_rows=rows)[0])
    every = make_stepper("llama").step({0: ids(4)}, padded_to=NUM_TOKENS)[0]
    got = run(model, rows)
    np.testing.assert_allclose(got[jnp.array([0, 2, 3])], every[[3, 0, 3]], atol=1e-5)
    np.testing.assert_array_equal(got[1], 0)


def test_the_attention_biases_and_mlp_biases_take_part():
    tokens = ids(NUM_TOKENS)
    config = small_config("llama", attention_bias=True, mlp_bias=True)
    source = random_source(config, 3)
    full = Stepper(Decoder(config, source)).step({0: tokens})[0]
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):

        def without(*names, axis=0, part=part):
            values = [source(name) for name in names]
            hit = [part in name and name.endswith("bias") for name in names]
            values = [v * 0 if h else v for v, h in zip(values, hit, strict=True)]
            return jnp.concatenate(values, axis)

        model = Decoder(config, without)
        assert np.abs(Stepper(model).step({0: tokens})[0] - full).max() > 1e-3, part


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True}), ("qwen2", {}),
     ("phi3", {})],
)  # fmt: skip
def test_the_decoder_reads_each_expected_tensor_once(model_type, changes):
    config = small_config(model_type, **changes)
    source, read = random_source(config), []

    def spy(*names, axis=0):
        read.extend(names)
        return source(*names, axis=axis)

    Decoder(config, spy)
    assert sorted(read) == sorted(expected_tensors(config))


def test_an_abstract_decoder_lowers_without_weights():
    config = small_config()
    _, weights = nnx.split(Decoder(config, abstract_source(config, jnp.bfloat16)))
    leaves = jax.tree.leaves(weights)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert not any(isinstance(leaf, jax.Array) for leaf in leaves)


@pytest.mark.parametrize(
    ("model_type", "mlp"), [("llama", ["gate_up", "down"]), ("qwen3_moe", ["router", "experts"])]
)
def test_instructions_have_the_names_of_their_layer_and_part(model_type, mlp):
    """What a profiler shows. Layers of one kind are lowered once all the same."""
    config = small_config(model_type, num_hidden_layers=3)
    model = Decoder(config, abstract_source(config, jnp.float32))
    sizes = {"num_pages": 4, "max_seqs": 2, "pages_per_seq": 2}
    state = jax.eval_shape(lambda: create_state(model, **sizes))
    rows = jnp.arange(2, dtype=jnp.int32)
    lowered = decode.lower(
        *split_model(model), state, Progress(rows, rows, rows), rows, rows, rows,
        Sampler.create(temperature=1.0), jnp.int32(4), chunk=4,
    )  # fmt: skip
    assert lowered.as_text().count("func private @_run_layer") == 1
    names = set(re.findall(r'op_name="([^"]*)"', lowered.compile().as_text()))
    parts = [f"attention/{part}" for part in ("norm", "qkv", "write_qkv", "attend", "out")]
    parts += ["mlp/norm", *(f"mlp/{part}" for part in mlp)]
    paths = [rf"layer_{layer}/[^/]*/{part}" for layer in range(3) for part in parts]
    for path in (*paths, "embed", "logits/norm", "logits/head", "sample"):
        assert any(re.search(rf"/{path}/", name) for name in names), path


def test_rms_norm_keeps_the_dtype_and_divides_by_the_root_mean_square():
    x = jnp.array([[3.0, -4.0], [0.0, 0.0]], jnp.bfloat16)
    out = rms_norm(x, jnp.array([1.0, 2.0], jnp.bfloat16), 1e-6)
    assert out.dtype == jnp.bfloat16
    root = 12.5**0.5
    np.testing.assert_allclose(
        np.asarray(out, np.float32), [[3 / root, -8 / root], [0, 0]], rtol=1e-2
    )


def test_rope_turns_by_position_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 2, 8)), jnp.float32) for _ in range(2))
    frequencies = inverse_frequencies(8, 100.0)

    def score(q_position, k_position):
        turned = [
            apply_rope(x, *rope_tables(jnp.array([p], jnp.int32), frequencies))
            for x, p in ((q, q_position), (k, k_position))
        ]
        return np.einsum("thd,thd->h", *turned)

    np.testing.assert_allclose(score(9, 4), score(5, 0), atol=1e-5)
    assert np.abs(score(9, 4) - score(9, 5)).max() > 1e-2
