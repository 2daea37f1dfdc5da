// SPDX-License-Identifier: Apache-2.0
// 16-bit tensors: computed with as float32 ones, rounded once at the end, to nearest even.
#include <algorithm>
#include <memory>

#include "call.h"
#include "halves.h"
#include "parallel.h"

namespace exactqat {
namespace {

template <class From, class To, class Convert>
void convert(const From* from, To* to, int64_t size, Convert one) {
  constexpr int64_t kPiece = 32768;
  parallel_for((size + kPiece - 1) / kPiece, size, [&](int64_t piece) {
    for (int64_t i = piece * kPiece; i < std::min(size, (piece + 1) * kPiece); ++i) one(from[i], to[i]);
  });
}

template <class Half>
void widen(const Array& array, float* to) {
  convert(array.as<Half>(), to, array.size(), [](Half from, float& value) { value = widened(from); });
}

template <class Half>
void round(const float* from, const Array& array) {
  convert(from, array.as<Half>(), array.size(), [](float value, Half& to) { round_to(to, value); });
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
    if (array.dtype == DType::bfloat16) widen<bfloat16>(array, arrays.back().as<float>());
    else if (array.dtype == DType::float16) widen<float16>(array, arrays.back().as<float>());
  }
  for (const Array& array : call.results) widened(array);
  const size_t operands = call.operands.size();
  const std::span<const Array> all(arrays);
  kernel(Call{all.first(operands), all.subspan(operands), call.numbers});
  for (size_t i = 0; i < call.results.size(); ++i) {
    const Array &array = call.results[i], &computed = arrays[operands + i];
    if (array.dtype == DType::bfloat16) round<bfloat16>(computed.as<float>(), array);
    else if (array.dtype == DType::float16) round<float16>(computed.as<float>(), array);
  }
}

}  // namespace exactqat
