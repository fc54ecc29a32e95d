// SPDX-License-Identifier: Apache-2.0

// Normalising, turning and writing the heads of projected tokens. Included by inst/<isa>.cc
// inside its target region (isa.h), after common.h.
//
// A head is loaded to f32, all that is done to it happens there, and it is rounded once.

#ifndef JAX_PAGED_CPU_WRITE_KERNEL_QKV_H_
#define JAX_PAGED_CPU_WRITE_KERNEL_QKV_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// Lanes past head_dim are zero.
struct HeadBuffer {
  float x[kMaxQkvHeadDim];
};

// x / sqrt(mean(x^2) + eps) * weight.
JAX_PAGED_INLINE void NormaliseHead(HeadBuffer& head, const float* weight, int64_t dim, float eps) {
  Vec squares = Zero();
  for (int64_t d = 0; d < dim; d += kWidth) {
    const Vec x = Load(head.x + d);
    squares = Fma(x, x, squares);
  }
  const float mean = HorizontalSum(squares) / static_cast<float>(dim);
  const Vec factor = Set1(1.0f / ::sqrtf(mean + eps));
  for (int64_t d = 0; d < dim; d += kWidth) {
    Store(head.x + d, Mul(Mul(Load(head.x + d), factor), LoadTail(weight + d, dim - d)));
  }
}

// One head of q or k; `weight` null: not normalised.
template <typename T>
JAX_PAGED_INLINE void NormTurnHead(const QkvParams& params, const T* from, T* to,
                                   const float* weight, int64_t position) {
  const int64_t dim = params.k_pool.head_dim;
  HeadBuffer head;
  for (int64_t d = 0; d < dim; d += kWidth) Store(head.x + d, LoadTail(from + d, dim - d));
  if (weight) NormaliseHead(head, weight, dim, params.eps);
  const int64_t row = position * params.half;
  TurnHead(head.x, params.cos + row, params.sin + row, params.half, params.interleaved);
  for (int64_t d = 0; d < dim; d += kWidth) StoreTail(to + d, Load(head.x + d), dim - d);
}

template <typename T>
void QkvQueries(const QkvWork& work, int64_t token_begin, int64_t token_end) {
  const QkvParams& params = *work.params;
  const int64_t dim = params.k_pool.head_dim, width = params.width();
  for (int64_t t = token_begin; t < token_end; ++t) {
    const T* from = static_cast<const T*>(params.qkv) + t * width;
    T* to = static_cast<T*>(params.q) + t * params.num_q_heads * dim;
    const int64_t position = params.positions[t];
    if (position < 0 || position >= params.max_positions) {
      __builtin_memset(to, 0, static_cast<size_t>(params.num_q_heads * dim) * sizeof(T));
      continue;
    }
    for (int64_t head = 0; head < params.num_q_heads; ++head) {
      NormTurnHead(params, from + head * dim, to + head * dim, work.q_norm, position);
    }
  }
}

template <typename T>
void QkvPages(const QkvWork& work, int64_t head_begin, int64_t head_end) {
  const QkvParams& params = *work.params;
  const int64_t dim = params.k_pool.head_dim, v_dim = params.v_pool.head_dim;
  const int64_t width = params.width();
  const int64_t first_k = params.num_q_heads * dim;
  const int64_t first_v = first_k + params.k_pool.num_kv_heads * dim;
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    const int32_t slot = params.slot_mapping[t];
    const int64_t position = params.positions[t];
    if (!work.k.IsSlot(slot) || position < 0 || position >= params.max_positions) continue;
    const T* from = static_cast<const T*>(params.qkv) + t * width;
    for (int64_t head = head_begin; head < head_end; ++head) {
      NormTurnHead(params, from + first_k + head * dim,
                   reinterpret_cast<T*>(work.k.Slot(slot, head)), work.k_norm, position);
    }
    for (int64_t head = head_begin; head < head_end; ++head) {
      __builtin_memcpy(work.v.Slot(slot, head), from + first_v + head * v_dim,
                       static_cast<size_t>(v_dim) * sizeof(T));
    }
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_WRITE_KERNEL_QKV_H_
