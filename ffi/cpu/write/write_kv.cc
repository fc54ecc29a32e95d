// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.write_kv.v1 on CPU: copies each token's K and V into its page slot, in
// place.
//
// A worker owns some KV heads of K or of V and goes through the tokens in order, so of two tokens
// for one slot the later one wins in every head. Bound by memory; few tokens are written by the
// caller alone.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "common/page_view.h"
#include "cpu/handlers.h"
#include "cpu/parallel_for.h"
#include "cpu/write/in_place.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

// One head's row of a token, atom by atom.
template <int ATOM_BYTES>
void WriteAtoms(char* to, const char* from, int64_t token_bytes, int64_t atom_stride) {
  for (int64_t b = 0; b < token_bytes; b += ATOM_BYTES, to += atom_stride) {
    std::memcpy(to, from + b, ATOM_BYTES);
  }
}

void WriteRow(char* to, const char* from, int64_t token_bytes, const PageStrides& strides) {
  if (strides.atom_bytes == token_bytes) {
    std::memcpy(to, from, static_cast<size_t>(token_bytes));
  } else if (strides.atom_bytes == kKeyAtomBytes) {
    WriteAtoms<kKeyAtomBytes>(to, from, token_bytes, strides.atom);
  } else if (strides.atom_bytes == 4) {
    WriteAtoms<4>(to, from, token_bytes, strides.atom);
  } else {
    WriteAtoms<2>(to, from, token_bytes, strides.atom);
  }
}

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

ffi::Error WriteKv(ffi::ThreadPool pool, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                   ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slot_mapping,
                   ffi::Buffer<ffi::S32> layer, std::string_view layout_name,
                   ffi::Result<ffi::AnyBuffer> k_result, ffi::Result<ffi::AnyBuffer> v_result) {
  PoolShape k_pool, v_pool;
  const std::string error = ReadWriteKv(k_pages, v_pages, k, v, Shape(slot_mapping), Shape(layer),
                                        layout_name, *k_result, *v_result, &k_pool, &v_pool);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  const int64_t num_tokens = Shape(slot_mapping)[0];
  const int64_t heads = k_pool.num_kv_heads;

  CopyUnlessAliased(k_pages, *k_result);
  CopyUnlessAliased(v_pages, *v_result);
  const int32_t layer_index = *layer.typed_data();
  if (layer_index < 0 || layer_index >= k_pool.num_layers) return ffi::Error::Success();

  const PageView k_view = MakePageView(k_result->untyped_data(), k_pool, layer_index);
  const PageView v_view = MakePageView(v_result->untyped_data(), v_pool, layer_index);
  const int64_t bytes = num_tokens * heads * (k_pool.token_bytes() + v_pool.token_bytes());
  const int64_t workers = bytes < kSerialBytes ? 1 : Clamp(pool.num_threads(), 1, 2 * heads);
  const int64_t parts = Clamp(CeilDiv(workers, 2), 1, heads);  // of the heads of K, and of V
  const auto write = [&](int64_t item, int64_t) {
    const bool is_k = item < parts;
    const int64_t part = item % parts;
    const PoolShape& shape = is_k ? k_pool : v_pool;
    WriteHeads(is_k ? k_view : v_view, static_cast<const char*>((is_k ? k : v).untyped_data()),
               slot_mapping.typed_data(), num_tokens, heads, shape.token_bytes(),
               heads * part / parts, heads * (part + 1) / parts);
  };
  ParallelFor(pool, 2 * parts, workers, write);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteKvHandler, WriteKv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // k_pages
                                  .Arg<ffi::AnyBuffer>()         // v_pages
                                  .Arg<ffi::AnyBuffer>()         // k
                                  .Arg<ffi::AnyBuffer>()         // v
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slot_mapping
                                  .Arg<ffi::Buffer<ffi::S32>>()  // layer
                                  .Attr<std::string_view>("layout")
                                  .Ret<ffi::AnyBuffer>()    // k_pages
                                  .Ret<ffi::AnyBuffer>());  // v_pages

}  // namespace jax_paged::cpu
