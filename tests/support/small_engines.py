# SPDX-License-Identifier: Apache-2.0
"""What the tests of the engine submit. Its fixtures are in tests/models/conftest.py. Not a test."""

PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]
NEW = 12


def submit_all(engine, prompts=PROMPTS, max_new_tokens=NEW, **options):
    return [engine.submit(p, max_new_tokens=max_new_tokens, **options) for p in prompts]
