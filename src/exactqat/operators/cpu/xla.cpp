// SPDX-License-Identifier: Apache-2.0
// The door for JAX: one XLA FFI handler for all kernels, and one for functions of the host, which work on XLA's own memory.
#include "xla.h"

#include "xla_ffi.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "call.h"

namespace exactqat {
namespace {

using namespace xla_ffi;

Error* error(const CallFrame& frame, ErrorCode code, const std::string& message) {
  ErrorCreateArguments arguments{sizeof arguments, nullptr, message.c_str(), code};
  return frame.api->error_create(&arguments);
}

bool describe(const Buffers& buffers, int64_t i, std::vector<Array>& arrays) {
  if (buffers.types[i] != BufferType::buffer) return false;
  const Buffer& buffer = *static_cast<const Buffer*>(buffers.buffers[i]);
  if (buffer.struct_size < sizeof buffer) return false;
  Array array{buffer.data, DType::float32, {buffer.dims, size_t(buffer.rank)}};
  switch (buffer.dtype) {
    case DataType::f16: array.dtype = DType::float16; break;
    case DataType::bf16: array.dtype = DType::bfloat16; break;
    case DataType::f32: array.dtype = DType::float32; break;
    case DataType::f64: array.dtype = DType::float64; break;
    case DataType::u8: array.dtype = DType::uint8; break;
    default: return false;
  }
  arrays.push_back(array);
  return true;
}

std::string_view text(const ByteSpan& span) { return {span.ptr, span.len}; }

// The value of a string among the attributes; null if there is none of that name.
const ByteSpan* find_text(const Attributes& attributes, std::string_view name) {
  for (int64_t i = 0; i < attributes.size; ++i)
    if (attributes.types[i] == AttributeType::string && text(*attributes.names[i]) == name)
      return static_cast<const ByteSpan*>(attributes.attributes[i]);
  return nullptr;
}

template <class T>
T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void read_numbers(const Attributes& attributes, Numbers& numbers) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    if (attributes.types[i] != AttributeType::scalar) continue;
    const Scalar& scalar = *static_cast<const Scalar*>(attributes.attributes[i]);
    const std::string_view name = text(*attributes.names[i]);
    if (scalar.dtype == DataType::s64) numbers.entries.emplace_back(name, read<int64_t>(scalar.value));
    else if (scalar.dtype == DataType::f64) numbers.entries.emplace_back(name, read<double>(scalar.value));
  }
}

// Numbers that JAX did not know when it compiled, as those made of symbolic sizes: `names`, separated by commas, are those of the
// last operands, which are integers.
bool read_late(std::string_view names, const Buffers& operands, int64_t first, Numbers& numbers) {
  for (int64_t i = first; i < operands.size; ++i) {
    const size_t end = std::min(names.find(','), names.size());
    if (operands.types[i] != BufferType::buffer) return false;
    const Buffer& buffer = *static_cast<const Buffer*>(operands.buffers[i]);
    if (buffer.struct_size < sizeof buffer) return false;
    for (int64_t k = 0; k < buffer.rank; ++k)
      if (buffer.dims[k] != 1) return false;
    if (buffer.dtype == DataType::s64) numbers.entries.emplace_back(names.substr(0, end), read<int64_t>(buffer.data));
    else if (buffer.dtype == DataType::s32)
      numbers.entries.emplace_back(names.substr(0, end), int64_t{read<int32_t>(buffer.data)});
    else return false;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return true;
}

Error* run(const CallFrame& frame) {
  Numbers numbers;
  const auto wrong = [&](const std::string& message) { return error(frame, ErrorCode::invalid_argument, message); };
  int64_t given = frame.operands.size;
  if (const ByteSpan* late = find_text(frame.attributes, "late")) {
    const std::string_view names = text(*late);
    given -= 1 + std::count(names.begin(), names.end(), ',');
    if (given < 0 || !read_late(names, frame.operands, given, numbers)) return wrong("late numbers must be integers");
  }
  std::vector<Array> arrays;
  for (int64_t i = 0; i < given; ++i)
    if (!describe(frame.operands, i, arrays)) return wrong("an operand no kernel takes");
  for (int64_t i = 0; i < frame.results.size; ++i)
    if (!describe(frame.results, i, arrays)) return wrong("a result no kernel makes");
  const ByteSpan* kernel = find_text(frame.attributes, "kernel");
  if (kernel == nullptr) return wrong("no kernel is named");
  read_numbers(frame.attributes, numbers);
  const std::span<const Array> all(arrays);
  find_kernel(text(*kernel))(Call{all.first(size_t(given)), all.subspan(size_t(given)), numbers});
  return nullptr;
}

HostFunction host_function = nullptr;

bool describe_for_host(const Buffers& buffers, std::vector<HostArray>& arrays) {
  for (int64_t i = 0; i < buffers.size; ++i) {
    if (buffers.types[i] != BufferType::buffer) return false;
    const Buffer& buffer = *static_cast<const Buffer*>(buffers.buffers[i]);
    if (buffer.struct_size < sizeof buffer) return false;
    arrays.push_back({buffer.data, {buffer.dims, size_t(buffer.rank)}});
  }
  return true;
}

Error* run_on_host(const CallFrame& frame) {
  Numbers numbers;
  read_numbers(frame.attributes, numbers);
  std::vector<HostArray> operands, results;
  if (host_function == nullptr || !numbers.has("function") || !describe_for_host(frame.operands, operands) ||
      !describe_for_host(frame.results, results))
    return error(frame, ErrorCode::invalid_argument, "a call of the host needs a function and arrays");
  host_function(numbers.integer("function"), operands, results);
  return nullptr;
}

// When a handler is registered the runtime asks for which version it was written: for all whose structs are those declared here.
// So the answer is the runtime's own version, as long as nothing but an addition can have happened since. The runtimes that do
// not say which they are, those of JAX before 0.8, are of version 0.1 and refuse all others.
Error* describe_handler(const CallFrame& frame, Metadata& metadata) {
  const bool says = frame.api != nullptr && frame.api->api_version.major_version == kMajor;
  const int minor = says ? frame.api->api_version.minor_version : kOldestMinor;
  metadata.api_version = {sizeof metadata.api_version, nullptr, kMajor, minor};
  metadata.traits = 0;
  if (minor >= 2) metadata.state_type_id = 0;  // there is no state
  return nullptr;
}

bool is_known(const CallFrame& frame) {
  // The three lie inside the frame, so they may not even grow.
  return frame.struct_size >= sizeof frame && frame.operands.struct_size == sizeof frame.operands &&
         frame.results.struct_size == sizeof frame.results && frame.attributes.struct_size == sizeof frame.attributes;
}

template <Error* (*execute)(const CallFrame&)>
Error* handle(CallFrame* frame) {
  for (Extension* extension = frame->extension_start; extension != nullptr; extension = extension->next)
    if (extension->type == ExtensionType::metadata)
      return describe_handler(*frame, *reinterpret_cast<MetadataExtension*>(extension)->metadata);
  try {
    if (!is_known(*frame))
      return error(*frame, ErrorCode::invalid_argument, "this XLA calls functions in a way that this exactqat does not know");
    if (frame->stage != Stage::execute) return error(*frame, ErrorCode::invalid_argument, "kernels are only to be executed");
    return execute(*frame);
  } catch (const std::invalid_argument& failure) {
    return error(*frame, ErrorCode::invalid_argument, failure.what());
  } catch (const std::exception& failure) {
    return error(*frame, ErrorCode::internal, failure.what());
  }
}

}  // namespace

void* xla_handler() { return reinterpret_cast<void*>(handle<run>); }

void* xla_host_handler(HostFunction function) {
  host_function = function;
  return reinterpret_cast<void*>(handle<run_on_host>);
}

}  // namespace exactqat
