// Attention kernels in plain C++, for any architecture. Rules for this file: isa.h.

#include <math.h>

#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "common/page_view.h"
#include "common/params.h"
#include "common/qkv_params.h"
#include "common/schedule.h"
#include "common/tree.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

#define JAX_PAGED_ISA generic

// clang-format off: in this order
#include "cpu/vec_generic.h"
#include "cpu/kernel_common.h"
#include "cpu/kernel_dot.h"
#include "cpu/kernel_logits.h"
#include "cpu/kernel_stage.h"
#include "cpu/kernel_decode.h"
#include "cpu/kernel_prefill.h"
#include "cpu/kernel_attention.h"
#include "cpu/kernel_qkv.h"
#include "cpu/kernel_merge.h"
// clang-format on
namespace jax_paged::cpu::generic {
constexpr Kernels kKernels = {"generic",
                              {RunItem<BFloat16>, RunItem<Float16>, RunItem<float>},
                              /*run_words=*/nullptr,
                              {FoldUnit<BFloat16>, FoldUnit<Float16>, FoldUnit<float>},
                              {QkvQueries<BFloat16>, QkvQueries<Float16>, QkvQueries<float>},
                              {QkvPages<BFloat16>, QkvPages<Float16>, QkvPages<float>},
                              {MergeHeads<BFloat16>, MergeHeads<Float16>, MergeHeads<float>}};
}

namespace jax_paged::cpu {

const Kernels& GenericKernels() { return generic::kKernels; }

}  // namespace jax_paged::cpu
