// SPDX-License-Identifier: Apache-2.0
// DepthwiseConv2dNative and its two gradients: the same arithmetic as reference/depthwise_conv2d.py. Forward and input
// gradient are one fused multiply-add for each tap, taps row-major, padded taps skipped.
#include <cmath>

#include "call.h"
#include "depthwise_conv2d_filter.h"
#include "depthwise_conv2d_filter_planes.h"
#include "depthwise_conv2d_geometry.h"
#include "depthwise_conv2d_planes.h"
#include "depthwise_conv2d_rows.h"
#include "depthwise_conv2d_sliding.h"
#include "memory.h"
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

// The input rows that output rows [begin, end) meet; at least one.
Interval rows_met(const Geometry& g, int64_t begin, int64_t end) {
  const int64_t first = begin * g.stride_height - g.pad_top;
  const int64_t last = (end - 1) * g.stride_height - g.pad_top + (g.filter_height - 1) * g.dilation_height;
  const int64_t from = std::clamp<int64_t>(first, 0, std::max<int64_t>(g.input_height - 1, 0));
  return {from, std::clamp<int64_t>(last + 1, from, g.input_height)};
}

// The output rows that meet input rows [begin, end).
Interval rows_meeting(const Geometry& g, int64_t begin, int64_t end) {
  const int64_t first = begin + g.pad_top - (g.filter_height - 1) * g.dilation_height, last = end - 1 + g.pad_top;
  const int64_t most = std::max<int64_t>(g.output_height - 1, 0);
  const int64_t from = first <= 0 ? 0 : std::min(quotient_rounded_up(first, g.stride_height), most);
  return {from, std::clamp<int64_t>(last / g.stride_height + 1, from, g.output_height)};
}

// How many rows of the larger image are worked on at a time, so that what is rearranged stays in the second cache.
template <class T>
int64_t rows_at_a_time(const Geometry& g) {
  constexpr int64_t kBytes = 1 << 17;
  const int64_t row = std::max(g.input_width, g.output_width) * kPlanes<T> * int64_t(sizeof(T));
  return std::max<int64_t>(4, kBytes / std::max<int64_t>(row, 1));
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
      // Planes of two images may be neighbours; behind the last one any taps do.
      for (int64_t k = 0, output = first % outputs; k < N; ++k, output = output + 1 == outputs ? 0 : output + 1)
        for (int64_t tap = 0; tap < g.taps(); ++tap) taps[tap * N + k] = filter[tap * outputs + output];
      gather_planes(operand_planes, count, needed.begin * operand_width, positions, from);
      sum_pieces(pieces, 0, N);
      scatter_planes(to, results, result_planes, count, begin * width);
    }
  });
}

}  // namespace

EXACTQAT_KERNEL(depthwise_conv2d_native) {
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

EXACTQAT_KERNEL(depthwise_conv2d_native_backprop_input) {
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

namespace {

// Sums of one output row, channels last, any multiplier: `count` outputs from `begin` on, added to sums[taps][tile].
template <class T>
void add_filter_sums_of_any_multiplier(const Geometry& g, const T* image, const T* gradient_row, int64_t row, int64_t begin,
                                       int64_t count, double* sums, int64_t tile) {
  std::vector<double> sum(count);
  for (int64_t di = 0; di < g.filter_height; ++di)
    for (int64_t dj = 0; dj < g.filter_width; ++dj, sums += tile) {
      const int64_t i = row * g.stride_height - g.pad_top + di * g.dilation_height, offset = dj * g.dilation_width - g.pad_left;
      const Interval met = meeting(offset, g.stride_width, g.input_width, g.output_width);
      std::fill(sum.begin(), sum.end(), 0.0);
      for (int64_t column = met.begin; i >= 0 && i < g.input_height && column < met.end; ++column) {
        const T* x = image + (i * g.input_width + column * g.stride_width + offset) * g.channels;
        const T* dy = gradient_row + column * g.outputs() + begin;
        for (int64_t k = 0; k < count; ++k)
          sum[k] = flushed_fused_multiply_add(double(x[(begin + k) / g.multiplier]), double(dy[k]), sum[k]);
      }
      for (int64_t k = 0; k < count; ++k) sums[k] += sum[k];
    }
}

// Whether columns are so far apart that they share few sets of the first cache, and those that one output row meets drive each
// other out of it.
template <class T>
bool columns_collide(const Geometry& g) {
  return g.channels * int64_t(sizeof(T)) % 2048 == 0;
}

// Whether operands of the filter gradient come from afar and are met far from the order of memory: columns of many channels, a
// few channels at a time, and inputs that few output rows share. Then it pays to ask for them early, and wide tiles pay.
template <class T>
bool asked_for_early(const Geometry& g) {
  constexpr int64_t kManyChannels = 128;
  return Vector<double>::kWidth >= 8 && !g.channels_first && g.multiplier == 1 && g.channels >= kManyChannels &&
         g.stride_width == 2 && g.filter_width == 3 && g.dilation_width == 1 && g.taps() <= 9 &&
         far_from_the_core(g.input_size() * int64_t(sizeof(T)));
}

// The lanes of one block of the tree, lanes[8][taps][tile]: output rows [first, last) of all images are added, for `count`
// outputs from `begin` on.
template <class T>
void add_filter_rows(const Geometry& g, const T* input, const T* gradient, int64_t first, int64_t last, int64_t begin,
                     int64_t count, double* lanes, int64_t tile) {
  const bool ahead = asked_for_early<T>(g), collide = !g.channels_first && g.multiplier == 1 && !ahead && columns_collide<T>(g);
  const int64_t most = g.channels_first || collide ? rows_at_a_time<T>(g) : g.output_height;
  for (int64_t item = first, next; item < last; item = next) {
    const int64_t b = item / g.output_height, row = item % g.output_height;
    next = std::min({last, item + most, (b + 1) * g.output_height});
    const T* image = input + b * g.input_plane() * g.channels;
    const T* gradients = gradient + b * g.output_plane() * g.outputs();
    const auto sums = [&](int64_t k) { return lanes + (item + k) % kLanes * g.taps() * tile; };
    if (g.channels_first) {
      constexpr int64_t N = kPlanes<T>;
      const Interval needed = rows_met(g, row, row + next - item);
      const int64_t inputs = (needed.end - needed.begin) * g.input_width, outputs = (next - item) * g.output_width;
      const T *planes[N], *gradient_planes[N];
      for (int64_t k = 0; k < count; ++k) {
        planes[k] = image + (begin + k) / g.multiplier * g.input_plane();
        gradient_planes[k] = gradients + (begin + k) * g.output_plane();
      }
      const auto memory = scratch<T>((inputs + outputs) * N);
      T *x = memory.get(), *dy = x + inputs * N;
      gather_planes(planes, int(count), needed.begin * g.input_width, inputs, x);
      gather_planes(gradient_planes, int(count), row * g.output_width, outputs, dy);
      for (int64_t k = 0; k < next - item; ++k)
        add_filter_sums(g, Rows<const T>{x, needed.begin, g.input_width, N}, Rows<const T>{dy, row, g.output_width, N}, row + k,
                        count, sums(k), tile);
    } else if (collide) {
      const Interval needed = rows_met(g, row, row + next - item);
      const int64_t inputs = (needed.end - needed.begin) * g.input_width;
      const auto memory = scratch<T>(inputs * tile);
      for (int64_t k = 0; k < inputs; ++k)
        std::copy_n(image + (needed.begin * g.input_width + k) * g.channels + begin, count, memory.get() + k * tile);
      for (int64_t k = 0; k < next - item; ++k)
        add_filter_sums(g, Rows<const T>{memory.get(), needed.begin, g.input_width, tile},
                        Rows<const T>{gradients + begin, 0, g.output_width, g.channels}, row + k, count, sums(k), tile);
    } else if (g.multiplier == 1) {
      for (int64_t k = 0; k < next - item; ++k)
        add_filter_sums(g, Rows<const T>{image + begin, 0, g.input_width, g.channels},
                        Rows<const T>{gradients + begin, 0, g.output_width, g.channels}, row + k, count, sums(k), tile, ahead);
    } else {
      for (int64_t k = 0; k < next - item; ++k)
        add_filter_sums_of_any_multiplier(g, image, gradients + (row + k) * g.output_width * g.outputs(), row + k, begin, count,
                                          sums(k), tile);
    }
  }
}

}  // namespace

// Items of the sum are output rows (image by image), each summed from left to right in float64; then the tree of reduce.h.
EXACTQAT_KERNEL(depthwise_conv2d_native_backprop_filter) {
  FlushDenormals flush;
  const Geometry g(call.numbers);
  const T *input = call.operands[0].as<T>(), *gradient = call.operands[1].as<T>();
  T* output = call.results[0].as<T>();
  const int64_t outputs = g.outputs(), taps = g.taps();
  if (taps * outputs == 0) return;
  const int64_t items = g.batch * g.output_height, blocks = std::max<int64_t>(1, quotient_rounded_up(items, kBlock));
  // A tile is padded to whole vectors, which are stored whole.
  // Equal tiles, and enough of them that two or three threads end together. Wide ones, because that is what memory is fast for,
  // but of no more sums than the second cache has room for.
  constexpr int64_t kStep = 16, kEnoughTasks = 6;
  const int64_t most_outputs = asked_for_early<T>(g) && !columns_collide<T>(g) ? 256 : taps <= 9 ? 128 : 64;
  const int64_t wanted = std::max(quotient_rounded_up(outputs, most_outputs), quotient_rounded_up(kEnoughTasks, blocks));
  const int64_t equal = quotient_rounded_up(quotient_rounded_up(outputs, wanted), kStep) * kStep;
  const int64_t most = g.channels_first ? kPlanes<T> : equal, tile = std::max<int64_t>(most, Vector<double>::kWidth);
  const int64_t tiles = quotient_rounded_up(outputs, most);
  std::vector<double> sums(blocks * taps * outputs);

  if (!g.channels_first || !sum_filter_planes(g, input, gradient, sums.data()))
    parallel_for(blocks * tiles, g.output_size() * taps, [&](int64_t task) {
      const int64_t block = task / tiles, begin = task % tiles * most, count = std::min(most, outputs - begin);
      // Aligned: each row of outputs reads and writes them, and a vector across two lines costs twice.
      const auto memory = scratch<double>(kLanes * taps * tile);
      double* lanes = memory.get();
      std::fill_n(lanes, kLanes * taps * tile, 0.0);
      add_filter_rows(g, input, gradient, block * kBlock, std::min(items, (block + 1) * kBlock), begin, count, lanes, tile);
      fold_lanes(lanes, taps * tile);
      for (int64_t tap = 0; tap < taps; ++tap)
        std::copy_n(lanes + tap * tile, count, sums.data() + (block * taps + tap) * outputs + begin);
    });
  tree_fold(sums.data(), blocks, taps * outputs);
  for (int64_t k = 0; k < taps * outputs; ++k) output[k] = flushed_to<T>(sums[k]);
}

}  // namespace exactqat
