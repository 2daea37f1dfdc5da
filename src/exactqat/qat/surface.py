# SPDX-License-Identifier: Apache-2.0
"""`prepare`, `calibrate` and `freeze` for every framework: the model says which one it is of."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..deploy.formats.read_onnx import OnnxModel
from ..deploy.graph import Graph
from ..device import DEFAULT_PROFILE
from ..planning.rules import Rule
from ..train.core.frameworks import kit_of

_DEFAULT_RULES = (Rule(),)


def prepare(
    model: Any,
    example: Any = None,
    rules: Iterable[Rule] = _DEFAULT_RULES,
    *,
    variables: Any = None,
    device: str | None = DEFAULT_PROFILE,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    check: bool = True,
) -> Any:
    """A copy of a model that trains under the device's arithmetic, in float32.

    Args:
        model: a PyTorch module, a Keras model, a Flax module, or a function of ``(params, *arguments)`` for JAX. It is
            not changed. Or what `deploy.read_tflite` or `deploy.read_onnx` gives, which becomes a PyTorch module
            (`qat.jax.prepare_file` and `qat.keras.prepare_file` are for the others). One in integers computes these
            once it is frozen, until a step of training moves them; it takes `device` and `check` alone, as its grids
            stay the file's. One in float32 is quantized by `rules`, as any model.
        example: a batch as the model gets it: an array, or a tuple of positional or a dictionary of keyword arguments.
            Its values do not matter, nor does the number of examples. Models of Keras that know their sizes need none.
        rules: settings by the paths of layers; see `Rule`. The first match decides. The input is called ``"input"``,
            several ones by the names of the arguments.
        variables: the parameters of a JAX function, or the variables of a Flax Linen module; for no other model.
        device: whose integers the network computes once it is frozen, a name of `deploy.PROFILES`: ``"xnnpack-x86"``,
            ``"xnnpack-arm64"``, ``"reference"``, ``"micro"`` or ``"onnxruntime-x86"``. None: it stays fake
            quantization, which rounds sums otherwise (up to some percent of a deep network's codes).
        deployable: refuse rules that the device cannot run. Turn it off to study other settings in training only.
        keep_final_activation: whether a softmax, log-softmax, sigmoid or argmax at the very end is a part of the file.
            None: it is not, with a `FinalActivationWarning`.
        check: run the model beside the prepared one, quantization and randomness off, and compare results, gradients
            and buffers, in training and evaluation and for several sizes of batches.

    Returns:
        What the framework's own `prepare` returns: a `qat.torch.PreparedModel`, a `qat.keras.PreparedModel`, or a
        `qat.jax.Prepared`, whose parameters and state are outside of it.

    Raises:
        UnsupportedOperator: a part of the model cannot run on the device, or was not captured as it is; every place is
            named.
        ValueError: no rule matches a layer, a rule cannot be deployed, or there is no such device.
        TypeError: the model is of no framework, or an argument is missing or not what the model takes.
    """
    options: dict[str, Any] = {
        "device": device,
        "deployable": deployable,
        "keep_final_activation": keep_final_activation,
        "check": check,
    }
    if isinstance(model, Graph | OnnxModel):
        for name, value in {"example": example, "variables": variables}.items():
            if value is not None:
                raise TypeError(f"{name} is not for a {type(model).__name__}: a file says itself what it takes")
        return _file("torch", "from_file").prepare_file(model, rules=rules, **options)
    framework = kit_of(model)
    kit = _file(framework, "prepare")
    if variables is not None:
        if framework != "jax":
            raise TypeError("variables are for functions of JAX and Flax modules; other models have theirs with them")
        return kit.prepare(model, variables, example, rules=rules, **options)
    if framework == "jax" and kit.takes_variables(model):
        raise TypeError(
            f"model must be a torch.nn.Module, a keras.Model or an NNX module, got {type(model).__name__}; for JAX "
            "give its parameters too: qat.prepare(model, example, variables=params) (exactqat.qat.jax)"
        )
    if framework == "keras":
        return kit.prepare(model, rules, example, **options)
    if example is None:
        raise TypeError("prepare needs example, a batch as the model gets it: qat.prepare(model, images[:2])")
    return kit.prepare(model, example, rules=rules, **options)


def calibrate(model: Any, batches: Iterable[Any], restart: bool = False) -> None:
    """Sets all activation ranges from data: runs the float network, in evaluation mode, over `batches` of inputs.

    Args:
        model: a prepared PyTorch or Keras model. For JAX it is a method, as parameters and state are outside of the
            model: ``params, state = prepared.calibrate(params, state, batches)``.
        batches: each an array, or a tuple of positional or a dictionary of keyword arguments. A loader of ``(x, y)``
            will do for a model that takes one argument: `y` is left out.
        restart: forget what ranges have seen in training or calibration; otherwise that counts as earlier batches.
            Ranges that are learned begin again, too.

    Raises:
        ValueError: the model is frozen, there is no batch, or one gives values that are not finite. Ranges are then as
            they were before.
        TypeError: batches is one array, one of them is not what the model takes, or the model is not prepared.
    """
    _prepared(model).calibrate(model, batches, restart)


def freeze(model: Any) -> None:
    """Starts the last phase of training: batch norm's statistics and ranges are fixed, biases are on the int32 grid.

    From here on the model computes what the device computes, integer for integer; weights, gamma, beta and biases may
    still be trained, with the gradients of real numbers.

    Args:
        model: a prepared PyTorch or Keras model. For JAX it is a method: ``params, state = prepared.freeze(params,
            state)``.

    Warns (`UnsettledStatisticsWarning`) of batch norms whose running statistics have seen too few training batches, and
    (`RangesMovedWarning`) where it had to move ranges, because the device's operators cannot take them beside one
    another.

    Raises:
        ValueError: a range or a batch norm's statistics are not finite.
        RuntimeError: a range has seen no data.
        TypeError: the model is not prepared.
    """
    _prepared(model).freeze(model)


def _prepared(model: Any) -> Any:
    """The file of `calibrate` and `freeze` for a prepared model.

    Raises:
        TypeError: they are methods, as for JAX, or the model is of no framework.
    """
    framework = kit_of(model)
    if framework == "jax":
        raise TypeError(
            f"model must be a prepared PyTorch or Keras model, got {type(model).__name__}, whose parameters and state "
            "are outside of it: call its methods calibrate, freeze and lower with params and state"
        )
    return _file(framework, "prepared")


def _file(framework: str, name: str) -> Any:
    """A file of a framework's training, imported when it is needed."""
    return import_module(f"exactqat.train.{framework}.{name}")


__all__ = ["calibrate", "freeze", "prepare"]
