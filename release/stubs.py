# SPDX-License-Identifier: Apache-2.0
"""Writes the stub files that tell type checkers the signatures of the operators: `python release/stubs.py FOLDER`.

The build runs it (CMakeLists.txt), so wheels contain the stubs and the repository does not. It only needs Python: the
declarations are imported without the rest of the package, which is not built yet.

At run time the operators are objects made from declarations, whose arguments a type checker cannot see. In the stubs
each has one overload per framework, with its documentation: results have the type of the operands, NumPy arrays may be
mixed with another framework's, other mixtures are errors, and JAX and TensorFlow, whose arrays never change, have no
`out`. TensorFlow has no types for type checkers: anything it converts to tensors is accepted, and `Any` is returned.
(One signature with a type variable instead would give NumPy results the shape and dtype of the operands, and fail if
the operands' dtypes differ.)
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "exactqat"
if "exactqat" not in sys.modules:
    # The package without what its __init__ loads: the declarations need nothing of it.
    alone = ModuleType("exactqat")
    alone.__path__ = [str(PACKAGE)]
    sys.modules["exactqat"] = alone

from exactqat import nn, quantization  # noqa: E402
from exactqat.operators import OPERATORS, Operator  # noqa: E402
from exactqat.operators.declarations.op import ARRAY  # noqa: E402

HEAD = "# SPDX-License-Identifier: Apache-2.0\n# Made by the build from the declarations in operators/.\n"
ATTRIBUTES = {"bool": "bool", "int": "SupportsIndex", "float": "_Float", "integers": "Iterable[SupportsIndex]"}

# Types of the first operand and of the others; whether there is `out`.
FRAMEWORKS = {
    "_NumPy": ("_NumPy | _Numbers", "_NumPy | _Numbers", True),
    "torch.Tensor": ("torch.Tensor", "torch.Tensor | _NumPy | _Numbers", True),
    "jax.Array": ("jax.Array", "jax.Array | _NumPy | _Numbers", False),
    "Any": ("_TensorFlow", "_TensorFlow | _NumPy | _Numbers", False),
}

TYPES = """
_Array = TypeVar("_Array")
_NumPy: TypeAlias = np.ndarray[Any, Any]
_Float: TypeAlias = float | np.floating[Any] | np.integer[Any]
_Numbers: TypeAlias = _Float | list[Any] | tuple[Any, ...]

class _TensorFlow(Protocol):
    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any: ...
"""


def raw_ops() -> str:
    """`exactqat/raw_ops.pyi`: the types that all stubs share, the results, and one function for each operator."""
    imports = [
        "from collections.abc import Iterable",
        "from typing import Any, Generic, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, TypeVar, overload",
        "",
        "import jax",
        "import numpy as np",
        "import torch",
    ]
    parts = ["\n".join(imports), TYPES.strip("\n")]
    raw = [op for op in OPERATORS.values() if op.raw_name]
    for op in raw:
        if len(op.results) > 1:
            fields = "\n".join(f"    {name}: _Array" for name in op.results)
            parts.append(f"class {_results(op)}(NamedTuple, Generic[_Array]):\n{fields}")
    parts.append("\n".join(_function(str(op.raw_name), op, keywords_only=True) for op in raw))
    return HEAD + "\n" + "\n\n".join(parts).rstrip() + "\n"


def quantization_stub() -> str:
    """`exactqat/quantization.pyi`: the operators exported there, and the functions written in Python."""
    here = {
        name.removeprefix("quantization."): op
        for op in OPERATORS.values()
        for name in op.exports
        if name.startswith("quantization.")
    }
    body = [*(_function(name, op) for name, op in here.items()), *_python_functions(quantization)]
    return HEAD + "\n" + _imports(body) + "\n\n" + "\n".join(body).rstrip() + "\n"


def nn_stub() -> str:
    """`exactqat/nn.pyi`."""
    body = _python_functions(nn)
    return HEAD + "\n" + _imports(body) + "\n\n" + "\n".join(body).rstrip() + "\n"


def top_level() -> str:
    """`exactqat/__init__.pyi`. The operators there are those of `tf.quantization` under TensorFlow 1's names."""
    operators = sorted(name for op in OPERATORS.values() for name in op.exports if "." not in name)
    modules, later = set(), ()
    home = dict.fromkeys(operators, quantization.__name__)
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "exactqat":
            public = [alias.name for alias in node.names if not (alias.asname or alias.name).startswith("_")]
            if node.module == "exactqat":
                modules |= set(public)
            else:
                home |= dict.fromkeys(public, str(node.module))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LATER":
            later = ast.literal_eval(node.value)
            modules |= set(later)
    lines = [f"from exactqat import {name} as {name}" for name in sorted(modules)]
    for name in sorted(home, key=lambda name: (home[name], name)):
        lines += [f"from {home[name]} import (", f"    {name} as {name},", ")"]
    listed = "\n".join(f'    "{name}",' for name in sorted({*modules, *home} - set(later)))
    return HEAD + "\n" + "\n".join(lines) + f"\n\n__version__: str\n\n__all__ = [\n{listed}\n]\n"


def _imports(body: list[str]) -> str:
    """What the functions in `body` need."""
    text = "\n".join(body)
    own = ["_Float", "_NumPy", "_Numbers", "_TensorFlow", *(_results(op) for op in OPERATORS.values() if op.raw_name)]
    used = "\n".join(f"    {name}," for name in sorted((name for name in own if name in text), key=str.lower))
    abstract = ", ".join(name for name in ("Iterable", "Sequence") if f"{name}[" in text)
    iterable = f"from collections.abc import {abstract}\n" * bool(abstract)
    typing = ", ".join(name for name in ("Any", "Literal", "SupportsIndex", "overload") if name in text)
    frameworks = "import jax\nimport torch"
    return f"{iterable}from typing import {typing}\n\n{frameworks}\n\nfrom exactqat.raw_ops import (\n{used}\n)"


def _results(op: Operator) -> str:
    return f"_{op.raw_name}Results"


def _default(value: Any) -> str:
    return repr(value).replace("'", '"')


def _function(name: str, op: Operator, keywords_only: bool = False) -> str:
    """The stub of an operator."""
    several = len(op.results) > 1
    overloads = []
    for array, (first, other, takes_out) in FRAMEWORKS.items():
        parameters = []
        for key in op.parameters:
            if key in op.operands:
                annotation = first if key == op.operands[0] else other
            elif key in op.choices:
                annotation = f"Literal[{', '.join(map(_default, op.choices[key]))}]"
            else:
                annotation = ATTRIBUTES[op.attributes[key]]
            default = f" = {_default(op.defaults[key])}" if key in op.defaults else ""
            parameters.append(f"{key}: {annotation}{default}")
        parameters = ["*", *parameters] if keywords_only else parameters
        parameters.append("name: str | None = None")
        if takes_out:
            out = f"tuple[{', '.join([array] * len(op.results))}]" if several else f"{array} | tuple[{array}]"
            parameters += [*(["*"] if not keywords_only else []), f"out: {out} | None = None"]
        result = f"{_results(op)}[{array}]" if several else array
        overloads.append(_overload(name, parameters, result, inspect.getdoc(op)))
    return "\n".join(overloads)


def _python_functions(module: ModuleType) -> list[str]:
    return [
        _python_function(name, thing)
        for name, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
    ]


def _python_function(name: str, function: Callable[..., Any]) -> str:
    """The stub of a function that is `showing_arrays`: one result, or a tuple of them."""
    signature = inspect.signature(function)
    several = typing.get_args(signature.return_annotation)
    overloads = []
    for array, (first, other, takes_out) in FRAMEWORKS.items():
        annotations = iter([first])
        parameters = []
        for key, parameter in signature.parameters.items():
            hint = parameter.annotation
            if key == "out":
                out = f"tuple[{', '.join([f'{array} | None'] * len(several))}]" if several else array
                parameters += ["*", f"out: {out} | None = None"] if takes_out else []
                continue
            annotation = next(annotations, other) if hint is ARRAY else _annotation(hint)
            if hint is ARRAY and parameter.default is None:
                annotation += " | None"
            default = "" if parameter.default is inspect.Parameter.empty else f" = {_default(parameter.default)}"
            parameters.append(f"{key}: {annotation}{default}")
        result = f"tuple[{', '.join([array] * len(several))}]" if several else array
        overloads.append(_overload(name, parameters, result, inspect.getdoc(function)))
    return "\n".join(overloads)


def _annotation(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return " | ".join(_annotation(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "None"
    text = inspect.formatannotation(hint).replace("'", '"')
    return text.replace("typing.", "").replace("collections.abc.", "")


def _overload(name: str, parameters: list[str], result: str, documentation: str | None) -> str:
    head = f"@overload\ndef {name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f") -> {result}:"
    assert documentation and "\\" not in documentation and '"""' not in documentation
    first, *rest = documentation.split("\n")
    end = "\n    " if rest else ""
    lines = [f'    """{first}', *textwrap.indent("\n".join(rest), "    ").split("\n")] if rest else [f'    """{first}']
    return head + "\n" + "\n".join(lines) + end + '"""\n'


STUBS = {
    "raw_ops.pyi": raw_ops,
    "quantization.pyi": quantization_stub,
    "nn.pyi": nn_stub,
    "__init__.pyi": top_level,
}


def write(folder: Path) -> None:
    """Writes all stubs into a folder that exists."""
    for name, text in STUBS.items():
        (folder / name).write_text(text())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
