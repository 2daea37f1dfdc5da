# SPDX-License-Identifier: Apache-2.0
"""A network compiled for one profile: weights packed, memory planned, batches computed on all threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...operators import cpu
from ..device import OPERATORS, Profile, Tensor, profile_named
from ..device.blocks import one_thread_for_blas
from ..device.operator import is_wide, written
from ..device.profile import REFERENCE
from ..device.tensor import initial_codes
from .arena import LINE, lifetimes, places
from .declared import by_declaration
from .forms import Form, Part, make

# How many kinds of calls a network keeps memory for.
PROGRAMS = 2

# A kernel's plan and the addresses it takes.
Plan = tuple[Any, tuple[int, ...]]
# A kernel and what it takes: constants, and others by their positions among an operator's arrays.
Kernel = tuple[Any, tuple[int | np.ndarray, ...]]


class RunnableStep(Protocol):
    """An operator of a graph."""

    @property
    def kind(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...
    @property
    def built_in(self) -> bool: ...

    @property
    def unsigned(self) -> bool: ...


class Runnable(Protocol):
    """A graph, such as `deploy.Graph`."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def operators(self) -> Sequence[RunnableStep]: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


class Compiled:
    """A network's integers under one profile, the same as from its declarations and several times as fast.

    Every operator is prepared when first needed, and stays prepared.

    Attributes:
        profile: whose integers.
    """

    def __init__(self, graph: Runnable, profile: str | Profile, like: Compiled | None = None) -> None:
        """like: that of a graph with operators in common, which are then not prepared again."""
        self.profile = profile_named(profile)
        self._tensors = graph.tensors
        self._steps = tuple(graph.operators)
        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._position = {name: number for number, step in enumerate(self._steps) for name in step.outputs}
        self._successors = {name: tensor.successor for name, tensor in graph.tensors.items() if tensor.successor}
        self._forms: dict[int, Form] = {}
        # Of `operator`, by the operator's number and how many examples it had.
        self._kernels: dict[tuple[int, int], list[Kernel]] = {}
        self._programs: dict[Any, _Program] = {}
        if like is not None and like.profile is self.profile:
            self._take_over(like)

    def run(
        self,
        codes: Mapping[str, np.ndarray],
        tensors: Sequence[str] | None = None,
        batch_size: int = 8,
        progress: Callable[[int, int], None] | None = None,
        state: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Codes of `tensors` (default: the graph's outputs).

        Args:
            codes: by tensor name, [batch * rows of an example, ...]: of the inputs, or of any tensors from which the
                wanted ones follow. What only leads to given ones is not computed, so a run can start from what was kept
                from an earlier one.
            batch_size: examples computed at a time. They take the memory of their results, which is reused, and of what
                is returned.
            progress: called after every batch with the number of examples done and the total.
            state: what variables hold, by name, [batch * rows of an example, ...]; missing ones have their initial
                values. It is updated to what they hold afterwards. None: all have their initial values, and nothing is
                kept.

        Raises:
            ValueError: a tensor is unknown, or needs one that is not given; examples differ in number; the state does
                not fit.
        """
        wanted = tuple(dict.fromkeys(self._outputs if tensors is None else tensors))
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        total = self._examples(codes)
        following = {} if state is None else self._successors
        steps = self._needed(frozenset(codes), (*wanted, *(set(following.values()) - set(self._successors))))
        results = {name: np.empty(self._shape(name, total), self._tensors[name].dtype) for name in wanted}
        feeds = {name: np.ascontiguousarray(array) for name, array in codes.items()}
        kept = self._state(state or {}, steps, following, total)
        for start in range(0, total, batch_size):
            count = min(batch_size, total - start)
            self._run_batch(steps, feeds, kept, following, results, start, count)
            if progress is not None:
                progress(start + count, total)
        if state is not None:
            state.update(kept)
        return results

    def operator(self, result: str, codes: Mapping[str, np.ndarray]) -> np.ndarray:
        """Codes of one operator's result from those of its operands.

        Args:
            result: name of the tensor that it computes.
            codes: by tensor name; only the operands are used. Operands with other shapes than in the graph go to the
                declaration, which may broadcast them.
        """
        number = self._position[result]
        step = self._steps[number]
        tensors = [self._tensors[name] for name in step.inputs]
        arrays = [codes[tensor.name] if tensor.data is None else tensor.data for tensor in tensors]
        counts = {
            array.shape[0] // tensor.shape[0] if array.shape[1:] == tensor.shape[1:] else -1
            for array, tensor in zip(arrays, tensors, strict=True)
            if tensor.data is None
        }
        form = self._form(number) if len(counts) == 1 and -1 not in counts else ()
        if not form:
            return self._by_declaration(number, codes)[step.outputs.index(result)]
        arrays = [np.ascontiguousarray(array) for array in arrays]
        (examples,) = counts
        results = {name: np.empty(self._shape(name, examples), self._tensors[name].dtype) for name in step.outputs}
        if examples:
            arrays += reversed(results.values())
            kernels = self._kernels.get((number, examples))
            if kernels is None:
                kernels = self._kernels[number, examples] = kernels_of(form, arrays)
            for plan, addresses in at_addresses(kernels, arrays):
                plan(*addresses)
        return results[result]

    def results(self, result: str, codes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `operator`, but everything it writes, by name: its results, and what its variables hold afterwards."""
        number = self._position[result]
        step = self._steps[number]
        names = written(step.kind, step.inputs, step.outputs)
        if len(names) == 1:
            return {result: self.operator(result, codes)}
        return dict(zip(names, self._by_declaration(number, codes), strict=True))

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, as the graph has it."""
        return self._tensors[name]

    def without_kernels(self) -> tuple[str, ...]:
        """Results of the operators computed by their declarations, which is slower."""
        return tuple(step.outputs[0] for number, step in enumerate(self._steps) if not self._form(number))

    def frontier(self, changed: Sequence[str]) -> tuple[str, ...]:
        """Activations that the operators of these results, and all that depend on them, read but do not compute: what
        to keep of a run, for `run` to continue from once those operators have changed.

        Raises:
            ValueError: no operator computes one of them.
        """
        for name in changed:
            if name not in self._position:
                raise ValueError(f"changed names {name!r}, which no operator of the graph computes")
        dirty, read = set(changed), dict[str, None]()
        for step in self._steps:
            if dirty.intersection((*step.inputs, *step.outputs)):
                dirty.update(step.outputs)
                operands = (self._tensors[name] for name in step.inputs)
                read |= dict.fromkeys(tensor.name for tensor in operands if tensor.data is None and not tensor.variable)
        return tuple(name for name in read if name not in dirty)

    def __repr__(self) -> str:
        return f"Compiled({len(self._steps):,} operators, {self.profile.name})"

    def _examples(self, codes: Mapping[str, np.ndarray]) -> int:
        counts = set()
        for name, array in codes.items():
            unknown = name not in self._tensors
            if unknown or self._tensors[name].data is not None or self._tensors[name].variable:
                raise ValueError(f"codes names {name!r}, which is no activation of the graph")
            tensor = self._tensors[name]
            fits = array.ndim == len(tensor.shape) and array.shape[1:] == tensor.shape[1:]
            if not fits or array.shape[0] % tensor.shape[0] or array.dtype != tensor.dtype:
                expected = f"{tensor.dtype} [batch * {tensor.shape[0]}, {', '.join(map(str, tensor.shape[1:]))}]"
                raise ValueError(f"codes of {name!r} must be {expected}, got {array.dtype} {list(array.shape)}")
            counts.add(array.shape[0] // tensor.shape[0])
        if len(counts) != 1:
            raise ValueError(f"codes must hold as many examples for every tensor, got {sorted(counts)}")
        return counts.pop()

    def _state(
        self, state: Mapping[str, np.ndarray], steps: tuple[int, ...], more: Collection[str], examples: int
    ) -> dict[str, np.ndarray]:
        """What the variables of these operators, and possibly others, hold, in separate arrays."""
        unknown = [name for name in state if name not in self._tensors or not self._tensors[name].variable]
        if unknown:
            raise ValueError(f"state names {unknown}, which are no variables of the graph")
        arrays = {}
        for name in dict.fromkeys((*(name for number in steps for name in self._steps[number].inputs), *more)):
            tensor = self._tensors[name]
            if not tensor.variable:
                continue
            array, shape = state.get(name), self._shape(name, examples)
            if array is None:
                arrays[name] = initial_codes(tensor, examples)
                continue
            if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (shape, np.dtype(tensor.dtype)):
                text = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ValueError(f"the state of {name!r} must be {tensor.dtype} {list(shape)}, got {text}")
            arrays[name] = array.copy()
        return arrays

    def _shape(self, name: str, examples: int) -> tuple[int, ...]:
        rows, *rest = self._tensors[name].shape
        return (examples * rows, *rest)

    def _needed(self, feeds: frozenset[str], wanted: tuple[str, ...]) -> tuple[int, ...]:
        """Numbers of the operators between what is given and what is wanted."""
        numbers: set[int] = set()
        todo = [name for name in wanted if name not in feeds]
        while todo:
            name = todo.pop()
            if name not in self._position:
                raise ValueError(f"tensors needs {name!r}, which is neither given nor computed by the graph")
            number = self._position[name]
            if number not in numbers:
                numbers.add(number)
                todo += [
                    source
                    for source in self._steps[number].inputs
                    if source not in feeds and self._tensors[source].data is None and not self._tensors[source].variable
                ]
        return tuple(sorted(numbers))

    def _form(self, number: int) -> Form:
        if number not in self._forms:
            step = self._steps[number]
            inputs, output = [self._tensors[name] for name in step.inputs], self._tensors[step.outputs[0]]
            # Operators with variables also change them: their declarations do that.
            stateless = len(written(step.kind, step.inputs, step.outputs)) == len(step.outputs)
            profile = self._profile_of(step)
            plain = stateless and not step.unsigned
            form = make(OPERATORS[step.kind], inputs, output, step.attributes, profile) if plain else ()
            self._forms[number] = form
        return self._forms[number]

    def _take_over(self, like: Compiled) -> None:
        """The forms of operators whose tensors and attributes are the same objects."""
        for number, step in enumerate(self._steps):
            other = like._position.get(step.outputs[0])
            if other is None or like._steps[other] is not step or other not in like._forms:
                continue
            if all(self._tensors[name] is like._tensors.get(name) for name in (*step.inputs, *step.outputs)):
                self._forms[number] = like._forms[other]

    def _run_batch(
        self,
        steps: tuple[int, ...],
        feeds: Mapping[str, np.ndarray],
        kept: Mapping[str, np.ndarray],
        following: Mapping[str, str],
        results: Mapping[str, np.ndarray],
        start: int,
        count: int,
    ) -> None:
        """kept: values of variables, which are changed; following: by variable, the tensor that it holds afterwards."""
        # It is not shared meanwhile: threads that call at the same time get their own memory.
        key = (steps, (*feeds, *kept), (*results, *kept, *following.values()), count)
        program = self._programs.pop(key, None) or self._bound(*key)
        parts: dict[str, np.ndarray] = {}
        for name, array in {**feeds, **kept}.items():
            rows = self._tensors[name].shape[0]
            part = parts[name] = array[start * rows : (start + count) * rows]
            if name in program.views:
                program.views[name][...] = part
            if name in results:
                results[name][start * rows : (start + count) * rows] = part
        for kernels in program.parts:
            if not isinstance(kernels, int):
                kernels()
                continue
            step = self._steps[kernels]
            names = written(step.kind, step.inputs, step.outputs)
            for name, codes in zip(names, self._by_declaration(kernels, program.views), strict=True):
                program.views[name][...] = codes
        held = {name: (parts[other] if other in parts else program.views[other]).copy()
                for name, other in following.items()}  # fmt: skip
        for name, codes in held.items():
            parts[name][...] = codes
        for name, result in {**results, **kept}.items():
            if name not in feeds and name not in held:
                rows = self._tensors[name].shape[0]
                result[start * rows : (start + count) * rows] = program.views[name]
        while len(self._programs) >= PROGRAMS:  # the oldest ones, whose memory is then free
            self._programs.pop(next(iter(self._programs), key), None)
        self._programs[key] = program

    def _by_declaration(self, number: int, known: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All results of an operator."""
        step = self._steps[number]
        inputs, outputs = ([self._tensors[name] for name in names] for names in (step.inputs, step.outputs))
        codes = [known[tensor.name] if tensor.data is None else tensor.data for tensor in inputs]
        with one_thread_for_blas():
            profile = self._profile_of(step)
            return by_declaration(OPERATORS[step.kind], codes, inputs, outputs, step.attributes, profile)

    def _profile_of(self, step: RunnableStep) -> Profile:
        """The profile whose arithmetic computes an operator: the built-in kernels' if delegates leave it to them."""
        tensors = [self._tensors[name] for name in step.inputs]
        profile = self.profile.of(step.kind, is_wide(tensors, self._tensors[step.outputs[0]]))
        profile = REFERENCE if step.built_in and profile.delegates else profile
        return profile.for_unsigned() if step.unsigned else profile

    def _bound(self, steps: tuple[int, ...], feeds: tuple[str, ...], wanted: tuple[str, ...], count: int) -> _Program:
        """Operators placed in one block of memory, for `count` examples."""
        read = {name for number in steps for name in self._steps[number].inputs}
        used = [name for name in feeds if name in read]
        listed: list[tuple[Sequence[str], Sequence[str]]] = [((), (name,)) for name in used]
        listed += [(self._steps[number].inputs, self._steps[number].outputs) for number in steps]
        alive = lifetimes(listed, wanted)
        shapes = {name: self._shape(name, count) for name in alive}
        sizes = {
            name: int(np.prod(shape)) * np.dtype(self._tensors[name].dtype).itemsize for name, shape in shapes.items()
        }
        offsets, total = places(sizes, alive)
        memory = np.empty(total + LINE, np.uint8)
        begin = -memory.ctypes.data % LINE
        views = {
            name: memory[begin + offset : begin + offset + sizes[name]].view(self._tensors[name].dtype).reshape(shape)
            for (name, shape), offset in zip(shapes.items(), (offsets[name] for name in shapes), strict=True)
        }
        constants: dict[str, np.ndarray] = {}
        for number in steps:
            for name in self._steps[number].inputs:
                data = self._tensors[name].data
                if data is not None:
                    constants[name] = np.ascontiguousarray(data)
        arrays = {**views, **constants}
        parts: list[Any] = []
        together: list[Plan] = []
        for number in steps:
            step, form = self._steps[number], self._form(number)
            if form:
                together += planned(form, [arrays[name] for name in (*step.inputs, *reversed(step.outputs))])
                continue
            parts += [*_in_one_call(together), number]
            together = []
        return _Program(views, constants, (*parts, *_in_one_call(together)))


def planned(form: Form, arrays: Sequence[np.ndarray]) -> list[Plan]:
    """The kernels of an operator and the addresses they take: of its operands, its results (the first one last), and
    constants."""
    return at_addresses(kernels_of(form, arrays), arrays)


def kernels_of(form: Form, arrays: Sequence[np.ndarray]) -> list[Kernel]:
    """The kernels of an operator for arrays of these shapes."""
    kernels: list[Kernel] = []
    for call in form:
        described, places = [], []
        for operand in (*call.operands, call.result):
            if isinstance(operand, Part):
                array = arrays[operand.position]
                shape = operand.shape_of(array.size)
            else:
                array, shape = operand, operand.shape
            described.append((str(array.dtype), list(shape)))
            places.append(operand.position if isinstance(operand, Part) else operand)
        plan = cpu.kernels.plan(call.kernel, described, len(call.operands), dict(call.numbers))
        kernels.append((plan, tuple(places)))
    return kernels


def at_addresses(kernels: Sequence[Kernel], arrays: Sequence[np.ndarray]) -> list[Plan]:
    """Kernels with the addresses of what they take."""
    return [
        (plan, tuple([(arrays[place] if isinstance(place, int) else place).ctypes.data for place in places]))
        for plan, places in kernels
    ]


def _in_one_call(plans: list[Plan]) -> list[Callable[[], None]]:
    """A function that runs them one after the other without returning to Python in between; nothing for none."""
    return [cpu.kernels.Program(plans)] if plans else []


@dataclass(frozen=True)
class _Program:
    """views: of activations in one block of memory; constants: arrays whose addresses kernels take; parts: consecutive
    kernels, or the number of an operator computed by its declaration."""

    views: dict[str, np.ndarray]
    constants: dict[str, np.ndarray]
    parts: tuple[Callable[[], None] | int, ...]


_known: weakref.WeakKeyDictionary[Any, dict[Profile, Compiled]] = weakref.WeakKeyDictionary()


def compiled_for(graph: Runnable, profile: str | Profile) -> Compiled:
    """The compiled network, which is cached as long as the graph lives."""
    known = _known.setdefault(graph, {})
    profile = profile_named(profile)
    if profile not in known:
        known[profile] = Compiled(graph, profile)
    return known[profile]
