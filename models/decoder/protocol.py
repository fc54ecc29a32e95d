# SPDX-License-Identifier: Apache-2.0
"""What generation, evaluation and the engine ask of a model; `Decoder` is one of many.

A model is an `nnx.Module`, or any other pytree of arrays: a dataclass under
`jax.tree_util.register_dataclass` will do. Programs take it in two parts: the arrays, and a
hashable rest that is static (`split_model`).

Layers may be run by `jax.lax.scan` or `nnx.scan` over stacked parameters. The state rides in the
carry, so its pages are updated in place, and the number of the layer, traced, is given to
`write_qkv` (or `write`) and `attend`:

    def layer(carry, xs):
        x, state = carry
        weights, number = xs
        ...                                   # state = write(k, v, state, batch, layer=number)
        return (x, state), None

    (x, state), _ = jax.lax.scan(layer, (x, state), (self.layers, jnp.arange(num_layers)))

XLA copies the weights of a layer out of the stack at each step; layers of their own spare that.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_paged.cache.state import KVState
from jax_paged.checks import expect, kind_text
from jax_paged.ops.batch import StepBatch

from .adapters import AdaptedModel

_SIZES = ("vocab_size", "context_length", "num_layers", "num_kv_heads", "head_dim")
_PACKAGE = __name__.partition(".")[0] + "."


@runtime_checkable
class ModelConfig(Protocol):
    """The sizes of a model, integers of at least 1. `DecoderConfig` has them.

    vocab_size: of the logits; token ids are below it.
    context_length: most tokens of a row, prompt and new ones.
    num_layers, num_kv_heads, head_dim: of the KV state, whose layers are all of kind "full".
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@runtime_checkable
class Model(Protocol):
    """What `generate`, `score`, `evaluate` and `Engine` run: an `nnx.Module` or another pytree.

    What of it is no array is static and has to be hashable, the `config` for one. It is run in
    compiled loops, so a call must not change what the model holds (no dropout, no counters).
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> DTypeLike:
        """Of the KV pages, unless the caller asks for another: bf16, f16 or f32."""
        ...

    def __call__(
        self,
        tokens: jax.Array,
        batch: StepBatch,
        state: KVState,
        *,
        logit_rows: jax.Array | None = None,
    ) -> tuple[jax.Array, KVState]:
        """Runs new tokens through the model; adds their K and V to the pages of all its layers.

        Args:
          tokens: i32[T], flat over the rows of `batch`, in row order. Padding at the end has ids in
            [0, vocab_size); `write` drops its K and V, and its logits are not used.
          batch: of `state.step`; has `positions`, i32[T], for RoPE. `write`, `write_qkv` and
            `attend` take all else from it: lengths, windows, trees.
          state: of num_layers layers, in `dtype`, bfloat16 or an 8-bit dtype.
          logit_rows: i32[R], R ≥ 0, indices into tokens whose logits are wanted, to be clamped into
            range. −1 = none: what comes there is not used. None = every token.

        Returns:
          (f32[R or T, vocab_size] logits, the state with other pages and nothing else changed).
        """
        ...


def row_limit(model: Model, window: int | None = None) -> int | None:
    """Most tokens of a row: the model's context, or None: a row with such a window may go on.

    A model says by `endless = True` that it counts the positions of rows with windows within what
    these keep (`jax_paged.pinned_apart`), as `Decoder` does.
    """
    context = model.config.context_length
    slides = window is not None and window <= context
    return None if slides and getattr(model, "endless", False) else context


@dataclasses.dataclass(frozen=True)
class ForeignGraph:
    """What is static of a model whose code is not of this package: a GraphDef or a PyTreeDef."""

    definition: Any


@dataclasses.dataclass(frozen=True)
class AdaptedGraph:
    """What is static of an `AdaptedModel`: that of its model. Its params are an `AdaptedModel`."""

    model: Hashable


Graph: TypeAlias = Hashable


def check_model(model: Any, name: str = "model") -> None:
    """Checks that it has what `Model` and `ModelConfig` ask for, and can be split.

    Raises:
      ValueError: what is missing or wrong.
    """
    for attribute in ("config", "dtype"):
        has = hasattr(model, attribute)
        expect(has, name, f"a model with `{attribute}` (see Model)", kind_text(model))
    text = "a model that is called with (tokens, batch, state, logit_rows=…)"
    expect(callable(model), name, text, kind_text(model))
    for size in _SIZES:
        value = getattr(model.config, size, None)
        ok = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
        expect(bool(ok), f"{name}.config.{size}", "an integer of at least 1", repr(value))
    try:
        dtype = jnp.dtype(model.dtype)
    except TypeError:
        dtype = None
    ok = dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    expect(ok, f"{name}.dtype", "bfloat16, float16 or float32", dtype or repr(model.dtype))


def split_model(model: Model, name: str = "model") -> tuple[Graph, Any]:
    """(graph, params): what is static of a model, hashable, and a pytree of its arrays.

    Raises:
      ValueError: it is no `Model`, or no pytree of arrays, or what is static cannot be hashed.
    """
    check_model(model, name)
    if isinstance(model, AdaptedModel):
        graph, params = split_model(model.model, name)
        return AdaptedGraph(graph), dataclasses.replace(model, model=params)
    is_module = isinstance(model, nnx.Module)
    if is_module and type(model).__module__.startswith(_PACKAGE):
        return nnx.split(model)
    if not is_module:
        expected = "an nnx.Module or a registered pytree of arrays"
        for path, leaf in jax.tree_util.tree_leaves_with_path(model):
            got = f"a {type(leaf).__name__} at {jax.tree_util.keystr(path) or 'its root'}"
            expect(hasattr(leaf, "shape") and hasattr(leaf, "dtype"), name, expected, got)
    definition, params = nnx.split(model) if is_module else reversed(jax.tree.flatten(model))
    graph = ForeignGraph(definition)
    try:
        hash(graph)
    except TypeError as error:
        expect(False, name, "static parts that can be hashed", error)
    return graph, params


def merge_model(graph: Graph, params: Any) -> Model:
    """The model of `split_model`.

    Inside of a loop it is merged there, not before: `nnx.scan` and other transforms take variables
    only at the trace level where they were made.
    """
    if isinstance(graph, AdaptedGraph):
        return dataclasses.replace(params, model=merge_model(graph.model, params.model))
    definition: Any = graph.definition if isinstance(graph, ForeignGraph) else graph
    if isinstance(definition, jax.tree_util.PyTreeDef):
        return jax.tree.unflatten(definition, params)
    # Flax puts the variables of params themselves into the module; these are made here.
    return nnx.merge(definition, jax.tree.map(lambda x: x, params))


def run_model(
    graph: Graph,
    params: Any,
    tokens: jax.Array,
    batch: StepBatch,
    state: KVState,
    *,
    logit_rows: jax.Array | None = None,
    **loads: jax.Array,
) -> tuple[Any, ...]:
    """`Model.__call__` of the parts of a model, with a look at what it returns.

    Args:
      loads: for a `Decoder` that is to count the loads of its experts, which then come third.

    Raises:
      ValueError: the logits are not f32[R or T, vocab_size], or the state is not like the one that
        the model was given.
    """
    model = merge_model(graph, params)
    result: Any = model(tokens, batch, state, logit_rows=logit_rows, **loads)
    ok = isinstance(result, tuple) and len(result) == 2 + len(loads)
    ok = ok and hasattr(result[0], "dtype")
    expect(ok, "model", "(logits, state) of its call", kind_text(result))
    logits, new, *counted = result
    shape = (tokens if logit_rows is None else logit_rows).shape[0], model.config.vocab_size
    ok = (logits.shape, logits.dtype) == (shape, jnp.float32)
    got = f"{logits.dtype.name}{list(logits.shape)}"
    expect(ok, "model", f"logits of float32{list(shape)}", got)
    expect(isinstance(new, KVState), "model", "(logits, state) of its call", kind_text(new))
    ok = [*map(_kind, jax.tree.leaves(new))] == [*map(_kind, jax.tree.leaves(state))]
    ok = ok and jax.tree.structure(new) == jax.tree.structure(state)
    expect(ok, "model", "the state that it was given, with new pages", "one of another kind")
    return logits, new, *counted


def _kind(x: jax.Array) -> tuple:
    return x.shape, x.dtype


def is_shapes(params: Any) -> bool:
    """Whether a model holds shapes instead of arrays (`Checkpoint.shapes`)."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
