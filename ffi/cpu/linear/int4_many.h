// SPDX-License-Identifier: Apache-2.0

// 4-bit w times many rows of x. Included by inst/<isa>.cc inside its target region (isa.h), after
// int4.h, whose bits it gives.
//
// There each tile of rows makes vectors of the codes. Here some panels are made so once, [panels]
// [steps][16 outputs], where a step is an element of the depth, or a pair of bf16. They stay in L2
// while all rows of x pass over them.

#ifndef JAX_PAGED_CPU_LINEAR_INT4_MANY_H_
#define JAX_PAGED_CPU_LINEAR_INT4_MANY_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int64_t kInt4ManyRows = 24;  // from which on it is worth it

// ROWS rows of x times PANELS panels, of which w is the first one, and `staged` their codes.
template <typename T, bool CENTERED, int ROWS, int PANELS>
void Int4ManyTile(const Int4Rows& x, int64_t row, const Int4Panel& w, const float* staged,
                  float* sums, int64_t sums_stride) {
  constexpr int kVecs = PANELS * kPanelVecs;
  const int64_t steps = w.group / kWordDepth<T>, of_panel = w.num_groups * steps * kPanelOutputs;
  const float* from_x = x.data + row * x.stride;
  for (int64_t g = 0; g < w.num_groups; ++g) {
    Vec sum[ROWS * kVecs];
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      JAX_PAGED_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[r * kVecs + v] = Zero();
    }
    for (int64_t s = 0; s < steps; ++s, ++from_x, staged += kPanelOutputs) {
      Vec loaded[kVecs];
      JAX_PAGED_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        loaded[v] = Load(staged + v / kPanelVecs * of_panel + v % kPanelVecs * kWidth);
      }
      AddProducts<T, ROWS, kVecs>(from_x, x.stride, loaded, sum);
    }
    AddInt4Group<CENTERED, ROWS, kVecs>(sum, x, row, w, g, sums, sums_stride);
  }
}

// Int4Block, with memory for the codes of all panels (Int4Kernels::PanelFloats).
template <typename T, bool CENTERED>
void Int4ManyBlock(const Int4Rows& x, int64_t num_rows, const Int4Panel& w, int64_t panels,
                   float* staged, float* sums, int64_t sums_stride) {
  const int64_t depth = w.num_groups * w.group;
  const int64_t of_panel = depth / kWordDepth<T> * kPanelOutputs;
  for (int64_t p = 0; p < panels; ++p) {
    StageInt4<T, CENTERED>(w.Behind(p).codes, depth, staged + p * of_panel);
  }
  const int64_t whole = num_rows / kPackedRows * kPackedRows;
  for (int64_t r = 0; r < whole; r += kPackedRows) {
    for (int64_t p = 0; p < panels;) {
      const int count = ManyPanels(panels - p);
      const auto multiply = count == 3   ? Int4ManyTile<T, CENTERED, kPackedRows, kThreePanels>
                            : count == 2 ? Int4ManyTile<T, CENTERED, kPackedRows, kTwoPanels>
                                         : Int4ManyTile<T, CENTERED, kPackedRows, 1>;
      multiply(x, r, w.Behind(p), staged + p * of_panel, sums + r * sums_stride + p * kPanelOutputs,
               sums_stride);
      p += count;
    }
  }
  if (whole == num_rows) return;
  const Int4Rows rest = {x.data + whole * x.stride, x.stride,
                         x.sums ? x.sums + whole * w.num_groups : nullptr};
  Int4Block<T, CENTERED>(rest, num_rows - whole, w, panels, sums + whole * sums_stride,
                         sums_stride);
}

// As Int4Kernels wants it.
template <typename T>
void Int4Sums(const Int4Rows& x, int64_t num_rows, const Int4Panel& w, int64_t panels, float* panel,
              float* sums, int64_t sums_stride) {
  if (num_rows < kInt4ManyRows) {
    FewInt4Sums<T>(x, num_rows, w, panels, sums, sums_stride);
  } else if (w.has_offsets) {
    Int4ManyBlock<T, /*CENTERED=*/false>(x, num_rows, w, panels, panel, sums, sums_stride);
  } else {
    Int4ManyBlock<T, /*CENTERED=*/true>(x, num_rows, w, panels, panel, sums, sums_stride);
  }
}

template <typename T>
constexpr Int4Kernels kInt4 = {LoadInt4Rows<T>, Int4Sums<T>, kInt4ManyRows, kWordDepth<T>,
                               /*always_sums=*/!kCentersInt4};

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_INT4_MANY_H_
