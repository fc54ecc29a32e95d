# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a model: the pages of all its layers, and the verbs on them.

The verbs are those of `PageTable`, with the same rules and statuses. Only `fork`, `truncate` and
`commit_tree` touch the pages: they copy the few pages that change hands, or the few tokens that are
kept, in place when the caller's jit donates the state. Called eagerly, these three donate the pages
of the state that they are given: use the returned one.

Layers of one kind form a group: those that see all tokens ("full"), the last few (a window), or
one latent row per token ("mla"). Each group has pools and a page table of its own. A group with a
window frees the pages that have left it, so its pools need room for a window and a chunk per row.

A verb is done on the table of every group, for all of them or for none: a row's status is the first
that is not OK, in the order of the groups. To keep only the rows that are OK may then take several
calls: a row may have lived on pages of one group that a row would have freed which failed in
another. Rows, their lengths and handles are the same in all groups.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.pools import KVGroup
from jax_paged.cache.table import Integers, PageCopies, SlotMoves, all_ok, check_rows
from jax_paged.checks import INT32_MAX, check_size, expect
from jax_paged.checks.status import Status, code
from jax_paged.layout import Layout
from jax_paged.native.sharding import create_over
from jax_paged.ops.batch import StepBatch

# "full": K and V of all tokens. An int: K and V of a window of so many tokens, the query's own
# included. "mla": latent rows of all tokens.
LayerKind = Literal["full", "mla"] | int

P = ParamSpec("P")
R = TypeVar("R")


@overload
def _verb(
    of_table: Callable[Concatenate[PageTable, P], tuple[PageTable, jax.Array]], ids: str = "rows",
    *, many: bool = True,
) -> Callable[Concatenate["KVState", P], tuple["KVState", jax.Array]]: ...  # fmt: skip


@overload
def _verb(
    of_table: Callable[
        Concatenate[PageTable, P], tuple[PageTable, PageCopies | SlotMoves, jax.Array]
    ],
    ids: str = "rows", *, many: bool = True,
) -> Callable[Concatenate["KVState", P], tuple["KVState", jax.Array]]: ...  # fmt: skip


@overload
def _verb(
    of_table: Callable[Concatenate[PageTable, P], tuple[PageTable, R, jax.Array]],
    ids: str = "rows", *, many: bool = True,
) -> Callable[Concatenate["KVState", P], tuple["KVState", R, jax.Array]]: ...  # fmt: skip


def _verb(of_table: Any, ids: str = "rows", *, many: bool = True) -> Any:
    """A verb of `PageTable` as one of `KVState`.

    `ids` names the argument whose entries take no part where they are -1. many: whether it can be
    done in several groups.
    """
    signature = inspect.signature(of_table)

    @functools.wraps(of_table)
    def verb(state, *args, **kwargs):
        given = signature.bind(None, *args, **kwargs).arguments
        del given["table"]
        return state._do(of_table, ids, given, many)

    text = re.split(r"\n\s*>>>", of_table.__doc__)[0]
    parameters = list(signature.parameters.values())
    parameters[0] = parameters[0].replace(name="state", annotation="KVState")
    vars(verb)["__signature__"] = inspect.Signature(parameters)
    verb.__doc__ = re.sub(r"\(table, (copies, |moves, )?", "(state, ", text)
    return verb


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVState:
    """The KV cache of a model, or of a range of its layers. Make one with `create`."""

    groups: tuple[KVGroup, ...]  # in the order in which their kinds first occur
    layer_kinds: tuple[LayerKind, ...] = field(metadata={"static": True})
    layer_begin: int = field(metadata={"static": True}, default=0)  # the first layer of the range

    reserve = _verb(PageTable.reserve)
    step = _verb(PageTable.step)
    append = _verb(PageTable.append)
    release = _verb(PageTable.release)
    fork = _verb(PageTable.fork, "child")
    truncate = _verb(PageTable.truncate)
    commit_tree = _verb(PageTable.commit_tree)
    set_window = _verb(PageTable.set_window, many=False)
    hold = _verb(PageTable.hold, many=False)
    unhold = _verb(PageTable.unhold, "page_ids", many=False)
    adopt = _verb(PageTable.adopt, many=False)

    @staticmethod
    def create(
        *,
        num_pages: int | Mapping[LayerKind, int],
        page_size: int,
        max_seqs: int,
        pages_per_seq: int | Mapping[LayerKind, int],
        dtype: Any,
        num_layers: int | None = None,
        layer_kinds: Sequence[LayerKind] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        latent_dim: int | None = None,
        layout: Layout = "HND",
        max_tree: int = 256,
        windows: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_scale: Any = None,
        layer_begin: int = 0,
        mesh: Mesh | None = None,
    ) -> "KVState":
        """An empty state with zeroed pages.

        Args:
          num_pages, page_size, max_seqs, pages_per_seq, max_tree: see `PageTable.create`. All
            layers of a group share one page table, so a page id stands for a page of each of them.
            num_pages and pages_per_seq may be given for each kind of layer. A row of a group with a
            window holds up to pages_for(window + chunk, page_size) + 1 pages where `reserve` brings
            `chunk` tokens.
          dtype: of all pools: bf16, f16, f32, f8e4m3fn, f8e5m2 or int8 (see `kv_dtype`).
          num_layers: how many layers, where all of them see all tokens. Else give layer_kinds.
          layer_kinds: for each layer its kind: "full", "mla" or the size of its window.
          num_kv_heads, head_dim, v_head_dim: of the layers with K and V; v_head_dim None: head_dim.
          latent_dim: of "mla" layers, the width of a row, latent + rope.
          layout: "HND", "NHD", "vllm5d" or "rpa", see `layout`.
          windows: whether rows can have a sliding window of their own, see `set_window`. Layers
            that have one keep theirs.
          k_scale, v_scale: of 8-bit pages: a scalar, [num_layers] or [num_layers, num_kv_heads] of
            a group. None for both: pools of scales, one per token and head, which the writes
            compute; they add 8 bytes per token, head and layer to the 2 · head_dim of K and V.
          kv_scale: of 8-bit latent rows: a scalar or [num_layers].
          layer_begin: the number in the model of the first of these layers, for a pipeline stage.
          mesh: devices that share the state. An axis "tp" splits the KV heads. The replicas of an
            axis "dp" have pages and page tables of their own: num_pages, pages_per_seq and max_seqs
            are those of one. An axis "pp" splits the layers: the state is that of one stage, which
            has num_layers / pp of them, numbered from 0 on each. The leaves are as
            `specs(heads="tp", pages="dp", layers="pp")` says. Each device makes its own zeros.

        Raises:
          ValueError: a size, a kind, the dtype, the layout or a scale is wrong.

        >>> state = KVState.create(num_layers=2, num_pages=8, page_size=16, num_kv_heads=4,
        ...                        head_dim=64, max_seqs=2, pages_per_seq=4, dtype="bfloat16")
        >>> state, status = state.reserve([0], 20)
        >>> state.k_pages.shape, int(state.free_pages)
        ((2, 8, 4, 16, 64), 6)
        >>> state = KVState.create(layer_kinds=["full", 32, 32], num_pages={"full": 64, 32: 8},
        ...                        pages_per_seq={"full": 64, 32: 4}, page_size=16, max_seqs=2,
        ...                        num_kv_heads=4, head_dim=64, dtype="bfloat16")
        >>> state.find(2), state.groups[1].k_pages.shape
        ((1, 1), (2, 8, 4, 16, 64))
        """
        expect(
            (num_layers is None) != (layer_kinds is None),
            "num_layers", "an int, or layer_kinds instead", "both" if layer_kinds else "neither",
        )  # fmt: skip
        if layer_kinds is None:
            kinds = ("full",) * check_size("num_layers", num_layers)
        else:
            kinds = _checked_kinds(layer_kinds)
        ok = isinstance(layer_begin, int) and layer_begin >= 0
        expect(ok, "layer_begin", "an integer of at least 0", repr(layer_begin))
        expect(isinstance(windows, bool), "windows", "a bool", repr(windows))
        if mesh is not None:
            arguments = {
                "num_pages": num_pages, "page_size": page_size, "max_seqs": max_seqs,
                "pages_per_seq": pages_per_seq, "dtype": dtype, "layer_kinds": kinds,
                "head_dim": head_dim, "v_head_dim": v_head_dim, "latent_dim": latent_dim,
                "layout": layout, "max_tree": max_tree, "windows": windows, "k_scale": k_scale,
                "v_scale": v_scale, "kv_scale": kv_scale, "layer_begin": layer_begin,
            }  # fmt: skip
            return _create_on(mesh, num_kv_heads, arguments)
        groups = []
        for kind, sizes in _per_kind(
            kinds, num_pages=num_pages, pages_per_seq=pages_per_seq
        ).items():
            is_window = isinstance(kind, int)
            table = PageTable.create(
                **sizes, max_seqs=max_seqs, page_size=page_size, max_tree=max_tree,
                windows=windows and not is_window, row_window=kind if is_window else None,
            )  # fmt: skip
            same: dict[str, Any] = {"num_layers": kinds.count(kind), "dtype": dtype}
            if kind == "mla":
                group = KVGroup.create_latent(
                    table, **same, latent_dim=latent_dim, kv_scale=kv_scale
                )
            else:
                group = KVGroup.create(
                    table, **same, num_kv_heads=num_kv_heads, head_dim=head_dim,
                    v_head_dim=v_head_dim, layout=layout, k_scale=k_scale, v_scale=v_scale,
                )  # fmt: skip
            groups.append(group)
        return KVState(tuple(groups), kinds, layer_begin)

    def specs(
        self, *, heads: str | None = None, pages: str | None = None, layers: str | None = None
    ) -> "KVState":
        """The state with the `PartitionSpec` of each leaf, for shardings and `jax.shard_map`.

        Args:
          heads: the mesh axis over which the KV heads are split. None = none.
          pages: the mesh axis of replicas that have pages and page tables of their own. The pages
            of all replicas then lie in one array, split along its axis of pages (an axis of its own
            would make XLA copy the pools); the leaves of the tables have a leading axis of
            replicas. None = one table.
          layers: the mesh axis of pipeline stages, each of which has as many layers as this state,
            along the axis of layers. The tables are whole on each. None = one stage.
        """
        groups = tuple(group.specs(heads, pages, layers) for group in self.groups)
        return dataclasses.replace(self, groups=groups)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each group."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def layers(self) -> range:
        """The numbers of these layers in the model."""
        return range(self.layer_begin, self.layer_begin + len(self.layer_kinds))

    def find(self, layer: Any) -> tuple[int, Any]:
        """Where a layer of the model is: its group, and its number in the pools of that group.

        Raises:
          ValueError: it is none of `layers`, or traced where there are several groups.
        """
        if not isinstance(layer, int | np.integer):
            text = f"an int for a state of the groups {self.kinds}"
            expect(len(self.groups) == 1, "layer", text, type(layer).__name__)
            return 0, layer - self.layer_begin if self.layer_begin else layer
        expect(layer in self.layers, "layer", f"one of {self.layers}", layer)
        number = int(layer) - self.layer_begin
        kind = self.layer_kinds[number]
        return self.kinds.index(kind), self.layer_kinds[:number].count(kind)

    def only(self, group: int) -> "KVState":
        """A state of the layers of one group, numbered from 0."""
        kind = self.kinds[group]
        return KVState((self.groups[group],), (kind,) * self.layer_kinds.count(kind))

    # What a state of one group has; else see `groups`.

    @property
    def k_pages(self) -> jax.Array:
        """K, or latent rows, of all layers."""
        return self._group.k_pages

    @property
    def v_pages(self) -> jax.Array:
        """V of all layers; None where k_pages of layout "rpa" hold it."""
        return cast("jax.Array", self._group.v_pages)

    @property
    def k_scale(self) -> jax.Array | None:
        """Of 8-bit pages, see `KVGroup`."""
        return self._group.k_scale

    @property
    def v_scale(self) -> jax.Array | None:
        """Of 8-bit pages, see `KVGroup`."""
        return self._group.v_scale

    @property
    def layout(self) -> Layout:
        return self._group.layout

    @property
    def table(self) -> PageTable:
        return self._group.table

    def replace(self, **changes: Any) -> "KVState":
        """With other fields of its group, e.g. k_pages and v_pages after an op wrote them."""
        return dataclasses.replace(self, groups=(dataclasses.replace(self._group, **changes),))

    def with_copies(self, table: Any, copies: PageCopies) -> "KVState":
        """Of a single group: with another table, and pages copied; donates the pages."""
        return dataclasses.replace(self, groups=(self._group.with_copies(table, copies),))

    def with_pages(self, group: int, *pools: Any) -> "KVState":
        """With other pages of a group: k_pages, v_pages, and their scales where given."""
        names = ("k_pages", "v_pages", "k_scale", "v_scale")[: len(pools)]
        changed = dataclasses.replace(self.groups[group], **dict(zip(names, pools, strict=True)))
        return dataclasses.replace(
            self, groups=(*self.groups[:group], changed, *self.groups[group + 1 :])
        )

    @property
    def _group(self) -> KVGroup:
        if len(self.groups) != 1:
            raise AttributeError(
                f"state: expected one of a single group of layers, got one of {self.kinds}, each "
                "of which has this for itself: see state.groups"
            )
        return self.groups[0]

    @property
    def bare(self) -> "KVState":
        """Without pages: for verbs in loops and branches, through which XLA would copy the pools.

        Only `reserve`, `step`, `append` and `release` need none. See `with_tables`.
        """
        none: dict[str, Any] = dict.fromkeys(("k_pages", "v_pages", "k_scale", "v_scale"))
        groups = tuple(dataclasses.replace(group, **none) for group in self.groups)
        return dataclasses.replace(self, groups=groups)

    def with_tables(self, other: "KVState") -> "KVState":
        """With the page tables of another state, e.g. of its own `bare` after verbs."""
        return self._with([(group.table, None) for group in other.groups])

    # What is the same in all groups.

    @property
    def max_seqs(self) -> int:
        return self.groups[0].table.max_seqs

    @property
    def free_rows(self) -> jax.Array:
        """bool[max_seqs]: the rows that are not live."""
        return self.groups[0].table.free_rows

    @property
    def total_tokens(self) -> jax.Array:
        """i32[]: the sum of all lengths, see `PageTable.total_tokens`."""
        return self.groups[0].table.total_tokens

    @property
    def is_empty(self) -> jax.Array:
        """bool[]: no row is live."""
        return self.groups[0].table.is_empty

    def handles(self, rows: Integers) -> jax.Array:
        """Handles of rows: `PageTable.handles`."""
        return self.groups[0].table.handles(rows)

    def rows_of(self, handles: Integers) -> jax.Array:
        """The rows of handles: `PageTable.rows_of`."""
        return self.groups[0].table.rows_of(handles)

    # What differs: i32[], and for a state of several groups i32[groups].

    @property
    def free_pages(self) -> jax.Array:
        """How many pages no row holds and are not on hold."""
        return _each([group.table.free_pages for group in self.groups])

    @property
    def peak_pages(self) -> jax.Array:
        """The most pages held after any verb since the state was made or reset."""
        return _each([group.table.peak_pages for group in self.groups])

    def reset(self) -> "KVState":
        """Frees all rows: `PageTable.reset`. What pages hold stays until it is overwritten."""
        return self._with([(group.table.reset(), None) for group in self.groups])

    def _do(
        self, of_table: Callable[..., tuple], ids: str, given: dict[str, Any], many: bool
    ) -> tuple:
        """Does a verb on every group's table, or, if any of its ids fails in any, with all -1.

        So nothing is ever selected after the fact: a row that takes no part changes nothing. The
        first round is for its statuses alone, and the compiler drops the rest of it.
        """
        tables = [group.table for group in self.groups]
        if len(tables) > 1:
            name = of_table.__name__
            if not many:
                raise NotImplementedError(
                    f"{name}: expected a state of one group of layers, got one of {self.kinds}"
                )
            rows = check_rows(ids, given[ids])
            status = jnp.zeros(rows.shape, jnp.int32)
            for table in tables:
                status = jnp.where(status == code(Status.OK), of_table(table, **given)[-1], status)
            given = given | {ids: jnp.where(all_ok(status), rows, -1)}
        done = [of_table(table, **given) for table in tables]
        if len(tables) == 1:
            status = done[0][-1]
        state = self._with([(table, result[0] if result else None) for table, *result, _ in done])
        results = [result for _, *between, _ in done for result in between]
        if not results or isinstance(results[0], PageCopies | SlotMoves):
            return state, status
        if isinstance(results[0], StepBatch):
            return state, dataclasses.replace(results[0], more=tuple(results[1:])), status
        return state, results[0], status

    def _with(self, changes: Sequence[tuple[PageTable, Any]]) -> "KVState":
        """With other tables, and the copies or moves done that their verbs ask for."""
        groups = []
        for group, (table, result) in zip(self.groups, changes, strict=True):
            if isinstance(result, PageCopies):
                groups.append(group.with_copies(table, result))
            elif isinstance(result, SlotMoves):
                groups.append(group.with_moves(table, result))
            else:
                groups.append(dataclasses.replace(group, table=table))
        return dataclasses.replace(self, groups=tuple(groups))


def _each(values: list[jax.Array]) -> jax.Array:
    return values[0] if len(values) == 1 else jnp.stack(values)


def _create_on(mesh: Mesh, num_kv_heads: int | None, arguments: dict[str, Any]) -> KVState:
    """`KVState.create` over a mesh: each device makes its part."""
    heads, pages = (name if name in mesh.axis_names else None for name in ("tp", "dp"))
    axes = "axes 'tp', 'dp' or both"
    expect(bool(heads or pages), "mesh", axes, f"axes {mesh.axis_names}")
    layers = "pp" if "pp" in mesh.axis_names else None
    stages, kinds = mesh.shape[layers] if layers else 1, arguments["layer_kinds"]
    of_one = kinds[: len(kinds) // stages]
    expect(
        of_one * stages == kinds, "layer_kinds", f"pp={stages} stages with the same kinds", kinds
    )
    arguments["layer_kinds"] = of_one
    count = mesh.shape[heads] if heads else 1
    if num_kv_heads is not None:
        check_size("num_kv_heads", num_kv_heads)
        expect(num_kv_heads % count == 0, "num_kv_heads", f"a multiple of tp={count}", num_kv_heads)
        num_kv_heads //= count

    def create() -> KVState:
        return KVState.create(num_kv_heads=num_kv_heads, **arguments)

    specs = jax.eval_shape(create).specs(heads=heads, pages=pages, layers=layers)
    return create_over(mesh, create, specs, PartitionSpec(pages) if pages else None)


def _checked_kinds(layer_kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    kinds = tuple(layer_kinds)
    for kind in kinds:
        is_window = isinstance(kind, int) and not isinstance(kind, bool)
        ok = kind in ("full", "mla") or (is_window and 1 <= kind <= INT32_MAX)
        expect(ok, "layer_kinds", "each 'full', 'mla' or an int of at least 1", repr(kind))
    expect(len(kinds) > 0, "layer_kinds", "at least one layer", repr(layer_kinds))
    return kinds


def _per_kind(kinds: tuple[LayerKind, ...], **sizes: Any) -> dict[LayerKind, dict[str, int]]:
    """For each kind the sizes, of which each is one number or a mapping of kinds to numbers."""
    wanted = list(dict.fromkeys(kinds))
    for name, size in sizes.items():
        if isinstance(size, Mapping):
            expect(set(size) >= set(wanted), name, f"a size for each of {wanted}", list(size))
    return {
        kind: {n: x[kind] if isinstance(x, Mapping) else x for n, x in sizes.items()}
        for kind in wanted
    }
