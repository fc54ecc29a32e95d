# SPDX-License-Identifier: Apache-2.0
"""Several processes, on one host or many: one gives orders, and the others carry them out."""
