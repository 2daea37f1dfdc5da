// SPDX-License-Identifier: Apache-2.0
// Included before every file by Microsoft's own compiler (clang-cl needs none of it): what it has no words for and what is a
// wish only. Inlining is then its own choice, so that kernels are slower than clang-cl's; their results are the same.
#pragma once

#include <intrin.h>

#define __attribute__(attribute)
#define __builtin_expect(value, expected) (value)
// Callers may also say whether they will write, and into which cache.
#define __builtin_prefetch(address, ...) _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0)
#define __restrict__ __restrict

// What it takes for granted, or switches on together with the sets it has a name for.
#define __SSE2__ 1
#if defined(__AVX2__)
#define __FMA__ 1
#define __F16C__ 1
#endif
