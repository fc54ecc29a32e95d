# SPDX-License-Identifier: Apache-2.0
"""The pages of layers of one kind, with the page table that they share."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.table import PageCopies, SlotMoves
from jax_paged.checks import (
    EIGHT_BIT_DTYPES,
    FLOAT_DTYPES,
    check_choice,
    check_kv_scale,
    check_size,
    expect,
    is_per_token,
)
from jax_paged.layout import (
    LAYOUTS,
    Layout,
    PagesShape,
    Pool,
    is_one_pool,
    kv_heads_axis,
    make_shape,
    pages_rank,
    pages_shape,
    pool_of_v,
)
from jax_paged.ops.mla import check_latent_scale
from jax_paged.ops.move import copy_in_pools, copy_pages, move_slots
from jax_paged.ops.zero_pool import zero_pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVGroup:
    """One K and one V pool, stacked over layers, or one pool of latent rows; and one page table."""

    # [num_layers, num_pages, num_kv_heads, page_size, head_dim] for "HND"; of latent rows
    # [num_layers, num_pages, page_size, latent + rope]
    k_pages: jax.Array
    # The same with v_head_dim; None: latent rows, which begin with V, or k_pages of layout "rpa".
    v_pages: jax.Array | None
    table: PageTable
    layout: Layout = field(metadata={"static": True})
    # Of 8-bit pages, for the ops' arguments of these names: f32[num_layers, num_pages,
    # num_kv_heads, page_size], one per token and head, or one that is given. None: 1.
    k_scale: jax.Array | None = None  # of latent rows: kv_scale, a scalar or [num_layers]
    v_scale: jax.Array | None = None

    def __post_init__(self):
        # Leaves may be other things than arrays, e.g. shardings, or have an axis in front.
        shape = getattr(self.k_pages, "shape", ())
        counts = getattr(getattr(self.table, "ref_counts", None), "shape", ())
        if len(shape) != (4 if self.is_latent else pages_rank(self.layout) + 1) or len(counts) != 1:
            return
        if self.is_latent:
            sizes = shape[1:3]
        else:
            of_pages = pages_shape(self.k_pages, self.layout)
            sizes = of_pages.num_pages, of_pages.page_size
        have = self.table.num_pages, self.table.page_size
        if have != sizes:  # a call of a program makes a group: texts are made for an error alone
            text = "num_pages={} and page_size={}"
            kind = "of latent rows" if self.is_latent else f"of layout {self.layout!r}"
            expected = f"{text.format(*sizes)} as in k_pages {list(shape)} {kind}"
            expect(False, "table", expected, text.format(*have))

    @property
    def is_latent(self) -> bool:
        return self.v_pages is None and not is_one_pool(self.layout)

    @property
    def num_layers(self) -> int:
        return self.k_pages.shape[0]

    @staticmethod
    def create(
        table: PageTable,
        *,
        num_layers: int,
        num_kv_heads: Any,
        head_dim: Any,
        v_head_dim: Any,
        dtype: Any,
        layout: Layout,
        k_scale: Any,
        v_scale: Any,
    ) -> "KVGroup":
        """Zeroed pages of K and V for a table; the arguments are those of `KVState.create`."""
        check_choice("layout", layout, LAYOUTS)
        _check_dtype(dtype)
        shape = PagesShape(
            num_layers=num_layers,
            num_pages=table.num_pages,
            num_kv_heads=check_size("num_kv_heads", num_kv_heads),
            page_size=table.page_size,
            head_dim=check_size("head_dim", head_dim),
        )
        v_head_dim = shape.head_dim if v_head_dim is None else check_size("v_head_dim", v_head_dim)
        is_eight_bit = dtype in EIGHT_BIT_DTYPES
        expect((k_scale is None) == (v_scale is None), "v_scale", "given as k_scale is", v_scale)
        k_pages = zero_pool(make_shape(shape, layout, "k", dtype=dtype), jnp.dtype(dtype))
        v_shape = shape._replace(head_dim=v_head_dim)
        if is_one_pool(layout):
            text = f"head_dim={shape.head_dim} for layout {layout!r}"
            expect(v_head_dim == shape.head_dim, "v_head_dim", text, v_head_dim)
            v_pages = None
        else:
            v_pages = zero_pool(make_shape(v_shape, layout, "v"), jnp.dtype(dtype))
        if is_eight_bit and k_scale is None:
            scale_shape = make_shape(shape, "HND")[:-1]
            k_scale, v_scale = (zero_pool(scale_shape, jnp.dtype("float32")) for _ in "kv")
        else:
            k_scale = _own(check_kv_scale("k_scale", k_scale, k_pages, shape))
            v_pool = pool_of_v(k_pages, v_pages, layout)
            v_scale = _own(check_kv_scale("v_scale", v_scale, v_pool, shape))
        return KVGroup(k_pages, v_pages, table, layout, k_scale, v_scale)

    @staticmethod
    def create_latent(
        table: PageTable, *, num_layers: int, latent_dim: Any, dtype: Any, kv_scale: Any
    ) -> "KVGroup":
        """Zeroed pages of latent rows for a table; the arguments are those of `KVState.create`."""
        _check_dtype(dtype)
        latent_dim = check_size("latent_dim", latent_dim)
        shape = (num_layers, table.num_pages, table.page_size, latent_dim)
        kv_pages = zero_pool(shape, jnp.dtype(dtype))
        return KVGroup(kv_pages, None, table, "HND", _own(check_latent_scale(kv_scale, kv_pages)))

    def specs(
        self, heads: str | None = None, pages: str | None = None, layers: str | None = None
    ) -> "KVGroup":
        """The group with the `PartitionSpec` of each leaf, see `KVState.specs`."""

        def split(x: Any, heads_axis: int | None) -> Any:
            axes: list[str | None] = [layers, pages, *(None,) * (x.ndim - 2)]
            if heads_axis is not None:
                axes[heads_axis] = heads
            return P(*axes)

        def axis(x: Any, pool: Pool) -> int | None:
            return None if self.is_latent else kv_heads_axis(x, self.layout, pool)

        def given(scale: Any) -> Any:
            return jax.tree.map(lambda x: P(layers) if layers and x.ndim else P(), scale)

        v_pages, k_scale, v_scale = self.v_pages, self.k_scale, self.v_scale
        per_token = is_per_token(k_scale)
        return KVGroup(
            k_pages=split(self.k_pages, axis(self.k_pages, "k")),
            v_pages=None if v_pages is None else split(v_pages, axis(v_pages, "v")),
            table=jax.tree.map(lambda _: P(pages) if pages else P(), self.table),
            layout=self.layout,
            k_scale=split(k_scale, 2) if per_token else given(k_scale),
            v_scale=split(v_scale, 2) if per_token else given(v_scale),
        )

    def with_copies(self, table: PageTable, copies: PageCopies) -> "KVGroup":
        """With another table, and pages copied as its verb says; donates the pages."""
        if self.is_latent:
            (k_pages,) = copy_in_pools(2, (self.k_pages,), *copies)
            return dataclasses.replace(self, k_pages=k_pages, table=table)
        k_pages, v_pages = copy_pages(self.k_pages, self.v_pages, *copies)
        k_scale, v_scale = self.k_scale, self.v_scale
        if is_per_token(k_scale):
            k_scale, v_scale = copy_in_pools(2, (k_scale, v_scale), *copies)
        return KVGroup(k_pages, v_pages, table, self.layout, k_scale, v_scale)

    def with_moves(self, table: PageTable, moves: SlotMoves) -> "KVGroup":
        """With another table, and tokens moved as its verb says; donates the pages."""
        if self.is_latent:
            (k_pages,) = copy_in_pools(3, (self.k_pages,), *moves)
            return dataclasses.replace(self, k_pages=k_pages, table=table)
        per_token = is_per_token(self.k_scale)
        k_scale, v_scale = (self.k_scale, self.v_scale) if per_token else (None, None)
        k_pages, v_pages, *moved = move_slots(
            self.k_pages, self.v_pages, *moves, k_scale=k_scale, v_scale=v_scale,
            layout=self.layout,
        )  # fmt: skip
        k_scale, v_scale = moved or (self.k_scale, self.v_scale)
        return KVGroup(k_pages, v_pages, table, self.layout, k_scale, v_scale)


def _check_dtype(dtype: Any) -> None:
    allowed = FLOAT_DTYPES + EIGHT_BIT_DTYPES
    names = " or ".join(d.name for d in allowed)
    expect(dtype is not None and dtype in allowed, "dtype", names, dtype)


def _own(scale: jax.Array | None) -> jax.Array | None:
    """A copy: each leaf is a buffer of its own, so that a state can be donated."""
    return None if scale is None else jnp.array(scale, jnp.float32)
