// SPDX-License-Identifier: Apache-2.0

// Attention kernels for x86 with AVX2, FMA and F16C. Rules for this file: isa.h.

#include <immintrin.h>
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

#define JAX_PAGED_ISA avx2

JAX_PAGED_BEGIN_TARGET("avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx2.h"
#include "cpu/attention/all_kernels.h"
// clang-format on
namespace jax_paged::cpu::avx2 {
constexpr Kernels kKernels = AllKernels("avx2");
}
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const Kernels& Avx2Kernels() { return avx2::kKernels; }

}  // namespace jax_paged::cpu
