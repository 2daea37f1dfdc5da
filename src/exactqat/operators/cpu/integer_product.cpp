// SPDX-License-Identifier: Apache-2.0
// Products of int8 matrices with int32 sums, and what is one: convolutions, fully connected layers. Each task gathers some rows of
// codes, multiplies them with weights that were packed once, and rounds the sums where they lie. Codes of 16 bits meet the same
// weights of 8: their sums of 32 bits are added up in 64 before they could overflow.
//
// Weights lie in panels of sixteen columns, in the order in which this module's multiplication reads them: 64 bytes for each step
// of depth, which is four codes where there are dot products of bytes, two codes of 16 bits elsewhere. Nothing else knows that
// order, and no sum saturates in either.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "integer_rounding.h"
#include "parallel.h"

#if defined(_MSC_VER)
#include <intrin.h>
#endif

namespace exactqat {
namespace {

// --- sixteen sums ---------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

constexpr int kMostPanels = 4;
// Dot products of unsigned with signed bytes: rows are shifted by 128, which the bias makes up for.
constexpr uint8_t kFlip = 0x80;
constexpr int64_t kShift = 128;

bool has_dot_products() {
#if defined(_MSC_VER)  // see features.cpp
  int seven[4];
  __cpuidex(seven, 7, 0);
  return (seven[2] >> 11 & 1) != 0;
#else
  return __builtin_cpu_supports("avx512vnni");
#endif
}

using Lanes = __m512i;
inline Lanes load_lanes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_lanes(int32_t* p, Lanes lanes) { _mm512_storeu_si512(p, lanes); }
inline Lanes repeat_lanes(const uint8_t* p) {
  int32_t codes;
  std::memcpy(&codes, p, 4);
  return _mm512_set1_epi32(codes);
}
inline Lanes add_pairs(Lanes sums, Lanes row, Lanes weights) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(row, weights));
}
#define EXACTQAT_DOT_TARGET __attribute__((target("avx512vnni")))
#define EXACTQAT_DOT(sums, row, weights) _mm512_dpbusd_epi32(sums, row, weights)
#define EXACTQAT_DOT_OF_PAIRS(sums, row, weights) _mm512_dpwssd_epi32(sums, row, weights)

#elif defined(__AVX2__)

constexpr int kMostPanels = 1;
constexpr uint8_t kFlip = 0;
constexpr int64_t kShift = 0;

bool has_dot_products() { return false; }

struct Lanes {
  __m256i low, high;
};
inline Lanes load_lanes(const void* p) {
  const auto* words = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline void store_lanes(int32_t* p, Lanes lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), lanes.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, lanes.high);
}
inline __m256i repeat_lanes(const uint8_t* p) {
  int32_t codes;
  std::memcpy(&codes, p, 4);
  return _mm256_set1_epi32(codes);
}
inline Lanes add_pairs(Lanes sums, __m256i row, Lanes weights) {
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(row, weights.low)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(row, weights.high))};
}

#elif defined(EXACTQAT_NEON) && defined(__ARM_FEATURE_DOTPROD)

constexpr int kMostPanels = 1;
constexpr uint8_t kFlip = 0;  // bytes are signed on both sides
constexpr int64_t kShift = 0;

bool has_dot_products() { return true; }

struct Lanes {
  int32x4_t v[4];
};
inline Lanes load_lanes(const void* p) {
  const auto* words = static_cast<const int32_t*>(p);
  return {{vld1q_s32(words), vld1q_s32(words + 4), vld1q_s32(words + 8), vld1q_s32(words + 12)}};
}
inline void store_lanes(int32_t* p, const Lanes& lanes) {
  for (int k = 0; k < 4; ++k) vst1q_s32(p + 4 * k, lanes.v[k]);
}
inline int32x4_t repeat_lanes(const uint8_t* p) {
  int32_t codes;
  std::memcpy(&codes, p, 4);
  return vdupq_n_s32(codes);
}
inline Lanes add_pairs(Lanes sums, int32x4_t row, const Lanes& weights) {
  for (int k = 0; k < 4; ++k) {
    const int16x8_t x = vreinterpretq_s16_s32(row), w = vreinterpretq_s16_s32(weights.v[k]);
    sums.v[k] = vaddq_s32(sums.v[k], vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(w)), vmull_high_s16(x, w)));
  }
  return sums;
}
inline Lanes add_dot_products(Lanes sums, int32x4_t row, const Lanes& weights) {
  for (int k = 0; k < 4; ++k)
    sums.v[k] = vdotq_s32(sums.v[k], vreinterpretq_s8_s32(weights.v[k]), vreinterpretq_s8_s32(row));
  return sums;
}
#define EXACTQAT_DOT_TARGET
#define EXACTQAT_DOT(sums, row, weights) add_dot_products(sums, row, weights)

#else

constexpr int kMostPanels = 1;
constexpr uint8_t kFlip = 0;
constexpr int64_t kShift = 0;

bool has_dot_products() { return false; }

struct Lanes {
  int32_t v[kPanel];
};
struct Pair {
  int16_t first, second;
};
inline Lanes load_lanes(const void* p) {
  Lanes lanes;
  std::memcpy(lanes.v, p, sizeof lanes.v);
  return lanes;
}
inline void store_lanes(int32_t* p, const Lanes& lanes) { std::memcpy(p, lanes.v, sizeof lanes.v); }
inline Pair repeat_lanes(const uint8_t* p) {
  Pair pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair;
}
inline Lanes add_pairs(Lanes sums, Pair row, const Lanes& weights) {
  int16_t pairs[2 * kPanel];
  std::memcpy(pairs, weights.v, sizeof pairs);
  for (int64_t k = 0; k < kPanel; ++k)  // a sum may pass the ends of int32 on its way, and comes back
    sums.v[k] = int32_t(uint32_t(sums.v[k]) + uint32_t(row.first * pairs[2 * k] + row.second * pairs[2 * k + 1]));
  return sums;
}

#endif

// --- rows times panels ----------------------------------------------------------------------------------------------------------

using Tile = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, const int32_t*, int32_t*);

// Sums of `Rows` rows, `stride` bytes from one to the next, for `Panels` panels: [Rows, Panels * kPanel].
#define EXACTQAT_TILE(name, target, multiply)                                                                         \
  template <int Rows, int Panels>                                                                                     \
  target void name(const uint8_t* rows, int64_t stride, const uint8_t* packed, int64_t steps, const int32_t* bias,    \
                   int32_t* sums) {                                                                                   \
    Lanes lanes[Rows][Panels];                                                                                        \
    _Pragma("GCC unroll 16") for (int r = 0; r < Rows; ++r)                                                           \
      _Pragma("GCC unroll 4") for (int p = 0; p < Panels; ++p) lanes[r][p] = load_lanes(bias + p * kPanel);           \
    for (int64_t step = 0; step < steps; ++step) {                                                                    \
      Lanes weights[Panels];                                                                                          \
      _Pragma("GCC unroll 4") for (int p = 0; p < Panels; ++p) weights[p] = load_lanes(packed + p * 64);              \
      packed += Panels * 64;                                                                                          \
      _Pragma("GCC unroll 16") for (int r = 0; r < Rows; ++r) {                                                       \
        const auto row = repeat_lanes(rows + r * stride);                                                             \
        _Pragma("GCC unroll 4") for (int p = 0; p < Panels; ++p) lanes[r][p] = multiply(lanes[r][p], row, weights[p]); \
      }                                                                                                               \
      rows += 4;                                                                                                      \
    }                                                                                                                 \
    _Pragma("GCC unroll 16") for (int r = 0; r < Rows; ++r)                                                           \
      _Pragma("GCC unroll 4") for (int p = 0; p < Panels; ++p)                                                        \
        store_lanes(sums + (r * Panels + p) * kPanel, lanes[r][p]);                                                   \
  }

EXACTQAT_TILE(sum_pairs, , add_pairs)
#if defined(EXACTQAT_DOT)
EXACTQAT_TILE(sum_dots, EXACTQAT_DOT_TARGET, EXACTQAT_DOT)
#else
template <int Rows, int Panels>
constexpr Tile sum_dots = nullptr;
#endif
#if defined(EXACTQAT_DOT_OF_PAIRS)
EXACTQAT_TILE(sum_dots_of_pairs, EXACTQAT_DOT_TARGET, EXACTQAT_DOT_OF_PAIRS)
#else
template <int Rows, int Panels>
constexpr Tile sum_dots_of_pairs = sum_pairs<Rows, Panels>;
#endif

// How many rows at a time keep all sums in registers: most, some, one.
template <int Panels>
constexpr int kMostRows = kMostPanels == 1 ? 6 : Panels == 4 ? 6 : 12;
template <int Panels>
constexpr int kSomeRows = kMostPanels == 1 ? 2 : Panels == 4 ? 2 : 4;

bool uses_dot_products(const Numbers& numbers) { return numbers.integer("dot") != 0 && has_dot_products(); }

// What a row takes in bytes.
struct Form {
  bool dot;             // four codes of 8 bits at a time, else two of 16
  bool quick_pairs = false;  // for these too there is one instruction
  int64_t steps(int64_t depth) const { return (depth + (dot ? 3 : 1)) / (dot ? 4 : 2); }
  int64_t stride(int64_t depth) const { return 4 * steps(depth); }
};

// For codes of 16 bits.
Form wide_form(const Numbers& numbers) { return {false, uses_dot_products(numbers)}; }

template <int Rows, int Panels>
Tile tile_of(Form form) {
  return form.dot ? Tile(sum_dots<Rows, Panels>) : form.quick_pairs ? Tile(sum_dots_of_pairs<Rows, Panels>) : sum_pairs<Rows, Panels>;
}

template <int Panels>
struct Tiles {
  Tile most, some, one;
  explicit Tiles(Form form)
      : most(tile_of<kMostRows<Panels>, Panels>(form)), some(tile_of<kSomeRows<Panels>, Panels>(form)), one(tile_of<1, Panels>(form)) {}
};

constexpr int64_t kSlack = 128;  // bytes beyond the last gathered row that may be written

// Rows of codes on their way into a product.
struct Row {
  Form form;
  uint8_t* at;

  // `end` is where the memory of the codes ends; whole vectors are read up to there.
  void put(const int8_t* codes, int64_t count, const int8_t* end) {
    // By way of a chunk of our own, which nothing else can be: `at` may be the memory of any byte.
    constexpr int64_t kChunk = 32;
    int64_t k = 0;
    if (form.dot) {
      uint8_t* to = at;
      for (; k < count && codes + k + kChunk <= end; k += kChunk) {
        uint8_t chunk[kChunk];
        for (int64_t i = 0; i < kChunk; ++i) chunk[i] = uint8_t(codes[k + i]) ^ kFlip;
        std::memcpy(to + k, chunk, kChunk);
      }
      for (; k < count; ++k) to[k] = uint8_t(codes[k]) ^ kFlip;
      at += count;
    } else {
      auto* wide = reinterpret_cast<int16_t*>(at);
      for (; k < count && codes + k + kChunk <= end; k += kChunk) {
        int16_t chunk[kChunk];
        for (int64_t i = 0; i < kChunk; ++i) chunk[i] = codes[k + i];
        std::memcpy(wide + k, chunk, sizeof chunk);
      }
      for (; k < count; ++k) wide[k] = codes[k];
      at += 2 * count;
    }
  }
  void put(const int16_t* codes, int64_t count, const int16_t*) {
    std::memcpy(at, codes, size_t(2 * count));
    at += 2 * count;
  }
  void fill(int16_t code, int64_t count) {
    std::fill_n(reinterpret_cast<int16_t*>(at), count, code);
    at += 2 * count;
  }
  void fill(int8_t code, int64_t count) {
    if (form.dot) {
      std::memset(at, uint8_t(code) ^ kFlip, size_t(count));
      at += count;
    } else {
      fill(int16_t(code), count);
    }
  }
};

// Memory of this thread, whatever is in it.
uint8_t* scratch(int64_t bytes) {
  thread_local std::unique_ptr<uint8_t[]> kept;
  thread_local int64_t size = 0;
  if (bytes + 64 > size) {
    kept.reset();
    kept.reset(new uint8_t[size_t(bytes + 64)]);
    size = bytes + 64;
  }
  return reinterpret_cast<uint8_t*>(whole(reinterpret_cast<intptr_t>(kept.get()), 64));
}

// Where sums go, and what they begin with.
struct Sink {
  Rounding rounding;
  const int32_t* bias;
  int8_t* const* rows;
  const int32_t* added;  // to all sums of a row, if any
  int64_t columns;

  // Of `count` rows from `row` on.
  void store(int64_t row, int64_t count, int32_t* sums, int64_t width, int64_t column) const {
    if (added != nullptr)
      for (int64_t r = 0; r < count; ++r)
        for (int64_t k = 0; k < width; ++k) sums[r * width + k] = int32_t(uint32_t(sums[r * width + k]) + uint32_t(added[row + r]));
    int8_t* const* to = rows + row;
    store_rows(rounding, sums, count, width, column, std::min(width, columns - column),
               [=](int64_t r) __attribute__((always_inline)) { return to[r] + column; });
  }
};

// The same of 64 bits.
struct WideSink {
  Rounding rounding;
  const int64_t* bias;
  int16_t* const* rows;
  int64_t columns;
};

// Sums of some rows and panels; `tile` makes 32 bits of them.
template <int64_t kWidth>
void add_up(Tile tile, const uint8_t* rows, int64_t stride, const uint8_t* packed, int64_t steps, int64_t column, const Sink& sink,
            int64_t row, int64_t count, int32_t* sums) {
  tile(rows, stride, packed, steps, sink.bias + column, sums);
  sink.store(row, count, sums, kWidth, column);
}
template <int64_t kWidth>
void add_up(Tile tile, const uint8_t* rows, int64_t stride, const uint8_t* packed, int64_t steps, int64_t column, const WideSink& sink,
            int64_t row, int64_t count, int32_t* sums) {
  constexpr int32_t kZeros[kWidth] = {};
  alignas(64) int64_t totals[12 * kColumns];
  for (int64_t r = 0; r < count; ++r) std::copy_n(sink.bias + column, kWidth, totals + r * kWidth);
  for (int64_t step = 0; step < steps; step += kWidePairs) {
    tile(rows + 4 * step, stride, packed + step * kWidth * 4, std::min(kWidePairs, steps - step), kZeros, sums);
    for (int64_t k = 0; k < count * kWidth; ++k) totals[k] += sums[k];
  }
  store_wide_rows(sink.rounding, totals, count, kWidth, column, std::min(kWidth, sink.columns - column), sink.rows + row);
}

template <int Panels, class Sink>
void multiply_panels(Form form, const uint8_t* rows, int64_t count, int64_t depth, const uint8_t* packed, int64_t column,
                     const Sink& sink) {
  const Tiles<Panels> tiles(form);
  constexpr int64_t kMost = kMostRows<Panels>, kSome = kSomeRows<Panels>, kWidth = Panels * kPanel;
  alignas(64) int32_t sums[kMost * kWidth];
  const int64_t steps = form.steps(depth), stride = form.stride(depth);
  for (int64_t row = 0; row < count;) {
    // The last rows together with some of those before, whose codes come out once more.
    if (count - row < kMost && count >= kMost) row = count - kMost;
    const int64_t left = count - row, together = left >= kMost ? kMost : left >= kSome ? kSome : 1;
    const Tile tile = together == kMost ? tiles.most : together == kSome ? tiles.some : tiles.one;
    add_up<kWidth>(tile, rows + row * stride, stride, packed, steps, column, sink, row, together, sums);
    row += together;
  }
}

// Columns [first, last) of `count` gathered rows; `first` is a multiple of kColumns.
template <class Sink>
void multiply(Form form, const uint8_t* rows, int64_t count, int64_t depth, const uint8_t* packed, int64_t first, int64_t last,
              const Sink& sink) {
  const int64_t end = whole(last, kPanel), bytes = form.steps(depth) * 4;
  for (int64_t column = first; column < end;) {
    const int64_t left = (end - column) / kPanel;
    const uint8_t* panels = packed + column * bytes;
    if constexpr (kMostPanels == 4) {
      if (left >= 4) {
        multiply_panels<4>(form, rows, count, depth, panels, column, sink);
        column += 4 * kPanel;
        continue;
      }
      if (left >= 2) {
        multiply_panels<2>(form, rows, count, depth, panels, column, sink);
        column += 2 * kPanel;
        continue;
      }
    }
    multiply_panels<1>(form, rows, count, depth, panels, column, sink);
    column += kPanel;
  }
}

// at(k, n): the weight of depth k and column n. In the order of `multiply`: blocks of four, two and one panels.
template <class At>
void pack(Form form, int64_t depth, int64_t columns, const At& at, uint8_t* packed) {
  const int64_t steps = form.steps(depth), each = form.dot ? 4 : 2;
  for (int64_t panel = 0, panels = (columns + kPanel - 1) / kPanel; panel < panels;) {
    const int64_t left = panels - panel;
    const int64_t together = kMostPanels == 1 ? 1 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t n = panel * kPanel; n < (panel + together) * kPanel; ++n) {
        for (int64_t k = step * each; k < (step + 1) * each; ++k) {
          const int8_t weight = k < depth && n < columns ? at(k, n) : int8_t(0);
          if (form.dot) {
            *packed++ = uint8_t(weight);
          } else {
            const int16_t wide = weight;
            std::memcpy(packed, &wide, 2);
            packed += 2;
          }
        }
      }
    }
    panel += together;
  }
}

// Rows of a task: few enough that what they gather stays in a core's own cache beside a block of weights, and so many tasks that
// threads end together. By shape alone.
int64_t rows_of_task(int64_t rows, int64_t stride) {
  constexpr int64_t kBytes = 1 << 17, kMost = 240, kTogether = 12, kTasks = 8;
  const int64_t fits = std::min(kMost, std::max<int64_t>(kBytes / std::max<int64_t>(stride, 1), 1));
  return std::max(kTogether, std::min(fits, whole((rows + kTasks - 1) / kTasks, kTogether)) / kTogether * kTogether);
}

// operands: filter int8 [groups, columns, depth], bias int32 [groups, columns]. results: packed uint8 [groups, ...], and what is
// added to sums, int32 [groups, columns padded to kColumns].
void integer_pack(const Call& call) {
  const Array &filter = call.operands[0], &bias = call.operands[1];
  const Form form{uses_dot_products(call.numbers)};
  const int64_t groups = filter.shape[0], columns = filter.shape[1], depth = filter.shape[2];
  const int64_t bytes = call.results[0].shape[1], padded = call.results[1].shape[1];
  for (int64_t group = 0; group < groups; ++group) {
    const int8_t* weights = filter.as<int8_t>() + group * columns * depth;
    pack(form, depth, columns, [=](int64_t k, int64_t n) { return weights[n * depth + k]; },
         call.results[0].as<uint8_t>() + group * bytes);
    int32_t* added = call.results[1].as<int32_t>() + group * padded;
    for (int64_t n = 0; n < padded; ++n) {
      int64_t total = 0;
      if (n < columns) {
        for (int64_t k = 0; k < depth; ++k) total += weights[n * depth + k];
        total = bias.as<int32_t>()[group * columns + n] - (form.dot ? kShift : 0) * total;
      }
      added[n] = int32_t(uint32_t(uint64_t(total)));
    }
  }
}

struct Image {
  int64_t height, width, channels;
};

// operands: codes [batch, height, width, channels], int8 or int16, packed weights, what is added to sums, int32 or int64, factors
// (integer_rounding.h) [groups, ...]. result: codes [batch, height, width, outputs]; written is every step_y-th line from first_y on, and in it every
// step_x-th place from first_x on, `lines` times `places`.
//
// Place (i, j) meets lines i * stride_y - top + dilation_y * [0, window_y) of the image; beyond it there is code `fill`.
template <class Code>
void conv_2d(const Call& call) {
  constexpr bool kWide = sizeof(Code) == 2;
  const Array &x = call.operands[0], &out = call.results[0], &factors = call.operands[3];
  const Numbers& numbers = call.numbers;
  const Form form = kWide ? wide_form(numbers) : Form{uses_dot_products(numbers)};
  const int64_t groups = numbers.integer("groups");
  const Image image{x.shape[1], x.shape[2], x.shape[3]};
  const int64_t window_y = numbers.integer("window_y"), window_x = numbers.integer("window_x");
  const int64_t stride_y = numbers.integer("stride_y"), stride_x = numbers.integer("stride_x");
  const int64_t dilation_y = numbers.integer("dilation_y"), dilation_x = numbers.integer("dilation_x");
  const int64_t top = numbers.integer("top"), left = numbers.integer("left");
  const int64_t first_y = numbers.integer("first_y"), first_x = numbers.integer("first_x");
  const int64_t step_y = numbers.integer("step_y"), step_x = numbers.integer("step_x");
  const int64_t lines = numbers.integer("lines"), places = numbers.integer("places");
  const auto fill = Code(numbers.integer("fill"));
  const int64_t size = image.channels / groups, depth = window_y * window_x * size;
  const int64_t outputs = out.shape[3], columns = outputs / groups, rows = x.shape[0] * lines * places;
  const int64_t packed_bytes = call.operands[1].shape[1], padded = call.operands[2].shape[1];
  const int64_t factor_bytes = factors.size() / groups * size_of(factors.dtype);
  const Code* const end = x.as<Code>() + x.size();
  const Rounding rounding = rounding_of(call, factors);

  const int64_t stride = form.stride(depth), together = rows_of_task(rows, stride);
  const int64_t blocks = (rows + together - 1) / together;
  // Few rows of many columns are shared out by columns, though each task then gathers its rows.
  const int64_t pieces = std::max<int64_t>(1, std::min((columns + kColumns - 1) / kColumns, 8 / (blocks * groups)));
  const int64_t piece = whole((columns + pieces - 1) / pieces, kColumns);
  // A line of the window is one piece of memory where it has all channels next to each other.
  const bool in_one = dilation_x == 1 && groups == 1;
  parallel_for(blocks * groups * pieces, rows * columns * (depth / 16 + 1), [&](int64_t task) {
    const int64_t part = task % pieces, group = task / pieces % groups, block = task / pieces / groups;
    const int64_t begin = block * together, count = std::min(together, rows - begin);
    const int64_t first = part * piece, last = std::min(columns, first + piece);
    if (first >= last) return;
    uint8_t* gathered = scratch(count * int64_t(sizeof(Code*)) + 64 + count * stride + kSlack);
    auto** written = reinterpret_cast<Code**>(gathered);
    gathered += whole(count * int64_t(sizeof(Code*)), 64);
    int64_t place = begin % places, line = begin / places % lines, example = begin / places / lines;
    for (int64_t r = 0; r < count; ++r) {
      Row row{form, gathered + r * stride};
      const Code* codes = x.as<Code>() + example * image.height * image.width * image.channels + group * size;
      const int64_t x0 = place * stride_x - left;
      for (int64_t i = 0; i < window_y; ++i) {
        const int64_t y = line * stride_y - top + i * dilation_y;
        if (y < 0 || y >= image.height) {
          row.fill(fill, window_x * size);
          continue;
        }
        const Code* from = codes + (y * image.width + x0) * image.channels;
        if (in_one && x0 >= 0 && x0 + window_x <= image.width) {
          row.put(from, window_x * size, end);
          continue;
        }
        for (int64_t j = 0; j < window_x; ++j) {
          const int64_t at = x0 + j * dilation_x;
          if (at < 0 || at >= image.width) row.fill(fill, size);
          else row.put(from + j * dilation_x * image.channels, size, end);
        }
      }
      for (uint8_t* rest = row.at; rest < gathered + (r + 1) * stride; ++rest) *rest = 0;
      written[r] = out.as<Code>() + group * columns +
                   ((example * out.shape[1] + first_y + line * step_y) * out.shape[2] + first_x + place * step_x) * outputs;
      if (++place == places) {
        place = 0;
        if (++line == lines) line = 0, ++example;
      }
    }
    Rounding own = rounding;
    own.factors = static_cast<const uint8_t*>(rounding.factors) + group * factor_bytes;
    const uint8_t* packed = call.operands[1].as<uint8_t>() + group * packed_bytes;
    if constexpr (kWide) {
      const WideSink sink{own, call.operands[2].as<int64_t>() + group * padded, written, columns};
      multiply(form, gathered, count, depth, packed, first, last, sink);
    } else {
      const Sink sink{own, call.operands[2].as<int32_t>() + group * padded, written, nullptr, columns};
      multiply(form, gathered, count, depth, packed, first, last, sink);
    }
  });
}

void integer_conv_2d(const Call& call) {
  if (call.results[0].dtype == DType::int16) conv_2d<int16_t>(call);
  else conv_2d<int8_t>(call);
}

// Which matrix of an operand the result's matrix `number` is made of, where leading axes broadcast.
int64_t matrix_of(const Array& operand, const Array& out, int64_t number) {
  int64_t index = 0, stride = 1;
  for (size_t k = out.shape.size() - 2; k-- > 0;) {
    if (operand.shape[k] != 1) index += number % out.shape[k] * stride;
    stride *= operand.shape[k];
    number /= out.shape[k];
  }
  return index;
}

// operands: int16 [..., rows, depth] and [..., depth, columns] of one rank, their last axes swapped where "adj_x" and "adj_y" say so,
// leading axes broadcast. result: int16. Products have 30 bits: float64 adds fewer than 2^23 of them without rounding.
void integer_batch_matmul_wide(const Call& call) {
  const Array &x = call.operands[0], &y = call.operands[1], &out = call.results[0];
  const Numbers& numbers = call.numbers;
  const bool adj_x = numbers.integer("adj_x") != 0, adj_y = numbers.integer("adj_y") != 0;
  const int64_t significand = numbers.integer("significand"), shift = numbers.integer("shift");
  const int64_t lowest = numbers.integer("lowest"), highest = numbers.integer("highest");
  const size_t rank = out.shape.size();
  const int64_t rows = out.shape[rank - 2], columns = out.shape[rank - 1], depth = x.shape[adj_x ? rank - 2 : rank - 1];
  constexpr int64_t kRows = 4, kTogether = 32;
  int64_t matrices = 1;
  for (size_t k = 0; k + 2 < rank; ++k) matrices *= out.shape[k];
  const int64_t width = whole(columns, kTogether);
  parallel_for(matrices, matrices * rows * columns * (depth / 4 + 1), [&](int64_t number) {
    auto* second = reinterpret_cast<double*>(scratch((width + kRows) * depth * 8));
    double* first = second + width * depth;
    const int16_t* from = y.as<int16_t>() + matrix_of(y, out, number) * depth * columns;
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = 0; n < width; ++n) second[k * width + n] = n < columns ? from[adj_y ? n * depth + k : k * columns + n] : 0;
    from = x.as<int16_t>() + matrix_of(x, out, number) * rows * depth;
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = std::min(kRows, rows - row);
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t r = 0; r < kRows; ++r) {
          const int64_t at = std::min(row + r, rows - 1);
          first[k * kRows + r] = from[adj_x ? k * rows + at : at * depth + k];
        }
      for (int64_t column = 0; column < columns; column += kTogether) {
        double sums[kRows][kTogether] = {};
        for (int64_t k = 0; k < depth; ++k)
          for (int64_t r = 0; r < kRows; ++r)
            for (int64_t n = 0; n < kTogether; ++n) sums[r][n] += first[k * kRows + r] * second[k * width + column + n];
        for (int64_t r = 0; r < count; ++r) {
          int16_t* codes = out.as<int16_t>() + (number * rows + row + r) * columns + column;
          for (int64_t n = 0; n < std::min(kTogether, columns - column); ++n) {
            const int64_t steps = (int64_t(sums[r][n]) * significand + (int64_t(1) << (shift - 1))) >> shift;
            codes[n] = int16_t(std::min(std::max(steps, lowest), highest));
          }
        }
      }
    }
  });
}

// operands: int8 [..., rows, depth] and [..., depth, columns] of one rank, their last axes swapped where "adj_x" and "adj_y" say so,
// leading axes broadcast; factors, the same for all columns, as many as these in whole blocks of kColumns. result: int8.
void integer_batch_matmul(const Call& call) {
  const Array &x = call.operands[0], &y = call.operands[1], &out = call.results[0];
  const Numbers& numbers = call.numbers;
  const Form form{uses_dot_products(numbers)};
  const bool adj_x = numbers.integer("adj_x") != 0, adj_y = numbers.integer("adj_y") != 0;
  const auto zero_x = int32_t(numbers.integer("zero_point_x")), zero_y = int32_t(numbers.integer("zero_point_y"));
  const size_t rank = out.shape.size();
  const int64_t rows = out.shape[rank - 2], columns = out.shape[rank - 1], depth = x.shape[adj_x ? rank - 2 : rank - 1];
  const Rounding rounding = rounding_of(call, call.operands[2]);
  int64_t matrices = 1;
  for (size_t k = 0; k + 2 < rank; ++k) matrices *= out.shape[k];
  const int8_t* const end = x.as<int8_t>() + x.size();
  const int64_t stride = form.stride(depth), panels = whole(columns, kPanel) * stride;
  parallel_for(matrices, matrices * rows * columns * (depth / 16 + 1), [&](int64_t number) {
    const int64_t pointers = whole(rows * int64_t(sizeof(int8_t*)), 64), sums = whole(rows * 4, 64), biases = whole(columns, kColumns) * 4;
    uint8_t* room = scratch(pointers + sums + biases + whole(panels, 64) + rows * stride + kSlack);
    auto** written = reinterpret_cast<int8_t**>(room);
    auto* added = reinterpret_cast<int32_t*>(room + pointers);
    auto* bias = reinterpret_cast<int32_t*>(room + pointers + sums);
    uint8_t* packed = room + pointers + sums + biases;
    uint8_t* gathered = packed + whole(panels, 64);

    const int8_t* second = y.as<int8_t>() + matrix_of(y, out, number) * depth * columns;
    const int64_t down = adj_y ? 1 : columns, right = adj_y ? depth : 1;
    pack(form, depth, columns, [=](int64_t k, int64_t n) { return second[k * down + n * right]; }, packed);
    std::fill_n(bias, whole(columns, kColumns), 0);
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = 0; n < columns; ++n) bias[n] += second[k * down + n * right];
    const int64_t shift = zero_x + (form.dot ? kShift : 0);
    for (int64_t n = 0; n < columns; ++n) bias[n] = int32_t(depth * zero_x * zero_y - shift * bias[n]);

    const int8_t* first = x.as<int8_t>() + matrix_of(x, out, number) * rows * depth;
    std::vector<int8_t> turned(size_t(adj_x ? depth : 0));
    for (int64_t r = 0; r < rows; ++r) {
      const int8_t* codes = first + r * depth;
      if (adj_x) {
        for (int64_t k = 0; k < depth; ++k) turned[size_t(k)] = first[k * rows + r];
        codes = turned.data();
      }
      Row row{form, gathered + r * stride};
      row.put(codes, depth, adj_x ? codes + depth : end);
      for (uint8_t* rest = row.at; rest < gathered + (r + 1) * stride; ++rest) *rest = 0;
      int32_t total = 0;
      for (int64_t k = 0; k < depth; ++k) total += codes[k];
      added[r] = -zero_y * total;
      written[r] = out.as<int8_t>() + (number * rows + r) * columns;
    }
    multiply(form, gathered, rows, depth, packed, 0, columns, Sink{rounding, bias, written, zero_y != 0 ? added : nullptr, columns});
  });
}

[[maybe_unused]] const bool entered = add_kernel("integer_pack", integer_pack) && add_kernel("integer_conv_2d", integer_conv_2d) &&
                                      add_kernel("integer_batch_matmul", integer_batch_matmul) &&
                                      add_kernel("integer_batch_matmul_wide", integer_batch_matmul_wide);

}  // namespace
}  // namespace exactqat
