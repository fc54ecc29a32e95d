// SPDX-License-Identifier: Apache-2.0

// Runs every handler of the CPU module on a pool of threads, several calls at once, for
// ThreadSanitizer to watch; and compares the results with those of one thread, bit for bit.
//
//   check [WORD [ROUNDS]]   runs the calls that have WORD in their names, so many times
//
// Prints a line per call. Fails where results differ, where they hold NaN that unused memory is
// full of, and where no second thread took part: what one thread does alone cannot race.

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "cpu/attention/kernels.h"

namespace jax_paged::tsan {
namespace {

constexpr int64_t kThreads = 4;
constexpr size_t kCallers = 3;

using Results = std::vector<Memory>;

struct Tally {
  explicit Tally(size_t num_calls) : begun(num_calls) {}

  std::vector<std::atomic<int64_t>> begun;  // tasks that another thread began in time
};

// All calls, beginning with one of `first`.
std::vector<Results> RunAll(const std::vector<Call>& calls, ThreadPool* pool, size_t first,
                            unsigned char fill, Tally* tally) {
  std::vector<Results> results(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    const size_t index = (i + first) % calls.size();
    tasks_begun = 0;
    for (int time = 0; time < calls[index].times; ++time) {
      results[index] = Run(calls[index], pool, fill);
    }
    tally->begun[index].fetch_add(tasks_begun, std::memory_order_relaxed);
  }
  return results;
}

// The results of kCallers that run all calls at once, each on its own thread or, as XLA may, on
// one of the pool.
std::vector<std::vector<Results>> RunAtOnce(const std::vector<Call>& calls, ThreadPool* pool,
                                            bool on_pool, Tally* tally) {
  using Task = std::packaged_task<std::vector<Results>()>;
  std::vector<std::thread> threads;
  std::vector<std::future<std::vector<Results>>> running;
  for (size_t i = 0; i < kCallers; ++i) {
    auto task = std::make_shared<Task>(
        [=, &calls] { return RunAll(calls, pool, i * calls.size() / kCallers, 0xee, tally); });
    running.push_back(task->get_future());
    if (on_pool) {
      pool->ScheduleOn(static_cast<int64_t>(i), [task] { (*task)(); });
    } else {
      threads.emplace_back([task] { (*task)(); });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::vector<Results>> results;
  for (auto& caller : running) results.push_back(caller.get());
  return results;
}

bool HoldsNan(const Call& call, const Results& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const ResultShape& shape = call.results[i];
    const int64_t count = static_cast<int64_t>(results[i].size() / WidthOf(shape.type));
    for (int64_t e = 0; shape.is_real && e < count; ++e) {
      if (std::isnan(ElementOf(shape.type, results[i].data(), e))) return true;
    }
  }
  return false;
}

// What is wrong with the results of a call, or "".
std::string Compare(const Results& got, const Results& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(got[i].data(), expected[i].data(), expected[i].size()) != 0) {
      return "result " + std::to_string(i) + " has other bits than one thread's";
    }
  }
  return "";
}

int Main(const std::string& word, int rounds) {
  std::vector<Call> calls;
  for (const auto& made : {AttentionCalls(), OtherCalls()}) {
    for (const Call& call : made) {
      if (call.name.find(word) != std::string::npos) calls.push_back(call);
    }
  }
  Tally tally(calls.size()), none(calls.size());
  ThreadPool pool(kThreads, /*threads=*/true);
  // As many threads in name, so that the work is cut in the same pieces.
  ThreadPool alone(kThreads, /*threads=*/false);
  std::vector<Results> expected;
  std::vector<std::string> wrong(calls.size());
  for (int round = 0; round < rounds; ++round) {
    const auto callers = RunAtOnce(calls, &pool, /*on_pool=*/round % 2 == 1, &tally);
    // Not before: the first calls of the process, which make what later ones find, are to be made
    // at once.
    if (round == 0) expected = RunAll(calls, &alone, 0, 0x11, &none);
    for (size_t i = 0; i < calls.size(); ++i) {
      for (const std::vector<Results>& results : callers) {
        if (wrong[i].empty()) wrong[i] = Compare(results[i], expected[i]);
      }
    }
  }
  int failures = calls.empty();
  for (size_t i = 0; i < calls.size(); ++i) {
    const int64_t begun = tally.begun[i].load();
    if (HoldsNan(calls[i], expected[i])) wrong[i] = "unused memory is in the results";
    if (wrong[i].empty() && begun == 0) wrong[i] = "its work was one thread's: make it larger";
    std::printf("%-32s %3d tasks by other threads  %s\n", calls[i].name.c_str(),
                static_cast<int>(begun), wrong[i].empty() ? "ok" : wrong[i].c_str());
    failures += !wrong[i].empty();
  }
  std::printf("%s kernels: %s\n", cpu::ChosenKernels().isa, failures ? "FAILED" : "ok");
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace jax_paged::tsan

int main(int argc, char** argv) {
  try {
    return jax_paged::tsan::Main(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
