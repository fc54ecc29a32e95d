// SPDX-License-Identifier: Apache-2.0

// The last kernel of moe_experts: out[t] = sum over j of weights[t, j] * y[t, j], in the order of j
// and in f32. Pairs whose id is no expert have no y and add nothing.
//
// Grid: CTAs of 256 threads; a thread owns 4 neighbouring columns of one token. Bound by memory: y
// is read once.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_COMBINE_CUH_
#define JAX_PAGED_CUDA_MOE_EXPERTS_COMBINE_CUH_

#include <cstdint>
#include <type_traits>

#include "common/integers.h"
#include "cuda/moe_experts/args.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kMoeCombineThreads = 256;
inline constexpr int32_t kMoeCombineColumns = 4;

inline int64_t MoeCombineCtas(const MoeArgs& args) {
  const int64_t threads = int64_t{args.num_tokens} * (args.hidden / kMoeCombineColumns);
  return CeilDiv(threads, kMoeCombineThreads);
}

template <typename T>  // of out
JAX_PAGED_DEVICE void MoeCombineThread(const MoeArgs& args) {
  const int32_t quads = args.hidden / kMoeCombineColumns;
  const int64_t thread = int64_t{prim::BlockIndex()} * kMoeCombineThreads + prim::ThreadIndex();
  const int32_t token = static_cast<int32_t>(thread / quads);
  if (token >= args.num_tokens) return;
  const int32_t column = static_cast<int32_t>(thread - int64_t{token} * quads) * kMoeCombineColumns;
  Float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int32_t j = 0; j < args.experts_per_token; ++j) {
    const int32_t pair = token * args.experts_per_token + j;
    const int32_t expert = prim::LoadConst(args.experts + pair);
    if (expert < 0 || expert >= args.num_experts) continue;
    const float weight = prim::LoadConst(args.weights + pair);
    const Global<const float> from = args.y + (int64_t{pair} * args.hidden + column);
    const Float4 y = prim::LoadConst(from.template As<const Float4>());
    sum = {prim::Fma(weight, y.x, sum.x), prim::Fma(weight, y.y, sum.y),
           prim::Fma(weight, y.z, sum.z), prim::Fma(weight, y.w, sum.w)};
  }
  const int64_t element = int64_t{token} * args.hidden + column;
  const Global<char> to = args.out + element * int64_t{sizeof(T)};
  if constexpr (std::is_same_v<T, float>) {
    prim::Store(to.template As<Float4>(), sum);
  } else {
    prim::Store(to.template As<Word2>(),
                Word2{prim::PackPair<T>(sum.x, sum.y), prim::PackPair<T>(sum.z, sum.w)});
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_COMBINE_CUH_
