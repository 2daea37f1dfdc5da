# SPDX-License-Identifier: Apache-2.0
"""A prepared network in Keras 3, on any of its backends: a `keras.Model` for `fit`.

model = qat.keras.prepare(network)
qat.keras.calibrate(model, [images])
model.compile(...); model.fit(...)
qat.keras.freeze(model)
model.fit(...)
graph = deploy.lower(model)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops

from ....kit.device import DEFAULT_PROFILE, profile_named
from ....kit.display import aligned, listed, shortened, table
from ....kit.planning import plan
from ....kit.planning.inputs import require_input, require_rows
from ....kit.planning.plans import ROW_HEADER, Numbers, PlanInput
from ....kit.planning.rules import Rule
from ...capture.core.progress import at_work
from ...capture.keras.items import InTraining
from ...capture.keras.model import capture, variable_names
from ...capture.proof import Proof
from ..core import batches as loading
from ..core.arrays import Arrays, Mode
from ..core.arrays import Tree as ArrayTree
from ..core.engine import Functional
from ..core.frameworks import elsewhere
from ..core.freezing import frozen as frozen_arrays
from ..core.trained import TrainedNetwork
from ..files import OpenedFile
from . import primitives as primitives_keras
from .original import as_nested, as_tuples, give_statistics, own_steps, shapes_of, statistics_of
from .primitives import Tensor

# Tensors, arrays or shapes, nested as a model takes or gives them.
Tree = Any
# What Keras keeps in a file.
Config = dict[str, Any]


@dataclass
class _Held:
    """What a model holds without Keras tracking it.

    Attributes:
        original: the float model.
        originals: its variables, by name; trainability: which of them were to be trained when it was last compiled.
        norms: its batch norms, and whether each was trainable when the model was prepared.
        config: arguments that `prepare` was given, for Keras to keep.
        variables: the prepared model's.
        seeds: for dropout.
        has_data: whether all ranges are known to have seen some.
        programs: what runs in each mode, compiled.
    """

    original: keras.Model
    originals: dict[str, keras.Variable]
    trainability: dict[str, bool]
    norms: list[tuple[keras.Layer, bool]]
    config: Config
    functional: Functional
    variables: Arrays
    seeds: keras.random.SeedGenerator | None
    calibrated: bool
    has_data: bool = False
    programs: dict[Mode, Callable[..., dict[str, Tensor]]] = field(default_factory=dict)

    def wanted_trainability(self) -> dict[str, bool]:
        return {name: bool(variable.trainable) for name, variable in self.originals.items()}


@keras.saving.register_keras_serializable(package="exactqat", name="FileModel")
class FileModel(keras.Model):
    """A file's network, from which a `PreparedModel` is made: it holds numbers, and computes nothing by itself.

    Attributes:
        file: the network.
    """

    def __init__(self, content: str, **rest: object) -> None:
        """content: of `OpenedFile`, in base64, so that Keras keeps it with a prepared model."""
        super().__init__(**rest)
        self.file = OpenedFile.of_content(base64.b64decode(content))
        self._content = content
        self._names: dict[int, str] = {}
        for values, trainable in ((self.file.parameters, True), (self.file.buffers, False)):
            for number, (name, value) in enumerate(values.items()):
                word = f"{'parameter' if trainable else 'buffer'}_{number}"
                variable = self.add_weight(shape=value.shape, initializer="zeros", trainable=trainable, name=word)
                variable.assign(value)
                self._names[id(variable)] = name
        self.built = True

    def names(self) -> dict[int, str]:
        """Names of its variables by identity: those of the plan's constants."""
        return dict(self._names)

    def call(self, *inputs: Tree) -> NoReturn:
        raise TypeError("a file has no function of its own to run: call the model that qat.keras.prepare_file returned")

    def get_config(self) -> Config:
        return {"name": self.name, "content": self._content}


@keras.saving.register_keras_serializable(package="exactqat", name="PreparedModel")
class PreparedModel(keras.Model):
    """A model under the device's arithmetic. Compiles, fits, saves and loads like any Keras model.

    Its variables have the same names as in the user's model; those of ranges begin with ``ranges.``.

    Attributes:
        plan: what the device runs.
        unused_rules: one sentence for every rule that has no effect.
        proof: what `prepare` compared with the user's model; None if it was not asked to, and in a loaded model.
        frozen: whether the last phase of training has begun; saved with the model. From then on it computes the
            device's integers, in training and in evaluation.
        losses_left_out: layers of the float model that add a loss on their results (`add_loss`,
            `activity_regularizer`).
        steps_left_out: methods of the float model's class that define how it trains (`train_step`, `compute_loss`,
            ...).
    """

    def __init__(
        self,
        model: keras.Model | Config,
        rules: Sequence[Rule | Config] = (),
        shapes: Tree = None,
        deployable: bool = True,
        frozen: bool = False,
        calibrated: bool = False,
        profile: str | None = DEFAULT_PROFILE,
        statistics: Mapping[str, list[float]] | None = None,
        keep_final_activation: bool | None = False,
        dtypes: Sequence[str] = (),
        fresh_norms: Sequence[str] | None = None,
        **rest: object,
    ) -> None:
        """Called by `prepare`, and by Keras when it loads a model."""
        # Whatever the float model's dtype policy: the device's arithmetic is defined in float32.
        super().__init__(dtype="float32", **rest)
        # A frozen network calls back to the host, which TensorFlow's XLA cannot do.
        if profile is not None and keras.backend.backend() == "tensorflow":
            self.supports_jit = False
        model = keras.saving.deserialize_keras_object(model) if isinstance(model, dict) else model
        planned_by = [rule if isinstance(rule, Rule) else rule_of(rule) for rule in rules] or [Rule()]
        if not isinstance(model, FileModel):
            shapes = as_nested(model, shapes_of(model) if shapes is None else as_tuples(shapes))
        names = model.names() if isinstance(model, FileModel) else variable_names(model)
        if statistics is not None:
            give_statistics(model, names, statistics)
        losses: list[str] = []
        if isinstance(model, FileModel):
            planned = model.file.plan(planned_by, deployable, keep_final_activation, profile)
            # A file in integers keeps what it ends with, also when the model is loaded.
            keep_final_activation = keep_final_activation if model.file.is_float else True
        else:
            with at_work("prepare reads the model"):
                network = capture(model, shapes, names, losses, dtypes)
            planned = plan(network, planned_by, deployable, keep_final_activation, profile)
        functional = Functional(planned, primitives_keras, profile)
        originals = {names[id(variable)]: variable for variable in model.variables}
        used = [name for name in originals if name in set(functional.tensors)]
        arrays = functional.initial({name: _float32(originals[name].value) for name in used})
        if fresh_norms is not None:  # Of a loaded model, whose float model has other numbers.
            functional.fresh_norms = frozenset(fresh_norms)
        tensors = {
            name: self._variable(name, value, bool(originals[name].trainable), originals[name])
            for name, value in arrays.tensors.items()
        }
        learned, ranges = (
            {
                name: {end: self._variable(f"ranges.{name}.{end}", value, trainable) for end, value in ends.items()}
                for name, ends in tree.items()
            }
            for tree, trainable in ((arrays.learned, True), (arrays.ranges, False))
        )
        self._seed_generator = keras.random.SeedGenerator() if functional.random_steps else None
        # Found by Keras, for their random numbers.
        self._random_layers = [
            step.expression.layer for step in planned.steps if isinstance(step.expression, InTraining)
        ]
        self._held = _Held(
            original=model,
            originals=originals,
            trainability={name: bool(variable.trainable) for name, variable in originals.items()},
            norms=[
                (layer, bool(layer.trainable))
                for layer in model._flatten_layers()
                if isinstance(layer, keras.layers.BatchNormalization)
            ],
            config={
                "rules": [asdict(rule) for rule in planned_by],
                "shapes": shapes,
                "dtypes": list(dtypes),
                "deployable": deployable,
                "keep_final_activation": bool(keep_final_activation),
            },
            functional=functional,
            variables=Arrays(tensors, learned, ranges),
            seeds=self._seed_generator,
            calibrated=bool(calibrated),
        )
        self.plan, self.unused_rules = planned, list(planned.unused_rules)
        self.proof: Proof | None = None
        self.frozen = bool(frozen)
        self.losses_left_out, self.steps_left_out = losses, own_steps(model)
        self._set_ranges_trainable()
        self.built = True

    def _variable(
        self, name: str, value: np.ndarray, trainable: bool, original: keras.Variable | None = None
    ) -> keras.Variable:
        dtype = "int32" if value.dtype.kind == "i" else "float32"
        variable = self.add_weight(
            shape=value.shape,
            # For zeros of its own JAX compiles a program for every shape.
            initializer=lambda shape, dtype: ops.convert_to_tensor(np.zeros(shape, dtype), dtype),
            dtype=dtype,
            trainable=trainable and dtype == "float32",
            name=name.replace("/", ".").replace(".", "__"),  # PyTorch takes no dots
            regularizer=getattr(original, "regularizer", None),
            constraint=getattr(original, "constraint", None),
        )
        variable.assign(value)
        return variable

    @property
    def profile(self) -> str | None:
        """Whose integers the network computes once it is frozen; None: it stays fake quantized."""
        return self._held.functional.profile

    def range_parameters(self) -> list[keras.Variable]:
        """The learned ranges."""
        return [variable for ends in self._held.variables.learned.values() for variable in ends.values()]

    @property
    def output_names(self) -> list[str] | None:
        """Keras's names for the float model's outputs, by which losses and metrics are given; None if it has none."""
        original = self._held.original
        names = getattr(getattr(original, "_functional", None) or original, "output_names", None)
        return list(names) if names and len(names) == len(self.plan.network.outputs) else None

    @property
    def trainable(self) -> bool:
        return bool(keras.Model.trainable.fget(self))

    @trainable.setter
    def trainable(self, value: bool) -> None:
        keras.Model.trainable.fset(self, value)
        self._set_ranges_trainable()

    def _set_ranges_trainable(self) -> None:
        """Ranges are fixed with the model, and in the last phase."""
        if "_held" in self.__dict__:  # Keras sets `trainable` before there is anything to set it for
            for variable in self.range_parameters():
                variable.trainable = self.trainable and not self.frozen

    # --- as the float model says --------------------------------------------------------------------------------------

    def compile(self, *args: object, **kwargs: object) -> None:
        """As in Keras. What is trained follows the float model's layers: set their `trainable` before.

        Raises:
            ValueError: `jit_compile=True` on PyTorch, or the float model's batch norms were frozen or unfrozen since
                `prepare`, which decides whether they follow the batch.
        """
        if kwargs.get("jit_compile") is True and keras.backend.backend() == "torch":
            raise ValueError(
                "jit_compile=True: a prepared model is not compiled by torch.compile; leave it out (the backends jax "
                "and tensorflow compile)"
            )
        for layer, trainable in self._held.norms:
            if bool(layer.trainable) != trainable:
                raise ValueError(
                    f"the batch norm '{layer.name}' was {'' if trainable else 'not '}trainable when the model was "
                    "prepared, and that decides whether it follows the batch; prepare the model again"
                )
        wanted = self._held.wanted_trainability()
        for name, variable in self._held.variables.tensors.items():
            if wanted[name] != self._held.trainability[name]:
                variable.trainable = wanted[name] and variable.dtype == "float32"
        self._held.trainability = wanted
        super().compile(*args, **kwargs)

    def compile_from_config(self, config: Config) -> None:
        """As in Keras, which leaves it to models with their own `compile`."""
        settings = keras.saving.deserialize_keras_object(config)
        if keras.backend.backend() == "torch":  # The model may have been saved on a backend that compiles.
            settings["jit_compile"] = False
        self.compile(**settings)
        if getattr(self, "optimizer", None) is not None:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, *args: object, **kwargs: object) -> Tree:
        # Not in the step itself, which JAX runs only once, to trace it.
        self._refuse_steps("train_step", "compute_loss", "compute_metrics", "make_train_function", "fit")
        if self._held.wanted_trainability() != self._held.trainability:
            raise ValueError(
                "the float model's layers were made trainable, or fixed, after this model was compiled; compile it"
            )
        return super().make_train_function(*args, **kwargs)

    def _get_jax_state(self, *args: object, **kwargs: object) -> Tree:
        """On JAX, Keras empties the variables while it trains; they are kept here so that a failing step loses none."""
        kinds = [
            name for name in ("trainable", "non_trainable", "optimizer", "metrics") if kwargs.get(f"{name}_variables")
        ]
        state = super()._get_jax_state(*args, **kwargs)
        if kwargs.get("purge_model_variables"):
            self._jax_state = {f"{name}_variables": values for name, values in zip(kinds, state, strict=True)}
            self._jax_state_synced = False
        return state

    def make_test_function(self, *args: object, **kwargs: object) -> Tree:
        self._refuse_steps("test_step", "compute_loss", "compute_metrics")
        self._require_data()
        return super().make_test_function(*args, **kwargs)

    def make_predict_function(self, *args: object, **kwargs: object) -> Tree:
        self._refuse_steps("predict_step")
        self._require_data()
        return super().make_predict_function(*args, **kwargs)

    def _refuse_steps(self, *names: str) -> None:
        own = [name for name in self.steps_left_out if name in names]
        if own:
            raise NotImplementedError(
                f"{type(self._held.original).__name__} has its own {listed(own)}, which a prepared model does not run. "
                "Write the loop yourself, with prepared(x, training=True); or have the model without it prepared "
                "(keras.Model(model.inputs, model.outputs))"
            )

    def call(self, inputs: Tree, training: bool | None = None) -> Tree:
        held = self._held
        if not held.calibrated:
            held.functional.require_calibration()
        # Keras builds a model by a call without values in evaluation, before the first batch of training.
        if not (training or held.has_data or values_of(keras.tree.flatten(inputs)[0]) is None):
            self._require_data()
        return self._run(inputs, Mode(training=bool(training) and self.trainable, frozen=self.frozen))

    def _require_data(self) -> None:
        """Before an evaluation: with ranges that have seen nothing, all that is stored is 0.

        Raises:
            MissingData: a range has seen no data.
        """
        held = self._held
        if not held.has_data:
            batches = {name: {"batches": values_of(ends["batches"])} for name, ends in held.variables.ranges.items()}
            if all(ends["batches"] is not None for ends in batches.values()):
                held.functional.require_data(batches)
                held.has_data = True

    def _run(self, inputs: Tree, mode: Mode, seen: dict[str, Tensor] | None = None) -> Tree:
        held, before = self._held, self._arrays()
        outputs, after = held.functional.run(before, self._given(inputs), mode, lambda number: held.seeds, seen)
        if mode.training or mode.observing:
            self._assign(after, before)
        return self.plan.network.input_tree.unflatten(outputs)

    def _given(self, inputs: Tree) -> list[Tensor]:
        """The tensors of a call, flat, as the network takes them."""
        return [
            self._as_prepared(plan_input, ops.convert_to_tensor(x))
            for plan_input, x in zip(self.plan.inputs, self.plan.network.input_tree.flatten(inputs), strict=True)
        ]

    @staticmethod
    def _as_prepared(prepared: PlanInput, x: Tensor) -> Tensor:
        """An input in the shape that the network was prepared for; Keras adds and drops a last axis of one."""
        rank, shape = len(prepared.shape), tuple(x.shape)
        if len(shape) == rank + 1 and shape[-1] == 1:
            x = ops.squeeze(x, axis=-1)
        elif len(shape) == rank - 1 and prepared.shape[-1] == 1:
            x = ops.expand_dims(x, axis=-1)
        if not prepared.rows:
            require_input(prepared, tuple(x.shape), x.dtype, True)
            return ops.cast(x, "float32")
        # Keras itself converts what is given to float32.
        require_input(prepared, tuple(x.shape), x.dtype, False)
        indices = values_of(x)
        if indices is not None and indices.size:
            require_rows(prepared, int(indices.min()), int(indices.max()))
        return ops.cast(x, "int32")

    def _arrays(self) -> Arrays:
        """The values of the variables."""
        return self._held.variables.map(lambda variable: variable.value)

    def _in_numpy(self) -> Arrays:
        return self._held.variables.map(lambda variable: np.asarray(ops.convert_to_numpy(variable.value)))

    def _assign(self, after: Arrays, before: Arrays | None = None) -> None:
        """Gives the variables other values. before: their values now; some may be the same."""
        old = [None] * len(after.leaves()) if before is None else before.leaves()
        for variable, value, known in zip(self._held.variables.leaves(), after.leaves(), old, strict=True):
            if value is not known:
                variable.assign(value)

    # --- for the device -----------------------------------------------------------------------------------------------

    def trained(self) -> TrainedNetwork:
        """The network with its numbers in NumPy, as they are now."""

        def computed(batch: Tree, quantizing: bool) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
            inputs = self._given(batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch)
            held, mode, arrays = self._held, Mode(frozen=self.frozen, quantizing=quantizing), self._arrays()

            def run(tensors: dict[str, Tensor], *ranges: ArrayTree, inputs: list[Tensor]) -> dict[str, Tensor]:
                seen: dict[str, Tensor] = {}
                held.functional.run(Arrays(tensors, *ranges), inputs, mode, None, seen)
                return seen

            if mode not in held.programs:
                held.programs[mode] = primitives_keras.program(run)
            values = held.programs[mode](arrays.tensors, arrays.learned, arrays.ranges, inputs=inputs)
            in_numpy = {path: np.asarray(ops.convert_to_numpy(value)) for path, value in values.items()}
            return [ops.convert_to_numpy(x) for x in inputs], in_numpy

        return TrainedNetwork(self._held.functional, self._in_numpy(), self.frozen, computed)

    def take_over(
        self,
        tensors: Mapping[str, np.ndarray],
        ranges: Mapping[str, tuple[float, float]],
        learned: Mapping[str, dict[str, np.ndarray]],
    ) -> None:
        """Takes over variables, by the user's names, the ranges of grids, by the grids' names, and learned ranges of
        weights, as `Arrays.learned` has them.

        Raises:
            ValueError: the model is frozen, or it has no such variable.
        """
        if self.frozen:
            raise ValueError("a frozen model takes over no ranges: do it before freeze")
        before = self._arrays()
        self._assign(before.taking_over(tensors, ranges, dict(learned)), before)

    def numbers(self) -> Numbers:
        """The numbers that training ended with, for `deploy.lower`."""
        return self.trained().numbers()

    # --- Keras --------------------------------------------------------------------------------------------------------

    def compute_output_spec(self, inputs: Tree, *args: object, **kwargs: object) -> Tree:
        """Symbolic results, from the plan: nothing is computed."""
        batch = keras.tree.flatten(inputs)[0].shape[0]
        outputs = []
        for name in self.plan.network.outputs:
            value = self.plan.network.values[name]
            shape = [batch if axis == value.batch_axis and size == 1 else size for axis, size in enumerate(value.shape)]
            outputs.append(keras.KerasTensor(shape, dtype="float32" if value.dtype == "float32" else "int32"))
        return self.plan.network.output_tree.unflatten(outputs)

    def get_config(self) -> Config:
        held = self._held
        return {
            "name": self.name,
            "trainable": self.trainable,
            "model": keras.saving.serialize_keras_object(held.original),
            **held.config,
            "frozen": self.frozen,
            "calibrated": held.calibrated,
            "profile": None if self.profile is None else profile_named(self.profile).stored,
            "fresh_norms": sorted(held.functional.fresh_norms),
            "statistics": statistics_of(held.original, variable_names(held.original)),
        }

    @classmethod
    def from_config(cls, config: Config, custom_objects: Mapping[str, type] | None = None) -> PreparedModel:
        config = dict(config)
        config["model"] = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        return cls(**config)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """In the network's order, whichever of them are trained. Names numbered by Keras differ between models."""
        for position, variable in enumerate(self._held.variables.leaves()):
            store[str(position)] = variable

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        variables = self._held.variables.leaves()
        if not store.keys():
            raise ValueError(
                "these are another model's weights; those of the float model are loaded into it before it is prepared"
            )
        if len(store.keys()) != len(variables):
            raise ValueError(
                f"these are {len(store.keys())} variables, this prepared model has {len(variables)}: prepare the same "
                "network by the same rules first"
            )
        for position, variable in enumerate(variables):
            variable.assign(store[str(position)])
        self._look_for_data()

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        super().set_weights(weights)
        self._look_for_data()

    def _look_for_data(self) -> None:
        """Ranges that came with weights need no calibration."""
        batches = self._held.functional.batches_seen(self._in_numpy().ranges)
        self._held.calibrated = self._held.calibrated or all(batches.values())

    def __repr__(self) -> str:
        weighted = [step for step in self.plan.steps if step.weights is not None]
        phase = "frozen" if self.frozen else "not frozen"
        count = len(self.plan.inputs) + len(self.plan.steps)
        precisions = self.plan.precisions()
        return f"PreparedModel({count} stored tensors, {len(weighted)} layers with weights{precisions}, {phase})"

    def _repr_html_(self) -> str:
        return table(repr(self), ROW_HEADER, [row.cells() for row in self.plan.rows()], 4)

    def summary(self, *args: object, print_fn: Callable[[str], None] = print, **kwargs: object) -> None:
        """What the device runs, a line for each tensor it stores. Only `print_fn` matters; there are no layers."""
        rows = [[shortened("" if cell is None else cell) for cell in row.cells()] for row in self.plan.rows()]
        lines = [repr(self)]
        lines += aligned((ROW_HEADER, *rows), range(len(ROW_HEADER)))
        lines.append(f"trainable numbers: {_count(self.trainable_variables):,}")
        lines.append(f"others: {_count(self.non_trainable_variables):,}")
        for line in lines:
            print_fn(line)

    def quantize(self, *args: object, **kwargs: object) -> None:
        """Keras's post-training quantization, of layers; a prepared model has none."""
        raise NotImplementedError("a prepared model becomes integers by qat.keras.freeze and deploy.lower")

    def export(self, *args: object, **kwargs: object) -> None:
        """Keras's export, of a backend function; a prepared model becomes a file in another way."""
        raise NotImplementedError(
            "a prepared model is exported as integers: qat.keras.freeze, then deploy.write_tflite(deploy.lower(model), "
            "path) or deploy.write_onnx; model.save keeps it for further training"
        )

    def _forget_functions(self) -> None:
        """Compiled functions belong to the previous phase."""
        for name in ("train_function", "test_function", "predict_function"):
            if getattr(self, name, None) is not None:
                setattr(self, name, None)


def calibrate(model: PreparedModel, batches: Iterable[Tree], restart: bool = False) -> None:
    """Sets all activation ranges from data; see `exactqat.qat.calibrate`.

    batches: of inputs as `predict` takes one, or a data set that `fit` takes, whose targets are left out: in a tuple or
    list of more arrays than the model has inputs, the first element is the inputs.
    """
    _require_prepared(model)
    if isinstance(batches, keras.utils.PyDataset):
        batches = map(batches.__getitem__, range(len(batches)))
    batches = loading.checked(batches, ops.is_tensor(batches) or isinstance(batches, np.ndarray), model.frozen)
    before = model._in_numpy()

    def see(batch: Tree) -> None:
        wanted = len(model.plan.network.inputs)
        if isinstance(batch, tuple | list) and len(keras.tree.flatten(batch)) != wanted:
            batch = keras.utils.unpack_x_y_sample_weight(batch)[0]
        model._run(batch, Mode(quantizing=False, observing=True))

    functional = model._held.functional
    try:
        if restart:
            model._assign(functional.forgotten(before), before)
        loading.show(batches, see, lambda: functional.batches_seen(model._held.variables.ranges), functional.parts)
    except BaseException:
        # What ranges had seen is not lost.
        model._assign(before)
        raise
    model._held.calibrated = True
    model._forget_functions()


def freeze(model: PreparedModel) -> None:
    """Starts the last phase of training; see `exactqat.qat.freeze`.

    The model stays compiled; the next `fit` trains what is left. With learned ranges, its optimizer starts over with
    the same settings: it was made for more variables, and its momentum would go on moving them.
    """
    _require_prepared(model)
    before = model._in_numpy()
    model._assign(frozen_arrays(model._held.functional, before), before)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.range_parameters():
        model.optimizer = type(optimizer).from_config(optimizer.get_config())
    model.frozen = True
    model._forget_functions()
    model._set_ranges_trainable()


def _require_prepared(model: object) -> None:
    if not isinstance(model, PreparedModel):
        how = elsewhere(model, "keras") or "; prepare it first: model = exactqat.qat.keras.prepare(model)"
        raise TypeError(f"model must come from exactqat.qat.keras.prepare, got {type(model).__name__}{how}")


def rule_of(fields: Config) -> Rule:
    """A rule as a file has it."""
    ends = fields.get("fixed_range")
    return Rule(**{**fields, "fixed_range": None if ends is None else tuple(ends)})


def _float32(tensor: Tensor) -> np.ndarray:
    value = np.asarray(ops.convert_to_numpy(tensor))
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def _count(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def values_of(x: Tensor) -> np.ndarray | None:
    """What a tensor holds; None if it is traced."""
    try:
        return np.asarray(ops.convert_to_numpy(x))
    except Exception:  # noqa: BLE001 - every backend has an error of its own for it
        return None
