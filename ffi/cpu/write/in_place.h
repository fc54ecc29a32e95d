// SPDX-License-Identifier: Apache-2.0

// What handlers share that update a pool in place.

#ifndef JAX_PAGED_CPU_WRITE_IN_PLACE_H_
#define JAX_PAGED_CPU_WRITE_IN_PLACE_H_

#include <cstdint>
#include <cstring>

#include "common/integers.h"
#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

// Below this many bytes to copy, some 20 microseconds, a second thread costs more than it brings.
inline constexpr int64_t kSerialBytes = 200'000;

// XLA aliases results to operands and copies beforehand where it cannot; be safe if it did not.
inline void CopyUnlessAliased(const xla::ffi::AnyBuffer& from, const xla::ffi::AnyBuffer& to) {
  if (from.untyped_data() != to.untyped_data() && to.size_bytes() > 0) {
    std::memcpy(to.untyped_data(), from.untyped_data(), to.size_bytes());
  }
}

// fn(i) for i < count, which copies so many bytes each: in runs of neighbours, on several threads
// where that pays.
template <typename Fn>
void ForEachCopy(xla::ffi::ThreadPool& threads, int64_t count, int64_t bytes, const Fn& fn) {
  const bool is_small = count * bytes < kSerialBytes;
  const int64_t workers = is_small ? 1 : Clamp(threads.num_threads(), 1, count);
  ParallelFor(threads, workers, workers, [&](int64_t item, int64_t) {
    for (int64_t i = count * item / workers; i < count * (item + 1) / workers; ++i) fn(i);
  });
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_WRITE_IN_PLACE_H_
