// SPDX-License-Identifier: Apache-2.0
// The shape of a depthwise convolution, and which positions of its two images meet.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "call.h"

namespace exactqat {

// Whether loops over the usual windows are compiled for T. Not for float64, with which nobody trains, and not where each fused
// multiply-add is the call of a function, beside which nothing counts.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
template <class T>
constexpr bool kKnowsWindows = std::is_same_v<T, float>;
#else
template <class T>
constexpr bool kKnowsWindows = false;
#endif

struct Geometry {
  int64_t batch, input_height, input_width, channels, multiplier, filter_height, filter_width, output_height, output_width;
  int64_t stride_height, stride_width, dilation_height, dilation_width, pad_top, pad_left;
  bool channels_first;

  explicit Geometry(const Numbers& n)
      : batch(n.integer("batch")),
        input_height(n.integer("input_height")),
        input_width(n.integer("input_width")),
        channels(n.integer("channels")),
        multiplier(n.integer("multiplier")),
        filter_height(n.integer("filter_height")),
        filter_width(n.integer("filter_width")),
        output_height(n.integer("output_height")),
        output_width(n.integer("output_width")),
        stride_height(n.integer("stride_height")),
        stride_width(n.integer("stride_width")),
        dilation_height(n.integer("dilation_height")),
        dilation_width(n.integer("dilation_width")),
        pad_top(n.integer("pad_top")),
        pad_left(n.integer("pad_left")),
        channels_first(n.integer("channels_first")) {}

  int64_t outputs() const { return channels * multiplier; }
  int64_t taps() const { return filter_height * filter_width; }
  int64_t input_plane() const { return input_height * input_width; }
  int64_t output_plane() const { return output_height * output_width; }
  int64_t output_size() const { return batch * output_plane() * outputs(); }
  int64_t input_size() const { return batch * input_plane() * channels; }
};

// Rows of an image that lie in memory one after the other, `step` elements from one column to the next.
template <class T>
struct Rows {
  T* data;  // channel 0 of column 0 of the first row
  int64_t first, width, step;

  T* row(int64_t i) const { return data + (i - first) * width * step; }
};

struct Interval {
  int64_t begin, end;  // empty if begin >= end
};

inline int64_t quotient_rounded_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Output positions i in [0, outputs) whose input position i * stride + offset lies in [0, inputs).
inline Interval meeting(int64_t offset, int64_t stride, int64_t inputs, int64_t outputs) {
  const int64_t begin = offset >= 0 ? 0 : (-offset + stride - 1) / stride;
  const int64_t end = inputs - 1 < offset ? 0 : (inputs - 1 - offset) / stride + 1;
  return {begin, std::min(end, outputs)};
}

// The input rows that output rows [begin, end) meet; at least one.
inline Interval rows_met(const Geometry& g, int64_t begin, int64_t end) {
  const int64_t first = begin * g.stride_height - g.pad_top;
  const int64_t last = (end - 1) * g.stride_height - g.pad_top + (g.filter_height - 1) * g.dilation_height;
  const int64_t from = std::clamp<int64_t>(first, 0, std::max<int64_t>(g.input_height - 1, 0));
  return {from, std::clamp<int64_t>(last + 1, from, g.input_height)};
}

// Number of i in [0, count) from `first` on in steps of `period`.
inline int64_t stepped(int64_t first, int64_t count, int64_t period) {
  return first < count ? quotient_rounded_up(count - first, period) : 0;
}

// The taps that serve input position `at` along one dimension: those for which at + pad - tap * dilation is an output position
// times the stride. They are a period apart; one period on, the output position is `back` less.
struct Serving {
  int64_t first, count, period, position, back;
};

inline Serving serving(int64_t at, int64_t pad, int64_t stride, int64_t dilation, int64_t taps) {
  const int64_t period = stride / std::gcd(stride, dilation);
  int64_t first = 0;
  while (first < std::min(period, taps) && (at + pad - first * dilation) % stride != 0) ++first;
  if (first == std::min(period, taps)) return {0, 0, period, 0, 0};
  return {first, stepped(first, taps, period), period, (at + pad - first * dilation) / stride, period * dilation / stride};
}

}  // namespace exactqat
