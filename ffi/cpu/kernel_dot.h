// The tile of dot products that logits of decode and dense projections are made of. Included by
// attention_<isa>.cc and linear_<isa>.cc inside their target regions (isa.h), after
// kernel_common.h.
//
// kWidth accumulators = ROWS rows (queries) x (kWidth / ROWS) keys run over head_dim; one
// transposing sum makes them one vector. With AVX-512 and 8 rows: 16 sums, 2 to 4 registers of
// keys, 1 of a row.

#ifndef JAX_PAGED_CPU_KERNEL_DOT_H_
#define JAX_PAGED_CPU_KERNEL_DOT_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// Adds N vectors of dimensions, of ROWS queries x (kWidth / ROWS) keys, to the sums. What is used
// most often stays in registers: keys or queries.
template <typename T, int ROWS, int N, typename Keys>
JAX_PAGED_INLINE void ScoreStep(const float* q, int64_t q_stride, const Keys& keys, Vec* sum) {
  constexpr int kTokens = kWidth / ROWS;
  if constexpr (kTokens <= 2) {
    Vec key[kTokens * N];
    JAX_PAGED_UNROLL
    for (int t = 0; t < kTokens; ++t) keys.Get(t, key + t * N);
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      JAX_PAGED_UNROLL
      for (int j = 0; j < N; ++j) {
        Vec query = Load(q + r * q_stride + j * kWidth);
        if (kTokens > 1) Pin(query);
        JAX_PAGED_UNROLL
        for (int t = 0; t < kTokens; ++t) {
          Vec& s = sum[t * ROWS + r];
          s = MultiplyAdd<T>(query, key[t * N + j], s);
        }
      }
    }
  } else {
    Vec query[ROWS * N];
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      JAX_PAGED_UNROLL
      for (int j = 0; j < N; ++j) {
        query[r * N + j] = Load(q + r * q_stride + j * kWidth);
        Pin(query[r * N + j]);
      }
    }
    JAX_PAGED_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      Vec key[N];
      keys.Get(t, key);
      JAX_PAGED_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        Vec& s = sum[t * ROWS + r];
        JAX_PAGED_UNROLL
        for (int j = 0; j < N; ++j) s = MultiplyAdd<T>(query[r * N + j], key[j], s);
      }
    }
  }
}

// Sources of keys for ScoreStep: dimensions from d on of token t.
template <typename T>
struct KeyPairs {
  const T* const* k;
  int64_t d;
  JAX_PAGED_INLINE void Get(int t, Vec* key) const {
    const Pair x = LoadPair(k[t] + d);
    key[0] = x.a;
    key[1] = x.b;
  }
};
template <typename T, bool HALF>
struct KeyVectors {
  const T* const* k;
  int64_t d;
  JAX_PAGED_INLINE void Get(int t, Vec* key) const { key[0] = LoadPart<HALF>(k[t] + d); }
};
template <typename T>
struct KeyWords {
  const T* const* k;
  int64_t d;
  int64_t n;  // dimensions left
  JAX_PAGED_INLINE void Get(int t, Vec* key) const { key[0] = LoadWords(k[t] + d, n); }
};

// Prefetches what lies `ahead` bytes behind a step of ScoreTile. Always inline: gcc takes a
// function that only prefetches for one that does nothing.
template <typename T, int TOKENS>
JAX_PAGED_INLINE void PrefetchStep(const T* const* k, int64_t d, int64_t ahead) {
  JAX_PAGED_UNROLL
  for (int t = 0; t < TOKENS; ++t) {
    const char* const from = reinterpret_cast<const char*>(k[t] + d) + ahead;
    JAX_PAGED_UNROLL
    for (int64_t i = 0; i < 2 * kWidth * int64_t{sizeof(T)}; i += 64) Prefetch(from + i);
  }
}

// ROWS x (kWidth / ROWS) logits, lane = token * ROWS + row. If it PREFETCHES, then what lies
// `ahead` bytes behind the keys.
template <typename T, int ROWS, bool PREFETCHES = false>
JAX_PAGED_INLINE Vec ScoreTile(const float* q, int64_t q_stride, const T* const* k,
                               int64_t head_dim, int64_t ahead = 0) {
  Vec sum[kWidth];
  JAX_PAGED_UNROLL
  for (int i = 0; i < kWidth; ++i) sum[i] = Zero();
  int64_t d = 0;
  if constexpr (kUsesDot<T>) {
    for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
      if constexpr (PREFETCHES) PrefetchStep<T, kWidth / ROWS>(k, d, ahead);
      ScoreStep<T, ROWS, 1>(q + d / 2, q_stride, KeyWords<T>{k, d, 2 * kWidth}, sum);
    }
    if (d < head_dim) {
      ScoreStep<T, ROWS, 1>(q + d / 2, q_stride, KeyWords<T>{k, d, head_dim - d}, sum);
    }
  } else {
    for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
      if constexpr (PREFETCHES) PrefetchStep<T, kWidth / ROWS>(k, d, ahead);
      ScoreStep<T, ROWS, 2>(q + d, q_stride, KeyPairs<T>{k, d}, sum);
    }
    if (d + kWidth <= head_dim) {
      ScoreStep<T, ROWS, 1>(q + d, q_stride, KeyVectors<T, /*HALF=*/false>{k, d}, sum);
      d += kWidth;
    }
    if (d < head_dim) {
      ScoreStep<T, ROWS, 1>(q + d, q_stride, KeyVectors<T, /*HALF=*/true>{k, d}, sum);
    }
  }
  return SumEach(sum);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_KERNEL_DOT_H_
