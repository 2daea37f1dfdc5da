# SPDX-License-Identifier: Apache-2.0
"""JAX arrays in, JAX arrays out: every declared operator as one JAX primitive with the rules of every transformation.

The rules are made from the declarations: gradients from `Operator.gradient`, `vmap` and sharding from `Operator.axes`.
docs/jax.md describes the result.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from exactqat.operators.cpu import kernels
from exactqat.operators.declarations.dispatch import is_array_like
from exactqat.operators.declarations.memory import dtypes_that_fit, guest, unreadable
from exactqat.operators.declarations.op import OPERATORS, Operator
from exactqat.operators.declarations.plain_numbers import FLOAT32_LIMIT
from exactqat.operators.declarations.specification import Attributes, Axes, Lowering, TensorSpec, Value
from exactqat.operators.reference import arrays as reference_arrays
from exactqat.operators.reference import computed

_TARGET = "exactqat"
_PATH = os.environ.get("EXACTQAT_JAX", "kernels")
if _PATH not in ("kernels", "portable"):
    raise ValueError(f"EXACTQAT_JAX must be 'kernels' or 'portable', got {_PATH!r}")
if _PATH == "kernels":
    jax.ffi.register_ffi_target(_TARGET, kernels.xla_handler(), platform="cpu")

# As the library calls functions of the host: with a number, and operands and results as addresses and shapes. What they
# return, if it is not None, is the program's error.
Answer = Callable[[int, list[tuple[int, tuple[int, ...]]], list[tuple[int, tuple[int, ...]]]], str | None]


@lru_cache(maxsize=1)
def host_target(answer: Answer) -> str | None:
    """The custom call (with an int64 attribute `function`, its number) that `answer` answers on XLA's own memory; None
    where there are no kernels for programs to call."""
    if _PATH != "kernels" or not hasattr(kernels, "xla_host_handler"):
        return None
    jax.ffi.register_ffi_target(f"{_TARGET}_host", kernels.xla_host_handler(answer), platform="cpu")
    return f"{_TARGET}_host"


State = TypeVar("State")
OfResult = TypeVar("OfResult")
Results = TypeVar("Results")
# A tangent that is zero has no array. What a rule of sharding is given of arrays.
Tangent = jax.Array | ad.Zero
Shaped = Sequence[jax.ShapeDtypeStruct]
# A call as XLA may cut it for several devices; None where it may not.
Parts = ClosedJaxpr | None

_CALL = Primitive("exactqat")  # a call of an operator
_TANGENTS = Primitive("exactqat_tangents")  # its derivative, a linear function of the operands' tangents
_CALL.multiple_results = _TANGENTS.multiple_results = True


def aval_of(array: jax.Array) -> ShapedArray:
    typeof = getattr(jax, "typeof", None) or getattr(jax.core, "get_aval")  # noqa: B009
    return typeof(array)


def _spec(array: jax.Array | ShapedArray) -> TensorSpec:
    return TensorSpec(tuple(array.shape), array.dtype.name)


def _lowered(op: Operator, specs: tuple[TensorSpec, ...], attributes: Attributes) -> Lowering:
    # Sizes may be symbols, which cannot be remembered.
    static = all(isinstance(size, int) for spec in specs for size in spec.shape)
    return op.lower(specs, attributes) if static else op.check(specs, attributes)


# Under `jax.shard_map` the type of an array says along which axes of the mesh it varies. Beside one that varies all
# others are cast to vary as well; the transposes of these casts are the sums over devices that gradients need.


def _varying(aval: ShapedArray) -> frozenset[str]:
    kind = getattr(aval, "manual_axis_type", None)  # from JAX 0.8
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying  # in JAX 0.7, in those before


def _cast(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _varying(aval_of(array))))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return getattr(jax.lax, "pvary")(array, missing)  # noqa: B009


def _cast_together(arrays: Iterable[jax.Array]) -> list[jax.Array]:
    # JAX hands over constants as NumPy arrays.
    arrays = [array if isinstance(array, jax.Array) else jnp.asarray(array) for array in arrays]
    axes = frozenset[str]().union(*[_varying(aval_of(array)) for array in arrays])
    return [_cast(array, axes) for array in arrays]


def placed_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """A value that came from the host, with the type of another one on the same mesh of one device, or on none."""
    aval = aval_of(like)
    array = _cast(array, _varying(aval))
    explicit = any(kind.name == "Explicit" for kind in getattr(aval.sharding.mesh, "axis_types", None) or ())
    return jax.sharding.reshard(array, aval.sharding) if explicit else array


def current_mesh() -> Mesh | None:
    """The mesh that programs are traced for, if there is one."""
    return getattr(jax.sharding, "get_abstract_mesh", lambda: None)()


def _representative(avals: Sequence[ShapedArray]) -> ShapedArray:
    """The type of an operand that says where in a mesh, if they are in one, this is computed."""
    return next((aval for aval in avals if not aval.sharding.mesh.empty), avals[0])


def _result_avals(
    like: ShapedArray, specs: Sequence[TensorSpec], shardings: Sequence[PartitionSpec]
) -> list[ShapedArray]:
    """Types that vary as `like`, the type of an operand, does."""
    return [
        like.update(
            shape=spec.shape,
            dtype=jnp.dtype(spec.dtype),
            weak_type=False,
            sharding=NamedSharding(like.sharding.mesh, sharding),
        )
        for spec, sharding in zip(specs, shardings, strict=True)
    ]


# The call.


def _bind(op: Operator, attributes: Attributes, over: int | None, *arrays: jax.Array) -> list[jax.Array]:
    """`over` is the operand that the first result may be written over."""
    arrays = tuple(_cast_together(arrays))
    parts = None
    if jax.device_count() > 1 and not getattr(mesh := current_mesh(), "manual_axes", ()):
        parts = _parts(op, attributes, over, tuple(_spec(array) for array in arrays), mesh)
    return _CALL.bind(*arrays, op=op, attributes=attributes, over=over, parts=parts)


_compiled = jax.jit(_bind, static_argnums=(0, 1, 2))


def _eager(op: Operator, attributes: Attributes, over: int | None, *arrays: jax.Array) -> list[jax.Array]:
    if not op.refusal_text or not op.may_refuse(dict(attributes)):
        return _compiled(op, attributes, over, *arrays)
    try:
        results = _compiled(op, attributes, over, *arrays)
        results[0].block_until_ready()  # a kernel's refusal arrives with the results
        return results
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # by where the kernel ran: here, or on another thread
        raise op.refusal(error, arrays, dict(attributes)) from None


@_CALL.def_impl
def _(*arrays: jax.Array, op: Operator, attributes: Attributes, over: int | None, parts: Parts) -> list[jax.Array]:
    with jax.disable_jit(False):  # which cannot be true of what is compiled already
        return _eager(op, attributes, over, *arrays)


@_CALL.def_abstract_eval
def _(*avals: ShapedArray, op: Operator, attributes: Attributes, over: int | None, parts: Parts) -> list[ShapedArray]:
    specs = tuple(_spec(aval) for aval in avals)
    results = list(_lowered(op, specs, attributes).results)
    like = _representative(avals)
    shardings = [PartitionSpec(*[None] * spec.rank) for spec in results]
    if any(any(aval.sharding.spec) for aval in avals):  # in an explicit mesh types say how arrays are spread
        wanted = [aval.sharding.spec for aval in avals]
        shardings = _Cutting(op, attributes, specs).cuts(like.sharding.mesh, wanted).results
    return _result_avals(like, results, shardings)


def _kernel(op: Operator, attributes: Attributes, over: int | None, *arrays: jax.Array) -> list[jax.Array]:
    lowered = _lowered(op, tuple(_spec(array) for array in arrays), attributes)
    results = [jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)) for spec in lowered.results]
    numbers: dict[str, np.generic | str] = {}
    late: dict[str, jax.Array] = {}  # sizes that are known when the call runs
    for name, value in lowered.numbers.items():
        if isinstance(value, int | float):
            numbers[name] = np.int64(value) if isinstance(value, int) else np.float64(value)
        else:
            late[name] = jnp.asarray(value)
    if late:
        numbers["late"] = ",".join(late)
    call = jax.ffi.ffi_call(_TARGET, results, input_output_aliases=None if over is None else {over: 0})
    return list(call(*arrays, *late.values(), kernel=lowered.kernel, **numbers))


def _lower_on_cpu(
    context: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    op: Operator,
    attributes: Attributes,
    over: int | None,
    parts: Parts,
) -> Sequence[mlir.ir.Value]:
    function = partial(_kernel, op, attributes, over) if parts is None else jaxpr_as_fun(parts)
    return mlir.lower_fun(function, multiple_results=True)(context, *values)


# Where there are no kernels XLA compiles the reference, which needs float64 whatever the program around it has.


def _with_float64() -> AbstractContextManager[object]:
    # Its place from JAX 0.8, and that before.
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else getattr(jax.experimental, "enable_x64")()  # noqa: B009


def _without_mesh() -> AbstractContextManager[object]:
    if not hasattr(jax.sharding, "use_abstract_mesh"):
        return nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _scanned(step: Callable[..., State], start: State, arrays: Sequence[jax.Array]) -> State:
    return jax.lax.scan(lambda state, items: (step(state, *items), None), start, arrays)[0]


reference_arrays.COMPILERS[jnp] = reference_arrays.Compiler(_scanned, jax.lax.optimization_barrier)


def _traced(op: Operator, attributes: Attributes, specs: tuple[TensorSpec, ...]) -> Callable[..., Sequence[jax.Array]]:
    """The reference of a call as a function that is traced once, and so becomes one function of a program."""
    lowered = _lowered(op, specs, attributes)

    def function(*arrays: jax.Array) -> list[jax.Array]:
        return computed(lowered, arrays)

    arguments = [jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)) for spec in specs]
    with _without_mesh():  # what is traced serves other programs, too
        return jax.jit(jaxpr_as_fun(jax.make_jaxpr(function)(*arguments)))


_traced_once = lru_cache(maxsize=4096)(_traced)


def _lower_elsewhere(
    context: mlir.LoweringRuleContext,
    *values: mlir.ir.Value,
    op: Operator,
    attributes: Attributes,
    over: int | None,
    parts: Parts,
) -> Sequence[mlir.ir.Value]:
    if parts is not None:
        return mlir.lower_fun(jaxpr_as_fun(parts), multiple_results=True)(context, *values)
    avals = cast(Sequence[ShapedArray], context.avals_in)
    specs = tuple(_spec(aval) for aval in avals)
    static = all(isinstance(size, int) for spec in specs for size in spec.shape)
    # What varies over which devices is known of the call, and of no interest inside.
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    with _with_float64():
        function = (_traced_once if static else _traced)(op, attributes, specs)
        sizes = _wide_sizes(context)
        return mlir.lower_fun(function, multiple_results=True)(
            context.replace(avals_in=plain, dim_var_values=sizes), *values
        )


def _wide_sizes(context: mlir.LoweringRuleContext) -> Sequence[mlir.ir.Value]:
    """The sizes that are known when the program runs as JAX passes them on where it has 64 bits."""
    sizes = context.dim_var_values
    if not sizes:
        return sizes
    avals = [jax.core.ShapedArray((), np.dtype(str(size.type.element_type).replace("i", "int"))) for size in sizes]

    def widened(*sizes: jax.Array) -> list[jax.Array]:
        return [jax.lax.convert_element_type(size, np.int64) for size in sizes]

    return mlir.lower_fun(widened, multiple_results=True)(context.replace(avals_in=avals), *sizes)


mlir.register_lowering(_CALL, _lower_on_cpu if _PATH == "kernels" else _lower_elsewhere, platform="cpu")
mlir.register_lowering(_CALL, _lower_elsewhere)


# Derivatives. Forward mode is `_TANGENTS`, the transpose of the declared gradient; reverse mode transposes it, which is
# the declared gradient itself. So both modes and any mixture of them come from one declaration.


class _Derivative(NamedTuple):
    """Which derivative: the operands of `_TANGENTS` are those of `op` that are `kept`, what is saved of its results,
    and the tangents of those that are `moving`."""

    op: Operator
    attributes: Attributes
    by_parts: bool
    kept: tuple[bool, ...]
    moving: tuple[bool, ...]
    results: tuple[TensorSpec, ...]
    shardings: tuple[PartitionSpec, ...]

    def differentiable(self, of_results: tuple[OfResult, ...]) -> list[OfResult]:
        """Those of the differentiable results."""
        return [of for of, name in zip(of_results, self.op.results, strict=True) if name in self.op.differentiable]

    def split(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """What is known, and the tangents."""
        known = len(arrays) - sum(self.moving)
        return list(arrays[:known]), list(arrays[known:])

    def gradients(self, known: list[jax.Array], incoming: Iterable[jax.Array]) -> list[jax.Array | None]:
        """The declared gradient of the moving operands; None is zero. `incoming`: for the differentiable results."""
        rest = iter(known)
        operands = [next(rest) if kept else None for kept in self.kept]
        cotangents = iter(incoming)
        complete = [
            next(cotangents) if name in self.op.differentiable else jnp.zeros(spec.shape, spec.dtype)
            for spec, name in zip(self.results, self.op.results, strict=True)
        ]
        vjp = self.op.vjp_by_parts if self.by_parts else self.op.vjp
        assert vjp is not None
        answer = vjp(tuple(complete[: self.op.gradient_count]), operands, tuple(rest), dict(self.attributes))
        return [gradient for gradient, moving in zip(answer, self.moving, strict=True) if moving]


def _like(array: jax.Array, aval: ShapedArray) -> jax.Array:
    return _cast(array.astype(aval.dtype), _varying(aval))


def _push(*arrays: jax.Array, derivative: _Derivative) -> list[jax.Array]:
    """The tangents of the results: the transpose of the gradient, which is linear in what arrives."""
    known, tangents = derivative.split(arrays)
    avals = [aval_of(tangent) for tangent in tangents]
    reached: list[int] = []

    def backward(*incoming: jax.Array) -> list[jax.Array]:
        answer = derivative.gradients(known, incoming)
        reached[:] = [i for i, gradient in enumerate(answer) if gradient is not None]
        return [_like(cast(jax.Array, answer[i]), avals[i]) for i in reached]

    zeros = [
        _cast(jnp.zeros(spec.shape, spec.dtype), _varying(avals[0]))
        for spec in derivative.differentiable(derivative.results)
    ]
    _, transpose = jax.vjp(backward, *zeros)
    return list(transpose([tangents[i] for i in reached]))


_compiled_push = jax.jit(_push, static_argnames="derivative")


@_TANGENTS.def_impl
def _(*arrays: jax.Array, derivative: _Derivative, parts: Parts) -> list[jax.Array]:
    return _compiled_push(*arrays, derivative=derivative)


@_TANGENTS.def_abstract_eval
def _(*avals: ShapedArray, derivative: _Derivative, parts: Parts) -> list[ShapedArray]:
    shardings = derivative.differentiable(derivative.shardings)
    return _result_avals(_representative(avals), derivative.differentiable(derivative.results), shardings)


def _zero(result: jax.Array) -> Tangent:
    return ad.Zero(aval_of(result).to_tangent_aval())


def _is_zero(tangent: Tangent) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    *,
    op: Operator,
    attributes: Attributes,
    over: int | None,
    parts: Parts,
) -> tuple[list[jax.Array], list[Tangent]]:
    if op.vjp is None:
        raise TypeError(f"{op.name} has no gradient")
    by_parts = parts is not None and op.vjp_by_parts is not None
    results = _bind(op if by_parts else op.training_form, attributes, None, *primals)
    saved = [] if by_parts else results[op.saved_results]
    results = results[: len(op.results)]
    moving = tuple(not _is_zero(tangent) for tangent in tangents)
    moved: Iterator[jax.Array] = iter(())
    if any(moving):
        kept = tuple(by_parts or name in op.keeps for name in op.operands)
        derivative = _Derivative(
            op,
            attributes,
            by_parts,
            kept,
            moving,
            tuple(_spec(result) for result in results),
            tuple(aval_of(result).sharding.spec for result in results),
        )
        known = [primal for primal, keep in zip(primals, kept, strict=True) if keep]
        directions = [tangent for tangent, moves in zip(tangents, moving, strict=True) if moves]
        moved = iter(_TANGENTS.bind(*known, *saved, *directions, derivative=derivative, parts=parts))
    return results, [
        next(moved) if any(moving) and name in op.differentiable else _zero(result)
        for name, result in zip(op.results, results, strict=True)
    ]


def _jvp_of_tangents(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, derivative: _Derivative, parts: Parts
) -> tuple[list[jax.Array], list[Tangent]]:
    bind = partial(_TANGENTS.bind, derivative=derivative, parts=parts)
    results = bind(*primals)
    known, _ = derivative.split(primals)
    terms = []
    linear = tangents[len(known) :]
    if not all(map(_is_zero, linear)):
        terms.append(bind(*known, *map(ad.instantiate_zeros, linear)))
    moving = [i for i, tangent in enumerate(tangents[: len(known)]) if not _is_zero(tangent)]
    if moving:

        def of_known(*values: jax.Array) -> list[jax.Array]:
            arrays = list(primals)
            for i, value in zip(moving, values, strict=True):
                arrays[i] = value
            return _push(*arrays, derivative=derivative)

        terms.append(jax.jvp(of_known, [primals[i] for i in moving], [tangents[i] for i in moving])[1])
    if not terms:
        return results, [_zero(result) for result in results]
    return results, [sum(term[1:], start=term[0]) for term in zip(*terms, strict=True)]


def _transpose_tangents(
    cotangents: Sequence[Tangent], *arrays: Any, derivative: _Derivative, parts: Parts
) -> list[jax.Array | None]:
    known, linear = derivative.split(arrays)
    gradients = derivative.gradients(known, [ad.instantiate_zeros(cotangent) for cotangent in cotangents])
    return [None] * len(known) + [
        _like(gradient, tangent.aval) if ad.is_undefined_primal(tangent) and gradient is not None else None
        for gradient, tangent in zip(gradients, linear, strict=True)
    ]


def _batch_tangents(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, derivative: _Derivative, parts: Parts
) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(partial(_push, derivative=derivative), in_axes=dims)(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_CALL] = _jvp
ad.primitive_jvps[_TANGENTS] = _jvp_of_tangents
ad.primitive_transposes[_TANGENTS] = _transpose_tangents
batching.primitive_batchers[_TANGENTS] = _batch_tangents
mlir.register_lowering(
    _TANGENTS,
    mlir.lower_fun(lambda *arrays, derivative, parts: _push(*arrays, derivative=derivative), multiple_results=True),
)


# vmap: one call for the whole batch where the declaration says how, one call for each member otherwise.


def _shape_with(spec: TensorSpec, place: int, factor: int) -> tuple[int, ...]:
    return (*spec.shape[:place], factor * spec.shape[place], *spec.shape[place + 1 :])


class _Fold(NamedTuple):
    """How a batch becomes a part of one dimension: of a new one in front (letter "."), or of those of one letter."""

    letter: str
    operands: list[int | None]  # the dimension it becomes a part of; None for an operand that has none of it
    results: list[
        int | None | str
    ]  # likewise; None for a result that is the same for all, "sum" for one that needs a loop


def _fold_along(letter: str, axes: Axes, mapped: list[bool], specs: tuple[TensorSpec, ...]) -> _Fold | None:
    def place(letters: str) -> int | None:
        if letter == ".":
            return 0 if letters[:1] in (".", "/") else None
        letters = letters.removeprefix(".")
        return letters.index(letter) if letter in letters else None

    every = (*axes.operands, *axes.results)
    if "/" in every:  # a byte holds elements of one member only if these fill it
        first = next(spec for spec, letters in zip(specs, axes.operands, strict=True) if letters.startswith("."))
        if letter != "." or first.size % 4:
            return None
    operands = [place(letters) for letters in axes.operands]
    if any(
        maps and where is None and letters != "-"
        for maps, where, letters in zip(mapped, operands, axes.operands, strict=True)
    ):
        return None
    results = [
        "sum" if letter in sums else place(letters) for letters, sums in zip(axes.results, axes.sums, strict=True)
    ]
    return _Fold(letter, operands, results) if any(isinstance(where, int) for where in results) else None


def _fold(
    op: Operator, attributes: Attributes, specs: tuple[TensorSpec, ...], mapped: list[bool]
) -> tuple[Axes, _Fold] | None:
    axes = op.axes_of(specs, attributes)
    if axes is None:
        return None
    letters = [letter for letter in dict.fromkeys([".", *"".join(axes.operands)]) if letter not in axes.whole + "/-"]
    folds = [fold for letter in letters if (fold := _fold_along(letter, axes, mapped, specs)) is not None]
    return (axes, min(folds, key=lambda fold: fold.results.count("sum"))) if folds else None


def _batch(
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    op: Operator,
    attributes: Attributes,
    over: int | None,
    parts: Parts,
) -> tuple[list[Any], list[int | None]]:
    size = next(array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None)
    mapped = [dim is not None for dim in dims]
    arrays = [a if dim is None else jnp.moveaxis(a, dim, 0) for a, dim in zip(arrays, dims, strict=True)]
    specs = tuple(TensorSpec(tuple(a.shape[maps:]), a.dtype.name) for a, maps in zip(arrays, mapped, strict=True))
    folding = _fold(op, attributes, specs, mapped)
    results: list[Any] = [None] * len(op.results)
    dimensions: list[int | None] = [0] * len(op.results)
    if folding is not None:
        axes, fold = folding
        folded = []
        for array, spec, maps, place, letters in zip(arrays, specs, mapped, fold.operands, axes.operands, strict=True):
            if maps and place is None:  # ignored
                array = jnp.zeros(spec.shape, spec.dtype)
            elif place is not None:
                array = array if maps else jnp.broadcast_to(array, (size, *spec.shape))
                if fold.letter != "." or letters == "/":
                    array = jnp.moveaxis(array, 0, place).reshape(_shape_with(spec, place, size))
            folded.append(array)
        enlarged = {
            name: _shape_with(TensorSpec(cast(tuple[int, ...], value), ""), axes.sizes[name].index(fold.letter), size)
            for name, value in attributes
            if fold.letter in axes.sizes.get(name, "")
        }
        changed = tuple((name, enlarged.get(name, value)) for name, value in attributes)
        own = _lowered(op, specs, attributes).results
        for i, (result, spec, where, letters) in enumerate(
            zip(_bind(op, changed, over, *folded), own, fold.results, axes.results, strict=True)
        ):
            if where is None:
                results[i], dimensions[i] = result, None
            elif isinstance(where, int):
                if fold.letter != "." or letters == "/":
                    shape = (*spec.shape[:where], size, *spec.shape[where:])
                    result = jnp.moveaxis(result.reshape(shape), where, 0)
                results[i] = result
    missing = [i for i, result in enumerate(results) if result is None]
    if missing:

        def one(members: Sequence[jax.Array]) -> list[jax.Array]:
            rest = iter(members)
            answer = _bind(op, attributes, None, *[next(rest) if m else a for a, m in zip(arrays, mapped, strict=True)])
            return [answer[i] for i in missing]

        looped = jax.lax.map(one, [array for array, maps in zip(arrays, mapped, strict=True) if maps])
        for i, result in zip(missing, looped, strict=True):
            results[i] = result
    return results, dimensions


batching.primitive_batchers[_CALL] = _batch


# Sharding: each device calls the kernel on its part where the declaration says how; what is a sum is added up.

# Whether this JAX lets XLA cut a call as the call says.
CAN_CUT = "sharding_rule" in inspect.signature(custom_partitioning.def_partition).parameters

Cuts = dict[str, tuple[str, ...]]  # the axes of the mesh along which the dimensions of a letter are cut


class _Cut(NamedTuple):
    """A call in parts: what is cut how."""

    along: Cuts
    operands: list[PartitionSpec]
    results: list[PartitionSpec]


class _Cutting:
    """How a call may be cut."""

    def __init__(self, op: Operator, attributes: Attributes, specs: tuple[TensorSpec, ...]):
        results = _lowered(op, specs, attributes).results
        nothing = Axes(("",) * len(specs), ("",) * len(results), ("",) * len(results))
        self.axes = axes = op.axes_of(specs, attributes) or nothing
        self.operands = list(zip(axes.operands, specs, strict=True))
        self.results = list(zip(axes.results, results, strict=True))
        # The letters along which something can be cut, and their sizes. A mask is one of the whole tensor.
        self.sizes: dict[str, int] = {}
        never = {"?", "-"} if op.parts_rule is not None else {"?", "-", *axes.whole}
        for letters, spec in (*self.operands, *self.results):
            for letter, size in zip(letters.removeprefix("."), spec.shape, strict=False):
                if size == 0 or self.sizes.setdefault(letter, size) != size:
                    never.add(letter)
        masked = any(letters == "/" for letters, _ in (*self.operands, *self.results))
        self.sizes = {} if masked else {letter: size for letter, size in self.sizes.items() if letter not in never}

    def cuts(self, mesh: Mesh, wanted: Sequence[PartitionSpec]) -> _Cut:
        """As the first array that has a letter wishes. `wanted`: for the operands and, where known, the results."""
        cuts: Cuts = {}
        for (letters, _), specification in zip((*self.operands, *self.results), wanted, strict=False):
            for letter, entry in zip(letters.removeprefix("."), specification, strict=False):
                names = (entry,) if isinstance(entry, str) else entry
                if letter not in self.sizes or letter in cuts or not isinstance(names, tuple) or not names:
                    continue
                taken = any(name in used for used in cuts.values() for name in names)
                if not taken and self.sizes[letter] % math.prod(mesh.shape[name] for name in names) == 0:
                    cuts[letter] = names

        def specification_of(letters: str, spec: TensorSpec) -> PartitionSpec:
            entries = [cuts.get(letter) for letter in letters.removeprefix(".")]
            entries = (entries + [None] * spec.rank)[: spec.rank]
            return PartitionSpec(*[names[0] if names and len(names) == 1 else names for names in entries])

        return _Cut(cuts, *([specification_of(*array) for array in arrays] for arrays in (self.operands, self.results)))

    def rule(self) -> SdyShardingRule:
        """The same for XLA's own propagation."""
        whole: list[str] = []

        def factors(letters: str, spec: TensorSpec) -> ArrayMapping:
            names = []
            for i in range(spec.rank):
                letter = letters.removeprefix(".")[i : i + 1]
                if letter not in self.sizes:
                    whole.append(f"whole{len(whole)}")
                names.append(letter if letter in self.sizes else whole[-1])
            return ArrayMapping(*names)

        operands, results = (tuple(factors(*array) for array in arrays) for arrays in (self.operands, self.results))
        return SdyShardingRule(operands, results, need_replication_factors=tuple(whole))


@lru_cache(maxsize=4096)
def _parts(
    op: Operator, attributes: Attributes, over: int | None, specs: tuple[TensorSpec, ...], _mesh: Mesh | None
) -> Parts:
    """The call as XLA may cut it for several devices; None where it may not."""
    if not CAN_CUT or not all(isinstance(size, int) for spec in specs for size in spec.shape):
        return None
    cutting = _Cutting(op, attributes, specs)
    axes = cutting.axes

    def alone(attributes: Attributes, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return _CALL.bind(*arrays, op=op, attributes=attributes, over=over, parts=None)

    def cut_as(mesh: Mesh, inputs: Shaped, asked: Shaped = ()) -> _Cut:
        if not all(isinstance(array.sharding, NamedSharding) for array in inputs):
            raise NotImplementedError(f"{op.name}: exactqat only supports shardings over a jax.sharding.Mesh")
        return cutting.cuts(mesh, [array.sharding.spec for array in (*inputs, *asked)])

    def partition(mesh: Mesh, inputs: Shaped, asked: Shaped) -> tuple[Any, ...]:
        cut = cut_as(mesh, inputs, asked)

        def across(letters: str) -> tuple[str, ...]:
            return tuple(name for letter in letters for name in cut.along.get(letter, ()))

        smaller = {
            name: tuple(
                size // math.prod(mesh.shape[axis] for axis in across(letter))
                for size, letter in zip(cast(tuple[int, ...], value), axes.sizes[name], strict=True)
            )
            for name, value in attributes
            if name in axes.sizes
        }
        local = tuple((name, smaller.get(name, value)) for name, value in attributes)

        def on_each_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            if (tied := across(axes.whole)) and op.parts_rule is not None:
                total = partial(jax.lax.psum, axis_name=tied)
                return tuple(op.parts_rule(total, arrays, dict(local))[: len(op.results)])
            answer = alone(local, arrays)
            return tuple(
                jax.lax.psum(result, names) if (names := across(sums)) else result
                for result, sums in zip(answer, axes.sums, strict=True)
            )

        operands, results = (
            tuple(NamedSharding(mesh, entry) for entry in entries) for entries in (cut.operands, cut.results)
        )
        return mesh, on_each_device, results, operands

    def infer(mesh: Mesh, inputs: Shaped, asked: Shaped) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, entry) for entry in cut_as(mesh, inputs).results)

    @custom_partitioning
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(alone(attributes, arrays))

    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=cutting.rule())
    return jax.make_jaxpr(call)(*[jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)) for spec in specs])


# Replicas in a named axis, as inside `jax.shard_map`: what ties a batch together may be taken over all of them.


class _Context:
    """What `jax.make_user_context` gives, which older versions of JAX do not have; there traces that are kept do not
    know of it."""

    def __init__(self) -> None:
        self._variable: ContextVar[Any] = ContextVar("replicas", default=None)

    @property
    def value(self) -> Any:
        return self._variable.get()

    @contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


_replicas: Any = jax.make_user_context(None) if hasattr(jax, "make_user_context") else _Context()


@contextmanager
def synchronized(axis_name: Hashable | tuple[Hashable, ...]) -> Iterator[None]:
    """Within this context, batch statistics in training are computed over all replicas' batches.

    For functions that run in a named axis, such as batch norm inside `jax.shard_map`, `jax.pmap` or
    `jax.vmap(..., axis_name=...)`, where each replica has its share of the batch. Gradients, forward mode and second
    derivatives are those of the whole batch as well, up to the last bits: each replica's sums are in the library's
    order and rounded, then JAX adds them. Direct calls of gradient operators are summed likewise. Operators that do not
    depend on the batch as a whole are unchanged.

    Args:
        axis_name: name of the axis, or a tuple of names.
    Raises:
        TypeError: not a name. ValueError, by the operator: there is no such axis.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or any(name is None for name in names):
        raise TypeError(f"axis_name must be the name of an axis or a tuple of names, got {axis_name!r}")
    with _replicas(names):
        yield


def replicas() -> tuple[Hashable, ...] | None:
    """The axes of the `synchronized` that is being traced, None outside of one.

    Raises:
        ValueError: an axis that is not there.
    """
    names: tuple[Hashable, ...] | None = _replicas.value
    if names is not None:
        try:
            jax.lax.axis_index(names)
        except NameError as error:
            raise ValueError(
                f"synchronized({', '.join(map(repr, names))}) is for functions that run in such an axis, such as "
                f"inside jax.shard_map, jax.pmap or jax.vmap(..., axis_name=...): {error}"
            ) from None
    return names


def _over_replicas(op: Operator, attributes: Attributes, arrays: list[jax.Array]) -> tuple[jax.Array, ...] | None:
    """The results with the sums of all replicas, None if those of one are all that is asked for."""
    if _replicas.value is None or op.parts_rule is None:
        return None
    specs = tuple(_spec(array) for array in arrays)
    _lowered(op, specs, attributes)
    axes = op.axes_of(specs, attributes)
    if axes is None or not set(axes.whole) - {"?"}:
        return None
    try:
        names = replicas()
    except ValueError as error:
        raise ValueError(f"{op.name}: {error}") from error.__cause__
    total = partial(jax.lax.psum, axis_name=names)
    return tuple(op.parts_rule(total, tuple(arrays), dict(attributes))[: len(op.results)])


# The frontend.


def declared(name: str) -> Operator:
    """An operator that does several steps of training in one pass, on the CPU."""
    return OPERATORS[name]


def call(
    op: Operator, operands: list[object], attributes: dict[str, Value], out: tuple[object, ...] | None = None
) -> Any:
    """Run `op` on JAX arrays.

    NumPy arrays become JAX arrays, and others where their dtypes do not fit; numbers, lists and weakly typed arrays
    become float64 beside a float64 array, else float32. `out`: as JAX arrays never change, only the operand that the
    first result may be written over, to say that XLA should do so.
    """
    arrays: list[Any] = []
    strong, later = [], []
    for i, value in enumerate(operands):
        if not isinstance(value, jax.Array):
            if isinstance(value, _NUMBERS) or not is_array_like(value):
                arrays.append(value)
                later.append(i)
                continue
            value = _array(op, i, value, None)
        arrays.append(value)
        if not hasattr(value, "weak_type"):  # random keys
            raise TypeError(f"{op.name}: {op.operands[i]} must contain numbers, got {value.dtype}")
        if value.weak_type:
            later.append(i)
        else:
            strong.append(value.dtype)
    dtype = jnp.float64 if strong[:1] == [jnp.float64] else jnp.float32
    for i in later:
        if strong or not isinstance(arrays[i], jax.Array):
            arrays[i] = _array(op, i, arrays[i], dtype)
    # Outside of a trace JAX would trace the call every time, which takes a hundred times longer than to look it up.
    run = _bind if any(isinstance(array, jax.core.Tracer) for array in arrays) else _eager
    over = _over(op, operands, out)
    try:
        together = _over_replicas(op, tuple(attributes.items()), arrays)
        return op.wrap(together if together is not None else run(op, tuple(attributes.items()), over, *arrays))
    except TypeError:
        fitted = _fitted(op, operands, arrays)
        if all(array.dtype == before.dtype for array, before in zip(fitted, arrays, strict=True)):
            raise
    return op.wrap(run(op, tuple(attributes.items()), over, *fitted))


_NUMBERS = (float, int, list, tuple, np.generic)


def _array(op: Operator, index: int, value: Any, dtype: DTypeLike | None) -> jax.Array:
    if type(value) in (float, int):
        value = float(value)
        if dtype is jnp.float32 and abs(value) >= FLOAT32_LIMIT:
            value = math.copysign(math.inf, value)
        return jnp.asarray(value, dtype)
    if isinstance(value, jax.Array):
        return jnp.asarray(value, dtype)
    try:
        with np.errstate(over="ignore"):  # a number beyond float32 is infinite there
            if not isinstance(value, _NUMBERS):
                value = guest(op, op.operands[index], np.asarray(value))
            return jnp.asarray(value, dtype)
    except (ValueError, TypeError) as error:
        raise unreadable(op, op.operands[index], error) from None


def _fitted(op: Operator, operands: list[object], arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays of a call whose dtypes do not fit, with what came as NumPy arrays, lists and numbers like the rest."""
    own = [v.dtype.name if isinstance(v, jax.Array) and not v.weak_type else None for v in operands]
    kept = [dtype for dtype in own if dtype]
    fitting = dtypes_that_fit(op, own, "float64" if kept[:1] == ["float64"] else "float32")
    return [
        _array(op, i, operand, dtype) if mine is None and array.dtype.kind != "c" else array
        for i, (operand, array, mine, dtype) in enumerate(zip(operands, arrays, own, fitting, strict=True))
    ]


def _over(op: Operator, operands: list[object], out: tuple[object, ...] | None) -> int | None:
    if out is None:
        return None
    for i, (name, operand) in enumerate(zip(op.operands, operands, strict=True)):
        if name in op.reuses and operand is out[0] and all(other is None for other in out[1:]):
            return i
    allowed = " or ".join(op.reuses) or "no operand of this operator"
    raise TypeError(
        f"{op.name}: out cannot be used with JAX arrays, which never change, except to name the operand whose memory "
        f"XLA may write the first result into ({allowed}), with None for other results"
    )


def pass_through(function: Callable[..., Results], arrays: tuple[jax.Array, ...]) -> Results:
    """`function(*arrays)`, through which gradients pass unchanged, output by output."""
    values = jax.lax.stop_gradient(function(*arrays))
    leaves, tree = jax.tree.flatten(values)

    @jax.custom_jvp
    def passing(arrays: Sequence[jax.Array], leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return leaves

    @passing.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        arrays, leaves = primals
        return leaves, [_like(tangent, aval_of(leaf)) for tangent, leaf in zip(tangents[0], leaves, strict=True)]

    together = _cast_together([*arrays, *leaves])
    return jax.tree.unflatten(tree, passing(together[: len(arrays)], together[len(arrays) :]))
