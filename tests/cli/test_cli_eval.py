# SPDX-License-Identifier: Apache-2.0
"""jax-paged eval on a tiny checkpoint, weights of 8 bits and other context lengths."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from command_line_runs import LENGTH, assert_one_line_error, continuation
from tiny_checkpoint import write_checkpoint

from jax_paged.models import evaluate, load_checkpoint


def test_eval_prints_perplexity_and_tokens(run, loaded, tmp_path):
    file = tmp_path / "text.txt"
    text = "The quick brown fox jumps over the lazy dog. " * 3
    file.write_text(text, encoding="utf-8")
    code, out, _ = run("eval", file, "--context", 32, "--stride", 8, "--chunk", 20)
    assert code == 0
    model, _, tokenizer = loaded
    result = evaluate(model, tokenizer.encode(text), context=32, stride=8)
    lines = dict(line.split(": ") for line in out.splitlines())
    assert float(lines["perplexity"]) == pytest.approx(result["perplexity"], rel=1e-4)
    assert int(lines["tokens"]) == len(text)


def test_a_context_length_cuts_what_is_generated(run, loaded):
    new, _ = continuation(loaded, "Hello")
    code, out, _ = run("generate", "Hello", "--context-length", 8, "--json", *LENGTH)
    assert (code, json.loads(out)["tokens"]) == (0, new[:3])


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6},
}


def test_a_context_length_chooses_the_factors_of_longrope(run, tmp_path):
    model, file = write_checkpoint(tmp_path, "phi3", **LONGROPE), tmp_path / "text"
    file.write_text("not longer")
    short, same, long, longer = (
        run("eval", file, *arguments, model=model)[1]
        for arguments in ([], *(["--context-length", n] for n in (16, 17, 64)))
    )
    assert short == same != long == longer
    loaded, _, tokenizer = load_checkpoint(model, context_length=17, progress=False)
    want = evaluate(loaded, tokenizer.encode("not longer"))["perplexity"]
    assert long.startswith(f"perplexity: {want:.4f}\n")


@pytest.mark.parametrize("command", ["generate", "eval", "chat", "bench-serve"])
@pytest.mark.parametrize(
    ("length", "part"),
    [(65, "at most the 64 tokens of the model, got 65"), (0, "an integer of at least 1, got 0")],
)
def test_a_context_length_is_one_that_the_checkpoint_allows(run, checkpoint, command, length, part):
    text = {"generate": ["Hello"], "eval": [checkpoint / "config.json"]}
    result = run(command, *text.get(command, []), "--context-length", length)
    assert_one_line_error(result, f"{checkpoint}", f"context_length: expected {part}")


@pytest.mark.parametrize("weight_dtype", ["int8", "fp8"])
def test_eval_of_8_bit_weights_prints_what_they_cost(
    run, checkpoint, loaded, tmp_path, weight_dtype
):
    file = tmp_path / "text"
    text = "to be quantized or not to be"
    file.write_text(text)
    code, out, _ = run("eval", file, "--weight-dtype", weight_dtype)
    assert code == 0
    quantized = load_checkpoint(checkpoint, weight_dtype=weight_dtype, progress=False)[0]
    tokens = loaded[2].encode(text)
    before, after = (evaluate(model, tokens)["perplexity"] for model in (loaded[0], quantized))
    assert f"{before:.4f}" != f"{after:.4f}"
    assert out.splitlines() == [
        f"perplexity: {after:.4f}", f"tokens: {len(tokens)}",
        f"perplexity of the unquantized weights: {before:.4f} "
        f"({100 * (after / before - 1):+.2f} %)",
    ]  # fmt: skip


@pytest.mark.parametrize("weight_dtype", ["int8", "fp8"])
def test_8_bit_weights_generate(run, checkpoint, weight_dtype):
    code, out, _ = run("generate", "Hello", "--weight-dtype", weight_dtype, *LENGTH)
    model = load_checkpoint(checkpoint, weight_dtype=weight_dtype, progress=False)
    assert (code, out) == (0, continuation(model, "Hello")[1] + "\n")


def test_eval_prints_json_with_its_window(run, loaded, tmp_path):
    file = tmp_path / "text"
    file.write_text("to be pinned or not to be seen")
    flags = ["--window", 8, "--pinned", 2, "--weight-dtype", "int8", "--json"]
    code, out, _ = run("eval", file, *flags)
    figures = json.loads(out)
    assert (code, figures["window"], figures["num_pinned"]) == (0, 8, 2)
    want = evaluate(loaded[0], loaded[2].encode(file.read_text()), window=8, num_pinned=2)
    assert figures["unquantized_perplexity"] == pytest.approx(want["perplexity"], rel=1e-5)


def test_eval_in_bf16_is_close(run, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.")
    values = [
        float(run("eval", file, "--dtype", dtype)[1].split()[1])
        for dtype in ("float32", jnp.dtype("bfloat16").name)
    ]
    assert values[1] == pytest.approx(values[0], rel=0.05)
    assert values[1] != values[0]


@pytest.mark.parametrize(
    ("content", "arguments", "parts"),
    [
        (b"a", [], ["text: expected at least 2 tokens of text, got 1"]),
        (b"ab\xff", [], ["text: expected UTF-8 text, got the byte 0xff at offset 2"]),
        (b"abc", ["--chunk", "0"], ["chunk: expected an integer >= 1, got 0"]),
        (b"abc", ["--context", "65"], ["context: expected at most context_length=64, got 65"]),
        (b"abc", ["--context", "8", "--stride", "9"], ["stride: expected at most context=8"]),
        (b"abc", ["--pinned", "3"], ["pinned: expected 0 without a window, got 3"]),
        (None, [], ["text: No such file or directory"]),
    ],
)
def test_eval_refuses_bad_input(run, tmp_path, content, arguments, parts):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    assert_one_line_error(run("eval", file, *arguments), *parts)


def test_programs_compiled_for_shapes_serve_the_loaded_model(run, caplog):
    jax.clear_caches()
    with caplog.at_level(logging.DEBUG, "jax._src.interpreters.pxla"):
        assert run("generate", "A prompt of this test", *LENGTH)[0] == 0
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling ")]
    for name in ("make_room", "prefill", "decode"):
        assert sum(f"jit({name})" in text for text in compiled) == 1, compiled
