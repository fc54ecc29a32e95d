// SPDX-License-Identifier: Apache-2.0

// Kernel text of merge_attention_states: two attention results of one query become one. Included by
// inst/<isa>.cc inside its target region (isa.h), after common.h.

#ifndef JAX_PAGED_CPU_ATTENTION_MERGE_H_
#define JAX_PAGED_CPU_ATTENTION_MERGE_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

template <typename T>
void MergeHeads(const MergeParams& params, int64_t begin, int64_t end) {
  const int64_t dim = params.head_dim;
  for (int64_t head = begin; head < end; ++head) {
    const T* a = static_cast<const T*>(params.out_a) + head * dim;
    const T* b = static_cast<const T*>(params.out_b) + head * dim;
    T* out = static_cast<T*>(params.out) + head * dim;
    const float lse_a = params.lse_a[head], lse_b = params.lse_b[head];
    const bool empty_a = lse_a == -kInfinity, empty_b = lse_b == -kInfinity;
    if (empty_a || empty_b) {  // the other part as it is
      params.lse[head] = empty_a ? lse_b : lse_a;
      const size_t bytes = static_cast<size_t>(dim) * sizeof(T);
      if (empty_a && empty_b) {
        __builtin_memset(out, 0, bytes);
      } else {
        __builtin_memcpy(out, empty_a ? b : a, bytes);
      }
      continue;
    }
    const float top = lse_b > lse_a ? lse_b : lse_a;
    const float weight_a = ::expf(lse_a - top), weight_b = ::expf(lse_b - top);
    const float total = weight_a + weight_b;
    params.lse[head] = top + ::logf(total);
    const Vec share_a = Set1(weight_a / total), share_b = Set1(weight_b / total);
    int64_t d = 0;
    for (; d + 2 * kWidth <= dim; d += 2 * kWidth) {
      const Pair x = LoadPair(a + d), y = LoadPair(b + d);
      StorePair(out + d,
                {Fma(x.a, share_a, Mul(y.a, share_b)), Fma(x.b, share_a, Mul(y.b, share_b))});
    }
    for (; d < dim; d += kWidth) {
      const Vec x = LoadTail(a + d, dim - d), y = LoadTail(b + d, dim - d);
      StoreTail(out + d, Fma(x, share_a, Mul(y, share_b)), dim - d);
    }
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_MERGE_H_
