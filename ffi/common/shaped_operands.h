// SPDX-License-Identifier: Apache-2.0

// Operands that a call does not have, told by their types and shapes: what a plan must know of the
// calls that it is made for.

#ifndef JAX_PAGED_COMMON_SHAPED_OPERANDS_H_
#define JAX_PAGED_COMMON_SHAPED_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/checks.h"
#include "common/operand_names.h"

namespace jax_paged {

// A Source of an AttentionReader (attention_call.h): the operands of another one, and those that
// its attribute "shapes" tells of: "q bfloat16 8 32 128,layer int32". Their data is no memory of
// the device, and nobody reads it.
template <typename Source>
class ShapedOperands {
 public:
  explicit ShapedOperands(Source* source) : source_(*source) {
    std::string_view text = source_.Attribute("shapes", std::string_view());
    while (!text.empty() && problem_.empty()) {
      const size_t end = text.find(',');
      const std::string_view one = text.substr(0, end);
      if (names_.count() == OperandNames::kMost || !Add(one)) {
        problem_ = "attribute \"shapes\": expected name, dtype and sizes, got \"" +
                   std::string(one) + "\"";
      }
      text.remove_prefix(end == text.npos ? text.size() : end + 1);
    }
  }

  Array Find(std::string_view name) {
    const int index = names_.Find(name);
    return index < 0 ? source_.Find(name) : arrays_[index];
  }
  template <typename T>
  T Attribute(const char* name, T otherwise) {
    return source_.Attribute(name, otherwise);
  }
  const std::string& problem() const { return problem_.empty() ? source_.problem() : problem_; }
  std::string Unread() const {
    const std::string unread = names_.Unread();
    return unread.empty() ? source_.Unread() : unread;
  }

 private:
  static constexpr size_t kMostDims = 6;
  static constexpr int kFirstType = static_cast<int>(ArrayType::kInt32);
  static constexpr int kLastType = static_cast<int>(Dtype::kInt8);

  // The next word of a text, which loses it.
  static std::string_view Take(std::string_view* text) {
    const size_t end = text->find(' ');
    const std::string_view word = text->substr(0, end);
    text->remove_prefix(end == text->npos ? text->size() : end + 1);
    return word;
  }

  static bool ReadSize(std::string_view word, int64_t* size) {
    *size = 0;
    for (const char digit : word) {
      if (digit < '0' || digit > '9' || *size > INT64_MAX / 10 - 1) return false;
      *size = *size * 10 + (digit - '0');
    }
    return !word.empty();
  }

  bool Add(std::string_view text) {
    const size_t number = names_.count();
    const std::string_view name = Take(&text), dtype = Take(&text);
    Array& array = arrays_[number];
    bool known = false;
    for (int type = kFirstType; !known && type <= kLastType; ++type) {
      array.type = static_cast<ArrayType>(type);
      known = dtype == TypeText(array.type);
    }
    size_t rank = 0;
    for (; known && !text.empty(); ++rank) {
      if (rank == kMostDims || !ReadSize(Take(&text), &dims_[number][rank])) return false;
    }
    array.data = nothing_;
    array.shape = {dims_[number], rank};
    array.is_given = true;
    names_.Add(name);
    return known && !name.empty();
  }

  Source& source_;
  OperandNames names_;
  Array arrays_[OperandNames::kMost];
  int64_t dims_[OperandNames::kMost][kMostDims];
  alignas(16) char nothing_[16] = {};
  std::string problem_;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_SHAPED_OPERANDS_H_
