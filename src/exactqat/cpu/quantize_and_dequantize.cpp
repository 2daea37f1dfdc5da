// SPDX-License-Identifier: Apache-2.0
// QuantizeAndDequantize*: the same arithmetic as reference/quantize_and_dequantize.py.
#include <cmath>
#include <cstring>
#include <limits>

#include "call.h"
#include "elementwise.h"

namespace exactqat {
namespace {

template <class T>
struct Range {
  T minimum, maximum;
};

template <class T>
struct Scale {
  T scale, inverse, minimum, maximum;
};

template <class T>
Scale<T> scale_of(Range<T> range, const Numbers& numbers) {
  const bool is_signed = numbers.integer("signed_input"), narrow = numbers.integer("narrow_range");
  const int64_t bits = numbers.integer("num_bits");
  const T low = is_signed ? T(-(int64_t{1} << (bits - 1)) + narrow) : T(0);
  const T high = is_signed ? T((int64_t{1} << (bits - 1)) - 1) : T((int64_t{1} << bits) - 1);
  const T largest = std::numeric_limits<T>::max();
  const T from_min = low * range.minimum > T(0) ? low / range.minimum : largest;
  const T from_max = high * range.maximum > T(0) ? high / range.maximum : largest;
  if (from_min < from_max) {
    const T inverse = range.minimum / low;
    return {from_min, inverse, range.minimum, high * inverse};
  }
  const T inverse = range.maximum / high;
  return {from_max, inverse, low * inverse, range.maximum};
}

// A part of a vector, filled up with its first element.
template <class S>
Vector<Real<S>> load_filled(const S* p, int64_t n) {
  S whole[Vector<Real<S>>::kWidth];
  std::fill(std::begin(whole), std::end(whole), *p);
  std::copy_n(p, n, whole);
  return load(whole, Whole{});
}

// Minimum and maximum so far of a vector of columns, and a NaN once there was one. None of it depends on the order.
template <class T>
struct Extremes {
  Vector<T> minimum = Vector<T>::all(std::numeric_limits<T>::infinity());
  Vector<T> maximum = Vector<T>::all(-std::numeric_limits<T>::infinity());
  Vector<T> nan;

  void see(Vector<T> x) {
    minimum = lesser(x, minimum);
    maximum = greater(x, maximum);
    nan = chosen(less_equal(x, x), nan, x);
  }
  void see(const Extremes& other) {
    minimum = lesser(other.minimum, minimum);
    maximum = greater(other.maximum, maximum);
    nan = chosen(less_equal(other.nan, other.nan), nan, other.nan);
  }
  // All columns as one.
  Range<T> range() const {
    T low[Vector<T>::kWidth], high[Vector<T>::kWidth];
    minimum.store(low), maximum.store(high);
    if (any_nan(nan)) return {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::quiet_NaN()};
    Range<T> all{low[0], high[0]};
    for (int64_t k = 1; k < Vector<T>::kWidth; ++k) {
      all.minimum = low[k] < all.minimum ? low[k] : all.minimum;
      all.maximum = high[k] > all.maximum ? high[k] : all.maximum;
    }
    return all;
  }
};

template <class S>
Extremes<Real<S>> extremes_of(const S* input, int64_t size) {
  using T = Real<S>;
  constexpr int64_t kWidth = Vector<T>::kWidth, kChains = 4;  // so many that none waits for itself
  Extremes<T> extremes[kChains];
  int64_t i = 0;
  for (; i + kChains * kWidth <= size; i += kChains * kWidth)
    for (int64_t k = 0; k < kChains; ++k) extremes[k].see(load(input + i + k * kWidth, Whole{}));
  for (; i + kWidth <= size; i += kWidth) extremes[0].see(load(input + i, Whole{}));
  if (i < size) extremes[0].see(load_filled(input + i, size - i));
  for (int64_t k = 1; k < kChains; ++k) extremes[0].see(extremes[k]);
  return extremes[0];
}

// Which of the two zeros came first must not matter: the minimum is +0, the maximum is -0 only if there is no +0.
template <class S, class T>
Range<T> with_one_zero(Range<T> range, const S* input, int64_t outer, int64_t stride, int64_t inner) {
  if (range.minimum == T(0)) range.minimum = T(0);
  if (range.maximum != T(0)) return range;
  bool positive_zero = false;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i) {
      const T value = real(input[o * stride + i]);
      positive_zero |= (value == T(0)) & !std::signbit(value);
    }
  range.maximum = positive_zero ? T(0) : -T(0);
  return range;
}

template <class S>
Range<Real<S>> range_of_whole(const S* input, int64_t size) {
  using T = Real<S>;
  std::vector<Extremes<T>, LineAllocator<Extremes<T>>> parts((size + kTask - 1) / kTask);
  parallel_for(int64_t(parts.size()), size, [&](int64_t task) {
    parts[task] = extremes_of(input + task * kTask, std::min(kTask, size - task * kTask));
  });
  for (const auto& part : parts) parts[0].see(part);
  return with_one_zero(parts[0].range(), input, 1, 0, size);
}

// One slice of [outer, slices, inner], `stride` apart.
template <class S>
Range<Real<S>> range_of_slice(const S* input, int64_t outer, int64_t stride, int64_t inner) {
  Extremes<Real<S>> extremes;
  for (int64_t o = 0; o < outer; ++o) extremes.see(extremes_of(input + o * stride, inner));
  return with_one_zero(extremes.range(), input, outer, stride, inner);
}

// Of each column of [rows, columns]. Rows of few columns are taken together, for whole vectors.
template <class S>
std::vector<Range<Real<S>>> ranges_of_columns(const S* input, int64_t rows, int64_t columns) {
  using T = Real<S>;
  constexpr int64_t kWidth = Vector<T>::kWidth, kRows = 8;
  const int64_t together = std::min<int64_t>(columns > 256 ? 1 : 16 / std::gcd(columns, int64_t{16}), rows);
  const int64_t width = together * columns, wide_rows = rows / together, vectors = (width + kWidth - 1) / kWidth;
  const int64_t rows_per_task = std::max(kRows, kTask / width), tasks = (wide_rows + rows_per_task - 1) / rows_per_task;
  std::vector<Extremes<T>, LineAllocator<Extremes<T>>> seen(tasks * vectors);
  const auto vector_at = [=](const S* row, int64_t v) __attribute__((always_inline)) {
    const int64_t n = width - v * kWidth;
    return n >= kWidth ? load(row + v * kWidth, Whole{}) : load_filled(row + v * kWidth, n);
  };
  parallel_for(tasks, rows * columns, [&](int64_t task) {
    const int64_t end = std::min(wide_rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; row += kRows)
      for (int64_t v = 0; v < vectors; ++v) {
        Extremes<T> extremes = seen[task * vectors + v];
        for (int64_t r = row; r < std::min(end, row + kRows); ++r) extremes.see(vector_at(input + r * width, v));
        seen[task * vectors + v] = extremes;
      }
  });
  for (int64_t task = 1; task < tasks; ++task)
    for (int64_t v = 0; v < vectors; ++v) seen[v].see(seen[task * vectors + v]);
  const T infinity = std::numeric_limits<T>::infinity(), none = std::numeric_limits<T>::quiet_NaN();
  std::vector<Range<T>> ranges(columns, {infinity, -infinity});
  const auto see = [&](Range<T>& range, T low, T high) {
    if (low != low || range.minimum != range.minimum) range = {none, none};
    else range = {low < range.minimum ? low : range.minimum, high > range.maximum ? high : range.maximum};
  };
  for (int64_t v = 0; v < vectors; ++v) {
    T low[kWidth], high[kWidth], nan[kWidth];
    seen[v].minimum.store(low), seen[v].maximum.store(high), seen[v].nan.store(nan);
    for (int64_t k = 0; k < kWidth && v * kWidth + k < width; ++k) {
      const bool is_nan = nan[k] != nan[k];
      see(ranges[(v * kWidth + k) % columns], is_nan ? none : low[k], is_nan ? none : high[k]);
    }
  }
  for (int64_t i = wide_rows * width; i < rows * columns; ++i) see(ranges[i % columns], real(input[i]), real(input[i]));
  for (int64_t c = 0; c < columns; ++c) ranges[c] = with_one_zero(ranges[c], input + c, rows, columns, 1);
  return ranges;
}

// Bounds may have the input's dtype or, beside 16 bits, float32.
template <class T>
T real_at(const Array& array, int64_t i) {
  switch (array.dtype) {
    case DType::float16: return widened(array.as<float16>()[i]);
    case DType::bfloat16: return widened(array.as<bfloat16>()[i]);
    default: return array.as<T>()[i];
  }
}

template <class T>
std::vector<Range<T>> given_ranges(const Call& call, int64_t slices) {
  std::vector<Range<T>> ranges(slices);
  const bool operands = call.operands.size() == 3;  // version 1 has them as attributes
  for (int64_t s = 0; s < slices; ++s) {
    ranges[s] = operands ? Range<T>{real_at<T>(call.operands[1], s), real_at<T>(call.operands[2], s)}
                         : Range<T>{T(call.numbers.real("input_min")), T(call.numbers.real("input_max"))};
    if (call.numbers.integer("check_range") && !(ranges[s].minimum <= ranges[s].maximum))
      throw std::invalid_argument("Invalid range: input_min " + std::to_string(ranges[s].minimum) + " > input_max " +
                                  std::to_string(ranges[s].maximum));
  }
  return ranges;
}

template <class T>
struct ScaleVectors {
  Vector<T> scale, inverse, minimum, maximum;
};

template <bool Given, bool HalfUp, class T>
Vector<T> quantized(Vector<T> value, const ScaleVectors<T>& s) {
  const Vector<T> scaled = (Given ? clamp(value, s.minimum, s.maximum) : value) * s.scale;
  return (HalfUp ? floored(scaled + Vector<T>::all(T(0.5))) : half_to_even(scaled)) * s.inverse;
}

// Puts step(i, range, extent) into out[i] and what follows it for all of [outer, slices, inner], where `range(s)` holds for slice s.
template <class S, class RangeOf, class Step>
void fill_slices(S* out, int64_t outer, int64_t slices, int64_t inner, RangeOf&& range, Step step) {
  const int64_t runs = outer * slices, runs_per_task = std::max<int64_t>(1, kTask / inner);
  parallel_for((runs + runs_per_task - 1) / runs_per_task, runs * inner, [&](int64_t task) {
    for (int64_t run = task * runs_per_task; run < std::min(runs, (task + 1) * runs_per_task); ++run) {
      const auto of_slice = range(run % slices);
      fill_run<false>(out, run * inner, (run + 1) * inner, [of_slice, step](int64_t i, auto extent) __attribute__((always_inline)) {
        return step(i, of_slice, extent);
      });
    }
  });
}

template <class S, bool Given, bool HalfUp>
void quantize(const Call& call) {
  using T = Real<S>;
  using V = Vector<T>;
  const S* input = call.operands[0].as<S>();
  S* output = call.results[0].as<S>();
  const int64_t outer = call.numbers.integer("outer"), slices = call.numbers.integer("slices");
  const int64_t inner = call.numbers.integer("inner"), size = outer * slices * inner;
  const auto vectors_of = [](const Scale<T>& s) {
    return ScaleVectors<T>{V::all(s.scale), V::all(s.inverse), V::all(s.minimum), V::all(s.maximum)};
  };
  const auto step = [=](int64_t i, const ScaleVectors<T>& s, auto extent) __attribute__((always_inline)) {
    return quantized<Given, HalfUp>(load(input + i, extent), s);
  };
  constexpr int64_t kManySlices = 16;
  if (!Given && slices >= kManySlices && inner != 1) {  // slice by slice, so that the second pass finds it in the cache
    parallel_for(slices, size, [&](int64_t s) {
      const auto range = range_of_slice(input + s * inner, outer, slices * inner, inner);
      const ScaleVectors<T> scale = vectors_of(scale_of(range, call.numbers));
      for (int64_t o = 0; o < outer; ++o)
        fill_run<false>(output, (o * slices + s) * inner, (o * slices + s + 1) * inner,
                        [=](int64_t i, auto extent) __attribute__((always_inline)) { return step(i, scale, extent); });
    });
    return;
  }
  std::vector<Range<T>> ranges(slices);
  if (Given) ranges = given_ranges<T>(call, slices);
  else if (slices == 1) ranges[0] = range_of_whole(input, size);
  else if (inner == 1) ranges = ranges_of_columns(input, outer, slices);
  else parallel_for(slices, size, [&](int64_t s) {
    ranges[s] = range_of_slice(input + s * inner, outer, slices * inner, inner);
  });
  std::vector<Scale<T>> scales(slices);
  for (int64_t s = 0; s < slices; ++s) scales[s] = scale_of(ranges[s], call.numbers);
  if (slices == 1) {
    const ScaleVectors<T> s = vectors_of(scales[0]);
    const Runs runs(output, size, 1, input == output);
    runs.fill(output, [=](int64_t i, auto extent) __attribute__((always_inline)) { return step(i, s, extent); });
  } else if (inner == 1) {
    LineVector<T> part[4];
    for (const Scale<T>& s : scales) {
      part[0].push_back(s.scale), part[1].push_back(s.inverse);
      part[2].push_back(s.minimum), part[3].push_back(s.maximum);
    }
    const Runs runs(output, size, slices, input == output);
    const auto scale = runs.spread(part[0].data()), inverse = runs.spread(part[1].data());
    const auto minimum = runs.spread(part[2].data()), maximum = runs.spread(part[3].data());
    const T *to_scale = scale.data, *to_inverse = inverse.data, *low = minimum.data, *high = maximum.data;
    const auto at = [=](int64_t p) __attribute__((always_inline)) {
      return ScaleVectors<T>{V::load(to_scale + p), V::load(to_inverse + p), V::load(low + p), V::load(high + p)};
    };
    runs.fill(output, at, step);
  } else {
    fill_slices(output, outer, slices, inner, [&](int64_t s) { return vectors_of(scales[s]); }, step);
  }
}

}  // namespace

EXACTQAT_STORAGE_KERNEL(quantize_and_dequantize) {
  FlushDenormals flush;
  static_assert(std::is_same_v<T, Real<S>>);
  if (call.operands[0].size() == 0) return;
  const bool half_up = call.numbers.integer("half_up");
  if (call.numbers.integer("range_given")) half_up ? quantize<S, true, true>(call) : quantize<S, true, false>(call);
  else half_up ? quantize<S, false, true>(call) : quantize<S, false, false>(call);
}

namespace {

void fill_with_zeros(const Array& array) { std::memset(array.data, 0, array.size() * size_of(array.dtype)); }

}  // namespace

EXACTQAT_STORAGE_KERNEL(quantize_and_dequantize_v4_grad) {
  FlushDenormals flush;
  using V = Vector<T>;
  const S *gradients = call.operands[0].as<S>(), *input = call.operands[1].as<S>();
  S* backprop = call.results[0].as<S>();
  const int64_t outer = call.numbers.integer("outer"), slices = call.numbers.integer("slices");
  const int64_t inner = call.numbers.integer("inner"), size = outer * slices * inner;
  fill_with_zeros(call.results[1]);
  fill_with_zeros(call.results[2]);
  if (size == 0) return;
  LineVector<T> minimum(slices), maximum(slices);
  for (int64_t s = 0; s < slices; ++s) {
    minimum[s] = real_at<T>(call.operands[2], s);
    maximum[s] = real_at<T>(call.operands[3], s);
  }
  const auto step = [=](int64_t i, V low, V high, auto extent) __attribute__((always_inline)) {
    const V x = load(input + i, extent);
    return masked(load(gradients + i, extent), less_equal(low, x) & less_equal(x, high));
  };
  const auto step_between = [=](int64_t i, const std::pair<V, V>& ends, auto extent) __attribute__((always_inline)) {
    return step(i, ends.first, ends.second, extent);
  };
  const bool in_place = backprop == gradients || backprop == input;
  if (slices == 1) {
    const V low = V::all(minimum[0]), high = V::all(maximum[0]);
    const Runs runs(backprop, size, 1, in_place);
    runs.fill(backprop, [=](int64_t i, auto extent) __attribute__((always_inline)) { return step(i, low, high, extent); });
  } else if (inner == 1) {
    const Runs runs(backprop, size, slices, in_place);
    const auto lows = runs.spread(minimum.data()), highs = runs.spread(maximum.data());
    const T *low = lows.data, *high = highs.data;
    const auto at = [=](int64_t p) __attribute__((always_inline)) { return std::pair(V::load(low + p), V::load(high + p)); };
    runs.fill(backprop, at, step_between);
  } else {
    const auto ends = [&](int64_t s) { return std::pair(V::all(minimum[s]), V::all(maximum[s])); };
    fill_slices(backprop, outer, slices, inner, ends, step_between);
  }
}

}  // namespace exactqat
