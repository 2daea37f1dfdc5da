// SPDX-License-Identifier: Apache-2.0
// FusedBatchNorm* and its gradient: the same arithmetic as reference/fused_batch_norm.py, float64 inside, rounded once.
#include <cmath>
#include <limits>

#include "call.h"
#include "reduce.h"
#include "simd.h"

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

using Doubles = std::vector<double>;

template <class T>
Doubles doubles(const Array& vector) {
  const T* data = vector.as<T>();
  return Doubles(data, data + vector.size());
}

using Lanes = Vector<double>;

// One block of 64 rows for V vectors of channels, lanes held in registers: four of the eight at a time, so that every row is
// read once. `partial` is the number of channels in the last vector if it is not full, else 0.
template <int V, class T, class Term>
void block_sums(const T* a, const T* b, int64_t rows, int64_t channels, int64_t channel, int64_t partial, Term&& term,
                double* first_sums, double* second_sums) {
  constexpr int kHalf = kLanes / 2;
  const auto load = [&](const T* from, int v) {
    return partial && v == V - 1 ? Lanes::load(from + v * Lanes::kWidth, partial) : Lanes::load(from + v * Lanes::kWidth);
  };
  Lanes sums[2][kLanes][V];
  for (int half = 0; half < kLanes; half += kHalf) {
    Lanes first[kHalf][V], second[kHalf][V];
    const auto add_row = [&](int64_t row, int lane) {
      for (int v = 0; v < V; ++v) {
        Lanes x, y;
        term(channel + v * Lanes::kWidth, load(a + row * channels, v), load(b + row * channels, v), x, y);
        first[lane][v] = first[lane][v] + x;
        second[lane][v] = second[lane][v] + y;
      }
    };
    int64_t row = half;
    for (; row + kHalf <= rows; row += kLanes)
      for (int lane = 0; lane < kHalf; ++lane) add_row(row + lane, lane);
    for (int lane = 0; lane < kHalf && row + lane < rows; ++lane) add_row(row + lane, lane);
    for (int lane = 0; lane < kHalf; ++lane)
      for (int v = 0; v < V; ++v) sums[0][half + lane][v] = first[lane][v], sums[1][half + lane][v] = second[lane][v];
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      for (int v = 0; v < V; ++v)
        for (int s = 0; s < 2; ++s) sums[s][lane][v] = sums[s][lane][v] + sums[s][lane + half][v];
  for (int v = 0; v < V; ++v) {
    const int64_t lanes = partial && v == V - 1 ? partial : Lanes::kWidth;
    sums[0][0][v].store(first_sums + v * Lanes::kWidth, lanes);
    sums[1][0][v].store(second_sums + v * Lanes::kWidth, lanes);
  }
}

// Channels last: blocks of rows, in each of them the channels in pieces that leave registers for the lanes.
template <class T, class Term>
std::array<Doubles, 2> sums_of_rows(const Layout& layout, const T* a, const T* b, Term&& term) {
  constexpr int V = Lanes::kWidth >= 8 ? 2 : 1;
  const int64_t rows = layout.outer, channels = layout.channels, blocks = (rows + kBlock - 1) / kBlock;
  const int64_t blocks_per_task = std::max<int64_t>(1, 32768 / (kBlock * channels));
  Doubles items(2 * blocks * channels);
  parallel_for((blocks + blocks_per_task - 1) / blocks_per_task, layout.size(), [&](int64_t task) {
    for (int64_t block = task * blocks_per_task; block < std::min(blocks, (task + 1) * blocks_per_task); ++block) {
      const int64_t offset = block * kBlock * channels, count = std::min(kBlock, rows - block * kBlock);
      double *first = items.data() + 2 * block * channels, *second = first + channels;
      int64_t channel = 0;
      const auto piece = [&]<int Vectors>(int64_t partial) {
        block_sums<Vectors>(a + offset + channel, b + offset + channel, count, channels, channel, partial, term, first + channel,
                            second + channel);
        channel += Vectors * Lanes::kWidth;
      };
      while (channel + V * Lanes::kWidth <= channels) piece.template operator()<V>(0);
      while (channel + Lanes::kWidth <= channels) piece.template operator()<1>(0);
      if (channel < channels) piece.template operator()<1>(channels - channel);
    }
  });
  tree_fold(items.data(), blocks, 2 * channels);
  return {Doubles(items.begin(), items.begin() + channels), Doubles(items.begin() + channels, items.begin() + 2 * channels)};
}

// Two sums over the rows of each channel. term(parameter, a, b, first, second) is what the elements a[i] and b[i] add, for
// numbers and, in the same words, for vectors of channels; parameters are indexed by channel, widened if there are few
// channels, which are last. The order is that of the rows (n, position), whatever the layout.
template <class T, class Term>
std::array<Doubles, 2> channel_sums(const Layout& layout, const T* a, const T* b, Term&& term) {
  if (layout.size() == 0) return {Doubles(layout.channels), Doubles(layout.channels)};
  if (layout.inner == 1 && layout.channels >= Lanes::kWidth) return sums_of_rows(layout, a, b, term);
  if (layout.inner == 1)
    return column_sums<2>(layout.outer, layout.channels, [&](int64_t offset, int64_t p, auto count, int64_t repeats,
                                                                  double* const* lanes) {
      for (; repeats > 0; --repeats, offset += count)
        for (int64_t k = 0; k < count; ++k) {
          double first, second;
          term(p + k, double(a[offset + k]), double(b[offset + k]), first, second);
          lanes[0][k] += first;
          lanes[1][k] += second;
        }
    });
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

// Parameters as the runs and sums of this layout index them.
Doubles spread(const Layout& layout, const Doubles& parameters) {
  Doubles wide = layout.inner == 1 ? widen(parameters.data(), layout.channels) : parameters;
  wide.resize(wide.size() + Lanes::kWidth);
  return wide;
}

// A parameter, or those of a vector of channels; `spread` leaves room behind the last one.
template <class Value>
Value parameter_at(const Doubles& parameters, int64_t p) {
  if constexpr (std::is_same_v<Value, double>) return parameters[p];
  else return Value::load(parameters.data() + p);
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
  const Doubles shift = spread(layout, first);
  const auto totals = channel_sums(layout, x, x, [&](int64_t p, auto value, auto, auto& sum, auto& squares) {
    sum = value - parameter_at<decltype(value)>(shift, p);
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
  const Doubles m = spread(layout, mean), s = spread(layout, slope), o = spread(layout, offset);
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
  const Doubles m = spread(layout, mean);
  const auto totals = channel_sums(layout, gradients, x, [&](int64_t p, auto g, auto value, auto& sum, auto& product) {
    sum = g;
    product = g * (value - parameter_at<decltype(value)>(m, p));
  });
  Doubles factor(layout.channels), gradient_mean(layout.channels), slope(layout.channels), scale_backprop(layout.channels);
  for (int64_t c = 0; c < layout.channels; ++c) {
    const double inverse = 1.0 / std::sqrt(variance[c] + epsilon);
    factor[c] = scale[c] * inverse;
    gradient_mean[c] = totals[0][c] / rows;
    slope[c] = (inverse * inverse) * (totals[1][c] / rows);
    scale_backprop[c] = totals[1][c] * inverse;
  }
  const Doubles f = spread(layout, factor), g = spread(layout, gradient_mean), s = spread(layout, slope);
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
