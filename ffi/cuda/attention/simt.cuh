// SPDX-License-Identifier: Apache-2.0

// Attention without tensor cores: f32, any head_dim or v_head_dim that decode.cuh has no kernel
// for, rope inside attention, 8-bit K and V, vllm5d pages of odd sizes or 8 bits, and devices with
// too little shared memory for decode.cuh (select.h). Right rather than fast.
//
// Grid, pieces and merge are those of decode.cuh: persistent CTAs of 128 threads, units of 16
// packed rows, tiles of 64 KV tokens. Everything is f32 in shared memory, with CTA barriers between
// the steps:
//   look up   thread t < 64: where token t lies, whether it exists and is not left of the row's
//             window, the scales of its K and V
//   scores    thread t: token t % 64 with rows t / 64, t / 64 + 2, ...; K is read straight from
//             its page
//   softmax   warp w: rows 4w to 4w + 3
//   values    thread t: columns t, t + 128, ... of all rows; a value that a row does not see is
//             not used
//
// Shared memory: (16 x (head_dim + v_head_dim) + 16 x 64) x 4 bytes + 2.3 KiB: 70 KiB at 512 + 512.
// Bound by shared-memory reads and uncoalesced loads of K.

#ifndef JAX_PAGED_CUDA_ATTENTION_SIMT_CUH_
#define JAX_PAGED_CUDA_ATTENTION_SIMT_CUH_

#include <cstddef>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Followed by q [kTileRows, head_dim] and o [kTileRows, v_head_dim].
struct SimtShared {
  alignas(16) int64_t k_offset[kTileTokens];
  int64_t v_offset[kTileTokens];
  float scores[kTileRows * kTileTokens];
  int32_t exists[kTileTokens];
  float k_scale[kTileTokens];  // these two only if a scale is given
  float v_scale[kTileTokens];
  KeyRange visible[kTileRows];
  int32_t position[kTileRows];  // in the sequence, of the row's query
  LogitEdit edit[kTileRows];    // only if logits are edited
  float m[kTileRows];
  float l[kTileRows];
  float keep[kTileRows];
  MergeShared<> merge;
};

inline constexpr int32_t kSimtStateBytes = RoundUp<int32_t>(sizeof(SimtShared), 16);

JAX_PAGED_HOST_DEVICE inline int32_t SimtSharedBytes(int32_t head_dim, int32_t v_head_dim) {
  return kSimtStateBytes + kTileRows * (head_dim + v_head_dim) * 4;
}

template <typename T>
class SimtCta {
 public:
  JAX_PAGED_DEVICE explicit SimtCta(const AttentionArgs& args)
      : args_(args),
        scale_(LoadScale(args)),
        layer_(prim::LoadConst(args.layer)),
        k_(LayerPages(args, args.k_pages, args.k_strides)),
        v_(LayerPages(args, args.v_pages, args.v_strides)),
        shared_(prim::SharedMemory()),
        q_((shared_ + kSimtStateBytes).As<float>()),
        o_(q_ + kTileRows * args.head_dim) {}

  JAX_PAGED_DEVICE void Run(const WorkRange& range) {
    Segment segment = FirstSegment(args_, range);
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
        prim::SyncThreads();  // weights, m, l and keep
        Values(rows);
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
  JAX_PAGED_DEVICE Shared<int64_t> KOffset() const {
    return Field<int64_t>(offsetof(SimtShared, k_offset));
  }
  JAX_PAGED_DEVICE Shared<int64_t> VOffset() const {
    return Field<int64_t>(offsetof(SimtShared, v_offset));
  }
  JAX_PAGED_DEVICE Shared<float> Score(int32_t row, int32_t token) const {
    return Field<float>(offsetof(SimtShared, scores)) + (row * kTileTokens + token);
  }
  JAX_PAGED_DEVICE Shared<int32_t> Exists() const {
    return Field<int32_t>(offsetof(SimtShared, exists));
  }
  JAX_PAGED_DEVICE Shared<float> KScaleOf() const {
    return Field<float>(offsetof(SimtShared, k_scale));
  }
  JAX_PAGED_DEVICE Shared<float> VScaleOf() const {
    return Field<float>(offsetof(SimtShared, v_scale));
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
  JAX_PAGED_DEVICE Shared<float> M() const { return Field<float>(offsetof(SimtShared, m)); }
  JAX_PAGED_DEVICE Shared<float> L() const { return Field<float>(offsetof(SimtShared, l)); }
  JAX_PAGED_DEVICE Shared<float> Keep() const { return Field<float>(offsetof(SimtShared, keep)); }

  // Where the query of a packed row stands in the sequence, if that matters.
  JAX_PAGED_DEVICE int32_t QueryToken(const Segment& segment, const UnitRows& rows,
                                      int32_t row) const {
    const int32_t query = args_.by_group_size(rows.first + row);
    const int32_t position = QueryPosition(segment.lengths, query);
    return args_.cos || args_.logits.alibi_slopes ? TokenAt(args_, segment, position) : position;
  }

  // Whether the tables of rope reach this position.
  JAX_PAGED_DEVICE bool HasAngle(int32_t position) const {
    return position >= 0 && position < args_.max_positions;
  }

  JAX_PAGED_DEVICE float LoadQuery(int64_t at) const {
    return prim::ToFloat(prim::LoadConst(args_.q.template As<const T>() + at));
  }

  // The dimension that turns together with `dim`, its angle, and which of the two it is.
  struct Pair {
    int32_t other;
    int32_t angle;
    bool is_first;
  };
  JAX_PAGED_DEVICE Pair PairOf(int32_t dim) const {
    if (args_.rope_interleaved) return {dim ^ 1, dim / 2, dim % 2 == 0};
    const bool is_first = dim < args_.rope_half;
    const int32_t angle = is_first ? dim : dim - args_.rope_half;
    return {is_first ? dim + args_.rope_half : angle, angle, is_first};
  }

  // Element `dim`, x, of a query that stands at `position`, after rope.
  JAX_PAGED_DEVICE float Turned(float x, int64_t head, int32_t dim, int32_t position) const {
    if (dim >= 2 * args_.rope_half || !HasAngle(position)) return x;
    const Pair pair = PairOf(dim);
    const int64_t at = int64_t{position} * args_.rope_half + pair.angle;
    const float other = LoadQuery(head * args_.head_dim + pair.other);
    const float sin = prim::LoadConst(args_.sin + at);
    return prim::Fma(pair.is_first ? -other : other, sin, x * prim::LoadConst(args_.cos + at));
  }

  // Element `dim` of a query turned back by the angles of a key: q . turned(k) = turned back(q) .
  // k, and so K can be read in the order in which it is stored.
  JAX_PAGED_DEVICE float TurnedBack(Shared<float> q, int32_t dim, int64_t angles) const {
    const float x = prim::Load(q + dim);
    if (dim >= 2 * args_.rope_half) return x;
    const Pair pair = PairOf(dim);
    const float other = prim::Load(q + pair.other);
    const float sin = prim::LoadConst(args_.sin + (angles + pair.angle));
    const float cos = prim::LoadConst(args_.cos + (angles + pair.angle));
    return prim::Fma(pair.is_first ? other : -other, sin, x * cos);
  }

  JAX_PAGED_DEVICE void Begin(const Segment& segment, const UnitRows& rows) {
    const int32_t thread = prim::ThreadIndex();
    const float sign = scale_.is_negative ? -1.0f : 1.0f;
    for (int32_t i = thread; i < rows.count * args_.head_dim; i += kAttentionThreads) {
      const int32_t row = i / args_.head_dim;
      const int64_t head = HeadIndex(args_, segment, rows, row);
      const int64_t at = head * args_.head_dim + (i - row * args_.head_dim);
      float x = LoadQuery(at);
      if (args_.cos) x = Turned(x, head, i - row * args_.head_dim, QueryToken(segment, rows, row));
      prim::Store(q_ + i, scale_.is_zero ? 0.0f : sign * x);
    }
    for (int32_t i = thread; i < rows.count * args_.v_head_dim; i += kAttentionThreads) {
      prim::Store(o_ + i, 0.0f);
    }
    if (thread < kTileRows) {
      prim::Store(M() + thread, kNegativeInfinity);
      prim::Store(L() + thread, 0.0f);
      KeyRange visible = VisibleKeys(args_, segment, rows, thread);
      if (thread < rows.count) {
        const int32_t position = QueryToken(segment, rows, thread);
        if (args_.cos && !HasAngle(position)) visible = {0, 0};
        prim::Store(Position() + thread, position);
        if (args_.logits.edits()) {
          prim::Store(Edit() + thread, LoadEdit(args_, QueryHead(args_, rows, thread)));
        }
      }
      prim::Store(Visible() + thread, visible);
    }
  }

  JAX_PAGED_DEVICE void LookUp(const Segment& segment, int32_t kv_head, int32_t first_token) {
    const int32_t thread = prim::ThreadIndex();
    if (thread >= kTileTokens) return;
    const int32_t token = first_token + thread;
    bool exists = IsRead(args_, segment, token);
    if (args_.cos && exists) exists = HasAngle(TokenAt(args_, segment, token));
    int64_t k_offset = 0;
    int64_t v_offset = 0;
    if (exists) {
      const int32_t column = args_.by_page_size(token);  // of the page table
      const int32_t page =
          prim::LoadConst(args_.page_table + (segment.row * args_.pages_per_seq + column));
      exists = page >= 0 && page < args_.num_pages;
      if (exists) {
        const int32_t slot = token - column * args_.page_size;
        k_offset = args_.k_strides.Offset(page, kv_head, slot);
        v_offset = args_.v_strides.Offset(page, kv_head, slot);
        const int64_t index = ScaleIndex(args_, layer_, page, kv_head, slot);
        if (args_.k_scale.data) {
          prim::Store(KScaleOf() + thread, LoadScaleOf(args_.k_scale, kv_head, index));
        }
        if (args_.v_scale.data) {
          prim::Store(VScaleOf() + thread, LoadScaleOf(args_.v_scale, kv_head, index));
        }
      }
    }
    prim::Store(KOffset() + thread, k_offset);
    prim::Store(VOffset() + thread, v_offset);
    prim::Store(Exists() + thread, static_cast<int32_t>(exists));
  }

  JAX_PAGED_DEVICE static float LoadScaleOf(const DeviceKvScale& scale, int32_t kv_head,
                                            int64_t index) {
    return prim::LoadConst(scale.data + (scale.per_token ? index : kv_head));
  }

  // Contiguous dimensions of a token.
  JAX_PAGED_DEVICE int32_t AtomDims(const PageStrides& strides) const {
    return static_cast<int32_t>(strides.atom_bytes) / args_.kv_bytes;
  }

  // A stored value, before its scale.
  JAX_PAGED_DEVICE float LoadStored(Global<const char> at) const {
    switch (args_.kv_dtype) {
      case Dtype::kFloat8E4M3:
        return prim::ToFloat(prim::LoadConst(at.As<const Float8E4M3>()));
      case Dtype::kFloat8E5M2:
        return prim::ToFloat(prim::LoadConst(at.As<const Float8E5M2>()));
      case Dtype::kInt8:
        return prim::ToFloat(prim::LoadConst(at.As<const Int8>()));
      default:
        return prim::ToFloat(prim::LoadConst(at.As<const T>()));
    }
  }

  JAX_PAGED_DEVICE void Scores(const Segment& segment, const UnitRows& rows, int32_t first_token) {
    constexpr int32_t kStep = kAttentionThreads / kTileTokens;
    constexpr int32_t kRows = kTileRows / kStep;
    const int32_t token = prim::ThreadIndex() % kTileTokens;
    const int32_t first_row = prim::ThreadIndex() / kTileTokens;
    float sum[kRows] = {};
    const bool exists = prim::Load(Exists() + token) != 0;
    if (exists) {
      Global<const char> atom = k_ + prim::Load(KOffset() + token);
      const int32_t atom_dims = AtomDims(args_.k_strides);
      const int64_t angles =
          args_.cos ? int64_t{TokenAt(args_, segment, first_token + token)} * args_.rope_half : 0;
      for (int32_t d = 0, i_atom = 0; d < args_.head_dim; ++d, ++i_atom) {
        if (i_atom == atom_dims) {
          i_atom = 0;
          atom = atom + args_.k_strides.atom;
        }
        const float x = LoadStored(atom + i_atom * args_.kv_bytes);
        JAX_PAGED_UNROLL
        for (int32_t i = 0; i < kRows; ++i) {
          const int32_t row = first_row + i * kStep;
          if (row >= rows.count) continue;
          const Shared<float> q = q_ + row * args_.head_dim;
          sum[i] = prim::Fma(args_.cos ? TurnedBack(q, d, angles) : prim::Load(q + d), x, sum[i]);
        }
      }
    }
    if (exists && args_.k_scale.data) {
      const float scale = prim::Load(KScaleOf() + token);
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kRows; ++i) sum[i] *= scale;
    }
    const RowTree tree = segment.Tree();
    if (args_.logits.edits()) {
      const int32_t position =
          args_.logits.alibi_slopes ? TokenAt(args_, segment, first_token + token) : 0;
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kRows; ++i) {
        const int32_t row = first_row + i * kStep;
        if (row >= rows.count) continue;
        const int32_t distance = position - prim::Load(Position() + row);
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
    const int32_t atom_dims = AtomDims(args_.v_strides);
    for (int32_t column = prim::ThreadIndex(); column < args_.v_head_dim;
         column += kAttentionThreads) {
      const int32_t atom = column / atom_dims;
      const int64_t column_offset =
          atom * args_.v_strides.atom + (column - atom * atom_dims) * args_.kv_bytes;
      float sum[kTileRows];
      JAX_PAGED_UNROLL
      for (int32_t row = 0; row < kTileRows; ++row) {
        sum[row] = 0.0f;
        if (row < rows.count) {
          sum[row] = prim::Load(o_ + (row * args_.v_head_dim + column)) * prim::Load(Keep() + row);
        }
      }
      for (int32_t token = 0; token < kTileTokens; ++token) {
        if (!prim::Load(Exists() + token)) continue;
        const Global<const char> v = v_ + (prim::Load(VOffset() + token) + column_offset);
        float x = LoadStored(v);
        if (args_.v_scale.data) x *= prim::Load(VScaleOf() + token);
        JAX_PAGED_UNROLL
        for (int32_t row = 0; row < kTileRows; ++row) {
          if (row >= rows.count) continue;
          const float weight = prim::Load(Score(row, token));
          if (weight != kNegativeInfinity) sum[row] = prim::Fma(weight, x, sum[row]);
        }
      }
      JAX_PAGED_UNROLL
      for (int32_t row = 0; row < kTileRows; ++row) {
        if (row < rows.count) prim::Store(o_ + (row * args_.v_head_dim + column), sum[row]);
      }
    }
  }

  JAX_PAGED_DEVICE void Finish(const WorkRange& range, const Segment& segment,
                               const UnitRows& rows) {
    const Destination to = DestinationOf(args_, range, segment);
    const int32_t row_quads = args_.v_head_dim / 4;
    for (int32_t i = prim::ThreadIndex(); i < rows.count * row_quads; i += kAttentionThreads) {
      const int32_t row = i / row_quads;
      const int32_t column = (i - row * row_quads) * 4;
      WriteSegment<T>(args_, segment, rows, to, row, column,
                      prim::Load((o_ + i * 4).template As<Float4>()), prim::Load(M() + row),
                      prim::Load(L() + row));
    }
    MergeIfLast<T>(args_, segment, rows, to, Field<char>(offsetof(SimtShared, merge)));
  }

  const AttentionArgs& args_;
  const LogitScale scale_;
  const int32_t layer_;
  const Global<const char> k_;
  const Global<const char> v_;
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
