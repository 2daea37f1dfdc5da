// SPDX-License-Identifier: Apache-2.0
// Channels first, stride 1: vectors lie along the width, and rows of the operand are met one after the other. Each is loaded once
// for every tap of a row and added to all results that it is part of, which wait in registers until their last row has come. A
// result so meets its taps row by row: one fused multiply-add for each tap that meets the image, taps row-major. For 3 x 3 taps,
// and where lanes have masks: without those the borders cost more than rearranging planes (depthwise_conv2d_planes.h).
#pragma once
#include <algorithm>
#include <cstdint>

#include "depthwise_conv2d_geometry.h"
#include "parallel.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {

// Result row i meets, with tap row t, row i + t - pad_top of the operand, and likewise for columns. In the input gradient all is
// taken from below and from the right, because so is what the taps meet: result column j meets column j + offset - t.
struct Sliding {
  int64_t planes, share, outputs;  // result planes; how many of them one plane of the operand serves; their filters
  int64_t height, width, result_height, result_width;
  int64_t taps, pad_top, offset, direction;
  bool possible;

  static Sliding forward(const Geometry& g) {
    return checked(g, {g.batch * g.outputs(), g.multiplier, g.outputs(), g.input_height, g.input_width, g.output_height,
                       g.output_width, g.filter_width, g.pad_top, -g.pad_left, 1, true});
  }

  // For multiplier 1.
  static Sliding backward(const Geometry& g) {
    return checked(g, {g.batch * g.channels, 1, g.channels, g.output_height, g.output_width, g.input_height, g.input_width,
                       g.filter_width, g.input_height - g.output_height + g.pad_top, g.pad_left, -1, true});
  }

 private:
  static Sliding checked(const Geometry& g, Sliding s) {
    // Rows of padding alone would need more than waiting for the next row.
    s.possible = g.stride_height == 1 && g.stride_width == 1 && g.dilation_height == 1 && g.dilation_width == 1 &&
                 g.filter_height == g.filter_width && s.pad_top >= 0 && s.pad_top < s.taps &&
                 s.result_height <= s.height + s.pad_top && s.height > 0;
    return s;
  }
};

#if defined(__AVX512F__)

// The lanes that are there: those of a vector whose first one is column `begin` of `width`.
template <class T>
uint32_t lanes_inside(int64_t begin, int64_t width) {
  constexpr int64_t N = Vector<T>::kWidth;
  const int64_t from = std::clamp<int64_t>(-begin, 0, N), to = std::clamp<int64_t>(width - begin, 0, N);
  return from < to ? (1u << to) - (1u << from) : 0;
}

// In the lanes of a mask. The others are zero and not read; or they are left as they are.
[[gnu::always_inline]] inline Vector<float> load_lanes(uint32_t lanes, const float* from) {
  return {_mm512_maskz_loadu_ps(__mmask16(lanes), from)};
}
[[gnu::always_inline]] inline Vector<double> load_lanes(uint32_t lanes, const double* from) {
  return {_mm512_maskz_loadu_pd(__mmask8(lanes), from)};
}
[[gnu::always_inline]] inline Vector<float> add_lanes(uint32_t lanes, Vector<float> a, Vector<float> b, Vector<float> c) {
  return {_mm512_mask3_fmadd_ps(a.v, b.v, c.v, __mmask16(lanes))};
}
[[gnu::always_inline]] inline Vector<double> add_lanes(uint32_t lanes, Vector<double> a, Vector<double> b, Vector<double> c) {
  return {_mm512_mask3_fmadd_pd(a.v, b.v, c.v, __mmask8(lanes))};
}

// V vectors of columns from `column` on, all rows of a plane, for a filter of K x K taps.
template <int K, int V, class T>
void slide(const Sliding& s, const T* plane, const T* weights, T* result, int64_t column) {
  constexpr int64_t N = Vector<T>::kWidth;
  const int64_t step = s.direction * s.width, result_step = s.direction * s.result_width;
  const int64_t last = s.direction < 0 ? s.height - 1 : 0, last_result = s.direction < 0 ? s.result_height - 1 : 0;
  const T* row = plane + last * s.width + s.offset + column;
  // What a row completes lies `pad_top` - K + 1 rows further.
  T* to = result + last_result * s.result_width + column + (s.pad_top - K + 1) * result_step;
  uint32_t lanes[K][V], stored[V];
  Vector<T> sums[K][V], w[K * K];
  unrolled<V>([&](auto v) __attribute__((always_inline)) {
    stored[v] = uint32_t(std::clamp<int64_t>(s.result_width - column - v * N, 0, N));
    unrolled<K>([&](auto t) __attribute__((always_inline)) {
      lanes[t][v] = lanes_inside<T>(column + v * N + s.offset + t * s.direction, s.width);
    });
  });
  unrolled<K * K>([&](auto t) __attribute__((always_inline)) { w[t] = Vector<T>::all(weights[t]); });
  int64_t made = s.pad_top - K + 1;
  const auto complete = [&]() __attribute__((always_inline)) {
    if (made >= 0 && made < s.result_height)
      unrolled<V>([&](auto v) __attribute__((always_inline)) { sums[K - 1][v].store(to + v * N, stored[v]); });
    unrolled<V>([&](auto v) __attribute__((always_inline)) {
      unrolled<K - 1>([&](auto t) __attribute__((always_inline)) { sums[K - 1 - t][v] = sums[K - 2 - t][v]; });
      sums[0][v] = Vector<T>();
    });
    ++made;
    to += result_step;
  };
  const int64_t next = s.height * s.width, next_result = s.result_height * s.result_width;
  for (int64_t i = 0; i < s.height; ++i, row += step) {
    unrolled<V>([&](auto v) __attribute__((always_inline)) {
      // Of the next plane, and where its results will stand: neither is seen coming by the processor.
      __builtin_prefetch(row + next + v * N);
      __builtin_prefetch(to + next_result + v * N, 1);
    });
    unrolled<K>([&](auto t) __attribute__((always_inline)) {
      unrolled<V>([&](auto v) __attribute__((always_inline)) {
        const Vector<T> value = load_lanes(lanes[t][v], row + t * s.direction + v * N);
        unrolled<K>([&](auto r) __attribute__((always_inline)) {
          sums[r][v] = add_lanes(lanes[t][v], value, w[r * K + t], sums[r][v]);
        });
      });
    });
    complete();
  }
  while (made < s.result_height) complete();
}

template <int K, class T>
void slide_planes(const Sliding& s, const T* operand, const T* filter, T* result) {
  constexpr int64_t N = Vector<T>::kWidth, kTaskSize = 16384, kEnoughTasks = 16;
  const int64_t plane = s.height * s.width, result_plane = s.result_height * s.result_width, size = s.planes * result_plane;
  const int64_t tasks = std::min(s.planes, std::max(kEnoughTasks, size / kTaskSize));
  parallel_for(tasks, size * K * K, [&](int64_t task) {
    for (int64_t k = s.planes * task / tasks; k < s.planes * (task + 1) / tasks; ++k) {
      T weights[K * K];
      for (int64_t t = 0; t < K * K; ++t) weights[t] = filter[t * s.outputs + k % s.outputs];
      const T* from = operand + k / s.share * plane;
      int64_t column = 0;
      for (; column + N < s.result_width; column += 2 * N) slide<K, 2>(s, from, weights, result + k * result_plane, column);
      if (column < s.result_width) slide<K, 1>(s, from, weights, result + k * result_plane, column);
    }
  });
}

#endif

// All planes of a result, or false where this is no way to make them.
template <class T>
bool sum_sliding([[maybe_unused]] const Sliding& s, [[maybe_unused]] const T* operand, [[maybe_unused]] const T* filter,
                 [[maybe_unused]] T* result) {
#if defined(__AVX512F__)
  constexpr int64_t kWorthIt = 7;  // columns; in fewer, most lanes of a vector would be empty
  if (s.possible && s.taps == 3 && s.result_width >= kWorthIt) return slide_planes<3>(s, operand, filter, result), true;
#endif
  return false;
}

}  // namespace exactqat
