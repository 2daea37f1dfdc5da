// SPDX-License-Identifier: Apache-2.0
// Sums of output rows for the filter gradient, channels first. A vector's lanes are eight output rows one below the other, which
// are the eight lanes of a block of the tree of reduce.h; so each channel is summed by itself. Rows are rearranged to columns in
// float64 in a piece of memory that stays in the first cache. Float64, one fused multiply-add for each output column from left to
// right, beginning at 0.
#include "depthwise_conv2d_filter_planes.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "depthwise_conv2d_planes.h"
#include "elementwise.h"
#include "parallel.h"
#include "reduce.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {
namespace {

#if defined(__AVX512F__)

// Of eight rows, `low` columns of each, lane k of vectors is made that stand `step` apart, one for each column. Where rows are
// short the upper halves are `high` columns of eight further rows, whose vectors stand beside the first ones. Rows begin at `base`
// and an offset; `next` further on is what will be needed next.
[[gnu::always_inline]] inline void turn(const float* base, const int64_t* rows, int64_t next, __mmask16 low, __mmask16 high,
                                        double* to, int64_t step) {
  __m512 r[8], pairs[8], fours[8];
  unrolled<8>([&](auto k) __attribute__((always_inline)) {
    const float* from = base + rows[k];
    __builtin_prefetch(from + next);
    r[k] = _mm512_maskz_loadu_ps(low, from);
    if (high) r[k] = _mm512_mask_loadu_ps(r[k], high, base + rows[k + 8] - 8);
  });
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    pairs[2 * i] = _mm512_maskz_unpacklo_ps(0xffff, r[2 * i], r[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_maskz_unpackhi_ps(0xffff, r[2 * i], r[2 * i + 1]);
  });
  // fours[4 * i + k] holds, in quarter l, column 4 * l + k of rows 4 * i to 4 * i + 3.
  unrolled<2>([&](auto i) __attribute__((always_inline)) {
    unrolled<2>([&](auto k) __attribute__((always_inline)) {
      const __m512d a = _mm512_castps_pd(pairs[4 * i + k]), b = _mm512_castps_pd(pairs[4 * i + 2 + k]);
      fours[4 * i + 2 * k] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xff, a, b));
      fours[4 * i + 2 * k + 1] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xff, a, b));
    });
  });
  const __m512i quarters[2] = {_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
  double* upper = high ? to + 8 : to + 8 * step;
  unrolled<4>([&](auto k) __attribute__((always_inline)) {
    unrolled<2>([&](auto half) __attribute__((always_inline)) {
      const __m512 two = _mm512_castpd_ps(
          _mm512_permutex2var_pd(_mm512_castps_pd(fours[k]), quarters[half], _mm512_castps_pd(fours[4 + k])));
      double* at = (half ? upper : to) + k * step;
      _mm512_store_pd(at, _mm512_maskz_cvtps_pd(0xff, _mm512_castps512_ps256(two)));
      _mm512_store_pd(at + 4 * step, _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, two, 1)));
    });
  });
}

// Columns that are written: whole vectors of them.
int64_t turned_columns(int64_t width) { return width <= 8 ? 8 : (width + 15) / 16 * 16; }

// `count` rows, a multiple of eight, to columns: to[column][row], `step` numbers from one column to the next.
void turn_rows(const float* base, const int64_t* rows, int64_t count, int64_t width, int64_t next, double* to, int64_t step) {
  int64_t row = 0;
  if (width <= 8) {
    // The last eight rows may be turned twice.
    const __mmask16 there = (1u << width) - 1;
    for (; row < count; row += 16) turn(base, rows + row, next, there, there << 8, to + row, step);
    return;
  }
  for (; row < count; row += 8)
    for (int64_t begin = 0; begin < width; begin += 16)
      turn(base + begin, rows + row, next, (1u << std::min<int64_t>(width - begin, 16)) - 1, 0, to + begin * step + row, step);
}

// The sums of a channel's output rows that are neighbours, `turned` to columns.
template <int K, int S>
struct TurnedRows {
  static constexpr int kKept = (K + S - 1) / S;  // output columns that an input column meets

  const double *input, *gradient;  // of input rows those a stride apart are neighbours, and the S kinds lie one behind the other
  int64_t step, kind_step, input_columns, output_columns, pad_left;

  // Adds the sums of eight rows to lanes[taps][8]; met[r]: of the rows those whose tap row r meets the image.
  void add(const uint8_t (&met)[K], double* lanes) const {
    using Lanes = Vector<double>;
    Lanes sums[K][K];
    __mmask8 rows[K];
    unrolled<K>([&](auto r) __attribute__((always_inline)) { rows[r] = met[r]; });
    // Input column q * S + phase - pad_left meets, with tap phase + S * m, the gradient of column q - m; those of columns
    // q - First to q - Last are there. Inside: so are all inputs.
    const auto column = [&]<int First, int Last, bool Inside>(int64_t q) __attribute__((always_inline)) {
      Lanes kept[kKept];
      unrolled<kKept>([&](auto m) __attribute__((always_inline)) {
        if constexpr (m >= First && m <= Last) kept[m] = Lanes::load(gradient + (q - m) * step);
      });
      unrolled<S>([&](auto phase) __attribute__((always_inline)) {
        const int64_t j = q * S + phase - pad_left;
        if (!Inside && (j < 0 || j >= input_columns)) return;
        unrolled<K>([&](auto r) __attribute__((always_inline)) {
          Lanes value = Lanes::load(input + j * step + r % S * kind_step + r / S);
          asm("" : "+v"(value.v));  // else the compiler loads it for every product
          unrolled<kKept>([&](auto m) __attribute__((always_inline)) {
            constexpr int t = phase + S * m;
            if constexpr (m >= First && m <= Last && t < K)
              sums[r][t].v = _mm512_mask3_fmadd_pd(value.v, kept[m].v, sums[r][t].v, rows[r]);
          });
        });
      });
    };
    const int64_t columns = output_columns, reached = input_columns + pad_left - S;
    const int64_t first = std::min(columns, std::max<int64_t>(kKept - 1, quotient_rounded_up(pad_left, S)));
    const int64_t last = std::min(columns, reached < 0 ? 0 : reached / S + 1);
    unrolled<kKept - 1>([&](auto q) __attribute__((always_inline)) { column.template operator()<0, q, false>(q); });
    int64_t q = kKept - 1;
    for (; q < first; ++q) column.template operator()<0, kKept - 1, false>(q);
    for (; q < last; ++q) column.template operator()<0, kKept - 1, true>(q);
    for (; q < columns; ++q) column.template operator()<0, kKept - 1, false>(q);
    unrolled<kKept - 1>([&](auto e) __attribute__((always_inline)) {
      column.template operator()<e + 1, kKept - 1, false>(columns + e);
    });
    unrolled<K * K>([&](auto t) __attribute__((always_inline)) {
      double* at = lanes + t * kLanes;
      (Lanes::load(at) + sums[t / K][t % K]).store(at);
    });
  }
};

// The block of items from `first` to `last`, outputs [begin, end): sums[taps][outputs].
template <int K, int S>
void sum_block(const Geometry& g, const float* input, const float* gradient, int64_t first, int64_t last, int64_t begin,
               int64_t end, double* sums) {
  constexpr int64_t kNear = 6144, kFurther = (K - 1) / S;  // float64 numbers that stay in the first cache
  const int64_t input_columns = turned_columns(g.input_width), row_size = input_columns * S + turned_columns(g.output_width);
  const int64_t together = std::clamp<int64_t>(kNear / std::max<int64_t>(row_size, 1) / kLanes - 1, 1, kBlock / kLanes) * kLanes;
  const int64_t step = together + 2 * kLanes, kind_step = input_columns * step, parts = quotient_rounded_up(last - first, together);
  // Of each part: where the rows of the gradient and the S kinds of rows of the input begin, of the first plane on, and which tap
  // rows meet the image. What is not there is any row.
  std::vector<int64_t> gradient_rows(parts * step), input_rows(parts * S * step);
  struct Met {
    uint8_t rows[K] = {};
  };
  std::vector<Met> met(parts * step / kLanes);
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t k = 0; k < together + kFurther; ++k) {
      const int64_t item = first + part * together + k, image = item / g.output_height, row = item % g.output_height;
      for (int64_t kind = 0; kind < S; ++kind) {
        // Tap row r of an item meets place item * S + r - pad_top, where images are as many places apart as their items have.
        const int64_t place = item * S + kind - g.pad_top, apart = g.output_height * S;
        if (place >= 0 && place / apart < g.batch && place % apart < g.input_height)
          input_rows[(part * S + kind) * step + k] =
              place / apart * g.channels * g.input_plane() + place % apart * g.input_width;
      }
      if (k >= together || item >= last) continue;
      gradient_rows[part * step + k] = image * g.outputs() * g.output_plane() + row * g.output_width;
      for (int r = 0; r < K; ++r)
        if (const int64_t i = row * S + r - g.pad_top; i >= 0 && i < g.input_height)
          met[(part * step + k) / kLanes].rows[r] |= 1u << k % kLanes;
    }
  const auto memory = scratch<double>(row_size * step);
  double *turned_input = memory.get(), *turned_gradient = turned_input + S * kind_step;
  for (int64_t output = begin; output < end; ++output) {
    const float* x = input + output / g.multiplier * g.input_plane();
    const float* dy = gradient + output * g.output_plane();
    double lanes[K * K * kLanes] = {};
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t groups = quotient_rounded_up(std::min(together, last - first - part * together), kLanes);
      turn_rows(dy, &gradient_rows[part * step], groups * kLanes, g.output_width, g.output_plane(), turned_gradient, step);
      for (int64_t kind = 0; kind < S; ++kind)
        turn_rows(x, &input_rows[(part * S + kind) * step], (groups + ((K - 1 - kind) / S > 0)) * kLanes, g.input_width,
                  g.input_plane(), turned_input + kind * kind_step, step);
      for (int64_t group = 0; group < groups; ++group)
        TurnedRows<K, S>{turned_input + group * kLanes, turned_gradient + group * kLanes, step, kind_step,
                         g.input_width, g.output_width, g.pad_left}
            .add(met[part * step / kLanes + group].rows, lanes);
    }
    for (int t = 0; t < K * K; ++t) sums[t * g.outputs() + output] = folded({Vector<double>::load(lanes + t * kLanes)});
  }
}

template <int K, int S>
void sum_blocks(const Geometry& g, const float* input, const float* gradient, double* sums) {
  constexpr int64_t kEnoughTasks = 8, kTaskSize = 32768;
  const int64_t items = g.batch * g.output_height, blocks = std::max<int64_t>(1, quotient_rounded_up(items, kBlock));
  const int64_t wanted = std::max(quotient_rounded_up(kEnoughTasks, blocks), g.output_size() / (blocks * kTaskSize));
  const int64_t parts = std::clamp<int64_t>(wanted, 1, g.outputs());
  parallel_for(blocks * parts, g.output_size() * K * K, [&](int64_t task) {
    const int64_t block = task / parts, part = task % parts;
    sum_block<K, S>(g, input, gradient, block * kBlock, std::min(items, (block + 1) * kBlock), g.outputs() * part / parts,
                    g.outputs() * (part + 1) / parts, sums + block * K * K * g.outputs());
  });
}

#endif

}  // namespace

bool sum_filter_planes([[maybe_unused]] const Geometry& g, [[maybe_unused]] const float* input,
                       [[maybe_unused]] const float* gradient, [[maybe_unused]] double* sums) {
#if defined(__AVX512F__)
  // Elsewhere it is no faster than rearranging whole planes.
  const bool worth_it = g.batch >= 4 && g.input_width <= 16;
  // No two images have rows at the same place, and the columns at both edges are not the same ones.
  const bool apart = g.input_height <= g.output_height * g.stride_height;
  const bool wide = g.output_width * g.stride_width >= g.filter_width - g.stride_width;
  const bool known = g.filter_height == 3 && g.filter_width == 3 && g.stride_height == g.stride_width &&
                     g.dilation_height == 1 && g.dilation_width == 1;
  if (!worth_it || !apart || !wide || !known || g.output_size() == 0 || g.input_size() == 0) return false;
  switch (g.stride_width) {
    case 1: return sum_blocks<3, 1>(g, input, gradient, sums), true;
    case 2: return sum_blocks<3, 2>(g, input, gradient, sums), true;
  }
#endif
  return false;
}

}  // namespace exactqat
