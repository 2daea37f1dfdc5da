// SPDX-License-Identifier: Apache-2.0
// Loops over registers, written out at compile time: an array that is indexed by constants alone can live in registers.
#pragma once
#include <type_traits>
#include <utility>

namespace exactqat {

// f(0), f(1), ..., f(N - 1), the numbers being constants.
template <int N, class F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

}  // namespace exactqat
