// SPDX-License-Identifier: Apache-2.0

#include "xla_mock.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

struct XLA_FFI_Error {  // opaque to the handlers
  std::string message;
};

namespace jax_paged::tsan {

thread_local int64_t tasks_begun = 0;

namespace {

thread_local bool in_pool = false;

// A task begins no earlier than the last helper of its loop, or after this time: else, of little
// work, the first one would have done all by then.
constexpr auto kHold = std::chrono::milliseconds(1);

// Whether `done` came true in time.
template <typename Done>
bool Spin(std::chrono::microseconds time, const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

ThreadPool* PoolOf(XLA_FFI_ExecutionContext* context) {
  return reinterpret_cast<ThreadPool*>(context);
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}

void GetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  PoolOf(args->ctx)->Schedule([task = args->task, data = args->data] { task(data); });
  return nullptr;
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = PoolOf(args->ctx)->num_threads();
  return nullptr;
}

// What is left out is null: a handler that comes to use it fails at once.
const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = CreateError;
    made.XLA_FFI_Error_GetMessage = GetMessage;
    made.XLA_FFI_Error_Destroy = DestroyError;
    made.XLA_FFI_ThreadPool_Schedule = Schedule;
    made.XLA_FFI_ThreadPool_NumThreads = NumThreads;
    return made;
  }();
  return &api;
}

// The attributes of a call as a frame has them.
struct Attributes {
  explicit Attributes(const std::map<std::string, Attribute>& attributes) {
    for (const auto& [name, value] : attributes) {
      names.push_back({name.data(), name.size()});
      if (const std::string* text = std::get_if<std::string>(&value)) {
        types.push_back(XLA_FFI_AttrType_STRING);
        texts.push_back({text->data(), text->size()});
        values.push_back(&texts.back());
        continue;
      }
      if (const auto* list = std::get_if<std::vector<int64_t>>(&value)) {
        types.push_back(XLA_FFI_AttrType_ARRAY);
        arrays.push_back({XLA_FFI_DataType_S64, list->size(), const_cast<int64_t*>(list->data())});
        values.push_back(&arrays.back());
        continue;
      }
      types.push_back(XLA_FFI_AttrType_SCALAR);
      if (const bool* x = std::get_if<bool>(&value)) {
        scalars.push_back({XLA_FFI_DataType_PRED, const_cast<bool*>(x)});
      } else if (const int64_t* x = std::get_if<int64_t>(&value)) {
        scalars.push_back({XLA_FFI_DataType_S64, const_cast<int64_t*>(x)});
      } else {
        scalars.push_back({XLA_FFI_DataType_F32, const_cast<float*>(std::get_if<float>(&value))});
      }
      values.push_back(&scalars.back());
    }
    for (XLA_FFI_ByteSpan& name : names) name_pointers.push_back(&name);
  }

  std::vector<XLA_FFI_AttrType> types;
  std::deque<XLA_FFI_ByteSpan> names, texts;  // of a deque, addresses stay
  std::deque<XLA_FFI_Scalar> scalars;
  std::deque<XLA_FFI_Array> arrays;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> values;
};

}  // namespace

struct ThreadPool::Thread {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  int64_t num_scheduled = 0;
  bool stop = false;
  std::atomic<int64_t> num_begun{0};
  std::atomic<int64_t> num_released{0};
  std::thread thread;
};

ThreadPool::ThreadPool(int64_t num_threads, bool threads) : num_threads_(num_threads) {
  for (int64_t i = 0; threads && i < num_threads; ++i) {
    threads_.push_back(std::make_unique<Thread>());
    Thread* const thread = threads_.back().get();
    thread->thread = std::thread([this, thread] { Work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  for (const auto& thread : threads_) {
    std::lock_guard<std::mutex> lock(thread->mutex);
    thread->stop = true;
    thread->wake.notify_one();
  }
  for (const auto& thread : threads_) thread->thread.join();
}

void ThreadPool::Work(Thread* thread) {
  in_pool = true;
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(thread->mutex);
      thread->wake.wait(lock, [&] { return thread->stop || !thread->tasks.empty(); });
      if (thread->tasks.empty()) return;
      task = std::move(thread->tasks.front());
      thread->tasks.pop_front();
    }
    const int64_t number = thread->num_begun.fetch_add(1, std::memory_order_relaxed) + 1;
    Spin(kHold, [&] { return thread->num_released.load(std::memory_order_relaxed) >= number; });
    task();
  }
}

// How many tasks the thread has now got, in all.
int64_t ThreadPool::Push(Thread* thread, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(thread->mutex);
  thread->tasks.push_back(std::move(task));
  thread->wake.notify_one();
  return ++thread->num_scheduled;
}

// Lets the thread run its first `number` tasks.
void ThreadPool::Release(Thread* thread, int64_t number) {
  int64_t released = thread->num_released.load(std::memory_order_relaxed);
  while (released < number &&
         !thread->num_released.compare_exchange_weak(released, number, std::memory_order_relaxed)) {
  }
}

void ThreadPool::ScheduleOn(int64_t number, std::function<void()> task) {
  Thread* const thread = threads_[static_cast<size_t>(number)].get();
  Release(thread, Push(thread, std::move(task)));
}

void ThreadPool::Schedule(std::function<void()> task) {
  if (threads_.empty()) return task();
  const uint64_t next = next_.fetch_add(1, std::memory_order_relaxed) % threads_.size();
  Thread* const thread = threads_[next].get();
  const int64_t number = Push(thread, std::move(task));
  if (in_pool) return Release(thread, number);
  // The first one is waited for as long as it takes: it comes after tasks that do not wait.
  const auto patience = std::chrono::milliseconds(tasks_begun == 0 ? 60'000 : 3);
  const auto begun = [&] { return thread->num_begun.load(std::memory_order_relaxed) >= number; };
  tasks_begun += Spin(patience, begun);

  thread_local std::vector<std::pair<Thread*, int64_t>> held;
  thread_local std::chrono::steady_clock::time_point last;
  const auto now = std::chrono::steady_clock::now();
  if (now - last > 3 * kHold) held.clear();  // of a loop with few helpers: they run
  last = now;
  held.emplace_back(thread, number);
  if (held.size() + 1 < threads_.size()) return;  // more of this loop may come
  for (const auto& [held_thread, held_number] : held) Release(held_thread, held_number);
  held.clear();
}

size_t WidthOf(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
      return 4;
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16:
      return 2;
    default:
      return 1;
  }
}

int64_t Array::size() const {
  int64_t size = 1;
  for (const int64_t dim : dims) size *= dim;
  return size;
}

std::vector<Memory> Run(const Call& call, ThreadPool* pool, unsigned char fill) {
  std::vector<Memory> results;
  std::vector<XLA_FFI_Buffer> buffers;
  const auto add = [&](XLA_FFI_DataType type, const std::vector<int64_t>& dims, char* data) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, data,
                       static_cast<int64_t>(dims.size()), const_cast<int64_t*>(dims.data())});
  };
  for (const Array& x : call.operands) add(x.type, x.dims, x.memory.data());
  results.reserve(call.results.size());
  for (const ResultShape& x : call.results) {
    size_t bytes = WidthOf(x.type);
    for (const int64_t dim : x.dims) bytes *= static_cast<size_t>(dim);
    results.emplace_back(bytes, fill);
    char* const data = results.back().data();
    if (x.operand >= 0) {
      XLA_FFI_Buffer& operand = buffers[static_cast<size_t>(x.operand)];
      std::memcpy(data, operand.data, bytes);
      operand.data = data;
    }
    add(x.type, x.dims, data);
  }

  const size_t num_operands = call.operands.size(), num_results = call.results.size();
  std::vector<void*> pointers;
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> arg_types(num_operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(num_results, XLA_FFI_RetType_BUFFER);
  Attributes attributes(call.attributes);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(pool);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(num_operands),
                arg_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(num_results),
                ret_types.data(), pointers.data() + num_operands};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(attributes.types.size()),
                 attributes.types.data(),
                 attributes.name_pointers.data(),
                 attributes.values.data()};
  if (XLA_FFI_Error* error = call.handler(&frame)) {
    const std::string message = error->message;
    delete error;
    throw std::runtime_error(call.name + ": " + message);
  }
  // Read by the caller's thread at once, as by the next op: it must not race with late helpers.
  return std::vector<Memory>(results.begin(), results.end());
}

}  // namespace jax_paged::tsan
