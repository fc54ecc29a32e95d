// SPDX-License-Identifier: Apache-2.0

// The two grouped products of moe_experts on tensor cores (bf16, f16; experts of that dtype or
// 8-bit): gate and up, with h = activation(gate) * up, and down, with y. Experts' weights [rows,
// depth] are the A of mma.m16n8k16 (16 rows), tokens its B (8 tokens): with few tokens per expert,
// as in decode, little of a tile is padding.
//
// Grid: persistent CTAs of 4 warps; CTA c does items c, c + grid, ... An item is a tile of the plan
// (up to 64 pairs of one expert) and 128 rows of its weights; for gate and up those are 64 of each.
//   CTA    a step of 64 of the depth at a time, through a ring of stages filled by cp.async
//   warp   32 of the rows, in two sets of 16 (16 of gate and the same of up), and all tokens, 16 at
//          a time; blocks of 16 tokens that the tile does not have are left out
//   lane   rows l/4 and l/4 + 8 of both sets; of each 8 tokens the two at 2(l%4)
// Pipeline, per step: wait for the stage's cp.async; CTA barrier: the copies of all threads are
// there, and all warps are done with the stage of the step before; issue the step that is
// stages - 1 ahead into that one; multiply. The loader runs ahead into the next item, so the ring
// never drains. Rows, tokens and depth that do not exist are zeros in the ring and are not read.
//
// 8-bit weights: the ring holds the bytes; a lane widens what ldmatrix gives it in registers, which
// are 4 neighbours of the depth where mma wants two pairs 8 apart: x is read with the same change
// of order. Scales of outputs multiply the finished sums; then biases are added. Scales of blocks
// (kScaleBlock outputs and as much of the depth) multiply the sums of each stage, which lies in one
// block of the depth, as the rows of an item lie in one block of outputs (of gate, and of up).
//
// A sum runs through the depth in one order, whatever else is in its tile: a token gets the same
// bits in any batch.
//
// Shared memory: 3 stages of 24 KiB, 4 of 16 KiB with 8-bit weights. Bound by memory (each chosen
// expert's weights are read once per 64 of its tokens) up to some 64 tokens per expert.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_GEMM_CUH_
#define JAX_PAGED_CUDA_MOE_EXPERTS_GEMM_CUH_

#include <cstdint>
#include <type_traits>

#include "common/integers.h"
#include "cuda/expand_bytes.cuh"
#include "cuda/moe_experts/args.h"
#include "cuda/moe_experts/gated_unit.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kMoeThreads = 128;
inline constexpr int32_t kMoeSetRows = 16;   // one mma's
inline constexpr int32_t kMoeWarpRows = 32;  // two sets
inline constexpr int32_t kMoeRows = kMoeThreads / kWarpLanes * kMoeWarpRows;
inline constexpr int32_t kMoeDepth = 64;  // of a stage
static_assert(kScaleBlock % kMoeRows == 0 && kScaleBlock % kMoeDepth == 0, "one scale for a stage");

// A stage: kMoeRows rows of weights, then kMoeTokens tokens, each kMoeDepth elements long.
template <typename W>
struct MoeStage {
  static constexpr int32_t kRowBytes = kMoeDepth * static_cast<int32_t>(sizeof(W));
  static constexpr int32_t kRowChunks = kRowBytes / 16;
  static constexpr int32_t kTokenBytes = kMoeDepth * 2;
  static constexpr int32_t kTokenChunks = kTokenBytes / 16;
  static constexpr int32_t kTokensOffset = kMoeRows * kRowBytes;
  static constexpr int32_t kBytes = kTokensOffset + kMoeTokens * kTokenBytes;
  static constexpr int32_t kStages = sizeof(W) == 1 ? 4 : 3;
  static constexpr int32_t kSharedBytes = kStages * kBytes;
  // Elements of the depth that a chunk of weights holds.
  static constexpr int32_t kChunkDepth = 16 / static_cast<int32_t>(sizeof(W));

  // Chunks are permuted within 128 bytes, so that ldmatrix finds 8 rows in different banks; those
  // of tokens so that 4 rows do not meet either when lanes read 8 bytes each.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t RowOffset(int32_t row, int32_t chunk) {
    return row * kRowBytes + (chunk ^ (kRowChunks == 8 ? row & 7 : row >> 1 & 3)) * 16;
  }
  JAX_PAGED_HOST_DEVICE static constexpr int32_t TokenOffset(int32_t token, int32_t chunk) {
    return kTokensOffset + token * kTokenBytes +
           (chunk ^ ((token & 3) * 2 | (token >> 2 & 1))) * 16;
  }
};

// One product: gate and up (IS_GATED), or down.
template <bool IS_GATED>
struct MoeProduct {
  static constexpr int32_t kItemRows = IS_GATED ? kMoeRows / 2 : kMoeRows;  // of the result

  Global<const char> weights;
  Global<const float> scale;
  Global<const float> block_scale;
  MoeBiasArgs bias;
  int32_t num_rows;  // of the result
  int32_t depth;
  int32_t num_blocks;  // of kItemRows rows

  JAX_PAGED_HOST_DEVICE explicit MoeProduct(const MoeArgs& args)
      : weights(IS_GATED ? args.gate_up : args.down),
        scale(IS_GATED ? args.gate_up_scale : args.down_scale),
        block_scale(IS_GATED ? args.gate_up_block_scale : args.down_block_scale),
        bias(IS_GATED ? args.gate_up_bias : args.down_bias),
        num_rows(IS_GATED ? args.inner : args.hidden),
        depth(IS_GATED ? args.hidden : args.inner),
        num_blocks(CeilDiv<int32_t>(num_rows, kItemRows)) {}

  // Of the weights of all experts: where a row of an expert begins.
  JAX_PAGED_DEVICE int64_t WeightRow(int32_t expert, int32_t row) const {
    return int64_t{expert} * (IS_GATED ? 2 * num_rows : num_rows) + row;
  }

  // The scale of the block with a row of the result, of gate (part 0) or up (1), at a depth.
  JAX_PAGED_DEVICE float BlockScale(int32_t expert, int32_t part, int32_t row, int32_t at) const {
    const int32_t row_blocks = CeilDiv<int32_t>(num_rows, kScaleBlock);
    const int32_t block = (expert * (IS_GATED ? 2 : 1) + part) * row_blocks + row / kScaleBlock;
    const int64_t first = int64_t{block} * CeilDiv<int32_t>(depth, kScaleBlock);
    return prim::LoadConst(block_scale + (first + at / kScaleBlock));
  }
};

// A tile and a block of rows.
struct MoeItem {
  MoeTile tile;
  int32_t first_row;

  template <bool IS_GATED>
  JAX_PAGED_DEVICE MoeItem(const MoeArgs& args, const MoeProduct<IS_GATED>& product, int32_t item) {
    const int32_t index = item / product.num_blocks;
    tile = prim::LoadConst((args.tiles + index).template As<const MoeTile>());
    first_row = (item - index * product.num_blocks) * MoeProduct<IS_GATED>::kItemRows;
  }
};

// Brings weights and tokens into the ring.
template <typename W, bool IS_GATED>
class MoeLoader {
 public:
  using Stage = MoeStage<W>;

  JAX_PAGED_DEVICE MoeLoader(const MoeArgs& args, const MoeProduct<IS_GATED>& product,
                             int32_t num_items)
      : item_(prim::BlockIndex()), num_items_(num_items) {
    if (item_ < num_items_) Begin(args, product);
  }

  // Issues the next step, if there is one, into `stage`, and commits a group in any case.
  JAX_PAGED_DEVICE void Issue(const MoeArgs& args, const MoeProduct<IS_GATED>& product,
                              Shared<char> stage) {
    if (item_ < num_items_) {
      CopyWeights(product, stage);
      CopyTokens(args, product, stage);
      depth_ += kMoeDepth;
      if (depth_ >= product.depth) {
        item_ += prim::GridSize();
        if (item_ < num_items_) Begin(args, product);
      }
    }
    prim::CpAsyncCommit();
  }

 private:
  static constexpr int32_t kRowsAtOnce = kMoeThreads / Stage::kRowChunks;
  static constexpr int32_t kTokensAtOnce = kMoeThreads / Stage::kTokenChunks;
  static constexpr int32_t kTokenLoads = kMoeTokens / kTokensAtOnce;

  JAX_PAGED_DEVICE void Begin(const MoeArgs& args, const MoeProduct<IS_GATED>& product) {
    const MoeItem item(args, product, item_);
    depth_ = 0;
    first_row_ = item.first_row;
    expert_ = item.tile.expert;
    token_blocks_ = (item.tile.count + 15) / 16;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kTokenLoads; ++i) {
      const int32_t token = prim::ThreadIndex() / Stage::kTokenChunks + i * kTokensAtOnce;
      source_[i] = -1;
      if (token >= item.tile.count) continue;
      source_[i] = item.tile.first + token;
      if constexpr (IS_GATED) {
        const Global<const int32_t> pairs = args.pairs;
        source_[i] = prim::LoadConst(pairs + source_[i]) / args.experts_per_token;
      }
    }
  }

  JAX_PAGED_DEVICE void CopyWeights(const MoeProduct<IS_GATED>& product, Shared<char> stage) {
    const int32_t chunk = prim::ThreadIndex() % Stage::kRowChunks;
    const int32_t column = depth_ + chunk * Stage::kChunkDepth;
    const int64_t row_bytes = product.depth * int64_t{sizeof(W)};
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kMoeRows / kRowsAtOnce; ++i) {
      const int32_t row = prim::ThreadIndex() / Stage::kRowChunks + i * kRowsAtOnce;
      int32_t result = first_row_ + row;  // of the result
      if constexpr (IS_GATED) {
        result = first_row_ + row / kMoeWarpRows * kMoeSetRows + row % kMoeSetRows;
      }
      const bool is_up = IS_GATED && row / kMoeSetRows % 2 == 1;
      const int64_t from = product.WeightRow(expert_, is_up ? product.num_rows + result : result);
      prim::CpAsync16(stage + Stage::RowOffset(row, chunk),
                      product.weights + (from * row_bytes + column * int64_t{sizeof(W)}),
                      result < product.num_rows && column < product.depth);
    }
  }

  // Blocks of 16 tokens, down to zeros where the tile has none.
  JAX_PAGED_DEVICE void CopyTokens(const MoeArgs& args, const MoeProduct<IS_GATED>& product,
                                   Shared<char> stage) {
    const int32_t chunk = prim::ThreadIndex() % Stage::kTokenChunks;
    const int32_t column = depth_ + chunk * 8;
    const Global<const char> from = IS_GATED ? args.x : Global<const char>(args.h);
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kTokenLoads; ++i) {
      if (i * kTokensAtOnce >= token_blocks_ * 16) break;
      const int32_t token = prim::ThreadIndex() / Stage::kTokenChunks + i * kTokensAtOnce;
      const int64_t element = int64_t{source_[i]} * product.depth + column;
      prim::CpAsync16(stage + Stage::TokenOffset(token, chunk), from + element * 2,
                      source_[i] >= 0 && column < product.depth);
    }
  }

  int32_t item_;
  int32_t num_items_;
  int32_t depth_ = 0;  // of the step that comes next
  int32_t first_row_ = 0;
  int32_t expert_ = 0;
  int32_t token_blocks_ = 0;
  int32_t source_[kTokenLoads];  // rows of x or h; -1: none
};

// A warp's sums: of both sets of rows, for each 8 tokens.
struct MoeSums {
  float of[2][kMoeTokens / 8][4];

  JAX_PAGED_DEVICE void Clear() {
    JAX_PAGED_UNROLL
    for (int32_t set = 0; set < 2; ++set) {
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < kMoeTokens / 8; ++n) {
        of[set][n][0] = of[set][n][1] = of[set][n][2] = of[set][n][3] = 0.0f;
      }
    }
  }
};

// The weights of 32 of the depth as the A operand: two steps of 16, of both sets of rows.
template <typename T, typename W>
JAX_PAGED_DEVICE void LoadMoeWeights(Shared<char> stage, int32_t half, uint32_t (&a)[2][2][4]) {
  using Stage = MoeStage<W>;
  const int32_t lane = prim::LaneIndex();
  JAX_PAGED_UNROLL
  for (int32_t set = 0; set < 2; ++set) {
    const int32_t row = prim::WarpIndex() * kMoeWarpRows + set * kMoeSetRows + lane % 16;
    if constexpr (sizeof(W) == 1) {
      uint32_t bytes[4];  // rows l/4 and l/4 + 8 of the first step, then of the second
      prim::LoadMatrix(bytes, stage + Stage::RowOffset(row, 2 * half + lane / 16));
      JAX_PAGED_UNROLL
      for (int32_t step = 0; step < 2; ++step) {
        const Pairs upper = Expand<T>(bytes[2 * step], W());
        const Pairs lower = Expand<T>(bytes[2 * step + 1], W());
        a[step][set][0] = upper.low;
        a[step][set][1] = lower.low;
        a[step][set][2] = upper.high;
        a[step][set][3] = lower.high;
      }
    } else {
      JAX_PAGED_UNROLL
      for (int32_t step = 0; step < 2; ++step) {
        prim::LoadMatrix(a[step][set],
                         stage + Stage::RowOffset(row, 4 * half + 2 * step + lane / 16));
      }
    }
  }
}

// 16 tokens of step `step` of 16 of the depth as two B operands.
template <typename W>
JAX_PAGED_DEVICE void LoadMoeTokens(Shared<char> stage, int32_t step, int32_t block,
                                    uint32_t (&b)[4]) {
  using Stage = MoeStage<W>;
  const int32_t lane = prim::LaneIndex();
  if constexpr (sizeof(W) == 1) {  // 4 neighbours of the depth, as the weights have them
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      const int32_t offset =
          Stage::TokenOffset(block * 16 + n * 8 + lane / 4, 2 * step + lane % 4 / 2);
      const Word2 words = prim::Load((stage + (offset + lane % 2 * 8)).template As<Word2>());
      b[2 * n] = words.x;
      b[2 * n + 1] = words.y;
    }
  } else {
    const int32_t token = block * 16 + lane % 8 + lane / 16 * 8;
    prim::LoadMatrix(b, stage + Stage::TokenOffset(token, 2 * step + lane / 8 % 2));
  }
}

template <typename T, typename W>
JAX_PAGED_DEVICE void MultiplyMoeStage(Shared<char> stage, int32_t token_blocks, MoeSums* sums) {
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < kMoeDepth / 32; ++half) {
    uint32_t a[2][2][4];
    LoadMoeWeights<T, W>(stage, half, a);
    JAX_PAGED_UNROLL
    for (int32_t step = 0; step < 2; ++step) {
      JAX_PAGED_UNROLL
      for (int32_t block = 0; block < kMoeTokens / 16; ++block) {
        if (block >= token_blocks) break;
        uint32_t b[4];
        LoadMoeTokens<W>(stage, 2 * half + step, block, b);
        JAX_PAGED_UNROLL
        for (int32_t set = 0; set < 2; ++set) {
          prim::Mma<T>(sums->of[set][2 * block], a[step][set], b[0], b[1]);
          prim::Mma<T>(sums->of[set][2 * block + 1], a[step][set], b[2], b[3]);
        }
      }
    }
  }
}

// The same with 8-bit weights of which blocks have scales, where a stage is part of a block and all
// rows of a set are: the stage's sums are multiplied when they are added.
template <typename T, typename W>
JAX_PAGED_DEVICE void MultiplyMoeBlocks(Shared<char> stage, int32_t token_blocks,
                                        const float (&scale)[2], MoeSums* sums) {
  uint32_t a[2][2][2][4];
  LoadMoeWeights<T, W>(stage, 0, a[0]);
  LoadMoeWeights<T, W>(stage, 1, a[1]);
  JAX_PAGED_UNROLL
  for (int32_t block = 0; block < kMoeTokens / 16; ++block) {
    if (block >= token_blocks) break;
    float part[2][2][4] = {};
    JAX_PAGED_UNROLL
    for (int32_t step = 0; step < kMoeDepth / 16; ++step) {
      uint32_t b[4];
      LoadMoeTokens<W>(stage, step, block, b);
      JAX_PAGED_UNROLL
      for (int32_t set = 0; set < 2; ++set) {
        prim::Mma<T>(part[set][0], a[step / 2][step % 2][set], b[0], b[1]);
        prim::Mma<T>(part[set][1], a[step / 2][step % 2][set], b[2], b[3]);
      }
    }
    JAX_PAGED_UNROLL
    for (int32_t set = 0; set < 2; ++set) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 8; ++i) {
        float& sum = sums->of[set][2 * block + i / 4][i % 4];
        sum = prim::Fma(part[set][i / 4][i % 4], scale[set], sum);
      }
    }
  }
}

// The four sums of a lane (rows r and r + 8 of two tokens) as two rows that are neighbours, of one
// token, for r of both halves of 8: the lanes of rows 2i and 2i + 1 swap a token. All lanes of the
// warp take part.
struct MoeRowPairs {
  float of[2][2];  // [half][row]

  JAX_PAGED_DEVICE explicit MoeRowPairs(const float (&sums)[4]) {
    const bool is_odd = prim::LaneIndex() / 4 % 2 == 1;
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const float first = sums[2 * half], second = sums[2 * half + 1];
      const float kept = is_odd ? second : first;
      const float other = prim::ShuffleXor(is_odd ? first : second, 4);
      of[half][0] = is_odd ? other : kept;
      of[half][1] = is_odd ? kept : other;
    }
  }
};

// Stores an item's sums as h or y.
template <typename T, bool IS_GATED>
JAX_PAGED_DEVICE void StoreMoeItem(const MoeArgs& args, const MoeProduct<IS_GATED>& product,
                                   const MoeItem& item, MoeSums* sums) {
  const int32_t lane = prim::LaneIndex(), warp = prim::WarpIndex();
  const int32_t warp_row = item.first_row + warp * (IS_GATED ? kMoeSetRows : kMoeWarpRows);
  if (product.scale || product.bias.data) {
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t set = i / 2, half = i % 2;
      int32_t row = warp_row + lane / 4 + half * 8 + (IS_GATED ? 0 : set * kMoeSetRows);
      if (row >= product.num_rows) continue;
      if (IS_GATED && set == 1) row += product.num_rows;
      const int64_t at = product.WeightRow(item.tile.expert, row);
      const float scale = product.scale ? prim::LoadConst(product.scale + at) : 1.0f;
      const float bias = product.bias.data ? LoadMoeBias<T>(product.bias, at) : 0.0f;
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < kMoeTokens / 8; ++n) {
        JAX_PAGED_UNROLL
        for (int32_t i = 2 * half; i < 2 * half + 2; ++i) {
          sums->of[set][n][i] = prim::Fma(sums->of[set][n][i], scale, bias);
        }
      }
    }
  }
  const float limit = IS_GATED ? MoeLimit(args) : 0.0f;
  const int32_t pair_row = lane / 8 * 2;  // the first of the two rows that this lane stores
  JAX_PAGED_UNROLL
  for (int32_t n = 0; n < kMoeTokens / 8; ++n) {
    if (n * 8 >= item.tile.count) break;
    const int32_t token = n * 8 + lane % 4 * 2 + lane / 4 % 2;
    const bool is_token = token < item.tile.count;
    const int32_t sorted = item.tile.first + token;
    if constexpr (IS_GATED) {
      float h[4];
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        h[i] = GatedUnit(args.activation, limit, sums->of[0][n][i], sums->of[1][n][i]);
      }
      const MoeRowPairs rows(h);
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = warp_row + half * 8 + pair_row;
        if (!is_token || row >= product.num_rows) continue;
        const Global<char> to = args.h + (int64_t{sorted} * product.num_rows + row) * 2;
        prim::Store(to.template As<uint32_t>(),
                    prim::PackPair<T>(rows.of[half][0], rows.of[half][1]));
      }
    } else {
      const Global<const int32_t> pairs = args.pairs;
      const int64_t pair = is_token ? prim::LoadConst(pairs + sorted) : 0;
      JAX_PAGED_UNROLL
      for (int32_t set = 0; set < 2; ++set) {
        const MoeRowPairs rows(sums->of[set][n]);
        JAX_PAGED_UNROLL
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t row = warp_row + set * kMoeSetRows + half * 8 + pair_row;
          if (!is_token || row >= product.num_rows) continue;
          prim::Store((args.y + (pair * product.num_rows + row)).template As<Float2>(),
                      Float2{rows.of[half][0], rows.of[half][1]});
        }
      }
    }
  }
}

// T: bf16 or f16. W: T or an 8-bit type.
template <typename T, typename W, bool IS_GATED>
JAX_PAGED_DEVICE void MoeGemmCta(const MoeArgs& args) {
  using Stage = MoeStage<W>;
  const MoeProduct<IS_GATED> product(args);
  const Global<const int32_t> num_tiles = args.num_tiles;
  const int32_t num_items = prim::LoadConst(num_tiles) * product.num_blocks;
  const Shared<char> ring = prim::SharedMemory();
  MoeLoader<W, IS_GATED> loader(args, product, num_items);
  JAX_PAGED_UNROLL
  for (int32_t s = 0; s < Stage::kStages - 1; ++s) {
    loader.Issue(args, product, ring + s * Stage::kBytes);
  }
  int32_t stage = 0;
  for (int32_t i = prim::BlockIndex(); i < num_items; i += prim::GridSize()) {
    const MoeItem item(args, product, i);
    const int32_t token_blocks = (item.tile.count + 15) / 16;
    MoeSums sums;
    sums.Clear();
    for (int32_t depth = 0; depth < product.depth; depth += kMoeDepth) {
      prim::CpAsyncWait(Stage::kStages - 2);
      prim::SyncThreads();
      const int32_t before = stage == 0 ? Stage::kStages - 1 : stage - 1;
      loader.Issue(args, product, ring + before * Stage::kBytes);
      const Shared<char> now = ring + stage * Stage::kBytes;
      bool has_blocks = false;
      if constexpr (sizeof(W) == 1) {
        if (product.block_scale) {
          has_blocks = true;
          const int32_t expert = item.tile.expert, row = item.first_row;
          const float scale[2] = {product.BlockScale(expert, 0, row, depth),
                                  product.BlockScale(expert, IS_GATED ? 1 : 0, row, depth)};
          MultiplyMoeBlocks<T, W>(now, token_blocks, scale, &sums);
        }
      }
      if (!has_blocks) MultiplyMoeStage<T, W>(now, token_blocks, &sums);
      stage = stage == Stage::kStages - 1 ? 0 : stage + 1;
    }
    StoreMoeItem<T>(args, product, item, &sums);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_GEMM_CUH_
