// SPDX-License-Identifier: Apache-2.0

#include "sim/ptx.h"

#include <cctype>
#include <charconv>
#include <cstring>
#include <set>
#include <stdexcept>

namespace jax_paged::sim {
namespace {

// A string that lives for ever, one for each text.
const char* Keep(std::string_view text) {
  static std::set<std::string, std::less<>> kept;
  return kept.emplace(text).first->c_str();
}

bool IsName(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

std::string_view Trim(std::string_view text) {
  const char* const kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// Parts of a text at a separator outside of brackets, trimmed.
std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (std::strchr("{[(", text[i])) ++depth;
    if (std::strchr("}])", text[i])) --depth;
    if (text[i] != separator || depth > 0) continue;
    parts.push_back(Trim(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  const std::string_view last = Trim(text.substr(begin));
  if (!last.empty() || !parts.empty()) parts.push_back(last);
  return parts;
}

// Reads on through a text, and knows the line.
class Reader {
 public:
  explicit Reader(std::string_view text, int line = 1) : text_(text), line_(line) {}

  int line() const { return line_; }

  [[noreturn]] void Fail(const std::string& what) const {
    throw std::runtime_error("PTX line " + std::to_string(line_) + ": " + what);
  }

  // Whether there is more beside space and comments.
  bool SkipSpace() {
    while (at_ < text_.size()) {
      if (text_.compare(at_, 2, "//") == 0) {
        ReadUntil('\n');
      } else if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
        Take(1);
      } else {
        return true;
      }
    }
    return false;
  }
  char Peek() {
    if (!SkipSpace()) Fail("the text ends");
    return text_[at_];
  }
  bool TakeIf(std::string_view word) {
    SkipSpace();
    if (text_.compare(at_, word.size(), word) != 0) return false;
    Take(word.size());
    return true;
  }
  std::string_view ReadName() {
    SkipSpace();
    size_t end = at_;
    while (end < text_.size() && IsName(text_[end])) ++end;
    return Take(end - at_);
  }
  std::string_view ReadWord() {
    SkipSpace();
    size_t end = at_;
    while (end < text_.size() && !std::isspace(static_cast<unsigned char>(text_[end]))) ++end;
    return Take(end - at_);
  }
  // What comes before the end, which is taken too.
  std::string_view ReadUntil(char end) {
    const size_t found = text_.find(end, at_);
    if (found == text_.npos) Fail(std::string("no '") + end + "'");
    const std::string_view taken = Take(found - at_);
    Take(1);
    return taken;
  }
  int64_t ReadNumber() {
    const std::string_view word = ReadName();
    int64_t number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc() || end != word.data() + word.size()) {
      Fail("expected a number, got " + std::string(word));
    }
    return number;
  }

 private:
  std::string_view Take(size_t count) {
    const std::string_view taken = text_.substr(at_, count);
    for (const char c : taken) line_ += c == '\n';
    at_ += count;
    return taken;
  }

  std::string_view text_;
  size_t at_ = 0;
  int line_;
};

// ".align 16 .b8 name[64]" or ".b32 name": the name, its size and its alignment.
struct Declaration {
  std::string_view name;
  int64_t bytes;  // 0: an array without a size
  int64_t align;
};

Declaration ReadDeclaration(Reader* in) {
  Declaration found = {{}, 0, 0};
  int64_t element = 0;
  while (in->TakeIf(".")) {
    const std::string_view word = in->ReadName();
    if (word == "align") {
      found.align = in->ReadNumber();
    } else if (word != "ptr" && word != "global") {
      element = TypeBits(word) / 8;
    }
  }
  if (found.align == 0) found.align = element;
  found.name = in->ReadName();
  found.bytes = element;
  if (in->TakeIf("[")) {
    found.bytes = in->TakeIf("]") ? 0 : element * in->ReadNumber();
    if (found.bytes > 0 && !in->TakeIf("]")) in->Fail("an array of several axes");
  }
  return found;
}

Variable Place(const Declaration& declared, int64_t* end) {
  const int64_t offset = (*end + declared.align - 1) / declared.align * declared.align;
  *end = offset + declared.bytes;
  return {offset, declared.bytes};
}

class EntryReader {
 public:
  EntryReader(Reader in, const std::map<int, const char*>& files) : in_(in), files_(files) {}

  Entry Read() {
    entry_.name = in_.ReadName();
    ReadParams();
    while (in_.Peek() != '{') {  // .maxntid 128, 1, 1
      const std::string_view directive = in_.ReadWord();
      if (directive == ".maxntid") {
        const int64_t x = in_.ReadNumber();
        const int64_t y = in_.TakeIf(",") ? in_.ReadNumber() : 1;
        const int64_t z = in_.TakeIf(",") ? in_.ReadNumber() : 1;
        entry_.max_threads = static_cast<int>(x * y * z);
      } else if (directive == ".minnctapersm" || directive == ".maxnreg") {
        in_.ReadNumber();
      } else {
        in_.Fail("unknown directive " + std::string(directive));
      }
    }
    int depth = 0;
    do {
      if (in_.TakeIf("{")) {
        ++depth;
        renamed_.emplace_back();
      } else if (in_.TakeIf("}")) {
        --depth;
        renamed_.pop_back();
      } else if (in_.Peek() == '.') {
        ReadDirective();
      } else {
        ReadStatement();
      }
    } while (depth > 0);
    return std::move(entry_);
  }

 private:
  void ReadParams() {
    int64_t end = 0;
    if (!in_.TakeIf("(")) return;
    while (!in_.TakeIf(")")) {
      in_.TakeIf(",");
      if (!in_.TakeIf(".param")) in_.Fail("expected .param");
      const Declaration declared = ReadDeclaration(&in_);
      entry_.param_list.push_back(Place(declared, &end));
      entry_.params[declared.name] = entry_.param_list.back();
    }
  }

  void ReadDirective() {
    if (in_.TakeIf(".loc")) {
      ReadLocation(in_.ReadUntil('\n'));
    } else if (in_.TakeIf(".pragma")) {
      in_.ReadUntil(';');
    } else if (in_.TakeIf(".reg")) {
      in_.TakeIf(".");
      const int bits = TypeBits(in_.ReadName());
      for (std::string_view name : Split(in_.ReadUntil(';'), ',')) {
        const size_t count = name.find('<');
        if (count == name.npos) {
          AddRegister(name, bits);
          continue;
        }
        int64_t many = 0;
        std::from_chars(name.data() + count + 1, name.data() + name.size(), many);
        for (int64_t i = 0; i < many; ++i) {
          AddRegister(Keep(std::string(name.substr(0, count)) + std::to_string(i)), bits);
        }
      }
    } else if (in_.TakeIf(".shared")) {
      const Declaration declared = ReadDeclaration(&in_);
      entry_.shared[declared.name] = Place(declared, &entry_.static_shared_bytes);
      in_.ReadUntil(';');
    } else {
      in_.Fail("unknown directive " + std::string(in_.ReadWord()));
    }
  }

  // In an inner scope a register may have the name of one outside: it gets another one.
  void AddRegister(std::string_view name, int bits) {
    if (entry_.registers.emplace(name, bits).second) return;
    const char* const other = Keep(std::string(name) + "@" + std::to_string(++num_scoped_));
    entry_.registers.emplace(other, bits);
    renamed_.back()[name] = other;
  }

  // The text with the names that hold in this scope.
  std::string_view Renamed(std::string_view text) const {
    bool is_plain = true;
    for (const auto& scope : renamed_) is_plain &= scope.empty();
    if (is_plain) return text;
    std::string out;
    for (size_t at = 0; at < text.size();) {
      size_t end = at;
      while (end < text.size() && IsName(text[end])) ++end;
      std::string_view part = text.substr(at, end > at ? end - at : 1);
      at += part.size();
      for (auto scope = renamed_.rbegin(); scope != renamed_.rend(); ++scope) {
        if (const auto found = scope->find(part); found != scope->end()) {
          part = found->second;
          break;
        }
      }
      out += part;
    }
    return Keep(out);
  }

  // "2 80 5, function_name $L__info_string0, inlined_at 1 40 3"
  void ReadLocation(std::string_view text) {
    Reader reader(text, in_.line());
    auto file = files_.find(static_cast<int>(reader.ReadNumber()));
    int64_t line = reader.ReadNumber();
    const size_t inlined = text.find("inlined_at");
    // A wrapper of one instruction tells less than where it is used; so does a header of CUDA.
    const bool wraps = file != files_.end() && (std::strstr(file->second, "/prim.h") != nullptr ||
                                                std::strstr(file->second, "/ffi/") == nullptr);
    if (wraps && inlined != text.npos) {
      Reader caller(text.substr(inlined + std::strlen("inlined_at")), in_.line());
      file = files_.find(static_cast<int>(caller.ReadNumber()));
      line = caller.ReadNumber();
    }
    if (file == files_.end()) return;
    place_ = {file->second, static_cast<int>(line), 0};
  }

  void ReadStatement() {
    Statement statement;
    statement.place = place_;
    statement.place.ptx_line = in_.line();
    if (place_.line == 0) statement.place.line = in_.line();  // written by hand
    std::string_view first;
    if (in_.TakeIf("@")) {
      statement.guard_negated = in_.TakeIf("!");
      statement.guard = Renamed(in_.ReadName());
    } else {
      Reader ahead = in_;
      const std::string_view label = ahead.ReadName();
      if (ahead.TakeIf(":") && !ahead.TakeIf(":")) {
        entry_.labels[label] = static_cast<int64_t>(entry_.statements.size());
        in_ = ahead;
        return;
      }
    }
    const std::string_view text = Trim(in_.ReadUntil(';'));
    const size_t end = text.find_first_of(" \t\n");
    statement.opcode = Split(text.substr(0, end), '.');
    if (end != text.npos) statement.operands = Split(Renamed(text.substr(end)), ',');
    entry_.statements.push_back(std::move(statement));
  }

  Reader in_;
  const std::map<int, const char*>& files_;
  Entry entry_;
  struct Place place_ = {"ptx", 0, 0};
  std::vector<std::map<std::string_view, std::string_view>> renamed_;  // by scope, inner ones last
  int num_scoped_ = 0;
};

}  // namespace

int TypeBits(std::string_view type) {
  if (type == "pred") return 1;
  if (type == "f16x2" || type == "bf16x2") return 32;
  if (type == "bf16") return 16;
  int bits = 0;
  if (!type.empty() && std::strchr("bsuf", type[0])) {
    const auto [end, error] = std::from_chars(type.data() + 1, type.data() + type.size(), bits);
    if (error != std::errc() || end != type.data() + type.size()) bits = 0;
  }
  if (bits == 0) throw std::runtime_error("PTX: unknown type " + std::string(type));
  return bits;
}

Module::Module(std::string_view text) : text_(text) {
  for (size_t at = text.find(".file"); at != text.npos; at = text.find(".file", at + 1)) {
    Reader reader(text.substr(at + std::strlen(".file")));
    const int number = static_cast<int>(reader.ReadNumber());
    reader.ReadUntil('"');
    files_[number] = Keep(reader.ReadUntil('"'));
  }
  for (size_t at = text.find(".entry"); at != text.npos; at = text.find(".entry", at + 1)) {
    entries_.emplace_back(Reader(text.substr(at + std::strlen(".entry"))).ReadName());
  }
}

Entry Module::Parse(std::string_view name) const {
  const std::string wanted = ".entry " + std::string(name) + "(";
  const size_t at = text_.find(wanted);
  if (at == text_.npos) throw std::runtime_error("PTX: no entry " + std::string(name));
  int line = 1;
  for (const char c : text_.substr(0, at)) line += c == '\n';
  EntryReader reader(Reader(text_.substr(at + std::strlen(".entry ")), line), files_);
  Entry entry = reader.Read();
  // The array of dynamic shared memory and static arrays of the module stand before its entries.
  const std::string_view shared = ".extern .shared";
  if (const size_t found = text_.find(shared); found != text_.npos) {
    Reader declaration(text_.substr(found + shared.size()));
    const Declaration declared = ReadDeclaration(&declaration);
    entry.dynamic_shared = declared.name;
    entry.dynamic_shared_align = declared.align;
  }
  return entry;
}

}  // namespace jax_paged::sim
