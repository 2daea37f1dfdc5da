# SPDX-License-Identifier: Apache-2.0
"""Turns a plain PyTorch model into one that trains under the device's arithmetic, without an edit to the model.

`prepare` traces the model (torch.fx), finds the operators the device will run (a convolution with its batch norm and
ReLU is one) and puts a fake quantization on every weight and on every tensor that the device stores. Whatever the
device cannot run is refused here, before any training time is spent.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .layers import (
    Pads,
    QuantizedAdd,
    QuantizedAveragePool,
    QuantizedConcatenation,
    QuantizedInput,
    QuantizedLayer,
    QuantizedMaxPool,
    QuantizedMean,
    QuantizedMultiply,
    QuantizedPool,
    WeightedLayer,
    fold,
)
from .modules import Conv2d, DepthwiseConv2d, FakeQuantize, FusedBatchNorm2d, WeightFakeQuantize, same_padding
from .rules import Rule, RuleBook

SUPPORTED = (
    "Conv2d (dense or depthwise) and Linear, batch norm, ReLU, ReLU6, Hardsigmoid, Hardswish, sums and products of two "
    "tensors or of a tensor and a number, concatenation of channels, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, mean "
    "over height and width, flatten, Dropout, Identity; softmax, log_softmax or sigmoid at the very end, which stay "
    "outside of the device's network"
)
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_QUOTIENTS = (operator.truediv, torch.div, "div")
_CONCATENATIONS = (torch.cat, torch.concat)
_MAX_POOLS = (nn.MaxPool2d, F.max_pool2d, torch.max_pool2d)
_AVERAGE_POOLS = (nn.AvgPool2d, F.avg_pool2d)
_ADAPTIVE_POOLS = (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_HARD_SIGMOIDS = (nn.Hardsigmoid, F.hardsigmoid)
_HARD_SWISHES = (nn.Hardswish, F.hardswish)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_FINAL = (
    *(nn.Softmax, nn.LogSoftmax, nn.Sigmoid),
    *(F.softmax, F.log_softmax, F.sigmoid, torch.softmax, torch.log_softmax, torch.sigmoid),
    *("softmax", "log_softmax", "sigmoid"),
)
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
_CLAMPS = (torch.clamp, torch.clamp_, torch.clip, "clamp", "clamp_", "clip", nn.Hardtanh, F.hardtanh)
_FLATTENS = (nn.Flatten, torch.flatten, "flatten")
_SQUEEZES = (torch.squeeze, "squeeze")
# What is done to a result that is unknown already, in one breath with what made it so.
_REARRANGEMENTS = (operator.getitem, torch.transpose, torch.permute, "transpose", "permute")
_VIEWS = (torch.reshape, "reshape", "view")
_MEANS = (torch.mean, "mean")
# By the names of modules, functions and methods, in lower case and without underscores: what to do instead.
_INSTEAD = {
    **dict.fromkeys(("silu", "gelu", "mish"), "use Hardswish, which is close to it"),
    **dict.fromkeys(("leakyrelu", "prelu", "elu", "celu", "selu", "softplus"), "use ReLU or ReLU6"),
    **dict.fromkeys(("sigmoid", "tanh", "softmax", "logsoftmax"), "in the middle of a network use Hardsigmoid"),
    **dict.fromkeys(("clamp", "clip", "hardtanh"), "clamp to (0, 6) or from 0 on, as ReLU6 and ReLU do"),
    **dict.fromkeys(("layernorm", "groupnorm", "instancenorm2d"), "use BatchNorm2d, which is folded into the weights"),
    **dict.fromkeys(("convtranspose2d", "upsample", "interpolate"), "end the device's network before it"),
    **dict.fromkeys(("conv1d", "conv3d"), "use Conv2d, with a kernel of 1 along the axis that is missing"),
    **dict.fromkeys(("chunk", "split"), "compute the parts by convolutions of their own"),
    **dict.fromkeys(("transpose", "permute"), "leave the channels where they are; groups are mixed by a 1x1 Conv2d"),
    **dict.fromkeys(("sub", "rsub", "neg"), "negate weights instead, and add"),
    "squeeze": "flatten(1) makes [batch, features]",
    "getitem": "only [:, :, 0, 0] of a 1x1 feature map is supported",
    "embedding": "look it up outside of the device's network",
}


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

    def float_tensors(self, features: Tensor) -> dict[str, Tensor]:
        """As `stored_tensors`, of the same network without quantization."""
        with _without_quantization(self):
            return {name: value for name, (_, value) in self.stored_tensors(features).items()}

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
    with _without_quantization(model, observing=True):
        count = 0
        for batch in batches:
            model(batch)
            count += 1
    if count == 0:
        raise ValueError("batches is empty: ranges need at least one batch")


@contextmanager
def _without_quantization(model: PreparedModel, observing: bool = False) -> Iterator[None]:
    """The float network, in evaluation mode; `observing` lets ranges see its tensors."""
    was_training = model.training
    quantizers = [m for m in model.modules() if isinstance(m, FakeQuantize | WeightFakeQuantize)]
    model.eval()
    for quantizer in quantizers:
        quantizer.quantizing = False
        if isinstance(quantizer, FakeQuantize):
            quantizer.observing = observing
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
    _make_functional(traced)
    with torch.no_grad():
        was_training = traced.training
        _Shapes(traced.eval()).propagate(example_input)
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


class _Shapes(fx.passes.shape_prop.ShapeProp):
    """Notes the shape of every tensor, and the sizes that the model asks for."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, int | torch.Size):
            n.meta["size"] = result
        return result


def _make_functional(traced: fx.GraphModule) -> None:
    """Lets everything behind an in-place operator read its result, as it does when the model runs.

    `relu(x, inplace=True)`, say, changes what a shortcut that also reads x, but later, gets to see.
    """
    order = {node: position for position, node in enumerate(traced.graph.nodes)}
    for node in traced.graph.nodes:
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = (
            bool(getattr(module, "inplace", False))
            if module is not None
            else node.target in (operator.iadd, operator.imul)
            or bool(node.kwargs.get("inplace", False))
            or (node.op in ("call_function", "call_method") and name.endswith("_") and not name.endswith("__"))
        )
        if in_place and node.args and isinstance(node.args[0], fx.Node):
            changed = node.args[0]
            for reader in [reader for reader in changed.users if order[reader] > order[node]]:
                reader.replace_input_with(changed, node)


def _scope(node: fx.Node) -> str:
    """Path of the module in whose forward the node stands; empty at the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return str(path)


def _place(node: fx.Node) -> str:
    """File and line of the user's code that made the node; empty if unknown."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    return frames[-1].removeprefix("File ").replace('"', "") if frames else ""


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
        # Results whose codes of fewer than eight bits stand at the top of int8 (see `deploy.graph.Graph`).
        self.stored_high: set[fx.Node] = set()
        # Flattened feature maps: their order is not the device's, which only a Linear behind them can make up for.
        self.flattened: set[fx.Node] = set()
        self.swallowed: dict[fx.Node, fx.Node] = {}
        self.used_modules: set[str] = set()
        self.unknown: set[fx.Node] = set()
        self.problems: list[str] = []

    def run(self) -> fx.GraphModule:
        inputs = [node for node in self.traced.graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise UnsupportedOperator(f"the model must have one input, it has {len(inputs)}")
        self._check_sharing()
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

    def _check_sharing(self) -> None:
        """Reports parameters of several modules: each layer gets a copy, and copies would be trained apart."""
        owners: dict[Tensor, str] = {}
        for path, module in self.traced.named_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                own = f"{path}.{name}" if path else name
                other = owners.setdefault(parameter, own)
                if other != own:
                    self.problems.append(f"{own}: it is the same parameter as {other}; give each module its own")

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._input(node)
        elif node.op == "output":
            self._output(node)
        elif node.op == "get_attr":
            self._report(node, f"the tensor '{node.target}' is used as data; only module weights are supported")
        elif "size" in node.meta:
            # Sizes, which a view asks for; what it makes of them is seen in its shape.
            pass
        elif self._reads_flattened(node):
            self._report(
                node, "it reads a flattened feature map, whose order differs on the device; move it before the flatten"
            )
        else:
            self._operator(node)

    def _reads_flattened(self, node: fx.Node) -> bool:
        module, kind = self._module(node), self._kind(node)
        keeps = isinstance(module, nn.Linear | nn.Dropout | nn.Identity) or kind in (*_FLATTENS, *_VIEWS, "contiguous")
        return not keeps and any(source in self.flattened for source in node.all_input_nodes)

    def _operator(self, node: fx.Node) -> None:
        kind, module = self._kind(node), self._module(node)
        handlers: tuple[tuple[tuple[Any, ...], Callable[[fx.Node], None]], ...] = (
            (_SUMS, self._sum),
            (_PRODUCTS, self._product),
            (_QUOTIENTS, self._quotient),
            (_CONCATENATIONS, self._concatenation),
            (_MAX_POOLS, self._pool),
            (_AVERAGE_POOLS, self._pool),
            (_ADAPTIVE_POOLS, self._adaptive_pool),
            (_MEANS, self._mean_call),
            (_FLATTENS, self._flatten),
            (_SQUEEZES, self._squeeze),
            ((operator.getitem,), self._item),
            (_VIEWS, self._view),
            (_HARD_SIGMOIDS, self._hard_sigmoid),
            (_HARD_SWISHES, self._hard_swish),
        )
        activation = self._activation(node)
        handler = next((handler for kinds, handler in handlers if kind in kinds), None)
        if isinstance(module, nn.Conv2d):
            self._convolution(node, module)
        elif isinstance(module, nn.Linear):
            self._linear(node, module)
        elif (
            node.all_input_nodes
            and node.all_input_nodes[0] in self.unknown
            and (
                activation is not None
                or isinstance(module, _BATCH_NORMS)
                or kind in (*_REARRANGEMENTS, *_VIEWS, *_SQUEEZES)
            )
        ):
            # It may well be fused into what was reported, or a part of the same manoeuvre.
            self._stand_in(node)
        elif isinstance(module, _BATCH_NORMS):
            self._batch_norm(node, module)
        elif activation is not None:
            self._pointwise(node, 1.0, 0.0, activation)
        elif handler is not None:
            handler(node)
        elif isinstance(module, nn.Dropout | nn.Dropout2d) or kind in (F.dropout, F.dropout2d):
            self._dropout(node, module)
        elif isinstance(module, nn.Identity) or kind == "contiguous":
            self._alias(node, node.args[0])
        elif kind in _FINAL and all(reader.op == "output" for reader in node.users):
            self._outside(node)
        else:
            self._report_operator(node)

    def _report_operator(self, node: fx.Node) -> None:
        module = self._module(node)
        name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
        advice = _INSTEAD.get(name.lower().replace("_", ""), "replace it by a supported one or leave it out")
        self._report(node, f"{name} has no int8 operator in this library; {advice}")

    def _activation(self, node: fx.Node) -> str | None:
        """RELU or RELU6, if that is what the node computes."""
        kind, module = self._kind(node), self._module(node)
        if kind not in _CLAMPS:
            return _ACTIVATIONS.get(kind)
        if isinstance(module, nn.Hardtanh):
            bounds = (module.min_val, module.max_val)
        elif kind is F.hardtanh:
            bounds = (self._argument(node, 1, "min_val", -1.0), self._argument(node, 2, "max_val", 1.0))
        else:
            bounds = (self._argument(node, 1, "min"), self._argument(node, 2, "max"))
        return "RELU" if bounds == (0, None) else "RELU6" if bounds == (0, 6) else None

    def _kind(self, node: fx.Node) -> Any:
        """The module's class, the function, or the method's name."""
        module = self._module(node)
        return type(module) if module is not None else node.target

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.traced.get_submodule(str(node.target)) if node.op == "call_module" else None

    @staticmethod
    def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name; sizes that the model asks for are those of the example."""
        given = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
        return fx.node.map_arg(given, lambda source: source.meta.get("size", source))

    def _report(self, node: fx.Node, what: str) -> None:
        path = str(node.target) if node.op == "call_module" else _scope(node) or "the model's forward"
        place = _place(node)
        self.problems.append(f"{path} ({place}): {what}" if place else f"{path}: {what}")
        self._stand_in(node)

    def _stand_in(self, node: fx.Node) -> None:
        """A value for a result that cannot be had, so that the rest of the model is still checked."""
        self.values[node] = self.graph.placeholder(f"unknown_{len(self.values)}")
        self.unknown.add(node)

    def _alias(self, node: fx.Node, original: Any) -> None:
        self.values[node] = self.values[original]
        self._keep_quantizer(node, original)

    def _keep_quantizer(self, node: fx.Node, original: fx.Node) -> None:
        """Notes that `node` is stored as `original` is."""
        if original in self.quantizers:
            self.quantizers[node] = self.quantizers[original]
        for known in (self.stored_high, self.flattened, self.unknown):
            if original in known:
                known.add(node)

    def _rule(self, path: str) -> Rule:
        rule = self.book.find(path)
        obstacle = rule.deployment_obstacle()
        if self.deployable and obstacle:
            raise ValueError(
                f"layer '{path}', rule match={rule.match!r}: {obstacle} (deployable=False trains it nevertheless)"
            )
        return rule

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(node.meta["tensor_meta"].shape)

    def _path(self, node: fx.Node, name: str) -> str:
        """A free path: the module's own, or for a function its scope's and a name; numbered from the second call on."""
        path = str(node.target) if node.op == "call_module" else ".".join(filter(None, (_scope(node), name)))
        return self._free(path)

    def _free(self, path: str) -> str:
        """The path itself, or with a number if it is taken."""
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
        activation = self._activation(reader) if reader is not None else None
        if reader is None or activation is None:
            return "NONE"
        self.swallowed[reader] = first
        return activation

    def _add_layer(self, node: fx.Node, path: str, layer: QuantizedLayer, sources: tuple[fx.Node, ...]) -> None:
        self.values[node] = self._call(path, layer, tuple(self.values[source] for source in sources))
        self.quantizers[node] = layer.output_quantizer
        if layer.activation != "NONE":
            self.stored_high.add(node)

    def _call(self, path: str, layer: nn.Module, arguments: tuple[Any, ...]) -> fx.Node:
        """Puts a layer at its path and calls it."""
        owner = self.root
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(name, layer)
        return self.graph.call_module(path, arguments)

    def _input(self, node: fx.Node) -> None:
        path = self._path(node, "input")
        placeholder = self.graph.placeholder("features")
        self.values[node] = placeholder
        self._add_layer(node, path, QuantizedInput(FakeQuantize(self._rule(path))), (node,))

    def _output(self, node: fx.Node) -> None:
        result = node.args[0]
        if not isinstance(result, fx.Node):
            raise UnsupportedOperator(f"the model must return one tensor, it returns {type(result).__name__}")
        if result in self.flattened:
            self._report(node, "the model returns a flattened feature map; on the device its order would differ")
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
        last, batch_norm = self._take_batch_norm(node, nn.BatchNorm2d)
        self._weighted(node, last, _convolution(module, depthwise), batch_norm)

    def _take_batch_norm(
        self, node: fx.Node, kind: type[nn.BatchNorm1d] | type[nn.BatchNorm2d]
    ) -> tuple[fx.Node, FusedBatchNorm2d | None]:
        """Swallows the batch norm behind `node`, if there is one; also gives the node that now holds the result."""
        reader = self._only_reader(node)
        norm = self._module(reader) if reader is not None else None
        if reader is None or not isinstance(norm, kind) or not norm.track_running_stats:
            return node, None
        self._claim(reader)
        self.swallowed[reader] = node
        return reader, _fused_batch_norm(norm)

    def _linear(self, node: fx.Node, module: nn.Linear) -> None:
        if not self._claim(node):
            return
        shape = self._shape(node)
        if len(shape) != 2:
            self._report(node, f"Linear on a tensor of shape {list(shape)}; flatten to [batch, features] first")
            return
        last, batch_norm = self._take_batch_norm(node, nn.BatchNorm1d)
        self._weighted(node, last, copy.deepcopy(module), batch_norm)

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
        weight = operation.weight
        if rule.fold_batch_norm and batch_norm is not None:
            weight = fold(weight, batch_norm)
        layer = WeightedLayer(
            operation, WeightFakeQuantize(rule, weight), quantizer, activation, self.quantizers[source], batch_norm
        )
        self._add_layer(node, path, layer, (source,))

    def _sum(self, node: fx.Node) -> None:
        if self._argument(node, 2, "alpha", 1) != 1:
            self._report(node, "a sum with alpha; only plain sums are supported")
            return
        tensors, numbers = self._operands(node)
        if len(tensors) == 1 and len(numbers) == 1:
            self._pointwise(node, 1.0, numbers[0], self._take_activation(node, node), "add", tensors[0])
        elif len(tensors) == 2:
            shapes = [list(self._shape(tensor)) for tensor in tensors]
            if shapes[0] != shapes[1]:
                self._report(node, f"a sum of shapes {shapes[0]} and {shapes[1]}; broadcasting is not supported")
                return
            self._binary(node, "add", QuantizedAdd, tensors)
        else:
            self._report(node, "a sum of something else than two computed tensors or a tensor and a number")

    def _product(self, node: fx.Node) -> None:
        tensors, numbers = self._operands(node)
        if len(tensors) == 1 and len(numbers) == 1:
            self._pointwise(node, numbers[0], 0.0, self._take_activation(node, node), "mul", tensors[0])
        elif len(tensors) == 2:
            shapes = [self._shape(tensor) for tensor in tensors]
            if len(shapes[0]) == 4 and shapes[0][2:] == (1, 1):
                # The device broadcasts its second operand.
                tensors, shapes = tensors[::-1], shapes[::-1]
            if shapes[1] not in (shapes[0], (*shapes[0][:2], *[1] * (len(shapes[0]) - 2))):
                self._report(
                    node,
                    f"a product of shapes {list(shapes[0])} and {list(shapes[1])}; only equal shapes, or one value for "
                    "every channel ([batch, channels, 1, 1]), are supported",
                )
                return
            self._binary(node, "mul", QuantizedMultiply, tensors)
        else:
            self._report(node, "a product of something else than two computed tensors or a tensor and a number")

    def _quotient(self, node: fx.Node) -> None:
        tensors, numbers = self._operands(node)
        if len(tensors) != 1 or len(numbers) != 1 or node.args[0] is not tensors[0] or numbers[0] == 0:
            self._report(node, "a quotient of something else than a computed tensor and a number other than 0")
            return
        self._pointwise(node, 1.0 / numbers[0], 0.0, self._take_activation(node, node), "div", tensors[0])

    def _operands(self, node: fx.Node) -> tuple[list[fx.Node], list[float]]:
        """The two operands, told apart."""
        both = (node.args[0], self._argument(node, 1, "other"))
        tensors = [operand for operand in both if isinstance(operand, fx.Node) and "tensor_meta" in operand.meta]
        numbers = [float(operand) for operand in both if isinstance(operand, int | float)]
        return tensors, numbers

    def _binary(self, node: fx.Node, name: str, kind: type, tensors: list[fx.Node]) -> None:
        path = self._path(node, name)
        activation = self._take_activation(node, node)
        quantizer = FakeQuantize(self._rule(path), nonnegative=activation != "NONE")
        self._add_layer(node, path, kind(quantizer, activation), tuple(tensors))

    def _pointwise(
        self,
        node: fx.Node,
        weight: float,
        bias: float,
        activation: str,
        name: str = "activation",
        source: fx.Node | None = None,
    ) -> None:
        self._affine(node, self._path(node, name), source or node.all_input_nodes[0], weight, bias, activation)

    def _affine(
        self,
        node: fx.Node,
        path: str,
        source: fx.Node,
        weight: float,
        bias: float,
        activation: str = "NONE",
        batch_norm: FusedBatchNorm2d | None = None,
        fixed_range: tuple[float, float] | None = None,
        rule: Rule | None = None,
    ) -> None:
        """``activation(weight * source + bias)``, value by value: on the device a 1x1 depthwise convolution.

        The runtimes have operators of their own for some of these, with coarser arithmetic or outside of the fast
        kernels; a convolution is neither, and it takes any range and number of bits.
        """
        if source not in self.quantizers:
            self._stand_in(node)
            return
        rule = rule or self._rule(path)
        # The weights are constants, so there is no range of theirs to be learned.
        constant = replace(rule, ranges="ema", fixed_range=None, fold_batch_norm=False)
        stored = replace(rule, ranges="fixed", fixed_range=fixed_range) if fixed_range is not None else rule
        example = next(self.traced.parameters(), torch.empty(0))
        operation = DepthwiseConv2d(self._shape(source)[1], 1, bias=bias != 0, device=example.device)
        nn.init.constant_(operation.weight, weight)
        if operation.bias is not None:
            nn.init.constant_(operation.bias, bias)
        operation.requires_grad_(False)
        quantizer = FakeQuantize(stored, nonnegative=activation != "NONE" or fixed_range == (0.0, 1.0))
        layer = WeightedLayer(
            operation,
            WeightFakeQuantize(constant, operation.weight),
            quantizer,
            activation,
            self.quantizers[source],
            batch_norm,
        )
        layer.bounds = fixed_range
        self._add_layer(node, path, layer, (source,))

    def _batch_norm(self, node: fx.Node, module: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        if not module.track_running_stats:
            self._report(node, "batch norm without running statistics; the device needs them")
        elif len(self._shape(node)) not in (2, 4):
            self._report(node, f"batch norm on a tensor of shape {list(self._shape(node))}")
        elif self._claim(node):
            activation = self._take_activation(node, node)
            source = node.all_input_nodes[0]
            self._affine(node, str(node.target), source, 1.0, 0.0, activation, _fused_batch_norm(module))

    def _hard_sigmoid(self, node: fx.Node) -> None:
        path = self._path(node, "hardsigmoid")
        source = node.all_input_nodes[0]
        # Its two clamps are the ends of the int8 range.
        self._affine(node, path, source, 1 / 6, 0.5, fixed_range=(0.0, 1.0))

    def _hard_swish(self, node: fx.Node) -> None:
        """x * hard_sigmoid(x), in two operators: the runtime's own HARD_SWISH is outside of its fast kernels."""
        source = node.all_input_nodes[0]
        if source not in self.quantizers:
            self._stand_in(node)
            return
        path = self._path(node, "hardswish")
        gate = self._node_before(node, F.hardsigmoid, source)
        self._affine(gate, self._free(f"{path}_gate"), source, 1 / 6, 0.5, fixed_range=(0.0, 1.0))
        quantizer = FakeQuantize(self._rule(path))
        self._add_layer(node, path, QuantizedMultiply(quantizer), (source, gate))

    def _node_before(self, node: fx.Node, function: Callable[..., Any], source: fx.Node) -> fx.Node:
        """A step that the device takes on its way to `node` and that the user's model does not show."""
        with self.traced.graph.inserting_before(node):
            step = self.traced.graph.call_function(function, (source,))
        step.meta = dict(source.meta)
        return step

    def _concatenation(self, node: fx.Node) -> None:
        operands = self._argument(node, 0, "tensors")
        axis = self._argument(node, 1, "dim", 0)
        rank = len(self._shape(node))
        if rank not in (2, 4) or axis % rank != 1:
            self._report(node, f"concatenation along axis {axis}; only that of the channels (1) is supported")
            return
        if any(operand not in self.quantizers for operand in operands):
            self._stand_in(node)
            return
        path = self._path(node, "cat")
        rule = self._rule(path)
        sources = []
        for index, operand in enumerate(operands):
            if _same_ranges(self.quantizers[operand].rule, rule):
                sources.append(operand)
                continue
            # A tensor whose rule gives it another kind of range is stored once more, under the rule of the result.
            stored = self._node_before(node, torch.clone, operand)
            self._affine(stored, self._free(f"{path}_operand_{index}"), operand, 1.0, 0.0, rule=rule)
            sources.append(stored)
        shared = self._share([self.quantizers[source] for source in sources])
        self._add_layer(node, path, QuantizedConcatenation(shared), tuple(sources))
        if all(source in self.stored_high for source in sources):
            self.stored_high.add(node)

    def _share(self, quantizers: list[FakeQuantize]) -> FakeQuantize:
        """One quantizer in the place of several, everywhere: the device then joins their tensors as they are."""
        distinct = list(dict.fromkeys(quantizers))
        if len(distinct) == 1:
            return distinct[0]
        shared = FakeQuantize(distinct[0].rule, all(quantizer.range.nonnegative for quantizer in distinct))
        shared.range.writers = sum(quantizer.range.writers for quantizer in distinct)
        for module in self.root.modules():
            if isinstance(module, QuantizedLayer):
                module.replace_quantizers(distinct, shared)
        for node, quantizer in self.quantizers.items():
            if quantizer in distinct:
                self.quantizers[node] = shared
        return shared

    def _pool(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        if source not in self.quantizers:
            self._stand_in(node)
            return
        module = self._module(node)
        average = self._kind(node) in _AVERAGE_POOLS

        def setting(position: int, name: str, default: Any) -> Any:
            return getattr(module, name) if module is not None else self._argument(node, position, name, default)

        window = _pair(setting(1, "kernel_size", None))
        strides = _pair(setting(2, "stride", None) or window)
        padding = _pair(setting(3, "padding", 0))
        if average and setting(6, "divisor_override", None) is not None:
            self._report(node, "average pooling with divisor_override")
            return
        if not average and _pair(setting(4, "dilation", 1)) != (1, 1):
            self._report(node, "max pooling with dilation")
            return
        sizes = self._shape(source)[2:]
        reach = [size + 2 * zeros - side for size, zeros, side in zip(sizes, padding, window, strict=True)]
        # Under ceil_mode the last windows may reach over the edge, where PyTorch sees no values at all.
        over = [
            max(0, (count - 1) * stride - distance)
            for count, stride, distance in zip(self._shape(node)[2:], strides, reach, strict=True)
        ]
        pads: Pads = ((padding[0], padding[0] + over[0]), (padding[1], padding[1] + over[1]))
        same = tuple(
            same_padding(size, side, stride, 1) for size, side, stride in zip(sizes, window, strides, strict=True)
        )
        counts_zeros = average and bool(setting(5, "count_include_pad", True))
        chosen: str | Pads
        if average and any(over) and any(padding) and counts_zeros:
            self._report(
                node,
                "average pooling with ceil_mode that counts its padding; set count_include_pad=False",
            )
            return
        counts_zeros = counts_zeros and not any(over)
        if not any(padding) and not any(over):
            chosen = "VALID"
        elif same == pads and not counts_zeros:
            chosen = "SAME"
        elif counts_zeros or (not average and self.quantizers[source].range.nonnegative):
            # Among values that are not negative, zeros round the border change no maximum.
            chosen = pads
        else:
            what = "average pooling that does not count its padding" if average else "max pooling with padding"
            what += f" {padding}" + (" and ceil_mode" if any(over) else "")
            self._report(
                node,
                f"{what} on size {tuple(sizes)}: the device can do this behind a ReLU (maximum), or where the padding "
                "is TensorFlow's SAME",
            )
            return
        self._add_pool(node, "pool", source, window, strides, chosen, average)

    def _add_pool(
        self,
        node: fx.Node,
        name: str,
        source: fx.Node,
        window: tuple[int, int],
        strides: tuple[int, int],
        padding: str | Pads,
        average: bool,
    ) -> None:
        path = self._path(node, name)
        quantizer = self.quantizers[source]
        layer: QuantizedPool
        if average:
            layer = QuantizedAveragePool(quantizer, window, strides, padding, source in self.stored_high)
        else:
            layer = QuantizedMaxPool(quantizer, window, strides, padding)
        self._add_layer(node, path, layer, (source,))
        if source in self.stored_high:
            self.stored_high.add(node)

    def _adaptive_pool(self, node: fx.Node) -> None:
        module = self._module(node)
        size = (
            module.output_size if isinstance(module, nn.AdaptiveAvgPool2d) else self._argument(node, 1, "output_size")
        )
        source = node.all_input_nodes[0]
        sizes, results = self._shape(source)[2:], self._shape(node)[2:]
        if results == (1, 1):
            self._mean(node, keep_dims=True)
        elif any(full % part for full, part in zip(sizes, results, strict=True)):
            self._report(node, f"average pooling of {sizes} to {size}; only to a divisor of the size is supported")
        elif source not in self.quantizers:
            self._stand_in(node)
        else:
            window = (sizes[0] // results[0], sizes[1] // results[1])
            self._add_pool(node, "pool", source, window, window, "VALID", average=True)

    def _mean_call(self, node: fx.Node) -> None:
        axes = self._argument(node, 1, "dim")
        rank = len(self._shape(node.all_input_nodes[0]))
        spatial = isinstance(axes, tuple | list) and rank == 4 and sorted(axis % rank for axis in axes) == [2, 3]
        if spatial:
            self._mean(node, keep_dims=bool(self._argument(node, 2, "keepdim", False)))
        else:
            self._report(node, f"mean over axes {axes}; only the mean over height and width (2, 3) is supported")

    def _mean(self, node: fx.Node, keep_dims: bool) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        path = self._path(node, "mean")
        before = self.quantizers.get(source)
        nonnegative = before is not None and before.range.nonnegative
        layer = QuantizedMean(FakeQuantize(self._rule(path), nonnegative), keep_dims)
        self._add_layer(node, path, layer, (source,))

    def _flatten(self, node: fx.Node) -> None:
        module = self._module(node)
        if isinstance(module, nn.Flatten):
            axes = (module.start_dim, module.end_dim)
        else:
            axes = (self._argument(node, 1, "start_dim", 0), self._argument(node, 2, "end_dim", -1))
        source = node.args[0]
        assert isinstance(source, fx.Node)
        rank = len(self._shape(source))
        if (axes[0] % rank, axes[1] % rank) != (1, rank - 1):
            self._report(
                node, f"flatten over axes {axes}; only flattening to [batch, features] (start_dim=1) is supported"
            )
            return
        self._add_flatten(node, source)

    def _view(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = self._shape(source), self._shape(node)
        if after != (before[0], math.prod(before[1:])):
            self._report(
                node,
                f"{list(before)} seen as {list(after)}; only flattening to [batch, features] is supported; mix "
                "channels by a 1x1 Conv2d",
            )
            return
        self._add_flatten(node, source)

    def _squeeze(self, node: fx.Node) -> None:
        """[batch, channels, 1, 1] to [batch, channels], in one step or in two."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape = self._shape(node)
        whole = shape[:2] == self._shape(source)[:2] and math.prod(shape[2:]) == 1
        if whole and len(shape) == 2:
            self._add_flatten(node, source)
        elif whole and len(shape) == 3 and all(self._kind(reader) in (*_SQUEEZES, *_FLATTENS) for reader in node.users):
            self._alias(node, source)
        else:
            self._report_operator(node)

    def _item(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if self._shape(source)[2:] == (1, 1) and node.args[1] == (slice(None), slice(None), 0, 0):
            self._add_flatten(node, source)
        else:
            self._report_operator(node)

    def _add_flatten(self, node: fx.Node, source: fx.Node) -> None:
        self.values[node] = self.graph.call_function(torch.flatten, (self.values[source], 1))
        self._keep_quantizer(node, source)
        if math.prod(self._shape(source)[2:]) > 1:
            self.flattened.add(node)

    def _dropout(self, node: fx.Node, module: nn.Module | None) -> None:
        if module is None:
            self._report(node, "dropout as a function; use the module torch.nn.Dropout, which evaluation switches off")
            return
        source = node.args[0]
        assert isinstance(source, fx.Node)
        self.values[node] = self._call(self._path(node, ""), copy.deepcopy(module), (self.values[source],))
        self._keep_quantizer(node, source)

    def _outside(self, node: fx.Node) -> None:
        """A last function of the logits: computed in training, left to the program that runs the device."""
        module = self._module(node)
        if module is not None:
            arguments = (self.values[node.all_input_nodes[0]],)
            self.values[node] = self._call(self._path(node, ""), copy.deepcopy(module), arguments)
        else:
            self.values[node] = self.graph.node_copy(node, lambda source: self.values[source])
        self._keep_quantizer(node, node.all_input_nodes[0])


def _pair(value: Any) -> tuple[int, int]:
    """One number for both axes, or one for each."""
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)


def _same_ranges(first: Rule, second: Rule) -> bool:
    """Whether two rules ask for activation ranges of the same kind, so that tensors may share one."""
    names = ("activation_bits", "ranges", "fixed_range", "ema_decay", "percentile")
    return all(getattr(first, name) == getattr(second, name) for name in names)


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


def _fused_batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d) -> FusedBatchNorm2d:
    """The module as this library's batch norm, with a copy of its state."""
    converted = FusedBatchNorm2d(module.num_features, eps=module.eps, momentum=module.momentum, affine=module.affine)
    converted.load_state_dict(module.state_dict())
    return converted.to(module.running_mean.device)  # type: ignore[union-attr]
