// SPDX-License-Identifier: Apache-2.0
// One vector register, for the few loops that a compiler does not keep in registers by itself. `load` and `store` take a
// number of elements for the end of a row; the lanes beyond it are zero and are not written.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "flushed.h"

// Compilers for ARM64 define the macro of NEON wherever it is available; the module named after it defines its own.
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <xmmintrin.h>
#elif defined(EXACTQAT_NEON)
#include <arm_neon.h>
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
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {_mm256_add_pd(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm256_sub_pd(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm256_mul_pd(a.v, b.v)}; }
};

#elif defined(EXACTQAT_NEON)

template <>
struct Vector<float> {
  static constexpr int64_t kWidth = 4;
  float32x4_t v = vdupq_n_f32(0);
  static Vector load(const float* p) { return {vld1q_f32(p)}; }
  static Vector load(const float* p, int64_t n) {
    Vector r;
    if (n > 0) r.v = vld1q_lane_f32(p, r.v, 0);
    if (n > 1) r.v = vld1q_lane_f32(p + 1, r.v, 1);
    if (n > 2) r.v = vld1q_lane_f32(p + 2, r.v, 2);
    if (n > 3) r.v = vld1q_lane_f32(p + 3, r.v, 3);
    return r;
  }
  static Vector all(float value) { return {vdupq_n_f32(value)}; }
  void store(float* p) const { vst1q_f32(p, v); }
  void store(float* p, int64_t n) const {
    if (n > 0) vst1q_lane_f32(p, v, 0);
    if (n > 1) vst1q_lane_f32(p + 1, v, 1);
    if (n > 2) vst1q_lane_f32(p + 2, v, 2);
    if (n > 3) vst1q_lane_f32(p + 3, v, 3);
  }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {vaddq_f32(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {vsubq_f32(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {vmulq_f32(a.v, b.v)}; }
};

template <>
struct Vector<double> {
  static constexpr int64_t kWidth = 2;
  float64x2_t v = vdupq_n_f64(0);
  static Vector load(const double* p) { return {vld1q_f64(p)}; }
  static Vector load(const double* p, int64_t n) {
    Vector r;
    if (n > 0) r.v = vld1q_lane_f64(p, r.v, 0);
    if (n > 1) r.v = vld1q_lane_f64(p + 1, r.v, 1);
    return r;
  }
  static Vector load(const float* p) { return {vcvt_f64_f32(vld1_f32(p))}; }
  static Vector load(const float* p, int64_t n) {
    float32x2_t r = vdup_n_f32(0);
    if (n > 0) r = vld1_lane_f32(p, r, 0);
    if (n > 1) r = vld1_lane_f32(p + 1, r, 1);
    return {vcvt_f64_f32(r)};
  }
  static Vector all(double value) { return {vdupq_n_f64(value)}; }
  void store(double* p) const { vst1q_f64(p, v); }
  void store(double* p, int64_t n) const {
    if (n > 0) vst1q_lane_f64(p, v, 0);
    if (n > 1) vst1q_lane_f64(p + 1, v, 1);
  }
  static Vector fused_multiply_add(Vector a, Vector b, Vector c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
  friend Vector operator+(Vector a, Vector b) { return {vaddq_f64(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {vsubq_f64(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {vmulq_f64(a.v, b.v)}; }
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
    for (int64_t k = 0; k < n; ++k) p[k] = flushed_to<To>(v[k]);
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

// Results as x86 flushes them (flushed.h), where others come to no good.
#if defined(EXACTQAT_NEON)

// The same result 64 binary orders higher tells whether it rounds up to the smallest normal number.
inline Vector<float> flushed_by(Vector<float> up, Vector<float> result) {
  const uint32x4_t smallest = vceqq_f32(vabsq_f32(up.v), vdupq_n_f32(kSmallest<float> * kUp<float>));
  const uint32x4_t bits = vandq_u32(smallest, vreinterpretq_u32_f32(vdupq_n_f32(kSmallest<float>)));
  return {vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(result.v), bits))};
}
inline Vector<double> flushed_by(Vector<double> up, Vector<double> result) {
  const uint64x2_t smallest = vceqq_f64(vabsq_f64(up.v), vdupq_n_f64(kSmallest<double> * kUp<double>));
  const uint64x2_t bits = vandq_u64(smallest, vreinterpretq_u64_f64(vdupq_n_f64(kSmallest<double>)));
  return {vreinterpretq_f64_u64(vorrq_u64(vreinterpretq_u64_f64(result.v), bits))};
}

template <class T>
inline Vector<T> flushed_product(Vector<T> a, Vector<T> b) {
  return flushed_by(a * Vector<T>::all(kUp<T>) * b, a * b);
}
template <class T>
inline Vector<T> flushed_fused_multiply_add(Vector<T> a, Vector<T> b, Vector<T> c) {
  const Vector<T> up = Vector<T>::all(kUp<T>);
  return flushed_by(Vector<T>::fused_multiply_add(a * up, b, c * up), Vector<T>::fused_multiply_add(a, b, c));
}

#else

template <class T>
inline Vector<T> flushed_product(Vector<T> a, Vector<T> b) {
#if defined(__aarch64__)
  for (int64_t k = 0; k < Vector<T>::kWidth; ++k) a.v[k] = flushed_product(a.v[k], b.v[k]);
  return a;
#else
  return a * b;
#endif
}
template <class T>
inline Vector<T> flushed_fused_multiply_add(Vector<T> a, Vector<T> b, Vector<T> c) {
#if defined(__aarch64__)
  for (int64_t k = 0; k < Vector<T>::kWidth; ++k) a.v[k] = flushed_fused_multiply_add(a.v[k], b.v[k], c.v[k]);
  return a;
#else
  return Vector<T>::fused_multiply_add(a, b, c);
#endif
}

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

// Others see what was streamed only after this.
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace exactqat
