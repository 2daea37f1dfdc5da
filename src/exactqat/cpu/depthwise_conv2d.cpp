// SPDX-License-Identifier: Apache-2.0
// DepthwiseConv2dNative and its two gradients: the same arithmetic as reference/depthwise_conv2d.py. Forward and input
// gradient are one fused multiply-add for each tap, taps row-major, padded taps skipped.
#include <cmath>

#include "call.h"
#include "reduce.h"

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

// Channels are worked on in pieces that stay in registers or the first cache.
constexpr int64_t kPiece = 64;

// One output position, channels last and next to each other.
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
        if (g.multiplier == 1)
          for (int64_t k = 0; k < count; ++k) sum[k] = std::fma(x[begin + k], w[k], sum[k]);
        else
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

// One input position, channels last.
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
        if (g.multiplier == 1) {
          for (int64_t k = 0; k < count; ++k) sum[k] = std::fma(dy[k], w[k], sum[k]);
        } else {
          for (int64_t k = 0; k < count; ++k)
            for (int64_t q = k * g.multiplier; q < (k + 1) * g.multiplier; ++q) sum[k] = std::fma(dy[q], w[q], sum[k]);
        }
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
    for (int64_t column = 0; column < g.input_width; ++column)
      backward_position(g, gradient + b * image, filter, output + (task * g.input_width + column) * g.channels, row, column);
  });
}

// Items of the sum are output rows (image by image), each summed from left to right in float64; then the tree of reduce.h.
EXACTQAT_KERNEL(depthwise_conv2d_native_backprop_filter) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *input = call.operands[0].as<T>(), *gradient = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  const int64_t outputs = g.outputs(), taps = g.filter_height * g.filter_width;
  if (taps * outputs == 0) return;
  const int64_t items = g.batch * g.output_height, blocks = std::max<int64_t>(1, (items + kBlock - 1) / kBlock);
  const int64_t in_channel = g.channels_first ? g.input_height * g.input_width : 1;
  const int64_t in_position = g.channels_first ? 1 : g.channels;
  const int64_t out_channel = g.channels_first ? g.output_height * g.output_width : 1;
  const int64_t out_position = g.channels_first ? 1 : outputs;
  constexpr int64_t kTile = 16;
  const int64_t tiles = (outputs + kTile - 1) / kTile;
  std::vector<double> sums(blocks * taps * outputs);

  parallel_for(blocks * tiles, g.output_size() * taps, [&](int64_t task) {
    const int64_t block = task / tiles, begin = task % tiles * kTile, count = std::min(kTile, outputs - begin);
    std::vector<double> row_sums(taps * kTile), lanes(kLanes * taps * kTile);
    for (int64_t item = block * kBlock; item < std::min(items, (block + 1) * kBlock); ++item) {
      const int64_t b = item / g.output_height, row = item % g.output_height;
      const T* image = input + b * g.input_height * g.input_width * g.channels;
      const T* dy_row = gradient + b * g.output_height * g.output_width * outputs + row * g.output_width * out_position;
      std::fill(row_sums.begin(), row_sums.end(), 0.0);
      for (int64_t column = 0; column < g.output_width; ++column) {
        double dy[kTile];
        for (int64_t k = 0; k < count; ++k) dy[k] = dy_row[column * out_position + (begin + k) * out_channel];
        for (int64_t di = 0; di < g.filter_height; ++di) {
          const int64_t i = row * g.stride_height - g.pad_top + di * g.dilation_height;
          if (i < 0 || i >= g.input_height) continue;
          for (int64_t dj = 0; dj < g.filter_width; ++dj) {
            const int64_t j = column * g.stride_width - g.pad_left + dj * g.dilation_width;
            if (j < 0 || j >= g.input_width) continue;
            const T* x = image + (i * g.input_width + j) * in_position;
            double* sum = row_sums.data() + (di * g.filter_width + dj) * kTile;
            if (g.multiplier == 1 && !g.channels_first)
              for (int64_t k = 0; k < count; ++k) sum[k] += double(x[begin + k]) * dy[k];
            else
              for (int64_t k = 0; k < count; ++k) sum[k] += double(x[(begin + k) / g.multiplier * in_channel]) * dy[k];
          }
        }
      }
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
