// C interface of the emulated attention kernels, for ctypes (tests/emulation.py).

#include <cstdint>
#include <string>

#include "cuda/attention/make_args.h"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/select.h"
#include "emu/attention/kernels.h"
#include "emu/machine.h"

namespace {

using jax_paged::Dtype;
using jax_paged::cuda::AttentionArgs;
using jax_paged::cuda::AttentionCall;

std::string last_text;

const char* Keep(std::string text) {
  last_text = std::move(text);
  return last_text.c_str();
}

}  // namespace

extern "C" {

// tests/emulation.py has the same struct, field by field.
struct EmulatedCall {
  const void* q;
  const void* k_pages;
  const void* v_pages;
  const int32_t* page_table;
  const int32_t* seq_lens;
  const int32_t* cu_q_lens;
  const int32_t* num_seqs;
  const int32_t* layer;
  const float* sm_scale;
  const int32_t* sliding_window;  // null, like the next four: not given
  const int32_t* num_pinned;
  const int32_t* slot_offset;
  const float* alibi_slopes;
  const float* sinks;
  const jax_paged::cuda::TreeInterval* tree;
  const int32_t* tree_sizes;
  const float* k_scale;
  const float* v_scale;
  const float* cos;
  const float* sin;
  const float* out_scale;
  uint8_t* k_touched;  // null, or for each byte of k_pages whether a kernel asked for it
  uint8_t* v_touched;
  void* out;
  float* lse;
  void* workspace;
  int64_t num_tokens;
  int64_t num_q_heads;
  int64_t max_seqs;
  int64_t pages_per_seq;
  int64_t num_layers;
  int64_t num_pages;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t head_dim;
  int64_t v_head_dim;
  int64_t num_kv_splits;
  int64_t split_tokens;
  int64_t max_tree;
  int64_t max_positions;
  int64_t rope_half;
  int64_t workspace_words;
  int32_t dtype;  // Dtype
  int32_t kv_dtype;
  int32_t out_dtype;
  int32_t layout;  // Layout
  int32_t causal;
  int32_t has_row_windows;
  int32_t rope_interleaved;
  int32_t k_scale_per_token;
  int32_t v_scale_per_token;
  int32_t num_workers;
  int32_t stages;
  int32_t plan_ctas;
  int32_t shared_bytes_per_cta;
  int32_t shared_bytes_per_multiprocessor;
  float soft_cap;
  uint32_t seed;
  // Results: what ChooseKernels said.
  int32_t chosen_stages;
  int32_t chosen_ctas;
  int32_t chosen_prefill_rows;
};

// Runs planner, decode and prefill where launch.cu would. Returns "" or what went wrong.
const char* emulate_attention(EmulatedCall* in) {
  namespace emu = jax_paged::emu;
  namespace cuda = jax_paged::cuda;
  const Dtype dtype = static_cast<Dtype>(in->dtype);
  const int64_t element_bytes = jax_paged::ByteWidth(dtype);
  const Dtype kv_dtype = static_cast<Dtype>(in->kv_dtype);
  AttentionCall call = {};
  call.q = in->q;
  call.k_pages = in->k_pages;
  call.v_pages = in->v_pages;
  call.page_table = in->page_table;
  call.seq_lens = in->seq_lens;
  call.cu_q_lens = in->cu_q_lens;
  call.num_seqs = in->num_seqs;
  call.layer = in->layer;
  call.sm_scale = in->sm_scale;
  call.sliding_window = in->sliding_window;
  call.has_row_windows = in->has_row_windows != 0;
  call.num_pinned = in->num_pinned;
  call.slot_offset = in->slot_offset;
  call.cos = in->cos;
  call.sin = in->sin;
  call.max_positions = in->max_positions;
  call.rope_half = in->rope_half;
  call.rope_interleaved = in->rope_interleaved != 0;
  call.alibi_slopes = in->alibi_slopes;
  call.sinks = in->sinks;
  call.tree = reinterpret_cast<const int32_t*>(in->tree);
  call.tree_sizes = in->tree_sizes;
  call.max_tree = in->max_tree;
  call.k_scale = in->k_scale;
  call.v_scale = in->v_scale;
  call.out_scale = in->out_scale;
  call.k_scale_per_token = in->k_scale_per_token != 0;
  call.v_scale_per_token = in->v_scale_per_token != 0;
  call.soft_cap = in->soft_cap;
  call.out = in->out;
  call.lse = in->lse;
  call.workspace = in->workspace;
  call.dtype = dtype;
  call.kv_dtype = kv_dtype;
  call.out_dtype = static_cast<Dtype>(in->out_dtype);
  call.num_tokens = in->num_tokens;
  call.num_q_heads = in->num_q_heads;
  call.max_seqs = in->max_seqs;
  call.pages_per_seq = in->pages_per_seq;
  call.k_pool = {in->num_layers,
                 in->num_pages,
                 in->num_kv_heads,
                 in->page_size,
                 in->head_dim,
                 jax_paged::ByteWidth(kv_dtype),
                 static_cast<jax_paged::Layout>(in->layout),
                 jax_paged::Pool::kKeys};
  call.v_pool = call.k_pool;
  call.v_pool.pool = jax_paged::Pool::kValues;
  call.v_pool.head_dim = in->v_head_dim;
  call.num_kv_splits = in->num_kv_splits;
  call.split_tokens = in->split_tokens;
  call.workspace_words = in->workspace_words;
  call.causal = in->causal != 0;

  const int64_t heads = in->num_tokens * in->num_q_heads;
  emu::ClearRegions();
  emu::AddRegion("q", in->q, heads * in->head_dim * element_bytes, /*is_input=*/true);
  emu::AddRegion("k_pages", in->k_pages, in->num_layers * call.k_pool.layer_bytes(), true,
                 in->k_touched);
  const bool is_latent = in->v_pages == in->k_pages;  // MLA: V is the front of each row of K
  if (!is_latent) {
    emu::AddRegion("v_pages", in->v_pages, in->num_layers * call.v_pool.layer_bytes(), true,
                   in->v_touched);
  }
  emu::AddRegion("page_table", in->page_table, in->max_seqs * in->pages_per_seq * 4, true);
  emu::AddRegion("seq_lens", in->seq_lens, in->max_seqs * 4, true);
  emu::AddRegion("cu_q_lens", in->cu_q_lens, (in->max_seqs + 1) * 4, true);
  emu::AddRegion("num_seqs", in->num_seqs, 4, true);
  emu::AddRegion("layer", in->layer, 4, true);
  emu::AddRegion("sm_scale", in->sm_scale, 4, true);
  if (in->sliding_window) {
    const int64_t windows = in->has_row_windows ? in->max_seqs : 1;
    emu::AddRegion("sliding_window", in->sliding_window, windows * 4, true);
  }
  if (in->num_pinned) {
    emu::AddRegion("num_pinned", in->num_pinned, in->max_seqs * 4, true);
    emu::AddRegion("slot_offset", in->slot_offset, in->max_seqs * 4, true);
  }
  if (in->cos) {
    emu::AddRegion("cos", in->cos, in->max_positions * in->rope_half * 4, true);
    emu::AddRegion("sin", in->sin, in->max_positions * in->rope_half * 4, true);
  }
  if (in->alibi_slopes) emu::AddRegion("alibi_slopes", in->alibi_slopes, in->num_q_heads * 4, true);
  if (in->sinks) emu::AddRegion("sinks", in->sinks, in->num_q_heads * 4, true);
  if (in->tree) {
    emu::AddRegion("tree", in->tree, in->max_seqs * in->max_tree * 8, true);
    emu::AddRegion("tree_sizes", in->tree_sizes, in->max_seqs * 4, true);
  }
  const int64_t slots = in->num_layers * call.k_pool.num_slots();
  const auto add_scale = [&](const char* name, const float* scale, int32_t per_token) {
    if (scale) emu::AddRegion(name, scale, in->num_kv_heads * (per_token ? slots : 1) * 4, true);
  };
  add_scale("k_scale", in->k_scale, in->k_scale_per_token);
  add_scale("v_scale", in->v_scale, in->v_scale_per_token);
  if (in->out_scale) emu::AddRegion("out_scale", in->out_scale, 4, true);
  emu::AddRegion("out", in->out, heads * in->v_head_dim * jax_paged::ByteWidth(call.out_dtype),
                 /*is_input=*/false);
  emu::AddRegion("lse", in->lse, heads * 4, false);
  emu::AddRegion("workspace", in->workspace, in->workspace_words * 4, false);

  AttentionArgs args;
  std::string error = cuda::MakeArgs(call, &args);
  if (!error.empty()) return Keep(error);
  if (is_latent) args.v_strides = args.k_strides;
  args.num_workers = in->num_workers;
  args.stages = in->stages;
  const cuda::DeviceLimits limits = {in->num_workers, in->shared_bytes_per_cta,
                                     in->shared_bytes_per_multiprocessor};
  const emu::AttentionKernels kernels =
      dtype == Dtype::kBFloat16 ? emu::BFloat16Kernels(args, limits)
                                : (dtype == Dtype::kFloat16 ? emu::Float16Kernels(args, limits)
                                                            : emu::Float32Kernels(args));
  args.prefill_rows = kernels.choice.prefill_rows;
  in->chosen_stages = kernels.choice.decode.stages;
  in->chosen_ctas = kernels.choice.decode.ctas_per_multiprocessor;
  in->chosen_prefill_rows = kernels.choice.prefill_rows;
  error = emu::Launch({in->plan_ctas, cuda::kPlanThreads, sizeof(cuda::PlanShared), in->seed},
                      [&] { cuda::PlanCta(args); });
  const auto run = [&](const emu::AttentionKernel& kernel, int64_t num_ctas) {
    return emu::Launch(
        {static_cast<int32_t>(num_ctas), cuda::kAttentionThreads, kernel.shared_bytes, in->seed},
        [&] { kernel.run(args); });
  };
  if (error.empty()) error = run(kernels.decode, args.num_workers);
  if (error.empty() && args.prefill_rows > 0) {
    const int64_t units = cuda::MaxPrefillUnits(args);
    error = run(kernels.prefill, units < args.num_workers ? units : args.num_workers);
  }
  return Keep(error);
}

int64_t workspace_words(int64_t max_seqs, int64_t num_kv_heads, int64_t group_size,
                        int64_t v_head_dim, int64_t capacity, int64_t num_kv_splits,
                        int64_t split_tokens, int64_t max_tree) {
  return jax_paged::cuda::WorkspaceWords({max_seqs, num_kv_heads, group_size, v_head_dim, capacity,
                                          num_kv_splits, split_tokens, max_tree});
}

void skip_site(const char* site) { jax_paged::emu::SkipSite(site); }

// The synchronisations that ran since the last call, one a line.
const char* take_sites() {
  std::string lines;
  for (const std::string& site : jax_paged::emu::TakeSites()) lines += site + "\n";
  return Keep(lines);
}

}  // extern "C"
