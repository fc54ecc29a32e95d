# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: attention over latent rows and experts in groups, in all that runs them."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import make_adapter
from fp8_folder import write_pair
from in_all_that_runs import SERVED, assert_likely, assert_served
from safetensors.numpy import load_file, save_file
from served_engines import hand_over
from tiers import first_of

from jax_paged import KVState
from jax_paged.models import (
    Decoder,
    Engine,
    config_from_hf,
    generate,
    load_checkpoint,
    score,
    token_logits,
    with_adapter,
)
from jax_paged.models.decoder import latent
from jax_paged.models.decoder.generation import create_state
from jax_paged.models.decoder.latent import LatentAttention
from jax_paged.models.decoder.moe import route
from jax_paged.models.decoder.parameters import expected_tensors, random_source
from jax_paged.models.testing import Stepper, small_config, small_hf_config, stored_tensors
from jax_paged.testing import pool_sized_ops

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 97, count).tolist() for count in (40, 3, 21, 1)]
NEW = 14
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.8,
    "mscale_all_dim": 0.6,
}  # fmt: skip
CHANGES = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "rope_scaling": YARN},
    "deepseek_v3": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
}
KINDS = tuple(CHANGES)


def make_model(kind, **options):
    config = small_config(kind, **CHANGES[kind])
    return Decoder(config, random_source(config, 5), **options)


@pytest.fixture(scope="module", params=first_of(["deepseek_v3", "deepseek_v2"], 1))
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, PROMPTS, max_new_tokens=NEW).tokens


def chosen(config, scores, bias):
    """(experts, weights) of one token, looked for one by one."""
    wanted, best = scores + bias, 2 if config.router_scores == "sigmoid" else 1
    groups = np.split(np.arange(len(scores)), config.expert_groups)
    goods = [np.sort(wanted[group])[-best:].sum() for group in groups]
    kept = [groups[g] for g in np.argsort(goods)[::-1][: config.groups_per_token]]
    allowed = np.concatenate(kept)
    experts = allowed[np.argsort(-wanted[allowed])][: config.experts_per_token]
    weights = scores[experts] / (scores[experts].sum() if config.norm_topk_prob else 1)
    return experts, weights * config.expert_scale


def scores_of(config, logits):
    if config.router_scores == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def dense_logits(config, source, tokens):
    """The whole model in float64 numpy, with K and V of each head made: nothing is absorbed."""
    sizes, heads, count = config.latent, config.num_q_heads, len(tokens)

    def get(name):
        return np.asarray(source(name + ".weight"), np.float64)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * get(name)

    def turn(x):
        angle = np.arange(count)[:, None, None] * config.rope.frequencies(sizes.rope_dim)
        z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle) * config.rope.attention_factor
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    def mlp(x, name):
        gate, up = (x @ get(f"{name}{part}_proj").T for part in ("gate", "up"))
        return gate / (1 + np.exp(-gate)) * up @ get(name + "down_proj").T

    def attention(h, name):
        q = h
        if sizes.q_rank is not None:
            q = norm(h @ get(name + "q_a_proj").T, name + "q_a_layernorm")
        q = q @ get(name + ("q_proj" if sizes.q_rank is None else "q_b_proj")).T
        q = q.reshape(count, heads, -1)
        row = h @ get(name + "kv_a_proj_with_mqa").T
        latent = norm(row[:, : sizes.kv_rank], name + "kv_a_layernorm")
        kv = (latent @ get(name + "kv_b_proj").T).reshape(count, heads, -1)
        k, v = np.split(kv, [sizes.nope_dim], axis=2)
        turned = turn(row[:, None, sizes.kv_rank :])
        k = np.concatenate([k, np.repeat(turned, heads, 1)], 2)
        q = np.concatenate([q[..., : sizes.nope_dim], turn(q[..., sizes.nope_dim :])], 2)
        logits = np.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        p = scores_of(dataclasses.replace(config, router_scores="softmax"),
                      np.where(np.tri(count, dtype=bool), logits, -np.inf))  # fmt: skip
        return np.einsum("hqk,khd->qhd", p, v).reshape(count, -1) @ get(name + "o_proj").T

    def experts(h, name):
        scores, bias = scores_of(config, h @ get(name + "gate").T), np.zeros(config.num_experts)
        if config.choice_bias:
            bias = np.asarray(source(name + "gate.e_score_correction_bias"), np.float64)
        gate, up, down = (get(f"{name}experts.{part}_proj") for part in ("gate", "up", "down"))
        out = mlp(h, name + "shared_experts.")
        for t in range(count):
            for e, weight in zip(*chosen(config, scores[t], bias), strict=True):
                g = gate[e] @ h[t]
                out[t] += weight * down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ h[t]))
        return out

    x = get("model.embed_tokens")[tokens]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        x = x + attention(norm(x, layer + "input_layernorm"), layer + "self_attn.")
        h = norm(x, layer + "post_attention_layernorm")
        x = x + (experts if config.moe_layers[i] else mlp)(h, layer + "mlp.")
    return norm(x, "model.norm") @ get("lm_head").T


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_prompt_is_what_a_float64_model_makes_of_k_and_v(kind, implementation):
    model = make_model(kind, implementation=implementation)
    want = dense_logits(model.config, random_source(model.config, 5), PROMPTS[0])
    got = Stepper(model).step({1: PROMPTS[0]})[1]
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want).max() > 1


def test_a_mixed_batch_equals_its_rows_alone(model):
    rows = {row: prompt for row, prompt in enumerate(PROMPTS) if len(prompt) > 1}
    alone = {row: Stepper(model).step({0: tokens})[0] for row, tokens in rows.items()}
    stepper, got = Stepper(model), {row: [] for row in rows}
    for step in ({0: slice(0, 30), 2: slice(0, 1)}, {2: slice(1, 20), 1: slice(0, 3)},
                 {0: slice(30, 31), 2: slice(20, 21)}, {0: slice(31, 40)}):  # fmt: skip
        fed = {row: rows[row][part] for row, part in step.items()}
        for row, logits in stepper.step(fed, padded_to=40).items():
            got[row].append(logits)
    for row, parts in got.items():
        np.testing.assert_allclose(np.concatenate(parts), alone[row], atol=1e-4)


def test_prompts_get_the_same_by_k_and_v_as_by_rows(model, monkeypatch):
    def logits():
        stepper = Stepper(model, max_seqs=2)
        return [
            stepper.step({1: PROMPTS[0][:30]}, padded_to=32)[1],
            stepper.step({0: PROMPTS[2], 1: PROMPTS[0][30:]})[1],
        ]

    by_keys = logits()
    monkeypatch.setattr(latent, "_PROMPT_TOKENS", 10**9)
    monkeypatch.setattr(LatentAttention, "_attend_in_two", None)
    jax.clear_caches()
    for got, want in zip(by_keys, logits(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
        assert np.any(got != want)


def test_a_new_row_has_the_same_bits_beside_rows_that_go_on(model):
    both, alone = (Stepper(model, max_seqs=2) for _ in range(2))
    both.step({1: PROMPTS[0][:20]})
    rows = {0: PROMPTS[2], 1: PROMPTS[0][20:40]}
    got = both.step(rows)[0]
    np.testing.assert_array_equal(got, alone.step(rows)[0])


def test_tokens_are_the_argmax_of_a_full_prefill(model, expected):
    for prompt, new in zip(PROMPTS, expected, strict=True):
        logits = token_logits(model, prompt + new)
        assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("options", first_of(SERVED.values(), 2), ids=SERVED)
def test_the_engine_gives_the_tokens_of_generate(model, expected, options):
    assert_served(model, PROMPTS, expected, NEW, options)


def test_a_draft_model_and_a_hand_over_give_the_tokens_of_generate(model, expected):
    sizes = {"num_pages": 40, "max_seqs": 3, "page_size": 4, "max_tokens": 12}
    sizes |= {"preemption": "swap", "max_drafts": 2, "draft_model": make_model("deepseek_v2")}
    prefiller, engine = (Engine(model, **sizes) for _ in range(2))
    assert hand_over(prefiller, engine, PROMPTS[:3], max_new_tokens=NEW) == expected[:3]
    assert engine.num_accepted > 0


@pytest.mark.deep
def test_likelihoods_are_those_of_the_logits(model):
    assert_likely(model, PROMPTS[0])


def test_bf16_rows_under_f32_weights_change_the_logits_a_little(model):
    state = create_state(model, num_pages=16, max_seqs=1, pages_per_seq=16, kv_dtype="bfloat16")
    got = Stepper(model, max_seqs=1, state=state).step({0: PROMPTS[0]})[0]
    want = token_logits(model, PROMPTS[0])
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02


@pytest.mark.parametrize(("weight_dtype", "loss"), [("int8", 0.05), ("fp8", 0.2)])
def test_8_bit_weights_change_the_logits_by_their_rounding_alone(model, weight_dtype, loss):
    rounded = Decoder(model.config, random_source(model.config, 5), weight_dtype=weight_dtype)
    attention = rounded.layers[0].attention
    first = attention.qkv if model.config.latent.q_rank is None else attention.qkv_down
    assert first[...].dtype.itemsize == 1
    assert attention.k_up[...].dtype == jnp.float32
    want, got = (token_logits(one, PROMPTS[0]) for one in (model, rounded))
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < loss


def test_packed_weights_give_the_same_bits(model):
    want, got = (token_logits(one, PROMPTS[0]) for one in (model, model.packed()))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_of_the_best_groups_are_chosen(scores, groups, kept, renormalize):
    config = dataclasses.replace(
        small_config("deepseek_v3", n_routed_experts=12, n_group=1, topk_group=1),
        router_scores=scores, expert_groups=groups, groups_per_token=kept, experts_per_token=2,
        norm_topk_prob=renormalize, expert_scale=2.5,
    )  # fmt: skip
    rng = np.random.default_rng(groups)
    logits, bias = rng.standard_normal((50, 12)), rng.standard_normal(12)
    for choice_bias in (None, bias):
        experts, weights = route(
            jnp.asarray(logits, jnp.float32), 2, renormalize=renormalize, scores=scores,
            choice_bias=None if choice_bias is None else jnp.asarray(bias, jnp.float32),
            groups=groups, groups_per_token=kept, scale=2.5,
        )  # fmt: skip
        for t, row in enumerate(scores_of(config, logits)):
            want = chosen(config, row, 0 * bias if choice_bias is None else bias)
            np.testing.assert_array_equal(experts[t], want[0])
            np.testing.assert_allclose(weights[t], want[1], rtol=1e-5)


def test_sigmoids_of_nothing_have_no_weight_and_are_no_nan():
    logits = jnp.full((1, 4), -200.0)
    _, weights = route(logits, 2, renormalize=True, scores="sigmoid")
    np.testing.assert_array_equal(weights, 0)


def folder(path, kind, **changes):
    raw = small_hf_config(kind, **CHANGES[kind] | changes)
    config = config_from_hf(raw)
    source = random_source(config, 5)
    tensors = {name: np.asarray(source(name)) for name in expected_tensors(config)}
    path.joinpath("config.json").write_text(json.dumps(raw))
    save_file(stored_tensors(config, tensors), path / "model.safetensors")
    return config


def test_layers_that_predict_further_tokens_are_skipped_where_the_file_tells_of_them(tmp_path):
    folder(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    file = tmp_path / "model.safetensors"
    more = {"model.layers.3.eh_proj.weight": np.ones((4, 8), np.float32)}
    save_file(load_file(file) | more, file)
    model, config, _ = load_checkpoint(tmp_path, jnp.float32)
    assert config.nextn_layers == 1
    want = token_logits(make_model("deepseek_v3"), PROMPTS[0])
    np.testing.assert_array_equal(token_logits(model, PROMPTS[0]), want)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"'model.layers.3.eh_proj.weight' .* has no place"):
        load_checkpoint(tmp_path)


def test_fp8_blocks_stay_and_what_is_applied_by_head_is_widened(tmp_path):
    sizes = {
        "hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 40,
        "moe_intermediate_size": 128,
    }  # fmt: skip
    paths = write_pair(tmp_path, "deepseek_v3", head_dim=8, **sizes)
    fp8, wide = (load_checkpoint(path, jnp.float32)[0] for path in paths)
    attention = fp8.layers[0].attention
    dtypes = {attention.qkv_down[...].dtype, attention.q_up[...].dtype}
    assert dtypes == {jnp.dtype("float8_e4m3fn")}
    np.testing.assert_array_equal(attention.k_up[...], wide.layers[0].attention.k_up[...])
    np.testing.assert_allclose(
        score(fp8, PROMPTS[0]), score(wide, PROMPTS[0]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("count", [1, 16], ids=["decode", "prefill"])
def test_a_step_copies_no_pool(count):
    model = make_model("deepseek_v3")
    state = create_state(model, num_pages=2048, max_seqs=4, pages_per_seq=64)

    def step(model, state):
        state, _ = state.reserve(jnp.arange(4), count)
        state, batch, _ = state.step(jnp.arange(4), count, num_tokens=4 * count)
        return model(jnp.zeros(4 * count, jnp.int32), batch, state)

    program = jax.jit(step, donate_argnums=1).lower(model, state).compile()
    assert pool_sized_ops(program, state.groups[0].k_pages) == []


REFUSED = {
    "adapters": (
        lambda m: with_adapter(m, make_adapter(small_config("llama", num_hidden_layers=3), 3)),
        "model: expected a model without latent attention, where adapters are used, got one of",
    ),
    "adapters of an engine": (
        lambda m: Engine(m, num_pages=8, max_seqs=1, max_tokens=8, max_adapters=1),
        "model: expected a model without latent attention, where adapters are used, got one of",
    ),
    "8-bit rows": (
        lambda m: generate(m, [[1]], max_new_tokens=1, kv_dtype="int8"),
        "kv_dtype: expected 'auto' or 'bfloat16' for a model of latent rows, got 'int8'",
    ),
    "a state of K and V": (
        lambda m: generate(m, [[1]], max_new_tokens=1, state=KVState.create(
            num_layers=3, num_pages=4, page_size=4, num_kv_heads=4, head_dim=24, max_seqs=1,
            pages_per_seq=4, dtype="float32",
        )),
        "state: expected one whose layers are all 'mla', got ('full',)",
    ),
    "rows of another width": (
        lambda m: generate(m, [[1]], max_new_tokens=1, state=KVState.create(
            layer_kinds=["mla"] * 3, num_pages=4, page_size=4, latent_dim=40, max_seqs=1,
            pages_per_seq=4, dtype="float32",
        )),
        "state.k_pages: expected float32[3, 4, 4, 32], as the model has them, got float32[3, 4, 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_built_is_refused_by_name(model, what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(model)
