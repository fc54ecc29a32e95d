# SPDX-License-Identifier: Apache-2.0
"""The engine's side of the device or devices: its state, and the programs that change it.

What the schedulers have planned goes in, one plan for each replica, and what was drawn comes out.
Without a mesh there is one replica, and its programs are those of `step` and `swap` as they are.
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
from jax_paged.ops.batch import pages_for

from ..decoder.adapters import AdaptedModel
from ..decoder.executables import compiled
from ..decoder.generation import state_creator
from ..decoder.partition import DP, TP, Partition, put
from ..decoder.protocol import AdaptedGraph, Graph, Model, split_model
from ..progress import progress_bar
from .logit_edits import everything, memory_of
from .plan import fill_plan, has_constraint, page_orders
from .replicas import GATHERED, STACKED, over_replicas, stacked
from .request import Request
from .scheduler import Feed, Orders
from .step import Drawn, EngineState, PageOrders, StepPlan, keep, remember, step
from .swap import Swapper


class ModelRunner:
    """State and programs of an engine, for all its replicas.

    Args:
      model: if it is on a mesh, each replica of that has a state of its own.
      draft_model: on one device or on the same mesh. None = none.
      sizes: of the states of a replica, as for `create_state`.
      num_holds: of a `PageOrders`.
    """

    def __init__(
        self, model: Model, draft_model: Model | None, sizes: dict[str, Any], num_holds: int
    ):
        self.partition: Partition | None = getattr(model, "partition", None)
        self.num_replicas = 1 if self.partition is None else self.partition.dp
        self._vocab_size, self._max_seqs = model.config.vocab_size, sizes["max_seqs"]
        self.graph, self.params = split_model(model)
        self._step_graph = _graph_of_replica(model)
        self._drafter: Graph | None = None
        self._drafter_params: Any = None
        creates = [state_creator(model, **sizes)]
        if draft_model is not None:
            self._add_drafter(draft_model)
            creates.append(state_creator(draft_model, **sizes))

        def create() -> EngineState:
            state, *drafter = (make() for make in creates)
            return EngineState.create(state, self._vocab_size, *drafter)

        shapes = jax.eval_shape(create)
        self.table = shapes.state.table  # that of a replica, as shapes
        self._nothing = PageOrders.create(self.table, num_holds)
        self.splits: Any = None  # of `device`
        if self.partition is None:
            self.device = create()
        else:
            self.splits = _splits_of(shapes, getattr(draft_model, "partition", None))
            self.device = self._made(create)
        # A step without constraints takes a mask that is on the devices already.
        self._all_tokens = everything(self._max_seqs, self._vocab_size)
        self._all_masks = self.of_all([self._all_tokens] * self.num_replicas)
        if self.partition is None:
            self._all_masks = jnp.asarray(self._all_masks)
        self.steps: dict[tuple[int, bool], Any] = {}
        self.swapper: Swapper | None = None

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

    # Programs

    def compile(
        self, params: Any, step_sizes: Sequence[int], *, window: tuple[int, int] | None,
        swaps: bool, scores: bool, progress: bool, **options: Any,
    ) -> float:  # fmt: skip
        """Compiles all programs; returns the seconds that it took.

        Args:
          params: as `run` gets them.
          step_sizes: tokens of a step, ascending.
          window: of `keep`.
          swaps: whether rows will be swapped.
          scores: whether steps may tell log-probabilities of prompts.
          options: of `step`.
        """
        start, state = time.perf_counter(), self.splits
        self._sizes = list(step_sizes)
        programs = [(size, False) for size in step_sizes]
        programs += [(step_sizes[-1], True)] if scores else []
        graph: Graph = self._step_graph
        if isinstance(params, AdaptedModel) and not isinstance(graph, AdaptedGraph):
            graph = AdaptedGraph(graph)  # not a model that has an adapter of its own
        count = len(programs) + 2 + swaps
        with progress_bar(count, "compiling", "programs", shown=progress) as update:
            orders = self.of_all([self._nothing] * self.num_replicas)
            self.keep_program = self.compiled(
                keep, self.device, orders, takes=(state, STACKED), gives=state, window=window
            )
            update()
            begun = self._begun(0, self._max_seqs, *self._no_memory)
            self.remember_program = self.compiled(
                remember, self.device, *begun, takes=(state, *[STACKED] * 3), gives=state
            )
            update()
            if swaps:
                self.swapper = Swapper(self)
                update()
            takes: Any = ()
            if self.partition is not None:
                drafter = None if self._drafter is None else self._drafter_splits
                takes = self._param_splits(params), state, STACKED, drafter
            for size, tells in programs:
                plans = [StepPlan.create(self._max_seqs, size, None)] * self.num_replicas
                self.steps[size, tells] = self.compiled(
                    step, params, self.device, self._with_masks(plans), self._drafter_params,
                    leading=(graph,), takes=takes, gives=(state, GATHERED),
                    drafter=self._drafter, scores=tells, **options,
                )  # fmt: skip
                update()
        return time.perf_counter() - start

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

    def _param_splits(self, params: Any) -> Any:
        assert self.partition is not None
        if isinstance(params, AdaptedModel):
            model = self._param_splits(params.model)
            return AdaptedModel(
                model, params.adapters.specs(), STACKED if params.slots.ndim else P()
            )
        return self.partition.specs(params)

    def of_all(self, each: Sequence[Any]) -> Any:
        """An argument of all replicas, of what each gets."""
        return each[0] if self.partition is None else stacked(self.partition, each)

    # Between steps

    def keep(self, orders: Sequence[Orders]) -> None:
        """Carries out what the schedulers have ordered, in as many calls as it fills."""
        for replica, one in enumerate(orders):
            for request, row in one.swap_outs:
                assert self.swapper is not None
                num_pages = pages_for(request.swapped, self.table.page_size)
                request.chunks = self.swapper.out(replica, row, num_pages)
        calls = (page_orders(self._nothing, one) for one in orders)
        for each in itertools.zip_longest(*calls, fillvalue=self._nothing):
            self.device = self.keep_program(self.device, self.of_all(each))
        for replica, one in enumerate(orders):
            for request in one.starts:
                if request.edits.is_active and request.row is not None:
                    self._remember(replica, request)
            for row, begin, chunks in one.swap_ins:
                assert self.swapper is not None
                self.swapper.back(replica, row, begin, chunks)

    @property
    def _no_memory(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(self._vocab_size, np.int32), np.zeros(self._vocab_size, np.float32)

    def _remember(self, replica: int, request: Request) -> None:
        assert request.row is not None
        known = memory_of(request.edits, self._vocab_size, request.prompt, request.tokens)
        begun = self._begun(replica, request.row, *known)
        self.device = self.remember_program(self.device, *begun)

    def _begun(self, replica: int, row: int, seen: np.ndarray, bias: np.ndarray) -> tuple:
        """The arguments of `remember`: a row of one replica, none of the others."""
        each = [(np.int32(self._max_seqs), *self._no_memory)] * self.num_replicas
        each[replica] = np.int32(row), seen, bias
        return self.of_all(each)

    # Steps

    def run(self, params: Any, feeds: Sequence[list[Feed]]) -> Drawn:
        """Dispatches a step with the feeds of each replica, in the order of their rows."""
        tells = any(feed.request.is_told_of_prompt for own in feeds for feed in own)
        most = max(sum(feed.num_tokens for feed in own) for own in feeds)
        size = next(size for size in self._sizes if size >= (self._sizes[-1] if tells else most))
        plans = []
        for own in feeds:
            mask = None
            if any(map(has_constraint, own)):
                mask = self._all_tokens.copy()
            plans.append(fill_plan(own, self._max_seqs, size, mask))
        program = self.steps[size, tells]
        plan = self._with_masks(plans)
        self.device, drawn = program(params, self.device, plan, self._drafter_params)
        return drawn

    def _with_masks(self, plans: Sequence[StepPlan]) -> StepPlan:
        """The plans of all replicas; a mask of None allows all tokens."""
        if all(plan.edits.mask is None for plan in plans):
            plan, mask = self.of_all(plans), self._all_masks
        else:
            masks = [p.edits.mask if p.edits.mask is not None else self._all_tokens for p in plans]
            mask = self.of_all(masks)
            plan = self.of_all([_with_mask(plan, None) for plan in plans])
        return _with_mask(plan, mask)

    def read(self, drawn: Drawn) -> list[Drawn]:
        """What each replica has drawn, as numpy arrays; waits for it."""
        host = jax.tree.map(np.asarray, drawn)
        if self.partition is None:
            return [host]
        return [jax.tree.map(lambda x, r=r: x[r], host) for r in range(self.num_replicas)]

    def row_slots(self, feeds: Sequence[list[Feed]]) -> Any:
        """The adapter slot of each row of each replica, -1 = none: of `AdaptedModel`."""
        each = [np.full(self._max_seqs, -1, np.int32) for _ in feeds]
        for slots, own in zip(each, feeds, strict=True):
            for feed in own:
                if feed.request.adapter is not None:
                    slots[feed.row] = feed.request.adapter.slot
        return self.of_all(each)


def _with_mask(plan: StepPlan, mask: Any) -> StepPlan:
    return dataclasses.replace(plan, edits=dataclasses.replace(plan.edits, mask=mask))


def _graph_of_replica(model: Any) -> Graph:
    """The graph of a model for programs of one replica."""
    is_split = getattr(model, "partition", None) is not None
    return split_model(model.inside() if is_split else model)[0]


def _splits_of(shapes: EngineState, of_drafter: Partition | None) -> EngineState:
    """How the state of all replicas lies on the mesh."""
    splits: Any = dict.fromkeys(("last", "entry_pages", "failed", "memory"), STACKED)
    drafter = shapes.drafter
    if drafter is not None:
        drafter = drafter.specs(heads=None if of_drafter is None else TP, pages=DP)
    return EngineState(state=shapes.state.specs(heads=TP, pages=DP), drafter=drafter, **splits)
