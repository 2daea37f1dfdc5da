// SPDX-License-Identifier: Apache-2.0
// Channels first: a vector's width of planes at a time is rearranged to channels last, in a piece of memory that stays in the
// caches, and back. So everything that is channels last serves here too; depthwise_conv2d_sliding.h does without where it can.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "depthwise_conv2d_geometry.h"
#include "simd.h"
#include "unrolled.h"

namespace exactqat {

// Planes that are worked on together: a vector of them.
template <class T>
constexpr int kPlanes = Vector<T>::kWidth;

// How many rows of the larger image are worked on at a time, so that what is rearranged stays in the second cache.
template <class T>
int64_t rows_at_a_time(const Geometry& g) {
  constexpr int64_t kBytes = 1 << 17;
  const int64_t row = std::max(g.input_width, g.output_width) * kPlanes<T> * int64_t(sizeof(T));
  return std::max<int64_t>(4, kBytes / std::max<int64_t>(row, 1));
}

// Memory for a task, aligned to whole registers and not filled.
template <class T>
std::unique_ptr<T[], void (*)(void*)> scratch(int64_t size) {
  constexpr size_t kAlignment = 64;
  const size_t bytes = (size_t(size) * sizeof(T) / kAlignment + 1) * kAlignment;
  void* data = ::operator new(bytes, std::align_val_t(kAlignment));
  return {static_cast<T*>(data), [](void* memory) { ::operator delete(memory, std::align_val_t(kAlignment)); }};
}

#if defined(__AVX512F__)

// Rows become columns. maskz with all lanes: GCC 12 warns about the plain instructions' own headers.
[[gnu::always_inline]] inline void transpose(__m512 (&r)[16]) {
  __m512 pairs[16], fours[16];
  unrolled<8>([&](auto i) __attribute__((always_inline)) {
    pairs[2 * i] = _mm512_maskz_unpacklo_ps(0xffff, r[2 * i], r[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_maskz_unpackhi_ps(0xffff, r[2 * i], r[2 * i + 1]);
  });
  // fours[4 * i + k] holds, in quarter l, column 4 * l + k of rows 4 * i to 4 * i + 3.
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    unrolled<2>([&](auto k) __attribute__((always_inline)) {
      const __m512d a = _mm512_castps_pd(pairs[4 * i + k]), b = _mm512_castps_pd(pairs[4 * i + 2 + k]);
      fours[4 * i + 2 * k] = _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xff, a, b));
      fours[4 * i + 2 * k + 1] = _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xff, a, b));
    });
  });
  // Even quarters of two vectors, or odd ones.
  const auto even = [](__m512 a, __m512 b)
                        __attribute__((always_inline)) { return _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x88); };
  const auto odd = [](__m512 a, __m512 b)
                       __attribute__((always_inline)) { return _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xdd); };
  unrolled<4>([&](auto k) __attribute__((always_inline)) {
    const __m512 a = even(fours[k], fours[4 + k]), b = even(fours[8 + k], fours[12 + k]);
    const __m512 c = odd(fours[k], fours[4 + k]), d = odd(fours[8 + k], fours[12 + k]);
    r[k] = even(a, b);
    r[8 + k] = odd(a, b);
    r[4 + k] = even(c, d);
    r[12 + k] = odd(c, d);
  });
}

#elif defined(__AVX2__)

[[gnu::always_inline]] inline void transpose(__m256 (&r)[8]) {
  __m256 pairs[8], fours[8];
  unrolled<4>([&](auto i) __attribute__((always_inline)) {
    pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  });
  unrolled<2>([&](auto i) __attribute__((always_inline)) {
    unrolled<2>([&](auto k) __attribute__((always_inline)) {
      const __m256d a = _mm256_castps_pd(pairs[4 * i + k]), b = _mm256_castps_pd(pairs[4 * i + 2 + k]);
      fours[4 * i + 2 * k] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      fours[4 * i + 2 * k + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    });
  });
  unrolled<4>([&](auto k) __attribute__((always_inline)) {
    r[k] = _mm256_permute2f128_ps(fours[k], fours[4 + k], 0x20);
    r[4 + k] = _mm256_permute2f128_ps(fours[k], fours[4 + k], 0x31);
  });
}

#endif

template <class T>
constexpr bool kTransposes = sizeof(T) == 4 && Vector<T>::kWidth >= 8;

// `positions` elements of `count` planes from offset `begin` on -> to[positions][kPlanes]; the rest of a vector is zero.
template <class T>
void gather_planes(const T* const* planes, int count, int64_t begin, int64_t positions, T* to) {
  constexpr int N = kPlanes<T>;
  int64_t i = 0;
  if constexpr (kTransposes<T>) {
    decltype(Vector<T>::v) r[N];
    const auto tile = [&](auto&& load, int64_t rows) __attribute__((always_inline)) {
      unrolled<N>([&](auto k) __attribute__((always_inline)) {
        r[k] = k < count ? load(planes[k] + begin + i).v : Vector<T>().v;
      });
      transpose(r);
      unrolled<N>([&](auto k) __attribute__((always_inline)) {
        if (k < rows) Vector<T>{r[k]}.store(to + (i + k) * N);
      });
    };
    for (; i + N <= positions; i += N) tile([](const T* p) __attribute__((always_inline)) { return Vector<T>::load(p); }, N);
    const int64_t rest = positions - i;
    if (rest > 0) tile([&](const T* p) __attribute__((always_inline)) { return Vector<T>::load(p, rest); }, rest);
  } else {
    for (int k = 0; k < N; ++k)
      for (i = 0; i < positions; ++i) to[i * N + k] = k < count ? planes[k][begin + i] : T(0);
  }
}

// The way back.
template <class T>
void scatter_planes(const T* from, int64_t positions, T* const* planes, int count, int64_t begin) {
  constexpr int N = kPlanes<T>;
  int64_t i = 0;
  if constexpr (kTransposes<T>) {
    decltype(Vector<T>::v) r[N];
    const auto tile = [&](auto&& store, int64_t rows) __attribute__((always_inline)) {
      unrolled<N>([&](auto k) __attribute__((always_inline)) {
        r[k] = k < rows ? Vector<T>::load(from + (i + k) * N).v : Vector<T>().v;
      });
      transpose(r);
      unrolled<N>([&](auto k) __attribute__((always_inline)) {
        if (k < count) store(Vector<T>{r[k]}, planes[k] + begin + i);
      });
    };
    for (; i + N <= positions; i += N)
      tile([](Vector<T> v, T* p) __attribute__((always_inline)) { v.store(p); }, N);
    const int64_t rest = positions - i;
    if (rest > 0) tile([&](Vector<T> v, T* p) __attribute__((always_inline)) { v.store(p, rest); }, rest);
  } else {
    for (int k = 0; k < count; ++k)
      for (i = 0; i < positions; ++i) planes[k][begin + i] = from[i * N + k];
  }
}

}  // namespace exactqat
