// SPDX-License-Identifier: Apache-2.0

// Shared by the instruction-set files (inst/<isa>.cc, vec_<isa>.h and the kernel text they
// include).
//
// Each inst/<isa>.cc compiles the same kernel text in a namespace of its own, between
// JAX_PAGED_BEGIN_TARGET and JAX_PAGED_END_TARGET, which let the compiler use the instruction set
// for the functions between them and for nothing else. Rules that keep such code from leaking into
// functions shared with the rest of the program (where it would crash an older CPU):
//   - standard and common headers are included before JAX_PAGED_BEGIN_TARGET;
//   - kernel text instantiates no template from outside its namespace, std:: included, and has no
//     lambdas (they would be compiled without the instruction set).

#ifndef JAX_PAGED_CPU_ISA_ISA_H_
#define JAX_PAGED_CPU_ISA_ISA_H_

#if defined(__clang__)
#define JAX_PAGED_PRAGMA(text) _Pragma(#text)
#define JAX_PAGED_BEGIN_TARGET(target_list) \
  JAX_PAGED_PRAGMA(clang attribute push(__attribute__((target(target_list))), apply_to = function))
#define JAX_PAGED_END_TARGET JAX_PAGED_PRAGMA(clang attribute pop)
#define JAX_PAGED_UNROLL _Pragma("clang loop unroll(full)")
#else
#define JAX_PAGED_PRAGMA(text) _Pragma(#text)
#define JAX_PAGED_BEGIN_TARGET(target_list) \
  JAX_PAGED_PRAGMA(GCC push_options)        \
  JAX_PAGED_PRAGMA(GCC target(target_list))
#define JAX_PAGED_END_TARGET JAX_PAGED_PRAGMA(GCC pop_options)
#define JAX_PAGED_UNROLL _Pragma("GCC unroll 16")
#endif

#define JAX_PAGED_INLINE inline __attribute__((always_inline))

// What vectors of AVX2 and of AVX-512 have alike but for the names of the intrinsics, which begin
// with PREFIX. vec_generic.h explains the functions.
#define JAX_PAGED_X86_ARITHMETIC(PREFIX)                                                    \
  struct Pair {                                                                             \
    Vec a, b;                                                                               \
  };                                                                                        \
  JAX_PAGED_INLINE Vec Zero() { return PREFIX##_setzero_ps(); }                             \
  JAX_PAGED_INLINE Vec Set1(float x) { return PREFIX##_set1_ps(x); }                        \
  JAX_PAGED_INLINE Vec Add(Vec a, Vec b) { return PREFIX##_add_ps(a, b); }                  \
  JAX_PAGED_INLINE Vec Mul(Vec a, Vec b) { return PREFIX##_mul_ps(a, b); }                  \
  JAX_PAGED_INLINE Vec Div(Vec a, Vec b) { return PREFIX##_div_ps(a, b); }                  \
  JAX_PAGED_INLINE Vec Fma(Vec a, Vec b, Vec c) { return PREFIX##_fmadd_ps(a, b, c); }      \
  JAX_PAGED_INLINE Vec FmaOnce(Vec a, Vec b, Vec c) { return Fma(a, b, c); }                \
  JAX_PAGED_INLINE Vec MaxSkipNan(Vec so_far, Vec x) { return PREFIX##_max_ps(x, so_far); } \
  JAX_PAGED_INLINE Vec MinKeepNan(Vec limit, Vec x) { return PREFIX##_min_ps(limit, x); }   \
  JAX_PAGED_INLINE Vec MaxKeepNan(Vec limit, Vec x) { return PREFIX##_max_ps(limit, x); }

#endif  // JAX_PAGED_CPU_ISA_ISA_H_
