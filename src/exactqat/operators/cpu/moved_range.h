// SPDX-License-Identifier: Apache-2.0
// A range that follows the data. qat/train/core/ranges.py says what this computes; here it takes as long as a few numbers should.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace exactqat {

enum class Following : int { ema, last_batch, min_max };

// Of a batch's extremes: moves the range, and counts the batch, unless they are not finite. Returns how wide the range then is, -1 if it
// has seen no data.
inline double move_range(float lowest, float highest, float& minimum, float& maximum, int64_t& batches, Following policy, float decay,
                       bool nonnegative) {
  // The comparisons let NaN through.
  float low = nonnegative && 0 > lowest ? 0 : lowest;
  low = 0 < low ? 0 : low;
  float high = 0 > highest ? 0 : highest;
  const auto width = [&] { return batches > 0 ? double(maximum) - double(minimum) : -1.0; };
  if (!(high - low < std::numeric_limits<float>::infinity())) return width();
  if (policy == Following::min_max) {
    low = minimum < low ? minimum : low;
    high = maximum > high ? maximum : high;
  } else if (policy == Following::ema) {
    // The first batch sets the range; the average is that of all batches until the decay takes over.
    const float count = float(batches), share = count / (count + 1), keep = decay < share ? decay : share;
    const auto average = [keep](float fresh, float old) {
      return fresh + std::max((old - fresh) * keep, std::numeric_limits<float>::lowest());
    };
    low = average(low, minimum);
    high = average(high, maximum);
  }
  minimum = low;
  maximum = high;
  ++batches;
  return width();
}

}  // namespace exactqat
