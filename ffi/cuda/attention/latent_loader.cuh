// SPDX-License-Identifier: Apache-2.0

// The latent kernel's work and loads: which rows and tokens a CTA is at, and its tokens' way from
// their pages into the ring.

#ifndef JAX_PAGED_CUDA_ATTENTION_LATENT_LOADER_CUH_
#define JAX_PAGED_CUDA_ATTENTION_LATENT_LOADER_CUH_

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/latent_traits.h"
#include "cuda/attention/segment.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// What a CTA folds into one result: a segment, or a prefill unit.
struct LatentJob {
  Segment segment;
  UnitRows rows;
  int32_t begin;  // of the tokens that it reads, a multiple of kLatentTokens
  int32_t end;

  JAX_PAGED_DEVICE int32_t NumTiles() const {
    return end > begin ? CeilDiv<int32_t>(end - begin, kLatentTokens) : 0;
  }
};

JAX_PAGED_DEVICE KeyRange LatentKeys(const AttentionArgs& args, const LatentJob& job, int32_t row) {
  return VisibleKeys</*TREES_AND_PINS=*/false>(args, job.segment, job.rows, row);
}

// Brings a job's tokens into the ring, with all threads: warp w tokens 4 w to 4 w + 3 of a tile.
template <bool EIGHT_BIT>
class LatentLoader {
 public:
  static constexpr int32_t kWarpTokens = kLatentTokens / kLatentWarps;
  static constexpr int32_t kChunkElements = EIGHT_BIT ? 16 : 8;
  static constexpr int32_t kMaxChunks = kMaxLatentDim / kChunkElements;
  static constexpr int32_t kStageBytes = EIGHT_BIT ? kLatentStoredBytes : kLatentTileBytes;

  JAX_PAGED_DEVICE LatentLoader(const AttentionArgs& args, const LatentJob& job, Shared<char> ring,
                                Shared<uint32_t> masks)
      : job_(job),
        pages_(LayerPages(args, args.k_pages, args.k_strides)),
        ring_(ring),
        masks_(masks),
        next_(job.begin) {
    FindPage(args);
  }

  // Issues the next tile, if there is one, into `stage`, and commits a group in any case.
  JAX_PAGED_DEVICE void Issue(const AttentionArgs& args, int32_t stage) {
    if (next_ < job_.end) {
      CopyTile(args, stage);
      next_ += kLatentTokens;
      FindPage(args);
    }
    prim::CpAsyncCommit();
  }

 private:
  // Reads the page id for the tile that is loaded next: lane l looks for the warp's token l % 4.
  JAX_PAGED_DEVICE void FindPage(const AttentionArgs& args) {
    const int32_t token = next_ + prim::WarpIndex() * kWarpTokens + prim::LaneIndex() % kWarpTokens;
    page_id_ = -1;
    if (token >= job_.end || token < job_.segment.first_key) return;
    const int32_t index = args.by_page_size(token);
    slot_ = token - index * args.page_size;
    page_id_ = PageOf(args, job_.segment.row, index);
  }

  JAX_PAGED_DEVICE void CopyTile(const AttentionArgs& args, int32_t stage) {
    const int32_t lane = prim::LaneIndex();
    const bool exists = page_id_ >= 0 && page_id_ < args.num_pages;
    const int64_t offset = exists ? args.k_strides.Offset(page_id_, job_.rows.kv_head, slot_) : 0;
    const uint32_t mask = prim::Ballot(exists);
    if (lane == 0) prim::Store(masks_ + (stage * kLatentWarps + prim::WarpIndex()), mask);
    // A row is filled with zeros to a whole step of Q K^T.
    const int32_t row_chunks = args.head_dim / kChunkElements;
    const int32_t filled = RoundUp<int32_t>(args.head_dim, kLatentStep) / kChunkElements;
    const Shared<char> tile = ring_ + stage * kStageBytes;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kWarpTokens; ++i) {
      const int32_t row = prim::WarpIndex() * kWarpTokens + i;
      const Global<const char> source = pages_ + prim::Shuffle(offset, i);
      const bool has_row = mask >> i & 1;
      JAX_PAGED_UNROLL
      for (int32_t first = 0; first < kMaxChunks; first += kWarpLanes) {
        const int32_t chunk = first + lane;
        if (chunk >= filled) continue;
        const bool valid = has_row && chunk < row_chunks;
        const int32_t at = EIGHT_BIT ? row * kMaxLatentDim + chunk * 16 : LatentOffset(row, chunk);
        prim::CpAsync16(tile + at, source + (valid ? chunk * 16 : 0), valid);
      }
    }
  }

  const LatentJob& job_;
  Global<const char> pages_;
  Shared<char> ring_;
  Shared<uint32_t> masks_;
  int32_t next_;
  int32_t page_id_ = -1;
  int32_t slot_ = 0;
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LATENT_LOADER_CUH_
