# SPDX-License-Identifier: Apache-2.0
"""What the tests of the engine submit. Its fixtures are in tests/models/conftest.py. Not a test."""

from jax_paged.models.testing import small_config

CONFIG = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]
NEW = 12


def submit_all(engine, prompts=PROMPTS, max_new_tokens=NEW, **options):
    return [engine.submit(p, max_new_tokens=max_new_tokens, **options) for p in prompts]
