# SPDX-License-Identifier: Apache-2.0
"""Turns a plain PyTorch model into one that trains under the device's arithmetic, without an edit to the model.

`prepare` traces the model (torch.fx), finds the operators the device will run (a convolution with its batch norm and
ReLU is one) and puts a fake quantization on every weight and on every tensor that the device stores. Whatever the
device cannot run is refused here, before any training time is spent.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .layers import QuantizedAdd, QuantizedInput, QuantizedLayer, QuantizedMean, WeightedLayer
from .modules import Conv2d, DepthwiseConv2d, FakeQuantize, FusedBatchNorm2d, WeightFakeQuantize
from .rules import Rule, RuleBook

SUPPORTED = (
    "Conv2d (dense or depthwise) with BatchNorm2d and ReLU/ReLU6 behind it, Linear with ReLU/ReLU6, sums of two "
    "tensors with ReLU/ReLU6, AdaptiveAvgPool2d(1) or mean over height and width, flatten, Dropout, Identity"
)
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_ACTIVATIONS: dict[Any, str] = {
    nn.ReLU: "RELU",
    F.relu: "RELU",
    torch.relu: "RELU",
    torch.relu_: "RELU",
    "relu": "RELU",
    "relu_": "RELU",
    nn.ReLU6: "RELU6",
    F.relu6: "RELU6",
}
_FLATTENS = (nn.Flatten, torch.flatten, "flatten")
_MEANS = (torch.mean, "mean")


class UnsupportedOperator(ValueError):
    """The model holds something that the device cannot run as it stands. The message lists every such place."""


class PreparedModel(nn.Module):
    """A model under the device's arithmetic. Trains like any module; `freeze` starts its last phase.

    Attributes:
        network: the traced graph; its submodules are `QuantizedLayer`s at the paths of the user's modules.
        unused_rules: one sentence for every rule that decided nothing.
        frozen: whether the last phase has begun; part of the state dict.
    """

    def __init__(self, network: fx.GraphModule, unused_rules: list[str]) -> None:
        super().__init__()
        self.network = network
        self.unused_rules = unused_rules
        self.frozen = False

    def forward(self, features: Tensor) -> Tensor:
        return self.network(features)

    def layers(self) -> Iterator[tuple[str, QuantizedLayer]]:
        """Paths and layers in order of execution."""
        for node in self.network.graph.nodes:
            if node.op == "call_module":
                layer = self.network.get_submodule(node.target)
                if isinstance(layer, QuantizedLayer):
                    yield node.target, layer

    def stored_tensors(self, features: Tensor) -> dict[str, tuple[FakeQuantize, Tensor]]:
        """Runs the model and gives, by layer path, the quantizer and the value of every tensor the device stores."""
        values: dict[str, tuple[FakeQuantize, Tensor]] = {}

        class Recorder(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                result = super().run_node(node)
                if node.op == "call_module":
                    layer = self.fetch_attr(str(node.target))
                    if isinstance(layer, QuantizedLayer):
                        values[str(node.target)] = (layer.output_quantizer, result)
                return result

        with torch.no_grad():
            Recorder(self.network).run(features)
        return values

    def range_parameters(self) -> list[nn.Parameter]:
        """The learned ranges, for a parameter group of their own."""
        return [parameter for name, parameter in self.named_parameters() if ".range." in name]

    def other_parameters(self) -> list[nn.Parameter]:
        """All parameters that are no ranges."""
        return [parameter for name, parameter in self.named_parameters() if ".range." not in name]

    def train(self, mode: bool = True) -> PreparedModel:
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, FusedBatchNorm2d):
                    module.training = False
        return self

    def get_extra_state(self) -> dict[str, bool]:
        return {"frozen": self.frozen}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        self._set_frozen(state["frozen"])

    def _set_frozen(self, frozen: bool) -> None:
        self.frozen = frozen
        for module in self.modules():
            if isinstance(module, QuantizedLayer | FakeQuantize):
                module.frozen = frozen
        for parameter in self.range_parameters():
            parameter.requires_grad_(not frozen)
        self.train(self.training)


def freeze(model: PreparedModel) -> None:
    """Starts the last phase of training: batch-norm statistics and ranges are fixed, biases stand on the int32 grid.

    From here on the model computes what the device computes; weights, gamma, beta and biases may still be trained. The
    range of a weight that is not learned goes on following its largest magnitude.
    """
    model._set_frozen(True)


@torch.no_grad()
def calibrate(model: PreparedModel, batches: Iterable[Tensor]) -> None:
    """Sets all activation ranges from data: runs the float network, in evaluation mode, over `batches` of inputs.

    Raises:
        ValueError: the model is frozen, or there is no batch.
    """
    if model.frozen:
        raise ValueError("calibrate before freeze: the ranges of a frozen model are fixed")
    with _observing(model):
        count = 0
        for batch in batches:
            model(batch)
            count += 1
    if count == 0:
        raise ValueError("batches is empty: ranges need at least one batch")


@contextmanager
def _observing(model: PreparedModel) -> Iterator[None]:
    was_training = model.training
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize | WeightFakeQuantize)]
    model.eval()
    for quantizer in quantizers:
        quantizer.quantizing = False
        if isinstance(quantizer, FakeQuantize):
            quantizer.observing = True
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.quantizing = True
            if isinstance(quantizer, FakeQuantize):
                quantizer.observing = False
        model.train(was_training)


def prepare(
    model: nn.Module, example_input: Tensor, rules: Iterable[Rule] = (Rule(),), deployable: bool = True
) -> PreparedModel:
    """A copy of `model` that trains under the device's arithmetic.

    Args:
        model: any module that torch.fx can trace, with one input and one output. It is not changed; its weights are
            taken over.
        example_input: a batch as the model gets it, [batch, channels, height, width] or [batch, features].
        rules: settings by module path; see `Rule`. The first match decides. The input is called ``"input"``.
        deployable: refuse rules that the device cannot run. Turn it off to study other settings in training only.

    Raises:
        UnsupportedOperator: lists every operator the device cannot run, with its place and what to do.
        ValueError: no rule matches a layer, or a rule cannot be deployed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(example_input, Tensor) or example_input.dim() not in (2, 4):
        raise ValueError("example_input must be a tensor [batch, channels, height, width] or [batch, features]")
    book = RuleBook(rules)
    traced = _trace(model)
    with torch.no_grad():
        was_training = traced.training
        fx.passes.shape_prop.ShapeProp(traced.eval()).propagate(example_input)
        traced.train(was_training)
    network = _Preparation(traced, book, deployable).run()
    book.warn_unused()
    prepared = PreparedModel(network, book.unused())
    prepared.train(model.training)
    return prepared


class _Tracer(fx.Tracer):
    record_stack_traces = True

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return isinstance(module, Conv2d | FusedBatchNorm2d) or super().is_leaf_module(module, path)


def _trace(model: nn.Module) -> fx.GraphModule:
    model = copy.deepcopy(model)
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise UnsupportedOperator(
            f"the model cannot be traced: {error}\nIts forward must not branch or loop on tensor values; move such "
            "code out of the model, or decide in __init__."
        ) from error
    return fx.GraphModule(model, graph)


def _scope(node: fx.Node) -> str:
    """Path of the module in whose forward the node stands; empty at the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return str(path)


def _place(node: fx.Node) -> str:
    """File and line of the user's code that made the node, if known."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    return frames[-1].removeprefix("File ").replace('"', "") if frames else "place unknown"


class _Preparation:
    """One walk over the traced graph: every node becomes a layer, is swallowed by one, or is reported."""

    def __init__(self, traced: fx.GraphModule, book: RuleBook, deployable: bool) -> None:
        self.traced = traced
        self.book = book
        self.deployable = deployable
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.quantizers: dict[fx.Node, FakeQuantize] = {}
        self.swallowed: dict[fx.Node, fx.Node] = {}
        self.used_modules: set[str] = set()
        self.unknown: set[fx.Node] = set()
        self.problems: list[str] = []

    def run(self) -> fx.GraphModule:
        inputs = [node for node in self.traced.graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise UnsupportedOperator(f"the model must have one input, it has {len(inputs)}")
        for node in self.traced.graph.nodes:
            if node in self.swallowed:
                self._alias(node, self.swallowed[node])
            else:
                self._visit(node)
        if self.problems:
            listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            raise UnsupportedOperator(
                f"{len(self.problems)} place(s) of the model cannot run on the device:\n{listing}\n"
                f"Supported: {SUPPORTED}."
            )
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, "QuantizedNetwork")

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._input(node)
        elif node.op == "output":
            self._output(node)
        elif node.op == "get_attr":
            self._report(node, f"the tensor '{node.target}' is used as data; only module weights are supported")
        else:
            self._operator(node)

    def _operator(self, node: fx.Node) -> None:
        kind = self._kind(node)
        module = self._module(node)
        if isinstance(module, nn.Conv2d):
            self._convolution(node, module)
        elif isinstance(module, nn.Linear):
            self._linear(node, module)
        elif kind in _SUMS:
            self._sum(node)
        elif isinstance(module, nn.AdaptiveAvgPool2d) or kind is F.adaptive_avg_pool2d:
            size = (
                module.output_size
                if isinstance(module, nn.AdaptiveAvgPool2d)
                else self._argument(node, 1, "output_size")
            )
            if size in (1, (1, 1), [1, 1]):
                self._mean(node, keep_dims=True)
            else:
                self._report(node, f"average pooling to {size}; only a pool to one value (output_size=1) is supported")
        elif kind in _MEANS:
            self._mean_call(node)
        elif kind in _FLATTENS:
            self._flatten(node, module)
        elif isinstance(module, nn.Dropout | nn.Dropout2d) or kind in (F.dropout, F.dropout2d):
            self._dropout(node, module)
        elif isinstance(module, nn.Identity):
            self._alias(node, node.args[0])
        elif node.args[0] in self.unknown and (isinstance(module, nn.BatchNorm2d) or kind in _ACTIVATIONS):
            # It may well be fused into what was reported.
            self._stand_in(node)
        elif isinstance(module, nn.BatchNorm2d):
            self._report(
                node, "the batch norm does not directly follow a convolution whose only reader it is; fold it by hand"
            )
        elif kind in _ACTIVATIONS:
            self._report(
                node,
                "the activation does not directly follow a convolution, linear layer or sum whose only reader it is; "
                "the device fuses activations into the operator before them",
            )
        else:
            name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
            self._report(
                node, f"{name} has no int8 operator in this library; replace it by a supported one or leave it out"
            )

    def _kind(self, node: fx.Node) -> Any:
        """The module's class, the function, or the method's name."""
        module = self._module(node)
        return type(module) if module is not None else node.target

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None

    @staticmethod
    def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
        return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)

    def _report(self, node: fx.Node, what: str) -> None:
        path = str(node.target) if node.op == "call_module" else _scope(node) or "the model's forward"
        self.problems.append(f"{path} ({_place(node)}): {what}")
        self._stand_in(node)

    def _stand_in(self, node: fx.Node) -> None:
        """A value for a result that cannot be had, so that the rest of the model is still checked."""
        self.values[node] = self.graph.placeholder(f"unknown_{len(self.values)}")
        self.unknown.add(node)

    def _alias(self, node: fx.Node, original: Any) -> None:
        self.values[node] = self.values[original]
        if original in self.quantizers:
            self.quantizers[node] = self.quantizers[original]

    def _rule(self, path: str) -> Rule:
        rule = self.book.find(path)
        obstacle = rule.deployment_obstacle()
        if self.deployable and obstacle:
            raise ValueError(
                f"layer '{path}', rule match={rule.match!r}: {obstacle} (deployable=False trains it nevertheless)"
            )
        return rule

    def _path(self, node: fx.Node, name: str) -> str:
        """A free path for a layer that stems from a function: the scope's path and a name."""
        path = ".".join(filter(None, (_scope(node), name)))
        number = 1
        unique = path
        while unique in self.used_modules:
            number += 1
            unique = f"{path}_{number}"
        self.used_modules.add(unique)
        return unique

    def _only_reader(self, node: fx.Node) -> fx.Node | None:
        readers = list(node.users)
        return readers[0] if len(readers) == 1 and readers[0].op != "output" else None

    def _take_activation(self, last: fx.Node, first: fx.Node) -> str:
        """Swallows the activation behind `last`, if there is one, into the layer of `first`."""
        reader = self._only_reader(last)
        # Identities between the operator and its activation change nothing.
        while reader is not None and isinstance(self._module(reader), nn.Identity):
            self.swallowed[reader] = first
            last, reader = reader, self._only_reader(reader)
        activation = _ACTIVATIONS.get(self._kind(reader)) if reader is not None else None
        if reader is None or activation is None:
            return "NONE"
        self.swallowed[reader] = first
        return activation

    def _add_layer(self, node: fx.Node, path: str, layer: QuantizedLayer, sources: tuple[fx.Node, ...]) -> None:
        owner = self.root
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(name, layer)
        self.values[node] = self.graph.call_module(path, tuple(self.values[source] for source in sources))
        self.quantizers[node] = layer.output_quantizer

    def _input(self, node: fx.Node) -> None:
        path = self._path(node, "input")
        placeholder = self.graph.placeholder("features")
        self.values[node] = placeholder
        self._add_layer(node, path, QuantizedInput(FakeQuantize(self._rule(path))), (node,))

    def _output(self, node: fx.Node) -> None:
        result = node.args[0]
        if not isinstance(result, fx.Node):
            raise UnsupportedOperator(f"the model must return one tensor, it returns {type(result).__name__}")
        self.graph.output(self.values[result])

    def _claim(self, node: fx.Node) -> bool:
        """Whether this is the module's first call; a second one would store another tensor under the same layer."""
        path = str(node.target)
        if path in self.used_modules:
            self._report(node, "the module is called twice; give each call a module of its own")
            return False
        self.used_modules.add(path)
        return True

    def _convolution(self, node: fx.Node, module: nn.Conv2d) -> None:
        if not self._claim(node):
            return
        if module.padding_mode != "zeros":
            self._report(node, f"padding_mode={module.padding_mode!r}; the device pads with zeros")
            return
        depthwise = module.groups == module.in_channels and module.groups > 1
        if module.groups > 1 and not depthwise:
            self._report(
                node,
                f"groups={module.groups} with {module.in_channels} channels; use groups=1 or one group per channel",
            )
            return
        last, batch_norm = node, None
        reader = self._only_reader(node)
        if reader is not None and isinstance(self._module(reader), nn.BatchNorm2d):
            norm = self._module(reader)
            assert isinstance(norm, nn.BatchNorm2d)
            if not norm.track_running_stats:
                self._report(reader, "batch norm without running statistics; the device needs them")
                return
            batch_norm = _fused_batch_norm(norm)
            self.swallowed[reader] = node
            last = reader
        self._weighted(node, last, _convolution(module, depthwise), batch_norm)

    def _linear(self, node: fx.Node, module: nn.Linear) -> None:
        if not self._claim(node):
            return
        shape = node.meta["tensor_meta"].shape
        if len(shape) != 2:
            self._report(node, f"Linear on a tensor of shape {list(shape)}; flatten to [batch, features] first")
            return
        self._weighted(node, node, copy.deepcopy(module), None)

    def _weighted(
        self, node: fx.Node, last: fx.Node, operation: Conv2d | nn.Linear, batch_norm: FusedBatchNorm2d | None
    ) -> None:
        path = str(node.target)
        rule = self._rule(path)
        activation = self._take_activation(last, node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        quantizer = FakeQuantize(rule, nonnegative=activation != "NONE")
        if source not in self.quantizers:
            self._stand_in(node)
            return
        layer = WeightedLayer(
            operation,
            WeightFakeQuantize(rule, operation.weight),
            quantizer,
            activation,
            self.quantizers[source],
            batch_norm,
        )
        self._add_layer(node, path, layer, (source,))

    def _sum(self, node: fx.Node) -> None:
        first, second = node.args[0], self._argument(node, 1, "other")
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            self._report(node, "a sum with a constant; only sums of two computed tensors are supported")
            return
        if self._argument(node, 2, "alpha", 1) != 1:
            self._report(node, "a sum with alpha; only plain sums are supported")
            return
        shapes = [list(term.meta["tensor_meta"].shape) for term in (first, second)]
        if shapes[0] != shapes[1]:
            self._report(node, f"a sum of shapes {shapes[0]} and {shapes[1]}; broadcasting is not supported")
            return
        path = self._path(node, "add")
        activation = self._take_activation(node, node)
        quantizer = FakeQuantize(self._rule(path), nonnegative=activation != "NONE")
        self._add_layer(node, path, QuantizedAdd(quantizer, activation), (first, second))

    def _mean_call(self, node: fx.Node) -> None:
        axes = self._argument(node, 1, "dim")
        rank = len(node.args[0].meta["tensor_meta"].shape)  # type: ignore[union-attr]
        spatial = isinstance(axes, tuple | list) and rank == 4 and sorted(axis % rank for axis in axes) == [2, 3]
        if spatial:
            self._mean(node, keep_dims=bool(self._argument(node, 2, "keepdim", False)))
        else:
            self._report(node, f"mean over axes {axes}; only the mean over height and width (2, 3) is supported")

    def _mean(self, node: fx.Node, keep_dims: bool) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        path = str(node.target) if node.op == "call_module" else self._path(node, "mean")
        if node.op == "call_module" and not self._claim(node):
            return
        before = self.quantizers.get(source)
        nonnegative = before is not None and before.range.nonnegative
        layer = QuantizedMean(FakeQuantize(self._rule(path), nonnegative), keep_dims)
        self._add_layer(node, path, layer, (source,))

    def _flatten(self, node: fx.Node, module: nn.Module | None) -> None:
        if isinstance(module, nn.Flatten):
            axes = (module.start_dim, module.end_dim)
        else:
            axes = (self._argument(node, 1, "start_dim", 0), self._argument(node, 2, "end_dim", -1))
        source = node.args[0]
        assert isinstance(source, fx.Node)
        rank = len(source.meta["tensor_meta"].shape)
        if (axes[0] % rank, axes[1] % rank) != (1, rank - 1):
            self._report(
                node, f"flatten over axes {axes}; only flattening to [batch, features] (start_dim=1) is supported"
            )
            return
        self.values[node] = self.graph.call_function(torch.flatten, (self.values[source], 1))
        if source in self.quantizers:
            self.quantizers[node] = self.quantizers[source]

    def _dropout(self, node: fx.Node, module: nn.Module | None) -> None:
        if module is None:
            self._report(node, "dropout as a function; use the module torch.nn.Dropout, which evaluation switches off")
            return
        source = node.args[0]
        assert isinstance(source, fx.Node)
        name = node.name
        self.root.add_module(name, copy.deepcopy(module))
        self.values[node] = self.graph.call_module(name, (self.values[source],))
        if source in self.quantizers:
            self.quantizers[node] = self.quantizers[source]


def _convolution(module: nn.Conv2d, depthwise: bool) -> Conv2d:
    """The module as this library's convolution, with a copy of its weights."""
    padding: Any
    if isinstance(module, Conv2d):
        padding = module.padding if module.padding_rule == "numbers" else module.padding_rule
    else:
        # torch's 'same' exists for stride 1 only, where it is TensorFlow's.
        padding = module.padding.upper() if isinstance(module.padding, str) else module.padding
    common: dict[str, Any] = {
        "kernel_size": module.kernel_size,
        "stride": module.stride,
        "padding": padding,
        "dilation": module.dilation,
        "bias": module.bias is not None,
        "device": module.weight.device,
        "dtype": module.weight.dtype,
    }
    if depthwise:
        multiplier = module.out_channels // module.in_channels
        converted: Conv2d = DepthwiseConv2d(module.in_channels, channel_multiplier=multiplier, **common)
    else:
        converted = Conv2d(module.in_channels, module.out_channels, **common)
    converted.load_state_dict(module.state_dict())
    return converted


def _fused_batch_norm(module: nn.BatchNorm2d) -> FusedBatchNorm2d:
    """The module as this library's batch norm, with a copy of its state."""
    converted = FusedBatchNorm2d(module.num_features, eps=module.eps, momentum=module.momentum, affine=module.affine)
    converted.load_state_dict(module.state_dict())
    return converted.to(module.running_mean.device)  # type: ignore[union-attr]
