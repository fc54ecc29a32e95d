# SPDX-License-Identifier: Apache-2.0
"""Pools of zeros: on CPU in huge pages of memory, where decode reads them faster."""

import functools

import jax
import jax.numpy as jnp

from jax_paged.native import load
from jax_paged.native.call import ffi_call
from jax_paged.native.sharding import HeadAxes

TARGET = "jax_paged.zero_pool.v1"


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def zero_pool(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """`jnp.zeros`; on Linux with native code, in huge pages (transparent, as far as there are any).

    They stay the pool's memory as long as it is updated in place.
    """
    (pool,) = ffi_call(
        TARGET,
        (),
        {},
        heads=HeadAxes({}, results=(None,)),
        implementation=None if TARGET in load.targets("_cpu") else "reference",
        reference=lambda: (jnp.zeros(shape, dtype),),
    )
    return pool
