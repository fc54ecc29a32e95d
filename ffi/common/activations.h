// SPDX-License-Identifier: Apache-2.0

// The activations of gated MLPs, and the numbers that the kernels compute them with. All but gelu
// are x sigmoid(z) with a z of their own.

#ifndef JAX_PAGED_COMMON_ACTIVATIONS_H_
#define JAX_PAGED_COMMON_ACTIVATIONS_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "common/checks.h"
#include "common/host_device.h"

namespace jax_paged {

// jax_paged/ops/activations.py has their formulas.
enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kSwigluOai = 3 };

inline constexpr float kLog2E = 1.44269504f;
// gelu_tanh: z = x (a + b x^2), times log2(e): 2 sqrt(2 / pi), and 0.044715 of that.
inline constexpr float kGeluTanh[2] = {2.30220819f, 0.10294324f};
inline constexpr float kSwigluOaiAlpha = 2.45546696f;  // 1.702 log2(e)

// gelu: erfc(a / sqrt(2)) / 2 = 2^(kGeluSquare a^2) P(1 / (1 + kGeluShift a)) for a >= 0, with a
// relative error of 3e-7 in P; it is 0 from kGeluLast on.
inline constexpr float kGeluSquare = -0.72134752f;  // -log2(e) / 2
inline constexpr float kGeluShift = 0.35f;
inline constexpr float kGeluLast = 14.0f;
inline constexpr int kGeluPowers = 8;
// P's powers, ascending: a least-maximum fit for a up to 13.5.
JAX_PAGED_HOST_DEVICE constexpr float GeluPower(int i) {
  constexpr float kPowers[kGeluPowers] = {-2.73093065e-05f, 0.140270248f,   0.133355752f,
                                          0.155959174f,     -0.0170187801f, 0.24063541f,
                                          -0.202115923f,    0.0489415824f};
  return kPowers[i];
}

// Reads the name of an activation. Returns "" or one line: argument, expected, got.
inline std::string ReadActivation(const char* op, std::string_view name, Activation* activation) {
  constexpr std::string_view kNames[] = {"silu", "gelu", "gelu_tanh", "swiglu_oai"};
  for (int i = 0; i < 4; ++i) {
    if (name != kNames[i]) continue;
    *activation = static_cast<Activation>(i);
    return "";
  }
  return Mismatch(op, "activation", "\"silu\", \"gelu\", \"gelu_tanh\" or \"swiglu_oai\"",
                  "\"" + std::string(name) + "\"");
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_ACTIVATIONS_H_
