// SPDX-License-Identifier: Apache-2.0

// out = x w^T of 4-bit w. With d in group g of the depth, and codes of 0 to 15, w[n, d] = scale[n,
// g] code[n, d] + offset[n, g]; or without offsets w[n, d] = scale[n, g] (code[n, d] - 8), whose -8
// is an offset, too, where LoadInt4 does not take it off. Included by inst/<isa>.cc inside its
// target region (isa.h), after packed.h.
//
// Panels of 16 outputs, [outputs / 16][depth / 8][16] words. A word has 8 elements of the depth of
// one output: bits 4 k of its low half the elements 2 k, of its high half the elements 2 k + 1. So
// a shift and a look-up (or a second shift and a conversion) make a vector of 16 outputs, and with
// bf16 dot products the halves are the two words of a pair.
//
//   group  sums of its codes times x, one after the other; then sum = scale * that + sum, and sum =
//          offset * (sum of the group's x) + sum. The order is the same for any number of rows
//   tile   rows of x times groups: fewer rows have more groups, so that so many sums are under way
//          that none waits for the one before
//   block  panels that stay in L2: rows of x pass over it, a tile at a time (int4_many.h has many
//          rows)
//
// Bound by reading codes up to some four rows, by multiply-adds beyond; an element of w costs a
// shift and a look-up beside its multiply-adds.

#ifndef JAX_PAGED_CPU_LINEAR_INT4_H_
#define JAX_PAGED_CPU_LINEAR_INT4_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// The largest tile.
constexpr int kInt4Rows = kWidth == 16 ? 8 : 4;
// Bytes of codes that come in ahead of those that are multiplied.
constexpr int64_t kInt4Ahead = 4096;

// The bits of a word from which on it has the element d of the depth.
constexpr int Int4Shift(int d) { return d % 2 * 16 + d / 2 * 4; }

// Rows of x, and where `sums` is not null the sums of their groups: [rows, depth / group].
template <typename T>
void LoadInt4Rows(const void* x, int64_t begin, int64_t end, int64_t depth, int64_t group,
                  float* rows, int64_t x_stride, float* sums) {
  if constexpr (kUsesDot<T>) {
    LoadLinearRows<T>(x, begin, end, end, depth, rows, x_stride);
  } else {
    LoadPlainRows<T>(x, begin, end, end, depth, rows, x_stride);
    for (int64_t r = begin; r < end; ++r) {
      float* const row = rows + r * x_stride;
      for (int64_t d = 0; d < depth; d += 8) {  // less by what LoadInt4 makes of codes more
        JAX_PAGED_UNROLL
        for (int i = 0; i < 8; ++i) row[d + i] *= 1.0f / Int4Factor(Int4Shift(i));
      }
    }
  }
  for (int64_t r = begin; sums && r < end; ++r) {
    const T* from = static_cast<const T*>(x) + r * depth;
    for (int64_t g = 0; g < depth / group; ++g, from += group) {
      Vec sum = Zero();
      for (int64_t d = 0; d < group; d += kWidth) sum = Add(sum, Load(from + d));
      sums[r * (depth / group) + g] = HorizontalSum(sum);
    }
  }
}

// One word of each output of some panels, `panel_words` apart, times 8 elements of x.
template <typename T, bool CENTERED, int ROWS, int PANELS>
JAX_PAGED_INLINE void Int4Step(const float* x, int64_t x_stride, const uint32_t* words,
                               int64_t panel_words, Vec* sum) {
  constexpr int kVecs = PANELS * kPanelVecs;
  JAX_PAGED_UNROLL
  for (int d = 0; d < 8; d += kUsesDot<T> ? 2 : 1) {
    Vec w[kVecs];
    JAX_PAGED_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const uint32_t* const from = words + v / kPanelVecs * panel_words + v % kPanelVecs * kWidth;
      if constexpr (kUsesDot<T>) {
        w[v] = LoadInt4Pairs(from, d / 2 * 4, CENTERED, static_cast<const T*>(nullptr));
      } else {
        w[v] = LoadInt4(from, Int4Shift(d), CENTERED);
      }
    }
    AddProducts<T, ROWS, kVecs>(x + (kUsesDot<T> ? d / 2 : d), x_stride, w, sum);
  }
}

// Codes of `depth` elements of a panel as floats or, with bf16 dot products, as pairs: a vector of
// 16 outputs for each.
template <typename T, bool CENTERED>
void StageInt4(const uint32_t* words, int64_t depth, float* to) {
  for (int64_t d = 0; d < depth; d += 8, words += kPanelOutputs) {
    Prefetch(reinterpret_cast<const char*>(words) + kInt4Ahead);
    JAX_PAGED_UNROLL
    for (int k = 0; k < 8; k += kUsesDot<T> ? 2 : 1, to += kPanelOutputs) {
      JAX_PAGED_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) {
        const uint32_t* const from = words + v * kWidth;
        if constexpr (kUsesDot<T>) {
          Store(to, LoadInt4Pairs(from, k / 2 * 4, CENTERED, static_cast<const T*>(nullptr)));
        } else {
          Store(to + v * kWidth, LoadInt4(from, Int4Shift(k), CENTERED));
        }
      }
    }
  }
}

// The scales or offsets of a panel from number `at` on.
JAX_PAGED_INLINE Vec LoadScales(const Int4Panel& w, int64_t at) {
  return w.has_half_scales ? Load(static_cast<const Float16*>(w.scales) + at)
                           : Load(static_cast<const float*>(w.scales) + at);
}

// Adds the sums of group number g of ROWS rows of x and VECS vectors of outputs.
template <bool CENTERED, int ROWS, int VECS>
JAX_PAGED_INLINE void AddInt4Group(const Vec* sum, const Int4Rows& x, int64_t row,
                                   const Int4Panel& w, int64_t g, float* sums,
                                   int64_t sums_stride) {
  constexpr int64_t kOfGroup = CENTERED ? kPanelOutputs : 2 * kPanelOutputs;
  JAX_PAGED_UNROLL
  for (int v = 0; v < VECS; ++v) {
    const Int4Panel panel = w.Behind(v / kPanelVecs);
    const int64_t at = g * kOfGroup + v % kPanelVecs * kWidth;
    const Vec scale = LoadScales(panel, at);
    Vec offset = Zero();
    if constexpr (!CENTERED) {
      offset = LoadScales(panel, at + kPanelOutputs);
    } else if constexpr (!kCentersInt4) {
      offset = Mul(scale, Set1(-8.0f));
    }
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      float* const to = sums + r * sums_stride + v * kWidth;
      const Vec of_group = sum[r * VECS + v];
      Vec all = g == 0 ? Mul(of_group, scale) : Fma(of_group, scale, Load(to));
      if constexpr (!CENTERED || !kCentersInt4) {
        all = Fma(Set1(x.sums[(row + r) * w.num_groups + g]), offset, all);
      }
      Store(to, all);
    }
  }
}

// ROWS rows of x times PANELS panels, over GROUPS groups from number `first` on.
template <typename T, bool CENTERED, int ROWS, int GROUPS, int PANELS>
JAX_PAGED_INLINE void Int4Groups(const Int4Rows& x, int64_t row, const Int4Panel& w, int64_t first,
                                 float* sums, int64_t sums_stride) {
  constexpr int kVecs = PANELS * kPanelVecs;
  Vec sum[GROUPS][ROWS * kVecs];
  JAX_PAGED_UNROLL
  for (int g = 0; g < GROUPS; ++g) {
    JAX_PAGED_UNROLL
    for (int i = 0; i < ROWS * kVecs; ++i) sum[g][i] = Zero();
  }
  constexpr int64_t kOfWord = kUsesDot<T> ? 4 : 8;  // floats of x
  const int64_t words = w.group / 8;
  const float* const from = x.data + row * x.stride + first * words * kOfWord;
  const uint32_t* const codes = w.codes + first * words * kPanelOutputs;
  for (int64_t i = 0; i < words; ++i) {
    JAX_PAGED_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      const int64_t at = g * words + i;
      if (ROWS <= 4)
        Prefetch(reinterpret_cast<const char*>(codes + at * kPanelOutputs) + kInt4Ahead);
      Int4Step<T, CENTERED, ROWS, PANELS>(from + at * kOfWord, x.stride, codes + at * kPanelOutputs,
                                          words * w.num_groups * kPanelOutputs, sum[g]);
    }
  }
  JAX_PAGED_UNROLL
  for (int g = 0; g < GROUPS; ++g) {
    AddInt4Group<CENTERED, ROWS, kVecs>(sum[g], x, row, w, first + g, sums, sums_stride);
  }
}

template <typename T, bool CENTERED, int ROWS, int PANELS = 1>
void Int4Tile(const Int4Rows& x, int64_t row, const Int4Panel& w, float* sums,
              int64_t sums_stride) {
  constexpr int kGroups = kInt4Rows / ROWS;
  int64_t g = 0;
  for (; g + kGroups <= w.num_groups; g += kGroups) {
    Int4Groups<T, CENTERED, ROWS, kGroups, PANELS>(x, row, w, g, sums, sums_stride);
  }
  for (; g < w.num_groups; ++g) {
    Int4Groups<T, CENTERED, ROWS, 1, PANELS>(x, row, w, g, sums, sums_stride);
  }
}

template <typename T, bool CENTERED>
void Int4Block(const Int4Rows& x, int64_t num_rows, const Int4Panel& w, int64_t panels, float* sums,
               int64_t sums_stride) {
  for (int64_t r = 0; r < num_rows;) {
    const int64_t rest = num_rows - r;
    const int64_t tile = rest >= 8 && kInt4Rows == 8 ? 8 : (rest >= 4 ? 4 : (rest >= 2 ? 2 : 1));
    float* const to = sums + r * sums_stride;
    for (int64_t p = 0; p < panels;) {
      const Int4Panel panel = w.Behind(p);
      float* const of_panel = to + p * kPanelOutputs;
      if (kInt4Rows == 8 && tile == 8 && panels - p >= 2) {
        Int4Tile<T, CENTERED, kInt4Rows, 2>(x, r, panel, of_panel, sums_stride);
        p += 2;
        continue;
      }
      if (kInt4Rows == 8 && tile == 8) {
        Int4Tile<T, CENTERED, kInt4Rows>(x, r, panel, of_panel, sums_stride);
      } else if (tile == 4) {
        Int4Tile<T, CENTERED, 4>(x, r, panel, of_panel, sums_stride);
      } else if (tile == 2) {
        Int4Tile<T, CENTERED, 2>(x, r, panel, of_panel, sums_stride);
      } else {
        Int4Tile<T, CENTERED, 1>(x, r, panel, of_panel, sums_stride);
      }
      ++p;
    }
    r += tile;
  }
}

// sums[r, n] = x[r] . w[n], for all rows of x and `panels` panels, of which w is the first one.
template <typename T>
void FewInt4Sums(const Int4Rows& x, int64_t num_rows, const Int4Panel& w, int64_t panels,
                 float* sums, int64_t sums_stride) {
  if (w.has_offsets) {
    Int4Block<T, /*CENTERED=*/false>(x, num_rows, w, panels, sums, sums_stride);
  } else {
    Int4Block<T, /*CENTERED=*/true>(x, num_rows, w, panels, sums, sums_stride);
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_INT4_H_
