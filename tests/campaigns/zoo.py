# SPDX-License-Identifier: Apache-2.0
"""The networks of networks.txt, built from torchvision and timm with random weights.

model, examples = builders()["timm lcnet_050"]()
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIST = Path(__file__).with_name("networks.txt")
# Libraries of operators, which last as long as the object.
KEPT: list[Any] = []


@functools.cache
def torchvision() -> Any:
    """torchvision, also where its compiled operators were built for another PyTorch: no network here calls them."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)
        return importlib.import_module("torchvision")


class Chosen(nn.Module):
    """Modules one after the other; the last ones see all of what those before gave."""

    def __init__(self, *layers: nn.Module, key: str = "") -> None:
        super().__init__()
        self.layers, self.key = nn.ModuleList(layers), key

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x[self.key] if isinstance(x, dict) and self.key else x)
        return x


class BackboneHead(nn.Module):
    """A detector's maps through its head: raw boxes and classes of every level."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(list(self.backbone(x).values()))


def classifier(name: str, size: int) -> nn.Module:
    models = torchvision().models
    if name == "vit_tiny":
        return models.VisionTransformer(size, 16, 4, 3, 96, 192, num_classes=10)
    base = name.removesuffix("_noaux")
    options: dict[str, Any] = {}
    if base in ("googlenet", "inception_v3"):
        options = {"init_weights": False, "aux_logits": base == name}
        if base == "googlenet":
            options["transform_input"] = False
    if base == "maxvit_t":
        options = {"input_size": (size, size)}
    return models.get_model(base, weights=None, **options)


def detector(name: str) -> nn.Module:
    models = torchvision().models
    options = {"weights": None, "weights_backbone": None}
    if name == "lraspp_core_no_interpolate":
        whole = models.segmentation.lraspp_mobilenet_v3_large(**options)
        return Chosen(whole.backbone, whole.classifier)
    if name in ("deeplab_core_no_interpolate", "fcn_core_no_interpolate"):
        segmentation = models.segmentation
        build = segmentation.deeplabv3_mobilenet_v3_large if name[0] == "d" else segmentation.fcn_resnet50
        whole = build(**options)
        return Chosen(whole.backbone, whole.classifier, key="out")
    if name.startswith("ssdlite320"):
        whole = models.detection.ssdlite320_mobilenet_v3_large(**options)
        return BackboneHead(whole.backbone, whole.head) if name.endswith("_head") else whole.backbone
    if name.startswith("retinanet"):
        backbone = models.detection.backbone_utils.resnet_fpn_backbone(
            backbone_name="resnet18", weights=None, trainable_layers=5
        )
        if not name.endswith("_head"):
            return backbone
        head = models.detection.retinanet.RetinaNetHead(backbone.out_channels, num_anchors=9, num_classes=10)
        return BackboneHead(backbone, head)
    return models.get_model(name, **options)


def timm_model(name: str, size: int) -> nn.Module:
    torchvision()
    import timm
    from timm.utils.model import reparameterize_model

    base = name.removesuffix("+reparam")
    try:
        model = timm.create_model(base, pretrained=False, num_classes=10, img_size=size)
    except TypeError:
        model = timm.create_model(base, pretrained=False, num_classes=10)
    return reparameterize_model(model) if base != name else model


def build(origin: str, name: str, size: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if origin == "torchvision":
        model = classifier(name, size)
    elif origin == "timm":
        model = timm_model(name, size)
    else:
        model = detector(name)
    return model.train(), (torch.rand(2, 3, size, size),)


def builders() -> dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]]:
    """For each line of the list a function that gives a model and its arguments."""
    networks = {}
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            origin, name, size = line.split()
            networks[f"{origin} {name}"] = functools.partial(build, origin, name, int(size))
    return networks
