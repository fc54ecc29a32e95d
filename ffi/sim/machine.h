// SPDX-License-Identifier: Apache-2.0

// A GPU that executes PTX on the CPU, a warp at a time.
//
// Shadow memory is the emulator's (emu/): bounds, memory read before it is written, races, cp.async
// that lands late, publication between CTAs. Beside those it reports
//   registers    an address, a predicate or a stored value that was never computed
//   divergence   an instruction of the whole warp that not all its lanes reach, and so a hang
//   barriers     threads that wait at one while others have ended or wait elsewhere
//   launches     a thread of a launch that may overlap the one before it, which touches device
//                memory, or ends, before griddepcontrol.wait
// Lanes of a warp that part at a branch run group by group, the one that is furthest back first,
// and join where they meet; the ISA promises no order among them, and no kernel may need one.

#ifndef JAX_PAGED_SIM_MACHINE_H_
#define JAX_PAGED_SIM_MACHINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "sim/program.h"

namespace jax_paged::sim {

struct Dim {
  uint32_t x, y, z;

  int64_t count() const { return int64_t{x} * y * z; }
};

struct Grid {
  const Program* program;
  Dim ctas;
  Dim threads;               // of a CTA
  int64_t dynamic_shared;    // bytes
  std::vector<char> params;  // the kernel's arguments, laid out as its PTX says
  bool overlaps = false;     // may begin before the launch before it has ended
};

// Runs all CTAs, in an order drawn from the seed. Returns "" or what went wrong, in one line.
std::string Run(const Grid& grid, uint32_t seed);

}  // namespace jax_paged::sim

#endif  // JAX_PAGED_SIM_MACHINE_H_
