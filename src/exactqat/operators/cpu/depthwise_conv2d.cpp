// SPDX-License-Identifier: Apache-2.0
// DepthwiseConv2dNative and the gradient of its input: the same arithmetic as reference/depthwise_conv2d.py, one fused
// multiply-add for each tap, taps row-major, padded taps skipped. The filter's gradient is in depthwise_conv2d_filter.cpp.
#include <cmath>

#include "call.h"
#include "depthwise_conv2d_geometry.h"
#include "depthwise_conv2d_planes.h"
#include "depthwise_conv2d_rows.h"
#include "depthwise_conv2d_sliding.h"
#include "parallel.h"
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
        for (int64_t k = 0; k < count; ++k) sum[k] = flushed_fused_multiply_add(x[(begin + k) / g.multiplier], w[k], sum[k]);
      }
    }
    std::copy_n(sum, count, output + begin);
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
          for (int64_t q = k * g.multiplier; q < (k + 1) * g.multiplier; ++q)
            sum[k] = flushed_fused_multiply_add(dy[q], w[q], sum[k]);
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
            sum = flushed_fused_multiply_add(dy[k], w, sum);
          }
        }
      }
    }
  }
}

// The output rows that meet input rows [begin, end).
Interval rows_meeting(const Geometry& g, int64_t begin, int64_t end) {
  const int64_t first = begin + g.pad_top - (g.filter_height - 1) * g.dilation_height, last = end - 1 + g.pad_top;
  const int64_t most = std::max<int64_t>(g.output_height - 1, 0);
  const int64_t from = first <= 0 ? 0 : std::min(quotient_rounded_up(first, g.stride_height), most);
  return {from, std::clamp<int64_t>(last / g.stride_height + 1, from, g.output_height)};
}

// All rows of a result that is channels first, whose plane k is made of plane k / share of the operand. `met` are the rows of
// the operand that rows of the result are made of, `make` says how (depthwise_conv2d_rows.h).
template <class T, class Met, class Make>
void sum_planes(const Geometry& g, const T* operand, int64_t operand_height, int64_t operand_width, int64_t share,
                const T* filter, T* result, int64_t height, int64_t width, Met&& met, Make&& make) {
  constexpr int64_t N = kPlanes<T>, kEnoughTasks = 16, kTogether = 8;
  const int64_t outputs = g.outputs(), all = g.batch * g.channels * share, groups = quotient_rounded_up(all, N);
  const int64_t bands = quotient_rounded_up(height, rows_at_a_time<T>(g));
  const int64_t wanted = std::max(quotient_rounded_up(groups, kTogether), quotient_rounded_up(kEnoughTasks, bands));
  const int64_t parts = std::min(groups, wanted);
  parallel_for(parts * bands, all * height * width * std::max<int64_t>(1, g.taps()), [&](int64_t task) {
    const int64_t part = task / bands, band = task % bands, begin = height * band / bands, end = height * (band + 1) / bands;
    const Interval needed = met(begin, end);
    const int64_t positions = (needed.end - needed.begin) * operand_width, results = (end - begin) * width;
    const auto memory = scratch<T>((g.taps() + positions + results) * N);
    T *taps = memory.get(), *from = taps + g.taps() * N, *to = from + positions * N;
    const Rows<const T> gathered{from, needed.begin, operand_width, N};
    const auto pieces = pieces_of<T>(make(gathered, taps, N, Rows<T>{to, begin, width, N}, begin, end), false);
    for (int64_t group = groups * part / parts; group < groups * (part + 1) / parts; ++group) {
      const int64_t first = group * N;
      const int count = int(std::min(N, all - first));
      const T* operand_planes[N];
      T* result_planes[N];
      for (int k = 0; k < count; ++k) {
        operand_planes[k] = operand + (first + k) / share * operand_height * operand_width;
        result_planes[k] = result + (first + k) * height * width;
      }
      // Planes of two images may be neighbours; after the last one any taps do.
      for (int64_t k = 0, output = first % outputs; k < N; ++k, output = output + 1 == outputs ? 0 : output + 1)
        for (int64_t tap = 0; tap < g.taps(); ++tap) taps[tap * N + k] = filter[tap * outputs + output];
      gather_planes(operand_planes, count, needed.begin * operand_width, positions, from);
      sum_pieces(pieces, 0, N);
      scatter_planes(to, results, result_planes, count, begin * width);
    }
  });
}

}  // namespace

EXACTQAT_IMAGES_KERNEL(depthwise_conv2d_native, 0) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *input = call.operands[0].as<T>(), *filter = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  if (g.output_size() == 0) return;
  const int64_t cost = g.output_size() * std::max<int64_t>(1, g.taps()), image = g.input_plane() * g.channels;
  if (g.channels_first) {
    if (slide_forward(g, input, filter, output)) return;
    sum_planes(g, input, g.input_height, g.input_width, g.multiplier, filter, output, g.output_height, g.output_width,
               [&](int64_t begin, int64_t end) { return rows_met(g, begin, end); },
               [&](auto&&... rows) { return forward_rows<T>(g, rows...); });
    return;
  }
  if (g.multiplier == 1) {
    const auto make = [&](int64_t b, int64_t begin, int64_t end) {
      return forward_rows<T>(g, {input + b * image, 0, g.input_width, g.channels}, filter, g.channels,
                             {output + b * g.output_plane() * g.channels, 0, g.output_width, g.channels}, begin, end);
    };
    sum_images(g, g.output_height, output, g.output_size(), make);
    return;
  }
  parallel_for(g.batch * g.output_height, cost, [&](int64_t task) {
    const int64_t b = task / g.output_height, row = task % g.output_height;
    for (int64_t column = 0; column < g.output_width; ++column)
      forward_position(g, input + b * image, filter, output + (task * g.output_width + column) * g.outputs(), row, column);
  });
}

EXACTQAT_IMAGES_KERNEL(depthwise_conv2d_native_backprop_input, 1) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *filter = call.operands[0].as<T>(), *gradient = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  if (g.input_size() == 0) return;
  const int64_t cost = g.input_size() * std::max<int64_t>(1, g.taps() * g.multiplier);
  if (g.channels_first && g.multiplier == 1) {
    if (slide_backward(g, gradient, filter, output)) return;
    sum_planes(g, gradient, g.output_height, g.output_width, 1, filter, output, g.input_height, g.input_width,
               [&](int64_t begin, int64_t end) { return rows_meeting(g, begin, end); },
               [&](auto&&... rows) { return backward_rows<T>(g, rows...); });
    return;
  }
  if (g.channels_first) {
    const int64_t in_plane = g.input_plane(), out_plane = g.output_plane();
    parallel_for(g.batch * g.channels, cost, [&](int64_t task) {
      const int64_t first = task % g.channels * g.multiplier;
      backward_plane(g, gradient + task * g.multiplier * out_plane, filter + first, output + task * in_plane);
    });
    return;
  }
  const int64_t image = g.output_height * g.output_width * g.outputs();
  if (g.multiplier == 1) {
    const auto make = [&](int64_t b, int64_t begin, int64_t end) {
      return backward_rows<T>(g, {gradient + b * image, 0, g.output_width, g.channels}, filter, g.channels,
                              {output + b * g.input_plane() * g.channels, 0, g.input_width, g.channels}, begin, end);
    };
    sum_images(g, g.input_height, output, g.input_size(), make);
    return;
  }
  parallel_for(g.batch * g.input_height, cost, [&](int64_t task) {
    const int64_t b = task / g.input_height, row = task % g.input_height;
    for (int64_t column = 0; column < g.input_width; ++column)
      backward_position(g, gradient + b * image, filter, output + (task * g.input_width + column) * g.channels, row, column);
  });
}

}  // namespace exactqat
