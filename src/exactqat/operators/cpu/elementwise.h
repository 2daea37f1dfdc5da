// SPDX-License-Identifier: Apache-2.0
// What kernels need that do the same to every element: vectors of any storage dtype, comparisons, and loops over a whole tensor
// that keep up with memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "halves.h"
#include "memory.h"
#include "parallel.h"
#include "simd.h"

namespace exactqat {

constexpr int64_t kLine = 64;      // bytes of a line of the cache
constexpr int64_t kTask = 32768;  // about the elements of one task

template <class T>
struct LineAllocator {
  using value_type = T;
  // Room for where it begins lies before it. The C library's own aligned memory takes several times as long, which a call on a
  // small tensor feels.
  T* allocate(size_t n) {
    void* room = ::operator new(n * sizeof(T) + kLine);
    static_assert(alignof(std::max_align_t) >= sizeof(room) && kLine % alignof(std::max_align_t) == 0);
    auto* begin = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(room) / kLine + 1) * kLine);
    begin[-1] = room;
    return reinterpret_cast<T*>(begin);
  }
  void deallocate(T* p, size_t) { ::operator delete(reinterpret_cast<void**>(p)[-1]); }
  template <class U>
  void construct(U* p) {
    ::new (static_cast<void*>(p)) U;  // numbers stay unset: all of them are about to be written
  }
  template <class U, class... Arguments>
  void construct(U* p, Arguments&&... arguments) {
    ::new (static_cast<void*>(p)) U(std::forward<Arguments>(arguments)...);
  }
  friend bool operator==(LineAllocator, LineAllocator) { return true; }
};

// Whether results that are too large for the cache are written past it. Each way takes seconds to compile, and nobody trains with
// float64.
template <class S>
constexpr bool kMayGoPast = sizeof(S) < 8;

// From the beginning of a line on: a vector that lies across two lines takes twice as long to load.
template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

// The type that a storage dtype is computed in.
template <class S>
using Real = std::conditional_t<sizeof(S) == 8, double, float>;

inline float real(float16 value) { return widened(value); }
inline float real(bfloat16 value) { return widened(value); }
inline float real(float value) { return value; }
inline double real(double value) { return value; }
inline void round_to(float& to, float value) { to = value; }
inline void round_to(double& to, double value) { to = value; }

// How much of a vector there is: all of it, or its first n elements. The others are loaded as zeros and never stored.
struct Whole {};
struct Part {
  int64_t n;
};

template <class T>
int64_t count_of(Whole) {
  return Vector<T>::kWidth;
}
template <class T>
int64_t count_of(Part part) {
  return part.n;
}

#if defined(__AVX512F__)

template <class T>
struct Mask;
template <>
struct Mask<float> {
  __mmask16 bits;
};
template <>
struct Mask<double> {
  __mmask8 bits;
};
inline Mask<float> operator&(Mask<float> a, Mask<float> b) { return {__mmask16(a.bits & b.bits)}; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {__mmask8(a.bits & b.bits)}; }
inline Mask<float> operator|(Mask<float> a, Mask<float> b) { return {__mmask16(a.bits | b.bits)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {__mmask8(a.bits | b.bits)}; }
inline Mask<float> without(Mask<float> a, Mask<float> b) { return {__mmask16(a.bits & ~b.bits)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {__mmask8(a.bits & ~b.bits)}; }
inline uint32_t bits_of(Mask<float> mask) { return mask.bits; }
inline uint32_t bits_of(Mask<double> mask) { return mask.bits; }

inline Mask<float> less(Vector<float> a, Vector<float> b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask<double> less(Vector<double> a, Vector<double> b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask<float> less_equal(Vector<float> a, Vector<float> b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask<double> less_equal(Vector<double> a, Vector<double> b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask<float> equal(Vector<float> a, Vector<float> b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask<double> equal(Vector<double> a, Vector<double> b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask<float> unordered(Vector<float> a, Vector<float> b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask<double> unordered(Vector<double> a, Vector<double> b) { return {_mm512_cmp_pd_mask(a.v, b.v, _CMP_UNORD_Q)}; }
inline bool any_nan(Vector<float> a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
inline bool any_nan(Vector<double> a) { return _mm512_cmp_pd_mask(a.v, a.v, _CMP_UNORD_Q); }

// a < b ? a : b, and a > b ? a : b: the second if one is NaN. (maskz with all lanes: GCC 12 warns about plain ones' header.)
inline Vector<float> lesser(Vector<float> a, Vector<float> b) { return {_mm512_maskz_min_ps(0xffff, a.v, b.v)}; }
inline Vector<double> lesser(Vector<double> a, Vector<double> b) { return {_mm512_maskz_min_pd(0xff, a.v, b.v)}; }
inline Vector<float> greater(Vector<float> a, Vector<float> b) { return {_mm512_maskz_max_ps(0xffff, a.v, b.v)}; }
inline Vector<double> greater(Vector<double> a, Vector<double> b) { return {_mm512_maskz_max_pd(0xff, a.v, b.v)}; }
inline Vector<float> divided(Vector<float> a, Vector<float> b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vector<double> divided(Vector<double> a, Vector<double> b) { return {_mm512_div_pd(a.v, b.v)}; }
inline Vector<float> floored(Vector<float> a) { return {_mm512_maskz_roundscale_ps(0xffff, a.v, 0x09)}; }
inline Vector<double> floored(Vector<double> a) { return {_mm512_maskz_roundscale_pd(0xff, a.v, 0x09)}; }
inline Vector<float> half_to_even(Vector<float> a) { return {_mm512_maskz_roundscale_ps(0xffff, a.v, 0x08)}; }
inline Vector<double> half_to_even(Vector<double> a) { return {_mm512_maskz_roundscale_pd(0xff, a.v, 0x08)}; }
inline Vector<float> chosen(Mask<float> m, Vector<float> a, Vector<float> b) {
  return {_mm512_mask_blend_ps(m.bits, b.v, a.v)};
}
inline Vector<double> chosen(Mask<double> m, Vector<double> a, Vector<double> b) {
  return {_mm512_mask_blend_pd(m.bits, b.v, a.v)};
}
inline Vector<float> kept(Mask<float> m, Vector<float> a) { return {_mm512_maskz_mov_ps(m.bits, a.v)}; }
inline Vector<double> kept(Mask<double> m, Vector<double> a) { return {_mm512_maskz_mov_pd(m.bits, a.v)}; }

// The vectors of float64 that make up one vector, and a sum to which one of them is added where the mask has it.
template <int I>
inline Vector<double> doubles(Vector<float> a) {
  return {_mm512_maskz_cvtps_pd(0xff, I == 0 ? _mm512_castps512_ps256(a.v) : _mm512_maskz_extractf32x8_ps(0xff, a.v, 1))};
}
template <int I>
inline Vector<double> added(Vector<double> sum, Mask<float> m, Vector<double> a) {
  return {_mm512_mask_add_pd(sum.v, __mmask8(m.bits >> 8 * I), sum.v, a.v)};
}
template <int I>
inline Vector<double> added(Vector<double> sum, Mask<double> m, Vector<double> a) {
  return {_mm512_mask_add_pd(sum.v, m.bits, sum.v, a.v)};
}

// `masked` and `spoiled` (below) in one, of a gradient that is finite. Compilers leave out a product with a 1 that they see, and
// with it the flushing of denormals; without a way to hide it, its own product with 0 is added, which flushes and keeps the sign.
inline Vector<float> masked_noting(Vector<float>& spoiled, Vector<float> gradient, Mask<float> keep) {
  const __m512 times_0 = _mm512_mul_ps(gradient.v, _mm512_setzero_ps());
  spoiled.v = _mm512_or_ps(spoiled.v, times_0);
#if defined(__GNUC__)
  __m512 one = _mm512_set1_ps(1);
  asm("" : "+v"(one));
  return {_mm512_mask_mul_ps(times_0, keep.bits, gradient.v, one)};
#else
  return {_mm512_mask_add_ps(times_0, keep.bits, gradient.v, times_0)};
#endif
}
inline Vector<double> masked_noting(Vector<double>& spoiled, Vector<double> gradient, Mask<double> keep) {
  const __m512d times_0 = _mm512_mul_pd(gradient.v, _mm512_setzero_pd());
  spoiled.v = _mm512_or_pd(spoiled.v, times_0);
  return {_mm512_mask_add_pd(times_0, keep.bits, gradient.v, times_0)};
}

// 2 bits an element, from a bit in each of two masks: 16 elements in a word, the first in the lowest bits.
template <class T>
inline Mask<T> low_bits(uint32_t packed);
template <class T>
inline Mask<T> high_bits(uint32_t packed);
inline __m512i places() {
  return _mm512_setr_epi32(1, 1 << 2, 1 << 4, 1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22,
                           1 << 24, 1 << 26, 1 << 28, 1 << 30);
}
template <>
inline Mask<float> low_bits(uint32_t packed) {
  return {_mm512_test_epi32_mask(_mm512_set1_epi32(int(packed)), places())};
}
template <>
inline Mask<float> high_bits(uint32_t packed) {  // other places, not other bits: these are already in a register
  return {_mm512_test_epi32_mask(_mm512_set1_epi32(int(packed)), _mm512_maskz_slli_epi32(0xffff, places(), 1))};
}
template <>
inline Mask<double> low_bits(uint32_t packed) {
  return {__mmask8(low_bits<float>(packed).bits)};
}
template <>
inline Mask<double> high_bits(uint32_t packed) {
  return {__mmask8(high_bits<float>(packed).bits)};
}

template <class T>
inline Vector<T> load(const T* p, Whole) {
  return Vector<T>::load(p);
}
template <class T>
inline Vector<T> load(const T* p, Part part) {
  return Vector<T>::load(p, part.n);
}
inline Vector<float> widened(__m256i halves, bfloat16) {
  return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16))};
}
inline Vector<float> widened(__m256i halves, float16) { return {_mm512_maskz_cvtph_ps(0xffff, halves)}; }
// To be cut off after the high words.
inline __m512i rounded_up(Vector<float> a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
  return _mm512_add_epi32(bits, half);
}
inline __m256i rounded(Vector<float> a, bfloat16) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_mask_or_epi32(rounded_up(a), nan, _mm512_castps_si512(a.v), _mm512_set1_epi32(0x400000));
  return _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_srli_epi32(0xffff, quiet, 16));
}
inline __m256i rounded(Vector<float> a, float16) { return _mm512_maskz_cvtps_ph(0xffff, a.v, 0); }

template <class S>
  requires(sizeof(S) == 2)
inline Vector<float> load(const S* p, Whole) {
  return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), S{});
}
template <class S>
  requires(sizeof(S) == 2)
inline Vector<float> load(const S* p, Part part) {
  return widened(_mm256_maskz_loadu_epi16(__mmask16((1u << part.n) - 1), p), S{});
}

template <class T>
inline void store(T* p, Vector<T> a, Whole) {
  a.store(p);
}
template <class T>
inline void store(T* p, Vector<T> a, Part part) {
  a.store(p, part.n);
}
template <class S>
  requires(sizeof(S) == 2)
inline void store(S* p, Vector<float> a, Whole) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded(a, S{}));
}
template <class S>
  requires(sizeof(S) == 2)
inline void store(S* p, Vector<float> a, Part part) {
  _mm256_mask_storeu_epi16(p, __mmask16((1u << part.n) - 1), rounded(a, S{}));
}

// Two vectors next to each other, in fewer steps than one by one; false, and nothing stored, where one holds NaN.
template <bool Past>
inline bool store_both(bfloat16* p, Vector<float> a, Vector<float> b) {
  if (_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)) return false;
  alignas(64) static constexpr uint16_t kHighWords[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i both = _mm512_permutex2var_epi16(rounded_up(a), _mm512_load_si512(kHighWords), rounded_up(b));
  if constexpr (Past) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(both));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p) + 1, _mm512_maskz_extracti64x4_epi64(0xff, both, 1));
  } else {
    _mm512_storeu_si512(p, both);
  }
  return true;
}

template <class S>
  requires(sizeof(S) == 2)
inline void stream(S* p, Vector<float> a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), rounded(a, S{}));
}

#elif defined(__AVX2__)

template <class T>
struct Mask;
template <>
struct Mask<float> {
  __m256 v;
};
template <>
struct Mask<double> {
  __m256d v;
};
inline Mask<float> operator&(Mask<float> a, Mask<float> b) { return {_mm256_and_ps(a.v, b.v)}; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {_mm256_and_pd(a.v, b.v)}; }
inline Mask<float> operator|(Mask<float> a, Mask<float> b) { return {_mm256_or_ps(a.v, b.v)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {_mm256_or_pd(a.v, b.v)}; }
inline Mask<float> without(Mask<float> a, Mask<float> b) { return {_mm256_andnot_ps(b.v, a.v)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {_mm256_andnot_pd(b.v, a.v)}; }
inline uint32_t bits_of(Mask<float> mask) { return uint32_t(_mm256_movemask_ps(mask.v)); }
inline uint32_t bits_of(Mask<double> mask) { return uint32_t(_mm256_movemask_pd(mask.v)); }

inline Mask<float> less(Vector<float> a, Vector<float> b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask<double> less(Vector<double> a, Vector<double> b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask<float> less_equal(Vector<float> a, Vector<float> b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask<double> less_equal(Vector<double> a, Vector<double> b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask<float> unordered(Vector<float> a, Vector<float> b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q)}; }
inline Mask<double> unordered(Vector<double> a, Vector<double> b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_UNORD_Q)}; }
inline bool any_nan(Vector<float> a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)); }
inline bool any_nan(Vector<double> a) { return _mm256_movemask_pd(_mm256_cmp_pd(a.v, a.v, _CMP_UNORD_Q)); }

// a < b ? a : b, and a > b ? a : b: the second if one is NaN.
inline Vector<float> lesser(Vector<float> a, Vector<float> b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vector<double> lesser(Vector<double> a, Vector<double> b) { return {_mm256_min_pd(a.v, b.v)}; }
inline Vector<float> greater(Vector<float> a, Vector<float> b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vector<double> greater(Vector<double> a, Vector<double> b) { return {_mm256_max_pd(a.v, b.v)}; }
inline Vector<float> divided(Vector<float> a, Vector<float> b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vector<double> divided(Vector<double> a, Vector<double> b) { return {_mm256_div_pd(a.v, b.v)}; }
inline Vector<float> floored(Vector<float> a) { return {_mm256_floor_ps(a.v)}; }
inline Vector<double> floored(Vector<double> a) { return {_mm256_floor_pd(a.v)}; }
inline Vector<float> half_to_even(Vector<float> a) { return {_mm256_round_ps(a.v, 0x08)}; }
inline Vector<double> half_to_even(Vector<double> a) { return {_mm256_round_pd(a.v, 0x08)}; }
inline Vector<float> chosen(Mask<float> m, Vector<float> a, Vector<float> b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }
inline Vector<double> chosen(Mask<double> m, Vector<double> a, Vector<double> b) { return {_mm256_blendv_pd(b.v, a.v, m.v)}; }
inline Vector<float> kept(Mask<float> m, Vector<float> a) { return {_mm256_and_ps(m.v, a.v)}; }
inline Vector<double> kept(Mask<double> m, Vector<double> a) { return {_mm256_and_pd(m.v, a.v)}; }

// The vectors of float64 that make up one vector, and a sum to which one of them is added where the mask has it: +0 elsewhere,
// which changes no sum that begins at +0.
template <int I>
inline Vector<double> doubles(Vector<float> a) {
  return {_mm256_cvtps_pd(_mm256_extractf128_ps(a.v, I))};
}
template <int I>
inline Vector<double> added(Vector<double> sum, Mask<float> m, Vector<double> a) {
  const __m256i wide = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(_mm256_castps_si256(m.v), I));
  return {_mm256_add_pd(sum.v, _mm256_and_pd(_mm256_castsi256_pd(wide), a.v))};
}
template <int I>
inline Vector<double> added(Vector<double> sum, Mask<double> m, Vector<double> a) {
  return {_mm256_add_pd(sum.v, _mm256_and_pd(m.v, a.v))};
}

// 2 bits an element, from a bit in each of two masks: 8 elements in the low half of a word, the first in the lowest bits.
template <class T>
inline Mask<T> low_bits(uint32_t packed);
template <class T>
inline Mask<T> high_bits(uint32_t packed);
template <>
inline Mask<float> low_bits(uint32_t packed) {
  const __m256i places = _mm256_setr_epi32(1, 1 << 2, 1 << 4, 1 << 6, 1 << 8, 1 << 10, 1 << 12, 1 << 14);
  const __m256i found = _mm256_and_si256(_mm256_set1_epi32(int(packed)), places);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(found, places))};
}
template <>
inline Mask<float> high_bits(uint32_t packed) {
  return low_bits<float>(packed >> 1);
}
template <>
inline Mask<double> low_bits(uint32_t packed) {
  const __m256i places = _mm256_setr_epi64x(1, 1 << 2, 1 << 4, 1 << 6);
  const __m256i found = _mm256_and_si256(_mm256_set1_epi64x(packed), places);
  return {_mm256_castsi256_pd(_mm256_cmpeq_epi64(found, places))};
}
template <>
inline Mask<double> high_bits(uint32_t packed) {
  return low_bits<double>(packed >> 1);
}

template <class T>
inline Vector<T> load(const T* p, Whole) {
  return Vector<T>::load(p);
}
template <class T>
inline Vector<T> load(const T* p, Part part) {
  return Vector<T>::load(p, part.n);
}
inline Vector<float> widened(__m128i halves, bfloat16) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
inline Vector<float> widened(__m128i halves, float16) { return {_mm256_cvtph_ps(halves)}; }
// To be cut off after the high words.
inline __m256i rounded_up(Vector<float> a) {
  const __m256i bits = _mm256_castps_si256(a.v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
inline __m128i rounded(Vector<float> a, bfloat16) {
  const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded_up(a), quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline __m128i rounded(Vector<float> a, float16) { return _mm256_cvtps_ph(a.v, 0); }

template <class S>
  requires(sizeof(S) == 2)
inline Vector<float> load(const S* p, Whole) {
  return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), S{});
}
template <class S>
  requires(sizeof(S) == 2)
inline Vector<float> load(const S* p, Part part) {
  S halves[8] = {};
  std::copy_n(p, part.n, halves);
  return load(halves, Whole{});
}

template <class T>
inline void store(T* p, Vector<T> a, Whole) {
  a.store(p);
}
template <class T>
inline void store(T* p, Vector<T> a, Part part) {
  a.store(p, part.n);
}
template <class S>
  requires(sizeof(S) == 2)
inline void store(S* p, Vector<float> a, Whole) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), rounded(a, S{}));
}
template <class S>
  requires(sizeof(S) == 2)
inline void store(S* p, Vector<float> a, Part part) {
  S halves[8];
  store(halves, a, Whole{});
  std::copy_n(halves, part.n, p);
}

// Two vectors next to each other, in fewer steps than one by one; false, and nothing stored, where one holds NaN.
template <bool Past>
inline bool store_both(bfloat16* p, Vector<float> a, Vector<float> b) {
  if (_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q))) return false;
  const __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(rounded_up(a), 16), _mm256_srli_epi32(rounded_up(b), 16));
  const __m256i both = _mm256_permute4x64_epi64(words, 0xd8);
  if constexpr (Past) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(both));
    _mm_stream_si128(reinterpret_cast<__m128i*>(p) + 1, _mm256_extracti128_si256(both, 1));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
  }
  return true;
}

template <class S>
  requires(sizeof(S) == 2)
inline void stream(S* p, Vector<float> a) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), rounded(a, S{}));
}

#elif defined(EXACTQAT_NEON)

template <class T>
struct Mask;
template <>
struct Mask<float> {
  uint32x4_t v;
};
template <>
struct Mask<double> {
  uint64x2_t v;
};
inline Mask<float> operator&(Mask<float> a, Mask<float> b) { return {vandq_u32(a.v, b.v)}; }
inline Mask<double> operator&(Mask<double> a, Mask<double> b) { return {vandq_u64(a.v, b.v)}; }
inline Mask<float> operator|(Mask<float> a, Mask<float> b) { return {vorrq_u32(a.v, b.v)}; }
inline Mask<double> operator|(Mask<double> a, Mask<double> b) { return {vorrq_u64(a.v, b.v)}; }
inline Mask<float> without(Mask<float> a, Mask<float> b) { return {vbicq_u32(a.v, b.v)}; }
inline Mask<double> without(Mask<double> a, Mask<double> b) { return {vbicq_u64(a.v, b.v)}; }
inline uint32_t bits_of(Mask<float> mask) {
  static constexpr uint32_t kPlaces[] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask.v, vld1q_u32(kPlaces)));
}
inline uint32_t bits_of(Mask<double> mask) {
  static constexpr uint64_t kPlaces[] = {1, 2};
  return uint32_t(vaddvq_u64(vandq_u64(mask.v, vld1q_u64(kPlaces))));
}

inline Mask<float> less(Vector<float> a, Vector<float> b) { return {vcltq_f32(a.v, b.v)}; }
inline Mask<double> less(Vector<double> a, Vector<double> b) { return {vcltq_f64(a.v, b.v)}; }
inline Mask<float> less_equal(Vector<float> a, Vector<float> b) { return {vcleq_f32(a.v, b.v)}; }
inline Mask<double> less_equal(Vector<double> a, Vector<double> b) { return {vcleq_f64(a.v, b.v)}; }
inline Mask<float> unordered(Vector<float> a, Vector<float> b) {
  return {vmvnq_u32(vandq_u32(vceqq_f32(a.v, a.v), vceqq_f32(b.v, b.v)))};
}
inline Mask<double> unordered(Vector<double> a, Vector<double> b) {
  const uint64x2_t ordered = vandq_u64(vceqq_f64(a.v, a.v), vceqq_f64(b.v, b.v));
  return {vceqzq_u64(ordered)};
}
inline bool any_nan(Vector<float> a) { return vminvq_u32(vceqq_f32(a.v, a.v)) == 0; }
inline bool any_nan(Vector<double> a) { return vminvq_u32(vreinterpretq_u32_u64(vceqq_f64(a.v, a.v))) == 0; }

inline Vector<float> divided(Vector<float> a, Vector<float> b) { return {vdivq_f32(a.v, b.v)}; }
inline Vector<double> divided(Vector<double> a, Vector<double> b) { return {vdivq_f64(a.v, b.v)}; }
inline Vector<float> floored(Vector<float> a) { return {vrndmq_f32(a.v)}; }
inline Vector<double> floored(Vector<double> a) { return {vrndmq_f64(a.v)}; }
inline Vector<float> half_to_even(Vector<float> a) { return {vrndnq_f32(a.v)}; }
inline Vector<double> half_to_even(Vector<double> a) { return {vrndnq_f64(a.v)}; }
inline Vector<float> chosen(Mask<float> m, Vector<float> a, Vector<float> b) { return {vbslq_f32(m.v, a.v, b.v)}; }
inline Vector<double> chosen(Mask<double> m, Vector<double> a, Vector<double> b) { return {vbslq_f64(m.v, a.v, b.v)}; }
inline Vector<float> kept(Mask<float> m, Vector<float> a) {
  return {vreinterpretq_f32_u32(vandq_u32(m.v, vreinterpretq_u32_f32(a.v)))};
}
inline Vector<double> kept(Mask<double> m, Vector<double> a) {
  return {vreinterpretq_f64_u64(vandq_u64(m.v, vreinterpretq_u64_f64(a.v)))};
}

// a < b ? a : b, and a > b ? a : b: the second if one is NaN or both are zeros. The instructions named minimum and maximum have
// other rules.
template <class T>
inline Vector<T> lesser(Vector<T> a, Vector<T> b) {
  return chosen(less(a, b), a, b);
}
template <class T>
inline Vector<T> greater(Vector<T> a, Vector<T> b) {
  return chosen(less(b, a), a, b);
}

// The vectors of float64 that make up one vector, and a sum to which one of them is added where the mask has it: +0 elsewhere,
// which changes no sum that begins at +0.
template <int I>
inline Vector<double> doubles(Vector<float> a) {
  return {I == 0 ? vcvt_f64_f32(vget_low_f32(a.v)) : vcvt_high_f64_f32(a.v)};
}
template <int I>
inline Vector<double> added(Vector<double> sum, Mask<float> m, Vector<double> a) {
  const int32x4_t narrow = vreinterpretq_s32_u32(m.v);
  const int64x2_t wide = I == 0 ? vmovl_s32(vget_low_s32(narrow)) : vmovl_high_s32(narrow);
  return sum + kept(Mask<double>{vreinterpretq_u64_s64(wide)}, a);
}
template <int I>
inline Vector<double> added(Vector<double> sum, Mask<double> m, Vector<double> a) {
  return sum + kept(m, a);
}

// 2 bits an element, from a bit in each of two masks: 4 elements in the lowest byte of a word, the first in its lowest bits.
template <class T>
inline Mask<T> low_bits(uint32_t packed);
template <class T>
inline Mask<T> high_bits(uint32_t packed) {
  return low_bits<T>(packed >> 1);
}
template <>
inline Mask<float> low_bits(uint32_t packed) {
  static constexpr uint32_t kPlaces[] = {1, 1 << 2, 1 << 4, 1 << 6};
  return {vtstq_u32(vdupq_n_u32(packed), vld1q_u32(kPlaces))};
}
template <>
inline Mask<double> low_bits(uint32_t packed) {
  static constexpr uint64_t kPlaces[] = {1, 1 << 2};
  return {vtstq_u64(vdupq_n_u64(packed), vld1q_u64(kPlaces))};
}

template <class T>
inline Vector<T> load(const T* p, Whole) {
  return Vector<T>::load(p);
}
template <class T>
inline Vector<T> load(const T* p, Part part) {
  return Vector<T>::load(p, part.n);
}
// The processor's own conversions of float16 do not depend on what it does with denormal float32.
inline Vector<float> widened(uint16x4_t halves, bfloat16) { return {vreinterpretq_f32_u32(vshll_n_u16(halves, 16))}; }
inline Vector<float> widened(uint16x4_t halves, float16) { return {vcvt_f32_f16(vreinterpret_f16_u16(halves))}; }
inline uint16x4_t rounded(Vector<float> a, bfloat16) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a.v), high = vshrq_n_u32(bits, 16);
  const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
  const uint32x4_t up = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
  return vmovn_u32(vbslq_u32(vceqq_f32(a.v, a.v), up, quiet));
}
inline uint16x4_t rounded(Vector<float> a, float16) { return vreinterpret_u16_f16(vcvt_f16_f32(a.v)); }

template <class S>
  requires(sizeof(S) == 2)
inline Vector<float> load(const S* p, Whole) {
  return widened(vld1_u16(reinterpret_cast<const uint16_t*>(p)), S{});
}
template <class S>
  requires(sizeof(S) == 2)
inline Vector<float> load(const S* p, Part part) {
  S halves[4] = {};
  std::copy_n(p, part.n, halves);
  return load(halves, Whole{});
}

template <class T>
inline void store(T* p, Vector<T> a, Whole) {
  a.store(p);
}
template <class T>
inline void store(T* p, Vector<T> a, Part part) {
  a.store(p, part.n);
}
template <class S>
  requires(sizeof(S) == 2)
inline void store(S* p, Vector<float> a, Whole) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), rounded(a, S{}));
}
template <class S>
  requires(sizeof(S) == 2)
inline void store(S* p, Vector<float> a, Part part) {
  S halves[4];
  store(halves, a, Whole{});
  std::copy_n(halves, part.n, p);
}

template <class S>
inline void stream(S* p, Vector<Real<S>> a) {
  store(p, a, Whole{});
}

#else

template <class T>
struct Mask {
  bool v[Vector<T>::kWidth];
};
template <class T, class Lane>
inline Mask<T> mask_by(Lane&& lane) {
  Mask<T> r;
  for (int64_t k = 0; k < Vector<T>::kWidth; ++k) r.v[k] = lane(k);
  return r;
}
template <class T, class Lane>
inline Vector<T> vector_by(Lane&& lane) {
  Vector<T> r;
  for (int64_t k = 0; k < Vector<T>::kWidth; ++k) r.v[k] = lane(k);
  return r;
}
template <class T>
inline Mask<T> operator&(Mask<T> a, Mask<T> b) {
  return mask_by<T>([&](int64_t k) { return a.v[k] & b.v[k]; });
}
template <class T>
inline Mask<T> operator|(Mask<T> a, Mask<T> b) {
  return mask_by<T>([&](int64_t k) { return a.v[k] | b.v[k]; });
}
template <class T>
inline Mask<T> without(Mask<T> a, Mask<T> b) {
  return mask_by<T>([&](int64_t k) { return a.v[k] & !b.v[k]; });
}
template <class T>
inline uint32_t bits_of(Mask<T> mask) {
  uint32_t bits = 0;
  for (int64_t k = 0; k < Vector<T>::kWidth; ++k) bits |= uint32_t(mask.v[k]) << k;
  return bits;
}
template <class T>
inline Mask<T> less(Vector<T> a, Vector<T> b) {
  return mask_by<T>([&](int64_t k) { return a.v[k] < b.v[k]; });
}
template <class T>
inline Mask<T> less_equal(Vector<T> a, Vector<T> b) {
  return mask_by<T>([&](int64_t k) { return a.v[k] <= b.v[k]; });
}
template <class T>
inline Mask<T> unordered(Vector<T> a, Vector<T> b) {
  return mask_by<T>([&](int64_t k) { return (a.v[k] != a.v[k]) | (b.v[k] != b.v[k]); });
}
template <class T>
inline bool any_nan(Vector<T> a) {
  return bits_of(mask_by<T>([&](int64_t k) { return a.v[k] != a.v[k]; }));
}
template <class T>
inline Vector<T> lesser(Vector<T> a, Vector<T> b) {
  return vector_by<T>([&](int64_t k) { return a.v[k] < b.v[k] ? a.v[k] : b.v[k]; });
}
template <class T>
inline Vector<T> greater(Vector<T> a, Vector<T> b) {
  return vector_by<T>([&](int64_t k) { return a.v[k] > b.v[k] ? a.v[k] : b.v[k]; });
}
template <class T>
inline Vector<T> divided(Vector<T> a, Vector<T> b) {
  return vector_by<T>([&](int64_t k) { return a.v[k] / b.v[k]; });
}
template <class T>
inline Vector<T> floored(Vector<T> a) {
  return vector_by<T>([&](int64_t k) { return std::floor(a.v[k]); });
}
template <class T>
inline Vector<T> half_to_even(Vector<T> a) {
  return vector_by<T>([&](int64_t k) { return std::rint(a.v[k]); });
}
template <class T>
inline Vector<T> chosen(Mask<T> m, Vector<T> a, Vector<T> b) {
  // Bits, because a choice between numbers may be compiled into arithmetic.
  return vector_by<T>([&](int64_t k) { return m.v[k] ? a.v[k] : b.v[k]; });
}
template <class T>
inline Vector<T> kept(Mask<T> m, Vector<T> a) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  // In integers: compilers turn a product with a choice of 1 and 0 into a choice of products, which flushes nothing.
  return vector_by<T>([&](int64_t k) { return std::bit_cast<T>(-Bits(m.v[k]) & std::bit_cast<Bits>(a.v[k])); });
}

template <int I>
inline Vector<double> doubles(Vector<float> a) {
  return vector_by<double>([&](int64_t k) { return double(a.v[I * Vector<double>::kWidth + k]); });
}
template <int I, class T>
inline Vector<double> added(Vector<double> sum, Mask<T> m, Vector<double> a) {
  return vector_by<double>([&](int64_t k) { return sum.v[k] + (m.v[I * Vector<double>::kWidth + k] ? a.v[k] : 0.0); });
}

template <class T>
inline Mask<T> low_bits(uint32_t packed) {
  return mask_by<T>([&](int64_t k) { return bool(packed >> 2 * k & 1); });
}
template <class T>
inline Mask<T> high_bits(uint32_t packed) {
  return low_bits<T>(packed >> 1);
}

template <class S>
inline Vector<Real<S>> load(const S* p, Part part) {
  Vector<Real<S>> r;
  for (int64_t k = 0; k < part.n; ++k)
    if constexpr (sizeof(S) == 2) r.v[k] = widened(p[k]);
    else r.v[k] = p[k];
  return r;
}
template <class S>
inline Vector<Real<S>> load(const S* p, Whole) {
  return load(p, Part{Vector<Real<S>>::kWidth});
}
template <class S>
inline void store(S* p, Vector<Real<S>> a, Part part) {
  for (int64_t k = 0; k < part.n; ++k)
    if constexpr (sizeof(S) == 2) round_to(p[k], a.v[k]);
    else p[k] = a.v[k];
}
template <class S>
inline void store(S* p, Vector<Real<S>> a, Whole) {
  store(p, a, Part{Vector<Real<S>>::kWidth});
}
template <class S>
inline void stream(S* p, Vector<Real<S>> a) {
  store(p, a, Whole{});
}

#endif

template <int I>
inline Vector<double> doubles(Vector<double> a) {
  return a;
}

// As x86 flushes it (flushed.h).
template <class T>
inline Vector<T> flushed_quotient(Vector<T> a, Vector<T> b) {
#if defined(EXACTQAT_NEON)
  return flushed_by(divided(a * Vector<T>::all(kUp<T>), b), divided(a, b));
#elif defined(__aarch64__)
  return vector_by<T>([&](int64_t k) { return flushed_quotient(a.v[k], b.v[k]); });
#else
  return divided(a, b);
#endif
}

// Bits of two masks in turn, the first of `lower` lowest; of up to 16 elements.
inline uint32_t interleaved(uint32_t lower, uint32_t higher) {
#if defined(__BMI2__)
  return _pdep_u32(lower, 0x55555555) | _pdep_u32(higher, 0xaaaaaaaa);
#else
  uint64_t bits = lower | uint64_t{higher} << 32;
  bits = (bits | bits << 8) & 0x00ff00ff00ff00ff;
  bits = (bits | bits << 4) & 0x0f0f0f0f0f0f0f0f;
  bits = (bits | bits << 2) & 0x3333333333333333;
  bits = (bits | bits << 1) & 0x5555555555555555;
  return uint32_t(bits) | uint32_t(bits >> 31);
#endif
}

// Eight lanes folded in halves (docs/decisions/summation-order.md).
#if defined(__AVX2__)
inline double folded(__m256d four) {
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
#endif
#if defined(__AVX512F__)
inline double folded(const Vector<double> (&lanes)[1]) {
  return folded(_mm256_add_pd(_mm512_castpd512_pd256(lanes[0].v), _mm512_maskz_extractf64x4_pd(0xff, lanes[0].v, 1)));
}
#elif defined(__AVX2__)
inline double folded(const Vector<double> (&lanes)[2]) { return folded(_mm256_add_pd(lanes[0].v, lanes[1].v)); }
#else
inline double folded(const Vector<double> (&lanes)[4]) {
  const Vector<double> first = lanes[0] + lanes[2], second = lanes[1] + lanes[3], two = first + second;
  return two.v[0] + two.v[1];
}
#endif

// The folded lanes of several blocks, `kFoldedTogether` of them, each of two sums: first, second, first, second ...
#if defined(__AVX512F__)
constexpr int64_t kFoldedTogether = 4;
inline void fold_together(const Vector<double> (&first)[4][1], const Vector<double> (&second)[4][1], double* items) {
  const auto halves = [](const Vector<double> (&lanes)[4][1]) __attribute__((always_inline)) {
    const auto fours = [](__m512d a, __m512d b) __attribute__((always_inline)) {
      return _mm512_add_pd(_mm512_maskz_shuffle_f64x2(0xff, a, b, 0x44), _mm512_maskz_shuffle_f64x2(0xff, a, b, 0xee));
    };
    const __m512d a = fours(lanes[0][0].v, lanes[1][0].v), b = fours(lanes[2][0].v, lanes[3][0].v);
    return _mm512_add_pd(_mm512_maskz_shuffle_f64x2(0xff, a, b, 0x88), _mm512_maskz_shuffle_f64x2(0xff, a, b, 0xdd));
  };
  const __m512d a = halves(first), b = halves(second);
  const __m512d sums = _mm512_add_pd(_mm512_maskz_unpacklo_pd(0xff, a, b), _mm512_maskz_unpackhi_pd(0xff, a, b));
  _mm512_storeu_pd(items, sums);
}
#elif defined(__AVX2__)
constexpr int64_t kFoldedTogether = 2;
inline void fold_together(const Vector<double> (&first)[2][2], const Vector<double> (&second)[2][2], double* items) {
  const auto halves = [](const Vector<double> (&lanes)[2][2]) __attribute__((always_inline)) {
    const __m256d a = _mm256_add_pd(lanes[0][0].v, lanes[0][1].v), b = _mm256_add_pd(lanes[1][0].v, lanes[1][1].v);
    return _mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31));
  };
  _mm256_storeu_pd(items, _mm256_hadd_pd(halves(first), halves(second)));
}
#else
constexpr int64_t kFoldedTogether = 1;
inline void fold_together(const Vector<double> (&first)[1][4], const Vector<double> (&second)[1][4], double* items) {
  items[0] = folded(first[0]);
  items[1] = folded(second[0]);
}
#endif

// TensorFlow's clamp: NaN in x survives, a NaN bound is ignored.
template <class T>
inline Vector<T> clamp(Vector<T> x, Vector<T> low, Vector<T> high) {
  return greater(low, lesser(high, x));
}

// gradient * (keep ? 1 : 0): NaN, infinity times 0 and the sign of zero stay, denormals go.
template <class T>
inline Vector<T> masked(Vector<T> gradient, Mask<T> keep) {
  return gradient * kept(keep, Vector<T>::all(T(1)));
}

// What has become NaN after a value that is not finite, and was 0.
template <class T>
inline Vector<T> spoiled(Vector<T> so_far, Vector<T> value) {
#if defined(__FMA__) || defined(EXACTQAT_NEON)
  return Vector<T>::fused_multiply_add(value, Vector<T>{}, so_far);
#else
  return so_far + value * Vector<T>{};
#endif
}

#if !defined(__AVX512F__)
// The two in one.
template <class T>
inline Vector<T> masked_noting(Vector<T>& check, Vector<T> gradient, Mask<T> keep) {
  check = spoiled(check, gradient);
  return masked(gradient, keep);
}
#endif

// Memory for what a kernel computes on the way, not written yet. Large ones come from the kept blocks (memory.h): their pages are
// there already.
inline std::shared_ptr<double[]> scratch(int64_t count) {
  constexpr int64_t kLarge = 32768;
  if (count < kLarge) return std::shared_ptr<double[]>(new double[count]);
  auto block = std::make_shared<Block>(count * sizeof(double));
  return {block, static_cast<double*>(block->data())};
}

inline bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % uintptr_t(bytes) == 0; }

// Where two vectors are best stored together.
#if defined(__AVX2__)
template <class S>
constexpr bool kStoresBoth = std::is_same_v<S, bfloat16>;
#else
template <class S>
constexpr bool kStoresBoth = false;
template <bool Past>
bool store_both(bfloat16*, Vector<float>, Vector<float>);
#endif

// Puts step(i, extent) into out[i] and what follows it, for [begin, end). Steps are copied and hold what they need by value: what
// a reference refers to would be loaded again after every store.
template <bool Past, class S, class Step>
inline void fill_run(S* out, int64_t begin, int64_t end, Step step) {
  constexpr int64_t kWidth = Vector<Real<S>>::kWidth;
  const auto put = [=](int64_t i, Vector<Real<S>> vector) __attribute__((always_inline)) {
    if constexpr (Past) stream(out + i, vector);
    else store(out + i, vector, Whole{});
  };
  int64_t i = begin;
  if constexpr (kStoresBoth<S>)
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      const auto first = step(i, Whole{}), second = step(i + kWidth, Whole{});
      if (!store_both<Past>(out + i, first, second)) put(i, first), put(i + kWidth, second);
    }
  for (; i + kWidth <= end; i += kWidth) put(i, step(i, Whole{}));
  if (i < end) store(out + i, step(i, Part{end - i}), Part{end - i});
}

// `size` parameters, those of the channels over and over, the first one that of channel `first`.
template <class T>
LineVector<T> spread(const T* parameters, int64_t channels, int64_t size, int64_t first = 0) {
  LineVector<T> wide(size);
  int64_t done = std::min(channels - first, size);
  std::copy_n(parameters + first, done, wide.data());
  const int64_t others = std::clamp<int64_t>(size - done, 0, first);
  std::copy_n(parameters, others, wide.data() + done);
  for (done += others; done < size;) {  // whole channels so far
    const int64_t more = std::min(done, size - done);
    std::copy_n(wide.data(), more, wide.data() + done);
    done += more;
  }
  return wide;
}

// The same for `Rows` runs of `length` elements next to each other; the first begins at out[begin]. Parameters are loaded
// once for all of them: step(i, at(p), extent) for the element at place p of a run. Several vectors of a run are taken together
// because stores to the same line should follow each other.
template <bool Past, int Rows, class S, class At, class Step>
inline void fill_rows(S* out, int64_t begin, int64_t length, At at, Step step) {
  constexpr int64_t kWidth = Vector<Real<S>>::kWidth;
  const auto vectors = [=]<int Vectors>(int64_t p) __attribute__((always_inline)) {
    decltype(at(p)) parameters[Vectors];
    for (int v = 0; v < Vectors; ++v) parameters[v] = at(p + v * kWidth);
#pragma GCC unroll 8
    for (int64_t row = 0; row < Rows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        const int64_t i = begin + row * length + p + v * kWidth;
        const auto vector = step(i, parameters[v], Whole{});
        if constexpr (kStoresBoth<S> && Vectors > 1) {
          const auto next = step(i + kWidth, parameters[++v], Whole{});
          if (store_both<Past>(out + i, vector, next)) continue;
          store(out + i + kWidth, next, Whole{});
        }
        if constexpr (Past) stream(out + i, vector);
        else store(out + i, vector, Whole{});
      }
  };
  int64_t p = 0;
  if constexpr (kWidth * sizeof(Real<S>) == 64) {  // that has registers for so many
    for (; p + 4 * kWidth <= length; p += 4 * kWidth) vectors.template operator()<4>(p);
    for (; p + 2 * kWidth <= length; p += 2 * kWidth) vectors.template operator()<2>(p);
  }
  for (; p + kWidth <= length; p += kWidth) vectors.template operator()<1>(p);
  if (p == length) return;
  const auto parameters = at(p);
  for (int64_t row = 0; row < Rows; ++row) {
    const int64_t i = begin + row * length + p;
    store(out + i, step(i, parameters, Part{length - p}), Part{length - p});
  }
}

// Parameters of channels laid out for a run, or where they are if nothing needs to be laid out.
template <class T>
struct Spread {
  LineVector<T> own;
  const T* data = nullptr;
};

// Whether runs share loaded parameters even where memory counts: where there are registers for several vectors of them.
template <class S>
constexpr bool kAlwaysTogether = kStoresBoth<S> && Vector<float>::kWidth == 16;

// How a loop goes over a result whose elements belong to channels in turn (one for the whole tensor). Runs follow each other
// without gaps, and all begin with the same channel, so that parameters laid out once fit every run: `head` elements, then runs
// of `length`. Where a result goes past the cache the head is what lies before the first aligned vector.
struct Runs {
  static constexpr int kTogether = 4;  // runs that share loaded parameters

  int64_t size, channels, head = 0, length;
  bool past, together;
  Order order = Order::forwards;

  // `in_place`: the result takes the place of an operand, which is in the cache then. `unit`: runs begin at multiples of it.
  template <class S>
  Runs(const S* out, int64_t size, int64_t channels, bool in_place, int64_t unit = 1) : size(size), channels(channels) {
    // What is stored past the cache at a time, in bytes; of rows that take turns whole lines, or each would go half empty.
    constexpr int64_t kVector = kAlwaysTogether<S> ? kLine : Vector<Real<S>>::kWidth * int64_t{sizeof(S)};
    constexpr int64_t kVectors = kAlwaysTogether<S> ? 32 : 16, kLong = 4096;
    past = kMayGoPast<S> && !in_place && size * int64_t{sizeof(S)} >= too_large_for_the_cache() && aligned(out, sizeof(S));
    // Beyond a core's own cache memory is read and written fastest in one go, and then parameters do not matter; but they are
    // several times as many bytes as 16-bit elements.
    together = channels > 1 && (kAlwaysTogether<S> || size * int64_t{sizeof(S)} < int64_t{2} << 20);
    length = channels == 1 ? kTask : std::lcm(channels, kVectors);
    // So many parameters are slower than odd rows.
    if (channels > 1 && length > kLong && length > channels && unit == 1) past = false, length = channels;
    if (const int64_t few = together ? 128 : 512; channels > 1 && length < few) length *= few / length;
    if (past) head = -(reinterpret_cast<uintptr_t>(out) / sizeof(S)) % (kVector / sizeof(S));
    if (head % unit != 0) past = false, head = 0;
  }

  // Parameters for a run, with room for a whole vector after them.
  template <class T>
  Spread<T> spread(const T* parameters) const {
    if (length == channels && length % Vector<T>::kWidth == 0 && head % channels == 0 && aligned(parameters, kLine))
      return {{}, parameters};
    const int64_t places = std::min(length, size) + head + kLine / int64_t{sizeof(T)};
    Spread<T> spread{exactqat::spread(parameters, channels, places, head % channels), nullptr};
    spread.data = spread.own.data();
    return spread;
  }

  // Puts step(i, at(p), extent) into out[i] and what follows it, where at(p) are the parameters of the vector at place p.
  template <class S, class At, class Step>
  void fill(S* out, At at, Step step) const {
    const auto alone = [=]<bool Past>(int64_t begin, int64_t count, int64_t place) {
      fill_run<Past>(out, begin, begin + count, [=](int64_t i, auto extent) __attribute__((always_inline)) {
        return step(i, at(i - begin + place), extent);
      });
    };
    // Of a small tensor what follows would take longer than its elements.
    if (!past && size <= length) return alone.template operator()<false>(0, size, 0);
    if (head > 0) alone.template operator()<false>(0, head, (channels - head % channels) % channels);
    const int64_t runs = (size - head) / length, rest = (size - head) % length;
    const int64_t fitting = std::max<int64_t>(1, kTask / length);
    const int64_t runs_per_task = fitting < kTogether ? fitting : fitting / kTogether * kTogether;
    parallel_for((runs + (rest != 0) + runs_per_task - 1) / runs_per_task, size, [&](int64_t task) {
      const int64_t end = std::min(runs, (task + 1) * runs_per_task);
      const auto rows = [&]<bool Past>() {
        int64_t run = task * runs_per_task;
        if constexpr ((!Past || kAlwaysTogether<S>) && !std::is_same_v<decltype(at(0)), std::nullptr_t>)
          for (; together && run + kTogether <= end; run += kTogether)
            fill_rows<Past, kTogether>(out, head + run * length, length, at, step);
        for (; run < end; ++run) alone.template operator()<Past>(head + run * length, length, 0);
        if (rest != 0 && task == runs / runs_per_task) alone.template operator()<Past>(head + runs * length, rest, 0);
      };
      if constexpr (kMayGoPast<S>)
        if (past) return rows.template operator()<true>(), finish_streaming();
      rows.template operator()<false>();
    }, order);
  }

  // The same for one range: step(i, extent).
  template <class S, class Step>
  void fill(S* out, Step step) const {
    fill(out, [](int64_t) { return nullptr; }, [step](int64_t i, std::nullptr_t, auto extent) __attribute__((always_inline)) {
      return step(i, extent);
    });
  }
};

}  // namespace exactqat
