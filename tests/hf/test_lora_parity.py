# SPDX-License-Identifier: Apache-2.0
"""Our logits with adapters against PEFT's, from folders that PEFT wrote, in f32 on the CPU."""

import os
import warnings

import numpy as np
import pytest

from jax_paged.models import load_adapter, load_checkpoint, token_logits, with_adapter

ATOL = 2e-4  # as for models without adapters
SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "all modules": {"r": 8, "lora_alpha": 20, "target_modules": ALL},
    "q and v, rslora": {
        "r": 16, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True,
    },
    "all linear, patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": "all-linear",
        "rank_pattern": {"k_proj": 2, "layers.1.mlp.down_proj": 6},
        "alpha_pattern": {"o_proj": 3, "^model.layers.0.mlp.up_proj": 11},
    },
    "some layers": {
        "r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj"],
        "layers_to_transform": [0, 2],
    },
    "gaussian": {"r": 5, "target_modules": ["down_proj"], "init_lora_weights": "gaussian"},
}  # fmt: skip


@pytest.fixture(scope="session")
def peft(transformers):
    """The peft module."""
    del transformers
    if os.environ.get("JAX_PAGED_REQUIRE_HF") != "1":
        pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of at import is not ours
        import peft
    return peft


@pytest.mark.every
@pytest.mark.parametrize("case", CASES)
def test_logits_match_peft(transformers, peft, tmp_path, case):
    import torch

    torch.manual_seed(len(case))
    base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).eval()
    base.save_pretrained(tmp_path / "base")
    tokens = np.random.default_rng(1).integers(0, 131, 40).tolist()
    plain = base(torch.tensor([tokens])).logits[0].numpy()
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **CASES[case])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config).eval()
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # begins as zeros
                parameter.data.normal_(std=0.2)
        model.save_pretrained(tmp_path / "adapter")
    expected = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(expected - plain).max() > 10 * ATOL

    ours, sizes, _ = load_checkpoint(tmp_path / "base", "float32", progress=False)
    np.testing.assert_allclose(token_logits(ours, tokens), plain, atol=ATOL)
    adapter = load_adapter(tmp_path / "adapter", sizes)
    np.testing.assert_allclose(
        token_logits(with_adapter(ours, adapter), tokens), expected, atol=ATOL
    )
    base_folder = tmp_path / "base"
    merged, _, _ = load_checkpoint(
        tmp_path / "adapter", "float32", base=base_folder, progress=False
    )
    np.testing.assert_allclose(token_logits(merged, tokens), expected, atol=ATOL)


def test_dora_is_refused(transformers, peft, tmp_path):
    base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    _, sizes, _ = load_checkpoint(tmp_path / "base", progress=False)
    with pytest.raises(ValueError, match=r"key 'use_dora' = True is not supported"):
        load_adapter(tmp_path / "adapter", sizes)
