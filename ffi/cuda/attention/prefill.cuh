// Attention for many queries per row, on tensor cores (bf16, f16).
//
// Grid: persistent CTAs of 4 warps. Each takes the prefill unit of its own number (plan.cuh), then
// draws tickets. A unit is whole, no other CTA adds to it: bits do not depend on the draws.
//   CTA    128 packed rows (64 above head_dim 128): queries in order, the heads of a group inside,
//          so that one KV head's tiles serve the whole group; KV tiles of 64 tokens (32 above 128),
//          from the first token in the window of the unit's first query to the last that its last
//          query sees, shared by all warps
//   warp   32 rows (16): each fragment of K and V feeds two mma.m16n8k16 (one)
//   lane   of each 16 rows l/4 and l/4 + 8; of each 8 columns the two at 2(l%4)
// Pipeline, per tile:
//   wait for the tile's cp.async, syncthreads   the loads of all are visible to all, and all warps
//                                               are done with the tile before
//   issue the next tile into the other stage
//   S = Q K^T, softmax in log2, O = O a + P V   S, P and O in registers; Q, K and V by ldmatrix
//   look up the tokens of the tile after next   thread t: page and offset of token t; any page size
//                                               costs the same
// Warps whose rows see nothing of a tile only load. Only tiles at a warp's diagonal, at the edge of
// its windows, at the end and with missing pages are masked. O is rescaled only when a maximum of
// the warp has moved.
//
// A page that does not exist is not read: its tokens are masked, its V is zero. Keys that no query
// of the unit sees are not read either. A NaN in the V of a later token reaches an earlier query
// (as 0 x NaN) if a query of the same warp sees a key of that KV tile: less far than in decode.cuh,
// which reads all of the row's tokens for each unit.
//
// Pages of layout vllm5d (template argument PAGES; page_size a multiple of 8): 16 bytes of a page
// are 8 dimensions of a token of K, which go to the same place in the stage, or 8 tokens of a
// dimension of V, which is kept transposed and read by ldmatrix without .trans. Of such 8 tokens
// some may not exist, at the two ends of what the unit sees: the thread that copied them sets those
// to zero between its wait and the barrier, so that the products cost no mask.
//
// Shared memory: (rows + 4 x tokens) x head_dim x 2 bytes + 1 KiB: 97 KiB for head_dim 128 and 256,
// so two CTAs per multiprocessor of 228 KiB, and one of 100 KiB. Bound by the tensor cores' rate
// for mma.sync, above head_dim 128 by shared memory; docs/kernels/prefill.md has the arithmetic.
// FlashAttention 2 (loop over KV tiles inside a query tile), FlashInfer (packed rows).

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_CUH_

#include <cstddef>

#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/select.h"
#include "cuda/attention/traits.h"
#include "cuda/prim.h"

namespace jax_paged::cuda {

inline constexpr int32_t kPrefillStages = 2;
inline constexpr int32_t kMaskSlots = 4;  // a tile's mask is written two tiles before it is read

struct PrefillUnit {
  RowLengths lengths;
  int32_t row;
  int32_t first_key;  // tokens before it are left of every window, and not read
  UnitRows rows;
};

// Keys that some row of a warp sees, and those that all its rows see.
struct WarpKeys {
  KeyRange any;
  KeyRange all;
};

// After the queries and the stages.
template <int TOKENS>
struct PrefillShared {
  PrefillUnit unit;  // here and not in registers, which are short; so are the next
  WarpKeys warp_keys[kWarps];
  int64_t offsets[kPrefillStages * TOKENS];  // in the pool, bytes; -1: no such token
  uint32_t token_masks[kMaskSlots * TOKENS / kWarpLanes];
  uint32_t ticket;
  int64_t v_offsets[kPrefillStages * TOKENS / 8];  // vllm5d: of V, by 8 tokens; offsets are of K
};

template <int HEAD_DIM>
struct PrefillTraits {
  using Row = DecodeTraits<HEAD_DIM>;  // how a row of Q, K or V lies in shared memory

  static constexpr int32_t kRows = PrefillRows(HEAD_DIM);
  static constexpr int32_t kWarpRows = kRows / kWarps;
  static constexpr int32_t kRowTiles = kWarpRows / 16;           // of an mma.m16n8k16, per warp
  static constexpr int32_t kTokens = HEAD_DIM <= 128 ? 64 : 32;  // of a KV tile
  static constexpr int32_t kMaskWords = kTokens / kWarpLanes;
  static constexpr int32_t kTileBytes = kTokens * Row::kRowBytes;
  static constexpr int32_t kStageBytes = 2 * kTileBytes;  // K, then V
  static constexpr int32_t kQueryBytes = kRows * Row::kRowBytes;
  static constexpr int32_t kLoads = kTokens * Row::kRowChunks / kAttentionThreads;  // of K or V
  static_assert(kTokens * Row::kRowChunks % kAttentionThreads == 0);
  static_assert(kWarpRows * Row::kRowChunks % kWarpLanes == 0);

  using State = PrefillShared<kTokens>;
  static constexpr int32_t kStateOffset = kQueryBytes + kPrefillStages * kStageBytes;
  static constexpr int32_t kSharedBytes = kStateOffset + static_cast<int32_t>(sizeof(State));

  // Row::Offset(row, 2 * step + half) for half 0 or 1, so written that steps 4 apart differ by a
  // constant, and ldmatrix needs a register for each of four addresses only.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t StepOffset(int32_t row, int32_t step,
                                                            int32_t half) {
    if (!Row::kSwizzled) return row * Row::kRowBytes + half * 16 + step * 32;
    return row * Row::kRowBytes + ((half ^ (row & 7)) ^ step % 4 * 2) * 16 + step / 4 * 128;
  }

  // Where V is stored transposed (vllm5d): a row is one dimension of a tile's tokens, 128 or 64
  // bytes. The chunks of 8 rows that ldmatrix reads at once lie in different bank groups.
  JAX_PAGED_HOST_DEVICE static constexpr int32_t TransposedOffset(int32_t dim, int32_t chunk) {
    return dim * kTokens * 2 + (chunk ^ (kTokens == 64 ? dim & 7 : dim >> 1 & 3)) * 16;
  }

  template <typename T>
  JAX_PAGED_DEVICE static Shared<T> Field(size_t offset) {
    return (prim::SharedMemory() + (kStateOffset + static_cast<int32_t>(offset))).template As<T>();
  }
};

// The unit that the CTA is at.
template <int HEAD_DIM>
JAX_PAGED_DEVICE PrefillUnit LoadUnit() {
  using Traits = PrefillTraits<HEAD_DIM>;
  return prim::Load(Traits::template Field<PrefillUnit>(offsetof(typename Traits::State, unit)));
}

// The unit as a segment, of which only row and lengths mean something here.
JAX_PAGED_DEVICE Segment PrefillSegment(const PrefillUnit& unit) {
  Segment segment = {};
  segment.row = unit.row;
  segment.lengths = unit.lengths;
  return segment;
}

// The keys that a packed row of the unit sees. This kernel is not given pinned tokens (select.h),
// for which it would have no register.
JAX_PAGED_DEVICE KeyRange UnitKeys(const AttentionArgs& args, const PrefillUnit& unit,
                                   int32_t row) {
  return VisibleKeys</*SPECIAL=*/false>(args, PrefillSegment(unit), unit.rows, row);
}

// A warp finds the unit's row by a 32-way search.
JAX_PAGED_DEVICE PrefillUnit FindPrefillUnit(const AttentionArgs& args, int32_t index) {
  int32_t low = 0;
  int32_t high = args.max_seqs;
  while (high - low > 1) {
    const int32_t step = (high - low + kWarpLanes - 1) / kWarpLanes;
    const int32_t probe = low + prim::LaneIndex() * step;
    const bool is_left =
        probe < high && prim::LoadConst<int64_t>(args.first_prefill + probe) <= index;
    low += (prim::PopCount(prim::Ballot(is_left)) - 1) * step;
    if (high > low + step) high = low + step;
  }
  PrefillUnit unit;
  unit.row = prim::LoadConst<int32_t>(args.prefill_order + low);
  unit.lengths = prim::LoadConst<RowLengths>(args.row_lengths + unit.row);
  const int32_t packed_rows = unit.lengths.q_len * args.group_size;
  const int32_t within =
      index - static_cast<int32_t>(prim::LoadConst<int64_t>(args.first_prefill + low));
  const int32_t from_last = within / args.num_kv_heads;
  unit.rows.kv_head = within - from_last * args.num_kv_heads;
  unit.rows.first = ((packed_rows - 1) / args.prefill_rows - from_last) * args.prefill_rows;
  const int32_t rest = packed_rows - unit.rows.first;
  unit.rows.count = rest < args.prefill_rows ? rest : args.prefill_rows;
  unit.first_key = UnitKeys(args, unit, 0).first;
  return unit;
}

// The thread's index; what is computed from it is computed where it is used, not kept in registers.
JAX_PAGED_DEVICE int32_t OpaqueThread() {
  // The mask tells the compiler that it is not negative.
  return prim::Opaque(prim::ThreadIndex()) & (kAttentionThreads - 1);
}

// Brings a unit's K and V into the stages, with all threads. Keeps little, since registers are
// short: what is needed once per tile is worked out once per tile.
template <int HEAD_DIM, PageKind PAGES>
class PrefillLoader {
 public:
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  static constexpr bool kIsVllm5d = PAGES == PageKind::kVllm5d;

  // `num_keys`: tokens that the unit's last row sees.
  JAX_PAGED_DEVICE explicit PrefillLoader(int32_t num_keys) : num_keys_(num_keys) {}

  JAX_PAGED_DEVICE bool HasTile(int32_t tile) const {
    return tile < (num_keys_ + Traits::kTokens - 1) / Traits::kTokens;
  }

  // Thread t reads the page id of token t of `tile`; kVllm5d: also if only another of the 8 tokens
  // around it is wanted.
  JAX_PAGED_DEVICE void Find(const AttentionArgs& args, int32_t tile) {
    page_id_ = -1;
    if (prim::ThreadIndex() >= Traits::kTokens || !HasTile(tile)) return;
    const int32_t token = tile * Traits::kTokens + prim::ThreadIndex();
    const PrefillUnit unit = LoadUnit<HEAD_DIM>();
    if constexpr (kIsVllm5d) {
      if ((token | 7) < unit.first_key || token / 8 * 8 >= num_keys_) return;
    } else {
      if (token < unit.first_key || token >= num_keys_) return;
    }
    page_id_ = prim::LoadConst(args.page_table +
                               (unit.row * args.pages_per_seq + args.by_page_size(token)));
  }

  // Tells all threads what Find found.
  JAX_PAGED_DEVICE void Publish(const AttentionArgs& args, int32_t tile) const {
    const int32_t thread = OpaqueThread();
    if (thread >= Traits::kTokens) return;
    const bool has_page = page_id_ >= 0 && page_id_ < args.num_pages;
    bool has_token = has_page;
    int64_t offset = -1;
    int64_t v_offset = -1;
    if (has_page) {
      const int32_t token = tile * Traits::kTokens + thread;
      const int32_t slot = token - args.by_page_size(token) * args.page_size;
      const int32_t kv_head = LoadUnit<HEAD_DIM>().rows.kv_head;
      offset = LayerOffset(args, args.k_strides) + args.k_strides.Offset(page_id_, kv_head, slot);
      if constexpr (kIsVllm5d) {
        v_offset =
            LayerOffset(args, args.v_strides) + args.v_strides.Offset(page_id_, kv_head, slot);
        has_token = token >= LoadUnit<HEAD_DIM>().first_key && token < num_keys_;
        if (!has_token) offset = -1;
      }
    }
    prim::Store(Offsets(tile) + thread, offset);
    if (kIsVllm5d && thread % 8 == 0) prim::Store(ValueOffsets(tile) + thread / 8, v_offset);
    const uint32_t mask = prim::Ballot(has_token);
    if (thread % kWarpLanes == 0) prim::Store(TokenMasks(tile) + thread / kWarpLanes, mask);
  }

  // Starts the copies of `tile`, which was published before the last barrier.
  JAX_PAGED_DEVICE static void Issue(const AttentionArgs& args, int32_t tile) {
    const Shared<char> k_tile = KTile(tile);
    const Shared<char> v_tile = VTile(tile);
    if constexpr (kIsVllm5d) {
      CopyAtoms(args, tile, k_tile, v_tile);
    } else {
      CopyRows(args, tile, k_tile, v_tile);
    }
    prim::CpAsyncCommit();
  }

  // kVllm5d. Between the wait for the copies of `tile` and the barrier: of V that this thread has
  // copied, sets tokens to zero that do not exist, since 0 x NaN is NaN.
  JAX_PAGED_DEVICE static void ClearMissing(int32_t tile) {
    const int32_t thread = OpaqueThread();
    const int32_t eight = thread % kEights;
    const uint32_t mask = prim::Load(TokenMasks(tile) + eight / 4) >> eight % 4 * 8 & 0xffu;
    if (mask == 0xffu) return;
    JAX_PAGED_NO_UNROLL
    for (int32_t dim = thread / kEights; dim < HEAD_DIM; dim += kDimStep) {
      const Shared<Word4> atom =
          (VTile(tile) + Traits::TransposedOffset(dim, eight)).template As<Word4>();
      const Word4 x = prim::Load(atom);
      prim::Store(atom, Word4{x.x & PairMask(mask, 0), x.y & PairMask(mask, 2),
                              x.z & PairMask(mask, 4), x.w & PairMask(mask, 6)});
    }
  }

  JAX_PAGED_DEVICE static Shared<char> KTile(int32_t tile) {
    return prim::SharedMemory() +
           (Traits::kQueryBytes + tile % kPrefillStages * Traits::kStageBytes);
  }
  JAX_PAGED_DEVICE static Shared<char> VTile(int32_t tile) {
    return KTile(tile) + Traits::kTileBytes;
  }
  // Which tokens of a tile exist, 32 a word.
  JAX_PAGED_DEVICE static Shared<uint32_t> TokenMasks(int32_t tile) {
    return Traits::template Field<uint32_t>(offsetof(typename Traits::State, token_masks)) +
           tile % kMaskSlots * Traits::kMaskWords;
  }

 private:
  // kVllm5d, where all threads together copy so many chunks of a tile's tokens at a time, or so
  // many dimensions.
  static constexpr int32_t kEights = Traits::kTokens / 8;  // 16 bytes of V are 8 tokens
  static constexpr int32_t kChunkStep = kAttentionThreads / Traits::kTokens;
  static constexpr int32_t kDimStep = kAttentionThreads / kEights;

  JAX_PAGED_DEVICE static void CopyRows(const AttentionArgs& args, int32_t tile,
                                        Shared<char> k_tile, Shared<char> v_tile) {
    const int32_t thread = OpaqueThread();
    int64_t offsets[Traits::kLoads];
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kLoads; ++i) {
      offsets[i] = prim::Load(Offsets(tile) + CopiedRow(thread, i));
    }
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kLoads; ++i) {
      const int32_t row = CopiedRow(thread, i);
      const int32_t chunk = (i * kAttentionThreads + thread) % Row::kRowChunks;
      const bool valid = offsets[i] >= 0;
      const int64_t source = (valid ? offsets[i] : 0) + chunk * 16;
      prim::CpAsync16(k_tile + Row::Offset(row, chunk), args.k_pages + source, valid);
      prim::CpAsync16(v_tile + Row::Offset(row, chunk), args.v_pages + source, valid);
    }
  }

  // kVllm5d. Thread t copies chunks t / kTokens, ... of token t % kTokens of K, and the 8 tokens
  // from t % kEights * 8 of dimensions t / kEights, ... of V: what lies side by side in a page goes
  // to lanes side by side.
  JAX_PAGED_DEVICE static void CopyAtoms(const AttentionArgs& args, int32_t tile,
                                         Shared<char> k_tile, Shared<char> v_tile) {
    const int32_t thread = OpaqueThread();
    const int32_t token = thread % Traits::kTokens;
    const int32_t chunk = thread / Traits::kTokens;
    const int32_t eight = thread % kEights;
    const int32_t dim = thread / kEights;
    const int64_t k_offset = prim::Load(Offsets(tile) + token);
    const int64_t v_offset = prim::Load(ValueOffsets(tile) + eight);
    const bool has_token = k_offset >= 0;
    const bool has_atom = v_offset >= 0;
    const Global<const char> k_from =
        args.k_pages + (has_token ? k_offset + chunk * args.k_strides.atom : 0);
    const Global<const char> v_from =
        args.v_pages + (has_atom ? v_offset + dim * args.v_strides.atom : 0);
    // Within a page and head 32 bits address an atom (MakeArgs checks it).
    const int32_t k_step = static_cast<int32_t>(args.k_strides.atom) * kChunkStep;
    const int32_t v_step = static_cast<int32_t>(args.v_strides.atom) * kDimStep;
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kLoads; ++i) {
      prim::CpAsync16(k_tile + Row::Offset(token, chunk + i * kChunkStep), k_from + i * k_step,
                      has_token);
      prim::CpAsync16(v_tile + Traits::TransposedOffset(dim + i * kDimStep, eight),
                      v_from + i * v_step, has_atom);
    }
  }

  // Of the i-th chunk that a thread copies; the first form shows the compiler constant distances.
  JAX_PAGED_DEVICE static int32_t CopiedRow(int32_t thread, int32_t i) {
    return kAttentionThreads % Row::kRowChunks == 0
               ? thread / Row::kRowChunks + i * (kAttentionThreads / Row::kRowChunks)
               : (i * kAttentionThreads + thread) / Row::kRowChunks;
  }

  JAX_PAGED_DEVICE static Shared<int64_t> Offsets(int32_t tile) {
    return Traits::template Field<int64_t>(offsetof(typename Traits::State, offsets)) +
           tile % kPrefillStages * Traits::kTokens;
  }
  JAX_PAGED_DEVICE static Shared<int64_t> ValueOffsets(int32_t tile) {
    return Traits::template Field<int64_t>(offsetof(typename Traits::State, v_offsets)) +
           tile % kPrefillStages * kEights;
  }

  int32_t num_keys_;
  int32_t page_id_ = -1;
};

// A lane's part of a warp's result.
template <int HEAD_DIM>
struct PrefillState {
  static constexpr int32_t kRowTiles = PrefillTraits<HEAD_DIM>::kRowTiles;

  float o[kRowTiles][HEAD_DIM / 8][4];
  float m[kRowTiles][2];
  float l[kRowTiles][2];

  JAX_PAGED_DEVICE void Clear() {
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < kRowTiles; ++r) {
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
        o[r][n][0] = o[r][n][1] = o[r][n][2] = o[r][n][3] = 0.0f;
      }
      m[r][0] = m[r][1] = kNegativeInfinity;
      l[r][0] = l[r][1] = 0.0f;
    }
  }
};

template <int HEAD_DIM>
JAX_PAGED_DEVICE int32_t FirstWarpRow() {
  return OpaqueThread() / kWarpLanes * PrefillTraits<HEAD_DIM>::kWarpRows;
}

template <int HEAD_DIM>
JAX_PAGED_DEVICE WarpKeys FindWarpKeys(const AttentionArgs& args) {
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  const int32_t end_row = first_row + PrefillTraits<HEAD_DIM>::kWarpRows;
  const int32_t last_row = (end_row < unit.rows.count ? end_row : unit.rows.count) - 1;
  if (first_row > last_row) return {{0, 0}, {0, 0}};
  const KeyRange first = UnitKeys(args, unit, first_row);
  const KeyRange last = UnitKeys(args, unit, last_row);
  return {{first.first, last.end}, {last.first, first.end}};
}

// Puts the warp's rows of Q into its rows of shared memory.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void FillQueries(const AttentionArgs& args, const LogitScale& scale) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  const uint32_t sign = scale.is_negative ? 0x80008000u : 0u;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  JAX_PAGED_UNROLL_4
  for (int32_t i = OpaqueThread() % kWarpLanes; i < Traits::kWarpRows * Row::kRowChunks;
       i += kWarpLanes) {
    const int32_t row = first_row + i / Row::kRowChunks;
    const int32_t chunk = i % Row::kRowChunks;
    Word4 x = {0, 0, 0, 0};
    if (row < unit.rows.count && !scale.is_zero) {
      const int64_t head = HeadIndex(args, segment, unit.rows, row);
      x = prim::LoadConst(
          (args.q + (head * HEAD_DIM + chunk * 8) * int64_t{sizeof(T)}).template As<const Word4>());
      x = {x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign};
    }
    prim::Store((prim::SharedMemory() + Row::Offset(row, chunk)).template As<Word4>(), x);
  }
}

// S = Q K^T of the warp's rows with one tile.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillScores(
    Shared<char> k_tile,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  JAX_PAGED_UNROLL
  for (int32_t k = 0; k < HEAD_DIM / 16; ++k) {
    uint32_t a[Traits::kRowTiles][4];
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      prim::LoadMatrix(a[r], prim::SharedMemory() +
                                 Traits::StepOffset(first_row + r * 16 + lane % 16, k, lane / 16));
    }
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < Traits::kTokens / 16; ++n) {
      uint32_t b[4];  // tokens 0-7 and 8-15, each dimensions 0-7 and 8-15 of the step
      const int32_t token = n * 16 + lane % 8 + lane / 16 * 8;
      prim::LoadMatrix(b, k_tile + Traits::StepOffset(token, k, lane / 8 % 2));
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
        prim::Mma<T>(s[r][2 * n], a[r], b[0], b[1]);
        prim::Mma<T>(s[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// Products become logits, where that takes more than a factor.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillEdit(
    const AttentionArgs& args, int32_t first_token,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      EditLogits</*SPECIAL=*/false>(args, segment, unit.rows,
                                    first_row + r * 16 + half * 8 + lane / 4, half,
                                    first_token + lane % 4 * 2, s[r]);
    }
  }
}

// Sets the scores to -inf that the warp's rows do not see.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillMask(
    const AttentionArgs& args, Shared<uint32_t> token_masks, int32_t first_token,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      // Looked up for each row: kept, it would not fit in the registers of sm_80.
      const int32_t lane = OpaqueThread() % kWarpLanes;
      const PrefillUnit unit = LoadUnit<HEAD_DIM>();
      const int32_t first_row = FirstWarpRow<HEAD_DIM>();
      const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
      KeyRange keys = UnitKeys(args, unit, row);
      keys.first -= first_token + lane % 4 * 2;
      keys.end -= first_token + lane % 4 * 2;
      JAX_PAGED_UNROLL
      for (int32_t word = 0; word < Traits::kMaskWords; ++word) {
        const uint32_t mask = prim::Load(token_masks + word) >> lane % 4 * 2;
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < 4; ++n) {
          JAX_PAGED_UNROLL
          for (int32_t i = 0; i < 2; ++i) {
            const bool is_seen = (mask >> (n * 8 + i) & 1) && keys.Contains(word * 32 + n * 8 + i);
            if (!is_seen) s[r][word * 4 + n][2 * half + i] = kNegativeInfinity;
          }
        }
      }
    }
  }
}

// Scores become weights; m, l and O move on.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void PrefillSoftmax(
    float scale,
    float (&s)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4],
    PrefillState<HEAD_DIM>* state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  float keep[Traits::kRowTiles][2];
  bool moves = false;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      float top = kNegativeInfinity;
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < Traits::kTokens / 8; ++n) {
        top = prim::Max(top, prim::Max(s[r][n][2 * half], s[r][n][2 * half + 1]));
      }
      top = prim::Max(top, prim::ShuffleXor(top, 1));
      top = prim::Max(top, prim::ShuffleXor(top, 2));
      const float m = prim::Max(state->m[r][half], top * scale);
      const float base = Base(m);
      keep[r][half] = prim::Exp2(state->m[r][half] - base);
      moves = moves || keep[r][half] != 1.0f;
      state->m[r][half] = m;
      float sum = 0.0f;
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < Traits::kTokens / 8; ++n) {
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          float& weight = s[r][n][2 * half + i];
          weight = prim::Exp2(prim::Fma(weight, scale, -base));
          sum += weight;
        }
      }
      state->l[r][half] = prim::Fma(state->l[r][half], keep[r][half], sum);
    }
  }
  if (prim::Ballot(moves) == 0) return;
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) state->o[r][n][i] *= keep[r][i / 2];
    }
  }
}

// O += P V. The C layout of S is the A layout of P. l sums the unrounded weights: rounding is
// unbiased.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void PrefillValues(
    Shared<char> v_tile,
    const float (&p)[PrefillTraits<HEAD_DIM>::kRowTiles][PrefillTraits<HEAD_DIM>::kTokens / 8][4],
    PrefillState<HEAD_DIM>* state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  JAX_PAGED_UNROLL
  for (int32_t k = 0; k < Traits::kTokens / 16; ++k) {
    uint32_t a[Traits::kRowTiles][4];
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const float (&x)[4] = p[r][2 * k + i / 2];
        a[r][i] = prim::PackPair<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
      }
    }
    JAX_PAGED_UNROLL
    for (int32_t n = 0; n < HEAD_DIM / 16; ++n) {
      uint32_t b[4];  // dimensions 0-7 and 8-15 of the step, each tokens 0-7 and 8-15
      if constexpr (PAGES == PageKind::kVllm5d) {
        const int32_t dim = n * 16 + lane % 8 + lane / 16 * 8;
        prim::LoadMatrix(b, v_tile + Traits::TransposedOffset(dim, 2 * k + lane / 8 % 2));
      } else {
        prim::LoadMatrixTransposed(b,
                                   v_tile + Traits::StepOffset(k * 16 + lane % 16, n, lane / 16));
      }
      JAX_PAGED_UNROLL
      for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
        prim::Mma<T>(state->o[r][2 * n], a[r], b[0], b[1]);
        prim::Mma<T>(state->o[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// The warp's rows times `factor`, through its rows of Q in shared memory, so that stores are 16
// bytes.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void WriteRows(const AttentionArgs& args, const PrefillState<HEAD_DIM>& state,
                                const float (&factor)[PrefillTraits<HEAD_DIM>::kRowTiles][2]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  prim::SyncWarp();  // every lane has read the queries
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
      JAX_PAGED_UNROLL
      for (int32_t n = 0; n < HEAD_DIM / 8; ++n) {
        const float x = state.o[r][n][2 * half] * factor[r][half];
        const float y = state.o[r][n][2 * half + 1] * factor[r][half];
        prim::Store(
            (prim::SharedMemory() + (Row::Offset(row, n) + lane % 4 * 4)).template As<uint32_t>(),
            factor[r][half] == 0.0f ? 0u : prim::PackPair<T>(x, y));
      }
    }
  }
  prim::SyncWarp();  // the rows are there
  JAX_PAGED_UNROLL_4
  for (int32_t i = lane; i < Traits::kWarpRows * Row::kRowChunks; i += kWarpLanes) {
    const int32_t row = first_row + i / Row::kRowChunks;
    const int32_t chunk = i % Row::kRowChunks;
    if (row >= unit.rows.count) break;
    const int64_t head = HeadIndex(args, segment, unit.rows, row);
    prim::Store(
        (args.out + (head * HEAD_DIM + chunk * 8) * int64_t{sizeof(T)}).template As<Word4>(),
        prim::Load((prim::SharedMemory() + Row::Offset(row, chunk)).template As<Word4>()));
  }
}

// The same for an fp8 output: f32 numbers of one half of the columns fill the rows of Q, then those
// of the other; the code that rounds them stands in a loop, not in every column's place.
template <int HEAD_DIM>
JAX_PAGED_DEVICE void WriteFp8Rows(const AttentionArgs& args, const PrefillState<HEAD_DIM>& state,
                                   const float (&factor)[PrefillTraits<HEAD_DIM>::kRowTiles][2]) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  constexpr int32_t kBlocks = HEAD_DIM / 16;  // of 8 columns in a half
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  const float scale = OutScale(args);
  JAX_PAGED_UNROLL
  for (int32_t part = 0; part < 2; ++part) {
    prim::SyncWarp();  // every lane has read the queries, or the first half
    JAX_PAGED_UNROLL
    for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
        const bool is_empty = factor[r][half] == 0.0f;
        JAX_PAGED_UNROLL
        for (int32_t n = 0; n < kBlocks; ++n) {
          const float (&o)[4] = state.o[r][part * kBlocks + n];
          const Float2 x = {is_empty ? 0.0f : o[2 * half] * factor[r][half],
                            is_empty ? 0.0f : o[2 * half + 1] * factor[r][half]};
          const int32_t chunk = n * 2 + lane % 4 / 2;
          prim::Store((prim::SharedMemory() + (Row::Offset(row, chunk) + lane % 2 * 8))
                          .template As<Float2>(),
                      x);
        }
      }
    }
    prim::SyncWarp();  // the half is there
    JAX_PAGED_NO_UNROLL
    for (int32_t i = lane; i < Traits::kWarpRows * Row::kRowChunks; i += kWarpLanes) {
      const int32_t row = first_row + i / Row::kRowChunks;
      const int32_t chunk = i % Row::kRowChunks;
      if (row >= unit.rows.count) break;
      const int64_t head = HeadIndex(args, segment, unit.rows, row);
      const Float4 x =
          prim::Load((prim::SharedMemory() + Row::Offset(row, chunk)).template As<Float4>());
      const int64_t column = part * (HEAD_DIM / 2) + chunk * 4;
      prim::Store((args.out + (head * HEAD_DIM + column)).template As<uint32_t>(),
                  Fp8Quad(args.out_dtype, x, scale));
    }
  }
}

// Writes the warp's results.
template <typename T, int HEAD_DIM>
JAX_PAGED_DEVICE void FinishPrefill(const AttentionArgs& args,
                                    const PrefillState<HEAD_DIM>& state) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const int32_t lane = OpaqueThread() % kWarpLanes;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Segment segment = PrefillSegment(unit);
  const int32_t first_row = FirstWarpRow<HEAD_DIM>();
  float factor[Traits::kRowTiles][2];  // 0: no key was seen
  JAX_PAGED_UNROLL
  for (int32_t r = 0; r < Traits::kRowTiles; ++r) {
    JAX_PAGED_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t row = first_row + r * 16 + half * 8 + lane / 4;
      float l = state.l[r][half];
      l += prim::ShuffleXor(l, 1);
      l += prim::ShuffleXor(l, 2);
      const int32_t head = row < unit.rows.count ? QueryHead(args, unit.rows, row) : 0;
      const SoftmaxEnd end = EndSoftmax(state.m[r][half], l, LoadSink(args, head));
      factor[r][half] = end.factor;
      if (lane % 4 == 0 && row < unit.rows.count) {
        prim::Store(args.lse + HeadIndex(args, segment, unit.rows, row), end.lse);
      }
    }
  }
  if (args.out_bytes == 1) {  // fp8
    WriteFp8Rows<HEAD_DIM>(args, state, factor);
  } else {
    WriteRows<T, HEAD_DIM>(args, state, factor);
  }
}

// The unit in shared memory, and the ticket for the next. Returns with the stages and the look-ups
// still being read by other warps.
template <typename T, int HEAD_DIM, PageKind PAGES>
JAX_PAGED_DEVICE void PrefillTiles(const AttentionArgs& args, Shared<uint32_t> ticket) {
  using Traits = PrefillTraits<HEAD_DIM>;
  using Loader = PrefillLoader<HEAD_DIM, PAGES>;
  const PrefillUnit unit = LoadUnit<HEAD_DIM>();
  const Shared<WarpKeys> warp_keys =
      Traits::template Field<WarpKeys>(offsetof(typename Traits::State, warp_keys)) +
      prim::WarpIndex();
  if (prim::LaneIndex() == 0) prim::Store(warp_keys, FindWarpKeys<HEAD_DIM>(args));

  const int32_t first_tile = unit.first_key / Traits::kTokens;
  Loader loader(UnitKeys(args, unit, unit.rows.count - 1).end);
  loader.Find(args, first_tile);
  loader.Publish(args, first_tile);
  loader.Find(args, first_tile + 1);
  loader.Publish(args, first_tile + 1);
  prim::SyncThreads();  // the look-ups of the first two tiles
  if (loader.HasTile(first_tile)) Loader::Issue(args, first_tile);
  const LogitScale scale = LoadScale(args);
  FillQueries<T, HEAD_DIM>(args, scale);
  if (prim::ThreadIndex() == 0) prim::Store(ticket, prim::AtomicIncrement(args.ticket, ~0u));

  PrefillState<HEAD_DIM> state;
  state.Clear();
  JAX_PAGED_NO_UNROLL
  for (int32_t tile = first_tile; loader.HasTile(tile); ++tile) {
    prim::CpAsyncWait(0);
    if constexpr (Loader::kIsVllm5d) Loader::ClearMissing(tile);
    // The tile and the look-ups of the next one are there (and the queries); the stage and the
    // look-ups of the tile before have been read.
    prim::SyncThreads();
    if (loader.HasTile(tile + 1)) Loader::Issue(args, tile + 1);
    loader.Find(args, tile + 2);
    const int32_t first_token = tile * Traits::kTokens;
    const KeyRange any = prim::Load(warp_keys).any;
    if (first_token < any.end && first_token + Traits::kTokens > any.first) {
      float s[Traits::kRowTiles][Traits::kTokens / 8][4] = {};
      PrefillScores<T, HEAD_DIM>(Loader::KTile(tile), s);
      if (args.logits.edits()) PrefillEdit<HEAD_DIM>(args, first_token, s);
      const KeyRange all = prim::Load(warp_keys).all;
      bool sees_all = first_token >= all.first && first_token + Traits::kTokens <= all.end;
      JAX_PAGED_UNROLL
      for (int32_t word = 0; word < Traits::kMaskWords; ++word) {
        sees_all = sees_all && prim::Load(Loader::TokenMasks(tile) + word) == ~0u;
      }
      if (!sees_all) {
        PrefillMask<HEAD_DIM>(args, Loader::TokenMasks(tile), first_token, s);
      }
      PrefillSoftmax<HEAD_DIM>(scale.factor, s, &state);
      PrefillValues<T, HEAD_DIM, PAGES>(Loader::VTile(tile), s, &state);
    }
    loader.Publish(args, tile + 2);
  }
  FinishPrefill<T, HEAD_DIM>(args, state);
}

template <typename T, int HEAD_DIM, PageKind PAGES = PageKind::kRows>
JAX_PAGED_DEVICE void PrefillCta(const AttentionArgs& args) {
  using Traits = PrefillTraits<HEAD_DIM>;
  const Shared<PrefillUnit> unit =
      Traits::template Field<PrefillUnit>(offsetof(typename Traits::State, unit));
  const Shared<uint32_t> ticket =
      Traits::template Field<uint32_t>(offsetof(typename Traits::State, ticket));
  // Below 2^31: each unit has more than 16 of num_tokens x num_q_heads packed rows to itself.
  const int32_t num_units =
      static_cast<int32_t>(prim::LoadConst<int64_t>(args.first_prefill + args.max_seqs));
  int32_t index = prim::BlockIndex();
  while (index < num_units) {
    if (prim::WarpIndex() == 0) {
      const PrefillUnit found = FindPrefillUnit(args, index);
      if (prim::LaneIndex() == 0) prim::Store(unit, found);
    }
    prim::SyncThreads();  // the unit; the last ticket has been read
    PrefillTiles<T, HEAD_DIM, PAGES>(args, ticket);
    prim::SyncThreads();  // the ticket; unit, stages and look-ups may be overwritten
    index = prim::GridSize() + static_cast<int32_t>(prim::Load(ticket));
  }
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_CUH_
