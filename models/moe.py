"""Mixture of experts: routing as the released Qwen3-MoE does it, and the experts' MLPs.

`moe_experts` is one mechanism for decode and prefill. The (token, expert) pairs are sorted by
expert and cut into blocks of at most `block_size` pairs of one expert; a loop over the blocks that
are in use slices that one expert's weights and runs its MLP. So an expert that nobody chose is
never read, one token costs its chosen experts only, and a prefill chunk reads each expert about
once per block_size of its tokens. Sums over a token's experts run in a fixed order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_LARGEST_BLOCK = 64


def contract_last(x: jax.Array, weight: jax.Array, out_dtype=None) -> jax.Array:
    """x [tokens, in] · weight [out, in]ᵀ → [tokens, out], accumulated in f32 or better.

    Weights stay in the published [out, in] order: with one token XLA:GPU then reads them once,
    where [in, out] makes it write all products first.
    """
    exact = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=out_dtype or x.dtype,
    )


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """down · (silu(gate · x) ⊙ up · x).

    x is [tokens, hidden], gate_up [2 · inner, hidden] with the gate's rows first, down [hidden,
    inner].
    """
    hidden = contract_last(x, gate_up)
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias[None, :]
    gate, up = jnp.split(hidden, 2, axis=-1)
    out = contract_last(jax.nn.silu(gate) * up, down)
    return out if down_bias is None else out + down_bias[None, :]


def route(
    router_logits: Float[Array, "tokens experts"], experts_per_token: int, *, renormalize: bool
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """The chosen experts of each token and their weights: softmax over all experts, then top-k.

    Args:
      router_logits: [tokens, num_experts]; the softmax is f32.
      renormalize: scale the chosen weights to sum to 1 (`norm_topk_prob`).

    Returns:
      (experts i32[tokens, k], weights f32[tokens, k]), largest weight first; of equal ones the
      expert with the smaller index.
    """
    probabilities = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, experts_per_token)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts.astype(jnp.int32), weights


def _block_size(num_pairs: int, num_experts: int) -> int:
    """Pairs per block: 1 while experts hardly repeat, else near the mean per expert."""
    size = 1
    while size < _LARGEST_BLOCK and size * num_experts < num_pairs:
        size *= 2
    return size


def moe_experts(
    x: Float[Array, "tokens hidden"],
    gate_up: Float[Array, "experts two_inner hidden"],
    down: Float[Array, "experts hidden inner"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    *,
    live: Bool[Array, "tokens"] | None = None,
    block_size: int | None = None,
) -> Float[Array, "tokens hidden"]:
    """Σ_j weights[t, j] · MLP of expert experts[t, j] applied to x[t], for each token t.

    Args:
      x: [tokens, hidden], the dtype of the weights.
      gate_up: [num_experts, 2 · inner, hidden], gate rows first.
      down: [num_experts, hidden, inner].
      experts: i32[tokens, k], distinct per token. weights: f32[tokens, k].
      live: tokens that count; the others get 0 and no expert is read for them. None = all.
      block_size: pairs of one expert that share one read of its weights; None = from the sizes.

    Returns:
      [tokens, hidden] in x's dtype; the weighted sum is f32.
    """
    tokens, hidden = x.shape
    num_experts, k = gate_up.shape[0], experts.shape[1]
    num_pairs = tokens * k
    size = _block_size(num_pairs, num_experts) if block_size is None else block_size
    if live is not None:
        experts = jnp.where(live[:, None], experts, jnp.int32(num_experts))  # sorts last
    flat = experts.reshape(num_pairs)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    expert_ids = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == expert_ids[None, :], axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    blocks = (counts + (size - 1)) // size
    last_blocks = jnp.cumsum(blocks, dtype=jnp.int32)
    sorted_tokens = jnp.pad(order // k, (0, size))

    def run_block(block, sorted_out):
        expert = jnp.sum(last_blocks <= block, dtype=jnp.int32)
        begin = starts[expert] + (block - last_blocks[expert] + blocks[expert]) * size
        rows = x[jax.lax.dynamic_slice(sorted_tokens, (begin,), (size,))]
        out = gated_mlp(rows, gate_up[expert], down[expert])
        # A short block also writes rows beyond its own; the next expert's block overwrites them.
        return jax.lax.dynamic_update_slice(sorted_out, out, (begin, jnp.int32(0)))

    sorted_out = jax.lax.fori_loop(
        jnp.int32(0), last_blocks[-1], run_block, jnp.zeros((num_pairs + size, hidden), x.dtype)
    )
    rank = jnp.zeros(num_pairs, jnp.int32).at[order].set(jnp.arange(num_pairs, dtype=jnp.int32))
    out = sorted_out[rank].astype(jnp.float32).reshape(tokens, k, hidden)
    out = jnp.sum(out * weights[:, :, None], axis=1)
    if live is not None:
        out = jnp.where(live[:, None], out, jnp.float32(0))
    return out.astype(x.dtype)
