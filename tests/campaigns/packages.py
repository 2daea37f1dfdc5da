# SPDX-License-Identifier: Apache-2.0
"""Networks of public packages with random weights, as a user builds them: nothing is downloaded.

entry = networks()["ultralytics yolo11n-seg"]
model, examples = entry.build()
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import packages_more
import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]
# Of images; the networks take any multiple of 32.
SIZE = 64
WORDS = 16


@dataclass(frozen=True)
class Entry:
    """
    Attributes:
        build: the model as its package makes it, and its arguments.
        help: the line that a user adds if it is refused as it is; empty: there is none.
        helped: what that line makes of model and arguments.
    """

    build: Callable[[], Built]
    help: str = ""
    helped: Callable[[nn.Module, tuple[Any, ...]], Built] | None = None


# --- Ultralytics ------------------------------------------------------------------------------------------------------

_YOLO = {"": "Detection", "seg": "Segmentation", "pose": "Pose", "obb": "OBB", "cls": "Classification"}


def yolo(name: str, form: str) -> Built:
    """form: "plain", "end2end", or "export" as Ultralytics sets its heads before it writes a file."""
    from ultralytics.nn import tasks

    model = getattr(tasks, f"{_YOLO[name.partition('-')[2]]}Model")(f"{name}.yaml", verbose=False)
    if form == "export":
        for module in model.modules():
            if hasattr(module, "export"):
                module.export, module.format = True, "tflite"
    model.end2end = form == "end2end"
    return model.train(), (torch.rand(2, 3, SIZE, SIZE),)


def _all_boxes(model: Any, examples: tuple[Any, ...]) -> Built:
    model.end2end = False
    return model, examples


def _yolos() -> dict[str, Entry]:
    entries = {}
    for version in ("yolov8n", "yolo11n", "yolo26n"):
        for kind in _YOLO:
            name = "-".join(filter(None, (version, kind)))
            for form in ("plain",) if kind == "cls" else ("plain", "export"):
                build = functools.partial(yolo, name, form)
                # Its training returns what its losses need, not the boxes of evaluation.
                entry = Entry(build, "model.eval()", _evaluating)
                entries[f"ultralytics {name}{', export form' if form == 'export' else ''}"] = entry
    # Its head chooses the best boxes by topk.
    choosing = Entry(functools.partial(yolo, "yolo26n", "end2end"), "model.end2end = False", _all_boxes)
    return {**entries, "ultralytics yolo26n, end2end": choosing}


# --- transformers -----------------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertModel", {**_SMALL, "intermediate_size": 64}),
    "DistilBert": ("DistilBertModel", {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "MobileBert": (
        "MobileBertModel",
        {**_SMALL, "embedding_size": 32, "intermediate_size": 64, "intra_bottleneck_size": 32},
    ),
    "T5": (
        "T5EncoderModel",
        {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    ),
    # Decoders of a fixed length, without a cache.
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": WORDS}),
    "Llama": (
        "LlamaForCausalLM",
        {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 1, "max_position_embeddings": WORDS},
    ),
}


class Text(nn.Module):
    """A text network as it is called, without what it keeps of the words for its next call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(input_ids, attention_mask=attention_mask)[0]


def text(name: str, masked: bool) -> Built:
    transformers = packages_more.library()
    kind, settings = _TEXT[name]
    config = getattr(transformers, f"{name}Config")(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    words = torch.randint(0, 100, (2, WORDS))
    mask = torch.ones(2, WORDS, dtype=torch.long)
    mask[1, WORDS // 2 :] = 0
    return Text(getattr(transformers, kind)(config)).train(), (words, mask) if masked else (words,)


def detr() -> Built:
    transformers = packages_more.library()
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, num_queries=5,
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config).train(), (torch.rand(2, 3, SIZE, SIZE),)


def superpoint() -> Built:
    transformers = packages_more.library()
    config = transformers.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, descriptor_decoder_dim=16
    )
    return transformers.SuperPointForKeypointDetection(config).train(), (torch.rand(2, 3, SIZE, SIZE),)


def _evaluating(model: nn.Module, examples: tuple[Any, ...]) -> Built:
    return model.eval(), examples


def networks() -> dict[str, Entry]:
    """By package and name."""
    texts = {
        f"transformers {name}{', attention_mask' if masked else ''}": Entry(functools.partial(text, name, masked))
        for name in _TEXT
        for masked in (False, True)
    }
    others = {
        "transformers Detr": Entry(detr, "model.eval()", _evaluating),
        "transformers SuperPoint": Entry(superpoint),
    }
    help_ = {
        "Wav2Vec2": ("model.eval()", _evaluating),
        "Conformer": ("its layers one after the other, without lengths", packages_more.without_lengths),
    }
    more = {
        name: Entry(build, *next((change for word, change in help_.items() if word in name), ()))
        for name, build in packages_more.builders().items()
    }
    return {**_yolos(), **texts, **others, **more}
