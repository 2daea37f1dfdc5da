# SPDX-License-Identifier: Apache-2.0
"""Networks of keras_hub with random weights, as its presets build them in small, on the backend of KERAS_BACKEND.

row = end_to_end(networks()["keras_hub GPT2"](), folder)
"""

from __future__ import annotations

import functools
import importlib
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np

Built = tuple[Any, Any]
PROFILES = ("xnnpack-x86", "reference")
_WORDS = 8

_TEXT: dict[str, Any] = {"vocabulary_size": 50, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
                         "intermediate_dim": 32}  # fmt: skip
_PLACED: dict[str, Any] = {**_TEXT, "max_sequence_length": _WORDS}
_GROUPED: dict[str, Any] = {**{name: value for name, value in _TEXT.items() if name != "num_heads"},
                            "num_query_heads": 2, "num_key_value_heads": 1}  # fmt: skip
# Name: settings, whether it takes segments, too.
TEXTS: dict[str, tuple[dict[str, Any], bool]] = {
    "Albert": ({**_PLACED, "embedding_dim": 8}, True),
    "Bert": (_PLACED, True),
    "DistilBert": (_PLACED, False),
    "Electra": ({**{("vocab_size" if name == "vocabulary_size" else name): value for name, value in _PLACED.items()},
                 "embedding_dim": 16}, True),
    "DebertaV3": ({**_PLACED, "bucket_size": 8}, False),
    "Roberta": (_PLACED, False),
    "GPT2": (_PLACED, False),
    "OPT": (_PLACED, False),
    "Bloom": (_TEXT, False),
    "GPTNeoX": (_PLACED, False),
    "Falcon": ({**{("num_attention_heads" if name == "num_heads" else name): value for name, value in _TEXT.items()}},
               False),
    "Llama": (_GROUPED, False),
    "Gemma": ({**_GROUPED, "head_dim": 8}, False),
    "Mistral": (_GROUPED, False),
    "Phi3": (_GROUPED, False),
    "Qwen": (_GROUPED, False),
}  # fmt: skip

_SIDE = 32
_IMAGE = (_SIDE, _SIDE, 3)
_VIT: dict[str, Any] = {"image_shape": _IMAGE, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTBackbone", {**_VIT, "patch_size": (8, 8), "mlp_dim": 32}),
    "DeiT": ("DeiTBackbone", {**_VIT, "patch_size": (8, 8), "intermediate_dim": 32}),
    "DINOv2": ("DINOV2Backbone", {**_VIT, "intermediate_dim": 32, "position_embedding_shape": _IMAGE,
                                  "use_mask_token": False}),
    "ResNet": ("ResNetBackbone", {"input_conv_filters": [64], "input_conv_kernel_sizes": [7],
                                  "stackwise_num_filters": [64, 64], "stackwise_num_blocks": [1, 1],
                                  "stackwise_num_strides": [1, 2], "block_type": "basic_block",
                                  "image_shape": _IMAGE}),
    "ResNet, bottleneck, version 2": ("ResNetBackbone", {
        "input_conv_filters": [64], "input_conv_kernel_sizes": [7], "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1], "stackwise_num_strides": [1, 2], "block_type": "bottleneck_block",
        "use_pre_activation": True, "image_shape": _IMAGE}),
    "DenseNet": ("DenseNetBackbone", {"stackwise_num_repeats": [2, 2, 2], "growth_rate": 4, "image_shape": _IMAGE}),
    "CSPDarkNet": ("CSPNetBackbone", {"stem_filters": 8, "stem_kernel_size": 3, "stem_strides": 1,
                                      "stackwise_depth": [1, 2], "stackwise_strides": [2, 2],
                                      "stackwise_num_filters": [8, 16], "stage_type": "dark",
                                      "block_type": "dark_block",
                                      "image_shape": _IMAGE}),
    "VGG": ("VGGBackbone", {"stackwise_num_repeats": [1, 1, 1], "stackwise_num_filters": [8, 8, 16],
                            "image_shape": _IMAGE}),
    "MiT": ("MiTBackbone", {"layerwise_depths": [1, 1], "num_layers": 2, "layerwise_num_heads": [1, 2],
                            "layerwise_sr_ratios": [2, 1], "max_drop_path_rate": 0.1, "layerwise_patch_sizes": [7, 3],
                            "layerwise_strides": [4, 2], "hidden_dims": [8, 16], "image_shape": _IMAGE}),
    "Xception": ("XceptionBackbone", {"stackwise_conv_filters": [[8, 16], [16, 24], [32, 32]],
                                      "stackwise_pooling": [True, True, False], "image_shape": _IMAGE}),
    "Swin": ("SwinTransformerBackbone", {"image_shape": _IMAGE, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                                         "window_size": 4}),
    "EfficientNet": ("EfficientNetBackbone", {
        "stackwise_kernel_sizes": [3, 3], "stackwise_num_repeats": [1, 2], "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 16], "stackwise_expansion_ratios": [1, 4],
        "stackwise_squeeze_and_excite_ratios": [0.25, 0.25], "stackwise_strides": [1, 2],
        "stackwise_block_types": ["v1", "v1"], "stackwise_width_coefficients": [1.0] * 2,
        "stackwise_depth_coefficients": [1.0] * 2, "num_features": 32, "input_shape": _IMAGE}),
    "EfficientNet, version 2": ("EfficientNetBackbone", {
        "stackwise_kernel_sizes": [3, 3], "stackwise_num_repeats": [1, 2], "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 16], "stackwise_expansion_ratios": [1, 4],
        "stackwise_squeeze_and_excite_ratios": [0, 0.25], "stackwise_strides": [1, 2],
        "stackwise_block_types": ["fused", "unfused"], "stackwise_width_coefficients": [1.0] * 2,
        "stackwise_depth_coefficients": [1.0] * 2, "num_features": 32, "input_shape": _IMAGE}),
    "MobileNet": ("MobileNetBackbone", {
        "stackwise_expansion": [[16], [24, 24]], "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[8], [8, 16]], "stackwise_kernel_size": [[3], [5, 5]],
        "stackwise_num_strides": [[2], [2, 1]], "stackwise_se_ratio": [[None], [0.25, 0.25]],
        "stackwise_activation": [["relu"], ["hard_swish", "hard_swish"]],
        "stackwise_padding": [[1], [2, 2]], "output_num_filters": 32, "depthwise_filters": 8, "depthwise_stride": 2,
        "depthwise_residual": False, "last_layer_filter": 32, "squeeze_and_excite": 0.5, "image_shape": _IMAGE}),
    "CLIP vision": ("CLIPVisionEncoder", {**_VIT, "intermediate_dim": 32}),
    "SigLIP vision": ("SigLIPVisionEncoder", {**_VIT, "intermediate_dim": 32}),
}  # fmt: skip


def _hub() -> Any:
    return importlib.import_module("keras_hub")


def text(name: str) -> Built:
    settings, segments = TEXTS[name]
    model = getattr(_hub().models, f"{name}Backbone")(**settings)
    rng = np.random.default_rng(0)
    shown = np.ones((2, _WORDS), np.int32)
    shown[1, _WORDS // 2 :] = 0
    inputs = {"token_ids": rng.integers(1, 50, (2, _WORDS)).astype(np.int32), "padding_mask": shown}
    return model, {**inputs, "segment_ids": np.zeros_like(shown)} if segments else inputs


def _f_net() -> Built:
    model = _hub().models.FNetBackbone(vocabulary_size=50, num_layers=2, hidden_dim=16, intermediate_dim=32,
                                       max_sequence_length=_WORDS)  # fmt: skip
    _, inputs = text("Bert")
    return model, {name: inputs[name] for name in ("token_ids", "segment_ids")}


def _t5() -> Built:
    model = _hub().models.T5Backbone(**_TEXT)
    _, inputs = text("DistilBert")
    sides = ("encoder", "decoder")
    return model, {f"{side}_{name}": array for side in sides for name, array in inputs.items()}


def vision(name: str) -> Built:
    kind, settings = VISION[name]
    hub = _hub()
    try:
        builder = getattr(hub.models, kind)
    except AttributeError:
        module = {"CLIP": "clip.clip_vision_encoder", "SigL": "siglip.siglip_vision_encoder"}[kind[:4]]
        builder = getattr(importlib.import_module(f"keras_hub.src.models.{module}"), kind)
    return builder(**settings), np.random.default_rng(0).random((2, *_IMAGE), np.float32)


def _segmenter() -> Built:
    hub = _hub()
    encoder = hub.models.MiTBackbone(**VISION["MiT"][1])
    backbone = hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=16)
    model = hub.models.SegFormerImageSegmenter(backbone=backbone, num_classes=3)
    return model, np.random.default_rng(0).random((2, *_IMAGE), np.float32)


def _classifier() -> Built:
    hub = _hub()
    backbone = hub.models.ResNetBackbone(**VISION["ResNet"][1])
    model = hub.models.ImageClassifier(backbone=backbone, num_classes=3, preprocessor=None)
    return model, np.random.default_rng(0).random((2, *_IMAGE), np.float32)


def _text_classifier() -> Built:
    backbone, inputs = text("DistilBert")
    return _hub().models.DistilBertTextClassifier(backbone=backbone, num_classes=3, preprocessor=None), inputs


def _causal(name: str) -> Built:
    """A decoder of a fixed length, as it trains."""
    backbone, inputs = text(name)
    return getattr(_hub().models, f"{name}CausalLM")(backbone=backbone, preprocessor=None), inputs


def networks() -> dict[str, Callable[[], Built]]:
    """By package and name."""
    builders: dict[str, Callable[[], Built]] = {f"keras_hub {name}": functools.partial(text, name) for name in TEXTS}
    builders |= {f"keras_hub {name}": functools.partial(vision, name) for name in VISION}
    builders |= {f"keras_hub {name}, causal": functools.partial(_causal, name) for name in ("GPT2", "Llama")}
    return builders | {
        "keras_hub FNet": _f_net,
        "keras_hub T5": _t5,
        "keras_hub SegFormer's segmenter": _segmenter,
        "keras_hub ResNet's classifier": _classifier,
        "keras_hub DistilBert's classifier": _text_classifier,
    }


def end_to_end(built: Built, folder: Path, images: int = 2) -> dict[str, Any]:
    """As `run_zoo.end_to_end`. Refusals raise `UnsupportedOperator`."""
    import keras
    import torch

    from exactqat import deploy, qat
    from exactqat.deploy.lower import lower_with_layouts
    from exactqat.deploy.simulate import EXACT

    (model, example), began = built, time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = qat.keras.prepare(model, example=example)
    row: dict[str, Any] = {"prepare_seconds": round(time.process_time() - began, 1), "values": 0, "differing": 0}
    qat.keras.calibrate(prepared, [example])
    targets = keras.tree.map_structure(lambda y: np.full(y.shape, 0.1, np.float32), prepared(example))
    optimizer = keras.optimizers.SGD(1e-4, clipnorm=1.0)
    prepared.compile(optimizer, "mse")
    for frozen in (False, True):
        if frozen:
            qat.keras.freeze(prepared)
        if type(model).fit is keras.Model.fit:
            prepared.fit(example, targets, batch_size=2, epochs=1 if frozen else 2, verbose=0)
            continue
        # Tasks of keras_hub have a `fit` that reads words; their network trains in a loop of the user's.
        for _ in range(1 if frozen else 2):
            prepared.zero_grad()
            results = prepared(example, training=True)
            keras.losses.mean_squared_error(targets, results).mean().backward()
            variables = prepared.trainable_variables
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in variables], variables)
    graph, _ = lower_with_layouts(prepared)
    rng = np.random.default_rng(0)
    codes = {}
    for name in graph.inputs:
        tensor = graph.tensors[name]
        lowest, highest = graph.limits(name)
        drawn = rng.integers(lowest, highest + 1, (images * tensor.shape[0], *tensor.shape[1:]))
        codes[name] = drawn.astype(tensor.dtype)
    path = deploy.write_tflite(graph, folder / "model.tflite")
    for profile in PROFILES:
        for operator in deploy.verify(graph, path, codes, profile, batch_size=images).operators:
            row["values"] += operator.values
            row["differing"] += operator.differing if (operator.kind, profile) in EXACT else 0
    assert deploy.verify(graph, path, model=prepared, data=example).equal, "the frozen network is not the file"
    return row
