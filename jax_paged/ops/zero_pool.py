# SPDX-License-Identifier: Apache-2.0
"""Pools of zeros: on CPU in huge pages of memory, where decode reads them faster."""

import functools

import jax
import jax.numpy as jnp

from jax_paged.native import load
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import Split

TARGET = "jax_paged.zero_pool.v1"


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def zero_pool(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """`jnp.zeros`; on Linux with native code, in huge pages (transparent, as far as there are any).

    They stay the pool's memory as long as it is updated in place. Over several devices each one
    makes its own part.
    """
    axes = " ".join(f"axis_{i}" for i in range(len(shape)))
    (pool,) = ffi_call(
        TARGET,
        (jnp.zeros(shape, jnp.int8),),  # nothing but the shape of a device's part
        {},
        split=Split({"like": axes}, results=(axes,)),
        only_shapes=("like",),
        implementation=None if TARGET in load.targets("_cpu") else "reference",
        reference=lambda like: (jnp.zeros(like.shape, dtype),),
    )
    return pool
