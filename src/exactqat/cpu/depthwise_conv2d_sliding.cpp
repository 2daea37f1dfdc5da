// SPDX-License-Identifier: Apache-2.0
// Channels first: vectors lie along the width, and rows of the operand are met one after the other. Each is loaded once for every
// tap and added to all results that it is part of, which wait in registers until their last row has come. A result so meets its
// taps row by row: one fused multiply-add for each tap that meets the image, taps row-major. For 3 x 3 and 5 x 5 taps and strides
// 1 and 2, where lanes have masks: without those the borders cost more than rearranging planes (depthwise_conv2d_planes.h).
#include "depthwise_conv2d_sliding.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {

#if defined(__AVX512F__)

// In the lanes of a mask. The others are zero and not read; or they are left as they are.
[[gnu::always_inline]] inline Vector<float> load_lanes(uint32_t lanes, const float* from) {
  return {_mm512_maskz_loadu_ps(__mmask16(lanes), from)};
}
[[gnu::always_inline]] inline Vector<double> load_lanes(uint32_t lanes, const double* from) {
  return {_mm512_maskz_loadu_pd(__mmask8(lanes), from)};
}
[[gnu::always_inline]] inline void store_lanes(uint32_t lanes, float* to, Vector<float> a) {
  _mm512_mask_storeu_ps(to, __mmask16(lanes), a.v);
}
[[gnu::always_inline]] inline void store_lanes(uint32_t lanes, double* to, Vector<double> a) {
  _mm512_mask_storeu_pd(to, __mmask8(lanes), a.v);
}
[[gnu::always_inline]] inline Vector<float> add_lanes(uint32_t lanes, Vector<float> a, Vector<float> b, Vector<float> c) {
  return {_mm512_mask3_fmadd_ps(a.v, b.v, c.v, __mmask16(lanes))};
}
[[gnu::always_inline]] inline Vector<double> add_lanes(uint32_t lanes, Vector<double> a, Vector<double> b, Vector<double> c) {
  return {_mm512_mask3_fmadd_pd(a.v, b.v, c.v, __mmask8(lanes))};
}

// A value in the lanes of a mask, beside another vector's.
[[gnu::always_inline]] inline Vector<float> all_lanes(uint32_t lanes, float value, Vector<float> other) {
  return {_mm512_mask_mov_ps(other.v, __mmask16(lanes), _mm512_set1_ps(value))};
}
[[gnu::always_inline]] inline Vector<double> all_lanes(uint32_t lanes, double value, Vector<double> other) {
  return {_mm512_mask_mov_pd(other.v, __mmask8(lanes), _mm512_set1_pd(value))};
}

// For each lane of a vector, which lane of two others it takes: those of the second one follow those of the first.
template <class T>
struct Choice {
  std::conditional_t<sizeof(T) == 4, int32_t, int64_t> lanes[Vector<T>::kWidth];
};
[[gnu::always_inline]] inline Vector<float> chosen_lanes(Vector<float> a, __m512i choice, Vector<float> b) {
  return {_mm512_permutex2var_ps(a.v, choice, b.v)};
}
[[gnu::always_inline]] inline Vector<double> chosen_lanes(Vector<double> a, __m512i choice, Vector<double> b) {
  return {_mm512_permutex2var_pd(a.v, choice, b.v)};
}
template <class T>
[[gnu::always_inline]] inline __m512i loaded(const Choice<T>& choice) {
  return _mm512_loadu_si512(choice.lanes);
}

// The planes of a result and of its operand. `share` planes of the result are made of one of the operand.
struct Planes2d {
  int64_t count, share, outputs, height, width, result_height, result_width, pad_top, pad_left;
};

// A lane stands for column `column` of a result; in the input gradient of stride S for S neighbouring ones, of which the first,
// like the padded one it is in, is a multiple of S. Some lanes of a vector make a strip of a plane, or each half of them a whole
// row of a plane of its own. Both kinds take their operand from two vectors: neighbours in a row, or the rows of two planes.
template <int K, class T>
struct Strip2d {
  int64_t operand_column, result_column;  // where the vectors begin
  uint32_t loaded[2], stored[2], met[K];  // lanes that are there; that meet a column with tap t
  Choice<T> taken[K];                     // where from
};

template <bool Backward, int K, int S>
struct Slide {
  // Taps that meet different columns.
  static constexpr int kShifts = Backward ? (K + S - 1) / S : K;
  // Columns of a result that a lane stands for.
  static constexpr int kColumns = Backward ? S : 1;

  // How many units, strips or pairs of rows, are worked on at a time. Where there are many taps a single one would wait for its
  // own sums.
  static constexpr int kUnits = K > 3 ? 2 : 1;

  template <class T>
  struct Unit {
    const T* from[2];
    T* to[2];
  };

  template <class T>
  using Weights = Vector<T>[kUnits][K * K];

  template <class T>
  static std::vector<Strip2d<kShifts, T>> strips(const Planes2d& p, bool pairs) {
    constexpr int64_t N = Vector<T>::kWidth;
    // Lanes of a result that are needed, and how many of them two vectors of the operand are enough for.
    const int64_t first = Backward ? p.pad_left / S : 0, last = Backward ? (p.result_width - 1 + p.pad_left) / S : p.result_width - 1;
    const int64_t most = Backward || S == 1 ? N : (2 * N - K) / S + 1;
    const int64_t lanes = last - first + 1, count = quotient_rounded_up(lanes, most);
    std::vector<Strip2d<kShifts, T>> strips(count);
    for (int64_t k = 0; k < count; ++k) {
      auto& strip = strips[k] = {};
      const int64_t begin = first + lanes * k / count, end = first + lanes * (k + 1) / count;
      const auto column = [&](int64_t lane, int64_t t) { return Backward ? lane - t : lane * S + t - p.pad_left; };
      const auto inside = [](int64_t at, int64_t width) { return at >= 0 && at < width; };
      strip.operand_column = std::clamp<int64_t>(column(begin, Backward ? kShifts - 1 : 0), 0, std::max<int64_t>(p.width - 1, 0));
      strip.result_column = Backward ? begin * S - p.pad_left : begin;
      for (int64_t half = 0; half < 1 + pairs; ++half)
        for (int64_t i = 0; i < end - begin; ++i)
          for (int64_t t = 0; t < kShifts; ++t)
            if (const int64_t at = column(begin + i, t), lane = half * N / 2 + i; inside(at, p.width)) {
              strip.met[t] |= 1u << lane;
              strip.taken[t].lanes[lane] = half * N + at - strip.operand_column;
            }
      for (int64_t vector = 0; vector < 2; ++vector)
        for (int64_t lane = 0; lane < N; ++lane) {
          strip.loaded[vector] |= uint32_t(inside(strip.operand_column + (pairs ? 0 : vector * N) + lane, p.width)) << lane;
          // In halves of one vector; or in a vector each.
          const int64_t at = kColumns > 1 ? (pairs ? 0 : vector * N) + lane : pairs ? lane - vector * N / 2 : lane;
          const bool there = inside(at, (end - begin) * kColumns) && (kColumns > 1 || pairs || vector == 0);
          strip.stored[vector] |= uint32_t(there && inside(strip.result_column + at, p.result_width)) << lane;
        }
    }
    return strips;
  }

  // All rows of a strip of each unit. `next` and `next_result`: what comes after this strip, the processor does not see it coming.
  template <class T>
  [[gnu::always_inline]] static void rows(const Planes2d& p, const Strip2d<kShifts, T>& strip, const Unit<T> (&units)[kUnits],
                                          const Weights<T>& weights, const T*& next, const T*& next_result) {
    using V = Vector<T>;
    const int64_t width = p.width, height = p.height, result_width = p.result_width, result_height = p.result_height, pad_top = p.pad_top;
    const uint32_t loaded_lanes[2] = {strip.loaded[0], strip.loaded[1]}, stored_lanes[2] = {strip.stored[0], strip.stored[1]};
    __m512i taken[kShifts];
    uint32_t met[kShifts];
    unrolled<kShifts>([&](auto t) __attribute__((always_inline)) {
      taken[t] = loaded(strip.taken[t]);
      met[t] = strip.met[t];
    });
    // The columns of a row that some units take with each shift.
    const auto values = [&](int64_t offset, auto&& take) __attribute__((always_inline)) {
      unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
        unrolled<Backward ? 1 : S>([&](auto line) __attribute__((always_inline)) { __builtin_prefetch(next + line * V::kWidth); });
        next += (Backward ? 1 : S) * V::kWidth;
        const V a = load_lanes(loaded_lanes[0], units[u].from[0] + offset), b = load_lanes(loaded_lanes[1], units[u].from[1] + offset);
        unrolled<kShifts>([&](auto t) __attribute__((always_inline)) { take(u, t, chosen_lanes(a, taken[t], b)); });
      });
    };
    // A result row, of which neighbouring columns are in S vectors.
    const auto put = [&](auto u, int64_t row, const V (&sum)[kColumns]) __attribute__((always_inline)) {
      const int64_t offset = row * result_width;
      unrolled<kColumns>([&](auto line) __attribute__((always_inline)) { __builtin_prefetch(next_result + line * V::kWidth, 1); });
      next_result += kColumns * V::kWidth;
      if constexpr (kColumns == 1) {
        store_lanes(stored_lanes[0], units[u].to[0] + offset, sum[0]);
        if (stored_lanes[1]) store_lanes(stored_lanes[1], units[u].to[1] + offset, sum[0]);
      } else {
        constexpr int N = V::kWidth;
        static constexpr auto kAlternating = [] {
          std::array<Choice<T>, 2> choice{};
          for (int lane = 0; lane < 2 * N; ++lane) choice[lane / N].lanes[lane % N] = lane / 2 + lane % 2 * N;
          return choice;
        }();
        unrolled<2>([&](auto v) __attribute__((always_inline)) {
          store_lanes(stored_lanes[v], units[u].to[v] + offset, chosen_lanes(sum[0], loaded(kAlternating[v]), sum[1]));
        });
      }
    };
    if constexpr (Backward) {
      V sums[kUnits][K][S];  // of the padded rows from i * S on
      for (int64_t i = (result_height - 1 + pad_top) / S; i * S + K - 1 >= pad_top; --i) {
        if (i >= 0 && i < height) {
          values(i * width, [&](auto u, auto shift, V value) __attribute__((always_inline)) {
            unrolled<S>([&](auto e) __attribute__((always_inline)) {
              constexpr int t = shift * S + e;
              unrolled<K>([&](auto r) __attribute__((always_inline)) {
                if constexpr (t < K) sums[u][r][e] = add_lanes(met[shift], value, weights[u][r * K + t], sums[u][r][e]);
              });
            });
          });
        }
        unrolled<S>([&](auto k) __attribute__((always_inline)) {
          const int64_t made = i * S + K - 1 - k - pad_top;
          if (made >= 0 && made < result_height)
            unrolled<kUnits>([&](auto u) __attribute__((always_inline)) { put(u, made, sums[u][K - 1 - k]); });
        });
        unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
          unrolled<K>([&](auto r) __attribute__((always_inline)) {
            unrolled<S>([&](auto e) __attribute__((always_inline)) {
              if constexpr (K - 1 - r >= S) sums[u][K - 1 - r][e] = sums[u][K - 1 - r - S][e];
              else sums[u][K - 1 - r][e] = V();
            });
          });
        });
      }
    } else {
      constexpr int kWaiting = (K + S - 1) / S;
      V sums[kUnits][kWaiting][1];  // of results from the last one that has met a row upwards
      int64_t row = -pad_top;
      for (int64_t made = 1 - kWaiting; made < result_height; ++made, row += S) {
        unrolled<S>([&](auto phase) __attribute__((always_inline)) {
          if (row + phase < 0 || row + phase >= height) return;
          values((row + phase) * width, [&](auto u, auto t, V value) __attribute__((always_inline)) {
            unrolled<kWaiting>([&](auto j) __attribute__((always_inline)) {
              constexpr int r = phase + S * j;
              if constexpr (r < K) sums[u][j][0] = add_lanes(met[t], value, weights[u][r * K + t], sums[u][j][0]);
            });
          });
        });
        if (made >= 0)
          unrolled<kUnits>([&](auto u) __attribute__((always_inline)) { put(u, made, sums[u][kWaiting - 1]); });
        unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
          unrolled<kWaiting - 1>([&](auto j) __attribute__((always_inline)) { sums[u][kWaiting - 1 - j][0] = sums[u][kWaiting - 2 - j][0]; });
          sums[u][0][0] = V();
        });
      }
    }
  }

  template <class T>
  static void planes(const Planes2d& given, const T* operand, const T* filter, T* result) {
    constexpr int64_t N = Vector<T>::kWidth, kTaskSize = 16384, kEnoughTasks = 16;
    const int64_t lanes = Backward ? (given.result_width - 1 + given.pad_left) / S - given.pad_left / S + 1 : given.result_width;
    const bool pairs = lanes <= N / 2 && given.width <= N;
    const auto strips = Slide::strips<T>(given, pairs);
    const int64_t together = kUnits * (1 + pairs), groups = quotient_rounded_up(given.count, together);
    const int64_t size = given.count * std::max(given.height * given.width / given.share, given.result_height * given.result_width);
    const int64_t tasks = std::min(groups, std::max(kEnoughTasks, size / kTaskSize));
    parallel_for(tasks, size * K * K, [&](int64_t task) {
      const Planes2d p = given;
      const int64_t plane = p.height * p.width, result_plane = p.result_height * p.result_width;
      const int64_t begin = groups * task / tasks * together, end = std::min(p.count, groups * (task + 1) / tasks * together);
      const uint32_t second_half = pairs ? ((1u << N) - 1) & ~((1u << N / 2) - 1) : 0;
      struct {
        const T* operand;
        T* result;
        int64_t channel, served;
      } at{operand + begin / p.share * plane, result + begin * result_plane, begin % p.outputs, begin % p.share};
      for (int64_t number = begin; number < end; number += together) {
        Unit<T> units[kUnits];
        Weights<T> weights;
        unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
          const T* taps[2];
          unrolled<2>([&](auto v) __attribute__((always_inline)) {
            units[u].from[v] = at.operand;
            units[u].to[v] = at.result;
            taps[v] = filter + at.channel;
            // A group that is not full makes the last plane several times.
            if ((v == 1 || !pairs) ? number + (u + 1) * (1 + pairs) > p.count - 1 : number + 2 * u >= p.count - 1) return;
            if (v == 0 && !pairs) return;
            at.result += result_plane;
            if (++at.channel == p.outputs) at.channel = 0;
            if (++at.served == p.share) at.served = 0, at.operand += plane;
          });
          unrolled<K * K>([&](auto t) __attribute__((always_inline)) {
            weights[u][t] = all_lanes(second_half, taps[1][t * p.outputs], Vector<T>::all(taps[0][t * p.outputs]));
          });
          if (!pairs) units[u].from[1] += N, units[u].to[1] += N;
          else if (kColumns == 1) units[u].to[1] -= N / 2;
        });
        const T *next = at.operand, *next_result = at.result;
        for (const auto& strip : strips) {
          Unit<T> moved[kUnits];
          unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
            unrolled<2>([&](auto v) __attribute__((always_inline)) {
              moved[u].from[v] = units[u].from[v] + strip.operand_column;
              moved[u].to[v] = units[u].to[v] + strip.result_column;
            });
          });
          rows(p, strip, moved, weights, next, next_result);
        }
      }
    });
  }
};

template <bool Backward, class T>
bool slide(const Geometry& g, const Planes2d& p, const T* operand, const T* filter, T* result) {
  if (g.filter_height != g.filter_width || g.stride_height != g.stride_width || g.dilation_height != 1 || g.dilation_width != 1) return false;
  switch (g.stride_width * 8 + g.filter_width) {
    case 8 + 3: return Slide<Backward, 3, 1>::planes(p, operand, filter, result), true;
    case 8 + 5: return Slide<Backward, 5, 1>::planes(p, operand, filter, result), true;
    case 16 + 3: return Slide<Backward, 3, 2>::planes(p, operand, filter, result), true;
    case 16 + 5: return Slide<Backward, 5, 2>::planes(p, operand, filter, result), true;
  }
  return false;
}

#endif

template <class T>
bool slide_forward([[maybe_unused]] const Geometry& g, [[maybe_unused]] const T* input, [[maybe_unused]] const T* filter,
                   [[maybe_unused]] T* output) {
#if defined(__AVX512F__)
  return slide<false>(g, {g.batch * g.outputs(), g.multiplier, g.outputs(), g.input_height, g.input_width, g.output_height,
                          g.output_width, g.pad_top, g.pad_left}, input, filter, output);
#else
  return false;
#endif
}

template <class T>
bool slide_backward([[maybe_unused]] const Geometry& g, [[maybe_unused]] const T* gradient, [[maybe_unused]] const T* filter,
                    [[maybe_unused]] T* output) {
#if defined(__AVX512F__)
  return slide<true>(g, {g.batch * g.channels, 1, g.channels, g.output_height, g.output_width, g.input_height, g.input_width,
                         g.pad_top, g.pad_left}, gradient, filter, output);
#else
  return false;
#endif
}

template bool slide_forward(const Geometry&, const float*, const float*, float*);
template bool slide_forward(const Geometry&, const double*, const double*, double*);
template bool slide_backward(const Geometry&, const float*, const float*, float*);
template bool slide_backward(const Geometry&, const double*, const double*, double*);

}  // namespace exactqat
