// SPDX-License-Identifier: Apache-2.0
// Passes over an image that compute every element in float64 from parameters of its channel: for channels that are last (dense
// rows) and for channels whose elements lie in planes. A pass is
//   struct Pass {
//     struct Parameters { Lanes ...; };
//     Parameters of(int64_t p) const;  // of the channels from place p on
//     Parameters of_all(int64_t c) const;  // of channel c, in all lanes
//     void prefetch(int64_t i) const;  // the operands' element i
//     template <class Extent> Lanes value(const Parameters&, int64_t i, Extent) const;  // of the elements from i on
//   };
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "elementwise.h"
#include "reduce.h"

namespace exactqat {

constexpr int kLineLanes = kLine / int64_t{sizeof(float)} / Lanes::kWidth;  // that make a line of float32

template <class T>
inline Lanes lanes_at(const T* p, Whole) {
  return Lanes::load(p);
}
template <class T>
inline Lanes lanes_at(const T* p, Part part) {
  return Lanes::load(p, part.n);
}

template <bool Past, class T>
inline void put(T* p, Lanes lanes, Whole) {
  if constexpr (Past) stream(p, lanes);
  else lanes.store(p);
}
template <bool Past, class T>
inline void put(T* p, Lanes lanes, Part part) {
  lanes.store(p, part.n);
}

// As many as make a line of float32: one store, where there are registers of that size.
template <bool Past, class T, int N>
inline void put_line(T* p, const Lanes (&lanes)[N]) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512 low = _mm512_castps256_ps512(lanes[0].rounded());
    const Vector<T> line{_mm512_maskz_insertf32x8(0xffff, low, lanes[1].rounded(), 1)};
    if constexpr (Past) stream(p, line);
    else line.store(p);
    return;
  }
#endif
  for (int v = 0; v < N; ++v) put<Past>(p + v * Lanes::kWidth, lanes[v], Whole{});
}

// The elements of a plane, or of any run within one channel.
template <bool Past, class T, class Pass>
inline void fill_plane(T* out, int64_t begin, int64_t size, const typename Pass::Parameters& parameters, Pass pass) {
  const typename Pass::Parameters q = parameters;  // what is behind a reference would be loaded again after every store
  int64_t i = begin;
  const int64_t end = begin + size;
  for (; i + kLineLanes * Lanes::kWidth <= end; i += kLineLanes * Lanes::kWidth) {
    Lanes line[kLineLanes];
    for (int v = 0; v < kLineLanes; ++v) line[v] = pass.value(q, i + v * Lanes::kWidth, Whole{});
    put_line<Past>(out + i, line);
  }
  for (; i + Lanes::kWidth <= end; i += Lanes::kWidth) put<Past>(out + i, pass.value(q, i, Whole{}), Whole{});
  if (i < end) put<Past>(out + i, pass.value(q, i, Part{end - i}), Part{end - i});
}

// Rows of channels. Several rows share what is loaded of the parameters, unless memory is so slow that only going straight on counts;
// rows of few channels are put together to longer ones that are whole vectors.
class Rows {
 public:
  template <class T>
  Rows(const T* out, int64_t size, int64_t channels, bool in_place) : size_(size), channels_(channels) {
    const int64_t whole = std::lcm(channels, kLine / int64_t{sizeof(float)});
    width_ = whole <= kLongest ? whole : channels;
    past_ = !in_place && size * int64_t{sizeof(T)} >= too_large_for_the_cache() && aligned(out, kLine) &&
            width_ * int64_t{sizeof(T)} % kLine == 0;
  }

  // Parameters for a row, with room for a whole vector behind them.
  LineVector<double> spread(const double* parameters) const {
    return exactqat::spread(parameters, channels_, width_ + 2 * Lanes::kWidth);
  }

  // Puts the pass's values into `out`. The last rows come first: they were read last by the sums before it, so they are in the cache.
  template <class T, class Pass>
  void fill(T* out, Pass pass) const {
    if (past_) fill<true>(out, pass);
    else fill<false>(out, pass);
  }

 private:
  static constexpr int64_t kLongest = 1024, kTogether = 4;

  template <bool Past, class T, class Pass>
  void fill(T* out, Pass pass) const {
    const int64_t rows = size_ / width_, rest = size_ % width_;
    const int64_t rows_per_task = std::max<int64_t>(1, kTask / (width_ * kTogether)) * kTogether;
    const int64_t tasks = std::max<int64_t>(1, (rows + rows_per_task - 1) / rows_per_task);
    parallel_for(tasks, size_, [&](int64_t task) {
      const int64_t begin = (tasks - 1 - task) * rows_per_task, end = std::min(rows, begin + rows_per_task);
      int64_t row = begin;
      if (!Past)
        for (; row + kTogether <= end; row += kTogether) columns<false, kTogether>(out, row * width_, width_, pass);
      for (; row < end; ++row) columns<Past, 1>(out, row * width_, width_, pass);
      if (task == 0) columns<false, 1>(out, rows * width_, rest, pass);
      if (Past) finish_streaming();
    });
  }

  // `length` elements of each of Count rows that begin at `begin`.
  template <bool Past, int Count, class T, class Pass>
  void columns(T* out, int64_t begin, int64_t length, Pass pass) const {
    const int64_t stride = width_, ahead = Count * width_;  // the next rows: going along several, the processor foresees little
    int64_t p = 0;
    for (; p + kLineLanes * Lanes::kWidth <= length; p += kLineLanes * Lanes::kWidth) {
      typename Pass::Parameters q[kLineLanes];
      for (int v = 0; v < kLineLanes; ++v) q[v] = pass.of(p + v * Lanes::kWidth);
#pragma GCC unroll 8
      for (int row = 0; row < Count; ++row) {
        const int64_t i = begin + row * stride + p;
        if (Count > 1) pass.prefetch(i + ahead);
        Lanes line[kLineLanes];
        for (int v = 0; v < kLineLanes; ++v) line[v] = pass.value(q[v], i + v * Lanes::kWidth, Whole{});
        put_line<Past>(out + i, line);
      }
    }
    for (; p < length; p += Lanes::kWidth) {
      const auto q = pass.of(p);
      for (int row = 0; row < Count; ++row) {
        const int64_t i = begin + row * stride + p;
        if (p + Lanes::kWidth <= length) put<false>(out + i, pass.value(q, i, Whole{}), Whole{});
        else put<false>(out + i, pass.value(q, i, Part{length - p}), Part{length - p});
      }
    }
  }

  int64_t size_, channels_, width_;
  bool past_;
};

// Blocks of rows of one channel that is not last: its `count` planes of `size` elements lie `stride` apart. Item k of a block's
// sums goes to items[block * step + k * step / 2].
template <class T>
struct Planes {
  const T* first;
  int64_t count, size, stride;
  const T* plane(int64_t n) const { return first + n * stride; }
};

// Small planes are put together in `room`: pieces of them take longer to be found than to be read.
template <class T>
Planes<T> gathered(const Planes<T>& planes, T* room) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  for (int64_t n = 0; n < planes.count; ++n) {
    const T* from = planes.plane(n);
    T* to = room + n * planes.size;
    int64_t k = 0;
    for (; k + kWidth <= planes.size; k += kWidth) {
      __builtin_prefetch(from + k + planes.size);  // the next channel's plane, of many that are far apart
      Vector<T>::load(from + k).store(to + k);
    }
    if (k < planes.size) Vector<T>::load(from + k, planes.size - k).store(to + k, planes.size - k);
  }
  return {room, 1, planes.count * planes.size, 0};
}

// Two sums over each block of 64 rows of a channel; see channel_sums. The parameters of the channel begin at p.
template <class T, class Term>
void plane_sums(const Planes<T>& a, const Planes<T>& b, int64_t p, Term term, double* first_items, double* second_items,
                int64_t step) {
  constexpr int64_t kParts = kLanes / Lanes::kWidth;
  static constexpr double kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t rows = a.count * a.size, blocks = (rows + kBlock - 1) / kBlock;
  const auto sum = [=](const T* x, const T* y, int64_t count, int64_t block) __attribute__((always_inline)) {
    Lanes first[kParts], second[kParts];
    const auto add = [&](int64_t i, int64_t part, auto extent) __attribute__((always_inline)) {
      Lanes plus_first, plus_second;
      term(p + part * Lanes::kWidth, lanes_at(x + i, extent), lanes_at(y + i, extent), plus_first, plus_second);
      first[part] = first[part] + plus_first;
      second[part] = second[part] + plus_second;
    };
    if (count == kBlock) {
#pragma GCC unroll 32
      for (int64_t i = 0; i < kBlock; i += Lanes::kWidth) add(i, i / Lanes::kWidth % kParts, Whole{});
    } else {
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes)
        for (int64_t part = 0; part < kParts; ++part) add(i + part * Lanes::kWidth, part, Whole{});
      for (int64_t part = 0; part * Lanes::kWidth < count - i; ++part) {
        const int64_t rest = std::min(count - i - part * Lanes::kWidth, Lanes::kWidth);
        const Lanes before[2] = {first[part], second[part]};
        add(i + part * Lanes::kWidth, part, Part{rest});
        const auto there = less(Lanes::load(kPlaces), Lanes::all(double(rest)));
        first[part] = chosen(there, first[part], before[0]);
        second[part] = chosen(there, second[part], before[1]);
      }
    }
    first_items[block * step] = folded(first);
    second_items[block * step] = folded(second);
  };
  T block_a[kBlock], block_b[kBlock];
  int64_t plane = 0, position = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t count = std::min(kBlock, rows - block * kBlock);
    if (position == a.size) position = 0, ++plane;
    const T *x = a.plane(plane) + position, *y = b.plane(plane) + position;
    if (position + count <= a.size) {
      position += count;
    } else {
      for (int64_t filled = 0; filled < count;) {
        if (position == a.size) position = 0, ++plane;
        const int64_t take = std::min(count - filled, a.size - position);
        std::copy_n(a.plane(plane) + position, take, block_a + filled);
        std::copy_n(b.plane(plane) + position, take, block_b + filled);
        filled += take;
        position += take;
      }
      x = block_a, y = block_b;
    }
    sum(x, y, count, block);
  }
}

// Two sums over the rows of each channel that is not last, for several channels at a time: then(first channel, how many, first sums,
// second sums) may go over the same elements again, which are still in the cache.
template <class T, class Term, class Then>
void for_each_channel_sums(int64_t outer, int64_t channels, int64_t inner, const T* a, const T* b, Term&& term, Then&& then) {
  constexpr int64_t kSmall = 4 * kBlock, kNear = 32768, kMost = 16;
  const int64_t rows = outer * inner, blocks = (rows + kBlock - 1) / kBlock;
  const int64_t together = std::clamp<int64_t>(kNear / rows, 1, kMost);
  parallel_for((channels + together - 1) / together, outer * channels * inner, [&](int64_t task) {
    const int64_t begin = task * together, count = std::min(together, channels - begin), step = 2 * count;
    static thread_local LineVector<T> room;
    static thread_local Doubles items;
    if (int64_t(items.size()) < blocks * step) items.resize(blocks * step);
    if (inner < kSmall && int64_t(room.size()) < 2 * rows) room.resize(2 * rows);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t c = begin + k;
      Planes<T> of_a{a + c * inner, outer, inner, channels * inner}, of_b{b + c * inner, outer, inner, channels * inner};
      if (inner < kSmall && outer > 1) {
        of_a = gathered(of_a, room.data());
        of_b = a == b ? of_a : gathered(of_b, room.data() + rows);
      }
      plane_sums(of_a, of_b, c * kLanes, term, items.data() + k, items.data() + count + k, step);
    }
    tree_fold(items.data(), blocks, step);
    then(begin, count, items.data(), items.data() + count);
  });
}

}  // namespace exactqat
