// SPDX-License-Identifier: Apache-2.0

// The SIMT kernel's shared memory, and how K and V come into its stage: as floats, 64 dimensions of
// a tile's tokens at a time, K turned where rope says so.

#ifndef JAX_PAGED_CUDA_ATTENTION_SIMT_STAGE_CUH_
#define JAX_PAGED_CUDA_ATTENTION_SIMT_STAGE_CUH_

#include <cstddef>

#include "common/integers.h"
#include "cuda/attention/args.h"
#include "cuda/attention/segment.cuh"
#include "cuda/prim.h"

namespace jax_paged::cuda {

// Followed by q [kTileRows, head_dim], o [kTileRows, v_head_dim] and the stage.
struct SimtShared {
  alignas(16) int64_t k_offset[kTileTokens];
  int64_t v_offset[kTileTokens];
  float scores[kTileRows * kTileTokens];
  int32_t exists[kTileTokens];
  float k_scale[kTileTokens];  // these two only if a scale is given
  float v_scale[kTileTokens];
  KeyRange visible[kTileRows];
  int32_t position[kTileRows];  // in the sequence, of the row's query; only for ALiBi
  LogitEdit edit[kTileRows];    // only if logits are edited
  float m[kTileRows];
  float l[kTileRows];
  float keep[kTileRows];
  MergeShared<> merge;
};

inline constexpr int32_t kSimtStateBytes = RoundUp<int32_t>(sizeof(SimtShared), 16);

// The stage: so many dimensions of a tile's tokens. Rows of 4 banks more than they need: the quads
// of 8 tokens lie in different banks.
inline constexpr int32_t kStageDims = 64;
inline constexpr int32_t kStagePitch = kStageDims + 4;
inline constexpr int32_t kStageBytes = kTileTokens * kStagePitch * int32_t{sizeof(float)};

JAX_PAGED_HOST_DEVICE inline int32_t SimtSharedBytes(int32_t head_dim, int32_t v_head_dim) {
  return kSimtStateBytes + kTileRows * (head_dim + v_head_dim) * 4 + kStageBytes;
}

template <typename T>
class SimtStage {
 public:
  JAX_PAGED_DEVICE explicit SimtStage(const AttentionArgs& args)
      : args_(args),
        k_(LayerPages(args, args.k_pages, args.k_strides)),
        v_(LayerPages(args, args.v_pages, args.v_strides)),
        shared_(prim::SharedMemory()),
        stage_((shared_ + (SimtSharedBytes(args.head_dim, args.v_head_dim) - kStageBytes))
                   .template As<float>()) {}

  // 4 dimensions of a token of the tile, from `dim` of those in the stage on.
  JAX_PAGED_DEVICE Shared<Float4> Quad(int32_t token, int32_t dim) const {
    return (stage_ + (token * kStagePitch + dim)).template As<Float4>();
  }

  // Dimensions `first` to `first` + kStageDims of the tile's K come into the stage, turned but not
  // scaled; of V, times their scales. 0 stands for tokens that do not exist and for dimensions
  // beyond the last.
  JAX_PAGED_DEVICE void Keys(const Segment& segment, int32_t first_token, int32_t first) const {
    WithStored([&](auto stored) {
      using S = decltype(stored);
      if (!args_.cos) {
        return StageQuads<S>(k_, args_.k_strides, KOffset(), first, args_.head_dim, false);
      }
      StageElements(
          first, args_.head_dim,
          [&](int32_t token, int32_t dim) {
            const int64_t position = TokenAt(args_, segment, first_token + token);
            return LoadTurned<S>(k_ + prim::Load(KOffset() + token), position * args_.rope_half,
                                 dim);
          },
          false);
    });
  }
  JAX_PAGED_DEVICE void Values(int32_t first) const {
    const bool is_scaled = static_cast<bool>(args_.v_scale.data);
    WithStored([&](auto stored) {
      using S = decltype(stored);
      if (AtomDims(args_.v_strides) % 4 == 0) {
        return StageQuads<S>(v_, args_.v_strides, VOffset(), first, args_.v_head_dim, is_scaled);
      }
      StageElements(
          first, args_.v_head_dim,
          [&](int32_t token, int32_t dim) {
            const int64_t at = prim::Load(VOffset() + token) + ElementOffset(args_.v_strides, dim);
            return prim::ToFloat(prim::LoadConst((v_ + at).template As<const S>()));
          },
          is_scaled);
    });
  }

  JAX_PAGED_DEVICE Shared<int64_t> KOffset() const {
    return Field<int64_t>(offsetof(SimtShared, k_offset));
  }
  JAX_PAGED_DEVICE Shared<int64_t> VOffset() const {
    return Field<int64_t>(offsetof(SimtShared, v_offset));
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

  // One element of a pair, x, turned by the angles of a position.
  JAX_PAGED_DEVICE float TurnedBy(int64_t angles, const Pair& pair, float x, float other) const {
    const float sin = prim::LoadConst(args_.sin + (angles + pair.angle));
    const float cos = prim::LoadConst(args_.cos + (angles + pair.angle));
    return prim::Fma(pair.is_first ? -other : other, sin, x * cos);
  }

  // A turned element as T has it, as if it had been turned before it was written.
  JAX_PAGED_DEVICE float Rounded(float x) const {
    if constexpr (sizeof(T) == 4) {
      return x;
    } else {
      return prim::ToFloat(T{static_cast<uint16_t>(prim::PackPair<T>(x, 0.0f) & 0xffffu)});
    }
  }

 private:
  template <typename U>
  JAX_PAGED_DEVICE Shared<U> Field(size_t offset) const {
    return (shared_ + static_cast<int64_t>(offset)).template As<U>();
  }
  // Contiguous dimensions of a token.
  JAX_PAGED_DEVICE int32_t AtomDims(const PageStrides& strides) const {
    return static_cast<int32_t>(strides.atom_bytes) / args_.kv_bytes;
  }

  // Calls f(S{}) with the type of what pages hold.
  template <typename F>
  JAX_PAGED_DEVICE void WithStored(F&& f) const {
    switch (args_.kv_dtype) {
      case Dtype::kFloat8E4M3:
        return f(Float8E4M3{});
      case Dtype::kFloat8E5M2:
        return f(Float8E5M2{});
      case Dtype::kInt8:
        return f(Int8{});
      default:
        return f(T{});
    }
  }

  // Where dimension `dim` of a token lies, from its first one on.
  JAX_PAGED_DEVICE int64_t ElementOffset(const PageStrides& strides, int32_t dim) const {
    const int32_t atom = dim / AtomDims(strides);
    return atom * strides.atom + (dim - atom * AtomDims(strides)) * args_.kv_bytes;
  }

  // Dimension `dim` of a stored token of K, turned.
  template <typename S>
  JAX_PAGED_DEVICE float LoadTurned(Global<const char> key, int64_t angles, int32_t dim) const {
    const auto load = [&](int32_t at) {
      const Global<const char> element = key + ElementOffset(args_.k_strides, at);
      return prim::ToFloat(prim::LoadConst(element.template As<const S>()));
    };
    const float x = load(dim);
    if (dim >= 2 * args_.rope_half) return x;
    const Pair pair = PairOf(dim);
    const float turned = TurnedBy(angles, pair, x, load(pair.other));
    return sizeof(S) == 1 ? turned : Rounded(turned);
  }

  // The token and the first of 4 dimensions that a thread puts into the stage as its i-th.
  JAX_PAGED_DEVICE static int32_t StagedToken(int32_t i) {
    return (i * kAttentionThreads + prim::ThreadIndex()) / (kStageDims / 4);
  }
  JAX_PAGED_DEVICE static int32_t StagedQuad(int32_t i) {
    return (i * kAttentionThreads + prim::ThreadIndex()) % (kStageDims / 4) * 4;
  }
  static constexpr int32_t kStagedQuads = kTileTokens * kStageDims / 4 / kAttentionThreads;

  // Where 4 dimensions of a token are one load. `is_scaled`: V, times its scales.
  template <typename S>
  JAX_PAGED_DEVICE void StageQuads(Global<const char> pages, const PageStrides& strides,
                                   Shared<int64_t> offsets, int32_t first, int32_t dims,
                                   bool is_scaled) const {
    struct alignas(4 * sizeof(S)) Stored {
      S of[4];
    };
    constexpr int32_t kAtOnce = 4;
    JAX_PAGED_NO_UNROLL
    for (int32_t begin = 0; begin < kStagedQuads; begin += kAtOnce) {
      Stored quads[kAtOnce];
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kAtOnce; ++i) {
        const int32_t token = StagedToken(begin + i);
        const int32_t dim = first + StagedQuad(begin + i);
        quads[i] = {};
        if (dim >= dims || prim::Load(Exists() + token) == 0) continue;
        const int64_t at = prim::Load(offsets + token) + ElementOffset(strides, dim);
        quads[i] = prim::LoadConst((pages + at).template As<const Stored>());
      }
      JAX_PAGED_UNROLL
      for (int32_t i = 0; i < kAtOnce; ++i) {
        const S(&x)[4] = quads[i].of;
        StoreStaged(begin + i, is_scaled,
                    Float4{prim::ToFloat(x[0]), prim::ToFloat(x[1]), prim::ToFloat(x[2]),
                           prim::ToFloat(x[3])});
      }
    }
  }
  JAX_PAGED_DEVICE void StoreStaged(int32_t i, bool is_scaled, Float4 x) const {
    const int32_t token = StagedToken(i);
    if (is_scaled && prim::Load(Exists() + token) != 0) {
      const float scale = prim::Load(VScaleOf() + token);
      x = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
    prim::Store(Quad(token, StagedQuad(i)), x);
  }

  // The same where each element has a load of its own: load(token, dim) gives it.
  template <typename Load>
  JAX_PAGED_DEVICE void StageElements(int32_t first, int32_t dims, Load&& load,
                                      bool is_scaled) const {
    JAX_PAGED_NO_UNROLL
    for (int32_t i = 0; i < kStagedQuads; ++i) {
      const int32_t token = StagedToken(i);
      const int32_t dim = first + StagedQuad(i);
      Float4 x = {0, 0, 0, 0};
      if (dim < dims && prim::Load(Exists() + token) != 0) {
        x = {load(token, dim), load(token, dim + 1), load(token, dim + 2), load(token, dim + 3)};
      }
      StoreStaged(i, is_scaled, x);
    }
  }

  const AttentionArgs& args_;
  const Global<const char> k_;
  const Global<const char> v_;
  const Shared<char> shared_;
  const Shared<float> stage_;
};

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_SIMT_STAGE_CUH_
