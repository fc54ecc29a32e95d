# SPDX-License-Identifier: Apache-2.0
"""`jax-paged serve --adapter`: a model and its adapters, each under a name of its own."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from adapters import write_adapter
from running_server import Running
from tiny_checkpoint import write_checkpoint

from jax_paged._start.command_line import parser
from jax_paged.models import cli, generate, load_checkpoint
from jax_paged.models.checkpoint.weights import Checkpoint, open_checkpoint
from jax_paged.models.server import command
from jax_paged.models.status import Status
from jax_paged.models.testing import small_config

NAMES = ["base", "poet", "clerk"]
RANKS = {"poet": 4, "clerk": 11}
PROMPTS = ["Hello", "The sea is", "42"]
DRAW = {"temperature": 0.2, "seed": 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of the model and the adapters, by name."""
    made = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    write_checkpoint(made["base"])
    _, config, _ = load_checkpoint(made["base"], progress=False)
    for name, rank in RANKS.items():
        write_adapter(made[name], config, seed=rank, r=rank, lora_alpha=16 * rank)
    return made


def options_of(folders, *more):
    arguments = ["--model", folders["base"], "--served-name", "base", "--max-seqs", "4"]
    arguments += ["--max-tokens", "4", "--port", "0", "--no-program-cache", *more]
    for name in RANKS:
        arguments += ["--adapter", f"{name}={folders[name]}"]
    options = parser().parse_args(["serve", *map(str, arguments)])
    options.status = Status()
    return options


@pytest.fixture(scope="module")
def server(folders):
    running = Running(command._service(options_of(folders), None, None))
    yield running
    running.end()
    running.engine.clear_cache()
    running.engine.step()
    assert running.engine.num_free_pages == running.engine.num_pages


def test_the_list_of_models_has_the_adapters_behind_their_parent(server):
    found = server.get("/v1/models")[1]["data"]
    assert [(one["id"], one["parent"]) for one in found] == [
        ("base", None), ("poet", "base"), ("clerk", "base"),
    ]  # fmt: skip
    assert {one["max_model_len"] for one in found} == {64}


def test_each_name_answers_as_its_merged_model_does_whatever_runs_beside_it(server, folders):
    def ask(name):
        body = DRAW | {"model": name, "prompt": PROMPTS, "n": 2, "max_tokens": 8}
        status, got, _ = server.post("/v1/completions", body)
        assert (status, got["model"]) == (200, name)
        return [choice["text"] for choice in got["choices"]]

    with ThreadPoolExecutor(len(NAMES)) as clients:
        found = dict(zip(NAMES, clients.map(ask, NAMES), strict=True))
    for name in NAMES:
        base = {} if name == "base" else {"base": folders["base"]}
        model, _, tokenizer = load_checkpoint(folders[name], progress=False, **base)
        ids = [tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(2)]
        made = generate(model, ids, max_new_tokens=8, stop_tokens=[256], **DRAW)
        assert found[name] == [tokenizer.decode(tokens) for tokens in made.tokens]
    assert len({*found["base"], *found["poet"], *found["clerk"]}) == 3 * 2 * len(PROMPTS)


def test_a_conversation_has_an_adapter_too_and_no_name_means_the_model(server):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    answers = {}
    for name in (None, *NAMES):
        status, got, _ = server.post("/v1/chat/completions", body | {"model": name})
        assert (status, got["model"]) == (200, name or "base")
        answers[name] = got["choices"][0]["message"]["content"]
    assert answers[None] == answers["base"]
    assert len(set(answers.values())) == 3


def test_an_unknown_name_is_told_which_there_are(server):
    status, got, _ = server.post("/v1/completions", {"prompt": "a", "model": "bard"})
    assert (status, got["error"]["code"]) == (404, "model_not_found")
    assert got["error"]["message"] == f"model: expected one of {NAMES}, got 'bard'"


def test_an_adapter_has_another_name_than_the_model(server):
    with pytest.raises(ValueError, match=r"^name: expected none of .*, got 'poet'"):
        Running(server.engine, name="poet")


def test_the_estimate_counts_the_adapters(server, folders):
    checkpoint = open_checkpoint(folders["base"])
    slots = {"max_adapters": 2, "max_rank": 11}
    sizes = command.estimate_for(options_of(folders), checkpoint, slots)
    engine = server.engine
    arrays = jax.tree.leaves((engine.params, engine._runner.adapters))
    assert sizes.weight_bytes == sum(array.nbytes for array in arrays)


def test_what_is_no_adapter_of_the_model_ends_the_start(folders, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)
    monkeypatch.setattr(command, "start_log", lambda level: None)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("loaded"))
    write_adapter(tmp_path, small_config("llama", num_hidden_layers=3))
    for given, part in (
        ("a=/nowhere", "/nowhere/adapter_config.json: no such file"),
        (f"a={tmp_path}", "has no place in a model of 2 layers"),
        (f"base={folders['poet']}", "adapter: expected another name than the model's, got 'base'"),
    ):
        arguments = ["--port", "0", "--model", str(folders["base"]), "--served-name", "base"]
        assert cli.main(["serve", *arguments, "--adapter", given]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert part in err.splitlines()[-1]
