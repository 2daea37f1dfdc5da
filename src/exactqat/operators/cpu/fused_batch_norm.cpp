// SPDX-License-Identifier: Apache-2.0
// FusedBatchNorm* and its gradient: the same arithmetic as reference/fused_batch_norm.py. What belongs to a channel is float64, what
// belongs to an element its own dtype.
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>

#include "arithmetic.h"
#include "call.h"
#include "channels.h"
#include "nudge.h"
#include "reduce.h"
#include "tensor.h"

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
// numbers and, in the same words, for vectors; parameters are those of `for_sums`. The order is that of the rows (n, position),
// whatever the layout.
template <class T, class Term>
std::array<Doubles, 2> channel_sums(const Layout& layout, const Tensor<T>& a, const Tensor<T>& b, const Term& term) {
  if (layout.inner == 1) return sums_of_rows(layout.outer, layout.channels, a, b, term);
  std::array<Doubles, 2> totals{Doubles(layout.channels), Doubles(layout.channels)};
  if (layout.size() == 0) return totals;
  for_each_channel_sums(layout.outer, layout.channels, layout.inner, a, b, term,
                        [&](int64_t c, int64_t count, const double* first, const double* second) {
                          std::copy_n(first, count, totals[0].data() + c);
                          std::copy_n(second, count, totals[1].data() + c);
                        });
  return totals;
}

// Parameters as the sums of this layout index them.
Doubles for_sums(const Layout& layout, const Doubles& parameters) {
  if (layout.inner == 1) return sum_parameters(parameters.data(), layout.channels);
  Doubles lanes(layout.channels * kLanes);
  for (int64_t c = 0; c < layout.channels; ++c) std::fill_n(lanes.data() + c * kLanes, kLanes, parameters[c]);
  return lanes;
}

// The pass for operands that lie elsewhere.
template <class Pass, class Operands>
Pass moved(Pass pass, const Operands& operands) {
  pass.move(operands);
  return pass;
}

// A plane of 16 bits, or any run within one channel.
template <class T, size_t N, class Pass>
void fill_plane_of_halves(Pieces<T, N>& pieces, int64_t begin, int64_t size, const typename Pass::Parameters& parameters,
                          const Pass& pass) {
  for (int64_t i = begin; i < begin + size; i += kPieceElements) {
    const int64_t count = std::min(kPieceElements, begin + size - i);
    pieces.make(i, count, [&](const auto& from, T* to) { fill_plane<false>(to, i, count, 0, parameters, moved(pass, from)); });
  }
}

// Puts a pass's values into the planes of some channels. make(lay_out) makes the pass, where lay_out(parameters) lays out those of
// the channels as its loops need them.
template <class T, size_t N, class Make>
void fill_planes(const Layout& layout, const Tensor<T>& result, const std::array<Tensor<T>, N>& operands, bool in_place,
                 int64_t channel, int64_t count, const Make& make) {
  constexpr int kTogether = 4;
  const int64_t image = layout.channels * layout.inner, begin = channel * layout.inner;
  T* out = result.data();
  if (layout.inner >= kLineElements || layout.outer < kTogether) {
    const auto pass = make([](const std::vector<T>& parameters) { return parameters.data(); });
    if constexpr (kMayBeHalves<T>) {
      if (result.in_halves()) {
        const bool past = halves_go_past_the_cache(result, layout.size(), in_place);
        Pieces<T, N> pieces(result, operands, std::min(layout.inner, kPieceElements), past);
        for (int64_t n = 0; n < layout.outer; ++n)
          for (int64_t c = channel; c < channel + count; ++c)
            fill_plane_of_halves(pieces, n * image + c * layout.inner, layout.inner, pass.of_all(c), pass);
        return;
      }
    }
    const bool past = goes_past_the_cache(out, layout.size(), layout.inner, N + 1, in_place);
    for (int64_t n = 0; n < layout.outer; ++n)
      for (int64_t c = channel; c < channel + count; ++c) {
        const int64_t plane = n * image + c * layout.inner, ahead = n + 1 < layout.outer ? image : 0;
        fill_plane(past, out, plane, layout.inner, ahead, pass.of_all(c), pass);
      }
    if (past) finish_streaming();
    return;
  }
  // Planes of less than a line: those of an image are a row, and every element of it has parameters of its own.
  const int64_t width = count * layout.inner;
  std::deque<LineVector<T>> laid_out;
  const auto pass = make([&](const std::vector<T>& parameters) {
    auto& columns = laid_out.emplace_back(width + kLineElements);
    for (int64_t c = 0; c < count; ++c) std::fill_n(columns.data() + c * layout.inner, layout.inner, parameters[channel + c]);
    std::fill_n(columns.data() + width, kLineElements, T(0));
    return columns.data();
  });
  int64_t n = 0;
  if constexpr (kMayBeHalves<T>) {
    if (result.in_halves()) {
      Pieces<T, N> pieces(result, operands, width, false);
      for (; n < layout.outer; ++n)
        pieces.make(n * image + begin, width, [&](const auto& from, T* to) {
          lines<false, 1>(n * image + begin, width, image, Stored{to, moved(pass, from)});
        });
      return;
    }
  }
  const Stored stored{out, pass};
  for (; n + kTogether <= layout.outer; n += kTogether) lines<false, kTogether>(n * image + begin, width, image, stored);
  for (; n < layout.outer; ++n) lines<false, 1>(n * image + begin, width, image, stored);
}

// The same for the whole image where channels are last.
template <class T, size_t N, class Make>
void fill_dense_rows(const Layout& layout, const Tensor<T>& out, const std::array<Tensor<T>, N>& operands, bool in_place,
                     const Make& make) {
  if (layout.size() == 0) return;
  const Rows rows(out.data(), layout.size(), layout.channels, N + 1, in_place);
  std::deque<LineVector<T>> laid_out;
  const auto pass = make([&](const std::vector<T>& parameters) {
    return laid_out.emplace_back(rows.spread(parameters.data())).data();
  });
  using Pass = std::remove_const_t<decltype(pass)>;
  if constexpr (kMayBeHalves<T>)
    if (out.in_halves())
      return rows.each_of_halves(out, operands, in_place,
                                 [&](const auto& from, T* to) { return Stored<T, Pass>{to, moved(pass, from)}; });
  rows.each(Stored<T, Pass>{out.data(), pass});
}

// The same in any layout.
template <class T, size_t N, class Make>
void fill(const Layout& layout, const Tensor<T>& out, const std::array<Tensor<T>, N>& operands, bool in_place, const Make& make) {
  if (layout.size() == 0) return;
  if (layout.inner == 1) return fill_dense_rows(layout, out, operands, in_place, make);
  if (layout.inner < kLineElements) {
    const int64_t together = channels_together(layout.rows());
    parallel_for((layout.channels + together - 1) / together, layout.size(), [&](int64_t task) {
      const int64_t channel = task * together;
      fill_planes(layout, out, operands, in_place, channel, std::min(together, layout.channels - channel), make);
    });
    return;
  }
  // Straight on through memory, image by image.
  const auto pass = make([](const std::vector<T>& parameters) { return parameters.data(); });
  const int64_t runs = layout.outer * layout.channels, runs_per_task = std::max<int64_t>(1, kTask / layout.inner);
  const auto each_run = [&](int64_t task, const auto& fill) {
    for (int64_t run = task * runs_per_task; run < std::min(runs, (task + 1) * runs_per_task); ++run)
      fill(run * layout.inner, pass.of_all(run % layout.channels));
  };
  const int64_t tasks = (runs + runs_per_task - 1) / runs_per_task;
  if constexpr (kMayBeHalves<T>) {
    if (out.in_halves()) {
      const bool past = halves_go_past_the_cache(out, layout.size(), in_place);
      return parallel_for(tasks, layout.size(), [&](int64_t task) {
        Pieces<T, N> pieces(out, operands, std::min(layout.inner, kPieceElements), past);
        each_run(task, [&](int64_t begin, const auto& parameters) {
          fill_plane_of_halves(pieces, begin, layout.inner, parameters, pass);
        });
      });
    }
  }
  const bool past = goes_past_the_cache(out.data(), layout.size(), layout.inner, N + 1, in_place);
  parallel_for(tasks, layout.size(), [&](int64_t task) {
    each_run(task, [&](int64_t begin, const auto& parameters) {
      fill_plane(past, out.data(), begin, layout.inner, 0, parameters, pass);
    });
    if (past) finish_streaming();
  });
}

template <class T>
void store(const Array& result, const Doubles& values) {
  T* out = result.as<T>();
  for (size_t c = 0; c < values.size(); ++c) out[c] = flushed_to<T>(values[c]);
}

// Mean and biased variance of each channel, from one pass over values shifted by the channel's first one.
template <class T>
struct Moments {
  double count;
  Doubles first, shift;

  Moments(const Layout& layout, const Tensor<T>& x) : count(double(layout.rows())), first(layout.channels) {
    for (int64_t c = 0; c < layout.channels; ++c) {
      const double value = double(x[c * layout.inner]);
      first[c] = std::isfinite(value) ? value : 0.0;
    }
    shift = for_sums(layout, first);
  }

  auto term() const {
    return [first_of = shift.data()](int64_t p, auto value, auto, auto& sum, auto& squares) __attribute__((always_inline)) {
      sum = value - parameter_at<decltype(value)>(first_of, p);
      squares = product_for<T>(sum, sum);
    };
  }

  // Of `channels` channels from `channel` on, from their sums. (Restricted: these are loops of divisions, worth their vectors.)
  void finish(int64_t channel, int64_t channels, const double* __restrict sums, const double* __restrict squares,
              double* __restrict mean, double* __restrict variance) const {
    const double* shift_of = first.data() + channel;
    const double rows = count;
    for (int64_t c = 0; c < channels; ++c) {
      mean[c] = shift_of[c] + quotient_for<T>(sums[c], rows);
      const double square_of_sum = quotient_for<T>(product_for<T>(sums[c], sums[c]), rows);
      const double v = quotient_for<T>(squares[c] - square_of_sum, rows);
      variance[c] = v < 0.0 ? 0.0 : v;
    }
  }
};

// also(offset, rows) is called for each block of rows if channels are last.
template <class T>
void statistics(const Layout& layout, const Tensor<T>& x, Doubles& mean, Doubles& variance, const OnRows& also = {}) {
  const Moments<T> moments(layout, x);
  const auto totals = layout.inner == 1 ? sums_of_rows(layout.outer, layout.channels, x, x, moments.term(), {}, also)
                                        : channel_sums(layout, x, x, moments.term());
  moments.finish(0, layout.channels, totals[0].data(), totals[1].data(), mean.data(), variance.data());
}

// The running statistics after a batch; `mean` and `variance` are those before it.
struct Running {
  Doubles mean, variance;
};

template <class T>
Running updated(const Layout& layout, const Numbers& numbers, const Doubles& mean, const Doubles& variance,
                const Doubles& batch_mean, const Doubles& batch_variance) {
  const double factor = T(numbers.real("exponential_avg_factor"));
  const double count = double(layout.rows()), bessel = count / std::max(count - 1.0, 1.0);
  const bool keep_old = numbers.real("exponential_avg_factor") != 1.0;
  Running running{batch_mean, batch_variance};
  for (int64_t c = 0; c < layout.channels; ++c) {
    running.variance[c] = product_for<T>(batch_variance[c], bessel);
    if (keep_old) {
      running.mean[c] = product_for<T>(1.0 - factor, mean[c]) + product_for<T>(factor, batch_mean[c]);
      running.variance[c] = product_for<T>(1.0 - factor, variance[c]) + product_for<T>(factor, running.variance[c]);
    }
  }
  return running;
}

template <class T>
void slopes_of(const double* __restrict scale, const double* __restrict variance, double epsilon, int64_t channels,
               double* __restrict slope) {
  for (int64_t c = 0; c < channels; ++c)
    slope[c] = product_for<T>(1.0 / std::sqrt(variance[c] + epsilon), scale[c]);
}

template <class T>
Doubles slope_of(const Doubles& scale, const Doubles& variance, double epsilon) {
  Doubles slope(scale.size());
  slopes_of<T>(scale.data(), variance.data(), epsilon, int64_t(scale.size()), slope.data());
  return slope;
}

// What an element is normalized with, in its own dtype.
template <class T>
struct Coefficients {
  std::vector<T> mean, slope, offset;

  explicit Coefficients(int64_t channels) : mean(channels), slope(channels), offset(channels) {}

  // For `channels` channels from `channel` on. The offset makes good what is left out of the mean.
  void set(int64_t channel, int64_t channels, const Doubles& of_mean, const Doubles& of_slope, const Doubles& of_offset) {
    for (int64_t c = channel; c < channel + channels; ++c) {
      mean[c] = flushed_to<T>(of_mean[c]);
      slope[c] = flushed_to<T>(of_slope[c]);
      const double left_out = double(mean[c]) - of_mean[c];
      offset[c] = flushed_to<T>(left_out == 0.0 ? of_offset[c] : of_offset[c] + product_for<T>(left_out, of_slope[c]));
    }
  }
};

template <class T>
struct Normalization {
  using Element = T;
  using V = Vector<T>;
  const T *x, *mean, *slope, *offset;

  struct Parameters {
    V mean, slope, offset;
  };
  Parameters of(int64_t p) const { return {V::load(mean + p), V::load(slope + p), V::load(offset + p)}; }
  Parameters of_all(int64_t c) const { return {V::all(mean[c]), V::all(slope[c]), V::all(offset[c])}; }
  void prefetch(int64_t i) const { __builtin_prefetch(x + i); }
  void move(const std::array<const T*, 1>& operands) { x = operands[0]; }
  template <class Extent>
  V value(const Parameters& q, int64_t i, Extent extent) const {
    return flushed_product(load(x + i, extent) - q.mean, q.slope) + q.offset;
  }
};

// Makes it, from the coefficients of the channels.
template <class T>
auto normalization(const Tensor<T>& x, const Coefficients<T>& coefficients) {
  return [&, x](auto&& lay_out) {
    return Normalization<T>{x.data(), lay_out(coefficients.mean), lay_out(coefficients.slope), lay_out(coefficients.offset)};
  };
}

// Statistics and result in one go, for channels that are not last.
template <class T>
void normalize_channels(const Layout& layout, const Tensor<T>& x, const Doubles& scale, const Doubles& offset, double epsilon,
                        Doubles& mean, Doubles& variance, const Tensor<T>& y) {
  const Moments<T> moments(layout, x);
  Doubles slope(layout.channels);
  Coefficients<T> coefficients(layout.channels);
  const bool straight = sums_go_straight_on(layout.outer, layout.channels, layout.inner, x), in_place = y.address() == x.address();
  const auto then = [&](int64_t begin, int64_t count, const double* sums, const double* squares) {
    moments.finish(begin, count, sums, squares, mean.data() + begin, variance.data() + begin);
    slopes_of<T>(scale.data() + begin, variance.data() + begin, epsilon, count, slope.data() + begin);
    coefficients.set(begin, count, mean, slope, offset);
    if (!straight) fill_planes(layout, y, std::array{x}, in_place, begin, count, normalization(x, coefficients));
  };
  for_each_channel_sums(layout.outer, layout.channels, layout.inner, x, x, moments.term(), then);
  if (straight) fill(layout, y, std::array{x}, in_place, normalization(x, coefficients));
}

// What a training gradient is made with.
template <class T>
struct Backprop {
  using Element = T;
  using V = Vector<T>;
  const T *gradients, *x, *factor, *gradient_mean, *slope, *mean;

  struct Parameters {
    V factor, gradient_mean, slope, mean;
  };
  Parameters of(int64_t p) const {
    return {V::load(factor + p), V::load(gradient_mean + p), V::load(slope + p), V::load(mean + p)};
  }
  Parameters of_all(int64_t c) const {
    return {V::all(factor[c]), V::all(gradient_mean[c]), V::all(slope[c]), V::all(mean[c])};
  }
  void prefetch(int64_t i) const {
    __builtin_prefetch(gradients + i);
    __builtin_prefetch(x + i);
  }
  void move(const std::array<const T*, 2>& operands) { gradients = operands[0], x = operands[1]; }
  template <class Extent>
  V value(const Parameters& q, int64_t i, Extent extent) const {
    const V centered = load(x + i, extent) - q.mean, shifted = load(gradients + i, extent) - q.gradient_mean;
    return flushed_product(q.factor, shifted - flushed_product(centered, q.slope));
  }
};

// The same with statistics that do not depend on x.
template <class T>
struct InferenceBackprop {
  using Element = T;
  using V = Vector<T>;
  const T *gradients, *factor;

  using Parameters = V;
  Parameters of(int64_t p) const { return V::load(factor + p); }
  Parameters of_all(int64_t c) const { return V::all(factor[c]); }
  void prefetch(int64_t i) const { __builtin_prefetch(gradients + i); }
  void move(const std::array<const T*, 1>& operands) { gradients = operands[0]; }
  template <class Extent>
  V value(const Parameters& factor, int64_t i, Extent extent) const {
    return flushed_product(load(gradients + i, extent), factor);
  }
};

// The gradient of a normalization: `before` makes the gradients of a block of rows (see sums_of_rows).
template <class T>
void gradient(const Layout& layout, const Tensor<T>& gradients, const Tensor<T>& x, const Doubles& scale, const Doubles& mean,
              const Doubles& variance, double epsilon, bool training, const Tensor<T>& x_backprop, const Array& scale_backprop,
              const Array& offset_backprop, const OnRows& before = {}) {
  const Doubles mean_for_sums = for_sums(layout, mean);
  const auto term = [means = mean_for_sums.data()](int64_t p, auto g, auto value, auto& sum, auto& product)
                        __attribute__((always_inline)) {
    sum = g;
    product = product_for<T>(g, value - parameter_at<decltype(value)>(means, p));
  };
  std::vector<T> factor(layout.channels), gradient_mean(layout.channels), slope(layout.channels), means(layout.channels);
  for (int64_t c = 0; c < layout.channels; ++c) means[c] = flushed_to<T>(mean[c]);
  const auto factors = [&](int64_t begin, int64_t count, const double* __restrict sums, const double* __restrict products) {
    const double rows = double(layout.rows()), *variances = variance.data() + begin, *scales = scale.data() + begin;
    T *__restrict f = factor.data() + begin, *__restrict m = gradient_mean.data() + begin, *__restrict s = slope.data() + begin;
    T *__restrict to_scale = scale_backprop.as<T>() + begin, *__restrict to_offset = offset_backprop.as<T>() + begin;
    for (int64_t c = 0; c < count; ++c) {
      const double inverse = 1.0 / std::sqrt(variances[c] + epsilon);
      f[c] = flushed_to<T>(product_for<T>(scales[c], inverse));
      m[c] = flushed_to<T>(quotient_for<T>(sums[c], rows));
      s[c] = flushed_to<T>(product_for<T>(product_for<T>(inverse, inverse), quotient_for<T>(products[c], rows)));
      to_scale[c] = flushed_to<T>(product_for<T>(products[c], inverse));
      to_offset[c] = flushed_to<T>(sums[c]);
    }
  };
  const auto backprop = [&](auto&& lay_out) {
    return Backprop<T>{gradients.data(), x.data(), lay_out(factor), lay_out(gradient_mean), lay_out(slope), lay_out(means)};
  };
  const auto inference_backprop = [&](auto&& lay_out) { return InferenceBackprop<T>{gradients.data(), lay_out(factor)}; };
  const bool in_place = x_backprop.address() == gradients.address() || x_backprop.address() == x.address();
  const std::array both{gradients, x};
  const std::array alone{gradients};
  if (layout.inner > 1) {
    const bool straight = sums_go_straight_on(layout.outer, layout.channels, layout.inner, x);
    for_each_channel_sums(layout.outer, layout.channels, layout.inner, gradients, x, term,
                          [&](int64_t begin, int64_t count, const double* sums, const double* products) {
                            factors(begin, count, sums, products);
                            if (straight) return;
                            if (training) fill_planes(layout, x_backprop, both, in_place, begin, count, backprop);
                            else fill_planes(layout, x_backprop, alone, in_place, begin, count, inference_backprop);
                          });
    if (!straight) return;
  } else {
    const auto totals = sums_of_rows(layout.outer, layout.channels, gradients, x, term, before);
    factors(0, layout.channels, totals[0].data(), totals[1].data());
  }
  if (training) fill(layout, x_backprop, both, in_place, backprop);
  else fill(layout, x_backprop, alone, in_place, inference_backprop);
}

}  // namespace

EXACTQAT_TENSOR_KERNEL(fused_batch_norm) {
  FlushDenormals flush;
  const Layout layout = layout_of(call.numbers);
  const Tensor<T> x(call.operands[0]), y(call.results[0]);
  if (call.results.size() > 5) *call.results[5].as<T>() = T(0);
  if (layout.size() == 0) {
    for (int r : {1, 2}) std::fill_n(call.results[r].as<T>(), layout.channels, std::numeric_limits<T>::quiet_NaN());
    for (int r : {3, 4}) std::fill_n(call.results[r].as<T>(), layout.channels, T(0));
    return;
  }
  const Doubles scale = doubles<T>(call.operands[1]), offset = doubles<T>(call.operands[2]);
  Doubles mean = doubles<T>(call.operands[3]), variance = doubles<T>(call.operands[4]);
  const double epsilon = T(call.numbers.real("epsilon"));
  Running running{mean, variance};
  const bool training = call.numbers.integer("is_training"), by_channel = training && layout.inner > 1;
  if (training) {
    Doubles batch_mean(layout.channels), batch_variance(layout.channels);
    if (by_channel) normalize_channels(layout, x, scale, offset, epsilon, batch_mean, batch_variance, y);
    else statistics(layout, x, batch_mean, batch_variance);
    running = updated<T>(layout, call.numbers, mean, variance, batch_mean, batch_variance);
    mean = batch_mean;
    variance = batch_variance;
  }
  if (!by_channel) {
    Coefficients<T> coefficients(layout.channels);
    coefficients.set(0, layout.channels, mean, slope_of<T>(scale, variance, epsilon), offset);
    fill(layout, y, std::array{x}, y.address() == x.address(), normalization(x, coefficients));
  }
  store<T>(call.results[1], running.mean);
  store<T>(call.results[2], running.variance);
  store<T>(call.results[3], mean);
  store<T>(call.results[4], variance);
}

EXACTQAT_TENSOR_KERNEL(channel_sum) {
  FlushDenormals flush;
  const Layout layout = layout_of(call.numbers);
  const Tensor<T> x(call.operands[0]);
  const auto totals = channel_sums(layout, x, x, [](int64_t, auto value, auto, auto& sum, auto& nothing) {
    sum = value;
    nothing = decltype(value){};
  });
  store<T>(call.results[0], totals[0]);
}

EXACTQAT_TENSOR_KERNEL(fused_batch_norm_grad) {
  FlushDenormals flush;
  const Layout layout = layout_of(call.numbers);
  const Tensor<T> gradients(call.operands[0]), x(call.operands[1]), x_backprop(call.results[0]);
  if (layout.size() == 0) {
    for (int r : {1, 2}) std::fill_n(call.results[r].as<T>(), layout.channels, T(0));
    return;
  }
  const Doubles scale = doubles<T>(call.operands[2]), mean = doubles<T>(call.operands[3]);
  const Doubles variance = doubles<T>(call.operands[4]);
  const double epsilon = T(call.numbers.real("epsilon"));
  const bool training = call.numbers.integer("is_training");
  gradient(layout, gradients, x, scale, mean, variance, epsilon, training, x_backprop, call.results[1], call.results[2]);
}

// Batch norm, activation and fake quantization in one, for [rows, channels].

namespace {

Layout rows_of(const Call& call, int x) {
  const Array& array = call.operands[x];
  const int64_t channels = array.shape.back();
  return {channels ? array.size() / channels : 0, channels, 1};
}

// As in reference/fused_batch_norm.py.
enum Activation : int64_t { kNone, kRelu, kRelu6 };

template <class T>
T activated(T y, int64_t activation) {
  if (activation != kNone) y = y < T(0) ? T(0) : y;
  return activation == kRelu6 && y > T(6) ? T(6) : y;
}

// The smallest and the largest element of each channel, block by block; NaN is passed over.
template <class T>
struct Extremes {
  Tensor<T> x;
  int64_t channels, blocks;
  std::unique_ptr<T[]> block_ends;

  Extremes(const Layout& layout, const Tensor<T>& x)
      : x(x),
        channels(layout.channels),
        blocks((layout.rows() + kBlock - 1) / kBlock),
        block_ends(std::make_unique_for_overwrite<T[]>(2 * blocks * channels)) {}

  void operator()(int64_t offset, int64_t rows) {
    using V = Vector<T>;
    LineVector<T> room(x.in_halves() ? rows * channels : 0);
    const T* values_of_rows = x.read(offset, rows * channels, room.data());
    T *low = block_ends.get() + 2 * offset / kBlock, *high = low + channels;
    const auto column = [&](int64_t c, auto extent) __attribute__((always_inline)) {
      const T* from = values_of_rows + offset + c;
      V lowest = V::all(std::numeric_limits<T>::infinity()), highest = V::all(-std::numeric_limits<T>::infinity());
      for (int64_t row = 0; row < rows; ++row) {
        const V values = load(from + row * channels, extent);
        lowest = lesser(values, lowest);
        highest = greater(values, highest);
      }
      store(low + c, lowest, extent);
      store(high + c, highest, extent);
    };
    int64_t c = 0;
    for (; c + V::kWidth <= channels; c += V::kWidth) column(c, Whole{});
    if (c < channels) column(c, Part{channels - c});
  }

  // Of all blocks: the smallest, then the largest.
  std::vector<T> of_all() const {
    std::vector<T> ends(block_ends.get(), block_ends.get() + 2 * channels);
    for (int64_t block = 1; block < blocks; ++block)
      for (int64_t c = 0; c < channels; ++c) {
        const T low = block_ends[2 * block * channels + c], high = block_ends[(2 * block + 1) * channels + c];
        ends[c] = low < ends[c] ? low : ends[c];
        ends[channels + c] = high > ends[channels + c] ? high : ends[channels + c];
      }
    return ends;
  }
};

}  // namespace

EXACTQAT_TENSOR_KERNEL(batch_norm_statistics) {
  FlushDenormals flush;
  const Layout layout = rows_of(call, 0);
  const Tensor<T> x(call.operands[0]);
  const Doubles scale = doubles<T>(call.operands[1]), offset = doubles<T>(call.operands[2]);
  Doubles mean(layout.channels), variance(layout.channels);
  Extremes<T> extremes(layout, x);
  statistics(layout, x, mean, variance, [&](int64_t begin, int64_t rows) { extremes(begin, rows); });
  const Running running =
      updated<T>(layout, call.numbers, doubles<T>(call.operands[3]), doubles<T>(call.operands[4]), mean, variance);
  Coefficients<T> coefficients(layout.channels);
  coefficients.set(0, layout.channels, mean, slope_of<T>(scale, variance, T(call.numbers.real("epsilon"))), offset);
  // Every step of a normalization is monotonic, and so are the roundings: its ends are those of x.
  const std::vector<T> ends = extremes.of_all();
  const int64_t activation = call.numbers.integer("activation");
  T low = std::numeric_limits<T>::infinity(), high = -low;
  for (int64_t c = 0; c < layout.channels; ++c)
    for (const T end : {ends[c], ends[layout.channels + c]}) {
      const T centered = end - coefficients.mean[c];
      const T y = activated(flushed_product(centered, coefficients.slope[c]) + coefficients.offset[c], activation);
      low = y < low || std::isnan(y) ? y : low;
      high = y > high || std::isnan(y) ? y : high;
    }
  store<T>(call.results[0], running.mean);
  store<T>(call.results[1], running.variance);
  store<double>(call.results[2], mean);
  store<double>(call.results[3], variance);
  *call.results[4].as<T>() = low;
  *call.results[5].as<T>() = high;
}

namespace {

// A normalization followed by an activation and a fake quantization. A mask is written if one is given.
template <class T>
struct QuantizedNormalization {
  using Element = T;
  using V = Vector<T>;

  Normalization<T> normalization;
  T* outputs;
  uint8_t* mask;
  V nudged_min, nudged_max, nudged_scale, quant_zero;
  bool no_range, stops_low, stops_high;  // stops: the activation has an end there

  using Parameters = typename Normalization<T>::Parameters;
  Parameters of(int64_t p) const { return normalization.of(p); }
  void prefetch(int64_t i) const { normalization.prefetch(i); }
  void prefetch_result(int64_t i) const { __builtin_prefetch(outputs + i, 1); }

  V quantized(V activated) const {
    const V steps = divided(clamp(activated, nudged_min, nudged_max) - nudged_min, nudged_scale);
    return floored((steps - quant_zero) + V::all(T(0.5))) * nudged_scale;
  }

  template <bool Past, class Extent>
  void line(const Parameters (&q)[kLineVectors<T>], int64_t i, Extent extent) const {
    uint32_t lower = 0, higher = 0;
    for (int v = 0; v < kLineVectors<T>; ++v) {
      const int64_t n = elements(extent) - v * V::kWidth;
      if (n <= 0) break;
      const V y = n >= V::kWidth ? normalization.value(q[v], i + v * V::kWidth, Whole{})
                                 : normalization.value(q[v], i + v * V::kWidth, Part{n});
      V activated = y;
      if (stops_low) activated = greater(V{}, activated);
      if (stops_high) activated = lesser(V::all(T(6)), activated);
      if (mask) {
        // Two bits for each element: what its gradient goes to.
        Mask<T> inside = less_equal(nudged_min, activated) & less_equal(activated, nudged_max);
        const Mask<T> under = less(activated, nudged_min), over = less(nudged_max, activated);
        if (no_range) inside = less(V{}, V::all(T(1)));
        if (stops_low) inside = without(inside, less_equal(y, V{}));
        if (stops_high) inside = without(inside, less_equal(V::all(T(6)), y));
        lower |= bits_of(no_range ? inside : inside | over) << v * V::kWidth;
        higher |= (no_range ? 0 : bits_of(under | over)) << v * V::kWidth;
      }
      const V result = no_range ? V{} : quantized(activated);
      if (n >= V::kWidth) {
        if constexpr (Past) stream(outputs + i + v * V::kWidth, result);
        else store(outputs + i + v * V::kWidth, result, Whole{});
      } else {
        store(outputs + i + v * V::kWidth, result, Part{n});
      }
    }
    if (!mask) return;
    uint32_t packed = interleaved(lower, higher);
    if constexpr (std::is_same_v<Extent, Part>) packed &= (uint32_t{1} << 2 * extent.n) - 1;
    std::memcpy(mask + i / 4, &packed, (elements(extent) + 3) / 4);
  }


  static int64_t elements(Whole) { return kLineElements; }
  static int64_t elements(Part part) { return part.n; }
};

template <class T>
void quantize_normalized(const Call& call, uint8_t* mask) {
  using V = Vector<T>;
  const Layout layout = rows_of(call, 0);
  const Tensor<T> x(call.operands[0]), outputs(call.results[0]);
  const T min = *call.operands[5].as<T>(), max = *call.operands[6].as<T>();
  if (min > max) throw std::invalid_argument("min must not be greater than max");
  if (layout.size() == 0) return;
  const Nudged<T> n = nudge(min, max, call.numbers);
  const Doubles mean = doubles<double>(call.operands[3]), variance = doubles<double>(call.operands[4]);
  const Doubles slope = slope_of<T>(doubles<T>(call.operands[1]), variance, T(call.numbers.real("epsilon")));
  Coefficients<T> coefficients(layout.channels);
  coefficients.set(0, layout.channels, mean, slope, doubles<T>(call.operands[2]));
  const bool in_place = outputs.address() == x.address();
  const Rows rows(outputs.data(), layout.size(), layout.channels, 2, in_place, true);
  const auto means = rows.spread(coefficients.mean.data()), slopes = rows.spread(coefficients.slope.data());
  const auto offsets = rows.spread(coefficients.offset.data());
  const int64_t activation = call.numbers.integer("activation");
  const auto pass = [&](const std::array<const T*, 1>& from, T* to) {
    return QuantizedNormalization<T>{{from[0], means.data(), slopes.data(), offsets.data()}, to, mask,
                                     V::all(n.nudged_min), V::all(n.nudged_max), V::all(n.nudged_scale),
                                     V::all(n.quant_zero), n.no_range, activation != kNone, activation == kRelu6};
  };
  if constexpr (kMayBeHalves<T>)
    if (outputs.in_halves()) return rows.each_of_halves(outputs, std::array{x}, in_place, pass);
  rows.each(pass({x.data()}, outputs.data()));
}

// The bits of `count` elements from i on, at most a vector of them.
template <class T>
uint32_t packed_at(const uint8_t* mask, int64_t i, int64_t count) {
  uint32_t packed = 0;
  std::memcpy(&packed, mask + i / 4, (i % 4 + count + 3) / 4);
  return packed >> 2 * (i % 4);
}

// Copies the gradients of up to 64 elements that pass, zeros for the others. Returns whether some go to an end of the range.
template <class T>
bool pass_gradients(const T* gradients, const uint8_t* mask, T* passed, int64_t count) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  uint32_t any = 0;
  const auto vector = [&](int64_t k, auto extent) __attribute__((always_inline)) {
    __builtin_prefetch(gradients + k + kPageAhead<T>);
    __builtin_prefetch(passed + k + kPageAhead<T>, 1);
    const uint32_t packed = packed_at<T>(mask, k, count_of<T>(extent));
    any |= packed;
    store(passed + k, kept(without(low_bits<T>(packed), high_bits<T>(packed)), load(gradients + k, extent)), extent);
  };
  int64_t k = 0;
  for (; k + kWidth <= count; k += kWidth) vector(k, Whole{});
  if (k < count) vector(k, Part{count - k});
  return any & 0xaaaaaaaa;
}

// The folded sums of up to 64 gradients that go to the ends of the range.
template <class T>
void outside_sums(const T* gradients, const uint8_t* mask, int64_t count, double* below_and_above) {
  constexpr int64_t kWidth = Vector<T>::kWidth, kParts = kLanes / Lanes::kWidth, kDoubles = kWidth / Lanes::kWidth;
  Lanes lows[kParts], highs[kParts];
  const auto vector = [&](int64_t k, auto extent) __attribute__((always_inline)) {
    const uint32_t packed = packed_at<T>(mask, k, count_of<T>(extent));
    const Mask<T> over = low_bits<T>(packed) & high_bits<T>(packed), under = without(high_bits<T>(packed), low_bits<T>(packed));
    const Vector<T> values = load(gradients + k, extent);
    const int64_t first = k / Lanes::kWidth % kParts, second = (first + 1) % kParts;
    lows[first] = added<0>(lows[first], under, doubles<0>(values));
    highs[first] = added<0>(highs[first], over, doubles<0>(values));
    if constexpr (kDoubles == 2) {
      lows[second] = added<1>(lows[second], under, doubles<1>(values));
      highs[second] = added<1>(highs[second], over, doubles<1>(values));
    }
  };
  int64_t k = 0;
  for (; k + kWidth <= count; k += kWidth) vector(k, Whole{});
  if (k < count) vector(k, Part{count - k});
  below_and_above[0] = folded(lows);
  below_and_above[1] = folded(highs);
}

}  // namespace

EXACTQAT_TENSOR_KERNEL(quantized_batch_norm) {
  FlushDenormals flush;
  quantize_normalized<T>(call, nullptr);
}

EXACTQAT_TENSOR_KERNEL(quantized_batch_norm_training) {
  FlushDenormals flush;
  quantize_normalized<T>(call, call.results[1].as<uint8_t>());
}

EXACTQAT_TENSOR_KERNEL(quantized_batch_norm_states) {
  FlushDenormals flush;
  const uint8_t* mask = call.operands[0].as<uint8_t>();
  const Tensor<T> states(call.results[0]);
  for_each_piece(call.results[0].size(), [&](int64_t begin, int64_t end) {
    LineVector<T> room(states.in_halves() ? end - begin : 0);
    T* to = states.in_halves() ? room.data() - begin : states.data();
    for (int64_t i = begin; i < end; ++i) to[i] = T(mask[i / 4] >> 2 * (i % 4) & 3);
    if (states.in_halves()) states.write(begin, end - begin, room.data(), false);
  });
}

EXACTQAT_TENSOR_KERNEL(quantized_batch_norm_gradient) {
  FlushDenormals flush;
  const Layout layout = rows_of(call, 1);
  const Tensor<T> gradients(call.operands[0]), x(call.operands[1]), x_backprop(call.results[0]);
  const uint8_t* mask = call.operands[5].as<uint8_t>();
  const bool range_gradients = call.numbers.integer("range_gradients");
  const int64_t size = layout.size(), flat_blocks = (size + kBlock - 1) / kBlock;
  for (int r : {3, 4}) *call.results[r].as<T>() = T(0);
  if (size == 0) {
    for (int r : {1, 2}) std::fill_n(call.results[r].as<T>(), layout.channels, T(0));
    return;
  }
  // The gradients of the range are sums over the tensor as rows of one channel.
  Doubles below_and_above(range_gradients ? 2 * flat_blocks : 0);
  const bool in_halves = x_backprop.in_halves();
  // What passes is written where the result will be.
  const auto pass = [&](int64_t begin, int64_t rows) {
    const int64_t end = begin + rows * layout.channels;
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t count = std::min(kBlock, end - i);
      T room[2][kBlock];
      const T* values = gradients.read(i, count, room[0]) + i;
      const bool outside = pass_gradients(values, mask + i / 4, in_halves ? room[1] : x_backprop.data() + i, count);
      if (in_halves) x_backprop.write(i, count, room[1], false);
      if (range_gradients && outside) outside_sums(values, mask + i / 4, count, &below_and_above[2 * (i / kBlock)]);
    }
  };
  const double epsilon = T(call.numbers.real("epsilon"));
  // The gradient takes the statistics as the operators hand them on, rounded to the dtype of x.
  const auto rounded = [](const Array& statistics) {
    Doubles values = doubles<double>(statistics);
    for (double& v : values) v = double(flushed_to<T>(v));
    return values;
  };
  gradient<T>(layout, x_backprop, x, doubles<T>(call.operands[2]), rounded(call.operands[3]),
           rounded(call.operands[4]), epsilon, true, x_backprop, call.results[1], call.results[2], pass);
  if (range_gradients) {
    tree_fold(below_and_above.data(), flat_blocks, 2);
    for (int side = 0; side < 2; ++side) *call.results[3 + side].as<T>() = flushed_to<T>(below_and_above[side]);
  }
}

}  // namespace exactqat
