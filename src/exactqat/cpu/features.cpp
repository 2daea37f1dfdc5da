// SPDX-License-Identifier: Apache-2.0
// Compiled for the baseline: the one module that may be loaded before the processor is known.
#include <nanobind/nanobind.h>

NB_MODULE(_features, module) {
  module.def("instruction_sets", [] {
    nanobind::list best_first;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
      best_first.append("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) best_first.append("avx2");
#elif defined(__aarch64__)
    best_first.append("neon");  // there is none without
#endif
    best_first.append("baseline");
    return best_first;
  });
}
