// SPDX-License-Identifier: Apache-2.0
// DepthwiseConv2dNative and its two gradients: the same arithmetic as reference/depthwise_conv2d.py. Forward and input
// gradient are one fused multiply-add for each tap, taps row-major, padded taps skipped.
#include <cmath>
#include <numeric>

#include "call.h"
#include "reduce.h"
#include "simd.h"

namespace exactqat {
namespace {

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
  int64_t output_size() const { return batch * output_height * output_width * outputs(); }
  int64_t input_size() const { return batch * input_height * input_width * channels; }
};

struct Interval {
  int64_t begin, end;  // empty if begin >= end
};

// Output positions i in [0, outputs) whose input position i * stride + offset lies in [0, inputs).
Interval meeting(int64_t offset, int64_t stride, int64_t inputs, int64_t outputs) {
  const int64_t begin = offset >= 0 ? 0 : (-offset + stride - 1) / stride;
  const int64_t end = inputs - 1 < offset ? 0 : (inputs - 1 - offset) / stride + 1;
  return {begin, std::min(end, outputs)};
}

// What one row of a result is made of, channels last, multiplier 1. Result column c meets, with tap t, input column
// begin + c * advance + t * reach. Only tap rows that meet the image are counted; all of them do so with the same columns.
template <class T>
struct Row {
  const T* input;    // channel 0 of column 0 for the first tap row
  const T* taps;     // channel 0 of the first tap of the first tap row
  T* output;         // channel 0 of column 0
  int64_t channels;
  int64_t rows, input_row_step, tap_row_step;  // number of tap rows, and the distances between them in elements
  int64_t columns, output_step;                // number of result columns, and the distance between them in columns
  int64_t begin, advance, reach;
  int64_t tap_count, tap_step;                 // taps of a tap row, and the distance between them in taps
  int64_t input_columns;
};

// How many columns by vectors of channels one call sums: as many as leave registers for the rest.
constexpr int kColumns = 8;
constexpr int kVectors = Vector<float>::kWidth >= 16 ? 2 : 1;
constexpr int kTileVectors = 4;

template <class T, int V>
void store_columns(const Row<T>& row, int64_t column, int64_t channel, int64_t partial, const Vector<T>* sums, int columns) {
  for (int p = 0; p < columns; ++p)
    for (int v = 0; v < V; ++v) {
      T* to = row.output + (column + p) * row.output_step * row.channels + channel + v * Vector<T>::kWidth;
      if (partial && v == V - 1) sums[p * V + v].store(to, partial);
      else sums[p * V + v].store(to);
    }
}

// P result columns by V vectors of channels, of whose taps those in [first, last) meet the image. `partial` is the number of
// channels in the last vector if it is not full, else 0.
template <int P, int V, class T>
void fused_columns(const Row<T>& row, int64_t column, int64_t first, int64_t last, int64_t channel, int64_t partial) {
  using Lanes = Vector<T>;
  const auto load = [&](const T* from, int v) {
    return partial && v == V - 1 ? Lanes::load(from + v * Lanes::kWidth, partial) : Lanes::load(from + v * Lanes::kWidth);
  };
  Lanes sums[P * V];
  for (int64_t i = 0; i < row.rows; ++i) {
    const T* x = row.input + i * row.input_row_step + (row.begin + column * row.advance) * row.channels + channel;
    const T* w = row.taps + i * row.tap_row_step + channel;
    for (int64_t t = first; t < last; ++t) {
      Lanes weight[V];
      for (int v = 0; v < V; ++v) weight[v] = load(w + t * row.tap_step * row.channels, v);
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < V; ++v)
          sums[p * V + v] = Lanes::fused_multiply_add(load(x + (p * row.advance + t * row.reach) * row.channels, v), weight[v],
                                                      sums[p * V + v]);
    }
  }
  store_columns<T, V>(row, column, channel, partial, sums, P);
}

// The same where neighbouring columns share their inputs: K taps that lie Advance * p + Sign * t apart, all of which meet the
// image. Each input is loaded once. Taken in the direction of the taps, every sum still gets its taps in order.
template <int P, int V, int K, int Advance, int Sign, class T>
void sharing_columns(const Row<T>& row, int64_t column, int64_t channel, int64_t partial) {
  using Lanes = Vector<T>;
  const auto load = [&](const T* from, int v) {
    return partial && v == V - 1 ? Lanes::load(from + v * Lanes::kWidth, partial) : Lanes::load(from + v * Lanes::kWidth);
  };
  constexpr int kInputs = (P - 1) * Advance + K;
  Lanes sums[P * V];
  for (int64_t i = 0; i < row.rows; ++i) {
    // Input n, in the direction of the taps, is that of tap t of column p where n = t + Sign * Advance * p + kShift.
    constexpr int kShift = Sign > 0 ? 0 : (P - 1) * Advance;
    const T* x = row.input + i * row.input_row_step + (row.begin + column * row.advance - Sign * kShift) * row.channels + channel;
    const T* w = row.taps + i * row.tap_row_step + channel;
    Lanes weight[K][V];
    for (int t = 0; t < K; ++t)
      for (int v = 0; v < V; ++v) weight[t][v] = load(w + t * row.tap_step * row.channels, v);
#pragma GCC unroll 32
    for (int n = 0; n < kInputs; ++n) {
      Lanes value[V];
      for (int v = 0; v < V; ++v) value[v] = load(x + Sign * n * row.channels, v);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const int t = n - kShift - Sign * Advance * p;
        if (t < 0 || t >= K) continue;
        for (int v = 0; v < V; ++v)
          sums[p * V + v] = Lanes::fused_multiply_add(value[v], weight[t][v], sums[p * V + v]);
      }
    }
  }
  store_columns<T, V>(row, column, channel, partial, sums, P);
}

// Columns that meet all taps; kColumns at a time while there are, then fewer.
template <int V, class T, class Call>
void in_groups(int64_t column, int64_t end, Call&& call) {
  for (; column + kColumns <= end; column += kColumns) call.template operator()<kColumns>(column);
  if (column + 4 <= end) call.template operator()<4>(column), column += 4;
  if (column + 2 <= end) call.template operator()<2>(column), column += 2;
  if (column < end) call.template operator()<1>(column);
}

template <int V, class T>
void whole_columns(const Row<T>& row, int64_t column, int64_t end, int64_t channel, int64_t partial) {
  const int64_t taps = row.tap_count, advance = row.advance, reach = row.reach;
  const auto shared = [&]<int K, int Advance, int Sign>() {
    in_groups<V, T>(column, end, [&]<int P>(int64_t c) { sharing_columns<P, V, K, Advance, Sign>(row, c, channel, partial); });
  };
  if (advance == 1 && reach == 1 && taps == 3) shared.template operator()<3, 1, 1>();
  else if (advance == 1 && reach == 1 && taps == 5) shared.template operator()<5, 1, 1>();
  else if (advance == 2 && reach == 1 && taps == 3) shared.template operator()<3, 2, 1>();
  else if (advance == 2 && reach == 1 && taps == 5) shared.template operator()<5, 2, 1>();
  else if (advance == 1 && reach == -1 && taps == 2) shared.template operator()<2, 1, -1>();
  else if (advance == 1 && reach == -1 && taps == 3) shared.template operator()<3, 1, -1>();
  else if (advance == 1 && reach == -1 && taps == 5) shared.template operator()<5, 1, -1>();
  else in_groups<V, T>(column, end, [&]<int P>(int64_t c) { fused_columns<P, V>(row, c, 0, taps, channel, partial); });
}

// Result columns of the row whose taps all meet the image, an interval.
template <class T>
Interval whole(const Row<T>& row) {
  const int64_t last = row.reach * (row.tap_count - 1);
  const Interval a = meeting(row.begin, row.advance, row.input_columns, row.columns);
  const Interval b = meeting(row.begin + last, row.advance, row.input_columns, row.columns);
  const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.begin < both.end ? both : Interval{0, 0};
}

template <int V, class T>
void fused_channels(const Row<T>& row, const Interval& inside, int64_t channel, int64_t partial) {
  const auto at_the_border = [&](int64_t column) {
    const int64_t start = row.begin + column * row.advance;
    const auto outside = [&](int64_t t) { return start + t * row.reach < 0 || start + t * row.reach >= row.input_columns; };
    int64_t first = 0, last = row.tap_count;
    while (first < last && outside(first)) ++first;
    while (last > first && outside(last - 1)) --last;
    fused_columns<1, V>(row, column, first, last, channel, partial);
  };
  for (int64_t column = 0; column < inside.begin; ++column) at_the_border(column);
  if constexpr (V > kVectors) {
    for (int v = 0; v < V; v += kVectors)
      whole_columns<kVectors>(row, inside.begin, inside.end, channel + v * Vector<T>::kWidth, 0);
  } else {
    whole_columns<V>(row, inside.begin, inside.end, channel, partial);
  }
  for (int64_t column = inside.end; column < row.columns; ++column) at_the_border(column);
}

template <class T>
void fused_row(const Row<T>& row) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  const Interval inside = whole(row);
  int64_t channel = 0;
  for (; channel + kTileVectors * kWidth <= row.channels; channel += kTileVectors * kWidth)
    fused_channels<kTileVectors>(row, inside, channel, 0);
  for (; channel + 2 * kWidth <= row.channels; channel += 2 * kWidth) fused_channels<2>(row, inside, channel, 0);
  for (; channel + kWidth <= row.channels; channel += kWidth) fused_channels<1>(row, inside, channel, 0);
  if (channel < row.channels) fused_channels<1>(row, inside, channel, row.channels - channel);
}

// Number of i in [0, count) from `first` on in steps of `period`.
int64_t stepped(int64_t first, int64_t count, int64_t period) { return first < count ? (count - first + period - 1) / period : 0; }

// One output row, channels last, multiplier 1.
template <class T>
void forward_row(const Geometry& g, const T* image, const T* filter, T* output, int64_t output_row) {
  const int64_t top = output_row * g.stride_height - g.pad_top;
  const Interval rows = meeting(top, g.dilation_height, g.input_height, g.filter_height);
  fused_row(Row<T>{.input = image + (top + rows.begin * g.dilation_height) * g.input_width * g.channels,
                   .taps = filter + rows.begin * g.filter_width * g.channels,
                   .output = output,
                   .channels = g.channels,
                   .rows = std::max<int64_t>(0, rows.end - rows.begin),
                   .input_row_step = g.dilation_height * g.input_width * g.channels,
                   .tap_row_step = g.filter_width * g.channels,
                   .columns = g.output_width,
                   .output_step = 1,
                   .begin = -g.pad_left,
                   .advance = g.stride_width,
                   .reach = g.dilation_width,
                   .tap_count = g.filter_width,
                   .tap_step = 1,
                   .input_columns = g.input_width});
}

// The taps that serve input position `at` along one dimension: those for which at + pad - tap * dilation is an output position
// times the stride. They are a period apart; one period on, the output position is `back` less.
struct Serving {
  int64_t first, count, period, position, back;
};

Serving serving(int64_t at, int64_t pad, int64_t stride, int64_t dilation, int64_t taps) {
  const int64_t period = stride / std::gcd(stride, dilation);
  int64_t first = 0;
  while (first < std::min(period, taps) && (at + pad - first * dilation) % stride != 0) ++first;
  if (first == std::min(period, taps)) return {0, 0, period, 0, 0};
  return {first, stepped(first, taps, period), period, (at + pad - first * dilation) / stride, period * dilation / stride};
}

// One row of the input's gradient, channels last, multiplier 1. Columns that are a stride apart meet the same taps; each such
// class of columns is a row of its own.
template <class T>
void backward_row(const Geometry& g, const T* gradient, const T* filter, T* output, int64_t input_row) {
  const Serving rows = serving(input_row, g.pad_top, g.stride_height, g.dilation_height, g.filter_height);
  // Tap row i meets output row position - i * back.
  const int64_t first = rows.position < g.output_height || rows.back == 0
                            ? 0
                            : (rows.position - g.output_height) / rows.back + 1;
  const int64_t end = rows.count == 0 ? 0 : std::min(rows.count, rows.position < 0 ? 0 : rows.position / rows.back + 1);
  const int64_t row_elements = g.output_width * g.channels;
  for (int64_t start = 0; start < std::min(g.stride_width, g.input_width); ++start) {
    const Serving columns = serving(start, g.pad_left, g.stride_width, g.dilation_width, g.filter_width);
    fused_row(Row<T>{.input = gradient + (rows.position - first * rows.back) * row_elements,
                     .taps = filter + ((rows.first + first * rows.period) * g.filter_width + columns.first) * g.channels,
                     .output = output + start * g.channels,
                     .channels = g.channels,
                     .rows = std::max<int64_t>(0, end - first),
                     .input_row_step = -rows.back * row_elements,
                     .tap_row_step = rows.period * g.filter_width * g.channels,
                     .columns = stepped(start, g.input_width, g.stride_width),
                     .output_step = g.stride_width,
                     .begin = columns.position,
                     .advance = 1,
                     .reach = -columns.back,
                     .tap_count = columns.count,
                     .tap_step = columns.period,
                     .input_columns = g.output_width});
  }
}

// Channels are worked on in pieces that stay in the first cache.
constexpr int64_t kPiece = 64;

// One output position, channels last, any multiplier.
template <class T>
void forward_position(const Geometry& g, const T* image, const T* filter, T* output, int64_t row, int64_t column) {
  const int64_t outputs = g.outputs(), top = row * g.stride_height - g.pad_top, left = column * g.stride_width - g.pad_left;
  for (int64_t begin = 0; begin < outputs; begin += kPiece) {
    const int64_t count = std::min(kPiece, outputs - begin);
    T sum[kPiece] = {};
    for (int64_t di = 0; di < g.filter_height; ++di) {
      const int64_t i = top + di * g.dilation_height;
      if (i < 0 || i >= g.input_height) continue;
      for (int64_t dj = 0; dj < g.filter_width; ++dj) {
        const int64_t j = left + dj * g.dilation_width;
        if (j < 0 || j >= g.input_width) continue;
        const T* x = image + (i * g.input_width + j) * g.channels;
        const T* w = filter + (di * g.filter_width + dj) * outputs + begin;
        for (int64_t k = 0; k < count; ++k) sum[k] = std::fma(x[(begin + k) / g.multiplier], w[k], sum[k]);
      }
    }
    std::copy_n(sum, count, output + begin);
  }
}

// One plane of one output channel, for channels first: along the rows, tap by tap.
template <class T>
void forward_plane(const Geometry& g, const T* plane, const T* filter, T* output) {
  std::fill_n(output, g.output_height * g.output_width, T(0));
  for (int64_t row = 0; row < g.output_height; ++row) {
    T* y = output + row * g.output_width;
    for (int64_t di = 0; di < g.filter_height; ++di) {
      const int64_t i = row * g.stride_height - g.pad_top + di * g.dilation_height;
      if (i < 0 || i >= g.input_height) continue;
      for (int64_t dj = 0; dj < g.filter_width; ++dj) {
        const int64_t offset = dj * g.dilation_width - g.pad_left;
        const Interval met = meeting(offset, g.stride_width, g.input_width, g.output_width);
        const T* x = plane + i * g.input_width + offset;
        const T w = filter[(di * g.filter_width + dj) * g.outputs()];
        if (g.stride_width == 1)
          for (int64_t k = met.begin; k < met.end; ++k) y[k] = std::fma(x[k], w, y[k]);
        else
          for (int64_t k = met.begin; k < met.end; ++k) y[k] = std::fma(x[k * g.stride_width], w, y[k]);
      }
    }
  }
}

// One input position, channels last, any multiplier.
template <class T>
void backward_position(const Geometry& g, const T* gradient, const T* filter, T* output, int64_t row, int64_t column) {
  const int64_t outputs = g.outputs();
  for (int64_t begin = 0; begin < g.channels; begin += kPiece) {
    const int64_t count = std::min(kPiece, g.channels - begin);
    T sum[kPiece] = {};
    for (int64_t di = 0; di < g.filter_height; ++di) {
      const int64_t i = row + g.pad_top - di * g.dilation_height;
      if (i < 0 || i % g.stride_height || i / g.stride_height >= g.output_height) continue;
      for (int64_t dj = 0; dj < g.filter_width; ++dj) {
        const int64_t j = column + g.pad_left - dj * g.dilation_width;
        if (j < 0 || j % g.stride_width || j / g.stride_width >= g.output_width) continue;
        const T* dy = gradient + (i / g.stride_height * g.output_width + j / g.stride_width) * outputs + begin * g.multiplier;
        const T* w = filter + (di * g.filter_width + dj) * outputs + begin * g.multiplier;
        for (int64_t k = 0; k < count; ++k)
          for (int64_t q = k * g.multiplier; q < (k + 1) * g.multiplier; ++q) sum[k] = std::fma(dy[q], w[q], sum[k]);
      }
    }
    std::copy_n(sum, count, output + begin);
  }
}

// One plane of one input channel, channels first. For each tap, the outputs it served are met in order.
template <class T>
void backward_plane(const Geometry& g, const T* gradients, const T* filter, T* output) {
  const int64_t plane = g.output_height * g.output_width;
  std::fill_n(output, g.input_height * g.input_width, T(0));
  for (int64_t row = 0; row < g.input_height; ++row) {
    T* dx = output + row * g.input_width;
    for (int64_t di = 0; di < g.filter_height; ++di) {
      const int64_t i = row + g.pad_top - di * g.dilation_height;
      if (i < 0 || i % g.stride_height || i / g.stride_height >= g.output_height) continue;
      for (int64_t dj = 0; dj < g.filter_width; ++dj) {
        const int64_t offset = dj * g.dilation_width - g.pad_left;
        const Interval met = meeting(offset, g.stride_width, g.input_width, g.output_width);
        for (int64_t q = 0; q < g.multiplier; ++q) {
          const T* dy = gradients + q * plane + i / g.stride_height * g.output_width;
          const T w = filter[(di * g.filter_width + dj) * g.outputs() + q];
          for (int64_t k = met.begin; k < met.end; ++k) {
            T& sum = dx[k * g.stride_width + offset];
            sum = std::fma(dy[k], w, sum);
          }
        }
      }
    }
  }
}

}  // namespace

EXACTQAT_KERNEL(depthwise_conv2d_native) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *input = call.operands[0].as<T>(), *filter = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  if (g.output_size() == 0) return;
  const int64_t cost = g.output_size() * std::max<int64_t>(1, g.filter_height * g.filter_width);
  const int64_t image = g.input_height * g.input_width * g.channels;
  if (g.channels_first) {
    const int64_t in_plane = g.input_height * g.input_width, out_plane = g.output_height * g.output_width;
    parallel_for(g.batch * g.outputs(), cost, [&](int64_t task) {
      const int64_t b = task / g.outputs(), o = task % g.outputs();
      forward_plane(g, input + b * image + o / g.multiplier * in_plane, filter + o, output + task * out_plane);
    });
    return;
  }
  parallel_for(g.batch * g.output_height, cost, [&](int64_t task) {
    const int64_t b = task / g.output_height, row = task % g.output_height;
    if (g.multiplier == 1) {
      forward_row(g, input + b * image, filter, output + task * g.output_width * g.channels, row);
      return;
    }
    for (int64_t column = 0; column < g.output_width; ++column)
      forward_position(g, input + b * image, filter, output + (task * g.output_width + column) * g.outputs(), row, column);
  });
}

EXACTQAT_KERNEL(depthwise_conv2d_native_backprop_input) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *filter = call.operands[0].as<T>(), *gradient = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  if (g.input_size() == 0) return;
  const int64_t cost = g.input_size() * std::max<int64_t>(1, g.filter_height * g.filter_width * g.multiplier);
  if (g.channels_first) {
    const int64_t in_plane = g.input_height * g.input_width, out_plane = g.output_height * g.output_width;
    parallel_for(g.batch * g.channels, cost, [&](int64_t task) {
      const int64_t first = task % g.channels * g.multiplier;
      backward_plane(g, gradient + task * g.multiplier * out_plane, filter + first, output + task * in_plane);
    });
    return;
  }
  const int64_t image = g.output_height * g.output_width * g.outputs();
  parallel_for(g.batch * g.input_height, cost, [&](int64_t task) {
    const int64_t b = task / g.input_height, row = task % g.input_height;
    if (g.multiplier == 1) {
      backward_row(g, gradient + b * image, filter, output + task * g.input_width * g.channels, row);
      return;
    }
    for (int64_t column = 0; column < g.input_width; ++column)
      backward_position(g, gradient + b * image, filter, output + (task * g.input_width + column) * g.channels, row, column);
  });
}

namespace {

// Sums of one output row for R tap rows by K taps by V vectors of channels, in float64: sums[r][t][channel].
template <int R, int K, int V, class T>
void filter_row(const T* const* inputs, const T* gradient, int64_t columns, int64_t begin, int64_t advance, int64_t reach,
                int64_t input_columns, int64_t channels, int64_t partial, double* sums, int64_t sums_step) {
  using Lanes = Vector<double>;
  const auto load = [&](const T* from, int v) {
    return partial && v == V - 1 ? Lanes::load(from + v * Lanes::kWidth, partial) : Lanes::load(from + v * Lanes::kWidth);
  };
  Lanes sum[R][K][V];
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t start = begin + column * advance, end = start + (K - 1) * reach;
    const bool inside = start >= 0 && end < input_columns;
    Lanes dy[V];
    for (int v = 0; v < V; ++v) dy[v] = load(gradient + column * channels, v);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < K; ++t) {
        const int64_t j = start + t * reach;
        if (!inside && (j < 0 || j >= input_columns)) continue;
        for (int v = 0; v < V; ++v)
          sum[r][t][v] = Lanes::fused_multiply_add(load(inputs[r] + j * channels, v), dy[v], sum[r][t][v]);
      }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < K; ++t)
      for (int v = 0; v < V; ++v) sum[r][t][v].store(sums + (r * K + t) * sums_step + v * Lanes::kWidth);
}

// The same for channels first or any multiplier: `count` outputs from `begin` on, whose channels lie `in_channel` apart.
template <class T>
void filter_row_of_any_layout(const Geometry& g, const T* image, const T* gradient_row, int64_t row, int64_t begin,
                              int64_t count, double* sums, int64_t sums_step) {
  const int64_t in_channel = g.channels_first ? g.input_height * g.input_width : 1;
  const int64_t in_position = g.channels_first ? 1 : g.channels;
  const int64_t out_channel = g.channels_first ? g.output_height * g.output_width : 1;
  const int64_t out_position = g.channels_first ? 1 : g.outputs();
  for (int64_t column = 0; column < g.output_width; ++column)
    for (int64_t di = 0; di < g.filter_height; ++di) {
      const int64_t i = row * g.stride_height - g.pad_top + di * g.dilation_height;
      if (i < 0 || i >= g.input_height) continue;
      for (int64_t dj = 0; dj < g.filter_width; ++dj) {
        const int64_t j = column * g.stride_width - g.pad_left + dj * g.dilation_width;
        if (j < 0 || j >= g.input_width) continue;
        const T* x = image + (i * g.input_width + j) * in_position;
        const T* dy = gradient_row + column * out_position + begin * out_channel;
        double* sum = sums + (di * g.filter_width + dj) * sums_step;
        for (int64_t k = 0; k < count; ++k)
          sum[k] = std::fma(double(x[(begin + k) / g.multiplier * in_channel]), double(dy[k * out_channel]), sum[k]);
      }
    }
}

// Channels last, multiplier 1: a piece of the channels that fits registers, tap rows and taps together where they do too.
template <class T>
void filter_row_of_channels(const Geometry& g, const T* image, const T* gradient_row, int64_t row, int64_t begin,
                            int64_t count, double* sums, int64_t sums_step) {
  constexpr int64_t kWidth = Vector<double>::kWidth;
  constexpr int V = kWidth >= 8 ? 2 : 1;
  std::vector<const T*> inputs;
  int64_t first_row = -1;
  for (int64_t di = 0; di < g.filter_height; ++di) {
    const int64_t i = row * g.stride_height - g.pad_top + di * g.dilation_height;
    if (i < 0 || i >= g.input_height) continue;
    if (first_row < 0) first_row = di;
    inputs.push_back(image + i * g.input_width * g.channels + begin);
  }
  const int64_t rows = int64_t(inputs.size());
  for (int64_t channel = 0; channel < count;) {
    const bool both = V == 2 && channel + kWidth < count;
    const int64_t take = std::min<int64_t>(count - channel, both ? 2 * kWidth : kWidth), partial = take % kWidth;
    const auto run = [&]<int R, int K>(int64_t r, int64_t dj) {
      double* to = sums + ((first_row + r) * g.filter_width + dj) * sums_step + channel;
      const int64_t start = -g.pad_left + dj * g.dilation_width;
      (both ? filter_row<R, K, V, T> : filter_row<R, K, 1, T>)(inputs.data() + r, gradient_row + begin + channel, g.output_width,
                                                               start, g.stride_width, g.dilation_width, g.input_width,
                                                               g.channels, partial, to, sums_step);
    };
    if (g.filter_width == 3) {
      int64_t r = 0;
      for (; r + 3 <= rows; r += 3) run.template operator()<3, 3>(r, 0);
      for (; r + 2 <= rows; r += 2) run.template operator()<2, 3>(r, 0);
      for (; r < rows; ++r) run.template operator()<1, 3>(r, 0);
    } else if (g.filter_width == 5) {
      for (int64_t r = 0; r < rows; ++r) run.template operator()<1, 5>(r, 0);
    } else {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t dj = 0; dj < g.filter_width; ++dj) run.template operator()<1, 1>(r, dj);
    }
    for (const T*& input : inputs) input += take;
    channel += take;
  }
}

}  // namespace

// Items of the sum are output rows (image by image), each summed from left to right in float64; then the tree of reduce.h.
EXACTQAT_KERNEL(depthwise_conv2d_native_backprop_filter) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *input = call.operands[0].as<T>(), *gradient = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  const int64_t outputs = g.outputs(), taps = g.filter_height * g.filter_width;
  if (taps * outputs == 0) return;
  const int64_t items = g.batch * g.output_height, blocks = std::max<int64_t>(1, (items + kBlock - 1) / kBlock);
  const bool in_registers = g.multiplier == 1 && !g.channels_first;
  constexpr int64_t kTile = 64;
  const int64_t tiles = (outputs + kTile - 1) / kTile, row_step = g.output_width * (g.channels_first ? 1 : outputs);
  std::vector<double> sums(blocks * taps * outputs);

  parallel_for(blocks * tiles, g.output_size() * taps, [&](int64_t task) {
    const int64_t block = task / tiles, begin = task % tiles * kTile, count = std::min(kTile, outputs - begin);
    // Rows of sums are padded to whole vectors, which are stored whole.
    std::vector<double> row_sums(taps * kTile), lanes(kLanes * taps * kTile);
    for (int64_t item = block * kBlock; item < std::min(items, (block + 1) * kBlock); ++item) {
      const int64_t b = item / g.output_height, row = item % g.output_height;
      const T* image = input + b * g.input_height * g.input_width * g.channels;
      const T* gradient_row = gradient + b * g.output_height * g.output_width * outputs + row * row_step;
      std::fill(row_sums.begin(), row_sums.end(), 0.0);
      (in_registers ? filter_row_of_channels<T> : filter_row_of_any_layout<T>)(g, image, gradient_row, row, begin, count,
                                                                               row_sums.data(), kTile);
      double* lane = lanes.data() + item % kLanes * taps * kTile;
      for (int64_t k = 0; k < taps * kTile; ++k) lane[k] += row_sums[k];
    }
    fold_lanes(lanes.data(), taps * kTile);
    for (int64_t tap = 0; tap < taps; ++tap)
      std::copy_n(lanes.data() + tap * kTile, count, sums.data() + (block * taps + tap) * outputs + begin);
  });
  tree_fold(sums.data(), blocks, taps * outputs);
  for (int64_t k = 0; k < taps * outputs; ++k) output[k] = T(sums[k]);
}

}  // namespace exactqat
