// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.zero_pool.v1 on CPU: a pool of zeros in huge pages of memory.
//
// A pool's pages are visited in any order. In memory pages of 4 KiB, which malloc gives, most KV
// pages begin with a miss of the TLB; decode from huge ones is up to a quarter faster. Memory
// becomes huge pages when it is first written, which is why zeros need a handler.

#include <cstdint>
#include <cstring>

#include "common/integers.h"
#include "cpu/handlers.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

ffi::Error ZeroPool(ffi::ThreadPool threads, ffi::Result<ffi::AnyBuffer> pool) {
  char* const data = static_cast<char*>(pool->untyped_data());
  const int64_t bytes = static_cast<int64_t>(pool->size_bytes());
  RenewInHugePages(data, bytes);
  ParallelFor(threads, CeilDiv(bytes, kHugePageBytes), threads.num_threads(),
              [&](int64_t chunk, int64_t) {
                const int64_t begin = chunk * kHugePageBytes;
                const int64_t count = Clamp(bytes - begin, 0, kHugePageBytes);
                std::memset(data + begin, 0, static_cast<size_t>(count));
              });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ZeroPoolHandler, ZeroPool,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>());  // pool

}  // namespace jax_paged::cpu
