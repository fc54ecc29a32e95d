# SPDX-License-Identifier: Apache-2.0
"""What models of every family must give in the engine and in likelihoods. Not a test."""

import jax
import numpy as np

from jax_paged.models import Engine, loglikelihoods, token_logits

SERVED = {
    "prefix cache": {},
    "swap": {"num_pages": 20, "preemption": "swap"},
    "drafts": {"max_drafts": 3, "draft_branches": 2},
}


def assert_served(model, prompts, expected, new, options):
    """An engine gives the expected tokens, also from its prefix cache, and frees its pages."""
    sizes = {"num_pages": 40, "max_seqs": 3, "page_size": 4, "max_tokens": 16}
    engine = Engine(model, **sizes | options)
    for _ in range(2):  # the second time much is in the prefix cache
        requests = [engine.submit(prompt, max_new_tokens=new) for prompt in prompts]
        engine.run()
        assert [request.tokens for request in requests] == expected
    assert engine.num_swaps[0] > 0 or "preemption" not in options
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages


def assert_likely(model, text):
    """Log-likelihoods are those of the logits; returns log p of each token but the first."""
    log_p = np.asarray(jax.nn.log_softmax(token_logits(model, text), axis=-1))
    told = log_p[np.arange(len(text) - 1), text[1:]]
    pairs = [(text[:20], text[20:30]), (text[:20], text[20:33])]
    found = loglikelihoods(model, pairs, chunk=16)
    want = [told[19:29].sum(), told[19:32].sum()]
    np.testing.assert_allclose([x.log_p for x in found], want, rtol=1e-5)
    return told
