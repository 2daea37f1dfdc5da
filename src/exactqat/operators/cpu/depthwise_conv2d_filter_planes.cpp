// SPDX-License-Identifier: Apache-2.0
// Sums of output rows for the filter gradient, channels first. A vector's lanes are eight output rows one below the other, which
// are the eight lanes of a block of the tree of reduce.h; so each channel is summed by itself. Rows are rearranged to columns in a
// piece of memory that stays in the first cache. Float64, one fused multiply-add for each output column from left to right,
// beginning at 0.
#include "depthwise_conv2d_filter_planes.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "depthwise_conv2d_filter.h"
#include "depthwise_conv2d_planes.h"
#include "elementwise.h"
#include "parallel.h"
#include "reduce.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {
namespace {

#if defined(__AVX512F__)

// Sixteen rows of eight columns become columns that stand `step` apart. Rows begin at `base` and an offset; `next` further on is
// what will be needed next. Unless all eight columns may be read, only those of `there` are.
template <bool All>
[[gnu::always_inline]] inline void turn(const float* base, const int64_t* rows, int64_t next, __mmask8 there, float* to,
                                        int64_t step) {
  __m512 r[8], pairs[8], fours[8];
  const auto load = [&](int64_t row) __attribute__((always_inline)) {
    const float* from = base + row;
    __builtin_prefetch(from + next);
    return All ? _mm256_loadu_ps(from) : _mm256_maskz_loadu_ps(there, from);
  };
  unrolled<8>([&](auto k) __attribute__((always_inline)) {
    const __m512 lower = _mm512_castps256_ps512(load(rows[k]));
    r[k] = _mm512_mask_broadcast_f32x8(lower, 0xff00, load(rows[k + 8]));
  });
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    pairs[2 * i] = _mm512_maskz_unpacklo_ps(0xffff, r[2 * i], r[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_maskz_unpackhi_ps(0xffff, r[2 * i], r[2 * i + 1]);
  });
  // fours[4 * i + k] holds column k of rows 4 * i to 4 * i + 3, column 4 + k of them, and the same of the rows eight further on.
  unrolled<2>([&](auto i) __attribute__((always_inline)) {
    unrolled<2>([&](auto k) __attribute__((always_inline)) {
      const __m512d a = _mm512_castps_pd(pairs[4 * i + k]), b = _mm512_castps_pd(pairs[4 * i + 2 + k]);
      fours[4 * i + 2 * k] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xff, a, b));
      fours[4 * i + 2 * k + 1] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xff, a, b));
    });
  });
  const __m512i quarters[2] = {_mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15)};
  unrolled<8>([&](auto k) __attribute__((always_inline)) {
    const __m512d a = _mm512_castps_pd(fours[k % 4]), b = _mm512_castps_pd(fours[4 + k % 4]);
    _mm512_store_ps(to + k * step, _mm512_castpd_ps(_mm512_permutex2var_pd(a, quarters[k / 4], b)));
  });
}

// Columns that are written.
int64_t turned_columns(int64_t width) { return (width + 7) / 8 * 8; }

// `count` rows to columns: to[column][row], `step` numbers from one column to the next. Up to 15 rows more are turned. All: up to
// seven numbers after each row may be read.
template <bool All>
void turn_rows(const float* base, const int64_t* rows, int64_t count, int64_t width, int64_t next, float* to, int64_t step) {
  for (int64_t row = 0; row < count; row += 16)
    for (int64_t begin = 0; begin < width; begin += 8) {
      const float* from = base + begin;
      float* at = to + begin * step + row;
      if (All || begin + 8 <= width) turn<true>(from, rows + row, next, 0xff, at, step);
      else turn<false>(from, rows + row, next, (1u << (width - begin)) - 1, at, step);
    }
}

// Eight sums of eight lanes each, folded in halves (docs/decisions/summation-order.md).
__m512d folded_together(const double* lanes) {
  const auto pair = [&](int a, int b) __attribute__((always_inline)) {
    const __m512d x = _mm512_load_pd(lanes + a * kLanes), y = _mm512_load_pd(lanes + b * kLanes);
    return _mm512_maskz_shuffle_f64x2(0xff, x, y, 0x44) + _mm512_maskz_shuffle_f64x2(0xff, x, y, 0xee);
  };
  const auto four = [&](int a, int b, int c, int d) __attribute__((always_inline)) {
    const __m512d x = pair(a, b), y = pair(c, d);
    return _mm512_maskz_shuffle_f64x2(0xff, x, y, 0x88) + _mm512_maskz_shuffle_f64x2(0xff, x, y, 0xdd);
  };
  const __m512d even = four(0, 2, 4, 6), odd = four(1, 3, 5, 7);
  return _mm512_maskz_unpacklo_pd(0xff, even, odd) + _mm512_maskz_unpackhi_pd(0xff, even, odd);
}

// Of eight output rows those whose tap row r meets the image.
template <int K>
struct Met {
  uint8_t rows[K] = {};
};

// The sums of a channel's output rows that are neighbours, `turned` to columns.
template <int K, int S, class Edges>
struct TurnedRows {
  const float *input, *gradient;  // of input rows those a stride apart are neighbours, and the S kinds lie one after the other
  int64_t step, kind_step, input_columns, output_columns, pad_left;

  // Adds the sums of G times eight rows from `row` on to lanes[taps][8]. Two at a time are chains enough to keep
  // both multipliers busy.
  template <int G>
  void add(int64_t row, const Met<K>* met, double* lanes) const {
    constexpr int kKept = (K + S - 1) / S;
    const float *input = this->input + row, *gradient = this->gradient + row;
    __mmask8 rows[G][K];
    unrolled<G * K>([&](auto i) __attribute__((always_inline)) { rows[i / K][i % K] = met[i / K].rows[i % K]; });
    Register sums[G][K][K], kept[G][kKept];
    unrolled<G * K * K>([&](auto k) __attribute__((always_inline)) { sums[k / (K * K)][k / K % K][k % K] = bare(Lanes()); });
    unrolled<G * kKept>([&](auto k) __attribute__((always_inline)) { kept[k / kKept][k % kKept] = bare(Lanes()); });
    const auto column = [&]<int First, int Last, unsigned There, unsigned Perhaps>(int64_t q) __attribute__((always_inline)) {
      unrolled<G>([&](auto i) __attribute__((always_inline)) {
        unrolled<kKept - 1>([&](auto m) __attribute__((always_inline)) { kept[i][kKept - 1 - m] = kept[i][kKept - 2 - m]; });
        if constexpr (First == 0) {
          kept[i][0] = bare(Lanes::load(gradient + q * step + i * kLanes));
          asm("" : "+v"(kept[i][0]));  // else the compiler converts it again where it is the one before
        }
      });
      unrolled<S>([&](auto phase) __attribute__((always_inline)) {
        constexpr unsigned kBit = 1u << phase;
        if constexpr (((There | Perhaps) & kBit) == 0) return;
        const int64_t j = q * S + phase - pad_left;
        if ((Perhaps & kBit) && (j < 0 || j >= input_columns)) return;
        unrolled<G * K>([&](auto at) __attribute__((always_inline)) {
          constexpr int i = at / K, r = at % K;
          const Lanes value = Lanes::load(input + j * step + r % S * kind_step + r / S + i * kLanes);
          unrolled<kKept>([&](auto m) __attribute__((always_inline)) {
            constexpr int t = phase + S * m;
            if constexpr (m >= First && m <= Last && t < K)
              sums[i][r][t] = _mm512_mask3_fmadd_pd(value.v, kept[i][m], sums[i][r][t], rows[i][r]);
          });
        });
      });
    };
    walk_columns<K, S, Edges>(output_columns, input_columns, pad_left, column);
    unrolled<K * K>([&](auto t) __attribute__((always_inline)) {
      Lanes sum = Lanes::load(lanes + t * kLanes);
      unrolled<G>([&](auto i) __attribute__((always_inline)) { sum = sum + Lanes{sums[i][t / K][t % K]}; });
      sum.store(lanes + t * kLanes);
    });
  }
};

// The block of items from `first` to `last`, outputs [begin, end): sums[taps][outputs].
template <int K, int S, class Edges>
void sum_block(const Geometry& g, const float* input, const float* gradient, int64_t first, int64_t last, int64_t begin,
               int64_t end, double* sums) {
  constexpr int64_t kNear = 7168;  // float32 numbers that stay in the first cache
  const int64_t input_columns = turned_columns(g.input_width), row_size = input_columns * S + turned_columns(g.output_width);
  // Equal parts. The distance of two columns is an odd number of cache lines, so that they do not meet in one set.
  const int64_t most = std::clamp<int64_t>(kNear / row_size - 2 * kLanes, kLanes, kBlock);
  const int64_t together = quotient_rounded_up(last - first, quotient_rounded_up(last - first, most) * kLanes) * kLanes;
  const int64_t step = (together / 16 + 1) / 2 * 32 + 16, kind_step = input_columns * step;
  const int64_t parts = quotient_rounded_up(last - first, together);
  // Of each part: where the rows of the gradient and the S kinds of rows of the input begin, of the first plane on, and which tap
  // rows meet the image. What is not there is any row.
  std::vector<int64_t> gradient_rows(parts * step), input_rows(parts * S * step);
  std::vector<Met<K>> met(parts * step / kLanes);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = first + part * together, count = std::min(together, last - from);
    // Tap row r of an item meets row row * S + r - pad_top of its image, which for several items is the same one.
    for (int64_t k = 0, image = from / g.output_height, row = from % g.output_height; k < count;
         ++k, row = row + 1 == g.output_height ? 0 : row + 1, image += row == 0) {
      gradient_rows[part * step + k] = image * g.outputs() * g.output_plane() + row * g.output_width;
      for (int r = 0; r < K; ++r) {
        const int64_t i = row * S + r - g.pad_top;
        if (i < 0 || i >= g.input_height) continue;
        input_rows[(part * S + r % S) * step + k + r / S] = image * g.channels * g.input_plane() + i * g.input_width;
        met[(part * step + k) / kLanes].rows[r] |= 1u << k % kLanes;
      }
    }
  }
  // How many planes ahead memory is asked for: small ones are done before theirs would be there.
  const int64_t ahead = g.input_width <= 16 ? 2 : 1;
  const auto memory = scratch<float>(row_size * step);
  float *turned_input = memory.get(), *turned_gradient = turned_input + S * kind_step;
  const TurnedRows<K, S, Edges> turned{turned_input, turned_gradient, step, kind_step, g.input_width, g.output_width, g.pad_left};
  for (int64_t output = begin; output < end; ++output) {
    const float* x = input + output / g.multiplier * g.input_plane();
    const float* dy = gradient + output * g.output_plane();
    alignas(64) double lanes[K * K * kLanes] = {};
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t rows = std::min(together, last - first - part * together);
      const bool all = output / g.multiplier + 1 < g.channels && g.input_plane() >= 7 && g.output_plane() >= 7;
      const auto turn = [&](auto... given) { all ? turn_rows<true>(given...) : turn_rows<false>(given...); };
      for (int64_t kind = 0; kind < S; ++kind)
        turn(x, &input_rows[(part * S + kind) * step], rows + (K - 1 - kind) / S, g.input_width, ahead * g.input_plane(),
             turned_input + kind * kind_step, step);
      turn(dy, &gradient_rows[part * step], rows, g.output_width, ahead * g.output_plane(), turned_gradient, step);
      const Met<K>* group = &met[part * step / kLanes];
      int64_t row = 0;
      for (; row + kLanes < rows; row += 2 * kLanes, group += 2) turned.template add<2>(row, group, lanes);
      if (row < rows) turned.template add<1>(row, group, lanes);
    }
    alignas(64) double folds[8];
    _mm512_store_pd(folds, folded_together(lanes));
    for (int t = 0; t < 8; ++t) sums[t * g.outputs() + output] = folds[t];
    for (int t = 8; t < K * K; ++t) sums[t * g.outputs() + output] = folded({Lanes::load(lanes + t * kLanes)});
  }
}

template <int K, int S, class Edges>
void sum_blocks(const Geometry& g, const float* input, const float* gradient, double* sums) {
  constexpr int64_t kEnoughTasks = 8, kTaskSize = 32768;
  const int64_t items = g.batch * g.output_height, blocks = std::max<int64_t>(1, quotient_rounded_up(items, kBlock));
  const int64_t wanted = std::max(quotient_rounded_up(kEnoughTasks, blocks), g.output_size() / (blocks * kTaskSize));
  const int64_t parts = std::clamp<int64_t>(wanted, 1, g.outputs());
  parallel_for(blocks * parts, g.output_size() * K * K, [&](int64_t task) {
    const int64_t block = task / parts, part = task % parts;
    sum_block<K, S, Edges>(g, input, gradient, block * kBlock, std::min(items, (block + 1) * kBlock), g.outputs() * part / parts,
                    g.outputs() * (part + 1) / parts, sums + block * K * K * g.outputs());
  });
}

#endif

}  // namespace

bool sum_filter_planes([[maybe_unused]] const Geometry& g, [[maybe_unused]] const float* input,
                       [[maybe_unused]] const float* gradient, [[maybe_unused]] double* sums) {
#if defined(__AVX512F__)
  // With fewer images it is no faster than rearranging whole planes.
  const bool worth_it = g.batch >= 4;
  // No two images have rows at the same place, and the columns at both edges are not the same ones.
  const bool apart = g.input_height <= g.output_height * g.stride_height;
  const bool wide = g.output_width * g.stride_width >= g.filter_width - g.stride_width;
  const bool known = g.filter_height == 3 && g.filter_width == 3 && g.stride_height == g.stride_width &&
                     g.dilation_height == 1 && g.dilation_width == 1;
  if (!worth_it || !apart || !wide || !known || g.output_size() == 0 || g.input_size() == 0) return false;
  switch (g.stride_width) {
    case 1: return with_edges<3, 1>(g, [&]<class E>(E) { sum_blocks<3, 1, E>(g, input, gradient, sums); }), true;
    case 2: return with_edges<3, 2>(g, [&]<class E>(E) { sum_blocks<3, 2, E>(g, input, gradient, sums); }), true;
  }
#endif
  return false;
}

}  // namespace exactqat
