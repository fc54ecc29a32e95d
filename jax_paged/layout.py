"""Page layouts: how a page orders its KV heads and token slots.

"HND" is [num_pages, num_kv_heads, page_size, head_dim] (the default: one head's tokens are
contiguous), "NHD" is [num_pages, page_size, num_kv_heads, head_dim]. Either may carry a leading
`num_layers` axis. All knowledge of the axis order is in this file.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

Layout = Literal["HND", "NHD"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


class PagesShape(NamedTuple):
    """The sizes of a pages array; num_layers is None when there is no layer axis."""

    num_layers: int | None
    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int


def pages_shape(pages: jax.Array | jax.ShapeDtypeStruct, layout: Layout) -> PagesShape:
    """Names the axes of a rank 4 or 5 pages array."""
    num_layers = pages.shape[0] if len(pages.shape) == 5 else None
    num_pages, second, third, head_dim = pages.shape[-4:]
    heads, slots = (second, third) if layout == "HND" else (third, second)
    return PagesShape(num_layers, num_pages, heads, slots, head_dim)


def kv_heads_axis(pages: jax.Array | jax.ShapeDtypeStruct, layout: Layout) -> int:
    """The axis of a pages array that counts KV heads."""
    return len(pages.shape) - (3 if layout == "HND" else 2)


def make_shape(shape: PagesShape, layout: Layout) -> tuple[int, ...]:
    """The inverse of `pages_shape`: the array shape for these sizes."""
    inner = (shape.num_kv_heads, shape.page_size)
    if layout == "NHD":
        inner = inner[::-1]
    leading = () if shape.num_layers is None else (shape.num_layers,)
    return (*leading, shape.num_pages, *inner, shape.head_dim)


def slots_first(pages: jax.Array, layout: Layout) -> jax.Array:
    """Pages of either layout as [..., page, slot, head, dim]."""
    return jnp.swapaxes(pages, -3, -2) if layout == "HND" else pages
