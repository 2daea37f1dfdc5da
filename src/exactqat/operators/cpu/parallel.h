// SPDX-License-Identifier: Apache-2.0
// Running independent tasks on all cores, with denormals flushed. What a task computes must not depend on which thread runs
// it: kernels cut their work by shape alone.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace exactqat {

// TensorFlow's kernels treat denormal operands and results as zeros (FTZ and DAZ); so does every kernel here while one lives.
class FlushDenormals {
 public:
#if defined(__SSE2__) || defined(_M_X64)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  // FZ flushes operands and results alike, these before they are rounded: see flushed.h. Nothing else is set, so that neither how
  // float16 is converted nor when denormals are flushed depends on the caller.
  FlushDenormals() {
    constexpr uint64_t kFlush = uint64_t{1} << 24;
    asm volatile("mrs %0, fpcr" : "=r"(control_)::"memory");
    asm volatile("mrs %0, fpsr" : "=r"(status_)::"memory");
    asm volatile("msr fpcr, %0" ::"r"(kFlush) : "memory");
  }
  ~FlushDenormals() {
    asm volatile("msr fpcr, %0" ::"r"(control_) : "memory");
    asm volatile("msr fpsr, %0" ::"r"(status_) : "memory");
  }
#else
#error "say here how this processor flushes denormals"
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__aarch64__)
  uint64_t control_, status_;
#else
  unsigned saved_;
#endif
};

// How many threads are asked for. There are fewer where the system gives no more, and never many times as many as processors.
int thread_count();
void set_thread_count(int count);

// To be called once, before any other thread or process is made of this one: a forked child has none of its parent's threads, and
// what they held stays locked there.
void prepare_for_forks();

// From now on work that the process's first thread starts runs on the OpenMP threads of `library`, a loaded shared library, if it
// has any. Such threads stay awake for milliseconds between two jobs, and on as many threads of our own they would take turns
// with them. Returns whether threads were found. In a forked child none are: OpenMP may wait there for those of the parent.
bool share_threads(const std::string& library);

// Whether a thread begins with the first of its tasks or with the last one. A second pass over the same elements goes backwards:
// what was read last is still in the cache.
enum class Order { forwards, backwards };

void run_tasks(int64_t tasks, Order order, const std::function<void(int64_t)>& task);

// task(i) for i in [0, tasks), on several threads if the whole is worth it. `cost` is about the number of elements that all tasks
// touch together. The order is a wish.
template <class Task>
void parallel_for(int64_t tasks, int64_t cost, Task&& task, Order order = Order::forwards) {
  constexpr int64_t kWorthAThread = 32768;
  if (tasks <= 1 || cost < kWorthAThread || thread_count() == 1) {
    for (int64_t i = 0; i < tasks; ++i) task(order == Order::forwards ? i : tasks - 1 - i);
    return;
  }
  run_tasks(tasks, order, [&](int64_t i) { task(i); });
}

}  // namespace exactqat
