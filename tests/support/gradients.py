# SPDX-License-Identifier: Apache-2.0
"""Gradients beside finite differences of a float64 loss. Not a test."""

import numpy as np


def assert_gradients(gradients, exact_loss, operands, rng, *, rtol):
    """Compares each gradient with a central difference along a direction that is drawn.

    exact_loss(*operands) is in float64. Where an operand is NaN the gradient is 0.
    """
    exact = [np.asarray(x).astype(np.float64) for x in operands]
    for index, gradient in enumerate(gradients):
        gradient = np.asarray(gradient).astype(np.float64)
        assert np.isfinite(gradient).all(), "the gradient of an unused slot is 0, never NaN"
        assert not gradient[np.isnan(exact[index])].any()
        direction, step = rng.standard_normal(gradient.shape), 1e-5
        moved = [
            exact_loss(*exact[:index], exact[index] + t * direction, *exact[index + 1 :])
            for t in (step, -step)
        ]
        expected = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=rtol)
