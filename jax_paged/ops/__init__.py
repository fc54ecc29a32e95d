# SPDX-License-Identifier: Apache-2.0
"""The ops on arrays: attention over pages, and what goes with it."""
