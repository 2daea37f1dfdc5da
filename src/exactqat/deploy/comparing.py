# SPDX-License-Identifier: Apache-2.0
"""One comparison for every file and runtime: what a runtime computes beside its simulation, some examples at a time.

Each operator is simulated from the operands that the device had, which finds the one that differs instead of all that
follow it; the results of the unchanged file are compared with the simulation of the whole network. `verify`, `inspect`
and `reduce` are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ..kit.device import Profile, profile_named
from ..kit.device.operator import FLOAT
from ..kit.device.tensor import CODE_RANGES, RAW, dequantize, quantize
from ..kit.display import shortened
from .comparison import Comparison
from .formats.read_tflite import FileEnd, TfliteFile, to_file
from .formats.tflite import End, end_name, ends_in, with_outputs, with_outputs_at
from .graph import Graph
from .runtimes import Runtime, open_runtime
from .runtimes.trial import RuntimeRefusal
from .simulate import is_claimed, simulate, simulate_results

Codes = Mapping[str, np.ndarray]
# Runs a file on a device: from its content and what its inputs hold, by name, to what its outputs hold.
Run = Callable[[bytes, Codes], Codes]


class Opened(Protocol):
    """A file on its runtime."""

    def run(self, batch: Codes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The codes of all tensors that the file holds, and the outputs of the unchanged file, by the graph's names."""


class OpenedTflite:
    """A .tflite file on its runtime, unchanged and with the result of every operator as an output.

    Tensors inside a delegate cannot be read, and the interpreter's option to preserve them splits the delegate into
    single operators. So the model whose outputs are all results runs delegated like the original one.
    """

    def __init__(
        self,
        graph: Graph,
        content: bytes,
        profile: str | Profile,
        file: TfliteFile | None = None,
        run: Run | None = None,
    ) -> None:
        """file: how another writer's file holds the graph; None: by the graph's own names. run: what runs it, in place
        of the profile's runtime.

        Raises:
            ValueError: the file lacks a tensor of the graph's. RuntimeRefusal: the runtime rejects the file.
        """
        self._graph = graph
        if file is None:
            kinds = ends_in(graph, content).values()
            self._inputs, self._outputs = (
                [own_end(graph, name, kind) for name in side]
                for side, kind in zip((graph.inputs, graph.outputs), kinds, strict=True)
            )
            self._computed = graph.results()
            opened = with_outputs(content, self._computed)
        else:
            self._inputs, self._outputs = list(file.inputs), list(file.outputs)
            # An input that is the file's own is not computed.
            own = {end.tensor for end in file.inputs if end.tensor == end.name}
            names = (*graph.inputs, *graph.results())
            self._computed = tuple(name for name in names if name not in own and name in file.positions)
            opened = with_outputs_at(content, [file.positions[name] for name in self._computed])
        inputs, outputs = (tuple(end.name for end in side) for side in (self._inputs, self._outputs))
        self._plain: Runtime | _ByExample
        self._whole: Runtime | _ByExample
        in_order = file is not None
        if run is not None:
            self._plain, self._whole = _ByExample(content, outputs, run), _ByExample(opened, self._computed, run)
            return
        self._plain = open_runtime(content, inputs, outputs, profile, in_order)
        self._whole = open_runtime(opened, inputs, self._computed, profile, in_order)

    def run(self, batch: Codes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        graph = self._graph
        inputs = {end.name: to_file(graph, batch[end.tensor], end) for end in self._inputs}
        stored = {name: _with_batch(graph, name, codes) for name, codes in self._whole.run(inputs).items()}
        for name, codes in stored.items() if len(next(iter(batch.values()))) == 1 else ():
            shape = graph.tensors[name].shape
            if codes.shape != shape:  # TFLite-Micro infers none that the file leaves open
                raise RuntimeRefusal(
                    f"it takes {list(codes.shape)} for the shape of {shortened(name)!r}, which is {list(shape)} "
                    "(convert the model with a fixed batch)"
                )
        returned, plain = {}, self._plain.run(inputs)
        for end in self._outputs:
            tensor, codes = graph.tensors[end.tensor], _with_batch(graph, end.tensor, plain[end.name])
            if end.dtype == FLOAT and tensor.dtype != FLOAT:
                real, codes = codes, quantize(np.nan_to_num(codes, nan=-np.inf), tensor.quantization)
                # A value between two codes is not a code.
                if not np.array_equal(dequantize(codes, tensor.quantization), real):
                    raise RuntimeRefusal(f"output {end.name!r} is not on its grid")
            returned[end.tensor] = codes
        return stored, returned


class _ByExample:
    """A file that is run with a batch of 1."""

    def __init__(self, content: bytes, outputs: Sequence[str], run: Run) -> None:
        self.content, self.outputs, self.run_file = content, outputs, run

    def run(self, batch: Codes) -> dict[str, np.ndarray]:
        count = len(next(iter(batch.values())))
        results = [self.run_file(self.content, {name: codes[at : at + 1] for name, codes in batch.items()})
                   for at in range(count)]  # fmt: skip
        return {name: np.concatenate([result[name] for result in results]) for name in self.outputs}


def own_end(graph: Graph, name: str, form: End | None = None) -> FileEnd:
    """How the graph's own file holds a tensor. form: what the file takes or returns in place of codes."""
    tensor = graph.tensors[name]
    dtype = RAW if name in graph.in_uint8() else tensor.dtype
    if form in (None, dtype) or tensor.dtype not in CODE_RANGES:
        return FileEnd(name, tensor.shape, dtype, name, True)
    return FileEnd(end_name(name, form), tensor.shape, form, name, True)


def _with_batch(graph: Graph, name: str, codes: np.ndarray) -> np.ndarray:
    """As the graph has it: with the axis in front of the file's, if it has one, and codes of uint8 128 lower."""
    if codes.dtype == np.uint8 and graph.tensors[name].dtype == "int8":
        codes = (codes ^ 128).view(np.int8)
    return codes[None] if graph.tensors[name].shape == (1, *codes.shape) else codes


class Comparing:
    """Counts where a device's codes differ from its simulation.

    Attributes:
        operators: each result, simulated from the device's own operands.
        outputs: the unchanged file's results beside the simulation of the whole network.
    """

    def __init__(self, graph: Graph, profile: str | Profile, claims: bool = True, all_reals: bool = True) -> None:
        """claims: whether operators may be claimed to be exact. all_reals: whether results in real numbers are compared
        where no equality is claimed, too."""
        self.graph, self.profile = graph, profile_named(profile).name
        self.operators = {
            name: Comparison(name, kind, exact=claims and is_claimed(kind, self.profile))
            for operator in graph.operators
            for kind in (graph.measured_as(operator),)
            for name in operator.outputs
        }
        # They are claimed to be exact if all operators are.
        exact = all(row.exact for row in self.operators.values())
        whole = "whole graph" if all_reals else "whole file"
        self.outputs = {name: Comparison(name, whole, exact=exact) for name in graph.outputs}
        self._all_reals = all_reals
        # What variables hold: as each operator leaves them from the device's operands, and in the whole simulation.
        self._memory, self._whole = graph.initial_state(), graph.initial_state()

    def add(
        self,
        batch: Codes,
        device: Codes,
        returned: Codes,
        also: Sequence[str] = (),
        done: Callable[[], None] = lambda: None,
    ) -> dict[str, np.ndarray]:
        """Compares some examples.

        Args:
            batch: of the inputs.
            device: what the device computed; `returned`: what the unchanged file returned.
            also: further tensors that are asked for.
            done: called after each operator.

        Returns:
            What the whole network computes by the simulation: its outputs, and `also`.
        """
        graph, memory, stored = self.graph, self._memory, {**batch, **device}
        agree = all(name in stored for name in (*graph.results(), *also))
        for operator in graph.operators:
            real, row = graph.tensors[operator.outputs[0]].dtype == FLOAT, self.operators[operator.outputs[0]]
            # Real numbers are compared if their equality is claimed, or if all are asked for.
            if self._all_reals or not real or is_claimed(row.kind, self.profile) or row.name not in device:
                for name, codes in simulate_results(graph, operator, {**stored, **memory}, self.profile).items():
                    if name in memory:
                        memory[name] = codes
                    elif name in device:
                        before = self.operators[name]
                        self.operators[name] = before.counting(device[name], codes)
                        agree &= self.operators[name].differing == before.differing
                    else:  # the file has no codes of it
                        stored[name] = codes
            else:
                agree = False
            done()
        values, successors = {**stored, **memory}, {name: graph.tensors[name].successor for name in memory}
        memory |= {name: values[successor] for name, successor in successors.items() if successor}
        # If every operator agrees from the device's operands, the whole simulation is what the device had.
        wanted = [*dict.fromkeys((*graph.outputs, *also))]
        whole = stored if agree and not memory else simulate(
            graph, batch, self.profile, wanted, state=self._whole, progress=False
        )  # fmt: skip
        for name, row in self.outputs.items():
            if self._all_reals or graph.tensors[name].dtype != FLOAT:
                self.outputs[name] = row.counting(returned[name], whole[name])
        return {name: whole[name] for name in wanted}
