// SPDX-License-Identifier: Apache-2.0
// One vector register, for the few loops that a compiler does not keep in registers by itself. `load` and `store` take a
// number of elements for the end of a row; the lanes beyond it are zero and are not written.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace exactqat {

template <class T>
struct Vector;

#if defined(__AVX512F__)

template <>
struct Vector<float> {
  static constexpr int64_t kWidth = 16;
  __m512 v = _mm512_setzero_ps();
  static Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vector load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
  static Vector all(float value) { return {_mm512_set1_ps(value)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), v); }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
};

template <>
struct Vector<double> {
  static constexpr int64_t kWidth = 8;
  __m512d v = _mm512_setzero_pd();
  static Vector load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static Vector load(const double* p, int64_t n) { return {_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p)}; }
  // maskz with all lanes: GCC 12 warns about the plain conversion's own header.
  static Vector load(const float* p) { return {_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(p))}; }
  static Vector load(const float* p, int64_t n) {
    return {_mm512_maskz_cvtps_pd(0xff, _mm256_maskz_loadu_ps(__mmask8((1u << n) - 1), p))};
  }
  static Vector all(double value) { return {_mm512_set1_pd(value)}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  void store(double* p, int64_t n) const { _mm512_mask_storeu_pd(p, __mmask8((1u << n) - 1), v); }
  __m256 rounded() const { return _mm512_maskz_cvtpd_ps(0xff, v); }
  void store(float* p) const { _mm256_storeu_ps(p, rounded()); }
  void store(float* p, int64_t n) const { _mm256_mask_storeu_ps(p, __mmask8((1u << n) - 1), rounded()); }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {_mm512_add_pd(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm512_sub_pd(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm512_mul_pd(a.v, b.v)}; }
};

#elif defined(__AVX2__)

inline __m256i lanes_below(int64_t n, __m256i lanes) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), lanes); }

template <>
struct Vector<float> {
  static constexpr int64_t kWidth = 8;
  __m256 v = _mm256_setzero_ps();
  static __m256i mask(int64_t n) { return lanes_below(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
  static Vector load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vector load(const float* p, int64_t n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static Vector all(float value) { return {_mm256_set1_ps(value)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { _mm256_maskstore_ps(p, mask(n), v); }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
};

template <>
struct Vector<double> {
  static constexpr int64_t kWidth = 4;
  __m256d v = _mm256_setzero_pd();
  static __m256i mask(int64_t n) { return lanes_below(n, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)); }
  static Vector load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static Vector load(const double* p, int64_t n) { return {_mm256_maskload_pd(p, mask(n))}; }
  static Vector load(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
  static Vector load(const float* p, int64_t n) {
    return {_mm256_cvtps_pd(_mm_maskload_ps(p, _mm_cmpgt_epi32(_mm_set1_epi32(int(n)), _mm_setr_epi32(0, 1, 2, 3))))};
  }
  static Vector all(double value) { return {_mm256_set1_pd(value)}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  void store(double* p, int64_t n) const { _mm256_maskstore_pd(p, mask(n), v); }
  __m128 rounded() const { return _mm256_cvtpd_ps(v); }
  void store(float* p) const { _mm_storeu_ps(p, rounded()); }
  void store(float* p, int64_t n) const {
    _mm_maskstore_ps(p, _mm_cmpgt_epi32(_mm_set1_epi32(int(n)), _mm_setr_epi32(0, 1, 2, 3)), rounded());
  }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {_mm256_add_pd(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm256_sub_pd(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm256_mul_pd(a.v, b.v)}; }
};

#else

template <class T>
struct Vector {
  static constexpr int64_t kWidth = 16 / sizeof(T);
  T v[kWidth] = {};
  static Vector load(const T* p) {
    Vector r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  template <class From>
  static Vector load(const From* p, int64_t n = kWidth) {
    Vector r;
    for (int64_t k = 0; k < n; ++k) r.v[k] = T(p[k]);
    return r;
  }
  static Vector all(T value) {
    Vector r;
    for (int64_t k = 0; k < kWidth; ++k) r.v[k] = value;
    return r;
  }
  template <class To>
  void store(To* p, int64_t n = kWidth) const {
    for (int64_t k = 0; k < n; ++k) p[k] = To(v[k]);
  }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) {
    Vector r;
    for (int64_t k = 0; k < kWidth; ++k) r.v[k] = std::fma(a.v[k], b.v[k], c.v[k]);
    return r;
  }
  friend Vector operator+(Vector a, Vector b) {
    for (int64_t k = 0; k < kWidth; ++k) a.v[k] += b.v[k];
    return a;
  }
  friend Vector operator-(Vector a, Vector b) {
    for (int64_t k = 0; k < kWidth; ++k) a.v[k] -= b.v[k];
    return a;
  }
  friend Vector operator*(Vector a, Vector b) {
    for (int64_t k = 0; k < kWidth; ++k) a.v[k] *= b.v[k];
    return a;
  }
};

#endif

// Stores past the caches; the address must be that of a whole register.
template <class T>
inline void stream(T* p, Vector<T> vector) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_stream_ps(p, vector.v);
  else _mm512_stream_pd(p, vector.v);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) _mm256_stream_ps(p, vector.v);
  else _mm256_stream_pd(p, vector.v);
#else
  vector.store(p);
#endif
}

// Rounded to float32 on the way.
inline void stream(float* p, Vector<double> vector) {
#if defined(__AVX512F__)
  _mm256_stream_ps(p, vector.rounded());
#elif defined(__AVX2__)
  _mm_stream_ps(p, vector.rounded());
#else
  vector.store(p);
#endif
}

// What was streamed is written before anything that follows.
inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace exactqat
