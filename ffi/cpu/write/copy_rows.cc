// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.copy_rows.v1 on CPU: pool[target[i]] = pool[source[i]], in place, for
// any dtype. The pool's leading axes count as one.
//
// A pair with an id out of range is skipped, and costs nothing: most pairs of a fork or a truncate
// are of rows that need no copy. All sources are read as they were. Those that are targets as well
// are staged first; the others are copied straight from row to row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/ffi_checks.h"
#include "cpu/handlers.h"
#include "cpu/scratch.h"
#include "cpu/write/in_place.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr char kOp[] = "jax_paged.copy_rows";

struct Copy {
  char* to;
  const char* from;
};

std::string Check(const ffi::AnyBuffer& pool, ShapeView target, ShapeView source, int64_t leading,
                  const ffi::AnyBuffer& out) {
  std::string error = CheckSameShape(kOp, "result", Shape(out), Shape(pool));
  if (error.empty()) error = CheckType(kOp, "result", TypeOf(out), TypeOf(pool));
  if (error.empty()) error = CheckRank(kOp, "target", target, 1);
  if (error.empty()) error = CheckSameShape(kOp, "source", source, target);
  if (error.empty() && (leading < 1 || leading > static_cast<int64_t>(Shape(pool).rank))) {
    error = Mismatch(kOp, "leading", "1 to " + std::to_string(Shape(pool).rank),
                     std::to_string(leading));
  }
  return error;
}

// Carries out the copies, of which none depends on another one.
void Run(ffi::ThreadPool& threads, const std::vector<Copy>& copies, int64_t bytes) {
  ForEachCopy(threads, static_cast<int64_t>(copies.size()), bytes, [&](int64_t i) {
    std::memcpy(copies[i].to, copies[i].from, static_cast<size_t>(bytes));
  });
}

ffi::Error CopyRows(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> target,
                    ffi::Buffer<ffi::S32> source, int64_t leading,
                    ffi::Result<ffi::AnyBuffer> result) {
  const std::string error = Check(pool, Shape(target), Shape(source), leading, *result);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  CopyUnlessAliased(pool, *result);
  if (pool.size_bytes() == 0) return ffi::Error::Success();
  int64_t num_rows = 1;
  for (int64_t i = 0; i < leading; ++i) num_rows *= Shape(pool)[i];
  const int64_t bytes = static_cast<int64_t>(pool.size_bytes()) / num_rows;
  char* const rows = static_cast<char*>(result->untyped_data());
  const auto is_row = [&](int32_t id) { return id >= 0 && id < num_rows; };

  std::vector<Copy> copies;
  std::vector<const char*> targets;
  for (int64_t i = 0; i < Shape(target)[0]; ++i) {
    const int32_t to = target.typed_data()[i], from = source.typed_data()[i];
    if (!is_row(to) || !is_row(from) || to == from) continue;
    copies.push_back({rows + to * bytes, rows + from * bytes});
    targets.push_back(copies.back().to);
  }
  std::sort(targets.begin(), targets.end());
  std::vector<Copy*> overwritten;
  for (Copy& copy : copies) {
    if (std::binary_search(targets.begin(), targets.end(), copy.from)) overwritten.push_back(&copy);
  }
  const Scratch scratch(overwritten.size() * static_cast<size_t>(bytes));
  std::vector<Copy> staged;
  for (Copy* copy : overwritten) {
    staged.push_back({scratch.data() + staged.size() * static_cast<size_t>(bytes), copy->from});
    copy->from = staged.back().to;
  }
  Run(threads, staged, bytes);
  Run(threads, copies, bytes);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CopyRowsHandler, CopyRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // pool
                                  .Arg<ffi::Buffer<ffi::S32>>()  // target
                                  .Arg<ffi::Buffer<ffi::S32>>()  // source
                                  .Attr<int64_t>("leading")
                                  .Ret<ffi::AnyBuffer>());  // pool

}  // namespace jax_paged::cpu
