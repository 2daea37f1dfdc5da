// SPDX-License-Identifier: Apache-2.0
// Compiled for the baseline: the one module that may be loaded before the processor is known.
#include <nanobind/nanobind.h>

#if defined(_MSC_VER) && defined(_M_X64)
#include <intrin.h>

namespace {

// Without __builtin_cpu_supports, which on Windows needs a library of its own compiler's.
struct Processor {
  bool avx2 = false, avx512 = false;

  Processor() {
    int leaf[4], one[4], seven[4], extended[4];
    __cpuid(leaf, 0);
    if (leaf[0] < 7) return;
    __cpuid(one, 1);
    __cpuidex(seven, 7, 0);
    __cpuid(extended, int(0x80000001));
    const auto bit = [](int word, int number) { return (word >> number & 1) != 0; };
    const bool xsave = bit(one[2], 27);
    const auto saved = xsave ? _xgetbv(0) : 0;  // the registers that the system keeps
    // All that MSVC may use with /arch:AVX2: beside AVX2 itself FMA, F16C, BMI1, BMI2 and LZCNT.
    avx2 = (saved & 0x6) == 0x6 && bit(one[2], 12) && bit(one[2], 28) && bit(one[2], 29) && bit(seven[1], 5) &&
           bit(seven[1], 3) && bit(seven[1], 8) && bit(extended[2], 5);
    // AVX-512 F, DQ, CD, BW and VL.
    avx512 = avx2 && (saved & 0xe6) == 0xe6 && bit(seven[1], 16) && bit(seven[1], 17) && bit(seven[1], 28) && bit(seven[1], 30) &&
             bit(seven[1], 31);
  }
};

}  // namespace
#endif

NB_MODULE(_features, module) {
  module.def("instruction_sets", [] {
    nanobind::list best_first;
#if defined(_MSC_VER) && defined(_M_X64)
    const Processor processor;
    if (processor.avx512) best_first.append("avx512");
    if (processor.avx2) best_first.append("avx2");
#elif defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
      best_first.append("avx512");
#if defined(__clang__)
    constexpr bool f16c = true;  // Clang 14 cannot ask for it; no processor has AVX2 without
#else
    const bool f16c = __builtin_cpu_supports("f16c");
#endif
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c) best_first.append("avx2");
#elif defined(__aarch64__)
    best_first.append("neon");  // there is none without
#endif
    best_first.append("baseline");
    return best_first;
  });
}
