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
namespace {

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

// A vector, but in the lanes of a mask a value.
[[gnu::always_inline]] inline Vector<float> beside(Vector<float> other, uint32_t lanes, float value) {
  return {_mm512_mask_mov_ps(other.v, __mmask16(lanes), _mm512_set1_ps(value))};
}
[[gnu::always_inline]] inline Vector<double> beside(Vector<double> other, uint32_t lanes, double value) {
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

// Planes of a result, each made of one of an operand, which serves `share` of them.
struct SlidPlanes {
  int64_t count, share, outputs, height, width, result_height, result_width, pad_top, pad_left;
};

// A vector's lanes hold neighbouring columns of a result; or each half of them for a whole row of a plane of its own, where
// rows are short. In the input gradient of stride S a lane holds S columns, the first a multiple of S with the padding. Both
// take what they meet from two vectors of the operand: neighbours in a row, or rows of two planes.
template <int Shifts, class T>
struct Strip2d {
  int64_t operand_column, result_column;       // where the vectors begin
  uint32_t loaded[2], stored[2], met[Shifts];  // lanes that are there; that meet a column with taps of a shift
  Choice<T> taken[Shifts];                     // which one
};

template <bool Backward, int K, int S>
struct Slide {
  static constexpr int kShifts = Backward ? (K + S - 1) / S : K;  // how many different columns taps meet
  static constexpr int kColumns = Backward ? S : 1;               // of a result, held by one lane

  template <class T>
  using Strip = Strip2d<kShifts, T>;

  // What a strip, or two rows, are made of and where they are: for each of the two vectors, row 0.
  template <class T>
  struct Unit {
    const T* from[2];
    T* to[2];
    decltype(Vector<T>::v) weights[K * K];  // not vectors, because those would be filled with zeros first
  };

  static int64_t first_lane(const SlidPlanes& p) { return Backward ? p.pad_left / S : 0; }
  static int64_t lanes(const SlidPlanes& p) {
    return Backward ? (p.result_width - 1 + p.pad_left) / S + 1 - first_lane(p) : p.result_width;
  }

  template <class T>
  static std::vector<Strip<T>> strips(const SlidPlanes& p, bool pairs) {
    constexpr int64_t N = Vector<T>::kWidth, kMost = Backward || S == 1 ? N : (2 * N - K) / S + 1;
    const int64_t count = quotient_rounded_up(lanes(p), kMost);
    const auto column = [&](int64_t lane, int64_t shift) { return Backward ? lane - shift : lane * S + shift - p.pad_left; };
    const auto inside = [](int64_t at, int64_t width) { return at >= 0 && at < width; };
    std::vector<Strip<T>> strips(count);
    for (int64_t k = 0; k < count; ++k) {
      Strip<T>& strip = strips[k] = {};
      const int64_t begin = first_lane(p) + lanes(p) * k / count, length = first_lane(p) + lanes(p) * (k + 1) / count - begin;
      strip.operand_column = std::clamp<int64_t>(column(begin, Backward ? kShifts - 1 : 0), 0, std::max<int64_t>(p.width - 1, 0));
      strip.result_column = Backward ? begin * S - p.pad_left : begin;
      for (int64_t half = 0; half < 1 + pairs; ++half)
        for (int64_t i = 0; i < length; ++i)
          for (int64_t shift = 0; shift < kShifts; ++shift)
            if (const int64_t at = column(begin + i, shift), lane = half * N / 2 + i; inside(at, p.width)) {
              strip.met[shift] |= 1u << lane;
              strip.taken[shift].lanes[lane] = half * N + at - strip.operand_column;
            }
      for (int64_t vector = 0; vector < 2; ++vector)
        for (int64_t lane = 0; lane < N; ++lane) {
          const int64_t next = pairs ? lane : vector * N + lane;
          // A result is in two vectors, or in one whose upper half is a second plane's.
          const int64_t at = kColumns > 1 ? next : pairs ? lane - vector * N / 2 : next;
          const bool there = inside(at, length * kColumns) && inside(strip.result_column + at, p.result_width);
          strip.loaded[vector] |= uint32_t(inside(strip.operand_column + next, p.width)) << lane;
          strip.stored[vector] |= uint32_t(there) << lane;
        }
    }
    return strips;
  }

  // All rows. `next` and `next_result`, which move on, is what comes after this: the processor does not see it coming.
  template <class T>
  [[gnu::always_inline]] static void rows(const SlidPlanes& p, const Strip<T>& strip, const Unit<T>& unit, const T*& next,
                                          const T*& next_result) {
    using V = Vector<T>;
    // Stores to the result could change what is not a copy, as far as the compiler knows.
    const int64_t width = p.width, height = p.height, pad_top = p.pad_top;
    const int64_t result_width = p.result_width, result_height = p.result_height;
    const uint32_t there[2] = {strip.loaded[0], strip.loaded[1]}, stored[2] = {strip.stored[0], strip.stored[1]};
    const T* from[2] = {unit.from[0] + strip.operand_column, unit.from[1] + strip.operand_column};
    T* to[2] = {unit.to[0] + strip.result_column, unit.to[1] + strip.result_column};
    __m512i taken[kShifts];
    uint32_t met[kShifts];
    unrolled<kShifts>([&](auto shift) __attribute__((always_inline)) {
      taken[shift] = loaded(strip.taken[shift]);
      met[shift] = strip.met[shift];
    });
    // Adds the products of a row and a tap.
    const auto add = [&](V& sum, auto shift, V value, auto tap) __attribute__((always_inline)) {
      sum = add_lanes(met[shift], value, V{unit.weights[tap]}, sum);
    };
    // The columns that taps of each shift meet.
    const auto values = [&](int64_t row, auto&& take) __attribute__((always_inline)) {
      constexpr int kLines = Backward ? 1 : S;
      unrolled<kLines>([&](auto line) __attribute__((always_inline)) { __builtin_prefetch(next + line * V::kWidth); });
      next += kLines * V::kWidth;
      const V a = load_lanes(there[0], from[0] + row * width), b = load_lanes(there[1], from[1] + row * width);
      unrolled<kShifts>([&](auto shift) __attribute__((always_inline)) { take(shift, chosen_lanes(a, taken[shift], b)); });
    };
    const auto put = [&](int64_t row, const V (&sum)[kColumns]) __attribute__((always_inline)) {
      unrolled<kColumns>([&](auto line) __attribute__((always_inline)) { __builtin_prefetch(next_result + line * V::kWidth, 1); });
      next_result += kColumns * V::kWidth;
      if constexpr (kColumns == 1) {
        store_lanes(stored[0], to[0] + row * result_width, sum[0]);
        if (stored[1]) store_lanes(stored[1], to[1] + row * result_width, sum[0]);
      } else {
        static constexpr auto kAlternating = [] {
          constexpr int N = V::kWidth;
          std::array<Choice<T>, 2> choice{};
          for (int lane = 0; lane < 2 * N; ++lane) choice[lane / N].lanes[lane % N] = lane / 2 + lane % 2 * N;
          return choice;
        }();
        unrolled<2>([&](auto v) __attribute__((always_inline)) {
          store_lanes(stored[v], to[v] + row * result_width, chosen_lanes(sum[0], loaded(kAlternating[v]), sum[1]));
        });
      }
    };
    if constexpr (Backward) {
      // From below and from the right, because so is what the taps meet. Row i of the operand meets K rows of the result; the
      // last S of them have then met all.
      V sums[K][S];
      for (int64_t i = (result_height - 1 + pad_top) / S; i * S + K - 1 >= pad_top; --i) {
        if (i >= 0 && i < height)
          values(i, [&](auto shift, V value) __attribute__((always_inline)) {
            unrolled<S>([&](auto column) __attribute__((always_inline)) {
              constexpr int t = shift * S + column;
              unrolled<K>([&](auto r) __attribute__((always_inline)) {
                if constexpr (t < K) add(sums[r][column], shift, value, std::integral_constant<int, r * K + t>{});
              });
            });
          });
        unrolled<S>([&](auto k) __attribute__((always_inline)) {
          const int64_t made = i * S + K - 1 - k - pad_top;
          if (made >= 0 && made < result_height) put(made, sums[K - 1 - k]);
        });
        unrolled<K>([&](auto k) __attribute__((always_inline)) {
          unrolled<S>([&](auto column) __attribute__((always_inline)) {
            constexpr int r = K - 1 - k;
            if constexpr (r >= S) sums[r][column] = sums[r - S][column];
            else sums[r][column] = V();
          });
        });
      }
    } else {
      constexpr int kWaiting = (K + S - 1) / S;
      V sums[kWaiting][1];  // the last one is of the result row that has met most
      int64_t i = -pad_top;
      for (int64_t made = 1 - kWaiting; made < result_height; ++made, i += S) {
        unrolled<S>([&](auto k) __attribute__((always_inline)) {
          if (i + k < 0 || i + k >= height) return;
          values(i + k, [&](auto t, V value) __attribute__((always_inline)) {
            unrolled<kWaiting>([&](auto j) __attribute__((always_inline)) {
              constexpr int r = k + S * j;
              if constexpr (r < K) add(sums[j][0], t, value, std::integral_constant<int, r * K + t>{});
            });
          });
        });
        if (made >= 0) put(made, sums[kWaiting - 1]);
        unrolled<kWaiting - 1>([&](auto j) __attribute__((always_inline)) {
          sums[kWaiting - 1 - j][0] = sums[kWaiting - 2 - j][0];
        });
        sums[0][0] = V();
      }
    }
  }

  template <class T>
  static void planes(const SlidPlanes& given, const T* operand, const T* filter, T* result) {
    constexpr int64_t N = Vector<T>::kWidth, kTaskSize = 16384, kEnoughTasks = 16;
    const bool pairs = lanes(given) <= N / 2 && given.width <= N;
    const auto strips = Slide::strips<T>(given, pairs);
    const int64_t together = 1 + pairs, groups = quotient_rounded_up(given.count, together);
    const int64_t size = given.count * std::max(given.height * given.width / given.share, given.result_height * given.result_width);
    const int64_t tasks = std::min(groups, std::max(kEnoughTasks, size / kTaskSize));
    parallel_for(tasks, size * K * K, [&](int64_t task) {
      const SlidPlanes p = given;
      const int64_t plane = p.height * p.width, result_plane = p.result_height * p.result_width;
      const int64_t begin = groups * task / tasks * together, end = std::min(p.count, groups * (task + 1) / tasks * together);
      const uint32_t upper_half = pairs ? ((1u << N) - 1) & ~((1u << N / 2) - 1) : 0;
      const T* from = operand + begin / p.share * plane;
      T* to = result + begin * result_plane;
      int64_t output = begin % p.outputs, served = begin % p.share;
      const auto advance = [&] {
        to += result_plane;
        if (++output == p.outputs) output = 0;
        if (++served == p.share) served = 0, from += plane;
      };
      for (int64_t number = begin; number < end; number += together) {
        Unit<T> unit;
        unit.from[0] = from;
        unit.to[0] = to;
        const T *taps = filter + output, *second_taps = taps;
        if (pairs) {
          if (number + 1 < end) advance();  // else the last plane is made twice
          unit.from[1] = from;
          unit.to[1] = to - (kColumns == 1 ? N / 2 : 0);
          second_taps = filter + output;
        } else {
          unit.from[1] = from + N;
          unit.to[1] = to + N;
        }
        advance();
        unrolled<K * K>([&](auto t) __attribute__((always_inline)) {
          unit.weights[t] = beside(Vector<T>::all(taps[t * p.outputs]), upper_half, second_taps[t * p.outputs]).v;
        });
        const T *next = from, *next_result = to;
        for (const Strip<T>& strip : strips) rows(p, strip, unit, next, next_result);
      }
    });
  }
};

template <bool Backward, class T>
bool slide(const Geometry& g, const SlidPlanes& p, const T* operand, const T* filter, T* result) {
  if (g.filter_height != g.filter_width || g.stride_height != g.stride_width || g.dilation_height != 1 || g.dilation_width != 1)
    return false;
  switch (g.stride_width * 8 + g.filter_width) {
    case 8 + 3: return Slide<Backward, 3, 1>::planes(p, operand, filter, result), true;
    case 8 + 5: return Slide<Backward, 5, 1>::planes(p, operand, filter, result), true;
    case 16 + 3: return Slide<Backward, 3, 2>::planes(p, operand, filter, result), true;
    case 16 + 5: return Slide<Backward, 5, 2>::planes(p, operand, filter, result), true;
  }
  return false;
}

#endif

}  // namespace

template <class T>
bool slide_forward([[maybe_unused]] const Geometry& g, [[maybe_unused]] const T* input, [[maybe_unused]] const T* filter,
                   [[maybe_unused]] T* output) {
#if defined(__AVX512F__)
  const SlidPlanes planes{g.batch * g.outputs(), g.multiplier, g.outputs(), g.input_height, g.input_width,
                          g.output_height, g.output_width, g.pad_top, g.pad_left};
  return slide<false>(g, planes, input, filter, output);
#else
  return false;
#endif
}

template <class T>
bool slide_backward([[maybe_unused]] const Geometry& g, [[maybe_unused]] const T* gradient, [[maybe_unused]] const T* filter,
                    [[maybe_unused]] T* output) {
#if defined(__AVX512F__)
  const SlidPlanes planes{g.batch * g.channels, 1, g.channels, g.output_height, g.output_width,
                          g.input_height, g.input_width, g.pad_top, g.pad_left};
  return slide<true>(g, planes, gradient, filter, output);
#else
  return false;
#endif
}

template bool slide_forward(const Geometry&, const float*, const float*, float*);
template bool slide_forward(const Geometry&, const double*, const double*, double*);
template bool slide_backward(const Geometry&, const float*, const float*, float*);
template bool slide_backward(const Geometry&, const double*, const double*, double*);

}  // namespace exactqat
