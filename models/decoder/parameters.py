# SPDX-License-Identifier: Apache-2.0
"""The tensors that a published checkpoint of a configuration holds, and how they reach the model.

Names are those of Hugging Face, with one exception: the experts of a layer count as one stacked
tensor, `…mlp.experts.gate_proj.weight` [num_experts, inner, hidden] and so on. The readers in
`checkpoint/` (`weights.py`, `gguf_file.py`) say how their format stores a name; the decoder asks
for tensors by name through a `TensorSource` and joins some of them into one leaf.
"""

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jax_paged.checks import SCALE_BLOCK, expect, scale_blocks
from jax_paged.checks.fields import short
from jax_paged.native import huge_pages

from .config import DecoderConfig

Shape = tuple[int, ...]
Part = tuple[slice, ...]  # a slice for each axis


class Fill(Protocol):
    """Writes a tensor of `expected_tensors`, or a part of it, to an array of any float dtype."""

    def __call__(self, name: str, out: np.ndarray, part: Part | None = None) -> None: ...


CHOICE_BIAS = "e_score_correction_bias"  # as DeepSeek-V3 calls it


class TensorSource(Protocol):
    """Gives the named tensors, joined along `axis`, as one array in `dtype`; None = the model's."""

    def __call__(self, *names: str, axis: int = 0, dtype: DTypeLike | None = None) -> jax.Array: ...


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Name → shape of every tensor of the configuration, in the order the decoder reads them.

    A configuration from a file may promise any number of them: see `each_expected_tensor`.

    >>> from jax_paged.models.checkpoint.hf_config import config_from_hf
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    >>> config = config_from_hf(dict(sizes, model_type="llama", num_attention_heads=2,
    ...                              max_position_embeddings=64))
    >>> print(expected_tensors(config)["model.layers.0.mlp.up_proj.weight"])
    (24, 16)
    """
    return dict(each_expected_tensor(config))


def each_expected_tensor(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    """The items of `expected_tensors`, one after another."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield from _attention_tensors(config, layer + "self_attn.")
        yield layer + "post_attention_layernorm.weight", (hidden,)
        if config.post_norms:
            yield layer + "pre_feedforward_layernorm.weight", (hidden,)
        experts, inner, mlp, bias = (), config.intermediate_size, layer + "mlp.", config.mlp_bias
        if config.moe_layers[i]:
            yield layer + "mlp.gate.weight", (config.num_experts, hidden)
            if config.router_bias:
                yield layer + "mlp.gate.bias", (config.num_experts,)
            if config.choice_bias:
                yield f"{layer}mlp.gate.{CHOICE_BIAS}", (config.num_experts,)
            experts, inner = (config.num_experts,), config.moe_intermediate_size
            bias = config.expert_bias
            mlp += "experts."
        is_fused = config.fused_projections and not experts
        for name, rows, columns in _gated(hidden, inner, is_fused=is_fused):
            yield f"{mlp}{name}.weight", (*experts, rows, columns)
            if bias:
                yield f"{mlp}{name}.bias", (*experts, rows)
        if experts and (inner := config.shared_intermediate_size):
            shared = layer + "mlp.shared_experts."
            for name, rows, columns in _gated(hidden, inner):
                yield f"{shared}{name}.weight", (rows, columns)
        if config.post_norms:
            yield layer + "post_feedforward_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _attention_tensors(config: DecoderConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, heads, sizes = config.hidden_size, config.num_q_heads, config.latent
    q_out, kv_out = heads * config.head_dim, config.num_kv_heads * config.head_dim
    if sizes is not None:
        if sizes.q_rank is None:
            yield prefix + "q_proj.weight", (q_out, hidden)
        else:
            yield prefix + "q_a_proj.weight", (sizes.q_rank, hidden)
            yield prefix + "q_a_layernorm.weight", (sizes.q_rank,)
            yield prefix + "q_b_proj.weight", (q_out, sizes.q_rank)
        yield prefix + "kv_a_proj_with_mqa.weight", (sizes.row_dim, hidden)
        yield prefix + "kv_a_layernorm.weight", (sizes.kv_rank,)
        rows = heads * (sizes.nope_dim + sizes.v_dim)
        yield prefix + "kv_b_proj.weight", (rows, sizes.kv_rank)
        yield prefix + "o_proj.weight", (hidden, heads * sizes.v_dim)
        return
    qkv = (("q_proj", q_out), ("k_proj", kv_out), ("v_proj", kv_out))
    if config.fused_projections:
        qkv = (("qkv_proj", q_out + 2 * kv_out),)
    for name, rows in qkv:
        yield f"{prefix}{name}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{prefix}{name}.bias", (rows,)
    yield prefix + "o_proj.weight", (hidden, q_out)
    if config.out_bias:
        yield prefix + "o_proj.bias", (hidden,)
    if config.qk_norm:
        yield prefix + "q_norm.weight", (config.head_dim,)
        yield prefix + "k_norm.weight", (config.head_dim,)
    if config.sinks:
        yield prefix + "sinks", (heads,)


def _gated(hidden: int, inner: int, *, is_fused: bool = False) -> tuple[tuple[str, int, int], ...]:
    """(name, rows, columns) of the projections of a gated MLP."""
    gate_up = (("gate_proj", inner, hidden), ("up_proj", inner, hidden))
    if is_fused:
        gate_up = (("gate_up_proj", 2 * inner, hidden),)
    return (*gate_up, ("down_proj", hidden, inner))


def scale_name(name: str) -> str:
    """What the scales of the blocks of an fp8 weight are called."""
    return name + "_scale_inv"


def with_scales(shapes: dict[str, Shape], scaled: Iterable[str]) -> dict[str, Shape]:
    """The shapes of tensors, and those of the scales of the blocks of some."""

    def of_scales(name: str) -> Shape:
        *leading, rows, columns = shapes[name]
        return (*leading, scale_blocks(rows), scale_blocks(columns))

    return shapes | {scale_name(name): of_scales(name) for name in scaled}


def are_scaled(scaled: Collection[str], names: Sequence[str]) -> bool:
    """Whether all of some weights, which become one, are among those with scales of blocks.

    Raises:
      ValueError: some are, and some are not.
    """
    has = [name in scaled for name in names]
    if any(has) and not all(has):
        one, other = names[has.index(True)], names[has.index(False)]
        raise ValueError(f"{other}: expected fp8 with scales of blocks as {one} has, got none")
    return any(has)


def block_order(name: str, order: np.ndarray) -> np.ndarray:
    """The order of blocks of rows, of that of the rows of a weight.

    Raises:
      ValueError: it takes a block apart.
    """
    starts = order[::SCALE_BLOCK]
    whole = (starts[:, None] + np.arange(SCALE_BLOCK)).ravel()
    ok = not (starts % SCALE_BLOCK).any() and np.array_equal(whole, order)
    what = f"parts of devices that are multiples of {SCALE_BLOCK} rows, as its fp8 blocks are"
    expect(ok, name, what, f"{len(order)} rows in another order")
    return starts // SCALE_BLOCK


def check_tensors(
    where: object, expected: Iterable[tuple[str, Shape]], found: Mapping[str, Shape]
) -> None:
    """Raises a ValueError of one line unless a file holds just the expected tensors.

    Args:
      expected: (name, shape), no name twice. Of a configuration that promises more tensors than
        the file has, little more is looked at than the file has.
    """
    expected = iter(expected)
    shapes = dict(itertools.islice(expected, len(found) + 1000))
    missing = [name for name in shapes if name not in found]
    if missing:
        name, more = missing[0], len(missing) - 1
        at_least = "at least " if next(expected, None) else ""
        others = f" ({at_least}{more} more are missing too)" if more else ""
        raise ValueError(
            f"{where}: tensor {name!r} is missing; expected shape {shapes[name]}{others}"
        )
    for name, shape in found.items():
        if name not in shapes:
            raise ValueError(
                f"{where}: tensor {short(name)} of shape {short(shape)} has no place in this "
                f"model; expected {len(shapes)} tensors, got {len(found)}"
            )
        if tuple(shape) != shapes[name]:
            raise ValueError(
                f"{where}: tensor {name!r} must have shape {shapes[name]}, got {short(shape)}"
            )


def is_finite(values: np.ndarray) -> bool:
    """Whether bf16, f16, f32 or f8e4m3fn values hold no NaN and no infinity; 8 to 20 GB/s.

    Little memory is needed for it: they are looked at in pieces.
    """
    flat, piece = values.reshape(-1), 1 << 18
    return all(_all_finite(flat[i : i + piece]) for i in range(0, flat.size, piece))


def _all_finite(values: np.ndarray) -> bool:
    if values.dtype.itemsize == 4:
        return bool(np.isfinite(values).all())
    if values.dtype.itemsize == 1:  # which has no infinity
        bits, exponent = values.view(np.uint8), np.uint8(0x7F)
    else:
        bits = values.view(np.uint16)
        exponent = np.uint16(0x7C00 if values.dtype == np.float16 else 0x7F80)
    return bool((bits & exponent).max() != exponent)


class FillingSource:
    """A source that loads one tensor at a time and hands it to the device, or devices.

    Args:
      shape_of: the shape of a tensor; those that are joined differ along their axis only.
      fill: where tensors come from. It may have `int4(*names)`, which gives those that are stored
        in 4 bits as they are.
      dtype: what the arrays become, unless the source is asked for another.
      on_tensor: called with each name that was loaded, for progress.
      scaled: names of fp8 weights whose blocks have scales, which go by `scale_name`. Asked for as
        f8e4m3fn, `fill` gives their codes; else what they stand for.
    """

    def __init__(
        self,
        shape_of: Callable[[str], Shape],
        fill: Fill,
        dtype: DTypeLike,
        on_tensor: Callable[[str], object] = lambda name: None,
        scaled: Collection[str] = (),
    ):
        self.scaled = scaled
        self._shape_of, self._fill, self._on_tensor = shape_of, fill, on_tensor
        self._int4 = getattr(fill, "int4", None)
        self._dtype = np.dtype(dtype)

    def __call__(self, *names: str, axis: int = 0, dtype: DTypeLike | None = None) -> jax.Array:
        shape = self._joined_shape(names, axis)
        out = self._empty(shape, dtype)
        self._read(names, axis, (slice(None),) * len(shape), None, out)
        self.tell(names)
        return jax.device_put(out)  # without a copy on a CPU, unlike jnp.asarray

    def split(
        self, *names: str, sharding: Callable[[int], NamedSharding], axis: int = 0,
        dtype: DTypeLike | None = None, order: np.ndarray | None = None,
        slots: np.ndarray | None = None,
    ) -> jax.Array:  # fmt: skip
        """The same array over several devices; each process reads what its devices get.

        Args:
          sharding: of an array of so many axes.
          order: the rows along `axis` in another order, some perhaps several times. None = as they
            are.
          slots: of stacked experts, the expert of each slot; one may have several, none or one.
        """
        shape = self._joined_shape(names, axis)
        if order is not None:
            shape = (*shape[:axis], len(order), *shape[axis + 1 :])
        if slots is not None:
            shape = (len(slots), *shape[1:])

        def part(index: Any) -> np.ndarray:
            sizes = [len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True)]
            out = self._empty(sizes, dtype)
            if slots is None:
                self._read(names, axis, index, order, out)
            else:
                for into, expert in zip(out, slots[index[0]].tolist(), strict=True):
                    one = slice(expert, expert + 1), *index[1:]
                    self._read(names, axis, one, order, into[None])
            return out

        made = jax.make_array_from_callback(shape, sharding(len(shape)), part)
        self.tell(names)
        return made

    def int4(self, *names: str) -> Any:
        """Joined tensors as an `Int4Weight` where all are stored in 4 bits, else None."""
        found = None if self._int4 is None else self._int4(*names)
        if found is not None:
            self.tell(names)
        return found

    def zeros(self) -> "FillingSource":
        """A source that gives zeros for the same names."""

        def fill(name: str, out: np.ndarray, part: Part | None = None) -> None:
            out[...] = 0

        return FillingSource(self._shape_of, fill, self._dtype)

    def _empty(self, shape: Sequence[int], dtype: DTypeLike | None) -> np.ndarray:
        if dtype is None:
            return huge_pages.empty(shape, self._dtype)
        # What is asked for in another dtype is mostly quantized next, and then gone.
        return huge_pages.empty(shape, np.dtype(dtype), lasts=False)

    def _joined_shape(self, names: Sequence[str], axis: int) -> Shape:
        shape = list(self._shape_of(names[0]))
        shape[axis] = sum(self._shape_of(name)[axis] for name in names)
        return tuple(shape)

    def tell(self, names: Sequence[str]) -> None:
        """Counts tensors as loaded; also those that another process loads."""
        for name in names:
            self._on_tensor(name)

    def _read(
        self, names: Sequence[str], axis: int, index: Part, order: np.ndarray | None,
        out: np.ndarray,
    ) -> None:  # fmt: skip
        """Fills `out` with a part of the joined tensors: with each run of rows of each tensor."""
        before, behind = index[:axis], index[axis + 1 :]
        ends = np.cumsum([self._shape_of(name)[axis] for name in names])
        rows = np.arange(ends[-1]) if order is None else order
        rows = rows[index[axis]]
        owners = np.searchsorted(ends, rows, side="right")
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(owners) != 0)) + 1
        is_whole = all(i == slice(None) for i in (*before, *behind))
        for begin, end in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
            owner = int(owners[begin])
            name, size = names[owner], self._shape_of(names[owner])[axis]
            first = int(rows[begin]) - int(ends[owner]) + size
            into = out[(slice(None),) * axis + (slice(begin, end),)]
            if is_whole and end - begin == size:
                self._fill(name, into)
            else:
                self._fill(name, into, (*before, slice(first, first + end - begin), *behind))


def random_source(
    config: DecoderConfig, seed: int = 0, dtype: DTypeLike = jnp.float32, scale: float = 1.0
) -> TensorSource:
    """Random weights, for tests and benchmarks: normal, variance scale / fan-in; norms near 1."""
    shapes = expected_tensors(config)

    def fill(name: str, out: np.ndarray, part: Part | None = None) -> None:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shapes[name], np.float32)[part or ...]
        if name.endswith("norm.weight"):
            out[...] = 1 - config.norm_offset + 0.1 * values
        else:
            fan_in = 1 if "embed" in name else shapes[name][-1]
            out[...] = values * np.float32((scale / fan_in) ** 0.5)

    return FillingSource(shapes.__getitem__, fill, dtype)


def abstract_source(
    config: DecoderConfig, dtype: DTypeLike = jnp.float32, scaled: Collection[str] = (),
    int4: Callable[..., Any] | None = None,
) -> TensorSource:  # fmt: skip
    """Shapes and dtypes only: a decoder to lower and compile, not to run.

    scaled, int4: as for `FillingSource`.
    """
    shapes = with_scales(expected_tensors(config), scaled)
    default = dtype

    def source(*names: str, axis: int = 0, dtype: DTypeLike | None = None):
        joined = list(shapes[names[0]])
        joined[axis] = sum(shapes[name][axis] for name in names)
        return jax.ShapeDtypeStruct(tuple(joined), default if dtype is None else dtype)

    source.scaled = scaled  # type: ignore[attr-defined]
    source.int4 = int4  # type: ignore[attr-defined]
    return source  # type: ignore[return-value]
