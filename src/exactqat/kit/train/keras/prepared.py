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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
from keras import ops

from ...capture.core.progress import at_work
from ...capture.keras.model import InTraining, capture, variable_names
from ...capture.proof import Proof
from ...device import DEFAULT_PROFILE
from ...display import listed, shortened, table
from ...planning import plan
from ...planning.inputs import require_input, require_rows
from ...planning.plans import ROW_HEADER, Numbers, Plan, PlanInput
from ...planning.rules import Rule
from ..core import batches as loading
from ..core.arrays import Arrays, Mode, Tree
from ..core.engine import Functional
from ..core.frameworks import elsewhere
from ..core.trained import TrainedNetwork
from ..files import OpenedFile
from . import primitives as primitives_keras
from .programs import program

__all__ = ["FileModel", "PreparedModel", "calibrate", "freeze"]


class _Held:
    """What a model holds without Keras tracking it."""

    tensors: dict[str, Any]
    learned: dict[str, dict[str, Any]]
    ranges: dict[str, dict[str, Any]]
    seeds: Any
    proof: Any
    has_data: bool
    originals: dict[str, Any]
    followed: dict[str, bool]
    norms: list[tuple[Any, bool]]
    steps_left_out: list[str]

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@keras.saving.register_keras_serializable(package="exactqat", name="FileModel")
class FileModel(keras.Model):
    """A file's network, from which a `PreparedModel` is made: it holds numbers, and computes nothing by itself.

    Attributes:
        file: the network.
    """

    def __init__(self, content: str, **rest: Any) -> None:
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

    def call(self, *inputs: Any) -> Any:
        raise TypeError("a file has no function of its own to run: call the model that qat.keras.prepare_file returned")

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "content": self._content}


@keras.saving.register_keras_serializable(package="exactqat", name="PreparedModel")
class PreparedModel(keras.Model):
    """A model under the device's arithmetic. Compiles, fits, saves and loads like any Keras model.

    Its variables have the same names as in the user's model; those of ranges begin with ``ranges.``.

    Attributes:
        plan: what the device runs.
        unused_rules: one sentence for every rule that has no effect.
        frozen: whether the last phase of training has begun; saved with the model. From then on it computes the
            device's integers, in training and in evaluation.
    """

    def __init__(
        self,
        model: Any,
        rules: Sequence[Any] = (),
        shapes: Any = None,
        deployable: bool = True,
        frozen: bool = False,
        calibrated: bool = False,
        profile: str | None = DEFAULT_PROFILE,
        statistics: Mapping[str, Any] | None = None,
        keep_final_activation: bool | None = False,
        dtypes: Sequence[str] = (),
        fresh_norms: Sequence[str] | None = None,
        **rest: Any,
    ) -> None:
        """Called by `prepare`, and by Keras when it loads a model."""
        # Whatever the float model's dtype policy: the device's arithmetic is defined in float32.
        super().__init__(dtype="float32", **rest)
        # A frozen network calls back to the host, which TensorFlow's XLA cannot do.
        if profile is not None and keras.backend.backend() == "tensorflow":
            self.supports_jit = False
        model = keras.saving.deserialize_keras_object(model) if isinstance(model, dict) else model
        rules = [Rule(**_rule(each)) if isinstance(each, Mapping) else each for each in rules] or [Rule()]
        if not isinstance(model, FileModel):
            shapes = _as_nested(model, _shapes(model) if shapes is None else _as_tuples(shapes))
        names = model.names() if isinstance(model, FileModel) else variable_names(model)
        if statistics is not None:
            _give_statistics(model, names, statistics)
        losses: list[str] = []
        if isinstance(model, FileModel):
            planned = model.file.plan(rules, deployable, keep_final_activation, profile)
            # A file in integers keeps what it ends with, also when the model is loaded.
            keep_final_activation = keep_final_activation if model.file.is_float else True
        else:
            with at_work("prepare reads the model"):
                network = capture(model, shapes, names, losses, dtypes)
            planned = plan(network, rules, deployable, keep_final_activation, profile)
        functional = Functional(planned, primitives_keras, profile)
        self._held = _Held(
            original=model,
            rules=list(rules),
            shapes=shapes,
            dtypes=list(dtypes),
            deployable=deployable,
            keep_final_activation=keep_final_activation,
            functional=functional,
            frozen=bool(frozen),
            calibrated=bool(calibrated),
            losses_left_out=losses,
            programs={},
            has_data=False,
            proof=None,
        )
        self._held.steps_left_out = _own_steps(model)
        self._held.originals = {names[id(each)]: each for each in model.variables}
        self._held.followed = self._wanted_trainability()
        self._held.norms = [
            (layer, bool(layer.trainable))
            for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization)
        ]
        used = set(functional.tensors)
        variables = {names[id(each)]: each for each in model.variables if names[id(each)] in used}
        values = {name: np.asarray(ops.convert_to_numpy(each.value)) for name, each in variables.items()}
        arrays = functional.initial({name: _float32(value) for name, value in values.items()})
        if fresh_norms is not None:  # Of a loaded model, whose float model has other numbers.
            functional.fresh_norms = frozenset(fresh_norms)
        self._held.tensors = {
            name: self._variable(name, value, bool(variables[name].trainable), variables[name])
            for name, value in arrays.tensors.items()
        }
        self._held.learned = self._tree(arrays.learned, True)
        self._held.ranges = self._tree(arrays.ranges, False)
        self._held.seeds = keras.random.SeedGenerator() if functional.random_steps else None
        self._seed_generator = self._held.seeds
        # Found by Keras, for their random numbers.
        self._random_layers = [
            step.expression.layer for step in planned.steps if isinstance(step.expression, InTraining)
        ]
        self._set_ranges_trainable()
        self.built = True

    def _variable(self, name: str, value: np.ndarray, trainable: bool, original: Any = None) -> Any:
        dtype = "int32" if value.dtype.kind == "i" else "float32"
        variable = self.add_weight(
            shape=value.shape,
            initializer="zeros",
            dtype=dtype,
            trainable=trainable and dtype == "float32",
            name=name.replace("/", ".").replace(".", "__"),  # PyTorch takes no dots
            regularizer=getattr(original, "regularizer", None),
            constraint=getattr(original, "constraint", None),
        )
        variable.assign(value)
        return variable

    def _tree(self, arrays: Mapping[str, Mapping[str, Any]], trainable: bool) -> dict[str, dict[str, Any]]:
        return {
            name: {
                end: self._variable(f"ranges.{name}.{end}", np.asarray(value), trainable) for end, value in ends.items()
            }
            for name, ends in arrays.items()
        }

    @property
    def plan(self) -> Plan:
        return self._held.functional.plan

    @property
    def profile(self) -> str | None:
        """Whose integers the network computes once it is frozen; None: it stays fake quantized."""
        return self._held.functional.profile

    @property
    def unused_rules(self) -> list[str]:
        return list(self.plan.unused_rules)

    @property
    def proof(self) -> Proof | None:
        """What `prepare` compared with the user's model; None if it was not asked to, and in a loaded model."""
        found: Proof | None = self._held.proof
        return found

    @property
    def frozen(self) -> bool:
        return bool(self._held.frozen)

    def range_parameters(self) -> list[Any]:
        """The learned ranges."""
        return [variable for ends in self._held.learned.values() for variable in ends.values()]

    @property
    def losses_left_out(self) -> list[str]:
        """Layers of the float model that add a loss on their results (`add_loss`, `activity_regularizer`)."""
        return list(self._held.losses_left_out)

    @property
    def steps_left_out(self) -> list[str]:
        """Methods of the float model's class that define how it trains (`train_step`, `compute_loss`, ...)."""
        return list(self._held.steps_left_out)

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
        held = self.__dict__.get("_held")
        if held is None or "learned" not in held.__dict__:
            return  # Keras sets it before there is anything to set it for
        for variable in self.range_parameters():
            variable.trainable = self.trainable and not held.frozen

    # --- as the float model says --------------------------------------------------------------------------------------

    def _wanted_trainability(self) -> dict[str, bool]:
        return {name: bool(variable.trainable) for name, variable in self._held.originals.items()}

    def compile(self, *args: Any, **kwargs: Any) -> None:
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
        wanted = self._wanted_trainability()
        for name, variable in self._held.tensors.items():
            if wanted[name] != self._held.followed[name]:
                variable.trainable = wanted[name] and variable.dtype == "float32"
        self._held.followed = wanted
        super().compile(*args, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """As in Keras, which leaves it to models with their own `compile`."""
        settings = keras.saving.deserialize_keras_object(config)
        if keras.backend.backend() == "torch":  # The model may have been saved on a backend that compiles.
            settings["jit_compile"] = False
        self.compile(**settings)
        if getattr(self, "optimizer", None) is not None:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, *args: Any, **kwargs: Any) -> Any:
        # Not in the step itself, which JAX runs only once, to trace it.
        if self._wanted_trainability() != self._held.followed:
            raise ValueError(
                "the float model's layers were made trainable, or fixed, after this model was compiled; compile it"
            )
        return super().make_train_function(*args, **kwargs)

    def _get_jax_state(self, *args: Any, **kwargs: Any) -> Any:
        """On JAX, Keras empties the variables while it trains; they are kept here so that a failing step loses none."""
        kinds = [
            name for name in ("trainable", "non_trainable", "optimizer", "metrics") if kwargs.get(f"{name}_variables")
        ]
        state = super()._get_jax_state(*args, **kwargs)
        if kwargs.get("purge_model_variables"):
            self._jax_state = {f"{name}_variables": values for name, values in zip(kinds, state, strict=True)}
            self._jax_state_synced = False
        return state

    def make_test_function(self, *args: Any, **kwargs: Any) -> Any:
        self._require_data()
        return super().make_test_function(*args, **kwargs)

    def make_predict_function(self, *args: Any, **kwargs: Any) -> Any:
        self._require_data()
        return super().make_predict_function(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_steps("train_step", "compute_loss", "compute_metrics", "make_train_function", "fit")
        return super().train_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_steps("test_step", "compute_loss", "compute_metrics")
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_steps("predict_step")
        return super().predict_step(*args, **kwargs)

    def _refuse_steps(self, *names: str) -> None:
        own = [name for name in self._held.steps_left_out if name in names]
        if own:
            raise NotImplementedError(
                f"{type(self._held.original).__name__} has its own {listed(own)}, which a prepared model does not run. "
                "Write the loop yourself, with prepared(x, training=True); or have the model without it prepared "
                "(keras.Model(model.inputs, model.outputs))"
            )

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        held = self._held
        if held.functional.needs_calibration and not held.calibrated:
            first = held.functional.needs_calibration[0]
            raise ValueError(f"the range of '{first}' is set from data before training: call calibrate first")
        if not training:
            self._require_data()
        return self._run(inputs, Mode(training=bool(training) and self.trainable, frozen=held.frozen))

    def _require_data(self) -> None:
        """Before an evaluation: with ranges that have seen nothing, all that is stored is 0.

        Raises:
            MissingData: a range has seen no data.
        """
        held = self._held
        if not held.has_data:
            batches = {name: {"batches": _values(ends["batches"])} for name, ends in held.ranges.items()}
            if all(ends["batches"] is not None for ends in batches.values()):
                held.functional.require_data(batches)
                held.has_data = True

    def _run(self, inputs: Any, mode: Mode, seen: dict[str, Any] | None = None) -> Any:
        held = self._held
        tree = self.plan.network.input_tree
        given = self._given(inputs)
        before = self._arrays(lambda variable: variable.value)
        outputs, after = held.functional.run(before, given, mode, lambda number: held.seeds, seen)
        if mode.training or mode.observing:
            self._assign(before, after, mode)
        return tree.unflatten(outputs)

    def _given(self, inputs: Any) -> list[Any]:
        """The tensors of a call, flat, as the network takes them."""
        return [
            self._as_prepared(each, ops.convert_to_tensor(x))
            for each, x in zip(self.plan.inputs, self.plan.network.input_tree.flatten(inputs), strict=True)
        ]

    @staticmethod
    def _as_prepared(prepared: PlanInput, x: Any) -> Any:
        """An input in the shape that the network was prepared for; Keras adds and drops a last axis of one."""
        rank, given = len(prepared.shape), tuple(x.shape)
        if len(given) == rank + 1 and given[-1] == 1:
            x = ops.squeeze(x, axis=-1)
        elif len(given) == rank - 1 and prepared.shape[-1] == 1:
            x = ops.expand_dims(x, axis=-1)
        if not prepared.rows:
            require_input(prepared, tuple(x.shape), x.dtype, True)
            return ops.cast(x, "float32")
        # Keras itself converts what is given to float32.
        require_input(prepared, tuple(x.shape), x.dtype, False)
        indices = _values(x)
        if indices is not None and indices.size:
            require_rows(prepared, int(indices.min()), int(indices.max()))
        return ops.cast(x, "int32")

    def _arrays(self, value: Any) -> Arrays:
        held = self._held
        return Arrays(
            {name: value(variable) for name, variable in held.tensors.items()},
            {name: {end: value(each) for end, each in ends.items()} for name, ends in held.learned.items()},
            {name: {end: value(each) for end, each in ends.items()} for name, ends in held.ranges.items()},
        )

    def _assign(self, before: Arrays, after: Arrays, mode: Mode) -> None:
        """Keeps what a run has moved; gradients do not pass through it."""
        held = self._held
        pairs = [(held.tensors[name], before.tensors[name], after.tensors[name]) for name in held.tensors]
        trees = [(held.ranges, before.ranges, after.ranges)]
        if mode.observing:
            trees.append((held.learned, before.learned, after.learned))
        for variables, old, new in trees:
            pairs += [
                (variables[name][end], old[name][end], new[name][end]) for name in variables for end in variables[name]
            ]
        for variable, old, new in pairs:
            if new is not old:
                variable.assign(ops.stop_gradient(new))

    # --- for the device -----------------------------------------------------------------------------------------------

    def trained(self) -> TrainedNetwork:
        """The network with its numbers in NumPy, as they are now."""

        def run(inputs: tuple[Any, ...], quantizing: bool) -> dict[str, np.ndarray]:
            batch = inputs[0] if len(inputs) == 1 else inputs
            return self._computed(self._given(batch), Mode(frozen=self.frozen, quantizing=quantizing))

        def called(batch: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
            given = self._given(batch)
            return [ops.convert_to_numpy(x) for x in given], self._computed(given, Mode(frozen=self.frozen))

        arrays = self._arrays(lambda variable: np.asarray(ops.convert_to_numpy(variable.value)))
        return TrainedNetwork(self._held.functional, arrays, self.frozen, run, called)

    def _computed(self, given: list[Any], mode: Mode) -> dict[str, np.ndarray]:
        """What every step computes in evaluation, by its path."""
        held = self._held

        def run(tensors: dict[str, Any], learned: Tree, ranges: Tree, given: list[Any]) -> dict[str, Any]:
            seen: dict[str, Any] = {}
            held.functional.run(Arrays(tensors, learned, ranges), given, mode, None, seen)
            return seen

        if mode not in held.programs:
            held.programs[mode] = program(run)
        arrays = self._arrays(lambda variable: variable.value)
        values = held.programs[mode](arrays.tensors, arrays.learned, arrays.ranges, given)
        return {path: np.asarray(ops.convert_to_numpy(value)) for path, value in values.items()}

    def take_over(self, tensors: Mapping[str, np.ndarray], ranges: Mapping[str, tuple[float, float]]) -> None:
        """Takes over variables, by the user's names, and the ranges of grids, by the grids' names.

        Raises:
            ValueError: the model is frozen, or it has no such variable.
        """
        held = self._held
        if self.frozen:
            raise ValueError("a frozen model takes over no ranges: do it before freeze")
        unknown = [name for name in tensors if name not in held.tensors]
        if unknown:
            raise ValueError(f"the model has no variable {unknown[0]!r}")
        for name, value in tensors.items():
            held.tensors[name].assign(value)
        for name, ends in ranges.items():
            for end, number in zip(("minimum", "maximum"), ends, strict=True):
                (held.learned if end in held.learned.get(name, {}) else held.ranges)[name][end].assign(number)

    def numbers(self) -> Numbers:
        """The numbers that training ended with, for `deploy.lower`."""
        return self.trained().numbers()

    def evaluated(self, batch: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The inputs and results of one call in evaluation, flat, for `deploy.verify`; without final steps that the
        device's network leaves out. batch: as `predict` takes one."""
        return self.trained().evaluated(batch)

    def stored_codes(self, *inputs: Any) -> dict[str, np.ndarray]:
        """Codes of every tensor that the device stores, by layer path, in the user's order of axes."""
        return self.trained().stored_codes(*inputs)

    def layer_values(self, *inputs: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What the float and the fake-quantized network store, by layer path, in the user's order of axes."""
        return self.trained().layer_values(*inputs)

    # --- Keras --------------------------------------------------------------------------------------------------------

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Symbolic results, from the plan: nothing is computed."""
        batch = keras.tree.flatten(inputs)[0].shape[0]
        outputs = []
        for name in self.plan.network.outputs:
            value = self.plan.network.values[name]
            shape = [batch if axis == value.batch_axis and size == 1 else size for axis, size in enumerate(value.shape)]
            outputs.append(keras.KerasTensor(shape, dtype="float32" if value.dtype == "float32" else "int32"))
        return self.plan.network.output_tree.unflatten(outputs)

    def get_config(self) -> dict[str, Any]:
        held = self._held
        return {
            "name": self.name,
            "trainable": self.trainable,
            "model": keras.saving.serialize_keras_object(held.original),
            "rules": [asdict(rule) for rule in held.rules],
            "shapes": held.shapes,
            "dtypes": held.dtypes,
            "deployable": held.deployable,
            "keep_final_activation": bool(held.keep_final_activation),
            "frozen": held.frozen,
            "calibrated": held.calibrated,
            "profile": held.functional.profile,
            "fresh_norms": sorted(held.functional.fresh_norms),
            "statistics": _statistics(held.original, variable_names(held.original)),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> PreparedModel:
        config = dict(config)
        config["model"] = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        """In the network's order, whichever of them are trained. Names numbered by Keras differ between models."""
        for position, variable in enumerate(self._stored_variables()):
            store[str(position)] = variable

    def load_own_variables(self, store: Any) -> None:
        variables = self._stored_variables()
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

    def set_weights(self, weights: Any) -> None:
        super().set_weights(weights)
        self._look_for_data()

    def _stored_variables(self) -> list[Any]:
        held = self._held
        trees = (held.learned, held.ranges)
        return [*held.tensors.values(), *(each for tree in trees for ends in tree.values() for each in ends.values())]

    def _look_for_data(self) -> None:
        """Ranges that came with weights need no calibration."""
        held = self._held
        names = held.functional.needs_calibration
        if names and all(int(held.ranges[name]["batches"].numpy()) > 0 for name in names):
            held.__dict__.update(calibrated=True)

    def __repr__(self) -> str:
        weighted = [step for step in self.plan.steps if step.weights is not None]
        phase = "frozen" if self.frozen else "not frozen"
        count = len(self.plan.inputs) + len(self.plan.steps)
        precisions = self.plan.precisions()
        return f"PreparedModel({count} stored tensors, {len(weighted)} layers with weights{precisions}, {phase})"

    def _repr_html_(self) -> str:
        return table(repr(self), ROW_HEADER, [row.cells() for row in self.plan.rows()], 4)

    def summary(
        self,
        line_length: int | None = None,
        positions: Any = None,
        print_fn: Any = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Any = None,
    ) -> None:
        """What the device runs, a line for each tensor it stores. Only `print_fn` matters; there are no layers."""
        rows: list[tuple[str, ...]] = [("stored tensor", "operator", "shape", "bits of weights", "bits of result")]
        for row in self.plan.rows():
            kind = f"{row.kind} {row.activation}" if row.activation else row.kind
            bits = ("" if each is None else str(each) for each in (row.weight_bits, row.bits))
            rows.append((shortened(row.path), kind, str(row.shape), *bits))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [repr(self)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        trained, others = (
            sum(int(np.prod(variable.shape)) for variable in variables)
            for variables in (self.trainable_variables, self.non_trainable_variables)
        )
        lines.append(f"trainable numbers: {trained:,}, others: {others:,}")
        for line in lines:
            (print_fn or print)(line)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Keras's post-training quantization, of layers; a prepared model has none."""
        raise NotImplementedError("a prepared model becomes integers by qat.keras.freeze and deploy.lower")

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Keras's export, of a backend function; a prepared model becomes a file in another way."""
        raise NotImplementedError(
            "a prepared model is exported as integers: qat.keras.freeze, then deploy.write_tflite(deploy.lower(model), "
            "path) or deploy.write_onnx; model.save keeps it for further training"
        )

    def _changed_phase(self, **changes: Any) -> None:
        self._held.__dict__.update(changes)
        # Compiled functions belong to the previous phase.
        for name in ("train_function", "test_function", "predict_function"):
            if getattr(self, name, None) is not None:
                setattr(self, name, None)


def calibrate(model: PreparedModel, batches: Iterable[Any], restart: bool = False) -> None:
    """Sets all activation ranges from data: runs the float network, in evaluation, over `batches` of inputs.

    Args:
        batches: batches of inputs as `predict` takes one, or a data set that `fit` takes, whose targets are left out:
            in a tuple or list of more arrays than the model has inputs, the first element is the inputs.
        restart: forget what ranges have seen in training or calibration; otherwise that counts as earlier batches.
            Learned ranges start over, too.

    Raises:
        ValueError: the model is frozen, there is no batch, or one has other shapes than the model was prepared for or
            gives values that are not finite.
        TypeError: batches is one array, or the model is not prepared.
    """
    _require_prepared(model)
    if isinstance(batches, keras.utils.PyDataset):
        batches = map(batches.__getitem__, range(len(batches)))
    batches = loading.checked(batches, ops.is_tensor(batches) or isinstance(batches, np.ndarray))
    if model.frozen:
        raise ValueError("calibrate before freeze: the ranges of a frozen model are fixed")
    held = model._held
    before = [
        (variable, ops.convert_to_numpy(variable.value))
        for tree in (held.ranges, held.learned)
        for name, ends in tree.items()
        # Other learned ranges belong to weights.
        if name in held.ranges and held.functional.grids[name].rule.ranges != "fixed"
        for end, variable in ends.items()
        if end != "trained"
    ]

    def see(batch: Any) -> None:
        wanted = len(model.plan.network.inputs)
        if isinstance(batch, tuple | list) and len(keras.tree.flatten(batch)) != wanted:
            batch = keras.utils.unpack_x_y_sample_weight(batch)[0]
        model._run(batch, Mode(quantizing=False, observing=True))

    try:
        for variable, value in before if restart else ():
            variable.assign(np.zeros_like(value))
        loading.show(batches, see, lambda: held.functional.batches_seen(held.ranges))
    except BaseException:
        # What ranges had seen is not lost.
        for variable, value in before:
            variable.assign(value)
        raise
    model._changed_phase(calibrated=True)


def freeze(model: PreparedModel) -> None:
    """Starts the last phase of training: statistics and ranges are fixed, biases are on the int32 grid.

    The model stays compiled; the next `fit` trains what is left. With learned ranges, its optimizer starts over with
    the same settings: it was made for more variables, and its momentum would go on moving them.

    Warns (`exactqat.qat.UnsettledStatisticsWarning`) of batch norms whose running statistics have seen too few training
    batches, and (`exactqat.qat.RangesMovedWarning`) where it had to move ranges, because the device's operators cannot
    take them together.

    Raises:
        ValueError: a range or a batch norm's statistics are not finite.
        RuntimeError: ranges have seen no data.
        TypeError: the model does not come from `prepare`.
    """
    _require_prepared(model)
    held = model._held
    arrays = model._arrays(lambda variable: np.asarray(ops.convert_to_numpy(variable.value)))
    held.functional.require_finite_state(arrays.ranges, arrays.learned, arrays.tensors)
    held.functional.require_data(arrays.ranges)
    frozen = held.functional.frozen_ranges(arrays.ranges, arrays.learned, arrays.tensors)
    for tree, after in zip((held.ranges, held.learned), frozen, strict=True):
        for name, ends in tree.items():
            for end, variable in ends.items():
                variable.assign(after[name][end])
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.range_parameters():
        model.optimizer = type(optimizer).from_config(optimizer.get_config())
    model._changed_phase(frozen=True)
    model._set_ranges_trainable()


def _require_prepared(model: Any) -> None:
    if not isinstance(model, PreparedModel):
        how = elsewhere(model, "keras") or "; prepare it first: model = exactqat.qat.keras.prepare(model)"
        raise TypeError(f"model must come from exactqat.qat.keras.prepare, got {type(model).__name__}{how}")


def _inputs_of(model: Any) -> Any:
    """The symbolic inputs of a model, nested as it takes them; None of a subclass, which does not know them."""
    return getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)


def _as_nested(model: Any, shapes: Any) -> Any:
    """One shape alone, of a model whose only input is in a list (as files of Keras 2 have it), in a list."""
    alone = isinstance(shapes, tuple) and isinstance(_inputs_of(model), list | tuple)
    return [shapes] if alone and all(size is None or isinstance(size, int) for size in shapes) else shapes


def _shapes(model: Any) -> Any:
    """Shapes of a model's inputs, nested as it takes them."""
    inputs = _inputs_of(model)
    if inputs is None:
        raise ValueError("the model does not know its inputs: give example, a batch of them")
    shapes = keras.tree.map_structure(lambda each: tuple(each.shape), inputs)
    if isinstance(shapes, list) and len(shapes) == 1:
        shapes = shapes[0]
    flat = keras.tree.flatten(inputs)
    if any(size is None for each in flat for size in each.shape[1:]):
        raise ValueError(
            f"the model takes inputs of shape {[tuple(each.shape) for each in flat]}; a device's network has fixed "
            "sizes: give example, a batch of the size that is to be deployed"
        )
    return shapes


# How a model trains, evaluates and predicts; a class may define its own.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "make_train_function", "fit")


def _own_steps(model: Any) -> list[str]:
    """Those of `_STEPS` that the user has written."""
    classes = [each for each in type(model).__mro__ if not each.__module__.startswith("keras.")]
    return [name for name in _STEPS if name in vars(model) or any(name in vars(each) for each in classes)]


def _adapted(model: Any) -> list[Any]:
    """Layers that compute with what `adapt` has shown them: numbers of the network, but not variables."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Normalization)]


def _statistics(model: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """What `adapt` has found; a model's configuration does not hold it."""
    variables = [variable for layer in _adapted(model) for variable in layer.variables]
    return {names[id(each)]: ops.convert_to_numpy(each.value).tolist() for each in variables}


def _give_statistics(model: Any, names: Mapping[int, str], statistics: Mapping[str, Any]) -> None:
    for layer in _adapted(model):
        for variable in layer.variables:
            variable.assign(np.asarray(statistics[names[id(variable)]], variable.dtype))
        layer.finalize_state()


def _as_tuples(shapes: Any) -> Any:
    """Shapes as they were before they were written down as JSON."""
    if isinstance(shapes, Mapping):
        return {key: _as_tuples(each) for key, each in shapes.items()}
    if all(each is None or isinstance(each, int) for each in shapes):
        return tuple(shapes)
    return type(shapes)(_as_tuples(each) for each in shapes)


def _rule(fields: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(fields)
    if made.get("fixed_range") is not None:
        made["fixed_range"] = tuple(made["fixed_range"])
    return made


def _float32(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def _values(x: Any) -> np.ndarray | None:
    """What a tensor holds; None if it is traced."""
    try:
        return np.asarray(ops.convert_to_numpy(x))
    except Exception:  # noqa: BLE001 - every backend has an error of its own for it
        return None
