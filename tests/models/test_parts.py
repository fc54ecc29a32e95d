# SPDX-License-Identifier: Apache-2.0
"""Models of your own, made of `Attention`, `DenseMLP` and `ExpertsMLP`, or of Flax modules."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from safetensors.numpy import save_file
from steppers import ids

import jax_paged as jp
from jax_paged import KVState, rope_tables
from jax_paged.models import (
    Attention,
    DenseMLP,
    Engine,
    ExpertsMLP,
    Stepper,
    generate,
    rms_norm,
    tensor_source,
)
from jax_paged.testing.experts import activate

EPS, HIDDEN, INNER, EXPERTS, VOCAB, HEAD_DIM = 1e-5, 32, 40, 5, 61, 16


@dataclasses.dataclass(frozen=True)
class Spec:
    """A layer: its window, how many dimensions turn, whether it has experts, what its MLP does.

    Dense layers have biases. Those of experts and their router come with gpt-oss's activation.
    """

    window: int | None = None
    rotary_dim: int = 0
    experts: bool = False
    activation: str = "silu"
    limit: float | None = None

    @property
    def has_bias(self):
        return not self.experts or self.activation == "swiglu_oai"


@dataclasses.dataclass(frozen=True)
class Config:
    layers: tuple[Spec, ...] = (
        Spec(window=6, rotary_dim=16),
        Spec(rotary_dim=8, activation="gelu_tanh"),
        Spec(experts=True),
        Spec(rotary_dim=16, experts=True, activation="swiglu_oai", limit=0.8),
    )
    vocab_size: int = VOCAB
    context_length: int = 64
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = HEAD_DIM

    @property
    def num_layers(self):
        return len(self.layers)


class Block(nnx.Module):
    """Attention and MLP side by side behind one norm, and a norm behind both."""

    def __init__(self, source, prefix, spec, config, weight_dtype):
        self.spec = spec
        self.before, self.after = (
            nnx.Param(source(f"{prefix}{name}_norm.weight")) for name in ("pre", "post")
        )
        heads = {"num_q_heads": config.num_q_heads, "num_kv_heads": config.num_kv_heads}
        options = {"weight_dtype": weight_dtype}
        does = {"activation": spec.activation, "limit": spec.limit, "bias": spec.has_bias}
        self.attention = Attention(
            source, prefix + "attention.", **heads, qkv_bias=True, qk_norm=True, eps=EPS,
            window=spec.window, **options,
        )  # fmt: skip
        if spec.experts:
            self.mlp = ExpertsMLP(
                source, prefix + "mlp.", experts_per_token=2, renormalize=spec.has_bias,
                router_bias=spec.has_bias, **does, **options,
            )  # fmt: skip
        else:
            self.mlp = DenseMLP(source, prefix + "mlp.", **does, **options)

    def __call__(self, x, state, batch, layer):
        half = max(self.spec.rotary_dim // 2, 4)
        frequencies = (
            np.zeros(4) if not self.spec.rotary_dim else 100.0 ** (-np.arange(half) / half)
        )
        tables = rope_tables(jnp.arange(64), frequencies)
        normed = rms_norm(x, self.before[...], EPS)
        out, state = self.attention(normed, state, batch, *tables, layer=layer, soft_cap=20.0)
        live = {"live": batch.slot_mapping >= 0} if self.spec.experts else {}
        return x + rms_norm(out + self.mlp(normed, **live), self.after[...], EPS), state


class Net(nnx.Module):
    """With the head as its embedding."""

    def __init__(self, source, config, weight_dtype=None):
        self.config, self.dtype = config, jnp.dtype(jnp.float32)
        self.embedding = nnx.Param(source("embedding.weight"))
        self.blocks = nnx.List(
            Block(source, f"blocks.{i}.", spec, config, weight_dtype)
            for i, spec in enumerate(config.layers)
        )

    def __call__(self, tokens, batch, state, *, logit_rows=None):
        x = self.embedding[...][tokens]
        for layer, block in enumerate(self.blocks):
            x, state = block(x, state, batch, layer)
        x = x if logit_rows is None else jnp.take(x, logit_rows, axis=0, mode="clip")
        return x @ self.embedding[...].T, state


# What the tensors are called in the file.
NAMES = {
    "embedding.weight": "wte", "blocks.": "h.", "attention.": "attn.", "_proj.weight": ".w",
    "_proj.bias": ".b", "_norm.weight": ".scale", "gate.weight": "router.w",
    "gate.bias": "router.b",
}  # fmt: skip


def rename(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


@pytest.fixture(scope="module")
def tensors():
    """By the names of the file."""
    rng, heads, kv = np.random.default_rng(5), 4 * HEAD_DIM, 2 * HEAD_DIM
    shapes = {"wte": (VOCAB, HIDDEN)}
    for i, spec in enumerate(Config.layers):
        shapes |= {f"h.{i}.{name}.scale": (HIDDEN,) for name in ("pre", "post")}
        shapes |= {f"h.{i}.attn.{name}.scale": (HEAD_DIM,) for name in "qk"}
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            shapes |= {f"h.{i}.attn.{name}.w": (rows, HIDDEN), f"h.{i}.attn.{name}.b": (rows,)}
        shapes[f"h.{i}.attn.o.w"] = (HIDDEN, heads)
        mlp = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
        if spec.experts:
            mlp = {
                f"experts.{e}.{name}": shape for e in range(EXPERTS) for name, shape in mlp.items()
            }
            mlp["router"] = (EXPERTS, HIDDEN)
        for name, shape in mlp.items():
            shapes[f"h.{i}.mlp.{name}.w"] = shape
            if spec.has_bias:
                shapes[f"h.{i}.mlp.{name}.b"] = shape[:1]
    found = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        scale = 1 if len(shape) == 1 or name == "wte" else shape[-1] ** -0.5
        found[name] = values * np.float32(scale) + np.float32(name.endswith("scale"))
    return found


@pytest.fixture(scope="module")
def source(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "model.safetensors"
    save_file(tensors, path)
    return tensor_source(path, rename=rename)


def dense_logits(tensors, tokens):
    """The model in float64 and without a cache."""

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale

    def turn(x, dim):
        half = dim // 2
        angle = np.arange(count)[:, None, None] * 100.0 ** (-np.arange(half) / max(half, 1))
        first, second = x[..., :half], x[..., half:dim]
        cos, sin = np.cos(angle), np.sin(angle)
        pair = (first * cos - second * sin, second * cos + first * sin, x[..., dim:])
        return np.concatenate(pair, -1)

    def gated(x, name, weights, spec):
        def project(x, part):
            return x @ weights[f"{name}.{part}.w"].T + weights.get(f"{name}.{part}.b", 0)

        gate, up = project(x, "gate"), project(x, "up")
        return project(activate(gate, up, spec.activation, spec.limit), "down")

    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    count, x = len(tokens), tensors["wte"][tokens]
    ordered = np.arange(count)[:, None] - np.arange(count)
    for i, spec in enumerate(Config.layers):
        w = {k.removeprefix(f"h.{i}."): v for k, v in tensors.items() if k.startswith(f"h.{i}.")}
        h = norm(x, w["pre.scale"])
        q, k, v = (
            (h @ w[f"attn.{n}.w"].T + w[f"attn.{n}.b"]).reshape(count, -1, HEAD_DIM) for n in "qkv"
        )
        q, k = (
            turn(norm(y, w[f"attn.{n}.scale"]), spec.rotary_dim) for y, n in ((q, "q"), (k, "k"))
        )
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, 1)) * HEAD_DIM**-0.5
        scores = 20 * np.tanh(scores / 20)
        seen = (ordered >= 0) & (ordered < (spec.window or count))
        scores = np.where(seen, np.exp(scores), 0)
        scores /= scores.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", scores, np.repeat(v, 2, 1)).reshape(count, -1)
        out = out @ w["attn.o.w"].T
        if spec.experts:
            p = np.exp(h @ w["mlp.router.w"].T + w.get("mlp.router.b", 0))
            p /= p.sum(-1, keepdims=True)
            for t in range(count):
                best = np.argsort(-p[t])[:2]
                share = p[t, best] / (p[t, best].sum() if spec.has_bias else 1)
                for e, part in zip(best, share, strict=True):
                    out[t] += part * gated(h[t], f"mlp.experts.{e}", w, spec)
        else:
            out += gated(h, "mlp", w, spec)
        x = x + norm(out, w["post.scale"])
    return x @ tensors["wte"].T


def test_a_model_of_parts_says_what_a_float64_model_says(source, tensors):
    tokens = ids(20)
    tokens = [token % VOCAB for token in tokens]
    expected, stepper = dense_logits(tensors, tokens), Stepper(Net(source, Config()))
    logits = stepper.step({0: tokens[:13], 1: tokens[:2]}, padded_to=20)
    np.testing.assert_allclose(logits[0], expected[:13], atol=2e-4)
    np.testing.assert_allclose(logits[1], expected[:2], atol=2e-4)
    logits = stepper.step({1: tokens[2:15], 0: tokens[13:]}, padded_to=20)
    np.testing.assert_allclose(logits[0], expected[13:], atol=2e-4)
    np.testing.assert_allclose(logits[1], expected[2:15], atol=2e-4)


def test_a_model_of_parts_is_generated_from_and_served(source, tensors):
    prompts, steps = [[5, 6, 7, 8], [3]], 8
    model = Net(source, Config())
    tokens = generate(model, prompts, max_new_tokens=steps).tokens
    for prompt, new in zip(prompts, tokens, strict=True):
        logits = dense_logits(tensors, prompt + new)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new
    engine = Engine(model, num_pages=8, max_seqs=2, max_tokens=8, progress=False)
    requests = [engine.submit(prompt, max_new_tokens=steps) for prompt in prompts]
    engine.run()
    assert [request.tokens for request in requests] == tokens


def test_parts_may_have_8_bit_weights(source):
    tokens = [token % VOCAB for token in ids(20)]
    whole = Stepper(Net(source, Config())).step({0: tokens})[0]
    model = Net(source, Config(), weight_dtype="int8")
    assert model.blocks[0].attention.qkv[...].dtype == jnp.int8
    rounded = Stepper(model).step({0: tokens})[0]
    np.testing.assert_allclose(rounded, whole, atol=0.05 * np.abs(whole).max())
    assert np.abs(rounded - whole).max() > 0


HEADS = {"num_q_heads": 4, "num_kv_heads": 2}
MISFITS = {  # what is built → message
    "columns": (
        lambda source: Attention(source, "blocks.0.attention.", num_q_heads=5, num_kv_heads=2),
        "blocks.0.attention.o_proj.weight: expected columns of num_q_heads=5 heads, got 64",
    ),
    "rows": (
        lambda source: Attention(source, "blocks.0.attention.", num_q_heads=4, num_kv_heads=4),
        "blocks.0.attention.qkv_proj.weight: expected 192 rows for 4 + 2 · 4 heads of 16, got 128",
    ),
    "window": (
        lambda source: Attention(source, "blocks.0.attention.", **HEADS, window=0),
        "window: expected an integer of at least 1, got 0",
    ),
    "weight_dtype": (
        lambda source: DenseMLP(source, "blocks.0.mlp.", weight_dtype="int3"),
        "weight_dtype: expected None or ",
    ),
    "experts": (
        lambda source: ExpertsMLP(source, "blocks.2.mlp.", experts_per_token=6),
        "experts_per_token: expected at most the 5 experts of blocks.2.mlp.gate.weight, got 6",
    ),
    "activation": (
        lambda source: DenseMLP(source, "blocks.0.mlp.", activation="relu"),
        "activation: expected 'silu' or 'gelu' or 'gelu_tanh' or 'swiglu_oai', got 'relu'",
    ),
    "limit": (
        lambda source: ExpertsMLP(source, "blocks.2.mlp.", experts_per_token=2, limit=7.0),
        "limit: expected None beside activation='silu', got 7.0",
    ),
    "no limit": (
        lambda source: DenseMLP(source, "blocks.0.mlp.", activation="swiglu_oai"),
        "limit: expected a scalar beside activation='swiglu_oai', got None",
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("what", MISFITS)
def test_tensors_that_do_not_fit_are_named(what, source):
    build, message = MISFITS[what]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(source)


# Modules of Flax around `write_qkv` and `attend`.

WIDTH, LAYERS = (4 + 2 * 2) * HEAD_DIM, 2


class LinenAttention(linen.Module):
    """The state comes as an argument and goes as a result: it is no variable of the module."""

    layer: int

    @linen.compact
    def __call__(self, x, state, batch, cos, sin):
        qkv = linen.Dense(WIDTH, name="qkv")(x)
        q, state = jp.write_qkv(qkv, state, batch, cos, sin, layer=self.layer, num_q_heads=4)
        out = jp.attend(q, state, batch, layer=self.layer).reshape(len(x), -1)
        return linen.Dense(HIDDEN, use_bias=False, name="out")(out), state


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, state, batch, cos, sin):
        for layer in range(LAYERS):
            normed = linen.RMSNorm(epsilon=EPS)(x)
            out, state = LinenAttention(layer)(normed, state, batch, cos, sin)
            x = x + out
        return x, state


class NNXAttention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.out = nnx.Linear(4 * HEAD_DIM, HIDDEN, use_bias=False, rngs=rngs)

    def __call__(self, x, state, batch, cos, sin, layer):
        qkv = self.qkv(x)
        q, state = jp.write_qkv(qkv, state, batch, cos, sin, layer=layer, num_q_heads=4)
        return self.out(jp.attend(q, state, batch, layer=layer).reshape(len(x), -1)), state


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List(nnx.RMSNorm(HIDDEN, epsilon=EPS, rngs=rngs) for _ in range(LAYERS))
        self.attentions = nnx.List(NNXAttention(rngs) for _ in range(LAYERS))

    def __call__(self, x, state, batch, cos, sin):
        for layer, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            out, state = attention(norm(x), state, batch, cos, sin, layer)
            x = x + out
        return x, state


class PartsNet(nnx.Module):
    """The same from `Attention`, with the weights of the linen module."""

    def __init__(self, params):
        norms = [params[f"RMSNorm_{i}"] for i in range(LAYERS)]
        self.scales = nnx.List(nnx.Param(norm["scale"]) for norm in norms)
        self.attentions = nnx.List(
            Attention(functools.partial(self.source, params), f"{i}.", **HEADS, qkv_bias=True,
                      fused=True)
            for i in range(LAYERS)
        )  # fmt: skip

    @staticmethod
    def source(params, *names, axis=0, dtype=None):
        (name,) = names
        layer, module, kind = name.split(".")
        module = {"qkv_proj": "qkv", "o_proj": "out"}[module]
        found = params[f"LinenAttention_{layer}"][module]
        return found["kernel"].T if kind == "weight" else found["bias"]

    def __call__(self, x, state, batch, cos, sin):
        for layer, (scale, attention) in enumerate(zip(self.scales, self.attentions, strict=True)):
            normed = rms_norm(x, scale[...], EPS)
            out, state = attention(normed, state, batch, cos, sin, layer=layer)
            x = x + out
        return x, state


def new_state():
    return KVState.create(
        num_layers=LAYERS, num_kv_heads=2, head_dim=HEAD_DIM, dtype=jnp.float32, num_pages=8,
        page_size=4, max_seqs=2, pages_per_seq=4,
    )  # fmt: skip


def run(call, weights, steps):
    """What a module gives for x, [rows, tokens, HIDDEN], in steps of so many tokens a row."""
    x = np.random.default_rng(2).standard_normal((2, sum(steps), HIDDEN), np.float32)
    state, begin, outs = new_state(), 0, []

    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights, state, flat):
        state, batch, status = state.append([0, 1], len(flat) // 2, num_tokens=len(flat))
        tables = rope_tables(jnp.arange(8), jp.inverse_frequencies(HEAD_DIM, 100.0))
        out, state = call(weights, flat, state, batch, *tables)
        return out, state, status

    for count in steps:
        flat = x[:, begin : begin + count].reshape(-1, HIDDEN)
        out, state, status = step(weights, state, flat)
        jp.check(status)
        outs.append(np.asarray(out).reshape(2, count, HIDDEN))
        begin += count
    return np.concatenate(outs, axis=1)


def test_flax_modules_take_the_state_as_an_argument_and_return_it():
    linen_net, rngs = LinenNet(), nnx.Rngs(0)

    @jax.jit
    def init(key):
        state, batch, _ = new_state().append([0], 1)
        tables = rope_tables(
            jnp.arange(8, dtype=jnp.int32), jp.inverse_frequencies(HEAD_DIM, 100.0)
        )
        return linen_net.init(key, jnp.zeros((1, HIDDEN), jnp.float32), state, batch, *tables)

    variables = init(jax.random.key(0))
    assert variables.keys() == {"params"}  # no pages among them
    params = variables["params"]
    parts, nnx_net = PartsNet(params), NNXNet(rngs)
    for layer in range(LAYERS):
        found = params[f"LinenAttention_{layer}"]
        nnx_net.norms[layer].scale[...] = params[f"RMSNorm_{layer}"]["scale"]
        attention = nnx_net.attentions[layer]
        attention.qkv.kernel[...] = found["qkv"]["kernel"]
        attention.qkv.bias[...] = found["qkv"]["bias"]
        attention.out.kernel[...] = found["out"]["kernel"]
    calls = {"linen": (linen_net.apply, variables)}
    for name, net in (("nnx", nnx_net), ("parts", parts)):
        graph, weights = nnx.split(net)
        merge = functools.partial(nnx.merge, graph)
        calls[name] = (lambda weights, *args, merge=merge: merge(weights)(*args), weights)
    whole = run(*calls["linen"], [7])
    assert np.abs(whole[:, 1:] - whole[:, :-1]).max() > 0.1
    for call in calls.values():
        np.testing.assert_allclose(run(*call, [4, 1, 1, 1]), whole, atol=2e-5)
