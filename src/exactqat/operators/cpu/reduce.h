// SPDX-License-Identifier: Apache-2.0
// The one order in which this library sums (docs/decisions/summation-order.md, reference/summation.py): float64, blocks of 64
// rows, 8 lanes inside a block, lanes folded in halves, blocks' sums treated as rows again. Fixed by shape alone.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "simd.h"
#include "tensor.h"

namespace exactqat {

constexpr int64_t kBlock = 64;
constexpr int64_t kLanes = 8;

// lanes[8][width] -> lanes[0][width]
inline void fold_lanes(double* lanes, int64_t width) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half * width; ++k) lanes[k] += lanes[half * width + k];
}

using Lanes = Vector<double>;

// Float64 products and quotients of what tensors of T hold, for numbers and for vectors of them. Those of float32 values are far
// from float64's denormals.
template <class T, class Value>
inline Value product_for(Value a, Value b) {
  if constexpr (sizeof(T) == 8) return flushed_product(a, b);
  else return a * b;
}
template <class T>
inline double quotient_for(double a, double b) {
  if constexpr (sizeof(T) == 8) return flushed_quotient(a, b);
  else return a / b;
}

// items[count][width], which are sums of blocks -> items[0][width]
inline void tree_fold(double* items, int64_t count, int64_t width) {
  for (int64_t blocks; count > 1; count = blocks) {
    blocks = (count + kBlock - 1) / kBlock;
    for (int64_t block = 0; block < blocks; ++block) {
      const double* from = items + block * kBlock * width;
      const int64_t rows = std::min(count - block * kBlock, kBlock);
      for (int64_t k = 0; k < width; k += Lanes::kWidth) {
        const int64_t n = std::min(width - k, Lanes::kWidth);
        Lanes lanes[kLanes];
        const auto add = [&](int64_t row, int64_t lane) __attribute__((always_inline)) {
          const double* item = from + row * width + k;
          lanes[lane] = lanes[lane] + (n == Lanes::kWidth ? Lanes::load(item) : Lanes::load(item, n));
        };
        int64_t row = 0;
        for (; row + kLanes <= rows; row += kLanes)
          for (int64_t lane = 0; lane < kLanes; ++lane) add(row + lane, lane);
        for (int64_t lane = 0; row + lane < rows; ++lane) add(row + lane, lane);
        for (int64_t half = kLanes / 2; half > 0; half /= 2)
          for (int64_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
        lanes[0].store(items + block * width + k, n);
      }
    }
  }
}

// Runs over a dense [rows, channels] array are cut so that the loop over a run is long enough to vectorize: one row of many
// channels, or several rows (at least the 8 lanes) of few. Per-channel parameters are laid out to match a run.
inline int64_t rows_together(int64_t channels, int64_t rows) {
  return channels > 64 ? 1 : std::max(kLanes, std::min(512 / std::max<int64_t>(channels, 1), rows));
}

using Doubles = std::vector<double>;

// Parameters for the sums below: by channel, all 8 lanes of few channels, and room for a whole vector after the last one.
template <class T>
Doubles sum_parameters(const T* parameters, int64_t channels) {
  Doubles doubles;
  const int64_t repeats = channels < Lanes::kWidth ? kLanes : 1;
  doubles.reserve(repeats * channels + Lanes::kWidth);
  for (int64_t k = 0; k < repeats; ++k) doubles.insert(doubles.end(), parameters, parameters + channels);
  doubles.resize(doubles.size() + Lanes::kWidth);
  return doubles;
}

// The parameter of one channel, or those of a vector of channels.
template <class Value>
inline Value parameter_at(const double* parameters, int64_t p) {
  if constexpr (std::is_same_v<Value, double>) return parameters[p];
  else return Value::load(parameters + p);
}

// Two sums of V vectors of channels take 2 * V registers for each of the eight lanes: how many lanes are summed at a time.
template <int V>
constexpr int kLanesTogether = std::max(1, std::min(4, (Lanes::kWidth >= 8 ? 8 : 4) / V));

// One block of up to 64 rows for V vectors of channels, lanes held in registers: some of the eight at a time, so that every row is
// read once. `partial` is the number of channels in a vector that is alone and not full, else 0. Ahead: what is read `ahead`
// elements later is asked for, since going down a few channels at a time the processor foresees little.
template <int V, bool Ahead, class T, class Term>
void block_sums(const T* a, const T* b, int64_t rows, int64_t channels, int64_t channel, int64_t partial, int64_t ahead,
                Term&& term, double* first_sums, double* second_sums) {
  const auto load = [&](const T* from, int v) __attribute__((always_inline)) {
    if constexpr (V == 1) return partial ? Lanes::load(from, partial) : Lanes::load(from);
    else return Lanes::load(from + v * Lanes::kWidth);
  };
  const auto ask_for = [](const T* from) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int64_t k = 0; k < V * Lanes::kWidth; k += 64 / int64_t{sizeof(T)}) __builtin_prefetch(from + k, 0, 2);
  };
  constexpr int kTogether = kLanesTogether<V>, kWidth = V * Lanes::kWidth;
  alignas(64) double sums[2][kLanes][kWidth];  // all of them are written below
  for (int begin = 0; begin < kLanes; begin += kTogether) {
    Lanes first[kTogether][V], second[kTogether][V];
    const auto add_row = [&](int64_t row, int lane) __attribute__((always_inline)) {
      if constexpr (Ahead) {
        ask_for(a + row * channels + ahead);
        if (b != a) ask_for(b + row * channels + ahead);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        Lanes x, y;
        term(channel + v * Lanes::kWidth, load(a + row * channels, v), load(b + row * channels, v), x, y);
        first[lane][v] = first[lane][v] + x;
        second[lane][v] = second[lane][v] + y;
      }
    };
    int64_t row = begin;
    for (; row + kTogether <= rows; row += kLanes)
#pragma GCC unroll 4
      for (int lane = 0; lane < kTogether; ++lane) add_row(row + lane, lane);
    for (int lane = 0; lane < kTogether && row + lane < rows; ++lane) add_row(row + lane, lane);
#pragma GCC unroll 4
    for (int lane = 0; lane < kTogether; ++lane)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        first[lane][v].store(&sums[0][begin + lane][v * Lanes::kWidth]);
        second[lane][v].store(&sums[1][begin + lane][v * Lanes::kWidth]);
      }
  }
  const auto fold = [partial](const double (&lanes)[kLanes][kWidth], double* to) __attribute__((always_inline)) {
    for (int v = 0; v < V; ++v) {
      Lanes sum[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) sum[lane] = Lanes::load(&lanes[lane][v * Lanes::kWidth]);
      for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) sum[lane] = sum[lane] + sum[lane + half];
      if (V == 1 && partial) sum[0].store(to, partial);
      else sum[0].store(to + v * Lanes::kWidth);
    }
  };
  fold(sums[0], first_sums);
  fold(sums[1], second_sums);
}

// The same for few channels: the 8 lanes of all of them are neighbours, whole vectors of them.
template <class T, class Term>
void block_sums_of_few(const T* a, const T* b, int64_t rows, int64_t channels, Term&& term, double* first_sums,
                       double* second_sums) {
  double first[kLanes * Lanes::kWidth], second[kLanes * Lanes::kWidth];  // the first `width` of them are written below
  const int64_t width = kLanes * channels, size = rows * channels, whole = size / width * width;
  for (int64_t k = 0; k < width; k += Lanes::kWidth) {
    Lanes x, y;
    for (int64_t i = k; i < whole; i += width) {
      Lanes plus_x, plus_y;
      term(k, Lanes::load(a + i), Lanes::load(b + i), plus_x, plus_y);
      x = x + plus_x;
      y = y + plus_y;
    }
    x.store(first + k);
    y.store(second + k);
  }
  for (int64_t i = whole; i < size; ++i) {
    double plus_x, plus_y;
    term(i - whole, double(a[i]), double(b[i]), plus_x, plus_y);
    first[i - whole] += plus_x;
    second[i - whole] += plus_y;
  }
  fold_lanes(first, channels);
  fold_lanes(second, channels);
  std::copy_n(first, channels, first_sums);
  std::copy_n(second, channels, second_sums);
}

using OnRows = std::function<void(int64_t offset, int64_t rows)>;

// Two sums over the rows of dense [rows, channels] arrays. term(parameter, a, b, first, second) is what the elements a[i] and
// b[i] add, for numbers and, in the same words, for vectors of channels; parameters are those of `sum_parameters`.
// before(offset, rows) is called for each block of rows before it is summed, also(offset, rows) when it has been, for operands and
// results that are written on the way; either may be null.
template <class T, class Term>
std::array<Doubles, 2> sums_of_rows(int64_t rows, int64_t channels, const Tensor<T>& of_a, const Tensor<T>& of_b, const Term& term,
                                    const OnRows& before = {}, const OnRows& also = {}) {
  if (rows == 0 || channels == 0) return {Doubles(channels), Doubles(channels)};
  constexpr int kNarrow = Lanes::kWidth >= 8 ? 2 : 4, kWide = Lanes::kWidth >= 8 ? 8 : 4;  // vectors in a piece
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  const int64_t blocks_per_task = std::max<int64_t>(1, 32768 / (kBlock * channels));
  const auto items_room = std::make_unique_for_overwrite<double[]>(2 * blocks * channels);
  double* items = items_room.get();
  const bool in_halves = of_a.in_halves(), same = of_a.address() == of_b.address();
  const bool far = !in_halves && far_from_the_core(rows * channels * int64_t{sizeof(T)});
  // Lines 4 KiB apart share a place in the first cache, which holds about ten of them. Where the length of a row lets more of a
  // block's lines meet in one place, rows are read in pieces of several lines: what is left of a line for later would be lost.
  constexpr int64_t kPage = 4096, kFitting = 8;
  const int64_t places = kPage / std::gcd(channels * int64_t{sizeof(T)}, kPage);
  const bool collide = (same ? 1 : 2) * kBlock > kFitting * places;
  // Of few blocks there are not enough for all cores: then some of a block's channels are a task.
  constexpr int64_t kFew = 8, kSomeChannels = 256;
  const int64_t block_tasks = (blocks + blocks_per_task - 1) / blocks_per_task;
  const bool cuts = block_tasks < kFew && !before && !also && !in_halves;
  const int64_t part = cuts ? kSomeChannels : channels, parts = (channels + part - 1) / part;
  parallel_for(block_tasks * parts, rows * channels, [&](int64_t task) {
    const int64_t begin = task / parts * blocks_per_task, end = std::min(blocks, begin + blocks_per_task);
    const int64_t first_channel = task % parts * part, end_of_channels = std::min(channels, first_channel + part);
    LineVector<T> room(in_halves ? (same ? 1 : 2) * kBlock * channels : 0);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t offset = block * kBlock * channels, count = std::min(kBlock, rows - block * kBlock);
      double *first = items + 2 * block * channels, *second = first + channels;
      if (before) before(offset, count);
      const T* a = of_a.read(offset, count * channels, room.data());
      const T* b = same ? a : of_b.read(offset, count * channels, room.data() + kBlock * channels);
      if (channels < Lanes::kWidth) {
        block_sums_of_few(a + offset, b + offset, count, channels, term, first, second);
      } else {
        int64_t channel = first_channel;
        const auto piece = [&]<int Vectors>(int64_t partial) {
          // The next block, or, where too much would be waiting then, a few pieces further on and as far into the next block.
          const int64_t later = channels <= 256 ? channels : Vectors == kWide ? 128 : 64;
          const int64_t ahead = channel + later < channels ? later : later + (kBlock - 1) * channels;
          const auto sum = [&]<bool Ahead>() {
            block_sums<Vectors, Ahead>(a + offset + channel, b + offset + channel, count, channels, channel, partial, ahead, term,
                                       first + channel, second + channel);
          };
          if (std::is_same_v<T, float> && far) sum.template operator()<std::is_same_v<T, float>>();
          else sum.template operator()<false>();
          channel += Vectors * Lanes::kWidth;
        };
        while (collide && channel + kWide * Lanes::kWidth <= end_of_channels) piece.template operator()<kWide>(0);
        while (channel + kNarrow * Lanes::kWidth <= end_of_channels) piece.template operator()<kNarrow>(0);
        while (channel + Lanes::kWidth <= end_of_channels) piece.template operator()<1>(0);
        if (channel < end_of_channels) piece.template operator()<1>(end_of_channels - channel);
      }
      if (also) also(offset, count);
    }
  });
  tree_fold(items, blocks, 2 * channels);
  return {Doubles(items, items + channels), Doubles(items + channels, items + 2 * channels)};
}

// visit(offset, parameter, count) over runs of `rows` dense rows from `offset` on, one after the other.
template <class Visit>
void in_runs(int64_t offset, int64_t rows, int64_t channels, Visit&& visit) {
  const int64_t together = rows_together(channels, rows);
  for (int64_t row = 0; row < rows; row += together)
    visit(offset + row * channels, int64_t{0}, std::min(together, rows - row) * channels);
}

// The same over all rows of a dense [rows, channels] array, on all cores, for kernels without sums.
template <class Visit>
void for_each_run(int64_t rows, int64_t channels, Visit&& visit) {
  if (rows == 0 || channels == 0) return;
  const int64_t together = rows_together(channels, rows);
  const int64_t rows_per_task = std::max<int64_t>(1, 32768 / (together * channels)) * together;
  parallel_for((rows + rows_per_task - 1) / rows_per_task, rows * channels, [&](int64_t task) {
    const int64_t row = task * rows_per_task;
    in_runs(row * channels, std::min(rows_per_task, rows - row), channels, visit);
  });
}

// visit(begin, end) over pieces of a flat array.
template <class Visit>
void for_each_piece(int64_t size, Visit&& visit) {
  constexpr int64_t kPiece = 32768;
  parallel_for((size + kPiece - 1) / kPiece, size,
               [&](int64_t piece) { visit(piece * kPiece, std::min(size, (piece + 1) * kPiece)); });
}

}  // namespace exactqat
