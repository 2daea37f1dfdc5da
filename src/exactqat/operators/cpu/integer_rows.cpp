// SPDX-License-Identifier: Apache-2.0
// Operators over rows of codes: device/normalization.py says what they compute. Rows are [rows, length].
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "integer_rounding.h"
#include "parallel.h"

namespace exactqat {
namespace {

// make(row) for all rows of x, short ones together. cost: of one code.
template <class Make>
void for_rows(const Array& x, int64_t cost, const Make& make) {
  const int64_t together = std::max<int64_t>(1, 2048 / x.shape[1]), tasks = (x.shape[0] + together - 1) / together;
  parallel_for(tasks, cost * x.size(), [&](int64_t task) {
    for (int64_t row = task * together; row < std::min(x.shape[0], (task + 1) * together); ++row) make(row);
  });
}

// --- fixed point ----------------------------------------------------------------------------------------------------------------

// gemmlowp's SaturatingRoundingDoublingHighMul, of numbers that are not both the lowest.
int32_t high_multiply(int32_t a, int32_t b) { return int32_t((int64_t(a) * b + (int64_t(1) << 30)) >> 31); }

int32_t shifted_left(int32_t x, int bits) {
  return int32_t(std::clamp<int64_t>(int64_t(x) * (int64_t(1) << bits), std::numeric_limits<int32_t>::min(),
                                     std::numeric_limits<int32_t>::max()));
}

// Rounded half away from zero.
int32_t shifted_right(int32_t x, int bits) {
  const auto mask = int32_t((uint32_t(1) << bits) - 1);
  return (x >> bits) + ((x & mask) > (mask >> 1) + (x < 0));
}

int32_t wrapped_sum(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

// (a + b) / 2, likewise.
int32_t half_sum(int32_t a, int32_t b) {
  const int64_t total = int64_t(a) + b, nudged = total + (total >= 0 ? 1 : -1);
  return int32_t(nudged >= 0 ? nudged >> 1 : -(-nudged >> 1));
}

// The functions of device/fixed_point_functions.py. 1 / (1 + x) in Q0.31:
int32_t one_over_one_plus(int32_t x) {
  const int32_t half = half_sum(x, std::numeric_limits<int32_t>::max());
  int32_t estimate = wrapped_sum(1515870810, high_multiply(half, -1010580540));
  for (int k = 0; k < 3; ++k) {
    const int32_t error = (1 << 29) - high_multiply(half, estimate);
    estimate = wrapped_sum(estimate, shifted_left(high_multiply(estimate, error), 2));
  }
  return shifted_left(estimate, 1);
}

// log(x) of 5 integer bits for x >= 1 of 12.
int32_t log_of_one_and_more(int32_t x) {
  constexpr int32_t kLog2 = 1488522236, kRootOfHalf = 1518500250, kFourthRootOfHalf = 1805811301;
  constexpr int32_t kAlphaN = 117049297, kAlphaD = 127690142, kAlphaI = 1057819769, kAlphaF = 638450708;
  constexpr int kBits = 12, kAccumulatorBits = 6;
  constexpr int64_t kQuarter = (int64_t(1) << 29) >> kAccumulatorBits;
  constexpr int64_t kLowest = std::numeric_limits<int32_t>::min(), kHighest = std::numeric_limits<int32_t>::max();
  const int headroom = std::countl_zero(uint32_t(x));
  const int32_t first = shifted_left(high_multiply(int32_t(uint32_t(x) << (headroom - 1)), kRootOfHalf), 1);
  const int64_t first_power = std::min(shifted_left(kBits - headroom, 31 - kAccumulatorBits) + kQuarter, kHighest);
  const int second_headroom = std::countl_zero(uint32_t(high_multiply(x, kRootOfHalf))) - 1;
  const int32_t second = shifted_left(x, second_headroom);
  const int64_t second_power = std::max(shifted_left(kBits - second_headroom, 31 - kAccumulatorBits) - kQuarter, kLowest);
  const int32_t r = std::min(first, second);
  const auto power = int32_t(std::max(first_power, second_power));
  const int32_t p = half_sum(r, kFourthRootOfHalf);
  int32_t q = wrapped_sum(r, -kFourthRootOfHalf);
  q = wrapped_sum(q, q);
  const int32_t square = high_multiply(q, q);
  const int32_t numerator = wrapped_sum(high_multiply(q, r), high_multiply(high_multiply(q, square), kAlphaN));
  const int32_t inner = wrapped_sum(wrapped_sum(kAlphaI, q), high_multiply(kAlphaD, square));
  const int32_t denominator = wrapped_sum(high_multiply(p, inner), high_multiply(kAlphaF, q));
  const int32_t quotient = high_multiply(shifted_right(numerator, kAccumulatorBits), one_over_one_plus(denominator));
  return shifted_left(wrapped_sum(high_multiply(power, kLog2), quotient), 1);
}

// factor in Q0.31 with 1 / sqrt(x) = factor * 2^-exponent; 0 is taken for 1.
struct InverseSquareRoot {
  int32_t factor = std::numeric_limits<int32_t>::max(), exponent = 0;

  explicit InverseSquareRoot(int32_t x) {
    if (x <= 1) return;
    int shift = 11;
    int32_t scaled = x;
    for (; scaled >= 1 << 29; ++shift) scaled /= 4;  // twice at most
    const int pairs = (std::countl_zero(uint32_t(scaled)) - 1) / 2 - 1;
    shift -= pairs;
    const int32_t value = (scaled << (2 * pairs)) >> 1;  // Q3.28
    const int32_t half_value = shifted_right(value, 1), half_three = (1 << 28) + (1 << 27);
    int32_t estimate = 1 << 28;
    for (int k = 0; k < 5; ++k) {
      const int32_t cube = shifted_left(high_multiply(high_multiply(estimate, estimate), estimate), 6);
      estimate = shifted_left(wrapped_sum(high_multiply(half_three, estimate), -high_multiply(half_value, cube)), 3);
    }
    factor = high_multiply(estimate, 1518500250);  // sqrt(1 / 2)
    if (shift < 0) factor = int32_t(uint32_t(factor) << -shift);
    exponent = std::max(shift, 0);
  }
};

// --- softmax --------------------------------------------------------------------------------------------------------------------

// XNNPACK leaves SOFTMAX to LiteRT's own kernel. operands: int8 [rows, length]; exponentials by how far a code lies below the largest
// of its row, float32 [256]. result: int8.
void integer_softmax(const Call& call) {
  const Array& x = call.operands[0];
  const float* powers = call.operands[1].as<float>();
  const int64_t length = x.shape[1];
  const auto scale = float(call.numbers.real("scale"));
  const auto zero_point = float(call.numbers.integer("zero_point"));
  for_rows(x, 8, [&](int64_t row) {
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
        table[k] = int8_t(int32_t(std::clamp(std::round(powers[k] * factor) + zero_point, -128.0f, 127.0f)));
    for (int64_t k = 0; k < length; ++k) {
      const int below = largest - codes[k];
      out[k] = length >= 256
                   ? table[below]
                   : int8_t(int32_t(std::clamp(std::round(powers[below] * factor) + zero_point, -128.0f, 127.0f)));
    }
  });
}

// The reference kernels' SOFTMAX. operands: int8 [rows, length]; by how far a code lies below the largest of its row int32 [2, 256]:
// what it adds to the sum in Q12.19, and its power in Q0.31, which is 0 for those too far below. Rows add up to less than 512.
void integer_softmax_fixed(const Call& call) {
  const Array& x = call.operands[0];
  const int32_t *terms = call.operands[1].as<int32_t>(), *powers = terms + 256;
  const int64_t length = x.shape[1];
  for_rows(x, 8, [&](int64_t row) {
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
  });
}

// An interpolated table of 513 entries at a code: device/interpolated.py's look_up.
inline int32_t look_up_between(int32_t code, const int32_t* table) {
  const int32_t* entry = table + 256 + (code >> 7);
  return entry[0] + (((entry[1] - entry[0]) * (code & 127) + 64) >> 7);
}

// SOFTMAX of int16. operands: [rows, length]; tables of exponentials and of 1 / (1 + x), int32 [2, 513]. result: int16.
void integer_softmax_wide(const Call& call) {
  const Array& x = call.operands[0];
  const int32_t *powers = call.operands[1].as<int32_t>(), *reciprocals = powers + 513;
  const auto significand = int32_t(call.numbers.integer("significand")), exponent = int32_t(call.numbers.integer("exponent"));
  constexpr int32_t kLowest = std::numeric_limits<int16_t>::min(), kHighest = std::numeric_limits<int16_t>::max();
  const int64_t length = x.shape[1];
  for_rows(x, 16, [&](int64_t row) {
    const int16_t* codes = x.as<int16_t>() + row * length;
    int16_t* out = call.results[0].as<int16_t>() + row * length;
    const int32_t largest = *std::max_element(codes, codes + length);
    int64_t total = 0;
    for (int64_t k = 0; k < length; ++k) {
      const int64_t below = int64_t(multiply_fixed_point(codes[k] - largest, significand, exponent)) + kHighest;
      const int32_t value = look_up_between(int32_t(std::clamp<int64_t>(below, kLowest, kHighest)), powers);
      out[k] = int16_t(value);
      total += value;
    }
    const int headroom = 32 - int(std::bit_width(uint64_t(total)));
    const int64_t shifted = ((headroom >= 1 ? total << (headroom - 1) : total >> (1 - headroom)) + (1 << 13)) >> 14;
    const int64_t place = std::clamp<int64_t>(shifted - (1 << 15) - (1 << 16), kLowest, kHighest);
    const int64_t factor = look_up_between(int32_t(place), reciprocals);
    const int shift = 31 - headroom;
    for (int64_t k = 0; k < length; ++k)
      out[k] = int16_t(std::clamp<int64_t>((out[k] * factor + (int64_t(1) << (shift - 1))) >> shift, 0, kHighest));
  });
}

// --- its logarithm --------------------------------------------------------------------------------------------------------------

// LiteRT's default LOG_SOFTMAX. operands: int8 rows; exponentials by how far a code lies below the largest of its row, float32 [256].
// result: int8.
void integer_log_softmax(const Call& call) {
  const Array& x = call.operands[0];
  const float* powers = call.operands[1].as<float>();
  const int64_t length = x.shape[1];
  const auto scale = float(call.numbers.real("scale")), result_scale = float(call.numbers.real("result_scale"));
  const auto ratio = scale / result_scale, zero_point = float(call.numbers.integer("zero_point"));
  for_rows(x, 8, [&](int64_t row) {
    const int8_t* codes = x.as<int8_t>() + row * length;
    int8_t* out = call.results[0].as<int8_t>() + row * length;
    const int8_t largest = *std::max_element(codes, codes + length);
    float total = 0;  // one after the other, as the kernel adds them
    for (int64_t k = 0; k < length; ++k) total += powers[largest - codes[k]];
    const float shift = (scale * float(largest) + float(std::log(double(total)))) / result_scale;
    for (int64_t k = 0; k < length; ++k) {
      const float rounded = std::nearbyint(ratio * float(codes[k]) - shift) + zero_point;
      out[k] = int8_t(int32_t(std::clamp(rounded, -128.0f, 127.0f)));
    }
  });
}

// The reference kernels'. operands: int8 rows; by how far a code lies below the largest of its row int32 [2, 256]: that difference in
// Q5.26, and its power in Q12.19, which is 0 for those more than "radius" below. "significand" and "exponent" turn Q5.26 into codes.
void integer_log_softmax_fixed(const Call& call) {
  const Array& x = call.operands[0];
  const int32_t *differences = call.operands[1].as<int32_t>(), *powers = differences + 256;
  const int64_t length = x.shape[1], zero_point = call.numbers.integer("zero_point");
  const auto radius = call.numbers.integer("radius");
  const auto significand = int32_t(call.numbers.integer("significand")), exponent = int32_t(call.numbers.integer("exponent"));
  constexpr int kBits = 22;  // from Q5.26 to a grid of 1 / 16
  for_rows(x, 16, [&](int64_t row) {
    const int8_t* codes = x.as<int8_t>() + row * length;
    int8_t* out = call.results[0].as<int8_t>() + row * length;
    const int32_t largest = *std::max_element(codes, codes + length);
    int32_t total = 0;
    for (int64_t k = 0; k < length; ++k) total += powers[largest - codes[k]];
    const int32_t log = log_of_one_and_more(total);
    const int32_t lowest = multiply_fixed_point(log + std::numeric_limits<int32_t>::min(), significand, exponent);
    const int64_t far = std::max<int64_t>(-radius - 1, lowest);
    for (int64_t k = 0; k < length; ++k) {
      const int32_t below = largest - codes[k];
      const int64_t difference = int64_t(differences[below]) - log;  // fits into 32 bits where it counts
      const int64_t steps = -below > far ? shifted_right(int32_t(difference), kBits) + zero_point : -128;
      out[k] = int8_t(std::clamp<int64_t>(steps, -128, 127));
    }
  });
}

// --- length ---------------------------------------------------------------------------------------------------------------------

// L2_NORMALIZATION. operands: int8 rows of fewer than 2^15 codes with a "zero_point" of 0. result: int8.
void integer_l2_normalization(const Call& call) {
  const Array& x = call.operands[0];
  const int64_t length = x.shape[1];
  const auto zero_point = int32_t(call.numbers.integer("zero_point"));
  for_rows(x, 8, [&](int64_t row) {
    const int8_t* codes = x.as<int8_t>() + row * length;
    int8_t* out = call.results[0].as<int8_t>() + row * length;
    int32_t squares = 0;
    for (int64_t k = 0; k < length; ++k) squares += (codes[k] - zero_point) * (codes[k] - zero_point);
    const InverseSquareRoot by(squares);
    for (int64_t k = 0; k < length; ++k)
      out[k] = int8_t(std::clamp(multiply_fixed_point(codes[k] - zero_point, by.factor, 7 - by.exponent), -128, 127));
  });
}

[[maybe_unused]] const bool entered =
    add_kernel("integer_softmax", integer_softmax) && add_kernel("integer_softmax_fixed", integer_softmax_fixed) &&
    add_kernel("integer_softmax_wide", integer_softmax_wide) && add_kernel("integer_log_softmax", integer_log_softmax) &&
    add_kernel("integer_log_softmax_fixed", integer_log_softmax_fixed) &&
    add_kernel("integer_l2_normalization", integer_l2_normalization);

}  // namespace
}  // namespace exactqat
