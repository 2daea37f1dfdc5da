# SPDX-License-Identifier: Apache-2.0
"""Networks in plain PyTorch, the way people write them: NETWORKS gives for each name a function that builds it.

    model, examples = NETWORKS["unet"]()

`examples` is the tuple of its arguments, for a batch of two; sizes are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {}


def network(*shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Registers a class, or a function that returns a module, under its name, with inputs of these shapes."""

    def register(build: Any) -> Any:
        words = "".join(f"_{c.lower()}" if c.isupper() else c for c in build.__name__).strip("_")

        def made() -> tuple[nn.Module, tuple[Any, ...]]:
            torch.manual_seed(0)
            return build(), tuple(torch.rand(2, *shape) for shape in shapes)

        NETWORKS[words] = made
        return build

    return register


def autoencoder(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Dense layers down to eight numbers and up again, as in MLPerf Tiny's anomaly detection: shape (640,), and 640 in
    place of `classes` to reconstruct it."""
    sizes = [math.prod(shape), 128, 128, 128, 128, 8, 128, 128, 128, 128]
    layers: list[nn.Module] = [nn.Flatten()]
    for size, following in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(size, following), nn.BatchNorm1d(following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, classes))


def conv_bn(
    c_in: int, c_out: int, k: int = 3, s: int = 1, act: nn.Module | None = None, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, k, s, k // 2, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(inplace=True) if act is None else act,
    )


# --- U-Nets ---------------------------------------------------------------------------------------------------------


def double_conv(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(conv_bn(c_in, c_out), conv_bn(c_out, c_out))


class UNet(nn.Module):
    def __init__(self, up: str = "transposed") -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double_conv(3, 8), double_conv(8, 16), double_conv(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.how = up
        if up == "transposed":
            self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        elif up == "transposed_bn":
            self.up2 = nn.Sequential(nn.ConvTranspose2d(32, 16, 3, 2, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.up1 = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(True))
        else:
            self.up2, self.up1 = conv_bn(32, 16, 1), conv_bn(16, 8, 1)
        self.dec2, self.dec1 = double_conv(32, 16), double_conv(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def grow(self, x: torch.Tensor, layer: nn.Module, to: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("transposed"):
            return layer(x)
        if self.how == "bilinear":
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        elif self.how == "corners":
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        elif self.how == "nearest_size":
            x = F.interpolate(x, size=to.shape[2:], mode="nearest")
        elif self.how == "bilinear_size":
            x = F.interpolate(x, size=to.shape[-2:], mode="bilinear", align_corners=False)
        else:
            x = nn.functional.interpolate(x, scale_factor=(2.0, 2.0))
        return layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.dec2(torch.cat([b, self.grow(c, self.up2, b)], dim=1))
        a = self.dec1(torch.cat([a, self.grow(b, self.up1, a)], axis=1))
        return self.head(a)


@network((3, 32, 32))
def unet_transposed() -> nn.Module:
    return UNet()


@network((3, 32, 32))
def unet_transposed_batch_norm() -> nn.Module:
    return UNet("transposed_bn")


@network((3, 32, 32))
def unet_bilinear() -> nn.Module:
    return UNet("bilinear")


@network((3, 32, 32))
def unet_bilinear_corners() -> nn.Module:
    return UNet("corners")


@network((3, 32, 32))
def unet_bilinear_size() -> nn.Module:
    return UNet("bilinear_size")


@network((3, 32, 32))
def unet_nearest() -> nn.Module:
    return UNet("nearest")


@network((3, 32, 32))
def unet_nearest_size() -> nn.Module:
    return UNet("nearest_size")


@network((3, 32, 32))
class UNetUpsampleModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(double_conv(3, 8), nn.AvgPool2d(2), double_conv(8, 16))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 8, 3, padding="same"))
        self.skip = nn.Conv2d(3, 8, 1)
        self.head = nn.Sequential(nn.UpsamplingNearest2d(scale_factor=2), nn.Conv2d(8, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.up(self.down(x)) + self.skip(x)))


# --- detectors ------------------------------------------------------------------------------------------------------


def silu_conv(c_in: int, c_out: int, k: int = 1, s: int = 1) -> nn.Sequential:
    return conv_bn(c_in, c_out, k, s, nn.SiLU(inplace=True))


class Bottleneck(nn.Module):
    def __init__(self, c: int, shortcut: bool = True) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = silu_conv(c, c, 3), silu_conv(c, c, 3), shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C3(nn.Module):
    def __init__(self, c_in: int, c_out: int, n: int = 1) -> None:
        super().__init__()
        half = c_out // 2
        self.cv1, self.cv2, self.cv3 = silu_conv(c_in, half), silu_conv(c_in, half), silu_conv(2 * half, c_out)
        self.m = nn.Sequential(*(Bottleneck(half) for _ in range(n)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C2f(nn.Module):
    def __init__(self, c_in: int, c_out: int, n: int = 1) -> None:
        super().__init__()
        self.c = c_out // 2
        self.cv1, self.cv2 = silu_conv(c_in, 2 * self.c), silu_conv((2 + n) * self.c, c_out)
        self.m = nn.ModuleList(Bottleneck(self.c) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class SPPF(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = silu_conv(c, c // 2), silu_conv(2 * c, c)
        self.m = nn.MaxPool2d(kernel_size=5, stride=1, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cv1(x)
        y1 = self.m(x)
        y2 = self.m(y1)
        return self.cv2(torch.cat([x, y1, y2, self.m(y2)], 1))


class Yolo(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.s2 = silu_conv(3, 8, 3, 2), nn.Sequential(silu_conv(8, 16, 3, 2), block(16, 16))
        self.s3, self.s4 = nn.Sequential(silu_conv(16, 16, 3, 2), block(16, 16)), silu_conv(16, 16, 3, 2)
        self.sppf, self.up = SPPF(16), nn.Upsample(scale_factor=2, mode="nearest")
        self.n3, self.n2 = block(32, 16), block(32, 16)
        self.down, self.n4 = silu_conv(16, 16, 3, 2), block(32, 16)


@network((3, 64, 64))
class YoloV5(Yolo):
    """Three outputs [batch, anchors, height, width, box and classes], as in training."""

    def __init__(self) -> None:
        super().__init__(C3)
        self.na, self.no = 3, 7
        self.m = nn.ModuleList(nn.Conv2d(16, self.na * self.no, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        p2 = self.s2(self.stem(x))
        p3 = self.s3(p2)
        p4 = self.sppf(self.s4(p3))
        n3 = self.n3(torch.cat([self.up(p4), p3], 1))
        n2 = self.n2(torch.cat([self.up(n3), p2], 1))
        n4 = self.n4(torch.cat([self.down(n3), p4], 1))
        outputs = []
        for layer, level in zip(self.m, (n2, n3, n4), strict=True):
            y = layer(level)
            bs, _, ny, nx = y.shape
            outputs.append(y.view(bs, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2).contiguous())
        return outputs


@network((3, 64, 64))
class YoloV8(Yolo):
    """Raw maps of boxes and classes of three levels."""

    def __init__(self) -> None:
        super().__init__(C2f)
        self.cv2 = nn.ModuleList(nn.Sequential(silu_conv(16, 8, 3), nn.Conv2d(8, 16, 1)) for _ in range(3))
        self.cv3 = nn.ModuleList(nn.Sequential(silu_conv(16, 8, 3), nn.Conv2d(8, 5, 1)) for _ in range(3))

    def levels(self, x: torch.Tensor) -> list[torch.Tensor]:
        p2 = self.s2(self.stem(x))
        p3 = self.s3(p2)
        p4 = self.sppf(self.s4(p3))
        n3 = self.n3(torch.cat([self.up(p4), p3], 1))
        n2 = self.n2(torch.cat([self.up(n3), p2], 1))
        return [n2, n3, self.n4(torch.cat([self.down(n3), p4], 1))]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.levels(x)
        for i in range(3):
            x[i] = torch.cat((self.cv2[i](x[i]), self.cv3[i](x[i])), 1)
        return x


@network((3, 64, 64))
class YoloV8Flat(YoloV8):
    """All levels in one tensor, boxes through the distribution's expectation, classes through a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.dfl = nn.Conv2d(4, 1, 1, bias=False).requires_grad_(False)
        self.dfl.weight.data[:] = torch.arange(4, dtype=torch.float32).view(1, 4, 1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = super().forward(x)
        shape = maps[0].shape
        joined = torch.cat([xi.view(shape[0], 21, -1) for xi in maps], 2)
        box, classes = joined.split((16, 5), 1)
        b, _, a = box.shape
        box = self.dfl(box.view(b, 4, 4, a).transpose(2, 1).softmax(1)).view(b, 4, a)
        return box, classes.sigmoid()


class SsdBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(
            conv_bn(3, 8, s=2, act=nn.ReLU6(inplace=True)), conv_bn(8, 8, groups=8), conv_bn(8, 16, 1, 2)
        )
        self.b, self.c = conv_bn(16, 16, s=2), conv_bn(16, 16, s=2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        a = self.a(x)
        b = self.b(a)
        return [a, b, self.c(b)]


@network((3, 48, 48))
class Ssd(nn.Module):
    """Boxes and classes, permuted and concatenated over the levels, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = SsdBackbone()
        self.loc = nn.ModuleList(nn.Conv2d(16, 4 * 4, 3, padding=1) for _ in range(3))
        self.conf = nn.ModuleList(nn.Conv2d(16, 4 * 6, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        locations, confidences = [], []
        for feature, location, confidence in zip(self.backbone(x), self.loc, self.conf, strict=True):
            locations.append(location(feature).permute(0, 2, 3, 1).contiguous().view(x.size(0), -1, 4))
            confidences.append(confidence(feature).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 6))
        return torch.cat(locations, 1), torch.cat(confidences, 1)


@network((3, 48, 48))
class SsdDict(Ssd):
    def forward(self, x: torch.Tensor) -> Any:
        boxes, scores = super().forward(x)
        return {"boxes": boxes, "scores": F.softmax(scores, dim=-1)}


@network((3, 48, 48))
class SsdSharedHead(nn.Module):
    """One head for all levels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = SsdBackbone()
        self.head = nn.Sequential(conv_bn(16, 16), nn.Conv2d(16, 9, 1))

    def forward(self, x: torch.Tensor) -> Any:
        maps = [self.head(level).flatten(2).transpose(1, 2) for level in self.backbone(x)]
        joined = torch.cat(maps, dim=1)
        return {"detections": {"boxes": joined[..., :4], "classes": joined[..., 4:]}, "levels": maps}


@network((1, 48, 48))
class Fomo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(1, 8, s=2, act=nn.ReLU6())]
        for c_in, c_out, s in ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 2)):
            layers += [conv_bn(c_in, c_in, s=s, act=nn.ReLU6(), groups=c_in), conv_bn(c_in, c_out, 1, act=nn.ReLU6())]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Conv2d(24, 16, 1), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.features(x)), dim=1)


# --- sound ----------------------------------------------------------------------------------------------------------


@network((49, 10))
class DsCnn(nn.Module):
    """Keyword spotting on [batch, time, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, (10, 4), stride=(2, 2), padding=(5, 1), bias=False)
        self.bn, self.drop = nn.BatchNorm2d(16), nn.Dropout(0.2)
        blocks: list[nn.Module] = []
        for _ in range(2):
            blocks += [conv_bn(16, 16, groups=16), conv_bn(16, 16, 1)]
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        x = self.drop(F.relu(self.bn(self.conv(x))))
        x = F.adaptive_avg_pool2d(self.blocks(x), 1)
        return self.fc(x.squeeze(-1).squeeze(-1))


@network((40, 49))
class TcResNet(nn.Module):
    """Keyword spotting on [batch, channels, time] by Conv1d."""

    class Block(nn.Module):
        def __init__(self, c_in: int, c_out: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv1d(c_in, c_out, 9, 2, 4, bias=False), nn.BatchNorm1d(c_out)
            self.conv2, self.bn2 = nn.Conv1d(c_out, c_out, 9, 1, 4, bias=False), nn.BatchNorm1d(c_out)
            self.short = nn.Sequential(nn.Conv1d(c_in, c_out, 1, 2, bias=False), nn.BatchNorm1d(c_out))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(y + self.short(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(40, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(self.Block(16, 24), self.Block(24, 32))
        self.pool, self.drop, self.fc = nn.AdaptiveAvgPool1d(1), nn.Dropout(0.5), nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(self.pool(self.blocks(self.stem(x))).flatten(1)))


@network((1, 2000))
class M5(nn.Module):
    """Raw audio; log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(1, 16, kernel_size=80, stride=16), nn.BatchNorm1d(16)
        self.conv2, self.bn2 = nn.Conv1d(16, 16, kernel_size=3), nn.BatchNorm1d(16)
        self.pool, self.fc1 = nn.MaxPool1d(4), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.pool(F.relu(self.bn2(self.conv2(x))))
        x = F.avg_pool1d(x, x.shape[-1])
        x = x.permute(0, 2, 1)
        return F.log_softmax(self.fc1(x), dim=2)


@network((8, 32))
class CausalTcn(nn.Module):
    class Block(nn.Module):
        def __init__(self, c_in: int, c_out: int, dilation: int) -> None:
            super().__init__()
            self.padding = 2 * dilation
            self.conv = nn.Conv1d(c_in, c_out, 3, padding=self.padding, dilation=dilation)
            self.conv2 = nn.Conv1d(c_out, c_out, 3, dilation=dilation)
            self.down = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else None
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.drop(torch.relu(self.conv(x)[:, :, : -self.padding].contiguous()))
            y = torch.relu(self.conv2(F.pad(y, (self.padding, 0))))
            return torch.relu(y + (x if self.down is None else self.down(x)))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.Block(8, 16, 1), self.Block(16, 16, 2), self.Block(16, 16, 4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x)[:, :, -1])


@network((12, 10))
class GruKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(10, 16, num_layers=2, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.gru(x)
        return self.fc(out[:, -1])


@network((12, 10))
class LstmKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 8, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (h, _) = self.lstm(x)
        return self.fc(torch.cat([h[0], h[1]], dim=-1))


@network((12, 10))
class LstmTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(10, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h0 = torch.zeros(1, x.size(0), 8)
        c0 = torch.zeros(1, x.size(0), 8)
        out, (h, c) = self.lstm(x.transpose(0, 1), (h0, c0))
        return self.fc(h[-1]), out.transpose(0, 1)


@network((1, 16, 24))
class Crnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(conv_bn(1, 8), nn.MaxPool2d(2), conv_bn(8, 8), nn.MaxPool2d((2, 1)))
        self.rnn, self.fc = nn.GRU(32, 16, batch_first=True, bidirectional=True), nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cnn(x)
        b, c, h, w = x.size()
        x = x.permute(0, 3, 1, 2).reshape(b, w, c * h)
        x, _ = self.rnn(x)
        return self.fc(x).log_softmax(2)


# --- convolutional classifiers --------------------------------------------------------------------------------------


def channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)


@network((3, 32, 32))
class MicroNet(nn.Module):
    """Grouped, factorised and shuffled convolutions."""

    class Block(nn.Module):
        def __init__(self, c_in: int, c_out: int, groups: int, s: int = 1) -> None:
            super().__init__()
            self.groups = groups
            self.rows = nn.Conv2d(c_in, c_in, (3, 1), (s, 1), (1, 0), groups=c_in, bias=False)
            self.columns = nn.Conv2d(c_in, c_in, (1, 3), (1, s), (0, 1), groups=c_in, bias=False)
            self.bn = nn.BatchNorm2d(c_in)
            self.squeeze = nn.Conv2d(c_in, c_out, 1, groups=groups, bias=False)
            self.bn2 = nn.BatchNorm2d(c_out)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu6(self.bn(self.columns(self.rows(x))))
            return channel_shuffle(self.bn2(self.squeeze(x)), self.groups)

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, s=2)
        self.blocks = nn.Sequential(self.Block(8, 16, 4, 2), self.Block(16, 16, 4), self.Block(16, 24, 8, 2))
        self.shuffle, self.fc = nn.ChannelShuffle(4), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.shuffle(self.blocks(self.stem(x))).mean((2, 3)))


@network((3, 32, 32))
class ShuffleUnits(nn.Module):
    """Channel shuffles written both ways, splits, and a branch on shapes."""

    class Unit(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.branch = nn.Sequential(conv_bn(c // 2, c // 2, 1), conv_bn(c // 2, c // 2, groups=c // 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x1, x2 = torch.split(x, x.shape[1] // 2, dim=1)
            out = torch.cat((x1, self.branch(x2)), dim=1)
            b, c, h, w = out.size()
            if c % 2 == 0:
                out = out.reshape(b * c // 2, 2, h * w).permute(1, 0, 2).reshape(2, -1, c // 2, h, w)
                out = torch.cat((out[0], out[1]), 1)
            return channel_shuffle(out, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.units, self.fc = (
            conv_bn(3, 16, s=2),
            nn.Sequential(self.Unit(16), self.Unit(16)),
            nn.Linear(16, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.mean(self.units(self.stem(x)), dim=[2, 3]))


@network((1, 32, 32))
class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(16 * 8 * 8, 10),
        )
        self.decoder = nn.Sequential(
            nn.Linear(10, 16 * 8 * 8),
            nn.Unflatten(1, (16, 8, 8)),
            nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 3, stride=2, padding=1, output_padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        return self.decoder(z), z


@network((1, 16, 16))
class Espcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())
        self.up = nn.Sequential(nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.part(x)).clamp_(0.0, 1.0)


@network((1, 16, 16))
class Fsrcnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.PReLU(16))
        self.mid = nn.Sequential(nn.Conv2d(16, 8, 1), nn.PReLU(8), nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8))
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1), nn.PReLU(16))
        self.last = nn.ConvTranspose2d(16, 1, 9, stride=2, padding=4, output_padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expand(self.mid(self.first(x))))


@network((3, 48, 48))
class FaceLandmarks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.pool1 = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.conv2, self.prelu2 = nn.Conv2d(10, 16, 3), nn.PReLU(16)
        self.pool2 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.fc, self.prelu3 = nn.Linear(1600, 32), nn.PReLU()
        self.prob, self.box, self.points = nn.Linear(32, 2), nn.Linear(32, 4), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool1(self.prelu1(self.conv1(x)))
        x = self.pool2(self.prelu2(self.conv2(x)))
        x = x.permute(0, 3, 2, 1).contiguous()
        x = self.prelu3(self.fc(x.view(x.shape[0], -1)))
        return self.box(x), self.points(x), F.softmax(self.prob(x), dim=1)


@network((3, 32, 32))
class FaceEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 16, s=2, act=nn.PReLU(16)), conv_bn(16, 16, s=2, act=nn.PReLU(16)))
        self.gdc = nn.Sequential(nn.Conv2d(16, 16, 8, groups=16, bias=False), nn.BatchNorm2d(16), nn.Flatten())
        self.fc, self.bn = nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.fc(self.gdc(self.body((x - 0.5) / 0.5))))
        return F.normalize(x, p=2, dim=1)


@network((3, 32, 32))
class EmbeddingByHand(nn.Module):
    """L2 normalisation written out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = conv_bn(3, 16, s=2), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(self.body(x).mean([-2, -1]))
        return x / x.norm(p=2, dim=1, keepdim=True)


# --- several inputs and outputs -------------------------------------------------------------------------------------


@network((3, 24, 24), (5,))
class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.numbers = conv_bn(3, 8, s=2), nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, image: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        x = self.image(image).mean(dim=(2, 3))
        return self.head(torch.cat([x, self.numbers(numbers)], dim=-1))


@network((1, 28, 28), (1, 28, 28))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv_bn(1, 8, s=2), conv_bn(8, 16, s=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(16, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc(torch.abs(self.branch(a) - self.branch(b))))


@network((3, 32, 32))
class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 8, s=2), conv_bn(8, 16, s=2), nn.AdaptiveAvgPool2d((1, 1)))
        self.age, self.kind = nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.flatten(self.body(x), 1)
        return {"age": self.age(x), "kind": self.kind(x)}


# --- attention ------------------------------------------------------------------------------------------------------


@network((3, 32, 32))
class TinyVit(nn.Module):
    """Class token, position parameters, attention by hand."""

    class Block(nn.Module):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.norm1, self.norm2, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), heads
            self.qkv, self.proj, self.drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(0.1)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            B, N, C = x.shape
            q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            scores = (q @ k.transpose(-2, -1)) * (C // self.heads) ** -0.5
            x = scores.softmax(dim=-1) @ v
            return self.proj(x.transpose(1, 2).reshape(B, N, C))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.drop(self.attend(self.norm1(x)))
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 24))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 24) * 0.02)
        self.blocks = nn.Sequential(self.Block(24, 3), self.Block(24, 3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.weights = nn.LayerNorm(dim), nn.LayerNorm(dim), weights
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=self.weights)[0]
        return x + self.mlp(self.norm2(x))


class KeywordTransformer(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.embed, self.cls = nn.Linear(10, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(13, 16) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(16, 2, weights) for _ in range(2))
        self.head = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = torch.cat([self.cls.repeat(x.size(0), 1, 1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0, :])


@network((12, 10))
def keyword_transformer() -> nn.Module:
    return KeywordTransformer(False)


@network((12, 10))
def keyword_transformer_with_weights() -> nn.Module:
    return KeywordTransformer(True)


@network((12, 16))
class LearnedQueries(nn.Module):
    """Attention that learned vectors ask (pooling), with a mask too, and one whose keys and values are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 3, 16) * 0.3)
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 5)
        self.memory = nn.Parameter(torch.randn(2, 1, 2, 7, 8))
        self.register_buffer("mask", torch.zeros(3, 12).masked_fill(torch.arange(36).view(3, 12) % 5 == 0, -100.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q = self.q(self.latent.expand(b, -1, -1)).view(b, 3, 2, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, n, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        y = F.scaled_dot_product_attention(y, self.memory[0], self.memory[1])
        return self.out(y.transpose(1, 2).reshape(b, 3, c)).mean(1)


@network((12, 16))
class SdpaEncoder(nn.Module):
    """F.scaled_dot_product_attention, causal and with a fixed mask; sinusoids for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.ones(12, 12).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        position = torch.arange(n, dtype=torch.float32).unsqueeze(1)
        rate = torch.exp(torch.arange(0, c, 2).float() * (-math.log(10000.0) / c))
        table = torch.zeros(n, c)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        x = x + table
        q, k, v = (layer(x).view(b, n, 2, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        y = y + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).mean(1)


@network((12, 16))
class EinsumAttention(nn.Module):
    """Attention by einsum, its mask filled in by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(b, n, 2, c // 2).permute(0, 2, 1, 3) for t in (q, k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(c // 2)
        mask = torch.triu(torch.ones(n, n), diagonal=1).bool()
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
        y = torch.einsum("bhij,bhjd->bhid", weights, v)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


@network((12, 16))
class TorchEncoder(nn.Module):
    """nn.TransformerEncoder as it comes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(dim=1))


class SqueezeExcite(nn.Module):
    def __init__(self, c: int, r: int = 4) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(c, c // r, bias=False), nn.ReLU(True), nn.Linear(c // r, c, bias=False), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, _, _ = x.size()
        y = self.fc(self.avg_pool(x).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


@network((3, 32, 32))
class SqueezeExciteNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv_bn(3, 16, s=2), SqueezeExcite(16), conv_bn(16, 16, s=2), SqueezeExcite(16))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.net(x).mean(3).mean(2))


@network((3, 32, 32))
class Cbam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, s=2)
        self.mlp = nn.Sequential(nn.Conv2d(16, 4, 1, bias=False), nn.ReLU(), nn.Conv2d(4, 16, 1, bias=False))
        self.spatial, self.fc = nn.Conv2d(2, 1, 7, padding=3, bias=False), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        average = self.mlp(F.avg_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3))))
        x = x * torch.sigmoid(average + self.mlp(F.adaptive_max_pool2d(x, 1)))
        maximum, _ = torch.max(x, dim=1, keepdim=True)
        attention = self.spatial(torch.cat([torch.mean(x, dim=1, keepdim=True), maximum], dim=1)).sigmoid()
        return self.fc(F.max_pool2d(x * attention, 16).view(x.size(0), -1))


# --- activations, pads, arithmetic ----------------------------------------------------------------------------------


def activations(*layers: nn.Module) -> nn.Module:
    blocks = []
    for number, layer in enumerate(layers):
        blocks += [nn.Conv2d(3 if number == 0 else 8, 8, 3, padding=1), layer]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@network((3, 16, 16))
def activations_leaky_elu() -> nn.Module:
    return activations(nn.LeakyReLU(0.1, inplace=True), nn.ELU(), nn.SELU(), nn.CELU(0.5), nn.Softplus())


@network((3, 16, 16))
def activations_gelu_mish_silu() -> nn.Module:
    return activations(nn.GELU(), nn.Mish(), nn.SiLU(), nn.GELU(approximate="tanh"))


@network((3, 16, 16))
def activations_sigmoid_tanh_softmax() -> nn.Module:
    return activations(nn.Tanh(), nn.Sigmoid(), nn.Softmax(dim=1), nn.Hardtanh(), nn.Softmax2d())


@network((3, 16, 16))
def activations_hard() -> nn.Module:
    return activations(
        nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU6(), nn.LogSigmoid(), nn.Softsign(), nn.Threshold(0.0, 0.0)
    )


@network((3, 16, 16))
def activations_that_cut() -> nn.Module:
    return activations(nn.Hardshrink(0.2), nn.Softshrink(0.1), nn.Threshold(-0.3, -0.5), nn.Tanhshrink())


@network((3, 16, 16))
class SwishByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2, self.conv3 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = self.conv2(x * torch.sigmoid(x))
        x = self.conv3(x * F.relu6(x + 3) / 6)
        return (x * torch.tanh(F.softplus(x))).mean((2, 3))


@network((3, 20, 20))
class Pads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reflect, self.zero = nn.ReflectionPad2d(1), nn.ZeroPad2d((0, 1, 0, 1))
        self.replicate = nn.ReplicationPad2d((1, 0, 1, 0))
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.conv4 = nn.Conv2d(8, 4, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(self.reflect(x)))
        x = F.relu(self.conv2(self.zero(x)))
        x = F.relu(self.conv3(x))
        x = F.relu(self.conv3(F.pad(x, (2, 1, 0, 3), value=0.5)))
        x = self.replicate(x)
        return self.conv4(F.pad(x, [0, 1, 0, 1]))


class Conv2dSame(nn.Conv2d):
    """TensorFlow's SAME padding, computed from the shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ih, iw = x.size()[-2:]
        kh, kw = self.weight.size()[-2:]
        oh, ow = math.ceil(ih / self.stride[0]), math.ceil(iw / self.stride[1])
        pad_h = max((oh - 1) * self.stride[0] + (kh - 1) * self.dilation[0] + 1 - ih, 0)
        pad_w = max((ow - 1) * self.stride[1] + (kw - 1) * self.dilation[1] + 1 - iw, 0)
        if pad_h > 0 or pad_w > 0:
            x = F.pad(x, [pad_w // 2, pad_w - pad_w // 2, pad_h // 2, pad_h - pad_h // 2])
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@network((3, 33, 32))
class DynamicSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Conv2dSame(3, 8, 3, 2), Conv2dSame(8, 8, 5, 2, groups=8), Conv2dSame(8, 8, 3, 1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))))
        return self.fc(x.mean(dim=[-2, -1]))


@network((3, 16, 16))
class ScalarArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.4]).view(1, 3, 1, 1))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.conv, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * 255.0 / 255 - self.mean) / self.std
        x = 2 * x - 1
        x = 0.5 + self.conv(x)
        gate = torch.sigmoid(x)
        x = x * gate + (1 - gate) * 0.25
        x = -x.sub(0.1).mul(other=2.0).add_(1, alpha=0.5)
        x = self.conv2(1.0 / (1 + x.abs())) * self.scale
        return torch.rsub(x, 1).clamp_min(0).square().add(1e-3).sqrt()


# --- norms ----------------------------------------------------------------------------------------------------------


@network((3, 24, 24))
class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.gn = nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16)
        self.c2, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.c3, self.plain = nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16)
        self.ln, self.fc = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.gn(self.c1(x)))
        x = F.relu(self.norm(self.c2(x)))
        x = F.relu(self.plain(self.c3(x)))
        return self.fc(self.ln(x.mean((2, 3))))


@network((20,))
class MlpLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, 16),
            nn.LayerNorm(16),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
        )
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.net(x))


@network((3, 24, 24))
class LayerScaleNet(nn.Module):
    """ConvNeXt's block: channels last inside, layer scale, stochastic depth."""

    class Block(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.dw, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim, eps=1e-6)
            self.up, self.act, self.down = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
            self.gamma = nn.Parameter(1e-1 * torch.ones(dim))

        def drop_path(self, x: torch.Tensor, p: float = 0.2) -> torch.Tensor:
            if not self.training:
                return x
            keep = 1 - p
            mask = keep + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
            return x.div(keep) * mask.floor_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.dw(x).permute(0, 2, 3, 1))
            y = self.gamma * self.down(self.act(self.up(y)))
            return x + self.drop_path(y.permute(0, 3, 1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 12, 4, 4), nn.Sequential(self.Block(12), self.Block(12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


@network((3, 32, 32))
class BiFpn(nn.Module):
    """Weighted feature fusion: the weights are parameters through a ReLU and a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv_bn(3, 8, s=2), conv_bn(8, 8, s=2), conv_bn(8, 8, s=2)
        self.w1, self.w2 = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor([1.0, 0.5, 0.25]))
        self.fuse1, self.fuse2, self.eps = conv_bn(8, 8), conv_bn(8, 8), 1e-4

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p1 = self.a(x)
        p2 = self.b(p1)
        p3 = self.c(p2)
        w = F.relu(self.w1)
        w = w / (torch.sum(w, dim=0) + self.eps)
        p2_td = self.fuse1(w[0] * p2 + w[1] * F.interpolate(p3, scale_factor=2))
        v = torch.softmax(self.w2, 0)
        out = self.fuse2(v[0] * p2 + v[1] * p2_td + v[2] * F.max_pool2d(p1, 3, 2, 1))
        return p1, out, p3


class WSConv2d(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        mean = w.mean(dim=[1, 2, 3], keepdim=True)
        std = w.std(dim=[1, 2, 3], keepdim=True) + 1e-5
        return F.conv2d(x, (w - mean) / std, self.bias, self.stride, self.padding, self.dilation, self.groups)


@network((3, 24, 24))
class WeightStandardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n1 = WSConv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.c2, self.n2 = WSConv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.n1(self.c1(x)))
        return self.fc(F.relu(self.n2(self.c2(x))).mean((2, 3)))


@network((8, 20))
class WeightNormed(nn.Module):
    """Both weight norms of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))
        self.c2 = torch.nn.utils.weight_norm(nn.Conv1d(8, 8, 3, padding=1))
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).mean(-1))


# --- pooling, slicing -----------------------------------------------------------------------------------------------


@network((10, 24))
class StatisticsPooling(nn.Module):
    """x-vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(10, 16, 5), nn.Conv1d(16, 16, 3, dilation=2)
        self.fc = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.c2(torch.relu(self.c1(x))))
        mean, std = torch.mean(x, dim=2), torch.std(x, dim=2)
        return self.fc(torch.cat((mean, std, x.max(dim=2)[0]), dim=1))


@network((10, 24))
class StatisticsByVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.fc = nn.Conv1d(10, 16, 5), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.c1(x))
        mean = x.mean(-1, keepdim=True)
        std = ((x - mean) ** 2).mean(-1).add(1e-5).sqrt()
        return self.fc(torch.cat((mean.squeeze(-1), std), 1))


@network((3, 32, 32))
class GlobalPools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = conv_bn(3, 8, s=2), nn.Linear(24, 4)
        self.pool = nn.AvgPool2d(3, 2, 1, count_include_pad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        return self.fc(torch.cat([x.mean(-1).mean(-1), x.amax((2, 3)), x.sum((2, 3)) / 64], 1))


@network((3, 32, 32))
class Focus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = conv_bn(12, 8, act=nn.SiLU()), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        return self.fc(self.conv(x).mean((2, 3)))


@network((3, 32, 32))
class Ghost(nn.Module):
    class Module(nn.Module):
        def __init__(self, c_in: int, c_out: int) -> None:
            super().__init__()
            self.oup, half = c_out, math.ceil(c_out / 2)
            self.primary, self.cheap = conv_bn(c_in, half, 1), conv_bn(half, half, groups=half)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x1 = self.primary(x)
            return torch.cat([x1, self.cheap(x1)], dim=1)[:, : self.oup, :, :]

    def __init__(self) -> None:
        super().__init__()
        self.net, self.fc = nn.Sequential(self.Module(3, 9), nn.MaxPool2d(2), self.Module(9, 15)), nn.Linear(15, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.net(x).mean((2, 3)))


@network((3, 32, 32))
class ResNetOptionA(nn.Module):
    """CIFAR's shortcut: every second pixel, channels padded with zeros."""

    class Block(nn.Module):
        def __init__(self, c_in: int, c_out: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
            self.conv2, self.bn2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
            self.extra = (c_out - c_in) // 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            if out.shape[1] != x.shape[1]:
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra), "constant", 0)
            out += x
            return F.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.blocks, self.fc = nn.Sequential(self.Block(8, 8, 1), self.Block(8, 16, 2)), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x))
        return self.fc(F.avg_pool2d(x, x.size()[3]).view(x.size(0), -1))


@network((3, 16, 16))
class Pieces(nn.Module):
    """split, chunk, unbind, stack, roll, flip, and slices written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        a, b, c = x.split([2, 4, 6], dim=1)
        d, e = c.chunk(2, dim=1)
        stacked = torch.stack([d, e], dim=2).flatten(1, 2)
        y = torch.cat((b, a, stacked), dim=1).clone()
        y[:, :4] = F.relu(y[:, :4])
        y[:, 4:].mul_(0.5)
        left, right = torch.roll(y, shifts=(1, -2), dims=(2, 3)), y.flip(3)
        first, *_ = y.unbind(dim=3)
        return self.fc((left + right).mean((2, 3)) + first.amax(-1))


# --- functional forms, subclasses, optional arguments ---------------------------------------------------------------


@network((3, 24, 24))
class Functional(nn.Module):
    """Batch norm, linear, convolution and dropout without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.offset = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2), nn.Parameter(torch.zeros(8))
        self.gamma, self.beta = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.matrix = nn.Parameter(torch.randn(8, 4) * 0.2)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, self.kernel, self.offset, stride=2, padding=1)
        x = F.batch_norm(x, self.running_mean, self.running_var, self.gamma, self.beta, training=self.training)
        x = F.relu(x, inplace=True)
        x = F.dropout(x, p=0.2, training=self.training)
        x = F.adaptive_avg_pool2d(x, (1, 1)).flatten(1) @ self.matrix
        x = torch.addmm(self.linear.bias, x, self.linear.weight.t())
        return F.linear(F.hardswish(x), self.linear.weight, bias=self.linear.bias)


class ConvAct(nn.Conv2d):
    """A convolution with a switch of its own."""

    def __init__(self, *args: Any, activate: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activate = activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return F.relu(x) if self.activate else x


class BatchNormAct(nn.BatchNorm2d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 4, f"expected 4D input (got {x.ndim}D input)"
        return self.act(self.drop(super().forward(x)))


class NoisyLinear(nn.Linear):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(c_in, c_out, bias=True)


@network((3, 24, 24))
class Subclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2 = ConvAct(3, 8, 3, stride=2), ConvAct(8, 8, 3, activate=False, bias=False)
        self.bn, self.fc = BatchNormAct(8), NoisyLinear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bn(self.conv2(self.conv(x))).mean((2, 3)))


@network((3, 24, 24))
class OptionalArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.extra, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        x = F.relu(self.conv(x)).mean((2, 3)) * scale
        if condition is not None:
            x = x + self.extra(condition)
        return self.fc(x)


@network((3, 24, 24), (5,))
class OptionalArgumentGiven(OptionalArgument):
    pass


@network((3, 24, 24))
class AwkwardNames(nn.Module):
    """Layers called like functions; one called twice; a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.cat, self.add = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.output = nn.Linear(8, 4)
        self.input.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.add(self.cat(self.input(x)))
        x = torch.add(input=x, other=self.cat(x))
        return self.output(torch.mean(x, axis=(2, 3)))


@network((3, 24, 24))
class ShapeBranches(nn.Module):
    """Decisions taken from shapes; positions computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.project, self.fc = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(10, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        b, c, h, w = x.shape
        if h > 8 and c == 8:
            rows = torch.linspace(-1, 1, h).view(1, 1, h, 1).expand(b, 1, h, w)
            columns = torch.linspace(-1, 1, w).view(1, 1, 1, w).expand(b, 1, h, w)
            x = self.project(torch.cat([x, rows, columns], dim=1))
        while x.shape[-1] > 4:
            x = F.max_pool2d(x, 2)
        return self.fc(x.flatten(2).mean(2))


@network((3, 24, 24))
def bare_convolution() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1)


@network((12, 10))
def bare_linear() -> nn.Module:
    return nn.Linear(10, 4)


@network((3, 24, 24))
class TiedWeights(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, and two layers that share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.a, self.b = nn.Linear(3 * 24 * 24, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.relu(self.encode(torch.flatten(x, 1)))
        z = torch.relu(self.b(torch.relu(self.a(z))))
        return F.linear(z, self.encode.weight.t()).view_as(x)


@network((8, 1, 40))
class TemporalShift(nn.Module):
    """TSM: a part of the channels comes from the next frame, a part from the one before, zeros at the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.fc = nn.Conv1d(1, 16, 9, 4), nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 4)

    @staticmethod
    def shift(x: torch.Tensor, frames: int, fold: int) -> torch.Tensor:
        x = x.view(-1, frames, *x.shape[1:])
        out = torch.zeros_like(x)
        out[:, :-1, :fold] = x[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
        return out.flatten(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = x.shape[1]
        y = F.relu(self.stem(x.flatten(0, 1)))
        y = y + F.relu(self.mix(self.shift(y, frames, 2)))
        return self.fc(y.mean(-1)).unflatten(0, (-1, frames)).mean(1)


# --- functions of one value that compare it ---------------------------------------------------------------------------


@network((3, 16, 16))
class BinaryGates(nn.Module):
    """Signs and gates with straight-through gradients, ternary values, a mask of one tensor on another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.gate, self.fc = nn.Linear(8, 8), nn.Linear(8, 3)

    @staticmethod
    def binary(x: torch.Tensor) -> torch.Tensor:
        sign, slope = torch.where(x >= 0, 1.0, -1.0), x.clamp(-1, 1)
        return sign.detach() - slope.detach() + slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.binary(self.first(x)))
        soft = torch.sigmoid(self.gate(x.mean((2, 3))))
        x = x * ((soft > 0.5).float() - soft.detach() + soft)[:, :, None, None]
        y = self.third(x)
        ternary = torch.where(y > 0.5, 1.0, torch.where(y < -0.5, -1.0, 0.0))
        y = torch.where(y.abs() < 0.5, y * 0.1, ternary) + F.relu(y - 0.2)
        return self.fc((y * (x > 0)).amax((2, 3)))


@network((8, 4, 4))
class SoftThresholds(nn.Module):
    """Unrolled sparse coding, the thresholds written out in two ways, and a Huber loss's function."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mix = nn.Conv2d(8, 12, 1, bias=False), nn.Conv2d(12, 12, 1, bias=False)
        self.decode = nn.Conv2d(12, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b = self.encode(x)
        z = torch.sign(b) * torch.clamp(b.abs() - 0.1, min=0)
        for _ in range(2):
            u = b + self.mix(z)
            z = (u - 0.1) * (u > 0.1) + (u + 0.1) * (u < -0.1)
        r = self.decode(z) - x
        return self.decode(z), torch.where(r.abs() < 1, 0.5 * r**2, r.abs() - 0.5).mean((1, 2, 3))


@network((3, 12, 12))
class Splines(nn.Module):
    """A value as several basis functions of it: steps and hats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        steps = [((x >= low) & (x < low + 0.7)).to(x.dtype) for low in (-1.0, -0.3)]
        hats = [torch.relu(1 - (x - center).abs() / 0.7) for center in (0.4, 1.1)]
        return self.out(torch.cat(steps + hats, 1)).tanh()


@network((3, 16, 16))
class Maxout(nn.Module):
    """Values written at places and by masks, slopes of negative values that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 24, 3, padding=1), nn.Linear(8, 3)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = x.view(-1, 3, 8, *x.shape[2:]).max(1)[0]
        x = torch.where(x > 0, x, x * self.slopes.view(1, -1, 1, 1))
        y = x.clone()
        y[y > 3] = 3.0
        y[:, 0] = 0
        y[..., ::2, :] = y[..., ::2, :].neg()
        return self.fc(F.adaptive_max_pool2d(y, 1).flatten(1))


@network((5, 8))
class LearnedMemory(nn.Module):
    """Attention over a memory that is a parameter, with weights and a zero beside it: heads folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(4, 8))
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.memory.unsqueeze(0).repeat(x.shape[0], 1, 1)
        context, weights = self.attend(x, memory, memory)
        return self.fc(x + context), weights


@network((3, 16, 16))
class GroupGains(nn.Module):
    """Groups of channels folded into the batch, a gain for each, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shared, self.out = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.register_buffer("gain", torch.tensor([0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        b, c, h, w = x.shape
        y = F.relu(self.shared(x.reshape(b * 2, c // 2, h, w))) * self.gain.repeat(b).view(-1, 1, 1, 1)
        y = y.reshape(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.out(torch.roll(y, 1, 1) + x)
