# SPDX-License-Identifier: Apache-2.0
"""No argument of a layer or a function of PyTorch is ignored: a few of campaigns/arguments.py, which has them all."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from arguments import CALLS, examine  # noqa: E402
from torch import nn  # noqa: E402

from exactqat import qat  # noqa: E402

AGREE = (
    "nn.Conv2d(6, 6, (3, 2), padding='same', padding_mode='reflect')",
    "nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1)",
    "nn.AvgPool2d(3, divisor_override=4)",
    "nn.Softplus(beta=0.3)",
    "F.normalize(eps=2.0)",
    "F.cosine_similarity(eps=0.5)",
    "F.interpolate(scale_factor=1.7, mode='bilinear', recompute_scale_factor=True)",
    "torch.var(1, correction=2)",
    "nn.MultiheadAttention(8, 2, add_zero_attn=True)(need_weights=False)",
)
REFUSED = {
    "nn.MaxPool2d(3, return_indices=True)": " MaxPool2d: return_indices=True is given, .* False is allowed",
    "nn.AdaptiveMaxPool2d(2, return_indices=True)": "AdaptiveMaxPool2d: return_indices=True is given, .* False",
    "nn.MaxUnpool2d(2)": "F.max_pool2d: return_indices=True is given",
    "F.interpolate(size=(4, 4), mode='bicubic', antialias=True)": "F.interpolate: antialias=True is given, False",
    "F.normalize(p=3.0)": r"ord=3.0 is given, 1, 2 and infinity are allowed",
    "torch.round(decimals=1)": "torch.round: decimals=1 is given, 0 is allowed",
    "torch.div(3, rounding_mode='trunc')": "torch.div: rounding_mode='trunc' is given, None and 'floor' are allowed",
    "F.scaled_dot_product_attention(dropout_p)": r"Call model.eval\(\) before prepare",
    "nn.InstanceNorm2d(6, track_running_stats=True)": r"Call model.eval\(\) before prepare",
    "nn.LSTM(8, 6, proj_size=3)": "LSTM: proj_size=3 is given, 0 is allowed",
    "nn.ConvTranspose2d(6, 4, 3, dilation=2)": r"with dilation \(2, 2\)",
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", AGREE)
def test_arguments_do_what_they_do_in_pytorch(name: str) -> None:
    assert examine(name, exact=False) == "agrees"


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name: str) -> None:
    answer = examine(name, exact=False)
    assert answer.startswith("refused") and re.search(REFUSED[name], answer), answer


def test_batch_statistics_in_evaluation_are_refused() -> None:
    name = next(name for name in CALLS if name.startswith("F.batch_norm") and name.endswith("training=True)"))
    assert "in evaluation it computes something else" in examine(name, exact=False)

    class Normalized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)

    with pytest.raises(qat.UnsupportedOperator, match="training=True is given, in evaluation too"):
        qat.prepare(Normalized().eval(), torch.rand(4, 3, 5, 5))
