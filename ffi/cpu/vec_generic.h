// Vectors of 8 floats in standard C++, for any architecture. Included by attention_generic.cc only.
//
// This is the contract of vec_<isa>.h: a kernel uses these names and nothing else. The compiler
// makes of the loops what the baseline of the architecture offers.

#ifndef JAX_PAGED_CPU_VEC_GENERIC_H_
#define JAX_PAGED_CPU_VEC_GENERIC_H_

namespace jax_paged::cpu::generic {

constexpr int kWidth = 8;     // floats in a vector: 8 or 16
constexpr int kGemmRows = 4;  // rows of the register tile of prefill, which is two vectors wide
struct Vec {
  float lane[kWidth];
};
struct Pair {
  Vec a, b;
};

JAX_PAGED_INLINE Vec Set1(float x) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.lane[i] = x;
  return r;
}
JAX_PAGED_INLINE Vec Zero() { return Set1(0.0f); }
JAX_PAGED_INLINE Vec Add(Vec a, Vec b) {
  for (int i = 0; i < kWidth; ++i) a.lane[i] += b.lane[i];
  return a;
}
JAX_PAGED_INLINE Vec Mul(Vec a, Vec b) {
  for (int i = 0; i < kWidth; ++i) a.lane[i] *= b.lane[i];
  return a;
}
// a * b + c, rounded once or twice.
JAX_PAGED_INLINE Vec Fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kWidth; ++i) c.lane[i] += a.lane[i] * b.lane[i];
  return c;
}
// The larger one; so_far where x is NaN.
JAX_PAGED_INLINE Vec MaxSkipNan(Vec so_far, Vec x) {
  for (int i = 0; i < kWidth; ++i) {
    so_far.lane[i] = x.lane[i] > so_far.lane[i] ? x.lane[i] : so_far.lane[i];
  }
  return so_far;
}

// Loads kWidth elements, converted to float; Store rounds to nearest even. Any alignment.
// Vectors of 16 also have LoadHalf and StoreHalf for 8 elements, zeros above.
template <typename T>
JAX_PAGED_INLINE Vec Load(const T* p) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.lane[i] = ToFloat(p[i]);
  return r;
}
template <typename T>
JAX_PAGED_INLINE void Store(T* p, Vec x) {
  for (int i = 0; i < kWidth; ++i) FromFloat(x.lane[i], p + i);
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

// Keeps the compiler from loading x from memory again at each use.
JAX_PAGED_INLINE void Pin(Vec&) {}

// The first n lanes of x, `fill` in the others.
JAX_PAGED_INLINE Vec KeepFirst(Vec x, int n, float fill) {
  for (int i = 0; i < kWidth; ++i) x.lane[i] = i < n ? x.lane[i] : fill;
  return x;
}

// 2^x to 8e-8 for x <= 1; 0 below 2^-126 (no subnormals); NaN stays NaN.
JAX_PAGED_INLINE Vec Exp2(Vec x) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) {
    const float y = x.lane[i] < -126.0f ? -126.0f : x.lane[i];
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number
    const float shifted = y + kRound;
    const float f = y - (shifted - kRound);
    float p = kExp2[6];
    for (int k = 5; k >= 0; --k) p = p * f + kExp2[k];
    const uint32_t power = FloatBits(shifted) - FloatBits(kRound) + 127u;
    const float scaled = p * FloatFromBits(power << 23);
    r.lane[i] = x.lane[i] < -126.0f ? 0.0f : scaled;
  }
  return r;
}

JAX_PAGED_INLINE float HorizontalMax(Vec x) {
  float r = x.lane[0];
  for (int i = 1; i < kWidth; ++i) r = x.lane[i] > r ? x.lane[i] : r;
  return r;
}
JAX_PAGED_INLINE float HorizontalSum(Vec x) {
  return ((x.lane[0] + x.lane[4]) + (x.lane[2] + x.lane[6])) +
         ((x.lane[1] + x.lane[5]) + (x.lane[3] + x.lane[7]));
}

// Lane i = the sum of x[i], for kWidth vectors.
JAX_PAGED_INLINE Vec SumEach(const Vec* x) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.lane[i] = HorizontalSum(x[i]);
  return r;
}

// Transposes kWidth vectors in place.
JAX_PAGED_INLINE void Transpose(Vec* x) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float t = x[i].lane[j];
      x[i].lane[j] = x[j].lane[i];
      x[j].lane[i] = t;
    }
  }
}

JAX_PAGED_INLINE void Prefetch(const char*) {}

}  // namespace jax_paged::cpu::generic

#endif  // JAX_PAGED_CPU_VEC_GENERIC_H_
