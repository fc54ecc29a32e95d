# SPDX-License-Identifier: Apache-2.0
"""Several processes over one mesh: what they give is what one device gives, and they end together.

This file is a script, too: one process of a job, which runs the program that its arguments name.
"""

import itertools
import json
import os
import re
import shlex
import signal
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from adapters import make_adapter
from jobs import KEY, run_all, started
from served_engines import (
    CONFIGS,
    ENGINES,
    PROMPTS,
    SIZES,
    assert_same,
    both,
    hand_over,
    models_of,
    serve,
)
from tiers import first_of
from tiny_checkpoint import write_checkpoint

from jax_paged.models import (
    Decoder,
    Engine,
    evaluate,
    follow,
    generate,
    loglikelihoods,
    make_mesh,
    score,
    start_processes,
)
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.distributed.processes import EXIT_LOST

ROOT = Path(__file__).parents[2]
SECONDS = 240
SHAPES = [(2, 1), (4, 1), (2, 2), (2, 4)]  # processes, devices of each
BEGUN = "steps are under way"


def all_call_the_same(processes):
    """`generate`, `score` and `evaluate`, in each process with the same arguments."""
    options = {"max_new_tokens": 8, "temperature": 0.8, "seed": 5}
    seen = []
    for model in both(CONFIGS["dense"])[not processes.is_first :]:
        tokens = generate(model, PROMPTS[:3], **options).tokens
        seen.append((tokens, score(model, PROMPTS[2]), evaluate(model, PROMPTS[2])["nll"]))
    if processes.is_first:
        (tokens, scores, nll), (got_tokens, got_scores, got_nll) = seen
        assert got_tokens == tokens
        np.testing.assert_allclose(got_scores, scores, rtol=2e-5, atol=2e-6)
        assert abs(got_nll - nll) < 1e-5


def stages_of_processes_give_the_same(processes):
    """Each stage is on a process of its own; `generate` and the engine."""
    seen = []
    for model in both(CONFIGS["dense"], sizes={"pp": processes.count})[not processes.is_first :]:
        seen.append(generate(model, PROMPTS[:3], max_new_tokens=8).tokens)
    if not processes.is_first:
        follow(processes, model)
        return
    engine = Engine(model, **SIZES, processes=processes)
    requests = [engine.submit(prompt, max_new_tokens=8) for prompt in PROMPTS[:3]]
    engine.run()
    assert seen[0] == seen[1] == [request.tokens for request in requests]


def others_call_the_same(processes):
    """Likelihoods, and generation with an adapter."""
    config = CONFIGS["dense"]
    adapter = make_adapter(config, 1)
    pairs, seen = [(prompt[:3], prompt[3:9]) for prompt in PROMPTS[:3]], []
    for model in both(config)[not processes.is_first :]:
        told = [one.log_p for one in loglikelihoods(model, pairs, chunk=16)]
        adapted = generate(model, PROMPTS[:2], max_new_tokens=6, adapter=adapter)
        seen.append((told, adapted.tokens))
    if processes.is_first:
        (told, tokens), (got, got_tokens) = seen
        np.testing.assert_allclose(got, told, rtol=1e-5)
        assert got_tokens == tokens


def the_engine_gives_the_same(processes, kind):
    """The first process has the requests, and the others follow."""
    (one, own_drafter), (many, drafter) = models_of(kind)
    if not processes.is_first:
        follow(processes, many, draft_model=drafter)
        return
    _, want = serve(kind, one, own_drafter)
    engine, got = serve(kind, many, drafter, processes=processes)
    assert_same(got, want)
    assert {request.replica for request in got} == set(range(engine.num_replicas))


def prompts_of_another_engine(processes):
    """One device prefills, in int8, and the engine of all processes goes on; then the other way."""
    (one, _), (many, _) = models_of("swap")
    if not processes.is_first:
        follow(processes, many)
        return
    sizes = SIZES | {"preemption": "swap", "swap_pages": 64, "kv_dtype": "int8"}
    sizes |= {"prefix_cache": False}
    asked = {"max_new_tokens": 9, "temperature": 0.7, "seed": 1}
    prefiller, engine = Engine(one, **sizes), Engine(many, **sizes, processes=processes)
    want = [prefiller.submit(x, draw_index=i, **asked) for i, x in enumerate(PROMPTS[:4])]
    prefiller.run()
    for giver, taker in ((prefiller, engine), (engine, prefiller)):
        got = hand_over(giver, taker, PROMPTS[:4], **asked)
        assert got == [request.tokens for request in want]
        assert taker.num_swaps[1] == 4
    assert engine.num_free_swap_pages == 64 * engine.num_replicas
    assert prefiller.num_free_swap_pages == 64


def a_later_engine_takes_the_place(processes):
    _, model = both(CONFIGS["dense"])
    if not processes.is_first:
        with pytest.raises(ValueError, match=r"processes: expected the first one; .* got number 1"):
            Engine(model, **SIZES, processes=processes)
        follow(processes, model)
        return
    with pytest.raises(ValueError, match="processes: expected those that the model lies on"):
        Engine(model, **SIZES)
    first, second = (Engine(model, **SIZES, processes=processes) for _ in range(2))
    request = second.submit(PROMPTS[0], max_new_tokens=2)
    second.run()
    assert len(request.tokens) == 2
    first.submit(PROMPTS[0], max_new_tokens=2)
    with pytest.raises(ValueError, match="engine: expected the newest one of its processes"):
        first.run()


def weights_change_and_experts_move(processes):
    config = CONFIGS["experts"]
    mesh = make_mesh(config)
    redundant = 0 if mesh.size < 8 else 8  # with 8 on two devices, each would have all experts
    one, new = (Decoder(config, random_source(config, seed=seed)) for seed in (3, 4))
    model, later = (
        Decoder(config, random_source(config, seed=seed), mesh=mesh, redundant_experts=redundant)
        for seed in (3, 4)
    )
    if not processes.is_first:
        follow(processes, model, weights=lambda: later)
        return
    engine = Engine(model, **SIZES, prefix_cache=False, processes=processes)
    asked = {"max_new_tokens": 7, "temperature": 0.8, "seed": 2}

    def tokens():
        requests = [engine.submit(x, draw_index=i, **asked) for i, x in enumerate(PROMPTS)]
        engine.run()
        return [request.tokens for request in requests]

    want, changed = (generate(x, PROMPTS, **asked).tokens for x in (one, new))
    assert tokens() == want
    moved = engine.rebalance()
    assert moved.after < moved.before
    assert tokens() == want
    for _ in range(2):
        engine.update_weights(later)
        assert tokens() == changed != want


def steps_go_on_and_on(processes):
    _, model = both(CONFIGS["dense"])
    if not processes.is_first:
        print(BEGUN, flush=True)
        follow(processes, model)
        return
    engine = Engine(model, **SIZES, processes=processes)
    while True:
        engine.submit(PROMPTS[0], max_new_tokens=9)
        engine.run()
        print(BEGUN, flush=True)


def another_model(processes):
    config = CONFIGS["dense" if processes.is_first else "experts"]
    _, model = both(config)
    if processes.is_first:
        engine = Engine(model, **SIZES, processes=processes)
        engine.submit(PROMPTS[0], max_new_tokens=2)
        engine.run()
    else:
        follow(processes, model)


def job(*programs, count=2, devices=1):
    """The processes of some programs. A program's argument follows its name after a colon."""
    script = ["-W", "error", __file__]
    return started(lambda where, index: [*script, where, count, index, *programs], count, devices)


def run(*programs, **sizes):
    with job(*programs, **sizes) as processes:
        run_all(processes)


@pytest.mark.parametrize(
    "program", first_of(["all_call_the_same", "the_engine_gives_the_same:much at once"], 1)
)
def test_two_processes_give_what_one_device_gives(program):
    run(program)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "shape"), list(zip(ENGINES, itertools.cycle(SHAPES), strict=False))
)
def test_engines(kind, shape):
    count, devices = shape
    run(f"the_engine_gives_the_same:{kind}", count=count, devices=devices)


@pytest.mark.deep
@pytest.mark.parametrize(("count", "devices"), SHAPES[1:])
def test_programs_that_all_call(count, devices):
    run("all_call_the_same", "others_call_the_same", count=count, devices=devices)


@pytest.mark.deep
@pytest.mark.parametrize("devices", [1, 2])
def test_stages_of_processes(devices):
    run("stages_of_processes_give_the_same", count=2, devices=devices)


@pytest.mark.deep
def test_a_later_engine_takes_the_place():
    run("a_later_engine_takes_the_place")


@pytest.mark.deep
@pytest.mark.parametrize(("count", "devices"), SHAPES)
def test_weights_change_and_experts_move(count, devices):
    run("weights_change_and_experts_move", count=count, devices=devices)


@pytest.mark.deep
def test_prompts_of_another_engine():
    run("prompts_of_another_engine", devices=2)


@pytest.mark.deep
@pytest.mark.parametrize("dies", range(3))
def test_a_killed_process_ends_the_others(dies):
    with job("steps_go_on_and_on", count=3) as processes:
        for process in processes:
            assert f"{BEGUN}\n" in process.stdout  # beside what gloo has to say
        os.kill(processes[dies].pid, signal.SIGKILL)
        killed = time.monotonic()
        others = [p for p in processes if p is not processes[dies]]
        errors = [process.communicate(timeout=15)[1] for process in others]
        assert time.monotonic() - killed < 15
        for process, error in zip(others, errors, strict=True):
            if dies == 0 and "coordination_service_agent" in error:  # JAX's client was as quick
                assert process.returncode in (EXIT_LOST, -signal.SIGABRT), error
                continue
            assert process.returncode == EXIT_LOST, error
            (line,) = error.splitlines()
            gone = f"process {dies} is gone: its connection is closed"
            assert line.startswith(f"jax-paged: error: {gone}")


@pytest.mark.deep
def test_another_model_ends_all():
    with job("another_model") as processes:
        errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_LOST, 1]
    assert errors[0].startswith("jax-paged: error: process 1 has failed: ValueError(")
    assert "model.config.experts_per_token: expected 0, as process 0 has, got 2" in errors[0]


def command(*arguments, count=2, split="--tp"):
    """The processes of a command line."""
    one = ["-P", "-m", "jax_paged", *arguments, "--no-program-cache"]
    if count == 1:
        return started(lambda where, index: one, 1, 1)
    many = [*one, split, "2", "--num-processes", count]
    return started(
        lambda where, index: [*many, "--coordinator", where, "--process-id", index], count, 1
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and a text."""
    path = tmp_path_factory.mktemp("processes")
    write_checkpoint(path)
    (path / "text.txt").write_text("abba " * 30)
    return path


@pytest.mark.deep
def test_what_the_guide_shows(folder, tmp_path):
    """Its two commands print what one process prints, and its program runs."""
    text = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8").replace("MODEL", str(folder))
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("jax-paged gen")]
    assert len(lines) == 2
    with command(*lines[0][1:5], count=1) as processes:
        (want,) = run_all(processes)

    def arguments(where, index):
        named = (where if x == "10.0.0.1:1234" else x for x in lines[index][1:])
        return ["-P", "-m", "jax_paged", *named, "--no-program-cache"]

    with started(arguments, 2, 1) as processes:
        assert run_all(processes) == [want, ""]
    (program,) = re.findall(r"^```py\n(.*?)^```", text, re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(program, encoding="utf-8")
    with started(lambda where, index: [script, where, index], 2, 1) as processes:
        out, *_ = run_all(processes)
    assert "8 new tokens\n" in out


@pytest.mark.deep
def test_stages_of_processes_print_what_one_prints(folder):
    """The first one has the prompts, and all generate."""
    arguments = ["generate", "ab", "a longer one", "--pages", "9", "--stop", "z", "--json"]
    said = []
    for count in (1, 2):
        with command(*arguments, "--model", folder, count=count, split="--pp") as processes:
            out, *others = run_all(processes)
        assert others == [""] * (count - 1)
        said.append(out)
    assert said[0] == said[1] != ""


@pytest.mark.deep
@pytest.mark.parametrize("name", ["eval", "bench-serve"])
def test_commands_print_what_they_print_alone(folder, name):
    arguments = {
        "eval": ["eval", folder / "text.txt", "--chunk", "16"],
        "bench-serve": ["bench-serve", "--requests", "3", "--new-tokens", "4", "--rate", "0"],
    }[name]
    said = []
    for count in (1, 2):
        with command(*arguments, "--json", "--model", folder, count=count) as processes:
            out, *others = run_all(processes)
        assert others == [""] * (count - 1)
        said.append([json.loads(line) for line in out.splitlines()])
    for key in {"eval": ("tokens", "nll"), "bench-serve": ("new_tokens", "steps")}[name]:
        np.testing.assert_allclose(said[1][0][key], said[0][0][key], rtol=1e-5)


@pytest.mark.deep
def test_a_process_with_another_key_does_not_get_in():
    script = ["-W", "error", __file__]
    with started(
        lambda where, index: [*script, where, 2, index], 2, 1,
        lambda index: {"JAX_PAGED_KEY": f"{KEY}{index}"},
    ) as processes:  # fmt: skip
        errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_LOST] * 2
    assert "process 0 found no job: expected all within 30 s, got none of [1]" in errors[0]
    assert "the other side does not know the key" in errors[1]


@pytest.mark.deep
def test_slurm_tells_who_is_who(folder):
    """Its variables, as `srun` would set them."""
    one = ["-P", "-m", "jax_paged", "eval", folder / "text.txt", "--model", folder, "--tp", "2"]
    one += ["--coordinator", "auto", "--no-program-cache"]

    def variables(index):
        names = {"SLURM_JOB_ID": os.getpid(), "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2}
        names |= {"SLURM_PROCID": index, "SLURM_LOCALID": index, "SLURM_STEP_NUM_NODES": 1}
        names |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": 1}
        return {name: str(value) for name, value in names.items()}

    with started(lambda where, index: one, 2, 1, variables) as processes:
        out, other = run_all(processes)
    assert out.startswith("perplexity: ")
    assert other == ""


@pytest.mark.deep
def test_a_server_of_two_processes(folder):
    with command("serve", "--model", folder, "--port", "0", "--pages", "16") as processes:
        lines = iter(processes[0].stderr.readline, "")
        url = next(line for line in lines if line.startswith("serving ")).split()[-1]
        asked = json.dumps({"prompt": "ab", "max_tokens": 4, "model": folder.name}).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", asked, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        processes[0].send_signal(signal.SIGTERM)
        run_all(processes)


@pytest.mark.deep
def test_an_error_of_the_first_process_ends_all(folder):
    with command("eval", folder / "none.txt", "--model", folder) as processes:
        said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [2, EXIT_LOST]
    assert said[0][1].splitlines()[-1].startswith("jax-paged: error: ")
    assert "process 0 has failed: FileNotFoundError" in said[1][1]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.filterwarnings("ignore", "each of the .* KV heads lies on")
    where, count, index, *chosen = sys.argv[1:]
    with start_processes(where, int(count), int(index)) as processes_:
        for text in chosen:
            name, _, argument = text.partition(":")
            globals()[name](processes_, *filter(None, [argument]))
