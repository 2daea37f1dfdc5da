// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#else
#include <pthread.h>
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <mutex>
#include <new>
#include <string>
#include <thread>

namespace exactqat {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLeast = size_t{512} << 20;  // what may be kept whatever was in use

// Fresh pages from the system, null if it has none; and back to it.
void* map_pages(size_t bytes) {
#if defined(_WIN32)
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish; ordinary pages do as well
#endif
  return data;
#endif
}

void unmap_pages(void* data, [[maybe_unused]] size_t bytes) {
#if defined(_WIN32)
  VirtualFree(data, 0, MEM_RELEASE);
#else
  munmap(data, bytes);
#endif
}

// Freed blocks, the latest first. Never destroyed: arrays may outlive every other static object.
struct Kept {
  std::mutex mutex;
  std::list<Block::Memory> blocks;
  size_t bytes = 0;
  size_t in_use = 0, most_in_use = 0;  // bytes of the blocks that are not kept

  // Gives the oldest back to the system until no more than `most` bytes are left.
  void shrink(size_t most) {
    while (bytes > most) {
      bytes -= blocks.back().capacity;
      unmap_pages(blocks.back().data, blocks.back().capacity);
      blocks.pop_back();
    }
  }
};

Kept& kept() {
  static Kept* instance = new Kept;
  return *instance;
}

size_t limit() {
  static const size_t bytes = [] {
    const char* asked = std::getenv("EXACTQAT_KEEP_MIB");
    return (asked ? size_t(std::strtoull(asked, nullptr, 10)) : size_t{4096}) << 20;
  }();
  return bytes;
}

// A training step needs what the step before it freed. In use and kept, it is a quarter more than was ever in use at once: sizes that
// come once only are given back.
void trim(Kept& pool) {
  pool.shrink(std::min(limit(), std::max(kLeast, pool.most_in_use + pool.most_in_use / 4 - pool.in_use)));
}

// Bytes of the last cache as this processor sees it. In a virtual machine the C library may count what all its host's have, and
// one of few processors may see the cache that it shares with a hundred others: what no processor has for itself is not counted.
int64_t last_cache() {
  const int64_t most = (int64_t{32} << 20) * std::max(1u, std::thread::hardware_concurrency());
  for (const char* index : {"3", "2"}) {
    const std::string text = first_line(std::string("/sys/devices/system/cpu/cpu0/cache/index") + index + "/size");
    char* unit;
    const int64_t size = std::strtoll(text.c_str(), &unit, 10);
    if (size > 0 && *unit == 'K') return std::min(size << 10, most);
  }
  return int64_t{32} << 20;
}

}  // namespace

std::string first_line(const std::string& path) {
  std::string line;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    for (int c; (c = std::fgetc(file)) != EOF && c != '\n';) line += char(c);
    std::fclose(file);
  }
  return line;
}

int64_t too_large_for_the_cache() {
  static const int64_t bytes = std::max(last_cache() / 2, int64_t{4} << 20);
  return bytes;
}

void prepare_memory_for_forks() {
  limit();
#if !defined(_WIN32)
  pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, [] { kept().mutex.unlock(); });
#endif
}

Block::Block(size_t bytes) : memory_(1), size_(bytes) {
  if (bytes > size_t(1) << 62) throw std::bad_alloc();
  auto& [data, capacity] = memory_.front();
  capacity = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  Kept& pool = kept();
  {
    std::lock_guard lock(pool.mutex);
    pool.in_use += capacity;
    pool.most_in_use = std::max(pool.most_in_use, pool.in_use);
    for (auto free = pool.blocks.begin(); free != pool.blocks.end(); ++free)
      if (free->capacity >= capacity && free->capacity - capacity <= capacity / 4) {
        pool.bytes -= free->capacity;
        pool.in_use += free->capacity - capacity;
        memory_.clear();
        memory_.splice(memory_.begin(), pool.blocks, free);
        return;
      }
    trim(pool);
  }
  data = map_pages(capacity);
  if (data == nullptr) {
    {
      std::lock_guard lock(pool.mutex);
      pool.shrink(0);
    }
    data = map_pages(capacity);
  }
  if (data == nullptr) {
    std::lock_guard lock(pool.mutex);
    pool.in_use -= capacity;
    throw std::bad_alloc();
  }
}

Block::~Block() {
  Kept& pool = kept();
  std::lock_guard lock(pool.mutex);
  pool.bytes += memory_.front().capacity;
  pool.in_use -= memory_.front().capacity;
  pool.blocks.splice(pool.blocks.begin(), memory_);
  trim(pool);
}

}  // namespace exactqat
