// SPDX-License-Identifier: Apache-2.0
// FusedBatchNorm* and its gradient: the same arithmetic as reference/fused_batch_norm.py, float64 inside, rounded once.
#include <cmath>
#include <limits>

#include "call.h"
#include "reduce.h"

namespace exactqat {
namespace {

struct Layout {
  int64_t outer, channels, inner;
  int64_t rows() const { return outer * inner; }
  int64_t size() const { return outer * channels * inner; }
};

Layout layout_of(const Numbers& numbers) {
  return {numbers.integer("outer"), numbers.integer("channels"), numbers.integer("inner")};
}

template <class T>
Doubles doubles(const Array& vector) {
  const T* data = vector.as<T>();
  Doubles values(data, data + vector.size());
  // Converting float32 flushes denormals; float64 ones are flushed here, before they can be copied to a result.
  for (double& v : values) v = std::abs(v) < std::numeric_limits<T>::min() ? std::copysign(0.0, v) : v;
  return values;
}

// Two sums over the rows of each channel. term(parameter, a, b, first, second) is what the elements a[i] and b[i] add, for
// numbers and, in the same words, for vectors of channels; parameters are indexed by channel, widened if there are few
// channels, which are last. The order is that of the rows (n, position), whatever the layout.
template <class T, class Term>
std::array<Doubles, 2> channel_sums(const Layout& layout, const T* a, const T* b, Term&& term) {
  if (layout.size() == 0) return {Doubles(layout.channels), Doubles(layout.channels)};
  if (layout.inner == 1) return sums_of_rows(layout.outer, layout.channels, a, b, term, [](int64_t, int64_t) {});
  std::array<Doubles, 2> totals{Doubles(layout.channels), Doubles(layout.channels)};
  const int64_t rows = layout.rows(), blocks = (rows + kBlock - 1) / kBlock;
  parallel_for(layout.channels, layout.size(), [&](int64_t channel) {
    Doubles items(2 * blocks);
    T block_a[kBlock], block_b[kBlock];
    int64_t image = 0, position = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t count = std::min(kBlock, rows - block * kBlock);
      for (int64_t filled = 0; filled < count;) {
        const int64_t take = std::min(count - filled, layout.inner - position);
        const int64_t offset = (image * layout.channels + channel) * layout.inner + position;
        std::copy_n(a + offset, take, block_a + filled);
        std::copy_n(b + offset, take, block_b + filled);
        filled += take;
        position += take;
        if (position == layout.inner) position = 0, ++image;
      }
      double lanes[2][kLanes] = {};
      const auto add = [&](int64_t i, int64_t lane) {
        double first, second;
        term(channel, double(block_a[i]), double(block_b[i]), first, second);
        lanes[0][lane] += first;
        lanes[1][lane] += second;
      };
      const int64_t whole = count / kLanes * kLanes;
      for (int64_t i = 0; i < whole; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
      for (int64_t i = whole; i < count; ++i) add(i, i - whole);
      for (int s = 0; s < 2; ++s) {
        fold_lanes(lanes[s], 1);
        items[2 * block + s] = lanes[s][0];
      }
    }
    tree_fold(items.data(), blocks, 2);
    totals[0][channel] = items[0];
    totals[1][channel] = items[1];
  });
  return totals;
}

// visit(offset, parameter, step, count): runs of elements whose parameters start at `parameter` and advance by `step`.
template <class Visit>
void for_each_channel_run(const Layout& layout, Visit&& visit) {
  if (layout.inner == 1) {
    for_each_run(layout.outer, layout.channels, [&](int64_t offset, int64_t p, int64_t count) {
      visit(offset, p, std::integral_constant<int64_t, 1>{}, count);
    });
    return;
  }
  const int64_t runs = layout.outer * layout.channels;
  const int64_t runs_per_task = std::max<int64_t>(1, 32768 / std::max<int64_t>(layout.inner, 1));
  parallel_for((runs + runs_per_task - 1) / runs_per_task, layout.size(), [&](int64_t task) {
    for (int64_t run = task * runs_per_task; run < std::min(runs, (task + 1) * runs_per_task); ++run)
      visit(run * layout.inner, run % layout.channels, std::integral_constant<int64_t, 0>{}, layout.inner);
  });
}

// Parameters as the sums and as the runs of this layout index them.
Doubles for_sums(const Layout& layout, const Doubles& parameters) {
  return layout.inner == 1 ? sum_parameters(parameters.data(), layout.channels) : parameters;
}

Doubles for_runs(const Layout& layout, const Doubles& parameters) {
  return layout.inner == 1 ? widen(parameters.data(), layout.channels, layout.outer) : parameters;
}

template <class T>
void store(const Array& result, const Doubles& values) {
  T* out = result.as<T>();
  for (size_t c = 0; c < values.size(); ++c) out[c] = T(values[c]);
}

// Mean and biased variance of each channel, in one pass over values shifted by the channel's first one.
template <class T>
void statistics(const Layout& layout, const T* x, Doubles& mean, Doubles& variance) {
  Doubles first(layout.channels);
  for (int64_t c = 0; c < layout.channels; ++c) {
    const double value = double(x[c * layout.inner]);
    first[c] = std::isfinite(value) ? value : 0.0;
  }
  const Doubles shift = for_sums(layout, first);
  const auto totals = channel_sums(layout, x, x, [first_of = shift.data()](int64_t p, auto value, auto, auto& sum, auto& squares)
                                                     __attribute__((always_inline)) {
    sum = value - parameter_at<decltype(value)>(first_of, p);
    squares = sum * sum;
  });
  const double count = double(layout.rows());
  for (int64_t c = 0; c < layout.channels; ++c) {
    mean[c] = first[c] + totals[0][c] / count;
    const double v = (totals[1][c] - totals[0][c] * totals[0][c] / count) / count;
    variance[c] = v < 0.0 ? 0.0 : v;
  }
}

}  // namespace

EXACTQAT_KERNEL(fused_batch_norm) {
  FlushDenormals flush;
  const Layout layout = layout_of(call.numbers);
  const T* x = call.operands[0].as<T>();
  T* y = call.results[0].as<T>();
  if (call.results.size() > 5) *call.results[5].as<T>() = T(0);
  if (layout.size() == 0) {
    for (int r : {1, 2}) std::fill_n(call.results[r].as<T>(), layout.channels, std::numeric_limits<T>::quiet_NaN());
    for (int r : {3, 4}) std::fill_n(call.results[r].as<T>(), layout.channels, T(0));
    return;
  }
  const Doubles scale = doubles<T>(call.operands[1]), offset = doubles<T>(call.operands[2]);
  Doubles mean = doubles<T>(call.operands[3]), variance = doubles<T>(call.operands[4]);
  const double epsilon = T(call.numbers.real("epsilon")), factor = T(call.numbers.real("exponential_avg_factor"));
  Doubles running_mean, running_variance;
  if (call.numbers.integer("is_training")) {
    Doubles batch_mean(layout.channels), batch_variance(layout.channels);
    statistics(layout, x, batch_mean, batch_variance);
    const double count = double(layout.rows()), bessel = count / std::max(count - 1.0, 1.0);
    running_mean = batch_mean;
    running_variance = batch_variance;
    const bool keep_old = call.numbers.real("exponential_avg_factor") != 1.0;
    for (int64_t c = 0; c < layout.channels; ++c) {
      running_variance[c] = batch_variance[c] * bessel;
      if (keep_old) {
        running_mean[c] = (1.0 - factor) * mean[c] + factor * batch_mean[c];
        running_variance[c] = (1.0 - factor) * variance[c] + factor * running_variance[c];
      }
    }
    mean = batch_mean;
    variance = batch_variance;
  } else {
    running_mean = mean;
    running_variance = variance;
  }
  Doubles slope(layout.channels);
  for (int64_t c = 0; c < layout.channels; ++c) slope[c] = 1.0 / std::sqrt(variance[c] + epsilon) * scale[c];
  const Doubles m = for_runs(layout, mean), s = for_runs(layout, slope), o = for_runs(layout, offset);
  for_each_channel_run(layout, [&](int64_t begin, int64_t p, auto step, int64_t count) {
    for (int64_t k = 0; k < count; ++k)
      y[begin + k] = T((double(x[begin + k]) - m[p + step * k]) * s[p + step * k] + o[p + step * k]);
  });
  store<T>(call.results[1], running_mean);
  store<T>(call.results[2], running_variance);
  store<T>(call.results[3], mean);
  store<T>(call.results[4], variance);
}

EXACTQAT_KERNEL(channel_sum) {
  FlushDenormals flush;
  const Layout layout = layout_of(call.numbers);
  const T* x = call.operands[0].as<T>();
  const auto totals = channel_sums(layout, x, x, [](int64_t, auto value, auto, auto& sum, auto& nothing) {
    sum = value;
    nothing = decltype(value){};
  });
  store<T>(call.results[0], totals[0]);
}

EXACTQAT_KERNEL(fused_batch_norm_grad) {
  FlushDenormals flush;
  const Layout layout = layout_of(call.numbers);
  const T *gradients = call.operands[0].as<T>(), *x = call.operands[1].as<T>();
  T* x_backprop = call.results[0].as<T>();
  if (layout.size() == 0) {
    for (int r : {1, 2}) std::fill_n(call.results[r].as<T>(), layout.channels, T(0));
    return;
  }
  const Doubles scale = doubles<T>(call.operands[2]), mean = doubles<T>(call.operands[3]);
  const Doubles variance = doubles<T>(call.operands[4]);
  const double epsilon = T(call.numbers.real("epsilon")), rows = double(layout.rows());
  const bool training = call.numbers.integer("is_training");
  const Doubles mean_for_sums = for_sums(layout, mean);
  const auto totals = channel_sums(layout, gradients, x, [means = mean_for_sums.data()](int64_t p, auto g, auto value, auto& sum, auto& product)
                                                             __attribute__((always_inline)) {
    sum = g;
    product = g * (value - parameter_at<decltype(value)>(means, p));
  });
  Doubles factor(layout.channels), gradient_mean(layout.channels), slope(layout.channels), scale_backprop(layout.channels);
  for (int64_t c = 0; c < layout.channels; ++c) {
    const double inverse = 1.0 / std::sqrt(variance[c] + epsilon);
    factor[c] = scale[c] * inverse;
    gradient_mean[c] = totals[0][c] / rows;
    slope[c] = (inverse * inverse) * (totals[1][c] / rows);
    scale_backprop[c] = totals[1][c] * inverse;
  }
  const Doubles f = for_runs(layout, factor), g = for_runs(layout, gradient_mean), s = for_runs(layout, slope);
  const Doubles m = for_runs(layout, mean);
  for_each_channel_run(layout, [&](int64_t begin, int64_t p, auto step, int64_t count) {
    if (training)
      for (int64_t k = 0; k < count; ++k) {
        const int64_t q = p + step * k;
        x_backprop[begin + k] = T(f[q] * ((double(gradients[begin + k]) - g[q]) - (double(x[begin + k]) - m[q]) * s[q]));
      }
    else
      for (int64_t k = 0; k < count; ++k) x_backprop[begin + k] = T(double(gradients[begin + k]) * f[p + step * k]);
  });
  store<T>(call.results[1], scale_backprop);
  store<T>(call.results[2], totals[0]);
}

}  // namespace exactqat
