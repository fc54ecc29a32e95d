# SPDX-License-Identifier: Apache-2.0
"""The signatures of other projects' ops, over our kernels: for platforms where they have none.

`jax_paged.compat.jax` and `jax_paged.compat.tokamax` are imported by name. Neither needs the
project whose signature it has.
"""
