// SPDX-License-Identifier: Apache-2.0

// Everything that the kernels ask of the hardware, one wrapper per instruction. Kernels use no
// other intrinsic, no inline PTX and no pointer dereference, so that the same sources run on a GPU
// (here) and in the emulator (emu/prim.h, chosen by JAX_PAGED_EMULATE).
//
// Instructions are those of sm_80: mma.sync, ldmatrix and cp.async, no wgmma, no TMA. Of later ones
// there is a conversion (HalvesOfE4M3), and from sm_90 on there are two about the order of
// launches.

#ifndef JAX_PAGED_CUDA_PRIM_H_
#define JAX_PAGED_CUDA_PRIM_H_

#include <cstdint>
#include <type_traits>

#include "common/dtypes.h"
#include "cuda/pointers.h"

namespace jax_paged {

inline constexpr int kWarpLanes = 32;
inline constexpr float kNegativeInfinity = -__builtin_huge_valf();

struct alignas(8) Float2 {
  float x, y;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};
struct alignas(8) Word2 {
  uint32_t x, y;
};
struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};

}  // namespace jax_paged

#ifdef JAX_PAGED_EMULATE
#include "emu/prim.h"
#else

#define JAX_PAGED_DEVICE __device__ __forceinline__
#define JAX_PAGED_UNROLL _Pragma("unroll")
#define JAX_PAGED_NO_UNROLL _Pragma("unroll 1")
#define JAX_PAGED_UNROLL_2 _Pragma("unroll 2")
#define JAX_PAGED_UNROLL_4 _Pragma("unroll 4")

namespace jax_paged::prim {

template <typename To, typename From>
JAX_PAGED_DEVICE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- where am I, order ----

JAX_PAGED_DEVICE int32_t ThreadIndex() { return static_cast<int32_t>(threadIdx.x); }
JAX_PAGED_DEVICE int32_t LaneIndex() { return ThreadIndex() % kWarpLanes; }
JAX_PAGED_DEVICE int32_t WarpIndex() { return ThreadIndex() / kWarpLanes; }
JAX_PAGED_DEVICE int32_t BlockIndex() { return static_cast<int32_t>(blockIdx.x); }
// x, but what is computed from it cannot be computed ahead of the loop and kept in registers.
JAX_PAGED_DEVICE int32_t Opaque(int32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
JAX_PAGED_DEVICE int32_t GridSize() { return static_cast<int32_t>(gridDim.x); }

JAX_PAGED_DEVICE void SyncWarp() { __syncwarp(); }
JAX_PAGED_DEVICE void SyncThreads() { __syncthreads(); }
// What this thread has written or seen is before what it does next, for all threads of the device.
JAX_PAGED_DEVICE void ThreadFence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- launches that overlap (launch_kernel.h) ----

// Until the launch before this one has ended and its writes can be seen. Each thread waits before
// it touches device memory, and before it ends.
JAX_PAGED_DEVICE void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// CTAs of the launch behind this one may come, once all CTAs of this one are here.
JAX_PAGED_DEVICE void AllowNext() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// What a kernel does first that LaunchKernel launches.
JAX_PAGED_DEVICE void StartKernel() {
  AllowNext();
  WaitForPrevious();
}

// ---- between the lanes of a warp; all lanes take part ----

template <typename T>
JAX_PAGED_DEVICE T ShuffleXor(T x, int32_t mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
template <typename T>
JAX_PAGED_DEVICE T Shuffle(T x, int32_t lane) {
  return __shfl_sync(~0u, x, lane);
}
// The value of the lane `distance` below; its own where there is none.
template <typename T>
JAX_PAGED_DEVICE T ShuffleUp(T x, int32_t distance) {
  return __shfl_up_sync(~0u, x, distance);
}
JAX_PAGED_DEVICE uint32_t Ballot(bool x) { return __ballot_sync(~0u, x); }
// The lanes that have the same x.
JAX_PAGED_DEVICE uint32_t MatchAny(int32_t x) { return __match_any_sync(~0u, x); }
JAX_PAGED_DEVICE int32_t PopCount(uint32_t x) { return __popc(x); }

// ---- memory ----

extern __shared__ __align__(128) char shared_memory[];
JAX_PAGED_DEVICE Shared<char> SharedMemory() { return Shared<char>(shared_memory); }

template <typename T>
JAX_PAGED_DEVICE T Load(Shared<T> p) {
  return *p.get();
}
template <typename T>
JAX_PAGED_DEVICE void Store(Shared<T> p, std::common_type_t<T> x) {
  *p.get() = x;
}

// Of what no thread of this launch writes: ld.global.nc. For the first loads see LoadL2.
template <typename T>
JAX_PAGED_DEVICE T LoadConst(Global<const T> p) {
  if constexpr (sizeof(T) == 1) {
    return BitCast<T>(__ldg(reinterpret_cast<const unsigned char*>(p.get())));
  } else if constexpr (sizeof(T) == 2) {
    return BitCast<T>(__ldg(reinterpret_cast<const unsigned short*>(p.get())));
  } else if constexpr (sizeof(T) == 4) {
    return BitCast<T>(__ldg(reinterpret_cast<const unsigned int*>(p.get())));
  } else if constexpr (sizeof(T) == 8) {
    return BitCast<T>(__ldg(reinterpret_cast<const uint2*>(p.get())));
  } else {
    return BitCast<T>(__ldg(reinterpret_cast<const uint4*>(p.get())));
  }
}
// Past L1, of what another CTA may have written: ld.global.cg. Also what a kernel reads first:
// ptxas moves a LoadConst ahead of WaitForPrevious, unless it depends on a load that stays behind,
// by its address or by a branch (.ci/cuda_gate.py looks at the SASS).
template <typename T>
JAX_PAGED_DEVICE std::remove_const_t<T> LoadL2(Global<T> p) {
  using Value = std::remove_const_t<T>;
  if constexpr (sizeof(T) == 4) {
    return BitCast<Value>(__ldcg(reinterpret_cast<const unsigned int*>(p.get())));
  } else if constexpr (sizeof(T) == 8) {
    return BitCast<Value>(__ldcg(reinterpret_cast<const uint2*>(p.get())));
  } else {
    return BitCast<Value>(__ldcg(reinterpret_cast<const uint4*>(p.get())));
  }
}
template <typename T>
JAX_PAGED_DEVICE void Store(Global<T> p, std::common_type_t<T> x) {
  *p.get() = x;
}
// Returns the old value; the new one is old + 1, or 0 after `limit`.
JAX_PAGED_DEVICE uint32_t AtomicIncrement(Global<uint32_t> p, uint32_t limit) {
  return atomicInc(p.get(), limit);
}
// Returns the old value; the new one is `desired` where that was `expected`.
JAX_PAGED_DEVICE int32_t AtomicCompareExchange(Global<int32_t> p, int32_t expected,
                                               int32_t desired) {
  return atomicCAS(p.get(), expected, desired);
}
// The new value is the larger one.
JAX_PAGED_DEVICE void AtomicMax(Global<int32_t> p, int32_t x) { atomicMax(p.get(), x); }

// ---- cp.async: 16 bytes from device to shared memory, zeros (and no read) unless valid ----

JAX_PAGED_DEVICE uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
JAX_PAGED_DEVICE void CpAsync16(Shared<char> to, Global<const char> from, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(SharedAddress(to.get())),
      "l"(from.get()), "r"(valid ? 16 : 0)
      : "memory");
}
// The same for 4 bytes.
JAX_PAGED_DEVICE void CpAsync4(Shared<char> to, Global<const char> from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(to.get())),
               "l"(from.get()), "r"(valid ? 4 : 0)
               : "memory");
}
JAX_PAGED_DEVICE void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
JAX_PAGED_DEVICE void CpAsyncWaitGroup() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
// Until at most `groups` (0 to 3) of this thread's groups are in flight.
JAX_PAGED_DEVICE void CpAsyncWait(int32_t groups) {
  if (groups == 0) {
    CpAsyncWaitGroup<0>();
  } else if (groups == 1) {
    CpAsyncWaitGroup<1>();
  } else if (groups == 2) {
    CpAsyncWaitGroup<2>();
  } else {
    CpAsyncWaitGroup<3>();
  }
}

// ---- matrices: four 8 x 8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile
// i / 8

JAX_PAGED_DEVICE void LoadMatrix(uint32_t (&r)[4], Shared<char> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row.get()))
               : "memory");
}
JAX_PAGED_DEVICE void LoadMatrixTransposed(uint32_t (&r)[4], Shared<char> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row.get()))
               : "memory");
}
// c += a * b with a 16 x 16 (row major), b 16 x 8 (column major), sums in f32.
template <typename T>
JAX_PAGED_DEVICE void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, Float16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- arithmetic ----

JAX_PAGED_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JAX_PAGED_DEVICE float Log(float x) { return logf(x); }
JAX_PAGED_DEVICE float Tanh(float x) { return tanhf(x); }  // tanh.approx has 11 bits
JAX_PAGED_DEVICE float ReciprocalSqrt(float x) { return rsqrtf(x); }
JAX_PAGED_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// The larger one; the other one where one is NaN.
JAX_PAGED_DEVICE float Max(float a, float b) { return fmaxf(a, b); }

JAX_PAGED_DEVICE float ToFloat(float x) { return x; }
JAX_PAGED_DEVICE float ToFloat(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
JAX_PAGED_DEVICE float ToFloat(Float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
// A half of the same fields: its exponent has as many bits (e5m2), or is 8 too low (e4m3, whose one
// NaN is the pattern of all ones). See common/dtypes.h.
JAX_PAGED_DEVICE float ToFloat(Float8E5M2 x) {
  return prim::ToFloat(Float16{static_cast<uint16_t>(x.bits << 8)});
}
JAX_PAGED_DEVICE float ToFloat(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t half = magnitude == 0x7fu ? 0x7fffu : magnitude << 7;
  return prim::ToFloat(Float16{static_cast<uint16_t>((x.bits & 0x80u) << 8 | half)}) * 256.0f;
}
JAX_PAGED_DEVICE float ToFloat(Int8 x) { return static_cast<float>(x.value); }
// Byte i of the result is the byte that nibble i of the selector names, 0 to 3 of a, 4 to 7 of b;
// with 8 added, eight times that byte's sign.
JAX_PAGED_DEVICE uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}
// Whether the next one exists: from sm_89 on.
JAX_PAGED_DEVICE constexpr bool ConvertsFp8() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return true;
#else
  return false;
#endif
}
// Four codes of e4m3 as halves: of the two lower bytes, then of the two upper ones.
JAX_PAGED_DEVICE Word2 HalvesOfE4M3(uint32_t codes) {
  Word2 halves = {0, 0};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(codes));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves.x) : "h"(low));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves.y) : "h"(high));
#endif
  return halves;
}
// a b + c of two pairs of numbers each, rounded once; subnormal numbers count.
template <typename T>
JAX_PAGED_DEVICE uint32_t FmaPair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  } else {
    static_assert(std::is_same_v<T, Float16>);
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  }
  return pair;
}
// Two numbers in one word, `low` in its lower half; round to nearest even.
template <typename T>
JAX_PAGED_DEVICE uint32_t PackPair(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(std::is_same_v<T, Float16>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

}  // namespace jax_paged::prim

#endif  // JAX_PAGED_EMULATE

#endif  // JAX_PAGED_CUDA_PRIM_H_
