# SPDX-License-Identifier: Apache-2.0
"""A training process that draws its samples from an engine of its own: it learns, on-policy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_paged as jp
from jax_paged.models import Engine

HEADS, DIM, WIDTH, VOCAB = 2, 8, 16, 24
WANTED, PROMPTS, SAMPLES, NEW, ROUNDS = 7, [[1, 2, 3], [5]], 8, 8, 20


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB
    context_length: int = 32
    num_layers: int = 1
    num_kv_heads: int = HEADS
    head_dim: int = DIM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
    """One layer of attention between an embedding and itself."""

    weights: dict[str, Any]
    config: Config = dataclasses.field(default=Config(), metadata={"static": True})

    @property
    def dtype(self):
        return jnp.float32

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        x, (q, k, v) = heads_of(self.weights, tokens)
        state = jp.write(k, v, state, batch, layer=0)
        x = x + jp.attend(q, state, batch, layer=0).reshape(len(tokens), -1) @ self.weights["out"]
        x = x if logit_rows is None else x[logit_rows]
        return x @ self.weights["embedding"].T, state


def heads_of(weights, tokens):
    x = weights["embedding"][tokens]
    qkv = (x @ weights["qkv"]).reshape(*tokens.shape, 3 * HEADS, DIM)
    return x, jnp.split(qkv, 3, axis=-2)


def training_forward(weights, tokens):
    """Log-probabilities of tokens[:, 1:], without pages: what a trainer differentiates."""
    x, (q, k, v) = heads_of(weights, tokens)
    logits = jnp.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
    sees = jnp.tri(tokens.shape[1], dtype=bool)
    shares = jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bhij,bjhd->bihd", shares, v).reshape(*tokens.shape, -1)
    every = jax.nn.log_softmax((x + out @ weights["out"]) @ weights["embedding"].T, axis=-1)
    return jnp.take_along_axis(every[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


@jax.jit
def learn(weights, tokens, is_new, advantages):
    """One step up the gradient of the mean of advantage · log p (Williams, 1992)."""

    def loss(weights):
        own = jnp.sum(training_forward(weights, tokens) * is_new, axis=1)
        return -jnp.mean(own * advantages)

    return jax.tree.map(lambda w, g: w - 0.3 * g, weights, jax.grad(loss)(weights))


def test_rewards_rise_and_log_probabilities_are_the_trainers():
    sizes = {"embedding": (VOCAB, WIDTH), "qkv": (WIDTH, 3 * HEADS * DIM)}
    sizes["out"] = (HEADS * DIM, WIDTH)
    rng = np.random.default_rng(0)
    weights = {k: jnp.asarray(rng.standard_normal(s, "f4") * 0.3) for k, s in sizes.items()}
    engine = Engine(
        Policy(weights), num_pages=40, max_seqs=8, page_size=4, max_tokens=32, logprobs=0
    )
    programs, rewards = dict(engine._runner.steps), []
    for number in range(ROUNDS):
        made = engine.generate(PROMPTS, n=SAMPLES, max_new_tokens=NEW, temperature=1.0, seed=number)
        advantages, tokens, is_new, told = [], [], [], []
        for of_prompt in made:
            counts = np.array([request.tokens.count(WANTED) / NEW for request in of_prompt])
            rewards.append(counts.mean())
            advantages += ((counts - counts.mean()) / (counts.std() + 1e-3)).tolist()
            for request in of_prompt:
                text = [*request.prompt.tolist(), *request.tokens]
                begin = len(request.prompt) - 1
                padding = len(PROMPTS[0]) + NEW - len(text)
                tokens.append(text + [0] * padding)
                is_new.append([0.0] * begin + [1.0] * NEW + [0.0] * padding)
                told.append([x.model for x in request.logprobs])
        tokens, is_new = jnp.asarray(tokens, jnp.int32), jnp.asarray(is_new, jnp.float32)
        own = np.asarray(training_forward(weights, tokens))[np.asarray(is_new) > 0]
        np.testing.assert_allclose(np.ravel(told), own, atol=1e-4)
        weights = learn(weights, tokens, is_new, jnp.asarray(advantages, jnp.float32))
        engine.update_weights(Policy(weights))
    first, last = np.mean(rewards[:6]), np.mean(rewards[-6:])
    assert last > first + 0.3, (first, last)
    assert engine._runner.steps == programs
    assert engine.weight_version == ROUNDS
