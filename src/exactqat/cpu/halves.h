// SPDX-License-Identifier: Apache-2.0
// The two 16-bit dtypes: widened to float32 exactly, rounded from it to nearest even. In integers, because these conversions
// must not depend on what the processor does with denormals.
#pragma once
#include <bit>
#include <cstdint>

namespace exactqat {

struct float16 {
  uint16_t bits;
};

struct bfloat16 {
  uint16_t bits;
};

inline float widened(bfloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }

inline float widened(float16 value) {
  const uint16_t bits = value.bits;
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = float(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline void round_to(bfloat16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A quiet NaN; rounding could make it infinity.
  if ((bits & 0x7fffffff) > 0x7f800000) to.bits = uint16_t(bits >> 16 | 0x40);
  else to.bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void round_to(float16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) {
    to.bits = uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  } else if (magnitude >= 0x477ff000) {  // from 65520 on, half way to the next step, infinity
    to.bits = uint16_t(sign | 0x7c00);
  } else if (magnitude >= 0x38800000) {  // a normal number
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    to.bits = uint16_t(sign | (rounded - (uint32_t(112) << 23)) >> 13);
  } else if (magnitude < 0x33000000) {  // less than half of the smallest denormal
    to.bits = sign;
  } else {
    const uint32_t exponent = magnitude >> 23, mantissa = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t shift = 126 - exponent;  // to units of 2^-24: 14 to 24
    const uint32_t kept = mantissa >> shift, rest = mantissa & ((uint32_t(1) << shift) - 1), half = uint32_t(1) << (shift - 1);
    to.bits = uint16_t(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
  }
}

}  // namespace exactqat
