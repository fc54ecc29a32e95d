# SPDX-License-Identifier: Apache-2.0
"""A small model, engines of it, and what it gives a request alone: for the tests of the engine."""

import pytest
from small_engines import NEW

from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import noisy
from jax_paged.testing.stress.engine import Alone, assert_empty, small_decoder


@pytest.fixture(scope="session")
def model():
    return small_decoder()


@pytest.fixture(scope="session")
def drafter(model):
    """The model with noise on its head, so that it is right now and then."""
    return noisy(model)


@pytest.fixture(scope="session")
def make(model):
    """Engines of equal sizes share one, used up to its end and emptied: compiling takes seconds."""
    made = {}

    def get(**options) -> Engine:
        options = {"num_pages": 40, "max_seqs": 4, "page_size": 4, "max_tokens": 32} | options
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = Engine(model, **options)
        engine = made[key]
        engine.clear_cache()
        assert_empty(engine)
        return engine

    return get


@pytest.fixture(scope="session")
def alone(model):
    """The tokens of a request on its own, by `generate`; memoised."""
    known = Alone(model)
    return lambda prompt, max_new_tokens=NEW, **options: known(prompt, max_new_tokens, **options)
