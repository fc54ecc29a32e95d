// SPDX-License-Identifier: Apache-2.0

// What the CUDA kernel of write_kv is told about one call. Knows nothing of XLA; plain C++17, so
// that handler, kernel and emulator share it.

#ifndef JAX_PAGED_CUDA_WRITE_KV_ARGS_H_
#define JAX_PAGED_CUDA_WRITE_KV_ARGS_H_

#include <cstdint>

#include "common/page_view.h"
#include "common/write_checks.h"
#include "cuda/pointers.h"
#include "cuda/written_tokens.h"

namespace jax_paged::cuda {

inline constexpr int32_t kWriteKvThreads = 128;
inline constexpr int32_t kWriteKvSharedBytes = kWriteKvThreads / 32 * 4;  // a word for each warp

// One pool (K or V) and what is written to it.
struct WriteKvPool {
  Global<char> pages;         // first byte of the pool, laid out as strides say
  Global<const char> source;  // [num_tokens, num_kv_heads, row]
  PoolSlots slots;
  int32_t row_bytes;  // head_dim * sizeof(element)
};

struct WriteKvArgs {
  WriteKvPool pools[2];  // K, V
  WrittenTokens tokens;
  Global<const int32_t> layer;  // scalar
  int32_t num_kv_heads;
  Layout layout;
};

// A CTA copies one token of one pool.
inline int32_t NumCtas(const WriteKvArgs& args) { return 2 * args.tokens.num_tokens; }

inline WriteKvPool MakeWriteKvPool(const PoolShape& shape, void* pages, const void* source) {
  return {Global<char>(static_cast<char*>(pages)),
          Global<const char>(static_cast<const char*>(source)), MakePoolSlots(shape),
          static_cast<int32_t>(shape.token_bytes())};
}

// workspace: as CheckWrittenTokens asks for.
inline WriteKvArgs MakeWriteKvArgs(const WriteKvParams& in, int32_t* workspace) {
  WriteKvArgs args;
  args.pools[0] = MakeWriteKvPool(in.k_pool, in.k_pages, in.k);
  args.pools[1] = MakeWriteKvPool(in.v_pool, in.v_pages, in.v);
  args.tokens = MakeWrittenTokens(in.slot_mapping, /*positions=*/nullptr, in.num_tokens,
                                  /*max_positions=*/0, in.k_pool.num_slots(), workspace);
  args.layer = Global<const int32_t>(in.layer);
  args.num_kv_heads = static_cast<int32_t>(in.k_pool.num_kv_heads);
  args.layout = in.k_pool.layout;
  return args;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WRITE_KV_ARGS_H_
