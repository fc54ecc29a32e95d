// SPDX-License-Identifier: Apache-2.0

// Vectors of 8 floats for AVX2 with FMA and F16C. Included by inst/avx2.cc only, see isa.h.
//
// The same names as in vec_generic.h, where each is explained.

#ifndef JAX_PAGED_CPU_ISA_VEC_AVX2_H_
#define JAX_PAGED_CPU_ISA_VEC_AVX2_H_

namespace jax_paged::cpu::avx2 {

constexpr int kWidth = 8;
constexpr int kGemmRows = 6;
using Vec = __m256;
JAX_PAGED_X86_ARITHMETIC(_mm256)
JAX_PAGED_INLINE Vec Ratio(Vec a, Vec b) { return Div(a, b); }

JAX_PAGED_INLINE Vec Load(const float* p) { return _mm256_loadu_ps(p); }
JAX_PAGED_INLINE void Store(float* p, Vec x) { _mm256_storeu_ps(p, x); }

JAX_PAGED_INLINE Vec Load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
// As 32-bit words.
JAX_PAGED_INLINE __m256i RoundToBFloat16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
JAX_PAGED_INLINE void Store(BFloat16* p, Vec x) {
  const __m256i words = RoundToBFloat16(x);
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

JAX_PAGED_INLINE Vec Load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
JAX_PAGED_INLINE void Store(Float16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The halves that 8-bit codes stand for; those of E4M3 are 2^8 too small.
JAX_PAGED_INLINE __m128i HalvesOf(__m128i codes, const Float8E5M2*) {
  return _mm_slli_epi16(codes, 8);
}
JAX_PAGED_INLINE __m128i HalvesOf(__m128i codes, const Float8E4M3*) {
  const __m128i ones = _mm_set1_epi16(0x7f);
  const __m128i magnitude = _mm_and_si128(codes, ones);
  const __m128i sign = _mm_slli_epi16(_mm_xor_si128(codes, magnitude), 8);
  const __m128i nan = _mm_cmpeq_epi16(magnitude, ones);
  return _mm_or_si128(sign, _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_srli_epi16(nan, 1)));
}
JAX_PAGED_INLINE __m128i EightBytes(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}
JAX_PAGED_INLINE Vec LoadBytes(const Float8E5M2* p) {
  return _mm256_cvtph_ps(HalvesOf(_mm_cvtepu8_epi16(EightBytes(p)), p));
}
JAX_PAGED_INLINE Vec LoadBytes(const Float8E4M3* p) {
  return Mul(_mm256_cvtph_ps(HalvesOf(_mm_cvtepu8_epi16(EightBytes(p)), p)), Set1(256.0f));
}
JAX_PAGED_INLINE Vec LoadBytes(const Int8* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(EightBytes(p)));
}
JAX_PAGED_INLINE Vec Load(const Int8* p) { return LoadBytes(p); }
JAX_PAGED_INLINE Vec Load(const Float8E4M3* p) { return LoadBytes(p); }

constexpr bool kWidensSlowly = false;

// A code stays at its bits, which saves shifts, and is so many times as large. Only from the
// highest bits, one of which is the sign, it is shifted down.
constexpr bool kCentersInt4 = false;
constexpr float Int4Factor(int shift) {
  return shift == 28 ? 1.0f : static_cast<float>(1 << shift);
}
JAX_PAGED_INLINE Vec LoadInt4(const uint32_t* words, int shift, bool /*centered*/) {
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  if (shift == 28) return _mm256_cvtepi32_ps(_mm256_srli_epi32(all, 28));
  return _mm256_cvtepi32_ps(_mm256_and_si256(all, _mm256_set1_epi32(15 << shift)));
}

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
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)))};
}
JAX_PAGED_INLINE void StorePair(BFloat16* p, Pair x) {
  const __m256i odd = _mm256_slli_epi32(RoundToBFloat16(x.b), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(RoundToBFloat16(x.a), odd));
}

JAX_PAGED_INLINE void Pin(Vec& x) { asm("" : "+x"(x)); }

JAX_PAGED_INLINE Vec KeepFirst(Vec x, int n, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(keep));
}

JAX_PAGED_INLINE Vec Exp2(Vec x) {
  const Vec normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = _mm256_sub_ps(x, whole);
  Vec p = _mm256_set1_ps(kExp2[6]);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[5]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[4]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[3]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[2]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[1]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[0]));
  // `whole` is in [-126, 1] where the result is kept; NaN is in p already.
  const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  const Vec scale = _mm256_castsi256_ps(_mm256_slli_epi32(power, 23));
  return _mm256_and_ps(normal, _mm256_mul_ps(p, scale));
}

JAX_PAGED_INLINE float HorizontalMax(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
JAX_PAGED_INLINE float HorizontalSum(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

JAX_PAGED_INLINE Vec SumEach(const Vec* x) {
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// The order in which the tree of SumEach has the lanes.
constexpr int SumOrder(int i) { return i; }

JAX_PAGED_INLINE void Transpose(Vec* x) {
  Vec a[8];
  JAX_PAGED_UNROLL
  for (int i = 0; i < 8; i += 4) {  // 4 x 4 within each half
    const Vec p = _mm256_unpacklo_ps(x[i], x[i + 1]), q = _mm256_unpackhi_ps(x[i], x[i + 1]);
    const Vec r = _mm256_unpacklo_ps(x[i + 2], x[i + 3]);
    const Vec s = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
    a[i] = _mm256_shuffle_ps(p, r, 0x44);
    a[i + 1] = _mm256_shuffle_ps(p, r, 0xee);
    a[i + 2] = _mm256_shuffle_ps(q, s, 0x44);
    a[i + 3] = _mm256_shuffle_ps(q, s, 0xee);
  }
  JAX_PAGED_UNROLL
  for (int i = 0; i < 4; ++i) {  // then the halves
    x[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
  }
}

template <typename T>
constexpr bool kUsesDot = false;
template <typename T>
JAX_PAGED_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) {
  return Fma(a, b, c);
}

// Into L2: few lines at a time can be on their way into L1 (docs/performance.md, Prefetch).
JAX_PAGED_INLINE void Prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace jax_paged::cpu::avx2

#endif  // JAX_PAGED_CPU_ISA_VEC_AVX2_H_
