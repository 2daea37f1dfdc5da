// SPDX-License-Identifier: Apache-2.0
// The door for JAX: one XLA FFI handler for all kernels. Built only where XLA's headers were found.
#if defined(EXACTQAT_XLA)
#include <algorithm>

#include "call.h"
#include "xla/ffi/api/ffi.h"

namespace exactqat {
namespace ffi = xla::ffi;
namespace {

bool describe(const ffi::AnyBuffer& buffer, std::vector<Array>& arrays) {
  const auto shape = buffer.dimensions();
  Array array{buffer.untyped_data(), DType::float32, {shape.begin(), shape.size()}};
  switch (buffer.element_type()) {
    case ffi::F16: array.dtype = DType::float16; break;
    case ffi::BF16: array.dtype = DType::bfloat16; break;
    case ffi::F32: array.dtype = DType::float32; break;
    case ffi::F64: array.dtype = DType::float64; break;
    case ffi::U8: array.dtype = DType::uint8; break;
    default: return false;
  }
  arrays.push_back(std::move(array));
  return true;
}

// Numbers that JAX did not know when it compiled, as those made of symbolic sizes: `names`, separated by commas, are those of the
// last operands, which are integers.
bool read_late(std::string_view names, const ffi::RemainingArgs& operands, size_t first, Numbers& numbers) {
  for (size_t i = first; i < operands.size(); ++i) {
    const size_t end = std::min(names.find(','), names.size());
    auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || buffer->element_count() != 1) return false;
    const void* data = buffer->untyped_data();
    if (buffer->element_type() == ffi::S64) numbers.entries.emplace_back(names.substr(0, end), *static_cast<const int64_t*>(data));
    else if (buffer->element_type() == ffi::S32)
      numbers.entries.emplace_back(names.substr(0, end), int64_t{*static_cast<const int32_t*>(data)});
    else return false;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return true;
}

ffi::Error run(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  try {
    Numbers numbers;
    size_t given = operands.size();
    if (attributes.contains("late")) {
      const std::string_view names = *attributes.get<std::string_view>("late");
      const size_t late = 1 + static_cast<size_t>(std::count(names.begin(), names.end(), ','));
      if (late > given || !read_late(names, operands, given - late, numbers))
        return ffi::Error::InvalidArgument("late numbers must be integers");
      given -= late;
    }
    std::vector<Array> arrays;
    for (size_t i = 0; i < given; ++i) {
      auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value() || !describe(*buffer, arrays)) return ffi::Error::InvalidArgument("an operand no kernel takes");
    }
    const size_t count = arrays.size();
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value() || !describe(**buffer, arrays)) return ffi::Error::InvalidArgument("a result no kernel makes");
    }
    auto kernel = attributes.get<std::string_view>("kernel");
    if (!kernel.has_value()) return ffi::Error::InvalidArgument("no kernel is named");
    for (auto it = attributes.begin(); it != attributes.end(); ++it) {
      const std::string_view name = *it;
      if (attributes.isa<int64_t>(it)) numbers.entries.emplace_back(name, *attributes.get<int64_t>(name));
      else if (attributes.isa<double>(it)) numbers.entries.emplace_back(name, *attributes.get<double>(name));
    }
    const std::span<const Array> all(arrays);
    find_kernel(*kernel)(Call{all.first(count), all.subspan(count), numbers});
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ExactqatHandler, run, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

void* xla_handler() { return reinterpret_cast<void*>(ExactqatHandler); }

}  // namespace exactqat
#endif
