// SPDX-License-Identifier: Apache-2.0

// Which instruction set's kernels a process uses.

#ifndef JAX_PAGED_GENERIC_ONLY
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/attention/kernels.h"
#include "cpu/linear/kernels.h"

namespace jax_paged::cpu {
namespace {

struct Isa {
  const Kernels& kernels;
  bool runs;
};

#ifndef JAX_PAGED_GENERIC_ONLY
// Whether the processor has tiles of bf16, and Linux lets this process use them once it asks.
bool MayUseAmx() {
#ifdef __linux__
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24;  // amx-bf16, amx-tile
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

// Whether the processor's maker is the one whose name begins so (a signature of cpuid.h).
bool IsOf(unsigned maker) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) && b == maker;
}

// Whether the processor is AMD's, of this family or a later one.
bool IsAmdSince(unsigned family) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!IsOf(signature_AMD_ebx)) return false;
  return __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 0xf) + (a >> 20 & 0xff) >= family;
}
#endif

// Worst first.
std::vector<Isa> BuiltIsas() {
  std::vector<Isa> isas = {{GenericKernels(), true}};
#ifndef JAX_PAGED_GENERIC_ONLY
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  isas.push_back({Avx2Kernels(), avx2});
  isas.push_back({Avx512Kernels(), avx512});
  isas.push_back({Avx512Bf16Kernels(), avx512 && __builtin_cpu_supports("avx512vbmi") &&
                                           __builtin_cpu_supports("avx512bf16")});
  isas.push_back({AmxKernels(), isas.back().runs && MayUseAmx()});
#endif
  return isas;
}

const Kernels& ChooseKernels() {
  const char* wanted = std::getenv("JAX_PAGED_CPU_ISA");
  const Kernels* best = nullptr;
  std::string possible;
  for (const Isa& isa : BuiltIsas()) {
    if (!isa.runs) continue;
    if (wanted && *wanted && std::string(wanted) == isa.kernels.isa) return isa.kernels;
    best = &isa.kernels;
    possible += (possible.empty() ? "" : ", ") + std::string(isa.kernels.isa);
  }
  if (wanted && *wanted) {
    throw std::runtime_error("jax_paged: JAX_PAGED_CPU_ISA expected one of " + possible +
                             " (what this build and this CPU can run), got '" + wanted + "'");
  }
  return *best;
}

}  // namespace

const Kernels& ChosenKernels() {
  static const Kernels& chosen = ChooseKernels();
  return chosen;
}

const LinearKernelTable& ChosenLinearKernels() {
  static const LinearKernelTable& chosen = []() -> const LinearKernelTable& {
#ifndef JAX_PAGED_GENERIC_ONLY
    const std::string isa = ChosenKernels().isa;
    if (isa == "amx") return AmxLinearKernels();
    if (isa == "avx512bf16") return Avx512Bf16LinearKernels();
    if (isa == "avx512") return Avx512LinearKernels();
    if (isa == "avx2") return Avx2LinearKernels();
#endif
    return GenericLinearKernels();
  }();
  return chosen;
}

bool ReadsManyStreams() {
#ifndef JAX_PAGED_GENERIC_ONLY
  static const bool is_intel = IsOf(signature_INTEL_ebx);
  return is_intel;
#else
  return false;
#endif
}

int64_t WordsAhead() {
#ifndef JAX_PAGED_GENERIC_ONLY
  static const int64_t bytes = IsAmdSince(/*Zen 5: */ 0x1a) ? 4 << 10 : 1 << 10;
  return bytes;
#else
  return 1 << 10;
#endif
}

}  // namespace jax_paged::cpu
