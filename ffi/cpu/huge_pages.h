// SPDX-License-Identifier: Apache-2.0

// Asking the system for huge pages of memory (2 MiB), where that is worth a call to it.

#ifndef JAX_PAGED_CPU_HUGE_PAGES_H_
#define JAX_PAGED_CPU_HUGE_PAGES_H_

#include <cstdint>

#include "common/integers.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jax_paged::cpu {

inline constexpr int64_t kHugePageBytes = 2 << 20;

// What of the memory is not there yet comes in huge pages when it is written first; where `renews`,
// all of it, as zeros. Where the system has no huge pages to give, this changes nothing.
inline void AdviseHugePages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes,
                            [[maybe_unused]] bool renews) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
  const int64_t begin = RoundUp(address, page), end = (address + bytes) / page * page;
  char* const first = static_cast<char*>(data) + (begin - address);
  const size_t length = static_cast<size_t>(end - begin);
  if (madvise(first, length, MADV_HUGEPAGE) == 0 && renews) madvise(first, length, MADV_DONTNEED);
#endif
}

// For memory that lasts, which malloc may have handed out before. Less has little to gain, and
// advice cuts the process's memory into one more mapping.
inline void RenewInHugePages(void* data, int64_t bytes) {
  if (bytes >= 2 * kHugePageBytes) AdviseHugePages(data, bytes, /*renews=*/true);
}

// For an output. malloc maps what is larger than this anew for each call, and a page of 4 KiB costs
// as much to bring as to fill. What is smaller it mostly has at hand, and a huge page may be long
// in coming.
inline void ExpectOutput(void* data, int64_t bytes) {
  constexpr int64_t kLeastMappedBytes = 32 << 20;
  if (bytes >= kLeastMappedBytes) AdviseHugePages(data, bytes, /*renews=*/false);
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_HUGE_PAGES_H_
