// SPDX-License-Identifier: Apache-2.0

// The interface between the handlers of linear and moe_experts and the kernels of one instruction
// set.

#ifndef JAX_PAGED_CPU_LINEAR_KERNELS_H_
#define JAX_PAGED_CPU_LINEAR_KERNELS_H_

#include <cstdint>

#include "common/activations.h"
#include "common/dtypes.h"
#include "common/integers.h"
#include "cpu/attention/kernels.h"

namespace jax_paged::cpu {

inline constexpr int64_t kLinearDepth = 2560;  // of a chunk, at most
inline constexpr int64_t kLinearPart = 640;    // floats of a part of it, of 8 rows of x
inline constexpr int64_t kWordsPart = 768;     // the same of words
inline constexpr int64_t kLinearColumns = 16;  // columns per tile at most
inline constexpr int64_t kUnstagedRows = 8;    // of x, for which 8-bit w is multiplied as it lies

// Columns of w, rows of row_bytes, that one worker takes at once: as many as L2 holds, where there
// are bytes enough for all workers.
inline int64_t LinearBlockColumns(int64_t row_bytes, int64_t all_bytes = 0) {
  const int64_t bytes = Clamp(all_bytes / 16, 128 << 10, 512 << 10);
  return Clamp(bytes / row_bytes / kLinearColumns * kLinearColumns, kLinearColumns, 512);
}

// The chunks of a depth, or the parts of a chunk: equal ones of at most `most`.
inline int64_t LinearChunkDepth(int64_t depth, int64_t most) {
  return RoundUp(CeilDiv(depth, CeilDiv(depth, most)), kPadFloats);
}

// Packed weights: outputs of a panel, and of the panels of a tile.
inline constexpr int64_t kPanelOutputs = 16;
inline constexpr int64_t kPanelGroup = 3 * kPanelOutputs;

// Blocks of at most `most` columns, each of whole `unit`s: as many as leave the worker that has
// most of them least to do.
inline int64_t EvenBlockColumns(int64_t num_columns, int64_t most, int64_t unit, int64_t workers) {
  const int64_t fewest = CeilDiv(num_columns, most);
  int64_t best = unit, least = num_columns + unit;
  for (int64_t blocks = fewest; blocks <= 2 * fewest + workers; ++blocks) {
    const int64_t block = RoundUp(CeilDiv(num_columns, blocks), unit);
    const int64_t made = CeilDiv(num_columns, block), each = CeilDiv(made, workers);
    const int64_t last = num_columns - (made - 1) * block;  // may be a smaller one
    const int64_t load = (each - 1) * block + ((made - 1) % workers == 0 ? last : block);
    if (load >= least) continue;
    best = block;
    least = load;
    if (load <= CeilDiv(num_columns, workers)) break;
  }
  return best;
}

// Columns of packed w that one worker takes at once, while those of the next block come in. All of
// x passes over each block: where x does not stay in L2, blocks are as large as that holds.
inline int64_t PackedBlockColumns(int64_t num_columns, int64_t row_bytes, int64_t x_bytes,
                                  int64_t unit, int64_t workers) {
  constexpr int64_t kXBytes = 512 << 10, kBlockBytes = 768 << 10;
  if (x_bytes <= kXBytes) return kPanelGroup;
  const int64_t most =
      Clamp(kBlockBytes / row_bytes / kPanelGroup * kPanelGroup, kPanelGroup, 8 * kPanelGroup);
  return EvenBlockColumns(num_columns, most, unit, workers);
}

// The same of any w that is put in order for many rows of x (linear/many.h), whose depth has so
// many words: all of it is to fit a part of L2. The next block comes in beside it.
inline constexpr int64_t kManyFloats = (384 << 10) / sizeof(float);
inline int64_t ManyBlockColumns(int64_t num_columns, int64_t words, int64_t workers) {
  const int64_t most = Clamp(kManyFloats / words / kPanelOutputs, 3, 16) * kPanelOutputs;
  return EvenBlockColumns(num_columns, most, kPanelOutputs, workers);
}
// Where it does not: chunks of the depth, of so many words each, that are in order at once.
inline int64_t ManyRunChunks(int64_t chunks, int64_t words, int64_t columns) {
  const int64_t most = Clamp(kManyFloats / (words * columns), 1, chunks);
  return CeilDiv(chunks, CeilDiv(chunks, most));
}
inline constexpr int64_t kRowsOfOrder = 8;  // whose memory a tile of x in order takes

// The same of plain w that tiles read as it lies for few rows of x (linear/few_tiles.h).
inline constexpr int64_t kFewTileColumns = 256;

// Floats that `count` columns of a chunk of the depth are staged in.
inline int64_t LinearPanelFloats(int64_t depth, int64_t count) {
  return RoundUp(Clamp(depth, 0, kLinearDepth), kPadFloats) * count;
}

// Floats from a row of x to the next: so many that, modulo the 4 KiB after which L1's sets come
// again, a part of one row begins where that of the row before ends, and all sets are used alike.
inline int64_t RowStride(int64_t depth, int64_t most) {
  constexpr int64_t kPeriod = 4096 / sizeof(float);
  const int64_t stride = RoundUp(depth, kPadFloats);
  const int64_t part = LinearChunkDepth(LinearChunkDepth(depth, kLinearDepth / 2), most);
  return stride + (part + RoundUp(stride, kPeriod) - stride) % kPeriod;
}
inline int64_t LinearStride(int64_t depth) { return RowStride(depth, kLinearPart); }
// Where a float is a pair of bf16.
inline int64_t WordStride(int64_t depth) { return RowStride(depth / 2, kWordsPart); }

// Rows of the tile that starts at row0 of num_rows; the last one may reach beyond. Where a tile has
// one row at `most`, sums are ordered by rows.
inline int LinearTileRows(int64_t num_rows, int64_t row0, int64_t most = 8) {
  if (most == 1) return 1;
  const int64_t rest = num_rows - row0;
  return rest > 4 ? 8 : (rest > 2 ? 4 : static_cast<int>(rest));
}
inline int64_t PadLinearRows(int64_t num_rows) {
  int64_t rows = num_rows / 8 * 8;
  while (rows < num_rows) rows += LinearTileRows(num_rows, rows);
  return rows;
}

// Scales of blocks of rows of w, kScaleBlock of them and as much of the depth.
struct LinearBlocks {
  const float* scale;  // [blocks of rows, stride]; null: none
  int64_t stride;      // blocks of the depth
  int64_t first_row;   // of the rows of w that are given; a multiple of kLinearColumns

  float At(int64_t row, int64_t depth) const {
    return scale[(first_row + row) / kScaleBlock * stride + depth / kScaleBlock];
  }
};
static_assert(kScaleBlock % kLinearColumns == 0, "a tile has one scale");

// Those of matrix number `matrix` of some, [rows, depth] each; `scale` may be null.
inline LinearBlocks LinearBlocksOf(const float* scale, int64_t matrix, int64_t rows, int64_t depth,
                                   int64_t first_row) {
  const int64_t stride = CeilDiv(depth, kScaleBlock);
  const int64_t skipped = matrix * CeilDiv(rows, kScaleBlock) * stride;
  return {scale ? scale + skipped : nullptr, stride, first_row};
}

// What is to be done with rows of sums as soon as they are complete.
struct SumsDone {
  void (*call)(const void* context, int64_t row, int64_t num_rows, float* sums);  // null: nothing
  const void* context;
  bool ends;  // nobody asks for the sums afterwards: other rows may come in their place

  void operator()(int64_t row, int64_t num_rows, float* sums) const {
    if (call) call(context, row, num_rows, sums);
  }
};

// Sums by rows: x times `count` rows of w, rounded up to kPanelOutputs, each row of sums
// sums_stride behind the one before. `next` is the w that the caller will ask for next, or null.
using RowSums = void(const float* x, int64_t x_stride, int64_t num_rows, const void* w,
                     int64_t depth, int64_t count, const void* next, const LinearBlocks& blocks,
                     float* panel, float* sums, int64_t sums_stride, const SumsDone& done);

// For one dtype of x and one of w; linear/kernel.h explains the arguments.
struct LinearKernels {
  int64_t (*stride)(int64_t depth);  // floats from a row of x to the next
  void (*load_rows)(const void* x, int64_t begin, int64_t end, int64_t num_rows, int64_t depth,
                    float* rows, int64_t x_stride);
  // Puts up to tile_rows rows of x in the order in which the kernels of many rows read them: a tile
  // takes as many floats as kRowsOfOrder rows do.
  void (*order_rows)(const float* rows, int64_t x_stride, int64_t num_rows, int64_t depth,
                     bool has_blocks, float* tile);
  int64_t tile_rows;
  int64_t word_depth;  // elements of the depth in a float of x
  // Of few rows of x and plain w: sums by tiles of at most 8 rows.
  void (*few_plain)(const float* x, int64_t x_stride, int64_t num_rows, const void* w,
                    int64_t depth, int64_t count, const LinearBlocks& blocks, float* panel,
                    float* sums);
  RowSums* few_packed;  // packed: null where there is no such kernel
  RowSums* many_plain;
  RowSums* many_packed;
  int64_t many;             // rows of x, from which on these are faster
  int64_t many_of_packed;   // because packed w is nearly in order already
  int64_t read_as_it_lies;  // rows of x, up to which many_plain needs no other order of w
  bool AreMany(bool is_packed, int64_t num_rows) const {
    return num_rows >= (is_packed ? many_of_packed : many);
  }
  // Whether x is to be put in order, and rows of memory that it takes.
  bool Orders(bool is_packed, int64_t num_rows) const {
    return many > 0 && AreMany(is_packed, num_rows);
  }
  int64_t PaddedRows(bool is_packed, int64_t num_rows) const {
    if (!Orders(is_packed, num_rows)) return PadLinearRows(num_rows);
    return CeilDiv(num_rows, tile_rows) * kRowsOfOrder;
  }
  // Those that give sums by rows; null: few_plain is to be used.
  RowSums* ByRows(bool is_packed, int64_t num_rows) const {
    if (AreMany(is_packed, num_rows)) return is_packed ? many_packed : many_plain;
    return is_packed ? few_packed : nullptr;
  }
  // Rows in a tile of sums, at most.
  int64_t Most(bool is_packed, int64_t num_rows) const {
    return ByRows(is_packed, num_rows) ? 1 : 8;
  }
  // Whether 8-bit w becomes floats, or words, before it is multiplied.
  bool Stages(bool is_packed, Dtype w_dtype, int64_t num_rows) const {
    return IsEightBit(w_dtype) && (is_packed || (stages_plain && num_rows > kUnstagedRows));
  }
  // Bytes of a row of w as the tiles of x find it.
  int64_t RowBytes(bool is_packed, Dtype w_dtype, int64_t num_rows, int64_t depth) const {
    const bool are_floats = num_rows > kUnstagedRows && Stages(is_packed, w_dtype, num_rows);
    return depth * (are_floats ? int64_t{sizeof(float)} : ByteWidth(w_dtype));
  }
  // Floats in which so many columns of w are staged or put in order.
  int64_t PanelFloats(bool is_packed, Dtype w_dtype, int64_t num_rows, int64_t depth,
                      int64_t columns) const {
    const bool orders = Orders(is_packed, num_rows);
    if (!orders && !Stages(is_packed, w_dtype, num_rows)) return 0;
    const int64_t of_chunk = LinearPanelFloats(depth, columns);
    const int64_t of_run = RoundUp(CeilDiv(depth, word_depth), kPadFloats) * columns;
    return orders && of_chunk < kManyFloats ? Clamp(of_run, of_chunk, kManyFloats) : of_chunk;
  }
  // As Most says; rows of sums have whole panels. `next` as RowSums has it.
  void Sums(bool is_packed, const float* x, int64_t x_stride, int64_t num_rows, const void* w,
            int64_t depth, int64_t count, const void* next, const LinearBlocks& blocks,
            float* panel, float* sums) const {
    if (RowSums* const by_rows = ByRows(is_packed, num_rows)) {
      by_rows(x, x_stride, num_rows, w, depth, count, next, blocks, panel, sums,
              RoundUp(count, kLinearColumns), /*done=*/{});
    } else {
      few_plain(x, x_stride, num_rows, w, depth, count, blocks, panel, sums);
    }
  }
  // Columns of w, of `num_columns`, that one of so many workers takes at once, and the same ones of
  // `parts` matrices; the call has so many times that.
  int64_t BlockColumns(bool is_packed, Dtype w_dtype, int64_t num_rows, int64_t num_columns,
                       int64_t depth, int64_t workers, int64_t parts, int64_t times) const {
    const int64_t row_bytes = parts * RowBytes(is_packed, w_dtype, num_rows, depth);
    if (Orders(is_packed, num_rows)) {
      return ManyBlockColumns(num_columns, CeilDiv(depth, word_depth), workers);
    }
    if (!ByRows(is_packed, num_rows)) {
      const int64_t most = LinearBlockColumns(row_bytes, times * num_columns * row_bytes);
      return EvenBlockColumns(num_columns, most, kLinearColumns, /*workers=*/1);
    }
    if (!is_packed && num_rows <= read_as_it_lies) {
      return EvenBlockColumns(num_columns, kFewTileColumns, kPanelOutputs, workers);
    }
    const int64_t unit = many > 0 ? kPanelGroup : kPanelOutputs;
    const int64_t x_bytes = num_rows * depth * int64_t{sizeof(float)};
    return PackedBlockColumns(num_columns, row_bytes, x_bytes, unit, workers);
  }
  void (*gate)(Activation activation, float limit, const float* up, int64_t count, float* gate);
  void (*store)(const float* sums, int64_t num_rows, int64_t most, int64_t count,
                int64_t out_stride, Dtype dtype, void* out);
  bool stages_plain = false;  // few_plain makes floats of 8-bit w once for all rows of x
};

// Rows of x, times 4-bit weights.
struct Int4Rows {
  const float* data;
  int64_t stride;
  const float* sums;  // of their groups, [rows, groups]; null: the kernels need none (GroupSums)
};

// A panel of 4-bit weights (linear/int4.h), of which others follow.
struct Int4Panel {
  const uint32_t* codes;  // [depth / 8, 16]
  const void* scales;     // [groups, 16], or with offsets [groups, 2, 16]
  int64_t scales_bytes;   // of a panel
  int64_t group;          // elements of the depth that have a scale
  int64_t num_groups;
  bool has_half_scales;  // f16, else f32
  bool has_offsets;

  Int4Panel Behind(int64_t panels) const {
    Int4Panel panel = *this;
    panel.codes += panels * num_groups * group / 8 * kPanelOutputs;
    panel.scales = static_cast<const char*>(scales) + panels * scales_bytes;
    return panel;
  }
};

// For one dtype of x.
struct Int4Kernels {
  void (*load_rows)(const void* x, int64_t begin, int64_t end, int64_t depth, int64_t group,
                    float* rows, int64_t x_stride, float* sums);
  void (*sums)(const Int4Rows& x, int64_t num_rows, const Int4Panel& w, int64_t panels,
               float* panel, float* sums, int64_t sums_stride);
  int64_t many;        // rows of x, from which on `sums` needs memory for its panels; 0: never
  int64_t word_depth;  // elements of the depth in a float of x
  bool always_sums;    // needs the sums of groups of x where w has no offsets, too

  // Sums of a row of x that are needed.
  int64_t GroupSums(const Int4Panel& w) const {
    return always_sums || w.has_offsets ? w.num_groups : 0;
  }
  // Floats of it for each panel.
  int64_t PanelFloats(int64_t num_rows, int64_t depth) const {
    return many > 0 && num_rows >= many ? depth / word_depth * kPanelOutputs : 0;
  }
  // Panels whose codes, of so many floats, L2 holds.
  static int64_t PanelsInL2(int64_t panel_floats) {
    constexpr int64_t kFloats = (512 << 10) / sizeof(float);
    return Clamp(kFloats / panel_floats, 1, kFloats);
  }
};

// sums *= scale[n], for `count` columns n of num_rows rows, `most` in a tile.
inline void ScaleLinearSums(const float* scale, int64_t num_rows, int64_t most, int64_t count,
                            float* sums) {
  const int64_t padded = RoundUp(count, kLinearColumns);
  for (int64_t begin = 0; begin < num_rows;) {
    const int tile = LinearTileRows(num_rows, begin, most);
    float* const to = sums + begin * padded;
    for (int64_t n = 0; n < count; ++n) {
      for (int r = 0; r < tile; ++r) to[n * tile + r] *= scale[n];
    }
    begin += tile;
  }
}

// sums += bias[n], for the same.
template <typename T>
void AddLinearBias(const T* bias, int64_t num_rows, int64_t most, int64_t count, float* sums) {
  const int64_t padded = RoundUp(count, kLinearColumns);
  for (int64_t begin = 0; begin < num_rows;) {
    const int tile = LinearTileRows(num_rows, begin, most);
    float* const to = sums + begin * padded;
    for (int64_t n = 0; n < count; ++n) {
      const float addend = ToFloat(bias[n]);
      for (int r = 0; r < tile; ++r) to[n * tile + r] += addend;
    }
    begin += tile;
  }
}
inline void AddLinearBias(const void* bias, Dtype dtype, int64_t num_rows, int64_t most,
                          int64_t count, float* sums) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return AddLinearBias(static_cast<const BFloat16*>(bias), num_rows, most, count, sums);
    case Dtype::kFloat16:
      return AddLinearBias(static_cast<const Float16*>(bias), num_rows, most, count, sums);
    case Dtype::kFloat32:
      return AddLinearBias(static_cast<const float*>(bias), num_rows, most, count, sums);
    default:  // 8-bit: not a dtype of biases
      return;
  }
}

// By the dtype of x.
struct LinearKernelsOf {
  LinearKernels of[kNumDtypes];
};

struct LinearKernelTable {
  LinearKernelsOf same;  // where w has x's dtype
  LinearKernelsOf int8;
  LinearKernelsOf fp8;  // E4M3
  Int4Kernels int4[kNumDtypes];

  const LinearKernels& Of(Dtype x, Dtype w) const {
    const LinearKernelsOf& kernels =
        w == Dtype::kInt8 ? int8 : (w == Dtype::kFloat8E4M3 ? fp8 : same);
    return kernels.of[static_cast<int>(x)];
  }
};

// Whether this processor reads four rows of w at a time faster than one after the other.
bool ReadsManyStreams();
// How many bytes ahead it fetches a row of bf16 that it multiplies as words.
int64_t WordsAhead();

const LinearKernelTable& GenericLinearKernels();
#ifndef JAX_PAGED_GENERIC_ONLY
const LinearKernelTable& Avx2LinearKernels();
const LinearKernelTable& Avx512LinearKernels();
const LinearKernelTable& Avx512Bf16LinearKernels();
const LinearKernelTable& AmxLinearKernels();
#endif

// Those of the instruction set in use (ChosenKernels).
const LinearKernelTable& ChosenLinearKernels();

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_LINEAR_KERNELS_H_
