# SPDX-License-Identifier: Apache-2.0
"""What processes that share a model need of memory while they load it.

    python benchmarks/load_processes.py                     # 2 GB, 4 processes of one CPU device

Writes a random Qwen3-MoE checkpoint in bf16, loads it over all processes (gloo on loopback), and
prints for each one, in MB: what it had before, what its devices hold afterwards, the largest tensor
among that, and the most that it had in between. Anonymous memory (RssAnon, looked at each 2 ms) is
what counts: the limit is base + held + tensor. VmHWM, the kernel's own peak, also has the pages of
the files that the process has read (RssFile), which the kernel takes back when memory is short.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

MB = 10**6
MODEL = {
    "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
    "num_experts_per_tok": 8, "moe_intermediate_size": 384, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """As many layers as come closest, in files of up to 500 MB; returns the bytes of all."""
    from safetensors.numpy import save_file

    from jax_paged.models import config_from_hf
    from jax_paged.models.decoder.parameters import expected_tensors

    def shapes_of(layers: int) -> dict:
        return expected_tensors(config_from_hf(MODEL | {"num_hidden_layers": layers}))

    sizes = [2 * sum(map(math.prod, shapes_of(layers).values())) for layers in (1, 2)]
    layers = max(1, round((gigabytes * 1e9 - 2 * sizes[0] + sizes[1]) / (sizes[1] - sizes[0])))
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
    rng, weight_map, tensors, total = np.random.default_rng(0), {}, {}, 0

    def save() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        tensors.clear()

    for name, shape in shapes_of(layers).items():
        prefix, experts, part = name.partition(".experts.")
        count = shape[0] if experts else 1
        for number in range(count):
            own = shape[1:] if experts else shape
            bits = np.frombuffer(rng.bytes(2 * math.prod(own)), np.uint16) & np.uint16(0xBFFF)
            piece = f"{prefix}.experts.{number}.{part}" if experts else name
            tensors[piece] = bits.view(ml_dtypes.bfloat16).reshape(own)  # finite, below 2
            total += bits.nbytes
        if sum(x.nbytes for x in tensors.values()) > 350 * MB:
            save()
    save()
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{field}: expected a field of /proc/self/status")


class PeakAnon:
    """The most anonymous memory while the block runs."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.base, self.most, self._stop = memory("RssAnon"), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, memory("RssAnon"))

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, memory("RssAnon"))


def load(folder: Path, address: str, processes: int, rank: int) -> dict:
    """In a process of its own: what it needed."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, rank)
    from jax_paged.models import make_mesh
    from jax_paged.models.checkpoint.weights import open_checkpoint
    from jax_paged.models.decoder.protocol import split_model

    checkpoint = open_checkpoint(folder, "bfloat16", mesh=make_mesh)
    checkpoint.shapes()  # what is imported and kept for a model of any size
    begin = time.perf_counter()
    with PeakAnon() as peak:
        model = checkpoint.load()
        leaves = jax.block_until_ready(jax.tree.leaves(split_model(model)[1]))
    own = [sum(shard.data.nbytes for shard in x.addressable_shards) for x in leaves]
    return {
        "process": rank, "base": peak.base, "held": sum(own), "tensor": max(own), "most": peak.most,
        "VmHWM": memory("VmHWM"), "RssFile": memory("RssFile"),
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def measure(folder: Path, processes: int) -> list[dict]:
    """`load` in so many processes at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=1"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--address", address,
             "--folder", str(folder), "--processes", str(processes)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=200)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return [json.loads(text) for text in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        found = load(options.folder, options.address, options.processes, options.rank)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        total = write_checkpoint(Path(folder), options.gigabytes)
        rows = measure(Path(folder), options.processes)
    if options.json:
        print(json.dumps({"bytes": total, "processes": rows}))
        return
    print(f"{total / 1e9:.2f} GB in {options.processes} processes; MB but for seconds")
    sizes = ("base", "held", "tensor", "most", "VmHWM", "RssFile")
    print(f"| process | {' | '.join(sizes)} | most - base - held | seconds |")
    for row in rows:
        cells = [row[name] for name in sizes] + [row["most"] - row["base"] - row["held"]]
        cells = [f"{size / MB:.0f}" for size in cells]
        print(f"| {row['process']} | {' | '.join(cells)} | {row['seconds']:.1f} |")


if __name__ == "__main__":
    main()
