// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <list>
#include <mutex>
#include <new>
#include <string>

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

// Bytes of the last cache as this processor sees it. In a virtual machine the C library may count what all its host's have.
int64_t last_cache() {
  for (const char* index : {"3", "2"}) {
    std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/index") + index + "/size");
    int64_t size;
    char unit;
    if (file >> size >> unit && unit == 'K') return size << 10;
  }
  return int64_t{32} << 20;
}

}  // namespace

int64_t too_large_for_the_cache() {
  static const int64_t bytes = std::max(last_cache() / 2, int64_t{4} << 20);
  return bytes;
}

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
