// SPDX-License-Identifier: Apache-2.0
// QuantizeAndDequantize*: the same arithmetic as reference/quantize_and_dequantize.py.
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "call.h"
#include "elementwise.h"

namespace exactqat {
namespace {

// Ranges: one in all lanes, or those of a vector of slices.
template <class T>
struct RangeVectors {
  Vector<T> minimum, maximum;
};

template <class T>
RangeVectors<T> all(T minimum, T maximum) {
  return {Vector<T>::all(minimum), Vector<T>::all(maximum)};
}

// What they are quantized with.
template <class T>
struct ScaleVectors {
  Vector<T> scale, inverse, minimum, maximum;
};

// The integers that a range is quantized to.
template <class T>
struct Quantized {
  T low, high;

  explicit Quantized(const Numbers& numbers) {
    const bool is_signed = numbers.integer("signed_input"), narrow = numbers.integer("narrow_range");
    const int64_t bits = numbers.integer("num_bits");
    low = is_signed ? T(-(int64_t{1} << (bits - 1)) + narrow) : T(0);
    high = is_signed ? T((int64_t{1} << (bits - 1)) - 1) : T((int64_t{1} << bits) - 1);
  }

  ScaleVectors<T> scales(const RangeVectors<T>& range) const {
    using V = Vector<T>;
    const V low = V::all(this->low), high = V::all(this->high), zero, largest = V::all(std::numeric_limits<T>::max());
    const V from_min = chosen(less(zero, low * range.minimum), flushed_quotient(low, range.minimum), largest);
    const V from_max = chosen(less(zero, high * range.maximum), flushed_quotient(high, range.maximum), largest);
    const Mask<T> min_side = less(from_min, from_max);
    const V inverse = chosen(min_side, flushed_quotient(range.minimum, low), flushed_quotient(range.maximum, high));
    return {chosen(min_side, from_min, from_max), inverse, chosen(min_side, range.minimum, low * inverse),
            chosen(min_side, high * inverse, range.maximum)};
  }
};

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
  // Two at a time: a comparison finds a NaN in either.
  void see(Vector<T> x, Vector<T> y) {
    minimum = lesser(y, lesser(x, minimum));
    maximum = greater(y, greater(x, maximum));
    nan = chosen(unordered(x, y), Vector<T>::all(std::numeric_limits<T>::quiet_NaN()), nan);
  }
  void see(const Extremes& other) {
    minimum = lesser(other.minimum, minimum);
    maximum = greater(other.maximum, maximum);
    nan = chosen(less_equal(other.nan, other.nan), nan, other.nan);
  }
  // Of each column.
  RangeVectors<T> ranges() const {
    const Mask<T> numbers = less_equal(nan, nan);
    return {chosen(numbers, minimum, nan), chosen(numbers, maximum, nan)};
  }
  // All columns as one.
  RangeVectors<T> range() const {
    T low[Vector<T>::kWidth], high[Vector<T>::kWidth];
    minimum.store(low), maximum.store(high);
    if (any_nan(nan)) return all(std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::quiet_NaN());
    return all(*std::min_element(std::begin(low), std::end(low)), *std::max_element(std::begin(high), std::end(high)));
  }
};

template <class S>
Extremes<Real<S>> extremes_of(const S* input, int64_t size) {
  using T = Real<S>;
  constexpr int64_t kWidth = Vector<T>::kWidth, kChains = 4;  // so many that none waits for itself
  Extremes<T> extremes[kChains];
  int64_t i = 0;
  for (; i + 2 * kChains * kWidth <= size; i += 2 * kChains * kWidth)
    for (int64_t k = 0; k < kChains; ++k)
      extremes[k].see(load(input + i + 2 * k * kWidth, Whole{}), load(input + i + (2 * k + 1) * kWidth, Whole{}));
  for (; i + kWidth <= size; i += kWidth) extremes[0].see(load(input + i, Whole{}));
  if (i < size) extremes[0].see(load_filled(input + i, size - i));
  for (int64_t k = 1; k < kChains; ++k) extremes[0].see(extremes[k]);
  return extremes[0];
}

// Which of the two zeros came first must not matter: the minimum is +0, the maximum is -0 only if there is no +0. The first lane is
// that of [outer, inner] elements of the input, `stride` apart, the others those next to them; one range in all lanes, or `count`.
template <class S, class T>
RangeVectors<T> with_one_zero(RangeVectors<T> ranges, const S* input, int64_t outer, int64_t stride, int64_t inner,
                              int64_t count) {
  const Vector<T> zero;
  ranges.minimum = chosen(less_equal(ranges.minimum, zero) & less_equal(zero, ranges.minimum), zero, ranges.minimum);
  const uint32_t none_above = bits_of(less_equal(ranges.maximum, zero) & less_equal(zero, ranges.maximum));
  if (none_above == 0) return ranges;
  T maximum[Vector<T>::kWidth];
  ranges.maximum.store(maximum);
  for (int64_t lane = 0; lane < count; ++lane) {
    if (!(none_above >> lane & 1)) continue;
    maximum[lane] = -T(0);
    for (int64_t k = 0; k < outer * inner; ++k)
      if (!std::signbit(real(input[k / inner * stride + k % inner + lane]))) {
        maximum[lane] = T(0);  // nothing is greater
        break;
      }
  }
  ranges.maximum = count == 1 ? Vector<T>::all(maximum[0]) : Vector<T>::load(maximum);
  return ranges;
}

template <class S>
RangeVectors<Real<S>> range_of_whole(const S* input, int64_t size) {
  using T = Real<S>;
  std::vector<Extremes<T>, LineAllocator<Extremes<T>>> parts((size + kTask - 1) / kTask);
  parallel_for(int64_t(parts.size()), size, [&](int64_t task) {
    parts[task] = extremes_of(input + task * kTask, std::min(kTask, size - task * kTask));
  });
  for (const auto& part : parts) parts[0].see(part);
  return with_one_zero(parts[0].range(), input, 1, 0, size, 1);
}

// One slice of [outer, slices, inner], `stride` apart.
template <class S>
RangeVectors<Real<S>> range_of_slice(const S* input, int64_t outer, int64_t stride, int64_t inner) {
  Extremes<Real<S>> extremes;
  for (int64_t o = 0; o < outer; ++o) extremes.see(extremes_of(input + o * stride, inner));
  return with_one_zero(extremes.range(), input, outer, stride, inner, 1);
}

// Calls then(column, ranges) for each vector of the columns of [rows, columns]. Rows of few columns are taken together.
template <class S, class Then>
void for_ranges_of_columns(const S* input, int64_t rows, int64_t columns, Then&& then) {
  using T = Real<S>;
  using V = Vector<T>;
  constexpr int64_t kWidth = V::kWidth, kWide = 64, kLongest = 1024, kNear = 8192, kFewest = 8;
  constexpr int kVectors = kWidth * sizeof(T) == 64 ? 4 : 2;  // side by side, as many as there are registers for
  int64_t wide = columns;
  for (const int64_t unit : {kWidth, kWide})
    if (const int64_t whole = std::lcm(columns, unit); whole <= kLongest) wide = whole;
  const int64_t together = std::min(wide / columns, rows), width = together * columns, wide_rows = rows / together;
  // So many rows at a time that they stay in the nearest cache while their columns are gone through, vector by vector.
  const int64_t rows_at_a_time = std::max(kFewest, kNear / width / 2 * 2);
  const int64_t rows_per_task = std::max<int64_t>(1, kTask / (rows_at_a_time * width)) * rows_at_a_time;
  const int64_t tasks = (wide_rows + rows_per_task - 1) / rows_per_task;
  const int64_t quantity = (width + kWidth - 1) / kWidth * kWidth;
  const bool far = rows * columns * int64_t{sizeof(S)} >= too_large_for_the_cache() / 4;
  LineVector<T> seen(3 * tasks * quantity + kWidth);  // minimum, maximum, NaN; and room at the end
  parallel_for(tasks, rows * columns, [&](int64_t task) {
    const int64_t begin = task * rows_per_task, end = std::min(wide_rows, begin + rows_per_task);
    T* const lows = seen.data() + 3 * task * quantity;
    T *const highs = lows + quantity, *const nans = highs + quantity;
    for (int64_t row = begin; row < end; row += rows_at_a_time) {
      const S* const from = input + row * width;
      const int64_t count = std::min(rows_at_a_time, end - row);
      const auto see = [=]<int Vectors>(int64_t p, auto vector) __attribute__((always_inline)) {
        Extremes<T> extremes[Vectors];
        if (row != begin)
          for (int v = 0; v < Vectors; ++v) {
            const int64_t place = p + v * kWidth;
            extremes[v] = {V::load(lows + place), V::load(highs + place), V::load(nans + place)};
          }
        const S* x = from + p;
        int64_t r = 0;
        for (; r + 2 <= count; r += 2, x += 2 * width)
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; ++v) {
            if (far) {  // the next rows: going along several, the processor foresees little
              __builtin_prefetch(x + rows_at_a_time * width + v * kWidth);
              __builtin_prefetch(x + (rows_at_a_time + 1) * width + v * kWidth);
            }
            extremes[v].see(vector(x + v * kWidth), vector(x + width + v * kWidth));
          }
        if (r < count)
          for (int v = 0; v < Vectors; ++v) extremes[v].see(vector(x + v * kWidth));
        for (int v = 0; v < Vectors; ++v) {
          const int64_t place = p + v * kWidth;
          extremes[v].minimum.store(lows + place);
          extremes[v].maximum.store(highs + place);
          extremes[v].nan.store(nans + place);
        }
      };
      const auto load_whole = [](const S* x) __attribute__((always_inline)) { return load(x, Whole{}); };
      int64_t p = 0;
      for (; p + kVectors * kWidth <= width; p += kVectors * kWidth) see.template operator()<kVectors>(p, load_whole);
      if (kVectors == 4 && p + 2 * kWidth <= width) see.template operator()<2>(p, load_whole), p += 2 * kWidth;
      for (; p + kWidth <= width; p += kWidth) see.template operator()<1>(p, load_whole);
      if (p == width) continue;
      // What is seen twice changes nothing.
      if (width >= kWidth) see.template operator()<1>(width - kWidth, load_whole);
      else see.template operator()<1>(0, [=](const S* x) { return load_filled(x, width); });
    }
  });
  const S* rest = input + wide_rows * width;
  for (int64_t c = 0; c < columns; c += kWidth) {
    const int64_t count = std::min(columns - c, kWidth);
    Extremes<T> extremes;
    for (int64_t task = 0; task < tasks; ++task)
      for (int64_t place = c; place < width; place += columns) {
        const T* p = seen.data() + 3 * task * quantity + place;
        extremes.see({V::load(p), V::load(p + quantity), V::load(p + 2 * quantity)});
      }
    for (const S* x = rest + c; x < input + rows * columns; x += columns) extremes.see(load_filled(x, count));
    then(c, with_one_zero(extremes.ranges(), input + c, rows, columns, 1, count));
  }
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

// The given range of slice s.
template <class T>
std::pair<T, T> given_range(const Call& call, int64_t s) {
  if (call.operands.size() == 3) return {real_at<T>(call.operands[1], s), real_at<T>(call.operands[2], s)};
  return {T(call.numbers.real("input_min")), T(call.numbers.real("input_max"))};  // version 1 has them as attributes
}

template <class T>
void check_range(T minimum, T maximum) {
  if (!(minimum <= maximum))
    throw std::invalid_argument("Invalid range: input_min " + std::to_string(minimum) + " > input_max " +
                                std::to_string(maximum));
}

template <bool Given, class T>
Vector<T> quantized(Vector<T> value, const ScaleVectors<T>& s, bool half_up) {
  const Vector<T> scaled = (Given ? clamp(value, s.minimum, s.maximum) : value) * s.scale;
  return (half_up ? floored(scaled + Vector<T>::all(T(0.5))) : half_to_even(scaled)) * s.inverse;
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

// Scales of slices, one array for each quantity, with room for a whole vector after them.
template <class T>
struct Scales {
  LineVector<T> memory;
  T *scale, *inverse, *minimum, *maximum;

  explicit Scales(int64_t slices) {
    constexpr int64_t kOfLine = kLine / int64_t{sizeof(T)};
    const int64_t size = (slices + kOfLine - 1) / kOfLine * kOfLine;
    memory.resize(4 * size);
    T* next = memory.data();
    for (T** quantity : {&scale, &inverse, &minimum, &maximum}) *quantity = next, next += size;
  }
  Scales(const Scales&) = delete;

  void put(int64_t s, const ScaleVectors<T>& of) {
    of.scale.store(scale + s), of.inverse.store(inverse + s);
    of.minimum.store(minimum + s), of.maximum.store(maximum + s);
  }
  ScaleVectors<T> of_slice(int64_t s) const {
    using V = Vector<T>;
    return {V::all(scale[s]), V::all(inverse[s]), V::all(minimum[s]), V::all(maximum[s])};
  }
};

template <class S, bool Given>
void quantize(const Call& call) {
  using T = Real<S>;
  using V = Vector<T>;
  const S* input = call.operands[0].as<S>();
  S* output = call.results[0].as<S>();
  const int64_t outer = call.numbers.integer("outer"), slices = call.numbers.integer("slices");
  const int64_t inner = call.numbers.integer("inner"), size = outer * slices * inner;
  const Quantized<T> integers(call.numbers);
  const bool half_up = call.numbers.integer("half_up");
  const auto step = [=](int64_t i, const ScaleVectors<T>& s, auto extent) __attribute__((always_inline)) {
    return quantized<Given>(load(input + i, extent), s, half_up);
  };
  if (slices == 1) {
    RangeVectors<T> range;
    if constexpr (Given) {
      const auto [minimum, maximum] = given_range<T>(call, 0);
      if (call.numbers.integer("check_range")) check_range(minimum, maximum);
      range = all(minimum, maximum);
    } else {
      range = range_of_whole(input, size);
    }
    const ScaleVectors<T> s = integers.scales(range);
    Runs runs(output, size, 1, input == output);
    if (!Given) runs.order = Order::backwards;
    runs.fill(output, [=](int64_t i, auto extent) __attribute__((always_inline)) { return step(i, s, extent); });
    return;
  }
  if constexpr (!Given) {
    constexpr int64_t kManySlices = 16;
    if (slices >= kManySlices && inner != 1) {  // slice by slice, so that the second pass finds it in the cache
      parallel_for(slices, size, [&](int64_t s) {
        const auto range = range_of_slice(input + s * inner, outer, slices * inner, inner);
        const ScaleVectors<T> scale = integers.scales(range);
        for (int64_t o = 0; o < outer; ++o)
          fill_run<false>(output, (o * slices + s) * inner, (o * slices + s + 1) * inner,
                          [=](int64_t i, auto extent) __attribute__((always_inline)) { return step(i, scale, extent); });
      });
      return;
    }
  }
  Scales<T> scales(slices);
  if constexpr (Given) {
    for (int64_t s = 0; s < slices; ++s) std::tie(scales.minimum[s], scales.maximum[s]) = given_range<T>(call, s);
  } else if (inner == 1) {
    for_ranges_of_columns(input, outer, slices, [&](int64_t s, const RangeVectors<T>& ranges) {
      scales.put(s, integers.scales(ranges));
    });
  } else {
    parallel_for(slices, size, [&](int64_t s) {
      const auto range = range_of_slice(input + s * inner, outer, slices * inner, inner);
      range.minimum.store(scales.minimum + s, 1), range.maximum.store(scales.maximum + s, 1);
    });
  }
  if (Given || inner != 1)
    for (int64_t s = 0; s < slices; s += V::kWidth)
      scales.put(s, integers.scales({V::load(scales.minimum + s), V::load(scales.maximum + s)}));
  if (inner != 1) return fill_slices(output, outer, slices, inner, [&](int64_t s) { return scales.of_slice(s); }, step);
  Runs runs(output, size, slices, input == output);
  if (!Given) runs.order = Order::backwards;
  const auto factors = runs.spread(scales.scale), inverses = runs.spread(scales.inverse);
  const auto minima = Given ? runs.spread(scales.minimum) : Spread<T>{};
  const auto maxima = Given ? runs.spread(scales.maximum) : Spread<T>{};
  const T *scale = factors.data, *inverse = inverses.data, *minimum = minima.data, *maximum = maxima.data;
  const auto at = [=](int64_t p) __attribute__((always_inline)) {
    if constexpr (Given) return ScaleVectors<T>{V::load(scale + p), V::load(inverse + p), V::load(minimum + p), V::load(maximum + p)};
    else return ScaleVectors<T>{V::load(scale + p), V::load(inverse + p), {}, {}};
  };
  runs.fill(output, at, step);
}

}  // namespace

EXACTQAT_STORAGE_KERNEL(quantize_and_dequantize) {
  FlushDenormals flush;
  static_assert(std::is_same_v<T, Real<S>>);
  if (call.operands[0].size() == 0) return;
  if (call.numbers.integer("range_given")) quantize<S, true>(call);
  else quantize<S, false>(call);
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
