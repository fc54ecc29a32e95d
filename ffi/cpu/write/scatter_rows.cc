// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.scatter_rows.v1 on CPU: pool[rows[i]] = values[i], in place, for any
// dtype.
//
// The leading axes of the pool, those that a value does not have, count as one. Rows out of range
// are skipped; none may be named twice. XLA's scatter would convert the whole of a bf16 or fp8 pool
// to a wider dtype and back. Bound by memory; a little is copied by the caller alone.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/ffi_checks.h"
#include "cpu/handlers.h"
#include "cpu/write/in_place.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr char kOp[] = "jax_paged.scatter_rows";

std::string Check(const ffi::AnyBuffer& pool, ShapeView rows, const ffi::AnyBuffer& values,
                  const ffi::AnyBuffer& out) {
  std::string error = CheckSameShape(kOp, "result", Shape(out), Shape(pool));
  if (error.empty()) error = CheckType(kOp, "result", TypeOf(out), TypeOf(pool));
  if (error.empty()) error = CheckType(kOp, "values", TypeOf(values), TypeOf(pool));
  if (error.empty()) error = CheckRank(kOp, "rows", rows, 1);
  if (!error.empty()) return error;
  const ShapeView all = Shape(pool), got = Shape(values);
  if (got.rank < 1 || got.rank > all.rank) {
    return Mismatch(kOp, "values", "rank 1 to " + std::to_string(all.rank),
                    ShapeText(got.dims, got.rank));
  }
  std::vector<int64_t> expected(all.dims + (all.rank - got.rank), all.dims + all.rank);
  expected[0] = rows[0];
  return CheckSameShape(kOp, "values", got, {expected.data(), expected.size()});
}

ffi::Error ScatterRows(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> rows,
                       ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> result) {
  const std::string error = Check(pool, Shape(rows), values, *result);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  CopyUnlessAliased(pool, *result);
  const int64_t count = Shape(rows)[0];
  if (values.size_bytes() == 0) return ffi::Error::Success();
  const int64_t bytes = static_cast<int64_t>(values.size_bytes()) / count;
  const int64_t num_rows = static_cast<int64_t>(pool.size_bytes()) / bytes;
  const char* const from = static_cast<const char*>(values.untyped_data());
  char* const to = static_cast<char*>(result->untyped_data());
  const int32_t* const row = rows.typed_data();
  ForEachCopy(threads, count, bytes, [&](int64_t i) {
    if (row[i] < 0 || row[i] >= num_rows) return;
    std::memcpy(to + row[i] * bytes, from + i * bytes, static_cast<size_t>(bytes));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ScatterRowsHandler, ScatterRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // pool
                                  .Arg<ffi::Buffer<ffi::S32>>()  // rows
                                  .Arg<ffi::AnyBuffer>()         // values
                                  .Ret<ffi::AnyBuffer>());       // pool

}  // namespace jax_paged::cpu
