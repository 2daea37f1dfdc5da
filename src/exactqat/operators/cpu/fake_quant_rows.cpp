// SPDX-License-Identifier: Apache-2.0
// FakeQuantWithMinMaxVarsPerChannel with the channels first and symmetric ranges, given or from each channel's largest magnitude.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "arithmetic.h"
#include "call.h"
#include "elementwise.h"
#include "nudge.h"
#include "parallel.h"
#include "reduce.h"
#include "row_magnitudes.h"

namespace exactqat {
namespace {

// Of a row of a weight: their sums need no memory of their own.
constexpr int64_t kFewBlocks = 64;

// NaN if any element is: as an integer its magnitude is the largest.
template <class S>
Real<S> largest_magnitude(const S* row, int64_t size) {
  using Bits = std::conditional_t<sizeof(S) == 2, int16_t, std::conditional_t<sizeof(S) == 4, int32_t, int64_t>>;
  Bits largest = 0;
  for (int64_t k = 0; k < size; ++k) {
    Bits bits;
    std::memcpy(&bits, row + k, sizeof bits);
    bits = Bits(bits & std::numeric_limits<Bits>::max());
    largest = bits > largest ? bits : largest;
  }
  S magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  return real(magnitude);
}

// visit(row, m, nudged) for each row, with the range [-m, m] of its `magnitude(row)`.
template <class T, class Magnitude, class Visit>
void for_each_row(const Call& call, int64_t rows, int64_t size, Magnitude&& magnitude, Visit&& visit) {
  using V = Vector<T>;
  const int64_t together = std::max<int64_t>(V::kWidth, 8192 / std::max<int64_t>(size, 1));
  const Quantized<T> quantized(call.numbers);
  parallel_for((rows + together - 1) / together, rows * size, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * together);
    for (int64_t row = task * together; row < end; row += V::kWidth) {
      // As many ranges as a vector holds are nudged together: alone that takes longer than a short row.
      const int64_t count = std::min(end - row, V::kWidth);
      T m[V::kWidth] = {};
      for (int64_t k = 0; k < count; ++k) m[k] = magnitude(row + k);
      const V high = V::load(m);
      const NudgedVectors<T> n(high * V::all(T(-1)), high, quantized);
      T parts[5][V::kWidth];
      n.nudged_min.store(parts[0]);
      n.nudged_max.store(parts[1]);
      n.nudged_scale.store(parts[2]);
      n.inv_nudged_scale.store(parts[3]);
      n.quant_zero.store(parts[4]);
      const uint32_t no_range = bits_of(n.no_range);
      for (int64_t k = 0; k < count; ++k)
        visit(row + k, m[k], Nudged<T>{parts[0][k], parts[1][k], parts[2][k], parts[3][k], parts[4][k], bool(no_range >> k & 1)});
    }
  });
}

// visit(k, extent) for each vector of a row.
template <class T, class Visit>
inline void for_each_vector(int64_t size, Visit&& visit) {
  int64_t k = 0;
  for (; k + Vector<T>::kWidth <= size; k += Vector<T>::kWidth) visit(k, Whole{});
  if (k < size) visit(k, Part{size - k});
}

template <class S, class T>
void quantize_row(const S* inputs, S* outputs, int64_t size, const Nudged<T>& n) {
  using V = Vector<T>;
  if (n.no_range) {
    std::memset(outputs, 0, size * sizeof(S));
    return;
  }
  const V low = V::all(n.nudged_min), high = V::all(n.nudged_max), zero = V::all(n.quant_zero), half = V::all(T(0.5));
  const V scale = V::all(n.nudged_scale), inverse = V::all(n.inv_nudged_scale);
  for_each_vector<T>(size, [=](int64_t k, auto extent) __attribute__((always_inline)) {
    const V steps = (clamp(load(inputs + k, extent), low, high) - low) * inverse;
    store(outputs + k, floored((steps - zero) + half) * scale, extent);
  });
}

template <class S, class T>
void gradient_of_row(const S* gradients, const S* inputs, S* backprops, int64_t size, const Nudged<T>& n) {
  using V = Vector<T>;
  if (n.no_range) {
    // A copy, denormals included.
    if (backprops != gradients) std::memcpy(backprops, gradients, size * sizeof(S));
    return;
  }
  const V low = V::all(n.nudged_min), high = V::all(n.nudged_max);
  for_each_vector<T>(size, [=](int64_t k, auto extent) __attribute__((always_inline)) {
    const V x = load(inputs + k, extent);
    store(backprops + k, masked(load(gradients + k, extent), less_equal(low, x) & less_equal(x, high)), extent);
  });
}

// The same, with the gradient of the row's magnitude: that of the upper end less that of the lower one.
template <class S, class T>
T gradients_of_row(const S* gradients, const S* inputs, S* backprops, int64_t size, const Nudged<T>& n) {
  using V = Vector<T>;
  if (n.no_range || size == 0) {
    gradient_of_row(gradients, inputs, backprops, size, n);
    return T(0);
  }
  constexpr int64_t kParts = V::kWidth / Lanes::kWidth, kVectors = kLanes / Lanes::kWidth;  // in a vector; of eight lanes
  const V low = V::all(n.nudged_min), high = V::all(n.nudged_max), one = V::all(T(1));
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  double few[2 * kFewBlocks];
  Doubles many(blocks > kFewBlocks ? 2 * blocks : 0);
  double* sums = many.empty() ? few : many.data();
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kBlock;
    Lanes below[kVectors], above[kVectors];
    for_each_vector<T>(std::min(size - begin, kBlock), [&](int64_t k, auto extent) __attribute__((always_inline)) {
      const V x = load(inputs + begin + k, extent), gradient = load(gradients + begin + k, extent);
      store(backprops + begin + k, masked(gradient, less_equal(low, x) & less_equal(x, high)), extent);
      // A gradient counts as if multiplied by 1 or 0, also one that is not finite.
      const V under = gradient * kept(less(x, low), one), over = gradient * kept(less(high, x), one);
      const int64_t first = k / Lanes::kWidth;
      const auto add = [&]<int I>() __attribute__((always_inline)) {
        const int64_t at = (first + I) % kVectors;
        below[at] = below[at] + doubles<I>(under);
        above[at] = above[at] + doubles<I>(over);
      };
      add.template operator()<0>();
      if constexpr (kParts == 2) add.template operator()<1>();
    });
    sums[2 * block] = folded(below);
    sums[2 * block + 1] = folded(above);
  }
  tree_fold(sums, blocks, 2);
  return T(sums[1]) - T(sums[0]);
}

}  // namespace

void row_magnitudes(const std::vector<Rows>& weights, float* magnitudes) {
  // Rows that a thread takes together.
  struct Task {
    Rows rows;
    float* magnitudes;
  };
  std::vector<Task> tasks;
  int64_t elements = 0;
  for (const auto& [data, rows, size] : weights) {
    const int64_t together = std::max<int64_t>(1, 65536 / std::max<int64_t>(size, 1));
    for (int64_t row = 0; row < rows; row += together)
      tasks.push_back({{data + row * size, std::min(together, rows - row), size}, magnitudes + row});
    magnitudes += rows;
    elements += rows * size;
  }
  parallel_for(int64_t(tasks.size()), elements, [&](int64_t task) {
    const auto& [rows, results] = tasks[size_t(task)];
    for (int64_t row = 0; row < rows.rows; ++row) results[row] = largest_magnitude(rows.data + row * rows.size, rows.size);
  });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_rows) {
  FlushDenormals flush;
  const S* inputs = call.operands[0].as<S>();
  S* outputs = call.results[0].as<S>();
  const int64_t rows = call.operands[0].shape[0], size = rows ? call.operands[0].size() / rows : 0;
  for_each_row<T>(
      call, rows, size, [=](int64_t row) { return largest_magnitude(inputs + row * size, size); },
      [=](int64_t row, T, const Nudged<T>& n) { quantize_row(inputs + row * size, outputs + row * size, size, n); });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_rows_gradient) {
  FlushDenormals flush;
  const S *gradients = call.operands[0].as<S>(), *inputs = call.operands[1].as<S>();
  S* backprops = call.results[0].as<S>();
  const int64_t rows = call.operands[1].shape[0], size = rows ? call.operands[1].size() / rows : 0;
  const bool in_place = backprops == gradients;
  for_each_row<T>(
      call, rows, size, [=](int64_t row) { return largest_magnitude(inputs + row * size, size); },
      [=](int64_t row, T magnitude, const Nudged<T>& n) {
        // Most gradients pass: in their own memory they need not even be read.
        if (in_place && -magnitude >= n.nudged_min && magnitude <= n.nudged_max) return;
        gradient_of_row(gradients + row * size, inputs + row * size, backprops + row * size, size, n);
      });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_rows_within) {
  FlushDenormals flush;
  const S* inputs = call.operands[0].as<S>();
  const T* magnitudes = call.operands[1].as<T>();
  S* outputs = call.results[0].as<S>();
  const int64_t rows = call.operands[0].shape[0], size = rows ? call.operands[0].size() / rows : 0;
  for_each_row<T>(
      call, rows, size, [=](int64_t row) { return magnitudes[row]; },
      [=](int64_t row, T, const Nudged<T>& n) { quantize_row(inputs + row * size, outputs + row * size, size, n); });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_rows_within_gradient) {
  FlushDenormals flush;
  const S *gradients = call.operands[0].as<S>(), *inputs = call.operands[1].as<S>();
  const T* magnitudes = call.operands[2].as<T>();
  S* backprops = call.results[0].as<S>();
  T* to_magnitudes = call.results[1].as<T>();
  const int64_t rows = call.operands[1].shape[0], size = rows ? call.operands[1].size() / rows : 0;
  for_each_row<T>(
      call, rows, size, [=](int64_t row) { return magnitudes[row]; },
      [=](int64_t row, T, const Nudged<T>& n) {
        to_magnitudes[row] = gradients_of_row(gradients + row * size, inputs + row * size, backprops + row * size, size, n);
      });
}

}  // namespace exactqat
