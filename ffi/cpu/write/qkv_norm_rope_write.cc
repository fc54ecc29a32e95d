// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.qkv_norm_rope_write.v2 on CPU.
//
// Items of work: some KV heads of all tokens, in order, so that of two tokens for one slot the
// later one wins in every head; and blocks of tokens, for q. Bound by memory; few tokens are the
// caller's alone.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "common/qkv_checks.h"
#include "cpu/attention/kernels.h"
#include "cpu/handlers.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel_for.h"
#include "cpu/write/in_place.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr int64_t kBlocksPerWorker = 4;

// A head's weights as floats, in `floats` unless they are so already; null when there are none.
const float* NormWeights(const void* weights, Dtype dtype, int64_t head_dim, float* floats) {
  if (!weights || dtype == Dtype::kFloat32) return static_cast<const float*>(weights);
  for (int64_t d = 0; d < head_dim; ++d) {
    floats[d] = dtype == Dtype::kBFloat16 ? ToFloat(static_cast<const BFloat16*>(weights)[d])
                                          : ToFloat(static_cast<const Float16*>(weights)[d]);
  }
  return floats;
}

QkvTarget MakeTarget(void* pages, const PoolShape& shape, const QkvScale& scale, int64_t layer) {
  QkvTarget target = {};
  target.pages = MakePageView(pages, shape, layer);
  target.head_dim = shape.head_dim;
  target.given_scale = scale.given;
  if (scale.computed) target.scales = MakePageView(scale.computed, ScalePool(shape), layer);
  return target;
}

ffi::Error QkvNormRopeWrite(ffi::ThreadPool pool, const QkvParams& params,
                            const PagesOfCall (&pages)[4]) {
  for (const PagesOfCall& of : pages) CopyUnlessAliased(of.operand, of.result);

  float q_floats[kMaxQkvHeadDim], k_floats[kMaxQkvHeadDim];
  const int64_t head_dim = params.k_pool.head_dim, heads = params.k_pool.num_kv_heads;
  QkvWork work = {};
  work.params = &params;
  work.q_norm = NormWeights(params.q_norm, params.norm_dtype, head_dim, q_floats);
  work.k_norm = NormWeights(params.k_norm, params.norm_dtype, head_dim, k_floats);
  const int64_t bytes = params.num_tokens * params.width() * ByteWidth(params.dtype);
  const int64_t workers = bytes < kSerialBytes ? 1 : Clamp(pool.num_threads(), 1, 1024);
  int64_t page_items = 0;
  const int32_t layer_index = *params.layer;
  if (layer_index >= 0 && layer_index < params.k_pool.num_layers) {
    work.k = MakeTarget(params.k_pages, params.k_pool, params.k_scale, layer_index);
    work.v = MakeTarget(params.v_pages, params.v_pool, params.v_scale, layer_index);
    page_items = Clamp(workers, 1, heads);
  }
  ExpectOutput(params.q,
               params.num_tokens * params.num_q_heads * head_dim * ByteWidth(params.dtype));
  const int64_t block = CeilDiv(params.num_tokens, workers == 1 ? 1 : workers * kBlocksPerWorker);
  const int64_t blocks = block == 0 ? 0 : CeilDiv(params.num_tokens, block);
  const Kernels& kernels = ChosenKernels();
  const int dtype = static_cast<int>(params.dtype);
  const auto run = [&](int64_t item, int64_t) {
    if (item < page_items) {
      kernels.qkv_pages[dtype](work, heads * item / page_items, heads * (item + 1) / page_items);
      return;
    }
    const int64_t begin = (item - page_items) * block;
    kernels.qkv_queries[dtype](work, begin, Clamp(begin + block, begin, params.num_tokens));
  };
  ParallelFor(pool, page_items + blocks, workers, run);
  return ffi::Error::Success();
}

constexpr auto kHandle = HandleQkv<QkvNormRopeWrite, ffi::ThreadPool>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QkvNormRopeWriteHandler, kHandle,
                              BindQkv(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jax_paged::cpu
