# SPDX-License-Identifier: Apache-2.0
"""What fewer bits cost: the perplexity of a text with 8-bit and 4-bit weights, and an 8-bit cache.

    python examples/studies/quantization.py --plot quantization.svg

The 4-bit rows measure accuracy alone: weights are rounded while they are loaded, and stay f32. So
they are neither smaller nor faster here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import add_text, options_for, read_tokens, save_bars, show

import jax_paged.models as jpm


def int4_source(source: jpm.TensorSource, group: int) -> jpm.TensorSource:
    """A source whose projections are rounded to 4 bits: a scale for each `group` of inputs.

    A weight becomes scale · q with q in −7 … 7 and scale = max|w| / 7 of its group.
    """

    def rounded(*names: str, axis: int = 0, dtype: Any = None) -> jax.Array:
        weight = source(*names, axis=axis, dtype=dtype)
        if not names[0].endswith("_proj.weight"):
            return weight
        inputs = weight.shape[-1]
        if inputs % group:
            raise ValueError(f"group: expected a divisor of {inputs} inputs, got {group}")
        groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group)
        scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 7
        codes = jnp.round(groups / jnp.where(scale == 0, 1, scale))
        return (scale * codes).reshape(weight.shape).astype(weight.dtype)

    return rounded


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = options_for(__doc__)
    add_text(parser, tokens=1800)
    parser.add_argument("--dtypes", nargs="*", default=["int8", "fp8"], help="of 8 bits")
    parser.add_argument("--groups", type=int, nargs="*", default=[32, 64, 192])
    options = parser.parse_args(arguments)
    path = options.model or jpm.default_checkpoint()
    model, config, tokenizer = jpm.load_checkpoint(path)
    tokens = read_tokens(options, tokenizer)
    rows: list[dict[str, Any]] = []

    def add(weights: str, model: jpm.Decoder, kv_dtype: str = "auto") -> None:
        result = jpm.evaluate(model, tokens, kv_dtype=kv_dtype)
        cost = result["nll"] - (rows[0]["nll"] if rows else result["nll"])
        kv = jnp.dtype(model.dtype).name if kv_dtype == "auto" else kv_dtype
        rows.append({"weights": weights, "K and V": kv, "perplexity": result["perplexity"],
                     "nll": result["nll"], "more nats": f"{cost:+.4f}"})  # fmt: skip

    name = jnp.dtype(model.dtype).name
    add(name, model)
    for kv_dtype in options.dtypes:
        add(name, model, kv_dtype)
    source = jpm.tensor_source(path, model.dtype)
    for weight_dtype in options.dtypes:
        small = jpm.Decoder(config, source, weight_dtype=weight_dtype)
        add(weight_dtype, small)
        add(weight_dtype, small, weight_dtype)
    for group in options.groups:
        add(f"int4, groups of {group}", jpm.Decoder(config, int4_source(source, group)))
    show(rows)
    bars = {f"{row['weights']}; K and V {row['K and V']}": float(row["more nats"]) for row in rows}
    save_bars(options.plot, bars, x="more nats per token")
    return rows


if __name__ == "__main__":
    main()
