// SPDX-License-Identifier: Apache-2.0
// Operators that multiply no matrices: tables, pairs of tensors, windows, reductions. device/elementwise.py, pooling.py and
// reduction.py say what they compute. Codes are int8 or int16 where nothing else is said.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "integer_rounding.h"
#include "parallel.h"

#if defined(_MSC_VER)
#include <intrin.h>
#endif

namespace exactqat {
namespace {

constexpr int64_t kPiece = 16384;              // codes of a task
constexpr int64_t kTogether = 64, kFew = 16;  // channels whose loops have a length that the compiler knows

// --- one operand ----------------------------------------------------------------------------------------------------------------

// The number of a code, from the lowest one on.
inline size_t place_of(int8_t code) { return uint8_t(code) ^ 0x80u; }
inline size_t place_of(int16_t code) { return uint16_t(code) ^ 0x8000u; }

// Whole vectors of int8 codes, as many as there are instructions for; how many codes that were. table: by the bits of a code.
#if defined(__AVX512F__)
bool has_byte_permutations() {
#if defined(_MSC_VER)  // see features.cpp
  int seven[4];
  __cpuidex(seven, 7, 0);
  return (seven[2] >> 1 & 1) != 0;
#else
  return __builtin_cpu_supports("avx512vbmi");
#endif
}

__attribute__((target("avx512vbmi"))) int64_t look_up_vectors(const int8_t* codes, const int8_t* table, int64_t count, int8_t* out) {
  const __m512i low = _mm512_loadu_si512(table), next = _mm512_loadu_si512(table + 64);
  const __m512i third = _mm512_loadu_si512(table + 128), last = _mm512_loadu_si512(table + 192);
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    const __m512i at = _mm512_loadu_si512(codes + k);
    const __m512i positive = _mm512_permutex2var_epi8(low, at, next), negative = _mm512_permutex2var_epi8(third, at, last);
    _mm512_storeu_si512(out + k, _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), positive, negative));
  }
  return k;
}
#else
constexpr bool has_byte_permutations() { return false; }
inline int64_t look_up_vectors(const int8_t*, const int8_t*, int64_t, int8_t*) { return 0; }
#endif

void look_up_bytes(const Call& call) {
  const auto *codes = call.operands[0].as<int8_t>(), *results = call.operands[1].as<int8_t>();
  auto* out = call.results[0].as<int8_t>();
  int8_t table[256];  // by the bits of a code
  std::memcpy(table, results + 128, 128);
  std::memcpy(table + 128, results, 128);
  const bool in_vectors = has_byte_permutations();
  const int64_t size = call.operands[0].size();
  parallel_for((size + kPiece - 1) / kPiece, in_vectors ? size / 8 : size, [&](int64_t task) {
    const int64_t begin = task * kPiece, end = std::min(size, begin + kPiece);
    int64_t k = begin + (in_vectors ? look_up_vectors(codes + begin, table, end - begin, out + begin) : 0);
    for (; k < end; ++k) out[k] = table[uint8_t(codes[k])];
  });
}

template <class From, class To>
void look_up(const Call& call) {
  const auto* codes = call.operands[0].as<From>();
  const auto* table = call.operands[1].as<To>();
  auto* out = call.results[0].as<To>();
  const int64_t size = call.operands[0].size();
  parallel_for((size + kPiece - 1) / kPiece, size, [&](int64_t task) {
    const int64_t end = std::min(size, (task + 1) * kPiece);
    for (int64_t k = task * kPiece; k < end; ++k) out[k] = table[place_of(codes[k])];
  });
}

// operands: codes; the result of each code from the lowest one on, [256] or [65536]. result: codes.
void integer_table(const Call& call) {
  const bool from_wide = call.operands[0].dtype == DType::int16, to_wide = call.results[0].dtype == DType::int16;
  if (from_wide) return to_wide ? look_up<int16_t, int16_t>(call) : look_up<int16_t, int8_t>(call);
  return to_wide ? look_up<int8_t, int16_t>(call) : look_up_bytes(call);
}

// The same, but those codes at the end that fill no vector of eight have a table of their own. operands: int8 codes; both tables,
// [2, 256]. result: int8.
void integer_table_in_eights(const Call& call) {
  look_up_bytes(call);
  const auto *codes = call.operands[0].as<int8_t>(), *table = call.operands[1].as<int8_t>() + 256;
  const int64_t size = call.operands[0].size();
  for (int64_t k = size / 8 * 8; k < size; ++k) call.results[0].as<int8_t>()[k] = table[place_of(codes[k])];
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

// One loop for all runs, which is compiled for each pair: a code that stays is repeated in memory of our own.
template <class Code, class Pair>
void for_pairs(const Code* first, int64_t first_step, const Code* second, int64_t second_step, int64_t count, Code* out,
               const Pair& pair) {
  constexpr int64_t kRepeated = 256;
  Code repeated[2][kRepeated];
  if (first_step == 0) std::fill_n(repeated[0], std::min(count, kRepeated), *first);
  if (second_step == 0) std::fill_n(repeated[1], std::min(count, kRepeated), *second);
  const int64_t together = first_step == 0 || second_step == 0 ? kRepeated : count;
  for (int64_t begin = 0; begin < count; begin += together) {
    const Code *a = first_step == 0 ? repeated[0] : first + begin, *b = second_step == 0 ? repeated[1] : second + begin;
    for (int64_t k = 0, n = std::min(together, count - begin); k < n; ++k) out[begin + k] = pair(a[k], b[k]);
  }
}

template <class Code, class Pair>
void broadcast(const Call& call, const Pair& pair) {
  const Runs runs(call.operands[0], call.operands[1], call.results[0]);
  const auto *first = call.operands[0].as<Code>(), *second = call.operands[1].as<Code>();
  auto* out = call.results[0].as<Code>();
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

bool is_wide(const Call& call) { return call.operands[0].dtype == DType::int16; }

struct Bounds {
  int32_t zero_point, lowest, highest;  // of steps

  explicit Bounds(const Numbers& numbers)
      : zero_point(int32_t(numbers.integer("zero_point"))),
        lowest(int32_t(numbers.integer("lowest")) - zero_point),
        highest(int32_t(numbers.integer("highest")) - zero_point) {}
  template <class Code>
  Code code(int32_t steps) const {
    return Code(std::min(std::max(steps, lowest), highest) + zero_point);
  }
};

// A multiplier of the call, by the names of its numbers.
struct Multiplier {
  int32_t significand, exponent;

  Multiplier(const Numbers& numbers, const std::string& name)
      : significand(int32_t(numbers.integer(name + "significand"))), exponent(int32_t(numbers.integer(name + "exponent"))) {}
  int32_t of(int32_t steps) const { return multiply_fixed_point(steps, significand, exponent); }
};

// Both codes times a whole number each, added to a third one, shifted back: XNNPACK's sum of int8.
void integer_add_shifted(const Call& call) {
  const Bounds to(call.numbers);
  const auto first = uint32_t(call.numbers.integer("first")), second = uint32_t(call.numbers.integer("second"));
  const auto added = uint32_t(call.numbers.integer("added"));
  const auto shift = int32_t(call.numbers.integer("shift"));
  broadcast<int8_t>(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
    return to.code<int8_t>(int32_t(uint32_t(int32_t(a)) * first + uint32_t(int32_t(b)) * second + added) >> shift);
  });
}

// Steps of both operands, shifted left by "left" and multiplied, then added, or the square of their difference, then rounded again:
// TensorFlow Lite's sum and squared difference. The second one counts "sign" times.
template <class Code>
void add_terms(const Call& call) {
  const Numbers& numbers = call.numbers;
  const Bounds to(numbers);
  const Multiplier first(numbers, "first_"), second(numbers, "second_"), last(numbers, "");
  const auto first_zero = int32_t(numbers.integer("first_zero_point")), second_zero = int32_t(numbers.integer("second_zero_point"));
  const auto left = int32_t(numbers.integer("left")), sign = int32_t(numbers.integer("sign"));
  if (numbers.integer("squared")) {
    broadcast<Code>(call, [=](Code a, Code b) __attribute__((always_inline)) {
      const int32_t difference = first.of((a - first_zero) * (1 << left)) - second.of((b - second_zero) * (1 << left));
      return to.code<Code>(last.of(difference * difference));
    });
  } else {
    broadcast<Code>(call, [=](Code a, Code b) __attribute__((always_inline)) {
      return to.code<Code>(last.of(first.of((a - first_zero) * (1 << left)) + sign * second.of((b - second_zero) * (1 << left))));
    });
  }
}

void integer_add_terms(const Call& call) {
  if (is_wide(call)) add_terms<int16_t>(call);
  else add_terms<int8_t>(call);
}

// LiteRT's default kernel for sums of int16. Of operands of one shape, vectors of 16 values are shifted once before the only rounding;
// the rest is computed as by integer_add_terms.
void integer_add_vectors(const Call& call) {
  const Array &x = call.operands[0], &y = call.operands[1];
  if (!std::equal(x.shape.begin(), x.shape.end(), y.shape.begin(), y.shape.end())) return add_terms<int16_t>(call);
  const Numbers& numbers = call.numbers;
  const Bounds to(numbers);
  const Multiplier first(numbers, "first_"), second(numbers, "second_"), last(numbers, "");
  const auto left = int32_t(numbers.integer("left")), sign = int32_t(numbers.integer("sign"));
  const auto shifted_once = [left](int16_t code, const Multiplier& by) __attribute__((always_inline)) {
    const int32_t shift = left + by.exponent;
    const int64_t shifted = shift >= 0 ? int64_t(code) * (int64_t(1) << shift) : int64_t(code) >> std::min(-shift, 63);
    return int32_t((shifted * by.significand + (int64_t(1) << 30)) >> 31);
  };
  const int64_t size = x.size(), in_vectors = size / 16 * 16;
  const auto *a = x.as<int16_t>(), *b = y.as<int16_t>();
  auto* out = call.results[0].as<int16_t>();
  parallel_for((size + kPiece - 1) / kPiece, 4 * size, [&](int64_t task) {
    const int64_t begin = task * kPiece, end = std::min(size, begin + kPiece), middle = std::min(end, in_vectors);
    for (int64_t k = begin; k < middle; ++k)
      out[k] = to.code<int16_t>(last.of(shifted_once(a[k], first) + sign * shifted_once(b[k], second)));
    for (int64_t k = std::max(begin, middle); k < end; ++k)
      out[k] = to.code<int16_t>(last.of(first.of(a[k] * (1 << left)) + sign * second.of(b[k] * (1 << left))));
  });
}

// Products of steps. "steps": 0: times a float32 factor, to even; 1: rounded twice; 2: times a 24-bit significand and shifted, half up.
void integer_multiply(const Call& call) {
  const Bounds to(call.numbers);
  const auto first = int32_t(call.numbers.integer("first_zero_point")), second = int32_t(call.numbers.integer("second_zero_point"));
  const auto factor = float(call.numbers.real("factor"));
  const Multiplier multiplier(call.numbers, "");
  switch (call.numbers.integer("steps")) {
    case 0: {
      const auto lowest = float(to.lowest), highest = float(to.highest);
      const int32_t zero_point = to.zero_point;
      constexpr float kWhole = 12582912;  // 1.5 * 2^23: beside it, float32 holds whole numbers only
      return broadcast<int8_t>(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
        float real = float((a - first) * (b - second)) * factor;
        real = real < lowest ? lowest : real;
        real = real > highest ? highest : real;
        return int8_t(int32_t((real + kWhole) - kWhole) + zero_point);
      });
    }
    case 1:
      if (is_wide(call)) {
        return broadcast<int16_t>(call, [=](int16_t a, int16_t b) __attribute__((always_inline)) {
          return to.code<int16_t>(multiplier.of((a - first) * (b - second)));
        });
      }
      return broadcast<int8_t>(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
        return to.code<int8_t>(multiplier.of((a - first) * (b - second)));
      });
    default: {
      // Whole numbers of fewer than 42 bits, which float64 holds, shifted, too.
      const double scale = std::ldexp(double(multiplier.significand), -multiplier.exponent);
      const auto lowest = double(to.lowest), highest = double(to.highest);
      const int32_t zero_point = to.zero_point;
      return broadcast<int8_t>(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
        double real = double((a - first) * (b - second)) * scale + 0.5;
        real = real < lowest ? lowest : real;
        real = real > highest ? highest : real;
        return int8_t(int32_t(real + 512) - 512 + zero_point);  // steps lie within -255..255: rounded down
      });
    }
  }
}

// operands: int8, and the slopes of what is negative, int8. Positive steps and products each have a multiplier of their own.
void integer_prelu(const Call& call) {
  const Bounds to(call.numbers);
  const Multiplier positive(call.numbers, "positive_"), negative(call.numbers, "negative_");
  const auto first = int32_t(call.numbers.integer("first_zero_point")), second = int32_t(call.numbers.integer("second_zero_point"));
  broadcast<int8_t>(call, [=](int8_t a, int8_t b) __attribute__((always_inline)) {
    const int32_t steps = a - first;
    return to.code<int8_t>(steps >= 0 ? positive.of(steps) : negative.of(steps * (b - second)));
  });
}

// The larger code, or the smaller one.
template <class Code>
void extreme(const Call& call) {
  if (call.numbers.integer("largest"))
    broadcast<Code>(call, [](Code a, Code b) __attribute__((always_inline)) { return std::max(a, b); });
  else
    broadcast<Code>(call, [](Code a, Code b) __attribute__((always_inline)) { return std::min(a, b); });
}

void integer_extreme(const Call& call) {
  if (is_wide(call)) extreme<int16_t>(call);
  else extreme<int8_t>(call);
}

// --- windows --------------------------------------------------------------------------------------------------------------------

// The mean of every window, half away from zero, or its largest code: [batch, height, width, channels]. Windows have fewer than 2^16
// values.
template <class Code>
void pool(const Call& call) {
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
      Code* to = out.as<Code>() + (task * places + place) * channels;
      if (largest) {
        const Code* codes = x.as<Code>() + (example * height * width) * channels;
        const auto within = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
          Code best[kTogether];
          std::fill_n(best, kTogether, std::numeric_limits<Code>::min());
          for (int64_t y = y_begin; y < y_end; ++y) {
            for (int64_t at = x_begin; at < x_end; ++at) {
              const Code* from = codes + (y * width + at) * channels + first;
              for (int64_t c = 0; c < count; ++c) best[c] = best[c] < from[c] ? from[c] : best[c];
            }
          }
          std::copy_n(best, count, to + first);
        };
        int64_t first = 0;
        for (; first + kTogether <= channels; first += kTogether) within(first, kTogether);
        for (; first + kFew <= channels; first += kFew) within(first, kFew);
        if (first < channels) within(first, channels - first);
        continue;
      }
      std::fill(total.begin(), total.end(), 0);
      for (int64_t y = y_begin; y < y_end; ++y) {
        for (int64_t at = x_begin; at < x_end; ++at) {
          const Code* codes = x.as<Code>() + ((example * height + y) * width + at) * channels;
          for (int64_t c = 0; c < channels; ++c) total[size_t(c)] += codes[c];
        }
      }
      // float64 has whole quotients exactly, and the others are too far from whole numbers to reach one.
      const auto count = double(std::max<int64_t>(1, (y_end - y_begin) * (x_end - x_begin)));
      const double half = std::floor(count / 2);
      for (int64_t c = 0; c < channels; ++c) {
        const auto magnitude = int32_t((std::fabs(double(total[size_t(c)])) + half) / count);
        to[c] = Code(std::min(std::max(total[size_t(c)] < 0 ? -magnitude : magnitude, lowest), highest));
      }
    }
  });
}

void integer_pool(const Call& call) {
  if (is_wide(call)) pool<int16_t>(call);
  else pool<int8_t>(call);
}

// --- reductions -----------------------------------------------------------------------------------------------------------------

// Sums of codes [outer, reduced, inner] as codes [outer, inner]. "steps": 0: float32 product and sum; 1: the steps, which
// are what is left without "offset", rounded twice; 2: one fused multiply-add. "unsigned": bits are those of uint8.
template <class Code>
void sum(const Call& call) {
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
    const Code* codes = x.as<Code>() + task / pieces * reduced * inner + begin;
    Code* out = call.results[0].as<Code>() + task / pieces * inner + begin;
    uint32_t total[kColumnsTogether] = {};  // wraps, as the kernels' sums do
    if (inner == 1) {
      for (int64_t k = 0; k < reduced; ++k) total[0] += uint32_t(int32_t(codes[k]));
    } else {
      for (int64_t k = 0; k < reduced; ++k, codes += inner)
        for (int64_t c = 0; c < count; ++c) total[c] += uint32_t(int32_t(codes[c]));
    }
    for (int64_t c = 0; c < count; ++c) {
      if (steps == 1) {
        out[c] = to.code<Code>(multiply_fixed_point(int32_t(total[c] - uint32_t(offset)), significand, exponent));
        continue;
      }
      float real = steps == 2 ? std::fma(float(int32_t(total[c])), factor, added) : float(int32_t(total[c])) * factor + added;
      real = std::nearbyint(real);
      out[c] = Code(int32_t(std::min(std::max(real, lowest), highest)));
    }
  });
}

void integer_sum(const Call& call) {
  if (call.numbers.integer("unsigned") != 0) sum<uint8_t>(call);
  else if (is_wide(call)) sum<int16_t>(call);
  else sum<int8_t>(call);
}

// The largest or the smallest code, [outer, reduced, inner] -> [outer, inner].
template <class Code>
void reduce_extreme(const Call& call) {
  const Array& x = call.operands[0];
  const int64_t outer = x.shape[0], reduced = x.shape[1], inner = x.shape[2];
  const bool largest = call.numbers.integer("largest") != 0;
  parallel_for(outer, x.size(), [&](int64_t task) {
    const Code* codes = x.as<Code>() + task * reduced * inner;
    Code* out = call.results[0].as<Code>() + task * inner;
    std::copy_n(codes, inner, out);
    for (int64_t k = 1; k < reduced; ++k) {
      codes += inner;
      if (largest) {
        for (int64_t c = 0; c < inner; ++c) out[c] = out[c] < codes[c] ? codes[c] : out[c];
      } else {
        for (int64_t c = 0; c < inner; ++c) out[c] = codes[c] < out[c] ? codes[c] : out[c];
      }
    }
  });
}

void integer_reduce_extreme(const Call& call) {
  if (is_wide(call)) reduce_extreme<int16_t>(call);
  else reduce_extreme<int8_t>(call);
}

// The place of the first largest or smallest code, int8 [outer, reduced, inner] -> int32 or int64 [outer, inner].
template <class Index>
void place_of_extreme(const Call& call) {
  const Array& x = call.operands[0];
  const int64_t outer = x.shape[0], reduced = x.shape[1], inner = x.shape[2];
  const bool largest = call.numbers.integer("largest") != 0;
  parallel_for(outer, x.size(), [&](int64_t task) {
    const int8_t* codes = x.as<int8_t>() + task * reduced * inner;
    Index* out = call.results[0].as<Index>() + task * inner;
    for (int64_t c = 0; c < inner; ++c) {
      int64_t found = 0;
      for (int64_t k = 1; k < reduced; ++k) {
        const int8_t code = codes[k * inner + c], best = codes[found * inner + c];
        if (largest ? code > best : code < best) found = k;
      }
      out[c] = Index(found);
    }
  });
}

void integer_place_of_extreme(const Call& call) {
  if (call.results[0].dtype == DType::int32) place_of_extreme<int32_t>(call);
  else place_of_extreme<int64_t>(call);
}

// --- images of another size -----------------------------------------------------------------------------------------------------

// operands: [batch, height, width, channels]; for each line of the result, and each place of a line, int32 [2, 3, ...]: the value
// before, the one after, the share of the latter in 1 / 2^"bits". "half_up": how halves are rounded, otherwise away from zero.
// Total holds a code shifted by twice as many bits.
template <class Code, class Total>
void resize_bilinear(const Call& call) {
  const Array &x = call.operands[0], &out = call.results[0];
  const int64_t height = x.shape[1], width = x.shape[2], channels = x.shape[3], lines = out.shape[1], places = out.shape[2];
  const auto bits = int(call.numbers.integer("bits"));
  const bool half_up = call.numbers.integer("half_up") != 0;
  const int32_t one = 1 << bits, *down = call.operands[1].as<int32_t>(), *right = call.operands[2].as<int32_t>();
  const Total half = Total(1) << (2 * bits - 1);
  parallel_for(x.shape[0] * lines, 8 * out.size(), [&](int64_t task) {
    const int64_t line = task % lines, example = task / lines;
    const Code* upper = x.as<Code>() + (example * height + down[line]) * width * channels;
    const Code* lower = x.as<Code>() + (example * height + down[lines + line]) * width * channels;
    const int32_t below = down[2 * lines + line], above = one - below;
    Code* to = out.as<Code>() + task * places * channels;
    for (int64_t place = 0; place < places; ++place, to += channels) {
      const int64_t before = right[place] * channels, after = right[places + place] * channels;
      const int32_t share = right[2 * places + place], rest = one - share;
      const auto between = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
        const Code *above_before = upper + before + first, *above_after = upper + after + first;
        const Code *below_before = lower + before + first, *below_after = lower + after + first;
        Code results[kFew];
        for (int64_t c = 0; c < count; ++c) {
          const Total top = above_before[c] * rest + above_after[c] * share;
          const Total bottom = below_before[c] * rest + below_after[c] * share;
          const Total total = top * above + bottom * below;  // shares lie within -1..1
          const Total up = (total + half) >> (2 * bits), magnitude = ((total < 0 ? -total : total) + half) >> (2 * bits);
          results[c] = Code(half_up ? up : total > 0 ? magnitude : -magnitude);
        }
        std::copy_n(results, count, to + first);
      };
      int64_t first = 0;
      for (; first + kFew <= channels; first += kFew) between(first, kFew);
      if (first < channels) between(first, channels - first);
    }
  });
}

void integer_resize_bilinear(const Call& call) {
  if (is_wide(call)) resize_bilinear<int16_t, int64_t>(call);
  else resize_bilinear<int8_t, int32_t>(call);
}

// --- places ---------------------------------------------------------------------------------------------------------------------

// operands: [batch, ...]; int64 [3, axes]: how many codes of each axis of an example move, and how far apart they lie in the
// operand and in the result. From place "from" to place "to" of an example; where "fills", all of the result is "fill" before.
template <class Code>
void move(const Call& call) {
  const Array &x = call.operands[0], &plan = call.operands[1], &out = call.results[0];
  const Numbers& numbers = call.numbers;
  const auto axes = size_t(plan.shape[1]);
  const std::span<const int64_t> sizes(plan.as<int64_t>(), axes), from(sizes.data() + axes, axes), to(from.data() + axes, axes);
  const int64_t batch = x.shape[0], example_from = x.size() / std::max<int64_t>(batch, 1);
  const int64_t example_to = out.size() / std::max<int64_t>(batch, 1);
  const int64_t begin_from = numbers.integer("from"), begin_to = numbers.integer("to");
  const bool fills = numbers.integer("fills") != 0;
  const auto fill = Code(numbers.integer("fill"));
  // The last two axes are rows of codes.
  const int64_t length = sizes[axes - 1], rows = axes > 1 ? sizes[axes - 2] : 1;
  const int64_t row_from = axes > 1 ? from[axes - 2] : 0, row_to = axes > 1 ? to[axes - 2] : 0;
  const int64_t code_from = from[axes - 1], code_to = to[axes - 1];
  int64_t planes = batch;
  for (size_t k = 0; k + 2 < axes; ++k) planes *= sizes[k];
  if (fills) {
    std::fill_n(out.as<Code>(), out.size(), fill);
  }
  const int64_t together = std::max<int64_t>(1, kPiece / std::max<int64_t>(length, 1)), pieces = (rows + together - 1) / together;
  parallel_for(planes * pieces, planes * rows * length, [&](int64_t task) {
    const int64_t first = task % pieces * together, count = std::min(together, rows - first);
    int64_t rest = task / pieces, read = begin_from + first * row_from, written = begin_to + first * row_to;
    for (size_t k = axes > 1 ? axes - 2 : 0; k-- > 0;) {
      const int64_t index = rest % sizes[k];
      rest /= sizes[k];
      read += index * from[k];
      written += index * to[k];
    }
    const Code* codes = x.as<Code>() + rest * example_from + read;
    Code* result = out.as<Code>() + rest * example_to + written;
    for (int64_t row = 0; row < count; ++row, codes += row_from, result += row_to) {
      if (code_from != 1 || code_to != 1) {
        for (int64_t k = 0; k < length; ++k) result[k * code_to] = codes[k * code_from];
      } else if (length == kFew) {
        std::memcpy(result, codes, size_t(kFew) * sizeof(Code));
      } else {
        std::memcpy(result, codes, size_t(length) * sizeof(Code));
      }
    }
  });
}

void integer_move(const Call& call) {
  if (is_wide(call)) move<int16_t>(call);
  else move<int8_t>(call);
}

// operands: codes [batch or 1, ...]; int32 [3, pieces]: where each piece of an example begins in the operand and in the result, and how
// many codes it has. The one example of a constant serves all.
template <class Code>
void rearrange(const Call& call) {
  const Array &x = call.operands[0], &plan = call.operands[1], &out = call.results[0];
  const int64_t pieces = plan.shape[1], batch = out.shape[0], example_to = out.size() / std::max<int64_t>(batch, 1);
  const int64_t example_from = x.shape[0] == batch ? x.size() / std::max<int64_t>(batch, 1) : 0;
  const int32_t *from = plan.as<int32_t>(), *to = from + pieces, *lengths = to + pieces;
  constexpr int64_t kTogether = 256;
  const int64_t tasks = (pieces + kTogether - 1) / kTogether;
  parallel_for(batch * tasks, out.size(), [&](int64_t task) {
    const int64_t example = task / tasks, first = task % tasks * kTogether, last = std::min(pieces, first + kTogether);
    const Code* codes = x.as<Code>() + example * example_from;
    Code* result = out.as<Code>() + example * example_to;
    for (int64_t k = first; k < last; ++k) {
      if (lengths[k] == 1) result[to[k]] = codes[from[k]];
      else std::memcpy(result + to[k], codes + from[k], size_t(lengths[k]) * sizeof(Code));
    }
  });
}

void integer_rearrange(const Call& call) {
  if (is_wide(call)) rearrange<int16_t>(call);
  else rearrange<int8_t>(call);
}

// The codes of the operand, in the same order.
void integer_copy(const Call& call) {
  const int64_t size = call.operands[0].size() * size_of(call.operands[0].dtype);
  constexpr int64_t kBytes = 1 << 20;
  parallel_for((size + kBytes - 1) / kBytes, size / 4, [&](int64_t task) {
    const int64_t begin = task * kBytes;
    std::memcpy(call.results[0].as<uint8_t>() + begin, call.operands[0].as<uint8_t>() + begin, size_t(std::min(kBytes, size - begin)));
  });
}

[[maybe_unused]] const bool entered =
    add_kernel("integer_table", integer_table) && add_kernel("integer_table_in_eights", integer_table_in_eights) &&
    add_kernel("integer_add_shifted", integer_add_shifted) &&
    add_kernel("integer_add_terms", integer_add_terms) && add_kernel("integer_add_vectors", integer_add_vectors) &&
    add_kernel("integer_multiply", integer_multiply) && add_kernel("integer_prelu", integer_prelu) &&
    add_kernel("integer_extreme", integer_extreme) && add_kernel("integer_pool", integer_pool) &&
    add_kernel("integer_sum", integer_sum) && add_kernel("integer_reduce_extreme", integer_reduce_extreme) &&
    add_kernel("integer_place_of_extreme", integer_place_of_extreme) && 
    add_kernel("integer_resize_bilinear", integer_resize_bilinear) && add_kernel("integer_move", integer_move) &&
    add_kernel("integer_rearrange", integer_rearrange) && add_kernel("integer_copy", integer_copy);

}  // namespace
}  // namespace exactqat
