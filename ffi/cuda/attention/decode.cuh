// Attention for few queries per row, on tensor cores (bf16, f16).
//
// Grid: args.num_workers persistent CTAs of 4 warps; each walks the pieces of its range (plan.cuh).
// A unit's 16 packed rows (the query heads of a group, or several queries of them) are the M of
// mma.m16n8k16, so each K and V element is read once from the pages for all of them.
//   CTA    a tile of 64 KV tokens at a time
//   warp   16 of them, with its own softmax state (m, l, O) and its own ring of K and V stages; the
//          warps meet only at the end of a segment
//   lane   rows l/4 and l/4 + 8; of each 8 columns the two at 2(l%4)
// Pipeline of a warp, per tile:
//   1. wait for the stage's cp.async, syncwarp: the loads of all lanes are visible, and all lanes
//      are done with the stage of the tile before
//   2. issue the tile that is stages - 1 ahead into that stage
//   3. S = Q K^T, softmax in log2, O = O a + P V: O in registers, K and V by ldmatrix; Q in
//      registers, or in shared memory above head_dim 128
// The loader runs ahead across segments, so the rings never drain. The page id of a tile is read
// one tile before its loads are issued. Tokens left of the row's window are not read.
//
// Pages of layout vllm5d (template argument PAGES; page_size a multiple of 8): 16 bytes of a page
// are 8 dimensions of a token of K, which go to the same place in the ring, or 8 tokens of a
// dimension of V, which is kept transposed and read by ldmatrix without .trans. Of such 8 tokens
// some may not exist: the V operand is masked, since 0 x NaN is NaN.
//
// 8-bit pages: a stage holds the bytes as they are stored and, where tokens have scales, those.
// Before step 3 the warp widens it to 16-bit elements in a tile of its own (expand.cuh), between
// two syncwarps. A scale of K is multiplied with the products. One of V per head is multiplied with
// O at the end; those per token with P, over the largest one so far, which scales O: so P stays
// within the range of f16. The loads are half as many as of 16-bit pages, the issue slots twice.
//
// Shared memory: 4 warps x stages x 2 x 16 rows (96 KiB for head_dim 128, 3 stages) + 12 KiB; with
// 8-bit pages half of it for the stages, and a stage of 16-bit rows per warp.
// Bound by memory bandwidth: at head_dim 128 and 4.3 TB/s on 132 SMs a warp tile of 8 KiB takes 250
// ns; its 32 mma, 16 ldmatrix and about 300 issue slots fit in three times. FlashDecoding (split
// KV), LeanAttention (stream-K ranges), FlashInfer (GQA group as M).

#ifndef JAX_PAGED_CUDA_ATTENTION_DECODE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_DECODE_CUH_

#include <cstddef>

#include "cuda/attention/args.h"
#include "cuda/attention/expand.cuh"
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
        has_tile_ = NextSegment<Traits::kTakesSpecialRows>(args, range, &segment_);
        kv_head_ = RowsOf(args, segment_).kv_head;
      }
      FindPage(args);
    }
    prim::CpAsyncCommit();
  }

 private:
  JAX_PAGED_DEVICE int32_t FirstToken(const AttentionArgs& args) const {
    return TileToken<Traits::kTakesSpecialRows>(args, segment_, tile_) +
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
    page_id_ = prim::LoadConst(args.page_table + (segment_.row * args.pages_per_seq + index));
  }

  JAX_PAGED_DEVICE void CopyTile(const AttentionArgs& args, int32_t stage) {
    const int32_t lane = prim::Opaque(prim::LaneIndex());
    const bool has_page = page_id_ >= 0 && page_id_ < args.num_pages;
    const int32_t token = FirstToken(args) + lane % kWarpTokens;
    const bool has_token = has_page && IsRead<Traits::kTakesSpecialRows>(args, segment_, token);
    const uint32_t mask = prim::Ballot(has_token) & 0xffffu;
    if constexpr (PAGES == PageKind::kVllm5d) {
      if (lane == 0) prim::Store(token_masks_ + stage, mask);
      CopyAtoms(args, stage, lane, has_page && (token | 7) >= segment_.first_key, has_token);
      return;
    }
    const int64_t offset = has_page ? args.k_strides.Offset(page_id_, kv_head_, slot_) : 0;
    if (lane == 0) prim::Store(token_masks_ + stage, mask);
    if constexpr (PAGES == PageKind::kEightBit) {
      CopyBytes(args, stage, lane, offset, mask);
      if (args.k_scale.per_token || args.v_scale.per_token) {
        CopyScales(args, stage, lane, has_token);
      }
      return;
    }

    const Shared<char> k_tile = ring_ + stage * Traits::kStageBytes;
    const Shared<char> v_tile = k_tile + Traits::kWarpTileBytes;
    // Within a page 32 bits address a token's row (MakeArgs checks it).
    const int32_t token_stride = static_cast<int32_t>(args.k_strides.token);
    const Global<const char> k_page = k_ + offset;
    const Global<const char> v_page = v_ + offset;
    if (one_page_) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < Traits::kLoads; ++i) {
        const int32_t row = (i * kWarpLanes + lane) / Traits::kRowChunks;
        const int32_t chunk = (i * kWarpLanes + lane) % Traits::kRowChunks;
        const int32_t source = row * token_stride + chunk * 16;
        const bool valid = mask >> row & 1;
        prim::CpAsync16(k_tile + Traits::Offset(row, chunk), k_page + source, valid);
        prim::CpAsync16(v_tile + Traits::Offset(row, chunk), v_page + source, valid);
      }
    } else {
      JAX_PAGED_NO_UNROLL
      for (int32_t i = 0; i < Traits::kLoads; ++i) {
        const int32_t row = (i * kWarpLanes + lane) / Traits::kRowChunks;
        const int32_t chunk = (i * kWarpLanes + lane) % Traits::kRowChunks;
        const int64_t source = prim::Shuffle(offset, row) + chunk * 16;
        const bool valid = mask >> row & 1;
        prim::CpAsync16(k_tile + Traits::Offset(row, chunk), k_ + source, valid);
        prim::CpAsync16(v_tile + Traits::Offset(row, chunk), v_ + source, valid);
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
      prim::CpAsync16(k_tile + Traits::Offset(row, 2 * i + chunk), k_from + i * k_step, has_token);
      prim::CpAsync16(v_tile + Traits::TransposedOffset(16 * i + dim, row / 8), v_from + i * v_step,
                      has_atom);
    }
  }

  // kEightBit.
  JAX_PAGED_DEVICE void CopyBytes(const AttentionArgs& args, int32_t stage, int32_t lane,
                                  int64_t offset, uint32_t mask) {
    constexpr int32_t kRowChunks = HEAD_DIM / 16;
    const Shared<char> k_tile = ring_ + stage * Traits::kStageBytes;
    const Shared<char> v_tile = k_tile + Traits::kStoredTileBytes;
    const int64_t token_stride = one_page_ ? args.k_strides.token : 0;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kStoredChunks; i += kWarpLanes) {
      const int32_t index = i + lane;
      const int32_t row = index / kRowChunks;
      const int64_t token = prim::Shuffle(offset, row % kWarpTokens) + row * token_stride;
      if (Traits::kStoredChunks % kWarpLanes != 0 && index >= Traits::kStoredChunks) continue;
      const int64_t source = token + index % kRowChunks * 16;
      const bool valid = mask >> row & 1;
      prim::CpAsync16(k_tile + index * 16, k_ + source, valid);
      prim::CpAsync16(v_tile + index * 16, v_ + source, valid);
    }
  }

  // kEightBit with scales per token: of token l % 16, K's by the lower lanes, V's by the upper.
  JAX_PAGED_DEVICE void CopyScales(const AttentionArgs& args, int32_t stage, int32_t lane,
                                   bool has_token) {
    const DeviceKvScale& scale = lane < kWarpTokens ? args.k_scale : args.v_scale;
    if (!scale.per_token) return;
    int64_t place = 0;
    if (has_token) {
      const int32_t slot = slot_ + (one_page_ ? lane % kWarpTokens : 0);
      place =
          ((layer_ * args.num_pages + page_id_) * args.num_kv_heads + kv_head_) * args.page_size +
          slot;
    }
    prim::CpAsync4(ring_ + (stage * Traits::kStageBytes + Traits::kScalesOffset + lane * 4),
                   scale.data.template As<const char>() + place * 4, has_token);
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

// A lane's part of a warp's result: two rows, and of each 8 columns two.
template <int HEAD_DIM>
struct DecodeState {
  float o[HEAD_DIM / 8][4];
  float m[2];
  float l[2];
  float v_scale;  // what O is in units of: with scales of V per token the largest so far

  JAX_PAGED_DEVICE void Clear() {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    m[0] = m[1] = kNegativeInfinity;
    l[0] = l[1] = 0.0f;
    v_scale = 1.0f;
  }
};

// The unit's queries as the A operand, in registers.
template <typename T, int HEAD_DIM, bool SHARED>
class DecodeQueries {
 public:
  JAX_PAGED_DEVICE explicit DecodeQueries(Shared<char>) {}
  JAX_PAGED_DEVICE void Fill(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const LogitScale& scale);
  JAX_PAGED_DEVICE void Get(int32_t k, uint32_t (&a)[4]) const {
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) a[i] = q_[k][i];
  }

 private:
  uint32_t q_[HEAD_DIM / 16][4];
};

template <typename T, int HEAD_DIM, bool SHARED>
JAX_PAGED_DEVICE void DecodeQueries<T, HEAD_DIM, SHARED>::Fill(const AttentionArgs& args,
                                                               const Segment& segment,
                                                               const UnitRows& rows,
                                                               const LogitScale& scale) {
  const int32_t row = prim::LaneIndex() / 4;
  const int32_t column = prim::LaneIndex() % 4 * 2;
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const bool valid = row + 8 * half < rows.count && !scale.is_zero;
    const int64_t head = valid ? HeadIndex(args, segment, rows, row + 8 * half) : 0;
    const Global<const char> source = args.q + (head * HEAD_DIM + column) * int64_t{sizeof(T)};
    const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
    JAX_PAGED_UNROLL
    for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
      q_[k][half] = q_[k][half + 2] = 0;
      if (valid) {
        q_[k][half] = prim::LoadConst((source + k * 32).template As<const uint32_t>()) ^ sign;
        q_[k][half + 2] =
            prim::LoadConst((source + (k * 32 + 16)).template As<const uint32_t>()) ^ sign;
      }
    }
  }
}

// The same in shared memory, for all warps: with O they would not fit in the registers.
template <typename T, int HEAD_DIM>
class DecodeQueries<T, HEAD_DIM, /*SHARED=*/true> {
 public:
  using Traits = DecodeTraits<HEAD_DIM>;

  JAX_PAGED_DEVICE explicit DecodeQueries(Shared<char> tile) : tile_(tile) {}

  JAX_PAGED_DEVICE void Fill(const AttentionArgs& args, const Segment& segment,
                             const UnitRows& rows, const LogitScale& scale) {
    const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
    for (int32_t i = prim::ThreadIndex(); i < kTileRows * Traits::kRowChunks;
         i += kAttentionThreads) {
      const int32_t row = i / Traits::kRowChunks;
      const int32_t chunk = i % Traits::kRowChunks;
      Word4 x = {0, 0, 0, 0};
      if (row < rows.count && !scale.is_zero) {
        const int64_t head = HeadIndex(args, segment, rows, row);
        const Global<const char> source =
            args.q + (head * HEAD_DIM + chunk * 8) * int64_t{sizeof(T)};
        x = prim::LoadConst(source.template As<const Word4>());
        x = {x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign};
      }
      prim::Store((tile_ + Traits::Offset(row, chunk)).template As<Word4>(), x);
    }
    prim::SyncThreads();  // the queries are there; FinishSegment parts their reads from the next
                          // Fill
  }
  JAX_PAGED_DEVICE void Get(int32_t k, uint32_t (&a)[4]) const {
    const int32_t lane = prim::LaneIndex();
    prim::LoadMatrix(a, tile_ + Traits::Offset(lane % 16, 2 * k + lane / 16));
  }

 private:
  Shared<char> tile_;
};

inline constexpr float kSmallestScale = 1.17549435e-38f;  // to begin with: no division by 0

// The scale of a unit's K or V where it is one per head.
JAX_PAGED_DEVICE float HeadScale(const DeviceKvScale& scale, int32_t kv_head) {
  return scale.data && !scale.per_token ? prim::LoadConst(scale.data + kv_head) : 1.0f;
}

// The scales of tokens `column` and `column` + 1 of each 8, from those of a stage's 16 tokens.
struct LaneScales {
  Float2 of[2];

  JAX_PAGED_DEVICE LaneScales(Shared<float> per_token, int32_t column) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) of[n] = prim::Load((per_token + (n * 8 + column)).As<Float2>());
  }
  // Multiplies the lane's products or weights with them, and with `factor`.
  JAX_PAGED_DEVICE void Apply(float factor, float (&x)[2][4]) const {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        x[n][2 * half] *= of[n].x * factor;
        x[n][2 * half + 1] *= of[n].y * factor;
      }
    }
  }
  // The largest of the 16 tokens, whatever their sign; all lanes take part.
  JAX_PAGED_DEVICE float Largest() const {
    float top = 0.0f;
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < 2; ++n) {
      top = prim::Max(top, prim::Max(prim::Max(of[n].x, -of[n].x), prim::Max(of[n].y, -of[n].y)));
    }
    top = prim::Max(top, prim::ShuffleXor(top, 1));
    return prim::Max(top, prim::ShuffleXor(top, 2));
  }
};

template <typename T>
JAX_PAGED_DEVICE void PackWeights(const float (&p)[2][4], uint32_t (&a)[4]) {
  JAX_PAGED_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    a[i] = prim::PackPair<T>(p[i / 2][i % 2 * 2], p[i / 2][i % 2 * 2 + 1]);
  }
}

// Sets the scores to -inf of keys in the row's tree that are no ancestors of the query.
JAX_PAGED_DEVICE void MaskTree(const AttentionArgs& args, const Segment& segment,
                               const UnitRows& rows, int32_t first_token, float (&s)[2][4]) {
  const int32_t lane = prim::Opaque(prim::LaneIndex());
  const RowTree tree = segment.Tree();
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t packed = rows.first + lane / 4 + 8 * half;
    const TreeQuery query =
        FindQuery(args, tree, QueryPosition(segment.lengths, args.by_group_size(packed)));
    uint32_t seen = 0;
    JAX_PAGED_NO_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t key = first_token + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (SeesKey(args, tree, query, key)) seen |= 1u << i;
    }
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      if (!(seen >> i & 1)) s[i / 2][2 * half + i % 2] = kNegativeInfinity;
    }
  }
}

// One warp tile of 16 tokens. `token_mask` says which of them exist; `sees_all`, that all rows of
// the unit see those. `scales`, `k_scale`: of 8-bit pages, those of the stage's K and V per token,
// and that of the head's K.
template <typename T, int HEAD_DIM, PageKind PAGES, typename Queries>
JAX_PAGED_DEVICE void DecodeTile(const AttentionArgs& args, const Segment& segment,
                                 const UnitRows& rows, Shared<char> k_tile, uint32_t token_mask,
                                 int32_t first_token, bool sees_all, float scale,
                                 Shared<float> scales, float k_scale, const Queries& queries,
                                 DecodeState<HEAD_DIM>* state) {
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  const int32_t lane = prim::Opaque(prim::LaneIndex());
  const int32_t column = lane % 4 * 2;

  float s[2][4] = {};  // 16 rows x 16 tokens
  JAX_PAGED_UNROLL
  for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
    uint32_t b[4];  // tokens 0-7 and 8-15, each dimensions 0-7 and 8-15 of the step
    const int32_t row = lane % 8 + lane / 16 * 8;
    prim::LoadMatrix(b, k_tile + Traits::Offset(row, 2 * k + lane / 8 % 2));
    uint32_t a[4];
    queries.Get(k, a);
    prim::Mma<T>(s[0], a, b[0], b[1]);
    prim::Mma<T>(s[1], a, b[2], b[3]);
  }

  if constexpr (Traits::kIsEightBit) {
    if (args.k_scale.per_token) {
      LaneScales(scales, column).Apply(1.0f, s);
    } else {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 8; ++i) s[i / 4][i % 4] *= k_scale;
    }
  }
  if (args.logits.edits()) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      EditLogits<Traits::kTakesSpecialRows>(args, segment, rows, lane / 4 + 8 * half, half,
                                            first_token + column, s);
    }
  }
  if (token_mask != 0xffffu || !sees_all) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const KeyRange keys =
          VisibleKeys<Traits::kTakesSpecialRows>(args, segment, rows, lane / 4 + 8 * half);
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < 2; ++n) {
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t token = n * 8 + column + i;
          const bool is_seen =
              (token_mask >> token & 1) &&
              Sees<Traits::kTakesSpecialRows>(args, segment, keys, first_token + token);
          if (!is_seen) s[n][2 * half + i] = kNegativeInfinity;
        }
      }
    }
  }

  if (segment.tree_size > 0 && !sees_all) MaskTree(args, segment, rows, first_token, s);

  float o_factor = 1.0f;
  if constexpr (Traits::kIsEightBit) {
    if (args.v_scale.per_token) {
      const float old = state->v_scale;
      state->v_scale = prim::Max(old, LaneScales(scales + kWarpTokens, column).Largest());
      o_factor = old / state->v_scale;
    }
  }
  float p[2][4];
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    float top = prim::Max(prim::Max(s[0][2 * half], s[0][2 * half + 1]),
                          prim::Max(s[1][2 * half], s[1][2 * half + 1]));
    top = prim::Max(top, prim::ShuffleXor(top, 1));
    top = prim::Max(top, prim::ShuffleXor(top, 2));
    const float m = prim::Max(state->m[half], top * scale);
    const float base = Base(m);
    const float keep = prim::Exp2(state->m[half] - base);
    state->m[half] = m;
    float sum = 0.0f;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      float& weight = p[i / 2][2 * half + i % 2];
      weight = prim::Exp2(prim::Fma(s[i / 2][2 * half + i % 2], scale, -base));
      sum += weight;
    }
    state->l[half] = prim::Fma(state->l[half], keep, sum);
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
      state->o[n][2 * half] *= keep * o_factor;
      state->o[n][2 * half + 1] *= keep * o_factor;
    }
  }

  if constexpr (Traits::kIsEightBit) {
    if (args.v_scale.per_token) {
      LaneScales(scales + kWarpTokens, column).Apply(1.0f / state->v_scale, p);
    }
  }
  // The C layout of S is the A layout of P. l sums the unrounded weights: rounding is unbiased.
  uint32_t a[4];
  PackWeights<T>(p, a);
  // What that rounded away, where a scale does so even to the weight 1 of a lone key.
  uint32_t a_rest[4] = {};
  if constexpr (Traits::kIsEightBit) {
    if (args.v_scale.per_token) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        float (&x)[4] = p[i / 2];
        x[i % 2 * 2] -= prim::ToFloat(T{static_cast<uint16_t>(a[i] & 0xffffu)});
        x[i % 2 * 2 + 1] -= prim::ToFloat(T{static_cast<uint16_t>(a[i] >> 16)});
      }
      PackWeights<T>(p, a_rest);
    }
  }
  const Shared<char> v_tile = k_tile + Traits::kWarpTileBytes;
  uint32_t exists[2] = {};
  if constexpr (PAGES == PageKind::kVllm5d) {
    exists[0] = PairMask(token_mask, column);
    exists[1] = PairMask(token_mask, column + 8);
  }
  JAX_PAGED_UNROLL
  for (int32_t n = 0; n < HEAD_DIM / 16; ++n) {
    uint32_t b[4];  // dimensions 0-7 and 8-15 of the step, each tokens 0-7 and 8-15
    if constexpr (PAGES == PageKind::kVllm5d) {
      const int32_t dim = n * 16 + lane % 8 + lane / 16 * 8;
      prim::LoadMatrix(b, v_tile + Traits::TransposedOffset(dim, lane / 8 % 2));
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) b[i] &= exists[i % 2];
    } else {
      prim::LoadMatrixTransposed(b, v_tile + Traits::Offset(lane % 16, 2 * n + lane / 16));
    }
    prim::Mma<T>(state->o[2 * n], a, b[0], b[1]);
    prim::Mma<T>(state->o[2 * n + 1], a, b[2], b[3]);
    if constexpr (Traits::kIsEightBit) {
      if (args.v_scale.per_token) {
        prim::Mma<T>(state->o[2 * n], a_rest, b[0], b[1]);
        prim::Mma<T>(state->o[2 * n + 1], a_rest, b[2], b[3]);
      }
    }
  }
}

// Adds up the warps' results and sends them where they go.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void FinishSegment(const AttentionArgs& args, const WorkRange& range,
                                    const Segment& segment, const UnitRows& rows,
                                    Shared<char> exchange, DecodeState<HEAD_DIM>* state) {
  constexpr int32_t kPitch = ExchangeShared::kColumnPitch;
  constexpr int32_t kColumns = ExchangeShared::kColumns;
  constexpr int32_t kQuads = kColumns / 4;
  static_assert(kTileRows * kQuads == kAttentionThreads, "one float4 per thread");
  const Shared<float> sums = (exchange + offsetof(ExchangeShared, sums)).As<float>();
  const Shared<float> ms = (exchange + offsetof(ExchangeShared, m)).As<float>();
  const Shared<float> ls = (exchange + offsetof(ExchangeShared, l)).As<float>();
  const int32_t lane = prim::LaneIndex();
  const int32_t warp = prim::WarpIndex();
  const int32_t lane_row = lane / 4;

  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    float l = state->l[half];
    l += prim::ShuffleXor(l, 1);
    l += prim::ShuffleXor(l, 2);
    if (lane % 4 == 0) {
      prim::Store(ms + (warp * kTileRows + lane_row + 8 * half), state->m[half]);
      prim::Store(ls + (warp * kTileRows + lane_row + 8 * half), l);
    }
  }
  prim::SyncThreads();
  float factor[2];
  JAX_PAGED_UNROLL
  for (int32_t half = 0; half < 2; ++half) {
    float m = kNegativeInfinity;
    for (int32_t w = 0; w < kWarps; ++w) {
      m = prim::Max(m, prim::Load(ms + (w * kTileRows + lane_row + 8 * half)));
    }
    factor[half] = prim::Exp2(state->m[half] - Base(m)) * state->v_scale;
  }

  const Destination to = DestinationOf(args, range, segment);
  const int32_t row = prim::ThreadIndex() / kQuads;
  float row_m = kNegativeInfinity;
  float row_l = 0.0f;
  for (int32_t w = 0; w < kWarps; ++w) {
    row_m = prim::Max(row_m, prim::Load(ms + (w * kTileRows + row)));
  }
  for (int32_t w = 0; w < kWarps; ++w) {
    const float m = prim::Load(ms + (w * kTileRows + row));
    row_l = prim::Fma(prim::Load(ls + (w * kTileRows + row)), prim::Exp2(m - Base(row_m)), row_l);
  }
  JAX_PAGED_UNROLL
  for (int32_t first = 0; first < HEAD_DIM; first += kColumns) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < kColumns / 8; ++n) {
      if (first + n * 8 >= HEAD_DIM) continue;
      const float (&o)[4] = state->o[first / 8 + n];
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t at = (warp * kTileRows + lane_row + 8 * half) * kPitch + n * 8 + lane % 4 * 2;
        prim::Store((sums + at).As<Float2>(),
                    Float2{o[2 * half] * factor[half], o[2 * half + 1] * factor[half]});
      }
    }
    prim::SyncThreads();
    const int32_t column = prim::ThreadIndex() % kQuads * 4;
    if (row < rows.count && first + column < HEAD_DIM) {
      Float4 sum = {0, 0, 0, 0};
      for (int32_t w = 0; w < kWarps; ++w) {
        const Float4 x =
            prim::Load((sums + ((w * kTileRows + row) * kPitch + column)).As<Float4>());
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
      }
      WriteSegment<T>(args, segment, rows, to, row, first + column, sum, row_m, row_l);
    }
    prim::SyncThreads();  // sums, and after the last columns m and l, may be overwritten
  }
  MergeIfLast<T>(args, segment, rows, to, exchange + offsetof(ExchangeShared, merge));
}

// Keys that every row of the unit sees.
template <bool SPECIAL>
JAX_PAGED_DEVICE KeyRange SeenByAll(const AttentionArgs& args, const Segment& segment,
                                    const UnitRows& rows) {
  KeyRange keys = {VisibleKeys<SPECIAL>(args, segment, rows, rows.count - 1).first,
                   VisibleKeys<SPECIAL>(args, segment, rows, 0).end};
  if (segment.tree_size > 0) {  // what rows see does not ascend there
    if (keys.end > segment.Tree().root) keys.end = segment.Tree().root;
    if (args.sliding_window) keys.first = keys.end;
  }
  return keys;
}

template <typename T, int HEAD_DIM, PageKind PAGES = PageKind::kRows>
JAX_PAGED_DEVICE void DecodeCta(const AttentionArgs& args) {
  using Traits = DecodeTraits<HEAD_DIM, PAGES>;
  const WorkRange range = MyRange(args);
  if (range.begin >= range.end) return;
  const int32_t stages = args.stages;
  const int32_t warp = prim::WarpIndex();
  const Shared<char> exchange = prim::SharedMemory() + Traits::RingBytes(stages);
  DecodeQueries<T, HEAD_DIM, Traits::kSharedQueries> queries(exchange + sizeof(ExchangeShared));
  const Shared<char> ring = prim::SharedMemory() + warp * stages * Traits::kStageBytes;
  const Shared<uint32_t> token_masks =
      (exchange + offsetof(ExchangeShared, token_masks)).As<uint32_t>() + warp * kMaxStages;
  const Shared<char> expanded = prim::SharedMemory() + (kWarps * stages * Traits::kStageBytes +
                                                        warp * Traits::kExpandedBytes);
  const LogitScale scale = LoadScale(args);

  Segment segment = FirstSegment<Traits::kTakesSpecialRows>(args, range);
  DecodeLoader<HEAD_DIM, PAGES> loader(args, range, segment, ring, token_masks);
  for (int32_t s = 0; s < stages - 1; ++s) loader.Issue(args, range, s);

  int32_t stage = 0;
  bool has_segment = true;
  while (has_segment) {
    const UnitRows rows = RowsOf(args, segment);
    queries.Fill(args, segment, rows, scale);
    DecodeState<HEAD_DIM> state;
    state.Clear();
    float k_scale = 1.0f;
    if constexpr (Traits::kIsEightBit) {
      k_scale = HeadScale(args.k_scale, rows.kv_head);
      state.v_scale =
          args.v_scale.per_token ? kSmallestScale : HeadScale(args.v_scale, rows.kv_head);
    }
    const KeyRange by_all = SeenByAll<Traits::kTakesSpecialRows>(args, segment, rows);
    for (int32_t tile = 0; tile < segment.num_tiles; ++tile) {
      const int32_t first_token =
          TileToken<Traits::kTakesSpecialRows>(args, segment, tile) + warp * kWarpTokens;
      prim::CpAsyncWait(stages - 2);
      // Every lane's copies into this stage are done, and every lane has read the stage before it.
      prim::SyncWarp();
      loader.Issue(args, range, stage == 0 ? stages - 1 : stage - 1);
      const Shared<char> stored = ring + stage * Traits::kStageBytes;
      if constexpr (Traits::kIsEightBit) {
        ExpandStage<T, HEAD_DIM>(args, stored, expanded);
        prim::SyncWarp();  // the expanded elements of all lanes
      }
      DecodeTile<T, HEAD_DIM, PAGES>(
          args, segment, rows, Traits::kIsEightBit ? expanded : stored,
          prim::Load(token_masks + stage), first_token,
          first_token >= by_all.first && first_token + kWarpTokens <= by_all.end, scale.factor,
          (stored + Traits::kScalesOffset).template As<float>(), k_scale, queries, &state);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    FinishSegment<T, HEAD_DIM>(args, range, segment, rows, exchange, &state);
    has_segment = NextSegment<Traits::kTakesSpecialRows>(args, range, &segment);
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_DECODE_CUH_
