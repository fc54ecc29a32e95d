// SPDX-License-Identifier: Apache-2.0

// 8-bit codes to bf16 words in registers, for AVX-512 with VBMI and BF16. Included by
// inst/avx512bf16.cc and inst/amx.cc, after vec_avx512.h.
//
// A byte permute looks 64 codes up at once in a table of 128 bytes; two of them give the two bytes
// of 64 words. Some six instructions for 64 codes, against forty through halves and floats.

#ifndef JAX_PAGED_CPU_ISA_VEC_AVX512_CODES_H_
#define JAX_PAGED_CPU_ISA_VEC_AVX512_CODES_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// 64 words as their low and high bytes, each in the place of its code.
struct WordBytes {
  __m512i low, high;
};

// Tables of fp8, where the sign is a bit of its own.
struct SignedCodes {
  __m512i low[2], high[2];

  explicit SignedCodes(const CodeTable& table) {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_loadu_si512(table.low + 64 * i);
      high[i] = _mm512_loadu_si512(table.high + 64 * i);
    }
  }
  JAX_PAGED_INLINE WordBytes Look(__m512i codes) const {
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    const __m512i sign = _mm512_set1_epi8(-128);
    return {_mm512_permutex2var_epi8(low[0], codes, low[1]),
            _mm512_ternarylogic_epi64(magnitude, codes, sign, 0xf8)};  // magnitude | (codes & sign)
  }
};

// Tables of int8. The low byte is that of the magnitude; of -128, that of 0.
struct IntCodes {
  __m512i low[2], high[4];

  explicit IntCodes(const CodeTable& table) {
    for (int i = 0; i < 4; ++i) {
      if (i < 2) low[i] = _mm512_loadu_si512(table.low + 64 * i);
      high[i] = _mm512_loadu_si512(table.high + 64 * i);
    }
  }
  JAX_PAGED_INLINE WordBytes Look(__m512i codes) const {
    const __m512i negative = _mm512_permutex2var_epi8(high[2], codes, high[3]);
    const __m512i positive = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    return {_mm512_permutex2var_epi8(low[0], _mm512_abs_epi8(codes), low[1]),
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), positive, negative)};
  }
};

// Up to 64 codes, zeros after n.
JAX_PAGED_INLINE __m512i LoadCodes(const void* p, int64_t n) {
  const __mmask64 keep = n >= 64 ? ~0ull : (n > 0 ? (1ull << n) - 1ull : 0ull);
  return _mm512_maskz_loadu_epi8(keep, p);
}

// 32 codes of each of two tokens, zeros after n.
JAX_PAGED_INLINE __m512i LoadTwo(const void* even, const void* odd, int64_t n) {
  const __mmask32 keep = n >= 32 ? ~0u : (1u << n) - 1u;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(keep, even)),
                            _mm256_maskz_loadu_epi8(keep, odd), 1);
}

template <typename Codes>
JAX_PAGED_INLINE Pair Unpack(const Codes& table, __m512i codes) {
  const WordBytes x = table.Look(codes);
  return {_mm512_castsi512_ps(_mm512_unpacklo_epi8(x.low, x.high)),
          _mm512_castsi512_ps(_mm512_unpackhi_epi8(x.low, x.high))};
}

// The words of 64 codes in order: the first and the second 32.
template <typename Codes>
JAX_PAGED_INLINE Pair WordsOf(const Codes& table, __m512i codes) {
  // Unpacking works on quarters of a register: give each the codes of both results.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return Unpack(table, _mm512_permutexvar_epi64(order, codes));
}

// The words of 32 codes of two tokens, side by side: [32][2].
template <typename Codes>
JAX_PAGED_INLINE Pair PairsOf(const Codes& table, __m512i codes) {
  alignas(64) static constexpr uint8_t kOrder[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51,  //
      4,  36, 5,  37, 6,  38, 7,  39, 20, 52, 21, 53, 22, 54, 23, 55,  //
      8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57, 26, 58, 27, 59,  //
      12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};
  return Unpack(table, _mm512_permutexvar_epi8(_mm512_load_si512(kOrder), codes));
}

// An 8-bit code that is multiplied as a bf16 word, which it is exactly.
template <typename C>
struct CodeWord {
  C code;
};
template <typename C>
inline constexpr bool kUsesDot<CodeWord<C>> = true;
template <>
JAX_PAGED_INLINE Vec MultiplyAdd<CodeWord<Int8>>(Vec a, Vec b, Vec c) {
  return MultiplyAdd<BFloat16>(a, b, c);
}
template <>
JAX_PAGED_INLINE Vec MultiplyAdd<CodeWord<Float8E4M3>>(Vec a, Vec b, Vec c) {
  return MultiplyAdd<BFloat16>(a, b, c);
}
JAX_PAGED_INLINE Pair WordsOf(__m512i codes, const CodeWord<Int8>*) {
  return WordsOf(IntCodes(kInt8Table), codes);
}
JAX_PAGED_INLINE Pair WordsOf(__m512i codes, const CodeWord<Float8E4M3>*) {
  return WordsOf(SignedCodes(kE4M3Table), codes);
}
template <typename C>
JAX_PAGED_INLINE Vec LoadWords(const CodeWord<C>* p, int64_t n) {
  return WordsOf(LoadCodes(p, n < 32 ? n : 32), p).a;
}
template <typename C>
JAX_PAGED_INLINE Pair LoadPair(const CodeWord<C>* p) {
  return WordsOf(_mm512_loadu_si512(p), p);
}

JAX_PAGED_INLINE bool AnyAbove(Vec x, Vec limit) {
  return _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ) != 0;
}
// Lane i = p[i / ROWS]. Reads 16 floats.
template <int ROWS>
JAX_PAGED_INLINE Vec PerToken(const float* p) {
  constexpr int kShift = ROWS == 8 ? 3 : (ROWS == 4 ? 2 : (ROWS == 2 ? 1 : 0));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(lane, kShift), Load(p));
}

// Weights [16 / ROWS tokens][ROWS] as words, tokens 2 i and 2 i + 1 side by side: [8 / ROWS][ROWS].
// Returns them, as floats where they were.
template <int ROWS>
JAX_PAGED_INLINE Vec StoreWeightPairs(Vec weights, float* to) {
  alignas(32) static constexpr int16_t kOrder[4][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
      {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15},
      {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15},
      {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15}};
  constexpr int kWhich = ROWS == 8 ? 3 : (ROWS == 4 ? 2 : (ROWS == 2 ? 1 : 0));
  const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kOrder[kWhich]));
  const __m256i words = (__m256i)_mm512_cvtneps_pbh(weights);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutexvar_epi16(order, words));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
// The same, and what rounding to a word leaves of them, as words `rest` floats further on.
template <int ROWS>
JAX_PAGED_INLINE void StoreWeightPairs(Vec weights, float* to, int rest) {
  const Vec rounded = StoreWeightPairs<ROWS>(weights, to);
  StoreWeightPairs<ROWS>(_mm512_sub_ps(weights, rounded), to + rest);
}

// 32 words of each of two tokens, side by side: the even ones, then the odd ones (as LoadPair).
JAX_PAGED_INLINE Pair LoadTokenPair(const BFloat16* even, const BFloat16* odd) {
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  const __mmask32 high = 0xaaaaaaaau;
  return {_mm512_castsi512_ps(_mm512_mask_blend_epi16(high, a, _mm512_slli_epi32(b, 16))),
          _mm512_castsi512_ps(_mm512_mask_blend_epi16(high, _mm512_srli_epi32(a, 16), b))};
}

// sum + weights of two tokens (a pair, for all lanes) x values of two tokens.
JAX_PAGED_INLINE Vec AddPair(Vec sum, float weights, Vec values) {
  return MultiplyAdd<BFloat16>(Set1(weights), values, sum);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ISA_VEC_AVX512_CODES_H_
