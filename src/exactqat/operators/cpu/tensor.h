// SPDX-License-Identifier: Apache-2.0
// Tensors of kernels that compute in T, stored in T or in 16 bits. The latter are widened and rounded in pieces that stay in a
// core's own cache: so their loops are compiled once, and no call has float32 copies of its tensors.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "call.h"
#include "elementwise.h"
#include "halves.h"

namespace exactqat {

constexpr int64_t kPieceElements = 4096;  // of a tensor of 16 bits: as float32, half of the first cache

// Whether tensors computed in T may have 16 bits.
template <class T>
constexpr bool kMayBeHalves = sizeof(T) == 4;

template <class T>
struct Tensor {
  explicit Tensor(const Array& array) : data_(array.data), dtype_(array.dtype) {}

  const void* address() const { return data_; }
  bool in_halves() const { return kMayBeHalves<T> && dtype_ != DType::float32; }
  DType dtype() const { return dtype_; }
  // Where it is stored in T.
  T* data() const { return static_cast<T*>(data_); }
  template <class S>
  S* as() const {
    return static_cast<S*>(data_);
  }

  T operator[](int64_t i) const {
    if (dtype_ == DType::float16) return widened(as<float16>()[i]);
    if (dtype_ == DType::bfloat16) return widened(as<bfloat16>()[i]);
    return data()[i];
  }

  // Where its elements [begin, begin + count) are found, as from its first one on: in itself, or in `room`.
  const T* read(int64_t begin, int64_t count, T* room) const {
    if constexpr (kMayBeHalves<T>) {
      if (in_halves()) {
        widen(data_, dtype_, begin, count, room);
        return room - begin;
      }
    }
    return data();
  }

  // Rounds what is in `room` to its elements [begin, begin + count). Past the cache: see finish_streaming.
  void write(int64_t begin, int64_t count, const T* room, bool past) const {
    if constexpr (kMayBeHalves<T>) round_into(data_, dtype_, begin, count, room, past);
  }

 private:
  void* data_;
  DType dtype_;
};

// Whether a result of 16 bits that is written in pieces goes past the cache.
template <class T>
bool halves_go_past_the_cache(const Tensor<T>& out, int64_t size, bool in_place) {
  return !in_place && size * 2 >= too_large_for_the_cache() && aligned(out.address(), 2);
}

// Computes a result of 16 bits piece by piece from N operands of 16 bits, element by element.
template <class T, size_t N>
struct Pieces {
  Pieces(const Tensor<T>& out, const std::array<Tensor<T>, N>& operands, int64_t most, bool past)
      : out_(out), operands_(operands), most_((most + kLine) / kLine * kLine), past_(past), room_(int64_t{N} * most_) {}
  ~Pieces() {
    if (past_) finish_streaming();
  }
  Pieces(const Pieces&) = delete;

  // The elements [begin, begin + count), at most `most`. make(operands, result): pointers as from the first elements on.
  template <class Make>
  void make(int64_t begin, int64_t count, Make&& make) {
    std::array<const T*, N> operands;
    for (size_t k = 0; k < N; ++k) operands[k] = operands_[k].read(begin, count, room_.data() + k * most_);
    make(operands, room_.data() - begin);
    out_.write(begin, count, room_.data(), past_);
  }

 private:
  Tensor<T> out_;
  std::array<Tensor<T>, N> operands_;
  int64_t most_;
  bool past_;
  LineVector<T> room_;
};

}  // namespace exactqat
