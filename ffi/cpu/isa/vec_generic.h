// SPDX-License-Identifier: Apache-2.0

// Vectors of 8 floats for any architecture, in C++ with the vector extension of gcc and clang.
// Included by inst/generic.cc only.
//
// This is the contract of vec_<isa>.h: a kernel uses these names and nothing else.

#ifndef JAX_PAGED_CPU_ISA_VEC_GENERIC_H_
#define JAX_PAGED_CPU_ISA_VEC_GENERIC_H_

namespace jax_paged::cpu::generic {

constexpr int kWidth = 8;     // floats in a vector: 8 or 16
constexpr int kGemmRows = 2;  // rows of the register tile of prefill, which is two vectors wide
using Float4 = float __attribute__((vector_size(16)));
using Word4 = uint32_t __attribute__((vector_size(16)));
struct Vec {
  Float4 lo, hi;
};
struct Pair {
  Vec a, b;
};

// The lanes of a Vec as an array, for steps that are not worth a vector.
struct Lanes {
  float lane[kWidth];
};
JAX_PAGED_INLINE Lanes ToLanes(Vec x) {
  Lanes r;
  __builtin_memcpy(&r, &x, sizeof(r));
  return r;
}
JAX_PAGED_INLINE Vec FromLanes(Lanes x) {
  Vec r;
  __builtin_memcpy(&r, &x, sizeof(r));
  return r;
}

JAX_PAGED_INLINE Vec Set1(float x) { return {Float4{x, x, x, x}, Float4{x, x, x, x}}; }
JAX_PAGED_INLINE Vec Zero() { return Set1(0.0f); }
JAX_PAGED_INLINE Vec Add(Vec a, Vec b) { return {a.lo + b.lo, a.hi + b.hi}; }
JAX_PAGED_INLINE Vec Mul(Vec a, Vec b) { return {a.lo * b.lo, a.hi * b.hi}; }
JAX_PAGED_INLINE Vec Div(Vec a, Vec b) { return {a.lo / b.lo, a.hi / b.hi}; }
// a * b + c, rounded once or twice.
JAX_PAGED_INLINE Vec Fma(Vec a, Vec b, Vec c) { return {a.lo * b.lo + c.lo, a.hi * b.hi + c.hi}; }
// The same rounded to float once: the product is exact in double. For where it nearly cancels c.
JAX_PAGED_INLINE Float4 FmaOnce(Float4 a, Float4 b, Float4 c) {
  using Double4 = double __attribute__((vector_size(32)));
  return __builtin_convertvector(
      __builtin_convertvector(a, Double4) * __builtin_convertvector(b, Double4) +
          __builtin_convertvector(c, Double4),
      Float4);
}
JAX_PAGED_INLINE Vec FmaOnce(Vec a, Vec b, Vec c) {
  return {FmaOnce(a.lo, b.lo, c.lo), FmaOnce(a.hi, b.hi, c.hi)};
}
// a / b to 2 ulp, for 1 <= b < 2^24.
JAX_PAGED_INLINE Vec Ratio(Vec a, Vec b) { return Div(a, b); }
// The smaller one; x where it is NaN.
JAX_PAGED_INLINE Vec MinKeepNan(Vec limit, Vec x) {
  Lanes a = ToLanes(limit), b = ToLanes(x);
  for (int i = 0; i < kWidth; ++i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return FromLanes(a);
}
// The larger one; x where it is NaN.
JAX_PAGED_INLINE Vec MaxKeepNan(Vec limit, Vec x) {
  Lanes a = ToLanes(limit), b = ToLanes(x);
  for (int i = 0; i < kWidth; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return FromLanes(a);
}
// The larger one; so_far where x is NaN.
JAX_PAGED_INLINE Vec MaxSkipNan(Vec so_far, Vec x) {
  Lanes a = ToLanes(so_far), b = ToLanes(x);
  for (int i = 0; i < kWidth; ++i) a.lane[i] = b.lane[i] > a.lane[i] ? b.lane[i] : a.lane[i];
  return FromLanes(a);
}

// Loads kWidth elements, converted to float; Store rounds to nearest even. Any alignment.
// Vectors of 16 also have LoadHalf and StoreHalf for 8 elements, zeros above, and LoadHalves for
// twice 8 floats.
JAX_PAGED_INLINE Vec Load(const float* p) {
  Vec r;
  __builtin_memcpy(&r, p, sizeof(r));
  return r;
}
JAX_PAGED_INLINE void Store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }
template <typename T>
JAX_PAGED_INLINE Vec Load(const T* p) {
  Lanes r;
  for (int i = 0; i < kWidth; ++i) r.lane[i] = ToFloat(p[i]);
  return FromLanes(r);
}
template <typename T>
JAX_PAGED_INLINE void Store(T* p, Vec x) {
  const Lanes y = ToLanes(x);
  for (int i = 0; i < kWidth; ++i) FromFloat(y.lane[i], p + i);
}

// Loads kWidth 8-bit elements as floats. Vectors of 16 also have LoadHalfBytes for 8.
template <typename T>
JAX_PAGED_INLINE Vec LoadBytes(const T* p) {
  return Load(p);
}

// Whether codes of 8 bits are to become floats once for some tiles, and not in each of them.
constexpr bool kWidensSlowly = true;

// The 4-bit codes at bit `shift` of kWidth words times Int4Factor(shift), a power of two; less 8
// where they are centered, which costs nothing where it kCentersInt4.
constexpr bool kCentersInt4 = true;
constexpr float Int4Factor(int) { return 1.0f; }
JAX_PAGED_INLINE Vec LoadInt4(const uint32_t* words, int shift, bool centered) {
  Lanes r;
  for (int i = 0; i < kWidth; ++i) {
    const int32_t code = static_cast<int32_t>(words[i] >> shift & 15u);
    r.lane[i] = static_cast<float>(centered ? code - 8 : code);
  }
  return FromLanes(r);
}

// Loads and stores 2 kWidth elements, distributed over a and b as it suits the type: only StorePair
// knows which is where.
template <typename T>
JAX_PAGED_INLINE Pair LoadPair(const T* p) {
  return {Load(p), Load(p + kWidth)};
}
template <typename T>
JAX_PAGED_INLINE void StorePair(T* p, Pair x) {
  Store(p, x.a);
  Store(p + kWidth, x.b);
}

// A word holds two neighbours: the one in its low half goes to a, the other to b.
JAX_PAGED_INLINE Pair LoadPair(const BFloat16* p) {
  Word4 words[4];
  Float4 halves[4];
  __builtin_memcpy(words, p, 2 * sizeof(Word4));
  words[2] = words[0] & 0xffff0000u;
  words[3] = words[1] & 0xffff0000u;
  words[0] <<= 16;
  words[1] <<= 16;
  __builtin_memcpy(halves, words, sizeof(halves));
  return {{halves[0], halves[1]}, {halves[2], halves[3]}};
}
JAX_PAGED_INLINE void StorePair(BFloat16* p, Pair x) {
  const Lanes a = ToLanes(x.a), b = ToLanes(x.b);
  for (int i = 0; i < kWidth; ++i) {
    BFloat16 low, high;
    FromFloat(a.lane[i], &low);
    FromFloat(b.lane[i], &high);
    const uint32_t word = low.bits | static_cast<uint32_t>(high.bits) << 16;
    __builtin_memcpy(p + 2 * i, &word, sizeof(word));
  }
}

// Keeps the compiler from loading x from memory again at each use.
JAX_PAGED_INLINE void Pin(Vec&) {}

// The first n lanes of x, `fill` in the others.
JAX_PAGED_INLINE Vec KeepFirst(Vec x, int n, float fill) {
  Lanes y = ToLanes(x);
  for (int i = 0; i < kWidth; ++i) y.lane[i] = i < n ? y.lane[i] : fill;
  return FromLanes(y);
}

// 2^x to 8e-8 for x <= 1; 0 below 2^-126 (no subnormals); NaN stays NaN.
JAX_PAGED_INLINE Vec Exp2(Vec x) {
  const Lanes exponent = ToLanes(x);
  Lanes r;
  for (int i = 0; i < kWidth; ++i) {
    const float y = exponent.lane[i] < -126.0f ? -126.0f : exponent.lane[i];
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number
    const float shifted = y + kRound;
    const float f = y - (shifted - kRound);
    float p = kExp2[6];
    for (int k = 5; k >= 0; --k) p = p * f + kExp2[k];
    const uint32_t power = FloatBits(shifted) - FloatBits(kRound) + 127u;
    const float scaled = p * FloatFromBits(power << 23);
    r.lane[i] = exponent.lane[i] < -126.0f ? 0.0f : scaled;
  }
  return FromLanes(r);
}

JAX_PAGED_INLINE float HorizontalMax(Vec x) {
  const Lanes y = ToLanes(x);
  float r = y.lane[0];
  for (int i = 1; i < kWidth; ++i) r = y.lane[i] > r ? y.lane[i] : r;
  return r;
}
JAX_PAGED_INLINE float HorizontalSum(Vec x) {
  const Float4 y = x.lo + x.hi;
  return (y[0] + y[2]) + (y[1] + y[3]);
}

// Lane i = the sum of x[i], for kWidth vectors.
JAX_PAGED_INLINE Vec SumEach(const Vec* x) {
  Lanes r;
  for (int i = 0; i < kWidth; ++i) r.lane[i] = HorizontalSum(x[i]);
  return FromLanes(r);
}

// The lanes as the tree of SumEach has them: neighbours are added, then neighbours of their sums.
// SumOrder(i + j) = SumOrder(i) + SumOrder(j) where i is a multiple of a power of two above j.
constexpr int SumOrder(int i) { return (i & 1) << 2 | (i & 2) | (i >> 2 & 1); }

// Transposes kWidth vectors in place.
JAX_PAGED_INLINE void Transpose(Vec* x) {
  float from[kWidth][kWidth], to[kWidth][kWidth];
  __builtin_memcpy(from, x, sizeof(from));
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < kWidth; ++j) to[i][j] = from[j][i];
  }
  __builtin_memcpy(x, to, sizeof(to));
}

// Whether logits of T come from dot products of words: queries and packed keys then stay in T, two
// neighbours in each float of their buffers. LoadWords loads n or 2 kWidth elements so, with zeros
// after n.
template <typename T>
constexpr bool kUsesDot = false;
// a . b + c, of words where T uses them and of floats elsewhere.
template <typename T>
JAX_PAGED_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) {
  return Fma(a, b, c);
}

// Into L2: few lines at a time can be on their way into L1 (docs/performance.md, Prefetch).
JAX_PAGED_INLINE void Prefetch(const char* p) {
  __builtin_prefetch(p, /*write=*/0, /*locality=*/2);
}

}  // namespace jax_paged::cpu::generic

#endif  // JAX_PAGED_CPU_ISA_VEC_GENERIC_H_
