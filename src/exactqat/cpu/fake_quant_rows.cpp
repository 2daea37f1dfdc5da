// SPDX-License-Identifier: Apache-2.0
// FakeQuantWithMinMaxVarsPerChannel with the channels first and each channel's range from its largest magnitude.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "arithmetic.h"
#include "call.h"
#include "nudge.h"
#include "parallel.h"

namespace exactqat {
namespace {

// NaN if any element is: as an integer its magnitude is the largest.
template <class T>
T largest_magnitude(const T* row, int64_t size) {
  using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  Bits largest = 0;
  for (int64_t k = 0; k < size; ++k) {
    Bits bits;
    std::memcpy(&bits, row + k, sizeof bits);
    bits &= std::numeric_limits<Bits>::max();
    largest = bits > largest ? bits : largest;
  }
  T magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  return magnitude;
}

// visit(begin, nudged) for each row, which begins at element `begin`.
template <class T, class Visit>
void for_each_row(const Call& call, const T* inputs, int64_t rows, int64_t size, Visit&& visit) {
  const int64_t together = std::max<int64_t>(1, 8192 / std::max<int64_t>(size, 1));
  parallel_for((rows + together - 1) / together, rows * size, [&](int64_t task) {
    for (int64_t row = task * together; row < std::min(rows, (task + 1) * together); ++row) {
      const T magnitude = largest_magnitude(inputs + row * size, size);
      visit(row * size, nudge(-magnitude, magnitude, call.numbers));
    }
  });
}

}  // namespace

EXACTQAT_KERNEL(fake_quant_rows) {
  FlushDenormals flush;
  const T* inputs = call.operands[0].as<T>();
  T* outputs = call.results[0].as<T>();
  const int64_t rows = call.operands[0].shape[0], size = rows ? call.operands[0].size() / rows : 0;
  for_each_row(call, inputs, rows, size, [=](int64_t begin, const Nudged<T>& n) {
    if (n.no_range) {
      std::fill_n(outputs + begin, size, T(0));
      return;
    }
    for (int64_t k = begin; k < begin + size; ++k) {
      const T steps = (clamp(inputs[k], n.nudged_min, n.nudged_max) - n.nudged_min) * n.inv_nudged_scale;
      outputs[k] = std::floor((steps - n.quant_zero) + T(0.5)) * n.nudged_scale;
    }
  });
}

EXACTQAT_KERNEL(fake_quant_rows_gradient) {
  FlushDenormals flush;
  const T *gradients = call.operands[0].as<T>(), *inputs = call.operands[1].as<T>();
  T* backprops = call.results[0].as<T>();
  const int64_t rows = call.operands[1].shape[0], size = rows ? call.operands[1].size() / rows : 0;
  for_each_row(call, inputs, rows, size, [=](int64_t begin, const Nudged<T>& n) {
    if (n.no_range) {
      std::memcpy(backprops + begin, gradients + begin, size * sizeof(T));  // a copy, denormals and NaN included
      return;
    }
    for (int64_t k = begin; k < begin + size; ++k)
      backprops[k] = masked(gradients[k], bool((inputs[k] >= n.nudged_min) & (inputs[k] <= n.nudged_max)));
  });
}

}  // namespace exactqat
