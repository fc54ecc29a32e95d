// SPDX-License-Identifier: Apache-2.0

// 4-bit w (int4.h) times bf16 x by tiles (isa/tiles.h). Included by inst/amx.cc inside its target
// region (isa.h), after int4.h and tiles.h.
//
// A chunk of a panel's codes becomes tiles of bf16, which stay in L1 while all rows of x pass. The
// sum of a group is one tile, or some, on its own; scales and offsets are applied as in int4.h.

#ifndef JAX_PAGED_CPU_LINEAR_INT4_TILES_H_
#define JAX_PAGED_CPU_LINEAR_INT4_TILES_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int64_t kGroupsAtOnce = 4;

// sums[rows, 16] (+)= the products of up to 16 rows of x and `count` groups from number `first` on,
// whose codes are in `staged`.
template <bool CENTERED>
void AddInt4Groups(const Int4Rows& x, int64_t row, int64_t rows, const Int4Panel& w, int64_t first,
                   int64_t count, const float* staged, float* sums, int64_t sums_stride) {
  alignas(64) float of_group[kGroupsAtOnce][kTileFloats];
  Vec scale[kGroupsAtOnce], offset[kGroupsAtOnce];
  const int64_t steps = w.group / kTileDepth;
  const float* from = x.data + row * x.stride + first * w.group / 2;
  for (int64_t g = 0; g < count; ++g) {
    _tile_zero(0);
    for (int64_t i = 0; i < steps; ++i, from += kWidth, staged += kTileFloats) {
      _tile_loadd(4, from, x.stride * int64_t{sizeof(float)});
      _tile_loadd(6, staged, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, of_group[g], 64);
    const int64_t at = (first + g) * (CENTERED ? 1 : 2) * kPanelOutputs;
    scale[g] = LoadScales(w, at);
    if (!CENTERED) offset[g] = LoadScales(w, at + kPanelOutputs);
  }
  Written(of_group);
  for (int64_t r = 0; r < rows; ++r) {
    float* const to = sums + r * sums_stride;
    const float* const x_sums = CENTERED ? nullptr : x.sums + (row + r) * w.num_groups + first;
    Vec all = first == 0 ? Zero() : Load(to);
    for (int64_t g = 0; g < count; ++g) {
      all = Fma(Load(of_group[g] + r * kPanelOutputs), scale[g], all);
      if (!CENTERED) all = Fma(Set1(x_sums[g]), offset[g], all);
    }
    Store(to, all);
  }
}

template <bool CENTERED>
void Int4TileBlock(const Int4Rows& x, int64_t num_rows, const Int4Panel& first_panel,
                   int64_t panels, float* sums, int64_t sums_stride) {
  alignas(64) float staged[kTilesChunk * kPanelOutputs / 2];
  const int64_t of_chunk = kTilesChunk / first_panel.group;  // groups
  int64_t shaped = 0;
  for (int64_t p = 0; p < panels; ++p) {
    const Int4Panel w = first_panel.Behind(p);
    for (int64_t first = 0; first < w.num_groups; first += of_chunk) {
      const int64_t groups = Clamp(w.num_groups - first, 0, of_chunk);
      StageInt4<BFloat16, CENTERED>(w.codes + first * w.group / 8 * kPanelOutputs, groups * w.group,
                                    staged);
      Written(staged);
      for (int64_t r = 0; r < num_rows; r += kTileRows) {
        const int64_t rows = Clamp(num_rows - r, 0, kTileRows);
        if (shaped != rows) ShapeTiles(rows, 0);
        shaped = rows;
        float* const to = sums + r * sums_stride + p * kPanelOutputs;
        for (int64_t g = 0; g < groups; g += kGroupsAtOnce) {
          AddInt4Groups<CENTERED>(x, r, rows, w, first + g, Clamp(groups - g, 0, kGroupsAtOnce),
                                  staged + g * w.group * kPanelOutputs / 2, to, sums_stride);
        }
      }
    }
  }
  _tile_release();
}

// Int4Sums by tiles, but of groups that are longer than a chunk.
inline void Int4TileSums(const Int4Rows& x, int64_t num_rows, const Int4Panel& w, int64_t panels,
                         float* /*panel*/, float* sums, int64_t sums_stride) {
  if (w.group > kTilesChunk) {
    FewInt4Sums<BFloat16>(x, num_rows, w, panels, sums, sums_stride);
  } else if (w.has_offsets) {
    Int4TileBlock</*CENTERED=*/false>(x, num_rows, w, panels, sums, sums_stride);
  } else {
    Int4TileBlock</*CENTERED=*/true>(x, num_rows, w, panels, sums, sums_stride);
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_INT4_TILES_H_
