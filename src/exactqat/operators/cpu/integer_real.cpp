// SPDX-License-Identifier: Apache-2.0
// Between real numbers and codes: device/tensor.py's quantize and dequantize. Codes are int8 or int16.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "call.h"
#include "parallel.h"

namespace exactqat {
namespace {

constexpr int64_t kPiece = 16384;  // numbers of a task

template <class Code>
void quantize(const Call& call) {
  const Array& x = call.operands[0];
  const auto scale = float(call.numbers.real("scale"));
  const auto zero_point = int32_t(call.numbers.integer("zero_point"));
  // Bounds are whole steps, so that clamping may come first.
  const auto lowest = float(std::numeric_limits<Code>::min() - zero_point), highest = float(std::numeric_limits<Code>::max() - zero_point);
  constexpr float kWhole = 12582912;  // 1.5 * 2^23: beside it, float32 holds whole numbers only
  const int64_t length = x.shape[1], pieces = call.results[1].shape[1];
  parallel_for(x.shape[0] * pieces, x.size(), [&](int64_t task) {
    const int64_t begin = task % pieces * kPiece, count = std::min(kPiece, length - begin);
    const float* values = x.as<float>() + task / pieces * length + begin;
    Code* codes = call.results[0].as<Code>() + task / pieces * length + begin;
    int32_t missing = 0;
    for (int64_t k = 0; k < count; ++k) {
      const bool is_number = values[k] == values[k];
      float steps = (is_number ? values[k] : 0.0f) / scale;
      steps = steps < lowest ? lowest : steps;
      steps = steps > highest ? highest : steps;
      codes[k] = Code(int32_t((steps + kWhole) - kWhole) + zero_point);
      missing |= int32_t(!is_number);
    }
    call.results[1].as<uint8_t>()[task] = uint8_t(missing);
  });
}

// operands: float32 [rows, length]. results: codes; whether there is a NaN, which gets the code of 0, uint8 [rows, pieces]: of every
// 16,384 numbers of a row.
void integer_quantize(const Call& call) {
  if (call.results[0].dtype == DType::int16) quantize<int16_t>(call);
  else quantize<int8_t>(call);
}

template <class Code>
void dequantize(const Call& call) {
  const auto* codes = call.operands[0].as<Code>();
  auto* values = call.results[0].as<float>();
  const auto scale = float(call.numbers.real("scale")), zero_point = float(call.numbers.integer("zero_point"));
  const int64_t size = call.operands[0].size();
  parallel_for((size + kPiece - 1) / kPiece, size, [&](int64_t task) {
    const int64_t end = std::min(size, (task + 1) * kPiece);
    for (int64_t k = task * kPiece; k < end; ++k) values[k] = (float(codes[k]) - zero_point) * scale;
  });
}

// operands: codes. result: float32.
void integer_dequantize(const Call& call) {
  if (call.operands[0].dtype == DType::int16) dequantize<int16_t>(call);
  else dequantize<int8_t>(call);
}

[[maybe_unused]] const bool entered = add_kernel("integer_quantize", integer_quantize) && add_kernel("integer_dequantize", integer_dequantize);

}  // namespace
}  // namespace exactqat
