// SPDX-License-Identifier: Apache-2.0
// Runs one kernel once, without Python: see instructions.py. Arguments: what, rows, whether the kernel is run at all.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "call.h"

using namespace exactqat;

namespace {

struct Tensors {
  std::vector<std::vector<float>> data;
  std::vector<std::vector<int64_t>> shapes;

  void add(std::vector<int64_t> shape, float value) {
    int64_t size = 1;
    for (int64_t extent : shape) size *= extent;
    data.emplace_back(size, value);
    // Ordinary numbers about the value, a few of them far from the others.
    for (int64_t i = 0; i < size; ++i) data.back()[i] += float(i * 7 % 64 - 32) * (i % 97 ? 0.01f : 0.1f) * (size > 64);
    shapes.push_back(shape);
  }
  std::vector<Array> arrays() {
    std::vector<Array> arrays;
    for (size_t k = 0; k < data.size(); ++k) arrays.push_back({data[k].data(), DType::float32, shapes[k]});
    return arrays;
  }
};

}  // namespace

int main(int, char** given) {
  const std::string what = given[1];
  const int64_t rows = std::atoll(given[2]), channels = 64;
  Tensors operands, results;
  Numbers numbers;
  std::string kernel = what;
  const auto number = [&](const char* name, int64_t value) { numbers.entries.emplace_back(name, value); };
  const auto real = [&](const char* name, double value) { numbers.entries.emplace_back(name, value); };
  const std::vector<int64_t> image{rows, channels}, vector{channels}, scalar{};
  if (what.starts_with("fake_quant")) {
    const bool gradient = what.ends_with("gradient"), per_channel = what.find("per_channel") != what.npos;
    const auto range = per_channel ? vector : scalar;
    for (int k = 0; k < 1 + gradient; ++k) operands.add(image, 0), k || (results.add(image, 0), 0);
    for (float bound : {-0.2f, 0.2f}) operands.add(range, bound);
    if (gradient) results.add(range, 0), results.add(range, 0);
    number("num_bits", 8), number("narrow_range", 0);
  } else if (what.starts_with("fused_batch_norm")) {
    const bool gradient = what.ends_with("grad");
    for (int k = 0; k < 1 + gradient; ++k) operands.add(image, 0);
    for (int k = 0; k < 4 + gradient; ++k) operands.add(vector, 1);
    results.add(image, 0);
    for (int k = 0; k < 4; ++k) results.add(vector, 0);
    number("outer", rows), number("channels", channels), number("inner", 1), number("is_training", 1);
    real("epsilon", 1e-3), real("exponential_avg_factor", 1.0);
  } else {
    // Images of 16 columns, 3 x 3, SAME.
    const int64_t width = 16, height = rows / width;
    kernel = what;
    const bool input = what.ends_with("backprop_input"), filter = what.ends_with("backprop_filter");
    const std::vector<int64_t> pixels{1, height, width, channels}, taps{3, 3, channels, 1};
    operands.add(input ? taps : pixels, 0), operands.add(input || filter ? pixels : taps, 0);
    results.add(filter ? taps : pixels, 0);
    for (auto [name, value] : std::initializer_list<std::pair<const char*, int64_t>>{
             {"batch", 1}, {"input_height", height}, {"input_width", width}, {"channels", channels}, {"multiplier", 1},
             {"filter_height", 3}, {"filter_width", 3}, {"output_height", height}, {"output_width", width},
             {"stride_height", 1}, {"stride_width", 1}, {"dilation_height", 1}, {"dilation_width", 1}, {"pad_top", 1},
             {"pad_left", 1}, {"channels_first", 0}})
      number(name, value);
  }
  const auto from = operands.arrays(), to = results.arrays();
  if (given[3][0] == '1') find_kernel(kernel)(Call{from, to, numbers});
  return 0;
}
