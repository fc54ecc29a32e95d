// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.write_kv.v1 on CPU: copies each token's K and V into its page slot, in
// place.
//
// A worker owns some KV heads of K or of V and goes through the tokens in order, so of two tokens
// for one slot the later one wins in every head. Bound by memory; few tokens are written by the
// caller alone.

#include <cstdint>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "common/page_view.h"
#include "cpu/handlers.h"
#include "cpu/parallel_for.h"
#include "cpu/write/in_place.h"
#include "cpu/write/write_row.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

// Writes heads [head_begin, head_end) of tokens [num_tokens, num_kv_heads, token_bytes].
void WriteHeads(const PageView& pages, const char* tokens, const int32_t* slots, int64_t num_tokens,
                int64_t num_kv_heads, int64_t token_bytes, int64_t head_begin, int64_t head_end) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (!pages.IsSlot(slots[t])) continue;
    const char* from = tokens + (t * num_kv_heads + head_begin) * token_bytes;
    for (int64_t head = head_begin; head < head_end; ++head, from += token_bytes) {
      WriteRow(pages.Slot(slots[t], head), from, token_bytes, pages.strides);
    }
  }
}

ffi::Error WriteKv(ffi::ThreadPool pool, const WriteKvParams& params,
                   const PagesOfCall (&pages)[2]) {
  for (const PagesOfCall& of : pages) CopyUnlessAliased(of.operand, of.result);
  const PoolShape &k_pool = params.k_pool, &v_pool = params.v_pool;
  const int32_t layer = *params.layer;
  if (layer < 0 || layer >= k_pool.num_layers) return ffi::Error::Success();

  const PageView k_view = MakePageView(params.k_pages, k_pool, layer);
  const PageView v_view = MakePageView(params.v_pages, v_pool, layer);
  const int64_t heads = k_pool.num_kv_heads;
  const int64_t bytes = params.num_tokens * heads * (k_pool.token_bytes() + v_pool.token_bytes());
  const int64_t workers = bytes < kSerialBytes ? 1 : Clamp(pool.num_threads(), 1, 2 * heads);
  const int64_t parts = Clamp(CeilDiv(workers, 2), 1, heads);  // of the heads of K, and of V
  const auto write = [&](int64_t item, int64_t) {
    const bool is_k = item < parts;
    const int64_t part = item % parts;
    const PoolShape& shape = is_k ? k_pool : v_pool;
    WriteHeads(is_k ? k_view : v_view, static_cast<const char*>(is_k ? params.k : params.v),
               params.slot_mapping, params.num_tokens, heads, shape.token_bytes(),
               heads * part / parts, heads * (part + 1) / parts);
  };
  ParallelFor(pool, 2 * parts, workers, write);
  return ffi::Error::Success();
}

constexpr auto kHandle = HandleWriteKv<WriteKv, ffi::ThreadPool>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteKvHandler, kHandle,
                              BindWriteKv(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jax_paged::cpu
