// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.linear.v1 on CPU: out = x w^T, where w is 8-bit each column times its
// scale, or each sum over a block of the depth.
//
// The rows of w are cut into blocks that the workers claim; linear/kernel.h does a block for all
// rows of x. Each output is summed by one worker in one order, so the bits do not depend on the
// number of threads.

#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "cpu/handlers.h"
#include "cpu/linear/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr char kOp[] = "jax_paged.linear";
constexpr int64_t kSerialBytes = 64 << 10;  // of w: less is not worth a second thread
constexpr int64_t kParallelRows = 16;       // of x: fewer are loaded by the caller alone

struct Projection {
  const char* x;
  const char* w;
  const float* scale;        // of outputs or
  const float* block_scale;  // of blocks; null where there is none such
  char* out;
  Dtype dtype;
  Dtype w_dtype;
  Dtype out_dtype;
  int64_t num_rows;
  int64_t depth;
  int64_t num_columns;
};

void Multiply(ffi::ThreadPool& pool, const Projection& call) {
  const LinearKernels& kernels = ChosenLinearKernels().Of(call.dtype, call.w_dtype);
  const int64_t num_rows = call.num_rows, depth = call.depth, num_columns = call.num_columns;
  const int64_t row_bytes = depth * ByteWidth(call.w_dtype);
  const int64_t block = LinearBlockColumns(LinearRowBytes(call.w_dtype, depth, num_rows));
  const int64_t workers =
      num_columns * row_bytes < kSerialBytes ? 1 : Clamp(pool.num_threads(), 1, 1024);
  const int64_t padded_rows = PadLinearRows(num_rows);
  const int64_t x_stride = LinearStride(depth);
  const int64_t sums_floats = padded_rows * RoundUp(block, kLinearColumns);
  const int64_t panel_floats = IsEightBit(call.w_dtype) ? LinearPanelFloats(depth, block) : 0;
  const int64_t floats = padded_rows * x_stride + workers * (sums_floats + panel_floats);
  const Scratch scratch(static_cast<size_t>(floats) * sizeof(float));
  float* const rows = reinterpret_cast<float*>(scratch.data());
  float* const sums = rows + padded_rows * x_stride;

  const auto load = [&](int64_t item, int64_t) {
    const int64_t begin = item * kParallelRows;
    const int64_t end = Clamp(begin + kParallelRows, 0, padded_rows);
    kernels.load_rows(call.x, begin, end, num_rows, depth, rows, x_stride);
  };
  ParallelFor(pool, CeilDiv(padded_rows, kParallelRows), workers, load);

  const auto multiply = [&](int64_t item, int64_t worker) {
    const int64_t begin = item * block;
    const int64_t count = Clamp(num_columns - begin, 0, block);
    float* const mine = sums + worker * (sums_floats + panel_floats);
    const LinearBlocks blocks =
        LinearBlocksOf(call.block_scale, /*matrix=*/0, num_columns, depth, begin);
    kernels.sums(rows, x_stride, num_rows, call.w + begin * row_bytes, depth, count, blocks,
                 mine + sums_floats, mine);
    if (call.scale) ScaleLinearSums(call.scale + begin, num_rows, count, mine);
    StoreLinearSums(mine, num_rows, count, num_columns, call.out_dtype,
                    call.out + begin * ByteWidth(call.out_dtype));
  };
  ParallelFor(pool, CeilDiv(num_columns, block), workers, multiply);
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> out) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Projection call;
  if (failed(ReadDtype(kOp, "x", TypeOf(x), &call.dtype)) ||
      failed(ReadWeightDtype(kOp, "w", TypeOf(w), TypeOf(x), &call.w_dtype)) ||
      failed(ReadDtype(kOp, "out", TypeOf(*out), &call.out_dtype)) ||
      failed(CheckRank(kOp, "x", Shape(x), 2)) || failed(CheckRank(kOp, "w", Shape(w), 2))) {
    return ffi::Error::InvalidArgument(error);
  }
  const int64_t num_rows = Shape(x)[0], depth = Shape(x)[1], num_columns = Shape(w)[0];
  if (failed(CheckShape(kOp, "w", Shape(w), {num_columns, depth})) ||
      failed(CheckWeightScale(kOp, "scale", call.w_dtype, Shape(scale), {num_columns},
                              {CeilDiv(num_columns, kScaleBlock), CeilDiv(depth, kScaleBlock)})) ||
      failed(CheckShape(kOp, "out", Shape(*out), {num_rows, num_columns}))) {
    return ffi::Error::InvalidArgument(error);
  }
  if (depth % 8 != 0 || depth < 8) {
    return ffi::Error::InvalidArgument(
        Mismatch(kOp, "x", "a positive multiple of 8 columns", std::to_string(depth)));
  }
  if (num_rows == 0 || num_columns == 0) return ffi::Error::Success();
  call.x = static_cast<const char*>(x.untyped_data());
  call.w = static_cast<const char*>(w.untyped_data());
  const bool is_scaled = IsEightBit(call.w_dtype), has_blocks = Shape(scale).rank == 2;
  call.scale = is_scaled && !has_blocks ? scale.typed_data() : nullptr;
  call.block_scale = is_scaled && has_blocks ? scale.typed_data() : nullptr;
  call.out = static_cast<char*>(out->untyped_data());
  call.num_rows = num_rows;
  call.depth = depth;
  call.num_columns = num_columns;
  try {
    Multiply(pool, call);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kOp) + ": out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LinearHandler, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::AnyBuffer>()         // w
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scale, [0] = none
                                  .Ret<ffi::AnyBuffer>());       // out

}  // namespace jax_paged::cpu
