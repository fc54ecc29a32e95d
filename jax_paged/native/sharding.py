# SPDX-License-Identifier: Apache-2.0
"""Several devices: a native call runs on each device's own heads; a pool is split in no other way.

XLA does not know how to split a custom call: left alone it gathers whole pools onto every device,
silently. So every native call goes through `over_heads`, which says it: the pools decide, the other
operands follow their heads, and a pool that is split otherwise is refused. Inside `jax.shard_map`
the call is local already, and on one device nothing is added to the program.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class HeadAxes(NamedTuple):
    """Which axis of each operand and result of an op counts heads; None = it has no such axis.

    Operands stand under their names, in order; a name that ends in "_pages" is a pool. An axis of
    query heads is num_kv_heads groups of neighbours, so that it splits where the KV heads do.
    """

    operands: Mapping[str, int | None]
    results: Sequence[int | None]
    # Where an axis holds heads of several kinds side by side, which no split can follow: cuts whole
    # operands down to those of device `index` of `count`: (operands, index, count) -> operands.
    take_own: Callable[..., Sequence[jax.Array]] | None = None

    def leader(self) -> tuple[int, int] | None:
        """(operand, axis) of the heads that the others follow: a pool's if there is one."""
        have = [(i, axis) for i, axis in enumerate(self.operands.values()) if axis is not None]
        pools = [x for x in have if list(self.operands)[x[0]].endswith("_pages")]
        return min(pools or have, default=None)


def over_heads(
    op: str,
    call: Callable[..., Sequence[jax.Array]],
    axes: HeadAxes,
    operands: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """call(*operands), on each device for its own heads where a jitted program splits them.

    Under jit over several devices the split of the leader's heads decides. With automatic mesh axes
    the other operands are brought into line, but no pool: that would move it.

    Raises:
      ValueError: a pool is split along another axis than its heads, or unlike the other pool; the
        op has no heads and an operand is split; with explicit mesh axes, any operand is out of
        line. With automatic ones this comes when XLA compiles, inside its own error.
    """

    def whole(*operands):
        return tuple(call(*operands))

    def spread(mesh: Mesh, over, heads_axes, arrays):
        return tuple(
            NamedSharding(mesh, P(*(over if i == axis else None for i in range(x.ndim))))
            for axis, x in zip(heads_axes, arrays, strict=True)
        )

    def partition(mesh: Mesh, operands, results):
        specs = [_spec(x.sharding, x.ndim) for x in operands]
        if None in specs:
            raise NotImplementedError(
                f"{op}: expected all operands on one mesh, and in jax.shard_map all its axes "
                f"manual, got {operands[specs.index(None)].sharding}"
            )
        _check_split(op, axes, specs, follow=True)
        over = _split_over(axes, specs)
        of_operands = spread(mesh, over, axes.operands.values(), operands)

        def local(*operands):
            if over is not None and axes.take_own is not None:
                names = over if isinstance(over, tuple) else (over,)
                count = math.prod(mesh.shape[name] for name in names)
                operands = axes.take_own(operands, jax.lax.axis_index(over), count)
            return whole(*operands)

        return mesh, local, spread(mesh, over, axes.results, results), of_operands

    def infer(mesh: Mesh, operands, results):  # an exception here would abort the process
        over = _split_over(axes, [_spec(x.sharding, x.ndim) for x in operands])
        return spread(mesh, over, axes.results, results)

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=infer,  # where XLA runs without Shardy
        sharding_rule=lambda _, *types: _sharding_rule(axes, *types),
    )
    typed = [_spec(jax.typeof(x).sharding, x.ndim) for x in operands]  # by explicit mesh axes
    _check_split(op, axes, typed, follow=False)
    return partitioned(*operands)


@functools.cache
def _refusing(op: str, name: str, axis: int, what: str):
    """An identity that XLA refuses to compile where its operand is split along an axis."""

    def check(spec: Sequence[Any] | None) -> None:
        if spec is not None and spec[axis]:
            raise ValueError(
                f"{op}: {name}: expected {what} whole on each device, got axis {axis} split over "
                f"{spec[axis]!r}: XLA would gather it; split another axis"
            )

    def partition(mesh: Mesh, operands, results):
        check(_spec(operands[0].sharding, operands[0].ndim))
        return mesh, lambda x: x, operands[0].sharding, (operands[0].sharding,)

    same = custom_partitioning(lambda x: x)
    same.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, operands, result: operands[0].sharding,
        sharding_rule="... -> ...",
    )

    def refuse(x: jax.Array) -> jax.Array:
        check(_spec(jax.typeof(x).sharding, x.ndim))  # by explicit mesh axes
        return same(x)

    return refuse


def refuse_split(x: jax.Array, op: str, name: str, axis: int, what: str) -> jax.Array:
    """x, which a program over several devices must not have split along an axis.

    Raises:
      ValueError: it is; with automatic mesh axes when XLA compiles, inside its own error.
    """
    return _refusing(op, name, axis, what)(x)


def _spec(sharding: Any, ndim: int) -> list[Any] | None:
    """The mesh axes that each axis of an array is split over; None when there is no telling."""
    if sharding is None:  # not decided yet
        return [None] * ndim
    if not hasattr(sharding, "spec"):
        return None
    return [names or None for names in sharding.spec]  # jax makes it as long as the shape


def _split_over(axes: HeadAxes, specs: Sequence[list[Any] | None]) -> Any:
    """The mesh axes that the heads are split over."""
    leader = axes.leader()
    spec = None if leader is None else specs[leader[0]]
    return None if leader is None or spec is None else spec[leader[1]]


def _check_split(op: str, axes: HeadAxes, specs: Sequence[Any], *, follow: bool) -> None:
    """Refuses what must not be split.

    follow: whether operands other than pools will be brought into line. With automatic mesh axes
    they are; explicit ones, which stand in the types of the operands, say how it should be. (But
    jax 0.7 loses the types of pools on their way: those that look whole may be split.)
    """
    leader, over = axes.leader(), _split_over(axes, specs)
    for (name, axis), have in zip(axes.operands.items(), specs, strict=True):
        want = [over if i == axis else None for i in range(len(have))]
        follows = (follow or over is None) and leader is not None and not name.endswith("_pages")
        if have != want and not follows:
            pairs = enumerate(zip(have, want, strict=True))
            wrong = [f"axis {i} split over {x!r}" for i, (x, y) in pairs if x and x != y]
            raise ValueError(
                f"{op}: {name}: expected to be split over devices by KV heads alone, as "
                f"{P(*want)}, got {' and '.join(wrong) or 'it whole'}, {P(*have)}; inside "
                "jax.shard_map any split is yours"
            )


def _sharding_rule(axes: HeadAxes, operands: Sequence[Any], results: Sequence[Any]):
    """Shardy's rule for a call: the split of the heads passes through it, no other split does.

    It passes from the pools to the results. The heads of the other operands are factors of their
    own, so that a q split otherwise never makes XLA think of moving the pool.
    """
    leader = axes.leader()
    num_heads = None if leader is None else operands[leader[0]].shape[leader[1]]
    has_pool = leader is not None and list(axes.operands)[leader[0]].endswith("_pages")
    kept_whole: list[str] = []
    group_sizes: dict[str, Any] = {}

    def mapping(name, array, heads_axis, leads):
        dims: list[Any] = []
        for axis, size in enumerate(array.shape):
            factor = f"{name}_{axis}"
            if axis != heads_axis:
                kept_whole.append(factor)
            elif leads and size == num_heads:
                factor = "heads"
            elif leads:
                kept_whole.append(factor)
                group_sizes[factor] = size // num_heads
                factor = CompoundFactor("heads", factor)
            dims.append(factor)
        return ArrayMapping(*dims)

    of_operands = zip(operands, axes.operands.items(), strict=True)
    of_results = zip(results, axes.results, strict=True)
    return SdyShardingRule(
        tuple(
            mapping(f"operand{i}", x, axis, not has_pool or name.endswith("_pages"))
            for i, (x, (name, axis)) in enumerate(of_operands)
        ),
        tuple(mapping(f"result{i}", x, axis, True) for i, (x, axis) in enumerate(of_results)),
        need_replication_factors=tuple(kept_whole),
        **group_sizes,
    )
