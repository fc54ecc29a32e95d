// SPDX-License-Identifier: Apache-2.0

// Attention kernels for x86 with AVX-512 F, BW, DQ and VL. Rules for this file: isa.h.

// gcc 12 takes the "undefined" operand inside its own AVX-512 intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

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

#define JAX_PAGED_ISA avx512

JAX_PAGED_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx512.h"
#include "cpu/attention/all_kernels.h"
// clang-format on
namespace jax_paged::cpu::avx512 {
constexpr Kernels kKernels = AllKernels("avx512");
}
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const Kernels& Avx512Kernels() { return avx512::kKernels; }

}  // namespace jax_paged::cpu
