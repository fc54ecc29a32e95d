# SPDX-License-Identifier: Apache-2.0
"""The KV cache: which row holds which pages, and the pages of all layers with it."""
