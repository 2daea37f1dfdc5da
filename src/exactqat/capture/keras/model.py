# SPDX-License-Identifier: Apache-2.0
"""A Keras 3 model as a `Network`: `capture` reads the graph that Keras itself records, on any of its backends.

The model is called on symbolic tensors in training; what Keras writes down are layers and operations. Layers with
weights that Keras knows are steps, unless a part of them is the user's own; others are called in turn, until nothing
but operations of `keras.ops` is left, and once more in evaluation, which must give the same but for what is dropped at
random. Two sizes of batch stand in for all: where they give two networks, the model computes with the batch's size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import keras
from keras import tree

from ...planning.inputs import misfit_of_example, with_own_sizes
from ...planning.network import Network, Place
from ..core.builder import free_name
from ..core.comparison import first_difference
from ..core.refusals import CaptureError, Refused, text_of
from ..core.safeguards import SAFEGUARDS
from ..core.stand_ins import DIVISIBLE, MULTIPLES, PRIMES, fitting
from ..core.watched import Watch

# Their handlers enter themselves into the converter's tables.
from . import elementwise, movement, noise, normalization, reduction, refused, sequence, weights  # noqa: F401
from .converter import Converter
from .items import InTraining, Item, first_line, same_constant
from .known import is_seed, path_of
from .questions import watching
from .symbols import ChangesWeight, DrawsNumbers, with_symbols
from .tree import Tree, flat_shapes, input_words, output_words, packed

# Of inputs that are masks, numbers of words or the like; other integers are images.
_WHOLE = ("bool", "int32", "int64")

__all__ = ["CaptureError", "InTraining", "capture", "first_line", "is_seed", "variable_names"]


def variable_names(model: Any) -> dict[int, str]:
    """Names of a model's variables by identity: their paths, with dots."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for variable in model.variables:
        if id(variable) in names:
            continue
        path = variable.path.replace("/", ".")
        own = path.removeprefix(f"{model.name}.")
        name = free_name(own, taken)
        names[id(variable)] = name
        taken.add(name)
    return names


def capture(
    model: Any, shapes: Any, names: Mapping[int, str], losses: list[str] | None = None, dtypes: Sequence[str] = ()
) -> Network:
    """The network that a built model computes in evaluation, for a batch of any size.

    Args:
        shapes: a tuple for each input, nested as the model takes them, the batch in front (its size does not matter).
        dtypes: of a model that does not say of what its inputs are: of each input, in the order of `shapes`.
        names: of variables; see `variable_names`.
        losses: gets the paths of layers that add a loss of what they compute, which no network holds.

    Raises:
        CaptureError: the model cannot be called on symbolic tensors.
    """
    known = [size for shape in flat_shapes(shapes) for size in shape[1:]]
    known += [size for each in model.variables for size in each.shape]

    large, small = fitting(PRIMES, known), fitting(DIVISIBLE, known)
    if not SAFEGUARDS.batch:
        return _captured(model, shapes, dtypes, names, losses, large[0])
    sizes = {"large": large, "small": small or large[2:], "multiple": fitting(MULTIPLES, known)}
    made: dict[str, Network | CaptureError] = {}
    words, watch = list(sizes), Watch(known)
    for attempt in range(3):
        for word in words:
            if attempt >= len(sizes[word]):
                continue
            try:
                kept = losses if not made else None
                made[word] = _captured_watching(model, shapes, dtypes, names, kept, sizes[word][attempt], watch)
            except CaptureError as error:
                made[word] = error
        first, *others = made.values()
        if all(isinstance(each, CaptureError) for each in made.values()) and isinstance(first, CaptureError):
            raise first
        place = None
        networks = [each for each in others if isinstance(each, Network)]
        if isinstance(first, Network) and len(networks) == len(others):
            place = next((found for each in networks if (found := _difference(first, each)) is not None), None)
            if place is None:
                for asked in watch.to_try(each for word in words for each in sizes[word]):
                    first.input_tree.asked.append(asked)
                    with suppress(CaptureError, Refused):
                        # Its sizes may be the model's own: what counts is what is asked on the way.
                        _captured_watching(model, shapes, dtypes, names, None, asked.examples, watch)
                return first
        # A size of the model's own may happen to be a multiple of a stand-in: then something is refused.
        words = [word for word, each in made.items() if isinstance(each, CaptureError) or _refuses(each)]
        if not words:
            break
    changes = None
    with suppress(CaptureError):
        # With as many examples as before.
        again = [_captured(model, shapes, dtypes, names, None, sizes["large"][0]) for _ in range(2)]
        changes = _difference(*again)
    if changes is not None:
        raise CaptureError(
            f"{changes} computes something else each time it is called (a counter, a clock, random numbers of "
            "Python's); the device computes the same at every call"
        )
    raise CaptureError(f"{place or 'the model'} computes with the size of the batch, which is another in use")


def _refuses(network: Network) -> bool:
    return any(step.kind == "unsupported" for step in network.steps)


def _difference(one: Network, other: Network) -> Place | None:
    """Where two networks of one model differ first."""
    found = first_difference(
        one,
        other,
        lambda a, b: repr(a) == repr(b),
        lambda a, b: same_constant(a.name, b.name, one.constants, other.constants),
        ignored=("expression",),
    )
    step = None if found is None else found.one or found.other
    return None if found is None else Place(path="the model") if step is None else step.place


def _captured_watching(
    model: Any,
    shapes: Any,
    dtypes: Sequence[str],
    names: Mapping[int, str],
    losses: list[str] | None,
    examples: int,
    watch: Watch,
) -> Network:
    """The network; where layers ask for sizes, once more with plain ones, as Keras does not take all others."""
    asked, watch.handed_out = watch.handed_out, False
    found: Network | None = None
    try:
        found = _captured(model, shapes, dtypes, names, losses, examples, watch)
    except CaptureError as error:
        if not watch.handed_out:
            raise
        watch.read_code(error)
    again, watch.handed_out = watch.handed_out, watch.handed_out or asked
    if found is not None and not again:
        return found
    if losses is not None:
        losses.clear()
    return _captured(model, shapes, dtypes, names, losses, examples)


def _captured(
    model: Any,
    shapes: Any,
    dtypes: Sequence[str],
    names: Mapping[int, str],
    losses: list[str] | None,
    prime: int,
    watch: Watch | None = None,
) -> Network:
    """The network, traced with `prime` examples. watch: of the sizes for which layers ask."""
    c = Converter(prime, names)
    flat = flat_shapes(shapes)
    paths = [f"argument_{at}" for at in range(len(flat))]
    functional = getattr(model, "_functional", None) or model
    inputs_ = getattr(functional, "_inputs", None) or []
    words_ = [str(each.dtype) for each in inputs_] or list(dtypes) or ["float32"] * len(flat)
    given_ = [
        c.input(path, (prime, *shape[1:]), word if word in _WHOLE else "float32")
        for path, shape, word in zip(paths, flat, words_, strict=True)
    ]
    c.whole_inputs = {path for path, word in zip(paths, words_, strict=True) if "int" in word}
    given = packed(shapes, given_)
    seeds = [(each, keras.ops.convert_to_numpy(each.value)) for each in model.variables if is_seed(each)]

    def own(variable: Any) -> bool:
        return id(variable) in names and not is_seed(variable)

    with _unchanged(model, losses if losses is not None else []), with_symbols(c.with_weights, own):
        try:
            with watching(watch, prime):
                results = c.expand(model, [given], {})
        except Refused as refused:
            error = refused.__cause__
            if error is None or isinstance(error, ChangesWeight | DrawsNumbers):
                raise CaptureError(f"the model cannot be prepared: {refused}") from refused
            text = with_own_sizes(text_of(error), prime, next((size for size, *_ in flat if size), 1))
            more = {"training": False} if "training" in inspect.signature(model.call).parameters else {}

            def takes(changed: Callable[[tuple[int, ...]], tuple[int, ...]]) -> bool:
                try:
                    model.call(packed(shapes, [keras.KerasTensor(changed(shape)) for shape in flat]), **more)
                except Exception:  # noqa: BLE001 - the user's model may raise anything
                    return False
                return True

            words = ["input"] if len(paths) == 1 else paths
            misfit = misfit_of_example(text, dict(zip(words, flat, strict=True)), takes)
            raise CaptureError(misfit or f"the model cannot be called on symbolic tensors: {text}") from error
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"the model cannot be called on symbolic tensors: {first_line(error)}") from error
    for variable, value in seeds:
        variable.assign(value)
    items = tree.flatten(results)
    outputs = [c.operand(each) if isinstance(each, Item) else str(each) for each in items]
    words = input_words(model, shapes, functional, len(paths))
    inputs = ["input"] if len(paths) == 1 else [each.replace("/", ".") for each in words]
    ends = output_words(results, functional, len(outputs))
    whole = Tree(given, results, [each.name for each in inputs_])
    return Network(
        tuple(paths),
        tuple(outputs),
        c.values,
        c.constants,
        tuple(c.steps),
        tuple(inputs),
        tuple(ends),
        whole,
        whole,
        tuple(words),
        channels_first=False,
    )


@contextmanager
def _unchanged(model: Any, losses: list[str]) -> Iterator[None]:
    """Keras writes down symbolic calls in the layers, and the losses that they add; afterwards they are as before."""
    layers_ = list(model._flatten_layers())
    kept = [
        (layer, len(layer._inbound_nodes), len(layer._outbound_nodes), list(layer._losses), set(layer._loss_ids))
        for layer in layers_
    ]
    adding = set[int]()
    add_loss = keras.Layer.add_loss

    def noted(layer: Any, loss: Any) -> None:
        # Calls without variables of their own, such as those in training, leave no loss in the layer.
        adding.add(id(layer))
        add_loss(layer, loss)

    keras.Layer.add_loss = noted
    try:
        yield
    finally:
        keras.Layer.add_loss = add_loss
        for layer, inbound, outbound, own, ids in kept:
            if id(layer) in adding or getattr(layer, "activity_regularizer", None) is not None:
                losses.append(path_of(layer))
            layer._losses[:], layer._loss_ids = own, ids
            del layer._inbound_nodes[inbound:]
            del layer._outbound_nodes[outbound:]
