// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.merge_attention_states.v1 on CPU. Bound by memory: reads both parts and
// writes their sum once.

#include <cstdint>
#include <string>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "common/merge_checks.h"
#include "cpu/attention/kernels.h"
#include "cpu/handlers.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

// What one thread takes at a time: some 10 microseconds, below which a second thread costs more
// than it brings.
constexpr int64_t kBytesPerItem = 100'000;

ffi::Error MergeStates(ffi::ThreadPool pool, ffi::AnyBuffer out_a, ffi::Buffer<ffi::F32> lse_a,
                       ffi::AnyBuffer out_b, ffi::Buffer<ffi::F32> lse_b,
                       ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> lse) {
  Dtype dtype;
  const std::string error = ReadMergeStates({ArrayOf(out_a), ArrayOf(lse_a), ArrayOf(out_b),
                                             ArrayOf(lse_b), ArrayOf(*out), ArrayOf(*lse)},
                                            &dtype);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  const MergeParams params = {out_a.untyped_data(), lse_a.typed_data(),  out_b.untyped_data(),
                              lse_b.typed_data(),   out->untyped_data(), lse->typed_data(),
                              Shape(out_a)[2]};
  const int64_t heads = Shape(lse_a)[0] * Shape(lse_a)[1];
  const int64_t bytes_per_head = 3 * params.head_dim * ByteWidth(dtype);
  const int64_t heads_per_item = Clamp(kBytesPerItem / bytes_per_head, 1, heads);
  ExpectOutput(params.out, heads * params.head_dim * ByteWidth(dtype));
  const auto merge = ChosenKernels().merge_heads[static_cast<int>(dtype)];
  const auto run = [&](int64_t item, int64_t) {
    const int64_t begin = item * heads_per_item;
    merge(params, begin, Clamp(begin + heads_per_item, begin, heads));
  };
  if (heads > 0) ParallelFor(pool, CeilDiv(heads, heads_per_item), pool.num_threads(), run);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MergeStatesHandler, MergeStates,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // out_a
                                  .Arg<ffi::Buffer<ffi::F32>>()    // lse_a
                                  .Arg<ffi::AnyBuffer>()           // out_b
                                  .Arg<ffi::Buffer<ffi::F32>>()    // lse_b
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::Buffer<ffi::F32>>());  // lse

}  // namespace jax_paged::cpu
