// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.linear_int4.v2 on CPU: out = x w^T of 4-bit w (linear/int4.h).
//
// Panels are cut into blocks that the workers claim. Each output is summed by one worker in one
// order, so the bits do not depend on the number of threads.

#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "cpu/handlers.h"
#include "cpu/linear/int4_checks.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/live_rows.h"
#include "cpu/parallel_for.h"
#include "cpu/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr char kOp[] = "jax_paged.linear_int4";
constexpr int64_t kSerialBytes = 64 << 10;  // of codes: less is not worth a second thread
constexpr int64_t kBlockBytes = 128 << 10;  // of codes, which stay in L2
constexpr int64_t kRowsAtOnce = 16;         // that a worker loads
constexpr int64_t kItemsPerWorker = 4;      // blocks, at least

struct Call {
  const char* x;
  Int4Panel w;  // the first one
  char* out;
  Dtype dtype;
  Dtype out_dtype;
  int64_t num_rows;
  int64_t depth;
  int64_t panels;
};

// Panels that a worker takes at once; panel_floats: what each is staged in, or 0.
int64_t BlockPanels(const Call& call, int64_t workers, int64_t panel_floats) {
  if (panel_floats > 0) {
    return EvenBlockColumns(call.panels, Int4Kernels::PanelsInL2(panel_floats), 1, workers);
  }
  const int64_t share = CeilDiv(call.panels, workers * kItemsPerWorker);
  return Clamp(kBlockBytes / (call.depth * kPanelOutputs / 2), 1, share);
}

void Multiply(ffi::ThreadPool& pool, const Call& call) {
  const LinearKernelTable& all = ChosenLinearKernels();
  const Int4Kernels& kernels = all.int4[static_cast<int>(call.dtype)];
  const int64_t num_rows = call.num_rows, panel_bytes = call.depth * kPanelOutputs / 2;
  const bool is_small = call.panels * panel_bytes < kSerialBytes;
  const int64_t workers = is_small ? 1 : Clamp(pool.num_threads(), 1, 1024);
  const int64_t panel_floats = kernels.PanelFloats(num_rows, call.depth);
  const int64_t block = BlockPanels(call, workers, panel_floats);
  const int64_t x_stride = all.Of(call.dtype, call.dtype).stride(call.depth);
  const bool is_direct = call.out_dtype == Dtype::kFloat32;
  const int64_t columns = call.panels * kPanelOutputs;
  const int64_t of_groups = num_rows * kernels.GroupSums(call.w);
  const int64_t own_sums = is_direct ? 0 : num_rows * block * kPanelOutputs;
  const int64_t own = own_sums + block * panel_floats;
  const int64_t rows_floats = num_rows * x_stride + RoundUp(of_groups, kPadFloats);
  const Scratch scratch(static_cast<size_t>(rows_floats + workers * own) * sizeof(float));
  float* const rows = reinterpret_cast<float*>(scratch.data());
  float* const group_sums = of_groups > 0 ? rows + num_rows * x_stride : nullptr;
  ParallelFor(pool, CeilDiv(num_rows, kRowsAtOnce), workers, [&](int64_t item, int64_t) {
    const int64_t begin = item * kRowsAtOnce;
    kernels.load_rows(call.x, begin, Clamp(begin + kRowsAtOnce, 0, num_rows), call.depth,
                      call.w.group, rows, x_stride, group_sums);
  });
  const Int4Rows x = {rows, x_stride, group_sums};
  ParallelFor(pool, CeilDiv(call.panels, block), workers, [&](int64_t item, int64_t worker) {
    const int64_t begin = item * block;
    const int64_t panels = Clamp(call.panels - begin, 0, block), count = panels * kPanelOutputs;
    char* const out = call.out + begin * kPanelOutputs * ByteWidth(call.out_dtype);
    float* const mine = rows + rows_floats + worker * own;
    float* const sums = is_direct ? reinterpret_cast<float*>(out) : mine;
    kernels.sums(x, num_rows, call.w.Behind(begin), panels, mine + own_sums, sums,
                 is_direct ? columns : count);
    if (is_direct) return;
    all.Of(call.dtype, call.dtype)
        .store(sums, num_rows, /*most=*/1, count, columns, call.out_dtype, out);
  });
}

ffi::Error LinearInt4(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> codes,
                      ffi::AnyBuffer scales, ffi::Buffer<ffi::PRED> live,
                      ffi::Result<ffi::AnyBuffer> out) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Call call;
  if (failed(ReadDtype(kOp, "x", TypeOf(x), &call.dtype)) ||
      failed(ReadDtype(kOp, "out", TypeOf(*out), &call.out_dtype)) ||
      failed(CheckRank(kOp, "x", Shape(x), 2)) ||
      failed(ReadInt4(kOp, "codes", ArrayOf(codes), "scales", ArrayOf(scales), /*leading=*/0,
                      &call.w))) {
    return ffi::Error::InvalidArgument(error);
  }
  const int64_t num_rows = Shape(x)[0];
  call.depth = Shape(x)[1];
  call.panels = Shape(codes)[0];
  const int64_t num_columns = call.panels * kPanelOutputs;
  LiveRows rows;
  if (failed(
          CheckShape(kOp, "codes", Shape(codes), {call.panels, call.depth / 8, kPanelOutputs})) ||
      failed(CheckShape(kOp, "out", Shape(*out), {num_rows, num_columns})) ||
      failed(ReadLiveRows(kOp, live, num_rows, &rows))) {
    return ffi::Error::InvalidArgument(error);
  }
  if (num_rows == 0 || call.panels == 0) return ffi::Error::Success();
  call.num_rows = rows.Counted();
  call.x = static_cast<const char*>(x.untyped_data());
  call.out = static_cast<char*>(out->untyped_data());
  try {
    if (call.num_rows > 0) Multiply(pool, call);
    rows.ClearOthers(pool, call.out, num_columns * ByteWidth(call.out_dtype));
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kOp) + ": out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LinearInt4Handler, LinearInt4,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()          // x
                                  .Arg<ffi::Buffer<ffi::U32>>()   // codes
                                  .Arg<ffi::AnyBuffer>()          // scales
                                  .Arg<ffi::Buffer<ffi::PRED>>()  // live, [0] = all
                                  .Ret<ffi::AnyBuffer>());        // out

}  // namespace jax_paged::cpu
