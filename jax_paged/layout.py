# SPDX-License-Identifier: Apache-2.0
"""Page layouts: how K and V pages order heads, token slots and dimensions, and moves between them.

  "HND"     k_pages, v_pages [num_pages, num_kv_heads, page_size, head_dim]: the default, one head's
            tokens are contiguous
  "NHD"     k_pages, v_pages [num_pages, page_size, num_kv_heads, head_dim]
  "vllm5d"  k_pages [num_pages, num_kv_heads, head_dim/x, page_size, x] with x elements in 16 bytes,
            v_pages [num_pages, num_kv_heads, head_dim, page_size]: the caches of vLLM's paged
            attention v1 and v2
  "rpa"     K and V in one pool, k_pages [num_pages, page_size, 2 * num_kv_heads, head_dim]: K of
            head h in row 2 h, its V in row 2 h + 1, and v_pages None. The pages of the ragged paged
            attention of JAX and tokamax on TPUs

Each may carry a leading `num_layers` axis. All knowledge of the axis order is in this file.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

Layout = Literal["HND", "NHD", "vllm5d", "rpa"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
Pool = Literal["k", "v"]
POOLS: tuple[Pool, Pool] = ("k", "v")

SLOT_AXIS = {"HND": 2, "NHD": 1, "vllm5d": 3, "rpa": 1}  # counted from the page axis
_ATOM_BYTES = 16  # of K in "vllm5d": a token's contiguous dimensions
_HND = "[num_pages, num_kv_heads, page_size, head_dim]"
_NHD = "[num_pages, page_size, num_kv_heads, head_dim]"
_RPA = "[num_pages, page_size, 2·num_kv_heads, head_dim]"
_AXES = {
    ("HND", "k"): _HND,
    ("HND", "v"): _HND,
    ("NHD", "k"): _NHD,
    ("NHD", "v"): _NHD,
    ("vllm5d", "k"): "[num_pages, num_kv_heads, head_dim/x, page_size, x]",
    ("vllm5d", "v"): "[num_pages, num_kv_heads, head_dim, page_size]",
    ("rpa", "k"): _RPA,
    ("rpa", "v"): _RPA,
}


class PagesShape(NamedTuple):
    """The sizes of a pages array; num_layers is None when there is no layer axis."""

    num_layers: int | None
    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int


def pages_rank(layout: Layout, pool: Pool = "k") -> int:
    """Axes of a pages array without a layer axis."""
    return 5 if (layout, pool) == ("vllm5d", "k") else 4


def is_one_pool(layout: Layout) -> bool:
    """Whether k_pages hold V, too, and v_pages is None."""
    return layout == "rpa"


def pool_of_v(k_pages: Any, v_pages: Any, layout: Layout) -> Any:
    """The array that holds V."""
    return k_pages if is_one_pool(layout) else v_pages


def is_stacked(pages: Any, layout: Layout, pool: Pool = "k") -> bool:
    """Whether a pages array has the leading num_layers axis."""
    return len(pages.shape) == pages_rank(layout, pool) + 1


def atom_dims(dtype: Any) -> int:
    """x of "vllm5d": how many elements of K fill 16 bytes."""
    return _ATOM_BYTES // jnp.dtype(dtype).itemsize


def check_pools(k_pages: Any, v_pages: Any, layout: Layout) -> None:
    """Raises ValueError unless v_pages is None where k_pages hold V, too."""
    if is_one_pool(layout) and v_pages is not None:
        got = list(v_pages.shape) if hasattr(v_pages, "shape") else type(v_pages).__name__
        raise ValueError(
            f"v_pages: expected None for layout {layout!r}, whose k_pages hold V, got {got}"
        )


def check_axes(name: str, pages: Any, layout: Layout, pool: Pool) -> None:
    """Raises ValueError unless pages have the rank, and for "vllm5d" the x, of their layout."""
    if not hasattr(pages, "shape"):
        raise ValueError(f"{name}: expected an array, got a {type(pages).__name__}")
    rank, got = pages_rank(layout, pool), list(pages.shape)
    if len(got) not in (rank, rank + 1):
        raise ValueError(
            f"{name}: expected rank {rank}, {_AXES[layout, pool]}, or {rank + 1} with a leading "
            f"num_layers, got {got}"
        )
    if rank == 5 and got[-1] != atom_dims(pages.dtype):
        raise ValueError(
            f"{name}: expected {_AXES[layout, pool]} with x={atom_dims(pages.dtype)} elements of "
            f"{jnp.dtype(pages.dtype).name} in 16 bytes, got {got}"
        )
    if layout == "rpa" and got[-2] % 2:
        raise ValueError(f"{name}: expected {_RPA}, got {got} with an odd number of rows per slot")


def pages_shape(
    pages: jax.Array | np.ndarray | jax.ShapeDtypeStruct, layout: Layout, pool: Pool = "k"
) -> PagesShape:
    """Names the sizes of a pages array, which is a K pool or (pool="v") a V pool."""
    rank = pages_rank(layout, pool)
    num_layers = pages.shape[0] if len(pages.shape) == rank + 1 else None
    num_pages, *axes = pages.shape[-rank:]
    if layout == "HND":
        heads, slots, head_dim = axes
    elif layout == "NHD":
        slots, heads, head_dim = axes
    elif layout == "rpa":
        slots, rows, head_dim = axes
        heads = rows // 2
        if rows % 2:  # on a device that has its part of a pool, or where nobody checked
            raise ValueError(f"k_pages: expected {_RPA} with whole heads, got {[*pages.shape]}")
    elif pool == "k":
        heads, atoms, slots, x = axes
        head_dim = atoms * x
    else:
        heads, head_dim, slots = axes
    return PagesShape(num_layers, num_pages, heads, slots, head_dim)


def kv_heads_axis(pages: jax.Array | jax.ShapeDtypeStruct, layout: Layout, pool: Pool = "k") -> int:
    """The axis of a pages array that counts KV heads."""
    axis = 2 if layout in ("NHD", "rpa") else 1
    return len(pages.shape) - pages_rank(layout, pool) + axis


def make_shape(
    shape: PagesShape, layout: Layout, pool: Pool = "k", *, dtype: Any = None
) -> tuple[int, ...]:
    """The inverse of `pages_shape`: the array shape for these sizes.

    Args:
      dtype: of the pages; the shape of a "vllm5d" K pool depends on it.
    Raises:
      ValueError: head_dim of a "vllm5d" K pool is no multiple of x.
    """
    leading = (shape.num_pages,)
    if shape.num_layers is not None:
        leading = (shape.num_layers, shape.num_pages)
    heads, slots, head_dim = shape.num_kv_heads, shape.page_size, shape.head_dim
    if layout == "HND":
        return (*leading, heads, slots, head_dim)
    if layout == "NHD":
        return (*leading, slots, heads, head_dim)
    if layout == "rpa":
        return (*leading, slots, 2 * heads, head_dim)
    if pool == "v":
        return (*leading, heads, head_dim, slots)
    x = atom_dims(dtype)
    if head_dim % x:
        raise ValueError(
            f"head_dim: expected a multiple of x={x} ({jnp.dtype(dtype).name} elements in 16 "
            f"bytes) for layout 'vllm5d', got {head_dim}"
        )
    return (*leading, heads, head_dim // x, slots, x)


def slots_first(pages: Any, layout: Layout, pool: Pool = "k") -> Any:
    """Pages of any layout as [..., page, slot, head, dim]; numpy or jax arrays."""
    if layout == "NHD":
        return pages
    if layout == "rpa":
        return rows_of(pages, pool)
    if layout == "HND":
        return pages.swapaxes(-3, -2)
    if pool == "v":
        return pages.swapaxes(-3, -1).swapaxes(-2, -1)
    pages = pages.swapaxes(-4, -2).swapaxes(-3, -2)  # [..., page, slot, head, atom, x]
    return pages.reshape(*pages.shape[:-2], pages.shape[-2] * pages.shape[-1])


def rows_of(rows: Any, pool: Pool) -> Any:
    """Of slots of layout "rpa", [..., 2·heads, head_dim], the rows of K or of V."""
    return rows[..., POOLS.index(pool) :: 2, :]


def of_slots(stored: Any, shape: PagesShape, layout: Layout, pool: Pool) -> Any:
    """What pages hold at indices of slots, as [..., num_kv_heads, head_dim]."""
    if layout == "rpa":
        return rows_of(stored, pool)
    leading = stored.shape[: stored.ndim - (pages_rank(layout, pool) - 2)]
    return stored.reshape(*leading, shape.num_kv_heads, shape.head_dim)


def side_by_side(k: Any, v: Any) -> Any:
    """The slots of layout "rpa" that hold k and v, [..., heads, head_dim]."""
    xp = jnp if isinstance(k, jax.Array) else np
    return xp.stack([k, v], axis=-2).reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])


def of_slots_first(k_tokens: Any, v_tokens: Any, layout: Layout) -> tuple[Any, Any]:
    """Pages of a layout, (k_pages, v_pages), that hold K and V [..., page, slot, head, dim]."""
    if is_one_pool(layout):
        return side_by_side(k_tokens, v_tokens), None
    return from_slots_first(k_tokens, layout, "k"), from_slots_first(v_tokens, layout, "v")


def from_slots_first(tokens: Any, layout: Layout, pool: Pool = "k") -> Any:
    """The inverse of `slots_first` where each pool has an array of its own."""
    if layout == "NHD":
        return tokens
    if layout == "HND":
        return tokens.swapaxes(-3, -2)
    if pool == "v":
        return tokens.swapaxes(-2, -1).swapaxes(-3, -1)
    x = atom_dims(tokens.dtype)
    tokens = tokens.reshape(*tokens.shape[:-1], tokens.shape[-1] // x, x)
    return tokens.swapaxes(-3, -2).swapaxes(-4, -2)


def convert_pages(
    k_pages: Shaped[Array, "..."], v_pages: Shaped[Array, "..."] | None, src: Layout, dst: Layout
) -> tuple[jax.Array, jax.Array | None]:
    """Pages of layout `src` as pages of layout `dst`, for caches that come from or go elsewhere.

    It moves every element: the result is a copy of the pool, so there is room for both needed. The
    ops take every layout as it is; none of them calls this.

    Args:
      k_pages, v_pages: pages of layout src, both with or both without a leading num_layers axis;
        any dtype of 1, 2 or 4 bytes. With "rpa" v_pages is None.
      src, dst: "HND", "NHD", "vllm5d" or "rpa".

    Returns:
      (k_pages, v_pages) of layout dst, with the layer axis that they came with.

    Raises:
      ValueError: a layout is unknown, shapes do not fit it, "vllm5d" cannot hold this head_dim, or
        "rpa" these pools, whose head_dim or dtype differ.

    Differentiable.

    >>> import jax.numpy as jnp
    >>> k_pages, v_pages = jnp.zeros((9, 2, 16, 64), jnp.bfloat16), jnp.zeros((9, 2, 16, 32))
    >>> k_pages, v_pages = convert_pages(k_pages, v_pages, "HND", "vllm5d")
    >>> print(k_pages.shape, v_pages.shape)
    (9, 2, 8, 16, 8) (9, 2, 32, 16)
    """
    for name, layout in (("src", src), ("dst", dst)):
        if layout not in LAYOUTS:
            choices = " or ".join(map(repr, LAYOUTS))
            raise ValueError(f"{name}: expected {choices}, got {layout!r}")
    check_pools(k_pages, v_pages, src)
    tokens = []
    for pool, pages in zip(POOLS, (k_pages, pool_of_v(k_pages, v_pages, src)), strict=True):
        check_axes(f"{pool}_pages", pages, src, pool)
        make_shape(pages_shape(pages, src, pool), dst, pool, dtype=pages.dtype)
        tokens.append(slots_first(pages, src, pool))
    k, v = tokens
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v_pages: expected the sizes of k_pages {list(k_pages.shape)}, head_dim aside, "
            f"got {list(pool_of_v(k_pages, v_pages, src).shape)}"
        )
    if is_one_pool(dst) and (k.shape, k.dtype) != (v.shape, v.dtype):
        raise ValueError(
            f"v_pages: expected head_dim={k.shape[-1]} and dtype {k.dtype.name} as of k_pages for "
            f"layout {dst!r}, got head_dim={v.shape[-1]} and dtype {v.dtype.name}"
        )
    return of_slots_first(k, v, dst)
