// SPDX-License-Identifier: Apache-2.0

// The tile of dot products that logits of decode and dense projections are made of. Included by
// inst/<isa>.cc of both folders inside their target regions (isa.h), after
// common.h.
//
// kWidth accumulators = ROWS rows (queries) x (kWidth / ROWS) keys run over head_dim; one
// transposing sum makes them one vector. With AVX-512 and 8 rows: 16 sums, 2 to 4 registers of
// keys, 1 of a row.

#ifndef JAX_PAGED_CPU_ATTENTION_DOT_H_
#define JAX_PAGED_CPU_ATTENTION_DOT_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// Adds N vectors of dimensions, of ROWS queries x TOKENS keys, to the sums. What is used most often
// stays in registers: keys or queries.
template <typename T, int ROWS, int TOKENS, int N, typename Keys>
JAX_PAGED_INLINE void ScoreStep(const float* q, int64_t q_stride, const Keys& keys, Vec* sum) {
  if constexpr (TOKENS <= 2) {
    Vec key[TOKENS * N];
    JAX_PAGED_UNROLL
    for (int t = 0; t < TOKENS; ++t) keys.LoadKey(t, key + t * N);
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      JAX_PAGED_UNROLL
      for (int j = 0; j < N; ++j) {
        Vec query = Load(q + r * q_stride + j * kWidth);
        if (TOKENS > 1) Pin(query);
        JAX_PAGED_UNROLL
        for (int t = 0; t < TOKENS; ++t) {
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
    for (int t = 0; t < TOKENS; ++t) {
      Vec key[N];
      keys.LoadKey(t, key);
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
  JAX_PAGED_INLINE void LoadKey(int t, Vec* key) const {
    const Pair x = LoadPair(k[t] + d);
    key[0] = x.a;
    key[1] = x.b;
  }
};
template <typename T, bool HALF>
struct KeyVectors {
  const T* const* k;
  int64_t d;
  JAX_PAGED_INLINE void LoadKey(int t, Vec* key) const { key[0] = LoadPart<HALF>(k[t] + d); }
};
template <typename T>
struct KeyWords {
  const T* const* k;
  int64_t d;
  int64_t n;  // dimensions left
  JAX_PAGED_INLINE void LoadKey(int t, Vec* key) const { key[0] = LoadWords(k[t] + d, n); }
};

// What is fetched while keys are multiplied: nothing; of each key what lies `ahead` bytes behind;
// or of keys that lie one behind the other a single stream, which is so far ahead of what was read.
enum class Fetches { kNothing, kOfEach, kOneStream };

// Where token t of a step at dimension d, which takes so many bytes of each key, fetches from.
template <typename T, int TOKENS, Fetches FETCHES>
JAX_PAGED_INLINE const char* FetchedBy(const T* const* k, int t, int64_t d, int64_t step_bytes) {
  if (FETCHES == Fetches::kOfEach) return reinterpret_cast<const char*>(k[t] + d);
  return reinterpret_cast<const char*>(k[0] + TOKENS * d) + t * step_bytes;
}

// sum[token * ROWS + row] += ROWS x TOKENS products, one vector each. (Prefetches are not in a
// function of their own: gcc takes one that only prefetches for one that does nothing.)
template <typename T, int ROWS, int TOKENS, Fetches FETCHES>
JAX_PAGED_INLINE void AddScores(const float* q, int64_t q_stride, const T* const* k,
                                int64_t head_dim, int64_t ahead, Vec* sum) {
  constexpr bool kFetches = FETCHES != Fetches::kNothing;
  int64_t d = 0;
  if constexpr (kUsesDot<T> && sizeof(T) == 1) {  // codes become words twice as many at a time
    for (; d + 4 * kWidth <= head_dim; d += 4 * kWidth) {
      if constexpr (kFetches) {
        JAX_PAGED_UNROLL
        for (int t = 0; t < TOKENS; ++t) {
          Prefetch(FetchedBy<T, TOKENS, FETCHES>(k, t, d, 4 * kWidth) + ahead);
        }
      }
      ScoreStep<T, ROWS, TOKENS, 2>(q + d / 2, q_stride, KeyPairs<T>{k, d}, sum);
    }
  }
  for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
    if constexpr (kFetches) {
      constexpr int64_t kBytes = 2 * kWidth * int64_t{sizeof(T)};
      JAX_PAGED_UNROLL
      for (int t = 0; t < TOKENS; ++t) {
        const char* const from = FetchedBy<T, TOKENS, FETCHES>(k, t, d, kBytes) + ahead;
        JAX_PAGED_UNROLL
        for (int64_t i = 0; i < kBytes; i += 64) Prefetch(from + i);
      }
    }
    if constexpr (kUsesDot<T>) {
      ScoreStep<T, ROWS, TOKENS, 1>(q + d / 2, q_stride, KeyWords<T>{k, d, 2 * kWidth}, sum);
    } else {
      ScoreStep<T, ROWS, TOKENS, 2>(q + d, q_stride, KeyPairs<T>{k, d}, sum);
    }
  }
  if constexpr (kUsesDot<T>) {
    if (d < head_dim) {
      ScoreStep<T, ROWS, TOKENS, 1>(q + d / 2, q_stride, KeyWords<T>{k, d, head_dim - d}, sum);
    }
  } else {
    if (d + kWidth <= head_dim) {
      ScoreStep<T, ROWS, TOKENS, 1>(q + d, q_stride, KeyVectors<T, /*HALF=*/false>{k, d}, sum);
      d += kWidth;
    }
    if (d < head_dim) {
      ScoreStep<T, ROWS, TOKENS, 1>(q + d, q_stride, KeyVectors<T, /*HALF=*/true>{k, d}, sum);
    }
  }
}

// The same of sums that begin here.
template <typename T, int ROWS, int TOKENS, Fetches FETCHES>
JAX_PAGED_INLINE void ScoreSums(const float* q, int64_t q_stride, const T* const* k,
                                int64_t head_dim, int64_t ahead, Vec* sum) {
  JAX_PAGED_UNROLL
  for (int i = 0; i < ROWS * TOKENS; ++i) sum[i] = Zero();
  AddScores<T, ROWS, TOKENS, FETCHES>(q, q_stride, k, head_dim, ahead, sum);
}

// ROWS x (kWidth / ROWS) logits, lane = token * ROWS + row.
template <typename T, int ROWS>
JAX_PAGED_INLINE Vec ScoreTile(const float* q, int64_t q_stride, const T* const* k,
                               int64_t head_dim) {
  Vec sum[kWidth];
  ScoreSums<T, ROWS, kWidth / ROWS, Fetches::kNothing>(q, q_stride, k, head_dim, /*ahead=*/0, sum);
  return SumEach(sum);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_DOT_H_
