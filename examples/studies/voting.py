# SPDX-License-Identifier: Apache-2.0
"""Self-consistency (Wang et al. 2023): many answers to a question, and the one that most agree on.

    python examples/studies/voting.py --plot voting.svg

All prompts begin with the same worked examples, and the samples of a question have all of the
prompt in common. The engine computes what is shared once.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import DATA, options_for, save_lines, show

from jax_paged.models import Engine, load_checkpoint


def number_in(answer: str) -> int | None:
    """What an answer says the answer is, or its last number."""
    found = re.findall(r"answer is\D{0,3}(\d+)", answer) or re.findall(r"\d+", answer)
    return int(found[-1]) if found else None


def vote(numbers: Sequence[int | None]) -> int | None:
    """The number that comes most often; of several the one that came first."""
    counted = Counter(number for number in numbers if number is not None)
    return counted.most_common(1)[0][0] if counted else None


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = options_for(__doc__)
    parser.add_argument("--questions", type=Path, default=DATA / "questions.json")
    parser.add_argument("--count", type=int, help="how many of the questions; all by default")
    parser.add_argument("--samples", type=int, default=8, help="answers to each question")
    parser.add_argument("--new-tokens", type=int, default=60, help="most of an answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args(arguments)
    model, config, tokenizer = load_checkpoint(options.model)
    data = json.loads(options.questions.read_text(encoding="utf-8"))
    questions = data["questions"][: options.count]
    turns = [
        {"role": role, "content": text}
        for example in data["examples"]
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    prompts = [tokenizer.apply_chat([*turns, {"role": "user", "content": x}]) for x, _ in questions]
    pages = -(-(max(map(len, prompts)) + options.new_tokens) // 16)
    engine = Engine(model, num_pages=32 * pages, pages_per_seq=pages, max_seqs=16)
    served = engine.generate(
        prompts, n=options.samples, max_new_tokens=options.new_tokens, seed=1,
        temperature=options.temperature, stop_tokens=config.eos_token_ids,
    )  # fmt: skip
    numbers = [[number_in(tokenizer.decode(x.tokens)) for x in samples] for samples in served]

    rows, votes = [], 1
    while votes <= options.samples:
        groups = range(0, options.samples - votes + 1, votes)  # votes of other samples each
        right = [
            np.mean([vote(each[i : i + votes]) == truth for i in groups])
            for each, (_, truth) in zip(numbers, questions, strict=True)
        ]
        rows.append({"votes": votes, "right": float(np.mean(right))})
        votes *= 2
    show(rows)
    requests = [request for samples in served for request in samples]
    cached = sum(request.num_cached for request in requests)
    total = sum(len(request.prompt) for request in requests)
    print(f"\n{cached} of {total} prompt tokens found in the cache, {cached / total:.3f}")
    lines = {"majority": [(row["votes"], row["right"]) for row in rows]}
    save_lines(options.plot, lines, x="answers that vote", y="share of questions that are right")
    return [*rows, {"cached": cached / total}]


if __name__ == "__main__":
    main()
