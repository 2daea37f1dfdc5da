# SPDX-License-Identifier: Apache-2.0
"""TensorFlow tensors in, TensorFlow tensors out: its own operators where they support the call, ours elsewhere.

The declarations list those calls (`Operator.in_tensorflow`). docs/decisions/tensorflow.md explains why.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from exactqat.operators.declarations.dispatch import arrays_in, framework_of, frontend, is_array_like
from exactqat.operators.declarations.memory import dtypes_that_fit, guest, unreadable
from exactqat.operators.declarations.op import Operator
from exactqat.operators.declarations.specification import Attributes, InTensorFlow, TensorSpec, Value

Function = Callable[..., list[tf.Tensor]]
# With its gradient, for `tf.custom_gradient`.
Differentiable = tuple[list[tf.Tensor], Callable[..., list[tf.Tensor | None]]]

# What its operators say to a call that they do not take; others, as of memory that is used up, are the caller's.
_REFUSALS = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
    tf.errors.AbortedError,  # oneDNN's
    ValueError,
    TypeError,
    OverflowError,
)


# Operands.


def _tensor(op: Operator, name: str, value: object, dtype: tf.DType) -> tf.Tensor:
    """Of anything that is not a tensor of its own."""
    if isinstance(value, list | tuple) and arrays_in(value):
        return tf.stack([_tensor(op, name, entry, dtype) for entry in value])  # which hands on gradients
    if framework_of(value) == "tensorflow":
        return tf.cast(value, dtype)
    if is_array_like(value) and not isinstance(value, np.generic):
        value = guest(op, name, np.asarray(value))
    with np.errstate(over="ignore"):  # a number beyond float32 is infinite there
        return tf.constant(np.asarray(value).astype(dtype.as_numpy_dtype))


def _tensors(op: Operator, operands: list[object]) -> list[tf.Tensor]:
    """All others become what goes with the tensors: ranges at least float32, data like the data."""
    tensors = list(operands)
    for i, (name, value) in enumerate(zip(op.operands, operands, strict=True)):
        if framework_of(value) == "tensorflow":
            if isinstance(value, tf.SparseTensor | tf.RaggedTensor | tf.IndexedSlices):
                raise TypeError(f"{op.name}: {name} must be a dense tensor, got a {type(value).__name__}")
            tensors[i] = tf.convert_to_tensor(value)
    kept = [value.dtype.name if isinstance(value, tf.Tensor) else None for value in tensors]
    fitting = dtypes_that_fit(
        op, kept, "float64" if [dtype for dtype in kept if dtype][:1] == ["float64"] else "float32"
    )
    for i, (name, value, wanted) in enumerate(zip(op.operands, tensors, fitting, strict=True)):
        if not isinstance(value, tf.Tensor):
            try:
                tensors[i] = _tensor(op, name, value, tf.as_dtype(wanted))
            except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
                raise unreadable(op, name, error) from None
    return tensors


# Checks. In a graph sizes may not be known yet. Then the call is checked with others in their place, and what is the
# same with each of them is taken for known.


class _Checked(NamedTuple):
    """A call that passed the checks, or that only running it can check. `representative`: its operands with all sizes
    known."""

    representative: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    shapes: list[Sequence[int | None] | None]  # of the results, as far as they are known


def _check(op: Operator, tensors: list[tf.Tensor], attributes: Attributes) -> _Checked:
    shapes = [tensor.shape for tensor in tensors]
    specs: tuple[TensorSpec, ...] = ()
    if all(shape.is_fully_defined() for shape in shapes):
        specs = tuple(TensorSpec(tuple(t.shape), t.dtype.name) for t in tensors)
        results = op.lower(specs, attributes).results
        return _Checked(specs, results, [spec.shape for spec in results])
    known = {size for shape in shapes if shape.rank is not None for size in shape if size}
    passed: list[_Checked] = []
    stand_ins: set[int] = set()  # the sizes they passed with
    errors: list[Exception] = []
    # First some that filters fit into and that arrays can be made with.
    ranks_known = all(shape.rank is not None for shape in shapes)
    for size, rank, alike in product(
        (19, 23, *sorted(known, reverse=True)), (0,) if ranks_known else (4, 1, 5, 0), (True, False)
    ):
        filled = [_filled(shape, shapes if alike else (), size, rank) for shape in shapes]
        specs = tuple(TensorSpec(shape, t.dtype.name) for shape, t in zip(filled, tensors, strict=True))
        try:
            passed.append(_Checked(specs, op.lower(specs, attributes).results, []))
        except (ValueError, TypeError) as error:
            errors.append(error)
        else:
            stand_ins.add(size)
    if passed:
        every = zip(*[trial.results for trial in passed], strict=True)
        return passed[0]._replace(shapes=[_common(result, stand_ins) for result in every])
    if len({str(error) for error in errors}) == 1:  # it is not about the sizes
        raise errors[0]
    if len(op.results) > 1:
        known_shapes = ", ".join(f"{name} {shape}" for name, shape in zip(op.operands, shapes, strict=True))
        raise ValueError(f"{op.name}: the shapes of its operands are not sufficiently known: {known_shapes}")
    return _Checked(specs, (TensorSpec((), tensors[0].dtype.name),), [None])


def _filled(shape: tf.TensorShape, others: Sequence[tf.TensorShape], size: int, rank: int) -> tuple[int, ...]:
    """A shape with its unknown sizes as in others of its rank, where they are known there, else `size`."""
    if shape.rank is None:
        return (size,) * rank
    sizes = list(shape)
    for other in others:
        if other.rank == shape.rank:
            sizes = [theirs if own is None else own for own, theirs in zip(sizes, other, strict=True)]
    return tuple(size if n is None else n for n in sizes)


def _common(specs: Sequence[TensorSpec], stand_ins: set[int]) -> list[int | None] | None:
    """The shape that a result has with all sizes that were tried; a single one tells nothing where it is met."""
    if len({spec.rank for spec in specs}) > 1:
        return None
    unknown = stand_ins if len(stand_ins) == 1 else set()
    return [
        sizes[0] if len(set(sizes)) == 1 and sizes[0] not in unknown else None
        for sizes in zip(*[spec.shape for spec in specs], strict=True)
    ]


# TensorFlow's own operators.


def _run_theirs(op: Operator, attributes: Attributes, answer: InTensorFlow, *tensors: tf.Tensor) -> list[tf.Tensor]:
    results = getattr(tf.raw_ops, str(op.raw_name))(**dict(zip(op.operands, tensors, strict=True)), **dict(attributes))
    results = list(results) if isinstance(results, tuple) else [results]
    for name, operand in answer.unwritten.items():
        results[op.results.index(name)] = tf.identity(tensors[op.operands.index(operand)])
    if answer.nan_over:
        nan = tf.constant(np.nan, results[0].dtype)
        spread = tf.reduce_any(tf.math.is_nan(tensors[0]), answer.nan_over, keepdims=True)
        results[0] = tf.where(spread, nan, results[0])
    return results


@lru_cache(maxsize=4096)
def _is_taken(op: Operator, specs: tuple[TensorSpec, ...], attributes: Attributes) -> bool:
    """Whether this build of TensorFlow supports such a call on this machine; tried with zeros."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            return False
        try:
            _run_theirs(op, attributes, InTensorFlow(False), *[tf.zeros(spec.shape, spec.dtype) for spec in specs])
        except (tf.errors.OpError, *_REFUSALS):
            return False
        return True


def _answer(op: Operator, tensors: list[tf.Tensor], checked: _Checked, attributes: Attributes) -> InTensorFlow | None:
    """How TensorFlow answers the call, None if it does not, or not for every rank that an operand may turn out to have:
    some end the process."""
    if op.tensorflow_rule is None:
        return None
    operands = dict(zip(op.operands, checked.representative, strict=True))
    answer = op.tensorflow_rule(checked.results, **operands, **dict(attributes))
    if answer is None:
        return None
    if any(t.shape.rank is None and name not in answer.opaque for name, t in zip(op.operands, tensors, strict=True)):
        return None
    if answer.everywhere or tf.executing_eagerly():
        return answer
    return answer if _is_taken(op, checked.representative, attributes) else None


def _theirs(op: Operator, tensors: list[tf.Tensor], attributes: Attributes, answer: InTensorFlow) -> list[tf.Tensor]:
    run = partial(_run_theirs, op, attributes, answer)
    if answer.gradients:
        return run(*tensors)
    return _with_gradient(op, op, attributes, run, tensors)


# Ours: as it is where tensors have values, in a graph by a call of Python.


def _run_on_arrays(op: Operator, attributes: Attributes, *tensors: tf.Tensor) -> list[tf.Tensor]:
    results = frontend("numpy").call(op, [np.asarray(tensor.numpy()) for tensor in tensors], dict(attributes))
    return [tf.constant(result) for result in (results if len(op.results) > 1 else (results,))]


def _ours(op: Operator, attributes: Attributes, *tensors: tf.Tensor) -> list[tf.Tensor]:
    form = op if op.vjp_by_parts is not None else op.training_form
    return _with_gradient(op, form, attributes, partial(_run_on_arrays, form, attributes), list(tensors))


def _on_host(
    function: Function, tensors: list[tf.Tensor], dtypes: list[tf.DType], shapes: Sequence[object]
) -> list[tf.Tensor]:
    """`function` of tensors that have values, which can be differentiated there, as a part of a graph, with gradients
    of every order."""

    @tf.custom_gradient
    def run(*tensors: tf.Tensor) -> Differentiable:
        def on_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
            return [result.numpy() for result in function(*map(tf.constant, arrays))]

        results = tf.numpy_function(on_arrays, tensors, dtypes, stateful=False)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)

        def gradient(*incoming: tf.Tensor) -> list[tf.Tensor]:
            def backward(*tensors_and_incoming: tf.Tensor) -> list[tf.Tensor]:
                operands = tensors_and_incoming[: len(tensors)]
                with tf.GradientTape() as tape:
                    tape.watch(operands)
                    answers = function(*operands)
                return tape.gradient(
                    answers,
                    operands,
                    tensors_and_incoming[len(tensors) :],
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )

            every = [*tensors, *incoming]
            return _on_host(backward, every, [t.dtype for t in tensors], [t.shape for t in tensors])

        return results, gradient

    return list(run(*tensors))


def _with_gradient(
    op: Operator, form: Operator, attributes: Attributes, run: Function, tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """What `run` makes of the tensors, which is what `form`, the operator or its training form, does, with the declared
    gradient."""

    @tf.custom_gradient
    def call(*tensors: tf.Tensor) -> Differentiable:
        results = run(*tensors)

        def gradient(*incoming: tf.Tensor) -> list[tf.Tensor | None]:
            vjp = op.vjp_by_parts if op.vjp_by_parts is not None else op.vjp
            if vjp is None:
                raise TypeError(f"{op.name} has no gradient")
            for cotangent, result in zip(incoming, results, strict=True):
                cotangent.set_shape(result.shape)  # graphs lose it on the way
            saved = () if op.vjp_by_parts is not None else tuple(results[op.saved_results])
            answer = vjp(tuple(incoming[: op.gradient_count]), list(tensors), saved, dict(attributes))
            return [
                None if part is None else cast(part, tensor.dtype) for part, tensor in zip(answer, tensors, strict=True)
            ]

        return results, gradient

    return list(call(*tensors))[: len(op.results)]


# The frontend.


def call(
    op: Operator, operands: list[object], attributes: dict[str, Value], out: tuple[object, ...] | None = None
) -> Any:
    """Run `op` on TensorFlow's tensors and variables.

    NumPy arrays, lists and numbers mixed with them become tensors. There is no `out`, as tensors never change.
    """
    if out is not None:
        raise TypeError(f"{op.name}: out cannot be used with TensorFlow tensors, which never change")
    tensors = _tensors(op, operands)
    pairs = tuple(attributes.items())
    checked = _check(op, tensors, pairs)
    answer = _answer(op, tensors, checked, pairs)
    if answer is not None:
        try:
            return op.wrap(_theirs(op, tensors, pairs, answer))
        except _REFUSALS:
            pass
    if tf.executing_eagerly():
        return op.wrap(_ours(op, pairs, *tensors))
    dtypes = [tf.as_dtype(spec.dtype) for spec in checked.results]
    return op.wrap(_on_host(partial(_ours, op, pairs), tensors, dtypes, checked.shapes))


def pass_through(function: Callable[..., Any], arrays: tuple[tf.Tensor, ...]) -> Any:
    """`function(*arrays)`, through which gradients pass unchanged, output by output."""
    return tf.grad_pass_through(function)(*arrays)


def cast(tensor: tf.Tensor, dtype: tf.DType | str) -> tf.Tensor:
    """For rules that are the same in every framework."""
    return tf.cast(tensor, dtype)


def reshape(tensor: tf.Tensor, shape: Sequence[int | None]) -> tf.Tensor:
    """Likewise."""
    return tf.reshape(tensor, [-1 if size is None else size for size in shape])


def positions(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Likewise."""
    return tf.cast(tf.maximum(tf.size(tensor) // tf.maximum(tf.shape(tensor)[axis], 1), 1), tensor.dtype)
