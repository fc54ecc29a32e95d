// The handler of jax_paged.linear.v1 on CPU: out = x w^T.
//
// The rows of w are cut into blocks that the workers claim; kernel_linear.h does a block for all
// rows of x. Each output is summed by one worker in one order, so the bits do not depend on the
// number of threads.

#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "common/ffi_checks.h"
#include "common/schedule.h"
#include "cpu/handlers.h"
#include "cpu/linear_kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr char kOp[] = "jax_paged.linear";
constexpr int64_t kSerialBytes = 64 << 10;  // of w: less is not worth a second thread
constexpr int64_t kParallelRows = 16;       // of x: fewer are loaded by the caller alone

void Multiply(ffi::ThreadPool& pool, Dtype dtype, Dtype out_dtype, const char* x, const char* w,
              char* out, int64_t num_rows, int64_t depth, int64_t num_columns) {
  const LinearKernels& kernels = ChosenLinearKernels().of[static_cast<int>(dtype)];
  const int64_t row_bytes = depth * ByteWidth(dtype);
  const int64_t block = LinearBlockColumns(row_bytes);
  const int64_t workers =
      num_columns * row_bytes < kSerialBytes ? 1 : Clamp(pool.num_threads(), 1, 1024);
  const int64_t padded_rows = PadLinearRows(num_rows);
  const int64_t x_stride = RoundUp(depth, kPadFloats);
  const int64_t sums_floats = padded_rows * RoundUp(block, kLinearColumns);
  const Scratch scratch(static_cast<size_t>(padded_rows * x_stride + workers * sums_floats) *
                        sizeof(float));
  float* const rows = reinterpret_cast<float*>(scratch.data());
  float* const sums = rows + padded_rows * x_stride;

  const auto load = [&](int64_t item, int64_t) {
    const int64_t begin = item * kParallelRows;
    const int64_t end = Clamp(begin + kParallelRows, 0, padded_rows);
    kernels.load_rows(x, begin, end, num_rows, depth, rows, x_stride);
  };
  ParallelFor(pool, CeilDiv(padded_rows, kParallelRows), workers, load);

  const auto multiply = [&](int64_t item, int64_t worker) {
    const int64_t begin = item * block;
    const int64_t count = Clamp(num_columns - begin, 0, block);
    float* const mine = sums + worker * sums_floats;
    kernels.sums(rows, x_stride, num_rows, w + begin * row_bytes, depth, count, mine);
    StoreLinearSums(mine, num_rows, count, num_columns, out_dtype,
                    out + begin * ByteWidth(out_dtype));
  };
  ParallelFor(pool, CeilDiv(num_columns, block), workers, multiply);
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Result<ffi::AnyBuffer> out) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Dtype dtype = Dtype::kFloat32, out_dtype = Dtype::kFloat32;
  if (failed(ReadDtype(kOp, "x", x.element_type(), &dtype)) ||
      failed(CheckType(kOp, "w", w.element_type(), x.element_type())) ||
      failed(ReadDtype(kOp, "out", out->element_type(), &out_dtype)) ||
      failed(CheckRank(kOp, "x", Shape(x), 2)) || failed(CheckRank(kOp, "w", Shape(w), 2))) {
    return ffi::Error::InvalidArgument(error);
  }
  const int64_t num_rows = Shape(x)[0], depth = Shape(x)[1], num_columns = Shape(w)[0];
  if (failed(CheckShape(kOp, "w", Shape(w), {num_columns, depth})) ||
      failed(CheckShape(kOp, "out", Shape(*out), {num_rows, num_columns}))) {
    return ffi::Error::InvalidArgument(error);
  }
  if (depth % 8 != 0 || depth < 8) {
    return ffi::Error::InvalidArgument(
        Mismatch(kOp, "x", "a positive multiple of 8 columns", std::to_string(depth)));
  }
  if (num_rows == 0 || num_columns == 0) return ffi::Error::Success();
  try {
    Multiply(pool, dtype, out_dtype, static_cast<const char*>(x.untyped_data()),
             static_cast<const char*>(w.untyped_data()), static_cast<char*>(out->untyped_data()),
             num_rows, depth, num_columns);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kOp) + ": out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LinearHandler, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // x
                                  .Arg<ffi::AnyBuffer>()    // w
                                  .Ret<ffi::AnyBuffer>());  // out

}  // namespace jax_paged::cpu
