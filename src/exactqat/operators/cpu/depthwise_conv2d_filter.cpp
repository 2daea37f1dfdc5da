// SPDX-License-Identifier: Apache-2.0
// The gradient of DepthwiseConv2dNative's filter: the same arithmetic as reference/depthwise_conv2d.py.
#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"
#include "depthwise_conv2d_filter.h"
#include "depthwise_conv2d_filter_planes.h"
#include "depthwise_conv2d_geometry.h"
#include "depthwise_conv2d_planes.h"
#include "memory.h"
#include "parallel.h"
#include "reduce.h"
#include "simd.h"

namespace exactqat {
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
      const int64_t whole = quotient_rounded_up(count, Vector<double>::kWidth) * Vector<double>::kWidth;  // zeros follow
      for (int64_t k = 0; k < next - item; ++k)
        add_filter_sums(g, Rows<const T>{x, needed.begin, g.input_width, N}, Rows<const T>{dy, row, g.output_width, N}, row + k,
                        whole, sums(k), tile);
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
