# SPDX-License-Identifier: Apache-2.0
"""The public ops in plain jax.numpy: the same signatures, the same results, any platform.

They gather the pages into dense arrays, so they are slow and need memory for it; they are the
oracle of the tests, the backward pass of the native reads, and the implementation on platforms
without native kernels.
"""

from jax_paged.ops.reference.attention import mla_paged_attention as mla_paged_attention
from jax_paged.ops.reference.attention import paged_attention as paged_attention
from jax_paged.ops.reference.attention import ragged_paged_attention as ragged_paged_attention
from jax_paged.ops.reference.merge import merge_attention_states as merge_attention_states
from jax_paged.ops.reference.scales import QMAX as QMAX
from jax_paged.ops.reference.scales import head_scale as head_scale
from jax_paged.ops.reference.scales import layer_scale as layer_scale
from jax_paged.ops.reference.scales import quantize as quantize
from jax_paged.ops.reference.scales import scale_of_layer as scale_of_layer
from jax_paged.ops.reference.scales import token_scale as token_scale
from jax_paged.ops.reference.write import last_of_equal as last_of_equal
from jax_paged.ops.reference.write import qkv_heads as qkv_heads
from jax_paged.ops.reference.write import qkv_norm_rope_write as qkv_norm_rope_write
from jax_paged.ops.reference.write import quantized as quantized
from jax_paged.ops.reference.write import read_tokens as read_tokens
from jax_paged.ops.reference.write import scatter_tokens as scatter_tokens
from jax_paged.ops.reference.write import write_kv as write_kv
from jax_paged.ops.reference.write import write_scales as write_scales
from jax_paged.ops.reference.write import write_to_layer as write_to_layer
