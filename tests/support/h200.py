# SPDX-License-Identifier: Apache-2.0
"""H200 that are not there, for XLA:GPU to compile for, and what it made. Not a test."""

import importlib.util
import os
import re

import jax
import pytest
from jax.experimental import topologies

import jax_paged

# What XLA:GPU asks of a device when it compiles; figures of the H200 SXM from its data sheet and
# from the CUDA programming guide's table for compute capability 9.0.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
"""


def why_not() -> str | None:
    """Why these programs cannot be compiled here, or None."""
    status = jax_paged.build_info()["cuda"]["status"]
    if status != "ok":
        return f"CUDA kernels are {status}: install with JAX_PAGED_CUDA=on or wheels"
    if not all(importlib.util.find_spec(name) for name in ("jax_plugins", "jax_cuda13_plugin")):
        return "the XLA:GPU compiler is not installed: pip install 'jax_paged[gpu-aot]'"
    return None


def h200_devices(count: int) -> list[jax.Device]:
    """So many of one node; without a compiler for them the test is skipped, or fails."""
    reason = why_not()
    if reason and os.environ.get("JAX_PAGED_REQUIRE_GPU_AOT") == "1":
        pytest.fail(f"JAX_PAGED_REQUIRE_GPU_AOT=1, but {reason}")
    if reason:
        pytest.skip(reason)
    topology = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology=f"1x1x{count}"
    )
    return list(topology.devices)


def custom_calls(compiled) -> list[str]:
    return re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())


def host_traffic(hlo: str) -> list[str]:
    """The HLO lines that speak with the host: callbacks, transfers, arrays in host memory."""
    pattern = r"callback|\b(infeed|outfeed|send|recv|send-done|recv-done)\(|\bS\(5\)"
    return [line.strip() for line in hlo.splitlines() if re.search(pattern, line)]
