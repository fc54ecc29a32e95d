// SPDX-License-Identifier: Apache-2.0

// Normalising, turning and writing the heads of projected tokens. Included by inst/<isa>.cc
// inside its target region (isa.h), after common.h.
//
// A head is loaded to f32, all that is done to it happens there, and it is rounded once: to qkv's
// dtype or, in pages of 8 bits, to codes of x / scale.

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

template <typename T>
JAX_PAGED_INLINE void LoadHead(const T* from, int64_t dim, HeadBuffer* head) {
  for (int64_t d = 0; d < dim; d += kWidth) Store(head->x + d, LoadTail(from + d, dim - d));
}

template <typename T>
JAX_PAGED_INLINE void StoreHead(const HeadBuffer& head, int64_t dim, T* to) {
  for (int64_t d = 0; d < dim; d += kWidth) StoreTail(to + d, Load(head.x + d), dim - d);
}

// One head of q or k; `weight` null: not normalised.
template <typename T>
JAX_PAGED_INLINE void NormTurnHead(const QkvParams& params, const T* from, const float* weight,
                                   int64_t position, HeadBuffer* head) {
  const int64_t dim = params.k_pool.head_dim;
  LoadHead(from, dim, head);
  if (weight) NormaliseHead(*head, weight, dim, params.eps);
  const int64_t row = position * params.half;
  TurnHead(head->x, params.cos + row, params.sin + row, params.half, params.interleaved);
}

// The largest magnitude of a head; NaN where it has one.
inline float LargestOf(const HeadBuffer& head, int64_t dim) {
  uint32_t largest = 0;  // as bits, of which those of NaN are the largest
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t magnitude = FloatBits(head.x[d]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return FloatFromBits(largest);
}

// The codes of n floats as int8, rounded to nearest even and clamped; NaN: 0.
inline void StoreInt8(const float* x, int64_t n, uint8_t* codes) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has the number in its low bits
  for (int64_t i = 0; i < n; ++i) {
    const float low = x[i] < -127.0f ? -127.0f : x[i];
    const float y = low > 127.0f ? 127.0f : low;
    const uint32_t bits = FloatBits(y + kRound);
    codes[i] = static_cast<uint8_t>(y == y ? bits : 0u);
  }
}

// Writes a head of K or V to its slot as 8-bit codes; and its scale, where that is computed. The
// head is divided in place.
inline void WriteHeadCodes(const QkvTarget& target, Dtype dtype, int32_t slot, int64_t kv_head,
                           HeadBuffer* head) {
  const int64_t dim = target.head_dim;
  float scale = target.given_scale ? target.given_scale[kv_head] : 1.0f;
  if (target.scales.base) {
    scale = LargestOf(*head, dim) * (1.0f / LargestCode(dtype));
    *reinterpret_cast<float*>(target.scales.Slot(slot, kv_head)) = scale;
  }
  if (scale != 0.0f && scale != 1.0f) {
    const Vec divisor = Set1(scale);
    for (int64_t d = 0; d < dim; d += kWidth) Store(head->x + d, Div(Load(head->x + d), divisor));
  }
  uint8_t codes[kMaxQkvHeadDim];
  if (dtype == Dtype::kInt8) {
    StoreInt8(head->x, dim, codes);
  } else {
    StoreCodes(head->x, static_cast<int>(dim), dtype == Dtype::kFloat8E4M3, codes);
  }
  WriteRow(target.pages.Slot(slot, kv_head), reinterpret_cast<const char*>(codes), dim,
           target.pages.strides);
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
    for (int64_t i = 0; i < params.num_q_heads; ++i) {
      HeadBuffer head;
      NormTurnHead(params, from + i * dim, work.q_norm, position, &head);
      StoreHead(head, dim, to + i * dim);
    }
  }
}

template <typename T>
void WriteK(const QkvWork& work, const T* from, int64_t position, int32_t slot, int64_t kv_head) {
  const QkvParams& params = *work.params;
  const PageStrides& strides = work.k.pages.strides;
  const int64_t dim = work.k.head_dim, row_bytes = dim * int64_t{sizeof(T)};
  HeadBuffer head;
  NormTurnHead(params, from, work.k_norm, position, &head);
  if (IsEightBit(params.kv_dtype)) {
    WriteHeadCodes(work.k, params.kv_dtype, slot, kv_head, &head);
    return;
  }
  char* const to = work.k.pages.Slot(slot, kv_head);
  if (strides.atom_bytes == row_bytes) {
    StoreHead(head, dim, reinterpret_cast<T*>(to));
    return;
  }
  T row[kMaxQkvHeadDim];
  StoreHead(head, dim, row);
  WriteRow(to, reinterpret_cast<const char*>(row), row_bytes, strides);
}

template <typename T>
void WriteV(const QkvWork& work, const T* from, int32_t slot, int64_t kv_head) {
  const int64_t dim = work.v.head_dim;
  if (IsEightBit(work.params->kv_dtype)) {
    HeadBuffer head;
    LoadHead(from, dim, &head);
    WriteHeadCodes(work.v, work.params->kv_dtype, slot, kv_head, &head);
    return;
  }
  WriteRow(work.v.pages.Slot(slot, kv_head), reinterpret_cast<const char*>(from),
           dim * int64_t{sizeof(T)}, work.v.pages.strides);
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
    if (!work.k.pages.IsSlot(slot) || position < 0 || position >= params.max_positions) continue;
    const T* from = static_cast<const T*>(params.qkv) + t * width;
    for (int64_t head = head_begin; head < head_end; ++head) {
      WriteK(work, from + first_k + head * dim, position, slot, head);
    }
    for (int64_t head = head_begin; head < head_end; ++head) {
      WriteV(work, from + first_v + head * v_dim, slot, head);
    }
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_WRITE_KERNEL_QKV_H_
