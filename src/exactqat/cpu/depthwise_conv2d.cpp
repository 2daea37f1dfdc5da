// SPDX-License-Identifier: Apache-2.0
// DepthwiseConv2dNative and its two gradients: the same arithmetic as reference/depthwise_conv2d.py. Forward and input
// gradient are one fused multiply-add for each tap, taps row-major, padded taps skipped.
#include <cmath>

#include "call.h"
#include "depthwise_conv2d_geometry.h"
#include "depthwise_conv2d_rows.h"
#include "reduce.h"
#include "simd.h"

namespace exactqat {
namespace {

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
  if (g.multiplier == 1) {
    sum_images(g, g.output_height, std::max(g.input_width, g.output_width), output, g.output_size(), [&](int64_t b, int64_t begin, int64_t end) {
      return forward_rows<T>(g, {input + b * image, 0, g.input_width, g.channels}, filter, g.channels,
                             {output + b * g.output_plane() * g.channels, 0, g.output_width, g.channels}, begin, end);
    });
    return;
  }
  parallel_for(g.batch * g.output_height, cost, [&](int64_t task) {
    const int64_t b = task / g.output_height, row = task % g.output_height;
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
  if (g.multiplier == 1) {
    sum_images(g, g.input_height, std::max(g.input_width, g.output_width), output, g.input_size(), [&](int64_t b, int64_t begin, int64_t end) {
      return backward_rows<T>(g, {gradient + b * image, 0, g.output_width, g.channels}, filter, g.channels,
                              {output + b * g.input_plane() * g.channels, 0, g.input_width, g.channels}, begin, end);
    });
    return;
  }
  parallel_for(g.batch * g.input_height, cost, [&](int64_t task) {
    const int64_t b = task / g.input_height, row = task % g.input_height;
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
