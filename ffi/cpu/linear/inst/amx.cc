// SPDX-License-Identifier: Apache-2.0

// Projection kernels for x86 with AMX: bf16 by tiles, the rest as with AVX-512 BF16. Rules for this
// file: isa.h.

// gcc 12 takes the "undefined" operand inside its own AVX-512 intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>
#include <math.h>

#include <cstddef>
#include <cstdint>

#include "common/activations.h"
#include "common/dtypes.h"
#include "common/integers.h"
#include "common/page_view.h"
#include "common/params.h"
#include "common/tree.h"
#include "cpu/attention/kernels.h"
#include "cpu/isa/code_tables.h"
#include "cpu/isa/isa.h"
#include "cpu/linear/kernels.h"

#define JAX_PAGED_ISA amx
#define JAX_PAGED_DOT_BFLOAT16

JAX_PAGED_BEGIN_TARGET(
    "amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")
// clang-format off: in this order
#include "cpu/isa/vec_avx512.h"
#include "cpu/isa/vec_avx512_codes.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/linear/kernel.h"
#include "cpu/linear/packed.h"
#include "cpu/linear/many.h"
#include "cpu/isa/tiles.h"
#include "cpu/linear/tiles.h"
#include "cpu/linear/few_tiles.h"
#include "cpu/linear/int4.h"
#include "cpu/linear/int4_tiles.h"
// clang-format on
namespace jax_paged::cpu::amx {
template <typename T>
void PlainTileSums(const float* x, int64_t x_stride, int64_t num_rows, const void* w, int64_t depth,
                   int64_t count, const void* next, const LinearBlocks& blocks, float* panel,
                   float* sums, int64_t sums_stride, const SumsDone& done) {
  if (num_rows <= kFewTileRows) {
    FewTileSums(x, x_stride, num_rows, static_cast<const T*>(w), depth, count,
                static_cast<const T*>(next), blocks, sums, sums_stride);
    done(0, num_rows, sums);
  } else {
    TileSums<T, /*PACKED=*/false>(x, x_stride, num_rows, w, depth, count, next, blocks, panel, sums,
                                  sums_stride, done);
  }
}
template <typename T>
constexpr LinearKernels kTiles = {TileStride,
                                  LoadLinearRows<BFloat16>,
                                  /*order_rows=*/nullptr,
                                  /*tile_rows=*/0,
                                  /*word_depth=*/2,
                                  /*few_plain=*/nullptr,
                                  /*few_packed=*/nullptr,
                                  PlainTileSums<T>,
                                  TileSums<T, /*PACKED=*/true>,
                                  /*many=*/0,
                                  /*many_of_packed=*/0,
                                  kFewTileRows,
                                  GateSums,
                                  StoreLinearSums};
constexpr LinearKernels kBFloat16 = kTiles<BFloat16>;
constexpr LinearKernels kFloat32 = kSameWeights<float>;
constexpr Int4Kernels kInt4BFloat16 = {LoadInt4Rows<BFloat16>, Int4TileSums, /*many=*/0,
                                       /*word_depth=*/2, /*always_sums=*/false};
constexpr LinearKernels kInt8 = kTiles<CodeWord<Int8>>;
constexpr LinearKernels kFp8 = kTiles<CodeWord<Float8E4M3>>;
}  // namespace jax_paged::cpu::amx
JAX_PAGED_END_TARGET

namespace jax_paged::cpu {

const LinearKernelTable& AmxLinearKernels() {
  static const LinearKernelTable table = [] {
    LinearKernelTable all = Avx512Bf16LinearKernels();
    constexpr int kX = static_cast<int>(Dtype::kBFloat16);
    all.same.of[kX] = amx::kBFloat16;
    all.same.of[static_cast<int>(Dtype::kFloat32)] = amx::kFloat32;
    all.int8.of[kX] = amx::kInt8;
    all.fp8.of[kX] = amx::kFp8;
    all.int4[kX] = amx::kInt4BFloat16;
    return all;
  }();
  return table;
}

}  // namespace jax_paged::cpu
