# SPDX-License-Identifier: Apache-2.0
"""What the ops of both projects take alike: one pool of K and V, scales and a mask value."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.checks import (
    check_array,
    check_float,
    check_kv_dtype,
    check_native,
    check_shape,
    expect,
    is_eight_bit,
)
from jax_paged.ops.attention import ragged_paged_attention

_MASKS = -1e30  # such a logit has no weight beside any other


def check_pool(name: str, pool: Any, q_name: str, q: Any) -> None:
    """Checks the one pool of an op against its queries; errors have the op's own names."""
    check_float(q_name, q)
    check_shape(q_name, q, "tokens num_q_heads head_dim", (None, None, None))
    check_array(name, pool)
    check_shape(name, pool, "pages page_size 2·kv_heads head_dim", (None, None, None, None))
    check_kv_dtype(name, pool, q.dtype)
    expect(pool.shape[2] % 2 == 0, name, "an even number of K and V heads", pool.shape[2])
    check_native(name, pool.shape[3], None)


def check_mask_value(value: Any) -> None:
    """Refuses a mask value that would leave what is masked some weight."""
    if value is not None and not value <= _MASKS:
        raise NotImplementedError(
            f"mask_value: what is masked is left out here; expected None or at most {_MASKS:.0e}, "
            f"got {value}"
        )


def attend(
    q, pool, *rows, sm_scale: Any, k_scale: Any, v_scale: Any, return_lse: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """`ragged_paged_attention` with one scale for K and one for V, of pages of any dtype.

    Scales of float pages need not touch them: that of K goes into sm_scale, that of V into out.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        known = not isinstance(scale, int | float) or math.isfinite(scale)
        expect(known, name, "None or a finite number", scale)
    factor = None
    if is_eight_bit(pool):
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    else:
        sm_scale = sm_scale if k_scale is None else sm_scale * k_scale
        factor = v_scale
        if factor is not None and options.get("out_dtype") is not None:  # so it is rounded once
            options["out_scale"], factor = 1 / factor, None
    out, lse = ragged_paged_attention(
        q, pool, None, *rows, sm_scale=jnp.asarray(sm_scale, jnp.float32), layout="rpa",
        return_lse=True, **options,
    )  # fmt: skip
    if factor is not None:
        out = (out.astype(jnp.float32) * np.float32(factor)).astype(out.dtype)
    return (out, lse) if return_lse else out


def as_i32(name: str, x: Any, axes: str, sizes: tuple[int | None, ...]) -> jax.Array:
    """Checks for an i32 array of a shape, as the ops themselves ask for."""
    check_shape(name, x, axes, sizes)
    expect(x.dtype == np.int32, name, "dtype int32", x.dtype.name)
    return x
