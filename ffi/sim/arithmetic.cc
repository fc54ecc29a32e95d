// SPDX-License-Identifier: Apache-2.0

// Instructions that make registers of registers, lane by lane.
//
// Approximations (ex2, rcp, rsqrt) give the nearest number here. The ISA allows a GPU an error of 2
// ulp, and kernels must not count on less: the tolerances of the tests have room for both.

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "common/dtypes.h"
#include "sim/rules.h"
#include "sim/warp.h"

namespace jax_paged::sim {
namespace {

// out = f(in...) of registers, in each of the lanes.
template <typename R, typename... A, typename F, size_t... N>
inline void Map(Warp& warp, const Instruction& i, uint32_t lanes, F f, std::index_sequence<N...>) {
  Slot<R>* const out = warp.Words<Slot<R>>(i.out[0]);
  const auto in = std::tuple(warp.Words<Slot<A>>(i.in[N])...);
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      out[lane] = ToSlot<R>(f(FromSlot<A>(std::get<N>(in)[lane])...));
    }
  } else {
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      out[lane] = ToSlot<R>(f(FromSlot<A>(std::get<N>(in)[lane])...));
    }
  }
  uint32_t valid = kAllLanes;
  ((valid &= warp.Valid(i.in[N])), ...);
  warp.SetValid(i.out[0], lanes, valid);
}

// predicate = f(in...).
template <typename A, typename F>
inline void Compare(Warp& warp, const Instruction& i, uint32_t lanes, F f) {
  const Slot<A>* const a = warp.Words<Slot<A>>(i.in[0]);
  const Slot<A>* const b = warp.Words<Slot<A>>(i.in[1]);
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    bits |= uint32_t{f(FromSlot<A>(a[lane]), FromSlot<A>(b[lane]))} << lane;
  }
  uint32_t& out = warp.Predicate(i.out[0]);
  out = (out & ~lanes) | (bits & lanes);
  warp.SetValid(i.out[0], lanes, warp.Valid(i.in[0]) & warp.Valid(i.in[1]));
}

template <typename T>
constexpr const char* NameOf() {
  if constexpr (std::is_same_v<T, float>) return "f32";
  constexpr bool is_signed = std::is_signed_v<T>;
  switch (sizeof(T)) {
    case 1:
      return is_signed ? "s8" : "u8";
    case 2:
      return is_signed ? "s16" : "u16";
    case 4:
      return is_signed ? "s32" : "u32";
    default:
      return is_signed ? "s64" : "u64";
  }
}

class Adder {
 public:
  explicit Adder(Rules* rules) : rules_(*rules) {}

  template <typename R, typename... A, typename F>
  void Add(const std::string& opcode, F) {
    rules_[opcode] = {[](Warp& warp, const Instruction& i, uint32_t lanes) {
                        Map<R, A...>(warp, i, lanes, F{}, std::index_sequence_for<A...>());
                      },
                      Kind::kPlain,
                      {NameOf<R>()},
                      {NameOf<A>()...}};
  }
  template <typename A, typename F>
  void AddCompare(const std::string& opcode, F) {
    rules_[opcode] = {
        [](Warp& warp, const Instruction& i, uint32_t lanes) { Compare<A>(warp, i, lanes, F{}); },
        Kind::kPlain,
        {"pred"},
        {NameOf<A>(), NameOf<A>()}};
  }

  template <typename T>
  void AddIntegers() {
    using U = std::make_unsigned_t<T>;
    const std::string t = std::string(".") + NameOf<T>();
    Add<T, T, T>("add" + t, [](T a, T b) { return static_cast<T>(U(a) + U(b)); });
    Add<T, T, T>("sub" + t, [](T a, T b) { return static_cast<T>(U(a) - U(b)); });
    Add<T, T, T>("mul.lo" + t, [](T a, T b) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    });
    Add<T, T, T, T>("mad.lo" + t, [](T a, T b, T c) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) +
                            static_cast<uint64_t>(c));
    });
    Add<T, T, T>("mul.hi" + t, [](T a, T b) {
      using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
      return static_cast<T>((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
    });
    // The ISA leaves a division by zero open; a GPU gives all ones.
    Add<T, T, T>("div" + t, [](T a, T b) {
      if (b == 0) return static_cast<T>(~U{0});
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(U{0} - U(a));
      return static_cast<T>(a / b);
    });
    Add<T, T, T>("rem" + t, [](T a, T b) {
      if (b == 0) return a;
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
      return static_cast<T>(a % b);
    });
    Add<T, T, T>("min" + t, [](T a, T b) { return a < b ? a : b; });
    Add<T, T, T>("max" + t, [](T a, T b) { return a > b ? a : b; });
    Add<T, T, uint32_t>("shr" + t, [](T a, uint32_t b) {
      constexpr uint32_t kBits = 8 * sizeof(T);
      if (b >= kBits) return static_cast<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
      return static_cast<T>(a >> b);
    });
    if constexpr (std::is_signed_v<T>) {
      Add<T, T>("neg" + t, [](T a) { return static_cast<T>(U{0} - U(a)); });
      Add<T, T>("abs" + t, [](T a) { return static_cast<T>(a < 0 ? U{0} - U(a) : U(a)); });
    }
    AddOrdered<T>();
  }

  template <typename T>
  void AddWide() {  // a product of twice the width
    using Wide = std::conditional_t<sizeof(T) == 2,
                                    std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                    std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
    const std::string t = std::string(".") + NameOf<T>();
    Add<Wide, T, T>("mul.wide" + t, [](T a, T b) { return Wide{a} * Wide{b}; });
    Add<Wide, T, T, Wide>("mad.wide" + t, [](T a, T b, Wide c) {
      return static_cast<Wide>(static_cast<uint64_t>(Wide{a} * Wide{b}) + static_cast<uint64_t>(c));
    });
  }

  template <typename T>
  void AddOrdered() {
    const std::string t = std::string(".") + NameOf<T>();
    AddCompare<T>("setp.eq" + t, [](T a, T b) { return a == b; });
    // Of floats "ne" is false where one is NaN, unlike C++'s.
    AddCompare<T>("setp.ne" + t, [](T a, T b) { return a < b || a > b; });
    AddCompare<T>("setp.lt" + t, [](T a, T b) { return a < b; });
    AddCompare<T>("setp.le" + t, [](T a, T b) { return a <= b; });
    AddCompare<T>("setp.gt" + t, [](T a, T b) { return a > b; });
    AddCompare<T>("setp.ge" + t, [](T a, T b) { return a >= b; });
  }

  template <typename T>
  void AddBits() {
    const std::string t = ".b" + std::to_string(8 * sizeof(T));
    Add<T, T, T>("and" + t, [](T a, T b) { return static_cast<T>(a & b); });
    Add<T, T, T>("or" + t, [](T a, T b) { return static_cast<T>(a | b); });
    Add<T, T, T>("xor" + t, [](T a, T b) { return static_cast<T>(a ^ b); });
    Add<T, T>("not" + t, [](T a) { return static_cast<T>(~a); });
    Add<T, T, uint32_t>(
        "shl" + t, [](T a, uint32_t b) { return static_cast<T>(b >= 8 * sizeof(T) ? 0 : a << b); });
    AddCompare<T>("setp.eq" + t, [](T a, T b) { return a == b; });
    AddCompare<T>("setp.ne" + t, [](T a, T b) { return a != b; });
    for (const char kind : {'b', 's', 'u', 'f'}) {
      if (kind == 'f' && sizeof(T) == 2) continue;
      const std::string k = std::string(".") + kind + std::to_string(8 * sizeof(T));
      Add<T, T>("mov" + k, [](T a) { return a; });
      rules_["selp" + k] = {
          [](Warp& warp, const Instruction& i, uint32_t lanes) { Select<T>(warp, i, lanes); },
          Kind::kPlain,
          {NameOf<T>()},
          {NameOf<T>(), NameOf<T>(), "pred"}};
    }
  }

  template <typename To, typename From>
  void AddConvert() {
    const std::string opcode = std::string("cvt.") + NameOf<To>() + "." + NameOf<From>();
    Add<To, From>(opcode, [](From a) { return static_cast<To>(a); });
    // The lower bits of a register of 64.
    Add<To, uint64_t>(opcode + kOfWide,
                      [](uint64_t a) { return static_cast<To>(static_cast<From>(a)); });
  }
  template <typename From>
  void AddConverts() {
    AddConvert<int16_t, From>();
    AddConvert<uint16_t, From>();
    AddConvert<int32_t, From>();
    AddConvert<uint32_t, From>();
    AddConvert<int64_t, From>();
    AddConvert<uint64_t, From>();
    Add<float, From>(std::string("cvt.rn.f32.") + NameOf<From>(),
                     [](From a) { return static_cast<float>(a); });
  }

  void AddPredicates() {
    const auto add = [this](const char* opcode, auto f) {
      using F = decltype(f);
      rules_[opcode] = {
          [](Warp& warp, const Instruction& i, uint32_t lanes) {
            const uint32_t bits = F{}(warp.Predicate(i.in[0]), warp.Predicate(i.in[i.num_in - 1]));
            uint32_t& out = warp.Predicate(i.out[0]);
            const uint32_t valid = warp.Valid(i.in[0]) & warp.Valid(i.in[i.num_in - 1]);
            out = (out & ~lanes) | (bits & lanes);
            warp.SetValid(i.out[0], lanes, valid);
          },
          Kind::kPlain,
          {"pred"},
          {"pred", "pred"}};
    };
    add("and.pred", [](uint32_t a, uint32_t b) { return a & b; });
    add("or.pred", [](uint32_t a, uint32_t b) { return a | b; });
    add("xor.pred", [](uint32_t a, uint32_t b) { return a ^ b; });
    add("not.pred", [](uint32_t a, uint32_t) { return ~a; });
    add("mov.pred", [](uint32_t a, uint32_t) { return a; });
    rules_["not.pred"].in = rules_["mov.pred"].in = {"pred"};
  }

  void AddFloats();
  void AddPairs();

 private:
  // The lane whose value is not taken need not have one.
  template <typename T>
  static void Select(Warp& warp, const Instruction& i, uint32_t lanes) {
    const uint32_t first = warp.Predicate(i.in[2]);
    const Slot<T>* const a = warp.Words<Slot<T>>(i.in[0]);
    const Slot<T>* const b = warp.Words<Slot<T>>(i.in[1]);
    Slot<T>* const out = warp.Words<Slot<T>>(i.out[0]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Slot<T> chosen = first >> lane & 1 ? a[lane] : b[lane];
      out[lane] = lanes >> lane & 1 ? chosen : out[lane];
    }
    const uint32_t valid = (first & warp.Valid(i.in[0])) | (~first & warp.Valid(i.in[1]));
    warp.SetValid(i.out[0], lanes, valid & warp.Valid(i.in[2]));
  }

  Rules& rules_;
};

float FlushSubnormal(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

void Adder::AddFloats() {
  AddOrdered<float>();
  AddCompare<float>("setp.equ.f32", [](float a, float b) { return !(a < b || a > b); });
  AddCompare<float>("setp.neu.f32", [](float a, float b) { return !(a == b); });
  AddCompare<float>("setp.ltu.f32", [](float a, float b) { return !(a >= b); });
  AddCompare<float>("setp.leu.f32", [](float a, float b) { return !(a > b); });
  AddCompare<float>("setp.gtu.f32", [](float a, float b) { return !(a <= b); });
  AddCompare<float>("setp.geu.f32", [](float a, float b) { return !(a < b); });
  AddCompare<float>("setp.nan.f32", [](float a, float b) { return a != a || b != b; });
  AddCompare<float>("setp.num.f32", [](float a, float b) { return a == a && b == b; });
  Add<float, float, float>("add.f32", [](float a, float b) { return a + b; });
  Add<float, float, float>("sub.f32", [](float a, float b) { return a - b; });
  Add<float, float, float>("mul.f32", [](float a, float b) { return a * b; });
  Add<float, float, float>("div.rn.f32", [](float a, float b) { return a / b; });
  Add<float, float, float, float>("fma.rn.f32",
                                  [](float a, float b, float c) { return std::fma(a, b, c); });
  Add<float, float>("rcp.rn.f32", [](float a) { return 1.0f / a; });
  Add<float, float>("rcp.approx.ftz.f32",
                    [](float a) { return FlushSubnormal(1.0f / FlushSubnormal(a)); });
  Add<float, float>("rsqrt.approx.f32",
                    [](float a) { return static_cast<float>(1.0 / std::sqrt(double{a})); });
  Add<float, float>("ex2.approx.ftz.f32", [](float a) {
    return FlushSubnormal(static_cast<float>(std::exp2(double{FlushSubnormal(a)})));
  });
  Add<float, float>("neg.f32", [](float a) { return -a; });
  Add<float, float>("abs.f32", [](float a) { return std::fabs(a); });
  // The sign of the first with the size of the second.
  Add<float, float, float>("copysign.f32", [](float a, float b) { return std::copysign(b, a); });
  // Of a number and NaN the number; +0 is above -0.
  Add<float, float, float>("max.f32", [](float a, float b) {
    if (a == b) return std::signbit(a) ? b : a;
    return a != a || b > a ? b : a;
  });
  Add<float, float, float>("min.f32", [](float a, float b) {
    if (a == b) return std::signbit(a) ? a : b;
    return a != a || b < a ? b : a;
  });
}

// Two 16-bit numbers in a word.
template <typename T, typename F>
uint32_t OfPairs(F f) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    T rounded;
    FromFloat(f(16 * i), &rounded);
    pair |= uint32_t{rounded.bits} << (16 * i);
  }
  return pair;
}

template <typename T>
struct FmaPair {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    return OfPairs<T>([&](int shift) {
      const auto half = [&](uint32_t word) {
        return ToFloat(T{static_cast<uint16_t>(word >> shift)});
      };
      return std::fma(half(a), half(b), half(c));
    });
  }
};

template <typename T>
struct RoundPair {
  uint32_t operator()(float high, float low) const {
    return OfPairs<T>([&](int shift) { return shift ? high : low; });
  }
};

void Adder::AddPairs() {
  Add<float, uint16_t>("cvt.f32.f16", [](uint16_t a) { return ToFloat(Float16{a}); });
  Add<float, uint16_t>("cvt.f32.bf16", [](uint16_t a) { return ToFloat(BFloat16{a}); });
  // The lower code becomes the lower half.
  Add<uint32_t, uint16_t>("cvt.rn.f16x2.e4m3x2", [](uint16_t codes) {
    return OfPairs<Float16>(
        [&](int shift) { return ToFloat(Float8E4M3{static_cast<uint8_t>(codes >> shift / 2)}); });
  });
  Add<uint32_t, float, float>("cvt.rn.bf16x2.f32", RoundPair<BFloat16>());
  Add<uint32_t, float, float>("cvt.rn.f16x2.f32", RoundPair<Float16>());
  Add<uint32_t, uint32_t, uint32_t, uint32_t>("fma.rn.bf16x2", FmaPair<BFloat16>());
  Add<uint32_t, uint32_t, uint32_t, uint32_t>("fma.rn.f16x2", FmaPair<Float16>());
  Add<uint32_t, uint32_t>("popc.b32",
                          [](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); });
  // `count` bits of b from `at` on become the lowest bits of a.
  Add<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(
      "bfi.b32", [](uint32_t a, uint32_t b, uint32_t at, uint32_t count) {
        at &= 0xff, count &= 0xff;
        if (at >= 32 || count == 0) return b;
        const uint32_t mask = (count >= 32 ? kAllLanes : (uint32_t{1} << count) - 1) << at;
        return (b & ~mask) | (a << at & mask);
      });
  // The upper half of b:a shifted left by the lower five bits of the count.
  Add<uint32_t, uint32_t, uint32_t, uint32_t>(
      "shf.l.wrap.b32", [](uint32_t a, uint32_t b, uint32_t count) {
        return static_cast<uint32_t>((uint64_t{b} << 32 | a) << (count & 31) >> 32);
      });
  // Byte i of the result is the byte that nibble i of the selector names; with bit 3 of the nibble,
  // eight times that byte's sign.
  Add<uint32_t, uint32_t, uint32_t, uint32_t>(
      "prmt.b32", [](uint32_t a, uint32_t b, uint32_t selector) {
        const uint64_t bytes = uint64_t{b} << 32 | a;
        uint32_t result = 0;
        for (int i = 0; i < 4; ++i) {
          const uint32_t nibble = selector >> (4 * i) & 15;
          uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 0xff;
          if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
          result |= byte << (8 * i);
        }
        return result;
      });
}

template <typename Half, typename Whole>
void Pack(Warp& warp, const Instruction& i, uint32_t lanes) {
  const Slot<Half>* const low = warp.Words<Slot<Half>>(i.in[0]);
  const Slot<Half>* const high = warp.Words<Slot<Half>>(i.in[1]);
  Slot<Whole>* const out = warp.Words<Slot<Whole>>(i.out[0]);
  constexpr int kBits = 8 * sizeof(Half);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    out[lane] = FromSlot<Half>(low[lane]) | Whole{FromSlot<Half>(high[lane])} << kBits;
  }
  warp.SetValid(i.out[0], lanes, warp.Valid(i.in[0]) & warp.Valid(i.in[1]));
}

template <typename Half, typename Whole>
void Unpack(Warp& warp, const Instruction& i, uint32_t lanes) {
  const Slot<Whole>* const in = warp.Words<Slot<Whole>>(i.in[0]);
  for (int half = 0; half < 2; ++half) {
    Slot<Half>* const out = warp.Words<Slot<Half>>(i.out[half]);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      out[lane] = static_cast<Half>(in[lane] >> (half * 8 * sizeof(Half)));
    }
    warp.SetValid(i.out[half], lanes, warp.Valid(i.in[0]));
  }
}

}  // namespace

Execute MoveHalves(bool is_wide, bool packs) {
  if (is_wide) return packs ? Pack<uint32_t, uint64_t> : Unpack<uint32_t, uint64_t>;
  return packs ? Pack<uint16_t, uint32_t> : Unpack<uint16_t, uint32_t>;
}

void AddArithmetic(Rules* rules) {
  Adder adder(rules);
  adder.AddIntegers<int16_t>();
  adder.AddIntegers<uint16_t>();
  adder.AddIntegers<int32_t>();
  adder.AddIntegers<uint32_t>();
  adder.AddIntegers<int64_t>();
  adder.AddIntegers<uint64_t>();
  adder.AddWide<int16_t>();
  adder.AddWide<uint16_t>();
  adder.AddWide<int32_t>();
  adder.AddWide<uint32_t>();
  adder.AddBits<uint16_t>();
  adder.AddBits<uint32_t>();
  adder.AddBits<uint64_t>();
  adder.AddConverts<int8_t>();
  adder.AddConverts<uint8_t>();
  adder.AddConverts<int16_t>();
  adder.AddConverts<uint16_t>();
  adder.AddConverts<int32_t>();
  adder.AddConverts<uint32_t>();
  adder.AddConverts<int64_t>();
  adder.AddConverts<uint64_t>();
  adder.AddPredicates();
  adder.AddFloats();
  adder.AddPairs();
  // An address of global memory is the generic one.
  (*rules)["cvta.to.global.u64"] = (*rules)["mov.u64"];
}

}  // namespace jax_paged::sim
