// SPDX-License-Identifier: Apache-2.0
// The part of XLA's C interface for foreign functions that one handler on a CPU needs, declared here so that neither the build
// nor the built modules need jaxlib. Its layout is the same in versions 0.1 to 0.3, those of JAX 0.5 to 0.10: tests/operators/test_xla.py
// compares it, field by field, with the header of the jaxlib that is installed. Every struct begins with its size as its
// maker knows it; later versions may append to one, and then that number grows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace exactqat::xla_ffi {

constexpr int kMajor = 0, kOldestMinor = 1;

enum class ExtensionType : int { metadata = 1 };

struct Extension {
  size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

struct Metadata {
  size_t struct_size;
  Version api_version;
  uint32_t traits;
  int64_t state_type_id;  // since version 0.2, though its struct_size does not count it
};

struct MetadataExtension {
  Extension extension_base;
  Metadata* metadata;
};

enum class ErrorCode : int { invalid_argument = 3, internal = 13 };

struct Error;  // the runtime's

struct ErrorCreateArguments {
  size_t struct_size;
  Extension* extension_start;
  const char* message;
  ErrorCode errc;
};

// It goes on with functions for handlers of other kinds.
struct Api {
  size_t struct_size;
  Extension* extension_start;
  Version api_version;
  const void* internal_api;
  Error* (*error_create)(ErrorCreateArguments*);
};

enum class DataType : int { s32 = 4, s64 = 5, u8 = 6, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };

struct Buffer {
  size_t struct_size;
  Extension* extension_start;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct ByteSpan {
  const char* ptr;
  size_t len;
};

struct Scalar {
  DataType dtype;
  void* value;
};

enum class BufferType : int { buffer = 1 };  // of operands and of results
enum class AttributeType : int { array = 1, dictionary = 2, scalar = 3, string = 4 };
enum class Stage : int { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

struct Buffers {  // operands or results
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  BufferType* types;
  void** buffers;
};

struct Attributes {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** attributes;
};

// It goes on with what asynchronous handlers need.
struct CallFrame {
  size_t struct_size;
  Extension* extension_start;
  const Api* api;
  void* context;
  Stage stage;
  Buffers operands;
  Buffers results;
  Attributes attributes;
};

}  // namespace exactqat::xla_ffi
