# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the device or devices: its state, and the programs that change it.

What the schedulers have planned goes in, one plan for each replica, and what was drawn comes out.
Without a mesh there is one replica, and its programs are those of `step` and `swap` as they are.

Whatever changes the state is an `Order`. Where several processes have the devices, the engine's
sends each one to the others, which `follow`, before it carries it out. So all do the same in the
same order; otherwise they would wait for each other, or what they draw would be wrong.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_paged.checks import expect
from jax_paged.native.sharding import create_over

from ..decoder.adapters import AdaptedModel, Adapter, Adapters, param_specs, put_adapter
from ..decoder.executables import compiled
from ..decoder.partition import DP, Partition, put
from ..decoder.placement import Balance, ExpertLayers
from ..decoder.protocol import AdaptedGraph, Graph, Model, split_model
from ..distributed.orders import Order
from ..distributed.processes import Processes
from ..progress import progress_bar
from .corners import corners_of
from .groups import counted, engine_state
from .handover import check_alike
from .logit_edits import everything, memory_of
from .plan import fill_plan, has_constraint, page_orders
from .renew import checked_weights, renewed
from .replicas import GATHERED, STACKED, over_replicas, placed, stacked
from .scheduler import Feed, Orders
from .step import (
    Drawn,
    EngineState,
    PackedOrders,
    PackedPlan,
    PageOrders,
    StepPlan,
    keep,
    remember,
    step,
    take_loads,
)
from .swap import Swapper


class ModelRunner:
    """State and programs of an engine, for all its replicas.

    Args:
      model: if it is on a mesh, each replica of that has a state of its own.
      draft_model: on one device or on the same mesh. None = none.
      sizes: of the states of a replica, as for `engine_state`.
      num_holds: of a `PageOrders`.
      slots: how many adapters, and of what rank; None = none.
      processes: those that carry out the same; None = none, or this one follows.
    """

    def __init__(
        self, model: Model, draft_model: Model | None, sizes: dict[str, Any], num_holds: int,
        slots: Sequence[int] | None = None, processes: Processes | None = None,
    ):  # fmt: skip
        self._processes, self._token = processes, object()
        self._owns_params = False
        self.weights: Callable[[], Any] | None = None  # where a follower gets new ones
        self.facts = _facts(model, draft_model)
        partitions = [getattr(one, "partition", None) for one in (model, draft_model)]
        self.partitions: list[Partition | None] = partitions
        if processes is not None:
            processes.owner = self._token
            values = sizes, num_holds, slots, self.facts
            processes.send(Order(_BEGIN, values))
        self.partition: Partition | None = getattr(model, "partition", None)
        self.num_replicas = 1 if self.partition is None else self.partition.dp
        self._vocab_size, self._max_seqs = model.config.vocab_size, sizes["max_seqs"]
        self.graph, self.params = split_model(model)
        self._step_graph = _graph_of_replica(model)
        self._drafter: Graph | None = None
        self._drafter_params: Any = None
        creates = [engine_state(model, **sizes)]
        if draft_model is not None:
            self._add_drafter(draft_model)
            creates.append(engine_state(draft_model, **sizes | {"groups": False}))

        config: Any = model.config
        self.moves_experts = self.partition is not None and self.partition.num_slots is not None
        experts = (config.num_layers, config.num_experts) if self.moves_experts else None

        def create() -> EngineState:
            state, *drafter = (make() for make in creates)
            return EngineState.create(state, self._vocab_size, *drafter, experts=experts)

        shapes = jax.eval_shape(create)
        self.table = counted(shapes.state).table  # that of a replica, as shapes
        self._nothing = PageOrders.create(self.table, num_holds)
        self.splits: Any = None  # of `device`
        if self.partition is None:
            self.device = create()
        else:
            of_drafter = getattr(draft_model, "partition", None)
            self.splits = _splits_of(shapes, self.partition, of_drafter)
            self.device = self._made(create)
        # A step without constraints takes a mask that is on the devices already.
        self._all_tokens = everything(self._max_seqs, self._vocab_size)
        self._all_masks = self.of_all([self._all_tokens] * self.num_replicas)
        if self.partition is None:
            self._all_masks = jnp.asarray(self._all_masks)
        self.steps: dict[tuple[int, bool], Any] = {}
        self.swapper: Swapper | None = None
        self.adapters: Adapters | None = None  # of all slots
        if slots is not None:
            self._add_slots(model, *slots)

    def _made(self, create: Callable[[], EngineState]) -> EngineState:
        """The state of all replicas, each of which has what `create` gives."""
        assert self.partition is not None
        return create_over(self.partition.mesh, create, self.splits, STACKED)

    def _add_drafter(self, model: Model) -> None:
        graph, params = split_model(model, "draft_model")
        mesh = getattr(getattr(model, "partition", None), "mesh", None)
        if self.partition is None:
            expect(mesh is None, "draft_model", "one without a mesh, as the model is", mesh)
        else:
            ok = mesh in (None, self.partition.mesh)
            expect(ok, "draft_model", "one on the mesh of the model, or on none", mesh)
            if mesh is None:
                whole = NamedSharding(self.partition.mesh, P())
                params = jax.tree.map(lambda x: put(x, whole), params)
                self._drafter_splits: Any = P()
            else:
                self._drafter_splits = self.partition.specs(params)
        self._drafter = graph if mesh is None else _graph_of_replica(model)
        self._drafter_params = params

    def _add_slots(self, model: Model, count: int, max_rank: int) -> None:
        is_plain = not isinstance(model, AdaptedModel)
        expect(is_plain, "max_adapters", "None for a model with an adapter", count)
        config: Any = model.config  # a DecoderConfig, or `create` says so
        self.adapters = Adapters.create(
            config, max_adapters=count, max_rank=max_rank, dtype=model.dtype,
            partition=self.partition,
        )  # fmt: skip
        nothing = self.adapters.packed(Adapter(({},) * config.num_layers))
        self._put = compiled(put_adapter, self.adapters, np.int32(0), nothing)

    # Programs

    def compile(
        self, step_sizes: Sequence[int], *, window: tuple[int, int] | None, swaps: bool,
        scores: bool, progress: bool, **options: Any,
    ) -> float:  # fmt: skip
        """Compiles all programs; returns the seconds that it took.

        Args:
          step_sizes: tokens of a step, ascending.
          window: of `keep`.
          swaps: whether rows will be swapped.
          scores: whether steps may tell log-probabilities of prompts.
          options: of `step`.
        """
        start = time.perf_counter()
        self._order("compile", step_sizes, window, swaps, scores, progress, options)
        if self._processes is not None:
            self._processes.meet()
        return time.perf_counter() - start

    def _compile(
        self, step_sizes: Sequence[int], window: Sequence[int] | None, swaps: bool, scores: bool,
        progress: bool, options: dict[str, Any],
    ) -> None:  # fmt: skip
        state = self.splits
        self._sizes = list(step_sizes)
        programs = [(size, False) for size in step_sizes]
        programs += [(step_sizes[-1], True)] if scores else []
        graph: Graph = self._step_graph
        params = self._params_with(self.of_all([self._no_slots] * self.num_replicas))
        if isinstance(params, AdaptedModel) and not isinstance(graph, AdaptedGraph):
            graph = AdaptedGraph(graph)  # not a model that has an adapter of its own
        count = len(programs) + 2 + swaps + self.moves_experts
        with progress_bar(count, "compiling", "programs", shown=progress) as update:
            orders = self.of_all([self._nothing.packed()] * self.num_replicas)
            self.keep_program = self.compiled(
                keep, self.device, orders, takes=(state, STACKED), gives=state,
                window=None if window is None else tuple(window),
            )  # fmt: skip
            update()
            begun = self.of_all([self._nobody] * self.num_replicas)
            self.remember_program = self.compiled(
                remember, self.device, *begun, takes=(state, *[STACKED] * 3), gives=state
            )
            update()
            if swaps:
                self.swapper = Swapper(self)
                update()
            if self.moves_experts:
                self._take_loads = self.compiled(
                    take_loads, self.device, takes=(state,), gives=(state, P())
                )
                update()
            takes: Any = ()
            if self.partition is not None:
                drafter = None if self._drafter is None else self._drafter_splits
                takes = param_specs(self.partition, params, STACKED), state, STACKED, drafter
            for size, tells in programs:
                plan = StepPlan.create(self._max_seqs, size, None).packed()
                plan = self.of_all([plan] * self.num_replicas)
                plan = dataclasses.replace(plan, mask=self._all_masks)
                self.steps[size, tells] = self.compiled(
                    step, params, self.device, plan, self._drafter_params, leading=(graph,),
                    takes=takes, gives=(state, GATHERED), drafter=self._drafter, scores=tells,
                    **options,
                )  # fmt: skip
                update()

    def compiled(
        self, program: Any, *args: Any, takes: Sequence[Any], gives: Any,
        leading: Sequence[Any] = (), **static: Any,
    ) -> Any:  # fmt: skip
        """The executable of a jitted program of one replica, for all of them.

        Args:
          args: of all replicas. The state among them is donated if `program` gives one.
          takes, gives: as for `over_replicas`; not used without a mesh.
          leading: arguments before these that are static.
        """
        if self.partition is None:
            return compiled(program, *leading, *args, **static)
        one = functools.partial(program.__wrapped__, *leading, **static)
        every = over_replicas(self.partition, one, takes, gives)
        changes = gives is self.splits or (isinstance(gives, tuple) and self.splits is gives[0])
        donated = [i for i, split in enumerate(takes) if changes and split is self.splits]
        return compiled(jax.jit(every, donate_argnums=donated), *args)

    def of_all(self, each: Sequence[Any]) -> Any:
        """An argument of all replicas, of what each gets."""
        return self._placed(self._together(each))

    def _together(self, each: Sequence[Any]) -> Any:
        return each[0] if self.partition is None else stacked(each)

    def _placed(self, x: Any) -> Any:
        return x if self.partition is None else placed(self.partition, x)

    # Orders

    def _order(self, name: str, *values: Any, tree: Any = ()) -> Any:
        """Has all processes do something, this one last."""
        order = Order(name, values, jax.tree.leaves(tree))
        self._send(order)
        return self.carry_out(order)

    def _send(self, order: Order) -> None:
        """Has the other processes do something."""
        if self._processes is not None:
            newest = self._processes.owner is self._token
            expect(newest, "engine", "the newest one of its processes", "an older one")
            self._processes.send(order)

    def carry_out(self, order: Order) -> Any:
        """Does something on the devices of this process."""
        return _ORDERS[order.name](self, *order.values, *order.arrays)

    def _keep(self, words: np.ndarray) -> None:
        orders = PackedOrders(self._placed(words), len(self._nothing.hold_rows))
        self.device = self.keep_program(self.device, orders)

    def _remember(self, replica: int, row: int, seen: np.ndarray, bias: np.ndarray) -> None:
        each = [self._nobody] * self.num_replicas
        each[replica] = np.int32(row), seen, bias
        self.device = self.remember_program(self.device, *self.of_all(each))

    def _step(self, size: int, tells: bool, *arrays: np.ndarray) -> Drawn:
        words, *rest = map(self._placed, arrays)
        params = self._params_with(None if self.adapters is None else rest.pop(0))
        mask = rest.pop() if rest else self._all_masks
        plan = PackedPlan(words, mask, self._max_seqs, size)
        program = self.steps[size, tells]
        self.device, drawn = program(params, self.device, plan, self._drafter_params)
        return drawn

    def _update(self, copy: bool) -> None:
        what = "something for follow(processes, model, weights=…) to call"
        expect(self.weights is not None, "weights", what, "an update of them without it")
        assert self.weights is not None
        self._renew(checked_weights(self.weights(), self.graph, self.params), copy)

    def _renew(self, params: Any, copy: bool) -> None:
        self.params = renewed(self.params, params, copy=copy, may_write=self._owns_params)
        self._owns_params = copy

    def _loads(self) -> np.ndarray:
        self.device, loads = self._take_loads(self.device)
        return np.asarray(loads)

    def _move_experts(self, numbers: Sequence[int], slots: np.ndarray) -> None:
        assert self.partition is not None
        layers = ExpertLayers(self.params, self.partition)
        self.params = None  # so that what was moved is free, layer after layer
        try:
            for number, own in zip(numbers, slots, strict=True):
                layers.move(number, own)
        finally:
            self.params = layers.params()

    def _put_adapter(self, slot: int, *arrays: np.ndarray) -> None:
        packed = jax.tree.unflatten(jax.tree.structure(self.adapters), arrays)
        self.adapters = self._put(self.adapters, np.int32(slot), packed)

    # Between steps

    def keep(self, orders: Sequence[Orders]) -> None:
        """Carries out what the schedulers have ordered, in as many calls as it fills."""
        for replica, one in enumerate(orders):
            for out in one.swap_outs:
                self._order("swap out", replica, *out)
        calls = (page_orders(self._nothing, one) for one in orders)
        for each in itertools.zip_longest(*calls, fillvalue=self._nothing):
            self._order("keep", tree=self._together([one.packed().words for one in each]))
        for replica, one in enumerate(orders):
            for request in one.starts:
                if request.edits.is_active and request.row is not None:
                    known = request.prompt, request.tokens
                    memory = memory_of(request.edits, self._vocab_size, *known)
                    self._order("remember", replica, request.row, tree=memory)
            for back in one.swap_ins:
                self._order("swap in", replica, *back)
            for number in one.forgets:
                self.forget(number)

    @property
    def _nobody(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """The arguments of `remember` for a replica where no request starts."""
        zeros = np.zeros(self._vocab_size, np.int32)
        return np.int32(self._max_seqs), zeros, zeros.astype(np.float32)

    def put(self, replica: int, number: int, pools: Sequence[np.ndarray]) -> None:
        """Puts all pages of a row, of another engine, into host memory (`Swapper.put`)."""
        assert self.swapper is not None
        for chunk in self.swapper.chunks_of(pools):
            self._order("put", replica, number, tree=chunk)

    def gather(self, replica: int, number: int, i: int) -> Any:
        """Has all processes bring together a chunk in host memory (`Swapper.gather`)."""
        return self._order("gather", replica, number, i)

    def corners(self) -> dict[str, np.ndarray]:
        """The first values of each weight (`corners_of`)."""
        return self._order("corners")

    def _corners(self) -> dict[str, np.ndarray]:
        return corners_of(self.params, self.partition)

    def forget(self, number: int) -> None:
        """Gives up what host memory has under a number."""
        self._order("forget", number)

    def put_adapter(self, slot: int, packed: Adapters) -> None:
        """Puts an adapter into a slot."""
        self._order("adapter", slot, tree=packed)

    def update(self, params: Any, *, copy: bool) -> None:
        """Takes new params; the other processes take theirs (`follow`)."""
        self._send(Order("update", [copy]))
        self._renew(params, copy)

    def rebalance(self) -> Balance:
        """Moves experts so that their loads so far, of which it takes account, are even."""
        assert self.partition is not None
        loads = self._order("loads")
        layers = ExpertLayers(self.params, self.partition)
        wanted, balance = layers.balanced(loads)
        if wanted:
            self._order("move experts", [*wanted], tree=np.stack([*wanted.values()]))
        return balance

    # Steps

    def run(self, feeds: Sequence[list[Feed]]) -> Drawn:
        """Dispatches a step with the feeds of each replica, in the order of their rows."""
        tells = any(feed.request.is_told_of_prompt for own in feeds for feed in own)
        most = max(sum(feed.num_tokens for feed in own) for own in feeds)
        size = next(size for size in self._sizes if size >= (self._sizes[-1] if tells else most))
        plans, masks = [], [self._all_tokens] * len(feeds)
        for replica, own in enumerate(feeds):
            if any(map(has_constraint, own)):
                masks[replica] = self._all_tokens.copy()
            plans.append(fill_plan(own, self._max_seqs, size, masks[replica]).packed().words)
        slots = None if self.adapters is None else self._together(list(map(self._slots_of, feeds)))
        is_free = all(mask is self._all_tokens for mask in masks)
        mask = None if is_free else self._together(masks)
        return self._order("step", size, tells, tree=(self._together(plans), slots, mask))

    def read(self, drawn: Drawn) -> list[Drawn]:
        """What each replica has drawn, as numpy arrays; waits for it."""
        host = jax.tree.map(np.asarray, drawn)
        if self.partition is None:
            return [host]
        return [jax.tree.map(lambda x, r=r: x[r], host) for r in range(self.num_replicas)]

    @property
    def _no_slots(self) -> np.ndarray:
        return np.full(self._max_seqs, -1, np.int32)

    def _slots_of(self, feeds: list[Feed]) -> np.ndarray:
        """The adapter slot of each row of a replica, -1 = none: of `AdaptedModel`."""
        slots = self._no_slots
        for feed in feeds:
            if feed.request.adapter is not None:
                slots[feed.row] = feed.request.adapter.slot
        return slots

    def _params_with(self, slots: Any) -> Any:
        """The params of a step whose rows have these slots."""
        if self.adapters is None:
            return self.params
        return AdaptedModel(self.params, self.adapters, slots)


def follow(
    processes: Processes, model: Model, *, draft_model: Model | None = None,
    weights: Callable[[], Any] | None = None,
) -> None:  # fmt: skip
    """Does on this process's devices what the engine of the first process does on its own.

    Each process but the first calls it, with models that are loaded like those of the first one. It
    returns when the first one is done.

    Args:
      weights: called each time that the engine updates its weights. It gives those of this process,
        as `Engine.update_weights` takes them (the arrays that the processes share).

    Raises:
      ValueError: the engine's models are others, or it updates weights and there are none.
    """
    runner, facts = None, _facts(model, draft_model)
    while (order := processes.receive()) is not None:
        if order.name == _BEGIN:
            *arguments, theirs = order.values
            check_alike(theirs, facts, "", "process 0")
            runner = None  # its pages are free before there are others
            runner = ModelRunner(model, draft_model, *arguments)
            runner.weights = weights
        else:
            ok = runner is not None and order.name in _ORDERS
            expect(ok, "process 0", "orders of an engine", repr(order.name))
            assert runner is not None
            runner.carry_out(order)
            if order.name == "compile":
                processes.meet()


def check_processes(model: Model, processes: Processes | None) -> None:
    """Checks that an engine is made where a model's processes are told what to do."""
    partition: Partition | None = getattr(model, "partition", None)
    devices = [] if partition is None else partition.mesh.devices.flat
    count = len({device.process_index for device in devices})
    if processes is None:
        text = "those that the model lies on (start_processes)"
        expect(count < 2, "processes", text, None)
    else:
        ok = count == processes.count
        expect(ok, "model", f"one on a mesh over all {processes.count} processes", count)
        text = "the first one; the others follow(processes, model)"
        expect(processes.is_first, "processes", text, f"number {processes.index}")


def _facts(model: Model, draft_model: Model | None) -> dict[str, str]:
    """What the models of all processes must have in common."""
    facts: dict[str, Any] = {}
    for name, one in (("model", model), ("draft_model", draft_model)):
        if one is not None:
            mesh = getattr(getattr(one, "partition", None), "mesh", None)
            facts[f"{name}.dtype"] = np.dtype(one.dtype).name
            facts[f"{name}.mesh"] = None if mesh is None else dict(mesh.shape)
            slots = getattr(getattr(one, "partition", None), "num_slots", None)
            facts[f"{name}.slots of experts"] = slots
            of_config = getattr(one.config, "__dict__", {})
            facts |= {f"{name}.config.{field}": value for field, value in of_config.items()}
    return {name: repr(value) for name, value in facts.items()}


_BEGIN = "begin"
_ORDERS: dict[str, Callable[..., Any]] = {
    "compile": ModelRunner._compile, "keep": ModelRunner._keep,
    "remember": ModelRunner._remember, "step": ModelRunner._step,
    "adapter": ModelRunner._put_adapter, "update": ModelRunner._update, "loads": ModelRunner._loads,
    "move experts": ModelRunner._move_experts,
    "swap out": lambda runner, *values: runner.swapper.out(*values),
    "swap in": lambda runner, *values: runner.swapper.back(*values),
    "put": lambda runner, *values: runner.swapper.put(*values),
    "gather": lambda runner, *values: runner.swapper.gather(*values),
    "forget": lambda runner, number: runner.swapper.forget(number),
    "corners": ModelRunner._corners,
}  # fmt: skip


def _graph_of_replica(model: Any) -> Graph:
    """The graph of a model for programs of one replica."""
    is_split = getattr(model, "partition", None) is not None
    return split_model(model.inside() if is_split else model)[0]


def _splits_of(
    shapes: EngineState, partition: Partition, of_drafter: Partition | None
) -> EngineState:
    """How the state of all replicas lies on the mesh."""
    names = ("last", "entry_pages", "failed", "memory", "loads")
    splits: Any = {name: STACKED for name in names if getattr(shapes, name) is not None}
    drafter = shapes.drafter
    if drafter is not None:
        is_split = of_drafter is not None
        drafter = of_drafter.state_specs(drafter, DP) if is_split else drafter.specs(pages=DP)
    state = partition.state_specs(shapes.state, DP)
    return EngineState(state=state, drafter=drafter, **splits)
