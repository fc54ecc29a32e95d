# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line (tests/cli) expect of a run."""

from jax_paged.models import generate

NEW = 12


LENGTH = ["--max-new-tokens", str(NEW)]


TITLE = "command-line: 38,112 parameters in float32"


def continuation(loaded, prompt: str, **options) -> tuple[list[int], str]:
    """The new ids, and the text that they add."""
    model, config, tokenizer = loaded
    ids = tokenizer.encode(prompt)
    options = {"max_new_tokens": NEW, "stop_tokens": config.eos_token_ids} | options
    new = generate(model, [ids], **options).tokens[0]
    return new, tokenizer.decode(ids + new)[len(prompt) :]


def assert_one_line_error(result, *parts: str) -> None:
    code, out, err = result
    assert code == 2
    assert out == ""
    *title, error = err.splitlines()  # the title is there once the model is loaded
    assert error.startswith("jax-paged: error: ")
    assert title in ([], [TITLE]), title
    for part in parts:
        assert part in error
