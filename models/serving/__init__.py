# SPDX-License-Identifier: Apache-2.0
"""Many requests at once on one model: scheduler, prefix cache, drafts, swapping, conversations."""
