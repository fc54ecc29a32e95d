// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.linear.v2 on CPU: out = x w^T, where w is 8-bit each column times its
// scale, or each sum over a block of the depth.
//
// w may be packed (linear/packed.h): then it has an axis more.
//
// The rows of w are cut into blocks that the workers claim; linear/kernel.h does a block for all
// rows of x. Each output is summed by one worker in one order, so the bits do not depend on the
// number of threads.

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "cpu/handlers.h"
#include "cpu/huge_pages.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/live_rows.h"
#include "cpu/linear/packed_checks.h"
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
  bool is_packed;
};

// `done` as the kernels call it.
template <typename Done>
SumsDone SumsDoneBy(const Done& done, bool ends) {
  const auto call = [](const void* context, int64_t row, int64_t num_rows, float* sums) {
    (*static_cast<const Done*>(context))(row, num_rows, sums);
  };
  return {call, &done, ends};
}

// Rows of x as the kernels want them.
struct LoadedRows {
  const float* data;
  int64_t stride;
};

// What the workers of one call have: rows of x, which may be in order, and floats of their own; for
// those that put x in order, kRowsOfOrder rows of it.
template <typename Work>
void LoadAndRun(ffi::ThreadPool& pool, const Projection& call, const LinearKernels& kernels,
                int64_t workers, int64_t own_floats, const Work& work) {
  const int64_t padded_rows = kernels.PaddedRows(call.is_packed, call.num_rows);
  const int64_t x_stride = kernels.stride(call.depth);
  const int64_t tile_floats = kRowsOfOrder * x_stride;
  const int64_t floats = padded_rows * x_stride + workers * own_floats;
  const Scratch scratch(static_cast<size_t>(floats) * sizeof(float));
  float* const rows = reinterpret_cast<float*>(scratch.data());
  float* const own = rows + padded_rows * x_stride;
  const auto load = [&](int64_t item, int64_t) {
    const int64_t begin = item * kParallelRows;
    const int64_t end = Clamp(begin + kParallelRows, 0, padded_rows);
    kernels.load_rows(call.x, begin, end, call.num_rows, call.depth, rows, x_stride);
  };
  const auto order = [&](int64_t tile, int64_t worker) {
    const int64_t begin = tile * kernels.tile_rows;
    const int64_t count = Clamp(call.num_rows - begin, 0, kernels.tile_rows);
    const char* const x = call.x + begin * call.depth * ByteWidth(call.dtype);
    float* const mine = own + worker * own_floats;
    kernels.load_rows(x, 0, count, count, call.depth, mine, x_stride);
    kernels.order_rows(mine, x_stride, count, call.depth, call.block_scale != nullptr,
                       rows + tile * tile_floats);
  };
  if (kernels.Orders(call.is_packed, call.num_rows)) {
    ParallelFor(pool, padded_rows / kRowsOfOrder, workers, order);
  } else {
    ParallelFor(pool, CeilDiv(padded_rows, kParallelRows), workers, load);
  }
  work(LoadedRows{rows, x_stride}, own);
}

int64_t Workers(const ffi::ThreadPool& pool, const Projection& call) {
  const bool is_small = call.num_columns * call.depth * ByteWidth(call.w_dtype) < kSerialBytes;
  return is_small ? 1 : Clamp(pool.num_threads(), 1, 1024);
}

// What a call cuts its columns into.
struct Cut {
  int64_t block;
  int64_t sums_floats;  // of a worker, and of its panel
  int64_t panel_floats;
};

Cut CutColumns(const Projection& call, const LinearKernels& kernels, int64_t workers) {
  const int64_t block =
      kernels.BlockColumns(call.is_packed, call.w_dtype, call.num_rows, call.num_columns,
                           call.depth, workers, /*parts=*/1, /*times=*/1);
  return {block, PadLinearRows(call.num_rows) * RoundUp(block, kLinearColumns),
          kernels.PanelFloats(call.is_packed, call.w_dtype, call.num_rows, call.depth, block)};
}

void MultiplyByTiles(ffi::ThreadPool& pool, const Projection& call, const LinearKernels& kernels) {
  const int64_t num_rows = call.num_rows, depth = call.depth, num_columns = call.num_columns;
  const int64_t row_bytes = depth * ByteWidth(call.w_dtype);
  const int64_t most = kernels.Most(/*is_packed=*/false, num_rows);
  const int64_t workers = Workers(pool, call);
  const Cut cut = CutColumns(call, kernels, workers);
  const int64_t own_floats = cut.sums_floats + cut.panel_floats;
  LoadAndRun(pool, call, kernels, workers, own_floats, [&](const LoadedRows& x, float* own) {
    const auto multiply = [&](int64_t item, int64_t worker) {
      const int64_t begin = item * cut.block;
      const int64_t count = Clamp(num_columns - begin, 0, cut.block);
      float* const mine = own + worker * own_floats;
      const LinearBlocks blocks =
          LinearBlocksOf(call.block_scale, /*matrix=*/0, num_columns, depth, begin);
      kernels.few_plain(x.data, x.stride, num_rows, call.w + begin * row_bytes, depth, count,
                        blocks, mine + cut.sums_floats, mine);
      if (call.scale) ScaleLinearSums(call.scale + begin, num_rows, most, count, mine);
      kernels.store(mine, num_rows, most, count, num_columns, call.out_dtype,
                    call.out + begin * ByteWidth(call.out_dtype));
    };
    ParallelFor(pool, CeilDiv(num_columns, cut.block), workers, multiply);
  });
}

// Where sums come by rows. w of the block behind one comes in while that is multiplied.
void MultiplyByRows(ffi::ThreadPool& pool, const Projection& call, const LinearKernels& kernels) {
  RowSums* const row_sums = kernels.ByRows(call.is_packed, call.num_rows);
  const int64_t num_rows = call.num_rows, depth = call.depth, num_columns = call.num_columns;
  const int64_t row_bytes = depth * ByteWidth(call.w_dtype);
  const int64_t workers = Workers(pool, call);
  const Cut cut = CutColumns(call, kernels, workers);
  // Sums are outputs already: f32, and no panel reaches beyond a row.
  const bool is_direct = call.out_dtype == Dtype::kFloat32 && num_columns % kPanelOutputs == 0;
  const int64_t sums_floats = is_direct ? 0 : cut.sums_floats;
  const bool orders = kernels.Orders(call.is_packed, num_rows);
  const int64_t own_floats =
      std::max(sums_floats + cut.panel_floats, orders ? kRowsOfOrder * kernels.stride(depth) : 0);
  LoadAndRun(pool, call, kernels, workers, own_floats, [&](const LoadedRows& x, float* own) {
    const auto multiply = [&](int64_t item, int64_t worker, int64_t next) {
      float* const mine = own + worker * own_floats;
      const int64_t begin = item * cut.block;
      const int64_t count = Clamp(num_columns - begin, 0, cut.block);
      const LinearBlocks blocks =
          LinearBlocksOf(call.block_scale, /*matrix=*/0, num_columns, depth, begin);
      char* const out = call.out + begin * ByteWidth(call.out_dtype);
      float* const sums = is_direct ? reinterpret_cast<float*>(out) : mine;
      const int64_t sums_stride = is_direct ? num_columns : RoundUp(count, kLinearColumns);
      const auto done = [&](int64_t row, int64_t rows, float* of_rows) {
        for (int64_t r = 0; call.scale && r < rows; ++r) {
          ScaleLinearSums(call.scale + begin, /*num_rows=*/1, /*most=*/1, count,
                          of_rows + r * sums_stride);
        }
        if (is_direct) return;
        kernels.store(of_rows, rows, /*most=*/1, count, num_columns, call.out_dtype,
                      out + row * num_columns * ByteWidth(call.out_dtype));
      };
      row_sums(x.data, x.stride, num_rows, call.w + begin * row_bytes, depth, count,
               next < 0 ? nullptr : call.w + next * cut.block * row_bytes, blocks,
               mine + sums_floats, sums, sums_stride, SumsDoneBy(done, /*ends=*/!is_direct));
    };
    ParallelFor(pool, CeilDiv(num_columns, cut.block), workers, multiply);
  });
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::PRED> live,
                  ffi::Result<ffi::AnyBuffer> out) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Projection call;
  if (failed(ReadDtype(kOp, "x", TypeOf(x), &call.dtype)) ||
      failed(ReadWeightDtype(kOp, "w", TypeOf(w), TypeOf(x), &call.w_dtype)) ||
      failed(ReadDtype(kOp, "out", TypeOf(*out), &call.out_dtype)) ||
      failed(CheckRank(kOp, "x", Shape(x), 2))) {
    return ffi::Error::InvalidArgument(error);
  }
  const int64_t num_rows = Shape(x)[0], depth = Shape(x)[1];
  const bool is_packed = Shape(w).rank == 3;
  if (!is_packed && failed(CheckRank(kOp, "w", Shape(w), 2))) {
    return ffi::Error::InvalidArgument(error);
  }
  const int64_t num_columns = Shape(w)[0] * (is_packed ? kPanelOutputs : 1);
  LiveRows rows;
  if (failed(is_packed ? CheckPacked(kOp, "w", call.dtype, call.w_dtype, Shape(w), 0, depth)
                       : CheckShape(kOp, "w", Shape(w), {num_columns, depth})) ||
      failed(CheckWeightScale(kOp, "scale", call.w_dtype, Shape(scale), {num_columns},
                              {CeilDiv(num_columns, kScaleBlock), CeilDiv(depth, kScaleBlock)})) ||
      failed(CheckShape(kOp, "out", Shape(*out), {num_rows, num_columns})) ||
      failed(ReadLiveRows(kOp, live, num_rows, &rows))) {
    return ffi::Error::InvalidArgument(error);
  }
  if (depth % 8 != 0 || depth < 8) {
    return ffi::Error::InvalidArgument(
        Mismatch(kOp, "x", "a positive multiple of 8 columns", std::to_string(depth)));
  }
  if (num_rows == 0 || num_columns == 0) return ffi::Error::Success();
  const int64_t out_row_bytes = num_columns * ByteWidth(call.out_dtype);
  call.x = static_cast<const char*>(x.untyped_data());
  call.w = static_cast<const char*>(w.untyped_data());
  const bool is_scaled = IsEightBit(call.w_dtype), has_blocks = Shape(scale).rank == 2;
  call.scale = is_scaled && !has_blocks ? scale.typed_data() : nullptr;
  call.block_scale = is_scaled && has_blocks ? scale.typed_data() : nullptr;
  call.out = static_cast<char*>(out->untyped_data());
  call.num_rows = rows.Counted();
  call.depth = depth;
  call.num_columns = num_columns;
  call.is_packed = is_packed;
  ExpectOutput(call.out, num_rows * out_row_bytes);
  const LinearKernels& kernels = ChosenLinearKernels().Of(call.dtype, call.w_dtype);
  const bool by_rows = kernels.ByRows(is_packed, call.num_rows) != nullptr;
  try {
    if (call.num_rows > 0) {
      by_rows ? MultiplyByRows(pool, call, kernels) : MultiplyByTiles(pool, call, kernels);
    }
    rows.ClearOthers(pool, call.out, out_row_bytes);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kOp) + ": out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LinearHandler, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()          // x
                                  .Arg<ffi::AnyBuffer>()          // w
                                  .Arg<ffi::Buffer<ffi::F32>>()   // scale, [0] = none
                                  .Arg<ffi::Buffer<ffi::PRED>>()  // live, [0] = all
                                  .Ret<ffi::AnyBuffer>());        // out

}  // namespace jax_paged::cpu
