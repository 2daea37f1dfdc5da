// SPDX-License-Identifier: Apache-2.0
// Passes over an image that compute every element from parameters of its channel, in its own dtype: for channels that are last
// (dense rows) and for channels whose elements lie in planes. A pass is
//   struct Pass {
//     using Element = T;
//     struct Parameters { Vector<T> ...; };
//     Parameters of(int64_t p) const;  // of the channels from place p on
//     Parameters of_all(int64_t c) const;  // of channel c, in all lanes
//     void prefetch(int64_t i) const;  // the operands' element i
//     template <class Extent> Vector<T> value(const Parameters&, int64_t i, Extent) const;  // of the elements from i on
//   };
// It works on lines: the elements whose float32 fill a line of the cache.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "elementwise.h"
#include "reduce.h"

namespace exactqat {

constexpr int64_t kLineElements = kLine / int64_t{sizeof(float)};
template <class T>
constexpr int kLineVectors = kLineElements / Vector<T>::kWidth;

template <class T>
inline Lanes lanes_at(const T* p, Whole) {
  return Lanes::load(p);
}
template <class T>
inline Lanes lanes_at(const T* p, Part part) {
  return Lanes::load(p, part.n);
}

template <class Pass>
using Line = typename Pass::Parameters[kLineVectors<typename Pass::Element>];

// Puts a pass's values into a tensor.
template <class T, class Pass>
struct Stored {
  using Element = T;
  T* out;
  Pass pass;

  using Parameters = typename Pass::Parameters;
  Parameters of(int64_t p) const { return pass.of(p); }
  void prefetch(int64_t i) const { pass.prefetch(i); }
  void prefetch_result(int64_t i) const { __builtin_prefetch(out + i, 1); }

  template <bool Past>
  void line(const Line<Pass>& q, int64_t i, Whole whole) const {
    for (int v = 0; v < kLineVectors<T>; ++v) {
      T* to = out + i + v * Vector<T>::kWidth;
      const Vector<T> values = pass.value(q[v], i + v * Vector<T>::kWidth, whole);
      if constexpr (Past) stream(to, values);
      else store(to, values, whole);
    }
  }

  template <bool Past>
  void line(const Line<Pass>& q, int64_t i, Part part) const {
    for (int v = 0; v < kLineVectors<T>; ++v) {
      const int64_t place = i + v * Vector<T>::kWidth, n = std::min(part.n - v * Vector<T>::kWidth, Vector<T>::kWidth);
      if (n > 0) store(out + place, pass.value(q[v], place, Part{n}), Part{n});
    }
  }
};
template <class T, class Pass>
Stored(T*, Pass) -> Stored<T, Pass>;  // for Clang before 17

// The elements of a plane, or of any run within one channel. What lies `ahead` of it will be written soon.
template <bool Past, class T, class Pass>
inline void fill_plane(T* out, int64_t begin, int64_t size, int64_t ahead, const typename Pass::Parameters& parameters,
                       Pass pass) {
  Line<Pass> q;  // a copy: a reference would be loaded again after every store
  for (auto& of_vector : q) of_vector = parameters;
  const Stored<T, Pass> stored{out, pass};
  int64_t i = begin;
  const int64_t end = begin + size;
  for (; i + kLineElements <= end; i += kLineElements) {
    if (!Past && ahead) __builtin_prefetch(out + i + ahead, 1);
    stored.template line<Past>(q, i, Whole{});
  }
  if (i < end) stored.template line<false>(q, i, Part{end - i});
}

template <class T, class Pass>
inline void fill_plane(bool past, T* out, int64_t begin, int64_t size, int64_t ahead, const typename Pass::Parameters& parameters,
                       const Pass& pass) {
  if constexpr (kMayGoPast<T>)
    if (past) return fill_plane<true>(out, begin, size, ahead, parameters, pass);
  fill_plane<false>(out, begin, size, ahead, parameters, pass);
}

// How far ahead of what goes straight on through memory is asked for. Most of what writing a large result takes is waiting for the
// memory that it will be written to.
template <class T>
constexpr int64_t kPageAhead = 4096 / int64_t{sizeof(T)};

// `length` elements of each of Count rows, `stride` apart; the first begins at `begin`.
template <bool Past, int Count, class Pass>
inline void lines(int64_t begin, int64_t length, int64_t stride, Pass pass) {
  // The next rows, since going along several the processor foresees little; or the next page, which it does not foresee either.
  const int64_t ahead = Count > 1 ? Count * stride : kPageAhead<typename Pass::Element>;
  const auto load = [&](int64_t p, Line<Pass>& q) __attribute__((always_inline)) {
    constexpr int64_t kWidth = Vector<typename Pass::Element>::kWidth;
    for (int v = 0; v < kLineVectors<typename Pass::Element>; ++v) q[v] = pass.of(p + v * kWidth);
  };
  int64_t p = 0;
  for (; p + kLineElements <= length; p += kLineElements) {
    Line<Pass> q;
    load(p, q);
#pragma GCC unroll 4
    for (int row = 0; row < Count; ++row) {
      const int64_t i = begin + row * stride + p;
      pass.prefetch(i + ahead);
      if constexpr (!Past) pass.prefetch_result(i + ahead);
      pass.template line<Past>(q, i, Whole{});
    }
  }
  if (p == length) return;
  Line<Pass> q;
  load(p, q);
  for (int row = 0; row < Count; ++row) pass.template line<false>(q, begin + row * stride + p, Part{length - p});
}

// Whether a result in runs of `length` elements that are whole lines goes past the cache. `tensors`: how many of this size a pass
// reads and writes.
template <class T>
inline bool goes_past_the_cache(const T* out, int64_t size, int64_t length, int64_t tensors, bool in_place) {
  return kMayGoPast<T> && !in_place && too_large_for_the_cache(tensors, size * int64_t{sizeof(T)}) && aligned(out, kLine) &&
         length % kLineElements == 0;
}

// Rows of channels. Several rows share what is loaded of the parameters while all tensors of a pass stay in the last cache. Beyond it
// memory is so slow that only going straight on counts, unless each row has pages of its own, which the processor foresees one by
// one. Rows of few channels are joined into longer ones that are whole lines, and not so few that beginning a row counts.
struct Rows {
  static constexpr int64_t kLong = 256, kLongest = 1024, kTogether = 4, kPage = 4096;
  int64_t size, channels, width;
  bool past, together;

  // `tensors`: see goes_past_the_cache. `whole_lines`: every line begins at a multiple of its length, however many parameters that
  // takes.
  template <class T>
  Rows(const T* out, int64_t size, int64_t channels, int64_t tensors, bool in_place, bool whole_lines = false)
      : size(size), channels(channels) {
    const int64_t whole = std::lcm(channels, kLineElements);
    width = whole_lines || whole <= kLongest ? whole * std::max<int64_t>(1, kLong / whole) : channels;
    together = tensors * size * int64_t{sizeof(T)} < too_large_for_the_cache() || width * int64_t{sizeof(T)} >= kPage;
    past = goes_past_the_cache(out, size, width, tensors, in_place);
  }

  // Parameters for a row, with room for a whole line after them.
  template <class T>
  LineVector<T> spread(const T* parameters) const {
    return exactqat::spread(parameters, channels, width + kLineElements);
  }

  // Calls pass.line<past the cache>(parameters, i, extent) for all lines, backwards: the last rows were read last by the sums.
  template <class Pass>
  void each(Pass pass) const {
    if constexpr (kMayGoPast<typename Pass::Element>)
      if (past) return each<true>(pass);
    each<false>(pass);
  }

  template <bool Past, class Pass>
  void each(Pass pass) const {
    const int64_t rows = size / width, rest = size % width;
    const int64_t rows_per_task = std::max<int64_t>(1, kTask / (width * kTogether)) * kTogether;
    const int64_t tasks = std::max<int64_t>(1, (rows + rows_per_task - 1) / rows_per_task);
    // Lines 4 KiB apart share a place in the first cache: those of four rows of such a length, and what is asked for ahead,
    // would meet in one or two.
    constexpr int64_t kFewPlaces = 2;
    const bool collide = kPage / std::gcd(width * int64_t{sizeof(typename Pass::Element)}, kPage) <= kFewPlaces;
    const auto step = [&](int64_t task) {
      int64_t row = task * rows_per_task;
      const int64_t end = std::min(rows, row + rows_per_task);
      if constexpr (!Past && Lanes::kWidth > 2) {  // else there are too few registers to share anything
        for (; together && !collide && row + kTogether <= end; row += kTogether)
          lines<false, kTogether>(row * width, width, width, pass);
        for (; together && collide && row + 2 <= end; row += 2) lines<false, 2>(row * width, width, width, pass);
      }
      for (; row < end; ++row) lines<Past, 1>(row * width, width, width, pass);
      if (task + 1 == tasks) lines<false, 1>(rows * width, rest, width, pass);
      if (Past) finish_streaming();
    };
    parallel_for(tasks, size, step, Order::backwards);
  }

  // The same for tensors of 16 bits, piece by piece; make(operands, result) makes the pass.
  template <class T, size_t N, class Make>
  void each_of_halves(const Tensor<T>& out, const std::array<Tensor<T>, N>& operands, bool in_place, const Make& make) const {
    const int64_t together = std::clamp<int64_t>(kPieceElements / width, 1, kTogether);
    const int64_t rows = size / width, rows_per_task = std::max<int64_t>(1, kTask / (width * together)) * together;
    const bool past = halves_go_past_the_cache(out, size, in_place);
    parallel_for((rows + rows_per_task) / rows_per_task, size, [&](int64_t task) {
      Pieces<T, N> pieces(out, operands, together * width, past);
      const int64_t end = std::min(rows, (task + 1) * rows_per_task);
      for (int64_t row = task * rows_per_task, count; row < end; row += count) {
        count = std::min(together, end - row);
        pieces.make(row * width, count * width, [&](const auto& from, T* to) {
          const auto pass = make(from, to);
          if (count == kTogether) return lines<false, kTogether>(row * width, width, width, pass);
          for (int64_t k = row; k < row + count; ++k) lines<false, 1>(k * width, width, width, pass);
        });
      }
      if (const int64_t rest = size % width; rest != 0 && task == rows / rows_per_task)
        pieces.make(rows * width, rest, [&](const auto& from, T* to) { lines<false, 1>(rows * width, rest, width, make(from, to)); });
    }, Order::backwards);
  }
};

// The elements of a channel that is not last: `count` planes of `size` elements, `stride` apart.
template <class T>
struct Planes {
  const T* first;
  int64_t count, size, stride;
  const T* plane(int64_t n) const { return first + n * stride; }
};

// Small planes are collected in `room`, those of a channel one after the other: pieces of them take longer to be found than to
// be read. Images come one after the other, so that memory is read in runs.
template <class S, class T>
void gather(const Planes<S>& planes, int64_t channels, T* room) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  const auto copy_image = [=](int64_t n, int64_t whole) __attribute__((always_inline)) {
    const S* from = planes.plane(n);
    T* to = room + n * planes.size;
    for (int64_t c = 0; c < channels; ++c, from += planes.size, to += planes.count * planes.size) {
      int64_t k = 0;
      for (; k < whole; k += kWidth) {
        __builtin_prefetch(from + k + planes.stride);
        load(from + k, Whole{}).store(to + k);
      }
      if (k < planes.size) load(from + k, Part{planes.size - k}).store(to + k, planes.size - k);
    }
  };
  // What a whole vector copies beyond the end of a plane lies where the next images' will, which come later; but for the last ones.
  const int64_t last = std::max<int64_t>(0, planes.count - (kWidth + planes.size - 1) / planes.size);
  for (int64_t n = 0; n < last; ++n) copy_image(n, planes.size);
  for (int64_t n = last; n < planes.count; ++n) copy_image(n, planes.size / kWidth * kWidth);
}

// Two sums over a block of up to 64 rows of one channel; see channel_sums. The parameters of the channel begin at p.
template <class T, class Term>
[[gnu::always_inline]] inline void plane_block_sums(const T* x, const T* y, int64_t count, int64_t p, const Term& term,
                                                    double* first_item, double* second_item) {
  constexpr int64_t kParts = kLanes / Lanes::kWidth;
  static constexpr double kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
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
  *first_item = folded(first);
  *second_item = folded(second);
}

// The same over each block of the rows of a channel.
template <class T, class Term>
void plane_sums(const Planes<T>& a, const Planes<T>& b, int64_t p, Term term, double* first_items, double* second_items,
                int64_t step) {
  const int64_t rows = a.count * a.size, blocks = (rows + kBlock - 1) / kBlock;
  // The same place in the next plane: where it is far away, the processor does not foresee it.
  const auto prefetch_next = [](const T* from, int64_t plane, const Planes<T>& planes) __attribute__((always_inline)) {
    if (plane + 1 == planes.count) return;
    for (int64_t i = 0; i < kBlock; i += kLineElements) __builtin_prefetch(from + planes.stride + i, 0, 2);
  };
  T block_a[kBlock], block_b[kBlock];
  int64_t plane = 0, position = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t count = std::min(kBlock, rows - block * kBlock);
    if (position == a.size) position = 0, ++plane;
    const T *x = a.plane(plane) + position, *y = b.plane(plane) + position;
    if (position + count <= a.size) {
      prefetch_next(x, plane, a);
      if (b.first != a.first) prefetch_next(y, plane, b);
      position += count;
    } else {
      for (int64_t filled = 0; filled < count;) {
        if (position == a.size) position = 0, ++plane;
        const int64_t take = std::min(count - filled, a.size - position);
        std::copy_n(a.plane(plane) + position, take, block_a + filled);
        if (b.first != a.first) std::copy_n(b.plane(plane) + position, take, block_b + filled);
        filled += take;
        position += take;
      }
      x = block_a, y = b.first != a.first ? block_b : block_a;
    }
    plane_block_sums(x, y, count, p, term, first_items + block * step, second_items + block * step);
  }
}

// The same for the planes of several channels, `count` images of them that are read straight on. The rows of a block that goes on in
// the next image wait for it.
template <class T, class Term>
void image_sums(const T* a, const T* b, int64_t count, int64_t channels, int64_t size, int64_t stride, int64_t p, Term term,
                double* items) {
  const int64_t rows = count * size, step = 2 * channels;
  const bool same = a == b;
  const auto room = std::make_unique_for_overwrite<T[]>((same ? 1 : 2) * channels * kBlock);
  T *waiting_a = room.get(), *waiting_b = same ? waiting_a : waiting_a + channels * kBlock;
  const auto copy = [](const T* from, int64_t n, T* to) __attribute__((always_inline)) {
    constexpr int64_t kWidth = Vector<T>::kWidth;
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) load(from + i, Whole{}).store(to + i);
    if (i < n) load(from + i, Part{n - i}).store(to + i, n - i);
  };
  for (int64_t n = 0; n < count; ++n) {
    const int64_t first_row = n * size, end = first_row + size;
    for (int64_t c = 0; c < channels; ++c) {
      const T *plane_a = a + n * stride + c * size, *plane_b = b + n * stride + c * size;
      T *of_a = waiting_a + c * kBlock, *of_b = waiting_b + c * kBlock;
      for (int64_t row = first_row, next; row < end; row = next) {
        const int64_t block = row / kBlock, begin = block * kBlock, rows_of_block = std::min(kBlock, rows - begin);
        next = std::min(begin + rows_of_block, end);
        const T *x = plane_a + (row - first_row), *y = plane_b + (row - first_row);
        if (next - row < rows_of_block) {
          copy(x, next - row, of_a + (row - begin));
          if (!same) copy(y, next - row, of_b + (row - begin));
          if (next < begin + rows_of_block) break;
          x = of_a, y = of_b;
        }
        double* item = items + block * step + c;
        plane_block_sums(x, y, rows_of_block, p + c * kLanes, term, item, item + channels);
      }
    }
  }
}

// How many channels of so many rows are gone over before the same elements are needed again: few enough to be found in the cache,
// and whole lines of each image if they are many.
inline int64_t channels_together(int64_t rows) {
  constexpr int64_t kNear = 16384, kMost = 64;
  const int64_t channels = std::clamp<int64_t>(kNear / rows, 1, kMost);
  return channels < kLineElements ? channels : channels / kLineElements * kLineElements;
}

// The same for a tensor of any dtype: some channels' elements, of planes of `size`, in float32 or float64 one channel after the
// other.
template <class T>
void gather(const Tensor<T>& x, int64_t outer, int64_t channels, int64_t size, int64_t channel, int64_t count, T* room) {
  const auto gathered = [&]<class S>(const S* data) {
    gather(Planes<S>{data + channel * size, outer, size, channels * size}, count, room);
  };
  if constexpr (kMayBeHalves<T>) {
    if (x.dtype() == DType::float16) return gathered(x.template as<float16>());
    if (x.dtype() == DType::bfloat16) return gathered(x.template as<bfloat16>());
  }
  gathered(x.data());
}

// Rows [begin, begin + count) of a channel of 16 bits, widened.
template <class T>
void widen_rows(const Tensor<T>& x, int64_t channels, int64_t size, int64_t channel, int64_t begin, int64_t count, T* room) {
  for (int64_t row = begin, take; row < begin + count; row += take, room += take) {
    const int64_t position = row % size;
    take = std::min(begin + count - row, size - position);
    x.read((row / size * channels + channel) * size + position, take, room);
  }
}

// Whether small planes of so large a tensor are read straight on, image by image: those of one channel lie too far from each other
// to be foreseen, and there would be no room for many channels' at a time. Planes of less than a block, as all of them have to wait for
// the next image, only where nothing would be found again in the last cache.
template <class T>
bool sums_go_straight_on(int64_t outer, int64_t channels, int64_t inner, const Tensor<T>& a) {
  const int64_t bytes = outer * channels * inner * int64_t{sizeof(T)};
  return !a.in_halves() && outer > 1 && kLineElements <= inner && inner < 4 * kBlock &&
         (inner < kBlock ? bytes >= too_large_for_the_cache() : far_from_the_core(bytes));
}

// How many channels are summed together then: enough for long runs, few enough for several tasks.
inline int64_t channels_of_a_run(int64_t channels, int64_t inner) {
  constexpr int64_t kRun = 8192, kAtLeast = 4;
  const int64_t tasks = (channels * inner + kRun * kAtLeast - 1) / (kRun * kAtLeast) * kAtLeast;
  return (channels + tasks - 1) / tasks;
}

// Two sums over the rows of each channel that is not last, for several channels at a time. then(first channel, count, first sums,
// second sums) may go over the same elements again: they are still in the cache, unless sums go straight on.
template <class T, class Term, class Then>
void for_each_channel_sums(int64_t outer, int64_t channels, int64_t inner, const Tensor<T>& a, const Tensor<T>& b, Term&& term,
                           Then&& then) {
  constexpr int64_t kSmall = kBlock, kSmallFarAway = 4 * kBlock;
  const int64_t rows = outer * inner, blocks = (rows + kBlock - 1) / kBlock;
  const bool straight = sums_go_straight_on(outer, channels, inner, a);
  const int64_t together = straight ? channels_of_a_run(channels, inner) : channels_together(rows);
  const bool far = far_from_the_core(outer * channels * inner * int64_t{sizeof(T)});
  const bool same = a.address() == b.address();
  const int64_t different = same ? 1 : 2;
  parallel_for((channels + together - 1) / together, outer * channels * inner, [&](int64_t task) {
    const int64_t begin = task * together, count = std::min(together, channels - begin), step = 2 * count;
    // Of one channel alone there may be as many elements as in a tensor: what has to be widened is, in pieces.
    const bool in_pieces = a.in_halves() && (inner >= kSmallFarAway || count == 1);
    const bool gathers = !straight && !in_pieces && outer > 1 && inner < (far ? kSmallFarAway : kSmall);
    const auto items = scratch(blocks * step);
    const int64_t room_size = in_pieces ? kPieceElements : gathers || a.in_halves() ? count * rows : 0;
    const auto room = std::make_unique_for_overwrite<T[]>(different * room_size);
    T *room_a = room.get(), *room_b = same ? room_a : room_a + room_size;
    const auto sum = [&](const Planes<T>& of_a, const Planes<T>& of_b, int64_t k, int64_t first_block) {
      double* to = items.get() + first_block * step + k;
      plane_sums(of_a, of_b, (begin + k) * kLanes, term, to, to + count, step);
    };
    if (straight) {
      const int64_t offset = begin * inner;
      image_sums(a.data() + offset, b.data() + offset, outer, count, inner, channels * inner, begin * kLanes, term, items.get());
    } else if (in_pieces) {
      static_assert(kPieceElements % kBlock == 0);
      for (int64_t k = 0; k < count; ++k)
        for (int64_t row = 0; row < rows; row += kPieceElements) {
          const int64_t size = std::min(kPieceElements, rows - row);
          widen_rows(a, channels, inner, begin + k, row, size, room_a);
          if (!same) widen_rows(b, channels, inner, begin + k, row, size, room_b);
          sum({room_a, 1, size, 0}, {room_b, 1, size, 0}, k, row / kBlock);
        }
    } else if (room_size != 0) {
      gather(a, outer, channels, inner, begin, count, room_a);
      if (!same) gather(b, outer, channels, inner, begin, count, room_b);
      for (int64_t k = 0; k < count; ++k) sum({room_a + k * rows, 1, rows, 0}, {room_b + k * rows, 1, rows, 0}, k, 0);
    } else {
      const auto planes_of = [&](const Tensor<T>& x, int64_t k) {
        return Planes<T>{x.data() + (begin + k) * inner, outer, inner, channels * inner};
      };
      for (int64_t k = 0; k < count; ++k) sum(planes_of(a, k), planes_of(b, k), k, 0);
    }
    tree_fold(items.get(), blocks, step);
    then(begin, count, items.get(), items.get() + count);
  });
}

}  // namespace exactqat
