// SPDX-License-Identifier: Apache-2.0

// Which rows of x count. Steps have rows of padding behind those of tokens: they cost nothing, and
// their outputs are 0.

#ifndef JAX_PAGED_CPU_LINEAR_LIVE_ROWS_H_
#define JAX_PAGED_CPU_LINEAR_LIVE_ROWS_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged::cpu {

inline constexpr int64_t kSerialClear = 1 << 20;  // bytes: less is not worth a second thread

struct LiveRows {
  const bool* live;  // null: all
  int64_t num_rows;

  // Rows up to the last that counts: those to multiply.
  int64_t Counted() const {
    int64_t counted = num_rows;
    while (live && counted > 0 && !live[counted - 1]) --counted;
    return counted;
  }

  // Sets the outputs of the others to 0.
  template <typename Pool>
  void ClearOthers(Pool& pool, char* out, int64_t row_bytes) const {
    if (!live) return;
    const auto clear = [&](int64_t row, int64_t) {
      if (!live[row]) std::memset(out + row * row_bytes, 0, static_cast<size_t>(row_bytes));
    };
    const bool is_small = num_rows * row_bytes < kSerialClear;
    ParallelFor(pool, num_rows, is_small ? 1 : Clamp(pool.num_threads(), 1, 1024), clear);
  }
};

// Reads an operand of [num_rows], or [0] for all rows; what is wrong with it, or nothing.
inline std::string ReadLiveRows(const char* op, xla::ffi::Buffer<xla::ffi::PRED> operand,
                                int64_t num_rows, LiveRows* rows) {
  *rows = {nullptr, num_rows};
  if (operand.element_count() == 0 && Shape(operand).rank == 1) return "";
  rows->live = operand.typed_data();
  return CheckShape(op, "live", Shape(operand), {num_rows});
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_LINEAR_LIVE_ROWS_H_
