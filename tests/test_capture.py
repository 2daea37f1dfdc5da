# SPDX-License-Identifier: Apache-2.0
"""A captured network computes what its model does, in training and in evaluation, and says where everything stands."""

from __future__ import annotations

import os
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from network_interpreter import differences, run  # noqa: E402
from plain_networks import NETWORKS  # noqa: E402
from torch import nn  # noqa: E402

from exactqat.qat.capture_torch import CaptureError, capture  # noqa: E402
from exactqat.qat.network import KINDS  # noqa: E402

# The others run where EXACTQAT_ALL_NETWORKS is set (a minute).
SAMPLE = (
    *("unet_bilinear_size", "yolo_v8_flat", "ssd_shared_head", "ds_cnn", "causal_tcn", "lstm_time_first", "crnn"),
    *("shuffle_units", "face_landmarks", "two_inputs", "tiny_vit", "keyword_transformer_with_weights", "sdpa_encoder"),
    *("einsum_attention", "cbam", "pads", "dynamic_same", "scalar_arithmetic", "norms", "layer_scale_net", "bi_fpn"),
    *("weight_standardised", "weight_normed", "statistics_pooling", "pieces", "functional", "subclasses"),
    *("optional_argument", "awkward_names", "shape_branches", "bare_linear", "tied_weights"),
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def captured(model: nn.Module, *examples: object):
    """The network, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return capture(model, examples)


def agree(model: nn.Module, *examples: object, tolerance: float = 1e-5):
    """Captures a model and compares it in both modes, and with another batch than the example's."""
    network = captured(model, *examples)
    check(network, model, *examples, tolerance=tolerance)
    return network


def check(network, model: nn.Module, *examples: object, tolerance: float = 1e-5) -> None:
    assert {step.kind for step in network.steps} <= KINDS.keys() - {"unsupported"}, [
        (step.label, step.attributes.get("reason")) for step in network.steps if step.kind == "unsupported"
    ]
    larger = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t.flip(0), t * 0.5]), examples)
    for training in (False, True):
        assert differences(network, model, larger, training) <= tolerance, training


def kinds(network) -> list[str]:
    return [step.kind for step in network.steps]


class Function(nn.Module):
    """A module of a function of (module, *inputs) with a few layers at hand."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 8)
        self.bn, self.identity, self.drop = nn.BatchNorm2d(4), nn.Identity(), nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(8) * 0.1)

    def forward(self, *inputs):
        return self.function(self, *inputs)


IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.mark.parametrize("name", NETWORKS if os.environ.get("EXACTQAT_ALL_NETWORKS") else SAMPLE)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_plain_networks(name: str) -> None:
    model, examples = NETWORKS[name]()
    agree(model, *examples)


def test_the_sample_is_of_the_networks() -> None:
    assert set(SAMPLE) <= NETWORKS.keys()
