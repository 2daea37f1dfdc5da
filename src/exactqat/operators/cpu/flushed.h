// SPDX-License-Identifier: Apache-2.0
// Which results are flushed to zero as denormal (docs/decisions/arm64.md). x86, and with it TensorFlow, decides after rounding, as
// if to an exponent without limit; ARM decides before. So they differ in one result: what lies below the smallest normal number
// and rounds up to it. `flushed_...` are the operations as x86 does them, on any processor. They are for where that number and
// zero lead to different results; the plain operators are for where they do not.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace exactqat {

template <class T>
constexpr T kSmallest = std::numeric_limits<T>::min();
// 64 binary orders higher the smallest normal number has company below, and what overflows there is far from denormal.
template <class T>
constexpr T kUp = T(0x1p64);

// The leading bits of the magnitudes of float64 values that round up to float32's smallest normal number.
constexpr uint64_t kLeadingBits = 0x7ffffffff0000000, kLastLeadingBit = 0x10000000, kRoundsUpToSmallest = 0x380ffffff0000000;

#if defined(__aarch64__)

// A result, determined from the same one 64 binary orders higher.
template <class T>
inline T flushed_by(T up, T result) {
  return std::abs(up) == kSmallest<T> * kUp<T> ? std::copysign(kSmallest<T>, up) : result;
}

inline float flushed_product(float a, float b) { return flushed_by(a * kUp<float> * b, a * b); }
inline double flushed_product(double a, double b) { return flushed_by(a * kUp<double> * b, a * b); }
inline float flushed_quotient(float a, float b) { return flushed_by(a * kUp<float> / b, a / b); }
inline double flushed_quotient(double a, double b) { return flushed_by(a * kUp<double> / b, a / b); }
inline float flushed_fused_multiply_add(float a, float b, float c) {
  return flushed_by(std::fma(a * kUp<float>, b, c * kUp<float>), std::fma(a, b, c));
}
inline double flushed_fused_multiply_add(double a, double b, double c) {
  return flushed_by(std::fma(a * kUp<double>, b, c * kUp<double>), std::fma(a, b, c));
}

// Rounded to T.
template <class T, class From>
inline T flushed_to(From value) {
  if constexpr (std::is_same_v<From, double> && std::is_same_v<T, float>)
    if ((std::bit_cast<uint64_t>(value) & kLeadingBits) == kRoundsUpToSmallest)
      return std::copysign(kSmallest<float>, float(value));
  return T(value);
}

// Whether a result was flushed since `forget_flushed`, rightly or not. What counts is what is stored before; the compiler may move
// the rest.
inline void forget_flushed() { asm volatile("msr fpsr, %0" ::"r"(uint64_t{0}) : "memory"); }
inline bool has_flushed() {
  uint64_t status;
  asm volatile("mrs %0, fpsr" : "=r"(status)::"memory");
  constexpr uint64_t kUnderflow = 1 << 3;
  return status & kUnderflow;
}

#else

template <class T>
inline T flushed_product(T a, T b) {
  return a * b;
}
template <class T>
inline T flushed_quotient(T a, T b) {
  return a / b;
}
template <class T>
inline T flushed_fused_multiply_add(T a, T b, T c) {
  return std::fma(a, b, c);
}
template <class T, class From>
inline T flushed_to(From value) {
  return T(value);
}

#endif

}  // namespace exactqat
