# SPDX-License-Identifier: Apache-2.0
"""What frameworks train from a file: its network on the file's grids, or one in real numbers under the user's rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from ...deploy.formats.read_onnx import OnnxModel, model_of
from ...deploy.formats.read_tflite import read_content
from ...deploy.formats.tflite import IDENTIFIER, tflite_bytes
from ...deploy.graph import Graph, require_graph
from ...deploy.lower import Lowering
from ...deploy.runtimes.onnxruntime import OnnxNetwork, in_real_numbers
from ...deploy.simulate import simulate
from ...deploy.trainable import compare_in_float, compare_with_file, trainable
from ...deploy.weights_on_grid import Trainable
from ...kit.device import DEFAULT_PROFILE, OPERATORS, Refusal, profile_named
from ...kit.device.profile import ONNXRUNTIME_X86
from ...kit.display import shortened
from ...kit.planning import FinalActivationWarning, UnsupportedOperator, plan, warn_of_plan
from ...kit.planning.callers import users_line
from ...kit.planning.plans import Numbers, Plan
from ...kit.planning.rules import Rule, checked_rules
from ..capture.files import FileNetwork
from ..capture.files import graph as of_graph
from ..capture.files import onnx as of_onnx
from .core.engine import Functional
from .core.trained import TrainedNetwork
from .onnx_grids import as_others_write, closed, compare_with_onnx, on_its_grids

_DEFAULT_RULES = (Rule(),)
# Functions that a loss usually takes the operand of.
_FINAL_ACTIVATIONS = ("softmax", "log_softmax", "sigmoid")


@contextmanager
def _refusing_what_is_damaged() -> Iterator[None]:
    """Turns errors at steps that do not fit each other, as in a damaged file, into a refusal."""
    try:
        yield
    except Refusal:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        text = shortened(" ".join(str(error).split()) or type(error).__name__, 160)
        raise Refusal(f"the file's steps do not fit each other: {text}") from error


class OpenedFile:
    """A file's network before it is planned.

    Attributes:
        parameters, buffers: by the names of the plan's constants, float32; trained and others.
        is_float: whether it is in real numbers, without grids of its own.
    """

    def __init__(self, graph: Graph | OnnxModel) -> None:
        """
        Raises:
            TypeError: graph is neither a Graph nor an OnnxModel.
            UnsupportedOperator: a part of it cannot be trained with its integers unchanged; every such part is named.
        """
        if not isinstance(graph, OnnxModel):
            require_graph(graph)
        self.graph = graph
        network: FileNetwork | Trainable
        if isinstance(graph, OnnxModel):
            network = of_onnx.capture(graph.content)
        else:
            network = of_graph.capture(graph) if of_graph.is_float(graph) else trainable(graph)
        if isinstance(network, FileNetwork) and network.grids:
            with _refusing_what_is_damaged():
                network = on_its_grids(network)
        self.parameters, self.buffers = network.parameters, network.buffers
        self._float = network if isinstance(network, FileNetwork) else None
        self.is_float = self._float is not None
        self._trainable = cast(Trainable, network)

    @classmethod
    def of_content(cls, content: bytes) -> OpenedFile:
        """The inverse of `content`."""
        # The first bytes of a file identify its kind.
        return cls(read_content(content).graph if content[4:8] == IDENTIFIER else model_of(content))

    def content(self) -> bytes:
        """The network as a file, to be kept with what was made from it."""
        return self.graph.content if isinstance(self.graph, OnnxModel) else tflite_bytes(self.graph)

    def plan(
        self,
        rules: Iterable[Rule] = _DEFAULT_RULES,
        deployable: bool = True,
        keep_final_activation: bool | None = None,
        device: str | None = None,
    ) -> Plan:
        """What the device runs; rules and `deployable` are for a file in float32.

        Warns (FinalActivationWarning) of a file in integers that ends with a softmax or the like, unless
        `keep_final_activation` is True.

        Raises:
            TypeError: they are given for a file in integers, or it is to leave out the softmax that it ends with.
            UnsupportedOperator: a part of it cannot run on the device, or not be trained; every such part is named.
        """
        rules = tuple(checked_rules(rules))
        if self._float is not None:
            planned = plan(self._float.network, rules, deployable, keep_final_activation, device)
            warn_of_plan(planned, keep_final_activation)
            return planned
        if rules != _DEFAULT_RULES or not deployable:
            word = "deployable" if rules == _DEFAULT_RULES else "rules"
            raise TypeError(f"{word} is not for a Graph in integers: a file says itself on which grids it computes")
        if self._trainable.untrainable:
            raise UnsupportedOperator(
                "the file's integers can be computed, but not be trained as they are:\n"
                + "\n".join(f"  {number}. {text}" for number, text in enumerate(self._trainable.untrainable, 1))
            )
        self._check_end(keep_final_activation)
        return self._trainable.plan

    def _check_end(self, keep_final_activation: bool | None) -> None:
        """Refuses to leave out the final activation of a file in integers; warns of it if nothing is said."""
        plan = self._trainable.plan
        ends = [step for step in plan.steps if step.path in plan.device_outputs and step.kind]
        said = ", ".join(
            f"{end.kind} ('{shortened(end.path)}')"
            for end in ends
            if OPERATORS[end.kind].float_kind in _FINAL_ACTIVATIONS
        )
        if not said or keep_final_activation:
            return
        if keep_final_activation is False:
            raise TypeError(
                f"keep_final_activation=False is not for this file: it ends with {said}, which it computes in "
                "integers. Train what it returns, probabilities for instance with a loss that takes their logarithm"
            )
        warnings.warn(
            f"the file ends with {said}, and the model returns what that gives. A loss that takes logits, such as "
            "cross entropy, would compute it once more: train with one that takes probabilities. These are codes, so "
            "one may be 0: add half a code, as in log(p + 1 / 512). keep_final_activation=True says that this is meant",
            FinalActivationWarning,
            stacklevel=users_line(),
        )

    def compare(self, network: TrainedNetwork, device: str | None) -> None:
        """Raises UnsupportedOperator if an untrained network computes something other than the file: other integers, or
        other real numbers without quantization."""
        if self.is_float:
            compare_in_float(network.plan, network.float_results, self._original)
        elif isinstance(self.graph, OnnxModel):
            plan, in_float = network.plan, self._trainable.in_float
            if in_float:  # their ranges come from training
                plan = self._closed()
            numbers = self._numbers(plan) if in_float else network.numbers()
            compare_with_onnx(plan, numbers, self._original, device or ONNXRUNTIME_X86.name, in_float)
        else:
            compare_with_file(self.graph, network.plan, network.numbers(), device or DEFAULT_PROFILE)

    def on_onnxruntime(self) -> OnnxNetwork:
        """A quantized .onnx file as the device's integers.

        Raises:
            Refusal: it is in real numbers, or the device has no such network.
        """
        if not isinstance(self.graph, OnnxModel) or self.is_float:
            raise Refusal("it computes in real numbers, so there are no integers to compare")
        with _refusing_what_is_damaged():
            plan = self._closed()
            lowering = Lowering(plan, self._numbers(plan))
            graph, layouts = lowering.run(), lowering.layouts()
        codes = {path: (name, layouts[path]) for path, name in self._trainable.codes.items() if path in layouts}
        outputs = zip(graph.signature.outputs, plan.device_outputs, strict=True)
        in_float = {port.tensor for port, path in outputs if plan.stored(path).grid in self._trainable.in_float}
        return OnnxNetwork(self.graph, as_others_write(graph, codes), codes, frozenset(in_float))

    def _closed(self) -> Plan:
        return closed(self._trainable.plan, self._trainable.in_float, self._numbers)

    def _numbers(self, plan: Plan) -> Numbers:
        """The numbers that the file's network is frozen to before training."""
        functional = Functional(plan, profile=ONNXRUNTIME_X86.name)
        numbers = functional.numbers(functional.initial({**self.parameters, **self.buffers}))
        filters = {
            path: replace(numbers.weights[path], codes=codes, zero_point=zero_point)
            for path, (codes, zero_point) in self._trainable.filters.items()
        }
        return replace(numbers, weights={**numbers.weights, **filters})

    def _original(self, *inputs: np.ndarray) -> list[np.ndarray]:
        if isinstance(self.graph, OnnxModel):
            return in_real_numbers(self.graph.content, dict(zip(self.graph.inputs, inputs, strict=True)))
        tensors = simulate(self.graph, dict(zip(self.graph.inputs, inputs, strict=True)), progress=False)
        return [tensors[name] for name in self.graph.outputs]


Model = TypeVar("Model")
# Of an open file, a device and `OpenedFile.plan`'s other arguments: the model, and what it has learned so far.
Build = Callable[[OpenedFile, "str | None", dict[str, Any]], tuple[Model, Callable[[], TrainedNetwork]]]


def preparing(build: Build[Model]) -> Callable[..., Model]:
    """The `prepare_file` of a framework, which builds the model."""

    def prepare_file(
        graph: Graph | OnnxModel,
        *,
        device: str | None = DEFAULT_PROFILE,
        check: bool = True,
        rules: Iterable[Rule] = (Rule(),),
        deployable: bool = True,
        keep_final_activation: bool | None = None,
    ) -> Model:
        """A network that computes what a file does, and trains from there; see `exactqat.qat.prepare`.

        In JAX ``params["model"]`` is a dictionary by the names of the file's tensors.

        Args:
            graph: from `deploy.read_tflite` or `deploy.read_onnx`. One in integers computes these once it is frozen;
                one in float32 gets its ranges from training or calibration.
            device: whose integers it computes once it is frozen; None: it stays fake quantized.
            check: compare it with the file: integers with those of `device`, real numbers within float32's order of
                sums.
            rules, deployable: for a file in float32, as `prepare` takes them.
            keep_final_activation: likewise; of a file in integers that ends with a softmax, None warns that the model
                returns what that gives, True says that this is meant.

        Raises:
            TypeError: graph is not from a file, or has its own grids and rules are given, or ends with a softmax and
                keep_final_activation is False.
            UnsupportedOperator: an operator cannot be trained, or not with its integers unchanged; each is named.
        """
        device = None if device is None else profile_named(device).name
        file = OpenedFile(graph)
        options = {
            "rules": checked_rules(rules),
            "deployable": deployable,
            "keep_final_activation": keep_final_activation,
        }
        model, trained = build(file, device, options)
        if check:
            file.compare(trained(), device)
        return model

    return prepare_file
