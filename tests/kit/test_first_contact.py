# SPDX-License-Identifier: Apache-2.0
"""What a newcomer does first, and does wrong: a loader of pairs just works, and everything else gets a sentence."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exactqat as eq

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from exactqat import deploy, qat  # noqa: E402
from exactqat.qat.capture.core import progress  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)


class Net(nn.Module):
    """A forward written as a function of the module and its arguments."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5)
    )


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The network as it is, prepared, calibrated and frozen; to be copied."""
    stages: dict[str, Any] = {"float": network(), "prepared": qat.prepare(network(), IMAGES)}
    stages["calibrated"] = copy.deepcopy(stages["prepared"])
    qat.calibrate(stages["calibrated"], [IMAGES])
    stages["frozen"] = copy.deepcopy(stages["calibrated"]).eval()
    qat.freeze(stages["frozen"])
    stages["graph"] = deploy.lower(stages["frozen"])
    return stages


def layer(model: Any) -> Any:
    return model.get_submodule("0")


def wrapped(model: Any) -> Any:
    return nn.Sequential(copy.deepcopy(model))


# By the model that is copied for it: what is done, words of the message in order, and the exception if no TypeError.
Row = tuple[str, Callable[[Any], Any], str] | tuple[str, Callable[[Any], Any], str, type[Exception]]
MISTAKES: dict[str, list[Row]] = {
    "float": [
        ("calibrate a float model", lambda m: qat.calibrate(m, [IMAGES]), "Sequential.*not prepared.*qat.prepare"),
        ("freeze a float model", lambda m: qat.freeze(m), "Sequential.*not prepared.*qat.prepare"),
        ("lower a float model", deploy.lower, "qat.prepare.*Sequential"),
        ("prepare a function", lambda m: qat.prepare(lambda x: x, IMAGES), "torch.nn.Module.*function.*qat.jax"),
        ("prepare a class", lambda m: qat.prepare(nn.Linear, IMAGES), "the class Linear: give an instance"),
        ("prepare swapped", lambda m: qat.prepare(IMAGES, m), "torch.nn.Module, got Tensor"),
        (
            "prepare with a shape",
            lambda m: qat.prepare(m, (1, 3, 8, 8)),
            r"example .*got tuple.*torch.zeros\(shape\)",
            ValueError,
        ),
        (
            "prepare with an array",
            lambda m: qat.prepare(m, IMAGES.numpy()),
            "example .*got ndarray.*from_numpy",
            ValueError,
        ),
        (
            "prepare with a loader",
            lambda m: qat.prepare(m, DataLoader([1])),
            r"example .*got DataLoader.*next\(iter\(loader\)\)",
            ValueError,
        ),
        (
            "prepare with targets",
            lambda m: qat.prepare(m, (IMAGES, LABELS)),
            r"takes \(input\), got 2.*without targets",
            qat.UnsupportedOperator,
        ),
        ("a rule's class", lambda m: qat.prepare(m, IMAGES, qat.Rule), "list of Rule.*the class Rule"),
        ("a list of the class", lambda m: qat.prepare(m, IMAGES, [qat.Rule]), r"rules\[0\].*write Rule\(\)"),
        ("a dictionary of rules", lambda m: qat.prepare(m, IMAGES, {"match": "*"}), "list of Rule.*got dict"),
        (
            "dictionaries as rules",
            lambda m: qat.prepare(m, IMAGES, [{"match": "*"}]),
            r"rules\[0\] must be a Rule, got dict.*Rule\(\*\*settings\)",
        ),
        ("a word as rules", lambda m: qat.prepare(m, IMAGES, "*"), "list of Rule.*got str"),
        (
            "rules that were read before",
            lambda m: qat.prepare(m, IMAGES, iter([])),
            "rules is empty.*generator",
            ValueError,
        ),
    ],
    "calibrated": [
        ("freeze what holds one", lambda m: qat.freeze(wrapped(m)), "Sequential.*within it, model.0"),
        ("lower before freeze", deploy.lower, "frozen before.*qat.freeze", ValueError),
        (
            "prune a prepared layer",
            lambda m: prune.l1_unstructured(layer(m), "weight", 0.5),
            "'weight'.*weight_orig.*prepare it again",
        ),
        ("weight norm", lambda m: parametrizations.weight_norm(layer(m)), "'weight'.*prepare it again"),
        ("spectral norm", lambda m: parametrizations.spectral_norm(layer(m)), "'weight'.*prepare it again"),
        ("the old spectral norm", lambda m: nn.utils.spectral_norm(layer(m)), "'weight'.*prepare it again"),
        ("another layer in its place", lambda m: setattr(m, "4", nn.Linear(256, 7)), "'4'.*replaced.*prepare it again"),
        ("a layer taken away", lambda m: delattr(m, "4"), "'4'.*taken away.*prepare it again"),
        (
            "another shape of weight",
            lambda m: setattr(layer(m), "weight", nn.Parameter(torch.zeros(1))),
            r"'weight'.*\[4, 3, 3, 3\] in float32, got shape \[1\]",
        ),
        ("no bias any more", lambda m: setattr(layer(m), "bias", None), "'bias'.*got NoneType"),
        ("half", lambda m: m.half(), "float32, not in float16.*autocast"),
        ("double", lambda m: nn.Sequential(m).double(), "float32, not in float64"),
        ("trace", lambda m: torch.jit.trace(m.eval(), IMAGES), "traced by torch.jit.*deploy.lower"),
        ("script", lambda m: torch.jit.script(m), "scripted by torch.jit.*deploy.lower"),
        ("vmap", lambda m: torch.func.vmap(lambda x: m.eval()(x[None])[0])(IMAGES), "vmap.*whole batches.*jacrev"),
        ("too many arguments", lambda m: m(IMAGES, LABELS), r"takes \(input\), got 2 arguments by position"),
    ],
    "prepared": [
        ("calibrate with a number", lambda m: qat.calibrate(m, 3), "batches.*iterable.*loader.*int"),
        ("calibrate with one batch", lambda m: qat.calibrate(m, IMAGES), r"array of shape.*give \[it\]"),
        ("calibrate with a dictionary", lambda m: qat.calibrate(m, {"input": IMAGES}), r"got dict; give \[it\]"),
        ("calibrate with nothing", lambda m: qat.calibrate(m, iter([])), "batches is empty", ValueError),
        (
            "calibrate with arrays",
            lambda m: qat.calibrate(m, [IMAGES.numpy()]),
            "'input'.*torch.Tensor.*numpy.ndarray.*from_numpy",
        ),
        (
            "calibrate by unknown names",
            lambda m: qat.calibrate(m, [{"image": IMAGES}]),
            r"takes \(input\).*image.*for x, _ in loader",
        ),
        (
            "evaluate without data",
            lambda m: m.eval()(IMAGES),
            "the range of 'input' has seen no data.*calibrate",
            RuntimeError,
        ),
        (
            "freeze without data",
            lambda m: qat.freeze(m),
            r"3 ranges have seen no data \('input', '0', '4'\).*calibrate",
            RuntimeError,
        ),
        ("lower without data", lambda m: m.numbers(), "range of 'input' has seen no data", RuntimeError),
        ("prepare a prepared model", lambda m: qat.prepare(m, IMAGES), "prepared already", ValueError),
    ],
    "frozen": [
        ("calibrate after freeze", lambda m: qat.calibrate(m, [IMAGES]), "calibrate before freeze", ValueError),
        ("simulate a model", lambda m: deploy.simulate(m, IMAGES.numpy()), "Graph.*lower.*PreparedModel"),
        ("write a model", lambda m: deploy.write_tflite(m, "network.tflite"), "Graph.*lower.*PreparedModel"),
        ("the footprint of a model", deploy.footprint, "Graph.*lower.*PreparedModel"),
        (
            "prune a frozen layer",
            lambda m: prune.random_unstructured(layer(m), "bias", 0.5),
            "'bias'.*bias_orig.*prepare it again",
        ),
        ("bfloat16", lambda m: m.to(torch.bfloat16), "float32, not in bfloat16.*autocast"),
        ("trace frozen", lambda m: torch.jit.trace(m, IMAGES), "traced by torch.jit.*deploy.lower"),
        ("symbolic trace", lambda m: torch.fx.symbolic_trace(m), "traced by torch.fx.*deploy.lower"),
        ("export frozen", lambda m: torch.export.export(m, (IMAGES,)), "frozen model.*exported.*deploy.lower"),
        ("jacfwd frozen", lambda m: torch.func.jacfwd(m)(IMAGES[:1]), "jacfwd.*jacrev"),
        ("no argument", lambda m: m(), r"'input'.*takes \(input\), got 0 arguments"),
        ("an argument of another name", lambda m: m(image=IMAGES), r"takes \(input\), got by name image"),
        ("an array", lambda m: m(IMAGES.numpy()), "'input'.*torch.Tensor, got numpy.ndarray; torch.from_numpy"),
    ],
    "graph": [
        ("lower a graph", deploy.lower, "qat.prepare.*Graph"),
        ("simulate swapped", lambda g: deploy.simulate(IMAGES.numpy(), g), "Graph.*lower.*ndarray"),
        ("simulate tensors", lambda g: deploy.simulate(g, IMAGES), "NumPy array of codes.*Tensor.*quantize"),
        ("simulate real numbers", lambda g: deploy.simulate(g, IMAGES.numpy()), "int8 codes.*float32.*quantize"),
        ("write swapped", lambda g: deploy.write_tflite("network.tflite", g), "Graph.*lower.*str"),
        ("write ONNX swapped", lambda g: deploy.write_onnx("network.onnx", g), "Graph.*lower.*str"),
        (
            "quantize swapped",
            lambda g: deploy.quantize(g.tensors["input"].quantization, IMAGES.numpy()),
            "Quantization.*tensors.*ndarray",
        ),
        (
            "quantize by a tensor",
            lambda g: deploy.quantize(IMAGES.numpy(), g.tensors["input"]),
            r"Quantization.*tensors\['input'\].quantization.*Tensor",
        ),
        (
            "quantize a word",
            lambda g: deploy.quantize("photo.png", g.tensors["input"].quantization),
            "array of real numbers.*str",
        ),
        (
            "dequantize by a tensor",
            lambda g: deploy.dequantize(np.zeros(3), g.tensors["input"]),
            "must be a Quantization.*Tensor",
        ),
    ],
}


ROWS = [(which, *row[1:3], row[3] if len(row) > 3 else TypeError) for which, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize(
    ("which", "act", "words", "error"), ROWS, ids=[row[0] for rows in MISTAKES.values() for row in rows]
)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_gets_a_sentence(models: Any, which: str, act: Any, words: str, error: type[Exception]) -> None:
    model = models[which] if which == "graph" else copy.deepcopy(models[which])
    with pytest.raises(error, match=re.compile(words, re.S)) as caught:
        act(model)
    assert type(caught.value) not in (AttributeError, KeyError, AssertionError, IndexError)
    if which in ("calibrated", "frozen"):  # and has changed nothing
        assert torch.equal(model.eval()(IMAGES), copy.deepcopy(models[which]).eval()(IMAGES))


@pytest.mark.filterwarnings("ignore")
def test_the_old_weight_norm_gets_a_sentence_too(models: Any) -> None:
    """It takes the weight away before it asks."""
    model = copy.deepcopy(models["calibrated"])
    with pytest.raises(TypeError, match="'weight'.*cannot be computed from 'weight_g'"):
        nn.utils.weight_norm(layer(model))
    with pytest.raises(RuntimeError, match="'weight'.*taken away"):
        model(IMAGES)


def test_what_is_allowed_of_a_prepared_model(models: Any) -> None:
    model = copy.deepcopy(models["frozen"])
    wanted = model(IMAGES)
    layer(model).weight = nn.Parameter(torch.zeros_like(layer(model).weight))
    assert not torch.equal(model(IMAGES), wanted)
    layer(model).weight = nn.Parameter(models["frozen"].get_submodule("0").weight.detach().clone())
    model.remark = nn.Identity()
    model.float().to("cpu").requires_grad_(False).share_memory()
    assert torch.equal(model(IMAGES), wanted)


@pytest.mark.parametrize("which", ["calibrated", "frozen"])
@pytest.mark.filterwarnings("ignore")
def test_copies_compute_the_same(models: Any, which: str) -> None:
    model = models[which].eval()
    wanted, file = model(IMAGES), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(other(IMAGES), wanted)
        with pytest.raises(TypeError, match="replaced"):
            setattr(other, "4", nn.Identity())


@pytest.mark.parametrize("which", ["calibrated", "frozen"])
def test_functions_of_torch_func(models: Any, which: str) -> None:
    model = copy.deepcopy(models[which]).eval()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert torch.equal(torch.func.functional_call(model, parameters, (IMAGES,)), model(IMAGES))
    doubled = {name: parameter * 2 for name, parameter in parameters.items()}
    assert not torch.equal(torch.func.functional_call(model, doubled, (IMAGES,)), model(IMAGES))
    wanted = torch.autograd.grad(model(IMAGES).sum(), list(parameters.values()))
    gradients = torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (IMAGES,)).sum())(parameters)
    for gradient, name in zip(wanted, parameters, strict=True):
        torch.testing.assert_close(gradients[name], gradient)
    x = IMAGES[:1].clone().requires_grad_()
    rows = torch.stack([torch.autograd.grad(model(x)[0, k], x)[0][0] for k in range(5)])
    torch.testing.assert_close(torch.func.jacrev(model)(x.detach())[0, :, 0], rows)


def test_prepare_inside_of_autocast(models: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model = qat.prepare(network(), IMAGES)
        model(IMAGES)
        model(IMAGES).sum().backward()
    qat.calibrate(model, [IMAGES], restart=True)
    wanted = models["calibrated"].state_dict()
    for name, value in model.state_dict().items():
        if name.endswith("minimum") and "input" in name:
            assert torch.equal(value, wanted[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_done_before_prepare_is_kept() -> None:
    """The self-check compares with the user's own model; the weights that are trained stay masked, and normed."""
    for change in (
        lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
        lambda m: parametrizations.weight_norm(m[4]),
        lambda m: nn.utils.weight_norm(m[4]),
    ):
        model = network()
        change(model)
        prepared = qat.prepare(model, IMAGES)
        model.eval(), prepared.eval()
        if not prepared._batches_seen()["4"]:
            qat.calibrate(prepared, [IMAGES])
        got = torch.from_numpy(prepared.trained().layer_values(IMAGES)[0]["4"])
        torch.testing.assert_close(got, model(IMAGES).detach(), rtol=1e-4, atol=1e-5)


# --- loaders of pairs -------------------------------------------------------------------------------------------------


def ranges(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if ".range." in name}


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: (x, y, torch.ones(2)),
        lambda x, y: (x, ["a", "b"]),
    ],
    ids=["pair", "list", "with weights", "words"],
)
def test_a_loader_of_pairs_calibrates(models: Any, form: Any) -> None:
    plain, pairs = (copy.deepcopy(models["prepared"]) for _ in range(2))
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=2)
    qat.calibrate(plain, [x for x, _ in loader])
    qat.calibrate(pairs, (form(x, y) for x, y in loader))
    for name, value in ranges(plain).items():
        assert torch.equal(value, ranges(pairs)[name])
    qat.calibrate(copy.deepcopy(models["prepared"]), loader)


def test_a_pair_is_refused_where_it_could_be_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any, mask: Any = None, scaled: bool = False) -> Any:
            y = self.layer(x)
            return y if mask is None else y * mask

    x, y = torch.rand(4, 4), torch.rand(4, 4)
    alone = qat.prepare(Two(), x)
    with pytest.raises(TypeError, match="'mask'|mask") as caught:
        qat.calibrate(alone, [(x, y)])
    assert "((a, b) for a, b, *_ in loader)" in str(caught.value)
    both = qat.prepare(Two(), (x, y))
    qat.calibrate(both, [(x, y)])
    with pytest.raises(TypeError, match=r"for a, b, \*_ in loader"):
        qat.calibrate(both, [(x, y, LABELS, LABELS)])

    class Setting(Two):
        def forward(self, x: Any, scaled: bool = False) -> Any:
            return self.layer(x)

    qat.calibrate(qat.prepare(Setting(), x), [(x, y)])  # a flag takes no tensor


def test_one_rule_is_a_list_of_one() -> None:
    rule = qat.Rule(weight_bits=4)
    one, several = (qat.prepare(network(), IMAGES, rules, check=False) for rules in (rule, [rule]))
    assert one.plan.grids == several.plan.grids and "W4A8" in repr(one)


def test_ranges_keep_their_names_in_messages(models: Any) -> None:
    model = copy.deepcopy(models["calibrated"])
    model.get_submodule("quantization.0.output_quantizer.range").batches.zero_()
    for act in (lambda: model.eval()(IMAGES), lambda: qat.freeze(model), lambda: model.numbers()):
        with pytest.raises(RuntimeError, match="the range of '0' has seen no data"):
            act()


# --- JAX and Keras ----------------------------------------------------------------------------------------------------


def test_jax_answers_alike(models: Any) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    x, y = np.random.default_rng(0).random((4, 3), np.float32), np.zeros(4)
    rule = qat.Rule(weight_bits=4)
    prepared = qat.jax.prepare(lambda p, x: jnp.tanh(x @ p["w"]), {"w": jnp.ones((3, 2))}, x, rule)
    params, state = prepared.init()
    with pytest.raises(RuntimeError, match=r"ranges have seen no data \('input'.*calibrate"):
        prepared.freeze(params, state)
    pairs, plain = (prepared.calibrate(params, state, [batch])[1] for batch in ((x, y), x))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), pairs.ranges, plain.ranges))
    prepared.freeze(params, pairs)
    for batches, words in ((3, "iterable"), (x, "give .it"), ([{"image": x}], "for x, _ in loader")):
        with pytest.raises(TypeError, match=words):
            prepared.calibrate(params, state, batches)
    for act, words in (
        (lambda: qat.calibrate(prepared, [x]), "got Prepared.*its methods"),
        (lambda: qat.freeze(prepared), "got Prepared.*its methods"),
        (lambda: qat.freeze(state), "got State.*its methods"),
        (lambda: deploy.lower(prepared), r"lower\(params, state\)"),
        (lambda: qat.jax.prepare(models["float"], params, x), "Sequential; models of PyTorch are for exactqat.qat"),
        (lambda: qat.jax.prepare(lambda p, x: x, {"w": x}, x, "*"), "list of Rule.*str"),
    ):
        with pytest.raises(TypeError, match=re.compile(words, re.S)):
            act()


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs exactqat[keras]")
def test_keras_answers_alike() -> None:
    done = run(
        """
        import keras, numpy as np, pytest, torch
        from exactqat import deploy, qat

        x, y = np.random.default_rng(0).random((4, 3)).astype("float32"), np.zeros(4)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        rule = qat.Rule(weight_bits=4)
        made = [qat.keras.prepare(model, rules=rules) for rules in (rule, [rule], rule)]
        with pytest.raises(RuntimeError, match="ranges have seen no data .'input'"):
            qat.keras.freeze(made[0])
        for each, batch in zip(made, ((x, y), [x, y], x)):
            qat.keras.calibrate(each, [batch])
        first, *others = [[value.tolist() for value in each.get_weights()] for each in made]
        assert all(each == first for each in others)
        qat.keras.freeze(made[0])
        for act, words in (
            (lambda: qat.keras.calibrate(model, [x]), "Sequential; prepare it first"),
            (lambda: qat.keras.freeze(model), "Sequential; prepare it first"),
            (lambda: qat.keras.prepare(torch.nn.Linear(1, 1)), "models of PyTorch are for exactqat.qat"),
            (lambda: qat.keras.prepare(model, rules="*"), "list of Rule"),
            (lambda: qat.keras.prepare(model, [rule]), "give rules by their name"),
            (lambda: qat.keras.calibrate(made[1], 3), "iterable"),
            (lambda: qat.keras.calibrate(made[1], x), "give .it"),
            (lambda: qat.torch.prepare(model, torch.zeros(1, 3)), "models of Keras are for exactqat.qat.keras"),
            (lambda: qat.torch.freeze(made[1]), "models of Keras are for exactqat.qat.keras"),
        ):
            with pytest.raises(TypeError, match=words):
                act()
        """,
        KERAS_BACKEND="jax" if importlib.util.find_spec("jax") else "torch",
    )
    assert done.returncode == 0, done.stderr[-3000:]


# --- installation -----------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize("name", ["torch", "PreparedModel", "distributed"])
def test_without_pytorch_there_is_a_hint(name: str) -> None:
    done = run(WITHOUT.format(missing=["torch"]) + f"from exactqat.qat import {name}")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"exactqat.qat.{name} needs PyTorch: pip install 'exactqat[torch]'" in last and "exactqat.qat.jax" in last


@pytest.mark.parametrize("program", ["from exactqat.qat import jax; jax.prepare", "import exactqat.qat.jax"])
def test_without_jax_there_is_a_hint(program: str) -> None:
    done = run(WITHOUT.format(missing=["jax"]) + program)
    assert done.returncode != 0
    assert "JAX is needed here: pip install 'exactqat[jax]'" in done.stderr.strip().splitlines()[-1]


def test_without_its_backend_keras_names_the_variable() -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("needs exactqat[keras]")
    done = run(WITHOUT.format(missing=["tensorflow"]) + "import exactqat.qat.keras", KERAS_BACKEND="tensorflow")
    assert "KERAS_BACKEND=jax" in done.stderr.strip().splitlines()[-1]
    done = run(WITHOUT.format(missing=["keras"]) + "import exactqat.qat.keras")
    assert "pip install 'exactqat[keras]'" in done.stderr.strip().splitlines()[-1]


def test_extras_are_quoted_wherever_they_are_installed() -> None:
    """zsh takes brackets that are not for a pattern."""
    problems = []
    places = (("*.md", ROOT.glob), ("*.md", (ROOT / "docs").rglob), ("*.ipynb", (ROOT / "docs").rglob))
    paths = [path for pattern, find in places for path in find(pattern)]
    for path in [*paths, *(ROOT / "src").rglob("*.py")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"pip install [^'\"#]*?(exactqat|\.)\[", line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not problems, "\n".join(problems)
    assert "KERAS_BACKEND" in (ROOT / "docs" / "keras-kit.md").read_text(encoding="utf-8")


# --- forks ------------------------------------------------------------------------------------------------------------


def test_operators_alone_load_no_framework() -> None:
    done = run("""
        import sys, exactqat
        assert not {"torch", "jax", "tensorflow", "keras"} & set(sys.modules)
        import torch
        assert "exactqat.operators.torch" not in sys.modules
        """)
    assert done.returncode == 0, done.stderr
    done = run("""
        import sys, torch, exactqat
        assert "exactqat.operators.torch" in sys.modules
        """)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("first", ["exactqat", "torch"])
def test_a_fork_while_another_thread_loads_what_pytorch_needs(first: str) -> None:
    second = {"exactqat": "torch", "torch": "exactqat"}[first]
    done = run(f"""
        import os, signal, threading, time
        import {first}
        import {second}
        import exactqat as eq, torch

        began, make = threading.Event(), torch.library.Library

        def slowly(*args, **kwargs):
            began.set()
            time.sleep(1)
            return make(*args, **kwargs)

        def call():
            assert eq.quantization.fake_quant_with_min_max_args(torch.tensor([0.3])).shape == (1,)
            began.set()

        torch.library.Library = slowly  # the first thing that is made for PyTorch
        thread = threading.Thread(target=call)
        thread.start()
        assert began.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            call()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        thread.join()
        """)
    assert done.returncode == 0, done.stderr


# --- operators --------------------------------------------------------------------------------------------------------


def test_out_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.tensor([0.3, 1.2])
    with FakeTensorMode():
        fake, target = torch.ones(2), torch.empty(2)
    with FakeTensorMode():
        other = torch.empty(2)
    operator: Any = eq.quantization.fake_quant_with_min_max_args
    assert operator(fake, out=target) is target
    for operand, out in ((x, target), (fake, torch.empty(2)), (fake, other)):
        with pytest.raises(TypeError, match="out for outputs must be a tensor like the operands"):
            operator(operand, out=out)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, example: Any = IMAGES) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(qat.UnsupportedOperator) as caught:
            qat.prepare(model, example)
    return str(caught.value).split("Supported:")[0]


def conv() -> dict[str, nn.Module]:
    return {"conv": nn.Conv2d(3, 4, 3, padding=1)}


@pytest.mark.slow
def test_a_refusal_lists_causes_and_no_echoes() -> None:
    def suppressed(self: Any, x: Any) -> Any:
        y = self.conv(x)

        def pooled(t: Any) -> Any:
            return nn.functional.max_pool2d(t, 3, 1, 1)

        kept = y == pooled(y)
        weaker = pooled(kept.float()) > 0
        kept = kept | ~weaker
        return torch.where(kept, y, torch.zeros_like(y))

    text = refusal(Net(suppressed, **conv()))
    assert "torch.eq" in text and "torch.gt" in text
    assert not [word for word in ("torch.where", "bitwise_not", "__or__", "Tensor.to") if word in text], text
    assert "2 place(s)" in text

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids: Any) -> Any:
            return self.layer(self.table(input_ids[:, 1:])).mean(1)

    text = refusal(Embedded(), torch.zeros(2, 5, dtype=torch.int64))
    assert "by numbers that the network computes" in text and "an input of integers" in text and "1 place(s)" in text

    text = refusal(Net(lambda self, x: self.conv(x).sort(1)[0].cumprod(1), **conv()))
    assert "torch.sort" in text and "torch.cumprod" in text  # each an obstacle of its own


def test_attention_without_dropout_draws_nothing() -> None:
    torch.manual_seed(0)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, stride=4)
            self.queries = nn.Parameter(torch.randn(5, 16))
            self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: Any) -> Any:
            memory = self.patches(x).flatten(2).transpose(1, 2)
            return self.decoder(self.queries.expand(x.shape[0], -1, -1), memory)

    model = Decoder()
    prepared = qat.prepare(model, IMAGES)
    qat.calibrate(prepared, [IMAGES])
    *_, result = prepared.trained().layer_values(IMAGES)[0].values()
    torch.testing.assert_close(torch.from_numpy(result), model.eval()(IMAGES).detach(), rtol=1e-3, atol=1e-4)


def test_eval_is_suggested_where_only_training_is_in_the_way() -> None:
    def layerdrop(self: Any, x: Any) -> Any:
        for part in self.parts:
            if not (self.training and torch.rand([]) < 0.1):
                x = torch.relu(part(x))
        return x

    model = Net(layerdrop, parts=nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]))
    text = refusal(model, torch.rand(2, 4))
    assert "depends on the values" in text and "call model.eval() before prepare" in text
    prepared = qat.prepare(model.eval(), torch.rand(2, 4))
    assert prepared.plan.steps

    broken = Net(lambda self, x: self.layer(x) if x.sum() > 0 else x, layer=nn.Linear(4, 4))
    assert "If only training does this, call model.eval()" in refusal(broken, torch.rand(2, 4))
    assert "model.eval()" not in refusal(broken.eval(), torch.rand(2, 4))


def test_a_quote_that_is_cut_says_so(tmp_path: Path) -> None:
    condition = "if bool((x.sum() > 0) " + " ".join(f"and (x.sum() > -{n})" for n in range(1, 9)) + "): x = -x"
    (tmp_path / "long_line.py").write_text(
        "from torch import nn\nclass Long(nn.Module):\n    def forward(self, x):\n"
        f"        {condition}\n        return x\n"
    )
    specification = importlib.util.spec_from_file_location("long_line", tmp_path / "long_line.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    text = refusal(module.Long())
    assert condition[:99] + "…: " in text and condition[:101] not in text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["iteration", "index", "split"])
def test_a_loop_over_the_examples_is_refused_at_once(way: str) -> None:
    seen = []

    def forward(self: Any, x: Any) -> Any:
        y = self.conv(x)
        rows: Any = {
            "iteration": lambda: y,
            "index": lambda: (y[k] for k in range(len(y))),
            "split": lambda: y.split(1),
        }
        results = []
        for row in rows[way]():
            seen.append(row.shape)
            results.append(torch.relu(row * 2))
        return torch.stack(results)

    text = refusal(Net(forward, **conv()))
    assert "go through the examples one by one" in text and "test_first_contact.py" in text
    assert len(seen) < 200


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "AFTER", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.2)
    yield


def slow() -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        time.sleep(0.5)
        return self.conv(x)

    return Net(forward, **conv())


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_long_says_so_on_a_terminal(
    impatient: None, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    root, handlers = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        for handler in handlers:  # pytest's own
            root.removeHandler(handler)
        qat.prepare(slow(), IMAGES, check=False)
    finally:
        for handler in handlers:
            root.addHandler(handler)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("exactqat: ")]
    assert bool(lines) == terminal
    assert not lines or re.match(r"exactqat: prepare reads the model: \d+ s so far", lines[0])


@pytest.mark.slow
def test_logging_gets_it_where_there_is_some(
    impatient: None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="exactqat"):
        qat.prepare(slow(), IMAGES, check=False)
    assert any("prepare reads the model" in record.message for record in caplog.records)
    assert "exactqat: prepare" not in capfd.readouterr().err
