# SPDX-License-Identifier: Apache-2.0
"""Further networks of public packages for `packages.networks`: vision and sound of transformers, and other packages.

Small configurations with random weights. More than the list of the issue: neighbours from the same packages, too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import zoo
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]

# --- transformers -----------------------------------------------------------------------------------------------------

_WIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_VIT: dict[str, Any] = {**_WIDE, "image_size": 32, "patch_size": 8}
_SMALL: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT: dict[str, Any] = {**_SMALL, "intermediate_size": 64}
_CAUSAL: dict[str, Any] = {**_TEXT, "max_position_embeddings": 16, "use_cache": False}
_IMAGE = (2, 3, 64, 64)
_SMALL_IMAGE = (2, 3, 32, 32)
_MOBILE: dict[str, Any] = {
    "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64], "num_attention_heads": 2
}  # fmt: skip
_STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}

# Name: model, configuration, its settings, the shape of what is given (of words: integers).
_MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "ViT": ("ViTForImageClassification", "ViTConfig", _VIT, _SMALL_IMAGE),
    "DeiT": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", _VIT, _SMALL_IMAGE),
    "MobileViT": ("MobileViTModel", "MobileViTConfig", {**_MOBILE, "image_size": 64}, _IMAGE),
    "MobileViTV2": ("MobileViTV2Model", "MobileViTV2Config", {"image_size": 64, "width_multiplier": 0.5}, _IMAGE),
    "MobileNetV1": ("MobileNetV1Model", "MobileNetV1Config", {"image_size": 64, "depth_multiplier": 0.25}, _IMAGE),
    "MobileNetV2": ("MobileNetV2Model", "MobileNetV2Config", {"image_size": 64, "depth_multiplier": 0.35}, _IMAGE),
    "MobileNetV2 DeepLab": ("MobileNetV2ForSemanticSegmentation", "MobileNetV2Config",
                            {"image_size": 64, "depth_multiplier": 0.35}, _IMAGE),
    "Segformer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                  {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16,
                   "num_attention_heads": [1, 1, 2, 2]}, _IMAGE),
    "YOLOS": ("YolosForObjectDetection", "YolosConfig", {**_WIDE, "image_size": [32, 32], "patch_size": 8,
                                                         "num_detection_tokens": 5}, _SMALL_IMAGE),
    "CLIP vision": ("CLIPVisionModel", "CLIPVisionConfig", _VIT, _SMALL_IMAGE),
    "SigLIP vision": ("SiglipVisionModel", "SiglipVisionConfig", _VIT, _SMALL_IMAGE),
    "Dinov2": ("Dinov2Model", "Dinov2Config", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                                               "image_size": 32, "patch_size": 8}, _SMALL_IMAGE),
    "Beit": ("BeitModel", "BeitConfig", _VIT, _SMALL_IMAGE),
    "PVTv2": ("PvtV2Model", "PvtV2Config", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
                                            "num_attention_heads": [1, 1, 2, 2]}, _IMAGE),
    "PoolFormer": ("PoolFormerModel", "PoolFormerConfig", _STAGES, _IMAGE),
    "SwiftFormer": ("SwiftFormerModel", "SwiftFormerConfig", {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32]},
                    _IMAGE),
    "LeViT": ("LevitModel", "LevitConfig", {"image_size": 64, "hidden_sizes": [16, 24, 32],
                                            "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
                                            "key_dim": [8, 8, 8]}, _IMAGE),
    "FocalNet": ("FocalNetModel", "FocalNetConfig", {"image_size": 64, "embed_dim": 8, "depths": [1, 1, 1, 1],
                                                     "hidden_sizes": [8, 16, 32, 64]}, _IMAGE),
    "ConvNext": ("ConvNextModel", "ConvNextConfig", _STAGES, _IMAGE),
    "ConvNextV2": ("ConvNextV2Model", "ConvNextV2Config", _STAGES, _IMAGE),
    "Swin": ("SwinModel", "SwinConfig", {"image_size": 64, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                                         "window_size": 4}, _IMAGE),
    "Swinv2": ("Swinv2Model", "Swinv2Config", {"image_size": 64, "embed_dim": 8, "depths": [1, 1],
                                               "num_heads": [2, 2], "window_size": 4}, _IMAGE),
    "Swin2SR": ("Swin2SRForImageSuperResolution", "Swin2SRConfig",
                {"image_size": 16, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
                (2, 3, 16, 16)),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", {**_STAGES, "embedding_size": 8}, _IMAGE),
    "RegNet": ("RegNetModel", "RegNetConfig", {**_STAGES, "embedding_size": 8, "groups_width": 8}, _IMAGE),
    "EfficientNet": ("EfficientNetModel", "EfficientNetConfig", {"image_size": 64, "width_coefficient": 0.25,
                                                                 "depth_coefficient": 0.25, "hidden_dim": 320},
                     _IMAGE),
    "BiT": ("BitModel", "BitConfig", {**_STAGES, "embedding_size": 8, "num_groups": 4}, _IMAGE),
    "Cvt": ("CvtModel", "CvtConfig", {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]}, _IMAGE),
    "Vit MAE-like Ijepa": ("IJepaModel", "IJepaConfig", _VIT, _SMALL_IMAGE),
    "HGNetV2": ("HGNetV2ForImageClassification", "HGNetV2Config", {}, _IMAGE),
    "AST": ("ASTForAudioClassification", "ASTConfig", {**_WIDE, "num_mel_bins": 32, "max_length": 48}, (2, 48, 32)),
    "Wav2Vec2": ("Wav2Vec2Model", "Wav2Vec2Config", {**_WIDE, "conv_dim": [16, 16], "conv_stride": [5, 2],
                                                     "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
                                                     "num_conv_pos_embeddings": 8,
                                                     "num_conv_pos_embedding_groups": 2}, (2, 400)),
    "HiFiGAN": ("SpeechT5HifiGan", "SpeechT5HifiGanConfig", {"model_in_dim": 16, "upsample_initial_channel": 16,
                                                             "upsample_rates": [2, 2],
                                                             "upsample_kernel_sizes": [4, 4],
                                                             "resblock_kernel_sizes": [3],
                                                             "resblock_dilation_sizes": [[1, 3]]}, (2, 12, 16)),
    "Albert": ("AlbertModel", "AlbertConfig", {**_TEXT, "embedding_size": 16}, (2, 16)),
    "Electra": ("ElectraForSequenceClassification", "ElectraConfig", {**_TEXT, "embedding_size": 32}, (2, 16)),
    "Roberta": ("RobertaModel", "RobertaConfig", _TEXT, (2, 16)),
    "Bert classifier": ("BertForSequenceClassification", "BertConfig", _TEXT, (2, 16)),
    "DistilBert classifier": ("DistilBertForSequenceClassification", "DistilBertConfig",
                              {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, (2, 16)),
    "SqueezeBert": ("SqueezeBertModel", "SqueezeBertConfig", {**_TEXT, "embedding_size": 32, "q_groups": 2,
                                                              "k_groups": 2, "v_groups": 2,
                                                              "post_attention_groups": 1, "intermediate_groups": 2,
                                                              "output_groups": 2}, (2, 16)),
    "MPNet": ("MPNetModel", "MPNetConfig", _TEXT, (2, 16)),
    "ConvBert": ("ConvBertModel", "ConvBertConfig", {**_TEXT, "embedding_size": 32}, (2, 16)),
    "ModernBert": ("ModernBertModel", "ModernBertConfig", {**_TEXT, "pad_token_id": 0}, (2, 16)),
    "CLIP text": ("CLIPTextModel", "CLIPTextConfig", {**_CAUSAL, "eos_token_id": 99, "pad_token_id": 0}, (2, 16)),
    "SigLIP text": ("SiglipTextModel", "SiglipTextConfig", {**_TEXT, "max_position_embeddings": 16}, (2, 16)),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**_CAUSAL, "num_key_value_heads": 1}, (2, 16)),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_CAUSAL, "num_key_value_heads": 1}, (2, 16)),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**_CAUSAL, "num_key_value_heads": 1, "head_dim": 16}, (2, 16)),
    "Phi": ("PhiForCausalLM", "PhiConfig", _CAUSAL, (2, 16)),
    "OPT": ("OPTForCausalLM", "OPTConfig", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
                                            "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32,
                                            "max_position_embeddings": 16, "use_cache": False}, (2, 16)),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _CAUSAL, (2, 16)),
}  # fmt: skip
# Those that read words and may be given a mask, too.
_MASKED = ("Albert", "Electra", "Roberta", "Bert classifier", "DistilBert classifier", "MPNet", "ModernBert",
           "CLIP text", "SigLIP text", "Mistral", "Qwen2", "OPT")  # fmt: skip


class Called(nn.Module):
    """A network of transformers as it is called, with its first result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        result = self.model(source) if mask is None else self.model(source, attention_mask=mask)
        return result if isinstance(result, torch.Tensor) else result[0]


def library() -> Any:
    """transformers, which imports torchvision where that is there."""
    zoo.torchvision()
    return importlib.import_module("transformers")


def of_transformers(name: str, masked: bool = False) -> Built:
    transformers = library()
    model, config, settings, shape = _MODELS[name]
    network = getattr(transformers, model)(getattr(transformers, config)(**settings))
    words = len(shape) == 2 and "vocab_size" in settings
    source = torch.randint(2, 100, shape) if words else torch.rand(shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[1, shape[1] // 2 :] = 0
    return Called(network).train(), (source, mask) if masked else (source,)


def whisper() -> Built:
    transformers = library()
    config = transformers.WhisperConfig(d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
                                        decoder_layers=1, decoder_attention_heads=2, num_mel_bins=16,
                                        max_source_positions=20)  # fmt: skip
    return Called(transformers.WhisperModel(config).encoder).train(), (torch.rand(2, 16, 40),)


def dpt() -> Built:
    transformers = library()
    settings = {**_VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
    config = transformers.DPTConfig(**settings, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16)
    return Called(transformers.DPTForDepthEstimation(config)).train(), (torch.rand(_SMALL_IMAGE),)


def on_a_backbone(name: str) -> Built:
    """Networks that transformers configures by the configuration of another one."""
    transformers = library()
    if name == "DepthAnything":
        backbone = transformers.Dinov2Config(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=32,
                                             patch_size=8, out_features=["stage1", "stage2", "stage3", "stage4"],
                                             reshape_hidden_states=False)  # fmt: skip
        config = transformers.DepthAnythingConfig(backbone_config=backbone, patch_size=8, reassemble_hidden_size=32,
                                                  neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
                                                  head_hidden_size=8)  # fmt: skip
        return Called(transformers.DepthAnythingForDepthEstimation(config)).train(), (torch.rand(_SMALL_IMAGE),)
    if name == "UperNet":
        backbone = transformers.ConvNextConfig(**_STAGES, out_features=["stage1", "stage2", "stage3", "stage4"])
        config = transformers.UperNetConfig(backbone_config=backbone, hidden_size=16, auxiliary_in_channels=24,
                                            auxiliary_channels=8, pool_scales=[1, 2])  # fmt: skip
        return Called(transformers.UperNetForSemanticSegmentation(config)).train(), (torch.rand(_IMAGE),)
    backbone = transformers.VitPoseBackboneConfig(image_size=[64, 48], patch_size=[16, 16], hidden_size=32,
                                                  num_hidden_layers=2, num_attention_heads=2)  # fmt: skip
    config = transformers.VitPoseConfig(backbone_config=backbone)
    return Called(transformers.VitPoseForPoseEstimation(config)).train(), (torch.rand(2, 3, 64, 48),)


def mobile_clip() -> Built:
    zoo.torchvision()
    model = importlib.import_module("open_clip").create_model("MobileCLIP-S1")
    return model.visual.train(), (torch.rand(_IMAGE),)


def encodec() -> Built:
    transformers = library()
    config = transformers.EncodecConfig(num_filters=4, upsampling_ratios=[2, 2], hidden_size=16, num_lstm_layers=1)
    return transformers.EncodecModel(config).encoder.train(), (torch.rand(2, 1, 64),)


def rt_detr() -> Built:
    transformers = library()
    backbone = transformers.RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
                                               out_features=["stage2", "stage3", "stage4"])  # fmt: skip
    config = transformers.RTDetrConfig(backbone_config=backbone, encoder_hidden_dim=16, d_model=16, num_queries=5,
                                       encoder_in_channels=[8, 16, 16], encoder_ffn_dim=32, decoder_layers=1,
                                       decoder_in_channels=[16, 16, 16], decoder_ffn_dim=32,
                                       encoder_attention_heads=2, decoder_attention_heads=2,
                                       anchor_image_size=None)  # fmt: skip
    # As from_pretrained gives it.
    return transformers.RTDetrForObjectDetection(config).eval(), (torch.rand(_IMAGE),)


# --- other packages ---------------------------------------------------------------------------------------------------


def built(path: str, shape: tuple[int, ...], *args: Any, **settings: Any) -> Built:
    """A class or function by its path, called with these settings; what it makes is given a tensor of this shape."""
    zoo.torchvision()
    module, _, names = path.partition(":")
    make: Any = importlib.import_module(module)
    for name in names.split("."):
        make = getattr(make, name)
    return make(*args, **settings).train(), (torch.rand(shape),)


class Layers(nn.Module):
    """torchaudio's Conformer without lengths."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.conformer_layers = model.conformer_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        for layer in self.conformer_layers:
            x = layer(x, None)
        return x.transpose(0, 1)


def without_lengths(model: nn.Module, examples: tuple[Any, ...]) -> Built:
    return Layers(model).train(), examples[:1]


def lengths_of_conformer() -> Built:
    model, _ = built("torchaudio.models:Conformer", (2, 20, 16), 16, 2, 32, 2, 7)
    return model, (torch.rand(2, 20, 16), torch.tensor([20, 12]))


_SEGMENTED = {"encoder_weights": None, "classes": 3}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
OTHERS: dict[str, Callable[[], Built]] = {
    name: functools.partial(built, path, shape, *args, **settings)
    for name, path, shape, args, settings in [
        *((f"segmentation_models_pytorch {kind} {encoder}", f"segmentation_models_pytorch:{kind}", _IMAGE, (encoder,),
           _SEGMENTED)
          for kind, encoder in (("Unet", "mobilenet_v2"), ("FPN", "mobilenet_v2"), ("DeepLabV3Plus", "resnet18"),
                                ("Linknet", "resnet18"), ("PSPNet", "resnet18"), ("UnetPlusPlus", "resnet18"),
                                ("MAnet", "resnet18"), ("Segformer", "resnet18"))),
        ("segmentation_models_pytorch PAN resnet18", "segmentation_models_pytorch:PAN", (2, 3, 128, 128),
         ("resnet18",), _SEGMENTED),
        ("torchaudio ConvTasNet", "torchaudio.models:ConvTasNet", (2, 1, 256), (),
         {"enc_num_feats": 16, "msk_num_feats": 8, "msk_num_hidden_feats": 16, "msk_num_layers": 2,
          "msk_num_stacks": 1}),
        ("torchaudio Wav2Letter", "torchaudio.models:Wav2Letter", (2, 1, 160), (), {"num_classes": 8,
                                                                                   "input_type": "mfcc",
                                                                                   "num_features": 1}),
        ("torchaudio DeepSpeech", "torchaudio.models:DeepSpeech", (2, 1, 12, 16), (16,), {"n_hidden": 32,
                                                                                        "n_class": 8}),
        ("efficientnet_pytorch b0", "efficientnet_pytorch:EfficientNet.from_name", _IMAGE, ("efficientnet-b0",), {}),
        ("facenet_pytorch PNet", "facenet_pytorch.models.mtcnn:PNet", (2, 3, 24, 24), (), {"pretrained": False}),
        ("facenet_pytorch RNet", "facenet_pytorch.models.mtcnn:RNet", (2, 3, 24, 24), (), {"pretrained": False}),
        ("facenet_pytorch ONet", "facenet_pytorch.models.mtcnn:ONet", (2, 3, 48, 48), (), {"pretrained": False}),
        ("monai UNet", "monai.networks.nets:UNet", (2, 1, 32, 32), (), {**_FLAT, "channels": (8, 16, 24),
                                                                      "strides": (2, 2)}),
        ("monai UNet 3-D", "monai.networks.nets:UNet", (2, 1, 16, 16, 16), (),
         {**_FLAT, "spatial_dims": 3, "channels": (8, 16), "strides": (2,)}),
        ("monai SegResNet", "monai.networks.nets:SegResNet", (2, 1, 32, 32), (), {**_FLAT, "init_filters": 8}),
        ("monai BasicUNet", "monai.networks.nets:BasicUNet", (2, 1, 32, 32), (),
         {**_FLAT, "features": (8, 8, 16, 16, 24, 8)}),
        ("monai AttentionUnet", "monai.networks.nets:AttentionUnet", (2, 1, 32, 32), (),
         {**_FLAT, "channels": (8, 16, 24), "strides": (2, 2)}),
        ("monai UNETR", "monai.networks.nets:UNETR", (2, 1, 32, 32), (1, 2, (32, 32)),
         {"feature_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_heads": 4, "spatial_dims": 2}),
        ("monai SwinUNETR", "monai.networks.nets:SwinUNETR", (2, 1, 64, 64), (1, 2),
         {"feature_size": 12, "spatial_dims": 2}),
        ("monai DynUNet", "monai.networks.nets:DynUNet", (2, 1, 32, 32), (2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2)),
         {"filters": (8, 16, 24)}),
        ("monai MedNeXt", "monai.networks.nets:MedNeXt", (2, 1, 32, 32), (),
         {**_FLAT, "init_filters": 8, "kernel_size": 3, "blocks_down": (1, 1), "blocks_bottleneck": 1,
          "blocks_up": (1, 1)}),
        ("monai DenseNet121", "monai.networks.nets:DenseNet121", (2, 1, 32, 32), (2, 1, 2), {"init_features": 8,
                                                                                            "growth_rate": 4}),
        ("monai ViT", "monai.networks.nets:ViT", (2, 1, 32, 32), (1, (32, 32), (8, 8)),
         {"hidden_size": 32, "mlp_dim": 64, "num_layers": 2, "num_heads": 4, "spatial_dims": 2,
          "classification": True}),
        ("kornia XFeat", "kornia.feature:XFeatModel", (1, 1, 64, 64), (), {}),
        ("kornia SOSNet", "kornia.feature:SOSNet", (2, 1, 32, 32), (), {"pretrained": False}),
        ("kornia HyNet", "kornia.feature:HyNet", (2, 1, 32, 32), (), {"pretrained": False}),
        ("kornia TFeat", "kornia.feature:TFeat", (2, 1, 32, 32), (), {"pretrained": False}),
        ("kornia HardNet", "kornia.feature:HardNet", (2, 1, 32, 32), (), {"pretrained": False}),
        ("kornia KeyNet", "kornia.feature:KeyNet", (2, 1, 32, 32), (), {"pretrained": False}),
        ("kornia DexiNed", "kornia.models.dexined:DexiNed", (1, 3, 64, 64), (), {"pretrained": False}),
        ("kornia DISK", "kornia.feature:DISK", (1, 3, 32, 32), (), {}),
        ("kornia SmallSR", "kornia.models.small_sr:SmallSRNet", (2, 1, 16, 16), (3,), {"pretrained": False}),
        ("kornia RRDBNet", "kornia.models.rrdbnet:RRDBNet", (2, 3, 16, 16), (3, 3),
         {"num_feat": 8, "num_block": 1, "num_grow_ch": 4}),
        ("lightly resnet-9", "lightly.models:ResNetGenerator", (2, 3, 32, 32), ("resnet-9",), {}),
        ("lightly BarlowTwins head", "lightly.models.modules.heads:BarlowTwinsProjectionHead", (4, 32),
         (32, 64, 32), {}),
        ("lightly DINO head", "lightly.models.modules.heads:DINOProjectionHead", (4, 32), (32, 64, 16, 32), {}),
        *((f"pytorchcv {name}", "pytorchcv.model_provider:get_model", (2, 3, side, side), (name,),
           {"pretrained": False, **({"in_size": (side, side)} if sized else {})})
          for name, side, sized in (("bisenet_resnet18_celebamaskhq", 64, True), ("fastscnn_cityscapes", 64, True),
                                    ("lednet_cityscapes", 64, True), ("centernet_resnet18_voc", 64, True),
                                    ("lwopenpose2d_mobilenet_cmupan_coco", 64, True),
                                    ("simplepose_mobile_mobilenet_w1_coco", 64, True),
                                    ("mobilenetv3_small_w7d20", 224, False), ("shufflenetv2b_wd2", 224, False),
                                    ("proxylessnas_cpu", 224, False), ("igcv3_wd4", 224, False))),
    ]
}  # fmt: skip


def builders() -> dict[str, Callable[[], Built]]:
    """By package and name."""
    networks: dict[str, Callable[[], Built]] = {
        f"transformers {name}": functools.partial(of_transformers, name) for name in _MODELS
    }
    networks |= {
        f"transformers {name}, attention_mask": functools.partial(of_transformers, name, True) for name in _MASKED
    }
    networks |= {
        "transformers Whisper encoder": whisper,
        "transformers DPT": dpt,
        "transformers EnCodec encoder": encodec,
        **{
            f"transformers {name}": functools.partial(on_a_backbone, name)
            for name in ("DepthAnything", "UperNet", "VitPose")
        },
        "open_clip MobileCLIP-S1": mobile_clip,
        "transformers RT-DETR": rt_detr,
        "torchaudio Conformer, lengths": lengths_of_conformer,
    }
    return {**networks, **OTHERS}
