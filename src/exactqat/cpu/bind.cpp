// SPDX-License-Identifier: Apache-2.0
// The door for NumPy and PyTorch. A Plan holds all that is known of a call but the addresses; running it takes only those.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "call.h"
#include "memory.h"
#include "parallel.h"

namespace nb = nanobind;

namespace exactqat {

#if defined(EXACTQAT_XLA)
void* xla_handler();
#endif

namespace {

struct Plan {
  Kernel kernel;
  std::vector<Array> arrays;
  size_t operands;
  Numbers numbers;
};

Plan make_plan(const std::string& kernel, const std::vector<std::tuple<std::string, std::vector<int64_t>>>& arrays,
               size_t operands, const nb::dict& numbers) {
  Plan plan{find_kernel(kernel), {}, operands, {}};
  if (operands > arrays.size()) throw std::invalid_argument("a plan has no more operands than arrays");
  for (const auto& [dtype, shape] : arrays) {
    plan.arrays.push_back({nullptr, dtype_of(dtype), shape});
  }
  for (auto [key, value] : numbers) {
    if (nb::isinstance<nb::float_>(value))
      plan.numbers.entries.emplace_back(nb::cast<std::string>(key), nb::cast<double>(value));
    else
      plan.numbers.entries.emplace_back(nb::cast<std::string>(key), nb::cast<int64_t>(value));
  }
  return plan;
}

// The memory behind an argument: an address, or an object with the buffer protocol, whose size is then checked.
class Memory {
 public:
  Memory(nb::handle object, const Array& array) {
    if (PyLong_CheckExact(object.ptr())) {
      address_ = reinterpret_cast<void*>(nb::cast<uintptr_t>(object));
      return;
    }
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    held_ = true;
    address_ = view_.buf;
    const int64_t bytes = array.size() * size_of(array.dtype);
    if (view_.len != bytes) {
      PyBuffer_Release(&view_);
      throw std::invalid_argument("an array of " + std::to_string(bytes) + " bytes is needed, got " + std::to_string(view_.len));
    }
  }
  ~Memory() {
    if (held_) PyBuffer_Release(&view_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* address() const { return address_; }

 private:
  Py_buffer view_{};
  void* address_ = nullptr;
  bool held_ = false;
};

void run(const Plan& plan, const nb::args& addresses) {
  if (addresses.size() != plan.arrays.size())
    throw std::invalid_argument("the plan has " + std::to_string(plan.arrays.size()) + " arrays, got " +
                                std::to_string(addresses.size()) + " addresses");
  std::vector<Array> arrays = plan.arrays;
  std::deque<Memory> memory;
  for (size_t i = 0; i < arrays.size(); ++i) arrays[i].data = memory.emplace_back(addresses[i], arrays[i]).address();
  const std::span<const Array> all(arrays);
  nb::gil_scoped_release release;
  plan.kernel(Call{all.first(plan.operands), all.subspan(plan.operands), plan.numbers});
}

// A Block as Python sees it: writable bytes, alive as long as an array lies in them.
int get_block_buffer(PyObject* object, Py_buffer* view, int flags) {
  const Block* block = nb::inst_ptr<Block>(object);
  return PyBuffer_FillInfo(view, object, block->data(), Py_ssize_t(block->size()), /* read-only */ 0, flags);
}

PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_block_buffer)}, {0, nullptr}};

}  // namespace
}  // namespace exactqat

NB_MODULE(EXACTQAT_MODULE, module) {
  using namespace exactqat;
  nb::set_leak_warnings(false);  // plans stay remembered until the process ends
  nb::class_<Plan>(module, "Plan").def("__call__", &run);
  module.def("plan", &make_plan, nb::arg("kernel"), nb::arg("arrays"), nb::arg("operands"), nb::arg("numbers"));
  module.def("kernels", &kernel_names);
  module.def("thread_count", &thread_count);
  module.def("set_thread_count", &set_thread_count);
  module.def("share_threads", &share_threads, nb::arg("library"));
  nb::class_<Block>(module, "Block", nb::type_slots(block_slots))
      .def("__init__", [](Block* self, size_t bytes) { new (self) Block(bytes); });
#if defined(EXACTQAT_XLA)
  module.def("xla_handler", [] { return nb::capsule(xla_handler(), "xla._CUSTOM_CALL_TARGET"); });
#endif
}
