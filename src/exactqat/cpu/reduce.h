// SPDX-License-Identifier: Apache-2.0
// The one order in which this library sums (docs/decisions/summation-order.md, reference/summation.py): float64, blocks of 64
// rows, 8 lanes inside a block, lanes folded in halves, blocks' sums treated as rows again. Fixed by shape alone.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "parallel.h"

namespace exactqat {

constexpr int64_t kBlock = 64;
constexpr int64_t kLanes = 8;

// lanes[8][width] -> lanes[0][width]
inline void fold_lanes(double* lanes, int64_t width) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half * width; ++k) lanes[k] += lanes[half * width + k];
}

// items[count][width] -> items[0][width]
inline void tree_fold(double* items, int64_t count, int64_t width) {
  std::vector<double> lanes(kLanes * width);
  do {
    const int64_t blocks = (count + kBlock - 1) / kBlock;
    for (int64_t block = 0; block < blocks; ++block) {
      std::fill(lanes.begin(), lanes.end(), 0.0);
      const int64_t end = std::min(count, (block + 1) * kBlock);
      for (int64_t item = block * kBlock; item < end; ++item) {
        double* lane = lanes.data() + item % kLanes * width;
        const double* from = items + item * width;
        for (int64_t k = 0; k < width; ++k) lane[k] += from[k];
      }
      fold_lanes(lanes.data(), width);
      std::copy_n(lanes.data(), width, items + block * width);
    }
    count = blocks;
  } while (count > 1);
}

// Runs over a dense [rows, channels] array are cut so that the loop over a run is long enough to vectorize: all 8 lanes of a
// few channels at once, or 64 of many channels. Per-channel parameters are laid out to match a run.
constexpr int64_t kManyChannels = 64;

template <class T>
std::vector<T> widen(const T* parameters, int64_t channels) {
  const int64_t repeats = channels <= kManyChannels ? kLanes : 1;
  std::vector<T> wide(repeats * channels);
  for (int64_t k = 0; k < repeats * channels; ++k) wide[k] = parameters[k % channels];
  return wide;
}

// Sums over the rows of a dense [rows, channels] array: totals[s][channel] for s < Sums.
// visit(offset, parameter, count, repeats, lanes): `repeats` runs of `count` elements from `offset` on, one after the other,
// each with widened parameters from `parameter`; adds what element k of a run contributes to lanes[s][k]. Called once for each
// element, so it may also write elementwise results. For one channel `count` is a constant.
template <int Sums, class Visit>
std::array<std::vector<double>, Sums> column_sums(int64_t rows, int64_t channels, Visit&& visit) {
  const int64_t blocks = std::max<int64_t>(1, (rows + kBlock - 1) / kBlock);
  const int64_t width = Sums * channels;
  std::vector<double> items(blocks * width);
  const bool few = channels <= kManyChannels;
  const int64_t tile = few ? channels : kManyChannels;
  const int64_t blocks_per_task = std::max<int64_t>(1, 32768 / (kBlock * std::max<int64_t>(channels, 1)));
  const int64_t tasks = (blocks + blocks_per_task - 1) / blocks_per_task;
  parallel_for(tasks, rows * channels, [&](int64_t task) {
    double storage[Sums][kLanes * kManyChannels];
    double* lanes[Sums];
    for (int64_t block = task * blocks_per_task; block < std::min(blocks, (task + 1) * blocks_per_task); ++block) {
      const int64_t begin = block * kBlock, end = std::min(rows, begin + kBlock);
      for (int64_t channel = 0; channel < channels; channel += tile) {
        const int64_t span = std::min(tile, channels - channel);
        for (int s = 0; s < Sums; ++s) {
          lanes[s] = storage[s];
          std::fill_n(storage[s], kLanes * span, 0.0);
        }
        if (few) {
          const int64_t whole = (end - begin) / kLanes, rest = (end - begin) % kLanes;
          if (channels == 1)
            visit(begin, int64_t{0}, std::integral_constant<int64_t, kLanes>{}, whole, lanes);
          else
            visit(begin * channels, int64_t{0}, kLanes * channels, whole, lanes);
          if (rest) visit((begin + whole * kLanes) * channels, int64_t{0}, rest * channels, int64_t{1}, lanes);
        } else {
          for (int64_t row = begin; row < end; ++row) {
            for (int s = 0; s < Sums; ++s) lanes[s] = storage[s] + row % kLanes * span;
            visit(row * channels + channel, channel, span, int64_t{1}, lanes);
          }
        }
        for (int s = 0; s < Sums; ++s) {
          fold_lanes(storage[s], span);
          std::copy_n(storage[s], span, items.data() + block * width + s * channels + channel);
        }
      }
    }
  });
  tree_fold(items.data(), blocks, width);
  std::array<std::vector<double>, Sums> totals;
  for (int s = 0; s < Sums; ++s)
    totals[s].assign(items.begin() + s * channels, items.begin() + (s + 1) * channels);
  return totals;
}

// visit(offset, parameter, count) over runs of a dense [rows, channels] array, for kernels without sums.
template <class Visit>
void for_each_run(int64_t rows, int64_t channels, Visit&& visit) {
  if (rows == 0 || channels == 0) return;
  const int64_t together = channels <= kManyChannels ? kLanes : 1;
  const int64_t runs = (rows + together - 1) / together;
  const int64_t runs_per_task = std::max<int64_t>(1, 32768 / (together * channels));
  const int64_t tasks = (runs + runs_per_task - 1) / runs_per_task;
  parallel_for(tasks, rows * channels, [&](int64_t task) {
    for (int64_t run = task * runs_per_task; run < std::min(runs, (task + 1) * runs_per_task); ++run) {
      const int64_t row = run * together;
      visit(row * channels, int64_t{0}, std::min(together, rows - row) * channels);
    }
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
