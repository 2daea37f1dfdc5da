// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <list>
#include <mutex>
#include <new>

namespace exactqat {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Free {
  void* data;
  size_t capacity;
};

// Freed blocks, the latest first. Never destroyed: arrays may outlive every other static object.
struct Kept {
  std::mutex mutex;
  std::list<Free> blocks;
  size_t bytes = 0;
};

Kept& kept() {
  static Kept* instance = new Kept;
  return *instance;
}

size_t limit() {
  static const size_t bytes = [] {
    const char* asked = std::getenv("EXACTQAT_KEEP_MIB");
    return (asked ? size_t(std::strtoull(asked, nullptr, 10)) : size_t{512}) << 20;
  }();
  return bytes;
}

}  // namespace

Block::Block(size_t bytes) : size_(bytes) {
  if (bytes > size_t(1) << 62) throw std::bad_alloc();
  capacity_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  {
    Kept& pool = kept();
    std::lock_guard lock(pool.mutex);
    for (auto free = pool.blocks.begin(); free != pool.blocks.end(); ++free)
      if (free->capacity >= capacity_ && free->capacity - capacity_ <= capacity_ / 4) {
        data_ = free->data;
        capacity_ = free->capacity;
        pool.bytes -= capacity_;
        pool.blocks.erase(free);
        return;
      }
  }
  data_ = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
  madvise(data_, capacity_, MADV_HUGEPAGE);  // a wish; ordinary pages do as well
}

Block::~Block() {
  Kept& pool = kept();
  std::lock_guard lock(pool.mutex);
  pool.blocks.push_front({data_, capacity_});
  pool.bytes += capacity_;
  while (pool.bytes > limit()) {
    const Free oldest = pool.blocks.back();
    pool.blocks.pop_back();
    pool.bytes -= oldest.capacity;
    munmap(oldest.data, oldest.capacity);
  }
}

}  // namespace exactqat
