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

// Tiles 0 to 3 hold the sums of 4 and of 5, of `first` and `second` rows, times 6 and 7. Until
// _tile_release.
inline void ShapeTiles(int64_t first, int64_t second) {
  TileShapes shapes = {};
  shapes.palette = 1;
  const int64_t rows[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(rows[i]);
    shapes.row_bytes[i] = rows[i] ? 64 : 0;
  }
  Written(&shapes);
  _tile_loadconfig(&shapes);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ISA_TILES_H_
