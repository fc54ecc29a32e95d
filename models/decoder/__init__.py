# SPDX-License-Identifier: Apache-2.0
"""The Flax model and how it is run: parameters, compiled programs, steps, sampling, generation."""
