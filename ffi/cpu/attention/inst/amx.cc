// SPDX-License-Identifier: Apache-2.0

// Attention kernels for x86 with AMX: those of inst/avx512bf16.cc, with prefill of bf16 by tiles.
// Rules for this file: isa.h.

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
#include "common/schedule.h"
#include "common/tree.h"
#include "cpu/attention/kernels.h"
#include "cpu/isa/code_tables.h"
#include "cpu/isa/isa.h"
#include "cpu/write/write_row.h"

#define JAX_PAGED_ISA amx
#define JAX_PAGED_DOT_BFLOAT16

JAX_PAGED_BEGIN_TARGET(
    "amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx512.h"
#include "cpu/isa/vec_avx512_codes.h"
#include "cpu/isa/tiles.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/attention/logits.h"
#include "cpu/attention/stage.h"
#include "cpu/attention/decode.h"
#include "cpu/attention/decode_words.h"
#include "cpu/attention/prefill.h"
#include "cpu/attention/prefill_tiles.h"
#include "cpu/attention/unit.h"
// clang-format on
namespace jax_paged::cpu::amx {
constexpr Kernels::RunItems kRunBFloat16 = RunItems<BFloat16>;
}  // namespace jax_paged::cpu::amx
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const Kernels& AmxKernels() {
  static const Kernels kernels = [] {
    Kernels all = Avx512Bf16Kernels();
    all.isa = "amx";
    all.run_items[static_cast<int>(Dtype::kBFloat16)] = amx::kRunBFloat16;
    return all;
  }();
  return kernels;
}

}  // namespace jax_paged::cpu
