# SPDX-License-Identifier: Apache-2.0
"""Forgets pages that get little attention (H2O, Zhang et al. 2023, at the grain of pages).

    python examples/studies/eviction.py --plot eviction.svg

Every row of one batch reads the same text, token by token, and forgets by a rule of its own. A page
is forgotten by a hole in the row's page table. The others stay where they are, and so do the
positions that RoPE has turned their keys by.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import add_text, options_for, read_tokens, save_lines, show
from eviction_model import forward
from eviction_rules import RULES, Rule, keep

from jax_paged.models import create_state, load_checkpoint, merge_model, split_model


@functools.partial(jax.jit, static_argnums=0)
def read(graph, weights, state, tokens, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """−log p of each next token, and the likeliest one: [tokens − 1, rows] each."""
    rows, pages = state.table.page_table.shape

    def step(carry, now):
        state, mass = carry
        state, batch, _ = state.append(jnp.arange(rows, dtype=jnp.int32), 1)
        last = (batch.seq_lens - 1) // state.table.page_size
        kept = keep(mass, last, rule)
        model = merge_model(graph, weights)
        logits, state, more = forward(model, jnp.full(rows, now[0]), batch, state, kept)
        forgotten = ~kept & (jnp.arange(pages)[None, None] <= last[None, :, None])
        mass = jnp.where(forgotten, -jnp.inf, mass + more)
        loss = jax.nn.logsumexp(logits, axis=-1) - logits[:, now[1]]
        return (state, mass), (loss, jnp.argmax(logits, axis=-1))

    mass = jnp.zeros((len(state.layer_kinds), rows, pages), jnp.float32)
    return jax.lax.scan(step, (state, mass), jnp.stack([tokens[:-1], tokens[1:]], 1))[1]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = options_for(__doc__)
    add_text(parser, tokens=1024)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32], help="pages")
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args(arguments)
    if min(options.budgets) < 2:
        parser.error("--budgets: expected at least 2 pages, the first and the newest")
    model, _, tokenizer = load_checkpoint(options.model)
    tokens = read_tokens(options, tokenizer)
    pages = -(-len(tokens) // options.page_size)
    named = [(name, rule(budget)) for name, rule in RULES.items() for budget in options.budgets]
    named = [("all pages", Rule(pages, 0, pages, False)), *named]
    rule = Rule(*map(jnp.asarray, zip(*(rule for _, rule in named), strict=True)))
    sizes = {"max_seqs": len(named), "pages_per_seq": pages, "page_size": options.page_size}
    state = create_state(model, num_pages=len(named) * pages, **sizes)
    found = read(*split_model(model), state, jnp.asarray(tokens), rule)
    losses, guesses = map(np.asarray, found)
    perplexity = np.exp(np.mean(losses, axis=0, dtype=np.float64))
    same = np.mean(guesses == guesses[:, :1], axis=0)
    rows, lines = [], {}
    for i, (name, (budget, *_)) in enumerate(named):
        rows.append({
            "kept": name, "pages": budget, "perplexity": float(perplexity[i]),
            "× all": float(perplexity[i] / perplexity[0]), "same guess": float(same[i]),
        })  # fmt: skip
        if i:
            lines.setdefault(name, []).append((budget, rows[-1]["× all"]))
    show(rows)
    save_lines(options.plot, lines, x="pages kept", y="perplexity, times that of all pages")
    return rows


if __name__ == "__main__":
    main()
