# SPDX-License-Identifier: Apache-2.0
"""The door for JAX (cpu/xla.cpp), entered as XLA enters it: neither the build nor the modules need jaxlib."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from exactqat.operators.cpu import kernels

SOURCES = Path(__file__).resolve().parents[2] / "src" / "exactqat" / "operators" / "cpu"

# Ours -> XLA's: the structs, and their fields in order.
STRUCTS = {
    "Extension XLA_FFI_Extension_Base": "struct_size type next",
    "Version XLA_FFI_Api_Version": "struct_size extension_start major_version minor_version",
    "Metadata XLA_FFI_Metadata": "struct_size api_version traits",
    "MetadataExtension XLA_FFI_Metadata_Extension": "extension_base metadata",
    "ErrorCreateArguments XLA_FFI_Error_Create_Args": "struct_size extension_start message errc",
    "Api XLA_FFI_Api": "struct_size extension_start api_version internal_api error_create=XLA_FFI_Error_Create",
    "Buffer XLA_FFI_Buffer": "struct_size extension_start dtype data rank dims",
    "ByteSpan XLA_FFI_ByteSpan": "ptr len",
    "Scalar XLA_FFI_Scalar": "dtype value",
    "Buffers XLA_FFI_Args": "struct_size extension_start size types buffers=args",
    "Buffers XLA_FFI_Rets": "struct_size extension_start size types buffers=rets",
    "Attributes XLA_FFI_Attrs": "struct_size extension_start size types names attributes=attrs",
    "CallFrame XLA_FFI_CallFrame": "struct_size extension_start api context=ctx stage operands=args results=rets "
    "attributes=attrs",
}
# Those that lie inside another struct, and those whose whole size is checked when a call arrives.
WHOLE = {"Extension", "Version", "Buffers", "Attributes", "Buffer", "ByteSpan", "Scalar", "ErrorCreateArguments"}
DTYPES = ("s32", "s64", "u8", "f16", "f32", "f64", "bf16")
STAGES = ("instantiate", "prepare", "initialize", "execute")
ATTRIBUTES = ("array", "dictionary", "scalar", "string")
ENUMERATORS = {
    "ExtensionType::metadata": "XLA_FFI_Extension_Metadata",
    "ErrorCode::invalid_argument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "ErrorCode::internal": "XLA_FFI_Error_Code_INTERNAL",
    "BufferType::buffer": "XLA_FFI_ArgType_BUFFER",
    **{f"DataType::{name}": f"XLA_FFI_DataType_{name.upper()}" for name in DTYPES},
    **{f"AttributeType::{name}": f"XLA_FFI_AttrType_{name.upper()}" for name in ATTRIBUTES},
    **{f"Stage::{name}": f"XLA_FFI_ExecutionStage_{name.upper()}" for name in STAGES},
}


def claims() -> str:
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.h"', "namespace ours = exactqat::xla_ffi;"]
    for pair, fields in STRUCTS.items():
        own, theirs = pair.split()
        for field in fields.split():
            name, _, other = field.partition("=")
            a, b = f"ours::{own}", (theirs, other or name)
            lines.append(
                f'static_assert(offsetof({a}, {name}) == offsetof({b[0]}, {b[1]}), "{own}.{name} lies elsewhere");'
            )
            lines.append(
                f'static_assert(sizeof({a}::{name}) == sizeof({b[0]}::{b[1]}), "{own}.{name} has another size");'
            )
        if own in WHOLE:
            lines.append(f"static_assert(sizeof(ours::{own}) == sizeof({theirs}));")
    lines += [f"static_assert(int(ours::{a}) == int({b}));" for a, b in ENUMERATORS.items()]
    lines.append("static_assert(sizeof(ours::CallFrame) == XLA_FFI_CallFrame_STRUCT_SIZE);")
    lines.append("static_assert(ours::kMajor == XLA_FFI_API_MAJOR);")
    return "\n".join(lines) + "\n"


def test_the_declared_layout_is_that_of_the_installed_jaxlib(tmp_path: Path) -> None:
    spec, compiler = find_spec("jaxlib"), shutil.which("c++")
    include = Path(spec.origin).parent / "include" if spec and spec.origin else None
    if compiler is None or include is None or not (include / "xla/ffi/api/c_api.h").is_file() or not SOURCES.is_dir():
        pytest.skip("this needs a C++ compiler and jaxlib with its headers")
    file = tmp_path / "claims.cpp"
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", "-I", str(include), "-I", str(SOURCES), str(file)]
    file.write_text(claims())
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file.write_text(claims().replace("ours::Buffer, rank", "ours::Buffer, dims"))
    assert subprocess.run(command, capture_output=True).returncode != 0


# The same structs for ctypes; they hold addresses as integers.
Word, Int = ctypes.c_uint64, ctypes.c_int


def structure(fields: str, **types: type) -> type[ctypes.Structure]:
    entries = [(name, types.get(name, Word)) for name in fields.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": entries})


Version = structure("struct_size extension_start major minor", major=Int, minor=Int)
Metadata = structure("struct_size version traits beyond", version=Version, traits=Int)
MetadataExtension = structure("struct_size type next metadata", type=Int)
Api = structure("struct_size extension_start version internal error_create", version=Version)
ErrorArguments = structure("struct_size extension_start message code", message=ctypes.c_char_p, code=Int)
Buffer = structure("struct_size extension_start dtype data rank dims", dtype=Int)
Span = structure("ptr len", ptr=ctypes.c_char_p)
Scalar = structure("dtype value", dtype=Int)
Buffers = structure("struct_size extension_start size types buffers")
Attributes = structure("struct_size extension_start size types names attributes")
CallFrame = structure(
    "struct_size extension_start api context stage operands results attributes",
    stage=Int, operands=Buffers, results=Buffers, attributes=Attributes,
)  # fmt: skip
S32, S64, F32, F64, C64 = 4, 5, 11, 12, 15
CODES = {np.dtype(np.int32): S32, np.dtype(np.int64): S64, np.dtype(np.float32): F32, np.dtype(np.float64): F64}
INVALID_ARGUMENT, INTERNAL = 3, 13


def handler() -> ctypes._CFuncPtr:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(Word, Word)(get(kernels.xla_handler(), b"xla._CUSTOM_CALL_TARGET"))


class Runtime:
    """The other side: keeps all that a frame points at, and the errors that were made."""

    def __init__(self, minor: int = 3) -> None:
        self.errors: list[tuple[int, str]] = []
        self.kept: list[object] = []

        @ctypes.CFUNCTYPE(Word, ctypes.POINTER(ErrorArguments))
        def create(arguments):
            self.errors.append((arguments.contents.code, arguments.contents.message.decode()))
            return len(self.errors)

        self.create = create
        self.api = Api(ctypes.sizeof(Api), 0, Version(24, 0, 0, minor), 0, ctypes.cast(create, ctypes.c_void_p).value)

    def at(self, thing: ctypes.Structure | ctypes.Array) -> int:
        self.kept.append(thing)
        return ctypes.addressof(thing)

    def words(self, values: list[int]) -> int:
        return self.at((Word * len(values))(*values))

    def numbers(self, values: list[int]) -> int:
        return self.at((Int * len(values))(*values))

    def buffers(self, arrays: list[np.ndarray], **changes: int) -> ctypes.Structure:
        self.kept.append(arrays)
        buffers = []
        for array in arrays:
            dims = self.words(list(array.shape))
            fields = {"struct_size": 48, "dtype": CODES[array.dtype], "data": array.ctypes.data, "rank": array.ndim}
            buffers.append(self.at(Buffer(**{**fields, "dims": dims, **changes})))
        return Buffers(40, 0, len(arrays), self.numbers([1] * len(arrays)), self.words(buffers))

    def attributes(self, settings: dict[str, object]) -> ctypes.Structure:
        types, names, values = [], [], []
        for name, value in sorted(settings.items()):
            names.append(self.at(Span(name.encode(), len(name))))
            if isinstance(value, str):
                types.append(4)
                values.append(self.at(Span(value.encode(), len(value))))
            else:
                number = ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)
                types.append(3)
                values.append(self.at(Scalar(F64 if isinstance(value, float) else S64, self.at(number))))
        return Attributes(48, 0, len(types), self.numbers(types), self.words(names), self.words(values))

    def frame(self, operands, results, attributes, **changes) -> ctypes.Structure:
        fields = {"struct_size": ctypes.sizeof(CallFrame), "api": self.at(self.api), "stage": 3}
        return CallFrame(**{**fields, "operands": operands, "results": results, "attributes": attributes, **changes})

    def call(self, frame: ctypes.Structure) -> tuple[int, str] | None:
        number = handler()(ctypes.addressof(frame))
        return self.errors[number - 1] if number else None


X = np.linspace(-8, 8, 9, dtype=np.float32)


@pytest.fixture(scope="module")
def kernel_call() -> tuple[str, dict[str, object], np.ndarray]:
    """A kernel's name, its numbers, and what it answers when Python calls it."""
    from exactqat.operators import OPERATORS
    from exactqat.operators.declarations.specification import TensorSpec

    op = OPERATORS["fake_quant_with_min_max_args"]
    lowered = op.lower(
        (TensorSpec(X.shape, "float32"),), (("min", -6.0), ("max", 6.0), ("num_bits", 8), ("narrow_range", False))
    )
    result = np.full_like(X, np.nan)
    kernels.plan(lowered.kernel, [("float32", X.shape)] * 2, 1, dict(lowered.numbers))(X, result)
    return lowered.kernel, dict(lowered.numbers), result


def test_a_call_by_hand_gives_the_kernels_bits(kernel_call) -> None:
    name, numbers, expected = kernel_call
    runtime, result = Runtime(), np.full_like(X, np.nan)
    attributes = runtime.attributes({"kernel": name, **numbers})
    assert runtime.call(runtime.frame(runtime.buffers([X]), runtime.buffers([result]), attributes)) is None
    assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers_that_arrive_late_are_numbers(kernel_call, dtype) -> None:
    name, numbers, expected = kernel_call
    late = sorted(key for key, value in numbers.items() if isinstance(value, int))
    early = {key: value for key, value in numbers.items() if key not in late}
    assert late
    runtime, result = Runtime(), np.full_like(X, np.nan)
    operands = runtime.buffers([X, *(np.array(numbers[key], dtype) for key in late)])
    attributes = runtime.attributes({"kernel": name, "late": ",".join(late), **early})
    assert runtime.call(runtime.frame(operands, runtime.buffers([result]), attributes)) is None
    assert result.tobytes() == expected.tobytes()


def test_what_no_kernel_takes_is_an_error(kernel_call) -> None:
    name, numbers, _ = kernel_call
    runtime, result = Runtime(), np.full_like(X, np.nan)
    inputs, outputs = runtime.buffers([X]), runtime.buffers([result])
    attributes = runtime.attributes({"kernel": name, **numbers})
    longer = Attributes.from_buffer_copy(attributes)
    longer.struct_size = 56
    two_late = {"kernel": name, "late": "a,b", **numbers}
    for frame, code, text in (
        (runtime.frame(runtime.buffers([X], dtype=C64), outputs, attributes), INVALID_ARGUMENT, "operand"),
        (runtime.frame(runtime.buffers([X], struct_size=40), outputs, attributes), INVALID_ARGUMENT, "operand"),
        (runtime.frame(inputs, runtime.buffers([result], dtype=C64), attributes), INVALID_ARGUMENT, "result"),
        (runtime.frame(inputs, outputs, runtime.attributes(numbers)), INVALID_ARGUMENT, "kernel"),
        (runtime.frame(inputs, outputs, runtime.attributes({"kernel": "none"})), INTERNAL, "none"),
        (runtime.frame(inputs, outputs, runtime.attributes({"kernel": name})), INTERNAL, "number"),
        (runtime.frame(inputs, outputs, runtime.attributes({**two_late, "late": "a"})), INVALID_ARGUMENT, "late"),
        (runtime.frame(inputs, outputs, runtime.attributes(two_late)), INVALID_ARGUMENT, "late"),
        (runtime.frame(inputs, outputs, attributes, stage=1), INVALID_ARGUMENT, "executed"),
        (runtime.frame(inputs, outputs, attributes, struct_size=120), INVALID_ARGUMENT, "does not know"),
        (runtime.frame(inputs, outputs, longer), INVALID_ARGUMENT, "does not know"),
    ):
        answer = runtime.call(frame)
        assert answer is not None and answer[0] == code and text in answer[1], (answer, text)
    assert np.isnan(result).all()


@pytest.mark.parametrize("minor", [None, 1, 2, 3, 7])
def test_the_handler_is_written_for_the_runtime_that_asks(minor: int | None) -> None:
    """JAX before 0.8 says nothing (None), and its struct ends before the last field."""
    runtime = Runtime(minor or 0)
    sizes = ctypes.sizeof(MetadataExtension), 36
    metadata = Metadata(sizes[1], Version(24, 0, -1, -1), -1, 12345)
    extension = MetadataExtension(sizes[0], 1, 0, runtime.at(metadata))
    frame = runtime.frame(Buffers(), Buffers(), Attributes(), extension_start=runtime.at(extension))
    if minor is None:
        frame.api = 0
    assert runtime.call(frame) is None
    assert (metadata.version.major, metadata.version.minor) == (0, minor or 1)
    assert metadata.traits == 0
    assert metadata.beyond == (0 if (minor or 1) >= 2 else 12345)
