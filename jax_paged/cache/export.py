# SPDX-License-Identifier: Apache-2.0
"""Programs that outlive their process: the types and the custom calls of ours in `jax.export`."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from jax import export as jax_export

from jax_paged.cache.page_table import PageTable
from jax_paged.cache.pools import KVGroup
from jax_paged.cache.state import KVState
from jax_paged.cache.table import Windows
from jax_paged.cache.transfer.inbox import Inbox
from jax_paged.native.load import build_info
from jax_paged.ops.batch import StepBatch
from jax_paged.ops.int4 import Int4Weight
from jax_paged.ops.packing import PackedWeight
from jax_paged.ops.plan import AttentionPlan

TYPES = (
    AttentionPlan, Inbox, Int4Weight, KVGroup, KVState, PackedWeight, PageTable, StepBatch, Windows,
)  # fmt: skip


def export(
    fun: Any,
    *,
    platforms: Sequence[str] | None = None,
    disabled_checks: Sequence[jax_export.DisabledSafetyCheck] = (),
) -> Callable[..., jax_export.Exported]:
    """`jax.export.export` for programs that call our kernels.

    JAX exports a custom call only where somebody vouches for it. We do: names and attributes of our
    targets do not change their meaning (a new meaning gets a new name). The process that loads the
    program must import jax_paged, so that it has the kernels and knows the types of a state.

    Args:
      fun: a jitted function.
      platforms, disabled_checks: as `jax.export.export` takes them.

    Returns:
      A function of the arguments of `fun`, or their shapes, that gives a `jax.export.Exported`.

    >>> import jax, jax.numpy as jnp, jax_paged as jp
    >>> table = jp.PageTable.create(8, 2, pages_per_seq=4, page_size=16)
    >>> reserve = jax.jit(lambda table: table.reserve(jnp.arange(2), 20))
    >>> blob = jp.export(reserve)(table).serialize()
    >>> _, status = jax.export.deserialize(blob).call(table)
    >>> print(status)
    [0 0]
    """
    custom_call = jax_export.DisabledSafetyCheck.custom_call
    ours = [custom_call(target) for target in build_info()["targets"]]
    checks = [*disabled_checks, *ours]
    return jax_export.export(fun, platforms=platforms, disabled_checks=checks)


def _read(static_fields: bytes | bytearray) -> tuple[Any, ...]:
    """Static fields are numbers, names and tuples of them."""
    return ast.literal_eval(bytes(static_fields).decode())


for _kind in TYPES:
    jax_export.register_pytree_node_serialization(
        _kind,
        serialized_name=f"jax_paged.{_kind.__name__}",
        serialize_auxdata=lambda static_fields: repr(static_fields).encode(),
        deserialize_auxdata=_read,
    )
