// SPDX-License-Identifier: Apache-2.0

// Tiles of AMX, 16 rows of 64 bytes each. Included by inst/amx.cc inside its target region (isa.h).
//
// One instruction adds to [16 rows][16 columns] of sums the product of [16 rows][32] bf16 and
// [32 / 2][16 columns][2] bf16: of the even and of the odd elements on their own, then both.

#ifndef JAX_PAGED_CPU_ISA_TILES_H_
#define JAX_PAGED_CPU_ISA_TILES_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;
constexpr int64_t kTileFloats = 256;  // as many bytes as a tile has

// Has all written to memory, where the instructions of tiles read without the compiler's knowing.
JAX_PAGED_INLINE void Written(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// The shapes of the tiles, as the processor reads them.
struct alignas(64) TileShapes {
  uint8_t palette;
  uint8_t start_row;
  uint8_t unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "the processor reads so many bytes");

// Gives each tile so many rows of so many floats, until _tile_release; without rows it has none.
inline void ShapeEach(const int64_t (&rows)[8], const int64_t (&floats)[8]) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) {
    const bool is_used = rows[i] > 0 && floats[i] > 0;
    shapes.rows[i] = static_cast<uint8_t>(is_used ? rows[i] : 0);
    shapes.row_bytes[i] = static_cast<uint16_t>(is_used ? 4 * floats[i] : 0);
  }
  Written(&shapes);
  _tile_loadconfig(&shapes);
}

// Tiles 0 to 3 hold the sums of 4 and of 5, of `first` and `second` rows, times 6 and 7.
inline void ShapeTiles(int64_t first, int64_t second) {
  ShapeEach({first, first, second, second, first, second, kTileRows, kTileRows},
            {16, 16, 16, 16, 16, 16, 16, 16});
}

// The other way round: tiles 0 and 1 hold the sums of 4, of `outputs` rows, times 6 and 7, of which
// `first` and `second` columns are used.
inline void ShapeTransposed(int64_t outputs, int64_t first, int64_t second) {
  ShapeEach({outputs, outputs, 0, 0, outputs, 0, kTileRows, kTileRows},
            {first, second, 0, 0, 16, 0, first, second});
}

// The sums of one or two tiles of rows, `bytes` from a row to the next, times one or two of
// columns: tiles 0 to 3. One without rows must not be touched.
JAX_PAGED_INLINE void ZeroSums(bool two_rows, bool two_columns) {
  _tile_zero(0);
  if (two_columns) _tile_zero(1);
  if (two_rows) _tile_zero(2);
  if (two_rows && two_columns) _tile_zero(3);
}
JAX_PAGED_INLINE void LoadSums(bool two_rows, bool two_columns, const float* sums, int64_t bytes) {
  const float* const below = sums + kTileRows * (bytes / int64_t{sizeof(float)});
  _tile_loadd(0, sums, bytes);
  if (two_columns) _tile_loadd(1, sums + kTileRows, bytes);
  if (two_rows) _tile_loadd(2, below, bytes);
  if (two_rows && two_columns) _tile_loadd(3, below + kTileRows, bytes);
}
JAX_PAGED_INLINE void StoreSums(bool two_rows, bool two_columns, float* sums, int64_t bytes) {
  float* const below = sums + kTileRows * (bytes / int64_t{sizeof(float)});
  _tile_stored(0, sums, bytes);
  if (two_columns) _tile_stored(1, sums + kTileRows, bytes);
  if (two_rows) _tile_stored(2, below, bytes);
  if (two_rows && two_columns) _tile_stored(3, below + kTileRows, bytes);
}

// Adds to them the products of rows from x on, `x_bytes` from one to the next, and tiles w and w2.
JAX_PAGED_INLINE void AddTileProducts(bool two_rows, bool two_columns, const void* x,
                                      int64_t x_bytes, const void* w, const void* w2) {
  _tile_loadd(6, w, 64);
  _tile_loadd(4, x, x_bytes);
  _tile_dpbf16ps(0, 4, 6);
  if (two_columns) {
    _tile_loadd(7, w2, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (!two_rows) return;
  _tile_loadd(5, static_cast<const char*>(x) + kTileRows * x_bytes, x_bytes);
  _tile_dpbf16ps(2, 5, 6);
  if (two_columns) _tile_dpbf16ps(3, 5, 7);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ISA_TILES_H_
