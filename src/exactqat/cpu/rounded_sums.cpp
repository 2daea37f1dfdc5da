// SPDX-License-Identifier: Apache-2.0
// Sums of a frozen layer as TensorFlow Lite's integers: the arithmetic of reference/rounded_sums.py in one pass.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "call.h"
#include "parallel.h"

namespace exactqat {
namespace {

// Of numbers at least, for loops that are worth vectors.
constexpr int64_t kRun = 256;

template <bool AwayFromZero>
void round_run(const float* sums, const double* factor, const double* nudge, double lowest, double highest, float* steps,
               int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    const double scaled = double(sums[k]) * factor[k];
    double rounded;
    if constexpr (AwayFromZero) rounded = std::copysign(std::floor(std::fabs(scaled) + 0.5), scaled);
    else rounded = std::floor((scaled + std::copysign(nudge[k], scaled)) + 0.5);
    // NaN stays what it is.
    rounded = rounded < lowest ? lowest : rounded;
    steps[k] = float(rounded > highest ? highest : rounded);
  }
}

}  // namespace

EXACTQAT_KERNEL(rounded_sums) {
  const float* sums = call.operands[0].as<float>();
  const int64_t size = call.operands[0].size(), channels = call.operands[1].size();
  if (size == 0) return;
  float* steps = call.results[0].as<float>();
  const double lowest = call.numbers.real("lowest"), highest = call.numbers.real("highest");
  const auto round = call.numbers.integer("away_from_zero") ? round_run<true> : round_run<false>;
  // Few channels several times, so that runs of the rows are long.
  const int64_t repeats = std::max<int64_t>(1, kRun / channels), run = repeats * channels;
  std::vector<double> factor, nudge;
  for (int64_t k = 0; k < repeats; ++k) {
    factor.insert(factor.end(), call.operands[1].as<double>(), call.operands[1].as<double>() + channels);
    nudge.insert(nudge.end(), call.operands[2].as<double>(), call.operands[2].as<double>() + channels);
  }
  const int64_t together = std::max<int64_t>(1, 8192 / run);
  parallel_for((size + together * run - 1) / (together * run), size, [&](int64_t task) {
    const int64_t end = std::min(size, (task + 1) * together * run);
    for (int64_t k = task * together * run; k < end; k += run)
      round(sums + k, factor.data(), nudge.data(), lowest, highest, steps + k, std::min(run, end - k));
  });
}

}  // namespace exactqat
