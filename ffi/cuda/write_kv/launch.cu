// SPDX-License-Identifier: Apache-2.0

// write_kv: scatters each token's K and V into the page slot that slot_mapping names.
//
// Grid: (num_tokens, 2): one CTA copies one token of one pool, all its KV heads; 128 threads walk
// the token's heads x row in words: 16 bytes where rows are whole (2 or 1 for odd sizes), one atom
// where the pages cut them (vllm5d: 16 bytes of K, one element of V). So reads are coalesced, and
// each head's slot is written in whole lines; but each element of a vllm5d V in a sector of its
// own, which is the layout's price. No shared memory. Bound by memory: reads and writes each byte
// once. Two tokens for one slot: the later token wins whole. A CTA therefore leaves its token alone
// when a later token has the same slot; the search costs num_tokens / 128 loads per thread, all L2
// hits.

#include "cuda/write_kv/launch.h"

namespace jax_paged::cuda {
namespace {

constexpr int kThreads = 128;

template <typename Word>
__device__ void CopyToken(const WriteKvPool& pool, int64_t num_kv_heads, int32_t token,
                          char* target) {
  constexpr int32_t kWordBytes = sizeof(Word);
  const int32_t row_words = pool.row_bytes / kWordBytes;
  const int64_t words = num_kv_heads * row_words;
  const int64_t word_stride =
      pool.slots.strides.atom_bytes == pool.row_bytes ? kWordBytes : pool.slots.strides.atom;
  const Word* source = reinterpret_cast<const Word*>(pool.tokens) + token * words;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    const int64_t head = i / row_words;
    const int64_t word = i - head * row_words;
    *reinterpret_cast<Word*>(target + head * pool.slots.strides.head + word * word_stride) =
        source[i];
  }
}

// KWord, VWord: what is copied at once; an atom where rows are cut into them.
template <typename KWord, typename VWord>
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

  char* target = pool.pages + pool.slots.Offset(layer, slot, /*head=*/0);
  if (blockIdx.y == 0) {
    CopyToken<KWord>(pool, p.num_kv_heads, token, target);
  } else {
    CopyToken<VWord>(pool, p.num_kv_heads, token, target);
  }
}

}  // namespace

cudaError_t LaunchWriteKv(cudaStream_t stream, const WriteKvParams& params) {
  if (params.num_tokens == 0 || params.pools[0].slots.num_slots == 0) return cudaSuccess;
  const dim3 grid(params.num_tokens, 2);
  const WriteKvPool& k = params.pools[0];
  const WriteKvPool& v = params.pools[1];
  auto kernel = WriteKvKernel<uint16_t, uint16_t>;
  if (params.layout == Layout::kVllm5d) {
    kernel = v.slots.strides.atom_bytes == 4 ? WriteKvKernel<uint4, uint32_t>
                                             : WriteKvKernel<uint4, uint16_t>;
  } else if (k.row_bytes % 16 == 0 && v.row_bytes % 16 == 0) {
    kernel = WriteKvKernel<uint4, uint4>;
  } else if (k.row_bytes % 2 || v.row_bytes % 2) {
    kernel = WriteKvKernel<uint8_t, uint8_t>;
  }
  kernel<<<grid, kThreads, /*smem=*/0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace jax_paged::cuda
