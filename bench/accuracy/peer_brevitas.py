# SPDX-License-Identifier: Apache-2.0
"""Brevitas: layers with quantized weights, inputs and biases; PTQ by calibration and bias correction, and QAT. Its file
is ONNX with QuantizeLinear and Clip, which ONNX Runtime runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import brevitas.nn as qnn
import torch
from brevitas.export import export_onnx_qcdq
from brevitas.graph.calibrate import bias_correction_mode, calibration_mode
from brevitas.graph.quantize import layerwise_quantize
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int32Bias
from exchange import Case, Computes, Offer, main, of_module, session
from torch import nn


def plain(model: nn.Module) -> nn.Module:
    """The network with convolutions of PyTorch's own class, since Brevitas leaves any other in float: one that pads its
    input first becomes that padding and a convolution. It is changed in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Conv2d) and type(layer) is not nn.Conv2d:
            parent, _, own = name.rpartition(".")
            paddings = list(layer.children())
            layer.__class__ = nn.Conv2d
            setattr(model.get_submodule(parent), own, nn.Sequential(*paddings, layer))
    return model


def quantized(case: Case) -> Any:
    settings = {
        "weight_quant": Int8WeightPerChannelFloat,
        "weight_bit_width": case.weights,
        "input_quant": Int8ActPerTensorFloat,
        "input_bit_width": case.activations,
        "bias_quant": Int32Bias,
        "return_quant_tensor": False,
    }
    transposed = {**settings}
    network, example = plain(copy.deepcopy(case.model)), torch.from_numpy(case.calibration[:2])
    with torch.no_grad():
        assert torch.equal(network(example), case.model(example)), "the network in layers of PyTorch's is another one"
    model = layerwise_quantize(
        network,
        {
            nn.Conv2d: (qnn.QuantConv2d, settings),
            nn.ConvTranspose2d: (qnn.QuantConvTranspose2d, transposed),
            nn.Linear: (qnn.QuantLinear, settings),
        },
    )
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear)]
    in_float = {type(module).__name__ for module in layers if not hasattr(module, "weight_quant")}
    assert not in_float, f"layers that would stay in float: {', '.join(in_float)}"
    # The input of the network keeps eight bits.
    first = next(module for module in model.modules() if isinstance(module, qnn.QuantConv2d | qnn.QuantLinear))
    if case.activations != 8:
        first.input_quant.fused_activation_quant_proxy.tensor_quant.msb_clamp_bit_width_impl = type(
            first.input_quant.fused_activation_quant_proxy.tensor_quant.msb_clamp_bit_width_impl
        )(8)
    return model


def written(case: Case, model: Any, name: str) -> Computes | None:
    """None if a bias is beyond int32, which the file would hold it in: that of a channel with next to no weight."""
    path: Path = case.folder / f"brevitas_{name}.onnx"
    example = torch.from_numpy(case.calibration[:2])
    axes = {"x": {0: "n"}, "y": {0: "n"}}
    try:
        export_onnx_qcdq(model, args=example, export_path=str(path), input_names=["x"], output_names=["y"],
                         dynamic_axes=axes, dynamo=False, opset_version=17)  # fmt: skip
    except RuntimeError as error:
        if "QuantTensor not valid" not in str(error):
            raise
        return None
    return session(path, True)


def offers(case: Case) -> list[Offer]:
    model = quantized(case).eval()
    batches = torch.from_numpy(case.calibration).split(64)
    with torch.no_grad():
        for mode in (calibration_mode, bias_correction_mode):
            with mode(model):
                for batch in batches:
                    model(batch)
    results = [Offer("PTQ", of_module(model), written(case, model, "ptq"))]
    trainings = {rate: trained(case, model, rate, "") for rate in case.rates}
    results += [offer for versions in trainings.values() for offer in versions]
    if trainings and case.taught:
        scores = {
            rate: max(case.score((offer.runtime or offer.predicted)(case.parts[1][0])) for offer in versions)
            for rate, versions in trainings.items()
        }
        results += trained(case, model, max(scores, key=lambda rate: scores[rate]), ", taught")
    return results


def trained(case: Case, model: nn.Module, rate: float, way: str) -> list[Offer]:
    """A copy of a calibrated network after training, and that with other statistics."""
    network = copy.deepcopy(model).train()
    case.tuned(network, rate, taught=bool(way))
    versions = {"": network, ", statistics again": case.resettled(network)}
    offers = []
    for number, (statistics, version) in enumerate(versions.items()):
        if version is not None:
            method = f"QAT {rate:g}{statistics}{way}"
            file = written(case, version.eval(), f"qat_{rate:g}_{number}{way[2:]}")
            offers.append(Offer(method, of_module(version), file))
    return offers


if __name__ == "__main__":
    main(offers)
