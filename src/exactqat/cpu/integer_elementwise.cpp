// SPDX-License-Identifier: Apache-2.0
// Operators of int8 codes that multiply no matrices: tables, pairs of tensors, windows, reductions. device/elementwise.py, pooling.py
// and reduction.py say what they compute.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "integer_rounding.h"
#include "parallel.h"

namespace exactqat {
namespace {

constexpr int64_t kPiece = 16384;  // codes of a task

// --- one operand ----------------------------------------------------------------------------------------------------------------

// operands: codes int8, the result of each code from -128 on, int8 [256]. result: int8.
void integer_table(const Call& call) {
  const auto* codes = call.operands[0].as<uint8_t>();
  auto* out = call.results[0].as<int8_t>();
  int8_t table[256];  // by the bits of a code
  std::memcpy(table, call.operands[1].as<int8_t>() + 128, 128);
  std::memcpy(table + 128, call.operands[1].as<int8_t>(), 128);
  const int64_t size = call.operands[0].size();
  parallel_for((size + kPiece - 1) / kPiece, size, [&](int64_t task) {
    const int64_t end = std::min(size, (task + 1) * kPiece);
    for (int64_t k = task * kPiece; k < end; ++k) out[k] = table[codes[k]];
  });
}

// --- two operands ---------------------------------------------------------------------------------------------------------------

// Two operands that broadcast to the result's shape, as runs in which each of them goes on by one code or stays.
struct Runs {
  int64_t length = 1, count = 1;
  int64_t step[2] = {0, 0};  // within a run: 1 or 0
  std::vector<std::array<int64_t, 3>> axes;  // size and both strides, the last axis first

  Runs(const Array& first, const Array& second, const Array& out) {
    const size_t rank = out.shape.size();
    const Array* operands[2] = {&first, &second};
    int64_t strides[2] = {1, 1};
    for (size_t place = 0; place < rank; ++place) {
      const int64_t size = out.shape[rank - 1 - place];
      std::array<int64_t, 3> axis = {size, 0, 0};
      for (int k = 0; k < 2; ++k) {
        const auto& shape = operands[k]->shape;
        const int64_t own = place < shape.size() ? shape[shape.size() - 1 - place] : 1;
        axis[size_t(k) + 1] = own == 1 ? 0 : strides[k];
        strides[k] *= own;
      }
      if (size == 1) continue;
      // An axis that goes on where the one before it ends is a part of it.
      if (!axes.empty()) {
        auto& last = axes.back();
        if (axis[1] == last[1] * last[0] && axis[2] == last[2] * last[0]) {
          last[0] *= size;
          continue;
        }
      }
      axes.push_back(axis);
    }
    if (axes.empty()) axes.push_back({1, 0, 0});
    length = axes[0][0];
    step[0] = axes[0][1];
    step[1] = axes[0][2];
    for (size_t k = 1; k < axes.size(); ++k) count *= axes[k][0];
  }
  // Where run `number` begins in both operands.
  std::array<int64_t, 2> begin(int64_t number) const {
    std::array<int64_t, 2> offsets = {0, 0};
    for (size_t k = 1; k < axes.size(); ++k) {
      const int64_t index = number % axes[k][0];
      number /= axes[k][0];
      offsets[0] += index * axes[k][1];
      offsets[1] += index * axes[k][2];
    }
    return offsets;
  }
};

template <class Pair>
void for_pairs(const int8_t* first, int64_t first_step, const int8_t* second, int64_t second_step, int64_t count, int8_t* out,
               const Pair& pair) {
  if (first_step != 0 && second_step != 0) {
    for (int64_t k = 0; k < count; ++k) out[k] = pair(first[k], second[k]);
  } else if (first_step != 0) {
    const int8_t b = *second;
    for (int64_t k = 0; k < count; ++k) out[k] = pair(first[k], b);
  } else {
    const int8_t a = *first;
    for (int64_t k = 0; k < count; ++k) out[k] = pair(a, second[k * second_step]);
  }
}

template <class Pair>
void broadcast(const Call& call, const Pair& pair) {
  const Runs runs(call.operands[0], call.operands[1], call.results[0]);
  const auto *first = call.operands[0].as<int8_t>(), *second = call.operands[1].as<int8_t>();
  auto* out = call.results[0].as<int8_t>();
  const int64_t size = runs.length * runs.count;
  // Long runs are cut, short ones are taken together.
  const int64_t pieces = std::max<int64_t>(1, (runs.length + kPiece - 1) / kPiece);
  const int64_t together = std::max<int64_t>(1, kPiece / std::max<int64_t>(runs.length, 1));
  const int64_t groups = (runs.count + together - 1) / together;
  parallel_for(groups * pieces, 4 * size, [&](int64_t task) {
    const int64_t piece = task % pieces, from = task / pieces * together;
    const int64_t begin = piece * kPiece, count = std::min(kPiece, runs.length - begin);
    for (int64_t run = from; run < std::min(runs.count, from + together); ++run) {
      const auto [a, b] = runs.begin(run);
      for_pairs(first + a + begin * runs.step[0], runs.step[0], second + b + begin * runs.step[1], runs.step[1],
                pieces == 1 ? runs.length : count, out + run * runs.length + begin, pair);
    }
  });
}

struct Bounds {
  int32_t zero_point, lowest, highest;  // of steps

  explicit Bounds(const Numbers& numbers)
      : zero_point(int32_t(numbers.integer("zero_point"))),
        lowest(int32_t(numbers.integer("lowest")) - zero_point),
        highest(int32_t(numbers.integer("highest")) - zero_point) {}
  int8_t code(int32_t steps) const { return int8_t(std::min(std::max(steps, lowest), highest) + zero_point); }
  int8_t code_of_wide(int64_t steps) const {
    return int8_t(std::min<int64_t>(std::max<int64_t>(steps, lowest), highest) + zero_point);
  }
};

// Both codes times a whole number each, added to a third one, shifted back: XNNPACK's sum.
void integer_add_shifted(const Call& call) {
  const Bounds to(call.numbers);
  const auto first = uint32_t(call.numbers.integer("first")), second = uint32_t(call.numbers.integer("second"));
  const auto added = uint32_t(call.numbers.integer("added"));
  const auto shift = int32_t(call.numbers.integer("shift"));
  broadcast(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
    return to.code(int32_t(uint32_t(int32_t(a)) * first + uint32_t(int32_t(b)) * second + added) >> shift);
  });
}

// What each code of both operands represents (int32 [2, 256], codes from -128 on), added, or the difference squared, then rounded
// twice: TensorFlow Lite's sum and squared difference.
void integer_add_terms(const Call& call) {
  const Bounds to(call.numbers);
  const auto significand = int32_t(call.numbers.integer("significand")), exponent = int32_t(call.numbers.integer("exponent"));
  const int32_t *first = call.operands[2].as<int32_t>() + 128, *second = first + 256;
  if (call.numbers.integer("squared")) {
    broadcast(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
      const int32_t difference = first[a] - second[b];
      return to.code(multiply_fixed_point(difference * difference, significand, exponent));
    });
  } else {
    broadcast(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
      return to.code(multiply_fixed_point(first[a] + second[b], significand, exponent));
    });
  }
}

// "steps": 0: times a float32 factor, to even; 1: rounded twice; 2: times a 24-bit significand and shifted, half up.
void integer_multiply(const Call& call) {
  const Bounds to(call.numbers);
  const auto first = int32_t(call.numbers.integer("first_zero_point")), second = int32_t(call.numbers.integer("second_zero_point"));
  const auto significand = int32_t(call.numbers.integer("significand")), exponent = int32_t(call.numbers.integer("exponent"));
  const auto factor = float(call.numbers.real("factor"));
  switch (call.numbers.integer("steps")) {
    case 0: {
      const auto lowest = float(to.lowest), highest = float(to.highest);
      const int32_t zero_point = to.zero_point;
      constexpr float kWhole = 12582912;  // 1.5 * 2^23: beside it, float32 holds whole numbers only
      return broadcast(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
        float real = float((a - first) * (b - second)) * factor;
        real = real < lowest ? lowest : real;
        real = real > highest ? highest : real;
        return int8_t(int32_t((real + kWhole) - kWhole) + zero_point);
      });
    }
    case 1:
      return broadcast(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
        return to.code(multiply_fixed_point((a - first) * (b - second), significand, exponent));
      });
    default:
      return broadcast(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
        const int64_t product = int64_t((a - first) * (b - second)) * significand;
        return to.code_of_wide((product + (int64_t(1) << (exponent - 1))) >> exponent);
      });
  }
}

// The larger code, or the smaller one.
void integer_extreme(const Call& call) {
  if (call.numbers.integer("largest"))
    broadcast(call, [](int8_t a, int8_t b) __attribute__((always_inline)) { return std::max(a, b); });
  else
    broadcast(call, [](int8_t a, int8_t b) __attribute__((always_inline)) { return std::min(a, b); });
}

// --- windows --------------------------------------------------------------------------------------------------------------------

// The mean of every window, half away from zero, or its largest code: int8 [batch, height, width, channels].
void integer_pool(const Call& call) {
  const Array &x = call.operands[0], &out = call.results[0];
  const Numbers& numbers = call.numbers;
  const int64_t height = x.shape[1], width = x.shape[2], channels = x.shape[3], lines = out.shape[1], places = out.shape[2];
  const int64_t window_y = numbers.integer("window_y"), window_x = numbers.integer("window_x");
  const int64_t stride_y = numbers.integer("stride_y"), stride_x = numbers.integer("stride_x");
  const int64_t top = numbers.integer("top"), left = numbers.integer("left");
  const bool largest = numbers.integer("largest") != 0;
  const auto lowest = int32_t(numbers.integer("lowest")), highest = int32_t(numbers.integer("highest"));
  parallel_for(x.shape[0] * lines, x.shape[0] * lines * places * channels * window_y * window_x / 4 + 1, [&](int64_t task) {
    const int64_t line = task % lines, example = task / lines;
    const int64_t y0 = line * stride_y - top, y_begin = std::max<int64_t>(y0, 0), y_end = std::min(y0 + window_y, height);
    std::vector<int32_t> total(size_t(largest ? 0 : channels));
    for (int64_t place = 0; place < places; ++place) {
      const int64_t x0 = place * stride_x - left, x_begin = std::max<int64_t>(x0, 0), x_end = std::min(x0 + window_x, width);
      int8_t* to = out.as<int8_t>() + (task * places + place) * channels;
      if (largest) std::memset(to, 0x80, size_t(channels));
      else std::fill(total.begin(), total.end(), 0);
      for (int64_t y = y_begin; y < y_end; ++y) {
        for (int64_t at = x_begin; at < x_end; ++at) {
          const int8_t* codes = x.as<int8_t>() + ((example * height + y) * width + at) * channels;
          if (largest) {
            for (int64_t c = 0; c < channels; ++c) to[c] = std::max(to[c], codes[c]);
          } else {
            for (int64_t c = 0; c < channels; ++c) total[size_t(c)] += codes[c];
          }
        }
      }
      if (largest) continue;
      // float64 has whole quotients exactly, and the others are too far from whole numbers to reach one.
      const auto count = double(std::max<int64_t>(1, (y_end - y_begin) * (x_end - x_begin)));
      const double half = std::floor(count / 2);
      for (int64_t c = 0; c < channels; ++c) {
        const auto magnitude = int32_t((std::fabs(double(total[size_t(c)])) + half) / count);
        to[c] = int8_t(std::min(std::max(total[size_t(c)] < 0 ? -magnitude : magnitude, lowest), highest));
      }
    }
  });
}

// --- reductions -----------------------------------------------------------------------------------------------------------------

// Sums of codes int8 [outer, reduced, inner] as codes int8 [outer, inner]. "steps": 0: float32 product and sum; 1: the steps, which
// are what is left without "offset", rounded twice; 2: one fused multiply-add.
void integer_sum(const Call& call) {
  const Array& x = call.operands[0];
  const Numbers& numbers = call.numbers;
  const Bounds to(numbers);
  const int64_t outer = x.shape[0], reduced = x.shape[1], inner = x.shape[2], steps = numbers.integer("steps");
  const auto significand = int32_t(numbers.integer("significand")), exponent = int32_t(numbers.integer("exponent"));
  const auto offset = int32_t(numbers.integer("offset"));
  const auto factor = float(numbers.real("factor")), added = float(numbers.real("added"));
  const auto lowest = float(numbers.integer("lowest")), highest = float(numbers.integer("highest"));
  constexpr int64_t kColumnsTogether = 256;
  const int64_t pieces = (inner + kColumnsTogether - 1) / kColumnsTogether;
  parallel_for(outer * pieces, x.size(), [&](int64_t task) {
    const int64_t begin = task % pieces * kColumnsTogether, count = std::min(kColumnsTogether, inner - begin);
    const int8_t* codes = x.as<int8_t>() + task / pieces * reduced * inner + begin;
    int8_t* out = call.results[0].as<int8_t>() + task / pieces * inner + begin;
    int32_t total[kColumnsTogether] = {};
    if (inner == 1) {
      for (int64_t k = 0; k < reduced; ++k) total[0] += codes[k];
    } else {
      for (int64_t k = 0; k < reduced; ++k, codes += inner)
        for (int64_t c = 0; c < count; ++c) total[c] += codes[c];
    }
    for (int64_t c = 0; c < count; ++c) {
      if (steps == 1) {
        out[c] = to.code(multiply_fixed_point(total[c] - offset, significand, exponent));
        continue;
      }
      float real = steps == 2 ? std::fma(float(total[c]), factor, added) : float(total[c]) * factor + added;
      real = std::nearbyint(real);
      out[c] = int8_t(int32_t(std::min(std::max(real, lowest), highest)));
    }
  });
}

// --- rows -----------------------------------------------------------------------------------------------------------------------

// XNNPACK leaves SOFTMAX to LiteRT's own kernel. operands: int8 [rows, length]; exponentials by how far a code lies below the largest
// of its row, float32 [256]. result: int8.
void integer_softmax(const Call& call) {
  const Array& x = call.operands[0];
  const float* powers = call.operands[1].as<float>();
  const int64_t length = x.shape[1];
  const auto scale = float(call.numbers.real("scale"));
  const auto zero_point = float(call.numbers.integer("zero_point"));
  const int64_t together = std::max<int64_t>(1, 2048 / length), tasks = (x.shape[0] + together - 1) / together;
  parallel_for(tasks, 8 * x.size(), [&](int64_t task) {
    for (int64_t row = task * together; row < std::min(x.shape[0], (task + 1) * together); ++row) {
      const int8_t* codes = x.as<int8_t>() + row * length;
      int8_t* out = call.results[0].as<int8_t>() + row * length;
      int8_t largest = codes[0];
      for (int64_t k = 1; k < length; ++k) largest = std::max(largest, codes[k]);
      float total = 0;  // one after the other, as the kernel adds them
      for (int64_t k = 0; k < length; ++k) total += powers[largest - codes[k]];
      const float factor = 1.0f / (total * scale);
      int8_t table[256];
      if (length >= 256)
        for (int64_t k = 0; k < 256; ++k)
          table[k] = int8_t(int32_t(std::clamp(std::floor(powers[k] * factor + 0.5f) + zero_point, -128.0f, 127.0f)));
      for (int64_t k = 0; k < length; ++k) {
        const int below = largest - codes[k];
        out[k] = length >= 256
                     ? table[below]
                     : int8_t(int32_t(std::clamp(std::floor(powers[below] * factor + 0.5f) + zero_point, -128.0f, 127.0f)));
      }
    }
  });
}

// gemmlowp's SaturatingRoundingDoublingHighMul, of numbers that are not both the lowest.
int32_t high_multiply(int32_t a, int32_t b) { return int32_t((int64_t(a) * b + (int64_t(1) << 30)) >> 31); }

int32_t shifted_left(int32_t x, int bits) {
  return int32_t(std::clamp<int64_t>(int64_t(x) * (int64_t(1) << bits), std::numeric_limits<int32_t>::min(),
                                     std::numeric_limits<int32_t>::max()));
}

int32_t wrapped_sum(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

// device/fixed_point_functions.py: 1 / (1 + x) in Q0.31.
int32_t one_over_one_plus(int32_t x) {
  const int64_t total = int64_t(x) + std::numeric_limits<int32_t>::max(), nudged = total + (total >= 0 ? 1 : -1);
  const auto half = int32_t(nudged >= 0 ? nudged >> 1 : -(-nudged >> 1));
  int32_t estimate = wrapped_sum(1515870810, high_multiply(half, -1010580540));
  for (int k = 0; k < 3; ++k) {
    const int32_t error = (1 << 29) - high_multiply(half, estimate);
    estimate = wrapped_sum(estimate, shifted_left(high_multiply(estimate, error), 2));
  }
  return shifted_left(estimate, 1);
}

// The reference kernels' SOFTMAX. operands: int8 [rows, length]; by how far a code lies below the largest of its row int32 [2, 256]:
// what it adds to the sum in Q12.19, and its power in Q0.31, which is 0 for those too far below. Rows add up to less than 512.
void integer_softmax_fixed(const Call& call) {
  const Array& x = call.operands[0];
  const int32_t *terms = call.operands[1].as<int32_t>(), *powers = terms + 256;
  const int64_t length = x.shape[1];
  const int64_t together = std::max<int64_t>(1, 2048 / length), tasks = (x.shape[0] + together - 1) / together;
  parallel_for(tasks, 8 * x.size(), [&](int64_t task) {
    for (int64_t row = task * together; row < std::min(x.shape[0], (task + 1) * together); ++row) {
      const int8_t* codes = x.as<int8_t>() + row * length;
      int8_t* out = call.results[0].as<int8_t>() + row * length;
      int8_t largest = codes[0];
      for (int64_t k = 1; k < length; ++k) largest = std::max(largest, codes[k]);
      int32_t total = 0;
      for (int64_t k = 0; k < length; ++k) total += terms[largest - codes[k]];
      const int headroom = std::countl_zero(uint32_t(total));
      const int32_t factor = one_over_one_plus(int32_t((uint32_t(total) << headroom) - (uint32_t(1) << 31)));
      const int shift = 12 - headroom + 23;
      const int64_t half = (int64_t(1) << shift) >> 1;
      for (int64_t k = 0; k < length; ++k) {
        const int64_t share = high_multiply(factor, powers[largest - codes[k]]);
        const auto rounded = int32_t((share + half) >> shift);  // shares are not negative
        out[k] = int8_t(std::clamp(rounded - 128, -128, 127));
      }
    }
  });
}

// --- images of another size -----------------------------------------------------------------------------------------------------

// operands: int8 [batch, height, width, channels]; for each line of the result, and each place of a line, int32 [2, 3, ...]: the value
// before, the one after, the share of the latter in 1 / 2^"bits". "half_up": how halves are rounded, otherwise away from zero.
void integer_resize_bilinear(const Call& call) {
  const Array &x = call.operands[0], &out = call.results[0];
  const int64_t height = x.shape[1], width = x.shape[2], channels = x.shape[3], lines = out.shape[1], places = out.shape[2];
  const auto bits = int(call.numbers.integer("bits"));
  const bool half_up = call.numbers.integer("half_up") != 0;
  const int32_t one = 1 << bits, *down = call.operands[1].as<int32_t>(), *right = call.operands[2].as<int32_t>();
  const int32_t half = 1 << (2 * bits - 1);
  parallel_for(x.shape[0] * lines, 8 * out.size(), [&](int64_t task) {
    const int64_t line = task % lines, example = task / lines;
    const int8_t* upper = x.as<int8_t>() + (example * height + down[line]) * width * channels;
    const int8_t* lower = x.as<int8_t>() + (example * height + down[lines + line]) * width * channels;
    const int32_t below = down[2 * lines + line], above = one - below;
    int8_t* to = out.as<int8_t>() + task * places * channels;
    for (int64_t place = 0; place < places; ++place, to += channels) {
      const int64_t before = right[place] * channels, after = right[places + place] * channels;
      const int32_t share = right[2 * places + place], rest = one - share;
      for (int64_t c = 0; c < channels; ++c) {
        const int32_t top = upper[before + c] * rest + upper[after + c] * share;
        const int32_t bottom = lower[before + c] * rest + lower[after + c] * share;
        const int32_t total = top * above + bottom * below;  // shares lie within -1..1
        if (half_up) {
          to[c] = int8_t((total + half) >> (2 * bits));
        } else {
          const int32_t magnitude = ((total < 0 ? -total : total) + half) >> (2 * bits);
          to[c] = int8_t(total > 0 ? magnitude : -magnitude);
        }
      }
    }
  });
}

// --- places ---------------------------------------------------------------------------------------------------------------------

// operands: int8 [batch, ...]; int64 [3, axes]: how many codes of each axis of an example move, and how far apart they lie in the
// operand and in the result. From place "from" to place "to" of an example; where "fills", all of the result is "fill" before.
void integer_move(const Call& call) {
  const Array &x = call.operands[0], &plan = call.operands[1], &out = call.results[0];
  const Numbers& numbers = call.numbers;
  const auto axes = size_t(plan.shape[1]);
  const std::span<const int64_t> sizes(plan.as<int64_t>(), axes), from(sizes.data() + axes, axes), to(from.data() + axes, axes);
  const int64_t batch = x.shape[0], example_from = x.size() / std::max<int64_t>(batch, 1);
  const int64_t example_to = out.size() / std::max<int64_t>(batch, 1);
  const int64_t begin_from = numbers.integer("from"), begin_to = numbers.integer("to");
  const bool fills = numbers.integer("fills") != 0;
  const int8_t fill = int8_t(numbers.integer("fill"));
  int64_t lines = 1;
  for (size_t k = 0; k + 1 < axes; ++k) lines *= sizes[k];
  const int64_t length = sizes[axes - 1];
  const bool dense = from[axes - 1] == 1 && to[axes - 1] == 1;
  if (fills) {
    auto* bytes = out.as<int8_t>();
    std::memset(bytes, uint8_t(fill), size_t(out.size()));
  }
  constexpr int64_t kTogether = 64;
  const int64_t pieces = (lines + kTogether - 1) / kTogether;
  parallel_for(batch * pieces, batch * lines * length, [&](int64_t task) {
    const int64_t example = task / pieces, first = task % pieces * kTogether;
    for (int64_t line = first; line < std::min(lines, first + kTogether); ++line) {
      int64_t rest = line, read = example * example_from + begin_from, written = example * example_to + begin_to;
      for (size_t k = axes - 1; k-- > 0;) {
        const int64_t index = rest % sizes[k];
        rest /= sizes[k];
        read += index * from[k];
        written += index * to[k];
      }
      const int8_t* codes = x.as<int8_t>() + read;
      int8_t* result = out.as<int8_t>() + written;
      if (dense) {
        std::memcpy(result, codes, size_t(length));
      } else {
        for (int64_t k = 0; k < length; ++k) result[k * to[axes - 1]] = codes[k * from[axes - 1]];
      }
    }
  });
}

// The codes of the operand, in the same order.
void integer_copy(const Call& call) {
  const int64_t size = call.operands[0].size();
  constexpr int64_t kBytes = 1 << 20;
  parallel_for((size + kBytes - 1) / kBytes, size / 4, [&](int64_t task) {
    const int64_t begin = task * kBytes;
    std::memcpy(call.results[0].as<int8_t>() + begin, call.operands[0].as<int8_t>() + begin, size_t(std::min(kBytes, size - begin)));
  });
}

[[maybe_unused]] const bool entered =
    add_kernel("integer_table", integer_table) && add_kernel("integer_add_shifted", integer_add_shifted) &&
    add_kernel("integer_add_terms", integer_add_terms) && add_kernel("integer_multiply", integer_multiply) &&
    add_kernel("integer_extreme", integer_extreme) && add_kernel("integer_pool", integer_pool) &&
    add_kernel("integer_sum", integer_sum) && add_kernel("integer_softmax", integer_softmax) &&
    add_kernel("integer_softmax_fixed", integer_softmax_fixed) && add_kernel("integer_resize_bilinear", integer_resize_bilinear) &&
    add_kernel("integer_move", integer_move) && add_kernel("integer_copy", integer_copy);

}  // namespace
}  // namespace exactqat
