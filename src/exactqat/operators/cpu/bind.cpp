// SPDX-License-Identifier: Apache-2.0
// The door for NumPy and PyTorch. A Plan holds all that is known of a call but the addresses; running it takes only those.
#include <algorithm>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#if defined(__GLIBC__)
#include <cxxabi.h>
#include <unistd.h>
#endif

#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>

#include "call.h"
#include "memory.h"
#include "moved_range.h"
#include "parallel.h"
#include "row_magnitudes.h"
#include "xla.h"

namespace nb = nanobind;

namespace exactqat {
namespace {

// Attributes' names. Made when the module is loaded: threads that wait for the first use of a static object in a function do not let
// go of the interpreter, which the one that makes it may need.
struct {
  PyObject *requires_grad, *is_cpu, *data_ptr;
} names;

struct Plan {
  Kernel kernel;
  std::unique_ptr<int64_t[]> extents;  // of all arrays
  std::vector<Array> arrays;
  size_t operands;
  Numbers numbers;
  int64_t bytes;  // of all arrays
};

// Calls into Python. An interpreter that ends before 3.14 ends a daemon thread in the middle of such a call, with glibc by
// unwinding its stack; no frame of C++ above this one may be unwound so, and none needs to be: the process is about to end.
template <class Function>
auto in_python(Function&& function) {
#if defined(__GLIBC__)
  try {
    return function();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  return function();
#endif
}

// Letting other threads run Python meanwhile costs more than a kernel on less than this takes.
constexpr int64_t kWorthReleasing = 1 << 14;

// Runs something on so many bytes.
template <class Function>
void beside_python(int64_t bytes, Function&& function) {
  if (bytes < kWorthReleasing) return function();
  std::exception_ptr failure;
  PyThreadState* state = PyEval_SaveThread();
  try {
    function();
  } catch (...) {
    failure = std::current_exception();
  }
  in_python([state] { PyEval_RestoreThread(state); });  // not in a destructor, which nothing may be unwound through
  if (failure) std::rethrow_exception(failure);
}

void call_kernel(const Plan& plan, std::span<const Array> arrays) {
  plan.kernel(Call{arrays.first(plan.operands), arrays.subspan(plan.operands), plan.numbers});
}

void execute(const Plan& plan, std::span<const Array> arrays) {
  beside_python(plan.bytes, [&] { call_kernel(plan, arrays); });
}

Plan make_plan(const std::string& kernel, const std::vector<std::tuple<std::string, std::vector<int64_t>>>& arrays,
               size_t operands, const nb::dict& numbers) {
  Plan plan{find_kernel(kernel), {}, {}, operands, {}, 0};
  if (operands > arrays.size()) throw std::invalid_argument("a plan has no more operands than arrays");
  size_t extents = 0;
  for (const auto& [dtype, shape] : arrays) extents += shape.size();
  plan.extents = std::make_unique<int64_t[]>(extents);
  int64_t* next = plan.extents.get();
  for (const auto& [dtype, shape] : arrays) {
    plan.arrays.push_back({nullptr, dtype_of(dtype), {next, shape.size()}});
    next = std::ranges::copy(shape, next).out;
    plan.bytes += plan.arrays.back().size() * size_of(plan.arrays.back().dtype);
  }
  for (auto [key, value] : numbers) {
    if (nb::isinstance<nb::float_>(value))
      plan.numbers.entries.emplace_back(nb::cast<std::string>(key), nb::cast<double>(value));
    else
      plan.numbers.entries.emplace_back(nb::cast<std::string>(key), nb::cast<int64_t>(value));
  }
  return plan;
}

// The memory of an argument: an address, or an object with the buffer protocol, whose size is then checked.
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
  execute(plan, arrays);
}

// Plans one after the other, at addresses that stay. Python keeps the memory alive.
struct Program {
  struct Step {
    nb::object owner;  // of the plan
    const Plan* plan;
    std::vector<Array> arrays;
  };
  std::vector<Step> steps;
  int64_t bytes = 0;  // of all arrays of all steps

  explicit Program(const std::vector<std::pair<nb::object, std::vector<uintptr_t>>>& given) {
    for (const auto& [owner, addresses] : given) {
      const Plan* plan = nb::cast<const Plan*>(owner);
      if (addresses.size() != plan->arrays.size()) throw std::invalid_argument("a plan needs an address for each of its arrays");
      steps.push_back({owner, plan, plan->arrays});
      for (size_t i = 0; i < addresses.size(); ++i) steps.back().arrays[i].data = reinterpret_cast<void*>(addresses[i]);
      bytes += plan->bytes;
    }
  }
  void run() const {
    beside_python(bytes, [this] {
      for (const Step& step : steps) call_kernel(*step.plan, step.arrays);
    });
  }
};

// Functions of the host that XLA's programs call: answer(number, operands, results), arrays as (address, shape), says what is wrong,
// or None. It is never released, as programs may still run when the module goes.
PyObject* answer = nullptr;

nb::list described(std::span<const HostArray> arrays) {
  nb::list all;
  for (const HostArray& array : arrays) {
    nb::list shape;
    for (int64_t extent : array.shape) shape.append(extent);
    all.append(nb::make_tuple(reinterpret_cast<uintptr_t>(array.data), nb::tuple(shape)));
  }
  return all;
}

void call_host(int64_t number, std::span<const HostArray> operands, std::span<const HostArray> results) {
  std::string failure;
  in_python([&] {
    const PyGILState_STATE state = PyGILState_Ensure();
    try {
      const nb::handle function(answer);
      const nb::object said = function(number, described(operands), described(results));
      if (!said.is_none()) failure = nb::cast<std::string>(said);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    PyGILState_Release(state);
  });
  if (!failure.empty()) throw std::runtime_error(failure);
}

nb::capsule make_host_handler(nb::object function) {
  answer = function.release().ptr();
  return nb::capsule(xla_host_handler(call_host), "xla._CUSTOM_CALL_TARGET");
}

// To look at a call, check it and find its plan takes Python several microseconds, more than a kernel takes for a small tensor.
// A Shortcut does it for the calls of one operator that look like one before: the same arguments given, arrays of the same
// dtypes and shapes, the same attributes. How to run the others, and what is wrong with them, is for Python to say: it answers
// None for all but dense native arrays of exactly the types it was made for, and plain Python values.
//
// learn(args, kwargs) -> (plan, results, attributes): checks a call of a new kind. `results` tell how each is made: a function
// without arguments, or the number of an operand to call `like` with. `attributes` are all of them, checked and in order.

constexpr size_t kMostArrays = 16, kLongestKey = 512, kMostKnown = 4096;

struct Key {
  char bytes[kLongestKey];
  size_t size = 0;
  bool fits = true;

  void add(const void* data, size_t count) {
    if (!(fits = fits && size + count <= kLongestKey) || count == 0) return;  // a scalar's shape may be a null pointer
    std::memcpy(bytes + size, data, count);
    size += count;
  }
  template <class T>
  void add(T value) {
    add(&value, sizeof value);
  }
  void add_array(DType dtype, int64_t rank, const int64_t* shape) {
    add('a'), add(dtype), add(rank);
    add(shape, size_t(rank) * sizeof *shape);
  }
  std::string_view view() const { return {bytes, size}; }
};

struct Argument {
  PyObject* object = nullptr;
  bool is_array = false;
  void* data = nullptr;
  double number = 0;  // if it is no array
  Py_buffer buffer;  // not cleared: there are as many of these as a call might have

  Argument() { buffer.obj = nullptr; }
  Argument(const Argument&) = delete;
  ~Argument() {
    if (buffer.obj) PyBuffer_Release(&buffer);
  }
};

bool read_buffer(PyObject* object, Argument& argument, Key& key, int flags = 0) {
  Py_buffer& buffer = argument.buffer;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_FORMAT | PyBUF_STRIDES | flags) != 0) {
    PyErr_Clear();
    return false;
  }
  if (buffer.format == nullptr || buffer.format[0] == 0 || buffer.format[1] != 0) return false;
  DType dtype;
  switch (buffer.format[0]) {
    case 'e': dtype = DType::float16; break;
    case 'f': dtype = DType::float32; break;
    case 'd': dtype = DType::float64; break;
    case 'B': dtype = DType::uint8; break;
    default: return false;
  }
  if (!PyBuffer_IsContiguous(&buffer, 'C') || reinterpret_cast<uintptr_t>(buffer.buf) % size_of(dtype) != 0) return false;
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  key.add_array(dtype, buffer.ndim, reinterpret_cast<const int64_t*>(buffer.shape));
  argument.data = buffer.buf;
  return true;
}

struct ManagedTensor {  // DLPack's DLManagedTensor
  nb::dlpack::dltensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor*);
};

struct ExchangeInterface {  // DLPack's DLPackExchangeAPI, from version 1.2 on
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void *allocate, *managed_from, *managed_to;
  int (*describe)(void* object, nb::dlpack::dltensor* tensor);
  void* current_work_stream;
};

nb::object call(PyObject* function) {
  return nb::steal(in_python([=] { return PyObject_CallNoArgs(function); }));
}

nb::object call(PyObject* function, PyObject* argument) {
  // Not PyObject_CallOneArg, which the stable ABI lacks. The entry before the argument is for a bound method's object.
  PyObject* arguments[] = {nullptr, argument};
  return nb::steal(in_python(
      [&] { return PyObject_Vectorcall(function, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr); }));
}

// Whether the memory of a dense array is proven to be there: a tensor may have elements and a null pointer, to which its offset
// has been added, or a storage that was made smaller.
bool has_memory(const nb::dlpack::dltensor& tensor, int64_t offset, int64_t bytes) {
  int64_t size = 1;
  for (int i = 0; i < tensor.ndim; ++i) size *= tensor.shape[i];
  const int64_t width = tensor.dtype.bits / 8;
  return size == 0 || (reinterpret_cast<uintptr_t>(tensor.data) != uintptr_t(offset * width) && (offset + size) * width <= bytes);
}

bool read_dltensor(const nb::dlpack::dltensor& tensor, Argument& argument, Key& key) {
  const auto [code, bits, lanes] = tensor.dtype;
  bool usual = tensor.device.device_type == nb::device::cpu::value && lanes == 1;
  DType dtype{};
  if (code == uint8_t(nb::dlpack::dtype_code::Float) && bits == 16) dtype = DType::float16;
  else if (code == uint8_t(nb::dlpack::dtype_code::Float) && bits == 32) dtype = DType::float32;
  else if (code == uint8_t(nb::dlpack::dtype_code::Float) && bits == 64) dtype = DType::float64;
  else if (code == uint8_t(nb::dlpack::dtype_code::Bfloat) && bits == 16) dtype = DType::bfloat16;
  else if (code == uint8_t(nb::dlpack::dtype_code::UInt) && bits == 8) dtype = DType::uint8;
  else usual = false;
  bool dense = true, empty = false;
  int64_t stride = 1;
  for (int i = tensor.ndim; i-- > 0; stride *= tensor.shape[i]) {
    dense = dense && (tensor.shape[i] == 1 || tensor.strides == nullptr || tensor.strides[i] == stride);
    empty = empty || tensor.shape[i] == 0;
  }
  usual = usual && (dense || empty);
  if (usual) key.add_array(dtype, tensor.ndim, tensor.shape);
  argument.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return usual;  // the caller holds the tensor
}

// An item of a list; null if another thread has made the list shorter meanwhile.
nb::object list_item(PyObject* list, Py_ssize_t i) {
#if defined(Py_GIL_DISABLED)
  PyObject* item = PyList_GetItemRef(list, i);
  if (item == nullptr) PyErr_Clear();
  return nb::steal(item);
#else
  return nb::borrow(PyList_GetItem(list, i));
#endif
}

bool read_attribute(PyObject* object, Key& key) {
  if (object == Py_None) return key.add('n'), true;
  if (PyBool_Check(object)) return key.add(object == Py_True ? 't' : 'f'), true;
  if (PyFloat_CheckExact(object)) return key.add('d'), key.add(PyFloat_AsDouble(object)), true;
  if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) return PyErr_Clear(), false;
    return key.add('s'), key.add(size), key.add(text, size_t(size)), true;
  }
  if (PyLong_CheckExact(object)) {
    int beyond;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &beyond);
    return key.add('i'), key.add(value), beyond == 0;
  }
  const bool is_tuple = PyTuple_CheckExact(object);
  if (!is_tuple && !PyList_CheckExact(object)) return false;
  const Py_ssize_t count = is_tuple ? PyTuple_Size(object) : PyList_Size(object);
  key.add('('), key.add(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const nb::object item = is_tuple ? nb::borrow(PyTuple_GetItem(object, i)) : list_item(object, i);
    if (!item || !PyLong_CheckExact(item.ptr()) || !read_attribute(item.ptr(), key)) return false;
  }
  return true;
}

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
};

struct Known {
  nb::object plan_object;
  const Plan* plan;
  std::vector<nb::object> results;
  nb::tuple attributes;
};

// What is remembered of calls, for all threads: the lock is the interpreter's where it has one, else the table's own.
template <class Value>
class Table {
 public:
  // A copy, so that it stays when another thread empties the table; something false if there is none.
  Value find(std::string_view key) {
    nb::ft_lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? Value() : found->second;
  }

  void keep(std::string_view key, const Value& value) {
    Values dropped;  // ends without the lock: the end of an object may call into Python
    nb::ft_lock_guard lock(mutex_);
    if (values_.size() >= kMostKnown) values_.swap(dropped);
    values_.try_emplace(std::string(key), value);
  }

 private:
  using Values = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;
  nb::ft_mutex mutex_;
  Values values_;
};

struct Shortcut {
  std::vector<std::pair<nb::object, int>> parameters;  // names, interned, and the number of the operand, -1 for attributes
  nb::tuple types;       // of arrays, exactly
  nb::tuple numbers;     // types, exactly, whose float() is the value, beside Python's own
  nb::object learn;
  nb::object wrap;       // what several results are returned as: a subclass of tuple
  nb::tuple unusual;     // functions; if one answers with something true, Python runs the call
  const ExchangeInterface* exchange;   // null for arrays with the buffer protocol, and for frameworks without it
  nb::object to_dlpack, is_negated, offset, storage, bytes;  // None for arrays with the buffer protocol
  nb::object like;
  nb::object is_grad_enabled, differentiable;  // None without autograd, or without a gradient
  nb::object is_inference, written;            // of arrays given for results; None without autograd
  std::vector<bool> reusable;                  // operands whose place the first result may take
  size_t operands = 0;
  Table<std::shared_ptr<const Known>> known;
  Table<nb::object> attributes;  // a tuple of them, checked, of differentiated calls
};

bool is_true(nb::object answer) {
  if (!answer) throw nb::python_error();
  return PyObject_IsTrue(answer.ptr()) == 1;
}

bool read_dlpack(const Shortcut& s, PyObject* object, Argument& argument, Key& key) {
  const auto integer = [](const nb::object& answer) { return answer ? PyLong_AsLongLong(answer.ptr()) : -1; };
  const nb::object storage = call(s.storage.ptr(), object);
  const int64_t offset = storage ? integer(call(s.offset.ptr(), object)) : -1;
  const int64_t bytes = offset < 0 ? -1 : integer(call(s.bytes.ptr(), storage.ptr()));
  if (bytes < 0) return PyErr_Clear(), false;
  if (s.exchange != nullptr) {
    nb::dlpack::dltensor described;
    if (in_python([&] { return s.exchange->describe(object, &described); }) != 0) return PyErr_Clear(), false;
    return has_memory(described, offset, bytes) && read_dltensor(described, argument, key);
  }
  const nb::object capsule = call(s.to_dlpack.ptr(), object);
  auto* managed = capsule ? static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor")) : nullptr;
  if (managed == nullptr) return PyErr_Clear(), false;
  return has_memory(managed->tensor, offset, bytes) && read_dltensor(managed->tensor, argument, key);
}

bool is_one_of(const nb::tuple& types, PyObject* object) {
  for (nb::handle type : types)
    if (type.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(object))) return true;
  return false;
}

// Reads an array; false if it is an unusual one.
bool read_array(const Shortcut& s, PyObject* object, Argument& argument, Key& key, int flags = 0) {
  if (s.to_dlpack.is_none()) return read_buffer(object, argument, key, flags);
  return read_dlpack(s, object, argument, key) && !is_true(call(s.is_negated.ptr(), object));
}

bool read_operand(const Shortcut& s, Argument& argument, Key& key) {
  if (argument.is_array) return read_array(s, argument.object, argument, key);
  PyObject* object = argument.object;
  // The value is no part of the key: ranges change from call to call.
  if (PyFloat_CheckExact(object)) argument.number = PyFloat_AsDouble(object);
  else if (PyLong_CheckExact(object)) {
    int beyond;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &beyond);
    if (beyond != 0 || value > 1 << 24 || value < -(1 << 24)) return false;  // may need rounding
    argument.number = double(value);
  } else if (is_one_of(s.numbers, object)) {
    argument.number = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) return PyErr_Clear(), false;
  } else return false;
  key.add('v');
  return true;
}

// Takes one argument, and reads it if it is an attribute; false if Python must run the call.
bool take(const Shortcut& s, size_t parameter, PyObject* object, Argument* arguments, Key& key) {
  if (parameter >= s.parameters.size()) return false;
  const int operand = s.parameters[parameter].second;
  if (operand < 0) return key.add(uint8_t(parameter)), read_attribute(object, key);
  if (arguments[operand].object != nullptr) return false;
  arguments[operand].object = object;
  arguments[operand].is_array = is_one_of(s.types, object);
  return true;
}

bool take_keyword(const Shortcut& s, PyObject* name, size_t positional, PyObject* object, Argument* arguments, Key& key) {
  for (size_t i = positional; i < s.parameters.size(); ++i) {
    PyObject* own = s.parameters[i].first.ptr();
    if (own == name || PyUnicode_Compare(own, name) == 0) return take(s, i, object, arguments, key);
  }
  return false;
}

std::shared_ptr<const Known> learn(Shortcut& s, const Key& key, nb::tuple args, nb::dict kwargs) {
  const nb::object learnt = nb::steal(in_python([&] {
    return PyObject_CallFunctionObjArgs(s.learn.ptr(), args.ptr(), kwargs.ptr(), nullptr);
  }));
  if (!learnt) throw nb::python_error();
  auto [plan, results, attributes] = nb::cast<std::tuple<nb::object, nb::list, nb::tuple>>(learnt);
  const auto fresh = std::make_shared<Known>(Known{plan, nb::inst_ptr<Plan>(plan), {}, attributes});
  for (nb::handle result : results) fresh->results.push_back(nb::borrow(result));
  s.known.keep(key.view(), fresh);
  return fresh;
}

nb::object pack(const Shortcut& s, nb::object* results, size_t count) {
  if (count == 1) return results[0];
  nb::object tuple = nb::steal(PyTuple_New(Py_ssize_t(count)));
  for (size_t i = 0; i < count; ++i) PyTuple_SetItem(tuple.ptr(), Py_ssize_t(i), results[i].release().ptr());
  const nb::tuple arguments = nb::make_tuple(tuple);
  static const auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
  nb::object wrapped = nb::steal(make(reinterpret_cast<PyTypeObject*>(s.wrap.ptr()), arguments.ptr(), nullptr));
  if (!wrapped) throw nb::python_error();
  return wrapped;
}

bool says(PyObject* array, PyObject* attribute) {
  return is_true(nb::steal(in_python([=] { return PyObject_GetAttr(array, attribute); })));
}

bool requires_grad(PyObject* array) {
  return says(array, names.requires_grad);
}

// Whether autograd wants to know of the call.
bool wants_gradient(const Shortcut& s, const Argument* arguments) {
  if (s.is_grad_enabled.is_none() || !is_true(call(s.is_grad_enabled.ptr()))) return false;
  for (size_t i = 0; i < s.operands; ++i)
    if (arguments[i].is_array && requires_grad(arguments[i].object)) return true;
  return false;
}

// Whether it can be called with them at once.
bool is_differentiable(const Shortcut& s, const Argument* arguments) {
  if (s.differentiable.is_none()) return false;
  for (size_t i = 0; i < s.operands; ++i)
    if (!arguments[i].is_array || !says(arguments[i].object, names.is_cpu)) return false;  // numbers become tensors in Python
  return true;
}

nb::object call_differentiable(const Shortcut& s, nb::handle attributes, const Argument* arguments) {
  PyObject* all[kMostArrays];
  size_t count = 0;
  for (; count < s.operands; ++count) all[count] = arguments[count].object;
  for (nb::handle attribute : attributes) all[count++] = attribute.ptr();
  nb::object results = nb::steal(in_python([&] { return PyObject_Vectorcall(s.differentiable.ptr(), all, count, nullptr); }));
  if (!results) throw nb::python_error();
  if (!PyTuple_CheckExact(results.ptr())) return results;
  nb::object unpacked[kMostArrays];
  const size_t size = nb::len(results);
  for (size_t i = 0; i < size; ++i) unpacked[i] = results[i];
  return pack(s, unpacked, size);
}

bool overlap(const Array& a, const Array& b) {
  const auto begin = [](const Array& array) { return reinterpret_cast<uintptr_t>(array.data); };
  const auto end = [&](const Array& array) { return begin(array) + size_t(array.size() * size_of(array.dtype)); };
  return begin(a) < end(b) && begin(b) < end(a);
}

// Takes the arrays given for results; false if Python must look at them, because they may not fit.
bool take_out(const Shortcut& s, nb::tuple out, Argument* given, std::vector<Array>& arrays) {
  const size_t count = arrays.size() - s.operands;
  if (out.size() != count) return false;
  for (size_t i = 0; i < count; ++i) {
    PyObject* object = PyTuple_GetItem(out.ptr(), Py_ssize_t(i));
    Array& result = arrays[s.operands + i];
    Key wanted, found;
    wanted.add_array(result.dtype, int64_t(result.shape.size()), result.shape.data());
    if (!is_one_of(s.types, object) || !read_array(s, object, given[i], found, PyBUF_WRITABLE) || found.view() != wanted.view())
      return false;
    if (!s.is_inference.is_none() &&
        (requires_grad(object) || is_true(call(s.is_inference.ptr(), object))))
      return false;
    result.data = given[i].data;
    for (size_t k = 0; k < s.operands + i; ++k) {
      const Array& other = arrays[k];
      const bool in_its_place = i == 0 && k < s.operands && s.reusable[k] && other.data == result.data &&
                                other.dtype == result.dtype && std::ranges::equal(other.shape, result.shape);
      if (overlap(result, other) && !in_its_place) return false;
    }
  }
  return true;
}

// Lists may be changed by another thread between the making of the key and that of the plan. Whether there were any.
bool freeze(nb::tuple& args, nb::dict& kwargs) {
  bool any = false;
  const auto frozen = [&any](nb::handle value) {
    if (!PyList_CheckExact(value.ptr())) return nb::borrow(value);
    any = true;
    return nb::steal(PyList_AsTuple(value.ptr()));
  };
  nb::list values;
  for (nb::handle value : args) values.append(frozen(value));
  nb::dict named;
  for (auto [name, value] : kwargs) named[name] = frozen(value);
  args = nb::tuple(values);
  kwargs = named;
  return any;
}

nb::object run_shortcut(Shortcut& s, nb::tuple args, nb::dict kwargs, nb::object out) {
  for (nb::handle function : s.unusual)
    if (is_true(call(function.ptr()))) return nb::none();
  Argument arguments[kMostArrays], made[kMostArrays];
  Key key;
  const size_t positional = args.size();
  for (size_t i = 0; i < positional; ++i)
    if (!take(s, i, PyTuple_GetItem(args.ptr(), Py_ssize_t(i)), arguments, key)) return nb::none();
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &value);)
    if (!take_keyword(s, name, positional, value, arguments, key)) return nb::none();
  bool any_array = false;
  for (size_t i = 0; i < s.operands; ++i) {
    if (arguments[i].object == nullptr) return nb::none();
    any_array |= arguments[i].is_array;
  }
  if (!any_array || !key.fits) return nb::none();

  // A differentiated call reads its operands when it comes back here from below autograd.
  const size_t of_attributes = key.size;
  const bool differentiated = wants_gradient(s, arguments);
  if (differentiated) {
    if (!out.is_none() || !is_differentiable(s, arguments)) return nb::none();
    if (const nb::object attributes = s.attributes.find(key.view()); attributes) return call_differentiable(s, attributes, arguments);
  }
  for (size_t i = 0; i < s.operands; ++i)
    if (!read_operand(s, arguments[i], key)) return nb::none();
  if (!key.fits) return nb::none();
  std::shared_ptr<const Known> known = s.known.find(key.view());
  if (!known) {
    if (freeze(args, kwargs)) return run_shortcut(s, args, kwargs, out);
    known = learn(s, key, args, kwargs);
  }
  if (differentiated) {
    s.attributes.keep(key.view().substr(0, of_attributes), known->attributes);
    return call_differentiable(s, known->attributes, arguments);
  }

  const Plan& plan = *known->plan;
  std::vector<Array> arrays = plan.arrays;
  float single[kMostArrays];
  for (size_t i = 0; i < s.operands; ++i) {
    arrays[i].data = arguments[i].data;
    if (arguments[i].is_array) continue;
    arrays[i].data = &arguments[i].number;
    if (arrays[i].dtype == DType::float64) continue;
    single[i] = float(arguments[i].number);
    if (std::isinf(single[i]) && !std::isinf(arguments[i].number)) return nb::none();
    arrays[i].data = &single[i];
  }
  nb::object results[kMostArrays];
  const size_t count = known->results.size();
  if (!out.is_none()) {
    if (!take_out(s, nb::cast<nb::tuple>(out), made, arrays)) return nb::none();
    execute(plan, arrays);
    if (!s.written.is_none() && !call(s.written.ptr(), out.ptr())) throw nb::python_error();
    for (size_t i = 0; i < count; ++i) results[i] = out[i];
    return pack(s, results, count);
  }
  for (size_t i = 0; i < count; ++i) {
    PyObject* recipe = known->results[i].ptr();
    results[i] = PyLong_CheckExact(recipe) ? call(s.like.ptr(), arguments[PyLong_AsLong(recipe)].object) : call(recipe);
    if (!results[i]) throw nb::python_error();
    void*& data = arrays[s.operands + i].data;
    if (s.to_dlpack.is_none()) {
      if (PyObject_GetBuffer(results[i].ptr(), &made[i].buffer, PyBUF_WRITABLE) != 0) throw nb::python_error();
      data = made[i].buffer.buf;
    } else {
      const nb::object address = nb::steal(in_python([&] {
        PyObject* self = results[i].ptr();
        return PyObject_VectorcallMethod(names.data_ptr, &self, 1, nullptr);
      }));
      data = reinterpret_cast<void*>(nb::cast<uintptr_t>(address));
    }
  }
  execute(plan, arrays);
  return pack(s, results, count);
}

Shortcut* make_shortcut(const std::vector<std::pair<std::string, bool>>& parameters, nb::tuple types, nb::tuple numbers,
                        nb::object learn, nb::object wrap, nb::tuple unusual, nb::object exchange, nb::object to_dlpack,
                        nb::object is_negated, nb::object offset, nb::object storage, nb::object bytes, nb::object like,
                        nb::object is_grad_enabled, nb::object differentiable, nb::object is_inference, nb::object written,
                        const std::vector<std::string>& reuses) {
  const ExchangeInterface* interface = nullptr;
  if (!exchange.is_none()) {
    interface = static_cast<const ExchangeInterface*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
    if (interface == nullptr) throw nb::python_error();
    if (interface->version.major != 1 || interface->describe == nullptr) interface = nullptr;
  }
  if (parameters.size() > kMostArrays) throw std::invalid_argument("an operator has too many parameters");
  auto s = std::unique_ptr<Shortcut>(new Shortcut{
      {}, types, numbers, learn, wrap, unusual, interface, to_dlpack, is_negated, offset, storage, bytes, like, is_grad_enabled,
      differentiable, is_inference, written, {}, 0, {}, {}});
  for (const auto& [name, is_operand] : parameters) {
    if (is_operand) s->reusable.push_back(std::find(reuses.begin(), reuses.end(), name) != reuses.end());
    s->parameters.emplace_back(nb::steal(PyUnicode_InternFromString(name.c_str())), is_operand ? int(s->operands++) : -1);
  }
  return s.release();
}

// At addresses, as reading numbers from tensors takes longer than computing with them.
double move_range_at(uintptr_t low, uintptr_t high, uintptr_t minimum, uintptr_t maximum, uintptr_t batches, int policy, float decay,
                     bool nonnegative) {
  const auto number = [](uintptr_t address) -> float& { return *reinterpret_cast<float*>(address); };
  return move_range(number(low), number(high), number(minimum), number(maximum), *reinterpret_cast<int64_t*>(batches),
                    Following(policy), decay, nonnegative);
}

// At addresses. weights: of each its address, its rows and the size of one.
void row_magnitudes_at(const std::vector<std::tuple<uintptr_t, int64_t, int64_t>>& weights, uintptr_t magnitudes) {
  std::vector<Rows> rows;
  for (const auto& [data, count, size] : weights) rows.push_back({reinterpret_cast<const float*>(data), count, size});
  row_magnitudes(rows, reinterpret_cast<float*>(magnitudes));
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
  prepare_for_forks();
  names = {PyUnicode_InternFromString("requires_grad"), PyUnicode_InternFromString("is_cpu"),
           PyUnicode_InternFromString("data_ptr")};
  nb::class_<Plan>(module, "Plan").def("__call__", &run);
  nb::class_<Program>(module, "Program")
      .def(nb::init<const std::vector<std::pair<nb::object, std::vector<uintptr_t>>>&>(), nb::arg("steps"))
      .def("__call__", &Program::run);
  module.def("shortcut", &make_shortcut, nb::rv_policy::take_ownership, nb::arg("parameters"), nb::arg("types"),
             nb::arg("numbers"), nb::arg("learn"), nb::arg("wrap"), nb::arg("unusual"), nb::arg("exchange").none(), nb::arg("to_dlpack").none(),
             nb::arg("is_negated").none(), nb::arg("offset").none(), nb::arg("storage").none(), nb::arg("bytes").none(),
             nb::arg("like").none(), nb::arg("is_grad_enabled").none(), nb::arg("differentiable").none(),
             nb::arg("is_inference").none(), nb::arg("written").none(), nb::arg("reuses"));
  nb::class_<Shortcut>(module, "Shortcut")
      .def("__call__", &run_shortcut, nb::arg("args"), nb::arg("kwargs"), nb::arg("out") = nb::none());
  module.def("plan", &make_plan, nb::arg("kernel"), nb::arg("arrays"), nb::arg("operands"), nb::arg("numbers"));
  module.def("move_range", &move_range_at, nb::arg("low"), nb::arg("high"), nb::arg("minimum"), nb::arg("maximum"), nb::arg("batches"),
             nb::arg("policy"), nb::arg("decay"), nb::arg("nonnegative"));
  module.def("row_magnitudes", &row_magnitudes_at, nb::arg("weights"), nb::arg("magnitudes"));
  module.def("kernels", &kernel_names);
  module.def("thread_count", &thread_count);
  module.def("set_thread_count", &set_thread_count);
  module.def("share_threads", &share_threads, nb::arg("library"));
  nb::class_<Block>(module, "Block", nb::type_slots(block_slots))
      .def("__init__", [](Block* self, size_t bytes) { new (self) Block(bytes); });
  module.def("xla_host_handler", &make_host_handler, nb::arg("answer"));
  module.def("xla_handler", [] { return nb::capsule(xla_handler(), "xla._CUSTOM_CALL_TARGET"); });
}
