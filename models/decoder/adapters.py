# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a decoder: one for all rows, or many at once, one for each row.

    adapter = load_adapter(folder, config)               # `Adapter`: what one LoRA adds
    generate(model, prompts, max_new_tokens=8, adapter=adapter)

    adapters = Adapters.create(config, max_adapters=4, max_rank=16, dtype=model.dtype)
    adapters = put_adapter(adapters, 2, adapters.packed(adapter))        # into slot 2, in place
    adapted = AdaptedModel(model, adapters, slots)       # a `Model`; slots: i32, one for each row

The arrays of all slots are stacked and padded with zeros up to max_rank, so that another adapter is
other values and no other program. The q, k and v of a layer have an `a` each and lie one after
another, as their weights do; so do gate and up (`jax_paged.lora` calls them parts).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_paged import StepBatch, lora
from jax_paged.cache.state import KVState
from jax_paged.checks import Implementation, check_size, expect, kind_text, shape_text
from jax_paged.checks.fields import integer

from .config import DecoderConfig
from .partition import PP, TP, Partition, put

MAX_RANK = 64
# The modules, by their published names, that each projection of a layer consists of.
PROJECTIONS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_BY_OUTPUTS = ("qkv", "gate_up")  # which several devices split by their outputs; others by inputs
# What some checkpoints (Phi-3) have in place of the modules of a projection.
FUSED = {"qkv_proj": PROJECTIONS["qkv"], "gate_up_proj": PROJECTIONS["gate_up"]}


class LowRank(NamedTuple):
    """What is added to one module: y += b (a x)."""

    a: Any  # [rank, in]
    b: Any  # [out, rank], with the adapter's scale multiplied in


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """One LoRA: what it adds to some modules of some layers.

    layers: for each layer of the model a mapping of "q_proj", "k_proj", "v_proj", "o_proj",
      "gate_proj", "up_proj" and "down_proj", or some of them, to (a [rank, in], b [out, rank]):
      y += b (a x). b has the adapter's scale multiplied in. Experts and routers have none.
    """

    layers: tuple[dict[str, LowRank], ...]

    @property
    def rank(self) -> int:
        """The largest rank of a module; 0 without any."""
        return max((m.a.shape[0] for layer in self.layers for m in layer.values()), default=0)


def module_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """(out, in) of each module of a layer that an adapter may have.

    Raises:
      ValueError: the model has latent attention, whose projections have no place for one.
    """
    text = "a model without latent attention, where adapters are used"
    expect(config.latent is None, "model", text, f"one of type {config.model_type!r}")
    hidden, inner = config.hidden_size, config.intermediate_size
    q_out, kv_out = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "q_proj": (q_out, hidden), "k_proj": (kv_out, hidden), "v_proj": (kv_out, hidden),
        "o_proj": (hidden, q_out),
    }  # fmt: skip
    if not config.moe_layers[layer]:
        shapes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        shapes["down_proj"] = hidden, inner
    return shapes


def published_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """(out, in) of the same modules as the model's checkpoints have them, some fused into one."""
    shapes = module_shapes(config, layer)
    for name, parts in FUSED.items() if config.fused_projections else ():
        if parts[0] in shapes:
            inner = shapes[parts[0]][1]
            shapes[name] = sum(shapes.pop(part)[0] for part in parts), inner
    return shapes


def check_adapter(adapter: Any, config: Any, name: str = "adapter") -> None:
    """Checks that an adapter is one for models of this configuration.

    Raises:
      ValueError: it is no `Adapter`, a module has no place in the model or a wrong shape, or a rank
        is not in 1 … 64.
    """
    expect(isinstance(adapter, Adapter), name, "an Adapter (load_adapter)", kind_text(adapter))
    ok = isinstance(config, DecoderConfig)
    expect(ok, "model", "a Decoder, which alone takes adapters", kind_text(config))
    count = len(adapter.layers)
    expect(count == config.num_layers, f"{name}.layers", f"{config.num_layers} layers", count)
    for number, modules in enumerate(adapter.layers):
        shapes = module_shapes(config, number)
        for module, (a, b) in modules.items():
            where = f"{name}.layers[{number}][{module!r}]"
            expect(module in shapes, where, f"modules {', '.join(shapes)}", repr(module))
            (out, inner), rank = shapes[module], a.shape[0]
            expect(1 <= rank <= MAX_RANK, where, f"a rank from 1 to {MAX_RANK}", rank)
            ok = (a.shape, b.shape) == ((rank, inner), (out, rank))
            wanted = f"a [rank, {inner}] and b [{out}, rank]"
            expect(ok, where, wanted, f"{shape_text(a.shape)} and {shape_text(b.shape)}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """One projection of one layer, of all slots; or, without the first axis, of one adapter."""

    a: Any  # [slots, parts · rank, in]; those of several stages are rows behind each other
    b: Any  # [slots, out, rank], the same
    is_used: Any  # bool[slots, stages]: whether the adapter adds something here
    part_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of all slots: for each layer its projections."""

    layers: tuple[dict[str, Stack], ...]
    # Over several devices `a` and `b` are split as the weights that they belong to.
    partition: Partition | None = dataclasses.field(metadata={"static": True}, default=None)

    @staticmethod
    def create(
        config: DecoderConfig, *, max_adapters: int, max_rank: int, dtype: DTypeLike,
        partition: Partition | None = None,
    ) -> "Adapters":  # fmt: skip
        """Slots for max_adapters adapters of rank up to max_rank, which add nothing yet.

        max_rank is at most 64 and is rounded up to a multiple of 8.
        """
        check_size("max_adapters", max_adapters)
        domain = integer(1, MAX_RANK)
        expect(domain.has(max_rank), "max_rank", domain.text, repr(max_rank))
        ok = isinstance(config, DecoderConfig)
        expect(ok, "model", "a Decoder, which alone takes adapters", kind_text(config))
        stages, own = 1, config
        if partition is not None:
            stages, own = partition.pp, partition
        rank = -(-max_rank // 8) * 8

        def stack(name: str, shapes: list[tuple[int, int]]) -> Stack:
            sizes, inner = tuple(out for out, _ in shapes), shapes[0][1]
            rows = sum(sizes)
            if partition is not None:
                sizes = partition.own_sizes(name, sizes)
                rows = sum(sizes) * (partition.tp if name in _BY_OUTPUTS else 1)
            return Stack(
                a=jnp.zeros((max_adapters, stages * len(sizes) * rank, inner), dtype),
                b=jnp.zeros((max_adapters, stages * rows, rank), dtype),
                is_used=jnp.zeros((max_adapters, stages), jnp.bool_),
                part_sizes=sizes,
            )

        layers = []
        for number in range(own.num_layers):
            shapes = module_shapes(config, number)
            of_layer = {
                name: stack(name, [shapes[module] for module in modules])
                for name, modules in PROJECTIONS.items()
                if modules[0] in shapes
            }
            layers.append(of_layer)
        made = Adapters(tuple(layers), partition)
        if partition is None:
            return made
        return jax.tree.map(
            lambda x, spec: put(x, NamedSharding(partition.mesh, spec)), made, made.specs()
        )

    def specs(self) -> "Adapters":
        """The splits of the leaves: `b` as the outputs of a weight, or `a` as its inputs."""
        stages = (PP,) if self._num_stages > 1 else ()

        def of_stack(name: str, stack: Stack) -> Stack:
            is_by_outputs = name in _BY_OUTPUTS
            a = P(None, stages) if is_by_outputs else P(None, stages, TP)
            b = P(None, (*stages, TP)) if is_by_outputs else P(None, stages)
            return Stack(a, b, P(None, stages), stack.part_sizes)

        layers = ({name: of_stack(name, s) for name, s in layer.items()} for layer in self.layers)
        return Adapters(tuple(layers), self.partition)

    @property
    def _num_stages(self) -> int:
        return 1 if self.partition is None else self.partition.pp

    @property
    def max_adapters(self) -> int:
        """The number of slots."""
        return self.layers[0]["qkv"].a.shape[0]

    @property
    def max_rank(self) -> int:
        """The largest rank that a slot has room for."""
        return self.layers[0]["qkv"].b.shape[2]

    def packed(self, adapter: Adapter) -> "Adapters":
        """An adapter as `put_adapter` takes it: numpy arrays without the axis of slots.

        Raises:
          ValueError: its rank is above max_rank.
        """
        most = f"a rank of at most max_rank={self.max_rank}"
        expect(adapter.rank <= self.max_rank, "adapter", most, adapter.rank)
        nothing = len(self.layers) * self._num_stages - len(adapter.layers)
        every = [*adapter.layers, *[{}] * nothing]
        layers = []
        for number, stacks in enumerate(self.layers):
            of_stages = every[number :: len(self.layers)]
            packed = {
                name: _behind([_pack(name, stack, own, self.partition) for own in of_stages])
                for name, stack in stacks.items()
            }
            layers.append(packed)
        return Adapters(tuple(layers), self.partition)


def _behind(stages: Sequence[Stack]) -> Stack:
    """The same projection of one layer of each stage."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *stages)


def _pack(
    name: str, stack: Stack, modules: Mapping[str, LowRank], partition: Partition | None
) -> Stack:
    """The modules of a projection of one layer in the place of their parts."""
    rank, sizes, order = stack.b.shape[2], stack.part_sizes, None
    if partition is not None:
        sizes = partition.all_sizes(name, sizes)
        order = partition.order(name, sizes)
    a = np.zeros((len(sizes) * rank, stack.a.shape[2]), stack.a.dtype)
    b = np.zeros((sum(sizes), rank), stack.b.dtype)
    begin, is_used = 0, False
    for part, (module, size) in enumerate(zip(PROJECTIONS[name], sizes, strict=True)):
        if module in modules:
            own, is_used = modules[module], True
            count = own.a.shape[0]
            a[part * rank : part * rank + count] = np.asarray(own.a)
            b[begin : begin + size, :count] = np.asarray(own.b)
        begin += size
    b = b if order is None else b[order]
    return Stack(a, b, np.array([is_used]), stack.part_sizes)


@functools.partial(jax.jit, donate_argnums=0)
def put_adapter(adapters: Adapters, slot: Any, packed: Adapters) -> Adapters:
    """The adapters with another one in a slot; the arrays are updated in place (donated)."""
    return jax.tree.map(lambda every, one: every.at[slot].set(one), adapters, packed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerAdapters:
    """The adapters of one layer, and the slot of each token of a step."""

    stacks: dict[str, Stack]
    tokens: jax.Array  # i32[T], -1 = none

    def add(
        self, name: str, x: jax.Array, base: jax.Array, implementation: Implementation
    ) -> jax.Array:
        """A projection's outputs of x, with what the tokens' adapters add to them."""
        stack = self.stacks[name]
        is_used = (self.tokens >= 0) & stack.is_used[jnp.maximum(self.tokens, 0), 0]
        added = functools.partial(
            lora,
            x,
            stack.a,
            stack.b,
            jnp.where(is_used, self.tokens, jnp.int32(-1)),
            part_sizes=stack.part_sizes,
            implementation=implementation,
        )
        if base.dtype != x.dtype:  # sums in f32 that devices add up yet
            return base + added().astype(base.dtype)
        return added(base=base)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenAdapters:
    """What `Decoder` takes: adapters, and the slot of each token of the step."""

    adapters: Adapters
    tokens: jax.Array  # i32[T], -1 = none

    def layer(self, number: int) -> LayerAdapters:
        """Those of one layer."""
        return LayerAdapters(self.adapters.layers[number], self.tokens)

    def part(self, first: jax.Array, size: int) -> "TokenAdapters":
        """Of tokens first … first + size − 1."""
        own = jax.lax.dynamic_slice_in_dim(self.tokens, first, size)
        return TokenAdapters(self.adapters, own)


def token_slots(batch: StepBatch, slots: jax.Array) -> jax.Array:
    """i32[T]: the slot of each token's row, -1 for padding; slots i32[S], or i32[], of all rows."""
    is_token = batch.slot_mapping >= 0
    if slots.ndim:
        tokens = jnp.arange(is_token.shape[0], dtype=jnp.int32)
        rows = jnp.searchsorted(batch.cu_q_lens, tokens, side="right").astype(jnp.int32) - 1
        slots = slots[jnp.clip(rows, 0, slots.shape[0] - 1)]
    return jnp.where(is_token, slots, jnp.int32(-1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedModel:
    """A decoder with adapters, as a `Model`: the rows of a batch have one each, or none.

    slots: i32[rows of the batch], the slot of each row, -1 = none; or i32[], that of all rows.
    """

    model: Any
    adapters: Adapters
    slots: Any

    @property
    def config(self) -> Any:
        """That of the decoder."""
        return self.model.config

    @property
    def dtype(self) -> DTypeLike:
        """That of the decoder."""
        return self.model.dtype

    @property
    def endless(self) -> bool:
        """That of the decoder."""
        return self.model.endless

    @property
    def partition(self) -> Partition | None:
        """That of the decoder."""
        return self.model.partition

    def inside(self) -> "AdaptedModel":
        """As `Decoder.inside`."""
        return dataclasses.replace(self, model=self.model.inside())

    def __call__(
        self,
        tokens: jax.Array,
        batch: StepBatch,
        state: KVState,
        *,
        logit_rows: jax.Array | None = None,
        loads: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """As `Decoder.__call__`, each row with its adapter."""
        options = {"logit_rows": logit_rows, "loads": loads}
        return self.model(tokens, batch, state, adapters=self._of_tokens(batch), **options)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """As `Decoder.embed`."""
        return self.model.embed(tokens)

    def run_layers(
        self, x: jax.Array, batch: StepBatch, state: KVState
    ) -> tuple[jax.Array, KVState]:
        """As `Decoder.run_layers`, each row with its adapter."""
        return self.model.run_layers(x, batch, state, adapters=self._of_tokens(batch))

    def logits(self, x: jax.Array) -> jax.Array:
        """As `Decoder.logits`."""
        return self.model.logits(x)

    def _of_tokens(self, batch: StepBatch) -> TokenAdapters:
        slots = token_slots(batch.groups[0], jnp.asarray(self.slots))
        return TokenAdapters(self.adapters, slots)


def param_specs(partition: Partition, params: Any, slots: P | None = None) -> Any:
    """The splits of a model's params; slots: of those of the rows, where it has adapters."""
    if isinstance(params, AdaptedModel):
        own = partition.specs(params.model)
        of_rows = slots if slots is not None and params.slots.ndim else P()
        return AdaptedModel(own, params.adapters.specs(), of_rows)
    return partition.specs(params)


def with_adapter(model: Any, adapter: Adapter) -> AdaptedModel:
    """A model whose rows all have one adapter: a `Model` for `generate`, `score`, `Engine` ….

    The weights are shared, not copied, and may have 8 bits; the adapter has the model's dtype.
    `merge_adapter` gives a model that is faster.

    Args:
      model: a `Decoder`.
      adapter: one for it.

    Raises:
      ValueError: the model is no decoder, or the adapter is not for it.
    """
    is_plain = not isinstance(model, AdaptedModel)
    expect(is_plain, "model", "a Decoder without adapters", kind_text(model))
    check_adapter(adapter, getattr(model, "config", None))
    adapters = Adapters.create(
        model.config, max_adapters=1, max_rank=max(adapter.rank, 1), dtype=model.dtype,
        partition=model.partition,
    )  # fmt: skip
    adapters = put_adapter(adapters, np.int32(0), adapters.packed(adapter))
    return AdaptedModel(model, adapters, np.int32(0))
