// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace exactqat {
namespace {

int available_cores() {
  if (const char* asked = std::getenv("EXACTQAT_NUM_THREADS"))
    if (int count = std::atoi(asked); count > 0) return count;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

struct Job {
  Job(const std::function<void(int64_t)>& task, int64_t tasks) : task(task), tasks(tasks) {}

  const std::function<void(int64_t)>& task;
  const int64_t tasks;
  std::atomic<int64_t> next{0};
  std::mutex failure_mutex;
  std::exception_ptr failure;

  void work() {
    FlushDenormals flush;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      try {
        task(i);
      } catch (...) {
        std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next = tasks;
      }
    }
  }
};

// Threads that sleep between jobs. One job at a time; a caller that finds the pool busy does its work alone.
class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) std::thread([this] { serve(); }).detach();
    workers_ = workers;
  }

  bool run(Job& job) {
    std::unique_lock caller(caller_, std::try_to_lock);
    if (!caller) return false;
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      ++generation_;
      busy_ = workers_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
    return true;
  }

 private:
  void serve() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex caller_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0, workers_ = 0;
};

std::atomic<int> configured{0};
std::mutex pool_mutex;
Pool* pool = nullptr;  // never destroyed: its threads sleep until the process ends
int pool_workers = 0;

// A forked child has none of its parent's threads: it forgets the pool and makes its own when it needs one.
void forget_pool() {
  new (&pool_mutex) std::mutex;
  pool = nullptr;
  pool_workers = 0;
}

Pool* get_pool(int workers) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  std::lock_guard lock(pool_mutex);
  if (pool_workers != workers) {
    pool = new Pool(workers);
    pool_workers = workers;
  }
  return pool;
}

}  // namespace

int thread_count() {
  int count = configured.load(std::memory_order_relaxed);
  if (count == 0) configured = count = available_cores();
  return count;
}

void set_thread_count(int count) { configured = std::max(1, count); }

void run_tasks(int64_t tasks, const std::function<void(int64_t)>& task) {
  Job job(task, tasks);
  if (!get_pool(thread_count() - 1)->run(job)) job.work();
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace exactqat
