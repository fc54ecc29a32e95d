// SPDX-License-Identifier: Apache-2.0

// A token's row of one head, into pages of any layout.

#ifndef JAX_PAGED_CPU_WRITE_WRITE_ROW_H_
#define JAX_PAGED_CPU_WRITE_WRITE_ROW_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/page_view.h"
#include "cpu/isa/isa.h"

namespace jax_paged::cpu {

// No template: kernels of all instruction sets share it (isa.h).
JAX_PAGED_INLINE void WriteAtoms(char* to, const char* from, int64_t row_bytes, int64_t atom_stride,
                                 size_t atom_bytes) {
  for (int64_t b = 0; b < row_bytes; b += static_cast<int64_t>(atom_bytes), to += atom_stride) {
    std::memcpy(to, from + b, atom_bytes);
  }
}

inline void WriteRow(char* to, const char* from, int64_t row_bytes, const PageStrides& strides) {
  if (strides.atom_bytes == row_bytes) {
    std::memcpy(to, from, static_cast<size_t>(row_bytes));
  } else if (strides.atom_bytes == kKeyAtomBytes) {
    WriteAtoms(to, from, row_bytes, strides.atom, kKeyAtomBytes);
  } else if (strides.atom_bytes == 4) {
    WriteAtoms(to, from, row_bytes, strides.atom, 4);
  } else if (strides.atom_bytes == 2) {
    WriteAtoms(to, from, row_bytes, strides.atom, 2);
  } else {
    WriteAtoms(to, from, row_bytes, strides.atom, 1);
  }
}

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_WRITE_WRITE_ROW_H_
