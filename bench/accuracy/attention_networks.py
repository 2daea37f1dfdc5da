# SPDX-License-Identifier: Apache-2.0
"""Three transformers as they are written in PyTorch, and the made-up data that they are trained on.

A ViT with a class token, on scikit-learn's digits; a DeiT with a distillation token, taught by a convolutional network,
on rendered letters; a reader of words with a mask, on made-up sentences. None of it is a benchmark of the field.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from networks import TASKS, Task, accuracy, fit, outputs_of, tensors_of
from torch import nn

WORDS, LENGTH, TOPICS = 40, 24, 4
# Of the words: a topic each, the others say nothing; 0 fills sentences up.
_FILLS, _OF_TOPIC = 0, 6
# Examples to train on, to decide by, and to judge by.
COUNTS = (2500, 300, 1000)
RATE = 3e-3  # of training in float


def encoder(features: int, heads: int, layers: int) -> nn.TransformerEncoder:
    """GELU, LayerNorm in front of each part, dropout of 0.1."""
    layer = nn.TransformerEncoderLayer(
        features, heads, 2 * features, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(features), enable_nested_tensor=False)


class VisionTransformer(nn.Module):
    """Sixteen patches of an image, learned places.

    Args:
        tokens: in front of the patches: one for the class, and one that a teacher teaches.
        side: of a patch, in pixels.
    """

    def __init__(self, tokens: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 48, side, side)
        self.tokens = nn.Parameter(torch.randn(1, tokens, 48) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 16 + tokens, 48) * 0.02)
        self.encoder = encoder(48, 4, 2)
        self.heads = nn.ModuleList(nn.Linear(48, 10) for _ in range(tokens))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.tokens.expand(len(images), -1, -1), x], 1) + self.places
        x = self.encoder(x)
        return torch.stack([head(x[:, at]) for at, head in enumerate(self.heads)], 1)


class OneHead(nn.Module):
    """The mean of the heads' scores: one network with one result, as it is deployed."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).mean(1)


class Reader(nn.Module):
    """As BERT: words and places, an encoder that a mask hides the filling from, the scores of the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 48, padding_idx=_FILLS)
        self.places = nn.Embedding(LENGTH, 48)
        self.norm = nn.LayerNorm(48)
        self.encoder = encoder(48, 4, 2)
        self.scores = nn.Linear(48, TOPICS)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words) + self.places(torch.arange(LENGTH)))
        x = self.encoder(x, src_key_padding_mask=mask == 0)
        return self.scores(x[:, 0])


def sentences(seed: int) -> list[tuple[Any, np.ndarray]]:
    """Words [n, 24] and masks [n, 24] of integers, sentences of 8 to 24 words; what each is about: the one of its two
    topics that has more words in it, among words that say nothing."""
    rng = np.random.default_rng(seed)
    count = sum(COUNTS)
    words, mask = np.zeros((2, count, LENGTH), np.int64)
    topics = np.empty(count, np.int64)
    for at in range(count):
        length = int(rng.integers(8, LENGTH + 1))
        topic, other = rng.permutation(TOPICS)[:2]
        ours = int(rng.integers(2, 5))
        spoken = [_word(rng, topic) for _ in range(ours)] + [_word(rng, other) for _ in range(ours - 1)]
        free = length - 1 - len(spoken)
        spoken = [*spoken, *rng.integers(2 + TOPICS * _OF_TOPIC, WORDS - 1, max(free, 0))][: length - 1]
        words[at, 1:length] = rng.permutation(spoken)
        words[at, 0] = WORDS - 1  # where the scores are read
        mask[at, :length] = 1
        topics[at] = topic
    ends = np.cumsum((0, *COUNTS))
    return [
        ((words[low:high], mask[low:high]), topics[low:high]) for low, high in zip(ends[:-1], ends[1:], strict=True)
    ]


def _word(rng: np.random.Generator, topic: int) -> int:
    return int(2 + topic * _OF_TOPIC + rng.integers(_OF_TOPIC))


def _images(pictures: list[np.ndarray], classes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    images, ends = np.stack(pictures)[:, None].astype(np.float32), np.cumsum((0, *COUNTS))
    return [(images[a:b], np.asarray(classes[a:b])) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def digits(seed: int) -> list[tuple[Any, np.ndarray]]:
    """scikit-learn's, 8 pixels, in noise; those to judge by come from other images than
    those to train on."""
    from sklearn.datasets import load_digits

    dataset, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(dataset.images))
    pictures, classes = [], []
    for count, part in zip(COUNTS, np.split(order, (1000, 1200)), strict=True):
        for number in rng.choice(part, count):
            image = dataset.images[number] / 16
            pictures.append(image + rng.normal(0, 0.1, image.shape))
            classes.append(int(dataset.target[number]))
    return _images(pictures, classes)


def letters(seed: int) -> list[tuple[Any, np.ndarray]]:
    """Ten letters of 16 pixels in four fonts of Matplotlib, turned and moved a little, in noise."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    rng, folder = np.random.default_rng(seed), f"{get_data_path()}/fonts/ttf"
    names = ("Sans", "Sans-Bold", "SansMono", "Serif")
    fonts = [ImageFont.truetype(f"{folder}/DejaVu{name}.ttf", size) for name in names for size in (12, 14)]
    pictures, classes = [], []
    for _ in range(sum(COUNTS)):
        letter = int(rng.integers(10))
        picture = Image.new("L", (16, 16))
        place = tuple(8 + rng.normal(0, 0.4, 2))
        ImageDraw.Draw(picture).text(place, "AEGKMQRSWZ"[letter], 255, fonts[rng.integers(len(fonts))], anchor="mm")
        image = np.asarray(picture.rotate(rng.normal(0, 4), Image.Resampling.BILINEAR)) / 255
        pictures.append(image + rng.normal(0, 0.08, image.shape))
        classes.append(letter)
    return _images(pictures, classes)


ATTENTION = {
    "ViT": Task("scikit-learn's digits, 8 pixels", digits, lambda: VisionTransformer(1, 2),
                nn.functional.cross_entropy, accuracy, 15),
    "DeiT": Task("rendered letters, 16 pixels", letters, lambda: VisionTransformer(2, 4),
                 nn.functional.cross_entropy, accuracy, 15),
    "reader": Task("made-up sentences, a mask", sentences, Reader, nn.functional.cross_entropy, accuracy, 15),
}  # fmt: skip


def taught(model: VisionTransformer, parts: list[tuple[Any, np.ndarray]], epochs: int) -> None:
    """Trains the first head by the targets and the second one by a convolutional teacher's decisions."""
    (inputs, targets), task = parts[0], TASKS["glyphs"]
    teacher = task.network().eval()
    teacher(*tensors_of(inputs[:2]))
    fit(task, teacher.train(), inputs, targets, 6, 5e-3)
    both = np.stack([targets, outputs_of(teacher.eval(), inputs).argmax(1)], 1)

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), wanted)

    fit(Task(task.title, task.data, task.network, loss, accuracy), model, inputs, both, epochs, RATE)


def trained_attention(name: str, seed: int, parts: list[tuple[Any, np.ndarray]]) -> nn.Module:
    """A float network in evaluation, with one result."""
    task = ATTENTION[name]
    torch.manual_seed(seed)
    model = task.network().train()
    if isinstance(model, VisionTransformer):
        if len(model.heads) > 1:
            taught(model, parts, task.epochs)
            return OneHead(model).eval()
        model = OneHead(model)
    fit(task, model, *parts[0], task.epochs, RATE)
    return model.eval()


__all__ = ["ATTENTION", "COUNTS", "trained_attention"]
