// SPDX-License-Identifier: Apache-2.0
// The one calling convention of every CPU kernel.
#pragma once
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace exactqat {

// Numbers of the four float dtypes; uint8 is for packed bits, the signed integers are for the codes of devices.
enum class DType : uint8_t { float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::uint8:
    case DType::int8: return 1;
    default: return 2;
  }
}

// The dtype of a name; throws for one that no kernel takes.
DType dtype_of(std::string_view name);

struct Array {
  void* data;
  DType dtype;
  std::span<const int64_t> shape;  // kept by whoever makes the call

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t size() const {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
  }
};

// The numbers a declaration hands to its kernel, by name.
struct Numbers {
  std::vector<std::pair<std::string, std::variant<int64_t, double>>> entries;

  bool has(std::string_view name) const {
    for (const auto& [key, value] : entries)
      if (key == name) return true;
    return false;
  }
  int64_t integer(std::string_view name) const { return std::get<int64_t>(find(name)); }
  double real(std::string_view name) const { return std::get<double>(find(name)); }
  void set(std::string_view name, int64_t value) {
    for (auto& [key, number] : entries)
      if (key == name) number = value;
  }

 private:
  const std::variant<int64_t, double>& find(std::string_view name) const {
    for (const auto& [key, value] : entries)
      if (key == name) return value;
    throw std::out_of_range("the kernel was not given the number " + std::string(name));
  }
};

// Operands and results are dense, row-major and checked by the declaration; results are allocated by the caller and
// written in full. A kernel may read an operand that is also a result only element by element.
struct Call {
  std::span<const Array> operands;
  std::span<const Array> results;
  const Numbers& numbers;
};

using Kernel = void (*)(const Call&);

Kernel find_kernel(std::string_view name);
std::vector<std::string> kernel_names();
bool add_kernel(std::string_view name, Kernel kernel);

// Runs a float32 kernel on a call some of whose arrays have 16 bits: they are widened before it and rounded after it.
void run_widened(const Call& call, Kernel kernel);

// The same, a few images at a time, for a kernel whose first result is made image by image from operand `images`: both have the
// batch first, and the kernel knows it as the number "batch".
void run_widened_images(const Call& call, Kernel kernel, size_t images);

// Elements [begin, begin + count) of a tensor of 16 bits as float32; and float32 numbers rounded to them, past the cache if asked,
// which others see after finish_streaming (simd.h).
void widen(const void* from, DType dtype, int64_t begin, int64_t count, float* to);
void round_into(void* to, DType dtype, int64_t begin, int64_t count, const float* from, bool past);

// Whether some array of the call has 16 bits.
bool has_halves(const Call& call);

}  // namespace exactqat

// Defines a kernel that reads and writes tensors of each dtype as they are, as a template over the dtype S in which the first
// result is stored and the real type T that it is computed in:
//   EXACTQAT_STORAGE_KERNEL(name) { ... call.operands, call.results, call.numbers, S, T ... }
// Without vectors in the source 16 bits are not worth loops of their own: those that there are for float32 serve.
#if defined(__AVX2__) || defined(EXACTQAT_NEON)
#define EXACTQAT_RUN_STORED_IN(half, name) name##_of<half, float>(call)
#else
#define EXACTQAT_RUN_STORED_IN(half, name) ::exactqat::run_widened(call, name##_of<float, float>)
#endif

#define EXACTQAT_STORAGE_KERNEL(name)                                                                              \
  template <class S, class T>                                                                                      \
  static void name##_of(const ::exactqat::Call& call);                                                             \
  static const bool name##_is_in_the_table = ::exactqat::add_kernel(#name, [](const ::exactqat::Call& call) {      \
    switch (call.results[0].dtype) {                                                                               \
      case ::exactqat::DType::float16: return EXACTQAT_RUN_STORED_IN(::exactqat::float16, name);                   \
      case ::exactqat::DType::bfloat16: return EXACTQAT_RUN_STORED_IN(::exactqat::bfloat16, name);                 \
      case ::exactqat::DType::float64: return name##_of<double, double>(call);                                     \
      default: return name##_of<float, float>(call);                                                               \
    }                                                                                                              \
  });                                                                                                              \
  template <class S, class T>                                                                                      \
  static void name##_of(const ::exactqat::Call& call)

#define EXACTQAT_KERNEL_IN(name, run_halves)                                        \
  template <class T>                                                                \
  static void name##_of(const ::exactqat::Call& call);                              \
  static const bool name##_is_in_the_table =                                        \
      ::exactqat::add_kernel(#name, [](const ::exactqat::Call& call) {              \
        constexpr ::exactqat::Kernel kernel = name##_of<float>;                     \
        if (::exactqat::has_halves(call)) run_halves;                               \
        else if (call.results[0].dtype == ::exactqat::DType::float32) kernel(call); \
        else name##_of<double>(call);                                               \
      });                                                                           \
  template <class T>                                                                \
  static void name##_of(const ::exactqat::Call& call)

// Defines a kernel for every dtype as a template over the real type T, and enters it in this module's table:
//   EXACTQAT_KERNEL(name) { ... call.operands, call.results, call.numbers, T ... }
#define EXACTQAT_KERNEL(name) EXACTQAT_KERNEL_IN(name, ::exactqat::run_widened(call, kernel))

// The same for a result made image by image from operand `images` (see run_widened_images).
#define EXACTQAT_IMAGES_KERNEL(name, images) EXACTQAT_KERNEL_IN(name, ::exactqat::run_widened_images(call, kernel, images))

// The same for one that takes tensors of 16 bits as they are where T is float (tensor.h).
#define EXACTQAT_TENSOR_KERNEL(name) EXACTQAT_KERNEL_IN(name, kernel(call))
