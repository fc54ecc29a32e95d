// SPDX-License-Identifier: Apache-2.0

// Kernel text shared by decode and prefill: loading queries, walking pages, folding partials,
// output. Included by inst/<isa>.cc inside its target region (isa.h), after vec_<isa>.h.
//
// Logits are kept raw, s = q.k in f32 (logits.h: unless they are edited); weights are 2^(s *
// scale - m) with scale = |sm_scale| log2(e) (its sign goes into q) and m = the largest s so far,
// times scale, rounded once. The same rounded m enters every weight and the log-sum-exp, so its
// rounding cancels; the exponent is rounded once, after the difference.

#ifndef JAX_PAGED_CPU_ATTENTION_COMMON_H_
#define JAX_PAGED_CPU_ATTENTION_COMMON_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr float kInfinity = __builtin_huge_valf();
constexpr int kHalf = 8;  // head_dim is a multiple of it

template <typename A, typename B>
constexpr bool kSameType = false;
template <typename A>
inline constexpr bool kSameType<A, A> = true;

// The tokens [begin, end) of a row that lie in pages of the pool, in order. Tokens whose page id is
// not one are left out: nothing of them is ever read.
template <typename T>
struct KeyBlock {
  int64_t begin;
  int count;
  // k[count ...] repeats the last entry up to a multiple of any register tile, and so does v.
  const T* k[kKeyBlock];
  const T* v[kKeyBlock];
  uint8_t count_before[kKeyBlock + 1];  // listed tokens among the first i
};

inline void PrefetchRow(const void* row, int64_t bytes) {
  const char* p = static_cast<const char*>(row);
  for (int64_t i = 0; i < bytes; i += 64) Prefetch(p + i);
}

// The same into L1, of what is in L2.
inline void PrefetchRowIntoL1(const void* row, int64_t bytes) {
  const char* p = static_cast<const char*>(row);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, /*rw=*/0, /*locality=*/3);
}

// Copies `run` tokens, the first of which is at `from`, from atoms to whole rows of elements E.
template <typename E, int ATOM_DIMS>
void CopyRows(const char* from, int64_t run, int64_t head_dim, const PageStrides& strides, E* to) {
  for (int64_t d = 0; d < head_dim; d += ATOM_DIMS, from += strides.atom) {
    for (int64_t i = 0; i < run; ++i) {
      __builtin_memcpy(to + i * head_dim + d, from + i * ATOM_DIMS * int64_t{sizeof(E)},
                       ATOM_DIMS * sizeof(E));
    }
  }
}

// The same for K and V.
template <typename E>
void CopyAtoms(const AttentionParams& params, const char* k, const char* v, int64_t run,
               char* k_rows, char* v_rows) {
  CopyRows<E, kKeyAtomBytes / int{sizeof(E)}>(k, run, params.head_dim, params.k.strides,
                                              reinterpret_cast<E*>(k_rows));
  CopyRows<E, 1>(v, run, params.v_head_dim, params.v.strides, reinterpret_cast<E*>(v_rows));
}

// Lists the tokens [begin, end) of a row. Where the pages cut rows into atoms, the listed tokens
// are copied to part `part` (0, 1, with 8-bit pages also 2) of the scratch rows, and the list is of
// the copies.
template <typename T>
void GatherKeys(const AttentionParams& params, int32_t row, int32_t kv_head, int64_t begin,
                int64_t end, const WorkerScratch& scratch, int part, KeyBlock<T>* block) {
  const PageView& k = params.k;
  const PageView& v = params.v;
  const RowPages pages = PagesOf(params, row);
  block->begin = begin;
  int count = 0;
  int seen = 0;
  int64_t page = begin / k.page_size;
  int64_t offset = begin % k.page_size;
  for (int64_t token = begin; token < end; ++page, offset = 0) {
    int64_t run = k.page_size - offset;
    if (run > end - token) run = end - token;
    token += run;
    const int64_t id = pages[page];
    if (!k.IsPage(id)) {
      for (int64_t i = 0; i < run; ++i) block->count_before[seen++] = static_cast<uint8_t>(count);
      continue;
    }
    const char* k_token = k.Token(id, kv_head, offset);
    const char* v_token = v.Token(id, kv_head, offset);
    int64_t k_stride = k.strides.token;
    int64_t v_stride = v.strides.token;
    if (params.has_atoms) {
      const int64_t scratch_row = part * kKeyBlock + count;
      k_stride = params.head_dim * ByteWidth(params.kv_dtype);
      v_stride = params.v_head_dim * ByteWidth(params.kv_dtype);
      char* k_row = reinterpret_cast<char*>(scratch.k_rows) + scratch_row * k_stride;
      char* v_row = reinterpret_cast<char*>(scratch.v_rows) + scratch_row * v_stride;
      switch (ByteWidth(params.kv_dtype)) {
        case 1:
          CopyAtoms<uint8_t>(params, k_token, v_token, run, k_row, v_row);
          break;
        case 2:
          CopyAtoms<uint16_t>(params, k_token, v_token, run, k_row, v_row);
          break;
        default:
          CopyAtoms<uint32_t>(params, k_token, v_token, run, k_row, v_row);
      }
      k_token = k_row;
      v_token = v_row;
    }
    for (int64_t i = 0; i < run; ++i) {
      block->count_before[seen++] = static_cast<uint8_t>(count);
      block->k[count] = reinterpret_cast<const T*>(k_token);
      block->v[count] = reinterpret_cast<const T*>(v_token);
      ++count;
      k_token += k_stride;
      v_token += v_stride;
    }
  }
  while (seen <= kKeyBlock) block->count_before[seen++] = static_cast<uint8_t>(count);
  block->count = count;
  for (int i = count; count > 0 && i < kKeyBlock; ++i) {
    block->k[i] = block->k[count - 1];
    block->v[i] = block->v[count - 1];
  }
}

// Where packed row `packed` of a unit lies in q and out, as (token, head) in row-major order.
inline int64_t QueryHead(const AttentionParams& params, const Row& row, const WorkItem& item,
                         int64_t packed) {
  const int64_t token = row.q_begin + packed / params.group_size;
  return token * params.num_q_heads + int64_t{item.kv_head} * params.group_size +
         packed % params.group_size;
}

// Loads `n` elements (a multiple of kHalf) to floats, with zeros up to a whole vector.
template <typename T>
JAX_PAGED_INLINE Vec LoadTail(const T* p, int64_t n) {
  if constexpr (kWidth > kHalf) {
    if (n < kWidth) return LoadHalf(p);
  }
  (void)n;
  return Load(p);
}

// The same where the choice is known: a whole vector, or kHalf elements.
template <bool HALF, typename T>
JAX_PAGED_INLINE Vec LoadPart(const T* p) {
  if constexpr (HALF && kWidth > kHalf) {
    return LoadHalf(p);
  } else {
    return Load(p);
  }
}

template <typename T>
JAX_PAGED_INLINE void StoreTail(T* p, Vec x, int64_t n) {
  if constexpr (kWidth > kHalf) {
    if (n < kWidth) {
      StoreHalf(p, x);
      return;
    }
  }
  (void)n;
  Store(p, x);
}

// Rotary embedding of one head in floats.
JAX_PAGED_INLINE void TurnHead(float* x, const float* cos, const float* sin, int64_t half,
                               bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  float* first = x;
  float* second = x + half;
  const Vec minus = Set1(-1.0f);
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Vec a = Load(first + i), b = Load(second + i), c = Load(cos + i), s = Load(sin + i);
    Store(first + i, Fma(Mul(b, s), minus, Mul(a, c)));
    Store(second + i, Fma(a, s, Mul(b, c)));
  }
  for (; i < half; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

// One query, times sign (1, -1 or 0), as the logits want it, followed by zeros. Null: all zeros.
template <typename T>
JAX_PAGED_INLINE void LoadQuery(const T* source, int64_t head_dim, float sign, float* q,
                                int64_t q_stride) {
  const Vec factor = Set1(sign);
  int64_t d = 0;  // in floats of q
  if constexpr (kUsesDot<T>) {
    for (int64_t from = 0; source && from < head_dim; from += 2 * kWidth, d += kWidth) {
      Store(q + d, LoadWords(source + from, head_dim - from));
      BFloat16* words = reinterpret_cast<BFloat16*>(q + d);
      const Pair x = LoadPair(words);
      StorePair(words, {Mul(factor, x.a), Mul(factor, x.b)});
    }
  } else if (source) {
    for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
      const Pair x = LoadPair(source + d);
      Store(q + d, Mul(factor, x.a));
      Store(q + d + kWidth, Mul(factor, x.b));
    }
    for (; d < head_dim; d += kWidth) {
      Store(q + d, Mul(factor, LoadTail(source + d, head_dim - d)));
    }
  }
  for (; d < q_stride; d += kWidth) Store(q + d, Zero());
}

// The unit's queries [padded_rows, q_stride]; rows past the unit's own are zero.
template <typename T>
void LoadQueries(const AttentionParams& params, const Row& row, const WorkItem& item, float sign,
                 int64_t padded_rows, const WorkerScratch& scratch) {
  const int64_t num_rows = item.packed_end - item.packed_begin;
  for (int64_t r = 0; r < padded_rows; ++r) {
    const T* source = nullptr;
    if (r < num_rows) {
      source = static_cast<const T*>(params.q) +
               QueryHead(params, row, item, item.packed_begin + r) * params.head_dim;
    }
    LoadQuery(source, params.head_dim, sign, scratch.q + r * scratch.q_stride, scratch.q_stride);
  }
}

// A partial result of `rows` packed rows: softmax numerator and denominator, both scaled by 2^-m.
struct Partial {
  float* o;  // [rows, stride]
  float* m;  // [rows], -inf: no key seen, or only NaN logits
  float* l;  // [rows], 0: no key seen, o = 0
  int64_t stride;
};

inline void ClearPartial(const Partial& x, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    x.m[r] = -kInfinity;
    x.l[r] = 0.0f;
    for (int64_t d = 0; d < width; d += kWidth) Store(x.o + r * x.stride + d, Zero());
  }
}

inline float Exp2(float x) {
  float lanes[kWidth];
  Store(lanes, Exp2(Set1(x)));
  return lanes[0];
}

// total += part, `part` being the next split.
inline void FoldPartial(const Partial& total, const Partial& part, int64_t rows,
                        int64_t v_head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.l[r] == 0.0f) continue;
    const float m = part.m[r] > total.m[r] ? part.m[r] : total.m[r];
    const float keep = total.m[r] == -kInfinity ? 0.0f : Exp2(total.m[r] - m);
    const float add = Exp2(part.m[r] - m);
    total.m[r] = m;
    total.l[r] = total.l[r] * keep + part.l[r] * add;
    float* o = total.o + r * total.stride;
    const float* x = part.o + r * part.stride;
    for (int64_t d = 0; d < v_head_dim; d += kWidth) {
      const Vec scaled = Mul(LoadTail(x + d, v_head_dim - d), Set1(add));
      StoreTail(o + d, Fma(LoadTail(o + d, v_head_dim - d), Set1(keep), scaled), v_head_dim - d);
    }
  }
}

// The codes of n floats as fp8, rounded to nearest even and clamped; NaN stays NaN.
inline void StoreCodes(const float* x, int n, bool e4m3, uint8_t* codes) {
  const int shift = e4m3 ? 20 : 21;  // fraction bits of a float that fp8 lacks
  const float largest = e4m3 ? 448.0f : 57344.0f;
  const uint32_t smallest_normal = e4m3 ? 121u << 23 : 113u << 23;  // 2^-6, 2^-14
  const uint32_t rebias = smallest_normal - (1u << 23);
  const float aligned = e4m3 ? 0x1p14f : 0x1p7f;  // adding it leaves multiples of the least code
  const uint32_t nan = e4m3 ? 0x7fu : 0x7eu;
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = FloatBits(x[i]);
    const float magnitude = FloatFromBits(bits & 0x7fffffffu);
    const float y = magnitude > largest ? largest : magnitude;
    const uint32_t subnormal = FloatBits(y + aligned) - FloatBits(aligned);
    const uint32_t z = FloatBits(y) - rebias;
    const uint32_t normal = (z + (1u << (shift - 1)) - 1u + ((z >> shift) & 1u)) >> shift;
    const uint32_t code = FloatBits(y) < smallest_normal ? subnormal : normal;
    codes[i] = static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude == magnitude ? code : nan));
  }
}

// Writes o * factor / out_scale as fp8, o being ordered as kernels of T do.
template <typename T>
void WriteCodes(const AttentionParams& params, const float* o, Vec factor, uint8_t* out) {
  const bool e4m3 = params.out_dtype == Dtype::kFloat8E4M3;
  const Vec scale = Set1(params.out_scale);
  float x[2 * kWidth], ordered[2 * kWidth];
  int64_t d = 0;
  for (; d + 2 * kWidth <= params.v_head_dim; d += 2 * kWidth) {
    Store(x, Div(Mul(Load(o + d), factor), scale));
    Store(x + kWidth, Div(Mul(Load(o + d + kWidth), factor), scale));
    if constexpr (kSameType<T, BFloat16>) {  // even ones, then odd ones
      for (int i = 0; i < kWidth; ++i) {
        ordered[2 * i] = x[i];
        ordered[2 * i + 1] = x[kWidth + i];
      }
      StoreCodes(ordered, 2 * kWidth, e4m3, out + d);
    } else {
      StoreCodes(x, 2 * kWidth, e4m3, out + d);
    }
  }
  for (; d < params.v_head_dim; d += kWidth) {
    const int64_t n = Clamp(params.v_head_dim - d, 0, kWidth);
    Store(x, Div(Mul(LoadTail(o + d, n), factor), scale));
    StoreCodes(x, static_cast<int>(n), e4m3, out + d);
  }
}

// Whether the query of a packed row stands within the tables of rope, where there are any.
inline bool HasAngle(const AttentionParams& params, const Row& row, const WorkItem& item,
                     int64_t packed) {
  if (!params.rope.cos) return true;
  const int64_t query = QueryPosition(row, packed / params.group_size);
  const int64_t token = TokenAt(params, row, item.row, query);
  return token >= 0 && token < params.rope.max_positions;
}

// Writes out and lse of a unit's packed rows, whose o is ordered as kernels of T do, to out of type
// O, or fp8.
template <typename T, typename O>
void WriteOutputAs(const AttentionParams& params, const Row& row, const WorkItem& item,
                   const Partial& x) {
  constexpr double kLn2 = 0.69314718055994530942;
  for (int64_t r = 0; r < item.packed_end - item.packed_begin; ++r) {
    const int64_t head = QueryHead(params, row, item, item.packed_begin + r);
    const bool empty = x.l[r] == 0.0f || !HasAngle(params, row, item, item.packed_begin + r);
    double m = empty ? -kInfinity : x.m[r], l = x.l[r];
    float numerator = 1.0f;     // o counts it times
    if (params.logits.sinks) {  // one more logit, without a value
      const float sink = params.logits.sinks[item.kv_head * params.group_size +
                                             (item.packed_begin + r) % params.group_size];
      const double logit = sink / kLn2;
      const double top = m > logit ? m : logit;
      numerator = empty ? 0.0f : static_cast<float>(::exp2(m - top));
      l = (empty ? 0.0 : l * ::exp2(m - top)) + ::exp2(logit - top);
      m = top;
    }
    const bool nothing = empty && m == -kInfinity;
    params.lse[head] = nothing ? -kInfinity : static_cast<float>(m * kLn2 + ::log(l));
    if (empty) {  // o may be anything: keys beyond the tables of rope are in it, and 0 * NaN is NaN
      const int64_t bytes = params.v_head_dim * ByteWidth(params.out_dtype);
      __builtin_memset(static_cast<char*>(params.out) + head * bytes, 0,
                       static_cast<size_t>(bytes));
      continue;
    }
    const Vec factor = Set1(numerator / static_cast<float>(l));
    const float* o = x.o + r * x.stride;
    if (IsEightBit(params.out_dtype)) {
      WriteCodes<T>(params, o, factor,
                    static_cast<uint8_t*>(params.out) + head * params.v_head_dim);
      continue;
    }
    O* out = static_cast<O*>(params.out) + head * params.v_head_dim;
    int64_t d = 0;
    for (; kSameType<T, O> && d + 2 * kWidth <= params.v_head_dim; d += 2 * kWidth) {
      StorePair(out + d, {Mul(Load(o + d), factor), Mul(Load(o + d + kWidth), factor)});
    }
    for (; d < params.v_head_dim; d += kWidth) {
      const int64_t n = params.v_head_dim - d;
      StoreTail(out + d, Mul(LoadTail(o + d, n), factor), n);
    }
  }
}

// The same where out has the type that the pages call for: T, or with 8-bit pages that of q.
template <typename T>
void WriteOutput(const AttentionParams& params, const Row& row, const WorkItem& item,
                 const Partial& x) {
  if constexpr (kSameType<T, float>) {
    if (params.dtype == Dtype::kBFloat16) return WriteOutputAs<T, BFloat16>(params, row, item, x);
    if (params.dtype == Dtype::kFloat16) return WriteOutputAs<T, Float16>(params, row, item, x);
  }
  WriteOutputAs<T, T>(params, row, item, x);
}

// The partial of split `split` of item's shared unit.
inline Partial StoredPartial(const AttentionParams& params, const WorkItem& item, int64_t split,
                             float* partials) {
  const int64_t rows = item.packed_end - item.packed_begin;
  float* o = partials + item.partials + split * PartialFloats(rows, params.v_head_dim);
  float* m = o + rows * params.v_head_dim;
  return {o, m, m + rows, params.v_head_dim};
}

inline void CopyPartial(const Partial& from, const Partial& to, int64_t rows, int64_t v_head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    to.m[r] = from.m[r];
    to.l[r] = from.l[r];
    __builtin_memcpy(to.o + r * to.stride, from.o + r * from.stride,
                     static_cast<size_t>(v_head_dim) * sizeof(float));
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_COMMON_H_
