# SPDX-License-Identifier: Apache-2.0
"""Several devices: a native call runs on each device, on its own part of what an op can split.

XLA does not know how to split a custom call: left alone it gathers whole pools and weights onto
every device, silently. So every native call goes through `over_devices`, and a `Split` says for
each op which axes may be split: pools and weights decide, the other operands follow, and a pool or
a weight that is split otherwise is refused. Inside `jax.shard_map` the call is local already, and
on one device nothing is added to the program.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

from jax_paged.layout import POOLS, kv_heads_axis

PAGES = ("k_pages", "v_pages", "kv_pages")  # names of pools
KV_HEADS = "KV_heads"
WHOLE = "-"  # the name of an axis that is never split
_Spec = Sequence[Any]  # of each axis the mesh axes that it is split over: a name, names or None


class Place(NamedTuple):
    """Which part of a split axis a device has: part `index`, traced, of `count`."""

    index: jax.Array
    count: int


class Split(NamedTuple):
    """Which axes of an op's operands and results may be split over devices: each has a name.

    Axes of one name are split alike. One may be a multiple of another, such as query heads of KV
    heads: then it is groups of neighbours, and splits at the same places. An axis whose name is "-"
    is whole on each device.
    """

    operands: Mapping[str, str]  # their axes by the operand's name, in order: {"x": "tokens in"}
    results: Sequence[str]
    # Pools and weights: these are never moved. Where one has an axis, its split is theirs.
    fixed: Collection[str] = ()
    # A device that has a part of these has a part of every sum; the parts are f32, and added up.
    summed: Collection[str] = ()
    # What a device does with its operands first, by its places on the axes that are split.
    arrange: Callable[[Sequence[jax.Array], Mapping[str, Place]], Sequence[jax.Array]] | None = None
    hint: str = ""  # for who splits what is fixed in another way

    def arranged(
        self, operands: Sequence[jax.Array], places: Mapping[str, Place]
    ) -> Sequence[jax.Array]:
        return operands if self.arrange is None else self.arrange(operands, places)

    def leaders(self) -> dict[str, tuple[int, int]]:
        """Of each name the (operand, axis) that the others follow, what is fixed first."""
        found: dict[str, tuple[int, int]] = {}
        for i, operand in sorted(enumerate(self.operands), key=lambda x: x[1] not in self.fixed):
            for axis, name in enumerate(self.operands[operand].split()):
                if name != WHOLE:
                    found.setdefault(name, (i, axis))
        return found

    def over(self, specs: Sequence[_Spec]) -> dict[str, Any]:
        """The mesh axes that each name is split over, if any; each mesh axis goes to one name."""
        found, taken = {}, set()
        for name, (i, axis) in self.leaders().items():
            free = [x for x in _mesh_axes(specs[i][axis]) if x not in taken]
            taken.update(free)
            if free:
                found[name] = _one_or_more(free)
        return found


def at_heads(x: Any, axis: int | None) -> str:
    """The names of x's axes, of which one counts KV heads, or query heads; None: none does."""
    return " ".join(KV_HEADS if i == axis else WHOLE for i in range(x.ndim))


def pools_at_heads(arrays: Mapping[str, Any], layout: Any) -> dict[str, str]:
    """The same of k_pages and v_pages, those that are among the arrays."""
    return {
        f"{pool}_pages": at_heads(x, kv_heads_axis(x, layout, pool))
        for pool in POOLS
        if (x := arrays.get(f"{pool}_pages")) is not None
    }


def over_devices(
    op: str,
    call: Callable[..., Sequence[jax.Array]],
    split: Split,
    operands: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """call(*operands), on each device for its own part where a jitted program splits them.

    Under jit over several devices the splits of the leaders decide. With automatic mesh axes the
    other operands are brought into line, but nothing that is fixed: that would move it. Where an
    axis that is summed is split, the call is made with partial=True.

    Raises:
      ValueError: a pool or a weight is split along another axis than those that may be, or unlike
        another one; the op cannot be split and an operand is; with explicit mesh axes, any operand
        is out of line. With automatic ones this comes when XLA compiles, inside its own error.
    """

    def whole(*operands):
        return tuple(call(*split.arranged(operands, {})))

    def spread(mesh: Any, over: Mapping[str, Any], arrays: Iterable[str]):
        return tuple(NamedSharding(mesh, P(*_wanted(axes, over))) for axes in arrays)

    def partition(mesh: Mesh, operands, results):
        for x in operands:
            if _spec(x.sharding, x.ndim) is None:
                raise NotImplementedError(
                    f"{op}: expected all operands on one mesh, and in jax.shard_map all its axes "
                    f"manual, got {x.sharding}"
                )
        specs = _specs(operands)
        over = split.over(specs)
        _check_split(op, split, specs, over, follow=True)
        summed = tuple(x for name in split.summed for x in _mesh_axes(over.get(name)))

        def local(*operands):
            places = {}
            for name, axes in over.items():
                count = math.prod(mesh.shape[axis] for axis in _mesh_axes(axes))
                places[name] = Place(jax.lax.axis_index(axes), count)
            operands = split.arranged(operands, places)
            if not summed:
                return tuple(call(*operands))
            parts = jax.lax.psum(tuple(call(*operands, partial=True)), summed)
            return tuple(x.astype(like.dtype) for x, like in zip(parts, results, strict=True))

        of_operands = spread(mesh, over, split.operands.values())
        return mesh, local, spread(mesh, over, split.results), of_operands

    def infer(mesh: Mesh, operands, results):  # an exception here would abort the process
        return spread(mesh, split.over(_specs(operands)), split.results)

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=infer,  # where XLA runs without Shardy
        sharding_rule=lambda _, *types: _sharding_rule(split, *types),
    )
    types = [jax.typeof(x) for x in operands]  # which tell of explicit mesh axes
    specs = _specs(types)
    over = split.over(specs)
    _check_split(op, split, specs, over, follow=False)
    if not over:
        return partitioned(*operands)
    # The call is traced as if mesh axes were automatic, and its results have them again.
    mesh = next(x.sharding.mesh for x, spec in zip(types, specs, strict=True) if any(spec))
    of_results = spread(mesh, over, split.results)
    without: Any = jax.sharding.auto_axes(partitioned, out_sharding=of_results)
    return without(*operands)


def create_over(mesh: Mesh, create: Callable[[], Any], specs: Any, stacked: P | None = None) -> Any:
    """What create() gives on each device, as one pytree, whose parts lie as `specs` says.

    Where specs says `stacked`, parts get an axis of replicas in front.
    """

    def own():
        def part(spec, x):
            return jax.tree.map(lambda x: x[None], x) if spec == stacked else x

        return jax.tree.map(part, specs, create(), is_leaf=lambda x: isinstance(x, P))

    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()


def _spec(sharding: Any, ndim: int) -> _Spec | None:
    """How an array is split; None when there is no telling."""
    if sharding is None:  # not decided yet
        return [None] * ndim
    if not hasattr(sharding, "spec"):
        return None
    # jax makes it as long as the shape
    return [_one_or_more(_mesh_axes(names)) for names in sharding.spec]


def _specs(arrays: Iterable[Any]) -> list[_Spec]:
    return [_spec(x.sharding, x.ndim) or [None] * x.ndim for x in arrays]


def _mesh_axes(names: Any) -> tuple[str, ...]:
    if names is None:
        return ()
    return names if isinstance(names, tuple) else (names,)


def _one_or_more(names: Sequence[str]) -> Any:
    """As a PartitionSpec has them: None, a name or a tuple."""
    return names[0] if len(names) == 1 else tuple(names) or None


def _wanted(axes: str, over: Mapping[str, Any]) -> list[Any]:
    """How an array with these axes is to be split."""
    return [over.get(name) for name in axes.split()]


def _check_split(
    op: str, split: Split, specs: Sequence[Any], over: Mapping[str, Any], *, follow: bool
) -> None:
    """Refuses what must not be split.

    follow: whether operands that are not fixed will be brought into line. With automatic mesh axes
    they are; explicit ones, which stand in the types of the operands, say how it should be. (But
    jax 0.7 loses the types of pools on their way: those that look whole may be split.)
    """
    can_follow = bool(split.leaders()) and (follow or not over)
    for (name, axes), have in zip(split.operands.items(), specs, strict=True):
        want = _wanted(axes, over)
        if have == want or (can_follow and name not in split.fixed):
            continue
        named = [axis for axis in dict.fromkeys(axes.split()) if axis != WHOLE]
        by = " or ".join(named).replace("_", " ")
        where = f"split over devices by {by} alone" if named else "whole on each device"
        pairs = enumerate(zip(have, want, strict=True))
        wrong = [f"axis {i} split over {x!r}" for i, (x, y) in pairs if x and x != y]
        raise ValueError(
            f"{op}: {name}: expected to be {where}, as {P(*want)}, got "
            f"{' and '.join(wrong) or 'it whole'}, {P(*have)}; {split.hint}"
            "inside jax.shard_map any split is yours"
        )


def _sharding_rule(split: Split, operands: Sequence[Any], results: Sequence[Any]):
    """Shardy's rule for a call: the splits of named axes pass through it, no other split does.

    They pass from their leaders to the results. Where what is fixed has an axis, those of the other
    operands are factors of their own, so that a q split otherwise never makes XLA think of moving
    the pool.
    """
    leaders, names = split.leaders(), list(split.operands)
    kept_whole: list[str] = []
    group_sizes: dict[str, Any] = {}
    counts: dict[str, int] = {}  # of groups on the axes of a name: 2 rows of a pool may be a head's
    for axes, x in zip((*split.operands.values(), *split.results), (*operands, *results),
                       strict=True):  # fmt: skip
        for name, size in zip(axes.split(), x.shape, strict=True):
            counts[name] = math.gcd(counts.get(name, 0), size)
    compound: dict[str, int] = {}
    plain: set[str] = set()

    def mapping(label: str, axes: str, shape: Sequence[int], passes: Callable[[str], bool]):
        dims: list[Any] = []
        for axis, (name, size) in enumerate(zip(axes.split(), shape, strict=True)):
            factor = f"{label}_{axis}"
            if name == WHOLE:
                kept_whole.append(factor)
            elif passes(name):
                common, count = f"axis_{[*leaders].index(name)}", counts[name]
                if size == count:
                    factor = common
                    plain.add(common)
                else:
                    kept_whole.append(factor)
                    group_sizes[factor] = size // count
                    factor = CompoundFactor(common, factor)
                    compound[common] = count
            dims.append(factor)
        return ArrayMapping(*dims)

    def of_operand(i: int, x: Any):
        is_fixed = names[i] in split.fixed
        return mapping(
            f"operand{i}", split.operands[names[i]], x.shape,
            lambda axis: is_fixed or names[leaders[axis][0]] not in split.fixed,
        )  # fmt: skip

    def of_result(i: int, x: Any):
        return mapping(f"result{i}", split.results[i], x.shape, lambda axis: True)

    of_operands = tuple(of_operand(i, x) for i, x in enumerate(operands))
    of_results = tuple(of_result(i, x) for i, x in enumerate(results))
    group_sizes |= {common: count for common, count in compound.items() if common not in plain}
    return SdyShardingRule(
        of_operands,
        of_results,
        need_replication_factors=tuple(kept_whole),
        **group_sizes,
    )
