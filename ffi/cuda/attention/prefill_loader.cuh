// SPDX-License-Identifier: Apache-2.0

// The prefill kernel's loads: K and V of a unit's tiles, from their pages into the stages.

#ifndef JAX_PAGED_CUDA_ATTENTION_PREFILL_LOADER_CUH_
#define JAX_PAGED_CUDA_ATTENTION_PREFILL_LOADER_CUH_

#include <cstddef>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/prefill_unit.cuh"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/traits.h"
#include "cuda/expand_bytes.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Brings a unit's K and V into the stages, with all threads. Keeps little, since registers are
// short: what is needed once per tile is worked out once per tile.
template <int HEAD_DIM, PageKind PAGES>
class PrefillLoader {
 public:
  using Traits = PrefillTraits<HEAD_DIM>;
  using Row = typename Traits::Row;
  static constexpr bool kIsVllm5d = PAGES == PageKind::kVllm5d;
  static constexpr bool kIsEightBit = PAGES == PageKind::kEightBit;
  static constexpr bool kTakesTreesAndPins = DecodeTraits<HEAD_DIM, PAGES>::kTakesTreesAndPins;
  static constexpr bool kTakesRope = DecodeTraits<HEAD_DIM, PAGES>::kTakesRope;

  // Tiles are numbered without those between pinned tokens and the windows, which are not read.
  JAX_PAGED_DEVICE static int32_t FirstToken(const AttentionArgs& args, int32_t tile) {
    if (kTakesTreesAndPins && args.num_pinned) {
      const PrefillUnit unit = LoadUnit<HEAD_DIM>();
      const TileGap gap = FindGap<Traits::kTokens>(args, unit.row, unit.first_key);
      if (tile >= gap.begin) tile += gap.size;
    }
    return tile * Traits::kTokens;
  }
  JAX_PAGED_DEVICE static bool HasTile(const AttentionArgs& args, int32_t tile) {
    return FirstToken(args, tile) < LoadUnit<HEAD_DIM>().num_keys;
  }

  // Thread t reads the page id of token t of `tile`; kVllm5d: also if only another of the 8 tokens
  // around it is wanted.
  JAX_PAGED_DEVICE void Find(const AttentionArgs& args, int32_t tile) {
    page_id_ = -1;
    if (prim::ThreadIndex() >= Traits::kTokens) return;
    const int32_t token = FirstToken(args, tile) + prim::ThreadIndex();
    const PrefillUnit unit = LoadUnit<HEAD_DIM>();
    if constexpr (kIsVllm5d) {
      if ((token | 7) < unit.first_key || token / 8 * 8 >= unit.num_keys) return;
    } else {
      if (token >= unit.num_keys) return;
      if (token < unit.first_key &&
          !(kTakesTreesAndPins && args.num_pinned && token < NumPinned(args, unit.row))) {
        return;
      }
      if (kTakesRope && args.cos && !HasAngle(args, TokenAt(args, PrefillSegment(unit), token))) {
        return;
      }
    }
    page_id_ = PageOf(args, unit.row, args.by_page_size(token));
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
      const int32_t token = FirstToken(args, tile) + thread;
      const int32_t slot = token - args.by_page_size(token) * args.page_size;
      const int32_t kv_head = LoadUnit<HEAD_DIM>().rows.kv_head;
      if constexpr (kIsVllm5d) {
        offset = LayerOffset(args, args.k_strides) + args.k_strides.Offset(page_id_, kv_head, slot);
        v_offset =
            LayerOffset(args, args.v_strides) + args.v_strides.Offset(page_id_, kv_head, slot);
        has_token = token >= LoadUnit<HEAD_DIM>().first_key &&
                    token < LoadUnit<HEAD_DIM>().num_keys &&
                    HasAngle(args, token);  // rows of such pages have no tree, nor pinned tokens
        if (!has_token) offset = -1;
      } else {
        offset =
            LayerOffset(args, args.row_strides) + args.row_strides.Offset(page_id_, kv_head, slot);
      }
    }
    if (kIsEightBit && HasTile(args, tile)) CopyScales(args, tile, thread, has_page);
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
    } else if constexpr (kIsEightBit) {
      CopyBytes(args, tile);
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

  // kEightBit. The bytes of `tile` that this thread has copied: K as numbers of T. V is f16, as the
  // weights are: rounded to bf16, they would be wrong by eight times as much.
  template <typename T>
  JAX_PAGED_DEVICE static void Widen(const AttentionArgs& args, int32_t tile) {
    WithStored(args.kv_dtype, [&](auto stored) {
      WidenTile<T>(Bytes(tile), KTile(tile), stored);
      WidenTile<Float16>(Bytes(tile) + Traits::kByteTileBytes, VTile(tile), stored);
    });
  }
  // The scales of the tile's tokens: of K, then of V.
  JAX_PAGED_DEVICE static Shared<float> Scales(int32_t tile) {
    return (prim::SharedMemory() +
            (Traits::kSharedBytes + tile % Traits::kScaleSlots * 2 * Traits::kTokens * 4))
        .template As<float>();
  }

  // 16-bit numbers; of 8-bit pages there is one such tile, made of the bytes.
  JAX_PAGED_DEVICE static Shared<char> KTile(int32_t tile) {
    return prim::SharedMemory() +
           (Traits::kQueryBytes + (kIsEightBit ? 0 : tile % kPrefillStages * Traits::kStageBytes));
  }
  JAX_PAGED_DEVICE static Shared<char> VTile(int32_t tile) {
    return KTile(tile) + Traits::kTileBytes;
  }
  // Which tokens of a tile each row sees: first words of all rows, then second ones.
  JAX_PAGED_DEVICE static Shared<uint32_t> RowMasks(int32_t tile) {
    return (kIsEightBit ? Bytes(tile) : prim::SharedMemory() + Traits::kSharedBytes)
        .template As<uint32_t>();
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

  // kEightBit, of K or V.
  static constexpr int32_t kByteChunks = HEAD_DIM / 16;  // of a row
  static constexpr int32_t kByteCopies = Traits::kTokens * kByteChunks;
  static constexpr int32_t kByteLoads = CeilDiv<int32_t>(kByteCopies, kAttentionThreads);

  // What is copied as the `index`-th. Where rows are swizzled, 8 lanes side by side have 4 chunks
  // of each of two rows: widened, these lie in 8 bank groups.
  JAX_PAGED_DEVICE static int32_t ByteRow(int32_t index) {
    if (!Row::kSwizzled) return index / kByteChunks;
    return index / (2 * kByteChunks) * 2 + index / 4 % 2;
  }
  JAX_PAGED_DEVICE static int32_t ByteChunk(int32_t index) {
    if (!Row::kSwizzled) return index % kByteChunks;
    return index % 4 + index % (2 * kByteChunks) / 8 * 4;
  }

  JAX_PAGED_DEVICE static Shared<char> Bytes(int32_t tile) {
    return prim::SharedMemory() +
           (Traits::kBytesOffset + tile % kPrefillStages * 2 * Traits::kByteTileBytes);
  }

  // kEightBit. What this thread has copied of K or V.
  template <typename T, typename Stored>
  JAX_PAGED_DEVICE static void WidenTile(Shared<char> bytes, Shared<char> tile, Stored stored) {
    const int32_t thread = OpaqueThread();
    JAX_PAGED_NO_UNROLL  // more would spill on sm_100
        for (int32_t i = 0; i < kByteLoads; ++i) {
      const int32_t index = i * kAttentionThreads + thread;
      if (kByteCopies % kAttentionThreads != 0 && index >= kByteCopies) continue;
      const int32_t row = ByteRow(index);
      const int32_t chunk = ByteChunk(index);
      const Word4 codes = prim::Load((bytes + index * 16).template As<Word4>());
      const Pairs x[4] = {Expand<T>(codes.x, stored), Expand<T>(codes.y, stored),
                          Expand<T>(codes.z, stored), Expand<T>(codes.w, stored)};
      JAX_PAGED_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        prim::Store(
            (tile + Row::Offset(row, 2 * chunk + half)).template As<Word4>(),
            Word4{x[2 * half].low, x[2 * half].high, x[2 * half + 1].low, x[2 * half + 1].high});
      }
    }
  }

  // Where a row lies in a pool; the pool's begin where there is none.
  JAX_PAGED_DEVICE static Global<const char> Source(Global<const char> pages,
                                                    const PageStrides& strides, int64_t row) {
    return pages + (row >= 0 ? row : 0) * strides.atom;
  }

  JAX_PAGED_DEVICE static void CopyBytes(const AttentionArgs& args, int32_t tile) {
    const int32_t thread = OpaqueThread();
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kByteLoads; ++i) {
      const int32_t index = i * kAttentionThreads + thread;
      if (kByteCopies % kAttentionThreads != 0 && index >= kByteCopies) continue;
      const int64_t row = prim::Load(Offsets(tile) + ByteRow(index));
      const int32_t first = ByteChunk(index) * 16;
      const Shared<char> to = Bytes(tile) + index * 16;
      prim::CpAsync16(to, Source(args.k_pages, args.k_strides, row) + first,
                      row >= 0 && first < args.head_dim);
      prim::CpAsync16(to + Traits::kByteTileBytes,
                      Source(args.v_pages, args.v_strides, row) + first,
                      row >= 0 && first < args.v_head_dim);
    }
  }

  // kEightBit with scales per token: those of the thread's token.
  JAX_PAGED_DEVICE void CopyScales(const AttentionArgs& args, int32_t tile, int32_t thread,
                                   bool has_page) const {
    if (!args.k_scale.per_token && !args.v_scale.per_token) return;
    int64_t index = 0;
    if (has_page) {
      const int32_t token = FirstToken(args, tile) + thread;
      const int32_t slot = token - args.by_page_size(token) * args.page_size;
      index = ScaleIndex(args, prim::LoadConst(args.layer), page_id_,
                         LoadUnit<HEAD_DIM>().rows.kv_head, slot);
    }
    const Shared<char> to = (Scales(tile) + thread).template As<char>();
    if (args.k_scale.per_token) {
      prim::CpAsync4(to, args.k_scale.data.template As<const char>() + index * 4, has_page);
    }
    if (args.v_scale.per_token) {
      prim::CpAsync4(to + Traits::kTokens * 4,
                     args.v_scale.data.template As<const char>() + index * 4, has_page);
    }
  }

  JAX_PAGED_DEVICE static void CopyRows(const AttentionArgs& args, int32_t tile,
                                        Shared<char> k_tile, Shared<char> v_tile) {
    const int32_t thread = OpaqueThread();
    int64_t rows[Traits::kLoads];
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kLoads; ++i) {
      rows[i] = prim::Load(Offsets(tile) + CopiedRow(thread, i));
    }
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < Traits::kLoads; ++i) {
      const int32_t row = CopiedRow(thread, i);
      const int32_t chunk = (i * kAttentionThreads + thread) % Row::kRowChunks;
      prim::CpAsync16(k_tile + Row::Offset(row, chunk),
                      Source(args.k_pages, args.k_strides, rows[i]) + chunk * 16,
                      rows[i] >= 0 && chunk * 8 < args.head_dim);
      prim::CpAsync16(v_tile + Row::Offset(row, chunk),
                      Source(args.v_pages, args.v_strides, rows[i]) + chunk * 16,
                      rows[i] >= 0 && chunk * 8 < args.v_head_dim);
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
                      has_token && (chunk + i * kChunkStep) * 8 < args.head_dim);
      prim::CpAsync16(v_tile + Traits::TransposedOffset(dim + i * kDimStep, eight),
                      v_from + i * v_step, has_atom && dim + i * kDimStep < args.v_head_dim);
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

  int32_t page_id_ = -1;
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_PREFILL_LOADER_CUH_
