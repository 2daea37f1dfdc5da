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
template <class T, class From>
std::vector<T> repeated(const From* vector, int64_t channels, int64_t repeats) {
  std::vector<T> result;
  for (int64_t k = 0; k < repeats; ++k) result.insert(result.end(), vector, vector + channels);
  return result;
}

// A multiplier of the sums in Q31, as device/arithmetic.py's fixed_point has it.
struct FixedPoint {
  int64_t significand;
  int exponent;
};

FixedPoint fixed_point(double multiplier) {
  int exponent = 0;
  const double fraction = std::frexp(multiplier, &exponent);
  auto significand = int64_t(std::floor(fraction * 2147483648.0 + 0.5));
  if (significand == int64_t{1} << 31) significand = int64_t{1} << 30, ++exponent;
  return exponent < -31 ? FixedPoint{0, 0} : FixedPoint{significand, exponent};
}

// Both roundings of a sum, step by step.
void round_twice_run(const float* sums, const FixedPoint* factor, double lowest, double highest, float* steps, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    double rounded = sums[k];  // what is no whole number stays what it is
    if (std::isfinite(sums[k])) {
      const int left = std::clamp(factor[k].exponent, 0, 63), right = std::max(-factor[k].exponent, 0);
      // int32 wraps in the kernels too.
      const int64_t shifted = int32_t(uint32_t(uint64_t(int64_t(sums[k])) << left));
      const int64_t high = (shifted * factor[k].significand + (int64_t{1} << 30)) >> 31;
      const int64_t half = (int64_t{1} << right) >> 1;
      rounded = double((high + half - int64_t(high < 0 && right > 0)) >> right);
    }
    rounded = rounded < lowest ? lowest : rounded;
    steps[k] = float(rounded > highest ? highest : rounded);
  }
}

// Of what is known of a layer's grids when a program runs.
struct Grid {
  float input_scale, result_scale, lowest, highest, low, high;
};

Grid grid_of(const Array& array) {
  const float* numbers = array.as<float>();
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]};
}

// [channels], in the order in which the kernels of the runtimes multiply and divide.
template <class T>
std::vector<T> factors_of(const Array& scale, const Grid& grid) {
  std::vector<T> factors(size_t(scale.size()));
  for (size_t c = 0; c < factors.size(); ++c)
    factors[c] = T(grid.input_scale) * T(scale.as<float>()[c]) / T(grid.result_scale);
  return factors;
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

EXACTQAT_KERNEL(rounded_sums_by_grid) {
  const float* sums = call.operands[0].as<float>();
  const Array& scale = call.operands[1];
  const int64_t size = call.operands[0].size(), channels = scale.size();
  if (size == 0) return;
  float* steps = call.results[0].as<float>();
  const Grid grid = grid_of(call.operands[2]);
  const int64_t repeats = repeats_of(channels), rounding = call.numbers.integer("rounding");
  const auto each_run = [&](auto&& on_run) { in_runs(size, repeats * channels, on_run); };
  if (rounding == 0) {
    const auto factor = repeated<float>(factors_of<float>(scale, grid).data(), channels, repeats);
    return each_run([&](int64_t k, int64_t count) {
      round_run_in_float32(sums + k, factor.data(), grid.lowest, grid.highest, steps + k, count);
    });
  }
  std::vector<double> factor = factors_of<double>(scale, grid), nudge(factor.size());
  if (rounding == 2) {
    std::vector<FixedPoint> pairs;
    for (double each : factor) pairs.push_back(fixed_point(each));
    // Further shifts are more than float64 holds beside the product.
    if (!std::all_of(pairs.begin(), pairs.end(), [](const FixedPoint& f) { return f.exponent <= 0 && f.exponent >= -12; })) {
      const auto every = repeated<FixedPoint>(pairs.data(), channels, repeats);
      return each_run([&](int64_t k, int64_t count) {
        round_twice_run(sums + k, every.data(), grid.lowest, grid.highest, steps + k, count);
      });
    }
    for (size_t c = 0; c < factor.size(); ++c) {
      factor[c] = std::ldexp(double(pairs[c].significand), pairs[c].exponent - 31);
      nudge[c] = pairs[c].exponent < 0 ? std::ldexp(1.0, pairs[c].exponent - 1) : 0.0;
    }
  }
  const auto round = rounding == 1 ? round_run<true> : round_run<false>;
  const auto factors = repeated<double>(factor.data(), channels, repeats), nudges = repeated<double>(nudge.data(), channels, repeats);
  each_run([&](int64_t k, int64_t count) {
    round(sums + k, factors.data(), nudges.data(), grid.lowest, grid.highest, steps + k, count);
  });
}

EXACTQAT_KERNEL(rounded_sums_by_grid_gradient) {
  const float *gradients = call.operands[0].as<float>(), *sums = call.operands[1].as<float>();
  const int64_t size = call.operands[0].size(), channels = call.operands[2].size();
  if (size == 0) return;
  float* results = call.results[0].as<float>();
  const Grid grid = grid_of(call.operands[3]);
  const int64_t repeats = repeats_of(channels);
  const auto factor = repeated<float>(factors_of<float>(call.operands[2], grid).data(), channels, repeats);
  in_runs(size, repeats * channels, [&](int64_t k, int64_t count) {
    gradient_run(gradients + k, sums + k, factor.data(), grid.low, grid.high, results + k, count);
  });
}

}  // namespace exactqat
