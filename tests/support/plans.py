# SPDX-License-Identifier: Apache-2.0
"""Attention calls with a plan that was made ahead."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_paged import AttentionPlan, attention_plan, ragged_paged_attention
from jax_paged.testing import Batch

_OF_PLAN = inspect.signature(attention_plan).parameters


def call_of(
    batch: Batch, options: Mapping[str, Any], **more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `ragged_paged_attention` for a batch."""
    arguments, defaults = batch.ragged()
    given = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    return arguments, defaults | given | more | {"return_lse": True}


def plan_of(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> AttentionPlan:
    """The plan of a call."""
    return attention_plan(*arguments, **{k: x for k, x in options.items() if k in _OF_PLAN})


def attend_planned(batch: Batch, options: Mapping[str, Any], plan: AttentionPlan, **more: Any):
    """(out, lse) of a batch by a plan."""
    arguments, call = call_of(batch, options, **more)
    return ragged_paged_attention(*arguments, **call, plan=plan)
