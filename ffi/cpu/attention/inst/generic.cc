// SPDX-License-Identifier: Apache-2.0

// Attention kernels in plain C++, for any architecture. Rules for this file: isa.h.

#include <math.h>

#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "common/page_view.h"
#include "common/params.h"
#include "common/qkv_params.h"
#include "common/schedule.h"
#include "common/tree.h"
#include "cpu/attention/kernels.h"
#include "cpu/isa/isa.h"
#include "cpu/write/write_row.h"

#define JAX_PAGED_ISA generic

// clang-format off: in this order
#include "cpu/isa/vec_generic.h"
#include "cpu/attention/all_kernels.h"
// clang-format on
namespace jax_paged::cpu::generic {
constexpr Kernels kKernels = AllKernels("generic");
}

namespace jax_paged::cpu {

const Kernels& GenericKernels() { return generic::kKernels; }

}  // namespace jax_paged::cpu
