// SPDX-License-Identifier: Apache-2.0

// A GPU that runs kernels on the CPU, one CTA thread per fiber, and looks for what no GPU shows.
//
// Kernels reach it through emu/prim.h only. A fiber runs until it waits at a warp collective or a
// CTA barrier; the seed decides which CTA, which warp and which lane goes on. What is reported, as
// one line with file and line of the kernel source:
//   bounds       every access, against the buffer that the pointer was made from
//   poison       shared memory, results and workspace that are read before they are written
//   races        two threads touch one word of shared memory, one of them writing, with no barrier
//                between. Only __syncwarp (within its warp) and __syncthreads order anything here:
//                the other collectives and cp.async.wait_group do not, although the emulation
//                aligns lanes.
//   cp.async     any touch of its destination between issue and wait_group. The copy happens as
//                late as legal, as early as legal, or by chance either way, by seed.
//   publication  one CTA reads what another wrote in the same launch, unless the write came before
//                a fence before an atomic, and an atomic and a fence came before the read.
//   deadlock     threads of a CTA at different barriers or collectives, or gone before one
// Not shown: bank conflicts, registers, occupancy, memory reordering beyond the above, and the bits
// of fast math.
//
// A race needs no unlucky order to be found: each 4-byte word remembers which threads touched it
// and when, in ticks of a clock that barriers, fences and atomics advance, and any pair that no
// barrier parts is a race.

#ifndef JAX_PAGED_EMU_MACHINE_H_
#define JAX_PAGED_EMU_MACHINE_H_

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace jax_paged::emu {

// Where in the kernel source an operation stands.
struct Site {
  const char* file;
  int line;

  static constexpr Site Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

inline constexpr int kWarpSize = 32;

// The last write of a word of device memory.
struct GlobalWord {
  uint32_t time;
  int32_t launch;  // 0: never written
  int32_t cta;
  int32_t thread;
  uint32_t bytes;  // a bit for each byte that this launch has written
};

// A buffer that kernels may touch. Inputs may only be read and count as written.
struct Region {
  std::string name;
  uintptr_t begin;
  int64_t bytes;
  bool is_input;
  bool is_filled;     // what no launch has written counts as written
  uint8_t* touched;   // null, or set to 1 for each byte that is asked for
  GlobalWord* words;  // not for inputs; from calloc, so that untouched ones cost nothing
};

// Buffers of the coming launches. Pointers made before are void after ClearRegions.
void ClearRegions();
Region* AddRegion(const char* name, const void* begin, int64_t bytes, bool is_input,
                  uint8_t* touched = nullptr);
Region* FindRegion(uintptr_t address);
// Another number after each ClearRegions.
int64_t RegionsEpoch();
// Bytes of a buffer count as written by a launch before the next one.
void MarkWritten(Region* region, int64_t offset, int64_t bytes);

struct LaunchOptions {
  int32_t num_ctas;
  int32_t num_threads;
  int64_t shared_bytes;
  uint32_t seed;
};

// Runs body() in every thread of every CTA. Returns "" or what went wrong.
std::string Launch(const LaunchOptions& options, const std::function<void()>& body);

// Planted bugs. The synchronisation at `site` ("name.cuh:12") is skipped: a barrier or fence does
// nothing, a wait_group leaves one more group in flight. "" = none.
void SkipSite(const std::string& site);
// Every synchronisation that ran since the last call: "SyncWarp name.cuh:12", sorted, once each.
std::vector<std::string> TakeSites();

// ---- what emu/prim.h calls, in a running kernel ----

[[noreturn]] void Fail(Site site, const std::string& what);

int32_t ThreadIndex();
int32_t BlockIndex();
int32_t GridSize();

void SyncThreads(Site site);
void ThreadFence(Site site);

// Runs op(inputs of 32 lanes, outputs of 32 lanes) once all lanes of the warp are here.
using CollectiveOp = void (*)(Site site, const char* inputs, char* outputs);
void Collective(const char* name, Site site, CollectiveOp op, const void* input,
                int64_t input_bytes, void* output, int64_t output_bytes);
void SyncWarp(Site site);

// Check an access and return where the bytes really are.
char* ReadShared(int64_t offset, int64_t bytes, Site site);
char* WriteShared(int64_t offset, int64_t bytes, Site site);
char* ReadSharedByWarp(int64_t offset, int64_t bytes, Site site);  // on behalf of the whole warp

enum class Cache { kAny, kL2, kReadOnly };  // which cache a load may be served from
const char* ReadGlobal(uintptr_t address, const Region* region, int64_t bytes, Cache cache,
                       Site site);
char* WriteGlobal(uintptr_t address, Region* region, int64_t bytes, Site site);
// An atomic read-modify-write: publishes and acquires, see above.
char* AtomicGlobal(uintptr_t address, Region* region, int64_t bytes, Site site);

void CpAsync(int64_t shared_offset, uintptr_t address, const Region* region, int bytes, bool valid,
             Site site);
void CpAsyncCommit();
void CpAsyncWait(int groups_in_flight, Site site);

// Typed front of Collective.
template <typename In, typename Out>
Out WarpCollective(const char* name, Site site, const In& input,
                   void (*op)(Site site, const In* inputs, Out* outputs)) {
  struct Call {
    In input;
    void (*op)(Site, const In*, Out*);
  };
  const Call call = {input, op};
  Out output;
  Collective(
      name, site,
      [](Site s, const char* raw_inputs, char* raw_outputs) {
        In inputs[kWarpSize];
        Out outputs[kWarpSize];
        Call lane;
        for (int i = 0; i < kWarpSize; ++i) {
          std::memcpy(&lane, raw_inputs + i * sizeof(Call), sizeof(Call));
          inputs[i] = lane.input;
        }
        lane.op(s, inputs, outputs);
        std::memcpy(raw_outputs, outputs, sizeof(outputs));
      },
      &call, sizeof(Call), &output, sizeof(Out));
  return output;
}

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_MACHINE_H_
