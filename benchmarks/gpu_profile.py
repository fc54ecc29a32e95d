# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py runs under Nsight Compute: two calls of one op, on the shape that has a target.

ncu … python benchmarks/gpu_profile.py decode|small|prefill|experts|planner [--dry]
"""

import argparse

import gpu_attention
import gpu_experts
import gpu_peers
import jax
import jax.numpy as jnp
from gpu_attention import DRY_SHAPES, Shape, decode, prefill

SHAPES = {
    "decode": decode("qwen3_30b_a3b", 64, 4096),
    "small": decode("qwen3_30b_a3b", 1, 4096),
    "prefill": prefill("qwen3_30b_a3b", 1, 8192),
    # Many short rows: what the decode kernel does is little, what the planner does is not.
    "planner": Shape("qwen3_30b_a3b", (1,) * 256, tuple(range(1, 257))),
}
CALLS = 2  # the first meets a cold instruction cache


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=[*SHAPES, "experts"])
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any backend")
    args = parser.parse_args()
    if args.what == "experts":
        sizes = gpu_experts.DRY_SIZES if args.dry else gpu_experts.SIZES
        x = jax.random.normal(jax.random.key(0), (32, sizes[2]), jnp.bfloat16)
        layer = gpu_experts._weights(jax.random.key(1), sizes=sizes, tokens=32, dtype="bfloat16")
        for _ in range(CALLS):
            jax.block_until_ready(gpu_experts._call(x, layer, contender="native"))
        return
    kind = "prefill" if args.what == "prefill" else "decode"
    shape = DRY_SHAPES[kind][0] if args.dry else SHAPES[args.what]
    pools = gpu_attention.make_pools(shape, 1)
    for _ in range(CALLS):
        jax.block_until_ready(gpu_peers.chain(pools, "native", 1))


if __name__ == "__main__":
    main()
