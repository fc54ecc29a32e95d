"""A draft model for tests: the model itself, with noise on its head."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_paged.models import Decoder


def noisy(model: Decoder) -> Decoder:
    """A copy of the model that is right now and then: the model's likeliest is often its second."""
    drafter = nnx.clone(model)
    head = np.asarray(model.head[...])
    noise = np.random.default_rng(5).standard_normal(head.shape, "f4")
    drafter.head[...] = jnp.asarray(head + np.float32(0.8) * head.std() * noise)
    return drafter
