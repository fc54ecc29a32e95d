// SPDX-License-Identifier: Apache-2.0

// out = x w^T in bf16 by tiles, of few rows of x and plain w. Included by inst/amx.cc inside its
// target region (isa.h), after tiles.h, whose bits it gives.
//
// There w is the right factor, whose tiles have another order than plain w. Here the product is
// turned round: w is the left factor, whose tiles are 16 rows of w as they lie, and x is the right
// one, which is put in order instead. Sums are [16 outputs][rows of x], and are transposed at the
// end. A product has two factors in either order, so no sum changes.
//
//   chunk    of the depth: x is put in order for a chunk at a time
//   panel    16 rows of w: the next one comes in while this one is multiplied
//
// Bound by reading w.

#ifndef JAX_PAGED_CPU_LINEAR_FEW_TILES_H_
#define JAX_PAGED_CPU_LINEAR_FEW_TILES_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int64_t kFewTileRows = 2 * kTileRows;  // of x, at most

// `steps` tiles of x, [steps][16 pairs][rows], of rows that are x_stride apart.
inline void OrderTiles(const float* x, int64_t x_stride, int64_t rows, int64_t steps, float* to) {
  for (int64_t i = 0; i < steps; ++i, to += kTileRows * rows) {
    Vec of_rows[kWidth];
    for (int r = 0; r < kWidth; ++r) {
      of_rows[r] = r < rows ? Load(x + r * x_stride + i * kWidth) : Zero();
    }
    Transpose(of_rows);
    for (int64_t pair = 0; pair < kTileRows; ++pair) {
      alignas(64) float of_pair[kWidth];
      Store(of_pair, of_rows[pair]);
      __builtin_memcpy(to + pair * rows, of_pair, static_cast<size_t>(rows) * sizeof(float));
    }
  }
}

// One or two tiles of x, in order.
struct FewRows {
  int64_t rows;  // of a tile
  const float* data;
};

// What one panel of w is multiplied with.
struct FewCall {
  FewRows first, second;  // the second may have no rows
  int64_t outputs;
  int64_t depth;  // of the chunk
  bool adds;      // to `sums`
};

// sums[16 or two times 16][16] (+)= a chunk of a panel of w times x; the first index is of outputs.
template <typename T>
void FewPanel(const FewCall& call, const T* w, int64_t w_stride, const T* ahead, float* sums) {
  alignas(64) BFloat16 staged[kTileRows * kTileDepth];
  float* const more = sums + kTileFloats;
  const bool two = call.second.rows > 0;
  if (call.adds) {
    _tile_loadd(0, sums, 64);
    if (two) _tile_loadd(1, more, 64);
  } else {
    _tile_zero(0);
    if (two) _tile_zero(1);
  }
  const int64_t steps = CeilDiv(call.depth, kTileDepth);
  Fetch fetch = {reinterpret_cast<const char*>(ahead), ahead ? kPanelOutputs : 0,
                 CeilDiv(call.depth * int64_t{sizeof(T)}, 64), w_stride * int64_t{sizeof(T)},
                 /*passes=*/2 * steps};
  for (int64_t i = 0; i < steps; ++i) {
    for (int half = 0; half < 2; ++half) {  // as a pass ends where a row of w does
      fetch.BringIn();
    }
    const T* const from = w + i * kTileDepth;
    const int64_t rest = call.depth - i * kTileDepth;
    if (kSameType<T, BFloat16> && rest >= kTileDepth) {
      _tile_loadd(4, from, w_stride * int64_t{sizeof(T)});
    } else {  // codes, or an end behind which there are zeros
      for (int64_t r = 0; r < call.outputs; ++r) {
        Store(reinterpret_cast<float*>(staged + r * kTileDepth),
              LoadWords(from + r * w_stride, rest));
      }
      Written(staged);
      _tile_loadd(4, staged, 64);
    }
    _tile_loadd(6, call.first.data + i * kTileRows * call.first.rows, call.first.rows * 4);
    _tile_dpbf16ps(0, 4, 6);
    if (!two) continue;
    _tile_loadd(7, call.second.data + i * kTileRows * call.second.rows, call.second.rows * 4);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, 64);
  if (two) _tile_stored(1, more, 64);
  Written(sums);
}

// As RowSums has it, of at most kFewTileRows rows of x, and of at most kFewTileColumns columns.
template <typename T>
void FewTileBlock(const float* x, int64_t x_stride, int64_t num_rows, const T* w, int64_t depth,
                  int64_t count, const T* next, const LinearBlocks& blocks, float* sums,
                  int64_t sums_stride) {
  alignas(64) float ordered[2][kTilesChunk / 2 * kTileRows];
  alignas(64) float parts[kFewTileColumns / kPanelOutputs][2 * kTileFloats];
  const int64_t upper = Clamp(num_rows, 0, kTileRows), lower = num_rows - upper;
  const int64_t chunk = blocks.scale ? kScaleBlock : LinearChunkDepth(depth, kTilesChunk);
  int64_t shaped = 0;
  for (int64_t d = 0; d < depth; d += chunk) {
    const int64_t here = Clamp(depth - d, 0, chunk), steps = CeilDiv(here, kTileDepth);
    const bool is_last = d + here == depth;
    FewCall call = {{upper, ordered[0]}, {lower, ordered[1]}, 0, here, d > 0 && !blocks.scale};
    OrderTiles(x + d / 2, x_stride, upper, steps, ordered[0]);
    if (lower > 0) OrderTiles(x + kTileRows * x_stride + d / 2, x_stride, lower, steps, ordered[1]);
    Written(ordered);
    for (int64_t n = 0; n < count; n += kPanelOutputs) {
      float* const part = parts[n / kPanelOutputs];
      call.outputs = Clamp(count - n, 0, kPanelOutputs);
      if (call.outputs < kPanelOutputs && d == 0) {  // those behind them are zeros
        for (int64_t i = 0; i < 2 * kTileFloats; i += kWidth) Store(part + i, Zero());
        Written(part);
      }
      if (shaped != call.outputs) ShapeTransposed(call.outputs, upper, lower);
      shaped = call.outputs;
      const bool is_end = n + kPanelOutputs >= count;
      const T* const ahead = !is_end    ? w + (n + kPanelOutputs) * depth + d
                             : !is_last ? w + d + here
                                        : next;
      FewPanel<T>(call, w + n * depth + d, depth, ahead, part);
      if (!is_last && !blocks.scale) continue;
      for (int64_t r = 0; r < num_rows; r += kTileRows) {
        Vec of_rows[kWidth];
        for (int i = 0; i < kWidth; ++i) {
          of_rows[i] = Load(part + (r > 0 ? kTileFloats : 0) + i * kTileRows);
        }
        Transpose(of_rows);
        for (int64_t i = 0; i < kWidth && r + i < num_rows; ++i) {
          float* const to = sums + (r + i) * sums_stride + n;
          if (blocks.scale) {
            AddLinearChunk(of_rows[i], d, blocks, n, to);
          } else {
            Store(to, of_rows[i]);
          }
        }
      }
    }
  }
  _tile_release();
}

// The same of any number of columns.
template <typename T>
void FewTileSums(const float* x, int64_t x_stride, int64_t num_rows, const T* w, int64_t depth,
                 int64_t count, const T* next, const LinearBlocks& blocks, float* sums,
                 int64_t sums_stride) {
  for (int64_t n = 0; n < count; n += kFewTileColumns) {
    const bool is_last = count - n <= kFewTileColumns;
    const LinearBlocks of_block = {blocks.scale, blocks.stride, blocks.first_row + n};
    FewTileBlock(x, x_stride, num_rows, w + n * depth, depth, Clamp(count - n, 0, kFewTileColumns),
                 is_last ? next : w + (n + kFewTileColumns) * depth, of_block, sums + n,
                 sums_stride);
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_FEW_TILES_H_
