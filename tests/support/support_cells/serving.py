# SPDX-License-Identifier: Apache-2.0
"""generate, Engine and LoRA: the tokens of a toy model against those of float64 (`toy`)."""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_paged as jp
from jax_paged.models import Decoder, Engine, create_state, generate, token_logits
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.testing import small_config
from jax_paged.testing import assert_attention_close, dense_oracle, mla

from .kinds import OF_LOGITS, Cell, Meaningless, Refused, Runs, every
from .states import few_are_shared
from .toy import WINDOW, Toy, text_of

NEW = 12
RNG = np.random.default_rng(3)
BEGINNING = RNG.integers(0, 60, 13).tolist()
PROMPTS = [BEGINNING, [*BEGINNING[:9], 5, 6], [17]]
ROW_WINDOW = (7, 2)  # of rows in an engine, and pinned tokens
WINDOW_PAGES = 5  # of a row in an engine: 4 tokens before a chunk of 12, anywhere in a page of 4
OF_MODEL = ("windows", *OF_LOGITS, "fp8 output")  # what the model does


@dataclasses.dataclass(frozen=True)
class Run:
    """Features that one run has together: few programs, and every pair of them."""

    has: tuple[str, ...] = ()  # of the model
    layout: Any = "HND"
    int8: bool = False
    options: tuple[tuple[str, Any], ...] = ()  # of an engine
    window: tuple[int, int] | None = None
    in_engine: bool = False

    def tokens(self, without: str = "") -> list[list[int]]:
        """In float64."""
        window = None if without == "pins" else self.window
        options: dict[str, Any] = {"window": window, "int8": self.int8, "without": without}
        return [text_of(prompt, NEW, self.has, **options) for prompt in PROMPTS]


LOGITS = (*OF_LOGITS, "fp8 output")
KEPT = Run(("windows",), "NHD")  # pages of all layers keep all tokens
FREED = Run(("windows",))  # pools of their own
MANY = Run(LOGITS, "vllm5d")
CODES = Run((), "rpa", int8=True)
GENERATED: dict[str, Run] = {
    "windows": KEPT, "NHD": KEPT, "slid rows": FREED, "groups": FREED, "HND": FREED,
    "8-bit": CODES, "rpa": CODES, "vllm5d": MANY, **dict.fromkeys(LOGITS, MANY),
}  # fmt: skip
SLID = Run(
    (), "NHD", window=ROW_WINDOW, in_engine=True,
    options=(("window", ROW_WINDOW[0]), ("num_pinned", ROW_WINDOW[1]), ("num_pages", 15)),
)  # fmt: skip
DRAFTS = (("max_drafts", 3), ("draft_branches", 2), ("max_tokens", 12))
GUESSED = Run(("windows",), in_engine=True, options=DRAFTS)
SPLIT = dataclasses.replace(GUESSED, options=(("groups", True), *DRAFTS))
SHARED = Run((), "rpa", int8=True, in_engine=True, options=(("cascade", True),))
SERVED: dict[str, Run] = {
    "pins": SLID, "slid rows": SLID, "NHD": SLID, "trees": GUESSED, "windows": GUESSED,
    "HND": GUESSED, "groups": SPLIT, "cascade": SHARED, "8-bit": SHARED, "rpa": SHARED,
    **dict.fromkeys(("vllm5d", *LOGITS), dataclasses.replace(MANY, in_engine=True)),
}  # fmt: skip


@functools.cache
def tokens_of(run: Run) -> list[list[int]]:
    """What a run gives."""
    model, dtype = Toy.create(*run.has), "int8" if run.int8 else "auto"
    if not run.in_engine:
        # Of the pool of a window there is too little for rows that would not slide.
        sizes: dict[str, Any] = {"max_seqs": 3, "page_size": 4, "pages_per_seq": 8}
        pages = {"full": 24, WINDOW: 12} if run == FREED else 24
        state = create_state(
            model, **sizes, num_pages=pages, layout=run.layout, kv_dtype=dtype, groups=run == FREED
        )
        assert state.kinds == (("full", WINDOW) if run == FREED else ("full",))
        result = generate(model, PROMPTS, max_new_tokens=NEW, state=state)
        assert {group.layout for group in result.state.groups} == {run.layout}
        assert result.stop_reasons == ["length"] * 3
        return result.tokens
    options = {"num_pages": 24, "max_seqs": 3, "page_size": 4, "max_tokens": 4}
    options |= {"kv_dtype": dtype, "layout": run.layout, **dict(run.options)}
    with few_are_shared():
        engine = Engine(model, **options, progress=False)
    assert {group.layout for group in engine.state.groups} == {run.layout}
    if "groups" in options:
        assert [group.table.num_pages for group in engine.state.groups] == [24, 3 * WINDOW_PAGES]
    if "cascade" in options:  # what others find in the prefix cache
        engine.submit(PROMPTS[0], max_new_tokens=1)
        engine.run()
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    engine.run()
    assert "cascade" not in options or requests[1].num_cached == 10
    assert "max_drafts" not in options or engine.num_drafted > 0
    assert [request.reason for request in requests] == ["length"] * 3
    return [request.tokens for request in requests]


def check(feature: str, runs: dict[str, Run], *, lora: bool = False) -> None:
    """The tokens of a run; where a feature changes them, those without it are others."""
    run = runs[feature]
    assert tokens_of(run) == run.tokens()
    left_out = "LoRA" if lora else {"slid rows": "pins", "groups": "windows"}.get(feature, feature)
    if left_out == "pins" and run.window is None:
        left_out = "windows"
    if left_out in ("LoRA", "pins", *OF_MODEL):
        assert run.tokens() != run.tokens(left_out)


def check_latent_lora() -> None:
    """Absorbed queries with a low-rank product, over latent rows."""
    rng = np.random.default_rng(0)
    batch = mla.make_mla(48, 32, 6, [1, 3], [20, 9])
    x, a, b = (rng.standard_normal(s).astype("f4") for s in ((4, 8), (1, 8, 8), (1, 6 * 48, 8)))
    base = batch.q.reshape(4, -1)
    q = jp.lora(*map(jnp.asarray, (x, a, b, np.zeros(4, "i4"))), base=jnp.asarray(base))
    real = base + x.astype("f8") @ a[0].astype("f8").T @ b[0].astype("f8").T
    scale = 0.003
    kv_pages, rows = batch.operands()[1][:, 0], batch.ragged()[0][3:]
    result = jp.mla_paged_attention(
        q.reshape(4, 6, 48), kv_pages, *rows, sm_scale=scale, v_head_dim=32, return_lse=True
    )
    batch = dataclasses.replace(batch, q=real.reshape(4, 6, 48), sm_scale=scale)
    assert_attention_close(*result, *dense_oracle(batch), logit_size=3)


def check_latent(*, in_engine: bool) -> None:
    """A small DeepSeek, in f32, against the logits of the ops' references."""
    config = small_config("deepseek_v2", vocab_size=60, num_hidden_layers=2)
    source = random_source(config, seed=3)
    if in_engine:
        options = {"num_pages": 24, "max_seqs": 3, "page_size": 4, "max_tokens": 8}
        engine = Engine(Decoder(config, source), **options, progress=False)
        requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        engine.run()
        assert engine.state.kinds == ("mla",)
        found = [request.tokens for request in requests]
    else:
        result = generate(Decoder(config, source), PROMPTS, max_new_tokens=NEW)
        assert result.state.kinds == ("mla",)
        found = result.tokens
    slow = Decoder(config, source, implementation="reference")
    for prompt, new in zip(PROMPTS, found, strict=True):
        logits = token_logits(slow, [*prompt, *new])[len(prompt) - 1 : -1]
        assert new == logits.argmax(-1).tolist()


def rows() -> dict[str, dict[str, Cell]]:
    """The rows of what runs models."""
    in_generate = partial(generate, Toy.create(), PROMPTS, max_new_tokens=1)

    def row(runs: dict[str, Run], **options: Any) -> dict[str, Cell]:
        return every(tuple(runs), lambda f: Runs(partial(check, f, runs, **options)))

    return {
        "`generate`": {
            **row(GENERATED),
            "pins": Refused(
                partial(in_generate, num_pinned=2), "'num_pinned'", "windows of rows are `Engine`'s"
            ),
            "trees": Refused(
                partial(in_generate, max_drafts=2), "'max_drafts'", "drafts are `Engine`'s"
            ),
            "cascade": Meaningless("its rows have pages of their own: they share none"),
            "latent": Runs(partial(check_latent, in_engine=False)),
        },
        "`Engine`": {
            **row(SERVED),
            "latent": Runs(partial(check_latent, in_engine=True)),
        },
        "LoRA": {
            **row(SERVED | GENERATED, lora=True),
            "latent": Runs(check_latent_lora),
        },
    }
