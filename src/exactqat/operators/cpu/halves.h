// SPDX-License-Identifier: Apache-2.0
// The two 16-bit dtypes: widened to float32 exactly, rounded from it to nearest even. No step depends on denormal float32,
// because these conversions must not depend on what the processor does with them.
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

// Choices instead of branches, here and below: compilers make vectors of them.
inline float widened(float16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, magnitude = value.bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (uint32_t(112) << 23), infinite = 0x7f800000 | magnitude << 13;
  const uint32_t denormal = std::bit_cast<uint32_t>(float(int32_t(magnitude)) * 0x1p-24f);
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00 ? infinite : magnitude >= 0x400 ? normal : denormal));
}

inline void round_to(bfloat16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A quiet NaN; rounding could make it infinity.
  to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void round_to(float16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  const uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff), infinity = 0x7c00;
  const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (uint32_t(112) << 23)) >> 13;
  // The last bit of a sum from 0.5 on is worth the smallest denormal.
  const uint32_t small = magnitude < 0x38800000 ? magnitude : 0;
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(small) + 0.5f) - 0x3f000000;
  const uint32_t finite = magnitude >= 0x38800000 ? normal : denormal;
  // From 65520 on, half way to the next step, infinity.
  to.bits = uint16_t(sign | (magnitude > 0x7f800000 ? nan : magnitude >= 0x477ff000 ? infinity : finite));
}

}  // namespace exactqat
