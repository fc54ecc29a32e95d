// SPDX-License-Identifier: Apache-2.0

// Pointers of the CUDA kernels. They cannot be dereferenced: prim.h loads and stores. On a GPU they
// are plain addresses; in the emulator (JAX_PAGED_EMULATE) they know their buffer.

#ifndef JAX_PAGED_CUDA_POINTERS_H_
#define JAX_PAGED_CUDA_POINTERS_H_

#include <cstdint>
#include <type_traits>

#include "common/page_view.h"

#ifdef JAX_PAGED_EMULATE
#include "emu/pointers.h"
#else

namespace jax_paged {

// A pointer to device memory.
template <typename T>
class Global {
 public:
  Global() = default;
  JAX_PAGED_HOST_DEVICE explicit Global(T* p) : p_(p) {}

  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T> > >
  JAX_PAGED_HOST_DEVICE Global(Global<U> other) : p_(other.get()) {}

  JAX_PAGED_HOST_DEVICE Global operator+(int64_t n) const { return Global(p_ + n); }
  // The same address as a pointer to U.
  template <typename U>
  JAX_PAGED_HOST_DEVICE Global<U> As() const {
    static_assert(std::is_const_v<U> || !std::is_const_v<T>, "As would drop const");
    return Global<U>(reinterpret_cast<U*>(p_));
  }
  JAX_PAGED_HOST_DEVICE explicit operator bool() const { return p_ != nullptr; }
  JAX_PAGED_HOST_DEVICE T* get() const { return p_; }

 private:
  T* p_ = nullptr;
};

// A pointer to the CTA's shared memory.
template <typename T>
class Shared {
 public:
  Shared() = default;
  JAX_PAGED_HOST_DEVICE explicit Shared(T* p) : p_(p) {}

  JAX_PAGED_HOST_DEVICE Shared operator+(int64_t n) const { return Shared(p_ + n); }
  template <typename U>
  JAX_PAGED_HOST_DEVICE Shared<U> As() const {
    return Shared<U>(reinterpret_cast<U*>(p_));
  }
  JAX_PAGED_HOST_DEVICE T* get() const { return p_; }

 private:
  T* p_ = nullptr;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_EMULATE

#endif  // JAX_PAGED_CUDA_POINTERS_H_
