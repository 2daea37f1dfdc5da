// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <dlfcn.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "memory.h"

#if defined(__SSE2__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace exactqat {
namespace {

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return int(std::max(1u, std::thread::hardware_concurrency()));
}

int asked_for() {
  if (const char* asked = std::getenv("EXACTQAT_NUM_THREADS")) {
    const long count = std::strtol(asked, nullptr, 10);
    if (count > 0) return int(std::min<long>(count, std::numeric_limits<int>::max()));
  }
  return available_cores();
}

// More threads than processors help nobody; some more are made, so that what depends on their number can be tried anywhere.
int most_threads() {
  static const int count = std::max(available_cores(), 64);
  return count;
}

// What is left of a thread's share of the tasks: those from `begin` to `end`.
class Share {
 public:
  static constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();

  void set(int64_t begin, int64_t end) { left_ = uint64_t(end) << 32 | uint64_t(begin); }

  // The first task that is left, or the last one; -1 if there is none.
  int64_t take(bool last) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t begin = uint32_t(left), end = uint32_t(left >> 32);
      if (begin >= end) return -1;
      const uint64_t rest = last ? uint64_t{end - 1} << 32 | begin : uint64_t{end} << 32 | (begin + 1);
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) return last ? end - 1 : begin;
    }
  }

 private:
  alignas(64) std::atomic<uint64_t> left_{0};
};

// Each thread has a share of the tasks, neighbours of each other, the same one in pass after pass and call after call: so it finds
// in its own cache what it has read and written before. When its share is done it takes from the far ends of the others.
struct Job {
  Job(const std::function<void(int64_t)>& task, int64_t tasks, Order order, int workers)
      : task(task), order(order), seats(workers), count(workers + 1), shares(few) {
    if (count > int64_t(std::size(few))) many = std::vector<Share>(count), shares = many.data();
    for (int64_t i = 0, begin = 0; i < count; ++i) {
      const int64_t end = begin + tasks / count + (i < tasks % count);
      shares[i].set(begin, end);
      begin = end;
    }
  }

  const std::function<void(int64_t)>& task;
  const Order order;
  std::atomic<int> seats;  // threads that may still join the caller
  std::atomic<bool> failed{false};
  std::mutex failure_mutex;
  std::exception_ptr failure;

  // The work of thread `number`, 0 being the caller.
  void work(int number) {
    FlushDenormals flush;
    for (int64_t other = 0; other < count; ++other) {
      Share& share = shares[(number + other) % count];
      const bool last = (order == Order::backwards) != (other > 0);
      for (int64_t i; !failed && (i = share.take(last)) >= 0;) {
        try {
          task(i);
        } catch (...) {
          std::lock_guard lock(failure_mutex);
          if (!failure) failure = std::current_exception();
          failed = true;
        }
      }
    }
  }

 private:
  const int64_t count;
  Share few[8];  // where memory need not be asked for
  std::vector<Share> many;
  Share* shares;
};

// Waits actively for a while, because the next call of a program, or the end of this one, is often microseconds away and waking a
// thread takes longer than a small tensor.
template <class Condition>
bool spin_until(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
#if defined(__SSE2__) || defined(_M_X64)
      _mm_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return condition();
}

// A thread of the pool. Some kernels, those of small virtual machines among them, wake a thread on the processor of the one that
// wakes it, where it waits until that one has done all the work alone. So a thread that sleeps is kept off that processor.
class Worker {
 public:
  template <class Serve>
  explicit Worker(Serve serve) : thread_([this, serve] {
#if defined(__linux__)
    id_ = pid_t(syscall(SYS_gettid));
#endif
    serve(*this);
  }) {}

  void join() { thread_.join(); }

  template <class Sleep>
  void sleep(Sleep&& sleep) {
    asleep_ = true;
    sleep();
    asleep_ = false;
  }

#if defined(__linux__)
  void keep_off(int processor) {
    if (!asleep_ || processor == kept_off_) return;
    cpu_set_t now;
    if (sched_getaffinity(id_, sizeof now, &now) != 0) return;
    if (kept_off_ < 0 || !CPU_EQUAL(&now, &given_)) allowed_ = now;  // the program may have set it meanwhile
    given_ = allowed_;
    CPU_CLR(processor, &given_);
    if (CPU_COUNT(&given_) > 0 && sched_setaffinity(id_, sizeof given_, &given_) == 0) kept_off_ = processor;
  }
#endif

 private:
  std::atomic<bool> asleep_{false};
#if defined(__linux__)
  std::atomic<pid_t> id_{0};  // known before it sleeps
  int kept_off_ = -1;
  cpu_set_t allowed_{}, given_{};
#endif
  std::thread thread_;
};

// Threads that sleep between jobs. One job at a time; a caller that finds the pool busy does its work alone. A caller waits for
// the threads that took part, not for those that did not wake up in time.
class Pool {
 public:
  // Has fewer threads than asked for where the system gives no more, perhaps none.
  explicit Pool(int workers) {
    try {
      for (int i = 0; i < workers; ++i) workers_.emplace_back([this, i](Worker& worker) { serve(worker, i + 1); });
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
  }

  ~Pool() {
    stopping_ = true;
    announce();
    for (Worker& worker : workers_) worker.join();
  }

  int size() const { return int(workers_.size()); }

  bool run(Job& job) {
    if (workers_.empty()) return false;
    std::unique_lock caller(caller_, std::try_to_lock);
    if (!caller) return false;
    job_ = &job;
    announce();
    job.work(0);
    job_ = nullptr;
    if (!spin_until([this] { return inside_ == 0; }))
      for (int inside; (inside = inside_) != 0;) inside_.wait(inside);
    return true;
  }

 private:
  void announce() {
    ++generation_;
#if defined(__linux__)
    // Of many threads the one that waits there is soon done without.
    if (const int processor = sched_getcpu(); processor >= 0 && workers_.size() <= kFew)
      for (Worker& worker : workers_) worker.keep_off(processor);
#endif
    generation_.notify_all();
  }

  [[maybe_unused]] static constexpr size_t kFew = 7;

  void serve(Worker& worker, int number) {
    for (uint32_t seen = 0; !stopping_;) {
      if (!spin_until([&] { return generation_ != seen; })) worker.sleep([&] { generation_.wait(seen); });
      seen = generation_;
      // Entered before the job is looked at: the caller takes the job away first and looks who is inside afterwards.
      ++inside_;
      if (Job* job = job_) job->work(number);
      if (--inside_ == 0) inside_.notify_all();
    }
  }

  std::mutex caller_;
  std::atomic<Job*> job_{nullptr};
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> inside_{0};
  std::atomic<bool> stopping_{false};
  std::list<Worker> workers_;
};

struct Shared {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
  int workers = 0;
};

// Never destroyed: its threads sleep until the process ends.
Shared& shared() {
  static Shared* instance = new Shared;
  return *instance;
}

std::shared_ptr<Pool> get_pool(int workers) {
  Shared& s = shared();
  std::lock_guard lock(s.mutex);
  if (s.workers != workers) {
    s.pool = std::make_shared<Pool>(workers);
    s.workers = workers;
  }
  return s.pool;
}

std::atomic<int> configured{0};

std::atomic<bool> openmp_is_found{false};

[[maybe_unused]] bool forked = false;

#if !defined(_WIN32)
// A forked child has none of its parent's threads: it forgets the pool and makes its own when it needs one. An OpenMP runtime
// would wait for the missing ones.
void forget_threads() {
  new (&shared()) Shared;
  openmp_is_found = false;
  forked = true;
}
#endif

// Only Linux tells what the conditions below ask for; elsewhere threads are never shared.
#if defined(__linux__)

// The OpenMP runtime that another library computes with.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads)() = nullptr;
  int (*thread)() = nullptr;
  int (*in_parallel)() = nullptr;
};
OpenMP openmp;

// Whether this process was forked, and no other program started in it, perhaps long before this module was loaded.
bool is_forked() {
  if (forked) return true;
  const std::string line = first_line("/proc/self/stat");
  // The flags are the seventh field after the program's name, which may hold anything.
  size_t at = line.rfind(')');
  for (int field = 0; field < 7 && at != std::string::npos; ++field) at = line.find(' ', at + 1);
  constexpr unsigned long kForkedWithoutExec = 0x40;
  return at != std::string::npos && (std::strtoul(line.c_str() + at, nullptr, 10) & kForkedWithoutExec) != 0;
}

// An OpenMP runtime ends the process when it cannot make a thread, so its threads are only used where as many can be made.
bool can_make_threads(int count) {
  static std::atomic<int> proven{0};
  if (count <= proven) return true;
  if (count >= most_threads()) return false;
  const bool made = Pool(count).size() == count;
  if (made) proven = count;
  return made;
}

bool on_first_thread() { return syscall(SYS_gettid) == getpid(); }

// An OpenMP runtime keeps a team for every thread that calls it, so only the first thread, where programs train, does so here.
bool run_on_openmp(Job& job) {
  if (!openmp_is_found || !on_first_thread() || openmp.in_parallel() || !can_make_threads(openmp.max_threads() - 1)) return false;
  openmp.parallel(
      [](void* data) {
        Job& job = *static_cast<Job*>(data);
        if (const int number = openmp.thread(); number == 0 || job.seats-- > 0) job.work(number);
      },
      // The team as it is: another size would end threads, which the other library then has to start again.
      &job, unsigned(openmp.max_threads()), 0);
  return true;
}

#else

bool run_on_openmp(Job&) { return false; }

#endif

}  // namespace

int thread_count() {
  int count = configured.load(std::memory_order_relaxed);
  if (count != 0) return count;
  const int asked = asked_for();
  return configured.compare_exchange_strong(count, asked) ? asked : count;  // another thread may have set it meanwhile
}

void set_thread_count(int count) { configured = std::max(1, count); }

void prepare_for_forks() {
  shared();
#if !defined(_WIN32)
  pthread_atfork(nullptr, nullptr, forget_threads);
#endif
  prepare_memory_for_forks();
}

bool share_threads([[maybe_unused]] const std::string& library) {
#if defined(__linux__)
  if (openmp_is_found) return true;
  if (is_forked()) return false;
  void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return false;
  // Looked up in the library and in what it depends on: there may be several OpenMP runtimes in a process.
  const auto find = [handle](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  openmp_is_found = find(openmp.parallel, "GOMP_parallel") && find(openmp.max_threads, "omp_get_max_threads") &&
                    find(openmp.thread, "omp_get_thread_num") && find(openmp.in_parallel, "omp_in_parallel");
#endif
  return openmp_is_found;
}

void run_tasks(int64_t tasks, Order order, const std::function<void(int64_t)>& task) {
  if (tasks > Share::kMost) {
    const int64_t half = tasks / 2;
    run_tasks(half, order, task);
    return run_tasks(tasks - half, order, [&](int64_t i) { task(half + i); });
  }
  const int threads = std::min(thread_count(), most_threads());
  Job job(task, tasks, order, int(std::min<int64_t>(threads, tasks)) - 1);
  if (!run_on_openmp(job) && !get_pool(threads - 1)->run(job)) job.work(0);
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace exactqat
