# SPDX-License-Identifier: Apache-2.0
"""`generate` for the command line: all prompts at once, perhaps in all processes of a job.

Of a model in pipeline stages an engine's steps let the stages run dry, which the decode loop of
`generate` does not. So all processes call that, with what the first one was asked for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_paged.cache.state import KVState
from jax_paged.ops.batch import pages_for

from ..decoder.generation import PAGE_SIZE, Generation, OnTokens, create_state, generate
from ..decoder.protocol import Model
from ..decoder.stream import Decode
from ..distributed.processes import Processes


def state_of(model: Model, num_prompts: int, num_pages: int, kv_dtype: str) -> KVState:
    """One with so many pages, of which each prompt may take all that it has positions for."""
    most = min(pages_for(model.config.context_length, PAGE_SIZE), num_pages)
    return create_state(
        model, num_pages=num_pages, max_seqs=num_prompts, pages_per_seq=most, kv_dtype=kv_dtype
    )


def generate_together(
    processes: Processes,
    model: Model,
    decode: Decode,
    prompts: Sequence[Sequence[int]] = (),
    *,
    on_tokens: OnTokens | None = None,
    num_pages: int | None = None,
    kv_dtype: str = "auto",
    **options: Any,
) -> Generation:
    """`generate`, which each process calls with the prompts and options of the first one.

    Args:
      decode, on_tokens: of each process for itself.
      num_pages: pages of the pool; None = enough for all prompts.
      others: as for `generate`; what can be written as JSON.

    Raises:
      KeyboardInterrupt: Ctrl-C has ended it in this process, for which the others would wait.
    """
    asked = options | {"num_pages": num_pages, "kv_dtype": kv_dtype}
    texts = [np.asarray(prompt, np.int32) for prompt in prompts]
    (asked,), texts = processes.share([asked], texts)
    num_pages, kv_dtype = asked.pop("num_pages"), asked.pop("kv_dtype")
    where: dict[str, Any] = {"kv_dtype": kv_dtype}
    if num_pages is not None:
        where = {"state": state_of(model, len(texts), num_pages, kv_dtype)}
    prompts = [text.tolist() for text in texts]
    return generate(model, prompts, decode=decode, on_tokens=on_tokens, **where, **asked)
