# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in fp8 with a scale for each block of 128 x 128: they stay as they are."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_folder import write_pair

from jax_paged.models import load_checkpoint, score
from jax_paged.models.checkpoint.weights import open_checkpoint
from jax_paged.models.decoder.protocol import split_model

FP8 = jnp.dtype("float8_e4m3fn")
TEXT = np.random.default_rng(1).integers(0, 97, 40).tolist()
KINDS = ("qwen3_moe", "qwen3")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return {kind: write_pair(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def leaves(model):
    paths = jax.tree_util.tree_leaves_with_path(split_model(model)[1])
    return {jax.tree_util.keystr(path): x for path, x in paths}


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_weights_that_the_codes_stand_for(pairs, kind, implementation):
    fp8, wide = (
        load_checkpoint(path, jnp.float32, implementation=implementation)[0] for path in pairs[kind]
    )
    got, want = score(fp8, TEXT), score(wide, TEXT)
    # Both multiply the same numbers and add them up in f32, in another order.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_stay_as_they_are_published(pairs, kind):
    for dtype in (jnp.float32, jnp.bfloat16):
        checkpoint = open_checkpoint(pairs[kind][0], dtype)
        found, like = leaves(checkpoint.load()), leaves(checkpoint.shapes())
        assert checkpoint.title.endswith("parameters in fp8")
        assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
            name: (x.shape, x.dtype) for name, x in like.items()
        }
        dtypes = {name: x.dtype for name, x in found.items()}
        scaled = {name for name in dtypes if "_block_scale" in name}
        assert {dtypes[name] for name in scaled} == {jnp.dtype("float32")}
        codes = {name.replace("_block_scale", "") for name in scaled}
        assert {name for name, x in dtypes.items() if x == FP8} == codes
        assert len(codes) == 7  # four projections in each of two layers, but for one
        assert {x for name, x in dtypes.items() if name not in scaled | codes} == {jnp.dtype(dtype)}


def test_another_weight_dtype_is_made_of_what_the_codes_stand_for(pairs):
    models = [load_checkpoint(path, weight_dtype="int8")[0] for path in pairs["qwen3_moe"]]
    for ours, theirs in zip(*(leaves(model).values() for model in models), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def other_size(tensors, name, scale):
    tensors[name + "_scale_inv"] = scale(tensors[name + "_scale_inv"])


DOWN, Q = "model.layers.0.mlp.experts.2.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "one expert without": (
        lambda t: t.update({DOWN: t.pop(DOWN).astype("f4")}) or t.pop(DOWN + "_scale_inv"), {},
        f"{DOWN}: expected fp8 with scales of blocks as .*0.down_proj.weight has, got none",
    ),
    "q without": (
        lambda t: t.update({Q: t.pop(Q).astype("f4")}) or t.pop(Q + "_scale_inv"), {},
        f"{Q}: expected fp8 with scales of blocks as .*k_proj.weight has, got none",
    ),
    "no scales": (lambda t: t.pop(Q + "_scale_inv"), {}, f"'{Q}' must be of dtype .*, got F8_E4M3"),
    "scales of another size": (
        lambda t: other_size(t, DOWN, lambda x: x[:, :1].copy()), {},
        rf"'{DOWN}_scale_inv' must have shape \(2, 2\), got \(2, 1\)",
    ),
    "a scale beside f32": (
        lambda t: t.update({Q: t.pop(Q).astype("f4")}), {},
        f"'{Q}_scale_inv' of shape .* has no place",
    ),
    "a code that is no number": (
        lambda t: t[Q].view(np.uint8).__setitem__((3, 4), 0xFF), {},
        f"tensor '{Q}': expected finite weights",
    ),
    "a scale that is no number": (
        lambda t: t[Q + "_scale_inv"].__setitem__(0, np.inf), {},
        f"tensor '{Q}_scale_inv': expected finite weights",
    ),
    "other blocks": (
        len, {"weight_block_size": [64, 64]},
        r"key 'quantization_config.weight_block_size' must be \[128, 128\], got \[64, 64\]",
    ),
    "static activations": (
        len, {"activation_scheme": "static"},
        "key 'quantization_config.activation_scheme' must be 'dynamic' or None, got 'static'",
    ),
    "another method": (
        len, {"quant_method": "awq"},
        "key 'quantization_config.quant_method' must be 'fp8', got 'awq'",
    ),
    "an unknown key": (
        len, {"scale_fmt": "ue8m0"},
        "key 'quantization_config.scale_fmt' is not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name):
    changed, quantization, message = WRONG[name]
    path = write_pair(tmp_path, changed=changed, quantization=quantization)[0]
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)


def test_fp8_tensors_need_a_quantization_that_tells_their_blocks(tmp_path):
    path = write_pair(tmp_path)[0]
    raw = json.loads((path / "config.json").read_text())
    del raw["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="must be of dtype BF16, F16, F32, got F8_E4M3"):
        load_checkpoint(path)


def test_joined_tensors_that_would_share_a_block_are_refused(tmp_path):
    path = write_pair(tmp_path, "qwen3", intermediate_size=136)[0]
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(ValueError, match=re.escape(f"{name}: expected a multiple of 128 rows")):
        load_checkpoint(path)
