// SPDX-License-Identifier: Apache-2.0
// TensorFlow's Nudge: a range moved so that zero is one of its steps. The arithmetic of reference/fake_quant.py.
#pragma once
#include <cmath>
#include <cstdint>

#include "call.h"

namespace exactqat {

template <class T>
struct Nudged {
  T nudged_min, nudged_max, nudged_scale, inv_nudged_scale, quant_zero;
  bool no_range;  // min == max == 0
};

template <class T>
Nudged<T> nudge(T min, T max, const Numbers& numbers) {
  const T quant_min = numbers.integer("narrow_range") ? T(1) : T(0);
  const T quant_max = T((int64_t{1} << numbers.integer("num_bits")) - 1);
  const T steps = quant_max - quant_min;
  const T scale = (max - min) / steps;
  const T inverse = steps / (max - min);
  const T zero_point_from_min = quant_min - min / scale;
  T zero_point = T(0);  // for NaN
  if (zero_point_from_min < quant_min) zero_point = quant_min;
  else if (zero_point_from_min > quant_max) zero_point = quant_max;
  else if (zero_point_from_min == zero_point_from_min) zero_point = std::round(zero_point_from_min);
  const T nudged_min = (quant_min - zero_point) * scale;
  const T nudged_max = (quant_max - zero_point) * scale;
  const T quant_zero = std::floor(-nudged_min * inverse + T(0.5));
  return {nudged_min, nudged_max, scale, inverse, quant_zero, min == T(0) && max == T(0)};
}

}  // namespace exactqat
