// Which kernel serves a call, and with what launch shape. Plain C++, shared with the emulator.

#ifndef JAX_PAGED_CUDA_ATTENTION_SELECT_H_
#define JAX_PAGED_CUDA_ATTENTION_SELECT_H_

#include <cstdint>
#include <type_traits>

#include "cuda/attention/args.h"

namespace jax_paged::cuda {

// Whether the tensor-core kernels take these pages: of vllm5d they load 8 tokens of V at once.
inline bool HasTensorCorePages(const AttentionArgs& args) {
  return args.layout != Layout::kVllm5d || args.page_size % 8 == 0;
}

// Calls f(std::integral_constant<int, HEAD_DIM>) for the tensor-core kernel that takes these dims;
// false when there is none, then simt.cuh serves them.
template <typename F>
bool WithDecodeHeadDim(int32_t head_dim, int32_t v_head_dim, F&& f) {
  if (head_dim != v_head_dim) return false;
  switch (head_dim) {
    case 64:
      f(std::integral_constant<int, 64>());
      return true;
    case 80:
      f(std::integral_constant<int, 80>());
      return true;
    case 96:
      f(std::integral_constant<int, 96>());
      return true;
    case 112:
      f(std::integral_constant<int, 112>());
      return true;
    case 128:
      f(std::integral_constant<int, 128>());
      return true;
    case 192:
      f(std::integral_constant<int, 192>());
      return true;
    case 256:
      f(std::integral_constant<int, 256>());
      return true;
    default:
      return false;
  }
}

// What a device can hold.
struct DeviceLimits {
  int32_t multiprocessors;
  int32_t shared_bytes_per_cta;  // with opt-in
  int32_t shared_bytes_per_multiprocessor;
};

struct DecodeShape {
  int32_t stages;
  int32_t ctas_per_multiprocessor;  // 0: the device is too small
};

// Two CTAs per multiprocessor with as many stages as fit, else one.
inline DecodeShape ShapeDecode(const DeviceLimits& limits, int32_t (*shared_bytes)(int32_t stages),
                               int32_t min_stages, int32_t max_stages) {
  constexpr int32_t kReservedBytes = 1024;  // of shared memory per CTA, by the driver
  for (int32_t ctas = 2; ctas >= 1; --ctas) {
    for (int32_t stages = max_stages; stages >= min_stages; --stages) {
      const int32_t bytes = shared_bytes(stages);
      if (bytes <= limits.shared_bytes_per_cta &&
          ctas * (bytes + kReservedBytes) <= limits.shared_bytes_per_multiprocessor &&
          (ctas == 1 || stages > min_stages)) {
        return {stages, ctas};
      }
    }
  }
  return {0, 0};
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_SELECT_H_
