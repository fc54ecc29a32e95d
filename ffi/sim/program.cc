// SPDX-License-Identifier: Apache-2.0

// From statements to instructions: registers get their places, immediates and special registers
// become registers, labels become numbers.

#include "sim/program.h"

#include <bit>
#include <charconv>
#include <map>
#include <stdexcept>

#include "sim/rules.h"

namespace jax_paged::sim {
namespace {

const Rules& AllRules() {
  static const Rules* const rules = [] {
    auto* made = new Rules;
    AddArithmetic(made);
    AddCollectives(made);
    return made;
  }();
  return *rules;
}

const std::map<std::string_view, Special> kSpecials = {
    {"%tid.x", kTidX},       {"%tid.y", kTidY},       {"%tid.z", kTidZ},
    {"%ntid.x", kNtidX},     {"%ntid.y", kNtidY},     {"%ntid.z", kNtidZ},
    {"%ctaid.x", kCtaidX},   {"%ctaid.y", kCtaidY},   {"%ctaid.z", kCtaidZ},
    {"%nctaid.x", kNctaidX}, {"%nctaid.y", kNctaidY}, {"%nctaid.z", kNctaidZ},
    {"%laneid", kLaneId}};

class Maker {
 public:
  explicit Maker(Entry entry) {
    program_.entry = std::move(entry);
    const Entry& e = program_.entry;
    for (const auto& [name, bits] : e.registers) registers_[name] = New(bits);
    const int64_t align = e.dynamic_shared_align;
    program_.dynamic_shared_offset = (e.static_shared_bytes + align - 1) / align * align;
  }

  Program Make() {
    for (const Statement& statement : program_.entry.statements) {
      statement_ = &statement;
      program_.code.push_back(MakeInstruction());
    }
    Instruction end;  // control that runs off the end
    end.kind = Kind::kExit;
    program_.code.push_back(end);
    for (const Instruction& i : program_.code) {
      if (i.kind == Kind::kBranch) program_.code[i.target].is_target = true;
    }
    return std::move(program_);
  }

 private:
  [[noreturn]] void Fail(const std::string& what) const {
    std::string text;
    for (const std::string_view part : statement_->opcode) {
      text += (text.empty() ? "" : ".") + std::string(part);
    }
    for (const std::string_view operand : statement_->operands) text += " " + std::string(operand);
    throw std::runtime_error("PTX line " + std::to_string(statement_->place.ptx_line) + ": " +
                             what + ": " + text);
  }

  Ref New(int bits) {
    const Ref ref = {program_.num_words, program_.num_registers++};
    program_.num_words += bits == 1 ? 1 : bits == 64 ? 2 * kLanes : kLanes;
    // A predicate takes one word; what follows begins at a multiple of 16 words, for vectors.
    program_.num_words = (program_.num_words + 15) / 16 * 16;
    return ref;
  }

  int BitsOf(std::string_view name) const {
    const auto found = program_.entry.registers.find(name);
    if (found == program_.entry.registers.end()) return 0;
    return found->second;
  }

  Ref Constant(uint64_t value, int bits) {
    const auto [at, is_new] = constants_.try_emplace({value, bits});
    if (is_new) {
      at->second = New(bits);
      program_.constants.push_back({at->second, value, bits});
    }
    return at->second;
  }

  // The value of what stands for itself: a number, or the address of a variable.
  bool Immediate(std::string_view text, uint64_t* value) const {
    const Entry& e = program_.entry;
    if (text == e.dynamic_shared && !text.empty()) {
      *value = static_cast<uint64_t>(program_.dynamic_shared_offset);
      return true;
    }
    if (const auto it = e.shared.find(text); it != e.shared.end()) {
      *value = static_cast<uint64_t>(it->second.offset);
      return true;
    }
    if (const auto it = e.params.find(text); it != e.params.end()) {
      *value = static_cast<uint64_t>(it->second.offset);
      return true;
    }
    const bool is_negative = !text.empty() && text[0] == '-';
    if (is_negative) text.remove_prefix(1);
    int base = 10;
    if (text.rfind("0f", 0) == 0 || text.rfind("0x", 0) == 0) {
      base = 16;
      text.remove_prefix(2);
    }
    uint64_t found = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found, base);
    if (error != std::errc() || text.empty() || end != text.data() + text.size()) return false;
    *value = is_negative ? uint64_t{0} - found : found;
    return true;
  }

  Ref Operand(std::string_view text, int bits) {
    if (const auto it = registers_.find(text); it != registers_.end()) return it->second;
    if (const auto it = kSpecials.find(text); it != kSpecials.end()) {
      if (!program_.has_special[it->second]) {
        program_.has_special[it->second] = true;
        program_.specials[it->second] = New(32);
      }
      return program_.specials[it->second];
    }
    uint64_t value;
    if (!Immediate(text, &value)) Fail("unknown operand " + std::string(text));
    if (bits == 1) value = value ? kAllLanes : 0;
    return Constant(value, bits);
  }

  // {"%r1", "%r2"} of "{%r1, %r2}", and {"%r1"} of "%r1".
  static std::vector<std::string_view> Elements(std::string_view text, char separator = ',') {
    if (!text.empty() && text.front() == '{') text = text.substr(1, text.size() - 2);
    std::vector<std::string_view> parts;
    while (true) {
      const size_t end = text.find(separator);
      std::string_view part = text.substr(0, end);
      while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
      while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
      parts.push_back(part);
      if (end == text.npos) return parts;
      text.remove_prefix(end + 1);
    }
  }

  // "[%rd1+-8]": the register or variable, and the number.
  Ref Address(std::string_view text, int64_t* offset, int* bits) {
    if (text.size() < 3 || text.front() != '[' || text.back() != ']') Fail("expected an address");
    text = text.substr(1, text.size() - 2);
    const size_t plus = text.find('+');
    *offset = 0;
    if (plus != text.npos) {
      uint64_t number;
      if (!Immediate(text.substr(plus + 1), &number)) Fail("unknown offset");
      *offset = static_cast<int64_t>(number);
    }
    const std::string_view base = text.substr(0, plus);
    *bits = BitsOf(base);
    if (*bits == 0) *bits = 64;
    return Operand(base, *bits);
  }

  // A register must have the slots that the type has.
  void CheckWidth(std::string_view name, int bits) const {
    const int has = BitsOf(name);
    if (has != 0 && ((has == 64) != (bits == 64) || (has == 1) != (bits == 1))) {
      Fail("a register of " + std::to_string(has) + " bits for a type of " + std::to_string(bits));
    }
  }

  void Out(Instruction* i, std::string_view name) {
    const auto it = registers_.find(name);
    if (it == registers_.end()) Fail("expected a register, got " + std::string(name));
    i->out[static_cast<size_t>(i->num_out++)] = it->second;
  }
  void In(Instruction* i, Ref ref) { i->in[static_cast<size_t>(i->num_in++)] = ref; }

  Instruction MakeInstruction() {
    Instruction i;
    const Statement& s = *statement_;
    i.place = s.place;
    if (!s.guard.empty()) {
      i.is_guarded = true;
      i.guard_negated = s.guard_negated;
      i.guard = Operand(s.guard, 1);
    }
    std::string opcode;
    for (const std::string_view part : s.opcode) {
      opcode += (opcode.empty() ? "" : ".") + std::string(part);
    }
    if (MakeControl(opcode, &i) || MakeMove(opcode, &i) || MakeAccess(opcode, &i)) return i;
    const bool narrows = opcode.rfind("cvt.", 0) == 0 && s.operands.size() == 2 &&
                         BitsOf(s.operands[1]) == 64 && TypeBits(s.opcode.back()) < 64;
    if (narrows) opcode += kOfWide;
    const auto found = AllRules().find(opcode);
    if (found == AllRules().end()) Fail("unknown instruction");
    MakeByRule(found->second, &i);
    return i;
  }

  bool MakeControl(const std::string& opcode, Instruction* i) {
    const auto& operands = statement_->operands;
    if (opcode == "bra" || opcode == "bra.uni") {
      i->kind = Kind::kBranch;
      const auto label = program_.entry.labels.find(operands.at(0));
      if (label == program_.entry.labels.end()) Fail("unknown label");
      i->target = static_cast<int32_t>(label->second);
    } else if (opcode == "ret" || opcode == "exit") {
      i->kind = Kind::kExit;
    } else if (opcode == "bar.sync" || opcode == "bar.red.or.pred") {
      i->kind = Kind::kBarrier;
      const bool reduces = opcode != "bar.sync";
      if (operands.size() != (reduces ? 3u : 1u) || operands[reduces ? 1 : 0] != "0") {
        Fail("a barrier other than number 0 of all threads");
      }
      if (reduces) {
        Out(i, operands[0]);
        In(i, Operand(operands[2], 1));
      }
    } else {
      return false;
    }
    return true;
  }

  // mov.b32 {%rs1, %rs2}, %r1 and back.
  bool MakeMove(const std::string& opcode, Instruction* i) {
    const auto& operands = statement_->operands;
    if (opcode.rfind("mov.b", 0) != 0 || operands.size() != 2) return false;
    const bool unpacks = operands[0].front() == '{', packs = operands[1].front() == '{';
    if (!unpacks && !packs) return false;
    const bool is_wide = opcode == "mov.b64";
    if (!is_wide && opcode != "mov.b32") Fail("unknown instruction");
    const int whole = is_wide ? 64 : 32;
    const auto outs = Elements(operands[0]), ins = Elements(operands[1]);
    if (outs.size() + ins.size() != 3) Fail("expected two halves");
    for (const std::string_view out : outs) Out(i, out);
    for (const std::string_view in : ins) In(i, Operand(in, unpacks ? whole : whole / 2));
    i->execute = MoveHalves(is_wide, packs);
    return true;
  }

  bool MakeAccess(const std::string& opcode, Instruction* i) {
    const auto& operands = statement_->operands;
    const bool stores = opcode.rfind("st.", 0) == 0, copies = opcode.rfind("cp.async", 0) == 0;
    int address_bits = 0;
    if (copies) {
      if (!MakeMemoryAccess(opcode, 0, 0, 0, i)) Fail("unknown instruction");
      if (operands.size() >= 3) {
        In(i, Address(operands[0], &i->number, &address_bits));
        In(i, Address(operands[1], &i->number2, &address_bits));
        uint64_t bytes;
        if (!Immediate(operands[2], &bytes)) Fail("expected a number of bytes");
        i->bytes = static_cast<int32_t>(bytes);
        if (operands.size() > 3) In(i, Operand(operands[3], 32));
      } else if (operands.size() == 1) {
        uint64_t groups;
        if (!Immediate(operands[0], &groups)) Fail("expected a number of groups");
        i->number = static_cast<int64_t>(groups);
      }
      return true;
    }
    const bool orders = opcode == "fence.acq_rel.gpu" || opcode.rfind("griddepcontrol.", 0) == 0;
    if (orders) return MakeMemoryAccess(opcode, 0, 0, 0, i);
    if (!stores && opcode.rfind("ld.", 0) != 0 && opcode.rfind("atom.", 0) != 0) return false;
    if (operands.size() < 2) Fail("operands are missing");
    const auto values = Elements(operands[stores ? 1 : 0]);
    In(i, Address(operands[stores ? 0 : 1], &i->number, &address_bits));
    const std::string type(statement_->opcode.back());
    for (const std::string_view value : values) {
      if (stores) {
        CheckWidth(value, TypeBits(type));
        In(i, Operand(value, TypeBits(type)));
      } else {
        Out(i, value);
      }
    }
    for (size_t k = 2; k < operands.size(); ++k) In(i, Operand(operands[k], 32));
    const int bits = BitsOf(values[0]) ? BitsOf(values[0]) : TypeBits(type);
    if (!MakeMemoryAccess(opcode, address_bits, bits, static_cast<int>(values.size()), i)) {
      Fail("unknown instruction");
    }
    return true;
  }

  void MakeByRule(const Rule& rule, Instruction* i) {
    i->execute = rule.execute;
    i->kind = rule.kind;
    std::vector<std::string_view> parts;
    bool is_first = true;
    for (const std::string_view operand : statement_->operands) {
      const bool has_two = is_first && operand.find('|') != operand.npos;
      for (const std::string_view part : Elements(operand, has_two ? '|' : ',')) {
        parts.push_back(part);
      }
      is_first = false;
    }
    size_t results = rule.out.size();
    if (parts.size() + 1 == rule.out.size() + rule.in.size()) --results;  // without "|%p"
    if (parts.size() != results + rule.in.size()) Fail("another number of operands");
    for (size_t k = 0; k < results; ++k) {
      CheckWidth(parts[k], TypeBits(rule.out[k]));
      Out(i, parts[k]);
    }
    for (size_t k = 0; k < rule.in.size(); ++k) {
      const std::string_view part = parts[results + k];
      if (rule.in[k] == "address") {
        int bits;
        In(i, Address(part, &i->number, &bits));
        if (bits == 64) Fail("a shared address of 64 bits");
      } else {
        CheckWidth(part, TypeBits(rule.in[k]));
        In(i, Operand(part, TypeBits(rule.in[k])));
      }
    }
    const bool is_aligned = statement_->opcode.size() > 2 && statement_->opcode[2] == "aligned";
    if (rule.kind == Kind::kConvergent && !is_aligned) i->members = i->num_in - 1;
  }

  Program program_;
  std::map<std::string_view, Ref> registers_;
  std::map<std::pair<uint64_t, int>, Ref> constants_;
  const Statement* statement_ = nullptr;
};

}  // namespace

Program MakeProgram(const Module& module, const std::string& entry) {
  return Maker(module.Parse(entry)).Make();
}

}  // namespace jax_paged::sim
