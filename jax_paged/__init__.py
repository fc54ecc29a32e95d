"""Paged attention for JAX: native kernels on CPU and CUDA, and a functional page state."""

from jax_paged._ffi import build_info as build_info
from jax_paged.attention import paged_attention as paged_attention
from jax_paged.attention import ragged_paged_attention as ragged_paged_attention
from jax_paged.kv import copy_pages as copy_pages
from jax_paged.kv import write_kv as write_kv
from jax_paged.validation import check_values as check_values
