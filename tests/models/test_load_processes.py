# SPDX-License-Identifier: Apache-2.0
"""Checkpoints over several processes: what each one reads, and what memory that takes."""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from children import child, on_devices
from fp8_folder import write_pair
from gguf_files import Kind, make, write
from tiers import first_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_processes.py"
PROCESSES = 2


def read_in_a_process(path, address, rank):
    """Prints how many values this process reads, and how many its device holds."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, int(rank))
    from jax_paged.models import load_checkpoint, make_mesh
    from jax_paged.models.checkpoint import gguf_file, shards
    from jax_paged.models.decoder.protocol import split_model

    read, get, dequantize = [], shards.Shards.get, gguf_file.dequantize

    def counted_get(self, name, part=None):
        values = get(self, name, part)
        read.append(values.size)
        return values

    def counted_dequantize(kind, data, out, pool):
        read.append(data.nbytes // kind.num_bytes * kind.size)
        dequantize(kind, data, out, pool)

    shards.Shards.get, gguf_file.dequantize = counted_get, counted_dequantize
    model, *_ = load_checkpoint(path, mesh=make_mesh)
    leaves = jax.tree.leaves(split_model(model)[1])
    held = sum(shard.data.size for x in leaves for shard in x.addressable_shards)
    whole = sum(x.size for x in leaves)
    print(json.dumps({"read": sum(read), "held": held, "whole": whole}))


@pytest.mark.parametrize("kind", first_of(["safetensors", "fp8", "gguf"], 1))
def test_each_process_reads_what_its_device_gets_and_no_more(kind, tmp_path):
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        _, metadata, tensors = make("qwen3moe", hidden_size=64, moe_intermediate_size=32)
        kinds = {name: Kind.Q8_0 for name, x in tensors.items() if x.ndim > 1}
        write(path, "qwen3moe", metadata, tensors, kinds)
    else:
        fp8, wide = write_pair(tmp_path, head_dim=128)
        path = fp8 if kind == "fp8" else wide
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                child(
                    [sys.executable, __file__, path, address, rank], env=on_devices(1), seconds=60,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )
            for rank in range(PROCESSES)
        ]  # fmt: skip
        said = [process.communicate() for process in children]
    for out, error in said:
        assert out, error[-4000:]
        counts = json.loads(out.splitlines()[-1])
        assert counts["read"] == counts["held"] < 0.7 * counts["whole"]


@pytest.mark.deep
def test_memory_while_loading_is_what_is_held_and_one_tensor():
    """2 GB over four processes; beside what a process has before it loads."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True, check=False,
        timeout=230,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(done.stdout)
    rows = measured["processes"]
    assert measured["bytes"] > 1.9e9
    assert len(rows) == 4
    for row in rows:
        assert row["held"] < 0.3 * measured["bytes"]
        assert row["most"] <= row["base"] + row["held"] + row["tensor"], row


if __name__ == "__main__":
    read_in_a_process(*sys.argv[1:])
