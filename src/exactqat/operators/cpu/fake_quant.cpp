// SPDX-License-Identifier: Apache-2.0
// FakeQuantWithMinMax*: the same arithmetic as reference/fake_quant.py.
#include <cmath>
#include <cstring>
#include <memory>

#include "call.h"
#include "elementwise.h"
#include "nudge.h"
#include "reduce.h"

namespace exactqat {
namespace {

template <class T>
NudgedVectors<T> nudge_all(T min, T max, const Numbers& numbers) {
  return {Vector<T>::all(min), Vector<T>::all(max), Quantized<T>(numbers)};
}

template <class T>
NudgedVectors<T> nudge_attributes(const Numbers& numbers) {
  return nudge_all(T(numbers.real("min")), T(numbers.real("max")), numbers);
}

// The same for each channel, one array for each quantity, from the beginning of a line on and with room for a vector at the end.
template <class T>
struct NudgedChannels {
  LineVector<T> memory;
  T *nudged_min, *nudged_max, *nudged_scale, *inv_nudged_scale, *quant_zero;
  T *no_range, *reversed;  // 1 or 0; reversed: the nudged minimum is above the maximum
  bool any_no_range = false, any_unordered = false;  // unordered: reversed or NaN

  NudgedChannels(const T* min, const T* max, int64_t channels, const Numbers& numbers) {
    constexpr int64_t kWidth = Vector<T>::kWidth, kOfLine = kLine / int64_t{sizeof(T)};
    const int64_t size = (channels + kOfLine) / kOfLine * kOfLine;
    memory.resize(7 * size);
    T* next = memory.data();
    for (T** quantity : {&nudged_min, &nudged_max, &nudged_scale, &inv_nudged_scale, &quant_zero, &no_range, &reversed})
      *quantity = next, next += size;
    const Quantized<T> quantized(numbers);
    const auto vector = [&](int64_t c, auto extent) {
      const NudgedVectors<T> n(load(min + c, extent), load(max + c, extent), quantized);
      const uint32_t real = (uint32_t{1} << count_of<T>(extent)) - 1;  // not the lanes after the last channel
      any_no_range |= (bits_of(n.no_range) & real) != 0;
      any_unordered |= (bits_of(less_equal(n.nudged_min, n.nudged_max)) & real) != real;
      const Vector<T> one = Vector<T>::all(T(1));
      n.nudged_min.store(nudged_min + c), n.nudged_max.store(nudged_max + c);
      n.nudged_scale.store(nudged_scale + c), n.inv_nudged_scale.store(inv_nudged_scale + c);
      n.quant_zero.store(quant_zero + c);
      kept(n.no_range, one).store(no_range + c), kept(less(n.nudged_max, n.nudged_min), one).store(reversed + c);
    };
    int64_t c = 0;
    for (; c + kWidth <= channels; c += kWidth) vector(c, Whole{});
    if (c < channels) vector(c, Part{channels - c});
  }
  NudgedChannels(const NudgedChannels&) = delete;
};

// Where elements lie.
template <class T>
struct Sides {
  Mask<T> inside, below, above;
};

template <class T>
Sides<T> sides_of(Vector<T> x, Vector<T> low, Vector<T> high) {
  return {less_equal(low, x) & less_equal(x, high), less(x, low), less(high, x)};
}

// The same for a range that is neither reversed nor NaN, in the fewest steps.
template <class T>
Sides<T> sides_of_range(Vector<T> x, Vector<T> low, Vector<T> high) {
#if defined(__AVX512F__)
  // Processors make one mask in a cycle, from others too.
  return {equal(x, clamp(x, low, high)), less(x, low), less(high, x)};
#else
  // What reaches only one of the bounds lies beyond the other.
  const Mask<T> reaches_low = less_equal(low, x), reaches_high = less_equal(x, high);
  return {reaches_low & reaches_high, without(reaches_high, reaches_low), without(reaches_low, reaches_high)};
#endif
}

// The packed mask: element i has bits 2 * (i % 4) and the next of byte i / 4. The lower one says inside or above, the higher one
// inside or below; NaN has neither. In a reversed range nothing is inside, and both bits say below and above at the same time.
// Written for `count` elements from i on.
template <class T>
void pack(uint8_t* mask, int64_t i, Mask<T> lower, Mask<T> higher, int64_t count) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  uint32_t packed = interleaved(bits_of(lower), bits_of(higher));
  if (count < kWidth) packed &= (uint32_t{1} << 2 * count) - 1;
  if constexpr (kWidth >= 4) {
    if (count == kWidth) std::memcpy(mask + i / 4, &packed, kWidth / 4);
    else std::memcpy(mask + i / 4, &packed, (count + 3) / 4);
  } else {
    const uint8_t before = i % 4 ? mask[i / 4] : 0;
    mask[i / 4] = uint8_t(before | packed << 2 * (i % 4));
  }
}

// Where each x lies. Any ranges, or, in fewer steps, ranges that are neither reversed nor NaN: what is not below is inside or above.
template <bool Any, class T>
void pack_sides(uint8_t* mask, int64_t i, Vector<T> x, Vector<T> low, Vector<T> high, int64_t count) {
  if constexpr (Any) {
    const Sides<T> sides = sides_of(x, low, high);
    pack(mask, i, sides.inside | sides.above, sides.inside | sides.below, count);
  } else {
    pack(mask, i, less_equal(low, x), less_equal(x, high), count);
  }
}

// Bits of no element beyond `count` are looked at.
template <class T>
uint32_t packed_at(const uint8_t* mask, int64_t i, int64_t count) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  uint32_t packed = 0;
  if (kWidth >= 4 && count == kWidth) {
    std::memcpy(&packed, mask + i / 4, kWidth / 4);
  } else {  // a call of memcpy for one to four bytes takes longer than all else
    for (int64_t k = 0; 4 * k < count; ++k) packed |= uint32_t{mask[i / 4 + k]} << 8 * k;
  }
  return kWidth < 4 ? packed >> 2 * (i % 4) : packed;
}

// What a vector of elements is quantized with.
template <class T>
struct Ranges {
  Vector<T> low, high, scale, inverse, zero;
};

template <class T>
Vector<T> quantized(Vector<T> x, const Ranges<T>& n, bool division) {
  const Vector<T> shifted = clamp(x, n.low, n.high) - n.low;
  const Vector<T> steps = division ? divided(shifted, n.scale) : shifted * n.inverse;
  return floored((steps - n.zero) + Vector<T>::all(T(0.5))) * n.scale;
}

// A whole tensor with one range. A mask is written if one is given.
template <class S, class T>
void quantize_whole(const Call& call, const NudgedVectors<T>& n, bool no_range, bool division, uint8_t* mask) {
  const S* inputs = call.operands[0].as<S>();
  S* outputs = call.results[0].as<S>();
  using V = Vector<T>;
  const Ranges<T> ranges{n.nudged_min, n.nudged_max, n.nudged_scale, n.inv_nudged_scale, n.quant_zero};
  const V low = n.nudged_min, high = n.nudged_max;
  const Runs runs(outputs, call.operands[0].size(), 1, inputs == outputs, mask ? 16 : 1);
  if (no_range || (mask && !bits_of(less_equal(low, high)))) {
    const V range = V::all(T(!no_range));
    runs.fill(outputs, [=](int64_t i, auto extent) __attribute__((always_inline)) {
      const V x = load(inputs + i, extent);
      if (mask) pack_sides<true>(mask, i, x, low, high, count_of<T>(extent));
      return kept(less(V{}, range), quantized(x, ranges, division));
    });
  } else {
    runs.fill(outputs, [=](int64_t i, auto extent) __attribute__((always_inline)) {
      const V x = load(inputs + i, extent);
      if (mask) pack_sides<false>(mask, i, x, low, high, count_of<T>(extent));
      return quantized(x, ranges, division);
    });
  }
}

template <class S, class T>
void quantize_channels(const Call& call, uint8_t* mask) {
  const S* inputs = call.operands[0].as<S>();
  S* outputs = call.results[0].as<S>();
  const int64_t channels = call.operands[1].size(), size = call.operands[0].size();
  if (size == 0) return;
  if (channels == 1) {
    const auto n = nudge_all(*call.operands[1].as<T>(), *call.operands[2].as<T>(), call.numbers);
    return quantize_whole<S>(call, n, bits_of(n.no_range), false, mask);
  }
  using V = Vector<T>;
  const NudgedChannels<T> n(call.operands[1].as<T>(), call.operands[2].as<T>(), channels, call.numbers);
  const Runs runs(outputs, size, channels, inputs == outputs, mask ? 16 : 1);
  const auto lows = runs.spread(n.nudged_min), highs = runs.spread(n.nudged_max), scales = runs.spread(n.nudged_scale);
  const auto inverses = runs.spread(n.inv_nudged_scale), zeros = runs.spread(n.quant_zero);
  const T *low = lows.data, *high = highs.data, *scale = scales.data, *inverse = inverses.data, *zero = zeros.data;
  const auto at = [=](int64_t p) __attribute__((always_inline)) {
    return Ranges<T>{V::load(low + p), V::load(high + p), V::load(scale + p), V::load(inverse + p), V::load(zero + p)};
  };
  if (n.any_no_range || (mask && n.any_unordered)) {
    const auto no_ranges = runs.spread(n.no_range);
    const T* no_range = no_ranges.data;
    const auto at_any = [=](int64_t p) __attribute__((always_inline)) {
      return std::pair{at(p), less(V::load(no_range + p), V::all(T(1)))};
    };
    runs.fill(outputs, at_any, [=](int64_t i, const auto& any, auto extent) __attribute__((always_inline)) {
      const auto& [ranges, has_range] = any;
      const V x = load(inputs + i, extent);
      if (mask) pack_sides<true>(mask, i, x, ranges.low, ranges.high, count_of<T>(extent));
      return kept(has_range, quantized(x, ranges, false));
    });
  } else {
    runs.fill(outputs, at, [=](int64_t i, const Ranges<T>& ranges, auto extent) __attribute__((always_inline)) {
      const V x = load(inputs + i, extent);
      if (mask) pack_sides<false>(mask, i, x, ranges.low, ranges.high, count_of<T>(extent));
      return quantized(x, ranges, false);
    });
  }
}

}  // namespace

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_args) {
  FlushDenormals flush;
  quantize_whole<S>(call, nudge_attributes<T>(call.numbers), false, false, nullptr);
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_args_training) {
  FlushDenormals flush;
  quantize_whole<S>(call, nudge_attributes<T>(call.numbers), false, false, call.results[1].as<uint8_t>());
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars) {
  FlushDenormals flush;
  const auto n = nudge_all(*call.operands[1].as<T>(), *call.operands[2].as<T>(), call.numbers);
  quantize_whole<S>(call, n, bits_of(n.no_range), true, nullptr);
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_training) {
  FlushDenormals flush;
  const auto n = nudge_all(*call.operands[1].as<T>(), *call.operands[2].as<T>(), call.numbers);
  quantize_whole<S>(call, n, bits_of(n.no_range), true, call.results[1].as<uint8_t>());
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_per_channel) {
  FlushDenormals flush;
  quantize_channels<S, T>(call, nullptr);
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_per_channel_training) {
  FlushDenormals flush;
  quantize_channels<S, T>(call, call.results[1].as<uint8_t>());
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_args_gradient) {
  FlushDenormals flush;
  const S *gradients = call.operands[0].as<S>(), *inputs = call.operands[1].as<S>();
  S* backprops = call.results[0].as<S>();
  using V = Vector<T>;
  const auto n = nudge_attributes<T>(call.numbers);
  const V low = n.nudged_min, high = n.nudged_max;
  const Runs runs(backprops, call.operands[1].size(), 1, backprops == gradients || backprops == inputs);
  runs.fill(backprops, [=](int64_t i, auto extent) __attribute__((always_inline)) {
    return masked(load(gradients + i, extent), sides_of(load(inputs + i, extent), low, high).inside);
  });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_args_gradient_from_mask) {
  FlushDenormals flush;
  const S* gradients = call.operands[0].as<S>();
  const uint8_t* mask = call.operands[1].as<uint8_t>();
  S* backprops = call.results[0].as<S>();
  const Runs runs(backprops, call.operands[0].size(), 1, backprops == gradients, 16);
  runs.fill(backprops, [=](int64_t i, auto extent) __attribute__((always_inline)) {
    const uint32_t packed = packed_at<T>(mask, i, count_of<T>(extent));
    return masked(load(gradients + i, extent), low_bits<T>(packed) & high_bits<T>(packed));
  });
}

namespace {

// How a gradient is made: any one, or, in fewer steps, finite ones of ranges that are not empty, reversed or NaN. Those by where
// the tensors of a call are: in the cache, beyond it, or so large that even a result alone goes past it.
enum class Way { any, near, far, past };

// What the gradient needs to know of a vector of channels.
template <class T>
struct ChannelVectors {
  Vector<T> low, high, no_range, reversed;
};

// The same for all of them, one array for each quantity, the last two null if there are only zeros. They are those of the 8 lanes of all channels (reduce.h), or the first
// `period` of these if then the same ones follow again.
template <class T>
struct Places {
  const T *low, *high, *no_range, *reversed;
  int64_t period;

  template <Way way>
  ChannelVectors<T> at(int64_t p) const {
    using V = Vector<T>;
    ChannelVectors<T> channels{V::load(low + p), V::load(high + p), {}, {}};
    if (way == Way::any && no_range) channels.no_range = V::load(no_range + p), channels.reversed = V::load(reversed + p);
    return channels;
  }
};

// The lanes of a block, lanes[8][width] -> sums[width].
void fold_into(const double* from, int64_t width, double* sums) {
  const auto fold = [=](int64_t k, auto extent) __attribute__((always_inline)) {
    Lanes lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = load(from + lane * width + k, extent);
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
      for (int64_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[half + lane];
    store(sums + k, lanes[0], extent);
  };
  int64_t k = 0;
  for (; k + Lanes::kWidth <= width; k += Lanes::kWidth) fold(k, Whole{});
  if (k < width) fold(k, Part{width - k});
}

// Two sources of sides: the inputs themselves, and the mask that the training form kept of them.
template <class S, class T>
struct FromInputs {
  const S* inputs;

  void prefetch(int64_t i) const { __builtin_prefetch(inputs + i, 0, 2); }

  template <Way way, class Extent>
  Sides<T> at(int64_t i, const ChannelVectors<T>& n, Extent extent) const {
    const Vector<T> x = load(inputs + i, extent);
    return way == Way::any ? sides_of(x, n.low, n.high) : sides_of_range(x, n.low, n.high);
  }
};

template <class T>
struct FromMask {
  const uint8_t* mask;

  void prefetch(int64_t i) const { __builtin_prefetch(mask + i / 4, 0, 2); }

  template <Way way, class Extent>
  Sides<T> at(int64_t i, const ChannelVectors<T>& n, Extent extent) const {
    const uint32_t packed = packed_at<T>(mask, i, count_of<T>(extent));
    const Mask<T> lower = low_bits<T>(packed), higher = high_bits<T>(packed);
    if constexpr (way != Way::any) return {lower & higher, without(higher, lower), without(lower, higher)};
    const Mask<T> both = lower & higher & less(Vector<T>{}, n.reversed);
    return {without(lower & higher, both), without(higher, lower) | both, without(lower, higher) | both};
  }
};

// Part I of the vector of float64 that a vector of gradients is, which lies at p. Upper halves come from memory with their
// conversion; from a register they would have to be moved first.
template <int I, class S, class T, class Extent>
inline Lanes wide([[maybe_unused]] const S* p, Vector<T> gradient, Extent) {
#if defined(__AVX2__)
  if constexpr (I > 0 && std::is_same_v<S, float> && std::is_same_v<Extent, Whole>) return Lanes::load(p + I * Lanes::kWidth);
#endif
  return doubles<I>(gradient);
}

// Adds what lies below and above to two sums: part I of a vector, which is one or two vectors of float64. A gradient counts as if
// multiplied by 1 or 0; while it is finite, leaving out what is multiplied by 0 is the same.
template <Way way, int I, class T>
inline void add_sides(Lanes& below, Lanes& above, const Sides<T>& sides, Lanes wide) {
  if constexpr (way == Way::any) {
    const Vector<T> one = Vector<T>::all(T(1));
    below = below + wide * doubles<I>(kept(sides.below, one));
    above = above + wide * doubles<I>(kept(sides.above, one));
  } else {
    below = added<I>(below, sides.below, wide);
    above = added<I>(above, sides.above, wide);
  }
}

// So many channels that a core's own cache holds two blocks of them, and what becomes of these.
constexpr int64_t kFewChannels = 256;

// tree_fold, but blocks of items on all cores.
void fold_all(double* items, int64_t count, int64_t width) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  parallel_for(blocks, count * width, [=](int64_t block) {
    tree_fold(items + block * kBlock * width, std::min(kBlock, count - block * kBlock), width);
  });
  for (int64_t block = 1; block < blocks; ++block) std::copy_n(items + block * kBlock * width, width, items + block * width);
  tree_fold(items, blocks, width);
}

// One call of a gradient kernel.
template <class S, class T, class Source>
struct GradientCall {
  static constexpr int64_t kWidth = Vector<T>::kWidth;
  static constexpr int kParts = sizeof(double) / sizeof(T);  // vectors of float64 in one vector

  const S* gradients;
  Source source;
  S* backprops;
  Places<T> n;
  int64_t channels;

  struct Element {
    Sides<T> sides;
    Lanes wide[kParts];
  };

  // Writes the results for the elements from i on. `check` becomes NaN with a gradient that is not finite, if that matters.
  template <Way way, class Extent>
  Element element(int64_t i, const ChannelVectors<T>& channels, Extent extent, Vector<T>& check) const {
    const Vector<T> gradient = load(gradients + i, extent);
    Element e{source.template at<way>(i, channels, extent), {exactqat::wide<0>(gradients + i, gradient, extent)}};
    if constexpr (kParts == 2) e.wide[1] = exactqat::wide<1>(gradients + i, gradient, extent);
    Vector<T> result;
    if constexpr (way == Way::any) result = chosen(less(Vector<T>{}, channels.no_range), gradient, masked(gradient, e.sides.inside));
    else result = masked_noting(check, gradient, e.sides.inside);
    if constexpr (way == Way::past && std::is_same_v<Extent, Whole>) stream(backprops + i, result);
    else store(backprops + i, result, extent);
    return e;
  }

  // The sums of each lane of up to 64 rows from element `offset` on: eight rows next to each other are the lanes, and a few vectors
  // of those are added up over the block in registers. Returns false if it is not the way because a gradient is not finite.
  template <Way way>
  bool block(int64_t offset, int64_t rows, double* below, double* above) const {
    constexpr int kTogether = kWidth * sizeof(T) == 64 ? 4 : 1;  // vectors, as many as there are registers for
    const GradientCall here = *this;  // a copy: members would be loaded through `this` again after every store
    const int64_t width = kLanes * here.channels, steps = rows / kLanes, rest = rows % kLanes * here.channels;
    Vector<T> check;
    int64_t place = 0;
    const auto columns = [&]<int Vectors>(int64_t p, auto extent) __attribute__((always_inline)) {
      ChannelVectors<T> vectors[Vectors];
      Lanes lows[Vectors][kParts], highs[Vectors][kParts];
      for (int v = 0; v < Vectors; ++v) {
        vectors[v] = here.n.template at<way>(place);
        if ((place += kWidth) == here.n.period) place = 0;
      }
      const auto add = [&](int v, int64_t i, auto extent) __attribute__((always_inline)) {
        const Element e = here.template element<way>(i, vectors[v], extent, check);
        add_sides<way, 0>(lows[v][0], highs[v][0], e.sides, e.wide[0]);
        if constexpr (kParts == 2) add_sides<way, 1>(lows[v][1], highs[v][1], e.sides, e.wide[1]);
      };
      int64_t begin = offset + p;
      // Going along eight rows at a time the processor foresees little: the next block is prefetched, straight on, or,
      // with many channels, what follows in the rows.
      const bool straight = here.channels <= kFewChannels;
      const int64_t next = straight ? offset + kBlock * here.channels + p * (kBlock / kLanes) : begin + 4 * Vectors * kWidth;
      const int64_t further = straight ? Vectors * kWidth : width;
      for (int64_t step = 0; step < steps; ++step, begin += width) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
          const int64_t i = begin + v * kWidth;
          if constexpr (way == Way::far || way == Way::past) {
            const int64_t ahead = next + step * further + v * kWidth;
            __builtin_prefetch(here.gradients + ahead, 0, 2);
            here.source.prefetch(ahead);
          }
          // Nor where it will write next; and a store that waits for its line holds up those after it.
          if constexpr (way != Way::past) __builtin_prefetch(here.backprops + i + Vectors * kWidth, 1);
          add(v, i, extent);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        if (const int64_t more = rest - p - v * kWidth; more > 0) add(v, begin + v * kWidth, Part{std::min(more, count_of<T>(extent))});
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v)
        for (int part = 0; part < kParts; ++part) {
          lows[v][part].store(below + p + v * kWidth + part * Lanes::kWidth);
          highs[v][part].store(above + p + v * kWidth + part * Lanes::kWidth);
        }
    };
    int64_t p = 0;
    for (; p + kTogether * kWidth <= width; p += kTogether * kWidth) columns.template operator()<kTogether>(p, Whole{});
    for (; p + kWidth <= width; p += kWidth) columns.template operator()<1>(p, Whole{});
    if (p < width) columns.template operator()<1>(p, Part{width - p});
    return !any_nan(check);
  }

  // The folded sums of blocks of 64 rows of one channel, whose elements are the lanes in turn: below, above, below ...
  template <Way way>
  bool blocks_of_one(int64_t offset, int64_t blocks, double* items) const {
    const GradientCall here = *this;
    constexpr int64_t kSums = kLanes / Lanes::kWidth, kTogether = std::max<int64_t>(1, kSums / kParts);
    const ChannelVectors<T> vectors = n.template at<way>(0);
    Vector<T> check;
    int64_t b = 0;
    const auto sum = [&]<int64_t Blocks>() __attribute__((always_inline)) {
      Lanes lows[Blocks][kSums], highs[Blocks][kSums];
#pragma GCC unroll 1
      for (int64_t k = 0; k < Blocks; ++k, offset += kBlock)
#pragma GCC unroll 4
        for (int64_t i = offset; i < offset + kBlock; i += kTogether * kWidth)
#pragma GCC unroll 4
          for (int64_t v = 0; v < kTogether; ++v) {
            const Element e = here.template element<way>(i + v * kWidth, vectors, Whole{}, check);
            add_sides<way, 0>(lows[k][v * kParts % kSums], highs[k][v * kParts % kSums], e.sides, e.wide[0]);
            if constexpr (kParts == 2)
              add_sides<way, 1>(lows[k][(v * kParts + 1) % kSums], highs[k][(v * kParts + 1) % kSums], e.sides, e.wide[1]);
          }
      if constexpr (Blocks == kFoldedTogether) {
        fold_together(lows, highs, items + 2 * b);
      } else {
        items[2 * b] = folded(lows[0]);
        items[2 * b + 1] = folded(highs[0]);
      }
      b += Blocks;
    };
    while (b + kFoldedTogether <= blocks) sum.template operator()<kFoldedTogether>();
    while (b < blocks) sum.template operator()<1>();
    return !any_nan(check);
  }

  // The folded sums of `rows` rows from element `offset` on, block by block: below for all channels, above for all channels.
  template <Way way>
  bool items_of(int64_t offset, int64_t rows, double* items) const {
    const int64_t room = kLanes * channels + kLine / int64_t{sizeof(double)};
    static thread_local LineVector<double> lanes;  // its pages stay
    if (int64_t(lanes.size()) < 2 * room) lanes.resize(2 * room);
    double *below = lanes.data(), *above = below + room;
    bool finite = true;
    if (channels == 1) {
      const int64_t blocks = rows / kBlock;
      finite = blocks_of_one<way>(offset, blocks, items);
      offset += blocks * kBlock, rows -= blocks * kBlock, items += 2 * blocks;
    }
    for (; rows > 0; offset += kBlock * channels, rows -= kBlock, items += 2 * channels) {
      finite &= block<way>(offset, std::min(kBlock, rows), below, above);
      fold_into(below, channels, items);
      fold_into(above, channels, items + channels);
    }
    return finite;
  }

  bool finite(int64_t offset, int64_t size) const {
    Vector<T> check;
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) check = spoiled(check, load(gradients + offset + k, Whole{}));
    if (k < size) check = spoiled(check, load(gradients + offset + k, Part{size - k}));
    return !any_nan(check);
  }

  using Items = bool (GradientCall::*)(int64_t offset, int64_t rows, double* items) const;

  // The sums below and above of all channels; `quick` is one of the ways that are not for any gradient, or null.
  std::array<Doubles, 2> run(int64_t rows, Items quick, bool in_place, bool past) const {
    if (rows == 0 || channels == 0) return {Doubles(channels), Doubles(channels)};
    const int64_t blocks = (rows + kBlock - 1) / kBlock;
    // What is done once more if a gradient is not finite: several blocks of few channels.
    const int64_t together = std::max<int64_t>(1, kTask / 8 / (kBlock * channels));
    int64_t blocks_per_task = std::max<int64_t>(1, kTask / (together * kBlock * channels)) * together;
    // Of a very large tensor a task is whole groups of blocks, as the tree of sums has them, and folds each: the sums of all blocks
    // would be a sixteenth of the tensor, written and read again.
    constexpr int64_t kManyGroups = 64;
    if (blocks >= kManyGroups * kBlock) blocks_per_task = (blocks_per_task + kBlock - 1) / kBlock * kBlock;
    const int64_t group = blocks_per_task % kBlock == 0 ? kBlock : 1, width = 2 * channels;
    const auto items = scratch((blocks + group - 1) / group * width);
    parallel_for((blocks + blocks_per_task - 1) / blocks_per_task, rows * channels, [&](int64_t task) {
      static thread_local LineVector<double> of_group;  // its pages stay
      if (group > 1 && int64_t(of_group.size()) < group * width) of_group.resize(group * width);
      const int64_t end = std::min(blocks, (task + 1) * blocks_per_task);
      int64_t next;
      for (int64_t b = task * blocks_per_task; b < end; b = next) {
        next = std::min(b + together, group > 1 ? std::min(end, (b / group + 1) * group) : end);
        const int64_t offset = b * kBlock * channels, count = std::min(next * kBlock, rows) - b * kBlock;
        double* sums = group > 1 ? of_group.data() + b % group * width : items.get() + b * width;
        // In place there is one chance, because the results overwrite the operands.
        const bool is_usual = quick && !(in_place && !finite(offset, count * channels));
        if (!is_usual || !(this->*quick)(offset, count, sums)) items_of<Way::any>(offset, count, sums);
        if (group > 1 && (next == end || next % group == 0)) {
          tree_fold(of_group.data(), next - b / group * group, width);
          std::copy_n(of_group.data(), width, items.get() + b / group * width);
        }
      }
      if (past) finish_streaming();
    });
    fold_all(items.get(), (blocks + group - 1) / group, width);
    const double* sums = items.get();
    return {Doubles(sums, sums + channels), Doubles(sums + channels, sums + 2 * channels)};
  }
};

template <class S, class T, class Source>
void gradient_of_channels(const Call& call, const Source& source, int operand_of_min, bool in_place) {
  FlushDenormals flush;
  const S* gradients = call.operands[0].as<S>();
  S* backprops = call.results[0].as<S>();
  T *backprop_min = call.results[1].as<T>(), *backprop_max = call.results[2].as<T>();
  const Array &min = call.operands[operand_of_min], &max = call.operands[operand_of_min + 1];
  const int64_t size = call.operands[0].size(), channels = min.size(), rows = channels ? size / channels : 0;
  const NudgedChannels<T> nudged(min.as<T>(), max.as<T>(), channels, call.numbers);
  const bool odd = nudged.any_no_range || nudged.any_unordered;
  const int64_t period = std::min(std::lcm(channels, int64_t{16}), kLanes * channels);
  const auto spread_over_lanes = [&](const T* parameters) {
    Spread<T> wide{{}, parameters};
    if (channels == period) return wide;
    wide.own = spread(parameters, channels, period + kLine / int64_t{sizeof(T)});
    wide.data = wide.own.data();
    return wide;
  };
  const auto low = spread_over_lanes(nudged.nudged_min), high = spread_over_lanes(nudged.nudged_max);
  const auto no_range = odd ? spread_over_lanes(nudged.no_range) : Spread<T>{};
  const auto reversed = odd ? spread_over_lanes(nudged.reversed) : Spread<T>{};
  const Places<T> n{low.data, high.data, no_range.data, reversed.data, period};
  constexpr int64_t kVector = Vector<T>::kWidth * int64_t{sizeof(S)};
  const int64_t bytes = size * int64_t{sizeof(S)};
  const bool far = 16 * bytes >= too_large_for_the_cache();
  const bool past = !in_place && too_large_for_the_cache(3, bytes) && aligned(backprops, kVector) &&
                    kLanes * channels * int64_t{sizeof(S)} % kVector == 0;
  using Call = GradientCall<S, T, Source>;
  typename Call::Items quick = &Call::template items_of<Way::near>;
  if constexpr (std::is_same_v<S, float>) {  // what training has; each way takes seconds to compile
    if (past) quick = &Call::template items_of<Way::past>;
    else if (far) quick = &Call::template items_of<Way::far>;
  }
  if (odd) quick = nullptr;
  const auto sums = Call{gradients, source, backprops, n, channels}.run(rows, quick, in_place, past);
  for (int64_t c = 0; c < channels; ++c) {
    backprop_min[c] = nudged.no_range[c] ? T(0) : T(sums[0][c]);
    backprop_max[c] = nudged.no_range[c] ? T(0) : T(sums[1][c]);
  }
}

template <class S, class T>
void gradient_from_inputs(const Call& call) {
  const S* inputs = call.operands[1].as<S>();
  const void* result = call.results[0].data;
  const bool in_place = result == call.operands[0].data || result == call.operands[1].data;
  gradient_of_channels<S, T>(call, FromInputs<S, T>{inputs}, 2, in_place);
}

template <class S, class T>
void gradient_from_mask(const Call& call) {
  const bool in_place = call.results[0].data == call.operands[0].data;
  gradient_of_channels<S, T>(call, FromMask<T>{call.operands[1].as<uint8_t>()}, 2, in_place);
}

}  // namespace

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_gradient) { gradient_from_inputs<S, T>(call); }
EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_per_channel_gradient) { gradient_from_inputs<S, T>(call); }
EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_gradient_from_mask) { gradient_from_mask<S, T>(call); }
EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_per_channel_gradient_from_mask) { gradient_from_mask<S, T>(call); }

namespace {

// The transposed gradient, chosen(x's side) from three cotangents; `side(i, c)` is -1 below, 1 above, 0 inside and 2 elsewhere.
template <class S, class T, class Side>
void transpose(const Call& call, const NudgedChannels<T>& n, int64_t channels, Side&& side) {
  const S* to_inputs = call.operands[0].as<S>();
  const T *to_min = call.operands[1].as<T>(), *to_max = call.operands[2].as<T>();
  S* gradients = call.results[0].as<S>();
  const int64_t rows = channels ? call.operands[0].size() / channels : 0;
  for_each_run(rows, channels, [&](int64_t offset, int64_t, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      const int64_t c = k % channels;
      const int where = n.no_range[c] ? 0 : side(offset + k, c);
      const T straight = real(to_inputs[offset + k]);
      round_to(gradients[offset + k], where == 0 ? straight : where == -1 ? to_min[c] : where == 1 ? to_max[c] : T(0));
    }
  });
}

}  // namespace

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_gradient_transpose) {
  FlushDenormals flush;
  const S* inputs = call.operands[3].as<S>();
  const int64_t channels = call.operands[4].size();
  const NudgedChannels<T> n(call.operands[4].as<T>(), call.operands[5].as<T>(), channels, call.numbers);
  transpose<S, T>(call, n, channels, [&](int64_t i, int64_t c) {
    const T x = real(inputs[i]), low = n.nudged_min[c], high = n.nudged_max[c];
    return (x >= low) & (x <= high) ? 0 : x < low ? -1 : x > high ? 1 : 2;
  });
}

EXACTQAT_STORAGE_KERNEL(fake_quant_with_min_max_vars_gradient_from_mask_transpose) {
  FlushDenormals flush;
  const uint8_t* mask = call.operands[3].as<uint8_t>();
  const int64_t channels = call.operands[4].size();
  const NudgedChannels<T> n(call.operands[4].as<T>(), call.operands[5].as<T>(), channels, call.numbers);
  transpose<S, T>(call, n, channels, [&](int64_t i, int64_t c) {
    constexpr int kPlaces[] = {2, 1, -1, 0};
    const int code = mask[i / 4] >> 2 * (i % 4) & 3;
    return code == 3 && n.reversed[c] != T(0) ? -1 : kPlaces[code];
  });
}

}  // namespace exactqat
