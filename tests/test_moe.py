"""Routing and the mixture of experts against a float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.moe import moe_experts, route


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def make_case(tokens, num_experts, k, hidden=16, inner=12, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden))
    gate_up = rng.standard_normal((num_experts, 2 * inner, hidden)) / hidden**0.5
    down = rng.standard_normal((num_experts, hidden, inner)) / inner**0.5
    experts = np.array([rng.permutation(num_experts)[:k] for _ in range(tokens)]).reshape(-1, k)
    weights = rng.random((tokens, k))
    as_jax = [jnp.asarray(a, dtype) for a in (x, gate_up, down)]
    return [*as_jax, jnp.asarray(experts, jnp.int32), jnp.asarray(weights, jnp.float32)]


def oracle(x, gate_up, down, experts, weights):
    x, gate_up, down, weights = (np.asarray(a, np.float64) for a in (x, gate_up, down, weights))
    out = np.zeros_like(x)
    inner = down.shape[2]
    for t in range(len(x)):
        for expert, weight in zip(np.asarray(experts)[t], weights[t], strict=True):
            gate, up = np.split(gate_up[expert] @ x[t], [inner])
            out[t] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k", "block_size"),
    [
        (1, 4, 1, None),
        (1, 8, 8, 3),
        (5, 64, 4, None),
        (7, 4, 2, 1),
        (7, 4, 2, 16),
        (70, 5, 3, None),
        (70, 5, 3, 3),
    ],
)
def test_experts_match_a_float64_loop(tokens, num_experts, k, block_size):
    case = make_case(tokens, num_experts, k)
    out = moe_experts(*case, block_size=block_size)
    np.testing.assert_allclose(out, oracle(*case), atol=2e-5, rtol=1e-5)


def test_all_tokens_on_one_expert_match_a_float64_loop():
    x, gate_up, down, experts, weights = make_case(33, 6, 1)
    case = (x, gate_up, down, jnp.full_like(experts, 4), weights)
    np.testing.assert_allclose(moe_experts(*case, block_size=8), oracle(*case), atol=2e-5)


def test_bf16_experts_stay_within_bf16_rounding_of_float64():
    case = make_case(9, 4, 2, dtype=jnp.bfloat16)
    out = moe_experts(*case)
    assert out.dtype == jnp.bfloat16
    expected = oracle(*case)
    # Three bf16 roundings (hidden, product, expert output) of 2^-9 each, over sums of 16 terms.
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.04)


def test_experts_that_nobody_chose_are_never_read():
    x, gate_up, down, experts, weights = make_case(6, 8, 2)
    chosen = np.isin(np.arange(8), np.asarray(experts) % 4)
    case = (x, gate_up, down, experts % 4, weights)
    poisoned = [jnp.where(chosen[:, None, None], a, jnp.nan) for a in (gate_up, down)]
    out = moe_experts(x, *poisoned, *case[3:])
    np.testing.assert_allclose(out, oracle(*case), atol=2e-5)


@pytest.mark.parametrize("block_size", [1, 4])
def test_dead_tokens_give_zero_and_read_no_expert(block_size):
    x, gate_up, down, experts, weights = make_case(5, 8, 1)
    experts = jnp.array([[0], [7], [1], [7], [2]], jnp.int32)
    live = jnp.array([True, False, True, False, True])
    x = jnp.where(live[:, None], x, jnp.nan)
    gate_up = gate_up.at[7].set(jnp.nan)
    out = moe_experts(x, gate_up, down, experts, weights, live=live, block_size=block_size)
    rows = np.asarray(live)
    expected = oracle(x[rows], gate_up, down, experts[rows], weights[rows])
    np.testing.assert_allclose(out[rows], expected, atol=2e-5)
    np.testing.assert_array_equal(out[~rows], 0)


def test_no_live_token_gives_zeros():
    case = make_case(3, 4, 2)
    out = moe_experts(*case, live=jnp.zeros(3, bool))
    np.testing.assert_array_equal(out, np.zeros((3, 16)))


def test_a_token_gets_the_same_bits_whatever_its_batch():
    x, gate_up, down, experts, weights = make_case(12, 6, 3)
    together = moe_experts(x, gate_up, down, experts, weights, block_size=1)
    alone = moe_experts(x[7:8], gate_up, down, experts[7:8], weights[7:8], block_size=1)
    np.testing.assert_array_equal(together[7:8], alone)


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_is_softmax_over_all_experts_then_top_k(renormalize):
    logits = np.random.default_rng(1).standard_normal((11, 9)).astype(np.float32)
    experts, weights = route(jnp.asarray(logits), 4, renormalize=renormalize)
    probabilities = softmax(logits.astype(np.float64))
    expected = np.argsort(-probabilities, axis=-1)[:, :4]
    np.testing.assert_array_equal(experts, expected)
    expected_weights = np.take_along_axis(probabilities, expected, -1)
    if renormalize:
        expected_weights /= expected_weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)


def test_equal_logits_choose_the_smaller_expert_first():
    experts, _ = route(jnp.zeros((2, 5)), 3, renormalize=True)
    np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)


def test_no_array_of_all_experts_is_copied_per_block():
    case = make_case(2, 32, 2, hidden=64, inner=64)
    text = jax.jit(moe_experts).lower(*case).compile().as_text() or ""
    stack = "f32[32,128,64]"
    copies = [line for line in text.splitlines() if f"= {stack}" in line and " copy(" in line]
    assert stack in text
    assert not copies
