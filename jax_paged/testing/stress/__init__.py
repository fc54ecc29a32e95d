# SPDX-License-Identifier: Apache-2.0
"""Random cases of everything, for as long as one likes: `python -m jax_paged.testing.stress`.

- `ops`: every op with random combinations of its options, beside float64.
- `values`: the same with wild integers in every index array.
- `state`: the verbs of the page state, beside a plain Python model.
- `engine`: requests under preemption, swapping, drafts and cancellation, beside `generate` alone.
- `files`: mutated checkpoints and messages, which must be refused clearly.
"""
