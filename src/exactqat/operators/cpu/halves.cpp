// SPDX-License-Identifier: Apache-2.0
// 16-bit tensors: computed with as float32 ones, rounded once at the end, to nearest even.
#include "halves.h"

#include <algorithm>
#include <memory>

#include "call.h"
#include "elementwise.h"
#include "parallel.h"

namespace exactqat {
namespace {

bool is_half(const Array& array) { return array.dtype == DType::float16 || array.dtype == DType::bfloat16; }

template <class Half>
void widen(const Half* from, int64_t count, float* to) {
  fill_run<false>(to, 0, count, [=](int64_t i, auto extent) __attribute__((always_inline)) { return load(from + i, extent); });
}

template <class Half>
void round_into(Half* to, int64_t count, const float* from, bool past) {
  const auto step = [=](int64_t i, auto extent) __attribute__((always_inline)) { return load(from + i, extent); };
  if (!past) return fill_run<false>(to, 0, count, step);
  // Up to the first place where vectors are stored past the cache.
  constexpr int64_t kVector = 2 * Vector<float>::kWidth;
  const int64_t head = std::min<int64_t>(-(reinterpret_cast<uintptr_t>(to) / 2) % (kVector / 2), count);
  fill_run<false>(to, 0, head, step);
  fill_run<true>(to, head, count, step);
}

// A whole tensor, on all threads.
template <class Convert>
void in_pieces(int64_t size, const Convert& convert) {
  constexpr int64_t kPiece = 32768;
  parallel_for((size + kPiece - 1) / kPiece, size, [&](int64_t piece) {
    const int64_t begin = piece * kPiece;
    convert(begin, std::min(kPiece, size - begin));
  });
}

}  // namespace

void widen(const void* from, DType dtype, int64_t begin, int64_t count, float* to) {
  if (dtype == DType::bfloat16) widen(static_cast<const bfloat16*>(from) + begin, count, to);
  else widen(static_cast<const float16*>(from) + begin, count, to);
}

void round_into(void* to, DType dtype, int64_t begin, int64_t count, const float* from, bool past) {
  if (dtype == DType::bfloat16) round_into(static_cast<bfloat16*>(to) + begin, count, from, past);
  else round_into(static_cast<float16*>(to) + begin, count, from, past);
}

DType dtype_of(std::string_view name) {
  if (name == "float16") return DType::float16;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float32") return DType::float32;
  if (name == "float64") return DType::float64;
  if (name == "uint8") return DType::uint8;
  if (name == "int8") return DType::int8;
  if (name == "int16") return DType::int16;
  if (name == "int32") return DType::int32;
  if (name == "int64") return DType::int64;
  throw std::invalid_argument("no CPU kernel takes " + std::string(name));
}

bool has_halves(const Call& call) {
  for (const auto& arrays : {call.operands, call.results})
    for (const Array& array : arrays)
      if (is_half(array)) return true;
  return false;
}

namespace {

// A call in float32, of tensors that in part have 16 bits: room for those, and the others as they are.
struct WidenedCall {
  std::span<const Array> operands, results;
  std::vector<Array> arrays;
  std::vector<std::shared_ptr<double[]>> rooms;

  explicit WidenedCall(const Call& call) : operands(call.operands), results(call.results) {
    for (const auto& given : {call.operands, call.results})
      for (Array array : given) {
        if (is_half(array)) {
          rooms.push_back(scratch((array.size() + 1) / 2));
          array.data = rooms.back().get();
          array.dtype = DType::float32;
        }
        arrays.push_back(array);
      }
  }

  void widen_operand(size_t k) {
    const Array& array = operands[k];
    if (!is_half(array)) return;
    float* to = arrays[k].as<float>();
    in_pieces(array.size(), [&](int64_t i, int64_t count) { widen(array.data, array.dtype, i, count, to + i); });
  }

  void run(const Numbers& numbers, Kernel kernel) {
    const std::span<const Array> all(arrays);
    kernel(Call{all.first(operands.size()), all.subspan(operands.size()), numbers});
  }

  void round_result(size_t k) {
    const Array& array = results[k];
    if (!is_half(array)) return;
    const float* from = arrays[operands.size() + k].as<float>();
    in_pieces(array.size(), [&](int64_t i, int64_t count) { round_into(array.data, array.dtype, i, count, from + i, false); });
  }
};

}  // namespace

void run_widened(const Call& call, Kernel kernel) {
  WidenedCall widened(call);
  for (size_t k = 0; k < call.operands.size(); ++k) widened.widen_operand(k);
  widened.run(call.numbers, kernel);
  for (size_t k = 0; k < call.results.size(); ++k) widened.round_result(k);
}

void run_widened_images(const Call& call, Kernel kernel, size_t images) {
  constexpr int64_t kNear = 131072;  // elements that a core's own cache has room for
  const std::span<const int64_t> from = call.operands[images].shape, to = call.results[0].shape;
  const int64_t batch = from[0], size = call.operands[images].size() + call.results[0].size();
  if (size == 0) return run_widened(call, kernel);
  const int64_t together = std::clamp<int64_t>(thread_count() * kNear / (size / batch), 1, batch);
  std::vector<int64_t> from_shape(from.begin(), from.end()), to_shape(to.begin(), to.end());
  std::vector<Array> operands(call.operands.begin(), call.operands.end());
  Array &operand = operands[images], result = call.results[0];
  operand.shape = from_shape, result.shape = to_shape;
  from_shape[0] = to_shape[0] = together;
  const int64_t bytes_of_operand = operand.size() / together * 2, bytes_of_result = result.size() / together * 2;
  Numbers numbers = call.numbers;
  WidenedCall widened(Call{operands, {&result, 1}, numbers});
  for (size_t k = 0; k < operands.size(); ++k)
    if (k != images) widened.widen_operand(k);
  for (int64_t image = 0; image < batch; image += together) {
    from_shape[0] = to_shape[0] = std::min(together, batch - image);
    numbers.set("batch", from_shape[0]);
    widened.widen_operand(images);
    widened.run(numbers, kernel);
    widened.round_result(0);
    operand.data = operand.as<char>() + together * bytes_of_operand;
    result.data = result.as<char>() + together * bytes_of_result;
  }
}

}  // namespace exactqat
