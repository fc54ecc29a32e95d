# SPDX-License-Identifier: Apache-2.0
"""FFI calls: native code on the platforms that have it, and the reference elsewhere.

Both modules register the same target names, `_cpu` for "cpu" and `_cuda` for "CUDA", so one
`ffi_call` serves both and XLA picks the handler at lowering.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_paged.checks import STAND_INS, Implementation
from jax_paged.native import load
from jax_paged.native.sharding import Split, over_devices

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
    split: Split,
    only_shapes: Collection[str] = (),
    aliases: dict[int, int] | None = None,
    cuda_workspace_words: int | Callable[[dict[str, jax.Array]], int] = 0,
    implementation: Implementation,
    reference: Callable[..., Sequence[jax.Array]],
) -> Sequence[jax.Array]:
    """Calls `target` on CPU and CUDA and `reference(*operands)` elsewhere.

    implementation="native" fails on other platforms instead; "reference" never calls `target`. The
    results have the types of the reference's, inside shard_map with the mesh axes they vary over.
    The CUDA handler gets cuda_workspace_words i32 as one more result, if any: memory to work in.
    Over several devices each one calls for its own part (`sharding.over_devices`). Attributes and
    cuda_workspace_words may be functions of the operands of one device, by name. Those of
    `only_shapes` are there for their shapes: the target does not get them. Where the split sums
    parts, the reference takes out_dtype, which is f32 for a part.
    """
    if implementation == "reference":
        return reference(*split.arranged(operands, {}))

    stand_in = STAND_INS.get(implementation)
    sent = [name for name in split.operands if name not in only_shapes]

    def call(*operands, partial=False):
        named = dict(zip(split.operands, operands, strict=True))
        own = attributes(named) if callable(attributes) else attributes
        words = cuda_workspace_words
        words = words(named) if callable(words) else words
        own_reference = (
            functools.partial(reference, out_dtype=jnp.float32) if partial else reference
        )
        if stand_in is not None:
            results = jax.eval_shape(own_reference, *operands)
            by_name = {name: named[name] for name in sent}
            return stand_in(target, by_name, own, results, aliases, words)
        return _local_call(target, named, sent, own, aliases, words, implementation, own_reference)

    return over_devices(target, call, split, operands)


def _local_call(target, named, sent, attributes, aliases, words, implementation, reference):
    """`ffi_call` for the operands of one device."""
    reference = jax.jit(reference)  # traced once for the types and the branch, not each time
    operands = tuple(named.values())

    def workspace_like(result):  # varies over the mesh axes that the result varies over
        return jnp.broadcast_to(jnp.any(result).astype(jnp.int32), (words,))

    results = jax.eval_shape(reference, *operands)
    workspace = ()
    if words:
        workspace = (jax.eval_shape(lambda *x: workspace_like(reference(*x)[0]), *operands),)

    def native(workspace):
        def branch(*operands):
            given = dict(zip(named, operands, strict=True))
            call = jax.ffi.ffi_call(target, [*results, *workspace], input_output_aliases=aliases)
            return tuple(call(*(given[name] for name in sent), **attributes))[: len(results)]

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
