// SPDX-License-Identifier: Apache-2.0

// XLA FFI handlers for platform "cpu" that call the CUDA handlers on the simulated device.
//
// Each buffer of a call is copied to memory of its own, with room before and behind it that belongs
// to no buffer, so that an access beyond its end does not meet another one. Results begin as NaN.
// Pools larger than kCopied stay where they are.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "emu/machine.h"
#include "sim/machine.h"
#include "sim/runtime.h"
#include "xla/ffi/api/c_api.h"

namespace jax_paged::cuda {
// Weak: a library with planted bugs has only those that it is about.
extern "C" XLA_FFI_Error* AttentionHandler(XLA_FFI_CallFrame*) __attribute__((weak));
extern "C" XLA_FFI_Error* AttentionPlanHandler(XLA_FFI_CallFrame*) __attribute__((weak));
extern "C" XLA_FFI_Error* MergeStatesHandler(XLA_FFI_CallFrame*) __attribute__((weak));
extern "C" XLA_FFI_Error* MoeExpertsHandler(XLA_FFI_CallFrame*) __attribute__((weak));
extern "C" XLA_FFI_Error* WriteKvHandler(XLA_FFI_CallFrame*) __attribute__((weak));
extern "C" XLA_FFI_Error* QkvNormRopeWriteHandler(XLA_FFI_CallFrame*) __attribute__((weak));
}  // namespace jax_paged::cuda

namespace jax_paged::sim {
namespace {

constexpr int64_t kGuardBytes = 4096;
constexpr char kOtherBuffers[] = "replay: other buffers than in the last call";
constexpr int64_t kCopied = int64_t{256} << 20;

struct FreeMemory {
  void operator()(char* p) const { std::free(p); }
};

// The memory of one buffer of XLA on the device.
struct Mirror {
  std::unique_ptr<char, FreeMemory> memory;
  char* data = nullptr;
  char* original = nullptr;
  int64_t bytes = 0;
  bool is_operand = false;
  bool is_result = false;
};

int64_t BytesOf(const XLA_FFI_Buffer& buffer) {
  int64_t bytes = 0;
  switch (buffer.dtype) {
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E5M2:
      bytes = 1;
      break;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      bytes = 2;
      break;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      bytes = 4;
      break;
    default:
      return -1;
  }
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= buffer.dims[i];
  return bytes;
}

struct State {
  std::mutex mutex;
  std::vector<Device> devices = {Device()};  // the calls take turns among them
  bool replays = false;
  int64_t calls = 0;
  std::vector<Mirror> mirrors;  // of the last call
  std::string launches;
};

State& state() {
  static auto* const made = new State;
  return *made;
}

class Call {
 public:
  Call(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler* handler)
      : frame_(frame), handler_(handler), state_(state()), lock_(state_.mutex) {}

  XLA_FFI_Error* Run() {
    if (frame_.extension_start != nullptr) return handler_(&frame_);  // asks what the handler is
    if (state_.replays) return Replay();
    state_.mirrors.clear();
    state_.mirrors.reserve(static_cast<size_t>(frame_.args.size + frame_.rets.size));
    emu::ClearRegions();
    Copy(frame_.args.size, frame_.args.args, /*is_result=*/false, &args_);
    Copy(frame_.rets.size, frame_.rets.rets, /*is_result=*/true, &rets_);
    if (!problem_.empty()) return Error(problem_);
    AddRegions();
    std::vector<void*> args = Pointers(&args_), rets = Pointers(&rets_);
    frame_.args.args = args.data();
    frame_.rets.rets = rets.data();
    // XLA's own functions, but for the stream.
    std::vector<char> api(frame_.api->struct_size);
    std::memcpy(api.data(), frame_.api, api.size());
    const XLA_FFI_Api* const real = frame_.api;
    reinterpret_cast<XLA_FFI_Api*>(api.data())->XLA_FFI_Stream_Get = GetStream;
    frame_.api = reinterpret_cast<XLA_FFI_Api*>(api.data());

    Device device = NextDevice();
    BeginCall(device);
    XLA_FFI_Error* const error = handler_(&frame_);
    const std::string problem = EndCall();
    frame_.api = real;
    NoteLaunches();
    if (!problem.empty()) {
      if (error != nullptr) Destroy(error);
      return Error(problem);
    }
    if (error == nullptr) CopyBack();
    return error;
  }

 private:
  static XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
    args->stream = CallStream();
    return nullptr;
  }

  Device NextDevice() {
    const int64_t call = state_.calls++;
    Device device = state_.devices[static_cast<size_t>(call) % state_.devices.size()];
    device.seed += static_cast<uint32_t>(call);
    return device;
  }

  XLA_FFI_Error* Error(const std::string& text) {
    XLA_FFI_Error_Create_Args args = {};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = text.c_str();
    args.errc = XLA_FFI_Error_Code_INTERNAL;
    return frame_.api->XLA_FFI_Error_Create(&args);
  }
  void Destroy(XLA_FFI_Error* error) {
    XLA_FFI_Error_Destroy_Args args = {};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    frame_.api->XLA_FFI_Error_Destroy(&args);
  }

  // Of a buffer that came before, among so many mirrors: a result that is an operand has its
  // memory.
  Mirror* FindAmong(size_t count, const char* original, int64_t bytes) {
    for (size_t i = 0; i < count; ++i) {
      Mirror& mirror = state_.mirrors[i];
      if (bytes > 0 && mirror.original == original && mirror.bytes == bytes) return &mirror;
    }
    return nullptr;
  }

  void Copy(int64_t count, void** given, bool is_result, std::vector<XLA_FFI_Buffer>* copies) {
    for (int64_t i = 0; i < count; ++i) {
      XLA_FFI_Buffer buffer = *static_cast<XLA_FFI_Buffer*>(given[i]);
      char* const original = static_cast<char*>(buffer.data);
      const int64_t bytes = BytesOf(buffer);
      Mirror* mirror = FindAmong(state_.mirrors.size(), original, bytes);
      if (mirror == nullptr) mirror = Add(original, bytes, is_result);
      (is_result ? mirror->is_result : mirror->is_operand) = true;
      buffer.data = mirror->data;
      copies->push_back(buffer);
    }
  }

  Mirror* Add(char* original, int64_t bytes, bool is_result) {
    if (bytes < 0) problem_ = "a buffer of a dtype that is not simulated";
    Mirror mirror;
    mirror.original = mirror.data = original;
    mirror.bytes = bytes;
    if (bytes >= 0 && bytes <= kCopied) {
      const int64_t padded = (bytes + 255) / 256 * 256;
      mirror.memory.reset(static_cast<char*>(
          std::aligned_alloc(256, static_cast<size_t>(padded + 2 * kGuardBytes))));
      std::memset(mirror.memory.get(), 0xff, static_cast<size_t>(padded + 2 * kGuardBytes));
      mirror.data = mirror.memory.get() + kGuardBytes;
      if (!is_result) std::memcpy(mirror.data, original, static_cast<size_t>(bytes));
    }
    state_.mirrors.push_back(std::move(mirror));
    return &state_.mirrors.back();
  }

  void AddRegions() {
    int number = 0;
    for (const Mirror& mirror : state_.mirrors) {
      const std::string name =
          (mirror.is_operand ? "operand " : "result ") +
          std::to_string(mirror.is_operand ? number : number - frame_.args.size);
      emu::Region* const region = emu::AddRegion(name.c_str(), mirror.data, mirror.bytes,
                                                 /*is_input=*/!mirror.is_result);
      region->is_filled = mirror.is_result && mirror.is_operand;
      ++number;
    }
  }

  static std::vector<void*> Pointers(std::vector<XLA_FFI_Buffer>* buffers) {
    std::vector<void*> pointers;
    for (XLA_FFI_Buffer& buffer : *buffers) pointers.push_back(&buffer);
    return pointers;
  }

  void CopyBack() {
    for (const Mirror& mirror : state_.mirrors) {
      if (!mirror.is_result || !mirror.memory) continue;
      std::memcpy(mirror.original, mirror.data, static_cast<size_t>(mirror.bytes));
    }
  }

  // The launches of the last call again, with its buffers, which get what this call gives. The
  // workspace stays as the last call left it.
  XLA_FFI_Error* Replay() {
    std::vector<XLA_FFI_Buffer*> buffers;
    for (int64_t i = 0; i < frame_.args.size; ++i) {
      buffers.push_back(static_cast<XLA_FFI_Buffer*>(frame_.args.args[i]));
    }
    for (int64_t i = 0; i < frame_.rets.size; ++i) {
      buffers.push_back(static_cast<XLA_FFI_Buffer*>(frame_.rets.rets[i]));
    }
    size_t count = 0;  // of the mirrors that have their buffer
    for (const XLA_FFI_Buffer* buffer : buffers) {
      char* const original = static_cast<char*>(buffer->data);
      const int64_t bytes = BytesOf(*buffer);
      if (FindAmong(count, original, bytes) != nullptr) continue;
      if (count == state_.mirrors.size()) return Error(kOtherBuffers);
      Mirror& mirror = state_.mirrors[count++];
      if (mirror.bytes != bytes || !mirror.memory) return Error(kOtherBuffers);
      mirror.original = original;
      if (mirror.is_operand) std::memcpy(mirror.data, original, static_cast<size_t>(bytes));
    }
    sim::Replay(NextDevice().seed);
    const std::string problem = EndCall();
    if (!problem.empty()) return Error(problem);
    CopyBack();
    return nullptr;
  }

  void NoteLaunches() {
    state_.launches.clear();
    for (const std::string& launch : Launches()) state_.launches += launch + "\n";
  }

  XLA_FFI_CallFrame frame_;
  XLA_FFI_Handler* handler_;
  State& state_;
  std::lock_guard<std::mutex> lock_;
  std::vector<XLA_FFI_Buffer> args_, rets_;
  std::string problem_;
};

}  // namespace
}  // namespace jax_paged::sim

extern "C" {

// What tests set: the devices of the coming calls, which take turns among them, and whether they
// replay the call before them.
void sim_set_devices(const jax_paged::sim::Device* devices, int32_t count) {
  jax_paged::sim::state().devices.assign(devices, devices + count);
}
void sim_set_replays(int replays) { jax_paged::sim::state().replays = replays != 0; }
// The kernels of the last call that was no replay, a line each.
const char* sim_launches() { return jax_paged::sim::state().launches.c_str(); }

// Runs an entry of some PTX, whose parameters are the addresses of the buffers: inputs first, then
// the last one, which it writes; is_filled: and may read. Returns "" or what went wrong.
const char* sim_run(const char* ptx, const char* entry, int32_t ctas, int32_t threads,
                    int64_t dynamic_shared, void** buffers, const int64_t* bytes,
                    int32_t num_buffers, int32_t is_filled, uint32_t seed, int32_t overlaps) {
  using namespace jax_paged;
  static std::string problem;
  const std::lock_guard<std::mutex> lock(sim::state().mutex);
  try {
    const sim::Program program = sim::MakeProgram(sim::Module(ptx), entry);
    sim::Grid grid = {&program,
                      {static_cast<uint32_t>(ctas), 1, 1},
                      {static_cast<uint32_t>(threads), 1, 1},
                      dynamic_shared,
                      {},
                      overlaps != 0};
    grid.params.resize(sizeof(void*) * static_cast<size_t>(num_buffers));
    std::memcpy(grid.params.data(), buffers, grid.params.size());
    emu::ClearRegions();
    for (int32_t i = 0; i < num_buffers; ++i) {
      const std::string name = "buffer " + std::to_string(i);
      emu::Region* const region =
          emu::AddRegion(name.c_str(), buffers[i], bytes[i], /*is_input=*/i + 1 < num_buffers);
      region->is_filled = is_filled != 0;
    }
    problem = sim::Run(grid, seed);
  } catch (const std::runtime_error& error) {
    problem = error.what();
  }
  return problem.c_str();
}

XLA_FFI_Error* SimAttention(XLA_FFI_CallFrame* frame) {
  return jax_paged::sim::Call(*frame, jax_paged::cuda::AttentionHandler).Run();
}
XLA_FFI_Error* SimAttentionPlan(XLA_FFI_CallFrame* frame) {
  return jax_paged::sim::Call(*frame, jax_paged::cuda::AttentionPlanHandler).Run();
}
XLA_FFI_Error* SimMergeStates(XLA_FFI_CallFrame* frame) {
  return jax_paged::sim::Call(*frame, jax_paged::cuda::MergeStatesHandler).Run();
}
XLA_FFI_Error* SimMoeExperts(XLA_FFI_CallFrame* frame) {
  return jax_paged::sim::Call(*frame, jax_paged::cuda::MoeExpertsHandler).Run();
}
XLA_FFI_Error* SimWriteKv(XLA_FFI_CallFrame* frame) {
  return jax_paged::sim::Call(*frame, jax_paged::cuda::WriteKvHandler).Run();
}
XLA_FFI_Error* SimQkvNormRopeWrite(XLA_FFI_CallFrame* frame) {
  return jax_paged::sim::Call(*frame, jax_paged::cuda::QkvNormRopeWriteHandler).Run();
}

}  // extern "C"
