# SPDX-License-Identifier: Apache-2.0
"""How a decoder lies on several devices: a mesh with axes "dp" and "tp", and what each one holds.

    mesh = make_mesh(config)                             # all devices
    model = Decoder(config, source, mesh=mesh)           # or load_checkpoint(path, mesh=mesh)

Attention, dense MLPs, embedding and head are split over "tp" (tensor parallelism, Shoeybi et al.
2019): each device has some of the heads, of the inner width and of the vocabulary. Experts are
split by expert, over all devices where their number allows it. The replicas of "dp" have the same
of all else. The layers of one device are an ordinary decoder with fewer heads: it runs inside of
one `jax.shard_map`, and adds up with the others after attention and after the MLP.

A mesh may have an axis "pp" in front, of pipeline stages (GPipe, Huang et al. 2019). Each stage has
a range of the layers, with their pages, on dp · tp devices. All devices run one program, so all
stages have as many layers: leaf j of the model holds, one behind another along its first axis, the
weights of layer j of each stage. What a device gets of it are the weights of an ordinary layer.
Where the layers are too few for the last stages, layers of zeros fill up: these change nothing.
Embedding, last norm and head lie on all stages. `stages.py` and `ring.py` run such a model.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_paged.cache.state import KVState
from jax_paged.checks import SCALE_BLOCK, expect
from jax_paged.native.sharding import create_over
from jax_paged.ops.int4 import Int4Weight

from .config import DecoderConfig
from .exchange import exchanged, is_cheaper
from .parameters import FillingSource, TensorSource
from .placement import PLACES, as_places, first_slots, is_int4, name_of

AXES = DP, TP = ("dp", "tp")
PP = "pp"

# The axis of each weight that is split over "tp"; experts are split along their first axis. Biases
# and scales follow an axis 0, and are whole beside an axis 1; those of blocks are split as weights.
_SPLIT_AXES = {
    "embedding": 0, "head": 0, "qkv": 0, "sinks": 0, "out": 1, "gate_up": 0, "down": 1,
    **dict.fromkeys(("q_up", "kv_up", "k_up", "v_up"), 0),  # of latent attention, by heads
}  # fmt: skip
# What all stages have; all other leaves are those of layers.
_OF_ALL_STAGES = ("embedding", "norm", "head")
# For so many of its tokens an expert is read once on CUDA: halves that have as many read no more.
_EXPERT_TOKENS = 64


def make_mesh(
    config: DecoderConfig,
    *,
    tp: int | None = None,
    dp: int | None = None,
    pp: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of dp replicas on tp devices each, for `Decoder(mesh=…)` and `load_checkpoint`.

    Args:
      config: of the model.
      pp: pipeline stages, each of which has a range of the layers. The devices of a stage are
        neighbours. With 1 the mesh has no axis of stages.
      tp: devices that share the heads. None = the most that divide KV heads and devices: their
        greatest common divisor, or devices / dp. With more devices than KV heads, each head's K
        and V lie on tp / num_kv_heads of them; a warning says what this costs.
      dp: replicas, which share the experts and nothing else. None = devices / tp.
      devices: None = all. Several processes see the devices of all.

    `devices` in what is said of tp and dp are those of a stage.

    Raises:
      ValueError: pp · dp · tp is not the number of devices, or layers, heads, inner width or
        experts cannot be split so.
    """
    devices = jax.devices() if devices is None else list(devices)
    ok = isinstance(pp, int) and pp >= 1 and len(devices) % pp == 0
    expect(ok, "pp", f"a divisor of the {len(devices)} devices", repr(pp))
    count = len(devices) // pp
    for name, value in (("tp", tp), ("dp", dp)):
        ok = value is None or (isinstance(value, int) and value >= 1 and count % value == 0)
        expect(ok, name, f"a divisor of the {count} devices", repr(value))
    if tp is None:
        tp = count // dp if dp is not None else int(np.gcd(_kv_heads(config), count))
    dp = count // tp if dp is None else dp
    expect(dp * tp == count, "dp", f"{count // tp}, as {count} devices have tp={tp}", dp)
    axes, sizes = (AXES, (dp, tp)) if pp == 1 else ((PP, *AXES), (pp, dp, tp))
    mesh = jax.sharding.Mesh(
        np.asarray(devices, dtype=object).reshape(sizes), axes,
        axis_types=(AxisType.Auto,) * len(axes),
    )  # fmt: skip
    partition = Partition.create(config, mesh)
    if partition.kv_copies > 1:
        warnings.warn(
            f"tp={tp}: each of the {config.num_kv_heads} KV heads lies on {partition.kv_copies} "
            f"devices, so the KV pages take {partition.kv_copies} times the memory in all; "
            f"tp={config.num_kv_heads} with dp={count // config.num_kv_heads} would not",
            stacklevel=2,
        )
    return mesh


@dataclasses.dataclass(frozen=True)
class Partition:
    """What the devices of a mesh hold of a decoder.

    Args:
      mesh: with axes "dp" and "tp", and perhaps "pp" in front.
      num_layers: of a device, layers of zeros included.
      model_layers: of the model.
      num_q_heads, num_kv_heads: of a device.
      kv_copies: devices that have the same KV head.
      expert_axes: the mesh axes that experts are split over, those with most devices by which
        their number can be divided; none of a dense model.
      splits_vocab: whether embedding and head are split; else each device has them whole.
      num_slots: for the experts of a layer, over all devices; one may have several. None = each has
        one, and stays there.
      is_inside: the model is called inside of a `jax.shard_map` over the mesh, and each replica
        has rows of its own. Otherwise it enters one itself, and all replicas have the same rows.
    """

    mesh: Mesh
    num_layers: int
    model_layers: int
    num_q_heads: int
    num_kv_heads: int
    kv_copies: int
    expert_axes: tuple[str, ...]
    splits_vocab: bool
    num_slots: int | None = None
    is_inside: bool = False

    @staticmethod
    def create(
        config: DecoderConfig, mesh: Mesh, redundant_experts: int | None = None
    ) -> "Partition":
        """Checks that a model can be split so.

        Args:
          redundant_experts: slots beyond those of all experts, as for `Decoder`.

        Raises:
          ValueError: it cannot; the message says what of it.
        """
        ok = mesh.axis_names in (AXES, (PP, *AXES))
        expect(ok, "mesh", f"axes {AXES}", mesh.axis_names)
        tp, num_layers = mesh.shape[TP], _layers_of_a_stage(config, mesh.shape.get(PP, 1))
        q_heads, kv_heads = config.num_q_heads, _kv_heads(config)
        ok = kv_heads % tp == 0 or tp % kv_heads == 0
        expect(ok, "tp", f"a divisor or a multiple of the {kv_heads} KV heads", tp)
        expect(q_heads % tp == 0, "tp", f"a divisor of the {q_heads} query heads", tp)
        if not all(config.moe_layers):
            inner = config.intermediate_size
            expect(inner % tp == 0, "tp", f"a divisor of intermediate_size={inner}", tp)
        inner = config.shared_intermediate_size
        expect(inner % tp == 0, "tp", f"a divisor of shared_intermediate_size={inner}", tp)
        expert_axes: tuple[str, ...] = ()
        num_slots, count = None, config.num_experts
        if redundant_experts is not None:
            ok = isinstance(redundant_experts, int) and redundant_experts >= 0
            expect(ok, "redundant_experts", "an integer of at least 0", repr(redundant_experts))
            pp = mesh.shape.get(PP, 1)
            expect(pp == 1, "redundant_experts", "None for a model in pipeline stages", f"pp={pp}")
            num_slots = count = count + redundant_experts
        if any(config.moe_layers):
            ways = (axes for axes in (AXES, (TP,), (DP,), ()) if count % _size(mesh, axes) == 0)
            expert_axes = next(ways)
        if num_slots is not None:
            what = f"slots for {config.num_experts} experts that can be split over the devices"
            expect(bool(expert_axes), "redundant_experts", what, f"{num_slots} slots")
        local_kv = max(kv_heads // tp, 1)
        splits_vocab = config.vocab_size % tp == 0
        copies = 1 if config.latent is not None else max(tp // kv_heads, 1)
        return Partition(
            mesh, num_layers, config.num_layers, q_heads // tp, local_kv, copies, expert_axes,
            splits_vocab, num_slots,
        )  # fmt: skip

    @property
    def pp(self) -> int:
        """Stages."""
        return self.mesh.shape.get(PP, 1)

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.mesh.shape[DP]

    @property
    def tp(self) -> int:
        """Devices of a replica."""
        return self.mesh.shape[TP]

    # What lies where

    def spec(self, leaf: str, ndim: int) -> P:
        """The split of a weight, bias or scale, by the name of its leaf."""
        own = self._spec_in_stage(leaf, ndim)
        if not self._is_of_stages(leaf):
            return own
        first, *rest = own or (None,)
        among = first if isinstance(first, tuple) else (first,) if first else ()
        return P((PP, *among), *rest)

    def _is_of_stages(self, leaf: str) -> bool:
        """Whether a leaf holds the layers of several stages, along its first axis."""
        name = leaf.removesuffix("_scale").removesuffix("_block")
        return self.pp > 1 and name not in _OF_ALL_STAGES

    def _spec_in_stage(self, leaf: str, ndim: int) -> P:
        leaf = leaf.removesuffix("_block_scale")
        name = leaf.removesuffix("_scale").removesuffix("_bias")
        is_weight = name == leaf
        if name not in _SPLIT_AXES or (name in ("embedding", "head") and not self.splits_vocab):
            return P()
        if name in ("gate_up", "down") and ndim == 2 + is_weight:
            return P(self.expert_axes)
        axis = _SPLIT_AXES[name]
        if not is_weight and axis:
            return P()
        return P(*(None,) * axis, TP)

    def sharding(self, leaf: str, ndim: int) -> NamedSharding:
        """The same on the mesh."""
        return NamedSharding(self.mesh, self.spec(leaf, ndim))

    def _sharding_in_stage(self, mesh: Mesh, leaf: str, ndim: int) -> NamedSharding:
        return NamedSharding(mesh, self._spec_in_stage(leaf, ndim))

    def read(
        self, leaf: str, source: TensorSource, names: Sequence[str], axis: int,
        order: np.ndarray | None, slots: np.ndarray | None, **dtype: DTypeLike,
    ) -> Any:  # fmt: skip
        """Joined tensors of a source on the devices of a leaf; shapes stay shapes.

        Args:
          order: the rows in the order of the devices, some perhaps several times; None = as they
            are.
          slots: the expert of each slot of stacked experts; None = one each.
          dtype: of the source's option, if any.
        """
        if not self._is_of_stages(leaf):
            sharding = functools.partial(self.sharding, leaf)
            return _read(sharding, source, names, axis, order, slots, **dtype)
        return self._read_stages(leaf, source, names, axis, order, **dtype)

    def _read_stages(
        self, leaf: str, source: TensorSource, names: Sequence[str], axis: int,
        order: np.ndarray | None, **dtype: DTypeLike,
    ) -> Any:  # fmt: skip
        """`read` of each stage's own layer, one behind another along the first axis."""
        parts: list[Any] = []
        for stage, devices in enumerate(self.mesh.devices):
            mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
            sharding = functools.partial(self._sharding_in_stage, mesh, leaf)
            own = [_of_later_layer(name, stage * self.num_layers) for name in names]
            is_here = any(device.process_index == jax.process_index() for device in devices.flat)
            if _layer_of(own[0]) >= self.model_layers:
                x = _zeros(sharding, source, names, axis, order, **dtype)
            elif is_here or not isinstance(source, FillingSource):
                x = _read(sharding, source, own, axis, order, None, **dtype)
            else:
                source.tell(own)
                continue
            if isinstance(x, jax.ShapeDtypeStruct):  # and of the others the same
                parts = [x]
                break
            parts += [x] if is_here else []
        shape = (parts[0].shape[0] * self.pp, *parts[0].shape[1:])
        whole = self.sharding(leaf, len(shape))
        if isinstance(parts[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, parts[0].dtype, sharding=whole)
        of_devices = {x.device: x.data for part in parts for x in part.addressable_shards}
        arrays = [of_devices[device] for device in whole.addressable_devices]
        return jax.make_array_from_single_device_arrays(shape, whole, arrays)

    def shape_in_stage(self, leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of one layer, of the shape of a leaf."""
        if not self._is_of_stages(leaf):
            return shape
        return (shape[0] // self.pp, *shape[1:])

    def check_blocks(self, leaf: str, name: str, shape: Sequence[int]) -> None:
        """Checks that no device gets a part of a block of a weight, `name` in the checkpoint.

        Args:
          shape: of one layer.
        """
        sharding = self._sharding_in_stage(self.mesh, leaf, len(shape))
        of_device = sharding.shard_shape(tuple(shape))
        for whole, own in list(zip(shape, of_device, strict=True))[-2:]:
            what = f"parts of multiples of {SCALE_BLOCK} rows and columns, as its fp8 blocks have"
            expect(own == whole or own % SCALE_BLOCK == 0, name, what, f"{whole} split as {own}")

    def of_later_stages(self, leaf: str, names: Sequence[str]) -> list[list[str] | None]:
        """The tensors of each stage but the first; None where its layer is one of zeros."""
        if not self._is_of_stages(leaf):
            return []
        of_stages = [
            [_of_later_layer(name, stage * self.num_layers) for name in names]
            for stage in range(1, self.pp)
        ]
        return [own if _layer_of(own[0]) < self.model_layers else None for own in of_stages]

    def specs(self, params: Any) -> Any:
        """The splits of a pytree of arrays, by the names of their leaves."""

        def spec(path, x):
            own: Any = self.spec(name_of(path), len(x.shape))
            return Int4Weight(own, own) if isinstance(x, Int4Weight) else own

        return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_int4)

    def create_state(self, create: Callable[[], KVState]) -> KVState:
        """The state of all devices, whose KV heads are those that `create` makes for one."""
        return create_over(self.mesh, create, self.state_specs(jax.eval_shape(create)))

    def state_specs(self, state: KVState, pages: str | None = None) -> KVState:
        """`KVState.specs` of a state of this model, whose layers are those of a stage."""
        return state.specs(heads=TP, pages=pages, layers=PP if self.pp > 1 else None)

    def own_sizes(self, name: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """The outputs that a device has of each part of "qkv" or "gate_up": [q, k, v]."""
        if name == "qkv":
            q, k, v = sizes
            return q // self.tp, *(x * self.kv_copies // self.tp for x in (k, v))
        return tuple(x // self.tp for x in sizes) if name == "gate_up" else tuple(sizes)

    def all_sizes(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Those of the whole projection, of those of a device."""
        if name == "qkv":
            q, k, v = own
            return q * self.tp, *(x * self.tp // self.kv_copies for x in (k, v))
        return tuple(x * self.tp for x in own) if name == "gate_up" else tuple(own)

    def order(self, name: str, sizes: Sequence[int]) -> np.ndarray | None:
        """The rows of "qkv" or "gate_up" in the order of the devices: [q0, k0, v0, q1, k1, v1, …].

        Args:
          sizes: outputs of each part of the whole projection.

        Returns:
          None: as they are.
        """
        if name not in ("qkv", "gate_up"):
            return None
        parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        if name == "qkv":
            q, *kv = parts
            heads = self.num_kv_heads * self.tp // self.kv_copies
            repeated = (np.repeat(x.reshape(heads, -1), self.kv_copies, axis=0) for x in kv)
            parts = [q, *(x.ravel() for x in repeated)]
        own = zip(*(np.split(part, self.tp) for part in parts), strict=True)
        return np.concatenate([piece for pieces in own for piece in pieces])

    def first_slots(self, num_experts: int) -> np.ndarray | None:
        """The expert of each slot of a model that was just loaded; None = they stay."""
        return None if self.num_slots is None else first_slots(num_experts, self.num_slots)

    def places(self, slots: np.ndarray, num_experts: int, *, as_shape: bool = False) -> Any:
        """Where the experts are, as each device has it (`as_places`), or the shape of that."""
        places: Any = as_places(slots, num_experts)
        if as_shape:
            places = jax.ShapeDtypeStruct(places.shape, places.dtype)
        return put(places, self.sharding(PLACES, 2))

    # What devices tell each other, inside of `jax.shard_map`

    def most_of_replicas(self, count: jax.Array) -> jax.Array:
        """How often all call the model where each wants to so often: they wait for each other."""
        return jax.lax.pmax(count, DP) if self.shares_tokens or self.pp > 1 else count

    def add_up(self, x: jax.Array, dtype: Any) -> jax.Array:
        """The sum over the devices of a replica, rounded to a dtype once."""
        return jax.lax.psum(x, TP).astype(dtype)

    def embedded(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Rows of a table whose rows are split: each comes from the device that has it."""
        if not self.splits_vocab:
            return table[tokens]
        first = jax.lax.axis_index(TP).astype(jnp.int32) * jnp.int32(table.shape[0])
        row = tokens - first
        is_here = (row >= 0) & (row < table.shape[0])
        found = table[jnp.where(is_here, row, 0)]
        return jax.lax.psum(jnp.where(is_here[:, None], found, jnp.zeros_like(found)), TP)

    def whole_logits(self, x: jax.Array) -> jax.Array:
        """[rows, vocab_size] of x, [rows, what this device has of it]."""
        if not self.splits_vocab:
            return x
        return jax.lax.all_gather(x, TP, axis=1, tiled=True)

    def over_experts(
        self, run: Callable[..., jax.Array], x: jax.Array, experts: jax.Array, weights: jax.Array,
        count: int,
    ) -> jax.Array:  # fmt: skip
        """run(x, experts, weights) with the experts of all devices, in x's dtype.

        Args:
          run: `moe_experts` with the experts of this device, in f32.
          experts: their ids among all.
          count: experts of this device.
        """
        tokens, per_token = experts.shape
        if self.exchanges_tokens(tokens, per_token, x.dtype.itemsize * x.shape[1]):
            return self._exchanged(run, x, experts, weights, count).astype(x.dtype)
        gathers = self.shares_tokens
        over = tuple(name for name in self.expert_axes if not (gathers and name == DP))

        def gather(*part):  # each replica has tokens of its own
            return [jax.lax.all_gather(y, DP, tiled=True) for y in part] if gathers else part

        def own(x, experts, weights):
            if self.expert_axes:
                first = self._first_expert(count)
                experts = jnp.where(experts >= 0, experts - first, jnp.int32(-1))
            return run(x, experts, weights)

        def add_up(out):
            if gathers:
                out = jax.lax.psum_scatter(out, DP, scatter_dimension=0, tiled=True)
            return (jax.lax.psum(out, over) if over else out).astype(x.dtype)

        if not self.in_halves(tokens, per_token, count * self.num_expert_devices):
            return add_up(own(*gather(x, experts, weights)))
        # One half is exchanged while the experts work on the other. The barriers keep XLA from
        # making one collective of those of both halves.
        halves = zip(*(jnp.split(y, [tokens // 2]) for y in (x, experts, weights)), strict=True)
        first, second = halves
        second, first = jax.lax.optimization_barrier((second, gather(*first)))
        out, rest = own(*first), own(*gather(*second))
        rest, out = jax.lax.optimization_barrier((rest, add_up(out)))
        return jnp.concatenate([out, add_up(rest)])

    @property
    def num_expert_devices(self) -> int:
        """Devices that experts are split over."""
        return _size(self.mesh, self.expert_axes)

    @property
    def shares_tokens(self) -> bool:
        """Whether replicas have tokens of their own, and experts of all."""
        return self.is_inside and DP in self.expert_axes and self.dp > 1

    def exchanges_tokens(self, tokens: int, per_token: int, x_bytes: int) -> bool:
        """Whether a token goes to those devices alone that have its experts; else to all.

        Args:
          tokens: of each replica.
          per_token: experts of a token.
          x_bytes: of what experts get of a token; what comes back is f32 of that or less.
        """
        return self.shares_tokens and is_cheaper(
            tp=self.tp, dp=self.dp, devices=self.num_expert_devices, tokens=tokens, k=per_token,
            token_bytes=3 * x_bytes,
        )  # fmt: skip

    def in_halves(self, tokens: int, experts_per_token: int, num_experts: int) -> bool:
        """Whether so many tokens of each replica are gathered in two halves."""
        pairs = tokens * self.dp * experts_per_token
        return self.shares_tokens and pairs >= 2 * _EXPERT_TOKENS * num_experts

    def _first_expert(self, count: int) -> jax.Array:
        """The first one of this device, of all; each device has so many."""
        return jax.lax.axis_index(self.expert_axes).astype(jnp.int32) * jnp.int32(count)

    def _exchanged(self, run, x, experts, weights, count):
        """`over_experts` where tokens go to those devices alone that have their experts."""
        device = jnp.where(experts >= 0, experts // jnp.int32(count), jnp.int32(-1))
        first = self._first_expert(count)
        if TP not in self.expert_axes:
            return exchanged(run, x, experts, weights, device, first, DP)
        # The devices of a replica have the same tokens: each sends to those in its own place.
        tp, place = jnp.int32(self.tp), jax.lax.axis_index(TP).astype(jnp.int32)
        owner = jnp.where((device >= 0) & (device % tp == place), device // tp, jnp.int32(-1))
        return jax.lax.psum(exchanged(run, x, experts, weights, owner, first, DP), TP)


def _read(
    sharding: Callable[[int], NamedSharding], source: TensorSource, names: Sequence[str], axis: int,
    order: np.ndarray | None, slots: np.ndarray | None, **dtype: DTypeLike,
) -> Any:  # fmt: skip
    """`Partition.read`; sharding: of an array of so many axes."""
    if isinstance(source, FillingSource):
        options: Any = {"order": order, "slots": slots, **dtype}
        return source.split(*names, sharding=sharding, axis=axis, **options)
    x: Any = source(*names, axis=axis, **dtype)
    for rows in (order, slots):
        if rows is not None and isinstance(x, jax.ShapeDtypeStruct):
            x = jax.ShapeDtypeStruct((len(rows), *x.shape[1:]), x.dtype)
        elif rows is not None:
            x = x[rows]
    return put(x, sharding(x.ndim))


def _zeros(
    sharding: Callable[[int], NamedSharding], source: TensorSource, names: Sequence[str], axis: int,
    order: np.ndarray | None, **dtype: DTypeLike,
) -> Any:  # fmt: skip
    """Zeros in place of what `_read` gives."""
    if isinstance(source, FillingSource):
        return _read(sharding, source.zeros(), names, axis, order, None, **dtype)
    x: Any = source(*names, axis=axis, **dtype)
    shape = x.shape if order is None else (len(order), *x.shape[1:])
    return put(np.zeros(shape, x.dtype), sharding(x.ndim))


def put(x: Any, sharding: NamedSharding) -> Any:
    """An array on the devices of all processes, each of which has it whole; shapes stay shapes."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def shapes_on(mesh: Mesh, shapes: Any, specs: Any) -> Any:
    """The same shapes, split."""
    return jax.tree.map(lambda x, spec: put(x, NamedSharding(mesh, spec)), shapes, specs)


def _kv_heads(config: DecoderConfig) -> int:
    """Those that pages hold: rows of latent attention are of all heads."""
    return config.num_kv_heads if config.latent is None else 1


def _layers_of_a_stage(config: DecoderConfig, pp: int) -> int:
    """Layers of a stage, as many in all; checks that layer j is of one kind in all stages."""
    count = config.num_layers
    each = -(-count // pp)
    expect((pp - 1) * each < count, "pp", f"layers for each stage, of {count}", pp)
    for layer in range(each, count):
        kinds = [
            (config.moe_layers[i], config.window(i)) for i in (layer % each, layer)
        ]  # fmt: skip
        text = f"stages whose layers have experts and windows alike, as layer {layer % each}"
        expect(kinds[0] == kinds[1], "pp", text, f"{pp}, with another layer {layer}")
    return each


_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def _layer_of(name: str) -> int:
    """The number of the layer of a tensor."""
    found = _LAYER.search(name)
    assert found is not None, name
    return int(found[0])


def _of_later_layer(name: str, more: int) -> str:
    """The name of the same tensor some layers later."""
    return _LAYER.sub(str(_layer_of(name) + more), name)


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in axes)
