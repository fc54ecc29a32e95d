// SPDX-License-Identifier: Apache-2.0

// cudart's functions, under their own names: this file is linked where cudart would be.

#include "sim/runtime.h"

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>

#include "emu/machine.h"
#include "sim/machine.h"

namespace jax_paged::sim {
namespace {

constexpr int32_t kSharedBytesOfAll = 48 * 1024;  // without cudaFuncSetAttribute

// What __cudaRegisterFatBinary gets. Entries are laid out one behind the other.
struct FatBinaryWrapper {
  uint32_t magic;
  uint32_t version;
  const char* data;
  void* unused;
};
struct FatBinaryHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;
};
struct FatBinaryEntry {
  uint16_t kind;  // 1: PTX
  uint16_t version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes;
  uint32_t options;
  uint16_t minor;
  uint16_t major;
  uint32_t architecture;
  uint32_t name_offset;
  uint32_t name_bytes;
  uint64_t flags;
  uint64_t zero;
  uint64_t uncompressed_bytes;
};
constexpr uint32_t kFatBinaryMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;

struct FatBinary {
  std::map<uint32_t, std::unique_ptr<Module>> modules;  // by architecture
};

struct Function {
  FatBinary* binary;
  std::string name;
  std::map<int32_t, int32_t> shared_limit;               // by device
  std::map<int32_t, std::unique_ptr<Program>> programs;  // by architecture
};

struct Runtime {
  std::map<const void*, Function> functions;  // by the host's stub
  Device device;
  bool in_call = false;
  cudaError_t last_error = cudaSuccess;
  std::string problem;
  std::vector<std::function<std::string(uint32_t seed)>> nodes;  // of the last call
  std::vector<std::string> launches;
  // Of <<<>>>, from push to pop.
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};

Runtime& runtime() {
  static auto* const made = new Runtime;  // used by constructors of other files
  return *made;
}

cudaError_t Refuse(cudaError_t error, const std::string& why) {
  Runtime& r = runtime();
  r.last_error = error;
  if (r.problem.empty()) r.problem = why;
  return error;
}

const Program* ProgramOf(Function* function, int32_t architecture) {
  std::unique_ptr<Program>& program = function->programs[architecture];
  if (!program) {
    const auto module = function->binary->modules.find(static_cast<uint32_t>(architecture));
    if (module == function->binary->modules.end()) return nullptr;
    program = std::make_unique<Program>(MakeProgram(*module->second, function->name));
  }
  return program.get();
}

// Runs a node now, and keeps it.
cudaError_t Do(std::function<std::string(uint32_t seed)> node) {
  Runtime& r = runtime();
  const std::string error = node(r.device.seed);
  r.nodes.push_back(std::move(node));
  return error.empty() ? cudaSuccess : Refuse(cudaErrorLaunchFailure, error);
}

cudaError_t Launch(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared,
                   cudaStream_t stream, bool overlaps = false) {
  Runtime& r = runtime();
  const auto found = r.functions.find(stub);
  if (found == r.functions.end()) return Refuse(cudaErrorInvalidDeviceFunction, "no such kernel");
  Function& function = found->second;
  if (!r.in_call) return Refuse(cudaErrorInvalidValue, function.name + ": launched outside a call");
  if (!r.problem.empty()) return r.last_error = cudaErrorLaunchFailure;
  if (stream != CallStream()) {
    return Refuse(cudaErrorInvalidResourceHandle,
                  function.name + ": launched on another stream than the call's");
  }
  const Program* program = nullptr;
  try {
    program = ProgramOf(&function, r.device.architecture);
  } catch (const std::runtime_error& error) {
    return Refuse(cudaErrorInvalidPtx, function.name + ": " + error.what());
  }
  if (program == nullptr) {
    return Refuse(cudaErrorNoKernelImageForDevice,
                  function.name + ": no PTX for " + std::to_string(r.device.architecture));
  }
  Grid launch = {program,
                 {grid.x, grid.y, grid.z},
                 {block.x, block.y, block.z},
                 static_cast<int64_t>(shared),
                 {},
                 overlaps};
  const int64_t threads = launch.threads.count();
  const int64_t most = program->entry.max_threads ? program->entry.max_threads : 1024;
  if (launch.ctas.count() < 1 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 ||
      threads < 1 || threads > most) {
    return Refuse(cudaErrorInvalidConfiguration, function.name + ": invalid grid or block");
  }
  const auto raised = function.shared_limit.find(r.device.ordinal);
  const int64_t limit =
      (raised == function.shared_limit.end() ? kSharedBytesOfAll : raised->second) -
      program->entry.static_shared_bytes;
  if (launch.dynamic_shared > limit) {
    return Refuse(cudaErrorInvalidValue, function.name + ": " + std::to_string(shared) +
                                             " bytes of dynamic shared memory, allowed are " +
                                             std::to_string(limit));
  }
  for (size_t k = 0; k < program->entry.param_list.size(); ++k) {
    const Variable& param = program->entry.param_list[k];
    launch.params.resize(static_cast<size_t>(param.offset + param.bytes));
    std::memcpy(launch.params.data() + param.offset, arguments[k],
                static_cast<size_t>(param.bytes));
  }
  r.launches.push_back(function.name + " " + std::to_string(grid.x) + "," + std::to_string(grid.y) +
                       "," + std::to_string(grid.z) + " " + std::to_string(threads) + " " +
                       std::to_string(shared) + (overlaps ? " overlaps" : " alone"));
  return Do([launch](uint32_t seed) { return Run(launch, seed); });
}

std::string CheckRange(const char* what, const void* data, size_t bytes, emu::Region** region) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  *region = emu::FindRegion(address);
  if (*region == nullptr ||
      address + bytes > (*region)->begin + static_cast<uintptr_t>((*region)->bytes)) {
    return std::string(what) + " outside of the buffers of the call";
  }
  return "";
}

}  // namespace

void BeginCall(const Device& device) {
  Runtime& r = runtime();
  r.device = device;
  r.in_call = true;
  r.last_error = cudaSuccess;
  r.problem.clear();
  r.nodes.clear();
  r.launches.clear();
}

cudaStream_t CallStream() {
  return reinterpret_cast<cudaStream_t>(uintptr_t{0x5eed0000});  // never read through
}

void Replay(uint32_t seed) {
  Runtime& r = runtime();
  for (const auto& node : r.nodes) {
    if (!r.problem.empty()) return;
    r.problem = node(seed);
  }
}

std::string EndCall() {
  runtime().in_call = false;
  return runtime().problem;
}

const std::vector<std::string>& Launches() { return runtime().launches; }

}  // namespace jax_paged::sim

using jax_paged::sim::runtime;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  using namespace jax_paged::sim;
  const char* const data = static_cast<FatBinaryWrapper*>(wrapper)->data;
  FatBinaryHeader header;
  std::memcpy(&header, data, sizeof(header));
  auto* const binary = new FatBinary;  // as long as the process
  if (header.magic != kFatBinaryMagic) return reinterpret_cast<void**>(binary);
  const char* at = data + header.header_bytes;
  const char* const end = at + header.bytes;
  while (at < end) {
    FatBinaryEntry entry;
    std::memcpy(&entry, at, sizeof(entry));
    const char* const text = at + entry.header_bytes;
    if (entry.kind == kPtx && entry.uncompressed_bytes == 0) {
      const size_t length = strnlen(text, entry.bytes);
      binary->modules[entry.architecture] =
          std::make_unique<Module>(std::string_view(text, length));
    }
    at = text + entry.bytes;
  }
  return reinterpret_cast<void**>(binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** binary, const char* stub, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  runtime().functions[stub] = {reinterpret_cast<jax_paged::sim::FatBinary*>(binary), name, {}, {}};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  auto& r = runtime();
  r.grid = grid;
  r.block = block;
  r.shared = shared;
  r.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const auto& r = runtime();
  *grid = r.grid;
  *block = r.block;
  *shared = r.shared;
  std::memcpy(stream, &r.stream, sizeof(r.stream));
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return jax_paged::sim::Launch(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return jax_paged::sim::Launch(stub, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub,
                                void** arguments) {
  using jax_paged::sim::Refuse;
  bool overlaps = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != cudaLaunchAttributeProgrammaticStreamSerialization) {
      return Refuse(cudaErrorInvalidValue, "an attribute of a launch that is not simulated");
    }
    overlaps = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  if (overlaps && runtime().device.architecture < 90) {
    return Refuse(cudaErrorNotSupported, "a launch that may overlap, on a device below sm_90");
  }
  return jax_paged::sim::Launch(stub, config->gridDim, config->blockDim, arguments,
                                config->dynamicSmemBytes, config->stream, overlaps);
}

cudaError_t cudaFuncSetAttribute(const void* stub, cudaFuncAttribute attribute, int value) {
  using jax_paged::sim::Refuse;
  auto& r = runtime();
  const auto found = r.functions.find(stub);
  if (found == r.functions.end()) return Refuse(cudaErrorInvalidDeviceFunction, "no such kernel");
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
    if (value >= cudaSharedmemCarveoutDefault && value <= cudaSharedmemCarveoutMaxShared) {
      return cudaSuccess;
    }
    return Refuse(cudaErrorInvalidValue,
                  found->second.name + ": a carve-out of " + std::to_string(value) + " percent");
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return Refuse(cudaErrorInvalidValue, "an attribute of a kernel that is not simulated");
  }
  if (value < 0 || value > r.device.shared_bytes_per_cta) {
    return Refuse(cudaErrorInvalidValue,
                  found->second.name + ": more shared memory than the device has");
  }
  found->second.shared_limit[r.device.ordinal] = value;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = runtime().device.ordinal;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  using jax_paged::sim::Refuse;
  const auto& d = runtime().device;
  if (device != d.ordinal) {
    return Refuse(cudaErrorInvalidDevice, "an attribute of another device than the call's");
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = d.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = d.shared_bytes_per_cta;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = d.shared_bytes_per_multiprocessor;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = d.architecture / 10;
      return cudaSuccess;
    default:
      return Refuse(cudaErrorInvalidValue, "an attribute of the device that is not simulated");
  }
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = runtime().last_error;
  runtime().last_error = cudaSuccess;
  return error;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  using namespace jax_paged;
  if (stream != sim::CallStream()) {
    return sim::Refuse(cudaErrorInvalidResourceHandle, "memcpy on another stream than the call's");
  }
  if (kind != cudaMemcpyDeviceToDevice) {
    return sim::Refuse(cudaErrorInvalidMemcpyDirection, "memcpy to or from the host");
  }
  if (bytes == 0) return cudaSuccess;
  return sim::Do([=](uint32_t) {
    emu::Region *target, *source;
    std::string error = sim::CheckRange("memcpy to memory", to, bytes, &target);
    if (error.empty()) error = sim::CheckRange("memcpy from memory", from, bytes, &source);
    if (!error.empty()) return error;
    if (target->is_input) return "memcpy to the input " + target->name;
    std::memmove(to, from, bytes);
    emu::MarkWritten(target, static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - target->begin),
                     static_cast<int64_t>(bytes));
    return error;
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  using namespace jax_paged;
  if (stream != sim::CallStream()) {
    return sim::Refuse(cudaErrorInvalidResourceHandle, "memset on another stream than the call's");
  }
  if (bytes == 0) return cudaSuccess;
  return sim::Do([=](uint32_t) {
    emu::Region* target;
    const std::string error = sim::CheckRange("memset of memory", to, bytes, &target);
    if (!error.empty()) return error;
    if (target->is_input) return "memset of the input " + target->name;
    std::memset(to, value, bytes);
    emu::MarkWritten(target, static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - target->begin),
                     static_cast<int64_t>(bytes));
    return error;
  });
}

const char* cudaGetErrorString(cudaError_t error) {
  static std::string text;
  text = "simulated device: error " + std::to_string(static_cast<int>(error));
  return text.c_str();
}

}  // extern "C"
