# SPDX-License-Identifier: Apache-2.0
"""FFI calls: native code on the platforms that have it, and the reference elsewhere.

Both modules register the same target names, `_cpu` for "cpu" and `_cuda` for "CUDA", so one
`ffi_call` serves both and XLA picks the handler at lowering.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_paged.checks import STAND_INS, Implementation
from jax_paged.native import load
from jax_paged.native.sharding import HeadAxes, over_heads

# Targets whose reference XLA knows to split over devices in any way: in a program for several
# devices that is the implementation.
_SPLIT_BY_XLA = frozenset(
    {
        "jax_paged.linear.v1",
        "jax_paged.lora.v1",
        "jax_paged.moe_experts.v1",
        "jax_paged.scatter_rows.v1",
        "jax_paged.zero_pool.v1",
    }
)

# A primitive that can be traced anywhere and raises when it is lowered. It stands in the branch of
# a platform that cannot run, so that only programs which really are for that platform fail.
_unavailable_p = Primitive("jax_paged_unavailable")
_unavailable_p.multiple_results = True


@_unavailable_p.def_abstract_eval
def _unavailable_abstract(*_, results, **__):
    return [jax.typeof(r) for r in results]


def _unavailable_lowering(ctx, *_, message, **__):
    raise NotImplementedError(message)


mlir.register_lowering(_unavailable_p, _unavailable_lowering)


# Only when a program is lowered it is known for how many devices it is.
_by_devices_p = Primitive("jax_paged_by_devices")
_by_devices_p.multiple_results = True


@_by_devices_p.def_impl
def _by_devices_impl(*operands, **params):
    return jax.jit(lambda *operands: _by_devices_p.bind(*operands, **params))(*operands)


@_by_devices_p.def_abstract_eval
def _by_devices_abstract(*_, results, **__):
    return [jax.typeof(r) for r in results]


def _by_devices_lowering(ctx, *operands, alone, split, results):
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", None)
    chosen = alone if num_devices == 1 else split  # None: inside shard_map
    return mlir.lower_fun(lambda *x: tuple(chosen(*x)), multiple_results=True)(ctx, *operands)


mlir.register_lowering(_by_devices_p, _by_devices_lowering)


def register_stand_in(name: str, call: Callable[..., Sequence[jax.Array]]) -> None:
    """Adds another way to run the targets, which tests bring: emulated CUDA kernels.

    From then on the ops take implementation=`name`, for whatever the native kernels take. Where the
    native kernel would run, `call` runs: (target, operands by name, attributes, types of the
    results, aliases, cuda_workspace_words) -> results. This is not public.
    """
    STAND_INS[name] = call


def ffi_call(
    target: str,
    operands: Sequence[jax.Array],
    attributes: dict[str, Any] | Callable[[dict[str, jax.Array]], dict[str, Any]],
    *,
    heads: HeadAxes,
    only_shapes: Collection[str] = (),
    aliases: dict[int, int] | None = None,
    cuda_workspace_words: int = 0,
    implementation: Implementation,
    reference: Callable[..., Sequence[jax.Array]],
) -> Sequence[jax.Array]:
    """Calls `target` on CPU and CUDA and `reference(*operands)` elsewhere.

    implementation="native" fails on other platforms instead; "reference" never calls `target`. The
    results have the types of the reference's, inside shard_map with the mesh axes they vary over.
    The CUDA handler gets cuda_workspace_words i32 as one more result, if any: memory to work in.
    Where the heads are split over devices, each device calls for its own (`sharding.over_heads`).
    Attributes may be a function of the operands of one device, by name. `only_shapes` names those
    that are there for it alone: neither the target nor the reference gets them.
    """
    if implementation == "reference":
        named = zip(heads.operands, operands, strict=True)
        return reference(*(x for name, x in named if name not in only_shapes))

    stand_in = STAND_INS.get(implementation)

    def call(*operands):
        named = dict(zip(heads.operands, operands, strict=True))
        own = attributes(named) if callable(attributes) else attributes
        sent = {name: x for name, x in named.items() if name not in only_shapes}
        operands = tuple(sent.values())
        if stand_in is not None:
            results = jax.eval_shape(reference, *operands)
            return stand_in(target, sent, own, results, aliases, cuda_workspace_words)
        return _local_call(
            target, operands, own, aliases, cuda_workspace_words, implementation, reference
        )

    if implementation is None and target in _SPLIT_BY_XLA and jax.device_count() > 1:
        results = tuple(jax.eval_shape(reference, *operands))
        return _by_devices_p.bind(*operands, alone=call, split=reference, results=results)
    return over_heads(target, call, heads, operands)


def _local_call(
    target, operands, attributes, aliases, cuda_workspace_words, implementation, reference
):
    """`ffi_call` for the operands of one device."""
    reference = jax.jit(reference)  # traced once for the types and the branch, not each time

    def workspace_like(result):  # varies over the mesh axes that the result varies over
        return jnp.broadcast_to(jnp.any(result).astype(jnp.int32), (cuda_workspace_words,))

    results = jax.eval_shape(reference, *operands)
    workspace = ()
    if cuda_workspace_words:
        workspace = (jax.eval_shape(lambda *x: workspace_like(reference(*x)[0]), *operands),)

    def native(workspace):
        def branch(*operands):
            call = jax.ffi.ffi_call(target, [*results, *workspace], input_output_aliases=aliases)
            return tuple(call(*operands, **attributes))[: len(results)]

        return branch

    def unavailable(message):
        def branch(*operands):
            return tuple(_unavailable_p.bind(*operands, results=tuple(results), message=message))

        return branch

    def branch(name):
        message = load.why_unavailable(name, target)
        if message is not None:
            return unavailable(message)
        return native(workspace if name == "_cuda" else ())

    default = unavailable(load.no_native(target)) if implementation == "native" else reference
    branches = {"cpu": reference if target in load.CUDA_ONLY else branch("_cpu")}
    if target not in load.CPU_ONLY:
        branches["cuda"] = branch("_cuda")
    return jax.lax.platform_dependent(*operands, default=default, **branches)
