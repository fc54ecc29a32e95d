# SPDX-License-Identifier: Apache-2.0
"""Page tables of engines that keep the address of each page and not its number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Integer

from jax_paged.checks import expect, kind_text

_Words = tuple[jax.Array, jax.Array]  # uint32: the upper and the lower half of a number


def page_table_from_addresses(
    addresses: Integer[Any, "..."], base: int, page_bytes: int
) -> Int32[Any, "..."]:
    """A page table of ids from one of byte addresses, as kept by engines that store pointers.

    id = (address − base) / page_bytes.

    Args:
      addresses: any shape: the address of each page's first byte in the K pool (or of each in the V
        pool, with that pool's base and page_bytes). 0 (null) means no page. A numpy array of uint64
        is read on the host. A jax.Array, under jit too, has 64-bit integers, or without x64 their
        halves as 32-bit integers [..., 2], the lower one first: what
        `addresses.view(np.uint32).reshape(*addresses.shape, 2)` gives.
      base: address of the pool's first byte; with stacked pages that of the layer in question.
      page_bytes: bytes of one page of one layer, at least 1.

    Returns:
      i32 ids, one for each address, −1 for null. Ids are not checked against the size of the pool:
      the ops leave out pages beyond it. On the device an address that the host would refuse is −1,
      too.

    Raises:
      ValueError: a dtype, a shape or a size is wrong. On the host also: an address lies below base,
        between two pages, or 2^31 pages or more above base.

    The idea is that of vLLM's chunked_prefill_paged_decode with is_block_table_ptr, which rounds a
    misaligned address down instead.

    >>> import jax, numpy as np
    >>> addresses = np.array([[0x7000, 0x7800, 0]], np.uint64)
    >>> print(page_table_from_addresses(addresses, base=0x7000, page_bytes=1024))
    [[ 0  2 -1]]
    >>> halves = addresses.view(np.uint32).reshape(1, 3, 2)
    >>> print(jax.jit(page_table_from_addresses, static_argnums=(1, 2))(halves, 0x7000, 1024))
    [[ 0  2 -1]]
    """
    for name, value, least in (("base", base, 0), ("page_bytes", page_bytes, 1)):
        ok = isinstance(value, int | np.integer) and least <= value < 2**64
        expect(bool(ok), name, f"an int in [{least}, 2^64)", repr(value))
    if isinstance(addresses, jax.Array):
        return _on_device(addresses, int(base), int(page_bytes))
    return _on_host(addresses, int(base), int(page_bytes))


def _on_host(addresses: Any, base: int, page_bytes: int) -> np.ndarray:
    addresses = np.asarray(addresses)
    expect(addresses.dtype == np.uint64, "addresses", "dtype uint64", addresses.dtype.name)
    distance = addresses - np.uint64(base)  # wraps where the address is below base
    ids, rest = np.divmod(distance, np.uint64(page_bytes))
    wrong = (addresses != 0) & ((addresses < np.uint64(base)) | (rest != 0) | (ids >= 2**31))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"addresses[{', '.join(map(str, at))}]: expected 0 or base {base:#x} plus fewer than "
            f"2^31 times page_bytes={page_bytes}, got {int(addresses[at]):#x}"
        )
    return np.where(addresses == 0, -1, ids.astype(np.int64)).astype(np.int32)


def _on_device(addresses: jax.Array, base: int, page_bytes: int) -> jax.Array:
    dtype = np.dtype(addresses.dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    expect(is_integer and dtype.itemsize >= 4, "addresses", "64-bit integers, or their halves",
           kind_text(addresses))  # fmt: skip
    if dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(addresses, jnp.uint32)
    else:
        ok = addresses.ndim > 0 and addresses.shape[-1] == 2
        expect(ok, "addresses", "halves [..., 2] of 64 bits", list(addresses.shape))
        words = addresses.astype(jnp.uint32)
    address = words[..., 1], words[..., 0]
    start, size = _halves(base), _halves(page_bytes)
    distance = _minus(address, start)

    def one_bit(i, carry):
        """A step of long division: one more bit of `distance`, from the upper end on."""
        rest, quotient, is_far = carry
        number = jnp.uint32(63) - i.astype(jnp.uint32)
        word = jnp.where(number >= 32, distance[0], distance[1])
        bit = (word >> (number & jnp.uint32(31))) & jnp.uint32(1)
        has_left = rest[0] >> jnp.uint32(31)  # a bit that the shift loses
        rest = (rest[0] << 1) | (rest[1] >> jnp.uint32(31)), (rest[1] << 1) | bit
        fits = (has_left > 0) | _at_least(rest, size)
        less = _minus(rest, size)
        rest = jnp.where(fits, less[0], rest[0]), jnp.where(fits, less[1], rest[1])
        is_far |= (quotient >> jnp.uint32(30)) > 0
        return rest, (quotient << 1) | fits.astype(jnp.uint32), is_far

    zero = jnp.zeros(address[0].shape, jnp.uint32)
    begin = (zero, zero), zero, zero > 0
    rest, quotient, is_far = jax.lax.fori_loop(0, 64, one_bit, begin)
    is_page = ((rest[0] | rest[1]) == 0) & ~is_far & _at_least(address, start)
    is_page &= (address[0] | address[1]) != 0
    return jnp.where(is_page, quotient.astype(jnp.int32), jnp.int32(-1))


def _halves(number: int) -> _Words:
    return jnp.uint32(number >> 32), jnp.uint32(number & 0xFFFFFFFF)


def _minus(a: _Words, b: _Words) -> _Words:
    borrow = (a[1] < b[1]).astype(jnp.uint32)
    return a[0] - b[0] - borrow, a[1] - b[1]


def _at_least(a: _Words, b: _Words) -> jax.Array:
    return (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] >= b[1]))
