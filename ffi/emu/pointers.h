// SPDX-License-Identifier: Apache-2.0

// Emulator twins of Global and Shared (cuda/pointers.h): pointers that know their buffer, so that
// every access through prim.h is checked against its bounds. There is no operator*: prim.h is the
// only way in.

#ifndef JAX_PAGED_EMU_POINTERS_H_
#define JAX_PAGED_EMU_POINTERS_H_

#include <cstdint>
#include <type_traits>

#include "emu/machine.h"

namespace jax_paged {

// A pointer to device memory. The buffer is found when the pointer is made, so that arithmetic that
// leaves one buffer is caught even where it lands in another.
template <typename T>
class Global {
 public:
  Global() = default;
  explicit Global(T* p)
      : address_(reinterpret_cast<uintptr_t>(p)), region_(emu::FindRegion(address_)) {}
  Global(uintptr_t address, emu::Region* region) : address_(address), region_(region) {}

  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T>>>
  Global(Global<U> other) : address_(other.address()), region_(other.region()) {}

  Global operator+(int64_t n) const {
    return {address_ + static_cast<uintptr_t>(n * int64_t{sizeof(T)}), region_};
  }
  template <typename U>
  Global<U> As() const {
    static_assert(std::is_const_v<U> || !std::is_const_v<T>, "As would drop const");
    return {address_, region_};
  }

  explicit operator bool() const { return address_ != 0; }

  uintptr_t address() const { return address_; }
  emu::Region* region() const { return region_; }

 private:
  uintptr_t address_ = 0;
  emu::Region* region_ = nullptr;
};

// A pointer to the CTA's shared memory: an offset into it.
template <typename T>
class Shared {
 public:
  Shared() = default;
  explicit Shared(int64_t offset) : offset_(offset) {}

  Shared operator+(int64_t n) const { return Shared(offset_ + n * int64_t{sizeof(T)}); }
  template <typename U>
  Shared<U> As() const {
    return Shared<U>(offset_);
  }

  int64_t offset() const { return offset_; }

 private:
  int64_t offset_ = 0;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_EMU_POINTERS_H_
