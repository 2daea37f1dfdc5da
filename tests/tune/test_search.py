# SPDX-License-Identifier: Apache-2.0
"""The search: each means does what it promises, choices are made on one part of the examples and judged on another."""

from __future__ import annotations

import importlib.util
import warnings
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from networks import examples, trained  # noqa: E402

from exactqat import deploy, qat, tune  # noqa: E402
from exactqat.tune.correction import corrected, corrected_layer  # noqa: E402
from exactqat.tune.equalization import equalized, groups  # noqa: E402
from exactqat.tune.evaluations import Task  # noqa: E402
from exactqat.tune.metrics import Data, Mark, decibels  # noqa: E402
from exactqat.tune.network import Candidate  # noqa: E402
from exactqat.tune.ranges import WAYS, chosen, open_grids  # noqa: E402
from exactqat.tune.rounding import with_learned_rounding  # noqa: E402
from exactqat.tune.variants import Observer, Seen, rows_of  # noqa: E402

DATA = examples(256, 1)
IMAGES = torch.from_numpy(examples(512, 0)[0])
FACTORS = torch.tensor([1, 8, 0.25, 32, 1, 0.125, 4, 1.0])


def unequal() -> Any:
    """A network whose first layer has channels of very different size, which the second takes back."""
    model = trained()
    with torch.no_grad():
        model.norm.weight.mul_(FACTORS)
        model.norm.bias.mul_(FACTORS)
        model.second.weight.div_(FACTORS[None, :, None, None])
    return model


def calibrated(model: Any, **rule: Any) -> Any:
    prepared = qat.prepare(model, IMAGES[:2], [qat.Rule(**rule)])
    qat.calibrate(prepared, [IMAGES])
    return prepared


def outputs_of(model: Any, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        outputs: np.ndarray = model(torch.from_numpy(images)).numpy()
    return outputs


def noise_of(candidate: Candidate, model: Any) -> float:
    (name,) = [port.name for port in candidate.graph().signature.outputs]
    task = Task(candidate.device, Data(DATA, True), tune.accuracy, {name: outputs_of(model, DATA[0])})
    return task.marks([candidate.graph()])[0].decibels


# --- the whole search ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_a_network_is_better_afterwards(bits: int) -> None:
    model = unequal()
    prepared = calibrated(model, weight_bits=bits, activation_bits=bits)
    before = {name: value.clone() for name, value in prepared.state_dict().items() if hasattr(value, "clone")}
    search = tune.search(prepared, examples(512, 5))
    test = examples(1000, 9)
    plain = tune.gate(prepared, test, minimum=0).score
    assert tune.gate(search.graph, test, minimum=0).score >= plain + (0.3 if bits == 4 else 0)
    assert search.after.decibels > search.before.decibels + 10
    assert search.trials[0].name == "as calibrated" and search.trials[0].kept
    assert {trial.name for trial in search.trials} >= {"ranges", "equalization", "biases"}
    # What is said of the result is so.
    again = tune.search(search.candidate, examples(512, 5), budget=1)
    assert again.before.metric == search.after.metric
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items() if name in before)
    assert max(map(len, search.text().splitlines())) <= 80 and "equalization" in search.text()


@pytest.mark.slow
def test_the_answer_is_the_same_with_any_executor() -> None:
    prepared, data = calibrated(unequal(), weight_bits=4), examples(256, 5)
    alone = tune.search(prepared, data, seed=3, budget=40)
    assert tune.search(prepared, data, seed=3, budget=40).trials == alone.trials
    with ThreadPoolExecutor(2) as threads:
        assert tune.search(prepared, data, seed=3, budget=40, executor=threads).trials == alone.trials
    other = tune.search(prepared, data, seed=4, budget=40)
    assert other.before != alone.before


def test_the_answer_is_the_same_from_other_processes() -> None:
    prepared, data = calibrated(unequal(), weight_bits=4), examples(256, 5)
    alone = tune.search(prepared, data, budget=15)
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        assert tune.search(prepared, data, budget=15, executor=processes).trials == alone.trials


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs dask.distributed")
def test_the_answer_is_the_same_with_dask() -> None:
    import distributed

    prepared, data = calibrated(unequal(), weight_bits=4), examples(256, 5)
    alone = tune.search(prepared, data, budget=15)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert tune.search(prepared, data, budget=15, executor=client.get_executor()).trials == alone.trials


@pytest.mark.parametrize("budget", [1, 2, 7, 20])
def test_the_budget_is_kept(budget: int) -> None:
    search = tune.search(calibrated(unequal()), DATA, budget=budget)
    # What was chosen last is judged even if nothing is left, as is the network that was given.
    assert search.evaluations <= budget + 1
    assert search.after.metric is not None


def test_the_model_takes_over_what_was_found() -> None:
    prepared = calibrated(unequal(), weight_bits=4)
    search = tune.search(prepared, examples(512, 5))
    assert len({trial.name for trial in search.trials if trial.kept}) > 2
    assert search.apply(prepared) is prepared
    qat.freeze(prepared)
    same_graph(deploy.lower(prepared), search.graph)
    with pytest.raises(ValueError, match="a frozen model takes over no ranges"):
        search.apply(prepared)


def test_a_network_that_learns_ranges_starts_from_what_was_found() -> None:
    search = tune.search(calibrated(unequal(), weight_bits=4), examples(512, 5))
    assert "equalization" in {trial.name for trial in search.trials if trial.kept}
    learning = calibrated(unequal(), weight_bits=4, ranges="learned")
    search.apply(learning)
    qat.freeze(learning)
    same_graph(deploy.lower(learning), search.graph)


def test_methods_have_names() -> None:
    prepared, said = calibrated(unequal(), weight_bits=4), []
    search = tune.search(
        prepared, DATA, budget=8, methods=["rounding", "batch_norm"], progress=lambda *now: said.append(now)
    )
    # In the search's order, and both within a small budget.
    assert [trial.name for trial in search.trials] == ["as calibrated", "batch norms", "rounding of weights"]
    assert all(0 <= done <= total and left >= 0 for done, total, left in said)
    done, total, left = said[-1]
    assert done == total and left == 0
    (only,) = tune.search(prepared, DATA, budget=8, methods="bias").trials[1:]
    assert only.name == "biases"
    # With room for nothing else, weights are rounded before ranges are tried one by one.
    names = [trial.name for trial in tune.search(prepared, DATA, budget=9).trials]
    assert names[-3:] == ["batch norms", "rounding of weights", "biases"]


def test_a_layer_is_lowered_as_in_the_whole_network() -> None:
    for rule in ({"weight_bits": 4}, {"per_channel": False, "fold_batch_norm": True}):
        candidate = Candidate.of(calibrated(trained(), **rule)).settled()
        for operator, places in Observer(candidate, Data(DATA, True)).layers(candidate):
            changed = candidate.with_layer(operator, places, {places.weight: candidate.tensors[places.weight] * 1.1})
            same_graph(changed.graph(), replace(changed).graph())


def test_what_is_kept_of_a_network_is_what_later_layers_read() -> None:
    candidate = Candidate.of(calibrated(trained())).settled()
    graph, observer = candidate.graph(), Observer(candidate, Data(DATA, True))
    codes = deploy.input_codes(graph, DATA[0])
    everything = deploy.simulate(graph, codes, candidate.device, tensors=[*graph.inputs, *graph.results()])
    for operator, _ in observer.layers(candidate):
        _, device = observer._operands(operator, graph)
        assert np.array_equal(np.concatenate(device), everything[operator.inputs[0]])


def same_graph(first: deploy.Graph, second: deploy.Graph) -> None:
    assert list(first.tensors) == list(second.tensors)
    for one, other in zip(first.tensors.values(), second.tensors.values(), strict=True):
        assert one.quantization.equals(other.quantization), one.name
        assert one.data is other.data is None or np.array_equal(one.data, other.data), one.name


def test_what_helps_nothing_is_not_kept() -> None:
    """Random targets: whatever is found in one part does not hold in the other."""
    images, _ = examples(256, 5)
    search = tune.search(calibrated(trained()), (images, np.random.default_rng(0).integers(0, 4, 256)), budget=60)
    assert search.before.metric is not None and search.after.metric is not None
    assert not search.before.better_than(search.after, True)


def test_bad_settings_are_refused() -> None:
    prepared = calibrated(trained())
    for settings, message in (
        ({"held_out": 0}, "held_out must be between 0 and 1, got 0"),
        ({"budget": 0}, "budget must be a number of evaluations, 1 or more, got 0"),
        ({"device": "toaster"}, "device must be one of .*, got 'toaster'"),
        ({"held_out": "half"}, "held_out must be between 0 and 1, got 'half'"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"methods": ["batch_norms"]}, "methods must be some of ranges, equalization, .*, got 'batch_norms'"),
        ({"methods": []}, r"methods must be some of ranges, .*, got \[\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            tune.search(prepared, DATA, **settings)
    with pytest.raises(ValueError, match="data has 1 examples, too few"):
        tune.search(prepared, (DATA[0][:1], DATA[1][:1]))
    with pytest.raises(TypeError, match="model must come from exactqat.qat.prepare"):
        tune.search(trained(), DATA)
    other = qat.prepare(torch.nn.Flatten(), IMAGES[:2])
    qat.calibrate(other, [IMAGES])
    with pytest.raises(ValueError, match="the model is not the one that was searched: it has no 'add/weight'"):
        tune.search(prepared, DATA, budget=1).apply(other)


def test_bad_metrics_and_data_are_refused_by_name() -> None:
    prepared, (images, classes) = calibrated(trained()), DATA
    for metric, message in (
        ("accuracy", "metric must be a function of outputs and targets, got 'accuracy'"),
        (lambda outputs, targets: None, "metric must return a number, got None"),
        (lambda outputs, targets: np.ones(3), "metric must return a number, got array"),
        (lambda outputs, targets: float("nan"), "metric must return a finite number, got nan"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            tune.gate(prepared, DATA, metric, minimum=0)
    for data, message in (
        ((images, classes + 0.5), r"targets must be classes from 0 to 3, integers, got \[0.5, 1.5"),
        ((images, classes + 4), r"targets must be classes from 0 to 3, integers, got \[4, 5, 6, 7\]"),
        ((images, 3), "targets must be one for each of the 256 examples, got 3"),
        ((images.astype(str), classes), "inputs must be arrays of numbers, an example in each row, got an array of <U"),
        ((images[:0], classes[:0]), "inputs must hold the same number of examples, at least one, got"),
        ("digits", "data must be .inputs, targets., or a loader of such pairs, got str"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            tune.gate(prepared, data, minimum=0)
    # A list of two batches is a loader, not inputs and targets.
    batches = [(images[:8], classes[:8]), (images[8:16], classes[8:16])]
    assert tune.Gate(batches)(prepared).score == tune.Gate((images[:16], classes[:16]))(prepared).score
    with pytest.raises(ValueError, match="keep names 'nothing', which matches no layer; there are input"):
        tune.plan(prepared, DATA, max_drop=0.1, keep=["nothing"])


def test_chance_is_no_difference() -> None:
    blocks = (0.5, 0.9, 0.7, 0.8)
    here = Mark(0.725, 10.0, blocks)
    # As likely by chance: the noise decides.
    assert Mark(0.74, 20.0, (0.9, 0.56, 0.7, 0.8)).better_than(here, True)
    assert not Mark(0.74, 5.0, (0.9, 0.56, 0.7, 0.8)).better_than(here, True)
    # 1.5 standard errors: the metric decides, but not against half of the noise.
    lower = Mark(0.725 - 0.038, 0.0, (0.4, 0.9, 0.65, 0.8))
    assert 1 < (here.metric - lower.metric) / here.chance(lower) < 2
    assert not replace(lower, decibels=15.0).better_than(here, True)
    assert replace(lower, decibels=17.0).better_than(here, True)
    assert not here.better_than(replace(lower, decibels=17.0), True) and here.better_than(lower, True)
    # In all blocks the same: no chance.
    assert Mark(0.825, 5.0, tuple(block + 0.1 for block in blocks)).better_than(here, True)
    assert not Mark(0.825, 50.0, tuple(block + 0.1 for block in blocks)).better_than(here, False)
    assert not Mark(None, 0.0).better_than(here, True) and here.better_than(Mark(None, 0.0), True)


# --- ranges -------------------------------------------------------------------------------------------------------


def seen(values: np.ndarray) -> Seen:
    return Seen(min(0.0, float(values.min())), max(0.0, float(values.max())), values.astype(np.float32))


def test_ranges_are_what_they_are_called() -> None:
    candidate = Candidate.of(calibrated(trained()))
    plan, grid = candidate.plan, "second"
    rng = np.random.default_rng(0)
    values = np.abs(rng.normal(0, 1, 20000))
    values[0] = 100
    held = seen(values)
    assert chosen("min_max", held, plan, grid) == (0.0, 100.0)
    assert chosen("percentile 99", held, plan, grid)[1] == pytest.approx(np.quantile(values, 0.99))
    # One value in 20,000 is worth its square.
    for way in (way for way in WAYS[1:] if way != "least squares"):
        low, high = chosen(way, held, plan, grid)
        assert low == 0 and 1 < high < 60, way
    # Of few bits the least squared error is found among clipped ranges; of eight bits, none is clipped much.
    normal = seen(rng.normal(0, 1, 20000))

    def error(ends: tuple[float, float], bits: int) -> float:
        steps = 2**bits - 1
        scale = (ends[1] - ends[0]) / steps
        codes = np.clip(np.rint((normal.sample - ends[0]) / scale), 0, steps)
        return float(np.square(ends[0] + codes * scale - normal.sample).mean())

    assert error(chosen("least squares", normal, plan, grid), 8) <= 1.02 * error((normal.least, normal.most), 8)
    few = Candidate.of(calibrated(trained(), activation_bits=3)).plan
    narrow = chosen("least squares", normal, few, grid)
    assert error(narrow, 3) < 0.8 * error((normal.least, normal.most), 3)
    with pytest.raises(ValueError, match="a range is chosen by one of min_max, .*, got 'luck'"):
        chosen("luck", held, plan, grid)


def test_ranges_that_others_decide_stay() -> None:
    rules = [qat.Rule("second", ranges="fixed", fixed_range=(0.0, 9.0)), qat.Rule()]
    prepared = qat.prepare(torch.nn.Sequential(trained(), torch.nn.Sigmoid(), torch.nn.Linear(4, 4)), IMAGES[:2], [
        replace(rules[0], match="0.second"), rules[1],
    ])  # fmt: skip
    qat.calibrate(prepared, [IMAGES])
    candidate = Candidate.of(prepared)
    assert "0.second" not in open_grids(candidate) and "1" not in open_grids(candidate)
    assert "0.first" in open_grids(candidate)


# --- equalization ---------------------------------------------------------------------------------------------------


def test_equalized_networks_are_the_same_in_real_numbers() -> None:
    model = unequal()
    candidate = Candidate.of(calibrated(model))
    chains = groups(candidate)
    assert [(group.first.path, *(step.path for step in group.readers)) for group in chains] == [("first", "second")]
    observer = Observer(candidate, Data(DATA, True))
    changed, factors = equalized(candidate, observer, chains)
    assert list(factors) == ["first"]
    scaled = observer.scaled(changed, factors).values
    after = Observer(changed, Data(DATA, True))
    assert decibels({"": after.values["first"]}, {"": scaled["first"]}) > 40
    ranges = replace(changed, ranges={name: (interval.least, interval.most) for name, interval in after.seen().items()})
    last = candidate.graph().outputs[0]
    plain = {"": outputs_of(model, DATA[0])}
    # Of channels that differ so much, 16 bits are less fine.
    assert decibels(plain, {"": after.values[last]}) > 60 > decibels(plain, {"": observer.values[last]}) > 50
    spread = [
        np.abs(observation.values["first"].reshape(-1, 8)).max(0).max()
        / np.median(np.abs(observation.values["first"]).max((0, 1, 2)))
        for observation in (observer, after)
    ]
    assert spread[1] < spread[0] / 3
    assert noise_of(ranges, model) > noise_of(candidate, model) + 10


# --- biases and batch norms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_scale", [False, True], ids=["biases", "batch norms"])
def test_means_are_corrected_on_the_device(with_scale: bool) -> None:
    model = trained()
    candidate = Candidate.of(calibrated(model, weight_bits=3))
    observer = Observer(candidate, Data(DATA, True))
    operators = {operator.outputs[0]: operator for operator in candidate.graph().operators}

    def differences(now: Candidate, layer: str) -> tuple[float, float]:
        fine, device = observer.sums(operators[layer], now.graph())
        means = np.abs(fine.mean(0) - device.mean(0)).max() / fine.std()
        return float(means), float(np.abs(np.log(fine.std(0) / device.std(0))).max())

    before = {layer: differences(candidate, layer) for layer in ("first", "second", "last")}
    changed, count = corrected(candidate, observer, with_scale)
    after = {layer: differences(changed, layer) for layer in before}
    assert count == (1 if with_scale else 3)
    for layer in ("first",) if with_scale else before:
        assert after[layer][0] < max(0.02, before[layer][0] / 4), layer
    if with_scale:
        assert after["first"][1] < 0.05 < before["first"][1]
    assert max(value for value, _ in before.values()) > 0.05


# --- rounding of weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("layer", "most"), [("first", 1), ("second", 0.85), ("last", 0.85)])
def test_learned_rounding_changes_sums_less(layer: str, most: float, per_channel: bool) -> None:
    candidate = Candidate.of(calibrated(trained(), weight_bits=3, per_channel=per_channel))
    observer = Observer(candidate, Data(DATA, True))
    operator = next(operator for operator in candidate.graph().operators if operator.outputs[0] == layer)
    places = next(places for other, places in observer.layers(candidate) if other.outputs[0] == layer)
    rows = rows_of(operator, candidate.graph())
    assert rows is not None
    changed = with_learned_rounding(observer, operator, places, rows, candidate)
    changed = corrected_layer(changed, observer, operator, places, False)
    before, after = (version.numbers().weights[layer] for version in (candidate, changed))
    assert 0 < (before.codes != after.codes).mean() < 0.9
    # Ranges may clip, never widen.
    assert np.all(after.scale <= before.scale * (1 + 1e-6)) and np.all(after.scale > before.scale / 2.1)

    def error(now: Candidate) -> float:
        fine, device = observer.sums(operator, now.graph())
        return float(np.square(fine - device).mean())

    assert error(changed) < most * error(candidate)


def test_places_are_those_of_the_weights() -> None:
    candidate = Candidate.of(calibrated(trained()))
    graph, numbers = candidate.graph(), candidate.numbers()
    places = candidate.places()
    assert {place.step.path for place in places.values()} == set(numbers.weights)
    for name, place in places.items():
        filter = graph.tensors[name].data
        assert filter is not None
        assert np.array_equal(place.of(numbers.weights[place.step.path].codes), filter)
    assert isinstance(graph, deploy.Graph)


# --- smoothing -------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A normalization that three layers read, and one that a single layer reads; some of their channels are large."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(2))
        self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))
        self.wide, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        with torch.no_grad():
            for norm in self.norms:
                norm.weight.copy_(1 + 0.1 * torch.randn(16))
                norm.weight[::5] *= 60
                norm.bias.copy_(0.1 * torch.randn(16))
            for layer in (self.query, self.key, self.value, self.wide):
                layer.weight[:, ::5] /= 60

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        weights = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2) / 4, -1)
        x = x + weights @ self.value(y)
        return self.last(torch.relu(self.wide(self.norms[1](x))).mean(1))


def block() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    torch.manual_seed(0)
    model = Block().eval()
    inputs = np.random.default_rng(0).normal(0, 1, (256, 6, 16)).astype(np.float32)
    return model, (inputs, outputs_of(model, inputs).argmax(1))


def prepared_block(model: Any, inputs: np.ndarray, **rule: Any) -> Any:
    prepared = qat.prepare(model, torch.from_numpy(inputs[:2]), [qat.Rule(**rule)])
    qat.calibrate(prepared, [torch.from_numpy(inputs)])
    return prepared


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_smoothing_changes_no_real_number(strength: float) -> None:
    model, data = block()
    prepared = prepared_block(model, data[0])
    candidate = Candidate.of(prepared)
    chains = groups(candidate)
    assert {group.first.path: [step.path for step in group.readers] for group in chains if group.scales} == {
        "norms.0": ["query", "key", "value"], "norms.1": ["wide"],
    }  # fmt: skip
    changed, factors = equalized(candidate, Observer(candidate, Data(data, True)), chains, strength)
    assert len(factors) == 2
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moved = changed.changed_from(candidate)
    assert set(moved) == {
        "norms.0.weight", "norms.0.bias", "norms.1.weight", "norms.1.bias", "query.weight", "key.weight",
        "value.weight", "wide.weight",
    }  # fmt: skip
    # The user's own model with these weights: the same real numbers, as all factors are powers of two.
    plain = outputs_of(model, data[0])
    for name, value in moved.items():
        model.get_parameter(name).data.copy_(torch.from_numpy(value))
        ratio = np.log2(value / before[name].numpy())
        assert np.array_equal(ratio, np.rint(ratio)) and np.abs(ratio).max() >= 1, name
    assert np.array_equal(outputs_of(model, data[0]), plain)
    with torch.no_grad():
        y = model.norms[1](torch.from_numpy(data[0]))
    reach = y.abs().amax((0, 1)).numpy()
    # Without the large channels there is more left for the others; of full strength, nothing differs by two.
    assert reach.max() / np.median(reach) < (12 if strength == 0.5 else 2.5)


@pytest.mark.slow
def test_smoothing_is_tried_and_kept_where_it_helps() -> None:
    model, data = block()
    prepared = prepared_block(model, data[0])
    search = tune.search(prepared, data, budget=200)
    trial = next(trial for trial in search.trials if trial.name == "smoothing")
    assert trial.kept and "2 layers" in trial.what and "smoothing" in search.text()
    names = [trial.name for trial in search.trials]
    assert names.index("ranges") < names.index("smoothing") < names.index("rounding of weights")
    assert names.index("rounding of weights") < names.index("ranges of each layer")
    before = next(trial for trial in reversed(search.trials[: names.index("smoothing")]) if trial.kept)
    assert trial.held_out.decibels > before.held_out.decibels + 6
    search.apply(prepared)
    qat.freeze(prepared)
    same_graph(deploy.lower(prepared), search.graph)


class Refusing(Executor):
    """Runs here, counts what is sent, and breaks after some tasks."""

    def __init__(self, breaks_after: int) -> None:
        self.left, self.sent, self._max_workers = breaks_after, 0, 2

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
        future: Future[Any] = Future()
        self.left -= 1
        if self.left < 0:
            raise BrokenExecutor("a worker was killed")
        self.sent += any(isinstance(argument, Task) for argument in arguments)
        future.set_result(function(*arguments, **named))
        return future


@pytest.mark.parametrize("breaks_after", [10**6, 3, 0])
def test_a_lost_worker_costs_no_search(breaks_after: int) -> None:
    prepared = calibrated(trained())
    alone = tune.search(prepared, DATA, budget=30)
    executor = Refusing(breaks_after)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        search = tune.search(prepared, DATA, budget=30, executor=executor)
    assert search.trials == alone.trials and search.evaluations == alone.evaluations
    lost = [warning for warning in said if "the executor is gone (a worker was killed)" in str(warning.message)]
    assert bool(lost) == (breaks_after < 10**6)
    assert executor.sent <= 2 * len(search.trials)  # to each worker, once for each method
