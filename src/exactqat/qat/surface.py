# SPDX-License-Identifier: Apache-2.0
"""`prepare`, `calibrate` and `freeze` for every framework, chosen by the model's type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, overload

from ..deploy.formats.read_onnx import OnnxModel
from ..deploy.graph import Graph
from ..kit.device import DEFAULT_PROFILE, DeviceName
from ..kit.planning.rules import Rule
from .train.core.frameworks import kit_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .train.jax.prepared import Prepared
    from .train.keras.prepared import PreparedModel as KerasModel
    from .train.torch.prepared import PreparedModel as TorchModule

_DEFAULT_RULES = (Rule(),)


# Models by what they have, as a type checker may know some of the frameworks only.
class _OfTorch(Protocol):
    def named_buffers(self) -> Any: ...


class _OfKeras(Protocol):
    def count_params(self) -> Any: ...


class _Settings(TypedDict, total=False):
    device: DeviceName | str | None
    deployable: bool
    keep_final_activation: bool | None
    check: bool


@overload
def prepare(
    model: Callable[..., Any],
    example: object,
    rules: Iterable[Rule] = ...,
    *,
    variables: object,
    **settings: Unpack[_Settings],
) -> Prepared: ...
@overload
def prepare(
    model: _OfTorch | Graph | OnnxModel,
    example: object = None,
    rules: Iterable[Rule] = ...,
    **settings: Unpack[_Settings],
) -> TorchModule: ...
@overload
def prepare(
    model: _OfKeras, example: object = None, rules: Iterable[Rule] = ..., **settings: Unpack[_Settings]
) -> KerasModel: ...
@overload
def prepare(
    model: Callable[..., Any], example: object, rules: Iterable[Rule] = ..., **settings: Unpack[_Settings]
) -> Prepared: ...


def prepare(
    model: object,
    example: object = None,
    rules: Iterable[Rule] = _DEFAULT_RULES,
    *,
    variables: object = None,
    device: DeviceName | str | None = DEFAULT_PROFILE,
    deployable: bool = True,
    keep_final_activation: bool | None = None,
    check: bool = True,
) -> Any:
    """A copy of a model that trains under the device's arithmetic, in float32.

    Args:
        model: a PyTorch module, a Keras model, a Flax module, or a function of ``(params, *arguments)`` for JAX. It is
            not changed. It may also be what `deploy.read_tflite` or `deploy.read_onnx` returns, which becomes a PyTorch
            module (`qat.jax.prepare_file` and `qat.keras.prepare_file` are for the others). A file in integers computes
            these once it is frozen, until a training step moves them; it takes only `device` and `check`, as its grids
            stay the file's. A file in float32 is quantized by `rules`, like any model.
        example: a batch as the model takes it: an array, or a tuple of positional or a dictionary of keyword arguments.
            Its values do not matter, nor does the number of examples. Keras models that know their sizes need none.
        rules: settings by the paths of layers; see `Rule`. The first match decides. A single input is called
            ``"input"``; several have the names of their arguments.
        variables: the parameters of a JAX function, or the variables of a Flax Linen module; for no other model.
        device: the device whose integers the network computes once it is frozen, a name in `deploy.PROFILES`:
            ``"xnnpack-x86"``, ``"xnnpack-arm64"``, ``"reference"``, ``"micro"`` or ``"onnxruntime-x86"``. None: it
            stays fake quantization, which rounds sums differently (up to a few percent of a deep network's codes).
        deployable: refuse rules that the device cannot run. Turn it off to study other settings in training only.
        keep_final_activation: whether a softmax, log-softmax, sigmoid or argmax at the very end is part of the file.
            None: it is not, with a `FinalActivationWarning`.
        check: run the model alongside the prepared one, with quantization and randomness off, and compare results,
            gradients and buffers, in training and evaluation and for several sizes of batches.

    Returns:
        What the framework's own `prepare` returns: a `qat.torch.PreparedModel`, a `qat.keras.PreparedModel`, or a
        `qat.jax.Prepared`, whose parameters and state are kept outside it.

    Raises:
        UnsupportedOperator: a part of the model cannot run on the device, or was not captured as it is; every place is
            named.
        ValueError: no rule matches a layer, a rule cannot be deployed, or there is no such device.
        TypeError: the model's framework is not supported, or an argument is missing or not what the model takes.
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
        return _file("torch", "prepare").prepare_file(model, rules=rules, **options)
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
    if example is None and framework != "keras":
        raise TypeError("prepare needs example, a batch as the model gets it: qat.prepare(model, images[:2])")
    return kit.prepare(model, example, rules=rules, **options)


def calibrate(model: object, batches: Iterable[Any], restart: bool = False) -> None:
    """Sets all activation ranges from data: runs the float network, in evaluation mode, over `batches` of inputs.

    Args:
        model: a prepared PyTorch or Keras model. For JAX it is a method, as parameters and state are kept outside the
            model: ``params, state = prepared.calibrate(params, state, batches)``.
        batches: each an array, or a tuple of positional or a dictionary of keyword arguments. A loader of ``(x, y)``
            will do for a model that takes one argument: `y` is left out.
        restart: forget what ranges have seen in training or calibration; otherwise that counts as earlier batches.
            Learned ranges start over, too.

    Raises:
        ValueError: the model is frozen, there is no batch, or one gives values that are not finite. The ranges then
            stay as they were.
        TypeError: batches is one array, one of them is not what the model takes, or the model is not prepared.
    """
    _prepared(model).calibrate(model, batches, restart)


def freeze(model: object) -> None:
    """Starts the last phase of training: batch norm's statistics and ranges are fixed, biases are on the int32 grid.

    From here on the model computes what the device computes, integer for integer; weights, gamma, beta and biases may
    still be trained, with the gradients of real numbers.

    Args:
        model: a prepared PyTorch or Keras model. For JAX it is a method: ``params, state = prepared.freeze(params,
            state)``.

    Warns (`UnsettledStatisticsWarning`) of batch norms whose running statistics have seen too few training batches, and
    (`RangesMovedWarning`) where it had to move ranges, because the device's operators cannot take them together.

    Raises:
        ValueError: a range or a batch norm's statistics are not finite.
        RuntimeError: a range has seen no data.
        TypeError: the model is not prepared.
    """
    _prepared(model).freeze(model)


def _prepared(model: object) -> Any:
    """The module with `calibrate` and `freeze` for a prepared model.

    Raises:
        TypeError: they are methods, as for JAX, or the model's framework is not supported.
    """
    framework = kit_of(model)
    if framework == "jax":
        raise TypeError(
            f"model must be a prepared PyTorch or Keras model, got {type(model).__name__}, whose parameters and state "
            "are outside of it: call its methods calibrate, freeze and lower with params and state"
        )
    return _file(framework, "prepared")


def _file(framework: str, name: str) -> Any:
    """A module of a framework's training, imported when it is needed."""
    return import_module(f"exactqat.qat.train.{framework}.{name}")
