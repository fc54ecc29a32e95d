# SPDX-License-Identifier: Apache-2.0
"""Small decoders that are driven a step at a time, and tokens for them."""

import jax.numpy as jnp
import numpy as np

from jax_paged.models.decoder.model import Decoder
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import Stepper, small_config

NUM_TOKENS = 20  # of every flat batch but the decode steps, so that programs are shared


def make_stepper(model_type, dtype=jnp.float32, **changes):
    config = small_config(model_type, **changes)
    model = Decoder(config, random_source(config, 3, dtype))
    return Stepper(model)


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()
