# SPDX-License-Identifier: Apache-2.0
"""What it takes to declare an operator of the device: everything else in the kit follows from these declarations.

A declaration is a subclass of `DeviceOperator` in the file of its family, registered by `@register`. It says which
tensors the operator takes, what it computes in real numbers (for training) and in integers (for each profile of
rounding), and its form in the files. Planning, training, lowering, validation, the simulator, both writers, the
verifier and the sweep against the runtimes read it there; nowhere else are operators distinguished by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .attribute import REQUIRED as REQUIRED
from .attribute import Attributes
from .file_forms import FieldValue, FileOperator, InOperand, Option
from .presence import lacks
from .primitives import NUMPY, A, RealPrimitives, ResultGrid
from .profile import KINDS, Profile
from .real import real_numbers
from .refusals import Refusal, need
from .refusals import Unreadable as Unreadable
from .stated_arithmetic import Arithmetic
from .tensor import INDICES, PLAIN, Tensor, per_tensor
from .tensor import Quantization as Quantization

if TYPE_CHECKING:
    from .contexts import (
        GraphBuilder,
        LoweringContext,
        NetworkContext,
        OnnxWriter,
        PlanContext,
        PlannedStep,
    )

Fields = Mapping[str, FieldValue]
# What files hold as an operand and graphs as an attribute: name and integers, int32 if they are not an array.
FileConstant = tuple[str, np.ndarray | Sequence[int] | Sequence[Sequence[int]]]
# The dtypes of real numbers, and of conditions.
FLOAT, BOOL = "float32", "bool"
# Of operators of a fixed grid whose result is on another one.
OWN_GRID = "own_grid"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where the axes of the user's tensor lie on the device: `axes[k]` is the user's axis that device axis k holds.

    -1 means an axis of size 1 that the user's tensor does not have. The batch comes first on the device. `order`:
    of the last axis, where its elements lie elsewhere too; place k holds the user's element order[k].
    """

    axes: tuple[int, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LoweredTensor:
    """A tensor of the graph and the positions of the user's axes."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class FileStep:
    """One operator of a .tflite file.

    Attributes:
        kind, version: the operator's code.
        operands: positions among the graph operator's inputs, names of earlier steps, or constants that only the file
            has (of quantization `INDICES` where they stand for themselves); None: left out.
        options, fields: name of the options table without the final T, and its fields.
        name, dtype: of the intermediate result that it makes; nothing for the last step.
        shape: likewise, if it is not that of the result.
        intermediates: tensors of the file that only give an operator grids.
    """

    kind: str
    operands: tuple[int | str | Tensor | None, ...]
    version: int = 1
    options: str = ""
    fields: Fields = field(default_factory=dict)
    name: str = ""
    dtype: str = ""
    shape: Shape | None = None
    intermediates: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator: `kind` is TensorFlow Lite's name, inputs and outputs are tensor names, attributes as declared.

    built_in: the file that it was read from computes its sizes when it runs. LiteRT's delegates leave such an operator
    to the built-in kernels, which round single codes differently: it is simulated as the reference kernel, and claimed
    to be exact only on devices without delegates. A file that this library writes states all sizes.
    unsigned: the file that it was read from holds its codes in uint8, as TensorFlow 1 did; they are 128 above the
    graph's. Such a filter may have a zero point.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes = field(default_factory=dict)
    built_in: bool = False
    unsigned: bool = False


@dataclass(frozen=True)
class ScaleLimits:
    """How far the scales of an operator's operands may lie from that of its result, for the kernels' fixed point.

    Attributes:
        of: what is bounded: "each" operand's scale or their "product", divided by the result's; or the "operand" alone.
        lowest, highest: lowest <= what is bounded < highest.
    """

    of: str
    lowest: float = 0.0
    highest: float = math.inf

    def bounded(self, operands: Sequence[Any], result: Any) -> list[float]:
        """What has to lie within the limits, computed in the scales' own type."""
        if self.of == "operand":
            return [float(scale) for scale in operands]
        over = operands if self.of == "each" else [math.prod(operands)]
        return [float(scale / result) for scale in over]

    def need(self, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Raises Refusal if these tensors' scales are not within the limits."""
        scales = [tensor.quantization.scale[0] for tensor in (*inputs, output)]
        what = {
            "each": "input scale / output scale",
            "product": "product of the input scales / output scale",
            "operand": "input scale",
        }[self.of]
        for value in self.bounded(scales[:-1], scales[-1]):
            message = f"{what} must be {self}, got {value:g}"
            need(self.lowest <= value < self.highest, message)

    def __str__(self) -> str:
        ends = [f"2**{math.log2(end):g}" if 0 < end < 1 else f"{end:g}" for end in (self.lowest, self.highest)]
        if math.isinf(self.highest):
            return f"at least {ends[0]}"
        return f"in [{ends[0]}, {ends[1]})" if self.lowest else f"below {ends[1]}"


@dataclass(frozen=True)
class Call:
    """What an operator computes its results from.

    Attributes:
        codes: of all operands.
        inputs, outputs: tensors of the operands and of the results.
        profile: of the device that rounds.
    """

    codes: Sequence[np.ndarray]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    attributes: Attributes
    profile: Profile

    @property
    def output(self) -> Tensor:
        """The first result, which most operators have alone."""
        return self.outputs[0]


class DeviceOperator:
    """One operator of the device. Class attributes describe it, methods are its meanings.

    Attributes:
        kind: TensorFlow Lite's name.
        attributes: names and defaults of its attributes on the device; `REQUIRED` where there is no default.
        in_file: attributes -> how files hold them, where they hold each by itself; then nobody has to say more.
        operands: smallest and largest number of operands (None: any number).
        same_quantization: the device moves or compares codes without rescaling them: the result is stored on the grid
            of its operands.
        conditions: positions of the operands that are true or false.
        index_operands: positions of the operands that are numbers of rows, which need not lie on the result's grid.
        index_dtypes: of these: int32, which are no codes (see `rows`), or codes.
        moves_codes: every code of the result is one of the operands' codes or the zero point, whatever the profile; so
            `real` says exactly what the device does, with any numbers in place of the codes.
        dtypes: what its activations can be stored in, all of them in the same: "int8", "int16".
        plain: integers without a grid with which it also computes, by `plain_integers`: "int32", "int64". What moves
            codes moves them all.
        narrow: positions of the operands that may be constants in int8 beside int16.
        changes_dtype: the result may be stored in another of them than the operand.
        floats: files may have it in float32 as well, between integers. It is computed there by `float_results`, and no
            equality is claimed.
        fixed_grid: (scale, int8 zero point) of the result where the device fixes it, as for LOGISTIC; else None. In
            int16 all of them are 1 / 32768 and 0.
        free_in_onnx: others' .onnx files have the result on any grid, where devices fix it or take the operand's; in
            that form it has a name of its own (`OWN_GRID`).
        dequantizes: LiteRT's kernel takes real numbers, or codes of uint8 for these.
        spatial: the first operand lies as [batch, height, width, channels]; a plan names its `channel_axis`.
        axis_attributes: attributes that hold axes, one or several.
        per_axis_attributes: attributes with one entry for each axis -> the entry of an axis of size 1 that the device
            adds.
        per_window_attributes: attributes with one entry for each spatial axis -> likewise.
        filter_axis: the filter's axis of output channels on the device, for operators with weights; else None.
        weights_follow_features: the order of the last axis does not matter, because the weights can follow it.
        moves_axes: it changes the user's axes: permutes, splits or joins them.
        pointwise: each value of the result follows from one value of each operand, which broadcast, and from nothing
            else.
        adds: a sum, whose operands' steps may be at most 256 times those of the result.
        averages: each value of the result is the mean of several of the operand's, between whose codes it lies.
        version: the lowest version of the operator in a .tflite file that carries its int8 form.
        wide_version: likewise its int16 form, if that is another one; else 0.
        options: the name of its options table in the .tflite schema, without the final T.
        custom_code: of an operator that the schema does not have, what files call it; its options are a map.
        weights: positions of the operands that must be constants.
        states: positions of the operands that are variables: read, and written for the next call. `all_results` then
            returns what they hold afterwards too, after the results.
        constants: whether other operands may be constants too (one at least is an activation).
        refuses_negative: LiteRT does not run it with an operand below real 0.
        uses_operand_scale: `real` has use for the scale of its first operand, as the attribute `operand_scale`.
        most_axes: of an operand or the result, which runtimes take.
        any_batch: whether the file serves any batch; otherwise one example at a time.
        purpose: what it is declared for, where no plan makes it of a step; else "".
        order: positions in the file's list of operands, where it is not that of the graph's operands followed by
            `tflite_operands`.
        other_forms: kinds of the file's operators, in order, where the file says it in several.
        float_kind: the kind of a network's step (`planning.kinds`) that computes the same in real numbers; "": there is
            none, or several do.
        as_in_onnx: in ONNX it is the operator of that name between DequantizeLinear and QuantizeLinear, as others write
            it too, and of their files with codes in uint8 none of its results was found to differ.
        real_in_onnx: others' .onnx files do it with real numbers, where those that are written here do it with codes.
        mechanisms: properties of `Profile` -> how they make devices differ here, where `profile.MECHANISMS` does not
            say it; with ":ties", where all results that differ lie half way between two codes.
        asks: what `stated` asks a device's arithmetic, groups of questions of `hypotheses.GROUPS`: those of one entry
            show together, and those of the entries before are answered by then.
    """

    kind: ClassVar[str]
    attributes: ClassVar[Attributes] = {}
    in_file: ClassVar[Mapping[str, Option | InOperand]] = {}
    operands: ClassVar[tuple[int, int | None]] = (1, 1)
    same_quantization: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("int8",)
    plain: ClassVar[tuple[str, ...]] = ()
    narrow: ClassVar[tuple[int, ...]] = ()
    changes_dtype: ClassVar[bool] = False
    floats: ClassVar[bool] = False
    conditions: ClassVar[tuple[int, ...]] = ()
    index_operands: ClassVar[tuple[int, ...]] = ()
    index_dtypes: ClassVar[tuple[str, ...]] = ("int32",)
    moves_codes: ClassVar[bool] = False
    adds: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    fixed_grid: ClassVar[tuple[float, int] | None] = None
    free_in_onnx: ClassVar[bool] = False
    dequantizes: ClassVar[bool] = False
    spatial: ClassVar[bool] = False
    axis_attributes: ClassVar[tuple[str, ...]] = ()
    per_axis_attributes: ClassVar[Attributes] = {}
    per_window_attributes: ClassVar[Attributes] = {}
    filter_axis: ClassVar[int | None] = None
    weights_follow_features: ClassVar[bool] = False
    moves_axes: ClassVar[bool] = False
    pointwise: ClassVar[bool] = False
    version: ClassVar[int] = 1
    wide_version: ClassVar[int] = 0
    options: ClassVar[str] = ""
    custom_code: ClassVar[str] = ""
    weights: ClassVar[tuple[int, ...]] = ()
    states: ClassVar[tuple[int, ...]] = ()
    constants: ClassVar[bool] = False
    refuses_negative: ClassVar[bool] = False
    uses_operand_scale: ClassVar[bool] = False
    most_axes: ClassVar[int] = 6
    any_batch: ClassVar[bool] = True
    purpose: ClassVar[str] = ""
    order: ClassVar[tuple[int, ...] | None] = None
    other_forms: ClassVar[tuple[tuple[str, ...], ...]] = ()
    float_kind: ClassVar[str] = ""
    as_in_onnx: ClassVar[bool] = False
    real_in_onnx: ClassVar[bool] = False
    mechanisms: ClassVar[Mapping[str, str]] = {}
    asks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    # --- what it is -------------------------------------------------------------------------------------------------

    def shapes(self, shapes: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        """Shapes of all results; most operators have one.

        Raises:
            Refusal: the operands do not fit.
        """
        return (self.shape(shapes, attributes),)

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        """Shape of the result on the device (batch 1) from those of all operands, constants included.

        Raises:
            Refusal: the operands do not fit.
        """
        return tuple(shapes[0])

    def checked_shapes(self, shapes: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        """`shapes`, of attributes and operands that were looked at.

        Raises:
            Refusal: the attributes are none, or the operands do not fit them.
        """
        self.check_attributes(attributes)
        results = self.shapes(shapes, attributes)
        most = max(map(len, (*shapes, *results)))
        need(most <= self.most_axes, f"tensors have at most {self.most_axes} axes here, got {[*shapes, *results]}")
        return results

    def dtype(self, attributes: Attributes, stored: str = "int8") -> str:
        """What the result is in: indices in the type asked for, all else in that of its grid."""
        return stored

    def result_dtypes(self, attributes: Attributes, stored: str, count: int) -> tuple[str, ...]:
        """`dtype` of each of so many results; what is in another one than the first holds indices."""
        return (self.dtype(attributes, stored),) * count

    def takes_plain(self, dtype: str) -> bool:
        """Whether it moves, or computes with, numbers without a grid in that dtype."""
        return dtype in (PLAIN if self.moves_codes else self.plain)

    def planned_in(self, dtype: str) -> bool:
        """Whether plans make it with activations in that dtype; files may have others of `dtypes`."""
        return dtype in self.dtypes

    def grid_fixed_in(self, dtype: str) -> tuple[float, int] | None:
        """`fixed_grid`, where activations are stored in that dtype."""
        return (1 / 32768, 0) if self.fixed_grid is not None and dtype == "int16" else self.fixed_grid

    def measured_as(self, inputs: Sequence[Tensor], output: Tensor) -> str:
        """Under which name it was compared with the runtimes: the kind, and the dtype if it is not int8."""
        if any(tensor.dtype == FLOAT for tensor in inputs):
            return f"{self.kind}:{FLOAT}"
        plain = output.dtype if self.moves_codes else inputs[0].dtype
        if self.takes_plain(plain):
            return f"{self.kind}:{plain}"
        if self.has_own_grid(inputs, output):
            return f"{self.kind}:{OWN_GRID}"
        return f"{self.kind}:int16" if is_wide(inputs, output) else self.kind

    def has_own_grid(self, inputs: Sequence[Tensor], output: Tensor) -> bool:
        """Whether a result is on a grid that it has in .onnx files alone (`free_in_onnx`)."""
        if not self.free_in_onnx or output.dtype != "int8":
            return False
        grid = inputs[0].quantization if self.fixed_grid is None else per_tensor(*self.fixed_grid)
        return not grid.equals(output.quantization)

    def rows(self, inputs: Sequence[Tensor]) -> int:
        """How many rows its `index_operands` choose from: they must be at least 0 and below."""
        raise NotImplementedError(f"{self.kind} has no indices")

    def check_attributes(self, attributes: Attributes) -> None:
        """Refuses names and values that the device does not know.

        Raises:
            Refusal: naming the attribute, what was given and what is allowed.
        """
        expected = sorted(self.attributes)
        need(sorted(attributes) == expected, f"attributes must be {expected}, got {sorted(attributes)}")
        for name, value in attributes.items():
            if name in WORDS:
                need(value in WORDS[name], f"{name} must be one of {', '.join(WORDS[name])}, got {value!r}")
            elif name in PAIRS:
                # TFLite-Micro keeps 16 bits of them.
                fits = np.shape(value) == (2,) and min(value) >= 1 and max(value) < 2**15
                need(fits, f"{name} must be two positive integers below 32768, got {value}")

    def scale_limits(self, dtypes: Sequence[str], attributes: Attributes) -> ScaleLimits | None:
        """What `check` asks of scales, so that freezing can make ranges fit it; None where it asks for nothing.

        dtypes: of the operands and the result.
        """
        return None

    def check(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> None:
        """Refuses what the runtimes refuse, or compute by other arithmetic than `integers`, once scales are known."""
        limits = self.scale_limits([tensor.dtype for tensor in (*inputs, output)], attributes)
        if limits is not None:
            limits.need(inputs, output)

    def without_shift(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Operands of uint8 as `check` takes them: constants whose zero point is part of their values."""
        return inputs

    def may_end_the_process(self, inputs: Sequence[Tensor], attributes: Attributes, profile: Profile) -> bool:
        """Whether there are codes at which the runtime does not refuse but dies; `integers` raises Refusal for them."""
        return False

    def absent_from(self, profile: Profile, name: str, operands: int) -> str:
        """Why the device's runtime does not run it, by the name it was measured as (see `measured_as`) and the number
        of operands; "": it does."""
        if name.endswith(OWN_GRID) and not profile.rounds_as_onnx:
            return f"{profile.title} has {self.kind} on the grid {self.fixed_grid or 'of its operand'} alone"
        return lacks(profile, name)

    def multiply_accumulates(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> int:
        """Multiply-accumulates for one image."""
        return 0

    # --- what it computes -------------------------------------------------------------------------------------------

    def real(self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes) -> A:
        """The result in real numbers, differentiable, before it is stored on its grid.

        `operands` are a framework's arrays in the user's order of axes, and so are the axes that `attributes` name;
        `primitives` are that framework's functions, such as `primitives.maximum` (see `train/core/primitives.py`).
        """
        raise NotImplementedError(f"{self.kind} is not differentiated")

    def real_on_grid(
        self, primitives: RealPrimitives[A], operands: Sequence[A], attributes: Attributes, grid: ResultGrid[A]
    ) -> A | None:
        """As `real`, but rounded as the device's codes are, where the grid itself would round otherwise; else None.

        `grid` has the device's `scale` and int8 `zero_point` of the result. Its operands lie on their grids. Training
        takes this value and the gradient of `real`.
        """
        return None

    def integers(self, call: Call) -> np.ndarray:
        """The codes of the result from the codes of all operands, under one profile of rounding."""
        raise NotImplementedError(f"{self.kind} has no integers")

    def wide_integers(self, call: Call) -> np.ndarray:
        """As `integers`, where an operand or the result is int16. XNNPACK takes none of these: LiteRT's own kernels
        compute them under every profile of it. The base class serves what only moves or compares codes."""
        return self.integers(call)

    def plain_integers(self, call: Call) -> np.ndarray:
        """The result of integers without a grid, which wrap."""
        raise NotImplementedError(f"{self.kind} has no form for integers without a grid")

    def stated(self, call: Call, arithmetic: Arithmetic) -> np.ndarray | None:
        """As `integers` and `wide_integers`, for a device that states its arithmetic; None: this operator asks nothing
        of it, and is computed by the kernels that the device is like."""
        return None

    def exact_steps(self, call: Call) -> np.ndarray | None:
        """The result in float64 steps of its grid from real 0, before it is rounded; None where nothing is declared.

        It explains differences, and no code follows from it.
        """
        return None

    def float_results(self, call: Call) -> np.ndarray:
        """The result in float32; operands are in float32, weights also in integers with a scale."""
        if self.moves_codes:
            return self.integers(call)
        operands = [real_numbers(code, tensor) for code, tensor in zip(call.codes, call.inputs, strict=True)]
        return np.asarray(self.real(NUMPY, operands, self.real_attributes(call.inputs, call.attributes)), np.float32)

    def real_attributes(self, inputs: Sequence[Tensor], attributes: Attributes) -> Attributes:
        """What `real` asks for, of operands whose axes are the device's."""
        return attributes

    def results(self, call: Call) -> np.ndarray:
        """`integers`, `wide_integers`, `plain_integers` or `float_results`, by what its activations are stored
        in; or `stated`."""
        if call.inputs[0].dtype in self.plain:
            return self.plain_integers(call)
        if in_float(call.inputs, call.output):
            with np.errstate(all="ignore"):
                return self.float_results(call)
        if call.profile.arithmetic is not None:
            codes = self.stated(call, call.profile.arithmetic)
            if codes is not None:
                return codes
        compute = self.wide_integers if is_wide(call.inputs, call.output) else self.integers
        return compute(call)

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        """`results` of an operator with any number of them, and then what its variables hold (see `written`)."""
        return (self.results(replace(call, outputs=(call.outputs[0],))),)

    # --- how it enters a graph ---------------------------------------------------------------------------------------

    def build(self, builder: GraphBuilder, *arguments: Any, name: str, **attributes: Any) -> str:
        """What `Builder.<kind in lower case>` does: operands, then the result's Quantization unless the operator keeps
        that of its operand or fixes it itself, then attributes in the order of their declaration."""
        rest = list(arguments)
        operands = [rest.pop(0) for _ in range(self.operands[0]) if rest]
        output = attributes.pop("output", None)
        if output is None and not self.same_quantization and self.fixed_grid is None and rest:
            output = rest.pop(0)
        attributes |= dict(zip(self.attributes, rest, strict=False))
        return str(builder.operator(self.kind, operands, output, name=name, **attributes))

    # --- how a step of the plan becomes operators of the device -----------------------------------------------------

    def trailing(self, rank: int, attributes: Attributes) -> tuple[int, ...]:
        """The user's axes of an operand that must come last on the device, in this order."""
        return ()

    def removed_axes(self, attributes: Attributes) -> tuple[int, ...]:
        """The user's axes of the operand that the result does not have."""
        return ()

    def device_filter(self, codes: np.ndarray) -> np.ndarray:
        """A weight [out, in / groups, height, width] (or [out, in]) in the device's order of axes."""
        return codes

    def lower(self, context: LoweringContext, step: PlannedStep) -> LoweredTensor | None:
        """Puts the step of a plan into the graph (see `deploy.lower.Lowering`) and returns what is stored, and where
        its axes lie. The base class serves all operators that the attributes above describe.
        """
        return context.lower_described(self, step)

    def restore(self, context: PlanContext, operator: Operator) -> None:
        """The inverse of `lower`: what a plan does for an operator of a graph (see `deploy.trainable.Restoring`). The
        base class serves all operators that a plan has as they are.

        Raises:
            Refusal: it cannot be trained.
        """
        need(type(self).real is not DeviceOperator.real, "it has no gradient")
        need(len(operator.outputs) == 1, f"it has {len(operator.outputs)} results")
        context.step(operator, self.step_attributes(context.shapes(operator), operator.attributes))

    def float_steps(self, context: NetworkContext, operator: Operator) -> None:
        """What a model's network says for an operator of a file in float32 (see `capture.files.graph`). The base class
        serves operators that one step says.

        Raises:
            Refusal: none does.
        """
        need(bool(self.float_kind), f"no network has a step for {self.kind}")
        attributes = self.float_attributes(context.shapes(operator), operator.attributes)
        operands, (shape,) = context.operands(operator), context.results(operator)
        context.give(operator, context.step(self.float_kind, operands, shape, **attributes))

    def float_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        """The attributes of a step `float_kind`; shapes: of the operands."""
        return {}

    def step_attributes(self, shapes: Sequence[Shape], attributes: Attributes) -> Attributes:
        """The attributes of a plan's step, of an operator whose axes are the device's; shapes: of its operands."""
        rest = {name: value for name, value in attributes.items() if name != "activation"}
        return {**rest, "channel_axis": len(shapes[0]) - 1} if self.spatial else rest

    # --- how files hold it ------------------------------------------------------------------------------------------

    def tflite_options(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> Fields:
        """Fields of the options table; enumerations by the name of their value, as ("Padding", "SAME")."""
        held = {name: option for name, option in self.in_file.items() if isinstance(option, Option)}
        return {option.field: option.written(attributes[name]) for name, option in held.items()}

    def tflite_operands(
        self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes
    ) -> Sequence[FileConstant | Tensor]:
        """Operands that the file holds and the graph holds as attributes: (name, int32 values), after the others.

        Integer arrays of another dtype keep it; what is quantized is a constant Tensor.
        """
        held = [name for name, form in self.in_file.items() if isinstance(form, InOperand)]
        return tuple((name, np.asarray(attributes[name], np.int32)) for name in held)

    def tflite_steps(self, inputs: Sequence[Tensor], output: Tensor, attributes: Attributes) -> Sequence[FileStep]:
        """The operators of the file that stand for it, in order; the last one makes the result.

        One, unless the operator is the graph's own and the file has to say it in several.
        """
        operands: list[int | str | Tensor | None] = list(range(len(inputs)))
        for entry in self.tflite_operands(inputs, output, attributes):
            if isinstance(entry, Tensor):
                operands.append(entry)
                continue
            name, values = entry
            data = values if isinstance(values, np.ndarray) else np.asarray(values, np.int32)
            operands.append(Tensor(name, data.shape, str(data.dtype), INDICES, data))
        if self.order is not None:
            operands = [operands[position] for position in self.order]
        fields = self.tflite_options(inputs, output, attributes)
        version = (is_wide(inputs, output) and self.wide_version) or self.version
        return (FileStep(self.kind, tuple(operands), version, self.options, fields),)

    def read_operands(self, read: FileOperator) -> tuple[Tensor, ...]:
        """The operands of the graph's operator, from a file's: the inverse of `tflite_steps`, for operators that the
        file says in one.

        Raises:
            Unreadable: the file says what the declaration has no words for.
        """
        count = len(read.inputs) if self.operands[1] is None else self.operands[1]
        return tuple(read.operand(position) for position in range(count))

    def read_attributes(self, read: FileOperator) -> Attributes:
        """Likewise its attributes: the inverse of `tflite_options` and `tflite_operands`."""
        return {name: form.of(read) for name, form in self.in_file.items()}

    def read_steps(self, steps: Sequence[FileOperator]) -> tuple[tuple[Tensor, ...], Attributes] | None:
        """Likewise both, from operators of the file as `other_forms` lists them; None if they mean something else."""
        return None

    def onnx(self, writer: OnnxWriter, operator: Operator, output: Tensor) -> None:
        """Adds its nodes in QDQ form (see `deploy.onnx`)."""
        raise Refusal(f"{self.kind} has no form in ONNX here")


# Options of steps by which they compute something else.
_TELLING = {"ADD": ("fusedActivationFunction",), "GATHER": ("axis", "batchDims")}


def are_steps(steps: Sequence[FileOperator], written: Sequence[FileStep]) -> bool:
    """Whether operators of a file are what `tflite_steps` writes: where each reads from, its constants and options, and
    the shape and dtype of its result."""
    names: dict[str, str] = {}
    for step, expected in zip(steps, written, strict=True):
        shape = steps[-1].output.shape if expected.shape is None else expected.shape
        if step.output.shape != shape or (expected.dtype and step.output.dtype != expected.dtype):
            return False
        if any((step.option(name) or 0) != expected.fields.get(name, 0) for name in _TELLING.get(expected.kind, ())):
            return False
        for position, operand in enumerate(expected.operands):
            tensor = step.inputs[position] if position < len(step.inputs) else None
            if tensor is None:
                return False
            if isinstance(operand, str) and names.get(operand) != tensor.name:
                return False
            if isinstance(operand, Tensor):
                if operand.data is None or tensor.name not in step.known:
                    return False
                if not np.array_equal(step.known[tensor.name], operand.data):
                    return False
        names[expected.name] = step.output.name
    return True


# Attributes that mean the same wherever they stand: words, and pairs of positive integers for height and width.
ACTIVATIONS = ("NONE", "RELU", "RELU6")
PADDINGS = ("SAME", "VALID")
WORDS = {"activation": ACTIVATIONS, "padding": PADDINGS}
PAIRS = ("strides", "dilations", "filter_size")

# By kind, in order of declaration.
OPERATORS: dict[str, DeviceOperator] = {}


def register(declaration: type[DeviceOperator]) -> type[DeviceOperator]:
    """Enters a declaration into `OPERATORS`."""
    if declaration.kind in OPERATORS:
        raise ValueError(f"{declaration.kind} is declared twice")
    OPERATORS[declaration.kind] = declaration()
    KINDS.add(declaration.kind)
    return declaration


def written(kind: str, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """Names of what an operator writes, in the order of `all_results`: its results, and its variables."""
    return (*outputs, *(inputs[position] for position in OPERATORS[kind].states))


def is_wide(inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Whether an operand or the result is stored in int16."""
    return output.dtype == "int16" or any(tensor.dtype == "int16" for tensor in inputs)


def in_float(inputs: Sequence[Tensor], output: Tensor) -> bool:
    """Whether an operand or the result is real numbers."""
    return output.dtype == FLOAT or any(tensor.dtype == FLOAT for tensor in inputs)


def in_int16() -> tuple[str, ...]:
    """Kinds of the operators that can be stored in int16."""
    return tuple(kind for kind, operator in OPERATORS.items() if "int16" in operator.dtypes)
