# SPDX-License-Identifier: Apache-2.0
"""Training steps on a GPU without the time Python takes to launch their kernels: CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .collectives import several_processes
from .prepared import PreparedModel
from .primitives import constants_in_use


class GraphedModel(nn.Module):
    """A prepared model whose training calls replay CUDA graphs of its forward and backward pass. Made by `graphed`.

    It computes the same bits as the model itself. Calls that differ from the captured one (other shapes, evaluation, a
    frozen model, other trained parameters) go to the model.

    Attributes:
        model: the prepared model; parameters and state are the same tensors.
        replays: whether the last call replayed a graph.
    """

    def __init__(self, model: PreparedModel, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.model = model
        self.replays = False
        self._modules_of_model = tuple(model.modules())
        before = self._situation(inputs)
        self._captured = _captured(model, inputs)
        if self._situation(inputs) != before:
            raise ValueError(
                "graphed: the model must keep its parameters and buffers where they are while it trains, as a CUDA "
                "graph reads and writes them there; this one puts other tensors in their place"
            )
        self._captured_in = before

    def forward(self, *inputs: Any) -> Any:
        self.replays = self._situation(inputs) == self._captured_in
        if not self.replays:
            return self.model(*inputs)
        self.model.require_rows(inputs)
        captured = self._captured
        results = Replay.apply(captured, len(inputs), *inputs, *captured.parameters)
        return tree_unflatten(list(results), captured.tree)

    def _situation(self, inputs: tuple[Any, ...]) -> Hashable:
        """All that a captured call depends on besides the tensors' values."""
        model = self.model
        held = (*model.parameters(), *model.buffers())
        return (
            tuple(
                (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
                for tensor in inputs
                if isinstance(tensor, Tensor)
            ),
            len(inputs),
            tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in held),
            tuple(module.training for module in self._modules_of_model),
            model.keeps_nothing and not _has_hooks(self._modules_of_model),
            torch.is_grad_enabled() and not torch.compiler.is_compiling(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )


def _has_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether user functions are called with modules: a graph calls none."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )


def graphed(model: PreparedModel, *inputs: Tensor) -> GraphedModel:
    """Captures a training step's forward and backward pass in CUDA graphs, as `torch.cuda.make_graphed_callables` does.

    A network of small layers spends most of a step in Python, which launches one kernel after the other; a graph
    launches them all at once. Call the returned module where the loop called the model; optimizer and loss stay as they
    are, and so does every bit. `qat.freeze`, `deploy` and evaluation take the model itself, as before::

        step = qat.graphed(prepared, images)
        for images, labels in loader:
            loss = F.cross_entropy(step(images), labels)

    Args:
        model: on a GPU, in training, calibrated and not frozen. Its state is unchanged.
        inputs: one batch, as passed to the model; its values do not matter. Batches of other shapes, such as an epoch's
            last, go to the model itself.

    Returns:
        A module with the model's parameters. Each call's backward pass has to come before the next call, as the graphs
        keep one call's values; otherwise it raises RuntimeError.

    Raises:
        TypeError: the model is not a prepared model, or an input is not a tensor.
        ValueError: the model is not on one GPU, in evaluation, frozen, has hooks, or is trained by several processes.
        RuntimeError: from PyTorch: a step of the model waits for the GPU, so it cannot be captured.
    """
    if not isinstance(model, PreparedModel):
        raise TypeError(f"graphed: model must be a prepared model of PyTorch, got {type(model).__name__}")
    if not inputs or not all(isinstance(argument, Tensor) for argument in inputs):
        kinds = ", ".join(type(argument).__name__ for argument in inputs) or "nothing"
        raise TypeError(f"graphed: inputs must be the tensors of one batch, got {kinds}")
    places = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers(), *inputs)})
    if len(places) > 1 or not places[0].startswith("cuda"):
        raise ValueError(f"graphed: model and inputs must be on one GPU, got tensors on {', '.join(places)}")
    if not (model.training and model.keeps_nothing):
        state = "in evaluation" if not model.training else "frozen"
        raise ValueError(f"graphed: the model must be in training and not frozen, got one that is {state}")
    if _has_hooks(tuple(model.modules())):
        raise ValueError("graphed: the model must have no hooks, as a CUDA graph calls none of them")
    if several_processes():
        raise ValueError("graphed: the model must be trained by one process, got several")
    return GraphedModel(model, inputs)


# Calls before a capture, in which libraries choose kernels and memory is allocated.
_WARM_UP = 3


class _Captured:
    """CUDA graphs of one model's forward and backward pass, and the memory that they read and write.

    `torch.cuda.make_graphed_callables` returns that memory itself: an accumulated gradient, or a result that is kept,
    would be overwritten by the next call.
    """

    def __init__(self, model: PreparedModel, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._differentiated = [*(tensor for tensor in self.inputs if tensor.requires_grad), *self.parameters]
        stream = torch.cuda.Stream(inputs[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                results = self._results(model)[0]
                self._gradients(results, [torch.empty_like(result) for result in results if result.requires_grad])
                del results
        torch.cuda.current_stream().wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with constants_in_use() as self._constants:
            with torch.cuda.graph(self._forward, pool=pool):
                results, self.tree = self._results(model)
            self._result_gradients = [torch.empty_like(result) for result in results if result.requires_grad]
            with torch.cuda.graph(self._backward, pool=pool):
                self._input_gradients = self._gradients(results, self._result_gradients)
        self.calls = 0
        self.has_gradient = [result.requires_grad for result in results]
        self._results_of_graph = [result.detach() for result in results]

    def _results(self, model: PreparedModel) -> tuple[list[Tensor], TreeSpec]:
        leaves, tree = tree_flatten(model(*self.inputs))
        return leaves, tree

    def _gradients(self, results: list[Tensor], of_results: list[Tensor]) -> list[Tensor | None]:
        differentiable = [result for result in results if result.requires_grad]
        if not (differentiable and self._differentiated):
            return [None] * len(self._differentiated)
        return list(torch.autograd.grad(differentiable, self._differentiated, of_results, allow_unused=True))

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Results, in memory of their own."""
        for held, tensor in zip(self.inputs, inputs, strict=True):
            held.detach().copy_(tensor)
        self.calls += 1
        self._forward.replay()
        return [result.clone() for result in self._results_of_graph]

    def replay_backward(self, of_results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of inputs and parameters that have one, in memory of their own."""
        gradients = [gradient for gradient, has in zip(of_results, self.has_gradient, strict=True) if has]
        for held, gradient in zip(self._result_gradients, gradients, strict=True):
            if gradient is None:
                held.zero_()
            else:
                held.copy_(gradient)
        self._backward.replay()
        originals = [gradient for gradient in self._input_gradients if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in originals]
        if originals:
            torch._foreach_copy_(copies, originals)
        rest = iter(copies)
        return [None if gradient is None else next(rest) for gradient in self._input_gradients]


class Replay(torch.autograd.Function):
    """A call of what was captured; the parameters are operands so that gradients reach them."""

    @staticmethod
    def forward(ctx: Any, captured: _Captured, count: int, *operands: Tensor) -> Any:
        ctx.captured, ctx.needed = captured, [operand.requires_grad for operand in operands[:count]]
        ctx.set_materialize_grads(False)
        results = captured.replay(operands[:count])
        ctx.moment = captured.calls, [parameter._version for parameter in captured.parameters]
        ctx.mark_non_differentiable(
            *(result for result, has in zip(results, captured.has_gradient, strict=True) if not has)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        captured = ctx.captured
        if ctx.moment != (captured.calls, [parameter._version for parameter in captured.parameters]):
            raise RuntimeError(
                "graphed: a call's backward pass must come before the next call and before parameters change, as CUDA "
                "graphs keep the values of one call; make the calls in between with the model itself"
            )
        of_operands = iter(captured.replay_backward(gradients))
        of_inputs = [next(of_operands) if needed else None for needed in ctx.needed]
        return None, None, *of_inputs, *of_operands


def _captured(model: PreparedModel, inputs: tuple[Tensor, ...]) -> _Captured:
    """Captures, and leaves statistics, ranges and random numbers, which a capture's calls change, as they were."""
    held, device = [*model.parameters(), *model.buffers()], inputs[0].device
    kept, drawn = [tensor.detach().clone() for tensor in held], torch.cuda.get_rng_state(device)
    try:
        # In autocast PyTorch caches copies of weights between calls, which a graph would go on reading.
        with (
            torch.cuda.device(device),
            torch.enable_grad(),
            torch.autocast(
                "cuda",
                torch.get_autocast_dtype("cuda"),
                enabled=torch.is_autocast_enabled("cuda"),
                cache_enabled=False,
            ),
        ):
            return _Captured(model, inputs)
    finally:
        with torch.no_grad():
            for tensor, value in zip(held, kept, strict=True):
                tensor.copy_(value)
        torch.cuda.set_rng_state(drawn, device)
