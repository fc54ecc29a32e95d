# SPDX-License-Identifier: Apache-2.0
"""XLA:GPU compiles an engine's steps of Qwen3-235B-A22B for eight H200, ahead of time.

Nothing has values, and no GPU is there. What a device holds and what devices tell each other is
what benchmarks/plan_sharding.py says on paper, where docs/sharding.md has its figures from. Few
layers stand for all 94, which are a deep test.
"""

import functools
import re
import time
from typing import NamedTuple

import numpy as np
import pytest
from h200 import h200_devices, host_traffic
from jax.sharding import AxisType, Mesh
from meshes import collectives, told
from planned import SIZES, Plan, planned
from shapes_runner import ShapesRunner
from tiers import first_of

from jax_paged.models import Decoder, config_from_hf
from jax_paged.models.decoder.parameters import abstract_source
from jax_paged.testing import is_in_place

CONTEXT, PAGE_SIZE = 8192, 16


class Step(NamedTuple):
    """The sizes of a step: of the mesh and of each replica."""

    tp: int
    dp: int
    rows: int
    tokens: int
    weight_dtype: str | None = None
    kv_dtype: str = "auto"


# As in docs/sharding.md: 32 rows of 8192 tokens a GPU, and prefill steps of 1024 tokens a GPU.
STEPS = {
    "decode, tp 4 × dp 2": Step(4, 2, 128, 128),
    "prefill, tp 4 × dp 2, fp8": Step(4, 2, 128, 4096, "fp8", "fp8"),
    "decode, tp 8, fp8": Step(8, 1, 256, 256, "fp8", "fp8"),
    "decode, dp 8, fp8": Step(1, 8, 32, 32, "fp8", "fp8"),
    "prefill, dp 8, fp8": Step(1, 8, 32, 1024, "fp8", "fp8"),
}
NAMES = first_of(STEPS, 2)
LAYERS = first_of([2, 94], 1)


@functools.cache
def compiled(step: Step, layers: int):
    """(its plan, the program, the state's shapes, seconds of processor time to compile it)."""
    config = config_from_hf(SIZES["qwen3_235b_a22b"] | {"num_hidden_layers": layers})
    devices = np.array(h200_devices(8)).reshape(step.dp, step.tp)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    source = abstract_source(config, "bfloat16")
    model = Decoder(config, source, weight_dtype=step.weight_dtype, mesh=mesh)
    pages = CONTEXT // PAGE_SIZE
    sizes = {
        "num_pages": step.rows * pages, "max_seqs": step.rows, "pages_per_seq": pages,
        "page_size": PAGE_SIZE, "kv_dtype": step.kv_dtype, "max_tree": 1, "max_tokens": step.tokens,
    }  # fmt: skip
    runner = ShapesRunner(model, None, sizes, step.rows + step.tokens // PAGE_SIZE)
    begin = time.process_time()
    runner.compile(
        [step.tokens], window=None, swaps=False, scores=False, progress=False,
        max_drafts=0,
    )  # fmt: skip
    seconds = time.process_time() - begin
    plan = Plan(config, step.tp, step.dp, step.weight_dtype, step.kv_dtype)
    return plan, runner.steps[step.tokens, False], runner.device.state, seconds


@pytest.mark.every
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_device_holds_what_is_on_paper(name, layers):
    plan, program, state, _ = compiled(STEPS[name], layers)
    memory = program.memory_analysis()
    paper = sum(plan.memory(STEPS[name].rows, CONTEXT))
    # A step's other arguments are small. Its temporary arrays are those of one layer.
    assert memory.argument_size_in_bytes == pytest.approx(paper, rel=0.01)
    if layers == 94:
        whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        print(f"{name}: {whole / 1e9:.2f} GB, on paper {paper / 1e9:.2f} GB")
        assert whole == pytest.approx(paper, rel=0.05)
    pool = state.k_pages.sharding.shard_shape(state.k_pages.shape)
    assert is_in_place(program, np.broadcast_to(np.zeros((), state.k_pages.dtype), pool))


@pytest.mark.every
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", NAMES)
def test_devices_tell_each_other_what_is_on_paper(name, layers):
    plan, program, _, _ = compiled(STEPS[name], layers)
    rows, tokens = STEPS[name].rows, STEPS[name].tokens
    assert told(program) == planned(plan, tokens, rows)
    if name.startswith("decode"):  # else arrays are too large for XLA to make one call of three
        assert len(collectives(program)) == len(plan.collectives(tokens, rows))
    assert host_traffic(program.as_text()) == []


@pytest.mark.every
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", NAMES)
def test_of_a_large_step_half_is_exchanged_while_experts_work(name, layers):
    plan, program, _, _ = compiled(STEPS[name], layers)
    beside = [kind for kind, between in started(program) if "jax_paged.moe_experts.v1" in between]
    found = plan.collectives(STEPS[name].tokens, STEPS[name].rows)
    want = [one.kind for one in found if one.is_beside]
    assert len(want) == (2 * layers if name.startswith("prefill") else 0)
    assert sorted(beside) == sorted(want)


def started(program):
    """Of each collective its kind, and the custom calls between its start and its end."""
    flying, found = {}, []
    for line in program.as_text().splitlines():
        if match := re.search(r"%(\S+) = .* (all-gather|all-reduce|reduce-scatter)-start\(", line):
            flying[match[1]] = match[2], []
        elif match := re.search(r"-done\(%([^)\s]+)\)", line):
            found.append(flying.pop(match[1]))
        elif match := re.search(r'custom_call_target="([^"]+)"', line):
            for _, between in flying.values():
                between.append(match[1])
    assert not flying
    return found


@pytest.mark.deep
def test_time_to_compile_grows_no_faster_than_layers():
    step = STEPS["decode, tp 4 × dp 2"]
    compiled.cache_clear()
    seconds = {layers: compiled(step, layers)[-1] for layers in (2, 4, 8, 16)}  # the first warms up
    print({layers: f"{seconds[layers] / layers:.2f} s a layer" for layers in (4, 8, 16)})
    assert seconds[16] < 1.25 * 4 * seconds[4]
