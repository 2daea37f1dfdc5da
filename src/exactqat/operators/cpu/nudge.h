// SPDX-License-Identifier: Apache-2.0
// TensorFlow's Nudge: a range moved so that zero is one of its steps. The arithmetic of reference/fake_quant.py.
#pragma once
#include <cstdint>

#include "call.h"
#include "elementwise.h"

namespace exactqat {

// The integers that a range is quantized to.
template <class T>
struct Quantized {
  T min, max;
  explicit Quantized(const Numbers& numbers)
      : min(numbers.integer("narrow_range") ? T(1) : T(0)), max(T((int64_t{1} << numbers.integer("num_bits")) - 1)) {}
};

// TensorFlow's `Nudge` for a vector of ranges.
template <class T>
struct NudgedVectors {
  Vector<T> nudged_min, nudged_max, nudged_scale, inv_nudged_scale, quant_zero;
  Mask<T> no_range;  // min == max == 0

  NudgedVectors(Vector<T> min, Vector<T> max, Quantized<T> quantized) {
    using V = Vector<T>;
    const V zero, one = V::all(T(1)), half = V::all(T(0.5));
    const V quant_min = V::all(quantized.min), quant_max = V::all(quantized.max);
    const V steps = quant_max - quant_min, width = max - min;
    const V scale = flushed_quotient(width, steps), inverse = flushed_quotient(steps, width);
    const V from_min = quant_min - flushed_quotient(min, scale), whole = floored(from_min);
    // Half away from zero: it is never negative where it counts.
    const V rounded = chosen(less_equal(half, from_min - whole), whole + one, whole);
    const V bounded = chosen(less(from_min, quant_min), quant_min, chosen(less(quant_max, from_min), quant_max, rounded));
    const V zero_point = kept(less_equal(from_min, from_min), bounded);  // 0 for NaN
    nudged_min = (quant_min - zero_point) * scale;
    nudged_max = (quant_max - zero_point) * scale;
    nudged_scale = scale;
    inv_nudged_scale = inverse;
    quant_zero = floored(nudged_min * V::all(T(-1)) * inverse + half);
    no_range = less_equal(min, zero) & less_equal(zero, min) & less_equal(max, zero) & less_equal(zero, max);
  }
};

// The same for one range.
template <class T>
struct Nudged {
  T nudged_min, nudged_max, nudged_scale, inv_nudged_scale, quant_zero;
  bool no_range;
};

template <class T>
Nudged<T> nudge(T min, T max, const Numbers& numbers) {
  const NudgedVectors<T> n(Vector<T>::all(min), Vector<T>::all(max), Quantized<T>(numbers));
  const auto first = [](Vector<T> all) {
    T value;
    all.store(&value, 1);
    return value;
  };
  return {first(n.nudged_min), first(n.nudged_max), first(n.nudged_scale), first(n.inv_nudged_scale), first(n.quant_zero),
          bool(bits_of(n.no_range) & 1)};
}

}  // namespace exactqat
