// SPDX-License-Identifier: Apache-2.0

// The names of a call's operands, and which of them were asked for.

#ifndef JAX_PAGED_COMMON_OPERAND_NAMES_H_
#define JAX_PAGED_COMMON_OPERAND_NAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jax_paged {

class OperandNames {
 public:
  static constexpr size_t kMost = 32;

  // Adds the name of the next operand, of at most kMost.
  void Add(std::string_view name) {
    names_[count_++] = name;
    marks_ |= MarkOf(name);
  }
  size_t count() const { return count_; }

  // The number of an operand, which counts as read then; -1: there is none of that name.
  int Find(std::string_view name) {
    if (!(marks_ & MarkOf(name))) return -1;  // most options are off
    // They mostly are asked for in the order in which they come.
    for (size_t tried = 0; tried < count_; ++tried, next_ = (next_ + 1) % count_) {
      if (names_[next_] != name) continue;
      was_read_[next_] = true;
      return static_cast<int>(next_);
    }
    return -1;
  }

  // What to say of an operand that nobody asked for; "": there is none.
  std::string Unread() const {
    for (size_t i = 0; i < count_; ++i) {
      if (!was_read_[i]) return "operand \"" + std::string(names_[i]) + "\": there is no such one";
    }
    return "";
  }

 private:
  // One bit of 64: names with different ones differ.
  static uint64_t MarkOf(std::string_view name) {
    if (name.empty()) return 0;
    const auto first = static_cast<unsigned char>(name.front());
    const auto last = static_cast<unsigned char>(name.back());
    return uint64_t{1} << ((first + last * 3u + name.size() * 13u) & 63u);
  }

  std::string_view names_[kMost];
  bool was_read_[kMost] = {};
  uint64_t marks_ = 0;
  size_t count_ = 0;
  size_t next_ = 0;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_OPERAND_NAMES_H_
