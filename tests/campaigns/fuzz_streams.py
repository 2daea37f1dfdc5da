# SPDX-License-Identifier: Apache-2.0
"""Random networks over sequences, streamed: every frame has the codes that the network computes from all of them.

    python tests/campaigns/fuzz_streams.py [--cases 300] [--seed 0] [--only SEED]

Networks are PyTorch's, of what people write between the frames of a sequence: convolutions (padded in front, cut,
dilated, with strides), pools, differences of neighbours, shifts, gates, normalization, windows at the
end. Each is prepared, calibrated, frozen and lowered, and streamed by a random number of frames. A refusal is counted;
another number is a failure, and so is an error that is no refusal.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from exactqat import deploy, qat

Make = Callable[[np.random.Generator, int], "tuple[nn.Module, int]"]


class Does(nn.Module):
    """A function of a sequence, by a name."""

    def __init__(self, text: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.text, self.function = text, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Residual(nn.Module):
    def __init__(self, body: nn.Module, way: str) -> None:
        super().__init__()
        self.body, self.way = body, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        x = x[:, :, x.shape[2] - y.shape[2] :] if self.way != "first" else x[:, :, : y.shape[2]]
        return x * torch.sigmoid(y) if self.way == "gate" else torch.cat([x, y], 1) if self.way == "cat" else x + y

    def extra_repr(self) -> str:
        return self.way


class OverChannels(nn.Module):
    """Of one frame at a time."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


def convolution(r: np.random.Generator, c: int) -> tuple[nn.Module, int]:
    k, d, s = int(r.integers(1, 5)), int(r.integers(1, 4)), int(r.choice([1, 1, 1, 2, 3]))
    groups, out = (c, c) if r.integers(3) == 0 else (1, int(r.integers(1, 9)))
    conv = nn.Conv1d(c, out, k, s, dilation=d, groups=groups, bias=bool(r.integers(2)))
    reach = (k - 1) * d
    way = r.choice(["front", "none", "chomp", "less", "value", "replicate", "more", "same"])
    if way == "chomp":
        conv.padding = (reach,)
        conv._reversed_padding_repeated_twice = [reach, reach]
        return nn.Sequential(conv, Does("cut", lambda x: x[:, :, : x.shape[2] - reach] if reach else x)), out
    if way == "same":
        return nn.Conv1d(c, out, 2 * (k // 2) + 1, padding=k // 2, groups=groups), out
    before = {"front": reach, "none": 0, "less": reach // 2, "value": reach, "replicate": reach, "more": reach + 1}[way]
    mode, value = ("replicate", 0.0) if way == "replicate" else ("constant", 0.7 if way == "value" else 0.0)
    padded = Does(f"{way} {before}", lambda x: F.pad(x, (before, 0), mode, value) if before else x)
    return nn.Sequential(padded, conv), out


def pooled(r: np.random.Generator, c: int) -> tuple[nn.Module, int]:
    k, s = int(r.integers(2, 4)), int(r.integers(1, 4))
    pool = nn.MaxPool1d(k, s) if r.integers(2) else nn.AvgPool1d(k, s)
    if r.integers(2):
        return pool, c
    return nn.Sequential(Does(f"front {k - 1}", lambda x: F.pad(x, (k - 1, 0))), pool), c


def moved(r: np.random.Generator, c: int) -> tuple[nn.Module, int]:
    ways: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("difference", lambda x: x[:, :, 1:] - x[:, :, :-1]),
        ("shift", lambda x: torch.cat([torch.zeros_like(x[:, :, :2]), x[:, :, :-2]], 2)),
        ("first kept", lambda x: torch.cat([x[:, :, :1], x[:, :, :-1]], 2)),
        ("second", lambda x: x[:, :, ::2]),
        ("later", lambda x: x[:, :, 3:]),
        ("earlier", lambda x: x[:, :, :-2]),
        ("maximum", lambda x: torch.maximum(x[:, :, 1:], x[:, :, :-1])),
        ("reversed", lambda x: x.flip(2)),
        ("reversed channels", lambda x: x.flip(1)),
        ("rolled", lambda x: x.roll(1, 2)),
        ("doubled", lambda x: x.repeat_interleave(2, 2)),
        ("repeated", lambda x: torch.cat([x, x], 2)),
        ("ahead", lambda x: F.pad(x[:, :, 2:], (0, 2))),
        ("less its mean", lambda x: x - x.mean(2, keepdim=True)),
        ("less its channels' mean", lambda x: x - x.mean(1, keepdim=True)),
        ("softmax of channels", lambda x: x.softmax(1)),
        ("softmax of time", lambda x: x.softmax(2)),
        ("folded", lambda x: x.reshape(x.shape[0], x.shape[1], -1, 2).mean(3) if x.shape[2] % 2 == 0 else x),
        ("there and back", lambda x: x.transpose(1, 2).reshape(x.shape[0], -1, x.shape[1]).transpose(1, 2)),
        ("mixed up", lambda x: x.reshape(x.shape[0], -1, x.shape[1]).transpose(1, 2)),
        ("halves", lambda x: x[:, :, : x.shape[2] // 2] + x[:, :, x.shape[2] - x.shape[2] // 2 :]),
        ("running sum", lambda x: x.cumsum(2)),
        ("doubled by nearest", lambda x: F.interpolate(x, scale_factor=2)),
    ]
    text, function = ways[int(r.integers(len(ways)))]
    return Does(text, function), c


def valued(r: np.random.Generator, c: int) -> tuple[nn.Module, int]:
    layers: list[nn.Module] = [
        nn.ReLU(), nn.Hardswish(), nn.Tanh(), nn.GELU(), nn.BatchNorm1d(c), OverChannels(nn.LayerNorm(c)),
        OverChannels(nn.Linear(c, c)), nn.GLU(1) if c % 2 == 0 else nn.Sigmoid(), nn.Dropout(0.3), nn.PReLU(c),
    ]  # fmt: skip
    at = int(r.integers(len(layers)))
    return layers[at], c // 2 if isinstance(layers[at], nn.GLU) else c


def residual(r: np.random.Generator, c: int) -> tuple[nn.Module, int]:
    body, channels = sequence(r, c, int(r.integers(1, 3)))
    way = str(r.choice(["sum", "gate", "cat", "first"]))
    if way == "cat":
        return Residual(body, way), c + channels
    if channels != c:
        body = nn.Sequential(body, nn.Conv1d(channels, c, 1))
    return Residual(body, way), c


PARTS: list[tuple[Make, float]] = [
    (convolution, 5), (pooled, 1.5), (moved, 2), (valued, 3), (residual, 2.5),
]  # fmt: skip


def sequence(r: np.random.Generator, c: int, count: int) -> tuple[nn.Module, int]:
    chances = np.array([chance for _, chance in PARTS])
    layers = []
    for _ in range(count):
        make, _ = PARTS[int(r.choice(len(PARTS), p=chances / chances.sum()))]
        layer, c = make(r, c)
        layers.append(layer)
    return nn.Sequential(*layers), c


class Ended(nn.Module):
    def __init__(self, body: nn.Module, end: str) -> None:
        super().__init__()
        self.body, self.end = body, end
        self.head = nn.Identity() if end == "frames" else nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.end == "frames":
            return x
        windows = {
            "mean": lambda: x.mean(2),
            "largest": lambda: x.amax(2),
            "flat": lambda: x.flatten(1),
            "last": lambda: x[:, :, -1],
            "first": lambda: x[:, :, 0],
            "latest": lambda: x[:, :, -4:].mean(2),
        }
        return self.head(windows[self.end]())

    def extra_repr(self) -> str:
        return self.end


def drawn(seed: int) -> tuple[nn.Module, torch.Tensor]:
    r = np.random.default_rng(seed)
    torch.manual_seed(seed)
    channels, length = int(r.integers(1, 6)), int(r.integers(8, 29))
    body, _ = sequence(r, channels, int(r.integers(1, 6)))
    end = str(r.choice(["frames", "frames", "frames", "mean", "largest", "flat", "last", "first", "latest"]))
    model = Ended(body, end)
    x = torch.randn(6, channels, length) * float(r.choice([0.3, 1.0, 4.0])) + float(r.choice([0.0, 0.0, 1.5]))
    with torch.no_grad():
        model.eval()(x)
    return model, x


def case(seed: int) -> str:
    """What became of it."""
    try:
        model, x = drawn(seed)
    except (RuntimeError, ValueError):
        return "no network"
    r = np.random.default_rng([seed, 1])
    bits = {"activation_bits": 16} if r.integers(5) == 0 else {}
    profile = str(r.choice(["xnnpack-x86", "reference", "micro", "xnnpack-arm64"]))
    try:
        prepared = qat.prepare(model, x[:1], device=profile, rules=[qat.Rule(**bits)], check=False)
        qat.calibrate(prepared, [x])
        qat.freeze(prepared)
        graph = deploy.lower(prepared.eval())
    except (ValueError, deploy.Refusal) as error:
        return f"not prepared: {type(error).__name__}"
    codes = deploy.input_codes(graph, x.numpy())
    (name,), (first,) = graph.outputs, codes
    whole = deploy.simulate(graph, codes, profile)[name]
    length = x.shape[2]
    try:
        fewest = deploy.stream(graph, axis=2, device=profile).frames
        fitting = [count for count in range(fewest, length + 1, fewest) if length % count == 0 or r.integers(4) == 0]
        frames = int(r.choice(fitting)) if fitting else fewest
        stream = deploy.stream(graph, axis=2, frames=frames, device=profile)
    except deploy.Refusal as error:
        return "refused: " + re.sub(r"'[^']*'|\[[^]]*\]|\d+", "..", str(error).partition(":")[2])[:70]
    axis = graph.signature.inputs[0].axes.index(2)
    used = length // stream.frames * stream.frames

    def streamed(stream: deploy.Stream) -> list[np.ndarray | None]:
        used = length // stream.frames * stream.frames
        parts = np.split(np.take(codes[first], range(used), axis), used // stream.frames, axis)
        return [stream.step(part).get(name) for part in parts]

    steps = streamed(stream)
    result = stream.results[name]
    if result.axis is None:
        # The network's own result is the first: later ones are of later frames, as for a network that reads the first
        # frame alone. Several frames at a time have it where the frames that it reads end with a step.
        by_few = streamed(deploy.stream(graph, axis=2, device=profile))
        own = next((at for at, codes in enumerate(by_few) if codes is not None), None)
        if own is None:
            return "not compared: the sequence does not end at a step"
        results = [by_few[own]]
        if (own + 1) * fewest % stream.frames == 0:
            results.append(steps[(own + 1) * fewest // stream.frames - 1])
        differing = [np.count_nonzero(codes != whole) for codes in results]
        return f"DIFFERS ({differing} of {whole.size})" if any(differing) else "equal, a window"
    output = np.concatenate([step for step in steps if step is not None], result.axis)
    frames = output.shape[result.axis]
    if frames > whole.shape[result.axis] or not frames:
        return f"DIFFERS (frames: {frames}, not {whole.shape[result.axis]})" if frames else "not compared: no frames"
    expected = np.take(whole, range(frames), result.axis)
    if used == length and frames != whole.shape[result.axis]:
        return f"DIFFERS (frames: {frames}, not {whole.shape[result.axis]})"
    same = np.array_equal(output, expected)
    return "equal" if same else f"DIFFERS ({np.count_nonzero(output != expected)} of {expected.size})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = range(options.seed, options.seed + options.cases) if options.only is None else [options.only]
    counts: Counter[str] = Counter()
    bad = []
    for seed in seeds:
        try:
            outcome = case(seed)
        except Exception:
            outcome = "FAILED: " + traceback.format_exc().strip().splitlines()[-1]
            if options.only is not None:
                traceback.print_exc()
        counts[outcome if not outcome.startswith("DIFFERS") else "DIFFERS"] += 1
        if outcome.startswith(("DIFFERS", "FAILED")):
            bad.append(seed)
            print(f"seed {seed}: {outcome}\n{drawn(seed)[0]}", flush=True)
    for what, count in counts.most_common():
        print(f"{count:6}  {what}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
