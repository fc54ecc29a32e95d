# SPDX-License-Identifier: Apache-2.0
"""How many guesses are right: drafts that are looked up in the text, and those of a draft model.

    python examples/studies/drafts.py --plot drafts.svg

The draft model is the same one with int8 weights. It is right nearly always, and it is not much
cheaper than the model: it shows the most that a draft model can do. All tokens are greedy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import DATA, options_for, save_bars, show

from jax_paged.models import Engine, load_checkpoint

WAYS = {  # options of the Engine
    "none": {},
    "look-up, 4": {"max_drafts": 4},
    "look-up, 8": {"max_drafts": 8},
    "look-up, tree of 8": {"max_drafts": 8, "draft_branches": 2},
    "draft model, 4": {"max_drafts": 4},
    "draft model, tree of 8": {"max_drafts": 8, "draft_branches": 2},
}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = options_for(__doc__)
    parser.add_argument("--prompts", type=Path, default=DATA / "prompts.txt", help="one a line")
    parser.add_argument("--new-tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    options = parser.parse_args(arguments)
    model, config, tokenizer = load_checkpoint(options.model)
    drafter, _, _ = load_checkpoint(options.model, weight_dtype="int8")
    prompts = [
        tokenizer.apply_chat([{"role": "user", "content": line}])
        for line in options.prompts.read_text(encoding="utf-8").splitlines()
    ]
    longest = max(map(len, prompts)) + options.new_tokens
    pages = -(-longest // 16) + 1

    rows: list[dict[str, Any]] = []
    plain: list[list[int]] = []
    for way in options.ways:
        draft_model = drafter if way.startswith("draft model") else None
        engine = Engine(
            model, num_pages=pages * len(prompts), pages_per_seq=pages, max_seqs=len(prompts),
            max_tokens=9 * len(prompts), prefix_cache=False, ahead=0, draft_model=draft_model,
            **WAYS[way],
        )  # fmt: skip
        told: list[tuple] = []  # each request is told once after each step that draws for it
        served = engine.generate(
            prompts, max_new_tokens=options.new_tokens, stop_tokens=config.eos_token_ids,
            on_tokens=lambda *new, told=told: told.append(new),
        )  # fmt: skip
        tokens = [request.tokens for (request,) in served]
        plain = plain or tokens
        count = sum(len(request.tokens) + (request.reason == "stop_token") for (request,) in served)
        drafted, accepted = engine.num_drafted, engine.num_accepted
        rows.append({
            "drafts": way, "new tokens": count, "drafted": drafted, "accepted": accepted,
            "share": accepted / drafted if drafted else 0.0,
            "tokens a step": count / len(told),
            "answers as without": sum(map(list.__eq__, tokens, plain)),
        })  # fmt: skip
    show(rows)
    bars = {row["drafts"]: row["tokens a step"] for row in rows}
    save_bars(options.plot, bars, x="tokens that a request gets in a step")
    return rows


if __name__ == "__main__":
    main()
