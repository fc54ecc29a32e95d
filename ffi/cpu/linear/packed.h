// SPDX-License-Identifier: Apache-2.0

// out = x w^T where w is packed: panels of 16 outputs, [outputs / 16][depth][16], or with bf16
// [outputs / 16][depth / 2][16][2]. Included by inst/<isa>.cc inside its target region (isa.h),
// after kernel.h, whose bits it gives.
//
// There a vector of sums is of one output, lane l has every kWidth-th element of the depth, and
// SumEach adds the lanes. Here a vector is of 16 outputs, and lane l of theirs is a sum of its own,
// a leaf: leaves are summed one after another, or some at once, and added in the very tree of
// SumEach (SumOrder). So nothing is shuffled, and x comes as kernel.h has it.
//
//   tile   rows of x times panels, whose sums of one leaf, or of some, fill the registers. A panel
//          stays in L2, the tile's rows of x in L1
//   group  the panels of a tile: all rows of x pass over a chunk of it, while the next is fetched

#ifndef JAX_PAGED_CPU_LINEAR_PACKED_H_
#define JAX_PAGED_CPU_LINEAR_PACKED_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// A leaf's sums of a panel.
constexpr int kPanelVecs = kPanelOutputs / kWidth;
// The largest tile: rows of x, and panels.
constexpr int kPackedRows = kGemmRows;
constexpr int kPackedPanels = kWidth == 16 ? 3 : 1;

// Whether two elements of the depth lie side by side.
template <typename T>
constexpr bool kPaired = kSameType<T, BFloat16>;
// Elements of the depth, and vectors of x, that each step of all leaves takes.
template <typename T>
constexpr int kStepDepth = kPaired<T> ? 2 * kWidth : kWidth;
template <typename T>
constexpr int kStepVecs = kPaired<T> && !kUsesDot<T> ? 2 : 1;

// `count` codes (a multiple of kHalf * kPanelOutputs) as floats.
template <typename T>
void WidenPanel(const T* codes, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kWidth) Store(to + i, Load(codes + i));
}

// What a panel has for one step of a leaf: [kStepVecs][kPanelVecs], `stride` from one to the next.
template <typename T>
JAX_PAGED_INLINE void LoadPanel(const T* p, int stride, Vec* to) {
  JAX_PAGED_UNROLL
  for (int v = 0; v < kPanelVecs; ++v) {
    if constexpr (kUsesDot<T>) {
      to[v] = LoadWords(p + v * 2 * kWidth, 2 * kWidth);
    } else if constexpr (kPaired<T>) {
      const Pair x = LoadPair(p + v * 2 * kWidth);
      to[v] = x.a;
      to[stride + v] = x.b;
    } else {
      to[v] = Load(p + v * kWidth);
    }
  }
}

// sum[ROWS][VECS] += x.
template <int ROWS, int VECS>
JAX_PAGED_INLINE void AddSums(const Vec* x, Vec* sum) {
  JAX_PAGED_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    JAX_PAGED_UNROLL
    for (int c = 0; c < VECS; ++c) sum[r * VECS + c] = Add(sum[r * VECS + c], x[r * VECS + c]);
  }
}

// sum[ROWS][VECS] += x[ROWS] times a vector of w for each of VECS.
template <typename T, int ROWS, int VECS>
JAX_PAGED_INLINE void AddProducts(const float* x, int64_t x_stride, const Vec* w, Vec* sum) {
  JAX_PAGED_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    Vec of_row = Set1(x[r * x_stride]);
    if (VECS > 1) Pin(of_row);
    JAX_PAGED_UNROLL
    for (int c = 0; c < VECS; ++c) {
      sum[r * VECS + c] = MultiplyAdd<T>(of_row, w[c], sum[r * VECS + c]);
    }
  }
}

// One step of a leaf: w is what the panels have for it, x its lane.
template <typename T, int ROWS, int PANELS>
JAX_PAGED_INLINE void PanelStep(const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                                Vec* sum) {
  constexpr int kVecs = PANELS * kPanelVecs;
  Vec loaded[kStepVecs<T> * kVecs];
  JAX_PAGED_UNROLL
  for (int p = 0; p < PANELS; ++p) LoadPanel(w + p * w_stride, kVecs, loaded + p * kPanelVecs);
  JAX_PAGED_UNROLL
  for (int n = 0; n < kStepVecs<T>; ++n) {
    AddProducts<T, ROWS, kVecs>(x + n * kWidth, x_stride, loaded + n * kVecs, sum);
  }
}

// A step at the end, where the depth has but `rest` elements more, less than a step of all leaves;
// w: from there on. Returns whether the leaf has any.
template <typename T, int ROWS, int PANELS>
JAX_PAGED_INLINE void PanelRest(const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                                int64_t rest, int leaf, Vec* sum) {
  if constexpr (kUsesDot<T> || !kPaired<T>) {
    constexpr int kDepth = kStepDepth<T> / kWidth;  // of a leaf
    if (leaf * kDepth >= rest) return;
    PanelStep<T, ROWS, PANELS>(x, x_stride, w + leaf * kDepth * kPanelOutputs, w_stride, sum);
  } else {  // whose end is summed as floats are: one of two that lie side by side
    if (leaf >= rest) return;
    constexpr int kVecs = PANELS * kPanelVecs;
    Vec loaded[2 * kVecs];
    JAX_PAGED_UNROLL
    for (int p = 0; p < PANELS; ++p) {
      LoadPanel(w + p * w_stride + leaf / 2 * 2 * kPanelOutputs, kVecs, loaded + p * kPanelVecs);
    }
    AddProducts<T, ROWS, kVecs>(x, x_stride, loaded + leaf % 2 * kVecs, sum);
  }
}

// What comes in while something else is multiplied: `pieces` of so many lines, one `stride` bytes
// behind the other, spread evenly over `passes`.
struct Fetch {
  const char* next;
  int64_t pieces, lines, stride;
  int64_t passes = 0;
  int64_t done = 0;  // lines of the piece

  // Lines from `next` on that the next pass brings in.
  int64_t OfPass() {
    const int64_t left = pieces * lines - done;
    return left > 0 && passes > 0 ? Clamp(CeilDiv(left, passes--), 0, lines - done) : 0;
  }
  void Skip(int64_t count) {
    done += count;
    next += 64 * count;
    if (done < lines) return;
    next += stride - 64 * lines;
    done = 0;
    --pieces;
  }
  // Brings in what the next pass does, at once.
  JAX_PAGED_INLINE void BringIn() {
    const int64_t count = OfPass();
    for (int64_t i = 0; i < count; ++i) Prefetch(next + 64 * i);
    if (count > 0) Skip(count);
  }
};

// The sums of LEAVES leaves from `leaf` on (those that follow in SumOrder), over `depth`, added up.
// Brings in `lines` lines from `ahead` on, `rate` at each step.
template <typename T, int ROWS, int LEAVES, int PANELS>
JAX_PAGED_INLINE void PanelPass(const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                                int64_t depth, int leaf, const char* ahead, int64_t lines,
                                Vec* sum) {
  constexpr int kVecs = ROWS * PANELS * kPanelVecs;
  constexpr int64_t kStep = kStepDepth<T> / kWidth * kPanelOutputs;  // elements of w for a leaf
  const char* const until = ahead + 64 * lines;
  const int64_t rate = CeilDiv(lines * kStepDepth<T>, depth);
  JAX_PAGED_UNROLL
  for (int i = 0; i < LEAVES * ROWS; ++i) {
    JAX_PAGED_UNROLL
    for (int c = 0; c < PANELS * kPanelVecs; ++c) sum[i * PANELS * kPanelVecs + c] = Zero();
  }
  x += leaf;
  const T* from = w + leaf * kStep;
  int64_t d = 0;
  for (; d + kStepDepth<T> <= depth; d += kStepDepth<T>) {
    if (ahead < until) {
      for (int64_t i = 0; i < rate; ++i, ahead += 64) Prefetch(ahead);
    }
    JAX_PAGED_UNROLL
    for (int i = 0; i < LEAVES; ++i) {
      PanelStep<T, ROWS, PANELS>(x + SumOrder(i), x_stride, from + SumOrder(i) * kStep, w_stride,
                                 sum + i * kVecs);
    }
    x += kStepVecs<T> * kWidth;
    from += kStepDepth<T> * kPanelOutputs;
  }
  for (; d < depth; d += kUsesDot<T> ? kStepDepth<T> : kWidth, x += kWidth) {
    JAX_PAGED_UNROLL
    for (int i = 0; i < LEAVES; ++i) {
      PanelRest<T, ROWS, PANELS>(x + SumOrder(i), x_stride, w + d * kPanelOutputs, w_stride,
                                 depth - d, leaf + SumOrder(i), sum + i * kVecs);
    }
  }
  JAX_PAGED_UNROLL
  for (int more = 1; more < LEAVES; more *= 2) {
    JAX_PAGED_UNROLL
    for (int i = 0; i < LEAVES; i += 2 * more) {
      AddSums<ROWS, kVecs / ROWS>(sum + (i + more) * kVecs, sum + i * kVecs);
    }
  }
}

// Adds the sums of PASSES passes in the tree of SumEach.
template <int ROWS, int VECS, int PASSES>
struct LeafTree {
  // Sums of 1, 2, 4, ... passes that wait for as many more: the digits of a binary counter.
  static constexpr int kDigits = PASSES > 8 ? 4 : (PASSES > 4 ? 3 : (PASSES > 2 ? 2 : 1));
  Vec waiting[kDigits][ROWS * VECS];

  // After the last pass `sum` has all.
  JAX_PAGED_INLINE void Add(int pass, Vec* sum) {
    int digit = 0;
    for (; pass >> digit & 1; ++digit) AddSums<ROWS, VECS>(waiting[digit], sum);
    if (pass + 1 == PASSES) return;
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      JAX_PAGED_UNROLL
      for (int c = 0; c < VECS; ++c) waiting[digit][r * VECS + c] = sum[r * VECS + c];
    }
  }
};

// Stores the sums of a chunk that begins at depth d, of the first `rows` rows, or adds them to what
// is there.
template <int ROWS, int VECS>
JAX_PAGED_INLINE void StoreTile(const Vec* sum, int64_t rows, int64_t d, const LinearBlocks& blocks,
                                int64_t n, float* sums, int64_t sums_stride) {
  JAX_PAGED_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
    JAX_PAGED_UNROLL
    for (int c = 0; c < VECS; ++c) {
      const int64_t column = c * kWidth;
      AddLinearChunk(sum[r * VECS + c], d, blocks, n + column, sums + r * sums_stride + column);
    }
  }
}

// A tile: sums of ROWS rows of x and PANELS panels over one chunk, which begins at depth d; of the
// first `rows` rows they are stored or, where d > 0, added to what is there.
template <typename T, int ROWS, int LEAVES, int PANELS>
void PanelTile(const float* x, int64_t x_stride, int64_t rows, const T* w, int64_t w_stride,
               int64_t depth, int64_t d, const LinearBlocks& blocks, int64_t n, Fetch* fetch,
               float* sums, int64_t sums_stride) {
  constexpr int kVecs = PANELS * kPanelVecs;  // of a row
  constexpr int kPasses = kWidth / LEAVES;
  Vec sum[LEAVES * ROWS * kVecs];
  LeafTree<ROWS, kVecs, kPasses> tree;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int64_t lines = fetch->OfPass();
    PanelPass<T, ROWS, LEAVES, PANELS>(x, x_stride, w, w_stride, depth, SumOrder(pass * LEAVES),
                                       fetch->next, lines, sum);
    if (lines > 0) fetch->Skip(lines);
    tree.Add(pass, sum);
  }
  StoreTile<ROWS, kVecs>(sum, rows, d, blocks, n, sums, sums_stride);
}

// Sums that are in registers at once where one panel is read in long runs.
constexpr int kRunSums = kWidth == 16 ? 16 : 4;
template <int ROWS>
constexpr int kRunLeaves =
    kRunSums < ROWS ? 1 : (kRunSums / ROWS < kWidth ? kRunSums / ROWS : kWidth);

// Rows of the tile that begins where `rest` rows are left, at most `most`. Where that is 8, x has
// rows of zeros to fill it up (PadLinearRows).
inline int64_t PackedTileRows(int64_t rest, int64_t most) {
  if (rest >= most) return most;
  if (most == 8) return LinearTileRows(rest, 0);
  return rest >= 4 ? 4 : (rest >= 2 ? 2 : 1);
}

// Tiles of one panel. Fewer rows sum more leaves at once, so that the panel is read in long runs.
template <typename T>
void PanelRows(int64_t tile, const float* x, int64_t x_stride, int64_t rows, const T* w,
               int64_t depth, int64_t d, const LinearBlocks& blocks, int64_t n, Fetch* fetch,
               float* sums, int64_t sums_stride) {
  if (tile == kPackedRows) {
    PanelTile<T, kPackedRows, kRunLeaves<8>, 1>(x, x_stride, rows, w, /*w_stride=*/0, depth, d,
                                                blocks, n, fetch, sums, sums_stride);
  } else if (tile == 4) {
    PanelTile<T, 4, kRunLeaves<4>, 1>(x, x_stride, rows, w, /*w_stride=*/0, depth, d, blocks, n,
                                      fetch, sums, sums_stride);
  } else if (tile == 2) {
    PanelTile<T, 2, kRunLeaves<2>, 1>(x, x_stride, rows, w, /*w_stride=*/0, depth, d, blocks, n,
                                      fetch, sums, sums_stride);
  } else {
    PanelTile<T, 1, kRunLeaves<1>, 1>(x, x_stride, rows, w, /*w_stride=*/0, depth, d, blocks, n,
                                      fetch, sums, sums_stride);
  }
}

// Passes of a tile of so many rows over a panel.
inline int64_t PanelPasses(int64_t tile) {
  if (tile == kPackedRows) return kWidth / kRunLeaves<8>;
  return kWidth / (tile == 4 ? kRunLeaves<4> : (tile == 2 ? kRunLeaves<2> : kRunLeaves<1>));
}

// A chunk of the depth, that begins at d, for all rows of x and `count` columns. w: of the chunk.
template <typename T>
void PackedChunk(const float* x, int64_t x_stride, int64_t num_rows, const T* w, int64_t w_stride,
                 int64_t depth, int64_t d, int64_t count, const LinearBlocks& blocks, Fetch* fetch,
                 float* sums, int64_t sums_stride) {
  constexpr int64_t kGroup = kPackedPanels * kPanelOutputs;
  // Long runs cost loads of x: with more rows, or half the bytes, that is more than they save.
  const bool runs = num_rows <= (kPaired<T> ? 4 : 8);
  // L1 does not hold as many rows of x where they are long.
  const bool is_long = PartDepth<T, 8>(depth) < depth;
  const int64_t most = is_long && kPackedRows > 4 ? 4 : kPackedRows;
  constexpr int kLeavesOfFour = kWidth == 16 ? 2 : 1;
  const auto multiply = most < kPackedRows ? PanelTile<T, 4, kLeavesOfFour, kPackedPanels>
                                           : PanelTile<T, kPackedRows, 1, kPackedPanels>;
  const int64_t passes_of_group = kWidth / (most < kPackedRows ? kLeavesOfFour : 1);
  const int64_t panels = count / kPanelOutputs;
  fetch->passes = 0;
  for (int64_t r = 0; r < num_rows;) {
    const int64_t tile = PackedTileRows(num_rows - r, most);
    const int64_t groups = runs || tile < most ? 0 : panels / kPackedPanels;
    fetch->passes +=
        groups * passes_of_group + (panels - groups * kPackedPanels) * PanelPasses(tile);
    r += tile;
  }
  for (int64_t r = 0; r < num_rows;) {
    const float* const rows = x + r * x_stride;
    float* const to = sums + r * sums_stride;
    const int64_t tile = PackedTileRows(num_rows - r, most), used = Clamp(num_rows - r, 0, tile);
    for (int64_t n = 0; n < count;) {
      const T* const from = w + n / kPanelOutputs * w_stride;
      if (!runs && tile == most && count - n >= kGroup) {
        multiply(rows, x_stride, used, from, w_stride, depth, d, blocks, n, fetch, to + n,
                 sums_stride);
        n += kGroup;
      } else {
        PanelRows<T>(tile, rows, x_stride, used, from, depth, d, blocks, n, fetch, to + n,
                     sums_stride);
        n += kPanelOutputs;
      }
    }
    r += tile;
  }
}

// sums[r, n] = x[r] . w[n] for all rows of x and n < count, which is whole panels; `next` is what
// the caller will ask for next, or null. Rows of sums are sums_stride apart. `panel`: as for
// LinearSums.
template <typename T, typename P = T>
void PackedSums(const float* x, int64_t x_stride, int64_t num_rows, const void* weights,
                int64_t depth, int64_t count, const void* next, const LinearBlocks& blocks,
                float* panel, float* sums, int64_t sums_stride, const SumsDone& done) {
  const T* const w = static_cast<const T*>(weights);
  const int64_t w_stride = depth * kPanelOutputs;  // from a panel to the next
  const int64_t chunk = blocks.scale ? kScaleBlock : ChunkDepth<T>(depth);
  const int64_t panels = count / kPanelOutputs;
  for (int64_t d = 0; d < depth; d += chunk) {
    const int64_t here = depth - d < chunk ? depth - d : chunk;
    const T* const from = w + d * kPanelOutputs;
    const bool is_last = d + here == depth;
    const T* const then = is_last ? static_cast<const T*>(next) : from + here * kPanelOutputs;
    const int64_t of_then = is_last ? Clamp(depth, 0, chunk) : Clamp(depth - d - here, 0, chunk);
    Fetch fetch = {reinterpret_cast<const char*>(then), then ? panels : 0,
                   of_then * kPanelOutputs * int64_t{sizeof(T)} / 64,
                   w_stride * int64_t{sizeof(T)}};
    const float* const rows = x + (kUsesDot<T> ? d / 2 : d);
    if constexpr (!kSameType<T, P>) {
      if (num_rows > 8) {  // widened once for all tiles
        for (int64_t p = 0; p < panels; ++p) {
          WidenPanel(from + p * w_stride, here * kPanelOutputs, panel + p * here * kPanelOutputs);
        }
        PackedChunk<P>(rows, x_stride, num_rows, panel, here * kPanelOutputs, here, d, count,
                       blocks, &fetch, sums, sums_stride);
        continue;
      }
    }
    PackedChunk<T>(rows, x_stride, num_rows, from, w_stride, here, d, count, blocks, &fetch, sums,
                   sums_stride);
  }
  done(0, num_rows, sums);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_PACKED_H_
