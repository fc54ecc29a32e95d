"""Paged attention for JAX: native kernels on CPU and CUDA, and a functional page state.

The verbs of the page state are in `jax_paged.state` (on a KVState) and `jax_paged.pages` (on a
PageTable alone), for layers of different kinds in `jax_paged.groups` (on KVGroups);
`jax_paged.transfer` moves K and V between states. `jax_paged.testing` has oracles and checks of
compiled programs; it is imported when it is used.
"""

import importlib as _importlib
from importlib import metadata as _metadata
from typing import Any as _Any

from jax_paged import _interrupt as _interrupt  # first: Ctrl-C may come while the rest is imported

# isort: split
from jax_paged import groups as groups
from jax_paged import pages as pages
from jax_paged import state as state
from jax_paged import transfer as transfer
from jax_paged._check import check as check
from jax_paged._export import export as export
from jax_paged._ffi import build_info as build_info
from jax_paged.attention import paged_attention as paged_attention
from jax_paged.attention import ragged_paged_attention as ragged_paged_attention
from jax_paged.cascade import CascadeLevel as CascadeLevel
from jax_paged.cascade import cascade_attention as cascade_attention
from jax_paged.cascade import cascade_levels as cascade_levels
from jax_paged.explain import explain as explain
from jax_paged.groups import KVGroups as KVGroups
from jax_paged.groups import MlaState as MlaState
from jax_paged.kv import copy_pages as copy_pages
from jax_paged.kv import kv_dtype as kv_dtype
from jax_paged.kv import move_slots as move_slots
from jax_paged.kv import qkv_norm_rope_write as qkv_norm_rope_write
from jax_paged.kv import write_kv as write_kv
from jax_paged.kv_range import gather_kv as gather_kv
from jax_paged.kv_range import scatter_kv as scatter_kv
from jax_paged.layout import convert_pages as convert_pages
from jax_paged.layout import page_table_from_addresses as page_table_from_addresses
from jax_paged.linear import linear as linear
from jax_paged.linear import quantize_weight as quantize_weight
from jax_paged.merge import merge_attention_states as merge_attention_states
from jax_paged.mla import mla_paged_attention as mla_paged_attention
from jax_paged.mla import write_mla_kv as write_mla_kv
from jax_paged.moe import moe_experts as moe_experts
from jax_paged.pages import PageTable as PageTable
from jax_paged.pages import Status as Status
from jax_paged.pages import StepBatch as StepBatch
from jax_paged.pages import pages_for as pages_for
from jax_paged.ragged import ragged_attention as ragged_attention
from jax_paged.state import KVState as KVState
from jax_paged.tree import tree_intervals as tree_intervals
from jax_paged.validation import check_values as check_values

__version__ = _metadata.version("jax_paged")


def __getattr__(name: str) -> _Any:
    if name == "testing":
        return _importlib.import_module("jax_paged.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
