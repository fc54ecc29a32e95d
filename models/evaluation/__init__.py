# SPDX-License-Identifier: Apache-2.0
"""What a model thinks of texts: log-probabilities, likelihoods, perplexity, tasks of lm-eval."""
