// SPDX-License-Identifier: Apache-2.0

#ifndef JAX_PAGED_COMMON_HOST_DEVICE_H_
#define JAX_PAGED_COMMON_HOST_DEVICE_H_

// Marks what device code may call too.
#ifdef __CUDACC__
#define JAX_PAGED_HOST_DEVICE __host__ __device__
#else
#define JAX_PAGED_HOST_DEVICE
#endif

#endif  // JAX_PAGED_COMMON_HOST_DEVICE_H_
