// write_kv: scatters each token's K and V into the page slot that slot_mapping names.
//
// Grid: (num_tokens, 2): one CTA copies one token of one pool, all its KV heads; 128 threads walk
// the token's heads x row in 16-byte (or, for odd head_dims, 2-byte) words, so reads are coalesced
// and each head's slot is written in whole lines. No shared memory. Bound by memory: reads and
// writes each byte once. Two tokens for one slot: the later token wins whole. A CTA therefore
// leaves its token alone when a later token has the same slot; the search costs num_tokens / 128
// loads per thread, all L2 hits.

#include "cuda/write_kv/launch.h"

namespace jax_paged::cuda {
namespace {

constexpr int kThreads = 128;

template <typename Word>
__global__ void __launch_bounds__(kThreads) WriteKvKernel(__grid_constant__ const WriteKvParams p) {
  const int32_t token = blockIdx.x;
  const int32_t slot = p.slot_mapping[token];
  const int32_t layer = *p.layer;
  const WriteKvPool& pool = p.pools[blockIdx.y];
  if (!pool.slots.IsSlot(layer, slot)) return;
  bool overwritten = false;
  for (int32_t later = token + 1 + threadIdx.x; later < p.num_tokens; later += kThreads) {
    overwritten |= p.slot_mapping[later] == slot;
  }
  if (__syncthreads_or(overwritten)) return;

  const int32_t row_words = pool.row_bytes / static_cast<int32_t>(sizeof(Word));
  const int64_t words = static_cast<int64_t>(p.num_kv_heads) * row_words;
  const Word* source = reinterpret_cast<const Word*>(pool.tokens) + token * words;
  char* target = pool.pages + pool.slots.Offset(layer, slot, /*head=*/0);
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    const int64_t head = i / row_words;
    reinterpret_cast<Word*>(target + head * pool.slots.strides.head)[i - head * row_words] =
        source[i];
  }
}

}  // namespace

cudaError_t LaunchWriteKv(cudaStream_t stream, const WriteKvParams& params) {
  if (params.num_tokens == 0 || params.pools[0].slots.num_slots == 0) return cudaSuccess;
  const dim3 grid(params.num_tokens, 2);
  const bool wide = params.pools[0].row_bytes % 16 == 0 && params.pools[1].row_bytes % 16 == 0;
  if (wide) {
    WriteKvKernel<uint4><<<grid, kThreads, /*smem=*/0, stream>>>(params);
  } else {
    WriteKvKernel<uint16_t><<<grid, kThreads, /*smem=*/0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace jax_paged::cuda
