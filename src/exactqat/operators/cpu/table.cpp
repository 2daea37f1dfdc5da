// SPDX-License-Identifier: Apache-2.0
// The table of kernels of this module. Each kernel file enters its own.
#include <map>

#include "call.h"

namespace exactqat {

static std::map<std::string, Kernel, std::less<>>& table() {
  static std::map<std::string, Kernel, std::less<>> kernels;
  return kernels;
}

bool add_kernel(std::string_view name, Kernel kernel) { return table().emplace(name, kernel).second; }

Kernel find_kernel(std::string_view name) {
  auto found = table().find(name);
  if (found == table().end()) throw std::out_of_range("there is no CPU kernel named " + std::string(name));
  return found->second;
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const auto& [name, kernel] : table()) names.push_back(name);
  return names;
}

}  // namespace exactqat
