// SPDX-License-Identifier: Apache-2.0
// FakeQuantWithMinMax*: the same arithmetic as reference/fake_quant.py.
#include <cmath>
#include <cstring>

#include "arithmetic.h"
#include "call.h"
#include "nudge.h"
#include "reduce.h"

namespace exactqat {
namespace {

// The same for each channel, one array for each quantity, widened for runs.
template <class T>
struct NudgedChannels {
  std::vector<T> nudged_min, nudged_max, nudged_scale, inv_nudged_scale, quant_zero;
  std::vector<uint8_t> no_range;
  bool any_no_range = false;

  NudgedChannels(const T* min, const T* max, int64_t channels, int64_t rows, const Numbers& numbers) {
    std::vector<T> v[5];
    std::vector<uint8_t> none(channels);
    for (auto& quantity : v) quantity.resize(channels);
    for (int64_t c = 0; c < channels; ++c) {
      const Nudged<T> n = nudge(min[c], max[c], numbers);
      v[0][c] = n.nudged_min, v[1][c] = n.nudged_max, v[2][c] = n.nudged_scale;
      v[3][c] = n.inv_nudged_scale, v[4][c] = n.quant_zero;
      none[c] = n.no_range;
      any_no_range |= n.no_range;
    }
    nudged_min = widen(v[0].data(), channels, rows), nudged_max = widen(v[1].data(), channels, rows);
    nudged_scale = widen(v[2].data(), channels, rows), inv_nudged_scale = widen(v[3].data(), channels, rows);
    quant_zero = widen(v[4].data(), channels, rows), no_range = widen(none.data(), channels, rows);
  }
};

template <class T, bool Division>
void quantize_whole(const T* inputs, T* outputs, int64_t size, const Nudged<T>& n) {
  for_each_piece(size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T shifted = clamp(inputs[i], n.nudged_min, n.nudged_max) - n.nudged_min;
      const T steps = Division ? shifted / n.nudged_scale : shifted * n.inv_nudged_scale;
      outputs[i] = std::floor((steps - n.quant_zero) + T(0.5)) * n.nudged_scale;
    }
  });
}

}  // namespace

EXACTQAT_KERNEL(fake_quant_with_min_max_args) {
  FlushDenormals flush;
  const auto n = nudge(T(call.numbers.real("min")), T(call.numbers.real("max")), call.numbers);
  quantize_whole<T, false>(call.operands[0].as<T>(), call.results[0].as<T>(), call.operands[0].size(), n);
}

EXACTQAT_KERNEL(fake_quant_with_min_max_vars) {
  FlushDenormals flush;
  const auto n = nudge(*call.operands[1].as<T>(), *call.operands[2].as<T>(), call.numbers);
  T* outputs = call.results[0].as<T>();
  const int64_t size = call.operands[0].size();
  if (n.no_range) std::fill_n(outputs, size, T(0));
  else quantize_whole<T, true>(call.operands[0].as<T>(), outputs, size, n);
}

EXACTQAT_KERNEL(fake_quant_with_min_max_vars_per_channel) {
  FlushDenormals flush;
  const T* inputs = call.operands[0].as<T>();
  T* outputs = call.results[0].as<T>();
  const int64_t channels = call.operands[1].size(), rows = channels ? call.operands[0].size() / channels : 0;
  const NudgedChannels<T> n(call.operands[1].as<T>(), call.operands[2].as<T>(), channels, rows, call.numbers);
  for_each_run(rows, channels, [&](int64_t offset, int64_t p, int64_t count) {
    const T *low = n.nudged_min.data() + p, *high = n.nudged_max.data() + p, *scale = n.nudged_scale.data() + p;
    const T *inverse = n.inv_nudged_scale.data() + p, *zero = n.quant_zero.data() + p;
    for (int64_t k = 0; k < count; ++k) {
      const T steps = (clamp(inputs[offset + k], low[k], high[k]) - low[k]) * inverse[k];
      outputs[offset + k] = std::floor((steps - zero[k]) + T(0.5)) * scale[k];
    }
    if (n.any_no_range)
      for (int64_t k = 0; k < count; ++k)
        if (n.no_range[p + k]) outputs[offset + k] = T(0);
  });
}

EXACTQAT_KERNEL(fake_quant_with_min_max_args_gradient) {
  FlushDenormals flush;
  const T *gradients = call.operands[0].as<T>(), *inputs = call.operands[1].as<T>();
  T* backprops = call.results[0].as<T>();
  const auto n = nudge(T(call.numbers.real("min")), T(call.numbers.real("max")), call.numbers);
  for_each_piece(call.operands[1].size(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      backprops[i] = masked(gradients[i], bool((inputs[i] >= n.nudged_min) & (inputs[i] <= n.nudged_max)));
  });
}

namespace {

// Rows of channels; the whole tensor is rows of one channel.
template <class T>
void gradient_of_channels(const Call& call, int64_t channels) {
  FlushDenormals flush;
  const T *gradients = call.operands[0].as<T>(), *inputs = call.operands[1].as<T>();
  T *backprops = call.results[0].as<T>(), *backprop_min = call.results[1].as<T>(), *backprop_max = call.results[2].as<T>();
  const int64_t rows = channels ? call.operands[1].size() / channels : 0;
  const NudgedChannels<T> n(call.operands[2].as<T>(), call.operands[3].as<T>(), channels, rows, call.numbers);
  const Doubles lowest = sum_parameters(n.nudged_min.data(), channels), highest = sum_parameters(n.nudged_max.data(), channels);
  const auto sides = [low = lowest.data(), high = highest.data()](int64_t p, auto g, auto x, auto& below, auto& above)
                         __attribute__((always_inline)) {
    below = g * one_where_less(x, parameter_at<decltype(x)>(low, p));
    above = g * one_where_less(parameter_at<decltype(x)>(high, p), x);
  };
  const auto totals = sums_of_rows(rows, channels, gradients, inputs, sides, [&](int64_t start, int64_t block_rows) {
    in_runs(start, block_rows, channels, [&](int64_t offset, int64_t p, int64_t count) {
      const T *low = n.nudged_min.data() + p, *high = n.nudged_max.data() + p;
      const T *g = gradients + offset, *x = inputs + offset;
      T* out = backprops + offset;
      const auto inside = [&](int64_t k) { return bool((x[k] >= low[k]) & (x[k] <= high[k])); };
      if (!n.any_no_range) {
        for (int64_t k = 0; k < count; ++k) out[k] = masked(g[k], inside(k));
        return;
      }
      for (int64_t k = 0; k < count; ++k) {
        if (!n.no_range[p + k]) out[k] = masked(g[k], inside(k));
        else std::memmove(out + k, g + k, sizeof(T));  // a copy, denormals and NaN included
      }
    });
  });
  for (int64_t c = 0; c < channels; ++c) {
    backprop_min[c] = n.no_range[c] ? T(0) : T(totals[0][c]);
    backprop_max[c] = n.no_range[c] ? T(0) : T(totals[1][c]);
  }
}

}  // namespace

EXACTQAT_KERNEL(fake_quant_with_min_max_vars_gradient) { gradient_of_channels<T>(call, 1); }

EXACTQAT_KERNEL(fake_quant_with_min_max_vars_per_channel_gradient) {
  gradient_of_channels<T>(call, call.operands[2].size());
}

EXACTQAT_KERNEL(fake_quant_with_min_max_vars_gradient_transpose) {
  FlushDenormals flush;
  const T *to_inputs = call.operands[0].as<T>(), *to_min = call.operands[1].as<T>(), *to_max = call.operands[2].as<T>();
  const T* inputs = call.operands[3].as<T>();
  T* gradients = call.results[0].as<T>();
  const int64_t channels = call.operands[4].size();
  const int64_t rows = channels ? call.operands[3].size() / channels : 0;
  const NudgedChannels<T> n(call.operands[4].as<T>(), call.operands[5].as<T>(), channels, rows, call.numbers);
  const std::vector<T> wide_min = widen(to_min, channels, rows), wide_max = widen(to_max, channels, rows);
  for_each_run(rows, channels, [&](int64_t offset, int64_t p, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      const T x = inputs[offset + k], low = n.nudged_min[p + k], high = n.nudged_max[p + k];
      const T from = x < low ? wide_min[p + k] : x > high ? wide_max[p + k] : T(0);
      const bool inside = ((x >= low) & (x <= high)) | n.no_range[p + k];
      gradients[offset + k] = inside ? to_inputs[offset + k] : from;
    }
  });
}

}  // namespace exactqat
