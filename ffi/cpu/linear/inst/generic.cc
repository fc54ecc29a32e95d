// SPDX-License-Identifier: Apache-2.0

// Projection kernels in plain C++, for any architecture.
// Rules for this file: isa.h.

#include <math.h>

#include <cstddef>
#include <cstdint>

#include "common/activations.h"
#include "common/dtypes.h"
#include "common/integers.h"
#include "common/page_view.h"
#include "common/params.h"
#include "common/tree.h"
#include "cpu/attention/kernels.h"
#include "cpu/isa/isa.h"
#include "cpu/linear/kernels.h"

#define JAX_PAGED_ISA generic

// clang-format off: in this order
#include "cpu/isa/vec_generic.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/linear/kernel.h"
#include "cpu/linear/packed.h"
#include "cpu/linear/many.h"
#include "cpu/linear/int4.h"
#include "cpu/linear/int4_many.h"
// clang-format on
namespace jax_paged::cpu::generic {
constexpr LinearKernelTable kLinear = {
    {{kSameWeights<BFloat16>, kSameWeights<Float16>, kSameWeights<float>}},
    kCodeWeights<Int8>,
    kCodeWeights<Float8E4M3>,
    {kInt4<BFloat16>, kInt4<Float16>, kInt4<float>}};
}

namespace jax_paged::cpu {

const LinearKernelTable& GenericLinearKernels() { return generic::kLinear; }

}  // namespace jax_paged::cpu
