// SPDX-License-Identifier: Apache-2.0

// write_kv: scatters each token's K and V into the page slot that slot_mapping names.
//
// Grid: 2 num_tokens CTAs, those of K first. A CTA copies one token of one pool, all its KV heads;
// 128 threads walk the token's heads x row in words: 16 bytes where rows are whole (2 or 1 for odd
// sizes), one atom where the pages cut them (vllm5d: 16 bytes of K, one element of V). So reads are
// coalesced, and each head's slot is written in whole lines; but each element of a vllm5d V in a
// sector of its own, which is the layout's price. Shared memory: one word per warp. Bound by
// memory: reads and writes each byte once.
//
// Of several tokens for one slot the last one wins whole: a CTA leaves its token alone when a later
// one has the slot. written_tokens.cuh says how it knows.

#ifndef JAX_PAGED_CUDA_WRITE_KV_KERNEL_CUH_
#define JAX_PAGED_CUDA_WRITE_KV_KERNEL_CUH_

#include <cstdint>

#include "cuda/prim.h"
#include "cuda/write_kv/args.h"
#include "cuda/written_tokens.cuh"

namespace jax_paged::cuda {

template <typename Word>
JAX_PAGED_DEVICE void CopyToken(const WriteKvPool& pool, int64_t num_kv_heads, int32_t token,
                                Global<char> target) {
  constexpr int32_t kWordBytes = sizeof(Word);
  const int32_t row_words = pool.row_bytes / kWordBytes;
  const int64_t words = num_kv_heads * row_words;
  const int64_t word_stride =
      pool.slots.strides.atom_bytes == pool.row_bytes ? kWordBytes : pool.slots.strides.atom;
  const Global<const Word> source = pool.source.As<const Word>() + token * words;
  for (int64_t i = prim::ThreadIndex(); i < words; i += kWriteKvThreads) {
    const int64_t head = i / row_words;
    const int64_t word = i - head * row_words;
    const Global<char> to = target + (head * pool.slots.strides.head + word * word_stride);
    prim::Store(to.As<Word>(), prim::LoadConst(source + i));
  }
}

// KWord, VWord: what is copied at once; an atom where rows are cut into them.
template <typename KWord, typename VWord>
JAX_PAGED_DEVICE void WriteKvCta(const WriteKvArgs& args) {
  const int32_t is_v = prim::BlockIndex() >= args.tokens.num_tokens ? 1 : 0;
  const int32_t token = prim::BlockIndex() - is_v * args.tokens.num_tokens;
  const int32_t slot = prim::LoadConst(args.tokens.slot_mapping + token);
  const int32_t layer = prim::LoadConst(args.layer);
  const WriteKvPool& pool = args.pools[is_v];
  if (!pool.slots.IsSlot(layer, slot)) return;
  if (IsOverwritten<kWriteKvThreads>(args.tokens, token, slot)) return;

  const Global<char> target = pool.pages + pool.slots.Offset(layer, slot, /*head=*/0);
  if (is_v) {
    CopyToken<VWord>(pool, args.num_kv_heads, token, target);
  } else {
    CopyToken<KWord>(pool, args.num_kv_heads, token, target);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WRITE_KV_KERNEL_CUH_
