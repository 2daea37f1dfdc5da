# SPDX-License-Identifier: Apache-2.0
"""Small networks and the made-up data that they are trained on: both sides of the comparison build them from here.

It needs PyTorch, scikit-learn and Pillow, and nothing of exactqat. None of it is a benchmark of the field: digits are
scikit-learn's, scaled and shifted; keywords are tones in noise; glyphs are letters in fonts of Matplotlib, distorted;
shapes are drawn.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Parts = list[tuple[Any, np.ndarray]]
# Examples to train on, to decide by, and to judge by.
SIZES = (1500, 400, 1000)
# Of every quantization-aware training, whoever's; the examples that calibrate; the rates that each tool tries at eight
# bits and with fewer.
QAT_EPOCHS = 6
CALIBRATION = 256
FINE_RATES, COARSE_RATES = (5e-4, 2e-3), (2e-3, 8e-3)


@dataclass(frozen=True)
class Task:
    """What a network is trained for.

    Attributes:
        title: what it is, honestly.
        data: of a seed: inputs [n, channels, height, width], or a tuple of arrays, and targets, `SIZES` of each.
        network: of a seed, untrained.
        loss: of outputs and targets, tensors.
        metric: of outputs and targets, arrays; the higher the better, and a mean over examples.
        epochs: of float training; 0 where a network comes with its weights.
        qat_epochs: of quantization-aware training; 0: too few examples for it.
        rates: of quantization-aware training, the same for all bits; None: `qat_rates` has them.
        calibration: how many examples calibrate.
        augmented: what becomes of a batch in training.
        trained_by_seed: whether a seed gives a float network of its own, or the order of examples in
            quantization-aware training alone.
        followed: whether running statistics follow the training examples. They stay where the float network, which is
            what is wanted there, was trained on others.
        resettled: of how many batches batch norms take their statistics again after training, as one more method of
            each tool; 0: of none.
        taught: whether networks with fewer than 8 bits also learn from `teacher`, at the best of the rates, as one more
            method of each tool.
    """

    title: str
    data: Callable[[int], list[tuple[Any, np.ndarray]]]
    network: Callable[[], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    metric: Callable[[np.ndarray, np.ndarray], float]
    epochs: int = 12
    qat_epochs: int = QAT_EPOCHS
    rates: tuple[float, ...] | None = None
    calibration: int = CALIBRATION
    augmented: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    trained_by_seed: bool = True
    followed: bool = True
    resettled: int = 0
    taught: bool = False


def accuracy(outputs: np.ndarray, targets: np.ndarray) -> float:
    return float((outputs.argmax(1) == targets).mean())


# --- data -------------------------------------------------------------------------------------------------------------


def _parts(images: np.ndarray, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    ends = np.cumsum((0, *SIZES))
    return [
        (np.ascontiguousarray(images[low:high], np.float32), targets[low:high])
        for low, high in zip(ends[:-1], ends[1:], strict=True)
    ]


def digits(size: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's, scaled to `size` pixels, shifted and noisy; those to judge by are of other writers' images than
    those to train on."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    rng = np.random.default_rng(seed)
    order, pictures, classes = rng.permutation(len(dataset.images)), [], []
    shares = np.cumsum((0, 900, 300, len(order) - 1200))
    for count, low, high in zip(SIZES, shares[:-1], shares[1:], strict=True):
        for number in rng.choice(order[low:high], count):
            image = np.kron(dataset.images[number] / 16, np.ones((size // 8, size // 8)))
            image = np.roll(image, rng.integers(-(size // 8), size // 8 + 1, 2), (0, 1))
            pictures.append(image + rng.normal(0, 0.15, image.shape))
            classes.append(dataset.target[number])
    return _parts(np.stack(pictures)[:, None], np.asarray(classes))


def keywords(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Eight words, each of three tones that rise, fall or stay, as energies of 16 bands over 24 moments, in noise."""
    rng, words = np.random.default_rng(seed), np.random.default_rng(7)
    tones = words.uniform(2, 13, (8, 3, 2))
    classes = rng.integers(0, 8, sum(SIZES))
    bands, moments = np.arange(16)[:, None], np.linspace(0, 1, 24)[None]
    spectrograms = []
    for word in classes:
        start, energy = rng.normal(0, 0.12), 0.0
        for low, high in tones[word]:
            place = low + (high - low) * np.clip(moments + start, 0, 1) + rng.normal(0, 0.5)
            energy = energy + rng.uniform(0.5, 1.2) * np.exp(-((bands - place) ** 2))
        spectrograms.append(np.log1p(np.square(energy + np.abs(rng.normal(0, 0.7, (16, 24))))))
    return _parts(np.stack(spectrograms)[:, None], classes)


def glyphs(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ten letters of 16 pixels in eight fonts, turned, moved, bright on dark or dark on bright, in noise."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng(seed)
    folder = f"{get_data_path()}/fonts/ttf"
    names = ("Sans", "Sans-Bold", "Sans-Oblique", "SansMono", "SansMono-Bold", "Serif", "Serif-Bold", "Serif-Italic")
    fonts = [ImageFont.truetype(f"{folder}/DejaVu{name}.ttf", size) for name in names for size in (11, 13)]
    classes = rng.integers(0, 10, sum(SIZES))
    pictures = []
    for letter in classes:
        picture = Image.new("L", (16, 16))
        font = fonts[rng.integers(len(fonts))]
        place = tuple(8 + rng.normal(0, 0.8, 2))
        ImageDraw.Draw(picture).text(place, "AEGKMQRSWZ"[letter], 255, font, anchor="mm")
        image = np.asarray(picture.rotate(rng.normal(0, 10), Image.Resampling.BILINEAR)) / 255
        image = image if rng.random() < 0.5 else 1 - image
        pictures.append(image * rng.uniform(0.5, 1) + rng.normal(0, 0.12, image.shape))
    return _parts(np.stack(pictures)[:, None], classes)


def shapes(seed: int, masks: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """A disc, a square or a cross of 5 to 9 pixels in an image of 24, in noise; with its mask [24, 24] of classes (0:
    background), or its class and box [5]: class, middle's row and column, height and width, in images."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:24, :24]
    pictures, targets = [], []
    for _ in range(sum(SIZES)):
        kind, size = int(rng.integers(3)), rng.uniform(5, 9)
        row, column = rng.uniform(size / 2, 24 - size / 2, 2)
        down, right = np.abs(rows + 0.5 - row), np.abs(columns + 0.5 - column)
        square = np.maximum(down, right) <= size / 2
        inside = [down**2 + right**2 <= size**2 / 4, square, square & (np.minimum(down, right) <= size / 6)][kind]
        pictures.append(inside * rng.uniform(0.6, 1.2) + rng.normal(0, 0.25, inside.shape))
        box = np.asarray([kind, row / 24, column / 24, size / 24, size / 24], np.float32)
        targets.append(inside * (kind + 1) if masks else box)
    return _parts(np.stack(pictures)[:, None], np.stack(targets))


# --- networks ---------------------------------------------------------------------------------------------------------


def convolutional(channels: Sequence[int], classes: int, pooled: int = 2) -> nn.Module:
    """3x3 convolutions with batch norm, a stride of 2 from the second one on, and a layer of scores."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv2d(before, after, 3, 1 if number == 0 else 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(pooled), nn.Flatten(), nn.LazyLinear(classes))


def separable(classes: int) -> nn.Module:
    """As DS-CNN: a convolution, then depthwise and pointwise ones."""
    layers: list[nn.Module] = [nn.Conv2d(1, 24, (4, 6), 2, (1, 2)), nn.BatchNorm2d(24), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24), nn.ReLU()]
        layers += [nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d((8, 12)), nn.Flatten(), nn.LazyLinear(classes))


class Transformer(nn.Module):
    """Patches of 4 pixels, two blocks of two heads, 32 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 16, 32) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.scores = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x).mean(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query, key, value = (
            layer(y).reshape(-1, 16, 2, 16).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.transpose(2, 3) * 0.25, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(-1, 16, 32))
        return x + self.narrow(torch.relu(self.wide(self.norms[1](x))))


class Segmenter(nn.Module):
    """Down to half the size and up again, with one connection past it; scores of four classes for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, 2, 1)
        self.low, self.up = nn.Conv2d(24, 24, 3, padding=1), nn.ConvTranspose2d(24, 16, 2, 2)
        self.last, self.scores = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        y = torch.relu(self.low(torch.relu(self.down(x))))
        return self.scores(torch.relu(self.last(torch.cat([x, torch.relu(self.up(y))], 1))))


def segments(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The mean of intersection over union of the shape's pixels, example by example."""
    classes, wanted = outputs.argmax(1), targets
    both = ((classes == wanted) & (wanted > 0)).sum((1, 2))
    return float((both / np.maximum(((classes > 0) | (wanted > 0)).sum((1, 2)), 1)).mean())


def detected(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The share of examples with the right class and a box of intersection over union 0.5 or more."""
    middle, size = outputs[:, 3:5], np.maximum(outputs[:, 5:7], 1e-6)
    true_middle, true_size = targets[:, 1:3], targets[:, 3:5]
    low = np.maximum(middle - size / 2, true_middle - true_size / 2)
    high = np.minimum(middle + size / 2, true_middle + true_size / 2)
    both = np.maximum(high - low, 0).prod(1)
    share = both / (size.prod(1) + true_size.prod(1) - both)
    return float(((outputs[:, :3].argmax(1) == targets[:, 0]) & (share >= 0.5)).mean())


def loss_of_boxes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    boxes = nn.functional.smooth_l1_loss(outputs[:, 3:], targets[:, 1:], beta=0.1)
    return nn.functional.cross_entropy(outputs[:, :3], targets[:, 0].long()) + 10 * boxes


def _classes(title: str, data: Any, network: Any, epochs: int = 12) -> Task:
    return Task(title, data, network, nn.functional.cross_entropy, accuracy, epochs)


TASKS = {
    "digits8": _classes("scikit-learn's digits, 8 pixels", functools.partial(digits, 8),
                        lambda: convolutional((16, 24, 32), 10)),
    "digits16": _classes("scikit-learn's digits, 16 pixels", functools.partial(digits, 16),
                         lambda: convolutional((12, 24, 32), 10), 8),
    "digits32": _classes("scikit-learn's digits, 32 pixels", functools.partial(digits, 32),
                         lambda: convolutional((8, 16, 24, 32), 10), 6),
    "keywords": _classes("made-up keywords in noise", keywords, lambda: separable(8)),
    "glyphs": _classes("rendered letters", glyphs, lambda: convolutional((12, 24, 32), 10)),
    "vit": _classes("scikit-learn's digits, 16 pixels, a small ViT", functools.partial(digits, 16), Transformer, 25),
    "detector": Task("drawn shapes, class and box", functools.partial(shapes, masks=False),
                     lambda: convolutional((12, 24, 32, 32), 7, 3), loss_of_boxes, detected, 40),
    "segmenter": Task("drawn shapes, pixels", functools.partial(shapes, masks=True), Segmenter,
                      nn.functional.cross_entropy, segments, 20),
}  # fmt: skip


def tensors_of(inputs: Any) -> tuple[torch.Tensor, ...]:
    """One array, or several, as a network's arguments."""
    return tuple(map(torch.from_numpy, inputs if isinstance(inputs, tuple) else (inputs,)))


def judged(task: Task, outputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """What methods are chosen by: the metric, then, where it is the same, the loss, negative."""
    with torch.no_grad():
        loss = task.loss(torch.from_numpy(np.asarray(outputs, np.float32)), torch.from_numpy(targets))
    return task.metric(outputs, targets), -float(loss)


def in_training(task: Task, model: nn.Module) -> nn.Module:
    """The model in training, but for batch norms whose statistics are to stay."""
    for module in model.train().modules() if not task.followed else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def fit(
    task: Task,
    model: nn.Module,
    inputs: Any,
    targets: np.ndarray,
    epochs: int,
    rate: float,
    groups: Any = None,
    warm_up: bool = False,
    teacher: nn.Module | None = None,
) -> None:
    """Trains with Adam, whose rate falls by a cosine.

    groups: the optimizer's; by default all parameters at one rate.
    warm_up: the rate rises over the first tenth of the steps.
    teacher: half of the loss is how far the classes are from those of this network.
    """
    in_training(task, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(groups or parameters, rate)
    tensors, y = tensors_of(inputs), torch.from_numpy(targets)
    batches = -(-len(y) // 64)
    steps = epochs * batches
    rising = round(steps / 10) if warm_up else 0

    def factor(step: int) -> float:
        return (
            (step + 1) / rising if step < rising else 0.5 + 0.5 * math.cos(math.pi * (step - rising) / (steps - rising))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            examples = [task.augmented(x[rows]) for x in tensors]
            outputs = model(*examples)
            loss = task.loss(outputs, y[rows])
            if teacher is not None:
                with torch.no_grad():
                    answers = teacher(*examples)
                loss = 0.5 * loss + 0.5 * distillation(outputs, answers)
            loss.backward()
            optimizer.step()
            schedule.step()


def distillation(outputs: torch.Tensor, answers: torch.Tensor, temperature: float = 4.0) -> torch.Tensor:
    """`qat.distillation_loss` of arXiv:1503.02531, which the adapters' environments do not have."""
    softened = [F.log_softmax(scores / temperature, 1) for scores in (outputs, answers)]
    return F.kl_div(*softened, reduction="batchmean", log_target=True) * temperature**2


def teacher(task: Task, folder: Path, model: nn.Module, parts: Parts) -> nn.Module:
    """The float network after the training that quantized ones get, by the lower of the rates of 8 bits. It is trained
    once and kept in the network's folder."""
    network, weights = copy.deepcopy(model), folder / "teacher.pt"
    if weights.exists():
        network.load_state_dict(torch.load(weights, weights_only=True))
    else:
        torch.manual_seed(0)
        fit(task, network, *parts[0], task.qat_epochs, qat_rates(task, 8, 8)[0], warm_up=True)
        torch.save(network.state_dict(), folder / "teacher.part")
        os.replace(folder / "teacher.part", weights)
    return network.eval()


def resettled(task: Task, model: nn.Module, inputs: np.ndarray) -> nn.Module | None:
    """A copy of a trained model whose batch norms have the statistics of examples without augmentation; None: the task
    asks for none, or the model has no batch norm any more."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not (task.resettled and norms):
        return None
    model = copy.deepcopy(model)
    rows = np.random.default_rng(0).permutation(len(inputs))[: 64 * task.resettled]
    torch.optim.swa_utils.update_bn(torch.from_numpy(inputs[rows]).split(64), model)
    return model


def trained(name: str, seed: int, data: list[tuple[np.ndarray, np.ndarray]]) -> nn.Module:
    """A float network in evaluation."""
    task = TASKS[name]
    torch.manual_seed(seed)
    model = task.network()
    with torch.no_grad():
        model.eval()(torch.from_numpy(data[0][0][:2]))
    if task.epochs:
        fit(task, model.train(), *data[0], task.epochs, 5e-3)
    return model.eval()


def kept(name: str, seed: int, folder: Path) -> tuple[Path, nn.Module, Parts]:
    """A float network, trained where that was not done before, its data, and the folder that holds both for adapters:
    task.json, data.npz and weights.pt."""
    seed = seed if TASKS[name].trained_by_seed else 0
    held = folder / f"{name}_{seed}"
    parts = TASKS[name].data(seed)
    weights = held / "weights.pt"
    if weights.exists():
        return held, restored(name, torch.load(weights, weights_only=True), parts[0][0]), parts
    held.mkdir(parents=True, exist_ok=True)
    model = trained(name, seed, parts)
    (held / "task.json").write_text(json.dumps({"name": name}))
    arrays: dict[str, Any] = {
        f"{word}{at}": part[side] for at, part in enumerate(parts) for side, word in enumerate("xy")
    }
    np.savez(held / "data.npz", **arrays)
    # Last, and in one step: a folder with weights is whole.
    torch.save(model.state_dict(), held / "weights.part")
    os.replace(held / "weights.part", weights)
    return held, model, parts


def fingerprint(model: nn.Module) -> str:
    """What tells two networks of one kind apart: of their weights and statistics."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def qat_rates(task: Task, weights: int, activations: int) -> tuple[float, ...]:
    """The learning rates of quantization-aware trainings, the task's or by their bits; the validation examples
    decide."""
    if not task.qat_epochs:
        return ()
    if task.rates is not None:
        return task.rates
    return FINE_RATES if min(weights, activations) >= 8 else COARSE_RATES


def restored(name: str, weights: dict[str, Any], inputs: np.ndarray) -> nn.Module:
    """A float network with given weights, in evaluation."""
    model = TASKS[name].network().eval()
    with torch.no_grad():
        model(torch.from_numpy(inputs[:2]))
    model.load_state_dict(weights)
    return model


def outputs_of(model: Callable[..., torch.Tensor], inputs: Any, batch: int = 250) -> np.ndarray:
    parts = zip(*(x.split(batch) for x in tensors_of(inputs)), strict=True)
    with torch.no_grad():
        return np.concatenate([model(*part).numpy() for part in parts])


if "REAL_DATA" in os.environ:  # `bench/real.py` and the adapters that it starts
    from real_networks import REAL_TASKS

    TASKS.update(REAL_TASKS)

__all__ = [
    "CALIBRATION",
    "FINE_RATES",
    "QAT_EPOCHS",
    "SIZES",
    "TASKS",
    "Parts",
    "Task",
    "accuracy",
    "distillation",
    "fit",
    "in_training",
    "judged",
    "kept",
    "outputs_of",
    "qat_rates",
    "resettled",
    "restored",
    "teacher",
    "tensors_of",
    "trained",
]
