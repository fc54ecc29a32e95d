# SPDX-License-Identifier: Apache-2.0
"""Random adapters."""

import numpy as np

from jax_paged.models import Adapter
from jax_paged.models.decoder.adapters import LowRank, module_shapes


def make_adapter(config, seed, rank=4, modules=None):
    """A random adapter of some modules, all by default, that changes logits by about 1."""
    rng = np.random.default_rng([seed, 77])

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    layers = []
    for number in range(config.num_layers):
        shapes = module_shapes(config, number)
        chosen = shapes if modules is None else [m for m in modules if m in shapes]
        layers.append(
            {
                name: LowRank(
                    draw(rank, shapes[name][1]) / shapes[name][1] ** 0.5,
                    draw(shapes[name][0], rank) * np.float32(0.5 / rank**0.5),
                )
                for name in chosen
            }
        )
    return Adapter(tuple(layers))
