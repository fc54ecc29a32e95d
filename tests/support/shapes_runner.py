# SPDX-License-Identifier: Apache-2.0
"""An engine's programs over devices that are not there: compiled, never run. Not a test."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_paged.models.decoder.partition import put
from jax_paged.models.serving.replicas import STACKED
from jax_paged.models.serving.runner import ModelRunner
from jax_paged.models.serving.step import step


class ShapesRunner(ModelRunner):
    """A `ModelRunner` on the mesh of a model of shapes: it compiles steps, and those alone."""

    def compiled(self, program, *args, **options):
        return super().compiled(program, *args, **options) if program is step else None

    def _made(self, create):
        def on_mesh(split, shapes):
            sharding = NamedSharding(self.partition.mesh, split)
            return jax.tree.map(lambda x: put(x, sharding), shapes)

        def is_split(x):
            return isinstance(x, PartitionSpec)

        made = super()._made
        shapes = jax.eval_shape(lambda: made(create))
        return jax.tree.map(on_mesh, self.splits, shapes, is_leaf=is_split)

    def of_all(self, each):
        sharding = NamedSharding(self.partition.mesh, STACKED)

        def stacked(x):
            shape = (self.num_replicas, *x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

        return jax.tree.map(stacked, each[0])
