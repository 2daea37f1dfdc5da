// SPDX-License-Identifier: Apache-2.0
// What xla.cpp has for Python to register with JAX.
#pragma once
#include <cstdint>
#include <span>

namespace exactqat {

// Where XLA keeps an array; its dtype is known to whoever compiled the call.
struct HostArray {
  void* data;
  std::span<const int64_t> shape;
};

// A function by its number, which fills the results. It throws what the program is to report.
using HostFunction = void (*)(int64_t number, std::span<const HostArray> operands, std::span<const HostArray> results);

// The handler of calls of kernels.
void* xla_handler();

// The handler of calls of the host, which `function` answers from now on.
void* xla_host_handler(HostFunction function);

}  // namespace exactqat
