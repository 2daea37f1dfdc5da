// SPDX-License-Identifier: Apache-2.0
// How much the caches hold, and memory for large results. Fresh memory costs a page fault for every 4 KiB, several times what a
// kernel takes to fill it; so blocks are asked for in huge pages where the system has them, and freed ones are kept for the next
// results of their size.
#pragma once
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>

namespace exactqat {

// The first line of a small file, empty if it cannot be read. Not by a stream: some toolchains link the C++ library into the module,
// and then the parts of its locale are looked up by numbers that another copy in the process may have given out.
std::string first_line(const std::string& path);

// To be called once: a forked child may go on with the blocks that its parent kept.
void prepare_memory_for_forks();

class Block {
 public:
  explicit Block(size_t bytes);  // throws std::bad_alloc
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void* data() const { return memory_.front().data; }
  size_t size() const { return size_; }

  struct Memory {
    void* data;
    size_t capacity;
  };

 private:
  std::list<Memory> memory_;  // one; its node moves to those that are kept, so that giving memory back needs none
  size_t size_;
};

// A result of this many bytes will not be found in the cache by whoever reads it next; then its memory need not be read before it
// is written. Half of the last cache: the operands take at least as much.
int64_t too_large_for_the_cache();

// The same for a pass over several tensors of so many bytes each, the result among them: they do not fit the last cache.
inline bool too_large_for_the_cache(int64_t tensors, int64_t bytes) { return tensors * bytes >= 2 * too_large_for_the_cache(); }

// Whether an operand is so large that most of it is not near its core. What is not read straight on is then asked for early: the
// processor does not foresee it.
inline bool far_from_the_core(int64_t bytes) { return 4 * bytes >= too_large_for_the_cache(); }

}  // namespace exactqat
