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
#include "cpu/parallel_for.h"
#include "xla/ffi/api/ffi.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr int64_t kChunkBytes = 2 << 20;  // as large as a huge page
// A smaller pool has little to gain, and advice cuts the process's memory into one more mapping.
constexpr int64_t kLeastBytes = 4 << 20;

// Gives the memory's pages back, and asks for huge ones at the next write: malloc may hand out what
// was written before. Where the system has none to give, nothing but the content changes.
void RenewInHugePages(char* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
  const int64_t begin = RoundUp(address, page), end = (address + bytes) / page * page;
  char* const first = data + (begin - address);
  if (madvise(first, end - begin, MADV_HUGEPAGE) == 0) madvise(first, end - begin, MADV_DONTNEED);
#endif
}

ffi::Error ZeroPool(ffi::ThreadPool threads, ffi::Result<ffi::AnyBuffer> pool) {
  char* const data = static_cast<char*>(pool->untyped_data());
  const int64_t bytes = static_cast<int64_t>(pool->size_bytes());
  if (bytes >= kLeastBytes) RenewInHugePages(data, bytes);
  ParallelFor(threads, CeilDiv(bytes, kChunkBytes), threads.num_threads(),
              [&](int64_t chunk, int64_t) {
                const int64_t begin = chunk * kChunkBytes;
                const int64_t count = Clamp(bytes - begin, 0, kChunkBytes);
                std::memset(data + begin, 0, static_cast<size_t>(count));
              });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ZeroPoolHandler, ZeroPool,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::AnyBuffer>());  // pool

}  // namespace jax_paged::cpu
