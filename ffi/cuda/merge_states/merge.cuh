// SPDX-License-Identifier: Apache-2.0

// merge_attention_states: two attention results of one query become one.
//
// Grid: CTAs of 256 threads over the 16-byte chunks of out; a thread merges one chunk, 8 or 4
// columns of one head, and the thread of a head's first chunk writes its lse. Each thread works out
// the two weights itself: the threads of a head read the same two numbers, which costs less than to
// hand them around. No shared memory. Bound by memory: reads both parts and writes their sum once.

#ifndef JAX_PAGED_CUDA_MERGE_STATES_MERGE_CUH_
#define JAX_PAGED_CUDA_MERGE_STATES_MERGE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kMergeThreads = 256;

struct MergeArgs {
  Global<const char> out_a;  // [num_heads, row], as out_b and out
  Global<const float> lse_a;
  Global<const char> out_b;
  Global<const float> lse_b;
  Global<char> out;
  Global<float> lse;  // [num_heads]: tokens x query heads
  int64_t num_heads;
  int32_t row_chunks;  // of 16 bytes in a row of out
};

// a * share_a + b * share_b of the elements in a word: one float or two 16-bit numbers.
template <typename T>
JAX_PAGED_DEVICE uint32_t MergeWord(uint32_t a, uint32_t b, float share_a, float share_b) {
  const auto merge = [&](auto x, auto y) {
    return prim::Fma(prim::ToFloat(x), share_a, prim::ToFloat(y) * share_b);
  };
  if constexpr (std::is_same_v<T, float>) {
    return prim::BitCast<uint32_t>(merge(prim::BitCast<float>(a), prim::BitCast<float>(b)));
  } else {
    const auto low = [](uint32_t word) { return T{static_cast<uint16_t>(word & 0xffffu)}; };
    const auto high = [](uint32_t word) { return T{static_cast<uint16_t>(word >> 16)}; };
    return prim::PackPair<T>(merge(low(a), low(b)), merge(high(a), high(b)));
  }
}

template <typename T>
JAX_PAGED_DEVICE void MergeThread(const MergeArgs& args) {
  constexpr float kLog2E = 1.44269504f;
  const int64_t chunk = int64_t{prim::BlockIndex()} * kMergeThreads + prim::ThreadIndex();
  const int64_t head = chunk / args.row_chunks;
  if (head >= args.num_heads) return;
  const bool writes_lse = chunk == head * args.row_chunks;
  const float lse_a = prim::LoadConst(args.lse_a + head);
  const float lse_b = prim::LoadConst(args.lse_b + head);
  const bool empty_a = lse_a == kNegativeInfinity, empty_b = lse_b == kNegativeInfinity;
  const Global<const Word4> a = args.out_a.As<const Word4>() + chunk;
  const Global<const Word4> b = args.out_b.As<const Word4>() + chunk;
  const Global<Word4> out = args.out.As<Word4>() + chunk;
  if (empty_a || empty_b) {  // the other part as it is
    Word4 x = {0, 0, 0, 0};
    if (!(empty_a && empty_b)) x = prim::LoadConst(empty_a ? b : a);
    prim::Store(out, x);
    if (writes_lse) prim::Store(args.lse + head, empty_a ? lse_b : lse_a);
    return;
  }
  const float top = prim::Max(lse_a, lse_b);
  const float weight_a = prim::Exp2((lse_a - top) * kLog2E);
  const float weight_b = prim::Exp2((lse_b - top) * kLog2E);
  const float total = weight_a + weight_b;
  const float share_a = weight_a / total, share_b = weight_b / total;
  const Word4 x = prim::LoadConst(a), y = prim::LoadConst(b);
  prim::Store(
      out,
      Word4{MergeWord<T>(x.x, y.x, share_a, share_b), MergeWord<T>(x.y, y.y, share_a, share_b),
            MergeWord<T>(x.z, y.z, share_a, share_b), MergeWord<T>(x.w, y.w, share_a, share_b)});
  if (writes_lse) prim::Store(args.lse + head, top + prim::Log(total));
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MERGE_STATES_MERGE_CUH_
