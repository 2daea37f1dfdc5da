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

// Minimum and maximum over `outer` runs of `inner` elements that lie `stride` apart. A NaN makes both NaN.
template <class T>
Range<T> range_of(const T* input, int64_t outer, int64_t inner, int64_t stride) {
  T minimum = std::numeric_limits<T>::infinity(), maximum = -minimum;
  bool nan = false;
  for (int64_t o = 0; o < outer; ++o) {
    const T* run = input + o * stride;
    for (int64_t i = 0; i < inner; ++i) {
      minimum = run[i] < minimum ? run[i] : minimum;
      maximum = run[i] > maximum ? run[i] : maximum;
      nan |= run[i] != run[i];
    }
  }
  if (nan) return {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::quiet_NaN()};
  if (maximum == T(0)) {  // which of the two zeros came first must not matter: -0 only if there is no +0
    bool positive_zero = false;
    for (int64_t o = 0; o < outer; ++o)
      for (int64_t i = 0; i < inner; ++i)
        positive_zero |= (input[o * stride + i] == T(0)) & !std::signbit(input[o * stride + i]);
    maximum = positive_zero ? T(0) : -T(0);
  }
  return {minimum, maximum};
}

// Ranges of all slices of `[outer, slices, inner]`.
template <class T>
std::vector<Range<T>> ranges_of(const T* input, int64_t outer, int64_t slices, int64_t inner) {
  std::vector<Range<T>> ranges(slices);
  if (slices > 1) {
    parallel_for(slices, outer * slices * inner, [&](int64_t s) {
      ranges[s] = range_of(input + s * inner, outer, inner, slices * inner);
    });
    return ranges;
  }
  // One slice: pieces of the flat array; minimum, maximum and "any NaN" do not depend on the order.
  constexpr int64_t kPiece = 32768;
  const int64_t size = outer * inner, pieces = (size + kPiece - 1) / kPiece;
  std::vector<Range<T>> partial(pieces);
  parallel_for(pieces, size, [&](int64_t p) {
    partial[p] = range_of(input + p * kPiece, 1, std::min(kPiece, size - p * kPiece), 0);
  });
  Range<T> whole = partial[0];
  for (const Range<T>& r : partial) {
    if (r.minimum != r.minimum) whole = r;
    whole.minimum = r.minimum < whole.minimum ? r.minimum : whole.minimum;
    const bool positive_zero = r.maximum == whole.maximum && std::signbit(whole.maximum);
    whole.maximum = r.maximum > whole.maximum || positive_zero ? r.maximum : whole.maximum;
  }
  ranges[0] = whole;
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
void quantize_run(const T* input, T* output, int64_t count, const Scale<T>& s) {
  for (int64_t i = 0; i < count; ++i) {
    const T scaled = (Given ? clamp(input[i], s.minimum, s.maximum) : input[i]) * s.scale;
    output[i] = (HalfUp ? std::floor(scaled + T(0.5)) : std::rint(scaled)) * s.inverse;
  }
}

template <class T>
auto quantizer(bool given, bool half_up) {
  if (given) return half_up ? quantize_run<T, true, true> : quantize_run<T, true, false>;
  return half_up ? quantize_run<T, false, true> : quantize_run<T, false, false>;
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
  const auto quantize = quantizer<T>(given, call.numbers.integer("half_up"));
  if (slices == 1) {
    for_each_piece(size, [&](int64_t begin, int64_t end) { quantize(input + begin, output + begin, end - begin, scales[0]); });
    return;
  }
  parallel_for(outer, size, [&](int64_t o) {
    for (int64_t s = 0; s < slices; ++s) {
      const int64_t offset = (o * slices + s) * inner;
      quantize(input + offset, output + offset, inner, scales[s]);
    }
  });
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
  parallel_for(outer, outer * slices * inner, [&](int64_t o) {
    for (int64_t s = 0; s < slices; ++s)
      run((o * slices + s) * inner, (o * slices + s + 1) * inner, minimum[s], maximum[s]);
  });
}

}  // namespace exactqat
