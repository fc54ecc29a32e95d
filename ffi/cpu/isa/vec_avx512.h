// SPDX-License-Identifier: Apache-2.0

// Vectors of 16 floats for AVX-512 (F, BW, DQ, VL). Included by inst/avx512.cc only, see
// isa.h.
//
// The same names as in vec_generic.h, where each is explained.

#ifndef JAX_PAGED_CPU_ISA_VEC_AVX512_H_
#define JAX_PAGED_CPU_ISA_VEC_AVX512_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int kWidth = 16;
constexpr int kGemmRows = 8;
using Vec = __m512;
JAX_PAGED_X86_ARITHMETIC(_mm512)
JAX_PAGED_INLINE Vec Ratio(Vec a, Vec b) {
  const Vec r = _mm512_rcp14_ps(b);
  return _mm512_mul_ps(a, _mm512_fmadd_ps(_mm512_fnmadd_ps(b, r, Set1(1.0f)), r, r));
}

JAX_PAGED_INLINE Vec Load(const float* p) { return _mm512_loadu_ps(p); }
JAX_PAGED_INLINE Vec LoadHalf(const float* p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
JAX_PAGED_INLINE Vec LoadHalves(const float* low, const float* high) {
  return _mm512_insertf32x8(LoadHalf(low), _mm256_loadu_ps(high), 1);
}
JAX_PAGED_INLINE void Store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
JAX_PAGED_INLINE void StoreHalf(float* p, Vec x) { _mm256_storeu_ps(p, _mm512_castps512_ps256(x)); }

JAX_PAGED_INLINE Vec Load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
JAX_PAGED_INLINE Vec LoadHalf(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  return _mm512_castsi512_ps(_mm512_zextsi256_si512(wide));
}
// As 32-bit words.
JAX_PAGED_INLINE __m512i RoundToBFloat16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
}
JAX_PAGED_INLINE void Store(BFloat16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(RoundToBFloat16(x)));
}
JAX_PAGED_INLINE void StoreHalf(BFloat16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm512_cvtepi32_epi16(RoundToBFloat16(x))));
}

JAX_PAGED_INLINE Vec Load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
JAX_PAGED_INLINE Vec LoadHalf(const Float16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_zextps256_ps512(_mm256_cvtph_ps(bits));
}
JAX_PAGED_INLINE void Store(Float16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
JAX_PAGED_INLINE void StoreHalf(Float16* p, Vec x) {
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm256_cvtps_ph(_mm512_castps512_ps256(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The halves that 8-bit codes stand for; those of E4M3 are 2^8 too small.
JAX_PAGED_INLINE __m256i HalvesOf(__m256i codes, const Float8E5M2*) {
  return _mm256_slli_epi16(codes, 8);
}
JAX_PAGED_INLINE __m256i HalvesOf(__m256i codes, const Float8E4M3*) {
  const __m256i ones = _mm256_set1_epi16(0x7f);
  const __m256i magnitude = _mm256_and_si256(codes, ones);
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(codes, magnitude), 8);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, ones);
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_srli_epi16(nan, 1));
  return _mm256_or_si256(sign, half);
}
JAX_PAGED_INLINE Vec OfBytes(__m128i bytes, const Float8E5M2* p) {
  return _mm512_cvtph_ps(HalvesOf(_mm256_cvtepu8_epi16(bytes), p));
}
JAX_PAGED_INLINE Vec OfBytes(__m128i bytes, const Float8E4M3* p) {
  return Mul(_mm512_cvtph_ps(HalvesOf(_mm256_cvtepu8_epi16(bytes), p)), Set1(256.0f));
}
JAX_PAGED_INLINE Vec OfBytes(__m128i bytes, const Int8*) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
template <typename T>
JAX_PAGED_INLINE Vec LoadBytes(const T* p) {
  return OfBytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p);
}
template <typename T>
JAX_PAGED_INLINE Vec LoadHalfBytes(const T* p) {
  return OfBytes(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), p);
}
JAX_PAGED_INLINE Vec Load(const Int8* p) { return LoadBytes(p); }
JAX_PAGED_INLINE Vec LoadHalf(const Int8* p) { return LoadHalfBytes(p); }
JAX_PAGED_INLINE Vec Load(const Float8E4M3* p) { return LoadBytes(p); }
JAX_PAGED_INLINE Vec LoadHalf(const Float8E4M3* p) { return LoadHalfBytes(p); }

template <typename T>
JAX_PAGED_INLINE Pair LoadPair(const T* p) {
  return {Load(p), Load(p + kWidth)};
}
template <typename T>
JAX_PAGED_INLINE void StorePair(T* p, Pair x) {
  Store(p, x.a);
  Store(p + kWidth, x.b);
}
// Even elements in a, odd ones in b: one instruction each.
JAX_PAGED_INLINE Pair LoadPair(const BFloat16* p) {
  const __m512i bits = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)))};
}
JAX_PAGED_INLINE void StorePair(BFloat16* p, Pair x) {
  const __m512i odd = _mm512_slli_epi32(RoundToBFloat16(x.b), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(RoundToBFloat16(x.a), odd));
}

JAX_PAGED_INLINE void Pin(Vec& x) { asm("" : "+v"(x)); }

JAX_PAGED_INLINE Vec KeepFirst(Vec x, int n, float fill) {
  const __mmask16 keep = n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1u);
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), keep, x);
}

JAX_PAGED_INLINE Vec Exp2(Vec x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = _mm512_sub_ps(x, whole);
  Vec p = _mm512_set1_ps(kExp2[6]);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[5]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[4]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[3]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[2]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[1]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[0]));
  return _mm512_maskz_scalef_ps(normal, p, whole);
}

JAX_PAGED_INLINE float HorizontalMax(Vec x) { return _mm512_reduce_max_ps(x); }
JAX_PAGED_INLINE float HorizontalSum(Vec x) { return _mm512_reduce_add_ps(x); }

JAX_PAGED_INLINE Vec AddQuarters(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
JAX_PAGED_INLINE Vec SumEach(const Vec* x) {
  Vec quads[4];
  JAX_PAGED_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vec* y = x + 4 * i;
    const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(y[0], y[1]), _mm512_unpackhi_ps(y[0], y[1]));
    const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(y[2], y[3]), _mm512_unpackhi_ps(y[2], y[3]));
    const __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  return AddQuarters(AddQuarters(quads[0], quads[1]), AddQuarters(quads[2], quads[3]));
}

// The order in which the tree of SumEach has the lanes.
constexpr int SumOrder(int i) { return (i & ~3) | (i & 1) << 1 | (i >> 1 & 1); }

JAX_PAGED_INLINE void Transpose(Vec* x) {
  Vec a[16], b[16];
  JAX_PAGED_UNROLL
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 within each quarter
    const __m512d p = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
    const __m512d q = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
    const __m512d r = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
    const __m512d s = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
    a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, r));
    a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, r));
    a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(q, s));
    a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(q, s));
  }
  JAX_PAGED_UNROLL
  for (int i = 0; i < 4; ++i) {  // then the quarters
    b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
  }
  JAX_PAGED_UNROLL
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

constexpr bool kWidensSlowly = false;

constexpr bool kCentersInt4 = true;
constexpr float Int4Factor(int) { return 1.0f; }
JAX_PAGED_INLINE Vec LoadInt4(const uint32_t* words, int shift, bool centered) {
  const Vec values = centered
                         ? _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)
                         : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // What is above a code is not looked at.
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), shift), values);
}

template <typename T>
constexpr bool kUsesDot = false;
template <typename T>
JAX_PAGED_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) {
  return Fma(a, b, c);
}
#ifdef JAX_PAGED_DOT_BFLOAT16
template <>
inline constexpr bool kUsesDot<BFloat16> = true;
template <>
JAX_PAGED_INLINE Vec MultiplyAdd<BFloat16>(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
JAX_PAGED_INLINE Vec LoadWords(const BFloat16* p, int64_t n) {
  const __mmask32 keep = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(keep, p));
}
// The same of the halves of 16 words, as bf16 words.
JAX_PAGED_INLINE Vec LoadInt4Pairs(const uint32_t* words, int shift, bool centered,
                                   const BFloat16*) {
  // The same 16 words twice: of what is above a code one bit is looked at.
  const __m512i values = _mm512_broadcast_i64x4(
      centered
          ? _mm256_setr_epi16(-0x3f00, -0x3f20, -0x3f40, -0x3f60, -0x3f80, -0x3fc0, -0x4000,
                              -0x4080, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0)
          : _mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                              0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  const __m512i codes = _mm512_srli_epi16(_mm512_loadu_si512(words), shift);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(codes, values));
}
#endif

// Into L2: few lines at a time can be on their way into L1 (docs/performance.md, Prefetch).
JAX_PAGED_INLINE void Prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ISA_VEC_AVX512_H_
