// SPDX-License-Identifier: Apache-2.0
// 16-bit tensors: computed with as float32 ones, rounded once at the end, to nearest even.
#include <algorithm>
#include <bit>
#include <memory>

#include "call.h"
#include "parallel.h"

namespace exactqat {
namespace {

float widen_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // a quiet NaN; rounding could make it infinity
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// In integers, because these conversions must not depend on what the processor does with denormals.
float widen_float16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = float(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t round_to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // from 65520 on, half way to the next step, infinity
  if (magnitude >= 0x38800000) {                                // a normal number
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return uint16_t(sign | (rounded - (uint32_t(112) << 23)) >> 13);
  }
  if (magnitude < 0x33000000) return sign;  // less than half of the smallest denormal
  const uint32_t exponent = magnitude >> 23, mantissa = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t shift = 126 - exponent;  // to units of 2^-24: 14 to 24
  const uint32_t kept = mantissa >> shift, rest = mantissa & ((uint32_t(1) << shift) - 1), half = uint32_t(1) << (shift - 1);
  return uint16_t(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}

template <class Convert, class From, class To>
void convert(const From* from, To* to, int64_t size, Convert one) {
  constexpr int64_t kPiece = 32768;
  parallel_for((size + kPiece - 1) / kPiece, size, [&](int64_t piece) {
    for (int64_t i = piece * kPiece; i < std::min(size, (piece + 1) * kPiece); ++i) to[i] = one(from[i]);
  });
}

bool is_half(const Array& array) { return array.dtype == DType::float16 || array.dtype == DType::bfloat16; }

}  // namespace

DType dtype_of(std::string_view name) {
  if (name == "float16") return DType::float16;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float32") return DType::float32;
  if (name == "float64") return DType::float64;
  if (name == "uint8") return DType::uint8;
  throw std::invalid_argument("no CPU kernel takes " + std::string(name));
}

bool has_halves(const Call& call) {
  for (const auto& arrays : {call.operands, call.results})
    for (const Array& array : arrays)
      if (is_half(array)) return true;
  return false;
}

void run_widened(const Call& call, Kernel kernel) {
  std::vector<Array> arrays;
  std::vector<std::unique_ptr<float[]>> floats;
  const auto widened = [&](const Array& array) {
    Array copy = array;
    if (is_half(array)) {
      floats.push_back(std::make_unique_for_overwrite<float[]>(array.size()));
      copy.data = floats.back().get();
      copy.dtype = DType::float32;
    }
    arrays.push_back(copy);
  };
  for (const Array& array : call.operands) {
    widened(array);
    if (array.dtype == DType::bfloat16)
      convert(array.as<uint16_t>(), arrays.back().as<float>(), array.size(), widen_bfloat16);
    else if (array.dtype == DType::float16)
      convert(array.as<uint16_t>(), arrays.back().as<float>(), array.size(), widen_float16);
  }
  for (const Array& array : call.results) widened(array);
  const size_t operands = call.operands.size();
  const std::span<const Array> all(arrays);
  kernel(Call{all.first(operands), all.subspan(operands), call.numbers});
  for (size_t i = 0; i < call.results.size(); ++i) {
    const Array &array = call.results[i], &computed = arrays[operands + i];
    if (array.dtype == DType::bfloat16) convert(computed.as<float>(), array.as<uint16_t>(), array.size(), round_to_bfloat16);
    else if (array.dtype == DType::float16) convert(computed.as<float>(), array.as<uint16_t>(), array.size(), round_to_float16);
  }
}

}  // namespace exactqat
