// SPDX-License-Identifier: Apache-2.0
// QuantizeAndDequantize*: the same arithmetic as reference/quantize_and_dequantize.py.
#include <cmath>
#include <limits>

#include "arithmetic.h"
#include "call.h"
#include "reduce.h"

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

// Minimum and maximum so far of each of a row of columns, and how many NaN there were. None of it depends on the order.
template <class T>
struct Extremes {
  using Count = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  std::vector<T> minimum, maximum;
  std::vector<Count> nan;

  explicit Extremes(int64_t columns)
      : minimum(columns, std::numeric_limits<T>::infinity()), maximum(columns, -std::numeric_limits<T>::infinity()), nan(columns) {}

  void see(const T* values, int64_t begin, int64_t end) {
    T *low = minimum.data() + begin, *high = maximum.data() + begin;
    Count* nans = nan.data() + begin;
    for (int64_t c = 0; c < end - begin; ++c) {
      low[c] = values[c] < low[c] ? values[c] : low[c];
      high[c] = values[c] > high[c] ? values[c] : high[c];
      nans[c] |= Count(values[c] != values[c]);
    }
  }
  Range<T> all() const { return range(0, int64_t(minimum.size())); }
  // The columns [begin, end) together.
  Range<T> range(int64_t begin, int64_t end) const {
    const T none = std::numeric_limits<T>::quiet_NaN();
    T low = minimum[begin], high = maximum[begin];
    for (int64_t c = begin; c < end; ++c) {
      if (nan[c]) return {none, none};
      low = minimum[c] < low ? minimum[c] : low;
      high = maximum[c] > high ? maximum[c] : high;
    }
    return {low, high};
  }
  void merge(const Extremes& other) {
    for (size_t c = 0; c < minimum.size(); ++c) {
      minimum[c] = other.minimum[c] < minimum[c] ? other.minimum[c] : minimum[c];
      maximum[c] = other.maximum[c] > maximum[c] ? other.maximum[c] : maximum[c];
      nan[c] |= other.nan[c];
    }
  }
};

// Extremes of the columns of a dense [rows, columns] array.
template <class T>
Extremes<T> extremes_of(const T* input, int64_t rows, int64_t columns) {
  const int64_t rows_per_task = std::max<int64_t>(1, 65536 / columns), tasks = (rows + rows_per_task - 1) / rows_per_task;
  std::vector<Extremes<T>> partial(tasks, Extremes<T>(columns));
  parallel_for(tasks, rows * columns, [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < std::min(rows, (task + 1) * rows_per_task); ++row)
      partial[task].see(input + row * columns, 0, columns);
  });
  Extremes<T> whole(columns);
  for (const Extremes<T>& part : partial) whole.merge(part);
  return whole;
}

// Ranges of all slices of `[outer, slices, inner]`. A NaN makes the whole slice NaN.
template <class T>
std::vector<Range<T>> ranges_of(const T* input, int64_t outer, int64_t slices, int64_t inner) {
  std::vector<Range<T>> ranges(slices);
  if (slices == 1) {  // any columns will do; so many that a row of them fills registers
    constexpr int64_t kColumns = 256;
    const int64_t rows = outer * inner / kColumns;
    Extremes<T> extremes = extremes_of(input, rows, kColumns);
    extremes.see(input + rows * kColumns, 0, outer * inner - rows * kColumns);
    ranges[0] = extremes.all();
  } else if (inner == 1) {
    const Extremes<T> extremes = extremes_of(input, outer, slices);
    for (int64_t s = 0; s < slices; ++s) ranges[s] = extremes.range(s, s + 1);
  } else {
    parallel_for(slices, outer * slices * inner, [&](int64_t s) {
      constexpr int64_t kColumns = 256;
      Extremes<T> extremes(kColumns);
      for (int64_t o = 0; o < outer; ++o) {
        const T* run = input + (o * slices + s) * inner;
        for (int64_t i = 0; i < inner; i += kColumns) extremes.see(run + i, 0, std::min(kColumns, inner - i));
      }
      ranges[s] = extremes.all();
    });
  }
  // Which of the two zeros came first must not matter: the minimum is +0, the maximum is -0 only if there is no +0.
  for (int64_t s = 0; s < slices; ++s) {
    if (ranges[s].minimum == T(0)) ranges[s].minimum = T(0);
    if (ranges[s].maximum != T(0)) continue;
    bool positive_zero = false;
    for (int64_t o = 0; o < outer; ++o)
      for (int64_t i = (o * slices + s) * inner; i < (o * slices + s + 1) * inner; ++i)
        positive_zero |= (input[i] == T(0)) & !std::signbit(input[i]);
    ranges[s].maximum = positive_zero ? T(0) : -T(0);
  }
  return ranges;
}

template <class T>
std::vector<Range<T>> given_ranges(const Call& call, int64_t slices) {
  std::vector<Range<T>> ranges(slices);
  const bool operands = call.operands.size() == 3;  // version 1 has them as attributes
  for (int64_t s = 0; s < slices; ++s) {
    ranges[s] = operands ? Range<T>{call.operands[1].as<T>()[s], call.operands[2].as<T>()[s]}
                         : Range<T>{T(call.numbers.real("input_min")), T(call.numbers.real("input_max"))};
    if (call.numbers.integer("check_range") && !(ranges[s].minimum <= ranges[s].maximum))
      throw std::invalid_argument("Invalid range: input_min " + std::to_string(ranges[s].minimum) + " > input_max " +
                                  std::to_string(ranges[s].maximum));
  }
  return ranges;
}

template <class T, bool Given, bool HalfUp>
inline T quantized(T value, T scale, T inverse, T minimum, T maximum) {
  const T scaled = (Given ? clamp(value, minimum, maximum) : value) * scale;
  return (HalfUp ? std::floor(scaled + T(0.5)) : std::rint(scaled)) * inverse;
}

template <class T, bool Given, bool HalfUp>
void quantize(const T* input, T* output, int64_t outer, int64_t slices, int64_t inner, const std::vector<Scale<T>>& scales) {
  const auto run = [&](int64_t begin, int64_t end, const Scale<T>& s) {
    for (int64_t i = begin; i < end; ++i)
      output[i] = quantized<T, Given, HalfUp>(input[i], s.scale, s.inverse, s.minimum, s.maximum);
  };
  if (slices == 1) {
    for_each_piece(outer * inner, [&](int64_t begin, int64_t end) { run(begin, end, scales[0]); });
  } else if (inner != 1) {
    parallel_for(outer, outer * slices * inner, [&](int64_t o) {
      for (int64_t s = 0; s < slices; ++s) run((o * slices + s) * inner, (o * slices + s + 1) * inner, scales[s]);
    });
  } else {
    std::vector<T> part[4];
    for (const Scale<T>& s : scales) {
      part[0].push_back(s.scale), part[1].push_back(s.inverse);
      part[2].push_back(s.minimum), part[3].push_back(s.maximum);
    }
    for (std::vector<T>& v : part) v = widen(v.data(), slices, outer);
    for_each_run(outer, slices, [&](int64_t offset, int64_t p, int64_t count) {
      const T *scale = part[0].data() + p, *inverse = part[1].data() + p, *low = part[2].data() + p, *high = part[3].data() + p;
      for (int64_t k = 0; k < count; ++k)
        output[offset + k] = quantized<T, Given, HalfUp>(input[offset + k], scale[k], inverse[k], low[k], high[k]);
    });
  }
}

template <class T>
auto quantizer(bool given, bool half_up) {
  if (given) return half_up ? quantize<T, true, true> : quantize<T, true, false>;
  return half_up ? quantize<T, false, true> : quantize<T, false, false>;
}

}  // namespace

EXACTQAT_KERNEL(quantize_and_dequantize) {
  FlushDenormals flush;
  const T* input = call.operands[0].as<T>();
  T* output = call.results[0].as<T>();
  const int64_t outer = call.numbers.integer("outer"), slices = call.numbers.integer("slices");
  const int64_t inner = call.numbers.integer("inner"), size = outer * slices * inner;
  if (size == 0) return;
  const bool given = call.numbers.integer("range_given");
  const auto ranges = given ? given_ranges<T>(call, slices) : ranges_of(input, outer, slices, inner);
  std::vector<Scale<T>> scales(slices);
  for (int64_t s = 0; s < slices; ++s) scales[s] = scale_of(ranges[s], call.numbers);
  quantizer<T>(given, call.numbers.integer("half_up"))(input, output, outer, slices, inner, scales);
}

EXACTQAT_KERNEL(quantize_and_dequantize_v4_grad) {
  FlushDenormals flush;
  const T *gradients = call.operands[0].as<T>(), *input = call.operands[1].as<T>();
  const T *minimum = call.operands[2].as<T>(), *maximum = call.operands[3].as<T>();
  T* backprop = call.results[0].as<T>();
  const int64_t outer = call.numbers.integer("outer"), slices = call.numbers.integer("slices");
  const int64_t inner = call.numbers.integer("inner");
  std::fill_n(call.results[1].as<T>(), call.results[1].size(), T(0));
  std::fill_n(call.results[2].as<T>(), call.results[2].size(), T(0));
  const auto run = [&](int64_t begin, int64_t end, T low, T high) {
    for (int64_t i = begin; i < end; ++i)
      backprop[i] = masked(gradients[i], bool((input[i] >= low) & (input[i] <= high)));
  };
  if (slices == 1) {
    for_each_piece(outer * inner, [&](int64_t begin, int64_t end) { run(begin, end, *minimum, *maximum); });
    return;
  }
  if (inner != 1) {
    parallel_for(outer, outer * slices * inner, [&](int64_t o) {
      for (int64_t s = 0; s < slices; ++s)
        run((o * slices + s) * inner, (o * slices + s + 1) * inner, minimum[s], maximum[s]);
    });
    return;
  }
  const std::vector<T> low = widen(minimum, slices, outer), high = widen(maximum, slices, outer);
  for_each_run(outer, slices, [&](int64_t offset, int64_t p, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      const T value = input[offset + k];
      backprop[offset + k] = masked(gradients[offset + k], bool((value >= low[p + k]) & (value <= high[p + k])));
    }
  });
}

}  // namespace exactqat
