// SPDX-License-Identifier: Apache-2.0
// From int32 sums to the codes of a device: device/weighted.py's Requantization and device/arithmetic.py's multiply_fixed_point,
// sixteen columns at a time, where the sums lie.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "simd.h"

namespace exactqat {

// Columns that are summed and rounded together. Whatever has one entry for each column is padded to whole blocks of kColumns.
constexpr int64_t kPanel = 16, kColumns = 64;

constexpr int64_t whole(int64_t size, int64_t of) { return (size + of - 1) / of * of; }

// How a sum becomes steps of the result, by the names of device.weighted.ROUNDINGS.
// `wide` is of sums of 64 bits; these know float64 as well.
enum class Steps : int64_t { float32, fixed_point, float64, wide };

struct Rounding {
  Steps steps;
  // float32 or float64 [columns]; of fixed_point int32 [2, columns]: significands in Q31, exponents; of wide int64 [2, columns]:
  // significands of 15 bits, and how far products are shifted back, at least 1
  const void* factors;
  int64_t columns;      // padded
  int32_t zero_point, lowest, highest;  // lowest and highest steps from the zero point
};

// `factors` is an operand of the call; the call knows the numbers "steps", "zero_point", "lowest" and "highest", which are codes.
inline Rounding rounding_of(const Call& call, const Array& factors) {
  const auto zero_point = int32_t(call.numbers.integer("zero_point"));
  return {Steps(call.numbers.integer("steps")), factors.data,    factors.shape[factors.shape.size() - 1],
          zero_point, int32_t(call.numbers.integer("lowest")) - zero_point, int32_t(call.numbers.integer("highest")) - zero_point};
}

// TensorFlow Lite's MultiplyByQuantizedMultiplier: a doubled high product rounded half up, then a shift that rounds half away from
// zero. A shift to the left wraps in the kernels.
inline int32_t multiply_fixed_point(int32_t sum, int32_t significand, int32_t exponent) {
  const auto left = int32_t(uint32_t(sum) << std::max(exponent, 0));
  // The 32 bits that are kept are those of an arithmetic shift, which not all instruction sets have for vectors of 64 bits.
  const auto high = int32_t(uint64_t(int64_t(left) * significand + (int64_t(1) << 30)) >> 31);
  const int32_t shift = std::max(-exponent, 0);
  const auto mask = int32_t((uint32_t(1) << shift) - 1);
  return (high >> shift) + ((high & mask) > (mask >> 1) + (high < 0));
}

// Sixteen sums of the columns from `column` on, as int8 codes; the first `count` are written.
template <Steps kSteps>
[[gnu::always_inline]] inline void store_panel(const Rounding& to, const int32_t* sums, int64_t column, int64_t count, int8_t* out) {
#if defined(__AVX512F__)
  const __m512i lowest = _mm512_set1_epi32(to.lowest), highest = _mm512_set1_epi32(to.highest);
  __m512i steps = _mm512_loadu_si512(sums);
  if constexpr (kSteps == Steps::float32) {
    // The bounds are whole numbers, so that clamping may come first; float32 may not hold what lies beyond.
    __m512 real = _mm512_mul_ps(_mm512_cvtepi32_ps(steps), _mm512_loadu_ps(static_cast<const float*>(to.factors) + column));
    real = _mm512_min_ps(_mm512_max_ps(real, _mm512_cvtepi32_ps(lowest)), _mm512_cvtepi32_ps(highest));
    steps = _mm512_cvt_roundps_epi32(real, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else if constexpr (kSteps == Steps::fixed_point) {
    const auto* significands = static_cast<const int32_t*>(to.factors) + column;
    const __m512i significand = _mm512_loadu_si512(significands), exponent = _mm512_loadu_si512(significands + to.columns);
    const __m512i zero = _mm512_setzero_si512(), half = _mm512_set1_epi64(int64_t(1) << 30);
    const __m512i left = _mm512_sllv_epi32(steps, _mm512_max_epi32(exponent, zero));
    __m512i even = _mm512_mul_epi32(left, significand);
    __m512i odd = _mm512_mul_epi32(_mm512_srli_epi64(left, 32), _mm512_srli_epi64(significand, 32));
    even = _mm512_srli_epi64(_mm512_add_epi64(even, half), 31);
    odd = _mm512_slli_epi64(_mm512_add_epi64(odd, half), 1);
    const __m512i high = _mm512_mask_blend_epi32(0xaaaa, even, odd);
    const __m512i one = _mm512_set1_epi32(1), shift = _mm512_max_epi32(_mm512_sub_epi32(zero, exponent), zero);
    const __m512i mask = _mm512_sub_epi32(_mm512_sllv_epi32(one, shift), one);
    const __m512i threshold = _mm512_add_epi32(_mm512_srli_epi32(mask, 1), _mm512_srli_epi32(high, 31));
    const __mmask16 up = _mm512_cmpgt_epi32_mask(_mm512_and_si512(high, mask), threshold);
    steps = _mm512_srav_epi32(high, shift);
    steps = _mm512_mask_add_epi32(steps, up, steps, one);
    steps = _mm512_min_epi32(_mm512_max_epi32(steps, lowest), highest);
  } else {
    const auto* factors = static_cast<const double*>(to.factors) + column;
    const __m512d low = _mm512_set1_pd(to.lowest), high = _mm512_set1_pd(to.highest);
    const auto rounded = [&](__m256i part, const double* factor) __attribute__((always_inline)) {
      const __m512d real = _mm512_mul_pd(_mm512_maskz_cvtepi32_pd(0xff, part), _mm512_loadu_pd(factor));
      const __m512d half = _mm512_or_pd(_mm512_and_pd(real, _mm512_set1_pd(-0.0)), _mm512_set1_pd(0.5));
      return _mm512_maskz_cvttpd_epi32(0xff, _mm512_min_pd(_mm512_max_pd(_mm512_add_pd(real, half), low), high));
    };
    const __m256i first = rounded(_mm512_castsi512_si256(steps), factors);
    const __m256i second = rounded(_mm512_maskz_extracti64x4_epi64(0xff, steps, 1), factors + 8);
    steps = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(first), second, 1);
  }
  const __m128i codes = _mm512_cvtepi32_epi8(_mm512_add_epi32(steps, _mm512_set1_epi32(to.zero_point)));
  if (count >= kPanel) _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
  else _mm_mask_storeu_epi8(out, __mmask16((1u << count) - 1), codes);
#else
  int32_t steps[kPanel];
  if constexpr (kSteps == Steps::float32) {
    const auto* factors = static_cast<const float*>(to.factors) + column;
    const auto lowest = float(to.lowest), highest = float(to.highest);
    constexpr float kWhole = 12582912;  // 1.5 * 2^23: beside it, float32 holds whole numbers only
    for (int64_t k = 0; k < kPanel; ++k) {
      float real = float(sums[k]) * factors[k];
      real = real < lowest ? lowest : real;
      real = real > highest ? highest : real;
      steps[k] = int32_t((real + kWhole) - kWhole);
    }
  } else if constexpr (kSteps == Steps::fixed_point) {
    const auto* significands = static_cast<const int32_t*>(to.factors) + column;
    const int32_t* exponents = significands + to.columns;
    for (int64_t k = 0; k < kPanel; ++k)
      steps[k] = std::clamp(multiply_fixed_point(sums[k], significands[k], exponents[k]), to.lowest, to.highest);
  } else {
    const auto* factors = static_cast<const double*>(to.factors) + column;
    const auto lowest = double(to.lowest), highest = double(to.highest);
    for (int64_t k = 0; k < kPanel; ++k) {
      double real = double(sums[k]) * factors[k];
      real += std::copysign(0.5, real);
      real = real < lowest ? lowest : real;
      steps[k] = int32_t(real > highest ? highest : real);
    }
  }
  int8_t codes[kPanel];
  for (int64_t k = 0; k < kPanel; ++k) codes[k] = int8_t(steps[k] + to.zero_point);
  if (count >= kPanel) std::memcpy(out, codes, kPanel);
  else std::memcpy(out, codes, size_t(count));
#endif
}

// Rows of sums, `width` from one to the next, of the columns from `column` on: `count` codes of each go to out(row).
template <Steps kSteps, class Out>
void store_rows(const Rounding& to, const int32_t* sums, int64_t rows, int64_t width, int64_t column, int64_t count, const Out& out) {
  for (int64_t row = 0; row < rows; ++row) {
    int8_t* codes = out(row);
    for (int64_t k = 0; k < count; k += kPanel) store_panel<kSteps>(to, sums + row * width + k, column + k, count - k, codes + k);
  }
}

template <class Out>
void store_rows(const Rounding& to, const int32_t* sums, int64_t rows, int64_t width, int64_t column, int64_t count, const Out& out) {
  if (to.steps == Steps::float32) store_rows<Steps::float32>(to, sums, rows, width, column, count, out);
  else if (to.steps == Steps::fixed_point) store_rows<Steps::fixed_point>(to, sums, rows, width, column, count, out);
  else store_rows<Steps::float64>(to, sums, rows, width, column, count, out);
}

// The same for sums of 64 bits and codes of 16: device/arithmetic.py's multiply_wide.
template <Steps kSteps>
void store_wide_rows(const Rounding& to, const int64_t* sums, int64_t rows, int64_t width, int64_t column, int64_t count,
                     int16_t* const* out) {
  const auto lowest = int64_t(to.lowest), highest = int64_t(to.highest);
  const auto* significands = static_cast<const int64_t*>(to.factors) + column;
  const int64_t* shifts = significands + to.columns;
  const auto* factors = static_cast<const double*>(to.factors) + column;
  for (int64_t row = 0; row < rows; ++row, sums += width) {
    int16_t* codes = out[row] + column;
    for (int64_t k = 0; k < count; ++k) {
      int64_t steps;
      if constexpr (kSteps == Steps::wide) {
        steps = (sums[k] * significands[k] + (int64_t(1) << (shifts[k] - 1))) >> shifts[k];
      } else {
        double real = double(sums[k]) * factors[k];
        real += std::copysign(0.5, real);
        steps = int64_t(std::min(std::max(real, double(lowest)), double(highest)));
      }
      codes[k] = int16_t(std::min(std::max(steps, lowest), highest) + to.zero_point);
    }
  }
}

inline void store_wide_rows(const Rounding& to, const int64_t* sums, int64_t rows, int64_t width, int64_t column, int64_t count,
                            int16_t* const* out) {
  if (to.steps == Steps::wide) store_wide_rows<Steps::wide>(to, sums, rows, width, column, count, out);
  else store_wide_rows<Steps::float64>(to, sums, rows, width, column, count, out);
}

// Of two products of 16 with 8 bits, sums of so many fit into 32 bits.
constexpr int64_t kWidePairs = 248;

}  // namespace exactqat
