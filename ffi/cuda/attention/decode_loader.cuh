// SPDX-License-Identifier: Apache-2.0

// The decode kernel's loads: K and V of a warp, from their pages into the warp's ring, for the
// three kinds of pages.

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_LOADER_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_LOADER_CUH_

#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Brings a warp's K and V into its ring.
template <int HEAD_DIM, PageKind PAGES>
class DecodeLoader {
 public:
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  static constexpr bool kIsVllm5d = PAGES == PageKind::kVllm5d;

  JAX_PAGED_DEVICE DecodeLoader(const AttentionArgs& args, const WorkRange& range,
                                const Segment& first, Shared<char> ring,
                                Shared<uint32_t> token_masks)
      : segment_(first),
        k_(LayerPages(args, args.k_pages, args.k_strides)),
        v_(LayerPages(args, args.v_pages, args.v_strides)),
        layer_(PAGES == PageKind::kEightBit ? prim::LoadConst(args.layer) : 0),
        ring_(ring),
        token_masks_(token_masks),
        one_page_(args.page_size % kWarpTokens == 0),
        has_tile_(range.begin < range.end) {
    kv_head_ = RowsOf(args, segment_).kv_head;
    FindPage(args);
  }

  // Issues the next tile, if there is one, into `stage`, and commits a group in any case.
  JAX_PAGED_DEVICE void Issue(const AttentionArgs& args, const WorkRange& range, int32_t stage) {
    if (has_tile_) {
      CopyTile(args, stage);
      if (++tile_ == segment_.num_tiles) {
        tile_ = 0;
        has_tile_ = NextSegment<Traits::kTakesTreesAndPins>(args, range, &segment_);
        kv_head_ = RowsOf(args, segment_).kv_head;
      }
      FindPage(args);
    }
    prim::CpAsyncCommit();
  }

 private:
  JAX_PAGED_DEVICE int32_t FirstToken(const AttentionArgs& args) const {
    return TileToken<Traits::kTakesTreesAndPins>(args, segment_, tile_) +
           prim::WarpIndex() * kWarpTokens;
  }

  // Reads the page id for the tile that is loaded next. Lane l looks for token l % 16; where pages
  // hold a multiple of 16 tokens all tokens are in one page, and all lanes look for the first.
  // kVllm5d: where they hold a multiple of 8, lane l looks for the first of the 8 of token l % 16.
  JAX_PAGED_DEVICE void FindPage(const AttentionArgs& args) {
    const int32_t lane_token = prim::LaneIndex() % kWarpTokens;
    const int32_t token = FirstToken(args) + (kIsVllm5d   ? lane_token / 8 * 8
                                              : one_page_ ? 0
                                                          : lane_token);
    page_id_ = -1;
    if (!has_tile_ || token >= segment_.lengths.seq_len) return;
    const int32_t index = args.by_page_size(token);
    slot_ = token - index * args.page_size;
    page_id_ = PageOf(args, segment_.row, index);
  }

  JAX_PAGED_DEVICE void CopyTile(const AttentionArgs& args, int32_t stage) {
    const int32_t lane = OpaqueLane();
    const bool has_page = page_id_ >= 0 && page_id_ < args.num_pages;
    const int32_t token = FirstToken(args) + lane % kWarpTokens;
    const bool has_token = has_page && IsRead<Traits::kTakesTreesAndPins>(args, segment_, token);
    const uint32_t mask = prim::Ballot(has_token) & 0xffffu;
    if constexpr (PAGES == PageKind::kVllm5d) {
      if (lane == 0) prim::Store(token_masks_ + stage, mask);
      CopyAtoms(args, stage, lane, has_page && (token | 7) >= segment_.first_key, has_token);
      return;
    }
    const int64_t k_offset = has_page ? args.k_strides.Offset(page_id_, kv_head_, slot_) : 0;
    const int64_t v_offset = has_page ? args.v_strides.Offset(page_id_, kv_head_, slot_) : 0;
    if (lane == 0) prim::Store(token_masks_ + stage, mask);
    if constexpr (PAGES == PageKind::kEightBit) {
      CopyBytes(args, stage, lane, k_offset, v_offset, mask);
      if (args.k_scale.per_token || args.v_scale.per_token) {
        CopyScales(args, stage, lane, has_token);
      }
      return;
    }

    const Shared<char> k_tile = ring_ + stage * Traits::kStageBytes;
    const Shared<char> v_tile = k_tile + Traits::kWarpTileBytes;
    // Within a page 32 bits address a token's row (MakeArgs checks it).
    const int32_t k_stride = static_cast<int32_t>(args.k_strides.token);
    const int32_t v_stride = static_cast<int32_t>(args.v_strides.token);
    if (one_page_) {
      const Global<const char> k_page = k_ + k_offset;
      const Global<const char> v_page = v_ + v_offset;
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < Traits::kLoads; ++i) {
        const int32_t row = (i * kWarpLanes + lane) / Traits::kRowChunks;
        const int32_t chunk = (i * kWarpLanes + lane) % Traits::kRowChunks;
        const bool valid = mask >> row & 1;
        const bool has_k = valid && chunk * 8 < args.head_dim;
        const bool has_v = valid && chunk * 8 < args.v_head_dim;
        prim::CpAsync16(k_tile + Traits::Offset(row, chunk), k_page + (row * k_stride + chunk * 16),
                        has_k);
        prim::CpAsync16(v_tile + Traits::Offset(row, chunk), v_page + (row * v_stride + chunk * 16),
                        has_v);
      }
    } else {
      JAX_PAGED_NO_UNROLL
      for (int32_t i = 0; i < Traits::kLoads; ++i) {
        const int32_t row = (i * kWarpLanes + lane) / Traits::kRowChunks;
        const int32_t chunk = (i * kWarpLanes + lane) % Traits::kRowChunks;
        const int64_t k_source = prim::Shuffle(k_offset, row) + chunk * 16;
        const int64_t v_source = prim::Shuffle(v_offset, row) + chunk * 16;
        const bool valid = mask >> row & 1;
        prim::CpAsync16(k_tile + Traits::Offset(row, chunk), k_ + k_source,
                        valid && chunk * 8 < args.head_dim);
        prim::CpAsync16(v_tile + Traits::Offset(row, chunk), v_ + v_source,
                        valid && chunk * 8 < args.v_head_dim);
      }
    }
  }

  // kVllm5d. Lane l copies chunks l / 16, l / 16 + 2, ... of token l % 16 of K; of V the 8 tokens
  // around token l % 16 of dimensions l % 8 + l / 16 * 8, 16 more, ...
  JAX_PAGED_DEVICE void CopyAtoms(const AttentionArgs& args, int32_t stage, int32_t lane,
                                  bool has_atom, bool has_token) {
    const Shared<char> k_tile = ring_ + stage * Traits::kStageBytes;
    const Shared<char> v_tile = k_tile + Traits::kWarpTileBytes;
    const int32_t row = lane % kWarpTokens;
    const int32_t chunk = lane / kWarpTokens;
    const int32_t dim = lane % 8 + chunk * 8;
    int64_t k_offset = 0;
    int64_t v_offset = 0;
    if (has_atom) {
      k_offset =
          args.k_strides.Offset(page_id_, kv_head_, slot_ + lane % 8) + chunk * args.k_strides.atom;
      v_offset = args.v_strides.Offset(page_id_, kv_head_, slot_) + dim * args.v_strides.atom;
    }
    const Global<const char> k_from = k_ + k_offset;
    const Global<const char> v_from = v_ + v_offset;
    // Within a page and head 32 bits address an atom (MakeArgs checks it).
    const int32_t k_step = static_cast<int32_t>(args.k_strides.atom) * 2;
    const int32_t v_step = static_cast<int32_t>(args.v_strides.atom) * 16;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kLoads; ++i) {
      prim::CpAsync16(k_tile + Traits::Offset(row, 2 * i + chunk), k_from + i * k_step,
                      has_token && (2 * i + chunk) * 8 < args.head_dim);
      prim::CpAsync16(v_tile + Traits::TransposedOffset(16 * i + dim, row / 8), v_from + i * v_step,
                      has_atom && 16 * i + dim < args.v_head_dim);
    }
  }

  // kEightBit.
  JAX_PAGED_DEVICE void CopyBytes(const AttentionArgs& args, int32_t stage, int32_t lane,
                                  int64_t k_offset, int64_t v_offset, uint32_t mask) {
    using Rows = ByteRows<HEAD_DIM>;
    constexpr int32_t kCopies = kWarpTokens * Rows::kChunks;  // of K or V
    const Shared<char> k_tile = ring_ + stage * Traits::kStageBytes;
    const Shared<char> v_tile = k_tile + Traits::kByteTileBytes;
    if (one_page_) {
      const int32_t k_stride = static_cast<int32_t>(args.k_strides.token);
      const int32_t v_stride = static_cast<int32_t>(args.v_strides.token);
      const Global<const char> k_page = k_ + k_offset;
      const Global<const char> v_page = v_ + v_offset;
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kCopies; i += kWarpLanes) {
        if (kCopies % kWarpLanes != 0 && i + lane >= kCopies) continue;
        const int32_t row = (i + lane) / Rows::kChunks;
        const int32_t chunk = (i + lane) % Rows::kChunks;
        const bool valid = mask >> row & 1;
        prim::CpAsync16(k_tile + Rows::Offset(row, chunk), k_page + (row * k_stride + chunk * 16),
                        valid && chunk * 16 < args.head_dim);
        prim::CpAsync16(v_tile + Rows::Offset(row, chunk), v_page + (row * v_stride + chunk * 16),
                        valid && chunk * 16 < args.v_head_dim);
      }
    } else {
      JAX_PAGED_NO_UNROLL
      for (int32_t i = 0; i < kCopies; i += kWarpLanes) {
        const int32_t row = (i + lane) / Rows::kChunks;
        const int32_t chunk = (i + lane) % Rows::kChunks;
        const int64_t k_source = prim::Shuffle(k_offset, row % kWarpTokens) + chunk * 16;
        const int64_t v_source = prim::Shuffle(v_offset, row % kWarpTokens) + chunk * 16;
        if (kCopies % kWarpLanes != 0 && i + lane >= kCopies) continue;
        const bool valid = mask >> row & 1;
        prim::CpAsync16(k_tile + Rows::Offset(row, chunk), k_ + k_source,
                        valid && chunk * 16 < args.head_dim);
        prim::CpAsync16(v_tile + Rows::Offset(row, chunk), v_ + v_source,
                        valid && chunk * 16 < args.v_head_dim);
      }
    }
  }

  // kEightBit with scales per token: of token l % 16, K's by the lower lanes, V's by the upper.
  JAX_PAGED_DEVICE void CopyScales(const AttentionArgs& args, int32_t stage, int32_t lane,
                                   bool has_token) {
    const DeviceKvScale& scale = lane < kWarpTokens ? args.k_scale : args.v_scale;
    if (!scale.per_token) return;
    int64_t index = 0;
    if (has_token) {
      const int32_t slot = slot_ + (one_page_ ? lane % kWarpTokens : 0);
      index = ScaleIndex(args, layer_, page_id_, kv_head_, slot);
    }
    prim::CpAsync4(ring_ + (stage * Traits::kStageBytes + Traits::kScalesOffset + lane * 4),
                   scale.data.template As<const char>() + index * 4, has_token);
  }

  Segment segment_;
  Global<const char> k_;
  Global<const char> v_;
  int64_t layer_;
  Shared<char> ring_;
  Shared<uint32_t> token_masks_;
  int32_t kv_head_;
  int32_t tile_ = 0;
  int32_t page_id_ = -1;
  int32_t slot_ = 0;
  bool one_page_;
  bool has_tile_;
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_LOADER_CUH_
