# SPDX-License-Identifier: Apache-2.0
"""Page layouts: how K and V pages order heads, token slots and dimensions, and moves between them.

  "HND"     k_pages, v_pages [num_pages, num_kv_heads, page_size, head_dim]: the default, one head's
            tokens are contiguous
  "NHD"     k_pages, v_pages [num_pages, page_size, num_kv_heads, head_dim]
  "vllm5d"  k_pages [num_pages, num_kv_heads, head_dim/x, page_size, x] with x elements in 16 bytes,
            v_pages [num_pages, num_kv_heads, head_dim, page_size]: the caches of vLLM's paged
            attention v1 and v2

Each may carry a leading `num_layers` axis. All knowledge of the axis order is in this file.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped, UInt64

Layout = Literal["HND", "NHD", "vllm5d"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
Pool = Literal["k", "v"]
POOLS: tuple[Pool, Pool] = ("k", "v")

SLOT_AXIS = {"HND": 2, "NHD": 1, "vllm5d": 3}  # counted from the page axis
_ATOM_BYTES = 16  # of K in "vllm5d": a token's contiguous dimensions
_HND = "[num_pages, num_kv_heads, page_size, head_dim]"
_NHD = "[num_pages, page_size, num_kv_heads, head_dim]"
_AXES = {
    ("HND", "k"): _HND,
    ("HND", "v"): _HND,
    ("NHD", "k"): _NHD,
    ("NHD", "v"): _NHD,
    ("vllm5d", "k"): "[num_pages, num_kv_heads, head_dim/x, page_size, x]",
    ("vllm5d", "v"): "[num_pages, num_kv_heads, head_dim, page_size]",
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


def is_stacked(pages: Any, layout: Layout, pool: Pool = "k") -> bool:
    """Whether a pages array has the leading num_layers axis."""
    return len(pages.shape) == pages_rank(layout, pool) + 1


def atom_dims(dtype: Any) -> int:
    """x of "vllm5d": how many elements of K fill 16 bytes."""
    return _ATOM_BYTES // jnp.dtype(dtype).itemsize


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
    elif pool == "k":
        heads, atoms, slots, x = axes
        head_dim = atoms * x
    else:
        heads, head_dim, slots = axes
    return PagesShape(num_layers, num_pages, heads, slots, head_dim)


def kv_heads_axis(pages: jax.Array | jax.ShapeDtypeStruct, layout: Layout, pool: Pool = "k") -> int:
    """The axis of a pages array that counts KV heads."""
    return len(pages.shape) - pages_rank(layout, pool) + (2 if layout == "NHD" else 1)


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
    if layout == "HND":
        return pages.swapaxes(-3, -2)
    if pool == "v":
        return pages.swapaxes(-3, -1).swapaxes(-2, -1)
    pages = pages.swapaxes(-4, -2).swapaxes(-3, -2)  # [..., page, slot, head, atom, x]
    return pages.reshape(*pages.shape[:-2], pages.shape[-2] * pages.shape[-1])


def from_slots_first(tokens: Any, layout: Layout, pool: Pool = "k") -> Any:
    """The inverse of `slots_first`: [..., page, slot, head, dim] as pages of a layout."""
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
    k_pages: Shaped[Array, "..."], v_pages: Shaped[Array, "..."], src: Layout, dst: Layout
) -> tuple[jax.Array, jax.Array]:
    """Pages of layout `src` as pages of layout `dst`, for caches that come from or go elsewhere.

    It moves every element: the result is a copy of the pool, so there is room for both needed. The
    ops take every layout as it is; none of them calls this.

    Args:
      k_pages, v_pages: pages of layout src, both with or both without a leading num_layers axis;
        any dtype of 1, 2 or 4 bytes.
      src, dst: "HND", "NHD" or "vllm5d".

    Returns:
      (k_pages, v_pages) of layout dst, with the layer axis that they came with.

    Raises:
      ValueError: a layout is unknown, shapes do not fit it, or "vllm5d" cannot hold this head_dim.

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
    converted = []
    for pool, pages in zip(POOLS, (k_pages, v_pages), strict=True):
        check_axes(f"{pool}_pages", pages, src, pool)
        make_shape(pages_shape(pages, src, pool), dst, pool, dtype=pages.dtype)
        converted.append(from_slots_first(slots_first(pages, src, pool), dst, pool))
    k_shape, v_shape = pages_shape(k_pages, src, "k"), pages_shape(v_pages, src, "v")
    if k_shape._replace(head_dim=0) != v_shape._replace(head_dim=0):
        raise ValueError(
            f"v_pages: expected the sizes of k_pages {list(k_pages.shape)}, head_dim aside, "
            f"got {list(v_pages.shape)}"
        )
    return converted[0], converted[1]


def page_table_from_addresses(
    addresses: UInt64[np.ndarray, "..."], base: int, page_bytes: int
) -> Int32[np.ndarray, "..."]:
    """A page table of ids from one of byte addresses, as kept by engines that store pointers.

    id = (address − base) / page_bytes. It runs on the host: hand the result to the ops.

    Args:
      addresses: uint64, any shape: the address of each page's first byte in the K pool (or of each
        in the V pool, with that pool's base and page_bytes). 0 (null) means no page.
      base: address of the pool's first byte; with stacked pages that of the layer in question.
      page_bytes: bytes of one page of one layer, at least 1.

    Returns:
      i32 ids of the same shape, −1 for null. Ids are not checked against the size of the pool: the
      ops leave out pages beyond it.

    Raises:
      ValueError: an address lies below base, between two pages, or 2^31 pages or more above base.

    The idea is that of vLLM's chunked_prefill_paged_decode with is_block_table_ptr, which rounds a
    misaligned address down instead.

    >>> import numpy as np
    >>> addresses = np.array([[0x7000, 0x7800, 0]], np.uint64)
    >>> print(page_table_from_addresses(addresses, base=0x7000, page_bytes=1024))
    [[ 0  2 -1]]
    """
    addresses = np.asarray(addresses)
    if addresses.dtype != np.uint64:
        raise ValueError(f"addresses: expected dtype uint64, got {addresses.dtype.name}")
    for name, value, least in (("base", base, 0), ("page_bytes", page_bytes, 1)):
        if not isinstance(value, (int, np.integer)) or not least <= value < 2**64:
            raise ValueError(f"{name}: expected an int in [{least}, 2^64), got {value!r}")
    page_bytes = int(page_bytes)
    distance = addresses - np.uint64(base)  # wraps where the address is below base
    ids, rest = np.divmod(distance, np.uint64(page_bytes))
    wrong = (addresses != 0) & ((addresses < np.uint64(base)) | (rest != 0) | (ids >= 2**31))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"addresses[{', '.join(map(str, at))}]: expected 0 or base {int(base):#x} plus fewer "
            f"than 2^31 times page_bytes={page_bytes}, got {int(addresses[at]):#x}"
        )
    return np.where(addresses == 0, -1, ids.astype(np.int64)).astype(np.int32)
