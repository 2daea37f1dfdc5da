// SPDX-License-Identifier: Apache-2.0
// Runs a network on LiteRT and compares its answer with the recorded one, byte by byte: on a phone, or on a computer.
// docs/on-a-phone.md says how recorded.h is made and how this is built.

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "recorded.h"

#if __has_include("litert/c/litert_compiled_model.h")
#include "litert/c/litert_compiled_model.h"
#include "litert/c/litert_environment.h"
#include "litert/c/litert_model.h"
#include "litert/c/litert_options.h"
#include "litert/c/litert_tensor_buffer.h"
#else
// The wheel ai-edge-litert contains the library without its headers. This is what is called of it, as of version 2.3.
extern "C" {
using LiteRtStatus = int;
using LiteRtParamIndex = std::size_t;
using LiteRtEnvironment = struct LiteRtEnvironmentT*;
using LiteRtModel = struct LiteRtModelT*;
using LiteRtOptions = struct LiteRtOptionsT*;
using LiteRtCompiledModel = struct LiteRtCompiledModelT*;
using LiteRtSignature = struct LiteRtSignatureT*;
using LiteRtTensor = struct LiteRtTensorT*;
using LiteRtTensorBuffer = struct LiteRtTensorBufferT*;
using LiteRtTensorBufferRequirements = struct LiteRtTensorBufferRequirementsT*;
struct LiteRtLayout {
  int rank_dimensions_and_strides[17];
};
struct LiteRtRankedTensorType {
  int element_type;
  LiteRtLayout layout;
};
enum LiteRtTensorBufferLockMode { kLiteRtTensorBufferLockModeRead = 0, kLiteRtTensorBufferLockModeWrite = 1 };
constexpr LiteRtStatus kLiteRtStatusOk = 0;
constexpr int kLiteRtHwAcceleratorCpu = 1;
LiteRtStatus LiteRtCreateEnvironment(int, const void*, LiteRtEnvironment*);
LiteRtStatus LiteRtCreateModelFromBuffer(LiteRtEnvironment, const void*, std::size_t, LiteRtModel*);
LiteRtStatus LiteRtCreateOptions(LiteRtOptions*);
LiteRtStatus LiteRtSetOptionsHardwareAccelerators(LiteRtOptions, int);
LiteRtStatus LiteRtCreateCompiledModel(LiteRtEnvironment, LiteRtModel, LiteRtOptions, LiteRtCompiledModel*);
LiteRtStatus LiteRtGetModelSignature(LiteRtModel, LiteRtParamIndex, LiteRtSignature*);
LiteRtStatus LiteRtGetSignatureInputTensorByIndex(LiteRtSignature, LiteRtParamIndex, LiteRtTensor*);
LiteRtStatus LiteRtGetSignatureOutputTensorByIndex(LiteRtSignature, LiteRtParamIndex, LiteRtTensor*);
LiteRtStatus LiteRtGetRankedTensorType(LiteRtTensor, LiteRtRankedTensorType*);
LiteRtStatus LiteRtGetCompiledModelInputBufferRequirements(LiteRtCompiledModel, LiteRtParamIndex, LiteRtParamIndex,
                                                           LiteRtTensorBufferRequirements*);
LiteRtStatus LiteRtGetCompiledModelOutputBufferRequirements(LiteRtCompiledModel, LiteRtParamIndex, LiteRtParamIndex,
                                                            LiteRtTensorBufferRequirements*);
LiteRtStatus LiteRtGetCompiledModelInputTensorLayout(LiteRtCompiledModel, LiteRtParamIndex, LiteRtParamIndex,
                                                     LiteRtLayout*);
LiteRtStatus LiteRtGetCompiledModelOutputTensorLayouts(LiteRtCompiledModel, LiteRtParamIndex, std::size_t,
                                                       LiteRtLayout*, bool);
LiteRtStatus LiteRtCreateManagedTensorBufferFromRequirements(LiteRtEnvironment, const LiteRtRankedTensorType*,
                                                             LiteRtTensorBufferRequirements, LiteRtTensorBuffer*);
LiteRtStatus LiteRtGetTensorBufferPackedSize(LiteRtTensorBuffer, std::size_t*);
LiteRtStatus LiteRtLockTensorBuffer(LiteRtTensorBuffer, void**, LiteRtTensorBufferLockMode);
LiteRtStatus LiteRtUnlockTensorBuffer(LiteRtTensorBuffer);
LiteRtStatus LiteRtRunCompiledModel(LiteRtCompiledModel, LiteRtParamIndex, std::size_t, LiteRtTensorBuffer*,
                                    std::size_t, LiteRtTensorBuffer*);
void LiteRtDestroyTensorBuffer(LiteRtTensorBuffer);
void LiteRtDestroyCompiledModel(LiteRtCompiledModel);
void LiteRtDestroyOptions(LiteRtOptions);
void LiteRtDestroyModel(LiteRtModel);
void LiteRtDestroyEnvironment(LiteRtEnvironment);
}
#endif

namespace {

LiteRtEnvironment environment = nullptr;
LiteRtModel model = nullptr;
LiteRtOptions options = nullptr;
LiteRtCompiledModel compiled = nullptr;
LiteRtTensorBuffer input = nullptr, output = nullptr;

// Whether a call went well; what failed is printed.
bool ok(LiteRtStatus status, const char* what) {
  if (status != kLiteRtStatusOk) std::fprintf(stderr, "%s failed with status %d\n", what, static_cast<int>(status));
  return status == kLiteRtStatusOk;
}

// Memory for the only input or the only output, if it has as many bytes as were recorded.
bool allocate(bool is_input, std::size_t bytes, LiteRtTensorBuffer* buffer) {
  LiteRtSignature signature = nullptr;
  LiteRtTensor tensor = nullptr;
  LiteRtRankedTensorType type = {};
  LiteRtTensorBufferRequirements needed = nullptr;
  std::size_t size = 0;
  if (!ok(LiteRtGetModelSignature(model, 0, &signature), "reading the signature") ||
      !ok(is_input ? LiteRtGetSignatureInputTensorByIndex(signature, 0, &tensor)
                   : LiteRtGetSignatureOutputTensorByIndex(signature, 0, &tensor),
          "reading a tensor") ||
      !ok(LiteRtGetRankedTensorType(tensor, &type), "reading a tensor's type") ||
      // The type says that batches have any size; what was prepared takes one example.
      !ok(is_input ? LiteRtGetCompiledModelInputTensorLayout(compiled, 0, 0, &type.layout)
                   : LiteRtGetCompiledModelOutputTensorLayouts(compiled, 0, 1, &type.layout, false),
          "reading a tensor's shape") ||
      !ok(is_input ? LiteRtGetCompiledModelInputBufferRequirements(compiled, 0, 0, &needed)
                   : LiteRtGetCompiledModelOutputBufferRequirements(compiled, 0, 0, &needed),
          "reading what a tensor needs") ||
      !ok(LiteRtCreateManagedTensorBufferFromRequirements(environment, &type, needed, buffer), "allocating") ||
      !ok(LiteRtGetTensorBufferPackedSize(*buffer, &size), "reading a tensor's size"))
    return false;
  if (size != bytes) std::fprintf(stderr, "recorded.h has %zu bytes for a tensor of %zu\n", bytes, size);
  return size == bytes;
}

// 0: equal; 1: the device differs; 2: it could not be run.
int compare() {
  void* memory = nullptr;
  if (!ok(LiteRtCreateEnvironment(0, nullptr, &environment), "starting LiteRT") ||
      !ok(LiteRtCreateModelFromBuffer(environment, recorded_data, sizeof recorded_data, &model), "reading the model") ||
      !ok(LiteRtCreateOptions(&options), "making options") ||
      !ok(LiteRtSetOptionsHardwareAccelerators(options, kLiteRtHwAcceleratorCpu), "choosing the CPU") ||
      !ok(LiteRtCreateCompiledModel(environment, model, options, &compiled), "preparing the model") ||
      !allocate(true, sizeof recorded_recorded_input_0, &input) ||
      !allocate(false, sizeof recorded_recorded_output_0, &output) ||
      !ok(LiteRtLockTensorBuffer(input, &memory, kLiteRtTensorBufferLockModeWrite), "opening the input"))
    return 2;
  std::memcpy(memory, recorded_recorded_input_0, sizeof recorded_recorded_input_0);
  if (!ok(LiteRtUnlockTensorBuffer(input), "closing the input") ||
      !ok(LiteRtRunCompiledModel(compiled, 0, 1, &input, 1, &output), "running the model") ||
      !ok(LiteRtLockTensorBuffer(output, &memory, kLiteRtTensorBufferLockModeRead), "opening the output"))
    return 2;
  const std::size_t count = RECORDED_OUTPUT_0_SIZE, bytes = sizeof recorded_recorded_output_0 / count;
  std::size_t differing = 0;
  for (std::size_t at = 0; at < count; ++at)
    differing += 0 != std::memcmp(static_cast<const char*>(memory) + at * bytes,
                                  reinterpret_cast<const char*>(recorded_recorded_output_0) + at * bytes, bytes);
  if (!ok(LiteRtUnlockTensorBuffer(output), "closing the output")) return 2;
  std::printf("%zu of %zu codes differ from the recorded answer\n", differing, count);
  return differing ? 1 : 0;
}

}  // namespace

int main() {
  static_assert(RECORDED_INPUT_COUNT == 1 && RECORDED_OUTPUT_COUNT == 1, "for networks of one input and one output");
  const int status = compare();
  if (input != nullptr) LiteRtDestroyTensorBuffer(input);
  if (output != nullptr) LiteRtDestroyTensorBuffer(output);
  if (compiled != nullptr) LiteRtDestroyCompiledModel(compiled);
  if (options != nullptr) LiteRtDestroyOptions(options);
  if (model != nullptr) LiteRtDestroyModel(model);
  if (environment != nullptr) LiteRtDestroyEnvironment(environment);
  return status;
}
