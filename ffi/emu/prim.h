// SPDX-License-Identifier: Apache-2.0

// Emulator twins of the wrappers in cuda/prim.h, which includes this file and says what each does.
// Every one that touches memory or synchronises takes the place it was called from.

#ifndef JAX_PAGED_EMU_PRIM_H_
#define JAX_PAGED_EMU_PRIM_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtypes.h"
#include "emu/machine.h"
#include "emu/pointers.h"

#define JAX_PAGED_DEVICE inline
#define JAX_PAGED_UNROLL
#define JAX_PAGED_NO_UNROLL
#define JAX_PAGED_UNROLL_2
#define JAX_PAGED_UNROLL_4

namespace jax_paged::prim {

using emu::Site;

template <typename To, typename From>
inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline int32_t ThreadIndex() { return emu::ThreadIndex(); }
inline int32_t LaneIndex() { return ThreadIndex() % kWarpLanes; }
inline int32_t WarpIndex() { return ThreadIndex() / kWarpLanes; }
inline int32_t BlockIndex() { return emu::BlockIndex(); }
inline int32_t Opaque(int32_t x) { return x; }
inline int32_t GridSize() { return emu::GridSize(); }

inline void SyncWarp(Site site = Site::Here()) { emu::SyncWarp(site); }
inline void SyncThreads(Site site = Site::Here()) { emu::SyncThreads(site); }
inline void ThreadFence(Site site = Site::Here()) { emu::ThreadFence(site); }
// Launches do not overlap here.
inline void WaitForPrevious() {}
inline void AllowNext() {}
inline void StartKernel() {}

template <typename T>
struct FromLane {
  T x;
  int32_t lane;
};

template <typename T>
inline T Shuffle(T x, int32_t lane, Site site = Site::Here()) {
  return emu::WarpCollective<FromLane<T>, T>("Shuffle", site, {x, lane},
                                             [](Site s, const FromLane<T>* in, T* out) {
                                               for (int i = 0; i < kWarpLanes; ++i) {
                                                 if (in[i].lane < 0 || in[i].lane >= kWarpLanes)
                                                   emu::Fail(s, "Shuffle from no lane");
                                                 out[i] = in[in[i].lane].x;
                                               }
                                             });
}
template <typename T>
inline T ShuffleXor(T x, int32_t mask, Site site = Site::Here()) {
  return Shuffle(x, LaneIndex() ^ mask, site);
}
template <typename T>
inline T ShuffleUp(T x, int32_t distance, Site site = Site::Here()) {
  const int32_t lane = LaneIndex();
  return Shuffle(x, lane < distance ? lane : lane - distance, site);
}
inline uint32_t Ballot(bool x, Site site = Site::Here()) {
  return emu::WarpCollective<uint32_t, uint32_t>("Ballot", site, x,
                                                 [](Site, const uint32_t* in, uint32_t* out) {
                                                   uint32_t bits = 0;
                                                   for (int i = 0; i < kWarpLanes; ++i)
                                                     bits |= in[i] << i;
                                                   for (int i = 0; i < kWarpLanes; ++i)
                                                     out[i] = bits;
                                                 });
}

inline uint32_t MatchAny(int32_t x, Site site = Site::Here()) {
  return emu::WarpCollective<int32_t, uint32_t>("MatchAny", site, x,
                                                [](Site, const int32_t* in, uint32_t* out) {
                                                  for (int i = 0; i < kWarpLanes; ++i) {
                                                    out[i] = 0;
                                                    for (int j = 0; j < kWarpLanes; ++j)
                                                      out[i] |= uint32_t{in[i] == in[j]} << j;
                                                  }
                                                });
}
inline int32_t PopCount(uint32_t x) { return __builtin_popcount(x); }

inline Shared<char> SharedMemory() { return Shared<char>(0); }

template <typename T>
inline T Load(Shared<T> p, Site site = Site::Here()) {
  T x;
  std::memcpy(&x, emu::ReadShared(p.offset(), sizeof(T), site), sizeof(T));
  return x;
}
template <typename T>
inline void Store(Shared<T> p, std::common_type_t<T> x, Site site = Site::Here()) {
  std::memcpy(emu::WriteShared(p.offset(), sizeof(T), site), &x, sizeof(T));
}
template <typename T>
inline T LoadConst(Global<const T> p, Site site = Site::Here()) {
  T x;
  std::memcpy(&x, emu::ReadGlobal(p.address(), p.region(), sizeof(T), emu::Cache::kReadOnly, site),
              sizeof(T));
  return x;
}
template <typename T>
inline std::remove_const_t<T> LoadL2(Global<T> p, Site site = Site::Here()) {
  std::remove_const_t<T> x;
  std::memcpy(&x, emu::ReadGlobal(p.address(), p.region(), sizeof(T), emu::Cache::kL2, site),
              sizeof(T));
  return x;
}
template <typename T>
inline void Store(Global<T> p, std::common_type_t<T> x, Site site = Site::Here()) {
  std::memcpy(emu::WriteGlobal(p.address(), p.region(), sizeof(T), site), &x, sizeof(T));
}
inline uint32_t AtomicIncrement(Global<uint32_t> p, uint32_t limit, Site site = Site::Here()) {
  char* where = emu::AtomicGlobal(p.address(), p.region(), sizeof(uint32_t), site);
  uint32_t old;
  std::memcpy(&old, where, sizeof(old));
  const uint32_t value = old >= limit ? 0 : old + 1;
  std::memcpy(where, &value, sizeof(value));
  return old;
}
inline int32_t AtomicCompareExchange(Global<int32_t> p, int32_t expected, int32_t desired,
                                     Site site = Site::Here()) {
  char* where = emu::AtomicGlobal(p.address(), p.region(), sizeof(int32_t), site);
  int32_t old;
  std::memcpy(&old, where, sizeof(old));
  if (old == expected) std::memcpy(where, &desired, sizeof(desired));
  return old;
}
inline void AtomicMax(Global<int32_t> p, int32_t x, Site site = Site::Here()) {
  char* where = emu::AtomicGlobal(p.address(), p.region(), sizeof(int32_t), site);
  int32_t old;
  std::memcpy(&old, where, sizeof(old));
  if (x > old) std::memcpy(where, &x, sizeof(x));
}

inline void CpAsync16(Shared<char> to, Global<const char> from, bool valid,
                      Site site = Site::Here()) {
  emu::CpAsync(to.offset(), from.address(), from.region(), 16, valid, site);
}
inline void CpAsync4(Shared<char> to, Global<const char> from, bool valid,
                     Site site = Site::Here()) {
  emu::CpAsync(to.offset(), from.address(), from.region(), 4, valid, site);
}
inline void CpAsyncCommit() { emu::CpAsyncCommit(); }
inline void CpAsyncWait(int32_t groups, Site site = Site::Here()) {
  if (groups < 0 || groups > 3) emu::Fail(site, "CpAsyncWait takes 0 to 3 groups");
  emu::CpAsyncWait(groups, site);
}

struct Fragment {
  uint32_t r[4];
};

// Row `i % 8` of tile `i / 8` begins at rows[i]. Plain: lane l gets columns 2(l % 4) and the next
// of row l / 4; transposed: rows 2(l % 4) and the next of column l / 4.
template <bool TRANSPOSED>
inline void LoadMatrixAs(uint32_t (&r)[4], Shared<char> row, Site site) {
  const Fragment out = emu::WarpCollective<int64_t, Fragment>(
      TRANSPOSED ? "LoadMatrixTransposed" : "LoadMatrix", site, row.offset(),
      [](Site s, const int64_t* rows, Fragment* fragments) {
        uint16_t tiles[4][8][8];
        for (int i = 0; i < kWarpLanes; ++i) {
          std::memcpy(tiles[i / 8][i % 8], emu::ReadSharedByWarp(rows[i], 16, s), 16);
        }
        for (int lane = 0; lane < kWarpLanes; ++lane) {
          const int a = lane / 4, b = lane % 4 * 2;
          for (int t = 0; t < 4; ++t) {
            const uint32_t low = TRANSPOSED ? tiles[t][b][a] : tiles[t][a][b];
            const uint32_t high = TRANSPOSED ? tiles[t][b + 1][a] : tiles[t][a][b + 1];
            fragments[lane].r[t] = low | high << 16;
          }
        }
      });
  std::memcpy(r, out.r, sizeof(out.r));
}
inline void LoadMatrix(uint32_t (&r)[4], Shared<char> row, Site site = Site::Here()) {
  LoadMatrixAs<false>(r, row, site);
}
inline void LoadMatrixTransposed(uint32_t (&r)[4], Shared<char> row, Site site = Site::Here()) {
  LoadMatrixAs<true>(r, row, site);
}

struct MmaInput {
  uint32_t a[4];
  uint32_t b[2];
};
struct MmaOutput {
  float c[4];
};

template <typename T>
inline void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                Site site = Site::Here()) {
  const MmaOutput sum = emu::WarpCollective<MmaInput, MmaOutput>(
      "Mma", site, {{a[0], a[1], a[2], a[3]}, {b0, b1}},
      [](Site, const MmaInput* in, MmaOutput* out) {
        const auto half = [](uint32_t word, int high) {
          return ToFloat(T{static_cast<uint16_t>(high ? word >> 16 : word & 0xffffu)});
        };
        float a_matrix[16][16];  // [row][k]
        float b_matrix[16][8];   // [k][column]
        for (int lane = 0; lane < kWarpLanes; ++lane) {
          const int group = lane / 4, k = lane % 4 * 2;
          for (int high = 0; high < 2; ++high) {
            a_matrix[group][k + high] = half(in[lane].a[0], high);
            a_matrix[group + 8][k + high] = half(in[lane].a[1], high);
            a_matrix[group][k + 8 + high] = half(in[lane].a[2], high);
            a_matrix[group + 8][k + 8 + high] = half(in[lane].a[3], high);
            b_matrix[k + high][group] = half(in[lane].b[0], high);
            b_matrix[k + 8 + high][group] = half(in[lane].b[1], high);
          }
        }
        float c_matrix[16][8] = {};
        for (int i = 0; i < 16; ++i) {
          for (int k = 0; k < 16; ++k) {
            for (int j = 0; j < 8; ++j) c_matrix[i][j] += a_matrix[i][k] * b_matrix[k][j];
          }
        }
        for (int lane = 0; lane < kWarpLanes; ++lane) {
          const int group = lane / 4, column = lane % 4 * 2;
          out[lane] = {{c_matrix[group][column], c_matrix[group][column + 1],
                        c_matrix[group + 8][column], c_matrix[group + 8][column + 1]}};
        }
      });
  for (int i = 0; i < 4; ++i) c[i] += sum.c[i];
}

inline float Exp2(float x) { return std::exp2(x); }
inline float Log(float x) { return std::log(x); }
inline float Tanh(float x) { return std::tanh(x); }
inline float ReciprocalSqrt(float x) { return 1.0f / std::sqrt(x); }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Max(float a, float b) { return std::fmax(a, b); }

using jax_paged::ToFloat;

inline uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (nibble & 7) * 8 & 0xff);
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
// The emulated device is one of sm_80.
constexpr bool ConvertsFp8() { return false; }
inline Word2 HalvesOfE4M3(uint32_t, Site site = Site::Here()) {
  emu::Fail(site, "HalvesOfE4M3 begins with sm_89");
}

template <typename T>
inline uint32_t FmaPair(uint32_t a, uint32_t b, uint32_t c) {
  T pair[2];
  for (int i = 0; i < 2; ++i) {
    const auto half = [&](uint32_t word) {
      return ToFloat(T{static_cast<uint16_t>(word >> (16 * i))});
    };
    FromFloat(std::fma(half(a), half(b), half(c)), &pair[i]);
  }
  return BitCast<uint32_t>(pair);
}

template <typename T>
inline uint32_t PackPair(float low, float high) {
  T pair[2];
  FromFloat(low, &pair[0]);
  FromFloat(high, &pair[1]);
  return BitCast<uint32_t>(pair);
}

}  // namespace jax_paged::prim

#endif  // JAX_PAGED_EMU_PRIM_H_
