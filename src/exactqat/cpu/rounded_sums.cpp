// SPDX-License-Identifier: Apache-2.0
// Sums of a frozen layer as a device's integers, and their gradient: the arithmetic of reference/rounded_sums.py in one pass.
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

void round_run_in_float32(const float* sums, const float* factor, float lowest, float highest, float* steps, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    float rounded = std::rint(sums[k] * factor[k]);
    rounded = rounded < lowest ? lowest : rounded;
    steps[k] = rounded > highest ? highest : rounded;
  }
}

void gradient_run(const float* gradients, const float* sums, const float* factor, float low, float high, float* results,
                  int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    const float scaled = sums[k] * factor[k];
    // NaN passes the gradient, as PyTorch's clip does.
    results[k] = (scaled <= low || scaled >= high ? 0.0f : gradients[k]) * factor[k];
  }
}

// Vectors [channels] several times, where channels are few, so that runs of the rows are long.
template <class T>
std::vector<T> repeated(const Call& call, int operand, int64_t repeats) {
  const double* vector = call.operands[operand].as<double>();
  std::vector<T> result;
  for (int64_t k = 0; k < repeats; ++k) result.insert(result.end(), vector, vector + call.operands[operand].size());
  return result;
}

int64_t repeats_of(int64_t channels) { return std::max<int64_t>(1, kRun / channels); }

// Calls `on_run(offset, count)` for runs of whole rows that together make up everything.
template <class OnRun>
void in_runs(int64_t size, int64_t run, OnRun&& on_run) {
  const int64_t together = std::max<int64_t>(1, 8192 / run);
  parallel_for((size + together * run - 1) / (together * run), size, [&](int64_t task) {
    const int64_t end = std::min(size, (task + 1) * together * run);
    for (int64_t k = task * together * run; k < end; k += run) on_run(k, std::min(run, end - k));
  });
}

}  // namespace

EXACTQAT_KERNEL(rounded_sums) {
  const float* sums = call.operands[0].as<float>();
  const int64_t size = call.operands[0].size(), channels = call.operands[1].size();
  if (size == 0) return;
  float* steps = call.results[0].as<float>();
  const double lowest = call.numbers.real("lowest"), highest = call.numbers.real("highest");
  const int64_t repeats = repeats_of(channels);
  if (call.numbers.integer("in_float32")) {
    const std::vector<float> factor = repeated<float>(call, 1, repeats);
    in_runs(size, repeats * channels, [&](int64_t k, int64_t count) {
      round_run_in_float32(sums + k, factor.data(), float(lowest), float(highest), steps + k, count);
    });
    return;
  }
  const auto round = call.numbers.integer("away_from_zero") ? round_run<true> : round_run<false>;
  const std::vector<double> factor = repeated<double>(call, 1, repeats), nudge = repeated<double>(call, 2, repeats);
  in_runs(size, repeats * channels, [&](int64_t k, int64_t count) {
    round(sums + k, factor.data(), nudge.data(), lowest, highest, steps + k, count);
  });
}

EXACTQAT_KERNEL(rounded_sums_gradient) {
  const float *gradients = call.operands[0].as<float>(), *sums = call.operands[1].as<float>();
  const int64_t size = call.operands[0].size(), channels = call.operands[2].size();
  if (size == 0) return;
  float* results = call.results[0].as<float>();
  const float low = float(call.numbers.real("low")), high = float(call.numbers.real("high"));
  const int64_t repeats = repeats_of(channels);
  const std::vector<float> factor = repeated<float>(call, 2, repeats);
  in_runs(size, repeats * channels, [&](int64_t k, int64_t count) {
    gradient_run(gradients + k, sums + k, factor.data(), low, high, results + k, count);
  });
}

}  // namespace exactqat
