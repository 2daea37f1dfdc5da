// SPDX-License-Identifier: Apache-2.0
// Sums of output rows for the filter gradient, channels last, multiplier 1: float64, one fused multiply-add for each output
// column from left to right, beginning at 0.
#pragma once
#include <algorithm>
#include <type_traits>

#include "depthwise_conv2d_geometry.h"
#include "reduce.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {

// Which inputs of a row's first and last columns are there. Any: only a look at each column tells.
struct AnyEdges {};

// Padded by kPad columns on the left, and by kMissing columns on the right or, if that is 0, by none.
template <int Pad, int Missing>
struct KnownEdges {
  static constexpr int kPad = Pad, kMissing = Missing;
};

// Goes over the columns of output rows, K taps Stride apart. Input column Stride * q + phase - pad meets, with tap
// phase + Stride * m, the gradient of column q - m; so the gradients of the last few columns are kept.
// column<First, Last, There, Perhaps>(q): the gradients of columns q - First to q - Last are there, and so are the inputs of the
// phases whose bits are set in There; those in Perhaps are to be looked at. With edges that are known the way is always the same,
// and all of it stays in registers, which saves a fifth of the time of short rows.
template <int K, int Stride, class Edges, class Column>
[[gnu::always_inline]] inline void walk_columns(int64_t columns, int64_t input_columns, int64_t pad, Column&& column) {
  constexpr int kKept = (K + Stride - 1) / Stride, kPhases = std::min(K, Stride);
  constexpr unsigned kAll = (1u << kPhases) - 1;
  if constexpr (std::is_same_v<Edges, AnyEdges>) {
    const int64_t reached = input_columns + pad - kPhases;
    const int64_t first = std::min(columns, std::max<int64_t>(kKept - 1, quotient_rounded_up(pad, Stride)));
    const int64_t last = std::min(columns, reached < 0 ? 0 : reached / Stride + 1);
    unrolled<kKept - 1>([&](auto q) __attribute__((always_inline)) { column.template operator()<0, q, 0, kAll>(q); });
    int64_t q = kKept - 1;
    for (; q < first; ++q) column.template operator()<0, kKept - 1, 0, kAll>(q);
    for (; q < last; ++q) column.template operator()<0, kKept - 1, kAll, 0>(q);
    for (; q < columns; ++q) column.template operator()<0, kKept - 1, 0, kAll>(q);
    unrolled<kKept - 1>([&](auto e) __attribute__((always_inline)) {
      column.template operator()<e + 1, kKept - 1, 0, kAll>(columns + e);
    });
  } else {
    static_assert(Edges::kPad <= (kKept - 1) * Stride && Edges::kMissing <= K - kPhases);
    unrolled<kKept - 1>([&](auto q) __attribute__((always_inline)) {
      constexpr unsigned kBefore = (1u << std::clamp(Edges::kPad - int(q) * Stride, 0, kPhases)) - 1;
      column.template operator()<0, q, (kAll & ~kBefore), 0>(q);
    });
    int64_t q = kKept - 1;
    do column.template operator()<0, kKept - 1, kAll, 0>(q);
    while (++q < columns);
    unrolled<kKept - 1>([&](auto e) __attribute__((always_inline)) {
      constexpr unsigned kThere = (1u << std::clamp(K - Stride - Edges::kMissing - int(e) * Stride, 0, kPhases)) - 1;
      column.template operator()<e + 1, kKept - 1, kThere, 0>(columns + e);
    });
  }
}

// walk(edges) with the edges of a geometry, if they are among the usual ones of 3 columns: SAME, and one column of padding on both
// sides.
template <int K, int Stride, class Walk>
void with_edges(const Geometry& g, Walk&& walk) {
  constexpr int kKept = (K + Stride - 1) / Stride;
  const int64_t missing = std::max<int64_t>(0, (g.output_width - 1) * Stride + K - g.pad_left - g.input_width);
  if constexpr (K == 3) {
    if (g.output_width >= kKept) {
      if constexpr (Stride == 1)
        if (g.pad_left == 1 && missing == 1) return walk(KnownEdges<1, 1>());
      if constexpr (Stride == 2) {  // pictures of even width, as nearly all are
        if (g.pad_left == 0 && missing == 1) return walk(KnownEdges<0, 1>());
        if (g.pad_left == 1 && missing == 0) return walk(KnownEdges<1, 0>());
      }
    }
  }
  walk(AnyEdges());
}

// One output row and the input rows that some tap rows meet, one below the other. Distances are in elements.
template <class T>
struct FilterRow {
  const T* input;  // column 0 of the first input row
  const T* gradient;
  double* sums;  // [taps][tile], from the first tap row on: where the row's sums are added
  int64_t tile, input_columns, output_columns, pad, input_row_step, input_step, gradient_step;
  int64_t pieces;  // where operands come from afar, into how many pieces their channels are cut; else 0
};

// A vector without its struct: arrays of structs, which have to be constructed and are copied whole, the compiler keeps in memory
// and writes there after each addition.
#if defined(__AVX2__) || defined(EXACTQAT_NEON)
inline auto bare(const Vector<double>& vector) { return vector.v; }
#else
inline auto bare(const Vector<double>& vector) { return vector; }
#endif
using Register = decltype(bare(Vector<double>()));

// Products of float32 values are far from float64's denormals, and so are their sums; those of float64 values need not be.
template <class T>
[[gnu::always_inline]] inline Vector<double> added_product(Vector<double> a, Vector<double> b, Vector<double> sum) {
  if constexpr (sizeof(T) == 4) return Vector<double>::fused_multiply_add(a, b, sum);
  else return flushed_fused_multiply_add(a, b, sum);
}

// `Rows` rows of K taps for V vectors of channels, in registers. Each input is loaded once and meets the gradients of the last
// few columns, which are kept. Ahead: what the next output row
// meets is asked for in the order of memory, a share of it for each piece of channels; else the place one row below.
template <int Rows, int K, int Stride, class Edges, int V, bool Ahead, class T>
void add_filter_row(const FilterRow<T>& row, int64_t channel) {
  using Lanes = Vector<double>;
  constexpr int kKept = (K + Stride - 1) / Stride, kPhases = std::min(K, Stride);
  const int64_t input_step = row.input_step, gradient_step = row.gradient_step, input_row_step = row.input_row_step;
  const int64_t input_columns = row.input_columns, columns = row.output_columns;
  const int64_t pad = [&] {
    if constexpr (std::is_same_v<Edges, AnyEdges>) return row.pad;
    else return int64_t{Edges::kPad};
  }();
  const T *gradient = row.gradient + channel, *input = row.input + channel;
  // The column and the piece of it whose lines come next.
  constexpr int64_t kPiece = V * Lanes::kWidth;
  const int64_t asked = Ahead ? channel / kPiece * columns : 0;
  int64_t column_ahead = Ahead ? asked / row.pieces : 0, channel_ahead = Ahead ? asked % row.pieces * kPiece : 0;
  const auto ask = [&]() __attribute__((always_inline)) {
    __builtin_prefetch(row.gradient + (column_ahead + columns) * gradient_step + channel_ahead);
    const T* met = row.input + (column_ahead * Stride - row.pad) * input_step + Rows * input_row_step + channel_ahead;
    unrolled<kPhases * Stride>([&](auto k) __attribute__((always_inline)) {
      __builtin_prefetch(met + k % kPhases * input_step + k / kPhases * input_row_step);
    });
    channel_ahead += kPiece;
    if (channel_ahead == row.pieces * kPiece) ++column_ahead, channel_ahead = 0;
  };
  Register sums[Rows][K][V], kept[kKept][V];
  unrolled<Rows * K * V>([&](auto k) __attribute__((always_inline)) { sums[k / (K * V)][k / V % K][k % V] = bare(Lanes()); });
  unrolled<kKept * V>([&](auto k) __attribute__((always_inline)) { kept[k / V][k % V] = bare(Lanes()); });
  const auto column = [&]<int First, int Last, unsigned There, unsigned Perhaps>(int64_t q) __attribute__((always_inline)) {
    unrolled<kKept - 1>([&](auto m) __attribute__((always_inline)) {
      unrolled<V>([&](auto v) __attribute__((always_inline)) { kept[kKept - 1 - m][v] = kept[kKept - 2 - m][v]; });
    });
    if constexpr (First == 0)
      unrolled<V>([&](auto v) __attribute__((always_inline)) {
        kept[0][v] = bare(Lanes::load(gradient + q * gradient_step + v * Lanes::kWidth));
#if defined(__AVX512F__)
        asm("" : "+v"(kept[0][v]));  // else the compiler converts it again where it is the one before
#endif
      });
    if constexpr (Ahead && First == 0) ask();
    if constexpr (!Ahead && Perhaps == 0 && First == 0) __builtin_prefetch(gradient + (q + columns) * gradient_step);
    unrolled<kPhases>([&](auto phase) __attribute__((always_inline)) {
      constexpr unsigned kBit = 1u << phase;
      if constexpr (((There | Perhaps) & kBit) == 0) return;
      const int64_t j = q * Stride - pad + phase;
      if ((Perhaps & kBit) && (j < 0 || j >= input_columns)) return;
      const T* met = input + j * input_step;
      // What the next output row meets besides these.
      if constexpr (!Ahead)
        unrolled<Stride>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(met + (Rows + i) * input_row_step); });
      unrolled<Rows * V>([&](auto k) __attribute__((always_inline)) {
        constexpr int i = k / V, v = k % V;
        const Lanes value = Lanes::load(met + i * input_row_step + v * Lanes::kWidth);
        unrolled<kKept>([&](auto m) __attribute__((always_inline)) {
          constexpr int t = phase + Stride * m;
          if constexpr (m >= First && m <= Last && t < K)
            sums[i][t][v] = bare(added_product<T>(value, Lanes{kept[m][v]}, Lanes{sums[i][t][v]}));
        });
      });
    });
  };
  walk_columns<K, Stride, Edges>(columns, input_columns, pad, column);
  double* to = row.sums + channel;
  unrolled<Rows * K>([&](auto t) __attribute__((always_inline)) {
    unrolled<V>([&](auto v) __attribute__((always_inline)) {
      double* at = to + v * Lanes::kWidth;
      (Lanes::load(at) + Lanes{sums[t / K][t % K][v]}).store(at);
    });
    to += row.tile;
  });
}

// The same for any filter, stride and dilation: one tap row, up to four taps of it at a time.
template <class T>
void add_filter_row_of_any_kind(const Geometry& g, const FilterRow<T>& row, int64_t channel, int64_t channels) {
  using Lanes = Vector<double>;
  constexpr int kTogether = 4;
  const T *gradient = row.gradient + channel, *input = row.input + channel;
  for (int64_t dj = 0; dj < g.filter_width; dj += kTogether) {
    Lanes sums[kTogether];
    for (int64_t q = 0; q < row.output_columns; ++q) {
      const Lanes dy = Lanes::load(gradient + q * row.gradient_step, channels);
      unrolled<kTogether>([&](auto t) __attribute__((always_inline)) {
        const int64_t j = q * g.stride_width - row.pad + (dj + t) * g.dilation_width;
        if (dj + t < g.filter_width && j >= 0 && j < row.input_columns)
          sums[t] = added_product<T>(Lanes::load(input + j * row.input_step, channels), dy, sums[t]);
      });
    }
    double* to = row.sums + dj * row.tile + channel;
    unrolled<kTogether>([&](auto t) __attribute__((always_inline)) {
      if (dj + t < g.filter_width) (Lanes::load(to + t * row.tile) + sums[t]).store(to + t * row.tile);
    });
  }
}

// All whole vectors of channels of a row, `count` channels, for `Rows` tap rows. Known edges and operands from afar are compiled for
// what most of the time goes to: several rows, the most vectors.
template <int Rows, int K, int Stride, class Edges, class T>
void add_filter_channels(const FilterRow<T>& row, int64_t count) {
  constexpr int64_t kWidth = Vector<double>::kWidth;
  constexpr bool kPairs = K == 3 && kWidth >= 8;
  using EdgesOfMost = std::conditional_t<(Rows > 1), Edges, AnyEdges>;
  using EdgesOfOne = std::conditional_t<kPairs && Rows < K, AnyEdges, EdgesOfMost>;
  int64_t channel = 0;
  if constexpr (kPairs) {
    if constexpr (Stride > 1 && Rows == K)
      if (row.pieces > 0)
        for (; channel + 2 * kWidth <= count; channel += 2 * kWidth)
          add_filter_row<Rows, K, Stride, EdgesOfMost, 2, true>(row, channel);
    for (; channel + 2 * kWidth <= count; channel += 2 * kWidth) add_filter_row<Rows, K, Stride, EdgesOfMost, 2, false>(row, channel);
  }
  for (; channel + kWidth <= count; channel += kWidth) add_filter_row<Rows, K, Stride, EdgesOfOne, 1, false>(row, channel);
}

// Adds the sums of output row `at`, for `count` channels, to sums[taps][tile]; what lies beyond `count` in a tile, up to a whole
// vector, is written too. `ahead`: operands come from afar.
template <class T>
void add_filter_sums(const Geometry& g, const Rows<const T>& image, const Rows<const T>& gradient, int64_t at, int64_t count,
                     double* sums, int64_t tile, bool ahead = false) {
  const int64_t top = at * g.stride_height - g.pad_top;
  const Interval met = meeting(top, g.dilation_height, g.input_height, g.filter_height);
  const int64_t tap_row = g.filter_width * tile;
  // A sum of no products is a zero like another, and is added like another.
  const auto add_nothing = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin * tap_row; k < end * tap_row; ++k) sums[k] += 0.0;
  };
  if (met.begin >= met.end) return add_nothing(0, g.filter_height);
  add_nothing(0, met.begin);
  add_nothing(met.end, g.filter_height);
  FilterRow<T> row{image.row(top + met.begin * g.dilation_height), gradient.row(at), sums + met.begin * tap_row, tile,
                   g.input_width, g.output_width, g.pad_left, g.dilation_height * image.width * image.step, image.step, gradient.step,
                   ahead ? count / (2 * Vector<double>::kWidth) : 0};
  constexpr int64_t kWidth = Vector<double>::kWidth;
  const int64_t rows = met.end - met.begin;
  // As many tap rows together as there are registers for. Returns how many channels are done.
  const auto together = [&]<int Most, int K, int Stride>() {
    with_edges<K, Stride>(g, [&]<class Edges>(Edges) {
      FilterRow<T> next = row;
      int64_t left = rows;
      const auto take = [&]<int Rows>() {
        if constexpr (Rows <= Most && !(Rows == 2 && Most > 3))  // of five tap rows, three at least meet the usual pictures
          for (; left >= Rows; left -= Rows, next.input += Rows * row.input_row_step, next.sums += Rows * tap_row)
            add_filter_channels<Rows, K, Stride, Edges>(next, count);
      };
      take.template operator()<5>();
      take.template operator()<4>();
      take.template operator()<3>();
      take.template operator()<2>();
      take.template operator()<1>();
    });
    return count / kWidth * kWidth;
  };
  int64_t done = 0;
  if constexpr (kKnowsWindows<T>) {
    constexpr int kMost = kWidth >= 8 ? 5 : 2;
    if (g.dilation_width == 1 && g.output_width * g.stride_width >= g.filter_width - g.stride_width) {
      switch (g.stride_width * 8 + g.filter_width) {
        case 8 + 3: done = together.template operator()<3, 3, 1>(); break;
        case 8 + 5: done = together.template operator()<kMost, 5, 1>(); break;
        case 16 + 3: done = together.template operator()<3, 3, 2>(); break;
        case 16 + 5: done = together.template operator()<kMost, 5, 2>(); break;
      }
    }
  }
  if (done == count) return;
  for (int64_t i = 0; i < rows; ++i, row.input += row.input_row_step, row.sums += tap_row)
    for (int64_t channel = done; channel < count; channel += kWidth)
      add_filter_row_of_any_kind(g, row, channel, std::min(kWidth, count - channel));
}

}  // namespace exactqat
