// SPDX-License-Identifier: Apache-2.0
// Rows of a depthwise convolution, channels last, multiplier 1: the forward operator, and the input gradient, which is the
// same thing seen in a mirror. One fused multiply-add for each tap that meets the image, taps row-major.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "depthwise_conv2d_geometry.h"
#include "parallel.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {

// What one row of a result is made of. Result column c meets, with tap t, input column begin + c * advance + t. Only tap rows
// that meet the image are counted; all of them do so with the same columns. Distances are in elements and may be negative.
template <class T>
struct Row {
  const T* input;  // channel 0 of column 0 for the first tap row
  const T* taps;   // channel 0 of the first tap of the first tap row
  T* output;       // channel 0 of column 0
  int64_t rows, input_row_step, tap_row_step;
  int64_t columns, output_step;
  int64_t begin, advance, input_columns, input_step;
  int64_t tap_count, tap_step;
  int64_t fresh;  // how many more input rows the next result row meets
  bool stream;    // write past the caches
};

// Enters a row whose neighbouring taps meet columns that lie `reach` apart: as so many rows of every n-th column that their
// taps meet neighbouring ones.
template <class T>
void add_rows(std::vector<Row<T>>& rows, const Row<T>& row, int64_t reach) {
  if (row.tap_count <= 1) reach = 1;
  const int64_t classes = reach / std::gcd(row.advance, reach);
  for (int64_t k = 0; k < std::min(classes, row.columns); ++k) {
    const int64_t start = row.begin + k * row.advance, rest = (start % reach + reach) % reach;
    Row<T> one = row;
    one.input += rest * row.input_step;
    one.input_step *= reach;
    one.input_columns = stepped(rest, row.input_columns, reach);
    one.begin = (start - rest) / reach;
    one.advance = row.advance * classes / reach;
    one.output += k * row.output_step;
    one.output_step *= classes;
    one.columns = stepped(k, row.columns, classes);
    rows.push_back(one);
  }
}

// The output rows of `output` from `begin` to `end`.
template <class T>
std::vector<Row<T>> forward_rows(const Geometry& g, const Rows<const T>& image, const T* filter, int64_t tap_step,
                                 const Rows<T>& output, int64_t begin, int64_t end) {
  std::vector<Row<T>> rows;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t top = i * g.stride_height - g.pad_top;
    const Interval met = meeting(top, g.dilation_height, g.input_height, g.filter_height);
    const bool any = met.begin < met.end;
    add_rows(rows,
             Row<T>{.input = any ? image.row(top + met.begin * g.dilation_height) : image.data,
                    .taps = filter + (any ? met.begin * g.filter_width * tap_step : 0),
                    .output = output.row(i),
                    .rows = any ? met.end - met.begin : 0,
                    .input_row_step = g.dilation_height * image.width * image.step,
                    .tap_row_step = g.filter_width * tap_step,
                    .columns = g.output_width,
                    .output_step = output.step,
                    .begin = -g.pad_left,
                    .advance = g.stride_width,
                    .input_columns = g.input_width,
                    .input_step = image.step,
                    .tap_count = g.filter_width,
                    .tap_step = tap_step,
                    .fresh = g.dilation_height == 1 ? g.stride_height : 0,
                    .stream = false},
             g.dilation_width);
  }
  return rows;
}

// The rows of the input's gradient from `begin` to `end`. Columns that are a stride apart meet the same taps: each such class
// is a row of its own. All is taken from right to left and upwards, because so is what the taps meet.
template <class T>
std::vector<Row<T>> backward_rows(const Geometry& g, const Rows<const T>& gradient, const T* filter, int64_t tap_step,
                                  const Rows<T>& output, int64_t begin, int64_t end) {
  std::vector<Row<T>> rows;
  for (int64_t i = end - 1; i >= begin; --i) {
    const Serving down = serving(i, g.pad_top, g.stride_height, g.dilation_height, g.filter_height);
    // Tap row k meets output row position - k * back.
    const int64_t first = down.count == 0 || down.position < g.output_height
                              ? 0
                              : (down.position - g.output_height) / down.back + 1;
    const int64_t last = down.count == 0 || down.position < 0 ? 0 : std::min(down.count, down.position / down.back + 1);
    const bool any = first < last;
    for (int64_t start = 0; start < std::min(g.stride_width, g.input_width); ++start) {
      const Serving across = serving(start, g.pad_left, g.stride_width, g.dilation_width, g.filter_width);
      const int64_t columns = stepped(start, g.input_width, g.stride_width);
      const T* met = any ? gradient.row(down.position - first * down.back) : gradient.data;
      add_rows(rows,
               Row<T>{.input = met + (g.output_width - 1) * gradient.step,
                      .taps = filter + ((down.first + (any ? first * down.period : 0)) * g.filter_width + across.first) * tap_step,
                      .output = output.row(i) + (start + (columns - 1) * g.stride_width) * output.step,
                      .rows = any ? last - first : 0,
                      .input_row_step = -down.back * gradient.width * gradient.step,
                      .tap_row_step = down.period * g.filter_width * tap_step,
                      .columns = columns,
                      .output_step = -g.stride_width * output.step,
                      .begin = g.output_width - across.position - columns,
                      .advance = 1,
                      .input_columns = g.output_width,
                      .input_step = -gradient.step,
                      .tap_count = across.count,
                      .tap_step = across.period * tap_step,
                      .fresh = g.dilation_height == 1 && g.stride_height == 1,
                      .stream = false},
               across.back);
    }
  }
  return rows;
}

// Two result rows that are made together: rows of inputs that the first of them meets alone, that both meet, and that the second
// one meets alone, one after the other. Or one row, which meets all of its inputs alone.
template <class T>
struct Strip {
  Row<T> first;
  const T* second_taps;
  T* second_output;  // null where there is no second one
  int64_t alone, together, second_alone;
  int64_t ahead;  // how many input rows after these are prefetched
};

// Whether a second row can be made together with the first one; if so, how.
template <class T>
bool join(Strip<T>& strip, const Row<T>& second) {
  const Row<T>& first = strip.first;
  // With as many input columns, and at least one, the inputs can only be whole rows apart.
  if (first.rows == 0 || second.rows == 0 || first.columns != second.columns || first.begin != second.begin ||
      first.input_columns != second.input_columns || first.tap_count != second.tap_count ||
      first.input_row_step != second.input_row_step)
    return false;
  const int64_t distance = second.input - first.input;
  if (distance % first.input_row_step != 0) return false;
  const int64_t alone = distance / first.input_row_step, together = first.rows - alone, second_alone = second.rows - together;
  if (alone < 0 || together < 1 || second_alone < 0) return false;
  strip.alone = alone, strip.together = together, strip.second_alone = second_alone;
  strip.second_taps = second.taps;
  strip.second_output = second.output;
  return true;
}

// Where lanes have masks, a part of a vector takes no longer to load than all of it.
#if defined(__AVX512F__)
constexpr bool kMasksLanes = true;
#else
constexpr bool kMasksLanes = false;
#endif

// A vector of channels. V are taken at a time; of one that is alone only the first `channels` if lanes have masks.
template <int V, class T>
[[gnu::always_inline]] inline Vector<T> load_channels(const T* from, int64_t channels) {
  if constexpr (kMasksLanes && V == 1) return Vector<T>::load(from, channels);
  else return Vector<T>::load(from);
}

template <int V, int P, class T>
[[gnu::always_inline]] inline void store_columns(T* to, int64_t step, bool streamed, int64_t channels, const Vector<T> (&sums)[P]) {
  unrolled<P>([&](auto p) __attribute__((always_inline)) {
    if (kMasksLanes && V == 1 && channels < Vector<T>::kWidth) sums[p].store(to, channels);
    else if (streamed) stream(to, sums[p]);
    else sums[p].store(to);
    to += step;
  });
}

// P columns of both rows for V vectors of channels, in registers: K taps in a row that lie Advance * p + t apart. Neighbours share
// their inputs: each is loaded once. Inputs beside the image, fewer than K on either side, are passed over, and with them the
// taps that would meet them.
template <int K, int Advance, int P, int V, class T>
[[gnu::always_inline]] inline void sum_columns(const Strip<T>& strip, int64_t column, int64_t channel, int64_t channels) {
  using Lanes = Vector<T>;
  constexpr int64_t kWidth = Lanes::kWidth;
  constexpr int kInputs = (P - 1) * Advance + K;
  const Row<T>& row = strip.first;
  const int64_t start = row.begin + column * row.advance, first = -start, last = row.input_columns - start;
  const int64_t input_step = row.input_step, tap_step = row.tap_step;
  const T* x = row.input + start * input_step + channel;
  const T* taps[2] = {row.taps + channel, strip.second_taps + channel};
  Lanes sums[2][V][P];
  const auto meet = [&]<bool First, bool Second>(int64_t rows) __attribute__((always_inline)) {
    for (; rows > 0; --rows) {
      Lanes weight[2][K][V];
      unrolled<K * V>([&](auto k) __attribute__((always_inline)) {
        constexpr int t = k / V, v = k % V;
        if constexpr (First) weight[0][t][v] = load_channels<V>(taps[0] + t * tap_step + v * kWidth, channels);
        if constexpr (Second) weight[1][t][v] = load_channels<V>(taps[1] + t * tap_step + v * kWidth, channels);
      });
      const T* met = x;
      unrolled<kInputs>([&](auto n) __attribute__((always_inline)) {
        // Said to be likely lest the compiler keep the sums of the last columns in memory.
        if ((n >= K - 1 || __builtin_expect(n >= first, 1)) && (n <= kInputs - K || __builtin_expect(n < last, 1))) {
          Lanes value[V];
          unrolled<V>([&](auto v) __attribute__((always_inline)) { value[v] = load_channels<V>(met + v * kWidth, channels); });
          unrolled<K * V>([&](auto k) __attribute__((always_inline)) {
            constexpr int t = k / V, v = k % V, p = (n - t) / Advance;
            if constexpr (t <= n && p * Advance == n - t && p < P) {
              if constexpr (First) sums[0][v][p] = Lanes::fused_multiply_add(value[v], weight[0][t][v], sums[0][v][p]);
              if constexpr (Second) sums[1][v][p] = Lanes::fused_multiply_add(value[v], weight[1][t][v], sums[1][v][p]);
            }
          });
        }
        met += input_step;
      });
      x += row.input_row_step;
      if constexpr (First) taps[0] += row.tap_row_step;
      if constexpr (Second) taps[1] += row.tap_row_step;
    }
  };
  meet.template operator()<true, false>(strip.alone);
  meet.template operator()<true, true>(strip.together);
  meet.template operator()<false, true>(strip.second_alone);
  const int64_t offset = column * row.output_step + channel;
  unrolled<V>([&](auto v) __attribute__((always_inline)) {
    store_columns<V>(row.output + offset + v * kWidth, row.output_step, row.stream, channels, sums[0][v]);
    if (strip.second_output)
      store_columns<V>(strip.second_output + offset + v * kWidth, row.output_step, row.stream, channels, sums[1][v]);
  });
}

// Asks for what the strips after this one meet of `columns` columns, when it is the turn of `channel` of [begin, end). In the
// order of memory if these are all channels, because that is what the processor goes on with by itself.
template <class T>
[[gnu::always_inline]] inline void fetch_ahead(const Strip<T>& strip, int64_t column, int64_t columns, int64_t channel,
                                               int64_t begin, int64_t end) {
  constexpr int64_t kWidth = Vector<T>::kWidth, kLine = 64 / sizeof(T);
  const Row<T>& row = strip.first;
  const int64_t first = row.begin + column * row.advance, step = std::abs(row.input_step);
  const T* following = row.input + (strip.alone + strip.together + strip.second_alone) * row.input_row_step;
  for (int64_t i = strip.ahead; i > 0; --i, following += row.input_row_step) {
    if (end - begin < step) {
      for (int64_t n = 0; n < columns; ++n) __builtin_prefetch(following + (first + n) * row.input_step + channel);
    } else {
      const T* next = following + (row.input_step < 0 ? first + columns - 1 : first) * row.input_step;
      const int64_t part = (channel - begin) / kWidth, parts = quotient_rounded_up(end - begin, kWidth), size = columns * step;
      for (int64_t k = size * part / parts; k < size * (part + 1) / parts; k += kLine) __builtin_prefetch(next + k);
    }
  }
}

// How many of channels [begin, end) come before the first vector of inputs that may lie in one line of the cache. None where they
// are too few for it to pay, where columns differ in it, or where it is results that have to begin with a line.
template <class T>
int64_t lanes_before_a_line(const Row<T>& row, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = Vector<T>::kWidth, kEnough = 8;
  if (row.stream || row.input_step % kWidth != 0 || end - begin < kEnough * kWidth) return 0;
  const int64_t lane = reinterpret_cast<uintptr_t>(row.input + begin) / sizeof(T) % kWidth;
  return lane == 0 ? 0 : kWidth - lane;
}

// All columns of a strip, channels [begin, end).
template <class T>
using Columns = void (*)(const Strip<T>& strip, int64_t begin, int64_t end);

// One row, any number of taps and any advance.
template <class T>
void columns_of_a_row(const Row<T>& row, int64_t begin, int64_t end) {
  using Lanes = Vector<T>;
  constexpr int kTogether = 4;
  for (int64_t column = 0; column < row.columns; column += kTogether)
    for (int64_t channel = begin; channel < end; channel += Lanes::kWidth) {
      const int64_t count = std::min(row.columns - column, int64_t{kTogether}), channels = std::min(end - channel, Lanes::kWidth);
      const int64_t start = row.begin + column * row.advance;
      const auto sum = [&](auto load) __attribute__((always_inline)) {
        Lanes sums[kTogether];
        for (int64_t i = 0; i < row.rows; ++i) {
          const T* x = row.input + i * row.input_row_step + channel;
          const T* w = row.taps + i * row.tap_row_step + channel;
          for (int64_t t = 0; t < row.tap_count; ++t, w += row.tap_step) {
            const Lanes weight = load(w);
            unrolled<kTogether>([&](auto p) __attribute__((always_inline)) {
              const int64_t j = start + p * row.advance + t;
              if (j < 0 || j >= row.input_columns || p >= count) return;
              sums[p] = Lanes::fused_multiply_add(load(x + j * row.input_step), weight, sums[p]);
            });
          }
        }
        T* to = row.output + column * row.output_step + channel;
        unrolled<kTogether>([&](auto p) __attribute__((always_inline)) {
          if (p >= count) return;
          if (channels == Lanes::kWidth) sums[p].store(to);
          else sums[p].store(to, channels);
          to += row.output_step;
        });
      };
      if (channels == Lanes::kWidth) sum([](const T* from) __attribute__((always_inline)) { return Lanes::load(from); });
      else sum([=](const T* from) __attribute__((always_inline)) { return Lanes::load(from, channels); });
    }
}

template <class T>
void columns_of_any_kind(const Strip<T>& strip, int64_t begin, int64_t end) {
  Row<T> row = strip.first;
  columns_of_a_row(row, begin, end);
  if (!strip.second_output) return;
  row.input += strip.alone * row.input_row_step;
  row.taps = strip.second_taps;
  row.output = strip.second_output;
  row.rows = strip.together + strip.second_alone;
  columns_of_a_row(row, begin, end);
}

// In groups of P columns, V vectors of channels at a time. The last group ends where the row does and may sum columns again; so
// may the last vector of channels where a part of one cannot be loaded.
template <int K, int Advance, int P, int V, class T>
void columns_in_groups(const Strip<T>& strip, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  if (!kMasksLanes && end - begin < kWidth) return columns_of_any_kind(strip, begin, end);
  const Row<T>& row = strip.first;
  // Where inputs begin between two lines of the cache, a short vector comes first: those after it lie in one line each. Where
  // what is loaded is used more often it does not pay.
  const int64_t head = kMasksLanes && K == 3 && Advance == 2 ? lanes_before_a_line(row, begin, end) : 0;
  for (int64_t c = 0; c < row.columns; c += P) {
    const int64_t column = std::min(c, row.columns - P);
    int64_t channel = begin, count = head > 0 ? head : kWidth;
    if constexpr (V > 1)
      for (; channel + V * kWidth <= end; channel += V * kWidth) sum_columns<K, Advance, P, V>(strip, column, channel, V * kWidth);
    for (; channel < end; channel += count, count = kWidth) {
      if constexpr (kMasksLanes) count = std::min(count, end - channel);
      else channel = std::min(channel, end - kWidth);
      fetch_ahead(strip, column, P * Advance, channel, begin, end);
      sum_columns<K, Advance, P, 1>(strip, column, channel, count);
    }
  }
}

// How many columns may be summed together: as many as leave registers for the rest; few where nobody waits.
template <class T>
constexpr bool kInHaste = std::is_same_v<T, float> && Vector<T>::kWidth >= 16;

// Which of these numbers of columns rows with K taps are compiled for. Five columns are few networks' way to be narrow.
template <int K, int Advance, class T>
constexpr bool compiled(int group) {
  return group == 1 || group == 4 || (kInHaste<T> && (group == 2 || group == 7 || (group == 5 && K == 3 && Advance == 1)));
}

template <int K, int Advance, class T>
Columns<T> columns_of_kind(int64_t columns) {
  int best = 1;  // with which a row takes least work
  Columns<T> of_best = columns_in_groups<K, Advance, 1, 1, T>;
  const auto consider = [&]<int P>() {
    if constexpr (compiled<K, Advance, T>(P)) {
      if (P > columns) return;
      if (best > 2 && quotient_rounded_up(columns, P) * P > quotient_rounded_up(columns, best) * best) return;
      best = P;
      of_best = columns_in_groups<K, Advance, P, 1, T>;
    }
  };
  consider.template operator()<2>();
  consider.template operator()<4>();
  consider.template operator()<5>();
  consider.template operator()<7>();
  return of_best;
}

// `ahead`: inputs are asked for in advance.
template <class T>
Columns<T> columns_of(const Row<T>& row, [[maybe_unused]] bool ahead) {
  if constexpr (kKnowsWindows<T>) {
    const int64_t beside = row.begin + (row.columns - 1) * row.advance + row.tap_count - row.input_columns;
    if (row.begin > -row.tap_count && beside < row.tap_count && row.input_columns > 0) {
      if constexpr (kInHaste<T>) {
        // Columns so far apart collide in the caches: a line of each, for many of them, comes slower than two lines of fewer.
        const bool collide = row.input_step * int64_t(sizeof(T)) % 512 == 0;
        if (collide && !ahead && row.advance == 2 && row.tap_count == 3 && row.columns >= 4)
          return columns_in_groups<3, 2, 4, 2, T>;
      }
      switch (row.advance * 8 + row.tap_count) {
        case 8 + 1: return columns_of_kind<1, 1, T>(row.columns);
        case 8 + 2: return columns_of_kind<2, 1, T>(row.columns);
        case 8 + 3: return columns_of_kind<3, 1, T>(row.columns);
        case 8 + 5: return columns_of_kind<5, 1, T>(row.columns);
        case 16 + 3: return columns_of_kind<3, 2, T>(row.columns);
        case 16 + 5: return columns_of_kind<5, 2, T>(row.columns);
      }
    }
  }
  return columns_of_any_kind<T>;
}

template <class T>
struct Piece {
  Strip<T> strip;
  Columns<T> sum;
};

// Rows that use each other's inputs: two that are near each other in the list are made together where they can be. `ahead`: the
// operand is so large that it pays to ask for it in advance.
template <class T>
std::vector<Piece<T>> pieces_of(const std::vector<Row<T>>& rows, bool ahead) {
  constexpr size_t kNear = 6;
  std::vector<Piece<T>> pieces;
  std::vector<bool> made(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    if (made[r]) continue;
    Piece<T> piece{{rows[r], rows[r].taps, nullptr, rows[r].rows, 0, 0, 0}, columns_of(rows[r], ahead)};
    const bool shares = piece.sum != columns_of_any_kind<T>;  // else there is nothing to gain, and there may be no inputs at all
    const size_t end = shares ? std::min(rows.size(), r + kNear) : r;
    size_t partner = r + 1;
    while (partner < end && (made[partner] || !join(piece.strip, rows[partner]))) ++partner;
    if (partner < end) made[partner] = true;
    if (ahead) piece.strip.ahead = rows[r].fresh * (partner < end ? 2 : 1);
    pieces.push_back(piece);
  }
  return pieces;
}

#if defined(__aarch64__)

// One row once more, flushed as x86 does it: a product and sum that rounds up to the smallest normal number is not.
template <class T>
[[gnu::noinline]] void sum_row_flushed(const Row<T>& row, int64_t begin, int64_t end) {
  using Lanes = Vector<T>;
  for (int64_t column = 0; column < row.columns; ++column)
    for (int64_t channel = begin; channel < end; channel += Lanes::kWidth) {
      const int64_t channels = std::min(Lanes::kWidth, end - channel), start = row.begin + column * row.advance;
      Lanes sum;
      for (int64_t i = 0; i < row.rows; ++i) {
        const T* x = row.input + i * row.input_row_step + channel;
        const T* w = row.taps + i * row.tap_row_step + channel;
        for (int64_t t = std::max<int64_t>(0, -start); t < std::min(row.tap_count, row.input_columns - start); ++t)
          sum = flushed_fused_multiply_add(Lanes::load(x + (start + t) * row.input_step, channels),
                                           Lanes::load(w + t * row.tap_step, channels), sum);
      }
      sum.store(row.output + column * row.output_step + channel, channels);
    }
}

// The rows of a strip.
template <class T>
void sum_strip_flushed(const Strip<T>& strip, int64_t begin, int64_t end) {
  sum_row_flushed(strip.first, begin, end);
  if (strip.second_output == nullptr) return;
  Row<T> second = strip.first;
  second.input += strip.alone * second.input_row_step;
  second.taps = strip.second_taps;
  second.output = strip.second_output;
  second.rows = strip.together + strip.second_alone;
  sum_row_flushed(second, begin, end);
}

#endif

// Channels [begin, end) of all pieces; so many at a time that their taps stay in the first cache. All of them where inputs come
// from afar and there are more of them than results: then what counts is that they are met in the order of memory.
template <class T>
void sum_pieces(const std::vector<Piece<T>>& pieces, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = Vector<T>::kWidth, kMany = 12;
  const bool all = !pieces.empty() && pieces[0].strip.ahead > 0 && pieces[0].strip.first.advance > 1;
  const int64_t vectors = quotient_rounded_up(end - begin, kWidth), parts = all ? 1 : quotient_rounded_up(vectors, kMany);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = begin + vectors * part / parts * kWidth;
    const int64_t to = std::min(end, begin + vectors * (part + 1) / parts * kWidth);
    for (const Piece<T>& piece : pieces) {
#if defined(__aarch64__)
      forget_flushed();
      piece.sum(piece.strip, from, to);
      if (has_flushed()) sum_strip_flushed(piece.strip, from, to);
#else
      piece.sum(piece.strip, from, to);
#endif
    }
  }
}

// Results from this size on do not stay in the caches until somebody reads them.
constexpr int64_t kStreamed = int64_t{8} << 20;
// Operands from this size on are not in the second cache.
constexpr int64_t kFetchedAhead = int64_t{4} << 20;

// All `height` rows of all images, channels last: make(image, begin, end) says of what some of them are made.
template <class T, class Make>
void sum_images(const Geometry& g, int64_t height, const T* output, int64_t size, Make&& make) {
  constexpr int64_t kSecondCache = 1 << 19, kEnoughTasks = 8;
  const int64_t channels = g.channels, step = 2 * Vector<T>::kWidth;
  const int64_t row_bytes = std::max(g.input_width, g.output_width) * channels * int64_t(sizeof(T));
  const int64_t band = std::clamp<int64_t>(kSecondCache / std::max<int64_t>(row_bytes, 1), 4, height);
  const int64_t bands = quotient_rounded_up(height, band);
  const int64_t pieces = std::clamp<int64_t>(kEnoughTasks / (g.batch * bands), 1, quotient_rounded_up(channels, step));
  const int64_t piece = quotient_rounded_up(quotient_rounded_up(channels, pieces), step) * step;
  const bool large = g.input_size() * int64_t(sizeof(T)) >= kFetchedAhead;
  const bool streamed = size * int64_t(sizeof(T)) >= kStreamed && reinterpret_cast<uintptr_t>(output) % 64 == 0 &&
                        channels * int64_t(sizeof(T)) % 64 == 0;
  parallel_for(g.batch * bands * pieces, size * std::max<int64_t>(1, g.taps()), [&](int64_t task) {
    const int64_t image = task / (bands * pieces), k = task / pieces % bands, begin = task % pieces * piece;
    std::vector<Row<T>> rows = make(image, height * k / bands, height * (k + 1) / bands);
    for (Row<T>& row : rows) row.stream = streamed;
    sum_pieces(pieces_of(rows, large), begin, std::min(channels, begin + piece));
    if (streamed) finish_streaming();
  });
}

}  // namespace exactqat
