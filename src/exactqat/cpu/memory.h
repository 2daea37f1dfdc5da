// SPDX-License-Identifier: Apache-2.0
// Memory for large results. Fresh memory costs a page fault for every 4 KiB, several times what a kernel takes to fill it; so
// blocks are asked for in huge pages where the system has them, and freed ones are kept for the next results of their size.
#pragma once
#include <cstddef>

namespace exactqat {

class Block {
 public:
  explicit Block(size_t bytes);  // throws std::bad_alloc
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_;
  size_t size_, capacity_;
};

}  // namespace exactqat
