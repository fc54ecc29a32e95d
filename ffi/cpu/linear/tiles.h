// SPDX-License-Identifier: Apache-2.0

// out = x w^T in bf16 by tiles (isa/tiles.h). Included by inst/amx.cc inside its target region
// (isa.h), after packed.h.
//
//   tile     [16 rows][32 of the depth] of x as it is; [32 / 2 of the depth][16 outputs][2] of w,
//            which is how packed w has it. Other w is put in this order, 8-bit codes as bf16
//   pass     up to 2 x 2 tiles of sums over a chunk of the depth, in registers
//   chunk    of the depth, so much that two panels of it stay in L1 while all rows of x pass
//
// Each sum is of 16 even and of 16 odd elements, added to the sum before: no number of rows or
// columns changes the order, so packed w or not, the bits are the same.
//
// Bound by reading w up to some hundred rows: what the next chunk needs comes in during each pass.

#ifndef JAX_PAGED_CPU_LINEAR_TILES_H_
#define JAX_PAGED_CPU_LINEAR_TILES_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int64_t kTilesChunk = 640;
constexpr int64_t kTilesRows = 512;  // of x, whose chunks stay in L2

// Floats from a row of x to the next: an odd number of cache lines, so that 16 rows lie in as many
// sets of L1.
inline int64_t TileStride(int64_t depth) { return RoundUp(depth / 2, 2 * kWidth) + kWidth; }

// What a pass multiplies.
struct TilePass {
  const float* x;
  int64_t x_bytes;    // from a row to the next
  const BFloat16* w;  // of the first panel
  const BFloat16* w2;
  int64_t steps;  // tiles of the depth
  const char* ahead;
  int64_t lines;  // that come in from there on
  float* sums;
  int64_t sums_bytes;  // from a row to the next
  bool adds;           // to what is there
};

// sums[rows, 16 or 32] (+)= x times w.
template <bool TWO_ROWS, bool TWO_PANELS>
void RunPass(const TilePass& pass) {
  if (pass.adds) {
    LoadSums(TWO_ROWS, TWO_PANELS, pass.sums, pass.sums_bytes);
  } else {
    ZeroSums(TWO_ROWS, TWO_PANELS);
  }
  const char* const x = reinterpret_cast<const char*>(pass.x);
  const char* ahead = pass.ahead;
  const char* const until = ahead + 64 * pass.lines;
  const int64_t rate = CeilDiv(pass.lines, pass.steps);
  for (int64_t i = 0; i < pass.steps; ++i) {
    for (int64_t j = 0; j < rate && ahead < until; ++j, ahead += 64) Prefetch(ahead);
    const int64_t at = i * kTileDepth * kPanelOutputs;
    AddTileProducts(TWO_ROWS, TWO_PANELS, x + i * 64, pass.x_bytes, pass.w + at, pass.w2 + at);
  }
  StoreSums(TWO_ROWS, TWO_PANELS, pass.sums, pass.sums_bytes);
}
inline void RunPass(bool two_rows, bool two_panels, const TilePass& pass) {
  if (two_rows) {
    two_panels ? RunPass<true, true>(pass) : RunPass<true, false>(pass);
  } else {
    two_panels ? RunPass<false, true>(pass) : RunPass<false, false>(pass);
  }
}

// A chunk of a panel of rows of w as tiles, zeros behind it. The last row stands for those from
// `count` on.
template <typename T>
void StageTiles(const T* w, int64_t w_stride, int64_t depth, int64_t count, BFloat16* to) {
  constexpr int64_t kAhead = 512 / int64_t{sizeof(T)};
  for (int64_t d = 0; d < depth; d += kTileDepth, to += kTileDepth * kPanelOutputs) {
    Vec rows[kPanelOutputs];
    JAX_PAGED_UNROLL
    for (int r = 0; r < kPanelOutputs; ++r) {
      const T* const from = w + (r < count ? r : count - 1) * w_stride + d;
      Prefetch(reinterpret_cast<const char*>(from + kAhead));
      rows[r] = LoadWords(from, depth - d);
    }
    Transpose(rows);
    JAX_PAGED_UNROLL
    for (int r = 0; r < kPanelOutputs; ++r) {
      Store(reinterpret_cast<float*>(to + r * 2 * kPanelOutputs), rows[r]);
    }
  }
}
// Two elements of the depth of a packed panel, side by side; codes lie 16 behind 16.
template <typename T>
JAX_PAGED_INLINE Vec LoadPackedPairs(const T* w) {
  const Vec words = LoadWords(w, 2 * kPanelOutputs);
  if constexpr (kSameType<T, BFloat16>) return words;
  const __m512i in_pairs =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(in_pairs, _mm512_castps_si512(words)));
}
// StageTiles of a packed panel.
template <typename T>
void StagePacked(const T* w, int64_t depth, BFloat16* staged) {
  const int64_t pairs = depth / 2, padded = RoundUp(depth, kTileDepth) / 2;
  float* to = reinterpret_cast<float*>(staged);
  for (int64_t i = 0; i < pairs; ++i, w += 2 * kPanelOutputs, to += kWidth) {
    Store(to, LoadPackedPairs(w));
  }
  for (int64_t i = pairs; i < padded; ++i, to += kWidth) Store(to, Zero());
}

// A call of TileSums. w is PACKED or rows.
template <typename T, bool PACKED>
struct TileCall {
  const float* x;
  int64_t x_stride;
  int64_t num_rows;
  const T* w;
  int64_t depth;
  int64_t count;
  const T* next;  // what the caller will ask for next, or null
  const LinearBlocks& blocks;
  float* sums;
  int64_t sums_stride;

  // Elements of the depth that a step of rows takes, and outputs. Up to 32 rows one panel is read
  // behind the other, a single stream.
  int64_t chunk() const {
    return blocks.scale ? kScaleBlock : LinearChunkDepth(depth, kTilesChunk);
  }
  int64_t columns() const { return (num_rows > 2 * kTileRows ? 2 : 1) * kPanelOutputs; }
  int64_t DepthFrom(int64_t d) const { return Clamp(depth - d, 0, chunk()); }

  // The tiles of the panel of outputs from n on, of the chunk from d on: in w, or in `staged`.
  const BFloat16* Panel(int64_t n, int64_t d, BFloat16* staged) const {
    const int64_t here = DepthFrom(d);
    if constexpr (PACKED) {
      const T* const panel = w + n * depth + d * kPanelOutputs;
      if constexpr (kSameType<T, BFloat16>) {
        if (here % kTileDepth == 0) return panel;
      }
      StagePacked(panel, here, staged);
    } else {
      StageTiles(w + n * depth + d, depth, here, Clamp(count - n, 1, kPanelOutputs), staged);
    }
    return staged;
  }

  // What is multiplied after outputs from n on of the chunk from d on, by `passes` passes.
  Fetch Ahead(int64_t n, int64_t d, int64_t passes, bool is_last) const {
    if (!PACKED) return {};
    const T* then = w + (n + columns()) * depth + d * kPanelOutputs;
    int64_t of_then = DepthFrom(d);
    if (n + columns() >= count) {
      d += of_then;
      of_then = DepthFrom(d);
      then = w + d * kPanelOutputs;
      if (d == depth) {
        then = is_last ? next : nullptr;
        of_then = DepthFrom(0);
      }
    }
    constexpr int64_t kBytes = kPanelOutputs * int64_t{sizeof(T)};
    return {reinterpret_cast<const char*>(then), then ? columns() / kPanelOutputs : 0,
            of_then * kBytes / 64, depth * kBytes, passes};
  }
};

// sums[r, n] = x[r] . w[n] for all rows of x and n < count, rounded up to whole panels; rows of
// sums are sums_stride apart.
template <typename T, bool PACKED>
void TileSums(const TileCall<T, PACKED>& call) {
  alignas(64) BFloat16 staged[2][kTilesChunk * kPanelOutputs];
  alignas(64) float part[4 * kTileFloats];
  int64_t shaped = 0;
  for (int64_t first = 0; first < call.num_rows; first += kTilesRows) {
    const int64_t last = Clamp(first + kTilesRows, 0, call.num_rows);
    for (int64_t d = 0; d < call.depth; d += call.chunk()) {
      for (int64_t n = 0; n < call.count; n += call.columns()) {
        const bool two_panels = call.columns() > kPanelOutputs && call.count - n > kPanelOutputs;
        TilePass pass = {};
        pass.x_bytes = call.x_stride * int64_t{sizeof(float)};
        pass.w = call.Panel(n, d, staged[0]);
        if (two_panels) pass.w2 = call.Panel(n + kPanelOutputs, d, staged[1]);
        pass.steps = CeilDiv(call.DepthFrom(d), kTileDepth);
        Written(staged);
        Fetch fetch = call.Ahead(n, d, CeilDiv(last - first, 2 * kTileRows), last == call.num_rows);
        for (int64_t r = first; r < last; r += 2 * kTileRows) {
          const int64_t rows = Clamp(last - r, 0, 2 * kTileRows);
          const int64_t upper = Clamp(rows, 0, kTileRows);
          if (shaped != rows) ShapeTiles(upper, rows - upper);
          shaped = rows;
          float* const to = call.sums + r * call.sums_stride + n;
          const int64_t columns = two_panels ? 2 * kPanelOutputs : kPanelOutputs;
          pass.x = call.x + r * call.x_stride + d / 2;
          pass.sums = call.blocks.scale ? part : to;
          pass.sums_bytes =
              (call.blocks.scale ? columns : call.sums_stride) * int64_t{sizeof(float)};
          pass.adds = d > 0 && !call.blocks.scale;
          pass.ahead = fetch.next;
          pass.lines = fetch.OfPass();
          RunPass(rows > kTileRows, two_panels, pass);
          Written(part);
          if (pass.lines > 0) fetch.Skip(pass.lines);
          if (!call.blocks.scale) continue;
          for (int64_t i = 0; i < rows * columns; i += kWidth) {
            float* const of_row = to + i / columns * call.sums_stride + i % columns;
            AddLinearChunk(Load(part + i), d, call.blocks, n + i % columns, of_row);
          }
        }
      }
    }
  }
  _tile_release();
}

// As LinearKernels wants it.
template <typename T, bool PACKED>
void TileSums(const float* x, int64_t x_stride, int64_t num_rows, const void* w, int64_t depth,
              int64_t count, const void* next, const LinearBlocks& blocks, float* /*panel*/,
              float* sums, int64_t sums_stride, const SumsDone& done) {
  TileSums<T, PACKED>({x, x_stride, num_rows, static_cast<const T*>(w), depth, count,
                       static_cast<const T*>(next), blocks, sums, sums_stride});
  done(0, num_rows, sums);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_TILES_H_
