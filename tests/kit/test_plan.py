# SPDX-License-Identifier: Apache-2.0
"""What planning decides: what is fused, shared, named, taken apart and refused. Networks are built by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from plan_sketch import Sketch, close, kinds, paths  # noqa: E402

from exactqat.kit.device import OPERATORS  # noqa: E402
from exactqat.kit.planning import HANDLERS, UnsupportedOperator, plan  # noqa: E402
from exactqat.kit.planning.network import KINDS  # noqa: E402
from exactqat.kit.planning.plans import Plan, PlanStep  # noqa: E402
from exactqat.kit.planning.pooling import same_padding  # noqa: E402
from exactqat.kit.planning.rules import Rule  # noqa: E402

ANY = (Rule(),)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def step(scheme: Plan, path: str) -> PlanStep:
    plan_step = scheme.stored(path)
    assert isinstance(plan_step, PlanStep)
    return plan_step


# Fusing


def test_batch_norm_and_activation_after_a_convolution_are_one_operator() -> None:
    sketch = Sketch()
    x = sketch.conv(sketch.input(1, 3, 8, 8), 6, 3, padding=((1, 1), (1, 1)), module="stem")
    x = sketch.add("identity", sketch.batch_norm(sketch.add("identity", x), "stem_norm"))
    scheme = plan(sketch.network(sketch.add("relu6", x, module="act")), ANY)
    assert paths(scheme) == ["stem"] and kinds(scheme) == ["CONV_2D"]
    stem = scheme.steps[0]
    assert stem.activation == "RELU6" and stem.high and scheme.grids["stem"].nonnegative
    assert stem.weights is not None and stem.weights.batch_norm is not None
    assert stem.weights.batch_norm.mean == "stem_norm.running_mean" and stem.weights.batch_norm.training
    assert stem.attributes["padding"] == ((1, 1), (1, 1)) and stem.attributes["groups"] == 1
    assert scheme.outputs == scheme.device_outputs == ("stem",)


CAMERA = (Rule("input", ranges="fixed", fixed_range=(0.0, 255.0)), Rule())
NORMALIZED = [
    # Padding of the convolution, whether it is a step of its own, groups, rules, the line, the operators.
    (0, False, 1, ANY, "channels", ["CONV_2D"]),
    (0, False, 1, ANY, "numbers", ["CONV_2D"]),
    (1, False, 1, ANY, "factor", ["CONV_2D"]),
    (1, False, 1, CAMERA, "numbers", ["PADV2", "CONV_2D"]),
    (1, True, 1, CAMERA, "numbers", ["PADV2", "CONV_2D"]),
    # Zeros after the line are another color in each channel, or one that the range of what is seen may not hold.
    (1, False, 1, CAMERA, "channels", ["DEPTHWISE_CONV_2D", "CONV_2D"]),
    (1, False, 1, ANY, "numbers", ["DEPTHWISE_CONV_2D", "CONV_2D"]),
    (1, False, 1, (Rule("input", ranges="fixed", fixed_range=(0.0, 99.0)), Rule()), "numbers",
     ["DEPTHWISE_CONV_2D", "CONV_2D"]),
    (0, False, 3, ANY, "channels", ["DEPTHWISE_CONV_2D", "DEPTHWISE_CONV_2D"]),
]  # fmt: skip


@pytest.mark.parametrize(("padding", "apart", "groups", "rules", "line", "operators"), NORMALIZED)
def test_what_normalizes_an_input_becomes_part_of_the_layer_that_reads_it(
    padding: int, apart: bool, groups: int, rules: tuple[Rule, ...], line: str, operators: list[str]
) -> None:
    sketch = Sketch()
    x = sketch.input(1, 3, 8, 8)
    if line == "channels":
        mean, deviation = (sketch.parameter(name, 3, 1, 1) for name in ("mean", "deviation"))
        x = sketch.add("div", sketch.add("sub", sketch.add("div", x, 255.0), mean), deviation)
    elif line == "numbers":
        x = sketch.add("div", sketch.add("sub", x, 100.0), 50.0)
    else:
        x = sketch.add("div", x, 255.0)
    around = ((padding, padding), (padding, padding))
    if apart:
        x, around = sketch.add("pad", x, padding=((0, 0), (0, 0), *around), mode="constant", value=0.0), ((0, 0),) * 2
    network = sketch.network(sketch.batch_norm(sketch.conv(x, 6, 3, padding=around, groups=groups)))
    scheme = plan(network, rules)
    assert kinds(scheme) == operators
    inputs = [255 * torch.rand(2, 3, 8, 8)]
    assert close(sketch.computed(scheme, inputs), sketch.expected(network, inputs))
    weights = scheme.steps[-1].weights
    assert weights is not None and scheme.constants[weights.weight].trainable


def test_a_line_that_others_read_too_is_an_operator() -> None:
    sketch = Sketch()
    x = sketch.add("div", sketch.input(1, 3, 8, 8), 255.0)
    scheme = plan(sketch.network(sketch.conv(x, 6), x), ANY)
    assert kinds(scheme) == ["DEPTHWISE_CONV_2D", "CONV_2D"]
    inner = Sketch()
    y = inner.add("div", inner.conv(inner.input(1, 3, 8, 8), 3), 255.0)
    assert kinds(plan(inner.network(inner.conv(y, 6, module="second")), ANY))[1] == "DEPTHWISE_CONV_2D"


def test_a_dense_layer_takes_what_normalizes_its_input() -> None:
    sketch = Sketch()
    mean = sketch.parameter("mean", 5)
    network = sketch.network(sketch.linear(sketch.add("mul", sketch.add("sub", sketch.input(1, 5), mean), 3.0), 4))
    scheme = plan(network, ANY)
    assert kinds(scheme) == ["FULLY_CONNECTED"]
    inputs = sketch.examples()
    assert close(sketch.computed(scheme, inputs), sketch.expected(network, inputs))


def test_what_others_read_too_is_not_fused() -> None:
    sketch = Sketch()
    x = sketch.conv(sketch.input(1, 3, 8, 8), 6)
    normal = sketch.batch_norm(x)
    scheme = plan(sketch.network(sketch.add("relu", normal, module="act"), x), ANY)
    assert paths(scheme) == ["conv", "norm"] and kinds(scheme) == ["CONV_2D", "DEPTHWISE_CONV_2D"]
    assert step(scheme, "conv").activation == "NONE" and step(scheme, "norm").activation == "RELU"
    assert not step(scheme, "conv").high and step(scheme, "norm").high


def test_frozen_batch_norm_stays_frozen() -> None:
    sketch = Sketch()
    x = sketch.batch_norm(sketch.conv(sketch.input(1, 3, 8, 8), 6), training=False)
    norm = plan(sketch.network(x), ANY).steps[0].weights.batch_norm  # type: ignore[union-attr]
    assert norm is not None and not norm.training


@pytest.mark.parametrize(
    ("kind", "attributes", "activation"),
    [
        ("relu", {}, "RELU"),
        ("relu6", {}, "RELU6"),
        ("clamp", {"min": 0.0, "max": 6.0}, "RELU6"),
        ("clamp", {"min": 0, "max": None}, "RELU"),
        ("clamp", {"min": 0, "max": math.inf}, "RELU"),
        ("clamp", {"min": 0.0, "max": 1.0}, None),
        ("clamp", {"min": -1.0, "max": 6.0}, None),
        ("sigmoid", {}, None),
    ],
)
def test_activations_that_are_fused(kind: str, attributes: dict, activation: str | None) -> None:
    sketch = Sketch()
    x = sketch.add(kind, sketch.conv(sketch.input(1, 3, 4, 4), 4), **attributes)
    scheme = plan(sketch.network(sketch.conv(x, 2, module="last")), ANY)
    assert step(scheme, "conv").activation == (activation or "NONE")
    assert (len(scheme.steps) == 2) == (activation is not None)


def test_kinds_of_convolutions() -> None:
    sketch = Sketch()
    x = sketch.conv(sketch.input(1, 4, 9), 8, 3, groups=2, module="grouped")
    x = sketch.conv(x, 16, 3, groups=8, module="depthwise", strides=(2,))
    scheme = plan(sketch.network(sketch.linear(sketch.add("permute", x, axes=(0, 2, 1)), 5)), ANY)
    assert kinds(scheme) == ["CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE", "FULLY_CONNECTED"]
    assert scheme.steps[0].attributes["groups"] == 2 and scheme.steps[1].attributes["strides"] == (2,)
    assert scheme.steps[3].shape == (1, 3, 5)
    assert scheme.steps[2].grid == "depthwise"


def test_batch_norm_after_linear_must_be_over_its_features() -> None:
    for axis, count in ((1, 2), (2, 1)):
        sketch = Sketch()
        x = sketch.batch_norm(sketch.linear(sketch.input(1, 5, 6), 5), channel_axis=axis)
        assert len(plan(sketch.network(x), ANY).steps) == count


# Grids


def branches(kind: str, *rules: Rule, axis: int = 1) -> Plan:
    sketch = Sketch()
    x = sketch.input(1, 3, 4, 4)
    one = sketch.add("relu", sketch.conv(x, 4, module="one"))
    two = sketch.conv(x, 4, module="two")
    operands = (sketch.add("max_pool", one, **window(2, 2, 0)), sketch.add("max_pool", two, **window(2, 2, 0)))
    how = {"axis": axis} if kind == "concat" else {}
    return plan(sketch.network(sketch.add(kind, *operands, **how)), [*rules, Rule()])


def window(size: int, stride: int, padding: int) -> dict:
    return {
        "window": (size, size),
        "strides": (stride, stride),
        "dilations": (1, 1),
        "padding": ((padding, padding),) * 2,
        "channel_axis": 1,
    }


@pytest.mark.parametrize("kind", ["concat", "maximum", "minimum"])
def test_what_is_moved_or_compared_shares_a_grid(kind: str) -> None:
    scheme = branches(kind)
    assert {scheme.stored(path).grid for path in ("one", "two", "pool", "pool_2", scheme.outputs[0])} == {"one"}
    assert set(scheme.grids) == {"input", "one"}
    shared = scheme.grids["one"]
    assert shared.writers == 2 and not shared.nonnegative
    assert step(scheme, "one").high and not step(scheme, "two").high and not step(scheme, scheme.outputs[0]).high


def test_a_tensor_under_another_rule_is_stored_once_more() -> None:
    scheme = branches("concat", Rule("two", ranges="min_max"))
    assert paths(scheme) == ["one", "two", "pool", "pool_2", "cat_operand_1", "cat"]
    assert scheme.stored("cat").grid == scheme.stored("cat_operand_1").grid == "one"
    assert scheme.stored("two").grid == scheme.stored("pool_2").grid == "two"
    assert scheme.grids["two"].rule.ranges == "min_max" and scheme.grids["one"].writers == 2


def test_a_grid_that_the_device_fixes_is_shared_only_with_its_like() -> None:
    sketch = Sketch()
    x = sketch.conv(sketch.input(1, 3, 4, 4), 4)
    gates = [sketch.add("sigmoid", x), sketch.add("sigmoid", sketch.add("neg", x))]
    both = sketch.add("concat", *gates, axis=1)
    scheme = plan(sketch.network(sketch.add("concat", both, x, axis=1)), ANY)
    fixed = OPERATORS["LOGISTIC"].fixed_grid
    assert scheme.grids["sigmoid"].fixed == fixed and scheme.grids["sigmoid"].writers == 2
    assert scheme.stored("cat").grid == scheme.stored("sigmoid_2").grid == "sigmoid"
    assert step(scheme, "cat_2").operands == ("cat_2_operand_0", "conv")
    assert scheme.grids[scheme.stored("cat_2").grid].fixed is None


def test_a_hard_sigmoid_has_the_range_of_its_clamps() -> None:
    sketch = Sketch()
    scheme = plan(sketch.network(sketch.add("hardswish", sketch.input(1, 5), module="act")), [Rule(activation_bits=4)])
    assert paths(scheme) == ["act_gate", "act"] and kinds(scheme) == ["DEPTHWISE_CONV_2D", "MUL"]
    gate = step(scheme, "act_gate")
    assert gate.bounds == (0.0, 1.0) and gate.attributes["strides"] == ()
    assert scheme.grids["act_gate"].rule == Rule(activation_bits=4, ranges="fixed", fixed_range=(0.0, 1.0))
    assert gate.weights is not None and gate.weights.rule.ranges == "ema"
    assert scheme.constants[gate.weights.weight].shape == (5, 1)


# Names and rules


def test_functions_are_numbered_within_their_module() -> None:
    sketch = Sketch()
    x = sketch.input(1, 3, 4, 4)
    for path in ("", "", "block"):
        x = sketch.add("add", x, sketch.add("square", x), path=path)
    assert paths(plan(sketch.network(x), ANY)) == ["square", "add", "square_2", "add_2", "square_3", "block.add"]


def test_modules_keep_their_names_before_functions_but_not_before_the_input() -> None:
    sketch = Sketch()
    x = sketch.input(1, 3, 4, 4)
    total = sketch.add("add", x, sketch.add("square", x))
    x = sketch.conv(sketch.conv(total, 3, module="input"), 3, module="add")
    scheme = plan(sketch.network(x), [Rule("input", weight_bits=4, ranges="fixed", fixed_range=(-1, 1)), *ANY])
    assert paths(scheme) == ["square", "add_2", "input_2", "add"]
    assert scheme.inputs[0].path == "input" and scheme.grids["input"].rule.fixed_range == (-1, 1)
    assert step(scheme, "input_2").weights.rule.weight_bits == 8  # type: ignore[union-attr]


def test_a_module_called_again_has_its_weights_and_rule_and_a_range_of_its_own() -> None:
    sketch = Sketch()
    x = sketch.conv(sketch.input(1, 3, 4, 4), 3, module="shared")
    again = sketch.add("conv", x, *sketch.steps[0].inputs[1:], module="shared", **sketch.steps[0].attributes)
    scheme = plan(sketch.network(again), [Rule("shared", weight_bits=3), Rule()])
    first, second = scheme.steps
    assert (first.path, second.path) == ("shared", "shared_2") and first.grid != second.grid
    assert first.weights == second.weights and first.weights.rule.weight_bits == 3  # type: ignore[union-attr]


def test_parts_obey_the_rule_of_the_whole_and_unused_rules_are_named() -> None:
    sketch = Sketch()
    made = plan(
        sketch.network(sketch.add("silu", sketch.input(1, 3), module="act")),
        [Rule("act", activation_bits=5), Rule("nothing"), Rule("act_gate"), Rule()],
    )
    assert made.grids["act"].bits == 5 and made.grids["act_gate"].bits == 8  # LOGISTIC's grid is of eight bits
    assert made.grids["act_gate"].rule.match == "act"
    assert len(made.unused_rules) == 2 and "nothing" in made.unused_rules[0] and "earlier rules" in made.unused_rules[1]


def test_rules_that_are_missing_or_cannot_be_deployed() -> None:
    sketch = Sketch()
    network = sketch.network(sketch.conv(sketch.input(1, 3, 4, 4), 3))
    with pytest.raises(ValueError, match="no rule matches layer 'conv'"):
        plan(network, [Rule("input")])
    wide = [Rule(activation_bits=12)]
    with pytest.raises(ValueError, match="layer 'input', rule match='\\*': activation_bits=12"):
        plan(network, wide)
    assert plan(network, wide, deployable=False).grids["conv"].bits == 12


# Refusals


def test_every_place_is_listed_and_repeats_stand_together() -> None:
    sketch = Sketch()
    x = sketch.input(1, 3, 4, 4)
    for at in range(3):
        x = sketch.add("unsupported", sketch.conv(x, 3, module=f"body.{at}"), module=f"act.{at}", label="FancyAct")
    x = sketch.batch_norm(sketch.add("unsupported", x, label="torch.sort", path="head"), "head.norm")
    sketch.add("unsupported", x, label="torch.fft")  # nobody reads it
    with pytest.raises(UnsupportedOperator) as caught:
        plan(sketch.network(x), ANY)
    text = str(caught.value).splitlines()
    assert text[0] == "4 place(s) of the model cannot run on the device:"
    assert text[1].startswith(
        "  1. FancyAct, 3 places, first at act.0 (model.py, line 2): FancyAct has no int8 operator"
    )
    assert (
        text[2].startswith("  2. head (model.py, line 7): torch.sort")
        and "the program that runs the network" in text[2]
    )
    assert text[3].startswith("Supported: Conv2d") and len(text) == 4


def refused(build: Callable[[Sketch], str]) -> str:
    sketch = Sketch()
    with pytest.raises(UnsupportedOperator) as caught:
        plan(sketch.network(build(sketch)), ANY)
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda s: s.conv(s.input(1, 2, 5, 5, 5), 3), "over 3 axes; the device's convolutions support at most two"),
        (lambda s: s.add("mean", s.input(1, 4), axes=(0,), keep_dims=True), "over the batch; every example"),
        (lambda s: s.add("slice", s.input(2, 4), axis=0, start=0, stop=1, step=1), "along the batch"),
        (lambda s: s.add("pow", s.input(1, 4), exponent=math.inf), "non-finite"),
        (lambda s: s.add("reshape", s.input(3, 1, 4, batch_axis=1), shape=(3, 4)), "puts? the batch first"),
        (lambda s: s.add("clamp", s.input(1, 4), min=2.0, max=1.0), "leaves only one value"),
        (
            lambda s: s.add("neg", s.add("argmax", s.input(1, 4), axis=1, keep_dims=True)),
            "only supported as the last step",
        ),
        (
            lambda s: s.add("embedding", s.add("neg", s.input(1, 4)), s.parameter("table", 9, 4)),
            "by numbers that the network computes",
        ),
        (
            lambda s: s.add("add", s.input(1, 2, 3, batch_axis=0), s.input(1, 3)),
            "with the batch on axis 0 of 2",
        ),
    ],
)
def test_refusals_in_the_users_words(build: Callable[[Sketch], str], message: str) -> None:
    text = refused(build)
    assert text.startswith("1 place(s)")
    assert pytest.importorskip("re").search(message, text), text


def test_every_kind_of_the_vocabulary_is_planned_or_refused() -> None:
    assert set(KINDS) - set(HANDLERS) == {"unsupported"}


# What stays outside


@pytest.mark.parametrize("kind", ["softmax", "log_softmax", "sigmoid", "argmax"])
def test_a_last_function_is_left_to_the_program(kind: str) -> None:
    how = {"axis": 1} if "soft" in kind else {"axis": 1, "keep_dims": False} if kind == "argmax" else {}
    sketch = Sketch()
    x = sketch.linear(sketch.input(1, 4), 3)
    scheme = plan(sketch.network(sketch.add(kind, sketch.add("identity", x), **how), x), ANY)
    assert [plan_step.outside for plan_step in scheme.steps] == [False, True]
    assert scheme.outputs == (kind, "linear") and scheme.device_outputs == ("linear", "linear")
    assert scheme.stored(kind).grid == "linear"


def test_in_the_middle_it_is_an_operator() -> None:
    sketch = Sketch()
    scores = sketch.add("softmax", sketch.linear(sketch.input(1, 4), 3), axis=1)
    scheme = plan(sketch.network(scores, sketch.linear(scores, 2, module="last")), ANY)
    assert kinds(scheme) == ["FULLY_CONNECTED", "SOFTMAX", "FULLY_CONNECTED"]
    assert scheme.device_outputs == ("softmax", "last")


# Training only


def test_dropout_is_there_in_training_only() -> None:
    sketch = Sketch()
    marker = torch.nn.Dropout()
    x = sketch.add("dropout", sketch.linear(sketch.input(1, 4), 3), module="drop", expression=marker)
    scheme = plan(sketch.network(sketch.linear(x, 2, module="last")), ANY)
    drop = step(scheme, "drop")
    assert drop.kind == "" and drop.expression is marker and drop.grid == "linear"


# Meaning: plans compute what networks do, whatever they are taken apart into.


def line(sketch: Sketch, *, rank: int = 4, constants: bool = True) -> str:
    """A random chain of sums, products, quotients, with numbers and with one constant for each channel."""
    generator = np.random.default_rng(rank)
    shape = {2: (1, 5), 3: (1, 5, 4), 4: (1, 5, 3, 4)}[rank]
    x = sketch.input(*shape) if rank == 2 else sketch.conv(sketch.input(*shape), 5)
    for kind in generator.permutation(["add", "sub", "mul", "div", "neg", "rsub", "add", "mul"]):
        other: object = float(generator.uniform(0.5, 2))
        if constants and generator.random() < 0.6:
            other = sketch.data(torch.rand(5, *[1] * (rank - 2)) + 0.5)
        if kind == "neg":
            x = sketch.add("neg", x)
        elif kind == "rsub":
            x = sketch.add("sub", other, x)
        else:
            x = sketch.add(str(kind), x, other)
    return sketch.add("relu", x)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_chain_of_lines_is_one_operator(rank: int) -> None:
    sketch = Sketch()
    scheme, inputs = agree(sketch, line(sketch, rank=rank))
    assert kinds(scheme)[-1] == "DEPTHWISE_CONV_2D" and len(scheme.steps) == (1 if rank == 2 else 2)
    assert scheme.steps[-1].activation == "RELU"


def agree(sketch: Sketch, *outputs: str, low: float = -2.0) -> tuple[Plan, list]:
    network = sketch.network(*outputs)
    scheme = plan(network, ANY)
    inputs = sketch.examples(low=low)
    assert close(sketch.computed(scheme, inputs), sketch.expected(network, inputs)), kinds(scheme)
    assert len(set(paths(scheme))) == len(scheme.steps)
    assert {plan_step.grid for plan_step in scheme.steps} <= set(scheme.grids)
    return scheme, inputs


def reduction(kind: str, axes: tuple[int, ...], keep: bool, **how: object) -> Callable[[Sketch], str]:
    return lambda s: s.add(kind, s.input(1, 4, 3, 5), axes=axes, keep_dims=keep, **how)


def image(kind: str, *shape: int, **how: object) -> Callable[[Sketch], str]:
    return lambda s: s.add(kind, s.input(1, *(shape or (3, 7, 9))), channel_axis=1, **how)


def average(sizes: tuple[int, int], side: int, stride: int, zeros: int, **how: object) -> Callable[[Sketch], str]:
    over = how.pop("over", (0, 0))
    options = {"count_include_pad": True, "divisor": None, **how}
    shape = {name: value for name, value in window(side, stride, zeros).items() if name != "dilations"}
    return lambda s: s.add("avg_pool", s.input(1, 3, *sizes), over=over, **shape, **options)


def with_weights(kind: str, weights: int, **how: object) -> Callable[[Sketch], str]:
    def build(s: Sketch) -> str:
        x = s.input(1, 4, 6, 5)
        count = {"layer_norm": 5, "rms_norm": 5, "group_norm": 4}[kind]
        names = [s.parameter(f"w{at}", count) for at in range(weights)]
        names += [None] * ((1 if kind == "rms_norm" else 2) - weights)  # type: ignore[list-item]
        return s.add(kind, x, *names, **{"epsilon": 1e-3, **how})

    return build


def recurrent(kind: str, output: int = 0, layers: int = 1, both: bool = False, first: bool = True, bias: bool = True):
    def build(s: Sketch) -> str:
        x = s.input(1, 4, 6) if first else s.input(4, 1, 6, batch_axis=1)
        gates, hidden = {"lstm": 4, "gru": 3}[kind], 5
        names = []
        for layer in range(layers):
            for _ in range(2 if both else 1):
                size = 6 if layer == 0 else hidden * (2 if both else 1)
                shapes = [(gates * hidden, size), (gates * hidden, hidden)] + [(gates * hidden,)] * (2 * bias)
                names += [s.parameter(f"p{len(s.constants)}", *shape, scale=0.4) for shape in shapes]
        return s.add(
            kind,
            x,
            *names,
            batch_axis=0 if first and output == 0 else 1,
            layers=layers,
            bidirectional=both,
            batch_first=first,
            has_bias=bias,
            dropout=0.0,
            output=output,
        )

    return build


def transposed(groups: int = 1, axes: int = 2, **how: object) -> Callable[[Sketch], str]:
    def build(s: Sketch) -> str:
        x = s.input(1, 4, *(6, 5)[:axes])
        weight, bias = s.parameter("w", 4, 6 // groups, *[3] * axes), s.parameter("b", 6)
        attributes = {
            "strides": (2,) * axes,
            "padding": ((1, 1),) * axes,
            "output_padding": (1,) * axes,
            "dilations": (1,) * axes,
            "channel_axis": 1,
            "groups": groups,
            **how,
        }
        return s.batch_norm(s.add("conv_transpose", x, weight, bias, **attributes))

    return build


def attention(mask: str, causal: bool = False) -> Callable[[Sketch], str]:
    def build(s: Sketch) -> str:
        query, key, value = (s.input(1, 2, 5, 4) for _ in range(3))
        mask_tensor = None
        if mask == "constant":
            mask_tensor = s.data(torch.where(torch.eye(5).bool(), -torch.inf, 0.0))
        if mask == "tensor":
            mask_tensor = s.input(1, 1, 5, 5)
        return s.add("attention", query, key, value, mask_tensor, causal=causal, scale=0.7, dropout=0.0)

    return build


def token(s: Sketch) -> str:
    """A class token first, registers last, positions added."""
    x = s.linear(s.input(1, 4, 6), 6)
    x = s.add("concat", s.parameter("token", 1, 1, 6), x, s.parameter("registers", 1, 2, 6), axis=1)
    return s.add("add", x, s.parameter("positions", 1, 7, 6))


def masked_softmax(s: Sketch) -> str:
    scores = s.add("add", s.input(1, 2, 5, 5), s.data(torch.triu(torch.full((5, 5), -torch.inf), 1)))
    return s.linear(s.add("softmax", s.add("reshape", scores, shape=(1, 2, 5, 5)), axis=3), 3)


def expanded(s: Sketch) -> str:
    x = s.input(1, 3, 4, 4)
    small = s.add("mean", x, axes=(2, 3), keep_dims=True)
    wide = s.add("expand", small, shape=(1, 3, 4, 4))
    return s.add("concat", s.add("add", x, wide), s.add("expand", small, shape=(1, 3, 4, 4)), axis=1)


def function(kind: str, low: float = -2.0, **how: object) -> Callable[[Sketch], str]:
    # Not at the end, where some are left outside.
    return lambda s: s.add("add", s.add(kind, s.input(1, 3, 4, 4), **how), s.inputs[0])


MEANINGS: dict[str, Callable[[Sketch], str]] = {
    **{
        f"{kind} {axes} {keep}": reduction(kind, axes, keep)
        for kind in ("mean", "sum", "amax", "amin", "prod")
        for axes, keep in (((2, 3), True), ((1,), False), ((1, 2, 3), True), ((3,), False))
    },
    "prod of one": lambda s: s.add("prod", s.input(1, 4, 1, 5), axes=(2,), keep_dims=False),
    "var": reduction("var", (2, 3), False, correction=1),
    "std": reduction("std", (1,), True, correction=0),
    "norm": reduction("norm", (1,), True, order=2),
    "norm 1": reduction("norm", (2,), False, order=1),
    "max pool": image("max_pool", **{k: v for k, v in window(3, 2, 1).items() if k != "channel_axis"}),
    "average": average((7, 9), 2, 2, 0),
    "average, zeros counted": average((7, 9), 3, 2, 1),
    "average, zeros not counted": average((7, 9), 3, 1, 1, count_include_pad=False),
    "average, not SAME": average((8, 8), 4, 2, 2, count_include_pad=False),
    "average over the edge": average((8, 9), 3, 2, 1, over=(1, 0), count_include_pad=False),
    "average over the edge, zeros counted": average((8, 9), 3, 2, 1, over=(1, 0)),
    "average by a divisor": average((8, 8), 2, 2, 0, divisor=3),
    **{
        f"adaptive {kind} {size}": image(f"adaptive_{kind}_pool", size=size)
        for kind in ("avg", "max")
        for size in ((1, 1), (3, 4), (7, 3), (4, 9), (14, 18), (1, 2))
    },
    **{
        f"resize {mode} {size} {align}": image(
            "resize", 3, 4, 5, size=size, mode=mode, align_corners=align, scales=None
        )
        for mode, align in (("nearest", False), ("bilinear", False), ("bilinear", True), ("bicubic", False))
        for size in ((8, 10), (6, 3))
    },
    "resize by odd factors": image(
        "resize", 3, 4, 5, size=(5, 6), mode="bilinear", align_corners=False, scales=(1.3, 1.3)
    ),
    "nearest by odd factors": image(
        "resize", 3, 4, 5, size=(5, 8), mode="nearest", align_corners=False, scales=(1.3, 1.7)
    ),
    **{
        f"pad {mode}": lambda s, mode=mode: s.add(
            "pad", s.input(1, 3, 6, 7), padding=((0, 0), (0, 0), (2, 1), (0, 3)), mode=mode, value=0.7
        )
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "crop": lambda s: s.add("pad", s.input(1, 6, 7), padding=((0, 0), (-2, 1), (0, -3)), mode="constant", value=0.0),
    "pixel shuffle": lambda s: s.add("pixel_shuffle", s.input(1, 8, 3, 4), factor=2),
    "pixel unshuffle": lambda s: s.add("pixel_unshuffle", s.input(1, 2, 6, 4), factor=2),
    "flip": lambda s: s.add("flip", s.input(1, 3, 4, 5), axes=(1, 3)),
    "gather": lambda s: s.add("gather", s.input(1, 3, 6), axis=2, indices=(0, 2, 4, 3, 3)),
    "layer norm": with_weights("layer_norm", 2, axes=(3,)),
    "layer norm by length": with_weights("layer_norm", 2, axes=(3,), epsilon=1e-6),
    "layer norm by length, plain": with_weights("layer_norm", 0, axes=(3,), epsilon=1e-6),
    "rms norm by length": with_weights("rms_norm", 1, axes=(3,), epsilon=1e-6),
    "layer norm of rank 5": lambda s: s.add(
        *("layer_norm", s.input(1, 2, 3, 4, 5), s.parameter("w", 5), s.parameter("b", 5)), axes=(4,), epsilon=1e-6
    ),
    "layer norm, no bias": with_weights("layer_norm", 1, axes=(3,)),
    "layer norm, plain": with_weights("layer_norm", 0, axes=(2, 3)),
    "rms norm": with_weights("rms_norm", 1, axes=(3,)),
    "rms norm, plain": with_weights("rms_norm", 0, axes=(3,)),
    **{f"group norm {groups}": with_weights("group_norm", 2, groups=groups, channel_axis=1) for groups in (1, 2, 4)},
    "instance norm": with_weights("group_norm", 0, groups=4, channel_axis=1),
    "normalize": lambda s: s.add("normalize", s.input(1, 3, 4, 5), axis=1, epsilon=1e-12),
    "matmul by a weight": lambda s: s.add("matmul", s.input(1, 4, 6), s.parameter("w", 6, 3)),
    "matmul and bias": lambda s: s.add(
        "add", s.add("matmul", s.input(1, 4, 6), s.parameter("w", 6, 3)), s.parameter("b", 3)
    ),
    "matmul by one of many axes": lambda s: s.add("matmul", s.input(1, 3, 4, 6), s.parameter("w", 1, 1, 6, 3)),
    "matmul by many": lambda s: s.add("matmul", s.input(1, 3, 4, 6), s.parameter("w", 3, 6, 2)),
    "matmul from the left, rank 4": lambda s: s.add("matmul", s.parameter("w", 1, 3, 4), s.input(1, 2, 4, 6)),
    "matmul of features": lambda s: s.add("matmul", s.input(1, 6), s.parameter("w", 6, 3)),
    "matmul from the left": lambda s: s.add("matmul", s.parameter("w", 3, 4), s.input(1, 4, 6)),
    "matmul of two": lambda s: s.add("matmul", s.input(1, 2, 4, 6), s.input(1, 1, 6, 3)),
    "attention": attention(""),
    "attention, causal": attention("", causal=True),
    "attention, masked": attention("constant"),
    "attention, masked by a tensor": attention("tensor"),
    "token": token,
    "masked softmax": masked_softmax,
    "expand": expanded,
    **{
        f"{kind} {output} {layers} {both} {first} {bias}": recurrent(kind, output, layers, both, first, bias)
        for kind in ("lstm", "gru")
        for output, layers, both, first, bias in (
            (0, 1, False, True, True),
            (0, 2, True, False, True),
            (1, 1, True, True, False),
            (1, 2, False, False, True),
        )
    },
    "lstm memory": recurrent("lstm", 2, 2, True),
    "transposed": transposed(),
    "transposed in groups": transposed(groups=2),
    "transposed, one axis": transposed(axes=1),
    **{
        kind: function(kind)
        for kind in ("relu", "relu6", "sigmoid", "tanh", "silu", "mish", "hardsigmoid", "hardswish", "abs", "neg")
    },
    **{kind: function(kind) for kind in ("exp", "square", "erf", "sin", "cos", "selu", "log_sigmoid", "softsign")},
    "softplus": function("softplus", beta=2.0, threshold=20.0),
    "elu": function("elu", alpha=0.7, scale=1.0, input_scale=1.0),
    "leaky": function("leaky_relu", slope=0.2),
    "leaky, rising": function("leaky_relu", slope=-0.2),
    "gelu": function("gelu", approximate="none"),
    "gelu by tanh": function("gelu", approximate="tanh"),
    "cube": function("pow", exponent=3.0),
    "clamp": function("clamp", min=-1.0, max=0.5),
    "hardshrink": function("hardshrink", width=0.3),
    "composition": function("composition", instructions=(("gt", (0, 0.3), ()), ("where", (1, 0, 0.5), ()))),
    "softshrink": function("softshrink", width=0.3),
    "threshold": function("threshold", least=-0.2, value=-0.5),
    "clamp above 0": function("clamp", min=0.3, max=None),
    "clamp below 0": function("clamp", min=None, max=-0.4),
    "softmax": function("softmax", axis=1),
    "log softmax": function("log_softmax", axis=3),
    "prelu": lambda s: s.add("prelu", s.input(1, 3, 4, 4), s.parameter("slope", 3), channel_axis=1),
    "maximum": lambda s: s.add("maximum", s.input(1, 3, 4, 4), s.input(1, 3, 1, 1)),
    "maximum with a constant": lambda s: s.add("maximum", s.input(1, 3, 4, 4), s.parameter("floor", 3, 1, 1)),
    "minimum with a constant": lambda s: s.add("minimum", s.input(1, 3, 4, 4), s.parameter("roof", 4)),
    "maximum with a number": lambda s: s.add("maximum", s.input(1, 3, 4, 4), 0.2),
    "broadcast": lambda s: s.add("sub", s.input(1, 3, 1, 4), s.input(1, 1, 5, 1)),
    "of lower rank": lambda s: s.add("mul", s.input(4, 1, 3, batch_axis=1), s.input(1, 3), batch_axis=1),
    "constant of higher rank": lambda s: s.add("add", s.input(1, 4), s.parameter("p", 1, 4)),
    "two cuts": lambda s: s.add(
        "slice", s.add("slice", s.input(1, 8, 9), axis=1, start=1, stop=8, step=2), axis=2, start=3, stop=9, step=3
    ),
    "batch norm on features": lambda s: s.batch_norm(s.input(1, 5)),
    "batch norm, one axis": lambda s: s.add("relu", s.batch_norm(s.input(1, 5, 7))),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_plan_computes_what_the_network_does(name: str) -> None:
    sketch = Sketch()
    scheme, _ = agree(sketch, MEANINGS[name](sketch))
    assert all(plan_step.kind in OPERATORS or not plan_step.kind or plan_step.outside for plan_step in scheme.steps)


@pytest.mark.parametrize("build", [function("sqrt"), function("rsqrt"), function("log"), function("reciprocal")])
def test_functions_of_positive_numbers(build: Callable[[Sketch], str]) -> None:
    sketch = Sketch()
    agree(sketch, build(sketch), low=0.3)


@pytest.mark.parametrize("constant", [False, True])
def test_quotients(constant: bool) -> None:
    sketch = Sketch()
    x, y = sketch.input(1, 3, 4, 4), sketch.input(1, 3, 1, 1)
    divisor = sketch.data(torch.rand(4) + 0.5) if constant else y
    total = sketch.add("add", sketch.add("div", x, divisor), sketch.add("div", 2.0, x))
    agree(sketch, sketch.add("add", total, sketch.add("div", y, x)), low=0.3)


# Particulars of what things are taken apart into


def test_padding_of_maxima_is_below_all_values_unless_there_are_none_below_zero() -> None:
    for activation, kind in (("relu", "PAD"), ("tanh", "PADV2")):
        sketch = Sketch()
        x = sketch.add(activation, sketch.conv(sketch.input(1, 3, 8, 8), 4))
        scheme = plan(sketch.network(sketch.add("max_pool", x, **window(3, 2, 1))), ANY)
        assert kinds(scheme)[-2:] == [kind, "MAX_POOL_2D"] and paths(scheme)[-2:] == ["pool_padded", "pool"]
        assert len({plan_step.grid for plan_step in scheme.steps[-3:]}) == 1


@pytest.mark.parametrize("size", range(5, 12))
@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_is_tensorflows(size: int, side: int, stride: int) -> None:
    before, after = same_padding(size, side, stride)
    assert 0 <= after - before <= 1
    assert (size + before + after - side) // stride + 1 == -(-size // stride) or side < stride


def test_padding_that_is_same_needs_no_operator() -> None:
    sketch = Sketch()
    x = sketch.input(1, 3, 9, 9)
    scheme = plan(sketch.network(sketch.add("max_pool", x, **window(3, 2, 1))), ANY)
    assert kinds(scheme) == ["MAX_POOL_2D"] and scheme.steps[0].attributes["padding"] == "SAME"


def test_recurrent_layers_keep_one_grid_for_every_step_of_time() -> None:
    sketch = Sketch()
    scheme = plan(sketch.network(recurrent("lstm")(sketch)), ANY)
    states = [plan_step for plan_step in scheme.steps if plan_step.path in ("lstm_layer_0_0", "lstm_layer_0_3")]
    assert len(states) == 2 and states[0].grid == states[1].grid == scheme.steps[-1].grid
    assert scheme.grids[states[0].grid].writers == 4
    returned = [plan_step.weights for plan_step in scheme.steps if plan_step.kind == "FULLY_CONNECTED"]
    assert len(returned) == 4 and len({weights.weight for weights in returned[1:] if weights}) == 1


def test_results_of_one_recurrent_call_are_computed_once() -> None:
    sketch = Sketch()
    sequence = recurrent("gru")(sketch)
    again = sketch.steps[-1]
    state = sketch.add("gru", *again.inputs, batch_axis=1, **{**again.attributes, "output": 1})
    scheme, _ = agree(sketch, sequence, state)
    assert kinds(scheme).count("FULLY_CONNECTED") == 4


def test_what_is_only_repeated_for_a_sum_is_not_stored() -> None:
    sketch = Sketch()
    x = sketch.input(1, 3, 4, 4)
    wide = sketch.add("expand", sketch.add("mean", x, axes=(2, 3), keep_dims=True), shape=(1, 3, 4, 4))
    scheme = plan(sketch.network(sketch.add("mul", x, wide)), ANY)
    assert kinds(scheme) == ["MEAN", "MUL"]


def test_a_weight_that_training_cannot_see_is_not_there() -> None:
    sketch = Sketch()
    x = sketch.input(1, 4, 4)
    with pytest.raises(UnsupportedOperator, match="a weight that depends on the input"):
        plan(sketch.network(sketch.add("linear", x, sketch.add("reshape", x, shape=(4, 4)), None)), ANY)


def test_steps_are_not_called_as_constants_are() -> None:
    sketch = Sketch()
    x = sketch.add("add", sketch.input(1, 3, 4), sketch.parameter("add", 4))
    scheme, _ = agree(sketch, x)
    assert paths(scheme) == ["add_2"] and scheme.steps[0].operands == ("input", "add")


@pytest.mark.parametrize("after", [1, 2])
def test_padding_in_front_of_a_convolution_is_its_own(after: int) -> None:
    sketch = Sketch()
    around = ((0, 0), (0, 0), (0, after), (1, 1))
    x = sketch.add("pad", sketch.input(1, 3, 8, 8), padding=around, mode="constant", value=0.0)
    scheme, _ = agree(sketch, sketch.conv(sketch.add("identity", x), 4, 3, padding=((1, 0), (0, 0))))
    assert kinds(scheme) == ["CONV_2D"] and scheme.steps[0].attributes["padding"] == ((1, after), (1, 1))


@pytest.mark.parametrize(("value", "activation", "count"), [(-math.inf, "tanh", 1), (0.0, "relu", 1), (0.0, "tanh", 2)])
def test_padding_in_front_of_a_maximum(value: float, activation: str, count: int) -> None:
    sketch = Sketch()
    x = sketch.add(activation, sketch.conv(sketch.input(1, 3, 8, 8), 4))
    x = sketch.add("pad", x, padding=((0, 0), (0, 0), (0, 1), (0, 1)), mode="constant", value=value)
    scheme, _ = agree(sketch, sketch.add("max_pool", x, **window(3, 2, 0)))
    tail = kinds(scheme)[kinds(scheme).index("TANH") + 1 :] if activation == "tanh" else kinds(scheme)[1:]
    assert tail == (["MAX_POOL_2D"] if count == 1 else ["PAD", "MAX_POOL_2D"])
    assert scheme.steps[-1].attributes["padding"] == ("SAME" if count == 1 else "VALID")


def test_batch_norm_after_joined_tokens_belongs_to_the_linear_layer() -> None:
    sketch = Sketch()
    x = sketch.linear(sketch.input(1, 4, 6), 5)
    x = sketch.batch_norm(sketch.add("reshape", x, shape=(4, 5)))
    x = sketch.add("reshape", sketch.add("relu", x), shape=(1, 4, 5))
    scheme, _ = agree(sketch, x)
    assert kinds(scheme) == ["FULLY_CONNECTED", "RESHAPE", "RESHAPE"]
    assert scheme.steps[0].weights is not None and scheme.steps[0].weights.batch_norm is not None
    assert scheme.steps[0].activation == "RELU" and all(plan_step.high for plan_step in scheme.steps)
