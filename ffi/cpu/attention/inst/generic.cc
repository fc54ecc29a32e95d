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
#include "cpu/attention/kernels.h"
#include "cpu/isa/isa.h"

#define JAX_PAGED_ISA generic

// clang-format off: in this order
#include "cpu/isa/vec_generic.h"
#include "cpu/attention/common.h"
#include "cpu/attention/dot.h"
#include "cpu/attention/logits.h"
#include "cpu/attention/stage.h"
#include "cpu/attention/decode.h"
#include "cpu/attention/prefill.h"
#include "cpu/attention/unit.h"
#include "cpu/write/kernel_qkv.h"
#include "cpu/attention/merge.h"
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
