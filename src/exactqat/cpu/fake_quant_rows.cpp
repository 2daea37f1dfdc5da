// SPDX-License-Identifier: Apache-2.0
// FakeQuantWithMinMaxVarsPerChannel with the channels first and each channel's range from its largest magnitude.
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

namespace exactqat {
namespace {

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

// visit(begin, nudged) for each row, which begins at element `begin`.
template <class S, class Visit>
void for_each_row(const Call& call, const S* inputs, int64_t rows, int64_t size, Visit&& visit) {
  const int64_t together = std::max<int64_t>(1, 8192 / std::max<int64_t>(size, 1));
  parallel_for((rows + together - 1) / together, rows * size, [&](int64_t task) {
    for (int64_t row = task * together; row < std::min(rows, (task + 1) * together); ++row) {
      const auto magnitude = largest_magnitude(inputs + row * size, size);
      visit(row * size, nudge(-magnitude, magnitude, call.numbers));
    }
  });
}

}  // namespace

EXACTQAT_STORAGE_KERNEL(fake_quant_rows) {
  FlushDenormals flush;
  const S* inputs = call.operands[0].as<S>();
  S* outputs = call.results[0].as<S>();
  const int64_t rows = call.operands[0].shape[0], size = rows ? call.operands[0].size() / rows : 0;
  for_each_row(call, inputs, rows, size, [=](int64_t begin, const Nudged<T>& n) {
    if (n.no_range) {
      std::memset(outputs + begin, 0, size * sizeof(S));
      return;
    }
    for (int64_t k = begin; k < begin + size; ++k) {
      const T steps = (clamp(real(inputs[k]), n.nudged_min, n.nudged_max) - n.nudged_min) * n.inv_nudged_scale;
      round_to(outputs[k], std::floor((steps - n.quant_zero) + T(0.5)) * n.nudged_scale);
    }
  });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_rows_gradient) {
  FlushDenormals flush;
  const S *gradients = call.operands[0].as<S>(), *inputs = call.operands[1].as<S>();
  S* backprops = call.results[0].as<S>();
  const int64_t rows = call.operands[1].shape[0], size = rows ? call.operands[1].size() / rows : 0;
  for_each_row(call, inputs, rows, size, [=](int64_t begin, const Nudged<T>& n) {
    if (n.no_range) {
      // A copy, denormals included.
      for (int64_t k = begin; k < begin + size; ++k) round_to(backprops[k], real(gradients[k]));
      return;
    }
    for (int64_t k = begin; k < begin + size; ++k) {
      const T x = real(inputs[k]);
      round_to(backprops[k], masked(real(gradients[k]), bool((x >= n.nudged_min) & (x <= n.nudged_max))));
    }
  });
}

}  // namespace exactqat
