# SPDX-License-Identifier: Apache-2.0
"""The rooms keep their contracts (CONTRIBUTING.md, "The rooms"): imports, names, files."""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from exactqat.kit import device
from exactqat.operators import OPERATORS, cpu, reference

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "exactqat"
WINGS = {
    "operators": (
        "declarations",
        "reference",
        "cpu",
        "triton",
        "numpy",
        "torch",
        "jax",
        "tensorflow",
        "frontends",
        "gradients",
    ),
    "kit": ("device", "planning", "engine", "display", "progress"),
    "qat": ("capture", "train"),
    "application": ("job", "report"),
}
PLACES = {room: PACKAGE / wing / room for wing, rooms in WINGS.items() for room in rooms}
FAMILIES = ("depthwise_conv2d", "fake_quant", "fused_batch_norm", "quantize_and_dequantize")
FRONTENDS = ("numpy.py", "torch.py", "jax.py", "tensorflow.py")
ARRAY_LIBRARIES = {"numpy", "torch", "jax", "jaxlib", "tensorflow", "triton", "ml_dtypes"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = tree_of(path)
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def place(room: str) -> Path:
    """The folder of a room."""
    return PLACES.get(room, PACKAGE / room)


def room_in(module: str) -> str:
    """The room of a module, named as inside the package: `kit.device.profile` is in `device`."""
    first, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    if first not in WINGS:
        return first
    return inner if inner in WINGS[first] else {"operators": "declarations"}.get(first, first)


def roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def inside(modules: set[str]) -> set[str]:
    """The rooms of this package that are imported."""
    return {room_in(module.partition(".")[2]) for module in modules if module.startswith("exactqat.")}


@pytest.mark.parametrize("path", sorted(place("declarations").glob("*.py")), ids=lambda p: p.name)
def test_declarations_know_no_array_library(path: Path) -> None:
    imported = imports_of(path, top_level_only=True)
    assert roots(imported) <= set(sys.stdlib_module_names) | {"exactqat"}
    assert inside(imported) <= {"declarations"}
    assert not roots(imports_of(path)) & ARRAY_LIBRARIES


@pytest.mark.parametrize("path", sorted(place("reference").glob("*.py")), ids=lambda p: p.name)
def test_reference_is_numpy(path: Path) -> None:
    imported = imports_of(path)
    assert roots(imported) <= {"numpy", "typing", "collections", "functools", "exactqat"}
    assert inside(imported) <= {"declarations", "reference"}


@pytest.mark.parametrize("name", FRONTENDS)
def test_frontends_are_generic(name: str) -> None:
    text = (PACKAGE / "operators" / name).read_text()
    imported = imports_of(PACKAGE / "operators" / name)
    # What compiles for devices that have no kernels compiles the meaning itself.
    assert inside(imported) <= {"declarations", "cpu", "triton"} | ({"reference"} if name == "jax.py" else set())
    assert roots(imported) & ARRAY_LIBRARIES <= {name.removesuffix(".py"), "numpy"}
    for op in OPERATORS.values():
        for operator_name in filter(None, (op.name, op.raw_name)):
            assert not re.search(rf"\b{operator_name}\b", text), f"{name} names the operator {operator_name}"
    assert not re.search("|".join(FAMILIES), text), f"{name} names a family"


def test_raw_ops_names_no_operator() -> None:
    text = (PACKAGE / "raw_ops.py").read_text()
    assert not [op.raw_name for op in OPERATORS.values() if op.raw_name and op.raw_name in text]


@pytest.mark.parametrize(
    "path", sorted(path for path in place("cpu").iterdir() if path.suffix in (".cpp", ".h")), ids=lambda p: p.name
)
def test_kernels_know_no_python(path: Path) -> None:
    text = path.read_text()
    if path.name not in ("bind.cpp", "features.cpp"):
        assert "nanobind" not in text and "Python.h" not in text
    if path.name not in ("xla.cpp", "xla_ffi.h"):
        assert "xla/ffi" not in text and "xla_ffi" not in text
    # The standard library's streams look for their locale by numbers that another copy of it may have given out.
    assert not re.search(r"#include <(fstream|iomanip|iostream|locale|regex|sstream)>", text)
    # The rest is free functions.
    types_of_their_own = " FlushDenormals| Pool| Worker| Share| Memory| Block| Scratch| Table"
    assert not re.search(rf"^\s*class\b(?!{types_of_their_own})", text, re.M)


def test_every_family_has_its_file_in_every_room() -> None:
    for room, suffix in (("declarations", ".py"), ("reference", ".py"), ("cpu", ".cpp"), ("triton", ".py")):
        files = {path.stem for path in place(room).glob(f"*{suffix}")}
        assert set(FAMILIES) <= files, f"{room}/ misses {set(FAMILIES) - files}"
    goldens = {path.stem for path in (ROOT / "tests" / "goldens").glob("*.npz")}
    assert goldens == set(FAMILIES)


def test_every_kernel_has_a_reference_and_the_other_way_round() -> None:
    # The integers of devices have their meaning in device/, and their tests in test_engine.py.
    kernels = {name for name in cpu.kernels.kernels() if not name.startswith("integer_")}
    assert kernels == set(reference.KERNELS)


def test_every_kernel_has_a_gpu_plan() -> None:
    triton = pytest.importorskip("exactqat.operators.triton")
    # Operators of the kit that do several steps in one pass, which it asks for on the CPU only.
    fused = ("batch_norm_statistics", "quantized_batch_norm", "fake_quant_rows", "rounded_sums")
    on_cpu_only = {name for name in reference.KERNELS if name.startswith(fused)}
    assert set(triton.PLANS) == set(reference.KERNELS) - on_cpu_only


@pytest.mark.parametrize("path", sorted(place("triton").glob("*.py")), ids=lambda p: p.name)
def test_gpu_kernels_know_triton_only(path: Path) -> None:
    imported = imports_of(path)
    assert roots(imported) & ARRAY_LIBRARIES <= {"triton"}
    assert inside(imported) <= {"declarations", "triton"}
    text = path.read_text()
    # One place decides about fusion; nothing is chosen by the clock or added in the order of arrival.
    assert path.name == "launch.py" or "enable_fp_fusion" not in text
    assert not re.search(r"autotune|heuristics|atomic_", text)


def test_parameters_of_gpu_kernels_are_in_order() -> None:
    """Pointers, numbers, constexprs, each written as what it is: launches rely on it."""
    for path in place("triton").glob("*.py"):
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef) or "triton.jit" not in map(
                ast.unparse, function.decorator_list
            ):
                continue
            for argument in function.args.args:
                constant = argument.annotation is not None and ast.unparse(argument.annotation) == "tl.constexpr"
                assert constant == argument.arg.isupper(), f"{path.name}: {function.name}({argument.arg})"


def test_the_neutral_files_of_the_kit_know_no_framework() -> None:
    """What is shared by all frameworks imports none, whatever a user has installed."""
    paths = [
        place("capture") / "proof.py",
        *(path for room in ("core", "passes") for path in (place("capture") / room).glob("*.py")),
    ]
    paths += [*(place("train") / "core").glob("*.py"), *(PACKAGE / "tune").glob("*.py")]
    for path in [*paths, *place("planning").glob("*.py"), *(PACKAGE / "deploy").rglob("*.py")]:
        frameworks = roots(imports_of(path)) & {"torch", "jax", "flax", "optax", "keras", "tensorflow"}
        assert not frameworks, f"{path.relative_to(ROOT)} imports {frameworks}"
    for framework in ("torch", "jax", "keras"):
        # Keras hands its tensors to the operators of the framework beneath.
        beneath = {"torch", "jax", "tensorflow"} if framework == "keras" else set()
        own = [path for room in ("capture", "train") for path in (place(room) / framework).glob("*.py")]
        assert own
        for path in own:
            frameworks = roots(imports_of(path)) & ({"torch", "jax", "keras", "tensorflow"} - {framework} - beneath)
            assert not frameworks, f"{path.relative_to(ROOT)} imports {frameworks}"


def test_files_are_written_and_read_without_runtimes() -> None:
    for path in (PACKAGE / "deploy" / "formats").glob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        used = set().union(*(imported_by(node, parts) for node in ast.walk(tree_of(path))))
        assert not {name for name in used if name.startswith("deploy.runtimes") or name == "deploy.verify"}, path.name


def test_every_framework_answers_all_that_declarations_ask() -> None:
    asked = {
        node.func.attr
        for path in place("device").glob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("primitives", "p")
    }
    assert {"conv", "argmin"} <= asked
    for framework in ("torch", "jax", "keras"):
        answered = set()
        for node in ast.parse((place("train") / framework / "primitives.py").read_text()).body:
            if isinstance(node, ast.FunctionDef):
                answered.add(node.name)
            elif isinstance(node, ast.Assign):
                answered |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        assert asked <= answered, f"the primitives of {framework} lack {sorted(asked - answered)}"


def test_the_kit_uses_public_operators_only() -> None:
    for path in [
        path
        for room in ("planning", "capture", "train", "qat", "tune", "deploy", "report", "job")
        for path in place(room).rglob("*.py")
    ]:
        used = inside(imports_of(path))
        assert not used & {"cpu", "triton", "reference", "declarations"}, (
            f"{path.relative_to(ROOT)} reaches into {used}"
        )


@pytest.mark.parametrize("path", sorted(place("device").glob("*.py")), ids=lambda p: p.name)
def test_device_operators_know_numpy_only(path: Path) -> None:
    # threadpoolctl: the threads of NumPy's BLAS.
    allowed = set(sys.stdlib_module_names) | {"numpy"} | ({"threadpoolctl"} if path.name == "blocks.py" else set())
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert roots({alias.name for alias in node.names}) <= allowed
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            public = node.level == 3 and not node.module and names <= {"raw_ops", "get_num_threads"}
            assert node.level < 2 or public, f"{path.name} reaches out of its room"
            if public:
                continue
            assert node.level == 1 or (node.module or "").split(".")[0] in allowed, f"{path.name} imports {node.module}"


# From the ground up: each room uses the ones before it only. Packages of the same line do not know each other.
FLOORS = (
    ("declarations", "display", "progress"),
    ("reference", "triton", "cpu", "nn", "quantization", "raw_ops", "gradients"),
    ("numpy", "torch", "jax", "tensorflow"),
    ("frontends",),
    ("",),
    ("device",),
    ("engine",),
    ("planning",),
    ("deploy", "capture"),
    ("train",),
    ("qat",),
    ("tune",),
    ("job",),
    ("report",),
    ("cli",),
    ("__main__",),
)


def test_no_room_uses_one_above_it() -> None:
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = "" if parts == ("__init__",) else room_in(".".join(parts))
        if parts[0] in WINGS and parts[1:] == ("__init__",) and parts[0] not in ("operators", "qat"):
            assert not imports_of(path), f"{path.relative_to(ROOT)} is a wing's sentence, nothing more"
            continue
        for node in ast.walk(tree_of(path)):
            for used in {room_in(name) for name in imported_by(node, parts)} - {room}:
                # A word of the package itself (`from exactqat import ...`) is looked up by name.
                assert floor.get(used, floor[""]) < floor[room], f"{path.relative_to(ROOT)} uses {used or 'exactqat'}"


def imported_by(node: ast.AST, parts: tuple[str, ...]) -> set[str]:
    """Names of the package, without its own, that a statement in the file of these parts imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "exactqat"}
    if not isinstance(node, ast.ImportFrom):
        return set()
    module = node.module or ""
    if node.level:
        module = ".".join((*parts[: len(parts) - node.level], *filter(None, [module])))
    elif module.split(".")[0] == "exactqat":
        module = module.partition(".")[2]
    else:
        return set()
    return {module} if module else {alias.name for alias in node.names}


def kinds_named(tree: ast.AST) -> set[int]:
    """Lines on which an operator of the device is named; words for fused activations are no operators there."""
    kinds = set(device.OPERATORS) - set(device.ACTIVATIONS)
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in kinds
    }


def kinds_compared(tree: ast.AST, among: set[int] | None = None) -> set[int]:
    """Lines on which something called `kind` is compared with anything but the table of all declarations.

    among: only comparisons with something named there.
    """
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            asks = any(side.split(".")[-1] == "kind" for side in sides) and sides[-1] != "OPERATORS"
            if asks if among is None else kinds_named(node) & among:
                lines.add(node.lineno)
    return lines


def test_device_operators_are_distinguished_in_their_declarations_only() -> None:
    sample = ast.parse('a = step.kind == "CONV_2D"\nb = kind in TABLE\nc = kind in OPERATORS\nd = "CONV_2D"')
    assert kinds_named(sample) == {1, 4} and kinds_compared(sample) == {1, 2}
    assert kinds_compared(sample, kinds_named(sample)) == {1}
    for path in [
        path for room in ("planning", "capture", "train", "qat", "tune", "deploy") for path in place(room).rglob("*.py")
    ]:
        where, tree = path.relative_to(PACKAGE), tree_of(path)
        named = kinds_named(tree)
        if "planning" in where.parts:  # says which operators a step becomes, and asks nothing of them
            named = kinds_compared(tree, named)
        elif "deploy" in where.parts:
            named |= kinds_compared(tree)
        assert not named, f"{where} tells operators of the device apart on lines {sorted(named)}; ask the declaration"


def profiles_compared(tree: ast.AST) -> set[int]:
    """Lines on which something is compared with the name of a device."""
    names = set(device.profile.known_names())
    return {
        node.lineno
        for comparison in ast.walk(tree)
        if isinstance(comparison, ast.Compare)
        for node in ast.walk(comparison)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }


def test_devices_are_distinguished_by_their_properties() -> None:
    assert profiles_compared(ast.parse('a = profile == "micro"\nb = "micro"\nc = p in ("reference", "x")')) == {1, 3}
    for path in PACKAGE.rglob("*.py"):
        lines = profiles_compared(tree_of(path))
        assert not lines, f"{path.relative_to(PACKAGE)} asks for a device by name on lines {sorted(lines)}; ask Profile"


def files_used(path: Path) -> set[Path]:
    """Files of the package that one imports, at the top or within a function; not those whose names only annotate."""
    files: set[Path] = set()
    left: list[ast.AST] = [tree_of(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["exactqat", *path.relative_to(PACKAGE).parts[: -node.level]] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        for first, *rest in names:
            file = PACKAGE.joinpath(*rest)
            candidates = (file.with_suffix(".py"), file / "__init__.py", file.parent.with_suffix(".py"))
            files |= {candidate for candidate in candidates if first == "exactqat" and candidate.exists()}
    return files - {path}


def test_no_files_import_one_another() -> None:
    """In whatever order files are read, and whatever is imported late, arrows go down only."""
    arrows = {path: files_used(path) for path in PACKAGE.rglob("*.py")}
    assert place("planning") / "plans.py" in arrows[place("train") / "core" / "engine.py"]
    assert PACKAGE / "operators" / "numpy.py" not in arrows[place("reference") / "arrays.py"]
    assert place("train") / "core" / "engine.py" not in arrows[place("train") / "core" / "accumulators.py"]
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(str(path.relative_to(PACKAGE)) for path in error.args[1])) from None


def tracked_files() -> list[Path]:
    ignored = {".git", "build", "dist", "demo", "__pycache__", ".venv", ".hypothesis"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(
            part in ignored or part.startswith(".venv") or part.endswith(("_cache", ".egg-info"))
            for part in path.relative_to(ROOT).parts
        )
    ]


def test_every_source_file_has_its_licence_line() -> None:
    for path in tracked_files():
        if path.suffix in (".py", ".cpp", ".h", ".toml", ".txt") or path.name in ("Makefile", "run"):
            head = path.read_text().splitlines()[:3]
            assert any("SPDX-License-Identifier: Apache-2.0" in line for line in head), path.relative_to(ROOT)
        if path.suffix == ".ipynb":  # a cell would be shown on the page
            licence = json.loads(path.read_text())["metadata"].get("license")
            assert licence == "SPDX-License-Identifier: Apache-2.0", path.relative_to(ROOT)


def test_every_operator_is_documented() -> None:
    for op in OPERATORS.values():
        text = op.__doc__ or ""
        for section in ("Args:", "Returns:", "Raises:", "Source:"):
            assert section in text, f"{op.name} has no {section}"
        documented = re.sub(r"\s+", " ", text)
        for name in op.parameters:
            assert re.search(rf"\b{name}\b", documented), f"{op.name} does not document {name}"
        for name in op.results:
            assert re.search(rf"\b{name}\b", documented), f"{op.name} does not document its result {name}"
