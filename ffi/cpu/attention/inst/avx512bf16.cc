// SPDX-License-Identifier: Apache-2.0

// Attention kernels for x86 with AVX-512 F, BW, DQ, VL, VBMI and BF16: those of
// inst/avx512.cc, with logits of bf16 from dot products of bf16 words. Half the work, and
// products and sums are as exact (only subnormal values count as 0). 8-bit pages become bf16 words
// too. Rules for this file: isa.h.

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

#define JAX_PAGED_ISA avx512bf16
#define JAX_PAGED_DOT_BFLOAT16

JAX_PAGED_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx512.h"
#include "cpu/isa/vec_avx512_codes.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/attention/logits.h"
#include "cpu/attention/stage.h"
#include "cpu/attention/decode.h"
#include "cpu/attention/decode_words.h"
#include "cpu/attention/prefill.h"
#include "cpu/attention/unit.h"
// clang-format on
namespace jax_paged::cpu::avx512bf16 {
constexpr Kernels::RunItems kRunBFloat16 = RunItems<BFloat16>;
constexpr Kernels::RunItems kRunWords = RunItems<BFloat16, /*WORDS=*/true>;
}  // namespace jax_paged::cpu::avx512bf16
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const Kernels& Avx512Bf16Kernels() {
  static const Kernels kernels = [] {
    Kernels all = Avx512Kernels();
    all.isa = "avx512bf16";
    all.run_items[static_cast<int>(Dtype::kBFloat16)] = avx512bf16::kRunBFloat16;
    all.run_words = avx512bf16::kRunWords;
    return all;
  }();
  return kernels;
}

}  // namespace jax_paged::cpu
