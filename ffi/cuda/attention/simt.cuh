// SPDX-License-Identifier: Apache-2.0

// Attention without tensor cores: f32, any head_dim or v_head_dim that decode.cuh has no kernel
// for, rope inside attention with 8-bit K, vllm5d pages of odd sizes or 8 bits, and devices with
// too little shared memory for decode.cuh (select.h). Right rather than fast.
//
// Grid, pieces and merge are those of decode.cuh: persistent CTAs of 128 threads, units of 16
// packed rows, tiles of 64 KV tokens. Everything is f32 in shared memory, with CTA barriers between
// the steps:
//   look up   thread t < 64: where token t lies, whether it exists and is not left of the row's
//             window, the scales of its K and V
//   scores    for each 64 dimensions: all threads bring those of K, as floats and turned, into a
//             stage; then thread t: token t % 64 with rows t / 64, t / 64 + 2, ...
//   softmax   warp w: rows 4w to 4w + 3
//   values    for each 64 columns: V into the stage; then thread t: 4 columns of rows t / 16 and t
//   /
//             16 + 8; a value that a row does not see is not used
// The loads of a stage are of 4 elements, the lanes side by side in a page, 8 of a thread at a
// time.
//
// Shared memory: (16 x (head_dim + v_head_dim) + 16 x 64 + 64 x 68) x 4 bytes + 2.3 KiB: 87 KiB at
// 512 + 512. Bound by reads of shared memory: 12 or 10 wavefronts for 32 fused multiply-adds of a
// warp, which are 8 clocks of a multiprocessor.

#ifndef JAX_PAGED_CUDA_ATTENTION_SIMT_CUH_
#define JAX_PAGED_CUDA_ATTENTION_SIMT_CUH_

#include <cstddef>
#include <type_traits>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/attention/simt_stage.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

template <typename T>
class SimtCta {
 public:
  JAX_PAGED_DEVICE explicit SimtCta(const AttentionArgs& args)
      : args_(args),
        scale_(LoadScale(args)),
        layer_(prim::LoadConst(args.layer)),
        staged_(args),
        shared_(prim::SharedMemory()),
        q_((shared_ + kSimtStateBytes).As<float>()),
        o_(q_ + kTileRows * args.head_dim) {}

  JAX_PAGED_DEVICE void Run(const WorkRange& range) {
    Segment segment;
    if (!FirstSegment(args_, range, &segment)) return;
    do {
      const UnitRows rows = RowsOf(args_, segment);
      Begin(segment, rows);
      for (int32_t tile = 0; tile < segment.num_tiles; ++tile) {
        const int32_t first_token = TileToken(args_, segment, tile);
        LookUp(segment, rows.kv_head, first_token);
        prim::SyncThreads();  // look-ups, and before the first tile q, o, m and l
        Scores(segment, rows, first_token);
        prim::SyncThreads();  // scores
        Softmax(rows);
        Values(rows);         // a barrier behind its stage parts weights and keep from their reads
        prim::SyncThreads();  // o; look-ups and weights may be overwritten
      }
      Finish(range, segment, rows);
      prim::SyncThreads();  // q, o, m and l may be overwritten
    } while (NextSegment(args_, range, &segment));
  }

 private:
  template <typename U>
  JAX_PAGED_DEVICE Shared<U> Field(size_t offset) const {
    return (shared_ + static_cast<int64_t>(offset)).template As<U>();
  }
  JAX_PAGED_DEVICE Shared<float> Score(int32_t row, int32_t token) const {
    return Field<float>(offsetof(SimtShared, scores)) + (row * kTileTokens + token);
  }
  JAX_PAGED_DEVICE Shared<KeyRange> Visible() const {
    return Field<KeyRange>(offsetof(SimtShared, visible));
  }
  JAX_PAGED_DEVICE Shared<int32_t> Position() const {
    return Field<int32_t>(offsetof(SimtShared, position));
  }
  JAX_PAGED_DEVICE Shared<LogitEdit> Edit() const {
    return Field<LogitEdit>(offsetof(SimtShared, edit));
  }
  JAX_PAGED_DEVICE Shared<Float4> OutQuad(int32_t row, int32_t column) const {
    return (o_ + (row * args_.v_head_dim + column)).template As<Float4>();
  }
  JAX_PAGED_DEVICE Shared<float> M() const { return Field<float>(offsetof(SimtShared, m)); }
  JAX_PAGED_DEVICE Shared<float> L() const { return Field<float>(offsetof(SimtShared, l)); }
  JAX_PAGED_DEVICE Shared<float> Keep() const { return Field<float>(offsetof(SimtShared, keep)); }

  JAX_PAGED_DEVICE float LoadQuery(int64_t at) const {
    return prim::ToFloat(prim::LoadConst(args_.q.template As<const T>() + at));
  }

  // Element `dim`, x, of a query that stands at `position`, after rope.
  JAX_PAGED_DEVICE float Turned(float x, int64_t head, int32_t dim, int32_t position) const {
    if (dim >= 2 * args_.rope_half || !HasAngle(args_, position)) return x;
    const auto pair = staged_.PairOf(dim);
    const float other = LoadQuery(head * args_.head_dim + pair.other);
    return staged_.Rounded(staged_.TurnedBy(int64_t{position} * args_.rope_half, pair, x, other));
  }

  JAX_PAGED_DEVICE void Begin(const Segment& segment, const UnitRows& rows) {
    const int32_t thread = prim::ThreadIndex();
    const float sign = scale_.is_negative ? -1.0f : 1.0f;
    for (int32_t i = thread; i < rows.count * args_.head_dim; i += kAttentionThreads) {
      const int32_t row = i / args_.head_dim;
      const int64_t head = HeadIndex(args_, segment, rows, row);
      const int64_t at = head * args_.head_dim + (i - row * args_.head_dim);
      float x = LoadQuery(at);
      if (args_.cos) {
        x = Turned(x, head, i - row * args_.head_dim, QueryToken(args_, segment, rows, row));
      }
      prim::Store(q_ + i, scale_.is_zero ? 0.0f : sign * x);
    }
    for (int32_t i = thread; i < rows.count * args_.v_head_dim; i += kAttentionThreads) {
      prim::Store(o_ + i, 0.0f);
    }
    if (thread < kTileRows) {
      prim::Store(M() + thread, kNegativeInfinity);
      prim::Store(L() + thread, 0.0f);
      if (thread < rows.count) {
        if (args_.logits.alibi_slopes) {
          prim::Store(Position() + thread, QueryToken(args_, segment, rows, thread));
        }
        if (args_.logits.edits()) {
          prim::Store(Edit() + thread, LoadEdit(args_, QueryHead(args_, rows, thread)));
        }
      }
      prim::Store(Visible() + thread, SeenKeys(args_, segment, rows, thread));
    }
  }

  JAX_PAGED_DEVICE void LookUp(const Segment& segment, int32_t kv_head, int32_t first_token) {
    const int32_t thread = prim::ThreadIndex();
    if (thread >= kTileTokens) return;
    const int32_t token = first_token + thread;
    bool exists = IsRead(args_, segment, token);
    int64_t k_offset = 0;
    int64_t v_offset = 0;
    if (exists) {
      const int32_t column = args_.by_page_size(token);  // of the page table
      const int32_t page = PageOf(args_, segment.row, column);
      exists = page >= 0 && page < args_.num_pages;
      if (exists) {
        const int32_t slot = token - column * args_.page_size;
        k_offset = args_.k_strides.Offset(page, kv_head, slot);
        v_offset = args_.v_strides.Offset(page, kv_head, slot);
        const int64_t index = ScaleIndex(args_, layer_, page, kv_head, slot);
        if (args_.k_scale.data) {
          prim::Store(staged_.KScaleOf() + thread, LoadScaleOf(args_.k_scale, kv_head, index));
        }
        if (args_.v_scale.data) {
          prim::Store(staged_.VScaleOf() + thread, LoadScaleOf(args_.v_scale, kv_head, index));
        }
      }
    }
    prim::Store(staged_.KOffset() + thread, k_offset);
    prim::Store(staged_.VOffset() + thread, v_offset);
    prim::Store(staged_.Exists() + thread, static_cast<int32_t>(exists));
  }

  JAX_PAGED_DEVICE static float LoadScaleOf(const DeviceKvScale& scale, int32_t kv_head,
                                            int64_t index) {
    return prim::LoadConst(scale.data + (scale.per_token ? index : kv_head));
  }

  JAX_PAGED_DEVICE void Scores(const Segment& segment, const UnitRows& rows, int32_t first_token) {
    constexpr int32_t kStep = kAttentionThreads / kTileTokens;
    constexpr int32_t kRows = kTileRows / kStep;
    const int32_t token = prim::ThreadIndex() % kTileTokens;
    const int32_t first_row = prim::ThreadIndex() / kTileTokens;
    float sum[kRows] = {};
    for (int32_t first = 0; first < args_.head_dim; first += kStageDims) {
      if (first > 0) prim::SyncThreads();  // the stage before has been read
      staged_.Keys(segment, first_token, first);
      prim::SyncThreads();  // the stage
      const int32_t rest = args_.head_dim - first;
      const auto multiply = [&](auto all_rows) {
        JAX_PAGED_NO_UNROLL
        for (int32_t d = 0; d < (rest < kStageDims ? rest : kStageDims); d += 4) {
          const Float4 x = prim::Load(staged_.Quad(token, d));
          JAX_PAGED_UNROLL
          for (int32_t i = 0; i < kRows; ++i) {
            const int32_t row = first_row + i * kStep;
            if (!all_rows.value && row >= rows.count) continue;
            const Float4 q =
                prim::Load((q_ + (row * args_.head_dim + first + d)).template As<Float4>());
            sum[i] = prim::Fma(q.x, x.x, sum[i]);
            sum[i] = prim::Fma(q.y, x.y, sum[i]);
            sum[i] = prim::Fma(q.z, x.z, sum[i]);
            sum[i] = prim::Fma(q.w, x.w, sum[i]);
          }
        }
      };
      if (rows.count == kTileRows) {
        multiply(std::true_type());  // without branches
      } else {
        multiply(std::false_type());
      }
    }
    const bool exists = prim::Load(staged_.Exists() + token) != 0;
    if (exists && args_.k_scale.data) {
      const float scale = prim::Load(staged_.KScaleOf() + token);
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kRows; ++i) sum[i] *= scale;
    }
    const RowTree tree = segment.Tree();
    if (args_.logits.edits()) {
      const bool has_places = static_cast<bool>(args_.logits.alibi_slopes);
      const int32_t position = has_places ? TokenAt(args_, segment, first_token + token) : 0;
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t row = first_row + i * kStep;
        if (row >= rows.count) continue;
        const int32_t distance = has_places ? position - prim::Load(Position() + row) : 0;
        sum[i] = prim::Load(Edit() + row)(sum[i], static_cast<float>(distance));
      }
    }
    JAX_PAGED_UNROLL
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t row = first_row + i * kStep;
      bool is_seen =
          exists && Sees(args_, segment, prim::Load(Visible() + row), first_token + token);
      if (is_seen && tree.NodeOf(first_token + token) >= 0) {
        const int32_t query = args_.by_group_size(rows.first + row);
        is_seen =
            SeesKey(args_, tree, FindQuery(args_, tree, QueryPosition(segment.lengths, query)),
                    first_token + token);
      }
      prim::Store(Score(row, token), is_seen ? sum[i] : kNegativeInfinity);
    }
  }

  // Scores become weights; a masked token keeps its -inf, so that Values can tell.
  JAX_PAGED_DEVICE void Softmax(const UnitRows& rows) {
    constexpr int32_t kRowsPerWarp = kTileRows * kWarpLanes / kAttentionThreads;
    const int32_t lane = prim::LaneIndex();
    for (int32_t i = 0; i < kRowsPerWarp; ++i) {
      const int32_t row = prim::WarpIndex() * kRowsPerWarp + i;
      if (row >= rows.count) break;
      const float s0 = prim::Load(Score(row, lane));
      const float s1 = prim::Load(Score(row, lane + kWarpLanes));
      float top = prim::Max(s0, s1);
      for (int32_t mask = 1; mask < kWarpLanes; mask *= 2) {
        top = prim::Max(top, prim::ShuffleXor(top, mask));
      }
      const float old_m = prim::Load(M() + row);
      const float old_l = prim::Load(L() + row);
      const float m = prim::Max(old_m, top * scale_.factor);
      const float p0 = prim::Exp2(prim::Fma(s0, scale_.factor, -Base(m)));
      const float p1 = prim::Exp2(prim::Fma(s1, scale_.factor, -Base(m)));
      float sum = p0 + p1;
      for (int32_t mask = 1; mask < kWarpLanes; mask *= 2) sum += prim::ShuffleXor(sum, mask);
      if (s0 != kNegativeInfinity) prim::Store(Score(row, lane), p0);
      if (s1 != kNegativeInfinity) prim::Store(Score(row, lane + kWarpLanes), p1);
      const float keep = prim::Exp2(old_m - Base(m));
      prim::SyncWarp();  // every lane has read m and l
      if (lane == 0) {
        prim::Store(M() + row, m);
        prim::Store(L() + row, prim::Fma(old_l, keep, sum));
        prim::Store(Keep() + row, keep);
      }
    }
  }

  JAX_PAGED_DEVICE void Values(const UnitRows& rows) {
    constexpr int32_t kQuads = kStageDims / 4;
    constexpr int32_t kStep = kAttentionThreads / kQuads;
    constexpr int32_t kRows = kTileRows / kStep;
    const int32_t quad = prim::ThreadIndex() % kQuads * 4;
    const int32_t first_row = prim::ThreadIndex() / kQuads;
    for (int32_t first = 0; first < args_.v_head_dim; first += kStageDims) {
      if (first > 0) prim::SyncThreads();  // the stage before has been read
      staged_.Values(first);
      prim::SyncThreads();  // the stage
      if (first + quad >= args_.v_head_dim || first_row >= rows.count) continue;
      Float4 sum[kRows];
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t row = first_row + i * kStep;
        sum[i] = {0, 0, 0, 0};
        if (row >= rows.count) continue;
        const Float4 o = prim::Load(OutQuad(row, first + quad));
        const float keep = prim::Load(Keep() + row);
        sum[i] = {o.x * keep, o.y * keep, o.z * keep, o.w * keep};
      }
      JAX_PAGED_NO_UNROLL
      for (int32_t token = 0; token < kTileTokens; token += 4) {
        Float4 weights[kRows];
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < kRows; ++i) {
          weights[i] = prim::Load(Score(first_row + i * kStep, token).template As<Float4>());
        }
        JAX_PAGED_UNROLL
        for (int32_t t = 0; t < 4; ++t) {
          const Float4 x = prim::Load(staged_.Quad(token + t, quad));
          JAX_PAGED_UNROLL
          for (int32_t i = 0; i < kRows; ++i) {
            const Float4& of = weights[i];
            const float weight = t == 0 ? of.x : (t == 1 ? of.y : (t == 2 ? of.z : of.w));
            if (weight == kNegativeInfinity) continue;  // as of rows beyond the unit's
            sum[i].x = prim::Fma(weight, x.x, sum[i].x);
            sum[i].y = prim::Fma(weight, x.y, sum[i].y);
            sum[i].z = prim::Fma(weight, x.z, sum[i].z);
            sum[i].w = prim::Fma(weight, x.w, sum[i].w);
          }
        }
      }
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t row = first_row + i * kStep;
        if (row < rows.count) prim::Store(OutQuad(row, first + quad), sum[i]);
      }
    }
  }

  JAX_PAGED_DEVICE void Finish(const WorkRange& range, const Segment& segment,
                               const UnitRows& rows) {
    const Destination to = DestinationOf(args_, range, segment, rows);
    const int32_t row_quads = args_.v_head_dim / 4;
    for (int32_t i = prim::ThreadIndex(); i < rows.count * row_quads; i += kAttentionThreads) {
      const int32_t row = i / row_quads;
      const int32_t column = (i - row * row_quads) * 4;
      const float m = prim::Load(M() + row), l = prim::Load(L() + row);
      RowWriter<T>(args_, segment, rows, to, row, m, l, /*with_ml=*/column == 0)
          .Write(args_, column, prim::Load((o_ + i * 4).template As<Float4>()));
    }
    MergeIfLast<T>(args_, segment, rows, to, Field<char>(offsetof(SimtShared, merge)));
  }

  const AttentionArgs& args_;
  const LogitScale scale_;
  const int32_t layer_;
  const SimtStage<T> staged_;
  const Shared<char> shared_;
  const Shared<float> q_;
  const Shared<float> o_;
};

template <typename T>
JAX_PAGED_DEVICE void RunSimt(const AttentionArgs& args) {
  const WorkRange range = MyRange(args);
  if (range.begin < range.end) SimtCta<T>(args).Run(range);
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_SIMT_CUH_
