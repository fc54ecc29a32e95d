// SPDX-License-Identifier: Apache-2.0

// Which instance of the kernel serves a call: one list for the launch on a GPU and the emulator.

#ifndef JAX_PAGED_CUDA_WRITE_KV_SELECT_H_
#define JAX_PAGED_CUDA_WRITE_KV_SELECT_H_

#include <cstdint>

#include "cuda/prim.h"
#include "cuda/write_kv/args.h"

namespace jax_paged::cuda {

// Calls run.template operator()<KWord, VWord>() for the words that are copied at once.
template <typename Run>
auto SelectWriteKv(const WriteKvArgs& args, Run run) {
  const WriteKvPool &k = args.pools[0], &v = args.pools[1];
  if (args.layout == Layout::kVllm5d) {
    if (v.slots.strides.atom_bytes == 4) return run.template operator()<Word4, uint32_t>();
    if (v.slots.strides.atom_bytes == 2) return run.template operator()<Word4, uint16_t>();
    return run.template operator()<Word4, uint8_t>();
  }
  if (k.row_bytes % 16 == 0 && v.row_bytes % 16 == 0) {
    return run.template operator()<Word4, Word4>();
  }
  if (k.row_bytes % 2 == 0 && v.row_bytes % 2 == 0) {
    return run.template operator()<uint16_t, uint16_t>();
  }
  return run.template operator()<uint8_t, uint8_t>();
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WRITE_KV_SELECT_H_
