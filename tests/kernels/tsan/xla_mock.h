// SPDX-License-Identifier: Apache-2.0

// As much of XLA as the CPU handlers need: a thread pool behind the FFI's C API, and call frames.
//
// Threads of a pool share nothing but what the handlers share. Each has a queue of its own, and
// what the mock counts is counted by relaxed atomics, which order nothing: else ThreadSanitizer
// would take two accesses for ordered that are so by the mock alone.

#ifndef JAX_PAGED_TESTS_TSAN_XLA_MOCK_H_
#define JAX_PAGED_TESTS_TSAN_XLA_MOCK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_paged::tsan {

// XLA's intra-op pool.
class ThreadPool {
 public:
  // Without `threads`, a task is run at once by the thread that schedules it.
  ThreadPool(int64_t num_threads, bool threads);
  ~ThreadPool();  // runs what is left
  ThreadPool(const ThreadPool&) = delete;

  int64_t num_threads() const { return num_threads_; }
  // To the next thread. Unless a thread of the pool calls, waits a while until the task has begun:
  // else, on a busy machine, the caller would do all the work alone, and nothing could race.
  void Schedule(std::function<void()> task);
  // To the thread of this number, without waiting.
  void ScheduleOn(int64_t thread, std::function<void()> task);

 private:
  struct Thread;
  void Work(Thread* thread);
  static int64_t Push(Thread* thread, std::function<void()> task);
  static void Release(Thread* thread, int64_t number);

  const int64_t num_threads_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::atomic<uint64_t> next_{0};
};

// How many tasks, scheduled by this thread, have begun while it waited for them.
extern thread_local int64_t tasks_begun;

// Memory aligned as XLA's.
class Memory {
 public:
  explicit Memory(size_t bytes = 0, unsigned char fill = 0) : bytes_(bytes) {
    Line line;
    for (unsigned char& byte : line.bytes) byte = fill;
    lines_.assign(bytes / sizeof(Line) + 1, line);
  }
  char* data() const { return reinterpret_cast<char*>(const_cast<Line*>(lines_.data())); }
  size_t size() const { return bytes_; }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<Line> lines_;
  size_t bytes_;
};

struct Array {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  Memory memory;

  int64_t size() const;
};

// Bytes of an element.
size_t WidthOf(XLA_FFI_DataType type);

struct ResultShape {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  int operand = -1;      // that the result updates in place, or -1
  bool is_real = false;  // whether it must be free of NaN, which unused memory is full of
};

using Attribute = std::variant<bool, int64_t, float, std::string, std::vector<int64_t>>;

// A call of a handler. Several threads may run it at once, each with its own results.
struct Call {
  std::string name;
  XLA_FFI_Handler* handler;
  std::vector<Array> operands;
  std::vector<ResultShape> results;
  std::map<std::string, Attribute> attributes;  // sorted, as XLA does
  int times = 1;                                // that a round has it: more where it is quick
};

// Runs a call on a pool, with `fill` in each byte of what it is to write. Returns the results, or
// throws std::runtime_error with the error that the handler returned.
std::vector<Memory> Run(const Call& call, ThreadPool* pool, unsigned char fill);

}  // namespace jax_paged::tsan

#endif  // JAX_PAGED_TESTS_TSAN_XLA_MOCK_H_
