// SPDX-License-Identifier: Apache-2.0

#include "emu/call.h"

#include <cfenv>
#include <utility>

#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

std::string last_text;

const char* Keep(std::string text) {
  last_text = std::move(text);
  return last_text.c_str();
}

// Floats as they are on a GPU: a thread of XLA takes those below the normal ones for 0.
class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainFloats() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

Array ArrayOf(const EmulatedArray& x) {
  const auto rank = static_cast<size_t>(x.rank);
  return {x.data, static_cast<ArrayType>(x.type), {x.dims, rank}, /*is_given=*/true};
}

void AddArray(const EmulatedArray& x, bool is_input) {
  const Array array = ArrayOf(x);
  const int64_t width =
      array.type == ArrayType::kInt32 ? 4 : ByteWidth(static_cast<Dtype>(array.type));
  AddRegion(x.name, x.data, array.shape.count() * width, is_input, x.touched);
}

}  // namespace

Call::Call(EmulatedCall* call) : call_(*call) {
  for (int32_t i = 0; i < call_.num_operands; ++i) names_.Add(call_.operands[i].name);
}

Array Call::Find(std::string_view name) {
  const int index = names_.Find(name);
  return index < 0 ? Array{} : ArrayOf(call_.operands[index]);
}

Array Call::Result(std::string_view name) const {
  for (int32_t i = 0; i < call_.num_results; ++i) {
    if (call_.results[i].name == name) return ArrayOf(call_.results[i]);
  }
  return {};
}

const EmulatedAttribute* Call::FindAttribute(std::string_view name) const {
  for (int32_t i = 0; i < call_.num_attributes; ++i) {
    if (call_.attributes[i].name == name) return &call_.attributes[i];
  }
  return nullptr;
}

const char* Emulate(EmulatedCall* call, std::string (*run)(Call& call)) {
  const PlainFloats plain_floats;
  ClearRegions();
  for (int32_t i = 0; i < call->num_operands; ++i) AddArray(call->operands[i], /*is_input=*/true);
  for (int32_t i = 0; i < call->num_results; ++i) AddArray(call->results[i], /*is_input=*/false);
  Call read(call);
  std::string error = run(read);
  if (error.empty()) error = read.problem();
  return Keep(error.empty() ? read.Unread() : std::move(error));
}

}  // namespace jax_paged::emu

extern "C" {

void skip_site(const char* site) { jax_paged::emu::SkipSite(site); }

// The synchronisations that ran since the last call, one a line.
const char* take_sites() {
  std::string lines;
  for (const std::string& site : jax_paged::emu::TakeSites()) lines += site + "\n";
  return jax_paged::emu::Keep(std::move(lines));
}

}  // extern "C"
