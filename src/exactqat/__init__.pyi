# SPDX-License-Identifier: Apache-2.0
# Made by docs/stubs.py from the declarations in operators/; do not edit.

from exactqat import deploy as deploy
from exactqat import nn as nn
from exactqat import qat as qat
from exactqat import quantization as quantization
from exactqat import raw_ops as raw_ops
from exactqat.cpu import (
    get_num_threads as get_num_threads,
)
from exactqat.cpu import (
    set_num_threads as set_num_threads,
)
from exactqat.gradients import (
    grad_pass_through as grad_pass_through,
)
from exactqat.quantization import (
    fake_quant_with_min_max_args as fake_quant_with_min_max_args,
)
from exactqat.quantization import (
    fake_quant_with_min_max_args_gradient as fake_quant_with_min_max_args_gradient,
)
from exactqat.quantization import (
    fake_quant_with_min_max_vars as fake_quant_with_min_max_vars,
)
from exactqat.quantization import (
    fake_quant_with_min_max_vars_gradient as fake_quant_with_min_max_vars_gradient,
)
from exactqat.quantization import (
    fake_quant_with_min_max_vars_per_channel as fake_quant_with_min_max_vars_per_channel,
)
from exactqat.quantization import (
    fake_quant_with_min_max_vars_per_channel_gradient as fake_quant_with_min_max_vars_per_channel_gradient,
)

__version__: str

__all__ = [
    "get_num_threads",
    "grad_pass_through",
    "nn",
    "quantization",
    "raw_ops",
    "set_num_threads",
    "fake_quant_with_min_max_args",
    "fake_quant_with_min_max_args_gradient",
    "fake_quant_with_min_max_vars",
    "fake_quant_with_min_max_vars_gradient",
    "fake_quant_with_min_max_vars_per_channel",
    "fake_quant_with_min_max_vars_per_channel_gradient",
]
