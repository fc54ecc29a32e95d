// SPDX-License-Identifier: Apache-2.0

// The part of the CUDA runtime that the handlers use, over the machine of machine.h, and what tests
// set and see of it.

#ifndef JAX_PAGED_SIM_RUNTIME_H_
#define JAX_PAGED_SIM_RUNTIME_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace jax_paged::sim {

// What the simulated device is like.
struct Device {
  int32_t ordinal = 0;
  int32_t architecture = 80;  // whose PTX runs
  int32_t multiprocessors = 3;
  int32_t shared_bytes_per_cta = 163 * 1024;
  int32_t shared_bytes_per_multiprocessor = 164 * 1024;
  uint32_t seed = 1;  // of the order of CTAs and warps; mod 3: cp.async late, early, by chance
};

// From BeginCall to EndCall launches run, in order and at once, on the stream of the call.
void BeginCall(const Device& device);
cudaStream_t CallStream();
// Runs again what the last call launched, with the buffers it had: a graph that is replayed.
void Replay(uint32_t seed);
// What went wrong; "" if nothing did.
std::string EndCall();
// Kernels of the last call, a line each: name, grid, threads, dynamic shared memory, and whether it
// may overlap the one before it.
const std::vector<std::string>& Launches();

}  // namespace jax_paged::sim

#endif  // JAX_PAGED_SIM_RUNTIME_H_
