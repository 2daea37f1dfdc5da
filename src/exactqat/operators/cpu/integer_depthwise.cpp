// SPDX-License-Identifier: Apache-2.0
// Depthwise convolution of codes of 8 or 16 bits: two taps at a time, as sums of two products of 16 bits, for some places of a line together.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "integer_rounding.h"
#include "parallel.h"

namespace exactqat {
namespace {

// --- the sums of some channels --------------------------------------------------------------------------------------------------

// kBlock channels are summed in kParts vectors, in the order in which interleaving leaves them; weights are packed in that order.
#if defined(__AVX512F__)

constexpr int64_t kBlock = 32;
constexpr int64_t kLanes = 4;  // of 8 channels each, whose halves go to different vectors

struct Sums {
  __m512i low, high;
};
inline Sums load_sums(const int32_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 16)}; }
inline __m512i load_channels(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i load_channels(const int16_t* p) { return _mm512_loadu_si512(p); }
template <class Code>
inline Sums add_two(Sums sums, const Code* first, const Code* second, Sums weights) {
  const __m512i a = load_channels(first), b = load_channels(second);
  const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
  return {_mm512_add_epi32(sums.low, _mm512_madd_epi16(low, weights.low)),
          _mm512_add_epi32(sums.high, _mm512_madd_epi16(high, weights.high))};
}
inline void store_in_order(int32_t* p, Sums sums) {
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi64(sums.low, first, sums.high));
  _mm512_storeu_si512(p + 16, _mm512_permutex2var_epi64(sums.low, second, sums.high));
}

#elif defined(__AVX2__)

constexpr int64_t kBlock = 16;
constexpr int64_t kLanes = 2;

struct Sums {
  __m256i low, high;
};
inline Sums load_sums(const int32_t* p) {
  const auto* words = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline __m256i load_channels(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i load_channels(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
template <class Code>
inline Sums add_two(Sums sums, const Code* first, const Code* second, Sums weights) {
  const __m256i a = load_channels(first), b = load_channels(second);
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), weights.low)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), weights.high))};
}
inline void store_in_order(int32_t* p, Sums sums) {
  auto* words = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(words, _mm256_permute2x128_si256(sums.low, sums.high, 0x20));
  _mm256_storeu_si256(words + 1, _mm256_permute2x128_si256(sums.low, sums.high, 0x31));
}

#else

constexpr int64_t kBlock = 16;
constexpr int64_t kLanes = 0;  // channels stay in order

struct Sums {
  int32_t v[kBlock];
};
inline Sums load_sums(const int32_t* p) {
  Sums sums;
  std::memcpy(sums.v, p, sizeof sums.v);
  return sums;
}
template <class Code>
inline Sums add_two(Sums sums, const Code* first, const Code* second, const Sums& weights) {
  int16_t pairs[2 * kBlock];
  std::memcpy(pairs, weights.v, sizeof pairs);
  for (int64_t k = 0; k < kBlock; ++k)
    sums.v[k] = int32_t(uint32_t(sums.v[k]) + uint32_t(first[k] * pairs[2 * k] + second[k] * pairs[2 * k + 1]));
  return sums;
}
inline void store_in_order(int32_t* p, const Sums& sums) { std::memcpy(p, sums.v, sizeof sums.v); }

#endif

// Which channel of a block lies at each place of packed weights and of what is added to sums.
constexpr int64_t channel_at(int64_t place) {
  if constexpr (kLanes == 0) {
    return place;
  } else {
    const int64_t half = place / (kBlock / 2), within = place % (kBlock / 2);
    return within / 4 * 8 + half * 4 + within % 4;
  }
}

// codes: pointers of tap 0 for all places, of tap 1 for all places, and so on; channels from `offset` on.
template <int Places, class Code>
void sum_block(const Code* const* codes, int64_t offset, int64_t pairs, const uint8_t* packed, const int32_t* added,
               int32_t* sums) {
  Sums held[Places];
#pragma GCC unroll 4
  for (int p = 0; p < Places; ++p) held[p] = load_sums(added);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const Sums weights = load_sums(reinterpret_cast<const int32_t*>(packed));
    packed += 4 * kBlock;
#pragma GCC unroll 4
    for (int p = 0; p < Places; ++p) held[p] = add_two(held[p], codes[p] + offset, codes[Places + p] + offset, weights);
    codes += 2 * Places;
  }
#pragma GCC unroll 4
  for (int p = 0; p < Places; ++p) store_in_order(sums + p * kBlock, held[p]);
}

constexpr int kPlaces = 4;

// operands: filter int8 [taps, channels], bias int32 [channels]. results: packed uint8, and what is added to sums, int32, as many
// as there are channels in whole blocks of kColumns.
void integer_depthwise_pack(const Call& call) {
  const Array& filter = call.operands[0];
  const int64_t taps = filter.shape[0], channels = filter.shape[1], padded = call.results[1].size();
  auto* packed = call.results[0].as<int16_t>();
  auto* added = call.results[1].as<int32_t>();
  for (int64_t first = 0; first < padded; first += kBlock) {
    for (int64_t pair = 0; pair < (taps + 1) / 2; ++pair) {
      for (int64_t place = 0; place < kBlock; ++place) {
        const int64_t channel = first + channel_at(place);
        for (int64_t tap = 2 * pair; tap < 2 * pair + 2; ++tap)
          *packed++ = tap < taps && channel < channels ? filter.as<int8_t>()[tap * channels + channel] : int16_t(0);
      }
    }
    for (int64_t place = 0; place < kBlock; ++place) {
      const int64_t channel = first + channel_at(place);
      added[first + place] = channel < channels ? call.operands[1].as<int32_t>()[channel] : 0;
    }
  }
}

// operands: codes [batch, height, width, channels], int8 or int16, packed weights, what is added to sums, factors
// (integer_rounding.h), and for int16 the bias, int64, of whole blocks of kColumns. result: codes [batch, lines, places,
// channels * multiplier]. For int16 there are 2 * kWidePairs taps at most.
template <class Code>
void depthwise_conv_2d(const Call& call) {
  constexpr bool kWide = sizeof(Code) == 2;
  const Array &x = call.operands[0], &out = call.results[0];
  const Numbers& numbers = call.numbers;
  const int64_t height = x.shape[1], width = x.shape[2], channels = x.shape[3];
  const int64_t lines = out.shape[1], places = out.shape[2], outputs = out.shape[3], multiplier = outputs / channels;
  const int64_t window_y = numbers.integer("window_y"), window_x = numbers.integer("window_x");
  const int64_t stride_y = numbers.integer("stride_y"), stride_x = numbers.integer("stride_x");
  const int64_t dilation_y = numbers.integer("dilation_y"), dilation_x = numbers.integer("dilation_x");
  const int64_t top = numbers.integer("top"), left = numbers.integer("left");
  const int64_t taps = window_y * window_x, pairs = (taps + 1) / 2;
  const Code* const end = x.as<Code>() + x.size();
  const Rounding rounding = rounding_of(call, call.operands[3]);
  const auto* packed = call.operands[1].as<uint8_t>();
  const auto* added = call.operands[2].as<int32_t>();
  [[maybe_unused]] const int64_t* bias = kWide ? call.operands[4].as<int64_t>() : nullptr;
  const std::vector<Code> beyond(size_t(channels + kColumns), Code(numbers.integer("fill")));
  // Where the taps of several places lie, from the first one's on; the one too many has weights of 0.
  std::vector<int64_t> offsets(size_t(2 * pairs * kPlaces), 0);
  for (int64_t tap = 0; tap < taps; ++tap)
    for (int64_t p = 0; p < kPlaces; ++p)
      offsets[size_t(tap * kPlaces + p)] =
          ((tap / window_x * dilation_y) * width + tap % window_x * dilation_x + p * stride_x) * channels;

  parallel_for(x.shape[0] * lines, x.shape[0] * lines * places * outputs * (pairs + 1), [&](int64_t task) {
    const int64_t line = task % lines, example = task / lines;
    const Code* codes = x.as<Code>() + example * height * width * channels;
    Code* written = out.as<Code>() + task * places * outputs;
    std::vector<const Code*> met(size_t(2 * pairs * kPlaces), beyond.data());
    const int64_t y_first = line * stride_y - top, reach = (kPlaces - 1) * stride_x + (window_x - 1) * dilation_x;
    const bool lines_inside = y_first >= 0 && y_first + (window_y - 1) * dilation_y < height;
    std::vector<Code> copied;
    std::vector<const Code*> from_copies;
    alignas(64) int32_t sums[kPlaces * kBlock];
    for (int64_t place = 0; place < places;) {
      // The last ones together with some of those before, whose codes come out once more; a single one is faster by itself.
      if (places - place < kPlaces && places - place > 1 && places >= kPlaces) place = places - kPlaces;
      const int64_t together = places - place >= kPlaces ? kPlaces : 1;
      const Code* last = nullptr;
      const int64_t x_first = place * stride_x - left;
      if (lines_inside && together == kPlaces && x_first >= 0 && x_first + reach < width) {
        const Code* base = codes + (y_first * width + x_first) * channels;
        for (int64_t k = 0; k < 2 * pairs * kPlaces; ++k) met[size_t(k)] = base + offsets[size_t(k)];
        last = met[size_t(taps * kPlaces - 1)];
      } else {
        const Code** pointer = met.data();
        for (int64_t i = 0; i < window_y; ++i) {
          const int64_t y = y_first + i * dilation_y;
          const Code* row = y >= 0 && y < height ? codes + y * width * channels : nullptr;
          for (int64_t j = 0; j < window_x; ++j) {
            for (int64_t p = 0; p < together; ++p) {
              const int64_t at = x_first + p * stride_x + j * dilation_x;
              const bool inside = row != nullptr && uint64_t(at) < uint64_t(width);
              *pointer = inside ? row + at * channels : beyond.data();
              if (inside) last = std::max(last, *pointer);
              ++pointer;
            }
          }
        }
        for (int64_t k = taps * together; k < 2 * pairs * together; ++k) met[k] = beyond.data();
      }
      for (int64_t first = 0; first < outputs; first += kBlock) {
        const int64_t count = std::min(kBlock, outputs - first);
        const Code* const* pointers = met.data();
        int64_t offset = first;
        // Where channels repeat, or whole blocks of them would be read from beyond the memory of codes.
        if (multiplier != 1 || (last != nullptr && last + first + kBlock > end)) {
          copied.assign(size_t(2 * pairs * together * kBlock), Code(0));
          from_copies.resize(size_t(2 * pairs * together));
          for (int64_t k = 0; k < 2 * pairs * together; ++k) {
            Code* to = copied.data() + k * kBlock;
            for (int64_t c = 0; c < count; ++c) to[c] = met[k][(first + c) / multiplier];
            from_copies[k] = to;
          }
          pointers = from_copies.data();
          offset = 0;
        }
        const auto sum = together == kPlaces ? sum_block<kPlaces, Code> : sum_block<1, Code>;
        sum(pointers, offset, pairs, packed + first / kBlock * pairs * 4 * kBlock, added + first, sums);
        Code* to = written + place * outputs;
        if constexpr (kWide) {
          int16_t* rows[kPlaces];
          int64_t totals[kPlaces * kBlock];
          for (int64_t p = 0; p < together; ++p) {
            rows[p] = to + p * outputs;
            for (int64_t k = 0; k < kBlock; ++k) totals[p * kBlock + k] = sums[p * kBlock + k] + bias[first + k];
          }
          store_wide_rows(rounding, totals, together, kBlock, first, count, rows);
        } else {
          to += first;
          store_rows(rounding, sums, together, kBlock, first, count,
                     [=](int64_t p) __attribute__((always_inline)) { return to + p * outputs; });
        }
      }
      place += together;
    }
  });
}

void integer_depthwise_conv_2d(const Call& call) {
  if (call.results[0].dtype == DType::int16) depthwise_conv_2d<int16_t>(call);
  else depthwise_conv_2d<int8_t>(call);
}

[[maybe_unused]] const bool entered = add_kernel("integer_depthwise_pack", integer_depthwise_pack) &&
                                      add_kernel("integer_depthwise_conv_2d", integer_depthwise_conv_2d);

}  // namespace
}  // namespace exactqat
