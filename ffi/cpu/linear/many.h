// SPDX-License-Identifier: Apache-2.0

// out = x w^T of many rows of x. Included by inst/<isa>.cc inside its target region (isa.h), after
// packed.h, whose leaves it sums, and whose bits it gives.
//
// There a leaf finds what it needs in every 16th line of w, and of each row of x. Here both sides
// are put in the order in which a tile reads them, so its inner loop goes from one line to the
// next:
//
//   w   some columns: [chunks][tiles][leaves][steps][panels of the tile][16 outputs]. All chunks of
//       the depth, or a run of them, stay in L2 while the rows of x pass
//   x   all of a tile of rows, chunk by chunk: [leaves][steps][kPitch]. Its chunk stays in L1 while
//       the panels pass. The caller puts it in order, once for all columns (OrderRows)
//
// A tile of rows meets all chunks of a run before the next tile comes, so that what they add to is
// still in L1: sums that go to memory and back cost most where neighbours use L3 too.
//
// Leaves come in SumOrder, which is its own inverse.
//
// Putting w in order takes as long as some five rows of x.

#ifndef JAX_PAGED_CPU_LINEAR_MANY_H_
#define JAX_PAGED_CPU_LINEAR_MANY_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// From so many rows on it is worth it. Of 8 bits, each tile of few rows makes floats anew: with
// AVX2 they come in half vectors, and fp8 takes longest.
template <typename T>
constexpr int64_t kManyRows = 64;
template <>
inline constexpr int64_t kManyRows<Int8> = kWidensSlowly || kWidth == 16 ? 64 : 32;
template <>
inline constexpr int64_t kManyRows<Float8E4M3> = kWidensSlowly ? 64 : (kWidth == 16 ? 48 : 32);
constexpr int64_t kManyPackedRows = 256;  // where packed w is only put in another order
constexpr int kPitch = kRowsOfOrder;  // floats from a step of x to the next; a tile has fewer rows
static_assert(kPackedRows <= kPitch && kWidth % kPitch == 0, "a vector has whole steps");

// Panels of the tile that begins where `left` are left: one of these, or 1.
constexpr int kThreePanels = kPackedPanels, kTwoPanels = kPackedPanels == 3 ? 2 : 1;
constexpr int ManyPanels(int64_t left) {
  if (kPackedPanels < 3) return 1;
  return left == 3 || left > 4 ? 3 : (left >= 2 ? 2 : 1);
}

// Vectors of kWidth rows of w, to one step of all leaves, of_leaf floats apart.
JAX_PAGED_INLINE void StoreStep(Vec* x, int64_t of_leaf, float* to) {
  Transpose(x);
  JAX_PAGED_UNROLL
  for (int leaf = 0; leaf < kWidth; ++leaf) Store(to + SumOrder(leaf) * of_leaf, x[leaf]);
}

// A chunk of `depth` of kWidth rows of plain w from row n on, of which there are `count`; the last
// one stands for those that the last panel lacks. A step of their tile has of_step floats.
template <typename T>
void OrderColumns(const T* w, int64_t w_stride, int64_t depth, int64_t n, int64_t count,
                  int64_t steps, int64_t of_step, float* to) {
  constexpr int64_t kAhead = 512 / int64_t{sizeof(T)};  // each row lies in a memory page of its own
  const T* rows[kWidth];
  JAX_PAGED_UNROLL
  for (int r = 0; r < kWidth; ++r) rows[r] = w + (n + r < count ? n + r : count - 1) * w_stride;
  for (int64_t d = 0; d < depth; to += of_step) {
    Vec x[kWidth];
    [[maybe_unused]] Vec odd[kWidth];
    const bool is_pair = kPaired<T> && !kUsesDot<T> && depth - d >= 2 * kWidth;
    JAX_PAGED_UNROLL
    for (int r = 0; r < kWidth; ++r) {
      Prefetch(reinterpret_cast<const char*>(rows[r] + d + kAhead));
      if constexpr (kUsesDot<T>) {
        x[r] = LoadWords(rows[r] + d, depth - d);
      } else if (is_pair) {
        const Pair pair = LoadPair(rows[r] + d);
        x[r] = pair.a;
        odd[r] = pair.b;
      } else {
        x[r] = LoadTail(rows[r] + d, depth - d);
      }
    }
    StoreStep(x, steps * of_step, to);
    if (is_pair) StoreStep(odd, steps * of_step, to += of_step);
    d += is_pair || kUsesDot<T> ? 2 * kWidth : kWidth;
  }
}

// The same of a panel of packed w.
template <typename T>
void OrderPanel(const T* w, int64_t depth, int64_t steps, int64_t of_step, float* panel) {
  constexpr int kSide = kPaired<T> ? 2 : 1;  // elements that lie side by side
  constexpr bool kSplits = kPaired<T> && !kUsesDot<T>;
  const auto step_of = [&](int64_t step, int64_t leaf) {
    return panel + (SumOrder(static_cast<int>(leaf)) * steps + step) * of_step;
  };
  for (int64_t d = 0; d < depth; d += kSide) {
    Vec x[kStepVecs<T> * kPanelVecs];
    LoadPanel(w + d * kPanelOutputs, kPanelVecs, x);
    const int64_t word = kUsesDot<T> ? d / 2 : d;
    const bool is_pair = kSplits && depth - d / (2 * kWidth) * (2 * kWidth) >= 2 * kWidth;
    for (int side = 0; side < kStepVecs<T>; ++side) {
      // Of whole pairs of vectors one has the even elements, as x has it.
      const int64_t step = is_pair ? d / (2 * kWidth) * 2 + side : (word + side) / kWidth;
      const int64_t leaf = is_pair ? d % (2 * kWidth) / 2 : (word + side) % kWidth;
      float* const to = step_of(step, leaf);
      JAX_PAGED_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) Store(to + v * kWidth, x[side * kPanelVecs + v]);
    }
  }
  for (int64_t word = depth / (kUsesDot<T> ? 2 : 1); word < steps * kWidth; ++word) {
    float* const to = step_of(steps - 1, word % kWidth);
    JAX_PAGED_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) Store(to + v * kWidth, Zero());
  }
}

// The same of all columns: plain w, or PACKED, from whose panel to the next are w_stride elements.
template <typename T, bool PACKED>
void OrderWeights(const T* w, int64_t w_stride, int64_t depth, int64_t count, int64_t steps,
                  float* to) {
  const int64_t num_panels = CeilDiv(count, kPanelOutputs);
  for (int64_t p = 0; p < num_panels;) {
    const int panels = ManyPanels(num_panels - p);
    const int64_t of_step = panels * kPanelOutputs;
    for (int64_t n = 0; n < of_step; n += PACKED ? kPanelOutputs : kWidth) {
      if constexpr (PACKED) {
        const T* const from = w + (p + n / kPanelOutputs) * w_stride;
        OrderPanel(from, depth, steps, of_step, to + n);
      } else {
        OrderColumns(w, w_stride, depth, p * kPanelOutputs + n, count, steps, of_step, to + n);
      }
    }
    to += kWidth * steps * of_step;
    p += panels;
  }
}

// A chunk of a tile of rows of x, zeros for those that it lacks.
inline void OrderChunk(const float* x, int64_t x_stride, int64_t rows, int64_t steps, float* to) {
  constexpr int kSteps = kWidth / kPitch;  // at a time
  for (int64_t s = 0; s < steps; s += kSteps) {
    Vec of_rows[kWidth];
    JAX_PAGED_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const int row = i % kPitch, step = i / kPitch;
      of_rows[i] =
          row < rows && s + step < steps ? Load(x + row * x_stride + (s + step) * kWidth) : Zero();
    }
    Transpose(of_rows);
    JAX_PAGED_UNROLL
    for (int leaf = 0; leaf < kWidth; ++leaf) {
      float* const step = to + (SumOrder(leaf) * steps + s) * kPitch;
      if (steps - s >= kSteps) {
        Store(step, of_rows[leaf]);
      } else {
        StoreTail(step, of_rows[leaf], kPitch);
      }
    }
  }
}

// Elements of the depth that a word of x has, which is a float or a pair of bf16; and elements that
// are summed before others are added.
template <typename T>
constexpr int kWordDepth = kUsesDot<T> ? 2 : 1;
template <typename T>
int64_t ManyChunkDepth(int64_t depth, bool has_blocks) {
  return has_blocks ? kScaleBlock : ChunkDepth<T>(depth);
}

// As LinearKernels wants it. Chunks have whole steps, so what lies behind the depth is zero.
template <typename T>
void OrderRows(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, bool has_blocks,
               float* tile) {
  const int64_t chunk = ManyChunkDepth<T>(depth, has_blocks);
  for (int64_t d = 0; d < depth; d += chunk) {
    const int64_t words = Clamp(depth - d, 0, chunk) / kWordDepth<T>, from = d / kWordDepth<T>;
    OrderChunk(x + from, x_stride, num_rows, CeilDiv(words, kWidth), tile + from * kPitch);
  }
}

// A tile: sums of kPackedRows rows of x and PANELS panels over one chunk.
template <typename T, int PANELS>
void ManyTile(const float* x, const float* w, int64_t steps, int64_t rows, int64_t d,
              const LinearBlocks& blocks, int64_t n, Fetch* fetch, float* sums,
              int64_t sums_stride) {
  constexpr int kVecs = PANELS * kPanelVecs;  // of a row
  Vec sum[kPackedRows * kVecs];
  LeafTree<kPackedRows, kVecs, kWidth> tree;
  for (int pass = 0; pass < kWidth; ++pass) {
    fetch->BringIn();
    JAX_PAGED_UNROLL
    for (int r = 0; r < kPackedRows; ++r) {
      JAX_PAGED_UNROLL
      for (int c = 0; c < kVecs; ++c) sum[r * kVecs + c] = Zero();
    }
    for (int64_t s = 0; s < steps; ++s, w += kVecs * kWidth, x += kPitch) {
      Vec loaded[kVecs];
      JAX_PAGED_UNROLL
      for (int c = 0; c < kVecs; ++c) loaded[c] = Load(w + c * kWidth);
      AddProducts<T, kPackedRows, kVecs>(x, /*x_stride=*/1, loaded, sum);
    }
    tree.Add(pass, sum);
  }
  StoreTile<kPackedRows, kVecs>(sum, rows, d, blocks, n, sums, sums_stride);
}

// A run of chunks of w in order, times all rows of x.
template <typename T>
struct ManyRun {
  const float* w;
  int64_t begin, end;  // of the depth
  int64_t chunk;
  int64_t columns;  // whole panels

  int64_t Depth(int64_t d) const { return Clamp(end - d, 0, chunk); }
  int64_t Steps(int64_t d) const { return CeilDiv(Depth(d) / kWordDepth<T>, kWidth); }
  int64_t Begins(int64_t d) const { return (d - begin) / kWordDepth<T> * columns; }
  // Of ManyTile, for each tile of rows.
  int64_t Passes() const {
    return CeilDiv(columns, kPackedPanels * kPanelOutputs) * CeilDiv(end - begin, chunk) * kWidth;
  }

  // Adds up the sums of a tile of `rows` rows of x.
  void Multiply(const float* x, int64_t rows, const LinearBlocks& blocks, Fetch* fetch, float* sums,
                int64_t sums_stride) const {
    for (int64_t d = begin; d < end; d += chunk) {
      const int64_t steps = Steps(d), left = columns / kPanelOutputs;
      const float* of_chunk = w + Begins(d);
      for (int64_t p = 0; p < left;) {
        const int panels = ManyPanels(left - p);
        const auto multiply = panels == 3   ? ManyTile<T, kThreePanels>
                              : panels == 2 ? ManyTile<T, kTwoPanels>
                                            : ManyTile<T, 1>;
        const int64_t n = p * kPanelOutputs;
        multiply(x + d / kWordDepth<T> * kPitch, of_chunk, steps, rows, d, blocks, n, fetch,
                 sums + n, sums_stride);
        of_chunk += panels * kPanelOutputs * kWidth * steps;
        p += panels;
      }
    }
  }
};

// As LinearKernels wants it, for w that is PACKED or plain.
template <typename T, bool PACKED>
void ManySums(const float* x, int64_t x_stride, int64_t num_rows, const void* weights,
              int64_t depth, int64_t count, const void* next, const LinearBlocks& blocks,
              float* panel, float* sums, int64_t sums_stride, const SumsDone& done) {
  constexpr int64_t kRows = PACKED ? kPanelOutputs : 1;  // of w that lie in one piece
  const T* const w = static_cast<const T*>(weights);
  const int64_t w_stride = kRows * depth, columns = RoundUp(count, kPanelOutputs);
  const int64_t chunk = ManyChunkDepth<T>(depth, blocks.scale);
  const int64_t at_once =
      chunk * ManyRunChunks(CeilDiv(depth, chunk), chunk / kWordDepth<T>, columns);
  for (int64_t d = 0; d < depth; d += at_once) {
    const ManyRun<T> run = {panel, d, Clamp(d + at_once, 0, depth), chunk, columns};
    for (int64_t c = d; c < run.end; c += chunk) {
      OrderWeights<T, PACKED>(w + c * kRows, w_stride, run.Depth(c), count, run.Steps(c),
                              panel + run.Begins(c));
    }
    const bool is_last = run.end == depth;
    const T* const then = is_last ? static_cast<const T*>(next) : w + run.end * kRows;
    const int64_t of_then = Clamp(is_last ? depth : depth - run.end, 0, at_once);
    Fetch fetch = {reinterpret_cast<const char*>(then), then ? CeilDiv(count, kRows) : 0,
                   CeilDiv(of_then * kRows * int64_t{sizeof(T)}, 64), w_stride * int64_t{sizeof(T)},
                   CeilDiv(num_rows, kPackedRows) * run.Passes()};
    for (int64_t r = 0; r < num_rows; r += kPackedRows) {
      const int64_t rows = Clamp(num_rows - r, 0, kPackedRows);
      float* const to = sums + (done.ends && at_once >= depth ? 0 : r * sums_stride);
      run.Multiply(x + r / kPackedRows * kPitch * x_stride, rows, blocks, &fetch, to, sums_stride);
      if (is_last) done(r, rows, to);
    }
  }
}

// The kernels where w has type W, whose panels become those of P, and load_rows brings x.
template <typename W, typename P = W>
constexpr LinearKernels KernelsOf(decltype(LinearKernels::load_rows) load_rows) {
  return {kUsesDot<W> ? WordStride : LinearStride,
          load_rows,
          OrderRows<W>,
          kPackedRows,
          kWordDepth<W>,
          LinearSums<W>,
          PackedSums<W, P>,
          ManySums<W, /*PACKED=*/false>,
          ManySums<W, /*PACKED=*/true>,
          kManyRows<W>,
          kManyPackedRows,
          /*read_as_it_lies=*/0,
          GateSums,
          StoreLinearSums,
          kWidensSlowly};
}

// Where w has x's dtype T, and where it is 8-bit, for each dtype of x.
template <typename T>
constexpr LinearKernels kSameWeights = KernelsOf<T>(LoadLinearRows<T>);
template <typename C, typename X>
constexpr LinearKernels kOfCodes = KernelsOf<C, float>(LoadPlainRows<X>);
template <typename C>
constexpr LinearKernelsOf kCodeWeights = {
    {kOfCodes<C, BFloat16>, kOfCodes<C, Float16>, kOfCodes<C, float>}};

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_MANY_H_
