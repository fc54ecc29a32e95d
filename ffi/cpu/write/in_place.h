// SPDX-License-Identifier: Apache-2.0

// What handlers share that update a pool in place.

#ifndef JAX_PAGED_CPU_WRITE_IN_PLACE_H_
#define JAX_PAGED_CPU_WRITE_IN_PLACE_H_

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

// Below this many bytes to copy, some 20 microseconds, a second thread costs more than it brings.
inline constexpr int64_t kSerialBytes = 200'000;

// XLA aliases results to operands and copies beforehand where it cannot; be safe if it did not.
inline void CopyUnlessAliased(const xla::ffi::AnyBuffer& from, const xla::ffi::AnyBuffer& to) {
  if (from.untyped_data() != to.untyped_data()) {
    std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
  }
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_WRITE_IN_PLACE_H_
