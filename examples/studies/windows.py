# SPDX-License-Identifier: Apache-2.0
"""What a window costs, and what a few pinned tokens save (StreamingLLM, Xiao et al. 2023).

    python examples/studies/windows.py --plot windows.svg

Each token sees the first `pins` tokens and the last ones, `window` together. All others are
forgotten, so the pages of a row stop growing.
"""

from collections.abc import Sequence
from typing import Any

from common import add_text, options_for, read_tokens, save_lines, show

from jax_paged.models import evaluate, load_checkpoint


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = options_for(__doc__)
    add_text(parser, tokens=1800)
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--pins", type=int, nargs="+", default=[0, 1, 4])
    options = parser.parse_args(arguments)
    model, config, tokenizer = load_checkpoint(options.model)
    tokens = read_tokens(options, tokenizer)
    if len(tokens) > config.context_length:
        parser.error(f"--tokens: the model's context has {config.context_length}")

    full = evaluate(model, tokens)["perplexity"]
    rows: list[dict[str, Any]] = [{"window": "none", "pins": 0, "perplexity": full, "× full": 1.0}]
    lines: dict[str, list[tuple[int, float]]] = {}
    for pins in options.pins:
        for window in options.windows:
            found = evaluate(model, tokens, window=window, num_pinned=pins)["perplexity"]
            rows.append(
                {"window": window, "pins": pins, "perplexity": found, "× full": found / full}
            )
            lines.setdefault(f"{pins} pinned", []).append((window, found / full))
    lines["all tokens"] = [(window, 1.0) for window in options.windows]
    show(rows)
    save_lines(options.plot, lines, x="window, tokens", y="perplexity, times that of all tokens")
    return rows


if __name__ == "__main__":
    main()
