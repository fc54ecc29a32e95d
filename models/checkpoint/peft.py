# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as the PEFT library saves them: adapter_config.json, adapter_model.safetensors.

Keys that change nothing after training pass. What would make another model than the one that runs
here (DoRA, modules that were trained whole, biases, …) is refused by its name.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jax_paged.checks import expect, kind_text
from jax_paged.checks.fields import (
    FLAG,
    NOTHING,
    OBJECT,
    TEXT,
    Domain,
    either,
    integer,
    list_of,
    number,
    short,
)

from ..decoder.adapters import (
    FUSED,
    MAX_RANK,
    Adapter,
    LowRank,
    module_shapes,
    published_shapes,
)
from ..decoder.config import DecoderConfig, read_json
from .outside import check_keys, reading
from .shards import Shards

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_RANK, _ALPHA = integer(1, MAX_RANK), number(-1e6, 1e6)
# What counts.
_DOMAINS: dict[str, Domain] = {
    "peft_type": Domain("'LORA'", lambda value: value == "LORA"),
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "use_rslora": FLAG,
    "rank_pattern": OBJECT,
    "alpha_pattern": OBJECT,
    "base_model_name_or_path": either(NOTHING, TEXT),
    "target_modules": either(TEXT, list_of(TEXT)),
    # Other ways to begin change the base weights, too: what is saved is then no plain LoRA.
    "init_lora_weights": Domain(
        "true, false, 'gaussian', 'eva' or 'orthogonal'",
        lambda value: isinstance(value, bool) or value in ("gaussian", "eva", "orthogonal"),
    ),
    "bias": Domain("'none'", lambda value: value == "none"),
}
# What says how it was trained, or which modules have tensors, and the tensors say that.
_PASSES = {
    "auto_mapping", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type",
}  # fmt: skip
_OFF = (None, False, [], {}, "")
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"(model\.layers\.(\d{1,5})\.(self_attn|mlp)\.(\w{1,40}))\.lora_([AB])\.weight", re.ASCII
)
_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_PLAIN = re.compile(r"\^?[\w.]{1,200}", re.ASCII)  # a pattern that means what it says


def is_lora(path: Path) -> bool:
    """Whether there is a folder with an adapter."""
    return (path / CONFIG).exists()


def load_adapter(path: str | Path, config: DecoderConfig) -> Adapter:
    """Loads a LoRA adapter that PEFT saved.

    Args:
      path: a folder with adapter_config.json and adapter_model.safetensors. Its modules may be
        q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, of rank up to 64; of a
        model that has them fused (Phi-3), qkv_proj and gate_up_proj. Of its keys r, lora_alpha,
        use_rslora, rank_pattern and alpha_pattern count.
      config: of the base model.

    Returns:
      An `Adapter` of f32, its scales multiplied in, for `generate`, `Engine.add_adapter`,
      `with_adapter` and `merge_adapter`.

    Raises:
      ValueError: in one line, what is wrong: a missing or broken file, a key or tensor that is not
        supported (DoRA, modules_to_save, biases, experts, routers, embeddings, heads), a tensor
        that is missing, has another shape or is not finite.
    """
    return LoraFolder(path).load(config)


class LoraFolder:
    """A folder with an adapter, its configuration checked."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._where = self.path / CONFIG
        self._config = read_json(self._where)
        self._check()

    @property
    def base(self) -> str | None:
        """The name or path of the model that it was trained on."""
        return self._config.get("base_model_name_or_path")

    def load(self, config: DecoderConfig) -> Adapter:
        """What it adds to a model of this configuration."""
        expect(isinstance(config, DecoderConfig), "config", "a DecoderConfig", kind_text(config))
        file = self.path / TENSORS
        if not file.exists():
            raise ValueError(f"{self.path}: expected {TENSORS}, found none")
        with reading(file):
            shards = Shards([file])
        return self._read(file, shards, config)

    def _check(self) -> None:
        check_keys(self._where, self._config, _DOMAINS)
        for key in ("peft_type", "r"):
            if self._config.get(key) is None:
                raise ValueError(
                    f"{self._where}: key {key!r} must be {_DOMAINS[key].text}, got none"
                )
        for key, value in self._config.items():
            if key not in _DOMAINS and key not in _PASSES and value not in _OFF:
                raise ValueError(f"{self._where}: key {key!r} = {short(value)} is not supported")
        for key, domain in (("rank_pattern", _RANK), ("alpha_pattern", _ALPHA)):
            for pattern, value in (self._config.get(key) or {}).items():
                if not _PLAIN.fullmatch(pattern):
                    raise ValueError(
                        f"{self._where}: key {key!r} must have names of modules, got "
                        f"{short(pattern)}"
                    )
                if not domain.has(value):
                    raise ValueError(
                        f"{self._where}: key {key!r} must be {domain.text} for {pattern!r}, got "
                        f"{short(value)}"
                    )

    def _read(self, file: Path, shards: Shards, config: DecoderConfig) -> Adapter:
        found: dict[str, dict[str, str]] = {}  # module → "A" or "B" → name in the file
        layers: list[dict[str, LowRank]] = [{} for _ in range(config.num_layers)]
        shapes = [published_shapes(config, number) for number in range(config.num_layers)]
        for name in shards.shapes:
            match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
            if match is None or not name.startswith(_PREFIX):
                raise ValueError(f"{file}: tensor {short(name)} is not supported")
            self._check_place(file, name, match, shapes)
            found.setdefault(match[1], {})[match[5]] = name
        for module, sides in found.items():
            for side in "AB":
                if side not in sides:
                    raise ValueError(
                        f"{file}: tensor '{_PREFIX}{module}.lora_{side}.weight' is missing"
                    )
            _, _, layer, _, name = module.split(".")
            rank, scale = self._rank_and_scale(module)
            out, inner = shapes[int(layer)][name]
            for side, shape in (("A", (rank, inner)), ("B", (out, rank))):
                if shards.shapes[sides[side]] != shape:
                    raise ValueError(
                        f"{file}: tensor {sides[side]!r} must have shape {shape}, got "
                        f"{short(shards.shapes[sides[side]])}"
                    )
            a, b = (shards.get(sides[side]).astype(np.float32) for side in "AB")
            whole, begin = b * np.float32(scale), 0
            for part in FUSED.get(name, (name,)):
                end = begin + module_shapes(config, int(layer))[part][0]
                layers[int(layer)][part] = LowRank(a, whole[begin:end])
                begin = end
        return Adapter(tuple(layers))

    def _check_place(self, file: Path, name: str, match: re.Match, shapes: list[dict]) -> None:
        _, layer, block, module, _ = match.groups()
        if int(layer) >= len(shapes):
            raise ValueError(
                f"{file}: tensor {name!r} has no place in a model of {len(shapes)} layers"
            )
        known = shapes[int(layer)]
        if module not in known or (module in _ATTENTION) != (block == "self_attn"):
            raise ValueError(
                f"{file}: tensor {name!r} has no place in this model; expected modules "
                f"{', '.join(known)}"
            )

    def _rank_and_scale(self, module: str) -> tuple[int, float]:
        rank = self._of_pattern("rank_pattern", module, self._config["r"])
        default = self._config.get("lora_alpha")
        alpha = self._of_pattern("alpha_pattern", module, 8 if default is None else default)
        return rank, alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _of_pattern(self, key: str, module: str, default: Any) -> Any:
        """The value of the first name that the module's is, or ends with."""
        for pattern, value in (self._config.get(key) or {}).items():
            name = pattern.removeprefix("^")
            if module == name or (name == pattern and module.endswith("." + name)):
                return value
        return default
