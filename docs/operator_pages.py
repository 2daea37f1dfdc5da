# SPDX-License-Identifier: Apache-2.0
"""One page for each operator, made from its declaration, the code of its reference, a recorded call of TensorFlow that
is repeated while the page is built, and the list of known differences."""

from __future__ import annotations

import inspect
import itertools
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from docstrings import Docstring, Entry, markdown, parse, table

from exactqat import raw_ops
from exactqat.operators import OPERATORS, Operator, reference
from exactqat.operators.declarations.specification import FLOATS, TensorSpec
from exactqat.operators.reference import arithmetic, summation

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import goldens  # noqa: E402
from bits import differing  # noqa: E402
from cases import RESULTS, Case, cases, family_of  # noqa: E402

READABLE = 30  # values in the largest array of an example that is shown as a program
SHOWN = 8  # values shown of an array if some array has more than that

PROMISES = {
    "bitwise": "TensorFlow's bits",
    "sum": "within 1 ulp of the exact sum",
    "accuracy": "at least as close to the exact value as TensorFlow's",
    "elements": "within its own few float32 roundings",
    "placeholder": "carries nothing on a CPU",
}
TAKES = {"bool": "bool", "int": "integer", "float": "number", "integers": "sequence of integers"}


class Example(NamedTuple):
    """A recorded call: TensorFlow's results and ours."""

    case: Case
    expected: dict[str, np.ndarray]
    actual: dict[str, np.ndarray]
    recorded_with: str


def title(op: Operator) -> str:
    return op.raw_name or op.name


def link(name: str, folder: str = "") -> str | None:
    """The address of the page about an operator or of a file under docs/.

    It is seen from the pages in operators/, or from the top if `folder` is "operators/".
    """
    if name.startswith("docs/"):
        return f"{'' if folder else '../'}{name.removeprefix('docs/')}"
    operator = next((op for op in OPERATORS.values() if name in (op.name, op.raw_name)), None)
    return f"{folder}{operator.name}.md" if operator else None


def differences(op: Operator) -> list[dict[str, Any]]:
    """The entries of differences.toml about an operator."""
    entries = tomllib.loads((ROOT / "docs" / "differences.toml").read_text())["difference"]
    return [e for e in entries if any(fnmatchcase(op.raw_name or "", pattern) for pattern in e["operators"])]


def example(op: Operator) -> Example | None:
    """A recorded call of an operator, small enough to read if there is one, and what the installed kernels answer.

    Raises ValueError if a result that is promised bit for bit differs.
    """
    if op.raw_name is None:
        return None
    recorded = goldens.load(family_of(op.raw_name))
    unlike = ("deviation", "beyond_tensorflow", "tolerance", "eigen", "float64", "empty", "sum")
    candidates = [c for c in cases(op.raw_name) if c.name in recorded.cases and not c.tags & set(unlike)]

    def hard_to_read(case: Case) -> tuple[bool, bool, int]:
        size = max(array.size for array in case.operands.values())
        return size > READABLE or size < 6, "edge" in case.tags, size

    case = min(candidates, key=hard_to_read)
    results = getattr(raw_ops, op.raw_name)(**case.operands, **case.attributes)
    actual = dict(zip(op.results, results if isinstance(results, tuple) else (results,), strict=True))
    expected = recorded.cases[case.name].outputs
    for name, promise in RESULTS[op.raw_name].items():
        if promise == "bitwise" and differing(actual[name], expected[name]).any():
            raise ValueError(f"{case.name}: {name} differs from TensorFlow's bits")
    return Example(case, expected, actual, f"TensorFlow {recorded.recorded_with['tensorflow']}")


def page(op: Operator) -> str:
    """The whole page as Markdown."""
    documentation = parse(op)
    shown = example(op)
    parts = [
        f"# {title(op)}",
        *(
            listed_as(f"exactqat.{name}")
            for name in ([f"raw_ops.{op.raw_name}"] if op.raw_name else []) + list(op.exports)
        ),
        *(markdown(text, link) for text in documentation.text.split("\n\n")),
        _signatures(op),
        "## Arguments",
        _arguments(op, documentation),
        "## Results",
        _results(op, documentation),
        *([_dtypes(op, shown.case)] if shown else []),
        "## Errors",
        "\n".join(f"- {line}" for line in _errors(documentation)),
        "## Gradient",
        _gradient(op),
        "## Writing into existing arrays",
        _in_place(op),
        *(["## Example", _example(op, shown)] if shown else []),
        "## Differs from TensorFlow",
        _differences(op),
        "## Meaning",
        _meaning(op, shown),
        "## Source",
        " ".join(markdown(entry.text, _decision) for entry in documentation.sections["Source"]),
    ]
    return "\n\n".join(parts) + "\n"


def listed_as(name: str, is_class: bool = False) -> str:
    """An entry of the site's inventory, objects.inv, by which other projects' pages find this place."""
    return f"```{{py:{'class' if is_class else 'function'}}} {name}\n:no-typesetting:\n```"


def overview() -> str:
    """The page that lists all operators, family by family, and last the kernels that only they use."""
    public = [op for op in OPERATORS.values() if op.raw_name]
    parts = ["# Operators", "All of these are in `exactqat.raw_ops`, under TensorFlow's names."]
    for family, members in itertools.groupby(public, lambda op: op.rule.__module__.rpartition(".")[2]):
        parts += [f"## {family.replace('_', ' ').capitalize()}", _listed(members)]
    parts += [
        "## Kernels without a public name",
        "Second-order gradients and the training kit use these; TensorFlow has no name for them.",
        _listed(op for op in OPERATORS.values() if not op.raw_name),
    ]
    pages = "\n".join(op.name for op in public)
    return "\n\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{pages}\n```\n"])


def _listed(operators: Iterable[Operator]) -> str:
    rows = [[f"[{title(op)}]({op.name}.md)", markdown(parse(op).summary, link)] for op in operators]
    return table(["operator", "what it computes"], rows)


def arithmetic_page() -> str:
    """The page with the code that all references share."""
    parts = ["# Arithmetic of the reference"]
    for module in (arithmetic, summation):
        parts.append(f"## {module.__name__.rpartition('.')[2].capitalize()}")
        parts.append(markdown(inspect.getdoc(module) or "", lambda name: link(name, "operators/")))
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                parts.append(f"({_anchor(name)})=\n### {name.replace('_', ' ').strip()}")
                parts.append(_code(inspect.getsource(function)))
    return "\n\n".join(parts) + "\n"


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _signatures(op: Operator) -> str:
    lines = []
    if op.raw_name:
        words = [f"{name}={op.defaults[name]!r}" if name in op.defaults else name for name in op.parameters]
        lines.append(_call(f"eq.raw_ops.{op.raw_name}", ["*", *words, "name=None", "out=None"]))
    parameters = [str(p.replace(annotation=inspect.Parameter.empty)) for p in op.__signature__.parameters.values()]
    parameters.insert(-1, "*")
    lines += [_call(f"eq.{name}", parameters) for name in op.exports[:1]]
    text = _code("\n".join(lines)) if lines else "It has no public name; gradients use it."
    return text + "".join(f"\n\nAlso known as `eq.{name}`." for name in op.exports[1:])


def _call(name: str, arguments: list[str]) -> str:
    return wrapped(f"{name}({', '.join(arguments)})")


def wrapped(call: str) -> str:
    """A call in lines that fit on the page."""
    return "\n".join(textwrap.wrap(call, 96, subsequent_indent="    ", break_long_words=False))


def _meanings(entries: list[Entry]) -> dict[str, str]:
    return {name: markdown(entry.text, link) for entry in entries for name in entry.names}


def _arguments(op: Operator, documentation: Docstring) -> str:
    meanings = _meanings(documentation.sections["Args"])
    rows = []
    for name in op.parameters:
        if name in op.operands:
            takes = "array"
        elif name in op.choices:
            takes = "one of " + ", ".join(f"`{choice!r}`" for choice in op.choices[name])
        else:
            takes = TAKES[op.attributes[name]]
        default = f"`{op.defaults[name]!r}`" if name in op.defaults else ""
        rows.append([f"`{name}`", takes, default, meanings[name]])
    rows.append(["`name`", "anything", "`None`", "ignored"])
    return table(["argument", "takes", "default", "meaning"], rows)


def _results(op: Operator, documentation: Docstring) -> str:
    entries = documentation.sections["Returns"]
    meanings = _meanings(entries)
    promises = RESULTS.get(op.raw_name or "", {})
    rows = [[f"`{name}`", meanings[name], *([PROMISES[promises[name]]] if promises else [])] for name in op.results]
    headings = ["result", "meaning", *(["promise"] if promises else [])]
    also = [markdown(entry.text, link) for entry in entries if not entry.names]
    if len(op.results) > 1:
        also.append("Results are returned as a named tuple, in this order. [What the promises mean](../exactness.md).")
    elif promises:
        also.append("[What the promise means](../exactness.md).")
    return "\n\n".join([table(headings, rows), *also])


def _dtypes(op: Operator, case: Case) -> str:
    """Which dtypes go together, found by asking the declaration."""
    rows = []
    attributes = tuple(op.bind((), {**case.operands, **case.attributes})[1].items())
    shapes = [np.shape(case.operands[name]) for name in op.operands]
    for leading in FLOATS:
        for dtypes in itertools.product(dict.fromkeys((leading, "float32")), repeat=len(shapes)):
            if leading not in dtypes:
                continue
            specs = tuple(TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
            try:
                results = op.check(specs, attributes).results
            except TypeError:
                continue
            rows.append(
                [f"`{leading}`", _by_dtype(op.operands, dtypes), _by_dtype(op.results, [r.dtype for r in results])]
            )
    return "### Dtypes\n\n" + table(["tensors", "operands", "results"], rows)


def _by_dtype(names: tuple[str, ...], dtypes: Any) -> str:
    groups: dict[str, list[str]] = {}
    for name, dtype in zip(names, dtypes, strict=True):
        groups.setdefault(dtype, []).append(name)
    if len(groups) == 1:
        return f"all {next(iter(groups))}" if len(names) > 1 else next(iter(groups))
    return "; ".join(f"{', '.join(f'`{name}`' for name in group)} {dtype}" for dtype, group in groups.items())


def _errors(documentation: Docstring) -> list[str]:
    lines = []
    for entry in documentation.sections["Raises"]:
        text = entry.text.replace(". TypeError: ", ".\0TypeError: ")
        first, *others = text.split("\0")
        lines.append(f"`{'`, `'.join(entry.names)}`: {markdown(first, link)}")
        lines += [f"`TypeError`: {markdown(other.partition(': ')[2], link)}" for other in others]
    return lines


def _gradient(op: Operator) -> str:
    if op.vjp is None:
        return "None."
    names = [name for name in op.vjp.__code__.co_names if name in OPERATORS]
    constants = _list([name for name in op.results if name not in op.differentiable])
    text = _list(list(op.differentiable)) + (" have" if len(op.differentiable) > 1 else " has") + " a gradient, "
    if names:
        made_of = " and ".join(f"[{title(OPERATORS[name])}]({name}.md)" for name in names)
        higher = all(OPERATORS[name].vjp for name in names)
        text += f"computed with {made_of}"
        text += ", differentiable in turn, so second and higher orders work." if higher else "."
    else:
        text += "computed with ordinary array arithmetic, so second and higher orders work."
    return text + (f" {constants} are treated as constants." if constants else "")


def _list(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _in_place(op: Operator) -> str:
    several = len(op.results) > 1
    arrays = "a tuple of arrays, one per result," if several else "an array"
    text = f"`out` takes {arrays} of the result's shape and dtype, in NumPy and, outside autograd, in PyTorch. "
    if not op.reuses:
        return text + ("None of them may" if several else "It may not") + " share memory with an operand."
    places = " or ".join(f"`{name}`" for name in op.reuses)
    return text + f"{'The first one' if several else 'It'} may be {places} itself, which the result then overwrites."


def _literal(name: str, value: Any) -> str:
    """Python text of an argument in a call with one line for each."""
    if isinstance(value, np.ndarray):
        flat = value.ndim > 2  # nested brackets of many dimensions are hard to read
        text = _text(value.reshape(-1) if flat else value, len(f"    {name}=np.array("))
        text = text.replace("nan", "np.nan").replace("inf", "np.inf")
        shape = f".reshape({', '.join(map(str, value.shape))})" if flat else ""
        return f"{name}=np.array({text}, np.{value.dtype}){shape}"
    return f'{name}=float("{value}")' if isinstance(value, float) and not np.isfinite(value) else f"{name}={value!r}"


def _text(array: np.ndarray, indent: int) -> str:
    """The values in brackets, with as many digits as distinguish them."""
    if not array.size:
        return "[]"
    with np.printoptions(floatmode="unique", linewidth=80, threshold=sys.maxsize):
        return np.array2string(array, separator=", ", prefix=" " * indent, formatter={"float_kind": _number})


def _number(value: Any) -> str:
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return np.format_float_positional(value, unique=True, trim="0")
    return str(value)


def _values(array: np.ndarray, indent: int, limit: int) -> str:
    if array.size <= limit:
        return _text(array.reshape(-1) if array.ndim > 2 else array, indent)
    start = _text(array.reshape(-1)[:SHOWN], indent)
    return f"{start[:-1]}, ...], the first of {array.size} values"


def example_code(op: Operator, shown: Example) -> str:
    """The call of an example as a program, or an empty text if its arrays are too large to print."""
    if max(array.size for array in shown.case.operands.values()) > READABLE:
        return ""
    inputs = {**shown.case.operands, **shown.case.attributes}
    arguments = [f"    {_literal(name, inputs[name])}," for name in op.parameters if name in inputs]
    imports = ["import numpy as np", "", "import exactqat as eq", ""]
    return "\n".join([*imports, f"results = eq.raw_ops.{op.raw_name}(", *arguments, ")"])


def _example(op: Operator, shown: Example) -> str:
    code = example_code(op, shown)
    if code:
        parts = [_code(code)]
    else:
        inputs = [f"{name} = {_values(array, len(name) + 3, SHOWN)}" for name, array in shown.case.operands.items()]
        inputs += [f"{name} = {value!r}" for name, value in shown.case.attributes.items()]
        parts = [_code("\n".join(inputs), "text")]
    lines, limit = [], READABLE if code else SHOWN
    for name in op.results:
        expected, actual = shown.expected[name], shown.actual[name]
        indent = len(shown.recorded_with) + 4
        lines.append(f"{name}, shape {list(actual.shape)}: {_distance(actual, expected)}")
        lines.append(f"  {shown.recorded_with}  {_values(expected, indent, limit)}")
        lines.append(f"  {'exactqat':{len(shown.recorded_with)}}  {_values(actual, indent, limit)}")
    said = f"Case `{shown.case.name}` of `tests/cases.py`, recorded with {shown.recorded_with} and repeated when this "
    return "\n\n".join([said + "page was built:", *parts, _code("\n".join(lines), "text")])


def _distance(actual: np.ndarray, expected: np.ndarray) -> str:
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, TensorFlow's {list(expected.shape)}"
    if not differing(actual, expected).any():
        return "the same bits"
    return f"at most {np.abs(actual.astype(np.float64) - expected).max():.1e} apart"


def _differences(op: Operator) -> str:
    entries = differences(op)
    if op.raw_name is None:
        return "TensorFlow does not have this operator."
    if not entries:
        return "No known differences."
    rows = [[markdown(entry[key], link) for key in ("about", "tensorflow", "exactqat")] for entry in entries]
    return table(["situation", "TensorFlow", "exactqat"], rows)


def _meaning(op: Operator, shown: Example | None) -> str:
    """The code of the kernel's reference with the helpers of its file, in the file's order."""
    kernel = op.name
    if shown is not None:
        operands, attributes = op.bind((), {**shown.case.operands, **shown.case.attributes})
        specs = tuple(TensorSpec(array.shape, array.dtype.name) for array in operands)
        kernel = op.check(specs, tuple(attributes.items())).kernel
    module = sys.modules[reference.KERNELS[kernel].__module__]
    wanted, shared, helpers = [kernel], set(), set()
    while wanted:
        name = wanted.pop()
        thing = vars(module).get(name)
        home = getattr(thing, "__module__", None)
        if home in (arithmetic.__name__, summation.__name__):
            shared.add(name)
        elif home == module.__name__ and name not in helpers:
            helpers.add(name)
            code = getattr(thing, "__code__", None)
            wanted += _names(code) if code else []
    code = "\n\n\n".join(inspect.getsource(vars(module)[name]).rstrip() for name in vars(module) if name in helpers)
    links = ", ".join(f"[{name}](../arithmetic.md#{_anchor(name)})" for name in sorted(shared))
    intro = f"The reference, `reference/{module.__name__.rpartition('.')[2]}.py`; every kernel matches it bit for bit"
    calls = f" It calls {links}." if links else ""
    return f"{intro}.{calls}\n\n{_code(code)}"


def _names(code: Any) -> list[str]:
    """The global names that a function's code mentions, those of functions within it included."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return [*code.co_names, *(name for function in inner for name in _names(function))]


def _decision(name: str) -> str | None:
    """As `link`, but operators named as a source are TensorFlow's, not ours."""
    return link(name) if name.startswith("docs/") else None


def _anchor(name: str) -> str:
    return f"reference-{name.strip('_').replace('_', '-')}"
