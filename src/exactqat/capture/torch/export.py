# SPDX-License-Identifier: Apache-2.0
"""`torch.export` of a model, and why it failed, where in the user's code."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ...display import shortened
from ...planning.network import Place
from ..core.refusals import CaptureError, Refused, first_line
from .gradients import Marked, marking
from .steps import NOT_USERS


def takes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> bool:
    """Whether a model runs on the example with other shapes; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), silent(), states_of_lstm():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(changed(tuple(tensor.shape)), dtype=tensor.dtype, device=tensor.device)

        given_args, given_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        try:
            model(*given_args, **given_kwargs)
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            # What depends on values is another matter than shapes.
            return any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutputShape"))
    return True


def exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Marked]:
    try:
        with silent(), states_of_lstm(), marking() as marked:
            return torch.export.export(model, args, kwargs or None, strict=False), marked
    except Exception as error:
        raise CaptureError(_explained(model, error)) from error


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """PyTorch prints the graph and its advice on its own exceptions; ours says what matters."""
    logger, silence = logging.getLogger("torch"), io.StringIO()
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def states_of_lstm() -> Iterator[None]:
    """PyTorch before 2.12 says of `nn.LSTM`'s last states, where it only follows shapes, that they have a dimension
    more than they have when it runs, unless the batch has one example: `[layers, 1, batch, units]`."""
    original = getattr(decompositions, "one_layer_lstm", None)
    if original is None:
        yield
        return

    def corrected(*args: Any, **kwargs: Any) -> Any:
        sequence, states = original(*args, **kwargs)
        return sequence, tuple(state.reshape(state.shape[-2:]) for state in states)

    decompositions.one_layer_lstm = corrected
    try:
        yield
    finally:
        decompositions.one_layer_lstm = original


def _explained(model: nn.Module, error: BaseException) -> str:
    """Why an export failed, where in the user's code, and what to do."""
    paths = {id(module): path for path, module in model.named_modules()}
    file, line, code, path = "", 0, "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            path = paths[id(owner)]
        if not name.startswith((*NOT_USERS, "<")):
            file, line = name, number
            code = linecache.getline(name, number).strip()
    place = Place(path, file, line)
    text = first_line(error)
    kind = type(error).__name__
    if isinstance(error, Refused):
        reason = text
    elif "DataDependent" in kind or "data-dependent" in text or "dynamo.exc" in type(error).__module__:
        reason = (
            "what it does depends on the values of a tensor; a network that is deployed does the same for every input: "
            "take the branch or the number out of forward (torch.where, a mask, a constant)"
        )
    elif "register a pytree" in text:
        reason = (
            f"{text.split(',')[0]}: return tensors, tuples, lists, dictionaries or named tuples, or register the class "
            "(torch.export.register_dataclass) before"
        )
    else:
        reason = f"{kind}: {text}"
    return f"the model cannot be captured: {place}{f': {shortened(code, 100)}' if code else ''}: {reason}"
