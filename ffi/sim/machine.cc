// SPDX-License-Identifier: Apache-2.0

#include "sim/machine.h"

#include <immintrin.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>

#include "emu/state.h"
#include "sim/warp.h"

namespace jax_paged::emu {

Machine machine;

std::string Text(Site site) {
  const std::string path = site.file;
  return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(site.line);
}

bool Skips(const char*, Site) { return false; }

void Fail(Site site, const std::string& what) {
  std::string where;
  if (machine.cta != nullptr) {
    where = " (CTA " + std::to_string(machine.cta->index) + ", thread " +
            std::to_string(machine.thread) + ")";
  }
  throw std::runtime_error(Text(site) + ": " + what + where);
}

}  // namespace jax_paged::emu

namespace jax_paged::sim {
namespace {

constexpr int64_t kMostInstructions = int64_t{1} << 27;  // of a launch; then it hangs
constexpr int kMeanSlice = 400;                          // instructions until another warp goes on

struct Cta {
  emu::Cta shadow;
  std::vector<Warp> warps;
};

uint32_t LanesBelow(int64_t count) {
  return count >= kLanes ? kAllLanes : (uint32_t{1} << count) - 1;
}

class Runner {
 public:
  Runner(const Grid& grid, uint32_t seed) : grid_(grid), program_(*grid.program) {
    emu::Machine& m = emu::machine;
    m.options = {static_cast<int32_t>(grid.ctas.count()),
                 static_cast<int32_t>(grid.threads.count()),
                 program_.dynamic_shared_offset + grid.dynamic_shared, seed};
    m.random.seed(seed);
    ++m.launch;
    m.clock = 1;
    m.copy_mode = static_cast<int>(seed % 3);
    m.publications.assign(m.options.num_ctas, {});
    m.cta = nullptr;
  }

  void Run() {
    const int32_t num_ctas = emu::machine.options.num_ctas;
    order_.resize(num_ctas);
    for (int32_t i = 0; i < num_ctas; ++i) order_[i] = i;
    std::shuffle(order_.begin(), order_.end(), emu::machine.random);
    // A few CTAs run at a time; the others wait for one of those to end.
    const size_t resident = std::min<size_t>(1 + emu::machine.options.seed % 4, order_.size());
    for (size_t i = 0; i < resident; ++i) {
      ctas_.push_back(std::make_unique<Cta>());
      Start(ctas_.back().get());
    }
    std::vector<std::pair<Cta*, Warp*>> ready;
    while (true) {
      ready.clear();
      bool is_live = false;
      for (const auto& cta : ctas_) {
        if (cta->shadow.live_threads == 0 && started_ < order_.size()) Start(cta.get());
        is_live |= cta->shadow.live_threads > 0;
        for (Warp& warp : cta->warps) {
          if (warp.live && !warp.barrier) ready.push_back({cta.get(), &warp});
        }
      }
      if (!is_live) return;
      if (ready.empty()) FailHang();
      const auto [cta, warp] = ready[emu::machine.random() % ready.size()];
      emu::machine.cta = &cta->shadow;
      RunWarp(cta, warp, 1 + static_cast<int64_t>(emu::machine.random() % (2 * kMeanSlice)));
    }
  }

 private:
  void Start(Cta* cta) {
    const auto& options = emu::machine.options;
    emu::Cta& shadow = cta->shadow;
    shadow.index = order_[started_++];
    shadow.live_threads = options.num_threads;
    shadow.barrier_time = 0;
    shadow.covered.assign(options.num_threads, 0);
    const int num_warps = (options.num_threads + kLanes - 1) / kLanes;
    shadow.warps.resize(num_warps);
    for (emu::Warp& warp : shadow.warps) warp.sync_time = 0;
    if (!shadow.shared) shadow.shared.reset(new char[options.shared_bytes + 16]);
    std::memset(shadow.shared.get(), 0xff, options.shared_bytes);
    shadow.words.assign((options.shared_bytes + 3) / 4, emu::SharedWord());
    shadow.lanes.resize(options.num_threads);
    for (emu::Lane& lane : shadow.lanes) {
      lane.copies.clear();
      lane.group_sizes.clear();
      lane.fence_time = lane.fence_covers_others = lane.atomic_time = lane.acquire_time = 0;
    }
    cta->warps.resize(num_warps);
    const uint32_t index = static_cast<uint32_t>(shadow.index);
    const Dim at = {index % grid_.ctas.x, index / grid_.ctas.x % grid_.ctas.y,
                    index / grid_.ctas.x / grid_.ctas.y};
    for (int w = 0; w < num_warps; ++w) {
      Warp& warp = cta->warps[w];
      warp.Start(program_, grid_.params.data(), w, options.num_threads, grid_.overlaps);
      for (int lane = 0; lane < kLanes; ++lane) SetSpecials(&warp, at, lane);
    }
  }

  void SetSpecials(Warp* warp, Dim at, int lane) {
    const uint32_t thread = static_cast<uint32_t>(warp->index * kLanes + lane);
    const Dim n = grid_.threads;
    const uint32_t values[kNumSpecials] = {thread % n.x,
                                           thread / n.x % n.y,
                                           thread / n.x / n.y,
                                           n.x,
                                           n.y,
                                           n.z,
                                           at.x,
                                           at.y,
                                           at.z,
                                           grid_.ctas.x,
                                           grid_.ctas.y,
                                           grid_.ctas.z,
                                           uint32_t(lane)};
    for (int s = 0; s < kNumSpecials; ++s) {
      if (!program_.has_special[s]) continue;
      warp->Words<uint32_t>(program_.specials[s])[lane] = values[s];
      warp->Valid(program_.specials[s]) = kAllLanes;
    }
  }

  // The group to run: the one furthest back that does not wait. Groups at one place are joined.
  Group* Choose(Warp* warp) {
    std::vector<Group>& groups = warp->groups;
    for (size_t a = 0; a < groups.size(); ++a) {
      for (size_t b = a + 1; b < groups.size();) {
        if (groups[a].at != groups[b].at) {
          ++b;
          continue;
        }
        groups[a].lanes |= groups[b].lanes;
        groups[a].waits = false;
        groups.erase(groups.begin() + static_cast<int64_t>(b));
      }
    }
    Group* first = nullptr;
    for (Group& group : groups) {
      if (!group.waits && (first == nullptr || group.at < first->at)) first = &group;
    }
    return first;
  }

  void RunWarp(Cta* cta, Warp* warp, int64_t budget) {
    while (budget > 0 && warp->live && !warp->barrier) {
      Group* const group = Choose(warp);
      if (group == nullptr) FailDivergence(*warp);
      RunGroup(cta, warp, group, &budget);
    }
  }

  void RunGroup(Cta* cta, Warp* warp, Group* group, int64_t* budget) {
    const Instruction* const code = program_.code.data();
    const uint32_t lanes = group->lanes;
    const bool is_alone = warp->groups.size() == 1;
    int32_t at = group->at;
    for (; *budget > 0; --*budget) {
      const Instruction& i = code[at];
      if (++executed_ > kMostInstructions) emu::Fail(SiteOf(i), "the launch does not end");
      if (i.is_target && !is_alone && at != group->at) break;  // another group may be here
      uint32_t run = lanes;
      if (i.is_guarded) {
        emu::machine.thread = warp->index * kLanes;
        warp->Need(i.guard, lanes, i, "a predicate");
        run &= i.guard_negated ? ~warp->Predicate(i.guard) : warp->Predicate(i.guard);
      }
      if (i.kind == Kind::kPlain) {
        if (run) i.execute(*warp, i, run);
        ++at;
      } else if (i.kind == Kind::kBranch) {
        if (run == 0) {
          ++at;
        } else if (run == lanes) {
          at = i.target;
          if (!is_alone) break;
        } else {
          group->at = at + 1;
          group->lanes &= ~run;
          warp->groups.push_back({i.target, run, /*waits=*/false});
          return;
        }
      } else if (i.kind == Kind::kConvergent) {
        if (run == 0) {
          ++at;
          continue;
        }
        emu::machine.thread = warp->index * kLanes + std::countr_zero(run);
        const uint32_t needed = Members(*warp, i, run);
        if (run != needed) {
          group->at = at;
          if (is_alone || run != lanes) FailMissing(i, run, needed);
          group->waits = true;
          return;
        }
        i.execute(*warp, i, run);
        ++at;
      } else if (i.kind == Kind::kBarrier) {
        group->at = at;
        if (run != lanes) FailMissing(i, run, lanes);
        if (!is_alone) {
          group->waits = true;
          return;
        }
        warp->barrier = &i;
        Arrive(cta);
        return;
      } else {  // kExit
        group->at = at + 1;
        warp->NeedPrevious(run, i, "the end of a thread");
        Exit(cta, warp, group, run);
        return;
      }
    }
    group->at = at;
  }

  uint32_t Members(Warp& warp, const Instruction& i, uint32_t run) {
    if (i.members < 0) return kAllLanes;
    const Ref ref = i.in[static_cast<size_t>(i.members)];
    warp.Need(ref, run, i, "a member mask");
    return warp.Words<uint32_t>(ref)[std::countr_zero(run)];
  }

  void Exit(Cta* cta, Warp* warp, Group* group, uint32_t run) {
    for (uint32_t left = run; left; left &= left - 1) {
      emu::machine.thread = warp->index * kLanes + std::countr_zero(left);
      if (!emu::machine.lane().copies.empty()) {
        emu::Fail(emu::machine.lane().site, "a thread ended with cp.async copies in flight");
      }
    }
    warp->live &= ~run;
    group->lanes &= ~run;
    cta->shadow.live_threads -= std::popcount(run);
    if (group->lanes == 0) {
      warp->groups.erase(warp->groups.begin() + (group - warp->groups.data()));
    }
  }

  // Lets all go on once the last warp is here.
  void Arrive(Cta* cta) {
    uint32_t any = 0;
    for (Warp& warp : cta->warps) {
      if (!warp.barrier) return;
      const bool reduces = warp.barrier->num_out > 0;
      if (reduces != (cta->warps[0].barrier->num_out > 0)) {
        emu::Fail(SiteOf(*warp.barrier), "bar.sync and bar.red meet at one barrier");
      }
      if (reduces) {
        warp.Need(warp.barrier->in[0], warp.live, *warp.barrier, "the predicate of bar.red");
        any |= warp.Predicate(warp.barrier->in[0]) & warp.live;
      }
    }
    if (cta->shadow.live_threads != emu::machine.options.num_threads) FailHang();
    emu::OrderCta();
    for (Warp& warp : cta->warps) {
      if (warp.barrier->num_out > 0) {
        warp.Predicate(warp.barrier->out[0]) = any ? kAllLanes : 0;
        warp.SetValid(warp.barrier->out[0], warp.live, kAllLanes);
      }
      warp.barrier = nullptr;
      ++warp.groups[0].at;
    }
  }

  static std::string LanesText(uint32_t lanes) {
    char text[16];
    std::snprintf(text, sizeof(text), "%08x", lanes);
    return text;
  }

  [[noreturn]] void FailMissing(const Instruction& i, uint32_t here, uint32_t needed) {
    emu::Fail(SiteOf(i),
              "divergent warp: needs lanes " + LanesText(needed) + ", here are " + LanesText(here));
  }

  [[noreturn]] void FailDivergence(const Warp& warp) {
    std::string text = "divergent warp, for ever:";
    for (const Group& group : warp.groups) {
      text += " lanes " + LanesText(group.lanes) + " at " +
              emu::Text(SiteOf(program_.code[group.at])) + ";";
    }
    emu::machine.thread = warp.index * kLanes;
    emu::Fail(SiteOf(program_.code[warp.groups[0].at]), text);
  }

  [[noreturn]] void FailHang() {
    std::set<std::string> waits;
    const Instruction* last = &program_.code.back();
    for (const auto& cta : ctas_) {
      if (cta->shadow.live_threads == 0) continue;
      for (const Warp& warp : cta->warps) {
        const std::string name =
            "CTA " + std::to_string(cta->shadow.index) + " warp " + std::to_string(warp.index);
        if (warp.barrier) {
          waits.insert(name + ": at the barrier " + emu::Text(SiteOf(*warp.barrier)));
          last = warp.barrier;
        }
        if (warp.live != kAllLanes) waits.insert(name + ": threads that ended");
      }
    }
    std::string text = "deadlock:";
    for (const std::string& wait : waits) text += " [" + wait + "]";
    emu::Fail(SiteOf(*last), text.substr(0, 1000));
  }

  const Grid& grid_;
  const Program& program_;
  std::vector<int32_t> order_;
  size_t started_ = 0;
  int64_t executed_ = 0;
  std::vector<std::unique_ptr<Cta>> ctas_;
};

}  // namespace

void Warp::Start(const Program& program, const char* arguments, int number, int num_threads,
                 bool overlaps) {
  params = arguments;
  param_list = &program.entry.param_list;
  index = number;
  words_.resize(program.num_words + 16);
  valid_.assign(program.num_registers, 0);
  live = LanesBelow(num_threads - int64_t{number} * kLanes);
  waited = overlaps ? 0 : kAllLanes;
  groups.assign(1, {0, live, false});
  barrier = nullptr;
  for (const Constant& constant : program.constants) {
    Valid(constant.ref) = kAllLanes;
    if (constant.bits == 1) {
      Predicate(constant.ref) = static_cast<uint32_t>(constant.value);
    } else if (constant.bits == 64) {
      std::fill_n(Words<uint64_t>(constant.ref), kLanes, constant.value);
    } else {
      std::fill_n(Words<uint32_t>(constant.ref), kLanes, static_cast<uint32_t>(constant.value));
    }
  }
}

void Warp::NeedPrevious(uint32_t lanes, const Instruction& i, const char* what) const {
  if ((waited & lanes) == lanes) return;
  emu::Fail(SiteOf(i), std::string(what) + " before griddepcontrol.wait (PTX line " +
                           std::to_string(i.place.ptx_line) + ")");
}

void Warp::FailUnwritten(const Instruction& i, const char* what) const {
  emu::Fail(SiteOf(i), std::string(what) + " that was never computed (PTX line " +
                           std::to_string(i.place.ptx_line) + ")");
}

emu::Warp& Warp::shadow() const { return emu::machine.cta->warps[static_cast<size_t>(index)]; }

namespace {

// XLA takes subnormal numbers for 0 in its threads; a GPU does not.
class WithSubnormals {
 public:
  WithSubnormals() { std::feholdexcept(&before_), _mm_setcsr(kDefault); }
  ~WithSubnormals() { std::fesetenv(&before_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;
  std::fenv_t before_;
};

}  // namespace

std::string Run(const Grid& grid, uint32_t seed) {
  const WithSubnormals with_subnormals;
  try {
    Runner(grid, seed).Run();
    return "";
  } catch (const std::runtime_error& error) {
    return grid.program->entry.name + ": " + error.what();
  }
}

}  // namespace jax_paged::sim
