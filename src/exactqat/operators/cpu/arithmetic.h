// SPDX-License-Identifier: Apache-2.0
// Small steps that several kernels share and that a compiler must not improve.
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

namespace exactqat {

// TensorFlow's clamp: NaN in x survives, a NaN bound is ignored.
template <class T>
inline T clamp(T x, T low, T high) {
  const T below = high < x ? high : x;
  return below < low ? low : below;
}

// gradient * (keep ? 1 : 0). The product keeps NaN, infinity and the sign of zero, and flushes denormals. Written as a
// choice between 1 and 0, compilers turn it into a choice between gradient itself and gradient * 0, which flushes nothing.
template <class T>
inline T masked(T gradient, bool keep) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return gradient * std::bit_cast<T>(-Bits(keep) & std::bit_cast<Bits>(T(1)));
}

}  // namespace exactqat
