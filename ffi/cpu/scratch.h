// SPDX-License-Identifier: Apache-2.0

// Scratch memory of a call. Blocks are kept for later calls: memory fresh from the system costs a
// page fault for each 4 KiB, more than a decode step's own work.

#ifndef JAX_PAGED_CPU_SCRATCH_H_
#define JAX_PAGED_CPU_SCRATCH_H_

#include <cstddef>
#include <mutex>
#include <new>
#include <utility>

#include "common/integers.h"

namespace jax_paged::cpu {

// A block of at least `bytes` bytes, aligned to kAlignment, given back to the shared store at the
// end of its scope. Contents are undefined. Throws std::bad_alloc.
class Scratch {
 public:
  static constexpr size_t kAlignment = 64;

  explicit Scratch(size_t bytes) {
    {
      std::lock_guard<std::mutex> lock(store().mutex);
      Block* best = nullptr;
      for (Block& block : store().blocks) {
        if (block.bytes >= bytes && (!best || block.bytes < best->bytes)) best = &block;
      }
      if (best) {
        std::swap(block_, *best);
        return;
      }
    }
    // In steps, so that a block still fits when lengths have grown a little.
    bytes = RoundUp<size_t>(bytes, kStep);
    block_ = {::operator new(bytes, std::align_val_t(kAlignment)), bytes};
  }

  ~Scratch() {
    {
      std::lock_guard<std::mutex> lock(store().mutex);
      Block* smallest = &store().blocks[0];
      for (Block& block : store().blocks) {
        if (block.bytes < smallest->bytes) smallest = &block;
      }
      if (block_.bytes <= kMaxBytes && smallest->bytes < block_.bytes) std::swap(block_, *smallest);
    }
    if (block_.memory) ::operator delete(block_.memory, std::align_val_t(kAlignment));
  }

  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return static_cast<char*>(block_.memory); }

 private:
  struct Block {
    void* memory = nullptr;
    size_t bytes = 0;
  };
  static constexpr int kMaxBlocks = 8;            // two per call in flight
  static constexpr size_t kMaxBytes = 64u << 20;  // larger blocks go back to the system
  static constexpr size_t kStep = 64u << 10;
  struct Store {
    std::mutex mutex;
    Block blocks[kMaxBlocks];
  };

  // Never destroyed: a pool thread may still run while the process exits.
  static Store& store() {
    static Store* const store = new Store;
    return *store;
  }

  Block block_;
};

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_SCRATCH_H_
