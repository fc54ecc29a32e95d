"""Several devices: a native call runs on each device's own heads; a pool is split in no other way.

XLA does not know how to split a custom call: left alone it gathers whole pools onto every device,
silently. So every native call goes through `over_heads`, which says it: the pools decide, the other
operands follow their heads, and a pool that is split otherwise is refused. Inside `jax.shard_map`
the call is local already, and on one device nothing is added to the program.
"""

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

    def shardings(mesh: Mesh, operands, results):
        over = _check_split(op, axes, operands, follow=True)

        def place(axis, x):
            return NamedSharding(mesh, P(*(over if i == axis else None for i in range(x.ndim))))

        return (
            tuple(map(place, axes.operands.values(), operands)),
            tuple(map(place, axes.results, results)),
        )

    def partition(mesh: Mesh, operands, results):
        of_operands, of_results = shardings(mesh, operands, results)
        return mesh, whole, of_results, of_operands

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=lambda *x: shardings(*x)[1],  # where XLA runs without Shardy
        sharding_rule=lambda _, *types: _sharding_rule(axes, *types),
    )
    _check_split(op, axes, [jax.typeof(x) for x in operands], follow=False)
    return partitioned(*operands)


def _check_split(op: str, axes: HeadAxes, operands: Sequence[Any], *, follow: bool) -> Any:
    """The mesh axes that the heads are split over; refuses what must not be split.

    follow: whether operands other than pools will be brought into line. With automatic mesh axes
    they are; explicit ones, which stand in the types of the operands, say how it should be.
    """

    def spec(x):
        if not hasattr(x.sharding, "spec"):
            raise NotImplementedError(
                f"{op}: expected operands on one mesh, got {x.sharding}; use jax.shard_map"
            )
        names = [axis or None for axis in x.sharding.spec]
        return names + [None] * (x.ndim - len(names))

    specs, leader = [spec(x) for x in operands], axes.leader()
    over = None if leader is None else specs[leader[0]][leader[1]]
    for (name, axis), have in zip(axes.operands.items(), specs, strict=True):
        want = [over if i == axis else None for i in range(len(have))]
        follows = follow and leader is not None and not name.endswith("_pages")
        if have != want and not follows:
            raise ValueError(
                f"{op}: {name}: expected to be split over devices by KV heads alone, as "
                f"{P(*want)}, got {P(*have)}; inside jax.shard_map any split is yours"
            )
    return over


def _sharding_rule(axes: HeadAxes, operands: Sequence[Any], results: Sequence[Any]):
    """Shardy's rule for a call: the split of the heads passes through it, no other split does."""
    leader = axes.leader()
    num_heads = None if leader is None else operands[leader[0]].shape[leader[1]]
    kept_whole: list[str] = []
    group_sizes: dict[str, Any] = {}

    def factor(name):
        kept_whole.append(name)
        return name

    def mapping(name, array, heads_axis):
        dims: list[Any] = []
        for axis, size in enumerate(array.shape):
            if axis != heads_axis:
                dims.append(factor(f"{name}_{axis}"))
            elif size == num_heads:
                dims.append("heads")
            else:
                group = factor(f"{name}_group")
                group_sizes[group] = size // num_heads
                dims.append(CompoundFactor("heads", group))
        return ArrayMapping(*dims)

    of_operands = zip(operands, axes.operands.values(), strict=True)
    of_results = zip(results, axes.results, strict=True)
    return SdyShardingRule(
        tuple(mapping(f"operand{i}", *x) for i, x in enumerate(of_operands)),
        tuple(mapping(f"result{i}", *x) for i, x in enumerate(of_results)),
        need_replication_factors=tuple(kept_whole),
        **group_sizes,
    )
