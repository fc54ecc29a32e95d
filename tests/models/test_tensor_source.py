# SPDX-License-Identifier: Apache-2.0
"""`tensor_source`: published files for models that ask for tensors by name, whatever the names."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from jax_paged.models import (
    Decoder,
    default_checkpoint,
    load_checkpoint,
    tensor_source,
    token_logits,
)
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config

FILE = "model.safetensors"


def to_foreign(name):
    """model.layers.0.mlp.up_proj.weight → net/0/mlp/up_proj."""
    return name.removesuffix(".weight").replace("model.layers.", "net.").replace(".", "/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def foreign(folder, tmp_path_factory):
    """The same tensors under other names, and one that nobody asks for."""
    tensors = {to_foreign(name): value for name, value in load_file(folder / FILE).items()}
    path = tmp_path_factory.mktemp("foreign")
    save_file(tensors | {"step": np.zeros(1, np.int64)}, path / FILE)
    return path


def test_a_decoder_is_read_from_files_with_foreign_names(folder, foreign):
    expected, config, _ = load_checkpoint(folder, jnp.float32, progress=False)
    for path, rename in ((folder, None), (foreign, to_foreign), (foreign / FILE, to_foreign)):
        model = Decoder(config, tensor_source(path, rename=rename))
        np.testing.assert_array_equal(
            token_logits(model, [1, 2, 3]), token_logits(expected, [1, 2, 3])
        )


def test_a_gguf_file_has_the_names_of_hugging_face():
    try:
        path = default_checkpoint()
    except ValueError as error:
        pytest.skip(str(error))
    source = tensor_source(path, jnp.bfloat16, rename=lambda name: f"model.{name}.weight")
    norm = source("layers.3.input_layernorm", dtype=jnp.float32)
    assert (norm.shape, norm.dtype, source("norm").dtype) == ((576,), jnp.float32, jnp.bfloat16)


def test_experts_stored_one_by_one_come_as_one_array(tmp_path):
    config, layer = small_config("qwen3_moe"), "model.layers.1.mlp.experts."
    random, tensors = random_source(config), {}
    for part in ("gate_proj", "up_proj", "down_proj"):
        for number, value in enumerate(np.asarray(random(f"{layer}{part}.weight"))):
            tensors[to_foreign(f"{layer}{number}.{part}.weight")] = value
    save_file(tensors, tmp_path / FILE)
    source = tensor_source(tmp_path, rename=to_foreign)
    names = [f"{layer}{part}.weight" for part in ("gate_proj", "up_proj")]
    np.testing.assert_array_equal(source(*names, axis=1), random(*names, axis=1))


@pytest.fixture
def odd(tmp_path):
    tensors = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros((2, 4), ml_dtypes.bfloat16),
        "integer": np.zeros(2, np.int32),
        "infinite": np.full(2, np.inf, np.float32),
        "scalar": np.zeros((), np.float32),
        "x.experts.0.w": np.zeros(2, np.float32),
        "x.experts.1.w": np.zeros(3, np.float32),
    }
    save_file(tensors, tmp_path / FILE)
    return tmp_path


def test_tensors_are_joined_along_any_axis_in_any_dtype(odd):
    joined = tensor_source(odd)("a", "b", axis=1, dtype=jnp.bfloat16)
    assert (joined.shape, joined.dtype) == ((2, 7), jnp.bfloat16)


CALLS = {  # what is asked for → the end of the message
    "missing": (["c"], {}, "expected a tensor 'c', got 7 others: 'a', 'b', 'infinite', …"),
    "integer": (["integer"], {}, "tensor 'integer' must be of dtype BF16, F16, F32, got I32"),
    "infinite": (["infinite"], {}, "expected finite weights, got NaN or infinity"),
    "scalar": (
        ["scalar"], {},
        "tensor 'scalar' must have a shape to join with () along axis 0, got ()",
    ),
    "rows": (
        ["a", "b"], {},
        "tensor 'b' must have a shape to join with (2, 3) along axis 0, got (2, 4)",
    ),
    "axis": (
        ["a"], {"axis": 2}, "tensor 'a' must have a shape to join with (2, 3) along axis 2, "
        "got (2, 3)",
    ),
    "experts": (
        ["x.experts.w"], {},
        "'x.experts.w' must be of experts of one shape, got (2,) and (3,)",
    ),
    "nothing": ([], {}, "names: expected at least one name of a tensor, got none"),
}  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize("what", CALLS)
def test_what_a_source_cannot_give_is_named(what, odd):
    names, options, message = CALLS[what]
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        tensor_source(odd)(*names, **options)


def test_a_name_that_is_renamed_in_vain_is_told_with_the_name_asked_for(odd):
    message = "expected a tensor 'z', got 7 others: 'a', 'b', 'infinite', …"
    with pytest.raises(ValueError, match="expected a tensor 'z', asked for as 'a', got 7 others"):
        tensor_source(odd, rename=lambda name: "z")("a")
    with pytest.raises(ValueError, match=re.escape(message)):
        tensor_source(odd)("z")
    with pytest.raises(ValueError, match=r"^rename: expected a name for 'a', got None$"):
        tensor_source(odd, rename=lambda name: None)("a")


def test_files_that_are_not_there_are_named(tmp_path):
    (tmp_path / "model.bin").touch()
    expected = "expected a folder with safetensors, a .safetensors or a .gguf file, got "
    for path, message in (
        (tmp_path, f"{tmp_path}: expected model.safetensors or model.safetensors.index.json"),
        (tmp_path / "model.bin", expected + "a file of another kind"),
        (tmp_path / "nothing.gguf", expected + "nothing there"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            tensor_source(path)
    with pytest.raises(ValueError, match=r"^dtype: expected bfloat16 or float32, got int8$"):
        tensor_source(tmp_path / "model.bin", "int8")
