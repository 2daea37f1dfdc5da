// SPDX-License-Identifier: Apache-2.0
// The largest magnitudes of the rows of several weights in one call: for a small weight a call takes longer than its numbers.
#pragma once
#include <cstdint>
#include <vector>

namespace exactqat {

// Dense, [rows, size].
struct Rows {
  const float* data;
  int64_t rows, size;
};

// magnitudes: of all rows, one weight's after the other's. NaN for a row that has NaN.
void row_magnitudes(const std::vector<Rows>& weights, float* magnitudes);

}  // namespace exactqat
